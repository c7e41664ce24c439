"""The memory that backends hold, and keep in standby, as it was measured when they were evicted.

A footprint belongs to a backend and a standby level. It is that of the last time, no average: what an engine
takes is settled by its settings, and a mean of before and after a change of them was never true. What could
not be read is not in it. Not thread-safe: the lock of the scheduler guards it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes, by GPU and in host memory."""

    backend: str
    way: str
    held: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> the bytes that it held while it was resident."""
    residual: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> the bytes that it still held in standby; for the same GPUs."""
    host_bytes: int = 0
    """Host memory that it kept in standby; 0 where that is not known."""
    times: int = 0
    """How often it was measured."""
    described: str = ""
    """The digest of its service's description at that time; "": not known."""

    def is_outdated(self, described: str) -> bool:
        """Whether its service is known to be described otherwise now."""
        return bool(self.described and described) and self.described != described


class Footprints:
    """All footprints that were measured."""

    def __init__(self, known: Iterable[Footprint] = ()) -> None:
        self._known: dict[tuple[str, str], Footprint] = {}  # the newest last
        self._held: dict[str, Footprint] = {}
        for footprint in known:
            self._remember(footprint)

    def __iter__(self) -> Iterator[Footprint]:
        return iter(self._known.values())

    def learn(
        self,
        backend: str,
        way: str,
        freed: Mapping[str, int],
        residual: Mapping[str, int],
        host_bytes: int = 0,
        described: str = "",
    ) -> None:
        """The backend left its GPUs by this way; ``freed`` is what it gave back, where that was read.

        ``described``: the digest of its service's description.
        """
        if not freed and not host_bytes:
            return
        left = {gpu: residual.get(gpu, 0) for gpu in freed}
        held = {gpu: amount + left[gpu] for gpu, amount in freed.items()}
        old = self._known.pop((backend, way), None)
        times = old.times + 1 if old else 1
        latest = Footprint(backend, way, held, left, host_bytes=host_bytes, times=times)
        self._remember(replace(latest, described=described))

    def held(self, backend: str, described: str = "") -> Mapping[str, int]:
        """GPU id -> the bytes that a backend held when it last left; empty where that was never read.

        What was measured before its service was ``described`` as it is now counts no more.
        """
        last = self._held.get(backend)
        return last.held if last and not last.is_outdated(described) else {}

    def in_standby(self, backend: str, way: str, described: str = "") -> Footprint | None:
        """The last footprint of a backend at this standby level, of its service as it is ``described``."""
        last = self._known.get((backend, way))
        return None if last is None or last.is_outdated(described) else last

    def _remember(self, footprint: Footprint) -> None:
        self._known[footprint.backend, footprint.way] = footprint
        if footprint.held:
            self._held[footprint.backend] = footprint


def to_declare(held: Mapping[str, int]) -> str:
    """The size to write down as ``vram`` for a backend that held so much of each of its GPUs."""
    return f"{math.ceil(max(held.values()) * 10 / (1 << 30)) / 10:g}GiB"
