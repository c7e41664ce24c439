"""What arrivals, lines, answers and pauses say of a model."""

import math
import random

import pytest

from anvil_mux.scheduler.model import MEMORY_SECONDS, PAUSE_ALPHA, SERVICE_ALPHA, Demand


def asked(*moments):
    demand = Demand()
    for moment in moments:
        demand.arrived(moment)
    return demand


def growth(demand, *about):
    return demand.rates(*about)[1]


def steady(rate, seconds, begin=0.0):
    return [begin + n / rate for n in range(round(seconds * rate))]


def test_a_model_that_nobody_asked_for_has_no_rate():
    demand = Demand()
    assert (demand.rate(0.0), growth(demand, 0.0), demand.rate(1e9)) == (0.0, 0.0, 0.0)
    assert (demand.pause_seconds, demand.service_seconds) == (0.0, 0.0)


@pytest.mark.parametrize("rate", [0.1, 0.5, 4.0, 50.0])
def test_steady_arrivals_give_their_rate_early_and_late(rate):
    for seconds in (30 / rate + 20, 300 / rate + 300):
        moments = steady(rate, seconds)
        assert asked(*moments).rate(moments[-1]) == pytest.approx(rate, rel=0.5)


def test_a_new_rate_is_believed_after_a_while():
    demand = asked(*steady(0.2, 600.0), *steady(5.0, 2 * MEMORY_SECONDS, begin=600.0))
    assert demand.rate(600.0 + 2 * MEMORY_SECONDS) == pytest.approx(5.0, rel=0.2)


def test_a_model_that_falls_silent_is_believed_to_go_on_at_most_as_often_as_its_silence_allows():
    demand = asked(*steady(10.0, 60.0))
    last = 60.0 - 0.1
    for silence in (1.0, 5.0, 30.0):
        assert demand.rate(last + silence) <= 1.0 / silence
        assert growth(demand, last + silence) <= 1.0 / silence
    rates = [demand.rate(last + silence) for silence in (0.1, 1.0, 10.0, 100.0, 1000.0)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 1e-6


def test_rates_are_finite_and_not_negative_whatever_the_moments():
    for seed in range(200):
        draw, demand, now = random.Random(seed), Demand(), 0.0
        for _ in range(draw.randint(0, 30)):
            now += draw.choice((0.0, 0.0, 1e-9, 0.25, 3.0, 1e5))
            demand.arrived(now)
            if draw.random() < 0.3:
                demand.admitted(draw.randint(1, 500), draw.choice((0.0, 1e-9, 4.0, 1e6)))
        for later in (0.0, 1e-9, 1.0, 1e9):
            for rate in (demand.rate(now + later), growth(demand, now + later, draw.randint(0, 9), 2.0)):
                assert 0.0 <= rate < math.inf


def test_a_line_grows_as_fast_as_the_lines_before_it_did():
    demand = asked(*steady(2.0, 60.0))
    for _ in range(10):
        demand.admitted(17, 8.0)  # 16 joined in 8 s
    assert growth(demand, 60.0) == pytest.approx(2.0, rel=0.1)


def test_clients_that_wait_for_their_answers_let_no_line_grow():
    demand = asked(*steady(2.0, 60.0))
    for _ in range(10):
        demand.admitted(1, 8.0)
    assert demand.rate(60.0) == pytest.approx(2.0, rel=0.2)
    assert growth(demand, 60.0) < 0.3


def test_before_the_first_line_it_is_believed_to_grow_as_requests_arrive():
    demand = asked(*steady(2.0, 60.0))
    assert growth(demand, 60.0) == pytest.approx(demand.rate(60.0))


def answered_alone(rate, seconds, others=0):
    """Answers take half of the time; ``others`` come while each is answered."""
    demand = Demand()
    for moment in steady(rate, seconds):
        demand.arrived(moment)
        demand.returned(0.0, moment)
        for _ in range(others):
            demand.arrived(moment + 0.25 / rate)
            demand.overlapping += 1
        demand.idle(moment + 0.5 / rate)
    return demand


def test_before_the_first_line_who_never_comes_while_others_are_answered_is_believed_to_be_alone():
    for rate, least in ((1.0, 0.25), (100.0, 0.01)):
        demand = answered_alone(rate, 60.0)
        assert growth(demand, 60.0 - 0.5 / rate) < least * demand.rate(60.0 - 0.5 / rate)


def test_few_answers_to_one_client_are_no_proof():
    demand = answered_alone(1.0, 3.0)
    assert growth(demand, 3.0) > 0.7 * demand.rate(3.0)


def test_a_line_is_never_believed_to_grow_faster_than_requests_arrive_before_there_was_one():
    demand = answered_alone(1.0, 60.0, others=3)
    assert growth(demand, 59.5) == pytest.approx(demand.rate(59.5))


def test_what_is_never_idle_proves_nothing():
    demand = asked(*steady(2.0, 60.0))
    demand.returned(0.0, 0.0)
    assert growth(demand, 60.0) == pytest.approx(demand.rate(60.0))
    demand.idle(59.0)
    demand.idle(59.5)  # twice is harmless


def test_who_waits_now_counts_as_well():
    demand = asked(*steady(2.0, 60.0))
    few, many = growth(demand, 59.5, 1, 10.0), growth(demand, 59.5, 61, 10.0)
    assert few < growth(demand, 59.5) < many
    assert many == pytest.approx(60 / 10, rel=0.3)


def test_old_lines_are_forgotten_with_each_new_one():
    demand = asked(*steady(2.0, 60.0))
    for _ in range(20):
        demand.admitted(1, 8.0)
    for _ in range(20):
        demand.admitted(33, 8.0)
    assert growth(demand, 59.5) == pytest.approx(4.0, rel=0.15)


def test_the_first_answer_counts_in_full_and_later_ones_by_their_weight():
    demand = Demand()
    demand.served(4.0)
    assert demand.service_seconds == 4.0
    demand.served(14.0)
    assert demand.service_seconds == pytest.approx(4.0 + SERVICE_ALPHA * 10.0)


def test_pauses_are_averaged_from_nothing():
    demand = Demand()
    demand.returned(5.0)
    assert demand.pause_seconds == pytest.approx(PAUSE_ALPHA * 5.0)
    for _ in range(40):
        demand.returned(5.0)
    assert demand.pause_seconds == pytest.approx(5.0, abs=0.01)


def test_asking_changes_nothing():
    one, other = asked(1.0, 2.0, 4.0), asked(1.0, 2.0, 4.0)
    for moment in (4.0, 5.0, 500.0):
        one.rate(moment)
        growth(one, moment, 3, 1.0)
    for demand in (one, other):
        demand.arrived(6.0)
        demand.admitted(3, 2.0)
    assert (one.rate(7.0), growth(one, 7.0, 2, 1.0)) == (other.rate(7.0), growth(other, 7.0, 2, 1.0))
