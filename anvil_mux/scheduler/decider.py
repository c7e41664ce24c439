"""The next step of a GPU group, or until when there is none.

In this order: swaps under way go on, upkeep is done, the oldest overdue queue gets its swap, a queue of
higher priority takes over the drain for a lower one, the policy is asked, a load that no request waits for
any more is cancelled for a queue, and a preload is begun. The policy proposes, the group disposes: an overdue
queue waits for no policy, and the GPUs that it needs go to no younger queue meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from anvil_mux.scheduler.admission import Admission
from anvil_mux.scheduler.causes import POLICY, Cause
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.group_swaps import GroupSwaps
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.moves import Moves
from anvil_mux.scheduler.planner import Plan, plan, reserved, spills, takeover, victims, waiting
from anvil_mux.scheduler.policies import FOREVER, Decision, Spill, Stay, Unload
from anvil_mux.scheduler.preloads import home_moments, next_home, next_preload
from anvil_mux.scheduler.refusals import lack_of_memory
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.snapshot import Contest, ask, contests, snapshot
from anvil_mux.scheduler.state import Deferred, GroupState
from anvil_mux.scheduler.steps import Step, Ticket, Wait
from anvil_mux.scheduler.swap import SwapInProgress
from anvil_mux.scheduler.upkeep import Upkeep

SHORTEST_DEFERRAL = 1.0
"""Seconds for which a swap is held back before that is announced, and before it is announced again."""


class Decider:
    """The decisions of one GPU group: what to begin, and when."""

    def __init__(self, state: GroupState, admission: Admission, moves: Moves, swaps: GroupSwaps) -> None:
        self._state = state
        self._admission = admission
        self._swaps = swaps
        self._upkeep = Upkeep(state, moves, swaps)
        self._plans: dict[str, Plan] = {}
        """The swaps that could begin now; set anew before the policy is asked."""
        self._ask_again = FOREVER
        """When the policy is asked again."""
        self._announce: dict[Ticket, float] = {}
        """The first tickets of queues whose swaps are held back, and when that is announced (again)."""

    def begin_anew(self) -> None:
        """Plan anew, and announce anew what is held back: the configuration is another."""
        self._announce, self._state.deferred = {}, {}
        self._state.changed()

    def next_step(self, now: float) -> Step | Wait:
        """Return the step to perform now, each once, or until when to wait."""
        if self._state.unseen:
            return Wait(FOREVER)
        if self._state.is_out_of_reach:
            return self._swaps.advance(now) or Wait(FOREVER)
        self._upkeep.clear(now)
        if self._state.bounded:
            self._upkeep.give_up_surplus(now)
        while True:
            step = self._swaps.advance(now) if self._state.swaps else None
            step = step or self._upkeep.step(now)
            if step:
                return step
            models = waiting(self._state)
            if not (
                self._upkeep.evict_idle(now)
                or self._begin_swap(models, now)
                or self._cancel_unwanted(models, now)
                or self._begin_preload(models, now)
            ):
                return self._wait(self._next_moment(models, now), now)

    def _wait(self, until: float, now: float) -> Wait:
        if mistake := self._state.placement.mistake:
            self._state.placement.mistake = ""
            self._blame(self._state.common.settings.eviction, Cause("eviction_failed", detail=mistake), now)
        soonest = self._ask_again if now < self._ask_again < until else until
        return Wait(soonest, min([at for at in self._announce.values() if at > now], default=FOREVER))

    def _next_moment(self, models: list[Model], now: float) -> float:
        """When the answer of ``next_step`` may change without a new fact, whatever the policy says."""
        state = self._state
        moments = [model.queue.overdue_at for model in models]
        moments += self._upkeep.moments()
        moments += home_moments(state, now)
        for slot in state.stayers if models or state.preloads else ():
            moments.append(slot.stays_until)
        for swap in state.swaps:
            moments += [victim.drain_until for victim in swap.victims if victim.state == "draining"]
        for slot in state.slots.values():
            stuck, model = slot.state in ("stuck", "standby"), state.models[slot.model]
            if slot.retry_at > now and (stuck or model.queue.tickets):
                moments.append(slot.retry_at)
        return min([moment for moment in moments if moment > now], default=FOREVER)

    # Swaps

    def _begin_swap(self, models: list[Model], now: float) -> bool:
        """Begin at most one swap: that of the oldest overdue queue, else what the policy proposes."""
        state = self._state
        busy = state.busy_gpus()
        if self._serve_overdue(models, busy, now):
            return True
        staying = state.staying(now) if state.stayers else set[str]()
        plans: dict[str, Plan] = {}
        held = []
        for model in models:
            if found := plan(state, model, busy, now, staying):
                plans[model.name] = found
            elif staying and (found := plan(state, model, busy, now)):
                held.append((model, found.victims))
        self._plans = plans
        if (state.swaps and self._take_over(models, now)) or self._ask_policy(plans, now):
            return True
        if held and not plans:
            self._defer_for_stay(*held[0], now)
        return False

    def _take_over(self, models: list[Model], now: float) -> bool:
        """Have a drain for one queue go on for another of higher priority, which could not begin otherwise.

        Overdue queues come first, the oldest of them before all others, and keep the GPUs that they wait for.
        """
        state, kept = self._state, set[str]()
        late = [model for model in models if model.queue.overdue_at <= now]
        others = [model for model in models if model not in late]
        for model in [*late, *sorted(others, key=attrgetter("priority"), reverse=True)]:
            if model.name not in self._plans and (found := takeover(state, model, kept, now)):
                self._swaps.take_over(found, now)
                return True
            if model in late:
                kept.update([gpu for slot in reserved(state, model, now) for gpu in slot.holds])
        return False

    def _serve_overdue(self, models: list[Model], busy: set[str], now: float) -> bool:
        """Serve the oldest overdue queue, or fail it; the GPUs of those that must wait on become ``busy``."""
        state = self._state

        def call(slot: Slot, short: int) -> bool:
            return state.memory.call(slot, short, state.slots.values(), now)

        for model in models:
            if model.queue.overdue_at > now:
                continue
            if found := plan(state, model, busy, now):
                self._swaps.begin(found.target, found.victims, now, Cause("overdue"))
                return True
            if error := lack_of_memory(state, model, busy, call):
                self._admission.fail_queue(model, error, now)
                return True
            for slot in reserved(state, model, now):
                busy.update(slot.holds)
        return False

    def _cancel_unwanted(self, models: list[Model], now: float) -> bool:
        """Cancel loads that no request waits for any more, if a queue could have their GPUs then."""
        state = self._state
        unwanted = [swap for swap in state.swaps if self._is_unwanted(swap)] if models else []
        if not unwanted:
            return False
        loads = [swap.target for swap in unwanted if swap.target]
        busy = state.busy_gpus(but=unwanted)
        stays = state.staying(now)
        for model in models:
            staying = stays if model.queue.overdue_at > now else frozenset[str]()
            for slot in () if model.name in self._plans else state.loadable(model, now):
                there = [s for s in unwanted if s.target and s.target.holds.keys() & slot.holds.keys()]
                if there and victims(state, slot, busy, staying, now, without=loads) is not None:
                    for swap in there:
                        swap.cancel = Cause("unwanted", model.name)
                    return True
        return False

    def _is_unwanted(self, swap: SwapInProgress) -> bool:
        """Whether a swap loads a backend that no request waits for any more."""
        slot = swap.target
        if slot is None or slot.state != "loading" or swap.cancel:
            return False
        if swap.preload and swap.cause.kind != "home":
            return False
        return not (slot.pinned or self._state.models[slot.model].queue.tickets)

    def _begin_preload(self, models: list[Model], now: float) -> bool:
        """Begin the next preload, if nothing else is to be done."""
        state = self._state
        if models or state.swaps:
            return False
        found = next_preload(state, now) or next_home(state, now)
        if found is None:
            return False
        for victim in found.victims:
            severs = Cause("evicted", found.target.model)
            self._swaps.evict(victim, now, found.cause, severs=severs)
        if not found.victims:
            self._swaps.begin(found.target, [], now, found.cause, preload=True)
        return True

    # The policy

    def _ask_policy(self, plans: Mapping[str, Plan], now: float) -> bool:
        """Do what the policy says of each set of queues that compete; whether that was anything."""
        state = self._state
        before, state.deferred, self._ask_again = state.deferred, {}, FOREVER
        for ticket in [ticket for ticket in self._announce if not self._waits(ticket)]:
            del self._announce[ticket]
        more = spills(state, now)
        if not (plans or more or state.ready):
            return False  # nothing to be loaded, nothing to be evicted
        apart = contests(state, plans)
        if more and apart[-1].plans:
            apart.append(Contest({}, ()))  # more replicas compete with no queue
        for each in apart:
            if self._decide(each, before, {} if each.plans else more, now):
                state.deferred = before | state.deferred
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
        state, plans = self._state, contest.plans
        first = next(iter(plans), "")
        held, subject = before.get(first), contest.subject(state)
        if (
            held
            and held.contest == subject
            and not held.is_over
            and now < min(held.stay.until, held.stay.again)
        ):
            decision: Decision = held.stay
        else:
            spilling = [spill for _, spill in more.values()] if more else ()
            decision = ask(state.policy, snapshot(state, now, plans, spilling, here=contest.residents))
        if isinstance(decision, Stay):
            self._ask_again = min(self._ask_again, decision.until, decision.again)
            if decision.cause.kind == "policy_failed":
                self._blame(state.policy, decision.cause, now)
            if plans:
                self._defer(state.models[first], Deferred(decision, subject, contest.residents), now)
            return False
        if isinstance(decision, Unload):
            return self._unload(state.models[decision.model], decision.cause, now)
        found = plans.get(decision.model) or more[decision.model][0]
        self._swaps.begin(found.target, found.victims, now, decision.cause, preload=not plans)
        return True

    def _waits(self, ticket: Ticket) -> bool:
        model = self._state.models.get(ticket.model)
        return model is not None and ticket in model.queue.tickets

    def _blame(self, plugin: object, cause: Cause, now: float) -> None:
        """Report a mistake of a plug-in, the first of each."""
        blamed = self._state.common.blamed
        if blamed.get(cause.kind) is not plugin:
            blamed[cause.kind] = plugin
            self._state.emit(Event(now, "plugin_failed", "", cause=cause))

    def _unload(self, model: Model, cause: Cause, now: float) -> bool:
        slots = [slot for slot in self._state.own(model) if slot.state == "ready" and not slot.pinned]
        for slot in slots:
            self._swaps.evict(slot, now, cause, severs=POLICY)
        return bool(slots)

    def _defer_for_stay(self, model: Model, evicted: list[Slot], now: float) -> None:
        """Note that the queue of ``model`` waits for the min_residency of its victims."""
        stays = {slot.name: until for slot in evicted if (until := slot.stays_until) > now}
        until = min(max(stays.values()), model.queue.overdue_at)
        stay = Stay(until, Cause("min_residency", residents=tuple(stays)))
        self._defer(model, Deferred(stay, (), evicted), now)

    def _defer(self, model: Model, deferred: Deferred, now: float) -> None:
        """Note a swap that is held back, and announce it: once it has been, and when its time is over."""
        self._state.deferred[model.name] = deferred
        first, stay = model.queue.first, deferred.stay
        if now >= self._announce.setdefault(first, now + SHORTEST_DEFERRAL):
            self._announce[first] = max(stay.until, now + SHORTEST_DEFERRAL)
            size, left = len(model.queue.tickets), stay.until - now
            self._state.emit(
                Event(now, "deferred", model.name, ticket=first.id, size=size, seconds=left, cause=stay.cause)
            )
