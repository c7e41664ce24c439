"""The commands, against real containers: check, ps, load, unload, logs."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.docker.conftest import Stack
from tests.docker.served import (
    BUSYBOX,
    PATIENCE,
    ask,
    client_of,
    count,
    eventually,
    is_idle,
    run_of,
    served,
    state_of,
    stream,
)
from tests.running import Running

IMAGE = "anvil-mux-test/none:1"


@pytest.fixture
def stack(llamacpp_compose: Callable[..., Stack], tmp_path: Path) -> Stack:
    missing = {**BUSYBOX, "image": IMAGE, "x-anvil": {"gpus": ["0"]}}
    return llamacpp_compose(tmp_path, models=2, services={"missing": missing})


def anvil(stack: Stack, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs `anvil-mux ARGS...` to its end."""
    command = [sys.executable, "-m", "anvil_mux", *args]
    env = {**stack.engine.env, "XDG_STATE_HOME": str(stack.file.parent)}
    return subprocess.run(command, env=env, timeout=PATIENCE, capture_output=True, text=True)


def at(mux: Running) -> str:
    return f"http://127.0.0.1:{mux.port}"


def test_check_lists_the_models_and_names_the_image_that_is_missing(stack):
    done = anvil(stack, "check", str(stack.file))
    assert done.returncode == 0
    models = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert sorted(models) == sorted(stack.models)
    assert f"image {IMAGE} is not present\n    write: docker pull {IMAGE}\n" in done.stderr
    assert done.stderr.count("is not present") == 1


def test_load_returns_when_the_model_is_resident_and_ps_shows_it(stack):
    with served(stack) as mux:
        for model in ("model-1", "model-2"):
            assert anvil(stack, "load", model, "--url", at(mux)).returncode == 0
            assert stack.up() == {model}
        shown = anvil(stack, "ps", "--json", "--url", at(mux))
        states = {name: about["state"] for name, about in json.loads(shown.stdout)["models"].items()}
        assert states == {"model-1": "stopped", "model-2": "ready", "missing": "stopped"}
        table = anvil(stack, "ps", "--url", at(mux)).stdout
        assert [line.split()[1] for line in table.splitlines() if line.startswith("model-2")] == ["ready"]


def test_load_of_what_cannot_be_loaded_fails_with_the_reason(stack):
    with served(stack) as mux:
        done = anvil(stack, "load", "missing", "--url", at(mux))
        assert done.returncode == 1
        assert f"docker pull {IMAGE}" in done.stderr


def test_unload_puts_a_model_out_and_its_next_load_starts_it_again(stack):
    with served(stack) as mux:
        assert anvil(stack, "load", "model-1", "--url", at(mux)).returncode == 0
        first = run_of(stack, "model-1")
        assert anvil(stack, "unload", "model-1", "--url", at(mux)).returncode == 0
        eventually(lambda: stack.up() == set())
        assert anvil(stack, "load", "model-1", "--url", at(mux)).returncode == 0
        assert run_of(stack, "model-1") != first


@pytest.fixture
def slow(llamacpp_compose: Callable[..., Stack], tmp_path: Path) -> Stack:
    """The first of two llama-servers takes ten minutes to load."""
    command = "sleep 600; exec llama-server -m /m/tiny.gguf --alias model-1 --host 0.0.0.0 --port 8080"
    special = {"command": ["sh", "-c", command], "stop_grace_period": "1s"}
    return llamacpp_compose(tmp_path, models=2, services={"model-1": special})


def test_unload_of_a_model_that_is_loading_stops_its_engine_and_another_can_be_loaded(slow):
    with ThreadPoolExecutor(1) as pool, served(slow) as mux:
        for _ in range(2):  # without a cool-down between
            waiting = pool.submit(ask, mux, "model-1")
            eventually(lambda: slow.up() == {"model-1"} and state_of(mux, "model-1") == "loading")
            assert anvil(slow, "unload", "model-1", "--url", at(mux)).returncode == 0
            assert "model-1 was unloaded by hand while this request waited for it" in waiting.result(PATIENCE)
            eventually(lambda: slow.up() == set() and state_of(mux, "model-1") == "stopped")
        assert mux.get("/healthz")["models"]["model-1"]["last_error"] is None
        assert ask(mux, "model-2") == ""
        assert count(mux, "anvil_model_loads", model="model-1", result="cancelled") == 2
        assert count(mux, "anvil_model_loads", model="model-1", result="failed") == 0


def test_a_load_that_nobody_waits_for_any_more_makes_room_for_another_model(slow):
    with served(slow) as mux:
        with client_of(mux) as client:
            stream(client, "model-1", 5).close()
        eventually(lambda: is_idle(mux) and slow.up() == {"model-1"})
        assert state_of(mux, "model-1") == "loading"
        assert ask(mux, "model-2") == ""
        assert slow.up() == {"model-2"}
        assert count(mux, "anvil_model_loads", model="model-1", result="cancelled") == 1


def test_logs_shows_what_the_engine_printed_while_it_runs_and_after_it_was_stopped(stack):
    with served(stack) as mux:
        for model in ("model-1", "model-2"):
            assert anvil(stack, "load", model, "--url", at(mux)).returncode == 0
        for model in ("model-1", "model-2"):
            done = anvil(stack, "logs", model, "--file", str(stack.file))
            assert done.returncode == 0
            assert "listening on http" in done.stdout
