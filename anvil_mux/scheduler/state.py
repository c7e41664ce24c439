"""The state that the parts of one GPU group share: its models, slots, swaps, and what was learned of them.

``GroupState`` decides nothing. Planner, refusals and snapshot read it; admission, moves, group_swaps,
outcomes and decider write it, each its own part. ``changed()`` follows each change that may concern other GPU
groups, which have backends of the same models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from anvil_mux.config.config import Backend, Gpu
from anvil_mux.routing.routing import Routing
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.eviction import Eviction
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.hosts import HostRecord
from anvil_mux.scheduler.model import Model, ModelSettings, ready_slots
from anvil_mux.scheduler.placement import Placement
from anvil_mux.scheduler.policies import Policy, Stay
from anvil_mux.scheduler.residents import may_come
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.standby import HostMemory
from anvil_mux.scheduler.steps import Ticket
from anvil_mux.scheduler.swap import SwapInProgress

LISTED = attrgetter("ttl", "min_residency", "home", "drain_timeout")
"""The settings of a backend that goes on by which GPU groups have lists of some of theirs."""


class Timeouts(NamedTuple):
    """The settings of the whole that GPU groups refer to; they are named as in ``Config``."""

    drain_timeout: float
    queue_timeout: float
    home_after: float = 300.0


class SharedSettings(NamedTuple):
    """The part of a configuration that GPU groups and models go by."""

    timeouts: Timeouts
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
    yield_above: int | None = None
    """The bytes of a GPU from which it is left to other programs that hold them; None: however many."""


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
    states: Mapping[str, list[GroupState]]
    """Model -> the states of the GPU groups that have backends of it."""
    blamed: dict[str, object] = field(default_factory=dict)
    """Kind of cause -> the plug-in of which a mistake was reported."""
    touched: dict[GroupState, None] = field(default_factory=dict)
    """The states in which something has changed, until the GPU groups that share a model with them were asked
    (settling.py)."""


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
    settled: list[Ticket] = field(default_factory=list)
    """Tickets that ended after waiting in a queue; the driver takes and wakes them."""
    taken_back: list[Ticket] = field(default_factory=list)
    """Tickets taken from a replica that had not begun with them; the driver takes and cuts them."""
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
    """The backends that come back when nothing else is wanted (preloads.py)."""
    patient: bool = False
    """Whether some backend has a drain_timeout of its own."""
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
    def timeouts(self) -> Timeouts:
        return self.common.settings.timeouts

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
        self.patient = any(slot.backend.drain_timeout is not None for slot in slots)

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

    def states_of(self, model: Model) -> list[GroupState]:
        """The states of all GPU groups that have backends of a model."""
        return self.common.states[model.name]

    def swaps_of(self, model: Model) -> list[SwapInProgress]:
        """The swaps under way in all GPU groups that have backends of a model."""
        return [swap for state in self.states_of(model) for swap in state.swaps]

    def own(self, model: Model) -> list[Slot]:
        """The backends of a model that are here."""
        return self.own_slots[model.name]

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
        return [slot for slot in found if may_come(model, slot)] if model.bounded else found

    def takes_loads(self, slot: Slot) -> bool:
        """Whether a backend may be loaded where it is."""
        return slot.host.takes_loads and not self.left_gpu(slot)

    def left_gpu(self, slot: Slot) -> str:
        """A GPU of a backend that is left to other programs, since they hold much of it; "": none is."""
        least = self.common.settings.yield_above
        if least is None:
            return ""
        return next((gpu for gpu in slot.holds if self.placement.others.get(gpu, 0) >= least), "")

    def must_go(self, slot: Slot) -> bool:
        """Whether a backend may not stay where it is."""
        return slot.host.is_cleared or (not slot.pinned and bool(self.left_gpu(slot)))

    def model_of(self, slot: Slot) -> Model:
        return self.models[slot.model]

    def fits(self, target: Slot) -> bool:
        """Whether a backend has room on its GPUs and in host memory without an eviction."""
        return self.placement.fits(target) and self.memory.short(target) <= 0

    def drain_timeout(self, slot: Slot) -> float:
        """How long a swap waits for the requests of a victim; infinite: as long as they take."""
        own = slot.backend.drain_timeout
        return self.timeouts.drain_timeout if own is None else own

    def staying(self, now: float) -> set[str]:
        """The backends that may stay for their min_residency; only an overdue queue evicts them."""
        return {slot.name for slot in self.stayers if slot.stays_until > now}
