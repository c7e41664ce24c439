"""With many hosts a fact costs what it concerns, not what there is. Calls are counted, not time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.lab.checker import check
from anvil_mux.lab.simulate import simulate
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.multiplexer.overview import HOLD_SECONDS
from tests.bench.bench_scale import (
    BACKENDS,
    GPUS,
    HOSTS,
    HeldLock,
    Watch,
    WatchedClock,
    anywhere,
    changed,
    hour,
    many,
    multiplexer,
    without,
)

MODELS = BACKENDS // (HOSTS * GPUS)
MANY_CALLS = 25 * BACKENDS
"""As many as a fact may need that has a load decided, with every GPU and every model concerned."""


def calls(fact: Callable[[], object]) -> int:
    """How many functions are called, in Python."""
    count = 0

    def note(frame: object, what: str, argument: object) -> None:
        nonlocal count
        count += what == "call"

    sys.setprofile(note)
    try:
        fact()
    finally:
        sys.setprofile(None)
    return count


def taken(most: int | None) -> Watch:
    """Every GPU has a resident with a request; all models but one that may run anywhere wait."""
    watch = Watch(anywhere(HOSTS, MODELS, most, GPUS))
    watch.tell("begin", lambda: watch.core.time_passed(0.0))
    for slot in list(watch.core.layout.slots):
        if slot.name.startswith("own."):
            watch.tell("adopt", lambda name=slot.name: watch.core.adopted(name, 0.0))
            watch.request(slot.model, 1.0)
    for n in range(MODELS - 1):
        watch.request(f"any{n}", 2.0 + n)
    return watch


@pytest.mark.parametrize("most", [1, None])
def test_a_load_is_decided_by_some_looks_at_each_backend_also_when_all_gpus_are_taken_and_others_wait(most):
    free = Watch(anywhere(HOSTS, MODELS, most, GPUS))
    assert calls(lambda: free.request("any0", 1.0)) < MANY_CALLS
    assert [*free.steps] == ["any0.h0000.0"]
    watch = taken(most)
    assert not watch.steps
    assert calls(lambda: watch.request(f"any{MODELS - 1}", 20.0)) < MANY_CALLS
    ends = calls(lambda: watch.tell("drains end", lambda: watch.core.time_passed(60.0)))
    assert len(watch.steps) == MODELS
    assert ends < MODELS * MANY_CALLS / 2


def test_a_lost_host_costs_some_looks_at_each_backend():
    watch = taken(1)
    assert calls(lambda: watch.core.host_lost("h0003", 30.0)) < 2 * MANY_CALLS


def reload(config: Config, change: Callable[[Config], Config]) -> int:
    """How many functions a reload calls under the lock."""
    core = multiplexer(config)[0].scheduler
    core.time_passed(0.0)
    other = change(config)
    return calls(lambda: core.reconfigured(other, 1.0))


RELOADS: dict[str, Callable[[Config], Config]] = {
    "a backend": lambda config: changed(config, config.backends[99].name, port=1),
    "a model": lambda config: changed(config, config.backends[99].model, priority=1),
    "a host": lambda config: without(config, "h0003"),
    "a setting of all": lambda config: replace(config, drain_timeout=1.0, max_wait=2.0),
    "the policy": lambda config: replace(config, policy="debounce"),
}


@pytest.mark.parametrize("change", RELOADS.values(), ids=RELOADS)
@pytest.mark.parametrize("config", [many(), anywhere()], ids=["many", "anywhere"])
def test_a_reload_looks_at_each_backend_some_times_whatever_it_changes(config, change):
    assert reload(config, change) < 100 * BACKENDS


def test_a_lease_costs_the_same_however_many_backends_its_model_may_have():
    def of(config: Config, model: str, *names: str) -> int:
        mux, _ = multiplexer(config)
        mux.facts.adopt(dict.fromkeys(names, "http://127.0.0.1:1"))
        mux.lease(model).release()
        return calls(lambda: [mux.lease(model).release() for _ in range(100)])

    pair = Backend("a", "any0", ("0",)), Backend("b", "any0", ("1",))
    few = of(Config(backends=pair, policy="eager"), "any0", "a")
    assert of(anywhere(HOSTS, MODELS, gpus=GPUS), "any0", "any0.h0007.1") <= 1.1 * few
    config = many()
    assert of(config, "m7", *[each.name for each in config.backends if each.model == "m7"]) <= 4 * few


class Ticking(WatchedClock):
    """A clock that goes on by a fiftieth of a hold whenever it is looked at, and waits for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.pauses = 0.0, 0

    def now(self) -> float:
        self.at += HOLD_SECONDS / 50
        return self.at

    def latch(self) -> Ticking:
        return self

    def wait(self, seconds: float) -> bool:
        assert isinstance(self.held, HeldLock)
        assert not self.held.is_held
        self.pauses += 1
        return False


def test_status_lets_go_of_the_lock_now_and_then_and_misses_nothing():
    config, clock = anywhere(HOSTS, MODELS, gpus=GPUS), Ticking()
    mux = Multiplexer(config, None, log=lambda event: None, clock=clock)
    status = mux.overview.status()
    assert {model.model for model in status.models} == {backend.model for backend in config.backends}
    assert [gpu.gpu for gpu in status.gpus] == [gpu.name for gpu in config.gpus]
    assert len(status.hosts) == HOSTS
    assert clock.pauses > 3
    before = clock.pauses
    assert len(mux.overview.reports()) == MODELS * HOSTS * GPUS
    assert mux.overview.resident_replicas() == []
    assert clock.pauses >= before


def test_an_hour_of_requests_for_many_hosts_breaks_no_invariant():
    config = many()
    log = simulate(config, list(hour(config, 2000)))
    assert check(log, config) == []
    assert sum(event.kind == "leased" for event in log) > 1500
