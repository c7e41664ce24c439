"""A model card: how long a context a model takes, and what it can do, as engines say it and lists show it.

Pure. Each family of engines says it in words of its own, in its list of models or beside it: ``read`` knows
them all, and those of servers elsewhere. What nobody said is not known, and no list claims it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from anvil_mux.clock import MOST_COUNT

CAPABILITIES = ("completion", "tools", "vision", "audio", "thinking", "embeddings", "reranking")
"""The abilities that a model may have. One that makes embeddings, or ranks, answers in no text."""
_WORDS = {
    **{each: each for each in CAPABILITIES},
    "tool_use": "tools",
    "function_calling": "tools",
    "embedding": "embeddings",
    "image": "vision",
    "reasoning": "thinking",
    "rerank": "reranking",
}
"""The words of engines and servers -> ours."""
_CONTEXTS = (
    *("max_model_len", "loaded_context_length", "context_length", "max_context_length", "context_window"),
    *("n_ctx", "max_seq_len"),
)
"""The names that the length of the context has, the surest first: of vLLM and SGLang, LM Studio, Ollama and
OpenRouter, LM Studio, Groq, llama.cpp, TabbyAPI.
"""
_INSIDE = ("default_generation_settings", "meta", "parameters")
"""The objects in which it may stand."""
_FLAGS = {
    "has_image_understanding": "vision",
    "has_audio_understanding": "audio",
    "use_vision": "vision",
    "supports_tools": "tools",
    "vision": "vision",
    "audio": "audio",
}
"""The flags of SGLang, TabbyAPI and llama.cpp -> what they say."""
_THINKING = ("supports_preserve_reasoning", "supports_reasoning_effort")
"""The flags of llama.cpp for a template of a model that thinks; where neither is set, it may do so too."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The part of a model's description that is known."""

    context: int | None = None
    """The most tokens of a prompt and its answer together; None: not known."""
    capabilities: Mapping[str, bool] = field(default_factory=dict)
    """One of CAPABILITIES -> whether it has it; without those of which that is not known."""

    def over(self, other: ModelCard) -> ModelCard:
        """This card, and what only the other one knows."""
        return ModelCard(self.context or other.context, {**other.capabilities, **self.capabilities})

    def sound(self) -> ModelCard:
        """This card without what no card can say, as another machine may have written it."""
        known = {name: is_able for name, is_able in self.capabilities.items() if name in CAPABILITIES}
        return ModelCard(_length(self.context), known)

    def can(self, name: str) -> bool:
        """Whether it is known to have one of CAPABILITIES."""
        return self.capabilities.get(name, False)

    @property
    def is_textual(self) -> bool:
        """Whether it answers in text, as far as is known."""
        return self.can("completion") or not (self.can("embeddings") or self.can("reranking"))


NOTHING_KNOWN = ModelCard()


def together(cards: Iterable[ModelCard]) -> ModelCard:
    """Make a card that holds whichever of several backends answers, as far as is known of each."""
    cards = list(cards)
    if len(cards) == 1:
        return cards[0]
    names = [name for name in CAPABILITIES if any(name in card.capabilities for card in cards)]
    return ModelCard(
        min([card.context for card in cards if card.context], default=None),
        {name: all(card.capabilities.get(name, True) for card in cards) for name in names},
    )


def read(answer: object, model: str) -> ModelCard:
    """Read an answer of an engine about its model: a list of models, or the description of one."""
    match answer:
        case {"data": list(entries)} | {"models": list(entries)}:
            return _of_entry(_entry(entries, model))
        case dict():
            return _of_entry(answer)
    return NOTHING_KNOWN


def _entry(entries: list[object], model: str) -> dict[str, Any]:
    """The model's own entry, or the only one that is no adapter's."""
    known = [each for each in entries if isinstance(each, dict)]
    own = (model, f"{model}:latest")  # Ollama's tag
    named = [each for each in known if each.get("id") in own or each.get("name") in own]
    bases = [each for each in known if not each.get("parent")]
    return named[0] if named else bases[0] if len(bases) == 1 else {}


def _of_entry(entry: dict[str, Any]) -> ModelCard:
    inside = [entry, *(each for key in _INSIDE if isinstance(each := entry.get(key), dict))]
    contexts = (_length(each.get(name)) for name in _CONTEXTS for each in inside)
    return ModelCard(next(filter(None, contexts), None), dict(_capabilities(entry)))


def _length(value: object) -> int | None:
    """A number of tokens; None for anything else, and for 0, which says nothing."""
    return value if type(value) is int and 0 < value <= MOST_COUNT else None


def _capabilities(entry: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """The abilities that an entry says its model has, or has not; of each the last counts."""
    for key in ("chat_template_caps", "modalities", "parameters"):
        if isinstance(flags := entry.get(key), dict):
            yield from _flags(flags)
    yield from _flags(entry)
    if entry.get("is_generation") is False:
        yield "embeddings", True
    match entry:
        case {"architecture": {"input_modalities": list(inputs)}}:
            yield "vision", "image" in inputs
            yield "audio", "audio" in inputs
    if isinstance(listed := entry.get("capabilities"), list):
        known = {_WORDS[each] for each in listed if isinstance(each, str) and each in _WORDS}
        if known and "model_info" in entry:  # Ollama lists all that a model can do, others what they know of
            yield from ((name, name in known) for name in CAPABILITIES)
        yield from ((name, True) for name in CAPABILITIES if name in known)


def _flags(flags: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    yield from ((name, flags[key]) for key, name in _FLAGS.items() if isinstance(flags.get(key), bool))
    if any(flags.get(key) is True for key in _THINKING):
        yield "thinking", True
