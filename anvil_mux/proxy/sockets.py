"""Sockets as the kernel has them: whether the other end has left, how long it has taken nothing, and TLS.

Everything here works on plain sockets (the pump reads and writes without blocking, a look at a client is a
peek), which an encrypted socket cannot do. So a connection with TLS is one end of a pair of local sockets,
and a thread of its own moves bytes between the other end and the peer: a client, or a server elsewhere. It
costs a thread and a copy, paid only where TLS is asked for; many clients are better served by a proxy in
front.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import ssl
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from struct import pack, unpack
from typing import Any, TypeVar

from anvil_mux.clock import LONGEST_POLL
from anvil_mux.errors import ClientGone

READ = 65536
HANDSHAKE_SECONDS = 10.0
LEFT = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def timeval(seconds: float) -> bytes:
    """Pack ``seconds`` as SO_RCVTIMEO and SO_SNDTIMEO take it."""
    return pack("ll", int(seconds), int(seconds % 1 * 1e6))


def has_left(client: socket.socket) -> bool:
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

    def __init__(self, client: socket.socket, now: float) -> None:
        self._client = client
        self._left = _untaken(client)
        self._since = now

    def seconds(self, now: float) -> float:
        left = _untaken(self._client)
        if left != self._left:
            self._left, self._since = left, now
        return now - self._since


def _untaken(client: socket.socket) -> int:
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


def accepted(connection: socket.socket, context: ssl.SSLContext, patience: float) -> socket.socket:
    """The plain end of a client's connection; ClientGone if it does not begin TLS.

    Closing it ends the connection, which is handed over.
    """
    connection.settimeout(HANDSHAKE_SECONDS)
    try:
        return Plain(context.wrap_socket(connection, server_side=True), patience).socket
    except OSError as error:
        raise ClientGone(f"The client did not begin TLS: {error}.") from None


def begun(connection: socket.socket, context: ssl.SSLContext, name: str, patience: float) -> socket.socket:
    """The plain end of a connection to a server of that name, which proves it; OSError if it does not.

    Closing it ends the connection, which is handed over. Reading it ends by a reset where TLS was not ended:
    anybody on the way can end the connection without that.
    """
    connection.settimeout(HANDSHAKE_SECONDS)
    secure = context.wrap_socket(connection, server_hostname=name, suppress_ragged_eofs=False)
    return Plain(secure, patience).socket


class PlainEnd(socket.socket):
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
        if name != socket.SO_LINGER:
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
        plain, self._inner = socket.socketpair()
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
                if not self._secure.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER):
                    self._secure.unwrap()
            except OSError:  # also what ssl raises
                self.socket.is_cut = True  # before its other end is closed

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
                    inner.shutdown(socket.SHUT_WR)
            if up:
                sent, inner_wants = _attempt(lambda: inner.send(up), select.POLLOUT)  # noqa: B023
                moved, up = moved or bool(sent), up[sent or 0 :]
            if not down:
                came, wants = _attempt(lambda: inner.recv(READ), select.POLLIN)
                if came == b"":
                    return
                moved, down, inner_wants = moved or bool(came), came or b"", inner_wants | wants
            if down:
                sent, wants = _attempt(lambda: secure.send(down), select.POLLOUT)  # noqa: B023
                moved, down, secure_wants = moved or bool(sent), down[sent or 0 :], secure_wants | wants
            if not moved:
                self._wait(secure_wants, inner_wants, stalled=bool(down))

    def _wait(self, secure_wants: int, inner_wants: int, *, stalled: bool) -> None:
        """Wait for either end. ``stalled``: the peer has not taken what it was sent."""
        poll = select.poll()
        for end, wants in ((self._secure, secure_wants), (self._inner, inner_wants)):
            if wants:
                poll.register(end, wants)
        if not poll.poll(min(self._patience * 1000, LONGEST_POLL)) and stalled:
            raise TimeoutError


_T = TypeVar("_T")


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
