"""What the load's accounts let pass, and what they do not."""

import json

import pytest

from tests.accounting import FOREVER, Ask, Entry, Fate, Got, Said, Verdict, flaw_of_record, judge

TEXT = "three words here"
PIECES = ("three ", "words ", "here")
ASKED = {
    "openai": Ask("load-7", "chat stream", "a", 3),
    "anthropic": Ask("load-7", "messages stream", "a", 3),
    "ollama": Ask("load-7", "ollama chat stream", "a", 3),
}
PLAIN = {
    "openai": Ask("load-7", "chat", "a", 3),
    "anthropic": Ask("load-7", "messages", "a", 3),
    "ollama": Ask("load-7", "ollama chat", "a", 3),
}
ERROR = {"message": "It was evicted.", "type": "server_error", "param": None, "code": "severed"}
ERRORS = {
    "openai": {"error": ERROR},
    "anthropic": {"type": "error", "error": {**ERROR, "type": "overloaded_error"}, "request_id": "load-7"},
    "ollama": {"error": "It was evicted."},
}

FOREIGN = {"openai": ("ollama",), "anthropic": ("openai", "ollama"), "ollama": ("openai", "anthropic")}
"""Whose errors have another shape."""


def whole(ask: Ask, said: Said) -> str:
    found = said.models, said.text, said.finish, said.tokens
    return "" if found == ({ask.model}, TEXT, "length", 3) else f"{found}"


def part(ask: Ask, said: Said) -> str:
    return "" if TEXT.startswith(said.text) else said.text


def judged(ask: Ask, got: Got) -> tuple[str, bool]:
    """The class, and whether there is a flaw."""
    verdict = judge(ask, got, whole, part)
    return verdict.name, bool(verdict.flaw)


def got(body: bytes, status: int = 200, *, clean: bool = True, why: str = "") -> Got:
    return Got(1, 0.0, 1.0, status, body, [(0.5, len(body))], clean, why)


def document(api: str, model: str = "a", text: str = TEXT) -> bytes:
    """A whole answer."""
    made = {
        "openai": {
            "model": model,
            "choices": [{"message": {"content": text}, "finish_reason": "length"}],
            "usage": {"completion_tokens": 3},
        },
        "anthropic": {
            "type": "message",
            "model": model,
            "content": [{"type": "text", "text": text}],
            "stop_reason": "max_tokens",
            "usage": {"output_tokens": 3},
        },
        "ollama": {"model": model, "message": {"content": text}, "done_reason": "length", "eval_count": 3},
    }
    return json.dumps(made[api]).encode()


def stream(api: str, pieces: tuple[str, ...] = PIECES, *, ends: bool = True) -> bytes:
    about = {"model": "a"}
    if api == "openai":
        said = [{**about, "choices": [{"delta": {"content": piece}}]} for piece in pieces]
        last = [{**about, "choices": [{"delta": {}, "finish_reason": "length"}]}]
        last += [{**about, "choices": [], "usage": {"completion_tokens": 3}}]
    elif api == "anthropic":
        start = {"type": "message_start", "message": {"type": "message", **about, "content": []}}
        said = [start, *({"type": "content_block_delta", "delta": {"text": piece}} for piece in pieces)]
        delta = {"stop_reason": "max_tokens"}
        last = [{"type": "message_delta", "delta": delta, "usage": {"output_tokens": 3}}]
        last += [{"type": "message_stop"}]
    else:
        said = [{**about, "message": {"content": piece}, "done": False} for piece in pieces]
        last = [{**about, "done": True, "done_reason": "length", "eval_count": 3}]
    events = b"".join(event(api, each) for each in [*said, *(last if ends else [])])
    return events + (b"data: [DONE]\n\n" if ends and api == "openai" else b"")


def event(api: str, said: object) -> bytes:
    line = json.dumps(said).encode()
    return line + b"\n" if api == "ollama" else b"data: " + line + b"\n\n"


APIS = pytest.mark.parametrize("api", ASKED)


@APIS
def test_only_its_own_answer_to_the_end_is_whole(api):
    assert judged(PLAIN[api], got(document(api))) == ("whole", False)
    assert judged(PLAIN[api], got(document(api, model="b"))) == ("whole", True)
    assert judged(PLAIN[api], got(document(api, text="another's"))) == ("whole", True)
    assert judged(PLAIN[api], got(document(api)[:-5], clean=False)) == ("cut", False)
    assert judged(PLAIN[api], got(document(api)[:-5])) == ("whole", True)


@APIS
def test_a_stream_that_is_cut_never_ends_cleanly(api):
    ask = ASKED[api]
    assert judged(ask, got(stream(api))) == ("whole", False)
    for less in (stream(api, PIECES[:2], ends=False), stream(api, ends=False), stream(api, PIECES[:2]), b""):
        assert judged(ask, got(less)) == ("whole", True)
    assert judged(ask, got(stream(api, PIECES[:2], ends=False), clean=False)) == ("cut", False)
    assert judged(ask, got(stream(api, ("another's",), ends=False), clean=False)) == ("cut", True)
    assert judged(ask, got(stream(api, PIECES[:2], ends=False), clean=False, why="left")) == ("left", False)


@APIS
def test_an_error_event_ends_a_stream_and_is_followed_by_a_cut(api):
    ask, begun, failed = ASKED[api], stream(api, PIECES[:1], ends=False), event(api, ERRORS[api])
    code = "" if api == "ollama" else " severed"
    assert judged(ask, got(begun + failed, clean=False)) == (f"event{code}", False)
    assert judged(ask, got(begun + b'{"torn\n\n' + failed, clean=False)) == (f"event{code}", False)
    assert judged(ask, got(begun + failed, clean=True)) == (f"event{code}", True)
    assert judged(ask, got(failed + begun, clean=False)) == (f"event{code}", True)
    assert judged(ask, got(stream(api, ("another's",), ends=False) + failed, clean=False))[1]


@APIS
def test_an_error_has_a_documented_code_its_status_and_the_shape_of_its_api(api):
    ask, fine = PLAIN[api], ERRORS[api]
    code = "" if api == "ollama" else " severed"
    assert judged(ask, got(json.dumps(fine).encode(), 503)) == (f"503{code}", False)
    for other in (*(ERRORS[each] for each in FOREIGN[api]), {"oh": "no"}, "no"):
        assert judged(ask, got(json.dumps(other).encode(), 503))[1]
    assert judged(ask, got(b"Bad Gateway", 502))[1]
    if api != "ollama":
        assert judged(ask, got(json.dumps(fine).encode(), 502)) == ("502 severed", True)
        unknown = {**fine, "error": {**fine["error"], "code": "oops"}}
        assert judged(ask, got(json.dumps(unknown).encode(), 503)) == ("503 oops", True)


def test_no_answer_is_broken_or_lost():
    assert judged(PLAIN["openai"], got(b"", 0, clean=False, why="reset")) == ("broken", False)
    assert judged(PLAIN["openai"], got(b"", 0, clean=False, why="lost")) == ("lost", True)


@pytest.mark.parametrize(
    ("begin", "content"),
    [
        (b": anvil-mux loading a\n\n", b"data: {}\n\n"),
        (b'data: {"id":"x","choices":[{"index":0,"delta":{},"finish_reason":null}]}\n\n', b"data: {}\n\n"),
        (b"  ", b'{"model":"a"}\n'),
        (b"", b"event: message_start\n"),
    ],
)
def test_signs_of_life_are_nothing_that_an_engine_said(begin, content):
    had = Got(1, 0.0, 9.0, 200, begin + content, [(1.0, len(begin)), (2.0, len(begin + content))])
    assert had.first() == 2.0
    assert Got(1, 0.0, 9.0, 200, begin, [(1.0, len(begin))]).first() == FOREVER


@APIS
def test_an_error_is_nothing_that_an_engine_said(api):
    line = event(api, ERRORS[api])
    for said in (line, b"event: error\n" + line, json.dumps(ERRORS[api]).encode()):
        assert got(b": loading\n\n" + said).first() == FOREVER
    assert got(json.dumps(ERRORS[api]).encode(), 503).first() == FOREVER
    assert got(stream(api, PIECES[:1], ends=False) + line).first() == 0.5


RECEIVED, ANSWERED, SENT = (
    Entry(0.1 * n, 1, "a", what) for n, what in enumerate(("received", "answered", "sent"), 1)
)
AGAIN = [Entry(0.35, 2, "a", "received"), Entry(0.4, 2, "a", "answered"), Entry(0.45, 2, "a", "sent")]
LATE = Entry(0.6, 2, "a", "received")
WHOLE, FAILED, MISSING = Verdict("whole"), Verdict("503", "severed"), Verdict("404", "model_not_found")


@pytest.mark.parametrize(
    ("verdict", "entries", "fine"),
    [
        (WHOLE, [RECEIVED, ANSWERED, SENT], True),
        (WHOLE, [RECEIVED, *AGAIN], True),
        (WHOLE, [RECEIVED, ANSWERED, *AGAIN], True),
        (FAILED, [RECEIVED], True),
        (FAILED, [], True),
        (MISSING, [], True),
        (WHOLE, [], False),
        (WHOLE, [RECEIVED], False),
        (WHOLE, [RECEIVED, ANSWERED, SENT, *AGAIN], False),
        (WHOLE, [RECEIVED, RECEIVED, ANSWERED], False),
        (WHOLE, [RECEIVED, ANSWERED, LATE], False),
        (WHOLE, [RECEIVED, ANSWERED._replace(model="b")], False),
        (WHOLE, [RECEIVED, RECEIVED._replace(process=2), RECEIVED._replace(process=3), ANSWERED], False),
        (MISSING, [RECEIVED], True),
        (MISSING, [RECEIVED, ANSWERED], False),
    ],
)
def test_the_engines_record_must_agree(verdict, entries, fine):
    fate = Fate(ASKED["openai"], got(stream("openai")), verdict)
    assert (flaw_of_record(fate, entries, replicas=1) == "") == fine


def test_what_a_client_saw_first_is_known_when_its_answer_was_shortened():
    body = stream("openai")
    had = Got(1, 0.0, 1.0, 200, b": waits\n\n" + body, [(0.2, 9), (0.5, 9 + len(body))], True)
    had.body += b"x" * 1000
    assert had.first() == 0.5
    had.shorten()
    assert (had.first(), len(had.body) < 700, len(had.pieces)) == (0.5, True, 1)
