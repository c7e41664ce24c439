"""The bytes of all streams, moved by one thread.

A thread per stream collapses at about a thousand streams: each wakes for sixty bytes and fights for the
interpreter lock. So the thread that serves a request does everything up to the head of the answer, then calls
``Pump.relay(stream)``, which blocks. One thread waits in epoll for all engines at once, moves what they send
to their clients and wakes the thread of a stream at its end.

Rules:

* A stream belongs to the pump's thread from ``relay`` until ``relay`` returns; others may only ``cut`` it.
* The pump's thread alone registers and unregisters descriptors, and ``relay`` returns when neither of a
  stream's is registered any more. A stream ends once.
* Events are hints. Sockets are used with MSG_DONTWAIT, and readiness that turns out to be false is ignored.
* The threads of ended streams are woken after the batch of events in which they ended: until then nobody
  closes a descriptor, so no number in the batch can have come to mean another stream.
* A client that does not read stops the reading of its engine: at most one read (``READ``) is held for it.
* What goes wrong with one stream ends that stream.
* Time is read once per batch; once a second a sweep ends streams that are silent or not read for too long.

An ``AnswerBody`` knows where a body ends and in which framing its client gets it. The end of that framing
follows only once the body is known to be whole: a stream of events whose last one is missing is cut.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from socket import MSG_DONTWAIT, socket

from anvil_mux.clock import essential, note_mistake, safely
from anvil_mux.errors import BackendError
from anvil_mux.protocol import http1
from anvil_mux.proxy.connections import Stall

READ = 16384
"""Bytes taken from an engine at once: tokens are smaller, and a large answer must not hold up the others."""

SWEEP_SECONDS = 1.0
PULSE_SECONDS = 10.0
"""The pump's thread, which comes by once a second, hangs if it did not for so long."""
UPSTREAM = select.EPOLLIN
CLIENT = select.EPOLLRDHUP
LEFT = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR

log = logging.getLogger(__name__)


class End(Enum):
    """How a stream ended."""

    COMPLETE = "complete"
    CLOSED = "closed"
    """The engine closed its connection, and nothing tells whether all has come."""
    CLIENT_GONE = "client_gone"
    DIED = "died"
    """The engine's connection ended, or its framing broke, before the end of the body."""
    SEVERED = "severed"
    SILENT = "silent"
    """The engine was silent for longer than allowed."""
    CLIENT_STALLED = "client_stalled"
    """The client did not read for longer than allowed."""


class PumpedStream:
    """One body on its way from an engine to a client."""

    __slots__ = (
        "active",
        "body",
        "client",
        "cut",
        "end",
        "first_byte",
        "is_whole",
        "observe",
        "pending",
        "relayed",
        "stall",
        "upstream",
        "woken",
    )

    def __init__(
        self,
        upstream: socket,
        client: socket,
        body: AnswerBody,
        observe: Callable[[bytes], object],
        *,
        is_whole: Callable[[], bool] = lambda: True,
        first_byte: Callable[[], bool] | None = None,
    ) -> None:
        self.upstream = upstream
        self.client = client
        self.body = body
        self.observe = observe
        """Takes the content, in the pump's thread."""
        self.is_whole = is_whole
        """Returns whether a body that has ended is known to be whole, in the pump's thread."""
        self.first_byte = first_byte
        """A callback for the answer's beginning, in the pump's thread; False: the client must not see it.

        None: it has begun.
        """
        self.pending = b""
        """Bytes that the client has not taken yet; the engine is not read meanwhile.

        They are left to the stream's thread where the body has ended: the engine has said all.
        """
        self.stall: Stall | None = None
        """A watch over the client, while there is something pending."""
        self.relayed = 0
        """Bytes that the client was sent."""
        self.active = 0.0
        """The moment at which bytes last moved."""
        self.cut = False
        """Whether the lease was severed; set by another thread, which shuts ``upstream`` down."""
        self.end: End | None = None
        self.woken = allocate_lock()
        self.woken.acquire()

    def is_from(self, address: tuple[str, int], since: float) -> bool:
        """Whether bytes from that address moved in it since that moment."""
        try:
            return self.active >= since and self.upstream.getpeername()[:2] == address
        except OSError:
            return False


class Pump:
    """The thread that moves all streams, by one epoll."""

    def __init__(
        self,
        silence_timeout: float = 600.0,
        client_timeout: float = 60.0,
        begin_thread: Callable[[], object] = lambda: None,
    ) -> None:
        self._silence = silence_timeout
        self._client_timeout = client_timeout
        self._begin_thread = begin_thread
        self._epoll = select.epoll()
        self._streams: dict[int, PumpedStream] = {}
        """The streams by both descriptors. Only the pump's thread changes it."""
        self._ended: list[PumpedStream] = []
        self._lock = threading.Lock()
        # The lock guards these two.
        self._arriving: list[PumpedStream] = []
        """The streams that were handed over and are not registered yet."""
        self._is_closed = False
        self._pulse = time.monotonic()
        """The moment at which the pump's thread last came by."""
        self._wake = os.eventfd(0)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=essential("pump", self._run), name="pump", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._streams) // 2

    @property
    def hangs(self) -> bool:
        """Whether the thread has not come by for ``PULSE_SECONDS``. Any thread."""
        return not self._is_closed and time.monotonic() - self._pulse > PULSE_SECONDS

    def relay(self, stream: PumpedStream) -> End:
        """Block until the body of ``stream`` has ended, and return how; both sockets stay open."""
        with self._lock:
            if self._is_closed:
                return End.SEVERED
            if not self._arriving:
                os.eventfd_write(self._wake, 1)
            self._arriving.append(stream)
        stream.woken.acquire()
        assert stream.end is not None
        return stream.end

    def has_heard(self, address: tuple[str, int], since: float) -> bool:
        """Whether a part of any stream came from there since that moment. Any thread."""
        return any(stream.is_from(address, since) for stream in set(self._streams.copy().values()))

    def close(self) -> None:
        """End the thread; streams that still run are severed."""
        with self._lock:
            self._is_closed = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        self._epoll.close()

    def _run(self) -> None:
        self._begin_thread()
        poll, clock, streams, ended = self._epoll.poll, time.monotonic, self._streams, self._ended
        sweep_at = 0.0
        wake = self._wake
        while not self._is_closed:
            events = poll(SWEEP_SECONDS)
            self._pulse = now = clock()
            for descriptor, event in events:
                stream = streams.get(descriptor)
                if stream is not None:
                    self._move(stream, descriptor, event, now)
                elif descriptor == wake:
                    self._register_arriving(now)
            if now >= sweep_at:
                safely("pump", partial(self._sweep, now), None)
                sweep_at = now + SWEEP_SECONDS
            while ended:
                ended.pop().woken.release()
        self._close_all()

    def _register_arriving(self, now: float) -> None:
        """Begin to move the streams that were handed over; a mistake with one ends that one."""
        os.eventfd_read(self._wake)
        with self._lock:
            arriving, self._arriving = self._arriving, []
        for stream in arriving:
            stream.active = now
            try:
                self._register(stream, stream.client, CLIENT)
                self._register(stream, stream.upstream, UPSTREAM)
            except Exception as error:
                note_mistake("pump", error)
                self._end(stream, End.DIED)

    def _register(self, stream: PumpedStream, end: socket, events: int) -> None:
        self._epoll.register(end, events)
        self._streams[end.fileno()] = stream

    def _move(self, stream: PumpedStream, descriptor: int, event: int, now: float) -> None:
        """Move what came for one stream; a mistake ends that stream."""
        try:
            if descriptor == stream.upstream.fileno():
                self._read(stream, now)
            else:
                self._client_event(stream, event, now)
        except Exception as error:
            note_mistake("pump", error)
            self._end(stream, End.DIED)

    def _read(self, stream: PumpedStream, now: float) -> None:
        try:
            content = _content(stream)
        except BlockingIOError:
            return
        except BackendError as error:
            log.debug("stream ended: %s", error)
            self._end(stream, End.SEVERED if stream.cut else End.DIED)
            return
        stream.active = now
        self._send(stream, content)

    def _send(self, stream: PumpedStream, content: bytes) -> None:
        body = stream.body
        if content:
            stream.observe(content)
        data = body.framed(content)
        if body.ended and stream.is_whole():
            data += body.take_end()
        if data and not self._send_framed(stream, data):
            return
        if body.ended:
            self._end(stream, End.COMPLETE)
        elif stream.pending:
            self._hold(stream)

    def _send_framed(self, stream: PumpedStream, data: bytes) -> bool:
        """Send as much as the client takes; False: the stream has ended."""
        if stream.first_byte is not None:
            if not stream.first_byte():
                self._end(stream, End.SEVERED)
                return False
            stream.first_byte = None
        try:
            sent = stream.client.send(data, MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._end(stream, End.CLIENT_GONE)
            return False
        stream.relayed += sent
        stream.pending = data[sent:]
        return True

    def _hold(self, stream: PumpedStream) -> None:
        # Unregistered, not masked: a reset engine would otherwise be reported over and over.
        self._epoll.unregister(stream.upstream)
        self._epoll.modify(stream.client, CLIENT | select.EPOLLOUT)
        stream.stall = Stall(stream.client, stream.active)

    def _client_event(self, stream: PumpedStream, event: int, now: float) -> None:
        if event & LEFT:
            self._end(stream, End.CLIENT_GONE)
        elif stream.pending:
            self._write_pending(stream, now)

    def _write_pending(self, stream: PumpedStream, now: float) -> None:
        try:
            sent = stream.client.send(stream.pending, MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            self._end(stream, End.CLIENT_GONE)
            return
        stream.active = now
        stream.relayed += sent
        stream.pending = stream.pending[sent:]
        stream.stall = Stall(stream.client, now) if stream.pending else None
        if not stream.stall:
            self._epoll.modify(stream.client, CLIENT)
            self._epoll.register(stream.upstream, UPSTREAM)

    def _sweep(self, now: float) -> None:
        for stream in set(self._streams.copy().values()):
            if stream.stall:
                if stream.cut:
                    self._end(stream, End.SEVERED)
                elif stream.stall.seconds(now) > self._client_timeout:
                    self._end(stream, End.CLIENT_STALLED)
            elif now - stream.active > self._silence:
                self._end(stream, End.SILENT)

    def _end(self, stream: PumpedStream, how: End) -> None:
        if stream.end is not None:
            return
        for end in (stream.upstream, stream.client):
            if self._streams.get(end.fileno()) is stream:
                del self._streams[end.fileno()]
                with suppress(OSError):  # the upstream of a held stream is not registered
                    self._epoll.unregister(end)
        stream.end = how
        self._ended.append(stream)

    def _close_all(self) -> None:
        with self._lock:
            arriving, self._arriving = self._arriving, []
        for stream in {*self._streams.values(), *arriving}:
            self._end(stream, End.SEVERED)
        while self._ended:
            self._ended.pop().woken.release()


def _content(stream: PumpedStream) -> bytes:
    """Read what came of its body; BlockingIOError if nothing did, BackendError if it broke off."""
    try:
        data = stream.upstream.recv(READ, MSG_DONTWAIT)
    except BlockingIOError:
        raise
    except OSError as error:
        raise BackendError(f"The engine's connection broke: {error}.") from None
    if not data and stream.cut:  # to some answers any end is a whole one
        raise BackendError("The stream was cut off.")
    return stream.body.feed(data)


class AnswerBody:
    """An engine's body on its way: ``feed`` returns its content, ``framed`` what its client gets of that.

    ``chunked``: its client gets it in chunks, else as bare bytes.
    """

    __slots__ = ("chunked", "clean", "end", "ended")

    is_framed = True
    """Whether its framing says where it ends, and not the end of the engine's connection."""

    def __init__(self, *, chunked: bool) -> None:
        self.chunked = chunked
        self.ended = False
        self.clean = True
        """Whether nothing came behind it."""
        self.end = http1.LAST_CHUNK if chunked else b""
        """The end of its client's framing, until that is sent."""

    def framed(self, content: bytes) -> bytes:
        return http1.chunk(content) if self.chunked else content

    def take_end(self) -> bytes:
        """Return the end of its client's framing, once."""
        end, self.end = self.end, b""
        return end

    def feed(self, data: bytes) -> bytes:
        """Return the content in ``data``; none: the connection has ended, BackendError if too early."""
        raise NotImplementedError


def _broke_off() -> BackendError:
    return BackendError("The engine's connection ended in the middle of its answer.")


class _Chunks(AnswerBody):
    """A body that comes in chunks."""

    __slots__ = ("_counter",)

    def __init__(self, *, chunked: bool) -> None:
        super().__init__(chunked=chunked)
        self._counter = http1.ChunkCounter()

    def feed(self, data: bytes) -> bytes:
        if not data:
            raise _broke_off()
        content: list[bytes] = []
        end = self._counter.feed(data, content)
        if end is not None:
            self.ended, self.clean = True, end == len(data)
        return content[0] if len(content) == 1 else b"".join(content)


class _Counted(AnswerBody):
    """A body as long as its Content-Length said."""

    __slots__ = ("_missing",)

    def __init__(self, length: int, *, chunked: bool) -> None:
        super().__init__(chunked=chunked)
        self._missing = length
        self.ended = length == 0

    def feed(self, data: bytes) -> bytes:
        if not data:
            raise _broke_off()
        self.clean = len(data) <= self._missing
        data = data[: self._missing]
        self._missing -= len(data)
        self.ended = not self._missing
        return data


class _UntilClose(AnswerBody):
    """A body until the engine closes."""

    __slots__ = ()

    is_framed = False

    def feed(self, data: bytes) -> bytes:
        self.ended = not data
        return data


def body_of(response: http1.Response, *, chunked: bool) -> AnswerBody:
    """How the body of ``response`` passes to a client that gets it chunked, or else as bare bytes."""
    if response.body == "chunked":
        return _Chunks(chunked=chunked)
    if response.body == "length":
        return _Counted(response.length or 0, chunked=chunked)
    return _UntilClose(chunked=chunked)
