"""The parts the Docker tier is made of work by themselves, without anvil-mux."""

import http.client
import json

HEALTHY = {
    "healthcheck": {
        "test": ["CMD", "busybox", "wget", "-qO-", "http://127.0.0.1:8080/health"],
        "interval": "200ms",
        "retries": 150,
    }
}


def stream(port: int, model: str) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    asked = {"model": model, "stream": True, "max_tokens": 16, "ignore_eos": True}
    asked |= {"stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": "hello"}]}
    connection.request("POST", "/v1/chat/completions", json.dumps(asked))
    response = connection.getresponse()
    assert response.status == 200
    events = [line.decode()[6:].strip() for line in response if line.startswith(b"data: ")]
    connection.close()
    return events


def test_a_real_llama_server_streams_and_the_witness_sees_it(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=2, services={"model-1": HEALTHY, "model-2": HEALTHY})
    stack.compose("create")
    assert stack.up() == set()
    with stack.watched() as seen:
        for model in stack.models:
            stack.compose("up", "--detach", "--wait", model)
            assert stack.up() == {model}
            port = int(stack.compose("port", model, "8080").rpartition(":")[2])
            *chunks, done = stream(port, model)
            assert done == "[DONE]"
            last = json.loads(chunks[-1])
            assert (last["model"], last["usage"]["completion_tokens"]) == (model, 16)
            stack.compose("stop", "--timeout", "5", model)
    assert seen.most == 1
    assert seen.names == {stack.container("model-1"), stack.container("model-2")}


def test_the_witness_sees_two_at_once(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=2, services={"model-1": HEALTHY, "model-2": HEALTHY})
    with stack.watched() as seen:
        stack.compose("up", "--detach", "--wait")
    assert seen.crowded == [stack.container("model-1"), stack.container("model-2")]


def test_nothing_of_a_project_is_left_after_remove(llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=2)
    stack.compose("up", "--detach")
    stack.engine.remove(stack.project)
    assert stack.engine.containers(stack.project, all=True) == []


def test_an_engine_of_ones_own_stops_and_starts(own_engine, llamacpp_compose, tmp_path):
    stack = llamacpp_compose(tmp_path, models=1, services={"model-1": HEALTHY}, engine=own_engine)
    stack.compose("up", "--detach", "--wait")
    assert stack.up() == {"model-1"}
    own_engine.stop()
    own_engine.start()
    assert stack.up() == set()
    stack.compose("up", "--detach", "--wait")
    assert stack.up() == {"model-1"}
