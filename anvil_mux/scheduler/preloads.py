"""Preloads: of backends that are configured so, and of stages that a model in use lacks.

They are begun only while no queue waits and no swap is under way, evict no backend that has had work, and
stop none in standby. Of a model with a ``most`` so many backends are preloaded, where there is room first.
Two other loads that no request waits for are begun elsewhere: one that wakes a backend on its way to a deeper
standby level (upkeep.py), and another replica of a busy model (decider.py).
"""

from __future__ import annotations

from typing import NamedTuple

from anvil_mux.scheduler.causes import Cause
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.planner import victims
from anvil_mux.scheduler.residents import may_come
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.state import GroupState


class Preload(NamedTuple):
    """A backend to load now, once its victims are evicted."""

    target: Slot
    victims: list[Slot]
    cause: Cause


def next_preload(state: GroupState, now: float) -> Preload | None:
    """The next preload; backends for which there is no room any more are passed over.

    So are those of a model of which enough are resident; while they are coming, the others are kept.
    """
    for slot in tuple(state.preloads):
        if not slot.host.takes_loads:
            continue
        model = state.models[slot.model]
        if not may_come(model, slot) and model.is_coming:
            continue
        found = victims(state, slot, state.busy_gpus(), frozenset(), now) if may_come(model, slot) else None
        failed = slot.state != "stopped" or slot.retry_at > now or found is None
        if failed or any(each.state == "standby" or each.has_had_work for each in found or ()):
            state.preloads.remove(slot)
        elif any(each.stays_until > now for each in found or ()):
            return None
        elif found:
            return Preload(slot, found, Cause("make_room", slot.model))
        else:
            state.preloads.remove(slot)
            if state.memory.has_room(slot):
                return Preload(slot, [], _cause(state, slot, now))
    return None


def _cause(state: GroupState, slot: Slot, now: float) -> Cause:
    model = state.models[slot.model]
    lacked = model.ready and model.replicas and slot in model.replicas.lacking(now)
    return Cause("missing_stage" if lacked else "preload")


def complete(state: GroupState, model: Model, now: float) -> bool:
    """Preload the stages that a model in use lacks; whether there are any."""
    found = model.replicas.lacking(now) if model.replicas else []
    any_lacking = False
    for each in state.states_of(model) if found else ():
        if lacking := [slot for slot in found if slot.name in each.slots and slot not in each.preloads]:
            each.preloads += lacking
            each.changed()
            any_lacking = True
    return any_lacking
