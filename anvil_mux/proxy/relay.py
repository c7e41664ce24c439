"""One request to one engine, and its answer back.

``with Exchange(relay, lease, client) as exchange:`` borrows a connection to the leased backend, ``ask`` sends
the request and returns with the head of the answer, and ``stream`` moves a body that is not here yet through
the pump. Leaving the block gives the connection back to the pool if it can carry another request, else closes
it: a client that leaves ends the engine's work at once.

While the handler's thread waits for the engine, SO_RCVTIMEO wakes it a few times a second to look at the
client, the lease and the clock; the path of a quick answer pays no system call for that. When the drain ends
first, ``sever`` (a worker's thread) shuts the engine's connection down, and the blocked thread sees its end.

A pooled connection may have been closed while it was idle: a request that finds it so is sent once more on a
fresh one. A connection that cannot be made is ``Unreachable``, and nothing was sent; one that takes long is
waited for like an answer, since a queue of connections that is full belongs to an engine that is busy. What
else fails is the failure of this one request; what it says of the engine, the multiplexer looks into.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from errno import EALREADY, EINPROGRESS, EINTR, ETIMEDOUT
from socket import (
    AF_INET,
    AF_INET6,
    IPPROTO_TCP,
    MSG_DONTWAIT,
    MSG_PEEK,
    SHUT_RDWR,
    SO_RCVTIMEO,
    SO_SNDTIMEO,
    SOL_SOCKET,
    TCP_CONGESTION,
    TCP_NODELAY,
    socket,
)
from struct import pack
from typing import Protocol

from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError, ClientGone, ClientStalled, MuxError
from anvil_mux.host.engine import idle_connections
from anvil_mux.protocol import http1
from anvil_mux.proxy.pump import End, Passed, Pump, Stream
from anvil_mux.proxy.tunnel import Ended, tunnel

Address = tuple[str, int]
Pieces = Iterable[bytes | bytearray | memoryview]
"""Something that can be iterated over more than once."""
RequestBody = bytes | bytearray | Pieces

READ = 16384
SMALL = 65536
"""A body up to this size is sent in one piece with its head."""
WHOLE = 256 * 1024
"""An answer with a Content-Length up to this is read completely before its head is sent on."""
CONNECT_SECONDS = 5.0
"""After which a connection that is not made is begun anew: the kernel asks ever more seldom."""
STILL_CONNECTING = (EINPROGRESS, EALREADY, EINTR)
LOOK_SECONDS = 0.25
"""How often a thread that waits for an engine looks at its client and its lease."""
IDLE_SECONDS = 4.0
"""Less than the keep-alive time of the engines (uvicorn and cpp-httplib: 5 s)."""
FRESH_SECONDS = 0.5
"""A connection that idled for longer is looked at before it is used again."""
SPARED = 2
"""Idle connections that are left to an engine while requests wait there that they could not carry."""


class Failed(BackendError):
    """An exchange came to no whole answer, through no fault of the request's."""


class Unreachable(Failed):
    """Nothing of the request was sent, or its engine has ended since: it may be sent again."""


class Unanswered(Failed):
    """The request was sent, and the connection ended before a byte of an answer came."""


class Silent(Failed):
    """Nothing came for as long as an engine may be silent."""


class BrokenOff(Failed):
    """The connection ended within an answer."""


class LeaseLike(Protocol):
    """What the relay uses of a lease."""

    @property
    def backend(self) -> Backend: ...
    @property
    def address(self) -> Address: ...
    @property
    def run(self) -> Hashable: ...
    @property
    def severed(self) -> bool: ...
    def first_byte(self) -> bool: ...
    def severed_error(self) -> MuxError: ...
    def on_severed(self, cut: Callable[[], None]) -> None: ...


def timeval(seconds: float) -> bytes:
    """``seconds`` as SO_RCVTIMEO and SO_SNDTIMEO take it."""
    return pack("ll", int(seconds), int(seconds % 1 * 1e6))


def has_left(client: socket) -> bool:
    """The other end of ``client`` has closed it (what it may have sent before counts as being there)."""
    try:
        return not client.recv(1, MSG_PEEK | MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


class Upstream:
    """A connection to an engine. Used by one thread at a time."""

    __slots__ = ("answered", "idle_since", "last_head", "socket")

    def __init__(self, connection: socket) -> None:
        self.socket = connection
        self.answered = False
        """It has carried a request."""
        self.last_head: http1.LastHead[http1.Response] = http1.LastHead()
        self.idle_since = 0.0


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
        """Those that were opened for requests which wait for longer than a look."""
        self._used = True
        """Since the last sweep."""

    def take(self) -> Upstream | None:
        idle, self._used = self._idle, True
        while idle:
            try:
                upstream = idle.pop()
            except IndexError:
                return None
            age = time.monotonic() - upstream.idle_since
            if age < FRESH_SECONDS or (age < IDLE_SECONDS and _is_quiet(upstream.socket)):
                return upstream
            upstream.socket.close()
        return None

    def put(self, upstream: Upstream) -> None:
        limit = min(self._limit, SPARED) if self._waiting else self._limit
        if len(self._idle) < limit:
            upstream.idle_since = time.monotonic()
            self._idle.append(upstream)
        else:
            upstream.socket.close()

    def waits(self, upstream: Upstream) -> None:
        """A request waits on ``upstream``, which was opened for it; said at each look."""
        self._waiting.add(upstream)
        self.close()

    def answered(self, upstream: Upstream) -> None:
        """That came to something, or failed."""
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
        while self._idle:
            try:
                self._idle.pop().socket.close()
            except IndexError:
                break


class Pool:
    """The connections to all engines. Any thread.

    They belong to a run of their engine: whoever listens at its address later is another.
    """

    def __init__(self) -> None:
        self._of_run: dict[Hashable, Connections] = {}

    def of(self, lease: LeaseLike) -> Connections:
        found = self._of_run.get(lease.run)
        if found is None:
            found = self._of_run.setdefault(lease.run, Connections(idle_connections(lease.backend)))
        return found

    def sweep(self) -> None:
        """Called now and then, so that a quiet mux holds no connections."""
        for run, connections in list(self._of_run.items()):
            if connections.sweep():
                self._of_run.pop(run, None)  # what is put there meanwhile goes with the last who used it

    def close(self) -> None:
        for connections in list(self._of_run.values()):
            connections.close()


def _is_quiet(connection: socket) -> bool:
    try:
        connection.recv(1, MSG_PEEK | MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False  # its end, or bytes that nobody asked for


def connect(address: Address, look: Callable[[], object] = lambda: None) -> socket:
    """A blocking connection whose calls return a few times a second; ``look`` is called as often meanwhile.

    Only ``look`` ends the wait for one that is neither made nor refused.
    """
    while True:
        connection = _unconnected(AF_INET6 if ":" in address[0] else AF_INET)
        try:
            if _is_made(connection, address, look):
                return connection
        except BaseException:
            connection.close()
            raise
        connection.close()


def _unconnected(family: int) -> socket:
    connection = socket(family)
    connection.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
    # Engines are near: a system's choice for far networks (bbr) would set a timer for each send, to pace it.
    connection.setsockopt(IPPROTO_TCP, TCP_CONGESTION, b"reno")
    connection.setsockopt(SOL_SOCKET, SO_RCVTIMEO, timeval(LOOK_SECONDS))
    connection.setsockopt(SOL_SOCKET, SO_SNDTIMEO, timeval(LOOK_SECONDS))
    return connection


def _is_made(connection: socket, address: Address, look: Callable[[], object]) -> bool:
    """Whether it was in time; OSError if it is refused."""
    anew_at = time.monotonic() + CONNECT_SECONDS
    while error := connection.connect_ex(address):
        if error != ETIMEDOUT and error not in STILL_CONNECTING:
            raise OSError(error, os.strerror(error))
        look()
        if error == ETIMEDOUT or time.monotonic() >= anew_at:
            return False
    return True


class Relay:
    """The pool and the pump that all requests share.

    ``timeout``: the longest silence of an engine; ``client_timeout``: how long a client may take nothing.
    """

    def __init__(self, timeout: float = 600.0, client_timeout: float = 60.0) -> None:
        self.timeout = timeout
        self.client_timeout = client_timeout
        self.pool = Pool()
        self.pump = Pump(timeout, client_timeout)
        self.read: dict[Address, float] = {}
        """Engine -> when the thread of a request last read a part of an answer from it."""

    def has_heard(self, address: Address, since: float) -> bool:
        """Whether a part of any answer came from there since that moment."""
        return self.read.get(address, 0.0) >= since or self.pump.has_heard(address, since)

    def close(self) -> None:
        self.pump.close()
        self.pool.close()


class Exchange:
    """One request at one engine. Its methods are called by one thread, ``sever`` by any."""

    __slots__ = (
        "_body",
        "_chunked",
        "_client",
        "_connections",
        "_cut",
        "_deadline",
        "_has_begun",
        "_lease",
        "_relay",
        "_reusable",
        "_stream",
        "_upstream",
        "aligned",
        "data",
        "passed",
        "streamed",
        "whole",
    )

    def __init__(self, relay: Relay, lease: LeaseLike, client: socket) -> None:
        self._relay = relay
        self._lease = lease
        self._connections = relay.pool.of(lease)
        self._client = client
        self._upstream: Upstream | None = None
        self._stream: Stream | None = None
        self._cut = False
        self._reusable = False
        self._deadline = 0.0
        """When the engine has been silent for too long; 0: whoever looks first sets it."""
        self.data = b""
        """What came of the body with the head."""
        self.whole = False
        """``data`` is all of the body."""
        self._has_begun = False
        """A byte of the answer has come that may be shown."""
        self._chunked = False
        self._body: Body | None = None
        self.passed = Passed()
        self.streamed = 0
        """Bytes that the pump sent to the client."""
        self.aligned = True
        """The client was sent whole chunks, so another one can follow."""
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
        if self._reusable and not self._cut:
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

        Where ``upgrade`` is asked for, 101 is an answer too, and ``tunnel`` follows it.
        """
        if isinstance(body, (bytes, bytearray)):
            head, body = (head + body, ()) if len(body) <= SMALL else (head, (body,))
        pooled = self._connections.take()
        data = self._try(pooled, head, body) if pooled else b""
        if not data and not self._deadline:  # one that was idle for too long ends at once
            self.close()
            data = self._try_anew(head, body)
        if not data:
            raise Unanswered(f"{self._name} closed the connection without an answer.")
        response = self._read_head(method, data, upgrade)
        if response.status == 101:
            return response
        length = 0 if response.body == "none" else response.length
        self.whole = response.body in ("none", "length") and length is not None and length <= WHOLE
        if self.whole:
            if len(self.data) != length:
                self._read_whole(length or 0)
            self._begin()
            self._reusable = response.keep_alive
        return response

    @property
    def _name(self) -> str:
        return f"The engine of {self._lease.backend.model}"

    def _connect(self) -> Upstream:
        self._deadline = 0.0
        try:
            return Upstream(connect(self._lease.address, self._look))
        except OSError as error:
            if self._lease.severed:
                raise self._lease.severed_error() from None
            raise Unreachable(f"{self._name} cannot be reached: {error}.") from None

    def _try_anew(self, head: bytes, pieces: Pieces) -> bytes:
        """As ``_try``, on a connection of its own."""
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
            raise self._lease.severed_error()
        self._deadline = 0.0
        try:
            self._send(upstream.socket, head)
            for piece in pieces:
                self._send(upstream.socket, piece)
        except OSError:
            pass  # an engine may refuse a body early: its answer, if there is one, counts
        try:
            return self._recv(upstream.socket)
        except OSError:
            return b""

    def _send(self, connection: socket, data: bytes | bytearray | memoryview) -> None:
        left = data
        while True:
            try:
                sent = connection.send(left)
            except BlockingIOError:
                self._look()
                continue
            if sent == len(left):
                return
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
                if self._lease.severed:  # its engine wrote on after the shutdown: that is a reset
                    raise self._lease.severed_error() from None
                raise
            if not data and self._lease.severed:
                raise self._lease.severed_error()
            return data

    def _look(self) -> None:
        """What a thread that waits for the engine does now and then."""
        if self._lease.severed:
            raise self._lease.severed_error()
        if has_left(self._client):
            raise ClientGone("The client closed its connection.")
        if self._upstream and not self._upstream.answered:
            self._connections.waits(self._upstream)
        now = time.monotonic()
        if not self._deadline:
            self._deadline = now - LOOK_SECONDS + self._relay.timeout
        elif now > self._deadline:
            raise Silent(f"{self._name} was silent for {self._relay.timeout:g} s.")

    # The answer

    def _read_head(self, method: str, data: bytes, upgrade: bool) -> http1.Response:
        assert self._upstream is not None
        last_head = self._upstream.last_head
        response = last_head.again(data) if method != "HEAD" else None
        if response is not None:
            self.data = data[last_head.end :]
            return response
        while True:
            while (end := http1.response_head_end(data)) is None:
                data += self._more()
            head, data = data[:end], data[end:]
            response = http1.parse_response(head, method, upgrade=upgrade)
            if response.status >= 200 or response.status == 101:
                break
        last_head.remember(head, response)
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
            self._relay.read[self._lease.address] = time.monotonic()
        return data

    def tunnel(self, said: bytes) -> tuple[Ended, MuxError | None]:
        """Passes bytes both ways until the end, and what went wrong. ``said``: by the client."""
        upstream, lease = self._upstream, self._lease
        assert upstream is not None
        ended = tunnel(
            self._client,
            upstream.socket,
            said,
            begun=self.data,
            must_end=lambda: lease.severed,
            silence=self._relay.timeout,
            unread=self._relay.client_timeout,
        )
        if lease.severed:
            return ended, lease.severed_error()
        if ended.by == "unread":
            seconds = self._relay.client_timeout
            return ended, ClientStalled(f"The client took nothing of what was said for {seconds:g} s.")
        if ended.by == "silence":
            return ended, BackendError(f"Nothing was said for {self._relay.timeout:g} s.")
        if ended.by == "engine" and ended.open:
            return ended, BrokenOff(f"{self._name} broke off the connection.")
        return ended, None

    def pieces(self, response: http1.Response) -> Iterator[bytes]:
        """The content as it comes, in the handler's thread: for answers that are read, not passed on."""
        if self.whole:
            self.passed.note(self.data)
            yield self.data
            return
        body = body_of(response, chunked=False)
        content = body.feed(self.data) if self.data else b""
        while True:
            if content:
                self._begin()
                self.passed.note(content)
                yield content
            if body.ended:
                break
            content = body.feed(self._received())
        self._reusable = response.keep_alive and body.clean

    def content(self, response: http1.Response, limit: int) -> bytes:
        """All of the content; BackendError if it is more than ``limit`` bytes."""
        pieces: list[bytes] = []
        left = limit
        for piece in self.pieces(response):
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                raise BackendError(f"{self._name} answered with more than {limit} bytes.")
        return b"".join(pieces)

    def begin(self, response: http1.Response, *, chunked: bool) -> bytes:
        """The first bytes of a body that is not whole, for a client that gets it chunked or not."""
        self._chunked = chunked
        self._body = body = body_of(response, chunked=chunked)
        if self.data:
            self._begin()
        first = body.feed(self.data) if self.data else b""
        self.passed.note(first)
        return first

    def read_on(self, until: Callable[[bytes], bool]) -> None:
        """Reads until enough of the body came with the head; not for one that may have ended."""
        while not until(self.data):
            self.data += self._more()

    def _begin(self) -> None:
        """Something of the body has come that the client has not seen; Severed if it must not."""
        if not self._has_begun and not self._lease.first_byte():
            raise self._lease.severed_error()
        self._has_begun = True

    @property
    def last_payload(self) -> bytes:
        """The last bytes of content that the client was sent, if nothing was split."""
        last = self.passed.last
        return last[:-2] if self._chunked else last

    def stream(self, response: http1.Response) -> End:
        """Moves the rest of the body to the client; blocks until it has ended."""
        body, upstream = self._body, self._upstream
        assert body is not None
        assert upstream is not None
        end = End.COMPLETE
        if not body.ended:
            first_byte = None if self._has_begun else self._lease.first_byte
            stream = self._stream = Stream(upstream.socket, self._client, body, self.passed, first_byte)
            stream.cut = self._cut
            end = self._relay.pump.relay(stream)
            self.streamed = stream.relayed
            self.aligned = body.aligned and not stream.pending
        if end is End.COMPLETE:
            self._reusable = response.keep_alive and body.clean
        elif end is End.DIED and self._lease.severed:
            return End.SEVERED
        return end


class _Chunked:
    """Chunked, and stays so, byte for byte."""

    __slots__ = ("_counter", "clean", "ended")

    def __init__(self) -> None:
        self._counter = http1.ChunkCounter()
        self.ended = False
        self.clean = True

    @property
    def aligned(self) -> bool:
        return self._counter.between_chunks

    def feed(self, data: bytes) -> bytes:
        if not data:
            raise BackendError("The engine's connection ended within its answer.")
        end = self._counter.feed(data)
        if end is None:
            return data
        self.ended = True
        self.clean = end == len(data)
        return data[:end]


class _Decoded:
    """Chunked by the engine, for a client that cannot take chunks."""

    __slots__ = ("_decoder", "aligned", "clean", "ended")

    def __init__(self) -> None:
        self._decoder = http1.ChunkDecoder()
        self.ended = False
        self.clean = self.aligned = True

    def feed(self, data: bytes) -> bytes:
        if not data:
            raise BackendError("The engine's connection ended within its answer.")
        payload = self._decoder.feed(data)
        self.ended = self._decoder.done
        self.clean = not self._decoder.rest
        return payload


class _Counted:
    """As long as its Content-Length said."""

    __slots__ = ("_missing", "aligned", "clean", "ended")

    def __init__(self, length: int) -> None:
        self._missing = length
        self.ended = length == 0
        self.clean = True
        self.aligned = False

    def feed(self, data: bytes) -> bytes:
        if not data:
            raise BackendError("The engine's connection ended within its answer.")
        self.clean = len(data) <= self._missing
        data = data[: self._missing]
        self._missing -= len(data)
        self.ended = not self._missing
        return data


class _UntilClose:
    """Until the engine closes: nobody can tell whether all of it came."""

    __slots__ = ("aligned", "clean", "ended")

    def __init__(self) -> None:
        self.ended = self.clean = False
        self.aligned = True

    def feed(self, data: bytes) -> bytes:
        self.ended = not data
        return data


class _Framed:
    """Another body as chunks."""

    __slots__ = ("_inner",)
    aligned = True

    def __init__(self, inner: _Counted | _UntilClose) -> None:
        self._inner = inner

    @property
    def ended(self) -> bool:
        return self._inner.ended

    @property
    def clean(self) -> bool:
        return self._inner.clean

    def feed(self, data: bytes) -> bytes:
        framed = http1.chunk(self._inner.feed(data))
        return framed + http1.LAST_CHUNK if self._inner.ended else framed


Body = _Chunked | _Decoded | _Counted | _UntilClose | _Framed


def body_of(response: http1.Response, *, chunked: bool) -> Body:
    """How the body of ``response`` passes to a client that gets it chunked, or else as bare bytes."""
    if response.body == "chunked":
        return _Chunked() if chunked else _Decoded()
    source = _Counted(response.length or 0) if response.body == "length" else _UntilClose()
    return _Framed(source) if chunked else source
