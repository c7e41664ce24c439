"""Local processes under a load: their compose file, what they answer, and how they are hurt."""

from __future__ import annotations

import os
import random
import runpy
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from tests.accounting import EMBEDDING, KINDS, Ask, Said, some_asks
from tests.crashing import engines
from tests.load import QUEUE_TIMEOUT, Engines, Load
from tests.running import Running, begin

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "tests/clients/frail-engine"
DEMO = runpy.run_path(str(ROOT / "bin" / "demo-engine"))

MODELS = {
    "a": ("a", "0", {}),
    "b": ("b", "0", {"evict_to": ["freeze", "stop"]}),
    "c": ("c", "1", {}),
    "d": ("d", "1", {"evict_to": ["freeze", "stop"]}),
    "twin-1": ("twin", "0", {}),
    "twin-2": ("twin", "1", {}),
}
"""Service -> its model, its GPU, and what else x-anvil says of it."""
TRANSLATED = ("b", "c")
"""Services whose engines do not speak Anthropic's API."""
TOKENS = (1, 3, 8, 12, 12, 20, 20, 40, 60, 150, 700, 1500)
"""How long answers are; the last one's is about as long as a drain."""


def compose(folder: Path) -> Path:
    flags = ["--load-seconds", "0.1", "--tokens-per-second", "400"]
    services = {
        name: {
            "command": [ENGINE, "--model", model, *flags],
            "working_dir": str(ROOT),
            "environment": {
                "FRAIL_RECORD": str(folder / "record"),
                **({"FRAIL_LACKS": "/v1/messages"} if name in TRANSLATED else {}),
            },
            "stop_grace_period": "3s",
            "x-anvil": {"model": model, "gpus": [gpu], "load_timeout": 60, **special},
        }
        for name, (model, gpu, special) in MODELS.items()
    }
    settings = {"runtime": "process", "project": "load-test", "queue_timeout": QUEUE_TIMEOUT}
    settings |= {"drain_timeout": 3, "max_wait": 2}
    file = folder / "compose.yaml"
    file.write_text(yaml.safe_dump({"x-anvil": settings, "services": services}, sort_keys=False))
    return file


def words_of(ask: Ask) -> tuple[str, str]:
    """What the engine says to a request, and why it ends."""
    server = SimpleNamespace(model=ask.model, has_weights=True)
    words, finish = DEMO["DemoHandler"].compose(SimpleNamespace(server=server), ask.prompt, ask.tokens)
    return "".join(words), finish


def whole(ask: Ask, said: Said) -> str:
    known = said.models - {""}
    if known - {ask.model}:
        return f"from {known}"
    if ask.kind in EMBEDDING:
        return "" if said.vectors == [DEMO["embedding"](ask.prompt, False)] else f"vectors {said.vectors}"
    text, finish = words_of(ask)
    found, wanted = (said.text, said.finish, said.tokens), (text, finish, ask.tokens)
    return "" if found == wanted else f"{found}, not {wanted}"


def part(ask: Ask, said: Said) -> str:
    text, _ = words_of(ask)
    fine = text.startswith(said.text) and not said.models - {"", ask.model}
    return "" if fine else f"not the beginning of its answer: {said.text[:200]!r} of {said.models}"


class Processes(Engines):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def running(self) -> dict[Any, str]:
        return engines(self._folder, ENGINE)

    def send(self, run: Any, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(run, number)


@contextmanager
def process_load(
    folder: Path, requests: int, draw: random.Random, tokens: Sequence[int] = TOKENS, **more: Any
) -> Iterator[Load]:
    """A load of processes below ``folder``; none of them outlives the block."""
    file = compose(folder)

    def start(*flags: str) -> Running:
        return begin(file, *flags, "--on-exit", "stop", state=folder)

    models = sorted({model for model, _, _ in MODELS.values()})
    asks = some_asks(requests, models, tokens, [*KINDS], draw)
    freezable = frozenset(model for model, _, special in MODELS.values() if "evict_to" not in special)
    about = (start, file, folder, Processes(folder), asks, whole, part, draw, freezable)
    try:
        yield Load(*about, record=folder / "record", **more)
    finally:
        for session in engines(folder, ENGINE):
            with suppress(ProcessLookupError):
                os.killpg(session, signal.SIGKILL)
