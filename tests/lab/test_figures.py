"""What a log comes to."""

from dataclasses import asdict

import pytest

from anvil_mux.lab.engines import Engines
from anvil_mux.lab.figures import fairness, figures
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.events import Event
from tests.lab.facts import Death
from tests.lab.test_simulate import LAYOUTS, TWO, Config

ENGINES = Engines({"a": 3.0, "b": 6.0}, stop_seconds=0.5)


def of(*trace, config=TWO, resident=(), sent=0):
    return figures(simulate(config, trace, ENGINES, resident=resident), sent)


def test_a_short_log_comes_to_this():
    # a loads from 1 to 4 and serves to 8, is evicted to 8.5; b loads to 14.5 and serves to 15.5.
    assert asdict(of(Arrival(1.0, "a", 4.0), Arrival(2.0, "b", 1.0), Arrival(3.0, "b", 1.0))) == {
        "requests": 3,
        "swaps": 2,
        "makespan_seconds": 14.5,
        "wait_mean_seconds": pytest.approx((3.0 + 12.5 + 11.5) / 3),
        "wait_rms_seconds": pytest.approx(((3.0**2 + 12.5**2 + 11.5**2) / 3) ** 0.5),
        "wait_p50_seconds": 11.5,
        "wait_p95_seconds": 12.5,
        "wait_max_seconds": 12.5,
        "swap_seconds": 3.0 + 0.5 + 6.0,
        "busy_fraction": pytest.approx((4.0 + 1.0) / 14.5),
        "failed": 0,
        "severed": 0,
    }


def test_a_log_of_nothing_comes_to_nothing():
    assert set(asdict(figures([])).values()) == {0}


def test_a_request_that_found_its_model_loaded_waited_0():
    told = of(Arrival(0.0, "a", 1.0), Arrival(0.5, "a", 1.0), Arrival(0.5, "b", 1.0), resident=["a"])
    assert told.wait_p50_seconds == 0.0
    assert told.wait_mean_seconds == pytest.approx((0.0 + 0.0 + (1.5 - 0.5) + 0.5 + 6.0) / 3)


def test_quantiles_are_waits_that_occurred():
    log = [Event(float(n), "leased", "a", "a", n, 0, float(n)) for n in range(1, 21)]
    told = figures(log)
    assert (told.wait_p50_seconds, told.wait_p95_seconds, told.wait_max_seconds) == (10.0, 19.0, 20.0)


def test_the_fairness_is_the_least_of_the_most():
    assert fairness([3, 12, 6]) == 0.25
    assert fairness([0, 2]) == 0.0
    assert fairness([]) is None is fairness([0, 0])


def test_the_makespan_ends_with_the_last_answer_and_no_timer():
    patient = Arrival(2.0, "a", 1.0)
    left = Arrival(3.0, "b", 1.0, patience=30.0)
    config = Config(
        backends=TWO.backends, policy="debounce", policy_settings={"quiet": 40.0, "max_hold": 40.0}
    )
    told = of(patient, left, config=config, resident=["a"])
    assert (told.makespan_seconds, told.requests) == (1.0, 2)


def test_busy_is_when_anything_is_in_service_not_when_nothing_swaps():
    apart = of(Arrival(0.0, "a", 1.0), Arrival(9.0, "a", 1.0), resident=["a"])
    assert apart.busy_fraction == pytest.approx(0.2)
    together = of(Arrival(0.0, "a", 4.0), Arrival(1.0, "a", 1.0), Arrival(3.0, "a", 5.0), resident=["a"])
    assert together.busy_fraction == 1.0


def test_backends_that_serve_at_once_are_busy_once():
    side_by_side = Config(policy="eager", backends=LAYOUTS["two GPUs"][0])
    trace = (Arrival(0.0, "a", 4.0), Arrival(2.0, "c", 4.0), Arrival(9.0, "a", 1.0))
    told = of(*trace, config=side_by_side, resident=["a", "c"])
    assert told.busy_fraction == pytest.approx((6.0 + 1.0) / 10.0)


def test_a_request_that_wants_only_a_load_keeps_nothing_busy():
    told = of(Arrival(0.0, "a", 5.0, leases=False), Arrival(4.0, "a", 1.0))
    assert told.makespan_seconds == 5.0
    assert told.busy_fraction == pytest.approx(1.0 / 5.0)


def test_what_a_drain_cuts_off_is_severed_and_not_busy_after_it():
    told = of(Arrival(0.0, "a", 100.0), Arrival(1.0, "b", 2.0), resident=["a"])
    assert (told.severed, told.failed) == (1, 0)
    # a is cut off at 6, b is loaded from 6.5 to 12.5 and serves to 14.5.
    assert told.makespan_seconds == 14.5
    assert told.busy_fraction == pytest.approx((6.0 + 2.0) / 14.5)


def test_what_dies_with_its_backend_is_severed():
    lost = (Arrival(0.0, "a", 9.0), Arrival(1.0, "a", 9.0), Death(4.0, "a"))
    told = of(*lost, resident=["a"])
    assert (told.severed, told.makespan_seconds, told.busy_fraction) == (2, 4.0, 1.0)
    again = of(*lost, Arrival(10.0, "a", 2.0), resident=["a"])  # it is loaded from 10 to 13
    assert (again.severed, again.makespan_seconds, again.busy_fraction) == (2, 15.0, pytest.approx(6 / 15))


def test_a_request_that_timed_out_has_failed_and_counts_as_a_wait_of_queue_timeout():
    told = of(Arrival(0.0, "a", 1.0), config=Config(policy="eager", backends=TWO.backends, queue_timeout=2.0))
    assert (told.requests, told.failed, told.wait_mean_seconds, told.wait_max_seconds) == (1, 1, 2.0, 2.0)
    assert told.makespan_seconds == 2.0


def test_other_requests_that_end_without_their_model_have_no_wait():
    told = of(Arrival(0.0, "a", 1.0, patience=1.0), config=Config(policy="eager", backends=TWO.backends))
    assert (told.requests, told.wait_max_seconds) == (1, 0.0)


def test_requests_that_were_turned_away_are_in_no_log_but_count():
    config = Config(policy="eager", backends=TWO.backends, max_queue=2)
    told = of(*[Arrival(0.0, "b", 1.0)] * 5, config=config, sent=5)
    assert (told.requests, told.failed, told.wait_mean_seconds) == (5, 3, 6.0)


def test_a_log_that_ends_in_the_middle_counts_as_far_as_it_goes():
    log = simulate(TWO, [Arrival(0.0, "a", 4.0), Arrival(1.0, "b", 9.0), Arrival(12.5, "b", 9.0)], ENGINES)
    # a is loaded from 0 to 3 and serves to 7, is evicted to 7.5; b is loaded to 13.5.
    told = figures([event for event in log if event.at < 8.0])
    assert (told.makespan_seconds, told.swap_seconds) == (7.0, 3.5)
    log = simulate(TWO, [Arrival(0.0, "a", 4.0), Arrival(2.5, "a", 4.0)], ENGINES, resident=["a"])
    told = figures([event for event in log if event.at < 3.0])
    assert (told.requests, told.makespan_seconds, told.busy_fraction) == (2, 2.5, 1.0)
