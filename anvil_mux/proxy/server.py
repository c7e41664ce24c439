"""The listening socket, threads that serve requests, and a way to stop.

A new connection is kept at the front (front.py) until a request's head has come; then a thread (threads.py)
reads it, has the handler answer it, and waits for a moment for the next one before it gives the connection
back. With TLS it is kept there until its first byte has come, and the thread does the handshake first. A
connection over the limit is told so by the accepting thread and closed. ``drain`` ends it all in order: idle
connections closed, waiting requests refused, running ones finished in time. Until then whoever comes is told
that the program ends: /readyz by its status, and requests for models with when to try again.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import ThreadingHTTPServer
from ipaddress import ip_address
from socketserver import BaseRequestHandler, TCPServer
from typing import Any

from anvil_mux.errors import BadRequest, ClientGone, MuxError, Overloaded
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import api, http1
from anvil_mux.protocol.lasthead import LastHead
from anvil_mux.proxy import client as limits
from anvil_mux.proxy.client import BodyMemory, Client
from anvil_mux.proxy.front import ClientConnection, Front
from anvil_mux.proxy.handler import Handler
from anvil_mux.proxy.reply import date
from anvil_mux.proxy.threads import Threads
from anvil_mux.proxy.tls import accepted

STACK_BYTES = 512 * 1024
"""The stack of a thread that serves requests; thousands of them must fit."""
ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before those that are watched get a look."""
STARVED_SECONDS = 0.5
"""Seconds between two tries to accept a connection when the program may open no more files."""
REFUSAL_SECONDS = 1.0
"""How long the last ones who come while the program ends may take to be told so."""
PULSE_SECONDS = 10.0
"""The accepting thread, which comes by twice a second, hangs if it was not seen for so long."""

log = logging.getLogger(__name__)


class Server(ThreadingHTTPServer):
    """Accepts connections on ``address`` for ``handler``, at most ``max_connections`` at once."""

    request_queue_size = 4096
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        handler: Handler,
        mux: Multiplexer,
        *,
        max_connections: int = 16384,
        max_bodies: int = 1 << 30,
        tls: ssl.SSLContext | None = None,
        client_timeout: float = 60.0,
    ) -> None:
        """``client_timeout``: how long a client may take nothing of what it is sent."""
        self.tls = tls
        self.client_timeout = client_timeout
        self.handler = handler
        self.connections: set[ClientConnection] = set()
        self.busy: set[ClientConnection] = set()
        """Connections within a request. Many threads change such sets, in single atomic operations."""
        self._mux = mux
        self._pool = Threads()
        self._last_head: LastHead[http1.Request] = LastHead()
        """The one of the connection that ended last."""
        self._pulse = time.monotonic()
        """The moment at which the accepting thread last came by."""
        self._over = False
        self.max_connections = max_connections
        self.bodies = BodyMemory(max_bodies)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        threading.stack_size(STACK_BYTES)
        self.front = Front(self)
        super().__init__(address, BaseRequestHandler)
        handler.only_local_hosts = _is_loopback(self.server_address[0])

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's would look the host's name up
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each connection inherits it

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        self.front.run(self.socket, poll_interval)

    def shutdown(self) -> None:
        self.front.stop()

    def server_close(self) -> None:
        super().server_close()
        self.front.close()

    @property
    def hangs(self) -> bool:
        """Whether connections are not accepted, though they should be."""
        return not self._over and time.monotonic() - self._pulse > PULSE_SECONDS

    # What the front calls

    def look(self) -> None:
        self._pulse = time.monotonic()

    def accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                request, address = self.get_request()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    log.warning("no connection can be accepted (%s): see ulimit -n", error.strerror)
                    self.front.pause_accepting(STARVED_SECONDS)  # the listener stays readable
                return
            self.process_request(request, address)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.connections) >= self.max_connections:
            self._turn_away(request)
            return
        client = Client(
            request,
            client_address[0],
            self.client_timeout,
            self._last_head.copy(),
            memory=self.bodies,
            tls=self.tls,
        )
        connection = ClientConnection(request, client)
        self.connections.add(connection)
        self._ending(self.front.watch if client.tls else self._begin, connection)

    def _begin(self, connection: ClientConnection) -> None:
        """Most clients have sent their request already when their connection is accepted."""
        try:
            whole = connection.client.receive()
        except ClientGone:
            self.end(connection)
        else:
            self.serve(connection) if whole else self.front.watch(connection)

    def serve(self, connection: ClientConnection) -> None:
        self._run(self._serve, connection)

    def refuse_late(self, connection: ClientConnection) -> None:
        self._run(self._refuse_late, connection)

    def _run(self, task: Callable[[ClientConnection], object], connection: ClientConnection) -> None:
        try:
            self._pool.run(partial(self._ending, task, connection))
        except RuntimeError:  # no more threads
            self.connections.discard(connection)
            self._turn_away(connection.socket)

    def _ending(self, task: Callable[[ClientConnection], object], connection: ClientConnection) -> None:
        """Do ``task``; a mistake in it ends the connection."""
        try:
            task(connection)
        except BaseException:
            self.end(connection)
            raise

    def end(self, connection: ClientConnection) -> None:
        """Close a connection. Any thread that it belongs to."""
        self.connections.discard(connection)
        connection.socket.close()
        self._last_head = connection.client.last_head

    # In the thread of a request

    def _serve(self, connection: ClientConnection) -> None:
        """Serve its requests as long as they follow each other; then the front watches it, or it is over."""
        client, returns = connection.client, False
        try:
            if client.tls:
                connection.socket = client.socket = accepted(
                    client.socket, client.tls, 2 * self.client_timeout
                )
                client.tls, connection.is_known = None, False
            while True:
                request = client.next_request()
                if request is None:
                    returns = True
                    break
                if not self._serve_one(connection, request):
                    break
        except ClientGone:
            self.end(connection)
            return
        except MuxError as error:
            self.handler.refuse_unread(client, error)
        if returns:
            self.front.watch(connection)
        else:
            self._part(connection)

    def _serve_one(self, connection: ClientConnection, request: http1.Request) -> bool:
        """Whether another request may follow."""
        client = connection.client
        self.busy.add(connection)
        try:
            keep = self.handler.serve(client, request)
            return keep and client.discard_body() and not self.handler.probes.draining
        finally:
            client.let_go()
            self.busy.discard(connection)

    def _refuse_late(self, connection: ClientConnection) -> None:
        seconds, most = limits.HEAD_SECONDS, limits.HEADS
        text = f"its head took too long: it has {seconds:g} s, and less while more than {most:,} come"
        self.handler.refuse_unread(connection.client, BadRequest(text, status=408))
        self._part(connection)

    def _part(self, connection: ClientConnection) -> None:
        if connection.client.is_unread:
            connection.client.linger()
        self.end(connection)

    # The limit, and the end

    def _turn_away(self, request: socket.socket) -> None:
        error = Overloaded(f"overloaded: {self.max_connections} connections are open already. Try again.")
        headers = [
            (b"Content-Type", b"application/json"),
            (b"Connection", b"close"),
            date(),
            *api.error_headers(error),
        ]
        try:
            request.send(
                http1.response(503, headers, api.error_body("openai", error, "")), socket.MSG_DONTWAIT
            )
            request.shutdown(socket.SHUT_WR)
            request.recv(65536, socket.MSG_DONTWAIT)
        except OSError:
            pass
        request.close()

    def refuse(self) -> None:
        """Let nobody in from now on, and tell everybody so; what runs goes on."""
        self.handler.drain()
        self._mux.refuse()

    def drain(self, grace: float) -> bool:
        """Stop serving; True if every request ended within ``grace`` seconds.

        Not to be called in the thread that is in ``serve_forever``.
        """
        self.refuse()
        # Only what runs already is waited for: those who come now are refused, and may come without end.
        earlier, running = self.connections.copy(), self.busy.copy()
        deadline = time.monotonic() + grace
        while True:
            self._end_idle(earlier & self.connections)
            ended = not running & self.busy
            if ended or time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        self._over = True
        self.shutdown()
        self.server_close()
        self._end_idle(self.connections)
        deadline = time.monotonic() + REFUSAL_SECONDS
        while self.busy - running and time.monotonic() < deadline:
            time.sleep(0.05)
        return ended

    def _end_idle(self, connections: set[ClientConnection]) -> None:
        """End connections between two requests; what has arrived already is answered all the same."""
        for connection in connections - self.busy.copy():
            _end_reading(connection.socket)


def _end_reading(request: socket.socket) -> None:
    try:
        request.shutdown(socket.SHUT_RD)
    except OSError:
        pass


def _is_loopback(host: str | Any) -> bool:
    try:
        return ip_address(str(host)).is_loopback
    except ValueError:
        return False
