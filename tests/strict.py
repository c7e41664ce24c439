"""Both ends of HTTP/1.1 as a strict peer reads them: by h11, which shares no line with anvil-mux.

Every byte that comes belongs to exactly one request, or to exactly one answer; any other is ``Unsound``.
Where h11 is lenient (lines that end with a bare LF, folded ones, an answer with two framings) this is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import h11

MOST = 1 << 22
"""Bytes that a head may have."""
END = b"\r\n\r\n"

Fields = list[tuple[bytes, bytes]]


class Unsound(AssertionError):
    """Bytes that a strict peer does not take, or that belong to no request or answer."""


@dataclass
class Received:
    """One request as its server parses it; names of fields are in lower case."""

    method: bytes
    target: bytes
    version: bytes
    fields: Fields
    head: bytes
    """Its bytes, blank line included."""
    body: bytes = b""
    size: int = 0
    """Bytes of the body, also if they were not kept."""
    trailers: Fields = field(default_factory=list)

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key == name]


class RequestReader:
    """A server's reading of one connection: bytes in, whole requests out."""

    def __init__(self, *, keep_bodies: bool = True) -> None:
        self.keep_bodies = keep_bodies
        self.upgraded = False
        """A request asked for another protocol: what follows is not for HTTP to judge."""
        self._begin(b"")

    def _begin(self, data: bytes) -> None:
        self._connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST)
        self._head = b""
        self._current: Received | None = None
        self._pieces: list[bytes] = []
        if data:
            self._take(data)

    def _take(self, data: bytes) -> None:
        if self._current is None:
            self._head += data
        self._connection.receive_data(data)

    def feed(self, data: bytes) -> list[Received]:
        """The requests that are whole now."""
        if self.upgraded:
            return []
        self._take(data)
        whole: list[Received] = []
        while not self.upgraded and (request := self._next()):
            whole.append(request)
        return whole

    def _next(self) -> Received | None:
        try:
            while True:
                event = self._connection.next_event()
                if isinstance(event, h11.Request):
                    self._current = self._received(event)
                elif isinstance(event, h11.Data):
                    assert self._current
                    self._current.size += len(event.data)
                    if self.keep_bodies:
                        self._pieces.append(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    return self._ended(event)
                else:
                    return None
        except h11.RemoteProtocolError as error:
            raise Unsound(f"no request for a strict server: {error}: {self._head[:500]!r}") from None

    def _received(self, event: h11.Request) -> Received:
        self._head, _, _ = self._head.partition(END)
        head = _sound(self._head + END)
        return Received(event.method, event.target, event.http_version, list(event.headers), head)

    def _ended(self, event: h11.EndOfMessage) -> Received:
        request, self._current = self._current, None
        assert request
        request.body, request.trailers = b"".join(self._pieces), list(event.headers)
        self.upgraded = bool(request.values(b"upgrade"))
        self._begin(self._connection.trailing_data[0])
        return request

    def end(self) -> None:
        """The connection ended: Unsound within a request."""
        if not self.upgraded and (self._current is not None or self._head):
            raise Unsound(f"the connection ended within a request: {self._head[:500]!r}")


class AnswerReader:
    """A client's reading of the answer to one request."""

    def __init__(self, method: bytes = b"GET", *, upgrade: bool = False) -> None:
        fields = [("Host", "x")]
        if upgrade:
            fields += [("Connection", "Upgrade"), ("Upgrade", "websocket")]
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MOST)
        self._connection.send(h11.Request(method=method, target="/", headers=fields))
        self._connection.send(h11.EndOfMessage())
        self._bytes = b""
        self.status = 0
        self.fields: Fields = []
        self.head = b""
        self.interim: list[int] = []
        self.body = b""
        self.trailers: Fields = []
        self.ended = False
        """It came to its end, as its framing says."""
        self.rest = b""
        """Bytes that came after it."""

    @property
    def size(self) -> int:
        """Its bytes, framing included, interim answers not."""
        return len(self._bytes) - len(self.rest) - self._skipped

    _skipped = 0

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.fields if key == name]

    def feed(self, data: bytes) -> None:
        """Read what came; b"": the connection ended."""
        self._bytes += data
        if self.ended:
            self.rest += data
            return
        try:
            self._connection.receive_data(data)
            while not self.ended and (event := self._connection.next_event()) is not h11.NEED_DATA:
                if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                    break
                self._note(event)
        except h11.RemoteProtocolError as error:
            if data:
                raise Unsound(f"no answer for a strict client: {error}: {self._bytes[:500]!r}") from None

    def _note(self, event: object) -> None:
        if isinstance(event, (h11.InformationalResponse, h11.Response)):
            start, _, _ = self._bytes[self._skipped :].partition(END)
            head = _sound(start + END)
            if isinstance(event, h11.Response) or event.status_code == 101:
                self._begin(event, head)
            else:
                self.interim.append(event.status_code)
                self._skipped += len(head)
        elif isinstance(event, h11.Data):
            self.body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            self.trailers = list(event.headers)
            self._end()

    def _begin(self, event: h11.InformationalResponse | h11.Response, head: bytes) -> None:
        self.status, self.fields, self.head = event.status_code, list(event.headers), head
        names = [name for name, _ in self.fields]
        framings = [name for name in names if name in (b"content-length", b"transfer-encoding")]
        if len(framings) > 1:
            raise Unsound(f"an answer with two framings: {head!r}")
        if framings and event.status_code in (101, 204):
            raise Unsound(f"a {event.status_code} with a framing: {head!r}")
        if event.status_code == 101:
            self._end()

    def _end(self) -> None:
        self.ended = True
        self.rest = self._connection.trailing_data[0]


def _sound(head: bytes) -> bytes:
    lines = head.split(b"\r\n")
    if any(b"\n" in line or b"\r" in line or line[:1] in (b" ", b"\t") for line in lines):
        raise Unsound(f"a head with a bare line end or a folded line: {head!r}")
    return head
