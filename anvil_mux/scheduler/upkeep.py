"""Upkeep: what happens to backends although no queue needs their GPUs, preloads included.

Backends that could not be stopped are stopped again; those in standby are demoted when their time has come or
host memory is short; idle residents are evicted after their ``ttl``, or for a queue of another GPU group that
lacks host memory. All go that are on a host that is cleared, or on a GPU that is left to other programs.

Loads for which no request waits are begun only while no queue waits and no swap is under way, and stop no
backend in standby:

* Preloads are of backends that are configured so, and of stages that a model in use lacks. They evict no
  backend that has had work. Of a model with a ``most`` so many backends are preloaded, where there is room
  first.
* A home backend comes back when nothing else was wanted on its GPUs for a while: the residents that must go
  for it have no lease, and were not used for ``home_after``. Once its load has failed, or it was unloaded by
  hand, it waits until a request has loaded it.
* A backend that made way for other programs comes back in the same way once they have left its GPUs for that
  long, where there is room.

Other such loads are begun elsewhere: one that wakes a backend on its way to a deeper standby level, and in
group.py another replica of a busy model, and one that a client has hinted at.
"""

from __future__ import annotations

from typing import NamedTuple

from anvil_mux.config.kinds import gib
from anvil_mux.scheduler.events import PAUSED, UNLOADED, Cause
from anvil_mux.scheduler.planner import victims, waiting
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.standby import DESCENTS, below, demoted_at
from anvil_mux.scheduler.steps import Step
from anvil_mux.scheduler.swaps import Swaps


class Preload(NamedTuple):
    """A backend to load now, once its victims are evicted."""

    target: Slot
    victims: list[Slot]
    cause: Cause


class _Return(NamedTuple):
    """The return of a backend by itself."""

    at: float = FOREVER
    victims: tuple[Slot, ...] = ()


class Upkeep(Swaps):
    """The upkeep of one GPU group."""

    __slots__ = ()

    def upkeep_moments(self, now: float) -> list[float]:
        """The moments at which something is to be done, as things are; also those that have passed."""
        demotions = [until for slot in self.sleepers if (until := demoted_at(slot)) is not None]
        returns = [self.comes_back_at(slot, now) for slot in self._absent()]
        return demotions + returns + [slot.idle_until for slot in self.idlers]

    def upkeep_step(self, now: float) -> Step | None:
        """The next step that is due."""
        return self._retry_stuck(now) or self._demote_due(now)

    def _retry_stuck(self, now: float) -> Step | None:
        for slot in self.slots.values():
            if now < slot.retry_at or (slot.state != "stuck" and slot.next_level != "stop"):
                continue
            if slot.state == "stuck":
                return self.evict(slot, now, Cause("retry_stuck"))
            if self.may_be_stopped(slot):
                why = self._why_stopped(slot)
                return self.demote(slot, now, Cause("retry_stuck") if slot.failed_stops else why)
        return None

    def may_be_stopped(self, slot: Slot) -> bool:
        """Whether a backend is in standby and no request waits for it as it is."""
        wanted = self.models[slot.model].queue.tickets and not slot.leaving and not self.must_go(slot)
        return slot.state == "standby" and not slot.coming and not wanted

    def _why_stopped(self, slot: Slot) -> Cause:
        if slot.leaving:
            return Cause(slot.leaving)
        return self._why_gone(slot) if self.must_go(slot) else UNLOADED

    def _demote_due(self, now: float) -> Step | None:
        """Demote a backend that has been at its level for long enough, or because host memory is short."""
        found = self.memory.yields(now)
        if found is not None and found is self.slots.get(found.name):
            return self.demote(found, now, Cause("host_memory_short"), to=self.memory.lower(found))
        for slot in self.sleepers:
            until = demoted_at(slot)
            if until is None or until > now or slot.coming or self.models[slot.model].queue.tickets:
                continue
            if DESCENTS.get((slot.level, to := below(slot, may_wake=self._is_calm(slot)))):
                slot.next_level = to
                self.begin(slot, [], now, Cause("wake_to_demote", way=to), preload=True)
                return self.advance(now)
            cause = Cause("demote_timer", way=slot.level, seconds=now - slot.since)
            return self.demote(slot, now, cause)
        return None

    def _is_calm(self, slot: Slot) -> bool:
        """Whether a backend in standby may be woken for a moment: there is room, and no queue waits."""
        if self.swaps or waiting(self) or not self.models[slot.model].may_come(slot):
            return False
        return self.fits(slot) and self.memory.has_room(slot)

    def clear(self, now: float) -> None:
        """Have all go that may not stay where it is, or is on its way there; what it keeps there, too.

        Such are the backends on a host that was drained (while anvil-mux is paused, all are), and on a GPU
        that is left to other programs.
        """
        if not self.host.is_cleared and self.config.yield_above is None:
            return
        slots = [slot for slot in self.slots.values() if not slot.backend.url and self.must_go(slot)]
        for slot in [slot for slot in slots if slot.coming and slot.state != "cancelling"]:
            self.give_up(slot, now, self._why_gone(slot))  # makes victims ready which only drained
        for slot in slots:
            if slot.state == "ready":
                if not slot.host.is_cleared:
                    slot.made_way = FOREVER
                self.begin_eviction(slot, now, self._why_gone(slot))
            if slot.host.is_cleared:
                if slot.state in ("draining", "standby"):
                    slot.next_level = "stop"
                self.hasten(slot, now)
            elif slot.state == "standby" and any(slot.residual.values()):
                slot.next_level = "stop"

    def _why_gone(self, slot: Slot) -> Cause:
        """Why a backend may not stay where it is."""
        if slot.host.pause.is_on:
            return PAUSED
        if slot.host.is_drained:
            return Cause("host_drained", host=slot.host.name)
        gpu = self.left_gpu(slot)
        return Cause("others_hold", detail=f"{gib(self.placement.others[gpu])} of GPU {gpu}")

    def give_up_surplus(self, now: float) -> None:
        """Give up backends here of models of which more are resident or coming than may be."""
        for model in self.bounded:
            while (slot := model.surplus) and slot is self.slots.get(slot.name):
                self.give_up(slot, now, Cause("surplus"))
                if slot.state == "loading":
                    break  # it counts until its load is being cancelled, which is the next step

    def evict_idle(self, now: float) -> bool:
        """Begin to evict idle residents; whether there were any."""
        idlers = self.idlers
        idle = [slot for slot in idlers if slot.idle_until <= now < FOREVER]
        for slot in idle:
            self.begin_eviction(slot, now, Cause("idle", seconds=slot.ttl or 0.0))
        for slot in self.ready if self.memory.budget is not None else ():
            model = self.common.models.get(self.memory.answer(slot, now))
            if model and model.queue.tickets:
                cause, severs = Cause("host_memory_needed", model.name), Cause("evicted", model.name)
                self.begin_eviction(slot, now, cause, severs=severs)
                return True
        return bool(idle)

    # Preloads and returns

    def begin_preload(self, now: float) -> bool:
        """Begin the next load for which no request waits; whether there is any."""
        found = self._next_preload(now) or self._next_return(now)
        if found:
            self.preload(found, now)
        return found is not None

    def preload(self, found: Preload, now: float) -> None:
        """Begin a preload, or the evictions of its victims."""
        for victim in found.victims:
            severs = Cause("evicted", found.target.model)
            self.begin_eviction(victim, now, found.cause, severs=severs)
        if not found.victims:
            self.begin(found.target, [], now, found.cause, preload=True)

    def _next_preload(self, now: float) -> Preload | None:
        """The next preload; backends for which there is no room any more are passed over.

        So are those of a model of which enough are resident; while they are coming, the others are kept.
        """
        for slot in tuple(self.preloads):
            if not self.takes_loads(slot):
                continue
            model = self.models[slot.model]
            if not model.may_come(slot) and model.is_coming:
                continue
            found = victims(self, slot, self.busy_gpus(), frozenset(), now) if model.may_come(slot) else None
            failed = slot.state != "stopped" or slot.retry_at > now or found is None
            if failed or any(each.state == "standby" or each.has_had_work for each in found or ()):
                self.preloads.remove(slot)
            elif any(each.stays_until > now for each in found or ()):
                return None
            elif found:
                return Preload(slot, found, Cause("make_room", slot.model))
            else:
                self.preloads.remove(slot)
                if self.memory.has_room(slot):
                    return Preload(slot, [], self._why_preloaded(slot, now))
        return None

    def _why_preloaded(self, slot: Slot, now: float) -> Cause:
        model = self.models[slot.model]
        lacked = model.ready and model.replicas and slot in model.replicas.lacking(now)
        return Cause("missing_stage" if lacked else "preload")

    def _next_return(self, now: float) -> Preload | None:
        """The backend that is to come back now, once its victims are evicted."""
        for slot in self._absent():
            found = self._return(slot, now)
            if found.at > now:
                continue
            if found.victims:
                return Preload(slot, list(found.victims), Cause("make_room", slot.model))
            if self.memory.has_room(slot):
                kind = "home" if slot.backend.home else "gpu_given_back"
                return Preload(slot, [], Cause(kind, seconds=slot.backend.home_after))
        return None

    def _absent(self) -> list[Slot]:
        """The backends that come back by themselves."""
        if self.config.yield_above is None:
            return self.homes
        return [slot for slot in self.slots.values() if slot.backend.home or slot.made_way is not None]

    def comes_back_at(self, slot: Slot, now: float) -> float:
        """When a backend comes back by itself, as things are; infinite: it does not."""
        return self._return(slot, now).at

    def _return(self, slot: Slot, now: float) -> _Return:
        if not self._may_return(slot):
            return _Return()
        found = victims(self, slot, self.busy_gpus(), frozenset(), now)
        if found is None or (found and not slot.backend.home):
            return _Return()
        if any(each.backend.home or each.state == "standby" for each in found):
            return _Return()
        others = [each for each in self.slots.values() if not self.placement.fit_together(slot, each)]
        concerned = dict.fromkeys((*others, *found))
        if any(each.holders for each in concerned):
            return _Return()
        left = slot.since if slot.state == "stopped" else -FOREVER
        given_back = -FOREVER if slot.made_way is None else slot.made_way
        quiet = max([left, given_back, *(each.used for each in concerned)]) + slot.backend.home_after
        return _Return(max([quiet, *(each.stays_until for each in found)]), tuple(found))

    def _may_return(self, slot: Slot) -> bool:
        if slot.state not in ("stopped", "standby") or slot.coming or slot.leaving:
            return False
        if slot.failed_starts or slot.unloaded or not self.takes_loads(slot):
            return False
        return self.models[slot.model].may_come(slot)
