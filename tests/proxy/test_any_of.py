"""Names that stand for several models, and requests that may force no swap, by way of a real server."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.values import AnyOf, Preset, Rule
from tests.fake_engine import ASK_A, ASK_B, JSON_OK, Answer, Rig, keyring, shows

CHAT = b'{"model":"chat"}'
NEVER = b"X-Anvil-Swap: never\r\n"
A, B = Backend("a", "a", gpus=("0",)), Backend("b", "org/b", gpus=("0",))
FIRST_A, FIRST_B = {"chat": AnyOf((Rule(("a", "org/b")),))}, {"chat": AnyOf((Rule(("org/b", "a")),))}


@pytest.fixture
def any_rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(any_of=FIRST_B)


def answered(rig: Rig, body: bytes, extra: bytes = b"") -> Answer:
    """The answer to a request that an engine answers, whichever gets it."""
    name = json.loads(body)["model"]
    models = rig.config.any_of[name].models if name in rig.config.any_of else (name,)
    client = rig.client()
    client.post(body, extra=extra)
    (rig.engine if rig.mux.overview.choose(models) == "a" else rig.other).next().send(JSON_OK)
    return client.read()


def test_its_engine_is_asked_by_its_own_name_with_everything_else_as_it_was(any_rig):
    asked = any_rig.passes(b'{ "model" : "chat", "tools":[ ], "n": 1e0}', engine=any_rig.other)
    assert asked.body == b'{ "model" : "b-inside", "tools":[ ], "n": 1e0}'


def test_the_first_is_loaded_if_none_is_resident_and_then_the_resident_one_serves(any_rig):
    client, served = any_rig.client(), []
    for body, engine in (
        (CHAT, any_rig.other),
        (ASK_A, any_rig.engine),
        (CHAT, any_rig.engine),
        (ASK_B, any_rig.other),
        (CHAT, any_rig.other),
    ):
        client.post(body)
        engine.next().send(JSON_OK)
        served.append(client.read().header(b"x-anvil-model"))
    assert served == [b"org/b", None, b"a", None, b"org/b"]
    assert [event.model for event in any_rig.events.of("loading")] == ["org/b", "a", "org/b"]


def test_one_that_cannot_be_loaded_is_passed_over(make_rig):
    rig = make_rig(any_of=FIRST_A)
    with rig.mux._lock:
        slot = rig.mux._layout.slot("a")
        assert slot
        slot.failed_starts, slot.retry_at = 1, float("inf")
    assert answered(rig, CHAT).header(b"x-anvil-model") == b"org/b"


def test_it_is_in_the_lists(any_rig):
    client = any_rig.client()
    listed = client.json(b"/v1/models")["data"]
    assert [(each["id"], each["status"]["value"]) for each in listed][-1] == ("chat", "unloaded")
    answered(any_rig, b'{"model":"a"}')
    assert client.json(b"/v1/models/chat")["status"]["value"] == "loaded"
    states = {each["id"]: each["state"] for each in client.json(b"/api/v0/models")["data"]}
    assert states == {"a": "loaded", "org/b": "not-loaded", "chat": "loaded"}
    assert "chat" in [each["name"] for each in client.json(b"/api/tags")["models"]]
    state = client.json(b"/healthz")["any_of"]
    words = "any of org/b, a; now a"
    assert state == {
        "chat": {"models": ["org/b", "a"], "swap": "allowed", "words": words, "serves": "a"},
    }


def test_why_says_what_it_stands_for(any_rig):
    told = any_rig.json(b"/why?model=chat")
    assert told["sentence"].startswith("chat stands for org/b or a. A request for org/b waits about")
    assert (told["model"], told["any_of"]) == ("org/b", ["org/b", "a"])


def test_what_is_done_to_a_model_must_name_one(any_rig):
    for path in (b"/models/unload", b"/models/load"):
        answer = any_rig.ask(CHAT, path)
        assert answer.status == 400
        assert answer.error["message"] == "chat stands for several models: name one of them (org/b, a)"


# Keys


def test_a_key_gets_those_that_it_may_use(make_rig):
    rig = make_rig(
        any_of=FIRST_A, keys=keyring("key-of-b models=org/b", "key-of-chat models=chat", "key-of-x models=x")
    )

    def named(key: bytes) -> tuple[list[str], int]:
        client, head = rig.client(), b"Authorization: Bearer %b\r\n" % key
        listed = client.json(b"/v1/models", extra=head)["data"]
        client.post(b'{"model":"chat","stop":1}', extra=head)
        engine = {b"key-of-b": rig.other, b"key-of-chat": rig.other}.get(key)
        if engine:
            engine.next().send(JSON_OK)
        return [each["id"] for each in listed], client.read().status

    assert named(b"key-of-b") == (["org/b", "chat"], 200)
    assert named(b"key-of-chat") == (["chat"], 200)  # by that name it may use all of them; b is resident
    assert named(b"key-of-x") == ([], 404)


# Without a swap


def test_a_header_keeps_a_request_from_forcing_a_swap(any_rig):
    answer = any_rig.ask(b'{"model":"a"}', extra=NEVER)
    assert (answer.status, answer.code) == (503, "nothing_resident")
    assert answer.error["message"] == (
        "a is not loaded, and this request does not allow a swap (swap: never). No model is resident."
    )
    assert answer.header(b"retry-after") == b"30"
    answered(any_rig, b'{"model":"org/b"}')
    answer = any_rig.ask(b'{"model":"a"}', extra=NEVER)
    assert answer.error["message"].endswith("Resident: org/b.")
    assert answered(any_rig, CHAT, NEVER).header(b"x-anvil-model") == b"org/b"
    assert len(any_rig.events.of("loading")) == 1


def test_the_header_is_never_or_allowed(any_rig):
    answer = any_rig.ask(CHAT, extra=b"X-Anvil-Swap: no\r\n")
    assert (answer.status, answer.error["message"]) == (400, "X-Anvil-Swap must be never or allowed")
    assert answered(any_rig, CHAT, b"X-Anvil-Swap: allowed\r\n").status == 200


def test_the_name_may_say_it(make_rig):
    rig = make_rig(any_of={"chat": AnyOf((Rule(("a", "org/b")),), swaps=False)})
    answer = rig.ask(CHAT)
    assert (answer.status, answer.code) == (503, "nothing_resident")
    assert answer.error["message"].startswith("a or org/b is not loaded")
    answered(rig, b'{"model":"org/b"}')
    assert answered(rig, CHAT).header(b"x-anvil-model") == b"org/b"


def test_a_key_may_say_it(make_rig):
    rig = make_rig(keys=keyring("key-of-guest models=a swap=never", "key-of-host models=*"))
    guest, host = shows("key-of-guest"), shows("key-of-host")
    answered(rig, b'{"model":"org/b"}', host)
    answer = rig.ask(b'{"model":"a"}', extra=guest)
    assert (answer.status, answer.code) == (503, "nothing_resident")
    assert answer.error["message"].endswith("No model is resident.")  # none that it may know of
    answered(rig, b'{"model":"a"}', host)
    assert answered(rig, b'{"model":"a"}', guest).status == 200
    assert rig.ask(b'{"model":"a"}', extra=guest + b"X-Anvil-Swap: odd\r\n").status == 400


def test_one_that_waits_for_a_place_fails_once_its_model_makes_room(make_rig):
    rig = make_rig(backends=(Backend("a", "a", gpus=("0",), concurrency=1), B))
    first, second, third = rig.client(), rig.client(), rig.client()
    first.post(b'{"model":"a"}')
    running = rig.engine.next()
    second.post(b'{"model":"a"}', extra=NEVER)
    rig.events.wait("queued", count=2)
    third.post(b'{"model":"org/b"}')
    answer = second.read()
    assert (answer.status, answer.code) == (503, "nothing_resident")
    running.send(JSON_OK)
    assert first.read().status == 200
    rig.other.next().send(JSON_OK)
    assert third.read().status == 200


# Presets among them

THINK, FAST = Preset("think", set=(("top_k", "1"),)), Preset("fast", set=(("top_k", "2"),))
LAW = Preset("law", system="Yes.")


@pytest.fixture
def preset_rig(make_rig: Callable[..., Rig]) -> Rig:
    backends = replace(A, presets=(THINK, FAST)), replace(B, presets=(LAW,))
    ring = keyring(
        "key-of-all1 models=*", "key-of-fast models=fast", "key-of-chat models=chat", "key-of-law1 models=law"
    )
    return make_rig(backends=backends, any_of={"chat": AnyOf((Rule(("think", "law", "fast")),))}, keys=ring)


def chosen(rig: Rig, key: bytes, model: str = "chat") -> tuple[dict[str, Any], bytes | None]:
    """The engine's part of a question, and the name that answered it."""
    client = rig.client()
    client.post(
        json.dumps({"model": model, "prompt": "x"}).encode(),
        path=b"/v1/completions",
        extra=b"Authorization: Bearer %b\r\n" % key,
    )
    got = (rig.other if rig.mux.overview.residents() == ["org/b"] else rig.engine).next()
    got.send(JSON_OK)
    answer = client.read()
    assert answer.status == 200
    return json.loads(got.body), answer.header(b"x-anvil-model")


def test_the_first_name_whose_model_is_resident_says_under_which_preset(preset_rig):
    assert chosen(preset_rig, b"key-of-all1") == ({"model": "a", "prompt": "x", "top_k": 1}, b"think")
    assert chosen(preset_rig, b"key-of-fast") == ({"model": "a", "prompt": "x", "top_k": 2}, b"fast")
    assert chosen(preset_rig, b"key-of-chat") == ({"model": "a", "prompt": "x", "top_k": 1}, b"think")
    assert chosen(preset_rig, b"key-of-all1", "fast")[1] is None
    # Records of different connections come in any order.
    records = [preset_rig.events.record(count) for count in (1, 2, 3, 4)]
    assert sorted(each.preset for each in records) == ["fast", "fast", "think", "think"]
    assert {each.model for each in records} == {"a"}
    assert len(preset_rig.events.of("loading")) == 1


def test_it_is_told_by_the_names_of_the_presets(preset_rig):
    client, head = preset_rig.client(), shows("key-of-law1")
    listed = client.json(b"/v1/models", extra=head)["data"]
    assert [each["id"] for each in listed] == ["law", "chat"]
    assert (
        client.ask(b'{"model":"chat"}', extra=head + NEVER).error["message"].startswith("law is not loaded")
    )
    assert client.ask(b'{"model":"chatt"}', extra=head).error["message"].endswith("Known models: chat, law.")
    told = preset_rig.handler.local.probes.state()["any_of"]
    assert (told["chat"]["models"], told["chat"]["serves"]) == (["think", "law", "fast"], "think")


def test_ollamas_clients_are_told_of_it_like_of_a_model(preset_rig):
    assert preset_rig.ask(CHAT, path=b"/api/show", extra=shows("key-of-all1")).status == 200


# While paused


@pytest.mark.parametrize(("when_paused", "code"), [("refuse", "paused"), ("wait", "nothing_resident")])
def test_who_may_force_no_swap_never_waits_for_the_end_of_a_pause(make_rig, when_paused, code):
    rig = make_rig(any_of=FIRST_A, when_paused=when_paused)
    answered(rig, CHAT)
    rig.mux.facts.paused(50.0)
    answer = rig.ask(CHAT, extra=NEVER)
    assert (answer.status, answer.code) == (503, code)
    assert answer.header(b"retry-after")
