"""Requests to engines and their answers, over real sockets, with an engine whose bytes the test sends."""

import errno
import json
import socket
import threading
import tracemalloc
from datetime import timezone
from email.utils import parsedate_to_datetime
from io import FileIO

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.protocol import http1
from anvil_mux.proxy import connections, pump
from tests.fake_engine import (
    ASK_A,
    DONE,
    END,
    JSON_OK,
    SSE_HEAD,
    STREAM_A,
    UNTIL_CLOSE,
    Answer,
    answer_of,
    chunk,
)
from tests.running import seen

# Answers


def test_an_answer_comes_back_with_its_body_and_own_headers(rig):
    client, asked = rig.asked(
        ASK_A,
        extra=b"Connection: x-secret\r\nX-Secret: 1\r\nX-Request-ID: my-id\r\nX-Forwarded-For: 6.6.6.6\r\n",
    )
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
def test_an_engines_error_is_relayed_with_its_body(rig, status):
    rig.engine.answer = lambda _: b'HTTP/1.1 %b\r\nContent-Length: 13\r\n\r\n{"error": 42}' % status
    answer = rig.ask()
    assert (answer.status, answer.body) == (int(status[:3]), b'{"error": 42}')


@pytest.mark.parametrize("theirs", [b"", b"Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"])
def test_every_answer_has_one_date(make_rig, theirs):
    rig = make_rig(max_connections=2)
    rig.engine.answer = lambda _: b"HTTP/1.1 200 OK\r\n%bContent-Length: 0\r\n\r\n" % theirs
    client = rig.client()
    answers = [client.ask(ASK_A), client.get(b"/livez"), client.get(b"/nowhere")]
    follower = rig.client()
    follower.send(b"GET /models/sse HTTP/1.1\r\nHost: %b\r\n\r\n" % follower.host)
    answers.append(Answer(200, follower.read_until(b"\r\n\r\n"), b"", True))
    answers.append(rig.client().read())  # one too many
    assert [answer.status for answer in answers] == [200, 200, 404, 200, 503]
    for answer in answers:
        assert answer.head.count(b"\r\nDate: ") == 1
        assert parsedate_to_datetime((answer.header(b"date") or b"").decode()).tzinfo == timezone.utc
    assert not theirs or theirs in answers[0].head


def test_the_same_head_again_goes_on_with_its_own_id_and_length(rig):
    client = rig.client()
    ids = set()
    for body in (ASK_A, b'{"model":"a","n":1}', b'{"model": "org/b"}', b'{"model": "alias"}'):
        client.post(body)
        engine = rig.other if b"org/b" in body else rig.engine
        asked = engine.next()
        assert b"\r\nHost: 127.0.0.1:%d\r\n" % engine.address[1] in asked.head
        assert asked.head.count(b"X-Request-ID: ") == asked.head.count(b"Content-Length: ") == 1
        said = b"x" * 10 ** len(ids)
        asked.send(answer_of(said, b"X-Request-ID: theirs"))
        answer = client.read()
        assert (answer.body, answer.head.count(b"X-Request-ID: ")) == (said, 1)
        ids.add(answer.header(b"x-request-id"))
    assert len(ids) == 4


def test_answers_without_a_body_keep_the_connection(rig):
    answers = iter([b"HTTP/1.1 204 No Content\r\n\r\n", JSON_OK])
    rig.engine.answer = lambda _: next(answers)
    client = rig.client()
    assert client.ask(ASK_A).status == 204
    assert client.ask(ASK_A).body == b"{}"
    assert len(rig.engine.connections) == 1


def test_interim_answers_of_the_engine_are_skipped(rig):
    rig.engine.answer = lambda _: b"HTTP/1.1 100 Continue\r\n\r\n" + JSON_OK
    assert rig.client().ask(ASK_A).body == b"{}"


def test_an_alias_reaches_the_engine_under_the_name_that_it_knows(rig):
    rig.engine.answer = rig.other.answer = lambda asked: answer_of(asked.body)
    client = rig.client()
    assert client.ask(b'{"x": 1, "model": "alias"}').body == b'{"x": 1, "model": "a"}'
    assert client.ask(b'{"model":"org/b", "n": 2.50}').body == b'{"model":"b-inside", "n": 2.50}'


def test_a_request_without_a_model_goes_to_the_default(make_rig):
    rig = make_rig(default_model="org/b")
    asked = rig.passes(b'{"x":1}', engine=rig.other)
    assert json.loads(asked.body) == {"model": "b-inside", "x": 1}


# Streams


def test_the_first_event_reaches_the_client_before_the_last_is_sent(rig):
    client, asked = rig.asked(STREAM_A)
    asked.send(SSE_HEAD)
    head = client.read_until(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head
    for number in range(20):
        asked.send(chunk(b"data: %d\n\n" % number))
        assert client.read_until(b"\n\n\r\n").endswith(b"data: %d\n\n\r\n" % number)
    asked.send(END)
    assert client.read_until(b"0\r\n\r\n") == END
    rig.answers(client)
    assert len(rig.engine.connections) == 1


@pytest.mark.parametrize("end", [b"0\r\n\r\nHTTP/1.1 200 OK\r\n", b"0\r\n\r\n"])
def test_what_an_engine_sends_beyond_its_answer_is_nobodys(rig, end):
    client, asked = rig.asked(STREAM_A)
    asked.send(SSE_HEAD + chunk(DONE) + end)
    answer = client.read()
    assert (answer.body, answer.clean) == (DONE, True)
    rig.answers(client)
    assert len(rig.engine.connections) == (1 if end == b"0\r\n\r\n" else 2)


def test_a_body_until_close_is_chunked_for_the_client(rig):
    client, asked = rig.asked(STREAM_A)
    asked.send(UNTIL_CLOSE, b"data: 1\n\n")
    assert b"Transfer-Encoding: chunked" in client.read_until(b"\r\n\r\n")
    client.read_until(b"data: 1\n\n\r\n")
    asked.send(b"data: [DONE]\n\n")
    client.read_until(b"data: [DONE]\n\n\r\n")
    asked.close()
    client.read_until(b"0\r\n\r\n")
    rig.answers(client)


def test_chunks_are_taken_apart_for_a_client_of_http_1_0(rig):
    client = rig.client()
    client.send(
        b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(STREAM_A), STREAM_A)
    )
    asked = rig.engine.next()
    asked.send(SSE_HEAD, chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n"), END)
    answer = client.read()
    assert answer.header(b"transfer-encoding") is None
    assert answer.header(b"connection") == b"close"
    assert answer.body == b"data: 1\n\ndata: 2\n\n" + DONE


@pytest.mark.parametrize("more", [b"", b"more"])
def test_a_large_answer_with_a_length_passes_whole_and_nothing_beyond_it(rig, more):
    content = bytes(range(256)) * 8192
    rig.engine.answer = lambda _: answer_of(content) + more
    client = rig.client()
    for _ in range(2):
        assert client.ask(ASK_A).body == content
    assert len(rig.engine.connections) == (2 if more else 1)


def test_a_client_that_does_not_read_stops_the_engine_and_gets_every_byte_later(rig, monkeypatch):
    hold, held = pump.Pump._hold, threading.Event()

    def note(self: pump.Pump, stream: pump.PumpedStream) -> None:
        hold(self, stream)
        held.set()

    monkeypatch.setattr(pump.Pump, "_hold", note)
    client, asked = rig.asked(STREAM_A)
    asked.send(SSE_HEAD)
    client.read_until(b"\r\n\r\n")
    event = b"data: " + b"x" * 65536 + b"\n\n"
    sender = threading.Thread(target=lambda: asked.send(*[chunk(event)] * 300, END))
    sender.start()
    assert held.wait(20)
    assert sender.is_alive(), "nothing held the engine back"
    content, clean = client.read_chunks()
    sender.join()
    assert clean
    assert content == event * 300 + DONE


def test_a_client_that_never_reads_again_is_left(make_rig, monkeypatch):
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


def test_many_streams_at_once_do_not_mix(rig):
    clients = [rig.client() for _ in range(40)]
    for number, client in enumerate(clients):
        client.post(b'{"model":"a","stream":true,"n":%d}' % number)
    asked = {json.loads(each.body)["n"]: each for each in (rig.engine.next() for _ in clients)}
    for each in asked.values():
        each.send(SSE_HEAD)
    for part in range(10):
        for number, each in asked.items():
            each.send(chunk(b"data: %d.%d\n\n" % (number, part)))
    asked[0].send(END)
    rig.events.record()
    for number, each in asked.items():
        if number:
            each.send(END)
    for number, client in enumerate(clients):
        answer = client.read()
        assert answer.clean
        assert answer.body == b"".join(b"data: %d.%d\n\n" % (number, part) for part in range(10)) + DONE
    rig.events.record(40)
    assert len(rig.relay.pump) == 0


class LateSocket(socket.socket):
    """A socket whose descriptor threads other than the pump's learn when no stream is left in ``moved``."""

    moved: pump.Pump
    asked = 0

    def fileno(self) -> int:
        if threading.current_thread().name != "pump" and hasattr(self, "moved"):
            self.asked += 1
            seen(lambda: len(self.moved), lambda count: self.asked < 2 or not count)
        return super().fileno()


def test_a_client_that_leaves_while_its_stream_begins_leaves_nothing_behind():
    engine, near = socket.socketpair()
    upstream = LateSocket(fileno=near.detach())
    left, far_left = socket.socketpair()
    client, far = socket.socketpair()
    upstream.moved = moved = pump.Pump()
    response = http1.parse_response(SSE_HEAD, "POST")
    streams = [
        pump.PumpedStream(upstream, each, pump.body_of(response, chunked=True), print)
        for each in (left, client)
    ]
    far_left.close()
    assert moved.relay(streams[0]) is pump.End.CLIENT_GONE
    engine.sendall(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    assert moved.relay(streams[1]) is pump.End.COMPLETE
    moved.close()
    for end in (engine, upstream, left, client, far):
        end.close()


def test_a_stream_ends_once_whatever_is_seen_of_it_later(monkeypatch):
    monkeypatch.setattr(pump, "SWEEP_SECONDS", 1e6)
    (engine, upstream), (client, far) = socket.socketpair(), socket.socketpair()
    moved = pump.Pump(silence_timeout=10.0)
    response = http1.parse_response(SSE_HEAD, "POST")
    stream = pump.PumpedStream(upstream, client, pump.body_of(response, chunked=True), print)
    moved._streams[-1] = stream
    for now in (100.0, 200.0):
        moved._sweep(now)
    assert stream.end is pump.End.SILENT
    assert stream.woken.acquire(blocking=False) is False
    moved._streams.clear()
    moved.close()
    assert moved.relay(stream) is pump.End.SEVERED
    for end in (engine, upstream, client, far):
        end.close()


def test_only_silence_ends_a_long_stream(monkeypatch):
    monkeypatch.setattr(pump, "SWEEP_SECONDS", 1e6)
    engine, upstream = socket.socketpair()
    client, far = socket.socketpair()
    moved = pump.Pump(silence_timeout=10.0)
    response = http1.parse_response(SSE_HEAD, "POST")
    stream = pump.PumpedStream(upstream, client, pump.body_of(response, chunked=True), print)
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


# What an engine is sent of a client's head


def test_engine_is_sent_what_http_tracing_and_apis_need(rig):
    sent = (
        b"Accept-Language: de\r\nRange: bytes=0-1\r\nIf-None-Match: x\r\nUser-Agent: me\r\n"
        b"Traceparent: 00-1\r\nTracestate: a=1\r\nBaggage: b=2\r\nB3: 0\r\nanthropic-beta: x\r\n"
    )
    _, asked = rig.asked(ASK_A, extra=sent)
    assert sent in asked.head
    asked.send(JSON_OK)


@pytest.mark.parametrize("field", [b"X-Conversation-Id", b"X-Data-Parallel-Rank", b"Cookie", b"X-Odd"])
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/upstream/a/v1/chat/completions", b"/api/chat"])
def test_engine_is_sent_no_header_that_it_is_not_known_to_need(rig, field, path):
    client = rig.client()
    body = b'{"model":"a","messages":[{"role":"user","content":"Hi"}]}'
    client.post(body, path=path, extra=field + b": of-a-client\r\n")
    asked = rig.engine.next()
    assert b"of-a-client" not in asked.head
    asked.send(JSON_OK)
    client.read()


@pytest.mark.parametrize(("engine", "is_sent"), [("vllm", True), ("sglang", True), ("llamacpp", False)])
def test_engine_is_sent_the_headers_that_its_record_names(make_rig, engine, is_sent):
    rig = make_rig(backends=(Backend("a", "a", gpus=("0",), engine=engine),))
    _, asked = rig.asked(ASK_A, extra=b"X-Data-Parallel-Rank: 1\r\n")
    assert (b"\r\nX-Data-Parallel-Rank: 1\r\n" in asked.head) == is_sent
    asked.send(JSON_OK)


def test_engine_is_sent_the_headers_that_its_service_passes(make_rig):
    rig = make_rig(backends=(Backend("a", "a", gpus=("0",), pass_headers=("x-tenant",)),))
    _, asked = rig.asked(ASK_A, extra=b"X-TENANT: t\r\nX-Tenant-2: no\r\n")
    assert b"\r\nX-TENANT: t\r\n" in asked.head
    assert b"x-tenant-2" not in asked.head.lower()
    asked.send(JSON_OK)


# Tokens


def test_the_tokens_of_an_answer_are_those_that_the_engine_says(rig):
    usage = b'{"prompt_tokens":12,"completion_tokens": 37,"prompt_tokens_details":{"cached_tokens":8}}'
    body = b'{"choices":[{"text":"\\"completion_tokens\\": 9"}],"usage":%b}' % usage
    rig.passes(answer=answer_of(body))
    record = rig.events.record(1)
    assert (record.tokens, record.prompt_tokens, record.cached_tokens) == (37, 12, 8)


@pytest.mark.parametrize(
    ("end", "tokens"), [(b": nothing\n\n", 3), (b'data: {"usage":{"completion_tokens":41}}\n\n', 41)]
)
def test_the_tokens_of_a_stream_are_its_events_unless_it_says(rig, end, tokens):
    client, asked = rig.asked(STREAM_A)
    event = chunk(b'data: {"choices":[]}\n\n')
    asked.send(SSE_HEAD, event)
    client.read_until(event)  # the rest comes by way of the pump
    for _ in range(2):
        asked.send(event)
        client.read_until(event)
    asked.send(chunk(end), END)
    client.read_until(b"0\r\n\r\n")
    assert rig.events.record(1).tokens == tokens


def test_the_tokens_of_a_stream_are_merged_over_its_events(rig):
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 4321, "output_tokens": 0}}}
    end = {"type": "message_delta", "usage": {"output_tokens": 40}}
    client, asked = rig.asked(b'{"model":"a","stream":true,"messages":[]}', path=b"/v1/messages")
    asked.send(SSE_HEAD, chunk(b"event: message_start\ndata: %b\n\n" % json.dumps(start).encode()))
    client.read_until(b"\n\n\r\n")  # the rest comes by way of the pump
    for _ in range(100):
        asked.send(chunk(b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'))
    asked.send(chunk(b"event: message_delta\ndata: %b\n\n" % json.dumps(end).encode()))
    asked.send(chunk(b'event: message_stop\ndata: {"type":"message_stop"}\n\n'), b"0\r\n\r\n")
    assert client.read_chunks()[1]
    record = rig.events.record(1)
    assert (record.tokens, record.prompt_tokens, record.code) == (40, 4321, "")


def test_tokens_are_read_from_an_answer_in_chunks_that_is_no_stream(rig):
    client, asked = rig.asked(ASK_A)
    body = b'{"usage":{"prompt_tokens":12,"completion_tokens":3},"prompt_token_ids":[%b1]}' % (b"1," * 2000)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    asked.send(head, chunk(body[:50]), chunk(body[50:]), chunk(b""))
    assert client.read().body == body
    record = rig.events.record(1)
    assert (record.tokens, record.prompt_tokens) == (3, 12)


def test_an_answer_that_is_no_text_has_no_tokens(rig):
    rig.answers(rig.client())
    assert rig.events.record(1).tokens == 0


# Large bodies


def test_a_mistake_with_one_stream_ends_that_one_and_no_other(rig, monkeypatch):
    content = pump._content

    def mistaken(stream: pump.PumpedStream) -> bytes:
        data = content(stream)
        if b"mistake" in data:
            raise RuntimeError("a mistake")
        return data

    monkeypatch.setattr(pump, "_content", mistaken)
    (wrong, first), (other, second) = rig.streaming(), rig.streaming()
    first.send(chunk(b"data: mistake\n\n"))
    body, clean = wrong.read_chunks()
    assert (b"mistake" in body, clean) == (False, False)
    second.send(chunk(b"data: 2\n\n"), END)
    assert other.read_chunks() == (b"data: 2\n\n" + DONE, True)


def test_where_no_connection_can_be_opened_the_request_is_refused_and_its_engine_not_doubted(
    rig, monkeypatch
):
    def none_left(family: int) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(connections, "_unconnected", none_left)
        client = rig.client()
        answer = client.ask(ASK_A)
    assert (answer.status, answer.header(b"retry-after")) == (503, b"5")
    error = answer.error
    assert error["code"] == "overloaded"
    assert "Too many open files" in error["message"]
    rig.engine.answer = lambda _: JSON_OK
    assert client.ask(ASK_A).status == 200
    assert rig.events.of("died") == []


def test_a_large_json_body_is_held_once(rig):
    size = 30 << 20
    body = b'{"messages":["' + b"x" * size + b'"],"model":"alias"}'
    rig.engine.keep_bodies = False
    client = rig.client()
    rig.passes(client=client)
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


def test_an_upload_larger_than_the_disk_is_refused(rig, monkeypatch):
    monkeypatch.setattr("tempfile.TemporaryFile", lambda **how: FileIO("/dev/full", "r+"))
    body = b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\na\r\n--B--\r\n'
    answer = rig.ask(body, b"/v1/audio/transcriptions", type=b"multipart/form-data; boundary=B")
    assert (answer.status, answer.code, answer.header(b"x-should-retry")) == (507, "disk_full", b"false")
    assert "does not fit on anvil-mux's disk" in answer.error["message"]
    assert "No space left on device" in answer.error["message"]


def test_an_upload_is_spooled_and_sent_again_on_a_new_engine(rig):
    size = 20 << 20
    body = (
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + b"w" * size
        + b'\r\n--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nalias\r\n--B--\r\n'
    )
    client = rig.client()
    rig.answers(client)
    rig.events.wait("released")
    rig.relay.pool.close()
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
