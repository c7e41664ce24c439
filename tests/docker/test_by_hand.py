"""Containers of engines that a person handles with Docker's own commands while anvil-mux serves them."""

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


def test_why_tells_of_a_container_that_is_paused_by_hand(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=1)
    with served(stack) as mux:
        assert mux.chat("model-1")[0] == 200

        def why():
            return mux.get("/why?model=model-1")["sentence"]

        docker(stack, "pause", stack.container("model-1"))
        assert "paused by hand (model-1)" in seen(why, lambda text: "by hand" in text)
        docker(stack, "unpause", stack.container("model-1"))
        assert "by hand" not in seen(why, lambda text: "by hand" not in text)
        assert mux.chat("model-1")[0] == 200


def test_a_container_that_loses_its_network_is_made_again(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=1)
    with served(stack) as mux:
        assert mux.chat("model-1")[0] == 200
        docker(stack, "network", "disconnect", f"{stack.project}_default", stack.container("model-1"))
        mux.tells("lost its network")
        assert mux.chat("model-1")[0] == 200
