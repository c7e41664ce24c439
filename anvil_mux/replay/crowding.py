"""Engines that make some answers at a time, each slower for the others, in a simulation with fixed times.

An engine makes up to ``at_once`` answers at the same time, and the requests above that wait in it, as in the
slots of llama-server. Each answer takes as long as alone, and longer by ``slower_each`` for each other one
that is made meanwhile. When requests come, the simulation says; so it is run again and again, each time with
answers that take what those of the one before would have taken, until that changes little.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

MOST_ROUNDS = 40
STILL = 0.01
"""The change of a factor that is little."""

RequestKey = tuple[str, int]
"""A model, and the number of a request for it."""


class Company(NamedTuple):
    """How many answers an engine makes at a time, and how much they cost each other."""

    slower_each: float = 0.0
    """The part by which an answer takes longer for each other one that is made at the same time."""
    at_once: float = math.inf
    """How many are made at the same time, at most."""


class ServedRequest(NamedTuple):
    """A request that an engine got at a moment, and how long its answer would take alone."""

    begin: float
    alone_seconds: float


_T = TypeVar("_T")
RunCrowded = Callable[[Mapping[RequestKey, float]], tuple[_T, Mapping[RequestKey, ServedRequest]]]
"""Simulates with answers that take so many times as long as alone, and tells what was served when."""


def settle(run: RunCrowded[_T], companies: Mapping[str, Company]) -> _T:
    """The simulation whose answers take as long as their company in it makes them."""
    factors: dict[RequestKey, float] = {}
    found, served = run(factors)
    for _ in range(MOST_ROUNDS if any(each != Company() for each in companies.values()) else 0):
        before, factors = factors, {}
        for key, factor in slowed(served, companies).items():
            # Half of the way each time: else long answers and short ones would take turns for ever.
            factors[key] = (before.get(key, 1.0) + factor) / 2
        found, served = run(factors)
        if all(abs(factor - before.get(key, 1.0)) < STILL * factor for key, factor in factors.items()):
            break
    return found


def slowed(
    served: Mapping[RequestKey, ServedRequest], companies: Mapping[str, Company]
) -> dict[RequestKey, float]:
    """How many times as long as alone each answer takes, from when the engine gets its request."""
    of_model: defaultdict[str, list[RequestKey]] = defaultdict(list)
    for key in sorted(served, key=lambda key: served[key].begin):
        of_model[key[0]].append(key)
    factors = {}
    for model, keys in of_model.items():
        requests = [served[key] for key in keys]
        ends = _ends(requests, companies.get(model, Company()))
        for key, (begin, alone), end in zip(keys, requests, ends, strict=True):
            factors[key] = (end - begin) / alone if alone else 1.0
    return factors


def _ends(requests: Sequence[ServedRequest], company: Company) -> list[float]:
    """When the answers of one engine end; the requests in the order in which they come.

    Answers that are made together advance alike, so one that begins at a progress ends where the progress is
    greater by the time that it takes alone.
    """
    ends = [0.0] * len(requests)
    made: list[tuple[float, int]] = []  # a heap: the progress at which an answer ends, and its number
    waiting: deque[int] = deque()
    now = progress = 0.0
    coming = 0
    while coming < len(requests) or made:
        pace = 1.0 / (1.0 + company.slower_each * max(len(made) - 1, 0))
        ends_at = now + (made[0][0] - progress) / pace if made else math.inf
        comes_at = requests[coming].begin if coming < len(requests) else math.inf
        moment = min(ends_at, comes_at)
        progress += (moment - now) * pace
        now = moment
        if ends_at <= comes_at:
            progress, number = heappop(made)
            ends[number] = now
        else:
            waiting.append(coming)
            coming += 1
        while waiting and len(made) < company.at_once:
            number = waiting.popleft()
            heappush(made, (progress + requests[number].alone_seconds, number))
    return ends
