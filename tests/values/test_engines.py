"""Whatever an engine answers, where it is read: it is told as a mistake of the engine, or passed over."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import thread_time_ns
from typing import Any, cast

import pytest
import requests

from anvil_mux.config.config import Backend
from anvil_mux.errors import MuxError
from anvil_mux.host import prompts
from anvil_mux.host.engine_client import EngineClient, SleepApi, has_error
from anvil_mux.host.engines import ENGINES
from anvil_mux.protocol import anthropic, api, cards, foreign, ollama
from anvil_mux.protocol.completions import Translation
from anvil_mux.protocol.tokens import tokens_in
from anvil_mux.serve.polling import load_of, load_of_slots
from tests.values.cases import Says, base_of, said
from tests.values.drawing import changes_of
from tests.values.engine import answers
from tests.values.test_values import SEED, numbers
from tests.values.witness import strict
from tests.values.work import list_ns

TRANSLATED: dict[str, Callable[[dict[str, Any]], Translation]] = {**ollama.TRANSLATE, **anthropic.TRANSLATE}
REFUSALS = (MuxError, requests.RequestException)
LISTS, LISTS_PER_BYTE = 2_000_000, 50.0
ROUNDS = 20
"""Rounds through all readers, for each case of a usual run of the witness."""


class Scripted(EngineClient):
    """A visit to an engine that says one thing at each path."""

    told: dict[str, bytes]

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 1.0) -> tuple[int, bytes]:
        return 200, self.told.get(path.partition("?")[0], b"{}")


def visit(engine: str, says: Says) -> Scripted:
    clock = itertools.count(0, 1)
    backend = replace(_BACKEND, engine=engine, served_model=engine)
    found = Scripted(
        ENGINES[engine], backend, "http://127.0.0.1:1", now=lambda: float(next(clock)), deadline=2.0
    )
    found.told = {path: text.encode() for path, text in _texts(engine).items()}
    found.told[says.path] = said(says, engine).encode("utf-8", "surrogatepass")
    return found


_BACKEND = Backend("a", model="a")


def _texts(engine: str) -> dict[str, str]:
    return {
        path: each if isinstance(each, str) else json.dumps(each) for path, each in answers(engine).items()
    }


def translated(path: str, where: str) -> Callable[[Says], None]:
    def read(says: Says) -> None:
        text = said(says, "small").encode("utf-8", "surrogatepass")
        asked = TRANSLATED[path]({"model": "small", **base_of(path), "stream": where.startswith("stream")})
        asked.answer.begun(1.0, 0.5)
        if where.startswith("stream"):
            told = asked.answer.feed(b"data: " + text + b"\n\ndata: [DONE]\n\n", 2.0) + asked.answer.finish(
                3.0
            )
            lines = told.decode().splitlines()
            found = [line.removeprefix("data: ") for line in lines if line and not line.startswith("event:")]
        else:
            found = [asked.answer.whole(text, 2.0).decode()]
        for each in found:
            strict(each)

    return read


def controlled(engine: str, deed: str) -> Callable[[Says], None]:
    def do(says: Says) -> None:
        there, sleeps = visit(engine, says), cast(SleepApi, ENGINES[engine].sleeps)
        with there:
            if deed == "is_asleep":
                assert sleeps.is_asleep(there) in (True, False, None)
            else:
                getattr(sleeps, deed)(there, 1)

    return do


def _looked(says: Says) -> None:
    with visit("llamacpp", says) as there:
        there.look()
        there.model_ids()


def _slots(says: Says) -> None:
    with visit("llamacpp", says) as there:
        if says.path == "/props":
            there.told["/slots"] = b"none"
        prompts._used(there, prompts._props(there))


def _figures(says: Says) -> None:
    load_of(said(says, "twin"))


def _load_of_slots(says: Says) -> None:
    load_of_slots(said(says, "llama").encode("utf-8", "surrogatepass").decode("utf-8", "replace"))


def _card(says: Says) -> None:
    text = said(says, "small").encode("utf-8", "surrogatepass")
    with suppress(ValueError):
        card = cards.read(foreign.read(text), "small")
        assert card == card.sound()


def _usage(says: Says) -> None:
    text = said(says, "small").encode("utf-8", "surrogatepass")
    tokens_in(text)
    api.error_said(text)
    has_error(text)


CHAT, STREAM, EMBEDDINGS = "/v1/chat/completions", "stream/v1/chat/completions", "/v1/embeddings"
READERS: dict[str, tuple[str, Callable[[Says], None]]] = {
    **{
        f"{path} {where}": (where, translated(path, where))
        for path in ("/api/chat", "/v1/messages")
        for where in (CHAT, STREAM)
    },
    **{
        f"/api/generate {where}": (where.replace("chat/", ""), translated("/api/generate", where))
        for where in (CHAT, STREAM)
    },
    **{path: (EMBEDDINGS, translated(path, EMBEDDINGS)) for path in ("/api/embed", "/api/embeddings")},
    "count_tokens": ("/tokenize", translated("/v1/messages/count_tokens", "")),
    **{f"vllm {deed}": ("/is_sleeping", controlled("vllm", deed)) for deed in ("is_asleep", "sleep", "wake")},
    **{f"ollama {deed}": ("/api/ps", controlled("ollama", deed)) for deed in ("is_asleep", "sleep", "wake")},
    **{
        f"llamacpp {deed}": ("/models", controlled("llamacpp", deed))
        for deed in ("is_asleep", "sleep", "wake")
    },
    "sglang sleep": ("/v1/loads", controlled("sglang", "sleep")),
    "look": ("/v1/models", _looked),
    "props": ("/props", _slots),
    "slots": ("/slots", _slots),
    "figures": ("/metrics", _figures),
    "load of slots": ("/slots", _load_of_slots),
    "usage": (CHAT, _usage),
    **{
        f"card {path}": (path, _card)
        for path in ("/v1/models", "/props", "/model_info", "/api/show", "/api/ps")
    },
}
"""Name -> the path of what is read, and its reader."""
FOUND = [
    ("sglang sleep", Says("/v1/loads", ((("loads",), "[1]"),))),
    ("sglang sleep", Says("/v1/loads", ((("loads",), "[null]"),))),
    ("sglang sleep", Says("/v1/loads", ((("loads", 0, "num_reqs"), "deep object"),))),
    ("sglang sleep", Says("/v1/loads", ((("loads", 0, "num_reqs"), "text 'x'"),))),
    ("slots", Says("/slots", (((0, "id"), "long text"),))),
    ("slots", Says("/slots", (((0, "id"), '[{"id":1e400}]'),))),
    ("slots", Says("/slots", (((0, "n_prompt_tokens"), "{}"),))),
    ("slots", Says("/slots", (((0,), "1"),))),
    ("props", Says("/props", ((("total_slots",), "9999999999"),))),
    ("ollama is_asleep", Says("/api/ps", ((("models", 0, "name"), '{"name":[]}'),))),
    ("llamacpp sleep", Says("/models", (((), "text '0'"),))),
    ("card /v1/models", Says("/v1/models", ((("data", 0, "id"), "[1]"),))),
]
"""Answers that once were a mistake of ours."""


@pytest.mark.parametrize(("reader", "says"), FOUND)
def test_an_answer_that_was_misread_once_is_read(reader: str, says: Says) -> None:
    assert judged(reader, says) == ""


def judged(reader: str, says: Says) -> str:
    """What is wrong with how an answer is read."""
    began = thread_time_ns()
    try:
        READERS[reader][1](says)
    except REFUSALS:
        pass
    except Exception as error:
        return f"{reader}: {type(error).__name__}: {str(error)[:200]}"
    lists = (thread_time_ns() - began) / _LIST_NS
    size = len(said(says, "small"))
    return f"{reader}: {lists:.0f} lists for {size} bytes" if lists > LISTS + LISTS_PER_BYTE * size else ""


_LIST_NS = list_ns()


def drawn(draw: random.Random, where: str) -> Says:
    document = answers("small")[where]
    if isinstance(document, str):
        name = document.split()[2 * draw.randrange(3)]
        return Says(
            where,
            (((name,), draw.choice(["1e400", "NaN", "-1", "309 digits", "4,500 digits", "-Infinity"])),),
        )
    return Says(where, changes_of(draw, document))


def test_whatever_an_engine_answers_is_read_or_refused() -> None:
    found: dict[str, str] = {}
    number = 0
    for number in numbers(share=0.1, rounds=ROUNDS * len(READERS)):
        reader = list(READERS)[number % len(READERS)]
        says = drawn(random.Random(f"{SEED} {number}"), READERS[reader][0])
        if why := judged(reader, says):
            found.setdefault(why[:60], f"{why}\n    ({reader!r}, {says!r}),")
    print(f"seed {SEED}: {number + 1} answers")
    assert not found, "\n".join(found.values())
