"""Two real vLLMs that take either stage, NIXL between them, and a profile that was measured on a third.

Opt-in: ANVIL_VLLM_PYTHON names a Python that has vLLM and nixl. The third does all by itself, and says what
the answers have to be. The policy is slo_adaptive with limits that a busy CPU keeps, in the mode full.
"""

import json
import math
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests

from anvil_mux.cli import main as cli
from anvil_mux.config.values import read_profile
from anvil_mux.lab.profiler import OUTPUT
from anvil_mux.routing import pipeline
from tests.running import seen
from tests.vllms import CONTEXT, GUARD, NIXL_MARKS, Scene, loaded, service, write_compose, write_model

BATCHES = (1, 2, 4)
OTHER = {"a": "b", "b": "a"}

pytestmark = NIXL_MARKS


def patient(written: Any) -> Any:
    """A policy whose limits of time are a thousand times as high."""
    if isinstance(written, list):
        return [patient(each) for each in written]
    if not isinstance(written, dict):
        return written
    kept = {key: patient(value) for key, value in written.items()}
    if "threshold" in kept and "decode_batch_size" not in kept.values():
        kept["threshold"] *= 1000
    return kept


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Loaded with another policy, measured, and then set to this one by a reload."""
    folder = tmp_path_factory.mktemp("either")
    model = write_model(folder)
    services = {"plain": service(model, "plain", "2")}
    for name, gpu in (("a", "0"), ("b", "1")):
        services[name] = service(model, "m", gpu, "kv_both", infer_type="either")
    with loaded(write_compose(folder, services)) as made:
        measure(made, folder / "profile.json")
        for name in OTHER:
            services[name]["x-anvil"] |= {"routing": "patient", "profile": "profile.json"}
        policies = {"patient": patient(pipeline.shipped()["slo_adaptive"])}
        write_compose(folder, services, routing={"mode": "full", "policies": policies})
        assert cli.main(["reload", "--url", made.url]) == 0
        yield made


def measure(scene: Scene, target: Path) -> None:
    words = ["profile", "plain", "--url", scene.url, "--prompts", "128,1024,8192", "--lengths", "128,8192"]
    batches = ",".join(map(str, BATCHES))
    assert cli.main([*words, "--batches", batches, "--repeat", "2", "-o", str(target)]) == 0


def decoder(by: str) -> str:
    """Who wrote an answer that the other computed the prompt of."""
    backend, _, rest = by.partition(";")
    assert rest.endswith(f"; prefill by {OTHER[backend]}"), by
    return backend


def test_a_profile_of_a_real_engine_reaches_to_the_end_of_its_context(scene):
    text = (scene.file.parent / "profile.json").read_text()
    written = json.loads(text)
    prompts = [row["tokens_num"] for row in written["ttft"]["results"]]
    assert len(prompts) == 3
    assert 0.95 * CONTEXT < prompts[-1] < CONTEXT
    points = [
        (row["batch_size"], row["tokens_per_request"] + OUTPUT // 2) for row in written["tpot"]["results"]
    ]
    assert [batch for batch, _ in points] == [batch for batch in BATCHES for _ in range(2)]
    assert all(0.95 * CONTEXT < tokens <= CONTEXT for _, tokens in points[1::2])
    made = read_profile(text)
    times = [made.next_token(batch, 1800) for batch in (*BATCHES, 5)]
    assert times == sorted(times)
    assert [math.isfinite(each) for each in times] == [True, True, True, False]
    assert 0 < made.first_token(128, 0, 0) <= made.first_token(1024, 0, 0) < made.first_token(8000, 0, 0)


def test_an_idle_pair_shares_a_request_and_answers_as_one_engine_does(scene):
    words = "so it goes "
    answer, by = scene.chat("m", words)
    writes = decoder(by)
    assert scene.transferred(writes) > 300
    assert answer == scene.chat("plain", words)[0]
    assert answer != scene.chat("plain", "so it does ")[0]


def test_answers_gather_at_one_and_prompts_go_to_the_other(scene):
    asked = {
        "model": "m",
        "prompt": "on and on " * 30,
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": True,
    }
    with closing(
        requests.post(f"{scene.url}/v1/completions", json=asked, stream=True, timeout=GUARD)
    ) as answer:
        next(answer.iter_content(None))
        writes = decoder(answer.headers["X-Anvil-Backend"])
        for words in ("it comes ", "and it goes "):
            before = scene.transferred(writes)
            text, by = scene.chat("m", words)
            assert decoder(by) == writes
            assert scene.transferred(writes) > before
            assert text == scene.chat("plain", words)[0]
    scene.wait_for_leases(a=0, b=0)


def test_what_cannot_be_asked_in_stages_is_done_by_one(scene):
    asked = {"model": "m", "input": "so it goes " * 30, "max_output_tokens": 8, "temperature": 0}
    status, headers, text = scene.running.request("POST", "/v1/responses", asked, GUARD)
    assert status == 200, text
    assert headers["x-anvil-backend"].startswith(("a; patient: ", "b; patient: "))
    assert "prefill by" not in headers["x-anvil-backend"]


def test_the_one_that_is_left_does_all_and_the_other_comes_back_to_share(scene):
    words = "it was there "
    gone = OTHER[decoder(scene.chat("m", "who writes ")[1])]
    scene.signal(gone, signal.SIGKILL)
    assert seen(lambda: scene.backends()[gone]["state"], lambda state: state != "ready") != "ready"
    answer, by = scene.chat("m", words)
    assert by.startswith(f"{OTHER[gone]}; patient: predicted_ttft ")
    assert "prefill by" not in by
    assert answer == scene.chat("plain", words)[0]
    scene.wait_until_loaded()
    answer, by = scene.chat("m", "and again ")
    decoder(by)
    assert answer == scene.chat("plain", "and again ")[0]
