"""The groups and the matrix of llama-swap -> which models take turns, written as GPUs.

llama-swap does not know GPUs; its rules say which models may be resident together. Two models that may not
are given one GPU in common, so that they take turns there. Such a GPU is a name for the turns, not a device.

What comes out never allows models together that llama-swap keeps apart: where a matrix allows three models
only in pairs, some of the pairs are given up, and a note says which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

MOST_SETS = 10_000

TwoModels = frozenset[str]
"""Two of the models, in no order."""


class SwapGroup(NamedTuple):
    """A group, as llama-swap has it."""

    members: tuple[str, ...]
    swap: bool = True
    """Whether its members take turns among themselves."""
    exclusive: bool = True
    """Whether a load of one of them evicts the members of other groups."""
    persistent: bool = False
    """Whether other groups leave its members alone."""


def by_groups(models: Sequence[str], groups: Mapping[str, SwapGroup]) -> set[TwoModels]:
    """The pairs of models that take turns; models that are in no group are one more, with the defaults."""
    grouped = {member for group in groups.values() for member in group.members}
    rest = SwapGroup(tuple(model for model in models if model not in grouped))
    of = {model: group for group in [*groups.values(), rest] for model in group.members}
    return {TwoModels(pair) for pair in combinations(models, 2) if _take_turns(of[pair[0]], of[pair[1]])}


def _take_turns(one: SwapGroup, other: SwapGroup) -> bool:
    """Whether members of two groups are never resident together, in whichever order they are asked for."""
    if one is other:
        return one.swap
    return one.exclusive and not other.persistent and other.exclusive and not one.persistent


def by_sets(
    models: Sequence[str], sets: Sequence[frozenset[str]]
) -> tuple[set[TwoModels], list[frozenset[str]]]:
    """The pairs of models that take turns, and the sets that had to be given up."""
    together: set[TwoModels] = set()
    given_up: list[frozenset[str]] = []
    for each in sets:
        wider = together | {TwoModels(pair) for pair in combinations(sorted(each), 2)}
        if wider == together:
            continue
        if all(any(clique <= allowed for allowed in sets) for clique in _cliques(models, wider)):
            together = wider
        else:
            given_up.append(each)
    return {TwoModels(pair) for pair in combinations(models, 2)} - together, given_up


def _cliques(models: Sequence[str], pairs: set[TwoModels]) -> Iterator[frozenset[str]]:
    """The largest sets of at least two models of which each pair is there (Bron and Kerbosch)."""
    near = {model: {o for o in models if TwoModels((model, o)) in pairs} - {model} for model in models}

    def grow(clique: set[str], left: set[str], done: set[str]) -> Iterator[frozenset[str]]:
        if not left and not done and len(clique) > 1:
            yield frozenset(clique)
        pivot = max(sorted(left | done), key=lambda model: len(near[model] & left), default=None)
        for model in sorted(left - (near[pivot] if pivot else set())):
            yield from grow(clique | {model}, left & near[model], done & near[model])
            left = left - {model}
            done = done | {model}

    return grow(set(), set(models), set())


def gpus(models: Sequence[str], turns: set[TwoModels]) -> dict[str, list[str]]:
    """The GPUs of each model: one for each largest set of models all of which take turns."""
    left = set(turns)
    cliques: list[list[str]] = []
    for pair in combinations(models, 2):
        if TwoModels(pair) in left:
            clique = [*pair]
            for model in models:
                if model not in clique and all(TwoModels((model, other)) in turns for other in clique):
                    clique.append(model)
            left -= {TwoModels(each) for each in combinations(clique, 2)}
            cliques.append(clique)
    return {
        model: [f"turns-{number}" for number, clique in enumerate(cliques, 1) if model in clique]
        for model in models
    }


# The matrix

_TOKEN = re.compile(r"([&|()])|\+([^\s&|()+]+)|([^\s&|()+]+)")


def expand(sets: Mapping[str, str], names: Mapping[str, str]) -> dict[str, list[frozenset[str]]]:
    """The sets of models that each expression of a matrix allows; ValueError says what is wrong with one.

    ``names``: what stands for a model in the expressions -> the model.
    """
    made: dict[str, list[frozenset[str]]] = {}

    def of(name: str, within: tuple[str, ...]) -> list[frozenset[str]]:
        if name not in sets:
            raise ValueError(f"+{name} is no set of the matrix")
        if name in within:
            raise ValueError(f"+{name} refers to itself")
        if name not in made:
            made[name] = _Expression(sets[name], names, lambda ref: of(ref, (*within, name))).sets()
        return made[name]

    return {name: of(name, ()) for name in sets}


class _Expression:
    """One expression of a matrix, read from left to right; & binds more than |."""

    def __init__(self, text: str, names: Mapping[str, str], reference: Any) -> None:
        self._names = names
        self._reference = reference
        self._tokens = [found.groups() for found in _TOKEN.finditer(text)]
        if "".join(_TOKEN.sub("", text).split()):
            raise ValueError(f"cannot be read: {text}")
        self._text = text

    def sets(self) -> list[frozenset[str]]:
        found = self._alternatives()
        if self._tokens:
            raise ValueError(f"cannot be read: {self._text}")
        return list(dict.fromkeys(found))

    def _alternatives(self) -> list[frozenset[str]]:
        found = self._all_of()
        while self._tokens and self._tokens[0][0] == "|":
            self._tokens.pop(0)
            found = found + self._all_of()
        return found

    def _all_of(self) -> list[frozenset[str]]:
        found = self._one()
        while self._tokens and self._tokens[0][0] == "&":
            self._tokens.pop(0)
            other = self._one()
            if len(found) * len(other) > MOST_SETS:
                raise ValueError(f"stands for more than {MOST_SETS} sets")
            found = [a | b for a, b in product(found, other)]
        return found

    def _one(self) -> list[frozenset[str]]:
        if not self._tokens:
            raise ValueError(f"ends too early: {self._text}")
        sign, reference, name = self._tokens.pop(0)
        if sign == "(":
            found = self._alternatives()
            if not self._tokens or self._tokens.pop(0)[0] != ")":
                raise ValueError(f"has a bracket that is not closed: {self._text}")
            return found
        if sign:
            raise ValueError(f"has a {sign} where a model belongs: {self._text}")
        if reference:
            return list(self._reference(reference))
        if name not in self._names:
            raise ValueError(f"names {name}, which is no model of the file")
        return [frozenset({self._names[name]})]
