"""One GPU group's state machine: facts in, next step out.

A GPU group is a set of GPUs tied together by some backend that needs several of them, or by the replicas of
one model. A ``GpuGroup`` is told facts (``request``, ``release``, ``loaded``, ``died``, ...) and asked one
question, ``next_step(now)``, until it answers ``Wait``. It performs nothing: whoever drives it (the
multiplexer's workers, the simulator) performs the steps and reports how they ended. It has no lock, no clock
and no I/O; calls must not overlap.

Each backend of the GPU group has one state; TRANSITIONS is the whole table and ``_enter`` its only writer:

    stopped --load--> loading --loaded--> ready --drain--> draining --evict--> evicting --> stopped | standby
                        |                   ^-----reprieve----'
                        '--cancel--> cancelling --> stopped
    standby --demote--> demoting --> stopped | standby

A ``_Swap`` ties a target to the victims that make room for it. Its GPUs are in no other swap until it ends.
After each eviction it is asked again who is in the way: nobody goes who need not.

What no queue waits for is a preload: a load into free room that prepares a backend, or brings the stage
(prefill or decode) that a model in use lacks, or wakes one on its way to a deeper standby level (standby.py),
or is another replica of a busy model. It is begun only while no queue waits.

Invariants:
 1. The GPUs a backend needs are its own from ``Start`` until its ``stopped``; the sum of what residents and
    standby residuals hold never exceeds a GPU. Without declared memory a backend needs the whole GPU.
 2. A lease is granted only in ready. Draining closes the gate; later requests queue behind the swap.
 3. Every ticket ends exactly once: leased, failed or gone.
 4. A drain lasts at most ``drain_timeout``; what is left is severed, counted, logged.
 5. When a model becomes ready its whole queue, or as much of it as there are places, is leased before the
    policy is asked again; so is the next in queue whenever a place becomes free.
 6. A swap nobody waits for is not begun, and while it only drains it is reprieved. One begun is finished,
    unless its load is cancelled: when it is unloaded by hand (who waits for it is told so), or when nobody
    waits for it any more and another queue needs its GPUs. Preloads are cancelled by hand only.
    Who waits behind others at a busy replica waits for another one, if nobody on the GPU group waits for a
    load. (So does the queue of a model that is resident, which it has if its backends take only so many at
    once.)
 7. A queue older than its bound is overdue: whatever the policy says, its swap begins as soon as its GPUs are
    in no other swap, oldest queue first, and nobody younger takes those GPUs meanwhile. The bound is
    ``max_wait``, or less where a load would come too late for ``queue_timeout`` then; it is fixed when the
    queue begins, and stands in its first ``queued``.
 8. A backend that failed to start is not tried before its cool-down ends; its requests fail at once. One that
    ended soon after it was loaded, before it had given one whole answer, counts as one that failed to start.
    Nobody is leased who was there when backends ended twice: the request may be what ends them.
 9. What can never fit, at all or beside what is pinned, is refused before anything is drained. What is
    pinned drains for no other model.
10. While it is not known of some backend whether it runs already (``expected``), nothing is begun.

A backend that the configuration has no longer, or not as it is (``retired``), is leaving: it gets no new
leases, is drained and stopped, whatever its standby levels are, and its slot is left for good. Its queue
waits on for whoever takes that slot; scheduler.py builds the GPU group that takes this one's place then.

After a failed start there is no rollback: the backend is empty, and the next question serves whoever waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.settings import gib
from anvil_mux.errors import (
    Cancelled,
    Crashed,
    DoesNotFit,
    GpuMemoryShort,
    HostMemoryShort,
    LoadError,
    MuxError,
    Stuck,
    UnknownModel,
    with_log,
)
from anvil_mux.routing.in_flight import EngineFigures, EngineLoad, Report
from anvil_mux.routing.prefix import BYTES_PER_TOKEN
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.causes import ADOPTED, POLICY, Cause, Leaving, Severance, ending, is_cause
from anvil_mux.scheduler.costs import NO_COST, Cost, Costs, source_of
from anvil_mux.scheduler.demand import Demand
from anvil_mux.scheduler.events import TRANSITIONS, Event
from anvil_mux.scheduler.eviction import Eviction
from anvil_mux.scheduler.fair_queue import FairQueue
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.placement import HOLDING, Placement, Slot
from anvil_mux.scheduler.policies import (
    FOREVER,
    Decision,
    Policy,
    Queue,
    Resident,
    Snapshot,
    Spill,
    Stay,
    Swapping,
    SwapTo,
    Unload,
    decide,
)
from anvil_mux.scheduler.replicas import Replicas, nobody_takes
from anvil_mux.scheduler.standby import DESCENTS, PINS, HostMemory, below, demoted_at, levels
from anvil_mux.scheduler.steps import Cancel, Crash, Demote, Start, Step, Stop, Ticket, Wait

COOL_DOWN_SECONDS = 5.0
MAX_COOL_DOWN_SECONDS = 300.0
STUCK_RETRY_SECONDS = 5.0
MAX_STUCK_RETRY_SECONDS = 60.0
SHORTEST_DEFERRAL = 1.0
"""Seconds before which the moment of a swap that is held back is not announced again."""
FIRST_SERVICE_SECONDS = 10.0
"""What a lease is held for, of a model that has not answered yet."""
SOON_SECONDS = 30.0
"""After its load; who ends within that and has not given one whole answer counts as one that failed to load.

An engine that what it is asked crashes ends while it reads the first prompts, which takes seconds. One that
takes longer costs at most a load in so long, and each request no more than MOST_CRASHES of them.
"""
MOST_CRASHES = 2
"""So often backends end under one request, before that is refused."""
INCOMPLETE, BUSY, UNLOADED = Cause("incomplete"), Cause("busy"), Cause("unloaded")
LOADING = ("loading", "cancelling")
"""States of a backend whose load is under way."""


@dataclass(eq=False, slots=True)
class _Swap:
    target: Slot | None
    victims: list[Slot]
    """Those that have not left yet."""
    until: float
    """End of the drain."""
    cause: Cause
    severs: Cause
    """Why a request is severed that outlasts the drain."""
    begun: bool = False
    """A victim was told to stop: no reprieve any more."""
    preload: bool = False
    """Nobody waits for the target."""
    emptied: float = FOREVER
    """When the last drain ended."""
    evict_seconds: float = 0.0
    """What putting the victims out took after that."""
    gone: list[str] = field(default_factory=list)
    """The models of those that have left."""
    how: str = ""
    """The way by which the target is brought back, once it is being loaded."""
    cancel: Cause | None = None
    """Why the load of the target is to end before its time: unloaded, or unwanted."""

    def gpus(self) -> set[str]:
        held = set(self.target.holds) if self.target else set()
        for victim in self.victims:
            if victim.state in HOLDING:
                held.update(victim.holds)
        return held


_AGE = attrgetter("since", "id")
"""Of a ticket."""


class _Plan(NamedTuple):
    """A backend to load, and the victims that make room for it."""

    target: Slot
    victims: list[Slot]
    evicts: tuple[str, ...]
    """The victims' models."""
    source: str
    """Their name in the costs."""
    cost: Cost


class Awaited(NamedTuple):
    """What a request would meet if it came now."""

    refusal: MuxError | None = None
    target: Slot | None = None
    """Who will serve it, if a swap is under way to that, or could begin now."""
    victims: Sequence[Slot] = ()
    cost: Cost = NO_COST
    loaded_before: bool = False
    """By that way, so that ``cost`` is no mere guess."""
    decision: Decision | None = None
    """What the policy says to that swap; None: it is under way."""
    until: float = FOREVER
    """End of the drain under way."""
    overdue_at: float = FOREVER
    """When its swap begins, whatever the policy says."""


def cool_down(failed_starts: int) -> float:
    """Seconds until a backend may be loaded again."""
    return _pause(COOL_DOWN_SECONDS, failed_starts, MAX_COOL_DOWN_SECONDS) if failed_starts else 0.0


def _pause(first: float, failures: int, longest: float) -> float:
    return min(first * 2.0 ** min(failures - 1, 10), longest)


class GpuGroup:
    """The state of one GPU group. Every fact comes with the moment at which it became true."""

    def __init__(
        self,
        name: str,
        config: Config,
        backends: Iterable[Backend],
        policy: Policy,
        eviction: Eviction,
        emit: Callable[[Event], object],
        costs: Costs | None = None,
        host: HostMemory | None = None,
        footprints: Footprints | None = None,
        *,
        emit_leases: bool = True,
        before: Sequence[GpuGroup] = (),
        coming: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``before``: those whose place it takes, and which are told nothing any more.

        Backends that it has in common with them keep their slots, unless these were left for good.
        ``coming``: slot that is about to be left -> the model that it will be of then.
        """
        self.name = name
        kept = {name: slot for each in before for name, slot in each.slots.items() if not _is_left(slot)}
        self._placement = Placement(backends, config.gpus, eviction, kept)
        self.slots: dict[str, Slot] = self._placement.slots
        self._replicas = _by_model(self.slots, coming)
        self.queues: dict[str, dict[Ticket, None]] = {model: {} for model in self._replicas}
        self.settled: list[Ticket] = []
        """Tickets that ended after waiting in a queue; whoever drives the GPU group takes and wakes them."""
        self.taken_back: list[Ticket] = []
        """Tickets that ended at a replica that had not begun with them; the driver takes and cuts them."""
        self.deferred: tuple[str, Stay] | None = None
        """The model whose swap the policy holds back, and until when and why."""
        self._plans: dict[str, _Plan] = {}
        """The swaps that the policy could begin when it was last asked."""
        self._ask_again, self._plans_hold_until = FOREVER, -FOREVER
        """When the policy is asked again; and until when the plans are the same, unless a state changes or a
        queue begins or loses a request."""
        self._announced: tuple[Ticket | None, float] = None, FOREVER
        """The first of the queue whose swap was said to be held back, and when that has to be said again."""
        self._ready_of = {model: _those_ready(slots) for model, slots in self._replicas.items()}
        self._ready = _those_ready(self.slots.values())
        self._routed = {m: Replicas(slots, config) for m, slots in self._replicas.items() if len(slots) > 1}
        """Of models with several backends: whom a request is sent to."""
        self._swaps: list[_Swap] = []
        self._idlers = [slot for slot in self.slots.values() if slot.backend.ttl is not None]
        self._stayers = [slot for slot in self.slots.values() if slot.backend.min_residency]
        self._sleepers = [slot for slot in self.slots.values() if slot.backend.evict_to != ("stop",)]
        self._fair = {s.model: FairQueue[Ticket]() for s in self.slots.values() if s.backend.concurrency}
        """Of models that may have a queue while they are resident: who is next in it."""
        self._unseen = set[str]()  # backends that may run already: until that is known nothing is begun
        self._unkept: set[str] = set()
        """Models that go once nobody uses them, unless they are asked for again before."""
        self._left, self._bounds = dict[str, float](), dict[str, float]()
        """Of those: when a backend last ceased to be ready. Before that, no queue waited for a load.
        And of each queue: after how many seconds it is overdue."""
        new = [slot for slot in self.slots.values() if slot.backend.preload and slot.name not in kept]
        self._preloads: list[Slot] = new
        self._host = host or HostMemory()
        self._footprints = footprints or Footprints()
        for slot in self.slots.values():
            self._host.join(slot, self._worth)
            self._placement.measure(slot, self._footprints.held(slot.name))
        self._demand = {model: Demand() for model in self.queues}
        self._max_wait = dict.fromkeys(self.queues, config.max_wait) | max_waits(self.slots.values(), config)
        self._priority = {m: max(s.backend.priority for s in slots) for m, slots in self._replicas.items()}
        self._costs = costs or Costs()
        self._config = config
        self._policy = policy
        self._emit = emit
        self._emit_leases = emit_leases
        """Whether anybody is interested in ``leased`` and ``released``; all other events are rarer."""
        for each in before:
            self._go_on_from(each)

    def _go_on_from(self, before: GpuGroup) -> None:
        """What is under way goes on here, and who waits for a model that is served here waits on."""
        self.settled += before.settled
        self.taken_back += before.taken_back
        self._swaps += before._swaps
        self._preloads += [each for each in before._preloads if self.slots.get(each.name) is each]
        self._left |= before._left
        self._unseen |= before._unseen & self.slots.keys()
        self._unkept |= before._unkept & self.queues.keys()
        self._placement.others = {**self._placement.others, **before._placement.others}
        for model, queue in before.queues.items():
            if model not in self.queues:
                continue
            self.queues[model], self._demand[model] = queue, before._demand[model]
            if queue:
                self._bounds[model] = min(before._bounds[model], self._max_wait[model])
            if model in self._routed and model in before._routed:
                self._routed[model].in_flight.go_on_from(before._routed[model].in_flight)
            for ticket in queue if model in self._fair else ():
                if ticket.leases:
                    self._fair[model].join(ticket.sender, ticket)

    def __repr__(self) -> str:
        slots = ", ".join(f"{s.name}: {s.state} {len(s.holders)} leases" for s in self.slots.values())
        queues = ", ".join(f"{model}: {len(queue)} waiting" for model, queue in self.queues.items() if queue)
        return f"<GpuGroup {self.name} [{slots}] [{queues}]>"

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(sorted({gpu for slot in self.slots.values() for gpu in slot.holds}))

    def is_ready(self, model: str) -> bool:
        return bool(self._ready_of[model])

    def takes(self, model: str, owner: str = "") -> bool:
        """Whether a request for ``model`` would be leased at once; one that needs ``owner`` waits for it."""
        if needed := self._needed(owner):
            return not needed.full
        if model in self._routed:
            return self._routed[model].take_one_more()
        return any(not slot.full for slot in self._ready_of[model])

    def slots_of(self, model: str) -> list[Slot]:
        return self._replicas[model]

    # Facts from requests. ``request`` and ``release`` return whether the next step is to be asked for: it is
    # after every other fact, but these are many, and matter only if the policy holds a swap back, or if they
    # begin a queue or end a drain.

    def request(self, ticket: Ticket, now: float) -> bool:
        """A request arrived: it is leased, failed or put in queue."""
        demand = self._demand[ticket.model]
        demand.arrived(now)
        if ticket.crashes and len(ticket.crashes) >= MOST_CRASHES:
            self._fail(ticket, _crashed(ticket), now)
            return False
        ready = self._ready_of[ticket.model]
        if ready and self._fair and ticket.leases and not self.takes(ticket.model, ticket.work.owner):
            self._enqueue(ticket, now, self._needed(ticket.work.owner), BUSY)
            return ticket.model in self._routed and self._spill(ticket.model, now) is not None
        if ready:
            routed = ticket.model in self._routed
            slot = self._route(ready, ticket, now) if routed else ready[0]
            if slot is None:
                self._fail(ticket, nobody_takes(ticket.model), now)
                return self._complete(ticket.model, now)
            if not slot.holders:
                demand.returned(now - slot.used, now)
            elif not routed:  # else others may be answered elsewhere
                demand.overlapping += 1
            self._lease(slot, ticket, now)
            return routed and self._wants_more(ticket, now)
        queue = self.queues[ticket.model]
        if not queue:  # a queue that nobody can serve any more has failed already
            if error := self._refusal(ticket.model, now):
                self._fail(ticket, error, now)
                return False
            self._plans_hold_until = -FOREVER
            self._note_pause(ticket.model, now)
        self._enqueue(ticket, now)
        return self.deferred is not None or (len(queue) == 1 and ticket.model not in self._coming())

    def _wants_more(self, ticket: Ticket, now: float) -> bool:
        """Whether more of its model's backends are to be loaded now that it has come."""
        completes = self._complete(ticket.model, now)
        return completes or (ticket.leases and self._spill(ticket.model, now) is not None)

    def _needed(self, owner: str) -> Slot | None:
        """The only backend that can serve a request, if that is there: it has what the request refers to."""
        slot = self.slots.get(owner) if owner else None
        return slot if slot and slot.state == "ready" else None

    def _enqueue(
        self, ticket: Ticket, now: float, needed: Slot | None = None, cause: Cause | None = None
    ) -> None:
        queue, bound = self.queues[ticket.model], FOREVER
        if not queue:
            bound = self._bounds[ticket.model] = self._bound(ticket.model, now)
        queue[ticket] = None
        if ticket.leases and ticket.model in self._fair:
            self._fair[ticket.model].join(ticket.sender, ticket)
        name = needed.name if needed else ""
        self._emit(Event(now, "queued", ticket.model, name, ticket.id, len(queue), cause=cause, bound=bound))

    def _bound(self, model: str, now: float) -> float:
        """After how many seconds a queue that begins now is overdue: in time to be loaded, if it can be."""
        left = self._config.queue_timeout - self._swap_seconds(model, now)
        return max(min(self._max_wait[model], left), 0.0)

    def _swap_seconds(self, model: str, now: float) -> float:
        """What having ``model`` will take, drain included, as far as is known."""
        plan = None if self._ready_of[model] else self._plan(model, self._busy(), now)
        if plan:
            return self._drain_seconds(plan.victims) + plan.cost.seconds
        found = []
        for slot in self._replicas[model]:
            goals = [swap.target for swap in self._swaps if swap.target and swap.target is not slot]
            others = [goal for goal in goals if goal.holds.keys() & slot.holds.keys()]
            way = slot.level if slot.state in ("stopped", "standby") else slot.backend.evict_to[0]
            cost = self._cost(source_of(other.model for other in others), slot, way)
            found.append(self._drain_seconds(others) + cost.seconds)
        return min(found)

    def _drain_seconds(self, victims: Iterable[Slot]) -> float:
        """About the longest of their leases."""
        longest = 0.0
        for victim in victims:
            service = self._demand[victim.model].service_seconds or FIRST_SERVICE_SECONDS
            longest = max(longest, service * (1.0 + math.log(max(len(victim.holders), 1))))
        return min(longest, self._config.drain_timeout)

    def _note_pause(self, model: str, now: float) -> None:
        """A request for a model that was evicted: its client's pause, unless another's answer brought it."""
        used = max(slot.last_used for slot in self._replicas[model])
        idle = not any(slot.holders for slot in self._replicas[model])
        if idle and used > -FOREVER and all(slot.loaded <= used for slot in self.slots.values()):
            self._demand[model].returned(now - used)

    def first_byte(self, ticket: Ticket) -> bool:
        """The first byte of an answer came, of a model with several backends; False: it comes too late."""
        if ticket.model in self._routed:
            self._routed[ticket.model].in_flight.first_byte(ticket)
        return not ticket.severed

    def observed(self, backend: str, load: EngineLoad | None, now: float) -> None:
        """The engine of a replica said this of itself; None: it answered, and has no figures."""
        routed = self._routed.get(self.slots[backend].model)
        if routed:
            routed.in_flight.observe(backend, load, now)

    def said(self, backend: str, now: float) -> EngineFigures | None:
        """What the engine of a replica said of itself last, in the mode full."""
        routed = self._routed.get(self.slots[backend].model)
        return routed.in_flight.said(backend, now) if routed else None

    def silent(self, backend: str, now: float) -> None:
        """The engine of a replica does not answer: when it is stale, who waits there leaves."""
        slot = self.slots[backend]
        if slot.model in self._routed and slot.state == "ready":
            found = self._routed[slot.model].take_from(slot, now)
            self._send_anew(found, Cause("stale", backend=backend), now)

    def reports(self, now: float) -> dict[str, Report]:
        """What other anvil-mux are told of the replicas here."""
        trackers = [each.in_flight for each in self._routed.values()]
        return {name: told for in_flight in trackers for name, told in in_flight.reports(now).items()}

    def hear(self, told: Mapping[str, Sequence[Report]], now: float) -> None:
        """What other anvil-mux tell of the replicas here."""
        for each in self._routed.values():
            each.in_flight.hear(told, now)

    def bytes_per_token(self, model: str) -> float:
        """As engines' counts have it. Any thread may ask, at any time."""
        return self._routed[model].in_flight.bytes_per_token if model in self._routed else BYTES_PER_TOKEN

    def release(
        self,
        ticket: Ticket,
        now: float,
        usage: tuple[int | None, int | None] = (None, None),
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
        self._note_use(slot, ticket, now - since, now)
        if whole:
            slot.answered, slot.crashes = now, 0
        routed = self._routed.get(ticket.model) if ticket.choice else None
        if routed:
            routed.in_flight.ended(ticket, prompt_tokens=usage[0], cached_tokens=usage[1])
        if self._emit_leases:
            size, cause = len(slot.holders), None if whole else INCOMPLETE
            self._emit(Event(now, "released", ticket.model, slot.name, ticket.id, size, cause=cause))
        if self._fair and slot.state == "ready":
            self._fill_places(ticket.model, now)
        if routed and not slot.holders and slot.state == "ready":
            self._take_back(slot, now)
        if ticket.model in self._unkept and self.unload_when_idle(ticket.model, now):
            return True
        deferred, leases = self.deferred, len(slot.holders)
        asked = deferred is not None and (leases < deferred[1].leases or now >= self._plans_hold_until)
        if leases:
            return asked
        return asked or slot.state == "draining" or slot.backend.ttl is not None

    def _note_use(self, slot: Slot, ticket: Ticket, seconds: float, now: float) -> None:
        demand, slot.last_used = self._demand[ticket.model], now
        if ticket.work.infer_type != "prefill":
            demand.served(seconds)
        if not slot.holders and ticket.model not in self._routed:
            demand.idle(now)

    def give_up(self, ticket: Ticket, now: float, error: MuxError | None = None) -> None:
        """A waiting request ended by itself: its client left, or ``error`` says why it fails."""
        queue = self.queues[ticket.model]
        if ticket not in queue:
            return
        self._plans_hold_until = -FOREVER
        del queue[ticket]
        if ticket.model in self._fair:
            self._fair[ticket.model].leave(ticket.sender, ticket)
        if error:
            self._fail(ticket, error, now)
        else:
            self._emit(Event(now, "gone", ticket.model, ticket=ticket.id, seconds=now - ticket.since))

    def fail_all(self, error: MuxError, now: float) -> None:
        """Every waiting request fails with ``error``."""
        for model in self.queues:
            self._fail_queue(model, error, now)

    def sever_all(self, now: float) -> tuple[Ticket, ...]:
        """The program ends and waits no longer for the requests that run; the caller cuts them."""
        cause = Cause("shutdown")
        return tuple(ticket for slot in self.slots.values() for ticket in self._sever(slot, now, cause))

    def unload_requested(self, model: str, now: float) -> bool:
        """Evict what serves ``model`` after its drain; False: there is nothing to evict.

        What is in standby already is stopped, and what is being loaded is so no more; who waits for that is
        told so.
        """
        slots = self._replicas[model]
        ready = [slot for slot in slots if slot.state == "ready"]
        given_up = self._give_up_load(model, now)
        for slot in ready:
            self._begin(None, [slot], now, UNLOADED)
        standby = [] if ready else [slot for slot in slots if self._may_be_stopped(slot)]
        for slot in standby:
            slot.next_level = "stop"
        return bool(ready or standby or given_up)

    def _give_up_load(self, model: str, now: float) -> bool:
        """Ends what is to make ``model`` resident, and the wait for that; False if there is neither."""
        swaps = [swap for swap in self._swaps if swap.target and swap.target.model == model]
        for swap in swaps:
            if swap.target and swap.target.state in LOADING:
                swap.cancel = UNLOADED
            else:
                self._call_off(swap, now)
        if self.is_ready(model):
            return bool(swaps)
        waits = bool(self.queues[model])
        text = f"{model} was unloaded by hand while this request waited for it. Send it again to load it."
        self._fail_queue(model, Cancelled(text), now)
        return bool(swaps) or waits

    def _call_off(self, swap: _Swap, now: float) -> None:
        """Its target is not to be loaded. Victims that are being stopped are waited for."""
        going = [victim for victim in swap.victims if victim.state == "evicting"]
        self._dissolve(swap, now)
        if going:
            self._swaps.append(_Swap(None, going, now, swap.cause, swap.severs, begun=True))

    def unload_when_idle(self, model: str, now: float) -> bool:
        """Evict what serves ``model`` once nobody uses it, unless it is asked for before; True: now.

        That is so of one that is being loaded too: who waits for it will use it.
        """
        self._unkept.discard(model)
        if not self.is_ready(model):
            loading = any(slot.state in LOADING for slot in self._replicas[model])
            idle = loading and not self.queues[model]
            return idle and self.unload_requested(model, now)
        if any(slot.holders for slot in self._replicas[model]):
            self._unkept.add(model)
            return False
        return self.unload_requested(model, now)

    def pin_requested(self, model: str, now: float, pinned: bool) -> None:
        """Whether ``model`` is kept, once it is resident, from being evicted for others."""
        slots = [s for s in self._replicas[model] if s.pinned != pinned and not s.leaving]
        if not slots:
            return
        self._plans_hold_until = -FOREVER
        self._host.changes += 1
        self._emit(Event(now, "pinned" if pinned else "unpinned", model))
        for slot in slots:
            slot.pinned = pinned
            if pinned:
                self._spare(slot, now)
        self._fail_refused(now)

    def _spare(self, slot: Slot, now: float) -> None:
        """Nobody evicts it for another model any more, although that has begun."""
        for swap in self._swaps:
            if swap.target and slot in swap.victims and slot.state == "draining":
                swap.victims.remove(slot)
                self._reprieve(slot, now)

    # Another configuration

    def retired(self, leaving: Mapping[str, Leaving], served: Set[str], now: float) -> None:
        """Backends are to go for good, each for a reason; queues of models that are not ``served`` end."""
        for slot in self.slots.values():
            slot.leaving = slot.leaving or leaving.get(slot.name, "")
            slot.pinned = slot.pinned and not slot.leaving
        for swap in tuple(self._swaps):
            if swap.target and swap.target.leaving and swap.target.state not in LOADING:
                self._dissolve(swap, now)
        for slot in self.slots.values():
            if slot.leaving and slot.state == "ready":
                self._begin_leaving(slot, now)
            elif slot.leaving and slot.state == "standby":
                slot.next_level = "stop"
        for model in [model for model in self.queues if model not in served]:
            self._fail_queue(model, UnknownModel(model, served), now)

    @property
    def leaving(self) -> list[Slot]:
        """Those that have not left yet."""
        return [slot for slot in self.slots.values() if slot.leaving and not _is_left(slot)]

    @property
    def is_outgrown(self) -> bool:
        """Whether a slot was left for good: another is to take this one's place."""
        return any(_is_left(slot) for slot in self.slots.values())

    def resumed(self, now: float) -> None:
        """It took the place of others: whoever may be served now is."""
        for model, queue in self.queues.items():
            if queue and self.is_ready(model):
                self._admit(model, now)
        self._fail_refused(now)

    # Facts from the engines

    def expected(self, name: str) -> None:
        """The backend may run already: until it is ``adopted`` or ``looked_at`` requests only wait."""
        self._unseen.add(name)

    def looked_at(self, name: str) -> None:
        """It is known now whether the backend ran: what was not adopted holds nothing (any more)."""
        self._unseen.discard(name)

    @property
    def unseen(self) -> set[str]:
        """The backends of which it is not known yet whether they run."""
        return self._unseen

    def adopt(self, name: str, now: float) -> bool:
        """The backend ran before we did; False if it cannot stay beside those already adopted."""
        slot = self.slots[name]
        if any(amount > 0 for amount in self._placement.missing(slot).values()):
            return False
        self._enter(slot, "adopt", now)
        self._unseen.discard(name)
        slot.last_used = now  # how long it has been resident, nobody knows
        self._emit(Event(now, "ready", slot.model, name, cause=ADOPTED))
        if self.queues[slot.model]:
            self._admit(slot.model, now)
        if slot.pinned:
            self._fail_refused(now)
        return True

    def adopt_standby(
        self, name: str, now: float, how: str, residual: Mapping[str, int], host_bytes: int = 0
    ) -> bool:
        """The backend is in standby at ``how`` since before us; False if what it keeps has no room."""
        slot = self.slots[name]
        if self._placement.crowds(residual):
            return False
        self._enter(slot, "adopt_standby", now)
        self._unseen.discard(name)
        slot.level, slot.residual, slot.host_bytes = how, dict(residual), host_bytes
        if how in PINS:
            slot.ram = max(slot.ram, host_bytes)
        self._emit(Event(now, "standby", slot.model, name, way=how))
        return True

    def loaded(self, name: str, now: float, how: str = "stop") -> None:
        """The backend answers, brought back by the way ``how``; its whole queue is leased."""
        slot = self.slots[name]
        begun = slot.since
        wanted = bool(self.queues[slot.model])
        unwanted = any(s.cancel == UNLOADED for s in self._swaps if s.target is slot)
        self._enter(slot, "loaded", now)
        slot.loaded, slot.load_seconds = now, now - begun
        slot.failed_starts, slot.failed_stops, slot.error, slot.log = 0, 0, "", ()
        slot.level = "stop"
        if how == "stop":
            slot.ram = slot.backend.ram or 0
        self._learn(slot, how)
        self._end_swap_to(slot)
        self._emit(Event(now, "ready", slot.model, name, seconds=slot.load_seconds, way=how))
        if slot.leaving:
            self._begin_leaving(slot, now)
            return
        self._admit(slot.model, now)
        if unwanted:  # it was unloaded a moment too late to be cancelled
            self._begin(None, [slot], now, UNLOADED)
        elif wanted:
            slot.next_level = ""
        elif slot.next_level:
            self._begin(None, [slot], now, Cause("wake_to_demote", way=slot.next_level), severs=Cause("idle"))
        if slot.state == "ready" and slot.model in self._routed and not self.queues[slot.model]:
            self._take_back(slot, now)
        if slot.pinned:
            self._fail_refused(now)  # what does not fit beside it

    def load_failed(self, name: str, now: float, error: LoadError) -> None:
        """The backend did not become ready and was cleaned up."""
        slot = self.slots[name]
        if slot.state == "cancelling":  # who knows whether it would have failed
            self.load_cancelled(name, now)
            return
        self._enter(slot, "load_failed", now)
        slot.failed_starts += 1
        slot.retry_at = now + cool_down(slot.failed_starts)
        slot.error, slot.log, slot.next_level = error.reason, error.log, ""
        self._end_swap_to(slot)
        cause = Cause("load_failed", detail=error.reason)
        self._emit(Event(now, "stopped", slot.model, name, cause=cause))
        self._fail_refused(now)

    def load_cancelled(self, name: str, now: float) -> None:
        """The load of the backend ended before its time, and all that it had begun was stopped."""
        slot = self.slots[name]
        self._enter(slot, "cancelled", now)
        slot.next_level = ""
        self._end_swap_to(slot)
        self._emit(Event(now, "stopped", slot.model, name))

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
        slot = self.slots[name]
        standby = how != "stop"
        cause = None
        if died and not slot.failed_stops:  # else it had been told to stop before, in vain
            cause = self._judged(slot, now, died)
        if not slot.failed_stops:  # else an earlier attempt freed some of it
            gave_up = (freed or {}) if slot.state == "evicting" else {}  # who is demoted held less than all
            self._footprints.learn(name, how, gave_up, residual or {}, host_bytes if standby else 0)
            self._placement.measure(slot, self._footprints.held(name))
        self._enter(slot, "standby" if standby else "stopped", now)
        slot.level, slot.next_level = how, "stop" if slot.leaving else ""
        slot.residual = dict(residual or {}) if standby else {}
        slot.host_bytes = host_bytes if standby else 0
        if how in PINS:
            slot.ram = max(slot.ram, host_bytes)
        self._unstick(slot, now)
        self._leave_swaps(slot)
        if cause:
            slot.error, slot.log = ending(cause), tuple(log)
        self._emit(Event(now, slot.state, slot.model, name, cause=cause, way=how if standby else ""))
        if standby or slot.failed_starts:  # else nothing is refused that was not before
            self._fail_refused(now)

    def evict_failed(self, name: str, now: float, why: str) -> None:
        """The backend may still hold its GPUs; nothing is started there until a later stop succeeds.

        One that was in standby holds what it held, and stays so.
        """
        slot = self.slots[name]
        slot.failed_starts += slot.state == "loading"
        self._enter(slot, "evict_failed", now)
        slot.failed_stops += 1
        slot.retry_at = now + _pause(STUCK_RETRY_SECONDS, slot.failed_stops, MAX_STUCK_RETRY_SECONDS)
        slot.error, slot.next_level = why, ""
        if slot.state == "standby":
            slot.next_level = "stop"
        way, cause = slot.level if slot.state == "standby" else "", Cause("evict_failed", detail=why)
        self._emit(Event(now, slot.state, slot.model, name, cause=cause, way=way))
        for swap in [s for s in self._swaps if s.target is slot or slot in s.victims]:
            self._dissolve(swap, now)
        self._fail_refused(now)

    def died(self, name: str, now: float, why: str, log: Iterable[str] = ()) -> None:
        """The backend ended without being told to. Whoever loads or stops it reports that instead.

        ``log``: what its engine had printed last.
        """
        slot = self.slots[name]
        if (slot.state, "died") not in TRANSITIONS:
            return
        cause = self._judged(slot, now, why)
        why = ending(cause)
        self._enter(slot, "died", now)
        self._unstick(slot, now)
        self._leave_swaps(slot)
        slot.error, slot.residual, slot.level, slot.host_bytes, slot.next_level = why, {}, "stop", 0, ""
        slot.log = tuple(log)
        size, crash = len(slot.holders), Crash(name, why, slot.log)
        for ticket in slot.holders:
            ticket.crash = crash
        slot.holders.clear()
        self._emit(Event(now, "stopped", slot.model, name, size=size, cause=cause))
        if slot.failed_starts:
            self._fail_refused(now)

    def unanswering(self, name: str, now: float) -> None:
        """The engine of a backend answers nobody: it is stopped without a drain or standby."""
        slot = self.slots[name]
        if slot.state == "ready":
            slot.next_level = "stop"
            self._begin(None, [slot], now, Cause("silent"), 0.0)

    def _judged(self, slot: Slot, now: float, why: str) -> Cause:
        """How a backend ended, which counts as a failed start if it was too soon."""
        resident = slot.state in ("ready", "draining", "evicting")
        if not resident or slot.answered >= slot.loaded or now - slot.loaded > SOON_SECONDS:
            return Cause("died", detail=why)
        slot.crashes += 1
        slot.failed_starts = slot.crashes
        return Cause("died_early", seconds=now - slot.loaded, detail=why)

    def _leave_swaps(self, victim: Slot) -> None:
        for swap in self._swaps:
            if victim in swap.victims:
                swap.victims.remove(victim)
                swap.gone.append(victim.model)

    def memory_seen(self, held: Mapping[str, int]) -> bool:
        """Programs that are none of ours hold so many bytes, by GPU; whether that is news.

        Not believed while a backend comes or goes: its processes may be taken for somebody else's.
        """
        moving = any(slot.state in (*LOADING, "evicting", "demoting") for slot in self.slots.values())
        if moving or held == self._placement.others:
            return False
        self._placement.others = held
        self._plans_hold_until = -FOREVER
        return True

    def _unstick(self, slot: Slot, now: float) -> None:
        """It left its GPUs; a start that had failed cools down from now on."""
        slot.failed_stops = 0
        slot.retry_at = now + cool_down(slot.failed_starts)
        if not slot.failed_starts:
            slot.error = ""

    # The question

    def next_step(self, now: float) -> Step | Wait:
        """What is to be done now. Each ``Start`` and ``Stop`` is handed out once."""
        if self._unseen:
            return Wait(FOREVER)
        while True:
            if now < self._plans_hold_until:
                if self._ask_policy(self._plans, now):
                    continue
                return self._wait(self._plans_hold_until, now)
            step = self._advance(now) if self._swaps else None
            step = step or self._retry_stuck(now) or self._demote_next(now)
            if step:
                return step
            waiting = self._waiting()
            if not (
                self._evict_idle(now)
                or self._begin_swap(waiting, now)
                or self._cancel_unwanted(waiting, now)
                or self._begin_preload(waiting, now)
            ):
                until = self._next_moment(waiting, now)
                if self._plans_can_hold():
                    self._plans_hold_until = until
                return self._wait(until, now)

    def _plans_can_hold(self) -> bool:
        """Whether leases that begin and end, and queues that grow, leave the plans as they are.

        Not where a drain or an idle time waits for a lease to end, or where there is a choice of victims.
        """
        if self._swaps or self._idlers or self._routed or not self._plans or self._host.budget is not None:
            return False
        return len(self._ready) < 2

    def _wait(self, until: float, now: float) -> Wait:
        return Wait(self._ask_again if now < self._ask_again < until else until)

    def _advance(self, now: float) -> Step | None:
        for swap in tuple(self._swaps):
            if swap.target and not (swap.begun or swap.preload or self.queues[swap.target.model]):
                self._dissolve(swap, now)
                continue
            if step := self._cancel(swap, now) or self._evict_next(swap, now):
                return step
            if swap.victims:
                continue
            if swap.target is None:
                self._end(swap)
            elif swap.target.state not in LOADING:
                if not self._has_room(swap, swap.target, now):
                    if step := self._evict_next(swap, now):
                        return step
                elif self._host.has_room(swap.target):  # else a sleeper yields first
                    swap.begun = True
                    swap.evict_seconds = max(now - swap.emptied, 0.0)
                    swap.how = swap.target.level
                    return self._start(swap.target, now, swap.cause)
        return None

    def _cancel(self, swap: _Swap, now: float) -> Cancel | None:
        """Ends a load that is to be cancelled, unless it was asked for again meanwhile."""
        slot = swap.target
        if not (swap.cancel and slot and slot.state == "loading"):
            return None
        if self.queues[slot.model]:
            swap.cancel = None
            return None
        self._enter(slot, "cancel", now)
        cause = swap.cancel
        self._emit(Event(now, "cancelling", slot.model, slot.name, cause=cause, target=cause.model))
        return Cancel(slot.name)

    def _evict_next(self, swap: _Swap, now: float) -> Step | None:
        """The next victim, once its leases are gone or its drain is over; those in standby come last."""
        draining = [victim for victim in swap.victims if victim.state == "draining"]
        if draining and swap.target and self._may_spare(swap.target) and self._fits(swap.target):
            for victim in draining:  # those before them freed more than was known
                swap.victims.remove(victim)
                self._reprieve(victim, now)
            return None
        for victim in draining:
            if now >= swap.until or not (victim.holders or self._host.makes_way(victim, now)):
                swap.begun = True
                swap.emptied = now
                return self._stop(victim, now, swap.cause, swap)
        if draining or swap.target is None:
            return None
        for victim in [victim for victim in swap.victims if victim.state == "standby"]:
            if not self._fits(swap.target):
                swap.begun = True
                return self._demote(victim, now, Cause("memory_needed"), swap.target.model)
            swap.victims.remove(victim)
        return None

    def _may_spare(self, target: Slot) -> bool:
        """Whoever takes its GPUs whole needs all of its victims to go."""
        return not target.whole or self._host.budget is not None

    def _fits(self, target: Slot) -> bool:
        return self._placement.fits(target) and self._host.short(target) <= 0

    def _has_room(self, swap: _Swap, target: Slot, now: float) -> bool:
        """Whether the target fits now that its victims are gone; if not, others must go as well."""
        if self._fits(target):
            return True
        more = None if swap.preload else self._victims(target, self._busy(swap), frozenset(), now)
        if more is None:
            self._dissolve(swap, now)
        else:
            swap.until = now + self._config.drain_timeout
            swap.victims += more
            self._drain(swap, more, now, self._config.drain_timeout)
        return False

    def _retry_stuck(self, now: float) -> Step | None:
        for slot in self.slots.values():
            if now < slot.retry_at:
                continue
            if slot.state == "stuck":
                return self._stop(slot, now, Cause("retry_stuck"))
            if slot.next_level == "stop" and self._may_be_stopped(slot):
                why = Cause(slot.leaving) if slot.leaving else UNLOADED
                return self._demote(slot, now, Cause("retry_stuck") if slot.failed_stops else why)
        return None

    def _may_be_stopped(self, slot: Slot) -> bool:
        """Whether it is in standby and nobody waits for it as it is."""
        wanted = self.queues[slot.model] and not slot.leaving
        return slot.state == "standby" and not slot.coming and not wanted

    def _demote_next(self, now: float) -> Step | None:
        """Demote a backend that has been at its level for too long, or whose host memory is needed."""
        slot = self._host.yields(now) if self._host.budget is not None else None
        if slot is not None and slot is self.slots.get(slot.name):
            return self._demote(slot, now, Cause("host_memory_short"), to=self._host.lower(slot))
        for slot in self._sleepers:
            until = demoted_at(slot)
            if until is None or until > now or slot.coming or self.queues[slot.model]:
                continue
            if DESCENTS.get((slot.level, to := below(slot, may_wake=self._is_calm(slot)))):
                slot.next_level = to
                self._begin(slot, [], now, Cause("wake_to_demote", way=to), preload=True)
                return self._advance(now)
            return self._demote(slot, now, Cause("demote_timer", way=slot.level, seconds=now - slot.since))
        return None

    def _begin_preload(self, waiting: list[Ticket], now: float) -> bool:
        """Begins to load the next backend that is to be prepared, if nothing else is to be done.

        Nobody who has had work is evicted for that, and none in standby is stopped.
        """
        while self._preloads and not waiting and not self._swaps:
            slot = self._preloads[0]
            victims = self._victims(slot, set(), frozenset(), now)
            failed = slot.state != "stopped" or slot.retry_at > now or victims is None
            if failed or any(v.state == "standby" or _has_had_work(v) for v in victims or ()):
                self._preloads.pop(0)
            elif any(_stays_until(victim) > now for victim in victims or ()):
                return False
            elif victims:
                for victim in victims:
                    cause, severs = Cause("make_room", slot.model), Cause("evicted", slot.model)
                    self._begin(None, [victim], now, cause, severs=severs)
                return True
            else:
                self._preloads.pop(0)
                if self._host.has_room(slot):
                    lacked = self.is_ready(slot.model) and slot in self._routed[slot.model].lacking(now)
                    self._begin(slot, [], now, Cause("missing_stage" if lacked else "preload"), preload=True)
                    return True
        return False

    def _complete(self, model: str, now: float) -> bool:
        """Has the stages prepared that a model in use lacks; whether there are any."""
        found = self._routed[model].lacking(now) if model in self._routed else []
        lacking = [slot for slot in found if slot not in self._preloads]
        if lacking:
            self._preloads += lacking
            self._plans_hold_until = -FOREVER
        return bool(lacking)

    def _is_calm(self, slot: Slot) -> bool:
        """Whether nobody has or wants the GPUs of a backend in standby, or the host's memory that it runs
        in.
        """
        return not self._swaps and not self._waiting() and self._fits(slot) and self._host.has_room(slot)

    def _evict_idle(self, now: float) -> bool:
        idle = [slot for slot in self._idlers if idle_until(slot) <= now < FOREVER]
        for slot in idle:
            self._begin(None, [slot], now, Cause("idle", seconds=slot.backend.ttl or 0.0))
        for slot in self._ready if self._host.budget is not None else ():
            if model := self._host.answer(slot, now):
                cause, severs = Cause("host_memory_needed", model), Cause("evicted", model)
                self._begin(None, [slot], now, cause, severs=severs)
                return True
        return bool(idle)

    def _start(self, slot: Slot, now: float, cause: Cause) -> Start:
        self._enter(slot, "load", now)
        how, slot.level, slot.residual, slot.host_bytes = slot.level, "stop", {}, 0
        if slot.next_level == "stop":  # it was to be stopped, and is wanted after all
            slot.next_level = ""
        self._emit(Event(now, "loading", slot.model, slot.name, cause=cause, way=how))
        return Start(slot.name, how)

    def _demote(self, slot: Slot, now: float, cause: Cause, target: str = "", to: str = "") -> Demote:
        to = "stop" if slot.next_level == "stop" else to or below(slot, may_wake=False)
        self._enter(slot, "demote", now)
        slot.next_level = to
        self._emit(Event(now, "demoting", slot.model, slot.name, 0, 0, 0.0, cause, target, to))
        return Demote(slot.name, slot.level, to)

    def _stop(self, slot: Slot, now: float, cause: Cause, swap: _Swap | None = None) -> Stop:
        """``swap``: whose victim it is; one that is stuck is nobody's, and has no leases."""
        drained = now - slot.since if slot.state == "draining" else 0.0
        for_good = slot.state == "stuck" or slot.leaving
        how = "stop" if for_good else slot.next_level or self._level(slot, swap.target if swap else None)
        if not (for_good or slot.next_level) and how != slot.backend.evict_to[0]:
            cause = Cause("standby_full", way=slot.backend.evict_to[0])
        self._enter(slot, "evict", now)
        slot.next_level = how
        severed = self._sever(slot, now, swap.severs, drained) if swap else ()
        self._emit(Event(now, "evicting", slot.model, slot.name, 0, len(severed), drained, cause))
        return Stop(slot.name, how, severed)

    def _level(self, slot: Slot, target: Slot | None) -> str:
        """As high as the host has room, but not where it kept too much beside ``target`` the last time."""
        ways = levels(slot.backend)
        for way in ways[ways.index(self._host.level_for(slot)) :]:
            last = self._footprints.resting(slot.name, way)
            if not (target and last and self._placement.excludes(last.residual, target)):
                return way
        return "stop"

    def _sever(self, slot: Slot, now: float, cause: Cause, drained: float = 0.0) -> tuple[Ticket, ...]:
        severed, target = tuple(slot.holders), cause.model
        for ticket in severed:
            ticket.severed = Severance(cause, drained)
            self._emit(Event(now, "severed", ticket.model, slot.name, ticket.id, 1, drained, cause, target))
        slot.holders.clear()
        return severed

    def _next_moment(self, waiting: list[Ticket], now: float) -> float:
        """When the answer of ``next_step`` may change without a new fact, whatever the policy says."""
        moments = [self._overdue_at(first) for first in waiting]
        for slot in self._idlers:
            moments.append(idle_until(slot))
        for slot in self._stayers if waiting or self._preloads else ():
            moments.append(_stays_until(slot))
        moments += [until for slot in self._sleepers if (until := demoted_at(slot)) is not None]
        for swap in self._swaps:
            if any(victim.state == "draining" for victim in swap.victims):
                moments.append(swap.until)
        for slot in self.slots.values():
            if slot.retry_at > now and (slot.state in ("stuck", "standby") or self.queues[slot.model]):
                moments.append(slot.retry_at)
        return min([moment for moment in moments if moment > now], default=FOREVER)

    # Beginning and ending a swap

    def _begin_swap(self, waiting: list[Ticket], now: float) -> bool:
        """Begins at most one swap: that of the oldest overdue queue, else what the policy proposes."""
        busy = self._busy()
        if self._serve_overdue(waiting, busy, now):
            return True
        staying = {slot.name for slot in self._stayers if _stays_until(slot) > now}
        plans: dict[str, _Plan] = {}
        held = []
        for first in waiting:
            if plan := self._plan(first.model, busy, now, staying):
                plans[first.model] = plan
            elif staying and (plan := self._plan(first.model, busy, now)):
                held.append((first, plan[1]))
        self._plans = plans
        if self._ask_policy(plans, now):
            return True
        if held and not plans:
            self._tell_of_stay(*held[0], now)
        return False

    def _serve_overdue(self, waiting: list[Ticket], busy: set[str], now: float) -> bool:
        """Ends the wait of the oldest overdue queue; the GPUs of those that must wait on become ``busy``."""
        for first in waiting:
            if self._overdue_at(first) > now:
                continue
            if plan := self._plan(first.model, busy, now):
                self._begin(plan.target, plan.victims, now, Cause("overdue"))
                return True
            if error := self._lack_of_memory(first.model, busy, now):
                self._fail_queue(first.model, error, now)
                return True
            for slot in self._loadable(first.model, now):
                busy.update(slot.holds)
        return False

    def _cancel_unwanted(self, waiting: list[Ticket], now: float) -> bool:
        """Has loads cancelled that nobody waits for any more, if a queue could have their GPUs then."""
        unwanted = [swap for swap in self._swaps if self._is_unwanted(swap)] if waiting else []
        if not unwanted:
            return False
        loads = [swap.target for swap in unwanted if swap.target]
        busy = {gpu for swap in self._swaps if swap not in unwanted for gpu in swap.gpus()}
        stays = {slot.name for slot in self._stayers if _stays_until(slot) > now}
        for first in waiting:
            staying = stays if self._overdue_at(first) > now else frozenset()
            for slot in () if first.model in self._plans else self._loadable(first.model, now):
                there = [s for s in unwanted if s.target and s.target.holds.keys() & slot.holds.keys()]
                if there and self._victims(slot, busy, staying, now, loads) is not None:
                    for swap in there:
                        swap.cancel = Cause("unwanted", first.model)
                    return True
        return False

    def _is_unwanted(self, swap: _Swap) -> bool:
        """Whether it loads what nobody waits for any more."""
        slot = swap.target
        if slot is None or slot.state != "loading" or swap.preload or swap.cancel:
            return False
        return not (slot.pinned or self.queues[slot.model])

    def _tell_of_stay(self, first: Ticket, victims: list[Slot], now: float) -> None:
        """The queue of ``first`` waits because those in its way may stay."""
        stays = {slot.name: until for slot in victims if (until := _stays_until(slot)) > now}
        until = min(max(stays.values()), self._overdue_at(first))
        self._defer(first.model, Stay(until, Cause("min_residency", residents=tuple(stays))), now)

    def _waiting(self) -> list[Ticket]:
        """The first of each queue that waits for a load which no swap under way will end, oldest first."""
        coming = self._coming()
        firsts = [next(iter(queue)) for model, queue in self.queues.items() if queue and model not in coming]
        if self._fair:
            firsts = [first for first in firsts if not self.is_ready(first.model)]
        return sorted(firsts, key=_AGE) if len(firsts) > 1 else firsts

    def _overdue_at(self, first: Ticket) -> float:
        """When the queue that ``first`` is the first of is overdue."""
        return max(first.since, self._left.get(first.model, first.since)) + self._bounds[first.model]

    def _coming(self) -> tuple[str, ...]:
        """Models that a swap under way will make resident."""
        return tuple([swap.target.model for swap in self._swaps if swap.target])

    def _plan(self, model: str, busy: set[str], now: float, staying: Set[str] = frozenset()) -> _Plan | None:
        """The replica that is loaded at the cost of the fewest victims, or None while none can be."""
        best: tuple[Slot, list[Slot]] | None = None
        for slot in self._loadable(model, now):
            victims = self._victims(slot, busy, staying, now)
            if victims is not None and (best is None or len(victims) < len(best[1])):
                best = slot, victims
        if best is None:
            return None
        evicts = tuple([victim.model for victim in best[1]])
        target, source = best[0], source_of(evicts)
        return _Plan(*best, evicts, source, self._cost(source, target, target.level))

    def _victims(
        self, target: Slot, busy: set[str], staying: Set[str], now: float, without: Sequence[Slot] = ()
    ) -> list[Slot] | None:
        """Who must go so that there is room on the GPUs and in the host's memory.

        Those that it is to be ``without`` are as good as gone.
        """
        loss = partial(self._loss, now)
        victims = self._placement.victims(target, busy, staying, loss, without)
        if victims is None or (short := self._host.short(target, [*victims, *without])) <= 0:
            return victims
        more = self._placement.sparing_host(short, victims, busy, staying, loss)
        return None if more is None else victims + more

    def _busy(self, but: _Swap | None = None) -> set[str]:
        """The GPUs that are in some swap."""
        return {gpu for swap in self._swaps if swap is not but for gpu in swap.gpus()}

    def _loadable(self, model: str, now: float) -> list[Slot]:
        slots = [slot for slot in self._replicas[model] if not slot.leaving]
        return [s for s in slots if s.state == "standby" or (s.state == "stopped" and s.retry_at <= now)]

    def _ask_policy(self, plans: Mapping[str, _Plan], now: float) -> bool:
        self.deferred, self._ask_again = None, FOREVER
        if not plans and not self._ready:
            return False  # nothing to be loaded, nothing to be evicted
        spills = {} if plans else self._spills(now)
        decision = self._decide(self.snapshot(now, plans, spills))
        if isinstance(decision, Stay):
            self._ask_again = min(decision.until, decision.again)
            if plans:
                self._defer(next(iter(plans)), decision, now)
                self._ask_again = min(self._ask_again, self._announced[1])
        elif isinstance(decision, SwapTo) and decision.model in plans:
            plan = plans[decision.model]
            self._begin(plan.target, plan.victims, now, decision.cause)
            return True
        elif isinstance(decision, SwapTo) and decision.model in spills:
            plan = spills[decision.model][0]
            self._begin(plan.target, plan.victims, now, decision.cause, preload=True)
            return True
        elif isinstance(decision, Unload) and decision.model in self._replicas:
            slots = [s for s in self._replicas[decision.model] if s.state == "ready" and not s.pinned]
            for slot in slots:
                self._begin(None, [slot], now, decision.cause, severs=POLICY)
            return bool(slots)
        return False

    def _spills(self, now: float) -> dict[str, tuple[_Plan, Spill]]:
        """Busy models of which another replica could be loaded, unless anybody waits for a load."""
        if not self._routed or any(queue and not self.is_ready(m) for m, queue in self.queues.items()):
            return {}
        found = {}
        for model in self._routed:
            if spill := self._spill(model, now):
                found[model] = spill
        return found

    def _spill(self, model: str, now: float) -> tuple[_Plan, Spill] | None:
        loadable = self._loadable(model, now)
        if not loadable or model in self._coming():
            return None
        behind = [
            now - slot.holders[ticket]
            for slot in self._replicas[model]
            if slot.state == "ready"
            for ticket in self._routed[model].in_flight.waiting(slot.name)[1:]
        ]
        behind += [now - each.since for each in self.queues[model] if not self._needed(each.work.owner)]
        if not behind:
            return None
        used = {slot.name for slot in self.slots.values() if slot.holders or slot.model == model}
        staying = used | {slot.name for slot in self._stayers if _stays_until(slot) > now}
        plan = self._plan(model, self._busy(), now, staying)
        if plan is None:
            return None
        cost = plan.cost
        reload = sum(
            [self._cost("", victim, victim.backend.evict_to[0]).load_seconds for victim in plan.victims]
        )
        spill = Spill(
            model,
            plan.target.name,
            len(behind),
            sum(behind),
            plan.evicts,
            cost.evict_seconds,
            cost.load_seconds,
            reload,
        )
        return plan, spill

    def _decide(self, seen: Snapshot) -> Decision:
        try:
            decision = decide(self._policy, seen)
            if not is_cause(decision.cause):
                raise TypeError(f"its cause is {decision.cause!r}, and no Cause")
            return decision
        except Exception as error:  # anybody's code; max_wait serves every queue all the same
            return Stay(cause=Cause("policy_failed", detail=repr(error)))

    def _defer(self, model: str, stay: Stay, now: float) -> None:
        """The swap is held back: announced once for each queue, and again when the moment has passed."""
        self.deferred = model, stay
        first = next(iter(self.queues[model]))
        if first is not self._announced[0] or now >= self._announced[1]:
            self._announced = first, max(stay.until, now + SHORTEST_DEFERRAL)
            size = len(self.queues[model])
            self._emit(Event(now, "deferred", model, "", first.id, size, stay.until - now, stay.cause))

    def _begin(
        self,
        target: Slot | None,
        victims: list[Slot],
        now: float,
        cause: Cause,
        drain_timeout: float | None = None,
        *,
        preload: bool = False,
        severs: Cause | None = None,
    ) -> None:
        """``severs``: why requests are severed, where that is neither for the target nor for ``cause``."""
        if severs is None:
            severs = Cause("evicted", target.model) if target else cause
        self._plans_hold_until = -FOREVER
        drain = self._config.drain_timeout if drain_timeout is None else drain_timeout
        swap = _Swap(target, [*victims], now + drain, cause, severs, preload=preload)
        self._swaps.append(swap)
        if target:
            target.coming = True
            self._host.changes += 1
        self._drain(swap, victims, now, drain)

    def _begin_leaving(self, slot: Slot, now: float, drain_timeout: float | None = None) -> None:
        """It goes for good, once its leases have ended."""
        assert slot.leaving
        self._begin(None, [slot], now, Cause(slot.leaving), drain_timeout)

    def _drain(self, swap: _Swap, victims: list[Slot], now: float, drain: float) -> None:
        """Closes the gates of the victims that are resident."""
        model = swap.target.model if swap.target else ""
        for victim in victims:
            if victim.state == "ready":
                self._enter(victim, "drain", now)
                size, cause = len(victim.holders), swap.cause
                self._emit(Event(now, "draining", victim.model, victim.name, 0, size, drain, cause, model))

    def _dissolve(self, swap: _Swap, now: float) -> None:
        """Ends a swap before its target was started; victims that only drained stay resident."""
        self._end(swap)
        if swap.target:
            swap.target.next_level = ""
        for victim in swap.victims:
            if victim.state == "draining":
                self._reprieve(victim, now)

    def _end(self, swap: _Swap) -> None:
        self._plans_hold_until = -FOREVER
        self._swaps.remove(swap)
        if swap.target:
            swap.target.coming = False
            self._host.changes += 1

    def _reprieve(self, victim: Slot, now: float) -> None:
        if victim.leaving:
            left = victim.since + self._config.drain_timeout - now
            self._begin_leaving(victim, now, max(left, 0.0))
            return
        self._enter(victim, "reprieve", now)
        self._emit(Event(now, "ready", victim.model, victim.name, cause=Cause("reprieved")))
        self._admit(victim.model, now)

    def _learn(self, target: Slot, how: str) -> None:
        for swap in self._swaps:
            if swap.target is target:
                source = source_of(swap.gone)
                seconds = target.load_seconds or 0.0
                self._costs.learn(source, target.model, how, swap.evict_seconds, seconds)

    def _end_swap_to(self, slot: Slot) -> None:
        for swap in [swap for swap in self._swaps if swap.target is slot]:
            self._end(swap)

    # Ends of tickets

    def _route(self, ready: list[Slot], ticket: Ticket, now: float) -> Slot | None:
        """Whom it is sent to; None: the policy lets none of them take it."""
        if ticket.model not in self._routed or not ticket.leases:
            return ready[0]
        slot, prefill = self._routed[ticket.model].route(ready, ticket, now)
        if prefill:
            assert ticket.prefill is not None
            self._lease(prefill, ticket.prefill, now)
        return slot

    def explain(self, model: str, work: Work, now: float, *, staged: bool) -> dict[str, list[dict[str, Any]]]:
        """Stage -> what would be made of each replica, were this request to come now; nothing is changed."""
        return self._routed[model].explain(work, now, staged=staged)

    def _lease(self, slot: Slot, ticket: Ticket, now: float) -> None:
        ticket.backend = slot.name
        self._unkept.discard(ticket.model)
        if ticket.leases:
            slot.holders[ticket] = now
            slot.last_used = now
        if self._emit_leases:
            size, waited = len(slot.holders), now - ticket.since
            cause = Cause("routed", detail=ticket.choice.why) if ticket.choice else None
            self._emit(Event(now, "leased", ticket.model, slot.name, ticket.id, size, waited, cause))

    def _admit(self, model: str, now: float) -> None:
        ready = self._ready_of[model]
        queue = self.queues[model]
        if queue:
            self._demand[model].admitted(len(queue), now - next(iter(queue)).since)
            self._complete(model, now)
        if model in self._fair:
            for ticket in [ticket for ticket in queue if not ticket.leases]:
                self._admit_one(ticket, ready, now)
            self._fill_places(model, now)
            return
        for ticket in queue:
            if slot := self._route(ready, ticket, now):
                self._lease(slot, ticket, now)
            else:
                self._fail(ticket, nobody_takes(model), now)
        self.settled += queue
        queue.clear()

    def _fill_places(self, model: str, now: float) -> None:
        """As many of a queue as there are places at the backends that are ready."""
        queue = self.queues[model]
        while queue and self.takes(model):
            ticket = self._fair[model].take(lambda ticket: self.takes(model, ticket.work.owner))
            if ticket is None:
                return
            places = [slot for slot in self._ready_of[model] if not slot.full]
            self._admit_one(ticket, places, now)

    def _admit_one(self, ticket: Ticket, ready: list[Slot], now: float) -> None:
        if slot := self._route(ready, ticket, now):
            self._lease(slot, ticket, now)
        else:
            self._fail(ticket, nobody_takes(ticket.model), now)
        del self.queues[ticket.model][ticket]
        self.settled.append(ticket)

    def _take_back(self, idle: Slot, now: float) -> None:
        """Requests that wait behind others, and would be better off at ``idle``, are sent anew."""
        self._send_anew(self._routed[idle.model].take_back(idle), Cause("moved", backend=idle.name), now)

    def _send_anew(self, found: Iterable[tuple[Ticket, Slot]], cause: Cause, now: float) -> None:
        for ticket, slot in found:
            del slot.holders[ticket]
            ticket.severed = Severance(cause)
            self.taken_back.append(ticket)
            if self._emit_leases:
                size = len(slot.holders)
                self._emit(Event(now, "released", ticket.model, slot.name, ticket.id, size, cause=cause))

    def _fail(self, ticket: Ticket, error: MuxError, now: float) -> None:
        ticket.error = error
        waited = now - ticket.since
        cause = Cause("error", detail=error.code)
        self._emit(Event(now, "failed", ticket.model, "", ticket.id, 0, waited, cause))

    def _fail_queue(self, model: str, error: MuxError, now: float) -> None:
        self._plans_hold_until = -FOREVER
        queue = self.queues[model]
        for ticket in queue:
            self._fail(ticket, error, now)
        if model in self._fair:
            self._fair[model].clear()
        self.settled += queue
        queue.clear()

    def _fail_refused(self, now: float) -> None:
        """Fails the queues that nobody can serve any more."""
        for model, queue in self.queues.items():
            error = self._refusal(model, now) if queue else None
            if error:
                self._fail_queue(model, error, now)

    def _refusal(self, model: str, now: float) -> MuxError | None:
        """Why no backend of ``model`` can be loaded; None if one can, or is loading or being evicted."""
        first: MuxError | None = None
        for slot in self._replicas[model]:
            error = self._obstacle(slot, now)
            if error is None:
                return None
            first = first or error
        return first

    def _obstacle(self, slot: Slot, now: float) -> MuxError | None:
        if slot.state not in ("stopped", "standby", "stuck") or (slot.leaving and slot.state != "stuck"):
            return None
        for other in self.slots.values():
            if self._is_stuck_before(other, slot):
                whose = "" if other is slot else f" and holds a GPU of {slot.model}"
                text = f"{other.name} could not be stopped{whose}: {other.error}"
                return Stuck(text, retry_after=other.retry_at - now)
        if slot.state == "stopped" and slot.retry_at > now:
            pause = slot.retry_at - now
            what = "ended" if slot.failed_starts == slot.crashes else "failed to load"
            text = f"{slot.name} {what} and is not tried again for {pause:.0f} s: {slot.error}"
            return LoadError(text, log=slot.log, retry_after=pause)
        why = self._placement.never_fits(slot) or self._host.never_fits(slot)
        return DoesNotFit(f"{slot.name} cannot be loaded: {why}.") if why else None

    def _is_stuck_before(self, other: Slot, slot: Slot) -> bool:
        """Whether ``slot`` cannot be loaded because ``other`` cannot be stopped."""
        if other.state == "standby":
            return other is not slot and self._placement.clings(other, slot)
        return other.state == "stuck" and (other is slot or bool(other.holds.keys() & slot.holds.keys()))

    def _lack_of_memory(self, model: str, busy: set[str], now: float) -> MuxError | None:
        """Why a queue that is overdue is not served: others than this GPU group's backends have the memory.

        None too where those will make room.
        """
        may_go = ("ready", "draining", "evicting")
        others = [slot for slot in self.slots.values() if slot.state in may_go and not slot.pinned]
        for slot in self._replicas[model]:
            if slot.state not in ("stopped", "standby") or not busy.isdisjoint(slot.holds):
                continue
            if lack := self._placement.others_before(slot):
                return GpuMemoryShort(f"{slot.name} cannot be loaded: {lack}.")
            short = self._host.short(slot, others)
            if short > 0 and not self._host.call(slot, short, self.slots.values(), now):
                who = ", ".join(f"{name} has {gib(each)}" for name, each in self._host.insisting(slot))
                return HostMemoryShort(f"{slot.name} lacks {gib(short)} of host memory: {who}.")
        return None

    # State

    def _enter(self, slot: Slot, what: str, now: float) -> None:
        """The only writer of a slot's state."""
        before = slot.state
        try:
            slot.state = TRANSITIONS[before, what]
        except KeyError:
            raise ValueError(f"{slot.name} is {before}: `{what}` cannot happen to it") from None
        slot.since = now
        if slot.state == "stopped":
            slot.ram = slot.backend.ram or 0  # what it had pinned is gone
        if before == "ready" and slot.model in self._fair:
            self._left[slot.model] = now
        if "ready" in (before, slot.state):
            self._ready = _those_ready(self.slots.values())
            self._ready_of[slot.model] = [each for each in self._ready if each.model == slot.model]
        self._plans_hold_until = -FOREVER
        self._host.changes += 1
        if before == "ready" and slot.model in self._fair:
            self._fill_places(slot.model, now)  # who needed just this one has nothing to wait for any more
        if slot.state not in ("ready", "draining") and slot.model in self._routed:
            self._routed[slot.model].in_flight.forget(slot.name)

    def snapshot(
        self,
        now: float,
        plans: Mapping[str, _Plan],
        spills: Mapping[str, tuple[_Plan, Spill]] = {},
    ) -> Snapshot:
        """What the policy may know; ``plans`` are the swaps that could begin now, oldest queue first."""
        residents = [self._resident(slot, now) for slot in self._ready]
        queues = [self._queue_seen(model, plan, now) for model, plan in plans.items()]
        if len(queues) > 1:
            queues.sort(key=lambda queue: -queue.priority)
        swaps = [_swapping(swap, swap.target) for swap in self._swaps if swap.target] if self._swaps else ()
        spilling = tuple([spill for _, spill in spills.values()]) if spills else ()
        return Snapshot(now, self.name, tuple(residents), tuple(queues), tuple(swaps), spilling)

    def _resident(self, slot: Slot, now: float) -> Resident:
        model, loaded, backend = slot.model, slot.loaded, slot.backend
        demand = self._demand[model]
        rate, growth = demand.rates(now)
        return Resident(
            model,
            slot.name,
            loaded,
            len(slot.holders),
            slot.last_used if slot.last_used > loaded else loaded,
            rate,
            growth,
            demand.pause_seconds,
            demand.service_seconds,
            self._costs.estimate("", model, backend.evict_to[0], backend.engine).load_seconds,
        )

    def _queue_seen(self, model: str, plan: _Plan, now: float) -> Queue:
        tickets, demand, cost = self.queues[model], self._demand[model], plan.cost
        oldest, newest = next(iter(tickets)), next(reversed(tickets))
        _, growth = demand.rates(now, len(tickets), now - oldest.since)
        return Queue(
            model,
            len(tickets),
            oldest.since,
            newest.since,
            plan.evicts,
            cost.evict_seconds,
            cost.load_seconds,
            cost.swaps > 0,
            growth,
            demand.service_seconds,
            self._bounds[model],
            self._priority[model],
        )

    def _loss(self, now: float, slot: Slot) -> float:
        """What putting it out costs: its arrivals per second, times the seconds of loading it again."""
        way = "stop" if slot.state == "standby" else slot.backend.evict_to[0]
        return self._demand[slot.model].rate(now) * self._cost("", slot, way).load_seconds

    def _worth(self, slot: Slot, now: float) -> tuple[bool, int, float, float]:
        """How much it deserves a light standby level: see standby.HostMemory."""
        cold = self._cost("", slot, "stop").load_seconds
        loss = self._demand[slot.model].rate(now) * cold
        return bool(self.queues[slot.model]), slot.backend.priority, loss, slot.used

    def _cost(self, source: str, target: Slot, how: str) -> Cost:
        return self._costs.estimate(source, target.model, how, target.backend.engine)

    def awaited(self, model: str, now: float) -> Awaited:
        """What a request for ``model`` would meet if it came now; changes nothing."""
        refusal = self._refusal(model, now)
        if refusal:
            return Awaited(refusal)
        for swap in self._swaps:
            if swap.target and swap.target.model == model and not swap.cancel:
                cost = self._cost_of(swap, swap.target)
                known = self._costs.knows(model, cost.way)
                return Awaited(None, swap.target, swap.victims, cost, known, until=swap.until)
        queue, ghost = self.queues[model], Ticket(0, model, now)
        if not queue:
            self._bounds[model] = self._bound(model, now)
            queue[ghost] = None  # the policy is asked as if it had come
        try:
            busy = self._busy()
            staying = {slot.name for slot in self._stayers if _stays_until(slot) > now}
            found = {first.model: self._plan(first.model, busy, now, staying) for first in self._waiting()}
            plans = {each: plan for each, plan in found.items() if plan}
            decision = self._decide(self.snapshot(now, plans)) if model in plans else None
            overdue_at = self._overdue_at(next(iter(queue)))
        finally:
            queue.pop(ghost, None)
        if model not in plans:
            return Awaited(overdue_at=overdue_at)
        plan = plans[model]
        cost = plan.cost
        known = self._costs.knows(model, plan.target.level)
        return Awaited(None, plan.target, plan.victims, cost, known, decision, overdue_at=overdue_at)

    def _cost_of(self, swap: _Swap, target: Slot) -> Cost:
        """Of a swap under way."""
        source = source_of((*swap.gone, *(victim.model for victim in swap.victims)))
        return self._cost(source, target, swap.how or target.level)

    def way_back(self, slot: Slot) -> str:
        """The way by which it is being loaded; "" if it is not."""
        return next((swap.how for swap in self._swaps if swap.target is slot), "")

    def expected_load(self, slot: Slot) -> float | None:
        """What its load under way will take; None if it was never loaded by that way."""
        for swap in self._swaps:
            if swap.target is slot and self._costs.knows(slot.model, swap.how):
                return self._cost_of(swap, slot).load_seconds
        return None

    def promises(self) -> dict[str, tuple[str, ...]]:
        """GPU -> the models that a swap under way keeps it for, until it is theirs."""
        kept: dict[str, tuple[str, ...]] = {}
        for swap in self._swaps:
            if swap.target and swap.target.state not in HOLDING:
                kept |= {gpu: (*kept.get(gpu, ()), swap.target.model) for gpu in swap.target.holds}
        return kept

    def drains(self) -> dict[str, tuple[str, float]]:
        """Draining backend -> (the model that it makes room for, or "", and when the drain ends)."""
        return {
            victim.name: (swap.target.model if swap.target else "", swap.until)
            for swap in self._swaps
            for victim in swap.victims
            if victim.state == "draining"
        }


def _by_model(slots: Mapping[str, Slot], coming: Mapping[str, str]) -> dict[str, list[Slot]]:
    found: dict[str, list[Slot]] = {}
    for slot in slots.values():
        for model in dict.fromkeys((slot.model, coming.get(slot.name, slot.model))):
            found.setdefault(model, []).append(slot)
    return found


def _those_ready(slots: Iterable[Slot]) -> list[Slot]:
    return [slot for slot in slots if slot.state == "ready"]


def _crashed(ticket: Ticket) -> Crashed:
    *_, last = ticket.crashes
    often = f"{len(ticket.crashes)} times engines ended under this request, which is not sent again"
    return Crashed(with_log(f"{often}: {last.backend} {last.why}.", last.log))


def _is_left(slot: Slot) -> bool:
    """It went for good, and holds nothing any more."""
    return bool(slot.leaving) and slot.state == "stopped"


def idle_until(slot: Slot) -> float:
    """When it is evicted because nobody uses it."""
    if slot.state != "ready" or slot.holders or slot.backend.ttl is None:
        return FOREVER
    return slot.used + slot.backend.ttl


def _has_had_work(slot: Slot) -> bool:
    """Since it was loaded."""
    return bool(slot.holders) or slot.last_used > slot.loaded


def _stays_until(slot: Slot) -> float:
    """Until when it is not evicted for a queue that is not overdue."""
    return slot.loaded + slot.backend.min_residency


def max_waits(slots: Iterable[Slot], config: Config) -> dict[str, float]:
    """Model -> seconds after which its queue is overdue at the latest: the shortest its replicas ask for."""
    limits: dict[str, float] = {}
    for slot in slots:
        own = config.max_wait if slot.backend.max_wait is None else slot.backend.max_wait
        limits[slot.model] = min(own, limits.get(slot.model, own))
    return limits


def _swapping(swap: _Swap, target: Slot) -> Swapping:
    moving = ("draining", "evicting", *LOADING)
    slots = [slot for slot in (*swap.victims, target) if slot.state in moving]
    state, since = (slots[0].state, slots[0].since) if slots else ("evicting", swap.emptied)
    return Swapping(target.model, (*swap.gone, *(victim.model for victim in swap.victims)), state, since)
