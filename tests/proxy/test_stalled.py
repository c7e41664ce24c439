"""Clients that take nothing of what waits for them: whoever sends to them, their leases end by one rule."""

import json
import select
import socket
import threading
from contextlib import suppress

import pytest

from anvil_mux.protocol import http1
from anvil_mux.proxy import client, connections, exchange, pump
from tests.fake_engine import ASK_A, GUARD, JSON_OK, SSE_HEAD, Asked, RawClient, Rig, answer_of, chunk
from tests.proxy.test_upstream import SWITCHED, WISH

LARGE = 16 << 20
"""More than the buffers of a connection hold."""


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "SWEEP_SECONDS", 0.02)
    monkeypatch.setattr(client, "LOOK_SECONDS", 0.02)


def answered(asked: Asked, *pieces: bytes) -> None:
    """Sends as much as is taken."""
    try:
        asked.send(*pieces)
    except OSError:
        pass


def stream(rig: Rig, path: bytes = b"/v1/chat/completions") -> RawClient:
    """A stream by the pump, or one that is translated where the path asks for that."""
    stalled, asked = rig.asked(
        b'{"model":"a","stream":true,"messages":[{"role":"user","content":"hi"}]}', path=path
    )
    event = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 65536)
    threading.Thread(target=answered, args=(asked, SSE_HEAD, *[chunk(event)] * 300), daemon=True).start()
    return stalled


def translated_stream(rig: Rig) -> RawClient:
    return stream(rig, b"/api/chat")


def translated_answer(rig: Rig) -> RawClient:
    stalled, asked = rig.asked(
        b'{"model":"a","stream":false,"messages":[{"role":"user","content":"hi"}]}', path=b"/api/chat"
    )
    said = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * LARGE}}]}
    answered(asked, answer_of(json.dumps(said).encode()))
    return stalled


def websocket(rig: Rig) -> RawClient:
    """Its client goes on talking."""
    stalled = rig.client()
    stalled.send(b"GET /v1/realtime?model=a HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % WISH)
    asked = rig.engine.next()
    frame = b"\x82\x7f" + LARGE.to_bytes(8, "big") + bytes(LARGE)
    threading.Thread(target=answered, args=(asked, SWITCHED, frame), daemon=True).start()
    return stalled


WAYS = (stream, translated_stream, translated_answer, websocket)


@pytest.mark.parametrize("begin", WAYS, ids=[way.__name__ for way in WAYS])
def test_the_lease_of_a_client_that_takes_nothing_ends_while_a_swap_waits_for_it(make_rig, begin):
    rig = make_rig(client_timeout=0.1, drain_timeout=1e6)
    rig.other.answer = lambda _: JSON_OK
    begin(rig)
    assert rig.ask(b'{"model":"org/b"}').status == 200
    assert not rig.events.of("severed")
    records = [
        rig.events.record(number) for number in (1, 2)
    ]  # the stalled one's may be written after the other's
    assert {(record.model, record.code) for record in records} == {("a", "client_stalled"), ("org/b", "")}


def whole_answer(rig: Rig) -> RawClient:
    stalled, asked = rig.asked(ASK_A)
    answered(asked, answer_of(bytes(LARGE)))
    return stalled


@pytest.mark.parametrize("begin", [whole_answer, translated_answer])
def test_a_slow_reader_of_an_answer_that_the_engine_has_given_holds_up_no_swap(make_rig, monkeypatch, begin):
    monkeypatch.setattr(exchange, "WHOLE", LARGE)
    rig = make_rig(client_timeout=1e6, drain_timeout=1e6)
    rig.other.answer = lambda _: JSON_OK
    slow = begin(rig)
    assert rig.ask(b'{"model":"org/b"}').status == 200
    assert not rig.events.of("severed")
    answer = slow.read()
    assert (answer.status, answer.clean) == (200, True)
    assert len(answer.body) >= LARGE


def fill(near: socket.socket) -> int:
    """Send as much as fits, and say how much that is."""
    sent = 0
    with suppress(BlockingIOError):
        while True:
            sent += near.send(bytes(4096), socket.MSG_DONTWAIT)
    return sent


def test_a_stream_ends_with_its_engine_whatever_its_client_has_not_taken():
    engine, upstream = socket.socketpair()
    near, far = socket.socketpair()
    with engine, upstream, near, far:
        fill(near)
        moved = pump.Pump(silence_timeout=1e6, client_timeout=1e6)
        response = http1.parse_response(SSE_HEAD, "POST")
        last = pump.PumpedStream(upstream, near, pump.body_of(response, chunked=True), print)
        said = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        engine.sendall(said)
        moving = threading.Thread(target=moved.relay, args=(last,), daemon=True)
        moving.start()
        moving.join(GUARD)
        moved.close()
        assert (last.end, last.pending) == (pump.End.COMPLETE, said)


def test_an_engine_that_is_slow_is_no_stalled_client():
    engine, upstream = socket.socketpair()
    near, far = socket.socketpair()
    moved = pump.Pump(silence_timeout=1e6, client_timeout=0.0)
    response = http1.parse_response(SSE_HEAD, "POST")
    slow = pump.PumpedStream(upstream, near, pump.body_of(response, chunked=True), print)
    moved._streams[-1] = slow
    engine.sendall(chunk(b"data: 1\n\n"))
    moved._read(slow, 100.0)
    moved._sweep(1e5)
    assert slow.end is None
    moved._streams.clear()
    moved.close()
    for end in (engine, upstream, near, far):
        end.close()


def test_a_client_that_takes_a_little_now_and_then_is_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname(), GUARD)
        near, _ = listener.accept()
    with near, far:
        far_has = fill(near)
        stall = connections.Stall(near, 0.0)
        assert stall.seconds(50.0) == 50.0
        while far_has:
            far_has -= len(far.recv(far_has))
        assert select.select([], [near], [], GUARD)[1]
        assert stall.seconds(60.0) == 0.0
        assert stall.seconds(70.0) == 10.0
