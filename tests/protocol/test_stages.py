"""Requests in two stages, prefill and decode, over real sockets, with engines that check vLLM's protocol."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from anvil_mux.config.config import Backend
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import ConfigError
from anvil_mux.plugins import load
from anvil_mux.protocol.completions import REMOTE_DECODE
from anvil_mux.routing.in_flight import InFlightTracker
from anvil_mux.routing.pipeline import build
from anvil_mux.routing.routing import Work
from tests.fake_engine import DONE, END, SSE_HEAD, Answer, Asked, RawClient, Rig, chunk

ASK = {"model": "m", "messages": [{"role": "user", "content": "so it goes " * 100}], "max_tokens": 50}
WHERE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "10.0.0.1"}


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = staged()
    yield made
    made.close()


def staged(concurrency: int | None = None, **settings: object) -> Rig:
    """A prefill and a decode backend of one model, resident."""
    backends = (
        Backend("p", "m", ("0",), infer_type="prefill", concurrency=concurrency),
        Backend("d", "m", ("1",), infer_type="decode", served_model="inside"),
    )
    made = Rig(backends=backends, gpus=(Gpu("0"), Gpu("1")), **settings)
    made.mechanism.engines = {"p": made.engine, "d": made.other}
    assert made.mux.facts.adopt({"p": made.engine.url, "d": made.other.url}) == []
    return made


def ask(rig: Rig, path: bytes = b"/v1/chat/completions", **more: object) -> RawClient:
    client = rig.client()
    client.post(json.dumps({**ASK, **more}).encode(), path)
    return client


def reply(asked: Asked, said: object, status: bytes = b"200 OK") -> None:
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    asked.send(head % (status, len(body)), body)


def prefilled(rig: Rig) -> dict[str, Any]:
    """The first stage is asked as vLLM wants it, and answers; what it was asked."""
    asked = rig.engine.next()
    body: dict[str, Any] = json.loads(asked.body)
    assert (body["max_tokens"], body["stream"]) == (1, False)
    assert body["kv_transfer_params"] == REMOTE_DECODE
    reply(asked, {"choices": [], "kv_transfer_params": WHERE})
    return body


def test_the_prompt_is_computed_by_one_and_the_answer_written_by_the_other(rig):
    client = ask(rig)
    first = prefilled(rig)
    asked = rig.other.next()
    reply(asked, {"id": "x"})
    answer = client.read()
    assert json.loads(asked.body) == {**ASK, "model": "inside", "kv_transfer_params": WHERE}
    assert first["messages"] == ASK["messages"]
    assert (answer.status, json.loads(answer.body)) == (200, {"id": "x"})
    told = answer.header(b"x-anvil-backend") or b""
    assert told.startswith(b"d; least_delay: ")
    assert told.endswith(b"; prefill by p")


def test_both_stages_are_asked_under_the_same_request_id(rig):
    client = ask(rig)
    first = rig.engine.next()
    reply(first, {"kv_transfer_params": WHERE})
    second = rig.other.next()
    reply(second, {})
    told = client.read().header(b"x-request-id")
    assert told
    assert all(b"x-request-id: " + told.lower() in each.head.lower() for each in (first, second))


def test_a_stream_is_streamed_by_the_second_stage_only(rig):
    client = ask(
        rig, stream=True, stream_options={"include_usage": True}, min_tokens=9, max_completion_tokens=40
    )
    first = prefilled(rig)
    assert first["max_completion_tokens"] == 1
    assert not {"stream_options", "min_tokens"} & first.keys()
    asked = rig.other.next()
    second = json.loads(asked.body)
    assert second["stream"] is True
    assert (second["min_tokens"], second["max_completion_tokens"]) == (9, 40)
    assert second["stream_options"] == {"include_usage": True}
    asked.send(SSE_HEAD, chunk(b"data: {}\n\n"), END)
    assert client.read().body == b"data: {}\n\n" + DONE


def test_what_a_client_says_of_transfers_is_not_passed_on(rig):
    client = ask(rig, kv_transfer_params={"remote_host": "elsewhere"})
    asked = rig.engine.next()
    assert b"elsewhere" not in asked.body
    reply(asked, {"kv_transfer_params": None})  # as for a prompt of less than a block
    asked = rig.other.next()
    assert "kv_transfer_params" not in json.loads(asked.body)
    reply(asked, {})
    assert client.read().status == 200


def test_the_first_lease_ends_with_the_first_stage_and_the_second_with_the_answer(rig):
    client = ask(rig)
    asked = rig.engine.next()
    assert [event.backend for event in rig.events.of("leased")] == ["p", "d"]  # in one go
    reply(asked, {"kv_transfer_params": WHERE})
    assert rig.events.wait("released").backend == "p"
    asked = rig.other.next()
    assert rig.mux.overview.status().leases == 1
    reply(asked, {})
    client.read()
    assert rig.events.wait("released", 2).backend == "d"
    assert rig.mux.overview.status().leases == 0


def test_a_client_of_another_api_is_served_in_two_stages_too(rig):
    client = rig.client()
    chat = {"model": "m", "messages": ASK["messages"], "stream": False}
    client.post(json.dumps(chat).encode(), b"/api/chat")
    prefilled(rig)
    asked = rig.other.next()
    assert json.loads(asked.body)["kv_transfer_params"] == WHERE
    reply(asked, {"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]})
    assert json.loads(client.read().body)["message"]["content"] == "hi"


@pytest.mark.parametrize("path", [b"/v1/embeddings", b"/upstream/m/v1/chat/completions"])
def test_what_cannot_be_asked_in_stages_is_asked_of_the_decode_backend(rig, path):
    client = ask(rig, path)
    asked = rig.other.next()
    assert b"kv_transfer_params" not in asked.body
    reply(asked, {})
    assert client.read().status == 200


@pytest.mark.parametrize("resident", ["p", "d"])
def test_while_one_stage_is_not_resident_the_other_serves_alone(resident):
    rig = staged()
    try:
        rig.mux.facts.died("p" if resident == "d" else "d", "killed")
        client = ask(rig)
        asked = (rig.other if resident == "d" else rig.engine).next()
        assert b"kv_transfer_params" not in asked.body
        reply(asked, {})
        assert (client.read().header(b"x-anvil-backend") or b"").startswith(resident.encode())
    finally:
        rig.close()


def test_a_stage_that_died_is_back_for_the_requests_after_the_next(rig):
    rig.mux.facts.died("p", "killed")
    client = ask(rig)
    reply(rig.other.next(), {})
    assert client.read().status == 200
    assert rig.events.wait("ready", 3).backend == "p"
    client = ask(rig)
    prefilled(rig)
    reply(rig.other.next(), {})
    assert (client.read().header(b"x-anvil-backend") or b"").endswith(b"; prefill by p")


# What goes wrong in the first stage


def refused(rig: Rig, status: bytes, said: object) -> Answer:
    client = ask(rig)
    reply(rig.engine.next(), said, status)
    answer = client.read()
    assert rig.events.wait("released", 2)
    assert rig.mux.overview.status().leases == 0
    assert rig.other.asked.empty()
    return answer


def test_a_refusal_by_the_first_stage_is_told_in_its_words(rig):
    error = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}
    answer = refused(rig, b"400 Bad Request", error)
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["message"] == "too long"


@pytest.mark.parametrize(
    ("status", "said"), [(b"500 Oops", b"out of luck"), (b"200 OK", b"<html>"), (b"200 OK", b"[]")]
)
def test_a_first_stage_that_fails_is_a_bad_gateway(rig, status, said):
    assert refused(rig, status, said).status == 502


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/api/chat"])
def test_when_the_first_stage_dies_its_request_is_served_by_who_is_left(rig, path):
    rig.mechanism.end = "killed"
    client = ask(rig, path, stream=False)
    rig.engine.next().reset()
    asked = rig.other.next()
    assert b"kv_transfer_params" not in asked.body
    reply(asked, {"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]})
    assert client.read().status == 200


def test_when_the_second_stage_dies_nothing_of_the_first_goes_to_who_is_left(rig):
    rig.mechanism.end = "killed"
    client = ask(rig, b"/api/chat", stream=False)
    prefilled(rig)
    rig.other.next().reset()
    asked = rig.engine.next()
    assert b"kv_transfer_params" not in asked.body
    reply(asked, {"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]})
    assert client.read().status == 200


def test_a_request_that_cannot_be_read_frees_both_leases(rig):
    client = rig.client()
    assert client.ask(b'{"model": "m", "n": 1, "n": 2}').status == 400
    rig.events.wait("released", 2)
    assert rig.mux.overview.status().leases == 0


def test_a_client_that_leaves_in_the_first_stage_frees_both_leases(rig):
    client = ask(rig)
    asked = rig.engine.next()
    client.leave()
    assert asked.was_left()
    rig.events.wait("released", 2)
    assert rig.mux.overview.status().leases == 0


def test_a_request_waits_for_a_place_at_both_stages():
    rig = staged(concurrency=1)
    try:
        first, second = ask(rig), ask(rig)
        one = rig.engine.next()
        rig.events.wait("queued")
        reply(one, {"kv_transfer_params": WHERE})
        reply(rig.other.next(), {})
        prefilled(rig)
        reply(rig.other.next(), {})
        assert [client.read().status for client in (first, second)] == [200, 200]
        assert [event.backend for event in rig.events.of("leased")] == ["p", "d"] * 2
    finally:
        rig.close()


def test_a_policy_that_lets_no_prefill_take_more_charges_nobody():
    most = {"filters": [{"metric": {"metric": "num_requests", "threshold": 1, "in_fallback": True}}]}
    seen = {"metrics": ["num_requests"]}
    policy = {"prefill": {**most, "selector": "round_robin"}, "decode": {**seen, "selector": "round_robin"}}
    rig = staged(routing="one", routing_policies={"one": policy})
    try:
        client = ask(rig)
        asked = rig.engine.next()
        assert ask(rig).read().status == 503
        assert rig.mux.overview.status().leases == 2
        assert rig.mux.overview.explain("m", staged=True)["decode"][0]["metrics"] == {"num_requests": 1}
        reply(asked, {"kv_transfer_params": WHERE})
        reply(rig.other.next(), {})
        assert client.read().status == 200
    finally:
        rig.close()


# What is counted and told


def test_what_speaks_for_each_replica_is_told_of_both_stages(rig):
    client = rig.client()
    client.post(json.dumps(ASK).encode(), extra=b"X-Anvil-Explain: 1\r\n")
    found = json.loads(client.read().body)["stages"]
    assert {
        stage: [(row["backend"], row["removed_by"]) for row in rows] for stage, rows in found.items()
    } == {
        "prefill": [("p", ""), ("d", "infer_type")],
        "decode": [("d", ""), ("p", "infer_type")],
    }


def test_who_is_to_write_an_answer_has_it_counted_before_its_prompt_is_computed():
    in_flight = InFlightTracker(
        build("load_balance"),
        [Backend("d", "m", infer_type="decode"), Backend("e", "m", infer_type="decode")],
    )
    work = Work(tokens=4000, infer_type="decode")
    chosen = [in_flight.choose(key, work, ["d", "e"]) for key in range(4)]
    assert [choice and choice.backend for choice in chosen] == ["d", "e", "d", "e"]
    assert [each.decode_batch for each in in_flight.view(Work(), ["d", "e"])] == [2, 2]
    assert in_flight.waiting("d") == []
    in_flight.first_byte(0)
    in_flight.ended(0)
    assert [each.decode_tokens for each in in_flight.view(Work(), ["d", "e"])] == [4000, 8000]


def test_the_input_is_work_for_the_one_that_computes_it_only():
    in_flight = InFlightTracker(
        build("least_prefill_work"),
        [Backend("p", "m", infer_type="prefill"), Backend("d", "m", infer_type="decode")],
    )
    work = Work(tokens=4000)
    in_flight.choose("first", work._replace(infer_type="prefill"), ["p"])
    in_flight.choose("second", work._replace(infer_type="decode"), ["d"])
    prefill, decode = in_flight.view(Work(), ["p", "d"])
    assert (prefill.prefill_tokens, decode.prefill_tokens) == (4000, 0)
    assert decode.num_tokens == 4000
    assert in_flight.waiting("d") == []
    in_flight.ended("first", cached_tokens=0)
    in_flight.first_byte("second")
    prefill, decode = in_flight.view(Work(), ["p", "d"])
    assert (prefill.num_requests, prefill.prefill_tokens) == (0, 0)
    assert (decode.decode_tokens, decode.decode_batch) == (4000, 1)


def test_a_model_with_one_stage_only_is_a_mistake(tmp_path):
    service = {"image": "vllm/vllm-openai", "command": "--port 8000", "gpus": "all"}
    about = {"model": "m", "gpus": ["0"], "infer_type": "prefill"}
    file = tmp_path / "compose.yaml"
    file.write_text(yaml.safe_dump({"services": {"p": {**service, "x-anvil": about}}}))
    with pytest.raises(
        ConfigError, match="is prefill, but no service of m is decode: both stages are needed"
    ):
        load([file], compose=None, environ={})
    either = {**about, "gpus": ["1"], "infer_type": "either"}
    services = {"p": {**service, "x-anvil": about}, "e": {**service, "x-anvil": either}}
    file.write_text(yaml.safe_dump({"services": services}))
    found = load([file], compose=None, environ={})
    assert [backend.infer_type for backend in found.backends] == ["either", "prefill"]
