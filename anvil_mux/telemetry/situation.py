"""The situation to which a log has led: the state of backends, queues and leases, as data.

A fold over events. The event log writes it at the head of a file, so that the file can be read without those
before it; whoever reads a log starts from there. The checker of logs judges each event by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Any

from anvil_mux.scheduler.events import DEATHS, FOUND, Event
from anvil_mux.scheduler.slot import LOADING, SOON_SECONDS, STATES, cool_down

NEVER = -math.inf


@dataclass(slots=True)
class BackendRecord:
    """The situation of one backend. Moments are those of the log."""

    model: str
    state: str = "stopped"
    since: float = 0.0
    target: str = ""
    """The model that it makes room for."""
    limit: float = math.inf
    """Seconds that its drain may last."""
    level: str = ""
    """How deep it is in standby."""
    leases: dict[int, float] = field(default_factory=dict)
    """Ticket -> since when."""
    loaded: float = NEVER
    answered: float = NEVER
    """When it last gave a whole answer."""
    crashes: int = 0
    """Deaths in a row, soon after a load."""
    failed_starts: int = 0
    """Failed loads in a row; crashes count."""
    retry_at: float = 0.0
    """The end of its cool-down."""


@dataclass(slots=True)
class QueueRecord:
    """The requests that wait for a model."""

    bound: float = math.inf
    """Seconds after which it is overdue."""
    load: float = 0.0
    """Seconds that the load of its model was expected to take when it began; 0: not known."""
    tickets: dict[int, float] = field(default_factory=dict)
    """Ticket -> since when."""
    only: dict[int, str] = field(default_factory=dict)
    """Ticket -> the one backend that it waits for, of those that any other does not help."""
    unready: float = NEVER
    """When a backend of the model last ceased to be ready."""


class Situation:
    """The situation after some events.

    ``slack``: by how many seconds less than ``SOON_SECONDS`` a death after a load is soon.
    """

    def __init__(self, slack: float = 0.0) -> None:
        self.at = 0.0
        self.backends: dict[str, BackendRecord] = {}
        self.queues: dict[str, QueueRecord] = {}
        self.begun: set[str] = set()
        """Models whose swap has evicted somebody, until their load begins."""
        self.pins: dict[str, bool] = {}
        """Model -> whether it was pinned or unpinned by hand last."""
        self.is_paused = False
        self._soon = SOON_SECONDS - slack

    @property
    def holders(self) -> list[Set[int]]:
        """The tickets that wait or hold a lease."""
        queued = [queue.tickets.keys() for queue in self.queues.values()]
        return [*queued, *[each.leases.keys() for each in self.backends.values()]]

    def is_about(self, backends: Set[str]) -> bool:
        """Whether nothing moves, and no other backend than these holds anything."""
        states = {name: each.state for name, each in self.backends.items() if each.state != "stopped"}
        return states.keys() <= backends and set(states.values()) <= {"ready", "standby"}

    def backend(self, name: str, model: str) -> BackendRecord:
        try:
            return self.backends[name]
        except KeyError:
            made = self.backends[name] = BackendRecord(model)
            return made

    def queue(self, model: str) -> QueueRecord:
        try:
            return self.queues[model]
        except KeyError:
            made = self.queues[model] = QueueRecord()
            return made

    # Events

    def read(self, event: Event) -> None:
        self.at = event.at
        match event.kind:
            case "queued":
                self._join(event)
            case "leased" | "failed" | "gone":
                self._settle(event)
            case "released" | "severed":
                self._release(event)
            case "paused" | "resumed":
                self.is_paused = event.kind == "paused"
            case "pinned" | "unpinned":
                self.pins[event.model] = event.kind == "pinned"
            case kind if kind in STATES:
                self._move(event)

    def _join(self, event: Event) -> None:
        queue = self.queue(event.model)
        if not queue.tickets:
            queue.bound, queue.load = event.bound, event.load
        queue.tickets[event.ticket] = event.at
        if event.backend:
            queue.only[event.ticket] = event.backend

    def _settle(self, event: Event) -> None:
        queue = self.queue(event.model)
        queue.tickets.pop(event.ticket, None)
        queue.only.pop(event.ticket, None)
        if event.kind == "leased":
            leases = self.backend(event.backend, event.model).leases
            if event.size > len(leases):  # else it only wanted the model loaded
                leases[event.ticket] = event.at

    def _release(self, event: Event) -> None:
        backend = self.backend(event.backend, event.model)
        backend.leases.pop(event.ticket, None)
        if event.kind == "released" and not event.cause:
            backend.answered, backend.crashes = event.at, 0

    def _move(self, event: Event) -> None:
        backend = self.backend(event.backend, event.model)
        before, drained_for = backend.state, backend.target
        if before == "ready":
            self.queue(event.model).unready = event.at
        found = event.cause is not None and event.cause.kind in FOUND
        backend.failed_starts += before == "loading" and event.kind != "cancelling" and not found
        backend.state, backend.since, backend.target = event.kind, event.at, event.target
        backend.limit = event.seconds if event.kind == "draining" else math.inf
        backend.level = event.way if event.kind == "standby" else ""
        match event.kind:
            case "loading":
                self.begun.discard(event.model)
            case "ready":
                backend.failed_starts = 0
                if before in LOADING and not found:
                    backend.loaded = event.at
            case "evicting" if before == "draining" and drained_for:
                self.begun.add(drained_for)
            case "demoting" if event.target:
                self.begun.add(event.target)
            case "stopped" | "standby":
                self._leave(backend, event, before)

    def _leave(self, backend: BackendRecord, event: Event, before: str) -> None:
        died = event.cause and event.cause.kind in DEATHS and before in ("ready", "draining", "evicting")
        if died and event.at - backend.loaded <= self._soon and backend.answered < backend.loaded:
            # Before one whole answer: that counts as a load that failed.
            backend.crashes += 1
            backend.failed_starts = backend.crashes
        backend.leases.clear()
        if event.cause and event.cause.kind in FOUND:
            backend.retry_at = 0.0
        elif event.cause and event.cause.kind == "evict_failed":
            pass  # it is in standby as before
        elif before != "cancelling":
            backend.retry_at = event.at + cool_down(backend.failed_starts) if backend.failed_starts else 0.0

    # As JSON

    def to_json(self) -> dict[str, Any]:
        backends = {name: each for name, each in self.backends.items() if _is_worth_a_word(each)}
        queues = {model: queue for model, queue in self.queues.items() if queue != QueueRecord()}
        return {
            "at": self.at,
            "backends": {name: _as_json(each) for name, each in backends.items()},
            "queues": {model: _as_json(queue) for model, queue in queues.items()},
            "begun": sorted(self.begun),
            "pins": self.pins,
            "paused": self.is_paused,
        }

    @classmethod
    def parse(cls, state: Mapping[str, Any], slack: float = 0.0) -> Situation:
        """Read what ``to_json`` gave ({}: the beginning of everything); TypeError, ValueError or KeyError."""
        made = cls(slack)
        if state:
            made.at = float(state["at"])
            made.backends = {name: BackendRecord(**_parsed(each)) for name, each in state["backends"].items()}
            made.queues = {model: QueueRecord(**_parsed(each)) for model, each in state["queues"].items()}
            made.begun, made.pins = set(state["begun"]), dict(state["pins"])
            made.is_paused = bool(state.get("paused"))  # logs of old know of no pause
        return made


def _is_worth_a_word(backend: BackendRecord) -> bool:
    return backend.state != "stopped" or bool(backend.failed_starts or backend.crashes)


def _as_json(each: BackendRecord | QueueRecord) -> dict[str, Any]:
    """The fields that do not have their defaults; what is infinite has."""
    values = {f.name: (getattr(each, f.name), f.default) for f in fields(each)}
    return {name: value for name, (value, default) in values.items() if value not in (default, {})}


def _parsed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Objects of JSON have no numbers for keys, and tickets are numbers."""
    return {
        key: {int(ticket): about for ticket, about in value.items()} if isinstance(value, dict) else value
        for key, value in state.items()
    }
