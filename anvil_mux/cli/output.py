"""The output of the commands, and how they end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from anvil_mux.cli.screen import paint, table
from anvil_mux.errors import MuxError

FAILED, BAD_CONFIG, INTERRUPTED = 1, 78, 130
PROGRESS_SECONDS = 2.0


@contextmanager
def opened(path: str) -> Iterator[TextIO]:
    try:
        file = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        raise MuxError(f"{path} cannot be written: {error.strerror}") from None
    with file:
        yield file


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


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for line in table(head, rows):
        print(line)


def as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def counted(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}" + ("" if len(things) == 1 else "s")
