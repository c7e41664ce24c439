"""What engines answer, in parts: whole and in pieces, in the ways that engines differ."""

import json
import math
from contextlib import suppress

import pytest

from anvil_mux.errors import BackendError, BadRequest
from anvil_mux.protocol import anthropic, ollama
from anvil_mux.protocol.completions import (
    ChunkReader,
    Ending,
    Part,
    Translation,
    parse,
    parts_of,
)


def chunk(delta: dict[str, object], finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"choices": [choice], **more}).encode()


def called(index: int, arguments: str, **more: object) -> dict[str, object]:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments, **more}}]}


def test_a_stream_is_read_in_whatever_pieces_it_comes():
    sent = chunk({"role": "assistant", "content": ""}) + b": beat\n" + chunk({"content": "Grüße"})
    sent += (
        chunk({}, "stop") + b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\r\n\r\n'
    )
    sent += b"data: [DONE]\n\n"
    for size in (1, 7, len(sent)):
        parts = ChunkReader()
        pieces = (sent[start : start + size] for start in range(0, len(sent), size))
        assert [part for piece in pieces for part in parts.feed(piece)] == [Part("text", "Grüße")]
        assert parts.finish() == Ending("stop", prompt_tokens=3, completion_tokens=1)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thinking_has_two_names(key):
    assert list(ChunkReader().feed(chunk({key: "hm", "content": None}))) == [Part("thinking", "hm")]


def test_calls_of_tools_come_in_fragments():
    parts = ChunkReader()
    begin: dict[str, object] = {
        "tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": ""}}]
    }
    sent = chunk(begin) + chunk(called(0, '{"a"')) + chunk(called(0, ":1}"))
    sent += chunk(called(1, "{}", name="g")) + chunk({}, "stop")
    assert list(parts.feed(sent)) == [
        Part("tool_use", id="x", name="f"),
        Part("tool_use", '{"a"'),
        Part("tool_use", ":1}"),
        Part("tool_use", id="call_1", name="g"),
        Part("tool_use", "{}"),
    ]
    assert parts.finish().reason == "tool_calls"


def fragment(arguments: object = None, **more: object) -> dict[str, object]:
    """A fragment of a tool call; ``name`` belongs to its function."""
    function = {"name": more.pop("name", None), "arguments": arguments}
    return {"tool_calls": [{**more, "function": function}]}


def blocks(sent: bytes) -> list[tuple[str, ...]]:
    """The blocks of a stream, each whole: kind and text, of a call also its id and name."""
    parts = ChunkReader()
    found: list[list[str]] = []
    for part in [*parts.feed(sent), *parts.flush()]:
        if part.id:
            found.append([part.block, part.id, part.name, ""])
        elif not found or found[-1][0] != part.block:
            found.append([part.block, ""])
        found[-1][-1] += part.text
    parts.finish()
    return [tuple(block) for block in found]


END = chunk({}, "tool_calls") + b"data: [DONE]\n\n"
TWO_CALLS = [("tool_use", "c1", "f", '{"a":1}'), ("tool_use", "c2", "g", '{"b":2}')]


@pytest.mark.parametrize(
    "fragments",
    [
        [fragment('{"a":1}', index=0, id="c1", name="f"), fragment('{"b":2}', index=0, id="c2", name="g")],
        [fragment('{"a":1}', id="c1", name="f"), fragment('{"b":2}', id="c2", name="g")],
        [
            fragment('{"a":1}', index=None, id="c1", name="f"),
            fragment({"b": 2}, index=None, id="c2", name="g"),
        ],
        [
            fragment("", index=0, id="c1", name="f"),
            fragment("", index=1, id="c2", name="g"),
            fragment('{"a"', index=0),
            fragment('{"b":', index=1),
            fragment(":1}", index=0),
            fragment("2}", index=1),
        ],
        [
            fragment(None, index=0, id="c1", name="f"),
            fragment('{"a"', index=0, name="f"),
            fragment(":1}", index=0, name="f"),
            fragment('{"b":2}', index=0, id="c2", name="g"),
        ],
        [
            fragment("", index=0, id="c1", name="f"),
            fragment('{"a":', index=0, id="other1"),
            fragment("1}", index=0, id="other2"),
            fragment("", index=1, id="c2", name="g"),
            fragment('{"b":2}', index=1, id="other3"),
        ],
        [
            fragment('{"a":', index=0, id="c1", name="f"),
            fragment('{"b":', index=0, id="c2", name="g"),
            fragment("1}", index=0, id="c1"),
            fragment("2}", index=0, id="c2"),
        ],
    ],
    ids=[
        "same index",
        "no index",
        "index null",
        "alternating",
        "name repeated",
        "an id for each fragment",
        "alternating by id",
    ],
)
def test_parallel_calls_are_two_blocks_however_they_are_marked(fragments):
    sent = b"".join(map(chunk, fragments)) + END
    expected = [(*block[:3], json.dumps(json.loads(block[3]))) for block in TWO_CALLS]
    assert [(*block[:3], json.dumps(json.loads(block[3]))) for block in blocks(sent)] == expected


@pytest.mark.parametrize(
    ("first", "second", "ids"),
    [
        ({"id": "c1", "name": "f"}, {"id": "c2", "name": "f"}, ["c1", "c2"]),
        ({"name": "f"}, {"name": "g"}, ["call_0", "call_1"]),
        ({"id": "c", "name": "f"}, {"id": "c", "name": "g"}, ["c", "call_1"]),
        ({"id": "call_1", "name": "f"}, {"name": "g"}, ["call_1", "call_2"]),
    ],
    ids=["same name", "no ids", "same id", "id is taken"],
)
def test_calls_without_arguments_are_told_apart_and_have_their_own_ids(first, second, ids):
    sent = chunk(fragment("", index=0, **first)) + chunk(fragment("", index=0, **second)) + END
    assert [block[1] for block in blocks(sent)] == ids


def test_two_whole_calls_of_one_name_without_ids_are_two():
    sent = chunk(fragment('{"a":1}', index=0, name="f")) + chunk(fragment('{"a":2}', index=0, name="f")) + END
    assert [block[3] for block in blocks(sent)] == ['{"a":1}', '{"a":2}']


def test_what_begins_behind_a_call_waits_until_its_arguments_are_whole():
    parts = ChunkReader()
    list(parts.feed(chunk(fragment('{"a":', index=0, id="c1", name="f"))))
    assert list(parts.feed(chunk({"content": "So"}))) == []
    assert list(parts.feed(chunk(fragment("1}", index=0)))) == [Part("tool_use", "1}"), Part("text", "So")]


def test_arguments_behind_the_end_of_their_call_are_an_error():
    sent = chunk(fragment("{}", index=0, id="c1", name="f")) + chunk({"content": "So"})
    with pytest.raises(BackendError, match="not a JSON object"):
        blocks(sent + chunk(fragment('{"a":1}', index=0)) + END)


@pytest.mark.parametrize(
    ("delta", "expected"),
    [
        ({"content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]}, [("text", "Hello")]),
        ({"content": None, "refusal": "I cannot."}, [("text", "I cannot.")]),
        ({"content": [{"type": "refusal", "refusal": "I cannot."}]}, [("text", "I cannot.")]),
        (
            {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "Yes"]},
            [("thinking", "hm"), ("text", "Yes")],
        ),
        ({"content": [{"type": "image_url", "image_url": {}}, 1, None]}, []),
    ],
)
def test_content_in_parts_and_refusals_are_text(delta, expected):
    assert blocks(chunk(delta) + END) == expected
    body = {"choices": [{"message": delta, "finish_reason": "stop"}]}
    parts, _ = parts_of(json.dumps(body).encode())
    for kind in ("text", "thinking"):
        whole = "".join(part.text for part in parts if part.block == kind)
        assert whole == "".join(text for block, text in expected if block == kind)


HELLO = b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"Hello"}}]}\n\n'
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'


@pytest.mark.parametrize(
    "sent",
    [
        HELLO + STOP,
        (HELLO + STOP).replace(b"\n", b"\r\n"),
        (HELLO + STOP).replace(b"\n", b"\r"),
        b"\xef\xbb\xbf" + HELLO + STOP,
        HELLO.replace(b"data: ", b"data:") + STOP.replace(b"\n\n", b"\n"),
        HELLO + STOP.rstrip(b"\n"),
        b"retry: 3000\n\n: ping\n\nid: 1\nevent: message\n" + HELLO + b"data:\n\n" + STOP,
    ],
    ids=["two lines", "CRLF", "CR", "BOM", "no space", "no last line end", "other fields"],
)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_events_are_read_in_every_form_that_the_standard_has(sent, size):
    parts = ChunkReader()
    pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
    found = [part for piece in pieces for part in parts.feed(piece)] + parts.flush()
    assert found == [Part("text", "Hello")]
    assert parts.finish().reason == "stop"


def test_a_stream_that_ends_within_an_event_has_broken_off():
    parts = ChunkReader()
    list(parts.feed(chunk({"content": "Hel"}) + STOP[:40]))
    assert parts.flush() == []
    with pytest.raises(BackendError, match="broke off"):
        parts.finish()


def test_a_stream_without_a_reason_to_end_has_broken_off():
    parts = ChunkReader()
    list(parts.feed(chunk({"content": "Hel"}) + b"data: [DONE]\n\n"))
    with pytest.raises(BackendError, match="broke off"):
        parts.finish()


@pytest.mark.parametrize(
    "said",
    [
        '{"error":{"message":"no memory"}}',
        '{"error":"no memory"}',
        '{"object":"error","message":"no memory"}',
    ],
)
def test_an_error_in_a_stream_is_an_error(said):
    with pytest.raises(BackendError, match="no memory"):
        list(ChunkReader().feed(f"data: {said}\n\n".encode()))


def test_an_event_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr("anvil_mux.protocol.completions.MAX_LINE", 10)
    with pytest.raises(BackendError, match="more than 10 bytes"):
        list(ChunkReader().feed(b"data: " + b"x" * 20))


def test_a_whole_answer_has_the_same_parts():
    call = {"id": "x", "function": {"name": "f", "arguments": {"a": 1}}}
    message = {"reasoning": "hm", "content": "So:", "tool_calls": [call]}
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
    assert parts_of(json.dumps(body).encode()) == (
        [
            Part("thinking", "hm"),
            Part("text", "So:"),
            Part("tool_use", id="x", name="f"),
            Part("tool_use", '{"a": 1}'),
        ],
        Ending("tool_calls", None, 9, 2, 4),
    )


def test_the_sequence_that_ended_it_is_told_as_vllm_tells_it():
    body = b'{"choices":[{"text":"a","finish_reason":"stop","stop_reason":"END"}]}'
    assert parts_of(body) == ([Part("text", "a")], Ending("stop", "END"))


@pytest.mark.parametrize("timings", ['{"prompt_ms":20,"predicted_ms":3.5}', '{"prompt_ms":"x"}', "[1]"])
def test_what_llama_cpp_measured_is_read_from_both(timings):
    known = (0.02, 0.0035) if "20" in timings else (None, None)
    parts = ChunkReader()
    list(parts.feed(chunk({}, "stop") + f'data: {{"choices":[],"timings":{timings}}}\n\n'.encode()))
    body = f'{{"choices":[{{"text":"a"}}],"timings":{timings}}}'.encode()
    for ending in (parts.finish(), parts_of(body)[1]):
        assert (ending.prompt_seconds, ending.completion_seconds) == known


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"error":"x"}'])
def test_what_is_no_answer_is_an_error(body):
    with pytest.raises(BackendError):
        parts_of(body)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"\xff", b'{"model":"a","model":"b"}', b"[" * 100_000, b'{"a":{"b":1,"b":2}}']
)
def test_what_is_no_request_is_refused(body):
    with pytest.raises(BadRequest):
        parse(body)


def test_a_question_names_the_model_as_its_engine_knows_it():
    class Nobody:
        def begun(self, now: float, waited: float) -> None: ...
        def whole(self, body: bytes, now: float) -> bytes: ...
        def feed(self, data: bytes, now: float) -> bytes: ...
        def finish(self, now: float) -> bytes: ...

    asked = Translation("a", "/v1/embeddings", {"input": "x"}, Nobody())
    assert json.loads(asked.body("inside")) == {"model": "inside", "input": "x"}


ODD = [None, [], "x", 7, {}, True, -1, 10**400, math.inf, math.nan, [1], {"a": 1}]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("translate", [ollama.chat, anthropic.messages])
def test_whatever_an_engine_says_of_calls_and_figures_is_an_answer_or_its_error(translate, odd):
    said = {"model": "a", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    for part in (
        {"choices": [{"message": {"content": "x", "tool_calls": odd}}]},
        {"choices": [{"message": {"content": "x", "tool_calls": [odd]}}]},
        {"choices": [{"message": {"content": "x", "tool_calls": [{"function": odd}]}}]},
        {"choices": [{"message": {"content": "x", "tool_calls": [{"function": {"arguments": odd}}]}}]},
        {"choices": [{"message": {"content": odd}}]},
        {"choices": [{"message": {"content": "x"}, "finish_reason": odd, "stop_reason": odd}]},
        {"usage": odd},
        {"usage": {"prompt_tokens": odd, "completion_tokens": odd, "prompt_tokens_details": odd}},
        {"usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": odd}}},
        {"timings": odd},
        {"timings": {"prompt_ms": odd, "predicted_ms": odd}},
    ):
        body = json.dumps({"choices": [{"message": {"content": "x"}}], **part}).encode()
        with suppress(BackendError):
            translation = translate(said)
            translation.answer.begun(0.0, 0.0)
            assert isinstance(json.loads(translation.answer.whole(body, 1.0), parse_constant=_refuse), dict)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("ask", [ollama.embed, ollama.embeddings])
def test_whatever_an_engine_says_as_embeddings_is_an_answer_or_its_error(ask, odd):
    for answer in (
        {"data": odd},
        {"data": [odd]},
        {"data": [{"embedding": odd}]},
        {"data": [], "usage": odd},
    ):
        for usage in ({}, {"usage": {"prompt_tokens": odd}}):
            translation = ask({"model": "a", "input": "x", "prompt": "x"})
            translation.answer.begun(0.0, 0.0)
            with suppress(BackendError):
                translation.answer.whole(json.dumps({**answer, **usage}).encode(), 1.0)


def _refuse(constant: str) -> None:
    raise AssertionError(constant)


class Copied(bytes):
    """A piece of a stream that counts the bytes before which it is put."""

    count = 0

    def __radd__(self, before: bytes) -> bytes:
        Copied.count += len(before)
        return before + bytes(self)


def test_an_event_that_comes_in_many_pieces_is_not_copied_for_each_of_them():
    reader = ChunkReader()
    for _ in range(1000):
        assert list(reader.feed(Copied(b"data:data:"))) == []
    assert Copied.count <= 10_000
