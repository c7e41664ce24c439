"""Answers that take longer in company, found by simulating again."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from anvil_mux.replay.crowding import RequestKey, ServedInterval, company, settle


def test_company_is_a_mean_over_the_time_of_an_answer() -> None:
    served = {
        ("a", 0): ServedInterval(0, 4),
        ("a", 1): ServedInterval(2, 4),
        ("b", 0): ServedInterval(0, 9),
        ("a", 2): ServedInterval(5, 6),
    }
    assert company(served) == {("a", 0): 0.5, ("a", 1): 1.0, ("b", 0): 0.0, ("a", 2): 0.0}


def at_once(count: int, seconds: float) -> object:
    """So many requests at one moment, each of which is served at once."""

    def run(factors: Mapping[RequestKey, float]) -> tuple[float, Mapping[RequestKey, ServedInterval]]:
        lasts = [seconds * factors.get(("a", number), 1.0) for number in range(count)]
        return max(lasts), {("a", number): ServedInterval(0.0, last) for number, last in enumerate(lasts)}

    return run


def test_answers_that_come_at_once_share_an_engine() -> None:
    assert settle(at_once(5, 2.0), {"a": 1.0}) == pytest.approx(10.0, rel=0.02)  # type: ignore[arg-type]
    assert settle(at_once(5, 2.0), {"a": 0.25}) == pytest.approx(4.0, rel=0.02)  # type: ignore[arg-type]


def test_engines_that_are_not_slower_are_simulated_once() -> None:
    assert settle(at_once(5, 2.0), {"a": 0.0}) == 2.0  # type: ignore[arg-type]
