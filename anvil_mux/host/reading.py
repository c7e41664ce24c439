"""A reading of the GPUs, whichever way their vendor lets them be read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from anvil_mux.host.seam import HostGpu, Sensors

UNKNOWN = Sensors()


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU, and what its driver says of it now; memory in bytes, None where the GPU cannot tell."""

    gpu: HostGpu
    used: int | None = None
    processes: tuple[tuple[int, int | None], ...] = ()
    """Process id and the bytes that it holds; a process stands here once."""
    mig: bool | None = None
    """Whether it is cut into instances."""
    mps: bool | None = None
    """Whether processes share it through NVIDIA's multi-process service now."""
    persistence: bool | None = None
    """Whether the driver keeps it initialized while nobody uses it."""
    sensors: Sensors = UNKNOWN

    @property
    def free(self) -> int | None:
        return None if self.gpu.total is None or self.used is None else self.gpu.total - self.used

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
    def listed(self) -> tuple[HostGpu, ...]:
        """The GPUs as others know them."""
        return tuple(reading.gpu for reading in self.readings)

    @property
    def driver_branch(self) -> int | None:
        """The first number of the driver's version, by which its features come."""
        found = re.match(r"\d+", self.driver)
        return int(found.group()) if found else None

    def used_by(self, pids: Collection[int]) -> dict[str, int | None]:
        """GPU id -> the bytes that these processes hold there, for those GPUs that list one of them."""
        return {
            reading.gpu.id: reading.used_by(pids)
            for reading in self.readings
            if any(pid in pids for pid, _ in reading.processes)
        }

    def find(self, gpu: str) -> Reading | None:
        """The GPU with this id, UUID (or the beginning of one, as Docker accepts it) or device file."""
        for reading in self.readings:
            if gpu in (reading.gpu.id, reading.gpu.uuid, *reading.gpu.files):
                return reading
        if not gpu.startswith(("GPU-", "MIG-")):
            return None
        close = [reading for reading in self.readings if reading.gpu.uuid.startswith(gpu)]
        return close[0] if len(close) == 1 else None


Probe = Callable[[Collection[int] | None], Gpus]
"""Reads the GPUs. Given some processes, it need not look for what others hold: that takes long."""
