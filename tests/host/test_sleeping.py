"""A running anvil-mux whose models sleep: the demo's engines, real processes and sockets."""

import json
import os
import signal
from pathlib import Path

import requests
import yaml

from anvil_mux.state import state_folder
from tests.cli.demo import engine_of
from tests.running import Running, seen, serve, serving

ROOT = Path(__file__).resolve().parent.parent.parent
GUARD = 30.0


def compose(folder: Path, **models: tuple[str, str]) -> Path:
    """A file with models, each on a GPU and with a standby level."""
    flags = ["--load-seconds", "0.1", "--tokens-per-second", "2000", "--wake-seconds", "0"]
    made = {
        name: {
            "working_dir": str(ROOT),
            "command": ["bin/demo-engine", "--enable-sleep-mode", "--model", name, *flags],
            "environment": {"VLLM_SERVER_DEV_MODE": "1"},
            "x-anvil": {"engine": "vllm", "gpus": [gpu], "evict_to": [level, "stop"]},
        }
        for name, (gpu, level) in models.items()
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


def test_two_models_on_one_gpu_take_turns_by_sleeping_and_one_that_is_killed_is_started_anew(tmp_path):
    with serving(compose(tmp_path, a=("0", "sleep"), b=("0", "sleep")), state=tmp_path) as mux:
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


def test_a_kill_costs_neither_the_resident_nor_who_is_in_standby_a_cold_start(tmp_path):
    levels = {"s": "sleep", "d": "sleep-2", "f": "freeze"}
    models = {
        f"{name}{n}": (str(gpu), level) for gpu, (name, level) in enumerate(levels.items()) for n in "12"
    }
    file = compose(tmp_path, **models)
    first = serve(file, "--on-exit", "keep", state=tmp_path)
    try:
        for name in models:
            says(first, name)
    finally:
        first.stop(signal.SIGKILL)
    engines = {name: pid(tmp_path, name) for name in models}
    with serving(file, state=tmp_path) as mux:
        assert states(mux) == {name: "ready" if name[1] == "2" else "standby" for name in models}
        assert [name for name in models if process_state(engines[name]) == "T"] == ["f1"]
        for name in [*models, *models]:
            assert says(mux, name).startswith(f"This is {name}.")
        assert {name: pid(tmp_path, name) for name in models} == engines
    folder = state_folder("sleepers", {"XDG_STATE_HOME": str(tmp_path)})
    assert [name for name in levels if "/collective_rpc" in (folder / f"{name}1.log").read_text()] == ["d"]
    asked = (folder / "d1.log").read_text()
    assert "POST /sleep?level=2" in asked
    assert asked.index("tags=weights") < asked.index("/collective_rpc") < asked.index("tags=kv_cache")


def test_who_is_found_asleep_without_a_note_has_its_weights_read_again_and_who_is_found_frozen_goes_on(
    tmp_path,
):
    file = compose(tmp_path, a=("0", "sleep"), b=("1", "sleep"))
    first = serve(file, "--on-exit", "keep", state=tmp_path)
    try:
        says(first, "a")
        says(first, "b")
    finally:
        first.stop()
    folder = state_folder("sleepers", {"XDG_STATE_HOME": str(tmp_path)})
    url = json.loads((folder / "a.json").read_text())["url"]
    requests.post(f"{url}/sleep?level=2", timeout=GUARD).raise_for_status()
    engines = pid(tmp_path, "a"), pid(tmp_path, "b")
    os.kill(engine_of(engines[1]), signal.SIGSTOP)
    with serving(file, state=tmp_path) as mux:
        assert states(mux) == {"a": "standby", "b": "ready"}
        for name in "ab":
            assert says(mux, name).startswith(f"This is {name}.")
        assert (pid(tmp_path, "a"), pid(tmp_path, "b")) == engines
    assert "/collective_rpc" in (folder / "a.log").read_text()
