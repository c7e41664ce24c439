"""One model: its backends, which may be in several GPU groups, its queue, its demand, its settings.

It is there as long as any backend is its own: a reload changes it in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anvil_mux.config.config import EITHER, Backend, Config
from anvil_mux.config.kinds import AUTO
from anvil_mux.routing.prefix import BYTES_PER_TOKEN
from anvil_mux.routing.routing import Routing
from anvil_mux.scheduler.demand import Demand
from anvil_mux.scheduler.queue import ModelQueue
from anvil_mux.scheduler.replicas import Replicas
from anvil_mux.scheduler.slot import LOADING, Slot


class ModelSettings(NamedTuple):
    """The settings of one model, from those of all its backends."""

    priority: int
    max_wait: float
    """After how many seconds its queue is overdue at the latest: the shortest that its backends ask for."""
    follows_load: bool
    """Whether any of them asks for ``auto``: the bound follows the load, and ``max_wait`` the others."""
    max_queue: float
    """The most requests that its queue may have, of what its backends say the least; infinite: no bound."""
    limited: bool
    """Whether any backend takes only so many requests at once."""
    bounded: bool
    """Whether only so many of its backends are resident at once: see residents.py."""
    staged: bool
    """Whether prefill and decode may be done by different backends."""
    routing: str
    """The name of its routing policy."""


def model_settings(config: Config) -> dict[str, ModelSettings]:
    """The settings of each model of a configuration."""
    found: dict[str, list[Backend]] = {}
    for each in config.backends:
        found.setdefault(each.model, []).append(each)
    return {name: settings_of(own, config) for name, own in found.items()}


def settings_of(backends: Sequence[Backend], config: Config) -> ModelSettings:
    """The settings of the model of these backends."""
    waits = [each.max_wait for each in backends]
    return ModelSettings(
        priority=max([each.priority for each in backends]),
        max_wait=min([each for each in waits if not isinstance(each, str)], default=math.inf),
        follows_load=AUTO in waits,
        max_queue=min([each.max_queue for each in backends if each.max_queue], default=math.inf),
        limited=any(each.concurrency for each in backends),
        bounded=any(each.most is not None for each in backends),
        staged=any(each.infer_type in ("prefill", EITHER) for each in backends),
        routing=backends[0].routing,
    )


@dataclass(eq=False, slots=True)
class Model:
    """One model, and all that is kept by model."""

    name: str
    settings: ModelSettings
    routing: Routing
    full: bool = False
    """Whether routing uses the figures of engines, besides our own counts."""
    slots: list[Slot] = field(default_factory=list)
    """All backends of the model, and those that are about to become its own, in the order of all."""
    queue: ModelQueue = field(init=False)
    replicas: Replicas | None = None
    """The choice among its backends; None: it has one only."""
    demand: Demand = field(default_factory=Demand)
    ready: list[Slot] = field(default_factory=list)
    """The backends that may be leased."""
    active: dict[Slot, None] = field(default_factory=dict)
    """The backends that are not just stopped, in any GPU group, or that a swap is to load."""
    limited: bool = field(init=False)
    """Whether its queue is admitted in parts."""
    _order: dict[Slot, int] = field(default_factory=dict, repr=False)
    """The slots, each with its place among them."""
    queue_group: str = ""
    """The name of the GPU group in which its queue stands; "": it has backends in one only."""
    unload_when_idle: bool = False
    """Whether it is evicted once nobody uses it, unless it is asked for before."""

    def __post_init__(self) -> None:
        self.limited = self.settings.limited
        self.queue = ModelQueue(limited=self.limited)

    @property
    def priority(self) -> int:
        return self.settings.priority

    @property
    def max_wait(self) -> float:
        return self.settings.max_wait

    @property
    def bounded(self) -> bool:
        return self.settings.bounded

    @property
    def is_spread(self) -> bool:
        """Whether it has backends in several GPU groups."""
        return bool(self.queue_group)

    def queues_in(self, group: str) -> bool:
        """Whether its queue stands in this GPU group, which has a backend of it."""
        return self.queue_group in ("", group)

    # Changes

    def described(self, slot: Slot) -> None:
        """Note that a backend that goes on is described otherwise."""
        if self.replicas:
            self.replicas.change((), (slot,))

    def set(self, settings: ModelSettings, routing: Routing) -> None:
        """Go by these settings from now on."""
        self.settings, self.routing = settings, routing
        self.limited = settings.limited
        self.queue.go_on(limited=settings.limited, most=settings.max_wait)
        if self.replicas:
            self.replicas.set(routing, staged=settings.staged)

    def take(self, slots: Sequence[Slot]) -> None:
        """Have just these backends, in the order of all."""
        before, self._order = self._order, {slot: nth for nth, slot in enumerate(slots)}
        left = [slot for slot in before if slot not in self._order]
        come = [slot for slot in slots if slot not in before]
        self.slots[:] = slots
        for slot in left:
            self.active.pop(slot, None)
        for slot in come:
            self.note(slot)
        self.renew_ready()
        if len(slots) < 2:
            self.replicas = None
        elif self.replicas:
            self.replicas.change(left, come)
        else:
            self.replicas = Replicas(self.slots, self.routing, staged=self.settings.staged, full=self.full)

    def note(self, slot: Slot) -> None:
        """Note that a backend has entered a state, or is the target of a swap or is so no longer."""
        if slot.model == self.name and (slot.coming or slot.state != "stopped"):
            self.active[slot] = None
        else:
            self.active.pop(slot, None)
        if self.replicas:
            self.replicas.note(slot)

    def renew_ready(self) -> None:
        """Bring up to date which backends may be leased, in their order."""
        self.ready = [slot for slot in self.active if slot.serves]
        if len(self.ready) > 1:
            self.ready.sort(key=self._order.__getitem__)

    def takes(self, owner: str = "") -> bool:
        """Whether a request would be leased at once; one that needs ``owner`` waits for it."""
        if owner and (only := self.needed(owner)):
            return not only.full
        if self.replicas:
            return self.replicas.take_one_more(self.ready)
        return any(not slot.full for slot in self.ready)

    @property
    def is_queue_full(self) -> bool:
        """Whether as many requests wait for it as its own ``max_queue`` allows."""
        return len(self.queue.tickets) >= self.settings.max_queue

    def needed(self, owner: str) -> Slot | None:
        """The only backend that can serve a request, if that is ready: it has what the request refers to."""
        return next((slot for slot in self.ready if slot.name == owner), None) if owner else None

    @property
    def bytes_per_token(self) -> float:
        """The bytes of a prompt for each token, as was learned. Any thread may ask, at any time."""
        return self.replicas.in_flight.bytes_per_token if self.replicas else BYTES_PER_TOKEN

    @property
    def is_loading(self) -> bool:
        return any(slot.state in LOADING for slot in self.active)

    @property
    def is_used(self) -> bool:
        """Whether any request is leased."""
        return any(slot.holders for slot in self.active)

    @property
    def is_coming(self) -> bool:
        """Whether a swap under way will make it resident.

        What is still being loaded on a host that was drained, or when a pause began, does not count: it does
        not stay.
        """
        return any(slot.coming and not slot.host.is_cleared for slot in self.active)


def ready_slots(slots: Iterable[Slot]) -> list[Slot]:
    """The backends that may be leased."""
    return [slot for slot in slots if slot.serves]
