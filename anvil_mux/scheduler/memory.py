"""Memory, of GPUs and of hosts: what backends hold of it, what a load lacks, and who is evicted to make room.

``Placement`` is the arithmetic of a GPU group. Its GPUs have the names that they have among the GPUs of all
hosts. Memory is counted in bytes per GPU; a GPU of unknown size counts as one unit that every backend needs
whole, and a backend without declared ``vram`` needs every GPU so. Of such a backend it may be known what it
held when it last left: beside it other processes may hold no more than the rest of the GPU, so that nobody is
evicted for a load that cannot succeed.

An eviction says WHOM to evict: a frozen dataclass with ``order(candidate)``; those with the smallest order go
first. Given the bytes that a load still misses on each of its GPUs and the residents that may go, ``victims``
names some, or None when not even all of them would make room. Whatever the order, no backend is evicted whose
memory is not needed.

``HostMemory`` counts what engines keep of a host's memory, running and in standby, over all GPU groups. Its
invariant: no backend is in standby at so light a level that the sum exceeds the budget. Where host memory is
short, the backend in standby that is worth the least is demoted: a model that is often asked for is in
standby for short times and is worth much, so it stays at a light level. Idle residents of other GPU groups
are evicted for a queue that is overdue; a load that would not fit all the same is refused before anything is
drained.

Nothing here changes a state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import gib
from anvil_mux.config.machines import Gpu
from anvil_mux.scheduler.costs import Footprints
from anvil_mux.scheduler.events import mistake
from anvil_mux.scheduler.policies import build
from anvil_mux.scheduler.slot import HOLDING, HostRecord, Slot

HOST_MEMORY = "host memory"
"""The name that host memory has among GPUs where an eviction chooses who frees it."""
KEEPS_WEIGHTS = frozenset(("sleep", "checkpoint"))
"""Standby levels that move GPU memory to host memory."""
Worth = Callable[[Slot, float], Any]
"""The worth, at a moment, of a backend's staying at its level; the least valuable is demoted first."""


Weigh = Callable[[Slot], tuple[float, float]]
"""The ``loss`` and the ``waiting`` of a ``Candidate``."""


# The memory of GPUs


class Placement:
    """The slots of one GPU group and the memory of its GPUs."""

    def __init__(
        self,
        backends: Iterable[Backend],
        gpus: Iterable[Gpu],
        eviction: Callable[[], Eviction],
        hosts: Mapping[str, HostRecord] = MappingProxyType({}),
    ) -> None:
        """Make the slots of these backends. ``eviction``: the one that holds when victims are chosen."""
        self._hosts, self._eviction = hosts, eviction
        self.mistake = ""
        """The last mistake of the eviction that was not reported yet."""
        self.others: Mapping[str, int] = {}
        """GPU -> bytes that other processes hold there."""
        self.capacity: dict[str, int] = {}
        self._gpus: dict[str, Gpu] = {}
        self._own: dict[str, int] = {}
        """GPU with unified memory -> bytes of it that are no host memory."""
        self.slots: dict[str, Slot] = {}
        self.active: dict[Slot, None] = {}
        """The backends that hold memory, or may: of many that could be loaded there are few."""
        self.fill(backends, gpus)

    def fill(
        self,
        backends: Iterable[Backend],
        gpus: Iterable[Gpu],
        before: Mapping[str, Slot] = MappingProxyType({}),
    ) -> list[Slot]:
        """Have slots of just these backends; ``before``: those that they have already, and keep.

        Returns those that were not here, or are described otherwise.
        """
        gpus = [*gpus]
        was, known = dict(self.slots), self._gpus == {gpu.name: gpu for gpu in gpus}
        self._gpus = {gpu.name: gpu for gpu in gpus}
        self.capacity = {gpu.name: _capacity(gpu) for gpu in gpus}
        self._own = {gpu.name: (gpu.vram or 0) - gpu.shared for gpu in gpus if gpu.shared}
        self.slots.clear()
        different = []
        for each in backends:
            slot = before.get(each.name)
            if slot is None or slot.backend is not each or was.get(each.name) is not slot or not known:
                slot = self.describe(each, slot)
                different.append(slot)
            self.slots[each.name] = slot
        self.active = {slot: None for slot in self.slots.values() if slot.state != "stopped"}
        return different

    def note(self, slot: Slot) -> None:
        """Note that a backend has entered a state."""
        if slot.state == "stopped":
            self.active.pop(slot, None)
        else:
            self.active[slot] = None

    def describe(self, backend: Backend, slot: Slot | None) -> Slot:
        """The slot of a backend, which may have one already: this is its description from now on."""
        holds = {}
        for gpu in backend.gpu_names:
            whole = max(self.capacity.setdefault(gpu, 1), 1)
            holds[gpu] = backend.vram if backend.vram and whole > 1 else whole
        if slot is None:
            slot = Slot(backend, holds, host=self._hosts.get(backend.host) or HostRecord(backend.host))
            self._share(slot)
            return slot
        if slot.backend.ram != backend.ram:
            slot.ram = (backend.ram or 0) + slot.shared
        if slot.backend.pin != backend.pin:
            slot.pinned = backend.pin
        slot.backend, slot.holds, slot.whole = backend, holds, backend.vram is None
        return slot

    def measure(self, slot: Slot, held: Mapping[str, int]) -> None:
        """Note what a backend held when it last left, by GPU; count it if its memory is to be measured."""
        slot.held_last = held = slot.named(held)
        if slot.backend.vram_measured and held.keys() >= slot.holds.keys():
            slot.holds = {gpu: max(min(held[gpu], self.capacity[gpu]), 1) for gpu in slot.holds}
            slot.whole = False
        self._share(slot)

    def _share(self, slot: Slot) -> None:
        """Count what a backend needs of unified memory as host memory too; nothing if that is not known."""
        needs = slot.held_last if slot.whole else slot.holds
        slot.share(
            sum(max(needs.get(gpu, 0) - own, 0) for gpu, own in self._own.items() if gpu in slot.holds)
        )

    def missing(self, target: Slot, without: Collection[Slot] = (), *, runs: bool = False) -> dict[str, int]:
        """GPU -> bytes that must be freed before ``target`` fits; negative: room to spare.

        A target that needs a GPU whole takes what other processes and backends in standby leave of it, if
        that is as much as it is known to hold. The backends that it is to be ``without`` count as gone. One
        that ``runs`` already has its memory beside that of other processes, also on a missing GPU.
        """
        gpus = [gpu for gpu in target.holds if not (runs and self.capacity[gpu] == 0)]
        used = {gpu: 0 if runs else self._taken(target, gpu) for gpu in gpus}
        for slot in self.active:
            holding = slot.state in HOLDING
            if slot is target or slot in without or not (holding or slot.residual):
                continue
            for gpu, amount in (slot.holds if holding else slot.residual).items():
                if gpu in used and (holding or not self._needs_whole(target, gpu)):
                    used[gpu] += amount
        return {gpu: used[gpu] + target.holds[gpu] - self.capacity[gpu] for gpu in gpus}

    def _taken(self, target: Slot, gpu: str) -> int:
        """Bytes that other processes take away from ``target``."""
        others = self.others.get(gpu, 0)
        if not (others and self._needs_whole(target, gpu)):
            return others
        held, total = target.held_last.get(gpu), self._total(gpu)
        return max(others + held - total, 0) if held and total else 0

    def _total(self, gpu: str) -> int:
        """Bytes of a whole GPU; 0: nobody knows."""
        return (self._gpus[gpu].vram or 0) if gpu in self._gpus else 0

    def crowds(self, residual: Mapping[str, int]) -> bool:
        """Whether the memory that a backend keeps in standby would not fit beside the others."""
        for gpu, amount in residual.items():
            others = [slot for slot in self.slots.values() if gpu in slot.occupies]
            shared = sum(s.occupies[gpu] for s in others if s.state not in HOLDING or s.backend.vram)
            if amount and shared + amount > self.capacity.get(gpu, 1) > 1:
                return True
        return False

    def victims(
        self,
        target: Slot,
        busy: set[str],
        staying: Set[str] = frozenset(),
        weigh: Weigh = lambda _: (0.0, 0.0),
        without: Collection[Slot] = (),
    ) -> list[Slot] | None:
        """The backends to evict so that ``target`` fits, on no ``busy`` GPU; None if there is no such choice.

        Those are residents, and backends in standby whose residual is needed; none that is ``staying``, and
        no pinned resident. The backends that it is to be ``without`` count as gone.
        """
        if not busy.isdisjoint(target.holds):
            return None
        slots = [
            slot
            for slot in self._evictable(busy, staying)
            if not target.holds.keys().isdisjoint(slot.holds)
            and (slot.state == "ready" or self._in_the_way(slot, target))
        ]
        return self._choose([(slot, slot.occupies) for slot in slots], self.missing(target, without), weigh)

    def sparing_host(
        self,
        short: int,
        but: Collection[Slot],
        busy: set[str],
        staying: Set[str],
        weigh: Weigh,
    ) -> list[Slot] | None:
        """The residents, ``but`` some, to evict so that ``short`` bytes of the host's memory become free."""
        slots = [s for s in self._evictable(busy, staying) if s.state == "ready" and s not in but and s.ram]
        frees = [(slot, {HOST_MEMORY: slot.ram}) for slot in slots]
        return self._choose(frees, {HOST_MEMORY: short}, weigh)

    def _evictable(self, busy: set[str], staying: Set[str]) -> Iterator[Slot]:
        return (
            slot
            for slot in self.active
            if slot.state in ("ready", "standby")
            and not (slot.pinned and slot.state == "ready")
            and slot.name not in staying
            and busy.isdisjoint(slot.holds)
        )

    def _choose(
        self, slots: Iterable[tuple[Slot, Mapping[str, int]]], missing: Mapping[str, int], weigh: Weigh
    ) -> list[Slot] | None:
        candidates = []
        for slot, frees in slots:
            loss, waiting = weigh(slot)
            candidates.append(
                Candidate(
                    slot.name,
                    frees,
                    len(slot.holders),
                    slot.used,
                    slot.backend.priority,
                    loss=loss,
                    waiting=waiting,
                )
            )
        try:
            chosen = victims(self._eviction(), candidates, missing)
        except Exception as error:  # anybody's code
            self.mistake = mistake(error)
            chosen = victims(LeastLoss(), candidates, missing)
        return None if chosen is None else [self.slots[name] for name in chosen]

    def fit_together(self, one: Slot, other: Slot) -> bool:
        """Whether two backends may be resident at once."""
        return one is other or all(
            amount + other.holds.get(gpu, 0) <= self.capacity[gpu]
            for gpu, amount in one.holds.items()
            if gpu in other.holds
        )

    def fits(self, target: Slot, *, runs: bool = False) -> bool:
        """Whether there is room without an eviction; ``runs``: see ``missing``."""
        return all(amount <= 0 for amount in self.missing(target, runs=runs).values())

    def irremovable(self, target: Slot) -> list[Slot]:
        """The backends that cannot be evicted, if together they leave no room for ``target``.

        Those are pinned, or in standby and could not be stopped, or on a host that is lost.
        """
        for gpu, need in target.holds.items():
            found = self._irremovable(target, gpu)
            if need + _occupied(found, gpu) > self.capacity[gpu]:
                return found
        return []

    def _irremovable(self, target: Slot, gpu: str) -> list[Slot]:
        """The backends that cannot be evicted, and have memory of a GPU that ``target`` may not take."""
        holders = [slot for slot in self.active if slot is not target and slot.occupies.get(gpu)]
        if self._needs_whole(target, gpu):
            holders = [slot for slot in holders if slot.state in HOLDING]
        return [slot for slot in holders if _is_irremovable(slot)]

    def excludes(self, residual: Mapping[str, int], target: Slot) -> bool:
        """Whether ``target`` does not fit beside a ``residual``, even if all others are evicted."""
        return any(
            target.holds[gpu] + amount > self.capacity[gpu]
            for gpu, amount in residual.items()
            if gpu in target.holds and not self._needs_whole(target, gpu)
        )

    def _in_the_way(self, standby: Slot, target: Slot) -> bool:
        """Whether stopping a backend in standby frees memory; not for a target that takes its GPUs whole."""
        if standby is target or standby.failed_stops:
            return False
        return any(
            amount and gpu in target.holds and not self._needs_whole(target, gpu)
            for gpu, amount in standby.residual.items()
        )

    def _needs_whole(self, target: Slot, gpu: str) -> bool:
        return target.whole or self.capacity[gpu] <= 1

    def others_before(self, target: Slot) -> str:
        """How other processes leave ``target`` no room, whatever is evicted; "" if they leave it room."""
        for gpu, need in target.holds.items():
            taken, whole = self._taken(target, gpu), self._needs_whole(target, gpu)
            kept = _occupied(self._irremovable(target, gpu), gpu)
            if taken and need + taken + kept > self.capacity[gpu]:
                theirs = f"where other programs hold {gib(self.others[gpu])} (see /healthz)"
                if not whole:
                    return f"it needs {gib(need)} of GPU {gpu}, {theirs}"
                held, total = gib(target.held_last[gpu]), gib(self._total(gpu))
                say = "if it takes less now, declare that: x-anvil: {vram: ...}"
                return f"it held {held} of the {total} of GPU {gpu} when it last ran, {theirs}; {say}"
        return ""

    def missing_gpu(self, target: Slot) -> str:
        """Why a GPU that ``target`` needs cannot be used now; "" if all can."""
        whys = (self._gpus[gpu].missing for gpu in target.holds if gpu in self._gpus)
        return next(filter(None, whys), "")

    def never_fits(self, target: Slot) -> str:
        """Why ``target`` could not be loaded even if all that is not pinned were evicted; "" if it could."""
        pinned = [slot for slot in self.active if slot is not target and _is_pinned(slot)]
        for gpu, need in target.holds.items():
            if need + _occupied(pinned, gpu) > self.capacity[gpu]:
                names = ", ".join(other.name for other in pinned if gpu in other.holds)
                beside = f" beside the pinned {names} (see `anvil-mux unpin`)" if names else ""
                return f"it does not fit on GPU {gpu}{beside}"
        return ""


def _capacity(gpu: Gpu) -> int:
    """Bytes of a GPU for backends; 1: not known; 0: it is missing, so nothing can be loaded there."""
    if gpu.missing:
        return 0
    return max(gpu.vram - gpu.reserve, 1) if gpu.vram else 1


def _occupied(slots: Iterable[Slot], gpu: str) -> int:
    return sum([slot.occupies.get(gpu, 0) for slot in slots])


def _is_pinned(slot: Slot) -> bool:
    """Whether a backend is pinned and stays, whatever others need.

    One that is being unloaded does not, and one that is being loaded may fail to: who waits is judged then.
    """
    return slot.pinned and slot.state == "ready"


def _is_irremovable(slot: Slot) -> bool:
    """Whether a backend cannot be evicted for any other, as things are."""
    could_not_be_stopped = slot.state == "standby" and bool(slot.failed_stops)
    return _is_pinned(slot) or could_not_be_stopped


# Whom to evict


@dataclass(frozen=True, slots=True)
class Candidate:
    """A resident that may be evicted: neither pinned, nor loading, nor in another swap."""

    backend: str
    holds: Mapping[str, int]
    """GPU id -> bytes; where host memory is short, those alone, as ``host memory``."""
    leases: int
    last_used: float
    priority: int = 0
    loss: float = 0.0
    """The cost of evicting it: arrivals per second for it, times the seconds of loading it again."""
    waiting: float = 0.0
    """The requests that wait for a place at it, as it takes only so many at once."""


class Eviction(Protocol):
    def order(self, candidate: Candidate) -> Any: ...


@dataclass(frozen=True)
class LeastRecentlyUsed:
    """Evict models of low priority first, then idle ones, then the least recently used."""

    def order(self, candidate: Candidate) -> tuple[int, bool, float, str]:
        return (candidate.priority, candidate.leases > 0, candidate.last_used, candidate.backend)


@dataclass(frozen=True)
class LeastLoss:
    """Evict models of low priority first, then idle ones, then the least used and quickest to reload."""

    def order(self, candidate: Candidate) -> tuple[int, bool, float, float, str]:
        one = candidate
        return (one.priority, one.leases > 0, one.loss, one.last_used, one.backend)


@dataclass(frozen=True)
class LeastDemand:
    """Evict models of low priority first, then those with the fewest requests, then the least recently used.

    As SwapServeLLM has it (its section 3.5). Requests are those that run there and those that wait for a
    place.
    """

    def order(self, candidate: Candidate) -> tuple[int, float, float, str]:
        one = candidate
        return (one.priority, one.leases + one.waiting, one.last_used, one.backend)


EVICTIONS: dict[str, type] = {"cost": LeastLoss, "lru": LeastRecentlyUsed, "demand_lru": LeastDemand}


def build_eviction(name: str, settings: Mapping[str, object] | None = None) -> Eviction:
    """The eviction called ``name``; ValueError says what is wrong and what is known."""
    return build(EVICTIONS, "eviction", name, settings or {})  # type: ignore[return-value]


def victims(
    eviction: Eviction, candidates: Sequence[Candidate], missing: Mapping[str, int]
) -> tuple[str, ...] | None:
    """The backends to evict so that every value of ``missing`` (bytes by GPU) is covered, or None."""
    missing = left = {gpu: amount for gpu, amount in missing.items() if amount > 0}
    if not left:
        return ()
    chosen: list[Candidate] = []
    for candidate in sorted(candidates, key=eviction.order):
        if not left.keys().isdisjoint(candidate.holds):
            chosen.append(candidate)
            left = _left(left, [candidate])
    if left:
        return None
    if len(chosen) > 1:
        for candidate in tuple(chosen):
            rest = [other for other in chosen if other is not candidate]
            if not _left(missing, rest):
                chosen = rest
    return tuple([candidate.backend for candidate in chosen])


def _left(missing: Mapping[str, int], chosen: Iterable[Candidate]) -> dict[str, int]:
    """Bytes by GPU that are missing yet when these are gone."""
    left = dict(missing)
    for candidate in chosen:
        for gpu, amount in candidate.holds.items():
            if gpu in left:
                left[gpu] -= amount
    return {gpu: amount for gpu, amount in left.items() if amount > 0}


# The memory of a host


class HostMemory:
    """The memory of one host, and how much each backend there keeps of it. Its GPU groups share it."""

    def __init__(self, budget: int | None, footprints: Footprints, worth: Worth) -> None:
        self._footprints, self._worth = footprints, worth
        self.budget = budget
        """Bytes that all engines may have; None: it is not bounded."""
        self.is_changed = False
        """Whether a share of it changed since the GPU groups of the host were asked: they are to be again."""
        self._used_then = 0
        """The bytes of it that were used then."""
        self._slots: dict[str, Slot] = {}
        self._called: dict[str, str] = {}  # backend -> the model of another GPU group for which it is evicted

    def changed(self) -> None:
        """Note that a share of it changed."""
        self.is_changed = True

    def asked(self) -> bool:
        """Note that all GPU groups of the host are being asked; whether less is used than the last time."""
        before, self._used_then = self._used_then, self.used
        self.is_changed = False
        return self._used_then < before

    def keep(self, slots: Mapping[str, Slot]) -> None:
        """Count just these backends: others are not on this host any longer, and hold nothing here."""
        self._slots = dict(slots)
        self._called = {name: model for name, model in self._called.items() if name in slots}

    def short(self, target: Slot, leaving: Collection[Slot] = ()) -> int:
        """Bytes that are missing to run ``target`` if all in standby were stopped; at most 0 if none are."""
        if self.budget is None:
            return 0
        staying = (slot for slot in self._slots.values() if slot is not target and slot not in leaving)
        return target.ram + sum(map(_insists_on, staying)) - self.budget

    @property
    def used(self) -> int:
        """Bytes of all backends that run or are to, and of all in standby."""
        slots = self._slots.values()
        return sum([each.ram if each.state in HOLDING or each.coming else each.host_bytes for each in slots])

    def never_fits(self, target: Slot) -> str:
        """Why ``target`` could not run even alone; "" if it could."""
        need = target.least_ram  # what it has pinned since then goes with a stop
        if self.budget is None or need <= self.budget:
            return ""
        return f"it needs {gib(need)} of host memory; all engines together may use {gib(self.budget)}"

    def insisting(self, but: Slot) -> list[tuple[str, int]]:
        """The other backends that do not give up host memory, and how much they have, largest first."""
        amounts = [(name, _insists_on(slot)) for name, slot in self._slots.items() if slot is not but]
        return sorted(((name, amount) for name, amount in amounts if amount), key=lambda each: -each[1])

    def call(self, target: Slot, short: int, own: Collection[Slot], now: float) -> bool:
        """Have idle residents of other GPU groups evicted for ``target``; False if that frees too little.

        ``short``: the bytes that are to become free; ``own``: the slots of its GPU group. Backends that are
        being evicted already are waited for. The GPU groups of the others are asked again if that is news to
        any.
        """
        idle = []
        for slot in self._slots.values():
            if slot in own:
                continue
            if slot.state in ("draining", "evicting"):
                short -= slot.ram
            elif slot.ram and _is_idle(slot, now):
                idle.append((self._worth(slot, now), slot.name, slot.ram))
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
        room = self.budget + spare - sum(self._claimed(s) for s in self._slots.values() if s is not slot)
        return next((way for way in slot.levels if self._kept_on(slot, way) <= room), "stop")

    def makes_way(self, slot: Slot, now: float) -> bool:
        """Whether a victim gets a lighter level once others in standby that are worth less are demoted."""
        if self.budget is None or (next_level := self.level_for(slot)) == slot.backend.evict_to[0]:
            return False
        worth = self._worth(slot, now)
        spare = 0
        for other in self._slots.values():
            if other.state == "demoting":
                spare += max(other.host_bytes - self._kept_on(other, other.next_level), 0)
            elif other.state == "standby" and _leaves(other, now) and self._worth(other, now) < worth:
                spare += other.host_bytes
        return self.level_for(slot, spare) != next_level

    def has_room(self, target: Slot) -> bool:
        """Whether there is host memory to load ``target`` now.

        Others that are to be loaded do not count: two that wait for each other would wait for ever.
        """
        if self.budget is None or (target.state == "standby" and target.ram <= target.host_bytes):
            return True  # it takes no more than it has already
        others = sum(self._kept(slot) for slot in self._slots.values() if slot is not target)
        return others + max(target.ram, target.host_bytes) <= self.budget

    def yields(self, now: float) -> Slot | None:
        """The next backend to demote because host memory is short, or will be."""
        if self.budget is None:
            return None
        excess = sum(map(self._promised, self._slots.values())) - self.budget
        if excess <= 0:
            return None
        leaving = [slot for slot in self._slots.values() if _leaves(slot, now)]
        for slot in sorted(leaving, key=lambda slot: (self._worth(slot, now), slot.name)):
            if slot.state == "standby":
                return slot
            excess -= self._promised(slot)  # it takes a deeper level by itself when its drain has ended
            if excess <= 0:
                return None
        return None

    def lower(self, slot: Slot) -> str:
        """The next level at which a backend in standby keeps less host memory than now."""
        return next(
            (way for way in slot.descents(may_wake=False) if self._kept_on(slot, way) < slot.host_bytes),
            "stop",
        )

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
