"""When a queue is overdue, and which requests cannot come in time: pure functions over a GPU group's state.

The bound of a queue is fixed when it begins.

The bound is ``max_wait``, or less where a load would come too late for ``queue_timeout`` then. With ``auto``
it follows the load. A round is what it takes to load all models that wait for the same GPUs now, one after
the other, and this one last. The bound is two rounds: one in which all could be served oldest first, and one
more, of ``CHOICE_SECONDS`` at most, for the answers in between, which nobody knows beforehand, and for the
policy to choose in; and ``LEAST_SECONDS`` at least. A bound shorter than what a round really takes makes
every queue overdue before its turn comes, and then each policy serves them oldest first.

Before an overdue queue only older ones are served, and these waited when it began: one more round
(docs/design.md has the proof). Where ``queue_timeout`` leaves less time than that the bound is as much
shorter.

What a load is expected to take is fixed with the bound, and both stand in the event ``queued``: who reads a
log can compute each bound again.

A drain without a bound has no known end. What is known is how long answers of that model take on average: one
that has run for less is expected to take the rest, of one that has run for longer nothing is known. Where
nothing is known a request waits until ``queue_timeout``; one whose model could not be loaded before that is
refused at once. Only victims with a ``drain_timeout`` of their own count: who sets the one of the top level
has ``queue_timeout`` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from anvil_mux.config.kinds import span
from anvil_mux.errors import WouldWaitTooLong
from anvil_mux.scheduler.model import Model, ModelSettings
from anvil_mux.scheduler.planner import swap_seconds, victims
from anvil_mux.scheduler.slot import LOADING, Slot
from anvil_mux.scheduler.state import GroupState

LEAST_SECONDS = 60.0
"""The least bound: that of a queue whose round takes half as long, or less."""
CHOICE_SECONDS = 150.0
"""The most by which a bound is longer than a round."""
MOST_ANSWERS = 5
"""How many of the answers that are waited for are named."""


class Bound(NamedTuple):
    """The bound of a queue that begins, and what it was computed from."""

    seconds: float
    """The time after which the queue is overdue."""
    load_seconds: float
    """The time that the load of its model is expected to take."""
    swap_seconds: float
    """The time that a swap to its model would take now, the drain included."""


def bound(state: GroupState, model: Model, now: float) -> Bound:
    """After how many seconds a queue that begins now is overdue: in time to be loaded, if it can be."""
    load_seconds = min([state.load_seconds(slot, slot.load_level) for slot in state.own(model)], default=0.0)
    one = round_seconds(state, model, load_seconds) if model.settings.follows_load else 0.0
    timeout, soonest = state.config.queue_timeout, math.inf
    enough = timeout - most_seconds(model.settings, one) - one
    for each in state.groups_of(model) if model.is_spread else (state,):
        soonest = min(soonest, swap_seconds(each, model, now))
        if soonest <= enough:
            break  # an even shorter one makes no difference
    return Bound(bound_seconds(model.settings, one, timeout - soonest), load_seconds, soonest)


def round_seconds(state: GroupState, model: Model, load_seconds: float) -> float:
    """How long the loads of a round take that ends with that of ``model``, as far as is known."""
    waiting = {
        each.name: state.gpus_of(each)
        for each in state.models.values()
        if each is not model and state.lacks_load(each)
    }
    others = in_round(state.gpus_of(model), waiting)
    return load_seconds + math.fsum([state.models[name].queue.load_seconds for name in others])


def in_round(gpus: Set[str], waiting: Mapping[str, Set[str]]) -> list[str]:
    """The models that wait for some of these ``gpus``, or for a GPU for which one of these waits.

    ``waiting``: a model that waits -> the GPUs of its backends.
    """
    found: list[str] = []
    left, reached = dict(waiting), set(gpus)
    while more := [name for name, own in left.items() if not reached.isdisjoint(own)]:
        found += more
        reached.update(*[left.pop(name) for name in more])
    return found


def most_seconds(settings: ModelSettings, one: float) -> float:
    """The bound of a queue whose round takes the seconds of ``one``, if there is time enough."""
    if not settings.follows_load:
        return settings.max_wait
    return min(settings.max_wait, max(one + min(one, CHOICE_SECONDS), LEAST_SECONDS))


def bound_seconds(settings: ModelSettings, one: float, latest: float) -> float:
    """The bound if a swap must begin within ``latest`` seconds, or one round before that with ``auto``."""
    most = most_seconds(settings, one)
    if settings.follows_load and most > LEAST_SECONDS:
        most = max(min(most, latest - one), LEAST_SECONDS)
    return max(min(most, latest), 0.0)


# Too late


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
    most = state.drain_left(victim, now)
    return max(min(left, most), 0.0)


class _Prospect(NamedTuple):
    """The soonest that a backend could be loaded."""

    drain_seconds: float = 0.0
    load_seconds: float = 0.0
    before: tuple[Slot, ...] = ()
    """The backends whose answers are waited for."""


def too_late(state: GroupState, model: Model, now: float) -> WouldWaitTooLong | None:
    """Why a request that comes now could not be served in time: answers that a swap may not sever."""
    states = state.groups_of(model)
    if model.ready or not any(each.patient for each in states):
        return None
    found = [
        _prospect(each, slot, now)
        for each in states
        for slot in each.own(model)
        if slot.host.takes_loads and not slot.leaving
    ]
    soonest = min(found, key=lambda each: each.drain_seconds + each.load_seconds, default=_Prospect())
    seconds, limit = soonest.drain_seconds + soonest.load_seconds, state.config.queue_timeout
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
    seconds = state.load_seconds(slot, slot.load_level)
    if swap := state.swap_to(slot):
        before = swap.victims
    elif swaps := [each for each in state.swaps if not slot.holds.keys().isdisjoint(each.gpus())]:
        before = [victim for each in swaps for victim in each.victims]
        others = [each.target for each in swaps if each.target]
        seconds += max([state.load_seconds(other, other.level) for other in others], default=0.0)
    else:
        before = victims(state, slot, state.busy_gpus(), frozenset(), now) or []
    own = [each for each in before if each.backend.has_own("drain_timeout") and each.holders]
    left = [seconds_left(state, each, now) for each in own]
    return _Prospect(max(left, default=0.0), seconds, tuple(own))
