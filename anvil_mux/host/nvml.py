"""NVML: NVIDIA's GPUs, what they hold and who uses them.

A machine without a GPU, a driver or the library is no error: ``probe`` then finds nothing and says why. So
are single questions that a GPU cannot answer: their answer is None or empty. A GPU that has no memory of its
own (GB10, Jetson) says that this is not supported: its memory is that of the host.

NVML tells what is, and tells it late: memory is reported free up to some seconds after its holder ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from anvil_mux.host.meminfo import host_memory
from anvil_mux.host.reading import UNKNOWN, Gpus, Reading
from anvil_mux.host.seam import HostGpu, Sensors

try:
    import pynvml
except ImportError:
    pynvml = None

NOT_SUPPORTED = 3
"""The value of NVML's error for what the device does not have."""


def probe(nvml: ModuleType | Any | None = pynvml, *, sensors: bool = False) -> Gpus:
    """Ask NVML once; never raises. ``sensors``: also what they measure, which takes longer."""
    if nvml is None:
        return Gpus(why_none="the Python package nvidia-ml-py is not installed")
    try:
        with _session(nvml):
            count = nvml.nvmlDeviceGetCount()
            readings = tuple(_read(nvml, index, sensors=sensors) for index in range(count))
            driver = _text(_answer(nvml, nvml.nvmlSystemGetDriverVersion) or "")
    except Exception as error:
        # Not only NVMLError: with a driver half removed the library itself breaks.
        return Gpus(why_none=f"NVML: {error}")
    return Gpus(readings, None if readings else "NVML reports no GPU", driver)


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


def _read(nvml: Any, index: int, *, sensors: bool) -> Reading:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    total, used, shared = _memory(nvml, handle)
    name = _answer(nvml, lambda: nvml.nvmlDeviceGetName(handle))
    draw = _answer(nvml, lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)) or ()
    compute = _answer(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
    mps = _answer(nvml, lambda: nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle))
    # Current mode and the one after a reset.
    mig = _answer(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    persistence = _answer(nvml, lambda: nvml.nvmlDeviceGetPersistenceMode(handle))
    return Reading(
        HostGpu(str(index), _text(nvml.nvmlDeviceGetUUID(handle)), _text(name or ""), total, shared),
        used,
        processes=tuple({each.pid: each.usedGpuMemory for each in (*(mps or ()), *draw, *compute)}.items()),
        mig=None if mig is None else bool(mig[0]),
        mps=None if mps is None else bool(mps),
        persistence=None if persistence is None else bool(persistence),
        sensors=_sensors(nvml, handle) if sensors else UNKNOWN,
    )


def _memory(nvml: Any, handle: Any) -> tuple[int | None, int | None, int]:
    """The bytes that a GPU has, those that are used, and those that are the host's as well.

    Without what the driver keeps for itself, which nobody can have (driver 510 and later tell it).
    """
    newer = _answer(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    if newer is not None:
        return int(newer.total - newer.reserved), int(newer.used), 0
    try:
        found = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        if getattr(error, "value", None) != NOT_SUPPORTED:
            return None, None, 0
        total, used = host_memory()
        return total, used, total or 0
    return int(found.total), int(found.used), 0


def _sensors(nvml: Any, handle: Any) -> Sensors:
    busy = _answer(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    degrees = _answer(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    milliwatts = _answer(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    return Sensors(
        utilization=None if busy is None else busy.gpu / 100,
        celsius=None if degrees is None else float(degrees),
        watts=None if milliwatts is None else milliwatts / 1000,
    )


def _answer(nvml: Any, question: Callable[[], Any]) -> Any:
    """Return the answer, or None where this GPU, or this version of the library, has none."""
    try:
        return question()
    except (nvml.NVMLError, AttributeError):
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
