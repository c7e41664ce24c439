"""Real engines that crash, freeze or are killed, and what clients, `ps` and the log get to know of it."""

import json
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.docker.conftest import Stack
from tests.docker.served import served
from tests.running import Running, seen

CRASHES = "model-1"
"""With --embeddings alone this llama-server ends by SIGSEGV when it is asked to chat."""


def crashing(make: Callable[..., Stack], folder: Path) -> Stack:
    stack = make(folder, models=2)
    command = [*_command(stack, CRASHES), "--embeddings"]
    return make(folder, models=2, services={CRASHES: {"command": command}})


def _command(stack: Stack, model: str) -> list[str]:
    import yaml

    return list(yaml.safe_load(stack.file.read_text())["services"][model]["command"])


def docker(stack: Stack, *args: str) -> None:
    subprocess.run(["docker", *args], env=stack.engine.env, check=True, capture_output=True, timeout=60)


def starts(mux: Running) -> int:
    return sum(": loading (" in line for line in mux.output)


def test_an_engine_that_crashes_under_each_request_is_loaded_once_and_everybody_is_told_why(
    llamacpp_compose, tmp_path
):
    stack = crashing(llamacpp_compose, tmp_path)
    with served(stack) as mux:
        answers = [mux.chat(CRASHES) for _ in range(6)]
        for status, headers, body in answers:
            error = json.loads(body)["error"]
            assert (status, error["code"], headers["x-should-retry"]) == (503, "load_failed", "false")
            assert "exited with code 139 (SIGSEGV)" in error["message"]
            assert "Last lines of the engine's log" in error["message"]
        mux.tells(r"died: exited with code 139 \(SIGSEGV\)")
        mux.tells(r"^  \| ")
        assert starts(mux) == 1
        assert not any("did not rest" in line for line in mux.output)
        model = mux.get("/healthz")["models"][CRASHES]
        assert model["last_error"].startswith("exited with code 139 (SIGSEGV)")
        assert model["backends"][CRASHES]["log"]
        url = f"http://127.0.0.1:{mux.port}"
        ps = subprocess.run(
            [*mux.command[:3], "ps", "--url", url], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        assert "exited with code 139 (SIGSEGV)" in ps
        assert "\n  | " in ps
        assert mux.chat("model-2")[0] == 200


def test_a_frozen_engine_answers_all_when_it_goes_on(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=1)
    with served(stack) as mux, ThreadPoolExecutor(20) as threads:
        assert mux.chat("model-1")[0] == 200
        docker(stack, "kill", "--signal", "STOP", stack.container("model-1"))
        asked = [threads.submit(mux.chat, "model-1", max_tokens=4) for _ in range(20)]
        found = seen(lambda: mux.get("/healthz")["models"]["model-1"], lambda model: model["leases"] == 20)
        assert found["leases"] == 20
        docker(stack, "kill", "--signal", "CONT", stack.container("model-1"))
        assert [each.result()[0] for each in asked] == [200] * 20
        assert starts(mux) == 1
        assert not any("severed" in line or "leaves" in line for line in mux.output)
