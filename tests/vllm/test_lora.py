"""A real vLLM on the CPU with LoRA adapters: one of its command, one that anvil-mux has it load."""

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests import vllms
from tests.vllms import GUARD, MARKS, PYTHON, REAL, Scene

pytestmark = MARKS

NAMES = ("m", "sql", "legal")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("lora")
    paths = {name: folder / name for name in ("sql", "legal")}
    for seed, path in enumerate(paths.values()):
        subprocess.run([PYTHON, REAL / "tiny_hf_lora.py", path, str(seed)], check=True, timeout=GUARD)
    flags = f"--enable-lora --max-loras 2 --lora-modules sql={paths['sql']}"
    about = vllms.service(
        vllms.write_model(folder), "m", "0", flags=flags, loras={"legal": str(paths["legal"])}
    )
    about["environment"] = {**about["environment"], "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with vllms.loaded(vllms.write_compose(folder, {"only": about})) as made:
        yield made


def ask(scene: Scene, model: str, route: str = "/v1/chat/completions") -> dict[str, object]:
    asked = {"model": model, "messages": [{"role": "user", "content": "who"}], "max_tokens": 24}
    status, _, text = scene.running.request("POST", route, {**asked, "temperature": 0}, GUARD)
    assert status == 200, text
    answer: dict[str, object] = json.loads(text)
    return answer


def test_each_adapter_answers_in_its_own_way_and_by_its_own_name(scene):
    answers = {name: ask(scene, name) for name in NAMES}
    assert {name: each["model"] for name, each in answers.items()} == {name: name for name in NAMES}
    assert len({json.dumps(each["choices"]) for each in answers.values()}) == 3
    assert {name: ask(scene, name)["choices"] for name in NAMES} == {
        name: each["choices"] for name, each in answers.items()
    }


def test_adapters_are_asked_for_in_anthropics_words_too(scene):
    answers = [json.dumps(ask(scene, name, "/v1/messages")["content"]) for name in NAMES]
    assert len(set(answers)) == 3


def test_adapters_are_listed_and_their_engine_is_loaded_once(scene):
    listed = {each["id"]: each.get("parent") for each in scene.running.get("/v1/models")["data"]}
    assert listed == {"m": None, "sql": "m", "legal": "m"}
    assert 'anvil_model_loads_total{model="m",result="ok"} 1.0' in scene.running.request("GET", "/metrics")[2]
