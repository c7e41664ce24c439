"""Independence: who needs other GPUs, and evicts others, is decided about as if he were alone."""

import random

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.policies import POLICIES, Snapshot, Stay, SwapTo
from tests.scheduler.driver import Driver, backend
from tests.scheduler.fleet import Fleet, on

X, A, Y, B = (Backend(name, name, (gpu,)) for name, gpu in zip("xayb", "0011", strict=True))
NEVER_ASKED_FOR = Backend("wide", "wide", ("0", "1"))
ENGINES = Engines(dict.fromkeys("xayb", 10.0))


def waits(trace, *backends, policy, resident="xy"):
    """How long each request waited, in order of arrival, by model."""
    config = Config(backends=backends, policy=policy)
    log = simulate(
        config, trace, ENGINES, resident=resident, costs=ENGINES.costs(Config(backends=(X, A, Y, B)))
    )
    assert check(log, config) == []
    return {(e.model, e.ticket): round(e.seconds, 6) for e in log if e.kind == "leased"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_that_nobody_asks_for_makes_nobody_wait(policy):
    """``x`` is busy, ``y`` idle: who waits for the GPU of ``y`` waits for nothing of ``x``."""
    trace = sorted(
        [Arrival(float(at), "x", 1.5) for at in range(120)]
        + [Arrival(10.0, "a", 1.0), Arrival(10.5, "b", 1.0), Arrival(11.0, "a", 1.0)]
    )
    alone = waits(trace, X, A, Y, B, policy=policy)
    tied = waits(trace, X, A, Y, B, NEVER_ASKED_FOR, policy=policy)
    assert tied == alone
    [b] = [seconds for (model, _), seconds in tied.items() if model == "b"]
    assert b <= 13.0, "the swap takes 11 s, and cost_aware waits 2 s for more requests"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(20))
def test_on_random_requests_neither(policy, seed):
    draw = random.Random(f"independence {seed}")
    trace = sorted(
        [Arrival(draw.uniform(0.0, 300.0), draw.choice("xayb"), draw.uniform(0.1, 8.0)) for _ in range(60)]
    )
    alone = waits(trace, X, A, Y, B, policy=policy)
    assert waits(trace, X, A, Y, B, NEVER_ASKED_FOR, policy=policy) == alone


class Noted:
    """A policy that is shown everything and keeps it; it swaps where there is nobody to evict."""

    def __init__(self):
        self.shown: list[Snapshot] = []

    def decide(self, seen):
        self.shown.append(seen)
        return next((SwapTo(queue.model) for queue in seen.queues if not queue.evicts), Stay())

    def sets(self):
        """What was shown since the last call: models that wait, and backends that are resident."""
        shown, self.shown = self.shown, []
        return [
            ("".join(q.model for q in seen.queues), "".join(r.backend for r in seen.residents))
            for seen in shown
        ]


def shown(*backends, resident, wait, **settings):
    noted = Noted()
    driver = Driver(*backends, policy=noted, **settings)
    for at, name in enumerate(resident):
        assert driver.core.adopt(name, float(at))
    driver.steps(9.0)
    noted.sets()
    for at, name in enumerate(wait):
        driver.request(name, 10.0 + at)
    driver.steps(20.0)
    return noted.sets()


TIE = backend("t", "0", "1", "2")


def test_a_policy_is_shown_the_queues_that_need_the_same_gpus_and_what_is_resident_there():
    backends = (
        backend("x", "0"),
        backend("a", "0"),
        backend("y", "1"),
        backend("b", "1"),
        backend("c", "0"),
        backend("z", "2"),
    )
    assert shown(*backends, TIE, resident="xyz", wait="abc") == [("ac", "x"), ("b", "y"), ("", "z")]


def test_queues_that_would_evict_the_same_backend_compete():
    backends = backend("w", "0", "1"), backend("a", "0"), backend("b", "1"), backend("z", "2")
    assert shown(*backends, TIE, resident="wz", wait="ab") == [("ab", "w"), ("", "z")]


def test_queues_that_one_of_them_connects_compete():
    backends = backend("x", "0"), backend("a", "0"), backend("y", "1"), backend("b", "1")
    both = backend("w", "0", "1")
    assert shown(*backends, both, TIE, resident="xy", wait="abw") == [("abw", "xy")]


def test_the_set_with_the_queue_of_the_highest_priority_comes_first():
    backends = backend("x", "0"), backend("a", "0"), backend("y", "1"), backend("b", "1", priority=1)
    assert shown(*backends, TIE, resident="xy", wait="ab") == [("b", "y"), ("a", "x")]


def test_the_end_of_a_lease_elsewhere_is_no_reason_to_ask_again():
    backends = backend("x", "0"), backend("a", "0"), backend("y", "1"), TIE
    noted = Noted()
    driver = Driver(*backends, policy=noted)
    assert driver.core.adopt("x", 0.0)
    assert driver.core.adopt("y", 0.0)
    driver.request("a", 1.0)
    here, there = driver.request("x", 1.0), driver.request("y", 1.0)
    assert driver.steps(1.0) == []
    assert not driver.core.release(there, 2.0)
    assert driver.core.release(here, 3.0)


TIES = pytest.mark.parametrize("tie", [(), (TIE,)], ids=["apart", "in one group"])


@TIES
def test_first_of_equal_replicas_does_not_depend_on_the_groups(tie):
    """Each backend of ``m`` is in a group of its own, or all are in one."""
    replicas = [backend(name, gpu, model="m") for name, gpu in (("m0", "2"), ("m1", "1"), ("m2", "0"))]
    fleet = Fleet(*replicas, *tie)
    for each in replicas:
        fleet.take(fleet.core.adopted(each.name, 0.0))
    assert [fleet.request("m", 1.0).backend for _ in range(3)] == ["m2", "m1", "m0"]


@TIES
def test_gpus_kept_for_an_overdue_queue_do_not_depend_on_the_groups(tie):
    """``m`` waits for m1, whose GPU 0 is being left; GPU 1 of m0 is free for ``a``."""
    m0, m1 = backend("m0", "1", "2", model="m"), backend("m1", "0", model="m")
    fleet = Fleet(m0, m1, backend("x", "2"), backend("a", "1"), *tie, max_wait=10.0)
    fleet.take(fleet.core.adopted("m1", 0.0))
    fleet.take(fleet.core.adopted("x", 0.0))
    fleet.take(fleet.core.unload_asked("m", 1.0))
    fleet.take(fleet.core.unload_asked("x", 1.0))
    fleet.request("m", 2.0)
    assert fleet.take(fleet.core.time_passed(12.0)) == []
    fleet.request("a", 13.0)
    assert fleet.kinds(13.0) == ["queued a", "loading a"]


@pytest.mark.parametrize("tie", [(), (on("h1", "t", "0", "1"),)], ids=["apart", "in one group"])
def test_costs_learned_elsewhere_are_considered_at_once(tie):
    """Loads take a moment, as that of ``c`` shows: another replica of ``m`` is worth one."""
    m1, m2 = on("h1", "m1", model="m"), on("h2", "m2", model="m")
    fleet = Fleet(m1, m2, on("h1", "c", "1"), *tie, policy="debounce")
    fleet.take(fleet.core.adopted("m1", 0.0))
    for _ in range(2):
        fleet.request("m", 1.0)
    fleet.request("c", 1.0)
    assert fleet.loaded("c", 1.0) == ["load m2"]
