"""Bodies in chunks, and heads that come again."""

import random
from collections.abc import Callable
from functools import partial

import pytest

from anvil_mux.errors import BadRequest, MuxError
from anvil_mux.protocol import http1


def _outcome(read: Callable[..., http1.Request | http1.Response], *head: object) -> tuple[object, ...]:
    """What a head was read as, or how it was refused."""
    try:
        message = read(*head)
    except MuxError as error:
        return type(error), error.status, error.message
    return tuple(message)


@pytest.mark.parametrize(
    ("first", "read"),
    [
        (b"POST / HTTP/1.1", http1.parse_request),
        (b"HTTP/1.1 200 OK", partial(http1.parse_response, method="POST")),
    ],
)
def test_the_last_head_of_a_connection_is_read_like_a_fresh_one(first, read):
    rng = random.Random(4)
    others = [b"X: 1", b"Transfer-Encoding: chunked", b"Connection: close", b"X-Request-ID: 7"]
    good, bad = [b"5", b"77", b"05", b"1" * 15], [b"", b"1" * 16, b"-1", b"+5", b"5 ", b"5, 5", b"\xb2"]
    again = 0
    for _ in range(300):
        last = None
        lines, at = [b"Host: h", *rng.choices(others, [9, 1, 1, 1], k=2)], rng.randrange(4)
        for _ in range(20):
            lines[0] = rng.choices([b"Host: h", b"Host: i"], [9, 1])[0]
            length = b"Content-Length: " + rng.choice(good if rng.random() < 0.8 else bad)
            given = [length] if rng.random() < 0.9 else []
            head = b"\r\n".join([first, *lines[:at], *given, *lines[at:], b"", b""])
            found = last and last.again(head + b"{}\r\n\r\n")
            expected = _outcome(read, head)
            if found:
                again += 1
                message, end = found
                assert (end, _outcome(lambda m=message: m)) == (len(head), expected)
            elif not isinstance(expected[0], type):
                message = read(head)
                last = http1.LastHead(head, message)
                assert _outcome(lambda m=message: m) == expected
    assert again > 1000


def test_connections_may_share_a_remembered_head():
    head = b"POST /shared HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"
    last = http1.LastHead(head % 1, http1.parse_request(head % 1))
    kept, _ = last.again(head % 2)
    assert last.again(head % 3)[0].length == 3
    assert (kept.length, http1.parse_request(head % 4).length) == (2, 4)
    assert last.again(head[:-4] % 5) is None


def test_the_head_of_an_answer_to_head_is_not_taken_for_that_of_another():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    assert http1.LastHead(head, http1.parse_response(head, "HEAD")).again(head) is None


def _pieces(rng: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(rng.sample(range(len(data) + 1), min(len(data), rng.randrange(12))))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def _chunked(rng: random.Random) -> tuple[bytes, bytes]:
    payloads = [rng.randbytes(rng.choice([1, 2, 15, 16, 17, 300])) for _ in range(rng.randrange(5))]
    sent = b""
    for payload in payloads:
        size = rng.choice([b"%x", b"%X", b"000%x"]) % len(payload)
        sent += size + rng.choice([b"", b";a=b", b" ;a"]) + b"\r\n" + payload + b"\r\n"
    trailer = rng.choice([b"", b"X-Sum: 1\r\n", b"A: b\r\nC: d\r\n"])
    return b"".join(payloads), sent + rng.choice([b"0", b"000", b"0;x"]) + b"\r\n" + trailer + b"\r\n"


def test_the_end_of_a_chunked_body_is_found_in_any_split():
    rng = random.Random(3)
    for _ in range(3000):
        payload, sent = _chunked(rng)
        counter, decoder = http1.ChunkCounter(), http1.ChunkCounter()
        ends: list[int] = []
        seen, decoded = 0, list[bytes]()
        for piece in _pieces(rng, sent + b"next"):
            if ends:
                break
            end = counter.feed(piece)
            assert decoder.feed(piece, decoded) == end
            if end is not None:
                ends.append(seen + end)
            seen += len(piece)
        assert ends == [len(sent)]
        assert b"".join(decoded) == payload


def _feed_all(counter: http1.ChunkCounter, sent: bytes, step: int) -> None:
    for start in range(0, len(sent), step):
        counter.feed(sent[start : start + step])


@pytest.mark.parametrize(
    "sent",
    [
        b"+4\r\nabcd\r\n",
        b"-4\r\nabcd\r\n",
        b"0x4\r\nabcd\r\n",
        b"4_0\r\n",
        b" 4\r\nabcd\r\n",
        b"4 \r\nabcd\r\n",
        b"4\nabcd\r\n",
        b"g\r\n",
        b"\r\n",
        b"1234567890abcdef\r\n",
        b"4;" + b"a" * 400,
        b"4;a\0\r\n",
        b"4\r\nabcde\r\n",
        b"4\r\nabcdXX0\r\n\r\n",
        b"4\r\nabcd0\r\n\r\n",
        b"4\r\nabcd\n0\r\n\r\n",
        b"4;a\nabcd\r\n",
        b"0\n",
        b"0\r\n\n",
        b"0\r\nX: y\n",
        b"0\r\nX A: b\r\n\r\n",
        b"0\r\nX-A: " + b"b" * 9000,
    ],
    ids=lambda sent: repr(sent)[:30],
)
def test_bad_chunks_are_refused_whole_and_byte_by_byte(sent):
    for step in (len(sent), 1):
        counter = http1.ChunkCounter(BadRequest)
        with pytest.raises(BadRequest):
            _feed_all(counter, sent, step)


@pytest.mark.parametrize("sent", [b"4\r\nabcdX", b"4\r\nabcd\n", b"4\r\nabcd\rX", b"1\r\n{}"])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_a_byte_that_is_wrong_is_refused_when_it_comes_and_never_passed_on(sent, before):
    counter = http1.ChunkCounter(BadRequest)
    counter.feed(sent[:-before])
    with pytest.raises(BadRequest):
        counter.feed(sent[-before:])


def test_what_is_chunked_can_be_decoded():
    content: list[bytes] = []
    sent = http1.chunk(b"a" * 300) + http1.chunk(b"") + http1.LAST_CHUNK
    assert http1.ChunkCounter().feed(sent, content) == len(sent)
    assert content == [b"a" * 300]
