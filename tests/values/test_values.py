"""Whatever a value is, and wherever it stands: it is refused in the shape of its API or passed on, and harms
nobody.

Cases are drawn, played against a running anvil-mux whose work is counted, and judged (``witness``).
``bin/test types`` goes on for ten minutes, each time from another seed. What it finds it tells once for each
kind, as the shortest case that shows it: a line for ``FOUND``, where it stays.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.values.cases import Ask, Says
from tests.values.drawing import drawn, shortest
from tests.values.witness import House

SEED = os.environ.get("ANVIL_TYPES_SEED", "1")
SECONDS = float(os.environ.get("ANVIL_TYPES_SECONDS", "0"))
"""In place of ``ROUNDS``."""
ROUNDS = 60
"""Cases in a usual run."""
TRIES = 60
"""Cases that are played to find the shortest that shows one kind of mistake."""

FOUND = [
    Ask("/api/generate", changes=((("keep_alive",), "9999999999"),)),
    Ask("/api/generate", changes=((("keep_alive",), "hours of 20 digits and an x"),)),
    Ask("/api/generate", changes=((("keep_alive",), "40,000 digits and an x"),)),
    Ask("/api/chat", changes=(((), "5,000 brackets"),)),
    Ask("/api/chat", changes=((("messages",), "very many lists"),)),
    Ask("/upstream", "GET", parts=("/a", 3900)),
    Ask("/logs?model=small", "GET", query=(("lines", "superscript"),)),
    Ask("/logs?model=small", "GET", query=(("lines", "4,500 digits"),)),
    Ask("/why?model=small", "GET", query=(("tokens", "5,000 digits of text"),)),
    Ask("/api/chat", says=(Says(changes=((("choices", 0, "message", "tool_calls"), '[{"function":1}]'),)),)),
    Ask(
        "/v1/messages",
        says=(Says(changes=((("choices", 0, "message", "tool_calls"), '[{"function":{"name":[]}}]'),)),),
    ),
    Ask("/api/chat", says=(Says(changes=((("choices", 0), "1"),)),)),
    Ask("/api/chat", says=(Says("/v1/chat/completions", ((("timings", "prompt_ms"), "NaN"),)),)),
    Ask("/api/embeddings", says=(Says("/v1/embeddings", ((("data", 0), "[1]"),)),)),
    Ask("/api/embed", says=(Says("/v1/embeddings", ((("usage",), "text 'x'"),)),)),
    Ask("/api/embed", says=(Says("/v1/embeddings", ((("data", 0, "embedding"), "-Infinity"),)),)),
    Ask("/api/embeddings", changes=((("keep_alive",), "309 digits"),)),
]
"""Cases that once showed a mistake."""


@pytest.mark.parametrize("ask", FOUND, ids=range(len(FOUND)))
def test_what_was_found_once_holds(house: House, ask: Ask) -> None:
    assert house.judged(ask) == []


def numbers(share: float = 0.55, rounds: int = ROUNDS) -> Iterator[int]:
    """The numbers of cases; ``share``: of the time by name."""
    if not SECONDS:
        yield from range(rounds)
        return
    end = time.monotonic() + SECONDS * share
    for number in itertools.count():
        if time.monotonic() > end:
            return
        yield number


def kind_of(finding: str) -> str:
    """What it is, and where in the program."""
    kind = finding.partition(":")[0]
    places = re.findall(r'File "[^"]*/(anvil_mux/[^"]+)", line \d+, in (\S+)', finding)
    return f"{kind} {places[-1] if places else ''}"


def _shows(house: House, kind: str, ask: Ask) -> bool:
    return any(kind_of(finding) == kind for finding in house.judged(ask))


def test_what_is_drawn_holds(house: House) -> None:
    reports: dict[str, str] = {}
    began, number = time.monotonic(), 0
    for number in numbers():
        ask = drawn(random.Random(f"{SEED} {number}"))
        for finding in house.judged(ask):
            kind = kind_of(finding)
            if kind not in reports:
                when = f"seed {SEED}, case {number}, {time.monotonic() - began:.1f} s"
                reports[kind] = f"{finding[:6000]}\n    {when}"
                print(reports[kind], flush=True)
                short = shortest(ask, partial(_shows, house, kind), TRIES)
                reports[kind] += f"\n    {short!r},"
                print(f"    {short!r},", flush=True)
    print(f"seed {SEED}: {number + 1} cases, {time.monotonic() - began:.0f} s")
    assert not reports, "\n\n".join(reports.values())
