"""Whether the engine of a resident backend is still there, since a request got no whole answer from it.

A thread of its own looks into each doubt and ends with it: the service has ended, or something was heard of
it (it answers, or sent anybody a byte), or nothing was within a bound that no load can make it miss. Only
then is it stopped. The request waits a moment for the first finding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from anvil_mux.clock import Clock, Latch, Lock
from anvil_mux.config.config import Backend
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.steps import Crash, Ticket

KNOWN_SECONDS = 2.0
"""Seconds that a failed request waits to learn whether its engine has ended; Docker knows 0.1 s later."""
LOST_SECONDS = 10.0
"""The same on another host: so long it takes to learn that the host is lost, with all that it was doing."""
REFUSED_SECONDS = 30.0
"""After which an engine is stopped that runs, takes no connection and says nothing on those that it has.

Load does not make engines refuse: where more come than are accepted, they wait. One that is silent may be at
work, and is given as long as a request would be (``upstream_timeout``).
"""
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two looks at an engine in doubt."""


class Observer(Protocol):
    """The part of ``host.seam.Host`` that is asked here, without the lock."""

    def ended(self, backend: Backend) -> str | None: ...
    def answers(self, backend: Backend, limit: float) -> bool | None: ...
    def log_tail(self, backend: Backend) -> list[str]: ...


class Consequences(Protocol):
    """The facts that a doubt ends with, told without the lock; not of a backend loaded since ``loaded``."""

    def died(self, backend: str, why: str, log: list[str], *, loaded: float) -> None: ...
    def unanswering(self, backend: str, *, loaded: float) -> None: ...
    def is_heard(self, backend: str, since: float) -> bool: ...


class _Doubt:
    """One doubt, of one run of a backend."""

    __slots__ = ("loaded", "since", "waiting")

    def __init__(self, loaded: float, since: float) -> None:
        self.loaded = loaded
        """Tells the runs of the backend apart."""
        self.since = since
        self.waiting: list[Latch] = []
        """The latches of requests that wait for the first finding."""


class Doubts:
    """The doubts of one multiplexer; its ``lock`` guards them. ``slot`` is called with the lock held."""

    def __init__(
        self,
        *,
        clock: Clock,
        lock: Lock,
        slot: Callable[[str], Slot | None],
        observer: Observer,
        consequences: Consequences,
        limit: Callable[[], float],
    ) -> None:
        """``limit``: for so many seconds an engine may be silent before it is stopped."""
        self._clock = clock
        self._lock = lock
        self._slot = slot
        self._observer = observer
        self._outcome = consequences
        self._limit = limit
        self._open: dict[str, _Doubt] = {}  # by backend
        self._closed = False

    def raised_by(self, ticket: Ticket, backend: Backend) -> Crash | None:
        """A request got no whole answer: how its backend ended under it, if that becomes known in time.

        Nothing is doubted if the lease is over: then it speaks of a backend that was replaced since.
        """
        with self._lock:
            slot = self._slot(backend.name)
            if slot is None or ticket not in slot.holders:
                return ticket.crash
            doubt = self._open.get(backend.name)
            is_new = doubt is None or doubt.loaded != slot.loaded
            if doubt is None or is_new:
                doubt = self._open[backend.name] = _Doubt(slot.loaded, self._clock.now())
            found = self._clock.latch()
            doubt.waiting.append(found)
        if is_new:
            try:
                self._clock.spawn(partial(self._look_into, backend, doubt), f"doubt-{backend.name}")
            except RuntimeError:  # no thread can be started: the next request that fails has another try
                self._settle(backend.name, doubt)
        found.wait(LOST_SECONDS if backend.host else KNOWN_SECONDS)
        return ticket.crash

    def settle(self, name: str) -> None:
        """Let requests go on that wait to learn what became of the backend: it is known."""
        self._settle(name, None)

    def settle_lost(self) -> None:
        """The same of all backends on hosts that are lost: nothing more is heard of them."""
        with self._lock:
            lost = [name for name in self._open if (slot := self._slot(name)) and slot.host.is_lost]
        for name in lost:
            self.settle(name)

    def close(self) -> None:
        """Ends the threads before their next look. Under the lock."""
        self._closed = True

    def _look_into(self, backend: Backend, doubt: _Doubt) -> None:
        """The life of a doubt's thread."""
        pause = FIRST_PAUSE
        try:
            while self._is_open(backend.name, doubt) and not self._is_found(backend, doubt):
                self._clock.latch().wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self._settle(backend.name, doubt)

    def _is_found(self, backend: Backend, doubt: _Doubt) -> bool:
        """Asks once what has become of the backend, and does what follows from it; False: ask again."""
        name, limit = backend.name, self._limit()
        if why := self._observer.ended(backend):
            self._outcome.died(name, why, self._observer.log_tail(backend), loaded=doubt.loaded)
            return True
        left = doubt.since + limit - self._clock.now()
        try:
            answers = self._observer.answers(backend, left) if left > 0 else None
        except OSError:  # it cannot be asked, which says nothing of it; the next request that fails asks anew
            return True
        if answers or self._outcome.is_heard(name, doubt.since):
            return True
        if self._clock.now() - doubt.since < (REFUSED_SECONDS if answers is False else limit):
            return False
        self._outcome.unanswering(name, loaded=doubt.loaded)
        return True

    def _is_open(self, name: str, doubt: _Doubt) -> bool:
        """Whether the doubt still is of the backend that is resident."""
        with self._lock:
            slot = self._slot(name)
            here = slot is not None and slot.loaded == doubt.loaded and slot.state in ("ready", "draining")
            return here and self._open.get(name) is doubt and not self._closed

    def _settle(self, name: str, doubt: _Doubt | None) -> None:
        with self._lock:
            if doubt is None or self._open.get(name) is doubt:
                doubt = self._open.pop(name, None)
            waiting = doubt.waiting if doubt else []
            if doubt:
                doubt.waiting = []
        for found in waiting:
            found.set()
