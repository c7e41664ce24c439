"""A run that was measured: its log as an anvil-mux tells it, and the simulation of the same script beside it.

``GET /events`` tells of backends as it happens and of each request when it has ended. ``EventWatch`` reads it
in a thread of its own from before the warm-up on, and ``log`` makes of it a log like that of a simulation: so
the same figures and the same picture come of both. Moments are the server's, and those of swaps are rounded
to 10 ms.

What is simulated is what could be known beforehand: the configuration, how long each model loads and is
evicted, and how long each answer takes alone and beside others (engines.py), as seen in the warm-up. The
difference is then taken apart by what was measured: first the answers of the simulation last as long as the
real ones did, then its loads and evictions too. What is left is of what a simulation does not know.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from anvil_mux.config.config import Config, models_by_name
from anvil_mux.errors import ConfigError, MuxError
from anvil_mux.lab.engines import Batching, EnginePace, SeenEngines, SwapTimes, mean_of_all
from anvil_mux.lab.figures import Figures, figures, mean
from anvil_mux.lab.player import PlayedAnswer, Script
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.lab.workload import Prompt
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


# The same script in virtual time


RequestKey = tuple[str, int]
"""A model, and the number of a request for it."""


def _mean_expected(expected: Mapping[str, Sequence[float]], seen: Mapping[str, Sequence[float]]) -> float:
    """The mean that was expected of what was seen: each backend as often as it was seen."""
    known = [
        (fmean(expected.get(name) or seconds), len(seconds)) for name, seconds in seen.items() if seconds
    ]
    return sum(mean * count for mean, count in known) / max(sum(count for _, count in known), 1)


@dataclass(frozen=True)
class SimulatedReplay:
    """A script in virtual time."""

    figures: Figures
    log: Sequence[Event]
    answer_seconds: float
    """The mean time of an answer."""


@dataclass(frozen=True)
class Comparison:
    """A measured run beside the simulation of the same script; seconds are mean waits, or other means."""

    measured: Figures
    simulated: SimulatedReplay
    with_answers: Figures
    """The same, with answers that last as long as the real ones did."""
    with_swaps: Figures
    """That, with the loads and evictions that were seen as well."""
    answer_seconds: tuple[float, float]
    """The time of an answer: as expected, and as seen. So are the two below."""
    load_seconds: tuple[float, float]
    evict_seconds: tuple[float, float]

    @property
    def difference(self) -> float:
        """How much longer the mean wait really was, as a part of the simulated one."""
        expected = self.simulated.figures.wait_mean_seconds
        return (self.measured.wait_mean_seconds - expected) / expected if expected else 0.0

    @property
    def waits(self) -> tuple[float, float, float, float]:
        """The mean waits: simulated, with the answers that were seen, with the swaps too, and measured."""
        expected, seen = self.simulated.figures, self.measured
        a, b, c, d = [each.wait_mean_seconds for each in (expected, self.with_answers, self.with_swaps, seen)]
        return a, b, c, d

    def to_json(self) -> dict[str, Any]:
        """The difference as an object of JSON: seconds of the mean wait by where they come from."""
        expected, answers, swaps, seen = self.waits
        pairs = ("answer_seconds", "load_seconds", "evict_seconds")
        return {
            "ratio": self.difference,
            "of_answers_seconds": answers - expected,
            "of_swaps_seconds": swaps - answers,
            "of_others_seconds": seen - swaps,
            **{name: dict(zip(("expected", "seen"), getattr(self, name), strict=True)) for name in pairs},
        }

    def sentences(self) -> Iterator[str]:
        """The difference in words, by where it comes from."""
        waits = self.waits
        yield (
            f"mean wait {waits[3]:.2f} s, simulated {waits[0]:.2f} s ({self.difference:+.0%}). "
            "Of the difference:"
        )
        expected, seen = self.answer_seconds
        yield (
            f"{waits[1] - waits[0]:+.2f} s: an answer took {seen:.3f} s, "
            f"and {expected:.3f} s by its pace in the warm-up"
        )
        loads, evictions = self.load_seconds, self.evict_seconds
        yield (
            f"{waits[2] - waits[1]:+.2f} s: a load took {loads[1]:.2f} s, {loads[0]:.2f} s were expected, "
            f"and an eviction {evictions[1]:.2f} s, expected {evictions[0]:.2f} s"
        )
        yield f"{waits[3] - waits[2]:+.2f} s: what is not simulated, as requests of other clients"


def served_names(config: Config, models: Iterable[str]) -> dict[str, str]:
    """The models of a compose file by the names that a script asks for; ConfigError if it lacks one."""
    known = models_by_name(config.backends)
    models = list(models)
    if missing := [model for model in models if model not in known]:
        raise ConfigError([f"the compose file serves {', '.join(known)}, and not {', '.join(missing)}"])
    return {model: known[model] for model in models}


def compare(
    script: Script,
    config: Config,
    *,
    paces: Mapping[str, EnginePace],
    expected: SwapTimes,
    seen: SwapTimes,
    told: ToldLog,
    answers: Sequence[PlayedAnswer],
) -> Comparison:
    """Hold a measured run against the simulation of its script."""
    whole = sorted([a for a in answers if a.id in told.served and a.status == 200], key=lambda each: each.due)
    numbers: Counter[str] = Counter()
    really: dict[RequestKey, float] = {}
    for answer in whole:
        really[answer.model, numbers[answer.model]] = told.served[answer.id]
        numbers[answer.model] += 1
    # What the feed says first may be a moment old: who loads in it was ready when the run began.
    there = ("ready", "loading")
    resident = [name for name, each in told.begins["backends"].items() if each["state"] in there]
    virtual = _VirtualReplay(script, config, paces, resident, served_names(config, script.models))
    as_expected = SeenEngines(expected.or_else(seen), in_order=False)
    simulated = virtual.run(as_expected)
    return Comparison(
        measured=figures(told.events, begins=told.begins),
        simulated=simulated,
        with_answers=virtual.run(as_expected, really).figures,
        with_swaps=virtual.run(SeenEngines(seen.or_else(expected), in_order=True), really).figures,
        answer_seconds=(simulated.answer_seconds, mean(really.values())),
        load_seconds=(_mean_expected(expected.loads, seen.loads), mean_of_all(seen.loads)),
        evict_seconds=(_mean_expected(expected.evictions, seen.evictions), mean_of_all(seen.evictions)),
    )


@dataclass(frozen=True)
class _VirtualReplay:
    """A script in virtual time, on engines of a known pace."""

    script: Script
    config: Config
    paces: Mapping[str, EnginePace]
    resident: Sequence[str]
    names: Mapping[str, str]
    """The models of the configuration by the names that the script asks for."""

    def run(self, engines: SeenEngines, answers: Mapping[RequestKey, float] | None = None) -> SimulatedReplay:
        """Simulate; with ``answers``, each of them takes as long as they say, beside whatever others."""
        follow = self.script.follow()
        numbers: Counter[str] = Counter()
        really = answers or {}

        def arrival(request: Prompt) -> Arrival:
            key = request.model, numbers[request.model]
            numbers[request.model] += 1
            seconds = really.get(key, self.paces[request.model].seconds(request.output))
            name = self.names[request.model]
            return Arrival(request.at, name, seconds, request.patience, sender=(key, request))

        def later(ended: Arrival, now: float) -> Iterable[Arrival]:
            assert isinstance(ended.sender, tuple)
            _, request = ended.sender
            return map(arrival, follow(request, now))

        log = simulate(
            self.config,
            list(map(arrival, sorted(self.script.first, key=lambda each: each.at))),
            engines,
            resident=self.resident,
            follow=later,
            costs=engines.means.costs(self.config),
            batching=self._batching() if answers is None else {},
        )
        begun = {event.ticket: event.at for event in log if event.kind == "leased"}
        took = [event.at - begun[event.ticket] for event in log if event.kind == "released"]
        return SimulatedReplay(figures(log), log, mean(took))

    def _batching(self) -> dict[str, Batching]:
        """Each backend's engine as it was measured to make several answers at a time."""
        of_model = {self.names[model]: pace.batching for model, pace in self.paces.items()}
        return {b.name: of_model[b.model] for b in self.config.backends if b.model in of_model}
