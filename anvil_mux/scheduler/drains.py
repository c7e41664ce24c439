"""The answers that a swap waits for, and whether they end in time: pure functions over a GPU group's state.

A drain without a bound has no known end. What is known is how long answers of that model take on average: one
that has run for less is expected to take the rest, of one that has run for longer nothing is known. Where
nothing is known a request waits until ``queue_timeout``; one whose model could not be loaded before that is
refused at once. Only victims with a ``drain_timeout`` of their own count: who sets the one of the top level
has ``queue_timeout`` beside it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from anvil_mux.errors import WouldWaitTooLong
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.planner import cost, victims
from anvil_mux.scheduler.progress import span
from anvil_mux.scheduler.slot import LOADING, Slot
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.swap import swap_to

MOST_ANSWERS = 5
"""How many of the answers that are waited for are named."""


class RunningAnswer(NamedTuple):
    """An answer that runs, and that a swap waits for."""

    model: str
    request: str
    """The id of its request; its ticket, where that has none."""
    run_seconds: float

    @property
    def words(self) -> str:
        return f"request {self.request} of {self.model} has run for {span(self.run_seconds)}"


def answers(slots: Iterable[Slot], now: float) -> tuple[RunningAnswer, ...]:
    """The answers that run at these backends, the longest first."""
    found = [
        RunningAnswer(slot.model, ticket.request or f"#{ticket.id}", now - since)
        for slot in slots
        for ticket, since in slot.holders.items()
    ]
    return tuple(sorted(found, key=lambda each: -each.run_seconds)[:MOST_ANSWERS])


def seconds_left(state: GroupState, victim: Slot, now: float) -> float:
    """How long the answers of a backend will take yet, as far as is known."""
    usual = state.models[victim.model].demand.service_seconds or 0.0
    left = max([usual - (now - since) for since in victim.holders.values()], default=0.0)
    most = victim.drain_until - now if victim.state == "draining" else victim.backend.drain_timeout
    return max(min(left, most), 0.0)


class _Prospect(NamedTuple):
    """The soonest that a backend could be loaded."""

    drain_seconds: float = 0.0
    load_seconds: float = 0.0
    before: tuple[Slot, ...] = ()
    """The backends whose answers are waited for."""


def too_late(state: GroupState, model: Model, now: float) -> WouldWaitTooLong | None:
    """Why a request that comes now could not be served in time: answers that a swap may not sever."""
    states = state.states_of(model)
    if model.ready or not any(each.patient for each in states):
        return None
    found = [
        _prospect(each, slot, now)
        for each in states
        for slot in each.own(model)
        if slot.host.takes_loads and not slot.leaving
    ]
    soonest = min(found, key=lambda each: each.drain_seconds + each.load_seconds, default=_Prospect())
    seconds, limit = soonest.drain_seconds + soonest.load_seconds, state.timeouts.queue_timeout
    if not soonest.drain_seconds or not soonest.load_seconds <= limit < seconds:
        return None
    [first, *_] = answers(soonest.before, now)
    text = (
        f"{model.name} would wait longer than queue_timeout ({limit:g} s): {first.words}, and may finish "
        f"first (drain_timeout). It can be loaded in about {span(seconds)}."
    )
    return WouldWaitTooLong(text, retry_after=seconds - limit)


def _prospect(state: GroupState, slot: Slot, now: float) -> _Prospect:
    """The soonest that a backend could be loaded, whatever the policy says."""
    if slot.state in (*LOADING, "ready"):
        return _Prospect()
    way = slot.level if slot.state in ("stopped", "standby") else slot.backend.evict_to[0]
    seconds = cost(state, "", slot, way).load_seconds
    if swap := swap_to(state.swaps, slot):
        before = swap.victims
    elif swaps := [each for each in state.swaps if not slot.holds.keys().isdisjoint(each.gpus())]:
        before = [victim for each in swaps for victim in each.victims]
        others = [each.target for each in swaps if each.target]
        seconds += max([cost(state, "", other, other.level).load_seconds for other in others], default=0.0)
    else:
        before = victims(state, slot, state.busy_gpus(), frozenset(), now) or []
    own = [each for each in before if each.backend.has_own("drain_timeout") and each.holders]
    left = [seconds_left(state, each, now) for each in own]
    return _Prospect(max(left, default=0.0), seconds, tuple(own))
