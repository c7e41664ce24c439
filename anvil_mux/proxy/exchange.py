"""One request to one engine, and its answer back.

``with Exchange(relay, lease, client) as exchange:`` is for one request of the leased backend. ``ask`` borrows
a connection, sends the request and returns with the head of the answer. What is short is ``whole`` by then;
of any other body one of these gets the rest: ``content`` or ``pieces`` read it here, ``begin`` and then
``stream`` have the pump move it to the client, ``tunnel`` is for what is no HTTP any more. Leaving the block
gives the connection back to the pool if it can carry another request, else closes it: a client that leaves
ends the engine's work at once.

While the handler's thread waits for the engine, SO_RCVTIMEO wakes it a few times a second to look at the
client, the lease and the clock; the path of a quick answer pays no system call for that. When the drain ends
first, ``sever`` (a worker's thread) shuts the engine's connection down, and the blocked thread sees its end.

A pooled connection may have been closed while it was idle: a request that finds it so is sent once more on a
fresh one. A connection that cannot be made is ``EngineUnreachable``, and nothing was sent. What else fails is
the failure of this one request; what it says of the engine, the multiplexer looks into.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from socket import MSG_DONTWAIT, MSG_PEEK, SHUT_RDWR, socket
from typing import NamedTuple

from anvil_mux.config.config import Backend
from anvil_mux.errors import (
    BackendError,
    ClientGone,
    ClientStalled,
    MuxError,
    Overloaded,
    Unauthorized,
    is_shortage,
)
from anvil_mux.host.hosts import why_unreachable
from anvil_mux.multiplexer.multiplexer import Lease
from anvil_mux.protocol import http1
from anvil_mux.protocol.sse import Observer, PlainObserver, SseObserver
from anvil_mux.proxy.client import Spool
from anvil_mux.proxy.connections import (
    LOOK_SECONDS,
    Address,
    Pool,
    Upstream,
    connect,
    connect_elsewhere,
    has_left,
)
from anvil_mux.proxy.pump import AnswerBody, End, Pump, PumpedStream, body_of
from anvil_mux.proxy.tunnel import Ended, tunnel

Pieces = Iterable[bytes | bytearray | memoryview]
"""Something that can be iterated over more than once."""
RequestBody = bytes | bytearray | Pieces

READ = 16384
SMALL = 65536
"""A body up to this size is sent in one piece with its head."""
LAST = 4
"""Bytes that tell whether an event has ended."""
WHOLE = 256 * 1024
"""An answer with a Content-Length up to this is read completely before its head is sent on."""


class Failed(BackendError):
    """An exchange came to no whole answer, through no fault of the request's."""


class EngineUnreachable(Failed):
    """Nothing of the request was sent, or its engine has ended since: it may be sent again."""


class Unanswered(Failed):
    """The request was sent, and the connection ended before a byte of an answer came."""


class Silent(Failed):
    """Nothing came for as long as an engine may be silent."""


class BrokenOff(Failed):
    """The connection ended within an answer."""


_REFUSAL = re.compile(rb"(?:\A|\r\n\r\n)HTTP/1\.[01] [345]")


def _has_refused(connection: socket) -> bool:
    """Return whether the answer that has begun to come, if one has, is that of a refused request."""
    try:
        return _REFUSAL.search(connection.recv(READ, MSG_PEEK | MSG_DONTWAIT)) is not None
    except OSError:
        return False


def name_of(backend: Backend) -> str:
    """The name of whoever answers for a backend, for people."""
    return f"The server of {backend.model}" if backend.url else f"The engine of {backend.model}"


class Relay:
    """The pool and the pump that all requests share.

    ``timeout``: the longest silence of an engine; ``client_timeout``: how long a client may take nothing;
    ``begin_thread``: what the pump's thread does first.
    """

    def __init__(
        self,
        timeout: float = 600.0,
        client_timeout: float = 60.0,
        begin_thread: Callable[[], object] = lambda: None,
    ) -> None:
        self.timeout = timeout
        self.client_timeout = client_timeout
        self.pool = Pool()
        self.pump = Pump(timeout, client_timeout, begin_thread)
        self.read: dict[Address, float] = {}
        """Engine -> when the thread of a request last read a part of an answer from it."""

    def has_heard(self, address: Address, since: float) -> bool:
        """Whether a part of any answer came from there since that moment."""
        return self.read.get(address, 0.0) >= since or self.pump.has_heard(address, since)

    def close(self) -> None:
        self.pump.close()
        self.pool.close()


class StreamOutcome(NamedTuple):
    """The outcome of a body that the pump has moved to the client."""

    end: End
    sent: int
    """Bytes that the client was sent."""
    rest: bytes
    """The bytes that it lacks of an answer that has ended."""
    aligned: bool
    """Whether it has taken all that it was sent, so that more can follow."""


class Exchange:
    """One request at one engine. Its methods are called by one thread, ``sever`` by any."""

    __slots__ = (
        "_body",
        "_client",
        "_connections",
        "_copied",
        "_copy_left",
        "_cut",
        "_deadline",
        "_is_noted",
        "_look_at",
        "_missing",
        "_must_end",
        "_observer",
        "_relay",
        "_silence",
        "_size",
        "_stream",
        "_upstream",
        "data",
        "last",
        "lease",
        "response",
        "whole",
    )

    def __init__(self, relay: Relay, lease: Lease, client: socket, begins: float | None = None) -> None:
        """``begins``: the seconds within which a server elsewhere is to begin its answer; None: as long as
        any silence. An engine of ours may be at a long prompt.
        """
        if begins is None or not lease.backend.url or begins > relay.timeout:
            begins = relay.timeout
        self._silence = begins
        self._relay = relay
        self.lease = lease
        self._connections = relay.pool.of(lease.run, lease.backend)
        self._client = client
        self._upstream: Upstream | None = None
        self._stream: PumpedStream | None = None
        self._cut = False
        self._size = self._missing = 0
        """The bytes of the request, and those of them that its connection has not taken."""
        self._deadline = 0.0
        """The moment at which the engine has been silent for too long; 0: the first look sets it."""
        self._look_at = 0.0
        """When it is looked whether the client has left, while the engine's bytes come without a pause."""
        self.response: http1.Response
        """The head of the answer, once it was asked for."""
        self.data = b""
        """The part of the body that came with the head."""
        self.whole = False
        """Whether ``data`` is all of the body."""
        self._is_noted = not lease.is_routed
        """Whether it was noted that the answer has begun; or nobody has to know."""
        self._body: AnswerBody | None = None
        self._observer: Observer | None = None
        self._must_end = False
        self.last = b""
        """The last bytes of content that have come."""
        self._copied: list[bytes] = []
        self._copy_left = 0
        lease.on_severed(self.sever)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives its connection back, or ends it; any number of times."""
        upstream, self._upstream = self._upstream, None
        if upstream is None:
            return
        body = self._body
        has_ended = self.whole or (body is not None and body.ended and body.clean)
        if has_ended and self.response.keep_alive and not (self._missing or self._cut):
            self._connections.put(upstream)
        else:
            upstream.socket.close()

    def sever(self) -> None:
        """Ends whatever this exchange still does; any number of times, also after its end."""
        # Without a lock: this marks first and looks second, the other thread takes or leaves its connection
        # first and looks for the mark second. So one of them sees what the other did.
        self._cut = True
        stream, upstream = self._stream, self._upstream
        if stream:
            stream.cut = True
        if upstream:
            try:
                upstream.socket.shutdown(SHUT_RDWR)
            except OSError:
                pass

    # The question

    def ask(self, method: str, head: bytes, body: RequestBody, *, upgrade: bool = False) -> http1.Response:
        """Sends the request and returns the head of the answer; ``data`` holds what came with it.

        ``head`` is its lines: it is ended here, so that it announces the body that is sent, and no other.
        Where ``upgrade`` is asked for, 101 is an answer too, and ``tunnel`` follows it.
        """
        pieces: Pieces = (body,) if isinstance(body, (bytes, bytearray)) else body
        size = len(pieces) if isinstance(pieces, Spool) else sum(map(len, pieces))
        head = http1.framed(head, method, size)
        self._size = len(head) + size
        if size <= SMALL:
            head, pieces = b"".join((head, *pieces)), ()
        pooled = self._connections.take()
        data = self._try(pooled, head, pieces) if pooled else b""
        if not data and not self._deadline:  # one that was idle for too long ends at once
            self.close()
            data = self._try_anew(head, pieces)
        if not data:
            raise Unanswered(f"{self._name} closed the connection without an answer.")
        assert self._upstream is not None
        last_head = self._upstream.last_head
        if method != "HEAD" and last_head and (again := last_head.again(data)):
            response, end = again
            self.data = data[end:]
        else:
            response = self._read_head(self._upstream, method, data, upgrade)
        self._silence = self._relay.timeout
        self.response = response
        if response.status == 101:
            return response
        length = 0 if response.body == "none" else response.length
        if length is not None and length <= WHOLE:
            if len(self.data) != length:
                self._read_whole(length)
            self.whole = True
            if not self._is_noted:
                self._note_first_byte()
        return response

    @property
    def _name(self) -> str:
        return name_of(self.lease.backend)

    def _connect(self) -> Upstream:
        self._deadline = 0.0
        backend = self.lease.backend
        try:
            if backend.url:
                return Upstream(connect_elsewhere(backend, self._look, 2 * self._relay.timeout))
            return Upstream(connect(self.lease.address, self._look))
        except OSError as error:
            if self.lease.severed:
                raise self.lease.severed_error() from None
            if is_shortage(error):
                text = f"overloaded: anvil-mux can open no connection to {self._name} ({error.strerror})"
                raise Overloaded(f"{text}: see ulimit -n. Try again.") from None
            raise EngineUnreachable(f"{self._name} cannot be reached: {why_unreachable(error)}.") from None

    def _try_anew(self, head: bytes, pieces: Pieces) -> bytes:
        """Try on a connection of its own; see ``_try``."""
        upstream = self._connect()
        try:
            return self._try(upstream, head, pieces)
        finally:
            upstream.answered = True
            self._connections.answered(upstream)

    def _try(self, upstream: Upstream, head: bytes, pieces: Pieces) -> bytes:
        """The first bytes of the answer, or none if the connection failed before."""
        self._upstream = upstream
        if self._cut:
            raise self.lease.severed_error()
        self._deadline = 0.0
        self._missing = self._size
        try:
            for piece in chain((head,), pieces):
                if not self._send(upstream.socket, piece):
                    break
        except OSError:
            pass  # an engine may refuse a body early: its answer, if there is one, counts
        try:
            return self._recv(upstream.socket)
        except OSError:
            return b""

    def _send(self, connection: socket, data: bytes | bytearray | memoryview) -> bool:
        """Send all of ``data``; return False if the engine refuses the request and takes no more of it."""
        left = data
        while True:
            try:
                sent = connection.send(left)
            except BlockingIOError:
                if _has_refused(connection):
                    return False
                self._look()
                continue
            self._missing -= sent
            if sent == len(left):
                return True
            left = memoryview(left)[sent:]
            self._deadline = 0.0

    def _recv(self, connection: socket) -> bytes:
        while True:
            try:
                data = connection.recv(READ)
            except BlockingIOError:
                self._look()
                continue
            except OSError:
                if self.lease.severed:  # its engine wrote on after the shutdown: that is a reset
                    raise self.lease.severed_error() from None
                raise
            if not data and self.lease.severed:
                raise self.lease.severed_error()
            return data

    def _look(self) -> None:
        """Look at the lease, the client and the clock, as a thread that waits for the engine does."""
        if self.lease.severed:
            raise self.lease.severed_error()
        if has_left(self._client):
            raise ClientGone("The client closed its connection.")
        if self._upstream and not self._upstream.answered:
            self._connections.waits(self._upstream)
        now = time.monotonic()
        if not self._deadline:
            self._deadline = now - LOOK_SECONDS + self._silence
        elif now > self._deadline:
            raise Silent(f"{self._name} was silent for {self._silence:g} s.")

    # The answer

    def _read_head(self, upstream: Upstream, method: str, data: bytes, upgrade: bool) -> http1.Response:
        """Read the head of the final answer; Silent if a head does not come whole in time."""
        while True:
            until = 0.0
            while (end := http1.response_head_end(data)) is None:
                now = time.monotonic()
                until = until or now + self._silence
                if now > until:
                    raise Silent(
                        f"{self._name} did not end the head of its answer within {self._silence:g} s."
                    )
                self._look()  # reading does not block where bytes come one by one
                data += self._more()
            head, data = data[:end], data[end:]
            response = http1.parse_response(head, method, upgrade=upgrade)
            if response.status >= 200 or response.status == 101:
                break
        upstream.last_head = http1.LastHead(head, response)
        self.data = data
        return response

    def _read_whole(self, length: int) -> None:
        pieces = [self.data]
        missing = length - len(self.data)
        while missing > 0:
            pieces.append(self._more())
            missing -= len(pieces[-1])
        if missing < 0:
            raise BackendError(f"{self._name} sent more than it announced.")
        self.data = b"".join(pieces)

    def _more(self) -> bytes:
        data = self._received()
        if not data:
            raise BrokenOff(f"{self._name} broke off its answer.")
        return data

    def _received(self) -> bytes:
        assert self._upstream is not None
        self._deadline = 0.0
        try:
            data = self._recv(self._upstream.socket)
        except OSError as error:
            raise BrokenOff(f"{self._name} broke off its answer: {error}.") from None
        if data:
            now = self._relay.read[self.lease.address] = time.monotonic()
            if now >= self._look_at:
                if self._look_at and has_left(self._client):
                    raise ClientGone("The client closed its connection.")
                self._look_at = now + LOOK_SECONDS
        return data

    def read_on(self, until: Callable[[bytes], bool]) -> None:
        """Reads until enough of the body came with the head; not for one that may have ended."""
        while not until(self.data):
            self.data += self._more()

    def _note_first_byte(self) -> None:
        """Note that a part of the body came that the client has not seen; Severed if it must not."""
        if not self._is_noted and not self.lease.first_byte():
            raise self.lease.severed_error()
        self._is_noted = True

    @property
    def has_ended(self) -> bool:
        """Whether the engine has said all."""
        return self.whole or (self._body is not None and self._body.ended)

    @property
    def is_events(self) -> bool:
        """Whether the answer is a stream of events that can be read here, and written into."""
        fields = self.response.fields
        kind = fields.get(b"content-type", b"")
        is_plain = b"content-encoding" not in fields and self.response.body != "none"
        return is_plain and kind.startswith(b"text/event-stream")

    @property
    def observer(self) -> Observer:
        """The observer of an answer that is read or moved in pieces."""
        if self._observer is None:
            until_close = self.response.body == "close"
            self._observer = SseObserver() if self.is_events else PlainObserver(until_close=until_close)
        return self._observer

    def _observe(self, content: bytes) -> None:
        self.observer.feed(content)
        if self._copy_left > 0:
            self._copied.append(content[: self._copy_left])
            self._copy_left -= len(content)
        self.last = content[-LAST:] if len(content) >= LAST else (self.last + content)[-LAST:]

    def _is_whole(self) -> bool:
        """Whether a body that has ended is known to be whole: by its last event, or by its framing.

        Of a stream of events whose API has a last one, framing alone says nothing: engines are known to end
        it soundly when they are told to stop, or have lost their client. Where all choices say why they
        ended, the missing event is but a habit of the engine.
        """
        body, observer = self._body, self.observer
        assert body is not None
        observer.end()
        if observer.has_last_event:
            return True
        return body.is_framed and (observer.has_finished or not self._must_end)

    # The body: read here

    def content(self, limit: int) -> bytes:
        """All of the content; BackendError if it is more than ``limit`` bytes."""
        pieces: list[bytes] = []
        left = limit
        for piece in self.pieces():
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                raise BackendError(f"{self._name} answered with more than {limit} bytes.")
        return b"".join(pieces)

    def pieces(self) -> Iterator[bytes]:
        """The content as it comes, in the handler's thread: for answers that are read, not passed on.

        With the last piece, which may be empty, it ``has_ended``.
        """
        if self.whole:
            self._observe(self.data)
            yield self.data
            return
        response = self.response
        self._body = body = body_of(response, chunked=False)
        content = body.feed(self.data) if self.data else b""
        while True:
            if content:
                self._note_first_byte()
            self._observe(content)
            yield content
            if body.ended:
                break
            content = body.feed(self._received())

    # The body: moved to the client

    def begin(self, *, chunked: bool, must_end: bool = False, copied: int = 0) -> bytes:
        """Return the first bytes of a body that is moved, for a client that gets it chunked or not.

        ``must_end``: it is a stream of events whose API has a last one. ``copied``: how many bytes of its
        content are kept.
        """
        self._must_end, self._copy_left = must_end, copied
        self._body = body = body_of(self.response, chunked=chunked)
        if self.data:
            self._note_first_byte()
        content = body.feed(self.data) if self.data else b""
        self._observe(content)
        return body.framed(content)

    def stream(self) -> StreamOutcome:
        """Moves the rest of the body to the client; blocks until it has ended."""
        body, sent, pending = self._body, 0, b""
        assert body is not None
        if not body.ended:
            assert self._upstream is not None
            first_byte = None if self._is_noted else self.lease.first_byte
            stream = PumpedStream(
                self._upstream.socket,
                self._client,
                body,
                self._observe,
                is_whole=self._is_whole,
                first_byte=first_byte,
            )
            self._stream = stream
            stream.cut = self._cut
            end = self._relay.pump.relay(stream)
            sent, pending = stream.relayed, stream.pending
            self.observer.end()
            if end is End.CLIENT_GONE and not pending and self.observer.has_last_event:
                end = self._end_behind(body)
                if end is End.COMPLETE:
                    return StreamOutcome(end, sent, b"", aligned=True)
            if end is not End.COMPLETE:
                is_severed = end is End.DIED and self.lease.severed
                return StreamOutcome(End.SEVERED if is_severed else end, sent, b"", not pending)
        end = End.COMPLETE if self._is_whole() else End.CLOSED
        return StreamOutcome(end, sent, pending + body.take_end(), not pending)

    def _end_behind(self, body: AnswerBody) -> End:
        """The end of a body whose client has left with its last event: the end of its framing may be to come.

        It tells whether the answer is whole, and another may follow it, so it is waited for for a moment. An
        engine that says nothing more has said all.
        """
        until = time.monotonic() + LOOK_SECONDS
        try:
            while not body.ended and time.monotonic() < until:
                body.feed(self._received())
        except BackendError:
            return End.DIED
        except MuxError:  # the first look: nobody waits for more
            pass
        return End.COMPLETE

    @property
    def copied(self) -> bytes:
        """The first bytes of the answer's content, if it was to be copied."""
        return b"".join(self._copied)

    # No body, but a websocket

    def tunnel(self, early: bytes, may_go_on: Callable[[], bool]) -> tuple[Ended, MuxError | None]:
        """Passes bytes both ways until the end, and what went wrong. ``early``: what the client has sent
        already. ``may_go_on``: whether its key still allows it."""
        upstream, lease = self._upstream, self.lease
        assert upstream is not None
        ended = tunnel(
            self._client,
            upstream.socket,
            early,
            begun=self.data,
            must_end=lambda: lease.severed or not may_go_on(),
            silence=self._relay.timeout,
            client_timeout=self._relay.client_timeout,
        )
        if lease.severed:
            return ended, lease.severed_error()
        if ended.by == "order":
            return ended, Unauthorized("The API key of this websocket was taken back.")
        if ended.by == "client_stalled":
            seconds = self._relay.client_timeout
            return ended, ClientStalled(f"The client read nothing for {seconds:g} s.")
        if ended.by == "silence":
            return ended, BackendError(f"Both sides were silent for {self._relay.timeout:g} s.")
        if ended.by == "engine" and ended.open:
            return ended, BrokenOff(f"{self._name} broke off the connection.")
        return ended, None
