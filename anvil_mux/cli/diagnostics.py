"""Problems, warnings and hints as the commands print them: what and where, what to write, and the page.

A page is named below the first diagnostic that it is about, and not again below those that follow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from anvil_mux.cli.output import say
from anvil_mux.cli.screen import paint
from anvil_mux.config.diagnostic import as_diagnostic
from anvil_mux.config.problems import page_of, where_pages_are
from anvil_mux.errors import printable

COLORS = {"error": "31", "warning": "33", "hint": "36"}
INDENT = "    "


def print_diagnostics(found: Sequence[tuple[str, str]]) -> None:
    """Print diagnostics, each with its kind: error, warning or hint."""
    pages: dict[str, None] = {}
    for kind, diagnostic in sorted(found, key=_order):
        say(f"{paint(kind, COLORS[kind], sys.stderr)}: {printable(as_diagnostic(diagnostic).said)}")
        for line in _below(diagnostic, pages):
            print(f"{INDENT}{printable(line)}", file=sys.stderr, flush=True)
    if pages and (where := where_pages_are()):
        say(where)


def _order(found: tuple[str, str]) -> tuple[int, str, int]:
    """Errors before warnings before hints, each by its line; those without a place come last."""
    kind, place = found[0], as_diagnostic(found[1]).place
    return [*COLORS].index(kind), place.file or "\uffff", place.line or 0


def _below(diagnostic: str, pages: dict[str, None]) -> Iterator[str]:
    """Yield the lines below a diagnostic; ``pages``: those named so far, to which its own is added."""
    if write := as_diagnostic(diagnostic).write:
        first, *rest = write.splitlines()
        yield f"write: {first}"
        yield from (f"       {line}" for line in rest)
    page = page_of(diagnostic)
    if page and page not in pages:
        pages[page] = None
        yield f"see {page}"


def as_json(kind: str, found: Iterable[str]) -> list[dict[str, Any]]:
    """Return diagnostics in their parts."""
    return [_part_by_part(kind, as_diagnostic(diagnostic)) for diagnostic in found]


def _part_by_part(kind: str, diagnostic: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "file": diagnostic.place.file,
        "line": diagnostic.place.line,
        "key": ".".join(diagnostic.key),
        "text": str(diagnostic),
        "write": diagnostic.write,
        "page": page_of(diagnostic),
    }
