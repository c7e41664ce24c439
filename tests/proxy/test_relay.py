"""Requests to engines and their answers, over real sockets, with an engine whose bytes the test sends."""

from __future__ import annotations

import errno
import json
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable
from datetime import timezone
from email.utils import parsedate_to_datetime
from io import FileIO
from types import SimpleNamespace

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.errors import LoadError, Severed
from anvil_mux.host.seam import Evicted
from anvil_mux.protocol import api, http1
from anvil_mux.proxy import connections, exchange, pump
from anvil_mux.proxy.dispatch import Patience
from tests.fake_engine import ASK_A, GUARD, JSON_OK, SSE_HEAD, STREAM_A, Answer, Asked, RawClient, Rig, chunk
from tests.running import seen

EAGER_BEATS = Patience(grace=0.0, comment_every=0.0, chunk_every=0.0)


def error_in(stream: bytes) -> dict[str, str]:
    """The error event that a stream ends with."""
    events = [line[6:] for line in stream.splitlines() if line.startswith(b'data: {"error"')]
    assert len(events) == 1, stream
    return json.loads(events[0])["error"]  # type: ignore[no-any-return]


# Answers


def test_an_answer_comes_back_with_its_body_and_own_headers(rig: Rig) -> None:
    client = rig.client()
    client.post(
        ASK_A,
        extra=b"Connection: x-secret\r\nX-Secret: 1\r\nX-Request-ID: my-id\r\nX-Forwarded-For: 6.6.6.6\r\n",
    )
    asked = rig.engine.next()
    assert asked.body == ASK_A
    assert b"x-secret" not in asked.head.lower()
    assert b"x-forwarded-for" not in asked.head.lower()
    assert b"\r\nX-Request-ID: my-id\r\n" in asked.head
    assert b"\r\nHost: 127.0.0.1:%d\r\n" % rig.engine.address[1] in asked.head
    asked.send(
        b"HTTP/1.1 200 OK\r\nServer: uvicorn\r\nContent-Type: application/json\r\nKeep-Alive: 5\r\n"
        b"X-Engine: y\r\nContent-Length: 8\r\n\r\n",
        b'{"x": 1}',
    )
    answer = client.read()
    assert (answer.status, answer.body) == (200, b'{"x": 1}')
    assert answer.header(b"server") == b"anvil-mux"
    assert answer.header(b"x-engine") == b"y"
    assert answer.header(b"x-request-id") == b"my-id"
    assert answer.header(b"keep-alive") is None
    record = rig.events.record()
    assert (record.status, record.model, record.backend, record.request_id) == (200, "a", "a", "my-id")
    assert record.sent == len(answer.head) + len(answer.body)


@pytest.mark.parametrize("status", [b"400 Bad Request", b"422 X", b"500 Oh", b"503 Busy"])
def test_an_engines_error_is_relayed_with_its_body(rig: Rig, status: bytes) -> None:
    rig.engine.answer = lambda _: b'HTTP/1.1 %b\r\nContent-Length: 13\r\n\r\n{"error": 42}' % status
    client = rig.client()
    answer = client.ask(ASK_A)
    assert (answer.status, answer.body) == (int(status[:3]), b'{"error": 42}')
    assert client.ask(ASK_A).status == int(status[:3])


def test_requests_on_one_connection_share_one_connection_to_the_engine(rig: Rig) -> None:
    rig.engine.answer = lambda _: JSON_OK
    client = rig.client()
    for _ in range(5):
        assert client.ask(ASK_A).body == b"{}"
    assert len(rig.engine.connections) == 1


@pytest.mark.parametrize("theirs", [b"", b"Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"])
def test_every_answer_has_one_date(make_rig: Callable[..., Rig], theirs: bytes) -> None:
    rig = make_rig(max_connections=2)
    rig.engine.answer = lambda _: b"HTTP/1.1 200 OK\r\n%bContent-Length: 0\r\n\r\n" % theirs
    client = rig.client()
    client.post(ASK_A)
    answers = [client.read(), client.get(b"/livez"), client.get(b"/nowhere")]
    follower = rig.client()
    follower.send(b"GET /models/sse HTTP/1.1\r\nHost: %b\r\n\r\n" % follower.host)
    answers.append(Answer(200, follower.read_until(b"\r\n\r\n"), b"", True))
    answers.append(rig.client().read())  # one too many
    assert [answer.status for answer in answers] == [200, 200, 404, 200, 503]
    for answer in answers:
        assert answer.head.count(b"\r\nDate: ") == 1
        assert parsedate_to_datetime((answer.header(b"date") or b"").decode()).tzinfo == timezone.utc
    assert not theirs or theirs in answers[0].head


def test_the_same_head_again_goes_on_with_its_own_id_and_length(rig: Rig) -> None:
    client = rig.client()
    ids = set()
    for body in (ASK_A, b'{"model":"a","n":1}', b'{"model": "org/b"}', b'{"model": "alias"}'):
        client.post(body)
        engine = rig.other if b"org/b" in body else rig.engine
        asked = engine.next()
        assert b"\r\nHost: 127.0.0.1:%d\r\n" % engine.address[1] in asked.head
        assert asked.head.count(b"X-Request-ID: ") == asked.head.count(b"Content-Length: ") == 1
        said = b"x" * 10 ** len(ids)
        asked.send(
            b"HTTP/1.1 200 OK\r\nX-Request-ID: theirs\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said)
        )
        answer = client.read()
        assert (answer.body, answer.head.count(b"X-Request-ID: ")) == (said, 1)
        ids.add(answer.header(b"x-request-id"))
    assert len(ids) == 4


def test_answers_without_a_body_keep_the_connection(rig: Rig) -> None:
    answers = iter([b"HTTP/1.1 204 No Content\r\n\r\n", JSON_OK])
    rig.engine.answer = lambda _: next(answers)
    client = rig.client()
    assert client.ask(ASK_A).status == 204
    assert client.ask(ASK_A).body == b"{}"
    assert len(rig.engine.connections) == 1


def test_interim_answers_of_the_engine_are_skipped(rig: Rig) -> None:
    rig.engine.answer = lambda _: b"HTTP/1.1 100 Continue\r\n\r\n" + JSON_OK
    client = rig.client()
    assert client.ask(ASK_A).body == b"{}"


def test_an_alias_reaches_the_engine_under_the_name_that_it_knows(rig: Rig) -> None:
    rig.engine.answer = rig.other.answer = lambda asked: (
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(asked.body), asked.body)
    )
    client = rig.client()
    assert client.ask(b'{"x": 1, "model": "alias"}').body == b'{"x": 1, "model": "a"}'
    assert client.ask(b'{"model":"org/b", "n": 2.50}').body == b'{"model":"b-inside", "n": 2.50}'


def test_a_request_without_a_model_goes_to_the_default(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(default_model="org/b")
    client = rig.client()
    client.post(b'{"x":1}')
    asked = rig.other.next()
    assert json.loads(asked.body) == {"model": "b-inside", "x": 1}
    asked.send(JSON_OK)
    assert client.read().status == 200


# Streams


def test_the_first_event_reaches_the_client_before_the_last_is_sent(rig: Rig) -> None:
    client, asked = rig.asked(STREAM_A)
    asked.send(SSE_HEAD)
    head = client.read_until(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head
    for number in range(20):
        asked.send(chunk(b"data: %d\n\n" % number))
        assert client.read_until(b"\n\n\r\n").endswith(b"data: %d\n\n\r\n" % number)
    asked.send(b"0\r\n\r\n")
    assert client.read_until(b"0\r\n\r\n") == b"0\r\n\r\n"
    rig.answers(client)
    assert len(rig.engine.connections) == 1


@pytest.mark.parametrize("end", [b"0\r\n\r\nHTTP/1.1 200 OK\r\n", b"0\r\n\r\n"])
def test_what_an_engine_sends_beyond_its_answer_is_nobodys(rig: Rig, end: bytes) -> None:
    client = rig.client()
    client.post(STREAM_A)
    rig.engine.next().send(SSE_HEAD + chunk(b"data: 1\n\n") + end)
    answer = client.read()
    assert (answer.body, answer.clean) == (b"data: 1\n\n", True)
    rig.answers(client)
    assert len(rig.engine.connections) == (1 if end == b"0\r\n\r\n" else 2)


UNTIL_CLOSE = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def test_a_body_until_close_is_chunked_for_the_client(rig: Rig) -> None:
    client, asked = rig.asked(STREAM_A)
    asked.send(UNTIL_CLOSE, b"data: 1\n\n")
    assert b"Transfer-Encoding: chunked" in client.read_until(b"\r\n\r\n")
    client.read_until(b"data: 1\n\n\r\n")
    asked.send(b"data: [DONE]\n\n")
    client.read_until(b"data: [DONE]\n\n\r\n")
    asked.close()
    client.read_until(b"0\r\n\r\n")
    rig.answers(client)


def test_chunks_are_taken_apart_for_a_client_of_http_1_0(rig: Rig) -> None:
    client = rig.client()
    client.send(
        b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(STREAM_A), STREAM_A)
    )
    asked = rig.engine.next()
    asked.send(SSE_HEAD, chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n"), b"0\r\n\r\n")
    answer = client.read()
    assert answer.header(b"transfer-encoding") is None
    assert answer.header(b"connection") == b"close"
    assert answer.body == b"data: 1\n\ndata: 2\n\n"


def test_a_large_answer_with_a_length_passes_whole(rig: Rig) -> None:
    content = bytes(range(256)) * 8192
    rig.engine.answer = lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
    client = rig.client()
    for _ in range(2):
        assert client.ask(ASK_A).body == content
    assert len(rig.engine.connections) == 1


def test_a_client_that_does_not_read_stops_the_engine_and_gets_every_byte_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, held = pump.Pump._hold, threading.Event()

    def note(self: pump.Pump, stream: pump.PumpedStream) -> None:
        hold(self, stream)
        held.set()

    monkeypatch.setattr(pump.Pump, "_hold", note)
    client, asked = rig.asked(STREAM_A)
    asked.send(SSE_HEAD)
    client.read_until(b"\r\n\r\n")
    event = b"data: " + b"x" * 65536 + b"\n\n"
    sender = threading.Thread(target=lambda: asked.send(*[chunk(event)] * 300, b"0\r\n\r\n"))
    sender.start()
    assert held.wait(20)
    assert sender.is_alive(), "nothing held the engine back"
    content, clean = client.read_chunks()
    sender.join()
    assert clean
    assert content == event * 300


def test_a_client_that_never_reads_again_is_left(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anvil_mux.proxy.pump.SWEEP_SECONDS", 0.02)
    rig = make_rig(client_timeout=0.05)
    client, asked = rig.asked(STREAM_A)
    asked.send(SSE_HEAD)
    client.read_until(b"\r\n\r\n")
    event = chunk(b"data: " + b"x" * 65536 + b"\n\n")
    with pytest.raises(OSError):
        asked.send(*[event] * 1000)
    rig.events.wait("released")
    assert rig.events.record().code == "client_stalled"


def test_many_streams_at_once_do_not_mix(rig: Rig) -> None:
    clients = [rig.client() for _ in range(40)]
    for number, client in enumerate(clients):
        client.post(b'{"model":"a","stream":true,"n":%d}' % number)
    asked = {json.loads(each.body)["n"]: each for each in (rig.engine.next() for _ in clients)}
    for each in asked.values():
        each.send(SSE_HEAD)
    for part in range(10):
        for number, each in asked.items():
            each.send(chunk(b"data: %d.%d\n\n" % (number, part)))
    asked[0].send(b"0\r\n\r\n")
    rig.events.record()
    for number, each in asked.items():
        if number:
            each.send(b"0\r\n\r\n")
    for number, client in enumerate(clients):
        answer = client.read()
        assert answer.clean
        assert answer.body == b"".join(b"data: %d.%d\n\n" % (number, part) for part in range(10))
    rig.events.record(40)
    assert len(rig.relay.pump) == 0


def test_only_silence_ends_a_long_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "SWEEP_SECONDS", 1e6)
    engine, upstream = socket.socketpair()
    client, far = socket.socketpair()
    moved = pump.Pump(silence_timeout=10.0)
    response = http1.parse_response(SSE_HEAD, "POST")
    stream = pump.PumpedStream(upstream, client, pump.body_of(response, chunked=True), pump.Passed())
    moved._streams[-1] = stream
    for now in (100.0, 109.0, 118.0):
        engine.sendall(chunk(b"data: 1\n\n"))
        moved._read(stream, now)
        moved._sweep(now + 9.5)
        assert stream.end is None
    moved._sweep(128.5)
    assert stream.end is pump.End.SILENT
    moved._streams.clear()
    moved.close()
    for end in (engine, upstream, client, far):
        end.close()


# Ends that are not clean


def test_an_engine_that_dies_in_mid_stream_ends_it_with_an_error_event_and_a_cut(rig: Rig) -> None:
    client, asked = rig.streaming()
    asked.reset()
    content, clean = client.read_chunks()
    assert not clean
    assert error_in(content)["code"] == "backend_unavailable"
    assert b"[DONE]" not in content
    rig.events.wait("released")
    record = rig.events.record()
    assert (record.status, record.code) == (200, "backend_unavailable")


CHAT, TEXT, MESSAGES, RESPONSES = (
    b"/v1/" + name for name in (b"chat/completions", b"completions", b"messages", b"responses")
)


def until_close(rig: Rig, path: bytes, *pieces: bytes) -> tuple[RawClient, Asked]:
    """A stream that only the end of the engine's connection ends, after these pieces, each read by itself."""
    client, asked = rig.asked(STREAM_A, path=path)
    asked.send(UNTIL_CLOSE)
    for piece in pieces:
        asked.send(piece)
        client.read_until(piece + b"\r\n")
    return client, asked


@pytest.mark.parametrize("end", [Asked.close, Asked.reset], ids=["closed", "reset"])
@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, RESPONSES])
def test_a_stream_without_a_length_is_whole_only_with_its_last_event(
    rig: Rig, path: bytes, end: Callable[[Asked], None]
) -> None:
    client, asked = until_close(rig, path, b'data: {"x":"data: [DONE]"}\n\n')
    end(asked)
    content, clean = client.read_chunks()
    assert not clean
    assert b'"backend_unavailable"' in content
    assert b"[DONE]" not in content
    assert client.is_closed()
    rig.events.wait("released")
    assert rig.events.record().code == "backend_unavailable"


@pytest.mark.parametrize(
    ("path", "last"),
    [
        (CHAT, (b"data: [DONE]\n\n",)),
        (TEXT, (b"data:[DO", b"NE]")),
        (CHAT, (b'data: {"error":{"message":"no"}}\r\n\r\n',)),
        (MESSAGES, (b"event: message_s", b"top\ndata: {}\n", b"\n")),
        (RESPONSES, (b"event: response.incomplete\ndata: {", b"x" * 40000 + b"}\n\n")),
        (RESPONSES, (b"event: response.failed\ndata: {}\n\n",)),
    ],
)
def test_a_last_event_is_found_wherever_its_pieces_end(rig: Rig, path: bytes, last: tuple[bytes]) -> None:
    sent = [piece[at : at + 10000] for piece in last for at in range(0, len(piece), 10000)]
    client, asked = until_close(rig, path, b"data: {}\n\n", *sent)
    asked.close()
    assert client.read_chunks() == (b"", True)
    rig.events.wait("released")
    assert rig.events.record().code == ""


def test_a_last_event_that_is_cut_within_does_not_count(rig: Rig) -> None:
    client, asked = until_close(rig, RESPONSES, b"data: {}\n\n", b'event: response.completed\ndata: {"ha')
    asked.close()
    assert client.read_chunks()[1] is False


@pytest.mark.parametrize("ended", [None, "was killed"])
def test_an_end_that_nothing_vouches_for_is_whole_while_its_engine_lives(rig: Rig, ended: str | None) -> None:
    client, asked = until_close(rig, b"/v1/images/generations", b'data: {"x":1}\n\n')
    rig.mechanism.end = ended
    asked.close()
    content, clean = client.read_chunks()
    assert clean is (ended is None)
    assert (b"was killed" in content) is (ended is not None)


def test_an_event_that_was_cut_in_two_does_not_swallow_the_error(rig: Rig) -> None:
    client, asked = rig.asked(STREAM_A)
    asked.send(SSE_HEAD, chunk(b'data: {"half'))
    client.read_until(b'{"half\r\n')
    asked.close()
    content, clean = client.read_chunks()
    assert not clean
    assert content.startswith(b"\n\n")
    assert error_in(content)["code"] == "backend_unavailable"


def test_within_a_chunk_nothing_is_written_and_the_connection_is_cut(rig: Rig) -> None:
    client, asked = rig.asked(STREAM_A)
    asked.send(SSE_HEAD, b"100\r\ndata: 1\n\n")
    client.read_until(b"data: 1\n\n")
    asked.close()
    assert client.rest() == b""


def test_a_client_that_takes_no_chunks_sees_that_an_answer_broke_off(rig: Rig) -> None:
    client = rig.client()
    client.send(b"POST /v1/audio/speech HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(ASK_A), ASK_A))
    asked = rig.engine.next()
    asked.send(
        b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b"a wave")
    )
    client.read_until(b"a wave")
    asked.close()
    with pytest.raises(ConnectionResetError):
        client.rest()


def test_a_client_that_has_stopped_sending_sees_that_its_answer_is_not_whole(rig: Rig) -> None:
    """It counts as one that has left; but it may read on, and without chunks an end is an end."""
    client = rig.client()
    client.send(b"POST /v1/audio/speech HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(ASK_A), ASK_A))
    asked = rig.engine.next()
    asked.send(b"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\n\r\na wave")
    client.read_until(b"a wave")
    client.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError):
        client.rest()
    assert rig.events.record().status == 499


def test_a_broken_chunk_is_not_passed_off_as_an_end(rig: Rig) -> None:
    client, asked = rig.streaming()
    asked.send(b"what?\r\n\r\n")
    assert client.rest() == b""
    assert asked.was_left()
    assert rig.events.record().code == "backend_unavailable"


def test_a_json_answer_that_breaks_off_is_a_502(rig: Rig) -> None:
    client, asked = rig.asked(ASK_A)
    asked.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    asked.close()
    answer = client.read()
    assert answer.status == 502
    assert answer.code == "backend_unavailable"


def test_an_anthropic_stream_gets_an_anthropic_error_event(rig: Rig) -> None:
    client, asked = rig.asked(STREAM_A, path=b"/v1/messages")
    asked.send(SSE_HEAD, chunk(b"event: ping\ndata: {}\n\n"))
    client.read_until(b"{}\n\n\r\n")
    asked.close()
    content, clean = client.read_chunks()
    assert not clean
    assert content.startswith(b"event: error\ndata: ")


def test_a_silent_engine_is_given_up_before_its_head(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(upstream_timeout=0.05)
    client, asked = rig.asked(ASK_A)
    answer = client.read()
    assert answer.status == 502
    assert b"was silent for 0.05 s" in answer.body
    assert asked.was_left()


def test_a_silent_engine_is_given_up_within_a_stream(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anvil_mux.proxy.pump.SWEEP_SECONDS", 0.02)
    rig = make_rig()
    client, asked = rig.streaming()
    monkeypatch.setattr(rig.relay.pump, "_silence", 0.05)
    content, clean = client.read_chunks()
    assert not clean
    assert "silent" in error_in(content)["message"]
    assert asked.was_left()


# Swaps


def test_a_stream_ends_whole_before_another_model_is_loaded(rig: Rig) -> None:
    rig.other.answer = lambda _: JSON_OK
    first, second = rig.client(), rig.client()
    asked = rig.streams(first)
    second.post(b'{"model":"org/b"}')
    rig.events.wait("draining")
    asked.send(chunk(b"data: 2\n\n"), b"0\r\n\r\n")
    content, clean = first.read_chunks()
    assert (content, clean) == (b"data: 2\n\n", True)
    assert second.read().body == b"{}"
    assert not rig.events.of("severed")


@pytest.mark.parametrize("framed", [True, False], ids=["chunked", "until the engine closes"])
def test_a_severed_stream_ends_with_an_error_event_and_a_cut(
    make_rig: Callable[..., Rig], framed: bool
) -> None:
    rig = make_rig(drain_timeout=0.0)
    rig.other.answer = lambda _: JSON_OK
    first, second = rig.client(), rig.client()
    first.post(STREAM_A)
    asked = rig.engine.next()
    if framed:
        asked.send(SSE_HEAD, chunk(b"data: 1\n\n"))
    else:
        asked.send(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", b"data: 1\n\n")
    first.read_until(b"data: 1\n\n\r\n")
    second.post(b'{"model":"org/b"}')
    content, clean = first.read_chunks()
    assert not clean
    assert error_in(content)["code"] == "severed"
    assert asked.was_left()
    assert second.read().body == b"{}"


def test_a_request_severed_before_its_head_gets_503_and_when_to_come_again(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(drain_timeout=0.0)
    rig.other.answer = lambda _: JSON_OK
    first, second = rig.client(), rig.client()
    first.post(ASK_A)
    asked = rig.engine.next()
    second.post(b'{"model":"org/b"}')
    answer = first.read()
    assert (answer.status, answer.code) == (503, "severed")
    assert answer.header(b"retry-after") == b"5"
    assert asked.was_left()
    assert second.read().status == 200


def test_a_request_whose_engine_resets_the_connection_when_it_is_severed_is_not_sent_again() -> None:
    """The engine may still write when the connection is shut down: the kernel answers that with a reset."""
    severed = threading.Event()

    class Lease:
        backend, address, run = Backend("a", "a"), ("127.0.0.1", 0), object()
        is_routed = False

        @property
        def severed(self) -> bool:
            return severed.is_set()

        def severed_error(self) -> Severed:
            return Severed("for another")

        def on_severed(self, cut: Callable[[], None]) -> None:
            pass

    def engine() -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        severed.set()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    lease, shared = Lease(), exchange.Relay(5.0)
    client, other_end = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, client, other_end:
        lease.address = listener.getsockname()
        thread = threading.Thread(target=engine)
        thread.start()
        with pytest.raises(Severed), exchange.Exchange(shared, lease, client) as asking:
            asking.ask("POST", b"POST / HTTP/1.1\r\n\r\n", b"")
        thread.join()
    shared.close()


def test_a_severed_lease_is_released_while_the_other_model_still_loads(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(drain_timeout=0.0)
    first, second = rig.client(), rig.client()
    first.post(ASK_A)
    rig.engine.next()
    rig.mechanism.loading.acquire()
    rig.mechanism.gate.clear()
    second.post(b'{"model":"org/b"}')
    assert first.read().status == 503
    assert rig.events.record().code == "severed"
    assert not rig.events.of("ready")[1:]
    assert rig.mechanism.loading.acquire(timeout=20)
    rig.mechanism.gate.set()
    rig.other.next().send(JSON_OK)
    assert second.read().status == 200


def test_a_request_that_waits_is_served_when_its_model_is_ready(rig: Rig) -> None:
    rig.engine.answer = lambda _: JSON_OK
    rig.mechanism.gate.clear()
    clients = [rig.client() for _ in range(10)]
    for client in clients:
        client.post(ASK_A)
    rig.events.wait("queued", 10)
    rig.mechanism.gate.set()
    assert [client.read().status for client in clients] == [200] * 10
    assert len(rig.events.of("loading")) == 1


# Clients that leave


@pytest.mark.parametrize("unread", [b"", b"P"], ids=["all read", "a byte unread"])
def test_a_client_that_leaves_in_a_silent_prefill_frees_its_lease(rig: Rig, unread: bytes) -> None:
    client, asked = rig.asked(ASK_A)
    client.send(unread)
    client.leave()
    assert asked.was_left()
    rig.events.wait("released")
    assert rig.events.record().status == 499


def test_a_client_that_leaves_with_a_byte_unread_is_noticed_while_it_waits(rig: Rig) -> None:
    rig.mechanism.gate.clear()
    client = rig.client()
    client.post(ASK_A)
    rig.events.wait("queued")
    client.send(b"P")
    client.leave()
    rig.events.wait("gone")
    rig.mechanism.gate.set()
    rig.events.wait("ready")
    assert rig.engine.asked.empty()
    assert rig.events.record().status == 499


def test_a_client_that_leaves_in_mid_stream_frees_its_lease(rig: Rig) -> None:
    client, asked = rig.streaming()
    client.leave()
    assert asked.was_left()
    rig.events.wait("released")
    assert rig.events.record().code == "client_gone"


@pytest.mark.parametrize(
    "last",
    [
        b"data: [DONE]\n\n",
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed"}\n\n',
    ],
)
@pytest.mark.parametrize("framing", [b"", b"0\r\n"], ids=["before_the_end", "within_the_end"])
def test_a_client_that_leaves_after_the_last_event_had_a_whole_answer(
    rig: Rig, last: bytes, framing: bytes
) -> None:
    client, asked = rig.streaming()
    asked.send(chunk(last))
    client.read_until(last + b"\r\n")
    if framing:  # llama-server sends its end in two pieces
        asked.send(framing)
        client.read_until(framing)
    client.leave()
    assert asked.was_left()
    rig.events.wait("released")
    assert rig.events.record().code == ""
    rig.mux.facts.died("a", "was killed")
    assert rig.events.of("stopped")[-1].cause.kind == "died"


def test_an_answer_that_breaks_off_behind_its_last_event_is_not_whole_although_its_client_has_left(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, left, broken_off = pump.Pump._client_event, threading.Event(), threading.Event()

    def wait(self: pump.Pump, stream: pump.PumpedStream, event: int, now: float) -> None:
        left.set()
        assert broken_off.wait(GUARD)
        leave(self, stream, event, now)

    monkeypatch.setattr(pump.Pump, "_client_event", wait)
    client, asked = rig.asked(STREAM_A)
    asked.send(SSE_HEAD, chunk(b"data: 1\n\n"), chunk(b"data: [DONE]\n\n"))
    client.read_until(b"data: [DONE]\n\n\r\n")
    client.leave()
    assert left.wait(GUARD)
    asked.close()
    broken_off.set()
    record = rig.events.record()
    assert (record.status, record.code) == (200, "backend_unavailable")


def test_a_client_that_leaves_the_line_is_forgotten(rig: Rig) -> None:
    rig.mechanism.gate.clear()
    client = rig.client()
    client.post(ASK_A)
    rig.events.wait("queued")
    client.leave()
    rig.events.wait("gone")
    rig.mechanism.gate.set()
    rig.events.wait("ready")
    assert rig.engine.asked.empty()
    assert rig.events.record().status == 499


# Connections that idle


def test_a_connection_that_is_put_back_after_the_end_of_its_pool_is_closed() -> None:
    pool, (near, far) = connections.Pool(), socket.socketpair()
    of_run = pool.of("run", Backend("a", "a"))
    pool.close()
    of_run.put(connections.Upstream(near))
    with far:
        assert far.recv(1) == b""
    assert near.fileno() < 0


def test_few_connections_are_kept_to_an_engine_in_which_each_holds_a_thread(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(backends=(Backend("a", "a", gpus=("0",), engine="llamacpp"),))
    clients = [rig.client() for _ in range(5)]
    for client in clients:
        client.post(ASK_A)
    asked = [rig.engine.next() for _ in clients]
    for number, each in enumerate(asked, 1):
        each.send(JSON_OK)
        rig.events.record(number)
    assert all(each.was_left() for each in asked[2:])
    assert sum(connection.ended.is_set() for connection in rig.engine.connections) == 3


def test_what_idles_is_closed_when_a_request_waits_on_a_connection_of_its_own(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anvil_mux.proxy.connections.LOOK_SECONDS", 0.05)
    waiting = rig.client()
    clients = [rig.client() for _ in range(4)]
    waiting.post(ASK_A)
    last = rig.engine.next()
    for client in clients:
        client.post(ASK_A)
    asked = [rig.engine.next() for _ in clients]
    for each in asked:
        each.send(JSON_OK)
    assert all(each.was_left() for each in asked)
    assert all(client.read().status == 200 for client in clients)
    last.send(JSON_OK)
    assert waiting.read().status == 200


def test_a_slow_answer_on_a_connection_that_was_answered_before_lets_others_idle(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anvil_mux.proxy.connections.LOOK_SECONDS", 0.05)
    looks, look = threading.Semaphore(0), exchange.Exchange._look

    def note(self: exchange.Exchange) -> None:
        look(self)
        looks.release()

    first, second = rig.client(), rig.client()
    for client in (first, second):
        client.post(ASK_A)
    asked = [rig.engine.next(), rig.engine.next()]
    for each in asked:
        each.send(JSON_OK)
    assert [client.read().status for client in (first, second)] == [200, 200]
    rig.events.record(2)
    monkeypatch.setattr(exchange.Exchange, "_look", note)
    first.post(ASK_A)
    slow = rig.engine.next()
    for _ in range(3):
        assert looks.acquire(timeout=20)
    assert not any(connection.ended.is_set() for connection in rig.engine.connections)
    slow.send(JSON_OK)
    assert first.read().status == 200


# Engines that are gone


def test_a_pooled_connection_that_was_closed_is_replaced(rig: Rig) -> None:
    client, asked = rig.asked(ASK_A)
    asked.send(JSON_OK)
    assert client.read().status == 200
    asked.close()
    assert asked.was_left()
    rig.answers(client)
    assert len(rig.events.of("loading")) == 1


def test_a_pooled_connection_that_ends_under_the_request_is_replaced(rig: Rig) -> None:
    client = rig.client()
    rig.answers(client)
    client.post(ASK_A)
    rig.engine.next().close()
    rig.engine.next().send(JSON_OK)
    assert client.read().status == 200
    assert len(rig.engine.connections) == 2
    assert len(rig.events.of("loading")) == 1


def test_a_connection_is_looked_at_before_it_is_used_again(rig: Rig) -> None:
    client, asked = rig.asked(ASK_A)
    asked.send(JSON_OK)
    client.read()
    rig.events.wait("released")
    asked.close()
    assert asked.was_left()
    [connections] = rig.relay.pool._of_run.values()
    assert connections.take() is None


def test_a_second_answer_to_one_request_reaches_nobody(rig: Rig) -> None:
    client, asked = rig.asked(ASK_A)
    asked.send(JSON_OK)
    assert client.read().body == b"{}"
    rig.events.wait("released")
    asked.send(JSON_OK.replace(b"{}", b"[]"))
    client.post(ASK_A)
    assert asked.was_left()
    rig.engine.next().send(JSON_OK)
    assert client.read().body == b"{}"


class Impatient:
    """An engine that answers as soon as a request begins, and closes with the rest of it unread."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        with self._listener, self._listener.accept()[0] as connection:
            connection.recv(1)
            connection.sendall(JSON_OK)


def test_a_connection_that_did_not_take_the_whole_request_carries_no_other(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    rig.mechanism.engines["a"] = Impatient()  # type: ignore[assignment]
    client = rig.client()
    assert client.ask(b'{"model":"a","x":"%b"}' % (b"x" * 16_000_000)).status == 200
    rig.events.wait("released")
    [connections] = rig.relay.pool._of_run.values()
    assert not connections._idle


@pytest.mark.parametrize("length", [2, 300_000], ids=["whole", "passed_on"])
def test_an_answers_coding_is_told_with_every_answer(rig: Rig, length: int) -> None:
    packed = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % length
    rig.engine.answer = lambda _: packed + b"g" * length
    client = rig.client()
    for _ in range(3):
        answer = client.ask(ASK_A)
        assert (answer.header(b"content-encoding"), len(answer.body)) == (b"gzip", length)


def test_what_is_sent_to_an_engine_is_not_paced(rig: Rig) -> None:
    connection = connections.connect(rig.engine.address)
    with connection:
        chosen = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert chosen.rstrip(b"\0") == b"reno"


def test_idle_connections_are_swept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.engine.answer = lambda _: JSON_OK
    client = rig.client()
    client.ask(ASK_A)
    rig.events.wait("released")
    rig.relay.pool.sweep()
    assert not rig.engine.connections[0].ended.is_set()
    monkeypatch.setattr("anvil_mux.proxy.connections.IDLE_SECONDS", 0.0)
    rig.relay.pool.sweep()
    assert rig.engine.connections[0].ended.wait(20)


def test_no_connection_idles_to_an_engine_that_is_told_to_go(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    were_closed = []

    def evict(backend: Backend, how: str) -> Evicted:
        were_closed.append(rig.engine.connections[0].ended.wait(GUARD))
        return Evicted(how)

    monkeypatch.setattr(rig.mechanism, "evict", evict)
    rig.engine.answer = rig.other.answer = lambda _: JSON_OK
    client = rig.client()
    for model in (b"a", b"org/b"):
        assert client.ask(b'{"model":"%b"}' % model).status == 200
    assert were_closed == [True]


def served(rig: Rig, client: RawClient) -> None:
    """The engine gives a whole answer, so that its end is not one right after its load."""
    rig.answers(client)
    rig.events.wait("released")
    rig.relay.pool.close()


def test_a_dead_engine_is_loaded_anew_and_the_request_sent_again(rig: Rig) -> None:
    client = rig.client()
    served(rig, client)
    client.post(ASK_A)
    rig.mechanism.end = "exited with code 137"
    rig.engine.next().reset()
    asked = rig.engine.next()
    assert len(rig.events.of("loading")) == 2
    asked.send(JSON_OK)
    assert client.read().status == 200


def test_an_engine_that_ends_under_its_first_request_is_not_loaded_again_for_every_other(rig: Rig) -> None:
    rig.mechanism.end = "exited with code 139"
    client = rig.client()
    for n in range(6):
        client.post(ASK_A)
        if n == 0:
            rig.engine.next().reset()
        answer = client.read()
        assert (answer.status, answer.header(b"x-should-retry")) == (503, b"false")
        assert b"exited with code 139" in answer.body
    assert len(rig.events.of("loading")) == 1


def test_a_request_under_which_its_engine_ends_twice_is_refused_with_what_happened(rig: Rig) -> None:
    client, other = rig.client(), rig.client()
    rig.mechanism.end = "exited with code 139"
    served(rig, client)
    client.post(ASK_A)
    poison = rig.engine.next()
    poison.reset()
    poison = rig.engine.next()
    rig.answers(other)
    rig.events.wait("released", 2)
    poison.reset()
    answer = client.read()
    assert (answer.status, answer.header(b"x-should-retry")) == (502, b"false")
    assert answer.code == "engine_crashed"
    assert b"exited with code 139" in answer.body
    assert len(rig.events.of("loading")) == 2
    rig.answers(other)


def test_a_connection_that_is_closed_without_an_answer_is_the_failure_of_its_request_alone(rig: Rig) -> None:
    streaming, client = rig.client(), rig.client()
    stream = rig.streams(streaming)
    client.post(ASK_A)
    rig.engine.next().close()
    answer = client.read()
    assert (answer.status, answer.code) == (502, "backend_unavailable")
    assert rig.engine.asked.empty()
    stream.send(chunk(b"data: 2\n\n"), chunk(b""))
    assert streaming.read_chunks() == (b"data: 2\n\n", True)
    rig.answers(client)
    assert rig.events.of("draining") == []
    assert len(rig.events.of("loading")) == 1


@pytest.mark.parametrize("well", [None, False])
def test_a_neighbour_that_gets_bytes_is_proof_of_life_whatever_the_engine_says(
    rig: Rig, well: bool | None
) -> None:
    """Its health route may have to wait for a thread as any request does."""
    asked, may_answer = threading.Event(), threading.Event()

    def answers(backend: Backend, limit: float) -> bool | None:
        asked.set()
        assert may_answer.wait(GUARD)
        return well

    rig.mechanism.answers = answers  # type: ignore[method-assign]
    streaming, client = rig.client(), rig.client()
    stream = rig.streams(streaming)
    client.post(ASK_A)
    rig.engine.next().close()
    assert asked.wait(GUARD)
    stream.send(chunk(b"data: 2\n\n"))
    streaming.read_until(b"data: 2\n\n\r\n")
    may_answer.set()
    assert client.read().status == 502
    assert seen(lambda: rig.mux.facts.doubts._open, lambda doubts: not doubts) == {}
    assert rig.events.of("draining") == []


def test_a_request_that_waited_on_an_idle_connection_is_not_asked_twice(rig: Rig) -> None:
    client = rig.client()
    rig.answers(client)
    looked, look = threading.Event(), exchange.Exchange._look

    def noting(waiting: exchange.Exchange) -> None:
        look(waiting)
        looked.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange.Exchange, "_look", noting)
        client.post(ASK_A)
        asked = rig.engine.next()
        assert looked.wait(GUARD)
        asked.close()
        assert client.read().status == 502
    assert rig.engine.asked.empty()
    assert rig.events.of("draining") == []


def elsewhere(rig: Rig, listener: socket.socket) -> None:
    """Where the engine of ``a`` listens, and nobody takes what comes."""
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    rig.mechanism.engines["a"] = SimpleNamespace(url=url)  # type: ignore[assignment]


def test_a_frozen_engine_with_a_full_backlog_answers_all_when_it_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anvil_mux.proxy.connections.CONNECT_SECONDS", 0.5)
    looks, look = threading.Semaphore(0), exchange.Exchange._look

    def noting(waiting: exchange.Exchange) -> None:
        looks.release()
        look(waiting)

    monkeypatch.setattr(exchange.Exchange, "_look", noting)
    rig.engine.answer = lambda _: JSON_OK
    with socket.create_server(("127.0.0.1", 0), backlog=5) as frozen:
        elsewhere(rig, frozen)
        clients = [rig.client() for _ in range(20)]
        for client in clients:
            client.post(ASK_A)
        for _ in range(20 * 6):
            assert looks.acquire(timeout=GUARD)
        assert rig.mux.overview.status().leases == 20
        rig.engine.accept_from(frozen)
        assert [client.read().status for client in clients] == [200] * 20
        frozen.shutdown(socket.SHUT_RDWR)
    assert rig.events.of("severed") == rig.events.of("draining") == []
    assert len(rig.events.of("loading")) == 1


def test_who_waits_for_a_connection_leaves_with_its_client(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        elsewhere(rig, full)
        clients = [rig.client() for _ in range(4)]
        for client in clients:
            client.post(ASK_A)
        rig.events.wait("leased", 4)
        for client in clients:
            client.leave()
        rig.events.wait("released", 4)
    assert rig.events.of("draining") == []


def test_an_engine_that_cannot_be_reached_twice_is_a_502(rig: Rig) -> None:
    rig.engine.stop_listening()
    client = rig.client()
    answer = client.ask(ASK_A)
    assert answer.status == 502
    assert answer.code == "backend_unavailable"
    assert len(rig.events.of("leased")) == 2


def test_a_load_that_fails_is_a_503_with_the_engines_last_words(rig: Rig) -> None:
    rig.mechanism.failure = LoadError("a exited with code 1.", log=["CUDA out of memory"])
    client = rig.client()
    answer = client.ask(ASK_A)
    assert answer.status == 503
    assert b"CUDA out of memory" in answer.body


def test_an_engines_redirect_is_told_and_not_followed(rig: Rig) -> None:
    client = rig.client()
    client.post(ASK_A)
    rig.engine.next().send(
        b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    )
    assert client.read().status == 307
    assert rig.engine.asked.empty()


def test_header_values_cannot_smuggle_lines(rig: Rig) -> None:
    answers = iter([b"HTTP/1.1 200 OK\r\nX-A: 1\rX-B: 2\r\nContent-Length: 2\r\n\r\n{}", JSON_OK])
    rig.engine.answer = lambda _: next(answers)
    client = rig.client()
    assert client.ask(ASK_A).status == 502


# Tokens


def test_the_tokens_of_an_answer_are_those_that_the_engine_says(rig: Rig) -> None:
    client = rig.client()
    usage = b'{"prompt_tokens":12,"completion_tokens": 37,"prompt_tokens_details":{"cached_tokens":8}}'
    body = b'{"choices":[{"text":"\\"completion_tokens\\": 9"}],"usage":%b}' % usage
    client.post(ASK_A)
    rig.engine.next().send(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    assert client.read().status == 200
    record = rig.events.record(1)
    assert (record.tokens, record.prompt_tokens, record.cached_tokens) == (37, 12, 8)


def test_what_a_stream_says_of_tokens_is_found_wherever_its_pieces_end() -> None:
    usage = b'{"prompt_tokens":12,"completion_tokens":37,"prompt_tokens_details":{"cached_tokens":821}}'
    stream = b'data: {"x":1}\n\n' * 3 + b'data: {"usage":%b}\n\ndata: [DONE]\n\n' % usage
    for end in range(1, len(stream)):
        passed = pump.Passed()
        for piece in (stream[:end], stream[end:]):
            passed.note(piece)
        assert api.tokens_said(passed.usage) == (37, 12, 821), end


@pytest.mark.parametrize(
    ("end", "tokens"), [(b"data: [DONE]\n\n", 3), (b'data: {"usage":{"completion_tokens":41}}\n\n', 41)]
)
def test_the_tokens_of_a_stream_are_its_events_unless_it_says(rig: Rig, end: bytes, tokens: int) -> None:
    client, asked = rig.asked(STREAM_A)
    event = chunk(b'data: {"choices":[]}\n\n')
    asked.send(SSE_HEAD, event)
    client.read_until(event)  # the rest comes by way of the pump
    asked.send(event, event)
    client.read_until(event)
    asked.send(chunk(end), b"0\r\n\r\n")
    client.read_until(b"0\r\n\r\n")
    assert rig.events.record(1).tokens == tokens


def test_an_answer_that_is_no_text_has_no_tokens(rig: Rig) -> None:
    client = rig.client()
    rig.answers(client)
    assert rig.events.record(1).tokens == 0


# Beats


def test_a_waiting_stream_is_kept_alive_and_then_continued(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(patience=Patience(grace=0.0, comment_every=0.0, chunk_every=1e9))
    rig.mechanism.gate.clear()
    client = rig.client()
    client.post(STREAM_A)
    head = client.read_until(b"\r\n\r\n")
    assert b" 200 " in head
    assert b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n" in head
    for _ in range(2):
        client.read_until(chunk(b": anvil-mux loading a\n"))
    rig.mechanism.gate.set()
    rig.engine.next().send(SSE_HEAD, chunk(b"data: 1\n\n"), b"0\r\n\r\n")
    content, clean = client.read_chunks()
    assert clean
    assert content.replace(b": anvil-mux loading a\n", b"") == b"data: 1\n\n"
    rig.answers(client)


def test_who_waits_for_a_swap_that_has_not_begun_is_told_so(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(patience=Patience(grace=0.0, comment_every=0.0, chunk_every=1e9), drain_timeout=1e6)
    first, second = rig.client(), rig.client()
    first.post(ASK_A)
    asked = rig.engine.next()
    rig.mechanism.gate.clear()
    second.post(b'{"model":"org/b","stream":true}')
    second.read_until(b"\n: anvil-mux waiting to load org/b")
    asked.send(JSON_OK)
    second.read_until(b"\n: anvil-mux loading org/b\n")


def test_a_minimal_chunk_comes_with_some_beats(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(patience=EAGER_BEATS)
    rig.mechanism.gate.clear()
    client = rig.client()
    client.post(STREAM_A)
    line = client.read_until(b"}\n\n").splitlines()[-2]
    event = json.loads(line.removeprefix(b"data: "))
    assert event["object"] == "chat.completion.chunk"
    assert event["choices"][0]["delta"] == {}


def test_nothing_is_sent_before_the_grace_is_over(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(patience=Patience(grace=1e9))
    rig.mechanism.gate.clear()
    rig.mechanism.failure = LoadError("no")
    client = rig.client()
    client.post(STREAM_A)
    rig.events.wait("queued")
    rig.mechanism.gate.set()
    assert client.read().status == 503


def test_a_load_that_fails_after_beats_is_an_error_event(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(patience=EAGER_BEATS)
    rig.mechanism.gate.clear()
    rig.mechanism.failure = LoadError("a exited with code 1.")
    client = rig.client()
    client.post(STREAM_A)
    client.read_until(b"loading a\n")
    rig.mechanism.gate.set()
    rest = client.rest()
    assert error_in(rest)["code"] == "load_failed"
    assert not rest.endswith(b"0\r\n\r\n")


def test_an_engines_error_after_beats_is_an_error_event(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(patience=EAGER_BEATS)
    rig.mechanism.gate.clear()
    rig.engine.answer = lambda _: b"HTTP/1.1 400 Bad\r\nContent-Length: 9\r\n\r\ntoo long!"
    client = rig.client()
    client.post(STREAM_A)
    client.read_until(b"loading a\n")
    rig.mechanism.gate.set()
    assert "400: too long!" in error_in(client.rest())["message"]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        pytest.param(
            b'{"error":{"code":400,"message":"too long!","type":"exceed_context_size_error","n_ctx":8}}',
            {"message": "too long!", "type": "exceed_context_size_error", "param": None, "code": 400},
            id="llama.cpp",
        ),
        pytest.param(
            b'{"object":"error","message":"too long!","type":"BadRequestError","param":null,"code":400}',
            {"message": "too long!", "type": "BadRequestError", "param": None, "code": 400},
            id="vLLM",
        ),
        pytest.param(
            b'{"error":{"message":"%b"}}' % (b"x" * 5000),
            {
                "message": "x" * 2000,
                "type": "invalid_request_error",
                "param": None,
                "code": "refused_by_engine",
            },
            id="bounded",
        ),
    ],
)
def test_an_engines_refusal_after_beats_is_told_in_its_own_words(
    make_rig: Callable[..., Rig], body: bytes, told: dict[str, object]
) -> None:
    rig = make_rig(patience=EAGER_BEATS)
    rig.mechanism.gate.clear()
    rig.engine.answer = lambda _: b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    client = rig.client()
    client.post(STREAM_A)
    client.read_until(b"loading a\n")
    rig.mechanism.gate.set()
    assert error_in(client.rest()) == told
    assert rig.events.record().code == "refused_by_engine"


def test_beats_to_a_client_of_http_1_0_are_not_chunked(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(patience=Patience(grace=0.0, comment_every=1e9, chunk_every=1e9))
    rig.mechanism.gate.clear()
    client = rig.client()
    client.send(
        b"POST /v1/chat/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n%b"
        % (len(STREAM_A), STREAM_A)
    )
    client.read_until(b"\r\n\r\n: anvil-mux loading a\n")
    rig.mechanism.gate.set()
    rig.engine.next().send(SSE_HEAD, chunk(b"data: 1\n\n"), b"0\r\n\r\n")
    assert client.rest() == b"data: 1\n\n"


def test_a_request_without_a_stream_is_answered_before_its_client_gives_up(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(patience=Patience(silence=0.0))
    rig.mechanism.gate.clear()
    client = rig.client()
    answer = client.ask(ASK_A)
    assert (answer.status, answer.code) == (503, "model_loading")
    assert answer.header(b"retry-after") == b"10"
    assert rig.events.record().waited > 0


def test_a_client_is_told_to_come_again_when_the_load_should_be_over(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(patience=Patience(silence=0.0))
    rig.mux.overview.eta = {"a": 42.0, "org/b": 600.0}.get  # type: ignore[method-assign]
    rig.mechanism.gate.clear()
    client = rig.client()
    for body, seconds in ((ASK_A, b"42"), (b'{"model":"org/b"}', b"60")):
        assert client.ask(body).header(b"retry-after") == seconds


def test_the_minimal_chunk_is_not_put_off_until_the_next_comment(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(patience=Patience(grace=0.0, comment_every=1e9, chunk_every=0.1))
    rig.mechanism.gate.clear()
    client = rig.client()
    client.post(STREAM_A)
    client.read_until(b"loading a\n")
    client.read_until(b"chat.completion.chunk")


@pytest.mark.parametrize("field", [b"x-stainless-read-timeout", b"x-stainless-timeout"])
def test_the_clients_own_limit_is_respected(make_rig: Callable[..., Rig], field: bytes) -> None:
    rig = make_rig()
    rig.mechanism.gate.clear()
    client = rig.client()
    assert client.ask(ASK_A, extra=field + b": 0.01\r\n").status == 503


# Large bodies


def test_a_mistake_with_one_stream_ends_that_one_and_no_other(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = pump._content

    def mistaken(stream: pump.PumpedStream) -> bytes:
        data = content(stream)
        if b"mistake" in data:
            raise RuntimeError("a mistake")
        return data

    monkeypatch.setattr(pump, "_content", mistaken)
    wrong, other = rig.client(), rig.client()
    asked = []
    for client in (wrong, other):
        client.post(STREAM_A)
        asked.append(rig.engine.next())
        asked[-1].send(SSE_HEAD, chunk(b"data: 1\n\n"))
        client.read_until(b"data: 1\n\n\r\n")
    asked[0].send(chunk(b"data: mistake\n\n"))
    body, clean = wrong.read_chunks()
    assert (b"mistake" in body, clean) == (False, False)
    asked[1].send(chunk(b"data: 2\n\n"), b"0\r\n\r\n")
    assert other.read_chunks() == (b"data: 2\n\n", True)


def test_where_no_connection_can_be_opened_the_request_is_refused_and_its_engine_not_doubted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(family: int) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(connections, "_unconnected", none_left)
        client = rig.client()
        answer = client.ask(ASK_A)
    assert (answer.status, answer.header(b"retry-after")) == (503, b"5")
    error = json.loads(answer.body)["error"]
    assert error["code"] == "overloaded"
    assert "Too many open files" in error["message"]
    rig.engine.answer = lambda _: JSON_OK
    assert client.ask(ASK_A).status == 200
    assert rig.events.of("died") == []


def test_a_large_json_body_is_held_once(rig: Rig) -> None:
    size = 30 << 20
    body = b'{"messages":["' + b"x" * size + b'"],"model":"alias"}'
    rig.engine.keep_bodies = False
    client = rig.client()
    client.post(ASK_A)
    rig.engine.next().send(JSON_OK)
    client.read()
    tracemalloc.start()
    try:
        client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % (client.host, len(body))
        )
        client.socket.sendall(body)
        asked = rig.engine.next()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert asked.size == len(body) - len("alias") + len("a")
    asked.send(JSON_OK)
    assert client.read().status == 200
    assert peak < size * 1.2


def test_an_upload_larger_than_the_disk_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **how: FileIO("/dev/full", "r+"))
    body = b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\na\r\n--B--\r\n'
    client = rig.client()
    client.send(
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: %b\r\n"
        b"Content-Type: multipart/form-data; boundary=B\r\nContent-Length: %d\r\n\r\n%b"
        % (client.host, len(body), body)
    )
    answer = client.read()
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"], answer.header(b"x-should-retry")) == (507, "disk_full", b"false")
    assert "does not fit on anvil-mux's disk" in error["message"]
    assert "No space left on device" in error["message"]


def test_an_upload_is_spooled_and_sent_again_on_a_new_engine(rig: Rig) -> None:
    size = 20 << 20
    body = (
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + b"w" * size
        + b'\r\n--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nalias\r\n--B--\r\n'
    )
    client = rig.client()
    served(rig, client)
    head = (
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: %b\r\n"
        b"Content-Type: multipart/form-data; boundary=B\r\nContent-Length: %d\r\n\r\n"
        % (client.host, len(body))
    )
    rig.engine.keep_bodies = False
    tracemalloc.start()
    try:
        client.send(head)
        client.socket.sendall(body)
        asked = rig.engine.next()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 << 20
    assert asked.size == len(body) - len("alias") + len("a")
    rig.engine.keep_bodies = True
    rig.mechanism.end = "killed"
    asked.reset()
    again = rig.engine.next()
    assert again.body == body.replace(b"alias", b"a")
    again.send(JSON_OK)
    assert client.read().status == 200
