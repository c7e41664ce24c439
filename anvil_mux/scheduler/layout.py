"""The GPU groups of a configuration, the tables of where everything is, and what a reload makes of both.

A reload changes the configuration while requests run. A backend that goes on (change.py) keeps its slot with
all that hangs on it: state, leases, memory. One that was changed or removed is leaving (group.py): its slot
keeps the description by which it was started until it holds nothing any more, and is then given to the new
description, or taken away; a backend that goes to another host gets a slot there then. Queues belong to
models, so a request for a backend that changed waits on, and one for a model that is served no longer fails
at once. GPU groups that a new backend ties together become one, and stay one: swaps that are under way may
not be cut.

A reload rebuilds by name: every GPU group is filled anew, with the slots that it has, and every table is made
anew of what the groups have then. A GPU group that goes on keeps its state; so does one into which others are
merged, once it has taken over what was under way there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu, gpu_name
from anvil_mux.errors import UnknownModel
from anvil_mux.routing import pipeline
from anvil_mux.routing.routing import Routing
from anvil_mux.scheduler.admission import nearest
from anvil_mux.scheduler.costs import Costs, Footprints
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.memory import HostMemory, Placement, build_eviction
from anvil_mux.scheduler.model import Model, model_settings, settings_of
from anvil_mux.scheduler.policies import build_policy
from anvil_mux.scheduler.slot import HostRecord, Pause, Slot
from anvil_mux.scheduler.state import Common, SharedSettings, order, worth

BY_NAME = attrgetter("name")


class Exchanged(NamedTuple):
    """The GPU groups that took the place of others."""

    made: Sequence[GpuGroup]
    """The groups that have been filled anew, in the order of all."""
    gone: Sequence[GpuGroup]
    """The groups of which nothing goes on, but that tickets ended there."""
    models: Iterable[str]
    """The models that have or had backends in any of them."""


class Layout(Common):
    """The GPU groups of one configuration. Drivers read it; only ``Scheduler`` changes it."""

    groups_of: dict[str, list[GpuGroup]]

    def __init__(
        self,
        config: Config,
        emit: Callable[[Event], object],
        costs: Costs,
        footprints: Footprints,
        *,
        emit_leases: bool,
    ) -> None:
        settings = shared_settings(config)
        super().__init__(settings, emit, emit_leases, costs, footprints)
        self.groups: list[GpuGroup] = []
        """All groups, in the order of their last backends in the configuration."""
        self.by_name: dict[str, GpuGroup] = {}
        self.of_backend: dict[str, GpuGroup] = {}
        self.of_model: dict[str, GpuGroup] = {}
        """Model -> the group in which its queue stands."""
        self.spread: list[str] = []
        """The models with backends in several groups."""
        self.pause = Pause()
        """The pause of all hosts."""
        self.bounded: dict[str, HostMemory] = {}
        """Host -> its memory, where that is bounded."""
        self._on_host: dict[str, list[GpuGroup]] = {}
        self.moving: set[str] = set()
        """The backends that have not left their host yet, and go to another one."""
        self.take(settings)
        self.regroup()

    # Questions

    def find(self, model: str) -> tuple[GpuGroup, Model]:
        """The GPU group in which a model's queue stands, and the model; UnknownModel if there is none."""
        try:
            return self.of_model[model], self.models[model]
        except KeyError:
            raise UnknownModel(model, self.settings.models.keys()) from None

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
        return sorted(name for group in self.groups for name in group.unseen)

    @property
    def records(self) -> list[HostRecord]:
        """The hosts that have groups."""
        return [self.hosts[name] for name in self._on_host]

    @property
    def moved(self) -> bool:
        """Whether a backend that goes to another host has left the one that it was on: ``regroup``."""
        return any(self.of_backend[name].slots[name].is_left for name in self.moving)

    def is_wanted(self, host: str) -> bool:
        """Whether a queue stands on a host."""
        return any(
            model.queue.tickets and model.queues_in(group.name)
            for group in self.on_host(host)
            for model in group.models.values()
        )

    def on_host(self, host: str) -> list[GpuGroup]:
        """The groups of a host, by name."""
        return self._on_host.get(host, [])

    def waiting_for(self, exchange: Exchanged) -> list[GpuGroup]:
        """The groups that are to be asked after an exchange: those that it changed, and those elsewhere in
        which queues stand, or may, of models that it concerns."""
        found = dict.fromkeys(exchange.made)
        for model in [self.models[name] for name in exchange.models if name in self.models]:
            if model.queue.tickets:
                found.update(dict.fromkeys(self.groups_of[model.name]))
        return list(found)

    # Changes

    def take(self, settings: SharedSettings) -> None:
        """Another configuration holds from now on, also for the backends and models that go on."""
        before, config, self.settings = self.settings.config, settings.config, settings
        self.pause.waits = config.when_paused == "wait"
        for host in dict.fromkeys(("", *(each.host for each in config.backends))):
            if host not in self.hosts:
                self.hosts[host] = HostRecord(host, pause=self.pause)
                self.memories[host] = HostMemory(None, self.footprints, partial(worth, self))
            self.memories[host].budget = config.memory_of(host)
            wake = config.wakes.get(host)
            self.hosts[host].wake_timeout = wake.timeout if wake else None
        self.bounded = {name: each for name, each in self.memories.items() if each.budget is not None}
        for group in self.groups:
            for slot in group.slots.values():
                leaves = config.completed(slot.backend) if slot.leaving else None
                wanted = leaves or settings.wanted.get(slot.name)
                if wanted and slot.backend != wanted:
                    _describe(group, slot, wanted)
        self._set_models(self.models.values(), rerouted=_routing_of(before) != _routing_of(config))

    def regroup(self) -> Exchanged:
        """Give all backends the groups that they are to be in."""
        staying = {slot.name: slot.backend for slot in self.leaving}
        wanted = [self._description(name) for name in self.settings.wanted]
        self.moving = {each.name for each in wanted if staying.get(each.name, each).host != each.host}
        members = [*staying.values(), *(each for each in wanted if each.name not in self.moving)]
        drafts = []
        for name, together in gpu_groups(members, lambda each: [group.name for group in self._before(each)]):
            own = {each.name: staying.get(each.name, each) for each in together}
            before = dict.fromkeys(group for each in together for group in self._before(each))
            drafts.append(Draft(name, together[0].host, list(own.values()), list(before)))
        go_on = {group for draft in drafts for group in draft.before}
        gone = [group for group in self.groups if group not in go_on]
        models = dict.fromkeys(self.models)
        self._note([self._filled(draft) for draft in drafts])
        return Exchanged(self.groups, gone, models | dict.fromkeys(self.models))

    def renew(self, group: GpuGroup) -> Exchanged:
        """Have a group do without a slot that was left for good, or with another of the same backend."""
        models = dict.fromkeys(group.own_slots)
        staying = {slot.name: slot.backend for slot in group.leaving}
        described = {name: self._description(name) for name in group.slots if name in self.settings.wanted}
        here = [each for name in group.slots if (each := staying.get(name) or described.get(name))]
        made = self._filled(Draft(group.name, group.host.name, here, [group]))
        self._note([made if each is group else each for each in self.groups])
        return Exchanged([made], (), models | dict.fromkeys(made.own_slots))

    def place_queue(self, model: Model, now: float, changed: Collection[GpuGroup] | None = None) -> None:
        """Choose anew in which group the queue of a model with backends in several stands.

        ``changed``: those that have changed since it was chosen last. As long as the one where it stands has
        not, only these may be better.
        """
        groups, home = self.groups_of[model.name], self.of_model[model.name]
        if changed is not None and home not in changed:
            groups = [home, *changed]
        self.of_model[model.name] = found = nearest(groups, model, now)
        model.queue_group = found.name

    def _description(self, backend: str) -> Backend:
        """The description of a backend of the configuration: that of its slot, if it goes on."""
        slot = self.slot(backend)
        return slot.backend if slot and not slot.leaving else self.settings.wanted[backend]

    def _before(self, backend: Backend) -> list[GpuGroup]:
        """The group in which a backend is until now, if there is one on its host."""
        group = self.of_backend.get(backend.name)
        return [group] if group and group.host.name == backend.host else []

    def _filled(self, draft: Draft) -> GpuGroup:
        """The group of a draft: the one that it goes on from, if that need not be another."""
        group = self.by_name.get(draft.name)
        if not (group and list(draft.before) == [group] and draft.host == group.host.name):
            group = build_group(draft, self)
        fill(group, draft)
        settings = self.settings
        for name in [name for name in group.own_slots if name not in self.models]:
            of_model = settings.models[name]
            self.models[name] = Model(name, of_model, settings.routings[of_model.routing], full=settings.full)
        return group

    def _note(self, groups: Iterable[GpuGroup]) -> None:
        """Have all tables say what these groups have."""
        places = {name: place for place, name in enumerate(self.settings.wanted)}

        def rank(group: GpuGroup) -> tuple[int, str]:
            return max([places.get(name, -1) for name in group.slots], default=-1), group.name

        self.groups = sorted(groups, key=rank)
        self.by_name = {group.name: group for group in sorted(self.groups, key=BY_NAME)}
        self.of_backend = {name: group for group in self.groups for name in group.slots}
        self._on_host, self.groups_of = {}, {}
        for group in self.by_name.values():
            self._on_host.setdefault(group.host.name, []).append(group)
            for name in group.own_slots:
                self.groups_of.setdefault(name, []).append(group)
        for group in [each for each in self.touched if self.by_name.get(each.name) is not each]:
            del self.touched[group]
        for host, memory in self.memories.items():
            memory.keep({name: slot for each in self.on_host(host) for name, slot in each.slots.items()})
        self._note_models()

    def _note_models(self) -> None:
        """Have all models, and the groups, know which backends are a model's own."""
        slots: dict[str, list[Slot]] = {}
        for group in self.groups:
            for name, own in group.own_slots.items():
                slots.setdefault(name, []).extend(own)
        self.models = {name: model for name, model in self.models.items() if name in slots}
        self.of_model = {name: self._home(model) for name, model in self.models.items()}
        self.spread = [name for name, own in self.groups_of.items() if len(own) > 1]
        for name, model in self.models.items():
            # In an order that does not depend on which GPUs others tie together.
            model.take(sorted(slots[name], key=order))
            model.queue_group = self.of_model[name].name if len(self.groups_of[name]) > 1 else ""
        self._set_models(self.models.values())
        for group in self.groups:
            group.remodelled()

    def _home(self, model: Model) -> GpuGroup:
        """The group in which a model's queue stands: where it was, if it has backends there."""
        own = self.groups_of[model.name]
        return next((group for group in own if group.name == model.queue_group), own[0])

    def _set_models(self, models: Iterable[Model], *, rerouted: bool = False) -> None:
        """Have models go by the settings that follow from the configuration.

        While a backend of one leaves they are those of its backends as they are. ``rerouted``: routing
        policies are other ones, also where their names are the same.
        """
        settings = self.settings
        for model in models:
            wanted = settings.models.get(model.name, model.settings)
            if [slot for slot in model.active if slot.leaving]:
                own = [slot.backend for slot in model.present]
                wanted = settings_of(own, self.settings.config)._replace(routing=wanted.routing)
            routing = model.routing
            if rerouted or wanted.routing != model.settings.routing:
                routing = settings.routings.get(wanted.routing, routing)
            model.set(wanted, routing)


class Draft(NamedTuple):
    """A GPU group as it is to be."""

    name: str
    host: str
    backends: Sequence[Backend]
    before: Sequence[GpuGroup] = ()
    """The groups that it goes on from."""


def build_group(draft: Draft, common: Common) -> GpuGroup:
    """A GPU group that is new, with what was under way in those that it goes on from."""
    group = GpuGroup(
        name=draft.name,
        common=common,
        placement=Placement((), (), lambda: common.settings.eviction, common.hosts),
        host=common.hosts[draft.host],
        memory=common.memories[draft.host],
    )
    for each in draft.before:
        group.woken += each.woken
        group.cut += each.cut
        group.swaps += each.swaps
        group.preloads += each.preloads
        group.unseen |= each.unseen
        group.placement.others = {**group.placement.others, **each.placement.others}
    return group


def fill(group: GpuGroup, draft: Draft) -> None:
    """Give a GPU group its backends. They keep the slots that they have, unless they left them for good."""
    settings, placement = group.common.settings, group.placement
    kept = {name: slot for each in draft.before for name, slot in each.slots.items() if not slot.is_left}
    names = dict.fromkeys(gpu for backend in draft.backends for gpu in backend.gpu_names)
    gpus = [settings.gpus.get(name) or Gpu(name) for name in names]
    for slot in placement.fill(draft.backends, gpus, kept):
        placement.measure(slot, group.footprints.held(slot.name, slot.backend.service.digest))
    new = [slot for slot in group.slots.values() if slot.backend.preload and slot.name not in kept]
    group.filled(_by_model(group.slots.values(), settings.wanted))
    group.preloads = [*new, *group.preloads]


def _describe(group: GpuGroup, slot: Slot, backend: Backend) -> None:
    """Have a backend that goes on described otherwise."""
    group.placement.describe(backend, slot)
    group.placement.measure(slot, group.footprints.held(slot.name, slot.backend.service.digest))
    if replicas := group.models[slot.model].replicas:
        replicas.change((), (slot,))


def _by_model(slots: Iterable[Slot], wanted: Mapping[str, Backend]) -> dict[str, list[Slot]]:
    """Model -> its slots, also those that are of another until they are left."""
    found: dict[str, list[Slot]] = {}
    for slot in slots:
        found.setdefault(slot.model, []).append(slot)
        coming = wanted.get(slot.name)
        if coming and coming.model != slot.model:
            found.setdefault(coming.model, []).append(slot)
    return found


def shared_settings(config: Config) -> SharedSettings:
    """The settings of a configuration that GPU groups and models go by; ValueError: a plug-in is unfit."""
    names = dict.fromkeys((config.routing, *[each.routing for each in config.backends]))
    routings: dict[str, Routing] = {name: pipeline.build(name, config.routing_policies) for name in names}
    return SharedSettings(
        config=config,
        policy=build_policy(config.policy, config.policy_settings),
        eviction=build_eviction(config.eviction, config.eviction_settings),
        gpus={gpu.name: gpu for gpu in config.gpus},
        wanted={each.name: each for each in config.backends},
        models=model_settings(config),
        routings=routings,
        full=config.routing_mode == "full",
    )


def _routing_of(config: Config) -> tuple[object, ...]:
    return config.routing, config.routing_policies, config.routing_mode


def gpu_groups(
    backends: Iterable[Backend], before: Callable[[Backend], Iterable[str]] = lambda _: ()
) -> list[tuple[str, list[Backend]]]:
    """The backends grouped into GPU groups, each named after its GPUs ("0+1"; "no-gpu:NAME" without any).

    GPUs are tied by a backend that needs several of them. ``before``: the GPU groups that a backend goes on
    from; backends that go on from the same one stay together.
    """
    groups: dict[int, tuple[set[str], list[Backend]]] = {}  # by the place of the last backend
    of_tie: dict[str, int] = {}
    for place, backend in enumerate(backends):
        ties = {f"gpu {gpu}" for gpu in backend.gpu_names}
        ties |= {f"group {group}" for group in before(backend)}
        members: list[Backend] = []
        for found in sorted({of_tie[tie] for tie in ties if tie in of_tie}):
            its_ties, its_members = groups.pop(found)
            ties |= its_ties
            members = members + its_members if members else its_members
        members.append(backend)
        groups[place] = ties, members
        of_tie.update(dict.fromkeys(ties, place))
    return [(group_name(members), members) for _, members in groups.values()]


def group_name(members: Sequence[Backend]) -> str:
    """The name of a GPU group, after the GPUs of its backends."""
    gpus = sorted({gpu for backend in members for gpu in backend.gpu_names})
    return "+".join(gpus) or gpu_name(members[0].host, f"no-gpu:{members[0].name}")
