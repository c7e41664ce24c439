"""NVML: which GPUs there are, what they hold and who uses them.

A machine without a GPU, a driver or the library is no error: ``probe`` then finds nothing and says why. So
are single questions that a GPU cannot answer (unified memory has no totals): their answer is None or empty.
Process ids are those of the host, so from inside a container they mean nothing unless it shares the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

try:
    import pynvml
except ImportError:
    pynvml = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU as NVML sees it now; memory in bytes, None where the GPU cannot tell."""

    id: str
    """Its index in NVML's order (that of the PCI bus)."""
    uuid: str
    name: str = ""
    total: int | None = None
    used: int | None = None
    processes: tuple[tuple[int, int | None], ...] = ()
    """Process id and the bytes that it holds."""

    @property
    def free(self) -> int | None:
        return None if self.total is None or self.used is None else self.total - self.used


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs of this machine, or none and the reason."""

    readings: tuple[Reading, ...] = ()
    why_none: str | None = None

    def find(self, gpu: str) -> Reading | None:
        """The GPU with this index or UUID (or the beginning of a UUID, as Docker accepts it)."""
        for reading in self.readings:
            if gpu in (reading.id, reading.uuid):
                return reading
        close = [r for r in self.readings if gpu.startswith(("GPU-", "MIG-")) and r.uuid.startswith(gpu)]
        return close[0] if len(close) == 1 else None


def probe(nvml: ModuleType | Any | None = pynvml) -> Gpus:
    """Asks NVML once; never raises."""
    if nvml is None:
        return Gpus(why_none="the Python package nvidia-ml-py is not installed")
    try:
        with _session(nvml):
            count = nvml.nvmlDeviceGetCount()
            readings = tuple(_read(nvml, index) for index in range(count))
    except Exception as error:
        # Not only NVMLError: with a driver half removed the library itself breaks.
        return Gpus(why_none=f"NVML: {error}")
    return Gpus(readings, None if readings else "NVML reports no GPU")


@contextmanager
def _session(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, index: int) -> Reading:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _answer(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    processes = _answer(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
    return Reading(
        id=str(index),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(_answer(nvml, lambda: nvml.nvmlDeviceGetName(handle)) or ""),
        total=None if memory is None else int(memory.total),
        used=None if memory is None else int(memory.used),
        processes=tuple((int(each.pid), each.usedGpuMemory) for each in processes),
    )


def _answer(nvml: Any, question: Callable[[], Any]) -> Any:
    """The answer, or None where this GPU has none."""
    try:
        return question()
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
