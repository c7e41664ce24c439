"""What an engine does at once: when answers end that it makes together, and those that wait for others."""

from math import inf

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Batch, Batching, Engines
from anvil_mux.lab.simulate import Arrival, simulate
from tests.lab.facts import Death


def ends(batching: Batching, *requests: tuple[float, float]) -> list[float]:
    """When the answers of one engine end; requests: when they come, and how long their answers take alone."""
    batch, found, coming = Batch(batching), [inf] * len(requests), list(enumerate(requests))
    while coming or batch.next:
        at = batch.next.at if batch.next else inf
        if coming and coming[0][1][0] < at:
            number, (begin, seconds) = coming.pop(0)
            batch.add(number, seconds, number, begin)
        else:
            assert batch.next
            number = int(str(batch.next.request))
            found[number] = at
            assert batch.remove(number, at) == pytest.approx(0.0, abs=1e-9)
    return found


def test_an_answer_is_slower_while_others_are_made():
    # Alone until 2, then both at half the pace: the second ends at 4, the first made 1 of its 4 by then.
    assert ends(Batching(1.0), (0.0, 4.0), (2.0, 1.0)) == pytest.approx([5.0, 4.0])
    assert ends(Batching(0.25), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)) == pytest.approx([1.5] * 3)


def test_requests_wait_in_an_engine_that_makes_few_answers_at_a_time():
    assert ends(Batching(0.0, 1), *[(0.0, 2.0)] * 3) == [2.0, 4.0, 6.0]
    assert ends(Batching(0.5, 2), *[(0.0, 1.0)] * 4) == pytest.approx([1.5, 1.5, 3.0, 3.0])
    # The third begins when the second ends, at 1, beside the first.
    assert ends(Batching(0.0, 2), (0.0, 3.0), (0.0, 1.0), (0.5, 1.0)) == [3.0, 1.0, 2.0]


def test_answers_that_do_not_slow_each_other_down_end_exactly_when_they_would_alone():
    requests = [(n / 10, 0.7) for n in range(50)]
    assert ends(Batching(), *requests) == [begin + seconds for begin, seconds in requests]


def test_an_answer_that_is_severed_makes_room_and_lacks_what_was_not_made():
    batch = Batch(Batching(1.0, 2))
    for number in range(3):
        batch.add(number, 4.0, number, 0.0)
    assert batch.remove(2, 1.0) == 4.0  # it waited
    assert batch.remove(1, 2.0) == pytest.approx(3.0)
    assert batch.next
    assert (batch.next.request, batch.next.at) == (0, pytest.approx(5.0))


TWO = Config((Backend("a", "a", ("0",)), Backend("b", "b", ("0",))), policy="eager")


def released(trace: list[Arrival], **batching: Batching) -> list[tuple[str, float]]:
    """Whose answers ended when; b loads in 2 s, and a is resident."""
    log = simulate(TWO, trace, Engines({"b": 2.0}), resident=["a"], batching=batching)
    assert check(log, TWO) == []
    return [(event.model, event.at) for event in log if event.kind == "released"]


def test_requests_of_one_moment_do_not_all_end_as_if_each_were_alone():
    trace = [Arrival(0.0, "a", 10.0)] * 500
    assert {at for _, at in released(trace)} == {10.0}
    moments = [at for _, at in released(trace, a=Batching(0.01, 100))]
    assert moments == pytest.approx([19.9 * (1 + number // 100) for number in range(500)])


def test_a_drain_lasts_as_long_as_the_answers_that_are_made_together():
    trace = [*[Arrival(0.0, "a", 2.0)] * 3, Arrival(1.0, "b", 1.0)]
    models, moments = zip(*released(trace, a=Batching(0.5)), strict=True)
    assert models == ("a", "a", "a", "b")
    # Three together take 2 * (1 + 2 * 0.5); then a is stopped in 1 s and b loaded in 2 s.
    assert moments == pytest.approx((4.0, 4.0, 4.0, 8.0))


def test_the_engine_that_is_loaded_after_a_death_makes_no_answers_of_the_dead_one():
    trace = [Arrival(0.0, "a", 100.0), Death(50.0, "a"), Arrival(51.0, "a", 1.0)]
    config = Config((Backend("a", "a", ("0",)),), policy="eager")
    log = simulate(config, trace, Engines({"a": 3.0}), resident=["a"], batching={"a": Batching(0.0, 1)})
    assert [event.at for event in log if event.kind == "released"] == [55.0]
