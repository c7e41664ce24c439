"""The facts about the backends of a GPU group and about its host, each in the past tense.

How steps ended, which backends died, which ran before this program came, and whether their host is lost, is
back, is declared gone, or is drained by hand. The record of a host says whether it is lost. Its backends keep
the states that they had meanwhile: they may still run. When the host is back each backend is what it was
found to be, whatever its state was. One that was found and may not stay is stuck until it is stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from anvil_mux.errors import LoadError
from anvil_mux.scheduler.admission import Admission
from anvil_mux.scheduler.causes import ADOPTED, UNLOADED, Cause, ending
from anvil_mux.scheduler.events import TRANSITIONS, Event
from anvil_mux.scheduler.group_swaps import GroupSwaps
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.moves import Moves
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.slot import LOADING, Slot
from anvil_mux.scheduler.standby import PINS
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.steps import Crash, FoundBackend

NOTHING_HELD: Mapping[str, int] = MappingProxyType({})


class GroupFacts:
    """The facts about the backends of one GPU group, and about its host."""

    def __init__(self, state: GroupState, admission: Admission, moves: Moves, swaps: GroupSwaps) -> None:
        self._state = state
        self._admission = admission
        self._moves = moves
        self._swaps = swaps

    # Before this program came

    def expect(self, name: str) -> None:
        """The backend may run already: until it is adopted or ``looked_at`` requests only wait."""
        self._state.unseen.add(name)

    def looked_at(self, name: str) -> None:
        """The backend was looked at: if it was not adopted it holds nothing (any more)."""
        self._state.unseen.discard(name)
        self._state.changed()

    def adopt(self, slot: Slot, now: float) -> bool:
        """The backend ran before this program did; False if it cannot stay beside those already adopted."""
        if not self._state.placement.fits(slot, runs=True):
            return False
        self._moves.enter(slot, "adopt", now)
        self._state.unseen.discard(slot.name)
        slot.last_used = now  # since when it has been resident is not known
        self._state.emit(Event(now, "ready", slot.model, slot.name, cause=ADOPTED))
        model = self._state.model_of(slot)
        if model.queue.tickets:
            self._admission.admit(model, now)
        if slot.pinned:
            self._admission.fail_refused(now)
        return True

    def adopt_standby(
        self,
        slot: Slot,
        now: float,
        way: str,
        residual: Mapping[str, int],
        host_bytes: int,
        cause: Cause | None = None,
    ) -> bool:
        """The backend was in standby before this program came; False if what it keeps has no room."""
        residual = slot.named(residual)
        if self._state.placement.crowds(residual):
            return False
        self._moves.enter(slot, "adopt_standby", now)
        self._state.unseen.discard(slot.name)
        slot.level, slot.residual, slot.host_bytes = way, residual, host_bytes
        if way in PINS:
            slot.ram = max(slot.ram, host_bytes)
        self._state.emit(Event(now, "standby", slot.model, slot.name, cause=cause, way=way))
        return True

    # Loads

    def loaded(self, slot: Slot, now: float, way: str) -> None:
        """The backend answers, brought back from the standby level ``way``; its whole queue is leased."""
        seconds, model = now - slot.since, self._state.model_of(slot)
        wanted = bool(model.queue.tickets)
        unwanted = any(swap.cancel == UNLOADED for swap in self._state.swaps if swap.target is slot)
        self._moves.enter(slot, "loaded", now)
        slot.note_loaded(now, seconds, way)
        for other in self._state.slots.values():
            if other is slot or not self._state.placement.fit_together(slot, other):
                other.made_way = None
        self._state.keep_alive(slot, None)
        self._swaps.learn(slot, way, seconds)
        self._swaps.end_to(slot)
        self._state.emit(Event(now, "ready", slot.model, slot.name, seconds=seconds, way=way))
        if slot.leaving:
            self._swaps.begin_leaving(slot, now)
            return
        self._admission.admit(model, now)
        if unwanted:  # it was unloaded a moment too late to be cancelled
            self._swaps.evict(slot, now, UNLOADED)
        elif wanted:
            slot.next_level = ""
        elif slot.next_level:
            cause = Cause("wake_to_demote", way=slot.next_level)
            self._swaps.evict(slot, now, cause, severs=Cause("idle"))
        if slot.state == "ready" and model.replicas and not model.queue.tickets:
            self._admission.take_back(slot, now)
        if slot.pinned:
            self._admission.fail_refused(now)  # what does not fit beside it

    def load_failed(self, slot: Slot, now: float, error: LoadError) -> None:
        """The backend did not become ready, and was cleaned up."""
        if slot.state == "cancelling":  # it was to end anyway
            self.load_cancelled(slot, now)
            return
        self._moves.enter(slot, "load_failed", now)
        slot.note_load_failed(now, error.reason, error.log)
        self._swaps.end_to(slot)
        cause = Cause("load_failed", detail=error.reason)
        self._state.emit(Event(now, "stopped", slot.model, slot.name, cause=cause))
        self._admission.fail_refused(now)

    def load_cancelled(self, slot: Slot, now: float) -> None:
        """The load of the backend ended before its time, and all that it had begun was stopped."""
        if slot.state != "cancelling":  # nobody here wanted that
            self.load_failed(slot, now, LoadError("its load was cancelled by somebody else"))
            return
        self._moves.enter(slot, "cancelled", now)
        slot.next_level = ""
        self._swaps.end_to(slot)
        self._state.emit(Event(now, "stopped", slot.model, slot.name))
        self._admission.fail_refused(now)

    # Evictions

    def evicted(
        self,
        slot: Slot,
        now: float,
        *,
        residual: Mapping[str, int] = NOTHING_HELD,
        how: str = "stop",
        host_bytes: int = 0,
        freed: Mapping[str, int] = NOTHING_HELD,
        died: str = "",
        log: Iterable[str] = (),
    ) -> None:
        """The backend left its GPUs; unless it was stopped it is in standby, at the level ``how``.

        It holds nothing then but its ``residual`` (bytes by GPU) and ``host_bytes`` of the host's memory.
        ``freed`` is what it gave back, where that was read. ``died``: how it had ended before it was told to,
        and ``log`` what it had printed last.
        """
        state, standby, cause = self._state, how != "stop", None
        host_bytes = host_bytes if standby else 0
        if died and not slot.failed_stops:  # else it had been told to stop before, in vain
            cause = slot.judge_end(now, died)
        if not slot.failed_stops:  # else an earlier attempt freed some of it
            gave_up = freed if slot.state == "evicting" else {}  # what is demoted held less than all
            described = slot.backend.service.digest
            state.footprints.learn(
                slot.name, how, gave_up, residual, host_bytes=host_bytes, described=described
            )
            state.placement.measure(slot, state.footprints.held(slot.name, described))
        self._moves.enter(slot, "standby" if standby else "stopped", now)
        slot.level, slot.next_level = how, "stop" if slot.leaving else ""
        slot.residual, slot.host_bytes = slot.named(residual) if standby else {}, host_bytes
        if how in PINS:
            slot.ram = max(slot.ram, host_bytes)
        slot.note_left(now)
        self._swaps.left(slot)
        if cause:
            slot.error, slot.log = ending(cause), tuple(log)
        state.emit(Event(now, slot.state, slot.model, slot.name, cause=cause, way=how if standby else ""))
        self._admission.fail_refused(now)

    def evict_failed(self, slot: Slot, now: float, why: str) -> None:
        """The backend may still hold its GPUs: nothing is loaded there until a later stop succeeds.

        One that was in standby holds what it held, and stays so.
        """
        slot.failed_starts += slot.state == "loading"
        self._moves.enter(slot, "evict_failed", now)
        slot.note_stop_failed(now, why)
        way, cause = slot.level if slot.state == "standby" else "", Cause("evict_failed", detail=why)
        self._state.emit(Event(now, slot.state, slot.model, slot.name, cause=cause, way=way))
        for swap in [each for each in self._state.swaps if each.target is slot or slot in each.victims]:
            self._swaps.dissolve(swap, now)
        self._admission.fail_refused(now)

    # Ends by themselves

    def died(self, slot: Slot, now: float, why: str, log: Iterable[str]) -> None:
        """The backend ended without being told to; ``log``: what its engine had printed last."""
        if (slot.state, "died") not in TRANSITIONS:
            return  # the step under way reports that instead
        cause = slot.judge_end(now, why)
        self._moves.enter(slot, "died", now)
        slot.note_left(now)
        self._swaps.left(slot)
        slot.note_died(ending(cause), log)
        size, crash = len(slot.holders), Crash(slot.name, slot.error, slot.log)
        for ticket in slot.holders:
            ticket.crash = crash
        slot.let_go(now)
        self._state.emit(Event(now, "stopped", slot.model, slot.name, size=size, cause=cause))
        self._admission.fail_refused(now)

    def unanswering(self, slot: Slot, now: float) -> None:
        """The engine of the backend does not answer: it is stopped without a drain, not put in standby."""
        if slot.state == "ready":
            slot.next_level = "stop"
            self._swaps.begin(None, [slot], now, Cause("silent"))

    def memory_seen(self, held: Mapping[str, int], now: float) -> bool:
        """Other processes hold so many bytes, by GPU; whether that is news.

        It is not believed while a backend is loaded or evicted: its processes may be taken for others. GPUs
        of which they hold much are left to them: all there goes (upkeep.py), and returns later (preloads.py).
        """
        state = self._state
        moving = any(slot.state in (*LOADING, "evicting", "demoting") for slot in state.slots.values())
        if moving or held == state.placement.others:
            return False
        state.placement.others = held
        state.changed()
        if state.common.settings.yield_above is not None:
            self._note_way_made(now)
        return True

    def _note_way_made(self, now: float) -> None:
        """Note for whom GPUs are left to other programs, or are no longer."""
        self._swaps.reprieve_all(now)
        for slot in [slot for slot in self._state.slots.values() if slot.made_way is not None]:
            if self._state.left_gpu(slot):
                slot.made_way = FOREVER
            elif slot.state == "ready":
                slot.made_way = None
            elif slot.made_way == FOREVER:
                slot.made_way = now
        self._admission.fail_refused(now)

    # The host

    def host_lost(self, now: float) -> None:
        """Sever all leases and end all swaps there; the queues go elsewhere, or fail."""
        state = self._state
        cause = Cause("host_lost", host=state.host.name)
        state.changed()
        state.unseen.clear()
        state.ready = [slot for slot in state.ready if slot.serves]
        self._swaps.end_lost()
        for slot in state.slots.values():
            state.taken_back += self._moves.sever(slot, now, cause)
            if replicas := state.models[slot.model].replicas:
                replicas.in_flight.forget(slot.name)
        for model in state.models.values():
            self._leave(model, now)
        self._admission.fail_refused(now)

    def _leave(self, model: Model, now: float) -> None:
        """Take the backends of a model on the lost host out of those that may be leased."""
        ready = [slot for slot in model.ready if slot.serves]
        were_more, model.ready = len(model.ready) > len(ready), ready
        if were_more and model.queue.limited:
            model.queue.left = now
            self._admission.fill_places(model, now)  # requests that needed one of these go elsewhere

    def host_back(self, now: float, found: Mapping[str, FoundBackend], held: Collection[Slot]) -> None:
        """Give each backend the state in which it was found: first those that run, then those in standby.

        ``held``: those that held something before, of which nothing is counted any more (``host_freed``).
        """
        state = self._state
        state.changed()
        cause = Cause("not_found", host=state.host.name)
        for slot in sorted(
            state.slots.values(), key=lambda slot: slot.name in found and found[slot.name].level != ""
        ):
            if slot.name in found:
                self._take_over(slot, found[slot.name], now)
            elif slot in held:
                state.emit(Event(now, "stopped", slot.model, slot.name, cause=cause))

    def _take_over(self, slot: Slot, found: FoundBackend, now: float) -> None:
        """Adopt a backend, or have it stopped if it may not stay; until then it holds its GPUs."""
        if not slot.leaving and self._adopt(slot, found, now):
            return
        self._moves.enter(slot, "unfit", now)
        slot.error, slot.retry_at = "it was found running, and cannot stay", now
        cause = Cause("unfit", host=self._state.host.name)
        self._state.emit(Event(now, "stuck", slot.model, slot.name, cause=cause))

    def _adopt(self, slot: Slot, found: FoundBackend, now: float) -> bool:
        """Take over a backend as it was found; False if it may not stay."""
        if not found.level:
            slot.retry_at = now  # it runs, so its last failure says nothing any more
            runs = self.adopt(slot, now)
            slot.failed_starts *= not runs
            return runs
        return self.adopt_standby(
            slot, now, found.level, found.residual, host_bytes=found.host_bytes, cause=ADOPTED
        )

    def host_cleared(self, now: float, *, cleared: bool) -> None:
        """Have all go that is on the host (upkeep.py), or stay: it was drained or paused, or is no longer."""
        state = self._state
        state.changed()
        if not cleared and not state.host.is_lost:
            self._swaps.reprieve_all(now)
            for slot in state.slots.values() if state.host.takes_loads else ():
                if slot.state == "standby" and not slot.failed_stops and not slot.leaving:
                    slot.next_level = ""
        self._admission.fail_refused(now)

    def host_gone(self, now: float) -> None:
        """Declare that nothing runs there: its backends hold nothing any more, and none is loaded."""
        cause = Cause("host_gone", host=self._state.host.name)
        for slot in self.host_freed(now):
            self._state.emit(Event(now, "stopped", slot.model, slot.name, cause=cause))

    def host_freed(self, now: float) -> list[Slot]:
        """Stop counting what the backends hold, and return those that held something."""
        held = [slot for slot in self._state.slots.values() if slot.state != "stopped"]
        for slot in held:
            self._moves.enter(slot, "gone", now)
            slot.note_gone(now)
        return held
