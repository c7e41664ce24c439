"""Real SDKs against a mux whose models load slowly, fail to load, are put out and die within an answer.

Their user sees text, or an error that says what happened: never silence, an empty success, or half an
answer that looks like a whole one. `bin/test clients` makes the environments that they live in.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.running import Running, serving

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PYTHON = os.environ.get("ANVIL_CLIENTS_PYTHON", "")
NODE = os.environ.get("ANVIL_CLIENTS_NODE", "")
GUARD = 240.0
PORT_TAKEN = "Address already in use"
"""Somebody else on this machine took the port that was free a moment ago."""
FEW = 7
"""As many tokens as an answer has of itself."""

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not PYTHON, reason="ANVIL_CLIENTS_PYTHON names no Python with the clients"),
]

WHOLE = ["py openai", "py anthropic", "py ollama", "js openai", "js ai"]
STREAMS = [
    "py openai-stream",
    "py openai-async",
    "py anthropic-stream",
    "py ollama-stream",
    "py litellm-stream",
    "py langchain-async",
    "js openai-stream",
    "js anthropic-stream",
    "js ollama-stream",
    "js ai-stream",
]

Outcome = dict[str, Any]


def engine(
    model: str, *more: str, tokens: int = 2000, load: float = 0.1, **environment: str
) -> dict[str, Any]:
    program = "tests/clients/frail-engine" if environment else "bin/demo-engine"
    flags = ["--model", model, "--load-seconds", str(load), "--tokens-per-second", str(tokens)]
    return {
        "command": [program, *flags, *more],
        "working_dir": str(ROOT),
        "environment": environment,
        "x-anvil": {"gpus": ["0"]},
    }


@pytest.fixture(scope="module")
def mux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("clients")
    services = {
        "quick": engine("quick"),
        "slow": engine("slow", load=2.5),
        "long": engine("long", tokens=100),
        "plain": engine("plain", FRAIL_LACKS="/v1/messages"),
        "frail": engine("frail", tokens=50, FRAIL_DIES_AFTER="3"),
        "broken": {**engine("broken"), "command": ["sh", "-c", "echo no such file; exit 1"]},
        "doomed": {**engine("doomed"), "command": ["sh", "-c", "sleep 2; echo out of memory; exit 1"]},
    }
    settings = {
        "runtime": "process",
        "project": f"clients-{secrets.token_hex(4)}",
        "policy": "eager",
        "loading_grace": 0.3,
        "drain_timeout": 0.5,
    }
    file = folder / "compose.yaml"
    file.write_text(yaml.safe_dump({"x-anvil": settings, "services": services}))
    with serving(file, state=folder) as running:
        yield running


def ask(mux: Running, client: str, model: str, tokens: int = FEW) -> Outcome:
    kind, name = client.split()
    program = [PYTHON, str(HERE / "ask.py")] if kind == "py" else ["node", NODE]
    if kind == "js" and not (NODE and shutil.which("node")):
        pytest.skip("there is no Node here")
    url = f"http://127.0.0.1:{mux.port}"
    done = subprocess.run(
        [*program, name, url, model, str(tokens)], capture_output=True, text=True, timeout=GUARD, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def said(model: str) -> str:
    return f"This is {model}. You said: Say hello."


def load(mux: Running, model: str) -> None:
    """``model`` is resident, also if a port was taken on a busy machine and its first load failed."""
    until = time.monotonic() + GUARD
    while (answer := mux.chat(model, max_tokens=1))[0] != 200:
        assert time.monotonic() < until, answer


def put_out(mux: Running) -> None:
    """Another model is resident, so that whoever comes next has to wait for a load."""
    load(mux, "quick")


@pytest.mark.parametrize("client", STREAMS + WHOLE)
def test_a_load_is_waited_for(mux: Running, client: str) -> None:
    outcome: Outcome = {}
    for _ in range(3):
        put_out(mux)
        outcome = ask(mux, client, "slow")
        if PORT_TAKEN not in outcome.get("message", ""):
            break
    assert outcome == {"text": said("slow")}


@pytest.mark.parametrize("client", ["py anthropic", "py anthropic-stream", "js anthropic-stream"])
def test_an_engine_without_anthropics_route_is_none_the_less_its(mux: Running, client: str) -> None:
    assert ask(mux, client, "plain") == {"text": said("plain")}


@pytest.mark.parametrize("client", STREAMS + WHOLE)
@pytest.mark.parametrize(("model", "why"), [("broken", "no such file"), ("doomed", "out of memory")])
def test_a_load_that_fails_is_an_error_that_says_why(mux: Running, client: str, model: str, why: str) -> None:
    put_out(mux)
    outcome = ask(mux, client, model)
    assert "text" not in outcome, outcome
    assert why in outcome["message"] or "cool" in outcome["message"], outcome


@pytest.mark.parametrize("client", STREAMS + WHOLE)
def test_an_engine_that_dies_within_its_answer_is_an_error(mux: Running, client: str) -> None:
    outcome = ask(mux, client, "frail")
    assert "text" not in outcome, outcome
    assert outcome["message"]


@pytest.mark.parametrize("client", STREAMS)
def test_being_put_out_for_another_model_is_an_error_or_the_whole_answer(mux: Running, client: str) -> None:
    load(mux, "long")
    with ThreadPoolExecutor(1) as pool:
        outcome: Future[Outcome] = pool.submit(ask, mux, client, "long", 300)
        while mux.get("/healthz")["models"]["long"]["leases"] == 0:
            assert not outcome.done(), outcome.result()
        put_out(mux)
        found = outcome.result(GUARD)
    if "text" in found:
        assert found["text"].endswith(" 293"), found
    else:
        assert "put out" in found["message"] or found["error"], found


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
@pytest.mark.parametrize(("model", "code"), [("slow", 0), ("frail", 18), ("doomed", 18)])
def test_curl_tells_a_whole_stream_from_a_cut_one(mux: Running, model: str, code: int) -> None:
    put_out(mux)
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    url = f"http://127.0.0.1:{mux.port}/v1/chat/completions"
    done = subprocess.run(
        ["curl", "-sN", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)],
        capture_output=True,
        text=True,
        timeout=GUARD,
        check=False,
    )
    assert done.returncode == code
    assert ('"error"' in done.stdout) == (code != 0)
