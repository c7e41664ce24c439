"""The loads of a GPU group for which no request waits: preloads, and the returns of home backends.

Both are begun only while no queue waits and no swap is under way, and stop no backend in standby.

* Preloads are of backends that are configured so, and of stages that a model in use lacks. They evict no
  backend that has had work. Of a model with a ``most`` so many backends are preloaded, where there is room
  first.
* A home backend comes back when nothing else was wanted on its GPUs for a while: the residents that must go
  for it have no lease, and were not used for ``home_after``. Once its load has failed, or it was unloaded by
  hand, it waits until a request has loaded it.
* A backend that made way for other programs comes back in the same way once they have left its GPUs for that
  long, where there is room.

Two other such loads are begun elsewhere: one that wakes a backend on its way to a deeper standby level
(upkeep.py), and another replica of a busy model (group.py).
"""

from __future__ import annotations

from typing import NamedTuple

from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.planner import victims
from anvil_mux.scheduler.policies import FOREVER
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
        if not state.takes_loads(slot):
            continue
        model = state.models[slot.model]
        if not model.may_come(slot) and model.is_coming:
            continue
        found = victims(state, slot, state.busy_gpus(), frozenset(), now) if model.may_come(slot) else None
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
    for each in state.groups_of(model) if found else ():
        if lacking := [slot for slot in found if slot.name in each.slots and slot not in each.preloads]:
            each.preloads += lacking
            each.changed()
            any_lacking = True
    return any_lacking


class _Return(NamedTuple):
    """The return of a backend by itself."""

    at: float = FOREVER
    victims: tuple[Slot, ...] = ()


def next_home(state: GroupState, now: float) -> Preload | None:
    """The backend that is to come back now, once its victims are evicted."""
    for slot in _absent(state):
        found = _return(state, slot, now)
        if found.at > now:
            continue
        if found.victims:
            return Preload(slot, list(found.victims), Cause("make_room", slot.model))
        if state.memory.has_room(slot):
            kind = "home" if slot.backend.home else "gpu_given_back"
            return Preload(slot, [], Cause(kind, seconds=_home_after(state, slot)))
    return None


def _absent(state: GroupState) -> list[Slot]:
    """The backends that come back by themselves."""
    if state.config.yield_above is None:
        return state.homes
    return [slot for slot in state.slots.values() if slot.backend.home or slot.made_way is not None]


def home_moments(state: GroupState, now: float) -> list[float]:
    """When backends come back by themselves, as things are."""
    return [_return(state, slot, now).at for slot in _absent(state)]


def comes_back_at(state: GroupState, slot: Slot, now: float) -> float:
    """When a backend comes back by itself, as things are; infinite: it does not."""
    return _return(state, slot, now).at


def _return(state: GroupState, slot: Slot, now: float) -> _Return:
    if not _may_return(state, slot):
        return _Return()
    found = victims(state, slot, state.busy_gpus(), frozenset(), now)
    if found is None or any(each.backend.home or each.state == "standby" for each in found):
        return _Return()
    if found and not slot.backend.home:
        return _Return()
    others = [each for each in state.slots.values() if not state.placement.fit_together(slot, each)]
    concerned = dict.fromkeys((*others, *found))
    if any(each.holders for each in concerned):
        return _Return()
    left = slot.since if slot.state == "stopped" else -FOREVER
    given_back = -FOREVER if slot.made_way is None else slot.made_way
    quiet = max([left, given_back, *(each.used for each in concerned)]) + _home_after(state, slot)
    return _Return(max([quiet, *(each.stays_until for each in found)]), tuple(found))


def _may_return(state: GroupState, slot: Slot) -> bool:
    if slot.state not in ("stopped", "standby") or slot.coming or slot.leaving:
        return False
    if slot.failed_starts or slot.unloaded or not state.takes_loads(slot):
        return False
    return state.models[slot.model].may_come(slot)


def _home_after(state: GroupState, slot: Slot) -> float:
    own = slot.backend.home_after
    return state.config.home_after if own is None else own
