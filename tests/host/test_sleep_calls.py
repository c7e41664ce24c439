"""Engines told to sleep and to wake, over real HTTP, each with its own manners."""

import errno
import socket
from collections.abc import Callable, Iterator

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError
from anvil_mux.host import engines
from anvil_mux.host.engines import ENGINES, answers
from tests.sleepy_engine import CONTEXT, GIB, Ledger, SleepyEngine

PID = 100_000_000
SLEEPERS = [name for name, each in ENGINES.items() if each.sleeps]
Make = Callable[..., SleepyEngine]


def backend(kind: str) -> Backend:
    return Backend("a", "m", ("0",), engine=kind, load_timeout=30.0)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[SleepyEngine] = []

    def engine(kind: str, *faults: str) -> SleepyEngine:
        made.append(SleepyEngine(kind, "m", Ledger(), PID, ("0",), set(faults)))
        return made[-1]

    yield engine
    for each in made:
        each.end("closed")


def awake(make: Make, kind: str, *faults: str) -> SleepyEngine:
    engine = make(kind, *faults)
    if engine.asleep:
        engines.wake(backend(kind), engine.url, 1)
        engine.asked.clear()
    return engine


@pytest.mark.parametrize("kind", SLEEPERS)
def test_a_sleeping_engine_holds_its_context_alone_says_so_unless_it_is_sglang_and_takes_all_back(make, kind):
    engine, tells = awake(make, kind), kind != "sglang"
    assert engine._ledger.used() == 18 * GIB + CONTEXT
    assert engines.is_asleep(backend(kind), engine.url) is (False if tells else None)
    engines.sleep(backend(kind), engine.url, 1)
    assert engine._ledger.used() == CONTEXT
    assert engines.is_asleep(backend(kind), engine.url) is (True if tells else None)
    engines.wake(backend(kind), engine.url, 1)
    assert engine._ledger.used() == 18 * GIB + CONTEXT
    assert engine.how is None
    engines.probe(backend(kind), engine.url)


def test_an_address_that_went_to_another_model_is_not_put_to_sleep(make):
    engine = awake(make, "vllm")
    engine.model = "other"
    with pytest.raises(BackendError, match="answers for model other, not m"):
        engines.sleep(backend("vllm"), engine.url, 1)
    assert not engine.asleep


# vLLM


def test_vllm_wakes_from_level_two_by_weights_then_reload_then_cache(make):
    engine = make("vllm")
    engines.sleep(backend("vllm"), engine.url, 2)
    assert "POST /sleep?level=2&mode=abort" in engine.asked
    assert engine.garbage
    engine.asked.clear()
    engines.wake(backend("vllm"), engine.url, 2)
    assert [each for each in engine.asked if each.startswith("POST")] == [
        "POST /wake_up?tags=weights",
        "POST /collective_rpc",
        "POST /wake_up?tags=kv_cache",
        "POST /reset_prefix_cache",
    ]
    assert not engine.garbage


def test_vllm_that_is_awake_is_not_woken(make):
    engine = make("vllm")
    with pytest.raises(BackendError, match="is awake, nobody knows since when"):
        engines.wake(backend("vllm"), engine.url, 1)
    assert engine.how is None


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("wake answers 500", r"POST /wake_up answers 500: .*out of memory"),
        ("wake is partial", "is only partly awake"),
        ("wake dies", "POST /wake_up: the connection was closed"),
    ],
)
def test_a_wake_that_fails_says_how(make, fault, says):
    engine = make("vllm", fault)
    engines.sleep(backend("vllm"), engine.url, 1)
    with pytest.raises(BackendError, match=says):
        engines.wake(backend("vllm"), engine.url, 1)


def test_a_status_that_is_nonsense_is_no_status(make):
    engine = make("vllm", "status is nonsense")
    with pytest.raises(
        BackendError, match=r"GET /is_sleeping answers nonsense: \{'is_sleeping': 'perhaps'\}"
    ):
        engines.is_asleep(backend("vllm"), engine.url)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("vllm", r"POST /sleep.* answers 404"),
        ("sglang", "does not say whether it is idle"),
        ("llamacpp", "POST /models/unload answers 404"),  # it has a model of its own
    ],
)
def test_an_engine_without_the_routes_cannot_sleep(make, kind, why):
    engine = make(kind, "has no sleep routes")
    assert engines.is_asleep(backend(kind), engine.url) is None
    with pytest.raises(BackendError, match=why):
        engines.sleep(backend(kind), engine.url, 1)


@pytest.mark.parametrize(("call", "level"), [("sleep", (1,)), ("wake", (1,)), ("probe", ())])
def test_an_engine_that_hangs_is_given_up(make, call, level, monkeypatch):
    engine = make("vllm", "sleep hangs", "wake hangs", "answers nothing")
    if call == "wake":
        engine.asleep = {"weights", "kv_cache"}
    monkeypatch.setattr(engines, f"{call.upper()}_TIMEOUT", 0.5)
    with pytest.raises(BackendError, match="was not answered in time"):
        getattr(engines, call)(backend("vllm"), engine.url, *level)


def test_an_engine_that_is_gone_is_said_to_be(make):
    engine = make("vllm")
    engine.end("killed")
    with pytest.raises(BackendError, match="nothing listens there"):
        engines.wake(backend("vllm"), engine.url, 1)


@pytest.mark.parametrize(
    ("kind", "faults", "model", "why"),
    [
        ("vllm", ["answers an error"], "m", r"answers 200: .*illegal memory access"),
        ("vllm", [], "other", r"answers 404: .*no such model"),
        ("sglang", ["hears speech"], "m", "answers 404"),  # and it cannot say whether it sleeps
    ],
)
def test_a_refusal_is_no_token_whatever_its_status(make, kind, faults, model, why):
    engine = make(kind, *faults)
    engine.model = model
    with pytest.raises(BackendError, match=why):
        engines.probe(backend(kind), engine.url)


def test_who_has_no_route_for_a_token_is_believed_when_it_is_well(make):
    engine = make("vllm", "hears speech")
    engines.sleep(backend("vllm"), engine.url, 1)
    engines.wake(backend("vllm"), engine.url, 1)
    engines.probe(backend("vllm"), engine.url)
    assert engine.asked[-1] == "GET /health"


def test_an_engine_that_cannot_be_asked_for_want_of_files_is_not_one_that_refuses(make, monkeypatch):
    engine = make("vllm")

    def none_left(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    assert answers(backend("vllm"), "http://127.0.0.1:1", 5.0) is False
    monkeypatch.setattr(socket, "socket", none_left)
    with pytest.raises(OSError, match="cannot be asked now"):
        answers(backend("vllm"), engine.url, 5.0)


# SGLang


def test_sglang_generates_no_token_when_it_is_put_to_sleep_or_asked_whether_it_is_there(make):
    engine = make("sglang")
    engines.sleep(backend("sglang"), engine.url, 1)
    assert answers(backend("sglang"), engine.url, 5.0)
    assert "GET /health" not in engine.asked


def test_sglang_is_idle_before_it_releases(make):
    engine = make("sglang")
    engine.busy = 2
    engines.sleep(backend("sglang"), engine.url, 1)
    posts = [each for each in engine.asked if each.startswith("POST")]
    assert posts == ["POST /abort_request", "POST /release_memory_occupation"]
    assert engine.how is None


def test_sglang_that_does_not_become_idle_is_not_told_to_release(make, monkeypatch):
    engine = make("sglang", "ignores abort")
    engine.busy = 1
    monkeypatch.setattr(engines, "IDLE_TIMEOUT", 0.2)
    with pytest.raises(BackendError, match="still computes, so it must not be put to sleep"):
        engines.sleep(backend("sglang"), engine.url, 1)
    assert "POST /release_memory_occupation" not in engine.asked


# Ollama and llama.cpp


def test_ollama_is_told_which_model_to_let_go(make):
    engine = awake(make, "ollama")
    engines.sleep(backend("ollama"), engine.url, 1)
    assert engine.asked == ["POST /api/generate", "GET /api/ps"]


def test_a_model_of_ollama_that_makes_embeddings_is_loaded_by_an_empty_one(make):
    engine = awake(make, "ollama", "makes embeddings")
    engines.sleep(backend("ollama"), engine.url, 1)
    engines.wake(backend("ollama"), engine.url, 1)
    assert not engine.asleep
    engines.probe(backend("ollama"), engine.url)


def test_a_llama_server_that_unloaded_by_itself_is_asleep_already(make):
    engine = make("llamacpp")
    engines.sleep(backend("llamacpp"), engine.url, 1)
    assert "POST /models/unload" not in engine.asked
