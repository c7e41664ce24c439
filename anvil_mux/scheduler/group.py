"""One GPU group's state machine: facts in, next step out.

A GPU group is a set of GPUs of one host, tied together by some backend that needs several of them. A model
may have backends in several GPU groups, of one host or of several: they share its queue, which stands in one
of them at a time (layout.py). A ``GpuGroup`` takes facts, and answers one question, ``next_step(now)``, which
is asked until it answers ``Wait``. It performs nothing: whoever drives the scheduler performs the steps and
reports how they ended. It has no lock, no clock and no I/O; calls must not overlap.

It is one object in five layers, each a module that builds on those before it:

    state.py       what stands still: models, slots (slot.py), swaps under way; plans for others
    admission.py   leases, queues, failures: every end of a ticket
    swaps.py       how swaps begin, go on and end; states of backends, their steps, and how these ended
    facts.py       the other facts about backends, about their host, and from people
    group.py       the next step, or until when there is none

The next step is looked for in this order: swaps under way go on, upkeep is done, the oldest overdue queue
gets its swap, a queue of higher priority takes over the drain for a lower one, the policy is asked, a load
that no request waits for any more is cancelled for a queue, and a preload is begun, first for clients who say
that they will ask for a model. Which backends could be loaded, and whom they evict, state.py says; what the
policy is shown, ``snapshot``. The policy proposes, the group disposes: an overdue queue waits for no policy,
and the GPUs that it needs go to no younger queue meanwhile.

Upkeep is what happens to backends although no queue needs their GPUs, preloads included. Backends
that could not be stopped are stopped again; those in standby are demoted when their time has come or host
memory is short; idle residents are evicted after their ``ttl``, or for a queue of another GPU group that
lacks host memory. All go that are on a host that is cleared, or on a GPU that is left to other programs.

Loads for which no request waits are begun only while no queue waits and no swap is under way, and stop no
backend in standby:

* Preloads are of backends that are configured so, and of stages that a model in use lacks. They evict no
  backend that has had work. Of a model with a ``most`` so many backends are preloaded, where there is room
  first.
* A hint says that a client will ask for a model soon: see ``_next_hinted``.
* A home backend comes back when nothing else was wanted on its GPUs for a while: the residents that must go
  for it have no lease, and were not used for ``home_after``. Once its load has failed, or it was unloaded by
  hand, it waits until a request has loaded it.
* A backend that made way for other programs comes back in the same way once they have left its GPUs for that
  long, where there is room.

Two other such loads are begun elsewhere: one that wakes a backend on its way to a deeper standby level, and
another replica of a busy model (``_ask_policy``).

Invariants:
 1. The GPUs a backend needs are its own from ``Load`` until its ``evicted``; the sum of what residents and
    standby residuals hold never exceeds a GPU. Without declared memory a backend needs the whole GPU.
 2. A lease is granted only in ready. Draining closes the gate; later requests queue behind the swap.
 3. Every ticket ends exactly once: leased, failed or gone.
 4. A drain lasts at most the victim's ``drain_timeout``, which may be without end, or the one of the whole
    where people ask for it; what is left is severed, counted, logged.
 5. When a model becomes ready its whole queue, or as much of it as there are places, is leased before the
    policy is asked again; so is the next in queue whenever a place becomes free.
 6. Nothing is begun, drained further, evicted or loaded for a queue that has departed: a swap ends
    with its queue until its load begins. Victims that drain are reprieved, those that are being
    evicted are waited for, and a target in standby stays there. So ends a drain whose queue is
    loaded instead on GPUs that nobody holds. A queue of higher priority takes a drain over, but not
    that for an overdue queue, nor that of its own model's backend. A load under way is finished,
    unless it is cancelled: when it is unloaded by hand (requests that wait for it fail), or when no
    request waits for it (any more), preloads included, and a queue needs its GPUs. Requests
    that wait behind others at a busy replica count as waiting for another replica, if no queue
    waits for its GPUs; so do those in the queue of a resident model whose backends take only so
    many at once.
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
12. Asking early changes nothing: between two facts ``next_step`` has the same answer until the moment
    that it named. Whatever depends on the time asks ``reached``, which remembers the moment.

A backend that the configuration has no longer, or not as it is (``retire``), is leaving: it gets no new
leases, is drained and stopped, whatever its standby levels, and its slot is left for good. Then layout.py
fills the GPU group anew: another slot may take the place of that one; the queue waits on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from anvil_mux.config.kinds import gib
from anvil_mux.scheduler.admission import lack_of_memory, nearest, reserved
from anvil_mux.scheduler.events import PAUSED, POLICY, UNLOADED, Cause, Event
from anvil_mux.scheduler.facts import HINT_SECONDS, GroupFacts
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.policies import (
    FOREVER,
    Decision,
    Queue,
    Resident,
    Snapshot,
    Spill,
    Stay,
    Swapping,
    SwapTo,
    Unload,
    ask,
)
from anvil_mux.scheduler.slot import DESCENTS, LOADING, Slot, Step, Ticket, Wait
from anvil_mux.scheduler.state import (
    Deferred,
    GroupState,
    Plan,
    SwapInProgress,
    is_unwanted,
    plan,
    spills,
    takeover,
    victims,
    waiting,
)

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
        self._announce, self.deferred, self.deferred_hints = {}, {}, {}
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
        while True:
            self.soonest = FOREVER
            self._clear(now)
            if self.bounded:
                self._give_up_surplus(now)
            under_way = len(self.swaps)
            step = self.advance(now) if self.swaps else None
            if step := step or self._retry_stuck(now) or self._demote_due(now):
                return step
            if len(self.swaps) < under_way:
                continue  # who was reprieved may have to go for another reason
            models = waiting(self)
            if not (
                self._evict_idle(now)
                or self._begin_swap(models, now)
                or self._cancel_unwanted(models, now)
                or (not (models or self.swaps) and self._begin_preload(now))
            ):
                return self._wait(now)

    def _wait(self, now: float) -> Wait:
        if mistake := self.placement.mistake:
            self.placement.mistake = ""
            self._blame(self.common.settings.eviction, Cause("eviction_failed", detail=mistake), now)
        self.reached(self._ask_again, now)
        announced_at = min([at for at in self._announce.values() if at > now], default=FOREVER)
        return Wait(self.soonest, announced_at)

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
        late = [model for model in models if self.reached(model.queue.overdue_at, now)]
        others = [model for model in models if model not in late]
        for model in [*late, *sorted(others, key=attrgetter("priority"), reverse=True)]:
            if model.name not in self._plans and (found := takeover(self, model, kept, now)):
                self.take_over(found, now)
                return True
            if model in late:
                for slot in reserved(self, model, self.busy_gpus(), now):
                    kept.update(slot.holds)
        return False

    def _serve_overdue(self, models: list[Model], busy: set[str], now: float) -> bool:
        """Serve the oldest overdue queue, or fail it; the GPUs of those that must wait on become ``busy``."""
        for model in models:
            if not self.reached(model.queue.overdue_at, now):
                continue
            if found := plan(self, model, busy, now):
                self.begin(found.target, found.victims, now, Cause("overdue"))
                return True
            if error := lack_of_memory(self, model, busy, now):
                self.fail_queue(model, error, now)
                return True
            for slot in reserved(self, model, busy, now):
                busy.update(slot.holds)
        return False

    def _cancel_unwanted(self, models: list[Model], now: float) -> bool:
        """Cancel loads that no request waits for any more, if a queue could have their GPUs then."""
        unwanted = [swap for swap in self.swaps if is_unwanted(self, swap, now)] if models else []
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

    # Hints

    def _next_hinted(self, now: float) -> Preload | None:
        """The next load that a client has hinted at.

        Nobody waits for it. So it evicts only who is idle, whom a queue that began with the hint would evict
        by the policy's word, and nobody in standby; nor what was loaded for another hint a moment ago.
        """
        hints = self.common.hints
        before, self.deferred_hints = self.deferred_hints, {}
        for name in [name for name in hints if name in self.models]:
            model, since = self.models[name], hints[name]
            is_over = model.ready or model.is_coming or model.queue.tickets
            if is_over or self.reached(since + HINT_SECONDS, now):
                del hints[name]
            elif any(swap.cause == Cause("make_room", name) for swap in self.swaps_of(model)):
                continue  # nobody else goes for it meanwhile
            elif model.is_spread and nearest(self.groups_of(model), model, now) is not self:
                continue
            elif planned := plan(self, model, set(), now, self._unhinted(now)):
                if planned.victims and self._may_evict_for(planned, since, before.get(name), now):
                    return Preload(planned.target, planned.victims, Cause("make_room", name))
                if not planned.victims and self.memory.has_room(planned.target):
                    del hints[name]
                    return Preload(planned.target, [], Cause("hinted"))
        return None

    def _unhinted(self, now: float) -> set[str]:
        """The backends that are not evicted for a hint."""
        return self.staying(now) | {
            slot.name
            for slot in self.placement.active
            if slot.holders
            or slot.state == "standby"
            or self.models[slot.model].queue.tickets
            or not (slot.has_had_work or self.reached(slot.loaded + HINT_SECONDS, now))
        }

    def _may_evict_for(self, planned: Plan, since: float, held: Deferred | None, now: float) -> bool:
        """Return whether the policy would evict the victims for a request that had come at ``since``.

        ``held``: its last answer, if that was to wait: as for queues, it holds for the same plan.
        """
        name = planned.target.model
        contest = contests(self, {name: planned})[0]
        subject = (since, planned.target, *planned.victims, *contest.residents)
        if held and held.contest == subject and held.holds_at(now):
            decision: Decision = held.stay
        else:
            seen = snapshot(self, now, contest.plans, here=contest.residents)
            queue = seen.queues[0]._replace(oldest=since, newest=since)
            decision = ask(self.policy, seen._replace(queues=(queue,)))
        if isinstance(decision, Stay):
            self._ask_again = min(self._ask_again, decision.until, decision.again)
            self.deferred_hints[name] = Deferred(decision, subject, contest.residents)
        return isinstance(decision, SwapTo)

    # The policy

    def _ask_policy(self, plans: Mapping[str, Plan], now: float) -> bool:
        """Do what the policy says of each set of queues that compete; whether that was anything."""
        before, self.deferred, self._ask_again = self.deferred, {}, FOREVER
        for ticket in [ticket for ticket in self._announce if not self._waits(ticket)]:
            del self._announce[ticket]
        for slot in self.slots.values():  # spills, free places and the memory of hosts depend on these
            if slot.state == "standby" or self.models[slot.model].replicas:
                self.reached(slot.retry_at, now)
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
        if held and held.contest == subject and held.holds_at(now):
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
        """Evict what the policy unloads; nothing of ours runs on an external server."""
        own = [slot for slot in self.own(model) if not (slot.pinned or slot.backend.url)]
        slots = [slot for slot in own if slot.state == "ready"]
        for slot in slots:
            self.begin(None, [slot], now, cause, severs=POLICY)
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

    # Upkeep

    def _retry_stuck(self, now: float) -> Step | None:
        for slot in self.slots.values():
            if slot.state != "stuck" and slot.next_level != "stop":
                continue
            if not self.reached(slot.retry_at, now):
                continue
            if slot.state == "stuck":
                return self.evict(slot, now, Cause("retry_stuck"))
            if self.may_be_stopped(slot):
                why = self._why_stopped(slot)
                return self.demote(slot, now, Cause("retry_stuck") if slot.failed_stops else why)
        return None

    def _why_stopped(self, slot: Slot) -> Cause:
        if slot.leaving:
            return Cause(slot.leaving)
        return self._why_gone(slot) if self.must_go(slot) else UNLOADED

    def _demote_due(self, now: float) -> Step | None:
        """Demote a backend that has been at its level for long enough, or because host memory is short."""
        found = self.memory.yields(now)
        if found is not None and found is self.slots.get(found.name):
            return self.demote(found, now, Cause("host_memory_short"), to=self.memory.lower(found))
        for slot in self.sleepers:
            until = slot.demoted_at
            if until is None or slot.coming or self.models[slot.model].queue.tickets:
                continue
            if not self.reached(until, now):
                continue
            if DESCENTS.get((slot.level, to := slot.below(may_wake=self._is_calm(slot)))):
                slot.next_level = to
                self.begin(slot, [], now, Cause("wake_to_demote", way=to), preload=True)
                return self.advance(now)
            cause = Cause("demote_timer", way=slot.level, seconds=now - slot.since)
            return self.demote(slot, now, cause)
        return None

    def _is_calm(self, slot: Slot) -> bool:
        """Whether a backend in standby may be woken for a moment: there is room, and no queue waits."""
        if self.swaps or waiting(self) or not self.models[slot.model].may_come(slot):
            return False
        return self.fits(slot) and self.memory.has_room(slot)

    def _clear(self, now: float) -> None:
        """Have all go that may not stay where it is, or is on its way there; what it keeps there, too.

        Such are the backends on a host that was drained (while anvil-mux is paused, all are), and on a GPU
        that is left to other programs.
        """
        if not self.host.is_cleared and self.config.yield_above is None:
            return
        slots = [slot for slot in self.slots.values() if not slot.backend.url and self.must_go(slot)]
        coming = [slot for slot in self.slots.values() if slot.coming and slot.state != "cancelling"]
        for slot in coming:  # one that is pinned stays, but is not loaded
            if slot in slots or (slot.state != "loading" and self.left_gpu(slot)):
                self.give_up(slot, now, self._why_gone(slot))  # makes victims ready which only drained
        for slot in slots:
            if slot.state == "ready":
                if not slot.host.is_cleared:
                    slot.made_way = FOREVER
                self.begin(None, [slot], now, self._why_gone(slot))
            if slot.host.is_cleared:
                if slot.state in ("draining", "standby"):
                    slot.next_level = "stop"
                self.hasten(slot, now)
            elif slot.state == "standby" and any(slot.residual.values()):
                slot.next_level = "stop"

    def _why_gone(self, slot: Slot) -> Cause:
        """Why a backend may not stay where it is."""
        if slot.host.pause.is_on:
            return PAUSED
        if slot.host.is_drained:
            return Cause("host_drained", host=slot.host.name)
        gpu = self.left_gpu(slot)
        return Cause("others_hold", detail=f"{gib(self.placement.others[gpu])} of GPU {gpu}")

    def _give_up_surplus(self, now: float) -> None:
        """Give up backends here of models of which more are resident or coming than may be."""
        for model in self.bounded:
            while (slot := model.surplus) and slot is self.slots.get(slot.name):
                self.give_up(slot, now, Cause("surplus"))
                if slot.state == "loading":
                    break  # it counts until its load is being cancelled, which is the next step

    def _evict_idle(self, now: float) -> bool:
        """Begin to evict idle residents; whether there were any."""
        idlers = self.idlers
        idle = [slot for slot in idlers if self.reached(slot.idle_until, now)]
        for slot in idle:
            self.begin(None, [slot], now, Cause("idle", seconds=slot.ttl or 0.0))
        for slot in self.ready if self.memory.budget is not None else ():
            model = self.common.models.get(self.memory.answer(slot, now))
            if model and model.queue.tickets:
                cause, severs = Cause("host_memory_needed", model.name), Cause("evicted", model.name)
                self.begin(None, [slot], now, cause, severs=severs)
                return True
        return bool(idle)

    # Preloads and returns

    def _begin_preload(self, now: float) -> bool:
        """Begin the next load for which no request waits; whether there is any."""
        preload = self._next_hinted(now) or self._next_preload(now) or self._next_return(now)
        if preload is None:
            return False
        for victim in preload.victims:
            severs = Cause("evicted", preload.target.model)
            self.begin(None, [victim], now, preload.cause, severs=severs)
        if not preload.victims:
            self.begin(preload.target, [], now, preload.cause, preload=True)
        return True

    def _next_preload(self, now: float) -> Preload | None:
        """The next preload; backends for which there is no room any more are passed over.

        So are those of a model of which enough are resident; while they are coming, the others are kept.
        """
        for slot in tuple(self.preloads):
            if not self.takes_loads(slot):
                continue
            model = self.models[slot.model]
            if not model.may_come(slot) and model.is_coming:
                continue
            found = victims(self, slot, self.busy_gpus(), frozenset(), now) if model.may_come(slot) else None
            failed = slot.state != "stopped" or slot.retry_at > now or found is None
            if failed or any(each.state == "standby" or each.has_had_work for each in found or ()):
                self.preloads.remove(slot)
            elif any(not self.reached(each.stays_until, now) for each in found or ()):
                return None
            elif found:
                return Preload(slot, found, Cause("make_room", slot.model))
            else:
                self.preloads.remove(slot)
                if self.memory.has_room(slot):
                    return Preload(slot, [], self._why_preloaded(slot, now))
        return None

    def _why_preloaded(self, slot: Slot, now: float) -> Cause:
        model = self.models[slot.model]
        lacked = model.ready and model.replicas and slot in model.replicas.lacking(now)
        return Cause("missing_stage" if lacked else "preload")

    def _next_return(self, now: float) -> Preload | None:
        """The backend that is to come back now, once its victims are evicted."""
        for slot in self._absent():
            found = self._return(slot, now)
            if not self.reached(found.at, now):
                continue
            if found.victims:
                return Preload(slot, list(found.victims), Cause("make_room", slot.model))
            if self.memory.has_room(slot):
                kind = "home" if slot.backend.home else "gpu_given_back"
                return Preload(slot, [], Cause(kind, seconds=slot.backend.home_after))
        return None

    def _absent(self) -> list[Slot]:
        """The backends that come back by themselves."""
        if self.config.yield_above is None:
            return self.homes
        return [slot for slot in self.slots.values() if slot.backend.home or slot.made_way is not None]

    def comes_back_at(self, slot: Slot, now: float) -> float:
        """When a backend comes back by itself, as things are; infinite: it does not."""
        return self._return(slot, now).at

    def _return(self, slot: Slot, now: float) -> _Return:
        if not self._may_return(slot):
            return _Return()
        found = victims(self, slot, self.busy_gpus(), frozenset(), now)
        if found is None or (found and not slot.backend.home):
            return _Return()
        if any(each.backend.home or each.state == "standby" for each in found):
            return _Return()
        others = [each for each in self.slots.values() if not self.placement.fit_together(slot, each)]
        concerned = dict.fromkeys((*others, *found))
        if any(each.holders for each in concerned):
            return _Return()
        left = slot.since if slot.state == "stopped" else -FOREVER
        given_back = -FOREVER if slot.made_way is None else slot.made_way
        quiet = max([left, given_back, *(each.used for each in concerned)]) + slot.backend.home_after
        return _Return(max([quiet, *(each.stays_until for each in found)]), tuple(found))

    def _may_return(self, slot: Slot) -> bool:
        if slot.state not in ("stopped", "standby") or slot.coming or slot.leaving:
            return False
        if slot.failed_starts or slot.unloaded or not self.takes_loads(slot):
            return False
        return self.models[slot.model].may_come(slot)


class Preload(NamedTuple):
    """A backend to load now, once its victims are evicted."""

    target: Slot
    victims: list[Slot]
    cause: Cause


class _Return(NamedTuple):
    """The return of a backend by itself."""

    at: float = FOREVER
    victims: tuple[Slot, ...] = ()


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
    loaded = slot.loaded
    model = state.models[slot.model]
    demand = model.demand
    rate, growth = demand.rates(now)
    if model.is_spread:  # residents in several GPU groups share what comes
        rate, growth = rate / max(len(model.ready), 1), growth / max(len(model.ready), 1)
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
        state.costs.load_seconds(slot, slot.backend.evict_to[0]),
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
