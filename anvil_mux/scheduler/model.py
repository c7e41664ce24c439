"""One model of a GPU group: its backends, its queue, its demand, and what is set for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from anvil_mux.config.config import Config
from anvil_mux.scheduler.demand import Demand
from anvil_mux.scheduler.queue import ModelQueue
from anvil_mux.scheduler.replicas import Replicas
from anvil_mux.scheduler.slot import LOADING, Slot


@dataclass(eq=False, slots=True)
class Model:
    """Whatever is kept by model."""

    name: str
    slots: list[Slot]
    """Its backends, and those that are about to become its own."""
    queue: ModelQueue
    replicas: Replicas | None
    """Who chooses among its backends; None: it has one only."""
    priority: int
    max_wait: float
    """After how many seconds its queue is overdue at the latest."""
    demand: Demand = field(default_factory=Demand)
    ready: list[Slot] = field(default_factory=list)
    """Its backends that may be leased."""
    unload_when_idle: bool = False
    """It goes once nobody uses it, unless it is asked for again before."""

    @property
    def is_loading(self) -> bool:
        return any(slot.state in LOADING for slot in self.slots)

    @property
    def is_used(self) -> bool:
        """Whether any request is leased."""
        return any(slot.holders for slot in self.slots)

    def loadable(self, now: float) -> list[Slot]:
        """The backends that could be loaded, were their GPUs free."""
        return [slot for slot in self.slots if slot.is_loadable(now)]


def ready_slots(slots: Iterable[Slot]) -> list[Slot]:
    """Those that may be leased."""
    return [slot for slot in slots if slot.state == "ready"]


def max_waits(slots: Iterable[Slot], config: Config) -> dict[str, float]:
    """Model -> seconds after which its queue is overdue at the latest: the shortest its replicas ask for."""
    limits: dict[str, float] = {}
    for slot in slots:
        own = config.max_wait if slot.backend.max_wait is None else slot.backend.max_wait
        limits[slot.model] = min(own, limits.get(slot.model, own))
    return limits
