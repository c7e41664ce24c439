"""The log of a run as an anvil-mux tells it: its swaps, and what each request waited.

``GET /events`` tells of backends as it happens and of each request when it has ended. ``EventWatch`` reads it
in a thread of its own from before the warm-up on, and ``log`` makes of it a log like that of a simulation: so
the same figures and the same picture come of both. Moments are the server's, and those of swaps are rounded
to 10 ms.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anvil_mux.errors import MuxError
from anvil_mux.lab.engines import SwapTimes
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.slot import STATES
from anvil_mux.serve import remote
from anvil_mux.telemetry.eventlog import BackendRecord, Situation

CLIENT_LEFT = 499
SEEN_SECONDS = 5.0
"""How long the end of a run waits to be told of its last requests."""
_SWAPPING = frozenset(("draining", "evicting", "loading", "cancelling"))


@dataclass(frozen=True)
class ToldLog:
    """The log of one run, as the server told it, with moments from the beginning of the run on."""

    events: Sequence[Event]
    begins: Mapping[str, Any]
    """The situation in which it begins, as JSON."""
    waits: Mapping[str, float]
    """The wait of each request for its model, by its id."""
    served: Mapping[str, float]
    """The seconds for which each one was served after that, by its id."""
    missed: int
    """Requests and events that were not told: more came than the server keeps."""


class EventWatch:
    """Follows the events of one anvil-mux until the program ends."""

    def __init__(self, url: str, key: str = "") -> None:
        self._url = url
        self._key = key
        self._changed = threading.Condition()
        # Guarded by it:
        self._snapshot: Mapping[str, Any] | None = None
        self._events: list[Mapping[str, Any]] = []
        self._requests: dict[str, Mapping[str, Any]] = {}
        self._lost = 0
        self._why = ""

    def start(self) -> str:
        """Begin; why the server tells nothing, empty: it does."""
        threading.Thread(target=self._read, name="replay-events", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._snapshot is not None or self._why, remote.ASK_SECONDS)
            return self._why or ("" if self._snapshot is not None else "it tells nothing on /events")

    def _read(self) -> None:
        why = "its events ended"
        try:
            for kind, data in remote.events(self._url, key=self._key):
                with self._changed:
                    self.take(kind, data)
                    self._changed.notify_all()
        except MuxError as error:
            why = error.message
        except ValueError:
            why = "what it tells on /events is no JSON"
        with self._changed:
            self._why = why
            self._changed.notify_all()

    def take(self, kind: str, data: Mapping[str, Any]) -> None:
        """Take one message of the stream."""
        if kind == "snapshot" and "models" in data:
            self._snapshot = {**data, "ahead": float(data.get("now", time.time())) - time.time()}
        elif kind == "event":
            self._events += [data] if data["kind"] in STATES else []
        elif kind == "requests":
            self._requests |= {each["id"]: each for each in data["requests"]}
        elif kind == "lost":
            self._lost += data["events"]

    def wait_for(self, ids: Collection[str], seconds: float = SEEN_SECONDS) -> None:
        """Wait until it was told of these requests, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: self._why or all(id in self._requests for id in ids), seconds)

    @property
    def gpus(self) -> dict[str, tuple[str, ...]]:
        """The GPUs of each backend."""
        models = (self._snapshot or {}).get("models", {}).values()
        return {name: tuple(each["gpus"]) for model in models for name, each in model["backends"].items()}

    def swap_times(self, since: float = 0.0, until: float = math.inf) -> SwapTimes:
        """The times of swaps between two moments (Unix time, by this machine's clock)."""
        loads: defaultdict[str, list[float]] = defaultdict(list)
        evictions: defaultdict[str, list[float]] = defaultdict(list)
        begun: dict[str, float] = {}
        for event in self._between(since, until):
            kind, backend = event["kind"], event["backend"]
            if kind == "ready" and not event["cause"] and event["seconds"]:
                loads[backend].append(event["seconds"])
            elif kind == "evicting":
                begun[backend] = event["at"]
            elif kind in ("stopped", "standby") and backend in begun:
                evictions[backend].append(event["at"] - begun.pop(backend))
        return SwapTimes(loads, evictions)

    def _between(self, since: float, until: float) -> list[Mapping[str, Any]]:
        with self._changed:
            ahead = (self._snapshot or {}).get("ahead", 0.0)
            return [event for event in self._events if since <= event["at"] - ahead <= until]

    def log(self, began: float, ids: Sequence[str]) -> ToldLog:
        """The log of the run of these requests; ``began``: Unix time, by this machine's clock."""
        with self._changed:
            snapshot = self._snapshot or {}
            origin = began + snapshot.get("ahead", 0.0)
            requests = [self._requests[id] for id in ids if id in self._requests]
            events = list(self._events)
            lost = self._lost
        before = _situation(snapshot, [event for event in events if event["at"] < origin], origin)
        moves = [_move(event, origin) for event in events if event["at"] >= origin]
        # By moment alone: what the server told of one moment stays in its order.
        log = sorted([*moves, *_of_requests(requests, origin)], key=lambda event: event.at)
        return ToldLog(
            events=_counted(log, before),
            begins=before,
            waits={each["id"]: each["waited"] for each in requests},
            served={each["id"]: max(each["seconds"] - each["waited"], 0.0) for each in requests},
            missed=lost + len(ids) - len(requests),
        )


def _situation(
    snapshot: Mapping[str, Any], events: Sequence[Mapping[str, Any]], origin: float
) -> Mapping[str, Any]:
    """The situation of the backends after some events, as JSON with moments from ``origin`` on."""
    situation = Situation()
    for model, about in snapshot.get("models", {}).items():
        for name, backend in about["backends"].items():
            state = backend["state"]
            situation.backends[name] = BackendRecord(model, state, level=backend["standby_level"] or "")
    for event in events:
        if event["backend"] in situation.backends:
            situation.read(_move(event, origin))
    situation.at = 0.0
    told: dict[str, Any] = situation.to_json()
    for each in told["backends"].values():
        each.pop("retry_at", None)
        each["since"] = 0.0
    return told


def _move(event: Mapping[str, Any], origin: float) -> Event:
    seconds = event["seconds"]
    return Event(
        at=event["at"] - origin,
        kind=event["kind"],
        model=event["model"],
        backend=event["backend"],
        seconds=math.inf if seconds is None else seconds,
        target=event["target"],
        way=event["way"],
    )


def _of_requests(requests: Sequence[Mapping[str, Any]], origin: float) -> list[Event]:
    """The events of requests, of which only their ends were told."""
    log: list[Event] = []
    for ticket, each in enumerate(requests, 1):
        model, waited = each["model"], each["waited"]
        ended = each["ended"] - origin
        came = ended - each["seconds"]
        if waited > 0:
            log.append(Event(came, "queued", model, ticket=ticket))
        if not each["code"] or each["code"] == "severed":
            log.append(Event(came + waited, "leased", model, ticket=ticket, seconds=waited))
            log.append(Event(ended, "severed" if each["code"] else "released", model, ticket=ticket))
        else:
            kind = "gone" if each["status"] == CLIENT_LEFT else "failed"
            log.append(Event(ended, kind, model, ticket=ticket, seconds=each["seconds"]))
    return log


def _counted(log: Sequence[Event], begins: Mapping[str, Any]) -> list[Event]:
    """The same log with the backend of each lease, and with how many leases it has then.

    A backend is told only of swaps; so it is the one of its model that is ready.
    """
    there = Situation.parse(begins).backends
    ready = {each.model: name for name, each in there.items() if each.state in ("ready", "draining")}
    leases: defaultdict[str, int] = defaultdict(int)
    of_ticket: dict[int, str] = {}
    found = []
    for event in log:
        if event.kind == "ready":
            ready[event.model] = event.backend
        elif event.kind == "leased":
            backend = of_ticket[event.ticket] = ready.get(event.model, event.model)
            leases[backend] += 1
            event = event._replace(backend=backend, size=leases[backend])
        elif event.ticket and event.kind in ("released", "severed"):
            backend = of_ticket[event.ticket]
            leases[backend] -= 1
            event = event._replace(backend=backend, size=leases[backend] if event.kind == "released" else 1)
        found.append(event)
    return found


def serving_share(
    log: Sequence[Event], begins: Mapping[str, Any], gpus: Mapping[str, Sequence[str]], until: float
) -> float | None:
    """The part of the time in which no GPU was being swapped: from the first drain until the model answers.

    A swap of a model over two GPUs counts on both of them.
    """
    every = {gpu for of_backend in gpus.values() for gpu in of_backend}
    if not every or until <= 0:
        return None
    busy: dict[str, set[str]] = {gpu: set() for gpu in every}
    since: dict[str, float] = {}
    lost = 0.0

    def enter(backend: str, moves: bool, now: float) -> None:
        nonlocal lost
        for gpu in gpus.get(backend, ()):
            before = bool(busy[gpu])
            (busy[gpu].add if moves else busy[gpu].discard)(backend)
            if busy[gpu] and not before:
                since[gpu] = now
            elif before and not busy[gpu]:
                lost += now - since.pop(gpu)

    for name, each in Situation.parse(begins).backends.items():
        enter(name, each.state in _SWAPPING, 0.0)
    for event in log:
        if event.at > until:
            break
        if event.backend and not event.ticket:
            enter(event.backend, event.kind in _SWAPPING, event.at)
    lost += sum([until - moment for moment in since.values()])
    return 1.0 - lost / (until * len(every))
