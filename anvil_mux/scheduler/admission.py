"""How a request comes to its backend: it is leased, waits in its model's queue, or fails.

When a model becomes ready its whole queue is leased at once, or as much of it as there are places; so is the
next in queue whenever a place becomes free. Each ticket ends exactly once: leased, failed or gone. Tickets
that had waited are ``woken`` by the driver. Of the layers of a GPU group this is the only one that writes
queues.
"""

from __future__ import annotations

from collections.abc import Iterable

from anvil_mux.errors import MuxError
from anvil_mux.scheduler.events import Cause, Event, Severance
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.planner import could_spill
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.queueing import Bound, bound, not_resident, of_crashes, refusal, too_late
from anvil_mux.scheduler.replicas import nobody_takes
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.steps import Ticket

BUSY = Cause("busy")
_BEGAN_BEFORE = Bound(FOREVER, 0.0, 0.0)
"""The bound in the event of a request that joins others: none."""


class Admission(GroupState):
    """The ends of tickets, and the queues of a GPU group."""

    __slots__ = ()

    def request(self, ticket: Ticket, now: float) -> bool:
        """A request arrived: it is leased, failed or queued; whether the next step is to be asked for."""
        model = self.models[ticket.model]
        if ticket.crashes and (error := of_crashes(ticket)):
            self.fail(ticket, error, now)
            return False
        ready = model.ready
        if not ready:
            if ticket.never_swaps:
                self.fail(ticket, not_resident(self, model.name, now), now)
                return False
            return self.wait_for_load(model, ticket, now)
        if model.limited and ticket.takes_lease and not model.takes(ticket.work.owner):
            only = model.needed(ticket.work.owner)
            self.enqueue(model, ticket, now, only=only, cause=BUSY)
            return model.replicas is not None and self._may_spill(model, now)
        slot = self.route(model, ready, ticket, now) if model.replicas else ready[0]
        if slot is None:
            self.fail(ticket, nobody_takes(model.name), now)
            return self.complete(model, now)
        if not ticket.resent:
            model.demand.arrived(now)
        if not slot.holders:
            model.demand.returned(now - slot.used, now)
        elif not model.replicas:  # else others may be answered elsewhere
            model.demand.overlapping += 1
        self.lease(model, slot, ticket, now)
        if model.replicas is None:
            return False
        completes = self.complete(model, now)
        return completes or (ticket.takes_lease and self._may_spill(model, now))

    def _may_spill(self, model: Model, now: float) -> bool:
        """Whether loading another backend of a busy model may be worth it, in any GPU group."""
        return bool(could_spill(self.groups_of(model), model, now))

    # Leases

    def route(self, model: Model, ready: list[Slot], ticket: Ticket, now: float) -> Slot | None:
        """The backend that a request is sent to; None: the policy lets none of them take it."""
        if not model.replicas or not ticket.takes_lease:
            return ready[0]
        slot, prefill = model.replicas.route(ready, ticket, now)
        if prefill:
            assert ticket.prefill is not None
            self.lease(model, prefill, ticket.prefill, now)
        return slot

    def lease(self, model: Model, slot: Slot, ticket: Ticket, now: float) -> None:
        ticket.backend = slot.name
        model.unload_when_idle = False
        if ticket.takes_lease:
            slot.count_time(now)
            ticket.share = -slot.gpu_seconds
            slot.holders[ticket] = now
            slot.last_used = now
        if self.emit_leases:
            size, waited = len(slot.holders), now - ticket.since
            cause = Cause("routed", detail=ticket.choice.why) if ticket.choice else None
            self.emit(Event(now, "leased", ticket.model, slot.name, ticket.id, size, waited, cause))

    def complete(self, model: Model, now: float) -> bool:
        """Preload the stages that a model in use lacks; whether there are any."""
        found = model.replicas.lacking(now) if model.replicas else []
        any_lacking = False
        for each in self.groups_of(model) if found else ():
            if lacking := [slot for slot in found if slot.name in each.slots and slot not in each.preloads]:
                each.preloads += lacking
                each.changed()
                any_lacking = True
        return any_lacking

    def take_back(self, idle: Slot, now: float) -> None:
        """Send requests anew that wait behind others, and would be better off at ``idle``."""
        model = self.models[idle.model]
        if model.replicas:
            found = model.replicas.take_back(model.ready, idle, now)
            self._send_anew(found, Cause("moved", backend=idle.name), now)

    def silent(self, slot: Slot, now: float) -> None:
        """The engine of a replica does not answer: requests that wait at a stale one are sent anew."""
        model = self.models[slot.model]
        if model.replicas and slot.serves:
            found = model.replicas.take_from(model.ready, slot, now)
            self._send_anew(found, Cause("stale", backend=slot.name), now)

    def _send_anew(self, found: Iterable[tuple[Ticket, Slot]], cause: Cause, now: float) -> None:
        for ticket, slot in found:
            slot.count_time(now)
            ticket.share += slot.gpu_seconds
            del slot.holders[ticket]
            ticket.severed = Severance(cause)
            self.cut.append(ticket)
            if self.emit_leases:
                size = len(slot.holders)
                self.emit(Event(now, "released", ticket.model, slot.name, ticket.id, size=size, cause=cause))

    # Queues

    def wait_for_load(self, model: Model, ticket: Ticket, now: float) -> bool:
        """A request arrived for a model that is not ready; whether the next step is to be asked for."""
        begins = not model.queue.tickets
        # A queue that nobody can serve any more has failed already.
        error = refusal(self, model, now) if begins else None
        if error is None and (self.patient or model.is_spread):  # victims may be in another GPU group
            error = too_late(self, model, now)
        if error:
            self.fail(ticket, error, now)
            return False
        if begins:
            self._note_pause(model, now)
        self.enqueue(model, ticket, now)
        if self.deferred:
            return True
        return len(model.queue.tickets) == 1 and model.name not in self.coming

    def _note_pause(self, model: Model, now: float) -> None:
        """Note the pause before a request for an evicted model, unless an answer of another led to it."""
        used = max(slot.last_used for slot in model.slots)
        if model.is_used or used == -FOREVER:
            return
        gpus = self.gpus_of(model)
        rivals = [slot for slot in self.slots.values() if not slot.holds.keys().isdisjoint(gpus)]
        if all(slot.loaded <= used for slot in (*model.slots, *rivals)):
            model.demand.returned(now - used)

    def enqueue(
        self,
        model: Model,
        ticket: Ticket,
        now: float,
        *,
        only: Slot | None = None,
        cause: Cause | None = None,
    ) -> None:
        """Add a request to its model's queue; ``only``: the one backend that can serve it."""
        queue = model.queue
        most, load, seconds = _BEGAN_BEFORE
        if not ticket.resent:
            model.demand.arrived(now)
        if not queue.tickets:
            self.changed()
            most, load, seconds = bound(self, model, now)
            queue.bound, queue.load_seconds = most, load
        queue.join(ticket)
        name, size = only.name if only else "", len(queue.tickets)
        self.emit(
            Event(now, "queued", ticket.model, name, ticket.id, size, seconds, cause, bound=most, load=load)
        )

    def abandoned(self, ticket: Ticket, now: float, error: MuxError | None = None) -> None:
        """A waiting request ended by itself: its client left, or ``error`` says why it fails."""
        queue = self.models[ticket.model].queue
        if ticket not in queue.tickets:
            return
        self.changed()
        queue.leave(ticket)
        if error:
            self.fail(ticket, error, now)
        else:
            waited = now - ticket.since
            self.emit(Event(now, "gone", ticket.model, ticket=ticket.id, seconds=waited))

    def admit(self, model: Model, now: float) -> None:
        """Lease the queue of a model that is ready."""
        queue = model.queue
        if not model.ready:
            return  # its host was drained: it goes next
        if queue.tickets:
            model.demand.admitted(len(queue), now - queue.first.since)
            self.complete(model, now)
        if model.limited:
            for ticket in [ticket for ticket in queue if not ticket.takes_lease]:
                queue.leave(ticket)
                self._admit_one(model, ticket, model.ready, now)
            self.fill_places(model, now)
            return
        for ticket in queue.tickets:
            self._lease_or_fail(model, ticket, model.ready, now)
        self.woken += queue.tickets
        queue.clear()

    def fill_places(self, model: Model, now: float) -> None:
        """Lease as many requests of a queue as there are places at its model's ready backends."""
        queue = model.queue
        while queue.tickets and model.takes():
            ticket = queue.take(lambda ticket: model.takes(ticket.work.owner))
            if ticket is None:
                return
            self.changed()
            places = [slot for slot in model.ready if not slot.full]
            self._admit_one(model, ticket, places, now)

    def _admit_one(self, model: Model, ticket: Ticket, ready: list[Slot], now: float) -> None:
        self._lease_or_fail(model, ticket, ready, now)
        self.woken.append(ticket)

    def _lease_or_fail(self, model: Model, ticket: Ticket, ready: list[Slot], now: float) -> None:
        if slot := self.route(model, ready, ticket, now):
            self.lease(model, slot, ticket, now)
        else:
            self.fail(ticket, nobody_takes(model.name), now)

    # Failures

    def fail(self, ticket: Ticket, error: MuxError, now: float) -> None:
        ticket.error = error
        waited = now - ticket.since
        cause = Cause("error", detail=error.code)
        self.emit(Event(now, "failed", ticket.model, ticket=ticket.id, seconds=waited, cause=cause))

    def fail_queue(self, model: Model, error: MuxError, now: float) -> None:
        """Fail every request that waits for ``model``."""
        self.changed()
        queue = model.queue
        for ticket in queue.tickets:
            self.fail(ticket, error, now)
        self.woken += queue.tickets
        queue.clear()

    def turn_away(self, model: Model, now: float) -> None:
        """The model is not resident any more: those of its queue fail that may force no swap."""
        for ticket in [ticket for ticket in model.queue if ticket.never_swaps]:
            self.changed()
            model.queue.leave(ticket)
            self.fail(ticket, not_resident(self, model.name, now), now)
            self.woken.append(ticket)

    def fail_all(self, error: MuxError, now: float) -> None:
        """Fail every request that waits."""
        for model in self.models.values():
            self.fail_queue(model, error, now)

    def fail_refused(self, now: float) -> None:
        """Fail the queues that no backend can serve.

        A backend that is being loaded or evicted is judged when that has ended: its queue may fail only then.
        """
        for model in self.models.values():
            error = refusal(self, model, now) if model.queue.tickets else None
            if error:
                self.fail_queue(model, error, now)
