"""When a queue is overdue: its bound, which is fixed when it begins.

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
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import NamedTuple

from anvil_mux.scheduler.model import Model, ModelSettings
from anvil_mux.scheduler.planner import cost, swap_seconds
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.state import GroupState

LEAST_SECONDS = 60.0
"""The least bound: that of a queue whose round takes half as long, or less."""
CHOICE_SECONDS = 150.0
"""The most by which a bound is longer than a round."""


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
    load_seconds = min([_load_seconds(state, slot) for slot in state.own(model)], default=0.0)
    one = round_seconds(state, model, load_seconds) if model.settings.follows_load else 0.0
    timeout, soonest = state.timeouts.queue_timeout, math.inf
    enough = timeout - most_seconds(model.settings, one) - one
    for each in state.states_of(model) if model.is_spread else (state,):
        soonest = min(soonest, swap_seconds(each, model, now))
        if soonest <= enough:
            break  # an even shorter one makes no difference
    return Bound(bound_seconds(model.settings, one, timeout - soonest), load_seconds, soonest)


def round_seconds(state: GroupState, model: Model, load_seconds: float) -> float:
    """How long the loads of a round take that ends with that of ``model``, as far as is known."""
    waiting = {
        each.name: _gpus(state, each)
        for each in state.models.values()
        if each.queue.tickets and not each.ready and each is not model and each.queues_in(state.name)
    }
    others = in_round(_gpus(state, model), waiting)
    return load_seconds + math.fsum([state.models[name].queue.load_seconds for name in others])


def _gpus(state: GroupState, model: Model) -> set[str]:
    return {gpu for slot in state.own(model) for gpu in slot.holds}


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


def _load_seconds(state: GroupState, slot: Slot) -> float:
    way = slot.level if slot.state in ("stopped", "standby") else slot.backend.evict_to[0]
    return cost(state, "", slot, way).load_seconds
