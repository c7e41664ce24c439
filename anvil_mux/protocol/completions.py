"""Completions: engines' answers in parts, for APIs that are translated, and questions in two stages.

Pure. A client's API that its engine does not speak is turned into a question that every engine understands
(``Translation``): OpenAI's chat completions, completions or embeddings. The answer comes back whole or as a
stream of events; ``parts_of`` and ``ChunkReader`` read both into the same few parts, and the client's API
(ollama.py, anthropic.py) says them in its own words.

Engines differ in small things, all of which are taken: reasoning is called ``reasoning_content`` or
``reasoning``, content may be a list of parts, a call of a tool may come at once or in fragments, also in turn
with those of another call, parallel calls may have the same index or none, some say ``stop`` where they mean
``tool_calls``, and llama.cpp tells what it measured (``timings``). A stream that ends without a reason to end
has broken off, whatever its framing says.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anvil_mux.clock import MOST_COUNT
from anvil_mux.errors import BackendError, BadRequest, QuotedFailure
from anvil_mux.protocol import foreign
from anvil_mux.protocol.api import written

MAX_LINE = 16 << 20
"""Bytes of one event."""
_BOM = "\ufeff".encode()


class Part(NamedTuple):
    """A piece of an answer. A call of a tool begins with its id and name, and pieces of its arguments follow,
    which are JSON. All pieces of a block come before the next block begins.
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


def arguments_of(call: str, ending: Ending) -> dict[str, Any] | None:
    """Return the arguments of a tool call, or None if the answer's limit of tokens cut them off.

    Engines pass on what the model wrote: QuotedFailure if that is not a JSON object.
    """
    arguments = foreign.read_object(call)
    if arguments is not None or ending.reason == "length":
        return arguments
    if call.strip() in ("", "null"):
        return {}
    raise _not_an_object(call)


def _not_an_object(arguments: str) -> QuotedFailure:
    summary = "The model produced tool-call arguments that are not a JSON object"
    return QuotedFailure(summary, arguments[:200])


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
    calls: list[_ToolCall] = []
    for given in _calls(message):
        calls.append(_ToolCall.of(given, calls))
        parts += [Part("tool_use", id=calls[-1].id, name=calls[-1].name), Part("tool_use", _arguments(given))]
    return parts, _ending(choice, found.get("usage"), found.get("timings"), called=bool(calls))


# Streams


@dataclass(slots=True)
class _ToolCall:
    """A call of a tool in an answer."""

    id: str
    """The id for the client, which no other call of the answer has."""
    name: str
    given_id: str
    """The id that the engine gave it; "" for none."""
    index: int | None
    pieces: list[str] = field(default_factory=list)
    sent: int = 0
    """The pieces of its arguments that were read already."""
    has_begun: bool = False

    @classmethod
    def of(cls, given: dict[str, Any], calls: list[_ToolCall]) -> _ToolCall:
        """Make the call that an engine's object begins; ``calls``: those before it."""
        id, used = _id(given), {call.id for call in calls}
        unique = id if id not in used else ""
        number = len(calls)
        while not unique or unique in used:
            unique, number = f"call_{number}", number + 1
        return cls(unique, _name(given), id, _index(given))

    @property
    def is_whole(self) -> bool:
        """Whether its arguments are a JSON object, behind which nothing can follow."""
        last = self.pieces[-1].rstrip() if self.pieces else "{"
        return (not last or last.endswith("}")) and foreign.read_object("".join(self.pieces)) is not None

    def continues(self, given: dict[str, Any]) -> bool:
        """Whether an engine's object goes on with this call, rather than begin another one.

        Both have the same index, or the object has none. Some engines repeat the name with each fragment,
        some invent an id for each, and some give all parallel calls the same index.
        """
        id, name = _id(given), _name(given)
        if id and id == self.given_id:
            return name in ("", self.name) or not self.name
        if not name:
            return not (id and self.is_whole)
        if (self.name and name != self.name) or (id and self.given_id):
            return False
        return not (_arguments(given).strip() and self.is_whole)

    def parts(self, *, is_last: bool) -> Iterator[Part]:
        """Yield the parts that have come since the last time; not before its name is known."""
        if not self.has_begun:
            if not (self.name or is_last):
                return
            self.has_begun = True
            yield Part("tool_use", id=self.id, name=self.name)
        text = "".join(self.pieces[self.sent :])
        self.sent = len(self.pieces)
        if text:
            yield Part("tool_use", text)


class ChunkReader:
    """Reads a stream of chunks as its bytes come.

    The fragments of several tool calls may alternate. Then the first call is passed on as it comes, and what
    begins behind it waits until the arguments of the first are whole, or the stream ends.
    """

    def __init__(self) -> None:
        self._lines = foreign.Lines()
        self._is_first_line = True
        self._held = b""
        """A carriage return at the end of what came, which may be half of a line's end."""
        self._data: list[bytes] = []
        """The data lines of an event that is written over several."""
        self._size = 0
        self._usage: object = None
        self._timings: object = None
        self._last: dict[str, Any] | None = None
        """The choice that said why the answer ended."""
        self._calls: list[_ToolCall] = []
        self._open: _ToolCall | None = None
        """The call whose fragments are passed on as they come."""
        self._waiting: deque[Part | _ToolCall] = deque()
        """Blocks that follow that call."""

    def feed(self, data: bytes) -> Iterator[Part]:
        """Yield the parts that have come with ``data``."""
        if self._held or b"\r" in data:
            data = self._held + data
            self._held = b"\r" if data.endswith(b"\r") else b""
            data = data[: len(data) - len(self._held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = self._lines.feed(data)
        if len(self._lines.rest) + self._size > MAX_LINE:
            raise BackendError(f"The engine sent an event of more than {MAX_LINE} bytes.")
        for line in lines:
            yield from self._line(line)

    def flush(self) -> list[Part]:
        """Return the parts that waited for the end of the stream, which has come.

        A call that had to wait is left out if the answer's limit of tokens cut its arguments off.
        """
        rest = (
            bytes(self._lines.rest).removeprefix(b"data:") if self._lines.rest.startswith(b"data:") else b""
        )
        last = foreign.read_object(b"\n".join([*self._data, rest]))
        found = [] if last is None else list(self._event(last))
        if self._last and self._last.get("finish_reason") == "length":
            self._waiting = deque(each for each in self._waiting if isinstance(each, Part) or each.is_whole)
        return [*found, *self._advance(is_end=True)]

    def finish(self) -> Ending:
        """Return why the answer ended; BackendError if it broke off."""
        if self._last is None:
            raise BackendError("The engine broke off its answer.")
        return _ending(self._last, self._usage, self._timings, called=bool(self._calls))

    def _line(self, line: bytes) -> Iterator[Part]:
        """Read a line of events. An object that a line holds is read at once: some engines forget the blank
        line behind it."""
        if self._is_first_line:
            self._is_first_line, line = False, line.removeprefix(_BOM)
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if not self._data and data in (b"", b"[DONE]"):
                return
            chunk = None if self._data else foreign.read_object(data)
            if chunk is not None:
                yield from self._event(chunk)
            else:
                self._data.append(data)
                self._size += len(data)
        elif not line.strip() and self._data:
            data, self._data, self._size = b"\n".join(self._data), [], 0
            yield from self._event(document(data))

    def _event(self, chunk: dict[str, Any]) -> Iterator[Part]:
        _raise_error(chunk)
        self._usage = chunk.get("usage") or self._usage
        self._timings = chunk.get("timings") or self._timings
        choice = _choice(chunk)
        if choice is None:
            return
        delta = choice.get("delta")
        delta = delta if isinstance(delta, dict) else choice
        self._waiting += _said(delta)
        for given in _calls(delta):
            self._take(given)
        if choice.get("finish_reason"):
            self._last = choice
        yield from self._advance()

    def _take(self, given: dict[str, Any]) -> None:
        """Take a fragment of a call, or a whole one."""
        id, index = _id(given), _index(given)
        by_id = [call for call in self._calls if id and call.given_id == id]
        there = by_id or [call for call in self._calls if index in (None, call.index)]
        if there and there[-1].continues(given):
            call = there[-1]
            call.name = call.name or _name(given)
        else:
            call = _ToolCall.of(given, self._calls)
            self._calls.append(call)
            self._waiting.append(call)
        if arguments := _arguments(given):
            call.pieces.append(arguments)
            if call.has_begun and call is not self._open and arguments.strip():
                raise _not_an_object("".join(call.pieces))

    def _advance(self, *, is_end: bool = False) -> Iterator[Part]:
        """Yield what may be passed on now: one block after the other."""
        while True:
            if self._open:
                yield from self._open.parts(is_last=is_end)
                if not self._waiting or not (is_end or self._open.is_whole):
                    return
            if not self._waiting:
                return
            block = self._waiting.popleft()
            self._open = None if isinstance(block, Part) else block
            if isinstance(block, Part):
                yield block


def _choice(found: dict[str, Any]) -> dict[str, Any] | None:
    choices = found.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) and not first.get("index") else None


def _said(message: dict[str, Any]) -> Iterator[Part]:
    thought = message.get("reasoning_content") or message.get("reasoning")
    if thought and isinstance(thought, str):
        yield Part("thinking", thought)
    yield from _content(message.get("content") or message.get("text"))
    yield from _content(message.get("refusal"))


def _content(content: object) -> Iterator[Part]:
    """The parts of a content: a string, or a list of objects that hold one each."""
    for each in content if isinstance(content, list) else [content]:
        if isinstance(each, str) and each:
            yield Part("text", each)
        elif isinstance(each, dict):
            for kind, block in (("thinking", "thinking"), ("text", "text"), ("refusal", "text")):
                yield from [part._replace(block=block) for part in _content(each.get(kind))]


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def _id(call: dict[str, Any]) -> str:
    return str(call.get("id") or "")


def _name(call: dict[str, Any]) -> str:
    return str(_function(call).get("name") or "")


def _index(call: dict[str, Any]) -> int | None:
    """The place of a call among those of its answer; None where the engine does not say."""
    index = call.get("index")
    return index if type(index) is int else None


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
        reason="tool_calls" if called and reason in ("stop", "function_call") else reason,
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
