"""Podman in Docker's place: Compose, and anvil-mux, through its socket, as the user who runs the tests."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docker.conftest import IMAGE_TIMEOUT, REAL, Engine, Stack, plain_stack
from tests.docker.served import PATIENCE, ask, count, eventually, lasting, served, state_of

pytestmark = [pytest.mark.podman, pytest.mark.skipif(not shutil.which("podman"), reason="there is no podman")]


@pytest.fixture(scope="module")
def podman() -> Iterator[Engine]:
    """A Podman with a store of its own, which answers at its socket, with the test images."""
    folder = Path(tempfile.mkdtemp(prefix="anvil-podman-"))  # a socket's path has 107 bytes at most
    engine = Engine(f"unix://{folder}/podman.sock")
    own = ["podman", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]
    log = (folder / "log").open("w")
    service = subprocess.Popen([*own, "system", "service", "-t", "0", engine.host], stdout=log, stderr=log)
    try:
        eventually((folder / "podman.sock").exists)
        command = [str(REAL / "llamacpp-image")]
        subprocess.run(command, env=engine.env, check=True, timeout=IMAGE_TIMEOUT)
        yield engine
        subprocess.run([*own, "rm", "--all", "--force"], check=True, timeout=PATIENCE)
    finally:
        service.terminate()
        service.wait(PATIENCE)
        log.close()
        namespace = ["podman", "unshare"] if os.geteuid() else []  # its files belong to other ids
        subprocess.run([*namespace, "rm", "-rf", str(folder)], check=True, timeout=PATIENCE)


@pytest.fixture
def stack(podman: Engine, tmp_path: Path) -> Iterator[Stack]:
    made = plain_stack(tmp_path, 2, podman)
    yield made
    podman.remove(made.project)


@pytest.fixture
def run_of(stack: Stack, podman: Engine) -> Callable[[], tuple[str, str]]:
    """Tells apart any two runs of the first model's container."""

    def found() -> tuple[str, str]:
        about = podman.request("GET", f"/containers/{stack.container('model-1')}/json")
        return about["Id"], about["State"]["StartedAt"]

    return found


def test_models_take_turns(stack):
    with stack.watched() as seen, served(stack) as mux:
        for model in ("model-1", "model-2", "model-1"):
            assert ask(mux, model) == ""
    assert (seen.most, seen.missed) == (1, 0), seen.crowded
    assert seen.names == {stack.container(model) for model in stack.models}


def test_an_engine_is_taken_over_after_a_kill(stack, run_of):
    with lasting(stack) as mux:
        assert ask(mux, "model-1") == ""
        run = run_of()
        mux.stop(signal.SIGKILL)
    with served(stack) as mux:
        assert ask(mux, "model-1") == ""
        assert run_of() == run
        assert count(mux, "anvil_model_loads") == 0


def test_an_engine_that_dies_is_seen_and_loaded_again(stack, podman):
    with served(stack) as mux:
        assert ask(mux, "model-1") == ""
        podman.request("POST", f"/containers/{stack.container('model-1')}/kill", signal="SIGKILL")
        eventually(lambda: state_of(mux, "model-1") == "stopped")
        assert ask(mux, "model-1") == ""


def test_the_log_of_an_engine_is_shown(stack):
    with served(stack) as mux:
        assert ask(mux, "model-1") == ""
        command = [
            sys.executable,
            "-m",
            "anvil_mux",
            "logs",
            "model-1",
            "--url",
            f"http://127.0.0.1:{mux.port}",
        ]
        shown = subprocess.run(command, check=True, timeout=PATIENCE, capture_output=True, text=True).stdout
    assert "listening on http" in shown
