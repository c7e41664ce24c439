"""Compose files laid over each other, as far as that matters to a suggestion."""

from __future__ import annotations

from typing import Any


def laid_over(one: Any, other: Any) -> Any:
    """Merge as Compose does: mappings key by key, lists one after the other, the other's plain values win."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = dict(one)
        for key, value in other.items():
            replaces = key not in one or key in ("command", "entrypoint", "x-anvil")
            found[key] = value if replaces else laid_over(one[key], value)
        return found
    if isinstance(one, list) and isinstance(other, dict):
        return _pairs(one) | other
    if isinstance(one, dict) and isinstance(other, list):
        return laid_over(one, _pairs(other))
    if isinstance(one, list) and isinstance(other, list):
        return [*one, *(each for each in other if each not in one)]
    return other


def _pairs(given: list[Any]) -> dict[str, str | None]:
    """A list of NAME=VALUE as a mapping."""
    pairs = (str(each).partition("=") for each in given)
    return {name: text if equals else None for name, equals, text in pairs}
