"""Anthropic's API in front of engines that do not speak it.

Pure. Most engines have ``/v1/messages`` by now and are asked in the client's own words (proxy/attempt.py);
for the others ``TRANSLATE`` turns a body into chat completions and says the answer as a message, or as the
events that build one. What only Anthropic can do (its own tools, files, PDFs) is refused and not passed over.

Signatures of thinking are left out on both ways: they prove to Anthropic's servers what these have said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from anvil_mux.errors import BadRequest
from anvil_mux.protocol import foreign
from anvil_mux.protocol.api import written
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

_WISHES = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}

Block = dict[str, Any]


def messages(said: dict[str, Any]) -> Translation:
    model, stream = text(said, "model") or None, said.get("stream") is True
    question = {"messages": _conversation(said), **_tools(said), **_wishes(said)}
    if stream:
        question |= {"stream": True, "stream_options": {"include_usage": True}}
    return Translation(model, "/v1/chat/completions", question, _Message(model or ""), stream=stream)


def count_tokens(said: dict[str, Any]) -> Translation:
    model = text(said, "model") or None
    question = {"messages": _conversation(said), **_tools(said)}
    question.pop("tool_choice", None)
    return Translation(model, "/tokenize", question, _Count())


TRANSLATE: dict[str, Callable[[dict[str, Any]], Translation]] = {
    "/v1/messages": messages,
    "/v1/messages/count_tokens": count_tokens,
}


# Questions


def _conversation(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    """OpenAI's messages: the system's first, and a result of a tool is a message of its own."""
    system = "\n\n".join(_text_of(block) for block in _blocks(said, "system"))
    conversation: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in objects(said, "messages"):
        role, blocks = text(message, "role"), _blocks(message, "content")
        if role == "assistant":
            conversation.append(_assistant(blocks))
        else:
            conversation += _from_user(role, blocks)
    return conversation


def _blocks(said: Mapping[str, Any], key: str) -> list[Block]:
    """The blocks of a content, which is a string or a list of them."""
    found = said.get(key)
    return [{"type": "text", "text": found}] if isinstance(found, str) else objects(said, key)


def _text_of(block: Block) -> str:
    if block.get("type") != "text":
        raise BadRequest(f"a block of type {block.get('type')!r} cannot stand here", param="messages")
    return text(block, "text")


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    spoken = "".join(text(block, "text") for block in blocks if block.get("type") == "text")
    thought = "".join(text(block, "thinking") for block in blocks if block.get("type") == "thinking")
    message: dict[str, Any] = {"role": "assistant", "content": spoken}
    if thought:
        message["reasoning_content"] = thought
    calls = [_tool_call(block) for block in blocks if block.get("type") == "tool_use"]
    return {**message, "tool_calls": calls} if calls else message


def _tool_call(block: Block) -> dict[str, Any]:
    arguments = json.dumps(block.get("input") or {})
    function = {"name": text(block, "name"), "arguments": arguments}
    return {"id": text(block, "id"), "type": "function", "function": function}


def _from_user(role: str, blocks: list[Block]) -> Iterator[dict[str, Any]]:
    """The messages of a user's turn.

    Results of tools stand first, as engines want them right behind their calls.
    """
    content: list[dict[str, Any]] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            inner = _blocks(block, "content")
            spoken = "\n".join(text(each, "text") for each in inner if each.get("type") == "text")
            yield {"role": "tool", "tool_call_id": text(block, "tool_use_id"), "content": spoken}
            content += [_content(each) for each in inner if each.get("type") != "text"]
        else:
            content.append(_content(block))
    if all(each["type"] == "text" for each in content):
        spoken = "\n".join(each["text"] for each in content)
        if spoken:
            yield {"role": role, "content": spoken}
    else:
        yield {"role": role, "content": content}


def _content(block: Block) -> dict[str, Any]:
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    match block.get("type"), source.get("type"):
        case "text", _:
            return {"type": "text", "text": text(block, "text")}
        case "document", "text":
            return {"type": "text", "text": text(source, "data")}
        case "image", "base64":
            url = f"data:{text(source, 'media_type')};base64,{text(source, 'data')}"
        case "image", "url":
            url = text(source, "url")
        case kind, origin:
            from_where = f" from {origin}" if origin else ""
            raise BadRequest(f"this engine cannot be given a {kind}{from_where}", param="messages")
    return {"type": "image_url", "image_url": {"url": url}}


def _tools(said: Mapping[str, Any]) -> dict[str, Any]:
    tools = [_tool(tool) for tool in objects(said, "tools")]
    if not tools:
        return {}
    choice = said.get("tool_choice")
    if not isinstance(choice, dict):
        return {"tools": tools}
    named = {"type": "function", "function": {"name": text(choice, "name")}}
    kind = choice.get("type")
    asked: dict[str, Any] = {"tools": tools, "tool_choice": _CHOICES.get(str(kind), named)}
    if choice.get("disable_parallel_tool_use"):
        asked["parallel_tool_calls"] = False
    return asked


def _tool(said: dict[str, Any]) -> dict[str, Any]:
    kind = said.get("type")
    if kind not in (None, "custom"):
        raise BadRequest(f"tools of type {kind} are run by Anthropic's servers only", param="tools")
    function = {"name": text(said, "name"), "parameters": said.get("input_schema") or {}}
    if about := text(said, "description"):
        function["description"] = about
    return {"type": "function", "function": function}


def _wishes(said: Mapping[str, Any]) -> dict[str, Any]:
    wishes = {theirs: said[ours] for ours, theirs in _WISHES.items() if said.get(ours) is not None}
    thinking, output = said.get("thinking"), said.get("output_config")
    if isinstance(thinking, dict):
        on = thinking.get("type") != "disabled"
        wishes["chat_template_kwargs"] = {"enable_thinking": on, "thinking": on}
    if isinstance(output, dict):
        if output.get("effort"):
            wishes["reasoning_effort"] = output["effort"]
        shape = output.get("format")
        if isinstance(shape, dict) and shape.get("type") == "json_schema":
            schema = {"name": "answer", "schema": shape.get("schema"), "strict": True}
            wishes["response_format"] = {"type": "json_schema", "json_schema": schema}
    return wishes


# Answers

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""How an event tells that a block grows: its type, and the field of what is added."""


class _Message(AnswerTranslation):
    """A message: whole, or as the events that build it block by block."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = ""
        self._parts = ChunkReader()
        self._started = False
        self._block = ""
        """The type of the block that is open."""
        self._index = -1

    def begun(self, now: float, waited: float) -> None:
        self._id = f"msg_{int(now * 1e9):x}"
        self._parts = ChunkReader()

    def whole(self, body: bytes, now: float) -> bytes:
        parts, ending = parts_of(body)
        content: list[Block] = []
        for part in parts:
            if part.id or not content or content[-1]["type"] != part.block:
                content.append(_begin(part))
            content[-1][_field(part)] += part.text
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = arguments_of(block["input"], ending)
        content = [block for block in content if block.get("input", "") is not None]
        end = {"stop_reason": _reason(ending), "stop_sequence": ending.stop_sequence}
        return written({**self._head(), "content": content, **end, "usage": _usage(ending)})

    def feed(self, data: bytes, now: float) -> bytes:
        return b"".join(event for part in self._parts.feed(data) for event in self._events(part))

    def finish(self, now: float) -> bytes:
        waited = [event for part in self._parts.flush() for event in self._events(part)]
        ending = self._parts.finish()
        delta = {"stop_reason": _reason(ending), "stop_sequence": ending.stop_sequence}
        return b"".join(
            [
                *waited,
                *self._start(),
                *self._stop_block(),
                _event("message_delta", delta=delta, usage=_usage(ending)),
                _event("message_stop"),
            ]
        )

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _events(self, part: Part) -> Iterator[bytes]:
        yield from self._start()
        if part.id or part.block != self._block:
            yield from self._stop_block()
            self._block, self._index = part.block, self._index + 1
            block = _begin(part)
            block |= {"input": {}} if part.id else {}
            yield _event("content_block_start", index=self._index, content_block=block)
        if not part.id:
            kind, field = _DELTAS[part.block]
            delta = {"type": kind, field: part.text}
            yield _event("content_block_delta", index=self._index, delta=delta)

    def _start(self) -> Iterator[bytes]:
        if not self._started:
            self._started = True
            empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
            usage = {"input_tokens": 0, "output_tokens": 0}
            yield _event("message_start", message={**self._head(), **empty, "usage": usage})

    def _stop_block(self) -> Iterator[bytes]:
        if self._block:
            self._block = ""
            yield _event("content_block_stop", index=self._index)


def as_events(body: bytes) -> bytes | None:
    """Return a whole message as the events of a stream; None if it is not a message."""
    message = foreign.read_object(body)
    blocks = message.get("content") if message is not None else None
    if message is None or not isinstance(blocks, list) or not all(isinstance(each, dict) for each in blocks):
        return None
    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    delta = {key: message.get(key) for key in ("stop_reason", "stop_sequence")}
    return b"".join(
        [
            _event("message_start", message={**message, **empty}),
            *[event for index, block in enumerate(blocks) for event in _events_of_block(index, block)],
            _event("message_delta", delta=delta, usage=message.get("usage") or {"output_tokens": 0}),
            _event("message_stop"),
        ]
    )


def _events_of_block(index: int, block: Block) -> Iterator[bytes]:
    """Yield the events that build a whole block: its fields that grow are empty at its start."""
    deltas = []
    for kind, source, field, nothing in _GROWING.get(block.get("type"), ()):
        if value := block.get(source):
            deltas.append({"type": kind, field: value if isinstance(value, str) else written(value).decode()})
        block = {**block, source: nothing}
    yield _event("content_block_start", index=index, content_block=block)
    yield from (_event("content_block_delta", index=index, delta=delta) for delta in deltas)
    yield _event("content_block_stop", index=index)


_GROWING: dict[object, tuple[tuple[str, str, str, object], ...]] = {
    "text": (("text_delta", "text", "text", ""),),
    "thinking": (
        ("thinking_delta", "thinking", "thinking", ""),
        ("signature_delta", "signature", "signature", ""),
    ),
    "tool_use": (("input_json_delta", "input", "partial_json", {}),),
}
"""Type of a block -> type of its delta, the block's field, the delta's field, and the block's before it."""


class _Count(AnswerTranslation):
    """The answer that says how many tokens a question has."""

    def whole(self, body: bytes, now: float) -> bytes:
        tokens = count(document(body).get("count"))
        if tokens is None:  # llama.cpp's takes text only
            raise BadRequest("this engine cannot count the tokens of messages", status=501)
        return written({"input_tokens": tokens})


def _field(part: Part) -> str:
    """The field of a block that its parts fill."""
    return "input" if part.block == "tool_use" else part.block


def _begin(part: Part) -> Block:
    """The block that a part begins, with nothing of what is said piece by piece."""
    about = {"id": part.id, "name": part.name} if part.id else {}
    more = {"signature": ""} if part.block == "thinking" else {}
    return {"type": part.block, **about, _field(part): "", **more}


def _reason(ending: Ending) -> str:
    return "stop_sequence" if ending.stop_sequence else _REASONS.get(ending.reason, "end_turn")


def _usage(ending: Ending) -> dict[str, int]:
    cached = ending.cached_tokens or 0
    usage = {
        "input_tokens": max((ending.prompt_tokens or 0) - cached, 0),
        "output_tokens": ending.completion_tokens or 0,
    }
    return {**usage, "cache_read_input_tokens": cached} if cached else usage


def _event(kind: str, **about: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode("ascii"), written({"type": kind, **about}))
