"""The records of a look at GPUs, whichever way their vendor lets them be read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from anvil_mux.host.seam import Sensors

UNKNOWN = Sensors()


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU as its driver sees it now; memory in bytes, None where the GPU cannot tell."""

    id: str
    """NVIDIA's: the index in NVML's order (that of the PCI bus); others: ``amd0``, ``intel0`` and so on."""
    uuid: str
    """NVIDIA's: the UUID; others: the PCI address."""
    name: str = ""
    total: int | None = None
    used: int | None = None
    processes: tuple[tuple[int, int | None], ...] = ()
    """Process id and the bytes that it holds; a process stands here once."""
    mig: bool | None = None
    """Whether it is cut into instances."""
    mps: bool | None = None
    """Whether processes share it through NVIDIA's multi-process service now."""
    persistence: bool | None = None
    """Whether the driver keeps it initialized while nobody uses it."""
    shared: int = 0
    """Bytes of its memory that are host memory as well: unified memory."""
    files: tuple[str, ...] = ()
    """The paths of its device files; a container that is to use it needs the first."""
    sensors: Sensors = UNKNOWN

    @property
    def free(self) -> int | None:
        return None if self.total is None or self.used is None else self.total - self.used

    def used_by(self, pids: Collection[int]) -> int | None:
        """Bytes that these processes hold here; None where one of them holds an untold amount."""
        held = [used for pid, used in self.processes if pid in pids]
        return None if None in held else sum(used or 0 for used in held)


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs of this machine, or of one vendor, or none and the reason."""

    readings: tuple[Reading, ...] = ()
    why_none: str | None = None
    driver: str = ""
    """The version of NVIDIA's driver ("570.86.15"), "" where it is not known."""

    @property
    def driver_branch(self) -> int | None:
        """The first number of the driver's version, by which its features come."""
        found = re.match(r"\d+", self.driver)
        return int(found.group()) if found else None

    def used_by(self, pids: Collection[int]) -> dict[str, int | None]:
        """GPU id -> the bytes that these processes hold there, for those GPUs that list one of them."""
        return {
            reading.id: reading.used_by(pids)
            for reading in self.readings
            if any(pid in pids for pid, _ in reading.processes)
        }

    def find(self, gpu: str) -> Reading | None:
        """The GPU with this id, UUID (or the beginning of one, as Docker accepts it) or device file."""
        for reading in self.readings:
            if gpu in (reading.id, reading.uuid, *reading.files):
                return reading
        close = [r for r in self.readings if gpu.startswith(("GPU-", "MIG-")) and r.uuid.startswith(gpu)]
        return close[0] if len(close) == 1 else None


Probe = Callable[[Collection[int] | None], Gpus]
"""Reads the GPUs. Given some processes, it need not look for what others hold: that takes long."""
