"""How the states of GPU groups are made: from the configuration, and from the groups whose place they take.

First come the slots of each group (``place``), then the models of all of them, which may have backends in
several (``build_models``), then the states. Backends that go on keep their slots with all that hangs on them,
models their queue, their demand and what is in flight; swaps and preloads under way go on. Everything else
follows from the configuration. Nothing of the states before is changed, and no fact reaches them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from anvil_mux.config.config import Backend, Config
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.eviction import Eviction
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.hosts import HostRecord
from anvil_mux.scheduler.model import Model, max_waits, ready_slots
from anvil_mux.scheduler.placement import Placement
from anvil_mux.scheduler.planner import worth
from anvil_mux.scheduler.policies import Policy
from anvil_mux.scheduler.queue import ModelQueue
from anvil_mux.scheduler.replicas import Replicas
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.standby import HostMemory
from anvil_mux.scheduler.state import GroupState


def place(
    config: Config,
    backends: Iterable[Backend],
    eviction: Eviction,
    before: Iterable[GroupState] = (),
    hosts: Mapping[str, HostRecord] = MappingProxyType({}),
) -> Placement:
    """The slots of one GPU group. Those that backends had ``before`` they keep, unless left for good."""
    kept = {name: slot for each in before for name, slot in each.slots.items() if not slot.is_left}
    return Placement(backends, config.gpus, eviction, kept, hosts)


def build_models(
    slots: Iterable[Slot],
    config: Config,
    coming: Mapping[str, str] = MappingProxyType({}),
    before: Mapping[str, Model] = MappingProxyType({}),
) -> dict[str, Model]:
    """The models of these slots, in which those ``before`` go on.

    ``coming``: slot that is about to be left -> the model that it will be of then.
    """
    found: dict[str, list[Slot]] = {}
    for slot in slots:
        for name in dict.fromkeys((slot.model, coming.get(slot.name, slot.model))):
            found.setdefault(name, []).append(slot)
    limits = max_waits((slot for own in found.values() for slot in own), config)
    made = {name: _model(name, own, config, limits) for name, own in found.items()}
    for name, model in made.items():
        if old := before.get(name):
            _go_on_with(model, old)
    return made


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


def _go_on_with(model: Model, old: Model) -> None:
    """Whoever waits for a model that is served still waits on."""
    model.demand = old.demand
    model.home = old.home
    model.unload_when_idle = old.unload_when_idle
    model.queue.go_on_from(old.queue, most=model.max_wait)
    if model.replicas and old.replicas:
        model.replicas.in_flight.go_on_from(old.replicas.in_flight)


def build_state(
    name: str,
    config: Config,
    placement: Placement,
    models: Mapping[str, Model],
    policy: Policy,
    emit: Callable[[Event], object],
    *,
    costs: Costs,
    memory: HostMemory,
    footprints: Footprints,
    emit_leases: bool,
    before: Sequence[GroupState],
    states: dict[str, list[GroupState]],
    host: HostRecord,
) -> GroupState:
    """``before``: the states of the groups whose place it takes. ``models``: also of other groups."""
    kept = {slot.name for each in before for slot in each.slots.values() if not slot.is_left}
    here = {name: each for name, each in models.items() if any(s.name in placement.slots for s in each.slots)}
    state = GroupState(
        name=name,
        config=config,
        policy=policy,
        placement=placement,
        models=here,
        states=states,
        host=host,
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


def _go_on_from(state: GroupState, before: GroupState) -> None:
    """What is under way goes on."""
    state.settled += before.settled
    state.taken_back += before.taken_back
    state.swaps += before.swaps
    state.preloads += [each for each in before.preloads if state.slots.get(each.name) is each]
    state.unseen |= before.unseen & state.slots.keys()
    state.placement.others = {**state.placement.others, **before.placement.others}
