"""The GPU groups of a configuration, and in which of them each backend and the queue of each model is.

A reload changes the configuration while requests run. A backend that goes on (change.py) keeps its slot with
all that hangs on it: state, leases, memory. One that was changed or removed is leaving (group.py): its slot
keeps the description by which it was started until it holds nothing any more, and is then given to the new
description, or taken away; a backend that goes to another host gets a slot there then. Queues belong to
models, so a request for a backend that changed waits on, and one for a model that is served no longer fails
at once. No GPU group is altered: another one takes its place and goes on from it, so what follows from the
configuration is computed in one place. GPU groups that a new backend ties together become one, and stay one:
swaps that are under way may not be cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

from anvil_mux.config.config import Backend, Config
from anvil_mux.scheduler.building import (
    Common,
    Draft,
    build_models,
    build_state,
    coming_models,
    place,
    slots_of,
)
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.eviction import build_eviction
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.hosts import HostRecord
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.placement import gpu_groups
from anvil_mux.scheduler.planner import nearest, wait_seconds
from anvil_mux.scheduler.policies import build_policy
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.standby import HostMemory
from anvil_mux.scheduler.state import GroupState

BY_NAME = attrgetter("name")
FEW_GROUPS = 16
"""A model with backends in more GPU groups is wide: not all of them are asked for each change."""
LONGER = 1.25
"""How much longer a wait has become when all groups of a wide model are looked at again."""


class Layout:
    """The GPU groups of one configuration. Drivers read it; only ``Scheduler`` and ``Settling`` change it."""

    def __init__(
        self,
        config: Config,
        emit: Callable[[Event], object],
        costs: Costs,
        footprints: Footprints,
        *,
        emit_leases: bool,
    ) -> None:
        self.models: dict[str, Model] = {}
        """All models, also those that are about to go."""
        self.of_model: dict[str, GpuGroup] = {}
        """Model -> the group in which its queue stands."""
        self.of_backend: dict[str, GpuGroup] = {}
        self.by_name: dict[str, GpuGroup] = {}
        self._by_host: dict[str, list[GpuGroup]] = {}
        self.groups: list[GpuGroup] = []
        self.groups_of: dict[str, list[GpuGroup]] = {}
        """Model -> the groups that have backends of it, by name. The groups have this too, as the next."""
        self.states: dict[str, list[GroupState]] = {}
        """Model -> the states of these groups."""
        self.touched: dict[GroupState, None] = {}
        """The states in which something has changed: see ``GroupState.touched``."""
        self.spread: list[str] = []
        """The models with backends in several groups."""
        self.hosts: dict[str, HostRecord] = {}
        """All hosts, by name; ``records``: those that have groups."""
        self.records: list[HostRecord] = []
        self.memories: dict[str, HostMemory] = {}
        """Host -> its memory; ``bounded``: where that is bounded."""
        self._moving: set[str] = set()
        """The backends that have not left their host yet, and go to another one."""
        self._emit, self._emit_leases = emit, emit_leases
        self._costs, self._footprints = costs, footprints
        self.take(config)
        groups = gpu_groups(config.backends)
        self._build([Draft(name, members[0].host, members) for name, members in groups])

    # Questions

    def slot(self, backend: str) -> Slot | None:
        """The slot of a backend, also of one that is leaving; None if there is none of that name."""
        group = self.of_backend.get(backend)
        return group.slots[backend] if group else None

    @property
    def slots(self) -> Iterator[Slot]:
        """The slots of all groups."""
        return (slot for group in self.groups for slot in group.slots.values())

    @property
    def leaving(self) -> list[Slot]:
        """The slots whose backends the configuration has no longer, or not as they are."""
        return [slot for group in self.groups for slot in group.leaving]

    @property
    def unseen(self) -> list[str]:
        """The backends of which it is not known yet whether they run."""
        return sorted(name for group in self.groups for name in group.state.unseen)

    @property
    def has_moved(self) -> bool:
        """Whether a backend that goes to another host has left the one that it was on: ``regroup``."""
        return any(self.of_backend[name].slots[name].is_left for name in self._moving)

    def on_host(self, host: str) -> list[GpuGroup]:
        """The groups of a host, by name."""
        return self._by_host.get(host, [])

    # Changes

    def take(self, config: Config) -> None:
        """Another configuration holds from now on; ``regroup`` follows."""
        self.config = config
        self._wanted = {backend.name: backend for backend in config.backends}
        self.gpus = {gpu.name: gpu for gpu in config.gpus}
        self.served = {backend.model for backend in config.backends}
        for name in ("", *{host for backend in config.backends for host in backend.hosts}):
            self.hosts.setdefault(name, HostRecord(name))
            memory = self.memories.setdefault(name, HostMemory(None, self._footprints, name))
            memory.budget = config.memory_of(name)
        self.bounded = {name: each for name, each in self.memories.items() if each.budget is not None}
        self._common = Common(
            config=config,
            gpus=self.gpus,
            policy=build_policy(config.policy, config.policy_settings),
            eviction=build_eviction(config.eviction, config.eviction_settings),
            emit=self._emit,
            emit_leases=self._emit_leases,
            costs=self._costs,
            footprints=self._footprints,
            hosts=self.hosts,
            memories=self.memories,
            states=self.states,
            touched=self.touched,
        )

    def regroup(self) -> list[GpuGroup]:
        """Build all groups anew, each from those whose place it takes.

        Returns the groups of which nothing goes on, but that tickets ended there.
        """
        gone = dict.fromkeys(self.groups)
        staying = {slot.name: slot.backend for slot in self.leaving}
        wanted = self._wanted.values()
        self._moving = {each.name for each in wanted if staying.get(each.name, each).host != each.host}
        drafts = []
        backends = [*staying.values(), *(each for each in wanted if each.name not in self._moving)]
        for name, together in gpu_groups(backends, lambda each: [group.name for group in self._before(each)]):
            members = {each.name: staying.get(each.name, each) for each in together}
            merged = list(dict.fromkeys(group for each in together for group in self._before(each)))
            states = [group.state for group in merged]
            drafts.append(Draft(name, together[0].host, list(members.values()), states))
            for group in merged:
                gone.pop(group, None)
        self._build(drafts)
        return list(gone)

    def _before(self, backend: Backend) -> list[GpuGroup]:
        """The group in which a backend is until now, if there is one on its host."""
        group = self.of_backend.get(backend.name)
        return [group] if group and any(host.name == backend.host for host in group.hosts) else []

    def renew(self, group: GpuGroup, now: float) -> GpuGroup:
        """Put another group in the place of one of which a slot was left for good."""
        staying = {slot.name: slot.backend for slot in group.leaving}
        members = [staying.get(name) or self._wanted.get(name) for name in group.slots]
        draft = Draft(group.name, group.hosts[0].name, [each for each in members if each], [group.state])
        position = self.groups.index(group)
        self._build([draft], [each for each in self.groups if each is not group])
        made = self.groups.pop()
        self.groups.insert(position, made)
        made.admission.resume(now)
        return made

    def place_queue(self, model: Model, now: float, changed: Sequence[GroupState] | None = None) -> None:
        """Choose anew in which group the queue of a model with backends in several stands.

        ``changed``: the states that have changed since it was chosen last. Of a wide model only these are
        looked at, as long as the queue's wait where it stands has not become much longer.
        """
        states = self.states[model.name]
        if model.is_wide and changed is not None:
            home = self.of_model[model.name].state
            if wait_seconds(home, model, now) <= LONGER * model.wait:
                states = list(dict.fromkeys((home, *changed)))
        home = nearest(states, model, now)
        model.home, model.wait = home.name, wait_seconds(home, model, now) if model.is_wide else math.inf
        self.of_model[model.name] = self.by_name[home.name]

    def _build(self, drafts: Sequence[Draft], others: Sequence[GpuGroup] = ()) -> None:
        """Make the groups of ``drafts``; ``others`` go on as they are."""
        placed = [place(each, self._common) for each in drafts]
        slots = [slot for placement in placed for slot in placement.slots.values()]
        models = self._build_models(slots, drafts, others)
        made = []
        for draft, placement, own in zip(drafts, placed, slots_of(placed, models), strict=True):
            state = build_state(draft, placement, own, models, self._common)
            made.append(GpuGroup(state, self.groups_of))
        for group in others:
            there = group.state.models
            there.update({name: models[name] for name in there if name in models})
        self.groups = [*others, *made]
        self._index()

    def _build_models(
        self, slots: Sequence[Slot], drafts: Iterable[Draft], others: Iterable[GpuGroup]
    ) -> dict[str, Model]:
        """Build the models that have backends in ``drafts``, with those that they have in ``others``."""
        slots_there = [slot for group in others for slot in group.slots.values()]
        coming = coming_models([*slots, *slots_there], self._wanted)
        affected = {model for draft in drafts for state in draft.before for model in state.models}
        affected |= {slot.model for slot in slots} | {coming.get(slot.name, slot.model) for slot in slots}
        shared = [s for s in slots_there if s.model in affected or coming.get(s.name) in affected]
        models = build_models([*slots, *shared], self.config, coming, self.models)
        models = {name: model for name, model in models.items() if name in affected}
        kept = {name for group in others for name in group.state.models} - affected
        self.models = {**{name: m for name, m in self.models.items() if name in kept}, **models}
        return models

    def _index(self) -> None:
        """Note where everything is, now that there are other groups than before."""
        self.of_backend = {name: group for group in self.groups for name in group.slots}
        self.groups_of.clear()
        self.by_name, self._by_host = {}, {}
        for group in sorted(self.groups, key=BY_NAME):
            self.by_name[group.name] = group
            for host in group.hosts:
                self._by_host.setdefault(host.name, []).append(group)
            for name in group.state.models:
                self.groups_of.setdefault(name, []).append(group)
        self.states.clear()
        self.states.update({name: [each.state for each in own] for name, own in self.groups_of.items()})
        of_model = {}
        for name, own in self.groups_of.items():
            model = self.models[name]
            of_model[name] = next((each for each in own if each.name == model.home), own[0])
            model.home = of_model[name].name if len(own) > 1 else ""
            model.is_wide = len(own) > FEW_GROUPS
        self.of_model = of_model  # as a whole: it is read without the lock, too
        self.spread = [name for name, own in self.groups_of.items() if len(own) > 1]
        self.records = list(dict.fromkeys(host for group in self.groups for host in group.hosts))
        for group in self.groups:
            group.state.remodelled()
