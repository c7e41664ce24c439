"""NVML through a stand-in for the library, since most machines that run tests have no GPU."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from anvil_mux.host import gpus
from anvil_mux.host.gpus import Gpus, Reading, command_of, container_of, nvidia_gpus, others
from anvil_mux.host.seam import HostGpu, OtherProcess, Sensors
from tests.fake_gpu import FakeGpus
from tests.host.trees import plant

FIRST, SECOND = "GPU-aaaa-1111", "GPU-abbb-2222"


class Nvml:
    """Two GPUs; the second cannot tell its memory or processes, as unified-memory parts."""

    class NVMLError(Exception):
        value = 0

    NVML_TEMPERATURE_GPU = 0

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=43, memory=20)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle:
            raise self.NVMLError("Not Supported")
        return 213_500

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

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        if handle:
            raise self.NVMLError("Not Supported")
        return []

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:
        return 1

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        if handle:
            raise self.NVMLError("Not Supported")
        return 16

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"


def test_a_gpu_tells_memory_and_processes():
    nvml = Nvml()
    first = nvidia_gpus(nvml).readings[0]
    assert nvml.open == 0
    assert first == Reading(
        HostGpu("0", FIRST, "RTX", 24 << 30),
        20 << 30,
        ((41, 19 << 30), (42, None)),
        mps=False,
        persistence=True,
    )
    assert first.free == 4 << 30


def test_a_gpu_that_is_lost_hides_no_other():
    class Lost(Nvml):
        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            if index == 0:
                raise self.NVMLError("GPU is lost")
            return index

    found = nvidia_gpus(Lost())
    assert [gpu.id for gpu in found.listed] == ["1"]
    assert (found.why_none, found.problems) == (None, ("GPU 0 cannot be read: GPU is lost",))


def test_what_the_driver_keeps_for_itself_is_no_memory_of_the_gpu():
    class Newer(Nvml):
        nvmlMemory_v2 = 2

        def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> SimpleNamespace:
            found = super().nvmlDeviceGetMemoryInfo(handle)
            if version != self.nvmlMemory_v2:
                return found
            return SimpleNamespace(total=24 << 30, reserved=1 << 30, used=19 << 30, free=4 << 30)

    class Older(Newer):
        """The package knows of it, and the driver does not."""

        def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> SimpleNamespace:
            if version is not None:
                raise self.NVMLError("Function Not Found")
            return super().nvmlDeviceGetMemoryInfo(handle)

    reading = nvidia_gpus(Newer()).readings[0]
    assert (reading.gpu.total, reading.used, reading.free) == (23 << 30, 19 << 30, 4 << 30)
    reading = nvidia_gpus(Older()).readings[0]
    assert (reading.gpu.total, reading.used, reading.free) == (24 << 30, 20 << 30, 4 << 30)


def test_processes_that_draw_are_seen_too_and_count_once_if_they_compute_as_well():
    class Both(Nvml):
        def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
            return [
                SimpleNamespace(pid=41, usedGpuMemory=19 << 30),
                SimpleNamespace(pid=43, usedGpuMemory=2 << 30),
            ]

    processes = nvidia_gpus(Both()).readings[0].processes
    assert dict(processes) == {41: 19 << 30, 42: None, 43: 2 << 30}


def test_what_a_gpu_cannot_tell_is_unknown_and_no_error():
    second = nvidia_gpus(Nvml()).readings[1]
    assert second == Reading(HostGpu("1", SECOND, "RTX"), None, (), persistence=True)
    assert second.free is None


def test_a_gpu_measures_itself_if_it_is_asked():
    first, second = nvidia_gpus(Nvml(), sensors=True).readings
    assert first.sensors == Sensors(0.43, 61.0, 213.5)
    assert second.sensors == Sensors(0.43, 61.0, None)
    assert nvidia_gpus(Nvml()).readings[0].sensors == Sensors()


def test_a_gpu_without_memory_of_its_own_has_the_hosts():
    class Unified(Nvml):
        class NVMLError(Nvml.NVMLError):
            value = 3

    first, second = nvidia_gpus(Unified()).readings
    assert (first.gpu.total, first.gpu.shared) == (24 << 30, 0)
    assert second.gpu.total
    assert second.gpu.shared == second.gpu.total
    assert 0 < (second.used or 0) < second.gpu.total


def test_gpus_of_all_vendors_are_looked_at(tmp_path, monkeypatch):
    sys, proc = plant("radeon", tmp_path)
    monkeypatch.setattr(gpus, "nvidia_gpus", partial(nvidia_gpus, Nvml()))
    monkeypatch.setattr(gpus, "amd_intel_gpus", partial(gpus.amd_intel_gpus, sys, proc))
    found = gpus.look()
    assert [each.id for each in found.listed] == ["0", "1", "amd0", "amd1"]
    assert found.driver == "570.86.15"
    assert [each.sensors.celsius for each in found.readings] == [61.0, 61.0, None, 61.0]
    names = "/dev/dri/renderD128", "/dev/dri/card2", "0000:03:00.0", "/dev/dri/renderD7"
    assert [each and each.gpu.id for each in map(found.find, names)] == ["amd1", "amd0", "amd0", None]
    nodes = [each.files[:1] for each in found.listed]
    assert nodes == [(), (), ("/dev/dri/renderD129",), ("/dev/dri/renderD128",)]


def test_where_there_are_none_each_vendor_says_why(monkeypatch):
    monkeypatch.setattr(gpus, "nvidia_gpus", lambda **_: Gpus(why_none="no library"))
    monkeypatch.setattr(gpus, "amd_intel_gpus", lambda **_: Gpus(why_none="no card"))
    assert gpus.probe() == Gpus(why_none="no library; no card")


def test_a_gpu_is_found_by_index_uuid_and_beginning_of_uuid():
    gpus = nvidia_gpus(Nvml())
    names = ["0", SECOND, "GPU-aa", "GPU-a", "2", "", "a"]
    found = [reading and reading.gpu.id for reading in map(gpus.find, names)]
    assert found == ["0", "1", "0", None, None, None, None]


@pytest.mark.parametrize("error", [Nvml.NVMLError("Driver Not Loaded"), OSError("libnvidia-ml.so.1: no")])
def test_a_machine_without_a_driver_has_no_gpus_and_says_why(error):
    class Broken(Nvml):
        def nvmlInit(self) -> None:
            raise error

    assert nvidia_gpus(Broken()) == Gpus((), f"NVML: {error}")


def test_a_gpu_that_is_lost_during_the_probe_is_no_error():
    class Lost(Nvml):
        def nvmlDeviceGetUUID(self, handle: int) -> str:
            raise self.NVMLError("GPU is lost")

    nvml = Lost()
    lost = tuple(f"GPU {index} cannot be read: GPU is lost" for index in (0, 1))
    assert nvidia_gpus(nvml) == Gpus((), "; ".join(lost), lost, "570.86.15")
    assert nvml.open == 0


def test_without_the_library_there_are_no_gpus():
    assert nvidia_gpus(None) == Gpus((), "the Python package nvidia-ml-py is not installed")


def test_the_real_library_never_raises_here():
    found = gpus.probe()
    assert found.readings or found.why_none


def test_a_gpu_tells_whether_it_is_cut_or_shared():
    class Cut(Nvml):
        def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
            return [1, 1]

        def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
            return [SimpleNamespace(pid=41, usedGpuMemory=1), SimpleNamespace(pid=43, usedGpuMemory=2)]

    first = nvidia_gpus(Cut()).readings[0]
    assert first.mig
    assert first.mps
    assert dict(first.processes) == {41: 19 << 30, 42: None, 43: 2}  # each once


def test_what_processes_hold_is_summed_per_gpu_and_an_untold_amount_is_not_taken_for_nothing():
    gpus = FakeGpus(24 << 30, 24 << 30)
    gpus.hold(41, 0, 5)
    gpus.hold(42, 0, 7)
    gpus.hold(42, 1, 11)
    assert gpus().used_by({41, 42}) == {"0": 12, "1": 11}
    assert gpus().used_by([41]) == {"0": 5}
    assert gpus().used_by({99}) == {}
    gpus.hold(41, 0, None)
    assert gpus().used_by({41, 42}) == {"0": None, "1": 11}


# Containers and other processes

ID, INNER = "0123456789abcdef" * 4, "fedcba9876543210" * 4


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([f"12:memory:/docker/{ID}", "0::/"], ID),
        ([f"0::/system.slice/docker-{ID}.scope"], ID),
        ([f"0::/../docker-{ID}.scope"], ID),
        ([f"4:memory:/kubepods/burstable/pod1-2/{ID}"], ID),
        ([f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope"], ID),
        ([f"0::/machine.slice/libpod-{ID}.scope/container"], ID),
        ([f"0::/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:{ID}"], ID),
        ([f"0::/docker/{ID}/docker/{INNER}"], INNER),
        (["0::/user.slice/user-1000.slice/session-2.scope"], None),
        (["3:memory:/process_api/ebc57c47fdbb0d2117db97a4e83cc6ab", "0::/"], None),
        ([f"0::/{ID}0"], None),
        ([], None),
    ],
)
def test_a_process_is_mapped_to_its_container(tmp_path, lines, expected):
    (tmp_path / "41").mkdir()
    (tmp_path / "41" / "cgroup").write_text("".join(line + "\n" for line in lines))
    assert container_of(41, tmp_path) == expected


def test_a_process_that_is_gone_has_neither_container_nor_name(tmp_path):
    assert container_of(41, tmp_path) is None
    assert command_of(41, tmp_path) == ""


def test_other_processes_that_can_be_seen_are_named_the_greatest_first():
    gone, parent, me = (1 << 22) + 1, os.getppid(), os.getpid()
    gpus = FakeGpus(24 << 30)
    gpus.hold(gone, 0, 1 << 30)
    gpus.hold(parent, 0, 2 << 30)
    gpus.hold(me, 0, 3 << 30)
    gpus.hold(77, 0, 5 << 30)
    found = others(gpus().readings, lambda pid: pid == 77)
    assert [(each.pid, each.used) for each in found] == [(me, 3 << 30), (parent, 2 << 30)]
    assert found[0].command == Path("/proc/self/comm").read_text().strip()


def test_a_other_process_is_described_for_people():
    known = OtherProcess("0", 4711, 3 << 30, "python3", ID)
    assert str(known) == "process 4711 (python3) in container 0123456789ab holds 3.0 GiB of GPU 0"
    assert str(OtherProcess("1", 4711, None)) == "process 4711 holds memory of GPU 1"


def test_a_bus_is_as_fast_as_its_generation_and_its_lanes():
    reading, *_ = nvidia_gpus(Nvml(), sensors=True).readings
    assert reading.bus == pytest.approx(31.5e9, rel=0.001)
