"""When each GPU group is asked again without a new fact: of thousands only the first is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count, islice

from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.policies import FOREVER

SPARE = 64
"""How many entries may be out of date, besides as many as there are groups."""
VERY_MANY = 16
"""One fact that concerns more groups than these is settled in portions."""
PORTION = 4
"""How many groups, or backends, are in a portion."""
PAUSE_SECONDS = 0.0005
"""How long others may have the lock after that."""


class Alarms:
    """The moments at which GPU groups are asked again. What was set last of a group holds."""

    def __init__(self) -> None:
        self._at: dict[GpuGroup, float] = {}
        self._heap: list[tuple[float, int, GpuGroup]] = []
        """The same in order, with entries that hold no longer."""
        self._order = count()
        self._soon: dict[GpuGroup | str, None] = {}
        """The groups that are to be asked, and the backends that are to get their places, as soon as there is
        time; ``_soon_at``: when the next are."""
        self._soon_at = FOREVER

    def set(self, group: GpuGroup, moment: float) -> None:
        """Have a group asked at a moment, unless another is set before."""
        if self._at.get(group) == moment:
            return
        self._at[group] = moment
        if moment < FOREVER:
            heappush(self._heap, (moment, next(self._order), group))
            if len(self._heap) > 2 * len(self._at) + SPARE:
                self._heap = [each for each in self._heap if self._holds(each)]
                heapify(self._heap)

    def forget(self, group: GpuGroup) -> None:
        """Ask a group no more: another has taken its place."""
        self._at.pop(group, None)
        self._soon.pop(group, None)

    @property
    def first(self) -> float:
        """The moment at which the first group is to be asked."""
        return min(self._first_set(), self._soon_at) if self._soon else self._first_set()

    def _first_set(self) -> float:
        while self._heap and not self._holds(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else FOREVER

    def due(self, groups: Sequence[GpuGroup], now: float) -> list[GpuGroup]:
        """The groups whose moment has come, and those of ``groups`` that were never asked."""
        found: list[GpuGroup] = []
        if len(self._at) < len(groups):
            found += [each for each in groups if each not in self._at and each not in self._soon]
        while self._first_set() <= now:
            _, _, group = heappop(self._heap)
            del self._at[group]
            found.append(group)
        return found

    # Very many groups

    def soon(self, some: Iterable[GpuGroup | str], now: float) -> None:
        """Have ``portion`` return groups, or backends, as soon as there is time, a few at a time."""
        self._soon |= dict.fromkeys(some)
        self._soon_at = now + PAUSE_SECONDS

    def portion(self, now: float) -> list[GpuGroup | str]:
        """The next of those that are to be asked, or placed, soon."""
        found = list(islice(self._soon, PORTION)) if now >= self._soon_at else []
        for group in found:
            del self._soon[group]
        self._soon_at = now + PAUSE_SECONDS if found else self._soon_at
        return found

    def _holds(self, entry: tuple[float, int, GpuGroup]) -> bool:
        moment, _, group = entry
        return self._at.get(group) == moment
