"""How swaps begin, go on and end, and how backends move in them: from state to state, step by step.

Before each further eviction of a swap and before its load, the room and the queue are checked again.
No backend is evicted that need not be. A swap whose target no request waits for any more ends: victims
that drain are reprieved, those that are being evicted are waited for, and a target in standby stays
there. A swap that only drains also ends as soon as another replica is loaded for its queue on GPUs
that nobody holds. A queue of higher priority takes over a swap that only drains (``takeover``). After a
failed load there is no rollback: the backend is stopped, and the next step serves the queues.

``enter`` is the only caller of ``Slot.enter``. The rest of the GPU group is brought up to date at once: the
backends that are ready, the in-flight tracker, requests that wait for a place, the plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from anvil_mux.errors import LoadError
from anvil_mux.scheduler.admission import Admission
from anvil_mux.scheduler.costs import source_of
from anvil_mux.scheduler.events import (
    BY_HAND,
    CLEARING,
    PRELOADS,
    UNLOADED,
    Cause,
    Event,
    Severance,
    ending,
)
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.slot import (
    LOADING,
    Cancel,
    Demote,
    Evict,
    Load,
    Slot,
    Step,
    Ticket,
)
from anvil_mux.scheduler.state import SwapInProgress, Takeover, behind, free_place, victims

NOTHING_HELD: Mapping[str, int] = MappingProxyType({})


class Swaps(Admission):
    """The swaps of one GPU group."""

    __slots__ = ()

    # Begin

    def begin(
        self,
        target: Slot | None,
        leaving: list[Slot],
        now: float,
        cause: Cause,
        *,
        preload: bool = False,
        severs: Cause | None = None,
    ) -> SwapInProgress:
        """Begin a swap; without a ``target`` it only evicts.

        ``severs``: why requests are severed, if neither for the target nor for ``cause``.
        """
        if severs is None:
            severs = Cause("evicted", target.model) if target else cause
        self.changed()
        for other in self.swaps:  # in which its turn to drain has not come
            other.victims = [each for each in other.victims if each.state != "ready" or each not in leaving]
        swap = SwapInProgress(target, [*leaving], cause, severs, preload=preload)
        self.swaps.append(swap)
        if target:
            self._note_target(target, coming=True)
        self._drain(swap, now)
        return swap

    def _note_target(self, target: Slot, *, coming: bool) -> None:
        """Note that a backend is the target of a swap from now on, or is so no longer."""
        target.coming = coming
        self.models[target.model].note(target)
        self.memory.changed()

    def _drain(self, swap: SwapInProgress, now: float) -> None:
        """Close the gates of the victims that are resident.

        While some have leases and no bound the others go on serving: their turn comes when those have ended.
        """
        if any(victim.is_endless for victim in swap.victims):
            return
        bounds = {each: self._bound(each, swap, now) for each in swap.victims if each.state == "ready"}
        endless = [each for each, seconds in bounds.items() if each.holders and seconds == FOREVER]
        for victim in endless or bounds:
            self.enter(victim, "drain", now)
            victim.drain_until = now + bounds[victim]
            self._emit_drain(victim, swap, now)

    def _emit_drain(self, victim: Slot, swap: SwapInProgress, now: float) -> None:
        """Emit that a victim drains for a swap from now on, and how long it may yet."""
        size, left = len(victim.holders), victim.drain_until - now
        cause, target = swap.cause, swap.target.model if swap.target else ""
        name, model = victim.name, victim.model
        self.emit(Event(now, "draining", model, name, size=size, seconds=left, cause=cause, target=target))

    def _bound(self, victim: Slot, swap: SwapInProgress, now: float) -> float:
        """How long a victim may drain from now on.

        Answers that ran already when the first request for the target came have had their time since then: to
        be held back for them and to wait for their drain is one wait.
        """
        if swap.cause.kind == "silent":
            return 0.0
        by_hand = swap.cause.kind in BY_HAND
        seconds = self.most_drain(victim, by_hand=by_hand)
        queue = self.models[swap.target.model].queue if swap.target else None
        if by_hand or not (queue and victim.holders):
            return seconds
        since, last = queue.since, next(reversed(victim.holders.values()))
        return max(since + seconds - now, 0.0) if last <= since else seconds

    def bound_anew(self, victim: Slot, now: float) -> bool:
        """Bound a drain anew, now that an answer has ended; whether it ends earlier for that."""
        swap = next((each for each in self.swaps if victim in each.victims), None)
        return swap is not None and self._end_by(victim, now + self._bound(victim, swap, now))

    def hasten(self, slot: Slot, now: float) -> bool:
        """Bound a drain as one that people ask for; whether that ends it earlier."""
        until = now + self.most_drain(slot, by_hand=True)
        return slot.state == "draining" and self._end_by(slot, until)

    def _end_by(self, slot: Slot, until: float) -> bool:
        if slot.drain_until <= until:
            return False
        slot.drain_until = until
        self.changed()
        return True

    # Go on

    def advance(self, now: float) -> Step | None:
        """Return the next step of the swaps under way; end those whose target is no longer wanted."""
        for swap in tuple(self.swaps):
            if not self._is_still_wanted(swap, now):
                self.call_off(swap, now)
                continue
            # Nothing is evicted on a host that is away, but a load may begin elsewhere.
            is_steered = self.host.is_steered
            step = self._go_on(swap, now) if is_steered else self._go_elsewhere(swap, now)
            if step:
                return step
        return None

    def _go_on(self, swap: SwapInProgress, now: float) -> Step | None:
        """The next step of one swap."""
        target = swap.target
        if step := self._cancel(swap, now) or self._evict_next(swap, now):
            return step
        if swap.victims:
            return self._go_elsewhere(swap, now)
        if target is None:
            self.end(swap)
        elif target.state not in LOADING:
            if not self._has_room(swap, target, now):
                return self._evict_next(swap, now)
            if self.memory.has_room(target):  # else a sleeper yields first
                return self._load(swap, target, now)
        return None

    def _is_wanted(self, target: Slot) -> bool:
        return bool(self.models[target.model].queue.tickets)

    def _is_still_wanted(self, swap: SwapInProgress, now: float) -> bool:
        """Return whether a swap goes on: its load is under way, or requests wait for its target.

        Requests that wait at busy replicas count for another replica; a preload needs none.
        """
        target = swap.target
        if target is None or target.state in LOADING:
            return True
        if self._is_wanted(target) or swap.cause.kind in PRELOADS:
            return True
        return swap.preload and bool(behind(self.models[target.model], now))

    def _go_elsewhere(self, swap: SwapInProgress, now: float) -> Step | None:
        """Load another backend for the queue of a swap that only drains, on GPUs that nobody holds.

        The drain is called off in the same moment in which that load begins, never for the hope of one: so no
        drain is called off and begun again without end.
        """
        target = swap.target
        if target is None or swap.begun or swap.preload:
            return None
        model = self.models[target.model]
        slot = free_place(model, swap, self, now) if model.replicas else None
        if slot is None:
            return None
        self.dissolve(swap, now)
        there = next(each for each in self.groups_of(model) if each.slots.get(slot.name) is slot)
        return there._load(there.begin(slot, [], now, swap.cause), slot, now)

    def take_over(self, found: Takeover, now: float) -> None:
        """Have a swap that only drains go on for a queue of higher priority.

        The drains of those that go for it, too, end when they would have ended. This comes to an end: a drain
        goes on for none but a queue of higher priority, and a swap that has evicted is not taken over.
        """
        swap, target, more = found
        self.changed()
        if swap.target:
            swap.target.next_level = ""
            self._note_target(swap.target, coming=False)
        spared = [each for each in swap.victims if each.holds.keys().isdisjoint(target.holds)]
        swap.target, swap.cause = target, Cause("outranked", target.model)
        swap.severs = Cause("evicted", target.model)
        swap.victims = [each for each in swap.victims if each not in spared]
        self._note_target(target, coming=True)
        for victim in [each for each in swap.victims if each.state == "draining"]:
            self._emit_drain(victim, swap, now)
        swap.victims += more
        self._drain(swap, now)
        for victim in [each for each in spared if each.state == "draining"]:
            self._reprieve(victim, now)

    def _load(self, swap: SwapInProgress, target: Slot, now: float) -> Load:
        swap.begun = True
        swap.evict_seconds = max(now - swap.emptied, 0.0)
        swap.level = level = target.level
        self.enter(target, "load", now)
        target.level, target.residual, target.host_bytes = "stop", {}, 0
        target.unloaded = False
        if target.next_level == "stop":  # it was to be stopped, and is wanted after all
            target.next_level = ""
        self.emit(Event(now, "loading", target.model, target.name, cause=swap.cause, way=level))
        return Load(target.name, level)

    def _cancel(self, swap: SwapInProgress, now: float) -> Cancel | None:
        """End a load that is to be cancelled, unless it was asked for again meanwhile."""
        slot, cause = swap.target, swap.cancel
        if not (cause and slot and slot.state == "loading"):
            return None
        if self._is_wanted(slot) and not (slot.leaving or self.must_go(slot)):
            swap.cancel = None
            return None
        self.enter(slot, "cancel", now)
        self.emit(Event(now, "cancelling", slot.model, slot.name, cause=cause, target=cause.model))
        return Cancel(slot.name)

    def _evict_next(self, swap: SwapInProgress, now: float) -> Step | None:
        """Evict the next victim without leases, or whose drain is over; victims in standby come last."""
        resident = [victim for victim in swap.victims if victim.state in ("ready", "draining")]
        if resident and swap.target and self._may_spare(swap.target) and self.fits(swap.target):
            for victim in resident:  # the victims before them freed more than was known
                swap.victims.remove(victim)
                self._reprieve(victim, now)
            resident = []
        if any(victim.is_endless for victim in resident):
            return None  # as long as nobody was evicted all of them may be reprieved
        if any(victim.state == "ready" for victim in resident):
            self._drain(swap, now)
        draining = [victim for victim in resident if victim.state == "draining"]
        for victim in draining:
            is_empty = not (victim.holders or self.memory.makes_way(victim, now))
            if self.reached(victim.drain_until, now) or is_empty:
                swap.begun = True
                swap.emptied = now
                return self.evict(victim, now, swap.cause, swap)
        if draining or swap.target is None:
            return None
        return self._demote_victim(swap, swap.target, now)

    def _demote_victim(self, swap: SwapInProgress, target: Slot, now: float) -> Demote | None:
        """Demote the next victim in standby, if the target still lacks the memory that it keeps."""
        for victim in [victim for victim in swap.victims if victim.state == "standby"]:
            if not self.fits(target):
                swap.begun = True
                return self.demote(victim, now, Cause("memory_needed"), target=target.model)
            swap.victims.remove(victim)
        return None

    def _may_spare(self, target: Slot) -> bool:
        """Whether a victim may be spared after all: a target that takes its GPUs whole needs all of them."""
        return not target.whole or self.memory.budget is not None

    def _has_room(self, swap: SwapInProgress, target: Slot, now: float) -> bool:
        """Whether the target fits now that its victims are gone; if not, others go as well for its queue."""
        if self.fits(target):
            return True
        busy = self.busy_gpus(but=[swap])
        wanted = not swap.preload and self._is_wanted(target)
        more = victims(self, target, busy, frozenset(), now) if wanted else None
        if more is None:
            self.dissolve(swap, now)
        else:
            swap.victims += more
            self._drain(swap, now)
        return False

    # End

    def dissolve(self, swap: SwapInProgress, now: float) -> None:
        """End a swap before its target was loaded; victims that only drained stay resident."""
        self.end(swap)
        if swap.target:
            swap.target.next_level = ""
        for victim in swap.victims:
            if victim.state == "draining":
                self._reprieve(victim, now)

    def call_off(self, swap: SwapInProgress, now: float) -> None:
        """End a swap whose target is not wanted any more. Victims that are being evicted are waited for."""
        going = [victim for victim in swap.victims if victim.state == "evicting"]
        self.dissolve(swap, now)
        if going:
            self.swaps.append(SwapInProgress(None, going, swap.cause, swap.severs, begun=True))

    def give_up(self, slot: Slot, now: float, cause: Cause) -> None:
        """Have a backend go that is resident, or on its way to be."""
        swap = self.swap_to(slot)
        if swap is None:
            self.begin(None, [slot], now, cause)
        elif slot.state in LOADING:
            swap.cancel = cause
        else:
            self.call_off(swap, now)

    def spare(self, slot: Slot, now: float) -> None:
        """Take a backend that was pinned out of the swaps that drain it for another model."""
        for swap in self.swaps:
            if swap.target and slot in swap.victims and slot.state in ("ready", "draining"):
                swap.victims.remove(slot)
                self._reprieve(slot, now)

    def reprieve_all(self, now: float) -> None:
        """End the swaps that only drain, and were begun for a reason that is over (``CLEARING``)."""
        for swap in [swap for swap in self.swaps if swap.cause.kind in CLEARING]:
            if not (swap.begun or any(map(self.must_go, swap.victims))):
                for victim in swap.victims:
                    victim.next_level = ""
                self.dissolve(swap, now)

    def _reprieve(self, victim: Slot, now: float) -> None:
        """Make a victim that only drained ready again; one that is leaving drains on."""
        if victim.state == "ready":
            return
        if victim.leaving:
            self.begin(None, [victim], now, Cause(victim.leaving))
            return
        self.enter(victim, "reprieve", now)
        self.emit(Event(now, "ready", victim.model, victim.name, cause=Cause("reprieved")))
        self.admit(self.models[victim.model], now)
        if victim.paused_as:
            self.fail_refused(now)

    def left(self, victim: Slot) -> None:
        """A victim has left its GPUs."""
        for swap in self.swaps:
            if victim in swap.victims:
                swap.victims.remove(victim)
                swap.gone.append(victim.model)

    def end_to(self, slot: Slot) -> SwapInProgress | None:
        """End the swap to ``slot``, whose load has ended, one way or another."""
        if swap := self.swap_to(slot):
            self.end(swap)
        return swap

    def end(self, swap: SwapInProgress) -> None:
        self.changed()
        self.swaps.remove(swap)
        if swap.target:
            self._note_target(swap.target, coming=False)

    # Moves of backends

    def enter(self, slot: Slot, what: str, now: float) -> None:
        """Have a slot enter a state, with all that hangs on it."""
        before, model = slot.state, self.models[slot.model]
        slot.enter(what, now)
        model.note(slot)
        self.placement.note(slot)
        self.changed()
        self.memory.changed()
        if before == "ready" or slot.state == "ready":
            self.note_ready()
            self.renew_ready(model, now)
        if model.replicas and slot.state not in ("ready", "draining"):
            model.replicas.in_flight.forget(slot.name)

    def renew_ready(self, model: Model, now: float) -> None:
        """Note which backends of a model serve by now, and have its queue follow."""
        before = model.ready
        model.renew_ready()
        if model.limited and any(slot not in model.ready for slot in before):
            model.queue.left = now
            self.fill_places(model, now)  # those that needed this one wait for it no longer
            if not model.ready:
                self.turn_away(model, now)

    def demote(self, slot: Slot, now: float, cause: Cause, *, target: str = "", to: str = "") -> Demote:
        """Demote a backend, for the model ``target`` if any; ``to``: the level, by default the next."""
        to = "stop" if slot.next_level == "stop" else to or slot.below(may_wake=False)
        self.enter(slot, "demote", now)
        slot.next_level = to
        self.emit(Event(now, "demoting", slot.model, slot.name, cause=cause, target=target, way=to))
        return Demote(slot.name, slot.level, to)

    def evict(self, slot: Slot, now: float, cause: Cause, swap: SwapInProgress | None = None) -> Evict:
        """Evict a victim of ``swap``; None: a backend that is stuck is stopped again."""
        drained = now - slot.since if slot.state == "draining" else 0.0
        for_good = slot.state == "stuck" or slot.leaving
        level = "stop" if for_good else slot.next_level or self._level(slot, swap.target if swap else None)
        if not (for_good or slot.next_level) and level != slot.backend.evict_to[0]:
            cause = Cause("standby_full", way=slot.backend.evict_to[0])
        self.enter(slot, "evict", now)
        slot.next_level = level
        severed = self.sever(slot, now, swap.severs, drained) if swap else ()
        size = len(severed)
        self.emit(Event(now, "evicting", slot.model, slot.name, size=size, seconds=drained, cause=cause))
        return Evict(slot.name, level, severed)

    def _level(self, slot: Slot, target: Slot | None) -> str:
        """The lightest standby level with room for it, in host memory and beside ``target`` on its GPUs."""
        for level in slot.levels[slot.levels.index(self.memory.level_for(slot)) :]:
            last = self.footprints.in_standby(slot.name, level, slot.backend.service.digest)
            if not (target and last and self.placement.excludes(slot.named(last.residual), target)):
                return level
        return "stop"

    def sever(self, slot: Slot, now: float, cause: Cause, drained: float = 0.0) -> tuple[Ticket, ...]:
        """End the leases that have outlasted a drain; the driver cuts them before the next step."""
        severed, name, target = tuple(slot.holders), slot.name, cause.model
        for ticket in severed:
            ticket.severed = Severance(cause, drained)
            event = Event(now, "severed", ticket.model, name, ticket.id, size=1, seconds=drained)
            self.emit(event._replace(cause=cause, target=target))
        slot.let_go(now)
        return severed

    def sever_all(self, now: float) -> list[Ticket]:
        """End all leases, because the program ends; the caller cuts them."""
        cause, slots = Cause("shutdown"), self.slots.values()
        return [ticket for slot in slots for ticket in self.sever(slot, now, cause)]

    # How loads ended

    def loaded(self, slot: Slot, now: float, level: str) -> None:
        """The backend answers, brought back from the standby ``level``; its whole queue is leased."""
        seconds, model = now - slot.since, self.models[slot.model]
        wanted = bool(model.queue.tickets)
        unwanted = any(swap.cancel == UNLOADED for swap in self.swaps if swap.target is slot)
        self.enter(slot, "loaded", now)
        slot.note_loaded(now, seconds, level)
        for other in self.slots.values():
            if other is slot or not self.placement.fit_together(slot, other):
                other.made_way = None
        self.keep_alive(slot, None)
        if swap := self.end_to(slot):
            source, host, engine = source_of(swap.gone), slot.host.name, slot.backend.engine
            self.costs.learn(source, slot.model, level, swap.evict_seconds, seconds, host=host, engine=engine)
        self.emit(Event(now, "ready", slot.model, slot.name, seconds=seconds, way=level))
        if slot.leaving:
            self.begin(None, [slot], now, Cause(slot.leaving))
            return
        self.admit(model, now)
        if unwanted:  # it was unloaded a moment too late to be cancelled
            self.begin(None, [slot], now, UNLOADED)
        elif wanted:
            slot.next_level = ""
        elif slot.next_level:
            cause = Cause("wake_to_demote", way=slot.next_level)
            self.begin(None, [slot], now, cause, severs=Cause("idle"))
        if slot.state == "ready" and model.replicas and not model.queue.tickets:
            self.take_back(slot, now)
        if slot.pinned or slot.paused_as:
            self.fail_refused(now)  # what does not fit beside it, or waits for what was paused meanwhile

    def load_failed(self, slot: Slot, now: float, error: LoadError) -> None:
        """The backend did not become ready, and was cleaned up."""
        if slot.state == "cancelling":  # it was to end anyway
            self.load_cancelled(slot, now)
            return
        self.enter(slot, "load_failed", now)
        slot.note_load_failed(now, error.message, error.log)
        self.end_to(slot)
        cause = Cause("load_failed", detail=error.message)
        self.emit(Event(now, "stopped", slot.model, slot.name, cause=cause))
        self.fail_refused(now)

    def load_cancelled(self, slot: Slot, now: float) -> None:
        """The load of the backend ended before its time, and all that it had begun was stopped."""
        if slot.state != "cancelling":  # nobody here wanted that
            self.load_failed(slot, now, LoadError("its load was cancelled by somebody else"))
            return
        self.enter(slot, "cancelled", now)
        slot.next_level = ""
        swap = self.end_to(slot)
        if swap and swap.cause.kind == "preload" and swap.cancel and swap.cancel.kind == "unwanted":
            self.preloads.append(slot)  # it made way for a queue
        self.emit(Event(now, "stopped", slot.model, slot.name))
        self.fail_refused(now)

    # How evictions ended

    def evicted(
        self,
        slot: Slot,
        now: float,
        *,
        residual: Mapping[str, int] = NOTHING_HELD,
        level: str = "stop",
        host_bytes: int = 0,
        freed: Mapping[str, int] = NOTHING_HELD,
        died: str = "",
        log: Iterable[str] = (),
    ) -> None:
        """The backend left its GPUs; unless it was stopped it is in standby, at this ``level``.

        It holds nothing then but its ``residual`` (bytes by GPU) and ``host_bytes`` of the host's memory.
        ``freed`` is what it gave back, where that was read. ``died``: how it had ended before it was told to,
        and ``log`` what it had printed last.
        """
        standby, cause = level != "stop", None
        host_bytes = host_bytes if standby else 0
        if died and not slot.failed_stops:  # else it had been told to stop before, in vain
            cause = slot.judge_end(now, died)
        if not slot.failed_stops:  # else an earlier attempt freed some of it
            gave_up = freed if slot.state == "evicting" else {}  # what is demoted held less than all
            described = slot.backend.service.digest
            self.footprints.learn(
                slot.name, level, gave_up, residual, host_bytes=host_bytes, described=described
            )
            self.placement.measure(slot, self.footprints.held(slot.name, described))
        self.enter(slot, "standby" if standby else "stopped", now)
        slot.next_level = "stop" if slot.leaving else ""
        slot.keep_in_standby(level, slot.named(residual) if standby else {}, host_bytes)
        slot.note_left(now)
        self.left(slot)
        if cause:
            slot.error, slot.log = ending(cause), tuple(log)
        self.emit(Event(now, slot.state, slot.model, slot.name, cause=cause, way=level if standby else ""))
        self.fail_refused(now)

    def evict_failed(self, slot: Slot, now: float, why: str) -> None:
        """The backend may still hold its GPUs: nothing is loaded there until a later stop succeeds.

        One that was in standby holds what it held, and stays so.
        """
        slot.failed_starts += slot.state == "loading"
        self.enter(slot, "evict_failed", now)
        slot.note_stop_failed(now, why)
        way, cause = slot.level if slot.state == "standby" else "", Cause("evict_failed", detail=why)
        self.emit(Event(now, slot.state, slot.model, slot.name, cause=cause, way=way))
        for swap in [each for each in self.swaps if each.target is slot or slot in each.victims]:
            self.dissolve(swap, now)
        self.fail_refused(now)

    def evict_not_begun(self, slot: Slot, now: float, why: str) -> None:
        """Nothing of the eviction was done: the backend is as it was before, and serves if it was resident.

        The swaps that it was to make way for end. One that was unloaded or has left the configuration drains
        again, unless it was asked for since.
        """
        if slot.failed_stops:  # an earlier attempt may have done a part
            self.evict_failed(slot, now, why)
            return
        swaps = [each for each in self.swaps if slot in each.victims]
        self.enter(slot, "not_begun", now)
        is_to_stop = slot.state == "standby" and (slot.leaving or slot.unloaded)
        slot.next_level = "stop" if is_to_stop else ""
        way, cause = slot.level if slot.state == "standby" else "", Cause("not_begun", detail=why)
        self.emit(Event(now, slot.state, slot.model, slot.name, cause=cause, way=way))
        for swap in swaps:
            swap.victims.remove(slot)
            self.dissolve(swap, now)
        if slot.state == "ready" and slot.leaving:
            self.begin(None, [slot], now, Cause(slot.leaving))
            return
        self.admit(self.models[slot.model], now)
        if UNLOADED in [swap.cause for swap in swaps] and slot.state == "ready" and not slot.holders:
            self.begin(None, [slot], now, UNLOADED)
