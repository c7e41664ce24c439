"""Containers of engines that a person handles with Docker's own commands while anvil-mux serves them."""

import json
from contextlib import suppress

import openai

from tests.docker.served import ENDLESS, FOREVER, client_of, served, stream
from tests.docker.test_deaths import docker
from tests.running import Running, seen


def state(mux: Running, model: str) -> str:
    return mux.get("/healthz")["models"][model]["state"]


def test_a_container_that_is_started_by_hand_beside_another_is_stopped(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=2)
    with served(stack) as mux:
        assert mux.chat("model-2")[0] == 200
        assert mux.chat("model-1")[0] == 200
        docker(stack, "start", stack.container("model-2"))
        mux.tells("model-2 was started by hand")
        mux.tells("stopping model-2: it cannot stay beside the others|stopping model-2: it did not answer")
        assert seen(stack.up, lambda names: names == {"model-1"}) == {"model-1"}
        assert mux.chat("model-1")[0] == 200


def test_a_container_that_is_started_by_hand_on_a_free_gpu_is_adopted(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=1)
    with served(stack) as mux:
        assert mux.chat("model-1")[0] == 200
        docker(stack, "stop", stack.container("model-1"))
        assert seen(lambda: state(mux, "model-1"), lambda found: found == "stopped")
        docker(stack, "start", stack.container("model-1"))
        assert seen(lambda: state(mux, "model-1"), lambda found: found == "ready") == "ready"
        assert mux.chat("model-1")[0] == 200
        assert sum(": loading (" in line for line in mux.output) == 1


def test_a_container_that_is_restarted_by_hand_is_never_beside_another(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=2)
    with served(stack) as mux:
        assert mux.chat("model-1")[0] == 200
        docker(stack, "restart", "-t", "1", stack.container("model-1"))
        mux.tells("model-1.* died: ")
        assert mux.chat("model-2")[0] == 200
        assert seen(stack.up, lambda names: names == {"model-2"}) == {"model-2"}


def test_a_container_that_is_restarted_in_mid_stream_is_never_beside_another(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, services={"model-1": ENDLESS}, models=2)
    with served(stack) as mux, client_of(mux) as client:
        for _ in range(3):
            assert seen(lambda: mux.chat("model-1")[0], lambda status: status == 200) == 200
            with suppress(openai.APIError), stream(client, "model-1", FOREVER) as answer:
                next(answer)
                docker(stack, "restart", "-t", "1", stack.container("model-1"))
                for _ in answer:
                    pass
            assert mux.chat("model-2")[0] == 200
            assert seen(stack.up, lambda names: names == {"model-2"}) == {"model-2"}


def test_container_paused_by_hand_refuses_with_the_remedy_until_unpaused(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, services={"model-1": ENDLESS}, models=1)
    name = stack.container("model-1")
    cause = f"model-1 was paused by hand: `docker unpause {name}` lets it answer."

    def why():
        return mux.get("/why?model=model-1")["sentence"]

    with served(stack) as mux, client_of(mux) as client, stream(client, "model-1", FOREVER) as answer:
        next(answer)
        docker(stack, "pause", name)
        assert cause in seen(why, lambda text: "by hand" in text)
        status, _, text = mux.chat("model-1")
        error = json.loads(text)["error"]
        assert (status, error["code"], error["message"]) == (503, "backend_paused", cause)
        docker(stack, "unpause", name)
        assert "by hand" not in seen(why, lambda text: "by hand" not in text)
        assert mux.chat("model-1")[0] == 200
        assert next(answer), "what ran goes on"


def test_a_container_that_loses_its_network_is_made_again(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=1)
    with served(stack) as mux:
        assert mux.chat("model-1")[0] == 200
        docker(stack, "network", "disconnect", f"{stack.project}_default", stack.container("model-1"))
        mux.tells("lost its network")
        assert mux.chat("model-1")[0] == 200
