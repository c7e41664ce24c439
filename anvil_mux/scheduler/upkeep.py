"""Upkeep: what happens to backends although no queue needs their GPUs.

Backends that could not be stopped are stopped again; those in standby are demoted when their time has come or
host memory is short; idle residents are evicted after their ``ttl``, or for a queue of another GPU group that
lacks host memory. All go that are on a host that is cleared, or on a GPU that is left to other programs.
"""

from __future__ import annotations

from anvil_mux.config.settings import gib
from anvil_mux.scheduler.causes import PAUSED, UNLOADED, Cause
from anvil_mux.scheduler.group_swaps import GroupSwaps
from anvil_mux.scheduler.moves import Moves
from anvil_mux.scheduler.planner import waiting
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.residents import may_come, surplus
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.standby import DESCENTS, below, demoted_at
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.steps import Step


class Upkeep:
    """The upkeep of one GPU group."""

    def __init__(self, state: GroupState, moves: Moves, swaps: GroupSwaps) -> None:
        self._state = state
        self._moves = moves
        self._swaps = swaps

    def moments(self) -> list[float]:
        """The moments at which something is to be done, also those that have passed."""
        demotions = [until for slot in self._state.sleepers if (until := demoted_at(slot)) is not None]
        return demotions + [slot.idle_until for slot in self._state.idlers]

    def step(self, now: float) -> Step | None:
        """The next step that is due."""
        return self._retry_stuck(now) or self._demote_next(now)

    def _retry_stuck(self, now: float) -> Step | None:
        for slot in self._state.slots.values():
            if now < slot.retry_at or (slot.state != "stuck" and slot.next_level != "stop"):
                continue
            if slot.state == "stuck":
                return self._moves.evict(slot, now, Cause("retry_stuck"))
            if may_be_stopped(self._state, slot):
                why = self._why_stopped(slot)
                return self._moves.demote(slot, now, Cause("retry_stuck") if slot.failed_stops else why)
        return None

    def _why_stopped(self, slot: Slot) -> Cause:
        if slot.leaving:
            return Cause(slot.leaving)
        return self._why_gone(slot) if self._state.must_go(slot) else UNLOADED

    def _demote_next(self, now: float) -> Step | None:
        """Demote a backend that has been at its level for long enough, or because host memory is short."""
        state = self._state
        found = state.memory.yields(now)
        if found is not None and found is state.slots.get(found.name):
            return self._moves.demote(found, now, Cause("host_memory_short"), to=state.memory.lower(found))
        for slot in state.sleepers:
            until = demoted_at(slot)
            if until is None or until > now or slot.coming or state.models[slot.model].queue.tickets:
                continue
            if DESCENTS.get((slot.level, to := below(slot, may_wake=self._is_calm(slot)))):
                slot.next_level = to
                self._swaps.begin(slot, [], now, Cause("wake_to_demote", way=to), preload=True)
                return self._swaps.advance(now)
            cause = Cause("demote_timer", way=slot.level, seconds=now - slot.since)
            return self._moves.demote(slot, now, cause)
        return None

    def _is_calm(self, slot: Slot) -> bool:
        """Whether a backend in standby may be woken for a moment: there is room, and no queue waits."""
        state = self._state
        if state.swaps or waiting(state) or not may_come(state.models[slot.model], slot):
            return False
        return state.fits(slot) and state.memory.has_room(slot)

    def clear(self, now: float) -> None:
        """Have all go that may not stay where it is, or is on its way there; what it keeps there, too.

        Such are the backends on a host that was drained (while anvil-mux is paused, all are), and on a GPU
        that is left to other programs.
        """
        state = self._state
        if not state.host.is_cleared and state.common.settings.yield_above is None:
            return
        slots = [slot for slot in state.slots.values() if not slot.backend.url and state.must_go(slot)]
        for slot in [slot for slot in slots if slot.coming and slot.state != "cancelling"]:
            self._swaps.give_up(slot, now, self._why_gone(slot))  # makes victims ready which only drained
        for slot in slots:
            if slot.state == "ready":
                if not slot.host.is_cleared:
                    slot.made_way = FOREVER
                self._swaps.evict(slot, now, self._why_gone(slot))
            if slot.host.is_cleared:
                if slot.state in ("draining", "standby"):
                    slot.next_level = "stop"
                self._swaps.hasten(slot, now)
            elif slot.state == "standby" and any(slot.residual.values()):
                slot.next_level = "stop"

    def _why_gone(self, slot: Slot) -> Cause:
        """Why a backend may not stay where it is."""
        if slot.host.pause.is_on:
            return PAUSED
        if slot.host.is_drained:
            return Cause("host_drained", host=slot.host.name)
        gpu = self._state.left_gpu(slot)
        return Cause("others_hold", detail=f"{gib(self._state.placement.others[gpu])} of GPU {gpu}")

    def give_up_surplus(self, now: float) -> None:
        """Give up backends here of models of which more are resident or coming than may be."""
        for model in self._state.bounded:
            while (slot := surplus(model)) and slot is self._state.slots.get(slot.name):
                self._swaps.give_up(slot, now, Cause("surplus"))
                if slot.state == "loading":
                    break  # it counts until its load is being cancelled, which is the next step

    def evict_idle(self, now: float) -> bool:
        """Begin to evict idle residents; whether there were any."""
        idlers = self._state.idlers
        idle = [slot for slot in idlers if slot.idle_until <= now < FOREVER]
        for slot in idle:
            self._swaps.evict(slot, now, Cause("idle", seconds=slot.ttl or 0.0))
        for slot in self._state.ready if self._state.memory.budget is not None else ():
            model = self._state.common.models.get(self._state.memory.answer(slot, now))
            if model and model.queue.tickets:
                cause, severs = Cause("host_memory_needed", model.name), Cause("evicted", model.name)
                self._swaps.evict(slot, now, cause, severs=severs)
                return True
        return bool(idle)


def may_be_stopped(state: GroupState, slot: Slot) -> bool:
    """Whether a backend is in standby and no request waits for it as it is."""
    wanted = state.models[slot.model].queue.tickets and not slot.leaving and not state.must_go(slot)
    return slot.state == "standby" and not slot.coming and not wanted
