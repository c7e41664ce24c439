"""What happened, written behind everybody's backs: one thread, one deque.

The multiplexer appends events under its lock and handlers append the records of finished requests; that is
all they do. One thread takes what has gathered, in the order in which it came, folds it into the metrics and
writes it in few system calls: events to standard error, requests to the access log. It has no wake-up while
nothing happens, and lets go of the interpreter between small groups so that no request waits for it.

``flush`` returns when everything added before it is counted and written, ``close`` writes what is left.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence

from anvil_mux.accesslog import Served, human_line, json_line, stamp
from anvil_mux.metrics import Metrics
from anvil_mux.residency import Event

GATHER_SECONDS = 0.1
IDLE_SECONDS = 5.0
"""How long after the last entry housekeeping runs once more."""
FLUSH_SECONDS = 1.0
GROUP = 32
STDERR = 2

QUIET, NORMAL, VERBOSE = -1, 0, 1


class Journal:
    """``access``: where lines of requests go, None for nowhere. ``form``: human or json."""

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
        self._tail = tail
        """Backend -> the last lines of its engine."""
        self._housekeeping = housekeeping
        """Called after each batch and a while after the last one."""
        self._access = access
        self._request_line = json_line if form == "json" else human_line
        self._event_text = _json_event if form == "json" else _human_event
        self._verbosity = verbosity
        self._entries: deque[Event | Served | threading.Event] = deque()
        self._some = threading.Event()
        self._hurry = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def add(self, entry: Event | Served) -> None:
        """Any thread, also under the multiplexer's lock; never blocks on output."""
        self._entries.append(entry)
        if not self._some.is_set():
            self._some.set()

    def observe(self, event: Event) -> None:
        """Takes an event of the multiplexer, under its lock.

        What single requests go through is not counted, and told only to those who ask for it: two entries for
        each request would be a tenth of what it costs.
        """
        if event.kind not in _OF_REQUESTS or self._verbosity >= VERBOSE:
            self.add(event)

    def flush(self) -> None:
        """Waits until what was added before is counted and written."""
        done = threading.Event()
        self._entries.append(done)
        self._hurry.set()
        self._some.set()
        done.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Writes what is left."""
        self._closing = True
        self._hurry.set()
        self._some.set()
        self._thread.join()

    def _run(self) -> None:
        idle: float | None = None
        closing = False
        while not closing:
            busy = self._some.wait(idle)
            if busy:
                self._hurry.wait(GATHER_SECONDS)
            # From here on, whoever adds an entry wakes us again; so nothing is left behind.
            self._some.clear()
            self._hurry.clear()
            closing = self._closing
            while self._entries:
                self._take_group()
                time.sleep(0)
            self._housekeeping()
            idle = IDLE_SECONDS if busy else None

    def _take_group(self) -> None:
        texts: dict[int, list[str]] = {}
        flushed = []
        for _ in range(min(GROUP, len(self._entries))):
            entry = self._entries.popleft()
            if isinstance(entry, threading.Event):
                flushed.append(entry)
                continue
            try:
                descriptor, text = self._take(entry)
            except Exception:
                # A mistake in one line must not end all of them.
                descriptor, text = STDERR, f"journal: {entry}\n{traceback.format_exc()}"
            if text:
                texts.setdefault(descriptor, []).append(text)
        for descriptor, lines in texts.items():
            _write(descriptor, "".join(lines))
        for done in flushed:
            done.set()

    def _take(self, entry: Event | Served) -> tuple[int, str]:
        """Counts an entry; returns what is to be written of it, and where."""
        if isinstance(entry, Served):
            self._metrics.served(entry)
            return (STDERR, "") if self._access is None else (self._access, self._request_line(entry))
        self._metrics.observe(entry)
        if _level(entry) > self._verbosity:
            return STDERR, ""
        tail = self._tail(entry.backend) if _is_failure(entry) else ()
        return STDERR, self._event_text(entry, self._wall(entry.at), tail)


def _write(descriptor: int, text: str) -> None:
    data = text.encode("utf-8", "replace")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        pass  # a full disk or a closed pipe must not end the service


_OF_REQUESTS = frozenset(("queued", "leased", "released", "gone", "failed"))
_NORMAL = frozenset(("starting", "ready", "draining", "stopping", "parked", "empty", "deferred"))


def _is_failure(event: Event) -> bool:
    """A backend failed to load, died or could not be stopped."""
    return event.kind == "stuck" or (event.kind == "empty" and bool(event.reason))


def _level(event: Event) -> int:
    """How much must be asked for to be told; what single requests go through is for -v."""
    if _is_failure(event):
        return QUIET
    return NORMAL if event.kind in _NORMAL else VERBOSE


def _json_event(event: Event, moment: float, tail: Sequence[str]) -> str:
    line = {
        "ts": stamp(moment),
        "level": "error" if _is_failure(event) else "info",
        "event": event.kind,
        "model": event.model,
        "service": event.backend,
        "ticket": event.ticket,
        "size": event.size,
        "seconds": round(event.seconds, 3) if event.seconds < float("inf") else None,
        "reason": event.reason,
        "target": event.target,
        "engine_log": list(tail),
    }
    return json.dumps({key: value for key, value in line.items() if value not in ("", 0, [], None)}) + "\n"


def _human_event(event: Event, moment: float, tail: Sequence[str]) -> str:
    lines = [f"{stamp(moment)} {event.model}: {_story(event)}\n"]
    if tail:
        lines.append("  Last lines of the engine's log:\n")
        lines += [f"  | {line}\n" for line in tail]
    return "".join(lines)


def _story(event: Event) -> str:
    """One event in a few words."""
    size, seconds, reason = event.size, event.seconds, event.reason
    match event.kind:
        case "starting":
            return f"loading ({reason})"
        case "ready" if reason:
            return _READY.get(reason, reason)
        case "ready":
            return f"ready after {seconds:.1f} s"
        case "draining":
            busy = f"; waits up to {seconds:g} s for {_requests(size)}" if size else ""
            goal = f" for {event.target}" if event.target else ""
            return f"leaves{goal} ({reason}){busy}"
        case "stopping":
            cut = f", {_requests(size)} severed after {seconds:.1f} s" if size else ""
            return f"stopping{cut}"
        case "empty" | "parked":
            return reason or ("parked" if event.kind == "parked" else "stopped")
        case "stuck":
            return f"may still hold its GPUs, and is told to stop again later: {reason}"
        case "deferred":
            until = f" for up to {seconds:.1f} s" if seconds < float("inf") else ""
            return f"its swap is put off{until}: {reason}"
        case kind:
            return f"{kind} #{event.ticket}" + (f" after {seconds:.3f} s" if seconds else "") + f" {reason}"


_READY = {
    "adopted": "runs already, taken over",
    "reprieved": "stays: nobody waits for its successor any more",
}


def _requests(count: int) -> str:
    return f"{count} request" + ("" if count == 1 else "s")
