"""Names that choose their model by the request, by way of a real server."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anvil_mux.cli.main import main
from anvil_mux.config.config import Backend
from anvil_mux.config.keys import Keyring
from anvil_mux.config.values import AnyOf, Preset, Rule
from anvil_mux.proxy import question
from tests.fake_engine import Answer, RawClient, Rig, answer_of, keyring, shows

WITH_IMAGES, WITH_TOOLS, LONG = (("images", True),), (("tools", True),), (("tokens_over", 1000),)
A, B = Backend("a", "a", gpus=("0",)), Backend("b", "b", gpus=("1",))
SEES_A = {"auto": AnyOf((Rule(("a",), WITH_IMAGES), Rule(("b",))))}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}
TEXT = {"role": "user", "content": "hi"}
CHAT = b'{"choices":[{"message":{"role":"assistant","content":"ok"}}]}'
OK = answer_of(CHAT)


def answering(make_rig: Callable[..., Rig], **settings: Any) -> Rig:
    settings.setdefault("any_of", SEES_A)
    rig = make_rig(**{"backends": (A, B), **settings})
    rig.engine.answer = rig.other.answer = lambda _: OK
    return rig


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return answering(make_rig)


def ask(client: RawClient, path: str = "/v1/chat/completions", extra: bytes = b"", **body: Any) -> Answer:
    return client.ask(json.dumps({"model": "auto", **body}).encode(), path=path.encode(), extra=extra)


def chosen(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    header = answer.header(b"x-anvil-model")
    assert header is not None
    return header.decode()


BLOCK = {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x/y"}}]}


@pytest.mark.parametrize(
    ("path", "plain", "with_image"),
    [
        ("/v1/chat/completions", {"messages": [TEXT]}, {"messages": [IMAGE]}),
        (
            "/v1/responses",
            {"input": "hi"},
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        ),
        ("/v1/embeddings", {"input": "hi"}, {"input": [{"image": "http://x/y"}]}),
        ("/v1/messages", {"messages": [TEXT]}, {"messages": [BLOCK]}),
        (
            "/api/chat",
            {"messages": [TEXT], "stream": False},
            {"messages": [{**TEXT, "images": ["iVBOR"]}], "stream": False},
        ),
        (
            "/api/generate",
            {"prompt": "hi", "stream": False},
            {"prompt": "hi", "images": ["iVBOR"], "stream": False},
        ),
        ("/openai/deployments/auto/chat/completions", {"messages": [TEXT]}, {"messages": [IMAGE]}),
    ],
)
def test_the_request_chooses_in_every_api(rig, path, plain, with_image):
    client, sent = rig.client(), rig.engine.answers(OK)
    assert chosen(ask(client, path, **plain)) == "b"
    assert chosen(ask(client, path, **with_image)) == "a; images: true"
    assert chosen(ask(client, path, **plain)) == "b"
    assert [rig.events.record(count).model for count in (1, 2, 3)] == ["b", "a", "b"]
    assert [json.loads(asked.body).get("model", "a") for asked in sent] == ["a"]


def test_a_large_request_is_read_for_it_too(rig):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
    assert chosen(ask(rig.client(), messages=[{"role": "user", "content": [part]}])) == "a; images: true"


def test_a_form_chooses_by_where_it_is_sent(make_rig):
    rig = answering(make_rig, any_of={"auto": AnyOf((Rule(("a",), (("audio", True),)), Rule(("b",))))})
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nauto\r\n--x--\r\n'
    answer = rig.ask(form, b"/v1/audio/transcriptions", type=b"multipart/form-data; boundary=x")
    assert chosen(answer) == "a; audio: true"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "small"),
        ({"tools": [{"type": "function"}]}, "coder; tools: true"),
        ({"tools": [{"type": "function"}], "prompt": "x" * 4000}, "long; tokens_over: 1000"),
        ({"prompt": "x" * 3996}, "small"),
    ],
)
def test_the_first_rule_that_fits_chooses(make_rig, body, expected):
    backends = [Backend(name, name) for name in ("long", "coder", "small")]
    rules = Rule(("long",), LONG), Rule(("coder",), WITH_TOOLS), Rule(("small",))
    rig = answering(make_rig, backends=tuple(backends), any_of={"auto": AnyOf(rules)})
    rig.mechanism.engines |= dict.fromkeys(("long", "coder", "small"), rig.engine)
    assert chosen(ask(rig.client(), "/v1/completions", **body)) == expected


def test_of_equals_the_resident_one_serves(make_rig):
    same_gpu = A, replace(B, gpus=("0",))
    rig = answering(make_rig, backends=same_gpu, any_of={"auto": AnyOf((Rule(("a", "b"), WITH_TOOLS),))})
    client = rig.client()
    assert client.ask(b'{"model":"b"}').status == 200
    assert chosen(ask(client, tools=[{}])) == "b; tools: true"
    assert len(rig.events.of("loading")) == 1


def test_a_later_rule_is_not_taken_though_its_model_is_resident(make_rig):
    rig = answering(make_rig, backends=(A, replace(B, gpus=("0",))))
    client = rig.client()
    assert chosen(ask(client)) == "b"
    assert chosen(ask(client, messages=[IMAGE])) == "a; images: true"
    assert chosen(ask(client)) == "b"


def test_a_request_that_fits_no_rule_is_refused(make_rig):
    rules = Rule(("a",), WITH_IMAGES), Rule(("b",), (("tools", True), ("tokens_over", 9)))
    rig = answering(make_rig, any_of={"auto": AnyOf(rules)})
    answer = ask(rig.client())
    assert (answer.status, answer.code) == (400, "bad_request")
    message = "no model of this name takes such a request: it would need images: true; or tools: true, "
    assert answer.error["message"] == message + "tokens_over: 9"
    assert not rig.events.of("loading")


def test_who_names_no_model_may_get_it(make_rig):
    rig = answering(make_rig, default_model="auto")
    answer = rig.ask(json.dumps({"messages": [IMAGE]}).encode())
    assert chosen(answer) == "a; images: true"


def test_it_may_force_no_swap(make_rig):
    rig = answering(make_rig, any_of={"auto": SEES_A["auto"]._replace(swaps=False)})
    rig.ask(b'{"model":"b"}')
    answer = ask(rig.client(), messages=[IMAGE])
    assert (answer.status, answer.code) == (503, "nothing_resident")
    assert answer.error["message"].startswith("a is not loaded")
    assert chosen(ask(rig.client())) == "b"


def test_a_rule_may_choose_a_preset(make_rig):
    think = Preset("think", set=(("top_k", "1"),))
    any_of = {"auto": AnyOf((Rule(("think",), WITH_TOOLS), Rule(("a",))))}
    rig = answering(make_rig, backends=(replace(A, presets=(think,)), B), any_of=any_of)
    sent = rig.engine.answers(OK)
    assert chosen(ask(rig.client(), tools=[{}])) == "think; tools: true"
    assert [json.loads(asked.body) for asked in sent] == [{"model": "a", "tools": [{}], "top_k": 1}]


def test_its_model_may_have_a_fallback(make_rig):
    rig = answering(make_rig, backends=(replace(A, fallback=("b",)), B))
    with rig.mux._lock:
        slot = rig.mux._layout.slot("a")
        assert slot
        slot.failed_starts, slot.retry_at = 1, float("inf")
    answer = ask(rig.client(), messages=[IMAGE])
    assert chosen(answer) == "b"
    assert answer.header(b"x-anvil-fallback") == b"b; a load_failed"


def test_other_names_are_not_read_for_it(rig, monkeypatch):
    seen: list[object] = []
    monkeypatch.setattr(question, "json_contents", seen.append)
    assert rig.ask(b'{"model":"b","tools":[{}]}').status == 200
    assert not seen


def test_a_reload_changes_the_rules(rig):
    client = rig.client()
    assert chosen(ask(client, tools=[{}])) == "b"
    rules = {"auto": AnyOf((Rule(("a",), WITH_TOOLS), Rule(("b",))))}
    rig.handler.reconfigure(replace(rig.config, any_of=rules), Keyring())
    assert chosen(ask(client, tools=[{}])) == "a; tools: true"


def test_who_goes_on_from_an_answer_stays_with_the_model_that_has_it(make_rig):
    rig = answering(make_rig, backends=(A, replace(B, gpus=("0",))))
    said = b'{"id":"resp_1"}'
    rig.engine.answer = lambda _: answer_of(said)
    image = [{"role": "user", "content": [{"type": "input_image"}]}]
    assert chosen(ask(rig.client(), "/v1/responses", input=image)) == "a; images: true"
    goes_on = {"input": "What is to be seen there?", "previous_response_id": "resp_1"}
    assert chosen(ask(rig.client(), "/v1/responses", **goes_on)) == "a"
    assert chosen(ask(rig.client(), "/v1/responses", input="hi")) == "b"  # a is evicted, and has lost it
    assert chosen(ask(rig.client(), "/v1/responses", **goes_on)) == "b"


# Keys


def test_a_key_never_gets_what_it_may_not_use(make_rig):
    ring = keyring("key-of-b models=b", "key-of-a models=a", "key-of-auto models=auto", "key-of-x models=x")
    rig = answering(make_rig, keys=ring)

    def told(key: bytes, **body: Any) -> tuple[int, str]:
        answer = ask(rig.client(), extra=b"Authorization: Bearer %b\r\n" % key, **body)
        return answer.status, (answer.header(b"x-anvil-model") or answer.body).decode()

    assert told(b"key-of-b", messages=[IMAGE]) == (200, "b")
    assert told(b"key-of-auto", messages=[IMAGE]) == (200, "a; images: true")
    assert told(b"key-of-a", messages=[IMAGE]) == (200, "a; images: true")
    status, refused = told(b"key-of-a")
    assert (status, json.loads(refused)["error"]["message"]) == (
        400,
        "no model of this name takes such a request: it would need images: true",
    )
    assert told(b"key-of-x")[0] == 404


def test_a_key_is_told_of_no_rule_that_it_does_not_have(make_rig):
    rig = answering(make_rig, keys=keyring("key-of-b models=b state", "key-of-all models=*"))
    head = shows("key-of-b")
    why = rig.json(b"/why?model=auto&with=images", extra=head)
    assert (why["any_of"], why["chosen"], why["when"]) == (["b"], "b", {})
    assert why["sentence"].startswith("auto stands for b. A request for b")
    listed = rig.json(b"/v1/models", extra=head)["data"]
    assert [each["id"] for each in listed] == ["b", "auto"]


# What is told of it


def test_healthz_has_its_rules(rig):
    assert rig.json(b"/healthz")["any_of"]["auto"] == {
        "models": [{"model": "a", "when": {"images": True}}, "b"],
        "swap": "allowed",
        "words": "a if images: true, else b",
        "serves": "b",
    }


def test_why_says_which_rule_would_choose(rig):
    client = rig.client()
    why = client.json(b"/why?model=auto")
    assert why["sentence"].startswith(
        "auto stands for a if images: true, else b. For this request that is b. A request for b"
    )
    why = client.json(b"/why?model=auto&with=images,tools&tokens=9")
    assert (why["model"], why["chosen"], why["when"]) == ("a", "a", {"images": True})
    assert why["sentence"].startswith(
        "auto stands for a if images: true, else b. For this request that is a (images: true). A request"
    )
    assert client.get(b"/why?model=auto&with=video").status == 400


def test_the_command_why_asks_for_it(rig, capsys):
    url = f"http://127.0.0.1:{rig.address[1]}"
    assert main(["why", "auto", "--with", "tools,images", "--url", url]) == 0
    assert "For this request that is a (images: true)." in capsys.readouterr().out
    assert main(["why", "auto", "--url", url]) == 0
    assert "For this request that is b." in capsys.readouterr().out
    assert main(["ps", "--url", url]) == 0
    assert "auto: a if images: true, else b" in capsys.readouterr().out.splitlines()


def test_explain_says_it_by_the_same_header(rig):
    answer = ask(rig.client(), extra=b"X-Anvil-Explain: 1\r\n", messages=[IMAGE])
    assert (answer.header(b"x-anvil-model"), answer.json["model"]) == (b"a; images: true", "a")
    assert not rig.events.of("loading")
