"""NVML: which GPUs there are, what they hold and who uses them.

A machine without a GPU, a driver or the library is no error: ``probe`` then finds nothing and says why. So
are single questions that a GPU cannot answer (unified memory has no totals): their answer is None or empty.
Process ids are those of the host, so from inside a container they mean nothing unless it shares the host's.
Which container a process belongs to is read from its control groups.

NVML tells what is, and tells it late: memory is reported free up to some seconds after its holder ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from anvil_mux.host.seam import HostGpu, OtherProcess

try:
    import pynvml
except ImportError:
    pynvml = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU as NVML sees it now; memory in bytes, None where the GPU cannot tell."""

    id: str
    """The index in NVML's order (that of the PCI bus)."""
    uuid: str
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

    @property
    def free(self) -> int | None:
        return None if self.total is None or self.used is None else self.total - self.used

    def used_by(self, pids: Collection[int]) -> int | None:
        """Bytes that these processes hold here; None where one of them holds an untold amount."""
        held = [used for pid, used in self.processes if pid in pids]
        return None if None in held else sum(used or 0 for used in held)


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs of this machine, or none and the reason."""

    readings: tuple[Reading, ...] = ()
    why_none: str | None = None
    driver: str = ""
    """The driver's version ("570.86.15"), "" where it is not known."""

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
        """The GPU with this index or UUID (or the beginning of a UUID, as Docker accepts it)."""
        for reading in self.readings:
            if gpu in (reading.id, reading.uuid):
                return reading
        close = [r for r in self.readings if gpu.startswith(("GPU-", "MIG-")) and r.uuid.startswith(gpu)]
        return close[0] if len(close) == 1 else None


def others(readings: Iterable[Reading], is_ours: Callable[[int], bool]) -> list[OtherProcess]:
    """List the other processes that hold memory of these GPUs, the greatest first.

    Processes that cannot be seen from here are left out: they may be ours, under another id.
    """
    found = [
        OtherProcess(reading.id, pid, used, name, container(pid) or "")
        for reading in readings
        for pid, used in reading.processes
        if not is_ours(pid) and (name := command(pid))
    ]
    return sorted(found, key=lambda each: -(each.used or 0))


CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?=/|$)")
"""A container's id in a path of control groups.

/docker/ID, /system.slice/docker-ID.scope, /kubepods/burstable/podUID/cri-containerd-ID.scope,
/machine.slice/libpod-ID.scope/container and their like.
"""


def container(pid: int, proc: Path = Path("/proc")) -> str | None:
    """The id of the container that this process of the host runs in, None where it runs in none."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    # Lines are HIERARCHY:CONTROLLERS:PATH. Of nested containers the innermost stands last in its path.
    found = [ids[-1] for line in lines if (ids := CONTAINER.findall(line.split(":", 2)[-1]))]
    return str(found[0]) if found else None


def command(pid: int, proc: Path = Path("/proc")) -> str:
    """The short name of a process, "" once it is gone."""
    try:
        return (proc / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def probe(nvml: ModuleType | Any | None = pynvml) -> Gpus:
    """Ask NVML once; never raises."""
    if nvml is None:
        return Gpus(why_none="the Python package nvidia-ml-py is not installed")
    try:
        with _session(nvml):
            count = nvml.nvmlDeviceGetCount()
            readings = tuple(_read(nvml, index) for index in range(count))
            driver = _text(_answer(nvml, nvml.nvmlSystemGetDriverVersion) or "")
    except Exception as error:
        # Not only NVMLError: with a driver half removed the library itself breaks.
        return Gpus(why_none=f"NVML: {error}")
    return Gpus(readings, None if readings else "NVML reports no GPU", driver)


def listed(found: Gpus) -> tuple[HostGpu, ...]:
    """The GPUs as others know them."""
    return tuple(HostGpu(each.id, each.uuid, each.name, each.total) for each in found.readings)


LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""PCIe generation -> bytes per second of a lane, one way."""


def buses(nvml: Any = pynvml) -> dict[str, float]:
    """GPU id -> the bytes per second that its PCIe link can carry one way, where NVML knows; never raises.

    The link at its best, since an idle GPU turns it down.
    """
    found = {}
    try:
        with _session(nvml):
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                generation = _answer(nvml, partial(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle))
                lanes = _answer(nvml, partial(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle))
                if lanes and generation in LANE:
                    found[str(index)] = lanes * LANE[generation]
    except Exception:
        pass  # as in `probe`, which says why
    return found


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
    shared = _answer(nvml, lambda: nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle))
    # Current mode and the one after a reset.
    mig = _answer(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    persistence = _answer(nvml, lambda: nvml.nvmlDeviceGetPersistenceMode(handle))
    return Reading(
        id=str(index),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(_answer(nvml, lambda: nvml.nvmlDeviceGetName(handle)) or ""),
        total=None if memory is None else int(memory.total),
        used=None if memory is None else int(memory.used),
        processes=tuple({each.pid: each.usedGpuMemory for each in (*(shared or ()), *processes)}.items()),
        mig=None if mig is None else bool(mig[0]),
        mps=None if shared is None else bool(shared),
        persistence=None if persistence is None else bool(persistence),
    )


def _answer(nvml: Any, question: Callable[[], Any]) -> Any:
    """Return the answer, or None where this GPU has none."""
    try:
        return question()
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
