"""The HTTP front: grammar, limits, routes, and connections that stay in step."""

from __future__ import annotations

import errno
import gzip
import json
import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from anvil_mux import __version__, clock
from anvil_mux.config import keys
from anvil_mux.config.config import Backend
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import BadRequest, LoadError
from anvil_mux.host.seam import Evicted, OtherProcess, Seen, Sensors
from anvil_mux.proxy import client, server
from anvil_mux.scheduler.policies import Decision, Snapshot, Stay, SwapTo
from tests.fake_engine import ASK_A, GUARD, JSON_OK, SSE_HEAD, RawClient, Rig, chunk
from tests.running import seen

SMUGGLED = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


def code(body: bytes) -> str:
    return json.loads(body)["error"]["code"]  # type: ignore[no-any-return]


# What must not be believed

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(
            HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, id="CL+TE"
        ),
        pytest.param(HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, id="other coding"),
        pytest.param(HEAD + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n", 400, id="two lengths"),
        pytest.param(HEAD + b"Content-Length: +4\r\n\r\n", 400, id="+4"),
        pytest.param(HEAD + b"Content-Length: 0_4\r\n\r\n", 400, id="0_4"),
        pytest.param(HEAD + b"Content-Length: -1\r\n\r\n", 400, id="-1"),
        pytest.param(HEAD + b"Content-Length: abc\r\n\r\n", 400, id="abc"),
        pytest.param(HEAD + b"Content-Length: 9999999999999999\r\n\r\n", 400, id="16 digits"),
        pytest.param(HEAD + b"Content-Length: 999999999999\r\n\r\n", 413, id="huge"),
        pytest.param(HEAD + b"Content-Length : 4\r\n\r\n", 400, id="space before colon"),
        pytest.param(HEAD + b"X: 1\r\n folded\r\nContent-Length: 4\r\n\r\n", 400, id="folded"),
        pytest.param(HEAD + b"X: 1\rY: 2\r\nContent-Length: 4\r\n\r\n", 400, id="bare CR"),
        pytest.param(HEAD + b"X: 1\nContent-Length: 4\r\n\r\n", 400, id="bare LF"),
        pytest.param(b"GET /livez HTTP/1.1\nHost: localhost\n\n", 400, id="LF alone"),
        pytest.param(b"GET http://other/livez HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, id="other host"),
        pytest.param(HEAD + b"X: \0\r\nContent-Length: 4\r\n\r\n", 400, id="NUL"),
        pytest.param(b"POST / HTTP/1.1\r\n\r\n", 400, id="no Host"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400, id="two Hosts"),
        pytest.param(b"GET /\r\n\r\n", 400, id="HTTP/0.9"),
        pytest.param(b"GET / HTTP/2.0\r\n\r\n", 505, id="HTTP/2"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01", 400, id="TLS"),
        pytest.param(b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 414, id="long line"),
        pytest.param(
            b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: 1\r\n" * 101 + b"\r\n", 431, id="101 fields"
        ),
        pytest.param(HEAD + b"X: " + b"x" * 70000, 431, id="large head"),
        pytest.param(HEAD + b"Expect: 200-ok\r\nContent-Length: 4\r\n\r\n", 417, id="other expectation"),
    ],
)
def test_what_is_ambiguous_is_refused_and_nothing_after_it_is_believed(
    rig: Rig, request_bytes: bytes, status: int
) -> None:
    connection = rig.client()
    connection.send(request_bytes + SMUGGLED)
    answer = connection.read()
    assert answer.status == status
    assert answer.header(b"content-type") == b"application/json"
    assert answer.header(b"server") == b"anvil-mux"
    assert answer.header(b"connection") == b"close"
    assert code(answer.body)
    assert connection.is_closed()
    assert rig.engine.asked.empty()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"[]", 400),
        (b"nonsense", 400),
        (b'"model"', 400),
        (b'{"model":', 400),
        (b'{"model":1}', 400),
        (b'{"model":"a","model":"b"}', 400),
        (b'{"messages":[]}', 400),
        (b'{"model":"nobody"}', 404),
    ],
)
def test_a_bad_body_is_a_clean_error_and_the_connection_goes_on(rig: Rig, body: bytes, status: int) -> None:
    rig.engine.answer = lambda _: JSON_OK
    connection = rig.client()
    answer = connection.ask(body)
    assert answer.status == status
    assert answer.header(b"connection") is None
    assert connection.ask(ASK_A).status == 200


def test_an_unknown_model_is_told_with_the_known_ones(rig: Rig) -> None:
    answer = rig.client().ask(b'{"model":"nobody"}')
    assert code(answer.body) == "model_not_found"
    assert answer.header(b"x-should-retry") == b"false"
    assert b"Known models: a, org/b" in answer.body
    assert not rig.events.of("loading")


def test_an_empty_line_between_two_requests_is_skipped(rig: Rig) -> None:
    connection = rig.client()
    connection.send(b"\r\n" + SMUGGLED + b"\r\n" + SMUGGLED)
    assert [connection.read().status for _ in range(2)] == [200, 200]


def test_an_empty_line_alone_does_not_begin_a_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that ends its body with a stray CRLF has as long until its next request as any other."""
    monkeypatch.setattr(client, "HEAD_SECONDS", 0.0)
    connection = rig.client()
    connection.send(SMUGGLED + b"\r\n")
    assert connection.read().status == 200
    connection.send(SMUGGLED)
    assert connection.read().status == 200


# Bodies that nobody reads


@pytest.mark.parametrize("path", [b"/nowhere", b"/v1/files", b"/livez"])
def test_the_small_body_of_a_refused_request_is_not_the_next_request(rig: Rig, path: bytes) -> None:
    connection = rig.client()
    answer = connection.ask(SMUGGLED, path=path)
    assert answer.status in (404, 405, 501)
    assert connection.get(b"/v1/models").status == 200
    assert connection.buffer == b""


def test_a_form_that_is_refused_while_it_comes_swallows_no_later_request(rig: Rig) -> None:
    """Else whoever shares a proxy's connection has the next request eaten as the rest of this one."""
    form = b"--XX\r\nContent-Disposition: form-data; name=model\r\n\r\na\r\n--XX?" + b"x" * 40_000
    connection = rig.client()
    connection.send(
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: multipart/form-data; boundary=XX\r\nContent-Length: %d\r\n\r\n%b"
        % (len(form), form)
        + b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500
    )
    answer = connection.read()
    assert answer.status == 400
    assert answer.header(b"connection") == b"close"
    assert connection.is_closed()


def test_a_body_that_comes_too_slowly_closes_the_connection(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anvil_mux.proxy.client.BODY_SECONDS", 0.05)
    connection = rig.client()
    connection.send(HEAD + b"Content-Length: 100\r\n\r\n{")
    answer = connection.read()
    assert answer.status == 408
    assert answer.header(b"connection") == b"close"
    assert connection.is_closed()


def test_a_large_unread_body_closes_the_connection_after_the_answer(rig: Rig) -> None:
    connection = rig.client()
    answer = connection.ask(SMUGGLED * 10000, path=b"/nowhere")
    assert answer.status == 404
    assert answer.header(b"connection") == b"close"
    for _ in range(3):
        connection.send(SMUGGLED)  # a reset would destroy the answer under way
    assert connection.is_closed()


@pytest.mark.parametrize("path", [b"/livez", b"/v1/models", b"/metrics", b"/"])
def test_an_answer_of_our_own_says_that_an_unread_body_ends_the_connection(rig: Rig, path: bytes) -> None:
    connection = rig.client()
    connection.send(b"GET %b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % path)
    answer = connection.read()
    assert (answer.status, answer.header(b"connection")) == (200, b"close")
    assert connection.is_closed()


def test_the_body_of_a_question_that_needs_none_is_read_before_an_engine_is_asked(rig: Rig) -> None:
    connection = rig.client()
    ask = b"GET /props?model=a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    rig.engine.answer = lambda asked: JSON_OK
    connection.send(ask + b"2\r\n{}\r\n0\r\n\r\n" + ask + b"2\n{}")
    assert connection.read().status == 200
    assert connection.read().status == 400
    assert connection.is_closed()


def test_what_a_client_sent_behind_its_last_request_destroys_no_answer(rig: Rig) -> None:
    """A connection that is closed with unread bytes is reset, and its client may lose the answer."""
    connection = rig.client()
    head = b"GET /livez HTTP/1.0\r\nX-Pad: %b\r\n\r\n"
    connection.send(head % (b"x" * (client.READ - len(head) + 2)) + b"GET /livez HTTP/1.0\r\n\r\n")
    assert connection.read().status == 200
    assert connection.is_closed()


def test_a_refused_body_that_has_not_come_is_not_waited_for(rig: Rig) -> None:
    connection = rig.client()
    connection.send(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000\r\n\r\n{")
    answer = connection.read()
    assert (answer.status, answer.header(b"connection")) == (404, b"close")
    assert connection.is_closed()


def test_a_body_has_to_come_at_its_rate_to_the_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came fast at first could else be held for hours."""
    moments = iter([0.0, 10.0, 20.0, 31.0, 50.0, 62.0, 70.0])
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    pace = client._Pace()
    for have in (30 << 20, 30 << 20, 31 << 20, 31 << 20):
        pace.check(have)
    with pytest.raises(BadRequest, match="too slowly"):
        pace.check((31 << 20) + 1000)


# The memory of bodies


def announced(length: int) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % length


def test_a_body_takes_the_memory_that_has_come_and_not_what_is_announced(rig: Rig) -> None:
    connection = rig.client()
    connection.send(announced(60 << 20) + b"{" + b" " * 99_999)
    held = seen(lambda: rig.server.bodies.held, lambda held: held > 60_000)
    assert held <= 300_000
    connection.leave()
    assert seen(lambda: rig.server.bodies.held, lambda held: not held) == 0


@pytest.mark.parametrize("framing", ["length", "chunked", "gzip"])
def test_bodies_beyond_the_memory_for_all_are_refused_for_a_while(
    make_rig: Callable[..., Rig], framing: str
) -> None:
    rig = make_rig(max_bodies=3 << 20)
    waiting = rig.client()
    body = b'{"model":"a","x":"%b"}' % (b"x" * (2 << 20))
    waiting.post(body)
    asked = rig.engine.next()
    further = rig.client()
    if framing == "length":
        further.send(announced(len(body)))
    elif framing == "chunked":
        further.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b" " * (2 << 20)))
    else:
        packed = gzip.compress(body)
        further.send(HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(packed), packed))
    if framing == "length":
        further.socket.sendall(body[: 3 << 19])
    answer = further.read()
    assert (answer.status, code(answer.body)) == (503, "overloaded")
    assert b"max_bodies" in answer.body
    assert answer.header(b"retry-after") == b"5"
    asked.send(JSON_OK)
    assert waiting.read().status == 200
    assert seen(lambda: rig.server.bodies.held, lambda held: not held) == 0
    again = rig.client()
    again.post(body)
    rig.engine.next().send(JSON_OK)
    assert again.read().status == 200


def test_a_body_unpacks_to_no_more_than_its_size_pays_for(rig: Rig) -> None:
    connection = rig.client()
    connection.post(
        gzip.compress(b'{"model":"a","x":"%b"}' % bytes(30 << 20)), extra=b"Content-Encoding: gzip\r\n"
    )
    answer = connection.read()
    assert (answer.status, code(answer.body)) == (413, "request_too_large")


def test_a_keys_requests_count_from_their_heads(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(keys=keys.load(None, {"ANVIL_API_KEYS": "a-key-of-ones-own requests=1"}))
    rig.engine.answer = lambda _: JSON_OK
    shown = b"Authorization: Bearer a-key-of-ones-own\r\n"
    sending, further = rig.client(), rig.client()
    sending.send(HEAD + shown + b"Content-Length: 13\r\nExpect: 100-continue\r\n\r\n")
    assert sending.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"

    def status() -> int:
        return further.ask(ASK_A, extra=shown).status

    assert status() == 429
    sending.send(ASK_A)
    assert sending.read().status == 200
    assert seen(status, lambda status: status == 200) == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_read(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_body=1000)
    connection = rig.client()
    connection.send(HEAD + b"Content-Length: 1001\r\n\r\n")
    answer = connection.read()
    assert (answer.status, code(answer.body)) == (413, "request_too_large")


def test_a_sessions_model_is_what_the_engine_calls_it(rig: Rig) -> None:
    connection = rig.client()
    connection.post(b'{"session":{"model":"org/b"}}', path=b"/v1/realtime/client_secrets")
    asked = rig.other.next()
    assert asked.head.startswith(b"POST /v1/realtime/client_secrets HTTP/1.1\r\n")
    assert asked.body == b'{"session":{"model":"b-inside"}}'
    asked.send(JSON_OK)
    assert connection.read().status == 200


def test_a_model_in_the_path_is_told_to_the_engine_in_the_body(rig: Rig) -> None:
    connection = rig.client()
    path = b"/openai/deployments/org%2Fb/chat/completions?api-version=1"
    for body in (b'{"messages":[]}', b'{"model":"a","messages":[]}', b'{"model":"org/b","messages":[]}'):
        connection.post(body, path=path)
        asked = rig.other.next()
        assert asked.head.startswith(b"POST /v1/chat/completions?api-version=1 HTTP/1.1\r\n")
        assert json.loads(asked.body) == {"model": "b-inside", "messages": []}
        asked.send(JSON_OK)
        assert connection.read().status == 200
    assert connection.ask(b"{}", path=b"/v1/engines/nobody/completions").status == 404


def test_lm_studios_list(rig: Rig) -> None:
    listed = rig.client().json(b"/api/v0/models")["data"]
    assert [(each["id"], each["state"]) for each in listed] == [("a", "not-loaded"), ("org/b", "not-loaded")]


# Bodies in chunks


def test_a_chunked_body_is_understood_and_sent_on_with_a_length(rig: Rig) -> None:
    connection = rig.client()
    connection.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b'5;x=y\r\n{"mod\r\n')
    connection.send(b'8\r\nel":"a"}\r\n0\r\nTrailer: x\r\n\r\n' + SMUGGLED)
    asked = rig.engine.next()
    assert asked.body == ASK_A
    assert b"transfer-encoding" not in asked.head.lower()
    asked.send(JSON_OK)
    assert connection.read().body == b"{}"
    assert connection.read().body == b"ok\n"


@pytest.mark.parametrize(
    "chunks", [b"zz\r\n", b"-1\r\n", b"4\r\n12345678", b"+4\r\n1234\r\n", b"0x4\r\n1234\r\n"]
)
def test_bad_chunks_are_refused(rig: Rig, chunks: bytes) -> None:
    connection = rig.client()
    connection.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + SMUGGLED)
    assert connection.read().status == 400
    assert connection.is_closed()


def test_a_chunked_body_has_a_limit(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_body=1000)
    connection = rig.client()
    connection.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 600) * 2)
    assert connection.read().status == 413
    assert connection.is_closed()


# Expect


def test_continue_is_said_once_the_request_is_acceptable(rig: Rig) -> None:
    connection = rig.client()
    connection.send(HEAD + b"Content-Length: 13\r\nExpect: 100-continue\r\n\r\n")
    assert connection.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.send(ASK_A)
    asked = rig.engine.next()
    assert b"expect" not in asked.head.lower()
    asked.send(JSON_OK)
    assert connection.read().status == 200


@pytest.mark.parametrize(
    ("path", "length", "status"), [(b"/nowhere", 13, 404), (b"/v1/completions", 1 << 40, 413)]
)
def test_continue_is_not_said_to_what_is_refused(rig: Rig, path: bytes, length: int, status: int) -> None:
    connection = rig.client()
    connection.send(
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
        % (path, length)
    )
    answer = connection.read()
    assert answer.status == status
    assert answer.header(b"connection") == b"close"


# Connections


def test_200_simultaneous_connections_are_all_answered(rig: Rig) -> None:
    rig.engine.answer = lambda _: JSON_OK
    connections = []
    for _ in range(200):
        connections.append(rig.client())
        connections[-1].post(ASK_A)
    assert [each.read().status for each in connections] == [200] * 200


def test_pipelined_requests_are_answered_in_order(rig: Rig) -> None:
    connection = rig.client()
    connection.send(
        b"".join(
            b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path for path in (b"/livez", b"/health", b"/x")
        )
    )
    assert [connection.read().body for _ in range(2)] == [b"ok\n", b"OK\n"]
    assert connection.read().status == 404


def test_a_head_may_come_in_pieces(rig: Rig) -> None:
    connection = rig.client()
    for byte in b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n":
        connection.send(bytes([byte]))
    assert connection.read().body == b"ok\n"


def test_half_a_head_is_not_waited_for_long(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "HEAD_SECONDS", 0.05)
    connection = rig.client()
    connection.send(b"GET /livez HTTP/1.1\r\nHost: loc")
    assert connection.read().status == 408
    assert connection.is_closed()


def test_of_too_many_half_heads_the_oldest_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "HEADS", 2)
    connections = [rig.client() for _ in range(3)]
    for connection in connections:
        connection.send(b"GET /livez HTTP/1.1\r\nHost: loc")
        assert rig.client().get(b"/livez").status == 200  # what came before it has been read
    assert connections[0].read().status == 408
    assert connections[0].is_closed()
    for connection in connections[1:]:
        connection.send(b"alhost\r\n\r\n")
        assert connection.read().body == b"ok\n"


@pytest.mark.parametrize("coding", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
def test_half_a_body_is_not_waited_for_long(rig: Rig, monkeypatch: pytest.MonkeyPatch, coding: bytes) -> None:
    monkeypatch.setattr(client, "BODY_SECONDS", 0.05)
    connection = rig.client()
    connection.send(HEAD + coding + b"\r\n\r\n")
    assert connection.read().status == 408
    assert connection.is_closed()


def test_an_idle_connection_is_closed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "IDLE_SECONDS", 0.05)
    connection = rig.client()
    assert connection.is_closed()


def test_http_1_0_is_answered_and_closed_unless_it_asks_otherwise(rig: Rig) -> None:
    connection = rig.client()
    connection.send(b"GET /livez HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert connection.read().header(b"connection") == b"keep-alive"
    connection.send(b"GET /livez HTTP/1.0\r\n\r\n")
    assert connection.read().header(b"connection") == b"close"
    assert connection.is_closed()


def test_connections_over_the_limit_are_told_so(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_connections=1)
    first = rig.client()
    assert first.get(b"/livez").status == 200
    second = rig.client()
    answer = second.read()
    assert (answer.status, code(answer.body)) == (503, "overloaded")
    assert b"overloaded" in answer.body
    assert second.is_closed()
    assert first.get(b"/livez").status == 200


def test_without_free_files_it_does_not_try_on_and_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    starves, tries, looked = threading.Event(), threading.Semaphore(0), threading.Semaphore(0)
    listener, earlier = rig.server.listener, rig.client()
    assert earlier.get(b"/livez").status == 200

    def starved() -> object:
        if starves.is_set():
            tries.release()
            raise OSError(errno.EMFILE, "Too many open files")
        return listener.accept()

    def swept(now: float) -> None:
        looked.release()

    monkeypatch.setattr(server, "STARVED_SECONDS", 60.0)
    starving = SimpleNamespace(accept=starved, fileno=listener.fileno, close=listener.close)
    monkeypatch.setattr(rig.server, "listener", starving)
    monkeypatch.setattr(rig.server, "_sweep", swept)
    starves.set()
    connection = rig.client()
    assert tries.acquire(timeout=GUARD)
    while looked.acquire(blocking=False):
        pass
    assert looked.acquire(timeout=GUARD)
    assert looked.acquire(timeout=GUARD)
    assert not tries.acquire(blocking=False), "the front goes on, and does not try again"
    assert earlier.get(b"/livez").status == 200
    starves.clear()
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60.0)
    monkeypatch.setattr(server, "time", later)
    assert connection.get(b"/livez").status == 200


def test_a_connection_that_ended_makes_room(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(max_connections=1)
    end, gone = rig.server.end, threading.Event()

    def note(connection: client.Client) -> None:
        end(connection)
        gone.set()

    monkeypatch.setattr(rig.server, "end", note)
    first = rig.client()
    assert first.get(b"/livez", extra=b"Connection: close\r\n").status == 200
    assert first.is_closed()
    assert gone.wait(GUARD)
    assert rig.client().get(b"/livez").status == 200


# Threads


def request_threads() -> int:
    return sum(thread.name.startswith("request-") for thread in threading.enumerate())


def test_idle_connections_and_heads_in_the_making_have_no_thread(rig: Rig) -> None:
    silent, asked, begun = ([rig.client() for _ in range(50)] for _ in range(3))
    for connection in asked:
        assert connection.get(b"/livez").status == 200
    for connection in begun:
        connection.send(b"GET /livez HTTP/1.1\r\nHost: loc")
    assert seen(lambda: rig.server.watched, lambda watched: watched == 150) == 150
    for connection in begun:
        connection.send(b"alhost\r\n\r\n")
        assert connection.read().body == b"ok\n"
    for connection in (*silent, *asked):
        assert connection.get(b"/livez").status == 200


def test_a_thread_that_has_served_a_request_serves_others(rig: Rig) -> None:
    before = request_threads()
    for _ in range(50):
        connection = rig.client()
        assert connection.get(b"/livez", extra=b"Connection: close\r\n").status == 200
        assert connection.is_closed()
    assert request_threads() - before < 25


def test_a_thread_that_is_not_needed_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SPARE_SECONDS", 0.0)
    pool, served = server.Threads(), []
    for number in range(3):
        pool.run(lambda number=number: served.append((number, threading.current_thread())))  # type: ignore[misc]
        assert seen(lambda: len(served), lambda count: count > number)  # noqa: B023
    for _, thread in served:
        thread.join(GUARD)
    assert [number for number, _ in served] == [0, 1, 2]


def test_what_is_known_of_a_head_is_not_believed_of_another_one(make_rig: Callable[..., Rig]) -> None:
    """A new connection begins with the last head of one that ended; another key is another head."""
    lines = "key-of-ann name=ann models=a;key-of-bob name=bob models=org/b"
    rig = make_rig(keys=keys.load(None, {"ANVIL_API_KEYS": lines}))
    rig.engine.answer = rig.other.answer = lambda _: JSON_OK
    for name, body, status in (
        ("ann", ASK_A, 200),
        ("bob", ASK_A, 404),
        ("ann", b'{"model":"org/b"}', 404),
        ("ann", ASK_A, 200),
        ("eve", ASK_A, 401),
    ):
        connection = rig.client()
        assert (
            connection.ask(body, extra=b"Authorization: Bearer key-of-%b\r\n" % name.encode()).status
            == status
        ), name
        connection.leave()
        assert seen(lambda: rig.server.clients, lambda left: not left) == set()


# Routes


def test_models_are_listed_from_memory_while_one_loads(rig: Rig) -> None:
    rig.mechanism.gate.clear()
    waiting, connection = rig.client(), rig.client()
    waiting.post(ASK_A)
    rig.events.wait("loading")
    answer = connection.get(b"/v1/models")
    states = {each["id"]: each["status"]["value"] for each in json.loads(answer.body)["data"]}
    assert states == {"a": "loading", "org/b": "unloaded"}
    assert connection.json(b"/models") == json.loads(answer.body)


@pytest.mark.parametrize("path", [b"/v1/models/org/b", b"/v1/models/org%2Fb", b"/v1/models/org%2fb"])
def test_one_model_is_found_under_its_raw_or_encoded_id(rig: Rig, path: bytes) -> None:
    assert rig.client().json(path)["id"] == "org/b"


def test_the_list_of_models_may_end_with_a_slash(rig: Rig) -> None:
    with_slash, without = (rig.client().json(path) for path in (b"/v1/models/", b"/v1/models"))
    assert with_slash == without
    assert [each["id"] for each in without["data"]] == ["a", "org/b"]


def test_an_unknown_model_id_is_a_404(rig: Rig) -> None:
    answer = rig.client().get(b"/v1/models/nobody")
    assert (answer.status, code(answer.body)) == (404, "model_not_found")


def test_healthz_tells_the_whole_state(rig: Rig) -> None:
    rig.engine.answer = lambda _: JSON_OK
    connection = rig.client()
    connection.ask(ASK_A)
    rig.events.wait("released")
    state = connection.json(b"/healthz")
    assert (state["status"], state["version"]) == ("ok", __version__)
    assert state["models"]["a"]["state"] == "ready"
    assert state["models"]["a"]["gpus"] == ["0"]
    assert (state["models"]["a"]["waiting"], state["models"]["a"]["leases"]) == (0, 0)
    assert state["models"]["org/b"]["state"] == "stopped"
    assert state["gpus"]["0"]["resident"] == "a"
    assert state["gpus"]["0"]["draining"] is None
    assert state["resident"] == "a"
    assert state["registry"] == ["a", "org/b"]


def test_healthz_shows_who_uses_a_gpu(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(gpus=(Gpu("0", vram=24, reserve=2),))
    gpu = rig.client().json(b"/healthz")["gpus"]["0"]
    assert (gpu["used"], gpu["total"], gpu["reserve"], gpu["others"]) == (None, 24, 2, [])
    other_process = OtherProcess("0", 41, 5, "python3", "f00")
    sensors = Sensors(0.8749, 61.3)
    rig.handler.local.probes.sight = lambda: {"0": Seen(20, 25, {"a": 11}, (other_process,), sensors)}
    gpu = rig.client().json(b"/healthz")["gpus"]["0"]
    assert (gpu["used"], gpu["total"], gpu["users"]) == (20, 25, {"a": 11})
    assert gpu["sensors"] == {"utilization": 0.87, "celsius": 61, "watts": None}
    assert gpu["others"] == [{"pid": 41, "name": "python3", "bytes": 5, "container": "f00"}]


def test_healthz_shows_what_sleepers_hold_still(make_rig: Callable[..., Rig]) -> None:
    backends = (
        Backend("a", "a", ("0",), evict_to=("sleep", "stop")),
        Backend("b", "org/b", ("0",), served_model="b-inside"),
    )
    rig = make_rig(backends=backends)
    rig.mechanism.evict = lambda backend, how: Evicted(how, {"0": 7})
    rig.engine.answer = rig.other.answer = lambda _: JSON_OK
    connection = rig.client()
    for body in (ASK_A, b'{"model":"org/b"}'):
        connection.ask(body)
    assert connection.json(b"/healthz")["gpus"]["0"]["residuals"] == {"a": 7}


def test_healthz_names_the_memory_to_declare_for_a_model_that_was_measured(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(backends=(Backend("a", "a", ("0",)), Backend("b", "b", ("0",), vram=6 << 30)))
    rig.mechanism.evict = lambda backend, how: Evicted(how, freed={"0": 7 << 30})
    rig.engine.answer = rig.other.answer = lambda _: JSON_OK
    connection = rig.client()
    for body in (ASK_A, b'{"model":"b"}', ASK_A):
        connection.ask(body)
    models = connection.json(b"/healthz")["models"]
    told = [models[name]["backends"][name]["vram_to_declare"] for name in "ab"]
    assert told == ["7GiB", None]


def test_healthz_shows_what_a_model_takes_and_when_an_idle_one_goes(make_rig: Callable[..., Rig]) -> None:
    backends = Backend("a", "a", ("0",), vram=5, ttl=600.0), Backend("b", "b", ("0",), vram=6)
    rig = make_rig(backends=backends, gpus=(Gpu("0", vram=20),))
    rig.engine.answer = rig.other.answer = lambda _: JSON_OK
    connection = rig.client()
    for body in (ASK_A, b'{"model":"b"}'):
        connection.ask(body)
    rig.events.wait("released", count=2)
    models = connection.json(b"/healthz")["models"]
    a, b = models["a"]["backends"]["a"], models["b"]["backends"]["b"]
    assert (a["size"], b["size"]) == (5, 6)
    assert 0 < a["unload_seconds"] <= 600
    assert b["unload_seconds"] is None


def test_healthz_shows_a_drain(rig: Rig) -> None:
    first, second = rig.client(), rig.client()
    first.post(ASK_A)
    asked = rig.engine.next()
    second.post(b'{"model":"org/b"}')
    rig.events.wait("draining")
    gpu = rig.client().json(b"/healthz")["gpus"]["0"]
    draining = gpu["draining"]
    assert (draining["target"], draining["leases"]) == ("org/b", 1)
    assert 0 < draining["seconds_left"] <= 30
    assert gpu["reserved_for"] == ["org/b"]
    models = rig.client().json(b"/healthz")["models"]
    assert models["a"]["draining"]["target"] == "org/b"
    assert models["org/b"]["waiting"] == 1
    assert models["org/b"]["oldest_wait_seconds"] >= 0
    asked.send(JSON_OK)
    rig.other.next().send(JSON_OK)
    assert second.read().status == 200


def test_an_answer_that_a_swap_waits_for_is_named_by_the_id_of_its_request(
    make_rig: Callable[..., Rig],
) -> None:
    film = Backend("a", "a", gpus=("0",), drain_timeout=math.inf)
    rig = make_rig(backends=(film, Backend("b", "org/b", gpus=("0",))))
    first, second = rig.client(), rig.client()
    first.post(ASK_A, extra=b"X-Request-ID: film-7\r\n")
    asked = rig.engine.next()
    second.post(b'{"model":"org/b"}')
    rig.events.wait("draining")
    state = rig.client().json(b"/healthz")
    [answer] = state["models"]["a"]["draining"]["answers"]
    assert (answer["model"], answer["request"]) == ("a", "film-7")
    assert answer["run_seconds"] >= 0
    assert state["models"]["a"]["draining"]["seconds_left"] is None
    assert state["gpus"]["0"]["draining"]["seconds_left"] is None
    why = rig.client().json(b"/why?model=org/b")
    assert [each["request"] for each in why["waits_for"]] == ["film-7"]
    assert why["at_most"] is None
    assert "request film-7 of a has run for" in why["sentence"]
    asked.send(JSON_OK)
    rig.other.next().send(JSON_OK)
    assert second.read().status == 200


def test_above_its_own_max_queue_a_model_is_refused_and_told_so_everywhere(
    make_rig: Callable[..., Rig],
) -> None:
    busy = Backend("a", "a", gpus=("0",), drain_timeout=math.inf)
    rig = make_rig(backends=(busy, Backend("b", "org/b", gpus=("0",), max_queue=1)))
    first, second, third = rig.client(), rig.client(), rig.client()
    first.post(ASK_A)
    asked = rig.engine.next()
    second.post(b'{"model":"org/b"}')
    rig.events.wait("draining")
    answer = third.ask(b'{"model":"org/b"}')
    assert (answer.status, code(answer.body)) == (503, "overloaded")
    assert b"the queue of org/b is full: 1 waiting (its max_queue)" in answer.body
    assert answer.header(b"retry-after") == b"5"
    models = rig.client().json(b"/healthz")["models"]
    assert (models["org/b"]["waiting"], models["org/b"]["max_queue"]) == (1, 1)
    assert "max_queue" not in models["a"]
    why = rig.client().json(b"/why?model=org/b")
    assert (why["verdict"], "(its max_queue)" in why["sentence"]) == ("refused", True)
    asked.send(JSON_OK)
    rig.other.next().send(JSON_OK)
    assert (first.read().status, second.read().status) == (200, 200)


def test_healthz_tells_why_and_for_how_long_a_swap_is_put_off(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(policy="debounce", policy_settings={"quiet": 600.0, "max_hold": 600.0}, max_wait=600.0)
    first, second = rig.client(), rig.client()
    first.post(ASK_A)
    asked = rig.engine.next()
    second.post(b'{"model":"org/b"}')
    rig.events.wait("deferred")
    models = rig.client().json(b"/healthz")["models"]
    assert models["a"]["deferred"] is None
    assert models["org/b"]["deferred"]["cause"] == {"kind": "not_quiet", "seconds": 600.0}
    assert models["org/b"]["deferred"]["reason"] == "its requests still arrive less than 600 s apart"
    assert 0 < models["org/b"]["deferred"]["seconds_left"] <= 600
    second.leave()
    asked.send(JSON_OK)


@dataclass(frozen=True)
class Broken:
    def decide(self, seen: Snapshot) -> Decision:
        if any(line.evicts for line in seen.queues):
            raise ZeroDivisionError
        return SwapTo(seen.queues[0].model) if seen.queues else Stay()


def test_healthz_has_no_number_for_what_is_put_off_without_end(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(policy=f"{__name__}:Broken", max_wait=600.0)
    rig.engine.answer = lambda _: JSON_OK
    first, second = rig.client(), rig.client()
    first.ask(ASK_A)
    second.post(b'{"model":"org/b"}')
    rig.events.wait("deferred")
    deferred = rig.client().json(b"/healthz")["models"]["org/b"]["deferred"]
    assert deferred == {
        "seconds_left": None,
        "cause": {"kind": "policy_failed", "detail": "ZeroDivisionError()"},
        "reason": "the policy failed: ZeroDivisionError()",
    }
    second.leave()


def test_healthz_has_the_last_lines_of_an_engine_that_failed(rig: Rig) -> None:
    rig.mechanism.failure = LoadError("exited with code 1", log=("no such file", "bye"))
    connection = rig.client()
    assert connection.ask(ASK_A).status == 503
    model = connection.json(b"/healthz")["models"]["a"]
    backend = model["backends"]["a"]
    assert model["last_error"] == backend["error"] == "exited with code 1"
    assert backend["log"] == ["no such file", "bye"]
    assert (backend["state"], 0 < backend["retry_seconds"] <= 5) == ("stopped", True)


def test_healthz_tells_how_a_standby_backend_rests(rig: Rig) -> None:
    rig.mechanism.evict = lambda backend, how: Evicted("sleep")
    rig.engine.answer = rig.other.answer = lambda _: JSON_OK
    connection = rig.client()
    for body in (ASK_A, b'{"model":"org/b"}'):
        connection.ask(body)
    rig.events.wait("released", 2)
    models = connection.json(b"/healthz")["models"]
    assert [models[m]["backends"][b]["standby_level"] for m, b in (("a", "a"), ("org/b", "b"))] == [
        "sleep",
        None,
    ]
    assert models["org/b"]["backends"]["b"]["idle_seconds"] >= 0
    assert models["a"]["backends"]["a"]["idle_seconds"] is None


def test_readyz_lists_its_checks_when_asked(rig: Rig) -> None:
    connection = rig.client()
    assert connection.get(b"/readyz").body == b"ok\n"
    assert (
        connection.get(b"/readyz?verbose").body
        == b"[+]docker ok\n[+]threads ok\n[+]accepting ok\n[+]adoption ok\nok\n"
    )


def test_readyz_fails_when_a_check_does(rig: Rig) -> None:
    rig.handler.local.probes.checks = {"docker": lambda: "cannot be reached"}
    connection = rig.client()
    answer = connection.get(b"/readyz")
    assert answer.status == 503
    assert b"[-]docker cannot be reached\n" in answer.body
    assert connection.get(b"/healthz").status == 503
    assert connection.get(b"/livez").status == 200


def test_metrics_and_the_front_page_are_text(rig: Rig) -> None:
    connection = rig.client()
    assert connection.get(b"/metrics").body == b"anvil_up 1\n"
    assert b"org/b  stopped" in connection.get(b"/").body


@pytest.mark.parametrize("path", [b"/", b"/healthz", b"/v1/models"])
def test_head_has_the_length_and_no_body(rig: Rig, path: bytes) -> None:
    connection = rig.client()
    answer = connection.get(path, b"HEAD")
    assert answer.status == 200
    assert int(answer.header(b"content-length") or 0) > 0
    assert connection.get(b"/livez").body == b"ok\n"


def test_options_names_the_methods(rig: Rig) -> None:
    connection = rig.client()
    answer = connection.get(b"/v1/chat/completions", b"OPTIONS")
    assert (answer.status, answer.header(b"allow")) == (204, b"POST, OPTIONS")
    assert connection.get(b"/v1/models", b"OPTIONS").header(b"allow") == b"GET, HEAD, OPTIONS"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        (b"GET", b"/v1/chat/completions", 405),
        (b"POST", b"/v1/models", 405),
        (b"GET", b"/models/load", 405),
        (b"POST", b"/v1/files", 501),
        (b"POST", b"/sleep", 404),
        (b"POST", b"/v1/../sleep", 404),
        (b"POST", b"/v1//chat/completions", 404),
        (b"POST", b"/v1/chat/completions%2f..%2fsleep", 404),
        (b"GET", b"/nowhere", 404),
    ],
)
def test_what_is_not_offered_is_refused_in_json(rig: Rig, method: bytes, path: bytes, status: int) -> None:
    answer = rig.client().get(path, method)
    assert answer.status == status
    assert json.loads(answer.body)["error"]["message"]
    assert rig.engine.asked.empty()


def test_errors_have_the_shape_of_the_api(rig: Rig) -> None:
    answer = rig.client().ask(b'{"model":"nobody"}', path=b"/v1/messages")
    assert json.loads(answer.body)["error"]["type"] == "not_found_error"
    assert answer.header(b"request-id") == answer.header(b"x-request-id")


def test_a_load_by_hand_that_names_nobody_is_refused(rig: Rig) -> None:
    connection = rig.client()
    assert connection.ask(b'{"model":"nobody"}', path=b"/models/load").status == 404
    assert connection.ask(b"{}", path=b"/models/load").status == 400


# Other web sites


@pytest.mark.parametrize(
    "host", [b"evil.example", b"127.evil.example", b"localhost.evil.example", b"192.168.1.4:80"]
)
def test_another_host_is_refused_on_loopback(rig: Rig, host: bytes) -> None:
    connection = rig.client()
    connection.send(b"GET /v1/models HTTP/1.1\r\nHost: %b\r\n\r\n" % host)
    assert connection.read().status == 403


@pytest.mark.parametrize(
    "host", [b"localhost:9292", b"127.0.0.1", b"127.1.2.3:80", b"[::1]:9292", b"mux.localhost"]
)
def test_this_machines_names_are_accepted_on_loopback(rig: Rig, host: bytes) -> None:
    connection = rig.client()
    connection.send(b"GET /v1/models HTTP/1.1\r\nHost: %b\r\n\r\n" % host)
    assert connection.read().status == 200


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/models/unload"])
def test_another_sites_page_cannot_post(rig: Rig, path: bytes) -> None:
    connection = rig.client()
    for _ in range(3):
        assert connection.ask(ASK_A, path=path, extra=b"Origin: http://evil.example\r\n").status == 403
    assert not rig.events.of("queued")


def test_a_form_of_text_is_no_json(rig: Rig) -> None:
    connection = rig.client()
    connection.send(
        b"POST /models/unload HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
        b"Content-Length: 13\r\n\r\n" + ASK_A
    )
    assert connection.read().status == 415


# The end


def test_a_drain_finishes_what_runs_and_refuses_what_waits(rig: Rig) -> None:
    running, waiting, idle = rig.client(), rig.client(), rig.client()
    assert idle.get(b"/livez").status == 200
    running.post(b'{"model":"a","stream":true}')
    asked = rig.engine.next()
    asked.send(SSE_HEAD, chunk(b"data: 1\n\n"))
    running.read_until(b"data: 1\n\n\r\n")
    waiting.post(b'{"model":"org/b"}')
    rig.events.wait("queued", 2)
    ended: list[bool] = []
    drain = threading.Thread(target=lambda: ended.append(rig.server.drain(20.0)))
    drain.start()
    answer = waiting.read()
    assert (answer.status, code(answer.body)) == (503, "shutting_down")
    assert answer.header(b"retry-after") == b"10"
    assert idle.is_closed()
    assert drain.is_alive()
    asked.send(chunk(b"data: 2\n\n"), b"0\r\n\r\n")
    assert running.read_chunks() == (b"data: 2\n\n", True)
    assert running.is_closed()
    drain.join()
    assert ended == [True]
    with pytest.raises(ConnectionRefusedError):
        RawClient(rig.address)


def test_whoever_comes_during_a_drain_is_told_so(rig: Rig) -> None:
    running, asked = rig.asked(ASK_A)
    drain = threading.Thread(target=rig.server.drain, args=(60.0,))
    drain.start()
    assert seen(lambda: rig.client().get(b"/readyz").status, lambda status: status == 503) == 503
    readiness, probe, health, late = rig.client(), rig.client(), rig.client(), rig.client()
    assert b"[-]accepting shutting down" in readiness.get(b"/readyz").body
    assert probe.get(b"/livez").status == 200
    assert health.json(b"/healthz")["problems"] == {"accepting": "shutting down"}
    answer = late.ask(ASK_A)
    assert (answer.status, code(answer.body)) == (503, "shutting_down")
    assert answer.header(b"retry-after") == b"10"
    assert all(each.is_closed() for each in (readiness, probe, health, late))
    assert drain.is_alive()
    asked.send(JSON_OK)
    assert running.read().status == 200
    drain.join()


def test_those_who_come_during_a_drain_do_not_prolong_it(rig: Rig) -> None:
    running, asked = rig.asked(ASK_A)
    drain = threading.Thread(target=rig.server.drain, args=(3600.0,))
    drain.start()
    assert seen(lambda: rig.client().get(b"/readyz").status, lambda status: status == 503) == 503
    slow = rig.client()
    slow.send(HEAD + b"Content-Length: 100\r\n\r\n{")
    asked.send(JSON_OK)
    assert running.read().status == 200
    drain.join(60.0)
    assert not drain.is_alive()


def test_an_acceptor_that_accepts_nobody_hangs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, admit = threading.Event(), rig.server.admit

    def stuck(request: socket.socket, address: str) -> None:
        gate.wait(GUARD)
        admit(request, address)

    monkeypatch.setattr(server, "PULSE_SECONDS", 1.5)
    monkeypatch.setattr(rig.server, "admit", stuck)
    assert not rig.server.hangs
    connection = rig.client()
    assert seen(lambda: rig.server.hangs, bool)
    gate.set()
    assert connection.get(b"/livez").status == 200
    assert seen(lambda: rig.server.hangs, lambda hangs: not hangs) is False


def test_a_mistake_with_one_connection_ends_that_one_and_is_told(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, wrong = client.Client.receive, []

    def mistaken(self: client.Client) -> bool:
        if not wrong:
            wrong.append(self)
            raise RuntimeError("a mistake")
        return receive(self)

    monkeypatch.setattr(client.Client, "receive", mistaken)
    monkeypatch.setattr(
        server, "safely", lambda thread, do, default: do()
    )  # a turn that succeeds says it is over
    one, other = rig.client(), rig.client()
    one.send(SMUGGLED)
    told = seen(lambda: clock.mistakes().get("acceptor"), lambda told: told is not None)
    assert told == "RuntimeError: a mistake"
    assert other.get(b"/livez").status == 200
    try:
        assert one.is_closed()
    except ConnectionResetError:
        pass
    assert seen(lambda: len(rig.server.clients), lambda count: count == 1) == 1


def test_a_mistake_in_accepting_pauses_that_for_a_moment(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SWEEP_SECONDS", 0.02)
    admit, wrong = rig.server.admit, []

    def mistaken(request: socket.socket, address: str) -> None:
        if not wrong:
            wrong.append(address)
            request.close()
            raise RuntimeError("a mistake")
        admit(request, address)

    monkeypatch.setattr(rig.server, "admit", mistaken)
    try:
        assert rig.client().is_closed()
    except ConnectionResetError:
        pass
    assert rig.client().get(b"/livez").status == 200


def test_who_has_stopped_accepting_does_not_hang(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rig.server.drain(0.0)
    monkeypatch.setattr(server, "PULSE_SECONDS", -1.0)
    assert not rig.server.hangs


def test_a_drain_has_an_end(rig: Rig) -> None:
    connection = rig.client()
    connection.post(ASK_A)
    rig.engine.next()
    assert rig.server.drain(0.0) is False


def test_a_client_that_leaves_within_its_request_does_no_harm(rig: Rig) -> None:
    for cut in (b"GET /li", HEAD + b"Content-Length: 100\r\n\r\n{"):
        connection = rig.client()
        connection.send(cut)
        connection.socket.shutdown(socket.SHUT_WR)
        connection.rest()
    assert rig.client().get(b"/livez").status == 200


def test_requests_are_numbered_and_harmless_ids_are_kept(rig: Rig) -> None:
    connection = rig.client()
    first, second = connection.get(b"/livez"), connection.get(b"/livez")
    assert first.header(b"x-request-id") != second.header(b"x-request-id")
    assert connection.get(b"/livez", extra=b"X-Request-ID: mine.1\r\n").header(b"x-request-id") == b"mine.1"
    assert connection.get(b"/livez", extra=b"X-Request-ID: a b\r\n").header(b"x-request-id") != b"a b"


def test_who_is_stopped_before_it_began_to_accept_begins_no_more(rig: Rig) -> None:
    never = server.Server(server.listen("127.0.0.1", 0), rig.handler, rig.mux)
    never.shutdown()
    never.close()
    never.serve_forever()


def test_500_clients_that_drip_do_not_hold_up_another(rig: Rig) -> None:
    rig.engine.answer = lambda _: JSON_OK
    slow = [rig.client() for _ in range(500)]
    for number, connection in enumerate(slow):
        connection.send(
            b"GET /livez HTTP/1.1\r\nHost: loc" if number % 2 else HEAD + b"Content-Length: 99\r\n\r\n{"
        )
    connection = rig.client()
    assert connection.ask(ASK_A).status == 200
    assert connection.get(b"/livez").status == 200
    slow[1].send(b"alhost\r\n\r\n")
    assert slow[1].read().body == b"ok\n"


def test_a_form_without_files_reaches_the_engine_with_its_own_name_for_the_model(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(backends=(Backend("a", "a", gpus=("0",), served_model="inside & out"),))
    rig.engine.answer = None
    client = rig.client()
    body = b"language=en&model=a&prompt=x%20y"
    head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
    kind = b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: %d\r\n\r\n" % len(body)
    client.send(head + kind + body)
    asked = rig.engine.next()
    assert asked.body == b"language=en&model=inside%20%26%20out&prompt=x%20y"
    asked.send(JSON_OK)
    assert client.read().status == 200


def test_an_engine_is_asked_for_answers_that_can_be_read(rig: Rig) -> None:
    client, asked = rig.asked(ASK_A, extra=b"Accept-Encoding: gzip, br\r\n")
    assert asked.head.lower().count(b"accept-encoding: identity\r\n") == 1
    assert b"gzip" not in asked.head
    asked.send(JSON_OK)
    assert client.read().status == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/logs?model=a&lines=%C2%B2", f"/logs?model=a&lines={'1' * 4500}", "/logs?model=a&lines=-1"),
        *("/why?model=a&tokens=%C2%B2", f"/why?model=a&tokens={'1' * 5000}", "/why?model=a&tokens=%D9%A3"),
    ],
)
def test_what_is_no_number_in_a_query_is_a_bad_request(rig: Rig, path: str) -> None:
    assert rig.client().get(path.encode()).status == 400


def test_json_is_no_form(rig: Rig) -> None:
    client = rig.client()
    head = b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\n"
    client.send(head + b"Content-Type: application/x-www-form-urlencoded\r\n\r\n" + ASK_A)
    assert client.read().status == 415


def test_the_end_of_a_thread_is_a_problem_that_healthz_and_readyz_tell(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(clock._mistakes, "scheduler", "ended: OverflowError")
    client = rig.client()
    health = client.get(b"/healthz")
    assert (health.status, json.loads(health.body)["problems"]) == (
        503,
        {"threads": "scheduler: ended: OverflowError"},
    )
    assert client.get(b"/readyz").status == 503
