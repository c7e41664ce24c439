"""What real llama-servers in containers hold of a GPU; its account is a stand-in (tests/host/trees)."""

import json
import os
from pathlib import Path

import pytest

from tests.docker.conftest import Stack
from tests.docker.served import ask, eventually
from tests.host.trees import Account, instead, plant
from tests.running import Running, serving

GIB = 1 << 30
ON_CARD = {"x-anvil": {"gpus": ["amd1"]}}


def pid_of(stack: Stack, model: str) -> int:
    container = stack.engine.request("GET", f"/containers/{stack.container(model)}/json")
    return int(container["State"]["Pid"])


def test_a_resident_stays_where_other_processes_leave_the_next_model_less_than_it_held(
    llamacpp_compose, tmp_path
):
    top = {"x-anvil": {"max_wait": 1, "policy": "eager"}}
    stack = llamacpp_compose(tmp_path, models=2, top=top, services={f"model-{n}": ON_CARD for n in (1, 2)})
    sys, _ = plant("radeon", tmp_path / "tree")
    account = Account(sys)
    environ = {**stack.engine.env, **instead(sys, tmp_path)}
    with serving(stack.file, state=tmp_path, environ=environ) as mux:

        def gpu() -> dict[str, object]:
            return mux.get("/healthz")["gpus"]["amd1"]

        assert ask(mux, "model-1") == ""
        engine = pid_of(stack, "model-1")
        account.hold({engine: 20 * GIB})
        eventually(lambda: gpu()["users"] == {"model-1": 20 * GIB})
        assert mux.request("POST", "/models/unload", {"model": "model-1"})[0] == 200
        eventually(lambda: not Path(f"/proc/{engine}").exists())
        account.hold({})
        eventually(lambda: measured(mux, "model-1") == "20GiB")
        assert ask(mux, "model-2") == ""
        account.hold({os.getpid(): 5 * GIB})
        eventually(lambda: len(gpu()["others"]) == 1)
        status, _, body = mux.chat("model-1")
        assert (status, json.loads(body)["error"]["code"]) == (503, "gpu_memory_short")
        assert stack.up() == {"model-2"}
        account.hold({})
        eventually(lambda: gpu()["others"] == [])
        assert ask(mux, "model-1") == ""
        assert stack.up() == {"model-1"}


def measured(mux: Running, model: str) -> object:
    """The size that it is suggested to declare for a model."""
    return mux.get("/healthz")["models"][model]["backends"][model]["vram_to_declare"]


@pytest.mark.parametrize("gpus", [["amd1"], ["/dev/dri/renderD128"], ["0000:0b:00.0"]])
def test_a_card_goes_by_its_id_its_file_and_its_address(llamacpp_compose, tmp_path, gpus):
    stack = llamacpp_compose(tmp_path, models=1, services={"model-1": {"x-anvil": {"gpus": gpus}}})
    sys, _ = plant("radeon", tmp_path / "tree")
    environ = {**stack.engine.env, **instead(sys, tmp_path)}
    with serving(stack.file, state=tmp_path, environ=environ) as mux:
        assert ask(mux, "model-1") == ""
        assert mux.get("/healthz")["gpus"]["amd1"]["residents"] == ["model-1"]
