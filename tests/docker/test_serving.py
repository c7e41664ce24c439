"""anvil-mux in front of real llama-server containers: swaps, streams, and all that may go wrong."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.docker.conftest import Engine, Stack
from tests.docker.served import (
    BUSYBOX,
    ENDLESS,
    FOREVER,
    PATIENCE,
    Answer,
    ask,
    ask_with,
    client_of,
    count,
    docker,
    error_of,
    eventually,
    is_idle,
    leases,
    run_of,
    served,
    state_of,
    status_of,
    stream,
)
from tests.running import Running

CLIENTS, TURNS = 8, 8
"""How many alternate between the models, and how often each asks."""
QUICK = 5.0
"""A limit for what must not wait for Docker, whose own time-outs are longer."""

MakeStack = Callable[..., Stack]
GOOD, BAD = "model-1", "bad"
FROZEN = {"x-anvil": {"gpus": ["0"], "evict_to": ["freeze"]}}


@pytest.fixture
def with_bad(llamacpp_compose: MakeStack, tmp_path: Path) -> Callable[..., Stack]:
    """A good engine, and beside it on the same GPU a service that is none."""

    def make(load_timeout: str = "10m", **special: Any) -> Stack:
        anvil = {"gpus": ["0"], "engine": "llamacpp", "load_timeout": load_timeout}
        bad = {**BUSYBOX, "x-anvil": anvil, **special}
        return llamacpp_compose(tmp_path, models=1, services={BAD: bad})

    return make


@pytest.fixture
def endless(llamacpp_compose: MakeStack, tmp_path: Path) -> Stack:
    """One engine, whose answers end only where they are told to."""
    return llamacpp_compose(tmp_path, models=1, services={GOOD: ENDLESS})


# Serving


def test_three_engines_share_a_gpu_under_eight_clients_that_alternate_between_them(
    llamacpp_compose, tmp_path
):
    stack = llamacpp_compose(tmp_path, models=3)
    with served(stack) as mux, stack.watched() as seen:
        flaws = alternate(mux, stack.models)
        eventually(lambda: is_idle(mux))
        swaps = count(mux, "anvil_swaps", result="ok")
        severed = count(mux, "anvil_severed_requests")
    print(f"{len(flaws)} streams, {swaps} swaps, {seen.samples} samples")
    assert [flaw for flaw in flaws if flaw] == []
    assert severed == 0
    assert (seen.most, seen.missed) == (1, 0), seen.crowded
    assert seen.names == {stack.container(model) for model in stack.models}
    assert len(flaws) >= swaps > len(stack.models)


def alternate(mux: Running, models: tuple[str, ...]) -> list[str]:
    """What was wrong with each stream of all clients."""

    def one(number: int) -> list[str]:
        with client_of(mux) as client:
            turns = range(number, number + TURNS)
            return [ask_with(client, models[turn % len(models)], 20 + 37 * turn % 400) for turn in turns]

    with ThreadPoolExecutor(CLIENTS) as pool:
        return [flaw for flaws in pool.map(one, range(CLIENTS)) for flaw in flaws]


def test_a_stream_that_outlasts_the_drain_ends_with_an_error_and_the_next_model_is_served(
    llamacpp_compose, tmp_path
):
    stack = llamacpp_compose(tmp_path, models=2, services={GOOD: ENDLESS})
    with served(stack, "--policy", "eager", "--drain-timeout", "1") as mux, client_of(mux) as client:
        with ThreadPoolExecutor(1) as pool, stream(client, GOOD, FOREVER) as answer:
            other = pool.submit(ask, mux, "model-2")
            with pytest.raises(openai.APIError, match="was evicted for model-2"):
                list(answer)
            assert other.result(PATIENCE) == ""
        eventually(lambda: is_idle(mux))
        assert count(mux, "anvil_severed_requests", model=GOOD) == 1


def test_a_client_that_leaves_in_mid_stream_frees_its_lease(endless):
    with served(endless) as mux, client_of(mux) as client:
        with stream(client, GOOD, FOREVER) as answer:
            next(answer)
            assert leases(mux, GOOD) == 1
        eventually(lambda: is_idle(mux))


# An engine that dies


def test_an_engine_killed_in_mid_stream_is_an_error_and_the_next_request_loads_it_again(endless):
    with served(endless) as mux, client_of(mux) as client:
        assert ask(mux, GOOD) == ""  # so that its end is not one right after its load
        with stream(client, GOOD, FOREVER) as answer:
            next(answer)
            docker(endless, "kill", endless.container(GOOD))
            with pytest.raises(
                openai.APIError, match=r"broke off its answer: model-\d was killed \(code 137\)"
            ):
                list(answer)
        eventually(lambda: is_idle(mux))
        assert ask(mux, GOOD) == ""
        assert count(mux, "anvil_model_loads", result="ok") == 2


def test_a_request_whose_engine_was_killed_before_a_byte_came_is_answered_by_its_next_run(endless):
    with served(endless) as mux, ThreadPoolExecutor(1) as pool:
        assert ask(mux, GOOD) == ""
        eventually(lambda: is_idle(mux))  # so the lease below is the next one's
        first = run_of(endless, GOOD)
        asked = pool.submit(mux.chat, GOOD, max_tokens=4_000, ignore_eos=True)
        eventually(lambda: leases(mux, GOOD) == 1)
        docker(endless, "kill", endless.container(GOOD))
        status, _, text = asked.result(PATIENCE)
        assert status == 200, text
        assert run_of(endless, GOOD) != first


def test_an_idle_engine_that_was_killed_is_empty_soon_and_loaded_at_the_next_request(
    llamacpp_compose, tmp_path
):
    stack = llamacpp_compose(tmp_path, models=2)
    with served(stack) as mux:
        assert ask(mux, GOOD) == ""
        docker(stack, "kill", stack.container(GOOD))
        eventually(lambda: mux.get("/healthz")["models"][GOOD]["state"] == "stopped")
        assert "killed" in mux.get("/healthz")["models"][GOOD]["last_error"]
        assert ask(mux, GOOD) == ""


def test_an_engine_killed_while_it_is_standby_is_empty_soon_and_loaded_at_the_next_request(
    llamacpp_compose, tmp_path
):
    stack = llamacpp_compose(tmp_path, models=2, services={GOOD: FROZEN, "model-2": FROZEN})
    with served(stack) as mux:
        for model in stack.models:
            assert ask(mux, model) == ""
        first, second = (run_of(stack, model) for model in stack.models)
        assert (state_of(mux, GOOD), status_of(stack, GOOD)) == ("standby", "paused")
        docker(stack, "kill", stack.container(GOOD))
        eventually(lambda: state_of(mux, GOOD) == "stopped")
        for model in stack.models:
            assert ask(mux, model) == ""
        assert run_of(stack, GOOD) != first
        assert run_of(stack, "model-2") == second
        assert (status_of(stack, GOOD), status_of(stack, "model-2")) == ("paused", "running")


# Loads that fail


def test_an_engine_that_never_gets_healthy_is_refused_at_once_afterwards_and_the_good_one_goes_on(with_bad):
    stack = with_bad("2s", command=["sh", "-c", "echo waiting for the weights; exec sleep 1000"])
    with served(stack) as mux, ThreadPoolExecutor(2) as pool, stack.watched() as seen:
        assert ask(mux, GOOD) == ""
        failing = pool.submit(mux.chat, BAD)
        eventually(lambda: stack.up() == {BAD})
        waiting = pool.submit(ask, mux, GOOD)
        first, second = failing.result(PATIENCE), mux.chat(BAD)
        assert waiting.result(PATIENCE) == ""
        for status, headers, text in (first, second):
            assert (status, error_of(text)["code"]) == (503, "load_failed")
            assert "was not ready within its load_timeout of 2 s" in error_of(text)["message"]
            assert "waiting for the weights" in error_of(text)["message"]
            assert 1 <= int(headers["retry-after"]) <= 5
        assert "is not tried again for" in error_of(second[2])["message"]
        assert count(mux, "anvil_model_loads", model=BAD) == 1
        assert ask(mux, GOOD) == ""
        assert stack.up() == {GOOD}
    assert seen.most == 1, seen.crowded


@pytest.mark.parametrize(
    ("command", "is_killed", "said"),
    [
        (["sh", "-c", "echo out of memory on GPU 0 >&2; exit 3"], False, "exited with code 3"),
        (["sh", "-c", "echo out of memory on GPU 0 >&2; exec sleep 1000"], True, "was killed"),
    ],
)
def test_an_engine_that_ends_as_it_loads_fails_long_before_its_load_timeout_with_its_last_lines(
    with_bad, command, is_killed, said
):
    stack = with_bad("10m", command=command)
    with served(stack) as mux, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(mux.chat, BAD)
        if is_killed:
            eventually(lambda: stack.up() == {BAD})
            docker(stack, "kill", stack.container(BAD))
        status, _, text = asked.result(PATIENCE)
        assert (status, error_of(text)["code"]) == (503, "load_failed")
        assert said in error_of(text)["message"]
        assert is_killed or "out of memory on GPU 0" in error_of(text)["message"]
        assert stack.up() == set()
        assert ask(mux, GOOD) == ""


def test_an_image_that_is_missing_is_named_with_its_remedy_and_puts_nobody_out_twice(with_bad):
    image = "anvil-mux-test/none:1"
    stack = with_bad(image=image)
    with served(stack) as mux:
        assert ask(mux, GOOD) == ""
        for _ in range(3):
            status, _headers, text = mux.chat(BAD)
            assert (status, error_of(text)["code"]) == (503, "load_failed")
            assert f"image {image} is not present: docker pull {image}" in error_of(text)["message"]
        assert ask(mux, GOOD) == ""
        assert count(mux, "anvil_evictions", model=GOOD) <= 1


# dockerd


def test_while_dockerd_is_away_it_says_so_and_when_it_is_back_requests_work_again(
    llamacpp_compose, tmp_path, own_engine
):
    stack = llamacpp_compose(tmp_path, models=2, engine=own_engine)
    with served(stack) as mux:
        assert ask(mux, "model-1") == ""
        own_engine.stop()
        assert_docker_is_missed(mux.chat("model-2"))
        assert mux.chat("model-1")[0] in (502, 503), "its container has ended with dockerd"
        assert mux.request("GET", "/v1/models", timeout=QUICK)[0] == 200
        eventually(lambda: mux.request("GET", "/readyz", timeout=QUICK)[0] == 503)
        status, _, text = mux.request("GET", "/healthz", timeout=QUICK)
        assert status == 503
        assert "Cannot connect to the Docker daemon" in json.loads(text)["problems"]["compose"]
        own_engine.start()
        eventually(lambda: mux.chat("model-2", max_tokens=1)[0] == 200)
        eventually(lambda: mux.request("GET", "/readyz", timeout=QUICK)[0] == 200)
        for model in stack.models:
            assert ask(mux, model) == ""
            assert stack.up() == {model}


def test_socket_that_is_away_is_reported_and_the_resident_stays(llamacpp_compose, tmp_path, engine):
    link = tmp_path / "docker.sock"
    link.symlink_to(engine.host.removeprefix("unix://"))
    stack = llamacpp_compose(tmp_path, models=2, engine=Engine(f"unix://{link}"))
    with served(stack) as mux:
        assert ask(mux, "model-1") == ""
        aside = link.rename(tmp_path / "aside")
        assert_docker_is_missed(mux.chat("model-2"))  # mostly before anybody has noticed
        assert ask(mux, "model-1") == ""
        eventually(lambda: mux.request("GET", "/healthz", timeout=QUICK)[0] == 503)
        assert_docker_is_missed(mux.chat("model-2"))
        assert ask(mux, "model-1") == ""
        aside.rename(link)
        eventually(lambda: mux.request("GET", "/healthz", timeout=QUICK)[0] == 200)
        assert ask(mux, "model-2") == ""


@pytest.mark.parametrize("moment", ["draining", "loading"])
def test_docker_is_restarted_in_the_middle_of_a_swap_and_all_goes_on(
    llamacpp_compose, tmp_path, own_engine, moment
):
    server = "llama-server -m /m/tiny.gguf --alias model-2 --host 0.0.0.0 --port 8080 -c 1024"
    slow = {"command": ["sh", "-c", f"sleep 3; exec {server}"]}
    stack = llamacpp_compose(tmp_path, services={GOOD: ENDLESS, "model-2": slow}, models=2, engine=own_engine)
    with served(stack, "--policy", "eager") as mux, client_of(mux) as client, ThreadPoolExecutor(1) as pool:
        assert ask(mux, GOOD) == ""  # an engine that has answered once may end without a cool-down
        with stream(client, GOOD, FOREVER) as answer:
            next(answer)
            asked = pool.submit(mux.chat, "model-2", max_tokens=1)
            eventually(lambda: state_of(mux, GOOD) == "draining")
            if moment == "draining":
                own_engine.stop()
        if moment == "loading":
            eventually(lambda: state_of(mux, "model-2") == "loading")
            own_engine.stop()
        own_engine.start()
        status, _, text = asked.result(PATIENCE)
        assert status == 200 or error_of(text)["code"] in ("load_failed", "stuck", "host_unavailable"), text
        eventually(lambda: mux.chat("model-2", max_tokens=1)[0] == 200)
        for model in stack.models:
            assert ask(mux, model) == ""
            assert stack.up() == {model}


def assert_docker_is_missed(answer: Answer) -> None:
    status, headers, text = answer
    assert status == 503
    assert "Cannot connect to the Docker daemon" in error_of(text)["message"]
    assert "Start dockerd" in error_of(text)["message"]
    assert int(headers["retry-after"]) <= 60
