"""A real vLLM that computes prompts, one that writes the answers, and NIXL between them, all on the CPU.

Opt-in: ANVIL_VLLM_PYTHON names a Python that has vLLM and nixl. A third vLLM, which does all by itself, says
what the answers have to be: the weights are random, and so large that an answer depends on the whole prompt.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from tests.crashing import free_port
from tests.running import Running, seen, serving

PYTHON = os.environ.get("ANVIL_VLLM_PYTHON", "")
REAL = Path(__file__).resolve().parent.parent / "real"
GUARD = 900.0
"""Three cold starts of minutes each, on few cores."""
FLAGS = "--enforce-eager --max-model-len 2048 --dtype float32 --host 127.0.0.1 --port $$PORT"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "UCX_NET_DEVICES": "lo",
}
TRANSFER = {"kv_connector": "NixlConnector", "kv_load_failure_policy": "recompute"}
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def has_nixl() -> bool:
    asked = subprocess.run([PYTHON, "-c", "import nixl"], capture_output=True, check=False)
    return asked.returncode == 0


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="ANVIL_VLLM_PYTHON names no Python with vLLM"),
    pytest.mark.skipif(bool(PYTHON) and not has_nixl(), reason="ANVIL_VLLM_PYTHON has no nixl"),
]


def compose(folder: Path) -> Path:
    model = folder / "model"
    subprocess.run([PYTHON, REAL / "tiny_hf_model.py", model, "1"], check=True, timeout=GUARD)
    serve = f"{PYTHON} -m vllm.entrypoints.openai.api_server --model {model} --served-model-name"
    services: dict[str, Any] = {
        "plain": {
            "command": f"{serve} plain {FLAGS}",
            "environment": ENVIRONMENT,
            "x-anvil": {"engine": "vllm", "gpus": ["2"], "load_timeout": GUARD, "prepare": True},
        }
    }
    for gpu, (kind, role) in enumerate(ROLES.items()):
        transfer = json.dumps({**TRANSFER, "kv_role": role})
        services[kind] = {
            "command": [*f"{serve} m {FLAGS} --kv-transfer-config".split(), transfer],
            "environment": ENVIRONMENT | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())},
            "x-anvil": {
                "model": "m",
                "engine": "vllm",
                "gpus": [str(gpu)],
                "infer_type": kind,
                "load_timeout": GUARD,
                "prepare": True,
            },
        }
    file = folder / "compose.yaml"
    file.write_text(yaml.safe_dump({"name": "pair", "x-anvil": {"runtime": "process"}, "services": services}))
    return file


class Scene:
    """anvil-mux before the three engines."""

    def __init__(self, running: Running, state: Path) -> None:
        self._running = running
        self._state = state / "anvil-mux" / "pair"

    def chat(self, model: str, words: str) -> tuple[str, str]:
        """The answer, and what is said of who gave it."""
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": words * 30}],
            "max_tokens": 32,
            "temperature": 0,
        }
        status, headers, text = self._running.request("POST", "/v1/chat/completions", asked, GUARD)
        assert status == 200, text
        return json.loads(text)["choices"][0]["message"]["content"], headers.get("x-anvil-backend", "")

    def transferred(self) -> float:
        """Tokens of prompts that the decode engine was given by the other."""
        text = requests.get(f"{self._about('decode')['url']}/metrics", timeout=GUARD).text
        lines = [
            line for line in text.splitlines() if line.startswith("vllm:external_prefix_cache_hits_total")
        ]
        return sum(float(line.split()[-1]) for line in lines)

    def signal(self, backend: str, how: signal.Signals) -> None:
        os.killpg(self._about(backend)["pid"], how)

    def wait_for_leases(self, **wanted: int) -> None:
        """Until the backends have so many."""

        def leases() -> dict[str, int]:
            backends = self._running.get("/healthz")["models"]["m"]["backends"]
            return {name: about["leases"] for name, about in backends.items()}

        assert seen(leases, lambda found: found == wanted) == wanted

    def wait_until_loaded(self) -> None:
        """Reads the stream of events, which begins with the state of this moment, until all are ready."""
        url = f"http://127.0.0.1:{self._running.port}/events"
        with closing(requests.get(url, stream=True, timeout=GUARD)) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: ") and self._all_ready(json.loads(line[6:])):
                    return
        raise AssertionError("the stream of events ended")

    def _all_ready(self, message: dict[str, Any]) -> bool:
        models = message.get("models", {}).values()
        states = {name: each["state"] for about in models for name, each in about["backends"].items()}
        return states == dict.fromkeys(("plain", *ROLES), "ready")

    def _about(self, backend: str) -> dict[str, Any]:
        about: dict[str, Any] = json.loads((self._state / f"{backend}.json").read_text())
        return about


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("pair")
    with serving(compose(folder), state=folder) as running:
        made = Scene(running, folder)
        made.wait_until_loaded()
        yield made


def ask_meanwhile(scene: Scene, words: str, meanwhile: Callable[[], None]) -> tuple[str, str]:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(scene.chat, "m", words)
        meanwhile()
        return asked.result(GUARD)


def test_the_answer_is_that_of_one_engine_and_the_decode_engine_computes_no_prompt(scene: Scene) -> None:
    before = scene.transferred()
    answer, by = scene.chat("m", "so it goes ")
    assert answer == scene.chat("plain", "so it goes ")[0]
    assert answer != scene.chat("plain", "so it does ")[0]
    assert by.startswith("decode; ")
    assert by.endswith("; prefill by prefill")
    assert scene.transferred() - before > 300


def test_a_prefill_engine_that_is_killed_at_work_leaves_the_request_to_the_other_and_comes_back(
    scene: Scene,
) -> None:
    def kill() -> None:
        scene.wait_for_leases(prefill=1, decode=1)
        scene.signal("prefill", signal.SIGKILL)

    scene.signal("prefill", signal.SIGSTOP)
    answer, by = ask_meanwhile(scene, "it comes and ", kill)
    assert answer == scene.chat("plain", "it comes and ")[0]
    assert "prefill by" not in by
    scene.chat("m", "it is back ")
    scene.wait_until_loaded()
    before = scene.transferred()
    assert scene.chat("m", "and again ")[1].endswith("; prefill by prefill")
    assert scene.transferred() > before


def test_a_prefill_engine_that_is_killed_before_it_is_read_costs_the_decode_engine_the_prompt(
    scene: Scene,
) -> None:
    def kill() -> None:
        try:
            scene.wait_for_leases(prefill=0, decode=1)
            scene.signal("prefill", signal.SIGKILL)
        finally:
            scene.signal("decode", signal.SIGCONT)

    scene.signal("decode", signal.SIGSTOP)
    answer, by = ask_meanwhile(scene, "it went away ", kill)
    assert by.endswith("; prefill by prefill")
    assert answer == scene.chat("plain", "it went away ")[0]
