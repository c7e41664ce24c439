"""The output of the commands: tables, colours, JSON, and what is wrong with a configuration.

What was asked for goes to standard output, all else to standard error. The columns of a table are their
headings, each with the getter of its cells. Of diagnostics, a page is named below the first one that it is
about, and not again below those that follow.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

from anvil_mux.config.kinds import as_diagnostic
from anvil_mux.errors import MuxError, printable

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str]]
"""Heading -> the getter of its cells."""

FAILED, BAD_CONFIG, INTERRUPTED = 1, 78, 130
PROGRESS_SECONDS = 2.0
COLORS = {"error": "31", "warning": "33", "hint": "36"}
INDENT = "    "


# What was asked for


def answer(given: argparse.Namespace, found: Any, show: Callable[[Any], object]) -> int:
    """Print what was found, as JSON or as people read it; the exit code."""
    print_json(found) if given.json else show(found)
    return 0


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def print_columns(columns: Columns[T], rows: Iterable[T]) -> None:
    for line in tabled(columns, rows):
        print(line)


def tabled(columns: Columns[T], rows: Iterable[T]) -> list[str]:
    """The lines of a table of these columns."""
    return table([*columns], [[cell(row) for cell in columns.values()] for row in rows])


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for line in table(head, rows):
        print(line)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table with aligned columns."""
    lines = [head, *rows]
    widths = [max(map(width, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell + " " * (wide - width(cell)) for cell, wide in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def width(cell: str) -> int:
    """The width of a text on the screen, without its colours."""
    return len(cell) - 9 * cell.count("\x1b[0m")


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """Paint ``text`` in a colour, on terminals."""
    stream = stream or sys.stdout
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty()
    if not colour or (plain and not os.environ.get("FORCE_COLOR")):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def counted(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}" + ("" if len(things) == 1 else "s")


def time_of_day(moment: float) -> str:
    """The time of day of a moment, and the day if that is not today."""
    then = time.localtime(moment)
    today = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", then)


@contextmanager
def opened(path: str) -> Iterator[TextIO]:
    try:
        file = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        raise MuxError(f"{path} cannot be written: {error.strerror}") from None
    with file:
        yield file


# Messages


def say(text: str) -> None:
    print(f"anvil-mux: {text}", file=sys.stderr, flush=True)


def complain(text: str, code: int) -> int:
    say(f"{paint('error', '31', sys.stderr)}: {text}")
    return code


def progress() -> Callable[[str], None]:
    """Makes what shows on a terminal, now and then, how far a long run is."""
    told = time.monotonic()

    def tell(far: str) -> None:
        nonlocal told
        if sys.stderr.isatty() and time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            say(far)

    return tell


# Diagnostics


def print_diagnostics(found: Sequence[tuple[str, str]]) -> None:
    """Print diagnostics, each with its kind: error, warning or hint."""
    from anvil_mux.config.reading import where_pages_are

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
    from anvil_mux.config.reading import page_of

    if write := as_diagnostic(diagnostic).write:
        first, *rest = write.splitlines()
        yield f"write: {first}"
        yield from (f"       {line}" for line in rest)
    page = page_of(diagnostic)
    if page and page not in pages:
        pages[page] = None
        yield f"see {page}"


def diagnostics_as_json(found: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return diagnostics, each with its kind, in their parts."""
    from anvil_mux.config.reading import page_of

    return [
        {
            "kind": kind,
            "file": diagnostic.place.file,
            "line": diagnostic.place.line,
            "key": ".".join(diagnostic.key),
            "text": str(diagnostic),
            "write": diagnostic.write,
            "page": page_of(diagnostic),
        }
        for kind, diagnostic in ((kind, as_diagnostic(each)) for kind, each in found)
    ]
