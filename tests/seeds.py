"""How much of what is drawn the tests go through: a part by default, all of it in ``bin/test seeds``."""

import os
from collections.abc import Iterable
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

ALL = bool(os.environ.get("ANVIL_ALL_SEEDS"))


def seeds(few: int, *, of: int) -> range:
    """The first ``few`` seeds, or all."""
    return range(of if ALL else few)


def part(cases: Iterable[T], *, every: int) -> list[T]:
    """One case of so many, or all."""
    return list(islice(cases, 0, None, 1 if ALL else every))
