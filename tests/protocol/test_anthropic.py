"""Anthropic's API in front of engines that lack it; those that have it are asked in the client's words."""

import json
from typing import Any

import pytest

from anvil_mux.errors import BackendError, BadRequest
from anvil_mux.protocol import anthropic
from tests.fake_engine import JSON_OK, SSE_HEAD, RawClient, Rig
from tests.fake_engine import chunk as framed
from tests.protocol.test_completions import called, chunk

USER = {"role": "user", "content": "Hi"}
NO_ROUTE = b'HTTP/1.1 404 Not Found\r\nContent-Length: 22\r\n\r\n{"detail":"Not Found"}'


def question(**said: Any) -> dict[str, Any]:
    return anthropic.messages({"model": "a", "max_tokens": 9, **said}).question


def told(said: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name."""
    events = []
    for block in said.decode().split("\n\n")[:-1]:
        name, data = block.splitlines()
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


# Questions


def test_a_conversation_in_openais_words():
    said = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]}],
        "stop_sequences": ["END"],
        "temperature": 0,
    }
    assert question(**said) == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "content": "Yes?"},
        ],
        "max_tokens": 9,
        "stop": ["END"],
        "temperature": 0,
    }


def test_a_stream_asks_for_its_usage():
    asked = question(messages=[USER], stream=True)
    assert (asked["stream"], asked["stream_options"]) == (True, {"include_usage": True})


def test_calls_of_tools_and_their_results():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}}
    result = [{"type": "text", "text": "42"}, image]
    said = [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"n": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Go on."},
                {"type": "tool_result", "tool_use_id": "t1", "content": result},
            ],
        },
    ]
    function = {"name": "f", "arguments": '{"n": 1}'}
    assert question(messages=said)["messages"] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "42"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Go on."},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
            ],
        },
    ]


@pytest.mark.parametrize(
    ("choice", "asked"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        (None, {}),
    ],
)
def test_tools_and_which_of_them(choice, asked):
    tool = {"name": "f", "description": "F.", "input_schema": {"type": "object"}}
    found = question(messages=[USER], tools=[tool], tool_choice=choice)
    function = {"name": "f", "description": "F.", "parameters": {"type": "object"}}
    assert found.pop("tools") == [{"type": "function", "function": function}]
    assert found == {"messages": [USER], "max_tokens": 9, **asked}


def test_thinking_effort_and_form():
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    found = question(
        messages=[USER], thinking={"type": "disabled"}, output_config={"effort": "low", "format": schema}
    )
    assert found["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    assert found["reasoning_effort"] == "low"
    assert found["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    "said",
    [
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
        {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": [USER], "system": [{"type": "image"}]},
        {"messages": 1},
        {"messages": [{"role": "user", "content": 1}]},
        {"model": 1},
    ],
)
def test_what_cannot_be_done_is_refused_and_not_passed_over(said):
    with pytest.raises(BadRequest):
        question(**said)


# Answers


def test_a_stream_builds_a_message_block_by_block():
    answer = anthropic.messages({"model": "a", "messages": [USER], "stream": True}).answer
    answer.begun(1.0, 0.0)
    begin: dict[str, object] = {
        "tool_calls": [{"index": 0, "id": "t1", "function": {"name": "f", "arguments": ""}}]
    }
    sent = chunk({"reasoning": "hm"}) + chunk({"content": "He"}) + chunk({"content": "llo"}) + chunk(begin)
    sent += chunk(called(0, '{"n":1}')) + chunk({}, "tool_calls")
    sent += b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":4}}\n\n'
    events = told(answer.feed(sent, 2.0) + answer.finish(3.0))
    assert events.pop(0)["message"] == {
        "id": "msg_3b9aca00",
        "type": "message",
        "role": "assistant",
        "model": "a",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }
    block, text, tool = "content_block", {"type": "text", "text": ""}, {"type": "tool_use", "id": "t1"}
    thought = {"type": "thinking", "thinking": "", "signature": ""}
    assert events == [
        {"type": f"{block}_start", "index": 0, block: thought},
        {"type": f"{block}_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": f"{block}_stop", "index": 0},
        {"type": f"{block}_start", "index": 1, block: text},
        {"type": f"{block}_delta", "index": 1, "delta": {"type": "text_delta", "text": "He"}},
        {"type": f"{block}_delta", "index": 1, "delta": {"type": "text_delta", "text": "llo"}},
        {"type": f"{block}_stop", "index": 1},
        {"type": f"{block}_start", "index": 2, block: {**tool, "name": "f", "input": {}}},
        {
            "type": f"{block}_delta",
            "index": 2,
            "delta": {"type": "input_json_delta", "partial_json": '{"n":1}'},
        },
        {"type": f"{block}_stop", "index": 2},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"input_tokens": 5, "output_tokens": 4},
        },
        {"type": "message_stop"},
    ]


def test_two_calls_are_two_blocks():
    answer = anthropic.messages({"model": "a", "messages": [USER], "stream": True}).answer
    events = told(answer.feed(chunk(called(0, "{}", name="f")) + chunk(called(1, "{}", name="g")), 1.0))
    blocks = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    assert [(block["id"], block["name"]) for block in blocks] == [("call_0", "f"), ("call_1", "g")]


def test_a_whole_answer_is_a_message():
    call = {"id": "t1", "function": {"name": "f", "arguments": '{"n":1}'}}
    message = {"reasoning_content": "hm", "content": "So:", "tool_calls": [call, {**call, "id": "t2"}]}
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    body = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": usage}
    answer = anthropic.messages({"model": "a", "messages": [USER]}).answer
    answer.begun(1.0, 0.0)
    said = json.loads(answer.whole(json.dumps(body).encode(), 2.0))
    assert said["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "So:"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"n": 1}},
        {"type": "tool_use", "id": "t2", "name": "f", "input": {"n": 1}},
    ]
    assert (said["stop_reason"], said["id"]) == ("tool_use", "msg_3b9aca00")
    assert said["usage"] == {"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 4}


@pytest.mark.parametrize(
    ("choice", "reason", "sequence"),
    [
        ({"finish_reason": "stop"}, "end_turn", None),
        ({"finish_reason": "length"}, "max_tokens", None),
        ({"finish_reason": "content_filter"}, "refusal", None),
        ({"finish_reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "stop", "stop_reason": 7}, "end_turn", None),
    ],
)
def test_why_it_ended(choice, reason, sequence):
    body = json.dumps({"choices": [{"message": {"content": "x"}, **choice}]}).encode()
    said = json.loads(anthropic.messages({"model": "a", "messages": [USER]}).answer.whole(body, 1.0))
    assert (said["stop_reason"], said["stop_sequence"]) == (reason, sequence)


CUT_CALL = {"id": "c1", "index": 0, "function": {"name": "f", "arguments": '{"path": "/tm'}}


def test_whole_answer_with_a_cut_call_is_max_tokens_without_the_call():
    choice = {"message": {"content": "Look:", "tool_calls": [CUT_CALL]}, "finish_reason": "length"}
    answer = anthropic.messages({"model": "m", "messages": []}).answer
    answer.begun(1.0, 0.0)
    said = json.loads(answer.whole(json.dumps({"choices": [choice]}).encode(), 2.0))
    assert said["stop_reason"] == "max_tokens"
    assert said["content"] == [{"type": "text", "text": "Look:"}]


def test_stream_with_a_cut_call_is_max_tokens():
    answer = anthropic.messages({"model": "m", "messages": [], "stream": True}).answer
    answer.begun(1.0, 0.0)
    waiting = {"index": 1, "id": "c2", "function": {"name": "g", "arguments": "{"}}
    events = told(answer.feed(chunk({"tool_calls": [CUT_CALL, waiting]}), 1.0))
    events += told(answer.feed(chunk({}, "length"), 1.0) + answer.finish(2.0))
    kinds = [event["type"] for event in events]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_alternating_calls_are_whole_blocks_one_after_the_other():
    answer = anthropic.messages({"model": "m", "messages": [], "stream": True}).answer
    answer.begun(1.0, 0.0)
    begin = [{"index": n, "id": f"c{n}", "function": {"name": "f", "arguments": '{"a"'}} for n in (0, 1)]
    sent = chunk({"tool_calls": begin})
    sent += chunk({"tool_calls": [{"index": n, "function": {"arguments": f":{n}}}"}} for n in (1, 0)]})
    events = told(answer.feed(sent + chunk({}, "tool_calls"), 1.0) + answer.finish(2.0))
    blocks: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks[event["index"]] = event["content_block"]["id"] + " "
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            blocks[event["index"]] += event["delta"]["partial_json"]
    assert blocks == {0: 'c0 {"a":0}', 1: 'c1 {"a":1}'}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_tool_called_with_nonsense_is_an_error():
    call = {"id": "t1", "function": {"name": "f", "arguments": "[1"}}
    body = json.dumps({"choices": [{"message": {"tool_calls": [call]}}]}).encode()
    with pytest.raises(BackendError, match="not a JSON object"):
        anthropic.messages({"model": "a", "messages": [USER]}).answer.whole(body, 1.0)


# Through the front


def ask(rig: Rig, path: str = "/v1/messages", **said: object) -> RawClient:
    client = rig.client()
    body = {"model": "a", "max_tokens": 9, "messages": [USER], **said}
    client.post(json.dumps(body).encode(), path=path.encode())
    return client


def test_an_engine_that_has_the_route_is_asked_in_the_clients_own_words(rig):
    client = rig.client()
    body = b'{"model": "a",  "cache_control": {}}'
    client.post(body, path=b"/v1/messages?beta=true", extra=b"anthropic-beta: x\r\n")
    asked = rig.engine.next()
    assert asked.head.startswith(b"POST /v1/messages?beta=true HTTP/1.1\r\n")
    assert b"\r\nanthropic-beta: x\r\n" in asked.head
    assert asked.body == body
    asked.send(JSON_OK)
    assert client.read().body == b"{}"


def test_an_engine_that_lacks_the_route_is_asked_in_its_own_words_and_at_once_the_next_time(rig):
    answer = b'{"choices":[{"message":{"content":"Hello"},"finish_reason":"stop"}]}'
    for number in range(2):
        client = ask(rig)
        if number == 0:
            rig.engine.next().send(NO_ROUTE)
        asked = rig.engine.next()
        assert asked.head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        asked.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer), answer)
        said = client.read()
        assert json.loads(said.body)["content"] == [{"type": "text", "text": "Hello"}]
        assert said.header(b"request-id")
        assert rig.events.record(number + 1).status == 200  # by then it is remembered


def test_an_engine_that_knows_neither_may_learn_the_route_yet(rig):
    for _ in range(2):
        client = ask(rig)
        for path in (b"/v1/messages", b"/v1/chat/completions"):
            asked = rig.engine.next()
            assert asked.head.startswith(b"POST %b " % path)
            asked.send(NO_ROUTE)
        answer = client.read()
        assert answer.status == 501
        assert "it has no /v1/chat/completions" in json.loads(answer.body)["error"]["message"]


def test_a_translated_stream_ends_as_a_message_ends_and_its_tokens_are_known(rig):
    client = ask(rig, stream=True)
    rig.engine.next().send(NO_ROUTE)
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":4}}\n\n'
    rig.engine.next().send(
        SSE_HEAD,
        *(framed(chunk({"content": "He"})), framed(chunk({}, "stop")), framed(usage)),
        b"0\r\n\r\n",
    )
    answer = client.read()
    assert answer.header(b"content-type") == b"text/event-stream"
    assert told(answer.body)[-1] == {"type": "message_stop"}
    assert (rig.events.record(1).tokens, rig.events.record(1).prompt_tokens) == (4, 5)


def test_a_translated_stream_that_breaks_off_ends_with_an_error_event(rig):
    client = ask(rig, stream=True)
    rig.engine.next().send(NO_ROUTE)
    asked = rig.engine.next()
    asked.send(SSE_HEAD, framed(chunk({"content": "He"})))
    client.read_until(b'"He"}}\n\n\r\n')
    asked.close()
    body, clean = client.read_chunks()
    assert b"event: error\n" in body
    assert not clean


def test_tokens_are_counted_by_the_engine(rig):
    client = ask(rig, "/v1/messages/count_tokens", tools=[{"name": "f", "input_schema": {}}])
    rig.engine.next().send(NO_ROUTE)
    asked = rig.engine.next()
    assert asked.head.startswith(b"POST /tokenize HTTP/1.1\r\n")
    assert json.loads(asked.body)["messages"] == [USER]
    asked.send(b'HTTP/1.1 200 OK\r\nContent-Length: 23\r\n\r\n{"count":7,"tokens":[]}')
    assert client.read().body == b'{"input_tokens":7}'


def test_an_engine_that_cannot_count_is_no_estimate(rig):
    client = ask(rig, "/v1/messages/count_tokens")
    for _ in range(2):
        rig.engine.next().send(NO_ROUTE)
    assert client.read().status == 501


def test_an_engine_that_counts_no_messages_is_not_asked_again_and_again(rig):
    client = ask(rig, "/v1/messages/count_tokens")
    rig.engine.next().send(NO_ROUTE)
    rig.engine.next().send(b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"tokens":[]}')
    answer = client.read()
    assert (answer.status, answer.header(b"x-should-retry")) == (501, b"false")


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"content":"hi"}', b'{"content":[1]}'])
def test_what_is_not_a_message_does_not_become_events(body):
    assert anthropic.as_events(body) is None
