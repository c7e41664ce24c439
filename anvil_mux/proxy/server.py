"""The server: its listening socket, its connections, the threads that serve requests, and a way to stop.

A connection has a thread from the last byte of a request's head to the last byte of its answer, and for a
moment after that, in which the next request may come. Before and between it is watched: one thread waits in
epoll for all of them with what has come of their heads, and for new ones; so ten thousand idle connections,
and clients that send a head byte by byte, cost no thread. With TLS a connection is watched until its first
byte has come, and the thread of its request does the handshake first. One over the limit is told so by the
accepting thread and closed.

Rules:

* A watched connection belongs to the accepting thread, any other to the thread that serves it. ``_watch``
  hands it over; when its head is whole, or can be none, ``_serve`` hands it back.
* Each descriptor is armed for one event (EPOLLONESHOT): what a busy connection sends wakes nobody here.
* What goes wrong with one connection ends that connection, never the thread.
* Watched connections are kept in the order in which they began to wait, so a look at the first ones finds all
  that have waited for too long.

``drain`` ends it all in order: idle connections closed, waiting requests refused, running ones finished in
time. Until then whoever comes is told that the program ends: /readyz by its status, and requests for models
with when to try again.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import select
import socket
import ssl
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from anvil_mux.clock import note_mistake, safely
from anvil_mux.errors import BadRequest, ClientGone, MuxError, Overloaded
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import api, http1
from anvil_mux.proxy import client as limits
from anvil_mux.proxy.client import BodyMemory, Client
from anvil_mux.proxy.connections import accepted
from anvil_mux.proxy.handler import Handler
from anvil_mux.proxy.reply import JSON, date

STACK_BYTES = 512 * 1024
"""The stack of a thread that serves requests; thousands of them must fit."""
BACKLOG = 4096
"""Connections that the kernel keeps until they are accepted."""
ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before those that are watched get a look."""
POLL_SECONDS = 0.5
SWEEP_SECONDS = 0.5
STARVED_SECONDS = 0.5
"""Seconds between two tries to accept a connection when the program may open no more files."""
REFUSAL_SECONDS = 1.0
"""How long the last ones who come while the program ends may take to be told so."""
PULSE_SECONDS = 10.0
"""The accepting thread, which comes by twice a second, hangs if it was not seen for so long."""
SPARE_SECONDS = 10.0
"""How long a thread stays that has nothing to do."""

ACCEPTOR = "acceptor"
ARMED = select.EPOLLIN | select.EPOLLONESHOT

log = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each connection inherits it
    except BaseException:
        listener.close()
        raise
    return listener


class Server:
    """Accepts connections at a listening socket for ``handler``, at most ``max_connections`` at once."""

    def __init__(
        self,
        listener: socket.socket,
        handler: Handler,
        mux: Multiplexer,
        *,
        max_connections: int = 16384,
        max_bodies: int = 1 << 30,
        tls: ssl.SSLContext | None = None,
        client_timeout: float = 60.0,
        pages: socket.socket | None = None,
    ) -> None:
        """``client_timeout``: how long a client may take nothing of what it is sent. ``pages``: listens at
        the port that is for pages of engines.
        """
        self.listeners = {each.fileno(): each for each in (listener, pages) if each}
        """The listening sockets, by descriptor."""
        self._pages = pages
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.handler = handler
        self.max_connections = max_connections
        self.bodies = BodyMemory(max_bodies)
        self.tls = tls
        self.client_timeout = client_timeout
        self.clients: set[Client] = set()
        self.busy: set[Client] = set()
        """Connections within a request. Many threads change such sets, in single atomic operations."""
        self._mux = mux
        self._threads = Threads()
        self._last_head: http1.LastHead[http1.Request] | None = None
        """The one of the connection that ended last."""
        self._epoll = select.epoll()
        self._idle: dict[int, Client] = {}
        """Watched connections that have sent nothing, by descriptor. Any thread adds, the accepting one takes
        out."""
        self._begun: dict[int, Client] = {}
        """Watched connections that have sent a part of a head, in the order in which it began; likewise."""
        self._unknown: dict[int, Client] = {}
        """Watched connections without an admitted request, in the order in which they began to wait."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._deaf_until = 0.0
        """When the listener is asked again, after no file could be opened."""
        self._pulse = time.monotonic()
        """The moment at which the accepting thread last came by."""
        self._stops = False
        self._stopped = threading.Event()
        self._stopped.set()
        threading.stack_size(STACK_BYTES)

    @property
    def hangs(self) -> bool:
        """Whether connections are not accepted, though they should be."""
        return not self._stops and time.monotonic() - self._pulse > PULSE_SECONDS

    # The accepting thread

    def serve_forever(self, poll_seconds: float = POLL_SECONDS) -> None:
        """Serve until ``shutdown``; then watched connections are ended, but those whose head is there."""
        self._stopped.clear()
        try:
            if self._stops:
                return  # the listener may be closed already
            self._listen()
            self._loop(poll_seconds)
            self._for_each([*self._idle.values(), *self._begun.values()], partial(self._read, last=True))
        finally:
            self._stopped.set()

    def _loop(self, poll_seconds: float) -> None:
        sweep_at = 0.0
        while not self._stops:
            events = self._epoll.poll(poll_seconds)
            now = time.monotonic()
            for descriptor, _ in events:
                if listener := self.listeners.get(descriptor):
                    self._accept_safely(listener)
                elif client := self._begun.get(descriptor) or self._idle.get(descriptor):
                    self._for_each([client], self._read)
            if (surplus := len(self._begun) - limits.HEADS) > 0:
                self._for_each(self._waiting_since(self._begun, now, surplus), self._refuse_late)
            if now >= sweep_at:
                sweep_at = now + min(SWEEP_SECONDS, poll_seconds)
                safely(ACCEPTOR, partial(self._sweep, now), None)
            if self._deaf_until and now >= self._deaf_until:
                self._deaf_until = 0.0
                self._listen()

    def _listen(self) -> None:
        for listener in self.listeners.values():
            self._epoll.register(listener, select.EPOLLIN)

    def _sweep(self, now: float) -> None:
        self._for_each(self._waiting_since(self._idle, now - limits.IDLE_SECONDS), self.end)
        self._for_each(self._waiting_since(self._begun, now - limits.HEAD_SECONDS), self._refuse_late)
        self._pulse = time.monotonic()

    def _for_each(self, clients: Iterable[Client], do: Callable[[Client], None]) -> None:
        """Do something with watched connections; a mistake with one ends that one."""
        for client in clients:
            try:
                do(client)
            except Exception as error:
                note_mistake(ACCEPTOR, error)
                self._take_out(client)
                self.end(client)

    def _accept_safely(self, listener: socket.socket) -> None:
        try:
            self._accept(listener)
        except Exception as error:
            note_mistake(ACCEPTOR, error)
            self._pause_accepting(SWEEP_SECONDS)  # what led to it may wait to be accepted still

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted_socket, address = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    if self._make_room():
                        continue
                    log.warning("no connection can be accepted (%s): see ulimit -n", error.strerror)
                    self._pause_accepting(STARVED_SECONDS)  # the listener stays readable
                return
            self.admit(accepted_socket, address[0], at_pages=listener is self._pages)

    def _pause_accepting(self, seconds: float) -> None:
        if not self._deaf_until:
            for listener in self.listeners.values():
                self._epoll.unregister(listener)
        self._deaf_until = time.monotonic() + seconds

    def admit(self, accepted_socket: socket.socket, address: str, *, at_pages: bool = False) -> None:
        """Take a new connection in, or turn it away.

        One over the limit takes the place of a connection that waits without having had a request admitted.
        """
        is_full = len(self.clients) >= self.max_connections
        if is_full and not self._make_room() and not _is_probe(accepted_socket):
            self._turn_away(accepted_socket, f"{self.max_connections} connections are open already")
            return
        client = Client(
            accepted_socket,
            address,
            patience=self.client_timeout,
            last_head=self._last_head,
            memory=self.bodies,
            tls=self.tls,
            at_pages=at_pages,
        )
        self.clients.add(client)
        self._ending(self._watch if client.tls else self._begin, client)

    def _make_room(self) -> bool:
        """End the connection that has waited longest of those without an admitted request.

        Return whether there was one. Where there are keys, whoever shows none cannot keep others out.
        """
        for descriptor, client in list(self._unknown.items())[:1]:
            self._forget(descriptor)
            self.end(client)
            return True
        return False

    def _begin(self, client: Client) -> None:
        """Most clients have sent their request already when their connection is accepted."""
        try:
            whole = client.receive()
        except ClientGone:
            self.end(client)
        else:
            self._serve(client) if whole else self._watch(client)

    def _watch(self, client: Client) -> None:
        """Wait for the next request of a connection; any thread that it belongs to."""
        if self._stops:
            self.end(client)
            return
        client.since, descriptor = time.monotonic(), client.socket.fileno()
        if not client.is_known:
            self._unknown[descriptor] = client
        (self._begun if client.has_begun else self._idle)[descriptor] = client
        self._arm(client)

    def _arm(self, client: Client) -> None:
        if client.in_epoll:
            self._epoll.modify(client.socket, ARMED)
        else:
            client.in_epoll = True
            self._epoll.register(client.socket, ARMED)

    def _read(self, client: Client, *, last: bool = False) -> None:
        """Take in what has come. ``last``: it is ended unless a whole head is there."""
        try:
            whole = client.receive()
        except ClientGone:
            whole, last = False, True
        if whole or last:
            self._take_out(client)
            self._serve(client) if whole else self.end(client)
            return
        descriptor = client.socket.fileno()
        if client.has_begun and self._idle.pop(descriptor, None) is not None:
            client.since = time.monotonic()
            self._begun[descriptor] = client
        self._arm(client)

    def _waiting_since(
        self, watched: dict[int, Client], moment: float, most: int | None = None
    ) -> list[Client]:
        """Take out those that have waited since then, or for longer; only the first ``most``."""
        found = []
        for descriptor, client in list(watched.items())[:most]:
            if client.since > moment:
                break
            self._forget(descriptor)
            found.append(client)
        return found

    def _take_out(self, client: Client) -> None:
        self._forget(client.socket.fileno())

    def _forget(self, descriptor: int) -> None:
        self._begun.pop(descriptor, None)
        self._idle.pop(descriptor, None)
        self._unknown.pop(descriptor, None)

    def _serve(self, client: Client) -> None:
        self._run(self._serve_requests, client)

    def _refuse_late(self, client: Client) -> None:
        self._run(self._refuse_late_head, client)

    def _run(self, task: Callable[[Client], object], client: Client) -> None:
        try:
            self._threads.run(partial(self._ending, task, client))
        except RuntimeError:  # no more threads
            self.clients.discard(client)
            self._turn_away(client.socket, "no further thread can be started (see the limits of the service)")

    def _ending(self, task: Callable[[Client], object], client: Client) -> None:
        """Do ``task``; a mistake in it ends the connection."""
        try:
            task(client)
        except BaseException:
            self.end(client)
            raise

    def end(self, client: Client) -> None:
        """Close a connection. Any thread that it belongs to."""
        self.clients.discard(client)
        client.socket.close()
        self._last_head = client.last_head

    def _turn_away(self, refused: socket.socket, why: str) -> None:
        error = Overloaded(f"overloaded: {why}. Try again.")
        headers = [JSON, (b"Connection", b"close"), date(), *api.error_headers(error)]
        try:
            refused.send(
                http1.response(503, headers, api.error_body("openai", error, "")), socket.MSG_DONTWAIT
            )
            refused.shutdown(socket.SHUT_WR)
            refused.recv(65536, socket.MSG_DONTWAIT)
        except OSError:
            pass
        refused.close()

    # In the thread of a request

    def _serve_requests(self, client: Client) -> None:
        """Serve its requests as long as they follow each other; then it is watched again, or it is over."""
        try:
            if client.tls:
                client.socket = accepted(client.socket, client.tls, 2 * self.client_timeout)
                client.tls, client.in_epoll = None, False
            while True:
                request = client.next_request()
                if request is None:
                    return self._watch(client)
                if not self._serve_one(client, request):
                    break
        except ClientGone:
            return self.end(client)
        except MuxError as error:
            self.handler.refuse_bad_head(client, error)
        return self._part(client)

    def _serve_one(self, client: Client, request: http1.Request) -> bool:
        """Whether another request may follow."""
        self.busy.add(client)
        try:
            keep = self.handler.serve(client, request)
            return keep and client.discard_body() and not self.handler.local.probes.draining
        finally:
            client.let_go()
            self.busy.discard(client)

    def _refuse_late_head(self, client: Client) -> None:
        seconds, most = limits.HEAD_SECONDS, limits.HEADS
        text = f"its head took too long: it has {seconds:g} s, and less while more than {most:,} come"
        self.handler.refuse_bad_head(client, BadRequest(text, status=408))
        self._part(client)

    def _part(self, client: Client) -> None:
        if client.has_input_left:
            client.linger()
        self.end(client)

    # The end

    def refuse(self) -> None:
        """Let nobody in from now on, and tell everybody so; what runs goes on."""
        self.handler.local.drain()
        self._mux.refuse()

    def drain(self, grace: float) -> bool:
        """Stop serving; True if every request ended within ``grace`` seconds.

        Not to be called in the thread that is in ``serve_forever``.
        """
        self.refuse()
        # Only what runs already is waited for: those who come now are refused, and may come without end.
        earlier, running = self.clients.copy(), self.busy.copy()
        deadline = time.monotonic() + grace
        while True:
            self._end_idle(earlier & self.clients)
            ended = not running & self.busy
            if ended or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        self.shutdown()
        self.close()
        self._end_idle(self.clients)
        deadline = time.monotonic() + REFUSAL_SECONDS
        while self.busy - running and time.monotonic() < deadline:
            time.sleep(0.05)
        return ended

    def _end_idle(self, clients: set[Client]) -> None:
        """End connections between two requests; what has arrived already is answered all the same."""
        for client in clients - self.busy.copy():
            try:
                client.socket.shutdown(socket.SHUT_RD)
            except OSError:
                pass

    def shutdown(self) -> None:
        """End ``serve_forever``, and wait until it has ended. Not to be called in its thread."""
        if self._stops:
            return
        self._stops = True
        os.eventfd_write(self._wake, 1)
        self._stopped.wait()

    def close(self) -> None:
        """Close the listening sockets, and what the accepting thread waited with."""
        for listener in self.listeners.values():
            listener.close()
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self._wake)


def _is_probe(connection: socket.socket) -> bool:
    """Return whether a whole request for /livez has come: that the program lives is told at any load."""
    try:
        head = connection.recv(limits.READ, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False
    return head.startswith((b"GET /livez ", b"HEAD /livez ")) and head.endswith(2 * http1.EMPTY_LINE)


class Threads:
    """Runs tasks, each in a thread of its own while it lasts. ``run`` is for one thread.

    To begin a thread costs more than a small request does. So one that has nothing to do stays for a while,
    and the one that was busy last is taken first: its stack is still in the CPU's cache, and the others can
    end.
    """

    def __init__(self) -> None:
        self._idle: list[_Spare] = []
        """The threads without a task. Each adds itself, and whoever takes one out has it."""
        self._numbers = itertools.count(1)

    def run(self, task: Callable[[], object]) -> None:
        """Have a thread do ``task``; RuntimeError if none can be begun."""
        try:
            spare = self._idle.pop()
        except IndexError:
            spare = _Spare(task)
            threading.Thread(
                target=self._work, args=(spare,), name=f"request-{next(self._numbers)}", daemon=True
            ).start()
        else:
            spare.task = task
            spare.comes.release()

    def _work(self, spare: _Spare) -> None:
        while task := spare.task:
            spare.task = None
            try:
                task()
            except Exception:
                log.exception("a connection failed")
            del task  # it holds its connection
            self._idle.append(spare)
            if not spare.comes.acquire(timeout=SPARE_SECONDS):
                try:
                    self._idle.remove(spare)
                except ValueError:
                    spare.comes.acquire()  # it was taken at this very moment


class _Spare:
    """A thread for one task after another: its next one, and the latch that says that there is one."""

    __slots__ = ("comes", "task")

    def __init__(self, task: Callable[[], object]) -> None:
        self.task: Callable[[], object] | None = task
        self.comes = allocate_lock()
        self.comes.acquire()


# The CPU that they run on.
#
# Python runs one thread at a time. A thread that wakes on a second CPU finds the interpreter taken, and the
# handing over from CPU to CPU costs a third more CPU for each request; when a thousand streams begin together
# their first bytes come several times later (docs/performance.md). So the threads that accept, serve, move
# streams and count run on one CPU, as ``taskset`` would have it. No other thread does, so engines, which
# inherit the CPUs of the thread that starts them, may always use all.

SLOW = 0.9
"""The part of the highest clock rate below which a CPU is slow, as the efficient cores of some machines."""

CPUs = frozenset[int]


def one_cpu(process: int, root: Path = Path("/sys/devices/system/cpu")) -> CPUs:
    """A CPU that is not slow, of those that the program may use; its process id chooses among them.

    So several programs on one machine have several CPUs.
    """
    found = sorted(_fast(CPUs(os.sched_getaffinity(0)), root))
    return CPUs([found[process % len(found)]])


def _fast(cpus: CPUs, root: Path) -> CPUs:
    """The CPUs that are not slow; all of them where nothing is known, as in virtual machines."""
    try:
        rates = {cpu: int((root / f"cpu{cpu}/cpufreq/cpuinfo_max_freq").read_text()) for cpu in cpus}
    except (OSError, ValueError):
        return cpus
    return CPUs(cpu for cpu, rate in rates.items() if rate >= SLOW * max(rates.values()))


def run_on(cpus: CPUs) -> None:
    """Have the calling thread, and those that it begins, run on these CPUs alone."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        pass  # the CPU was taken away; the thread runs elsewhere
