"""A problem, warning or hint about a configuration: a sentence, and its parts, which `check` shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import yaml

KeyPath = tuple[str, ...]
"""The way to a value: services, a, ports, 0."""
LONGEST = 100
"""The longest line that is written out as an example."""


class Position(NamedTuple):
    """The place of a diagnostic in the files; ``line`` None: in a file that another one includes."""

    file: str = ""
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


NOWHERE = Position()


class Diagnostic(str):
    """A sentence that says what is wrong, which is all that logs and clients get, and its parts.

    ``said``: the sentence without what is to be written instead. ``write``: the line to write. ``value``: the
    value to write, where whoever found it does not know its key. ``page``: only where the key tells none.
    """

    __slots__ = ("key", "page", "place", "said", "value", "write")

    said: str
    write: str
    value: str
    key: KeyPath
    place: Position
    page: str

    def __new__(
        cls,
        sentence: str,
        *,
        said: str | None = None,
        write: str = "",
        value: str = "",
        key: KeyPath = (),
        place: Position = NOWHERE,
        page: str = "",
    ) -> Diagnostic:
        made = super().__new__(cls, sentence)
        made.said = str(sentence) if said is None else said
        made.write, made.value, made.key, made.place, made.page = write, value, key, place, page
        return made

    def at(self, place: Position, key: KeyPath, shown: str) -> Diagnostic:
        """Return the same diagnostic with its place before it; ``shown``: its key as people read it."""
        before = f"{place}: {shown}: " if shown else f"{place}: "
        write = self.write or (_line(key, self.value) if self.value else "")
        return Diagnostic(
            f"{before}{self}",
            said=f"{before}{self.said}",
            write=write,
            key=key,
            place=place,
            page=self.page,
        )


def advice(
    said: str, write: str = "", more: str = "", *, value: str = "", key: KeyPath = (), page: str = ""
) -> Diagnostic:
    """Return a diagnostic whose sentence ends with ``more``, or with the line, or the value, to write."""
    sentence = f"{said}; {more or f'write {write or value}'}"
    return Diagnostic(sentence, said=said, write=write, value=value, key=key, page=page)


def unfit(text: str, value: str = "", *, write: str = "", key: KeyPath = ()) -> ValueError:
    """Return the error about what cannot be taken; ``value``, ``write``: what could stand there."""
    return ValueError(Diagnostic(text, value=value, write=write, key=key))


def as_diagnostic(text: object) -> Diagnostic:
    """Return the diagnostic that a text or the error of a value is, or one that is made of it."""
    if isinstance(text, BaseException):
        text = text.args[0] if text.args else str(text)
    return text if isinstance(text, Diagnostic) else Diagnostic(str(text))


def as_yaml(value: Any) -> str:
    """Write a value in one line of YAML; ``...`` for one that is too long for an example."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    text = text.removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= LONGEST and "\n" not in text else "..."


def with_texts(value: Any, make: Callable[[str], str]) -> Any:
    """Return a value of YAML with what ``make`` makes of each text in it, but for keys."""
    match value:
        case str():
            return make(value)
        case Mapping():
            return {name: with_texts(each, make) for name, each in value.items()}
        case list() | tuple():
            return [with_texts(each, make) for each in value]
    return value


def _line(key: KeyPath, value: str) -> str:
    last = key[-1] if key else ""
    if last.isdigit():
        return f'"{last}": {value}' if key[-2:-1] == ("gpus",) else f"- {value}"
    return f"{last}: {value}"
