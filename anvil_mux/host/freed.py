"""Whether the memory of a backend that left its GPUs is really free.

What a backend holds is what NVML says of its processes or, where it cannot say that, what is declared for it.
Where neither is known, or no GPU can be asked, the eviction is believed.

An engine that runs on keeps a CUDA context, and is believed to sleep when it has given up most of the rest.
Of an engine that was stopped nothing may be left; that the GPU's free memory rises is waited for, because it
lags behind the end of a process, but not insisted on, because another process may take it at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import gib
from anvil_mux.errors import BackendError
from anvil_mux.host.gpu import others
from anvil_mux.host.reading import Gpus, Probe, Reading
from anvil_mux.state import text_of

log = logging.getLogger(__name__)

PATIENCE = 5.0
PAUSE = 0.25
CONTEXT = 3 << 29
"""Bytes (1.5 GiB) that a sleeping engine may keep on a GPU, if it has given up something at all."""
MOST_KEPT = 0.25
"""Share of its memory that it may keep in any case, as with tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Before:
    """The memory that a backend held before it was told to leave; only GPUs of which that is known."""

    bytes: Mapping[str, int] = field(default_factory=dict)
    free: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> bytes that were free there."""
    pids: frozenset[int] = frozenset()
    """The processes that hold ``bytes``; empty where it is only declared."""


@dataclass(frozen=True, slots=True)
class After:
    """The fate of that memory; only GPUs that could be read."""

    bytes: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> bytes that it still holds."""
    freed: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> bytes given back: by its processes' account, or else as the GPU's free memory rose."""


class FreedCheck:
    """Reads GPUs by ``probe`` (None: there are none to be read). ``owner``: see runtime.Runtime."""

    def __init__(
        self,
        probe: Probe | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        owner: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self._owner = owner
        self._probe = probe
        self._now = now
        self._sleep = sleep

    def held(self, backend: Backend, pids: Callable[[], Iterable[int]], *, resident: bool) -> Before:
        """Measure what the backend holds now; ``pids`` are asked for only if there are GPUs to be read.

        What is declared counts only for one that is ``resident``.
        """
        if self._probe is None or not backend.gpus:
            return Before()
        own = frozenset(pids())
        readings = self._read(backend.gpus, own)
        amounts = {gpu: reading.used_by(own) for gpu, reading in readings.items()}
        if not any(amounts.values()):
            own, amounts = frozenset(), dict.fromkeys(readings, backend.vram if resident else None)
        known = {gpu: amount for gpu, amount in amounts.items() if amount}
        return Before(known, {gpu: readings[gpu].free or 0 for gpu in known}, own)

    def left(self, held: Before, *, runs: bool) -> After:
        """Wait until little enough is held, and return what is; BackendError if that does not come.

        ``runs``: the backend runs on, asleep or the like.
        """
        until = self._now() + PATIENCE
        while True:
            readings = self._read(held.bytes, held.pids)
            left = {gpu: _left(held, gpu, reading) for gpu, reading in readings.items()}
            if runs:
                full = [gpu for gpu in left if not _small(held.bytes[gpu], left[gpu])]
                late = full
            else:
                full = [gpu for gpu in left if held.pids and left[gpu]]
                late = full or [gpu for gpu in left if not _risen(held, gpu, readings[gpu])]
            if late and self._now() >= until:
                self._judge(held, left, full)
                late = []
            if not late:
                freed = {gpu: _freed(held, gpu, reading, left[gpu]) for gpu, reading in readings.items()}
                return After(left if runs else {}, freed)
            self._sleep(PAUSE)

    def _judge(self, held: Before, left: Mapping[str, int], full: list[str]) -> None:
        """Raise BackendError if it still holds memory; else log that its memory is not free."""
        if full:
            what = ", ".join(f"{gib(left[gpu])} of {gib(held.bytes[gpu])} on GPU {gpu}" for gpu in full)
            raise BackendError(f"after {PATIENCE:g} s it still holds {what}{self.others(left)}")
        gpus = ", ".join(left)
        log.warning("GPU %s: memory of an engine that has ended is not free%s", gpus, self.others(left))

    def others(self, gpus: Iterable[str]) -> str:
        """The end of a sentence: which processes that are none of ours hold memory there, if any do."""
        found = others(self._read(gpus).values(), lambda pid: self._owner(pid) is not None)
        return "".join(f"; {other_process}" for other_process in found)

    def _read(self, gpus: Iterable[str], pids: Collection[int] | None = None) -> dict[str, Reading]:
        found = self._probe(pids) if self._probe and gpus else Gpus()
        readings = {gpu: found.find(gpu) for gpu in gpus}
        return {gpu: reading for gpu, reading in readings.items() if reading and reading.free is not None}


def host_bytes(pids: Iterable[int]) -> int:
    """Host memory of processes, without the files that they have mapped; 0 for those that are gone.

    What several share counts for each: telling that apart takes the kernel 12 ms per GiB, and it is little.
    """
    total = 0
    for pid in pids:
        lines = text_of(Path(f"/proc/{pid}/status")).splitlines()
        words = [line.split() for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
        total += sum(int(kib) << 10 for _, kib, *_ in words)
    return total


def _left(held: Before, gpu: str, reading: Reading) -> int:
    if held.pids:
        return reading.used_by(held.pids) or 0
    return max(held.bytes[gpu] - ((reading.free or 0) - held.free[gpu]), 0)


def _freed(held: Before, gpu: str, reading: Reading, left: int) -> int:
    """Return the bytes given back. ``left``: those that it still holds, or declared ones not yet free."""
    risen = (reading.free or 0) - held.free[gpu]
    return max(held.bytes[gpu] - left if held.pids else risen, 0)


def _risen(held: Before, gpu: str, reading: Reading) -> bool:
    return (reading.free or 0) - held.free[gpu] >= (1 - MOST_KEPT) * held.bytes[gpu]


def _small(before: int, after: int) -> bool:
    return after <= MOST_KEPT * before or (after <= CONTEXT and after <= (1 - MOST_KEPT) * before)
