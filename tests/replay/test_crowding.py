"""Answers that take longer in company, found by simulating again."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from anvil_mux.replay.crowding import Company, RequestKey, RunCrowded, ServedRequest, settle, slowed


def factors(company: Company, *requests: tuple[float, float]) -> list[float]:
    """How many times as long as alone the answers take; requests: when they come, and their time alone."""
    served = {("a", number): ServedRequest(*each) for number, each in enumerate(requests)}
    return list(slowed(served, {"a": company}).values())


def test_an_answer_is_slower_while_others_are_made() -> None:
    # Alone until 2, then both at half the pace: the second ends at 4, the first made 1 of its 4 by then.
    assert factors(Company(1.0), (0.0, 4.0), (2.0, 1.0)) == pytest.approx([5.0 / 4.0, 2.0])
    assert factors(Company(0.25), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)) == pytest.approx([1.5] * 3)


def test_models_do_not_slow_each_other_down() -> None:
    served = {("a", 0): ServedRequest(0.0, 4.0), ("b", 0): ServedRequest(0.0, 4.0)}
    assert slowed(served, {"a": Company(1.0), "b": Company(1.0)}) == {("a", 0): 1.0, ("b", 0): 1.0}


def test_requests_wait_in_an_engine_that_makes_few_answers_at_a_time() -> None:
    assert factors(Company(0.0, 1), *[(0.0, 2.0)] * 3) == pytest.approx([1.0, 2.0, 3.0])
    assert factors(Company(0.5, 2), *[(0.0, 1.0)] * 4) == pytest.approx([1.5, 1.5, 3.0, 3.0])
    # The third begins when the second ends, at 1, beside the first.
    assert factors(Company(0.0, 2), (0.0, 3.0), (0.0, 1.0), (0.5, 1.0)) == pytest.approx([1.0, 1.0, 1.5])


def at_once(count: int, seconds: float) -> RunCrowded[float]:
    """So many requests at one moment, each of which is served at once."""

    def run(factors: Mapping[RequestKey, float]) -> tuple[float, Mapping[RequestKey, ServedRequest]]:
        lasts = [seconds * factors.get(("a", number), 1.0) for number in range(count)]
        return max(lasts), {("a", number): ServedRequest(0.0, seconds) for number in range(count)}

    return run


def test_answers_that_come_at_once_share_an_engine() -> None:
    assert settle(at_once(5, 2.0), {"a": Company(1.0)}) == pytest.approx(10.0, rel=0.02)
    assert settle(at_once(5, 2.0), {"a": Company(0.25)}) == pytest.approx(4.0, rel=0.02)
    assert settle(at_once(5, 2.0), {"a": Company(0.0, 1)}) == pytest.approx(10.0, rel=0.02)


def test_engines_that_are_not_slower_are_simulated_once() -> None:
    runs = []

    def run(factors: Mapping[RequestKey, float]) -> tuple[int, Mapping[RequestKey, ServedRequest]]:
        runs.append(factors)
        return len(runs), {}

    assert settle(run, {"a": Company()}) == 1
