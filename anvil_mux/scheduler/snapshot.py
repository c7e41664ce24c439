"""The snapshot of a GPU group that a policy decides by, and the question to it: pure functions."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from anvil_mux.scheduler.events import Cause, is_decided, mistake
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.planner import Plan
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
from anvil_mux.scheduler.slot import LOADING, Slot
from anvil_mux.scheduler.state import GroupState, SwapInProgress


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
