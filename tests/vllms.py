"""Real vLLMs on the CPU for tests, with an anvil-mux before them.

Opt-in: ANVIL_VLLM_PYTHON names a Python that has vLLM, and nixl for what passes keys and values on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from tests.crashing import free_port
from tests.running import Running, seen, serving

PYTHON = os.environ.get("ANVIL_VLLM_PYTHON", "")
REAL = Path(__file__).resolve().parent / "real"
GUARD = 900.0
"""Three cold starts of minutes each, on few cores."""
CONTEXT = 2048
FLAGS = f"--enforce-eager --max-model-len {CONTEXT} --dtype float32 --host 127.0.0.1 --port $$PORT"
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
NIXL = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "UCX_NET_DEVICES": "lo"}
TRANSFER = {"kv_connector": "NixlConnector", "kv_load_failure_policy": "recompute"}


def has_nixl() -> bool:
    asked = subprocess.run([PYTHON, "-c", "import nixl"], capture_output=True, check=False)
    return asked.returncode == 0


MARKS = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="ANVIL_VLLM_PYTHON names no Python with vLLM"),
]
NIXL_MARKS = [
    *MARKS,
    pytest.mark.skipif(bool(PYTHON) and not has_nixl(), reason="ANVIL_VLLM_PYTHON has no nixl"),
]


def write_model(folder: Path) -> Path:
    """Its weights are random, and so large that an answer depends on the whole prompt."""
    model = folder / "model"
    subprocess.run([PYTHON, REAL / "tiny_hf_model.py", model, "1"], check=True, timeout=GUARD)
    return model


def service(
    model: Path, served: str, gpu: str, role: str = "", flags: str = "", **own: object
) -> dict[str, Any]:
    """One vLLM that serves ``model`` as ``served``; with a ``role`` it passes keys and values on."""
    command = f"{PYTHON} -m vllm.entrypoints.openai.api_server --model {model} --served-model-name {served}"
    words, environment = [*command.split(), *FLAGS.split(), *flags.split()], ENVIRONMENT
    if role:
        words += ["--kv-transfer-config", json.dumps({**TRANSFER, "kv_role": role})]
        environment = {**ENVIRONMENT, **NIXL, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    about = {"model": served, "engine": "vllm", "gpus": [gpu], "load_timeout": GUARD, "preload": True, **own}
    return {"command": words, "environment": environment, "x-anvil": about}


def write_compose(folder: Path, services: Mapping[str, Any], **settings: object) -> Path:
    file = folder / "compose.yaml"
    about = {"name": folder.name, "x-anvil": {"runtime": "process", **settings}, "services": dict(services)}
    file.write_text(yaml.safe_dump(about))
    return file


class Scene:
    """anvil-mux before its vLLMs."""

    def __init__(self, running: Running, file: Path) -> None:
        self.running = running
        self.file = file
        self.url = f"http://127.0.0.1:{running.port}"
        self._state = file.parent / "anvil-mux" / file.parent.name

    def chat(self, model: str, words: str) -> tuple[str, str]:
        """The answer, and what is said of who gave it."""
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": words * 30}],
            "max_tokens": 32,
            "temperature": 0,
        }
        status, headers, text = self.running.request("POST", "/v1/chat/completions", asked, GUARD)
        assert status == 200, text
        return json.loads(text)["choices"][0]["message"]["content"], headers.get("x-anvil-backend", "")

    def metric(self, backend: str, name: str) -> float:
        """As the engine's own /metrics has it, over all of its labels."""
        lines = [line for line in self.page(backend).splitlines() if line.startswith(name + "{")]
        return sum(float(line.split()[-1]) for line in lines)

    def page(self, backend: str) -> str:
        return requests.get(f"{self.about(backend)['url']}/metrics", timeout=GUARD).text

    def transferred(self, backend: str) -> float:
        """Tokens of prompts that it was given by another."""
        return self.metric(backend, "vllm:external_prefix_cache_hits_total")

    def signal(self, backend: str, how: signal.Signals) -> None:
        os.killpg(self.about(backend)["pid"], how)

    @contextmanager
    def frozen(self, backend: str) -> Iterator[None]:
        self.signal(backend, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(backend, signal.SIGCONT)

    def backends(self, model: str = "m") -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.running.get("/healthz")["models"][model]["backends"]
        return found

    def wait_for_leases(self, **wanted: int) -> None:
        """Until the backends of m have so many."""

        def leases() -> dict[str, int]:
            return {name: about["leases"] for name, about in self.backends().items()}

        assert seen(leases, lambda found: found == wanted) == wanted

    def wait_until_loaded(self) -> None:
        """Reads the stream of events, which begins with the state of this moment, until all are ready."""
        with closing(requests.get(f"{self.url}/events", stream=True, timeout=GUARD)) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: ") and _all_ready(json.loads(line[6:])):
                    return
        raise AssertionError("the stream of events ended")

    def about(self, backend: str) -> dict[str, Any]:
        about: dict[str, Any] = json.loads((self._state / f"{backend}.json").read_text())
        return about


def _all_ready(message: dict[str, Any]) -> bool:
    models = message.get("models", {}).values()
    states = [each["state"] for about in models for each in about["backends"].values()]
    return bool(states) and set(states) == {"ready"}


@contextmanager
def loaded(file: Path) -> Iterator[Scene]:
    """An anvil-mux that serves ``file``, once all of it is loaded."""
    with serving(file, state=file.parent) as running:
        made = Scene(running, file)
        made.wait_until_loaded()
        yield made
