"""What a GPU group is told about, tickets, and what it asks for, steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

from anvil_mux.errors import MuxError
from anvil_mux.routing.routing import Choice, Work
from anvil_mux.scheduler.causes import RESENT, Severance

NO_WORK = Work()


class Crash(NamedTuple):
    """The end of a backend under its requests, which nobody had asked for."""

    backend: str
    why: str
    """How it ended; goes on from its name."""
    log: tuple[str, ...] = ()
    """What its engine had printed last."""


class Ticket:
    """One request's identity, from its arrival to its end. Guarded like the GPU group that it is told to."""

    __slots__ = (
        "backend",
        "choice",
        "crash",
        "crashes",
        "cut",
        "error",
        "id",
        "leases",
        "model",
        "prefill",
        "sender",
        "severed",
        "since",
        "wake",
        "work",
    )

    def __init__(
        self,
        id: int,
        model: str,
        since: float,
        leases: bool = True,
        work: Work = NO_WORK,
        prefill: Ticket | None = None,
        sender: Hashable = None,
        crashes: tuple[Crash, ...] = (),
    ) -> None:
        self.id = id
        self.model = model
        self.since = since
        self.work = work
        self.sender = sender
        """Whose it is: where a queue is admitted in parts, senders take turns."""
        self.leases = leases
        """False: it only wants the model loaded."""
        self.prefill = prefill
        """Its first stage, which is leased with it if backends of both stages are resident."""
        self.crashes = crashes
        """The same request was there at these, as another ticket."""
        self.crash: Crash | None = None
        """The one that ended its lease."""
        self.backend: str | None = None
        self.choice: Choice | None = None
        """Why that backend, where the model has several."""
        self.error: MuxError | None = None
        self.severed: Severance | None = None
        self.wake: Any = None
        """The driver's: how to wake whoever waits for this ticket."""
        self.cut: Callable[[], None] | None = None
        """The driver's: how to cut the request when it is severed."""

    @property
    def taken_back(self) -> bool:
        """It was severed to be sent to another replica."""
        return self.severed is not None and self.severed.cause.kind in RESENT

    @property
    def settled(self) -> bool:
        return self.backend is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class Start:
    """Load the backend, then report ``loaded``, ``load_failed``, ``load_cancelled`` or ``evict_failed``."""

    backend: str
    how: str
    """The way by which it rests."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the load of the backend; only how that ends is reported, and it may have ended by now."""

    backend: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Put the backend out, then report ``stopped`` or ``evict_failed``. ``severed`` are cut first."""

    backend: str
    how: str
    """The standby level that is asked for; a harder one may be taken."""
    severed: tuple[Ticket, ...] = ()


@dataclass(frozen=True, slots=True)
class Demote:
    """Take a backend on standby further down, then report ``stopped`` or ``evict_failed``."""

    backend: str
    how: str
    """The way by which it rests."""
    to: str
    """The deeper way that is asked for; an even deeper one may be taken."""


class Wait(NamedTuple):
    """Nothing to do before ``until`` or the next fact."""

    until: float


Step = Start | Cancel | Stop | Demote | Wait
