"""The facts of engines, hosts and people that are more than a fact of the scheduler, and doubts of engines.

What is one of the scheduler's own facts, as that a host cannot be steered, its caller gives to
``SchedulerDriver.tell``. These here may be late: nothing has happened to a backend that was loaded anew
since. Any thread. A request that got no whole answer raises a doubt of its engine, which ends with a fact
(``Doubts``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from anvil_mux.clock import Latch
from anvil_mux.config.config import Backend, Config
from anvil_mux.host.hosts import AnyHost
from anvil_mux.host.seam import Evicted
from anvil_mux.multiplexer.driver import EngineRun, SchedulerDriver, address_of
from anvil_mux.routing.in_flight import Report
from anvil_mux.scheduler.events import Cause, Event
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.slot import NOTHING, RUNS, Crash, Effects, FoundBackend, Ticket

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


class Facts:
    """The facts that come from outside, requests and steps apart, and that concern the driver as well.

    ``has_heard(address, since)``: whether an engine has sent anybody a part of an answer since that moment.
    """

    def __init__(
        self, driver: SchedulerDriver, host: AnyHost, has_heard: Callable[[tuple[str, int], float], bool]
    ) -> None:
        self._driver = driver
        self._scheduler = driver.scheduler
        self._apply, self._tell = driver.apply, driver.tell
        self._has_heard = has_heard
        self.doubts = Doubts(driver, host, self)

    # From engines

    def died(
        self,
        backend: str,
        why: str,
        log: Iterable[str] = (),
        *,
        loaded: float | None = None,
        load: int | None = None,
    ) -> None:
        """The backend's service ended, and nobody here told it to.

        ``log``: what it had printed last. Nothing has happened if it was loaded anew since the moment
        ``loaded``, or by another load than the one of the number ``load``.
        """

        def fact(now: float) -> Effects:
            slot = self._scheduler.layout.slot(backend)
            if slot is None or (loaded is not None and slot.loaded != loaded):
                return NOTHING
            if load is not None and load != self._driver.loads.get(backend, 0):
                return NOTHING
            return self._scheduler.died(backend, now, why, log)

        self._apply(fact)
        self.doubts.settle(backend)

    def unanswering(self, backend: str, *, loaded: float) -> None:
        """The engine answers nobody; nothing follows if it was loaded anew since ``loaded``."""

        def fact(now: float) -> Effects:
            slot = self._scheduler.layout.slot(backend)
            is_same = slot is not None and slot.loaded == loaded
            return self._scheduler.unanswering(backend, now) if is_same else NOTHING

        self._apply(fact)

    def is_heard(self, backend: str, since: float) -> bool:
        """Whether any request got a part of an answer from the backend since a moment."""
        with self._driver.lock:
            slot = self._scheduler.layout.slot(backend)
            answered = slot.answered if slot else -FOREVER
            run = self._driver.runs.get(backend)
        return answered > since or (run is not None and self._has_heard(run.address, since))

    # From hosts

    def host_lost(self, host: str) -> None:
        """Take a host as lost: its leases are cut, and nothing is begun there until it is back."""
        self._tell(self._scheduler.host_lost, host)
        self.doubts.settle_lost()

    def host_back(
        self, host: str, running: Mapping[str, str], standby: Mapping[str, Evicted] | None = None
    ) -> None:
        """A lost host is heard of again: these backends run there (name -> URL), or are in standby."""
        found = dict.fromkeys(running, RUNS) | {name: _found(left) for name, left in (standby or {}).items()}

        def fact(now: float) -> Effects:
            self._driver.runs |= {name: EngineRun(address_of(url)) for name, url in running.items()}
            return self._scheduler.host_back(host, now, found)

        self._apply(fact)

    def paused(self, seconds: float | None) -> None:
        """Have all go that is loaded, and load nothing, for so long (None: until ``resumed`` is said)."""
        lasts = FOREVER if seconds is None else seconds
        self._apply(lambda now: self._scheduler.paused(now, now + lasts))

    def resumed(self) -> bool:
        """End a pause; False if there is none."""
        return self._tell(self._scheduler.resumed) is not NOTHING

    def expect(self, backends: Iterable[str]) -> None:
        """Begin nothing beside backends that may run already until each was adopted or ``looked_at``."""
        self._apply(lambda now: self._scheduler.expected(backends))

    def looked_at(self, backends: Iterable[str]) -> None:
        """Say that it is known whether backends ran; what was not adopted holds nothing (any more)."""
        for name in backends:
            self._tell(self._scheduler.looked_at, name)

    def adopt(self, running: Mapping[str, str], standby: Mapping[str, Evicted] | None = None) -> list[str]:
        """Takes over backends that run already (name -> URL), or are in standby; returns what cannot stay."""
        refused = [name for name, url in running.items() if not self._adopt(name, RUNS, url)]
        return refused + [
            name for name, left in (standby or {}).items() if not self._adopt(name, _found(left))
        ]

    def _adopt(self, name: str, found: FoundBackend, url: str = "") -> bool:
        def fact(now: float) -> Effects:
            slot = self._scheduler.layout.slot(name)
            if slot is None or slot.state != "stopped":
                return Effects()
            self._driver.loads.pop(name, None)
            if url:
                self._driver.runs[name] = EngineRun(address_of(url))
            return self._scheduler.adopted(name, now, found)

        return self._apply(fact) is not NOTHING

    # From people, and from other anvil-mux

    def reconfigure(
        self, config: Config, running: Mapping[str, str], standby: Mapping[str, Evicted] | None = None
    ) -> list[str]:
        """Apply another configuration while requests run on; the rest is as with ``adopt``."""
        found = [*running, *(standby or {})]
        self._driver.reconfigure(config, found)
        refused = self.adopt(running, standby)
        self.looked_at(found)
        return refused

    def reload_failed(self, why: str) -> None:
        """Another configuration was refused, and nothing has changed."""
        with self._driver.lock:
            cause = Cause("bad_configuration", detail=why)
            self._driver.emit(Event(self._driver.clock.now(), "reload_failed", "", cause=cause))

    def unload(self, model: str, *, when_idle: bool = False) -> bool:
        """Evicts ``model`` after its drain, and stops one in standby; False if there is nothing to be done.

        A load under way is cancelled, and requests that wait for it fail. ``when_idle``: once nobody uses it,
        unless somebody asks for it before; True: that is now. Whoever has just read the last byte of an
        answer holds its lease for a moment longer.
        """
        return self._tell(self._scheduler.unload_asked, model, when_idle=when_idle) is not NOTHING

    def hear(self, reports: Mapping[str, Sequence[Report]]) -> None:
        """Take the reports of all other anvil-mux on the replicas that are shared with them."""
        for model in self._driver.served:
            self._tell(self._scheduler.heard, model, reports)


def _found(left: Evicted) -> FoundBackend:
    return FoundBackend(left.level, left.residual, left.host_bytes)


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
    """Whether the engine of a resident backend is still there, since a request got no whole answer from it.

    A thread of its own looks into each doubt and ends with it: the service has ended, or something was heard
    of it (it answers, or sent anybody a byte), or nothing was within a bound that no load can make it miss.
    Only then is it stopped. The request waits a moment for the first finding.
    """

    def __init__(self, driver: SchedulerDriver, host: AnyHost, facts: Facts) -> None:
        self._driver = driver
        self._host = host
        self._facts = facts
        self._clock = driver.clock
        self._slot = driver.scheduler.layout.slot
        """Finds the slot of a backend, under the lock."""
        # The driver's lock guards what follows.
        self._lock = driver.lock
        self._open: dict[str, _Doubt] = {}  # by backend
        self._closed = False

    def raised_by(self, ticket: Ticket) -> Crash | None:
        """A request got no whole answer: how its backend ended under it, if that becomes known in time.

        Nothing is doubted if its lease is over: then it speaks of a backend that was replaced since.
        """
        backend: Backend = ticket.granted.backend
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
                self.settle(backend.name, doubt)
        found.wait(LOST_SECONDS if backend.host else KNOWN_SECONDS)
        return ticket.crash

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
            self.settle(backend.name, doubt)

    def _is_found(self, backend: Backend, doubt: _Doubt) -> bool:
        """Asks once what has become of the backend, and does what follows from it; False: ask again."""
        name, limit = backend.name, self._driver.config.upstream_timeout
        if why := self._host.ended(backend):
            self._facts.died(name, why, self._host.log_tail(backend), loaded=doubt.loaded)
            return True
        left = doubt.since + limit - self._clock.now()
        try:
            answers = self._host.answers(backend, left) if left > 0 else None
        except OSError:  # it cannot be asked, which says nothing of it; the next request that fails asks anew
            return True
        if answers or self._facts.is_heard(name, doubt.since):
            return True
        if self._clock.now() - doubt.since < (REFUSED_SECONDS if answers is False else limit):
            return False
        self._facts.unanswering(name, loaded=doubt.loaded)
        return True

    def _is_open(self, name: str, doubt: _Doubt) -> bool:
        """Whether the doubt still is of the backend that is resident."""
        with self._lock:
            slot = self._slot(name)
            here = slot is not None and slot.loaded == doubt.loaded and slot.state in ("ready", "draining")
            return here and self._open.get(name) is doubt and not self._closed

    def settle(self, name: str, doubt: _Doubt | None = None) -> None:
        """Let requests go on that wait to learn what became of the backend: it is known, or asked no more."""
        with self._lock:
            if doubt is None or self._open.get(name) is doubt:
                doubt = self._open.pop(name, None)
            waiting = doubt.waiting if doubt else []
            if doubt:
                doubt.waiting = []
        for found in waiting:
            found.set()
