"""Cases drawn from a seed, and the shortest that still shows what one showed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.values.cases import (
    BODIES,
    FORMS,
    HEADS,
    MODELS,
    QUERIES,
    UNNAMED,
    Ask,
    Says,
    document_of,
    posts,
    words,
)
from tests.values.engine import answers
from tests.values.values import HUGE, ODD, Change, Path, objects_in, places

NAMES = [name for name in ODD if name not in HUGE]
OF_ENGINES = {
    "small": ("/v1/models", "/v1/chat/completions", "/v1/embeddings"),
    "twin": ("/metrics", "/v1/models", "/v1/chat/completions"),
    "llama": ("/v1/models", "/slots", "/props", "/tokenize", "/models", "/metrics"),
    "vllm": ("/v1/models", "/is_sleeping"),
    "sglang": ("/v1/models", "/v1/loads", "/model_info"),
    "ollama": ("/v1/models", "/api/ps", "/api/generate", "/api/tags", "/api/show"),
}
"""Model -> where its engine is asked for more than answers."""
ANSWERS = {
    "/v1/chat/completions": "/v1/chat/completions",
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/chat/completions",
    "/v1/messages": "/v1/chat/completions",
    "/v1/messages/count_tokens": "/tokenize",
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
    "/v1/embeddings": "/v1/embeddings",
    "/v1/completions": "/v1/completions",
    "/v1/responses": "/v1/responses",
}
"""Path -> where the engine is asked for its answer."""
POSTS, GETS = posts(), list(QUERIES)
READ = [path for path in BODIES if path in UNNAMED or path.startswith(("/api/", "/models/", "/v1/messages"))]
"""The paths whose bodies are read whole."""
FIGURES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def drawn(draw: random.Random) -> Ask:
    match draw.random():
        case kind if kind < 0.45:
            return _post(draw)
        case kind if kind < 0.6:
            return _get(draw)
        case kind if kind < 0.92:
            return _answer(draw)
        case kind if kind < 0.935:
            return _load(draw)
    return Ask(
        "/upstream",
        "GET",
        parts=(draw.choice(("/a", "/", "/small", "/%61", "/.", "/a;b")), draw.choice(COUNTS)),
    )


COUNTS = (1, 2, 7, 100, 3000)


def _name(draw: random.Random, *, huge: bool) -> str:
    return draw.choice([*HUGE]) if huge and draw.random() < 0.003 else draw.choice(NAMES)


def _post(draw: random.Random) -> Ask:
    path = draw.choice(POSTS if draw.random() < 0.3 else READ)
    ask = Ask(path, model=draw.choice(MODELS[:3]), stream=draw.random() < 0.3)
    ask = replace(ask, changes=changes_of(draw, document_of(ask), in_form=path in FORMS, huge=True))
    if draw.random() < 0.1:
        ask = replace(
            ask, query=((draw.choice(("model", "autoload", "wait", "stream", "x")), _name_of(draw)),)
        )
    return replace(ask, head=_head(draw))


def changes_of(
    draw: random.Random, document: Any, *, in_form: bool = False, huge: bool = False
) -> tuple[Change, ...]:
    found: list[Change] = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        found.append((_place(draw, document), _name(draw, huge=huge)))
    if in_form:
        return tuple((path[:1], name) for path, name in found if path)
    if any(not path for path, _ in found):
        return tuple(each for each in found if not each[0])[:1]
    return tuple(found)


def _place(draw: random.Random, document: Any) -> Path:
    if draw.random() < 0.15 and (inner := objects_in(document)):
        return (*draw.choice(inner), draw.choice(words()))
    if draw.random() < 0.5 and isinstance(document, dict) and document:
        return (draw.choice(list(document)),)
    return draw.choice(places(document))


def _name_of(draw: random.Random) -> str:
    return draw.choice(NAMES)


def _head(draw: random.Random) -> tuple[tuple[str, str], ...]:
    if draw.random() < 0.7:
        return ()
    return tuple((draw.choice(HEADS), _name_of(draw)) for _ in range(draw.choice((1, 1, 2))))


def _get(draw: random.Random) -> Ask:
    path = draw.choice(GETS)
    keys = QUERIES[path]
    query = [
        (key, "text 'x'" if key == "model" and draw.random() < 0.2 else _name_of(draw))
        for key in keys
        if draw.random() < 0.6
    ]
    if draw.random() < 0.1:
        query.append((draw.choice(("x", "model", "lines")), _name_of(draw)))
    model = draw.choice(MODELS[:3])
    if "model" in keys and draw.random() < 0.7:
        query = [each for each in query if each[0] != "model"]
        path_query = f"{path}?model={model}"
        return Ask(path_query, "GET", query=tuple(query), head=_head(draw))
    return Ask(path, "GET", query=tuple(query), head=_head(draw))


def _answer(draw: random.Random) -> Ask:
    """Odd answers to usual questions."""
    path = draw.choice(list(ANSWERS))
    stream = draw.random() < 0.5
    where = ANSWERS[path]
    if stream and f"stream{where}" in answers(""):
        where = f"stream{where}"
    says = Says(where, changes_of(draw, answers("small")[where]))
    return Ask(path, model=draw.choice(MODELS[:3]), stream=stream, says=(says,))


def _load(draw: random.Random) -> Ask:
    """Odd answers to what an engine is asked while it is loaded, put to sleep, woken and looked at."""
    model = draw.choice(MODELS[1:])
    where = draw.choice(OF_ENGINES[model])
    document = answers(model)[where]
    if isinstance(document, str):
        changes: tuple[Change, ...] = (((draw.choice(FIGURES),), _name_of(draw)),)
    else:
        changes = changes_of(draw, document)
    return Ask(model=model, says=(Says(where, changes),), reloads=True)


def shortest(ask: Ask, shows: Callable[[Ask], bool], tries: int) -> Ask:
    """The shortest case that still shows it."""
    while True:
        for shorter in _shorter(ask):
            if tries <= 0:
                return ask
            tries -= 1
            if shows(shorter):
                ask = shorter
                break
        else:
            return ask


def _shorter(ask: Ask) -> Iterator[Ask]:
    for field in fields(Ask):
        value, usual = getattr(ask, field.name), getattr(Ask(), field.name)
        if isinstance(value, tuple) and value and field.name != "parts":
            for index in range(len(value)):
                yield replace(ask, **{field.name: value[:index] + value[index + 1 :]})
        elif value != usual and field.name in ("stream", "reloads", "model"):
            yield replace(ask, **{field.name: usual})
    for index, says in enumerate(ask.says):
        for at in range(len(says.changes)):
            less = replace(says, changes=says.changes[:at] + says.changes[at + 1 :])
            yield replace(ask, says=(*ask.says[:index], less, *ask.says[index + 1 :]))
