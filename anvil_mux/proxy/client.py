"""The client's side of a connection: reading with limits, writing in one piece.

The socket stays blocking. SO_RCVTIMEO bounds single calls without a system call for each of them; a body must
keep a minimum rate, so that a client can not hold a thread by dripping bytes. One that takes nothing of what
it is sent is left (``connections.Stall``).

A head is read without waiting for it (``receive``: the server knows when there is something to read), but for
the moment in which a client that was just answered may ask again (``next_request``). What was read beyond it
(a body, a pipelined request) stays in the buffer. The body of the request is then read once, by one of
``read_body`` and ``read_pieces``, or by nobody: ``can_resume`` says whether the connection is in step for
another request all the same, which it is if all of a small body is here. Nobody waits for what nobody reads.

A large body goes to disk (``Spool``), so that it can be sent again, and with another name of its model.
"""

from __future__ import annotations

import select
import tempfile
import time
from collections.abc import Callable, Iterator
from socket import MSG_DONTWAIT, MSG_PEEK, SHUT_WR, SO_LINGER, SO_RCVTIMEO, SOL_SOCKET, socket
from ssl import SSLContext
from struct import pack
from threading import Lock

from anvil_mux.errors import BadRequest, ClientGone, ClientStalled, DiskFull, Overloaded, TooLarge
from anvil_mux.protocol import http1
from anvil_mux.proxy.connections import Stall, timeval

READ = 16384
"""Room for a head and a small body; more costs an allocation that is thrown away each time."""
IDLE_SECONDS = 75.0
"""The longest idle time; longer than clients keep idle connections, so that they close first."""
HEAD_SECONDS = 30.0
"""The longest time from a head's first byte to its last."""
HEADS = 2048
"""How many connections may have sent a part of a head; of more, the one that began first is refused.

A head in parts takes up to 64 KiB, so all that are not whole take at most 128 MiB.
"""
NEXT_SECONDS = 0.2
"""How long the thread that has answered a request waits for the client's next one itself."""
LOOK_SECONDS = 0.25
"""How often it is looked whether a client that is behind still takes what it is sent."""
BODY_SECONDS = 30.0
"""The longest silence within a body, and the time over which its rate counts."""
BODY_RATE = 1024
"""Bytes per second that a body must come with; one that is whole before its rate counts need not."""
STEP = 1 << 20
"""The most by which the memory for a body grows at once."""
DISCARD = 65536
"""A body that nobody read is dropped up to this, if all of it has come; else its connection is closed."""


class BodyMemory:
    """The memory that the bodies of all requests take together. Any thread; ``most`` may be set anew.

    What came together with its head is not counted: each connection has room for that anyway.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = Lock()
        self.held = 0  # guarded by the lock

    def take(self, count: int) -> None:
        """Count bytes more, or fewer; Overloaded if there is no room for them."""
        with self._lock:
            if count > 0 and self.held + count > self.most:
                text = f"overloaded: the bodies of all requests have {self.most} bytes of memory (max_bodies)"
                raise Overloaded(f"{text}. Try again.")
            self.held += count


class Client:
    """One client's connection. Used by the one thread that serves it, or else by the one that watches it."""

    __slots__ = (
        "_begun",
        "_body_due",
        "_broken_off",
        "_buffer",
        "_held",
        "_memory",
        "_patience",
        "_searched",
        "_timeout",
        "address",
        "at_pages",
        "in_epoll",
        "is_known",
        "last_head",
        "since",
        "socket",
        "tls",
    )

    def __init__(
        self,
        connection: socket,
        address: str,
        *,
        patience: float,
        last_head: http1.LastHead[http1.Request] | None,
        memory: BodyMemory,
        tls: SSLContext | None,
        at_pages: bool = False,
    ) -> None:
        """``patience``: seconds in which it may take nothing it is sent. ``last_head``: one to expect."""
        self.tls = tls
        """The context of the handshake that is still to be done, with TLS."""
        self._memory = memory
        self._held = 0
        """Bytes of its request's body that are counted in the memory of all."""
        self.socket = connection
        self.address = address
        self.at_pages = at_pages
        """Whether it came to the port that is for pages of engines."""
        self._patience = patience
        self._buffer = b""
        self._searched = 0
        """Bytes of the buffer in which the end of a head was looked for in vain."""
        self._body_due: http1.Request | None = None
        """The request whose body has not been read yet."""
        self._begun = False
        """Some of that body was read: where the next request begins is not known until all of it was."""
        self._broken_off = False
        self.last_head = last_head
        self._timeout = 0.0
        self.since = 0.0
        """When the server began to watch it, or when the first byte of its head came."""
        self.is_known = False
        """Whether a request of its was admitted, with its key if there are keys."""
        self.in_epoll = False
        """Whether the server's epoll has its socket."""

    def _wait_at_most(self, seconds: float) -> None:
        if seconds != self._timeout:
            self._timeout = seconds
            self.socket.setsockopt(SOL_SOCKET, SO_RCVTIMEO, timeval(seconds))

    # Reading

    def receive(self) -> bool:
        """Read what has come, without waiting; whether ``next_request`` has one, or an error, to tell.

        ClientGone: it has closed, or broke off.
        """
        if self.tls:
            return True
        data = self._come(MSG_DONTWAIT)
        if data is None:
            return False
        self._buffer += data
        return self._has_head()

    def _come(self, flags: int = 0) -> bytes | None:
        """Read what has come; None if nothing has. ClientGone: the client has closed, or broke off."""
        try:
            data = self.socket.recv(READ, flags)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ClientGone(f"The client broke off: {error}.") from None
        if not data:
            raise ClientGone("The client closed its connection.")
        return data

    def _has_head(self) -> bool:
        buffer, searched = self._buffer, self._searched
        self._searched = len(buffer)
        if buffer == http1.EMPTY_LINE:  # a stray line end begins no request
            return False
        try:
            return http1.request_head_end(buffer, searched) is not None
        except BadRequest:
            return True

    @property
    def has_begun(self) -> bool:
        """Whether a part of a head has come."""
        return bool(self._buffer) and self._buffer != http1.EMPTY_LINE

    def next_request(self) -> http1.Request | None:
        """The head of the next request; None while it is not whole. BadRequest, ClientGone.

        A client that has sent nothing yet is waited for for ``NEXT_SECONDS``.
        """
        buffer = self._buffer
        if not buffer or buffer == http1.EMPTY_LINE:
            self._wait_at_most(NEXT_SECONDS)
            data = self._come()
            if data is None:
                return None
            buffer += data
        if again := self.last_head and self.last_head.again(buffer):
            request, end = again
        elif found := http1.request_head_end(buffer):
            end = found
            request = http1.parse_request(buffer[:end])
            self.last_head = http1.LastHead(buffer[:end], request)
        else:
            self._buffer, self._searched = buffer, len(buffer)
            return None
        self._buffer, self._searched = buffer[end:], 0
        self._body_due = request if request.length or request.chunked else None
        return request

    def _receive(self) -> bytes:
        self._wait_at_most(BODY_SECONDS)
        data = self._come()
        if data is None:
            raise BadRequest(f"the request's body did not come within {BODY_SECONDS:g} s", status=408)
        return data

    def read_body(self, request: http1.Request, limit: int) -> bytes | bytearray:
        """The whole body in memory, once; TooLarge above ``limit`` bytes."""
        length = request.length
        if request.chunked:
            return self._read_chunks(request, limit)
        if not length:
            return b""
        buffer = self._buffer
        if len(buffer) >= length and length <= limit:
            # All of a buffer is not a copy of it.
            body, self._buffer = buffer[:length], buffer[length:]
            self._body_due = None
            return body
        return self._read_into(request, length, limit)

    def _read_into(self, request: http1.Request, length: int, limit: int) -> bytearray:
        self._agree_to(request, limit)
        body = bytearray(self._buffer)
        have = len(body)
        self._buffer = b""
        pace = _Pace()
        while have < length:
            if have == len(body):  # it grows with what comes: what is announced need not come
                more = min(length - have, max(READ, min(have, STEP)))
                self.hold(more)
                body += bytes(more)
            self._wait_at_most(BODY_SECONDS)
            try:
                with memoryview(body) as view, view[have:] as rest:
                    count = self.socket.recv_into(rest)
            except BlockingIOError:
                raise pace.too_slow() from None
            except OSError as error:
                raise ClientGone(f"The client broke off: {error}.") from None
            if not count:
                raise ClientGone("The client closed its connection in the middle of the request's body.")
            have += count
            pace.check(have)
        self._body_due, self._begun = None, False
        return body

    def _read_chunks(self, request: http1.Request, limit: int) -> bytearray:
        body = bytearray()
        for piece in self.read_pieces(request, limit):
            self.hold(len(piece))
            body += piece
        return body

    def hold(self, count: int) -> None:
        """Count bytes more, or fewer, of its request's body in the memory of all; Overloaded."""
        self._memory.take(count)
        self._held += count

    def let_go(self) -> None:
        """Count nothing more for its request, which is over."""
        if self._held:
            self._memory.take(-self._held)
            self._held = 0

    def read_pieces(self, request: http1.Request, limit: int) -> Iterator[bytes]:
        """The body as it comes, without its framing."""
        self._agree_to(request, limit)
        pace, have = _Pace(), 0
        if request.chunked:
            counter, end = http1.ChunkCounter(BadRequest), None
            while end is None:
                content: list[bytes] = []
                data = self._next_piece()
                end = counter.feed(data, content)
                have += sum(map(len, content))
                if have > limit:
                    raise TooLarge(f"the request's body is larger than {limit} bytes")
                pace.check(have)
                yield from content
            self._buffer = data[end:]
        else:
            length = request.length or 0
            while have < length:
                piece = self._next_piece()
                piece, self._buffer = piece[: length - have], piece[length - have :]
                have += len(piece)
                pace.check(have)
                yield piece
        self._body_due, self._begun = None, False

    def _next_piece(self) -> bytes:
        if self._buffer:
            piece, self._buffer = self._buffer, b""
            return piece
        return self._receive()

    def _agree_to(self, request: http1.Request, limit: int) -> None:
        if request.length is not None and request.length > limit:
            raise TooLarge(f"the request's body has {request.length} bytes; at most {limit} are accepted")
        if request.expect_continue and not self._buffer:
            self.send(http1.CONTINUE)
        self._begun = True

    def can_resume(self) -> bool:
        """Whether another request may follow although the body of this one may not have been read."""
        request = self._body_due
        if request is None:
            return True
        length = request.length or 0
        if self._begun or request.chunked or request.expect_continue or length > DISCARD:
            return False
        try:
            while len(self._buffer) < length:
                data = self._come(MSG_DONTWAIT)
                if data is None:
                    return False
                self._buffer += data
        except ClientGone:
            return False
        return True

    def discard_body(self) -> bool:
        """Drops a body that nobody read; False if the connection is no longer in step."""
        if self._body_due is None:
            return True
        if not self.can_resume():
            return False
        self._buffer, self._body_due = self._buffer[self._body_due.length or 0 :], None
        return True

    def take_rest(self) -> bytes:
        """Return what was read beyond the head, for a connection that is not HTTP's any more."""
        rest, self._buffer = self._buffer, b""
        return rest

    @property
    def has_input_left(self) -> bool:
        """Whether bytes of the client may lie here that nobody read: closing would reset the connection."""
        if self._broken_off:
            return False
        if self._body_due is not None or self._buffer:
            return True
        try:
            return bool(self.socket.recv(1, MSG_PEEK | MSG_DONTWAIT))
        except OSError:
            return False

    # Writing

    def send(self, data: bytes) -> None:
        """Send all of it; ClientGone, ClientStalled."""
        try:
            sent = self.socket.send(data, MSG_DONTWAIT)
        except OSError as error:
            sent = _none_sent(error)
        if sent != len(data):
            self._send_rest(memoryview(data)[sent:])

    def _send_rest(self, left: memoryview) -> None:
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        stall = Stall(self.socket, time.monotonic())
        while left:
            poll.poll(LOOK_SECONDS * 1000)
            try:
                sent = self.socket.send(left, MSG_DONTWAIT)
            except OSError as error:
                sent = _none_sent(error)
            now = time.monotonic()
            left = left[sent:]
            if sent:
                stall = Stall(self.socket, now)
            elif stall.seconds(now) > self._patience:
                raise ClientStalled(f"The client read nothing of its answer for {self._patience:g} s.")

    def break_off(self) -> None:
        """Have the connection end by a reset: to a client without chunks any other end is a whole answer."""
        self.socket.setsockopt(SOL_SOCKET, SO_LINGER, pack("ii", 1, 0))
        self._broken_off = True

    def linger(self) -> None:
        """Says that nothing more is sent and reads on for a moment.

        Closing before all was read would reset the connection, and the client might lose the answer.
        """
        try:
            self.socket.shutdown(SHUT_WR)
            self._wait_at_most(0.5)
            deadline = time.monotonic() + 2.0
            while time.monotonic() < deadline and self.socket.recv(READ):
                pass
        except OSError:
            pass


def _none_sent(error: OSError) -> int:
    """The bytes that were sent where sending failed with ``error``: none, if there was only no room."""
    if isinstance(error, BlockingIOError):
        return 0
    raise ClientGone(f"The client could not be written to: {error}.") from None


class _Pace:
    """Watches that a body comes fast enough."""

    __slots__ = ("_had", "_since")

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._had = 0

    def check(self, have: int) -> None:
        now = time.monotonic()
        if now - self._since > BODY_SECONDS:
            if have - self._had < BODY_SECONDS * BODY_RATE:
                raise self.too_slow()
            self._since, self._had = now, have

    def too_slow(self) -> BadRequest:
        return BadRequest("the request's body came too slowly", status=408)


class Spool:
    """A large body on disk. Iterating reads it from its beginning, so that it can be sent again."""

    def __init__(self) -> None:
        try:
            self._file = tempfile.TemporaryFile(buffering=0, prefix="anvil-mux-")  # noqa: SIM115
        except OSError as error:
            raise _not_kept(error) from None
        self._splice: tuple[int, int, bytes] | None = None
        self._length = 0

    def close(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        if self._splice is None:
            return self._length
        start, end, new = self._splice
        return self._length + len(new) - (end - start)

    def fill(self, pieces: Iterator[bytes], scan: Callable[[bytes], None]) -> None:
        for piece in pieces:
            scan(piece)
            left = memoryview(piece)
            while left:
                try:
                    left = left[self._file.write(left) :]
                except OSError as error:
                    raise _not_kept(error) from None
            self._length += len(piece)

    def replace(self, span: tuple[int, int], new: bytes) -> None:
        """Have the bytes of ``span`` read as ``new`` from now on."""
        self._splice = (*span, new)

    def __iter__(self) -> Iterator[bytes]:
        if self._splice is None:
            yield from self._read(0, None)
        else:
            start, end, new = self._splice
            yield from self._read(0, start)
            yield new
            yield from self._read(end, None)

    def _read(self, start: int, end: int | None) -> Iterator[bytes]:
        self._file.seek(start)
        while end is None or start < end:
            piece = self._file.read(READ if end is None else min(READ, end - start))
            if not piece:
                return
            start += len(piece)
            yield piece


def _not_kept(error: OSError) -> DiskFull:
    return DiskFull(
        f"The upload does not fit on anvil-mux's disk, where it is kept until it is sent: {error.strerror}. "
        "Send less, or start anvil-mux with a TMPDIR that has more room."
    )
