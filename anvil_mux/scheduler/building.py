"""The making of GPU groups' states: from the configuration, and from the groups whose place they take.

First come the slots of each group (``place``), then the models of all of them, which may have backends in
several (``build_models``), then the states. Backends that go on keep their slots with all that hangs on them,
models their queue, their demand and their in-flight tracker; swaps and preloads under way go on. Everything
else follows from the configuration. No fact reaches the states before any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from anvil_mux.config.config import Backend, Config, Gpu
from anvil_mux.routing.routing import Routing
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.eviction import Eviction
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.hosts import HostRecord
from anvil_mux.scheduler.memories import SharedMemories
from anvil_mux.scheduler.model import Model, max_waits
from anvil_mux.scheduler.placement import Placement
from anvil_mux.scheduler.planner import worth
from anvil_mux.scheduler.policies import Policy
from anvil_mux.scheduler.queue import ModelQueue
from anvil_mux.scheduler.replicas import Replicas
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.standby import HostMemory
from anvil_mux.scheduler.state import GroupState, Timeouts


class Common(NamedTuple):
    """The objects and settings that all GPU groups of one configuration share."""

    config: Config
    timeouts: Timeouts
    gpus: Mapping[str, Gpu]
    """All GPUs of all hosts, by the names that they have among them."""
    policy: Policy
    eviction: Eviction
    emit: Callable[[Event], object]
    emit_leases: bool
    costs: Costs
    footprints: Footprints
    hosts: Mapping[str, HostRecord]
    memories: Mapping[str, HostMemory]
    """Host -> its memory."""
    states: dict[str, list[GroupState]]
    """Model -> the states of the GPU groups that have backends of it."""
    touched: dict[GroupState, None]
    """The states in which something has changed: see ``GroupState.touched``."""


class Draft(NamedTuple):
    """A GPU group that is to be made."""

    name: str
    host: str
    backends: Sequence[Backend]
    before: Sequence[GroupState] = ()
    """The states of the groups whose place it takes."""


def place(draft: Draft, common: Common) -> Placement:
    """The slots of one GPU group. Backends keep those that they have, unless they left them for good."""
    kept = {name: slot for each in draft.before for name, slot in each.slots.items() if not slot.is_left}
    names = dict.fromkeys(gpu for backend in draft.backends for gpu in backend.gpu_names)
    gpus = [common.gpus[name] for name in names if name in common.gpus]
    return Placement(draft.backends, gpus, common.eviction, kept, common.hosts)


def coming_models(slots: Iterable[Slot], wanted: Mapping[str, Backend]) -> dict[str, str]:
    """Slot that is about to be left -> the model that it will be of then, where that is another."""
    kept = [slot for slot in slots if slot.name in wanted]
    return {slot.name: wanted[slot.name].model for slot in kept if wanted[slot.name].model != slot.model}


def build_models(
    slots: Iterable[Slot],
    config: Config,
    routings: Mapping[str, Routing],
    coming: Mapping[str, str] = MappingProxyType({}),
    before: Mapping[str, Model] = MappingProxyType({}),
    only: Collection[str] | None = None,
) -> dict[str, Model]:
    """The models of these slots, in which those ``before`` go on; ``coming``: see ``coming_models``.

    ``routings``: all routing policies that backends of ``config`` name, and its own. ``only``: the models of
    which these are all slots; None: of each.
    """
    found: dict[str, list[Slot]] = {}
    for slot in slots:
        for name in dict.fromkeys((slot.model, coming.get(slot.name, slot.model))):
            if only is None or name in only:
                found.setdefault(name, []).append(slot)
    limits = max_waits((slot for own in found.values() for slot in own), config)
    made = {
        name: _model(name, own, config, routings, limits=limits, before=before.get(name))
        for name, own in found.items()
    }
    for name, model in made.items():
        if old := before.get(name):
            _go_on_with(model, old)
    return made


def _model(
    name: str,
    slots: list[Slot],
    config: Config,
    routings: Mapping[str, Routing],
    limits: Mapping[str, float],
    before: Model | None,
) -> Model:
    staying = [slot for slot in slots if not slot.leaving] or slots
    routing = routings.get(staying[0].backend.routing or "") or routings[config.routing]
    limited, replicas = any(slot.backend.concurrency for slot in slots if slot.model == name), None
    if len(slots) > 1:
        full, known = config.routing_mode == "full", before.replicas if before else None
        replicas = Replicas(slots, routing, full=full, before=known)
    return Model(
        name=name,
        slots=slots,
        queue=ModelQueue(limited=limited),
        replicas=replicas,
        priority=max(slot.backend.priority for slot in slots),
        max_wait=limits.get(name, config.max_wait),
    )


def _go_on_with(model: Model, old: Model) -> None:
    """The model takes over the queue and the demand of the ``old`` one."""
    model.demand = old.demand
    model.home = old.home
    model.unload_when_idle = old.unload_when_idle
    model.queue.go_on_from(old.queue, most=model.max_wait)


def slots_of(placed: Sequence[Placement], models: Mapping[str, Model]) -> list[dict[str, list[Slot]]]:
    """The slots of each model in each of these GPU groups, in the order of ``models``."""
    nth = {name: number for number, placement in enumerate(placed) for name in placement.slots}
    found: list[dict[str, list[Slot]]] = [{} for _ in placed]
    for name, model in models.items():
        for slot in model.slots:
            if slot.name in nth:
                found[nth[slot.name]].setdefault(name, []).append(slot)
    return found


def build_state(
    draft: Draft,
    placement: Placement,
    own: dict[str, list[Slot]],
    models: Mapping[str, Model],
    common: Common,
) -> GroupState:
    """The state of a GPU group; ``own``: the slots of each model there, which may have others elsewhere."""
    kept = {slot.name for each in draft.before for slot in each.slots.values() if not slot.is_left}
    parts = {host.name: host for slot in placement.slots.values() for host in slot.host.parts}
    hosts = tuple([parts[name] for name in sorted(parts)]) or (common.hosts[draft.host],)
    memories = [common.memories[host.name] for host in hosts]
    state = GroupState(
        name=draft.name,
        timeouts=common.timeouts,
        policy=common.policy,
        placement=placement,
        models={name: models[name] for name in own},
        own_slots=own,
        states=common.states,
        touched=common.touched,
        hosts=hosts,
        memory=memories[0] if len(memories) == 1 else SharedMemories(memories),
        costs=common.costs,
        footprints=common.footprints,
        emit=common.emit,
        emit_leases=common.emit_leases,
    )
    state.preloads += [s for s in state.slots.values() if s.backend.preload and s.name not in kept]
    for slot in state.slots.values():
        state.memory.join(slot, partial(worth, state))
        placement.measure(slot, state.footprints.held(slot.name, slot.backend.service.digest))
    for each in draft.before:
        _go_on_from(state, each)
    return state


def _go_on_from(state: GroupState, before: GroupState) -> None:
    """The state takes over what was under way: swaps, preloads, tickets that nobody has collected yet."""
    state.settled += before.settled
    state.taken_back += before.taken_back
    state.swaps += before.swaps
    state.preloads += [each for each in before.preloads if state.slots.get(each.name) is each]
    state.unseen |= before.unseen & state.slots.keys()
    state.placement.others = {**state.placement.others, **before.placement.others}
