"""The GPU groups of a configuration, and what a reload makes of them.

A reload changes the configuration while requests run. A backend that goes on (change.py) keeps its slot with
all that hangs on it: state, leases, memory. One that was changed or removed is leaving (group.py): its slot
keeps the description by which it was started until it holds nothing any more, and is then given to the new
description, or taken away; a backend that goes to another host gets a slot there then. Queues belong to
models, so a request for a backend that changed waits on, and one for a model that is served no longer fails
at once. No GPU group is altered: another one takes its place and goes on from it, so what follows from the
configuration is computed in one place. GPU groups that a new backend ties together become one, and stay one:
swaps that are under way may not be cut.

Only groups of which something has changed are exchanged for others: a backend, a GPU, the memory of their
host, or a setting by which all are built. The rest is told apart beforehand (preparing.py), and where
everything is then is noted in index.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

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
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.hosts import HostRecord
from anvil_mux.scheduler.index import Index
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.pause import Pause
from anvil_mux.scheduler.placement import Placement, gpu_groups, group_name
from anvil_mux.scheduler.planner import nearest, wait_seconds
from anvil_mux.scheduler.preparing import Prepared, prepare
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.standby import HostMemory
from anvil_mux.scheduler.state import GroupState, Timeouts

LONGER = 1.25
"""How much longer a wait has become when all groups of a wide model are looked at again."""


class Exchanged(NamedTuple):
    """The GPU groups that took the place of others."""

    old: Sequence[GpuGroup]
    made: Sequence[GpuGroup]
    """The groups that take their place, in the order of all."""
    gone: Sequence[GpuGroup]
    """The old ones of which nothing goes on, but that tickets ended there."""
    models: Sequence[str]
    """The models that have backends in any of them."""


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
        self._index = index = Index()
        self.models, self.of_model, self.of_backend = index.models, index.of_model, index.of_backend
        self.groups, self.by_name, self.spread = index.groups, index.by_name, index.spread
        self.groups_of = index.groups_of
        """Model -> the groups that have backends of it, by name. The groups have this, too."""
        self.touched: dict[GroupState, None] = {}
        """The states in which something has changed: see ``GroupState.touched``."""
        self.hosts: dict[str, HostRecord] = {}
        """All hosts, by name; ``records``: those that have groups."""
        self.pause = Pause()
        """The pause of all of them."""
        self.memories: dict[str, HostMemory] = {}
        """Host -> its memory; ``bounded``: where that is bounded."""
        self.bounded: dict[str, HostMemory] = {}
        self._moving: set[str] = set()
        """The backends that have not left their host yet, and go to another one."""
        self._misnamed: dict[GpuGroup, None] = {}
        """The groups that have lost all backends on some of their GPUs."""
        self._emit, self._emit_leases = emit, emit_leases
        self._costs, self._footprints = costs, footprints
        prepared = prepare(Config(()), config)
        self.regroup(prepared.different, self.take(prepared))

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
    def records(self) -> list[HostRecord]:
        """The hosts that have groups."""
        return list(self._index.records.values())

    @property
    def moved(self) -> list[str]:
        """The backends that go to another host, and have left the one that they were on: ``move``."""
        return [name for name in self._moving if self.of_backend[name].slots[name].is_left]

    def on_host(self, host: str) -> list[GpuGroup]:
        """The groups of a host, by name."""
        return self._index.by_host.get(host, [])

    def waiting_for(self, exchange: Exchanged) -> list[GpuGroup]:
        """The groups that are to be asked after an exchange, in the order of all: those that it made, and
        those elsewhere in which queues stand, or may, of models that it concerns."""
        found = dict.fromkeys(exchange.made)
        for model in [self.models[name] for name in exchange.models if name in self.models]:
            if model.queue.tickets:
                own = [self.of_model[model.name]] if model.is_wide else self.groups_of[model.name]
                found.update(dict.fromkeys(own))
        return self._index.in_order(found)

    # Changes

    def take(self, prepared: Prepared) -> list[GpuGroup]:
        """Another configuration holds from now on; returns the groups that it concerns: ``regroup``."""
        self.config = config = prepared.config
        self.gpus, self.served = prepared.gpus, prepared.served
        self.pause.waits = config.when_paused == "wait"
        self._wanted, self._places, self._routings = prepared.wanted, prepared.places, prepared.routings
        resized = [name for name, budget in prepared.budgets.items() if self._set_budget(name, budget)]
        if resized:
            self.bounded = {name: each for name, each in self.memories.items() if each.budget is not None}
        self._common = Common(
            config=config,
            timeouts=Timeouts(config.drain_timeout, config.queue_timeout, config.home_after),
            gpus=self.gpus,
            policy=prepared.policy,
            eviction=prepared.eviction,
            emit=self._emit,
            emit_leases=self._emit_leases,
            costs=self._costs,
            footprints=self._footprints,
            hosts=self.hosts,
            memories=self.memories,
            states=self._index.states,
            touched=self.touched,
        )
        if prepared.concerns_all:
            return list(self.groups)
        found = self._concerned(prepared.different)
        found |= dict.fromkeys(filter(None, map(self._index.of_gpu, prepared.different_gpus)))
        found |= dict.fromkeys(group for host in resized for group in self.on_host(host))
        return self._index.in_order(found)

    def _set_budget(self, host: str, budget: int | None) -> bool:
        """Note the memory of a host for engines; whether it is another than before."""
        if host not in self.hosts:
            self.hosts[host] = HostRecord(host, pause=self.pause)
            self.memories[host] = HostMemory(None, self._footprints, host)
        before, self.memories[host].budget = self.memories[host].budget, budget
        return before != budget

    def _concerned(self, backends: Iterable[str]) -> dict[GpuGroup, None]:
        """The groups that these backends are in, or are to be in; those whose name does not fit any more."""
        found = dict.fromkeys(self._misnamed)
        for name in backends:
            if name in self.of_backend:
                found[self.of_backend[name]] = None
            wanted = self._wanted.get(name)
            for gpu in wanted.gpu_names if wanted else ():
                if group := self._index.of_gpu(gpu):
                    found[group] = None
        return found

    def move(self) -> Exchanged:
        """Give the backends that have ``moved`` their slots on their new hosts."""
        return self.regroup(self.moved, self._index.in_order(self._concerned(self.moved)))

    def regroup(self, backends: Iterable[str], old: Sequence[GpuGroup]) -> Exchanged:
        """Build the groups of the backends that are in ``old`` groups, and of those given.

        ``old``: all groups that they are in, or are to be in.
        """
        names = {*backends, *(name for group in old for name in group.slots)}
        staying = {slot.name: slot.backend for group in old for slot in group.leaving}
        wanted = [self._wanted[name] for name in names if name in self._wanted]
        wanted.sort(key=lambda each: self._places[each.name])
        moving = {each.name for each in wanted if staying.get(each.name, each).host != each.host}
        self._moving = (self._moving - names) | moving
        members = [*staying.values(), *(each for each in wanted if each.name not in moving)]
        drafts, gone = [], dict.fromkeys(old)
        for name, together in gpu_groups(members, lambda each: [group.name for group in self._before(each)]):
            own = {each.name: staying.get(each.name, each) for each in together}
            merged = list(dict.fromkeys(group for each in together for group in self._before(each)))
            states = [group.state for group in merged]
            drafts.append(Draft(name, together[0].host, list(own.values()), states))
            for group in merged:
                gone.pop(group, None)
        return self._exchange(drafts, old)._replace(gone=list(gone))

    def _before(self, backend: Backend) -> list[GpuGroup]:
        """The group in which a backend is until now, if there is one on its host."""
        group = self.of_backend.get(backend.name)
        return [group] if group and any(host.name == backend.host for host in group.hosts) else []

    def renew(self, group: GpuGroup) -> Exchanged:
        """Put another group in the place of one of which a slot was left for good."""
        staying = {slot.name: slot.backend for slot in group.leaving}
        members = [staying.get(name) or self._wanted.get(name) for name in group.slots]
        here = [each for each in members if each]
        draft = Draft(group.name, group.hosts[0].name, here, [group.state])
        exchange = self._exchange([draft], [group])
        if not here or group_name(here) != group.name:
            self._misnamed.update(dict.fromkeys(exchange.made))
        return exchange

    def place_queue(self, model: Model, now: float, changed: Sequence[GroupState] | None = None) -> None:
        """Choose anew in which group the queue of a model with backends in several stands.

        ``changed``: the states that have changed since it was chosen last. Of a wide model only these are
        looked at, as long as the queue's wait where it stands has not become much longer.
        """
        states = self._index.states[model.name]
        if model.is_wide and changed is not None:
            home = self.of_model[model.name].state
            if wait_seconds(home, model, now) <= LONGER * model.wait:
                states = list(dict.fromkeys((home, *changed)))
        home = nearest(states, model, now)
        model.home, model.wait = home.name, wait_seconds(home, model, now) if model.is_wide else math.inf
        self.of_model[model.name] = self.by_name[home.name]

    def _exchange(self, drafts: Sequence[Draft], old: Sequence[GpuGroup]) -> Exchanged:
        """Make the groups of ``drafts``, which take the place of the ``old`` ones."""
        placed = [place(each, self._common) for each in drafts]
        models = self._build_models(placed, old)
        made = []
        for draft, placement, own in zip(drafts, placed, slots_of(placed, models), strict=True):
            state = build_state(draft, placement, own, models, self._common)
            made.append(GpuGroup(state, self.groups_of))
        siblings = self._index.siblings(models, but=old)
        for group in siblings:
            there = group.state.models
            there.update({name: models[name] for name in there if name in models})
        affected = dict.fromkeys(name for group in old for name in group.state.models) | models
        self._index.exchange(old, made, affected, self._wanted, self._places)
        for group in siblings:
            group.state.remodelled()
        for group in old:
            self._forget(group)
        return Exchanged(old, made, (), list(affected))

    def _build_models(self, placed: Sequence[Placement], old: Sequence[GpuGroup]) -> dict[str, Model]:
        """Build the models that have backends in groups that are made, or had in ``old`` ones.

        Their backends in other groups are among those of the models, in the order of all groups.
        """
        slots = [slot for placement in placed for slot in placement.slots.values()]
        coming = coming_models(slots, self._wanted)
        affected = dict.fromkeys(name for group in old for name in group.state.models)
        affected |= dict.fromkeys(
            name for slot in slots for name in (slot.model, coming.get(slot.name)) if name
        )
        parts = [list(placement.slots.values()) for placement in placed]
        for group in self._index.siblings(affected, but=old):
            there = group.state.own_slots
            shared = dict.fromkeys(slot for name in there if name in affected for slot in there[name])
            coming |= coming_models(shared, self._wanted)
            parts.append(list(shared))
        parts.sort(key=lambda part: max([self._places.get(slot.name, -1) for slot in part], default=-1))
        ordered = [slot for part in parts for slot in part]
        return build_models(
            ordered, self.config, self._routings, coming=coming, before=self.models, only=affected
        )

    def _forget(self, group: GpuGroup) -> None:
        """Forget a group whose place others have taken."""
        self.touched.pop(group.state, None)
        self._misnamed.pop(group, None)
        for name in group.slots:
            slot = self.slot(name)
            for host in group.hosts:
                if slot is None or host.name not in slot.backend.hosts:
                    self.memories[host.name].leave(name)
