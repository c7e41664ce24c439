"""Ollama's API in front of any engine.

Pure. ``TRANSLATE`` turns a body of Ollama's into a question in OpenAI's words and knows how to say the answer
in Ollama's: one object, or an object per line. A request without messages or prompt asks nothing: it loads
the model, or with ``keep_alive: 0`` unloads it. Any other ``keep_alive`` says for how long the model stays
once nobody uses it.

Options that belong to a load (``num_ctx``, ``num_gpu``, ...) are passed over, as the compose file has them;
``template`` and ``context`` cannot be honoured by other engines and are refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, ClassVar

from anvil_mux.clock import YEAR_SECONDS, seconds_in
from anvil_mux.errors import BackendError, BadRequest
from anvil_mux.protocol.api import written
from anvil_mux.protocol.cards import ModelCard
from anvil_mux.protocol.completions import (
    AnswerTranslation,
    ChunkReader,
    Ending,
    Part,
    Translation,
    arguments_of,
    count,
    document,
    objects,
    parts_of,
    text,
)

VERSION = "0.12.6"
"""The version of the API that is spoken here; clients ask for a least one."""
LATEST = ":latest"
FOR_EVER = 100 * 365 * 86400.0

_OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repeat_penalty",
}
_IMAGES = {"/9j/": "jpeg", "iVBOR": "png", "R0lGOD": "gif", "UklGR": "webp"}
"""How base64 of an image begins."""


def chat(said: dict[str, Any]) -> Translation:
    messages = _Messages().all(objects(said, "messages"))
    question: dict[str, Any] = {"messages": messages, **_wishes(said)}
    if tools := objects(said, "tools"):
        question["tools"] = tools
    return _translation(said, "/v1/chat/completions" if messages else "", question, _Chat)


def generate(said: dict[str, Any]) -> Translation:
    for key in ("template", "context"):
        if said.get(key):
            raise BadRequest(f"`{key}` cannot be honoured here; use /api/chat", param=key)
    prompt, system, suffix = text(said, "prompt"), text(said, "system"), text(said, "suffix")
    if said.get("raw") or suffix:
        if said.get("images"):
            text_only = (
                "`images` cannot be combined with `raw` or `suffix`: leave these out, or use /api/chat"
            )
            raise BadRequest(text_only, param="images")
        question = {"prompt": prompt, **({"suffix": suffix} if suffix else {}), **_wishes(said)}
        return _translation(said, "/v1/completions", question, _Generate)
    images = said.get("images") or []
    asked: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    asked.append({"role": "user", "content": _content(prompt, images)})
    path = "/v1/chat/completions" if prompt or images else ""
    return _translation(said, path, {"messages": asked, **_wishes(said)}, _Generate)


def embed(said: dict[str, Any]) -> Translation:
    question = {"input": said.get("input")}
    if "dimensions" in said:
        question["dimensions"] = said["dimensions"]
    return _translation(said, "/v1/embeddings" if said.get("input") else "", question, _Embed)


def embeddings(said: dict[str, Any]) -> Translation:
    prompt = text(said, "prompt")
    return _translation(said, "/v1/embeddings" if prompt else "", {"input": prompt}, _Embeddings)


TRANSLATE: dict[str, Callable[[dict[str, Any]], Translation]] = {
    "/api/chat": chat,
    "/api/generate": generate,
    "/api/embed": embed,
    "/api/embeddings": embeddings,
}


def _translation(
    said: dict[str, Any], path: str, question: dict[str, Any], answer: type[_Words]
) -> Translation:
    """The translation; ``path`` is empty where nothing is asked."""
    stream = issubclass(answer, _Spoken) and said.get("stream", True) is not False
    if stream and path:
        question |= {"stream": True, "stream_options": {"include_usage": True}}
    name, keep_alive = name_in(said), _keep_alive(said)
    about = answer(name or "", "unload" if keep_alive == 0 else "load")
    return Translation(name, path, question, about, stream=stream, keep_alive=keep_alive)


def name_in(said: Mapping[str, Any]) -> str | None:
    """The model that a body names, now or as it was once called."""
    for key in said:
        if key.lower() in ("model", "name") and not key.islower():  # Ollama reads it all the same
            raise BadRequest(f"`{key}` is written `{key.lower()}`", param="model")
    return text(said, "model") or text(said, "name") or None


def _keep_alive(said: Mapping[str, Any]) -> float | None:
    """The seconds that ``keep_alive`` says: a number, or a duration as Go writes it; for ever if negative."""
    value = said.get("keep_alive")
    if value is None or value == "":
        return None
    sign, seconds = 1, value
    if isinstance(value, str):
        sign = -1 if value[0] == "-" else 1
        seconds = seconds_in(value[1:] if value[0] in "+-" else value)
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or seconds != seconds:
        text = '`keep_alive` must be a duration such as "5m", a number of seconds, 0 or -1'
        raise BadRequest(text, param="keep_alive")
    if sign < 0 or seconds < 0:
        return math.inf if seconds else 0.0
    if seconds > YEAR_SECONDS:
        raise BadRequest("`keep_alive` is at most a year (8760h); -1 means for ever", param="keep_alive")
    return float(seconds)


# Questions


def _wishes(said: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an answer: options, format, thinking."""
    options = said.get("options") or {}
    if not isinstance(options, dict):
        raise BadRequest("`options` must be an object", param="options")
    wishes = {theirs: options[ours] for ours, theirs in _OPTIONS.items() if options.get(ours) is not None}
    if "repeat_penalty" in wishes:
        wishes["repetition_penalty"] = wishes["repeat_penalty"]  # as vLLM and SGLang call it
    most = options.get("num_predict")
    if isinstance(most, int) and most > 0:
        wishes["max_tokens"] = most
    return wishes | _format(said.get("format")) | _thinking(said.get("think"))


def _format(given: object) -> dict[str, Any]:
    if isinstance(given, dict):
        schema = {"name": "answer", "schema": given, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if given == "json":
        return {"response_format": {"type": "json_object"}}
    if given:
        raise BadRequest("`format` must be json or a JSON schema", param="format")
    return {}


def _thinking(given: object) -> dict[str, Any]:
    if isinstance(given, bool):
        return {"chat_template_kwargs": {"enable_thinking": given, "thinking": given}}
    return {"reasoning_effort": given} if given else {}


def _content(said: str, images: object) -> str | list[dict[str, Any]]:
    """Images stand before the text, as Ollama puts them: models have learned to read them in an order."""
    if not images:
        return said
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise BadRequest("`images` must be a list of images in base64", param="images")
    shown = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in images]
    return [*shown, *([{"type": "text", "text": said}] if said else [])]


def _data_url(image: str) -> str:
    kind = next((kind for start, kind in _IMAGES.items() if image.startswith(start)), "jpeg")
    return f"data:image/{kind};base64,{image}"


class _Messages:
    """A conversation; gives calls of tools the ids that Ollama's clients leave out."""

    def __init__(self) -> None:
        self._calls = 0
        self._open: list[tuple[str, str]] = []
        """The calls whose results have not come yet, as (id, name)."""

    def all(self, said: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._message(each) for each in said]

    def _message(self, said: dict[str, Any]) -> dict[str, Any]:
        role = text(said, "role")
        message: dict[str, Any] = {
            "role": role,
            "content": _content(text(said, "content"), said.get("images")),
        }
        if thought := text(said, "thinking"):
            message["reasoning_content"] = thought
        if role == "tool":
            message["tool_call_id"] = self._answered(said)
        elif calls := objects(said, "tool_calls"):
            self._open = []
            message["tool_calls"] = [self._call(call) for call in calls]
        return message

    def _call(self, said: dict[str, Any]) -> dict[str, Any]:
        function = said.get("function")
        if not isinstance(function, dict):
            raise BadRequest("a tool call needs a `function`", param="messages")
        self._calls += 1
        id, name = text(said, "id") or f"call_{self._calls}", text(function, "name")
        self._open.append((id, name))
        arguments = function.get("arguments")
        written = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        return {"id": id, "type": "function", "function": {"name": name, "arguments": written}}

    def _answered(self, said: dict[str, Any]) -> str:
        if given := text(said, "tool_call_id"):
            return given
        name = text(said, "tool_name") or text(said, "name")
        found = next((call for call in self._open if call[1] == name), None) or next(iter(self._open), None)
        if found is None:
            return "call_0"
        self._open.remove(found)
        return found[0]


# Answers


class _Words(AnswerTranslation):
    """The common part of all answers. Moments are Unix time, durations are told in nanoseconds."""

    def __init__(self, model: str, done: str) -> None:
        self._model = model
        self._done = done
        """The deed when nothing was asked: load or unload."""
        self._began = self._waited = 0.0
        self._first: float | None = None

    def begun(self, now: float, waited: float) -> None:
        self._began, self._waited, self._first = now, waited, None

    def _durations(self, now: float) -> dict[str, int]:
        return {"total_duration": _ns(now - self._began + self._waited), "load_duration": _ns(self._waited)}


class _Spoken(_Words):
    """An answer in words: of /api/chat and /api/generate."""

    def __init__(self, model: str, done: str) -> None:
        super().__init__(model, done)
        self._parts = ChunkReader()
        self._calls: list[tuple[str, str, list[str]]] = []
        """Id, name and the pieces of the arguments."""

    def begun(self, now: float, waited: float) -> None:
        super().begun(now, waited)
        self._parts, self._calls = ChunkReader(), []

    def whole(self, body: bytes, now: float) -> bytes:
        if not body:
            return self._line(now, [], {"done_reason": self._done, "done": True})
        parts, ending = parts_of(body)
        for part in parts:
            self._gather(part)
        calls = self._tool_calls(ending)
        return self._line(now, parts, {"done": True, **self._end(ending, now)}, calls)

    def feed(self, data: bytes, now: float) -> bytes:
        return self._lines_of(self._parts.feed(data), now)

    def finish(self, now: float) -> bytes:
        waited = self._lines_of(self._parts.flush(), now)
        ending = self._parts.finish()
        calls = self._tool_calls(ending)
        called = self._line(now, [], {"done": False}, calls) if calls else b""
        return waited + called + self._line(now, [], {"done": True, **self._end(ending, now)})

    def _lines_of(self, parts: Iterable[Part], now: float) -> bytes:
        """Return the lines for the parts that are sent as they come."""
        lines = []
        for part in parts:
            self._first = self._first or now
            if not self._gather(part):
                lines.append(self._line(now, [part], {"done": False}))
        return b"".join(lines)

    def _gather(self, part: Part) -> bool:
        """Keep what belongs to a tool call, which is sent whole."""
        if part.block != "tool_use":
            return False
        if part.id:
            self._calls.append((part.id, part.name, []))
        else:
            self._calls[-1][2].append(part.text)
        return True

    def _tool_calls(self, ending: Ending) -> list[dict[str, Any]]:
        """Return the calls, but for one that the answer's limit of tokens cut off."""
        read = [(id, name, arguments_of("".join(pieces), ending)) for id, name, pieces in self._calls]
        whole = [each for each in read if each[2] is not None]
        return [
            {"id": id, "function": {"index": index, "name": name, "arguments": arguments}}
            for index, (id, name, arguments) in enumerate(whole)
        ]

    def _end(self, ending: Ending, now: float) -> dict[str, Any]:
        """Durations as the engine measured them, or else by when its bytes came."""
        prompt, said = ending.prompt_seconds, ending.completion_seconds
        if prompt is None and self._first is not None:
            prompt = self._first - self._began
        if said is None:
            said = now - (self._first or self._began)
        figures = {
            "done_reason": "length" if ending.reason == "length" else "stop",
            **self._durations(now),
            "prompt_eval_count": ending.prompt_tokens,
            "prompt_eval_duration": None if prompt is None else _ns(prompt),
            "eval_count": ending.completion_tokens,
            "eval_duration": _ns(said),
        }
        return {key: value for key, value in figures.items() if value is not None}

    def _line(
        self, now: float, parts: list[Part], more: dict[str, Any], calls: Sequence[dict[str, Any]] = ()
    ) -> bytes:
        said = "".join(part.text for part in parts if part.block == "text")
        thought = "".join(part.text for part in parts if part.block == "thinking")
        about = {"model": self._model, "created_at": _stamp(now)}
        said_by = self._said(said, thought, calls)
        return written({**about, **said_by, **more}) + b"\n"

    def _said(self, said: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        raise NotImplementedError


class _Chat(_Spoken):
    def _said(self, said: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class _Generate(_Spoken):
    def _said(self, said: str, thought: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {"response": said, **({"thinking": thought} if thought else {})}


def _is_number(value: object) -> bool:
    """Whether it is a number that JSON has, which NaN and what is infinite are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


class _Embed(_Words):
    _empty: ClassVar[dict[str, Any]] = {"embeddings": []}

    def whole(self, body: bytes, now: float) -> bytes:
        if not body:
            return written(self._empty)
        found = document(body)
        data = found.get("data")
        if not isinstance(data, list):
            raise BackendError("The engine's answer has no embeddings.")
        vectors = [each.get("embedding") for each in data if isinstance(each, dict)]
        if not all(isinstance(each, list) and all(map(_is_number, each)) for each in vectors):
            raise BackendError("The engine's answer has embeddings that are no lists of numbers.")
        usage = found.get("usage")
        tokens = count(usage.get("prompt_tokens")) if isinstance(usage, dict) else None
        return written(self._answer(vectors, tokens or 0, now))

    def _answer(self, vectors: list[Any], tokens: int, now: float) -> dict[str, Any]:
        durations = self._durations(now)
        return {"model": self._model, "embeddings": vectors, **durations, "prompt_eval_count": tokens}


class _Embeddings(_Embed):
    _empty: ClassVar[dict[str, Any]] = {"embedding": []}

    def _answer(self, vectors: list[Any], tokens: int, now: float) -> dict[str, Any]:
        return {"embedding": vectors[0] if vectors else []}


# Models


def tags(models: Mapping[str, ModelCard], since: float) -> bytes:
    """All models that could be asked for, as /api/tags lists them."""
    listed = [{**_model(name, since), "capabilities": _abilities(card)} for name, card in models.items()]
    return written({"models": listed})


def running(models: Mapping[str, tuple[float, ModelCard]], now: float) -> bytes:
    """Resident model -> the seconds for which it stays if nobody uses it, as /api/ps lists them."""
    listed = [
        {
            **_model(name, now),
            "expires_at": _stamp(now + min(left, FOR_EVER)),
            "size_vram": 0,
            **({"context_length": card.context} if card.context else {}),
        }
        for name, (left, card) in models.items()
    ]
    return written({"models": listed})


def show(name: str, since: float, card: ModelCard) -> bytes:
    """The answer of /api/show: what may be passed on to the model, and how long that may be."""
    length = {f"{ARCHITECTURE}.context_length": card.context} if card.context else {}
    about = {
        "modelfile": "",
        "parameters": f"num_ctx {card.context}" if card.context else "",
        "template": "",
        "details": _DETAILS,
        "model_info": {"general.architecture": ARCHITECTURE, "general.basename": name, **length},
        "capabilities": _abilities(card),
        "modified_at": _stamp(since),
    }
    return written(about)


def _abilities(card: ModelCard) -> list[str]:
    """The abilities of a model in Ollama's words.

    Its clients leave out what a model is not said to be able to do; so what is not known is named as well,
    unless it answers in no text.
    """
    if not card.is_textual:
        return ["embedding"] if card.can("embeddings") else []
    maybe = [name for name in _PASSED_ON if card.capabilities.get(name, True)]
    return ["completion", *maybe, *(["audio"] if card.can("audio") else [])]


def version() -> bytes:
    return written({"version": VERSION})


ARCHITECTURE = "unknown"
_PASSED_ON = ("tools", "vision", "thinking")
_DETAILS: dict[str, Any] = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}


def _model(name: str, since: float) -> dict[str, Any]:
    digest = hashlib.sha256(name.encode()).hexdigest()
    about = {"name": name, "model": name, "modified_at": _stamp(since), "size": 0, "digest": digest}
    return {**about, "details": _DETAILS}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _stamp(moment: float) -> str:
    return datetime.fromtimestamp(moment, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
