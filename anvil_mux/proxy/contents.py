"""The contents of a request, by which a name of ``any_of`` chooses its model: images, audio, tools, length.

Pure. A request is read for them only if it asks for a name whose rules have conditions. Then its body is
read once more, by the parser and within the limits of all bodies; what a client of Ollama asks is there
already, in OpenAI's words.

APIs differ in where a part of a message stands and in what it is called. So any object in a conversation, or
in what a tool gave back, counts by its ``type`` and by its keys. How long a prompt is, nobody knows without
the tokenizer of the model that is still to be chosen: its bytes are taken for tokens as routing does at
first, and each value has one more for what stands around it. Images, audio and files have no more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from anvil_mux.config.values import Rule, When
from anvil_mux.errors import BadRequest
from anvil_mux.protocol.api import Route
from anvil_mux.routing import prefix

IMAGES = frozenset(
    ("image", "image_url", "input_image", "computer_screenshot", "video", "video_url", "multimodal_data")
)
"""The types, or keys, of parts that a model must be able to see."""
AUDIO = frozenset(("audio", "audio_url", "input_audio"))
"""The types, or keys, of parts that it must be able to hear."""
_NO_TEXT = IMAGES | AUDIO | {"base64", "file_data"}
"""The types, or keys, of what is no text, however long."""
_CONVERSATION = ("system", "messages", "input", "prompt")
"""The fields of bodies, of all APIs, in which such parts may stand."""


class Contents(NamedTuple):
    """The contents of one request; its fields are what conditions are about."""

    images: bool = False
    audio: bool = False
    tools: bool = False
    tokens: int = 0
    """The tokens of its prompt, about."""


def in_json(body: Mapping[str, Any]) -> Contents:
    """The contents of a JSON body."""
    kinds = frozenset(kind for part in _parts(body) for kind in _kinds(part))
    return Contents(
        images=not IMAGES.isdisjoint(kinds),
        audio=not AUDIO.isdisjoint(kinds),
        tools=bool(body.get("tools") or body.get("functions")),
        tokens=_tokens(body),
    )


def in_form(route: Route) -> Contents:
    """The contents of a form, by where it is sent: its file is an image to change, or sound to write down."""
    return Contents(images="/images/" in route.path, audio="/audio/" in route.path)


def chosen_by(rules: Sequence[Rule], contents: Contents) -> Rule:
    """The rule that chooses for a request; BadRequest if none does."""
    rule = first_fit(rules, contents)
    if rule is None:
        needed = "; or ".join(rule.conditions for rule in rules)
        raise BadRequest(f"no model of this name takes such a request: it would need {needed}", param="model")
    return rule


def first_fit(rules: Sequence[Rule], contents: Contents) -> Rule | None:
    """The first rule whose conditions all hold."""
    return next((rule for rule in rules if _hold(rule.when, contents)), None)


def _hold(when: When, contents: Contents) -> bool:
    return all(
        contents.tokens > wanted if name == "tokens_over" else getattr(contents, name) == wanted
        for name, wanted in when
    )


def _parts(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The objects in a conversation: messages, the parts of their content, and of what tools gave back."""
    left: list[Any] = [body.get(field) for field in _CONVERSATION]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            yield each
            left += each.get("content"), each.get("output")


def _tokens(body: Mapping[str, Any]) -> int:
    """The tokens of a prompt, about."""
    size, values = 0, 0
    left: list[Any] = [body[part] for part in prefix.PARTS if part in body]
    while left:
        each = left.pop()
        values += 1
        if isinstance(each, str):
            size += len(each.encode("utf-8", "surrogatepass"))
        elif isinstance(each, list):
            left += each
        elif isinstance(each, dict) and _NO_TEXT.isdisjoint(_kinds(each)):
            size += sum(map(len, each))
            left += each.values()
    return round(size / prefix.BYTES_PER_TOKEN) + values


def _kinds(part: Mapping[str, Any]) -> Iterator[str]:
    """The words that say what a part is: some clients leave out its type, where a key says as much."""
    yield from [key for key, value in part.items() if value]
    if isinstance(kind := part.get("type"), str):
        yield kind
