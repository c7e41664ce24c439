"""While a swap only drains, its queue goes where it is served first."""

from dataclasses import replace

import pytest

from anvil_mux.config.config import Config
from anvil_mux.errors import LoadError
from anvil_mux.scheduler.causes import Cause
from anvil_mux.sim.simulate import (
    Arrival,
    Engines,
    HostBack,
    HostLost,
    Outcome,
    Unloading,
    check,
    simulate,
)
from tests.scheduler.test_group import backend

REPLICAS = backend("m0", "0", model="m"), backend("m1", "1", model="m")
TIE = backend("tie", "0", "1")
X, Z = backend("x", "0"), backend("z", "1")
TIED = pytest.mark.parametrize("tie", [(), (TIE,)], ids=["apart", "in one group"])


def played(trace, *backends, perform=None, resident=(), **settings):
    config = Config(backends=backends, **{"policy": "eager", **settings})
    log = simulate(config, trace, perform or Engines(), resident=resident)
    assert check(log, config) == []
    return log


def waits(log):
    return {event.ticket: event.seconds for event in log if event.kind == "leased"}


def of(log, *kinds):
    return [
        (event.at, f"{event.kind} {event.backend or event.model}") for event in log if event.kind in kinds
    ]


@TIED
@pytest.mark.parametrize("policy", ["eager", "adaptive"])
def test_a_gpu_that_becomes_free_while_victims_drain_is_taken_and_nobody_is_severed(tie, policy):
    """m0 waits for ``x``, whose answer takes long; at 22 ``z`` is unloaded, and the GPU of m1 free at 23."""
    trace = [Arrival(0.0, "x", 200.0), Arrival(20.0, "m", 1.0), Unloading(22.0, "z")]
    pinned = backend("z", "1", pin=True)
    log = played(
        trace,
        *REPLICAS,
        X,
        pinned,
        *tie,
        resident=("x", "z"),
        drain_timeout=30.0,
        policy=policy,
        max_wait=1.0,
    )
    assert waits(log) == {1: 0.0, 2: 13.0}
    assert of(log, "severed", "loading") == [(23.0, "loading m1")]
    assert [(e.at, e.cause) for e in log if e.backend == "x" and e.kind == "ready"][1:] == [
        (23.0, Cause("reprieved"))
    ]


@TIED
def test_a_replica_whose_cool_down_ends_is_taken_and_nobody_is_severed(tie):
    """m1 fails at 1 and may be tried again at 6; m0 waits for ``x``."""

    def perform(step, nth):
        if step.backend == "m1" and nth == 0:
            return Outcome(1.0, LoadError("no"))
        return Outcome(10.0 if type(step).__name__ == "Load" else 1.0)

    trace = [Arrival(0.0, "x", 200.0), Arrival(0.0, "m", 1.0), Arrival(2.0, "m", 1.0)]
    log = played(trace, *REPLICAS, X, *tie, perform=perform, resident=("x",), drain_timeout=80.0)
    assert of(log, "severed", "loading", "failed") == [(0.0, "loading m1"), (6.0, "loading m1")]
    assert waits(log) == {1: 0.0, 2: 16.0, 3: 14.0}


@TIED
def test_a_replica_whose_cool_down_ends_is_taken_also_by_a_queue_that_began_meanwhile(tie):
    def perform(step, nth):
        if step.backend == "m1" and nth == 0:
            return Outcome(1.0, LoadError("no"))
        return Outcome(10.0 if type(step).__name__ == "Load" else 1.0)

    trace = [Arrival(0.0, "x", 200.0), Arrival(0.0, "m", 1.0, patience=0.5), Arrival(3.0, "m", 1.0)]
    log = played(trace, *REPLICAS, X, *tie, perform=perform, resident=("x",), drain_timeout=80.0)
    assert of(log, "severed", "loading") == [(0.0, "loading m1"), (6.0, "loading m1")]


@TIED
def test_a_gpu_that_another_queue_waits_for_is_no_better_place(tie):
    """``z`` goes for ``n``, which was there first, and the drain of ``x`` goes on."""
    trace = [
        Arrival(0.0, "x", 200.0),
        Arrival(0.0, "z", 200.0),
        Arrival(10.0, "n", 50.0),
        Arrival(20.0, "m", 1.0),
        Unloading(22.0, "z"),
    ]
    pinned = backend("z", "1", drain_timeout=15.0)
    log = played(
        trace, *REPLICAS, X, pinned, backend("n", "1"), *tie, resident=("x", "z"), drain_timeout=30.0
    )
    assert of(log, "loading") == [(26.0, "loading n"), (51.0, "loading m0")]


def test_a_host_that_is_back_is_taken_by_a_queue_that_began_meanwhile():
    """The policy holds back the swap on ``h2`` for longer than ``h1`` is away."""
    on_h1, on_h2 = replace(REPLICAS[0], host="h1", gpus=("0",)), replace(REPLICAS[1], host="h2", gpus=("0",))
    y = replace(Z, name="y", model="y", host="h2", gpus=("0",))
    trace = [HostLost(1.0, "h1"), Arrival(2.0, "m", 1.0), HostBack(3.0, "h1", {})]
    log = played(
        trace,
        on_h1,
        on_h2,
        y,
        resident=("y",),
        policy="debounce",
        policy_settings={"quiet": 20.0, "max_hold": 60.0},
    )
    assert of(log, "draining", "loading") == [(3.0, "loading m0")]
