"""JSON Schemas (draft 7) of values as people write them in YAML, for editors.

A shape takes all that the kind's ``read`` takes, and refuses the common mistakes; ``read`` alone decides. A
variable of Compose (``${NAME}``) may stand for any scalar, so text with a ``$`` always passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

Shape = Mapping[str, Any]

NOTHING: Shape = {"type": "null"}
"""The shape of a key without a value, which counts as not given."""
VARIABLE: Shape = {"type": "string", "pattern": r"\$"}


def any_of(*shapes: Shape) -> Shape:
    return {"anyOf": list(shapes)}


def text(pattern: str = r"\S") -> Shape:
    """Text, or a number that is taken as text, of which some part fits ``pattern``."""
    return {"type": ["string", "integer"], "pattern": rf"{pattern}|\$"}


def one_of(known: Iterable[str]) -> Shape:
    return any_of({"enum": list(known)}, VARIABLE)


def whole(least: float = -math.inf, most: float = math.inf) -> Shape:
    """A whole number, which may also be written as text."""
    limits = {"minimum": least, "maximum": most}
    number = {
        "type": "integer",
        **{key: int(each) for key, each in limits.items() if not math.isinf(each)},
    }
    return any_of(number, {"type": "string", "pattern": r"^-?[0-9]+$|\$"})


def amount(pattern: str, most: float = math.inf) -> Shape:
    """A number from 0 to ``most``, or text that fits ``pattern``."""
    limits = {"minimum": 0} if math.isinf(most) else {"minimum": 0, "maximum": int(most)}
    return any_of({"type": "number", **limits}, {"type": "string", "pattern": rf"{pattern}|\$"})


def listed(item: Shape) -> Shape:
    """A list, for which a single item, or items with commas in between, may stand."""
    return any_of(item, {"type": "array", "items": item}, {"type": "string", "pattern": r",|\$|^\s*$"})


def mapping(keys: Mapping[str, Shape]) -> Shape:
    """A mapping that has these keys and no others; each may be left without a value."""
    known = {key: any_of(shape, NOTHING) for key, shape in keys.items()}
    return {"type": "object", "properties": known, "additionalProperties": False}


def by_name(value: Shape) -> Shape:
    """A mapping with any keys."""
    return {"type": "object", "additionalProperties": value}
