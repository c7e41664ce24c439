"""Event logs of a running program: what it did, and what another policy would have done with its clients.

A ``Recording`` is a log that is compared with simulations; ``workload_of`` makes a workload of its clients.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import median
from types import MappingProxyType

from anvil_mux.config.config import Config
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import ALONE, USUAL_BATCHING, AssumedBatching, Batch, Batching
from anvil_mux.lab.figures import figures
from anvil_mux.lab.simulate import Arrival
from anvil_mux.lab.study import SAME_NAMES, Case, StudyRun, case_of
from anvil_mux.lab.workload import ModelNames, Workload
from anvil_mux.scheduler.events import ADOPTED, Event
from anvil_mux.telemetry import eventlog
from anvil_mux.telemetry.eventlog import BadLog, LoggedRun, Situation, config_of, whole

LOGGED = "(as logged)"
"""The name, in place of a policy's, of what the running program itself did."""
SLACK_SECONDS = 1.0
"""Seconds that the threads of a running program may be late."""
OTHER_LOAD_SECONDS = 10.0
"""Seconds to load a model, where the log has no load at all."""
BEYOND_SECONDS = 2**-10
"""The service that a severed request is held to have lacked."""


@dataclass(frozen=True)
class Recording:
    """The event log of a running program."""

    name: str
    runs: Sequence[LoggedRun]
    config: Config | None
    """A configuration in place of those in the log."""
    called: ModelNames = SAME_NAMES
    """The names in that configuration of the log's models."""

    def case(self, batching: AssumedBatching = USUAL_BATCHING) -> Case:
        """The clients of the log, with the backends of its last run."""
        logged = batching.of_backends(config_of(self.runs[-1].header))
        made = workload_of(self.runs, self.name, logged)
        case = case_of(made, self.name, self._config_of(self.runs[-1]), self.called)
        return replace(case, batching=batching)

    def run(self, *, checked: bool) -> StudyRun:
        """The run of the program itself."""
        wrong: list[str] | None = None
        if checked:
            each = [(one.events, self._config_of(one), SLACK_SECONDS, one.begins) for one in self.runs]
            wrong = [line for one in each for line in check(*one, is_its_own=self.config is None)]
        log, begins = _joined(whole(self.runs)), self.runs[0].begins
        return StudyRun(
            profile=self.name,
            policy=LOGGED,
            seed=0,
            config=self._config_of(self.runs[-1]),
            log=log,
            figures=figures(log, begins=begins),
            wrong=wrong,
            begins=begins,
        )

    def _config_of(self, one: LoggedRun) -> Config:
        return self.config or config_of(one.header)


def read(
    path: str, config: Config | None, warn: Callable[[str], object], called: ModelNames = SAME_NAMES
) -> Recording:
    runs = eventlog.read(path, warn)
    if not runs:
        raise BadLog(f"{path}: is empty")
    return Recording(Path(path).name, runs, config, called)


def _joined(runs: Sequence[LoggedRun]) -> list[Event]:
    """One log of several runs, each of which counts seconds and tickets from its own beginning."""
    log: list[Event] = []
    tickets = 0
    for one in runs:
        since, before = one.header["began"] - runs[0].header["began"], tickets
        for event in one.events:
            ticket = event.ticket and event.ticket + before
            log.append(event._replace(at=event.at + since, ticket=ticket))
            tickets = max(tickets, ticket)
    return log


# Its clients


def workload_of(
    runs: Iterable[LoggedRun],
    name: str = "log",
    batching: Mapping[str, Batching] = MappingProxyType({}),
) -> Workload:
    """The clients of a log and what loading cost them.

    Every request arrives when it arrived, also if the answer of another policy would have come at another
    time. Its answer takes alone what it would have taken alone: by ``batching``, which says what the engine
    of each backend does at once (without, it takes what it took). One that was severed takes a moment longer
    than it lasted (the same policy severs it again), one that was never served as long as its model's usually
    do. Clients that left keep their patience. Deaths and unloading by hand are left out. What was under way
    when a log begins arrives at its beginning.
    """
    learned = _LearnedClients(batching)
    began, now = None, 0.0
    for run in whole(runs):
        if run.events:
            first, last = run.begins.get("at", run.events[0].at), run.events[-1].at
            began = began or run.header["began"] + first
            # Where somebody set the clock back a run follows the one before.
            now = max(now, run.header["began"] + first - began)
            learned.read(run, now, first - now)
            now += last - first
    if not learned.requests:
        raise BadLog("the event log holds no request")
    return learned.workload(name)


_Order = tuple[float, int, int]
"""When a request arrived, in which run, and its ticket: many may arrive at once."""


class _LearnedClients:
    """A fold over the events of runs."""

    def __init__(self, batching: Mapping[str, Batching]) -> None:
        self._batching = batching
        self.requests: list[tuple[_Order, Arrival]] = []
        self._loads: defaultdict[str, list[float]] = defaultdict(list)
        """The loads by model."""
        self._stops: list[float] = []
        self._resident: tuple[str, ...] | None = None
        # Of the run that is being read: the workload's moment 0, and what is under way.
        self._runs = 0
        self._begins = self._origin = 0.0
        self._waiting: dict[int, Event] = {}
        self._leased: dict[int, Event] = {}
        self._leases: Counter[str] = Counter()
        self._batches: dict[str, Batch] = {}
        self._stopping: dict[str, float] = {}

    def read(self, run: LoggedRun, begins: float, origin: float) -> None:
        """Read a run; ``begins``: the moment of the workload at which it does."""
        self._runs += 1
        self._batches.clear()
        self._begins, self._origin = begins, origin
        situation = Situation.parse(run.begins)
        if self._resident is None:
            there = situation.backends.values()
            resident = [each.model for each in there if each.state in ("ready", "draining")]
            resident += [event.model for event in run.events if event.cause == ADOPTED]
            self._resident = tuple(dict.fromkeys(resident))
        self._go_on_from(situation)
        for event in run.events:
            if event.ticket:
                self._read_ticket(event)
            elif event.backend:
                self._read_backend(event)
        end = run.events[-1].at
        for ticket in tuple(self._leased):
            self._serve(ticket, end)
        for event in tuple(self._waiting.values()):
            self._refuse(event, math.inf)
        self._stopping.clear()

    def _go_on_from(self, situation: Situation) -> None:
        for name, backend in situation.backends.items():
            if backend.state == "evicting":
                self._stopping[name] = backend.since
            self._leases[name] = len(backend.leases)
            for ticket in backend.leases:
                self._take(Event(situation.at, "leased", backend.model, name, ticket))
        for model, queue in situation.queues.items():
            for ticket, since in queue.tickets.items():
                self._waiting[ticket] = Event(since, "queued", model, ticket=ticket)

    def _read_backend(self, event: Event) -> None:
        loads = self._loads[event.model]
        if event.kind == "ready" and not event.cause:
            loads.append(event.seconds)
        elif event.kind == "evicting":
            self._stopping[event.backend] = event.at
        elif event.kind in ("stopped", "standby"):
            if event.backend in self._stopping:
                self._stops.append(event.at - self._stopping.pop(event.backend))
            for ticket in [t for t, lease in self._leased.items() if lease.backend == event.backend]:
                self._serve(ticket, event.at)

    def _read_ticket(self, event: Event) -> None:
        if event.kind == "queued":
            self._waiting[event.ticket] = event
        elif event.kind == "leased":
            self._lease(event)
        elif event.kind in ("gone", "failed"):
            self._refuse(event, event.seconds if event.kind == "gone" else math.inf)
        elif event.kind in ("released", "severed"):
            self._serve(event.ticket, event.at, BEYOND_SECONDS if event.kind == "severed" else 0.0)

    def _lease(self, event: Event) -> None:
        self._waiting.pop(event.ticket, None)
        if event.size > self._leases[event.backend]:
            self._leases[event.backend] += 1
            self._take(event)
        else:  # it only wanted the model loaded
            self._add(event, 0.0, leases=False)

    def _take(self, lease: Event) -> None:
        self._leased[lease.ticket] = lease
        if lease.backend not in self._batches:
            self._batches[lease.backend] = Batch(self._batching.get(lease.backend, ALONE))
        self._batches[lease.backend].add(lease.ticket, 0.0, lease.ticket, lease.at)

    def _serve(self, ticket: int, now: float, beyond: float = 0.0) -> None:
        lease = self._leased.pop(ticket, None)
        if lease:
            self._leases[lease.backend] -= 1
            alone = -self._batches[lease.backend].remove(ticket, now)
            self._add(lease, alone + beyond)

    def _refuse(self, event: Event, patience: float) -> None:
        self._waiting.pop(event.ticket, None)
        self._add(event, math.nan, patience)

    def _add(self, event: Event, seconds: float, patience: float = math.inf, leases: bool = True) -> None:
        """Add ``seconds`` of service, nan where they are not known."""
        at = max(event.at - event.seconds - self._origin, self._begins)
        request = Arrival(at, event.model, seconds, patience, leases)
        self.requests.append(((at, self._runs, event.ticket), request))

    def workload(self, name: str) -> Workload:
        requests = [request for _, request in sorted(self.requests, key=itemgetter(0))]
        services: defaultdict[str, list[float]] = defaultdict(list)
        for request in requests:
            if request.leases and not math.isnan(request.seconds):
                services[request.model].append(request.seconds)
        usual = _medians(services, 0.0)
        models = dict.fromkeys([*self._loads, *[request.model for request in requests]])
        loads = _medians(self._loads, OTHER_LOAD_SECONDS)
        return Workload(
            name,
            {model: loads.get(model, loads[""]) for model in models},
            tuple(
                [
                    each._replace(seconds=usual.get(each.model, usual[""]))
                    if math.isnan(each.seconds)
                    else each
                    for each in requests
                ]
            ),
            resident=self._resident or (),
            stop_seconds=median(self._stops or [0.0]),
        )


def _medians(seconds: Mapping[str, Sequence[float]], default: float) -> dict[str, float]:
    """The median of each model, and under "" that of all: for models of which nothing is known."""
    every = [value for values in seconds.values() for value in values]
    known = {model: median(values) for model, values in seconds.items() if values}
    return {**known, "": median(every or [default])}
