"""One lock, a lease per request, a worker thread per GPU (per backend where backends share one) and one more.

``with mux.lease(model) as lease:`` is the whole interface of the serve path. Under the lock a request is told
to its GPU group's ``GpuGroup``; if its model is resident it has its lease at once, else its thread waits for
a latch of its own. The GPU group's workers wait for the GPU group's next step, perform it without the lock
(stop a container, start one, wait until it answers: minutes, if need be) and report how it ended. There is
one more than there can be such steps at once, so that one is always there to cancel a load.

Threads wait in two functions: ``_wait_for_lease`` (requests, without the lock: a queue of hundreds that is
admitted at once must not queue up for it) and ``_next_step`` (workers, on the lock). Nothing slow happens
while the lock is held. Any thread may call any public method.

A backend whose request failed is doubted, and a thread begins that looks into it (``_look_into``) and ends
with the doubt: its service has ended, or it is heard of, or nothing is heard of it within a bound that no
load can make it miss. Only then is it stopped. The request waits a moment for what is found
(``unreachable``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Protocol
from urllib.parse import urlsplit

from anvil_mux.clock import Clock, Condition, Latch
from anvil_mux.config.config import Backend, Config, Gpu
from anvil_mux.config.keys import Key
from anvil_mux.errors import (
    Cancelled,
    ClientGone,
    Draining,
    LoadError,
    MuxError,
    Overloaded,
    Severed,
    TooManyRequests,
    UnknownModel,
    WaitedTooLong,
)
from anvil_mux.host.swap import Evicted, Loaded
from anvil_mux.routing.in_flight import Load, Report
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.causes import Cause, Severance
from anvil_mux.scheduler.costs import Cost, Costs
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.footprint import Footprint, Footprints
from anvil_mux.scheduler.group import LOADING, GpuGroup
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.progress import Progress, Said, progress
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.status import Status, Waiter, gpu_state, model_state
from anvil_mux.scheduler.steps import NO_WORK, Cancel, Crash, Demote, Start, Step, Stop, Ticket, Wait
from anvil_mux.scheduler.wait_estimate import WaitEstimate, wait_estimate

log = logging.getLogger(__name__)

TEND_SECONDS = 0.25
"""How often a waiting request looks at its client."""

Usage = tuple[int | None, int | None]
"""Tokens of a request's input, and how many of them were cached, as its engine said; None: it did not."""
NO_USAGE: Usage = (None, None)

KNOWN_SECONDS = 2.0
"""What a failed request waits to learn whether its engine has ended; Docker knows some 0.1 s later."""
REFUSED_SECONDS = 30.0
"""After which an engine is stopped that runs, takes no connection and says nothing on those that it has.

Load does not make engines refuse: where more come than are accepted, they wait. One that is silent may be at
work, and is given as long as a request would be (``upstream_timeout``).
"""
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Between two looks at an engine in doubt."""

Tend = Callable[[float], None]


class Mechanism(Protocol):
    """What the workers call, without the lock. See swap.Swapper."""

    def load(self, backend: Backend, how: str, cancelled: Latch) -> Loaded: ...
    def evict(self, backend: Backend, how: str) -> Evicted: ...
    def demote(self, backend: Backend, how: str, to: str) -> Evicted: ...
    def ended(self, backend: Backend) -> str | None: ...
    def answers(self, backend: Backend, limit: float) -> bool | None: ...
    def last_words(self, backend: Backend) -> list[str]: ...


class _Doubt:
    """Whether a resident backend is still there, since a request got no answer from it."""

    __slots__ = ("loaded", "since", "waiting")

    def __init__(self, loaded: float, since: float) -> None:
        self.loaded = loaded
        """Tells its runs apart."""
        self.since = since
        self.waiting: list[Latch] = []
        """Of requests that wait for the first finding."""


class Run:
    """One run of an engine, since it was ready. Compared by identity: the next at its address is another."""

    __slots__ = ("address",)

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address


class Lease:
    """One request's hold on a resident backend. A context manager; leaving it releases, once."""

    __slots__ = ("_mux", "_ticket", "address", "backend", "prefill", "run", "waited", "why")

    def __init__(self, mux: Multiplexer, ticket: Ticket) -> None:
        assert ticket.backend is not None
        self._mux = mux
        self._ticket = ticket
        self.backend = mux._backends[ticket.backend]
        self.run = mux._runs[ticket.backend]
        self.address = self.run.address
        self.why = ticket.choice.why if ticket.choice else ""
        """Why this backend, where the model has several."""
        self.waited = 0.0
        """Seconds in the queue."""
        self.prefill: Lease | None = None
        """Of the first stage, where the request is to be served in two; it may be left before this one."""

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: object = None, *exc: object) -> None:
        self.release(whole=kind is None)

    def release(self, *, whole: bool = False, usage: Usage = NO_USAGE) -> None:
        """Any number of times; the first counts. ``whole``: the engine gave its answer to the end.

        ``usage`` is of use where ``is_routed``.
        """
        if self.prefill:
            self.prefill.release()
        self._mux._release(self._ticket, usage, whole)
        # It leads back to this lease: without a cycle nothing is left for the garbage collector.
        self._ticket.cut = None

    @property
    def foreseen(self) -> float | None:
        """The part of its input that is thought to be cached there; None where nobody thought of that."""
        choice, tokens = self._ticket.choice, self._ticket.work.tokens
        return choice.hit_tokens / tokens if choice and tokens and not self.prefill else None

    @property
    def is_routed(self) -> bool:
        """Its backend was chosen among several replicas, and what becomes of it counts for later choices."""
        return self._ticket.choice is not None

    def first_byte(self) -> bool:
        """The answer begins to come. False: the request was taken back before; nothing of it may be shown.

        Called once, by any thread, before a byte is shown to the client.
        """
        return self._ticket.choice is None or self._mux._first_byte(self._ticket)

    @property
    def severed(self) -> bool:
        """The drain ended before this request did; whatever it still does is cut."""
        return self._ticket.severed is not None

    @property
    def taken_back(self) -> bool:
        """It was severed because a better replica became free: the request has to be leased anew."""
        return self._ticket.taken_back

    @property
    def crash(self) -> Crash | None:
        """The backend ended under it."""
        return self._ticket.crash

    def on_severed(self, cut: Callable[[], None]) -> None:
        """``cut`` is called from another thread, outside the lock, when the lease is severed.

        It may be called a second time by this thread if that happens right now, so it must be idempotent.
        """
        self._ticket.cut = cut
        if self._ticket.severed:
            cut()

    def severed_error(self) -> Severed:
        # Where nobody severed it, the thread that moves streams has ended.
        severance = self._ticket.severed or Severance(Cause("shutdown"))
        return Severed(f"{severance.sentence(self._ticket.model)}. Send it again.")


class _Driver:
    """A GPU group, the condition its workers wait on, and how many of them were started here.

    GPU groups that a reload ties together share GPU group and condition from then on.
    """

    __slots__ = ("changed", "group", "keepers")

    def __init__(self, group: GpuGroup, changed: Condition) -> None:
        self.group = group
        self.changed = changed
        self.keepers = 0


class Multiplexer:
    """Leases backends to requests; its workers swap them.

    ``log`` takes every event, under the lock; without ``log_leases`` none of leases that begin and end.
    ``has_heard(address, since)``: whether an engine has sent anybody a part of an answer since that moment.
    """

    def __init__(
        self,
        config: Config,
        mechanism: Mechanism,
        *,
        log: Callable[[Event], object],
        log_leases: bool = True,
        costs: Iterable[Cost] = (),
        footprints: Iterable[Footprint] = (),
        clock: Clock | None = None,
        has_heard: Callable[[tuple[str, int], float], bool] = lambda address, since: False,
    ) -> None:
        self._mechanism = mechanism
        self._has_heard = has_heard
        self._log = log
        self._clock = clock or Clock()
        # Replaced as a whole, under the lock, and never altered: whoever only reads them needs none.
        self._backends: dict[str, Backend] = {}  # as they were last started; those that went too
        self._take(config)
        # The lock guards everything below it. It is held for microseconds: no I/O, no engine, no Docker.
        self._lock = self._clock.lock()
        self._scheduler = Scheduler(config, log, Costs(costs), Footprints(footprints), emit_leases=log_leases)
        self._every: list[_Driver] = []  # each has workers of its own
        self._drivers: dict[str, _Driver] = {}  # model -> GPU group
        self._homes: dict[GpuGroup, _Driver] = {}
        self._runs: dict[str, Run] = {}  # backend -> the last that was seen of it
        self._until: dict[GpuGroup, float] = {}  # when each is asked again without a new fact
        self._costs, self._footprints = self._scheduler.costs, self._scheduler.footprints
        self._host = self._scheduler.host
        self._doubts: dict[str, _Doubt] = {}  # by backend
        self._said: dict[str, Said] = {}  # backend -> what its log says of the load that is under way
        self._cancelled: dict[str, Latch] = {}  # backend -> set when its load, the last one, is cancelled
        self._tickets = 0
        self._waiting = 0
        self._requests: Counter[Key] = Counter()  # of keys that have a limit; and how many of them wait
        self._waiters: Counter[Key] = Counter()
        self._closing: MuxError | None = None
        self._closed = False
        self._settle_down({})

    def _take(self, config: Config) -> None:
        self._config = config
        self._replicas = Counter(backend.model for backend in config.backends)
        self._names = config.names

    def _settle_down(self, places: Mapping[GpuGroup, GpuGroup]) -> None:
        """Under the lock: GPU groups took the place of others."""
        homes: dict[GpuGroup, _Driver] = {}
        for driver in self._every:
            driver.changed.notify_all()
            driver.group = places.get(driver.group, driver.group)
            driver.changed = homes.setdefault(driver.group, driver).changed
        for group in self._scheduler.groups:
            if group not in homes:
                homes[group] = _Driver(group, self._clock.condition(self._lock))
                self._every.append(homes[group])
        self._homes, self._until = homes, {}
        self._drivers = {model: homes[place] for model, place in self._scheduler.of_model.items()}
        slots = [slot for group in homes for slot in group.slots.values()]
        self._backends = {**self._backends, **{slot.name: slot.backend for slot in slots}}

    def __repr__(self) -> str:
        with self._lock:
            return f"<Multiplexer {[driver.group for driver in self._each_driver()]}>"

    def _each_driver(self) -> list[_Driver]:
        return list(self._homes.values())

    def _driver(self, model: str) -> _Driver:
        """UnknownModel if it was served until a moment ago."""
        try:
            return self._drivers[model]
        except KeyError:
            raise UnknownModel(model, self._replicas) from None

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
            return self._driver(model).group.is_ready(model)

    def backend(self, name: str) -> Backend | None:
        """As it was last started or is to be, also if the configuration has it no longer."""
        return self._backends.get(name)

    def leaving(self) -> list[Backend]:
        """Those that go because the configuration has changed, and have not gone yet."""
        with self._lock:
            return [slot.backend for driver in self._each_driver() for slot in driver.group.leaving]

    def bytes_per_token(self, model: str) -> float:
        """Of a model with several backends."""
        return self._driver(model).group.bytes_per_token(model)

    def explain(
        self, model: str, work: Work = NO_WORK, *, staged: bool = False
    ) -> dict[str, list[dict[str, Any]]]:
        """Stage -> what would be made of each replica of ``model``; empty where it has but one backend."""
        if self._replicas[model] == 1:
            return {}
        with self._lock:
            return self._driver(model).group.explain(model, work, self._clock.now(), staged=staged)

    def has_another(self, lease: Lease) -> bool:
        """Whether a request may be sent to another backend of its model without waiting for a load."""
        with self._lock:
            model = lease.backend.model
            slots = self._drivers[model].group.slots_of(model) if model in self._drivers else ()
            return any(slot.state == "ready" and slot.name != lease.backend.name for slot in slots)

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
        lease = Lease(self, ticket)
        if ticket.wake:
            lease.waited = self._clock.now() - ticket.since
        if ticket.prefill and ticket.prefill.backend:
            lease.prefill = Lease(self, ticket.prefill)
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
            driver = self._drivers[model]
            if self._waiting >= self._config.max_queue and not driver.group.takes(model, work.owner):
                raise Overloaded(f"overloaded: {self._waiting} requests wait for models already. Try again.")
            if key and key.waiting is not None and not driver.group.takes(model, work.owner):
                self._check_waiters(key, key.waiting)
            self._tickets += 1
            first = self._first_stage(model, now, work) if staged else None
            ticket = Ticket(self._tickets, model, now, leases, work, first, key, crashes)
            if driver.group.request(ticket, now):
                driver.changed.notify()
            if ticket.backend is None and ticket.error is None:
                ticket.wake = self._clock.latch()
                self._count_waiting(ticket, 1)
        if ticket.wake:
            self._wait(driver, ticket, tend)
        if ticket.error:
            # One error may end a whole queue: each thread raises it without the others' frames.
            raise ticket.error.with_traceback(None)
        return ticket

    def _first_stage(self, model: str, now: float, work: Work) -> Ticket:
        """Its input is computed without a stream, so nothing of it is seen before it is done."""
        self._tickets += 1
        return Ticket(self._tickets - 1, model, now, work=work._replace(infer_type="prefill", stream=False))

    def _check_waiters(self, key: Key, limit: int) -> None:
        count = self._waiters[key]
        if count >= limit:
            raise TooManyRequests(f"This API key has {count} requests waiting, and may not have more.")

    def _count_waiting(self, ticket: Ticket, change: int) -> None:
        """Under the lock: a ticket waits, or waits no longer."""
        self._waiting += change
        if isinstance(ticket.sender, Key) and ticket.sender.waiting is not None:
            self._waiters[ticket.sender] += change

    def _wait(self, driver: _Driver, ticket: Ticket, tend: Tend | None) -> None:
        pause = TEND_SECONDS if tend else FOREVER
        try:
            while not self._wait_for_lease(driver, ticket, pause):
                assert tend is not None
                tend(self._clock.now())
        except BaseException as error:
            with self._lock:
                self._abandon(driver, ticket, error)
            raise

    def _wait_for_lease(self, driver: _Driver, ticket: Ticket, pause: float) -> bool:
        """Waits until the ticket ends, at most ``pause`` seconds, and never past ``queue_timeout``."""
        limit = self._config.queue_timeout
        deadline = ticket.since + limit
        now = self._clock.now()
        if ticket.wake.wait(min(deadline, now + pause) - now):
            return True
        now = self._clock.now()
        if now < deadline:
            return False
        with self._lock:
            if not ticket.settled:
                busy = driver.group.is_ready(ticket.model)
                what = "had no place for this request" if busy else "did not become resident"
                error = WaitedTooLong(f"{ticket.model} {what} within {limit:g} s.")
                self._leave_line(driver, ticket, now, error)
        return True

    def _abandon(self, driver: _Driver, ticket: Ticket, error: BaseException) -> None:
        """Under the lock: the request's thread stops waiting because ``tend`` raised."""
        now = self._clock.now()
        if ticket.backend:
            if ticket.prefill:
                driver.group.release(ticket.prefill, now, whole=False)
            driver.group.release(ticket, now, whole=False)
            self._wake_settled(driver)
            driver.changed.notify_all()
        elif not ticket.error:
            known = isinstance(error, MuxError) and not isinstance(error, ClientGone)
            self._leave_line(driver, ticket, now, error if known else None)  # type: ignore[arg-type]

    def _leave_line(self, driver: _Driver, ticket: Ticket, now: float, error: MuxError | None) -> None:
        driver.group.give_up(ticket, now, error)
        self._count_waiting(ticket, -1)
        driver.changed.notify_all()

    def cancel(self, number: int) -> bool:
        """Ends the wait of one request, which is told so; False if no ticket of that number waits."""
        with self._lock:
            queues = ((driver, t) for m, driver in self._drivers.items() for t in driver.group.queues[m])
            driver, waiting = next(((driver, t) for driver, t in queues if t.id == number), (None, None))
            if driver is None or waiting is None:
                return False
            error = Cancelled(f"This request for {waiting.model} was taken out of its queue.")
            self._leave_line(driver, waiting, self._clock.now(), error)
            waiting.wake.set()
        return True

    def _release(self, ticket: Ticket, usage: Usage, whole: bool) -> None:
        with self._lock:
            driver = self._drivers.get(ticket.model)
            if driver is None:
                return
            group = driver.group
            if group.release(ticket, self._clock.now(), usage, whole=whole):
                driver.changed.notify()
            if group.settled:
                self._wake_settled(driver)
            taken_back = group.taken_back and self._taken_back(driver)
        for each in taken_back:
            _cut(each)

    def _taken_back(self, driver: _Driver) -> list[Ticket]:
        """Under the lock: those that are to be cut outside of it."""
        found, driver.group.taken_back = driver.group.taken_back, []
        return found

    def _first_byte(self, ticket: Ticket) -> bool:
        with self._lock:
            driver = self._drivers.get(ticket.model)
            return not ticket.severed if driver is None else driver.group.first_byte(ticket)

    # Facts from outside

    def loaded_at(self, backend: str) -> float | None:
        """When the backend was last loaded, which tells its runs apart."""
        with self._lock:
            group = self._scheduler.of_backend.get(backend)
            return group.slots[backend].loaded if group and backend in group.slots else None

    def died(self, backend: str, why: str, log: Iterable[str] = (), *, loaded: float | None = None) -> None:
        """The backend's service ended, and nobody here told it to.

        ``log``: what it had printed last. ``loaded``: nothing has happened if it was loaded anew since then.
        """

        def fact(group: GpuGroup, now: float) -> None:
            if loaded is None or group.slots[backend].loaded == loaded:
                group.died(backend, now, why, log)

        self._tell(backend, fact)
        self._settle_doubt(backend)

    def last_words(self, backend: str) -> tuple[str, ...]:
        """What the engine of a backend printed before it failed; () once it is loaded again."""
        with self._lock:
            group = self._scheduler.of_backend.get(backend)
            return group.slots[backend].log if group else ()

    def memory_seen(self, held: Mapping[str, int]) -> None:
        """Programs that are none of ours hold so many bytes of these GPUs."""
        with self._lock:
            for driver in self._each_driver():
                if driver.group.memory_seen(held):
                    driver.changed.notify_all()

    def unreachable(self, lease: Lease) -> Crash | None:
        """A request got no whole answer: how its backend ended under it, if it has.

        While that is not known the backend is doubted. Nothing is done if the lease is over: then it speaks
        of a backend that was replaced since.
        """
        backend, ticket = lease.backend, lease._ticket
        with self._lock:
            group = self._scheduler.of_backend.get(backend.name)
            slot = group.slots.get(backend.name) if group else None
            if slot is None or ticket not in slot.holders:
                return ticket.crash
            doubt = self._doubts.get(backend.name)
            is_new = doubt is None or doubt.loaded != slot.loaded
            if doubt is None or is_new:
                doubt = self._doubts[backend.name] = _Doubt(slot.loaded, self._clock.now())
            found = self._clock.latch()
            doubt.waiting.append(found)
        if is_new:
            self._clock.spawn(partial(self._look_into, backend, doubt), f"doubt-{backend.name}")
        found.wait(KNOWN_SECONDS)
        return ticket.crash

    def _look_into(self, backend: Backend, doubt: _Doubt) -> None:
        """The life of a doubt's thread."""
        pause = FIRST_PAUSE
        try:
            while self._is_open(backend.name, doubt) and not self._is_found(backend, doubt):
                self._clock.latch().wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self._settle_doubt(backend.name, doubt)

    def _is_found(self, backend: Backend, doubt: _Doubt) -> bool:
        """Asks once what has become of the backend, and does what follows from it; False: ask again."""
        name, limit = backend.name, self._config.upstream_timeout
        if why := self._mechanism.ended(backend):
            self.died(name, why, self._mechanism.last_words(backend), loaded=doubt.loaded)
            return True
        left = doubt.since + limit - self._clock.now()
        answers = self._mechanism.answers(backend, left) if left > 0 else None
        if answers or self._is_heard(name, doubt):
            return True
        if self._clock.now() - doubt.since < (REFUSED_SECONDS if answers is False else limit):
            return False
        self._tell(name, partial(self._give_up_on, name, doubt))
        return True

    def _is_open(self, name: str, doubt: _Doubt) -> bool:
        """Whether the doubt still is of the backend that is resident."""
        with self._lock:
            group = self._scheduler.of_backend.get(name)
            slot = group.slots[name] if group else None
            here = slot is not None and slot.loaded == doubt.loaded and slot.state in ("ready", "draining")
            return here and self._doubts.get(name) is doubt and not self._closed

    def _is_heard(self, name: str, doubt: _Doubt) -> bool:
        """Whether any request got a part of an answer from the backend since it is doubted."""
        with self._lock:
            group = self._scheduler.of_backend.get(name)
            answered = group.slots[name].answered if group else -FOREVER
        return answered > doubt.since or self._has_heard(self._runs[name].address, doubt.since)

    def _give_up_on(self, name: str, doubt: _Doubt, group: GpuGroup, now: float) -> None:
        if group.slots[name].loaded == doubt.loaded:
            group.unanswering(name, now)

    def _settle_doubt(self, name: str, doubt: _Doubt | None = None) -> None:
        """Whatever was found, requests that wait for it go on."""
        with self._lock:
            if doubt is None or self._doubts.get(name) is doubt:
                doubt = self._doubts.pop(name, None)
            waiting = doubt.waiting if doubt else []
            if doubt:
                doubt.waiting = []
        for found in waiting:
            found.set()

    def resident_replicas(self) -> list[tuple[Backend, tuple[str, int]]]:
        """Those that may be leased, of models with several backends, and where they listen."""
        with self._lock:
            found = [
                slot.backend
                for model, count in self._replicas.items()
                if count > 1
                for slot in self._drivers[model].group.slots_of(model)
                if slot.state == "ready"
            ]
            return [(backend, self._runs[backend.name].address) for backend in found]

    def observed(self, backend: str, load: Load | None) -> None:
        """The engine of a replica said this of itself; None: it answered, and has no figures."""
        with self._lock:
            if group := self._scheduler.of_backend.get(backend):
                group.observed(backend, load, self._clock.now())

    def silent(self, backend: str) -> None:
        """The engine of a replica does not answer."""
        self._tell(backend, lambda group, now: group.silent(backend, now))

    def reports(self) -> dict[str, Report]:
        """What other anvil-mux are told of the replicas that are shared with them."""
        with self._lock:
            now = self._clock.now()
            drivers = self._each_driver()
            return {name: each for i in drivers for name, each in i.group.reports(now).items()}

    def hear(self, told: Mapping[str, Sequence[Report]]) -> None:
        """What all other anvil-mux tell of the replicas that are shared with them."""
        with self._lock:
            for driver in self._each_driver():
                driver.group.hear(told, self._clock.now())

    def unload_idle(self, model: str) -> bool:
        """Puts ``model`` out once nobody uses it, unless somebody asks for it before; True: that is now.

        Whoever has just read the last byte of an answer holds its lease for a moment longer.
        """
        with self._lock:
            driver = self._driver(model)
            told = driver.group.unload_when_idle(model, self._clock.now())
            if told:
                driver.changed.notify_all()
        return told

    def unload(self, model: str) -> bool:
        """Puts ``model`` out after its drain, and stops one that rests; False if there is nothing to be done.

        One that is being loaded is so no longer, and who waits for it is told that.
        """
        with self._lock:
            driver = self._driver(model)
            told = driver.group.unload_requested(model, self._clock.now())
            self._wake_settled(driver)
            driver.changed.notify_all()
        return told

    def pin(self, model: str, pinned: bool) -> None:
        """Whether ``model``, once it is resident, is kept from being evicted for others."""
        with self._lock:
            driver = self._driver(model)
            changes = self._host.changes
            driver.group.pin_requested(model, self._clock.now(), pinned)
            self._wake_settled(driver)
            driver.changed.notify_all()
            self._ask_others(changes)

    def expect(self, backends: Iterable[str]) -> None:
        """They may run already: nothing is begun beside them until each was adopted or ``looked_at``."""
        with self._lock:
            for name in backends:
                self._scheduler.of_backend[name].expected(name)

    def looked_at(self, backends: Iterable[str]) -> None:
        """It is known of them whether they ran; what was not adopted holds nothing (any more)."""
        for name in backends:
            self._tell(name, lambda group, now, name=name: group.looked_at(name))  # type: ignore[misc]

    @property
    def unseen(self) -> list[str]:
        """The backends of which it is not known yet whether they run."""
        with self._lock:
            return sorted(name for driver in self._each_driver() for name in driver.group.unseen)

    def adopt(self, running: Mapping[str, str], standby: Mapping[str, Evicted] | None = None) -> list[str]:
        """Takes over backends that run already (name -> URL), or rest; returns those that cannot stay."""
        with self._lock:
            refused = self._adopt(running, standby or {}, self._clock.now())
            for driver in self._each_driver():
                self._wake_settled(driver)
                driver.changed.notify_all()
        return refused

    def _adopt(self, running: Mapping[str, str], standby: Mapping[str, Evicted], now: float) -> list[str]:
        refused = []
        for name in (*running, *standby):
            group = self._scheduler.of_backend.get(name)
            if group is None or group.slots[name].state != "stopped":
                continue
            if name in running:
                self._runs[name] = Run(_address(running[name]))
                stays = group.adopt(name, now)
            else:
                evicted = standby[name]
                about = evicted.how, evicted.residual, evicted.host_bytes
                stays = group.adopt_standby(name, now, *about)
            if not stays:
                refused.append(name)
        return refused

    def reconfigure(
        self, config: Config, running: Mapping[str, str], standby: Mapping[str, Evicted] | None = None
    ) -> list[str]:
        """From now on ``config`` holds, and requests that run go on; the rest is as with ``adopt``."""
        with self._lock:
            now = self._clock.now()
            self._take(config)
            self._settle_down(self._scheduler.reconfigure(config, now))
            refused = self._adopt(running, standby or {}, now)
            for driver in self._each_driver():
                self._wake_settled(driver)
                driver.changed.notify_all()
            lacking = self._lacking_keepers()
        self._start_keepers(lacking)
        return refused

    def tell(self, kind: str, cause: Cause) -> None:
        """Something happened to the whole program."""
        with self._lock:
            self._log(Event(self._clock.now(), kind, "", cause=cause))

    def _tell(self, backend: str, fact: Callable[[GpuGroup, float], object]) -> None:
        with self._lock:
            home = self._scheduler.of_backend.get(backend)
            if home is None:
                return
            driver, now = self._homes[home], self._clock.now()
            changes = self._host.changes
            fact(home, now)
            place = self._scheduler.settle(home, now)
            if place is not home:
                self._settle_down({home: place})
            self._wake_settled(driver)
            taken_back = self._taken_back(driver)
            driver.changed.notify_all()
            self._ask_others(changes)
        for ticket in taken_back:
            _cut(ticket)

    def _wake_settled(self, driver: _Driver) -> None:
        settled, driver.group.settled = driver.group.settled, []
        for ticket in settled:
            self._count_waiting(ticket, -1)
            ticket.wake.set()

    # Keepers

    def start(self) -> None:
        """Starts the workers."""
        with self._lock:
            lacking = self._lacking_keepers()
        self._start_keepers(lacking)

    def _lacking_keepers(self) -> list[tuple[_Driver, int]]:
        """Under the lock: those that are to be started now."""
        have = Counter[GpuGroup]()
        for driver in self._every:
            have[driver.group] += driver.keepers
        lacking = []
        for group, driver in self._homes.items():
            here = [slot.backend for slot in group.slots.values()]
            here += [b for b in self._config.backends if b.name in group.slots]
            for number in range(have[group], _steps_at_once(here)):
                driver.keepers += 1
                lacking.append((driver, number))
        return lacking

    def _start_keepers(self, lacking: Iterable[tuple[_Driver, int]]) -> None:
        for driver, number in lacking:
            self._clock.spawn(partial(self._keep, driver), f"keeper-{driver.group.name}-{number}")

    def _keep(self, driver: _Driver) -> None:
        """A worker's life: take a step, perform it, report how it ended."""
        while todo := self._next_step(driver):
            step, backend = todo
            match step:
                case Start(_, how):
                    self._load(backend, how, self._cancelled[backend.name])
                case Stop(_, how, severed):
                    self._evict(backend, how, severed)
                case Demote(_, how, to):
                    self._rest(backend, partial(self._mechanism.demote, backend, how, to))

    def _next_step(self, driver: _Driver) -> tuple[Step, Backend] | None:
        """Waits until the GPU group has a step to perform, and on whom; None when the program ends."""
        with self._lock:
            while not self._closed:
                now = self._clock.now()
                changes = self._host.changes
                step = driver.group.next_step(now)
                self._wake_settled(driver)
                self._ask_others(changes)
                if isinstance(step, Cancel):
                    self._cancelled[step.backend].set()
                    continue
                if not isinstance(step, Wait):
                    self._said.pop(step.backend, None)
                    if isinstance(step, Start):
                        self._cancelled[step.backend] = self._clock.latch()
                    driver.changed.notify_all()
                    return step, driver.group.slots[step.backend].backend
                self._until[driver.group] = until = step.until
                while not driver.changed.wait(None if until == FOREVER else until - now):
                    now, until = self._clock.now(), self._until.get(driver.group, 0.0)
                    if until <= now:  # else another worker has asked since
                        break
            return None

    def _ask_others(self, changes: int) -> None:
        """What one GPU group does with the host's memory, which had so many changes before, concerns all."""
        if self._host.budget is not None and self._host.changes != changes:
            for driver in self._each_driver():
                driver.changed.notify_all()

    def _load(self, backend: Backend, how: str, cancelled: Latch) -> None:
        name = backend.name
        try:
            loaded = self._mechanism.load(backend, how, cancelled)
            address = _address(loaded.url)
        except Cancelled:
            self._tell(name, lambda group, now: group.load_cancelled(name, now))
        except LoadError as error:
            failed = error
            self._tell(name, lambda group, now: group.load_failed(name, now, failed))
        except Exception as error:
            why = _text(error)
            self._tell(name, lambda group, now: group.evict_failed(name, now, why))
        else:
            self._tell(name, lambda group, now: self._started(group, name, address, loaded.how, now))

    def _started(self, group: GpuGroup, name: str, address: tuple[str, int], how: str, now: float) -> None:
        self._runs[name] = Run(address)
        group.loaded(name, now, how)

    def _evict(self, backend: Backend, how: str, severed: tuple[Ticket, ...]) -> None:
        for ticket in severed:
            _cut(ticket)
        self._rest(backend, partial(self._mechanism.evict, backend, how))

    def _rest(self, backend: Backend, perform: Callable[[], Evicted]) -> None:
        name = backend.name
        try:
            evicted = perform()
        except Exception as error:
            why = _text(error)
            self._tell(name, lambda group, now: group.evict_failed(name, now, why))
        else:
            left = evicted.residual, evicted.how, evicted.host_bytes, evicted.freed, evicted.died, evicted.log
            self._tell(name, lambda group, now: group.evicted(name, now, *left))

    # The end

    def refuse(self) -> None:
        """From now on every request, waiting or new, is refused: the program is shutting down."""
        with self._lock:
            self._closing = Draining("anvil-mux is shutting down. Try again when it is back.")
            for driver in self._each_driver():
                driver.group.fail_all(self._closing, self._clock.now())
                self._wake_settled(driver)
                driver.changed.notify_all()

    def sever(self) -> int:
        """Cuts every request that still runs, and says how many."""
        with self._lock:
            now = self._clock.now()
            severed = [ticket for i in self._each_driver() for ticket in i.group.sever_all(now)]
        for ticket in severed:
            _cut(ticket)
        return len(severed)

    def close(self) -> None:
        """Ends the workers after the step that each is in. What is resident stays resident."""
        with self._lock:
            self._closed = True
            for driver in self._each_driver():
                driver.changed.notify_all()

    # State

    def wall(self, moment: float) -> float:
        """The Unix time of a moment of its events and its status."""
        return self._clock.wall(moment)

    def eta(self, model: str) -> float | None:
        """Seconds until ``model`` is resident if its load takes as long as the last; None if never loaded.

        Not more than a guess: what it waits for before its load begins is not in it.
        """
        with self._lock:
            now = self._clock.now()
            group = self._driver(model).group
            slots = group.slots_of(model)
            far = self._progress(group, model, now)
            if far and far.seconds_left is not None:
                return far.seconds_left
            left = [
                slot.load_seconds - (now - slot.since if slot.state == "loading" else 0.0)
                for slot in slots
                if slot.load_seconds is not None
            ]
        return min(left, default=None)

    def how_far(self, model: str) -> str:
        """How far the load of ``model`` is, or how long it waits for one, in a few words for its clients."""
        with self._lock:
            group, now = self._driver(model).group, self._clock.now()
            far = self._progress(group, model, now)
            if far:
                return far.words
            left = wait_estimate(group, model, now, self._config.drain_timeout).seconds
        return "" if left is None else f"about {left:.0f} s left"

    def wait_estimate(self, model: str) -> WaitEstimate:
        """What a request for ``model`` would wait for now."""
        with self._lock:
            group, now = self._driver(model).group, self._clock.now()
            far = self._progress(group, model, now)
            return wait_estimate(group, model, now, self._config.drain_timeout, far)

    def report(self, backend: str, said: Said) -> None:
        """What the log of a backend says of its load."""
        with self._lock:
            self._said[backend] = said

    def _progress(self, group: GpuGroup, model: str, now: float) -> Progress | None:
        """Under the lock: how far the load of ``model`` is, if there is one and it is not resident too."""
        slots = [slot for slot in group.slots_of(model) if slot.state == "loading"]
        if not slots or group.is_ready(model):
            return None
        slot = slots[0]
        return progress(now - slot.since, group.expected_load(slot), self._said.get(slot.name))

    def costs(self) -> list[Cost]:
        """What swaps cost, as far as was learned."""
        with self._lock:
            return list(self._costs)

    def footprints(self) -> list[Footprint]:
        """What backends held, and kept while they evicted, as it was measured."""
        with self._lock:
            return list(self._footprints)

    def waiters(self, most: int) -> list[Waiter]:
        """The first ``most`` requests of each queue."""
        with self._lock:
            queues = [driver.group.queues[model] for model, driver in self._drivers.items()]
            return [Waiter(t.id, t.model, t.since) for queue in queues for t in islice(queue, most)]

    def loading(self, *, anew: bool = False) -> list[str]:
        """The backends that are being loaded; ``anew``: only those that were stopped before."""
        with self._lock:
            found = [(i.group, slot) for i in self._each_driver() for slot in i.group.slots.values()]
            starting = [(group, slot) for group, slot in found if slot.state in LOADING]
            return [s.name for group, s in starting if not anew or group.way_back(s) == "stop"]

    def status(self) -> Status:
        """A consistent picture, from memory."""
        with self._lock:
            now = self._clock.now()
            groups = [driver.group for driver in self._each_driver()]
            models = tuple(
                model_state(r, m, now, self._progress(r, m, now), self._footprints)
                for r in groups
                for m in r.queues
            )
            known = {gpu.id: gpu for gpu in self._config.gpus}
            gpus = tuple(gpu_state(r, known.get(id) or Gpu(id), now) for r in groups for id in r.gpus)
        waiting, leases = sum(m.waiting for m in models), sum(m.leases for m in models)
        return Status(now, models, gpus, waiting, leases)


def _cut(ticket: Ticket) -> None:
    cut = ticket.cut  # the lease may end just now
    try:
        if cut:
            cut()
    except Exception:  # a worker must not end
        log.exception("cutting a severed request for %s", ticket.model)


def _steps_at_once(backends: list[Backend]) -> int:
    """How many workers a GPU group needs, so that no drain, no retry and no cancel waits for a free one."""
    if any(b.vram or b.vram_measured or not b.gpus or b.evict_to != ("stop",) for b in backends):
        # Several share a GPU, or are taken down their standby levels while others swap.
        return len({backend.name for backend in backends}) + 1
    return len({gpu for backend in backends for gpu in backend.gpus}) + 1


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


def _text(error: Exception) -> str:
    return error.message if isinstance(error, MuxError) else f"{type(error).__name__}: {error}"
