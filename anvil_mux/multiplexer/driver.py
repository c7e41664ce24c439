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
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from anvil_mux.clock import AFTER_MISTAKE_SECONDS, Clock, Lock, safely
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.keys import Key
from anvil_mux.errors import Cancelled, LoadError, MuxError, TooManyRequests
from anvil_mux.host.hosts import AnyHost
from anvil_mux.host.seam import CardRead, Evicted
from anvil_mux.scheduler.costs import Cost, Costs, Footprint, Footprints
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import NOTHING, Cancel, Demote, Effects, Evict, Load, Step, Ticket
from anvil_mux.scheduler.status import KeptPrompts
from anvil_mux.scheduler.waits import LogProgress

log = logging.getLogger(__name__)


class EngineRun:
    """One run of an engine, since it was ready. Compared by identity: the next at its address is another."""

    __slots__ = ("address",)

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address


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
        self._take(config, config.names)
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
        self.reported: dict[str, tuple[float, LogProgress]] = {}
        """Backend -> what its log said last of a load, and when."""
        self.prompts: dict[str, KeptPrompts] = {}
        """Backend -> its prompts on disk, of those that keep some."""
        self.cards = {each.backend: each for each in cards}
        """Backend -> what its engine said last of its model."""
        self._changed = clock.condition(self.lock)
        self._jobs: deque[Job] = deque()
        self._ask_at = -FOREVER
        """The moment at which time has to have passed."""
        self._started = self._closed = False

    def _take(self, config: Config, names: Mapping[str, str]) -> None:
        self.config = config
        self.names = names
        """Every name by which a model may be asked for -> the model."""
        self.served = frozenset(names.values())

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
        for ticket in effects.woken:
            ticket.wake.set()
            # Whoever is woken goes on before the next one is. Of 500 who want the interpreter at once, the
            # last has its lease after 28 to 34 ms on two CPUs, and 45 to 74 on one; so it is 21 and 15.
            os.sched_yield()
        for ticket in effects.cut:
            cut(ticket)
        for job in jobs:
            if isinstance(job.step, Cancel):
                self._host.cancel(job.backend, job.step.number)
            elif isinstance(job.step, Evict) and (run := self.runs.get(job.step.backend)):
                self._close_idle(run)
        begun = [job for job in jobs if not isinstance(job.step, Cancel)]
        if begun:
            self.submit(begun)
        for mistake in effects.mistakes:
            log.error("a mistake in the scheduler; what it concerns is tried again", exc_info=mistake)

    # The thread that has steps performed

    def start(self) -> None:
        """Begin; the threads run on the CPUs of the thread that calls this."""
        with self.lock:
            if self._started:
                return
            self._started = True
        self.clock.spawn(self._run, "scheduler")

    def ask_at(self, moment: float) -> None:
        """Set the moment at which time has to have passed. Under the lock."""
        if moment < self._ask_at:
            self._changed.notify()
        self._ask_at = moment

    def submit(self, jobs: Iterable[Job]) -> None:
        """Have jobs performed, begun in this order. Not under the lock."""
        with self.lock:
            self._jobs.extend(jobs)
            self._changed.notify()

    def close(self) -> None:
        """Begin nothing any more. Under the lock."""
        self._closed = True
        self._changed.notify()

    def _run(self) -> None:
        goes_on: bool | None = True
        while goes_on or goes_on is None:
            goes_on = safely("scheduler", self._turn, None)
            if goes_on is None:  # after a mistake, without this thread nothing is ever swapped again
                with self.lock:
                    self._ask_at = self.clock.now() + AFTER_MISTAKE_SECONDS

    def _turn(self) -> bool:
        """Begin a job or say that time has passed, when that is due; False once it is closed."""
        with self.lock:
            while not (self._jobs or self._closed or self._ask_at <= self.clock.now()):
                self._changed.wait(None if self._ask_at == FOREVER else self._ask_at - self.clock.now())
            if self._closed:
                return False
            job = self._jobs.popleft() if self._jobs else None
        if job is None:
            self._time_passed()
        else:
            self._begin(job)
        return True

    def _time_passed(self) -> None:
        self.tell(self.scheduler.time_passed)

    def _begin(self, job: Job) -> None:
        try:
            self.clock.spawn(partial(self._perform, job), f"step-{job.step.backend}")
        except (RuntimeError, MemoryError) as error:
            self._not_begun(job, f"no thread can be started: {error}")

    def _not_begun(self, job: Job, why: str) -> None:
        """Report a step that nobody could begin."""
        if isinstance(job.step, Load):
            self.tell(self.scheduler.load_failed, job.step, error=LoadError(why))
        else:
            self.tell(self.scheduler.evict_failed, job.step, why=why)

    # A step

    def _perform(self, job: Job) -> None:
        """Perform a step and report how it ended; the life of its thread."""
        step, backend = job
        try:
            match step:
                case Load():
                    self._load(step, backend)
                case Evict(_, level):
                    self._evict(step, partial(self._host.evict, backend, level))
                case Demote(_, level, to):
                    self._evict(step, partial(self._host.demote, backend, level, to))
        except Exception as error:  # in the scheduler, or in what it was told; without an end it is wedged
            log.exception("the end of a step on %s could not be reported", step.backend)
            self.tell(self.scheduler.report_failed, step, why=_text(error))

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

    # Another configuration

    def reconfigure(self, config: Config, expected: Iterable[str]) -> None:
        """Another configuration holds from now on."""

        def fact(now: float) -> Effects:
            self._take(config, config.names)
            effects = self.scheduler.reconfigured(config, now, expected=expected)
            layout = self.scheduler.layout
            known = dict(layout.settings.wanted)
            known |= {slot.name: slot.backend for slot in layout.slots}
            self.backends |= known
            tables: tuple[dict[str, Any], ...] = (
                self.runs,
                self.loads,
                self.reported,
                self.prompts,
                self.cards,
            )
            for name in self.backends.keys() - known.keys():  # those that have left their GPUs for good
                del self.backends[name]
                for table in tables:
                    table.pop(name, None)
            return effects

        self.apply(fact)


class RequestCounts:
    """How many requests wait for models, and how many each API key has under way and waiting.

    The driver's lock guards them. Of keys that have no limit nothing is counted.
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        # The lock guards what follows.
        self.waiting = 0
        """Requests that wait for any model."""
        self._under_way: Counter[Key] = Counter()
        self._waiting: Counter[Key] = Counter()

    @contextmanager
    def under_way(self, key: Key) -> Iterator[None]:
        """One of the requests that ``key`` may have at once, until the end; TooManyRequests."""
        with self._lock:
            count = self._under_way[key]
            if key.requests is not None and count >= key.requests:
                raise TooManyRequests(f"This API key has reached its limit of concurrent requests ({count}).")
            self._under_way[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[key] -= 1

    def check_waiting(self, key: Key, limit: int) -> None:
        """TooManyRequests if so many requests of ``key`` wait already. Under the lock."""
        count = self._waiting[key]
        if count >= limit:
            raise TooManyRequests(f"This API key has {count} requests waiting already, as many as it may.")

    def count_waiting(self, ticket: Ticket, change: int) -> None:
        """Count a ticket that waits, or waits no longer. Under the lock."""
        self.waiting += change
        if isinstance(ticket.sender, Key) and ticket.sender.waiting is not None:
            self._waiting[ticket.sender] += change


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
