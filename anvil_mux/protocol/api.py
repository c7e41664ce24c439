"""The differences between client APIs: routes, error shapes, beats, model lists.

Pure. The routes are an allow-list of exact raw paths, so no encoding, dot segment or doubled slash leads to
an engine's control routes: what is not written here does not exist.

Beats keep a waiting stream alive in the one form that every client is known to accept: a comment line without
a blank line, and from time to time a chunk that adds nothing. Errors in a stream are framed, because clients
take a stream that just ends for a short answer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from urllib.parse import unquote

from anvil_mux.errors import BadRequest, Moved, MuxError, NotFound
from anvil_mux.protocol import foreign
from anvil_mux.protocol.cards import CAPABILITIES, NOTHING_KNOWN, ModelCard
from anvil_mux.protocol.http1 import Field
from anvil_mux.protocol.naming import checked


@dataclass(frozen=True, slots=True)
class Route:
    """One way to ask an engine."""

    api: str
    """The API in whose shapes it is answered: openai, anthropic, llamacpp, ollama."""
    model_in: str
    """The place of the model's name: json, session (further in), multipart, query, path, upstream, or with an
    earlier answer."""
    beat: str = "none"
    """The kind of its beats: chat, completion, messages, responses; or none, and only comments."""
    streams: bool = False
    """Whether ``stream: true`` gives server-sent events, into which comments and beats may be written."""
    path: str = ""
    """The path that the engine is asked for; versionless variants get their /v1 here."""
    translated: str = ""
    """When it is translated. always: no engine has it. missing: where the engine does not have it."""
    upgrades: bool = False
    """Whether it becomes a websocket."""
    shows_prompts: bool = False
    """Whether its answer may hold prompts of other clients; a key needs ``admin`` for it, as for logs."""

    @property
    def label(self) -> str:
        """The route's name in metrics: its row in the table, without what clients put into a path."""
        return _LABELS.get(self.model_in, self.path)


_LABELS = {"answer": "/v1/responses", "upstream": "/upstream"}
"""Kind of route -> the name of all of them, whose paths hold words of clients."""
NO_ROUTE = Route("openai", "none")
"""The route of a request that goes to no engine."""


RESPONSES = "/v1/responses"
"""The path of routes whose requests may refer to an earlier answer, and how such paths begin."""
_POST: tuple[tuple[Route, str], ...] = (
    (Route("openai", "json", "chat", True), "/v1/chat/completions"),
    (Route("openai", "json", "completion", True), "/v1/completions"),
    (Route("openai", "json", "responses", True), RESPONSES),
    (
        Route("openai", "json"),
        "/v1/embeddings /v1/moderations /v1/decisions /v1/responses/compact /v1/responses/input_tokens "
        "/v1/audio/speech /v1/realtime/sessions",
    ),
    (Route("openai", "session"), "/v1/realtime/client_secrets /v1/realtime/transcription_sessions"),
    (Route("openai", "json", streams=True), "/v1/images/generations /v1/chat/completions/batch"),
    (
        Route("openai", "multipart", streams=True),
        "/v1/audio/transcriptions /v1/audio/translations /v1/images/edits",
    ),
    (Route("openai", "multipart"), "/v1/audio/voices /v1/images/variations"),
    (Route("anthropic", "json", "messages", True, translated="missing"), "/v1/messages"),
    (Route("anthropic", "json", translated="missing"), "/v1/messages/count_tokens"),
    (
        Route("openai", "json"),
        "/rerank /v1/rerank /v2/rerank /score /v1/score /classify /pooling /v2/embed /encode /embed /predict "
        "/v1/token/encode /v1/token/decode /sdapi/v1/txt2img /sdapi/v1/img2img",
    ),
    (Route("llamacpp", "json", streams=True), "/completion /infill"),
    (
        Route("llamacpp", "json"),
        "/embedding /reranking /v1/reranking /tokenize /detokenize /apply-template /v1/systemone "
        "/v1/chat/completions/input_tokens /v1/chat/completions/control",
    ),
    (Route("ollama", "json", streams=True, translated="always"), "/api/chat /api/generate"),
    (Route("ollama", "json", translated="always"), "/api/embed /api/embeddings"),
)
_GET: tuple[tuple[Route, str], ...] = (
    (Route("llamacpp", "query"), "/props /lora-adapters"),
    (Route("llamacpp", "query", shows_prompts=True), "/slots"),
    (Route("openai", "query"), "/sdapi/v1/loras /v1/audio/voices"),
    (Route("openai", "query", upgrades=True), "/v1/realtime"),
)

_SAME = (("/openai/v1/", "/v1/"), ("/api/v0/", "/v1/"))
"""Azure's and LM Studio's prefixes of routes that are OpenAI's otherwise."""
_IN_PATH = re.compile(
    r"(?:/openai/deployments|/v1/engines|/engines)/([^/]+)"
    r"(/chat/completions|/completions|/embeddings|/responses|/images/generations|/audio/speech)"
)
"""Azure's and the first OpenAI's routes, which have the model in their path."""

_REFUSED = re.compile(
    r"(/v1?)?/(files|batches|fine_tuning|assistants|threads|vector_stores|uploads|containers|evals|skills"
    r"|videos|conversations|messages/batches)(/|\Z)|(/v1?)?/chat/completions/[\w-]+(/messages)?\Z"
    r"|/api/(pull|push|create|copy|delete|blobs)(/|\Z)"
)
"""Families that need storage or jobs of their own."""


def _routes() -> dict[str, dict[str, Route]]:
    """The table as path -> method -> route. ``/x`` and ``/v/x`` mean ``/v1/x`` unless the table has them
    itself.

    (So /completions and /embeddings are OpenAI's, as for a client whose base address lacks its /v1.)
    """
    table: dict[str, dict[str, Route]] = {}
    for method, rows in (("POST", _POST), ("GET", _GET)):
        for route, paths in rows:
            for path in paths.split():
                table.setdefault(path, {})[method] = replace(route, path=path)
    for path, methods in tuple(table.items()):
        if path.startswith("/v1/"):
            table.setdefault(path[3:], methods)
            table["/v" + path[3:]] = methods
    return table


ROUTES = _routes()


def match(method: str, path: str) -> Route | None:
    """The route of a raw path, if requests are forwarded there at all."""
    methods = ROUTES.get(path)
    if methods is not None:
        return methods.get(method)
    for theirs, ours in _SAME:
        if path.startswith(theirs):
            return match(method, ours + path[len(theirs) :])
    answer = _ANSWER.fullmatch(path)
    if answer and method in _OF_ANSWER[answer[2] or ""]:
        return Route("openai", "answer", path=f"/v1/responses/{answer[1]}{answer[2] or ''}")
    in_path = _IN_PATH.fullmatch(path)
    if in_path is None or method != "POST":
        return None
    return replace(ROUTES["/v1" + in_path[2]]["POST"], model_in="path")


_ANSWER = re.compile(r"(?:/v1?)?/responses/(resp_[A-Za-z0-9_-]{1,250})(/input_items|/cancel)?")
_OF_ANSWER = {"": ("GET", "DELETE"), "/input_items": ("GET",), "/cancel": ("POST",)}


def answer_in_path(path: str) -> str:
    """The id of the answer in a path that ``match`` found to be about one."""
    found = _ANSWER.search(path)
    assert found is not None
    return found[1]


_UPSTREAM = "/upstream/"
_MOST_PARTS = 8
"""The most parts, between slashes, of a model's name in a path: org/model:tag has two."""
_PLAIN = re.compile(r"(?:/(?!\.)[A-Za-z0-9._~!$&'()*+,;=:@-]+)+/?")
"""A path that means the same to every server: nothing encoded, hidden, doubled or dotted."""


def upstream(path: str) -> Iterator[tuple[str, str]]:
    """The ways to read /upstream/MODEL/PATH as model and path, which may be "", the longest model first."""
    return (way for way in reversed(_upstream(path)) if way[1] in ("", "/") or _PLAIN.fullmatch(way[1]))


def upstream_names(path: str) -> list[str]:
    """The models that /upstream/MODEL/PATH may name, also where the rest is no path; the likeliest first."""
    return [name for name, _ in sorted(_upstream(path), key=_is_likely, reverse=True)]


def likeliest(ways: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The way whose rest is a route; of several, and where there is none, that with the shortest model."""
    return sorted(sorted(ways, key=lambda way: len(way[0])), key=_is_likely, reverse=True)[:1]


def _is_likely(way: tuple[str, str]) -> bool:
    return any(match(method, way[1]) for method in ("GET", "POST"))


def _upstream(path: str) -> list[tuple[str, str]]:
    """Every way to take the path apart, the shortest model first."""
    if not path.startswith(_UPSTREAM):
        return []
    parts = path[len(_UPSTREAM) :].split("/")
    if not parts[0]:
        return []
    return [
        (unquote("/".join(parts[:count])), "/".join(["", *parts[count:]]))
        for count in range(1, min(len(parts), _MOST_PARTS) + 1)
    ]


def label(path: str) -> str:
    """Return the name in metrics of a path that has no route with this method: that with another, if any."""
    return next((route.label for route in ROUTES.get(path, {}).values()), "other")


def model_in_path(path: str) -> str:
    """The model in a path that ``match`` found to have one."""
    in_path = _IN_PATH.fullmatch(path)
    assert in_path is not None
    try:
        return checked(unquote(in_path[1], errors="strict"))
    except UnicodeDecodeError:
        raise BadRequest("the model in the path is not UTF-8", param="model") from None


def no_route(method: str, path: str) -> tuple[MuxError, list[Field]]:
    """The error for a path in which ``match`` found nothing (501, 405 or 404), and its headers."""
    methods = ROUTES.get(path)
    if methods is not None:
        allowed = ", ".join(sorted(methods))
        error = BadRequest(f"{path} takes {allowed}, not {method}", status=405)
        return error, [(b"Allow", allowed.encode("ascii"))]
    if _REFUSED.match(path):
        return BadRequest(
            f"{path} is not available: anvil-mux serves models and stores nothing", status=501
        ), []
    return NotFound(f"There is no route {method} {path}."), []


def api_of(path: str) -> str:
    """The API whose error shape a path gets, also when no route matches."""
    if re.match(r"(/v1?)?/messages(/|$)", path):
        return "anthropic"
    return "ollama" if re.match(r"/api/(?!v[01]/)", path) else "openai"


_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(api: str, error: MuxError, request_id: str) -> bytes:
    """The JSON that says ``error`` in the words of ``api``."""
    return written(_error(api, error, request_id))


def error_headers(error: MuxError) -> list[Field]:
    """The headers that say when and whether to come again, and how."""
    headers: list[Field] = []
    if error.retry_after is not None:
        headers.append((b"Retry-After", b"%d" % math.ceil(error.retry_after)))
    if error.retry is not None:
        headers.append((b"x-should-retry", b"true" if error.retry else b"false"))
    if error.status == 426:
        headers += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
    if isinstance(error, Moved):
        headers.append((b"Location", error.location.encode("ascii")))
    return headers


def error_event(api: str, beat: str, error: MuxError, request_id: str = "") -> bytes:
    """The event that says ``error`` in a stream that has begun; the connection is cut after it.

    Never ``[DONE]``: who looks for nothing else would take what came before for a whole answer.
    """
    said = _error(api, error, request_id)
    if api == "anthropic":
        return b"event: error\ndata: %b\n\n" % written(said)
    if api == "ollama":
        return written(said) + b"\n"
    if beat == "responses":
        event = {"code": error.code, "message": error.message, "param": error.param, **error.said}
        event["type"] = "error"
        return b"event: error\ndata: %b\n\n" % written({**event, **said})
    return b"data: %b\n\n" % written(said)


def _error(api: str, error: MuxError, request_id: str) -> dict[str, object]:
    if api == "ollama":
        return {"error": error.message}
    if api == "anthropic":
        fallback = "invalid_request_error" if error.status < 500 else "api_error"
        kind = _ANTHROPIC_KINDS.get(error.status, fallback)
        inner = {"type": kind, "message": error.message, "code": error.code, **error.said}
        return {"type": "error", "error": inner, "request_id": request_id}
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
            **error.said,
        }
    }


def error_said(body: bytes) -> dict[str, object] | None:
    """``message``, and what there is of ``type``, ``param`` and ``code``, of an engine's error; None if none.

    The fields stand in an object ``error`` or, as older vLLM has them, at the top; a code may be a number.
    """
    answer = foreign.read_object(body) or {}
    inner = answer.get("error", answer)
    if not isinstance(inner, dict) or not isinstance(inner.get("message"), str):
        return None
    return {key: inner[key] for key in _ERROR_FIELDS if isinstance(inner.get(key), (str, int))}


_ERROR_FIELDS = ("message", "type", "param", "code")


def as_events(beat: str, body: bytes) -> bytes | None:
    """Return a whole answer as a stream of events; None if it cannot be one."""
    answer = foreign.read_object(body)
    if beat in ("chat", "completion"):
        if answer is None or not isinstance(answer.get("choices"), list):
            return None
        if beat == "chat":
            answer["object"] = "chat.completion.chunk"
            answer["choices"] = [_as_delta(choice) for choice in answer["choices"]]
        return b"data: %b\n\ndata: [DONE]\n\n" % written(answer)
    if beat == "responses" and answer is not None:
        completed = {"type": "response.completed", "response": answer}
        return b"event: response.completed\ndata: %b\n\n" % written(completed)
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    if beat != "none" or "\0" in text:
        return None
    lines = (f"data: {line}\n" for line in text.strip().splitlines())
    return f"{''.join(lines)}\n".encode()


def _as_delta(choice: object) -> object:
    """Return a choice of a whole answer as that of a chunk, in which calls of tools are numbered."""
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        return choice
    rest = {key: value for key, value in choice.items() if key != "message"}
    delta = dict(choice["message"])
    if isinstance(calls := delta.get("tool_calls"), list):
        delta["tool_calls"] = [
            {"index": index, **call} if isinstance(call, dict) else call for index, call in enumerate(calls)
        ]
    return {**rest, "delta": delta}


def stream_type(api: str) -> bytes:
    """The Content-Type of a stream."""
    return b"application/x-ndjson" if api == "ollama" else b"text/event-stream"


def comment(text: str, api: str = "openai") -> bytes:
    """One comment line of a stream, without a blank line: the form that no client stumbles over.

    Lines of JSON have no comments; there, a space before the next line is all that no client minds.
    """
    return b" " if api == "ollama" else b": %b\n" % " ".join(text.split()).encode()


def beat(kind: str, model: str, request_id: str, created: int) -> bytes:
    """An event that adds nothing to a stream of ``kind``; nothing for kinds that take comments only."""
    if kind == "messages":
        return b'event: ping\ndata: {"type":"ping"}\n\n'
    if kind == "chat":
        choice: dict[str, object] = {"index": 0, "delta": {}, "finish_reason": None}
        name, prefix = "chat.completion.chunk", "chatcmpl-"
    elif kind == "completion":
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
        name, prefix = "text_completion", "cmpl-"
    else:
        return b""
    event = {
        "id": prefix + request_id,
        "object": name,
        "created": created,
        "model": model,
        "choices": [choice],
    }
    return b"data: %b\n\n" % written(event)


_STATUS_VALUES = {
    "ready": "loaded",
    "draining": "loaded",
    "loading": "loading",
    "standby": "sleeping",
    "demoting": "sleeping",
}


def model_status(state: str, *, failed: bool = False) -> dict[str, object]:
    """A state in llama.cpp's words; ``failed``: so did the last load."""
    value = _STATUS_VALUES.get(state, "unloaded")
    has_failed = value == "unloaded" and (failed or state == "stuck")
    return {"value": value, "failed": True} if has_failed else {"value": value}


def status_event(model: str, status: dict[str, object]) -> bytes:
    """The event by which llama.cpp's router announces ``status``."""
    data = {"status": status["value"], **{key: status[key] for key in status if key != "value"}}
    return b"data: %b\n\n" % written({"model": model, "event": "model_status", "data": data})


def model_entry(
    model: str,
    *,
    created: int,
    state: str,
    aliases: Iterable[str] = (),
    failed: bool = False,
    parent: str = "",
    card: ModelCard = NOTHING_KNOWN,
    anthropic: bool = False,
) -> dict[str, object]:
    """One model as OpenAI's, Anthropic's and llama.cpp's clients want it; ``state``: the GPU group's word.

    ``parent``: the model that it is a preset or a LoRA adapter of, in vLLM's word. ``anthropic``: for clients
    to whom ``capabilities`` is an object with all that Anthropic's models can do.
    """
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "anvil-mux",
        "type": "model",
        "display_name": model,
        "created_at": datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "aliases": list(aliases),
        "status": model_status(state, failed=failed),
        **({"parent": parent} if parent else {}),
        **_about(card, anthropic),
    }


def _about(card: ModelCard, anthropic: bool) -> dict[str, object]:
    """The card of a model, in the words of all whose clients look for it.

    The length of its context is told as vLLM, OpenRouter, llama.cpp and Anthropic do, what it takes as
    llama.cpp and OpenRouter do.
    """
    about: dict[str, object] = {}
    if length := card.context:
        about = {"max_model_len": length, "context_length": length, "max_input_tokens": length}
        about["meta"] = {"n_ctx": length}
    if card.capabilities:
        inputs = ["text", *(kind for name, kind in _INPUTS.items() if card.can(name))]
        outputs = ["text"] if card.is_textual else ["embeddings"] if card.can("embeddings") else []
        about["architecture"] = {"input_modalities": inputs, "output_modalities": outputs}
    if card.capabilities and not anthropic:
        text = ["completion"] if card.is_textual else []
        about["capabilities"] = text + [name for name in CAPABILITIES if card.can(name) and name not in text]
    return about


_INPUTS = {"vision": "image", "audio": "audio"}
_TOOLS = ("supports_tools", "supports_tool_calls")


def props(model: str, card: ModelCard) -> bytes:
    """The answer of llama.cpp's ``GET /props``, as far as it is known while the model is not loaded."""
    tools = card.capabilities.get("tools")
    known = {
        "default_generation_settings": {"n_ctx": card.context, "params": {}},
        "model_alias": model,
        "modalities": {name: card.can(name) for name in _INPUTS},
        "chat_template_caps": {name: tools for name in _TOOLS if tools is not None},
        "is_sleeping": True,
    }
    return written(known)


def models_list(entries: Iterable[dict[str, object]]) -> bytes:
    """The answer to ``GET /v1/models``."""
    data = list(entries)
    ends = (
        {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        if data
        else {"first_id": None, "last_id": None}
    )
    return written({"object": "list", "data": data, "has_more": False, **ends})


def lmstudio_list(states: Mapping[str, tuple[str, ModelCard]]) -> bytes:
    """Model -> state and card, as LM Studio's clients want it."""
    data = [_lmstudio_entry(model, state, card) for model, (state, card) in states.items()]
    return written({"object": "list", "data": data})


def _lmstudio_entry(model: str, state: str, card: ModelCard) -> dict[str, object]:
    is_loaded = _STATUS_VALUES.get(state) == "loaded"
    kind = "vlm" if card.can("vision") else "llm"
    length = {"max_context_length": card.context}
    return {
        "id": model,
        "object": "model",
        "type": kind if card.is_textual else "embeddings",
        "publisher": "anvil-mux",
        "state": "loaded" if is_loaded else "not-loaded",
        **(length if card.context else {}),
        **({"loaded_context_length": card.context} if card.context and is_loaded else {}),
        **({"capabilities": ["tool_use"]} if card.can("tools") else {}),
    }


_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def request_id(given: bytes | None, generate: Callable[[], str]) -> str:
    """The client's own id when it is harmless, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return generate()


def written(value: object) -> bytes:
    """Write ``value`` as JSON."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")
