"""The state of a GPU group: its models, slots and swaps under way, and what can be read off them.

``GroupState`` decides nothing. It is the lowest layer of ``GpuGroup`` (group.py), and all that planner,
queueing and status need of one: they read it, the layers above write it. ``changed()`` follows each
change that may concern other GPU groups, which have backends of the same models.

The GPUs of a swap in progress are in no other swap until it ends. One without a target only evicts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.routing.routing import Routing
from anvil_mux.scheduler.costs import Cost, Costs, Footprints, source_of
from anvil_mux.scheduler.events import Cause, Event
from anvil_mux.scheduler.eviction import Eviction
from anvil_mux.scheduler.model import Model, ModelSettings, ready_slots
from anvil_mux.scheduler.placement import Placement
from anvil_mux.scheduler.policies import FOREVER, Policy, Stay
from anvil_mux.scheduler.slot import HOLDING, HostRecord, Slot
from anvil_mux.scheduler.standby import HostMemory
from anvil_mux.scheduler.steps import Ticket

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


@dataclass(eq=False, slots=True)
class Common:
    """The objects that all GPU groups share."""

    settings: SharedSettings
    """The settings of the configuration that holds; a reload puts others in their place."""
    emit: Callable[[Event], object]
    emit_leases: bool
    """Whether ``leased`` and ``released`` are emitted; all other events are rarer."""
    costs: Costs
    footprints: Footprints
    hosts: Mapping[str, HostRecord]
    memories: Mapping[str, HostMemory]
    """Host -> its memory."""
    models: Mapping[str, Model]
    groups_of: Mapping[str, list[Any]]
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
    """The queues, how long each is, and the plans for them: the policy said so of these."""
    residents: Collection[Slot]
    """The residents that it was shown."""
    is_over: bool = False
    """Whether the policy is to be asked again, since a lease ended that may matter."""


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


def drains(swaps: Iterable[SwapInProgress]) -> dict[str, tuple[str, float]]:
    """Draining backend -> (the model that it makes room for, or "", and when the drain ends)."""
    return {
        victim.name: (swap.target.model if swap.target else "", victim.drain_until)
        for swap in swaps
        for victim in swap.victims
        if victim.state == "draining"
    }


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
    slots: dict[str, Slot] = field(init=False)
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
    """The backends that come back when nothing else is wanted (upkeep.py)."""
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

    @property
    def patient(self) -> bool:
        """Whether some backend has a drain_timeout of its own."""
        return any(slot.backend.has_own("drain_timeout") for slot in self.slots.values())

    def filled(self, models: Mapping[str, Iterable[Slot]]) -> None:
        """Compute anew what depends on which slots it has; ``models``: model -> its slots that are here."""
        self.own_slots = {name: list(slots) for name, slots in models.items()}
        self.ready = ready_slots(self.slots.values())
        self.preloads = [slot for slot in self.preloads if self.slots.get(slot.name) is slot]
        self.unseen &= self.slots.keys()
        self.described()

    def described(self) -> None:
        """Compute anew what depends on how its backends are described."""
        slots = self.slots.values()
        self.stayers = [slot for slot in slots if slot.backend.min_residency]
        self.idlers = [slot for slot in slots if slot.ttl is not None]
        self.sleepers = [slot for slot in slots if slot.backend.evict_to != ("stop",)]
        self.homes = [slot for slot in slots if slot.backend.home]

    def keep_alive(self, slot: Slot, seconds: float | None) -> None:
        """Have a backend stay for so long while it is idle; None: for its own ttl."""
        if seconds == slot.keep_alive:
            return
        slot.keep_alive = seconds
        self.described()
        self.changed()

    def remodelled(self) -> None:
        """Compute anew what depends on the models as a whole."""
        found = {name: self.common.models[name] for name in self.own_slots}
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

    def loadable(self, model: Model, now: float) -> list[Slot]:
        """The backends of a model here that could be loaded now, were their GPUs free."""
        own = self.own_slots[model.name]
        found = [slot for slot in own if self.takes_loads(slot) and slot.is_loadable(now)]
        return [slot for slot in found if model.may_come(slot)] if model.bounded else found

    def fits(self, target: Slot) -> bool:
        """Whether a backend has room on its GPUs and in host memory without an eviction."""
        return self.placement.fits(target) and self.memory.short(target) <= 0

    def drain_left(self, slot: Slot, now: float) -> float:
        """How long a drain of a backend may last from now on, whether it has begun or not."""
        return slot.drain_until - now if slot.state == "draining" else slot.backend.drain_timeout

    def cost(self, evicts: Iterable[str], target: Slot, level: str) -> Cost:
        """The expected cost of a swap: to evict these models and load a backend from a standby level."""
        source = source_of(evicts)
        return self.costs.estimate(source, target.model, level, target.backend.engine, target.host.name)

    def load_seconds(self, slot: Slot, level: str) -> float:
        """How long a load from a standby level is expected to take."""
        return self.costs.estimate("", slot.model, level, slot.backend.engine, slot.host.name).load_seconds

    def staying(self, now: float) -> set[str]:
        """The backends that may stay for their min_residency; only an overdue queue evicts them."""
        return {slot.name for slot in self.stayers if slot.stays_until > now}
