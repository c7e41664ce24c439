"""anvil-mux ends, by a signal or a crash, and starts again beside real containers that ran on."""

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import yaml

from anvil_mux.cli.main import main
from tests.docker.conftest import Stack
from tests.docker.served import (
    BUSYBOX,
    ENDLESS,
    FOREVER,
    PATIENCE,
    ask,
    client_of,
    count,
    eventually,
    flaw_of,
    lasting,
    run_of,
    served,
    status_of,
    stream,
)

MakeStack = Callable[..., Stack]
FROZEN = {"x-anvil": {"gpus": ["0"], "evict_to": ["freeze"]}}
SLEEPER = {**BUSYBOX, "command": ["sleep", "1000"]}


@pytest.fixture
def stack(llamacpp_compose: MakeStack, tmp_path: Path) -> Stack:
    return llamacpp_compose(tmp_path, models=2, services={"model-1": ENDLESS})


def test_a_crash_loses_only_what_was_in_flight_and_the_next_start_takes_the_engine_over(stack):
    with lasting(stack) as mux, client_of(mux) as client:
        answer = stream(client, "model-1", FOREVER)
        mux.stop(signal.SIGKILL)
        with pytest.raises(openai.APIError):
            list(answer)
    run = run_of(stack, "model-1")
    assert stack.up() == {"model-1"}
    with served(stack) as mux:
        assert mux.get("/healthz")["resident"] == "model-1"
        assert ask(mux, "model-1") == ""
        assert (run_of(stack, "model-1"), count(mux, "anvil_model_loads")) == (run, 0)
        assert ask(mux, "model-2") == ""
        assert stack.up() == {"model-2"}


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_takes_frozen_containers_over_as_they_are(llamacpp_compose, tmp_path, end):
    stack = llamacpp_compose(tmp_path, models=3, services={f"model-{n}": FROZEN for n in (1, 2, 3)})
    with lasting(stack) as mux:
        for model in stack.models:
            assert ask(mux, model) == ""
        mux.stop(end)
    runs = [run_of(stack, model) for model in stack.models]
    frozen = {"model-1": "paused", "model-2": "paused", "model-3": "running"}
    assert {model: status_of(stack, model) for model in stack.models} == frozen
    with served(stack) as mux:
        states = {name: about["state"] for name, about in mux.get("/healthz")["models"].items()}
        assert states == {"model-1": "standby", "model-2": "standby", "model-3": "ready"}
        assert {model: status_of(stack, model) for model in stack.models} == frozen
        for model in stack.models:
            assert ask(mux, model) == ""
        assert [run_of(stack, model) for model in stack.models] == runs


def test_containers_that_were_left_are_stopped_by_the_command_frozen_ones_too(
    llamacpp_compose, tmp_path, monkeypatch, capsys
):
    stack = llamacpp_compose(tmp_path, models=2, services=dict.fromkeys(("model-1", "model-2"), FROZEN))
    with lasting(stack) as mux:
        for model in stack.models:
            assert ask(mux, model) == ""
    assert stack.up() == {"model-1", "model-2"}
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", stack.engine.host)
    assert main(["ps", "--url", "127.0.0.1:1"]) == 3
    assert f"left by {stack.project}: model-1, model-2 still run" in capsys.readouterr().err
    assert main(["stop", "--all"]) == 0
    assert capsys.readouterr().err == f"anvil-mux: {stack.project}: stopped model-1, model-2\n"
    assert stack.up() == set()


def test_what_was_still_loading_at_a_crash_and_does_not_answer_is_stopped_at_the_next_start(
    llamacpp_compose, tmp_path
):
    bad = {**SLEEPER, "x-anvil": {"gpus": ["0"]}}
    stack = llamacpp_compose(tmp_path, models=1, services={"bad": bad})
    with lasting(stack) as mux, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(mux.chat, "bad")
        eventually(lambda: stack.up() == {"bad"})
        mux.stop(signal.SIGKILL)
        with pytest.raises(ConnectionError):
            asked.result(PATIENCE)
    with served(stack) as mux:
        assert stack.up() == set()
        assert ask(mux, "model-1") == ""


def test_of_two_engines_on_one_gpu_one_is_adopted_and_the_other_stopped(stack):
    stack.compose("up", "--detach")
    runs = {model: run_of(stack, model) for model in stack.models}
    with served(stack) as mux:
        (stays,) = stack.up()  # the one that answers first
        (goes,) = set(stack.models) - {stays}
        assert mux.get("/healthz")["resident"] == stays
        assert run_of(stack, stays) == runs[stays]
        mux.tells(f"stopping {goes}: it cannot stay beside the others")
        for model in (stays, goes):
            assert ask(mux, model) == ""


def test_an_engine_that_the_file_no_longer_has_is_stopped_at_the_next_start(stack):
    with lasting(stack) as mux:
        assert ask(mux, "model-2") == ""
        mux.stop(signal.SIGKILL)
    content = yaml.safe_load(stack.file.read_text())
    del content["services"]["model-2"]
    stack.file.write_text(yaml.safe_dump(content))
    with served(stack) as mux:
        assert stack.up() == set()
        assert ask(mux, "model-1") == ""


def test_services_of_the_project_that_serve_no_model_are_left_alone(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=1, services={"web": {**SLEEPER, "ports": None}})
    stack.compose("up", "--detach", "web")
    run = run_of(stack, "web")
    with served(stack, "--on-exit", "stop") as mux:
        assert ask(mux, "model-1") == ""
        assert stack.up() == {"model-1", "web"}
    assert (stack.up(), run_of(stack, "web")) == ({"web"}, run)


@pytest.mark.parametrize(("on_exit", "left"), [("keep", {"model-1"}), ("stop", set())])
def test_sigterm_lets_a_stream_end_and_then_does_with_the_engine_as_on_exit_says(stack, on_exit, left):
    with lasting(stack, "--on-exit", on_exit) as mux, client_of(mux) as client:
        answer = stream(client, "model-1", 3000)
        mux.process.send_signal(signal.SIGTERM)
        assert flaw_of(answer, "model-1", 3000) == ""
        assert mux.process.wait(PATIENCE) == 0
    assert stack.up() == left


def test_a_stream_that_outlasts_the_drain_of_a_sigterm_ends_with_an_error(stack):
    with lasting(stack, "--on-exit", "stop", "--drain-timeout", "1") as mux, client_of(mux) as client:
        answer = stream(client, "model-1", FOREVER)
        mux.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="anvil-mux shut down before this request ended"):
            list(answer)
        assert mux.process.wait(PATIENCE) == 0
    assert stack.up() == set()
