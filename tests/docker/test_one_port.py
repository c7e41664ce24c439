"""Real llama-servers, each with a key of its own, that are published on one port one after the other."""

import socket

import openai

from tests.docker.served import PATIENCE
from tests.running import serving

OURS = "a-key-of-clients"
KEYS = {"model-1": "KEY-ONE", "model-2": "KEY-TWO", "model-3": None}


def test_engines_on_one_port_are_each_shown_their_own_key(llamacpp_compose, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    services = {
        name: {
            "ports": [f"127.0.0.1:{port}:8080"],
            "environment": {"LLAMA_API_KEY": key} if key else {},
            "stop_grace_period": "2s",
        }
        for name, key in KEYS.items()
    }
    stack = llamacpp_compose(tmp_path, models=3, services=services, top={"x-anvil": {"policy": "eager"}})
    environ = {**stack.engine.env, "ANVIL_API_KEYS": OURS}
    with serving(stack.file, state=tmp_path, environ=environ) as mux:
        url = f"http://127.0.0.1:{mux.port}/v1"
        with openai.OpenAI(base_url=url, api_key=OURS, timeout=PATIENCE, max_retries=0) as client:
            for model in ("model-1", "model-2", "model-1", "model-2", "model-3", "model-1"):
                answer = client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=2
                )
                assert answer.model == model
