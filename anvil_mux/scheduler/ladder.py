"""HOW DEEP: how far down its ladder a backend rests, and what all of them may keep of the host's memory.

A backend's ``rest`` is a ladder. It leaves its GPUs by the first rung, and is taken one rung down when it has
rested for ``demote_after``, or when host memory is short and no other sleeper is worth less. The last rung is
always ``stop``. A sleeper that is often called rests for short times and is worth much, so it stays high.

Not every rung can be reached from the one above without waking: ``DESCENTS`` has those that can be reached at
all, and whether the backend needs its GPUs for it. Those rungs are passed over while others have the GPUs.

``Host`` counts what engines keep of the host's memory, running and parked, over all islands. Its invariant:
what is parked is never parked so high that the sum exceeds the budget. What runs on other islands yields to a
line that is overdue, if nobody uses it; a load that would not fit beside the rest is refused before anything
is drained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from anvil_mux.config.config import Backend
from anvil_mux.config.settings import gib
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.placement import HOLDING, Seat

DESCENTS: dict[tuple[str, str], bool] = {
    ("sleep", "sleep-2"): True,
    ("sleep", "checkpoint"): False,
    ("sleep-2", "checkpoint"): False,
}
"""(way by which it rests, deeper way) -> whether it is woken for that. Everything can be stopped as it is."""

KEEPS_WEIGHTS = frozenset(("sleep", "checkpoint"))
"""Ways that move GPU memory to host memory."""

PINS = frozenset(("sleep",))
"""Ways after which an engine keeps the host memory even when it is awake again (vLLM)."""

Worth = Callable[[Seat, float], Any]
"""What it is worth at a moment that a backend rests as high as it does; the least yields first."""


def rungs(backend: Backend) -> tuple[str, ...]:
    """The whole ladder, from the top down."""
    return tuple(dict.fromkeys((*backend.rest, "stop")))


def below(seat: Seat, *, may_wake: bool) -> str:
    """The next rung for a parked backend; ``may_wake``: its GPUs are free for it."""
    return next(_descents(seat, may_wake=may_wake))


def _descents(seat: Seat, *, may_wake: bool) -> Iterator[str]:
    """The rungs that a parked backend can be taken to, from the top down; the last is ``stop``."""
    ladder = rungs(seat.backend)
    for way in ladder[ladder.index(seat.rests) + 1 :] if seat.rests in ladder else ():
        wakes = DESCENTS.get((seat.rests, way))
        if wakes is False or (wakes and may_wake):
            yield way
    yield "stop"


def demoted_at(seat: Seat) -> float | None:
    """When a parked backend has rested long enough; None: it may rest as it does."""
    after = seat.backend.demote_after
    return None if after is None or seat.state != "standby" else max(seat.since + after, seat.retry_at)


class Host:
    """The host's memory: who keeps how much of it. Shared by the islands, guarded like them."""

    def __init__(self, budget: int | None = None, footprints: Footprints | None = None) -> None:
        self._footprints = footprints or Footprints()
        self.budget = budget
        """Bytes; None: nobody counts."""
        self.changes = 0
        """How often somebody's share changed: then every island is to be asked again."""
        self._seats: dict[str, tuple[Seat, Worth]] = {}
        self._called: dict[str, str] = {}  # backend -> the model of another island that it is to go for

    def join(self, seat: Seat, worth: Worth) -> None:
        self._seats[seat.name] = seat, worth

    def short(self, target: Seat, leaving: Collection[Seat] = ()) -> int:
        """Bytes that are missing to run ``target``, even if every sleeper were stopped; at most 0 if none."""
        if self.budget is None:
            return 0
        staying = (seat for seat, _ in self._seats.values() if seat is not target and seat not in leaving)
        return target.ram + sum(map(_insists_on, staying)) - self.budget

    def never_fits(self, target: Seat) -> str:
        """Why it could not run even if nothing else did; "" if it could."""
        need = target.backend.ram or 0  # what it has pinned since then goes with a stop
        if self.budget is None or need <= self.budget:
            return ""
        return f"it needs {gib(need)} of host memory; engines may have {gib(self.budget)}"

    def insisting(self, but: Seat) -> list[tuple[str, int]]:
        """Who else keeps host memory and does not yield it, and how much, the largest first."""
        amounts = [(name, _insists_on(seat)) for name, (seat, _) in self._seats.items() if seat is not but]
        return sorted(((name, amount) for name, amount in amounts if amount), key=lambda each: -each[1])

    def call(self, target: Seat, short: int, own: Collection[Seat], now: float) -> bool:
        """Asks idle residents of other islands to go for ``target``; False if that frees too little.

        ``own``: those of its island. Whoever is about to leave anyway is waited for.
        """
        idle = []
        for seat, worth in self._seats.values():
            if seat in own:
                continue
            if seat.state in ("draining", "evicting"):
                short -= seat.ram
            elif seat.ram and _is_idle(seat, now):
                idle.append((worth(seat, now), seat.name, seat.ram))
        called = {}
        for _, name, ram in sorted(idle):
            if short > 0:
                called[name] = target.model
                short -= ram
        if short > 0:
            return False
        self._called |= called
        self.changes += 1 if called else 0
        return True

    def answer(self, seat: Seat, now: float) -> str:
        """The model that a resident was asked to go for; "" for none, and if it is not idle any more."""
        model = self._called.pop(seat.name, "")
        if model and not _is_idle(seat, now):
            self.changes += 1
            return ""
        return model

    def rung(self, seat: Seat, spare: int = 0) -> str:
        """The highest rung on which there is room for a backend that leaves its GPUs now.

        ``spare``: bytes that others keep still and will not.
        """
        if self.budget is None:
            return seat.backend.rest[0]
        room = self.budget + spare - sum(self._claimed(s) for s, _ in self._seats.values() if s is not seat)
        return next((way for way in rungs(seat.backend) if self._parked(seat, way) <= room), "stop")

    def makes_way(self, seat: Seat, now: float) -> bool:
        """Whether a backend that leaves its GPUs rests higher once sleepers that are worth less have gone."""
        if self.budget is None or (rung := self.rung(seat)) == seat.backend.rest[0]:
            return False
        worth = self._seats[seat.name][1](seat, now)
        spare = 0
        for other, worth_of in self._seats.values():
            if other.state == "demoting":
                spare += max(other.host_bytes - self._parked(other, other.rung), 0)
            elif other.state == "standby" and _leaves(other, now) and worth_of(other, now) < worth:
                spare += other.host_bytes
        return self.rung(seat, spare) != rung

    def has_room(self, target: Seat) -> bool:
        """Whether ``target`` can be loaded beside all that is kept as it is.

        Others that are to be loaded after it do not count: two that wait for each other would wait for ever.
        """
        if self.budget is None or (target.state == "standby" and target.ram <= target.host_bytes):
            return True  # it takes no more than it has already
        others = sum(self._kept(seat) for seat, _ in self._seats.values() if seat is not target)
        return others + max(target.ram, target.host_bytes) <= self.budget

    def yields(self, now: float) -> Seat | None:
        """The parked backend that must go down its ladder, because host memory is or will be short."""
        if self.budget is None:
            return None
        excess = sum(self._promised(seat) for seat, _ in self._seats.values()) - self.budget
        if excess <= 0:
            return None
        leaving = [
            (worth(seat, now), name) for name, (seat, worth) in self._seats.items() if _leaves(seat, now)
        ]
        for _, name in sorted(leaving):
            seat, _ = self._seats[name]
            if seat.state == "standby":
                return seat
            excess -= self._promised(seat)  # it takes a lower rung by itself when its drain has ended
            if excess <= 0:
                return None
        return None

    def lower(self, seat: Seat) -> str:
        """The next rung on which a parked backend keeps less of the host's memory than now."""
        ways = _descents(seat, may_wake=False)
        return next((way for way in ways if self._parked(seat, way) < seat.host_bytes), "stop")

    def _kept(self, seat: Seat) -> int:
        """Bytes that a backend keeps now, or when the step that it is in has ended."""
        if seat.state == "evicting":
            return max(seat.ram, self._parked(seat, seat.rung))
        return max(seat.ram, seat.host_bytes) if seat.state in HOLDING else seat.host_bytes

    def _claimed(self, seat: Seat) -> int:
        """The same, and what it needs if it is to be loaded."""
        return max(seat.ram, self._kept(seat)) if seat.coming else self._kept(seat)

    def _promised(self, seat: Seat) -> int:
        """Bytes that a backend will keep when what is under way has ended."""
        if seat.state == "demoting":
            return self._parked(seat, seat.rung)
        if seat.state == "draining":
            return max(seat.ram, self._parked(seat, seat.backend.rest[0]))
        return self._claimed(seat)

    def _parked(self, seat: Seat, way: str) -> int:
        """Bytes that a backend keeps while it rests: as last measured, or else what it takes along."""
        if way == "stop":
            return 0
        last = self._footprints.resting(seat.name, way)
        if last and last.host_bytes:
            return last.host_bytes
        return seat.ram + (sum(seat.holds.values()) if way in KEEPS_WEIGHTS else 0)


def _insists_on(seat: Seat) -> int:
    """Bytes that a backend keeps because it runs, or because it cannot be stopped."""
    if seat.state in HOLDING or seat.coming:
        return seat.ram
    return seat.host_bytes if seat.failed_stops else 0


def _is_idle(seat: Seat, now: float) -> bool:
    if seat.state != "ready" or seat.holders or seat.pinned:
        return False
    return seat.loaded + seat.backend.min_residency <= now


def _leaves(seat: Seat, now: float) -> bool:
    """Not one that could not be stopped a moment ago: nobody waits for it to go."""
    return not seat.coming and (
        seat.state == "draining" or (seat.state == "standby" and seat.retry_at <= now)
    )
