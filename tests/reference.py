"""docs/reference.md, made from the program itself: `python -m tests.reference` prints it."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

from anvil_mux.cli import main as cli
from anvil_mux.config.config import SERVICE_SETTINGS, SETTINGS
from anvil_mux.config.kinds import Setting, describe, plain
from anvil_mux.host import engines
from anvil_mux.host.levels import LEVELS, SLEEPS
from anvil_mux.protocol import api
from anvil_mux.routing import pipeline, routing
from anvil_mux.scheduler import events, memory, policies

PATH = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
HEAD = """# Reference

Made from the program by `make docs`; a test fails when it no longer fits.
Elsewhere: [metrics](metrics.md#metrics), [errors](troubleshooting.md#errors).
"""


ROUTES_INTRODUCTION = """Forwarded to the engine that serves the model named in a request; everything else is
refused, engines' control routes above all. Routes under `/v1/` also work without it."""


EDITORS = """Editors complete and check all of this: `anvil-mux config --schema > anvil-mux.schema.json` makes
a JSON Schema beside a compose file, whose first line names it, as those in `compose/` do:
`# yaml-language-server: $schema=anvil-mux.schema.json` (VS Code with the extension YAML, Neovim, Helix, ...).
It refers to the schema of the Compose Specification, so the editor has to reach `raw.githubusercontent.com`;
without that, take `allOf` out of it."""


def text() -> str:
    return "\n".join([HEAD, *(part for section in SECTIONS for part in section())])


def commands() -> Iterable[str]:
    rows = [(f"`anvil-mux {name}`", about) for name, (about, *_) in cli.COMMANDS.items()]
    codes = [(f"`{code}`", meaning) for code, meaning in cli.EXIT_CODES.items()]
    variables = [(f"`{name}`", meaning) for name, meaning in cli.VARIABLES.items()]
    return [
        *("## Commands", "", *_table(("command", "does"), rows), ""),
        *("### Exit codes", "", *_table(("code", "means"), codes), ""),
        *("### Environment", "", *_table(("variable", "says"), variables), ""),
    ]


def settings() -> Iterable[str]:
    return [
        "## Settings",
        "",
        "Flags win over environment variables (`ANVIL_DRAIN_TIMEOUT=60`), these over the compose file.",
        "",
        EDITORS,
        "",
        "### x-anvil at the top level",
        "",
        *_settings(SETTINGS),
        "",
        "### x-anvil on a service",
        "",
        *_settings(SERVICE_SETTINGS),
        "",
    ]


def _settings(rows_of: dict[str, Setting]) -> list[str]:
    rows = describe(rows_of)
    return _table(("key", "value", "default", "meaning"), ((f"`{k}`", _cell(t), d, m) for k, t, d, m in rows))


def choices() -> Iterable[str]:
    yield from ("## Policies", "", *_registry(policies.POLICIES), "")
    yield from ("## Evictions", "", *_registry(memory.EVICTIONS), "")
    rows = [(f"`{name}`", _first_sentence(way)) for name, way in LEVELS.items()]
    yield from ("## Standby levels", "", *_table(("name", "what it does"), rows), "")
    rows = [
        (f"`{name}`", str(made.port), f"`{made.health}`", _sleeps(name))
        for name, made in engines.ENGINES.items()
    ]
    yield from ("## Engines", "", *_table(("name", "port", "readiness", "sleeps by"), rows), "")


def steps() -> Iterable[str]:
    names = ", ".join(f"`{name}`" for name in pipeline.shipped())
    yield from ("## Routing", "", "How they fit together: [routing.md](routing.md).", "")
    yield from (f"Policies: {names}.", "")
    kinds = {"Metrics": routing.METRICS, "Filters": routing.FILTERS, "Selectors": routing.SELECTORS}
    for title, registry in kinds.items():
        rows = [(f"`{name}`", _first_sentence(step), _arguments(step)) for name, step in registry.items()]
        yield from (f"### {title}", "", *_table(("name", "meaning", "settings (default)"), rows), "")


def _arguments(step: Callable[..., object]) -> str:
    given = [p for p in inspect.signature(step).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return ", ".join(
        f"`{p.name}`" + (f" ({_default(p.default)})" if p.default is not p.empty else "") for p in given
    )


def _default(value: object) -> str:
    return plain(value) or '""'


def _sleeps(name: str) -> str:
    found = engines.ENGINES[name].sleeps
    ways = [f"`{way}`" for way, made in SLEEPS.items() if found and made.level in found.levels]
    return ", ".join(ways)


def routes() -> Iterable[str]:
    rows = [
        (f"`{method} {path}`", route.model_in, route.api)
        for path, methods in api.ROUTES.items()
        for method, route in methods.items()
        if route.path == path
    ]
    yield from ("## Routes", "", ROUTES_INTRODUCTION, "")
    yield from (*_table(("route", "model in", "errors as"), rows), "")


def kinds() -> Iterable[str]:
    rows = [(f"`{kind}`", meaning) for kind, meaning in events.KINDS.items()]
    reasons = [(f"`{kind}`", text) for kind, text in events.SENTENCES.items()]
    return [
        "## Events",
        "",
        *_table(("event", "meaning"), rows),
        "",
        "The `cause` of an event is an object: its `kind`, and those figures that are not empty.",
        "",
        *_table(("cause", "in words, with its figures in braces"), reasons),
        "",
    ]


SECTIONS = (commands, settings, choices, steps, routes, kinds)


def _registry(registry: dict[str, type]) -> list[str]:
    rows = [(f"`{name}`", _first_sentence(cls), _fields(cls)) for name, cls in registry.items()]
    return _table(("name", "what it does", "settings (default)"), rows)


def _fields(cls: type) -> str:
    docs = _field_docs(cls)
    return "; ".join(f"`{f.name}` ({plain(f.default)}): {docs[f.name]}" for f in fields(cls))


def _field_docs(cls: type) -> dict[str, str]:
    """Field -> the string that stands under it."""
    body = ast.parse(inspect.getsource(cls)).body[0].body  # type: ignore[attr-defined]
    pairs = pairwise(body)
    return {a.target.id: b.value.value for a, b in pairs if isinstance(a, ast.AnnAssign)}  # type: ignore[attr-defined]


def _first_sentence(thing: object) -> str:
    words = " ".join((inspect.getdoc(thing) or "").replace("``", "`").split())
    return _cell(words.split(". ")[0].rstrip(".") + ".")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    print(text(), end="")
