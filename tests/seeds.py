"""How much of what is drawn the tests go through: a part by default, all of it in ``bin/test seeds``.

With ``ANVIL_PART=3/8`` that takes every eighth test, from the third on: eight such runs are all of it.
"""

import os
from collections.abc import Iterable, Sequence
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


def chosen(tests: Sequence[T], asked: str) -> list[T]:
    """Every ``of``-th test from the ``number``-th on, where NUMBER/OF is asked; else all of them."""
    number, of = map(int, (asked or "1/1").split("/"))
    if not 1 <= number <= of:
        raise ValueError(f"ANVIL_PART={asked}: no such part")
    return list(tests[number - 1 :: of])
