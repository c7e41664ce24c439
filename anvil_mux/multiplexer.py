"""One lock, a lease per request, a keeper thread per GPU (per backend where backends share one) and one more.

``with mux.lease(model) as lease:`` is the whole interface of the serve path. Under the lock a request is told
to its island's ``Residency``; if its model is resident it has its lease at once, else its thread waits for a
latch of its own. The island's keepers wait for the residency's next step, perform it without the lock
(stop a container, start one, wait until it answers: minutes, if need be) and report how it ended. There is
one more than there can be such steps at once, so that one is always there to cancel a load.

Threads wait in two functions: ``_wait_for_lease`` (requests, without the lock: a line of hundreds that is
admitted at once must not queue up for it) and ``_next_step`` (keepers, on the lock). Nothing slow happens
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
from anvil_mux.host.swap import Loaded, Rested
from anvil_mux.protocol import api
from anvil_mux.routing.ledger import Load, Report
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.costs import Cost, Costs
from anvil_mux.scheduler.events import Cause, Event
from anvil_mux.scheduler.footprint import Footprint, Footprints
from anvil_mux.scheduler.layout import Layout
from anvil_mux.scheduler.outlook import Outlook, outlook
from anvil_mux.scheduler.policy import FOREVER
from anvil_mux.scheduler.progress import Progress, Said, progress
from anvil_mux.scheduler.residency import LOADING, Residency
from anvil_mux.scheduler.status import Status, Waiter, gpu_state, model_state
from anvil_mux.scheduler.steps import NO_WORK, Cancel, Crash, Demote, Start, Step, Stop, Ticket, Wait

log = logging.getLogger(__name__)

TEND_SECONDS = 0.25
"""How often a waiting request looks at its client."""
TAIL = 4096
"""Bytes at the end of an answer in which its engine says what it took."""

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
    """What the keepers call, without the lock. See swap.Swapper."""

    def load(self, backend: Backend, how: str, cancelled: Latch) -> Loaded: ...
    def evict(self, backend: Backend, how: str) -> Rested: ...
    def demote(self, backend: Backend, how: str, to: str) -> Rested: ...
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

    __slots__ = ("_mux", "_tail", "_ticket", "address", "backend", "prefill", "run", "waited", "why")

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
        """Seconds in the line."""
        self.prefill: Lease | None = None
        """Of the first stage, where the request is to be served in two; it may be left before this one."""
        self._tail = b""

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: object = None, *exc: object) -> None:
        self.release(whole=kind is None)

    def release(self, *, whole: bool = False) -> None:
        """Any number of times. ``whole``: the engine gave its answer to the end."""
        if self.prefill:
            self.prefill.release()
        self._mux._release(self._ticket, self._tail, whole)
        # It leads back to this lease: without a cycle nothing is left for the garbage collector.
        self._ticket.cut = None

    @property
    def foreseen(self) -> float | None:
        """The part of its input that is thought to be cached there; None where nobody thought of that."""
        choice, tokens = self._ticket.choice, self._ticket.work.tokens
        return choice.hit_tokens / tokens if choice and tokens and not self.prefill else None

    @property
    def watch(self) -> Callable[[bytes], bool] | None:
        """To be called with the bytes of the answer, in order, by any thread; None: they are of no use.

        False: the request was taken back before its first byte came, and the client must not see it.
        """
        return self._heard if self._ticket.choice else None

    def _heard(self, data: bytes) -> bool:
        if not self._tail and not self._mux._first_byte(self._ticket):
            return False
        self._tail = (self._tail + data)[-TAIL:]
        return True

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
        cause = self._ticket.severed or Cause("shutdown")  # the thread that moves streams has ended
        return Severed(f"{cause.sentence(self._ticket.model)}. Send it again.")


class _Island:
    """A residency, the condition its keepers wait on, and how many of them were started here.

    Islands that a reload ties together share residency and condition from then on.
    """

    __slots__ = ("changed", "keepers", "residency")

    def __init__(self, residency: Residency, changed: Condition) -> None:
        self.residency = residency
        self.changed = changed
        self.keepers = 0


class Multiplexer:
    """Leases backends to requests; its keepers swap them.

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
        self._layout = Layout(config, log, Costs(costs), Footprints(footprints), emit_leases=log_leases)
        self._every: list[_Island] = []  # each has keepers of its own
        self._islands: dict[str, _Island] = {}  # model -> island
        self._homes: dict[Residency, _Island] = {}
        self._runs: dict[str, Run] = {}  # backend -> the last that was seen of it
        self._until: dict[Residency, float] = {}  # when each is asked again without a new fact
        self._costs, self._footprints = self._layout.costs, self._layout.footprints
        self._host = self._layout.host
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

    def _settle_down(self, places: Mapping[Residency, Residency]) -> None:
        """Under the lock: residencies took the place of others."""
        homes: dict[Residency, _Island] = {}
        for island in self._every:
            island.changed.notify_all()
            island.residency = places.get(island.residency, island.residency)
            island.changed = homes.setdefault(island.residency, island).changed
        for residency in self._layout.residencies:
            if residency not in homes:
                homes[residency] = _Island(residency, self._clock.condition(self._lock))
                self._every.append(homes[residency])
        self._homes, self._until = homes, {}
        self._islands = {model: homes[place] for model, place in self._layout.of_model.items()}
        seats = [seat for residency in homes for seat in residency.seats.values()]
        self._backends = {**self._backends, **{seat.name: seat.backend for seat in seats}}

    def __repr__(self) -> str:
        with self._lock:
            return f"<Multiplexer {[island.residency for island in self._each_island()]}>"

    def _each_island(self) -> list[_Island]:
        return list(self._homes.values())

    def _island(self, model: str) -> _Island:
        """UnknownModel if it was served until a moment ago."""
        try:
            return self._islands[model]
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
            return self._island(model).residency.is_ready(model)

    def backend(self, name: str) -> Backend | None:
        """As it was last started or is to be, also if the configuration has it no longer."""
        return self._backends.get(name)

    def leaving(self) -> list[Backend]:
        """Those that go because the configuration has changed, and have not gone yet."""
        with self._lock:
            return [seat.backend for island in self._each_island() for seat in island.residency.leaving]

    def bytes_per_token(self, model: str) -> float:
        """Of a model with several backends."""
        return self._island(model).residency.bytes_per_token(model)

    def explain(
        self, model: str, work: Work = NO_WORK, *, staged: bool = False
    ) -> dict[str, list[dict[str, Any]]]:
        """Stage -> what would be made of each replica of ``model``; empty where it has but one backend."""
        if self._replicas[model] == 1:
            return {}
        with self._lock:
            return self._island(model).residency.explain(model, work, self._clock.now(), staged=staged)

    def has_another(self, lease: Lease) -> bool:
        """Whether a request may be sent to another backend of its model without waiting for a load."""
        with self._lock:
            model = lease.backend.model
            seats = self._islands[model].residency.seats_of(model) if model in self._islands else ()
            return any(seat.state == "ready" and seat.name != lease.backend.name for seat in seats)

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
            island = self._islands[model]
            if self._waiting >= self._config.max_queue and not island.residency.takes(model, work.owner):
                raise Overloaded(f"overloaded: {self._waiting} requests wait for models already. Try again.")
            if key and key.waiting is not None and not island.residency.takes(model, work.owner):
                self._check_waiters(key, key.waiting)
            self._tickets += 1
            first = self._first_stage(model, now, work) if staged else None
            ticket = Ticket(self._tickets, model, now, leases, work, first, key, crashes)
            if island.residency.request(ticket, now):
                island.changed.notify()
            if ticket.backend is None and ticket.error is None:
                ticket.wake = self._clock.latch()
                self._count_waiting(ticket, 1)
        if ticket.wake:
            self._wait(island, ticket, tend)
        if ticket.error:
            # One error may end a whole line: each thread raises it without the others' frames.
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

    def _wait(self, island: _Island, ticket: Ticket, tend: Tend | None) -> None:
        pause = TEND_SECONDS if tend else FOREVER
        try:
            while not self._wait_for_lease(island, ticket, pause):
                assert tend is not None
                tend(self._clock.now())
        except BaseException as error:
            with self._lock:
                self._abandon(island, ticket, error)
            raise

    def _wait_for_lease(self, island: _Island, ticket: Ticket, pause: float) -> bool:
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
                busy = island.residency.is_ready(ticket.model)
                what = "had no place for this request" if busy else "did not become resident"
                error = WaitedTooLong(f"{ticket.model} {what} within {limit:g} s.")
                self._leave_line(island, ticket, now, error)
        return True

    def _abandon(self, island: _Island, ticket: Ticket, error: BaseException) -> None:
        """Under the lock: the request's thread stops waiting because ``tend`` raised."""
        now = self._clock.now()
        if ticket.backend:
            if ticket.prefill:
                island.residency.release(ticket.prefill, now, whole=False)
            island.residency.release(ticket, now, whole=False)
            self._wake_settled(island)
            island.changed.notify_all()
        elif not ticket.error:
            known = isinstance(error, MuxError) and not isinstance(error, ClientGone)
            self._leave_line(island, ticket, now, error if known else None)  # type: ignore[arg-type]

    def _leave_line(self, island: _Island, ticket: Ticket, now: float, error: MuxError | None) -> None:
        island.residency.give_up(ticket, now, error)
        self._count_waiting(ticket, -1)
        island.changed.notify_all()

    def cancel(self, number: int) -> bool:
        """Ends the wait of one request, which is told so; False if no ticket of that number waits."""
        with self._lock:
            lines = ((island, t) for m, island in self._islands.items() for t in island.residency.lines[m])
            island, waiting = next(((island, t) for island, t in lines if t.id == number), (None, None))
            if island is None or waiting is None:
                return False
            error = Cancelled(f"This request for {waiting.model} was taken out of its line.")
            self._leave_line(island, waiting, self._clock.now(), error)
            waiting.wake.set()
        return True

    def _release(self, ticket: Ticket, tail: bytes, whole: bool) -> None:
        usage = api.tokens_said(tail)[1:] if tail else (None, None)
        with self._lock:
            island = self._islands.get(ticket.model)
            if island is None:
                return
            residency = island.residency
            if residency.release(ticket, self._clock.now(), usage, whole=whole):
                island.changed.notify()
            if residency.settled:
                self._wake_settled(island)
            taken_back = residency.taken_back and self._taken_back(island)
        for each in taken_back:
            _cut(each)

    def _taken_back(self, island: _Island) -> list[Ticket]:
        """Under the lock: those that are to be cut outside of it."""
        found, island.residency.taken_back = island.residency.taken_back, []
        return found

    def _first_byte(self, ticket: Ticket) -> bool:
        with self._lock:
            island = self._islands.get(ticket.model)
            return not ticket.severed if island is None else island.residency.first_byte(ticket)

    # Facts from outside

    def loaded_at(self, backend: str) -> float | None:
        """When the backend was last loaded, which tells its runs apart."""
        with self._lock:
            residency = self._layout.of_backend.get(backend)
            return residency.seats[backend].loaded if residency and backend in residency.seats else None

    def died(self, backend: str, why: str, log: Iterable[str] = (), *, loaded: float | None = None) -> None:
        """The backend's service ended, and nobody here told it to.

        ``log``: what it had printed last. ``loaded``: nothing has happened if it was loaded anew since then.
        """

        def fact(residency: Residency, now: float) -> None:
            if loaded is None or residency.seats[backend].loaded == loaded:
                residency.died(backend, now, why, log)

        self._tell(backend, fact)
        self._settle_doubt(backend)

    def last_words(self, backend: str) -> tuple[str, ...]:
        """What the engine of a backend printed before it failed; () once it is loaded again."""
        with self._lock:
            residency = self._layout.of_backend.get(backend)
            return residency.seats[backend].log if residency else ()

    def strangers_hold(self, held: Mapping[str, int]) -> None:
        """Programs that are none of ours hold so many bytes of these GPUs."""
        with self._lock:
            for island in self._each_island():
                if island.residency.strangers_hold(held):
                    island.changed.notify_all()

    def unreachable(self, lease: Lease) -> Crash | None:
        """A request got no whole answer: how its backend ended under it, if it has.

        While that is not known the backend is doubted. Nothing is done if the lease is over: then it speaks
        of a backend that was replaced since.
        """
        backend, ticket = lease.backend, lease._ticket
        with self._lock:
            residency = self._layout.of_backend.get(backend.name)
            seat = residency.seats.get(backend.name) if residency else None
            if seat is None or ticket not in seat.holders:
                return ticket.crash
            doubt = self._doubts.get(backend.name)
            is_new = doubt is None or doubt.loaded != seat.loaded
            if doubt is None or is_new:
                doubt = self._doubts[backend.name] = _Doubt(seat.loaded, self._clock.now())
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
            residency = self._layout.of_backend.get(name)
            seat = residency.seats[name] if residency else None
            here = seat is not None and seat.loaded == doubt.loaded and seat.state in ("ready", "draining")
            return here and self._doubts.get(name) is doubt and not self._closed

    def _is_heard(self, name: str, doubt: _Doubt) -> bool:
        """Whether any request got a part of an answer from the backend since it is doubted."""
        with self._lock:
            residency = self._layout.of_backend.get(name)
            answered = residency.seats[name].answered if residency else -FOREVER
        return answered > doubt.since or self._has_heard(self._runs[name].address, doubt.since)

    def _give_up_on(self, name: str, doubt: _Doubt, residency: Residency, now: float) -> None:
        if residency.seats[name].loaded == doubt.loaded:
            residency.unanswering(name, now)

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
                seat.backend
                for model, count in self._replicas.items()
                if count > 1
                for seat in self._islands[model].residency.seats_of(model)
                if seat.state == "ready"
            ]
            return [(backend, self._runs[backend.name].address) for backend in found]

    def observed(self, backend: str, load: Load | None) -> None:
        """The engine of a replica said this of itself; None: it answered, and has no figures."""
        with self._lock:
            if residency := self._layout.of_backend.get(backend):
                residency.observed(backend, load, self._clock.now())

    def silent(self, backend: str) -> None:
        """The engine of a replica does not answer."""
        self._tell(backend, lambda residency, now: residency.silent(backend, now))

    def reports(self) -> dict[str, Report]:
        """What other anvil-mux are told of the replicas that are shared with them."""
        with self._lock:
            now = self._clock.now()
            islands = self._each_island()
            return {name: each for i in islands for name, each in i.residency.reports(now).items()}

    def hear(self, told: Mapping[str, Sequence[Report]]) -> None:
        """What all other anvil-mux tell of the replicas that are shared with them."""
        with self._lock:
            for island in self._each_island():
                island.residency.hear(told, self._clock.now())

    def unload_idle(self, model: str) -> bool:
        """Puts ``model`` out once nobody uses it, unless somebody asks for it before; True: that is now.

        Whoever has just read the last byte of an answer holds its lease for a moment longer.
        """
        with self._lock:
            island = self._island(model)
            told = island.residency.unload_when_idle(model, self._clock.now())
            if told:
                island.changed.notify_all()
        return told

    def unload(self, model: str) -> bool:
        """Puts ``model`` out after its drain, and stops one that rests; False if there is nothing to be done.

        One that is being loaded is so no longer, and who waits for it is told that.
        """
        with self._lock:
            island = self._island(model)
            told = island.residency.unload_requested(model, self._clock.now(), "unload requested")
            self._wake_settled(island)
            island.changed.notify_all()
        return told

    def pin(self, model: str, pinned: bool) -> None:
        """Whether ``model``, once it is resident, is kept from being put out for others."""
        with self._lock:
            island = self._island(model)
            changes = self._host.changes
            island.residency.pin_requested(model, self._clock.now(), pinned)
            self._wake_settled(island)
            island.changed.notify_all()
            self._ask_others(changes)

    def expect(self, backends: Iterable[str]) -> None:
        """They may run already: nothing is begun beside them until each was adopted or ``looked_at``."""
        with self._lock:
            for name in backends:
                self._layout.of_backend[name].expected(name)

    def looked_at(self, backends: Iterable[str]) -> None:
        """It is known of them whether they ran; what was not adopted holds nothing (any more)."""
        for name in backends:
            self._tell(name, lambda residency, now, name=name: residency.looked_at(name))  # type: ignore[misc]

    @property
    def unseen(self) -> list[str]:
        """The backends of which it is not known yet whether they run."""
        with self._lock:
            return sorted(name for island in self._each_island() for name in island.residency.unseen)

    def adopt(self, running: Mapping[str, str], parked: Mapping[str, Rested] | None = None) -> list[str]:
        """Takes over backends that run already (name -> URL), or rest; returns those that cannot stay."""
        with self._lock:
            refused = self._adopt(running, parked or {}, self._clock.now())
            for island in self._each_island():
                self._wake_settled(island)
                island.changed.notify_all()
        return refused

    def _adopt(self, running: Mapping[str, str], parked: Mapping[str, Rested], now: float) -> list[str]:
        refused = []
        for name in (*running, *parked):
            residency = self._layout.of_backend.get(name)
            if residency is None or residency.seats[name].state != "stopped":
                continue
            if name in running:
                self._runs[name] = Run(_address(running[name]))
                stays = residency.adopt(name, now)
            else:
                rested = parked[name]
                about = rested.how, rested.residual, rested.host_bytes
                stays = residency.adopt_standby(name, now, *about)
            if not stays:
                refused.append(name)
        return refused

    def reconfigure(
        self, config: Config, running: Mapping[str, str], parked: Mapping[str, Rested] | None = None
    ) -> list[str]:
        """From now on ``config`` holds, and requests that run go on; the rest is as with ``adopt``."""
        with self._lock:
            now = self._clock.now()
            self._take(config)
            self._settle_down(self._layout.reconfigure(config, now))
            refused = self._adopt(running, parked or {}, now)
            for island in self._each_island():
                self._wake_settled(island)
                island.changed.notify_all()
            lacking = self._lacking_keepers()
        self._start_keepers(lacking)
        return refused

    def tell(self, kind: str, reason: str) -> None:
        """Something happened to the whole program."""
        with self._lock:
            self._log(Event(self._clock.now(), kind, "", reason=reason))

    def _tell(self, backend: str, fact: Callable[[Residency, float], object]) -> None:
        with self._lock:
            home = self._layout.of_backend.get(backend)
            if home is None:
                return
            island, now = self._homes[home], self._clock.now()
            changes = self._host.changes
            fact(home, now)
            place = self._layout.settle(home, now)
            if place is not home:
                self._settle_down({home: place})
            self._wake_settled(island)
            taken_back = self._taken_back(island)
            island.changed.notify_all()
            self._ask_others(changes)
        for ticket in taken_back:
            _cut(ticket)

    def _wake_settled(self, island: _Island) -> None:
        settled, island.residency.settled = island.residency.settled, []
        for ticket in settled:
            self._count_waiting(ticket, -1)
            ticket.wake.set()

    # Keepers

    def start(self) -> None:
        """Starts the keepers."""
        with self._lock:
            lacking = self._lacking_keepers()
        self._start_keepers(lacking)

    def _lacking_keepers(self) -> list[tuple[_Island, int]]:
        """Under the lock: those that are to be started now."""
        have = Counter[Residency]()
        for island in self._every:
            have[island.residency] += island.keepers
        lacking = []
        for residency, island in self._homes.items():
            here = [seat.backend for seat in residency.seats.values()]
            here += [b for b in self._config.backends if b.name in residency.seats]
            for number in range(have[residency], _steps_at_once(here)):
                island.keepers += 1
                lacking.append((island, number))
        return lacking

    def _start_keepers(self, lacking: Iterable[tuple[_Island, int]]) -> None:
        for island, number in lacking:
            self._clock.spawn(partial(self._keep, island), f"keeper-{island.residency.name}-{number}")

    def _keep(self, island: _Island) -> None:
        """A keeper's life: take a step, perform it, report how it ended."""
        while todo := self._next_step(island):
            step, backend = todo
            match step:
                case Start(_, how):
                    self._load(backend, how, self._cancelled[backend.name])
                case Stop(_, how, severed):
                    self._evict(backend, how, severed)
                case Demote(_, how, to):
                    self._rest(backend, partial(self._mechanism.demote, backend, how, to))

    def _next_step(self, island: _Island) -> tuple[Step, Backend] | None:
        """Waits until the island has a step to perform, and on whom; None when the program ends."""
        with self._lock:
            while not self._closed:
                now = self._clock.now()
                changes = self._host.changes
                step = island.residency.next_step(now)
                self._wake_settled(island)
                self._ask_others(changes)
                if isinstance(step, Cancel):
                    self._cancelled[step.backend].set()
                    continue
                if not isinstance(step, Wait):
                    self._said.pop(step.backend, None)
                    if isinstance(step, Start):
                        self._cancelled[step.backend] = self._clock.latch()
                    island.changed.notify_all()
                    return step, island.residency.seats[step.backend].backend
                self._until[island.residency] = until = step.until
                while not island.changed.wait(None if until == FOREVER else until - now):
                    now, until = self._clock.now(), self._until.get(island.residency, 0.0)
                    if until <= now:  # else another keeper has asked since
                        break
            return None

    def _ask_others(self, changes: int) -> None:
        """What one island does with the host's memory, which had so many changes before, concerns all."""
        if self._host.budget is not None and self._host.changes != changes:
            for island in self._each_island():
                island.changed.notify_all()

    def _load(self, backend: Backend, how: str, cancelled: Latch) -> None:
        name = backend.name
        try:
            loaded = self._mechanism.load(backend, how, cancelled)
            address = _address(loaded.url)
        except Cancelled:
            self._tell(name, lambda residency, now: residency.load_cancelled(name, now))
        except LoadError as error:
            failed = error
            self._tell(name, lambda residency, now: residency.load_failed(name, now, failed))
        except Exception as error:
            why = _text(error)
            self._tell(name, lambda residency, now: residency.evict_failed(name, now, why))
        else:
            self._tell(name, lambda residency, now: self._started(residency, name, address, loaded.how, now))

    def _started(
        self, residency: Residency, name: str, address: tuple[str, int], how: str, now: float
    ) -> None:
        self._runs[name] = Run(address)
        residency.loaded(name, now, how)

    def _evict(self, backend: Backend, how: str, severed: tuple[Ticket, ...]) -> None:
        for ticket in severed:
            _cut(ticket)
        self._rest(backend, partial(self._mechanism.evict, backend, how))

    def _rest(self, backend: Backend, perform: Callable[[], Rested]) -> None:
        name = backend.name
        try:
            rested = perform()
        except Exception as error:
            why = _text(error)
            self._tell(name, lambda residency, now: residency.evict_failed(name, now, why))
        else:
            left = rested.residual, rested.how, rested.host_bytes, rested.freed, rested.died, rested.log
            self._tell(name, lambda residency, now: residency.evicted(name, now, *left))

    # The end

    def refuse(self) -> None:
        """From now on every request, waiting or new, is refused: the program is shutting down."""
        with self._lock:
            self._closing = Draining("anvil-mux is shutting down. Try again when it is back.")
            for island in self._each_island():
                island.residency.fail_all(self._closing, self._clock.now())
                self._wake_settled(island)
                island.changed.notify_all()

    def sever(self) -> int:
        """Cuts every request that still runs, and says how many."""
        with self._lock:
            now = self._clock.now()
            severed = [ticket for i in self._each_island() for ticket in i.residency.sever_all(now)]
        for ticket in severed:
            _cut(ticket)
        return len(severed)

    def close(self) -> None:
        """Ends the keepers after the step that each is in. What is resident stays resident."""
        with self._lock:
            self._closed = True
            for island in self._each_island():
                island.changed.notify_all()

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
            residency = self._island(model).residency
            seats = residency.seats_of(model)
            far = self._progress(residency, model, now)
            if far and far.seconds_left is not None:
                return far.seconds_left
            left = [
                seat.load_seconds - (now - seat.since if seat.state == "loading" else 0.0)
                for seat in seats
                if seat.load_seconds is not None
            ]
        return min(left, default=None)

    def how_far(self, model: str) -> str:
        """How far the load of ``model`` is, or how long it waits for one, in a few words for its clients."""
        with self._lock:
            residency, now = self._island(model).residency, self._clock.now()
            far = self._progress(residency, model, now)
            if far:
                return far.words
            left = outlook(residency, model, now, self._config.drain_timeout).seconds
        return "" if left is None else f"about {left:.0f} s left"

    def outlook(self, model: str) -> Outlook:
        """What a request for ``model`` would wait for now."""
        with self._lock:
            residency, now = self._island(model).residency, self._clock.now()
            far = self._progress(residency, model, now)
            return outlook(residency, model, now, self._config.drain_timeout, far)

    def report(self, backend: str, said: Said) -> None:
        """What the log of a backend says of its load."""
        with self._lock:
            self._said[backend] = said

    def _progress(self, residency: Residency, model: str, now: float) -> Progress | None:
        """Under the lock: how far the load of ``model`` is, if there is one and it is not resident too."""
        seats = [seat for seat in residency.seats_of(model) if seat.state == "loading"]
        if not seats or residency.is_ready(model):
            return None
        seat = seats[0]
        return progress(now - seat.since, residency.expected_load(seat), self._said.get(seat.name))

    def costs(self) -> list[Cost]:
        """What swaps cost, as far as was learned."""
        with self._lock:
            return list(self._costs)

    def footprints(self) -> list[Footprint]:
        """What backends held, and kept while they rested, as it was measured."""
        with self._lock:
            return list(self._footprints)

    def waiters(self, most: int) -> list[Waiter]:
        """The first ``most`` requests of each line."""
        with self._lock:
            lines = [island.residency.lines[model] for model, island in self._islands.items()]
            return [Waiter(t.id, t.model, t.since) for line in lines for t in islice(line, most)]

    def loading(self, *, anew: bool = False) -> list[str]:
        """The backends that are being loaded; ``anew``: only those that were stopped before."""
        with self._lock:
            found = [(i.residency, seat) for i in self._each_island() for seat in i.residency.seats.values()]
            starting = [(residency, seat) for residency, seat in found if seat.state in LOADING]
            return [s.name for residency, s in starting if not anew or residency.way_back(s) == "stop"]

    def status(self) -> Status:
        """A consistent picture, from memory."""
        with self._lock:
            now = self._clock.now()
            residencies = [island.residency for island in self._each_island()]
            models = tuple(
                model_state(r, m, now, self._progress(r, m, now), self._footprints)
                for r in residencies
                for m in r.lines
            )
            known = {gpu.id: gpu for gpu in self._config.gpus}
            gpus = tuple(gpu_state(r, known.get(id) or Gpu(id), now) for r in residencies for id in r.gpus)
        waiting, leases = sum(m.waiting for m in models), sum(m.leases for m in models)
        return Status(now, models, gpus, waiting, leases)


def _cut(ticket: Ticket) -> None:
    cut = ticket.cut  # the lease may end just now
    try:
        if cut:
            cut()
    except Exception:  # a keeper must not end
        log.exception("cutting a severed request for %s", ticket.model)


def _steps_at_once(backends: list[Backend]) -> int:
    """How many keepers an island needs, so that no drain, no retry and no cancel waits for a free one."""
    if any(b.vram or b.vram_measured or not b.gpus or b.rest != ("stop",) for b in backends):
        # Several share a GPU, or are taken down their ladders while others swap.
        return len({backend.name for backend in backends}) + 1
    return len({gpu for backend in backends for gpu in backend.gpus}) + 1


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


def _text(error: Exception) -> str:
    return error.message if isinstance(error, MuxError) else f"{type(error).__name__}: {error}"
