"""Connections as the kernel has them: those to engines, made and kept, and those of clients, looked at; TLS.

A connection to an engine is kept while it idles and lent to one exchange at a time. It may have been closed
meanwhile, or its engine may have answered twice: each is looked at before it is used again. One that takes
long to be made is waited for like an answer, since a queue of connections that is full belongs to an engine
that is busy. Those to servers elsewhere are made to each of the server's addresses in turn, and encrypted
where its URL says so: TLS is verified.

All work is done on plain sockets (the pump reads and writes without blocking, a look at a client is a peek),
which an encrypted socket cannot do. So a connection with TLS is one end of a pair of local sockets, and a
thread of its own moves bytes between the other end and the peer: a client, or a server elsewhere. It costs a
thread and a copy, paid only where TLS is asked for; many clients are better served by a proxy in front.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import select
import ssl
import termios
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import lru_cache
from socket import (
    AF_INET,
    AF_INET6,
    AI_NUMERICHOST,
    IPPROTO_TCP,
    MSG_DONTWAIT,
    MSG_PEEK,
    SHUT_WR,
    SO_ERROR,
    SO_LINGER,
    SO_RCVTIMEO,
    SO_SNDTIMEO,
    SOCK_STREAM,
    SOL_SOCKET,
    TCP_CONGESTION,
    TCP_INFO,
    TCP_NODELAY,
    getaddrinfo,
    socket,
    socketpair,
)
from struct import pack, unpack
from typing import Any, TypeVar

from anvil_mux.clock import LONGEST_POLL
from anvil_mux.config.config import Backend
from anvil_mux.config.values import site
from anvil_mux.errors import ClientGone
from anvil_mux.host.engines import idle_connections
from anvil_mux.host.hosts import trust
from anvil_mux.protocol import http1

Address = tuple[str, int]

CONNECT_SECONDS = 5.0
"""Seconds until a connection that is not made is begun anew: the kernel asks ever more seldom."""
ELSEWHERE_SECONDS = 10.0
"""Seconds for which the addresses of a server elsewhere are tried, all together."""
STILL_CONNECTING = (errno.EINPROGRESS, errno.EALREADY, errno.EINTR)
LOOK_SECONDS = 0.25
"""How often a thread that waits for an engine looks at its client and its lease."""
IDLE_SECONDS = 4.0
"""The longest idle time; less than the keep-alive time of the engines (uvicorn, cpp-httplib: 5 s)."""
SO_MEMINFO = 55
"""The option whose first number is the bytes of memory that what was not read takes (Linux 4.12)."""
ESTABLISHED, NOTHING_UNREAD = b"\1", bytes(4)
"""The kernel's words for a connection that is open, and for one on which nothing has come."""
SPARED = 2
"""Idle connections that are left to an engine while requests wait there that they could not carry."""
READ = 65536
HANDSHAKE_SECONDS = 10.0
LEFT = select.POLLRDHUP | select.POLLHUP | select.POLLERR

_T = TypeVar("_T")


# To engines


class Pool:
    """The connections to all engines. Any thread.

    They belong to a run of their engine: whoever listens at its address later is another.
    """

    def __init__(self) -> None:
        self._of_run: dict[Hashable, Connections] = {}

    def of(self, run: Hashable, backend: Backend) -> Connections:
        found = self._of_run.get(run)
        if found is None:
            found = self._of_run.setdefault(run, Connections(idle_connections(backend)))
        return found

    def end(self, run: Hashable) -> None:
        """The engine is to go: nobody needs a connection to this run any more."""
        if connections := self._of_run.pop(run, None):
            connections.end()

    def sweep(self) -> None:
        """Called now and then, so that a quiet mux holds no connections."""
        for run, connections in list(self._of_run.items()):
            if connections.sweep():
                self.end(run)

    def close(self) -> None:
        for connections in list(self._of_run.values()):
            connections.end()


class Connections:
    """The connections to one run of an engine that idle, last in, first out. Any thread.

    To some engines (cpp-httplib: llama-server) a connection that idles holds one of few threads until the
    engine's time-out, 5 s, and requests on other connections wait for it. So no more are kept than such an
    engine has threads to spare (``limit``). Of an engine of which that is not known it cannot be told whether
    a request waits for a thread or for its answer. But a connection that was answered once has its thread, if
    it needs one: where a request waits on a connection of its own, unanswered when it is first looked at,
    those that idle are closed, and few are kept until it is answered.
    """

    __slots__ = ("_idle", "_limit", "_used", "_waiting")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # Lists and sets are changed by single atomic operations.
        self._idle: list[Upstream] = []
        self._waiting: set[Upstream] = set()
        """Connections that were opened for requests which wait for longer than a look."""
        self._used = True
        """Whether anybody came here since the last sweep."""

    def take(self) -> Upstream | None:
        idle, self._used = self._idle, True
        while idle:
            try:
                upstream = idle.pop()
            except IndexError:
                return None
            age = time.monotonic() - upstream.idle_since
            if age < IDLE_SECONDS and _is_quiet(upstream.socket):
                return upstream
            upstream.socket.close()
        return None

    def put(self, upstream: Upstream) -> None:
        limit = min(self._limit, SPARED) if self._waiting else self._limit
        if len(self._idle) < limit:
            upstream.idle_since = time.monotonic()
            self._idle.append(upstream)
            if not self._limit:
                self.close()
        else:
            upstream.socket.close()

    def waits(self, upstream: Upstream) -> None:
        """A request waits on ``upstream``, which was opened for it; said at each look."""
        self._waiting.add(upstream)
        self.close()

    def answered(self, upstream: Upstream) -> None:
        """The request on ``upstream`` waits no longer."""
        self._waiting.discard(upstream)

    def sweep(self) -> bool:
        """Closes those that idled for too long; whether nobody has come here since the last time."""
        idle = self._idle
        oldest = time.monotonic() - IDLE_SECONDS
        while idle and idle[0].idle_since < oldest:
            try:
                idle.pop(0).socket.close()
            except IndexError:
                break
        used, self._used = self._used, False
        return not used and not idle

    def close(self) -> None:
        """Closes those that idle."""
        while self._idle:
            try:
                self._idle.pop().socket.close()
            except IndexError:
                break

    def end(self) -> None:
        """Keeps none any more: those that are still in use are closed when they are put back."""
        self._limit = 0
        self.close()


class Upstream:
    """A connection to an engine. Used by one thread at a time."""

    __slots__ = ("answered", "idle_since", "last_head", "socket")

    def __init__(self, connection: socket) -> None:
        self.socket = connection
        self.answered = False
        """Whether it has carried a request."""
        self.last_head: http1.LastHead[http1.Response] | None = None
        self.idle_since = 0.0


def _is_quiet(connection: socket) -> bool:
    """Whether an idle connection is open and nothing has come on it.

    ``recv`` lets another thread have the interpreter, which costs more than all else here; ``getsockopt``
    does not. So it is asked first, wherever it knows.
    """
    try:
        if (
            connection.getsockopt(IPPROTO_TCP, TCP_INFO, 1) == ESTABLISHED
            and connection.getsockopt(SOL_SOCKET, SO_MEMINFO, 4) == NOTHING_UNREAD
        ):
            return True
    except OSError:  # it is no TCP, or the kernel is another
        pass
    try:
        connection.recv(1, MSG_PEEK | MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False  # its end, or bytes that nobody asked for


def timeval(seconds: float) -> bytes:
    """Pack ``seconds`` as SO_RCVTIMEO and SO_SNDTIMEO take it."""
    return pack("ll", int(seconds), int(seconds % 1 * 1e6))


def connect(address: Address, look: Callable[[], object] = lambda: None) -> socket:
    """A blocking connection whose calls return a few times a second; ``look`` is called as often meanwhile.

    Only ``look`` ends the wait for one that is neither made nor refused.
    """
    while True:
        connection = _unconnected(AF_INET6 if ":" in address[0] else AF_INET)
        try:
            _connect(connection, address, CONNECT_SECONDS, look)
            return _looking(connection)
        except TimeoutError:
            connection.close()
        except BaseException:
            connection.close()
            raise


def _unconnected(family: int) -> socket:
    connection = socket(family)
    connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
    # Engines are near: a system's choice for far networks (bbr) would set a timer for each send, to pace it.
    connection.setsockopt(IPPROTO_TCP, TCP_CONGESTION, b"reno")
    return connection


def _connect(
    connection: socket, place: tuple[object, ...], seconds: float, look: Callable[[], object]
) -> None:
    """Connect within so many seconds; OSError. ``look`` is called a few times a second meanwhile."""
    connection.setblocking(False)
    until = time.monotonic() + seconds
    error = connection.connect_ex(place)
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    while error in STILL_CONNECTING:
        if poll.poll(LOOK_SECONDS * 1000):
            error = connection.getsockopt(SOL_SOCKET, SO_ERROR)
            break
        look()
        if time.monotonic() >= until:
            raise TimeoutError(f"no connection within {seconds:.0f} s")
    if error:
        raise OSError(error, os.strerror(error))


def _looking(connection: socket) -> socket:
    """Have its calls block, and return a few times a second."""
    connection.settimeout(None)
    connection.setsockopt(SOL_SOCKET, SO_RCVTIMEO, timeval(LOOK_SECONDS))
    connection.setsockopt(SOL_SOCKET, SO_SNDTIMEO, timeval(LOOK_SECONDS))
    return connection


# To servers elsewhere


def connect_elsewhere(backend: Backend, look: Callable[[], object], patience: float) -> socket:
    """A connection to the server of a backend, or the plain end of an encrypted one; OSError.

    Its calls return a few times a second. ``look`` is called as often while it is made.
    """
    server = site(backend.url)
    connection = _reached(server.address, look)
    try:
        if server.secure:
            connection = begun(connection, _trust(backend.ca_file), server.host, patience, look)
        return _looking(connection)
    except BaseException:
        connection.close()
        raise


def _reached(address: tuple[str, int], look: Callable[[], object]) -> socket:
    """A connection to the first address of the server that takes one."""
    until, last = time.monotonic() + ELSEWHERE_SECONDS, OSError("it has no address")
    found = _resolved(address, look, until)
    for number, (family, kind, protocol, _, place) in enumerate(found):
        share = (until - time.monotonic()) / (len(found) - number)
        connection = socket(family, kind, protocol)
        try:
            connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            _connect(connection, place, max(share, LOOK_SECONDS), look)
            return connection
        except OSError as error:
            connection.close()
            last = error
        except BaseException:
            connection.close()
            raise
    raise last


def _resolved(address: tuple[str, int], look: Callable[[], object], until: float) -> list[Any]:
    """Return the addresses that a name has; OSError. ``look`` is called a few times a second meanwhile.

    Nothing ends a call of the system's resolver, so a thread of its own makes it, unless the name is an
    address.
    """
    with suppress(OSError):
        return getaddrinfo(*address, type=SOCK_STREAM, flags=AI_NUMERICHOST)
    results: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            results.put(getaddrinfo(*address, type=SOCK_STREAM))
        except OSError as error:
            results.put(error)
        except UnicodeError as error:
            results.put(OSError(str(error)))

    try:
        threading.Thread(target=resolve, name="resolve", daemon=True).start()
    except RuntimeError as error:  # no more threads
        raise OSError(str(error)) from None
    while True:
        try:
            found = results.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            look()
            if time.monotonic() >= until:
                raise TimeoutError(f"its name was not resolved within {ELSEWHERE_SECONDS:.0f} s") from None
            continue
        if isinstance(found, OSError):
            raise found
        return found


def _trust(ca_file: str) -> ssl.SSLContext:
    """The certificates that servers are trusted by; a file is read again when it has changed."""
    return _read_trust(ca_file, os.stat(ca_file).st_mtime_ns if ca_file else 0)


@lru_cache(8)
def _read_trust(ca_file: str, changed: int) -> ssl.SSLContext:
    return trust(ca_file)


# To clients


def has_left(client: socket) -> bool:
    """Whether the other end of ``client`` has closed it, whatever it sent before that was not read."""
    poll = select.poll()
    poll.register(client, LEFT)
    return bool(poll.poll(0))


class Stall:
    """How long a client has taken none of the bytes that wait for it: one rule for all who send to clients.

    Begun anew whenever a byte could be sent. What the client takes of the bytes that were sent before counts
    too: on a slow connection there is room for more long after the first of them was taken. While nothing
    waits for the client nobody asks, so an engine may be as slow as it is.
    """

    __slots__ = ("_client", "_left", "_since")

    def __init__(self, client: socket, now: float) -> None:
        self._client = client
        self._left = _untaken(client)
        self._since = now

    def seconds(self, now: float) -> float:
        left = _untaken(self._client)
        if left != self._left:
            self._left, self._since = left, now
        return now - self._since


def _untaken(client: socket) -> int:
    """The bytes that were sent and have not arrived."""
    try:
        return int(unpack("i", fcntl.ioctl(client, termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 0


# TLS


def build_context(cert: str, key: str) -> ssl.SSLContext:
    """TLS 1.2 and later, with HTTP/1.1 alone; OSError if the files do not serve."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.load_cert_chain(cert, key)
    tls.set_alpn_protocols(["http/1.1"])
    return tls


def accepted(connection: socket, context: ssl.SSLContext, patience: float) -> socket:
    """The plain end of a client's connection; ClientGone if it does not begin TLS.

    Closing it ends the connection, which is handed over.
    """
    connection.settimeout(HANDSHAKE_SECONDS)
    try:
        return Plain(context.wrap_socket(connection, server_side=True), patience).socket
    except OSError as error:
        raise ClientGone(f"The client did not begin TLS: {error}.") from None


def begun(
    connection: socket, context: ssl.SSLContext, name: str, patience: float, look: Callable[[], object]
) -> socket:
    """Return the plain end of a connection to a server of that name, which proves it; OSError if it does not.

    ``look`` is called a few times a second meanwhile. Closing the plain end ends the connection, which is
    handed over. Reading it ends by a reset where TLS was not ended: anybody on the way can end the connection
    without that.
    """
    connection.setblocking(False)
    secure = context.wrap_socket(
        connection, server_hostname=name, suppress_ragged_eofs=False, do_handshake_on_connect=False
    )
    try:
        until = time.monotonic() + HANDSHAKE_SECONDS
        while wants := _attempt(secure.do_handshake, 0)[1]:
            poll = select.poll()
            poll.register(secure, wants)
            if not poll.poll(LOOK_SECONDS * 1000):
                look()
            if time.monotonic() >= until:
                raise TimeoutError(f"TLS did not begin within {HANDSHAKE_SECONDS:.0f} s")
    except BaseException:
        secure.close()
        raise
    return Plain(secure, patience).socket


class PlainEnd(socket):
    """A plain end, whose SO_LINGER is that of the connection to the peer."""

    secure: ssl.SSLSocket
    is_cut = False
    """Whether the connection to the peer ended in another way than TLS ends: reading it is no clean end."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = super().recv(size, flags)
        if not data and self.is_cut:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return data

    def setsockopt(self, level: int, name: int, *value: Any) -> None:
        if name != SO_LINGER:
            super().setsockopt(level, name, *value)
            return
        with suppress(OSError):  # the peer is gone
            self.secure.setsockopt(level, name, *value)


class Plain:
    """The plain end of an encrypted connection; closing it closes both.

    To a peer the end of TLS (close_notify) is a whole answer's, so there is none where the connection is to
    end by a reset.

    ``patience``: seconds after which a peer that takes nothing is left; more than whoever sends to the
    plain end gives it, since that knows what was sent.
    """

    def __init__(self, secure: ssl.SSLSocket, patience: float) -> None:
        self._patience = patience
        self._secure = secure
        self._is_deaf = False
        """Whether the peer has refused to take more."""
        plain, self._inner = socketpair()
        self.socket = PlainEnd(fileno=plain.detach())
        self.socket.secure = secure
        self._secure.setblocking(False)
        self._inner.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="tls", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads
            for end in (self.socket, self._inner, secure):
                end.close()
            raise OSError(str(error)) from None

    def _run(self) -> None:
        with self._inner, self._secure:
            try:
                self._move()
                if not self._secure.getsockopt(SOL_SOCKET, SO_LINGER):
                    self._secure.unwrap()
            except BaseException as error:
                self.socket.is_cut = True  # before its other end is closed
                if not isinstance(error, OSError):  # as what ssl raises is
                    raise

    def _move(self) -> None:
        """Move bytes until the plain end is closed; OSError when the peer is gone."""
        secure, inner = self._secure, self._inner
        up = down = b""
        ended = False
        while True:
            moved, secure_wants, inner_wants = False, 0, 0
            if not up and not ended:
                came, secure_wants = _attempt(lambda: secure.recv(READ), select.POLLIN)
                moved, ended, up = came is not None, came == b"", came or b""
                if ended:
                    inner.shutdown(SHUT_WR)
            if up:
                sent, inner_wants = _attempt(lambda: inner.send(up), select.POLLOUT)  # noqa: B023
                moved, up = moved or bool(sent), up[sent or 0 :]
            if not down:
                came, wants = _attempt(lambda: inner.recv(READ), select.POLLIN)
                if came == b"":
                    return
                moved, down, inner_wants = moved or bool(came), came or b"", inner_wants | wants
            if down:
                sent, wants = self._send_to_peer(down, has_ended=ended)
                moved, down, secure_wants = moved or bool(sent), down[sent or 0 :], secure_wants | wants
            if not moved:
                self._wait(secure_wants, inner_wants, stalled=bool(down))

    def _send_to_peer(self, data: bytes, *, has_ended: bool) -> tuple[int | None, int]:
        """Send ``data``; drop it if the peer takes no more but may have sent an answer that was not read.

        OSError: it takes no more, and has ended.
        """
        if not self._is_deaf:
            try:
                return _attempt(lambda: self._secure.send(data), select.POLLOUT)
            except OSError:
                if has_ended:
                    raise
                self._is_deaf = True
        return len(data), 0

    def _wait(self, secure_wants: int, inner_wants: int, *, stalled: bool) -> None:
        """Wait for either end. ``stalled``: the peer has not taken what it was sent."""
        poll = select.poll()
        for end, wants in ((self._secure, secure_wants), (self._inner, inner_wants)):
            if wants:
                poll.register(end, wants)
        if not poll.poll(min(self._patience * 1000, LONGEST_POLL)) and stalled:
            raise TimeoutError


def _attempt(act: Callable[[], _T], blocked: int) -> tuple[_T | None, int]:
    """Return what ``act`` gave; or None, and the event to wait for."""
    try:
        return act(), 0
    except ssl.SSLWantReadError:
        return None, select.POLLIN
    except ssl.SSLWantWriteError:
        return None, select.POLLOUT
    except BlockingIOError:
        return None, blocked
