"""What people who share a machine have, on real llama-servers: a pause, usage by key, requests to look at."""

import json

import openai
import pytest

from anvil_mux.cli.main import main
from tests.docker.served import ENDLESS, FOREVER, ask, client_of, eventually, leases, served, state_of, stream
from tests.running import seen, serving

FROZEN = {"x-anvil": {"gpus": ["0"], "evict_to": ["freeze"]}}


def test_a_pause_stops_every_container_frozen_ones_too_until_it_is_resumed(
    llamacpp_compose, tmp_path, monkeypatch
):
    services = {"model-1": FROZEN, "model-2": {**ENDLESS, "x-anvil": {"gpus": ["0"], "pin": True}}}
    stack = llamacpp_compose(tmp_path, models=2, services=services, top={"x-anvil": {"drain_timeout": 1}})
    with served(stack) as mux:
        monkeypatch.setenv("ANVIL_URL", f"http://127.0.0.1:{mux.port}")
        assert ask(mux, "model-1") == ""
        assert ask(mux, "model-2") == ""
        assert (state_of(mux, "model-1"), state_of(mux, "model-2")) == ("standby", "ready")
        assert stack.up() == {"model-1", "model-2"}
        with client_of(mux) as client:
            answer = iter(stream(client, "model-2", FOREVER))
            next(answer)
            eventually(lambda: leases(mux, "model-2") == 1)
            assert main(["pause"]) == 0
            with pytest.raises(openai.APIError, match="anvil-mux was paused before this request ended"):
                list(answer)
        eventually(lambda: stack.up() == set())
        assert mux.chat("model-1")[0] == 503
    with served(stack) as mux:
        monkeypatch.setenv("ANVIL_URL", f"http://127.0.0.1:{mux.port}")
        assert json.loads(mux.chat("model-1")[2])["error"]["code"] == "paused"
        assert stack.up() == set()
        assert main(["resume"]) == 0
        assert ask(mux, "model-1") == ""
        assert stack.up() == {"model-1"}


def test_requests_that_wait_are_answered_when_the_time_of_a_pause_is_over(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=1, top={"x-anvil": {"when_paused": "wait"}})
    with served(stack) as mux:
        assert ask(mux, "model-1") == ""
        assert mux.request("POST", "/pause", {"for": 2})[0] == 200
        eventually(lambda: stack.up() == set())
        assert ask(mux, "model-1") == ""
        assert mux.get("/healthz")["paused"] is None


def test_usage_is_what_the_engine_says_and_a_request_can_be_looked_at(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=1, top={"x-anvil": {"capture": 5}})
    keys = "key-of-alice name=alice models=*;key-of-root name=root"
    environ = {**stack.engine.env, "ANVIL_API_KEYS": keys}
    root = {"X-Api-Key": "key-of-root"}
    used = {"requests": 0, "prompt_tokens": 0, "tokens": 0}
    with serving(stack.file, state=tmp_path, environ=environ) as mux:
        url = f"http://127.0.0.1:{mux.port}/v1"
        with openai.OpenAI(base_url=url, api_key="key-of-alice", max_retries=0) as client:
            for count in (5, 9):
                pieces = [*stream(client, "model-1", count)]
                said = pieces[-1].usage
                assert said is not None
                assert said.completion_tokens == count
                used["requests"] += 1
                used["prompt_tokens"] += said.prompt_tokens
                used["tokens"] += said.completion_tokens
        [row] = seen(
            lambda: json.loads(mux.request("GET", "/usage", headers=root)[2])["usage"],
            lambda rows: bool(rows) and rows[0]["requests"] == 2,
        )
        assert row.items() >= {"key": "alice", "model": "model-1", "failed": 0, **used}.items()
        assert row["gpu_seconds"] > 0
        [_, last] = json.loads(mux.request("GET", "/requests", headers=root)[2])["requests"]
        kept = json.loads(mux.request("GET", f"/requests?id={last['id']}", headers=root)[2])
        assert json.loads(kept["question"])["messages"] == [{"role": "user", "content": "Say hello."}]
        events = [line for line in kept["answer"].split("\n\n") if line]
        assert events[-1] == "data: [DONE]"
        assert all(line.startswith("data: ") for line in events)
    with serving(stack.file, state=tmp_path, environ=environ) as mux:
        [again] = json.loads(mux.request("GET", "/usage", headers=root)[2])["usage"]
        assert again == row
