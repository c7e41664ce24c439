"""The facts about a host of a GPU group: it is lost, is back, is declared gone, or is drained by hand.

The record of a host says whether it is lost. Its backends keep the states that they had meanwhile: they may
still run. When the host is back each backend is what it was found to be, whatever its state was. One that was
found and may not stay is stuck until it is stopped.

A gang has several hosts, and is lost with the first of them. It is as it was, on all of them, until each is
back or declared gone. Then it goes on if it was found on each that was lost; else what is left of it is
stopped, once for all its hosts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from anvil_mux.scheduler.admission import Admission
from anvil_mux.scheduler.causes import ADOPTED, Cause
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.group_swaps import GroupSwaps
from anvil_mux.scheduler.hosts import GangHosts, HostRecord
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
    """The facts about the hosts of one GPU group."""

    def __init__(
        self, state: GroupState, admission: Admission, moves: Moves, swaps: GroupSwaps, outcomes: Outcomes
    ) -> None:
        self._state = state
        self._admission = admission
        self._moves = moves
        self._swaps = swaps
        self._outcomes = outcomes

    def on(self, host: HostRecord) -> list[Slot]:
        """The backends of one host."""
        return [slot for slot in self._state.slots.values() if host in slot.host.parts]

    def lost(self, host: HostRecord, now: float) -> None:
        """Sever all leases and end all swaps there; the queues go elsewhere, or fail."""
        state, cause, slots = self._state, Cause("host_lost", host=host.name), self.on(host)
        state.changed()
        state.unseen.difference_update([slot.name for slot in slots])
        state.ready = [slot for slot in state.ready if slot.serves]
        spared = self._swaps.end_lost(now)
        for slot in slots:
            state.taken_back += self._moves.sever(slot, now, cause)
            if replicas := state.models[slot.model].replicas:
                replicas.in_flight.forget(slot.name)
        for model in state.models.values():
            self._leave(model, now)
        for victim in spared:
            self._swaps.reprieve(victim, now)
        self._admission.fail_refused(now)

    def _leave(self, model: Model, now: float) -> None:
        """Take the backends of a model on the lost host out of those that may be leased."""
        ready = [slot for slot in model.ready if slot.serves]
        were_more, model.ready = len(model.ready) > len(ready), ready
        if were_more and model.queue.limited:
            model.queue.left = now
            self._admission.fill_places(model, now)  # requests that needed one of these go elsewhere

    def back(
        self, host: HostRecord, now: float, found: Mapping[str, FoundBackend], held: Collection[Slot]
    ) -> None:
        """Give each backend the state in which it was found: first those that run, then those in standby.

        ``held``: those that held something before, of which nothing is counted any more (``free``).
        """
        self._state.changed()
        cause = Cause("not_found", host=host.name)
        for slot in sorted(
            self.on(host), key=lambda slot: slot.name in found and found[slot.name].level != ""
        ):
            if isinstance(slot.host, GangHosts):
                self._rejoin(slot, slot.host, host, now, found.get(slot.name), was_held=slot in held)
            elif slot.name in found:
                self._take_over(slot, found[slot.name], host, now)
            elif slot in held:
                self._state.emit(Event(now, "stopped", slot.model, slot.name, cause=cause))

    def _rejoin(
        self,
        slot: Slot,
        hosts: GangHosts,
        back: HostRecord,
        now: float,
        found: FoundBackend | None,
        *,
        was_held: bool,
    ) -> None:
        """Take over a gang of which a host is ``back``, or stop what is left of it, once all hosts are."""
        hosts.is_incomplete |= found is None or found.level != ""
        if hosts.is_cut_off:
            return
        if found and not hosts.is_incomplete:
            self._take_over(slot, found, back, now)
        elif found or was_held:
            gone = [host.name for host in hosts.parts if host.is_gone]
            cause = Cause("host_gone", host=gone[0]) if gone else Cause("unfit", host=back.name)
            self._stop(slot, now, cause)
        hosts.is_incomplete = hosts.is_lost

    def _take_over(self, slot: Slot, found: FoundBackend, host: HostRecord, now: float) -> None:
        if slot.leaving or not self._adopt(slot, found, now):
            self._stop(slot, now, Cause("unfit", host=host.name))

    def _stop(self, slot: Slot, now: float, cause: Cause) -> None:
        """Have a backend stopped that may not stay; until then it holds its GPUs."""
        self._moves.enter(slot, "unfit", now)
        slot.error, slot.retry_at = "it was found running, and cannot stay", now
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

    def cleared(self, host: HostRecord, now: float, *, cleared: bool) -> None:
        """Have all go that is on a host (upkeep.py), or stay: it was drained, or paused, or is no longer."""
        state = self._state
        state.changed()
        if not cleared and not host.is_lost:
            self._swaps.reprieve_all(now)
            for slot in [slot for slot in self.on(host) if slot.host.takes_loads]:
                if slot.state == "standby" and not slot.failed_stops and not slot.leaving:
                    slot.next_level = ""
        self._admission.fail_refused(now)

    def gone(self, host: HostRecord, now: float) -> None:
        """Declare that nothing runs there: its backends hold nothing any more, and none is loaded.

        What is left of a gang on hosts that can be reached is stopped.
        """
        cause = Cause("host_gone", host=host.name)
        for slot in self.free(host, now):
            if all(part.is_lost for part in slot.host.parts):
                self._state.emit(Event(now, "stopped", slot.model, slot.name, cause=cause))
            else:
                self._stop(slot, now, cause)
        for slot in self.on(host):
            if isinstance(slot.host, GangHosts):
                slot.host.is_incomplete = True

    def free(self, host: HostRecord, now: float) -> list[Slot]:
        """Stop counting what backends of a host hold, and return those that held something.

        Not those of a gang that has another host of which it is not known what runs there.
        """
        known = [s for s in self.on(host) if not any(p.is_cut_off for p in s.host.parts if p is not host)]
        held = [slot for slot in known if slot.state != "stopped"]
        for slot in held:
            self._moves.enter(slot, "gone", now)
            slot.note_gone(now)
        return held
