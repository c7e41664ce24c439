"""Which GPUs a backend holds, what it misses to be loaded, and whose going would make room.

The arithmetic of an island. Memory is counted in bytes per GPU; a GPU of unknown size counts as one unit that
every backend needs whole, and so does a backend without declared ``vram`` on any GPU. Nothing here changes
state: ``Seat.state`` is written by the residency alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from anvil_mux.config.config import Backend, Gpu
from anvil_mux.config.settings import gib
from anvil_mux.scheduler import preemption as whom
from anvil_mux.scheduler.events import Leaving

HOLDING = frozenset(("loading", "cancelling", "ready", "draining", "evicting", "stuck"))
"""States in which a backend's GPUs are its own."""
STAYING = frozenset(("loading", "ready"))
"""States in which a pinned backend has its GPUs for good."""


@dataclass(eq=False, slots=True)
class Seat:
    """One backend's place in its island."""

    backend: Backend
    holds: dict[str, int]
    """GPU id -> bytes it holds while its state is one of HOLDING."""
    state: str = "stopped"
    since: float = -math.inf
    """When it entered its state."""
    loaded: float = -math.inf
    """When it last became resident."""
    last_used: float = -math.inf
    holders: dict[Any, float] = field(default_factory=dict)
    """The tickets that lease it, in order of admission, and since when."""
    residual: dict[str, int] = field(default_factory=dict)
    """GPU id -> bytes it holds while parked."""
    rests: str = "stop"
    """The way by which it rests while it is not resident, and has to be brought back."""
    rung: str = ""
    """The way by which it is to leave next; "": as high on its ladder as host memory allows."""
    coming: bool = False
    """It is the target of a swap."""
    pinned: bool = False
    """While it is resident it is not put out for another model."""
    leaving: Leaving = ""
    """Why it goes for good: the configuration has it no longer, or not as it is."""
    whole: bool = True
    """It needs its GPUs to itself."""
    ram: int = 0
    """Bytes of host memory that it needs while it runs, as far as is known."""
    host_bytes: int = 0
    """Bytes of host memory that it keeps while parked."""
    failed_starts: int = 0
    """In a row."""
    crashes: int = 0
    """Ends soon after it was loaded, in a row: without one whole answer since the first of them."""
    answered: float = -math.inf
    """When it last gave a whole answer."""
    failed_stops: int = 0
    """In a row."""
    retry_at: float = -math.inf
    """End of the cool-down (empty) or of the pause before the next attempt to stop it (stuck)."""
    error: str = ""
    log: tuple[str, ...] = ()
    load_seconds: float | None = None
    name: str = field(init=False)
    model: str = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.model = self.backend.name, self.backend.model
        self.pinned = self.backend.pin
        self.whole = self.backend.vram is None
        self.ram = self.backend.ram or 0

    @property
    def occupies(self) -> dict[str, int]:
        """GPU id -> bytes it holds now."""
        return self.holds if self.state in HOLDING else self.residual

    @property
    def full(self) -> bool:
        """It has as many requests as it takes at once."""
        limit = self.backend.concurrency
        return limit is not None and len(self.holders) >= limit

    @property
    def used(self) -> float:
        """When it last had work, or became resident."""
        return self.last_used if self.last_used > self.loaded else self.loaded


class Placement:
    """The seats of one island and the memory of its GPUs."""

    def __init__(
        self,
        backends: Iterable[Backend],
        gpus: Iterable[Gpu],
        preemption: whom.Preemption,
        before: Mapping[str, Seat] = MappingProxyType({}),
    ) -> None:
        """``before``: the seats that backends have already, and keep."""
        self.capacity = {gpu.id: max(gpu.vram - gpu.reserve, 1) if gpu.vram else 1 for gpu in gpus}
        self.strangers: Mapping[str, int] = {}
        """GPU id -> bytes that programs hold there which are none of ours."""
        self.seats = {each.name: self._seat(each, before.get(each.name)) for each in backends}
        self._preemption = preemption

    def _seat(self, backend: Backend, seat: Seat | None) -> Seat:
        holds = {}
        for gpu in backend.gpus:
            whole = self.capacity.setdefault(gpu, 1)
            holds[gpu] = backend.vram if backend.vram and whole > 1 else whole
        if seat is None:
            return Seat(backend, holds)
        if seat.backend.ram != backend.ram:
            seat.ram = backend.ram or 0
        if seat.backend.pin != backend.pin:
            seat.pinned = backend.pin
        seat.backend, seat.holds, seat.whole = backend, holds, backend.vram is None
        return seat

    def measure(self, seat: Seat, held: Mapping[str, int]) -> None:
        """What the backend held when it last left, by GPU: it counts for one that is to be measured."""
        if seat.backend.vram_measured and held.keys() >= seat.holds.keys():
            seat.holds = {gpu: min(max(held[gpu], 1), self.capacity[gpu]) for gpu in seat.holds}
            seat.whole = False

    def missing(self, target: Seat, without: Collection[Seat] = ()) -> dict[str, int]:
        """GPU id -> bytes that must be freed before ``target`` fits; negative: room to spare.

        Whoever needs a GPU whole takes what strangers and those that are parked there leave of it. Those
        that it is to be ``without`` count as gone.
        """
        used = {
            gpu: 0 if self._needs_whole(target, gpu) else self.strangers.get(gpu, 0) for gpu in target.holds
        }
        for seat in self.seats.values():
            holding = seat.state in HOLDING
            if seat is target or seat in without or not (holding or seat.residual):
                continue
            for gpu, amount in (seat.holds if holding else seat.residual).items():
                if gpu in used and (holding or not self._needs_whole(target, gpu)):
                    used[gpu] += amount
        return {gpu: used[gpu] + need - self.capacity[gpu] for gpu, need in target.holds.items()}

    def crowds(self, residual: Mapping[str, int]) -> bool:
        """Whether what another one keeps while it is parked would not fit beside those that are here."""
        for gpu, amount in residual.items():
            others = [seat for seat in self.seats.values() if gpu in seat.occupies]
            shared = sum(s.occupies[gpu] for s in others if s.state not in HOLDING or s.backend.vram)
            if amount and shared + amount > self.capacity[gpu] > 1:
                return True
        return False

    def victims(
        self,
        target: Seat,
        busy: set[str],
        staying: Set[str] = frozenset(),
        loss: Callable[[Seat], float] = lambda _: 0.0,
        without: Collection[Seat] = (),
    ) -> list[Seat] | None:
        """Who must go so that ``target`` fits, touching no ``busy`` GPU; None if that cannot be now.

        Residents go, and those parked ones whose residual is in the way. Backends that are ``staying`` may
        not go, nor pinned residents. Those that it is to be ``without`` are as good as gone. ``loss``: see
        preemption.Candidate.
        """
        if not busy.isdisjoint(target.holds):
            return None
        seats = [
            seat
            for seat in self._evictable(busy, staying)
            if not target.holds.keys().isdisjoint(seat.holds)
            and (seat.state == "ready" or self._in_the_way(seat, target))
        ]
        if len(seats) < 2:
            return self._at_most(seats, target, without)
        return self._choose([(seat, seat.occupies) for seat in seats], self.missing(target, without), loss)

    def sparing_host(
        self,
        short: int,
        but: Collection[Seat],
        busy: set[str],
        staying: Set[str] = frozenset(),
        loss: Callable[[Seat], float] = lambda _: 0.0,
    ) -> list[Seat] | None:
        """Which residents, ``but`` some, must go so that ``short`` bytes of host memory become free."""
        seats = [s for s in self._evictable(busy, staying) if s.state == "ready" and s not in but and s.ram]
        return self._choose([(seat, {"host": seat.ram}) for seat in seats], {"host": short}, loss)

    def _evictable(self, busy: set[str], staying: Set[str]) -> Iterator[Seat]:
        return (
            seat
            for seat in self.seats.values()
            if seat.state in ("ready", "standby")
            and not (seat.pinned and seat.state == "ready")
            and seat.name not in staying
            and busy.isdisjoint(seat.holds)
        )

    def _choose(
        self,
        seats: Iterable[tuple[Seat, Mapping[str, int]]],
        missing: Mapping[str, int],
        loss: Callable[[Seat], float],
    ) -> list[Seat] | None:
        candidates = [
            whom.Candidate(s.name, frees, len(s.holders), s.used, s.backend.priority, loss(s))
            for s, frees in seats
        ]
        chosen = whom.victims(self._preemption, candidates, missing)
        return None if chosen is None else [self.seats[name] for name in chosen]

    def _at_most(self, seats: list[Seat], target: Seat, without: Collection[Seat]) -> list[Seat] | None:
        """The victims where there is no choice among them."""
        needed = False
        for gpu, amount in self.missing(target, without).items():
            if amount > 0:
                needed = True
                if not seats or seats[0].occupies.get(gpu, 0) < amount:
                    return None
        return seats if needed else []

    def fits(self, target: Seat) -> bool:
        """Whether nobody needs to go."""
        return all(amount <= 0 for amount in self.missing(target).values())

    def clings(self, parked: Seat, target: Seat) -> bool:
        """Whether one that could not be stopped leaves no room for ``target``."""
        return bool(parked.failed_stops) and self.excludes(parked.residual, target)

    def excludes(self, residual: Mapping[str, int], target: Seat) -> bool:
        """Whether ``target`` does not fit beside what a sleeper keeps, whoever else goes."""
        return any(
            target.holds[gpu] + amount > self.capacity[gpu]
            for gpu, amount in residual.items()
            if gpu in target.holds and not self._needs_whole(target, gpu)
        )

    def _in_the_way(self, parked: Seat, target: Seat) -> bool:
        """Not of whoever takes what others leave of the whole GPU, and not if it cannot be stopped."""
        if parked is target or parked.failed_stops:
            return False
        return any(
            amount and gpu in target.holds and not self._needs_whole(target, gpu)
            for gpu, amount in parked.residual.items()
        )

    def _needs_whole(self, target: Seat, gpu: str) -> bool:
        return target.whole or self.capacity[gpu] == 1

    def strangers_before(self, target: Seat) -> str:
        """Who leaves no room for ``target`` although everybody who can go went; "" if nobody."""
        pinned = self._pinned(target)
        for gpu, need in target.holds.items():
            taken = 0 if self._needs_whole(target, gpu) else self.strangers.get(gpu, 0)
            if taken and need + taken + sum(seat.holds.get(gpu, 0) for seat in pinned) > self.capacity[gpu]:
                text = f"it needs {gib(need)} of GPU {gpu}"
                return f"{text}, where other programs hold {gib(taken)} (see /healthz)"
        return ""

    def never_fits(self, target: Seat) -> str:
        """Why ``target`` could not be loaded even if all that is not pinned went; "" if it could."""
        pinned = self._pinned(target)
        for gpu, need in target.holds.items():
            if need + sum([other.holds.get(gpu, 0) for other in pinned]) > self.capacity[gpu]:
                names = ", ".join(other.name for other in pinned if gpu in other.holds)
                beside = f" beside the pinned {names} (see `anvil-mux unpin`)" if names else ""
                return f"it does not fit on GPU {gpu}{beside}"
        return ""

    def _pinned(self, target: Seat) -> list[Seat]:
        """Who stays whatever ``target`` needs. One that was told to leave all the same is waited for."""
        seats = self.seats.values()
        return [seat for seat in seats if seat.pinned and seat is not target and seat.state in STAYING]


def islands(
    backends: Iterable[Backend], before: Callable[[Backend], Iterable[str]] = lambda _: ()
) -> list[tuple[str, list[Backend]]]:
    """The backends grouped into islands, each named after its GPUs ("0+1"; "no-gpu:NAME" without any).

    GPUs are tied by a backend that needs several of them, and by the replicas of one model. ``before``: the
    islands of before that a backend goes on from; what goes on from the same one stays together.
    """
    groups: list[tuple[set[str], list[Backend]]] = []
    for backend in backends:
        ties = {f"gpu {gpu}" for gpu in backend.gpus} | {f"model {backend.model}"}
        ties |= {f"island {island}" for island in before(backend)}
        members: list[Backend] = []
        for group in [g for g in groups if g[0] & ties]:
            groups.remove(group)
            ties |= group[0]
            members += group[1]
        groups.append((ties, [*members, backend]))
    return [(_island_name(members), members) for _, members in groups]


def _island_name(members: list[Backend]) -> str:
    gpus = sorted({gpu for backend in members for gpu in backend.gpus})
    return "+".join(gpus) or f"no-gpu:{members[0].name}"
