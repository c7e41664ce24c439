"""What a client sees that waits for its model."""

import json
from collections.abc import Callable

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.errors import LoadError
from anvil_mux.proxy.dispatch import Patience
from tests.fake_engine import (
    ASK_A,
    ASK_B,
    DONE,
    END,
    JSON_OK,
    SSE_HEAD,
    STREAM_A,
    RawClient,
    Rig,
    answer_of,
    chunk,
    error_in,
)

Loading = Callable[..., tuple[Rig, RawClient]]


@pytest.fixture
def loading(make_rig: Callable[..., Rig]) -> Loading:
    """A rig whose model loads until its gate opens, and a client; how long either waits is given."""

    def make(failure: LoadError | None = None, **patience: float) -> tuple[Rig, RawClient]:
        rig = make_rig(patience=Patience(**patience))
        rig.mechanism.gate.clear()
        rig.mechanism.failure = failure
        return rig, rig.client()

    return make


def told_after_beats(rig: Rig, client: RawClient) -> bytes:
    """What follows the beats of a stream that waits for its model, once that is there."""
    client.post(STREAM_A)
    client.read_until(b"loading a\n")
    rig.mechanism.gate.set()
    return client.rest()


EAGER = {"grace": 0.0, "comment_every": 0.0, "chunk_every": 0.0}
COMMENTS = {"grace": 0.0, "comment_every": 0.0, "chunk_every": 1e9}


def test_a_waiting_stream_is_kept_alive_and_then_continued(loading):
    rig, client = loading(**COMMENTS)
    client.post(STREAM_A)
    head = client.read_until(b"\r\n\r\n")
    assert b" 200 " in head
    assert b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n" in head
    for _ in range(2):
        client.read_until(chunk(b": anvil-mux loading a\n"))
    rig.mechanism.gate.set()
    rig.engine.next().send(SSE_HEAD, chunk(b"data: 1\n\n"), END)
    content, clean = client.read_chunks()
    assert clean
    assert content.replace(b": anvil-mux loading a\n", b"") == b"data: 1\n\n" + DONE
    rig.answers(client)


def test_who_waits_for_a_swap_that_has_not_begun_is_told_so(make_rig):
    rig = make_rig(patience=Patience(**COMMENTS), drain_timeout=1e6)
    _, asked = rig.asked(ASK_A)
    rig.mechanism.gate.clear()
    second = rig.client()
    second.post(b'{"model":"org/b","stream":true}')
    second.read_until(b"\n: anvil-mux waiting to load org/b")
    asked.send(JSON_OK)
    second.read_until(b"\n: anvil-mux loading org/b\n")


def test_a_minimal_chunk_comes_with_some_beats(loading):
    _, client = loading(**EAGER)
    client.post(STREAM_A)
    line = client.read_until(b"}\n\n").splitlines()[-2]
    event = json.loads(line.removeprefix(b"data: "))
    assert event["object"] == "chat.completion.chunk"
    assert event["choices"][0]["delta"] == {}


def test_the_minimal_chunk_is_not_put_off_until_the_next_comment(loading):
    _, client = loading(grace=0.0, comment_every=1e9, chunk_every=0.1)
    client.post(STREAM_A)
    client.read_until(b"loading a\n")
    client.read_until(b"chat.completion.chunk")


def test_nothing_is_sent_before_the_grace_is_over(loading):
    rig, client = loading(LoadError("no"), grace=1e9)
    client.post(STREAM_A)
    rig.events.wait("queued")
    rig.mechanism.gate.set()
    assert client.read().status == 503


def test_a_load_that_fails_after_beats_is_an_error_event(loading):
    rest = told_after_beats(*loading(LoadError("a exited with code 1."), **EAGER))
    assert error_in(rest)["code"] == "load_failed"
    assert not rest.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        pytest.param(
            b'{"error":{"code":400,"message":"too long!","type":"exceed_context_size_error","n_ctx":8}}',
            {"message": "too long!", "type": "exceed_context_size_error", "code": 400},
            id="llama.cpp",
        ),
        pytest.param(
            b'{"object":"error","message":"too long!","type":"BadRequestError","param":null,"code":400}',
            {"message": "too long!", "type": "BadRequestError", "code": 400},
            id="vLLM",
        ),
        pytest.param(
            b'{"error":{"message":"%b"}}' % (b"x" * 5000),
            {"message": "x" * 2000, "type": "invalid_request_error", "code": "refused_by_engine"},
            id="bounded",
        ),
        pytest.param(b"too long!", None, id="no JSON"),
    ],
)
def test_an_engines_refusal_after_beats_is_told_in_its_own_words(loading, body, told):
    rig, client = loading(**EAGER)
    rig.engine.answer = lambda _: b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    error = error_in(told_after_beats(rig, client))
    if told is None:
        assert "400: too long!" in error["message"]
    else:
        assert error == {"param": None, **told}
        assert rig.events.record().code == "refused_by_engine"


def test_a_refusal_that_comes_behind_its_head_is_told_in_its_own_words_too(loading):
    rig, client = loading(**EAGER)
    client.post(STREAM_A)
    client.read_until(b"loading a\n")
    rig.mechanism.gate.set()
    asked = rig.engine.next()
    asked.send(b"HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\n", chunk(b'{"error":'))
    asked.send(chunk(b'{"message":"too long!","code":"too_long"}}'), b"0\r\n\r\n")
    assert error_in(client.rest())["code"] == "too_long"


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/images/generations"])
def test_a_whole_answer_after_beats_is_the_one_event_of_the_stream(loading, path):
    rig, client = loading(**COMMENTS)
    client.post(STREAM_A, path=path)
    client.read_until(chunk(b": anvil-mux loading a\n"))
    rig.mechanism.gate.set()
    whole = b'{"usage":{"completion_tokens":3},"choices":[{"index":0,"message":{"content":"whole"}}]}'
    rig.engine.next().send(answer_of(whole))
    content, clean = client.read_chunks()
    content = content.replace(b": anvil-mux loading a\n", b"")
    assert clean
    if b"chat" in path:
        assert b'"delta":{"content":"whole"}' in content
        assert content.endswith(b"\n\n" + DONE)
    else:
        assert content == b"data: %b\n\n" % whole
    record = rig.events.record()
    assert (record.status, record.code, record.tokens) == (200, "", 3)


def test_a_whole_message_after_beats_is_streamed_as_its_events(loading):
    rig, client = loading(**COMMENTS)
    client.post(STREAM_A, path=b"/v1/messages")
    client.read_until(chunk(b": anvil-mux loading a\n"))
    rig.mechanism.gate.set()
    content = b'[{"type":"text","text":"hi"},{"type":"tool_use","id":"t","name":"f","input":{"x":1}}]'
    usage = b'{"input_tokens":7,"output_tokens":3}'
    rig.engine.next().send(
        answer_of(
            b'{"id":"m","type":"message","role":"assistant","content":%b,"stop_reason":"end_turn","usage":%b}'
            % (content, usage)
        )
    )
    stream, clean = client.read_chunks()
    lines = [line for line in stream.split(b"\n") if line.startswith(b"data: ")]
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert clean
    assert [event["type"] for event in events if event["type"] != "ping"] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    deltas = [event["delta"] for event in events if "delta" in event]
    assert deltas[0] == {"type": "text_delta", "text": "hi"}
    assert json.loads(deltas[1]["partial_json"]) == {"x": 1}
    assert deltas[2]["stop_reason"] == "end_turn"
    record = rig.events.record()
    assert (record.status, record.code, record.prompt_tokens, record.tokens) == (200, "", 7, 3)


def test_beats_to_a_client_of_http_1_0_are_not_chunked(loading):
    rig, client = loading(grace=0.0, comment_every=1e9, chunk_every=1e9)
    client.send(
        b"POST /v1/chat/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: %d\r\n\r\n%b"
        % (len(STREAM_A), STREAM_A)
    )
    client.read_until(b"\r\n\r\n: anvil-mux loading a\n")
    rig.mechanism.gate.set()
    rig.engine.next().send(SSE_HEAD, chunk(b"data: 1\n\n"), END)
    assert client.rest() == b"data: 1\n\n" + DONE


def test_a_request_without_a_stream_is_answered_before_its_client_gives_up(loading):
    rig, client = loading(silence=0.0)
    answer = client.ask(ASK_A)
    assert (answer.status, answer.code, answer.header(b"retry-after")) == (503, "model_loading", b"10")
    assert rig.events.record().waited > 0


def test_a_client_is_told_to_come_again_when_the_load_should_be_over(loading):
    rig, client = loading(silence=0.0)
    rig.mux.overview.eta = {"a": 42.0, "org/b": 600.0}.get
    for body, seconds in ((ASK_A, b"42"), (ASK_B, b"60")):
        assert client.ask(body).header(b"retry-after") == seconds


def test_who_waits_for_a_fallback_too_is_answered_before_its_client_gives_up(make_rig):
    first = Backend("a", "a", ("0",), fallback=("org/b",), fallback_after=0.5)
    patience = Patience(margin=0.0, silence=0.75)
    rig = make_rig(patience=patience, backends=(first, Backend("b", "org/b", ("0",))))
    rig.mechanism.gate.clear()
    assert rig.ask(ASK_A).error["message"].startswith("org/b is still loading.")
    assert rig.events.record().waited < 1.25


@pytest.mark.parametrize("field", [b"x-stainless-read-timeout", b"x-stainless-timeout"])
def test_the_clients_own_limit_is_respected(loading, field):
    _, client = loading()
    assert client.ask(ASK_A, extra=field + b": 0.01\r\n").status == 503
