"""The JSON Schema of a compose file with ``x-anvil``, made from the tables of settings.

Editors complete and check by it; the loader does not use it. What Compose itself knows is left to the schema
of the Compose Specification, which ours refers to, so an editor has both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anvil_mux.config import shapes
from anvil_mux.config.settings import Setting
from anvil_mux.config.shapes import Shape
from anvil_mux.config.table import SERVICE_SETTINGS, SETTINGS, describe

COMPOSE = "https://raw.githubusercontent.com/compose-spec/compose-spec/main/schema/compose-spec.json"
"""The schema of the Compose Specification."""
DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that YAML's language server knows."""

Choices = Mapping[str, Sequence[str]]
"""Key -> the names of plug-ins that come with the program, which editors offer; others may be named too."""


def compose_schema(choices: Choices) -> dict[str, Any]:
    """The schema of a whole compose file."""
    service = {"type": "object", "properties": {"x-anvil": {"$ref": "#/definitions/service"}}}
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
            "top": _settings("The settings of anvil-mux.", SETTINGS, choices),
            "service": _settings(
                "With this key, even if it is empty, the service is a model.", SERVICE_SETTINGS, choices
            ),
        },
    }


def _settings(meaning: str, table: Mapping[str, Setting], choices: Choices) -> Shape:
    keys = {key: _setting(rest, table[key], choices.get(key, ())) for key, *rest in describe(table)}
    known = {"type": "object", "properties": keys, "additionalProperties": False}
    return {"description": meaning, **shapes.any_of(known, shapes.NOTHING)}


def _setting(described: Sequence[str], setting: Setting, choices: Sequence[str]) -> Shape:
    kind, default, meaning = described
    told = f"{meaning}\n\n{kind}" + (f"; by default {default}" if default else "")
    offered = {"examples": list(choices)} if choices else {}
    return {"description": told, **offered, **shapes.any_of(setting.kind.shape, shapes.NOTHING)}
