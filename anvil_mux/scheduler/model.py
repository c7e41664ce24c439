"""One model: its backends, which may be in several GPU groups, its queue, its demand, its settings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from anvil_mux.config.config import Config
from anvil_mux.routing.prefix import BYTES_PER_TOKEN
from anvil_mux.scheduler.demand import Demand
from anvil_mux.scheduler.queue import ModelQueue
from anvil_mux.scheduler.replicas import Replicas
from anvil_mux.scheduler.slot import LOADING, Slot


@dataclass(eq=False, slots=True)
class Model:
    """One model, and all that is kept by model."""

    name: str
    slots: list[Slot]
    """All backends of the model, and those that are about to become its own."""
    queue: ModelQueue
    replicas: Replicas | None
    """The choice among its backends; None: it has one only."""
    priority: int
    max_wait: float
    """After how many seconds its queue is overdue at the latest."""
    demand: Demand = field(default_factory=Demand)
    ready: list[Slot] = field(init=False)
    """The backends that may be leased."""
    active: dict[Slot, None] = field(init=False)
    """The backends that are not just stopped, in any GPU group, or that a swap is to load."""
    bounded: bool = field(init=False)
    """Whether only so many of its backends are resident at once: see residents.py."""
    _order: dict[Slot, int] = field(init=False, repr=False)
    home: str = ""
    """The name of the GPU group in which its queue stands; "": it has backends in one only."""
    wait: float = math.inf
    """The seconds that its queue was to wait there when that was chosen."""
    is_wide: bool = False
    """Whether it has backends in so many GPU groups that not all of them are asked about it each time."""
    spill_home: str = ""
    """The GPU group in which another replica of a wide model may be worth a load; "": none is known."""
    spill_again: float = -math.inf
    """When it is looked for again."""
    unload_when_idle: bool = False
    """Whether it is evicted once nobody uses it, unless it is asked for before."""

    def __post_init__(self) -> None:
        self._order = {slot: nth for nth, slot in enumerate(self.slots)}
        self.active = {slot: None for slot in self.slots if slot.coming or slot.state != "stopped"}
        self.ready = ready_slots(self.slots)
        self.bounded = any(slot.backend.most is not None for slot in self.slots)

    def note(self, slot: Slot) -> None:
        """Note that a backend has entered a state, or is the target of a swap or is so no longer."""
        if slot.coming or slot.state != "stopped":
            self.active[slot] = None
        else:
            self.active.pop(slot, None)
        if self.replicas:
            self.replicas.note(slot)

    def renew_ready(self) -> None:
        """Bring up to date which backends may be leased, in their order."""
        self.ready = [slot for slot in self.active if slot.serves and slot.model == self.name]
        self.ready.sort(key=self._order.__getitem__)

    def takes(self, owner: str = "") -> bool:
        """Whether a request would be leased at once; one that needs ``owner`` waits for it."""
        if owner and (only := self.needed(owner)):
            return not only.full
        if self.replicas:
            return self.replicas.take_one_more()
        return any(not slot.full for slot in self.ready)

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
        """Whether a swap under way will make it resident; slots that become its own later do not count.

        Nor does what is still being loaded on a host that was drained, or when a pause began: it does not
        stay.
        """
        return any(s.coming and s.model == self.name and not s.host.is_cleared for s in self.active)


def ready_slots(slots: Iterable[Slot]) -> list[Slot]:
    """The backends that may be leased."""
    return [slot for slot in slots if slot.serves]


def max_waits(slots: Iterable[Slot], config: Config) -> dict[str, float]:
    """Model -> seconds after which its queue is overdue at the latest: the shortest its replicas ask for."""
    limits: dict[str, float] = {}
    for slot in slots:
        own = config.max_wait if slot.backend.max_wait is None else slot.backend.max_wait
        limits[slot.model] = min(own, limits.get(slot.model, own))
    return limits
