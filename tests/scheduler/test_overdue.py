"""The bound of a queue where ``max_wait`` follows the load."""

from dataclasses import replace
from math import inf

import pytest

from anvil_mux.config.config import Config
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.admission import CHOICE_SECONDS, LEAST_SECONDS
from anvil_mux.scheduler.model import model_settings
from anvil_mux.scheduler.state import FIRST_SERVICE_SECONDS
from tests.scheduler.driver import A, Driver, Never, backend

NAMES = [f"m{n}" for n in range(8)]
LOADS = {name: 10.0 + n for n, name in enumerate(NAMES)}


def house(*, first=A, **settings):
    """Eight models on one GPU, of which the loads are known, and a resident that does not go by itself."""
    singles = [first, *map(backend, (*NAMES, "slow"))]
    driver = Driver(*singles, policy=Never(), **settings)
    assert driver.core.adopt("a", 0.0)
    for name, seconds in LOADS.items():
        driver.costs.learn("", name, "stop", 0.0, seconds)
    return driver


def bounds(driver):
    return {event.model: event.bound for event in driver.log if event.kind == "queued" and event.size == 1}


def test_a_queue_waits_for_two_rounds_over_all_that_wait_when_it_begins_and_for_60_s_at_least():
    driver = house()
    for name in NAMES:
        driver.request(name, 1.0)
    rounds = [sum(list(LOADS.values())[: n + 1]) for n in range(len(NAMES))]
    assert [*rounds[1:3], LEAST_SECONDS] == [21.0, 33.0, 60.0]
    expected = [LEAST_SECONDS, LEAST_SECONDS, *[2 * one for one in rounds[2:]]]
    assert list(bounds(driver).values()) == [pytest.approx(each) for each in expected]


def test_a_bound_is_longer_than_a_round_by_no_more_than_the_policy_needs_to_choose():
    driver = house(queue_timeout=3600.0)
    driver.costs.learn("", "slow", "stop", 0.0, 200.0)
    for name in ("slow", "m0"):
        driver.request(name, 1.0)
    assert bounds(driver) == {"slow": 200.0 + CHOICE_SECONDS, "m0": 210.0 + CHOICE_SECONDS}


def test_what_a_queue_s_load_is_expected_to_take_is_fixed_with_its_bound_and_stands_in_its_event():
    driver = house()
    driver.request("m0", 1.0)
    driver.costs.learn("", "m0", "stop", 0.0, 20.0)
    for name in NAMES[1:]:
        driver.request(name, 2.0)
    begun = {event.model: event for event in driver.log if event.kind == "queued"}
    assert {name: event.load for name, event in begun.items()} == LOADS
    assert begun["m7"].bound == pytest.approx(2 * sum(LOADS.values()))
    assert begun["m7"].seconds == FIRST_SERVICE_SECONDS + 1.0 + LOADS["m7"]
    driver.request("m0", 3.0)
    assert (driver.log[-1].kind, driver.log[-1].load, driver.log[-1].seconds) == ("queued", 0.0, 0.0)


def test_a_model_that_is_ready_although_some_wait_for_a_place_is_no_part_of_a_round():
    driver = house(first=backend("a", concurrency=1))
    for name in ("a", "a", *NAMES):
        driver.request(name, 1.0)
    assert driver.core.queues["a"].tickets
    assert bounds(driver)["m7"] == pytest.approx(2 * sum(LOADS.values()))


@pytest.mark.parametrize("timeout", [400.0, 200.0, 120.0, 40.0])
def test_a_bound_leaves_time_for_a_round_and_the_load_before_queue_timeout(timeout):
    driver = house(queue_timeout=timeout)
    for name in NAMES:
        driver.request(name, 1.0)
    one = sum(LOADS.values())
    own = FIRST_SERVICE_SECONDS + 1.0 + LOADS["m7"]
    for_a_round = max(min(2 * one, timeout - own - one), LEAST_SECONDS)
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
    said = [{} if each is None else {"max_wait": each, "inherits": ()} for each in own]
    replicas = [backend(f"r{n}", str(n), model="m", **each) for n, each in enumerate(said)]
    found = model_settings(Config(tuple(replicas), max_wait=top))["m"]
    assert (found.max_wait, found.follows_load) == expected


def test_of_a_number_and_auto_the_shorter_holds():
    driver = Driver(
        backend("r0", "0", model="m", max_wait=90.0), backend("r1", "1", model="m"), policy=Never()
    )
    driver.request("m", 1.0)
    assert driver.log[-1].bound == LEAST_SECONDS


@pytest.fixture(scope="module")
def run():
    """A run of eight models under ``auto``: its log and its configuration."""
    backends = tuple(backend(name) for name in NAMES)
    config = Config(backends, policy="adaptive", queue_timeout=300.0, drain_timeout=5.0)
    trace = [Arrival(n * 1.5, NAMES[n * 5 % 8], 0.5) for n in range(600)]
    return simulate(config, trace, Engines(LOADS)), config


def begun(log):
    return [n for n, event in enumerate(log) if event.kind == "queued" and event.bound < inf]


def test_under_auto_the_log_of_a_run_is_sound_and_its_bounds_leave_time_before_queue_timeout(run):
    log, config = run
    assert check(log, config) == []
    assert {60.0} < {log[n].bound for n in begun(log)}
    assert max(log[n].bound for n in begun(log)) < 300.0


@pytest.mark.parametrize(
    "other",
    [
        lambda event: event._replace(bound=event.bound + 1.0),
        lambda event: event._replace(bound=event.bound - 1.0),
        lambda event: event._replace(bound=inf),
        lambda event: event._replace(load=event.load + 40.0),
    ],
    ids=["longer", "shorter", "none", "another load"],
)
def test_the_checker_computes_each_bound_again_from_the_events(run, other):
    log, config = run
    late = [n for n in begun(log) if log[n].bound > LEAST_SECONDS]
    for n in late[:5]:
        wrong = check([*log[:n], other(log[n]), *log[n + 1 :]], config)
        assert f"{log[n].at:.6f} queued {log[n].model}" in wrong[0]
        assert "by its round" in wrong[0]


def test_the_checker_allows_a_bound_to_the_first_request_of_a_queue_only(run):
    log, config = run
    n = next(n for n, event in enumerate(log) if event.kind == "queued" and event.bound == inf)
    wrong = check([*log[:n], log[n]._replace(bound=60.0), *log[n + 1 :]], config)
    assert [line for line in wrong if "has a bound already" in line]


def test_by_another_configuration_than_the_log_s_own_no_bound_is_computed(run):
    log, config = run
    config = replace(config, max_wait=400.0)
    assert check(log, config)
    assert check(log, config, is_its_own=False) == []


def test_of_logs_that_do_not_tell_of_loads_no_bound_is_computed(run):
    log, config = run
    assert check([event._replace(load=0.0) for event in log], config) == []
