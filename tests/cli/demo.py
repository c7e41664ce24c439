"""Demo engines, and a running anvil-mux that serves them, for the tests of commands."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from anvil_mux.cli.main import main
from anvil_mux.host.runs import process_ids, stat_of
from tests.running import Running, seen, serving

ROOT = Path(__file__).resolve().parent.parent.parent
TIMEOUT = 120.0


PROJECT = "cli-test"


def compose(
    folder: Path,
    *names: str,
    tokens_per_second: float = 2000,
    load_seconds: float = 0.1,
    **top: object,
) -> Path:
    """A compose file of demo engines that share one GPU."""
    flags = ["--load-seconds", str(load_seconds), "--tokens-per-second", str(tokens_per_second)]
    services = {
        name: {
            "command": ["bin/demo-engine", "--model", name, *flags],
            "working_dir": str(ROOT),
            "x-anvil": {"gpus": ["0"]},
        }
        for name in names or ("a", "b")
    }
    file = folder / "compose.yaml"
    settings = {"runtime": "process", "project": PROJECT, **top}
    file.write_text(yaml.safe_dump({"x-anvil": settings, "services": services}))
    return file


class Cli:
    """Commands that run in this process, and what each of them printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int = 0) -> pytest.CaptureResult[str]:
        assert main([*map(str, words)]) == code
        return self._capsys.readouterr()

    def json(self, command: str, *words: object) -> Any:
        return json.loads(self(command, "--json", *words).out)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state folder; whatever a test left running is killed."""
    yield tmp_path
    for lock in tmp_path.glob(f"anvil-mux/{PROJECT}/lock"):
        with suppress(OSError):
            pid = int(lock.read_text())
            if str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)
    for file in tmp_path.glob(f"anvil-mux/{PROJECT}/*.json"):
        with suppress(ProcessLookupError):
            os.killpg(json.loads(file.read_text())["pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def mux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("cli")
    with serving(compose(folder), state=folder) as running:
        yield running


@pytest.fixture
def url(mux: Running) -> str:
    return f"http://127.0.0.1:{mux.port}"


def eventually(so: Callable[[], bool]) -> None:
    """What the program tells after an answer may come a moment later."""
    assert seen(so, bool)


def affinities(process: int) -> list[set[int]]:
    """The CPUs of each of its threads; threads of connections may end at any moment."""
    found = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        with suppress(ProcessLookupError):
            found.append(os.sched_getaffinity(int(thread.name)))
    return found


def engine_pid(state: Path, name: str) -> int:
    """Return the process that is the engine of a service."""
    return engine_of(json.loads((state / "anvil-mux" / PROJECT / f"{name}.json").read_text())["pid"])


def engine_of(launcher: int) -> int:
    """Return the first child of a launcher, or the launcher if its engine has ended."""
    stats = [(stat, pid) for pid in process_ids() if (stat := stat_of(pid))]
    children = [(stat.started, pid) for stat, pid in stats if stat.parent == launcher]
    return min(children, default=(0, launcher))[1]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def run(file: Path, *flags: str, state: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """`anvil-mux serve` that is expected not to serve."""
    command = [sys.executable, "-m", "anvil_mux", "serve", str(file), *flags]
    env = {**os.environ, "XDG_STATE_HOME": str(state), **environ}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT)


@contextmanager
def stream(running: Running, model: str, tokens: int) -> Iterator[http.client.HTTPResponse]:
    """A stream whose first event has come."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT)
    words = " ".join(["word"] * tokens)
    body = {
        "model": model,
        "stream": True,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": words}],
    }
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        assert response.status == 200
        response.readline()
        yield response
    finally:
        connection.close()
