"""What is asked in a case: a route, and odd values at some places of its body, query and head.

The routes are the program's own table, and those that it answers itself. A body is what clients send there,
and any key that the program's own code about client APIs has a word for may come into it.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from anvil_mux import protocol
from anvil_mux.protocol import api
from tests.values.engine import answers
from tests.values.values import Change, as_text, changed, in_header, in_query

MODELS = ("small", "twin", "llama", "vllm", "sglang", "ollama")
"""Model -> by its name the engine."""


class Brief:
    """Represented by what is not as usual."""

    def __repr__(self) -> str:
        given = [(each.name, getattr(self, each.name)) for each in fields(self)]  # type: ignore[arg-type]
        default = type(self)()
        said = [f"{name}={value!r}" for name, value in given if value != getattr(default, name)]
        return f"{type(self).__name__}({', '.join(said)})"


@dataclass(frozen=True, repr=False)
class Says(Brief):
    """What the engine answers at one path."""

    path: str = "/v1/chat/completions"
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, repr=False)
class Ask(Brief):
    """One request."""

    path: str = "/v1/chat/completions"
    method: str = "POST"
    model: str = "small"
    stream: bool = False
    changes: tuple[Change, ...] = ()
    """Of the body, or of the fields of a form."""
    query: tuple[tuple[str, str], ...] = ()
    """Keys, and the names of their values."""
    head: tuple[tuple[str, str], ...] = ()
    """Fields, and the names of their values."""
    parts: tuple[str, int] = ("", 0)
    """A part of a path, and how often it comes."""
    says: tuple[Says, ...] = ()
    reloads: bool = False
    """The model is unloaded first, so that its engine is asked what it is asked at a load."""


_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CALLS = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
_PARTS = [
    {"type": "text", "text": "a"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}},
]
_WISHES: dict[str, Any] = {
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "seed": 1,
    "stop": ["x"],
    "n": 1,
    "user": "u",
    "stream_options": {"include_usage": True},
    "kv_transfer_params": {"x": 1},
    "cache_salt": "s",
    "prompt_cache_key": "k",
    "session_id": "s",
    "priority": 1,
    "models": ["a"],
    "fallbacks": ["a"],
}
_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": _PARTS},
        {"role": "assistant", "content": "a", "tool_calls": _CALLS, "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "c1", "content": "t"},
    ],
    "tools": [_TOOL],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "chat_template_kwargs": {"enable_thinking": True},
    **_WISHES,
}
_OPTIONS = {
    "temperature": 0.5,
    "top_k": 5,
    "num_predict": 5,
    "num_ctx": 4096,
    "stop": ["x"],
    "repeat_penalty": 1.1,
}
_OLLAMA: dict[str, Any] = {
    "options": _OPTIONS,
    "format": {"type": "object"},
    "think": True,
    "keep_alive": "5m",
}
_BLOCKS = [
    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}},
    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a"}]},
]
_MESSAGES: dict[str, Any] = {
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": _BLOCKS},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "temperature": 0.5,
    "top_k": 5,
}
_SESSION = {"type": "realtime", "audio": {"input": {"transcription": {"model": "small"}}}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/chat/completions/batch": {"requests": [_CHAT], **_CHAT},
    "/v1/completions": {
        "prompt": ["a", "b"],
        "suffix": "s",
        "logprobs": 1,
        "echo": True,
        "best_of": 1,
        **_WISHES,
    },
    "/completion": {"prompt": [1, 2, 3], "n_predict": 5, "cache_prompt": True, "id_slot": 0, **_WISHES},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "a"}], "n_predict": 5},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "instructions": "i",
        "previous_response_id": "resp_1",
        "store": True,
        "background": False,
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "max_output_tokens": 5,
        "conversation": {"id": "c"},
        "reasoning": {"effort": "low"},
    },
    "/v1/embeddings": {"input": ["a", "b"], "dimensions": 5, "encoding_format": "float", "user": "u"},
    "/rerank": {"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1},
    "/score": {"text_1": "a", "text_2": ["b"], "queries": ["a"], "documents": ["b"]},
    "/v1/audio/speech": {"input": "a", "voice": "v", "speed": 1.0, "response_format": "wav"},
    "/v1/images/generations": {"prompt": "p", "n": 1, "size": "64x64", "response_format": "b64_json"},
    "/v1/realtime/client_secrets": {
        "session": {**_SESSION, "model": "small"},
        "expires_after": {"seconds": 5},
    },
    "/v1/realtime/transcription_sessions": {"input_audio_transcription": {"model": "small"}},
    "/v1/messages": _MESSAGES,
    "/v1/messages/count_tokens": _MESSAGES,
    "/tokenize": {"content": "a", "prompt": "a", "add_special": True, "with_pieces": True, "messages": []},
    "/detokenize": {"tokens": [1, 2]},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {}},
    "/api/chat": {
        "messages": [
            {"role": "user", "content": "a", "images": ["iVBORw"], "thinking": "t"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
            },
            {"role": "tool", "tool_name": "f", "content": "t"},
        ],
        "tools": [_TOOL],
        **_OLLAMA,
    },
    "/api/generate": {
        "prompt": "p",
        "system": "s",
        "suffix": "x",
        "images": ["iVBORw"],
        "raw": False,
        "template": "",
        "context": [],
        **_OLLAMA,
    },
    "/api/embed": {"input": ["a", "b"], "truncate": True, "dimensions": 5, **_OLLAMA},
    "/api/embeddings": {"prompt": "p", **_OLLAMA},
    "/api/show": {"name": "small", "verbose": True},
    "/api/pull": {"name": "small", "insecure": False, "stream": True},
    "/models/load": {"extra_args": []},
    "/models/unload": {"all": False},
    "/models/pin": {},
    "/models/unpin": {},
    "/pause": {"for": 0.01},
    "/resume": {},
    "/reload": {},
    "/requests/cancel": {"id": "x", "ticket": 5},
    "/hosts/drain": {"host": "local"},
    "/hosts/undrain": {"host": "local"},
    "/hosts/gone": {"host": "local"},
}
"""Path -> what clients send there, beside the model."""
UNNAMED = frozenset(
    {"/pause", "/resume", "/reload", "/requests/cancel", "/hosts/drain", "/hosts/undrain", "/hosts/gone"}
)
"""Paths of bodies that name no model."""
QUERIES: dict[str, tuple[str, ...]] = {
    "/": (),
    "/health": ("model",),
    "/healthz": (),
    "/hosts": (),
    "/livez": (),
    "/metrics": (),
    "/readyz": ("verbose",),
    "/api/hello": (),
    "/api/ps": (),
    "/api/tags": (),
    "/api/version": (),
    "/api/v0/models": (),
    "/models": ("reload",),
    "/v1/models": ("limit", "after_id"),
    "/v1/models/small": (),
    "/requests": ("id", "last"),
    "/requests/running": (),
    "/usage": ("since", "by"),
    "/events": (),
    "/logs": ("model", "lines", "backend", "follow"),
    "/models/sse": ("model",),
    "/why": ("model", "tokens", "with", "key"),
    "/props": ("model", "autoload"),
    "/slots": ("model", "fail_on_no_slot", "autoload"),
    "/lora-adapters": ("model",),
    "/v1/realtime": ("model", "intent"),
    "/v1/audio/voices": ("model",),
    "/upstream/llama/slots": ("model",),
    "/upstream/small/v1/models": ("model",),
    "/v1/responses/resp_1": ("include", "stream", "starting_after"),
    "/v1/responses/resp_1/input_items": ("limit", "order"),
}
"""Path of a GET -> what its query may have."""
HEADS = (
    *(
        "Authorization",
        "X-Api-Key",
        "Api-Key",
        "X-Session-Id",
        "X-Request-ID",
        "X-Anvil-Swap",
        "X-Anvil-Explain",
    ),
    *("X-Stainless-Timeout", "X-Stainless-Read-Timeout", "X-Stainless-Retry-Count", "Content-Type", "Accept"),
    *(
        "Content-Encoding",
        "Accept-Encoding",
        "Origin",
        "Referer",
        "User-Agent",
        "Cookie",
        "Range",
        "Priority",
    ),
    *("Traceparent", "Tracestate", "Anthropic-Version", "Anthropic-Beta", "OpenAI-Organization", "X-Title"),
    *("Keep-Alive", "Sec-Fetch-Site", "Sec-WebSocket-Key", "Sec-WebSocket-Protocol", "X-Forwarded-For"),
    *("X-Anvil-Priority", "X-Priority", "X-Timeout", "X-Anvil-Key", "X-Data-Parallel-Rank", "Last-Event-ID"),
    *("If-None-Match", "If-Modified-Since", "Accept-Language", "Prefer", "Idempotency-Key", "Forwarded"),
)
FORMS = frozenset(
    path for path, methods in api.ROUTES.items() if methods.get("POST", api.NO_ROUTE).model_in == "multipart"
)
_FORM: dict[str, Any] = {
    "file": "x",
    "prompt": "p",
    "language": "en",
    "temperature": "0.5",
    "response_format": "json",
}
STREAMS = frozenset({"/events", "/models/sse"})
"""Answers without an end."""


def posts() -> list[str]:
    """Every path to which something may be posted."""
    routed = [path for path, methods in api.ROUTES.items() if "POST" in methods]
    below = [f"/upstream/small{path}" for path in ("/v1/chat/completions", "/v1/embeddings")]
    return [
        *routed,
        *(path for path in BODIES if path not in routed),
        "/v1/engines/small/completions",
        *below,
    ]


def base_of(path: str) -> dict[str, Any]:
    """What clients send to a path, without its model."""
    for prefix in ("/upstream/small", "/v1/engines/small", "/openai/deployments/small"):
        if path.startswith(prefix):
            path = path[len(prefix) :]
    for variant in (path, f"/v1{path}", path.removeprefix("/v1"), path.removeprefix("/v")):
        if variant in BODIES:
            return BODIES[variant]
    return _FORM if path in FORMS else {"input": "a", "prompt": "a"}


def document_of(ask: Ask) -> dict[str, Any]:
    """The body before it is changed."""
    base = base_of(ask.path)
    named = {} if ask.path in UNNAMED else {"model": ask.model}
    streamed = {"stream": True} if ask.stream else {}
    streamed = {"stream": False} if ask.path.startswith("/api/") and not ask.stream else streamed
    return {**named, **streamed, **base}


def body_of(ask: Ask) -> tuple[bytes, bytes]:
    """The kind of a body, and the body."""
    if ask.method == "GET":
        return b"", b""
    if ask.path in FORMS:
        return b"multipart/form-data; boundary=XX", _form(ask)
    text = changed(document_of(ask), ask.changes)
    return b"application/json", text.encode("utf-8", "surrogatepass")


def _form(ask: Ask) -> bytes:
    values = {key: str(value) for key, value in document_of(ask).items()}
    values |= {str(path[0]): as_text(name) for path, name in ask.changes if path}
    parts = [
        b'--XX\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        % (key.encode(), value.encode("utf-8", "surrogatepass"))
        for key, value in values.items()
    ]
    return b"".join(parts) + b"--XX--\r\n"


def request_of(ask: Ask) -> bytes:
    """What its client sends."""
    kind, body = body_of(ask)
    part, count = ask.parts
    target = ask.path + part * count
    query = "&".join(f"{key}={in_query(name)}" for key, name in ask.query)
    if query:
        target += f"{'&' if '?' in target else '?'}{query}"
    lines = [f"{ask.method} {target} HTTP/1.1".encode(), b"Host: 127.0.0.1"]
    named = {name.lower() for name, _ in ask.head}
    if kind and "content-type" not in named:
        lines.append(b"Content-Type: " + kind)
    lines += [name.encode() + b": " + in_header(value) for name, value in ask.head]
    if body or ask.method == "POST":
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, b"", b""]) + body


def said(says: Says, model: str) -> str:
    """What the engine answers there."""
    document = answers(model)[says.path]
    if isinstance(document, str):  # a page of figures
        text = document
        for path, name in says.changes:
            if path:
                text = text.replace(f"{path[0]} 0", f"{path[0]} {as_text(name)}")
        return text
    return changed(document, says.changes)


@cache
def words() -> tuple[str, ...]:
    """Every key that the code about client APIs has a word for."""
    found: set[str] = set()
    for file in Path(protocol.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_]{1,30}", value):
                found.add(value)
    return tuple(sorted(found))
