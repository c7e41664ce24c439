"""What a client sees that waits for its model."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from anvil_mux.errors import LoadError
from anvil_mux.proxy.dispatch import Patience
from tests.fake_engine import ASK_A, JSON_OK, SSE_HEAD, STREAM_A, Rig, chunk, error_in

EAGER_BEATS = Patience(grace=0.0, comment_every=0.0, chunk_every=0.0)


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
