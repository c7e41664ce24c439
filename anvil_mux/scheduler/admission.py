"""How a request comes to its backend: it is leased, waits in its model's queue, or fails.

When a model becomes ready its whole queue is leased at once, or as much of it as there are places; so is the
next in queue whenever a place becomes free. Each ticket ends exactly once: leased, failed or gone. Tickets
that had waited are ``settled``; the driver wakes them. Of the parts of a GPU group this is the only one that
writes queues.
"""

from __future__ import annotations

from collections.abc import Iterable

from anvil_mux.errors import MuxError
from anvil_mux.scheduler.causes import Cause, Severance
from anvil_mux.scheduler.drains import too_late
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.overdue import Bound, bound
from anvil_mux.scheduler.planner import could_spill
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.preloads import complete
from anvil_mux.scheduler.refusals import not_resident, refusal
from anvil_mux.scheduler.replicas import nobody_takes
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.steps import Ticket
from anvil_mux.scheduler.swap import coming

_BEGAN_BEFORE = Bound(FOREVER, 0.0, 0.0)
"""The bound in the event of a request that joins others: none."""


class Admission:
    """The ends of tickets, and the queues of a GPU group."""

    def __init__(self, state: GroupState) -> None:
        self._state = state
        self._emit, self._emit_leases = state.emit, state.emit_leases

    # Leases

    def route(self, model: Model, ready: list[Slot], ticket: Ticket, now: float) -> Slot | None:
        """The backend that a request is sent to; None: the policy lets none of them take it."""
        if not model.replicas or not ticket.leases:
            return ready[0]
        slot, prefill = model.replicas.route(ready, ticket, now)
        if prefill:
            assert ticket.prefill is not None
            self.lease(model, prefill, ticket.prefill, now)
        return slot

    def lease(self, model: Model, slot: Slot, ticket: Ticket, now: float) -> None:
        ticket.backend = slot.name
        model.unload_when_idle = False
        if ticket.leases:
            slot.count_time(now)
            ticket.share = -slot.gpu_seconds
            slot.holders[ticket] = now
            slot.last_used = now
        if self._emit_leases:
            size, waited = len(slot.holders), now - ticket.since
            cause = Cause("routed", detail=ticket.choice.why) if ticket.choice else None
            self._emit(Event(now, "leased", ticket.model, slot.name, ticket.id, size, waited, cause))

    def wants_more(self, model: Model, ticket: Ticket, now: float) -> bool:
        """Whether more backends of a model are to be loaded now that a request for it was leased."""
        completes = complete(self._state, model, now)
        return completes or (ticket.leases and self.may_spill(model, now))

    def may_spill(self, model: Model, now: float) -> bool:
        """Whether loading another backend of a busy model may be worth it, in any GPU group."""
        return bool(could_spill(self._state.states_of(model), model, now))

    def take_back(self, idle: Slot, now: float) -> None:
        """Send requests anew that wait behind others, and would be better off at ``idle``."""
        model = self._state.models[idle.model]
        if model.replicas:
            self.send_anew(
                model.replicas.take_back(model.ready, idle, now), Cause("moved", backend=idle.name), now
            )

    def leave_silent(self, slot: Slot, now: float) -> None:
        """The engine of a replica does not answer: requests that wait at a stale one are sent anew."""
        model = self._state.models[slot.model]
        if model.replicas and slot.serves:
            self.send_anew(
                model.replicas.take_from(model.ready, slot, now), Cause("stale", backend=slot.name), now
            )

    def send_anew(self, found: Iterable[tuple[Ticket, Slot]], cause: Cause, now: float) -> None:
        for ticket, slot in found:
            slot.count_time(now)
            ticket.share += slot.gpu_seconds
            del slot.holders[ticket]
            ticket.severed = Severance(cause)
            self._state.taken_back.append(ticket)
            if self._emit_leases:
                size = len(slot.holders)
                self._emit(Event(now, "released", ticket.model, slot.name, ticket.id, size=size, cause=cause))

    # Queues

    def wait_for_load(self, model: Model, ticket: Ticket, now: float) -> bool:
        """A request arrived for a model that is not ready; whether the next step is to be asked for."""
        begins = not model.queue.tickets
        # A queue that nobody can serve any more has failed already.
        error = refusal(self._state, model, now) if begins else None
        if error is None and (self._state.patient or model.is_spread):  # victims may be in another GPU group
            error = too_late(self._state, model, now)
        if error:
            self.fail(ticket, error, now)
            return False
        if begins:
            self._note_pause(model, now)
        self.enqueue(model, ticket, now)
        if self._state.deferred:
            return True
        return len(model.queue.tickets) == 1 and model.name not in coming(self._state.swaps)

    def _note_pause(self, model: Model, now: float) -> None:
        """Note the pause before a request for an evicted model, unless an answer of another led to it."""
        used = max(slot.last_used for slot in model.slots)
        if model.is_used or used == -FOREVER:
            return
        gpus = {gpu for slot in self._state.own(model) for gpu in slot.holds}
        rivals = [slot for slot in self._state.slots.values() if not slot.holds.keys().isdisjoint(gpus)]
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
        queue, found = model.queue, _BEGAN_BEFORE
        if not ticket.resent:
            model.demand.arrived(now)
        if not queue.tickets:
            self._state.changed()
            found = bound(self._state, model, now)
            queue.bound, queue.load_seconds = found.seconds, found.load_seconds
        queue.join(ticket)
        name, size = only.name if only else "", len(queue.tickets)
        most, load, seconds = found
        self._emit(
            Event(now, "queued", ticket.model, name, ticket.id, size, seconds, cause, bound=most, load=load)
        )

    def give_up(self, ticket: Ticket, now: float, error: MuxError | None = None) -> None:
        """A waiting request ended by itself: its client left, or ``error`` says why it fails."""
        queue = self._state.models[ticket.model].queue
        if ticket not in queue.tickets:
            return
        self._state.changed()
        queue.leave(ticket)
        if error:
            self.fail(ticket, error, now)
        else:
            waited = now - ticket.since
            self._emit(Event(now, "gone", ticket.model, ticket=ticket.id, seconds=waited))

    def admit(self, model: Model, now: float) -> None:
        """Lease the queue of a model that is ready."""
        queue = model.queue
        if not model.ready:
            return  # its host was drained: it goes next
        if queue.tickets:
            model.demand.admitted(len(queue), now - queue.first.since)
            complete(self._state, model, now)
        if queue.limited:
            for ticket in [ticket for ticket in queue if not ticket.leases]:
                queue.leave(ticket)
                self._admit_one(model, ticket, model.ready, now)
            self.fill_places(model, now)
            return
        for ticket in queue.tickets:
            if model.replicas:
                self._lease_or_fail(model, ticket, model.ready, now)
            else:
                self.lease(model, model.ready[0], ticket, now)
        self._state.settled += queue.tickets
        queue.clear()

    def resume(self, now: float) -> None:
        """The configuration is another: requests that can be served now are, or fail."""
        for model in self._state.models.values():
            if model.queue.tickets and model.ready:
                self.admit(model, now)
        self.fail_refused(now)

    def fill_places(self, model: Model, now: float) -> None:
        """Lease as many requests of a queue as there are places at its model's ready backends."""
        queue = model.queue
        while queue.tickets and model.takes():
            ticket = queue.take(lambda ticket: model.takes(ticket.work.owner))
            if ticket is None:
                return
            self._state.changed()
            places = [slot for slot in model.ready if not slot.full]
            self._admit_one(model, ticket, places, now)

    def _admit_one(self, model: Model, ticket: Ticket, ready: list[Slot], now: float) -> None:
        self._lease_or_fail(model, ticket, ready, now)
        self._state.settled.append(ticket)

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
        self._emit(Event(now, "failed", ticket.model, ticket=ticket.id, seconds=waited, cause=cause))

    def fail_queue(self, model: Model, error: MuxError, now: float) -> None:
        """Fail every request that waits for ``model``."""
        self._state.changed()
        queue = model.queue
        for ticket in queue.tickets:
            self.fail(ticket, error, now)
        self._state.settled += queue.tickets
        queue.clear()

    def turn_away(self, model: Model, now: float) -> None:
        """The model is not resident any more: those of its queue fail that may force no swap."""
        for ticket in [ticket for ticket in model.queue if ticket.never_swaps]:
            self._state.changed()
            model.queue.leave(ticket)
            self.fail(ticket, not_resident(self._state, model.name, now), now)
            self._state.settled.append(ticket)

    def fail_all(self, error: MuxError, now: float) -> None:
        """Fail every request that waits."""
        for model in self._state.models.values():
            self.fail_queue(model, error, now)

    def fail_refused(self, now: float) -> None:
        """Fail the queues that no backend can serve.

        A backend that is being loaded or evicted is judged when that has ended: its queue may fail only then.
        """
        for model in self._state.models.values():
            error = refusal(self._state, model, now) if model.queue.tickets else None
            if error:
                self.fail_queue(model, error, now)
