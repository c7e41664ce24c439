"""HOW DEEP: at which standby level a backend is, and how much of the host's memory all of them may keep.

A backend's ``evict_to`` lists its standby levels. It leaves its GPUs by the first, and is demoted by one when
it has been there for ``demote_after``, or when host memory is short and no other backend in standby is worth
less. The last level is always ``stop``. A model that is often asked for is in standby for short times and is
worth much, so it stays at a light level.

Not every standby level can be reached from the one above without waking: ``DESCENTS`` has the levels that can
be reached at all, and whether the backend is woken for it. Such a level is passed over while others have its
GPUs.

``HostMemory`` counts what engines keep of the host's memory, running and in standby, over all GPU groups. Its
invariant: no backend is in standby at so light a level that the sum exceeds the budget. Idle residents of
other GPU groups are evicted for a queue that is overdue; a load that would not fit all the same is refused
before anything is drained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import gib
from anvil_mux.scheduler.costs import Footprints
from anvil_mux.scheduler.slot import HOLDING, Slot

DESCENTS: dict[tuple[str, str], bool] = {
    ("sleep", "sleep-2"): True,
    ("sleep", "checkpoint"): False,
    ("sleep-2", "checkpoint"): False,
}
"""Standby level and a deeper one -> whether a backend is woken on the way. ``stop`` follows on each."""

KEEPS_WEIGHTS = frozenset(("sleep", "checkpoint"))
"""Standby levels that move GPU memory to host memory."""

Worth = Callable[[Slot, float], Any]
"""The worth, at a moment, of a backend's staying at its level; the least valuable is demoted first."""


def levels(backend: Backend) -> tuple[str, ...]:
    """The standby levels that a backend may take, from the lightest down to ``stop``."""
    return tuple(dict.fromkeys((*backend.evict_to, "stop")))


def below(slot: Slot, *, may_wake: bool) -> str:
    """The next standby level for a backend in standby; ``may_wake``: its GPUs are free for it."""
    return next(_descents(slot, may_wake=may_wake))


def _descents(slot: Slot, *, may_wake: bool) -> Iterator[str]:
    """The levels that a backend in standby can be taken to, the lightest first; the last is ``stop``."""
    all_levels = levels(slot.backend)
    for way in all_levels[all_levels.index(slot.level) + 1 :] if slot.level in all_levels else ():
        wakes = DESCENTS.get((slot.level, way))
        if wakes is False or (wakes and may_wake):
            yield way
    yield "stop"


def demoted_at(slot: Slot) -> float | None:
    """When a backend has been at its standby level for long enough; None: it may stay there."""
    after = slot.backend.demote_after
    return None if after is None or slot.state != "standby" else max(slot.since + after, slot.retry_at)


class HostMemory:
    """The memory of one host, and how much each backend there keeps of it. Its GPU groups share it."""

    def __init__(self, budget: int | None = None, footprints: Footprints | None = None) -> None:
        self._footprints = footprints or Footprints()
        self.budget = budget
        """Bytes that all engines may have; None: it is not bounded."""
        self.is_changed = False
        """Whether a share of it changed since the GPU groups of the host were asked: they are to be again."""
        self._used_then = 0
        """The bytes of it that were used then."""
        self._slots: dict[str, tuple[Slot, Worth]] = {}
        self._called: dict[str, str] = {}  # backend -> the model of another GPU group for which it is evicted

    def changed(self) -> None:
        """Note that a share of it changed."""
        self.is_changed = True

    def asked(self) -> bool:
        """Note that all GPU groups of the host are being asked; whether less is used than the last time."""
        before, self._used_then = self._used_then, self.used
        self.is_changed = False
        return self._used_then < before

    def join(self, slot: Slot, worth: Worth) -> None:
        self._slots[slot.name] = slot, worth

    def keep(self, backends: Collection[str]) -> None:
        """Count only these: others are not on this host any longer, and hold nothing here."""
        for name in [each for each in self._slots if each not in backends]:
            del self._slots[name]
            self._called.pop(name, None)

    def short(self, target: Slot, leaving: Collection[Slot] = ()) -> int:
        """Bytes that are missing to run ``target`` if all in standby were stopped; at most 0 if none are."""
        if self.budget is None:
            return 0
        staying = (slot for slot, _ in self._slots.values() if slot is not target and slot not in leaving)
        return target.ram + sum(map(_insists_on, staying)) - self.budget

    @property
    def used(self) -> int:
        """Bytes of all backends that run or are to, and of all in standby."""
        slots = [slot for slot, _ in self._slots.values()]
        return sum([each.ram if each.state in HOLDING or each.coming else each.host_bytes for each in slots])

    def never_fits(self, target: Slot) -> str:
        """Why ``target`` could not run even alone; "" if it could."""
        need = target.least_ram  # what it has pinned since then goes with a stop
        if self.budget is None or need <= self.budget:
            return ""
        return f"it needs {gib(need)} of host memory; all engines together may use {gib(self.budget)}"

    def insisting(self, but: Slot) -> list[tuple[str, int]]:
        """The other backends that do not give up host memory, and how much they have, largest first."""
        amounts = [(name, _insists_on(slot)) for name, (slot, _) in self._slots.items() if slot is not but]
        return sorted(((name, amount) for name, amount in amounts if amount), key=lambda each: -each[1])

    def call(self, target: Slot, short: int, own: Collection[Slot], now: float) -> bool:
        """Have idle residents of other GPU groups evicted for ``target``; False if that frees too little.

        ``short``: the bytes that are to become free; ``own``: the slots of its GPU group. Backends that are
        being evicted already are waited for. The GPU groups of the others are asked again if that is news to
        any.
        """
        idle = []
        for slot, worth in self._slots.values():
            if slot in own:
                continue
            if slot.state in ("draining", "evicting"):
                short -= slot.ram
            elif slot.ram and _is_idle(slot, now):
                idle.append((worth(slot, now), slot.name, slot.ram))
        called = {}
        for _, name, ram in sorted(idle):
            if short > 0:
                called[name] = target.model
                short -= ram
        if short > 0:
            return False
        if not called.items() <= self._called.items():
            self._called |= called
            self.is_changed = True
        return True

    def answer(self, slot: Slot, now: float) -> str:
        """The model for which a resident is to be evicted; "" for none, and if it is not idle any more."""
        model = self._called.pop(slot.name, "")
        if model and not _is_idle(slot, now):
            self.is_changed = True
            return ""
        return model

    def level_for(self, slot: Slot, spare: int = 0) -> str:
        """The lightest standby level for which there is room, of a backend that leaves its GPUs now.

        ``spare``: bytes that others still keep, and are about to free.
        """
        if self.budget is None:
            return slot.backend.evict_to[0]
        room = self.budget + spare - sum(self._claimed(s) for s, _ in self._slots.values() if s is not slot)
        return next((way for way in levels(slot.backend) if self._kept_on(slot, way) <= room), "stop")

    def makes_way(self, slot: Slot, now: float) -> bool:
        """Whether a victim gets a lighter level once others in standby that are worth less are demoted."""
        if self.budget is None or (next_level := self.level_for(slot)) == slot.backend.evict_to[0]:
            return False
        worth = self._slots[slot.name][1](slot, now)
        spare = 0
        for other, worth_of in self._slots.values():
            if other.state == "demoting":
                spare += max(other.host_bytes - self._kept_on(other, other.next_level), 0)
            elif other.state == "standby" and _leaves(other, now) and worth_of(other, now) < worth:
                spare += other.host_bytes
        return self.level_for(slot, spare) != next_level

    def has_room(self, target: Slot) -> bool:
        """Whether there is host memory to load ``target`` now.

        Others that are to be loaded do not count: two that wait for each other would wait for ever.
        """
        if self.budget is None or (target.state == "standby" and target.ram <= target.host_bytes):
            return True  # it takes no more than it has already
        others = sum(self._kept(slot) for slot, _ in self._slots.values() if slot is not target)
        return others + max(target.ram, target.host_bytes) <= self.budget

    def yields(self, now: float) -> Slot | None:
        """The next backend to demote because host memory is short, or will be."""
        if self.budget is None:
            return None
        excess = sum(self._promised(slot) for slot, _ in self._slots.values()) - self.budget
        if excess <= 0:
            return None
        leaving = [
            (worth(slot, now), name) for name, (slot, worth) in self._slots.items() if _leaves(slot, now)
        ]
        for _, name in sorted(leaving):
            slot, _ = self._slots[name]
            if slot.state == "standby":
                return slot
            excess -= self._promised(slot)  # it takes a deeper level by itself when its drain has ended
            if excess <= 0:
                return None
        return None

    def lower(self, slot: Slot) -> str:
        """The next level at which a backend in standby keeps less host memory than now."""
        ways = _descents(slot, may_wake=False)
        return next((way for way in ways if self._kept_on(slot, way) < slot.host_bytes), "stop")

    def _kept(self, slot: Slot) -> int:
        """Bytes that a backend keeps now, or when the step that it is in has ended."""
        if slot.state == "evicting":
            return max(slot.ram, self._kept_on(slot, slot.next_level))
        return max(slot.ram, slot.host_bytes) if slot.state in HOLDING else slot.host_bytes

    def _claimed(self, slot: Slot) -> int:
        """The same, and what it needs if it is to be loaded."""
        return max(slot.ram, self._kept(slot)) if slot.coming else self._kept(slot)

    def _promised(self, slot: Slot) -> int:
        """Bytes that a backend will keep when what is under way has ended."""
        if slot.state == "demoting":
            return self._kept_on(slot, slot.next_level)
        if slot.state == "draining":
            return max(slot.ram, self._kept_on(slot, slot.backend.evict_to[0]))
        return self._claimed(slot)

    def _kept_on(self, slot: Slot, way: str) -> int:
        """Bytes that a backend keeps in standby: as last measured, or else what it takes along.

        That is the GPU memory that it held when it last left, or else what it may hold.
        """
        if way == "stop":
            return 0
        last = self._footprints.in_standby(slot.name, way, slot.backend.service.digest)
        if last and last.host_bytes:
            return last.host_bytes
        held = {**slot.holds, **slot.held_last}
        return slot.ram - slot.shared + (sum(held.values()) if way in KEEPS_WEIGHTS else 0)


def _insists_on(slot: Slot) -> int:
    """Bytes that a backend keeps because it runs, or could not be stopped."""
    if slot.state in HOLDING or slot.coming:
        return slot.ram
    return slot.host_bytes if slot.failed_stops else 0


def _is_idle(slot: Slot, now: float) -> bool:
    if slot.state != "ready" or slot.holders or slot.pinned or not slot.host.is_steered:
        return False
    return slot.stays_until <= now


def _leaves(slot: Slot, now: float) -> bool:
    """Whether a backend will leave its level soon, or can be demoted, so that host memory is freed."""
    if slot.coming or not slot.host.is_steered:
        return False
    return slot.state == "draining" or (slot.state == "standby" and slot.retry_at <= now)
