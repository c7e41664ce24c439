"""Every event, on disk and back: ``anvil-mux serve --event-log FILE``.

A file holds runs, one for each time that the program was started on it. A run is its head, a line of the kind
``snapshot`` with what is needed to read it without the compose file and without earlier files, then one line
of JSON for each event, in the order in which they happened. What is empty is left out of a line; ``seconds``
null is forever. ``{"lost": N}`` stands where N events could not be written.

The multiplexer appends events under its lock, so ``EventLog.append`` only puts them in a deque; a thread of
its own writes them a moment later. While a disk is full some are kept in memory, then they are counted;
serving goes on. A file is only ever appended to: a program that was killed leaves at most half a line at the
end of its run, which readers pass over.

A file that has become too large is set aside as FILE.1, FILE.1 as FILE.2 and so on, and a new one begun. Each
can be read without the others: the ``state`` in the head of a new one is the situation at its beginning, to
which the log has led: backends, queues and leases, as data. Whoever reads a log starts from there. So it is
where a run begins within a file after a reload, with another configuration; ``began`` is that of the run
before, since it is the same program.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import Field, dataclass, field, fields
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, NamedTuple, TextIO

from anvil_mux import __version__
from anvil_mux.clock import Worker
from anvil_mux.config.config import INHERITED, SERVICE_SETTINGS, SETTINGS, Backend, Config, inherited
from anvil_mux.config.kinds import ENDLESS, SECONDS_OR_NONE, fields_of
from anvil_mux.config.machines import Gpu, Wake
from anvil_mux.errors import MuxError
from anvil_mux.protocol import foreign
from anvil_mux.scheduler.events import DEATHS, FOUND, KINDS, Cause, Event, parse, to_json
from anvil_mux.scheduler.slot import LOADING, SOON_SECONDS, STATES, cool_down
from anvil_mux.state import MOST, once, open_regular
from anvil_mux.telemetry.accesslog import PATIENCE_SECONDS, write_some

log = logging.getLogger(__name__)

GATHER_SECONDS = 0.1
GROUP = 256
"""Events written in one system call."""
KEEP_BYTES = 1 << 20
"""Bytes that are kept in memory while they cannot be written."""
SIZE = 128 << 20
"""Bytes after which a new file is begun, unless the user says another number."""
KEPT = 3
"""Files that were set aside and are kept."""
HEAD = "snapshot"
"""The kind of the line with which a run begins."""


class BadLog(MuxError):
    """A file that is no event log, or not a whole one."""


class LoggedRun(NamedTuple):
    """The log of one program between its start and its end."""

    header: Mapping[str, Any]
    events: list[Event]

    @property
    def begins(self) -> Mapping[str, Any]:
        """The situation in which it begins, as JSON; {} where it begins with the program."""
        state: Mapping[str, Any] = self.header.get("state", {})
        return state


# The header

_OF_CONFIG = [
    name for name in fields_of(SETTINGS, lambda setting: setting.logged) if name not in ("gpus", "wakes")
]
_OF_BACKEND = ("name", *fields_of(SERVICE_SETTINGS, lambda setting: setting.logged))
"""Not the service, whose environment may hold keys."""
_MAYBE_ENDLESS = fields_of(SERVICE_SETTINGS, lambda setting: setting.kind is SECONDS_OR_NONE)
_OF_GPU = tuple([field.name for field in fields(Gpu)])


def header(config: Config, began: float) -> dict[str, Any]:
    """The first line of a run; ``began``: the Unix time of moment 0, to which the events' moments are to be
    added.
    """
    gpus = [_changed(gpu, _OF_GPU) for gpu in config.gpus]
    backends = [_changed(backend, _OF_BACKEND) for backend in config.backends]
    settings = {key: getattr(config, key) for key in _OF_CONFIG}
    run = {"kind": HEAD, "anvil_mux": __version__, "began": began}
    wakes = {host: wake.timeout for host, wake in config.wakes.items()}  # a command may hold keys
    return {**run, **settings, "wakes": wakes, "gpus": gpus, "backends": backends}


def _changed(thing: Backend | Gpu, among: Sequence[str]) -> dict[str, Any]:
    """The fields of a dataclass, among some, that do not have their defaults; JSON knows no infinity."""
    names = [each.name for each in fields(thing) if each.name in among and _is_its_own(thing, each)]
    values = {name: getattr(thing, name) for name in names}
    return {name: ENDLESS if value == math.inf else value for name, value in values.items()}


def _is_its_own(thing: Backend | Gpu, field: Field[Any]) -> bool:
    """Whether a field is to be told; what a backend inherits is in the header, but for ``preload``."""
    if isinstance(thing, Backend) and field.name in INHERITED and field.name != "preload":
        return thing.has_own(field.name)
    return bool(getattr(thing, field.name) != field.default)


def config_of(header: Mapping[str, Any]) -> Config:
    """The configuration of the program that wrote the header, as far as events depend on it.

    ValueError or TypeError: the header says no such thing.
    """
    backends, gpus = (foreign.of(list[object], header.get(key, [])) for key in ("backends", "gpus"))
    wakes = foreign.of(dict[str, float], header.get("wakes", {}))
    return Config(
        backends=tuple([_from_fields(Backend, _OF_BACKEND, about) for about in backends]),
        gpus=tuple([_from_fields(Gpu, _OF_GPU, about) for about in gpus]),
        wakes={host: Wake(timeout=seconds) for host, seconds in wakes.items()},
        **foreign.some_of(Config, {key: header[key] for key in _OF_CONFIG if key in header}),
    )


def _from_fields(kind: type, among: Container[str], about: object) -> Any:
    given = {key: value for key, value in foreign.of(dict[str, object], about).items() if key in among}
    given |= {key: math.inf for key in _MAYBE_ENDLESS if given.get(key) == ENDLESS}
    own = {"inherits": inherited(given)} if kind is Backend else {}
    return kind(**foreign.some_of(kind, given), **own)


# The situation

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
    """The situation after some events, which it folds; the checker of logs judges each event by it.

    ``slack``: by how many seconds less than ``SOON_SECONDS`` a death after a load is soon.
    """

    def __init__(self, slack: float = 0.0) -> None:
        self.at = 0.0
        self.backends: dict[str, BackendRecord] = {}
        self.queues: dict[str, QueueRecord] = {}
        self.begun: set[str] = set()
        """Models whose swap has evicted a backend, until their load begins or their queue is empty."""
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

    def holds(self, backend: str) -> bool:
        """Whether a backend is anything but stopped."""
        return backend in self.backends and self.backends[backend].state != "stopped"

    def forget(self, backend: str) -> None:
        """Forget a backend that holds nothing: the next of its name is another, and has failed at nothing."""
        self.backends.pop(backend, None)

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
        if event.model in self.begun and not queue.tickets and not self._is_resident(event.model):
            self.begun.discard(event.model)
        if event.kind == "leased":
            leases = self.backend(event.backend, event.model).leases
            if event.size > len(leases):  # else it only wanted the model loaded
                leases[event.ticket] = event.at

    def _is_resident(self, model: str) -> bool:
        """Return whether a backend of a model is ready: a swap to it is for another replica then."""
        return any(each.model == model and each.state == "ready" for each in self.backends.values())

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
        backend.model = event.model  # a reload may have given it another
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
        backends = {
            name: _described(each)
            for name, each in self.backends.items()
            if each.state != "stopped" or each.failed_starts or each.crashes
        }
        queues = {model: _described(queue) for model, queue in self.queues.items()}
        return {
            "at": self.at,
            "backends": backends,
            "queues": {model: queue for model, queue in queues.items() if queue},
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
            made.backends = {
                name: BackendRecord(**foreign.some_of(BackendRecord, _restored(each)))
                for name, each in state["backends"].items()
            }
            made.queues = {
                model: QueueRecord(**foreign.some_of(QueueRecord, _restored(each)))
                for model, each in state["queues"].items()
            }
            made.begun = {*foreign.of(list[str], state["begun"])}
            made.pins = foreign.of(dict[str, bool], state["pins"])
            made.is_paused = bool(state.get("paused"))  # logs of old know of no pause
        return made


def _described(each: BackendRecord | QueueRecord) -> dict[str, Any]:
    """The fields that do not have their defaults; what is infinite has."""
    values = {f.name: (getattr(each, f.name), f.default) for f in fields(each)}
    return {name: value for name, (value, default) in values.items() if value not in (default, {})}


def _restored(state: Mapping[str, Any]) -> dict[str, Any]:
    """Objects of JSON have no numbers for keys, and tickets are numbers."""
    return {
        key: {int(ticket): about for ticket, about in value.items()} if isinstance(value, dict) else value
        for key, value in state.items()
    }


# Writing


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
        self._next: tuple[Mapping[str, Any], Iterable[str]] = (header, ())
        """The header of runs after the next reload, and the backends that it ends."""
        self._leaving: set[str] = set()
        """The backends that are not as the header describes them, and have not stopped yet."""
        self._rotation = rotation
        self._situation = Situation()
        self._reloaded = math.inf
        """When the last reload was, after which no run has begun yet."""
        self._complain = once(complain)
        self._events: deque[Event] = deque()
        self._pending = bytearray(_line_end(descriptor) + _encoded(header))
        self._lost = 0
        self._patience = PATIENCE_SECONDS
        self._push()
        # From here on what is pending and what is lost belong to the thread.
        self._worker = Worker("event-log", self._take, last=self._end, gather=GATHER_SECONDS)
        self._worker.start()

    def append(self, event: Event) -> None:
        """Takes an event of the multiplexer, under its lock."""
        self._events.append(event)
        self._worker.wake()

    def head(self, header: Mapping[str, Any], leaving: Iterable[str] = ()) -> None:
        """Set the header with which runs begin from the next reload on; ``leaving``: who ends with that."""
        self._next = {**header, "began": self._header["began"]}, leaving

    def close(self) -> None:
        """Writes what is left."""
        self._worker.close()
        self._worker.join()

    def _take(self) -> None:
        while self._events:
            self._write(self._group())

    def _end(self) -> None:
        self._take()
        self._write(())

    def _group(self) -> list[Event]:
        """The events that are written at once, up to where a run is to begin."""
        group: list[Event] = []
        while self._events and len(group) < GROUP:
            event = self._events.popleft()
            group.append(event)
            self._situation.read(event)
            if event.kind == "reloaded":
                self._reloaded = event.at
                self._header, leaving = self._next
                self._leaving |= {name for name in leaving if self._situation.holds(name)}
                for name in {*leaving} - self._leaving:
                    self._situation.forget(name)
            elif event.kind == "stopped" and event.backend in self._leaving:
                self._leaving.discard(event.backend)
                self._situation.forget(event.backend)
            if event.kind != "reloaded" and self._is_anew:
                break
        return group

    @property
    def _is_anew(self) -> bool:
        """Whether, after a reload, all that is not as the new configuration has it has left."""
        if self._leaving or self._reloaded >= self._situation.at:
            return False
        return self._situation.is_about({backend["name"] for backend in self._header["backends"]})

    def _write(self, events: Sequence[Event]) -> None:
        if not self._push() and (self._lost or len(self._pending) > KEEP_BYTES):
            self._lost += len(events)
            return
        if self._lost:
            self._pending += _encoded({"lost": self._lost})
            self._lost = 0
        self._pending += "".join([_line(event) for event in events]).encode()
        if self._push() and events and (self._is_anew or self._turn()):
            self._begin()

    def _turn(self) -> bool:
        """Begins a new file if this one has become too large."""
        if self._rotation is None or self._reloaded < math.inf:
            return False
        if os.fstat(self._descriptor).st_size < self._rotation.size:
            return False
        try:
            fresh = self._rotation.turn()
        except OSError as error:
            self._rotation = None
            self._complain(f"the event log cannot be set aside ({error.strerror}), so it keeps growing")
            return False
        os.dup2(fresh, self._descriptor)  # whoever opened the first one closes it
        os.close(fresh)
        return True

    def _begin(self) -> None:
        """A run in the situation of the moment."""
        self._reloaded = math.inf
        self._pending += _encoded({**self._header, "state": self._situation.to_json()})
        self._push()

    def _push(self) -> bool:
        """Writes what is pending; False if some of it could not be written."""
        if not self._pending:
            return True
        try:
            while self._pending and (sent := write_some(self._descriptor, self._pending, self._patience)):
                del self._pending[:sent]
            why = "nobody reads it"
        except OSError as error:
            why = error.strerror or str(error)
        self._patience = 0.0 if self._pending else PATIENCE_SECONDS
        if self._pending:
            self._complain(f"the event log cannot be written ({why}); serving goes on")
        return not self._pending


def _line_end(descriptor: int) -> bytes:
    """The line end that the half line of a killed program needs."""
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


_ENCODER = json.JSONEncoder(separators=(",", ":"))


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
    if event.cause:
        text += f',"cause":{_ENCODER.encode(to_json(event.cause))}'
    if event.target:
        text += f',"target":{quoted(event.target)}'
    if event.way:
        text += f',"way":{quoted(event.way)}'
    if event.bound < math.inf:
        text += f',"bound":{event.bound!r}'
    if event.load:
        text += f',"load":{event.load!r}'
    return text + "}\n"


# Reading


UNREADABLE = (OSError, EOFError, zlib.error)
"""The errors that ``lines`` may raise."""
_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"
"""The first bytes of compressed files."""


def lines(path: str | os.PathLike[str]) -> Iterator[str]:
    """The lines of a text file, which may be compressed with gzip or xz."""
    with os.fdopen(open_regular(path), "rb") as file:
        begins = file.read(len(_XZ))
    if begins == _XZ:
        yield from _xz_lines(path)
        return
    opener: Callable[..., Any] = gzip.open if begins.startswith(_GZIP) else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as text:
        yield from _bounded(text)


def _bounded(text: TextIO) -> Iterator[str]:
    while line := text.readline(MOST + 1):
        if len(line) > MOST:
            raise OSError(f"has more than {MOST >> 20} MiB in one line")
        yield line


def _xz_lines(path: str | os.PathLike[str]) -> Iterator[str]:
    try:
        import lzma
    except ImportError:  # A Python built by hand may lack it, and serves without.
        raise OSError("is compressed with xz, and this Python was built without liblzma") from None
    try:
        with lzma.open(path, "rt", encoding="utf-8", errors="replace") as text:
            yield from _bounded(text)
    except lzma.LZMAError as error:
        raise OSError(str(error)) from None


def read(path: str | os.PathLike[str], warn: Callable[[str], object] = log.warning) -> list[LoggedRun]:
    """The runs of a file, which may be compressed like that. BadLog names the line that cannot be read."""
    runs: list[LoggedRun] = []
    broken = ""  # the last line, if it could not be read: fine where a run ends
    for number, text in enumerate(_lines(path), 1):
        where = f"{os.fspath(path)}:{number}"
        entry = _parsed(text)
        if broken and not (entry and entry.get("kind") == HEAD):
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


def _add(runs: list[LoggedRun], entry: dict[str, Any], where: str, warn: Callable[[str], object]) -> None:
    if entry.get("kind") == HEAD:
        runs.append(_begun(entry, where))
    elif not runs:
        raise BadLog(f"{where}: events before the first {HEAD}; an event log begins with one")
    elif "lost" in entry:
        warn(f"{where}: {entry['lost']} events are missing here, because the disk was full")
    else:
        runs[-1].events.append(_event(entry, where))


def _begun(head: dict[str, Any], where: str) -> LoggedRun:
    run = LoggedRun(head, [])
    if not isinstance(head.get("began"), (int, float)) or not head.get("backends"):
        raise BadLog(f"{where}: the {HEAD} lacks `began` or `backends`")
    try:
        foreign.of(float, head["began"])
        config_of(head)
    except (TypeError, ValueError) as error:
        raise BadLog(f"{where}: the {HEAD} says no configuration: {error}") from None
    try:
        Situation.parse(foreign.of(dict[str, object], run.begins))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise BadLog(f"{where}: the `state` of the {HEAD} is none: {error!r}") from None
    return run


def whole(runs: Iterable[LoggedRun]) -> list[LoggedRun]:
    """The runs with those joined that one program wrote under several configurations."""
    joined: list[LoggedRun] = []
    for run in runs:
        if joined and run.begins and run.header["began"] == joined[-1].header["began"]:
            joined[-1] = LoggedRun(joined[-1].header, [*joined[-1].events, *run.events])
        else:
            joined.append(run)
    return joined


def _event(entry: dict[str, Any], where: str) -> Event:
    if "seconds" in entry and entry["seconds"] is None:
        entry["seconds"] = math.inf
    try:
        cause = entry.pop("cause", None)
        event = Event(**foreign.some_of(Event, entry), cause=None if cause is None else _cause(cause))
        if not math.isfinite(event.at):
            raise ValueError(f"at: this is no moment: {event.at}")
    except (TypeError, ValueError) as error:
        raise BadLog(f"{where}: is no event: {error}") from None
    if event.kind not in KINDS:
        raise BadLog(f"{where}: unknown kind of event {event.kind!r}; known: {', '.join(KINDS)}")
    return event


def _cause(written: object) -> Cause:
    about = foreign.of(dict[str, object], written)
    residents = foreign.of(list[str], about.pop("residents", []))
    return parse({**foreign.some_of(Cause, about), "residents": residents})
