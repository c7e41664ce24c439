"""With many hosts a fact costs what it concerns, not what there is. Calls are counted, not time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.multiplexer.overview import HOLD_SECONDS
from anvil_mux.scheduler.alarms import PORTION
from anvil_mux.sim.simulate import check, simulate
from tests.bench.bench_scale import (
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

HOSTS, GPUS, MODELS = 20, 8, 10
PLACES = HOSTS * GPUS


def many_on(hosts: int) -> Config:
    """Two backends for each GPU."""
    return many(hosts, GPUS, 2 * GPUS * hosts)


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
            watch.tell("adopt", lambda name=slot.name: watch.core.adopted(name, 0.0))  # type: ignore[misc]
            watch.request(slot.model, 1.0)
    for n in range(MODELS - 1):
        watch.request(f"any{n}", 2.0 + n)
    return watch


@pytest.mark.parametrize("most", [1, None])
def test_a_load_is_decided_by_a_look_at_each_gpu_also_when_all_are_taken_and_others_wait(
    most: int | None,
) -> None:
    free = Watch(anywhere(HOSTS, MODELS, most, GPUS))
    assert calls(lambda: free.request("any0", 1.0)) < 100 * PLACES
    assert [*free.steps] == ["any0.h0000.0"]
    watch = taken(most)
    assert not watch.steps
    assert calls(lambda: watch.request(f"any{MODELS - 1}", 20.0)) < 100 * PLACES
    ends = calls(lambda: watch.tell("drains end", lambda: watch.core.time_passed(60.0)))
    assert len(watch.steps) == MODELS
    assert ends < 3000 * MODELS


def test_what_is_lost_with_a_host_is_what_it_had() -> None:
    watch = taken(1)
    assert calls(lambda: watch.core.host_lost("h0003", 30.0)) < 100 * (MODELS + 1) * GPUS


def reload(config: Config, change: Callable[[Config], Config]) -> int:
    """How many functions a reload calls under the lock."""
    core = multiplexer(config)[0]._scheduler
    core.time_passed(0.0)
    prepared = core.prepare(change(config))
    return calls(lambda: core.reconfigured(prepared, 1.0))


RELOADS: dict[str, Callable[[Config], Config]] = {
    "a backend": lambda config: changed(config, "h3-9", port=1),
    "a host": lambda config: without(config, "h0003"),
    "a setting of all": lambda config: replace(config, drain_timeout=1.0, max_wait=2.0),
    "the policy": lambda config: replace(config, policy="debounce"),
}


@pytest.mark.parametrize("change", RELOADS.values(), ids=RELOADS)
def test_a_reload_costs_what_it_changes(change: Callable[[Config], Config]) -> None:
    more = 8 * 2 * HOSTS if change is RELOADS["a setting of all"] else 0  # each model has its own max_wait
    assert reload(many_on(2 * HOSTS), change) <= 1.1 * reload(many_on(HOSTS), change) + more


def test_a_reload_of_one_of_the_backends_that_a_model_may_have_does_not_look_at_the_others() -> None:
    for settings in {"priority": 1}, {"port": 1}:

        def change(config: Config, settings: dict[str, int] = settings) -> Config:
            return changed(config, "any3.h0003.1", **settings)

        few, many = (reload(anywhere(hosts, MODELS, gpus=GPUS), change) for hosts in (HOSTS, 2 * HOSTS))
        assert many <= 1.1 * few


def test_after_a_reload_that_concerns_very_many_gpus_they_are_asked_in_portions_and_none_is_left_out() -> (
    None
):
    watch, told = taken(1), []
    core, asked = watch.core, list[str]()
    for group in core.layout.groups:
        group.next_step = lambda now, name=group.name, ask=group.next_step: asked.append(name) or ask(now)  # type: ignore[method-assign]
    queues = {group.name for group in core.layout.with_queues(core.layout.models)}
    effects = core.reconfigured(replace(core.layout.config, policy="debounce"), 50.0)
    while effects.ask_at is not None and effects.ask_at < 51.0:
        told.append(set(asked))
        asked.clear()
        effects = core.time_passed(effects.ask_at)
    told.append(set(asked))
    assert queues <= told[0]
    assert max(map(len, told)) <= len(queues) + PORTION
    assert set().union(*told) == {group.name for group in core.layout.groups}


def test_a_lease_costs_the_same_however_many_backends_its_model_may_have() -> None:
    def of(config: Config, model: str, *names: str) -> int:
        mux, _ = multiplexer(config)
        mux.facts.adopt(dict.fromkeys(names, "http://127.0.0.1:1"))
        mux.lease(model).release()
        return calls(lambda: [mux.lease(model).release() for _ in range(100)])

    pair = Backend("a", "any0", ("0",)), Backend("b", "any0", ("1",))
    few = of(Config(backends=pair, policy="eager"), "any0", "a")
    assert of(anywhere(HOSTS, MODELS, gpus=GPUS), "any0", "any0.h0007.3") <= 1.1 * few
    assert of(many_on(HOSTS), "m7", *[f"h{host}-7" for host in range(HOSTS)]) <= 4 * few


class Ticking(WatchedClock):
    """A clock that goes on by a hundredth of a hold whenever it is looked at, and waits for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.pauses = 0.0, 0

    def now(self) -> float:  # type: ignore[override]
        self.at += HOLD_SECONDS / 100
        return self.at

    def latch(self) -> Ticking:  # type: ignore[override]
        return self

    def wait(self, seconds: float) -> bool:
        assert isinstance(self.held, HeldLock)
        assert not self.held.is_held
        self.pauses += 1
        return False


def test_status_lets_go_of_the_lock_now_and_then_and_misses_nothing() -> None:
    config, clock = anywhere(HOSTS, MODELS, gpus=GPUS), Ticking()
    mux = Multiplexer(config, None, log=lambda event: None, clock=clock)  # type: ignore[arg-type]
    status = mux.overview.status()
    assert {model.model for model in status.models} == {backend.model for backend in config.backends}
    assert [gpu.gpu for gpu in status.gpus] == [gpu.name for gpu in config.gpus]
    assert len(status.hosts) == HOSTS
    assert clock.pauses > 3
    before = clock.pauses
    assert len(mux.overview.reports()) == MODELS * PLACES
    assert mux.overview.resident_replicas() == []
    assert clock.pauses >= before


def test_an_hour_of_requests_for_many_hosts_breaks_no_invariant() -> None:
    config = many_on(50)
    log = simulate(config, list(hour(config, 2000)))
    assert check(log, config) == []
    assert sum(event.kind == "leased" for event in log) > 1500
