"""Figures of a log: waits, swaps and idleness as numbers, a fold over its events.

It reads the log of a simulation and of a running program alike. What had not ended when the log did, a load
or an answer, counts as far as the log tells of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Any

from anvil_mux.errors import WaitedTooLong
from anvil_mux.scheduler.events import Event
from anvil_mux.telemetry.eventlog import Situation


@dataclass(frozen=True)
class Figures:
    """The numbers of one run.

    A wait is that of a request that got its model, 0 if it was loaded, or that waited for all of
    ``queue_timeout`` for it in vain.
    """

    requests: int
    """All requests that arrived, whatever became of them."""
    swaps: int
    """Loads that began."""
    makespan_seconds: float
    """Seconds from the first arrival to the last answer."""
    wait_mean_seconds: float
    wait_rms_seconds: float
    """The root of the mean square of the waits: a long one weighs more than several short ones."""
    wait_p50_seconds: float
    """The shortest wait that half of the requests did not exceed; likewise the others."""
    wait_p95_seconds: float
    wait_max_seconds: float
    swap_seconds: float
    """Seconds of all evictions and loads together, without the drains before them."""
    busy_fraction: float
    """The part of the makespan in which at least one request was in service."""
    failed: int
    """Requests that ended without their model."""
    severed: int
    """Requests severed in service, by a drain that ended or a backend that died."""


def figures(log: Sequence[Event], sent: int = 0, begins: Mapping[str, Any] = MappingProxyType({})) -> Figures:
    """Compute the figures; ``sent``: how many requests came, where ``max_queue`` may have refused some.

    No event tells of those that were turned away. ``begins``: the situation in which the log begins, as JSON.
    """
    situation = Situation.parse(begins)
    there = {ticket for each in situation.holders for ticket in each}
    tickets = len(there | {event.ticket for event in log if event.ticket})
    waits = sorted([event.seconds for event in log if event.kind == "leased" or _timed_out(event)])
    first = situation.at if there else next((event.at for event in log if event.ticket), 0.0)
    last = next((event.at for event in reversed(log) if _answers(event)), first)
    makespan = last - first
    return Figures(
        requests=max(tickets, sent),
        swaps=sum([event.kind == "loading" for event in log]),
        makespan_seconds=makespan,
        wait_mean_seconds=mean(waits),
        wait_rms_seconds=root_mean_square(waits),
        wait_p50_seconds=quantile(waits, 0.50),
        wait_p95_seconds=quantile(waits, 0.95),
        wait_max_seconds=quantile(waits, 1.00),
        swap_seconds=_swap_seconds(log, situation),
        busy_fraction=_busy_seconds(log, last, situation) / makespan if makespan else 0.0,
        failed=sum([event.kind == "failed" for event in log]) + max(sent - tickets, 0),
        severed=sum([_cut(event) for event in log]),
    )


def _timed_out(event: Event) -> bool:
    return event.kind == "failed" and event.cause is not None and event.cause.detail == WaitedTooLong.code


def _answers(event: Event) -> bool:
    return event.kind in ("leased", "released", "severed", "failed") or _cut(event) > 0


def _cut(event: Event) -> int:
    """How many requests it severed in service."""
    return event.size if event.kind in ("severed", "stopped") else 0


def mean(values: Iterable[float | None], unknown: float = 0.0) -> float:
    """The mean of the values that are known; ``unknown``: that of none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else unknown


def quantile(values: Sequence[float], share: float) -> float:
    """The least of the sorted ``values`` that ``share`` of them do not exceed."""
    return values[math.ceil(share * len(values)) - 1] if values else 0.0


def fairness(answers: Sequence[int]) -> float | None:
    """The fewest answers of a client over the most; None without any."""
    return min(answers) / max(answers) if any(answers) else None


def root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum([value * value for value in values]) / len(values)) if values else 0.0


def _swap_seconds(log: Sequence[Event], situation: Situation) -> float:
    there = situation.backends
    begun = {name: each.since for name, each in there.items() if each.state in ("loading", "evicting")}
    taken = []
    for event in log:
        if event.kind in ("loading", "evicting"):
            begun[event.backend] = event.at
        elif event.kind in ("ready", "stopped", "standby", "stuck") and event.backend in begun:
            taken.append(event.at - begun.pop(event.backend))
    return math.fsum(taken)


def _busy_seconds(log: Sequence[Event], end: float, situation: Situation) -> float:
    """How long at least one backend was leased, until ``end``."""
    leases = {name: len(each.leases) for name, each in situation.backends.items()}
    total, since, taken = sum(leases.values()), situation.at, []
    for event in log:
        before = leases.get(event.backend, 0)
        after = _leases_after(event, before)
        if after == before:
            continue
        if not total:
            since = event.at
        leases[event.backend] = after
        total += after - before
        if not total:
            taken.append(event.at - since)
    if total:
        taken.append(end - since)
    return math.fsum(taken)


def _leases_after(event: Event, before: int) -> int:
    """How many leases the event's backend has after it."""
    if event.kind in ("leased", "released"):
        return event.size
    if event.kind == "severed":
        return before - event.size
    return 0 if event.kind == "stopped" else before
