"""Answers that end before they are whole: the engine broke off, was evicted, or its client left."""

import socket
import struct
import threading
from collections.abc import Callable

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.errors import Severed
from anvil_mux.proxy import exchange, pump
from tests.fake_engine import (
    ASK_A,
    ASK_B,
    DONE,
    END,
    GUARD,
    JSON_OK,
    SSE_HEAD,
    STREAM_A,
    UNTIL_CLOSE,
    Asked,
    RawClient,
    Rig,
    answer_of,
    chunk,
    error_in,
)

CHAT, TEXT, MESSAGES, RESPONSES = (
    b"/v1/" + name for name in (b"chat/completions", b"completions", b"messages", b"responses")
)


@pytest.mark.parametrize(
    ("path", "sent", "end", "told"),
    [
        pytest.param(CHAT, chunk(b"data: 1\n\n"), Asked.reset, b'data: {"error":', id="reset"),
        pytest.param(MESSAGES, chunk(b"data: 1\n\n"), Asked.close, b"event: error\ndata: ", id="Anthropic"),
        pytest.param(CHAT, chunk(b'data: {"half'), Asked.close, b'\n\ndata: {"error":', id="within an event"),
        pytest.param(CHAT, b"100\r\ndata: 1\n\n", Asked.close, b'data: {"error":', id="within a chunk"),
        pytest.param(
            CHAT, chunk(b"data: 1\n\n"), lambda it: it.send(b"what?\r\n"), b'data: {"error":', id="no chunk"
        ),
    ],
)
def test_a_stream_that_breaks_off_ends_with_an_error_event_and_a_cut(rig, path, sent, end, told):
    client, asked = rig.asked(STREAM_A, path=path)
    asked.send(SSE_HEAD)
    client.read_until(b"\r\n\r\n")
    asked.send(sent)
    client.read_until(sent.partition(b"\r\n")[2].removesuffix(b"\r\n") + b"\r\n")
    end(asked)
    content, clean = client.read_chunks()
    assert not clean
    assert content.startswith(told)
    assert b"backend_unavailable" in content
    assert b"[DONE]" not in content
    assert asked.was_left()
    rig.events.wait("released")
    record = rig.events.record()
    assert (record.status, record.code) == (200, "backend_unavailable")


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
def test_a_stream_without_a_length_is_whole_only_with_its_last_event(rig, path, end):
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
    ("path", "last", "has_error"),
    [
        (CHAT, (b"data: [DONE]\n\n",), False),
        (TEXT, (b"data:[DO", b"NE]"), False),
        (CHAT, (b'data: {"error":{"message":"no"}}\r\n\r\n',), True),
        (MESSAGES, (b"event: message_s", b"top\ndata: {}\n", b"\n"), False),
        (RESPONSES, (b"event: response.incomplete\ndata: {", b"x" * 40000 + b"}\n\n"), False),
        (RESPONSES, (b"event: response.failed\ndata: {}\n\n",), True),
    ],
)
def test_a_last_event_is_found_wherever_its_pieces_end(rig, path, last, has_error):
    sent = [piece[at : at + 10000] for piece in last for at in range(0, len(piece), 10000)]
    client, asked = until_close(rig, path, b"data: {}\n\n", *sent)
    asked.close()
    assert client.read_chunks() == (b"", True)
    rig.events.wait("released")
    assert rig.events.record().code == ("backend_unavailable" if has_error else "")


@pytest.mark.parametrize("path", [CHAT, TEXT, MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    "head", [SSE_HEAD, UNTIL_CLOSE, b"Content-Length"], ids=["chunks", "close", "length"]
)
def test_a_stream_whose_last_event_is_missing_is_cut_under_every_framing(rig, path, head):
    """llama-server ends its chunks soundly when a request is cancelled."""
    content = b'data: {"x":"data: [DONE]"}\n\n' * 3
    client, asked = rig.asked(STREAM_A, path=path)
    if head is SSE_HEAD:
        asked.send(head + chunk(content) + chunk(b""))
    elif head is UNTIL_CLOSE:
        asked.send(head + content)
        asked.close()
    else:
        asked.send(answer_of(content, b"Content-Type: text/event-stream"))
    answer = client.read()
    assert (answer.body.startswith(content), answer.clean) == (True, False)
    assert b"backend_unavailable" in answer.body
    rig.events.wait("released")
    assert (rig.events.record().status, rig.events.record().code) == (200, "backend_unavailable")


@pytest.mark.parametrize("http", [b"1.0", b"1.1"])
def test_a_cut_stream_with_sound_chunks_is_no_whole_one_for_any_client(rig, http):
    client = rig.client()
    request = b"POST %b HTTP/%b\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
    client.send(request % (CHAT, http, len(STREAM_A), STREAM_A))
    rig.engine.next().send(SSE_HEAD + chunk(b"data: 1\n\n") + chunk(b""))
    told = client.rest()
    assert b'data: {"error":' in told
    assert not told.endswith(b"0\r\n\r\n")


def test_an_engine_that_says_why_it_ended_and_sends_no_done_is_whole(rig):
    last = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    client, asked = rig.asked(STREAM_A, path=CHAT)
    asked.send(SSE_HEAD + chunk(last) + chunk(b""))
    answer = client.read()
    assert (answer.body, answer.clean) == (last, True)
    rig.events.wait("released")
    assert rig.events.record().code == ""


@pytest.mark.parametrize(
    ("end", "clean"), [(b'{"x":[1,"a]}"]}', True), (b'{"x":[1,"a]}"', False), (b"", False)]
)
def test_a_json_answer_until_the_engine_closes_is_cut_where_it_does_not_parse(rig, end, clean):
    client, asked = rig.asked(ASK_A, path=CHAT)
    asked.send(b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + end)
    asked.close()
    answer = client.read()
    assert (answer.body, answer.clean) == (end, clean)
    rig.events.wait("released")
    assert rig.events.record().code == ("" if clean else "backend_unavailable")


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request", b"500 Oops"])
@pytest.mark.parametrize(
    "kind", [b"application/problem+json", b"Application/JSON; charset=utf-8", b"text/json"]
)
def test_json_of_any_type_and_status_that_is_cut_does_not_end_cleanly(rig, status, kind):
    for body, clean in ((b'{"error":{"message":"x"}}', True), (b'{"error":{"message":"x', False)):
        client, asked = rig.asked(ASK_A, path=CHAT)
        asked.send(b"HTTP/1.0 %b\r\nContent-Type: %b\r\n\r\n%b" % (status, kind, body))
        asked.close()
        answer = client.read()
        assert (answer.body, answer.clean) == (body, clean)


@pytest.mark.parametrize("body", [b"", b"not found", b'no "such model'])
def test_error_that_is_no_json_ends_cleanly_whatever_its_type(rig, body):
    client, asked = rig.asked(ASK_A, path=CHAT)
    asked.send(b"HTTP/1.0 404 Not Found\r\nContent-Type: application/json\r\n\r\n" + body)
    asked.close()
    answer = client.read()
    assert (answer.status, answer.body, answer.clean) == (404, body, True)


@pytest.mark.parametrize("path", [b"/api/chat", b"/v1/messages"])
def test_translated_json_answer_that_is_cut_is_an_error(rig, path):
    body = b'{"model":"a","stream":false,"max_tokens":1,"messages":[{"role":"user","content":"x"}]}'
    client, asked = rig.asked(body, path=path)
    if path in asked.head:  # the engine lacks the route, so its answer in OpenAI's API is translated
        asked.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        asked = rig.engine.next()
    asked.send(b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n")
    asked.send(b'{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt')
    asked.close()
    assert client.read().status == 502


def test_a_last_event_that_is_cut_within_does_not_count(rig):
    client, asked = until_close(rig, RESPONSES, b"data: {}\n\n", b'event: response.completed\ndata: {"ha')
    asked.close()
    assert client.read_chunks()[1] is False


@pytest.mark.parametrize("ended", [None, "was killed"])
def test_an_end_that_nothing_vouches_for_is_whole_while_its_engine_lives(rig, ended):
    client, asked = until_close(rig, b"/v1/images/generations", b'data: {"x":1}\n\n')
    rig.mechanism.end = ended
    asked.close()
    content, clean = client.read_chunks()
    assert clean is (ended is None)
    assert (b"was killed" in content) is (ended is not None)


def test_a_client_that_takes_no_chunks_sees_that_an_answer_broke_off(rig):
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


def test_a_client_that_has_stopped_sending_sees_that_its_answer_is_not_whole(rig):
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


def test_a_json_answer_that_breaks_off_is_a_502(rig):
    client, asked = rig.asked(ASK_A)
    asked.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    asked.close()
    answer = client.read()
    assert answer.status == 502
    assert answer.code == "backend_unavailable"


def test_a_silent_engine_is_given_up_before_its_head(make_rig):
    rig = make_rig(upstream_timeout=0.05)
    client, asked = rig.asked(ASK_A)
    answer = client.read()
    assert answer.status == 502
    assert b"was silent for 0.05 s" in answer.body
    assert asked.was_left()


def drip(asked, start=b"HTTP/1.1 200 OK\r\nX: "):
    """Send a head that does not end, in small pieces, until the other side leaves."""
    try:
        asked.send(start)
        while not asked.was_left(seconds=0.02):
            asked.send(start[:1])
    except OSError:
        pass
    assert asked.was_left()


def test_a_head_that_comes_in_drops_is_given_up(make_rig):
    rig = make_rig(upstream_timeout=0.3)
    client, asked = rig.asked(ASK_A)
    drip(asked)
    answer = client.read()
    assert (answer.status, answer.code) == (502, "backend_unavailable")
    assert b"did not end the head of its answer within 0.3 s" in answer.body


@pytest.mark.parametrize("interim", [b"", b"HTTP/1.1 102 Processing\r\n\r\n"])
def test_a_client_that_leaves_while_a_head_comes_in_drops_frees_its_lease(rig, interim):
    client, asked = rig.asked(ASK_A)
    client.leave()
    drip(asked, interim + b"HTTP/1.1 200 OK\r\nX: ")
    assert rig.events.record().status == 499


def test_a_client_that_leaves_while_a_body_comes_in_drops_frees_its_lease(rig):
    client, asked = rig.asked(ASK_A)
    client.leave()
    drip(asked, b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n")
    assert rig.events.record().status == 499


def test_a_silent_engine_is_given_up_within_a_stream(make_rig, monkeypatch):
    monkeypatch.setattr("anvil_mux.proxy.pump.SWEEP_SECONDS", 0.02)
    rig = make_rig()
    client, asked = rig.streaming()
    monkeypatch.setattr(rig.relay.pump, "_silence", 0.05)
    content, clean = client.read_chunks()
    assert not clean
    assert "silent" in error_in(content)["message"]
    assert asked.was_left()


# Swaps


def test_a_stream_ends_whole_before_another_model_is_loaded(rig):
    rig.other.answer = lambda _: JSON_OK
    first, second = rig.client(), rig.client()
    asked = rig.streams(first)
    second.post(ASK_B)
    rig.events.wait("draining")
    asked.send(chunk(b"data: 2\n\n"), END)
    content, clean = first.read_chunks()
    assert (content, clean) == (b"data: 2\n\n" + DONE, True)
    assert second.read().body == b"{}"
    assert not rig.events.of("severed")


@pytest.mark.parametrize("framed", [True, False], ids=["chunked", "until the engine closes"])
def test_a_severed_stream_ends_with_an_error_event_and_a_cut(make_rig, framed):
    rig = make_rig(drain_timeout=0.0)
    rig.other.answer = lambda _: JSON_OK
    first, second = rig.client(), rig.client()
    first.post(STREAM_A)
    asked = rig.engine.next()
    if framed:
        asked.send(SSE_HEAD, chunk(b"data: 1\n\n"))
    else:
        asked.send(UNTIL_CLOSE, b"data: 1\n\n")
    first.read_until(b"data: 1\n\n\r\n")
    second.post(ASK_B)
    content, clean = first.read_chunks()
    assert not clean
    assert error_in(content)["code"] == "severed"
    assert asked.was_left()
    assert second.read().body == b"{}"


def test_a_request_severed_before_its_head_gets_503_and_when_to_come_again(make_rig):
    rig = make_rig(drain_timeout=0.0)
    rig.other.answer = lambda _: JSON_OK
    second, (first, asked) = rig.client(), rig.asked(ASK_A)
    second.post(ASK_B)
    answer = first.read()
    assert (answer.status, answer.code) == (503, "severed")
    assert answer.header(b"retry-after") == b"5"
    assert asked.was_left()
    assert second.read().status == 200


def test_a_request_whose_engine_resets_the_connection_when_it_is_severed_is_not_sent_again():
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


def test_a_severed_lease_is_released_while_the_other_model_still_loads(make_rig):
    rig = make_rig(drain_timeout=0.0)
    second, (first, _) = rig.client(), rig.asked(ASK_A)
    rig.mechanism.loading.acquire()
    rig.mechanism.gate.clear()
    second.post(ASK_B)
    assert first.read().status == 503
    assert rig.events.record().code == "severed"
    assert not rig.events.of("ready")[1:]
    assert rig.mechanism.loading.acquire(timeout=20)
    rig.mechanism.gate.set()
    rig.other.next().send(JSON_OK)
    assert second.read().status == 200


def test_a_request_that_waits_is_served_when_its_model_is_ready(rig):
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
def test_a_client_that_leaves_in_a_silent_prefill_frees_its_lease(rig, unread):
    client, asked = rig.asked(ASK_A)
    client.send(unread)
    client.leave()
    assert asked.was_left()
    rig.events.wait("released")
    assert rig.events.record().status == 499


@pytest.mark.parametrize("unread", [b"", b"P"], ids=["all read", "a byte unread"])
def test_a_client_that_leaves_the_line_is_forgotten(rig, unread):
    rig.mechanism.gate.clear()
    client = rig.client()
    client.post(ASK_A)
    rig.events.wait("queued")
    client.send(unread)
    client.leave()
    rig.events.wait("gone")
    rig.mechanism.gate.set()
    rig.events.wait("ready")
    assert rig.engine.asked.empty()
    assert rig.events.record().status == 499


def test_a_client_that_leaves_in_mid_stream_frees_its_lease(rig):
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
def test_a_client_that_leaves_after_the_last_event_had_a_whole_answer(rig, monkeypatch, last, framing):
    monkeypatch.setattr("anvil_mux.proxy.connections.LOOK_SECONDS", 0.05)
    client, asked = rig.streaming()
    asked.send(chunk(last))
    client.read_until(last + b"\r\n")
    if framing:  # llama-server sends its end in two pieces
        asked.send(framing)
    client.leave()
    assert asked.was_left()
    rig.events.wait("released")
    assert rig.events.record().code == ""
    rig.mux.facts.died("a", "was killed")
    assert rig.events.of("stopped")[-1].cause.kind == "died"


def test_an_answer_that_breaks_off_behind_its_last_event_is_not_whole_although_its_client_has_left(
    rig, monkeypatch
):
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
