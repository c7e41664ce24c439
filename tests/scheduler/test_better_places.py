"""While a swap only drains its queue goes where it is served first, and gives way to a higher priority."""

from dataclasses import replace
from math import inf

import pytest

from anvil_mux.config.config import Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import LoadError
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines, Outcome
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.events import Cause
from tests.lab.facts import HostBack, HostLost, Unloading
from tests.scheduler.driver import TEN, Driver, backend

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


def m1_fails_at_first(step, nth):
    if step.backend == "m1" and nth == 0:
        return Outcome(1.0, LoadError("no"))
    return Outcome(10.0 if type(step).__name__ == "Load" else 1.0)


@TIED
def test_a_replica_whose_cool_down_ends_is_taken_and_nobody_is_severed(tie):
    """m1 may be tried again at 6; m0 waits for ``x``."""
    trace = [Arrival(0.0, "x", 200.0), Arrival(0.0, "m", 1.0), Arrival(2.0, "m", 1.0)]
    log = played(trace, *REPLICAS, X, *tie, perform=m1_fails_at_first, resident=("x",), drain_timeout=80.0)
    assert of(log, "severed", "loading", "failed") == [(0.0, "loading m1"), (6.0, "loading m1")]
    assert waits(log) == {1: 0.0, 2: 16.0, 3: 14.0}


@TIED
def test_a_replica_whose_cool_down_ends_is_taken_also_by_a_queue_that_began_meanwhile(tie):
    trace = [Arrival(0.0, "x", 200.0), Arrival(0.0, "m", 1.0, patience=0.5), Arrival(3.0, "m", 1.0)]
    log = played(trace, *REPLICAS, X, *tie, perform=m1_fails_at_first, resident=("x",), drain_timeout=80.0)
    assert of(log, "severed", "loading") == [(0.0, "loading m1"), (6.0, "loading m1")]


def test_free_gpu_is_taken_though_the_drain_should_end_soon():
    """Answers of x take 4 s on average; m0 would wake in 2 s, and m1 takes 60 s from its GPU, free at 6."""
    asleep = replace(REPLICAS[0], evict_to=("sleep",)), REPLICAS[1]
    driver = Driver(*asleep, X, drain_timeout=600.0)
    driver.core.adopt("x", 0.0)
    driver.core.adopt_standby("m0", 0.0, "sleep", {}, host_bytes=0)
    driver.costs.learn("", "m", "sleep", 0.0, 2.0)
    driver.costs.learn("", "m", "stop", 0.0, 60.0)
    short = driver.request("x", 0.0)
    driver.core.release(short, 4.0)
    driver.core.slots["m1"].retry_at = 6.0
    driver.request("x", 5.0)
    driver.request("m", 5.0)
    assert (driver.steps(5.0), driver.state("x")) == ([], "draining")
    assert (driver.steps(6.0), driver.state("x")) == (["load m1"], "ready")


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


def outranked(*more, high=("0",), **settings):
    """``a`` is in use, ``low`` waits for it to drain, and at 5 ``high`` comes."""
    driver = Driver(
        backend("a"),
        backend("low"),
        backend("high", *high, priority=1),
        *more,
        drain_timeout=30.0,
        **settings,
    ).with_resident("a")
    lease = driver.request("a", 1.0)
    low = driver.request("low", 2.0)
    assert (driver.steps(2.0), driver.state("a")) == ([], "draining")
    return driver, lease, low


def test_a_request_of_higher_priority_takes_over_the_drain_for_a_lower_one():
    driver, lease, low = outranked()
    high = driver.request("high", 5.0)
    assert driver.steps(5.0) == []
    assert [(e.at, e.target, e.seconds) for e in driver.log if e.kind == "draining"] == [
        (2.0, "low", 30.0),
        (5.0, "high", 27.0),
    ]
    assert driver.until == 32.0, "the drain began at 2"
    assert driver.release(lease, 6.0) == ["evict a"]
    driver.swaps("a", 7.0, "high", 8.0)
    assert high.backend == "high"
    assert driver.release(high, 9.0) == ["evict high"]
    driver.swaps("high", 10.0, "low", 11.0)
    assert low.backend == "low"
    driver.core.release(low, 12.0)
    driver.sound()


def test_drain_is_taken_over_once_an_endless_victim_is_idle():
    x, y = backend("x", drain_timeout=600.0), backend("y", "1", drain_timeout=inf)
    high = backend("high", "0", "1", priority=5)
    driver = Driver(x, y, backend("low"), high, drain_timeout=600.0, queue_timeout=3600.0)
    driver.with_resident("x").with_resident("y")
    driver.request("x", 1.0)
    last = driver.request("y", 1.0)
    assert driver.asked("low", 10.0) == []
    assert driver.asked("high", 20.0) == []
    assert driver.core.release(last, 30.0), "the next step is asked for"
    assert driver.steps(30.0) == ["evict y"]
    assert driver.drains()["x"].target == "high"


def test_but_not_from_a_queue_that_is_overdue():
    driver, lease, _ = outranked(max_wait=10.0)
    assert driver.steps(12.0) == []
    assert driver.asked("high", 13.0) == []
    assert driver.release(lease, 14.0) == ["evict a"]
    assert driver.evicted("a", 15.0) == ["load low"]


def test_nor_once_a_victim_is_being_evicted():
    driver, lease, _ = outranked()
    assert driver.release(lease, 4.0) == ["evict a"]
    driver.request("high", 5.0)
    assert driver.evicted("a", 6.0) == ["load low"]


def test_what_it_needs_more_goes_as_well_and_what_it_does_not_need_stays():
    """``low`` needs the GPUs 0 and 1, ``high`` 0 and 2."""
    names = {"a": "0", "b": "1", "c": "2"}
    driver = Driver(
        *[backend(name, gpu) for name, gpu in names.items()],
        backend("low", "0", "1"),
        backend("high", "0", "2", priority=1),
        drain_timeout=30.0,
    )
    for name in names:
        assert driver.core.adopt(name, 0.0)
    leases = [driver.request(name, 1.0) for name in names]
    assert driver.asked("low", 2.0) == []
    assert driver.states() == {
        "a": "draining",
        "b": "draining",
        "c": "ready",
        "low": "stopped",
        "high": "stopped",
    }
    high = driver.request("high", 5.0)
    assert driver.steps(5.0) == []
    assert driver.states() == {
        "a": "draining",
        "b": "ready",
        "c": "draining",
        "low": "stopped",
        "high": "stopped",
    }
    for lease in leases:
        driver.core.release(lease, 6.0)
    assert driver.steps(6.0) == ["evict a", "evict c"]
    driver.core.evicted("a", 7.0)
    driver.swaps("c", 7.0, "high", 8.0)
    assert high.backend == "high"


def test_one_that_could_have_other_gpus_waits_for_the_policy():
    driver, _, _ = outranked(backend("b", "1"), TIE, high=("1",))
    assert driver.core.adopt("b", 3.0)
    assert driver.asked("high", 5.0) == ["evict b"]
    assert [e.target for e in driver.log if e.kind == "draining"] == ["low", "high"]
    assert driver.state("a") == "draining"


def test_the_drain_for_one_that_leaves_goes_back_to_nobody():
    driver, _, _ = outranked()
    high = driver.request("high", 5.0)
    driver.steps(5.0)
    assert driver.give_up(high, 6.0) == []
    assert [(e.at, e.target) for e in driver.log if e.kind == "draining"][-1] == (6.0, "low")
    assert driver.until < inf


def test_gpus_that_an_overdue_queue_waits_for_are_taken_over_by_none_that_is_not():
    driver, lease, _ = outranked(backend("late", max_wait=5.0))
    driver.request("late", 3.0)
    assert driver.steps(8.0) == []
    assert driver.asked("high", 9.0) == []
    assert driver.release(lease, 10.0) == ["evict a"]
    assert driver.evicted("a", 11.0) == ["load low"]


def test_nobody_drains_without_a_bound_for_a_drain_that_is_taken_over():
    driver, _, _ = outranked(backend("b", "1", drain_timeout=inf), high=("0", "1"))
    assert driver.core.adopt("b", 3.0)
    lease = driver.request("b", 3.0)
    assert driver.asked("high", 5.0) == []
    assert (driver.state("a"), driver.state("b")) == ("draining", "ready")
    assert [e.target for e in driver.log if e.kind == "draining"] == ["low"]
    assert driver.release(lease, 6.0) == ["evict b"]
    assert [(e.backend, e.target) for e in driver.log if e.kind == "draining"][1:] == [
        ("a", "high"),
        ("b", "high"),
    ]


def test_no_drain_is_taken_over_for_a_replica_beside_the_one_that_would_be_ready_again_for_that():
    """``low`` needs the GPUs 0 and 1, which ``m1`` leaves; of ``m`` there may be one."""
    replicas = [replace(each, most=1, priority=1) for each in REPLICAS]
    driver = Driver(*replicas, backend("low", "0", "1"), drain_timeout=30.0)
    assert driver.core.adopt("m1", 0.0)
    lease = driver.request("m", 1.0)
    assert driver.asked("low", 2.0) == []
    assert driver.asked("m", 3.0) == []
    assert driver.states() == {"m0": "stopped", "m1": "draining", "low": "stopped"}
    assert driver.release(lease, 4.0) == ["evict m1"]


@pytest.mark.parametrize("most", [None, 1])
def test_drain_of_a_replica_goes_on_although_another_fits_next_to_it(most):
    """``low`` needs the whole GPU, on which both replicas of ``m`` fit."""
    replicas = [backend(name, model="m", vram=5, most=most, priority=1) for name in ("m0", "m1")]
    driver = Driver(*replicas, backend("low", vram=10), gpus=TEN, drain_timeout=30.0)
    driver.with_resident("m0")
    lease = driver.request("m", 1.0)
    assert driver.asked("low", 2.0) == []
    assert driver.asked("m", 3.0) == []
    assert driver.states() == {"m0": "draining", "m1": "stopped", "low": "stopped"}
    assert driver.release(lease, 4.0) == ["evict m0"]


def test_what_the_target_keeps_in_standby_and_cannot_be_stopped_is_no_room_for_another():
    driver = Driver(
        backend("a", vram=6),
        backend("low", vram=6, evict_to=("sleep", "stop")),
        backend("high", vram=8, priority=1),
        gpus=(Gpu("0", vram=10),),
        drain_timeout=30.0,
    ).with_resident("a")
    assert driver.core.adopt_standby("low", 0.0, "sleep", {"0": 4})
    driver.request("a", 1.0)
    assert driver.asked("low", 2.0) == []
    driver.request("high", 3.0)
    driver.core.slots["low"].failed_stops = 1
    assert driver.steps(3.0) == []
    assert [e.target for e in driver.log if e.kind == "draining"] == ["low"]


@TIED
def test_a_queue_goes_to_the_gpu_that_is_idle_however_long_its_resident_took_before(tie):
    """``x`` has answers of 5 s, of which two run; ``z`` one of 50 s, which is over."""
    trace = [Arrival(0.0, "x", 5.0), Arrival(0.0, "z", 50.0), *[Arrival(49.0, "x", 5.0)] * 2]
    log = played([*trace, Arrival(51.0, "m", 1.0)], *REPLICAS, X, Z, *tie, resident=("x", "z"))
    assert of(log, "evicting") == [(51.0, "evicting z")]
    assert waits(log)[5] == 1.0 + 10.0


HALVES = backend("r", "0", vram=5), backend("s", "0", vram=5)
WHOLE = {"vram": 10}


@pytest.mark.parametrize(
    ("busy", "evicted"),
    [((), ["z"]), (("z",), ["r", "s"]), (("r", "z"), ["z"])],
    ids=["all idle: the fewest", "one busy", "both busy: the fewest"],
)
@TIED
def test_of_two_replicas_that_one_is_loaded_that_can_be_there_first(tie, busy, evicted):
    """m0 takes the place of ``r`` and ``s``, m1 that of ``z``."""
    backends = [replace(each, **WHOLE) for each in (*REPLICAS, Z, *tie)]
    trace = [*(Arrival(0.0, name, 20.0) for name in busy), Arrival(1.0, "m", 1.0)]
    gpus = tuple(Gpu(index, vram=10) for index in "01")
    log = played(trace, *backends, *HALVES, resident=("r", "s", "z"), gpus=gpus)
    assert sorted(event.backend for event in log if event.kind == "evicting") == evicted


@TIED
def test_a_queue_goes_where_no_resident_may_stay(tie):
    """``x`` may stay until 70 and is idle; ``z`` is not idle before 30."""
    x = replace(X, min_residency=60.0)
    trace = [Arrival(0.0, "x", 1.0), Arrival(20.0, "z", 10.0), Arrival(21.0, "m", 1.0)]
    log = played(trace, *REPLICAS, x, Z, *tie, resident=("z",))
    assert of(log, "evicting") == [(30.0, "evicting z")]


def test_target_that_fits_after_all_is_loaded_beside_victims_in_standby():
    """``x`` was to leave for ``new``, and what ``asleep`` keeps as well, until others left the GPU."""
    driver = Driver(
        backend("x", vram=4),
        backend("asleep", vram=4, evict_to=("sleep",)),
        backend("new", vram=5),
        gpus=TEN,
        drain_timeout=30.0,
    ).with_resident("x")
    assert driver.core.adopt_standby("asleep", 0.0, "sleep", {"0": 1})
    driver.core.memory_seen({"0": 5}, 0.5)
    lease = driver.request("x", 1.0)
    assert driver.asked("new", 2.0) == []
    assert driver.state("x") == "draining"
    driver.core.memory_seen({"0": 0}, 3.0)
    assert driver.steps(3.0) == ["load new"]
    assert driver.state("x") == "ready"
    driver.core.release(lease, 4.0)
