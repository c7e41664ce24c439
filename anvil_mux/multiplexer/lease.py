"""One request's hold on a resident backend."""

from __future__ import annotations

from collections.abc import Callable

from anvil_mux.config.config import Backend
from anvil_mux.errors import Cancelled, MuxError, Severed
from anvil_mux.multiplexer.circuits import Permit
from anvil_mux.multiplexer.driver import EngineRun, SchedulerDriver
from anvil_mux.scheduler.events import Cause, Severance
from anvil_mux.scheduler.steps import NO_USAGE, NOTHING, Crash, Ticket, TokenUsage


class Lease:
    """One request's hold on a resident backend. A context manager; leaving it releases, once."""

    __slots__ = (
        "_driver",
        "_is_over",
        "address",
        "backend",
        "is_routed",
        "permit",
        "prefill",
        "run",
        "ticket",
        "waited",
        "why",
    )

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
        gpus = len(self.backend.gpu_names)
        return max(self.ticket.share, 0.0) * gpus if gpus else 0.0

    def first_byte(self) -> bool:
        """The answer begins to come. False: the request was taken back before; nothing of it may be shown.

        Called once, by any thread, before a byte is shown to the client; of use where ``is_routed``.
        """
        with self._driver.lock:
            return self._driver.scheduler.first_byte(self.ticket, self._driver.clock.now())

    @property
    def severed(self) -> bool:
        """The drain ended before this request did; whatever it still does is cut."""
        return self.ticket.severed is not None

    @property
    def taken_back(self) -> bool:
        """Whether it was severed because a better replica became free: the request has to be leased anew."""
        return self.ticket.taken_back

    @property
    def is_host_lost(self) -> bool:
        """Whether it was severed because its host is lost: the request may be served on another one."""
        severed = self.ticket.severed
        return severed is not None and severed.cause.kind == "host_lost"

    @property
    def crash(self) -> Crash | None:
        """The backend ended under it."""
        return self.ticket.crash

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
