"""Which load a queue waits for, as far as that will read weights from disk."""

from dataclasses import replace

import pytest

from anvil_mux.scheduler.policies import build_policy
from anvil_mux.scheduler.waits import coming_load
from tests.scheduler.driver import Driver, backend

A, B, C = backend("a"), backend("b"), backend("c")
HOLDS = build_policy("debounce", {"quiet": 100.0, "max_hold": 1000.0})


def coming(driver: Driver, model: str, at: float) -> str:
    """The backend of the load that the queue of a model waits for; "" for none."""
    state = driver.core.state
    found = coming_load(state, state.models[model], at)
    return found.backend.name if found else ""


def test_a_load_is_waited_for_from_the_queue_until_it_begins():
    driver = Driver(A, B).with_resident("a")
    serving = driver.request("a", 1.0)
    driver.request("b", 2.0)
    assert coming(driver, "b", 2.0) == "b"
    assert driver.steps(2.0) == []
    assert (driver.state("a"), coming(driver, "b", 3.0)) == ("draining", "b")
    assert driver.release(serving, 4.0) == ["evict a"]
    assert coming(driver, "b", 4.5) == "b"
    assert driver.evicted("a", 5.0) == ["load b"]
    assert coming(driver, "b", 5.0) == ""


def test_a_policy_that_holds_the_swap_back_leaves_time_to_read():
    driver = Driver(A, B, policy=HOLDS).with_resident("a")
    assert driver.asked("b", 2.0) == []
    assert (driver.state("a"), coming(driver, "b", 2.0)) == ("ready", "b")


def test_a_queue_for_a_place_waits_for_no_load():
    driver = Driver(replace(A, concurrency=1)).with_resident("a")
    for at in (1.0, 2.0):
        driver.request("a", at)
    assert len(driver.core.state.models["a"].queue.tickets) == 1
    assert coming(driver, "a", 2.0) == ""


def test_a_queue_for_a_place_at_a_replica_waits_for_no_other_one():
    replicas = [backend(name, model="m", concurrency=1) for name in ("m0", "m1")]
    driver = Driver(*replicas, policy=HOLDS).with_resident("m0")
    for at in (1.0, 2.0):
        driver.request("m", at)
    assert len(driver.core.state.models["m"].queue.tickets) == 1
    assert (driver.state("m1"), coming(driver, "m", 2.0)) == ("stopped", "")


def test_nothing_is_read_in_a_cool_down_or_where_it_is_not_wanted():
    driver = Driver(A, replace(B, read_ahead=False), policy=HOLDS).with_resident("a")
    driver.request("b", 2.0)
    assert coming(driver, "b", 2.0) == ""
    failed = Driver(A, B, policy=HOLDS).with_resident("a")
    failed.request("b", 2.0)
    failed.core.slots["b"].retry_at = 10.0
    assert (coming(failed, "b", 9.0), coming(failed, "b", 10.0)) == ("", "b")


@pytest.mark.parametrize(
    ("engine", "level", "reads"),
    [
        ("vllm", "sleep", False),
        ("vllm", "sleep-2", True),
        ("vllm", "freeze", False),
        ("vllm", "checkpoint", False),
        ("ollama", "sleep", True),
        ("llamacpp", "sleep", True),
        ("llamacpp", "freeze", False),
    ],
)
def test_from_standby_only_engines_that_forgot_their_weights_read_them(engine, level, reads):
    driver = Driver(A, replace(B, engine=engine, evict_to=(level, "stop")), policy=HOLDS)
    driver.core.adopt_standby("b", 0.0, level, {})
    driver.with_resident("a")
    driver.request("b", 2.0)
    assert driver.state("b") == "standby"
    assert bool(coming(driver, "b", 2.0)) == reads


def test_the_swap_that_has_begun_comes_before_priority_and_that_before_age():
    driver = Driver(A, B, C, replace(backend("d"), priority=5), policy=HOLDS).with_resident("a")
    for at, model in enumerate("bcd", 1):
        driver.request(model, float(at))
    state = driver.core.state
    ranks = {model: coming_load(state, state.models[model], 9.0) for model in "bcd"}
    assert [each.backend.name for each in sorted(filter(None, ranks.values()))] == ["d", "b", "c"]
    driver.core.set_policy(build_policy("eager", {}))
    driver.request("a", 9.0)
    assert driver.steps(10.0) == []
    begun = [coming_load(state, state.models[model], 11.0) for model in "bcd"]
    [first, *_] = sorted(filter(None, begun))
    assert first.rank[0] is False
