"""One request, as its client sees the answer: over real sockets, with a server whose every byte is given."""

import json
import math
from collections.abc import Callable, Iterator

import pytest

from anvil_mux.errors import MuxError
from anvil_mux.lab.player import CHAT, PlayedAnswer, PlayedServer
from anvil_mux.lab.workload import Prompt
from tests.fake_engine import SSE_HEAD, Asked, FakeEngine, chunk

ASKED = Prompt(1.0, 8, 3, session="s-1", model="m")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine()
    yield made
    made.close()


def event(said: object) -> bytes:
    return chunk(b"data: %b\n\n" % (said if isinstance(said, bytes) else json.dumps(said).encode()))


def text(piece: str, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": None, **more}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
}
DONE = event(b"[DONE]") + b"0\r\n\r\n"


def ask(engine: FakeEngine, answer: bytes, request: Prompt = ASKED, path: str = "") -> PlayedAnswer:
    moments = iter(range(100))
    asked: list[Asked] = []

    def answers(each: Asked) -> bytes:
        asked.append(each)
        return answer

    engine.answer = answers
    server = PlayedServer(f"http://127.0.0.1:{engine.address[1]}/v1", "sk-1", *([path] if path else []))
    found = server.prepare(request, 7, "one two", id="id-7", now=lambda: float(next(moments)))()
    assert b"Authorization: Bearer sk-1" in asked[0].head
    assert b"X-Request-ID: id-7" in asked[0].head
    assert b"X-Session-ID: s-1" in asked[0].head
    return found


def test_an_answer_is_timed_from_its_first_text_and_counted_by_its_usage(engine):
    found = ask(
        engine, SSE_HEAD + event(text("")) + event(text("a")) + event(text("b")) + event(USAGE) + DONE
    )
    assert (found.status, found.code, found.number, found.due) == (200, "", 7, 1.0)
    assert (found.sent, found.first, found.ended) == (0.0, 1.0, 2.0)
    assert (found.tokens, found.prompt_tokens, found.cached_tokens) == (3, 9, 4)


def test_without_usage_the_events_with_text_are_counted(engine):
    pieces = [event(text(piece)) for piece in "abcd"] + [event(text("", finish_reason="length"))]
    assert ask(engine, SSE_HEAD + b"".join(pieces) + DONE).tokens == 4


def test_a_chat_is_timed_from_its_first_content(engine):
    def delta(said: dict[str, str]) -> bytes:
        return event({"choices": [{"index": 0, "delta": said}]})

    roles = delta({"role": "assistant", "content": ""}) + delta({}) + delta({"reasoning_content": "hm"})
    found = ask(engine, SSE_HEAD + roles + DONE, path=CHAT)
    assert (found.status, found.first) == (200, 1.0)


SEVERED = b'{"error":{"code":"severed","message":"Send it again."}}'


@pytest.mark.parametrize(
    ("answer", "status", "code", "message"),
    [
        (SSE_HEAD + event(text("a")) + b"0\r\n\r\n", 0, "cut", ""),
        (SSE_HEAD + event(text("a")) + event(SEVERED) + b"0\r\n\r\n", 0, "severed", "Send it again."),
        (
            b'HTTP/1.1 503 Service Unavailable\r\nContent-Length: 31\r\n\r\n{"error":{"code":"overloaded"}}',
            503,
            "overloaded",
            "",
        ),
        (
            b'HTTP/1.1 400 Bad Request\r\nContent-Length: 40\r\n\r\n{"error":{"code":400,"type":"too_long"}}',
            400,
            "too_long",
            "",
        ),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\nno", 502, "Bad Gateway", ""),
    ],
)
def test_what_is_no_whole_answer_has_a_code(engine, answer, status, code, message):
    found = ask(engine, answer)
    assert (found.status, found.code, found.message) == (status, code, message)


def test_a_client_leaves_when_it_is_out_of_patience(engine):
    server = PlayedServer(f"http://127.0.0.1:{engine.address[1]}")
    hasty = ASKED._replace(patience=0.01)
    found = server.prepare(hasty, 0, "one", id="id", now=lambda: 0.0)()
    assert (found.status, found.code) == (0, "left")
    assert math.isnan(found.first)


def test_a_server_that_is_not_there():
    with pytest.raises(MuxError, match="no address of a server"):
        PlayedServer("nowhere")


def test_models_are_looked_for_in_the_list_and_by_their_names(engine):
    listed = json.dumps({"data": [{"id": "a"}]}).encode()

    def answers(found: bytes) -> Callable[[Asked], bytes]:
        head = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b"

        def answer(asked: Asked) -> bytes:
            if b"GET /v1/models " in asked.head:
                return head % (b"200 OK", len(listed), listed)
            return head % (found, 2, b"{}")

        return answer

    server = PlayedServer(f"http://127.0.0.1:{engine.address[1]}")
    engine.answer = answers(b"200 OK")
    server.check_models(("a", "alias"))
    engine.answer = answers(b"404 Not Found")
    with pytest.raises(MuxError, match="does not serve b, but a; say with --model b=NAME what"):
        server.check_models(("a", "b"))
