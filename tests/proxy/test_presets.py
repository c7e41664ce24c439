"""Presets and LoRA adapters in front of an engine: what it is asked for, and what clients see of them."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.keys import Key, Keyring
from anvil_mux.config.machines import Gpu
from anvil_mux.config.values import Preset
from anvil_mux.errors import UnknownModel
from anvil_mux.proxy.access import Access
from tests.fake_engine import GUARD, JSON_OK, SSE_HEAD, RawClient, Rig, answer_of, chunk, keyring, shows

THINK = Preset("qwen-think", set=(("temperature", "1"), ("top_k", "9")), system="Think first.")
FAST = Preset("qwen-fast", strip=("seed",), set=(("temperature", "0"),))
SQL = Preset("sql", served_model="sql", is_adapter=True)
LAW = Preset("law", set=(("lora", '[{"id": 0, "scale": 1.0}]'),), is_adapter=True)
QWEN = Backend("a", "qwen", ("0",), set=(("top_k", "5"),), served_model="inside", presets=(THINK, FAST, SQL))
B = Backend("b", "b", ("0",), presets=(LAW,))
USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Think first."}
DONE = (SSE_HEAD, chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(backends=(QWEN, B), gpus=(Gpu("0"),))
    yield made
    made.close()


def asked(rig: Rig, model: str, path: str = "/v1/chat/completions", **said: Any) -> dict[str, Any]:
    """What the engine is asked for when a client asks for ``model``."""
    engine = rig.other if model in ("b", "law") else rig.engine
    body = json.dumps({"model": model, **said}).encode()
    found: dict[str, Any] = json.loads(rig.passes(body, path.encode(), engine=engine).body)
    return found


# What the engine is asked for


def test_a_preset_asks_the_engine_of_its_model_with_its_own_parameters(rig):
    said = asked(rig, "qwen-think", messages=[USER], temperature=0.5, seed=1)
    assert said == {
        "model": "inside",
        "messages": [SYSTEM, USER],
        "temperature": 1,
        "seed": 1,
        "top_k": 9,
    }
    assert asked(rig, "qwen-fast", messages=[USER], seed=1) == {
        "model": "inside",
        "messages": [USER],
        "top_k": 5,
        "temperature": 0,
    }
    assert asked(rig, "qwen", messages=[USER]) == {"model": "inside", "messages": [USER], "top_k": 5}


def test_to_go_from_one_preset_to_another_swaps_nothing(rig):
    client = rig.client()
    for name in ("qwen", "qwen-think", "qwen-fast", "sql", "qwen-think", "qwen"):
        got = rig.passes(b'{"model":"%b"}' % name.encode(), client=client)
        assert json.loads(got.body).get("temperature") == {"qwen-think": 1, "qwen-fast": 0}.get(name)
    assert len(rig.events.of("loading")) == 1


def test_an_adapter_keeps_its_name_and_one_of_llama_cpp_becomes_a_field(rig):
    assert asked(rig, "sql", prompt="x", path="/v1/completions") == {
        "model": "sql",
        "prompt": "x",
        "top_k": 5,
    }
    assert asked(rig, "law", prompt="x")["lora"] == [{"id": 0, "scale": 1.0}]


def test_an_adapter_is_chosen_for_anthropics_clients_too_though_llama_server_would_drop_it(rig):
    answer = answer_of(b'{"choices":[{"message":{"content":"x"}}]}')
    for name in ("law", "b"):  # at the model's own name its service sets the field
        body = json.dumps({"model": name, "messages": [USER], "max_tokens": 1}).encode()
        got = rig.passes(body, b"/v1/messages", answer=answer, engine=rig.other)
        assert got.head.startswith(b"POST /v1/chat/completions ")
        assert ("lora" in json.loads(got.body)) is (name == "law")


@pytest.mark.parametrize("path", [b"/v1/embeddings", b"/api/embed", b"/v1/rerank", b"/embedding"])
def test_an_adapter_that_would_not_be_applied_is_refused(rig, path):
    answer = rig.ask(b'{"model":"law","input":"x"}', path)
    assert answer.status == 501
    assert b"cannot apply the LoRA adapter law at " in answer.body
    assert rig.other.asked.empty()


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_clients_own_system_message_stays(rig, role):
    messages = [{"role": role, "content": "Mine."}, USER]
    assert asked(rig, "qwen-think", messages=messages)["messages"] == messages


@pytest.mark.parametrize(
    ("path", "said", "expected"),
    [
        ("/v1/responses", {"input": "Hi"}, {"instructions": "Think first."}),
        ("/v1/responses", {"input": "Hi", "instructions": "Mine."}, {"instructions": "Mine."}),
        ("/v1/responses", {"input": [{"role": "developer", "content": "x"}]}, {"instructions": None}),
        ("/v1/messages", {"messages": [USER]}, {"system": "Think first.", "messages": [USER]}),
        ("/v1/messages", {"messages": [USER], "system": "Mine."}, {"system": "Mine."}),
        ("/v1/messages/count_tokens", {"messages": [USER]}, {"system": "Think first."}),
        ("/apply-template", {"messages": [USER]}, {"messages": [SYSTEM, USER]}),
        ("/v1/chat/completions/batch", {"messages": [[USER], []]}, {"messages": [[SYSTEM, USER], []]}),
        ("/tokenize", {"content": "Hi"}, {"messages": None}),
        ("/v1/completions", {"prompt": "Hi"}, {"prompt": "Hi", "messages": None}),
        ("/v1/embeddings", {"input": "Hi"}, {"input": "Hi", "instructions": None}),
        ("/v1/chat/completions", {"messages": []}, {"messages": []}),
        (
            "/openai/deployments/qwen-think/chat/completions",
            {"messages": [USER]},
            {"messages": [SYSTEM, USER]},
        ),
    ],
)
def test_every_api_says_the_system_message_in_its_own_way(rig, path, said, expected):
    found = asked(rig, "qwen-think", path, **said)
    assert {key: found.get(key) for key in expected} == expected
    assert (found["model"], found["temperature"]) == ("inside", 1)


def test_the_bytes_of_a_conversation_stay_as_they_were(rig):
    got = rig.passes(
        b'{"messages" : [ {"role":"user", "content":"\\u00e9 \\/", "n":1.00}],"model":"qwen-think"}'
    )
    assert b' {"role":"user", "content":"\\u00e9 \\/", "n":1.00}]' in got.body


@pytest.mark.parametrize(
    ("path", "said", "messages"),
    [
        ("/api/chat", {"messages": [USER]}, [SYSTEM, USER]),
        ("/api/chat", {"messages": [{"role": "system", "content": "Mine."}, USER]}, None),
        ("/api/generate", {"prompt": "Hi"}, [SYSTEM, USER]),
        ("/api/generate", {"prompt": "Hi", "system": "Mine."}, None),
    ],
)
def test_presets_are_ollamas_too(rig, path, said, messages):
    client, got = rig.asked(json.dumps({"model": "qwen-think:latest", **said}).encode(), path.encode())
    found = json.loads(got.body)
    got.send(*DONE)
    client.read()
    assert found["messages"] == (messages or [{"role": "system", "content": "Mine."}, USER])
    assert (found["model"], found["temperature"]) == ("inside", 1)


def test_what_anthropics_clients_ask_of_an_engine_without_their_api_has_the_preset_too(rig):
    client, got = rig.asked(
        json.dumps({"model": "qwen-think", "messages": [USER], "max_tokens": 1}).encode(), b"/v1/messages"
    )
    got.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    found = json.loads((again := rig.engine.next()).body)
    again.send(JSON_OK)
    client.read()
    assert found["messages"] == [SYSTEM, USER]


def test_a_form_names_an_adapter(rig):
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nsql\r\n--x--\r\n'
    kind = b"multipart/form-data; boundary=x"
    assert rig.passes(form, b"/v1/audio/transcriptions", type=kind).body == form


def test_both_stages_of_a_request_get_the_preset(make_rig):
    stages = (
        Backend("a", "m", ("0",), infer_type="prefill", presets=(THINK,), served_model="p"),
        Backend("b", "m", ("1",), infer_type="decode", served_model="d"),
    )
    rig = make_rig(backends=stages, gpus=(Gpu("0"), Gpu("1")))
    client = rig.client()
    for _ in range(2):  # the second one finds both stages loaded
        heard = [engine.answers() for engine in (rig.engine, rig.other)]
        assert client.ask(b'{"model":"qwen-think","messages":[{"role":"user","content":"Hi"}]}').status == 200
        rig.events.wait("ready", 2)
    bodies = [json.loads(asked.body) for [asked] in heard]
    assert [said["model"] for said in bodies] == ["p", "d"]
    for said in bodies:
        assert (said["messages"], said["temperature"]) == ([SYSTEM, USER], 1)


# What clients see


def names(client: RawClient, path: bytes, extra: bytes = b"") -> list[str]:
    found = client.json(path, extra=extra)
    return [each.get("id") or each["name"] for each in found.get("data") or found["models"]]


ALL = ["qwen", "qwen-think", "qwen-fast", "sql", "b", "law"]


@pytest.mark.parametrize("path", [b"/v1/models", b"/api/tags", b"/api/v0/models"])
def test_presets_are_listed(rig, path):
    assert names(rig.client(), path) == ALL


def test_a_preset_in_the_list_names_its_model(rig):
    found = rig.json(b"/v1/models/qwen-fast")
    assert (found["id"], found["parent"], found["aliases"]) == ("qwen-fast", "qwen", [])
    assert "parent" not in rig.json(b"/v1/models/qwen")
    answer = rig.get(b"/v1/models/qwen-slow")
    assert answer.status == 404
    assert b"qwen-fast" in answer.body


def test_the_log_and_the_state_name_the_preset(rig):
    asked(rig, "qwen-fast")
    record = rig.events.record()
    assert (record.model, record.preset) == ("qwen", "qwen-fast")
    state = rig.json(b"/healthz")["models"]
    assert [model["presets"] for model in state.values()] == [["qwen-think", "qwen-fast", "sql"], ["law"]]


def test_a_key_of_a_preset_is_for_nothing_else(make_rig):
    keys = keyring("key-of-fast models=qwen-fast;key-of-qwen models=qwen")
    rig = make_rig(backends=(QWEN, Backend("b", "b", ("0",))), keys=keys)
    client, fast, both = rig.client(), shows("key-of-fast"), shows("key-of-qwen")
    assert names(client, b"/v1/models", fast) == ["qwen-fast"]
    assert names(client, b"/v1/models", both) == ALL[:4]
    for name, key, status in (
        ("qwen-fast", fast, 200),
        ("qwen", fast, 404),
        ("qwen-think", fast, 404),
        ("qwen-think", both, 200),
    ):
        client.post(b'{"model":"%b"}' % name.encode(), extra=key)
        if status == 200:
            rig.engine.next().send(JSON_OK)
        assert client.read().status == status, name


def test_other_presets_hold_from_the_next_request_on_an_open_connection(rig):
    client = rig.client()
    for temperature in ("1", "2"):
        changed = replace(QWEN, presets=(replace(THINK, set=(("temperature", temperature),)),))
        config = replace(rig.config, backends=(changed, rig.config.backends[1]))
        rig.mux.facts.reconfigure(config, {})
        rig.handler.reconfigure(config, Keyring())
        got = rig.passes(b'{"model":"qwen-think"}', client=client)
        assert json.loads(got.body)["temperature"] == int(temperature)
    assert client.ask(b'{"model":"qwen-fast"}').status == 404
    assert len(rig.events.of("loading")) == 1


@pytest.mark.parametrize("is_said_there", [False, True])
def test_a_question_that_waits_keeps_its_preset_at_a_replica_that_comes_by_a_reload(make_rig, is_said_there):
    rig = make_rig(backends=(QWEN,))
    rig.mechanism.gate.clear()
    client = rig.client()
    client.post(json.dumps({"model": "qwen-think", "messages": [USER]}).encode())
    rig.events.wait("loading")
    presets = QWEN.presets if is_said_there else ()
    config = replace(rig.config, backends=(Backend("b", "qwen", ("0",), presets=presets),))
    reload = threading.Thread(target=rig.mux.facts.reconfigure, args=(config, {}), daemon=True)
    reload.start()
    rig.mechanism.gate.set()
    asked = rig.other.next()
    assert json.loads(asked.body)["messages"] == [SYSTEM, USER]
    asked.send(JSON_OK)
    assert client.read().status == 200
    reload.join(GUARD)


def test_why_says_whose_preset_it_is(rig):
    told = rig.json(b"/why?model=qwen-fast")
    assert told["sentence"].startswith("qwen-fast is a preset of qwen. A request for qwen waits about")


# Aliases that are patterns


@pytest.fixture
def patterns() -> Iterator[Rig]:
    qwen = Backend("a", "qwen", ("0",), aliases=("claude-*", "gpt-[4]*"))
    other = Backend("b", "b", ("0",), aliases=("claude-*-haiku*", "claude-3"))
    made = Rig(backends=(qwen, other), gpus=(Gpu("0"),))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "path", "model"),
    [
        ("claude-sonnet-4-5", "/v1/messages", "qwen"),
        ("claude-4-haiku-latest", "/v1/messages", "b"),
        ("claude-3", "/v1/chat/completions", "b"),
        ("claude-x:latest", "/api/generate", "qwen"),
        ("gpt-[4]o", "/v1/chat/completions", "qwen"),
        ("gpt-4o", "/v1/chat/completions", None),
        ("my-claude-3", "/v1/chat/completions", None),
    ],
)
def test_a_name_that_is_none_stands_for_the_longest_alias_that_it_fits(patterns, name, path, model):
    client = patterns.client()
    client.post(json.dumps({"model": name, "messages": [USER], "prompt": "x"}).encode(), path.encode())
    if model is None:
        assert client.read().status == 404
        return
    got = (patterns.engine if model == "qwen" else patterns.other).next()
    assert json.loads(got.body)["model"] == model
    got.send(*DONE)
    client.read()
    assert patterns.json(b"/v1/models/" + name.encode())["id"] == model
    if path != "/api/generate":
        assert patterns.json(b"/why?model=" + name.encode())["model"] == model
        assert patterns.json(b"/logs?model=" + name.encode())["model"] == model


def test_a_pattern_gives_no_key_another_model_for_one_that_it_may_not_use(patterns):
    access = Access(patterns.config, Keyring(), only_local_hosts=False)
    key = Key(b"", models=frozenset({"qwen"}))
    assert access.find("claude-x", api="openai", key=key).model == "qwen"
    for name in ("claude-3", "claude-1-haiku", "b"):
        with pytest.raises(UnknownModel):
            access.find(name, api="openai", key=key)
