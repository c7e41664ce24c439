"""Who stays and who comes back, with real llama-server containers."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.docker.served import (
    ENDLESS,
    FOREVER,
    PATIENCE,
    ask,
    client_of,
    count,
    docker,
    error_of,
    eventually,
    is_idle,
    served,
    state_of,
    stream,
)

FILM, CHAT = "model-1", "model-2"
LONG = 6_000
"""Tokens of an answer that takes a second and more."""


def of(**settings: object) -> dict[str, object]:
    return {**ENDLESS, "x-anvil": {"gpus": ["0"], **settings}}


def test_a_long_answer_ends_before_its_model_makes_room_and_a_chat_is_severed(llamacpp_compose, tmp_path):
    top = {"x-anvil": {"drain_timeout": 1}}
    services = {FILM: of(drain_timeout="none"), CHAT: of()}
    stack = llamacpp_compose(tmp_path, models=2, top=top, services=services)
    with served(stack, "--policy", "eager") as mux, ThreadPoolExecutor(1) as pool:
        with client_of(mux) as client, stream(client, FILM, LONG) as answer:
            next(answer)
            docker(stack, "pause", stack.container(FILM))
            asked = pool.submit(ask, mux, CHAT)
            eventually(lambda: state_of(mux, FILM) == "draining")
            eventually(
                lambda: mux.get("/healthz")["models"][FILM]["draining"]["answers"][0]["run_seconds"] > 3
            )
            [waited] = mux.get(f"/why?model={CHAT}")["waits_for"]
            assert (waited["model"], waited["request"]) == (FILM, answer.response.headers["x-request-id"])
            assert mux.get("/healthz")["models"][FILM]["draining"]["seconds_left"] is None
            docker(stack, "unpause", stack.container(FILM))
            chunks = list(answer)
            assert [each.usage.completion_tokens for each in chunks if each.usage] == [LONG]
        assert asked.result(PATIENCE) == ""
        assert count(mux, "anvil_severed_requests") == 0
        with client_of(mux) as client, stream(client, CHAT, FOREVER) as answer:
            next(answer)
            asked = pool.submit(ask, mux, FILM)
            with pytest.raises(openai.APIError, match=f"{CHAT} was evicted for {FILM}"):
                list(answer)
        assert asked.result(PATIENCE) == ""
        assert count(mux, "anvil_severed_requests") == 1


def test_a_home_model_comes_back(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=2, services={FILM: of(home=True, home_after=5)})
    with served(stack) as mux:
        eventually(lambda: state_of(mux, FILM) == "ready")
        assert ask(mux, CHAT) == ""
        eventually(lambda: mux.get("/healthz")["models"][FILM]["home_seconds"] is not None)
        eventually(lambda: state_of(mux, FILM) == "ready")
        eventually(lambda: is_idle(mux))
        assert stack.up() == {FILM}
        assert count(mux, "anvil_model_loads", model=FILM, result="ok") == 2


def test_a_name_for_several_is_served_by_the_one_that_is_there(llamacpp_compose, tmp_path):
    top = {"x-anvil": {"any_of": {"chat": [FILM, CHAT]}}}
    stack = llamacpp_compose(tmp_path, models=2, top=top)
    with served(stack) as mux:
        assert ask(mux, CHAT) == ""
        status, headers, text = mux.chat("chat", max_tokens=2)
        assert (status, headers["x-anvil-model"]) == (200, CHAT), text
        assert json.loads(text)["model"] == CHAT
        body = {"model": FILM, "messages": [{"role": "user", "content": "hello"}]}
        never = {"X-Anvil-Swap": "never"}
        status, headers, text = mux.request("POST", "/v1/chat/completions", body, headers=never)
        assert (status, error_of(text)["code"], headers["retry-after"]) == (503, "nothing_resident", "30")
        assert f"Resident: {CHAT}." in error_of(text)["message"]
        assert stack.up() == {CHAT}
