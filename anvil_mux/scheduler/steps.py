"""Tickets, steps and effects: what passes between a driver and the scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anvil_mux.errors import MuxError
from anvil_mux.routing.routing import Choice, Work
from anvil_mux.scheduler.events import RESENT, Severance

NO_WORK = Work()

TokenUsage = tuple[int | None, int | None]
"""Tokens of a request's input, and how many of them were cached, as its engine said; None: it did not."""
NO_USAGE: TokenUsage = (None, None)


@dataclass(frozen=True)
class FoundBackend:
    """How a backend was found: when the program began, or on a host that is back."""

    level: str = ""
    """The standby level of the backend; "": it runs, and answers."""
    residual: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> bytes that it holds in standby."""
    host_bytes: int = 0


RUNS = FoundBackend()


class Crash(NamedTuple):
    """The end of a backend by itself, under its requests."""

    backend: str
    why: str
    """How it ended; goes on from its name."""
    log: tuple[str, ...] = ()
    """The last lines that its engine had printed."""


class Ticket:
    """One request's identity, from its arrival to its end. Guarded like the GPU group that it is given to."""

    __slots__ = (
        "backend",
        "choice",
        "crash",
        "crashes",
        "cut",
        "error",
        "granted",
        "id",
        "model",
        "never_swaps",
        "prefill",
        "request",
        "resent",
        "sender",
        "severed",
        "share",
        "since",
        "takes_lease",
        "wake",
        "work",
    )

    def __init__(
        self,
        id: int,
        model: str,
        since: float,
        takes_lease: bool = True,
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
        """The client that it counts for: where a queue is admitted in parts, senders take turns."""
        self.takes_lease = takes_lease
        """Whether it takes a lease; if not it only wants the model loaded."""
        self.request = ""
        """The id of its request, as its client was told."""
        self.resent = False
        """Whether the same request came before, as another ticket: it counts once."""
        self.never_swaps = False
        """Whether it may force no swap: it is leased by what is ready, or fails."""
        self.prefill = prefill
        """The ticket of its first stage, leased with it if backends of both stages are resident."""
        self.crashes = crashes
        """The ends of backends at which the same request was there, as another ticket."""
        self.crash: Crash | None = None
        """The end of a backend that ended its lease."""
        self.backend: str | None = None
        self.choice: Choice | None = None
        """Why that backend, where the model has several."""
        self.error: MuxError | None = None
        self.severed: Severance | None = None
        self.share = 0.0
        """Seconds that it had of its backend, once its lease has ended: a part of the time, if others ran.

        Until then less than nothing: what ``Slot.gpu_seconds`` was when the lease began.
        """
        self.granted: Any = None
        """An object of the driver, by which it knows what was leased, whatever becomes of the backend."""
        self.wake: Any = None
        """An object of the driver, by which it goes on when this ticket has ended waiting."""
        self.cut: Callable[[], None] | None = None
        """A call of the driver, by which it cuts the request when it is severed."""

    @property
    def taken_back(self) -> bool:
        """Whether it was severed to be sent to another replica."""
        return self.severed is not None and self.severed.cause.kind in RESENT

    @property
    def settled(self) -> bool:
        return self.backend is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class Load:
    """Load the backend, then report ``loaded``, ``load_failed``, ``load_cancelled`` or ``evict_failed``."""

    backend: str
    level: str
    """The standby level that it comes back from; ``stop``: it is started."""
    number: int = 0
    """The number that the scheduler gives each step; its report has the same."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the load of the backend; only how that load ends is reported, and it may have ended by now."""

    backend: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class Evict:
    """Take the backend off its GPUs, then report ``evicted`` or ``evict_failed``."""

    backend: str
    level: str
    """The standby level that is asked for; a deeper one may be taken."""
    severed: tuple[Ticket, ...] = ()
    """The leases that outlasted the drain: they are cut before."""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Demote:
    """Take a backend in standby to a deeper level, then report ``evicted`` or ``evict_failed``."""

    backend: str
    level: str
    """The standby level that it is in."""
    to: str
    """The deeper level that is asked for; an even deeper one may be taken."""
    number: int = 0


class Wait(NamedTuple):
    """Nothing to do before ``until`` or the next fact."""

    until: float
    announced_at: float = math.inf
    """When a swap that is held back is announced, unless it has begun by then."""


Step = Load | Cancel | Evict | Demote
"""The work of a driver, outside of its lock; all but ``Cancel`` are reported once they have ended."""


class Effects(NamedTuple):
    """All that a driver has to do after a fact.

    ``cut`` comes before ``steps``. The driver of threads does it outside of its lock, but for counting the
    requests that wait and for noting ``ask_at``.
    """

    woken: Sequence[Ticket] = ()
    """Tickets that waited, and are leased or have failed; never the one that was ``requested``."""
    cut: Sequence[Ticket] = ()
    """Leases that ended before their requests did."""
    steps: Sequence[Step] = ()
    mistakes: Sequence[Exception] = ()
    """Mistakes of ours in single GPU groups: what all others have to do stands here all the same."""
    ask_at: float | None = None
    """When ``time_passed`` is to be said, without a fact before; None: at the moment that was said last."""


NOTHING = Effects()
"""The effects of most facts: a lease and its release cost microseconds."""
