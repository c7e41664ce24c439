"""Routes, the model's name in bodies of every kind, error shapes, beats and model lists."""

from __future__ import annotations

import json
import random
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
from anvil_mux.protocol import api, naming

LARGE = naming.MAX_JSON_PARSED + 1


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


@pytest.mark.parametrize(
    ("content_type", "body", "kind"),
    [
        (b"application/json", b"", "json"),
        (b"Application/JSON; charset=utf-8", b"x", "json"),
        (b"application/vnd.x+json", b"x", "json"),
        (b"multipart/form-data; boundary=x", b"--x", "multipart"),
        (b"application/x-www-form-urlencoded", b' {"model"', "json"),
        (b"", b'\xef\xbb\xbf\n{"model"', "json"),
    ],
)
def test_what_a_body_is(content_type, body, kind):
    assert naming.media(content_type, body) == kind


@pytest.mark.parametrize(
    ("content_type", "body"), [(b"", b"model=x"), (b"text/plain", b"{}"), (b"text/xml", b"<")]
)
def test_other_bodies_are_not_supported(content_type, body):
    with pytest.raises(BadRequest) as caught:
        naming.media(content_type, body)
    assert caught.value.status == 415


@pytest.mark.parametrize(
    ("document", "model", "as_another"),
    [
        ('{"session":{"type":"realtime","model":"a"}}', "a", '{"session":{"type":"realtime","model":"new"}}'),
        (
            '{"x":"ä","session":{"model":"a"},"model":"b"}',
            "a",
            '{"x":"ä","session":{"model":"new"},"model":"b"}',
        ),
        (
            '{"session": {"audio": {"input": {"transcription": {"language": "de", "model": "a"}}}}}',
            "a",
            '{"session": {"audio": {"input": {"transcription": {"language": "de", "model": "new"}}}}}',
        ),
        (
            '{"model":"a","input_audio_transcription":{"model":"b"}}',
            "a",
            '{"model":"new","input_audio_transcription":{"model":"b"}}',
        ),
        ('{"input_audio_transcription":{"model":"a"}}', "a", '{"input_audio_transcription":{"model":"new"}}'),
        ('{"session":"model","x":{"session":{"model":"a"}}}', None, None),
    ],
)
def test_a_realtime_sessions_model_stands_within(document: str, model: str, as_another: str | None) -> None:
    found, span = [*naming.session_models(document.encode()), (None, None)][0]
    assert found == model
    if span:
        assert b"".join(naming.model_replaced(document.encode(), "new", span)).decode() == as_another


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ('{"session":{"model":"a"},"session":{"model":"b"}}', "`session` is given twice"),
        ('{"session":{"model":"a","model":"b"}}', "`model` is given twice"),
        ('{"session":{"model":"a"},"Session":{"model":"b"}}', "`session` is given twice"),
        ('{"session":{"model":1}}', "`model` must be a string"),
        ('{"session":{"model":"a"}', "not JSON"),
        ("[]", "must be a JSON object"),
    ],
)
def test_a_session_whose_model_is_not_clear_is_refused(document: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        naming.session_models(document.encode())


def padded(document: str) -> bytes:
    """The same JSON, large enough to be scanned instead of parsed."""
    return document.encode() + b" " * LARGE


def raised(body: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        naming.model_and_stream(body)
    return caught.value


@pytest.mark.parametrize("sized", [str.encode, padded], ids=["parsed", "scanned"])
class TestModelInJson:
    @pytest.mark.parametrize(
        ("document", "expected"),
        [
            ('{"model":"a"}', ("a", False)),
            ('\ufeff \n{ "stream" : true , "model" : "a/b" }', ("a/b", True)),
            ('{"model":"a","stream":false}', ("a", False)),
            ('{"model":"a","stream":"true"}', ("a", False)),
            ('{"mod\\u0065l":"\\u0061\\"\\\\","x":[{"model":"b","stream":true}]}', ('a"\\', False)),
            ('{"x":{"model":"b"},"stream":true}', (None, True)),
            ('{"x":"model","y":"\\"model\\":\\"b\\"","model":"ä"}', ("ä", False)),
            ('{"x":"}","y":["]","{"],"z":"\\\\","model":"a"}', ("a", False)),
            ('{"x":["model",{"model":{"model":"c"}}]}', (None, False)),
            ("{}", (None, False)),
        ],
    )
    def test_the_top_level_counts(self, sized, document, expected):
        assert naming.model_and_stream(sized(document)) == expected

    @pytest.mark.parametrize(
        ("document", "param"),
        [
            ("", "body"),
            ("[]", "body"),
            ('"model"', "body"),
            ("null", "body"),
            ('{"model":"a"', "body"),
            ('{"model":"a', "body"),
            ('{"model":"a"}}', "body"),
            ('{"model":"a"}"x"', "body"),
            ('{"model":"a\\', "body"),
            ('{"model":1}', "model"),
            ('{"model":null}', "model"),
            ('{"model":["a"]}', "model"),
            ('{"model":""}', "model"),
            ('{"model":"\\ud800"}', "model"),
            ('{"model":"a","model":"a"}', "model"),
            ('{"model":"a","x":[1],"\\u006dodel":"b"}', "model"),
            ('{"model":"%s"}' % ("a" * 5000), "model"),
        ],
    )
    def test_the_rest_is_refused(self, sized, document, param):
        error = raised(sized(document))
        assert (error.status, error.param) == (400, param)

    def test_other_encodings_are_refused(self, sized):
        assert raised(sized('{"model":"a"}').decode().encode("utf-16")).param == "body"
        assert raised(sized('{"model":"a"}') + b"\xff").param == "body"


def test_deep_nesting_is_refused_not_a_crash():
    assert raised(b'{"x":' + b"[" * 100_000).param == "body"


def test_countless_strings_are_refused():
    with pytest.raises(TooLarge):
        naming.model_and_stream(b'{"x":[' + b'"",' * naming.MAX_STRINGS + b'""]}')


def _random_text(rng: random.Random) -> str:
    letters = ['"', "\\", "{", "}", "[", "]", ":", ",", "a", "model", "stream", "é", "\n", "\U0001f600", " "]
    return "".join(rng.choices(letters, k=rng.randrange(8)))


def _random_value(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(8 if depth else 5)
    if kind < 5:
        return [_random_text(rng), rng.randrange(99), None, True, -1.5e9][kind]
    if kind == 5:
        return [_random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return _random_object(rng, depth - 1)


def _random_object(rng: random.Random, depth: int) -> dict[str, object]:
    keys = [
        rng.choice(["model", "stream", "x", "models", _random_text(rng)]) for _ in range(rng.randrange(5))
    ]
    return {key: _random_value(rng, depth) for key in keys}


def _random_document(rng: random.Random) -> tuple[dict[str, object], str]:
    document = _random_object(rng, 3)
    if "model" in document:
        document["model"] = _random_text(rng) + "m"
    return document, json.dumps(
        document,
        ensure_ascii=rng.random() < 0.5,
        indent=rng.choice([None, None, 1, "\t"]),
        separators=rng.choice([(",", ":"), (" ,\r\n", " : ")]),
    )


def test_the_scanner_agrees_with_the_parser():
    rng = random.Random(4)
    for _ in range(2000):
        document, text = _random_document(rng)
        expected = document.get("model"), document.get("stream") is True
        assert naming.model_and_stream(text.encode()) == expected
        found = naming._scan(text.encode())
        assert found.stream is expected[1]
        assert (found.model is not None) is ("model" in document)
        if found.model is not None:
            assert json.loads(text.encode()[slice(*found.model)]) == document["model"]


def test_renaming_changes_the_model_and_nothing_else():
    rng = random.Random(5)
    for _ in range(2000):
        document, text = _random_document(rng)
        changed = b"".join(naming.model_replaced(text.encode(), "new/näme"))
        assert json.loads(changed) == {**document, "model": "new/näme"}
        if "model" in document:
            found = naming._scan(text.encode()).model
            assert found is not None
            start, end = found
            assert changed == text.encode()[:start] + b'"new/n\\u00e4me"' + text.encode()[end:]


def test_renaming_takes_any_kind_of_buffer_and_keeps_a_byte_order_mark():
    marked = naming.model_replaced(bytearray(b'\xef\xbb\xbf{"model": "a" }'), "b")
    assert b"".join(marked) == b'\xef\xbb\xbf{"model": "b" }'
    assert b"".join(naming.model_replaced(b"{ }", "b")) == b'{"model":"b" }'


def test_long_strings_with_many_escapes_end_where_they_end():
    for text in ('\\"' * 3000, "\\\\" * 3000, "\\n" * 3001 + "x", "a" * 9000 + "\\\\"):
        body = b'{"x":"' + text.encode() + b'","model":"m"}'
        assert naming._scan(body).model == (len(body) - 4, len(body) - 1)


def test_a_body_that_ends_in_an_escape_is_refused():
    with pytest.raises(BadRequest):
        naming._scan(b'{"x":"a\\" \\')


def test_the_model_in_a_query():
    assert naming.model_in_query("") is None
    assert naming.model_in_query("model=a%2Fb&x=1") == "a/b"
    assert naming.model_in_query("model=a&model=a") == "a"
    for query in ("model=a&model=b", "model=", "model=%ff"):
        with pytest.raises(BadRequest) as caught:
            naming.model_in_query(query)
        assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'multipart/form-data; charset=x; Boundary="a b=c"', b"a b=c"),
    ],
)
def test_the_boundary_of_a_form(content_type, expected):
    assert naming.boundary(content_type) == expected


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/form-data; boundary=a; boundary=b",
        b"multipart/form-data; boundary=" + b"a" * 71,
        b'multipart/form-data; boundary="a "',
    ],
)
def test_a_form_without_one_valid_boundary_is_refused(content_type):
    with pytest.raises(BadRequest):
        naming.boundary(content_type)


def part(name: bytes, value: bytes, more: bytes = b"") -> bytes:
    return b'--B\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name, more, value)


FILE = part(b"file", b"\r\n--A\r\n\x00--B\r\r\n--" * 50, b'; filename="model.wav"\r\nContent-Type: audio/wav')


def scan(body: bytes, sizes: list[int]) -> naming.MultipartModelScanner:
    scanner = naming.MultipartModelScanner(b"B")
    start = 0
    while start < len(body):
        size = sizes[start % len(sizes)]
        scanner.feed(body[start : start + size])
        start += size
    scanner.finish()
    return scanner


@pytest.mark.parametrize(
    ("body", "model", "stream"),
    [
        (FILE + part(b"model", b"whisper") + part(b"stream", b"true") + b"--B--\r\n", "whisper", True),
        (part(b"model", b"whisper") + FILE + b"--B--", "whisper", False),
        (b"preamble\r\n" + part(b"model", "ä/b".encode()) + b"--B--\r\nepilogue\r\n--B\r\n", "ä/b", False),
        (part(b"stream", b"True", b'; filename="x"') + part(b"models", b"x") + b"--B--", None, False),
        (part(b"model", b"m", b"; filenames=x") + b"--B--", "m", False),
        (b"--B\r\ncontent-disposition:form-data;name=model\r\n\r\nm\r\n--B--", "m", False),
        (part(b"file", b"") + part(b"x", b'name="model"\r\n\r\nno') + b"--B--", None, False),
        (b"--B--", None, False),
    ],
)
def test_the_model_of_a_form_is_found_wherever_it_is_and_however_it_arrives(body, model, stream):
    rng = random.Random(6)
    for sizes in [[1], [len(body)], *([rng.randrange(1, 40) for _ in range(7)] for _ in range(20))]:
        seen = scan(body, sizes)
        assert (seen.model, seen.stream) == (model, stream)
        if model is not None:
            assert seen.span is not None
            assert body[slice(*seen.span)] == model.encode()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no form",
        part(b"model", b"m"),
        part(b"model", b"m") + part(b"model", b"m") + b"--B--",
        part(b"model", b"") + b"--B--",
        part(b"model", b"\xff") + b"--B--",
        part(b"model", b"m" * 9000) + b"--B--",
        part(b"model", b"m", b'; name="x"') + b"--B--",
        part(b"model", b"m") + part(b"model", b"x", b'; filename="x"') + b"--B--",
        part(b"model", b"x", b"; filename*=utf-8''x") + part(b"model", b"m") + b"--B--",
        part(b"model", b"x", b"; filename*0=x") + b"--B--",
        part(b"model", b"m") + part(b"model", b"x", b"; filenames=x") + b"--B--",
        *(part(b"model", b"m") + part(each, b"x") + b"--B--" for each in (b"Model", b"model[]", b" model")),
        *(part(b"model", b"m") + part(each, b"x") + b"--B--" for each in (b"m\\odel", b"'model'", b"model ")),
        b"--Bx\r\n\r\nm\r\n--B--",
        b"--B\r\nbad head\r\n\r\nm\r\n--B--",
        b"--B\r\nX: " + b"a" * 9000,
        part(b"x", b"y") * (naming.MAX_PARTS + 1) + b"--B--",
    ],
    ids=lambda body: repr(body)[:40],
)
def test_a_broken_form_is_refused(body):
    for size in (1, 4096):
        with pytest.raises(BadRequest):
            scan(body, [size])


def test_a_file_passes_the_scanner_without_being_kept():
    scanner = naming.MultipartModelScanner(b"B")
    scanner.feed(part(b"file", b"", b'; filename="x"')[:-2])
    for _ in range(100):
        scanner.feed(b"\r\n--" * 1000)
        assert len(scanner._held) < 16


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
    "body",
    [
        b'{"model":"a","mod\\u0065l":"b"}',
        b'{"\\u006Dodel":"b","model":"a"}',
        b'{"model":"a", "model" :"b"}',
    ],
)
def test_a_model_named_twice_is_refused_however_it_is_written(body: bytes) -> None:
    with pytest.raises(BadRequest, match="twice"):
        naming.model_and_stream(body)


@pytest.mark.parametrize(
    "body", [b'{"model":"a"}{"x":1}', b'{"model":"a"', b'{"model":"a"}x', b'{"model":"a",}']
)
def test_more_or_less_than_one_document_is_refused_also_on_the_quick_path(body: bytes) -> None:
    with pytest.raises(BadRequest, match="JSON"):
        naming.model_and_stream(body)


@pytest.mark.parametrize(
    ("name", "beat"), [("openai", "chat"), ("openai", "responses"), ("anthropic", "messages")]
)
def test_what_an_engine_said_of_a_refusal_stands_in_the_error_of_every_api(name: str, beat: str) -> None:
    said = {"type": "exceed_context_size_error", "code": 400}
    event = api.error_event(name, beat, RefusedByEngine("too long", status=400, said=said))
    inner = json.loads(event.split(b"data: ")[1])["error"]
    assert (inner["message"], inner["type"], inner["code"]) == ("too long", "exceed_context_size_error", 400)


@pytest.mark.parametrize(
    "body",
    [b"", b"too long", b"[1]", b"{}", b'{"error":"too long"}', b'{"error":{"message":1}}', b"[" * 100000],
)
def test_what_is_no_error_object_is_not_taken_for_one(body: bytes) -> None:
    assert api.error_said(body) is None


@pytest.mark.parametrize(
    ("tail", "found"),
    [
        (
            b'"usage": {"prompt_tokens": 12, "prompt_tokens_details": {"cached_tokens": 8}}',
            (None, 12, 8),
        ),
        (b'"usage":{"prompt_tokens":12,"completion_tokens":3}', (3, 12, None)),
        (b'"usage":{"input_tokens":5,"cache_read_input_tokens":90,"output_tokens":1}', (1, 95, 90)),
        (b'"usage":{"input_tokens":50,"input_tokens_details":{"cached_tokens":32}}', (None, 50, 32)),
        (b'"timings":{"cache_n":236,"prompt_n":1},"usage":{"prompt_tokens":237}', (None, 237, 236)),
        (b'"timings":{"cache_n":236,"prompt_n":1,"prompt_ms":9.5,"predicted_n":64}}', (64, 237, 236)),
        (b'"timings":{"prompt_n":12,"predicted_n":3}', (3, 12, 0)),
        (b'"timings":{"prompt_ms":12}', (None, None, None)),
        (b'"content":"\\"usage\\": {\\"prompt_tokens\\": 3}"', (None, None, None)),
        (b'"usage":{"content":"\\"prompt_tokens\\": 3"}', (None, None, None)),
        (b'"usage":{"prompt_tokens":99999999999}', (None, None, None)),
        (b'{"input_tokens":7}', (None, None, None)),
        (b"", (None, None, None)),
    ],
)
def test_the_end_of_an_answer_says_how_many_tokens_it_took(
    tail: bytes, found: tuple[int | None, int | None, int | None]
) -> None:
    assert api.tokens_said(tail) == found


def test_a_path_below_upstream_is_read_in_few_ways_however_long_it_is() -> None:
    path = "/upstream" + "/a" * 4000
    assert [len(name) for name, _ in api.upstream(path)] == [15, 13, 11, 9, 7, 5, 3, 1]
    assert len(api.upstream_names(path)) == 8


@pytest.mark.parametrize("filling", [b"", b" " * LARGE], ids=["parsed", "scanned"])
@pytest.mark.parametrize("key", [b"Model", b"MODEL", b"mod\\u0045l"])
def test_a_key_that_only_some_servers_read_as_the_model_is_refused(key: bytes, filling: bytes) -> None:
    with pytest.raises(BadRequest, match="is written `model`"):
        naming.model_and_stream(b'{"model":"a",%b"%b":"b"}' % (filling, key))
