"""A real vLLM that computes prompts, one that writes the answers, and NIXL between them, all on the CPU.

Opt-in: ANVIL_VLLM_PYTHON names a Python that has vLLM and nixl. A third vLLM, which does all by itself, says
what the answers have to be: the weights are random, and so large that an answer depends on the whole prompt.
"""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.vllms import GUARD, NIXL_MARKS, Scene, loaded, service, write_compose, write_model

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}

pytestmark = NIXL_MARKS


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("pair")
    model = write_model(folder)
    services = {"plain": service(model, "plain", "2")}
    for gpu, (kind, role) in enumerate(ROLES.items()):
        services[kind] = service(model, "m", str(gpu), role, infer_type=kind)
    with loaded(write_compose(folder, services)) as made:
        yield made


def ask_meanwhile(scene: Scene, words: str, meanwhile: Callable[[], None]) -> tuple[str, str]:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(scene.chat, "m", words)
        meanwhile()
        return asked.result(GUARD)


def test_the_answer_is_that_of_one_engine_and_the_decode_engine_computes_no_prompt(scene):
    before = scene.transferred("decode")
    answer, by = scene.chat("m", "so it goes ")
    assert answer == scene.chat("plain", "so it goes ")[0]
    assert answer != scene.chat("plain", "so it does ")[0]
    assert by.startswith("decode; ")
    assert by.endswith("; prefill by prefill")
    assert scene.transferred("decode") - before > 300


def test_a_prefill_engine_that_is_killed_at_work_leaves_the_request_to_the_other_and_comes_back(scene):
    def kill() -> None:
        scene.wait_for_leases(prefill=1, decode=1)
        scene.signal("prefill", signal.SIGKILL)

    scene.signal("prefill", signal.SIGSTOP)
    answer, by = ask_meanwhile(scene, "it comes and ", kill)
    assert answer == scene.chat("plain", "it comes and ")[0]
    assert "prefill by" not in by
    scene.chat("m", "it is back ")
    scene.wait_until_loaded()
    before = scene.transferred("decode")
    assert scene.chat("m", "and again ")[1].endswith("; prefill by prefill")
    assert scene.transferred("decode") > before


def test_a_prefill_engine_that_is_killed_before_it_is_read_costs_the_decode_engine_the_prompt(scene):
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
