"""Every event, on disk and back: ``anvil-mux serve --event-log FILE``, and what can be learned from the file.

A file holds runs, one for each time that the program was started on it. A run is a line with its ``header``
(what is needed to read it without the compose file), then one line of JSON for each event, in the order in
which they happened. What is empty is left out of a line; ``seconds`` null is forever. ``{"lost": N}`` stands
where N events could not be written.

The multiplexer appends events under its lock, so ``EventLog.append`` only puts them in a deque; a thread of
its own writes them a moment later. While a disk is full some are kept in memory, then they are counted;
serving goes on. A file is only ever appended to: a program that was killed leaves at most half a line at the
end of its run, which readers pass over.

A file that has become too large is set aside as FILE.1, FILE.1 as FILE.2 and so on, and a new one begun, at a
moment at which no backend is on its way. Each can be read without the others: a new one begins with what is
so at that moment (``Standing``), told as the events that would have led there if all had happened just then.
So does a new run within the file after a reload, under another header.

``replay`` makes of a log the workload that its clients were, so that a simulation can tell what another
policy would have done with it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from json.encoder import encode_basestring_ascii as quoted
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple

from anvil_mux import __version__
from anvil_mux.config.config import Backend, Config, Gpu
from anvil_mux.errors import MuxError
from anvil_mux.scheduler.events import KINDS, Event
from anvil_mux.sim.simulate import Request
from anvil_mux.sim.workload import UNREADABLE, Workload, lines

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.1
GROUP = 256
"""Events written in one system call."""
KEEP_BYTES = 1 << 20
"""What is kept in memory while it cannot be written."""
OTHER_LOAD_SECONDS = 10.0
"""Of a model that no event of the log loads, in a log without any load."""
SIZE = 128 << 20
"""Bytes after which a new file is begun, unless the user says another number."""
KEPT = 3
"""Files that were set aside and are kept."""
BEYOND_SECONDS = 2**-10
"""What a severed request is held to have lacked."""


class BadLog(MuxError):
    """A file that is no event log, or not a whole one."""


class Run(NamedTuple):
    """What one program wrote between its start and its end."""

    header: Mapping[str, Any]
    events: list[Event]


# The header

_OF_CONFIG = (
    "project",
    "policy",
    "policy_settings",
    "preemption",
    "preemption_settings",
    "drain_timeout",
    "queue_timeout",
    "max_wait",
    "max_queue",
    "host_memory",
)
_NOT_OF_BACKEND = ("service", "strip", "set")
"""A service's environment may hold keys; the others change nothing of when things happen."""


def header(config: Config, began: float) -> dict[str, Any]:
    """``began``: the Unix time of moment 0, to which the events' moments are to be added."""
    gpus = [_changed(gpu, ()) for gpu in config.gpus]
    backends = [_changed(backend, _NOT_OF_BACKEND) for backend in config.backends]
    told = {key: getattr(config, key) for key in _OF_CONFIG}
    return {"anvil_mux": __version__, "began": began, **told, "gpus": gpus, "backends": backends}


def _changed(thing: Backend | Gpu, without: Sequence[str]) -> dict[str, Any]:
    """The fields of a dataclass that do not have their defaults."""
    names = [field for field in fields(thing) if field.name not in without]
    return {f.name: getattr(thing, f.name) for f in names if getattr(thing, f.name) != f.default}


def config_of(header: Mapping[str, Any]) -> Config:
    """What the program that wrote the header was told, as far as events depend on it."""
    return Config(
        backends=tuple([_made(Backend, about) for about in header["backends"]]),
        gpus=tuple([_made(Gpu, about) for about in header.get("gpus", ())]),
        **{key: header[key] for key in _OF_CONFIG if key in header},
    )


def _made(kind: Callable[..., Any], about: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    given = {key: value for key, value in about.items() if key in known}
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


# Writing


_STILL = ("ready", "parked", "stuck")


class Standing:
    """A fold over events: what is so after them, as events."""

    def __init__(self) -> None:
        self._backends: dict[str, Event] = {}  # the last move of each that is not empty
        self._goals: dict[str, str] = {}  # victim -> the model that it made room for, until that is loaded
        self._pins: dict[str, Event] = {}  # model -> that it was pinned or unpinned
        self._waiting: dict[int, Event] = {}
        self._bounds: dict[str, float] = {}  # model -> the bound of its queue
        self._leased: dict[str, dict[int, Event]] = {}  # backend -> ticket -> its lease

    def read(self, event: Event) -> None:
        if event.kind in ("reloaded", "reload_failed"):
            return
        leases = self._leased.setdefault(event.backend, {})
        if event.kind in ("deferred", "queued"):
            if event.kind == "queued":
                self._waiting[event.ticket] = event
                if event.bound < math.inf:
                    self._bounds[event.model] = event.bound
        elif event.kind in ("pinned", "unpinned"):
            self._pins[event.model] = event
        elif event.ticket:
            self._waiting.pop(event.ticket, None)
            if event.kind == "leased" and event.size > len(leases):
                leases[event.ticket] = event
            else:
                leases.pop(event.ticket, None)
        elif event.kind == "empty":
            self._backends.pop(event.backend, None)
            leases.clear()
        else:
            self._backends[event.backend] = event
        self._follow(event)

    def _follow(self, event: Event) -> None:
        if event.kind == "draining" and event.target:
            self._goals[event.backend] = event.target
        elif event.kind == "starting":
            self._goals = {name: goal for name, goal in self._goals.items() if goal != event.model}
        elif event.kind in ("ready", "stuck"):  # reprieved, or the swap is off
            self._goals.pop(event.backend, None)

    @property
    def is_still(self) -> bool:
        """No swap is under way: only then can a log begin."""
        return not self._goals and all(event.kind in _STILL for event in self._backends.values())

    def events(self, now: float) -> list[Event]:
        """Who is pinned, who is resident, or rests, who is leased and who waits; all at ``now``."""
        told = [event._replace(at=now) for event in self._pins.values()]
        for name, last in self._backends.items():
            told.append(Event(now, "ready", last.model, name, reason="adopted"))
            if last.kind != "ready":  # the shortest way to its state
                told += [Event(now, kind, last.model, name) for kind in ("draining", "stopping")]
                told.append(last._replace(at=now))
        for leases in self._leased.values():
            for size, lease in enumerate(leases.values(), 1):
                told.append(lease._replace(at=now, size=size, seconds=0.0))
        bounds = dict(self._bounds)  # each stands in the first of a queue
        for event in self._waiting.values():
            told.append(event._replace(at=now, bound=bounds.pop(event.model, math.inf)))
        return told


@dataclass(frozen=True, slots=True)
class Rotation:
    """When a new file is begun, and how many are kept."""

    path: str
    size: int = SIZE
    kept: int = KEPT

    def turn(self) -> int:
        """Sets the file aside and begins a new one; its descriptor. OSError."""
        for number in range(self.kept - 1, 0, -1):
            if os.path.exists(f"{self.path}.{number}"):
                os.replace(f"{self.path}.{number}", f"{self.path}.{number + 1}")
        os.replace(self.path, f"{self.path}.1")
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


class EventLog:
    """Writes events to a descriptor that is open for appending; ``complain`` is told once if it cannot."""

    def __init__(
        self,
        descriptor: int,
        header: Mapping[str, Any],
        complain: Callable[[str], object] = log.warning,
        rotation: Rotation | None = None,
    ) -> None:
        self._descriptor = descriptor
        self._header = header
        self._rotation = rotation
        self._standing = Standing()
        self._anew = False
        """A run is to begin, as soon as no swap is under way."""
        self._complain: Callable[[str], object] | None = complain
        self._events: deque[Event] = deque()
        self._some = threading.Event()
        self._hurry = threading.Event()
        self._closing = False
        self._pending = bytearray(_line_end(descriptor) + _encoded(header))
        self._lost = 0
        self._push()
        # From here on what is pending and what is lost belong to the thread.
        self._thread = threading.Thread(target=self._run, name="event-log", daemon=True)
        self._thread.start()

    def append(self, event: Event) -> None:
        """Takes an event of the multiplexer, under its lock."""
        self._events.append(event)
        if not self._some.is_set():
            self._some.set()

    def head(self, header: Mapping[str, Any]) -> None:
        """What runs from the next reload on begin with."""
        self._header = header

    def close(self) -> None:
        """Writes what is left."""
        self._closing = True
        self._hurry.set()
        self._some.set()
        self._thread.join()

    def _run(self) -> None:
        closing = False
        while not closing:
            self._some.wait()
            self._hurry.wait(GATHER_SECONDS)
            # From here on, whoever appends an event wakes us again; so nothing is left behind.
            self._some.clear()
            closing = self._closing
            while self._events:
                group = [self._events.popleft() for _ in range(min(GROUP, len(self._events)))]
                self._write(group)
        self._write(())

    def _write(self, events: Sequence[Event]) -> None:
        for event in events:
            self._standing.read(event)
            self._anew = self._anew or event.kind == "reloaded"
        if not self._push() and (self._lost or len(self._pending) > KEEP_BYTES):
            self._lost += len(events)
            return
        if self._lost:
            self._pending += _encoded({"lost": self._lost})
            self._lost = 0
        self._pending += "".join([_line(event) for event in events]).encode()
        if self._push() and events and self._standing.is_still:
            if self._rotation and os.fstat(self._descriptor).st_size >= self._rotation.size:
                self._turn(self._rotation)
            if self._anew:
                self._begin(events[-1].at)

    def _turn(self, rotation: Rotation) -> None:
        """This one has become too large: begins a new file."""
        try:
            fresh = rotation.turn()
        except OSError as error:
            self._rotation = None
            self._complain_once(f"the event log cannot be set aside ({error.strerror}), so it grows on")
            return
        os.dup2(fresh, self._descriptor)  # whoever opened the first one closes it
        os.close(fresh)
        self._anew = True

    def _begin(self, now: float) -> None:
        """A run, with what is so at its beginning."""
        self._anew = False
        lines = "".join([_line(event) for event in self._standing.events(now)]).encode()
        self._pending += _encoded(self._header) + lines
        self._push()

    def _push(self) -> bool:
        """Writes what is pending; False if some of it could not be written."""
        try:
            while self._pending:
                del self._pending[: os.write(self._descriptor, self._pending)]
        except OSError as error:
            self._complain_once(f"the event log cannot be written ({error.strerror}); serving goes on")
            return False
        return True

    def _complain_once(self, text: str) -> None:
        if self._complain:
            self._complain(text)
            self._complain = None


def _line_end(descriptor: int) -> bytes:
    """What the half line needs that a killed program left."""
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            return b""  # also a pipe or a device
        with open(f"/proc/self/fd/{descriptor}", "rb") as file:
            file.seek(size - 1)
            return b"" if file.read(1) == b"\n" else b"\n"
    except OSError:
        return b""


def _encoded(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _line(event: Event) -> str:
    """Like ``json.dumps``, in a third of its time: a busy program shares its interpreter with us."""
    text = f'{{"at":{event.at!r},"kind":"{event.kind}","model":{quoted(event.model)}'
    if event.backend:
        text += f',"backend":{quoted(event.backend)}'
    if event.ticket:
        text += f',"ticket":{event.ticket}'
    if event.size:
        text += f',"size":{event.size}'
    if event.seconds:
        text += f',"seconds":{event.seconds!r}' if event.seconds < math.inf else ',"seconds":null'
    if event.reason:
        text += f',"reason":{quoted(event.reason)}'
    if event.target:
        text += f',"target":{quoted(event.target)}'
    if event.way:
        text += f',"way":{quoted(event.way)}'
    if event.bound < math.inf:
        text += f',"bound":{event.bound!r}'
    return text + "}\n"


# Reading


def read(path: str | os.PathLike[str], warn: Callable[[str], object] = log.warning) -> list[Run]:
    """The runs of a file, which may be compressed with gzip. BadLog names the line that cannot be read."""
    runs: list[Run] = []
    broken = ""  # the last line, if it could not be read: fine where a run ends
    for number, text in enumerate(_lines(path), 1):
        where = f"{os.fspath(path)}:{number}"
        entry = _parsed(text)
        if broken and not (entry and "anvil_mux" in entry):
            raise BadLog(broken)
        if broken:
            warn(f"{broken}; the program that wrote it was killed")
        broken = "" if entry is not None else f"{where}: is no line of an event log: {text[:60].rstrip()!r}"
        if entry is not None:
            _add(runs, entry, where, warn)
    if broken:
        warn(f"{broken}; is it still being written?")
    return runs


def _lines(path: str | os.PathLike[str]) -> Iterator[str]:
    try:
        yield from lines(path)
    except UNREADABLE as error:
        raise BadLog(f"{os.fspath(path)}: {getattr(error, 'strerror', None) or error}") from None


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _add(runs: list[Run], entry: dict[str, Any], where: str, warn: Callable[[str], object]) -> None:
    if "anvil_mux" in entry:
        if not isinstance(entry.get("began"), (int, float)) or not entry.get("backends"):
            raise BadLog(f"{where}: the header lacks `began` or `backends`")
        runs.append(Run(entry, []))
    elif not runs:
        raise BadLog(f"{where}: events before the first header; an event log begins with its run")
    elif "lost" in entry:
        warn(f"{where}: {entry['lost']} events are missing here, because the disk was full")
    else:
        runs[-1].events.append(_event(entry, where))


def _event(entry: dict[str, Any], where: str) -> Event:
    if "seconds" in entry and entry["seconds"] is None:
        entry["seconds"] = math.inf
    try:
        event = Event(**entry)
        sound = event.kind in KINDS and isinstance(
            event.at + event.seconds + event.size + event.bound, (int, float)
        )
    except TypeError as error:
        raise BadLog(f"{where}: is no event: {error}") from None
    if not sound:
        raise BadLog(f"{where}: unknown kind of event {event.kind!r}; known: {', '.join(KINDS)}")
    return event


# Learning


def replay(runs: Iterable[Run], name: str = "log") -> Workload:
    """The clients of a log and what loading cost them.

    Every request arrives when it arrived and takes as long as it took, also if the answer of another policy
    would have come at another time. One that was severed takes a moment longer than it lasted (the same
    policy severs it again), one that was never served as long as its model's usually do. Clients that left
    keep their patience. Deaths and unloading by hand are left out.
    """
    learned = _Learned()
    began, now = None, 0.0
    for run in runs:
        if run.events:
            first, last = run.events[0].at, run.events[-1].at
            began = began or run.header["began"] + first
            # Where somebody set the clock back a run follows the one before.
            now = max(now, run.header["began"] + first - began)
            learned.read(run, first - now)
            now += last - first
    if not learned.requests:
        raise BadLog("the event log holds no request")
    return learned.workload(name)


_Order = tuple[float, int, int]
"""When a request arrived, in which run, and its ticket: many may arrive at once."""


class _Learned:
    """A fold over the events of runs."""

    def __init__(self) -> None:
        self.requests: list[tuple[_Order, Request]] = []
        self._loads: defaultdict[str, list[float]] = defaultdict(list)
        """By model."""
        self._stops: list[float] = []
        self._resident: tuple[str, ...] | None = None
        # Of the run that is being read: the workload's moment 0, and what is under way.
        self._runs = 0
        self._origin = 0.0
        self._waiting: dict[int, Event] = {}
        self._leased: dict[int, Event] = {}
        self._leases: Counter[str] = Counter()
        self._stopping: dict[str, float] = {}

    def read(self, run: Run, origin: float) -> None:
        self._runs += 1
        self._origin = origin
        if self._resident is None:
            adopted = [event for event in run.events if event.reason == "adopted"]
            self._resident = tuple(dict.fromkeys(event.model for event in adopted))
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

    def _read_backend(self, event: Event) -> None:
        loads = self._loads[event.model]
        if event.kind == "ready" and not event.reason:
            loads.append(event.seconds)
        elif event.kind == "stopping":
            self._stopping[event.backend] = event.at
        elif event.kind in ("empty", "parked"):
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
            self._serve(event.ticket, event.at + (BEYOND_SECONDS if event.kind == "severed" else 0.0))

    def _lease(self, event: Event) -> None:
        self._waiting.pop(event.ticket, None)
        if event.size > self._leases[event.backend]:
            self._leases[event.backend] += 1
            self._leased[event.ticket] = event
        else:  # it only wanted the model loaded
            self._add(event, 0.0, leases=False)

    def _serve(self, ticket: int, now: float) -> None:
        lease = self._leased.pop(ticket, None)
        if lease:
            self._leases[lease.backend] -= 1
            self._add(lease, now - lease.at)

    def _refuse(self, event: Event, patience: float) -> None:
        self._waiting.pop(event.ticket, None)
        self._add(event, math.nan, patience)

    def _add(self, event: Event, seconds: float, patience: float = math.inf, leases: bool = True) -> None:
        """``seconds`` of service, nan where they are not known."""
        at = event.at - event.seconds - self._origin
        request = Request(at, event.model, seconds, patience, leases)
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
            tuple([_guessed(request, usual) for request in requests]),
            resident=self._resident or (),
            stop_seconds=median(self._stops or [0.0]),
        )


def _guessed(request: Request, usual: Mapping[str, float]) -> Request:
    if not math.isnan(request.seconds):
        return request
    return request._replace(seconds=usual.get(request.model, usual[""]))


def _medians(seconds: Mapping[str, Sequence[float]], default: float) -> dict[str, float]:
    """The median of each model, and under "" that of all: for models of which nothing is known."""
    every = [value for values in seconds.values() for value in values]
    known = {model: median(values) for model, values in seconds.items() if values}
    return {**known, "": median(every or [default])}
