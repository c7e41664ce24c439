"""Names that stand for several models, in order of preference: the resident one serves (``any_of``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from anvil_mux.config import settings, shapes
from anvil_mux.config.diagnostic import Diagnostic, as_yaml

SWAPS = ("never", "allowed")
"""Whether a name may force a swap."""


class AnyOf(NamedTuple):
    """The models, or presets of models, that one name stands for."""

    models: tuple[str, ...]
    """Their names; the first that is resident serves; if none is, the first that can be loaded is."""
    swaps: bool = True
    """Whether one is loaded if none is resident."""

    def to_json(self) -> dict[str, object]:
        return {"models": list(self.models), "swap": "allowed" if self.swaps else "never"}


def _read(value: Any) -> dict[str, AnyOf]:
    if not isinstance(value, dict):
        text = f"must hold {{name: [models]}}, not {settings.show(value)}"
        raise settings.unfit(text, "{a-name: [a-model, another]}")
    names = settings.MappingReader(value, value)
    found = {settings.TEXT.read(name): names.take(name, about, _read_one) for name, about in value.items()}
    made: dict[str, AnyOf] = names.make({name: each for name, each in found.items() if each})
    return made


def _read_one(value: Any) -> AnyOf:
    if not isinstance(value, dict):
        return AnyOf(_read_models(value))
    parts = settings.MappingReader(value, ("models", "swap"))
    models = parts.read("models", settings.NAMES.read, ())
    swap = parts.read("swap", _read_swap, "allowed")
    made: AnyOf = parts.make(AnyOf(models, swap == "allowed"))
    return made._replace(models=_read_models(list(models)))


def _read_models(value: Any) -> tuple[str, ...]:
    if not value:
        raise settings.unfit("must name at least one model", "[a-model, another]")
    models: tuple[str, ...] = settings.NAMES.read(value)
    return models


def _read_swap(value: Any) -> str:
    if value not in SWAPS:
        raise settings.unfit(f"must be never or allowed, not {settings.show(value)}", "never")
    return str(value)


_MODELS = settings.NAMES.shape
KIND = settings.ValueKind(
    "{name: list of models, or {models, swap: never}}",
    _read,
    shapes.by_name(shapes.any_of(_MODELS, shapes.mapping({"models": _MODELS, "swap": shapes.one_of(SWAPS)}))),
)


def check(any_of: Mapping[str, AnyOf], names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The names that cannot stand for what they say, and why.

    ``names``: every name of a model, or of a preset -> the model.
    """
    for name, each in any_of.items():
        if name in names:
            text = f"is a name of the model {names[name]} already: call it otherwise"
            yield name, Diagnostic(text, write=f"any-{name}: {as_yaml(list(each.models))}")
        for model in each.models:
            if model in any_of:
                yield name, f"{model} stands for several models itself: name the models"
            elif model not in names:
                text = f"no service serves {model}; {settings.nearest(model, names)}"
                near = settings.meant(model, names)
                mended = as_yaml([near if model == other else other for other in each.models]) if near else ""
                yield name, Diagnostic(text, value=mended)


def resolved(any_of: Mapping[str, AnyOf], models: Mapping[str, str]) -> dict[str, AnyOf]:
    """The same, with models in place of their aliases, each once; presets keep their names.

    ``models``: alias, or the model's own name -> the model.
    """
    return {
        name: each._replace(models=tuple(dict.fromkeys(models.get(model, model) for model in each.models)))
        for name, each in any_of.items()
    }
