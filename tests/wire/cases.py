"""Requests and answers as data: what a client sends, what the engine makes of it, and the bytes of both.

A ``Case`` is drawn from a seed, or written down: it reads as the expression that makes it, without what is
usual. ``<id>`` in a body or a field stands for the request's id, by which both sides know each other.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any


class _Brief:
    """A record whose expression leaves out what is usual."""

    def __repr__(self) -> str:
        said = []
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if each.default is MISSING or value != each.default:
                said.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(said)})"


# Ways


@dataclass(frozen=True)
class Way:
    """A route as the documentation has it."""

    method: str
    target: str
    body: str = ""
    at: str = ""
    """Where the engine is asked; empty: no request may reach an engine by this way."""
    events: str = "chat"
    """How its streams end; empty: nothing tells."""
    names: str = "body"
    """Where it names its model: body, query, path."""
    kind: str = "application/json"
    translated: bool = False


def _posted(more: str = "") -> str:
    return '{"model":"%m","id":"<id>",' + more + '"messages":[{"role":"user","content":"say <id>"}]}'


_PLAIN, _STREAM = _posted(), _posted('"stream":true,')
_PROMPT = '{"prompt":"say <id>","model":"%m"}'
_INPUT = '{"input":"say <id>","model":"%m"}'
_FORM = (
    '--XX\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n<id>\r\n'
    '--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\n%m\r\n--XX--\r\n'
)

WAYS: dict[str, Way] = {
    "chat": Way("POST", "/v1/chat/completions", _PLAIN, "/v1/chat/completions"),
    "stream": Way("POST", "/v1/chat/completions", _STREAM, "/v1/chat/completions"),
    "chat-query": Way("POST", "/v1/chat/completions?a=1&b=%20", _PLAIN, "/v1/chat/completions?a=1&b=%20"),
    "azure": Way("POST", "/openai/v1/chat/completions", _PLAIN, "/v1/chat/completions"),
    "completions": Way("POST", "/v1/completions", _PROMPT, "/v1/completions"),
    "embeddings": Way("POST", "/v1/embeddings", _INPUT, "/v1/embeddings", ""),
    "responses": Way("POST", "/v1/responses", _INPUT, "/v1/responses", "responses"),
    "messages": Way("POST", "/v1/messages", _STREAM, "/v1/messages", "messages"),
    "completion": Way("POST", "/completion", _PROMPT, "/completion", ""),
    "tokenize": Way("POST", "/tokenize", _PROMPT, "/tokenize", ""),
    "form": Way(
        "POST",
        "/v1/audio/transcriptions",
        _FORM,
        "/v1/audio/transcriptions",
        "",
        kind="multipart/form-data; boundary=XX",
    ),
    "props": Way("GET", "/props?model=%m", "", "/props?model=%k", "", "query"),
    "health": Way("GET", "/upstream/a/health", "", "/health", "", "path"),
    "engine-models": Way("GET", "/upstream/a/v1/models?x=<id>", "", "/v1/models?x=<id>", "", "path"),
    "upstream": Way("POST", "/upstream/a/v1/chat/completions", _PLAIN, "/v1/chat/completions", "", "path"),
    "ollama": Way(
        "POST",
        "/api/chat",
        _posted('"stream":false,'),
        "/v1/chat/completions",
        "chat",
        translated=True,
    ),
    "ollama-stream": Way("POST", "/api/chat", _PLAIN, "/v1/chat/completions", "chat", translated=True),
    "models": Way("GET", "/v1/models"),
    "healthz": Way("GET", "/healthz"),
    "livez": Way("GET", "/livez"),
    "metrics": Way("GET", "/metrics"),
    "tags": Way("GET", "/api/tags"),
    "version": Way("GET", "/api/version"),
    "root": Way("GET", "/"),
    "nothing": Way("GET", "/nothing/<id>"),
    "files": Way("POST", "/v1/files", _PLAIN),
    "sleep": Way("POST", "/upstream/a/v1/../sleep?level=2", _PLAIN),
    "encoded": Way("POST", "/upstream/a/%73leep", _PLAIN),
    "no-model": Way("POST", "/v1/chat/completions", _PLAIN.replace("%m", "nobody")),
    "no-upstream": Way("POST", "/upstream/nobody/v1/chat/completions", _PLAIN),
}
OWN = ("models", "healthz", "livez", "metrics", "tags", "version", "root")
"""The ways to anvil-mux itself."""
OPEN = ("livez",)
"""The ways that need no key."""
PASS_HEADERS = ("x-wire", "x-two", "x-caps", "x-empty", "x-space", "x-latin")
"""The fields that the services have passed on to their engine."""
KNOWN_AS = {"a": "a", "alias": "a", "org/b": "b-inside"}
"""The names of models, and those that their engines know them by."""
KEYS = {
    "admin": b"wire-key-of-an-admin",
    "only-a": b"wire-key-for-one-model",
    "unknown": b"wire-key-that-is-none",
}


# Requests


@dataclass(frozen=True, repr=False)
class Answer(_Brief):
    """What the engine does with one request."""

    status: int = 200
    kind: str = "json"
    """Of the content: json, events, text, none."""
    framing: str = "length"
    """length, chunked, close."""
    fields: tuple[str, ...] = ()
    pad: int = 0
    """Bytes by which the content is longer."""
    usage: int = 0
    """Tokens that it reports."""
    packed: bool = False
    """Its content is compressed."""
    last: bool = True
    """A stream has its last event."""
    interim: tuple[int, ...] = ()
    trailers: bool = False
    pieces: int = 1
    """Writes that it comes in."""
    split: bool = False
    """Its chunks end anywhere."""
    cut: int = -1
    """Thousandths of its bytes after which it breaks off; -1: it does not."""
    end: str = "keep"
    """What the engine does with its connection then: keep, close, reset."""
    twice: str = ""
    """A second answer that nobody asked for: together with the first, or later."""
    wrong: str = ""
    """A way in which it is not HTTP; see ``WRONG_ANSWERS``."""


@dataclass(frozen=True, repr=False)
class Ask(_Brief):
    """One request of a client."""

    way: str = "chat"
    model: str = "a"
    key: str = ""
    method: str = ""
    """Another one than the route's."""
    version: str = "1.1"
    fields: tuple[str, ...] = ()
    framing: str = "length"
    """Of a body: length, chunked."""
    body: str | None = None
    """Another one than the route's."""
    named: str = ""
    """Another model that the body names, where it is the path that says whom to ask."""
    packed: bool = False
    """The body is compressed."""
    pad: int = 0
    """Bytes by which the body is longer."""
    extensions: bool = False
    """Chunks have extensions, leading zeros, and odd sizes."""
    trailers: bool = False
    absolute: bool = False
    blank: bool = False
    """A blank line comes before it."""
    pieces: int = 1
    wrong: str = ""
    """A way in which it is not HTTP; see ``WRONG``."""
    cut: int = -1
    """Thousandths of its bytes after which its client leaves; -1: it does not."""
    reads: int = -1
    """Bytes of the answer after which its client leaves; -1: it does not."""
    leave: str = "close"
    """How a client leaves: close, reset, half."""
    answer: Answer = Answer()


@dataclass(frozen=True, repr=False)
class Line(_Brief):
    """One connection of a client, and the requests on it."""

    asks: tuple[Ask, ...] = (Ask(),)
    pipelined: bool = False


@dataclass(frozen=True, repr=False)
class Case(_Brief):
    """Some connections; one after the other, or at once. ``keyed``: where there are API keys."""

    lines: tuple[Line, ...] = (Line(),)
    at_once: bool = False
    keyed: bool = False


# What a request is


def content_of(ask: Ask, id: str) -> bytes:
    """The body's content, as its sender means it."""
    way = WAYS[ask.way]
    text = way.body if ask.body is None else ask.body
    named = ask.named or (ask.model if way.names == "body" else "a")
    data = text.replace("%m", named).replace("<id>", id).encode()
    if ask.pad and data.endswith(b"}"):
        data = data[:-1] + b',"pad":"' + b"x" * ask.pad + b'"}'
    return data


def target_of(ask: Ask, id: str) -> str:
    return WAYS[ask.way].target.replace("%m", ask.model.replace("/", "%2F")).replace("<id>", id)


def asked_at(ask: Ask, id: str) -> str:
    """The target that the engine is to be asked at."""
    return WAYS[ask.way].at.replace("%k", KNOWN_AS[ask.model]).replace("<id>", id)


def method_of(ask: Ask) -> str:
    return ask.method or WAYS[ask.way].method


def request_bytes(ask: Ask, id: str, host: bytes) -> bytes:
    """What its client sends."""
    content = content_of(ask, id)
    sent = gzip.compress(content, mtime=0) if ask.packed else content
    target = target_of(ask, id).encode()
    if ask.absolute:
        target = b"http://" + host + target
    lines = [b"Host: " + host, b"X-Wire: " + id.encode()]
    if WAYS[ask.way].body:
        lines.append(b"Content-Type: " + WAYS[ask.way].kind.encode())
    if ask.key:
        lines.append(b"Authorization: Bearer " + KEYS[ask.key])
    if ask.packed:
        lines.append(b"Content-Encoding: gzip")
    lines += [line.replace("<id>", id).encode("latin-1") for line in ask.fields]
    if ask.framing == "chunked":
        lines.append(b"Transfer-Encoding: chunked")
        sent = _chunks(sent, odd=ask.extensions, trailers=ask.trailers)
    elif sent or method_of(ask) == "POST":
        lines.append(b"Content-Length: %d" % len(sent))
    first = b"%b %b HTTP/%b" % (method_of(ask).encode(), target, ask.version.encode())
    if ask.wrong:
        first, lines, sent = WRONG[ask.wrong](first, lines, sent)
    start = b"\r\n" if ask.blank else b""
    return start + b"\r\n".join([first, *lines, b"", b""]) + sent


def _chunks(content: bytes, *, odd: bool, trailers: bool) -> bytes:
    size = 7 if odd else 4096
    extension = b' ;a=b;c="d"' if odd else b""
    form = b"000%X%b\r\n%b\r\n" if odd else b"%x%b\r\n%b\r\n"
    parts = [content[start : start + size] for start in range(0, len(content), size)]
    chunks = b"".join(form % (len(part), extension, part) for part in parts)
    ends = b"X-Trailer: 1\r\nContent-Length: 3\r\nX-Wire: ~0~\r\n" if trailers else b""
    return chunks + b"0" + extension + b"\r\n" + ends + b"\r\n"


# Requests that are none

Parts = tuple[bytes, list[bytes], bytes]


def _line(*more: bytes) -> Callable[[bytes, list[bytes], bytes], Parts]:
    return lambda first, lines, body: (first, [*lines, *more], body)


def _framed(*framing: bytes, body: bytes | None = None) -> Callable[[bytes, list[bytes], bytes], Parts]:
    def changed(first: bytes, lines: list[bytes], sent: bytes) -> Parts:
        kept = [line for line in lines if not line.startswith((b"Content-Length", b"Transfer-Encoding"))]
        return first, [*kept, *framing], sent if body is None else body

    return changed


def _first(old: bytes, new: bytes) -> Callable[[bytes, list[bytes], bytes], Parts]:
    return lambda first, lines, body: (first.replace(old, new), lines, body)


def _host(*hosts: bytes) -> Callable[[bytes, list[bytes], bytes], Parts]:
    return lambda first, lines, body: (first, [*hosts, *lines[1:]], body)


_CHUNKED = b"Transfer-Encoding: chunked"
WRONG: dict[str, Callable[[bytes, list[bytes], bytes], Parts]] = {
    "two framings": _framed(b"Content-Length: 3", _CHUNKED, body=b"0\r\n\r\n"),
    "two framings, the other way": _framed(_CHUNKED, b"Content-Length: 3", body=b"0\r\n\r\n"),
    "two lengths": _framed(b"Content-Length: 2", b"Content-Length: 3", body=b"{} "),
    "a list of lengths": _framed(b"Content-Length: 2, 3", body=b"{} "),
    "a length with a sign": _framed(b"Content-Length: +2", body=b"{}"),
    "a negative length": _framed(b"Content-Length: -2", body=b"{}"),
    "a length in hex": _framed(b"Content-Length: 0x2", body=b"{}"),
    "a length with an underscore": _framed(b"Content-Length: 0_2", body=b"{}"),
    "an empty length": _framed(b"Content-Length:", body=b"{}"),
    "a length beyond all bounds": _framed(b"Content-Length: 99999999999999999999", body=b"{}"),
    "a space before a colon": _framed(b"Content-Length : 2", body=b"{}"),
    "a space before a coding's colon": _framed(b"Transfer-Encoding : chunked", body=b"0\r\n\r\n"),
    "a folded line": _line(b"X-Folded: 1\r\n 2"),
    "a folded length": _framed(b"Content-Length:\r\n 2", body=b"{}"),
    "a bare LF": _line(b"X-A: 1\nX-B: 2"),
    "a bare CR": _line(b"X-A: 1\rX-B: 2"),
    "a NUL": _line(b"X-A: 1\x002"),
    "a line without a colon": _line(b"nothing"),
    "a name with a space": _line(b"X A: 1"),
    "a name that is empty": _line(b": 1"),
    "no host": _host(),
    "two hosts": _host(b"Host: 127.0.0.1", b"Host: 127.0.0.2"),
    "a host that is none": _host(b"Host: 127.0.0.1 x"),
    "an unknown coding": _framed(b"Transfer-Encoding: gzip", body=b"{}"),
    "a list of codings": _framed(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
    "chunked twice": _framed(_CHUNKED, _CHUNKED, body=b"0\r\n\r\n"),
    "chunked, and not last": _framed(b"Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"),
    "a coding with a tab within": _framed(b"Transfer-Encoding: chu\tnked", body=b"0\r\n\r\n"),
    "a chunk's size with a sign": _framed(_CHUNKED, body=b"+2\r\n{}\r\n0\r\n\r\n"),
    "a chunk's size with 0x": _framed(_CHUNKED, body=b"0x2\r\n{}\r\n0\r\n\r\n"),
    "a chunk's size that is none": _framed(_CHUNKED, body=b"g\r\n{}\r\n0\r\n\r\n"),
    "a chunk longer than it says": _framed(_CHUNKED, body=b"1\r\n{}\r\n0\r\n\r\n"),
    "chunks with bare LFs": _framed(_CHUNKED, body=b"2\n{}\n0\n\n"),
    "a trailer that is none": _framed(_CHUNKED, body=b"2\r\n{}\r\n0\r\nX A\r\n\r\n"),
    "HTTP/2": _first(b"HTTP/1.1", b"HTTP/2.0"),
    "HTTP/0.9": _first(b" HTTP/1.1", b""),
    "two spaces": _first(b" /", b"  /"),
    "a target with a space": _first(b" /", b" /a /"),
    "a tab for a space": _first(b" /", b"\t/"),
    "another host's target": _first(b" /", b" http://external.example/"),
    "another expectation": _line(b"Expect: 200-ok"),
    "a long target": _first(b" /", b" /" + b"x" * 9000),
    "a large head": _line(b"X-A: " + b"x" * 70_000),
    "many lines": _line(*[b"X-A: 1"] * 150),
    "a coding in HTTP/1.0": lambda first, lines, body: _framed(_CHUNKED, body=b"0\r\n\r\n")(
        first.replace(b"HTTP/1.1", b"HTTP/1.0"), lines, body
    ),
}

IN_BODIES = frozenset(
    (
        *("a chunk's size with a sign", "a chunk's size with 0x", "a chunk's size that is none"),
        *("a chunk longer than it says", "chunks with bare LFs", "a trailer that is none"),
    )
)
"""Those of them that show in the body alone, which anvil-mux does not read for its own ways."""


# Answers


def said_by(answer: Answer, way: Way, id: str) -> bytes:
    """The content of an answer, before it is compressed."""
    figures = {"prompt_tokens": 7, "completion_tokens": answer.usage, "total_tokens": 7 + answer.usage}
    usage: dict[str, Any] = {"usage": figures} if answer.usage else {}
    match answer.kind:
        case "none":
            return b""
        case "text":
            return f"{id} ".encode() + b"x" * answer.pad
        case "json":
            message = {"role": "assistant", "content": f"this is {id}" + "x" * answer.pad}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            return json.dumps({"id": id, "choices": choices, **usage}).encode()
    events = []
    for number in range(2 + answer.pad // 1000):
        delta = {"content": f"{number} of {id} " + "x" * min(answer.pad, 1000)}
        events.append({"id": id, "choices": [{"index": 0, "delta": delta}]})
    if answer.last:
        events.append({"id": id, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **usage})
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return (text + (LAST_EVENTS[way.events or "chat"] if answer.last else "")).encode()


LAST_EVENTS = {
    "chat": "data: [DONE]\n\n",
    "messages": 'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    "responses": 'event: response.completed\ndata: {"type":"response.completed"}\n\n',
}
TYPES = {"json": "application/json", "events": "text/event-stream", "text": "text/plain", "none": ""}
BODYLESS = (204, 304)


def body_of(answer: Answer, way: Way, id: str) -> bytes:
    """The content of an answer as it is sent, and as its client is to get it."""
    if answer.status in BODYLESS:
        return b""
    content = said_by(answer, way, id)
    return gzip.compress(content, mtime=0) if answer.packed else content


def answer_bytes(answer: Answer, way: Way, id: str) -> bytes:
    """What the engine sends, if it does not break off."""
    body = body_of(answer, way, id)
    lines = [f"X-Wire: {id}".encode()]
    if TYPES[answer.kind]:
        lines.append(b"Content-Type: " + TYPES[answer.kind].encode())
    if answer.packed:
        lines.append(b"Content-Encoding: gzip")
    lines += [line.replace("<id>", id).encode("latin-1") for line in answer.fields]
    if answer.status not in BODYLESS:
        if answer.framing == "length":
            lines.append(b"Content-Length: %d" % len(body))
        elif answer.framing == "chunked":
            lines.append(_CHUNKED)
            size = len(body) // 5 or 1
            parts = [body[start : start + size] for start in range(0, len(body), size)]
            if not (answer.split or answer.packed):
                parts = [event + b"\n\n" for event in body.split(b"\n\n")[:-1]] or [body]
                parts = [part for part in parts if part]
            body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
            body += b"0\r\nX-Trailer: 1\r\n\r\n" if answer.trailers else b"0\r\n\r\n"
    first = b"HTTP/1.1 %d Said" % answer.status
    if answer.wrong:
        first, lines, body = WRONG_ANSWERS[answer.wrong](first, lines, body)
    interim = b"".join(b"HTTP/1.1 %d Wait\r\nX-Interim: 1\r\n\r\n" % status for status in answer.interim)
    return interim + b"\r\n".join([first, *lines, b"", b""]) + body


def cut_bytes(answer: Answer, data: bytes) -> bytes:
    """What of it the engine sends: a stream in chunks breaks off behind an event."""
    if answer.cut < 0:
        return data
    data = data[: len(data) * answer.cut // 1000]
    end = data.rfind(b"\n\n\r\n") + 4
    return data[:end] if end >= 4 and not answer.split else data


WRONG_ANSWERS: dict[str, Callable[[bytes, list[bytes], bytes], Parts]] = {
    "two framings": _framed(b"Content-Length: 3", _CHUNKED, body=b"0\r\n\r\n"),
    "two lengths": _framed(b"Content-Length: 2", b"Content-Length: 3", body=b"{} "),
    "a length with a sign": _framed(b"Content-Length: +2", body=b"{}"),
    "a negative length": _framed(b"Content-Length: -2", body=b"{}"),
    "an unknown coding": _framed(b"Transfer-Encoding: gzip", body=b"{}"),
    "a folded line": _line(b"X-Folded: 1\r\n 2"),
    "a bare LF": _line(b"X-A: 1\nX-B: 2"),
    "a NUL": _line(b"X-A: 1\x002"),
    "a line without a colon": _line(b"nothing"),
    "a space before a colon": _line(b"X-A : 1"),
    "HTTP/2": _first(b"HTTP/1.1", b"HTTP/2"),
    "no status": lambda first, lines, body: (b"HTTP/1.1 OK Said", lines, body),
    "an unasked switch": lambda first, lines, body: (b"HTTP/1.1 101 Said", lines, body),
    "a large head": _line(b"X-A: " + b"x" * 100_000),
    "chunks that are none": _framed(_CHUNKED, body=b"g\r\n{}\r\n0\r\n\r\n"),
    "a chunk longer than it says": _framed(_CHUNKED, body=b"1\r\n{}\r\n0\r\n\r\n"),
}
SECOND = b"HTTP/1.1 200 Said\r\nX-Wire: ~0~\r\nContent-Length: 6\r\n\r\nsecond"
"""An answer that nobody asked for."""
