"""When a queue is overdue: its bound, which is fixed when it begins.

The bound is ``max_wait``, or less where a load would come too late for ``queue_timeout`` then. With ``auto``
it follows the load: it is ``ROUNDS`` rounds, and ``LEAST_SECONDS`` at least. A round is what it takes to
load all models that wait in the GPU group now, one after the other, with the answers in between, and this one
last. That is its wait if all are served oldest first. A bound shorter than that makes every queue overdue
before its turn comes, and then each policy serves them oldest first. What it is longer by is the policy's to
choose in.

Before an overdue queue only older ones are served, and these waited when it began: one more round. So a
queue waits for ``ROUNDS`` + 1 rounds at most (docs/design.md has the proof), and where ``queue_timeout``
leaves less time than that the bound is as much shorter.
"""

from __future__ import annotations

import math

from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.planner import cost, swap_seconds
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.state import GroupState

LEAST_SECONDS = 60.0
"""The bound where few models wait."""
ROUNDS = 4 / 3
"""How many rounds a queue waits before it is overdue."""


def bound(state: GroupState, model: Model, now: float) -> float:
    """After how many seconds a queue that begins now is overdue: in time to be loaded, if it can be."""
    most, timeout, one = model.max_wait, state.timeouts.queue_timeout, 0.0
    if model.settings.follows_load:
        one = round_seconds(state, model)
        most = min(most, max(LEAST_SECONDS, ROUNDS * one))
    soonest = math.inf
    for each in state.states_of(model) if model.home else (state,):
        soonest = min(soonest, swap_seconds(each, model, now))
        if soonest <= timeout - most - one:
            break  # an even shorter one makes no difference
    latest = timeout - soonest
    if most > LEAST_SECONDS and one:
        most = max(min(most, latest - one), LEAST_SECONDS)
    return max(min(most, latest), 0.0)


def round_seconds(state: GroupState, model: Model) -> float:
    """How long a round will take that ends with the load of ``model``, as far as is known."""
    others = [
        each
        for each in state.models.values()
        if each.queue.tickets and not each.ready and each is not model and each.home in ("", state.name)
    ]
    own = min([_load_seconds(state, slot) for slot in state.own(model)], default=0.0)
    return own + math.fsum([_turn_seconds(state, each) for each in others])


def _turn_seconds(state: GroupState, model: Model) -> float:
    """How long a model's turn will take: its load, and its answers, for which the next model waits."""
    answers = model.demand.service_seconds * (1.0 + math.log(len(model.queue.tickets)))
    found = [
        _load_seconds(state, slot) + min(answers, state.drain_timeout(slot)) for slot in state.own(model)
    ]
    return min(found, default=0.0)


def _load_seconds(state: GroupState, slot: Slot) -> float:
    way = slot.level if slot.state in ("stopped", "standby") else slot.backend.evict_to[0]
    return cost(state, "", slot, way).load_seconds
