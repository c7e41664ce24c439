"""Completions: engines' answers in parts, for APIs that are translated, and questions in two stages.

Pure. A client's API that its engine does not speak is turned into a question that every engine understands
(``Translation``): OpenAI's chat completions, completions or embeddings. The answer comes back whole or as a
stream of events; ``parts_of`` and ``ChunkReader`` read both into the same few parts, and the client's API
(ollama.py, anthropic.py) says them in its own words.

Engines differ in small things, all of which are taken: reasoning is called ``reasoning_content`` or
``reasoning``, a call of a tool may come at once or in fragments, some say ``stop`` where they mean
``tool_calls``, and llama.cpp tells what it measured (``timings``). A stream that ends without a reason to end
has broken off, whatever its framing says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from anvil_mux.clock import MOST_COUNT
from anvil_mux.errors import BackendError, BadRequest, QuotedFailure
from anvil_mux.protocol import foreign
from anvil_mux.protocol.api import written

MAX_LINE = 16 << 20
"""Bytes of one event."""


class Part(NamedTuple):
    """A piece of an answer. A call of a tool begins with its id and name, and pieces of its arguments follow,
    which are JSON.
    """

    block: str
    """The kind of block that it belongs to: text, thinking, or tool_use."""
    text: str = ""
    id: str = ""
    """Only where a tool's call begins."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ended, and what it took; counts are None where the engine did not tell."""

    reason: str
    """One of stop, length, tool_calls, content_filter."""
    stop_sequence: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_seconds: float | None = None
    completion_seconds: float | None = None


class AnswerTranslation:
    """An engine's answer in the words of the client's API; moments are Unix time. Most have no stream."""

    def begun(self, now: float, waited: float) -> None:
        """Note that an engine is asked, ``waited`` seconds after the request came; another one's answer is
        forgotten.
        """

    def whole(self, body: bytes, now: float) -> bytes:
        """Translate a whole answer, or write one where no engine was asked; BackendError when it cannot be
        read.
        """
        raise NotImplementedError

    def feed(self, data: bytes, now: float) -> bytes:
        """Translate the next bytes of a stream; BackendError when the engine reports an error."""
        raise BackendError("The engine answered with a stream to a question without one.")

    def finish(self, now: float) -> bytes:
        """Write the end of the stream; BackendError when the engine's broke off."""
        return b""


@dataclass(frozen=True, slots=True)
class Translation:
    """A request in words that every engine understands."""

    model: str | None
    """The model's name, as the client has it."""
    path: str
    """The path that the engine is asked for; empty: none, the model is only loaded or unloaded."""
    question: dict[str, Any]
    """The body, but for the model."""
    answer: AnswerTranslation
    stream: bool = False
    keep_alive: float | None = None
    """The seconds for which the model is to stay once nobody uses it; None: nothing is said of that; 0: it is
    unloaded then.
    """

    def body(self, model: str) -> bytes:
        return written({"model": model, **self.question})


def parse(body: bytes | bytearray) -> dict[str, Any]:
    """A request's JSON object; BadRequest otherwise, also when it names two models."""
    try:
        said = foreign.read(body, pairs=_once, of_request=True)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}", param="body") from None
    if not isinstance(said, dict):
        raise BadRequest("the body must be a JSON object", param="body")
    return said


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def finite(value: Any) -> Any:
    """Return ``value`` without the numbers that JSON does not have."""
    match value:
        case dict():
            return {key: finite(each) for key, each in value.items()}
        case list():
            return [finite(each) for each in value]
        case float() if not math.isfinite(value):
            return None
    return value


def arguments_of(call: str) -> dict[str, Any]:
    """The arguments of a tool call; engines pass on what the model wrote, which need not be JSON."""
    arguments = foreign.read_object(call or "{}")
    if arguments is None:
        raise QuotedFailure("The model produced tool-call arguments that are not a JSON object", call[:200])
    return arguments


def objects(said: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The list of objects under ``key``, empty if there is none; BadRequest for anything else."""
    found = said.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise BadRequest(f"`{key}` must be a list of objects", param=key)
    return found


def text(said: Mapping[str, Any], key: str) -> str:
    """The string under ``key``, empty if there is none; BadRequest for anything else."""
    found = said.get(key)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise BadRequest(f"`{key}` must be a string", param=key)
    return found


# Whole answers


def document(body: bytes) -> dict[str, Any]:
    """An engine's JSON object."""
    answer = foreign.read_object(body)
    if answer is None:
        raise BackendError("The engine's answer is not a JSON object.")
    _raise_error(answer)
    return answer


def parts_of(body: bytes) -> tuple[list[Part], Ending]:
    """The parts of an answer that came whole."""
    found = document(body)
    choice = _choice(found)
    if choice is None:
        raise BackendError("The engine's answer has no choices.")
    message = choice.get("message")
    message = message if isinstance(message, dict) else choice
    parts = list(_said(message))
    for index, call in enumerate(_calls(message)):
        parts += [_tool_begin(call, index), Part("tool_use", _arguments(call))]
    called = any(part.id for part in parts)
    return parts, _ending(choice, found.get("usage"), found.get("timings"), called=called)


# Streams


class ChunkReader:
    """Reads a stream of chunks as its bytes come."""

    def __init__(self) -> None:
        self._lines = foreign.Lines()
        self._usage: object = None
        self._timings: object = None
        self._last: dict[str, Any] | None = None
        """The choice that said why the answer ended."""
        self._tool: object = None
        """The index of the call whose arguments come."""

    def feed(self, data: bytes) -> Iterator[Part]:
        """The parts that have come with ``data``."""
        lines = self._lines.feed(data)
        if len(self._lines.rest) > MAX_LINE:
            raise BackendError(f"The engine sent an event of more than {MAX_LINE} bytes.")
        for line in lines:
            if line.startswith(b"data:"):
                yield from self._event(line[5:].strip())

    def finish(self) -> Ending:
        """Why the answer ended."""
        if self._last is None:
            raise BackendError("The engine broke off its answer.")
        return _ending(self._last, self._usage, self._timings, called=self._tool is not None)

    def _event(self, data: bytes) -> Iterator[Part]:
        if data in (b"", b"[DONE]"):
            return
        chunk = document(data)
        self._usage = chunk.get("usage") or self._usage
        self._timings = chunk.get("timings") or self._timings
        choice = _choice(chunk)
        if choice is None:
            return
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else choice
        yield from _said(delta)
        for call in _calls(delta):
            yield from self._fragment(call)
        if choice.get("finish_reason"):
            self._last = choice

    def _fragment(self, call: dict[str, Any]) -> Iterator[Part]:
        index = call.get("index", 0)
        if index != self._tool:
            self._tool = index
            yield _tool_begin(call, index)
        if arguments := _arguments(call):
            yield Part("tool_use", arguments)


def _choice(found: dict[str, Any]) -> dict[str, Any] | None:
    choices = found.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) and not first.get("index") else None


def _said(message: dict[str, Any]) -> Iterator[Part]:
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought and isinstance(thought, str):
        yield Part("thinking", thought)
    said = message.get("content") or message.get("text")
    if said and isinstance(said, str):
        yield Part("text", said)


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _tool_begin(call: dict[str, Any], index: object) -> Part:
    name = str(_function(call).get("name") or "")
    return Part("tool_use", id=str(call.get("id") or f"call_{index}"), name=name)


def _arguments(call: dict[str, Any]) -> str:
    given = _function(call).get("arguments")
    return given if isinstance(given, str) else "" if given is None else json.dumps(given)


def _function(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    return function if isinstance(function, dict) else {}


def count(value: object) -> int | None:
    """The number of tokens that an engine says; None if that is none."""
    return value if type(value) is int and 0 <= value <= MOST_COUNT else None


def _ending(choice: dict[str, Any], usage: object, timings: object, *, called: bool) -> Ending:
    reason = str(choice.get("finish_reason") or "stop")
    sequence = choice.get("stop_reason")  # vLLM: what of `stop` it was
    counts = usage if isinstance(usage, dict) else {}
    details = counts.get("prompt_tokens_details")
    return Ending(
        reason="tool_calls" if called and reason == "stop" else reason,
        stop_sequence=sequence if isinstance(sequence, str) else None,
        prompt_tokens=count(counts.get("prompt_tokens")),
        completion_tokens=count(counts.get("completion_tokens")),
        cached_tokens=count(details.get("cached_tokens")) if isinstance(details, dict) else None,
        prompt_seconds=_seconds(timings, "prompt_ms"),
        completion_seconds=_seconds(timings, "predicted_ms"),
    )


def _seconds(timings: object, key: str) -> float | None:
    """A time that llama.cpp measured."""
    found = timings.get(key) if isinstance(timings, dict) else None
    return found / 1000 if isinstance(found, (int, float)) and 0 <= found <= MOST_COUNT else None


def _raise_error(found: dict[str, Any]) -> None:
    error = found.get("error") or (found if found.get("object") == "error" else None)
    if error:
        said = error.get("message") if isinstance(error, dict) else error
        raise QuotedFailure("The engine reports an error", str(said))


# Two stages at two engines
#
# The prompt is computed by one engine, the answer written by the other: the protocol of vLLM's disaggregated
# prefill as its own proxy speaks it. The prefill engine is asked for one token and told that somebody else
# will decode; it answers where the keys and values of the prompt are (``kv_transfer_params``). The decode
# engine is asked what the client asked, with these parameters, and fetches them. An engine that gives none (a
# prompt of less than a block) leaves nothing to fetch: the decode engine computes the prompt itself. What a
# client says of such transfers is never passed on.

TWO_STAGE_PATHS = ("/v1/chat/completions", "/v1/completions")
"""The paths that can be served in two stages."""
_TRANSFER = "kv_transfer_params"
REMOTE_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_WITHOUT = ("stream_options", "min_tokens", "min_completion_tokens")
"""The fields that do not go with a single token in one piece."""


def for_prefill(question: dict[str, Any], model: str) -> bytes:
    """The body for the prefill engine."""
    kept = {key: value for key, value in question.items() if key not in _WITHOUT}
    if "max_completion_tokens" in kept:
        kept["max_completion_tokens"] = 1
    return written({**kept, "model": model, "stream": False, "max_tokens": 1, _TRANSFER: REMOTE_DECODE})


def for_decode(question: dict[str, Any], prefilled: bytes) -> dict[str, Any]:
    """The body for the decode engine, with the prefill engine's answer; ValueError if that is none."""
    answer = foreign.read(prefilled)
    if not isinstance(answer, dict):
        raise ValueError("it is not an object")
    transfer = answer.get(_TRANSFER)
    kept = {key: value for key, value in question.items() if key != _TRANSFER}
    return {**kept, _TRANSFER: transfer} if transfer else kept
