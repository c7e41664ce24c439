"""One GPU group's state machine: facts in, next step out.

A GPU group is a set of GPUs of one host, tied together by some backend that needs several of them. A model
may have backends in several GPU groups, of one host or of several: they share its queue, which stands in one
of them at a time (layout.py). A ``GpuGroup`` takes facts, and answers one question, ``next_step(now)``, which
is asked until it answers ``Wait``. It performs nothing: whoever drives the scheduler performs the steps and
reports how they ended. It has no lock, no clock and no I/O; calls must not overlap.

The arrival of a request and the end of a lease are here. All other facts are told to its parts, which share
one ``GroupState`` (state.py):

    admission.py   leases, queues, failures: every end of a ticket
    planner.py     the backends that could be loaded, and their victims; snapshot.py: what the policy is shown
    decider.py     the next step: overdue queues, the policy, preloads (preloads.py), upkeep.py
    group_swaps.py swaps under way (swap.py); moves.py: states of backends (slot.py), events and steps
    facts.py       the facts about backends, and about their host
    orders.py      unloads, pins, another configuration

Invariants:
 1. The GPUs a backend needs are its own from ``Load`` until its ``evicted``; the sum of what residents and
    standby residuals hold never exceeds a GPU. Without declared memory a backend needs the whole GPU.
 2. A lease is granted only in ready. Draining closes the gate; later requests queue behind the swap.
 3. Every ticket ends exactly once: leased, failed or gone.
 4. A drain lasts at most the victim's ``drain_timeout``, which may be without end, or the one of the whole
    where people ask for it; what is left is severed, counted, logged.
 5. When a model becomes ready its whole queue, or as much of it as there are places, is leased before the
    policy is asked again; so is the next in queue whenever a place becomes free.
 6. A swap nobody waits for is not begun, and while it only drains it is reprieved; so is one whose queue is
    loaded instead on GPUs that nobody holds, where it is served no later. A queue of higher priority takes a
    drain over, but not that for an overdue queue. One begun is finished, unless its load is cancelled: when
    it is unloaded by hand (requests that wait for it fail), or when nobody waits for it any more and another
    queue needs its GPUs. Preloads are cancelled by hand only, but for that of a home backend (preloads.py),
    which makes way for a queue. If a target that nobody waits for any more does not fit although its victims
    have left, no others go for it: the swap ends. Requests that wait behind others at a busy replica count as
    waiting for another replica, if no queue waits for its GPUs; so do those in the queue of a resident model
    whose backends take only so many at once.
 7. A queue older than its bound is overdue: whatever the policy says, its swap begins as soon as its GPUs are
    in no other swap, oldest queue first, and no younger queue gets those GPUs meanwhile. The bound is
    ``max_wait``, or less where a load would come too late for ``queue_timeout`` then; it is fixed when the
    queue begins, and stands in its first ``queued``.
 8. A backend that failed to load is not tried before its cool-down ends; its requests fail at once. One that
    ended soon after it was loaded, before it had given one whole answer, counts as one that failed to load.
    A request under which backends ended twice is refused: it may be what ends them.
 9. A load that can never fit, at all or beside what is pinned, is refused before anything is drained. A
    pinned model drains for no other. A load is also refused that has no room now beside all that cannot be
    evicted: what is pinned, and what is in standby and could not be stopped.
10. The leases of a lost host are severed, and nothing is begun there: its backends may still run and hold
    their GPUs until the host is back and they are adopted, or until it is declared gone by hand.
11. While it is not known of some backend whether it runs already (``expect``), nothing is begun.

A backend that the configuration has no longer, or not as it is (``retire``), is leaving: it gets no new
leases, is drained and stopped, whatever its standby levels, and its slot is left for good. Then layout.py
fills the GPU group anew: another slot may take the place of that one; the queue waits on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anvil_mux.scheduler.admission import Admission
from anvil_mux.scheduler.causes import Cause
from anvil_mux.scheduler.decider import Decider
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.facts import GroupFacts
from anvil_mux.scheduler.group_swaps import GroupSwaps
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.moves import Moves
from anvil_mux.scheduler.orders import Orders
from anvil_mux.scheduler.preloads import complete
from anvil_mux.scheduler.refusals import not_resident, of_crashes
from anvil_mux.scheduler.replicas import nobody_takes
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.steps import NO_USAGE, Step, Ticket, TokenUsage, Wait

INCOMPLETE, BUSY = Cause("incomplete"), Cause("busy")


class GpuGroup:
    """One GPU group and its parts. Only ``Scheduler`` tells it facts."""

    def __init__(self, state: GroupState, groups_of: Mapping[str, Sequence[GpuGroup]]) -> None:
        """``groups_of``: model -> the GPU groups that have backends of it."""
        self.state, self.name, self.host, self.slots = state, state.name, state.host, state.slots
        self._models = state.models
        self.admission = Admission(state)
        self.moves = Moves(state, self.admission)
        self.swaps = swaps = GroupSwaps(
            state, self.moves, lambda model: [group.swaps for group in groups_of[model]]
        )
        self.facts = GroupFacts(state, self.admission, self.moves, swaps)
        self.orders = Orders(
            state, self.admission, swaps, lambda model: [group.orders for group in groups_of[model]]
        )
        self._decider = Decider(state, self.admission, self.moves, swaps)

    def __repr__(self) -> str:
        slots = ", ".join(f"{s.name}: {s.state} {len(s.holders)} leases" for s in self.slots.values())
        waiting = {model.name: len(model.queue) for model in self._models.values() if model.queue}
        queues = ", ".join(f"{name}: {count} waiting" for name, count in waiting.items())
        return f"<GpuGroup {self.name} [{slots}] [{queues}]>"

    def next_step(self, now: float) -> Step | Wait:
        """Return the step to perform now, each once, or until when to wait."""
        return self._decider.next_step(now)

    # Facts from requests. ``request`` and ``release`` return whether the next step is to be asked for: it is
    # after every other fact, but these are many, and matter only if the policy holds a swap back, or if they
    # begin a queue or end a drain.

    def request(self, ticket: Ticket, now: float) -> bool:
        """A request arrived: it is leased, failed or queued."""
        state, model = self.state, self._models[ticket.model]
        if ticket.crashes and (error := of_crashes(ticket)):
            self.admission.fail(ticket, error, now)
            return False
        ready = model.ready
        if not ready:
            if ticket.never_swaps:
                self.admission.fail(ticket, not_resident(state, model.name, now), now)
                return False
            return self.admission.wait_for_load(model, ticket, now)
        if model.limited and ticket.leases and not model.takes(ticket.work.owner):
            only = model.needed(ticket.work.owner)
            self.admission.enqueue(model, ticket, now, only=only, cause=BUSY)
            return model.replicas is not None and self.admission.may_spill(model, now)
        slot = self.admission.route(model, ready, ticket, now) if model.replicas else ready[0]
        if slot is None:
            self.admission.fail(ticket, nobody_takes(model.name), now)
            return complete(state, model, now)
        if not ticket.resent:
            model.demand.arrived(now)
        if not slot.holders:
            model.demand.returned(now - slot.used, now)
        elif not model.replicas:  # else others may be answered elsewhere
            model.demand.overlapping += 1
        self.admission.lease(model, slot, ticket, now)
        return model.replicas is not None and self.admission.wants_more(model, ticket, now)

    def release(
        self,
        ticket: Ticket,
        now: float,
        usage: TokenUsage = NO_USAGE,
        *,
        whole: bool = True,
    ) -> bool:
        """A lease ended. Late after a severed drain, or twice, is harmless.

        ``usage``: tokens of the input and how many were cached, if the engine said so. ``whole``: the engine
        gave its answer to the end.
        """
        slot = self.slots.get(ticket.backend or "")
        if slot is None or ticket not in slot.holders:
            return False
        slot.count_time(now)
        ticket.share += slot.gpu_seconds
        since = slot.holders.pop(ticket)
        state, model = self.state, self._models[ticket.model]
        self._note_use(model, slot, ticket, now - since, now)
        if whole:
            slot.answered, slot.crashes = now, 0
        replicas = model.replicas if ticket.choice else None
        if replicas:
            replicas.in_flight.ended(ticket, prompt_tokens=usage[0], cached_tokens=usage[1], now=now)
        if state.emit_leases:
            size, cause = len(slot.holders), None if whole else INCOMPLETE
            state.emit(Event(now, "released", ticket.model, slot.name, ticket.id, size, cause=cause))
        if model.limited and slot.state == "ready":
            self.admission.fill_places(model, now)
        if replicas and not slot.holders and slot.state == "ready":
            self.admission.take_back(slot, now)
        is_sooner = slot.state == "draining" and self.swaps.bound_anew(slot, now)
        if model.unload_when_idle and self.orders.unload_when_idle(model, now):
            return True
        leases = len(slot.holders)
        if state.deferred and self._matters(slot, leases):
            return True
        if leases:
            return is_sooner
        comes_back = bool(state.homes) and not slot.backend.home
        return slot.state == "draining" or slot.ttl is not None or comes_back

    def _matters(self, slot: Slot, leases: int) -> bool:
        """Whether the end of a lease may change what is decided about swaps that are held back.

        It does where the policy says so, where there is a choice of victims, and where a drain, a ttl, memory
        or another replica may depend on it.
        """
        state, held = self.state, self.state.deferred
        for model, each in held.items():
            if leases < each.stay.leases and slot in each.residents:
                held[model] = each._replace(is_over=True)
        if state.swaps or state.idlers or state.routed or state.memory.budget is not None:
            return True
        return any(each.is_over or not each.contest or len(each.residents) > 1 for each in held.values())

    def _note_use(self, model: Model, slot: Slot, ticket: Ticket, seconds: float, now: float) -> None:
        slot.last_used = now
        if ticket.work.infer_type != "prefill":
            model.demand.served(seconds)
        if not slot.holders and not model.replicas:
            model.demand.idle(now)

    def begin_anew(self) -> None:
        """Plan anew: the configuration is another."""
        self._decider.begin_anew()

    @property
    def leaving(self) -> list[Slot]:
        """The backends that are to go for good, and have not left yet."""
        return [slot for slot in self.slots.values() if slot.leaving and not slot.is_left]

    @property
    def is_outgrown(self) -> bool:
        """Whether a slot was left for good: the GPU group is to be filled anew."""
        return any(slot.is_left for slot in self.slots.values())
