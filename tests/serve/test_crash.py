"""Local processes: anvil-mux is killed at random moments and loses nothing but what was in flight."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.crashing import PATIENCE, Rounds, engines
from tests.running import Running, begin

ROUNDS = int(os.environ.get("ANVIL_CRASH_ROUNDS", "2"))
SEED = int(os.environ.get("ANVIL_CRASH_SEED", "1"))
ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ("a", "b", "c")
FROZEN = ("b", "c")
"""Those that are not stopped when they are evicted."""


def compose(folder: Path) -> Path:
    flags = ["--load-seconds", "0.1", "--tokens-per-second", "400"]
    services = {
        name: {
            "command": ["bin/demo-engine", "--model", name, *flags],
            "working_dir": str(ROOT),
            "x-anvil": {"gpus": ["0"], "evict_to": ["freeze", "stop"] if name in FROZEN else ["stop"]},
        }
        for name in MODELS
    }
    file = folder / "compose.yaml"
    settings = {"runtime": "process", "project": "crash-test", "policy": "eager"}
    file.write_text(yaml.safe_dump({"x-anvil": settings, "services": services}))
    return file


def runs(folder: Path, *, frozen: bool) -> dict[str, object]:
    """The engines that are frozen, or awake: model -> session."""
    found: dict[str, object] = {}
    for session, model in engines(folder).items():
        with suppress(OSError):
            if is_frozen(Path(f"/proc/{session}/status").read_text()) == frozen:
                found[model] = session
    return found


def is_frozen(status: str) -> bool | None:
    """None: it has ended. Who is told to stop runs no more, although it may be a while until it stands."""
    about = dict(line.split(":\t", 1) for line in status.splitlines())
    pending = int(about["SigPnd"], 16) | int(about["ShdPnd"], 16)
    if about["State"][0] in "ZX":
        return None
    return about["State"][0] == "T" or bool(pending & 1 << signal.SIGSTOP - 1)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for session in engines(tmp_path):
        with suppress(ProcessLookupError):
            os.killpg(session, signal.SIGKILL)


@pytest.mark.crash
def test_no_crash_leaves_an_orphan_two_residents_or_half_a_file(folder):
    file = compose(folder)

    def start(*flags: str) -> Running:
        return begin(file, *flags, "--access-log", "off", state=folder)

    state = folder / "anvil-mux" / "crash-test"
    up, frozen = (partial(runs, folder, frozen=frozen) for frozen in (False, True))
    rounds = Rounds(start, up, frozen, state, MODELS, random.Random(SEED))
    crowded: list[dict[str, object]] = []
    over = threading.Event()

    def witness() -> None:
        """Looks twice: one may be evicted, and another wake, while /proc is read."""
        while not over.wait(0.01):
            seen = up()
            if len(seen) > 1 and len(still := dict(seen.items() & up().items())) > 1:
                crowded.append(still)

    thread = threading.Thread(target=witness, daemon=True)
    thread.start()
    try:
        rounds.run(ROUNDS)
    finally:
        over.set()
        thread.join(PATIENCE)
    print(rounds.seen)
    assert rounds.flaws == []
    assert crowded == []
