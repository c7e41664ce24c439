"""The listening socket, a thread per connection, and a way to stop.

A connection's thread reads a request, has the handler answer it, and goes on while both sides keep the
connection; before each request it moves to where threads of connections are to run just then (affinity.py). A
connection over the limit is told so by the accepting thread and closed. ``drain`` ends it all in order: idle
connections closed, waiting requests refused, running ones finished in time. Until then whoever comes is told
that the program ends: /readyz by its status, and requests for models with when to try again.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import threading
import time
from http.server import ThreadingHTTPServer
from ipaddress import ip_address
from socketserver import BaseRequestHandler, TCPServer
from typing import Any

from anvil_mux.errors import ClientGone, MuxError, Overloaded
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.protocol import api, http1
from anvil_mux.proxy.affinity import Affinity, CPUs
from anvil_mux.proxy.client import Client
from anvil_mux.proxy.handler import Handler
from anvil_mux.proxy.tls import accepted

STACK_BYTES = 512 * 1024
"""The stack of a connection's thread; thousands of them must fit."""
STARVED_SECONDS = 0.5
"""Seconds between two tries to accept a connection when the program may open no more files."""
REFUSAL_SECONDS = 1.0
"""How long the last ones who come while the program ends may take to be told so."""
PULSE_SECONDS = 10.0
"""The accepting thread, which comes by twice a second, hangs if it was not seen for so long."""

log = logging.getLogger(__name__)


class ClientConnection(BaseRequestHandler):
    """One client's connection, in its own thread."""

    server: Server
    plain: socket.socket
    """The socket that requests are read from: the connection, or what TLS made of it."""

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = self.server
        self.plain = self.request
        if server.tls is None:
            self._serve()
            return
        try:
            with accepted(self.request, server.tls, 2 * server.client_timeout) as self.plain:
                server.connections.discard(self.request)
                server.connections.add(self.plain)
                self._serve()
        except ClientGone:
            pass
        finally:
            server.connections.discard(self.plain)

    def _serve(self) -> None:
        client = Client(self.plain, self.client_address[0], self.server.client_timeout)
        affinity = self.server.affinity
        cpus = affinity.everywhere
        try:
            while True:
                if affinity.cpus is not cpus:
                    cpus = affinity.settle()
                if not self._serve_one(client):
                    break
        except ClientGone:
            return
        if client.is_unread:
            client.part()

    def _serve_one(self, client: Client) -> bool:
        server = self.server
        try:
            request = client.read_request()
        except MuxError as error:
            if not isinstance(error, ClientGone):
                server.handler.refuse_unread(client, error)
            return False
        if request is None:
            return False
        server.busy.add(self)
        try:
            keep = server.handler.serve(client, request)
            return keep and client.discard_body() and not server.handler.probes.draining
        finally:
            server.busy.discard(self)


class Server(ThreadingHTTPServer):
    """Accepts connections on ``address`` for ``handler``, at most ``max_connections`` at once."""

    request_queue_size = 512
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        handler: Handler,
        mux: Multiplexer,
        *,
        max_connections: int = 2048,
        affinity: Affinity | None = None,
        tls: ssl.SSLContext | None = None,
        client_timeout: float = 60.0,
    ) -> None:
        """``client_timeout``: how long a client may take nothing of what it is sent."""
        self.tls = tls
        self.client_timeout = client_timeout
        self.handler = handler
        self.affinity = affinity or Affinity(CPUs(os.sched_getaffinity(0)), adapts=False)
        self.connections: set[socket.socket] = set()
        self.busy: set[ClientConnection] = set()
        """Connections within a request. Many threads change such sets, in single atomic operations."""
        self._mux = mux
        self._pulse = time.monotonic()
        """The moment at which the accepting thread last came by."""
        self._over = False
        self.max_connections = max_connections
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        threading.stack_size(STACK_BYTES)
        super().__init__(address, ClientConnection)
        handler.only_local_hosts = _is_loopback(self.server_address[0])

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's would look the host's name up
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def service_actions(self) -> None:
        self._pulse = time.monotonic()

    @property
    def hangs(self) -> bool:
        """Whether connections are not accepted, though they should be."""
        return not self._over and time.monotonic() - self._pulse > PULSE_SECONDS

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                log.warning("no connection can be accepted (%s): see ulimit -n", error.strerror)
                time.sleep(STARVED_SECONDS)  # the listener stays readable, so trying on would be a busy loop
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.connections) >= self.max_connections:
            self._turn_away(request)
            return
        self.connections.add(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads
            self.connections.discard(request)
            self._turn_away(request)

    def _turn_away(self, request: socket.socket) -> None:
        error = Overloaded(f"overloaded: {self.max_connections} connections are open already. Try again.")
        headers = [
            (b"Content-Type", b"application/json"),
            (b"Connection", b"close"),
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

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.exception("connection of %s failed", client_address)

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

    def _end_idle(self, connections: set[socket.socket]) -> None:
        """End connections between two requests; what has arrived already is answered all the same."""
        for request in connections.difference(connection.plain for connection in self.busy.copy()):
            _end_reading(request)


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
