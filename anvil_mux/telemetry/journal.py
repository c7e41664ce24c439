"""The journal of what happened, written in the background: one thread, one deque; and the feed of its latest
entries, for those who look on.

The multiplexer appends events under its lock and handlers append the records of finished requests. One thread
takes what has gathered, in the order in which it came, folds it into the metrics and writes it in few system
calls: events to standard error, requests to the access log. It has no wake-up while nothing happens.

Under load two threads that fight for the interpreter cost more than the work is worth, so the handler that
adds the ``GROUP``-th record counts and formats the group where it is. It never waits for that, since
``_folding`` is only tried, and never writes.

``flush`` returns when everything added before it is counted and written, ``close`` writes what is left.

The feed is for the status page, ``anvil-mux events`` and ``top``, and hooks: two rings, of events and of
requests that ended. Who looks on is no more than a place in each ring, so a slow one holds up nobody and
costs nothing: what left the ring before it came is counted as missed, and it is told so. The journal's thread
fills the rings, never a thread that holds the multiplexer's lock, and rings the bell after each batch;
watchers wait for it in threads of their own.
"""

from __future__ import annotations

import json
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

from anvil_mux.clock import Worker
from anvil_mux.config.config import Backend
from anvil_mux.config.keys import Key
from anvil_mux.errors import Overloaded, TooManyRequests, log_title
from anvil_mux.scheduler.events import Event, Severance, sentence, to_json
from anvil_mux.telemetry.accesslog import Output, Served, human_line, json_line, stamp
from anvil_mux.telemetry.metrics import Metrics

GATHER_SECONDS = 0.1
IDLE_SECONDS = 5.0
"""How long after the last entry housekeeping runs once more."""
FLUSH_SECONDS = 1.0
GROUP = 32
"""Records counted in one piece; smaller groups let fewer requests pass (docs/performance.md)."""
STDERR = 2

QUIET, NORMAL, VERBOSE = -1, 0, 1


class Journal:
    """The journal; ``access``: where lines of requests go, None for nowhere. ``form``: human or json."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        wall: Callable[[float], float],
        tail: Callable[[str], Sequence[str]] = lambda _: (),
        housekeeping: Callable[[], object] = lambda: None,
        access: int | None = STDERR,
        form: str = "human",
        verbosity: int = NORMAL,
    ) -> None:
        self._metrics = metrics
        self._wall = wall
        self.feed = Feed()
        self._tail = tail
        """Backend -> the last lines of its engine."""
        self._housekeeping = housekeeping
        """A function that is called after each batch and a while after the last one."""
        self._stderr = Output(STDERR)
        self._access = self._stderr if access == STDERR else None if access is None else Output(access)
        self._request_line = json_line if form == "json" else human_line
        self._event_text = _json_event if form == "json" else _human_event
        self._verbosity = verbosity
        self.tells_leases = verbosity >= VERBOSE
        """Whether it does anything with ``leased`` and ``released``."""
        self._entries: deque[Event | Served | Callable[[], object]] = deque()
        """Events, records, and what else is to be done after those that came before it."""
        # Guards the metrics, the lines below and the taking of entries.
        self._folding = threading.Lock()
        self._lines: list[str] = []  # of requests, not written yet
        self._worker = Worker("journal", self._turn, first=None, last=self._turn, gather=GATHER_SECONDS)
        self._worker.start()

    def add(self, record: Served) -> None:
        """Takes the record of a finished request, in the thread that served it."""
        self._entries.append(record)
        self._worker.wake()
        if len(self._entries) >= GROUP and self._folding.acquire(blocking=False):
            try:
                self._fold_records()
            finally:
                self._folding.release()

    def observe(self, event: Event) -> None:
        """Takes an event of the multiplexer, under its lock.

        What single requests go through is not counted, and told only to those who ask for it.
        """
        if event.kind not in _OF_REQUESTS or self.tells_leases:
            self._put(event)

    def note_phase(self, backend: Backend, phase: str, seconds: float) -> None:
        """Takes a phase of a swap, in the thread of the worker that performs it. See levels.ReportPhase."""
        self._put(partial(self._metrics.took, backend.model, phase, seconds))

    def note_read_ahead(self, backend: Backend, size: int, seconds: float) -> None:
        """Takes what was read of a backend's weights before its load."""
        self._put(partial(self._metrics.read_ahead, backend.model, size, seconds))

    def _put(self, entry: Event | Callable[[], object]) -> None:
        self._entries.append(entry)
        self._worker.wake()

    def flush(self) -> None:
        """Waits until what was added before is counted and written."""
        done = threading.Event()
        self._entries.append(done.set)
        self._worker.hurry()
        done.wait(FLUSH_SECONDS)

    def scrape(self, accept: str) -> tuple[str, bytes]:
        """The metrics with everything that was added before."""
        self.flush()
        with self._folding:
            return self._metrics.render(accept)

    def close(self) -> None:
        """Writes what is left."""
        self._worker.close()
        self._worker.join()

    def _turn(self) -> float | None:
        """Writes what has gathered; its thread's turn."""
        while self._entries or self._lines:
            self._take_some()
        self.feed.ring()
        self._housekeeping()
        return IDLE_SECONDS if self._worker.was_woken else None

    def _fold_records(self) -> None:
        """Counts and formats a group of records, up to the next event."""
        entries = self._entries
        for _ in range(GROUP):
            record = entries[0] if entries else None
            if not isinstance(record, Served):
                return
            entries.popleft()
            try:
                record.count()
                self._metrics.served(record)
                self.feed.ended(record)
                if self._access is not None:
                    self._lines.append(self._request_line(record))
            except Exception:
                # A mistake in one line must not end all of them.
                self._lines.append(f"journal: {record}\n{traceback.format_exc()}")

    def _take_some(self) -> None:
        """Writes a group of records, and sees to the entry that follows them."""
        with self._folding:
            self._fold_records()
            lines, self._lines = self._lines, []
            entry = self._entries[0] if self._entries else None
            if not entry or isinstance(entry, Served):
                entry = None
            else:
                self._entries.popleft()
        if lines:
            (self._access or self._stderr).write("".join(lines))
        if entry:
            with self._folding:
                self._count(entry)
        if isinstance(entry, Event):
            self._stderr.write(self._event_lines(entry))

    def _count(self, entry: Event | Callable[[], object]) -> None:
        try:
            if not isinstance(entry, Event):
                entry()
                return
            if entry.kind not in _OF_REQUESTS:
                self.feed.tell(entry)
            self._metrics.observe(entry)
        except Exception:
            self._lines.append(f"journal: {entry}\n{traceback.format_exc()}")

    def _event_lines(self, event: Event) -> str:
        """The text of an event. An engine's last lines may take a while, so nothing is held."""
        try:
            if _level(event) > self._verbosity:
                return ""
            tail = self._tail(event.backend) if _is_failure(event) else ()
            return self._event_text(event, self._wall(event.at), tail)
        except Exception:
            return f"journal: {event}\n{traceback.format_exc()}"


# The feed

EVENTS = 500
REQUESTS = 100
WATCHERS = 32
BY_HAND = ("/models/", "/api/show")
"""Paths of what names a model and asks it nothing."""


class FeedPosition(NamedTuple):
    """The position of a reader: the numbers of the last event and the last request."""

    event: int = 0
    request: int = 0


class News(NamedTuple):
    """The events and requests after a position."""

    events: list[Event]
    requests: list[Served]
    missed: int
    """Events that are in the ring no more."""
    place: FeedPosition


class Feed:
    """The last events and requests. Any thread, but only one at a time may ``tell`` and ``ended``."""

    def __init__(self) -> None:
        # Whoever tells only appends, and whoever reads only copies: both are atomic, so neither takes a lock.
        self._events: deque[tuple[int, Event]] = deque(maxlen=EVENTS)
        self._requests: deque[tuple[int, Served]] = deque(maxlen=REQUESTS)
        self._numbers = count(1)
        self._request_numbers = count(1)
        # Guards what stands below it; held for microseconds.
        self._bell = threading.Condition(threading.Lock())
        self._watchers: Counter[Key | None] = Counter()
        """How many watch with each key."""
        self.closed = False

    def tell(self, event: Event) -> None:
        self._events.append((next(self._numbers), event))

    def ended(self, record: Served) -> None:
        """Takes the record of a request; those that no model was to answer are no news."""
        if record.model and not record.path.startswith(BY_HAND):
            self._requests.append((next(self._request_numbers), record))

    def ring(self) -> None:
        """Wakes those who wait for news, if there are any."""
        with self._bell:
            self._bell.notify_all()

    def close(self) -> None:
        """The program ends: nobody waits any more."""
        with self._bell:
            self.closed = True
            self._bell.notify_all()

    @contextmanager
    def watching(self, key: Key | None = None, *, shares: bool = False) -> Iterator[None]:
        """Counts a watcher, each of which holds a thread; Overloaded if there are too many.

        ``shares``: there are other keys than ``key``, which leaves half of the places to them
        (TooManyRequests).
        """
        with self._bell:
            if self._watchers.total() >= WATCHERS:
                text = f"overloaded: {WATCHERS} viewers are connected already (open pages count)"
                raise Overloaded(f"{text}. Try again.")
            if shares and self._watchers[key] >= (most := max(WATCHERS // 2, 1)):
                raise TooManyRequests(f"This API key has {most} viewers already, as many as it may.")
            self._watchers[key] += 1
        try:
            yield
        finally:
            with self._bell:
                self._watchers[key] -= 1
                self._watchers += Counter()  # without those that have none

    def news(self, after: FeedPosition, seconds: float | None = 0.0) -> News:
        """Return the news after ``after``; wait for some for at most ``seconds`` (None: for ever)."""
        if seconds != 0.0:
            with self._bell:
                self._bell.wait_for(lambda: self.closed or self._is_news(after), seconds)
        events, last_event = _after(self._events, after.event)
        requests, last_request = _after(self._requests, after.request)
        return News(
            events, requests, last_event - after.event - len(events), FeedPosition(last_event, last_request)
        )

    def _is_news(self, after: FeedPosition) -> bool:
        return _last(self._events) > after.event or _last(self._requests) > after.request

    def pause(self, seconds: float) -> None:
        """Waits, but for no longer than the program lives."""
        with self._bell:
            self._bell.wait_for(lambda: self.closed, seconds)


_T = TypeVar("_T")


def _last(ring: deque[tuple[int, _T]]) -> int:
    return ring[-1][0] if ring else 0


def _after(ring: deque[tuple[int, _T]], place: int) -> tuple[list[_T], int]:
    """The items of a ring after a position, and the number of the last."""
    entries = [(number, entry) for number, entry in ring.copy() if number > place]
    return [entry for _, entry in entries], entries[-1][0] if entries else place


# Events in words

_OF_REQUESTS = frozenset(("queued", "leased", "released"))
_FOR_VERBOSE = _OF_REQUESTS | {"gone", "failed", "severed"}


def _is_failure(event: Event) -> bool:
    """Whether a backend failed to load, died or could not be stopped."""
    return event.kind == "stuck" or (event.kind == "stopped" and event.cause is not None)


def _level(event: Event) -> int:
    """How much must be asked for to be told; what single requests go through is for -v."""
    if _is_failure(event) or event.kind in ("reload_failed", "plugin_failed", "host_lost"):
        return QUIET
    return VERBOSE if event.kind in _FOR_VERBOSE else NORMAL


def _figures(event: Event) -> dict[str, Any]:
    """The fields of an event but its moment and kind, as JSON has them; ``reason``: its cause in words."""
    return {
        "model": event.model,
        "backend": event.backend,
        "ticket": event.ticket,
        "size": event.size,
        "seconds": round(event.seconds, 3) if event.seconds < float("inf") else None,
        "cause": to_json(event.cause) if event.cause else None,
        "reason": sentence(event.cause),
        "target": event.target,
        "way": event.way,
        "bound": round(event.bound, 3) if event.bound < float("inf") else None,
        "load": round(event.load, 3),
    }


def _json_event(event: Event, moment: float, tail: Sequence[str]) -> str:
    level = "error" if _is_failure(event) else "info"
    figures = {"service" if name == "backend" else name: each for name, each in _figures(event).items()}
    line = {"ts": stamp(moment), "level": level, "event": event.kind, **figures, "engine_log": list(tail)}
    return json.dumps({key: value for key, value in line.items() if value not in ("", 0, [], None)}) + "\n"


def event_as_json(event: Event, at: float) -> dict[str, Any]:
    """An event for those who look on; ``at``: its Unix time. They are told of no single requests."""
    figures = {
        name: each for name, each in _figures(event).items() if name not in ("ticket", "bound", "load")
    }
    return {"at": at, "kind": event.kind, **figures, "text": story(event)}


def _human_event(event: Event, moment: float, tail: Sequence[str]) -> str:
    service = f" ({event.backend})" if event.backend not in ("", event.model) else ""
    lines = [f"{stamp(moment)} {event.model or 'anvil-mux'}{service}: {story(event)}\n"]
    lines += [f"  {title}\n" for title in log_title(tail)]
    lines += [f"  | {line}\n" for line in tail]
    return "".join(lines)


def story(event: Event) -> str:
    """One event in a few words."""
    size, seconds, cause, reason = event.size, event.seconds, event.cause, sentence(event.cause)
    match event.kind:
        case "ready":
            return reason or f"ready after {seconds:.1f} s"
        case "draining":
            most = f"up to {seconds:g} s" if seconds < float("inf") else "as long as it takes"
            busy = f"; waits {most} for {requests(size)}" if size else ""
            goal = f" for {event.target}" if event.target else ""
            return f"draining{goal} ({reason}){busy}"
        case "evicting":
            cut = f", {requests(size)} severed after {seconds:.1f} s" if size else ""
            return f"evicting{cut}" + (f": {reason}" if cause and cause.kind == "standby_full" else "")
        case "stopped":
            return reason or "stopped"
        case "standby":
            stays = cause is not None and cause.kind == "evict_failed"
            return f"standby ({event.way})" + (f", and could not be stopped: {reason}" if stays else "")
        case "demoting":
            return f"{_deeper(event.way)}: {reason}"
        case "deferred":
            until = f" for up to {seconds:.1f} s" if 0.1 <= seconds < float("inf") else ""
            return f"its swap is held back{until}: {reason}"
        case "severed" if cause:
            return f"severed #{event.ticket}: {Severance(cause, seconds).sentence(event.model)}"
        case kind if kind in _PLAIN:
            is_unfit = kind == "stuck" and cause and cause.kind == "unfit"
            text = "{reason}: it is stopped" if is_unfit else _PLAIN[kind]
            return text.format(reason=reason, lasts=_lasts(seconds))
        case kind:
            took = f" after {seconds:.3f} s" if seconds else ""
            return f"{kind} #{event.ticket}{took} {reason}".rstrip()


_PLAIN = {
    "loading": "loading ({reason})",
    "cancelling": "its load is cancelled: {reason}",
    "stuck": "could not be stopped and may still hold its GPUs, tried again later: {reason}",
    "pinned": "pinned: not evicted for other models once it is loaded",
    "unpinned": "unpinned: may be evicted for other models again",
    "reloaded": "configuration reloaded: {reason}",
    "reload_failed": "configuration refused, nothing has changed: {reason}",
    "plugin_failed": "{reason}",
    "host_lost": "{reason}: its requests are severed, and nothing is loaded there",
    "host_back": "{reason}",
    "host_drained": "{reason}: its models are drained and stopped, and none is loaded there",
    "host_undrained": "{reason}",
    "paused": "paused {lasts}: all models are drained and stopped, and none is loaded",
    "resumed": "resumed: {reason}",
    "host_away": "{reason}: requests go on, but nothing else is loaded or evicted there",
    "host_heard": "{reason}",
}


def _lasts(seconds: float) -> str:
    return f"for {seconds:.0f} s" if seconds < float("inf") else "until it is resumed"


def _deeper(way: str) -> str:
    return "stopped from standby" if way == "stop" else f"demoted to {way}" if way else "demoted"


def requests(count: int) -> str:
    return f"{count} request" + ("" if count == 1 else "s")
