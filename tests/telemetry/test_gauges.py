"""The state at the moment of a scrape, as samples."""

from dataclasses import replace

import pytest

from anvil_mux.host.seam import GpuUse, OtherProcess, Sensors
from anvil_mux.routing.in_flight import EngineFigures, EngineLoad
from anvil_mux.scheduler.slot import STATES
from anvil_mux.scheduler.status import BackendState, GpuState, HostState, ModelState, Status
from anvil_mux.scheduler.waits import Progress
from anvil_mux.telemetry.metrics import Metrics
from tests.telemetry.test_metrics import CONFIG, nothing, value


def test_gauges_show_the_moment_of_the_scrape():
    states = iter(("loading", "ready"))

    def status() -> Status:
        model = ModelState("a", next(states), "a", ("0",), (), 3, 2, "", None)
        return Status(0.0, (model,), (), 3, 2)

    seen = Metrics(CONFIG, status)
    first = {(s.name, s.labels.get("state")): s.value for f in seen.collect() for s in f.samples}
    assert first["anvil_queued_requests", None] == 3
    assert first["anvil_inflight_requests", None] == 2
    shown = {state: first["anvil_model_state", state] for state in STATES}
    assert shown == {**dict.fromkeys(STATES, 0.0), "loading": 1.0}
    assert value(seen, "anvil_model_state", model="a", state="ready") == 1


def backend(name: str, state: str) -> BackendState:
    return BackendState(name, state, None, ("0",), 0, "", None, None, None, None, 0.0, "", ())


def test_each_backend_has_a_state_of_its_own():
    both = backend("a-0", "ready"), backend("a-1", "stuck")
    model = ModelState("a", "ready", "a-0", ("0",), (), 0, 0, "", None, backends=both)
    seen = Metrics(CONFIG, lambda: Status(0.0, (model,), (), 0, 0))
    for name, state in (("a-0", "ready"), ("a-1", "stuck")):
        shown = {each: value(seen, "anvil_backend_state", backend=name, state=each) for each in STATES}
        assert shown == {**dict.fromkeys(STATES, 0.0), state: 1.0}


def test_what_engines_say_of_themselves_is_shown_with_its_age():
    def backend(name: str, said: EngineFigures | None) -> BackendState:
        return BackendState(
            name, "ready", None, ("0",), 0, "", None, None, None, None, 0.0, "", (), engine=said
        )

    engines = {
        "a": EngineFigures(EngineLoad(3, 2, 0.25), 0.5),
        "b": EngineFigures(EngineLoad(1, 0), 70.0),
        "c": EngineFigures(None, 9.0),
        "d": None,
    }
    backends = tuple(backend(name, said) for name, said in engines.items())
    model = ModelState("a", "ready", "a", ("0",), (), 0, 0, "", None, backends=backends)
    seen = Metrics(CONFIG, lambda: Status(0.0, (model,), (), 0, 0))

    def shown(name: str, **labels: str) -> list[float | None]:
        return [value(seen, name, backend=each, **labels) for each in engines]

    assert shown("anvil_engine_requests", state="running") == [3.0, 1.0, None, None]
    assert shown("anvil_engine_requests", state="waiting") == [2.0, 0.0, None, None]
    assert shown("anvil_engine_cache_usage_ratio") == [0.25, None, None, None]
    assert shown("anvil_engine_figures_age_seconds") == [0.5, 70.0, 9.0, None]


@pytest.mark.parametrize(
    ("progress", "shown"),
    [(Progress("reading weights", 0.42, 35.0), 0.42), (Progress(), None), (None, None)],
)
def test_how_far_a_load_is_is_shown_where_it_is_known(progress, shown):
    model = ModelState("a", "loading", "a", ("0",), (), 0, 0, "", None, progress=progress)
    seen = Metrics(CONFIG, lambda: Status(0.0, (model,), (), 0, 0))
    assert value(seen, "anvil_model_load_progress_ratio", model="a") == shown


def test_gpus_are_shown_with_who_uses_them():
    gpus = (
        GpuState("0", ("a",), "ready", total=24, reserve=2, residuals=(("b", 3), ("c", 1))),
        GpuState("1", (), "stopped", reserved_for=("both",)),
    )
    others = (OtherProcess("0", 41, 5), OtherProcess("0", 42, None))
    gpu_uses = {"0": GpuUse(20, 25, {"a": 11}, others, Sensors(0.43, 61.0))}
    seen = Metrics(CONFIG, lambda: Status(0.0, (), gpus, 0, 0), gpu_uses=lambda: gpu_uses)
    names = ("total", "used", "reserve", "other", "residual")
    shown = [value(seen, f"anvil_gpu_memory_{name}_bytes", gpu="0") for name in names]
    assert shown == [25, 20, 2, 5, 4]
    measured = "utilization_ratio", "temperature_celsius", "power_watts"
    assert [value(seen, f"anvil_gpu_{name}", gpu="0") for name in measured] == [0.43, 61, None]
    unseen = [value(seen, f"anvil_gpu_memory_{name}_bytes", gpu="1") for name in names]
    assert unseen == [None, None, 0, None, 0]
    assert [value(seen, "anvil_gpu_residents", gpu=gpu) for gpu in "01"] == [1, 0]
    family = next(f for f in seen.registry.collect() if f.name == "anvil_gpu_reserved")
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"gpu": "1", "model": "both"}, 1)
    ]


def test_how_hosts_are_is_shown_and_nothing_where_there_is_only_one():
    hosts = HostState("h1", 12.0), HostState("h2", is_drained=True), HostState("h3", is_away=True)
    seen = Metrics(CONFIG, lambda: Status(0.0, (), (), 0, 0, hosts), round_trips=lambda: {"h2": 0.002})

    def shown(name: str) -> list[float | None]:
        return [value(seen, name, host=host) for host in ("h1", "h2", "h3")]

    assert shown("anvil_host_lost") == [1, 0, 0]
    assert shown("anvil_host_away") == [0, 0, 1]
    assert shown("anvil_host_drained") == [0, 1, 0]
    assert shown("anvil_host_round_trip_seconds") == [None, 0.002, None]
    families = [f for f in Metrics(CONFIG, nothing).registry.collect() if f.name.startswith("anvil_host_")]
    assert [family.samples for family in families] == [[]] * 4


def test_a_model_whose_hosts_are_all_lost_is_stopped_for_those_who_ask():
    here, lost = HostState("h2"), HostState("h1", 12.0)
    ready = [replace(backend(host.host, "ready"), host=host) for host in (lost, here)]

    def states(*backends: BackendState) -> list[str]:
        model = ModelState("a", "ready", "h1", ("h1/0",), (), 0, 0, "", None, backends=backends)
        seen = Metrics(CONFIG, lambda: Status(0.0, (model,), (), 0, 0))
        return [each for each in STATES if value(seen, "anvil_model_state", model="a", state=each)]

    assert states(ready[0]) == ["stopped"]
    assert states(*ready) == ["ready"]


def test_of_the_many_backends_on_other_hosts_those_that_are_stopped_are_no_series():
    host = HostState("h")
    far = [
        replace(backend(name, state), host=host) for name, state in (("a.h.0", "ready"), ("a.h.1", "stopped"))
    ]
    backends = (*far, backend("a.0", "stopped"))
    model = ModelState("a", "ready", "a.h.0", ("h/0",), (), 0, 0, "", None, backends=backends)
    seen = Metrics(CONFIG, lambda: Status(0.0, (model,), (), 0, 0))
    shown = [value(seen, "anvil_backend_state", backend=b.backend, state=b.state) for b in backends]
    assert shown == [1, None, 1]


def test_what_is_declared_of_a_gpu_counts_where_it_cannot_be_read():
    gpus = (GpuState("0", (), "stopped", total=24),)
    seen = Metrics(CONFIG, lambda: Status(0.0, (), gpus, 0, 0))
    assert value(seen, "anvil_gpu_memory_total_bytes", gpu="0") == 24
