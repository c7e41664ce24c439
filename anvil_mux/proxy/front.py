"""The connections that have no request to serve: one thread waits for all of them, and for new ones.

A connection has a thread from the last byte of a request's head to the last byte of its answer, and for a
moment after that. Before and between it is watched here, with what has come of a head; so ten thousand idle
connections, and clients that send a head byte by byte, cost no thread. The thread that runs it also accepts.

Rules:

* A watched connection belongs to the front's thread, any other to the thread that serves it. ``watch`` hands
  it over; when its head is whole, or can be none, the front hands it back (``Hands.serve``).
* Each descriptor is armed for one event (EPOLLONESHOT): what a busy connection sends wakes nobody here.
* What goes wrong with one connection ends that connection.
* Watched connections are kept in the order in which they began to wait, so a look at the first ones finds all
  that have waited for too long.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from anvil_mux.clock import note_mistake, safely
from anvil_mux.errors import ClientGone
from anvil_mux.proxy import client as limits
from anvil_mux.proxy.client import Client

THREAD = "acceptor"
SWEEP_SECONDS = 0.5
ARMED = select.EPOLLIN | select.EPOLLONESHOT


class ClientConnection:
    """One client's connection, watched by the front or with the thread that serves its request."""

    __slots__ = ("client", "is_known", "since", "socket")

    def __init__(self, connection: socket.socket, client: Client) -> None:
        self.socket = connection
        self.client = client
        self.since = 0.0
        """When it began to be watched, or when the first byte of its head came."""
        self.is_known = False
        """Whether the front's epoll has it."""


class Hands(Protocol):
    """The calls that the front makes in its own thread; none of them may wait."""

    def accept(self) -> None: ...
    def serve(self, connection: ClientConnection) -> None: ...
    def refuse_late(self, connection: ClientConnection) -> None: ...
    def end(self, connection: ClientConnection) -> None: ...
    def look(self) -> None: ...


class Front:
    """Waits for new connections, and for all that are watched."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self._listener: socket.socket
        self._epoll = select.epoll()
        self._idle: dict[int, ClientConnection] = {}
        """Connections that have sent nothing, by descriptor. Any thread adds, the front's takes out."""
        self._begun: dict[int, ClientConnection] = {}
        """Connections that have sent a part of a head, in the order in which these began; likewise."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._deaf_until = 0.0
        """When the listener is asked again, after no file could be opened."""
        self._stops = False
        self._stopped = threading.Event()
        self._stopped.set()

    def __len__(self) -> int:
        """How many connections are watched."""
        return len(self._idle) + len(self._begun)

    def watch(self, connection: ClientConnection) -> None:
        """Wait for the next request of a connection, which is the front's from now on. Any thread."""
        if self._stops:
            self._hands.end(connection)
            return
        connection.since = time.monotonic()
        descriptor = connection.socket.fileno()
        (self._begun if connection.client.has_begun else self._idle)[descriptor] = connection
        self._arm(connection, descriptor)

    def _arm(self, connection: ClientConnection, descriptor: int) -> None:
        if connection.is_known:
            self._epoll.modify(descriptor, ARMED)
        else:
            connection.is_known = True
            self._epoll.register(descriptor, ARMED)

    def pause_accepting(self, seconds: float) -> None:
        """Accept nobody for a while. The front's thread."""
        self._epoll.unregister(self._listener)
        self._deaf_until = time.monotonic() + seconds

    def run(self, listener: socket.socket, poll_seconds: float) -> None:
        """Serve until ``stop``; then the watched connections are ended, but those whose head is there."""
        self._listener = listener
        self._stopped.clear()
        try:
            if self._stops:
                return  # the listener may be closed already
            self._epoll.register(self._listener, select.EPOLLIN)
            self._loop(poll_seconds)
            for connection in [*self._idle.values(), *self._begun.values()]:
                last = partial(self._read, connection.socket.fileno(), time.monotonic(), last=True)
                safely(THREAD, last, None)
        finally:
            self._stopped.set()

    def _loop(self, poll_seconds: float) -> None:
        listener, sweep_at = self._listener.fileno(), 0.0
        while not self._stops:
            events = self._epoll.poll(poll_seconds)
            now = time.monotonic()
            for descriptor, _ in events:
                if descriptor == listener:
                    self._accept()
                else:
                    self._read_safely(descriptor, now)
            if (surplus := len(self._begun) - limits.HEADS) > 0:
                self._hand_over(self._hands.refuse_late, _waiting_since(self._begun, now, surplus))
            if now >= sweep_at:
                sweep_at = now + min(SWEEP_SECONDS, poll_seconds)
                safely(THREAD, partial(self._sweep, now), None)
            if self._deaf_until and now >= self._deaf_until:
                self._deaf_until = 0.0
                self._epoll.register(self._listener, select.EPOLLIN)

    # A mistake ends what it was about, never the thread

    def _accept(self) -> None:
        try:
            self._hands.accept()
        except Exception as error:
            note_mistake(THREAD, error)
            self.pause_accepting(SWEEP_SECONDS)  # what led to it may wait to be accepted still

    def _read_safely(self, descriptor: int, now: float) -> None:
        connection = self._begun.get(descriptor) or self._idle.get(descriptor)
        try:
            self._read(descriptor, now)
        except Exception as error:
            note_mistake(THREAD, error)
            self._take(descriptor)
            if connection:
                self._hands.end(connection)

    def _hand_over(
        self, take: Callable[[ClientConnection], None], connections: Iterable[ClientConnection]
    ) -> None:
        for connection in connections:
            try:
                take(connection)
            except Exception as error:
                note_mistake(THREAD, error)
                self._hands.end(connection)

    def _read(self, descriptor: int, now: float, *, last: bool = False) -> None:
        connection = self._begun.get(descriptor) or self._idle.get(descriptor)
        if connection is None:
            return
        try:
            whole = connection.client.receive()
        except ClientGone:
            self._take(descriptor)
            self._hands.end(connection)
            return
        if whole or last:
            self._take(descriptor)
            self._hands.serve(connection) if whole else self._hands.end(connection)
            return
        if connection.client.has_begun and self._idle.pop(descriptor, None) is not None:
            connection.since = now
            self._begun[descriptor] = connection
        self._arm(connection, descriptor)

    def _take(self, descriptor: int) -> None:
        self._begun.pop(descriptor, None)
        self._idle.pop(descriptor, None)

    def _sweep(self, now: float) -> None:
        self._hand_over(self._hands.end, _waiting_since(self._idle, now - limits.IDLE_SECONDS))
        self._hand_over(self._hands.refuse_late, _waiting_since(self._begun, now - limits.HEAD_SECONDS))
        self._hands.look()

    def stop(self) -> None:
        """End ``run``, and wait until it has ended. Not to be called in its thread."""
        if self._stops:
            return
        self._stops = True
        os.eventfd_write(self._wake, 1)
        self._stopped.wait()

    def close(self) -> None:
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._wake)


def _waiting_since(
    watched: dict[int, ClientConnection], moment: float, most: int | None = None
) -> list[ClientConnection]:
    """Take out those that have waited since then, or for longer; only the first ``most``."""
    found = []
    for descriptor, connection in list(watched.items())[:most]:
        if connection.since > moment:
            break
        if watched.pop(descriptor, None) is not None:
            found.append(connection)
    return found
