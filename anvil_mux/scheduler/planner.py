"""Plans: the backends that could be loaded now, and their victims; pure functions over a GPU group's state.

A ``Plan`` names a backend and the victims that make room for it: of a model's replicas the one with the
fewest. ``None`` means that none could be loaded now, because its GPUs are in another swap, their
residents may stay, or it cools down. Plans are for queues; another replica of a busy model has one too
(``spill``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import NamedTuple

from anvil_mux.scheduler.costs import Cost, source_of
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.policies import Spill
from anvil_mux.scheduler.refusals import all_obstacles
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.swap import SwapInProgress, busy_gpus, coming, swap_to

FIRST_SERVICE_SECONDS = 10.0
"""How long a lease is taken to last, of a model that has not answered yet."""


class Plan(NamedTuple):
    """A backend to load, and the victims that make room for it."""

    target: Slot
    victims: list[Slot]
    evicts: tuple[str, ...]
    """The victims' models."""
    cost: Cost


def waiting(state: GroupState) -> list[Model]:
    """The models whose queue stands here, and which no swap under way will load, oldest queue first."""
    models = [model for model in state.models.values() if model.queue.tickets]
    if models and state.routed:
        models = [model for model in models if model.home in ("", state.name) and not model.is_coming]
    elif models and state.swaps:
        under_way = coming(state.swaps)
        models = [model for model in models if model.name not in under_way]
    if state.limited:
        models = [model for model in models if not model.ready]
    return sorted(models, key=_age) if len(models) > 1 else models


def _age(model: Model) -> tuple[float, int]:
    first = model.queue.first
    return first.since, first.id


def plan(
    state: GroupState, model: Model, busy: set[str], now: float, staying: Set[str] = frozenset()
) -> Plan | None:
    """The replica that is loaded at the cost of the fewest victims, or None while none can be."""
    best: tuple[Slot, list[Slot]] | None = None
    for slot in state.loadable(model, now):
        found = victims(state, slot, busy, staying, now)
        if found is not None and (best is None or len(found) < len(best[1])):
            best = slot, found
    if best is None:
        return None
    evicts = tuple([victim.model for victim in best[1]])
    target = best[0]
    return Plan(target, best[1], evicts, cost(state, source_of(evicts), target, target.level))


def victims(
    state: GroupState,
    target: Slot,
    busy: set[str],
    staying: Set[str],
    now: float,
    *,
    without: Sequence[Slot] = (),
) -> list[Slot] | None:
    """The backends to evict so that there is room on the GPUs and in host memory; None if there is no way.

    The backends that it is to be ``without`` count as gone.
    """
    lost = partial(loss, state, now)
    found = state.placement.victims(target, busy, staying, lost, without)
    if found is None or (short := state.memory.short(target, [*found, *without])) <= 0:
        return found
    more = state.placement.sparing_host(short, found, busy, staying, lost)
    return None if more is None else found + more


# What it costs


def cost(state: GroupState, source: str, target: Slot, way: str) -> Cost:
    return state.costs.estimate(source, target.model, way, target.backend.engine, state.host.name)


def cost_of(state: GroupState, swap: SwapInProgress, target: Slot) -> Cost:
    """The cost of a swap under way."""
    return cost(state, source_of(swap.evicts), target, swap.way or target.level)


def expected_load(state: GroupState, slot: Slot) -> float | None:
    """How long the load under way of a backend will take; None if it was never loaded by that way."""
    for each in state.states_of(state.models[slot.model]):
        if swap := swap_to(each.swaps, slot):
            is_known = each.costs.knows(slot.model, swap.way, each.host.name)
            return cost_of(each, swap, slot).load_seconds if is_known else None
    return None


def loss(state: GroupState, now: float, slot: Slot) -> float:
    """The cost of evicting a backend: its arrivals per second, times the seconds of loading it again.

    Of a model with residents in several GPU groups it is a share of the arrivals.
    """
    way = "stop" if slot.state == "standby" else slot.backend.evict_to[0]
    model = state.models[slot.model]
    rate = model.demand.rate(now)
    if model.home:
        rate /= max(len(model.ready), 1)  # the others go on serving
    return rate * cost(state, "", slot, way).load_seconds


def worth(state: GroupState, slot: Slot, now: float) -> tuple[bool, int, float, float]:
    """How much a backend deserves a light standby level: see standby.HostMemory."""
    cold = cost(state, "", slot, "stop").load_seconds
    model = state.models[slot.model]
    lost = model.demand.rate(now) * cold
    return bool(model.queue.tickets), slot.backend.priority, lost, slot.used


# When a queue is overdue


def bound(state: GroupState, model: Model, now: float) -> float:
    """After how many seconds a queue that begins now is overdue: in time to be loaded, if it can be."""
    states = state.states_of(model) if model.home else (state,)
    left = state.config.queue_timeout - min([swap_seconds(each, model, now) for each in states])
    return max(min(model.max_wait, left), 0.0)


def swap_seconds(state: GroupState, model: Model, now: float) -> float:
    """How long it will take to have ``model`` here, drain included, as far as is known."""
    if not state.host.takes_loads:
        return math.inf
    found = None if model.ready else plan(state, model, busy_gpus(state.swaps), now)
    if found:
        return _drain_seconds(state, found.victims) + found.cost.seconds
    slots = state.own(model) if model.home else model.slots
    return min([_swap_seconds_later(state, slot) for slot in slots])


def nearest(states: Sequence[GroupState], model: Model, now: float) -> GroupState:
    """The GPU group in which a queue of ``model`` is to stand: the one where its wait is shortest."""
    if len(states) == 1:
        return states[0]
    return min(states, key=lambda state: (_wait_seconds(state, model, now), state.host.name, state.name))


def _wait_seconds(state: GroupState, model: Model, now: float) -> float:
    leaves = all(slot.leaving for slot in state.own(model))
    host = state.host
    if state.unseen or leaves or host.is_away or not host.takes_loads or all_obstacles(state, model, now):
        return math.inf
    return swap_seconds(state, model, now)


def _swap_seconds_later(state: GroupState, slot: Slot) -> float:
    """The same for one backend whose GPUs are in other swaps: their targets are loaded, then evicted."""
    goals = [swap.target for swap in state.swaps if swap.target and swap.target is not slot]
    others = [goal for goal in goals if goal.holds.keys() & slot.holds.keys()]
    way = slot.level if slot.state in ("stopped", "standby") else slot.backend.evict_to[0]
    swapped = cost(state, source_of(other.model for other in others), slot, way)
    return _drain_seconds(state, others) + swapped.seconds


def reserved(state: GroupState, model: Model, now: float) -> list[Slot]:
    """The backends whose GPUs are kept for an overdue queue that must wait on.

    Of a model in several GPU groups it is the one whose GPUs will be free first.
    """
    slots = state.loadable(model, now)
    if len(slots) < 2 or not model.home:
        return slots
    return [min(slots, key=lambda slot: _swap_seconds_later(state, slot))]


def _drain_seconds(state: GroupState, leaving: Iterable[Slot]) -> float:
    """The drain of these backends: about the longest of their leases."""
    longest = 0.0
    for victim in leaving:
        service = state.models[victim.model].demand.service_seconds or FIRST_SERVICE_SECONDS
        longest = max(longest, service * (1.0 + math.log(max(len(victim.holders), 1))))
    return min(longest, state.config.drain_timeout)


# Another replica of a busy model


def spills(state: GroupState, now: float) -> dict[str, tuple[Plan, Spill]]:
    """Busy models of which another replica could be loaded, unless any queue waits for a load."""
    if not state.routed or any(map(partial(_lacks_load, state), state.models.values())):
        return {}
    found = {model.name: spill(state, model, now) for model in state.routed}
    return {name: each for name, each in found.items() if each}


def _lacks_load(state: GroupState, model: Model) -> bool:
    """Whether its queue stands here, and none of its backends is ready."""
    return bool(model.queue.tickets) and not model.ready and model.home in ("", state.name)


def spill(state: GroupState, model: Model, now: float) -> tuple[Plan, Spill] | None:
    """The next replica of a busy model, and what the policy is shown of it."""
    if not state.host.takes_loads or model.is_coming or not state.loadable(model, now):
        return None
    behind = _behind(state, model, now)
    if not behind:
        return None
    used = {slot.name for slot in state.slots.values() if slot.holders or slot.model == model.name}
    found = plan(state, model, busy_gpus(state.swaps), now, used | state.staying(now))
    if found is None:
        return None
    reload = [cost(state, "", each, each.backend.evict_to[0]).load_seconds for each in found.victims]
    return found, Spill(
        model=model.name,
        backend=found.target.name,
        waiting=len(behind),
        waited_seconds=sum(behind),
        evicts=found.evicts,
        evict_seconds=found.cost.evict_seconds,
        load_seconds=found.cost.load_seconds,
        reload_seconds=sum(reload),
    )


def _behind(state: GroupState, model: Model, now: float) -> list[float]:
    """How long each request has waited that waits behind others at a replica, or for a place at any."""
    assert model.replicas is not None
    in_flight = model.replicas.in_flight
    behind = [
        now - slot.holders[ticket]
        for slot in model.slots
        if slot.serves
        for ticket in in_flight.waiting(slot.name)[1:]
    ]
    return behind + [now - each.since for each in model.queue if not model.needed(each.work.owner)]
