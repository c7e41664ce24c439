"""NVML through a stand-in for the library, since most machines that run tests have no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from anvil_mux.gpu import Gpus, Reading, probe

FIRST, SECOND = "GPU-aaaa-1111", "GPU-abbb-2222"


class Nvml:
    """Two GPUs; the second cannot tell its memory or processes, as unified-memory parts."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str | bytes:
        return FIRST if handle == 0 else SECOND.encode()

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "RTX"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if handle:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(total=24 << 30, used=20 << 30, free=4 << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        if handle:
            raise self.NVMLError("Not Supported")
        return [
            SimpleNamespace(pid=41, usedGpuMemory=19 << 30),
            SimpleNamespace(pid=42, usedGpuMemory=None),
        ]


def test_a_gpu_tells_memory_and_processes():
    first = probe(Nvml()).readings[0]
    assert first == Reading("0", FIRST, "RTX", 24 << 30, 20 << 30, ((41, 19 << 30), (42, None)))
    assert first.free == 4 << 30


def test_what_a_gpu_cannot_tell_is_unknown_and_no_error():
    second = probe(Nvml()).readings[1]
    assert second == Reading("1", SECOND, "RTX", None, None, ())
    assert second.free is None


def test_a_gpu_is_found_by_index_uuid_and_beginning_of_uuid():
    gpus = probe(Nvml())
    names = ["0", SECOND, "GPU-aa", "GPU-a", "2", "", "a"]
    found = [reading and reading.id for reading in map(gpus.find, names)]
    assert found == ["0", "1", "0", None, None, None, None]


def test_nvml_is_closed_after_every_probe():
    nvml = Nvml()
    probe(nvml)
    assert nvml.open == 0


@pytest.mark.parametrize("error", [Nvml.NVMLError("Driver Not Loaded"), OSError("libnvidia-ml.so.1: no")])
def test_a_machine_without_a_driver_has_no_gpus_and_says_why(error: Exception):
    class Broken(Nvml):
        def nvmlInit(self) -> None:
            raise error

    assert probe(Broken()) == Gpus((), f"NVML: {error}")


def test_a_gpu_that_is_lost_during_the_probe_is_no_error():
    class Lost(Nvml):
        def nvmlDeviceGetUUID(self, handle: int) -> str:
            raise self.NVMLError("GPU is lost")

    nvml = Lost()
    assert probe(nvml) == Gpus((), "NVML: GPU is lost")
    assert nvml.open == 0


def test_without_the_library_there_are_no_gpus():
    assert probe(None) == Gpus((), "the Python package nvidia-ml-py is not installed")


def test_the_real_library_never_raises_here():
    gpus = probe()
    assert gpus.readings or gpus.why_none
