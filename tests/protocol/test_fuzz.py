"""Whatever bytes come: they are refused, or read as others read them, however they are cut into pieces.

The corpus in tests/corpus is mutated by a seeded draw. Oracles are h11, the json module, and our own readers
fed in other pieces or by their other path. ``bin/test fuzz`` goes on for ten minutes, each time with another
seed, and then lets fuzzing.py draw; what it finds is told as a line for the corpus, where it stays.
"""

import ast
import codecs
import itertools
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h11
import pytest

from anvil_mux.errors import BackendError, BadRequest, MuxError, TooLarge
from anvil_mux.protocol import http1, naming
from anvil_mux.proxy.engine_request import rewritten

CORPUS = Path(__file__).parent.parent / "corpus"
ROUNDS = 5000
"""Mutants of each kind in a usual run."""
SECONDS = float(os.environ.get("ANVIL_FUZZ_SECONDS", "0"))
"""Of each kind, in place of ``ROUNDS``."""
SEED = os.environ.get("ANVIL_FUZZ_SEED", "1")

Check = Callable[[bytes, random.Random], None]

WORDS = [
    *(bytes([value]) for value in b'\r\n\0\t :;,"\\{}[]0f+-\x7f\x80\xff'),
    *(b"\r\n", b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\r\n", b"0\r\n\r\n", b"\r\n ", b"\xc2\xa0", b"\x0b"),
    *(
        b"Content-Length: 5\r\n",
        b"content-length:0\r\n",
        b"Content-Length : 4\r\n",
        b"Content-Length: 1, 1\r\n",
    ),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: \tchunked\r\n", b"transfer-encoding: gzip\r\n"),
    *(
        b"Host: y\r\n",
        b"Connection: close\r\n",
        b"Connection: content-length\r\n",
        b"Expect: 100-continue\r\n",
    ),
    *(b"HTTP/1.0", b"HTTP/1.1", b"HTTP/2", b"GET ", b"POST ", b"http://a/", b"ffffffffffffffff", b"5\r\n"),
    *(b'"model"', b'"model":"z",', b'"\\u006dodel"', b'"stream":true,', b"\\u", b"\\ud800", b"1e999", b"NaN"),
    *(
        b"--XX",
        b"\r\n--XX--",
        b"\r\n--XX\r\n",
        b'name="model"',
        b"filename*=utf-8''x",
        b"Content-Disposition: ",
    ),
]


def corpus(kind: str) -> list[bytes]:
    lines = (CORPUS / f"{kind}.txt").read_text().splitlines()
    return [ast.literal_eval(f"b'''{line}'''") for line in lines if line and not line.startswith("# ")]


def mutants(kind: str) -> Iterator[bytes]:
    """The corpus, then what comes of it."""
    draw, kept = random.Random(f"{kind} {SEED}"), corpus(kind)
    yield from kept
    end = time.monotonic() + SECONDS
    rounds = itertools.count() if SECONDS else range(ROUNDS)
    for _ in rounds:
        if SECONDS and time.monotonic() > end:
            return
        data = draw.choice(kept)
        for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
            data = mutated(draw, data, kept)
        yield data


def mutated(draw: random.Random, data: bytes, kept: list[bytes]) -> bytes:
    start = draw.randint(0, len(data))
    end = min(len(data), start + draw.choice((0, 1, 1, 2, 5, 20)))
    match draw.randint(0, 5):
        case 0:
            return data[:start] + data[end:]
        case 1:
            return data[:start] + bytes([draw.randrange(256)]) + data[end:]
        case 2:
            return data[:end] + data[start:]
        case 3:
            other = draw.choice(kept)
            return data[:start] + other[draw.randint(0, len(other)) :]
        case _:
            return data[:start] + draw.choice(WORDS) + data[draw.choice((start, end)) :]


def check_all(kind: str, check: Check) -> None:
    draw = random.Random(f"pieces {SEED}")
    for data in mutants(kind):
        check_one(kind, check, data, draw)


def check_one(kind: str, check: Check, data: bytes, draw: random.Random) -> None:
    try:
        check(data, draw)
    except Exception as error:
        line = repr(data)[2:-1]
        raise AssertionError(f"seed {SEED}; add to tests/corpus/{kind}.txt:\n{line}") from error


def attempt(read: Callable[[], Any], *refusals: type[MuxError]) -> Any:
    """What is read; None if it is refused as it should be."""
    try:
        return read()
    except refusals:
        return None


def pieces(draw: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(draw.randint(0, len(data)) for _ in range(draw.randint(0, 6)))
    return [data[a:b] for a, b in itertools.pairwise([0, *cuts, len(data)])]


# Heads


def head_of(
    data: bytes,
    find_end: Callable[..., int | None],
    parse: Callable[[bytes], object],
    refusal: type[MuxError],
    draw: random.Random,
) -> bytes | None:
    """The sound head at the beginning, the same whether it came in one piece or in several."""

    def cut() -> int | None:
        buffer = b""
        for piece in pieces(draw, data):
            seen, buffer = len(buffer), buffer + piece
            if end := find_end(buffer, seen):
                return end
        return None

    ends = (attempt(lambda: find_end(data), refusal), attempt(cut, refusal))
    heads = [data[:end] if end and attempt(lambda: parse(data[:end]), refusal) else None for end in ends]  # noqa: B023
    assert heads[0] == heads[1], "pieces make a difference"
    return heads[0]


def framing(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    named = (b"content-length", b"transfer-encoding")
    return sorted((name.lower(), value.lower()) for name, value in headers if name.lower() in named)


def read_by_h11(head: bytes) -> h11.Request | None:
    """``head`` as another strict reader reads it."""
    try:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        connection.receive_data(head)
        event = connection.next_event()
        return event if isinstance(event, h11.Request) else None
    except h11.RemoteProtocolError:
        return None


def check_request(data: bytes, draw: random.Random) -> None:
    head = head_of(data, http1.request_head_end, http1.parse_request, BadRequest, draw)
    if head is None:
        return
    request = http1.parse_request(head)
    assert (request.length is None) or not request.chunked
    again = http1.LastHead(head, request).again(head)
    assert again in (None, (request, len(head)))  # what is remembered is the same
    theirs = read_by_h11(head.lstrip(b"\r\n"))
    assert theirs is not None, "h11 refuses it"
    said = [(b"content-length", b"%d" % request.length)] if request.length is not None else []
    said += [(b"transfer-encoding", b"chunked")] if request.chunked else []
    found = [(n, b"%d" % int(v) if n == b"content-length" else v) for n, v in framing(list(theirs.headers))]
    assert found == said
    assert (theirs.method.decode(), theirs.target) == (request.method, request.target)
    check_forwarded_request(request)


def check_forwarded_request(request: http1.Request) -> None:
    target = f"{request.path}?{request.query}" if request.query else request.path
    lines = http1.forward_request_head(request, "engine:1", target, passed=request.fields.keys())
    sent = http1.framed(lines, request.method, 7)
    again = http1.parse_request(sent)
    assert (again.method, again.length, again.chunked) == (request.method, 7, False)
    assert (again.fields[b"host"], again.keep_alive) == (b"engine:1", True)
    assert framing(read_by_h11(sent).headers) == [(b"content-length", b"7")]
    assert not any(name.startswith((b"proxy-", b"x-forwarded-")) for name in again.fields)


def check_response(data: bytes, draw: random.Random) -> None:
    for method in ("POST", "HEAD"):
        parse = partial(http1.parse_response, method=method)
        head = head_of(data, http1.response_head_end, parse, BackendError, draw)
        if head is None:
            continue
        read = parse(head)
        assert http1.LastHead(head, read).again(head) in (None, (read, len(head)))
        sent = http1.forward_response_head(read, chunked=True)
        again = http1.parse_response(sent, "POST")
        assert (again.status, again.fields.get(b"transfer-encoding")) == (read.status, b"chunked")
        assert again.length is None


# Bodies


def check_chunks(data: bytes, draw: random.Random) -> None:
    def whole() -> tuple[bytes, bool, bytes]:
        content: list[bytes] = []
        end = http1.ChunkCounter(BadRequest).feed(data, content)
        return b"".join(content), end is not None, b"" if end is None else data[end:]

    def cut() -> tuple[bytes, bool, bytes]:
        counter, content, left = http1.ChunkCounter(BadRequest), list[bytes](), pieces(draw, data)
        while left:
            piece = left.pop(0)
            if (end := counter.feed(piece, content)) is not None:
                return b"".join(content), True, piece[end:] + b"".join(left)
        return b"".join(content), False, b""

    one, other = attempt(whole, BadRequest), attempt(cut, BadRequest)
    if one is not None or other is not None:
        assert one == other
    theirs = unchunked_by_h11(data)
    if one is not None and one[1] and not UNKNOWN_TO_H11.search(data):
        assert theirs == (one[0], one[2])


UNKNOWN_TO_H11 = re.compile(rb"[ \t];|content-length|transfer-encoding", re.IGNORECASE)
"""A space before an extension; fields about framing in a trailer, which we drop with all of it."""


def unchunked_by_h11(data: bytes) -> tuple[bytes, bytes] | None:
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + data)
    content = b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Data):
                content += event.data
            elif isinstance(event, h11.EndOfMessage):
                return content, connection.trailing_data[0]
            elif event in (h11.NEED_DATA, h11.PAUSED):
                return None
    except h11.RemoteProtocolError:
        return None


def loaded(body: bytes) -> list[tuple[str, Any]] | None:
    """The members of an object as the json module reads it."""
    try:
        text = body.decode("utf-8-sig")
        found = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return None
    return list(found) if isinstance(found, tuple) else None


def check_body(body: bytes, draw: random.Random) -> None:
    read = attempt(lambda: naming.model_and_stream(body), BadRequest)
    assert read == attempt(lambda: naming._parse_with_care(body), BadRequest), "care makes a difference"
    members = loaded(body)
    if read is not None:
        assert members is not None, "what was read is no object"
        named = [value for name, value in members if name == "model"]
        assert named == ([] if read[0] is None else [read[0]])
    if members is None:
        attempt(lambda: naming._scan(body), BadRequest, TooLarge)
        assert attempt(lambda: rewritten(body, ["x"], {}), BadRequest) is None
        return
    scanned = attempt(lambda: scan(body), BadRequest, TooLarge)
    assert scanned == read, "a large body is read otherwise than a small one"
    if read is not None:
        changed = loaded(b"".join(naming.model_replaced(body, "new")))
        others = [each for each in members if each[0] != "model"]
        assert [each for each in changed or () if each[0] != "model"] == others
        assert [value for name, value in changed or () if name == "model"] == ["new"]
    if read is not None and read[0] is not None and not body.startswith(codecs.BOM_UTF8):
        session = b'{"session":%b}' % body
        ((model, span),) = naming.session_models(session)
        changed = loaded(b"".join(naming.model_replaced(session, model, span)))
        assert (model, changed) == (read[0], loaded(session))
    kept = [each for each in members if each[0] not in ("temperature", "stream")]
    assert loaded(rewritten(body, ["temperature", "stream"], {})) == kept
    assert dict(loaded(rewritten(body, [], {"top_k": "7"})) or ())["top_k"] == 7


def scan(body: bytes) -> tuple[str | None, bool]:
    before, naming.MAX_JSON_PARSED = naming.MAX_JSON_PARSED, 0
    try:
        return naming.model_and_stream(body)
    finally:
        naming.MAX_JSON_PARSED = before


def check_form(body: bytes, draw: random.Random) -> None:
    def scanned(parts: list[bytes]) -> tuple[str | None, bool, tuple[int, int] | None]:
        scanner = naming.MultipartModelScanner(b"XX")
        for part in parts:
            scanner.feed(part)
        scanner.finish()
        return scanner.model, scanner.stream, scanner.span

    one = attempt(lambda: scanned([body]), BadRequest)
    assert attempt(lambda: scanned(pieces(draw, body)), BadRequest) == one
    if one is not None and one[2] is not None:
        start, end = one[2]
        assert body[start:end].decode() == one[0]


CHECKS: dict[str, Check] = {
    "requests": check_request,
    "responses": check_response,
    "chunks": check_chunks,
    "bodies": check_body,
    "forms": check_form,
}


@pytest.mark.parametrize("kind", CHECKS)
def test_bytes_are_refused_or_read_in_one_way(kind):
    check_all(kind, CHECKS[kind])
