"""The state of a GPU group: its models, slots and swaps under way, and the swaps that could begin from there.

``GroupState`` decides nothing. It is the lowest layer of ``GpuGroup`` (group.py); the layers above write it,
and whoever only asks about a GPU group reads it. ``changed()`` follows each change that may concern other GPU
groups, which have backends of the same models. The GPUs of a swap in progress are in no other swap until it
ends. One without a target only evicts.

A ``Plan`` names a backend that could be loaded now, and the victims that make room for it: of a model's
replicas the best one by ``place_rank``. ``None`` means that none could be, because its GPUs are in another
swap, their residents may stay, or it cools down. Plans are for queues; another replica of a busy model has
one too (``spill``). They are pure functions over the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.routing.routing import Routing
from anvil_mux.scheduler.costs import Cost, Costs, Footprints, source_of
from anvil_mux.scheduler.events import Cause, Event
from anvil_mux.scheduler.memory import Eviction, HostMemory, Placement
from anvil_mux.scheduler.model import Model, ModelSettings
from anvil_mux.scheduler.policies import FOREVER, Policy, Spill, Stay
from anvil_mux.scheduler.slot import HOLDING, HostRecord, Slot, Ticket

FIRST_SERVICE_SECONDS = 10.0
"""How long a lease is taken to last, of a model that has not answered yet."""
G = TypeVar("G", bound="GroupState")


class SharedSettings(NamedTuple):
    """A configuration, and what GPU groups and models go by that is made of it."""

    config: Config
    policy: Policy
    eviction: Eviction
    gpus: Mapping[str, Gpu]
    """All GPUs of all hosts, by the names that they have among them."""
    wanted: Mapping[str, Backend]
    """The backends of the configuration, by name."""
    models: Mapping[str, ModelSettings]
    routings: Mapping[str, Routing]
    """The routing policies that models name."""
    full: bool
    """Whether routing uses the figures of engines, besides our own counts."""


@dataclass(eq=False)
class Common:
    """The settings, tables and objects that all GPU groups share; ``Layout`` (layout.py) keeps them."""

    settings: SharedSettings
    """The settings of the configuration that holds; a reload puts others in their place."""
    emit: Callable[[Event], object]
    emit_leases: bool
    """Whether ``leased`` and ``released`` are emitted; all other events are rarer."""
    costs: Costs
    footprints: Footprints
    hosts: dict[str, HostRecord] = field(default_factory=dict)
    """All hosts, by name."""
    memories: dict[str, HostMemory] = field(default_factory=dict)
    """Host -> its memory."""
    models: dict[str, Model] = field(default_factory=dict)
    """All models, also those that are about to go."""
    groups_of: dict[str, list[Any]] = field(default_factory=dict)
    """Model -> the GPU groups that have backends of it, by name."""
    blamed: dict[str, object] = field(default_factory=dict)
    """Kind of cause -> the plug-in of which a mistake was reported."""
    hints: dict[str, float] = field(default_factory=dict)
    """The models that clients said they will ask for, and when they did: see ``GroupFacts.hint``."""
    touched: dict[Any, None] = field(default_factory=dict)
    """The GPU groups in which something has changed, until those that share a model with them were asked
    (scheduler.py)."""


class Deferred(NamedTuple):
    """The swaps to queues that compete for GPUs, held back."""

    stay: Stay
    """Until when, and why."""
    contest: tuple[Hashable, ...]
    """The queues, how long each is, and the plans for them: the policy said so of these. Of a hint, its
    moment and its plan."""
    residents: Collection[Slot]
    """The residents that it was shown."""
    is_over: bool = False
    """Whether the policy is to be asked again, since a lease ended that may matter."""

    def holds_at(self, now: float) -> bool:
        """Return whether the policy need not be asked again yet."""
        return not self.is_over and now < min(self.stay.until, self.stay.again)


@dataclass(eq=False, slots=True)
class SwapInProgress:
    """One swap, from its decision until its target answers, or until its last victim has left."""

    target: Slot | None
    victims: list[Slot]
    """The victims that have not left yet; those that are ready still drain later than others."""
    cause: Cause
    severs: Cause
    """Why a request is severed that outlasts the drain."""
    begun: bool = False
    """Whether a victim is evicted already: there is no reprieve any more."""
    preload: bool = False
    """Whether it is a preload: no request waits for the target."""
    emptied: float = FOREVER
    """When the last drain ended."""
    evict_seconds: float = 0.0
    """Seconds that evicting the victims took after that."""
    gone: list[str] = field(default_factory=list)
    """The models of the victims that have left."""
    level: str = ""
    """The standby level from which the target is loaded, once that has begun."""
    cancel: Cause | None = None
    """Why the load of the target is to end before its time: unloaded, or unwanted."""

    def gpus(self) -> set[str]:
        held = set(self.target.holds) if self.target else set()
        for victim in self.victims:
            if victim.state in HOLDING:
                held.update(victim.holds)
        return held

    @property
    def evicts(self) -> tuple[str, ...]:
        """The models of all its victims."""
        return (*self.gone, *(victim.model for victim in self.victims))


class Drain(NamedTuple):
    """The drain of a backend that is under way."""

    target: str
    """The model that it makes room for; "" for none."""
    seconds_left: float


def drain_of(slot: Slot, swaps: Iterable[SwapInProgress], now: float) -> Drain | None:
    """The drain of a backend, which is a victim of one of these swaps; None: it does not drain."""
    if slot.state != "draining":
        return None
    target = next((swap.target for swap in swaps if slot in swap.victims), None)
    return Drain(target.model if target else "", max(slot.drain_until - now, 0.0))


@dataclass(eq=False, slots=True)
class GroupState:
    """The state of one GPU group."""

    name: str
    common: Common
    placement: Placement
    host: HostRecord
    """The host of its GPUs."""
    memory: HostMemory
    models: dict[str, Model] = field(default_factory=dict)
    """The models that have backends here. GPU groups that have backends of the same model share it."""
    own_slots: dict[str, list[Slot]] = field(default_factory=dict)
    """Model -> its slots that are here."""
    swaps: list[SwapInProgress] = field(default_factory=list)
    preloads: list[Slot] = field(default_factory=list)
    """The backends that are to be loaded although no request waits for them."""
    unseen: set[str] = field(default_factory=set)
    """The backends that may run already: until that is known nothing is begun."""
    woken: list[Ticket] = field(default_factory=list)
    """Tickets that ended after waiting in a queue; the driver takes and wakes them."""
    cut: list[Ticket] = field(default_factory=list)
    """Leases that ended before their requests did: taken from a replica that had not begun with them, or from
    a host that is lost; the driver takes and cuts them."""
    deferred: dict[str, Deferred] = field(default_factory=dict)
    """The first model of each set of queues whose swaps the policy holds back."""
    deferred_hints: dict[str, Deferred] = field(default_factory=dict)
    """The hinted models for which the policy evicts nobody yet."""
    slots: dict[str, Slot] = field(init=False)
    soonest: float = field(init=False, default=FOREVER)
    """The soonest of the moments on which the last ``next_step`` depended and that had not come."""
    costs: Costs = field(init=False)
    footprints: Footprints = field(init=False)
    emit: Callable[[Event], object] = field(init=False)
    emit_leases: bool = field(init=False)
    ready: list[Slot] = field(default_factory=list)
    """The backends that may be leased."""
    stayers: list[Slot] = field(default_factory=list)
    """The backends with a min_residency."""
    idlers: list[Slot] = field(default_factory=list)
    """The backends that are evicted once they were idle for a time."""
    sleepers: list[Slot] = field(default_factory=list)
    """The backends that may be in standby."""
    homes: list[Slot] = field(default_factory=list)
    """The backends that come back when nothing else is wanted (group.py)."""
    patient: list[Slot] = field(default_factory=list)
    """The backends with a drain_timeout of their own."""
    routed: list[Model] = field(default_factory=list)
    """The models with several backends."""
    bounded: list[Model] = field(default_factory=list)
    """The models of which only so many backends are resident at once."""

    def __post_init__(self) -> None:
        common, self.slots = self.common, self.placement.slots
        self.costs, self.footprints = common.costs, common.footprints
        self.emit, self.emit_leases = common.emit, common.emit_leases

    @property
    def policy(self) -> Policy:
        return self.common.settings.policy

    @property
    def config(self) -> Config:
        return self.common.settings.config

    def filled(self, models: Mapping[str, Iterable[Slot]]) -> None:
        """Compute anew what depends on which slots it has; ``models``: model -> its slots that are here."""
        self.own_slots = {name: sorted(slots, key=order) for name, slots in models.items()}
        self.note_ready()
        self.preloads = [slot for slot in self.preloads if self.slots.get(slot.name) is slot]
        self.unseen &= self.slots.keys()
        self.described()

    def note_ready(self) -> None:
        """Compute anew which backends are resident."""
        self.ready = [slot for slot in self.slots.values() if slot.is_resident]

    def described(self) -> None:
        """Compute anew what depends on how its backends are described."""
        slots = self.slots.values()
        self.stayers = [slot for slot in slots if slot.backend.min_residency]
        self.idlers = [slot for slot in slots if slot.ttl is not None]
        self.sleepers = [slot for slot in slots if slot.backend.evict_to != ("stop",)]
        self.homes = [slot for slot in slots if slot.backend.home]
        self.patient = [slot for slot in slots if slot.backend.has_own("drain_timeout")]

    def keep_alive(self, slot: Slot, seconds: float | None) -> None:
        """Have a backend stay for so long while it is idle; None: for its own ttl."""
        if seconds == slot.keep_alive:
            return
        slot.keep_alive = seconds
        self.described()
        self.changed()

    def remodelled(self) -> None:
        """Compute anew what depends on the models as a whole."""
        # By name: the order may not depend on which GPUs others tie together.
        found = {name: self.common.models[name] for name in sorted(self.own_slots)}
        self.models.clear()
        self.models.update(found)
        self.routed = [model for model in found.values() if model.replicas]
        self.bounded = [model for model in found.values() if model.bounded]

    def changed(self) -> None:
        """Note that another swap may be possible, or one less, or that what GPU groups share has changed."""
        self.common.touched[self] = None

    def groups_of(self: G, model: Model) -> list[G]:
        """All GPU groups that have backends of a model, by name."""
        return self.common.groups_of[model.name]

    def swaps_of(self, model: Model) -> list[SwapInProgress]:
        """The swaps under way in all GPU groups that have backends of a model."""
        return [swap for group in self.groups_of(model) for swap in group.swaps]

    def swap_to(self, slot: Slot) -> SwapInProgress | None:
        """The swap under way here whose target is ``slot``."""
        return next((swap for swap in self.swaps if swap.target is slot), None)

    @property
    def coming(self) -> list[str]:
        """The models that a swap under way here will make resident."""
        return [swap.target.model for swap in self.swaps if swap.target]

    def own(self, model: Model) -> list[Slot]:
        """The backends of a model that are here."""
        return self.own_slots[model.name]

    def takes_loads(self, slot: Slot) -> bool:
        """Whether a backend may be loaded where it is."""
        return slot.host.takes_loads and not self.left_gpu(slot)

    def left_gpu(self, slot: Slot) -> str:
        """A GPU of a backend that is left to other programs, since they hold much of it; "": none is."""
        least = self.config.yield_above
        if least is None:
            return ""
        return next((gpu for gpu in slot.holds if self.placement.others.get(gpu, 0) >= least), "")

    def must_go(self, slot: Slot) -> bool:
        """Whether a backend may not stay where it is."""
        return slot.host.is_cleared or (not slot.pinned and bool(self.left_gpu(slot)))

    def may_be_stopped(self, slot: Slot) -> bool:
        """Whether a backend is in standby and no request waits for it as it is."""
        wanted = self.models[slot.model].queue.tickets and not slot.leaving and not self.must_go(slot)
        return slot.state == "standby" and not slot.coming and not wanted

    def gpus_of(self, model: Model) -> set[str]:
        """The GPUs of the backends of a model that are here."""
        return {gpu for slot in self.own_slots[model.name] for gpu in slot.holds}

    def lacks_load(self, model: Model) -> bool:
        """Whether the queue of a model stands here, and none of its backends is ready."""
        return bool(model.queue.tickets) and not model.ready and model.queues_in(self.name)

    @property
    def is_out_of_reach(self) -> bool:
        """Whether no step may be begun here: its host is lost or away."""
        return self.host.is_lost or self.host.is_away

    def busy_gpus(self, but: Collection[SwapInProgress] = ()) -> set[str]:
        """The GPUs on which no swap can begin: they are in one, ``but`` for some."""
        return {gpu for swap in self.swaps if swap not in but for gpu in swap.gpus()}

    def reached(self, moment: float, now: float) -> bool:
        """Return whether ``moment`` has come; if not, ``next_step`` is asked again then at the latest.

        Whatever depends on the time asks here, so no moment is forgotten.
        """
        if now < moment < self.soonest:
            self.soonest = moment
        return moment <= now

    def loadable(self, model: Model, now: float) -> list[Slot]:
        """The backends of a model here that could be loaded now, were their GPUs free."""
        own = self.own_slots[model.name]
        stuck = {gpu for slot in self.placement.active if slot.state == "stuck" for gpu in slot.holds}
        found = [
            slot
            for slot in own
            if self.takes_loads(slot)
            and not slot.leaving
            and stuck.isdisjoint(slot.holds)
            and (slot.state == "standby" or (slot.state == "stopped" and self.reached(slot.retry_at, now)))
        ]
        return [slot for slot in found if model.may_come(slot)] if model.bounded else found

    def fits(self, target: Slot) -> bool:
        """Whether a backend has room on its GPUs and in host memory without an eviction."""
        return self.placement.fits(target) and self.memory.short(target) <= 0

    def drain_left(self, slot: Slot, now: float) -> float:
        """How long a drain of a backend may last from now on, whether it has begun or not."""
        return slot.drain_until - now if slot.state == "draining" else self.most_drain(slot)

    def most_drain(self, slot: Slot, *, by_hand: bool = False) -> float:
        """How long a drain of a backend may last: as long as it says, or the whole if people ask for it."""
        return (self.config if by_hand else slot.backend).drain_timeout

    def cost(self, evicts: Iterable[str], target: Slot, level: str) -> Cost:
        """The expected cost of a swap: to evict these models and load a backend from a standby level."""
        source = source_of(evicts)
        return self.costs.estimate(source, target.model, level, target.backend.engine, target.host.name)

    def staying(self, now: float) -> set[str]:
        """The backends that may stay for their min_residency; only an overdue queue evicts them."""
        return {slot.name for slot in self.stayers if not self.reached(slot.stays_until, now)}


# Plans


_TargetAndVictims = tuple[Slot, list[Slot]]
"""A backend, and the victims that make room for it."""


class PlaceRank(NamedTuple):
    """How good it is to load a backend where it is; the least is the best. So queues choose, everywhere."""

    evicts: bool
    """Whether anybody has to make room: GPUs that nobody holds are taken first."""
    seconds: float
    """How long it takes to have it there: see ``seconds_to_load``."""
    victims: int
    gpus: tuple[str, ...]
    """The names of its GPUs: among places that are as good the first host counts, and there the first GPU."""
    backend: str


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
    return sorted(models, key=age) if len(models) > 1 else models


def age(model: Model) -> tuple[float, int]:
    first = model.queue.first
    return first.since, first.id


def plan(
    state: GroupState, model: Model, busy: set[str], now: float, staying: Set[str] = frozenset()
) -> Plan | None:
    """The replica that is best to load, by ``place_rank``, or None while none can be."""
    best = choose(state, state.loadable(model, now), busy, now, staying)
    if best is None:
        return None
    target, leaving = best
    evicts = tuple([victim.model for victim in leaving])
    return Plan(target, leaving, evicts, state.cost(evicts, target, target.level))


def choose(
    state: GroupState, slots: Iterable[Slot], busy: set[str], now: float, staying: Set[str]
) -> _TargetAndVictims | None:
    """The best backend of ``slots`` to load, and the victims that make room for it: see ``place_rank``."""
    places = [
        (slot, leaving) for slot in slots if (leaving := victims(state, slot, busy, staying, now)) is not None
    ]
    if len(places) < 2:
        return places[0] if places else None
    return min(places, key=lambda place: place_rank(state, *place))


def order(slot: Slot) -> tuple[tuple[str, ...], str]:
    """The key by which a model's backends are sorted: the first host by name, and there the first GPUs."""
    return slot.backend.gpu_names, slot.name


def place_rank(state: GroupState, slot: Slot, leaving: Sequence[Slot]) -> PlaceRank:
    """How good it is to load a backend for which these make room."""
    seconds = seconds_to_load(state, slot, leaving)
    return PlaceRank(bool(leaving), seconds, len(leaving), *order(slot))


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
    weight = partial(weigh, state, now)
    found = state.placement.victims(target, busy, staying, weight, without)
    if found is None or (short := state.memory.short(target, [*found, *without])) <= 0:
        return found
    more = state.placement.sparing_host(short, found, busy, staying, weight)
    return None if more is None else found + more


# What it costs


def seconds_to_load(state: GroupState, target: Slot, leaving: Sequence[Slot], *, leases: int = 0) -> float:
    """How long it takes to have a backend here for which these make room: see ``usual_drain``."""
    cost = state.cost([victim.model for victim in leaving], target, target.level)
    return usual_drain(state, leaving, leases=leases) + cost.seconds


def usual_drain(state: GroupState, leaving: Iterable[Slot], *, leases: int = 0) -> float:
    """The drain of these backends: about the longest of their leases.

    ``leases``: how many each is taken to have at least, if the drain begins later.
    """
    longest = 0.0
    for victim in leaving:
        if number := max(len(victim.holders), leases):
            service = state.models[victim.model].demand.service_seconds or FIRST_SERVICE_SECONDS
            answers = service * (1.0 + math.log(number))
            longest = max(longest, min(answers, state.most_drain(victim)))
    return longest


def drain_seconds(state: GroupState, slots: Iterable[Slot], now: float) -> float:
    """Return how long the answers at these backends will take yet, as answers of their models do on average.

    None takes longer than its drain may.
    """
    longest = 0.0
    for slot in slots:
        usual, most = state.models[slot.model].demand.service_seconds, state.drain_left(slot, now)
        for since in slot.holders.values():
            longest = max(longest, min(max(usual - (now - since), 0.0), most))
    return longest


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


def weigh(state: GroupState, now: float, slot: Slot) -> tuple[float, float]:
    """The cost of evicting a backend, and the requests that wait for a place at it: see ``Candidate``.

    Of a model with residents in several GPU groups it is a share of the arrivals: the others go on serving.
    """
    level = "stop" if slot.state == "standby" else slot.backend.evict_to[0]
    model = state.models[slot.model]
    rate, residents = model.demand.rate(now), max(len(model.ready), 1)
    if model.is_spread:
        rate /= residents
    waiting = len(model.queue) / residents if slot.state == "ready" else 0.0
    return rate * state.costs.load_seconds(slot, level), waiting


def worth(common: Common, slot: Slot, now: float) -> tuple[bool, int, float, float]:
    """How much a backend deserves a light standby level: see ``HostMemory``."""
    model = common.models[slot.model]
    lost = model.demand.rate(now) * common.costs.load_seconds(slot, "stop")
    return bool(model.queue.tickets), slot.backend.priority, lost, slot.used


# Better places for a swap that only drains


def free_place(model: Model, swap: SwapInProgress, here: GroupState, now: float) -> Slot | None:
    """Return the best backend of ``model`` that could be loaded at once on GPUs that nobody holds.

    ``swap`` is under way in the GPU group ``here``, and only drains for that model. How long its drain will
    take is not asked: as for any queue, GPUs that nobody holds come first.
    """
    places = [
        (place_rank(state, slot, ()), slot)
        for state in with_room(here.groups_of(model))
        for slot in _free_places(state, model, swap, now)
    ]
    return min(places, key=itemgetter(0))[1] if places else None


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
    """The backends of a model that have room on GPUs that nobody holds, and that no other queue goes to."""
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
    others = [each for each in waiting(state) if _goes_first(state, each, model, now)]
    taken = state.busy_gpus(but=[swap]).union(*map(state.gpus_of, others))
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


def _goes_first(state: GroupState, other: Model, model: Model, now: float) -> bool:
    """Whether a queue that waits is to have the GPUs that it waits for, before that of ``model``."""
    if model.queue.overdue_at <= now:
        return other.queue.overdue_at <= now and age(other) < age(model)
    if other.queue.overdue_at <= now:
        return True
    planned = plan(state, other, state.busy_gpus(), now, state.staying(now))
    return planned is not None and not planned.victims


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
    without a bound. Of several backends it is the best one by ``place_rank``, as in any plan.
    """
    for swap in state.swaps:
        if not _yields(state, swap, model, now):
            continue
        places = []
        for slot in state.loadable(model, now):
            more = None if kept & slot.holds.keys() else _more_victims(state, slot, swap, now)
            if more is not None and not any(v.holders and state.most_drain(v) == FOREVER for v in more):
                leaving = _still_victims(swap, slot) + more
                places.append((place_rank(state, slot, leaving), slot, more))
        if places:
            _, slot, more = min(places, key=itemgetter(0))
            return Takeover(swap, slot, more)
    return None


def _yields(state: GroupState, swap: SwapInProgress, model: Model, now: float) -> bool:
    """Whether a swap only drains for a queue of lower priority than that of ``model``, and not overdue."""
    if swap.target is None or swap.begun or swap.preload:
        return False
    other = state.models[swap.target.model]
    return other.priority < model.priority and bool(other.queue.tickets) and other.queue.overdue_at > now


def _still_victims(swap: SwapInProgress, slot: Slot) -> list[Slot]:
    """The victims of a swap that have GPUs of ``slot``."""
    return [each for each in swap.victims if not each.holds.keys().isdisjoint(slot.holds)]


def _more_victims(state: GroupState, slot: Slot, swap: SwapInProgress, now: float) -> list[Slot] | None:
    """The backends that go besides the victims of a swap if it loads ``slot`` instead; None: there is no way.

    As in any plan, but that those victims which have GPUs that it needs count as gone. What the target of the
    swap keeps in standby counts as if it had never been wanted. A queue does not take over the drain of a
    backend of its own model: that may be spared or ready again, the queue be served there, and the drain
    begin anew.
    """
    assert swap.target is not None
    if slot.holds.keys().isdisjoint(swap.gpus()):
        return None
    if any(each.model == slot.model for each in swap.victims):
        return None
    going = _still_victims(swap, slot)
    staying = state.staying(now) | {each.name for each in swap.victims}
    with _unwanted(swap.target):
        return victims(state, slot, state.busy_gpus(but=[swap]), staying, now, without=going)


# Loads that no request waits for


def is_unwanted(state: GroupState, swap: SwapInProgress, now: float) -> bool:
    """Return whether a swap loads a backend that no request waits for, and makes way for any queue.

    Requests that wait at busy replicas wait for another replica. A backend that wakes is no such load: it
    is there in seconds, and cancelled it would lose its standby.
    """
    slot = swap.target
    if slot is None or slot.state != "loading" or swap.cancel or swap.level != "stop" or slot.pinned:
        return False
    model = state.models[slot.model]
    return not (model.queue.tickets or (swap.preload and behind(model, now)))


# Another replica of a busy model


def spills(state: GroupState, now: float) -> dict[str, tuple[Plan, Spill]]:
    """Busy models of which another replica could be loaded on GPUs that no queue waits for."""
    if not state.routed:
        return {}
    found = {model.name: each for model in state.routed if (each := spill(state, model, now))}
    if not found:
        return {}
    lacking = [model for model in state.models.values() if model.queue.tickets and not model.ready]
    wanted = set[str]().union(*map(state.gpus_of, lacking))  # also of queues that stand in another GPU group
    return {name: each for name, each in found.items() if wanted.isdisjoint(each[0].gpus)}


def could_spill(states: Iterable[G], model: Model, now: float) -> list[G]:
    """The GPU groups in which loading another backend of a busy model may be worth it."""
    if not behind(model, now) or model.is_coming:
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
    reload = [state.costs.load_seconds(each, each.backend.evict_to[0]) for each in found.victims]
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
        now - slot.holders[ticket]
        for slot in model.ready
        if len(slot.holders) > 1
        for ticket in in_flight.behind(slot.name, now)
    ]
    if model.queue.tickets:
        found += [now - each.since for each in model.queue if not model.needed(each.work.owner)]
    return found
