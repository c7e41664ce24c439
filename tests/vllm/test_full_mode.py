"""Two real vLLMs of one model in the routing mode full: what they say of themselves decides, with its age.

Opt-in: ANVIL_VLLM_PYTHON names a Python that has vLLM. Somebody else asks one of them directly, past
anvil-mux, which can only know of that what the engine says.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import requests

from anvil_mux.routing.in_flight import EngineLoad
from anvil_mux.serve import polling
from tests.running import seen
from tests.vllms import GUARD, MARKS, Scene, loaded, service, write_compose, write_model

STALE = 5.0
AT_ONCE = 2
"""Requests that each engine runs; more wait in it."""
BALANCE = {
    "metrics": [
        "num_requests",
        "num_waiting_requests",
        "decode_batch_size",
        "kv_cache_usage_ratio_projected",
    ],
    "filters": ["schedulability", {"staleness": {"seconds": STALE}}, "failover"],
    "selector": {"metric": {"by": ["num_requests"]}},
}
OLDER = frozenset(["vllm:gpu_cache_usage_perc"])
"""Names of versions before this one."""

pytestmark = MARKS


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("full")
    model = write_model(folder)
    flags = f"--max-num-seqs {AT_ONCE}"
    services = {
        name: service(model, "m", gpu, flags=flags, kv_tokens=16_000)
        for name, gpu in (("a", "0"), ("b", "1"))
    }
    routing = {"mode": "full", "default": "balance", "policies": {"balance": BALANCE}}
    with loaded(write_compose(folder, services, routing=routing)) as made:
        yield made


def engine(scene: Scene, backend: str) -> dict[str, Any]:
    """What anvil-mux has of what the engine says of itself."""
    found: dict[str, Any] = scene.backends()[backend]["engine"]
    return found


def until(scene: Scene, backend: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    found = seen(lambda: engine(scene, backend), holds)
    assert holds(found), found
    return found


def explained(scene: Scene) -> dict[str, dict[str, Any]]:
    rows = scene.running.get("/why?model=m")["stages"]["neutral"]
    return {row["backend"]: row for row in rows}


@contextmanager
def asked_by_others(scene: Scene, backend: str, count: int) -> Iterator[None]:
    """So many long answers that the engine streams to somebody else."""
    asked = {"model": "m", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    url = f"{scene.about(backend)['url']}/v1/completions"
    with ExitStack() as stack:
        for number in range(count):
            body = {**asked, "prompt": f"somebody else's {number}"}
            stack.enter_context(requests.post(url, json=body, stream=True, timeout=GUARD))
        yield


def test_every_name_that_is_looked_for_is_on_vllms_page(scene):
    lines = scene.page("a").splitlines()
    for name in polling.NAMES:
        if name.startswith("vllm:") and name not in OLDER:
            assert f"# TYPE {name} gauge" in lines
            assert any(line.startswith(f'{name}{{engine="0",model_name="m"}} ') for line in lines)
    assert polling.load_of("\n".join(lines)) == EngineLoad(0, 0, 0.0)


def test_requests_go_where_an_engine_says_that_others_ask_less_of_it(scene):
    with asked_by_others(scene, "a", AT_ONCE):
        said = until(scene, "a", lambda found: found["running"] == AT_ONCE and found["kv_usage"])
        assert said["age_seconds"] < STALE
        assert 0.0 < said["kv_usage"] < 0.1
        shown = explained(scene)
        assert (shown["a"]["removed_by"], shown["b"]["chosen"]) == ("metric", True)
        assert shown["a"]["engine"]["running"] == AT_ONCE
        assert shown["a"]["metrics"]["num_requests"] == AT_ONCE
        for _ in range(3):
            assert scene.chat("m", "so it goes ")[1].startswith("b; balance: num_requests ")
        text = scene.running.request("GET", "/metrics")[2].splitlines()
        assert f'anvil_engine_requests{{backend="a",state="running"}} {AT_ONCE}.0' in text
    until(scene, "a", lambda found: found["running"] == 0)


def test_those_that_wait_in_an_engine_count_too(scene):
    with asked_by_others(scene, "b", AT_ONCE), ThreadPoolExecutor(1) as pool:
        until(scene, "b", lambda found: found["running"] == AT_ONCE)
        url = f"{scene.about('b')['url']}/v1/completions"
        body = {"model": "m", "prompt": "one more", "max_tokens": 1, "stream": True}
        late = pool.submit(requests.post, url, json=body, timeout=GUARD)
        said = until(scene, "b", lambda found: found["waiting"])
        assert (said["running"], said["waiting"]) == (AT_ONCE, 1)
        metrics = explained(scene)["b"]["metrics"]
        assert (metrics["num_requests"], metrics["num_waiting_requests"]) == (AT_ONCE + 1, 1)
        assert scene.chat("m", "it comes ")[1].startswith("a; ")
    assert late.result(GUARD).status_code == 200
    until(scene, "b", lambda found: (found["running"], found["waiting"]) == (0, 0))


def test_one_that_is_frozen_turns_stale_its_requests_move_and_it_comes_back(scene):
    with scene.frozen("a"), ThreadPoolExecutor(2) as pool:
        both = [pool.submit(scene.chat, "m", words) for words in ("it is ", "it was ")]
        told = sorted(each.result(GUARD)[1] for each in both)
        assert all(by.startswith("b; balance: ") for by in told)
        assert any(by.endswith("; not a (staleness)") for by in told)
        assert engine(scene, "a")["age_seconds"] > STALE
        assert explained(scene)["a"]["removed_by"] == "staleness"
        assert scene.chat("m", "and then ")[1].endswith("; not a (staleness)")
    until(scene, "a", lambda found: found["age_seconds"] < STALE)
    assert scene.chat("m", "it is back ")[1].startswith("a; ")
