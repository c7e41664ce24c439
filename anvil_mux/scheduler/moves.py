"""The moves of backends: a slot enters a state, and the event and the step of that are made.

``enter`` is the only caller of ``Slot.enter``. The rest of the GPU group is brought up to date at once: the
backends that are ready, the in-flight tracker, requests that wait for a place, the plans.
"""

from __future__ import annotations

from anvil_mux.scheduler.admission import Admission
from anvil_mux.scheduler.causes import Cause, Severance
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.model import ready_slots
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.standby import below, levels
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.steps import Cancel, Demote, Evict, Load, Ticket
from anvil_mux.scheduler.swap import SwapInProgress


class Moves:
    """The moves of the backends of one GPU group."""

    def __init__(self, state: GroupState, admission: Admission) -> None:
        self._state = state
        self._admission = admission

    def enter(self, slot: Slot, what: str, now: float) -> None:
        """Have a slot enter a state, with all that hangs on it."""
        state, before, model = self._state, slot.state, self._state.models[slot.model]
        slot.enter(what, now)
        model.note(slot)
        state.placement.note(slot)
        leaves_ready = before == "ready"
        if leaves_ready and model.queue.limited:
            model.queue.left = now
        if leaves_ready or slot.state == "ready":
            state.ready = ready_slots(state.slots.values())
            model.renew_ready()
        state.changed()
        state.memory.changed()
        if leaves_ready and model.queue.limited:
            self._admission.fill_places(model, now)  # those that needed this one wait for it no longer
            if not model.ready:
                self._admission.turn_away(model, now)
        if model.replicas and slot.state not in ("ready", "draining"):
            model.replicas.in_flight.forget(slot.name)

    def load(self, slot: Slot, now: float, cause: Cause) -> Load:
        self.enter(slot, "load", now)
        way, slot.level, slot.residual, slot.host_bytes = slot.level, "stop", {}, 0
        slot.unloaded = False
        if slot.next_level == "stop":  # it was to be stopped, and is wanted after all
            slot.next_level = ""
        self._state.emit(Event(now, "loading", slot.model, slot.name, cause=cause, way=way))
        return Load(slot.name, way)

    def cancel(self, slot: Slot, now: float, cause: Cause) -> Cancel:
        self.enter(slot, "cancel", now)
        self._state.emit(Event(now, "cancelling", slot.model, slot.name, cause=cause, target=cause.model))
        return Cancel(slot.name)

    def demote(self, slot: Slot, now: float, cause: Cause, *, target: str = "", to: str = "") -> Demote:
        """Demote a backend, for the model ``target`` if any; ``to``: the level, by default the next."""
        to = "stop" if slot.next_level == "stop" else to or below(slot, may_wake=False)
        self.enter(slot, "demote", now)
        slot.next_level = to
        self._state.emit(Event(now, "demoting", slot.model, slot.name, cause=cause, target=target, way=to))
        return Demote(slot.name, slot.level, to)

    def drain(self, slot: Slot, now: float, cause: Cause, *, seconds: float, target: str) -> None:
        """Close the gate of a resident; in so many seconds, which may be infinite, its leases are severed."""
        self.enter(slot, "drain", now)
        slot.drain_until = now + seconds
        self.drain_on(slot, now, cause, target=target)

    def drain_on(self, slot: Slot, now: float, cause: Cause, *, target: str) -> None:
        """Have a backend that drains make room for this model; its leases have the time that they had."""
        size, seconds = len(slot.holders), slot.drain_until - now
        self._state.emit(
            Event(
                now, "draining", slot.model, slot.name, size=size, seconds=seconds, cause=cause, target=target
            )
        )

    def reprieve(self, slot: Slot, now: float) -> None:
        """Make a backend ready again that drained: it need not make room any more."""
        self.enter(slot, "reprieve", now)
        self._state.emit(Event(now, "ready", slot.model, slot.name, cause=Cause("reprieved")))
        self._admission.admit(self._state.models[slot.model], now)

    def evict(self, slot: Slot, now: float, cause: Cause, swap: SwapInProgress | None = None) -> Evict:
        """Evict a victim of ``swap``; None: a backend that is stuck is stopped again."""
        drained = now - slot.since if slot.state == "draining" else 0.0
        for_good = slot.state == "stuck" or slot.leaving
        way = "stop" if for_good else slot.next_level or self._level(slot, swap.target if swap else None)
        if not (for_good or slot.next_level) and way != slot.backend.evict_to[0]:
            cause = Cause("standby_full", way=slot.backend.evict_to[0])
        self.enter(slot, "evict", now)
        slot.next_level = way
        severed = self.sever(slot, now, swap.severs, drained) if swap else ()
        self._state.emit(
            Event(now, "evicting", slot.model, slot.name, size=len(severed), seconds=drained, cause=cause)
        )
        return Evict(slot.name, way, severed)

    def _level(self, slot: Slot, target: Slot | None) -> str:
        """The lightest standby level with room for it, in host memory and beside ``target`` on its GPUs."""
        state, ways = self._state, levels(slot.backend)
        for way in ways[ways.index(state.memory.level_for(slot)) :]:
            last = state.footprints.in_standby(slot.name, way, slot.backend.service.digest)
            if not (target and last and state.placement.excludes(slot.named(last.residual), target)):
                return way
        return "stop"

    def sever(self, slot: Slot, now: float, cause: Cause, drained: float = 0.0) -> tuple[Ticket, ...]:
        """End the leases that have outlasted a drain; the driver cuts them before the next step."""
        severed, target = tuple(slot.holders), cause.model
        for ticket in severed:
            ticket.severed = Severance(cause, drained)
            self._state.emit(
                Event(
                    now,
                    "severed",
                    ticket.model,
                    slot.name,
                    ticket.id,
                    size=1,
                    seconds=drained,
                    cause=cause,
                    target=target,
                )
            )
        slot.let_go(now)
        return severed

    def sever_all(self, now: float) -> list[Ticket]:
        """End all leases, because the program ends; the caller cuts them."""
        cause, slots = Cause("shutdown"), self._state.slots.values()
        return [ticket for slot in slots for ticket in self.sever(slot, now, cause)]
