"""Ollama's and Anthropic's own clients before a real llama-server that thinks, calls tools and sees pictures.

What it says is fixed (tests/real/speaking_model.py), but it is said token by token, and llama-server's
template, grammar and parsers make thoughts and calls of it. ``lacking`` is the same engine without
Anthropic's routes.
"""

import base64
import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import anthropic
import ollama
import pytest

from tests.docker.conftest import MODELS, REAL, Stack
from tests.docker.served import PATIENCE, docker, served, state_of
from tests.running import Running, seen

OWN, LACKING = "own", "lacking"
HELLO, SUNNY = "Hello there, how are you?", "It is sunny in Paris."
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
PARAMETERS = {"get_weather": {"city": {"type": "string"}}, "get_time": {"zone": {"type": "string"}}}
PARAMETERS["get_time"]["summer"] = {"type": "boolean"}
PARIS, ROME = ("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})
TIME = ("get_time", {"zone": "CET", "summer": True})
"""The calls that the model was made to make."""
CUT = "broke off|ended in the middle of its answer"


@pytest.fixture(scope="session")
def speaking_model() -> tuple[Path, Path]:
    """The model and its eyes, made at their first use."""
    made = MODELS / "speaking.gguf", MODELS / "eyes.gguf"
    MODELS.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, REAL / "speaking_model.py", *made], check=True, timeout=PATIENCE)
    return made


@pytest.fixture
def stack(llamacpp_compose: Callable[..., Stack], speaking_model: tuple[Path, Path], tmp_path: Path) -> Stack:
    mouth, eyes = speaking_model
    front = REAL / "without-anthropic"
    server = "llama-server -m /m/mouth.gguf --mmproj /m/eyes.gguf --jinja -c 65536 -np 2 -t 1 --temp 0"
    made = {
        "volumes": [f"{mouth}:/m/mouth.gguf:ro", f"{eyes}:/m/eyes.gguf:ro", f"{front}:/front:ro"],
        "image": "anvil-mux-test/llamacpp",
        "ports": ["127.0.0.1::8080"],
        "init": True,
    }
    behind = f"perl /front & exec {server} --alias {LACKING} --host 127.0.0.1 --port 8081"
    services = {
        OWN: {
            **made,
            "command": f"{server} --alias {OWN} --host 0.0.0.0 --port 8080",
            "x-anvil": {"gpus": ["0"]},
        },
        LACKING: {
            **made,
            "command": ["sh", "-c", behind],
            "x-anvil": {"gpus": ["1"], "engine": "llamacpp"},
        },
    }
    return llamacpp_compose(tmp_path, models=0, services=services)


def picture(red: int, green: int, blue: int) -> bytes:
    """A PNG of one colour."""
    side = 56
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes((red, green, blue)) * side) * side)
    parts = (b"IHDR", head), (b"IDAT", rows), (b"IEND", b"")
    framed = [
        struct.pack(">I", len(said)) + kind + said + struct.pack(">I", zlib.crc32(kind + said))
        for kind, said in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


RED, BLUE = picture(255, 0, 0), picture(0, 0, 255)


# Ollama


class Ollama:
    """Its client; each question is asked whole and as a stream, which must say the same."""

    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": each}}}
        for name, each in PARAMETERS.items()
    ]

    def __init__(self, mux: Running) -> None:
        self.client = ollama.Client(f"http://127.0.0.1:{mux.port}", timeout=PATIENCE)

    def close(self) -> None:
        self.client.close()

    def chat(self, said: str | list[Any], *images: bytes, **more: Any) -> ollama.ChatResponse:
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        if images:
            messages[-1]["images"] = images
        whole = self.client.chat(OWN, messages, **more)
        told = list(self.client.chat(OWN, messages, stream=True, **more))
        assert [each.done for each in told] == [False] * (len(told) - 1) + [True]
        told_in_all = [
            "".join(each.message.thinking or "" for each in told),
            "".join(each.message.content or "" for each in told),
            [call for each in told for call in calls(each)],
        ]
        assert told_in_all == [whole.message.thinking or "", whole.message.content, calls(whole)]
        assert (told[-1].eval_count, told[-1].done_reason) == (whole.eval_count, whole.done_reason)
        return whole


def calls(said: ollama.ChatResponse) -> list[tuple[str, Any]]:
    return [(call.function.name, call.function.arguments) for call in said.message.tool_calls or []]


def test_ollamas_client_before_a_real_engine(stack):
    with served(stack) as mux, closing(Ollama(mux)) as asks:
        thoughtful = asks.chat("Hi", think=True)
        assert (thoughtful.message.thinking, thoughtful.message.content) == ("They greet me.\n", HELLO)
        assert thoughtful.eval_count == 11
        assert 0 < (thoughtful.eval_duration or 0) < (thoughtful.total_duration or 0)
        assert (thoughtful.prompt_eval_duration or 0) > 0
        assert asks.chat("Hi", think=False).message.thinking is None

        called = asks.chat("How is the weather?", tools=asks.tools, think=True)
        assert (called.message.thinking, calls(called)) == ("I must look.\n", [PARIS])
        assert calls(asks.chat("What is the time?", tools=asks.tools, think=False)) == [ROME, TIME]
        result = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
        history = [{"role": "user", "content": "How is the weather?"}, called.message, result]
        assert asks.chat(history, tools=asks.tools, think=False).message.content == SUNNY

        for shown, colour in ((RED, "red"), (BLUE, "blue")):
            asked = "Which colour has this picture?"
            assert asks.chat(asked, shown, think=False).message.content == f"The picture is {colour}."
            told = asks.client.generate(OWN, asked, images=[shown], think=False)
            assert told.response == f"The picture is {colour}."

        shaped = asks.chat("Hi", format=SCHEMA, think=False).message.content or ""
        assert set(json.loads(shaped)) == {"colour", "count"}
        options = {"num_predict": 2, "num_ctx": 4096}
        cut = asks.chat("Hi", think=False, options=options)
        assert (cut.message.content, cut.done_reason, cut.eval_count) == ("Hello there,", "length", 2)
        assert asks.chat("Hi", think=False, options={"stop": ["are"]}).message.content == "Hello there, how "
        raw = asks.client.generate(OWN, "<think>\n\n</think>\n\n", raw=True)
        assert raw.response == HELLO
        asks.client.generate(OWN, keep_alive=0)
        assert seen(lambda: state_of(mux, OWN), lambda state: state == "stopped") == "stopped"


def test_vectors_of_a_real_engine(llamacpp_compose, tmp_path):
    flag = {"environment": {"LLAMA_ARG_EMBEDDINGS": "1", "LLAMA_ARG_POOLING": "mean"}}
    made = llamacpp_compose(tmp_path, models=1, services={"model-1": flag})
    with served(made) as mux, closing(Ollama(mux)) as asks:
        both = asks.client.embed("model-1", ["one text", "another"])
        assert [len(vector) for vector in both.embeddings] == [64, 64]
        assert both.prompt_eval_count == 19
        [first] = asks.client.embed("model-1", "one text").embeddings
        assert first == both.embeddings[0]
        assert asks.client.embeddings("model-1", "one text").embedding == first


# Anthropic


class Anthropic:
    """Its client; each question is asked whole and as a stream, which must say the same."""

    tools = [
        {"name": name, "description": name, "input_schema": {"type": "object", "properties": each}}
        for name, each in PARAMETERS.items()
    ]
    mute = {"type": "disabled"}

    def __init__(self, mux: Running, model: str) -> None:
        url = f"http://127.0.0.1:{mux.port}"
        self.client: Any = anthropic.Anthropic(base_url=url, api_key="none", timeout=PATIENCE, max_retries=0)
        self.model = model

    def close(self) -> None:
        self.client.close()

    def message(self, said: str | list[Any], **more: Any) -> Any:
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        asked = {"model": self.model, "max_tokens": 300, "messages": messages, **more}
        whole = self.client.messages.create(**asked)
        with self.client.messages.stream(**asked) as stream:
            told = stream.get_final_message()
        assert (blocks(told), told.stop_reason) == (blocks(whole), whole.stop_reason)
        assert told.usage.output_tokens == whole.usage.output_tokens
        return whole

    def count(self, said: str) -> int:
        messages = [{"role": "user", "content": said}]
        return int(self.client.messages.count_tokens(model=self.model, messages=messages).input_tokens)


def blocks(said: Any) -> list[Any]:
    """Thoughts, text and calls, without what is new each time."""
    told = {
        "thinking": lambda b: b.thinking,
        "text": lambda b: b.text,
        "tool_use": lambda b: (b.name, b.input),
    }
    return [told[block.type](block) for block in said.content]


def shown(image: bytes, text: str) -> list[Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("model", [OWN, LACKING])
def test_anthropics_client_before_a_real_engine(stack, model):
    with served(stack) as mux, closing(Anthropic(mux, model)) as asks:
        assert blocks(asks.message("Hi")) == ["They greet me.\n", HELLO]
        called = asks.message("How is the weather?", tools=asks.tools)
        assert (blocks(called), called.stop_reason) == (["I must look.\n", PARIS], "tool_use")
        result = {"type": "tool_result", "tool_use_id": called.content[-1].id, "content": "sunny"}
        history = [
            {"role": "user", "content": "How is the weather?"},
            {
                "role": "assistant",
                "content": [block.model_dump(exclude_none=True) for block in called.content],
            },
            {"role": "user", "content": [result]},
        ]
        assert blocks(asks.message(history, tools=asks.tools)) == ["So it is there.\n", SUNNY]
        assert blocks(asks.message(shown(RED, "Which colour has this picture?"))) == ["The picture is red."]
        assert blocks(asks.message(shown(BLUE, "Which colour has this picture?"))) == ["The picture is blue."]
        required = asks.message("Hi", tools=asks.tools, tool_choice={"type": "any"})
        assert (blocks(required)[1:], required.stop_reason) == ([HELLO, PARIS], "tool_use")
        cut = asks.message("Hi", max_tokens=3)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
        if model == OWN:
            assert asks.count("Hi") == cut.usage.input_tokens + (cut.usage.cache_read_input_tokens or 0)


def test_what_anthropics_client_gets_of_an_engine_without_its_routes(stack):
    with served(stack) as mux, closing(Anthropic(mux, LACKING)) as asks:
        assert blocks(asks.message("Hi", thinking=asks.mute)) == [HELLO]
        both = asks.message("What is the time?", tools=asks.tools, thinking=asks.mute)
        assert (blocks(both), both.stop_reason) == ([ROME, TIME], "tool_use")
        format = {"type": "json_schema", "schema": SCHEMA}
        [shaped] = blocks(asks.message("Hi", thinking=asks.mute, output_config={"format": format}))
        assert set(json.loads(shaped)) == {"colour", "count"}
        stopped = asks.message("Hi", thinking=asks.mute, stop_sequences=["are"])
        assert blocks(stopped) == ["Hello there, how "]
        with pytest.raises(anthropic.APIStatusError, match="cannot count") as refused:
            asks.count("Hi")
        assert refused.value.status_code == 501


@pytest.mark.parametrize("model", [OWN, LACKING])
def test_an_engine_that_is_killed_is_an_error_of_each_api(stack, model):
    question = [{"role": "user", "content": "Will you go on?"}]

    def kill_at(place: int, told: Iterable[object]) -> None:
        for number, _ in enumerate(told):
            if number == place:
                docker(stack, "kill", stack.container(model))

    with served(stack) as mux:
        assert mux.chat(model, max_tokens=4)[0] == 200  # so that its end is not one right after its load
        with closing(Ollama(mux)) as asks, pytest.raises(ollama.ResponseError, match=CUT):
            kill_at(20, asks.client.chat(model, question, stream=True))
        with closing(Anthropic(mux, model)) as asks_too:
            asked = asks_too.client.messages.stream(model=model, max_tokens=100_000, messages=question)
            with pytest.raises(anthropic.APIStatusError, match=CUT), asked as stream:
                kill_at(20, stream)
