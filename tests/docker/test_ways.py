"""Standby levels with real llama-servers in real containers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from anvil_mux.config.service import Service
from anvil_mux.errors import BackendError
from anvil_mux.host import engines
from anvil_mux.host.containers import ContainerRuntime
from anvil_mux.host.levels import Swapper
from anvil_mux.host.seam import Evicted, Loaded
from tests.docker.conftest import Stack
from tests.docker.test_compose_runtime import (
    PATIENCE,
    MakeStack,
    backend,
    docker,
    inspect,
    runtime_of,
    watching,
)

FIRST, SECOND = backend("model-1", evict_to=("freeze",)), backend("model-2", evict_to=("freeze",))
ROUTER = {
    "command": ["llama-server", "--models-dir", "/m", "--host", "0.0.0.0", "--port", "8080", "-c", "1024"]
}
ROUTED = backend(
    "model-1", evict_to=("sleep",), served_model="tiny", service=Service(command=("llama-server",))
)


@pytest.fixture
def stack(llamacpp_compose: MakeStack, tmp_path: Path) -> Stack:
    return llamacpp_compose(tmp_path, models=2)


@pytest.fixture
def resting(stack: Stack) -> Iterator[tuple[ContainerRuntime, Swapper]]:
    """A runtime whose first engine is frozen, and what swaps it."""
    with runtime_of(stack) as runtime:
        swapper = Swapper(runtime)
        swapper.load(FIRST, "stop")
        swapper.evict(FIRST, "freeze")
        yield runtime, swapper


@pytest.fixture
def routed(llamacpp_compose: MakeStack, tmp_path: Path) -> Stack:
    return llamacpp_compose(tmp_path, models=1, services={"model-1": ROUTER})


def status(stack: Stack, model: str) -> str:
    return str(inspect(stack, model)["State"]["Status"])


def test_two_containers_take_turns_frozen(stack):
    with runtime_of(stack) as runtime:
        swapper = Swapper(runtime)
        swapper.load(FIRST, "stop")
        swapper.evict(FIRST, "freeze")
        swapper.load(SECOND, "stop")
        started = [inspect(stack, model)["State"]["StartedAt"] for model in stack.models]
        for out, back in [(SECOND, FIRST), (FIRST, SECOND)] * 2:
            evicted = swapper.evict(out, "freeze")
            assert (evicted.level, evicted.host_bytes > 0) == ("freeze", True)
            assert swapper.load(back, "freeze").level == "freeze"
            assert (status(stack, out.name), status(stack, back.name)) == ("paused", "running")
        assert [inspect(stack, model)["State"]["StartedAt"] for model in stack.models] == started


@pytest.mark.parametrize("end", [("kill",), ("rm", "--force")], ids=["killed", "gone"])
def test_a_container_that_is_killed_while_frozen_is_reported_and_one_that_ended_is_started_anew(
    stack, resting, end
):
    runtime, swapper = resting
    with watching(runtime) as deaths:
        docker(stack, *end, stack.container("model-1"))
        if end == ("kill",):
            assert deaths.get(timeout=PATIENCE) == "model-1"
        assert swapper.load(FIRST, "freeze").level == "stop"


def test_a_frozen_container_is_stopped_when_it_is_demoted(stack, resting):
    _, swapper = resting
    assert swapper.demote(FIRST, "freeze", "stop") == Evicted("stop")
    assert stack.up() == set()


def test_a_real_router_unloads_its_model_and_loads_it_again(routed):
    with runtime_of(routed, ROUTED) as runtime:
        swapper = Swapper(runtime)
        url = swapper.load(ROUTED, "stop").url
        assert engines.is_asleep(ROUTED, url) is False
        with_model = len(runtime.pids(ROUTED))
        assert swapper.evict(ROUTED, "sleep").level == "sleep"
        assert engines.is_asleep(ROUTED, url) is True
        assert len(runtime.pids(ROUTED)) < with_model
        assert swapper.load(ROUTED, "sleep") == Loaded(url, "sleep")
        assert engines.is_asleep(ROUTED, url) is False


def test_a_real_server_with_a_model_of_its_own_cannot_sleep_and_is_stopped(stack):
    with runtime_of(stack) as runtime:
        swapper = Swapper(runtime)
        url = swapper.load(FIRST, "stop").url
        with pytest.raises(BackendError, match="POST /models/unload answers 404"):
            engines.sleep(FIRST, url, 1)
        assert swapper.evict(FIRST, "sleep") == Evicted("stop")
        assert stack.up() == set()
