"""llama-server containers under a load: their compose file, what they answer and log, how they are hurt."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from anvil_mux.host.seam import MACHINE
from tests.accounting import EMBEDDING, KINDS, Ask, Said, some_asks
from tests.docker.conftest import REAL, OwnEngine, Stack
from tests.load import QUEUE_TIMEOUT, Engines, Load
from tests.running import Running, begin

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
EXACT = ["--ignore-eos", "--grammar", "root ::= [a-z]+", "-lv", "10", "--log-disable"]
"""A token is a letter, answers are as long as they are asked to be, and OpenAI's say what was asked."""
RECORDING = {"LD_PRELOAD": "/record/recorder.so", "LOAD_RECORD": "/record/record"}
"""The environment in which an engine writes down which requests it had: tests/real/recorder.c."""
TOKENS = (1, 3, 8, 12, 20, 40, 60, 150, 700)


def describe(stack: Stack, record: Path, max_wait: float) -> None:
    """Writes what is special about this load into the stack's compose file."""
    written = yaml.safe_load(stack.file.read_text())
    written["x-anvil"] = {"queue_timeout": QUEUE_TIMEOUT, "drain_timeout": 3, "max_wait": max_wait}
    for name, about in written["services"].items():
        model, gpu, special = MODELS[name]
        about["command"] = [model if word == name else word for word in about["command"]] + EXACT
        about["volumes"] = [*about["volumes"], f"{record}:/record"]
        about["environment"] = {**RECORDING, "LOAD_MODEL": model}
        about["stop_grace_period"] = "3s"
        about["x-anvil"] = {"model": model, "gpus": [gpu], "load_timeout": 60, **special}
    stack.file.write_text(yaml.safe_dump(written, sort_keys=False))


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


def build_recorder(folder: Path) -> None:
    """The library of RECORDING, in a folder that the containers see as /record, and so does the host."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the record of the engines needs a C compiler"
    folder.mkdir()
    flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", str(REAL / "recorder.c")]
    subprocess.run([compiler, *flags, "-o", str(folder / "recorder.so"), "-ldl"], check=True)
    (folder / "record").touch()


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


class ContainersOfTheirOwn(Containers):
    """Containers whose Docker Engine may go away: restarted or killed, with live-restore or without.

    Without it containers end with a restart, and with the start after a kill. With it they run on, and their
    published ports, which dockerd's own children forward, are back with it.
    """

    def __init__(self, stack: Stack, own: OwnEngine) -> None:
        super().__init__(stack)
        self._own = own

    def go_away(self, draw: random.Random, tell: Callable[[str], None]) -> None:
        if draw.random() < 0.5:
            tell("SIGKILL dockerd")
            self._own.kill()
        else:
            tell("SIGTERM dockerd")
            self._own.stop()
        threading.Event().wait(draw.choice((0.0, 1.0, 4.0)))
        flags = draw.choice(("", "--live-restore"))
        self._own.start(flags)
        self._own.forget_starts()
        up = sorted(self.running().values())
        tell(f"dockerd is back, {flags or 'without --live-restore'}; there run {up}")


def container_load(
    stack: Stack,
    engines: Engines,
    folder: Path,
    requests: int,
    draw: random.Random,
    tokens: Sequence[int] = TOKENS,
    max_wait: float = 2,
    **more: Any,
) -> Load:
    """A load of the stack's containers; whoever made the stack removes them."""
    written = folder / "written"
    build_recorder(written)
    describe(stack, written, max_wait)

    # A machine of its own: its GPUs are not those of another load that goes on beside it.
    environ = stack.engine.env | {MACHINE: f"{stack.engine.env.get(MACHINE, '')}/containers"}

    def start(*flags: str) -> Running:
        return begin(stack.file, *flags, "--on-exit", "stop", state=folder, environ=environ)

    models = sorted({model for model, _, _ in MODELS.values()})
    asks = some_asks(requests, models, tokens, [kind for kind in KINDS if kind not in EMBEDDING], draw)
    freezable = frozenset(model for model, _, special in MODELS.values() if "evict_to" not in special)
    about = (start, stack.file, folder, engines, asks, whole, part, draw, freezable)
    return Load(*about, record=written / "record", **more)
