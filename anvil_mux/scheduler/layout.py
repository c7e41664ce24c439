"""The GPU groups of a configuration, and what a reload makes of them.

A reload changes the configuration while requests run. A backend that goes on (change.py) keeps its slot with
all that hangs on it: state, leases, memory. One that was changed or removed is leaving (group.py): its slot
keeps the description by which it was started until it holds nothing any more, and is then given to the new
description, or taken away; a backend that goes to another host gets a slot there then. Queues belong to
models, so a request for a backend that changed waits on, and one for a model that is served no longer fails
at once. GPU groups that a new backend ties together become one, and stay one: swaps that are under way may
not be cut.

A reload costs what it changes. Settings that all groups share are put in the place of others by one
assignment (``Common.settings``); a backend that goes on gets its new description where it is; only groups in
which backends come or leave, and those of a GPU that is declared anew, are filled anew (building.py). What
follows from the configurations alone is found beforehand (preparing.py); where everything is, is noted in
index.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from anvil_mux.config.config import Backend, Config, Gpu
from anvil_mux.scheduler.building import Draft, build_state, describe, fill
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.hosts import HostRecord
from anvil_mux.scheduler.index import Index
from anvil_mux.scheduler.model import Model, settings_of
from anvil_mux.scheduler.pause import Pause
from anvil_mux.scheduler.placement import gpu_groups, group_name
from anvil_mux.scheduler.planner import nearest
from anvil_mux.scheduler.preparing import Prepared, prepare
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.standby import HostMemory
from anvil_mux.scheduler.state import Common, GroupState


class Exchanged(NamedTuple):
    """The GPU groups of which something has changed."""

    old: Sequence[GpuGroup]
    """The groups that there were before; of them those go on that are ``made``, too."""
    made: Sequence[GpuGroup]
    """The groups that there are now."""
    gone: Sequence[GpuGroup]
    """The old ones of which nothing goes on, but that tickets ended there."""
    models: Collection[str]
    """The models that have backends in any of them, or are described otherwise."""


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
        self.groups_of, self.states_of = index.groups_of, index.states
        """Model -> the groups that have backends of it, by name, which the groups have, too; their states."""
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
        prepared = prepare(Config(()), config)
        self._common = common = Common(
            settings=prepared.settings,
            emit=emit,
            emit_leases=emit_leases,
            costs=costs,
            footprints=footprints,
            hosts=self.hosts,
            memories=self.memories,
            models=index.models,
            states=index.states,
        )
        self.touched = common.touched
        """The states in which something has changed: see ``Common.touched``."""
        self.take(prepared)
        self.regroup(prepared.replaced, ())

    # Questions

    @property
    def gpus(self) -> Mapping[str, Gpu]:
        """All GPUs of all hosts, by the names that they have among them."""
        return self._common.settings.gpus

    @property
    def wanted(self) -> Mapping[str, Backend]:
        """The backends of the configuration, by name."""
        return self._common.settings.wanted

    @property
    def served(self) -> Set[str]:
        """The models that backends of the configuration serve."""
        return self._common.settings.models.keys()

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
        """The groups that are to be asked after an exchange, in the order of all: those that it changed, and
        those elsewhere in which queues stand, or may, of models that it concerns."""
        return self._index.in_order({**dict.fromkeys(exchange.made), **self.with_queues(exchange.models)})

    def going_on(self, prepared: Prepared) -> dict[GpuGroup, None]:
        """The groups that go on as they are, and may decide otherwise under this configuration."""
        names = [name for name in prepared.go_on if name in self.of_backend]
        groups = self.groups if prepared.concerns_all else [self.of_backend[name] for name in names]
        models = [self.of_backend[name].slots[name].model for name in names]
        found = self.with_queues([*models, *prepared.different_models])
        for host in prepared.budgets:
            found |= dict.fromkeys(self.on_host(host))
        found.update(dict.fromkeys(groups))
        return found

    def with_queues(self, models: Iterable[str]) -> dict[GpuGroup, None]:
        """The groups in which queues of these models stand, or may."""
        found: dict[GpuGroup, None] = {}
        for model in [self.models[name] for name in models if name in self.models]:
            if model.queue.tickets:
                found.update(dict.fromkeys(self.groups_of[model.name]))
        return found

    # Changes

    def replaced_by(self, prepared: Prepared, backends: Iterable[str]) -> list[GpuGroup]:
        """The groups that a configuration changes, or ties together, by these backends: see ``regroup``."""
        found = self._concerned(backends, prepared.settings.wanted)
        found |= dict.fromkeys(filter(None, map(self._index.of_gpu, prepared.different_gpus)))
        return self._index.in_order(found)

    def take(self, prepared: Prepared) -> None:
        """Another configuration holds from now on, also for the backends and models that go on."""
        self.config, self._index.places = prepared.config, prepared.places
        self._common.settings = prepared.settings
        self.pause.waits = prepared.config.when_paused == "wait"
        for name, budget in prepared.budgets.items():
            self._set_budget(name, budget)
        self.bounded = {name: each for name, each in self.memories.items() if each.budget is not None}
        for name in prepared.go_on:
            self._describe(name)
        self._set_models(prepared.different_models, rerouted=prepared.rerouted)

    def _set_budget(self, host: str, budget: int | None) -> None:
        if host not in self.hosts:
            self.hosts[host] = HostRecord(host, pause=self.pause)
            self.memories[host] = HostMemory(None, self._common.footprints)
        self.memories[host].budget = budget

    def _set_models(self, models: Iterable[str], *, rerouted: bool = False) -> None:
        """Have models go by the settings that follow from the configuration.

        While a backend of one leaves they are those of its backends as they are. ``rerouted``: routing
        policies are other ones, also where their names are the same.
        """
        settings = self._common.settings
        for model in [self.models[name] for name in models if name in self.models]:
            before = model.settings
            wanted = settings.models.get(model.name, before)
            if [slot for slot in model.active if slot.leaving]:
                own = [slot.backend for slot in model.slots if slot.model == model.name]
                wanted = settings_of(own, self.config)._replace(routing=wanted.routing)
            routing = model.routing
            if rerouted or wanted.routing != before.routing:
                routing = settings.routings.get(wanted.routing, routing)
            model.set(wanted, routing)
            if wanted.bounded is not before.bounded:
                self._remodelled(model.name)

    def _remodelled(self, model: str) -> None:
        for group in self.groups_of[model]:
            group.state.remodelled()

    def _describe(self, backend: str) -> None:
        """Have a backend that goes on go by its new description."""
        slot = self.slot(backend)
        if slot and not slot.leaving:
            describe(self.of_backend[backend].state, slot, self.wanted[backend])

    def _concerned(self, backends: Iterable[str], described: Mapping[str, Backend]) -> dict[GpuGroup, None]:
        """The groups that these backends are in, or are to be in; those whose name does not fit any more."""
        found = dict.fromkeys(self._misnamed)
        for name in backends:
            if name in self.of_backend:
                found[self.of_backend[name]] = None
            wanted = described.get(name)
            for gpu in wanted.gpu_names if wanted else ():
                if group := self._index.of_gpu(gpu):
                    found[group] = None
        return found

    def move(self) -> Exchanged:
        """Give the backends that have ``moved`` their slots on their new hosts."""
        return self.regroup(self.moved, self.concerned(self.moved))

    def concerned(self, backends: Iterable[str]) -> list[GpuGroup]:
        """The groups that backends are in, or are to be in: see ``regroup``."""
        return self._index.in_order(self._concerned(backends, self.wanted))

    def regroup(self, backends: Iterable[str], old: Sequence[GpuGroup]) -> Exchanged:
        """Give the backends that are in ``old`` groups, and those given, the groups that they are to be in.

        ``old``: all groups that they are in, or are to be in.
        """
        names = {*backends, *(name for group in old for name in group.slots)}
        staying = {slot.name: slot.backend for group in old for slot in group.leaving}
        places = self._index.places
        wanted = [self._description(name) for name in sorted(names & places.keys(), key=places.__getitem__)]
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

    def _description(self, backend: str) -> Backend:
        """The description of a backend of the configuration: that of its slot, if it goes on."""
        slot = self.slot(backend)
        return slot.backend if slot and not slot.leaving else self.wanted[backend]

    def _before(self, backend: Backend) -> list[GpuGroup]:
        """The group in which a backend is until now, if there is one on its host."""
        group = self.of_backend.get(backend.name)
        return [group] if group and group.host.name == backend.host else []

    def renew(self, group: GpuGroup) -> Exchanged:
        """Have a group do without a slot that was left for good, or with another of the same backend."""
        staying = {slot.name: slot.backend for slot in group.leaving}
        wanted = self.wanted
        members = [
            staying.get(name) or (wanted.get(name) and self._description(name)) for name in group.slots
        ]
        here = [each for each in members if each]
        draft = Draft(group.name, group.host.name, here, [group.state])
        exchange = self._exchange([draft], [group])
        if not here or group_name(here) != group.name:
            self._misnamed.update(dict.fromkeys(exchange.made))
        return exchange

    def place_queue(self, model: Model, now: float, changed: Collection[GroupState] | None = None) -> None:
        """Choose anew in which group the queue of a model with backends in several stands.

        ``changed``: the states that have changed since it was chosen last. As long as the one where it stands
        has not, only these may be better.
        """
        states, home = self._index.states[model.name], self.of_model[model.name].state
        if changed is not None and home not in changed:
            states = [home, *changed]
        model.home = nearest(states, model, now).name
        self.of_model[model.name] = self.by_name[model.home]

    def _exchange(self, drafts: Sequence[Draft], old: Sequence[GpuGroup]) -> Exchanged:
        """Have the groups of ``drafts``, which go on from the ``old`` ones, or are these."""
        before = {group: group.state.own_slots for group in old}
        names = [(group, name) for group in old for name in group.slots]
        made = [self._filled(draft) for draft in drafts]
        changes = self._index.exchange(before, made)
        for group in made:
            group.state.remodelled()
        for name, change in changes.items():
            if name in self.models and self.models[name].change(
                change.gone, change.come, self._index.rank_of
            ):
                self._remodelled(name)
        for group, name in names:
            self._forget(group, name)
        for group in old:
            self._misnamed.pop(group, None)
            if self.by_name.get(group.name) is not group:
                self.touched.pop(group.state, None)
        own = (*before.values(), *(group.state.own_slots for group in made))
        models = dict.fromkeys(name for each in own for name in each)
        self._set_models(models)
        return Exchanged(old, made, (), models)

    def _filled(self, draft: Draft) -> GpuGroup:
        """The group of a draft: the one that it goes on from, if that need not be another."""
        group = self.by_name.get(draft.name)
        if not (group and list(draft.before) == [group.state] and draft.host == group.host.name):
            group = GpuGroup(build_state(draft, self._common), self.groups_of)
        fill(group.state, draft)
        settings = self._common.settings
        for name in [name for name in group.state.own_slots if name not in self.models]:
            of_model = settings.models[name]
            self.models[name] = Model(name, of_model, settings.routings[of_model.routing], full=settings.full)
        return group

    def _forget(self, group: GpuGroup, backend: str) -> None:
        """Forget that a backend was in a group, as far as it is there no longer."""
        slot = self.slot(backend)
        if slot is None or slot.backend.host != group.host.name:
            self.memories[group.host.name].leave(backend)
