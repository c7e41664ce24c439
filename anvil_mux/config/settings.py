"""A setting: all that depends on one key of ``x-anvil``, in one row, which is the field that it fills.

``Config`` and ``Backend`` (config.py) are tables of settings. From their rows follow what is read and how it
is refused, the documentation, the JSON Schema for editors, what a reload may change at once, and what the
event log records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import MappingProxyType
from typing import Any

from anvil_mux.config.kinds import NOTHING, Shape, ValueKind, any_of

ROWS = "settings"
"""The key of a field's metadata under which its settings stand."""


@dataclass(frozen=True, slots=True)
class Setting:
    kind: ValueKind
    doc: str
    """The meaning, in one line."""
    live: bool = field(kw_only=True)
    """Whether a reload applies it at once. Otherwise a setting of the whole holds from the next start on, and
    the backends of a service for which another value is set are replaced."""
    logged: bool = False
    """Whether the event log records it: when things happen depends on it."""
    fills: tuple[str, ...] | None = ()
    """The fields that it fills, in the order in which its kind reads them; (): the one of its own name; None:
    none, since it decides which backends there are."""
    later: tuple[str, ...] = ()
    """The fields of a live setting that hold from the next start on all the same."""
    is_file: bool = False
    """Whether it names a file that `serve` reads: with other content it is another value."""
    of_engines: bool = False
    """Whether it is about an engine that we load, and says nothing about a server elsewhere."""
    default: str = ""
    """The default that the documentation shows."""
    page: str = ""
    """The page in docs/, and the section of it, that says more; "": the table in the reference."""

    def fields_of(self, key: str) -> tuple[str, ...]:
        """The fields that it fills under its key."""
        return () if self.fills is None else self.fills or (key,)

    def waiting(self, key: str) -> tuple[str, ...]:
        """The fields that a reload leaves as they are."""
        return self.later if self.live else self.fields_of(key)


Table = Mapping[str, Setting]
"""Key -> its setting."""


def setting(
    default: Any,
    kind: ValueKind,
    doc: str,
    *,
    key: str = "",
    shown: str | None = None,
    beside: Mapping[str, Setting] = MappingProxyType({}),
    **about: Any,
) -> Any:
    """A field with its default, or what makes it, that a setting fills; ``key``: the setting's, if another.

    ``shown``: the default for people, where that is not what they would write. ``beside``: further settings,
    by their keys, that decide about the field.
    """
    made = {"default_factory": default} if callable(default) else {"default": default}
    row = Setting(kind, doc, default=plain(default) if shown is None else shown, **about)
    return field(**made, metadata={ROWS: {key: row, **beside}})


def table_of(owner: type) -> dict[str, Setting]:
    """The settings in the rows of a dataclass."""
    return {
        key or each.name: row for each in fields(owner) for key, row in each.metadata.get(ROWS, {}).items()
    }


def fields_of(table: Table, holds: Callable[[Setting], bool]) -> list[str]:
    """The fields that those settings fill of which something holds."""
    return [field for key, each in table.items() if holds(each) for field in each.fields_of(key)]


def filled(table: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """Field -> value, of what was read: key -> value; a setting that fills none keeps its key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        names = table[key].fields_of(key) or (key,)
        found |= zip(names, value if len(names) > 1 else (value,), strict=True)
    return found


def plain(value: object) -> str:
    """A default as people write it."""
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return ", ".join(value)
        case float():
            return f"{value:g}"
    return "" if value in (None, MISSING) else str(value)


# For people and their editors


COMPOSE = "https://raw.githubusercontent.com/compose-spec/compose-spec/main/schema/compose-spec.json"
"""The schema of the Compose Specification; what Compose itself knows is left to it."""
DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that YAML's language server knows."""

Choices = Mapping[str, Sequence[str]]
"""Key -> the names of plug-ins that come with the program, which editors offer; others may be named too."""


def describe(table: Table) -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and meaning of every setting, for the documentation."""
    for key, each in table.items():
        yield key, each.kind.name, each.default, each.doc


def compose_schema(top: Table, of_service: Table, choices: Choices) -> dict[str, Any]:
    """The schema of a whole compose file."""
    ours = {"anyOf": [{"$ref": "#/definitions/service"}, {"const": False}]}
    service = {"type": "object", "properties": {"x-anvil": ours}}
    return {
        "$schema": DRAFT,
        "title": "A compose file for anvil-mux",
        "type": "object",
        "allOf": [{"$ref": COMPOSE}],
        "properties": {
            "x-anvil": {"$ref": "#/definitions/top"},
            "services": {"type": "object", "additionalProperties": service},
        },
        "definitions": {
            "top": _schema("The settings of anvil-mux.", top, choices),
            "service": _schema(
                "With this key, even if it is empty, the service is a model; with `false` it is none.",
                of_service,
                choices,
            ),
        },
    }


def _schema(meaning: str, table: Table, choices: Choices) -> Shape:
    keys = {key: _shape(each, choices.get(key, ())) for key, each in table.items()}
    known = {"type": "object", "properties": keys, "additionalProperties": False}
    return {"description": meaning, **any_of(known, NOTHING)}


def _shape(each: Setting, choices: Sequence[str]) -> Shape:
    told = f"{each.doc}\n\n{each.kind.name}" + (f"; by default {each.default}" if each.default else "")
    offered = {"examples": list(choices)} if choices else {}
    return {"description": told, **offered, **any_of(each.kind.shape, NOTHING)}
