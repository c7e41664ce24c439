"""A scheduler in a trial, with its driver: its tickets, its steps under way, the moment that it named.

The facts, by kind, with what each is about:

    request, wish (only the load) MODEL; release BACKEND (its oldest lease), abandon MODEL (its newest request
    that waits), late (the end of a lease that was cut)
    loaded, load_failed, load_cancelled, evicted, stopped (asked for a lighter level), evict_failed,
    not_begun BACKEND
    expected, looked_at, up, standby, died BACKEND
    unload, pin, unpin MODEL; pause SECONDS; resume; others GPU BYTES
    away, heard, lost, gone, drained, undrained HOST; found (it is back) HOST BACKEND...; missing HOST
    time_passed; and, made of these, time (to the moment that was named) and pass SECONDS
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from anvil_mux.config.config import Config
from anvil_mux.errors import LoadError
from anvil_mux.scheduler.costs import Costs, Footprints
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import Cancel, Demote, Effects, Evict, FoundBackend, Load, Step, Ticket
from tests.explorer.worlds import Fact, SmallWorld

MakeScheduler = Callable[..., Scheduler]
REQUESTS = ("request", "wish")


class Subject:
    """A scheduler under one configuration."""

    def __init__(self, config: Config, world: SmallWorld, make: MakeScheduler) -> None:
        self.log: list[Event] = []
        self.tickets: dict[int, Ticket] = {}
        self.steps: dict[str, tuple[Step, float]] = {}
        """Backend -> its step under way, and since when."""
        self.cancelled: dict[str, None] = {}
        """The backends whose load under way is being cancelled."""
        self.ask_at = math.inf
        self._world = world
        self.core = make(config, self.log.append, Costs(), Footprints())

    def tell(self, fact: Fact, number: int, now: float) -> Effects:
        """Tell one fact; ``number``: that of the ticket that it is about."""
        kind, *what = fact
        effects = _FACTS[kind](self, what, number, now)
        for step in effects.steps:
            if isinstance(step, Cancel):
                self.cancelled[step.backend] = None
            else:
                self.steps[step.backend] = step, now
        if effects.ask_at is not None:
            self.ask_at = effects.ask_at
        return effects

    def lose(self, backend: str) -> None:
        """How the step of a backend ends will not be known."""
        self.steps.pop(backend, None)
        self.cancelled.pop(backend, None)

    def level_after(self, backend: str, kind: str) -> str:
        """The standby level to which the step of a backend leads that ends so."""
        step, _ = self.steps[backend]
        if kind == "stopped":
            return "stop"
        assert isinstance(step, (Evict, Demote))
        return step.to if isinstance(step, Demote) else step.level

    def _request(self, kind: str, model: str, number: int, now: float) -> Effects:
        ticket = self.tickets[number] = Ticket(number, model, now, takes_lease=kind == "request")
        return self.core.requested(ticket, now)

    def _ended(self, backend: str) -> Step:
        step, _ = self.steps[backend]
        self.lose(backend)
        return step

    def _loaded(self, backend: str, now: float) -> Effects:
        step = self._ended(backend)
        assert isinstance(step, Load)
        return self.core.loaded(step, now, step.level)

    def _evicted(self, kind: str, backend: str, now: float) -> Effects:
        how = self.level_after(backend, kind)
        left = self._residual(backend) if how != "stop" else {}
        step = self._ended(backend)
        return self.core.evicted(step, now, level=how, residual=left, host_bytes=self._world.host_bytes)

    def _in_standby(self, backend: str, now: float) -> Effects:
        how, left = self._world.backend(backend).evict_to[0], self._residual(backend)
        return self.core.adopted(backend, now, FoundBackend(how, left, self._world.host_bytes))

    def _residual(self, backend: str) -> dict[str, int]:
        return dict.fromkeys(self._world.backend(backend).gpus, self._world.residual)


def _back(subject: Subject, what: Sequence[str], now: float) -> Effects:
    return subject.core.host_back(what[0], now, {each: FoundBackend() for each in what[1:]})


def _held_by_others(subject: Subject, gpu: str, amount: str, *, now: float) -> Effects:
    host, _, id = gpu.rpartition("/")
    return subject.core.memory_seen({id: int(amount)}, now, host)


_FACTS: dict[str, Callable[[Subject, Sequence[str], int, float], Effects]] = {
    "request": lambda s, what, number, now: s._request("request", what[0], number, now),
    "wish": lambda s, what, number, now: s._request("wish", what[0], number, now),
    "release": lambda s, what, number, now: s.core.released(s.tickets[number], now),
    "late": lambda s, what, number, now: s.core.released(s.tickets[number], now),
    "abandon": lambda s, what, number, now: s.core.abandoned(s.tickets[number], now),
    "loaded": lambda s, what, number, now: s._loaded(what[0], now),
    "load_failed": lambda s, what, number, now: s.core.load_failed(
        s._ended(what[0]), now, LoadError("it does not start")
    ),
    "load_cancelled": lambda s, what, number, now: s.core.load_cancelled(s._ended(what[0]), now),
    "evicted": lambda s, what, number, now: s._evicted("evicted", what[0], now),
    "stopped": lambda s, what, number, now: s._evicted("stopped", what[0], now),
    "evict_failed": lambda s, what, number, now: s.core.evict_failed(
        s._ended(what[0]), now, "it does not stop"
    ),
    "not_begun": lambda s, what, number, now: s.core.evict_not_begun(
        s._ended(what[0]), now, "Docker does not answer"
    ),
    "expected": lambda s, what, number, now: s.core.expected(what),
    "looked_at": lambda s, what, number, now: s.core.looked_at(what[0], now),
    "up": lambda s, what, number, now: s.core.adopted(what[0], now),
    "standby": lambda s, what, number, now: s._in_standby(what[0], now),
    "died": lambda s, what, number, now: s.core.died(what[0], now, "was killed"),
    "unload": lambda s, what, number, now: s.core.unload_asked(what[0], now),
    "hint": lambda s, what, number, now: s.core.hinted(what[0], now),
    "pin": lambda s, what, number, now: s.core.pinned(what[0], now, pinned=True),
    "unpin": lambda s, what, number, now: s.core.pinned(what[0], now, pinned=False),
    "pause": lambda s, what, number, now: s.core.paused(now, now + float(what[0])),
    "resume": lambda s, what, number, now: s.core.resumed(now),
    "others": lambda s, what, number, now: _held_by_others(s, *what, now=now),
    "away": lambda s, what, number, now: s.core.host_away(what[0], now, away=True),
    "heard": lambda s, what, number, now: s.core.host_away(what[0], now, away=False),
    "lost": lambda s, what, number, now: s.core.host_lost(what[0], now),
    "unwoken": lambda s, what, number, now: s.core.host_unwoken(what[0], now, "it does not wake"),
    "gone": lambda s, what, number, now: s.core.host_gone(what[0], now),
    "found": lambda s, what, number, now: _back(s, what, now),
    "missing": lambda s, what, number, now: _back(s, what, now),
    "drained": lambda s, what, number, now: s.core.host_drained(what[0], now, drained=True),
    "undrained": lambda s, what, number, now: s.core.host_drained(what[0], now, drained=False),
    "time_passed": lambda s, what, number, now: s.core.time_passed(now),
}
