"""``strip`` and ``set``: the named fields of JSON requests change, and no other byte."""

import json
import random
from collections.abc import Iterator

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.config.machines import Gpu
from anvil_mux.config.values import Preset
from anvil_mux.errors import BadRequest
from anvil_mux.proxy.engine_request import rewritten
from tests.config.files import one, plain, problems
from tests.fake_engine import SSE_HEAD, Rig
from tests.fake_engine import chunk as framed

# The bytes


@pytest.mark.parametrize(
    ("body", "strip", "put", "expected"),
    [
        (b'{"a":1, "b":2,\n"c":3}', ["b"], {}, b'{"a":1,"c":3}'),
        (b'{"a":1,"b":2}', [], {"b": "3"}, b'{"a":1,"b":3}'),
        (b'{"a":1}', [], {"b": '{"x":[]}'}, b'{"a":1,"b":{"x":[]}}'),
        (b'{"a":1,"b":2}', ["a"], {"b": "null", "c": "null"}, b"{}"),
        (b"\xef\xbb\xbf { } ", [], {}, b"{}"),
        (b'{"a":1,"\\u0061":2,"b":"x"}', ["a"], {}, b'{"b":"x"}'),
        (b'{"a":1,"a":2}', [], {"a": "0"}, b'{"a":0}'),
        (b'{"n":1.000, "e":1E400, "i":123456789012345678901234567890}', ["x"], {}, None),
        (b'{"s":"\\ud800 \\/ \\u00e9", "deep":{"a":1,"b":[{"a":2}]}}', ["a"], {}, None),
    ],
)
def test_only_what_is_named_changes(body, strip, put, expected):
    kept = body.replace(b', "', b',"').replace(b"{ ", b"{") if expected is None else expected
    assert rewritten(body, strip, put) == kept


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a":1}', b'{"a":1,"b":2}'),
        (b'{"b":null,"a":1}', b'{"b":null,"a":1}'),
        (b'{"c":1}', b'{"b":2}'),
        (b"{}", b'{"b":2}'),
    ],
)
def test_a_default_is_added_where_the_client_sent_nothing(body, expected):
    default = {"a": "null", "b": "2", "d": "4"}
    assert rewritten(body, ["c"], {"d": "null"}, default) == expected


def test_the_rewritten_body_means_what_it_should_whatever_the_body_holds():
    draw = random.Random("bodies")
    values = [1, -0.5, "x", 'q"{}[],:\\', None, True, [1, {"a": [2]}], {"a": 1, "set": {"b": 2}}, "é\ud800"]
    for _ in range(500):
        said = {name: draw.choice(values) for name in draw.sample("abcdefgh", draw.randint(0, 8))}
        strip, put = draw.sample("abcdefgh", 2), dict.fromkeys(draw.sample("abcdefgh", 2), "7")
        text = json.dumps(said, indent=draw.choice((None, 1)), ensure_ascii=True)
        expected = {name: value for name, value in said.items() if name not in strip or name in put}
        found = json.loads(rewritten(text.encode(), strip, put))
        assert found == {**expected, **dict.fromkeys(put, 7)}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'{"a"}',
        b'{"a":}',
        b'{"a":1,}',
        b'{"a":1} x',
        b'{"a":1',
        b"{1:2}",
        b'{"a":"\xff"}',
        b'{"a":1 "b":2}',
        b'{"a":' + b"[" * 100_000,
    ],
)
def test_what_is_no_object_is_refused(body):
    with pytest.raises(BadRequest):
        rewritten(body, ["z"], {})


# The settings


def test_strip_and_set_are_read(tmp_path):
    said = "{strip: [temperature, top_p], set: {max_tokens: 9, chat: {think: false}}}"
    (found,) = plain(tmp_path, f"services: {{a: {{image: x, x-anvil: {said}}}}}").backends
    assert found.strip == ("temperature", "top_p")
    assert found.set == (("max_tokens", "9"), ("chat", '{"think": false}'))


def test_as_a_label_set_is_json(tmp_path):
    found = one(tmp_path, "labels: {anvil.set: '{\"n\": 1}', anvil.strip: 'a, b'}")
    assert (found.strip, found.set) == (("a", "b"), (("n", "1"),))


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("strip: [model]", "strip: model is not to be changed here"),
        ("set: {stream: true}", "set: stream is not to be changed here"),
        ("set: [a]", "set: must hold fields and their values"),
        ("set: {a: .nan}", "set: holds a value that JSON does not have"),
    ],
)
def test_what_cannot_be_rewritten_is_said(tmp_path, said, problem):
    (told,) = problems(tmp_path, f"services: {{a: {{image: x, x-anvil: {{{said}}}}}}}")
    assert problem in told


# What engines get


@pytest.fixture
def rig() -> Iterator[Rig]:
    fields = {"strip": ("temperature",), "set": (("top_k", "5"),), "default": (("min_p", "1"),)}
    changed = Backend("a", "a", ("0",), served_model="inside", **fields)
    made = Rig(backends=(changed, Backend("b", "b", ("0",))), gpus=(Gpu("0"),))
    yield made
    made.close()


def asked(rig: Rig, body: bytes, path: bytes = b"/v1/chat/completions", model: str = "a") -> bytes:
    return rig.passes(body, path, engine=rig.engine if model == "a" else rig.other).body


def test_an_engine_gets_its_requests_rewritten_and_under_its_own_name(rig):
    body = b'{"model":"a","temperature":0.1,"messages":[{"role":"user","content":"\\u00e9"}]}'
    got = asked(rig, body)
    assert got == b'{"model":"inside","messages":[{"role":"user","content":"\\u00e9"}],"min_p":1,"top_k":5}'
    assert (
        asked(rig, b'{"temperature":1}', b"/v1/engines/a/completions")
        == b'{"model":"inside","min_p":1,"top_k":5}'
    )


@pytest.mark.parametrize(
    ("path", "said", "expected"),
    [
        ("/v1/chat/completions", {"max_completion_tokens": 9, "n_predict": 9}, {"max_tokens": 4}),
        ("/v1/chat/completions", {"max_tokens": 9}, {"max_tokens": 4}),
        ("/v1/completions", {"n_predict": 9}, {"max_tokens": 4}),
        ("/v1/messages", {"max_tokens": 9}, {"max_tokens": 4}),
        ("/v1/responses", {"max_output_tokens": 9}, {"max_output_tokens": 4}),
        ("/v1/responses", {}, {"max_output_tokens": 4}),
    ],
)
@pytest.mark.parametrize("preset", [True, False])
def test_a_bound_that_is_set_holds_under_every_name_of_it(make_rig, path, said, expected, preset):
    put = (("max_tokens", "4"),)
    how = {"presets": (Preset("fast", set=put),)} if preset else {"set": put}
    rig = make_rig(backends=(Backend("a", "a", ("0",), **how), Backend("b", "b", ("0",))))
    body = json.dumps({"model": "fast" if preset else "a", **said}).encode()
    assert json.loads(asked(rig, body, path.encode())) == {"model": "a", **expected}


@pytest.mark.parametrize(
    ("path", "said", "expected"),
    [
        ("/v1/chat/completions", {"max_completion_tokens": 9}, {"max_completion_tokens": 9}),
        ("/v1/chat/completions", {}, {"max_tokens": 4}),
        ("/v1/responses", {"max_output_tokens": 9}, {"max_output_tokens": 9}),
    ],
)
def test_a_default_bound_is_not_added_to_one_of_another_name(make_rig, path, said, expected):
    backend = Backend("a", "a", ("0",), default=(("max_tokens", "4"),))
    rig = make_rig(backends=(backend, Backend("b", "b", ("0",))))
    body = json.dumps({"model": "a", **said}).encode()
    assert json.loads(asked(rig, body, path.encode())) == {"model": "a", **expected}


def test_a_model_that_does_not_ask_for_it_gets_every_byte_as_it_was(rig):
    body = b' { "temperature" : 1.0 ,"model":"b", "temperature":2 } '
    assert asked(rig, body, model="b") == body


def test_one_connection_may_name_one_model_after_the_other(rig):
    client = rig.client()
    for name, engine, body in 2 * [
        ("a", rig.engine, b'{"model":"inside","min_p":1,"top_k":5}'),
        ("b", rig.other, b'{"model":"b"}'),
    ]:
        assert rig.passes(b'{"model":"%b"}' % name.encode(), client=client, engine=engine).body == body


def test_a_large_body_is_rewritten_too(rig):
    image = b'"' + b"A" * 600_000 + b'"'
    got = asked(rig, b'{"image":%b, "temperature":1, "model":"a"}' % image)
    assert got == b'{"image":%b,"model":"inside","min_p":1,"top_k":5}' % image


def test_a_question_that_was_translated_is_rewritten(rig):
    body = b'{"model":"a","options":{"temperature":1},"messages":[{"role":"user","content":"x"}]}'
    end = SSE_HEAD + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    said = json.loads(rig.passes(body, b"/api/chat", answer=end).body)
    assert "temperature" not in said
    assert (said["model"], said["top_k"], said["min_p"]) == ("inside", 5, 1)


def test_a_form_is_not_rewritten(rig):
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\na\r\n--x--\r\n'
    got = rig.passes(form, b"/v1/audio/transcriptions", type=b"multipart/form-data; boundary=x")
    assert got.body == form.replace(b"\r\na\r\n", b"\r\ninside\r\n")
