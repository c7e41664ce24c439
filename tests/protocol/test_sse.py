"""The observer of streams: what is read of their events, wherever their pieces end."""

import json
import tracemalloc

import pytest

from anvil_mux.protocol.sse import MAX_READ, PlainObserver, SseObserver


def data(event):
    return b"data: %b\n\n" % json.dumps(event).encode()


def named(kind, **fields):
    return b"event: %b\n%b" % (kind.encode(), data({"type": kind, **fields}))


DONE = b"data: [DONE]\n\n"
WORD = data({"choices": [{"index": 0, "delta": {"content": 'event: error "usage": {} [DON'}}]})
STOP = data({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "timings": {"prompt_n": 4}})
USAGE = data({"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 37}})
ERROR = data({"error": {"message": "out of memory", "code": 500}})
START = named("message_start", message={"usage": {"input_tokens": 4321, "output_tokens": 0}})
DELTA = named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 40})
COMPLETED = named(
    "response.completed", response={"error": None, "usage": {"input_tokens": 5, "output_tokens": 2}}
)
STREAMS = [
    # bytes; tokens of answer and prompt; last event, finished, error
    (WORD * 2 + STOP + USAGE + DONE, (37, 12), (True, True, False)),
    (WORD + STOP + DONE, (None, 4), (True, True, False)),
    (WORD * 3, (None, None), (False, False, False)),
    (WORD + STOP, (None, 4), (False, True, False)),
    (WORD + data({"choices": [{"delta": {}, "finish_reason": None}]}), (None, None), (False, False, False)),
    (WORD + ERROR, (None, None), (True, False, True)),
    (WORD + ERROR[:-1], (None, None), (False, False, True)),
    (START + named("ping") + DELTA + named("message_stop"), (40, 4321), (True, False, False)),
    (START + DELTA, (40, 4321), (False, False, False)),
    (START + named("error", error={"message": "x"}), (0, 4321), (True, False, True)),
    (named("response.created", response={"usage": None}) + COMPLETED, (2, 5), (True, False, False)),
    (named("response.failed", response={"error": {"code": "x"}}), (None, None), (True, False, True)),
    (named("error", code="x", message="y"), (None, None), (True, False, True)),
    (b": only comments\n\n", (None, None), (False, False, False)),
]


def observed(pieces):
    observer = SseObserver()
    for piece in pieces:
        observer.feed(piece)
    observer.end()
    answer, prompt, _ = observer.tokens
    said = (observer.has_last_event, observer.has_finished, observer.has_error)
    return (answer, prompt), said, observer.events


@pytest.mark.parametrize(("stream", "tokens", "said"), STREAMS)
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_a_stream_is_read_the_same_wherever_its_pieces_end(stream, tokens, said, line_end):
    events = stream.count(b"data: {")
    stream = stream.replace(b"\n", line_end)
    splits = [[stream], [stream[i : i + 1] for i in range(len(stream))]]
    splits += [[stream[:end], stream[end:]] for end in range(1, len(stream))]
    for pieces in splits:
        assert observed(pieces) == (tokens, said, events)


@pytest.mark.parametrize("end", [b"data: [DONE]", b"data:[DONE]\n", b"data: [DONE]\r\n"])
def test_the_last_line_needs_no_blank_line_behind_it(end):
    assert observed([WORD, end])[1] == (True, False, False)


def test_text_that_looks_like_an_event_is_none():
    text = data({"choices": [{"delta": {"content": 'data: [DONE]\n\n event: error\ndata: {"error": 1}'}}]})
    assert observed([text])[1] == (False, False, False)


@pytest.mark.parametrize(
    "text", ['{"a": ["}", "\\"]", {"b": "\\\\"}]}', '[1, "é\\u005d"]', '{"a": {}}\n{"b": [[]]}\n']
)
def test_only_a_whole_json_text_is_whole(text):
    body = text.strip().encode()
    for cut in range(1, len(body) + 1):
        for middle in {0, 1, cut // 2, cut - 1}:
            observer = PlainObserver(until_close=True)
            observer.feed(body[:middle])
            observer.feed(body[middle:cut])
            whole = text.startswith('{"a": {}}') and cut in (len('{"a": {}}'), len('{"a": {}}') + 1)
            assert observer.is_json_cut is not (cut == len(body) or whole), body[:cut]
    assert PlainObserver(until_close=True).is_json_cut


@pytest.mark.parametrize(("beginning", "most"), [(b"data: ", 3 * MAX_READ), (b"", 1 << 16)])
def test_long_line_of_a_stream_is_not_kept(beginning, most):
    observer = SseObserver()
    piece = b"x" * (1 << 14)
    tracemalloc.start()
    try:
        observer.feed(beginning)
        for _ in range(1 << 10):
            observer.feed(piece)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    observer.feed(b"\n\n" + USAGE + DONE)
    assert (observer.tokens[:2], observer.has_last_event) == ((37, 12), True)


def test_long_last_event_ends_its_stream():
    pieces = [b"event: response.completed\ndata: {", *[b"x" * (1 << 14)] * (1 << 8), b"}\n\n"]
    assert observed(pieces)[1] == (True, False, False)
