"""HTTP/1.1 heads and framing: strict, light and pure.

A proxy that reads a message differently from the program behind it can be made to smuggle requests, so every
doubt here is a refusal: one regular expression knows the only form of a header line, two framings together
are an error, and a number is digits and nothing else. Lines end with CRLF, in heads, chunks and trailers; a
bare LF is refused as soon as it is seen.

Both directions go the same way: ``*_head_end`` finds the end of the head in what has been read so far (and
refuses early what can no longer become one), ``parse_*`` reads it, ``forward_*`` writes the head for the
other side with the hop-by-hop fields gone. Bodies pass as raw bytes: ``ChunkCounter`` follows chunked framing
to know where the body ends, and takes it off for whoever wants the content.

Clients and engines send the same head again and again, but for the number in its Content-Length line. So
``LastHead`` keeps the last one of each connection, and what it was read as.

What a client sends wrong is a ``BadRequest``, what an engine sends wrong a ``BackendError``. Every value that
is written has been checked for CR, LF and NUL, also those that the caller adds. The patterns cannot backtrack
over more than one repetition, so hostile bytes cost linear time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from http import HTTPStatus
from typing import Any, Generic, NamedTuple, TypeVar

from anvil_mux.errors import BackendError, BadRequest, MuxError

MAX_REQUEST_LINE = 8 * 1024
MAX_HEAD = 64 * 1024
MAX_FIELDS = 100
MAX_CHUNK_LINE = 300
MAX_TRAILER = 8 * 1024
MAX_DIGITS = 15
"""The longest number in Content-Length or a chunk's head."""
MAX_REMEMBERED = 4 * 1024
"""The longest head that is remembered."""

EMPTY_LINE = b"\r\n"
BODYLESS = ("GET", "HEAD")
"""The methods whose requests say nothing of a body if they have none."""
BARE_LF = "lines end with CRLF, and one ends with a bare LF"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
SERVER = b"anvil-mux"

PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus} | {499: b"Client Closed Request"}

Field = tuple[bytes, bytes]

_HOP_BY_HOP = frozenset(
    [b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"http2-settings"]
)
_NOT_TO_ENGINES = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"forwarded"}
_OF_THE_ADDRESS = frozenset(
    (
        *(b"set-cookie", b"set-cookie2", b"clear-site-data", b"strict-transport-security", b"alt-svc"),
        *(b"public-key-pins", b"expect-ct", b"nel", b"report-to", b"reporting-endpoints"),
        b"service-worker-allowed",
    )
)
"""The fields that a browser takes as said by the address that it asked, for all of it: that is ours."""
_NOT_TO_CLIENTS = _HOP_BY_HOP | _OF_THE_ADDRESS | {b"content-length", b"server"}
_PLAIN_CONNECTION = frozenset([b"keep-alive", b"Keep-Alive", b"close", b"Close"])

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_TEXT = rb"[^\x00-\x08\x0a-\x1f\x7f]"
_FIELD = re.compile(rb"^(%b+):(%b*)\r\n" % (_TOKEN, _TEXT), re.MULTILINE)
_REQUEST_LINE = re.compile(rb"(%b{1,64}) ([!-~]+) HTTP/1\.([01])\r\n" % _TOKEN)
_OTHER_VERSION = re.compile(rb"%b{1,64} [!-~]+ HTTP/[0-9](?:\.[0-9])?(?:\r\n)?\Z" % _TOKEN)
_METHOD_SO_FAR = re.compile(rb"%b{1,64}(?: |\Z)" % _TOKEN)
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: (%b*))?\r\n" % _TEXT)
_ABSOLUTE = re.compile(r"(https?)://([^/?#]*)", re.IGNORECASE)
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+;=:%\[\]-]*")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]{0,8};%b{0,256})?\r\n" % _TEXT)
_CHUNK_LINE_SO_FAR = re.compile(rb"[0-9A-Fa-f]{0,15}(?:[ \t]{0,8}(?:;%b{0,256})?)?\r?" % _TEXT)
_LENGTH_LINE = re.compile(rb"\r\nContent-Length: ([0-9]{1,15})(?=\r\n)", re.IGNORECASE)
_TRAILER = re.compile(rb"(?:%b+:%b*\r\n)*\r\n" % (_TOKEN, _TEXT))
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class Request(NamedTuple):
    """A request's head."""

    method: str
    target: bytes
    """The request target, as it was sent."""
    path: str
    """Still percent-encoded, without the query."""
    query: str
    version: tuple[int, int]
    headers: list[Field]
    """The fields in the order in which they came, values stripped, without Content-Length (which is
    ``length``)."""
    fields: dict[bytes, bytes]
    """Lower-case name -> value; repeated ones joined by a comma."""
    keep_alive: bool
    chunked: bool
    expect_continue: bool
    passing: list[Field]
    """Lower-case name -> line, of the fields that may go on to an engine."""
    length: int | None


class Response(NamedTuple):
    """The head of an engine's answer."""

    version: tuple[int, int]
    status: int
    reason: bytes
    headers: list[Field]
    fields: dict[bytes, bytes]
    body: str
    """How the body ends: none (there is no body), length, chunked, close."""
    keep_alive: bool
    """Whether the engine's connection may be used again after the body."""
    passing: list[Field]
    """Lower-case name -> line, of the fields that may go on to a client."""
    length: int | None
    """The declared length; answers to HEAD and 304 may have one without a body."""


def request_head_end(buffer: bytes | bytearray, start: int = 0) -> int | None:
    """The index just past the head, or None while it is incomplete; the last call looked up to ``start``."""
    end = _find_end(buffer, start)
    if end is not None:
        return end
    if len(buffer) > MAX_HEAD:
        raise BadRequest(f"the request's head is larger than {MAX_HEAD} bytes", status=431)
    if _has_bare_lf(buffer, start):
        raise BadRequest(BARE_LF)
    line, newline, _ = _without_blank_line(bytes(buffer[: MAX_REQUEST_LINE + 3])).partition(b"\n")
    if newline or len(line) > MAX_REQUEST_LINE:
        _parse_request_line((line + newline) if newline else line + b"\r\n")
    elif line not in (b"", b"\r") and not _METHOD_SO_FAR.match(line):
        raise BadRequest("this is not HTTP (does the client speak https to this http port?)")
    return None


def parse_request(head: bytes) -> Request:
    """Reads a whole head, blank line included; BadRequest carries 400, 414, 417, 431, 501 or 505."""
    if len(head) > MAX_HEAD:
        raise BadRequest(f"the request's head is larger than {MAX_HEAD} bytes", status=431)
    head = _without_blank_line(head)
    line = _parse_request_line(head)
    headers = _parse_fields(head, line.end(), BadRequest)
    fields = _by_name(headers)
    minor = line[3] == b"1"
    host = fields.get(b"host")
    if (host is None and minor) or (host is not None and not _HOST.fullmatch(host)):
        raise BadRequest("an HTTP/1.1 request needs exactly one valid Host header")
    path, _, query = _origin_form(line[2].decode("ascii"), host).partition("?")
    length, chunked = _request_framing(fields, minor)
    if length is not None:
        headers = _without_length(headers, fields)
    return Request(
        line[1].decode("ascii"),
        line[2],
        path,
        query,
        (1, 1) if minor else (1, 0),
        headers,
        fields,
        _keep_alive(fields, minor),
        chunked,
        minor and b"expect" in fields and _expects_continue(fields[b"expect"]),
        _passing(headers, _NOT_TO_ENGINES | _named_by_connection(fields), b"x-forwarded-"),
        length,
    )


def response_head_end(buffer: bytes | bytearray, start: int = 0) -> int | None:
    """The same as ``request_head_end``, for an engine's answer; BackendError."""
    end = _find_end(buffer, start)
    if end is None and len(buffer) > MAX_HEAD:
        raise BackendError(f"the engine's answer has a head larger than {MAX_HEAD} bytes")
    if end is None and not b"HTTP/1.".startswith(buffer[:7]):
        raise BackendError("the engine's answer is not HTTP/1.x")
    if end is None and _has_bare_lf(buffer, start):
        raise BackendError(f"the engine's answer: {BARE_LF}")
    return end


def parse_response(head: bytes, method: str, *, upgrade: bool = False) -> Response:
    """Reads the answer to a request with ``method``; after a status below 200 another head follows.

    Only where ``upgrade`` was asked for, 101 is the last head.
    """
    line = _STATUS_LINE.match(head)
    if line is None:
        raise BackendError("the engine's answer does not begin with an HTTP/1.x status line")
    headers = _parse_fields(head, line.end(), BackendError)
    fields = _by_name(headers)
    minor = line[1] == b"1"
    status = int(line[2])
    if status == 101 and not upgrade:
        raise BackendError("the engine switched protocols unasked")
    length, chunked = _response_framing(fields)
    if length is not None:
        headers = _without_length(headers, fields)
    if status < 200 or status in (204, 304) or method == "HEAD":
        body = "none"
    else:
        body = "chunked" if chunked else "close" if length is None else "length"
    keep_alive = body != "close" and _keep_alive(fields, minor)
    version = (1, 1) if minor else (1, 0)
    passing = _passing(headers, _NOT_TO_CLIENTS | _named_by_connection(fields), b"access-control-")
    return Response(version, status, line[3] or b"", headers, fields, body, keep_alive, passing, length)


def forward_request_head(
    request: Request,
    host: str,
    target: str,
    *,
    passed: AbstractSet[bytes] = frozenset(),
    extra: Collection[Field] = (),
) -> bytes:
    """Return the lines of the head for an engine; ``framed`` ends it once the body is known.

    ``passed``: the lower-case names of the client's fields that are passed on, those of ``extra`` not among
    them.
    """
    passing = b"".join([line for low, line in request.passing if low in passed])
    first = f"{request.method} {target} HTTP/1.1\r\nHost: {host}\r\n".encode("ascii")
    return _written(first, passing, extra, b"")


def framed(lines: bytes, method: str, length: int) -> bytes:
    """The whole head of a request with a body of ``length`` bytes, from its lines."""
    if not length and method in BODYLESS:
        return lines + EMPTY_LINE
    return b"%bContent-Length: %d\r\n\r\n" % (lines, length)


def forward_response_head(
    response: Response,
    *,
    length: int | None = None,
    chunked: bool = False,
    connection: bytes | None = None,
    extra: Iterable[Field] = (),
) -> bytes:
    """The head for the client; ``extra`` replaces fields.

    Without ``length`` and ``chunked`` there is no body, or the end of the connection ends it. ``connection``
    is close, or keep-alive for HTTP/1.0 clients.
    """
    added = list(extra)
    names = [name.lower() for name, _ in added]
    passing = b"".join([line for low, line in response.passing if low not in names])
    if connection is not None:
        added.append((b"Connection", connection))
    first = _first_lines(response.status, response.reason)
    return _written(first, passing, added, _framing(length, chunked=chunked))


def response(
    status: int, headers: Iterable[Field] = (), body: bytes = b"", *, head_only: bool = False
) -> bytes:
    """A whole answer of our own in one bytes object; ``head_only`` for HEAD."""
    bodyless = status < 200 or status in (204, 304)
    framing = _framing(None if bodyless else len(body))
    head = _written(_first_lines(status), b"", list(headers), framing)
    return head if head_only or bodyless else head + body


def stream_head(headers: Iterable[Field], *, chunked: bool, connection: bytes | None = None) -> bytes:
    """The head of a stream that we begin ourselves, before an engine answers."""
    own = [*headers, (b"Connection", connection)] if connection is not None else list(headers)
    return _written(_first_lines(200), b"", own, _framing(None, chunked=chunked))


_Message = TypeVar("_Message", Request, Response)
_new = tuple.__new__
"""The call inside a NamedTuple's own constructor, in half its time."""


class LastHead(Generic[_Message]):
    """The last head that one side of one connection sent, and what it came to. Never altered.

    If a head comes again, two comparisons find its end and tell all of it: reading takes 2 us instead of 15
    to 22. A new connection begins with what is known of one that has ended: who opens one for each request
    sends the same head on each. Nothing is kept but the bytes and what they were read as; what a head means
    is for each request to decide. (An answer's head is read with the method that was asked by: one to HEAD is
    neither kept nor asked for here.)
    """

    __slots__ = ("_after", "_before", "_fields", "_kind", "_limit", "_number")

    def __init__(self, head: bytes, message: _Message) -> None:
        """``head`` was read as ``message``.

        It can come again only if its Content-Length is all that says where the body ends (which the message's
        length says: with another framing it has none, or was refused).
        """
        line = _LENGTH_LINE.search(head)
        has_body = message.length is not None and (isinstance(message, Request) or message.body == "length")
        self._before = self._after = b""
        """The head around the number."""
        self._number = self._limit = 0
        """The index of the number, and the one at which the head must have ended."""
        self._kind: type[_Message] = type(message)
        self._fields: tuple[Any, ...] = message[:-1]
        """The message without its length, the last field."""
        if line is not None and has_body and len(head) <= MAX_REMEMBERED:
            self._number, line_end = line.span(1)
            self._before, self._after = head[: self._number], head[line_end:]
            self._limit = self._number + MAX_DIGITS + len(self._after)

    def again(self, buffer: bytes) -> tuple[_Message, int] | None:
        """The head that ``buffer`` begins with, and its end, if it is the last one but for its length."""
        if not buffer.startswith(self._before):
            return None
        line_end = buffer.find(self._after, self._number, self._limit)
        length = buffer[self._number : line_end]
        if line_end < 0 or not length.isdigit():
            return None
        return _new(self._kind, (*self._fields, int(length))), line_end + len(self._after)


class ChunkCounter:
    """Follows raw chunked bytes and knows where they end; ``error`` is raised when they are not chunked.

    Between two feeds there is either payload to come (``_left``, its CRLF counted in) or the beginning of a
    line that has not ended (``_held``), never both unless a chunk's CR came without its LF.
    """

    __slots__ = ("_error", "_held", "_left", "_trailer")

    def __init__(self, error: type[MuxError] = BackendError) -> None:
        self._error = error
        self._left = 0
        self._held = b""
        self._trailer = False

    def feed(self, data: bytes, payload: list[bytes] | None = None) -> int | None:
        """The index just past the body in ``data``, or None while it goes on; fills ``payload`` if given."""
        held = len(self._held)
        if held:
            data = self._held + data
            self._held = b""
        position, size, left = 0, len(data), self._left
        while not self._trailer:
            if left:
                end = position + left
                if payload is not None and (content := data[position : end - 2]):
                    payload.append(content)
                if end > size:
                    self._pause(data, position, end)
                    return None
                if not data.startswith(b"\r\n", end - 2):
                    raise self._error("a chunk of the body is longer than it says")
                position = end
                if end == size:
                    self._left = 0
                    return None
            line = _CHUNK_LINE.match(data, position)
            if line is None:
                self._left = 0
                self._hold(data, position)
                return None
            position = line.end()
            left = int(line[1], 16) + 2
            self._trailer = left == 2
        return self._end(data, position, held)

    @property
    def between_chunks(self) -> bool:
        """Whether whole chunks have passed, so that one of our own could follow."""
        return not (self._left or self._held or self._trailer)

    def _pause(self, data: bytes, position: int, end: int) -> None:
        """Note that the payload, or its CRLF, goes on after ``data``."""
        size = len(data)
        if end - size == 1 and size > position:
            self._held, self._left = data[-1:], 2
            if self._held != b"\r":
                raise self._error("a chunk of the body is longer than it says")
        else:
            self._left = end - size

    def _hold(self, data: bytes, position: int) -> None:
        self._held = data[position : position + MAX_CHUNK_LINE]
        if not _CHUNK_LINE_SO_FAR.fullmatch(self._held):
            raise self._error("the body is not chunked as its head says")

    def _end(self, data: bytes, position: int, held: int) -> int | None:
        trailer = _TRAILER.match(data, position)
        if trailer is not None:
            return trailer.end() - held
        self._held = data[position : position + MAX_TRAILER]
        if len(self._held) == MAX_TRAILER or b"\n\r\n" in self._held or _has_bare_lf(self._held, 0):
            raise self._error("the body has a bad trailer")
        return None


def chunk(data: bytes) -> bytes:
    """One chunk with ``data``; nothing for no data, because an empty chunk would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def parse_fields(block: bytes) -> list[Field]:
    """The header lines of a part of a multipart body, blank line included."""
    return _parse_fields(block, 0, BadRequest)


def _find_end(buffer: bytes | bytearray, start: int) -> int | None:
    end = buffer.find(b"\r\n\r\n", max(start - 3, 0))
    return end + 4 if end >= 0 else None


def _has_bare_lf(buffer: bytes | bytearray, start: int) -> bool:
    """Whether a line that ends after ``start`` does so without a CR."""
    return buffer.count(b"\n", start) != buffer.count(b"\r\n", max(start - 1, 0))


def _without_blank_line(head: bytes) -> bytes:
    """Drop the stray line end that some clients send after a body (RFC 9112, 2.2)."""
    return head[2:] if head[:2] == EMPTY_LINE else head


def _parse_request_line(head: bytes) -> re.Match[bytes]:
    line = _REQUEST_LINE.match(head)
    if line is not None and line.end() <= MAX_REQUEST_LINE:
        return line
    text = head[: head.find(b"\n") + 1] or head
    if len(text) > MAX_REQUEST_LINE:
        raise BadRequest(f"the request line is longer than {MAX_REQUEST_LINE} bytes", status=414)
    if _OTHER_VERSION.match(text):
        raise BadRequest("only HTTP/1.1 and HTTP/1.0 are spoken here", status=505)
    raise BadRequest("the request line is not `METHOD target HTTP/1.1`")


def _parse_fields(head: bytes, start: int, error: type[MuxError]) -> list[Field]:
    """Read the header lines.

    Every line must be one match, so that as many matches as lines means that all of them are sound.
    """
    found = _FIELD.findall(head, start)
    if len(found) != head.count(b"\n", start) - 1 or not head.endswith(b"\n\r\n"):
        raise error(
            "a header line is not `name: value` (or is folded, or has a control character or bare LF)"
        )
    if len(found) > MAX_FIELDS:
        if error is BadRequest:
            raise BadRequest(f"more than {MAX_FIELDS} header lines", status=431)
        raise error(f"more than {MAX_FIELDS} header lines")
    return [(name, value.strip(b" \t")) for name, value in found]


def _by_name(headers: list[Field]) -> dict[bytes, bytes]:
    fields = {name.lower(): value for name, value in headers}
    if len(fields) != len(headers):
        fields = {}
        for name, value in headers:
            low = name.lower()
            fields[low] = fields[low] + b", " + value if low in fields else value
    return fields


def _origin_form(target: str, host: bytes | None) -> str:
    """The path and query of a target; an absolute form has to name the same authority as ``host``."""
    if target[0] == "/" or target == "*":
        return target
    absolute = _ABSOLUTE.match(target)
    if absolute is None:
        raise BadRequest("the request's target must begin with `/`")
    scheme, authority = absolute.groups()
    port = _DEFAULT_PORTS[scheme.lower()]
    named, asked = (host or b"").decode("latin-1").lower(), authority.lower()
    if not asked or named.removesuffix(port) != asked.removesuffix(port):
        raise BadRequest("the request's target and its Host header name different hosts")
    rest = target[absolute.end() :]
    return rest if rest.startswith("/") else "/" + rest


def _request_framing(fields: dict[bytes, bytes], minor: bool) -> tuple[int | None, bool]:
    coding = fields.get(b"transfer-encoding")
    if coding is None:
        return _length(fields, BadRequest), False
    if b"content-length" in fields or not minor:
        raise BadRequest("Transfer-Encoding does not go with Content-Length or with HTTP/1.0")
    if coding.lower() != b"chunked":
        raise BadRequest("the only transfer coding understood is `chunked`", status=501)
    return None, True


def _response_framing(fields: dict[bytes, bytes]) -> tuple[int | None, bool]:
    coding = fields.get(b"transfer-encoding")
    if coding is None:
        return _length(fields, BackendError), False
    if b"content-length" in fields or coding.lower() != b"chunked":
        raise BackendError("the engine's answer has an ambiguous or unknown transfer coding")
    return None, True


def _without_length(headers: list[Field], fields: dict[bytes, bytes]) -> list[Field]:
    if len(fields) == len(headers):  # none is repeated, so they stand in the same order
        del headers[list(fields).index(b"content-length")]
    else:
        headers = [field for field in headers if field[0].lower() != b"content-length"]
    del fields[b"content-length"]
    return headers


def _length(fields: dict[bytes, bytes], error: type[MuxError]) -> int | None:
    value = fields.get(b"content-length")
    if value is None:
        return None
    if not value.isdigit() or len(value) > MAX_DIGITS:
        raise error("Content-Length must be given once, as a plain number")
    return int(value)


def _keep_alive(fields: dict[bytes, bytes], minor: bool) -> bool:
    value = fields.get(b"connection")
    if value is None:
        return minor
    if value in _PLAIN_CONNECTION:
        return value[0] in b"kK"
    options = _tokens(value)
    return b"close" not in options if minor else b"keep-alive" in options


def _expects_continue(value: bytes) -> bool:
    if value.lower() != b"100-continue":
        raise BadRequest("the only expectation understood is `100-continue`", status=417)
    return True


def _named_by_connection(fields: dict[bytes, bytes]) -> frozenset[bytes]:
    value = fields.get(b"connection")
    return frozenset() if value is None or value in _PLAIN_CONNECTION else _tokens(value)


def _tokens(value: bytes) -> frozenset[bytes]:
    return frozenset(token.strip(b" \t") for token in value.lower().split(b","))


def _passing(headers: list[Field], unwanted: AbstractSet[bytes], prefix: bytes) -> list[Field]:
    """The lines of ``headers`` that may go on to the other side, each with its lower-case name.

    Where a client comes from is not for it to say (x-forwarded-), and not for an engine which other sites'
    pages may read its answers (access-control-).
    """
    beginnings = (b"proxy-", prefix)
    return [
        (low, b"%b: %b\r\n" % field)
        for field in headers
        if (low := field[0].lower()) not in unwanted and not low.startswith(beginnings)
    ]


def _first_lines(status: int, reason: bytes = b"") -> bytes:
    """The lines that every answer begins with."""
    return b"HTTP/1.1 %d %b\r\nServer: %b\r\n" % (status, reason or PHRASES.get(status, b""), SERVER)


def _framing(length: int | None, *, chunked: bool = False) -> bytes:
    """The end of a head, with the line that says where the body ends."""
    if chunked:
        return b"Transfer-Encoding: chunked\r\n\r\n"
    return EMPTY_LINE if length is None else b"Content-Length: %d\r\n\r\n" % length


def _written(first: bytes, passing: bytes, fields: Collection[Field], end: bytes) -> bytes:
    """The head made of ``first`` (two lines), the lines in ``passing``, those of ``fields``, and ``end``.

    ValueError if a line end was smuggled into one of our own lines, or NUL.
    """
    last = b"".join([b"%b: %b\r\n" % field for field in fields])
    own, ends = first + last, 2 + len(fields)
    if len(own.splitlines()) != ends or own.find(b"\0") >= 0:
        raise ValueError("a header value holds a line end or NUL")
    return first + passing + last + end
