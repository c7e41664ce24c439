"""One GPU group's state machine: facts in, next step out.

A GPU group is a set of GPUs of one host, tied together by some backend that needs several of them. A model
may have backends in several GPU groups, of one host or of several: they share its queue, which stands in one
of them at a time (layout.py). A ``GpuGroup`` takes facts, and answers one question, ``next_step(now)``, which
is asked until it answers ``Wait``. It performs nothing: whoever drives the scheduler performs the steps and
reports how they ended. It has no lock, no clock and no I/O; calls must not overlap.

It is one object in six layers, each a module that builds on those before it:

    state.py       what stands still: models, slots (slot.py), swaps under way
    admission.py   leases, queues, failures: every end of a ticket
    swaps.py       how swaps begin, go on and end; states of backends, events and steps
    upkeep.py      what happens to backends although no queue needs their GPUs
    facts.py       the facts about backends, about their host, and from people
    group.py       the next step, or until when there is none

The next step is looked for in this order: swaps under way go on, upkeep is done, the oldest overdue queue
gets its swap, a queue of higher priority takes over the drain for a lower one, the policy is asked, a load
that no request waits for any more is cancelled for a queue, and a preload is begun, first for clients who say
that they will ask for a model. Which backends could be loaded, and whom they evict, planner.py says; what the
policy is shown, ``snapshot``. The policy proposes, the group disposes: an overdue queue waits for no policy,
and the GPUs that it needs go to no younger queue meanwhile.

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
    queue needs its GPUs. Preloads are cancelled by hand only, but for that of a home backend (upkeep.py) and
    that of a hint, which make way for a queue. If a target that nobody waits for any more does not fit
    although its victims have left, no others go for it: the swap ends. Requests that wait behind others at a
    busy replica count as waiting for another replica, if no queue waits for its GPUs; so do those in the
    queue of a resident model whose backends take only so many at once.
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
11. While it is not known of some backend whether it runs already (``unseen``), nothing is begun.

A backend that the configuration has no longer, or not as it is (``retire``), is leaving: it gets no new
leases, is drained and stopped, whatever its standby levels, and its slot is left for good. Then layout.py
fills the GPU group anew: another slot may take the place of that one; the queue waits on.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from anvil_mux.scheduler.events import POLICY, Cause, Event, is_decided, mistake
from anvil_mux.scheduler.facts import HINT_SECONDS, GroupFacts
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.planner import Plan, plan, spills, takeover, victims, waiting
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
from anvil_mux.scheduler.queueing import lack_of_memory, nearest, reserved
from anvil_mux.scheduler.slot import LOADING, Slot
from anvil_mux.scheduler.state import Deferred, GroupState, SwapInProgress
from anvil_mux.scheduler.steps import Step, Ticket, Wait
from anvil_mux.scheduler.upkeep import Preload

SHORTEST_DEFERRAL = 1.0
"""Seconds for which a swap is held back before that is announced, and before it is announced again."""


@dataclass(eq=False, slots=True)
class GpuGroup(GroupFacts):
    """One GPU group: what to begin, and when. Only ``Scheduler`` tells it facts."""

    _plans: dict[str, Plan] = field(init=False, default_factory=dict)
    """The swaps that could begin now; set anew before the policy is asked."""
    _ask_again: float = field(init=False, default=FOREVER)
    """When the policy is asked again."""
    _announce: dict[Ticket, float] = field(init=False, default_factory=dict)
    """The first tickets of queues whose swaps are held back, and when that is announced (again)."""

    def __repr__(self) -> str:
        slots = ", ".join(f"{s.name}: {s.state} {len(s.holders)} leases" for s in self.slots.values())
        waiting = {model.name: len(model.queue) for model in self.models.values() if model.queue}
        queues = ", ".join(f"{name}: {count} waiting" for name, count in waiting.items())
        return f"<GpuGroup {self.name} [{slots}] [{queues}]>"

    @property
    def leaving(self) -> list[Slot]:
        """The backends that are to go for good, and have not left yet."""
        return [slot for slot in self.slots.values() if slot.leaving and not slot.is_left]

    @property
    def is_outgrown(self) -> bool:
        """Whether a slot was left for good: the GPU group is to be filled anew."""
        return any(slot.is_left for slot in self.slots.values())

    def begin_anew(self, now: float) -> None:
        """The configuration is another: plan and announce anew; lease or fail what can be now."""
        self._announce, self.deferred = {}, {}
        self.changed()
        for model in self.models.values():
            if model.queue.tickets and model.ready:
                self.admit(model, now)
        self.fail_refused(now)

    def next_step(self, now: float) -> Step | Wait:
        """Return the step to perform now, each once, or until when to wait."""
        if self.unseen:
            return Wait(FOREVER)
        if self.is_out_of_reach:
            return self.advance(now) or Wait(FOREVER)
        self.clear(now)
        if self.bounded:
            self.give_up_surplus(now)
        while True:
            step = self.advance(now) if self.swaps else None
            step = step or self.upkeep_step(now)
            if step:
                return step
            models = waiting(self)
            if not (
                self.evict_idle(now)
                or self._begin_swap(models, now)
                or self._cancel_unwanted(models, now)
                or (not (models or self.swaps) and (self._begin_hinted(now) or self.begin_preload(now)))
            ):
                return self._wait(self._next_moment(models, now), now)

    def _wait(self, until: float, now: float) -> Wait:
        if mistake := self.placement.mistake:
            self.placement.mistake = ""
            self._blame(self.common.settings.eviction, Cause("eviction_failed", detail=mistake), now)
        soonest = self._ask_again if now < self._ask_again < until else until
        return Wait(soonest, min([at for at in self._announce.values() if at > now], default=FOREVER))

    def _next_moment(self, models: list[Model], now: float) -> float:
        """When the answer of ``next_step`` may change without a new fact, whatever the policy says."""
        moments = [model.queue.overdue_at for model in models]
        moments += self.upkeep_moments(now)
        for slot in self.stayers if models or self.preloads or self.common.hints else ():
            moments.append(slot.stays_until)
        for swap in self.swaps:
            moments += [victim.drain_until for victim in swap.victims if victim.state == "draining"]
        for slot in self.slots.values():
            stuck, model = slot.state in ("stuck", "standby"), self.models[slot.model]
            if slot.retry_at > now and (stuck or model.queue.tickets):
                moments.append(slot.retry_at)
        return min([moment for moment in moments if moment > now], default=FOREVER)

    # Swaps

    def _begin_swap(self, models: list[Model], now: float) -> bool:
        """Begin at most one swap: that of the oldest overdue queue, else what the policy proposes."""
        busy = self.busy_gpus()
        if self._serve_overdue(models, busy, now):
            return True
        staying = self.staying(now) if self.stayers else set[str]()
        plans: dict[str, Plan] = {}
        held = []
        for model in models:
            if found := plan(self, model, busy, now, staying):
                plans[model.name] = found
            elif staying and (found := plan(self, model, busy, now)):
                held.append((model, found.victims))
        self._plans = plans
        if (self.swaps and self._begin_takeover(models, now)) or self._ask_policy(plans, now):
            return True
        if held and not plans:
            self._defer_for_stay(*held[0], now)
        return False

    def _begin_takeover(self, models: list[Model], now: float) -> bool:
        """Have a drain for one queue go on for another of higher priority, which could not begin otherwise.

        Overdue queues come first, the oldest of them before all others, and keep the GPUs that they wait for.
        """
        kept = set[str]()
        late = [model for model in models if model.queue.overdue_at <= now]
        others = [model for model in models if model not in late]
        for model in [*late, *sorted(others, key=attrgetter("priority"), reverse=True)]:
            if model.name not in self._plans and (found := takeover(self, model, kept, now)):
                self.take_over(found, now)
                return True
            if model in late:
                kept.update([gpu for slot in reserved(self, model, now) for gpu in slot.holds])
        return False

    def _serve_overdue(self, models: list[Model], busy: set[str], now: float) -> bool:
        """Serve the oldest overdue queue, or fail it; the GPUs of those that must wait on become ``busy``."""
        for model in models:
            if model.queue.overdue_at > now:
                continue
            if found := plan(self, model, busy, now):
                self.begin(found.target, found.victims, now, Cause("overdue"))
                return True
            if error := lack_of_memory(self, model, busy, now):
                self.fail_queue(model, error, now)
                return True
            for slot in reserved(self, model, now):
                busy.update(slot.holds)
        return False

    def _cancel_unwanted(self, models: list[Model], now: float) -> bool:
        """Cancel loads that no request waits for any more, if a queue could have their GPUs then."""
        unwanted = [swap for swap in self.swaps if self._is_unwanted(swap)] if models else []
        if not unwanted:
            return False
        loads = [swap.target for swap in unwanted if swap.target]
        busy = self.busy_gpus(but=unwanted)
        stays = self.staying(now)
        for model in models:
            staying = stays if model.queue.overdue_at > now else frozenset[str]()
            for slot in () if model.name in self._plans else self.loadable(model, now):
                there = [s for s in unwanted if s.target and s.target.holds.keys() & slot.holds.keys()]
                if there and victims(self, slot, busy, staying, now, without=loads) is not None:
                    for swap in there:
                        swap.cancel = Cause("unwanted", model.name)
                    return True
        return False

    def _is_unwanted(self, swap: SwapInProgress) -> bool:
        """Whether a swap loads a backend that no request waits for any more."""
        slot = swap.target
        if slot is None or slot.state != "loading" or swap.cancel:
            return False
        if swap.preload and swap.cause.kind not in ("home", "hinted"):
            return False
        return not (slot.pinned or self.models[slot.model].queue.tickets)

    # Hints

    def _begin_hinted(self, now: float) -> bool:
        """Begin a load that a client has hinted at, or the evictions that make room for it.

        Nobody waits for it. So it evicts only who is idle, whom a queue that began with the hint would evict
        by the policy's word, and nobody in standby; nor what was loaded for another hint a moment ago.
        """
        hints = self.common.hints
        for name in [name for name in hints if name in self.models]:
            model, since = self.models[name], hints[name]
            if model.ready or model.is_coming or model.queue.tickets or now >= since + HINT_SECONDS:
                del hints[name]
            elif model.is_spread and nearest(self.groups_of(model), model, now) is not self:
                continue
            elif found := plan(self, model, set(), now, self._unhinted(now)):
                if found.victims and self._may_evict_for(found, since, now):
                    self.preload(Preload(found.target, found.victims, Cause("make_room", name)), now)
                    return True
                if not found.victims and self.memory.has_room(found.target):
                    del hints[name]
                    self.preload(Preload(found.target, [], Cause("hinted")), now)
                    return True
        return False

    def _unhinted(self, now: float) -> set[str]:
        """The backends that are not evicted for a hint."""
        return self.staying(now) | {
            slot.name
            for slot in self.placement.active
            if slot.holders
            or slot.state == "standby"
            or self.models[slot.model].queue.tickets
            or not (slot.has_had_work or now >= slot.loaded + HINT_SECONDS)
        }

    def _may_evict_for(self, found: Plan, since: float, now: float) -> bool:
        """Whether the policy would evict them for a request that had come at the moment ``since``."""
        name = found.target.model
        contest = contests(self, {name: found})[0]
        seen = snapshot(self, now, contest.plans, here=contest.residents)
        queue = seen.queues[0]._replace(oldest=since, newest=since)
        decision = ask(self.policy, seen._replace(queues=(queue,)))
        if isinstance(decision, Stay):
            self._ask_again = min(self._ask_again, decision.until, decision.again)
        return isinstance(decision, SwapTo)

    # The policy

    def _ask_policy(self, plans: Mapping[str, Plan], now: float) -> bool:
        """Do what the policy says of each set of queues that compete; whether that was anything."""
        before, self.deferred, self._ask_again = self.deferred, {}, FOREVER
        for ticket in [ticket for ticket in self._announce if not self._waits(ticket)]:
            del self._announce[ticket]
        more = spills(self, now)
        if not (plans or more or self.ready):
            return False  # nothing to be loaded, nothing to be evicted
        apart = contests(self, plans)
        if more and apart[-1].plans:
            apart.append(Contest({}, ()))  # more replicas compete with no queue
        for each in apart:
            if self._decide(each, before, {} if each.plans else more, now):
                self.deferred = before | self.deferred
                return True
        return False

    def _decide(
        self,
        contest: Contest,
        before: Mapping[str, Deferred],
        more: Mapping[str, tuple[Plan, Spill]],
        now: float,
    ) -> bool:
        """Do what the policy says of queues that compete, or of more replicas; whether that was anything.

        Of the same queues and plans it is asked again only when its answer may be another: what becomes of
        them does not depend on how often something happens on other GPUs.
        """
        plans = contest.plans
        first = next(iter(plans), "")
        held, subject = before.get(first), contest.subject(self)
        if (
            held
            and held.contest == subject
            and not held.is_over
            and now < min(held.stay.until, held.stay.again)
        ):
            decision: Decision = held.stay
        else:
            spilling = [spill for _, spill in more.values()] if more else ()
            decision = ask(self.policy, snapshot(self, now, plans, spilling, here=contest.residents))
        if isinstance(decision, Stay):
            self._ask_again = min(self._ask_again, decision.until, decision.again)
            if decision.cause.kind == "policy_failed":
                self._blame(self.policy, decision.cause, now)
            if plans:
                self._defer(self.models[first], Deferred(decision, subject, contest.residents), now)
            return False
        if isinstance(decision, Unload):
            return self._unload(self.models[decision.model], decision.cause, now)
        found = plans.get(decision.model) or more[decision.model][0]
        self.begin(found.target, found.victims, now, decision.cause, preload=not plans)
        return True

    def _waits(self, ticket: Ticket) -> bool:
        model = self.models.get(ticket.model)
        return model is not None and ticket in model.queue.tickets

    def _blame(self, plugin: object, cause: Cause, now: float) -> None:
        """Report a mistake of a plug-in, the first of each."""
        blamed = self.common.blamed
        if blamed.get(cause.kind) is not plugin:
            blamed[cause.kind] = plugin
            self.emit(Event(now, "plugin_failed", "", cause=cause))

    def _unload(self, model: Model, cause: Cause, now: float) -> bool:
        slots = [slot for slot in self.own(model) if slot.state == "ready" and not slot.pinned]
        for slot in slots:
            self.begin_eviction(slot, now, cause, severs=POLICY)
        return bool(slots)

    def _defer_for_stay(self, model: Model, evicted: list[Slot], now: float) -> None:
        """Note that the queue of ``model`` waits for the min_residency of its victims."""
        stays = {slot.name: until for slot in evicted if (until := slot.stays_until) > now}
        until = min(max(stays.values()), model.queue.overdue_at)
        stay = Stay(until, Cause("min_residency", residents=tuple(stays)))
        self._defer(model, Deferred(stay, (), evicted), now)

    def _defer(self, model: Model, deferred: Deferred, now: float) -> None:
        """Note a swap that is held back, and announce it: once it has been, and when its time is over."""
        self.deferred[model.name] = deferred
        first, stay = model.queue.first, deferred.stay
        if now >= self._announce.setdefault(first, now + SHORTEST_DEFERRAL):
            self._announce[first] = max(stay.until, now + SHORTEST_DEFERRAL)
            size, left = len(model.queue.tickets), stay.until - now
            self.emit(
                Event(now, "deferred", model.name, ticket=first.id, size=size, seconds=left, cause=stay.cause)
            )


# What a policy is asked


class Contest(NamedTuple):
    """Queues that compete for GPUs, and what is resident there: a policy is asked about these together."""

    plans: Mapping[str, Plan]
    """Model -> the swap that could begin now, oldest queue first."""
    residents: Sequence[Slot]

    def subject(self, state: GroupState) -> tuple[Hashable, ...]:
        """All that a policy's answer depends on, but for time, leases, and what is learned."""
        queues = [(state.models[name].queue, found) for name, found in self.plans.items()]
        plans = [
            (found.target, *found.victims, len(queue), next(reversed(queue.tickets)))
            for queue, found in queues
        ]
        return (*self.residents, *plans)


def contests(state: GroupState, plans: Mapping[str, Plan]) -> list[Contest]:
    """The queues that could have their swaps now, apart where they need other GPUs and evict other backends.

    Those with the queue of the highest priority come first, then those with the oldest. Last come the
    residents that no queue could evict, if there are any.
    """
    order = sorted(plans, key=lambda name: -state.models[name].priority)
    apart: list[tuple[set[str], set[Hashable]]] = []
    for name in order:
        names, goods = {name}, set[Hashable]((*plans[name].target.holds, *plans[name].victims))
        for each in [each for each in apart if not each[1].isdisjoint(goods)]:
            apart.remove(each)
            names, goods = names | each[0], goods | each[1]
        apart.append((names, goods))
    found, left = [], state.ready
    for names, goods in sorted(apart, key=lambda each: min(map(order.index, each[0]))):
        there = [slot for slot in left if slot in goods or not slot.holds.keys().isdisjoint(goods)]
        left = [slot for slot in left if slot not in there]
        found.append(Contest({name: plans[name] for name in plans if name in names}, there))
    return [*found, Contest({}, left)] if left or not found else found


def snapshot(
    state: GroupState,
    now: float,
    plans: Mapping[str, Plan],
    spills: Iterable[Spill] = (),
    *,
    most: float = FOREVER,
    here: Sequence[Slot] | None = None,
) -> Snapshot:
    """Make the snapshot for a policy; ``plans`` are the swaps that could begin now, oldest queue first.

    An empty queue is shown as if a request had come now, whose bound were ``most``. ``here``: the residents
    that are shown; by default all.
    """
    residents = [_resident(state, slot, now) for slot in (state.ready if here is None else here)]
    queues = [_queue(state.models[name], found, now, most) for name, found in plans.items()]
    if len(queues) > 1:
        queues.sort(key=lambda queue: -queue.priority)
    swaps = [_swapping(swap, swap.target) for swap in state.swaps if swap.target] if state.swaps else ()
    return Snapshot(
        now, state.name, tuple(residents), tuple(queues), swapping=tuple(swaps), spills=tuple(spills)
    )


def _resident(state: GroupState, slot: Slot, now: float) -> Resident:
    loaded, backend = slot.loaded, slot.backend
    model = state.models[slot.model]
    demand = model.demand
    rate, growth = demand.rates(now)
    if model.is_spread:  # residents in several GPU groups share what comes
        rate, growth = rate / max(len(model.ready), 1), growth / max(len(model.ready), 1)
    way, host = backend.evict_to[0], slot.host.name
    reload_seconds = state.costs.estimate("", slot.model, way, backend.engine, host).load_seconds
    # By position, like the next: policies that hold swaps back ask for these tens of thousands of times.
    return Resident(
        slot.model,
        slot.name,
        loaded,
        len(slot.holders),
        slot.last_used if slot.last_used > loaded else loaded,
        rate,
        growth,
        demand.pause_seconds,
        demand.service_seconds,
        reload_seconds,
    )


def _swapping(swap: SwapInProgress, target: Slot) -> Swapping:
    moving = ("draining", "evicting", *LOADING)
    slots = [slot for slot in (*swap.victims, target) if slot.state in moving]
    state, since = (slots[0].state, slots[0].since) if slots else ("evicting", swap.emptied)
    return Swapping(target.model, swap.evicts, state, since)


def _queue(model: Model, found: Plan, now: float, most: float) -> Queue:
    tickets, demand, expected = model.queue.tickets, model.demand, found.cost
    count, oldest, newest = 1, now, now
    if tickets:
        count, oldest, newest = len(tickets), next(iter(tickets)).since, next(reversed(tickets)).since
        most = model.queue.bound
    _, growth = demand.rates(now, count, now - oldest)
    return Queue(
        model.name,
        count,
        oldest,
        newest,
        found.evicts,
        expected.evict_seconds,
        expected.load_seconds,
        expected.swaps > 0,
        growth,
        demand.service_seconds,
        most,
        model.priority,
        demand.longest,
    )


def ask(policy: Policy, seen: Snapshot) -> Decision:
    """Ask the policy; if it fails, or its answer is not sound as a whole, everything stays as it is."""
    try:
        decision = decide(policy, seen)
        _check(decision, seen)
        return decision
    except Exception as error:  # anybody's code; max_wait serves every queue all the same
        return Stay(cause=Cause("policy_failed", detail=mistake(error)))


def _check(decision: Decision, seen: Snapshot) -> None:
    """Raise TypeError or ValueError if any part of a decision is not what it has to be."""
    if isinstance(decision, Stay):
        for each in (decision.until, decision.leases, decision.again):
            if not isinstance(each, (int, float)) or math.isnan(each):
                raise TypeError(f"it says {decision!r}, and {each!r} is no number")
    elif isinstance(decision, SwapTo):
        _check_name(decision, [each.model for each in seen.queues] + [each.model for each in seen.spills])
    elif isinstance(decision, Unload):
        _check_name(decision, [each.model for each in seen.residents])
    else:
        raise TypeError(f"it answers {decision!r}, and none of Stay, SwapTo and Unload")
    if not is_decided(decision.cause):
        raise TypeError(f"its cause is {decision.cause!r}, and no Cause of a decision")


def _check_name(decision: SwapTo | Unload, models: list[str]) -> None:
    if not isinstance(decision.model, str) or decision.model not in models:
        raise ValueError(f"it says {decision!r}, and that is none of {', '.join(models) or 'no models'}")
