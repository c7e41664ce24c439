"""A running anvil-mux whose GPUs are stand-ins: who holds what is seen, measured and remembered."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.cli.demo import compose, engine_pid, is_alive
from tests.host.trees import Account, instead, plant
from tests.running import serving

GIB = 1 << 30
GUARD = 60.0

PYNVML = """
import json, os
from pathlib import Path
from types import SimpleNamespace


class NVMLError(Exception):
    pass


def held():
    file = Path(os.environ["FAKE_NVML"])
    amounts = json.loads(file.read_text()) if file.exists() else {}
    return {int(pid): amount for pid, amount in amounts.items() if Path(f"/proc/{pid}/exe").exists()}


def unknown(*_):
    raise NVMLError("not supported")


def nvmlDeviceGetMemoryInfo(_):
    return SimpleNamespace(total=24 << 30, used=sum(held().values()))


def nvmlDeviceGetComputeRunningProcesses(_):
    return [SimpleNamespace(pid=pid, usedGpuMemory=amount) for pid, amount in held().items()]


nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 1
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetUUID = nvmlDeviceGetName = lambda _: "GPU-fake"
nvmlSystemGetDriverVersion = lambda: "580.1"
nvmlDeviceGetMPSComputeRunningProcesses = nvmlDeviceGetMigMode = nvmlDeviceGetPersistenceMode = unknown
nvmlDeviceGetUtilizationRates = lambda _: SimpleNamespace(gpu=43)
nvmlDeviceGetTemperature = lambda *_: 61
nvmlDeviceGetPowerUsage = unknown
NVML_TEMPERATURE_GPU = 0
"""


class FakeNvml:
    """One GPU of 24 GiB in a folder, for a program with its ``environ``."""

    def __init__(self, folder: Path) -> None:
        (folder / "pynvml.py").write_text(PYNVML)
        self._file = folder / "nvml.json"
        paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        self.environ = {"PYTHONPATH": paths, "FAKE_NVML": str(self._file), "NVIDIA_VISIBLE_DEVICES": "all"}

    def hold(self, amounts: dict[int, int]) -> None:
        """From now on these processes, and no others, hold so many bytes."""
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(amounts))
        part.replace(self._file)


def eventually(holds: Callable[[], bool]) -> None:
    """For what tells nobody when it has come true."""
    pause, give_up = threading.Event(), time.monotonic() + GUARD
    while not holds():
        assert time.monotonic() < give_up, "it never came true"
        pause.wait(0.05)


def test_who_holds_gpu_memory_is_seen_and_what_an_eviction_frees_is_remembered(tmp_path):
    nvml = FakeNvml(tmp_path)
    with serving(
        compose(tmp_path, max_wait=0.5), "--policy", "eager", state=tmp_path, environ=nvml.environ
    ) as mux:

        def gpu() -> dict[str, Any]:
            return mux.get("/healthz")["gpus"]["0"]

        assert mux.chat("a")[0] == 200
        me, engine = os.getpid(), engine_pid(tmp_path, "a")
        nvml.hold({me: 3 * GIB, engine: 5 * GIB})
        eventually(lambda: gpu()["used"] == 8 * GIB)
        seen = gpu()
        assert (seen["total"], seen["users"]) == (24 * GIB, {"a": 5 * GIB})
        assert [(each["pid"], each["bytes"]) for each in seen["others"]] == [(me, 3 * GIB)]
        assert mux.chat("b")[0] == 200
        measured = 'anvil_backend_memory_bytes{backend="a",gpu="0"} 5.36870912e+09'
        eventually(lambda: measured in mux.request("GET", "/metrics")[2])
        # b would have to leave for a, which needs what it held: others leave it 4 GiB of 24 GiB.
        nvml.hold({me: 20 * GIB})
        eventually(lambda: [each["bytes"] for each in gpu()["others"]] == [20 * GIB])
        status, _, body = mux.request("POST", "/models/load?wait=true", {"model": "a"})
        assert (status, json.loads(body)["error"]["code"]) == (503, "gpu_memory_short")
        assert mux.get("/healthz")["models"]["b"]["state"] == "ready"
    [kept] = tmp_path.rglob("learned")
    [footprint] = json.loads(kept.read_text())["footprints"]
    assert (footprint["backend"], footprint["held"]) == ("a", {"0": 5 * GIB})


def test_a_gpu_is_left_to_another_program_and_the_model_comes_back_after_it(tmp_path):
    nvml, me = FakeNvml(tmp_path), os.getpid()
    config = compose(tmp_path, "a", **{"yield": {"when_others_hold": "4GiB"}, "home_after": 0.2})
    with serving(config, state=tmp_path, environ=nvml.environ) as mux:

        def state() -> str:
            return mux.get("/healthz")["models"]["a"]["state"]

        assert mux.chat("a")[0] == 200
        nvml.hold({me: 4 * GIB - 1})
        eventually(lambda: bool(mux.get("/healthz")["gpus"]["0"]["others"]))
        assert state() == "ready"
        nvml.hold({me: 6 * GIB})
        eventually(lambda: state() == "stopped")
        status, _, body = mux.chat("a")
        assert (status, json.loads(body)["error"]["code"]) == (503, "gpu_memory_short")
        nvml.hold({me: GIB})
        eventually(lambda: state() == "ready")
        assert mux.chat("a")[0] == 200
        mux.tells(r"a: draining|a: evicting .*other programs hold 6.0 GiB of GPU 0")


def test_a_card_of_amd_is_watched_by_the_kernels_files(tmp_path):
    sys, _ = plant("radeon", tmp_path / "tree")
    account = Account(sys)
    file = compose(tmp_path)
    config = yaml.safe_load(file.read_text())
    for service in config["services"].values():
        service |= {"devices": ["/dev/kfd", "/dev/dri/renderD128"], "x-anvil": {}}
    file.write_text(yaml.safe_dump(config))
    environ = instead(sys, tmp_path)
    with serving(file, "--policy", "eager", state=tmp_path, environ=environ) as mux:

        def gpu() -> dict[str, Any]:
            return mux.get("/healthz")["gpus"]["amd1"]

        assert mux.chat("a")[0] == 200
        engine = engine_pid(tmp_path, "a")
        account.hold({os.getpid(): GIB, engine: 9 * GIB})
        eventually(lambda: gpu()["users"] == {"a": 9 * GIB})
        assert [(each["pid"], each["bytes"]) for each in gpu()["others"]] == [(os.getpid(), GIB)]
        assert gpu()["sensors"] == {"utilization": 0.87, "celsius": 61, "watts": 213}
        assert mux.request("POST", "/models/unload", {"model": "a"})[0] == 200
        eventually(lambda: not is_alive(engine))
        account.hold({os.getpid(): GIB})
        measured = 'anvil_backend_memory_bytes{backend="a",gpu="amd1"} 9.663676416e+09'
        eventually(lambda: measured in mux.request("GET", "/metrics")[2])
