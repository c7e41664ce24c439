"""The facts about a host of a GPU group: it is lost, is back, is declared gone, or is drained by hand.

The record of a host says whether it is lost. Its backends keep the states that they had meanwhile: they may
still run. When the host is back each backend is what it was found to be, whatever its state was. One that was
found and may not stay is stuck until it is stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from anvil_mux.scheduler.admission import Admission
from anvil_mux.scheduler.causes import ADOPTED, Cause
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.group_swaps import GroupSwaps
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.moves import Moves
from anvil_mux.scheduler.outcomes import Outcomes
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.state import GroupState


@dataclass(frozen=True)
class FoundBackend:
    """How a backend was found on a host that is back."""

    level: str = ""
    """The standby level of the backend; "": it runs, and answers."""
    residual: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> bytes that it holds in standby."""
    host_bytes: int = 0


class HostFacts:
    """The facts about the host of one GPU group."""

    def __init__(
        self, state: GroupState, admission: Admission, moves: Moves, swaps: GroupSwaps, outcomes: Outcomes
    ) -> None:
        self._state = state
        self._admission = admission
        self._moves = moves
        self._swaps = swaps
        self._outcomes = outcomes

    def lost(self, now: float) -> None:
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

    def back(self, now: float, found: Mapping[str, FoundBackend], held: Collection[Slot]) -> None:
        """Give each backend the state in which it was found: first those that run, then those in standby.

        ``held``: those that held something before, of which nothing is counted any more (``free``).
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
            runs = self._outcomes.adopt(slot, now)
            slot.failed_starts *= not runs
            return runs
        return self._outcomes.adopt_standby(
            slot, now, found.level, found.residual, host_bytes=found.host_bytes, cause=ADOPTED
        )

    def cleared(self, now: float, *, cleared: bool) -> None:
        """Have all go that is on the host (upkeep.py), or stay: it was drained or paused, or is no longer."""
        state = self._state
        state.changed()
        if not cleared and not state.host.is_lost:
            self._swaps.reprieve_all(now)
            for slot in state.slots.values() if state.host.takes_loads else ():
                if slot.state == "standby" and not slot.failed_stops and not slot.leaving:
                    slot.next_level = ""
        self._admission.fail_refused(now)

    def gone(self, now: float) -> None:
        """Declare that nothing runs there: its backends hold nothing any more, and none is loaded."""
        cause = Cause("host_gone", host=self._state.host.name)
        for slot in self.free(now):
            self._state.emit(Event(now, "stopped", slot.model, slot.name, cause=cause))

    def free(self, now: float) -> list[Slot]:
        """Stop counting what the backends hold, and return those that held something."""
        held = [slot for slot in self._state.slots.values() if slot.state != "stopped"]
        for slot in held:
            self._moves.enter(slot, "gone", now)
            slot.note_gone(now)
        return held
