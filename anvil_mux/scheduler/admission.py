"""How a request comes to its backend: it is leased, waits in its model's queue, or fails.

When a model becomes ready its whole queue is leased at once, or as much of it as there are places; so is the
next in queue whenever a place becomes free. Each ticket ends exactly once: leased, failed or gone. Tickets
that had waited are ``woken`` by the driver. Of the layers of a GPU group this is the only one that writes
queues. Pure functions over the GPU group's state say how long a request waits, when its queue is overdue, and
why it is refused.

A queue stands in the GPU group where a swap to its model can begin first, and of several in the best one by
``place_rank`` (state.py). Its bound, after which it is overdue, is fixed when it begins.

The bound is ``max_wait``, or less where a load would come too late for ``queue_timeout`` then. With ``auto``
it follows the load. A round is what it takes to load all models that wait for the same GPUs now, one after
the other, and this one last. The bound is two rounds: one in which all could be served oldest first, and one
more, of ``CHOICE_SECONDS`` at most, for the answers in between, which nobody knows beforehand, and for the
policy to choose in; and ``LEAST_SECONDS`` at least. A bound shorter than what a round really takes makes
every queue overdue before its turn comes, and then each policy serves them oldest first.

Before an overdue queue only older ones are served, and these waited when it began: one more round
(docs/design.md has the proof). Where ``queue_timeout`` leaves less time than that the bound is as much
shorter.

What a load is expected to take is fixed with the bound, and both stand in the event ``queued``: who reads a
log can compute each bound again.

A drain without a bound has no known end. What is known is how long answers of that model take on average: one
that has run for less is expected to take the rest, of one that has run for longer nothing is known. Where
nothing is known a request waits until ``queue_timeout``; one whose model could not be loaded before that is
refused at once. Only victims with a ``drain_timeout`` of their own count: who sets the one of the top level
has ``queue_timeout`` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from anvil_mux.config.kinds import gib, span
from anvil_mux.errors import (
    BackendPaused,
    Crashed,
    DoesNotFit,
    GpuMemoryShort,
    GpuMissing,
    HostMemoryShort,
    HostUnavailable,
    LoadError,
    MuxError,
    NothingResident,
    Overloaded,
    Stuck,
    WouldWaitTooLong,
)
from anvil_mux.scheduler.events import LOCAL, Cause, Event, Severance
from anvil_mux.scheduler.model import Model, ModelSettings
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.slot import LOADING, STAYING, HostRecord, Slot, Ticket
from anvil_mux.scheduler.state import (
    G,
    GroupState,
    PlaceRank,
    age,
    choose,
    cost_of,
    could_spill,
    drain_seconds,
    is_unwanted,
    order,
    place_rank,
    plan,
    seconds_to_load,
    usual_drain,
    victims,
    waiting,
)

LEAST_SECONDS = 60.0
"""The least bound: that of a queue whose round takes half as long, or less."""
CHOICE_SECONDS = 150.0
"""The most by which a bound is longer than a round."""
CANCEL_SECONDS = 1.0
"""How long a load that is cancelled is taken to go on: longer than it takes where nothing is cancelled."""
MOST_ANSWERS = 5
"""How many of the answers that are waited for are named."""
MOST_HOSTS = 5
"""How many hosts the text of an error names."""
MOST_CRASHES = 2
"""How often backends end under one request before that is refused."""
BUSY = Cause("busy")


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
            return model.replicas is not None and self.may_spill(model, now)
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
        is_asked = self.may_choose  # who is evicted depends on who is in use
        if model.replicas is None:
            return is_asked
        completes = self.complete(model, now)
        return is_asked or completes or (ticket.takes_lease and self.may_spill(model, now))

    @property
    def may_choose(self) -> bool:
        """Whether a swap, or a hint, is held back here that leaves a choice of backends to load or evict."""
        held = (*self.deferred.values(), *self.deferred_hints.values())
        return bool(held) and (bool(self.routed) or any(len(each.residents) > 1 for each in held))

    def may_spill(self, model: Model, now: float) -> bool:
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
        # What is still loaded on a drained host is under way here, and not coming: others may be loaded.
        return begins and not (model.name in self.coming and model.is_coming)

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
        most, load, seconds = FOREVER, 0.0, 0.0
        if not ticket.resent:
            model.demand.arrived(now)
        if not queue.tickets:
            most, load, seconds = bound(self, model, now)
            queue.bound, queue.load_seconds = most, load
        queue.join(ticket)
        name, size = only.name if only else "", len(queue.tickets)
        self.emit(
            Event(now, "queued", ticket.model, name, ticket.id, size, seconds, cause, bound=most, load=load)
        )

    def abandoned(self, ticket: Ticket, now: float, error: MuxError | None = None) -> None:
        """A waiting request ended by itself: its client left, or ``error`` says why it fails."""
        self.changed()
        self.models[ticket.model].queue.leave(ticket)
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


# Where a queue waits, and how long


class PlaceWait(NamedTuple):
    """How a queue would wait in a GPU group; of two, the less waits there better."""

    before: float
    """Seconds until a swap to its model can begin: infinite if none can, 0 if the policy alone decides."""
    rank: PlaceRank


NOWHERE = PlaceWait(math.inf, PlaceRank(True, math.inf, 0, (), ""))


def nearest(states: Sequence[G], model: Model, now: float) -> G:
    """The GPU group in which a queue of ``model`` is to stand: the one with the least ``PlaceWait``."""
    if len(states) == 1:
        return states[0]
    return min(states, key=lambda state: place_wait(state, model, now))


def place_wait(state: GroupState, model: Model, now: float) -> PlaceWait:
    """How a queue of ``model`` would wait here."""
    slots = _able(state, model, now)
    if state.unseen or not slots or all_obstacles(state, slots, now) is not None:
        return NOWHERE
    busy = state.busy_gpus()
    busy |= _reserved_before(state, model, busy, now)
    soonest = min([_slot_wait(state, slot, busy, now) for slot in slots])
    wakes = (state.host.wake_timeout or 0.0) if state.host.is_lost else 0.0
    return soonest._replace(before=soonest.before + wakes)


def _able(state: GroupState, model: Model, now: float) -> list[Slot]:
    """Return the backends of a model here that a queue may wait for."""
    slots = state.own(model)
    return [slot for slot in slots if slot.host.is_awaited(now) and not (slot.host.is_away or slot.leaving)]


def _reserved_before(state: GroupState, model: Model, busy: set[str], now: float) -> set[str]:
    """Return the GPUs that overdue queues get here before the queue of ``model``, or wait for."""
    taken = set(busy)
    is_overdue = bool(model.queue.tickets) and model.queue.overdue_at <= now
    for other in waiting(state):
        if taken >= state.placement.capacity.keys():
            break
        if other is model or other.queue.overdue_at > now or (is_overdue and age(model) < age(other)):
            continue
        if planned := plan(state, other, taken, now):
            taken |= planned.gpus
        else:
            taken.update(gpu for slot in reserved(state, other, taken, now) for gpu in slot.holds)
    return taken - busy


def _slot_wait(state: GroupState, slot: Slot, busy: set[str], now: float) -> PlaceWait:
    """The same for one backend."""
    model = state.models[slot.model]
    able = slot.is_loadable(now) and model.may_come(slot) and not state.left_gpu(slot)
    leaving = victims(state, slot, busy, frozenset(), now) if able else None
    if leaving is None:
        rank = PlaceRank(True, _swap_seconds_later(state, slot), 0, *order(slot))
        before = math.inf if _is_blocked(state, slot) else _seconds_before(state, slot, now)
        return PlaceWait(before, rank)
    is_overdue = model.queue.tickets and model.queue.overdue_at <= now
    before = 0.0 if is_overdue else max([0.0, *(each.stays_until - now for each in leaving)])
    return PlaceWait(before, place_rank(state, slot, leaving))


def _seconds_before(state: GroupState, slot: Slot, now: float) -> float:
    """How long it takes until a backend may be loaded which may not be now, but for its own swap."""
    if slot.coming or slot.serves:
        return 0.0
    longest = slot.retry_at - now if slot.state == "stopped" else 0.0
    before = [swap for swap in state.swaps if not slot.holds.keys().isdisjoint(swap.gpus())]
    for swap in before:
        if is_unwanted(state, swap, now):
            continue  # its load is cancelled for this queue
        load = cost_of(state, swap, swap.target).seconds if swap.target else 0.0
        longest = max(longest, usual_drain(state, swap.victims) + load)
    if any(is_unwanted(state, swap, now) for swap in before):
        longest = max(longest, CANCEL_SECONDS)
    return longest if longest > 0.0 else math.inf


def _is_blocked(state: GroupState, slot: Slot) -> bool:
    """Return whether a backend on the GPUs of ``slot``, or itself, is being evicted for nobody, or itself is
    paused by hand.

    What has been stuck, or was unloaded by hand, is evicted for nobody: nothing can be planned with it before
    that has ended, as well as it may.
    """
    return bool(slot.paused_as) or any(
        each.state == "evicting"
        and not each.holds.keys().isdisjoint(slot.holds)
        and not any(each in swap.victims for swap in state.swaps)
        for each in state.slots.values()
    )


def _swap_seconds_later(state: GroupState, slot: Slot) -> float:
    """How long a swap takes to a backend whose GPUs are in other swaps: their targets are in use by then."""
    goals = [swap.target for swap in state.swaps if swap.target and swap.target is not slot]
    others = [goal for goal in goals if goal.holds.keys() & slot.holds.keys()]
    swapped = state.cost([other.model for other in others], slot, slot.load_level)
    return usual_drain(state, others, leases=1) + swapped.seconds


def reserved(state: GroupState, model: Model, busy: set[str], now: float) -> list[Slot]:
    """Return the backend whose GPUs are kept for an overdue queue that must wait on, if any are.

    It is the one that can be loaded first, in the order in which queues choose GPU groups
    (``PlaceWait``): what is kept does not depend on which GPUs others tie together. None is kept that cools
    down, or waits for a drain without a bound: its other GPUs would be idle for as long as that takes.
    """
    able = _able(state, model, now)
    slots = [slot for slot in able if slot.state != "stopped" or state.reached(slot.retry_at, now)]
    if not slots:
        return []
    first = min(slots, key=lambda slot: _slot_wait(state, slot, busy, now))
    drained = [each for swap in state.swaps for each in swap.victims]
    is_endless = any(each.is_endless and each.holds.keys() & first.holds.keys() for each in drained)
    return [] if is_endless else [first]


# When it is overdue


class Bound(NamedTuple):
    """The bound of a queue that begins, and what it was computed from."""

    seconds: float
    """The time after which the queue is overdue."""
    load_seconds: float
    """The time that the load of its model is expected to take."""
    swap_seconds: float
    """The time that a swap to its model would take now, the drain included."""


def bound(state: GroupState, model: Model, now: float) -> Bound:
    """After how many seconds a queue that begins now is overdue: in time to be loaded, if it can be."""
    load_seconds = min(
        [state.costs.load_seconds(slot, slot.load_level) for slot in state.own(model)], default=0.0
    )
    one = round_seconds(state, model, load_seconds) if model.settings.follows_load else 0.0
    timeout, soonest = state.config.queue_timeout, math.inf
    enough = timeout - most_seconds(model.settings, one) - one
    for each in state.groups_of(model) if model.is_spread else (state,):
        soonest = min(soonest, _swap_seconds(each, model, now))
        if soonest <= enough:
            break  # an even shorter one makes no difference
    return Bound(bound_seconds(model.settings, one, timeout - soonest), load_seconds, soonest)


def _swap_seconds(state: GroupState, model: Model, now: float) -> float:
    """How long it will take to have ``model`` here if its victims are in use when that begins."""
    slots = [slot for slot in state.own(model) if slot.host.is_awaited(now)]
    loadable = [] if model.ready else [slot for slot in slots if slot.is_loadable(now)]
    if found := choose(state, loadable, state.busy_gpus(), now, frozenset()):
        return seconds_to_load(state, *found, leases=1)
    return min([_swap_seconds_later(state, slot) for slot in slots], default=math.inf)


def round_seconds(state: GroupState, model: Model, load_seconds: float) -> float:
    """How long the loads of a round take that ends with that of ``model``, as far as is known."""
    waiting = {
        each.name: state.gpus_of(each)
        for each in state.models.values()
        if each is not model and state.lacks_load(each)
    }
    others = in_round(state.gpus_of(model), waiting)
    return load_seconds + math.fsum([state.models[name].queue.load_seconds for name in others])


def in_round(gpus: Set[str], waiting: Mapping[str, Set[str]]) -> list[str]:
    """The models that wait for some of these ``gpus``, or for a GPU for which one of these waits.

    ``waiting``: a model that waits -> the GPUs of its backends.
    """
    found: list[str] = []
    left, reached = dict(waiting), set(gpus)
    while more := [name for name, own in left.items() if not reached.isdisjoint(own)]:
        found += more
        reached.update(*[left.pop(name) for name in more])
    return found


def most_seconds(settings: ModelSettings, one: float) -> float:
    """The bound of a queue whose round takes the seconds of ``one``, if there is time enough."""
    if not settings.follows_load:
        return settings.max_wait
    return min(settings.max_wait, max(one + min(one, CHOICE_SECONDS), LEAST_SECONDS))


def bound_seconds(settings: ModelSettings, one: float, latest: float) -> float:
    """The bound if a swap must begin within ``latest`` seconds, or one round before that with ``auto``."""
    most = most_seconds(settings, one)
    if settings.follows_load and most > LEAST_SECONDS:
        most = max(min(most, latest - one), LEAST_SECONDS)
    return max(min(most, latest), 0.0)


# Too late


class RunningAnswer(NamedTuple):
    """An answer that runs, and that a swap waits for."""

    model: str
    request: str
    """The id of its request; its ticket, where that has none."""
    run_seconds: float

    @property
    def words(self) -> str:
        return f"request {self.request} of {self.model} has run for {span(self.run_seconds)}"


def answers(slots: Iterable[Slot], now: float) -> tuple[RunningAnswer, ...]:
    """The answers that run at these backends, the longest first."""
    found = [
        RunningAnswer(slot.model, ticket.request or f"#{ticket.id}", now - since)
        for slot in slots
        for ticket, since in slot.holders.items()
    ]
    return tuple(sorted(found, key=lambda each: -each.run_seconds)[:MOST_ANSWERS])


class _Prospect(NamedTuple):
    """The soonest that a backend could be loaded."""

    drain_seconds: float = 0.0
    load_seconds: float = 0.0
    before: tuple[Slot, ...] = ()
    """The backends whose answers are waited for."""


def too_late(state: GroupState, model: Model, now: float) -> WouldWaitTooLong | None:
    """Why a request that comes now could not be served in time: answers that a swap may not sever."""
    states = state.groups_of(model)
    if model.ready or not any(each.patient for each in states):
        return None
    found = [
        _prospect(each, slot, now)
        for each in states
        for slot in each.own(model)
        if slot.host.takes_loads and not slot.leaving
    ]
    soonest = min(found, key=lambda each: each.drain_seconds + each.load_seconds, default=_Prospect())
    seconds, limit = soonest.drain_seconds + soonest.load_seconds, state.config.queue_timeout
    if not soonest.drain_seconds or not soonest.load_seconds <= limit < seconds:
        return None
    [first, *_] = answers(soonest.before, now)
    text = (
        f"{model.name} would wait longer than queue_timeout ({limit:g} s): {first.words}, and may finish "
        f"first (drain_timeout). It can be loaded in about {span(seconds)}."
    )
    return WouldWaitTooLong(text, retry_after=seconds - limit)


def _prospect(state: GroupState, slot: Slot, now: float) -> _Prospect:
    """The soonest that a backend could be loaded, whatever the policy says."""
    if slot.state in (*LOADING, "ready"):
        return _Prospect()
    seconds = state.costs.load_seconds(slot, slot.load_level)
    if swap := state.swap_to(slot):
        before = swap.victims
    elif swaps := [each for each in state.swaps if not slot.holds.keys().isdisjoint(each.gpus())]:
        before = [victim for each in swaps for victim in each.victims]
        others = [each.target for each in swaps if each.target]
        seconds += max([state.costs.load_seconds(other, other.level) for other in others], default=0.0)
    else:
        before = victims(state, slot, state.busy_gpus(), frozenset(), now) or []
    own = [each for each in before if each in state.patient and each.holders]
    return _Prospect(drain_seconds(state, own, now), seconds, tuple(own))


# Why no backend of a model can be loaded


def refusal(state: GroupState, model: Model, now: float) -> MuxError | None:
    """Why no backend of ``model`` can be loaded; None if one can, or is loading or being evicted."""
    if model.slots[0].backend.url:
        return None  # nothing of ours is in the way of a server elsewhere
    pause = state.host.pause
    if pause.refuses:
        return pause.error(now)
    errors: dict[tuple[tuple[str, ...], str], MuxError] = {}
    away: dict[HostRecord, None] = {}
    for each in state.groups_of(model):
        own = each.own(model)
        able = [slot for slot in own if slot.host.is_awaited(now)]
        away.update({slot.host: None for slot in own if not slot.host.is_awaited(now)})
        if not able:
            continue
        error = all_obstacles(each, able, now)
        if error is None:
            return None
        errors[order(able[0])] = error
    if errors:
        return errors[min(errors)]  # whatever groups they are in
    return unavailable(model.name, list(away), now) if away else None


def unavailable(model: str, hosts: Sequence[HostRecord], now: float) -> MuxError:
    """The error of a request for a model none of whose hosts can have it."""
    whys = [_why_away(host, now) for host in hosts[:MOST_HOSTS]]
    more = f", and so on for {len(hosts) - MOST_HOSTS} more hosts" if len(hosts) > MOST_HOSTS else ""
    return HostUnavailable(f"{model} has no host to run on now: {', '.join(whys)}{more}.")


def _why_away(host: HostRecord, now: float) -> str:
    name = host.name or LOCAL
    if not host.is_lost:
        return f"{name} is drained"
    why = f" ({host.why})" if host.why else ""
    unwoken = f", and did not wake: {host.wake_error}" if host.wake_error else ""
    return f"{name} has been lost for {now - host.since:.0f} s{why}{unwoken}"


def all_obstacles(state: GroupState, slots: Sequence[Slot], now: float) -> MuxError | None:
    """The same for some backends of a model in this GPU group, whose hosts take loads."""
    first: MuxError | None = None
    for slot in slots:
        error = _obstacle(state, slot, now)
        if error is None:
            return None
        first = first or error
    return first


def _obstacle(state: GroupState, slot: Slot, now: float) -> MuxError | None:
    if slot.paused_as and slot.state == "ready":
        return BackendPaused(slot.pause_words)
    if (gpu := state.left_gpu(slot)) and slot.state not in STAYING:
        theirs = f"other programs hold {gib(state.placement.others[gpu])} of GPU {gpu}"
        return GpuMemoryShort(f"{slot.name} is not loaded: {theirs}, which is left to them (`yield`).")
    if slot.state not in ("stopped", "standby", "stuck") or (slot.leaving and slot.state != "stuck"):
        return None
    if state.host.is_away and not state.host.name:  # whoever waits for another host is told that by `why`
        return HostUnavailable(f"{slot.name} cannot be loaded now: {state.host.why}")
    for other in state.slots.values():
        if other.state == "stuck" and (other is slot or other.holds.keys() & slot.holds.keys()):
            return _stuck(other, slot, now)
    if slot.state == "stopped" and slot.retry_at > now:
        pause = slot.retry_at - now
        what = "ended" if slot.failed_starts == slot.crashes else "failed to load"
        text = f"{slot.name} {what} and is not tried again for {pause:.0f} s: {slot.error}"
        return LoadError(text, log=slot.log, retry_after=pause)
    if why := state.placement.missing_gpu(slot):
        return GpuMissing(f"{slot.name} cannot be loaded: {why}.")
    why = state.placement.never_fits(slot) or state.memory.never_fits(slot)
    if why:
        return DoesNotFit(f"{slot.name} cannot be loaded: {why}.")
    asleep = [other for other in state.placement.irremovable(slot) if other.state == "standby"]
    return _stuck(min(asleep, key=lambda other: other.retry_at), slot, now) if asleep else None


def _stuck(other: Slot, slot: Slot, now: float) -> Stuck:
    """The error for a backend that cannot be loaded because another, or itself, could not be stopped."""
    whose = "" if other is slot else f" and holds a GPU of {slot.model}"
    text = f"{other.name} could not be stopped{whose}: {other.error}"
    return Stuck(text, retry_after=other.retry_at - now)


def lack_of_memory(state: GroupState, model: Model, busy: set[str], now: float) -> MuxError | None:
    """Why an overdue queue is not served: the memory is held by others than this GPU group's backends.

    Other GPU groups are asked to free host memory that a backend lacks; None if they will.
    """
    may_go = ("ready", "draining", "evicting")
    others = [slot for slot in state.slots.values() if slot.state in may_go and not slot.pinned]
    first: MuxError | None = None
    for slot in [slot for slot in state.own(model) if slot.host.is_awaited(now) and slot.state != "stuck"]:
        if slot.state not in ("stopped", "standby") or not busy.isdisjoint(slot.holds):
            return None  # its turn comes
        error = _obstacle(state, slot, now) or _lack_of(state, slot, others, now)
        if error is None:
            return None
        first = first or error
    return first


def _lack_of(state: GroupState, slot: Slot, others: Sequence[Slot], now: float) -> MuxError | None:
    """The same for one backend; ``others``: those of its GPU group that could make room for it."""
    if lack := state.placement.others_before(slot):
        return GpuMemoryShort(f"{slot.name} cannot be loaded: {lack}.")
    short = state.memory.short(slot, others)
    if short > 0 and not state.memory.call(slot, short, state.slots.values(), now):
        who = ", ".join(f"{name} has {gib(each)}" for name, each in state.memory.insisting(slot))
        return HostMemoryShort(f"{slot.name} lacks {gib(short)} of host memory: {who}.")
    return None


def no_room_to_wait(model: Model, waiting: int, most: int) -> Overloaded | None:
    """Why one more request may not wait for ``model``; ``waiting``: how many do for all, of ``most``."""
    if model.is_queue_full:
        text = f"overloaded: the queue of {model.name} is full: {len(model.queue)} waiting (its max_queue)."
    elif waiting >= most and model.queue.tickets:  # one may always wait: its GPU may be free
        text = f"overloaded: the queues of all models together are full: {waiting} waiting (max_queue)."
    else:
        return None
    return Overloaded(f"{text} Try again.")


def not_resident(state: GroupState, model: str, now: float) -> MuxError:
    """The error of a request that may force no swap: its model is not there, or nothing is."""
    pause = state.host.pause
    if pause.refuses:
        return pause.error(now)
    return NothingResident(f"{model} is not loaded, and this request does not allow a swap (swap: never).")


def of_crashes(ticket: Ticket) -> MuxError | None:
    """Why a request is refused under which backends ended: it may be what ends them."""
    if len(ticket.crashes) < MOST_CRASHES:
        return None
    *_, last = ticket.crashes
    often = f"{len(ticket.crashes)} engines ended while they worked on this request, so it is not sent again"
    return Crashed(f"{often}: {last.backend} {last.why}.", log=last.log)


def nobody_takes(model: str) -> Overloaded:
    return Overloaded(
        f"overloaded: the routing policy of {model} lets none of its replicas take more. Try again."
    )
