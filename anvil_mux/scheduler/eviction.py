"""WHOM to evict.

Given the bytes that a load still misses on each of its GPUs and the residents that may go, an eviction names
victims, or None when not even all of them would make room. Pure; the GPU group calls it while it decides.

An eviction is a frozen dataclass with ``order(candidate)``: those with the smallest order go first. Whatever
the order, no backend is evicted whose memory is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from anvil_mux.scheduler.policies import build


@dataclass(frozen=True, slots=True)
class Candidate:
    """A resident that may be evicted: neither pinned, nor loading, nor in another swap."""

    backend: str
    holds: Mapping[str, int]
    """GPU id -> bytes; where host memory is short, those alone, as ``host memory``."""
    leases: int
    last_used: float
    priority: int = 0
    loss: float = 0.0
    """The cost of evicting it: arrivals per second for it, times the seconds of loading it again."""
    waiting: float = 0.0
    """The requests that wait for a place at it, as it takes only so many at once."""


class Eviction(Protocol):
    def order(self, candidate: Candidate) -> Any: ...


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """Evict models of low priority first, then idle ones, then the least recently used."""

    def order(self, candidate: Candidate) -> tuple[int, bool, float, str]:
        return (candidate.priority, candidate.leases > 0, candidate.last_used, candidate.backend)


@dataclass(frozen=True)
class LeastLoss:
    """Evict models of low priority first, then idle ones, then the least used and quickest to reload."""

    def order(self, candidate: Candidate) -> tuple[int, bool, float, float, str]:
        one = candidate
        return (one.priority, one.leases > 0, one.loss, one.last_used, one.backend)


@dataclass(frozen=True)
class LeastDemand:
    """Evict models of low priority first, then those with the fewest requests, then the least recently used.

    As SwapServeLLM has it (its section 3.5). Requests are those that run there and those that wait for a
    place.
    """

    def order(self, candidate: Candidate) -> tuple[int, float, float, str]:
        one = candidate
        return (one.priority, one.leases + one.waiting, one.last_used, one.backend)


EVICTIONS: dict[str, type] = {"cost": LeastLoss, "lru": LeastRecentlyUsed, "demand_lru": LeastDemand}


def build_eviction(name: str, settings: Mapping[str, object] | None = None) -> Eviction:
    """The eviction called ``name``; ValueError says what is wrong and what is known."""
    return build(EVICTIONS, "eviction", name, settings or {})  # type: ignore[return-value]


def victims(
    eviction: Eviction, candidates: Sequence[Candidate], missing: Mapping[str, int]
) -> tuple[str, ...] | None:
    """The backends to evict so that every value of ``missing`` (bytes by GPU) is covered, or None."""
    missing = {gpu: amount for gpu, amount in missing.items() if amount > 0}
    chosen: list[Candidate] = []
    for candidate in sorted(candidates, key=eviction.order):
        if all(_covered(chosen, gpu) >= amount for gpu, amount in missing.items()):
            break
        if any(_covered(chosen, gpu) < missing[gpu] for gpu in candidate.holds if gpu in missing):
            chosen.append(candidate)
    for candidate in tuple(chosen):
        rest = [other for other in chosen if other is not candidate]
        if all(_covered(rest, gpu) >= amount for gpu, amount in missing.items()):
            chosen = rest
    if any(_covered(chosen, gpu) < amount for gpu, amount in missing.items()):
        return None
    return tuple(candidate.backend for candidate in chosen)


def _covered(chosen: Sequence[Candidate], gpu: str) -> int:
    return sum(candidate.holds.get(gpu, 0) for candidate in chosen)
