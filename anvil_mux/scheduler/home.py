"""The home backends of a GPU group: each comes back when nothing else was wanted on its GPUs for a while.

Like a preload it is loaded although no request waits for it, only while no queue waits and no swap is under
way. The residents that must go for it have no lease, and were not used for ``home_after``; none in standby is
stopped. Once its load has failed, or it was unloaded by hand, it waits until a request has loaded it.
"""

from __future__ import annotations

from typing import NamedTuple

from anvil_mux.scheduler.causes import Cause
from anvil_mux.scheduler.planner import victims
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.preloads import Preload
from anvil_mux.scheduler.residents import may_come
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.state import GroupState


class _Return(NamedTuple):
    """The return of a home backend."""

    at: float = FOREVER
    victims: tuple[Slot, ...] = ()


def next_home(state: GroupState, now: float) -> Preload | None:
    """The home backend that is to come back now, once its victims are evicted."""
    for slot in state.homes:
        found = _return(state, slot, now)
        if found.at > now:
            continue
        if found.victims:
            return Preload(slot, list(found.victims), Cause("make_room", slot.model))
        if state.memory.has_room(slot):
            return Preload(slot, [], Cause("home", seconds=_home_after(state, slot)))
    return None


def moments(state: GroupState, now: float) -> list[float]:
    """When home backends come back, as things are."""
    return [_return(state, slot, now).at for slot in state.homes]


def comes_back_at(state: GroupState, slot: Slot, now: float) -> float:
    """When a home backend comes back, as things are; infinite: it does not."""
    return _return(state, slot, now).at


def _return(state: GroupState, slot: Slot, now: float) -> _Return:
    if not _may_return(state, slot):
        return _Return()
    found = victims(state, slot, state.busy_gpus(), frozenset(), now)
    if found is None or any(each.backend.home or each.state == "standby" for each in found):
        return _Return()
    others = [each for each in state.slots.values() if not state.placement.fit_together(slot, each)]
    concerned = dict.fromkeys((*others, *found))
    if any(each.holders for each in concerned):
        return _Return()
    left = slot.since if slot.state == "stopped" else -FOREVER
    quiet = max([left, *(each.used for each in concerned)]) + _home_after(state, slot)
    return _Return(max([quiet, *(each.stays_until for each in found)]), tuple(found))


def _may_return(state: GroupState, slot: Slot) -> bool:
    if slot.state not in ("stopped", "standby") or slot.coming or slot.leaving:
        return False
    if slot.failed_starts or slot.unloaded or not slot.host.takes_loads:
        return False
    return may_come(state.models[slot.model], slot)


def _home_after(state: GroupState, slot: Slot) -> float:
    own = slot.backend.home_after
    return state.timeouts.home_after if own is None else own
