"""How the state of a GPU group is made: from the configuration, and from the groups whose place it takes.

Backends that go on keep their slots with all that hangs on them, models their queue, their demand and what is
in flight; swaps and preloads under way go on. Everything else follows from the configuration. Nothing of the
states before is changed, and they are told nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from anvil_mux.config.config import Backend, Config
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.eviction import Eviction
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.model import Model, max_waits, ready_slots
from anvil_mux.scheduler.placement import Placement
from anvil_mux.scheduler.planner import worth
from anvil_mux.scheduler.policies import Policy
from anvil_mux.scheduler.queue import ModelQueue
from anvil_mux.scheduler.replicas import Replicas
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.standby import HostMemory
from anvil_mux.scheduler.state import GroupState


def build_state(
    name: str,
    config: Config,
    backends: Iterable[Backend],
    policy: Policy,
    eviction: Eviction,
    emit: Callable[[Event], object],
    *,
    costs: Costs,
    memory: HostMemory,
    footprints: Footprints,
    emit_leases: bool,
    before: Sequence[GroupState],
    coming: Mapping[str, str],
) -> GroupState:
    """``before``: the states of the groups whose place it takes.

    Backends that it has in common with them keep their slots, unless these were left for good.
    ``coming``: slot that is about to be left -> the model that it will be of then.
    """
    kept = {name: slot for each in before for name, slot in each.slots.items() if not slot.is_left}
    placement = Placement(backends, config.gpus, eviction, kept)
    state = GroupState(
        name=name,
        config=config,
        policy=policy,
        placement=placement,
        models=_models(placement.slots, config, coming),
        memory=memory,
        costs=costs,
        footprints=footprints,
        emit=emit,
        emit_leases=emit_leases,
    )
    state.preloads += [s for s in state.slots.values() if s.backend.preload and s.name not in kept]
    for slot in state.slots.values():
        memory.join(slot, partial(worth, state))
        placement.measure(slot, footprints.held(slot.name))
    for each in before:
        _go_on_from(state, each)
    return state


def _models(slots: Mapping[str, Slot], config: Config, coming: Mapping[str, str]) -> dict[str, Model]:
    found: dict[str, list[Slot]] = {}
    for slot in slots.values():
        for name in dict.fromkeys((slot.model, coming.get(slot.name, slot.model))):
            found.setdefault(name, []).append(slot)
    limits = max_waits(slots.values(), config)
    return {name: _model(name, own, config, limits) for name, own in found.items()}


def _model(name: str, slots: list[Slot], config: Config, limits: Mapping[str, float]) -> Model:
    limited = any(slot.backend.concurrency for slot in slots if slot.model == name)
    return Model(
        name=name,
        slots=slots,
        queue=ModelQueue(limited=limited),
        replicas=Replicas(slots, config) if len(slots) > 1 else None,
        priority=max(slot.backend.priority for slot in slots),
        max_wait=limits.get(name, config.max_wait),
        ready=ready_slots(slots),
    )


def _go_on_from(state: GroupState, before: GroupState) -> None:
    """What is under way goes on, and who waits for a model that is served here waits on."""
    state.settled += before.settled
    state.taken_back += before.taken_back
    state.swaps += before.swaps
    state.preloads += [each for each in before.preloads if state.slots.get(each.name) is each]
    state.unseen |= before.unseen & state.slots.keys()
    state.placement.others = {**state.placement.others, **before.placement.others}
    for name, old in before.models.items():
        model = state.models.get(name)
        if model is None:
            continue
        model.demand = old.demand
        model.unload_when_idle = old.unload_when_idle
        model.queue.go_on_from(old.queue, most=model.max_wait)
        if model.replicas and old.replicas:
            model.replicas.in_flight.go_on_from(old.replicas.in_flight)
