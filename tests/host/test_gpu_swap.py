"""The benchmark of GPU swaps, with stand-ins for PyTorch, NVML and the CUDA driver: no GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda import FakeCuda

SCRIPT = Path(__file__).resolve().parent.parent / "bench" / "gpu_swap.py"
GIB = 1 << 30

TORCH = """
import os
from pathlib import Path
from types import SimpleNamespace

folder = Path(os.environ["FAKE_CUDA"])
ME = os.getpid()
__version__, int64, version = "2.9.0", "int64", SimpleNamespace(cuda="13.0")
used = 0


def take(bytes):
    global used
    used += bytes
    (folder / f"{ME}.used").write_text(str(used))


class Tensor:
    def __init__(self, count, total=0, device=None):
        self.count, self.total, self.device = count, total, device
        if device:
            take(count * 8)

    def __del__(self):
        if self.device:
            take(-self.count * 8)

    def __len__(self):
        return self.count

    def __getitem__(self, cut):
        return arange(cut.stop)

    def copy_(self, other, non_blocking=False):
        assert len(other) == self.count
        self.total = other.total
        if self.device and "FAKE_LOSS" in os.environ:
            self.total += 1

    def add_(self, number):
        self.total += number * self.count

    def sum(self):
        return SimpleNamespace(item=lambda: self.total)


def arange(count, dtype=None):
    return Tensor(count, count * (count - 1) // 2)


def empty(count, dtype=None, device=None, pin_memory=False):
    (folder / str(ME)).write_text("0")
    return Tensor(count, device=device)


def device(kind, index):
    return f"{kind}:{index}"


cuda = SimpleNamespace(
    is_available=lambda: "FAKE_NONE" not in os.environ,
    device_count=lambda: 1,
    mem_get_info=lambda device: (20 << 30, 24 << 30),
    get_device_name=lambda device: "Fake 24",
    get_device_properties=lambda device: SimpleNamespace(uuid="0000-1111"),
    synchronize=lambda device: None,
    empty_cache=lambda: None,
)
"""

PYNVML = """
import os
from pathlib import Path
from types import SimpleNamespace

folder = Path(os.environ["FAKE_CUDA"])


class NVMLError(Exception):
    pass


def holders():
    for file in folder.glob("*.used"):
        pid = int(file.stem)
        if (folder / str(pid)).read_text() != "2" and Path(f"/proc/{pid}").exists():
            yield SimpleNamespace(pid=pid, usedGpuMemory=int(file.read_text()))


nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 1
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetUUID = lambda handle: "GPU-0000-1111"
nvmlDeviceGetName = lambda handle: "Fake 24"
nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(
    total=24 << 30, used=sum(each.usedGpuMemory for each in holders())
)
nvmlDeviceGetComputeRunningProcesses = lambda handle: list(holders())
nvmlDeviceGetMPSComputeRunningProcesses = lambda handle: []
nvmlDeviceGetMigMode = lambda handle: [int("FAKE_MIG" in os.environ), 0]
nvmlDeviceGetPersistenceMode = lambda handle: 1
nvmlSystemGetDriverVersion = lambda: "580.95.05"
"""


def bench(*given: str, **environ: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *given],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
        timeout=120,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture
def stand_ins(tmp_path: Path, cuda: FakeCuda, libcuda: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments to run with them."""
    for name, text in (("torch", TORCH), ("pynvml", PYNVML)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return ["--library", str(libcuda), "--repeat", "2"]


def test_without_pytorch_and_a_driver_it_says_so(tmp_path):
    for module in ("torch", "pynvml"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('not here')")
    done = subprocess.run(
        [SCRIPT.parents[2] / "bin" / "bench", "swap", "--gpu"],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    report = json.loads(done.stdout)
    assert (done.returncode, report["ran"], report["why_not"] in done.stderr) == (1, False, True)
    assert report["why_not"].startswith("PyTorch is not installed for ")
    assert report["why_not"].endswith(
        "nor is any GPU seen (the Python package nvidia-ml-py is not installed)"
    )


def test_without_a_gpu_it_says_so(stand_ins):
    code, report, said = bench(*stand_ins, FAKE_NONE="1")
    assert (code, report) == (1, {"ran": False, "why_not": "PyTorch 2.9.0 sees no CUDA GPU 0"})
    assert "PyTorch 2.9.0 sees no CUDA GPU 0" in said


@pytest.mark.parametrize("given", [["--gib", "0"], ["--repeat", "0", "--gpu", "first"]])
def test_bad_arguments_are_refused(given):
    done = subprocess.run([sys.executable, str(SCRIPT), *given], capture_output=True, text=True)
    assert done.returncode == 2
    assert "bench-gpu: error:" in done.stderr


def test_every_way_is_measured_for_every_size_that_fits(stand_ins):
    code, report, _ = bench(*stand_ins, "--gib", "0.5", "19")
    assert code == 0
    assert report["machine"]["driver"] == "580.95.05"
    ways = ["cold", "checkpoint", "first_offload", "offload", "offload+checkpoint"]
    *results, left_out = report["results"]
    assert left_out == {"gib": 19.0, "skipped": "the GPU has 20.0 GiB free"}
    assert [(each["gib"], each["way"]) for each in results] == [(0.5, way) for way in ways]
    assert [each["repetitions"] for each in results] == [4, 2, 2, 2, 2]
    phases = {each["way"]: list(each["phases"]) for each in results}
    assert phases == {
        "cold": ["start", "answer"],
        "checkpoint": ["find", "park", "freeze", "thaw", "restore", "answer"],
        "first_offload": ["offload", "load", "answer"],
        "offload": ["offload", "load", "answer"],
        "offload+checkpoint": ["offload", "find", "park", "freeze", "thaw", "restore", "load", "answer"],
    }
    for each in results[1:]:
        assert (each["used_bytes"], each["left_bytes"]) == (GIB // 2, 0)
        assert each["total_seconds"] == pytest.approx(each["out_seconds"] + each["back_seconds"], abs=1e-3)
        assert each["back_gib_per_second"] == pytest.approx(0.5 / each["back_seconds"], rel=0.1)


def test_what_cannot_be_checkpointed_is_measured_without(stand_ins):
    code, report, _ = bench(*stand_ins, "--gib", "0.3", "--repeat", "1", FAKE_MIG="1")
    assert code == 0
    *measured, refused = report["results"]
    assert [each["way"] for each in measured] == ["cold", "first_offload", "offload"]
    assert "is cut into instances (MIG)" in refused["skipped"]


def test_a_lost_byte_is_seen(stand_ins):
    _, report, _ = bench(*stand_ins, "--gib", "0.3", "--repeat", "1", FAKE_LOSS="1")
    assert "after first_offload the weights are not what they were" in str(report["results"])
