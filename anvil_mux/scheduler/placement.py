"""GPU memory: what backends hold, what is missing to load one, and which victims make room for it.

The arithmetic of a GPU group. Its GPUs have the names that they have among the GPUs of all hosts. Memory is
counted in bytes per GPU; a GPU of unknown size counts as one unit that every backend needs whole, and a
backend without declared ``vram`` needs every GPU so.
Of such a backend it may be known what it held when it last left: beside it other processes may hold no more
than the rest of the GPU, so that nobody is evicted for a load that cannot succeed.
Nothing here changes a state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType

from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import gib
from anvil_mux.config.machines import Gpu, gpu_name
from anvil_mux.scheduler import eviction as whom
from anvil_mux.scheduler.events import mistake
from anvil_mux.scheduler.slot import HOLDING, STAYING, HostRecord, Slot

HOST_MEMORY = "host memory"
"""The name that host memory has among GPUs where an eviction chooses who frees it."""


class Placement:
    """The slots of one GPU group and the memory of its GPUs."""

    def __init__(
        self,
        backends: Iterable[Backend],
        gpus: Iterable[Gpu],
        eviction: Callable[[], whom.Eviction],
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
        self.capacity = {gpu.name: max(gpu.vram - gpu.reserve, 1) if gpu.vram else 1 for gpu in gpus}
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
            whole = self.capacity.setdefault(gpu, 1)
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
            slot.holds = {gpu: min(max(held[gpu], 1), self.capacity[gpu]) for gpu in slot.holds}
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
        that ``runs`` already has its memory beside that of other processes.
        """
        used = {gpu: 0 if runs else self._taken(target, gpu) for gpu in target.holds}
        for slot in self.active:
            holding = slot.state in HOLDING
            if slot is target or slot in without or not (holding or slot.residual):
                continue
            for gpu, amount in (slot.holds if holding else slot.residual).items():
                if gpu in used and (holding or not self._needs_whole(target, gpu)):
                    used[gpu] += amount
        return {gpu: used[gpu] + need - self.capacity[gpu] for gpu, need in target.holds.items()}

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
        loss: Callable[[Slot], float] = lambda _: 0.0,
        without: Collection[Slot] = (),
        waiting: Callable[[Slot], float] = lambda _: 0.0,
    ) -> list[Slot] | None:
        """The backends to evict so that ``target`` fits, on no ``busy`` GPU; None if there is no such choice.

        Those are residents, and backends in standby whose residual is needed; none that is ``staying``, and
        no pinned resident. The backends that it is to be ``without`` count as gone. ``loss`` and
        ``waiting``: see eviction.Candidate.
        """
        if not busy.isdisjoint(target.holds):
            return None
        slots = [
            slot
            for slot in self._evictable(busy, staying)
            if not target.holds.keys().isdisjoint(slot.holds)
            and (slot.state == "ready" or self._in_the_way(slot, target))
        ]
        if len(slots) < 2:
            return self._at_most(slots, target, without)
        frees = [(slot, slot.occupies) for slot in slots]
        return self._choose(frees, self.missing(target, without), loss, waiting)

    def sparing_host(
        self,
        short: int,
        but: Collection[Slot],
        busy: set[str],
        staying: Set[str] = frozenset(),
        loss: Callable[[Slot], float] = lambda _: 0.0,
        waiting: Callable[[Slot], float] = lambda _: 0.0,
    ) -> list[Slot] | None:
        """The residents, ``but`` some, to evict so that ``short`` bytes of the host's memory become free."""
        slots = [s for s in self._evictable(busy, staying) if s.state == "ready" and s not in but and s.ram]
        frees = [(slot, {HOST_MEMORY: slot.ram}) for slot in slots]
        return self._choose(frees, {HOST_MEMORY: short}, loss, waiting)

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
        self,
        slots: Iterable[tuple[Slot, Mapping[str, int]]],
        missing: Mapping[str, int],
        loss: Callable[[Slot], float],
        waiting: Callable[[Slot], float],
    ) -> list[Slot] | None:
        candidates = [
            whom.Candidate(
                s.name,
                frees,
                len(s.holders),
                s.used,
                priority=s.backend.priority,
                loss=loss(s),
                waiting=waiting(s),
            )
            for s, frees in slots
        ]
        try:
            chosen = whom.victims(self._eviction(), candidates, missing)
        except Exception as error:  # anybody's code
            self.mistake = mistake(error)
            chosen = whom.victims(whom.LeastLoss(), candidates, missing)
        return None if chosen is None else [self.slots[name] for name in chosen]

    def _at_most(self, slots: list[Slot], target: Slot, without: Collection[Slot]) -> list[Slot] | None:
        """The victims where there is no choice among them."""
        needed = False
        for gpu, amount in self.missing(target, without).items():
            if amount > 0:
                needed = True
                if not slots or slots[0].occupies.get(gpu, 0) < amount:
                    return None
        return slots if needed else []

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
        return target.whole or self.capacity[gpu] == 1

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

    def never_fits(self, target: Slot) -> str:
        """Why ``target`` could not be loaded even if all that is not pinned were evicted; "" if it could."""
        pinned = [slot for slot in self.active if slot is not target and _is_pinned(slot)]
        for gpu, need in target.holds.items():
            if need + _occupied(pinned, gpu) > self.capacity[gpu]:
                names = ", ".join(other.name for other in pinned if gpu in other.holds)
                beside = f" beside the pinned {names} (see `anvil-mux unpin`)" if names else ""
                return f"it does not fit on GPU {gpu}{beside}"
        return ""


def _occupied(slots: Iterable[Slot], gpu: str) -> int:
    return sum([slot.occupies.get(gpu, 0) for slot in slots])


def _is_pinned(slot: Slot) -> bool:
    """Whether a backend is pinned and stays, whatever others need; one that is being unloaded does not."""
    return slot.pinned and slot.state in STAYING


def _is_irremovable(slot: Slot) -> bool:
    """Whether a backend cannot be evicted for any other, as things are."""
    could_not_be_stopped = slot.state == "standby" and bool(slot.failed_stops)
    return _is_pinned(slot) or could_not_be_stopped


def gpu_groups(
    backends: Iterable[Backend], before: Callable[[Backend], Iterable[str]] = lambda _: ()
) -> list[tuple[str, list[Backend]]]:
    """The backends grouped into GPU groups, each named after its GPUs ("0+1"; "no-gpu:NAME" without any).

    GPUs are tied by a backend that needs several of them. ``before``: the GPU groups that a backend goes on
    from; backends that go on from the same one stay together.
    """
    groups: dict[int, tuple[set[str], list[Backend]]] = {}  # by the place of the last backend
    of_tie: dict[str, int] = {}
    for place, backend in enumerate(backends):
        ties = {f"gpu {gpu}" for gpu in backend.gpu_names}
        ties |= {f"group {group}" for group in before(backend)}
        members: list[Backend] = []
        for found in sorted({of_tie[tie] for tie in ties if tie in of_tie}):
            its_ties, its_members = groups.pop(found)
            ties |= its_ties
            members = members + its_members if members else its_members
        members.append(backend)
        groups[place] = ties, members
        of_tie.update(dict.fromkeys(ties, place))
    return [(group_name(members), members) for _, members in groups.values()]


def group_name(members: Sequence[Backend]) -> str:
    """The name of a GPU group, after the GPUs of its backends."""
    gpus = sorted({gpu for backend in members for gpu in backend.gpu_names})
    return "+".join(gpus) or gpu_name(members[0].host, f"no-gpu:{members[0].name}")
