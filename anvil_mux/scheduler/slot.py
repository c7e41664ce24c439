"""A backend's slot in its GPU group, the tickets that lease it, and the steps that move it.

The slot has the state of the backend, its leases, and what is known of its last load and failures.

``Slot.enter`` is the only writer of a state, and ``TRANSITIONS`` the whole table of what it accepts:

    stopped --load--> loading --loaded--> ready --drain--> draining --evict--> evicting --> stopped | standby
                         |                  ^----reprieve-----'
                         '--cancel--> cancelling --> stopped
    standby --load--> loading
    standby --demote--> demoting --> stopped | standby

A backend that could not be stopped is ``stuck`` until a later stop succeeds; one in standby stays so. Once a
lost host is back, each of its backends is ``gone``, that is stopped, and then adopted if it was found there,
or ``unfit``. What follows from a new state for the rest of the GPU group is done in swaps.py.

All slots of a host refer to its ``HostRecord``, which says whether it is lost, and all of these to the one
``Pause``: while anvil-mux is paused nothing is loaded on any host, and the GPUs are free.

A backend's ``evict_to`` lists its standby levels. It leaves its GPUs by the first, and is demoted by one when
it has been there for ``demote_after``, or when host memory is short (memory.py). The last level is always
``stop``. Not every standby level can be reached from the one above without waking: ``DESCENTS`` has the
levels that can be reached at all, and whether the backend is woken for it. Such a level is passed over while
others have its GPUs.

``Ticket``s go in to the scheduler, ``Effects`` come out of it: beside the events nothing else passes between
it and who drives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import span
from anvil_mux.config.machines import gpu_name
from anvil_mux.errors import MuxError, Paused
from anvil_mux.routing.routing import Choice, Work
from anvil_mux.scheduler.events import RESENT, Cause, Leaving, Severance

TRANSITIONS: dict[tuple[str, str], str] = {
    ("stopped", "load"): "loading",
    ("standby", "load"): "loading",
    ("stopped", "adopt"): "ready",
    ("stopped", "adopt_standby"): "standby",
    ("loading", "loaded"): "ready",
    ("loading", "load_failed"): "stopped",
    ("loading", "evict_failed"): "stuck",
    ("loading", "cancel"): "cancelling",
    ("cancelling", "cancelled"): "stopped",
    ("cancelling", "loaded"): "ready",
    ("cancelling", "evict_failed"): "stuck",
    ("ready", "drain"): "draining",
    ("draining", "reprieve"): "ready",
    ("draining", "evict"): "evicting",
    ("evicting", "stopped"): "stopped",
    ("evicting", "standby"): "standby",
    ("evicting", "evict_failed"): "stuck",
    ("evicting", "not_begun"): "ready",
    ("stuck", "evict"): "evicting",
    ("ready", "died"): "stopped",
    ("draining", "died"): "stopped",
    ("standby", "died"): "stopped",
    ("stuck", "died"): "stopped",
    ("standby", "demote"): "demoting",
    ("demoting", "stopped"): "stopped",
    ("demoting", "standby"): "standby",
    ("demoting", "evict_failed"): "standby",
    ("demoting", "not_begun"): "standby",
    ("loading", "gone"): "stopped",
    ("cancelling", "gone"): "stopped",
    ("ready", "gone"): "stopped",
    ("draining", "gone"): "stopped",
    ("evicting", "gone"): "stopped",
    ("stuck", "gone"): "stopped",
    ("standby", "gone"): "stopped",
    ("demoting", "gone"): "stopped",
    ("stopped", "unfit"): "stuck",
}
"""State and what happened -> the next state. All else is a mistake of the caller, and changes nothing."""
STATES = sorted({state for state, _ in TRANSITIONS} | {*TRANSITIONS.values()})
"""The states of a backend. An event of one of these kinds tells that it entered it."""
HOLDING = frozenset(("loading", "cancelling", "ready", "draining", "evicting", "stuck"))
"""States in which a backend's GPUs are its own."""
STAYING = frozenset(("loading", "ready"))
"""States in which a pinned backend has its GPUs for good."""
PINS = frozenset(("sleep",))
"""Standby levels after which an engine keeps the host memory even when it is awake again (vLLM)."""
LOADING = ("loading", "cancelling")
"""States of a backend whose load is under way."""
DESCENTS: dict[tuple[str, str], bool] = {
    ("sleep", "sleep-2"): True,
    ("sleep", "checkpoint"): False,
    ("sleep-2", "checkpoint"): False,
}
"""Standby level and a deeper one -> whether a backend is woken on the way. ``stop`` follows on each."""
IS_PAUSED = "anvil-mux is paused: its GPUs are lent to something else"
COOL_DOWN_SECONDS = 5.0
MAX_COOL_DOWN_SECONDS = 300.0
STUCK_RETRY_SECONDS = 5.0
MAX_STUCK_RETRY_SECONDS = 60.0
SOON_SECONDS = 30.0
"""A backend that ends so soon after its load, without one whole answer, counts as one that failed to load.

An engine that a request crashes ends while it reads the first prompts, which takes seconds. One that takes
longer costs at most a load in so long, and each request no more than MOST_CRASHES of them.
"""


@dataclass(eq=False, slots=True)
class Pause:
    """Whether anvil-mux is paused. The records of all hosts refer to the same one."""

    is_on: bool = False
    since: float = -math.inf
    """When it was paused last."""
    until: float = math.inf
    """When it ends by itself; infinite: never."""
    waits: bool = False
    """Whether requests that come meanwhile wait for its end; else they are refused (`when_paused`)."""

    def begin(self, now: float, until: float) -> None:
        """Pause from now on, or until another moment than before."""
        if not self.is_on:
            self.is_on, self.since = True, now
        self.until = until

    def end(self) -> None:
        """Pause no longer."""
        self.is_on, self.until = False, math.inf

    @property
    def refuses(self) -> bool:
        """Whether requests are refused now."""
        return self.is_on and not self.waits

    def error(self, now: float) -> Paused:
        """The error of a request that is refused."""
        if self.until == math.inf:
            return Paused(f"{IS_PAUSED} until it is resumed by hand. Try again later.")
        left = max(self.until - now, 0.0)
        return Paused(f"{IS_PAUSED} for {span(left)} more. Try again then.", retry_after=left)


@dataclass(eq=False, slots=True)
class HostRecord:
    """One host. All slots of its backends refer to the same record."""

    name: str = ""
    """"": the host that anvil-mux runs on."""
    is_lost: bool = False
    """Whether the host does not answer. What ran there may still run, so its GPUs go to no other backend."""
    since: float = -math.inf
    """When it was lost last."""
    is_gone: bool = False
    """Whether it is lost, and was declared gone by hand: nothing runs there any more."""
    is_away: bool = False
    """Whether it cannot be steered for now: nothing is begun there, and what runs goes on."""
    why: str = ""
    """Why it is lost or away, as whoever watches it reports."""
    is_drained: bool = False
    """Whether it was drained by hand: nothing stays or is loaded there."""
    wake_timeout: float | None = None
    """Seconds that it may take to wake if it is lost; None: nobody can wake it."""
    no_wake_until: float = -math.inf
    """When it may be woken again, after that has failed."""
    wake_error: str = ""
    pause: Pause = field(default_factory=Pause)
    """The pause of all hosts."""

    @property
    def is_cleared(self) -> bool:
        """Whether nothing stays or is loaded there: it was drained by hand, or anvil-mux is paused."""
        return self.is_drained or self.pause.is_on

    @property
    def takes_loads(self) -> bool:
        """Whether anything may be loaded there."""
        return not (self.is_lost or self.is_drained or self.pause.is_on)

    def is_awaited(self, now: float) -> bool:
        """Whether requests may wait for a load there: it takes loads, or will when the pause is over or it is
        awake.
        """
        return not (self.is_drained or self.pause.refuses) and (not self.is_lost or self.may_wake(now))

    def may_wake(self, now: float) -> bool:
        """Whether it can be woken if it is lost, as far as is known."""
        return self.wake_timeout is not None and now >= self.no_wake_until

    @property
    def is_cut_off(self) -> bool:
        """Whether it is not known what still runs there."""
        return self.is_lost and not self.is_gone

    @property
    def is_steered(self) -> bool:
        """Whether steps may be begun there; what was declared gone needs none."""
        return not (self.is_away or self.is_cut_off)


@dataclass(eq=False, slots=True)
class Slot:
    """One backend's place in its GPU group."""

    backend: Backend
    holds: dict[str, int]
    """GPU -> bytes it holds while its state is one of HOLDING."""
    state: str = "stopped"
    since: float = -math.inf
    """When it entered its state."""
    drain_until: float = math.inf
    """When its leases are severed, if it is draining; infinite: when they end."""
    loaded: float = -math.inf
    """When it last became resident."""
    residency: int = 0
    """How often it has become resident: tells one time from the next, also where it was adopted."""
    last_used: float = -math.inf
    holders: dict[Any, float] = field(default_factory=dict)
    """The tickets that lease it, in order of admission, and since when."""
    gpu_seconds: float = 0.0
    """The seconds that each of its requests would have had of it, were it there from the beginning.

    While n run it grows by an nth of the time, so what one has had is the difference between two moments.
    """
    counted_at: float = 0.0
    """When that was last brought up to date."""
    residual: dict[str, int] = field(default_factory=dict)
    """GPU -> bytes it holds while in standby."""
    held_last: dict[str, int] = field(default_factory=dict)
    """GPU -> bytes it held when it last left, where that was read."""
    level: str = "stop"
    """The standby level at which it is while it is not resident, and from which it is loaded."""
    next_level: str = ""
    """The standby level to which it goes next; "": as high as host memory allows."""
    coming: bool = False
    """Whether it is the target of a swap."""
    pinned: bool = False
    """Whether it is kept, while it is resident, from being evicted for another model."""
    paused_as: str = ""
    """The name of its container, while that is paused by hand; "": it is not."""
    unloaded: bool = False
    """Whether it was unloaded by hand, and not loaded since."""
    made_way: float | None = None
    """Since when its GPUs are no longer left to other programs for which it was evicted; infinite: they are.

    None: it was loaded since then, or another backend in its place.
    """
    leaving: Leaving = ""
    """Why it leaves for good: the configuration has it no longer, or not as it is."""
    whole: bool = True
    """Whether it needs its GPUs to itself."""
    shared: int = 0
    """Bytes of GPU memory that it needs and that are host memory as well, as far as is known."""
    ram: int = 0
    """Bytes of host memory that it needs while it runs, as far as is known; with ``shared``."""
    host_bytes: int = 0
    """Bytes of host memory that it keeps while in standby."""
    failed_starts: int = 0
    """Loads that failed in a row."""
    crashes: int = 0
    """Ends soon after it was loaded, in a row: without one whole answer since the first of them."""
    answered: float = -math.inf
    """When it last gave a whole answer."""
    failed_stops: int = 0
    """Stops that failed in a row."""
    retry_at: float = -math.inf
    """End of the cool-down (stopped) or of the pause before the next attempt to stop it (stuck, standby)."""
    error: str = ""
    log: tuple[str, ...] = ()
    load_seconds: float | None = None
    keep_alive: float | None = None
    """The idle seconds for which a request asked that it stays, since its load; None: none did."""
    host: HostRecord = field(default_factory=HostRecord)
    name: str = field(init=False)
    model: str = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.model = self.backend.name, self.backend.model
        self.pinned = self.backend.pin
        self.whole = self.backend.vram is None
        self.ram = self.least_ram

    def count_time(self, now: float) -> None:
        """Bring ``gpu_seconds`` up to date; called before a lease begins or ends."""
        running = len(self.holders)
        if running:
            self.gpu_seconds += (now - self.counted_at) / running
        self.counted_at = now

    def let_go(self, now: float) -> None:
        """End all leases."""
        self.count_time(now)
        for ticket in self.holders:
            ticket.share += self.gpu_seconds
        self.holders.clear()

    def enter(self, what: str, now: float) -> None:
        """Go to the state that ``what`` leads to; ValueError, and no change, if that cannot happen to it."""
        try:
            self.state = TRANSITIONS[self.state, what]
        except KeyError:
            raise ValueError(f"{self.name} is {self.state}: `{what}` cannot happen to it") from None
        self.since = now
        self.residency += what in ("loaded", "adopt")
        if self.state in ("stopped", "standby"):
            self.paused_as = ""
        if self.state == "stopped":
            self.ram = self.least_ram  # what it had pinned is gone

    # What it holds, and how long it may stay

    @property
    def least_ram(self) -> int:
        """Bytes of host memory that it needs in any case; on unified memory GPU memory is a part of them."""
        return (self.backend.ram or 0) + self.shared

    def share(self, shared: int) -> None:
        """Note how much of its GPU memory is host memory as well."""
        self.ram += shared - self.shared
        self.shared = shared

    @property
    def is_resident(self) -> bool:
        """Whether it is ready and stays so for now; a server elsewhere does whatever becomes of our hosts."""
        return self.state == "ready" and (bool(self.backend.url) or self.host.takes_loads)

    @property
    def serves(self) -> bool:
        """Whether it may be leased: it is resident, and nobody has paused its container by hand."""
        return self.is_resident and not self.paused_as

    @property
    def pause_words(self) -> str:
        """Tell people that it was paused by hand, and how it goes on."""
        return f"{self.name} was paused by hand: `docker unpause {self.paused_as}` lets it answer."

    def named(self, amounts: Mapping[str, int]) -> dict[str, int]:
        """Amounts by GPU id of its host -> the same by the names that GPUs have among those of all hosts."""
        host = self.host.name
        return {gpu_name(host, id): amount for id, amount in amounts.items()} if host else dict(amounts)

    @property
    def is_endless(self) -> bool:
        """Whether it drains, and for as long as its leases take."""
        return self.state == "draining" and bool(self.holders) and self.drain_until == math.inf

    @property
    def occupies(self) -> dict[str, int]:
        """GPU -> bytes it holds now."""
        return self.holds if self.state in HOLDING else self.residual

    @property
    def full(self) -> bool:
        """Whether it has as many requests as it takes at once."""
        limit = self.backend.concurrency
        return limit is not None and len(self.holders) >= limit

    @property
    def used(self) -> float:
        """When it last had work, or became resident."""
        return self.last_used if self.last_used > self.loaded else self.loaded

    @property
    def ttl(self) -> float | None:
        """Idle seconds after which it is evicted although nobody needs its GPUs; None: never.

        A home backend stays, whatever a request asked for: it would only come back. So does a server
        elsewhere.
        """
        own = self.keep_alive is None or self.backend.home or self.backend.url
        return self.backend.ttl if own else self.keep_alive

    @property
    def idle_until(self) -> float:
        """When it is evicted because it is not used."""
        ttl = self.ttl
        return math.inf if self.state != "ready" or self.holders or ttl is None else self.used + ttl

    @property
    def stays_until(self) -> float:
        """Until when it is not evicted for a queue that is not overdue."""
        return self.loaded + self.backend.min_residency

    @property
    def has_had_work(self) -> bool:
        """Whether it was leased since it was loaded."""
        return bool(self.holders) or self.last_used > self.loaded

    @property
    def is_left(self) -> bool:
        """Whether the backend left for good, and holds nothing any more."""
        return bool(self.leaving) and self.state == "stopped"

    @property
    def load_level(self) -> str:
        """The standby level from which it is loaded next, as things are."""
        return self.level if self.state in ("stopped", "standby") else self.backend.evict_to[0]

    def is_loadable(self, now: float) -> bool:
        """Whether a load of it may begin, were its GPUs free."""
        if self.leaving:
            return False
        return self.state == "standby" or (self.state == "stopped" and self.retry_at <= now)

    # Its standby levels

    @property
    def levels(self) -> tuple[str, ...]:
        """The standby levels that it may take, from the lightest down to ``stop``."""
        return tuple(dict.fromkeys((*self.backend.evict_to, "stop")))

    def below(self, *, may_wake: bool) -> str:
        """The next standby level for it in standby; ``may_wake``: its GPUs are free for it."""
        return next(self.descents(may_wake=may_wake))

    def descents(self, *, may_wake: bool) -> Iterator[str]:
        """The levels that it can be taken to in standby, the lightest first; the last is ``stop``."""
        levels = self.levels
        for way in levels[levels.index(self.level) + 1 :] if self.level in levels else ():
            wakes = DESCENTS.get((self.level, way))
            if wakes is False or (wakes and may_wake):
                yield way
        yield "stop"

    @property
    def demoted_at(self) -> float | None:
        """When it has been at its standby level for long enough; None: it may stay there."""
        after = self.backend.demote_after
        return None if after is None or self.state != "standby" else max(self.since + after, self.retry_at)

    # Loads, evictions and failures

    def note_loaded(self, now: float, seconds: float, level: str) -> None:
        """The backend answers, loaded from this standby level in so many seconds."""
        self.loaded, self.load_seconds = now, seconds
        self.failed_starts, self.failed_stops, self.error, self.log = 0, 0, "", ()
        self.retry_at = min(self.retry_at, now)  # a stop that failed while it was in standby is settled
        self.level = "stop"
        if level == "stop":
            self.ram = self.least_ram

    def note_load_failed(self, now: float, error: str, log: tuple[str, ...]) -> None:
        """The backend did not become ready, and may not be loaded again before its cool-down ends."""
        self.failed_starts += 1
        self.retry_at = now + cool_down(self.failed_starts)
        self.error, self.log, self.next_level = error, log, ""

    def keep_in_standby(self, level: str, residual: dict[str, int], host_bytes: int) -> None:
        """The backend is at a standby level, or stopped, and keeps so much on its GPUs and in host memory."""
        self.level, self.residual, self.host_bytes = level, residual, host_bytes
        if level in PINS:
            self.ram = max(self.ram, host_bytes)

    def note_left(self, now: float) -> None:
        """The backend left its GPUs; if its loads had failed it cools down from now on."""
        self.failed_stops = 0
        self.retry_at = now + cool_down(self.failed_starts)
        if not self.failed_starts:
            self.error = ""

    def note_stop_failed(self, now: float, error: str) -> None:
        """The backend could not be stopped, and is stopped again after a pause."""
        self.failed_stops += 1
        self.retry_at = now + _pause(STUCK_RETRY_SECONDS, self.failed_stops, MAX_STUCK_RETRY_SECONDS)
        self.error = error
        self.next_level = "stop" if self.state == "standby" else ""

    def note_died(self, error: str, log: Iterable[str]) -> None:
        """The backend ended, and keeps nothing."""
        self.error, self.residual, self.level, self.host_bytes, self.next_level = error, {}, "stop", 0, ""
        self.log = tuple(log)

    def note_gone(self, now: float) -> None:
        """The backend keeps nothing any more on its host, which was lost."""
        self.residual, self.level, self.host_bytes, self.next_level = {}, "stop", 0, ""
        self.failed_stops, self.retry_at = 0, now

    def judge_end(self, now: float, why: str) -> Cause:
        """The cause of an end by itself, which counts as a failed load if it was too soon."""
        resident = self.state in ("ready", "draining", "evicting")
        if not resident or self.answered >= self.loaded or now - self.loaded > SOON_SECONDS:
            return Cause("died", detail=why)
        self.crashes += 1
        self.failed_starts = self.crashes
        return Cause("died_early", seconds=now - self.loaded, detail=why)


def cool_down(failed_starts: int) -> float:
    """Seconds until a backend may be loaded again."""
    return _pause(COOL_DOWN_SECONDS, failed_starts, MAX_COOL_DOWN_SECONDS) if failed_starts else 0.0


def _pause(first: float, failures: int, longest: float) -> float:
    return min(first * 2.0 ** min(failures - 1, 10), longest)


# Tickets


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
    may_stay: bool = True
    """False: it holds its GPUs until it was stopped."""


RUNS = FoundBackend()


class Crash(NamedTuple):
    """The end of a backend by itself, under its requests."""

    backend: str
    why: str
    """How it ended; goes on from its name."""
    log: tuple[str, ...] = ()
    """The last lines that its engine had printed."""


@dataclass(eq=False, slots=True, repr=False)
class Ticket:
    """One request's identity, from its arrival to its end. Guarded like the GPU group that it is given to."""

    id: int
    model: str
    since: float
    takes_lease: bool = True
    """Whether it takes a lease; if not it only wants the model loaded."""
    work: Work = NO_WORK
    prefill: Ticket | None = None
    """The ticket of its first stage, leased with it if backends of both stages are resident."""
    sender: Hashable = None
    """The client that it counts for: where a queue is admitted in parts, senders take turns."""
    crashes: tuple[Crash, ...] = ()
    """The ends of backends at which the same request was there, as another ticket."""
    request: str = ""
    """The id of its request, as its client was told."""
    resent: bool = False
    """Whether the same request came before, as another ticket: it counts once."""
    never_swaps: bool = False
    """Whether it may force no swap: it is leased by what is ready, or fails."""
    crash: Crash | None = None
    """The end of a backend that ended its lease."""
    backend: str | None = None
    choice: Choice | None = None
    """Why that backend, where the model has several."""
    error: MuxError | None = None
    severed: Severance | None = None
    share: float = 0.0
    """Seconds that it had of its backend, once its lease has ended: a part of the time, if others ran.

    Until then less than nothing: what ``Slot.gpu_seconds`` was when the lease began.
    """
    granted: Any = None
    """An object of the driver, by which it knows what was leased, whatever becomes of the backend."""
    wake: Any = None
    """An object of the driver, by which it goes on when this ticket has ended waiting."""
    cut: Callable[[], None] | None = None
    """A call of the driver, by which it cuts the request when it is severed."""

    @property
    def taken_back(self) -> bool:
        """Whether it was severed to be sent to another replica."""
        return self.severed is not None and self.severed.cause.kind in RESENT

    @property
    def settled(self) -> bool:
        return self.backend is not None or self.error is not None


# Steps and effects


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
    """Take the backend off its GPUs, then report ``evicted``, ``evict_failed`` or ``evict_not_begun``."""

    backend: str
    level: str
    """The standby level that is asked for; a deeper one may be taken."""
    severed: tuple[Ticket, ...] = ()
    """The leases that outlasted the drain: they are cut before."""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Demote:
    """Take a backend in standby to a deeper level, then report as after ``Evict``."""

    backend: str
    level: str
    """The standby level that it is in."""
    to: str
    """The deeper level that is asked for; an even deeper one may be taken."""
    number: int = 0


Step = Load | Cancel | Evict | Demote
"""The work of a driver, outside of its lock; all but ``Cancel`` are reported once they have ended."""


class Wait(NamedTuple):
    """Nothing to do before ``until`` or the next fact."""

    until: float
    announced_at: float = math.inf
    """When a swap that is held back is announced, unless it has begun by then."""


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
