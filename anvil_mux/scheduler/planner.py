"""Plans: the backends that could be loaded now, and their victims; pure functions over a GPU group's state.

A ``Plan`` names a backend and the victims that make room for it: of a model's replicas the one with the
fewest. ``None`` means that none could be loaded now, because its GPUs are in another swap, their
residents may stay, or it cools down. Plans are for queues; another replica of a busy model has one too
(``spill``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from anvil_mux.scheduler.costs import Cost
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.policies import FOREVER, Spill
from anvil_mux.scheduler.slot import HOLDING, Slot
from anvil_mux.scheduler.state import G, GroupState, SwapInProgress

FIRST_SERVICE_SECONDS = 10.0
"""How long a lease is taken to last, of a model that has not answered yet."""


_TargetAndVictims = tuple[Slot, list[Slot]]
"""A backend, and the victims that make room for it."""


class Plan(NamedTuple):
    """A backend to load, and the victims that make room for it."""

    target: Slot
    victims: list[Slot]
    evicts: tuple[str, ...]
    """The victims' models."""
    cost: Cost

    @property
    def gpus(self) -> set[str]:
        """The GPUs that it changes, those of its victims too."""
        return {gpu for slot in (self.target, *self.victims) for gpu in slot.holds}


def waiting(state: GroupState) -> list[Model]:
    """The models whose queue stands here, and which no swap under way will load, oldest queue first.

    None while anvil-mux is paused: nothing is loaded for them before its end.
    """
    if state.host.pause.is_on:
        return []
    models = [model for model in state.models.values() if model.queue.tickets]
    if models and state.routed:
        models = [model for model in models if model.queues_in(state.name) and not model.is_coming]
    elif models and state.swaps:
        under_way = state.coming
        models = [model for model in models if model.name not in under_way]
    models = [model for model in models if not (model.limited and model.ready)]
    return sorted(models, key=_age) if len(models) > 1 else models


def _age(model: Model) -> tuple[float, int]:
    first = model.queue.first
    return first.since, first.id


def plan(
    state: GroupState, model: Model, busy: set[str], now: float, staying: Set[str] = frozenset()
) -> Plan | None:
    """The replica that is loaded at the cost of the fewest victims, or None while none can be."""
    best = choose(state, state.loadable(model, now), busy, now, staying)
    if best is None:
        return None
    target, leaving = best
    evicts = tuple([victim.model for victim in leaving])
    return Plan(target, leaving, evicts, state.cost(evicts, target, target.level))


def choose(
    state: GroupState, slots: Iterable[Slot], busy: set[str], now: float, staying: Set[str]
) -> _TargetAndVictims | None:
    """The backend of ``slots`` that is loaded at the cost of the fewest victims, and these."""
    best: _TargetAndVictims | None = None
    for slot in slots:
        found = victims(state, slot, busy, staying, now)
        if found is not None and (best is None or len(found) < len(best[1])):
            best = slot, found
    return best


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
    lost, queued = partial(loss, state, now), partial(waiting_at, state)
    found = state.placement.victims(target, busy, staying, loss=lost, without=without, waiting=queued)
    if found is None or (short := state.memory.short(target, [*found, *without])) <= 0:
        return found
    more = state.placement.sparing_host(short, found, busy, staying, loss=lost, waiting=queued)
    return None if more is None else found + more


# What it costs


def cost_of(state: GroupState, swap: SwapInProgress, target: Slot) -> Cost:
    """The cost of a swap under way."""
    return state.cost(swap.evicts, target, swap.level or target.level)


def expected_load(state: GroupState, slot: Slot) -> float | None:
    """How long the load under way of a backend will take; None if it was never loaded by that way."""
    for each in state.groups_of(state.models[slot.model]):
        if swap := each.swap_to(slot):
            is_known = each.costs.knows(slot.model, swap.level, slot.host.name)
            return cost_of(each, swap, slot).load_seconds if is_known else None
    return None


def loss(state: GroupState, now: float, slot: Slot) -> float:
    """The cost of evicting a backend: its arrivals per second, times the seconds of loading it again.

    Of a model with residents in several GPU groups it is a share of the arrivals.
    """
    level = "stop" if slot.state == "standby" else slot.backend.evict_to[0]
    model = state.models[slot.model]
    rate = model.demand.rate(now)
    if model.is_spread:
        rate /= max(len(model.ready), 1)  # the others go on serving
    return rate * state.load_seconds(slot, level)


def waiting_at(state: GroupState, slot: Slot) -> float:
    """The requests that wait for a place at a resident backend: its share of its model's queue."""
    model = state.models[slot.model]
    if slot.state != "ready" or not model.queue.tickets:
        return 0.0
    return len(model.queue) / max(len(model.ready), 1)


def worth(state: GroupState, slot: Slot, now: float) -> tuple[bool, int, float, float]:
    """How much a backend deserves a light standby level: see standby.HostMemory."""
    cold = state.load_seconds(slot, "stop")
    model = state.models[slot.model]
    lost = model.demand.rate(now) * cold
    return bool(model.queue.tickets), slot.backend.priority, lost, slot.used


# Better places for a swap that only drains


def free_place(model: Model, swap: SwapInProgress, here: GroupState, now: float) -> Slot | None:
    """A backend that could be loaded at once, and serve no later than the one that a swap drains for.

    ``swap`` is under way in the GPU group ``here``, and only drains.
    """
    assert swap.target is not None
    roomy = with_room(here.groups_of(model))
    if not roomy:
        return None
    soonest = _seconds_to_drain(here, swap, now) + cost_of(here, swap, swap.target).seconds
    best = None
    for state in roomy:
        for slot in _free_places(state, model, swap, now):
            seconds = state.load_seconds(slot, slot.level)
            if seconds < soonest or (best is None and seconds == soonest):
                best, soonest = slot, seconds
    return best


def with_room(states: Iterable[G]) -> list[G]:
    """The GPU groups with a GPU that no backend has to itself. Most are full, and this is asked often."""
    found = []
    for state in states:
        placement, held = state.placement, 0
        for slot in placement.active:
            if slot.whole and slot.state in HOLDING:
                held += len(slot.holds)
        if held < len(placement.capacity):
            found.append(state)
    return found


def _free_places(state: GroupState, model: Model, swap: SwapInProgress, now: float) -> list[Slot]:
    """The backends of a model that have room on GPUs that nobody holds, and no other queue waits for."""
    target = swap.target
    assert target is not None
    if state.unseen or state.is_out_of_reach:
        return []
    slots = [
        slot
        for slot in state.own(model)
        if slot.backend.infer_type == target.backend.infer_type and not slot.coming
    ]
    if not slots:
        return []
    taken = state.busy_gpus(but=[swap]).union(*map(state.gpus_of, waiting(state)))
    with _unwanted(target):
        loadable = state.loadable(model, now)
        return [
            slot
            for slot in slots
            if slot in loadable
            and taken.isdisjoint(slot.holds)
            and state.fits(slot)
            and state.memory.has_room(slot)
        ]


@contextmanager
def _unwanted(target: Slot) -> Iterator[None]:
    """While this lasts, what the target of a swap keeps and needs counts as if it had never been wanted."""
    target.coming = False
    try:
        yield
    finally:
        target.coming = True


class Takeover(NamedTuple):
    """A swap that only drains, the backend that it is to load instead, and who else goes for that."""

    swap: SwapInProgress
    target: Slot
    victims: list[Slot]


def takeover(state: GroupState, model: Model, kept: Set[str], now: float) -> Takeover | None:
    """The drain that a queue of higher priority takes over, as it needs the same GPUs.

    Never that for an overdue queue, nor GPUs that are ``kept`` for one. Nobody goes for it as well who drains
    without a bound.
    """
    for swap in state.swaps:
        if not _yields(state, swap, model, now):
            continue
        for slot in state.loadable(model, now):
            more = None if kept & slot.holds.keys() else _more_victims(state, slot, swap, now)
            if more is not None and not any(v.holders and v.backend.drain_timeout == FOREVER for v in more):
                return Takeover(swap, slot, more)
    return None


def _yields(state: GroupState, swap: SwapInProgress, model: Model, now: float) -> bool:
    """Whether a swap only drains for a queue of lower priority than that of ``model``, and not overdue."""
    if swap.target is None or swap.begun or swap.preload:
        return False
    other = state.models[swap.target.model]
    return other.priority < model.priority and bool(other.queue.tickets) and other.queue.overdue_at > now


def _more_victims(state: GroupState, slot: Slot, swap: SwapInProgress, now: float) -> list[Slot] | None:
    """The backends that go besides the victims of a swap if it loads ``slot`` instead; None: there is no way.

    As in any plan, but that those victims which have GPUs that it needs count as gone. What the target of the
    swap keeps in standby counts as if it had never been wanted.
    """
    assert swap.target is not None
    if slot.holds.keys().isdisjoint(swap.gpus()):
        return None
    going = [each for each in swap.victims if not each.holds.keys().isdisjoint(slot.holds)]
    staying = state.staying(now) | {each.name for each in swap.victims}
    with _unwanted(swap.target):
        return victims(state, slot, state.busy_gpus(but=[swap]), staying, now, without=going)


def _seconds_to_drain(state: GroupState, swap: SwapInProgress, now: float) -> float:
    """How long a swap may drain yet: as answers do on average; one that takes longer, until it is severed."""
    left = 0.0
    for victim in swap.victims:
        usual = state.models[victim.model].demand.service_seconds or FIRST_SERVICE_SECONDS
        most = state.drain_left(victim, now)
        for since in victim.holders.values():
            rest = usual - (now - since)
            left = max(left, min(rest, most) if rest > 0 else most)
    return left


# Another replica of a busy model


def spills(state: GroupState, now: float) -> dict[str, tuple[Plan, Spill]]:
    """Busy models of which another replica could be loaded on GPUs that no queue waits for."""
    if not state.routed:
        return {}
    found = {model.name: each for model in state.routed if (each := spill(state, model, now))}
    lacking = [model for model in state.models.values() if state.lacks_load(model)] if found else ()
    wanted = set[str]().union(*map(state.gpus_of, lacking))
    return {name: each for name, each in found.items() if wanted.isdisjoint(each[0].gpus)}


def could_spill(states: Iterable[G], model: Model, now: float) -> list[G]:
    """The GPU groups in which loading another backend of a busy model may be worth it."""
    if model.is_coming or not behind(model, now):
        return []
    return [state for state in states if spill(state, model, now)]


def spill(state: GroupState, model: Model, now: float) -> tuple[Plan, Spill] | None:
    """The next replica of a busy model, and what the policy is shown of it."""
    if not model.ready or model.is_coming or state.is_out_of_reach:
        return None
    late = behind(model, now)
    if not late or not state.loadable(model, now):
        return None
    used = {slot.name for slot in state.slots.values() if slot.holders or slot.model == model.name}
    found = plan(state, model, state.busy_gpus(), now, used | state.staying(now))
    if found is None:
        return None
    reload = [state.load_seconds(each, each.backend.evict_to[0]) for each in found.victims]
    return found, Spill(
        model=model.name,
        backend=found.target.name,
        waiting=len(late),
        waited_seconds=sum(late),
        evicts=found.evicts,
        evict_seconds=found.cost.evict_seconds,
        load_seconds=found.cost.load_seconds,
        reload_seconds=sum(reload),
    )


def behind(model: Model, now: float) -> list[float]:
    """How long each request has waited that waits behind others at a replica, or for a place at any."""
    if model.replicas is None:
        return []
    in_flight = model.replicas.in_flight
    found = [
        now - slot.holders[ticket] for slot in model.ready for ticket in in_flight.behind(slot.name, now)
    ]
    if model.queue.tickets:
        found += [now - each.since for each in model.queue if not model.needed(each.work.owner)]
    return found
