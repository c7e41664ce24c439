"""Engines that go into standby by a checkpoint, in memory and as real processes, through the Swapper."""

import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from anvil_mux.cli import main as cli
from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.config.service import Service
from anvil_mux.errors import BackendError
from anvil_mux.host import levels
from anvil_mux.host.cuda_checkpoint import Checkpointer, Rights, is_frozen
from anvil_mux.host.cuda_driver import Driver
from anvil_mux.host.gpus import Gpus
from anvil_mux.host.levels import PATIENCE, Swapper, sleeps_first
from anvil_mux.host.processes import ProcessRuntime
from anvil_mux.host.seam import Evicted, Loaded
from anvil_mux.serve.building import Opened
from anvil_mux.serve.invocation import Options
from anvil_mux.serve.program import AnvilMux
from tests.fake_cuda import FakeCuda
from tests.fake_gpu import FakeGpus
from tests.host.test_levels import STANDBY, A, impatient, scene
from tests.running import seen
from tests.sleepy_engine import CONTEXT, GIB, GUARD, House

__all__ = ["impatient", "scene"]

ROOT = Path(__file__).resolve().parent.parent.parent


def posts(calls: list[str]) -> list[str]:
    return [call for call in calls if not call.startswith("GET")]


def test_what_sleeps_is_standby_and_frozen_once_its_memory_is_free_and_comes_back_in_reverse(scene):
    backend = replace(STANDBY, evict_to=("checkpoint", "sleep", "stop"))
    engine = scene.resident(backend)
    calls = engine.asked = scene.house.calls
    scene.tells_reads = True
    assert scene.swapper.evict(backend, "checkpoint") == Evicted("checkpoint", {"0": 0}, CONTEXT)
    assert posts(calls) == ["read", "POST /sleep?level=1&mode=abort", "lock", "checkpoint", "read", "pause a"]
    assert scene.used == 0
    calls.clear()
    assert scene.swapper.load(backend, "checkpoint") == Loaded(engine.url, "checkpoint")
    assert posts(calls) == [
        "resume a",
        "restore",
        "unlock",
        "POST /wake_up",
        "POST /reset_prefix_cache",
        "POST /v1/chat/completions",
    ]
    assert scene.used == 18 * GIB + CONTEXT


def test_who_came_by_way_of_a_deep_sleep_reads_its_weights_again(scene):
    backend = replace(STANDBY, evict_to=("sleep", "sleep-2", "checkpoint", "stop"))
    engine = scene.resident(backend)
    scene.swapper.evict(backend, "sleep-2")
    assert scene.swapper.demote(backend, "sleep-2", "checkpoint").level == "checkpoint"
    assert engine.garbage
    assert scene.swapper.load(backend, "checkpoint") == Loaded(engine.url, "checkpoint")
    assert not engine.garbage


@pytest.mark.parametrize("kind", ["vllm", "sglang", "ollama", "openai"])
def test_who_cannot_sleep_goes_with_all_that_it_holds(scene, kind):
    backend = replace(STANDBY, engine=kind)
    scene.resident(backend)
    held = scene.used
    for _ in range(3):
        assert scene.swapper.evict(backend, "checkpoint") == Evicted("checkpoint", {"0": 0}, held)
        assert (scene.used, scene.house.frozen) == (0, {"a"})
        assert scene.swapper.load(backend, "checkpoint").level == "checkpoint"
        assert scene.house.frozen == set()
    assert not {"start a", "stop a"} & set(scene.house.calls)


def test_who_uses_no_cuda_is_only_frozen(scene, monkeypatch):
    engine = scene.resident(STANDBY)
    scene.house.ledger.hold(engine.pid, ("0",), 0)
    monkeypatch.setattr(scene.driver, "uses_cuda", lambda pid: False)
    assert scene.swapper.evict(STANDBY, "checkpoint") == Evicted("checkpoint", {"0": 0})
    assert scene.swapper.load(STANDBY, "checkpoint").level == "checkpoint"
    assert scene.house.calls == ["pause a", "resume a"]


def test_the_processes_are_found_anew_each_time(scene):
    engine = scene.resident(STANDBY)
    scene.swapper.evict(STANDBY, "checkpoint")
    scene.swapper.load(STANDBY, "checkpoint")
    scene.house.ledger.hold(engine.pid, ("0",), 0)
    engine.pid += 1000
    scene.house.ledger.hold(engine.pid, ("0",), GIB)
    assert scene.swapper.evict(STANDBY, "checkpoint") == Evicted("checkpoint", {"0": 0}, GIB)
    assert scene.driver.states[engine.pid] == "checkpointed"


def test_a_checkpoint_that_frees_nothing_is_none_and_is_not_frozen(scene):
    scene.resident(STANDBY)
    scene.driver.frees = False
    before = scene.time.now()
    assert scene.swapper.evict(STANDBY, "checkpoint") == Evicted("stop")
    assert scene.time.now() - before == PATIENCE
    assert (scene.house.calls, scene.used) == (["lock", "checkpoint", "stop a"], 0)


def test_a_lock_that_times_out_leaves_a_whole_engine_that_is_stopped_in_order(scene, monkeypatch, caplog):
    engine = scene.resident(STANDBY)
    worker = engine.pid + 1000
    scene.house.ledger.hold(worker, ("0",), GIB)
    scene.driver.states[worker] = "running"
    monkeypatch.setattr(scene.house, "pids", lambda backend: [engine.pid, worker])
    scene.driver.faults["lock", worker] = None
    states: list[set[str]] = []

    def stop(backend: Backend) -> None:
        states.append(set(scene.driver.states.values()))
        scene.house.ledger.hold(worker, ("0",), 0)
        House.stop(scene.house, backend)

    monkeypatch.setattr(scene.house, "stop", stop)
    assert scene.swapper.evict(STANDBY, "checkpoint") == Evicted("stop")
    assert states == [{"running"}]
    assert scene.house.calls == ["lock", "unlock", "stop a"]
    assert f"lock of process {worker}: refused" in caplog.text


def test_who_does_not_fall_asleep_first_is_stopped_unstandby(scene, impatient):
    backend = replace(STANDBY, evict_to=("checkpoint", "sleep", "stop"))
    scene.resident(backend).faults.add("sleep hangs")
    impatient()
    assert scene.swapper.evict(backend, "checkpoint") == Evicted("stop")
    assert scene.house.calls == ["stop a"]


def test_who_cannot_be_frozen_is_stopped(scene, monkeypatch):
    scene.resident(STANDBY)

    def pause(backend: Backend) -> None:
        raise BackendError("Docker does not answer")

    monkeypatch.setattr(scene.house, "pause", pause)
    assert scene.swapper.evict(STANDBY, "checkpoint") == Evicted("stop")
    assert scene.house.calls == ["lock", "checkpoint", "stop a"]


@pytest.mark.parametrize("left", [None, "failed"])
def test_who_cannot_be_restored_is_started_anew_within_the_load(scene, left, caplog):
    first = scene.resident(STANDBY)
    scene.swapper.evict(STANDBY, "checkpoint")
    scene.house.calls.clear()
    scene.driver.faults["restore", first.pid] = left
    loaded = scene.swapper.load(STANDBY, "checkpoint")
    assert loaded == Loaded(scene.house.engines["a"].url, "stop")
    assert scene.house.calls == ["resume a", "stop a", "start a"]
    assert "a could not be woken from standby (checkpoint) and is restarted" in caplog.text
    assert scene.used == 18 * GIB + CONTEXT


@pytest.mark.parametrize("fault", ["wake answers 500", "answers nothing", "has died"])
def test_who_is_restored_and_gives_no_token_is_started_anew(scene, impatient, fault):
    backend = replace(STANDBY, evict_to=("checkpoint", "sleep", "stop"))
    engine = scene.resident(backend)
    scene.swapper.evict(backend, "checkpoint")
    engine.faults.add(fault)
    if fault == "has died":
        engine.end("was killed (code 137)")
        del scene.driver.states[engine.pid]
    impatient()
    assert scene.swapper.load(backend, "checkpoint").level == "stop"


FLAG = Service(command=("vllm", "serve", "m", "--enable-sleep-mode"))
SAVER = ("launch", "--enable-memory-saver", "--enable-weights-cpu-backup")


@pytest.mark.parametrize(
    ("engine", "evict_to", "service", "expected"),
    [
        ("vllm", ("checkpoint", "stop"), Service(), False),
        ("vllm", ("checkpoint", "sleep", "stop"), Service(), True),
        ("vllm", ("checkpoint", "stop"), FLAG, False),  # has no sleep routes
        ("vllm", ("checkpoint",), replace(FLAG, environment=(("VLLM_SERVER_DEV_MODE", "1"),)), True),
        ("sglang", ("checkpoint", "stop"), Service(command=SAVER), True),
        ("sglang", ("checkpoint", "stop"), Service(command=SAVER[:2]), False),
        ("ollama", ("checkpoint", "sleep", "stop"), Service(), False),  # would read its weights again
        ("openai", ("checkpoint", "stop"), Service(), False),
    ],
)
def test_who_sleeps_before_it_is_standby(engine, evict_to, service, expected):
    assert sleeps_first(replace(A, engine=engine, evict_to=evict_to, service=service)) is expected


# Real processes, with the stand-in for libcuda


class Shop:
    """A real engine that uses the CUDA stand-in, and the GPU as NVML would show it."""

    def __init__(self, folder: Path, libcuda: Path, cuda: FakeCuda) -> None:
        command = (str(ROOT / "bin" / "demo-engine"), "--model", "model-a", "--load-seconds", "0.1")
        self.backend = replace(STANDBY, service=Service(command=command))
        self.config = Config(
            (self.backend,),
            gpus=(Gpu("0"),),
            project="shop",
            files=(str(folder / "compose.yaml"),),
            runtime="process",
            port=0,
        )
        self.runtime = ProcessRuntime(self.config)
        self.cuda = cuda
        self.checkpointer = Checkpointer(lambda: Driver(library=str(libcuda)), self.probe)
        self.swapper = Swapper(self.runtime, probe=self.probe, checkpointer=self.checkpointer)
        self.pid = 0

    def probe(self, pids: Collection[int] | None = None) -> Gpus:
        gpus = FakeGpus(24 * GIB)
        if self.pid and self.cuda.state(self.pid) in ("running", "locked"):
            gpus.hold(self.pid, 0, GIB)
        return gpus()

    def open(self) -> str:
        loaded = self.swapper.load(self.backend, "stop")
        (self.pid,) = self.runtime.pids(self.backend)
        self.cuda.process(self.pid)
        return loaded.url


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libcuda: Path, cuda: FakeCuda) -> Iterator[Shop]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = Shop(tmp_path, libcuda, cuda)
    yield made
    made.runtime.kill(made.backend)
    made.runtime.close()


def test_a_real_engine_is_standby_frozen_and_comes_back(shop):
    url = shop.open()
    for _ in range(2):
        evicted = shop.swapper.evict(shop.backend, "checkpoint")
        assert (evicted.level, evicted.residual, evicted.host_bytes) == ("checkpoint", {"0": 0}, GIB)
        assert shop.cuda.state(shop.pid) == "checkpointed"
        while not is_frozen(shop.pid):  # a signal is not obeyed at once
            assert shop.runtime.ended(shop.backend) is None
        assert shop.swapper.load(shop.backend, "checkpoint") == Loaded(url, "checkpoint")
        assert shop.runtime.pids(shop.backend) == [shop.pid]
    calls = [call.split()[0] for call in shop.cuda.calls()]
    assert calls == ["lock", "checkpoint", "restore", "unlock"] * 2


def test_a_checkpointed_engine_that_is_found_at_the_start_rests_on(shop, monkeypatch):
    url = shop.open()
    assert shop.swapper.evict(shop.backend, "checkpoint").level == "checkpoint"
    before = shop.cuda.calls()
    program = adopt(shop, monkeypatch)
    assert [model.state for model in program.parts.mux.overview.status().models] == ["standby"]
    assert (shop.cuda.state(shop.pid), shop.cuda.calls()) == ("checkpointed", before)
    assert shop.runtime.is_frozen(shop.backend)
    assert shop.swapper.load(shop.backend, "checkpoint") == Loaded(url, "checkpoint")
    assert shop.runtime.pids(shop.backend) == [shop.pid]


def test_half_a_checkpoint_that_is_found_at_the_start_is_stopped(shop, monkeypatch, capsys):
    shop.open()
    shop.cuda.process(shop.pid, "locked")
    adopt(shop, monkeypatch)
    assert shop.runtime.running() == {}
    assert "stopping a: only a part of it is checkpointed; the next request" in capsys.readouterr().err


def test_who_asks_before_it_is_known_what_runs_waits_and_is_served_by_that(shop, monkeypatch):
    shop.open()
    monkeypatch.setattr(levels, "Checkpointer", lambda **_: shop.checkpointer)
    program = AnvilMux(shop.config, Options(access_log="off"), Opened())
    program.start()
    ready = requests.get(f"{program.parts.url}/readyz", timeout=GUARD)
    assert ready.status_code == 503
    assert "[-]adoption it is not known yet whether these run already: a\n" in ready.text
    body = {"model": "model-a", "messages": []}
    with ThreadPoolExecutor() as pool:
        url = f"{program.parts.url}/v1/chat/completions"
        asked = pool.submit(requests.post, url, json=body, timeout=GUARD)
        assert seen(lambda: program.parts.mux.overview.status().waiting, bool) == 1
        program.adopt()
        assert asked.result().status_code == 200
    assert requests.get(f"{program.parts.url}/readyz", timeout=GUARD).text == "ok\n"
    assert shop.runtime.pids(shop.backend) == [shop.pid]
    program.stop()
    program.parts.relay.pool.close()


def test_what_a_checkpoint_lacks_is_told_by_who_serves(shop, monkeypatch, capsys):
    shop.open()
    here = Rights(user=os.geteuid() + 1, group=os.getegid(), traces=False, scope=0, sees_host=True)
    monkeypatch.setattr(Rights, "here", lambda: here)
    monkeypatch.setattr(levels, "Checkpointer", lambda **_: shop.checkpointer)
    program = AnvilMux(shop.config, Options(access_log="off"), Opened())
    program.start()
    program.adopt()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "may fail" in line]
    _, warning = line.split(" anvil-mux: warning: ")  # its time comes first
    them = f"{os.geteuid()}:{os.getegid()}"
    assert warning.startswith(f"a: checkpoint may fail: the engine's processes are of user and group {them},")
    assert requests.get(f"{program.parts.url}/healthz", timeout=GUARD).json()["notes"] == {"rights": warning}
    ready = requests.get(f"{program.parts.url}/readyz?verbose", timeout=GUARD)
    assert (ready.status_code, f"[~]rights {warning}\n" in ready.text) == (200, True)
    assert cli.main(["ps", "--url", program.parts.url]) == 0
    assert f"warning: {warning}" in capsys.readouterr().err
    program.parts.reconfigure(shop.config)
    assert "may fail" not in capsys.readouterr().err  # it has been said
    here = replace(here, user=os.geteuid(), traces=True)
    program.parts.reconfigure(shop.config)
    assert requests.get(f"{program.parts.url}/healthz", timeout=GUARD).json()["notes"] == {}
    program.stop()
    program.parts.relay.pool.close()


def adopt(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> AnvilMux:
    """What a new anvil-mux does with what it finds."""
    monkeypatch.setattr(levels, "Checkpointer", lambda **_: shop.checkpointer)
    program = AnvilMux(shop.config, Options(access_log="off"), Opened())
    program.adopt()
    program.start()
    program.stop()
    return program
