"""A load on real llama-server containers: killed and frozen, reloads, and a kill -9 of anvil-mux itself."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.accounting import EMBEDDING, KINDS, QUEUE_TIMEOUT, Ask, Engines, Load, Said, some_asks
from tests.docker.conftest import Stack
from tests.running import Running, begin

REQUESTS = int(os.environ.get("ANVIL_LOAD_REQUESTS", "0"))
SEED = int(os.environ.get("ANVIL_LOAD_SEED", "1"))
TWIN = "twin"
MODELS = {
    "model-1": ("model-1", "0", {}),
    "model-2": ("model-2", "0", {"evict_to": ["freeze", "stop"]}),
    "model-3": ("model-3", "1", {}),
    "model-4": ("model-4", "1", {"evict_to": ["freeze", "stop"]}),
    "model-5": (TWIN, "0", {}),
    "model-6": (TWIN, "1", {}),
}
"""Service -> its model, its GPU, and what else x-anvil says of it."""
EXACT = ["--ignore-eos", "--grammar", "root ::= [a-z]+", "-lv", "10"]
"""A token is a letter, answers are as long as they are asked to be, and OpenAI's say what was asked."""
TOKENS = (1, 3, 8, 12, 20, 40, 60, 150, 700)


@pytest.fixture
def stack(llamacpp_compose: Callable[..., Stack], tmp_path: Path) -> Stack:
    made = llamacpp_compose(tmp_path, models=len(MODELS))
    written = yaml.safe_load(made.file.read_text())
    written["x-anvil"] = {"queue_timeout": QUEUE_TIMEOUT, "drain_timeout": 3, "max_wait": 2}
    for name, about in written["services"].items():
        model, gpu, special = MODELS[name]
        about["command"] = [model if word == name else word for word in about["command"]] + EXACT
        about["stop_grace_period"] = "3s"
        about["x-anvil"] = {"model": model, "gpus": [gpu], **special}
    made.file.write_text(yaml.safe_dump(written, sort_keys=False))
    return made


def whole(ask: Ask, said: Said) -> str:
    """The text is random; its length is not, nor, where the API has a place for it, what was asked."""
    found = said.models, said.finish, said.tokens, len(said.text)
    if found != ({ask.model}, "length", ask.tokens, ask.tokens):
        return f"{found}, not {ask.tokens} tokens of {ask.model}"
    if KINDS[ask.kind].api != "openai":
        return ""
    asked = [each.get("__verbose", {}).get("prompt", "") for each in said.documents]
    return "" if any(ask.prompt in each for each in asked) else f"an answer to {asked}"


def part(ask: Ask, said: Said) -> str:
    return "" if said.models <= {ask.model} else f"from {said.models}"


class Containers(Engines):
    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    def running(self) -> dict[Any, str]:
        found = self._stack.engine.containers(self._stack.project)
        services = {each["Id"]: each["Labels"]["com.docker.compose.service"] for each in found}
        return {id: MODELS[service][0] for id, service in services.items()}

    def send(self, run: Any, number: signal.Signals) -> None:
        with suppress(RuntimeError):  # it has ended
            self._stack.engine.request("POST", f"/containers/{run}/kill", signal=number.name)


@pytest.mark.load
@pytest.mark.skipif(not REQUESTS, reason="bin/test load sets ANVIL_LOAD_REQUESTS")
def test_every_answer_is_accounted_for(stack: Stack, tmp_path: Path) -> None:
    draw = random.Random(SEED)

    def start(*flags: str) -> Running:
        return begin(stack.file, *flags, "--on-exit", "stop", state=tmp_path, environ=stack.engine.env)

    models = sorted({model for model, _, _ in MODELS.values()})
    asks = some_asks(REQUESTS, models, TOKENS, [kind for kind in KINDS if kind not in EMBEDDING], draw)
    freezable = frozenset(model for model, _, special in MODELS.values() if "evict_to" not in special)
    load = Load(start, stack.file, tmp_path, Containers(stack), asks, whole, part, draw, freezable)
    load.run()
    print(f"\nANVIL_LOAD_SEED={SEED}\n{load.table()}")
    assert not any(load.flaws.values()), load.report()
