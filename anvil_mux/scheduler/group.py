"""One GPU group's state machine: facts in, next step out.

A GPU group is a set of GPUs of one host, tied together by some backend that needs several of them. A model
may have backends in several GPU groups, of one host or of several: they share its queue, which stands in one
of them at a time (scheduler.py). A ``GpuGroup`` takes facts (``request``, ``release``,
``loaded``, ``died``, ...) and asked one question, ``next_step(now)``, until it answers ``Wait``. It performs
nothing: whoever drives it (the multiplexer's workers, the simulator) performs the steps and reports how they
ended. It has no lock, no clock and no I/O; calls must not overlap.

``GpuGroup`` is the facade: it finds slots and models by name, and leaves the rest to its parts, which share
one ``GroupState`` (state.py):

    admission.py   leases, queues, failures: every end of a ticket
    planner.py     which backend could be loaded, at whose cost; snapshot.py: what the policy is shown
    decider.py     what is to be done now: overdue queues, the policy, preloads (preloads.py), upkeep.py
    group_swaps.py swaps under way (swap.py); moves.py: states of backends (slot.py), events and steps
    outcomes.py    what became of steps and backends; host_facts.py: of their host
    requested.py   what people ask for

Invariants:
 1. The GPUs a backend needs are its own from ``Load`` until its ``evicted``; the sum of what residents and
    standby residuals hold never exceeds a GPU. Without declared memory a backend needs the whole GPU.
 2. A lease is granted only in ready. Draining closes the gate; later requests queue behind the swap.
 3. Every ticket ends exactly once: leased, failed or gone.
 4. A drain lasts at most ``drain_timeout``; what is left is severed, counted, logged.
 5. When a model becomes ready its whole queue, or as much of it as there are places, is leased before the
    policy is asked again; so is the next in queue whenever a place becomes free.
 6. A swap nobody waits for is not begun, and while it only drains it is reprieved. One begun is finished,
    unless its load is cancelled: when it is unloaded by hand (requests that wait for it fail), or when nobody
    waits for it any more and another queue needs its GPUs. Preloads are cancelled by hand only.
    Who waits behind others at a busy replica waits for another one, if nobody on the GPU group waits for a
    load. (So does the queue of a model that is resident, which it has if its backends take only so many at
    once.)
 7. A queue older than its bound is overdue: whatever the policy says, its swap begins as soon as its GPUs are
    in no other swap, oldest queue first, and nobody younger takes those GPUs meanwhile. The bound is
    ``max_wait``, or less where a load would come too late for ``queue_timeout`` then; it is fixed when the
    queue begins, and stands in its first ``queued``.
 8. A backend that failed to load is not tried before its cool-down ends; its requests fail at once. One that
    ended soon after it was loaded, before it had given one whole answer, counts as one that failed to load.
    Nobody is leased who was there when backends ended twice: the request may be what ends them.
 9. What can never fit, at all or beside what is pinned, is refused before anything is drained. What is
    pinned drains for no other model.
10. The leases of a lost host are severed, and nothing is begun there: what may still run there holds its
    GPUs until the host is back and its backends are adopted, or until it is declared gone by hand.
11. While it is not known of some backend whether it runs already (``expected``), nothing is begun.

A backend that the configuration has no longer, or not as it is (``retired``), is leaving: it gets no new
leases, is drained and stopped, whatever its standby levels, and its slot is left for good. Its queue waits on
for whoever takes that slot; scheduler.py makes the GPU group that takes this one's place then (building.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from anvil_mux.errors import LoadError, MuxError
from anvil_mux.routing.in_flight import EngineLoad
from anvil_mux.scheduler.admission import Admission
from anvil_mux.scheduler.causes import Cause, Leaving
from anvil_mux.scheduler.decider import Decider
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.group_swaps import GroupSwaps
from anvil_mux.scheduler.host_facts import FoundBackend, HostFacts
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.moves import Moves
from anvil_mux.scheduler.outcomes import Outcomes
from anvil_mux.scheduler.preloads import complete
from anvil_mux.scheduler.queue import ModelQueue
from anvil_mux.scheduler.refusals import of_crashes
from anvil_mux.scheduler.replicas import nobody_takes
from anvil_mux.scheduler.requested import Requested
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.steps import NO_USAGE, Step, Ticket, TokenUsage, Wait

INCOMPLETE, BUSY = Cause("incomplete"), Cause("busy")


class GpuGroup:
    """The state of one GPU group. Every fact comes with the moment at which it became true."""

    def __init__(self, state: GroupState, groups_of: Mapping[str, Sequence[GpuGroup]]) -> None:
        """``groups_of``: model -> the GPU groups that have backends of it."""
        self.state = state
        self.name = state.name
        self.host = state.host
        self.slots = state.slots
        self._models = state.models
        self.remodelled()
        self._admission = Admission(state)
        moves = Moves(state, self._admission)
        swaps = GroupSwaps(state, moves)
        self._moves = moves
        self._decider = Decider(state, self._admission, moves, swaps)
        self._outcomes = Outcomes(state, self._admission, moves, swaps)
        self._host_facts = HostFacts(state, self._admission, moves, swaps, self._outcomes)

        def siblings(model: str) -> list[Requested]:
            return [group._requested for group in groups_of[model]]

        self._requested = Requested(state, self._admission, swaps, siblings)

    def remodelled(self) -> None:
        """Its models are others than before, or their backends are."""
        self.state.remodelled()
        self.queues: dict[str, ModelQueue] = {name: each.queue for name, each in self._models.items()}
        """For those who look at who waits."""

    def __repr__(self) -> str:
        slots = ", ".join(f"{s.name}: {s.state} {len(s.holders)} leases" for s in self.slots.values())
        queues = ", ".join(f"{model}: {len(queue)} waiting" for model, queue in self.queues.items() if queue)
        return f"<GpuGroup {self.name} [{slots}] [{queues}]>"

    # What its driver takes

    def next_step(self, now: float) -> Step | Wait:
        """What is to be done now. Each step is handed out once."""
        return self._decider.next_step(now)

    # Facts from requests. ``request`` and ``release`` return whether the next step is to be asked for: it is
    # after every other fact, but these are many, and matter only if the policy holds a swap back, or if they
    # begin a queue or end a drain.

    def request(self, ticket: Ticket, now: float) -> bool:
        """A request arrived: it is leased, failed or queued."""
        state, model = self.state, self._models[ticket.model]
        model.demand.arrived(now)
        if ticket.crashes and (error := of_crashes(ticket)):
            self._admission.fail(ticket, error, now)
            return False
        ready = model.ready
        if not ready:
            return self._admission.wait_for_load(model, ticket, now)
        if state.limited and ticket.leases and not model.takes(ticket.work.owner):
            only = model.needed(ticket.work.owner)
            self._admission.enqueue(model, ticket, now, only=only, cause=BUSY)
            return model.replicas is not None and self._admission.may_spill(model, now)
        slot = self._admission.route(model, ready, ticket, now) if model.replicas else ready[0]
        if slot is None:
            self._admission.fail(ticket, nobody_takes(model.name), now)
            return complete(state, model, now)
        if not slot.holders:
            model.demand.returned(now - slot.used, now)
        elif not model.replicas:  # else others may be answered elsewhere
            model.demand.overlapping += 1
        self._admission.lease(model, slot, ticket, now)
        return model.replicas is not None and self._admission.wants_more(model, ticket, now)

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
        since = slot.holders.pop(ticket, None) if slot else None
        if slot is None or since is None:
            return False
        state, model = self.state, self._models[ticket.model]
        self._note_use(model, slot, ticket, now - since, now)
        if whole:
            slot.answered, slot.crashes = now, 0
        replicas = model.replicas if ticket.choice else None
        if replicas:
            replicas.in_flight.ended(ticket, prompt_tokens=usage[0], cached_tokens=usage[1])
        if state.emit_leases:
            size, cause = len(slot.holders), None if whole else INCOMPLETE
            state.emit(Event(now, "released", ticket.model, slot.name, ticket.id, size, cause=cause))
        if state.limited and slot.state == "ready":
            self._admission.fill_places(model, now)
        if replicas and not slot.holders and slot.state == "ready":
            self._admission.take_back(slot, now)
        if model.unload_when_idle and self._requested.unload_when_idle(model, now):
            return True
        deferred, leases = state.deferred, len(slot.holders)
        if deferred is not None and (leases < deferred[1].leases or not self._decider.plans_hold(now)):
            return True
        return not leases and (slot.state == "draining" or slot.backend.ttl is not None)

    def _note_use(self, model: Model, slot: Slot, ticket: Ticket, seconds: float, now: float) -> None:
        slot.last_used = now
        if ticket.work.infer_type != "prefill":
            model.demand.served(seconds)
        if not slot.holders and not model.replicas:
            model.demand.idle(now)

    def give_up(self, ticket: Ticket, now: float, error: MuxError | None = None) -> None:
        """A waiting request ended by itself: its client left, or ``error`` says why it fails."""
        self._admission.give_up(ticket, now, error)

    def fail_all(self, error: MuxError, now: float) -> None:
        """Every waiting request fails with ``error``."""
        for model in self._models.values():
            self._admission.fail_queue(model, error, now)

    def sever_all(self, now: float) -> tuple[Ticket, ...]:
        """The program ends and waits no longer for the requests that run; the caller cuts them."""
        cause = Cause("shutdown")
        return tuple(ticket for slot in self.slots.values() for ticket in self._moves.sever(slot, now, cause))

    # Facts about replicas

    def first_byte(self, ticket: Ticket) -> bool:
        """The first byte of an answer came, of a model with several backends; False: it comes too late."""
        if replicas := self._models[ticket.model].replicas:
            replicas.in_flight.first_byte(ticket)
        return not ticket.severed

    def observed(self, backend: str, load: EngineLoad | None, now: float) -> None:
        """The engine of a replica said this of itself; None: it answered, and has no figures."""
        if replicas := self._models[self.slots[backend].model].replicas:
            replicas.in_flight.observe(backend, load, now)

    def silent(self, backend: str, now: float) -> None:
        """The engine of a replica does not answer: when it is stale, who waits there leaves."""
        slot = self.slots[backend]
        replicas = self._models[slot.model].replicas
        if replicas and slot.serves:
            found = replicas.take_from(slot, now)
            self._admission.send_anew(found, Cause("stale", backend=backend), now)

    # Facts about what people ask for

    def unload_requested(self, model: str, now: float) -> bool:
        """Evict what serves ``model`` after its drain; False: nothing to evict."""
        return self._requested.unload(self._models[model], now)

    def unload_when_idle(self, model: str, now: float) -> bool:
        """Evict what serves ``model`` once nobody uses it, unless it is asked for before; True: now."""
        return self._requested.unload_when_idle(self._models[model], now)

    def pin_requested(self, model: str, now: float, pinned: bool) -> None:
        """Whether ``model`` is kept, once it is resident, from being evicted for others."""
        self._requested.pin(self._models[model], now, pinned=pinned)

    def retired(self, leaving: Mapping[str, Leaving], served: Set[str], now: float) -> None:
        """Backends are to go for good, each for a reason; queues of models that are not ``served`` end."""
        self._requested.retire(leaving, served, now)

    def resumed(self, now: float) -> None:
        """It took the place of others: whoever may be served now is."""
        for model in self._models.values():
            if model.queue.tickets and model.ready:
                self._admission.admit(model, now)
        self._admission.fail_refused(now)

    @property
    def leaving(self) -> list[Slot]:
        """The backends that are to go for good, and have not left yet."""
        return [slot for slot in self.slots.values() if slot.leaving and not slot.is_left]

    @property
    def is_outgrown(self) -> bool:
        """Whether a slot was left for good: another GPU group is to take this one's place."""
        return any(slot.is_left for slot in self.slots.values())

    # Facts about backends

    def expected(self, name: str) -> None:
        """The backend may run already: until it is ``adopted`` or ``looked_at`` requests only wait."""
        self.state.unseen.add(name)

    def looked_at(self, name: str) -> None:
        """It is known now whether the backend ran: what was not adopted holds nothing (any more)."""
        self.state.unseen.discard(name)
        self.state.changed()

    def adopt(self, name: str, now: float) -> bool:
        """The backend ran before we did; False if it cannot stay beside those already adopted."""
        return self._outcomes.adopt(self.slots[name], now)

    def adopt_standby(
        self, name: str, now: float, how: str, residual: Mapping[str, int], host_bytes: int = 0
    ) -> bool:
        """The backend was in standby by ``how`` before we came; False if what it keeps has no room."""
        return self._outcomes.adopt_standby(self.slots[name], now, how, residual, host_bytes)

    def loaded(self, name: str, now: float, how: str = "stop") -> None:
        """The backend answers, brought back by the way ``how``; its whole queue is leased."""
        self._outcomes.loaded(self.slots[name], now, how)

    def load_failed(self, name: str, now: float, error: LoadError) -> None:
        """The backend did not become ready and was cleaned up."""
        self._outcomes.load_failed(self.slots[name], now, error)

    def load_cancelled(self, name: str, now: float) -> None:
        """The load of the backend ended before its time, and all that it had begun was stopped."""
        self._outcomes.load_cancelled(self.slots[name], now)

    def evicted(
        self,
        name: str,
        now: float,
        residual: Mapping[str, int] | None = None,
        how: str = "stop",
        host_bytes: int = 0,
        freed: Mapping[str, int] | None = None,
        died: str = "",
        log: Iterable[str] = (),
    ) -> None:
        """The backend left its GPUs by the way ``how``; unless it was stopped it is in standby.

        It holds nothing then but its ``residual`` (bytes by GPU) and ``host_bytes`` of the host's memory.
        ``freed`` is what it gave back, where that was read. ``died``: how it had ended before it was told to,
        and ``log`` what it had printed last.
        """
        self._outcomes.evicted(
            self.slots[name],
            now,
            residual=residual or {},
            way=how,
            host_bytes=host_bytes,
            freed=freed or {},
            died=died,
            log=log,
        )

    def evict_failed(self, name: str, now: float, why: str) -> None:
        """The backend may still hold its GPUs; nothing is started there until a later stop succeeds.

        One that was in standby holds what it held, and stays so.
        """
        self._outcomes.evict_failed(self.slots[name], now, why)

    def died(self, name: str, now: float, why: str, log: Iterable[str] = ()) -> None:
        """The backend ended without being told to. Whoever loads or stops it reports that instead.

        ``log``: what its engine had printed last.
        """
        self._outcomes.died(self.slots[name], now, why, log)

    def unanswering(self, name: str, now: float) -> None:
        """The engine of a backend answers nobody: it is stopped without a drain."""
        self._outcomes.unanswering(self.slots[name], now)

    def host_lost(self, now: float) -> None:
        """Nobody hears of its host any more, whose record says so already."""
        self._host_facts.lost(now)

    def host_back(self, now: float, found: Mapping[str, FoundBackend]) -> None:
        """Its host is heard of again; ``found``: backend -> how it was found there, where it was."""
        self._host_facts.back(now, found)

    def host_gone(self, now: float) -> None:
        """Somebody says that nothing runs on its host any more."""
        self._host_facts.gone(now)

    def memory_seen(self, held: Mapping[str, int]) -> bool:
        """Programs that are none of ours hold so many bytes, by GPU; whether that is news."""
        return self._outcomes.memory_seen(held)
