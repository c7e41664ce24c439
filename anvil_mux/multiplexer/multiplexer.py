"""One lock, a lease per request, and threads that perform the scheduler's steps.

``with mux.lease(model) as lease:`` is the whole interface of the serve path. Under the lock the scheduler is
told a fact and returns ``Effects``; the model's queue is entered, or a lease is had at once. Outside of the
lock the effects are carried out: threads of requests that ended waiting are woken by a latch of their own,
leases are cut, and then the steps are handed to the workers (stop a container, start one, wait until it
answers: minutes, if need be), which report how each has ended.

Threads wait in three functions: ``_wait_for_lease`` (requests, without the lock: a queue of hundreds that is
admitted at once must not queue up for it), the one thread of ``Workers`` that waits for jobs, and where an
engine is in doubt (``doubts.py``). Nothing slow happens while the lock is held. Any thread may call any
public method.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice

from anvil_mux.clock import Clock
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.keys import Key
from anvil_mux.errors import (
    Cancelled,
    ClientGone,
    Draining,
    MuxError,
    Overloaded,
    TooManyRequests,
    UnknownModel,
    WaitedTooLong,
)
from anvil_mux.host.seam import Evicted, Host
from anvil_mux.multiplexer.doubts import Doubts
from anvil_mux.multiplexer.lease import EngineRun, Lease
from anvil_mux.multiplexer.overview import Overview
from anvil_mux.multiplexer.performer import Job, Performer, address_of
from anvil_mux.multiplexer.workers import Workers
from anvil_mux.routing.in_flight import EngineLoad, Report
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.causes import Cause
from anvil_mux.scheduler.costs import Cost, Costs
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.footprint import Footprint, Footprints
from anvil_mux.scheduler.host_facts import FoundBackend
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.steps import (
    NO_WORK,
    NOTHING,
    Cancel,
    Crash,
    Effects,
    Load,
    Step,
    Ticket,
    TokenUsage,
)

log = logging.getLogger(__name__)

TEND_SECONDS = 0.25
"""How often a waiting request looks at its client."""

Tend = Callable[[float], None]


class Multiplexer:
    """Leases backends to requests; its workers swap them.

    ``log`` takes every event, under the lock; without ``log_leases`` none of leases that begin and end.
    ``has_heard(address, since)``: whether an engine has sent anybody a part of an answer since that moment.
    """

    def __init__(
        self,
        config: Config,
        host: Host,
        *,
        log: Callable[[Event], object],
        log_leases: bool = True,
        costs: Iterable[Cost] = (),
        footprints: Iterable[Footprint] = (),
        clock: Clock | None = None,
        has_heard: Callable[[tuple[str, int], float], bool] = lambda address, since: False,
    ) -> None:
        self._host = host
        self._has_heard = has_heard
        self._log = log
        self._clock = clock or Clock()
        # Replaced as a whole, under the lock, and never altered: whoever only reads them needs none.
        self._backends = {each.name: each for each in config.backends}  # as last started; those that went too
        self._take(config)
        # The lock guards everything below it. It is held for microseconds: no I/O, no engine, no Docker.
        self._lock = self._clock.lock()
        self._scheduler = Scheduler(config, log, Costs(costs), Footprints(footprints), emit_leases=log_leases)
        self._runs: dict[str, EngineRun] = {}  # backend -> the last that was seen of it
        self._loads: dict[str, int] = {}  # backend -> the number of its last load; none: adopted
        self._tickets = 0
        self._waiting = 0
        self._requests: Counter[Key] = Counter()  # of keys that have a limit; and how many of them wait
        self._waiters: Counter[Key] = Counter()
        self._closing: MuxError | None = None
        self.overview = Overview(
            clock=self._clock, lock=self._lock, scheduler=self._scheduler, runs=self._runs
        )
        performer = Performer(host, self._scheduler, self._apply, self._loaded)
        self._workers = Workers[Job](
            clock=self._clock,
            lock=self._lock,
            perform=performer.perform,
            failed=performer.not_begun,
            time_passed=self._time_passed,
            name=lambda job: job.step.backend,
        )
        self._doubts = Doubts(
            clock=self._clock,
            lock=self._lock,
            slot=self._scheduler.layout.slot,
            observer=host,
            consequences=self,
            limit=lambda: self._config.upstream_timeout,
        )

    def _take(self, config: Config) -> None:
        self._config = config
        self._replicas = Counter(backend.model for backend in config.backends)
        self._names = config.names

    def __repr__(self) -> str:
        with self._lock:
            return f"<Multiplexer {self._scheduler.layout.groups}>"

    def _model(self, model: str) -> Model:
        """Find a model, under the lock; UnknownModel if it was served until a moment ago."""
        try:
            return self._scheduler.layout.models[model]
        except KeyError:
            raise UnknownModel(model, self._replicas) from None

    # Facts and effects

    def _apply(self, fact: Callable[[float], Effects]) -> Effects:
        """Tells the scheduler that something is so since now, and carries out what follows from it."""
        with self._lock:
            effects = fact(self._clock.now())
            jobs = self._noted(effects)
        self._carry_out(effects, jobs)
        return effects

    def _noted(self, effects: Effects) -> Sequence[Job]:
        """Note what the multiplexer keeps of effects, under the lock, and make jobs of their steps."""
        if effects is NOTHING:
            return ()
        for ticket in effects.woken:
            self._count_waiting(ticket, -1)
        if effects.ask_at is not None:
            self._workers.ask_at(effects.ask_at)
        return [self._job(step) for step in effects.steps]

    def _job(self, step: Step) -> Job:
        slot = self._scheduler.layout.slot(step.backend)
        assert slot is not None, step
        if not isinstance(step, Cancel):
            self.overview.forget_progress(step.backend)
        if isinstance(step, Load) and self._backends.get(step.backend) is not slot.backend:
            self._backends = {**self._backends, step.backend: slot.backend}
        return Job(step, slot.backend)

    def _carry_out(self, effects: Effects, jobs: Sequence[Job]) -> None:
        """Without the lock, in this order: nobody is cut after the engine was told to go."""
        for ticket in effects.woken:
            ticket.wake.set()
        for ticket in effects.cut:
            _cut(ticket)
        for job in jobs:
            if isinstance(job.step, Cancel):
                self._host.cancel(job.backend, job.step.number)
        begun = [job for job in jobs if not isinstance(job.step, Cancel)]
        if begun:
            self._workers.submit(begun)

    def _time_passed(self) -> None:
        self._apply(self._scheduler.time_passed)

    # The serve path

    def resolve(self, name: str) -> str:
        """The model that a client's name or alias stands for; UnknownModel lists the known ones."""
        try:
            return self._names[name]
        except KeyError:
            raise UnknownModel(name, self._replicas) from None

    def is_ready(self, model: str) -> bool:
        """Whether it is resident; its requests may have to wait for a place all the same."""
        with self._lock:
            return bool(self._model(model).ready)

    def backend(self, name: str) -> Backend | None:
        """Find a backend as it was last started or is to be, also if the configuration has it no longer."""
        return self._backends.get(name)

    def has_another(self, lease: Lease) -> bool:
        """Whether a request may be sent to another backend of its model without waiting for a load."""
        with self._lock:
            model = self._scheduler.layout.models.get(lease.backend.model)
            slots = model.slots if model else ()
            return any(slot.serves and slot.name != lease.backend.name for slot in slots)

    @contextmanager
    def counted(self, key: Key) -> Iterator[None]:
        """One of the requests that ``key`` may have at once, until the end; TooManyRequests."""
        with self._lock:
            count = self._requests[key]
            if key.requests is not None and count >= key.requests:
                raise TooManyRequests(f"This API key has {count} requests under way, and may not have more.")
            self._requests[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._requests[key] -= 1

    def lease(
        self,
        model: str,
        tend: Tend | None = None,
        work: Work = NO_WORK,
        *,
        key: Key | None = None,
        staged: bool = False,
        crashes: tuple[Crash, ...] = (),
    ) -> Lease:
        """Blocks until ``model`` is resident and has a place, then holds it. Raises MuxError.

        ``work`` is what is known of the request, where the model has several backends, and ``key`` whose it
        is. ``staged``: it may be served in two stages, by a prefill and a decode backend that are leased
        together. ``crashes``: those that the request was there at, under other leases.

        ``tend(now)`` is called without the lock a few times a second while the request waits. What it raises
        ends the wait and propagates; ClientGone is how it says that nobody wants the answer any more.
        """
        ticket = self._ask_for(model, tend, leases=True, work=work, key=key, staged=staged, crashes=crashes)
        backend = ticket.backend
        assert backend is not None
        lease = Lease(self, ticket, self._backends[backend], self._runs[backend])
        if ticket.wake:
            lease.waited = self._clock.now() - ticket.since
        if ticket.prefill and ticket.prefill.backend:
            backend = ticket.prefill.backend
            lease.prefill = Lease(self, ticket.prefill, self._backends[backend], self._runs[backend])
        return lease

    def load(self, model: str, tend: Tend | None = None) -> None:
        """Blocks until ``model`` is resident without leasing it; waits and fails like a request."""
        self._ask_for(model, tend, leases=False)

    def _ask_for(
        self,
        model: str,
        tend: Tend | None,
        *,
        leases: bool,
        work: Work = NO_WORK,
        key: Key | None = None,
        staged: bool = False,
        crashes: tuple[Crash, ...] = (),
    ) -> Ticket:
        with self._lock:
            now = self._clock.now()
            if self._closing:
                raise self._closing.with_traceback(None)
            if model not in self._replicas:
                raise UnknownModel(model, self._replicas)
            if self._waiting >= self._config.max_queue and not self._model(model).takes(work.owner):
                raise Overloaded(f"overloaded: {self._waiting} requests wait for models already. Try again.")
            if key and key.waiting is not None and not self._model(model).takes(work.owner):
                self._check_waiters(key, key.waiting)
            self._tickets += 1
            first = self._first_stage(model, now, work) if staged else None
            ticket = Ticket(self._tickets, model, now, leases, work, first, key, crashes)
            effects = self._scheduler.requested(ticket, now)
            if ticket.backend is None and ticket.error is None:
                ticket.wake = self._clock.latch()
                self._count_waiting(ticket, 1)
            jobs = self._noted(effects) if effects is not NOTHING else ()
        if effects is not NOTHING:
            self._carry_out(effects, jobs)
        if ticket.wake:
            self._wait(ticket, tend)
        if ticket.error:
            # One error may end a whole queue: each thread raises it without the others' frames.
            raise ticket.error.with_traceback(None)
        return ticket

    def _first_stage(self, model: str, now: float, work: Work) -> Ticket:
        """The prefill computes its input without a stream, so nothing of it is seen before it is done."""
        self._tickets += 1
        return Ticket(self._tickets - 1, model, now, work=work._replace(infer_type="prefill", stream=False))

    def _check_waiters(self, key: Key, limit: int) -> None:
        count = self._waiters[key]
        if count >= limit:
            raise TooManyRequests(f"This API key has {count} requests waiting, and may not have more.")

    def _count_waiting(self, ticket: Ticket, change: int) -> None:
        """Count a ticket that waits, or waits no longer. Under the lock."""
        self._waiting += change
        if isinstance(ticket.sender, Key) and ticket.sender.waiting is not None:
            self._waiters[ticket.sender] += change

    def _wait(self, ticket: Ticket, tend: Tend | None) -> None:
        pause = TEND_SECONDS if tend else FOREVER
        try:
            while not self._wait_for_lease(ticket, pause):
                assert tend is not None
                tend(self._clock.now())
        except BaseException as error:
            if ticket.prefill:
                self._apply(partial(self._scheduler.released, ticket.prefill, whole=False))
            self._apply(partial(self._abandon, ticket, error))
            raise

    def _wait_for_lease(self, ticket: Ticket, pause: float) -> bool:
        """Waits until the ticket ends, at most ``pause`` seconds, and never past ``queue_timeout``."""
        limit = self._config.queue_timeout
        deadline = ticket.since + limit
        now = self._clock.now()
        if ticket.wake.wait(min(deadline, now + pause) - now):
            return True
        if self._clock.now() < deadline:
            return False
        self._apply(partial(self._give_up, ticket, limit))
        return True

    def _give_up(self, ticket: Ticket, limit: float, now: float) -> Effects:
        if ticket.settled:
            return NOTHING
        model = self._scheduler.layout.models.get(ticket.model)
        what = "had no place for this request" if model and model.ready else "did not become resident"
        return self._leave_queue(ticket, now, WaitedTooLong(f"{ticket.model} {what} within {limit:g} s."))

    def _abandon(self, ticket: Ticket, error: BaseException, now: float) -> Effects:
        """The request's thread stops waiting because ``tend`` raised."""
        if ticket.backend:
            return self._scheduler.released(ticket, now, whole=False)
        if ticket.error:
            return NOTHING
        known = isinstance(error, MuxError) and not isinstance(error, ClientGone)
        return self._leave_queue(ticket, now, error if known else None)  # type: ignore[arg-type]

    def _leave_queue(self, ticket: Ticket, now: float, error: MuxError | None) -> Effects:
        self._count_waiting(ticket, -1)
        return self._scheduler.abandoned(ticket, now, error)

    def cancel(self, number: int) -> bool:
        """Fail one request that waits; False if no ticket of that number waits."""
        found: list[Ticket] = []

        def fact(now: float) -> Effects:
            waiting = (ticket for model in self._scheduler.layout.models.values() for ticket in model.queue)
            found.extend(islice((ticket for ticket in waiting if ticket.id == number), 1))
            if not found:
                return NOTHING
            error = Cancelled(f"This request for {found[0].model} was taken out of its queue.")
            return self._leave_queue(found[0], now, error)

        self._apply(fact)
        for ticket in found:
            ticket.wake.set()
        return bool(found)

    def released(self, ticket: Ticket, usage: TokenUsage, *, whole: bool) -> None:
        """A lease ended; see Lease.release."""
        with self._lock:
            effects = self._scheduler.released(ticket, self._clock.now(), usage, whole=whole)
            if effects is NOTHING:
                return
            jobs = self._noted(effects)
        self._carry_out(effects, jobs)

    def first_byte(self, ticket: Ticket) -> bool:
        """See Lease.first_byte."""
        with self._lock:
            return self._scheduler.first_byte(ticket)

    # Facts from outside

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
            if load is not None and load != self._loads.get(backend, 0):
                return NOTHING
            return self._scheduler.died(backend, now, why, log)

        self._apply(fact)
        self._doubts.settle(backend)

    def unanswering(self, backend: str, *, loaded: float) -> None:
        """The engine answers nobody; nothing follows if it was loaded anew since ``loaded``."""

        def fact(now: float) -> Effects:
            slot = self._scheduler.layout.slot(backend)
            is_same = slot is not None and slot.loaded == loaded
            return self._scheduler.unanswering(backend, now) if is_same else NOTHING

        self._apply(fact)

    def unreachable(self, lease: Lease) -> Crash | None:
        """A request got no whole answer: how its backend ended under it, if it has."""
        return self._doubts.raised_by(lease.ticket, lease.backend)

    def is_heard(self, backend: str, since: float) -> bool:
        """Whether any request got a part of an answer from the backend since a moment."""
        with self._lock:
            slot = self._scheduler.layout.slot(backend)
            answered = slot.answered if slot else -FOREVER
        return answered > since or self._has_heard(self._runs[backend].address, since)

    def memory_seen(self, held: Mapping[str, int]) -> None:
        """Other processes hold so many bytes of these GPUs."""
        self._apply(partial(self._scheduler.memory_seen, held))

    def host_lost(self, host: str) -> None:
        """Take a host as lost: its leases are cut, and nothing is begun there until it is back."""
        self._apply(partial(self._scheduler.host_lost, host))

    def host_back(
        self, host: str, running: Mapping[str, str], standby: Mapping[str, Evicted] | None = None
    ) -> None:
        """A lost host is heard of again: these backends run there (name -> URL), or are in standby."""
        found = {name: FoundBackend() for name in running}
        found |= {n: FoundBackend(e.how, e.residual, e.host_bytes) for n, e in (standby or {}).items()}

        def fact(now: float) -> Effects:
            self._runs |= {name: EngineRun(address_of(url)) for name, url in running.items()}
            return self._scheduler.host_back(host, now, found)

        self._apply(fact)

    def host_gone(self, host: str) -> None:
        """Nothing runs any more on a lost host."""
        self._apply(partial(self._scheduler.host_gone, host))

    def observed(self, backend: str, load: EngineLoad | None) -> None:
        """The engine of a replica said this of itself; None: it answered, and has no figures."""
        self._apply(partial(self._scheduler.observed, backend, load))

    def silent(self, backend: str) -> None:
        """The engine of a replica does not answer."""
        self._apply(partial(self._scheduler.silent, backend))

    def hear(self, told: Mapping[str, Sequence[Report]]) -> None:
        """Take the reports of all other anvil-mux on the replicas that are shared with them."""
        self._apply(partial(self._scheduler.heard, told))

    def unload_idle(self, model: str) -> bool:
        """Evicts ``model`` once nobody uses it, unless somebody asks for it before; True: that is now.

        Whoever has just read the last byte of an answer holds its lease for a moment longer.
        """
        return self._unload(model, when_idle=True)

    def unload(self, model: str) -> bool:
        """Evicts ``model`` after its drain, and stops one in standby; False if there is nothing to be done.

        A load under way is cancelled, and requests that wait for it fail.
        """
        return self._unload(model, when_idle=False)

    def _unload(self, model: str, *, when_idle: bool) -> bool:
        def fact(now: float) -> Effects:
            self._model(model)
            return self._scheduler.unload_asked(model, now, when_idle=when_idle)

        return self._apply(fact) is not NOTHING

    def pin(self, model: str, pinned: bool) -> None:
        """Whether ``model``, once it is resident, is kept from being evicted for others."""

        def fact(now: float) -> Effects:
            self._model(model)
            return self._scheduler.pinned(model, now, pinned)

        self._apply(fact)

    def expect(self, backends: Iterable[str]) -> None:
        """Begin nothing beside backends that may run already until each was adopted or ``looked_at``."""
        self._apply(lambda now: self._scheduler.expected(backends))

    def looked_at(self, backends: Iterable[str]) -> None:
        """Say that it is known whether backends ran; what was not adopted holds nothing (any more)."""
        for name in backends:
            self._apply(partial(self._scheduler.looked_at, name))

    def adopt(self, running: Mapping[str, str], standby: Mapping[str, Evicted] | None = None) -> list[str]:
        """Takes over backends that run already (name -> URL), or are in standby; returns what cannot stay."""
        refused = [name for name, url in running.items() if not self._adopt(name, address_of(url))]
        return refused + [name for name, left in (standby or {}).items() if not self._adopt(name, None, left)]

    def _adopt(self, name: str, address: tuple[str, int] | None, left: Evicted | None = None) -> bool:
        def fact(now: float) -> Effects:
            slot = self._scheduler.layout.slot(name)
            if slot is None or slot.state != "stopped":
                return Effects()
            self._loads.pop(name, None)
            if address:
                self._runs[name] = EngineRun(address)
                return self._scheduler.adopted(name, now)
            assert left is not None
            return self._scheduler.adopted_standby(name, now, left.how, left.residual, left.host_bytes)

        return self._apply(fact) is not NOTHING

    def reconfigure(
        self, config: Config, running: Mapping[str, str], standby: Mapping[str, Evicted] | None = None
    ) -> list[str]:
        """Apply another configuration while requests run on; the rest is as with ``adopt``."""
        found = [*running, *(standby or {})]

        def fact(now: float) -> Effects:
            self._take(config)
            effects = self._scheduler.reconfigured(config, now, expected=found)
            started = {slot.name: slot.backend for slot in self._scheduler.layout.slots}
            self._backends = {**self._backends, **started}
            return effects

        self._apply(fact)
        refused = self.adopt(running, standby)
        self.looked_at(found)
        return refused

    def tell(self, kind: str, cause: Cause) -> None:
        """Something happened to the whole program."""
        with self._lock:
            self._log(Event(self._clock.now(), kind, "", cause=cause))

    # Steps

    def start(self) -> None:
        """Starts the thread that has steps performed; its threads run on the CPUs of this one."""
        self._workers.start()

    def _loaded(self, step: Load, address: tuple[str, int], how: str, now: float) -> Effects:
        effects = self._scheduler.loaded(step, now, how)
        if effects is not NOTHING:
            self._runs[step.backend] = EngineRun(address)
            self._loads[step.backend] = step.number
        return effects

    # The end

    def refuse(self) -> None:
        """Refuse every request from now on, waiting or new: the program is shutting down."""
        error = Draining("anvil-mux is shutting down. Try again when it is back.")

        def fact(now: float) -> Effects:
            self._closing = error
            return self._scheduler.refused(error, now)

        self._apply(fact)

    def sever(self) -> int:
        """Cuts every request that still runs, and says how many."""
        return len(self._apply(self._scheduler.severed).cut)

    def close(self) -> None:
        """Begins no step any more; those under way go on. What is resident stays resident."""
        with self._lock:
            self._scheduler.closed()
            self._doubts.close()
            self._workers.close()

    # State

    def wall(self, moment: float) -> float:
        """The Unix time of a moment of its events and its status."""
        return self._clock.wall(moment)


def _cut(ticket: Ticket) -> None:
    cut = ticket.cut  # the lease may end just now
    try:
        if cut:
            cut()
    except Exception:  # a worker must not end
        log.exception("cutting a severed request for %s", ticket.model)
