"""A real vLLM on the CPU that sleeps and wakes. Opt-in: ANVIL_VLLM_PYTHON names a Python that has vLLM.

On a CPU no memory is released, but all else is real: the routes, the requests that hang while it sleeps, and
a level 2 wake that fails, because dummy weights cannot be read again.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.service import Service
from anvil_mux.errors import BackendError
from anvil_mux.host import engines
from anvil_mux.host.levels import Swapper
from anvil_mux.host.processes import ProcessRuntime
from anvil_mux.host.seam import Loaded

PYTHON = os.environ.get("ANVIL_VLLM_PYTHON", "")
REAL = Path(__file__).resolve().parent.parent / "real"
GUARD = 300.0
FLAGS = "--load-format dummy --enforce-eager --max-model-len 2048 --dtype float32 --host 127.0.0.1"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="ANVIL_VLLM_PYTHON names no Python with vLLM"),
]


class Scene:
    """One vLLM and the swapper that puts it to sleep."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([PYTHON, REAL / "tiny_hf_model.py", folder / "model"], check=True, timeout=GUARD)
        serve = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
        command = (*serve, "--served-model-name", "m", "--port", "$PORT", *FLAGS.split())
        service = Service(command=command, environment=tuple(ENVIRONMENT.items()), working_dir=str(folder))
        self.backend = Backend(
            "a", "m", ("0",), engine="vllm", load_timeout=GUARD, evict_to=("sleep",), service=service
        )
        config = Config(backends=(self.backend,), project="vllm")
        self.runtime = ProcessRuntime(config, environ={**os.environ, "XDG_STATE_HOME": str(folder / "state")})
        self.swapper = Swapper(self.runtime)
        self.url = self.swapper.load(self.backend).url


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("vllm"))
    yield made
    made.runtime.stop(made.backend)
    made.runtime.close()


def test_it_sleeps_and_wakes_and_is_never_started_again(scene):
    for _ in range(3):
        evicted = scene.swapper.evict(scene.backend, "sleep")
        assert (evicted.level, evicted.residual, evicted.host_bytes > 0) == ("sleep", {"0": 0}, True)
        assert engines.is_asleep(scene.backend, scene.url) is True
        assert scene.swapper.load(scene.backend, "sleep") == Loaded(scene.url, "sleep")
        assert engines.is_asleep(scene.backend, scene.url) is False


def test_it_is_healthy_while_it_sleeps_and_answers_nobody(scene, monkeypatch):
    scene.swapper.evict(scene.backend, "sleep")
    assert requests.get(f"{scene.url}/health", timeout=GUARD).status_code == 200
    monkeypatch.setattr(engines, "PROBE_TIMEOUT", 1.0)
    with pytest.raises(BackendError, match="was not answered in time"):
        engines.probe(scene.backend, scene.url)
    monkeypatch.undo()
    assert scene.swapper.load(scene.backend, "sleep").level == "sleep"


def test_it_cannot_be_woken_when_it_is_awake(scene):
    with pytest.raises(BackendError, match="is awake, nobody knows since when"):
        engines.wake(scene.backend, scene.url, 1)


def test_a_wake_that_fails_in_the_engine_is_a_cold_start_within_the_load(scene, caplog):
    assert scene.swapper.evict(scene.backend, "sleep-2").level == "sleep-2"
    loaded = scene.swapper.load(scene.backend, "sleep-2")
    assert loaded.level == "stop"
    assert "POST /collective_rpc answers 500" in caplog.text
    engines.probe(scene.backend, loaded.url)
