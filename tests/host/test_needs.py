"""Services on which others depend: they are started first, and waited for."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import pytest

from anvil_mux.config.service import COMPLETED, HEALTHY, STARTED, Service
from anvil_mux.errors import BackendError, LoadError
from anvil_mux.host import containers
from anvil_mux.host.levels import Cancelled, Swapper
from anvil_mux.host.seam import NotBegun
from tests.host.docker_stand_in import A

ENOUGH = 60.0


def needing(*needs):
    return replace(A, service=Service(image="llama:1", needs=needs))


def enough():
    return ENOUGH


def started(docker):
    """The services that were started since the last call, in order."""
    return [verb.removeprefix("up ") for verb in docker.verbs() if verb.startswith("up ")]


def test_each_need_is_started_in_its_order_before_the_service(docker, runtime):
    def on_up(service):
        docker.add(service, service, "exited" if service == "fetch" else "running", ExitCode=0)

    docker.on_up = on_up
    runtime.prepare(needing(("redis", STARTED), ("fetch", COMPLETED)), enough)
    assert started(docker) == ["redis", "fetch"]


@pytest.mark.parametrize(
    ("condition", "state"),
    [
        (STARTED, {"status": "running"}),
        (HEALTHY, {"status": "running", "Health": {"Status": "healthy"}}),
        (COMPLETED, {"status": "exited"}),
    ],
)
def test_a_need_that_is_met_is_left_alone(docker, runtime, condition, state):
    docker.add("d", "dep", **state)
    runtime.prepare(needing(("dep", condition)), enough)
    assert started(docker) == []


def test_a_need_is_waited_for_until_it_is_healthy(docker, runtime, monkeypatch):
    docker.on_up = lambda service: docker.add("d", service, Health={"Status": "starting"})
    looks = count()

    def sleep(_):
        if next(looks) == 2:
            docker.state("d")["Health"]["Status"] = "healthy"

    monkeypatch.setattr(containers.time, "sleep", sleep)
    runtime.prepare(needing(("dep", HEALTHY)), enough)
    assert next(looks) == 3


@pytest.mark.parametrize(
    ("condition", "state", "why"),
    [
        (COMPLETED, {"status": "exited", "ExitCode": 3}, "exited with code 3"),
        (HEALTHY, {"status": "exited", "ExitCode": 1}, "exited with code 1"),
        (HEALTHY, {"Health": {"Status": "unhealthy"}}, "is unhealthy"),
        (HEALTHY, {}, "has no health check"),
    ],
)
def test_a_need_that_cannot_be_met_fails_the_load(docker, runtime, condition, state, why):
    docker.on_up = lambda service: docker.add("d", service, **state)
    with pytest.raises(LoadError, match=f"^service dep, on which a depends, {why}"):
        runtime.prepare(needing(("dep", condition)), enough)


def test_a_need_that_takes_too_long_fails_the_load(docker, runtime):
    docker.on_up = lambda service: docker.add("d", service)
    with pytest.raises(LoadError, match=f"was not {COMPLETED} within load_timeout"):
        runtime.prepare(needing(("dep", COMPLETED)), lambda: 0.0)


def test_a_cancelled_load_waits_for_no_need(docker, runtime):
    docker.on_up = lambda service: docker.add("d", service)

    def cancelled():
        raise Cancelled("the load of a was cancelled")

    with pytest.raises(Cancelled):
        runtime.prepare(needing(("dep", COMPLETED)), cancelled)


def test_a_need_that_completed_by_another_description_runs_again(docker, runtime):
    docker.hash = "new"
    docker.add("d", "dep", "exited")
    docker.containers["d"]["Config"]["Labels"]["com.docker.compose.config-hash"] = "old"
    runtime.prepare(needing(("dep", COMPLETED)), enough)
    runtime.prepare(needing(("dep", COMPLETED)), enough)
    assert started(docker) == ["dep"]


def test_a_command_that_fails_is_named_whole(docker, runtime):
    docker.refuses_up = "no such service: dep"
    with pytest.raises(BackendError, match=r"^`docker compose up dep` failed: no such service: dep$"):
        runtime.prepare(needing(("dep", STARTED)), enough)


def test_no_need_is_started_for_an_engine_whose_gpu_is_taken(docker, runtime):
    @contextmanager
    def guard(backend, remaining):
        raise NotBegun("its GPU is held")
        yield

    docker.on_up = lambda service: docker.add("d", service)
    with pytest.raises(LoadError, match=r"^its GPU is held$"):
        Swapper(runtime, guard=guard).load(needing(("dep", STARTED)))
    assert started(docker) == []


def test_gpus_are_guarded_from_the_start_of_needs_to_that_of_the_engine(runtime, monkeypatch):
    order = []

    @contextmanager
    def guard(backend, remaining):
        order.append("guarded")
        try:
            yield
        finally:
            order.append("free")

    def start(backend):
        order.append("start")
        raise LoadError("no")

    monkeypatch.setattr(runtime, "prepare", lambda *_: order.append("needs"))
    monkeypatch.setattr(runtime, "start", start)
    with pytest.raises(LoadError):
        Swapper(runtime, guard=guard).load(needing(("dep", STARTED)))
    assert order == ["guarded", "needs", "guarded", "start", "free", "free"]
