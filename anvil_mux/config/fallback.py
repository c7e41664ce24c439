"""The setting ``fallback``: other models that answer when a model cannot be served, or not in time. Pure.

What a fallback falls back on follows it in turn, so that a request has one list of models to try. A list that
would lead back to a model of its own is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from anvil_mux.config import settings, shapes
from anvil_mux.config.config import Backend, models_by_name


class FallbackStep(NamedTuple):
    """A model that a request is sent to, if those before it could not serve it."""

    model: str
    after: float | None
    """Seconds that it may wait there before the next model is tried; None: as long as any request."""


FallbackChain = tuple[FallbackStep, ...]
"""The models that a request is sent to, in order: the one that it asked for, and its fallbacks."""


def read(value: Any) -> tuple[tuple[str, ...], float | None]:
    """The models, and the seconds that a request may wait before they are tried."""
    if not isinstance(value, dict):
        return settings.NAMES.read(value), None
    parts = settings.MappingReader(value, ("models", "after"))
    models = parts.read("models", settings.NAMES.read, ())
    made: tuple[tuple[str, ...], float | None] = parts.make(
        (models, parts.read("after", settings.SECONDS.read))
    )
    if not models and not parts.problems:
        example = "{models: [other-model], after: 20s}"
        raise settings.unfit(f"must name a model: {example}", example)
    return made


_SHAPE = shapes.mapping({"models": settings.NAMES.shape, "after": settings.SECONDS.shape})
KIND = settings.ValueKind(
    "list of models, or {models, after}", read, shapes.any_of(settings.NAMES.shape, _SHAPE)
)


def chains(backends: Sequence[Backend]) -> Mapping[str, FallbackChain]:
    """Model -> where its requests go, of models that have fallbacks; what leads back is left out."""
    names = models_by_name(backends)
    own = {each.model: (each.fallback, each.fallback_after) for each in backends if each.fallback}
    found = {}
    for model in own:
        first: dict[str, FallbackStep] = {}
        for step in _follow(model, None, names, own, ()):
            first.setdefault(step.model, step)
        *steps, last = first.values()
        found[model] = (*steps, FallbackStep(last.model, None))
    return {model: chain for model, chain in found.items() if len(chain) > 1}


_Own = Mapping[str, tuple[tuple[str, ...], float | None]]


def _follow(
    model: str, after: float | None, names: Mapping[str, str], own: _Own, way: tuple[str, ...]
) -> Iterator[FallbackStep]:
    """A model and what follows it; ``after``: the time of the one that it is a fallback of."""
    fallback, its_own = own.get(model, ((), None))
    after = after if its_own is None else its_own
    yield FallbackStep(model, after)
    for name in fallback:
        other = names.get(name)
        if other is not None and other not in (*way, model):
            yield from _follow(other, after, names, own, (*way, model))


def circle(model: str, names: Mapping[str, str], own: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The way on which the fallbacks of a model lead back to it; () if they do not."""
    ways: list[tuple[str, ...]] = [(model,)]
    seen: set[str] = set()
    while ways:
        way = ways.pop()
        for other in [names[name] for name in own.get(way[-1], ()) if name in names]:
            if other == model:
                return (*way, model)
            if other not in seen:
                seen.add(other)
                ways.append((*way, other))
    return ()
