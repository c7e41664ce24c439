"""One island's state machine: facts in, next step out.

An island is a set of GPUs tied together by some backend that needs several of them, or by the replicas of one
model. A ``Residency`` is told facts (``request``, ``release``, ``loaded``, ``died``, ...) and asked one
question, ``next_step(now)``, until it answers ``Wait``. It performs nothing: whoever drives it (the
multiplexer's keepers, the simulator) performs the steps and reports how they ended. It has no lock, no clock
and no I/O; calls must not overlap.

Each backend of the island has one state; TRANSITIONS is the whole table and ``_enter`` its only writer:

    empty --load--> starting --started--> ready --swap--> draining --stop--> stopping --> empty | parked
                       |                    ^-----reprieve---'
                       '--cancel--> cancelling --> empty
    parked --demote--> demoting --> empty | parked

A ``_Swap`` ties a target to the victims that make room for it. Its GPUs are in no other swap until it ends.
After each eviction it is asked again who is in the way: nobody goes who need not.

What no line waits for is an errand: a load into free room that prepares a backend, or brings the stage
(prefill or decode) that a model in use lacks, or wakes one on its way to a deeper rest (ladder.py), or is
another replica of a busy model. It is begun only while no line waits.

Invariants:
 1. The GPUs a backend needs are its own from ``Start`` until its ``stopped``; the sum of what residents and
    parked residuals hold never exceeds a GPU. Without declared memory a backend needs the whole GPU.
 2. A lease is granted only in ready. Draining closes the gate; later requests queue behind the swap.
 3. Every ticket ends exactly once: leased, failed or gone.
 4. A drain lasts at most ``drain_timeout``; what is left is severed, counted, logged.
 5. When a model becomes ready its whole line, or as much of it as there are places, is leased before the
    policy is asked again; so is the next in line whenever a place becomes free.
 6. A swap nobody waits for is not begun, and while it only drains it is reprieved. One begun is finished,
    unless its load is cancelled: when it is unloaded by hand (who waits for it is told so), or when nobody
    waits for it any more and another queue needs its GPUs. Errands are cancelled by hand only.
    Who waits behind others at a busy replica waits for another one, if nobody on the island waits for a load.
    (So does the line of a model that is resident, which it has if its backends take only so many at once.)
 7. A line older than its bound is overdue: whatever the policy says, its swap begins as soon as its GPUs are
    in no other swap, oldest line first, and nobody younger takes those GPUs meanwhile. The bound is
    ``max_wait``, or less where a load would come too late for ``queue_timeout`` then; it is fixed when the
    line begins, and stands in its first ``queued``.
 8. A backend that failed to start is not tried before its cool-down ends; its requests fail at once. One that
    ended soon after it was loaded, before it had given one whole answer, counts as one that failed to start.
    Nobody is leased who was there when backends ended twice: the request may be what ends them.
 9. What can never fit, at all or beside what is pinned, is refused before anything is drained. What is
    pinned drains for no other model.
10. While it is not known of some backend whether it runs already (``expected``), nothing is begun.

A backend that the configuration has no longer, or not as it is (``retired``), is leaving: it gets no new
leases, is drained and stopped, whatever its ladder says, and its seat is left for good. Its line waits on for
whoever takes that seat; layout.py builds the residency that takes this one's place then.

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
from anvil_mux.routing.ledger import Load, Report, Said
from anvil_mux.routing.prefix import BYTES_PER_TOKEN
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.costs import NO_COST, Cost, Costs, source_of
from anvil_mux.scheduler.demand import Demand
from anvil_mux.scheduler.events import (
    DIED,
    ERRAND,
    LEAVES,
    NO_ANSWER,
    NO_ROOM,
    TRANSITIONS,
    Cause,
    Event,
    Leaving,
)
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.ladder import DESCENTS, PINS, Host, below, demoted_at, rungs
from anvil_mux.scheduler.placement import HOLDING, Placement, Seat
from anvil_mux.scheduler.policy import (
    FOREVER,
    Decision,
    Line,
    Policy,
    Resident,
    Snapshot,
    Spill,
    Stay,
    Swapping,
    SwapTo,
    Unload,
    decide,
)
from anvil_mux.scheduler.preemption import Preemption
from anvil_mux.scheduler.replicas import Replicas, nobody_takes
from anvil_mux.scheduler.steps import Cancel, Crash, Demote, Start, Step, Stop, Ticket, Wait
from anvil_mux.scheduler.turns import Turns

COOL_DOWN_SECONDS = 5.0
MAX_COOL_DOWN_SECONDS = 300.0
STUCK_RETRY_SECONDS = 5.0
MAX_STUCK_RETRY_SECONDS = 60.0
SHORTEST_DEFERRAL = 1.0
"""Seconds before which the moment of a swap that was put off is not announced again."""
FIRST_SERVICE_SECONDS = 10.0
"""What a lease is held for, of a model that has not answered yet."""
SOON_SECONDS = 30.0
"""After its load; who ends within that and has not given one whole answer counts as one that failed to load.

An engine that what it is asked crashes ends while it reads the first prompts, which takes seconds. One that
takes longer costs at most a load in so long, and each request no more than MOST_CRASHES of them.
"""
MOST_CRASHES = 2
"""So often backends end under one request, before that is refused."""
CUT_SHORT = "no whole answer"
"""Why a lease ended before its answer did."""
LOADING = ("loading", "cancelling")
"""States of a backend whose load is under way."""


@dataclass(eq=False, slots=True)
class _Swap:
    target: Seat | None
    victims: list[Seat]
    """Those that have not left yet."""
    until: float
    """End of the drain."""
    reason: str
    cause: Cause
    """Why a request is severed that outlasts the drain."""
    begun: bool = False
    """A victim was told to stop: no reprieve any more."""
    errand: bool = False
    """Nobody waits for the target."""
    emptied: float = FOREVER
    """When the last drain ended."""
    evict_seconds: float = 0.0
    """What putting the victims out took after that."""
    gone: list[str] = field(default_factory=list)
    """The models of those that have left."""
    how: str = ""
    """The way by which the target is brought back, once it is being loaded."""
    cancel: str = ""
    """Why the load of the target is to end before its time."""
    heir: str = ""
    """The model whose line needs its GPUs then; "": it is cancelled by hand."""

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

    target: Seat
    victims: list[Seat]
    evicts: tuple[str, ...]
    """The victims' models."""
    source: str
    """Their name in the costs."""
    cost: Cost


class Prospect(NamedTuple):
    """What a request would meet if it came now."""

    refusal: MuxError | None = None
    target: Seat | None = None
    """Who will serve it, if a swap is under way to that, or could begin now."""
    victims: Sequence[Seat] = ()
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


class Residency:
    """The state of one island. Every fact comes with the moment at which it became true."""

    def __init__(
        self,
        name: str,
        config: Config,
        backends: Iterable[Backend],
        policy: Policy,
        preemption: Preemption,
        emit: Callable[[Event], object],
        costs: Costs | None = None,
        host: Host | None = None,
        footprints: Footprints | None = None,
        *,
        emit_leases: bool = True,
        before: Sequence[Residency] = (),
        coming: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``before``: those whose place it takes, and which are told nothing any more.

        Backends that it has in common with them keep their seats, unless these were left for good.
        ``coming``: seat that is about to be left -> the model that it will be of then.
        """
        self.name = name
        kept = {name: seat for each in before for name, seat in each.seats.items() if not _is_left(seat)}
        self._placement = Placement(backends, config.gpus, preemption, kept)
        self.seats: dict[str, Seat] = self._placement.seats
        self._replicas = _by_model(self.seats, coming)
        self.lines: dict[str, dict[Ticket, None]] = {model: {} for model in self._replicas}
        self.settled: list[Ticket] = []
        """Tickets that ended after waiting in a line; whoever drives the residency takes and wakes them."""
        self.taken_back: list[Ticket] = []
        """Tickets that ended at a replica that had not begun with them; the driver takes and cuts them."""
        self.deferred: tuple[str, Stay] | None = None
        """The model whose swap the policy holds back, and until when and why."""
        self._plans: dict[str, _Plan] = {}
        """The swaps that the policy could begin when it was last asked."""
        self._ask_again, self._plans_hold_until = FOREVER, -FOREVER
        """When the policy is asked again; and until when the plans are the same, unless a state changes or a
        line begins or loses a request."""
        self._announced: tuple[Ticket | None, float] = None, FOREVER
        """The first of the queue whose swap was said to be put off, and when that has to be said again."""
        self._ready_of = {model: _those_ready(seats) for model, seats in self._replicas.items()}
        self._ready = _those_ready(self.seats.values())
        self._routed = {m: Replicas(seats, config) for m, seats in self._replicas.items() if len(seats) > 1}
        """Of models with several backends: whom a request is sent to."""
        self._swaps: list[_Swap] = []
        self._idlers = [seat for seat in self.seats.values() if seat.backend.ttl is not None]
        self._stayers = [seat for seat in self.seats.values() if seat.backend.min_residency]
        self._parkers = [seat for seat in self.seats.values() if seat.backend.rest != ("stop",)]
        self._turns = {s.model: Turns[Ticket]() for s in self.seats.values() if s.backend.concurrency}
        """Of models that may have a line while they are resident: who is next in it."""
        self._unseen = set[str]()  # backends that may run already: until that is known nothing is begun
        self._unkept: set[str] = set()
        """Models that go once nobody uses them, unless they are asked for again before."""
        self._left, self._bounds = dict[str, float](), dict[str, float]()
        """Of those: when a backend last ceased to be ready. Before that, no line waited for a load.
        And of each line: after how many seconds it is overdue."""
        new = [seat for seat in self.seats.values() if seat.backend.prepare and seat.name not in kept]
        self._unprepared: list[Seat] = new
        self._host = host or Host()
        self._footprints = footprints or Footprints()
        for seat in self.seats.values():
            self._host.join(seat, self._worth)
            self._placement.measure(seat, self._footprints.held(seat.name))
        self._demand = {model: Demand() for model in self.lines}
        self._max_wait = dict.fromkeys(self.lines, config.max_wait) | max_waits(self.seats.values(), config)
        self._priority = {m: max(s.backend.priority for s in seats) for m, seats in self._replicas.items()}
        self._costs = costs or Costs()
        self._config = config
        self._policy = policy
        self._emit = emit
        self._emit_leases = emit_leases
        """Whether anybody is interested in ``leased`` and ``released``; all other events are rarer."""
        for each in before:
            self._go_on_from(each)

    def _go_on_from(self, before: Residency) -> None:
        """What is under way goes on here, and who waits for a model that is served here waits on."""
        self.settled += before.settled
        self.taken_back += before.taken_back
        self._swaps += before._swaps
        self._unprepared += [each for each in before._unprepared if self.seats.get(each.name) is each]
        self._left |= before._left
        self._unseen |= before._unseen & self.seats.keys()
        self._unkept |= before._unkept & self.lines.keys()
        self._placement.strangers = {**self._placement.strangers, **before._placement.strangers}
        for model, line in before.lines.items():
            if model not in self.lines:
                continue
            self.lines[model], self._demand[model] = line, before._demand[model]
            if line:
                self._bounds[model] = min(before._bounds[model], self._max_wait[model])
            if model in self._routed and model in before._routed:
                self._routed[model].ledger.go_on_from(before._routed[model].ledger)
            for ticket in line if model in self._turns else ():
                if ticket.leases:
                    self._turns[model].join(ticket.sender, ticket)

    def __repr__(self) -> str:
        seats = ", ".join(f"{s.name}: {s.state} {len(s.holders)} leases" for s in self.seats.values())
        lines = ", ".join(f"{model}: {len(line)} waiting" for model, line in self.lines.items() if line)
        return f"<Residency {self.name} [{seats}] [{lines}]>"

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(sorted({gpu for seat in self.seats.values() for gpu in seat.holds}))

    def is_ready(self, model: str) -> bool:
        return bool(self._ready_of[model])

    def takes(self, model: str, owner: str = "") -> bool:
        """Whether a request for ``model`` would be leased at once; one that needs ``owner`` waits for it."""
        if needed := self._needed(owner):
            return not needed.full
        if model in self._routed:
            return self._routed[model].take_one_more()
        return any(not seat.full for seat in self._ready_of[model])

    def seats_of(self, model: str) -> list[Seat]:
        return self._replicas[model]

    # Facts from requests. ``request`` and ``release`` return whether the next step is to be asked for: it is
    # after every other fact, but these are many, and matter only if the policy holds a swap back, or if they
    # begin a line or end a drain.

    def request(self, ticket: Ticket, now: float) -> bool:
        """A request arrived: it is leased, failed or put in line."""
        demand = self._demand[ticket.model]
        demand.arrived(now)
        if ticket.crashes and len(ticket.crashes) >= MOST_CRASHES:
            self._fail(ticket, _crashed(ticket), now)
            return False
        ready = self._ready_of[ticket.model]
        if ready and self._turns and ticket.leases and not self.takes(ticket.model, ticket.work.owner):
            self._queue(ticket, now, self._needed(ticket.work.owner), "busy")
            return ticket.model in self._routed and self._spill(ticket.model, now) is not None
        if ready:
            routed = ticket.model in self._routed
            seat = self._route(ready, ticket, now) if routed else ready[0]
            if seat is None:
                self._fail(ticket, nobody_takes(ticket.model), now)
                return self._complete(ticket.model, now)
            if not seat.holders:
                demand.returned(now - seat.used, now)
            elif not routed:  # else others may be answered elsewhere
                demand.overlapping += 1
            self._lease(seat, ticket, now)
            return routed and self._wants_more(ticket, now)
        line = self.lines[ticket.model]
        if not line:  # a line that nobody can serve any more has failed already
            if error := self._refusal(ticket.model, now):
                self._fail(ticket, error, now)
                return False
            self._plans_hold_until = -FOREVER
            self._note_pause(ticket.model, now)
        self._queue(ticket, now)
        return self.deferred is not None or (len(line) == 1 and ticket.model not in self._coming())

    def _wants_more(self, ticket: Ticket, now: float) -> bool:
        """Whether more of its model's backends are to be loaded now that it has come."""
        completes = self._complete(ticket.model, now)
        return completes or (ticket.leases and self._spill(ticket.model, now) is not None)

    def _needed(self, owner: str) -> Seat | None:
        """The only backend that can serve a request, if that is there: it has what the request refers to."""
        seat = self.seats.get(owner) if owner else None
        return seat if seat and seat.state == "ready" else None

    def _queue(self, ticket: Ticket, now: float, needed: Seat | None = None, reason: str = "") -> None:
        line, bound = self.lines[ticket.model], FOREVER
        if not line:
            bound = self._bounds[ticket.model] = self._bound(ticket.model, now)
        line[ticket] = None
        if ticket.leases and ticket.model in self._turns:
            self._turns[ticket.model].join(ticket.sender, ticket)
        name = needed.name if needed else ""
        self._emit(Event(now, "queued", ticket.model, name, ticket.id, len(line), reason=reason, bound=bound))

    def _bound(self, model: str, now: float) -> float:
        """After how many seconds a line that begins now is overdue: in time to be loaded, if it can be."""
        left = self._config.queue_timeout - self._swap_seconds(model, now)
        return max(min(self._max_wait[model], left), 0.0)

    def _swap_seconds(self, model: str, now: float) -> float:
        """What having ``model`` will take, drain included, as far as is known."""
        plan = None if self._ready_of[model] else self._plan(model, self._busy(), now)
        if plan:
            return self._drain_seconds(plan.victims) + plan.cost.seconds
        found = []
        for seat in self._replicas[model]:
            goals = [swap.target for swap in self._swaps if swap.target and swap.target is not seat]
            others = [goal for goal in goals if goal.holds.keys() & seat.holds.keys()]
            way = seat.rests if seat.state in ("stopped", "standby") else seat.backend.rest[0]
            cost = self._cost(source_of(other.model for other in others), seat, way)
            found.append(self._drain_seconds(others) + cost.seconds)
        return min(found)

    def _drain_seconds(self, victims: Iterable[Seat]) -> float:
        """About the longest of their leases."""
        longest = 0.0
        for victim in victims:
            service = self._demand[victim.model].service_seconds or FIRST_SERVICE_SECONDS
            longest = max(longest, service * (1.0 + math.log(max(len(victim.holders), 1))))
        return min(longest, self._config.drain_timeout)

    def _note_pause(self, model: str, now: float) -> None:
        """A request for a model that was put out: its client's pause, unless another's answer brought it."""
        used = max(seat.last_used for seat in self._replicas[model])
        idle = not any(seat.holders for seat in self._replicas[model])
        if idle and used > -FOREVER and all(seat.loaded <= used for seat in self.seats.values()):
            self._demand[model].returned(now - used)

    def first_byte(self, ticket: Ticket) -> bool:
        """The first byte of an answer came, of a model with several backends; False: it comes too late."""
        if ticket.model in self._routed:
            self._routed[ticket.model].ledger.first_byte(ticket)
        return not ticket.severed

    def observed(self, backend: str, load: Load | None, now: float) -> None:
        """The engine of a replica said this of itself; None: it answered, and has no figures."""
        routed = self._routed.get(self.seats[backend].model)
        if routed:
            routed.ledger.observe(backend, load, now)

    def said(self, backend: str, now: float) -> Said | None:
        """What the engine of a replica said of itself last, in the mode full."""
        routed = self._routed.get(self.seats[backend].model)
        return routed.ledger.said(backend, now) if routed else None

    def silent(self, backend: str, now: float) -> None:
        """The engine of a replica does not answer: when it is stale, who waits there leaves."""
        seat = self.seats[backend]
        if seat.model in self._routed and seat.state == "ready":
            self._send_anew(self._routed[seat.model].take_from(seat, now), f"{backend} is stale", now)

    def reports(self, now: float) -> dict[str, Report]:
        """What other anvil-mux are told of the replicas here."""
        ledgers = [each.ledger for each in self._routed.values()]
        return {name: told for ledger in ledgers for name, told in ledger.reports(now).items()}

    def hear(self, told: Mapping[str, Sequence[Report]], now: float) -> None:
        """What other anvil-mux tell of the replicas here."""
        for each in self._routed.values():
            each.ledger.hear(told, now)

    def bytes_per_token(self, model: str) -> float:
        """As engines' counts have it. Any thread may ask, at any time."""
        return self._routed[model].ledger.bytes_per_token if model in self._routed else BYTES_PER_TOKEN

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
        seat = self.seats.get(ticket.backend or "")
        since = seat.holders.pop(ticket, None) if seat else None
        if seat is None or since is None:
            return False
        self._note_use(seat, ticket, now - since, now)
        if whole:
            seat.answered, seat.crashes = now, 0
        routed = self._routed.get(ticket.model) if ticket.choice else None
        if routed:
            routed.ledger.ended(ticket, prompt_tokens=usage[0], cached_tokens=usage[1])
        if self._emit_leases:
            size, why = len(seat.holders), "" if whole else CUT_SHORT
            self._emit(Event(now, "released", ticket.model, seat.name, ticket.id, size, reason=why))
        if self._turns and seat.state == "ready":
            self._fill_places(ticket.model, now)
        if routed and not seat.holders and seat.state == "ready":
            self._take_back(seat, now)
        if ticket.model in self._unkept and self.unload_when_idle(ticket.model, now):
            return True
        deferred, leases = self.deferred, len(seat.holders)
        asked = deferred is not None and (leases < deferred[1].leases or now >= self._plans_hold_until)
        if leases:
            return asked
        return asked or seat.state == "draining" or seat.backend.ttl is not None

    def _note_use(self, seat: Seat, ticket: Ticket, seconds: float, now: float) -> None:
        demand, seat.last_used = self._demand[ticket.model], now
        if ticket.work.infer_type != "prefill":
            demand.served(seconds)
        if not seat.holders and ticket.model not in self._routed:
            demand.idle(now)

    def give_up(self, ticket: Ticket, now: float, error: MuxError | None = None) -> None:
        """A waiting request ended by itself: its client left, or ``error`` says why it fails."""
        line = self.lines[ticket.model]
        if ticket not in line:
            return
        self._plans_hold_until = -FOREVER
        del line[ticket]
        if ticket.model in self._turns:
            self._turns[ticket.model].leave(ticket.sender, ticket)
        if error:
            self._fail(ticket, error, now)
        else:
            self._emit(Event(now, "gone", ticket.model, ticket=ticket.id, seconds=now - ticket.since))

    def fail_all(self, error: MuxError, now: float) -> None:
        """Every waiting request fails with ``error``."""
        for model in self.lines:
            self._fail_line(model, error, now)

    def sever_all(self, now: float) -> tuple[Ticket, ...]:
        """The program ends and waits no longer for the requests that run; the caller cuts them."""
        cause = Cause("shutdown")
        return tuple(ticket for seat in self.seats.values() for ticket in self._sever(seat, now, cause))

    def unload_requested(self, model: str, now: float, why: str) -> bool:
        """Put out what serves ``model`` after its drain; False: nothing to put out.

        What rests already is stopped, and what is being loaded is so no more; who waits for that is told so.
        """
        seats = self._replicas[model]
        ready = [seat for seat in seats if seat.state == "ready"]
        given_up = self._give_up_load(model, now, why)
        for seat in ready:
            self._begin(None, [seat], now, why, cause=Cause("unloaded"))
        parked = [] if ready else [seat for seat in seats if self._may_be_stopped(seat)]
        for seat in parked:
            seat.rung = "stop"
        return bool(ready or parked or given_up)

    def _give_up_load(self, model: str, now: float, why: str) -> bool:
        """Ends what is to make ``model`` resident, and the wait for that; False if there is neither."""
        swaps = [swap for swap in self._swaps if swap.target and swap.target.model == model]
        for swap in swaps:
            if swap.target and swap.target.state in LOADING:
                swap.cancel, swap.heir = why, ""
            else:
                self._call_off(swap, now)
        if self.is_ready(model):
            return bool(swaps)
        waits = bool(self.lines[model])
        text = f"{model} was unloaded by hand while this request waited for it. Send it again to load it."
        self._fail_line(model, Cancelled(text), now)
        return bool(swaps) or waits

    def _call_off(self, swap: _Swap, now: float) -> None:
        """Its target is not to be loaded. Victims that are being stopped are waited for."""
        going = [victim for victim in swap.victims if victim.state == "evicting"]
        self._dissolve(swap, now)
        if going:
            self._swaps.append(_Swap(None, going, now, swap.reason, swap.cause, begun=True))

    def unload_when_idle(self, model: str, now: float) -> bool:
        """Put out what serves ``model`` once nobody uses it, unless it is asked for before; True: now.

        That is so of one that is being loaded too: who waits for it will use it.
        """
        self._unkept.discard(model)
        if not self.is_ready(model):
            loading = any(seat.state in LOADING for seat in self._replicas[model])
            idle = loading and not self.lines[model]
            return idle and self.unload_requested(model, now, "unload requested")
        if any(seat.holders for seat in self._replicas[model]):
            self._unkept.add(model)
            return False
        return self.unload_requested(model, now, "unload requested")

    def pin_requested(self, model: str, now: float, pinned: bool) -> None:
        """Whether ``model`` is kept, once it is resident, from being put out for others."""
        seats = [s for s in self._replicas[model] if s.pinned != pinned and not s.leaving]
        if not seats:
            return
        self._plans_hold_until = -FOREVER
        self._host.changes += 1
        self._emit(Event(now, "pinned" if pinned else "unpinned", model))
        for seat in seats:
            seat.pinned = pinned
            if pinned:
                self._spare(seat, now)
        self._fail_refused(now)

    def _spare(self, seat: Seat, now: float) -> None:
        """Nobody puts it out for another model any more, although that has begun."""
        for swap in self._swaps:
            if swap.target and seat in swap.victims and seat.state == "draining":
                swap.victims.remove(seat)
                self._reprieve(seat, now)

    # Another configuration

    def retired(self, leaving: Mapping[str, Leaving], served: Set[str], now: float) -> None:
        """Backends are to go for good, each for a reason; lines of models that are not ``served`` end."""
        for seat in self.seats.values():
            seat.leaving = seat.leaving or leaving.get(seat.name, "")
            seat.pinned = seat.pinned and not seat.leaving
        for swap in tuple(self._swaps):
            if swap.target and swap.target.leaving and swap.target.state not in LOADING:
                self._dissolve(swap, now)
        for seat in self.seats.values():
            if seat.leaving and seat.state == "ready":
                self._begin_leaving(seat, now)
            elif seat.leaving and seat.state == "standby":
                seat.rung = "stop"
        for model in [model for model in self.lines if model not in served]:
            self._fail_line(model, UnknownModel(model, served), now)

    @property
    def leaving(self) -> list[Seat]:
        """Those that have not left yet."""
        return [seat for seat in self.seats.values() if seat.leaving and not _is_left(seat)]

    @property
    def is_outgrown(self) -> bool:
        """Whether a seat was left for good: another is to take this one's place."""
        return any(_is_left(seat) for seat in self.seats.values())

    def resumed(self, now: float) -> None:
        """It took the place of others: whoever may be served now is."""
        for model, line in self.lines.items():
            if line and self.is_ready(model):
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
        seat = self.seats[name]
        if any(amount > 0 for amount in self._placement.missing(seat).values()):
            return False
        self._enter(seat, "adopt", now)
        self._unseen.discard(name)
        seat.last_used = now  # how long it has been resident, nobody knows
        self._emit(Event(now, "ready", seat.model, name, reason="adopted"))
        if self.lines[seat.model]:
            self._admit(seat.model, now)
        if seat.pinned:
            self._fail_refused(now)
        return True

    def adopt_standby(
        self, name: str, now: float, how: str, residual: Mapping[str, int], host_bytes: int = 0
    ) -> bool:
        """The backend rested by the way ``how`` before we came; False if what it keeps has no room."""
        seat = self.seats[name]
        if self._placement.crowds(residual):
            return False
        self._enter(seat, "adopt_standby", now)
        self._unseen.discard(name)
        seat.rests, seat.residual, seat.host_bytes = how, dict(residual), host_bytes
        if how in PINS:
            seat.ram = max(seat.ram, host_bytes)
        self._emit(Event(now, "standby", seat.model, name, reason=how))
        return True

    def loaded(self, name: str, now: float, how: str = "stop") -> None:
        """The backend answers, brought back by the way ``how``; its whole line is leased."""
        seat = self.seats[name]
        begun = seat.since
        wanted = bool(self.lines[seat.model])
        unwanted = any(s.cancel and not s.heir for s in self._swaps if s.target is seat)
        self._enter(seat, "loaded", now)
        seat.loaded, seat.load_seconds = now, now - begun
        seat.failed_starts, seat.failed_stops, seat.error, seat.log = 0, 0, "", ()
        seat.rests = "stop"
        if how == "stop":
            seat.ram = seat.backend.ram or 0
        self._learn(seat, how)
        self._end_swap_to(seat)
        self._emit(Event(now, "ready", seat.model, name, seconds=seat.load_seconds, way=how))
        if seat.leaving:
            self._begin_leaving(seat, now)
            return
        self._admit(seat.model, now)
        if unwanted:  # it was unloaded a moment too late to be cancelled
            self._begin(None, [seat], now, "unload requested", cause=Cause("unloaded"))
        elif wanted:
            seat.rung = ""
        elif seat.rung:
            self._begin(None, [seat], now, f"woken on its way to {seat.rung}", cause=Cause("idle"))
        if seat.state == "ready" and seat.model in self._routed and not self.lines[seat.model]:
            self._take_back(seat, now)
        if seat.pinned:
            self._fail_refused(now)  # what does not fit beside it

    def load_failed(self, name: str, now: float, error: LoadError) -> None:
        """The backend did not become ready and was cleaned up."""
        seat = self.seats[name]
        if seat.state == "cancelling":  # who knows whether it would have failed
            self.load_cancelled(name, now)
            return
        self._enter(seat, "load_failed", now)
        seat.failed_starts += 1
        seat.retry_at = now + cool_down(seat.failed_starts)
        seat.error, seat.log, seat.rung = error.reason, error.log, ""
        self._end_swap_to(seat)
        self._emit(Event(now, "stopped", seat.model, name, reason=f"load failed: {error.reason}"))
        self._fail_refused(now)

    def load_cancelled(self, name: str, now: float) -> None:
        """The load of the backend ended before its time, and all that it had begun was stopped."""
        seat = self.seats[name]
        self._enter(seat, "cancelled", now)
        seat.rung = ""
        self._end_swap_to(seat)
        self._emit(Event(now, "stopped", seat.model, name))

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
        """The backend left its GPUs by the way ``how``; unless it was stopped it is parked.

        It holds nothing then but its ``residual`` (bytes by GPU) and ``host_bytes`` of the host's memory.
        ``freed`` is what it gave back, where that was read. ``died``: how it had ended before it was told to,
        and ``log`` what it had printed last.
        """
        seat = self.seats[name]
        parked = how != "stop"
        if died:  # not of one that had been told to stop before, in vain
            died = "" if seat.failed_stops else self._judged(seat, now, died)
        if not seat.failed_stops:  # else an earlier attempt freed some of it
            gave_up = (freed or {}) if seat.state == "evicting" else {}  # who is demoted held less than all
            self._footprints.learn(name, how, gave_up, residual or {}, host_bytes if parked else 0)
            self._placement.measure(seat, self._footprints.held(name))
        self._enter(seat, "standby" if parked else "stopped", now)
        seat.rests, seat.rung = how, "stop" if seat.leaving else ""
        seat.residual = dict(residual or {}) if parked else {}
        seat.host_bytes = host_bytes if parked else 0
        if how in PINS:
            seat.ram = max(seat.ram, host_bytes)
        self._unstick(seat, now)
        self._leave_swaps(seat)
        reason = how if parked else ""
        if died:
            seat.error, seat.log, reason = died, tuple(log), f"{DIED}{died}"
        self._emit(Event(now, seat.state, seat.model, name, reason=reason))
        if parked or seat.failed_starts:  # else nothing is refused that was not before
            self._fail_refused(now)

    def evict_failed(self, name: str, now: float, why: str) -> None:
        """The backend may still hold its GPUs; nothing is started there until a later stop succeeds.

        One that was parked holds what it held, and stays so.
        """
        seat = self.seats[name]
        seat.failed_starts += seat.state == "loading"
        self._enter(seat, "evict_failed", now)
        seat.failed_stops += 1
        seat.retry_at = now + _pause(STUCK_RETRY_SECONDS, seat.failed_stops, MAX_STUCK_RETRY_SECONDS)
        seat.error, seat.rung = why, ""
        if seat.state == "standby":
            seat.rung = "stop"
            why = f"it stays as it is: {why}"
        self._emit(Event(now, seat.state, seat.model, name, reason=why))
        for swap in [s for s in self._swaps if s.target is seat or seat in s.victims]:
            self._dissolve(swap, now)
        self._fail_refused(now)

    def died(self, name: str, now: float, why: str, log: Iterable[str] = ()) -> None:
        """The backend ended without being told to. Whoever loads or stops it reports that instead.

        ``log``: what its engine had printed last.
        """
        seat = self.seats[name]
        if (seat.state, "died") not in TRANSITIONS:
            return
        why = self._judged(seat, now, why)
        self._enter(seat, "died", now)
        self._unstick(seat, now)
        self._leave_swaps(seat)
        seat.error, seat.residual, seat.rests, seat.host_bytes, seat.rung = why, {}, "stop", 0, ""
        seat.log = tuple(log)
        size, crash = len(seat.holders), Crash(name, why, seat.log)
        for ticket in seat.holders:
            ticket.crash = crash
        seat.holders.clear()
        self._emit(Event(now, "stopped", seat.model, name, size=size, reason=f"{DIED}{why}"))
        if seat.failed_starts:
            self._fail_refused(now)

    def unanswering(self, name: str, now: float) -> None:
        """The engine of a backend answers nobody: it is stopped without a drain, whatever its ladder is."""
        seat = self.seats[name]
        if seat.state == "ready":
            seat.rung = "stop"
            self._begin(None, [seat], now, NO_ANSWER, 0.0, cause=Cause("silent"))

    def _judged(self, seat: Seat, now: float, why: str) -> str:
        """How a backend ended, which counts as a failed start if it was too soon."""
        resident = seat.state in ("ready", "draining", "evicting")
        if not resident or seat.answered >= seat.loaded or now - seat.loaded > SOON_SECONDS:
            return why
        seat.crashes += 1
        seat.failed_starts = seat.crashes
        return f"{why} {now - seat.loaded:.1f} s after it was loaded, before it gave one whole answer"

    def _leave_swaps(self, victim: Seat) -> None:
        for swap in self._swaps:
            if victim in swap.victims:
                swap.victims.remove(victim)
                swap.gone.append(victim.model)

    def strangers_hold(self, held: Mapping[str, int]) -> bool:
        """Programs that are none of ours hold so many bytes, by GPU; whether that is news.

        Not believed while a backend comes or goes: its processes may be taken for somebody else's.
        """
        moving = any(seat.state in (*LOADING, "evicting", "demoting") for seat in self.seats.values())
        if moving or held == self._placement.strangers:
            return False
        self._placement.strangers = held
        self._plans_hold_until = -FOREVER
        return True

    def _unstick(self, seat: Seat, now: float) -> None:
        """It left its GPUs; a start that had failed cools down from now on."""
        seat.failed_stops = 0
        seat.retry_at = now + cool_down(seat.failed_starts)
        if not seat.failed_starts:
            seat.error = ""

    # The question

    def next_step(self, now: float) -> Step:
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
                self._put_out_idle(now)
                or self._begin_swap(waiting, now)
                or self._cancel_unwanted(waiting, now)
                or self._run_errand(waiting, now)
            ):
                until = self._next_moment(waiting, now)
                if self._plans_can_hold():
                    self._plans_hold_until = until
                return self._wait(until, now)

    def _plans_can_hold(self) -> bool:
        """Whether leases that begin and end, and lines that grow, leave the plans as they are.

        Not where a drain or an idle time waits for a lease to end, or where there is a choice of victims.
        """
        if self._swaps or self._idlers or self._routed or not self._plans or self._host.budget is not None:
            return False
        return len(self._ready) < 2

    def _wait(self, until: float, now: float) -> Wait:
        return Wait(self._ask_again if now < self._ask_again < until else until)

    def _advance(self, now: float) -> Step | None:
        for swap in tuple(self._swaps):
            if swap.target and not (swap.begun or swap.errand or self.lines[swap.target.model]):
                self._dissolve(swap, now)
                continue
            if step := self._cancel(swap, now) or self._put_out(swap, now):
                return step
            if swap.victims:
                continue
            if swap.target is None:
                self._end(swap)
            elif swap.target.state not in LOADING:
                if not self._has_room(swap, swap.target, now):
                    if step := self._put_out(swap, now):
                        return step
                elif self._host.has_room(swap.target):  # else a sleeper yields first
                    swap.begun = True
                    swap.evict_seconds = max(now - swap.emptied, 0.0)
                    swap.how = swap.target.rests
                    return self._start(swap.target, now, swap.reason)
        return None

    def _cancel(self, swap: _Swap, now: float) -> Cancel | None:
        """Ends a load that is to be cancelled, unless it was asked for again meanwhile."""
        seat = swap.target
        if not (swap.cancel and seat and seat.state == "loading"):
            return None
        if self.lines[seat.model]:
            swap.cancel = ""
            return None
        self._enter(seat, "cancel", now)
        self._emit(Event(now, "cancelling", seat.model, seat.name, reason=swap.cancel, target=swap.heir))
        return Cancel(seat.name)

    def _put_out(self, swap: _Swap, now: float) -> Step | None:
        """The next victim, once its leases are gone or its drain is over; the parked ones come last."""
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
                return self._stop(victim, now, swap.reason, swap)
        if draining or swap.target is None:
            return None
        for victim in [victim for victim in swap.victims if victim.state == "standby"]:
            if not self._fits(swap.target):
                swap.begun = True
                return self._demote(victim, now, "its memory is needed", swap.target.model)
            swap.victims.remove(victim)
        return None

    def _may_spare(self, target: Seat) -> bool:
        """Whoever takes its GPUs whole needs all of its victims to go."""
        return not target.whole or self._host.budget is not None

    def _fits(self, target: Seat) -> bool:
        return self._placement.fits(target) and self._host.short(target) <= 0

    def _has_room(self, swap: _Swap, target: Seat, now: float) -> bool:
        """Whether the target fits now that its victims are gone; if not, others must go as well."""
        if self._fits(target):
            return True
        more = None if swap.errand else self._victims(target, self._busy(swap), frozenset(), now)
        if more is None:
            self._dissolve(swap, now)
        else:
            swap.until = now + self._config.drain_timeout
            swap.victims += more
            self._drain(swap, more, now, self._config.drain_timeout)
        return False

    def _retry_stuck(self, now: float) -> Step | None:
        for seat in self.seats.values():
            if now < seat.retry_at:
                continue
            if seat.state == "stuck":
                return self._stop(seat, now, "trying again to stop it")
            if seat.rung == "stop" and self._may_be_stopped(seat):
                why = LEAVES.get(seat.leaving, "unload requested")
                return self._demote(seat, now, "trying again to stop it" if seat.failed_stops else why)
        return None

    def _may_be_stopped(self, seat: Seat) -> bool:
        """Whether it is parked and nobody waits for it as it is."""
        wanted = self.lines[seat.model] and not seat.leaving
        return seat.state == "standby" and not seat.coming and not wanted

    def _demote_next(self, now: float) -> Step | None:
        """A parked backend that rests too high for too long, or for the host's memory."""
        seat = self._host.yields(now) if self._host.budget is not None else None
        if seat is not None and seat is self.seats.get(seat.name):
            return self._demote(seat, now, "host memory is short", to=self._host.lower(seat))
        for seat in self._parkers:
            until = demoted_at(seat)
            if until is None or until > now or seat.coming or self.lines[seat.model]:
                continue
            if DESCENTS.get((seat.rests, to := below(seat, may_wake=self._is_calm(seat)))):
                seat.rung = to
                self._begin(seat, [], now, f"{ERRAND}on its way to {to}", errand=True)
                return self._advance(now)
            return self._demote(seat, now, f"it rested by {seat.rests} for {now - seat.since:.0f} s")
        return None

    def _run_errand(self, waiting: list[Ticket], now: float) -> bool:
        """Begins to load the next backend that is to be prepared, if nothing else is to be done.

        Nobody who has had work is put out for that, and nobody who rests is stopped.
        """
        while self._unprepared and not waiting and not self._swaps:
            seat = self._unprepared[0]
            victims = self._victims(seat, set(), frozenset(), now)
            failed = seat.state != "stopped" or seat.retry_at > now or victims is None
            if failed or any(v.state == "standby" or _has_had_work(v) for v in victims or ()):
                self._unprepared.pop(0)
            elif any(_stays_until(victim) > now for victim in victims or ()):
                return False
            elif victims:
                for victim in victims:
                    cause = Cause("evicted", seat.model)
                    self._begin(None, [victim], now, f"room to prepare {seat.model}", cause=cause)
                return True
            else:
                self._unprepared.pop(0)
                if self._host.has_room(seat):
                    lacked = self.is_ready(seat.model) and seat in self._routed[seat.model].lacking(now)
                    why = "the other stage is there" if lacked else "prepared before anybody asks"
                    self._begin(seat, [], now, f"{ERRAND}{why}", errand=True)
                    return True
        return False

    def _complete(self, model: str, now: float) -> bool:
        """Has the stages prepared that a model in use lacks; whether there are any."""
        found = self._routed[model].lacking(now) if model in self._routed else []
        lacking = [seat for seat in found if seat not in self._unprepared]
        if lacking:
            self._unprepared += lacking
            self._plans_hold_until = -FOREVER
        return bool(lacking)

    def _is_calm(self, seat: Seat) -> bool:
        """Whether nobody has or wants the GPUs of a parked backend, or the host's memory that it runs in."""
        return not self._swaps and not self._waiting() and self._fits(seat) and self._host.has_room(seat)

    def _put_out_idle(self, now: float) -> bool:
        idle = [seat for seat in self._idlers if idle_until(seat) <= now < FOREVER]
        for seat in idle:
            self._begin(None, [seat], now, f"idle for {seat.backend.ttl:g} s", cause=Cause("idle"))
        for seat in self._ready if self._host.budget is not None else ():
            if model := self._host.answer(seat, now):
                why = f"idle, and {model} lacks host memory"
                self._begin(None, [seat], now, why, cause=Cause("evicted", model))
                return True
        return bool(idle)

    def _start(self, seat: Seat, now: float, reason: str) -> Start:
        self._enter(seat, "load", now)
        how, seat.rests, seat.residual, seat.host_bytes = seat.rests, "stop", {}, 0
        if seat.rung == "stop":  # it was to be stopped, and is wanted after all
            seat.rung = ""
        self._emit(Event(now, "loading", seat.model, seat.name, reason=reason, way=how))
        return Start(seat.name, how)

    def _demote(self, seat: Seat, now: float, reason: str, target: str = "", to: str = "") -> Demote:
        to = "stop" if seat.rung == "stop" else to or below(seat, may_wake=False)
        self._enter(seat, "demote", now)
        seat.rung = to
        self._emit(Event(now, "demoting", seat.model, seat.name, 0, 0, 0.0, reason, target, to))
        return Demote(seat.name, seat.rests, to)

    def _stop(self, seat: Seat, now: float, reason: str, swap: _Swap | None = None) -> Stop:
        """``swap``: whose victim it is; one that is stuck is nobody's, and has no leases."""
        drained = now - seat.since if seat.state == "draining" else 0.0
        for_good = seat.state == "stuck" or seat.leaving
        how = "stop" if for_good else seat.rung or self._rung(seat, swap.target if swap else None)
        if not (for_good or seat.rung) and how != seat.backend.rest[0]:
            reason = NO_ROOM + seat.backend.rest[0]
        self._enter(seat, "evict", now)
        seat.rung = how
        severed = self._sever(seat, now, swap.cause._replace(seconds=drained)) if swap else ()
        self._emit(Event(now, "evicting", seat.model, seat.name, 0, len(severed), drained, reason))
        return Stop(seat.name, how, severed)

    def _rung(self, seat: Seat, target: Seat | None) -> str:
        """As high as the host has room, but not where it kept too much beside ``target`` the last time."""
        ways = rungs(seat.backend)
        for way in ways[ways.index(self._host.rung(seat)) :]:
            last = self._footprints.resting(seat.name, way)
            if not (target and last and self._placement.excludes(last.residual, target)):
                return way
        return "stop"

    def _sever(self, seat: Seat, now: float, cause: Cause) -> tuple[Ticket, ...]:
        severed = tuple(seat.holders)
        why, target, drained = cause
        for ticket in severed:
            ticket.severed = cause
            self._emit(Event(now, "severed", ticket.model, seat.name, ticket.id, 1, drained, why, target))
        seat.holders.clear()
        return severed

    def _next_moment(self, waiting: list[Ticket], now: float) -> float:
        """When the answer of ``next_step`` may change without a new fact, whatever the policy says."""
        moments = [self._overdue_at(first) for first in waiting]
        for seat in self._idlers:
            moments.append(idle_until(seat))
        for seat in self._stayers if waiting or self._unprepared else ():
            moments.append(_stays_until(seat))
        moments += [until for seat in self._parkers if (until := demoted_at(seat)) is not None]
        for swap in self._swaps:
            if any(victim.state == "draining" for victim in swap.victims):
                moments.append(swap.until)
        for seat in self.seats.values():
            if seat.retry_at > now and (seat.state in ("stuck", "standby") or self.lines[seat.model]):
                moments.append(seat.retry_at)
        return min([moment for moment in moments if moment > now], default=FOREVER)

    # Beginning and ending a swap

    def _begin_swap(self, waiting: list[Ticket], now: float) -> bool:
        """Begins at most one swap: that of the oldest overdue line, else what the policy proposes."""
        busy = self._busy()
        if self._serve_overdue(waiting, busy, now):
            return True
        staying = {seat.name for seat in self._stayers if _stays_until(seat) > now}
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
        """Ends the wait of the oldest overdue line; the GPUs of those that must wait on become ``busy``."""
        for first in waiting:
            if self._overdue_at(first) > now:
                continue
            if plan := self._plan(first.model, busy, now):
                self._begin(plan.target, plan.victims, now, "overdue")
                return True
            if error := self._lack_of_memory(first.model, busy, now):
                self._fail_line(first.model, error, now)
                return True
            for seat in self._loadable(first.model, now):
                busy.update(seat.holds)
        return False

    def _cancel_unwanted(self, waiting: list[Ticket], now: float) -> bool:
        """Has loads cancelled that nobody waits for any more, if a line could have their GPUs then."""
        unwanted = [swap for swap in self._swaps if self._is_unwanted(swap)] if waiting else []
        if not unwanted:
            return False
        loads = [swap.target for swap in unwanted if swap.target]
        busy = {gpu for swap in self._swaps if swap not in unwanted for gpu in swap.gpus()}
        stays = {seat.name for seat in self._stayers if _stays_until(seat) > now}
        for first in waiting:
            staying = stays if self._overdue_at(first) > now else frozenset()
            for seat in () if first.model in self._plans else self._loadable(first.model, now):
                there = [s for s in unwanted if s.target and s.target.holds.keys() & seat.holds.keys()]
                if there and self._victims(seat, busy, staying, now, loads) is not None:
                    for swap in there:
                        swap.cancel, swap.heir = f"nobody waits for it, and {first.model} does", first.model
                    return True
        return False

    def _is_unwanted(self, swap: _Swap) -> bool:
        """Whether it loads what nobody waits for any more."""
        seat = swap.target
        if seat is None or seat.state != "loading" or swap.errand or swap.cancel:
            return False
        return not (seat.pinned or self.lines[seat.model])

    def _tell_of_stay(self, first: Ticket, victims: list[Seat], now: float) -> None:
        """The line of ``first`` waits because those in its way may stay."""
        stays = {seat.name: until for seat in victims if (until := _stays_until(seat)) > now}
        until = min(max(stays.values()), self._overdue_at(first))
        self._defer(first.model, Stay(until, f"{' and '.join(stays)} may stay for min_residency"), now)

    def _waiting(self) -> list[Ticket]:
        """The first of each line that waits for a load which no swap under way will end, oldest first."""
        coming = self._coming()
        firsts = [next(iter(line)) for model, line in self.lines.items() if line and model not in coming]
        if self._turns:
            firsts = [first for first in firsts if not self.is_ready(first.model)]
        return sorted(firsts, key=_AGE) if len(firsts) > 1 else firsts

    def _overdue_at(self, first: Ticket) -> float:
        """When the line that ``first`` is the first of is overdue."""
        return max(first.since, self._left.get(first.model, first.since)) + self._bounds[first.model]

    def _coming(self) -> tuple[str, ...]:
        """Models that a swap under way will make resident."""
        return tuple([swap.target.model for swap in self._swaps if swap.target])

    def _plan(self, model: str, busy: set[str], now: float, staying: Set[str] = frozenset()) -> _Plan | None:
        """The replica that is loaded at the cost of the fewest victims, or None while none can be."""
        best: tuple[Seat, list[Seat]] | None = None
        for seat in self._loadable(model, now):
            victims = self._victims(seat, busy, staying, now)
            if victims is not None and (best is None or len(victims) < len(best[1])):
                best = seat, victims
        if best is None:
            return None
        evicts = tuple([victim.model for victim in best[1]])
        target, source = best[0], source_of(evicts)
        return _Plan(*best, evicts, source, self._cost(source, target, target.rests))

    def _victims(
        self, target: Seat, busy: set[str], staying: Set[str], now: float, without: Sequence[Seat] = ()
    ) -> list[Seat] | None:
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

    def _loadable(self, model: str, now: float) -> list[Seat]:
        seats = [seat for seat in self._replicas[model] if not seat.leaving]
        return [s for s in seats if s.state == "standby" or (s.state == "stopped" and s.retry_at <= now)]

    def _ask_policy(self, plans: Mapping[str, _Plan], now: float) -> bool:
        self.deferred, self._ask_again = None, FOREVER
        if not plans and not self._ready:
            return False  # nothing to be loaded, nothing to be put out
        spills = {} if plans else self._spills(now)
        decision = self._decide(self.snapshot(now, plans, spills))
        if isinstance(decision, Stay):
            self._ask_again = min(decision.until, decision.again)
            if plans:
                self._defer(next(iter(plans)), decision, now)
                self._ask_again = min(self._ask_again, self._announced[1])
        elif isinstance(decision, SwapTo) and decision.model in plans:
            plan = plans[decision.model]
            self._begin(plan.target, plan.victims, now, decision.reason)
            return True
        elif isinstance(decision, SwapTo) and decision.model in spills:
            plan = spills[decision.model][0]
            self._begin(plan.target, plan.victims, now, decision.reason, errand=True)
            return True
        elif isinstance(decision, Unload) and decision.model in self._replicas:
            seats = [s for s in self._replicas[decision.model] if s.state == "ready" and not s.pinned]
            for seat in seats:
                self._begin(None, [seat], now, decision.reason, cause=Cause("policy"))
            return bool(seats)
        return False

    def _spills(self, now: float) -> dict[str, tuple[_Plan, Spill]]:
        """Busy models of which another replica could be loaded, unless anybody waits for a load."""
        if not self._routed or any(line and not self.is_ready(m) for m, line in self.lines.items()):
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
            now - seat.holders[ticket]
            for seat in self._replicas[model]
            if seat.state == "ready"
            for ticket in self._routed[model].ledger.waiting(seat.name)[1:]
        ]
        behind += [now - each.since for each in self.lines[model] if not self._needed(each.work.owner)]
        if not behind:
            return None
        used = {seat.name for seat in self.seats.values() if seat.holders or seat.model == model}
        staying = used | {seat.name for seat in self._stayers if _stays_until(seat) > now}
        plan = self._plan(model, self._busy(), now, staying)
        if plan is None:
            return None
        cost = plan.cost
        reload = sum([self._cost("", victim, victim.backend.rest[0]).load_seconds for victim in plan.victims])
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
            return decide(self._policy, seen)
        except Exception as error:  # anybody's code; max_wait serves every line all the same
            return Stay(reason=f"the policy failed: {error!r}")

    def _defer(self, model: str, stay: Stay, now: float) -> None:
        """The swap is put off: announced once for each queue, and again when the moment has passed."""
        self.deferred = model, stay
        first = next(iter(self.lines[model]))
        if first is not self._announced[0] or now >= self._announced[1]:
            self._announced = first, max(stay.until, now + SHORTEST_DEFERRAL)
            size = len(self.lines[model])
            self._emit(Event(now, "deferred", model, "", first.id, size, stay.until - now, stay.reason))

    def _begin(
        self,
        target: Seat | None,
        victims: list[Seat],
        now: float,
        reason: str,
        drain_timeout: float | None = None,
        *,
        errand: bool = False,
        cause: Cause | None = None,
    ) -> None:
        """``cause``: why the victims' requests are severed, unless it is for the target."""
        if cause is None:
            assert target is not None
            cause = Cause("evicted", target.model)
        self._plans_hold_until = -FOREVER
        drain = self._config.drain_timeout if drain_timeout is None else drain_timeout
        swap = _Swap(target, [*victims], now + drain, reason, cause, errand=errand)
        self._swaps.append(swap)
        if target:
            target.coming = True
            self._host.changes += 1
        self._drain(swap, victims, now, drain)

    def _begin_leaving(self, seat: Seat, now: float, drain_timeout: float | None = None) -> None:
        """It goes for good, once its leases have ended."""
        assert seat.leaving
        why = LEAVES[seat.leaving]
        self._begin(None, [seat], now, why, drain_timeout, cause=Cause(seat.leaving))

    def _drain(self, swap: _Swap, victims: list[Seat], now: float, drain: float) -> None:
        """Closes the gates of the victims that are resident."""
        model = swap.target.model if swap.target else ""
        for victim in victims:
            if victim.state == "ready":
                self._enter(victim, "drain", now)
                size, reason = len(victim.holders), swap.reason
                self._emit(Event(now, "draining", victim.model, victim.name, 0, size, drain, reason, model))

    def _dissolve(self, swap: _Swap, now: float) -> None:
        """Ends a swap before its target was started; victims that only drained stay resident."""
        self._end(swap)
        if swap.target:
            swap.target.rung = ""
        for victim in swap.victims:
            if victim.state == "draining":
                self._reprieve(victim, now)

    def _end(self, swap: _Swap) -> None:
        self._plans_hold_until = -FOREVER
        self._swaps.remove(swap)
        if swap.target:
            swap.target.coming = False
            self._host.changes += 1

    def _reprieve(self, victim: Seat, now: float) -> None:
        if victim.leaving:
            left = victim.since + self._config.drain_timeout - now
            self._begin_leaving(victim, now, max(left, 0.0))
            return
        self._enter(victim, "reprieve", now)
        self._emit(Event(now, "ready", victim.model, victim.name, reason="reprieved"))
        self._admit(victim.model, now)

    def _learn(self, target: Seat, how: str) -> None:
        for swap in self._swaps:
            if swap.target is target:
                source = source_of(swap.gone)
                seconds = target.load_seconds or 0.0
                self._costs.learn(source, target.model, how, swap.evict_seconds, seconds)

    def _end_swap_to(self, seat: Seat) -> None:
        for swap in [swap for swap in self._swaps if swap.target is seat]:
            self._end(swap)

    # Ends of tickets

    def _route(self, ready: list[Seat], ticket: Ticket, now: float) -> Seat | None:
        """Whom it is sent to; None: the policy lets none of them take it."""
        if ticket.model not in self._routed or not ticket.leases:
            return ready[0]
        seat, prefill = self._routed[ticket.model].route(ready, ticket, now)
        if prefill:
            assert ticket.prefill is not None
            self._lease(prefill, ticket.prefill, now)
        return seat

    def explain(self, model: str, work: Work, now: float, *, staged: bool) -> dict[str, list[dict[str, Any]]]:
        """Stage -> what would be made of each replica, were this request to come now; nothing is changed."""
        return self._routed[model].explain(work, now, staged=staged)

    def _lease(self, seat: Seat, ticket: Ticket, now: float) -> None:
        ticket.backend = seat.name
        self._unkept.discard(ticket.model)
        if ticket.leases:
            seat.holders[ticket] = now
            seat.last_used = now
        if self._emit_leases:
            size, waited = len(seat.holders), now - ticket.since
            why = ticket.choice.why if ticket.choice else ""
            self._emit(Event(now, "leased", ticket.model, seat.name, ticket.id, size, waited, why))

    def _admit(self, model: str, now: float) -> None:
        ready = self._ready_of[model]
        line = self.lines[model]
        if line:
            self._demand[model].admitted(len(line), now - next(iter(line)).since)
            self._complete(model, now)
        if model in self._turns:
            for ticket in [ticket for ticket in line if not ticket.leases]:
                self._admit_one(ticket, ready, now)
            self._fill_places(model, now)
            return
        for ticket in line:
            if seat := self._route(ready, ticket, now):
                self._lease(seat, ticket, now)
            else:
                self._fail(ticket, nobody_takes(model), now)
        self.settled += line
        line.clear()

    def _fill_places(self, model: str, now: float) -> None:
        """As many of a line as there are places at the backends that are ready."""
        line = self.lines[model]
        while line and self.takes(model):
            ticket = self._turns[model].take(lambda ticket: self.takes(model, ticket.work.owner))
            if ticket is None:
                return
            places = [seat for seat in self._ready_of[model] if not seat.full]
            self._admit_one(ticket, places, now)

    def _admit_one(self, ticket: Ticket, ready: list[Seat], now: float) -> None:
        if seat := self._route(ready, ticket, now):
            self._lease(seat, ticket, now)
        else:
            self._fail(ticket, nobody_takes(ticket.model), now)
        del self.lines[ticket.model][ticket]
        self.settled.append(ticket)

    def _take_back(self, idle: Seat, now: float) -> None:
        """Requests that wait behind others, and would be better off at ``idle``, are sent anew."""
        self._send_anew(self._routed[idle.model].take_back(idle), f"taken back for {idle.name}", now)

    def _send_anew(self, found: Iterable[tuple[Ticket, Seat]], why: str, now: float) -> None:
        for ticket, seat in found:
            del seat.holders[ticket]
            ticket.severed = Cause("moved")
            self.taken_back.append(ticket)
            if self._emit_leases:
                size = len(seat.holders)
                self._emit(Event(now, "released", ticket.model, seat.name, ticket.id, size, reason=why))

    def _fail(self, ticket: Ticket, error: MuxError, now: float) -> None:
        ticket.error = error
        waited = now - ticket.since
        self._emit(Event(now, "failed", ticket.model, "", ticket.id, 0, waited, error.code))

    def _fail_line(self, model: str, error: MuxError, now: float) -> None:
        self._plans_hold_until = -FOREVER
        line = self.lines[model]
        for ticket in line:
            self._fail(ticket, error, now)
        if model in self._turns:
            self._turns[model].clear()
        self.settled += line
        line.clear()

    def _fail_refused(self, now: float) -> None:
        """Fails the lines that nobody can serve any more."""
        for model, line in self.lines.items():
            error = self._refusal(model, now) if line else None
            if error:
                self._fail_line(model, error, now)

    def _refusal(self, model: str, now: float) -> MuxError | None:
        """Why no backend of ``model`` can be loaded; None if one can, or is loading or being put out."""
        first: MuxError | None = None
        for seat in self._replicas[model]:
            error = self._obstacle(seat, now)
            if error is None:
                return None
            first = first or error
        return first

    def _obstacle(self, seat: Seat, now: float) -> MuxError | None:
        if seat.state not in ("stopped", "standby", "stuck") or (seat.leaving and seat.state != "stuck"):
            return None
        for other in self.seats.values():
            if self._is_stuck_before(other, seat):
                whose = "" if other is seat else f" and holds a GPU of {seat.model}"
                text = f"{other.name} could not be stopped{whose}: {other.error}"
                return Stuck(text, retry_after=other.retry_at - now)
        if seat.state == "stopped" and seat.retry_at > now:
            pause = seat.retry_at - now
            what = "ended" if seat.failed_starts == seat.crashes else "failed to load"
            text = f"{seat.name} {what} and is not tried again for {pause:.0f} s: {seat.error}"
            return LoadError(text, log=seat.log, retry_after=pause)
        why = self._placement.never_fits(seat) or self._host.never_fits(seat)
        return DoesNotFit(f"{seat.name} cannot be loaded: {why}.") if why else None

    def _is_stuck_before(self, other: Seat, seat: Seat) -> bool:
        """Whether ``seat`` cannot be loaded because ``other`` cannot be stopped."""
        if other.state == "standby":
            return other is not seat and self._placement.clings(other, seat)
        return other.state == "stuck" and (other is seat or bool(other.holds.keys() & seat.holds.keys()))

    def _lack_of_memory(self, model: str, busy: set[str], now: float) -> MuxError | None:
        """Why a line that is overdue is not served: others than this island's backends have the memory.

        None too where those will make room.
        """
        may_go = ("ready", "draining", "evicting")
        others = [seat for seat in self.seats.values() if seat.state in may_go and not seat.pinned]
        for seat in self._replicas[model]:
            if seat.state not in ("stopped", "standby") or not busy.isdisjoint(seat.holds):
                continue
            if strangers := self._placement.strangers_before(seat):
                return GpuMemoryShort(f"{seat.name} cannot be loaded: {strangers}.")
            short = self._host.short(seat, others)
            if short > 0 and not self._host.call(seat, short, self.seats.values(), now):
                who = ", ".join(f"{name} has {gib(each)}" for name, each in self._host.insisting(seat))
                return HostMemoryShort(f"{seat.name} lacks {gib(short)} of host memory: {who}.")
        return None

    # State

    def _enter(self, seat: Seat, what: str, now: float) -> None:
        """The only writer of a seat's state."""
        before = seat.state
        try:
            seat.state = TRANSITIONS[before, what]
        except KeyError:
            raise ValueError(f"{seat.name} is {before}: `{what}` cannot happen to it") from None
        seat.since = now
        if seat.state == "stopped":
            seat.ram = seat.backend.ram or 0  # what it had pinned is gone
        if before == "ready" and seat.model in self._turns:
            self._left[seat.model] = now
        if "ready" in (before, seat.state):
            self._ready = _those_ready(self.seats.values())
            self._ready_of[seat.model] = [each for each in self._ready if each.model == seat.model]
        self._plans_hold_until = -FOREVER
        self._host.changes += 1
        if before == "ready" and seat.model in self._turns:
            self._fill_places(seat.model, now)  # who needed just this one has nothing to wait for any more
        if seat.state not in ("ready", "draining") and seat.model in self._routed:
            self._routed[seat.model].ledger.forget(seat.name)

    def snapshot(
        self,
        now: float,
        plans: Mapping[str, _Plan],
        spills: Mapping[str, tuple[_Plan, Spill]] = {},
    ) -> Snapshot:
        """What the policy may know; ``plans`` are the swaps that could begin now, oldest line first."""
        residents = [self._resident(seat, now) for seat in self._ready]
        lines = [self._line(model, plan, now) for model, plan in plans.items()]
        if len(lines) > 1:
            lines.sort(key=lambda line: -line.priority)
        swaps = [_swapping(swap, swap.target) for swap in self._swaps if swap.target] if self._swaps else ()
        spilling = tuple([spill for _, spill in spills.values()]) if spills else ()
        return Snapshot(now, self.name, tuple(residents), tuple(lines), tuple(swaps), spilling)

    def _resident(self, seat: Seat, now: float) -> Resident:
        model, loaded, backend = seat.model, seat.loaded, seat.backend
        demand = self._demand[model]
        rate, growth = demand.rates(now)
        return Resident(
            model,
            seat.name,
            loaded,
            len(seat.holders),
            seat.last_used if seat.last_used > loaded else loaded,
            rate,
            growth,
            demand.pause_seconds,
            demand.service_seconds,
            self._costs.estimate("", model, backend.rest[0], backend.engine).load_seconds,
        )

    def _line(self, model: str, plan: _Plan, now: float) -> Line:
        tickets, demand, cost = self.lines[model], self._demand[model], plan.cost
        oldest, newest = next(iter(tickets)), next(reversed(tickets))
        _, growth = demand.rates(now, len(tickets), now - oldest.since)
        return Line(
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

    def _loss(self, now: float, seat: Seat) -> float:
        """What putting it out costs: its arrivals per second, times the seconds of loading it again."""
        way = "stop" if seat.state == "standby" else seat.backend.rest[0]
        return self._demand[seat.model].rate(now) * self._cost("", seat, way).load_seconds

    def _worth(self, seat: Seat, now: float) -> tuple[bool, int, float, float]:
        """How much it deserves to rest high: see ladder.Host."""
        cold = self._cost("", seat, "stop").load_seconds
        loss = self._demand[seat.model].rate(now) * cold
        return bool(self.lines[seat.model]), seat.backend.priority, loss, seat.used

    def _cost(self, source: str, target: Seat, how: str) -> Cost:
        return self._costs.estimate(source, target.model, how, target.backend.engine)

    def prospect(self, model: str, now: float) -> Prospect:
        """What a request for ``model`` would meet if it came now; changes nothing."""
        refusal = self._refusal(model, now)
        if refusal:
            return Prospect(refusal)
        for swap in self._swaps:
            if swap.target and swap.target.model == model and not swap.cancel:
                cost = self._cost_of(swap, swap.target)
                known = self._costs.knows(model, cost.way)
                return Prospect(None, swap.target, swap.victims, cost, known, until=swap.until)
        line, ghost = self.lines[model], Ticket(0, model, now)
        if not line:
            self._bounds[model] = self._bound(model, now)
            line[ghost] = None  # the policy is asked as if it had come
        try:
            busy = self._busy()
            staying = {seat.name for seat in self._stayers if _stays_until(seat) > now}
            found = {first.model: self._plan(first.model, busy, now, staying) for first in self._waiting()}
            plans = {each: plan for each, plan in found.items() if plan}
            decision = self._decide(self.snapshot(now, plans)) if model in plans else None
            overdue_at = self._overdue_at(next(iter(line)))
        finally:
            line.pop(ghost, None)
        if model not in plans:
            return Prospect(overdue_at=overdue_at)
        plan = plans[model]
        cost = plan.cost
        known = self._costs.knows(model, plan.target.rests)
        return Prospect(None, plan.target, plan.victims, cost, known, decision, overdue_at=overdue_at)

    def _cost_of(self, swap: _Swap, target: Seat) -> Cost:
        """Of a swap under way."""
        source = source_of((*swap.gone, *(victim.model for victim in swap.victims)))
        return self._cost(source, target, swap.how or target.rests)

    def way_back(self, seat: Seat) -> str:
        """The way by which it is being loaded; "" if it is not."""
        return next((swap.how for swap in self._swaps if swap.target is seat), "")

    def expected_load(self, seat: Seat) -> float | None:
        """What its load under way will take; None if it was never loaded by that way."""
        for swap in self._swaps:
            if swap.target is seat and self._costs.knows(seat.model, swap.how):
                return self._cost_of(swap, seat).load_seconds
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


def _by_model(seats: Mapping[str, Seat], coming: Mapping[str, str]) -> dict[str, list[Seat]]:
    found: dict[str, list[Seat]] = {}
    for seat in seats.values():
        for model in dict.fromkeys((seat.model, coming.get(seat.name, seat.model))):
            found.setdefault(model, []).append(seat)
    return found


def _those_ready(seats: Iterable[Seat]) -> list[Seat]:
    return [seat for seat in seats if seat.state == "ready"]


def _crashed(ticket: Ticket) -> Crashed:
    *_, last = ticket.crashes
    often = f"{len(ticket.crashes)} times engines ended under this request, which is not sent again"
    return Crashed(with_log(f"{often}: {last.backend} {last.why}.", last.log))


def _is_left(seat: Seat) -> bool:
    """It went for good, and holds nothing any more."""
    return bool(seat.leaving) and seat.state == "stopped"


def idle_until(seat: Seat) -> float:
    """When it is put out because nobody uses it."""
    if seat.state != "ready" or seat.holders or seat.backend.ttl is None:
        return FOREVER
    return seat.used + seat.backend.ttl


def _has_had_work(seat: Seat) -> bool:
    """Since it was loaded."""
    return bool(seat.holders) or seat.last_used > seat.loaded


def _stays_until(seat: Seat) -> float:
    """Until when it is not put out for a line that is not overdue."""
    return seat.loaded + seat.backend.min_residency


def max_waits(seats: Iterable[Seat], config: Config) -> dict[str, float]:
    """Model -> seconds after which its line is overdue at the latest: the shortest its replicas ask for."""
    limits: dict[str, float] = {}
    for seat in seats:
        own = config.max_wait if seat.backend.max_wait is None else seat.backend.max_wait
        limits[seat.model] = min(own, limits.get(seat.model, own))
    return limits


def _swapping(swap: _Swap, target: Seat) -> Swapping:
    moving = ("draining", "evicting", *LOADING)
    seats = [seat for seat in (*swap.victims, target) if seat.state in moving]
    state, since = (seats[0].state, seats[0].since) if seats else ("evicting", swap.emptied)
    return Swapping(target.model, (*swap.gone, *(victim.model for victim in swap.victims)), state, since)
