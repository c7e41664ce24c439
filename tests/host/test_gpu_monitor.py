"""What is seen of the GPUs, and when somebody looks."""

import os
import threading

from anvil_mux.host import gpus
from anvil_mux.host.gpus import WATCHED_SECONDS, GpuMonitor, Gpus
from anvil_mux.host.seam import GpuUse, GpuUses
from tests.fake_gpu import FakeGpus

GIB = 1 << 30
GUARD = 30.0
ME = os.getpid()


def owner(pid: int) -> str | None:
    return {41: "a", 42: "a", 43: "b"}.get(pid)


def seen(gpus: list[str], probe: FakeGpus) -> GpuUses:
    """What one look tells."""
    told: list[GpuUses] = []
    GpuMonitor(gpus, owner, told.append, probe).look()
    [gpu_uses] = told
    return gpu_uses


def test_ours_and_other_processes_are_told_apart():
    gpus = FakeGpus(24 * GIB, 24 * GIB)
    for pid, used in ((41, 8 * GIB), (42, GIB), (43, None), (ME, 3 * GIB)):
        gpus.hold(pid, 0, used)
    first, second = seen(["0", "1"], gpus).values()
    assert (first.used, first.total) == (12 * GIB, 24 * GIB)
    assert first.users == {"a": 9 * GIB, "b": None}
    assert [(each.pid, each.used) for each in first.others] == [(ME, 3 * GIB)]
    assert second == GpuUse(0, 24 * GIB)


def test_a_gpu_goes_by_the_id_that_the_configuration_gives_it():
    gpu_uses = seen(["GPU-00000001", "7"], FakeGpus(GIB, 2 * GIB))
    assert {gpu: each.total for gpu, each in gpu_uses.items()} == {"GPU-00000001": 2 * GIB}


def test_gpus_that_vanish_are_seen_no_more():
    gpus = FakeGpus(GIB)
    assert seen(["0"], gpus) == {"0": GpuUse(0, GIB)}
    gpus.why_none = "GPU is lost"
    assert seen(["0"], gpus) == {}


def test_it_rests_when_nobody_has_watched_for_long_and_looks_again_when_somebody_does():
    moment = [0.0]
    look = GpuMonitor(["0"], owner, lambda gpu_uses: None, FakeGpus(GIB), lambda: moment[0])
    assert not look.may_slow_down()
    moment[0] = WATCHED_SECONDS
    assert look.may_slow_down()
    look.watch()
    assert not look.may_slow_down()


class Nvml:
    """Answers until it is told to hang."""

    def __init__(self) -> None:
        self.looked = threading.Semaphore(0)
        self.hangs = threading.Event()
        self.hung = threading.Event()
        self.over = threading.Event()

    def __call__(self) -> Gpus:
        if self.hangs.is_set():
            self.hung.set()
            assert self.over.wait(GUARD)
        self.looked.release()
        return FakeGpus(GIB)()


def test_its_thread_looks_again_and_again_and_nobody_waits_for_an_nvml_that_hangs(monkeypatch):
    monkeypatch.setattr(gpus, "EVERY_SECONDS", 0.001)
    nvml = Nvml()
    told: list[GpuUses] = []
    look = GpuMonitor(["0"], owner, told.append, nvml)
    look.worker.start()
    for _ in range(3):
        assert nvml.looked.acquire(timeout=GUARD)
    nvml.hangs.set()
    assert nvml.hung.wait(GUARD)
    look.watch()
    assert told[-1] == {"0": GpuUse(0, GIB)}
    look.worker.close()
    nvml.over.set()
    assert look.worker.join(GUARD)
