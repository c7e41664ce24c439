"""The last requests with what was asked and answered, if that is wanted, and without keys."""

import json
from dataclasses import replace
from typing import Any

import pytest

from anvil_mux.cli.main import main
from anvil_mux.config.keys import Keyring
from anvil_mux.proxy.reply import CAPTURED_BYTES, redacted
from anvil_mux.telemetry.accesslog import Served
from tests.fake_engine import JSON_OK, SSE_HEAD, Rig, answer_of, chunk, keyring, shows

LAST = b"0\r\n\r\n"


def ask(
    rig: Rig, body: bytes, *, id: str = "one", path: bytes = b"/v1/chat/completions", key: str = ""
) -> bytes:
    """The answer to a request, once it is on record."""
    before = sum(isinstance(each, Served) for each in rig.events.seen)
    extra = b"X-Request-ID: %b\r\n" % id.encode() + (shows(key) if key else b"")
    answer = rig.ask(body, path, extra).body
    rig.events.record(before + 1)
    return answer


def kept(rig: Rig, id: str = "", key: str = "") -> Any:
    query = b"?id=%b" % id.encode() if id else b""
    return rig.json(b"/requests" + query, shows(key) if key else b"")


def test_nothing_is_kept_unless_that_is_wanted(rig):
    rig.engine.answer = lambda _: JSON_OK
    ask(rig, b'{"model":"a"}')
    assert kept(rig) == {"capture": 0, "requests": []}
    error = kept(rig, "one")["error"]
    assert error["message"] == (
        "No request one is kept: none is; `capture: 50` in x-anvil keeps the last 50."
    )


def test_the_last_so_many_are_kept_with_their_bodies(make_rig):
    rig = make_rig(capture=2)
    rig.engine.answer = lambda _: JSON_OK
    for number in "123":
        ask(rig, b'{"model":"alias","n":%s}' % number.encode(), id=number)
    assert [each["id"] for each in kept(rig)["requests"]] == ["2", "3"]
    one = kept(rig, "3")
    assert (one["question"], one["answer"], one["status"]) == ('{"model":"alias","n":3}', "{}", 200)
    assert (one["model"], one["backend"], one["path"]) == ("a", "a", "/v1/chat/completions")
    assert not any(one[each] for each in ("question_is_cut", "answer_is_cut", "question_is_form"))
    assert kept(rig, "1")["error"]["message"] == "No request 1 is kept: the last 2 are."


def test_a_stream_is_kept_without_its_framing(make_rig):
    rig = make_rig(capture=1)
    events = [b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"]
    whole = b"".join(map(chunk, events)) + LAST
    client, asked = rig.asked(b'{"model":"a","stream":true}', path=b"/v1/chat/completions")
    asked.send(SSE_HEAD + whole[:9])
    client.read_until(whole[4:9])
    asked.send(whole[9:])
    client.read_until(LAST)
    assert rig.events.record().status == 200
    [about] = kept(rig)["requests"]
    assert kept(rig, about["id"])["answer"] == b"".join(events).decode()


def test_an_answer_in_another_api_is_kept_as_its_client_got_it(make_rig):
    rig = make_rig(capture=1)
    said = b'{"choices":[{"message":{"content":"hello"},"finish_reason":"stop"}]}'
    rig.engine.answer = lambda _: answer_of(said)
    body = b'{"model":"a","stream":false,"messages":[{"role":"user","content":"hi"}]}'
    ask(rig, body, path=b"/api/chat")
    assert json.loads(kept(rig, "one")["answer"])["message"]["content"] == "hello"


def test_an_error_is_kept(make_rig):
    rig = make_rig(capture=1)
    rig.mux.facts.paused(None)
    ask(rig, b'{"model":"a"}')
    one = kept(rig, "one")
    assert (one["status"], one["code"]) == (503, "paused")
    assert json.loads(one["answer"])["error"]["code"] == "paused"


def test_of_long_bodies_the_beginning_is_kept(make_rig):
    rig = make_rig(capture=1)
    said = b"x" * (CAPTURED_BYTES + 1)
    rig.engine.answer = lambda _: answer_of(said)
    ask(rig, b'{"model":"a","long":"%s"}' % said)
    one = kept(rig, "one")
    assert (len(one["question"]), one["question_is_cut"]) == (CAPTURED_BYTES, True)
    assert (len(one["answer"]), one["answer_is_cut"]) == (CAPTURED_BYTES, True)


def test_a_form_is_not_kept(make_rig):
    rig = make_rig(capture=1)
    rig.engine.answer = lambda _: JSON_OK
    body = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\na\r\n--x--\r\n'
    kind = b"multipart/form-data; boundary=x"
    assert rig.ask(body, b"/v1/audio/transcriptions", b"X-Request-ID: one\r\n", kind).status == 200
    rig.events.record()
    one = kept(rig, "one")
    assert (one["question"], one["question_is_form"], one["answer"]) == ("", True, "{}")


def test_it_takes_a_key_with_the_right_and_no_key_is_kept(make_rig, monkeypatch, capsys):
    keys: Keyring = keyring("key-of-alice name=alice models=* state;key-of-root name=root")
    rig = make_rig(capture=1, keys=keys)
    rig.engine.answer = lambda _: JSON_OK
    ask(rig, b'{"model":"a","tools":[{"headers":{"X":"key-of-alice"}}]}', key="key-of-alice")
    assert kept(rig, "one", key="key-of-alice")["error"]["code"] == "forbidden"
    one = kept(rig, "one", key="key-of-root")
    assert one["key"] == "alice"
    assert one["question"] == '{"model":"a","tools":[{"headers":{"X":"***"}}]}'
    monkeypatch.setenv("ANVIL_API_KEY", "key-of-root")
    url = "http://{}:{}".format(*rig.address)
    assert main(["requests", "--url", url]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:1] == ["one"]
    assert main(["requests", "one", "--url", url]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# asked: /v1/chat/completions of a, request one, key alice\n{\n")
    assert "# answered: 200 in " in shown
    assert main(["requests", "two", "--url", url]) == 1
    assert "No request two is kept: the last 1 are." in capsys.readouterr().err


def test_without_capture_the_command_says_how_to_have_it(rig, capsys):
    assert main(["requests", "--url", "http://{}:{}".format(*rig.address)]) == 0
    assert "`capture: 50` at the top level of x-anvil keeps the last 50" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        ('{"api_key": "abc", "x": 1}', '{"api_key": "***", "x": 1}'),
        ('{"OPENAI_API_KEY":"a\\"bc"}', '{"OPENAI_API_KEY":"***"}'),
        ('{"headers": {"Authorization" : "Bearer abc"}}', '{"headers": {"Authorization" : "***"}}'),
        ('{"access_token": "cut off', '{"access_token": "***"'),
        ('{"client_secret": "a\\\\"}', '{"client_secret": "***"}'),
        ('{"content": "curl -H Bearer abcdefgh123"}', '{"content": "curl -H Bearer ***"}'),
        ('{"content": "export X=sk-proj-1234567890"}', '{"content": "export X=sk-***"}'),
        ('{"max_tokens": 5, "token": "the"}', '{"max_tokens": 5, "token": "the"}'),
        ('{"content": "risk-takers and task-forces"}', '{"content": "risk-takers and task-forces"}'),
    ],
)
def test_what_looks_like_a_key_is_not_kept(body, seen):
    assert redacted(body.encode(), []) == seen


def test_a_reload_keeps_fewer_or_none(make_rig):
    rig = make_rig(capture=3)
    rig.engine.answer = lambda _: JSON_OK
    for number in "123":
        ask(rig, b'{"model":"a"}', id=number)
    rig.handler.reconfigure(replace(rig.config, capture=1), Keyring())
    assert [each["id"] for each in kept(rig)["requests"]] == ["3"]
    rig.handler.reconfigure(replace(rig.config, capture=0), Keyring())
    assert kept(rig) == {"capture": 0, "requests": []}


def test_check_says_that_bodies_are_kept(tmp_path, capsys):
    file = tmp_path / "compose.yaml"
    file.write_text("x-anvil: {capture: 50}\nservices: {a: {image: x, x-anvil: {port: 1}}}")
    assert main(["check", str(file)]) == 0
    assert "capture: what is asked and answered in the last 50 requests is kept" in capsys.readouterr().err
    file.write_text("x-anvil: {capture: lots}\nservices: {a: {image: x, x-anvil: {port: 1}}}")
    assert main(["check", str(file)]) == 78
    assert "capture: must be a whole number from 0 to 1000, not 'lots'" in capsys.readouterr().err
