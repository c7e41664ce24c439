"""The demo's stand-in engine, as a client and as anvil-mux sees it."""

import base64
import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ENGINE = Path(__file__).resolve().parent.parent.parent / "bin" / "demo-engine"
TIMEOUT = 60.0
SAY = {"messages": [{"role": "user", "content": "Hello there"}]}


class Engine:
    """A running demo engine; `first_line` is what it said when it began to listen."""

    def __init__(self, *flags: str, port: str = "--port=0") -> None:
        words = [sys.executable, str(ENGINE), "--model", "m", *flags, *([port] if port else [])]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()
        found = re.search(r":([0-9]+),", self.first_line)
        assert found is not None
        self.port = int(found[1])

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)

    def ask(self, method: str, path: str, body: Any = None, raw: bytes | None = None) -> tuple[int, bytes]:
        connection = self.connect()
        try:
            connection.request(method, path, raw if raw is not None else json.dumps(body) if body else None)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        status, answer = self.ask("POST", path, body)
        assert status == 200, answer
        return json.loads(answer)

    def stream(self, path: str, body: dict[str, Any]) -> list[str]:
        """The events of an answer."""
        status, answer = self.ask("POST", path, {**body, "stream": True})
        assert status == 200, answer
        *events, rest = answer.decode().split("\n\n")
        assert rest == ""
        return events

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(TIMEOUT)


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def engine(*flags: str, **given: str) -> Engine:
        made.append(Engine(*flags, **given))
        return made[-1]

    yield engine
    for each in made:
        each.process.kill()
        each.process.communicate(timeout=TIMEOUT)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One that is ready, and fast."""
    running = Engine("--load-seconds", "0", "--tokens-per-second", "10000")
    yield running
    running.process.kill()
    running.process.communicate(timeout=TIMEOUT)


def chunks(events: list[str]) -> list[dict[str, Any]]:
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def test_it_serves_on_though_what_it_prints_can_be_written_nowhere(make):
    engine = make("--load-seconds", "0")
    engine.process.stdout.close()
    assert [engine.ask("GET", "/v1/models")[0] for _ in range(2)] == [200, 200]


def test_it_listens_at_once_and_is_not_ready_while_it_loads(make):
    loading = make("--load-seconds", "1000")
    assert loading.ask("GET", "/health")[0] == 503
    status, answer = loading.ask("POST", "/v1/chat/completions", SAY)
    assert status == 503
    assert json.loads(answer)["error"]["code"] == "loading"


def test_it_is_ready_when_its_load_time_has_passed(make):
    loading = make("--load-seconds", "0.2")
    connection = loading.connect()
    seen = set()
    while 200 not in seen:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        seen.add(response.status)
    connection.close()
    assert seen <= {200, 503}


def test_sigterm_ends_it_cleanly_even_while_it_streams(make):
    slow = make("--load-seconds", "0", "--tokens-per-second", "0.001")
    connection = slow.connect()
    connection.request("POST", "/v1/chat/completions", json.dumps({**SAY, "stream": True}))
    assert connection.getresponse().status == 200
    assert slow.stop() == 0
    connection.close()


def test_its_port_can_come_from_the_environment(make, monkeypatch):
    with socket.socket() as held:
        # Bound and not listening: engines may reuse the address, nobody else is given the port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        monkeypatch.setenv("PORT", str(port))
        assert make("--load-seconds", "0", port="").port == port


def test_models_lists_its_one_model(engine):
    status, answer = engine.ask("GET", "/v1/models")
    assert status == 200
    assert [model["id"] for model in json.loads(answer)["data"]] == ["m"]


def test_a_chat_answer_names_the_model_and_what_was_said(engine):
    answer = engine.post("/v1/chat/completions", {"model": "m", **SAY})
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "This is m. You said: Hello there"}
    assert (choice["finish_reason"], answer["model"], answer["object"]) == ("stop", "m", "chat.completion")
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 7, "total_tokens": 9}


def test_parts_of_a_message_are_read(engine):
    parts = [{"type": "text", "text": "one"}, {"type": "image_url"}, {"type": "text", "text": "two"}]
    answer = engine.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert answer["choices"][0]["message"]["content"].split()[-3:] == ["said:", "one", "two"]


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_an_answer_is_as_long_as_max_tokens(engine, key, count):
    body = {**SAY, key: count, "stream_options": {"include_usage": True}}
    answer = engine.post("/v1/chat/completions", body)
    *words, last, usage = chunks(engine.stream("/v1/chat/completions", body))
    assert answer["usage"]["completion_tokens"] == usage["usage"]["completion_tokens"] == count
    assert len(words) == count + 1
    assert last["choices"][0]["finish_reason"] == ("stop" if count == 7 else "length")


def test_a_chat_stream_says_the_same_in_pieces(engine):
    found = chunks(engine.stream("/v1/chat/completions", SAY))
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta["content"] for delta in deltas) == "This is m. You said: Hello there"
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in found)


@pytest.mark.parametrize("options", ["x", 1, [], {}, None])
def test_options_of_a_stream_that_say_nothing_are_passed_over(engine, options):
    asked = {**SAY, "stream": True, "max_tokens": 1, "stream_options": options}
    status, answer = engine.ask("POST", "/v1/chat/completions", asked)
    assert (status, answer.endswith(b"data: [DONE]\n\n")) == (200, True)
    assert b'"usage"' not in answer


def test_completions_speak_plain_and_streamed(engine):
    answer = engine.post("/v1/completions", {"prompt": "Hi"})
    assert answer["choices"][0]["text"] == "This is m. You said: Hi"
    found = chunks(
        engine.stream("/v1/completions", {"prompt": "Hi", "stream_options": {"include_usage": True}})
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in found[:-1]) == "This is m. You said: Hi"
    assert (found[-1]["choices"], found[-1]["usage"]["total_tokens"]) == ([], 7)


def test_messages_answer_in_anthropics_shape(engine):
    answer = engine.post("/v1/messages", {"model": "m", "max_tokens": 3, **SAY})
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert answer["content"] == [{"type": "text", "text": "This is m. "}]
    assert answer["usage"] == {"input_tokens": 2, "output_tokens": 3}


def test_messages_stream_anthropics_events(engine):
    events = engine.stream("/v1/messages", {"max_tokens": 3, **SAY})
    names, bodies = zip(*(event.split("\n") for event in events), strict=True)
    found = [json.loads(body.removeprefix("data: ")) for body in bodies]
    assert [f"event: {body['type']}" for body in found] == list(names)
    assert [body["type"] for body in found] == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * 3,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert found[-2]["usage"] == {"output_tokens": 3}


def test_embeddings_are_the_same_for_the_same_text_in_both_formats(engine):
    body = {"input": ["one", "two", "one"]}
    one, two, again = [each["embedding"] for each in engine.post("/v1/embeddings", body)["data"]]
    assert one == again != two
    packed = engine.post("/v1/embeddings", {**body, "encoding_format": "base64"})["data"][1]["embedding"]
    assert list(struct.unpack("<8f", base64.b64decode(packed))) == two


@pytest.mark.parametrize(
    ("path", "raw", "status", "code"),
    [
        ("/v1/chat/completions", b"{", 400, "bad_json"),
        ("/v1/chat/completions", b"[]", 400, "bad_json"),
        ("/v1/chat/completions", b"{}", 400, "invalid_request_error"),
        ("/v1/chat/completions", b'{"model": "other", "messages": []}', 404, "model_not_found"),
        ("/v1/chat/completions", b'{"messages": [], "max_tokens": 0}', 400, "invalid_request_error"),
        ("/v1/embeddings", b'{"input": [3]}', 400, "bad_input"),
        ("/nothing", b"{}", 404, "not_found"),
    ],
)
def test_errors_have_openais_shape(engine, path, raw, status, code):
    found, answer = engine.ask("POST", path, raw=raw)
    error = json.loads(answer)["error"]
    assert (found, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "code", "param"}


def test_errors_of_messages_have_anthropics_shape(engine):
    _, answer = engine.ask("POST", "/v1/messages", raw=b"{}")
    found = json.loads(answer)
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")


def test_a_connection_serves_many_requests_errors_and_chunked_bodies_included(engine):
    connection = engine.connect()
    connection.connect()
    first = connection.sock
    for body in ({**SAY, "stream": True}, {}, SAY):
        pieces = iter([json.dumps(body).encode()[:5], json.dumps(body).encode()[5:] or b" "])
        connection.request("POST", "/v1/chat/completions", pieces, encode_chunked=True)
        response = connection.getresponse()
        response.read()
        assert response.status == (200 if body else 400)
    assert connection.sock is first
    connection.close()


def test_the_openai_client_understands_it(engine):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"http://127.0.0.1:{engine.port}/v1", api_key="-", max_retries=0) as client:
        messages = SAY["messages"]
        stream = client.chat.completions.create(model="m", messages=messages, stream=True)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert said == "This is m. You said: Hello there"
        assert len(client.embeddings.create(model="m", input="x").data[0].embedding) == 8
        with pytest.raises(openai.NotFoundError, match="this is m, not n"):
            client.chat.completions.create(model="n", messages=messages)


# Sleep


@pytest.fixture
def sleeper(make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    flags = ("--enable-sleep-mode", "--load-seconds", "0", "--wake-seconds", "0")
    return make(*flags, "--tokens-per-second", "10000")


def says(engine: Engine) -> str:
    return str(engine.post("/v1/chat/completions", SAY)["choices"][0]["message"]["content"])


def test_without_sleep_mode_it_has_no_such_routes(engine):
    assert engine.ask("GET", "/is_sleeping")[0] == 404
    assert engine.ask("POST", "/sleep?level=1")[0] == 404


def test_it_is_healthy_while_it_sleeps_and_says_so_only_when_asked(sleeper):
    assert sleeper.ask("POST", "/sleep?level=1") == (200, b"")
    assert sleeper.ask("GET", "/health")[0] == sleeper.ask("GET", "/v1/models")[0] == 200
    assert json.loads(sleeper.ask("GET", "/is_sleeping")[1]) == {"is_sleeping": True}
    sleeper.ask("POST", "/wake_up")
    assert json.loads(sleeper.ask("GET", "/is_sleeping")[1]) == {"is_sleeping": False}
    assert says(sleeper).startswith("This is m.")


def test_a_request_hangs_until_it_is_woken(sleeper):
    sleeper.ask("POST", "/sleep")
    connection = sleeper.connect()
    connection.request("POST", "/v1/chat/completions", json.dumps(SAY))
    sleeper.ask("POST", "/wake_up")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize("reload", [True, False])
def test_from_level_two_it_needs_its_weights_again(sleeper, reload):
    sleeper.ask("POST", "/sleep?level=2")
    sleeper.ask("POST", "/wake_up?tags=weights")
    assert json.loads(sleeper.ask("GET", "/is_sleeping")[1]) == {"is_sleeping": True}
    if reload:
        sleeper.ask("POST", "/collective_rpc", {"method": "reload_weights"})
    sleeper.ask("POST", "/wake_up?tags=kv_cache")
    assert says(sleeper) == ("This is m. You said: Hello there" if reload else "!!!!")


def test_it_cannot_be_woken_twice(sleeper):
    assert sleeper.ask("POST", "/wake_up")[0] == 500
