"""Ollama's API: its requests in OpenAI's words, answers in its own, and both through the front."""

import json
import math
import time
from datetime import datetime
from typing import Any

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError, BadRequest, LoadError
from anvil_mux.protocol import ollama
from anvil_mux.proxy.dispatch import Patience
from anvil_mux.scheduler.events import Cause
from tests.fake_engine import SSE_HEAD, Asked, RawClient, Rig, answer_of
from tests.fake_engine import chunk as framed
from tests.protocol.test_completions import called, chunk

USER = {"role": "user", "content": "Hi"}
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n'


def question(path: str, **said: Any) -> dict[str, Any]:
    return ollama.TRANSLATE[path]({"model": "a", **said}).question


def lines(said: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.splitlines()]


# Questions


def test_a_chat_streams_unless_it_says_otherwise():
    assert question("/api/chat", messages=[USER]) == {
        "messages": [USER],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert question("/api/chat", messages=[USER], stream=False) == {"messages": [USER]}


def test_options_are_passed_on_under_their_other_names():
    options = {"temperature": 0, "num_predict": 5, "repeat_penalty": 1.1, "num_ctx": 4096, "stop": ["x"]}
    asked = question("/api/chat", messages=[USER], stream=False, options=options)
    del asked["messages"]
    assert asked == {
        "temperature": 0,
        "max_tokens": 5,
        "repeat_penalty": 1.1,
        "repetition_penalty": 1.1,
        "stop": ["x"],
    }
    endless = question("/api/chat", messages=[USER], stream=False, options={"num_predict": -1})
    assert "max_tokens" not in endless


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"format": "json"}, {"response_format": {"type": "json_object"}}),
        (
            {"format": {"type": "object"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
        ({"format": ""}, {}),
        ({"think": False}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
        ({"think": "high"}, {"reasoning_effort": "high"}),
        ({"think": None}, {}),
    ],
)
def test_format_and_thinking(given, asked):
    assert question("/api/generate", prompt="Hi", stream=False, **given) == {"messages": [USER], **asked}


@pytest.mark.parametrize(
    ("image", "kind"), [("/9j/4AAQ", "jpeg"), ("iVBORw0K", "png"), ("UklGRg", "webp"), ("AAAA", "jpeg")]
)
def test_an_image_becomes_a_data_url_of_its_kind_and_stands_before_the_text(image, kind):
    [message] = question("/api/chat", messages=[{**USER, "images": [image]}])["messages"]
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{image}"}},
        {"type": "text", "text": "Hi"},
    ]


def test_results_of_tools_find_the_calls_that_they_answer():
    call = [{"function": {"name": name, "arguments": {"n": 1}}} for name in ("f", "g")]
    said = [
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": call},
        {"role": "tool", "content": "2", "tool_name": "g"},
        {"role": "tool", "content": "1"},
    ]
    assistant, second, first = question("/api/chat", messages=said)["messages"]
    assert assistant["reasoning_content"] == "hm"
    assert assistant["tool_calls"][1] == {
        "id": "call_2",
        "type": "function",
        "function": {"name": "g", "arguments": '{"n": 1}'},
    }
    assert (second["tool_call_id"], first["tool_call_id"]) == ("call_2", "call_1")


def test_generate_is_a_chat_of_one_message():
    asked = question("/api/generate", prompt="Hi", system="Be brief.", stream=False)
    assert asked == {"messages": [{"role": "system", "content": "Be brief."}, USER]}


def test_a_raw_prompt_or_a_suffix_is_a_completion():
    made = ollama.generate({"model": "a", "prompt": "def f", "suffix": "return x", "stream": False})
    assert (made.path, made.question) == ("/v1/completions", {"prompt": "def f", "suffix": "return x"})
    assert ollama.generate({"model": "a", "prompt": "x", "raw": True}).path == "/v1/completions"


def test_embeddings_of_both_ages():
    assert question("/api/embed", input=["x", "y"], dimensions=8) == {"input": ["x", "y"], "dimensions": 8}
    assert question("/api/embeddings", prompt="x") == {"input": "x"}


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        (0, 0.0),
        ("0", 0.0),
        ("0s", 0.0),
        (0.0, 0.0),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        ("-0s", 0.0),
        (300, 300.0),
        (0.5, 0.5),
        ("300", 300.0),
        ("5m", 300.0),
        ("1h30m0.5s", 5400.5),
        ("+1.5h", 5400.0),
        ("250ms", 0.25),
        ("3µs", 3e-6),
        (None, None),
        ("", None),
    ],
)
def test_keep_alive_is_what_ollama_means_by_it(keep_alive, seconds):
    found = ollama.chat({"model": "a", "messages": [USER], "keep_alive": keep_alive})
    assert found.keep_alive == seconds
    assert ollama.embed({"model": "a", "input": "x", "keep_alive": keep_alive}).keep_alive == seconds


@pytest.mark.parametrize(
    "keep_alive", [9999999999, "9999999999", "9999h", 1e300, math.inf, 10**400, "1" * 64]
)
def test_keep_alive_is_at_most_a_year(keep_alive):
    with pytest.raises(BadRequest, match="`keep_alive` is at most a year"):
        ollama.generate({"model": "a", "prompt": "x", "keep_alive": keep_alive})


@pytest.mark.parametrize("keep_alive", ["5 minutes", "m", "5x", "--1", True, [5], {}, float("nan")])
def test_keep_alive_that_is_no_duration_is_refused(keep_alive):
    with pytest.raises(BadRequest, match="`keep_alive` must be a duration"):
        ollama.generate({"model": "a", "prompt": "x", "keep_alive": keep_alive})


@pytest.mark.parametrize(
    "said",
    [
        {"messages": "Hi"},
        {"messages": [1]},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{**USER, "images": [1]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        {"messages": [USER], "options": 1},
        {"messages": [USER], "format": "xml"},
        {"messages": [USER], "tools": 1},
        {"model": 1},
    ],
)
def test_what_cannot_be_read_is_refused(said):
    with pytest.raises(BadRequest):
        ollama.chat({"model": "a", **said})


@pytest.mark.parametrize("key", ["template", "context"])
def test_what_other_engines_cannot_do_is_refused_and_not_passed_over(key):
    with pytest.raises(BadRequest, match=key):
        ollama.generate({"model": "a", "prompt": "x", key: [1]})


# Answers


def test_a_stream_is_told_line_by_line_with_what_it_took():
    answer = ollama.chat({"model": "a", "messages": [USER]}).answer
    answer.begun(10.0, 4.0)
    first = answer.feed(chunk({"role": "assistant", "reasoning": "hm"}) + chunk({"content": "He"}), 11.0)
    rest = answer.feed(chunk({"content": "llo"}) + chunk({}, "length") + USAGE, 12.0)
    about = {"model": "a", "done": False}
    assert lines(first + rest) == [
        {
            **about,
            "created_at": "1970-01-01T00:00:11.000000Z",
            "message": {"role": "assistant", "content": "", "thinking": "hm"},
        },
        {
            **about,
            "created_at": "1970-01-01T00:00:11.000000Z",
            "message": {"role": "assistant", "content": "He"},
        },
        {
            **about,
            "created_at": "1970-01-01T00:00:12.000000Z",
            "message": {"role": "assistant", "content": "llo"},
        },
    ]
    assert lines(answer.finish(13.0)) == [
        {
            "model": "a",
            "created_at": "1970-01-01T00:00:13.000000Z",
            "message": {"role": "assistant", "content": ""},
            "done": True,
            "done_reason": "length",
            "total_duration": 7_000_000_000,
            "load_duration": 4_000_000_000,
            "prompt_eval_count": 3,
            "prompt_eval_duration": 1_000_000_000,
            "eval_count": 2,
            "eval_duration": 2_000_000_000,
        }
    ]


def test_calls_of_tools_are_told_whole_before_the_end():
    answer = ollama.chat({"model": "a", "messages": [USER]}).answer
    sent = chunk(called(0, '{"a":', name="f")) + chunk(called(0, "1}")) + chunk(called(1, "", name="g"))
    assert answer.feed(sent + chunk({}, "tool_calls"), 1.0) == b""
    told, last = lines(answer.finish(2.0))
    functions = [call["function"] for call in told["message"]["tool_calls"]]
    assert functions == [
        {"index": 0, "name": "f", "arguments": {"a": 1}},
        {"index": 1, "name": "g", "arguments": {}},
    ]
    assert (told["done"], last["done"], last["done_reason"]) == (False, True, "stop")


@pytest.mark.parametrize("index", [0, None])
def test_two_calls_with_one_index_are_two_calls(index):
    answer = ollama.chat({"model": "a", "messages": [USER]}).answer
    for id, name in (("c1", "list"), ("c2", "status")):
        call = {"id": id, "index": index, "function": {"name": name, "arguments": ""}}
        answer.feed(chunk({"tool_calls": [call]}), 1.0)
    answer.feed(chunk({}, "tool_calls"), 1.0)
    told, _ = lines(answer.finish(2.0))
    assert [call["function"]["name"] for call in told["message"]["tool_calls"]] == ["list", "status"]


def test_a_call_that_was_cut_by_num_predict_is_left_out():
    answer = ollama.chat({"model": "a", "messages": [USER]}).answer
    answer.feed(chunk(called(0, '{"a', name="f")) + chunk({}, "length"), 1.0)
    [last] = lines(answer.finish(2.0))
    assert (last["done"], last["done_reason"]) == (True, "length")


@pytest.mark.parametrize("more", [{"raw": True}, {"suffix": "x"}])
def test_images_beside_raw_or_a_suffix_are_refused(more):
    with pytest.raises(BadRequest, match="`images`"):
        ollama.generate({"model": "a", "prompt": "x", "images": ["aGk="], **more})


def test_a_tool_called_with_nonsense_is_an_error():
    answer = ollama.chat({"model": "a", "messages": [USER]}).answer
    answer.feed(chunk(called(0, '{"a', name="f")) + chunk({}, "tool_calls"), 1.0)
    with pytest.raises(BackendError, match="not a JSON object"):
        answer.finish(2.0)


def test_a_whole_answer_is_one_object():
    choice = b'{"message":{"content":"Hello"},"finish_reason":"stop"}'
    body = b'{"choices":[%b],"usage":{"completion_tokens":1}}' % choice
    answer = ollama.generate({"model": "a", "prompt": "Hi", "stream": False}).answer
    answer.begun(1.0, 0.0)
    [said] = lines(answer.whole(body, 2.0))
    assert (said["response"], said["done"], said["done_reason"], said["eval_count"]) == (
        "Hello",
        True,
        "stop",
        1,
    )
    assert "prompt_eval_count" not in said


def test_what_the_engine_measured_itself_is_told():
    timings = b'"timings":{"prompt_ms":20.5,"predicted_ms":3}'
    asked = ollama.chat({"model": "a", "messages": [USER]}).answer
    asked.begun(1.0, 0.0)
    asked.feed(chunk({"content": "Hello"}) + chunk({}, "stop"), 2.0)
    asked.feed(b'data: {"choices":[],%b}\n\n' % timings, 2.0)
    [last] = lines(asked.finish(2.0))
    whole = ollama.chat({"model": "a", "messages": [USER], "stream": False}).answer
    body = b'{"choices":[{"message":{"content":"Hello"},"finish_reason":"stop"}],%b}' % timings
    for said in (last, *lines(whole.whole(body, 2.0))):
        assert (said["prompt_eval_duration"], said["eval_duration"]) == (20_500_000, 3_000_000)


def test_how_long_the_prompt_of_a_whole_answer_took_is_not_guessed():
    answer = ollama.chat({"model": "a", "messages": [USER], "stream": False}).answer
    answer.begun(1.0, 0.0)
    [said] = lines(answer.whole(b'{"choices":[{"message":{"content":"Hello"}}]}', 2.0))
    assert "prompt_eval_duration" not in said
    assert said["eval_duration"] == 1_000_000_000


@pytest.mark.parametrize("odd", ["NaN", "-Infinity", "1e999", "null", "true", '"1"', "[1]"])
@pytest.mark.parametrize("ask", [ollama.embed, ollama.embeddings])
def test_embeddings_that_are_no_numbers_are_an_error(ask, odd):
    body = f'{{"data":[{{"embedding":[1, 0.5, -1e30]}},{{"embedding":[0.5,{odd}]}}]}}'.encode()
    with pytest.raises(BackendError, match="no lists of numbers"):
        ask({"model": "a", "input": "x", "prompt": "x"}).answer.whole(body, 0.0)


def test_embeddings_come_back_in_both_shapes():
    body = b'{"data":[{"embedding":[1.0]},{"embedding":[2.0]}],"usage":{"prompt_tokens":2}}'
    said = json.loads(ollama.embed({"model": "a", "input": ["x", "y"]}).answer.whole(body, 0.0))
    assert (said["embeddings"], said["prompt_eval_count"]) == ([[1.0], [2.0]], 2)
    assert json.loads(ollama.embeddings({"model": "a", "prompt": "x"}).answer.whole(body, 0.0)) == {
        "embedding": [1.0]
    }


# Through the front


def ask(rig: Rig, path: str, **said: object) -> RawClient:
    client = rig.client()
    client.post(json.dumps(said).encode(), path=path.encode())
    return client


def speak(_: Asked) -> bytes:
    return SSE_HEAD + framed(chunk({"content": "Hello"})) + framed(chunk({}, "stop") + USAGE) + b"0\r\n\r\n"


def test_a_chat_reaches_the_engine_in_its_own_words_and_comes_back_in_lines(rig):
    client = ask(rig, "/api/chat", model="org/b:latest", messages=[USER])
    asked = rig.other.next()
    assert asked.head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"\r\naccept-encoding: identity\r\n" in asked.head.lower()
    assert json.loads(asked.body)["model"] == "b-inside"
    asked.send(speak(asked))
    answer = client.read()
    assert answer.header(b"content-type") == b"application/x-ndjson"
    said = lines(answer.body)
    assert [line["message"]["content"] for line in said] == ["Hello", ""]
    assert (said[0]["model"], said[-1]["done"], answer.clean) == ("org/b:latest", True, True)
    record = rig.events.record()
    assert (record.model, record.status, record.path) == ("org/b", 200, "/api/chat")


def test_the_first_line_comes_before_the_engine_has_ended(rig):
    client = ask(rig, "/api/generate", model="a", prompt="Hi")
    asked = rig.engine.next()
    asked.send(SSE_HEAD, framed(chunk({"content": "He"})))
    assert b'"response":"He"' in client.read_until(b'"done":false}\n\r\n')
    asked.send(framed(chunk({"content": "llo"}, "stop")), b"0\r\n\r\n")
    body, clean = client.read_chunks()
    assert (lines(body)[-1]["done"], clean) == (True, True)


def test_connections_are_kept_on_both_sides(rig):
    rig.engine.answer = speak
    client = rig.client()
    for _ in range(3):
        assert client.ask(json.dumps({"model": "a", "messages": [USER]}).encode(), path=b"/api/chat").clean
    assert len(rig.engine.connections) == 1


def test_an_engine_that_dies_in_mid_stream_is_told_in_a_line_and_the_answer_does_not_end(rig):
    client = ask(rig, "/api/chat", model="a", messages=[USER])
    asked = rig.engine.next()
    asked.send(SSE_HEAD, framed(chunk({"content": "He"})))
    client.read_until(b"\n\r\n")
    asked.close()
    body, clean = client.read_chunks()
    assert ("error" in lines(body)[-1], clean) == (True, False)
    assert rig.events.record().code == "backend_unavailable"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/api/chat", {"messages": [USER]}),
        ("/api/generate", {"prompt": "Hi"}),
        ("/api/embed", {"input": "Hi"}),
    ],
)
@pytest.mark.parametrize("length", [b"Content-Length: 0\r\n", b"Connection: close\r\n"])
def test_an_engine_that_says_nothing_has_not_answered(rig, path, said, length):
    client = ask(rig, path, model="a", stream=False, **said)
    asked = rig.engine.next()
    asked.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n%b\r\n" % length)
    asked.close()
    answer = client.read()
    assert answer.status == 502
    assert "answered with nothing" in json.loads(answer.body)["error"]


def test_an_engine_that_stops_without_a_reason_has_not_ended_its_answer(rig):
    client = ask(rig, "/api/chat", model="a", messages=[USER])
    rig.engine.next().send(SSE_HEAD, framed(chunk({"content": "He"})), b"0\r\n\r\n")
    answer = client.read()
    assert ("error" in lines(answer.body)[-1], answer.clean) == (True, False)


@pytest.mark.parametrize("stream", [True, False])
def test_an_engines_refusal_keeps_its_status_and_words(rig, stream):
    client = ask(rig, "/api/chat", model="a", messages=[USER], stream=stream)
    said = b'{"error":{"message":"too long"}}'
    rig.engine.next().send(b"HTTP/1.1 400 X\r\nContent-Length: %d\r\n\r\n" % len(said), said)
    answer = client.read()
    assert (answer.status, json.loads(answer.body)) == (400, {"error": "too long"})


def test_a_severed_stream_says_so(make_rig):
    rig = make_rig(drain_timeout=0.0)
    client = ask(rig, "/api/chat", model="a", messages=[USER])
    rig.engine.next().send(SSE_HEAD, framed(chunk({"content": "He"})))
    client.read_until(b"\n\r\n")
    other = ask(rig, "/api/chat", model="org/b", messages=[USER])
    body, clean = client.read_chunks()
    assert ("was evicted for" in lines(body)[-1]["error"], clean) == (True, False)
    asked = rig.other.next()
    asked.send(speak(asked))
    assert other.read().clean


def test_a_waiting_stream_hears_spaces_and_then_its_lines(make_rig):
    rig = make_rig(patience=Patience(grace=0.0, comment_every=0.0, chunk_every=0.0))
    rig.engine.answer = speak
    rig.mechanism.gate.clear()
    client = ask(rig, "/api/chat", model="a", messages=[USER])
    assert b"application/x-ndjson" in client.read_until(b"\r\n\r\n")
    assert client.read_until(b"\r\n \r\n") == b"1\r\n \r\n"
    rig.mechanism.gate.set()
    body, clean = client.read_chunks()
    assert [line["message"]["content"] for line in lines(body.strip())] == ["Hello", ""]
    assert clean


def test_a_load_that_fails_after_the_spaces_is_a_line(make_rig):
    rig = make_rig(patience=Patience(grace=0.0, comment_every=0.0, chunk_every=0.0))
    rig.mechanism.gate.clear()
    client = ask(rig, "/api/generate", model="a", prompt="Hi")
    client.read_until(b"\r\n \r\n")
    rig.mechanism.failure = LoadError("no such file")
    rig.mechanism.gate.set()
    body, clean = client.read_chunks()
    assert ("no such file" in json.loads(body)["error"], clean) == (True, False)


def test_asking_nothing_loads_and_keeping_alive_for_nothing_unloads(rig):
    loaded = json.loads(ask(rig, "/api/generate", model="a").read().body)
    assert (loaded["response"], loaded["done"], loaded["done_reason"]) == ("", True, "load")
    rig.events.wait("ready")
    assert [each["name"] for each in rig.client().json(b"/api/ps")["models"]] == ["a"]
    said = json.loads(ask(rig, "/api/chat", model="a", messages=[], keep_alive=0).read().body)
    assert said["done_reason"] == "unload"
    rig.events.wait("stopped")
    assert rig.client().json(b"/api/ps") == {"models": []}
    assert rig.engine.asked.empty()


def test_keep_alive_of_nothing_puts_out_what_others_use_once_they_are_done(rig):
    streaming = ask(rig, "/api/chat", model="a", messages=[USER])
    asked = rig.engine.next()
    asked.send(SSE_HEAD, framed(chunk({"content": "He"})))
    streaming.read_until(b"\n\r\n")
    assert ask(rig, "/api/chat", model="a", keep_alive=0).read().status == 200
    rig.events.record()
    assert not rig.events.of("draining")
    asked.send(framed(chunk({}, "stop")), b"0\r\n\r\n")
    assert streaming.read_chunks()[1]
    rig.events.wait("stopped")


def test_what_an_engine_has_no_part_for_is_not_asked_again(rig):
    client = ask(rig, "/api/embed", model="a", input="x")
    said = b'{"error":{"code":501,"message":"start it with --embeddings","type":"not_supported_error"}}'
    rig.engine.next().send(b"HTTP/1.1 501 No\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))
    answer = client.read()
    assert (answer.status, answer.header(b"x-should-retry")) == (501, b"false")
    assert json.loads(answer.body)["error"] == "the engine of a cannot do this: start it with --embeddings"


def expires(rig: Rig) -> float:
    """In how many seconds the one resident model is to be unloaded, as /api/ps says."""
    (model,) = rig.client().json(b"/api/ps")["models"]
    at = datetime.strptime(model["expires_at"], "%Y-%m-%dT%H:%M:%S.%f%z")
    return at.timestamp() - time.time()


def test_keep_alive_takes_the_place_of_the_ttl_until_another_is_given(make_rig):
    rig = make_rig(backends=(Backend("a", "a", ("0",), ttl=1000.0),))
    rig.engine.answer = speak
    for keep_alive, least, most in (
        (None, 900, 1000),
        ("1h", 3500, 3600),
        (None, 3500, 3600),
        (-1, ollama.FOR_EVER - 100, ollama.FOR_EVER),
        (60, 0, 60),
    ):
        said = {} if keep_alive is None else {"keep_alive": keep_alive}
        assert ask(rig, "/api/chat", model="a", messages=[USER], **said).read().status == 200
        assert least < expires(rig) <= most, keep_alive
    assert ask(rig, "/api/embed", model="a", keep_alive="2h").read().status == 200
    assert 7100 < expires(rig) <= 7200


def test_keep_alive_in_the_past_of_a_load_is_forgotten_by_the_next(make_rig):
    rig = make_rig(backends=(Backend("a", "a", ("0",), ttl=1000.0),))
    assert ask(rig, "/api/generate", model="a", keep_alive="1h").read().status == 200
    assert ask(rig, "/api/generate", model="a", keep_alive=0).read().status == 200
    rig.events.wait("stopped")
    assert ask(rig, "/api/generate", model="a").read().status == 200
    assert expires(rig) <= 1000


def test_a_model_goes_when_its_keep_alive_ends_and_not_before_its_answer(rig):
    streaming = ask(rig, "/api/chat", model="a", messages=[USER], keep_alive="1ms")
    asked = rig.engine.next()
    asked.send(SSE_HEAD, framed(chunk({"content": "He"})))
    streaming.read_until(b"\n\r\n")
    assert not rig.events.of("draining")
    asked.send(framed(chunk({}, "stop")), b"0\r\n\r\n")
    assert streaming.read_chunks()[1]
    assert rig.events.wait("draining").cause == Cause("idle", seconds=0.001)


def test_keep_alive_keeps_no_model_from_being_evicted_for_another(rig):
    assert ask(rig, "/api/generate", model="a", keep_alive=-1).read().status == 200
    assert ask(rig, "/api/generate", model="org/b").read().status == 200
    assert [event.backend for event in rig.events.of("stopped")] == ["a"]


def test_unloading_loads_nothing(rig):
    assert ask(rig, "/api/generate", model="a", keep_alive="0s").read().status == 200
    assert not rig.events.of("loading")


def test_the_models_are_told_from_memory(rig):
    client = rig.client()
    assert [each["model"] for each in client.json(b"/api/tags")["models"]] == ["a", "org/b"]
    assert client.json(b"/api/version") == {"version": ollama.VERSION}
    client.post(b'{"name":"alias:latest"}', path=b"/api/show")
    shown = json.loads(client.read().body)
    assert shown["model_info"]["general.basename"] == "a"
    assert shown["capabilities"] == ["completion", "tools", "vision", "thinking"]
    assert client.get(b"/api/tags", b"HEAD").status == 200
    assert not rig.events.of("queued")


@pytest.mark.parametrize(
    ("method", "path"),
    [(b"POST", b"/api/" + verb) for verb in (b"pull", b"push", b"create", b"copy")]
    + [(b"DELETE", b"/api/delete")],
)
def test_what_is_not_offered_says_so_in_ollamas_shape(rig, method, path):
    answer = rig.client().get(path, method)
    assert answer.status == 501
    assert "is not available" in json.loads(answer.body)["error"]


def test_an_unknown_model_is_told_in_ollamas_shape(rig):
    answer = ask(rig, "/api/chat", model="nobody:latest", messages=[USER]).read()
    assert answer.status == 404
    assert "Known models: a, alias, org/b" in json.loads(answer.body)["error"]


def test_whole_answer_of_an_engine_that_does_not_stream_is_the_stream(rig):
    client = ask(rig, "/api/chat", model="a", messages=[USER])
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": "whole", "tool_calls": [call]}
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    whole = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
    rig.engine.next().send(answer_of(json.dumps(whole).encode()))
    answer = client.read()
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert answer.status == 200
    assert "".join(line["message"].get("content", "") for line in lines) == "whole"
    [[sent]] = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    assert (sent["function"]["name"], sent["function"]["arguments"]) == ("f", {"x": 1})
    assert (lines[-1]["done"], lines[-1]["prompt_eval_count"], lines[-1]["eval_count"]) == (True, 7, 3)
    record = rig.events.record()
    assert (record.status, record.code, record.prompt_tokens, record.tokens) == (200, "", 7, 3)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error":{"message":"no such"}}', "The engine reports an error: no such"),
        (b"hello", "did not answer with a stream"),
        (b'{"choices":[{"message":{"content":"cut"}}]}', "broke off"),
    ],
)
def test_what_cannot_be_a_stream_is_an_error(rig, body, reason):
    client = ask(rig, "/api/chat", model="a", messages=[USER])
    rig.engine.next().send(answer_of(body))
    answer = client.read()
    assert answer.status == 502
    assert reason in json.loads(answer.body)["error"]
