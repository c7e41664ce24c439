"""The kernel's view of a connection: whether its other end has left, how long it has taken nothing."""

from __future__ import annotations

import fcntl
import select
import termios
from socket import socket
from struct import pack, unpack

LEFT = select.POLLRDHUP | select.POLLHUP | select.POLLERR


def timeval(seconds: float) -> bytes:
    """Pack ``seconds`` as SO_RCVTIMEO and SO_SNDTIMEO take it."""
    return pack("ll", int(seconds), int(seconds % 1 * 1e6))


def has_left(client: socket) -> bool:
    """Whether the other end of ``client`` has closed it, whatever it sent before that was not read."""
    poll = select.poll()
    poll.register(client, LEFT)
    return bool(poll.poll(0))


class Unread:
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
