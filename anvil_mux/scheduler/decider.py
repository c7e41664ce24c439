"""The next step of a GPU group, or until when there is none.

In this order: swaps under way go on, upkeep is done, the oldest overdue queue gets its swap, the policy is
asked, a load that no request waits for any more is cancelled for a queue, and a preload is begun. The policy
proposes, the group disposes: an overdue queue waits for no policy, and the GPUs that it needs go to no
younger queue meanwhile.

While a policy holds a swap back it is asked again and again, and mostly about the same plans: they depend on
what ``GroupState.version`` counts, and on moments that are known. So they are kept until one of these.
Making them anew each time takes the simulator up to 2.9 times as long in the scenario `thrash` of
`bin/bench simulate` (under time_slice; 2.4 under adaptive), and up to 5.7 times in `busy` (adaptive).
"""

from __future__ import annotations

from collections.abc import Mapping

from anvil_mux.scheduler import home
from anvil_mux.scheduler.admission import Admission
from anvil_mux.scheduler.causes import POLICY, Cause
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.group_swaps import GroupSwaps
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.moves import Moves
from anvil_mux.scheduler.planner import Plan, plan, reserved, spills, victims, waiting
from anvil_mux.scheduler.policies import FOREVER, Stay, SwapTo, Unload
from anvil_mux.scheduler.preloads import next_preload
from anvil_mux.scheduler.refusals import lack_of_memory
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.snapshot import ask, snapshot
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.steps import Step, Ticket, Wait
from anvil_mux.scheduler.swap import SwapInProgress
from anvil_mux.scheduler.upkeep import Upkeep

SHORTEST_DEFERRAL = 1.0
"""Seconds before which a swap that is held back is not announced again."""


class Decider:
    """The decisions of one GPU group: what to begin, and when."""

    def __init__(self, state: GroupState, admission: Admission, moves: Moves, swaps: GroupSwaps) -> None:
        self._state = state
        self._admission = admission
        self._swaps = swaps
        self._upkeep = Upkeep(state, moves, swaps)
        self._plans: dict[str, Plan] = {}
        """The swaps that the policy could begin when it was last asked."""
        self._planned, self._until = -1, -FOREVER
        """The version of the state for which they hold, and until when."""
        self._ask_again = FOREVER
        """When the policy is asked again."""
        self._announced: tuple[Ticket | None, float] = None, FOREVER
        """The ticket for which a swap was last said to be held back, and when that is said again."""

    def begin_anew(self) -> None:
        """Plan anew, and announce anew what is held back: the configuration is another."""
        self._announced, self._state.deferred = (None, FOREVER), None
        self._state.changed()

    def plans_hold(self, now: float) -> bool:
        """Whether the plans are as they were when the policy was last asked."""
        return now < self._until and self._planned == self._state.version

    def next_step(self, now: float) -> Step | Wait:
        """Return the step to perform now, each once, or until when to wait."""
        if self._state.unseen or self._state.is_out_of_reach:
            return Wait(FOREVER)
        self._upkeep.clear_hosts(now)
        if self._state.bounded:
            self._upkeep.give_up_surplus(now)
        while True:
            if now < self._until and self._planned == self._state.version:
                if self._ask_policy(self._plans, now):
                    continue
                return self._wait(self._until, now)
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
                until = self._next_moment(models, now)
                if self._plans_can_hold():
                    self._planned, self._until = self._state.version, until
                return self._wait(until, now)

    def _plans_can_hold(self) -> bool:
        """Whether the plans stay the same while leases begin and end, and queues grow.

        They do not where a drain or a ttl waits for a lease to end, or where there is a choice of victims.
        """
        state = self._state
        if state.swaps or state.idlers or state.routed or not self._plans:
            return False
        return state.memory.budget is None and len(state.ready) < 2

    def _wait(self, until: float, now: float) -> Wait:
        return Wait(self._ask_again if now < self._ask_again < until else until)

    def _next_moment(self, models: list[Model], now: float) -> float:
        """When the answer of ``next_step`` may change without a new fact, whatever the policy says."""
        state = self._state
        moments = [model.queue.overdue_at for model in models]
        moments += self._upkeep.moments()
        moments += home.moments(state, now) if state.homes else ()
        for slot in state.stayers if models or state.preloads else ():
            moments.append(slot.stays_until)
        for swap in state.swaps:
            moments += [victim.drain_until for victim in swap.victims if victim.state == "draining"]
        for slot in state.slots.values():
            stuck = slot.state in ("stuck", "standby")
            if slot.retry_at > now and (stuck or state.models[slot.model].queue.tickets):
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
        if self._ask_policy(plans, now):
            return True
        if held and not plans:
            self._tell_of_stay(*held[0], now)
        return False

    def _serve_overdue(self, models: list[Model], busy: set[str], now: float) -> bool:
        """Serve the oldest overdue queue, or fail it; the GPUs of those that must wait on become ``busy``."""
        state = self._state

        def call(slot: Slot, missing: Mapping[str, int]) -> bool:
            return state.memory.call(slot, missing, state.slots.values(), now)

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
        if slot is None or slot.state != "loading" or swap.cancel or not swap.is_steered:
            return False
        if swap.preload and swap.cause.kind != "home":
            return False
        return not (slot.pinned or self._state.models[slot.model].queue.tickets)

    def _begin_preload(self, models: list[Model], now: float) -> bool:
        """Begin the next preload, if nothing else is to be done."""
        state = self._state
        if models or state.swaps or not (state.preloads or state.homes):
            return False
        found = next_preload(state, now) or (home.next_home(state, now) if state.homes else None)
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
        """Do what the policy says; whether that was anything."""
        state = self._state
        state.deferred, self._ask_again = None, FOREVER
        more = {} if plans else spills(state, now)
        if not (plans or more or state.ready):
            return False  # nothing to be loaded, nothing to be evicted
        seen = snapshot(state, now, plans, [spill for _, spill in more.values()] if more else ())
        decision = ask(state.policy, seen)
        if isinstance(decision, Stay):
            self._ask_again = min(decision.until, decision.again)
            if plans:
                self._defer(state.models[next(iter(plans))], decision, now)
                self._ask_again = min(self._ask_again, self._announced[1])
        elif isinstance(decision, SwapTo) and decision.model in plans:
            found = plans[decision.model]
            self._swaps.begin(found.target, found.victims, now, decision.cause)
            return True
        elif isinstance(decision, SwapTo) and decision.model in more:
            found = more[decision.model][0]
            self._swaps.begin(found.target, found.victims, now, decision.cause, preload=True)
            return True
        elif isinstance(decision, Unload) and decision.model in state.models:
            return self._unload(state.models[decision.model], decision.cause, now)
        return False

    def _unload(self, model: Model, cause: Cause, now: float) -> bool:
        slots = [slot for slot in self._state.own(model) if slot.state == "ready" and not slot.pinned]
        slots = [slot for slot in slots if slot.host.is_steered]
        for slot in slots:
            self._swaps.evict(slot, now, cause, severs=POLICY)
        return bool(slots)

    def _tell_of_stay(self, model: Model, evicted: list[Slot], now: float) -> None:
        """Announce that the queue of ``model`` waits for the min_residency of its victims."""
        stays = {slot.name: until for slot in evicted if (until := slot.stays_until) > now}
        until = min(max(stays.values()), model.queue.overdue_at)
        self._defer(model, Stay(until, Cause("min_residency", residents=tuple(stays))), now)

    def _defer(self, model: Model, stay: Stay, now: float) -> None:
        """Note a swap that is held back, and announce it: once for each queue, and when its time is over."""
        self._state.deferred = model.name, stay
        first = model.queue.first
        if first is not self._announced[0] or now >= self._announced[1]:
            self._announced = first, max(stay.until, now + SHORTEST_DEFERRAL)
            size, left = len(model.queue.tickets), stay.until - now
            self._state.emit(
                Event(now, "deferred", model.name, ticket=first.id, size=size, seconds=left, cause=stay.cause)
            )
