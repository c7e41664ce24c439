"""An engine that makes several answers at a time: how many, and how much they slow each other down.

An engine makes up to ``at_once`` answers at the same time, and the requests above that wait in it, in the
order in which they came, as in the slots of llama-server. Each answer takes as long as alone, and longer by
``slower_each`` for each other one that is made meanwhile. Simulations make answers by that (simulate.py), and
the answers of a log are told by it how long they would have taken alone (replay.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import NamedTuple


class Batching(NamedTuple):
    """How many answers an engine makes at a time, and how much they cost each other."""

    slower_each: float = 0.0
    """The part by which an answer takes longer for each other one that is made at the same time."""
    at_once: float = math.inf
    """How many are made at the same time, at most."""


ALONE = Batching()
"""An engine whose answers all take as long as alone."""


class NextEnd(NamedTuple):
    """The answer that ends next, if nothing comes before."""

    at: float
    order: int
    request: Hashable


_BatchedAnswer = tuple[float, int, Hashable]
"""Seconds or, once it is made, the progress at which it ends; its order among those of one moment; whose."""


class Batch:
    """The answers that one engine makes, and the requests that wait in it.

    Answers that are made together advance alike: ``pace`` seconds' worth in each second. So one ends where
    the progress, which is the moment times ``pace`` and ``offset``, is greater by the seconds that it takes
    alone.
    """

    __slots__ = ("_at_once", "_made", "_offset", "_pace", "_slower_each", "_waiting", "next")

    def __init__(self, batching: Batching) -> None:
        self._slower_each, self._at_once = batching
        self._made: list[_BatchedAnswer] = []  # a heap
        self._waiting: deque[_BatchedAnswer] = deque()
        self._pace, self._offset = 1.0, 0.0
        self.next: NextEnd | None = None

    def add(self, request: Hashable, seconds: float, order: int, now: float) -> None:
        """A request comes, whose answer takes so long alone."""
        self._waiting.append((seconds, order, request))
        self._go_on(now)

    def remove(self, request: Hashable, now: float) -> float:
        """An answer ends, whole or not: how many of its seconds alone were still to come."""
        made = self._made
        mine = next((each for each in made if each[2] == request), None)
        if mine is None:
            mine = next(each for each in self._waiting if each[2] == request)
            self._waiting.remove(mine)
            left = mine[0]
        else:
            left = mine[0] - (now * self._pace + self._offset)
            if mine is made[0]:
                heappop(made)
            else:
                made.remove(mine)
                heapify(made)
        self._go_on(now)
        return left

    def _go_on(self, now: float) -> None:
        """Begin what there is room for, and find what ends next."""
        made, waiting = self._made, self._waiting
        if not made:
            self._pace, self._offset = 1.0, 0.0
        progress = now * self._pace + self._offset
        while waiting and len(made) < self._at_once:
            seconds, order, request = waiting.popleft()
            heappush(made, (progress + seconds, order, request))
        if not made:
            self.next = None
            return
        pace = 1.0 / (1.0 + self._slower_each * (len(made) - 1))
        if pace != self._pace:
            self._pace, self._offset = pace, progress - now * pace
        ends, order, request = made[0]
        self.next = NextEnd(max((ends - self._offset) / self._pace, now), order, request)
