"""Routes, error shapes, beats and model lists of each API."""

import json
import re

import httpx2
import openai
import pytest

from anvil_mux.errors import (
    BadRequest,
    LoadError,
    MuxError,
    NotFound,
    Overloaded,
    RefusedByEngine,
    TooLarge,
    UnknownModel,
)
from anvil_mux.protocol import api


@pytest.mark.parametrize(
    ("method", "path", "engine_path", "family", "where", "beat", "streams"),
    [
        ("POST", "/v1/chat/completions", "/v1/chat/completions", "openai", "json", "chat", True),
        ("POST", "/chat/completions", "/v1/chat/completions", "openai", "json", "chat", True),
        ("POST", "/v/chat/completions", "/v1/chat/completions", "openai", "json", "chat", True),
        ("POST", "/completions", "/v1/completions", "openai", "json", "completion", True),
        ("POST", "/completion", "/completion", "llamacpp", "json", "none", True),
        ("POST", "/v1/responses", "/v1/responses", "openai", "json", "responses", True),
        ("POST", "/v1/messages", "/v1/messages", "anthropic", "json", "messages", True),
        (
            "POST",
            "/v1/messages/count_tokens",
            "/v1/messages/count_tokens",
            "anthropic",
            "json",
            "none",
            False,
        ),
        ("POST", "/embeddings", "/v1/embeddings", "openai", "json", "none", False),
        ("POST", "/v1/audio/speech", "/v1/audio/speech", "openai", "json", "none", False),
        ("POST", "/audio/transcriptions", "/v1/audio/transcriptions", "openai", "multipart", "none", True),
        ("POST", "/v1/images/edits", "/v1/images/edits", "openai", "multipart", "none", True),
        ("POST", "/rerank", "/rerank", "openai", "json", "none", False),
        ("POST", "/v2/rerank", "/v2/rerank", "openai", "json", "none", False),
        ("POST", "/v1/score", "/v1/score", "openai", "json", "none", False),
        ("POST", "/tokenize", "/tokenize", "llamacpp", "json", "none", False),
        ("GET", "/props", "/props", "llamacpp", "query", "none", False),
    ],
)
def test_a_route_says_where_the_model_is_and_what_the_engine_is_asked(
    method, path, engine_path, family, where, beat, streams
):
    translated = {"anthropic": "missing", "ollama": "always"}.get(family, "")
    assert api.match(method, path) == api.Route(family, where, beat, streams, engine_path, translated)


@pytest.mark.parametrize(
    "path",
    [
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/collective_rpc",
        "/invocations",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/flush_cache",
        "/release_memory_occupation",
        "/slots/0",
        "/v1/model/load",
        "/models/load",
        "/v1/chat/completions/",
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/v1/./chat/completions",
        "/v1/x/../chat/completions",
        "/v1/chat%2Fcompletions",
        "/v1/chat/%63ompletions",
        "/V1/chat/completions",
        "/v1/chat/completions;x",
        "/v1/chat/completions/../../../sleep",
        "*",
        "",
    ],
)
def test_nothing_else_is_forwarded(path):
    for method in ("GET", "POST", "PUT", "DELETE"):
        assert api.match(method, path) is None
        error, headers = api.no_route(method, path)
        assert (error.status, headers) == (404, [])


@pytest.mark.parametrize(
    ("path", "engine_path", "model"),
    [
        ("/openai/deployments/a/chat/completions", "/v1/chat/completions", "a"),
        ("/openai/deployments/org%2Fb/embeddings", "/v1/embeddings", "org/b"),
        ("/v1/engines/a/completions", "/v1/completions", "a"),
    ],
)
def test_a_model_may_stand_in_the_path(path, engine_path, model):
    route = api.match("POST", path)
    assert (route.path, route.model_in, api.model_in_path(path)) == (engine_path, "path", model)
    assert api.match("GET", path) is None


@pytest.mark.parametrize(
    "path",
    [
        "/openai/deployments/a/b/chat/completions",
        "/openai/deployments//chat/completions",
        "/openai/deployments/a/../sleep",
        "/openai/deployments/a/sleep",
        "/openai/v1/../sleep",
        "/openai/v1/sleep",
        "/openai/v1//v1/chat/completions",
        "/api/v0/../chat",
    ],
)
def test_no_other_path_has_a_model_or_a_prefix(path):
    assert api.match("POST", path) is None


def test_foreign_prefixes_lead_to_the_same_routes():
    assert api.match("POST", "/openai/v1/responses") == api.match("POST", "/v1/responses")
    assert api.match("POST", "/api/v0/completions") == api.match("POST", "/v1/completions")


@pytest.mark.parametrize("path", ["/openai/deployments/%FF/embeddings", "/v1/engines/%ED%A0%80/completions"])
def test_a_model_in_a_path_is_utf_8(path):
    with pytest.raises(BadRequest):
        api.model_in_path(path)


def test_control_routes_do_not_take_a_method_of_a_shown_one():
    for path in ("/props", "/slots", "/lora-adapters"):
        assert api.match("POST", path) is None


def test_a_wrong_method_is_told_the_right_ones():
    error, headers = api.no_route("DELETE", "/v1/chat/completions")
    assert (error.status, headers) == (405, [(b"Allow", b"POST")])


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files",
        "/v1/files/x",
        "/files",
        "/v1/batches",
        "/v1/fine_tuning/jobs",
        "/v1/assistants",
        "/v1/threads/a",
        "/v1/vector_stores",
        "/v1/videos",
        "/conversations/conv_1",
        "/v1/chat/completions/chatcmpl-1",
        "/v1/messages/batches",
        "/v1/messages/batches/x",
        "/api/pull",
    ],
)
def test_families_that_store_things_are_refused(path):
    error, _ = api.no_route("POST", path)
    assert (error.status, error.retry) == (501, False)


def test_whose_errors_a_path_gets():
    assert api.api_of("/v1/messages") == api.api_of("/v1/messages/batches") == "anthropic"
    assert api.api_of("/api/chat") == "ollama"
    assert api.api_of("/v1/nothing") == api.api_of("/api/v0/models") == "openai"


def test_errors_have_the_shape_of_their_api():
    error = UnknownModel("x", ["b", "a"])
    message = "The model `x` does not exist. Known models: a, b."
    plain = {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }
    assert json.loads(api.error_body("openai", error, "r")) == plain
    assert json.loads(api.error_body("llamacpp", error, "r")) == plain
    assert json.loads(api.error_body("anthropic", error, "r")) == {
        "type": "error",
        "error": {"type": "not_found_error", "message": message, "code": "model_not_found"},
        "request_id": "r",
    }
    assert json.loads(api.error_body("ollama", error, "r")) == {"error": message}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("x"), "invalid_request_error"),
        (BadRequest("x", status=405), "invalid_request_error"),
        (TooLarge("x"), "request_too_large"),
        (Overloaded("x"), "overloaded_error"),
        (MuxError("x"), "api_error"),
    ],
)
def test_anthropic_has_its_own_kinds(error, kind):
    assert json.loads(api.error_body("anthropic", error, ""))["error"]["type"] == kind


def test_error_headers_say_when_to_come_again():
    assert api.error_headers(Overloaded("x", retry_after=2.2)) == [(b"Retry-After", b"3")]
    assert api.error_headers(NotFound("x")) == [(b"x-should-retry", b"false")]
    assert api.error_headers(LoadError("x", retry_after=5.0)) == [
        (b"Retry-After", b"5"),
        (b"x-should-retry", b"false"),
    ]
    assert api.error_headers(MuxError("x")) == []


def test_an_error_in_a_stream_is_framed():
    error = LoadError("it fell\nover")
    said = api.error_body("openai", error, "")
    assert api.error_event("openai", "chat", error) == b"data: " + said + b"\n\n"
    assert api.error_event("ollama", "none", error) == api.error_body("ollama", error, "") + b"\n"
    event = api.error_event("anthropic", "messages", error, "r")
    assert event == b"event: error\ndata: " + api.error_body("anthropic", error, "r") + b"\n\n"
    lines = api.error_event("openai", "responses", error).split(b"\n")
    assert lines[0] == b"event: error"
    assert json.loads(lines[1][6:])["type"] == "error"


def test_a_comment_is_one_line_without_a_blank_one():
    assert (
        api.comment("anvil-mux loading a 42%\r\n\r\ndata: x\0é")
        == ": anvil-mux loading a 42% data: x\0é\n".encode()
    )


def test_beats_add_nothing():
    chat = api.beat("chat", "m", "r", 7)
    assert re.fullmatch(rb"data: [^\n]+\n\n", chat)
    assert json.loads(chat[6:]) == {
        "id": "chatcmpl-r",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": "m",
        "choices": [{"index": 0, "delta": {}, "finish_reason": None}],
    }
    assert json.loads(api.beat("completion", "m", "r", 7)[6:])["choices"][0]["text"] == ""
    assert api.beat("messages", "m", "r", 7) == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert api.beat("responses", "m", "r", 7) == api.beat("none", "m", "r", 7) == b""


def _streamed(sent: bytes) -> openai.OpenAI:
    def answer(asked: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=sent)

    transport = httpx2.MockTransport(answer)
    return openai.OpenAI(api_key="x", base_url="http://x/v1", http_client=httpx2.Client(transport=transport))


ENGINE = (
    b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":'
    b'[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
)


def test_the_openai_client_takes_comments_and_beats():
    sent = api.comment("loading m") + api.beat("chat", "m", "r", 1) + api.comment("loading m") + ENGINE
    with _streamed(sent) as client:
        chunks = client.chat.completions.create(model="m", messages=[], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hi"


def test_the_openai_client_raises_on_an_error_in_a_stream():
    sent = api.comment("loading m") + api.error_event("openai", "chat", LoadError("it fell over"))
    with _streamed(sent) as client:
        chunks = client.chat.completions.create(model="m", messages=[], stream=True)
        with pytest.raises(openai.APIError, match="it fell over") as caught:
            list(chunks)
    assert caught.value.code == "load_failed"


def test_the_openai_client_raises_on_an_error_in_a_responses_stream():
    sent = api.comment("loading m") + api.error_event("openai", "responses", LoadError("it fell over"))
    with _streamed(sent) as client:
        events = client.responses.create(model="m", input="x", stream=True)
        with pytest.raises(openai.APIError, match="it fell over"):
            list(events)


def test_one_list_of_models_for_all_clients():
    entry = api.model_entry("a/b", created=0, state="ready", aliases=["c"])
    assert json.loads(api.models_list([entry])) == {
        "object": "list",
        "data": [
            {
                "id": "a/b",
                "object": "model",
                "created": 0,
                "owned_by": "anvil-mux",
                "type": "model",
                "display_name": "a/b",
                "created_at": "1970-01-01T00:00:00Z",
                "aliases": ["c"],
                "status": {"value": "loaded"},
            }
        ],
        "has_more": False,
        "first_id": "a/b",
        "last_id": "a/b",
    }
    assert json.loads(api.models_list([]))["data"] == []


@pytest.mark.parametrize(
    ("state", "value"),
    [
        ("ready", "loaded"),
        ("loading", "loading"),
        ("standby", "sleeping"),
        ("stopped", "unloaded"),
    ],
)
def test_the_state_of_a_model_in_the_words_of_llama_cpp(state, value):
    assert api.model_entry("a", created=0, state=state)["status"] == {"value": value}


def test_a_model_that_failed_is_unloaded_for_llama_cpps_clients():
    failed = {"value": "unloaded", "failed": True}
    assert api.model_status("stopped", failed=True) == api.model_status("stuck") == failed
    assert api.model_status("loading", failed=True) == {"value": "loading"}


def test_a_harmless_request_id_is_kept_and_any_other_replaced():
    assert api.request_id(b"Az09._-", lambda: "new") == "Az09._-"
    for given in (None, b"", b"a b", b"a\n", "ä".encode(), b"a" * 129):
        assert api.request_id(given, lambda: "new") == "new"


@pytest.mark.parametrize(
    ("name", "beat"), [("openai", "chat"), ("openai", "responses"), ("anthropic", "messages")]
)
def test_what_an_engine_said_of_a_refusal_stands_in_the_error_of_every_api(name, beat):
    said = {"type": "exceed_context_size_error", "code": 400}
    event = api.error_event(name, beat, RefusedByEngine("too long", status=400, said=said))
    inner = json.loads(event.split(b"data: ")[1])["error"]
    assert (inner["message"], inner["type"], inner["code"]) == ("too long", "exceed_context_size_error", 400)


@pytest.mark.parametrize(
    "body",
    [b"", b"too long", b"[1]", b"{}", b'{"error":"too long"}', b'{"error":{"message":1}}', b"[" * 100000],
)
def test_what_is_no_error_object_is_not_taken_for_one(body):
    assert api.error_said(body) is None


def test_a_whole_answer_becomes_the_one_event_of_a_stream():
    call = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "hi", "tool_calls": [call]}
    whole = {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
    event, done, _ = api.as_events("chat", json.dumps(whole).encode()).split(b"\n\n")
    chunk = json.loads(event.removeprefix(b"data: "))
    assert (chunk["object"], done) == ("chat.completion.chunk", b"data: [DONE]")
    assert chunk["choices"][0]["delta"] == {**message, "tool_calls": [{"index": 0, **call}]}
    assert chunk["choices"][0]["finish_reason"] == "stop"
    assert api.as_events("none", b'{"data": [1]}') == b'data: {"data": [1]}\n\n'
    assert api.as_events("none", b"hello\nworld\n") == b"data: hello\ndata: world\n\n"
    assert api.as_events("responses", b'{"id": "x"}').startswith(b"event: response.completed\ndata: ")
    for beat, body in (("chat", b"RIFF"), ("messages", b'{"id": 1}'), ("none", b"\xff"), ("none", b"a\0")):
        assert api.as_events(beat, body) is None


def test_a_path_below_upstream_is_read_in_few_ways_however_long_it_is():
    path = "/upstream" + "/a" * 4000
    assert [len(name) for name, _ in api.upstream(path)] == [15, 13, 11, 9, 7, 5, 3, 1]
    assert len(api.upstream_names(path)) == 8
