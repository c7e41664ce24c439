"""Engines that are slower with many answers at once, in a simulation that gives each answer a fixed time.

Each answer is held to take as long as alone, and longer by a part of that for each other answer at the same
engine: ``slower_each`` of the warm-up. How many there are at the same time, the simulation says; so it is run
again and again, each time with what the one before found, until that changes little.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

MOST_ROUNDS = 40
STILL = 0.01
"""The change of a factor that is little."""

RequestKey = tuple[str, int]
"""A model, and the number of a request for it."""


class ServedInterval(NamedTuple):
    """When a request was served."""

    begin: float
    end: float


_T = TypeVar("_T")
RunCrowded = Callable[[Mapping[RequestKey, float]], tuple[_T, Mapping[RequestKey, ServedInterval]]]
"""Simulates with answers that take so many times as long as alone, and tells when each was served."""


def settle(run: RunCrowded[_T], slower_each: Mapping[str, float]) -> _T:
    """The simulation whose answers take as long as their company in it makes them."""
    factors: dict[RequestKey, float] = {}
    found, served = run(factors)
    for _ in range(MOST_ROUNDS if any(slower_each.values()) else 0):
        before, factors = factors, {}
        for key, others in company(served).items():
            last = before.get(key, 1.0)
            # Half of the way each time: else long answers and short ones would take turns for ever.
            factors[key] = (last + 1.0 + slower_each.get(key[0], 0.0) * others) / 2
        found, served = run(factors)
        if all(abs(factor - before.get(key, 1.0)) < STILL * factor for key, factor in factors.items()):
            break
    return found


def company(served: Mapping[RequestKey, ServedInterval]) -> dict[RequestKey, float]:
    """How many others of its model were served at the same time as each, as a mean over its time."""
    of_model: defaultdict[str, list[RequestKey]] = defaultdict(list)
    for key in served:
        of_model[key[0]].append(key)
    return {
        key: others
        for keys in of_model.values()
        for key, others in zip(keys, _company([served[key] for key in keys]), strict=True)
    }


def _company(intervals: Sequence[ServedInterval]) -> list[float]:
    changes = sorted([(each.begin, 1) for each in intervals] + [(each.end, -1) for each in intervals])
    moments = [moment for moment, _ in changes]
    counts = list(accumulate(change for _, change in changes))
    steps = [(later - now) * n for now, later, n in zip(moments, moments[1:], counts, strict=False)]
    areas = [0.0, *accumulate(steps)]

    def area(moment: float) -> float:
        """The time that all were served, until a moment."""
        at = bisect_right(moments, moment) - 1
        return areas[at] + (moment - moments[at]) * counts[at]

    return [
        (area(each.end) - area(each.begin)) / (each.end - each.begin) - 1 if each.end > each.begin else 0.0
        for each in intervals
    ]
