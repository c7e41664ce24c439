"""What the caches of a model's replicas hold, as far as can be told from what was sent to them.

``Prefixes`` is one picture for all replicas of a model: block -> a mask of the replicas that hold it, so that
one walk along a request's blocks says how much each of them has, and stops at the first that nobody has. Each
replica has an order of use of its own and loses what was used longest ago when its capacity is exceeded; of
one request the end goes before the beginning, as a block is worth nothing without those before it.

A block's hash covers all blocks before it, so equal hashes mean equal beginnings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Prefixes:
    """The blocks that each of a model's replicas holds. Not for several threads at once."""

    def __init__(self, replicas: Iterable[str]) -> None:
        self._bits = {name: 1 << index for index, name in enumerate(replicas)}
        self._holders: dict[int, int] = {}
        """Block -> the bits of those that hold it."""
        self._used: dict[str, dict[int, None]] = {name: {} for name in self._bits}
        """Of each replica its blocks, the one used longest ago first."""

    def __len__(self) -> int:
        return len(self._holders)

    def size(self, replica: str) -> int:
        return len(self._used[replica])

    def hits(self, blocks: Sequence[int], among: Iterable[str]) -> dict[str, int]:
        """How many of ``blocks``, from the first on, each holds; who holds none is left out."""
        bits = {self._bits[name]: name for name in among}
        mask, found = sum(bits), {}
        for length, block in enumerate(blocks):
            still = mask & self._holders.get(block, 0)
            if still != mask:
                if length:
                    found.update(dict.fromkeys(_names(bits, mask & ~still), length))
                mask = still
                if not mask:
                    return found
        found.update(dict.fromkeys(_names(bits, mask), len(blocks)))
        return found

    def use(self, replica: str, blocks: Sequence[int], capacity: int) -> None:
        """``blocks`` are sent to ``replica``, whose cache holds ``capacity`` of them."""
        used, holders, bit = self._used[replica], self._holders, self._bits[replica]
        for block in reversed(blocks):
            if block in used:
                del used[block]
            else:
                holders[block] = holders.get(block, 0) | bit
            used[block] = None
        while len(used) > capacity:
            self._drop(replica, next(iter(used)))

    def cut(self, replica: str, blocks: Iterable[int]) -> None:
        """``replica`` turned out not to hold these."""
        for block in blocks:
            if block in self._used[replica]:
                self._drop(replica, block)

    def clear(self, replica: str) -> None:
        """It holds nothing any more: it was stopped, put to sleep, or died."""
        for block in list(self._used[replica]):
            self._drop(replica, block)

    def _drop(self, replica: str, block: int) -> None:
        del self._used[replica][block]
        left = self._holders[block] & ~self._bits[replica]
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _names(bits: dict[int, str], mask: int) -> list[str]:
    return [name for bit, name in bits.items() if bit & mask]
