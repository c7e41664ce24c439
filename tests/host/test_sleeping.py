"""A running anvil-mux whose models sleep: the demo's engines, real processes and sockets."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from anvil_mux.state import state_folder
from tests.running import Running, seen, serve, serving

ROOT = Path(__file__).resolve().parent.parent.parent
GUARD = 30.0


def compose(folder: Path, **services: dict[str, Any]) -> Path:
    """A file with models on GPU 0 that rest by sleeping; ``services`` changes what stands there."""
    made = {}
    for name in ("a", "b"):
        flags = [
            "--model",
            name,
            "--load-seconds",
            "0.1",
            "--tokens-per-second",
            "2000",
            "--wake-seconds",
            "0",
        ]
        made[name] = {
            "working_dir": str(ROOT),
            "command": ["bin/demo-engine", "--enable-sleep-mode", *flags],
            "environment": {"VLLM_SERVER_DEV_MODE": "1"},
            "x-anvil": {"engine": "vllm", "gpus": ["0"], "evict_to": ["sleep", "stop"]},
            **services.get(name, {}),
        }
    top = {"runtime": "process", "project": "sleepers", "policy": "eager"}
    file = folder / "compose.yaml"
    file.write_text(yaml.safe_dump({"x-anvil": top, "services": made}))
    return file


def says(mux: Running, model: str) -> str:
    status, _, text = mux.chat(model)
    assert status == 200, text
    return str(json.loads(text)["choices"][0]["message"]["content"])


def states(mux: Running) -> dict[str, str]:
    return {name: about["state"] for name, about in mux.get("/healthz")["models"].items()}


def pid(folder: Path, name: str) -> int:
    record = state_folder("sleepers", {"XDG_STATE_HOME": str(folder)}) / f"{name}.json"
    return int(json.loads(record.read_text())["pid"])


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_two_models_on_one_gpu_take_turns_by_sleeping_and_one_that_is_killed_is_started_anew(
    tmp_path: Path,
) -> None:
    with serving(compose(tmp_path), state=tmp_path) as mux:
        assert says(mux, "a").startswith("This is a.")
        assert says(mux, "b").startswith("This is b.")
        engines = pid(tmp_path, "a"), pid(tmp_path, "b")
        for name, other in ["ab", "ba"] * 3:
            assert says(mux, name).startswith(f"This is {name}.")
            assert states(mux) == {name: "ready", other: "standby"}
        assert (pid(tmp_path, "a"), pid(tmp_path, "b")) == engines
        os.kill(pid(tmp_path, "a"), signal.SIGKILL)
        assert seen(lambda: states(mux)["a"], lambda state: state != "standby") == "stopped"
        assert says(mux, "a").startswith("This is a.")
    loads = [line for line in mux.output if ": loading (" in line]
    assert len(loads) == 9, mux.output
    assert any("standby (sleep)" in line for line in mux.output), mux.output


@pytest.mark.parametrize(
    ("level", "end"), [("sleep", signal.SIGKILL), ("sleep-2", signal.SIGTERM), ("freeze", signal.SIGKILL)]
)
def test_a_restart_costs_neither_the_resident_nor_who_is_in_standby_a_cold_start(
    tmp_path: Path, level: str, end: signal.Signals
) -> None:
    about = {"x-anvil": {"engine": "vllm", "gpus": ["0"], "evict_to": [level]}}
    file = compose(tmp_path, a=about, b=about)
    first = serve(file, "--on-exit", "keep", state=tmp_path)
    try:
        says(first, "a")
        says(first, "b")
    finally:
        first.stop(end)
    engines = pid(tmp_path, "a"), pid(tmp_path, "b")
    with serving(file, state=tmp_path) as mux:
        assert states(mux) == {"a": "standby", "b": "ready"}
        assert (process_state(engines[0]) == "T") is (level == "freeze")
        for name in "abab":
            assert says(mux, name).startswith(f"This is {name}.")
        assert (pid(tmp_path, "a"), pid(tmp_path, "b")) == engines
    asked = (state_folder("sleepers", {"XDG_STATE_HOME": str(tmp_path)}) / "a.log").read_text()
    if level == "sleep-2":
        assert "POST /sleep?level=2" in asked
        assert asked.index("tags=weights") < asked.index("/collective_rpc") < asked.index("tags=kv_cache")
    else:
        assert "/collective_rpc" not in asked


def test_of_a_sleeper_of_whom_nothing_is_noted_the_weights_are_read_again(tmp_path: Path) -> None:
    file = compose(tmp_path)
    first = serve(file, "--on-exit", "keep", state=tmp_path)
    try:
        says(first, "a")
    finally:
        first.stop()
    folder = state_folder("sleepers", {"XDG_STATE_HOME": str(tmp_path)})
    url = json.loads((folder / "a.json").read_text())["url"]
    requests.post(f"{url}/sleep?level=2", timeout=GUARD).raise_for_status()
    with serving(file, state=tmp_path) as mux:
        assert states(mux) == {"a": "standby", "b": "stopped"}
        assert says(mux, "a").startswith("This is a.")
    assert "/collective_rpc" in (folder / "a.log").read_text()


def test_a_frozen_engine_that_does_not_rest_so_is_let_go_on_and_kept(tmp_path: Path) -> None:
    file = compose(tmp_path)
    first = serve(file, "--on-exit", "keep", state=tmp_path)
    try:
        says(first, "a")
    finally:
        first.stop()
    kept = pid(tmp_path, "a")
    os.kill(kept, signal.SIGSTOP)
    with serving(file, state=tmp_path) as mux:
        assert states(mux) == {"a": "ready", "b": "stopped"}
        assert says(mux, "a").startswith("This is a.")
        assert pid(tmp_path, "a") == kept
