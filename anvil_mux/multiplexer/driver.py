"""The driver of the scheduler: one lock, facts in, and what follows from them carried out.

Under the lock the scheduler is told a fact and returns ``Effects``, and what has to hold at once is noted:
who waits no longer, and when time is to have passed. Outside of it the rest is carried out: threads of
requests that ended waiting are woken by a latch of their own, leases are cut, and then steps are performed
(stop a container, start one, wait until it answers: minutes, if need be), each in a thread of its own that
reports how it ended, exactly once.

All of these threads are begun by one, ``scheduler``, which waits for steps and also says when time has
passed. It was started before anything was served: what it starts, and the engines that those start, inherit
its CPUs and its scheduling class, and never those of a connection's thread. A step for which no thread can be
started has failed.

What is one of the scheduler's own facts, as that a host cannot be steered, its caller gives to
``SchedulerDriver.tell``. ``Facts`` are those of engines, hosts and people that are more than that. They may
be late: nothing has happened to a backend that was loaded anew since. A request that got no whole answer
raises a doubt of its engine, which ends with a fact (``Doubts``). Any thread.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from anvil_mux.clock import AFTER_MISTAKE_SECONDS, Clock, Latch, Lock, essential, safely
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.keys import Key
from anvil_mux.errors import Cancelled, LoadError, MuxError, TooManyRequests
from anvil_mux.host.hosts import AnyHost
from anvil_mux.host.seam import CardRead, Evicted, NotBegun, Unfit
from anvil_mux.routing.in_flight import Report
from anvil_mux.scheduler.costs import Cost, Costs, Footprint, Footprints
from anvil_mux.scheduler.events import Cause, Event
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import (
    NOTHING,
    RUNS,
    Cancel,
    Crash,
    Demote,
    Effects,
    Evict,
    FoundBackend,
    Load,
    Step,
    Ticket,
)
from anvil_mux.scheduler.status import KeptPrompts
from anvil_mux.scheduler.waits import Progress

log = logging.getLogger(__name__)

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


@dataclass(frozen=True, eq=False, slots=True)
class EngineRun:
    """One run of an engine, since it was ready. Compared by identity: the next at its address is another."""

    address: tuple[str, int]


class Granted(NamedTuple):
    """The object of a lease, as it was when it was granted."""

    backend: Backend
    run: EngineRun


class Job(NamedTuple):
    """A step, and what it is performed on."""

    step: Step
    backend: Backend


class SchedulerDriver:
    """The scheduler of one multiplexer, the lock around it, and the threads that perform its steps."""

    def __init__(
        self,
        config: Config,
        host: AnyHost,
        clock: Clock,
        emit: Callable[[Event], object],
        *,
        emit_leases: bool,
        costs: Iterable[Cost],
        footprints: Iterable[Footprint],
        cards: Iterable[CardRead],
        close_idle: Callable[[EngineRun], object],
    ) -> None:
        self._host = host
        self._close_idle = close_idle
        self.clock = clock
        self.emit = emit
        """Takes every event, under the lock."""
        # Replaced as a whole, under the lock, and never altered: whoever only reads them needs none.
        self._take(config)
        # The lock guards everything below it. It is held for microseconds: no I/O, no engine, no Docker.
        self.lock = clock.lock()
        self.scheduler = Scheduler(
            config,
            emit,
            Costs(costs),
            Footprints(footprints),
            emit_leases=emit_leases,
            first_step=1 + secrets.randbits(60),
        )
        self.counts = RequestCounts(self.lock)
        # Whoever needs one entry of the first of these reads it without the lock.
        self.backends = {each.name: each for each in config.backends}
        """The backends as they were last started or are to be; also those that go."""
        self.runs: dict[str, EngineRun] = {}
        """Backend -> the last run that was seen of it."""
        self.loads: dict[str, int] = {}
        """Backend -> the number of its last load; none: it was adopted."""
        self.reported: dict[str, tuple[float, Progress]] = {}
        """Backend -> what its log said last of a load, and when."""
        self.prompts: dict[str, KeptPrompts] = {}
        """Backend -> its prompts on disk, of those that keep some."""
        self.cards = {each.backend: each for each in cards}
        """Backend -> what its engine said last of its model."""
        self._changed = clock.condition(self.lock)
        self._jobs: deque[Job] = deque()
        self._ask_at = -FOREVER
        """The moment at which time has to have passed."""
        self._is_asked_to_turn = False
        self._closed = False

    def _take(self, config: Config) -> None:
        self.config, self.names = config, config.names
        """``names``: every name by which a model may be asked for -> the model."""
        self.served = frozenset(self.names.values())

    def reconfigured(self, config: Config, now: float, expected: Iterable[str]) -> Effects:
        """Another configuration holds from now on; ``expected``: backends that may run already."""
        effects = self.scheduler.reconfigured(config, now, expected=expected)
        self._take(config)  # after a mistake there, what was served before is served on
        layout = self.scheduler.layout
        known = dict(layout.settings.wanted)
        known |= {slot.name: slot.backend for slot in layout.slots}
        self.backends |= known
        tables: list[dict[str, Any]] = [self.backends, self.runs, self.loads]
        tables += [self.reported, self.prompts, self.cards]
        for name in self.backends.keys() - known.keys():  # those that have left their GPUs for good
            for table in tables:
                table.pop(name, None)
        return effects

    # Facts and effects

    def apply(self, fact: Callable[[float], Effects]) -> Effects:
        """Tell the scheduler that something is so since now, and carry out what follows from it."""
        with self.lock:
            effects = fact(self.clock.now())
            jobs = self.noted(effects)
        self.carry_out(effects, jobs)
        return effects

    def tell(self, fact: Callable[..., Effects], *about: Any, **more: Any) -> Effects:
        """The same of one of the scheduler's own facts, which takes the moment after what it is about."""
        return self.apply(lambda now: fact(*about, now, **more))

    def noted(self, effects: Effects) -> Sequence[Job]:
        """Note what has to hold at once of effects, under the lock, and make jobs of their steps."""
        if effects is NOTHING:
            return ()
        for ticket in effects.woken:
            self.counts.count_waiting(ticket, -1)
            self.grant(ticket)
        if effects.ask_at is not None:
            self.ask_at(effects.ask_at)
        return [self._job(step) for step in effects.steps]

    def grant(self, ticket: Ticket) -> None:
        """Fix what a ticket has leased, if it has, under the lock: before its thread goes on, reloads and an
        eviction may have taken the backend away."""
        for each in (ticket, ticket.prefill):
            if each and each.backend:
                each.granted = Granted(self.backends[each.backend], self.runs[each.backend])

    def _job(self, step: Step) -> Job:
        slot = self.scheduler.layout.of_backend[step.backend].slots[step.backend]
        if isinstance(step, Load):
            self.backends[step.backend] = slot.backend
        return Job(step, slot.backend)

    def carry_out(self, effects: Effects, jobs: Sequence[Job]) -> None:
        """Without the lock, in this order: nobody is cut after the engine was told to go.

        Nor does a connection idle there then, for which llama-server would end 0.1 s later.
        """
        try:
            for ticket in effects.woken:
                ticket.wake.set()
                # Whoever is woken goes on before the next one is. Of 500 who want the interpreter at once,
                # the last has its lease after 28 to 34 ms on two CPUs, and 45 to 74 on one; so it is 21
                # and 15.
                os.sched_yield()
            for ticket in effects.cut:
                cut(ticket)
            for job in jobs:
                self._prepare(job)
        finally:  # a step that is lost would leave its backend as it is for ever
            begun = [job for job in jobs if not isinstance(job.step, Cancel)]
            if begun:
                with self.lock:
                    self._jobs.extend(begun)
                    self._changed.notify()
        for mistake in effects.mistakes:
            log.error("a mistake in the scheduler; what it concerns is tried again", exc_info=mistake)

    def _prepare(self, job: Job) -> None:
        """Cancel a load, or close the idle connections to an engine that is about to be evicted."""
        try:
            if isinstance(job.step, Cancel):
                self._host.cancel(job.backend, job.step.number)
            elif isinstance(job.step, Evict) and (run := self.runs.get(job.step.backend)):
                self._close_idle(run)
        except Exception:  # other steps of the same effects are performed all the same
            log.exception("a step on %s could not be prepared", job.step.backend)

    # The thread that has steps performed

    def start(self) -> None:
        """Begin; the threads run on the CPUs of the thread that calls this."""
        self.clock.spawn(essential("scheduler", self._run), "scheduler")

    def has_turned(self) -> bool:
        """Return whether the thread ``scheduler`` has come by since the last call, and ask it to again.

        For one caller, which calls now and then.
        """
        with self.lock:
            has_turned, self._is_asked_to_turn = not self._is_asked_to_turn, True
            self._changed.notify()
            return has_turned

    def ask_at(self, moment: float) -> None:
        """Set the moment at which time has to have passed. Under the lock."""
        if moment < self._ask_at:
            self._changed.notify()
        self._ask_at = moment

    def close(self) -> None:
        """Begin nothing any more. Under the lock."""
        self._closed = True
        self._changed.notify()

    def _run(self) -> None:
        while not self._closed:
            if not safely("scheduler", self._turn, False):  # without this thread nothing is ever swapped
                with self.lock:
                    self._ask_at = self.clock.now() + AFTER_MISTAKE_SECONDS

    def _turn(self) -> bool:
        """Begin a job, or say that time has passed, once that is due; True, also where it is closed."""
        with self.lock:
            self._is_asked_to_turn = False
            while not (self._jobs or self._closed or self._ask_at <= self.clock.now()):
                self._changed.wait(None if self._ask_at == FOREVER else self._ask_at - self.clock.now())
                self._is_asked_to_turn = False
            if self._closed:
                return True
            job = self._jobs.popleft() if self._jobs else None
        if job is None:
            self.tell(self.scheduler.time_passed)
        else:
            self._begin(job)
        return True

    def _begin(self, job: Job) -> None:
        try:
            self.clock.spawn(partial(self._perform, job), f"step-{job.step.backend}")
        except (RuntimeError, MemoryError) as error:
            why = f"no thread can be started: {error}"
            with self._reporting(job.step):
                if isinstance(job.step, Load):
                    self.tell(self.scheduler.load_failed, job.step, error=LoadError(why))
                else:
                    self.tell(self.scheduler.evict_not_begun, job.step, why=why)

    @contextmanager
    def _reporting(self, step: Step) -> Iterator[None]:
        """Report a step as failed if its report raises, in the scheduler or in what it was told.

        A step without an end would leave its backend as it is for ever.
        """
        try:
            yield
        except Exception as error:
            log.exception("the end of a step on %s could not be reported", step.backend)
            self.tell(self.scheduler.report_failed, step, why=_text(error))

    # A step

    def _perform(self, job: Job) -> None:
        """Perform a step and report how it ended; the life of its thread."""
        step, backend = job
        with self._reporting(step):
            match step:
                case Load():
                    self._load(step, backend)
                case Evict(_, level):
                    self._evict(step, partial(self._host.evict, backend, level))
                case Demote(_, level, to):
                    self._evict(step, partial(self._host.demote, backend, level, to))

    def _load(self, step: Load, backend: Backend) -> None:
        try:
            loaded = self._host.load(backend, step.level, step.number)
            address = address_of(loaded.url)
        except Cancelled:
            self.tell(self.scheduler.load_cancelled, step)
        except LoadError as error:
            self.tell(self.scheduler.load_failed, step, error=error)
        except Exception as error:
            self.tell(self.scheduler.evict_failed, step, why=_text(error))
        else:
            self.tell(self._loaded, step, address, level=loaded.level)

    def _loaded(self, step: Load, address: tuple[str, int], now: float, level: str) -> Effects:
        effects = self.scheduler.loaded(step, now, level)
        if effects is not NOTHING:
            self.runs[step.backend] = EngineRun(address)
            self.loads[step.backend] = step.number
        return effects

    def _evict(self, step: Evict | Demote, perform: Callable[[], Evicted]) -> None:
        try:
            evicted = perform()
        except NotBegun as error:
            self.tell(self.scheduler.evict_not_begun, step, why=error.message)
            return
        except Exception as error:
            self.tell(self.scheduler.evict_failed, step, why=_text(error))
            return
        self.tell(
            self.scheduler.evicted,
            step,
            residual=evicted.residual,
            level=evicted.level,
            host_bytes=evicted.host_bytes,
            freed=evicted.freed,
            died=evicted.died,
            log=evicted.log,
        )


class RequestCounts:
    """How many requests wait for models, and how many each API key has under way and waiting.

    The driver's lock guards them. A key is its digest: a reload may change its limits, and may give one to a
    key that had none, while its requests are under way.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        # The lock guards what follows.
        self.waiting = 0
        """Requests that wait for any model."""
        self._under_way: Counter[bytes] = Counter()
        self._waiting: Counter[bytes] = Counter()

    @contextmanager
    def under_way(self, key: Key) -> Iterator[None]:
        """One of the requests that ``key`` may have at once, until the end; TooManyRequests."""
        with self._lock:
            count = self._under_way[key.digest]
            if key.requests is not None and count >= key.requests:
                raise TooManyRequests(f"This API key has reached its limit of concurrent requests ({count}).")
            self._under_way[key.digest] += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[key.digest] -= 1

    def check_waiting(self, sender: Hashable) -> None:
        """TooManyRequests if as many requests of a key wait already as may. Under the lock."""
        if not isinstance(sender, Key) or sender.waiting is None:
            return
        count = self._waiting[sender.digest]
        if count >= sender.waiting:
            raise TooManyRequests(f"This API key has {count} requests waiting already, as many as it may.")

    def count_waiting(self, ticket: Ticket, change: int) -> None:
        """Count a ticket that waits, or waits no longer. Under the lock."""
        self.waiting += change
        if isinstance(ticket.sender, Key):
            self._waiting[ticket.sender.digest] += change


# Facts from outside

Running = Mapping[str, str | Evicted | Unfit]
"""Backend that runs already -> the URL at which it serves, or how it is in standby; unfit: it has to be
stopped, and holds its GPUs until then."""


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
        residency: int | None = None,
        load: int | None = None,
    ) -> None:
        """The backend's service ended, and nobody here told it to.

        ``log``: what it had printed last. Nothing has happened if it became resident again since the
        ``residency`` of its slot, or was loaded by another load than the one of the number ``load``.
        """

        def fact(now: float) -> Effects:
            if load is not None and load != self._driver.loads.get(backend, 0):
                return NOTHING
            is_it = residency is None or self._is_since(backend, residency)
            return self._scheduler.died(backend, now, why, log) if is_it else NOTHING

        self._apply(fact)
        self.doubts.settle(backend)

    def unanswering(self, backend: str, *, residency: int) -> None:
        """The engine answers nobody; nothing follows if it became resident again since ``residency``."""

        def fact(now: float) -> Effects:
            is_it = self._is_since(backend, residency)
            return self._scheduler.unanswering(backend, now) if is_it else NOTHING

        self._apply(fact)

    def _is_since(self, backend: str, residency: int) -> bool:
        """Return whether a backend is there, and did not become resident again. Under the lock."""
        slot = self._scheduler.layout.slot(backend)
        return slot is not None and slot.residency == residency

    def is_heard(self, backend: str, since: float) -> bool:
        """Whether any request got a part of an answer from the backend since a moment."""
        with self._driver.lock:
            slot = self._scheduler.layout.slot(backend)
            answered = slot.answered if slot else -FOREVER
            run = self._driver.runs.get(backend)
        return answered > since or (run is not None and self._has_heard(run.address, since))

    # From hosts

    def host_lost(self, host: str, why: str = "") -> None:
        """Take a host as lost: its leases are cut, and nothing is begun there until it is back.

        ``why``: the reason, for people.
        """
        self._tell(self._scheduler.host_lost, host, why=why)
        self.doubts.settle_lost()

    def host_back(self, host: str, found: Running) -> None:
        """A lost host is heard of again, where these backends were found."""

        def fact(now: float) -> Effects:
            for name, how in found.items():
                self._note_run(name, how)
            return self._scheduler.host_back(host, now, {name: _found(how) for name, how in found.items()})

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

    def adopt(self, found: Running) -> list[str]:
        """Takes over backends that run already, or are in standby; returns what cannot stay."""
        return [name for name, how in found.items() if not self._adopt(name, how)]

    def _adopt(self, name: str, how: str | Evicted | Unfit) -> bool:
        def fact(now: float) -> Effects:
            slot = self._scheduler.layout.slot(name)
            if slot is None or slot.state != "stopped":
                return Effects()
            self._driver.loads.pop(name, None)
            self._note_run(name, how)
            return self._scheduler.adopted(name, now, _found(how))

        return self._apply(fact) is not NOTHING

    def _note_run(self, backend: str, how: str | Evicted | Unfit) -> None:
        """Note where a backend listens that was found, if it serves. Under the lock."""
        if isinstance(how, str):
            self._driver.runs[backend] = EngineRun(address_of(how))

    # From people, and from other anvil-mux

    def reconfigure(self, config: Config, found: Running) -> list[str]:
        """Apply another configuration while requests run on; the rest is as with ``adopt``.

        What cannot stay is ``looked_at`` by whoever stops it, once that is done.
        """
        self._apply(lambda now: self._driver.reconfigured(config, now, found))
        refused = self.adopt(found)
        self.looked_at(found.keys() - refused)
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


def _found(how: str | Evicted | Unfit) -> FoundBackend:
    if isinstance(how, Unfit):
        return FoundBackend(may_stay=False)
    return RUNS if isinstance(how, str) else FoundBackend(how.level, how.residual, how.host_bytes)


@dataclass(eq=False)
class _Doubt:
    """One doubt, of one run of a backend."""

    residency: int
    """Tells the runs of the backend apart."""
    since: float
    waiting: list[Latch] = field(default_factory=list)
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
            is_new = doubt is None or doubt.residency != slot.residency
            if doubt is None or is_new:
                doubt = self._open[backend.name] = _Doubt(slot.residency, self._clock.now())
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
            self._facts.died(name, why, self._host.log_tail(backend), residency=doubt.residency)
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
        self._facts.unanswering(name, residency=doubt.residency)
        return True

    def _is_open(self, name: str, doubt: _Doubt) -> bool:
        """Whether the doubt still is of the backend that is resident."""
        with self._lock:
            slot = self._slot(name)
            here = (
                slot is not None and slot.residency == doubt.residency and slot.state in ("ready", "draining")
            )
            return here and self._open.get(name) is doubt and not self._closed

    def settle(self, name: str, doubt: _Doubt | None = None) -> None:
        """Let requests go on that wait to learn what became of the backend: it is known, or asked no more."""
        waiting: list[Latch] = []
        with self._lock:
            if doubt is None or self._open.get(name) is doubt:
                doubt = self._open.pop(name, None)
            if doubt:
                waiting, doubt.waiting = doubt.waiting, []
        for found in waiting:
            found.set()


def cut(ticket: Ticket) -> None:
    """Cut a request that was severed."""
    end = ticket.cut  # the lease may end just now
    try:
        if end:
            end()
    except Exception:  # whoever cuts has more to do
        log.exception("cutting a severed request for %s", ticket.model)


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)


def _text(error: Exception) -> str:
    return error.message if isinstance(error, MuxError) else f"{type(error).__name__}: {error}"
