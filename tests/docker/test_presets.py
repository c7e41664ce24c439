"""Presets, LoRA adapters and keep_alive on real llama-servers, through the clients of each API."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import ollama
import pytest
import yaml

from tests.docker.conftest import MODELS, REAL, Stack
from tests.docker.served import PATIENCE, client_of, count, eventually, run_of, served, state_of
from tests.running import Running

SYSTEM = {"role": "system", "content": "Answer in verse."}
BASE, OTHER = "model-1", "model-2"
USER = [{"role": "user", "content": "Tell me of apples and pears."}]
NAMES = [BASE, "short", "verse", "law", "sql"]


@pytest.fixture(scope="session")
def adapters() -> tuple[Path, Path]:
    """Two adapters of the tiny models, made at their first use."""
    MODELS.mkdir(parents=True, exist_ok=True)
    made = MODELS / "lora-1.gguf", MODELS / "lora-2.gguf"
    for seed, path in enumerate(made, 1):
        subprocess.run([sys.executable, REAL / "tiny_lora.py", str(seed), path], check=True, timeout=PATIENCE)
    return made


@pytest.fixture
def stack(llamacpp_compose: Callable[..., Stack], adapters: tuple[Path, Path], tmp_path: Path) -> Stack:
    made = llamacpp_compose(tmp_path, models=2, slots=1)
    said = yaml.safe_load(made.file.read_text())
    base = said["services"][BASE]
    base["command"] += ["--lora", "/m/sql.gguf", "--lora-scaled", "/m/law.gguf:0.5", "--cache-ram", "0"]
    base["volumes"] += [f"{adapters[0]}:/m/sql.gguf:ro", f"{adapters[1]}:/m/law.gguf:ro"]
    base["x-anvil"] |= {
        "set": {"ignore_eos": True},
        "presets": {"short": {"set": {"max_tokens": 3}}, "verse": {"system": SYSTEM["content"]}},
        "loras": {"sql": "/m/sql.gguf", "law": "/m/law.gguf"},
    }
    made.file.write_text(yaml.safe_dump(said, sort_keys=False))
    return made


@pytest.fixture
def mux(stack: Stack) -> Iterator[Running]:
    with served(stack) as running:
        yield running


def ask(mux: Running, path: str, **said: Any) -> dict[str, Any]:
    status, _, body = mux.request("POST", path, {"temperature": 0, "max_tokens": 24, **said})
    assert status == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


@contextmanager
def ollamas_client(mux: Running) -> Iterator[ollama.Client]:
    client = ollama.Client(f"http://127.0.0.1:{mux.port}")
    with closing(client._client):
        yield client


def chat(mux: Running, model: str, **said: Any) -> str:
    found = ask(mux, "/v1/chat/completions", model=model, messages=USER, **said)
    return str(found["choices"][0]["message"]["content"])


def test_adapters_answer_under_their_names_at_one_engine_and_none_answers_for_another(mux, stack):
    said = {name: chat(mux, name, cache_prompt=False) for name in (BASE, "sql", "law")}
    assert len(set(said.values())) == 3
    run = run_of(stack, BASE)
    for name in ("sql", BASE, "law", "sql", "law", BASE, BASE, "sql"):
        assert chat(mux, name) == said[name], name
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{mux.port}", api_key="none") as client:
        for name in ("sql", BASE):
            asked: Any = {"model": name, "messages": USER, "max_tokens": 24, "extra_body": {"temperature": 0}}
            assert client.messages.create(**asked).content[0].text == said[name]
    with ollamas_client(mux) as own:
        options = {"temperature": 0, "num_predict": 24}
        assert own.chat("law", USER, options=options)["message"]["content"] == said["law"]
    assert run_of(stack, BASE) == run
    assert count(mux, "anvil_model_loads", model=BASE, result="ok") == 1


def test_presets_hold_in_every_api(mux, stack):
    url = f"http://127.0.0.1:{mux.port}"
    with client_of(mux) as client:
        assert [model.id for model in client.models.list()] == [*NAMES, OTHER]
        answer = client.chat.completions.create(model="short", messages=USER, max_tokens=50)
        assert answer.usage.completion_tokens == 3
        assert client.completions.create(model="short", prompt="Hi").usage.completion_tokens == 3
        verse = client.chat.completions.create(model="verse", messages=USER, max_tokens=1).usage.prompt_tokens
        told = client.responses.create(model="verse", input=USER[0]["content"], max_output_tokens=16)
        assert told.usage.input_tokens == verse
    with_system = ask(mux, "/v1/chat/completions", model=BASE, messages=[SYSTEM, *USER])
    assert with_system["usage"]["prompt_tokens"] == verse
    with anthropic.Anthropic(base_url=url, api_key="none") as theirs:
        asked: Any = {"model": "short", "messages": USER, "max_tokens": 50}
        assert theirs.messages.create(**asked).usage.output_tokens == 3
    with ollamas_client(mux) as own:
        assert [model.model for model in own.list().models] == [*NAMES, OTHER]
        assert own.chat("short", USER)["eval_count"] == 3
        options = {"num_predict": 1}
        assert own.generate("verse", USER[0]["content"], options=options)["prompt_eval_count"] == verse
    assert count(mux, "anvil_requests", model=BASE, preset="short") == 4
    assert mux.get("/healthz")["models"][BASE]["presets"] == NAMES[1:]


def test_other_presets_take_effect_while_the_engine_runs_on(mux, stack):
    assert ask(mux, "/v1/completions", model="short", prompt="Hi")["usage"]["completion_tokens"] == 3
    run = run_of(stack, BASE)
    stack.file.write_text(stack.file.read_text().replace("max_tokens: 3", "max_tokens: 5"))
    assert mux.request("POST", "/reload")[0] == 200
    assert ask(mux, "/v1/completions", model="short", prompt="Hi")["usage"]["completion_tokens"] == 5
    assert run_of(stack, BASE) == run


def test_keep_alive_lets_a_real_engine_go_when_it_ends(mux, stack):
    with ollamas_client(mux) as own:
        own.generate("short", "Hi", keep_alive="1h")
        assert [model.model for model in own.ps().models] == [BASE]
        own.generate(BASE, keep_alive="1s")
        eventually(lambda: state_of(mux, BASE) == "stopped")
        assert stack.up() == set()
        own.generate(BASE, keep_alive=-1)
    assert ask(mux, "/v1/completions", model=OTHER, prompt="Hi", max_tokens=1)
    assert stack.up() == {OTHER}
