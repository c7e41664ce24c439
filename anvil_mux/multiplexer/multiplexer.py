"""The multiplexer: a lease for each request, which waits for it if need be.

``with mux.lease(model) as lease:`` is the whole interface of the serve path. Under the lock a request enters
the queue of its model, or has a lease at once; what follows from that the driver carries out (driver.py).
What engines, hosts and people say is a fact that the scheduler is told (``tell``, ``facts``), and questions
go to ``overview``.

Threads wait in three functions: ``_wait_for_lease`` (requests, without the lock: a queue of hundreds that is
admitted at once must not queue up for it), the one thread of the driver that waits for steps, and where an
engine is in doubt (``Doubts``). Nothing slow happens while the lock is held. Any thread may call any
public method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, count

from anvil_mux.clock import Clock
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.keys import Key
from anvil_mux.errors import (
    Cancelled,
    ClientGone,
    Draining,
    MuxError,
    Severed,
    UnknownModel,
    WaitedTooLong,
)
from anvil_mux.host.hosts import AnyHost
from anvil_mux.host.seam import CardRead
from anvil_mux.multiplexer.circuits import Circuits, Permit
from anvil_mux.multiplexer.driver import EngineRun, Facts, SchedulerDriver, cut
from anvil_mux.multiplexer.overview import Overview
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.admission import no_room_to_wait
from anvil_mux.scheduler.costs import Cost, Footprint
from anvil_mux.scheduler.events import Cause, Event, Severance
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.slot import IS_PAUSED, NO_USAGE, NO_WORK, NOTHING, Crash, Effects, Ticket, TokenUsage

TEND_SECONDS = 0.25
"""How often a waiting request looks at its client."""

Tend = Callable[[float], None]


class Lease:
    """One request's hold on a resident backend. A context manager; leaving it releases, once."""

    def __init__(self, driver: SchedulerDriver, ticket: Ticket) -> None:
        """``ticket``: it was granted."""
        self._driver = driver
        self.ticket = ticket
        self.backend: Backend = ticket.granted.backend
        self.run: EngineRun = ticket.granted.run
        self.address = self.run.address
        self.is_routed = ticket.choice is not None
        """Whether its backend was chosen among several replicas: what becomes of it counts for later
        choices.
        """
        self.why = ticket.choice.why if ticket.choice else ""
        """Why this backend, where the model has several."""
        self._is_over = False
        self.waited = 0.0
        """Seconds in the queue."""
        self.permit: Permit | None = None
        """The report of how an external server did; None: the backend is an engine of ours."""
        self.prefill: Lease | None = None
        """The lease of the first stage, where the request is served in two; it may be left before this one.
        """

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: object = None, *exc: object) -> None:
        self.release(whole=kind is None)

    def release(self, *, whole: bool = False, usage: TokenUsage = NO_USAGE) -> None:
        """Any number of times; the first counts. ``whole``: the engine gave its answer to the end.

        ``usage`` is of use where ``is_routed``.
        """
        if self._is_over:
            return
        self._is_over = True
        if self.prefill:
            self.prefill.release()
        if self.permit:
            self.permit.succeeded() if whole else self.permit.left()
        driver = self._driver
        with driver.lock:
            effects = driver.scheduler.released(self.ticket, driver.clock.now(), usage, whole=whole)
            jobs = driver.noted(effects)
        if effects is not NOTHING:
            driver.carry_out(effects, jobs)
        # It leads back to this lease: without a cycle nothing is left for the garbage collector.
        self.ticket.cut = None

    def keep_alive(self, seconds: float) -> None:
        """Have the backend stay for so long once nobody uses it, whatever its ttl, until its next load.

        It goes for another model all the same.
        """
        self._driver.tell(self._driver.scheduler.keep_alive_asked, self.ticket, seconds)

    @property
    def foreseen(self) -> float | None:
        """The part of its input that is thought to be cached there; None where nobody thought of that."""
        choice, tokens = self.ticket.choice, self.ticket.work.tokens
        return choice.hit_tokens / tokens if choice and tokens and not self.prefill else None

    @property
    def gpu_seconds(self) -> float:
        """The GPU time that the request had, once it is released: on each GPU, its part of the time."""
        return max(self.ticket.share, 0.0) * len(self.backend.gpu_names)

    def first_byte(self) -> bool:
        """The answer begins to come. False: the request was taken back before; nothing of it may be shown.

        Called once, by any thread, before a byte is shown to the client; of use where ``is_routed``.
        """
        self._driver.tell(self._driver.scheduler.first_byte, self.ticket)
        return self.ticket.severed is None

    @property
    def severed(self) -> bool:
        """The drain ended before this request did; whatever it still does is cut."""
        return self.ticket.severed is not None

    @property
    def is_host_lost(self) -> bool:
        """Whether it was severed because its host is lost: the request may be served on another one."""
        severed = self.ticket.severed
        return severed is not None and severed.cause.kind == "host_lost"

    def on_severed(self, cut: Callable[[], None]) -> None:
        """``cut`` is called from another thread, outside the lock, when the lease is severed.

        It may be called a second time by this thread if that happens right now, so it must be idempotent.
        """
        self.ticket.cut = cut
        if self.ticket.severed:
            cut()

    def severed_error(self) -> MuxError:
        # Where nobody severed it, the thread that moves streams has ended.
        severance = self.ticket.severed or Severance(Cause("shutdown"))
        if severance.cause.kind == "cancelled":
            return Cancelled(f"This request for {self.ticket.model} was cancelled by hand.")
        return Severed(f"{severance.sentence(self.ticket.model)}. Send it again.")


class Multiplexer:
    """Leases backends to requests.

    ``log`` takes every event, under the lock; without ``log_leases`` none of leases that begin and end.
    ``has_heard(address, since)``: whether an engine has sent anybody a part of an answer since that moment.
    ``close_idle(run)``: closes the connections to a run of an engine that idle.
    """

    def __init__(
        self,
        config: Config,
        host: AnyHost,
        *,
        log: Callable[[Event], object],
        log_leases: bool = True,
        costs: Iterable[Cost] = (),
        footprints: Iterable[Footprint] = (),
        cards: Iterable[CardRead] = (),
        clock: Clock | None = None,
        has_heard: Callable[[tuple[str, int], float], bool] = lambda address, since: False,
        close_idle: Callable[[EngineRun], object] = lambda run: None,
    ) -> None:
        self._clock = clock or Clock()
        self._driver = SchedulerDriver(
            config,
            host,
            self._clock,
            log,
            emit_leases=log_leases,
            costs=costs,
            footprints=footprints,
            cards=cards,
            close_idle=close_idle,
        )
        self.scheduler, self.tell = self._driver.scheduler, self._driver.tell
        self.has_turned = self._driver.has_turned
        self._layout = self.scheduler.layout
        self._lock = self._driver.lock
        self.counts = self._driver.counts
        self.facts = Facts(self._driver, host, has_heard)
        self.circuits = Circuits(self._clock)
        self.overview = Overview(self._driver, self.circuits)
        # The driver's lock guards what follows.
        self._numbers = count(1)
        """The numbers of tickets."""
        self._closing: MuxError | None = None

    def __repr__(self) -> str:
        with self._lock:
            return f"<Multiplexer {self._layout.groups}>"

    def resolve(self, name: str) -> str:
        """The model that a client's name or alias stands for; UnknownModel lists the known ones."""
        try:
            return self._driver.names[name]
        except KeyError:
            raise UnknownModel(name, self._driver.served) from None

    # Leases

    def lease(
        self,
        model: str,
        tend: Tend | None = None,
        work: Work = NO_WORK,
        *,
        key: Key | None = None,
        staged: bool = False,
        crashes: tuple[Crash, ...] = (),
        resent: bool = False,
        request: str = "",
        never_swaps: bool = False,
    ) -> Lease:
        """Blocks until ``model`` is resident and has a place, then holds it. Raises MuxError.

        ``work`` is what is known of the request, where the model has several backends, and ``key`` whose it
        is. ``staged``: it may be served in two stages, by a prefill and a decode backend that are leased
        together. ``crashes``: those that the request was there at, under other leases. ``resent``: it had
        others before. ``request``: its id. ``never_swaps``: it may force no swap (NothingResident).

        ``tend(now)`` is called without the lock a few times a second while the request waits. What it raises
        ends the wait and propagates; ClientGone is how it says that nobody wants the answer any more.
        """
        ticket = Ticket(0, model, 0.0, work=work, sender=key, crashes=crashes)
        ticket.request, ticket.never_swaps, ticket.resent = request, never_swaps, resent
        self._ask_for(ticket, tend, staged=staged)
        lease = Lease(self._driver, ticket)
        if ticket.wake:
            lease.waited = self._clock.now() - ticket.since
        if ticket.prefill and ticket.prefill.backend:
            lease.prefill = Lease(self._driver, ticket.prefill)
        return lease

    def load(self, model: str, tend: Tend | None = None) -> None:
        """Blocks until ``model`` is resident without leasing it; waits and fails like a request."""
        self._ask_for(Ticket(0, model, 0.0, takes_lease=False), tend)

    def _ask_for(self, ticket: Ticket, tend: Tend | None, *, staged: bool = False) -> None:
        """Have the ticket leased or failed, however long that takes. It gets its number and moment here."""
        model, work = ticket.model, ticket.work
        driver = self._driver
        with self._lock:
            now = self._clock.now()
            if self._closing:
                raise self._closing.copy()
            if model not in driver.served:
                raise UnknownModel(model, driver.served)
            target = self._layout.models[model]
            if (ticket.sender or target.queue.tickets) and not target.takes(work.owner):
                if error := no_room_to_wait(target, self.counts.waiting, driver.config.max_queue):
                    raise error
                self.counts.check_waiting(ticket.sender)
            if staged:  # the prefill's input is computed without a stream: nothing of it is seen before
                first = work._replace(infer_type="prefill", stream=False)
                ticket.prefill = Ticket(next(self._numbers), model, now, work=first)
            ticket.id, ticket.since = next(self._numbers), now
            effects = self.scheduler.requested(ticket, now)
            driver.grant(ticket)
            if not ticket.settled:
                ticket.wake = self._clock.latch()
                self.counts.count_waiting(ticket, 1)
            jobs = driver.noted(effects) if effects is not NOTHING else ()
        if effects is not NOTHING:
            driver.carry_out(effects, jobs)
        if ticket.wake:
            self._wait(ticket, tend)
        if ticket.error:
            raise ticket.error.copy()  # one error may end a whole queue

    def _wait(self, ticket: Ticket, tend: Tend | None) -> None:
        pause = TEND_SECONDS if tend else FOREVER
        try:
            while not self._wait_for_lease(ticket, pause):
                assert tend is not None
                tend(self._clock.now())
        except BaseException as error:
            self._driver.apply(partial(self._abandon, ticket, error))
            if ticket.prefill:  # it is leased with the other, which cannot be leased any more
                self._driver.apply(partial(self.scheduler.released, ticket.prefill, whole=False))
            raise

    def _wait_for_lease(self, ticket: Ticket, pause: float) -> bool:
        """Waits until the ticket ends, at most ``pause`` seconds, and never past ``queue_timeout``."""
        limit = self._driver.config.queue_timeout
        deadline = ticket.since + limit
        now = self._clock.now()
        if ticket.wake.wait(min(deadline, now + pause) - now):
            return True
        if self._clock.now() < deadline:
            return False
        self._driver.apply(partial(self._give_up, ticket, limit))
        return True

    def _give_up(self, ticket: Ticket, limit: float, now: float) -> Effects:
        if ticket.settled:
            return NOTHING
        model = self._layout.models.get(ticket.model)
        what = "ran as many requests as it may, for" if model and model.ready else "was not loaded within"
        why = f": {IS_PAUSED}." if self._layout.pause.is_on else "."
        return self._leave_queue(ticket, now, WaitedTooLong(f"{ticket.model} {what} {limit:g} s{why}"))

    def _abandon(self, ticket: Ticket, error: BaseException, now: float) -> Effects:
        """The request's thread stops waiting because ``tend`` raised."""
        if ticket.backend:
            return self.scheduler.released(ticket, now, whole=False)
        if ticket.error:
            return NOTHING
        known = isinstance(error, MuxError) and not isinstance(error, ClientGone)
        return self._leave_queue(ticket, now, error if known else None)  # type: ignore[arg-type]

    def _leave_queue(self, ticket: Ticket, now: float, error: MuxError | None) -> Effects:
        self.counts.count_waiting(ticket, -1)
        return self.scheduler.abandoned(ticket, now, error)

    def cancel(self, number: int | None, request: str = "") -> bool:
        """End one request, named by its ticket's number or by its id: one that waits fails, one that runs is
        cut and ends its lease by itself. False if there is none.
        """
        found: Ticket | None = None

        def is_meant(ticket: Ticket) -> bool:
            return ticket.id == number if number is not None else ticket.request == request != ""

        def fact(now: float) -> Effects:
            nonlocal found
            models = self._layout.models.values()
            running = (ticket for model in models for slot in model.slots for ticket in slot.holders)
            waiting = (ticket for model in models for ticket in model.queue)
            found = next(filter(is_meant, chain(waiting, running)), None)
            if found is None:
                return NOTHING
            if found.backend:
                found.severed = Severance(Cause("cancelled"))
                return NOTHING
            error = Cancelled(f"This request for {found.model} was taken out of its queue.")
            return self._leave_queue(found, now, error)

        self._driver.apply(fact)
        if found and found.backend:
            cut(found)
        elif found:
            found.wake.set()
        return found is not None

    # Its life

    def start(self) -> None:
        """Starts the thread that has steps performed; its threads run on the CPUs of this one."""
        self._driver.start()

    def refuse(self) -> None:
        """Refuse every request from now on, waiting or new: the program is shutting down."""
        error = Draining("anvil-mux is shutting down. Try again when it is back.")

        def fact(now: float) -> Effects:
            self._closing = error
            return self.scheduler.refused(error, now)

        self._driver.apply(fact)

    def sever(self) -> int:
        """Cuts every request that still runs, and says how many."""
        return len(self._driver.apply(self.scheduler.severed).cut)

    def close(self) -> None:
        """Begins no step any more; those under way go on. What is resident stays resident."""
        with self._lock:
            self.scheduler.closed()
            self.facts.doubts.close()
            self._driver.close()
