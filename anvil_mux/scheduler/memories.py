"""The memories of several hosts as one: what a GPU group with a gang has in place of a ``HostMemory``.

Each backend has its share of the memory of its own host, a gang the same share on each of its hosts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.standby import HostMemory, Worth, levels


class SharedMemories:
    """The memories of the hosts of one GPU group; see ``HostMemory`` for what the questions mean."""

    def __init__(self, parts: Collection[HostMemory]) -> None:
        self.parts = tuple(parts)
        self._of_host = {each.name: each for each in self.parts}

    def _of(self, slot: Slot) -> Iterator[HostMemory]:
        """The memories of which a backend has a share."""
        return (self._of_host[name] for name in slot.backend.hosts)

    @property
    def budget(self) -> int | None:
        """Bytes that engines may have on some host; None: it is bounded on none."""
        return next((each.budget for each in self.parts if each.budget is not None), None)

    def changed(self) -> None:
        for each in self.parts:
            each.changed()

    def join(self, slot: Slot, worth: Worth) -> None:
        for each in self._of(slot):
            each.join(slot, worth)

    def short(self, target: Slot, leaving: Collection[Slot] = ()) -> int:
        return max([each.short(target, leaving) for each in self._of(target)])

    def missing(self, target: Slot, leaving: Collection[Slot] = ()) -> dict[str, int]:
        return {each.name: each.short(target, leaving) for each in self._of(target)}

    def never_fits(self, target: Slot) -> str:
        return next(filter(None, [each.never_fits(target) for each in self._of(target)]), "")

    def insisting(self, but: Slot) -> list[tuple[str, int]]:
        return [pair for each in self._of(but) for pair in each.insisting(but)]

    def call(self, target: Slot, missing: Mapping[str, int], own: Collection[Slot], now: float) -> bool:
        found = [(each, each.idle_for(missing[each.name], own, now)) for each in self._of(target)]
        if any(idle is None for _, idle in found):
            return False
        for each, idle in found:
            each.have_evicted(idle or (), target.model)
        return True

    def answer(self, slot: Slot, now: float) -> str:
        return next(filter(None, [each.answer(slot, now) for each in self._of(slot)]), "")

    def level_for(self, slot: Slot) -> str:
        return max([each.level_for(slot) for each in self._of(slot)], key=levels(slot.backend).index)

    def makes_way(self, slot: Slot, now: float) -> bool:
        return any(each.makes_way(slot, now) for each in self._of(slot))

    def has_room(self, target: Slot) -> bool:
        return all(each.has_room(target) for each in self._of(target))
