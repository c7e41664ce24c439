"""The snapshot of a GPU group that a policy decides by, and what a request would meet if it came now.

Pure functions over a GPU group's state. ``awaited`` asks the policy as if one more request waited: the queue
that it would begin stands in the snapshot, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from anvil_mux.errors import MuxError
from anvil_mux.scheduler.causes import Cause, is_decided, mistake
from anvil_mux.scheduler.costs import NO_COST, Cost
from anvil_mux.scheduler.drains import too_late
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.overdue import bound
from anvil_mux.scheduler.planner import Plan, cost_of, nearest, plan, waiting
from anvil_mux.scheduler.policies import (
    FOREVER,
    Decision,
    Policy,
    Queue,
    Resident,
    Snapshot,
    Spill,
    Stay,
    SwapTo,
    Unload,
    decide,
)
from anvil_mux.scheduler.refusals import refusal
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.state import GroupState


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
    swaps = [swap.seen(swap.target) for swap in state.swaps if swap.target] if state.swaps else ()
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


class Awaited(NamedTuple):
    """The situation that a request would meet if it came now."""

    refusal: MuxError | None = None
    target: Slot | None = None
    """The backend that will serve it, if a swap to that is under way, or could begin now."""
    victims: Sequence[Slot] = ()
    cost: Cost = NO_COST
    loaded_before: bool = False
    """Whether it was loaded from that level before, so that ``cost`` is no mere guess."""
    decision: Decision | None = None
    """The policy's decision on that swap; None: it is under way."""
    overdue_at: float = FOREVER
    """When its swap begins, whatever the policy says."""
    state: GroupState | None = None
    """The GPU group of the backend, which need not be where the queue stood; None: no backend is known."""


def awaited(state: GroupState, model: Model, now: float) -> Awaited:
    """Find out what a request for ``model`` would meet if it came now; nothing is changed."""
    if error := refusal(state, model, now) or too_late(state, model, now):
        return Awaited(error)
    for each in state.states_of(model):
        for swap in each.swaps:
            if swap.target and swap.target.model == model.name and not swap.cancel:
                expected = cost_of(each, swap, swap.target)
                known = each.costs.knows(model.name, expected.way, swap.target.host.name)
                return Awaited(None, swap.target, swap.victims, expected, known, state=each)
    return _planned(state if model.queue else nearest(state.states_of(model), model, now), model, now)


def _planned(state: GroupState, model: Model, now: float) -> Awaited:
    """The same where no swap to it is under way."""
    queue = model.queue
    most = queue.bound if queue else bound(state, model, now).seconds
    overdue_at = queue.overdue_at if queue else max(now, queue.left) + most
    models = waiting(state)
    if not queue and not model.is_coming and not (model.queue.limited and model.ready):
        models.append(model)
    busy, staying = state.busy_gpus(), state.staying(now)
    found = {each.name: plan(state, each, busy, now, staying) for each in models}
    plans = {name: each for name, each in found.items() if each}
    if model.name not in plans:
        return Awaited(overdue_at=overdue_at)
    together, here = next(each for each in contests(state, plans) if model.name in each.plans)
    decision = ask(state.policy, snapshot(state, now, together, most=most, here=here))
    target, victims, _, expected = plans[model.name]
    known = state.costs.knows(model.name, target.level, target.host.name)
    return Awaited(
        None,
        target,
        victims,
        expected,
        loaded_before=known,
        decision=decision,
        overdue_at=overdue_at,
        state=state,
    )
