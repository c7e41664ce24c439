"""The bound of a queue where ``max_wait`` follows the load."""

from math import log

import pytest

from anvil_mux.config.config import Config
from anvil_mux.scheduler.model import model_settings
from anvil_mux.scheduler.overdue import LEAST_SECONDS, ROUNDS
from anvil_mux.scheduler.planner import FIRST_SERVICE_SECONDS
from anvil_mux.sim.simulate import Arrival, Engines, check, simulate
from tests.scheduler.test_group import Driver, Never, backend

NAMES = [f"m{n}" for n in range(8)]
LOADS = {name: 10.0 + n for n, name in enumerate(NAMES)}


def house(**settings):
    """Eight models on one GPU, of which the loads are known, and a resident that does not go by itself."""
    singles = [backend(name) for name in ("a", *NAMES)]
    driver = Driver(*singles, policy=Never(), **settings)
    assert driver.core.adopt("a", 0.0)
    for name, seconds in LOADS.items():
        driver.costs.learn("", name, "stop", 0.0, seconds)
    return driver


def bounds(driver):
    return {event.model: event.bound for event in driver.log if event.kind == "queued" and event.size == 1}


def test_the_first_queues_of_a_few_models_wait_for_60_s():
    driver = house()
    for name in NAMES[:3]:
        driver.request(name, 1.0)
    assert bounds(driver) == dict.fromkeys(NAMES[:3], LEAST_SECONDS)


def test_each_further_queue_waits_for_a_round_over_all_that_wait_when_it_begins_and_a_third():
    driver = house()
    for name in NAMES:
        driver.request(name, 1.0)
    rounds = [sum(list(LOADS.values())[: n + 1]) for n in range(len(NAMES))]
    assert list(bounds(driver).values()) == [pytest.approx(max(60.0, ROUNDS * one)) for one in rounds]
    assert bounds(driver)["m7"] > 140.0


def test_a_bound_is_fixed_when_its_queue_begins():
    driver = house()
    driver.request("m0", 1.0)
    for name in NAMES[1:]:
        driver.request(name, 2.0)
    driver.request("m0", 3.0)
    assert driver.core.queues["m0"].bound == LEAST_SECONDS
    assert (driver.steps(3.0), driver.until) == ([], 1.0 + LEAST_SECONDS)


def test_answers_that_the_next_model_waits_for_are_part_of_a_round():
    driver = house()
    for moment in (1.0, 11.0):  # a has answered within 10 s, and is not resident
        driver.core.release(driver.request("a", moment), moment + 10.0)
    driver.core.died("a", 30.0, "killed")
    for name in (*NAMES[:5], "a"):
        driver.request(name, 30.0)
    driver.request("a", 30.0)
    known = sum(list(LOADS.values())[:5])
    driver.request("m5", 31.0)
    answers = 10.0 * (1 + log(2))
    seconds = known + 10.0 + answers + LOADS["m5"]
    assert bounds(driver)["m5"] == pytest.approx(ROUNDS * seconds)


def test_answers_count_as_long_as_a_drain_may_last():
    driver = house(drain_timeout=4.0)
    for moment in (1.0, 31.0):
        driver.core.release(driver.request("a", moment), moment + 30.0)
    driver.core.died("a", 70.0, "killed")
    for name in ("a", *NAMES):
        driver.request(name, 70.0)
    assert bounds(driver)["m7"] == pytest.approx(ROUNDS * (sum(LOADS.values()) + 10.0 + 4.0))


@pytest.mark.parametrize("timeout", [400.0, 200.0, 120.0, 40.0])
def test_a_bound_leaves_time_for_a_round_and_the_load_before_queue_timeout(timeout):
    driver = house(queue_timeout=timeout)
    for name in NAMES:
        driver.request(name, 1.0)
    one = sum(LOADS.values())
    own = FIRST_SERVICE_SECONDS + 1.0 + LOADS["m7"]
    for_a_round = max(min(ROUNDS * one, timeout - own - one), LEAST_SECONDS)
    assert bounds(driver)["m7"] == pytest.approx(min(for_a_round, timeout - own))


def test_a_number_holds_as_it_is_written_however_many_wait():
    driver = house(max_wait=20.0)
    for name in NAMES:
        driver.request(name, 1.0)
    assert set(bounds(driver).values()) == {20.0}


@pytest.mark.parametrize(
    ("top", "own", "expected"),
    [
        ("auto", (None, None), (float("inf"), True)),
        (60.0, (None, None), (60.0, False)),
        (60.0, ("auto", "auto"), (float("inf"), True)),
        ("auto", (7.0, 9.0), (7.0, False)),
        ("auto", (None, 90.0), (90.0, True)),
    ],
)
def test_a_model_goes_by_the_settings_of_its_own_backends(top, own, expected):
    replicas = [backend(f"r{n}", str(n), model="m", max_wait=each) for n, each in enumerate(own)]
    found = model_settings(Config(tuple(replicas), max_wait=top))["m"]
    assert (found.max_wait, found.follows_load) == expected


def test_of_a_number_and_auto_the_shorter_holds():
    driver = Driver(
        backend("r0", "0", model="m", max_wait=90.0), backend("r1", "1", model="m"), policy=Never()
    )
    driver.request("m", 1.0)
    assert driver.log[-1].bound == LEAST_SECONDS


def test_under_auto_the_log_of_a_run_is_sound_and_its_bounds_leave_time_before_queue_timeout():
    backends = tuple(backend(name) for name in NAMES)
    config = Config(backends, policy="adaptive", queue_timeout=300.0, drain_timeout=5.0)
    trace = [Arrival(n * 1.5, NAMES[n * n % 8], 0.5) for n in range(600)]
    log = simulate(config, trace, Engines(LOADS))
    assert check(log, config) == []
    assert max(event.bound for event in log if event.kind == "queued" and event.bound < 1e9) < 300.0
