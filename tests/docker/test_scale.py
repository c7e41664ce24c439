"""A scaled service on a real Docker Engine: each of its containers is a replica."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docker.conftest import Stack
from tests.docker.served import (
    ENDLESS,
    FOREVER,
    ask,
    client_of,
    docker,
    eventually,
    lasting,
    served,
    stream,
)
from tests.running import Running

MODEL = "model-1"
"""The service and what it serves."""

MakeStack = Callable[..., Stack]


@pytest.fixture
def scaled(llamacpp_compose: MakeStack, tmp_path: Path) -> Callable[..., Stack]:
    """A stack of one llama-server, three times, on no GPU."""

    def make(**special: Any) -> Stack:
        described = {"scale": 3, "x-anvil": {"gpus": [], "preload": True}, **special}
        return llamacpp_compose(tmp_path, models=1, slots=1, services={MODEL: described})

    return make


def states(mux: Running) -> dict[str, str]:
    found = mux.get("/healthz")["models"][MODEL]["backends"]
    return {name: about["state"] for name, about in found.items()}


def names(*numbers: int) -> set[str]:
    return {f"{MODEL}-{number}" for number in numbers}


def up(stack: Stack) -> set[str]:
    """The containers that are up, without the project's name."""
    found = stack.engine.containers(stack.project)
    return {each["Names"][0].removeprefix(f"/{stack.project}-") for each in found}


def ready(mux: Running, *numbers: int) -> bool:
    return {name for name, state in states(mux).items() if state == "ready"} == names(*numbers)


@pytest.mark.parametrize("ports", [["127.0.0.1::8080"], None, ["127.0.0.1:18431-18433:8080"]])
def test_requests_go_to_every_container_of_a_scaled_service(scaled, ports):
    stack = scaled(ports=ports)
    with served(stack) as mux:
        eventually(lambda: ready(mux, 1, 2, 3))
        assert up(stack) == names(1, 2, 3)
        with client_of(mux) as client:
            streams = [stream(client, MODEL, 200) for _ in range(3)]
            used = {each.response.headers["x-anvil-backend"].partition(";")[0] for each in streams}
            assert used == names(1, 2, 3)
            for each in streams:
                list(each)


def test_a_replica_that_is_killed_comes_back_alone(scaled):
    stack = scaled()
    with served(stack) as mux:
        eventually(lambda: ready(mux, 1, 2, 3))
        docker(stack, "kill", f"{stack.project}-{MODEL}-2")
        eventually(lambda: ready(mux, 1, 3))
        assert up(stack) == names(1, 3)
        assert ask(mux, MODEL) == ""


def test_a_restarted_anvil_mux_takes_over_each_container(scaled):
    stack = scaled()
    with lasting(stack) as first:
        eventually(lambda: ready(first, 1, 2, 3))
        docker(stack, "kill", f"{stack.project}-{MODEL}-1")
        eventually(lambda: ready(first, 2, 3))
        first.stop(signal.SIGKILL)
    begun = {each["Names"][0]: each["Id"] for each in stack.engine.containers(stack.project)}
    with served(stack) as second:
        eventually(lambda: ready(second, 1, 2, 3))
        found = {each["Names"][0]: each["Id"] for each in stack.engine.containers(stack.project)}
        assert begun.items() <= found.items()
        assert ask(second, MODEL) == ""


def test_a_container_that_was_removed_is_made_again_beside_the_others(scaled):
    stack = scaled()
    with lasting(stack) as first:
        eventually(lambda: ready(first, 1, 2, 3))
        docker(stack, "rm", "--force", f"{stack.project}-{MODEL}-2")
        eventually(lambda: ready(first, 1, 3))
        first.stop(signal.SIGKILL)
    with served(stack) as second:
        eventually(lambda: ready(second, 1, 2, 3))
        assert up(stack) == names(1, 3, 4)


def scale(stack: Stack, mux: Running, count: int) -> None:
    """Writes another scale into the file, and has it take effect."""
    written = yaml.safe_load(stack.file.read_text())
    written["services"][MODEL]["scale"] = count
    stack.file.write_text(yaml.safe_dump(written))
    assert mux.request("POST", "/reload")[0] == 200


def test_another_scale_takes_effect_while_those_that_stay_go_on(scaled):
    stack = scaled(scale=2, **ENDLESS)
    with served(stack) as mux, client_of(mux) as client:
        eventually(lambda: ready(mux, 1, 2))
        with stream(client, MODEL, FOREVER) as answer:
            next(answer)
            scale(stack, mux, 3)
            eventually(lambda: ready(mux, 1, 2, 3))
            assert next(answer)
            scale(stack, mux, 2)
            eventually(lambda: up(stack) == names(1, 2))
            assert next(answer)
