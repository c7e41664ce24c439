"""Whatever is asked, and whatever an engine answers, nothing is lost, nothing made up, nothing another's.

Cases are drawn, played through a running anvil-mux, and judged by what strict peers on both sides parsed
(``judging``). ``bin/test wire`` goes on for half an hour, each time from another seed. What it finds it tells
once for each kind, as the shortest case that shows it: a line for ``FOUND``, where it stays.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.wire.cases import Answer, Ask, Case, Line
from tests.wire.drawing import HIDDEN, drawn, shortest
from tests.wire.judging import findings
from tests.wire.witness import Player

SEED = os.environ.get("ANVIL_WIRE_SEED", "1")
SECONDS = float(os.environ.get("ANVIL_WIRE_SECONDS", "0"))
"""In place of ``ROUNDS``."""
ROUNDS = 400
"""Cases in a usual run."""
TRIES = 400
"""Cases that are played to find the shortest that shows one kind of mistake."""

FOUND = [
    Case((Line((Ask(way="upstream", fields=("Upgrade: h2c",)),)),)),
    Case((Line((Ask(answer=Answer(packed=True)),)),)),
    Case((Line((Ask(answer=Answer(twice="later")), Ask())),)),
    Case((Line((Ask(answer=Answer(kind="events", framing="close", cut=400)),)),)),
    Case((Line((Ask(answer=Answer(kind="events", framing="chunked", cut=537)),)),)),
    Case((Line((Ask(version="1.0", answer=Answer(kind="events", framing="close", cut=339)),)),)),
    Case(
        (Line((Ask(version="1.0", leave="half", answer=Answer(kind="events", framing="close", cut=844)),)),)
    ),
    Case((Line((Ask("health", body='{"id":"<id>"}'), Ask())),)),
    Case((Line((Ask("health", body=HIDDEN), Ask())),)),
    Case((Line((Ask("engine-models", body=HIDDEN, framing="chunked"), Ask())),)),
    Case((Line((Ask("upstream", key="only-a", named="org/b"),)),), keyed=True),
    Case((Line((Ask("healthz", framing="chunked"), Ask())),)),
    Case((Line((Ask("livez", wrong="chunks with bare LFs"), Ask())),)),
    Case((Line((Ask("props", framing="chunked", body='{"id":"<id>"}', cut=849),)),)),
    Case((Line((Ask("props", wrong="a chunk's size that is none"),)),)),
    Case((Line((Ask(version="1.0", pad=400000, answer=Answer(framing="close")), Ask()), pipelined=True),)),
    Case((Line((Ask("messages", leave="half", answer=Answer(kind="events", framing="close", cut=958)),)),)),
    Case((Line((Ask("ollama-stream", answer=Answer(kind="events", last=False)),)),)),
    Case((Line((Ask("ollama-stream", version="1.0", answer=Answer(kind="events", pad=300000, cut=386)),)),)),
    Case((Line((Ask(answer=Answer(kind="events", framing="close", cut=990)),)),)),
    Case((Line((Ask(fields=("Connection: close",), pad=400000, answer=Answer(pad=300000)), Ask()), True),)),
    Case((Line((Ask(answer=Answer(kind="none", pieces=7, wrong="a chunk longer than it says")),)),)),
    Case((Line((Ask(reads=1, answer=Answer(kind="events", framing="chunked", cut=991)),)),)),
]
"""Cases that once showed a mistake."""


@pytest.fixture(scope="module")
def player() -> Iterator[Player]:
    made = Player()
    yield made
    made.close()


def judged(player: Player, case: Case) -> list[str]:
    """All that does not hold of one case."""
    house, seen, flaws = player.play(case)
    return list(findings(house, seen, flaws))


def kind_of(finding: str) -> str:
    return finding.partition(":")[0]


@pytest.mark.parametrize("case", FOUND, ids=range(len(FOUND)))
def test_what_was_found_once_holds(player: Player, case: Case) -> None:
    assert judged(player, case) == []


def numbers() -> Iterator[int]:
    if not SECONDS:
        yield from range(ROUNDS)
        return
    end = time.monotonic() + SECONDS
    for number in itertools.count():
        if time.monotonic() > end:
            return
        yield number


def test_what_is_drawn_holds(player: Player) -> None:
    reports: dict[str, str] = {}
    recent: deque[Case] = deque(maxlen=4)
    began, number = time.monotonic(), 0
    for number in numbers():
        case = drawn(random.Random(f"{SEED} {number}"))
        recent.append(case)
        for finding in judged(player, case):
            kind = kind_of(finding)
            if kind not in reports:
                when = f"seed {SEED}, case {number}, request {player.asked}, {time.monotonic() - began:.1f} s"
                reports[kind] = f"{finding[:2000]}\n    {when}"
                reports[kind] += f"\n    {shortest_of(player, list(recent), kind)!r},"
                print(reports[kind], flush=True)
    print(f"seed {SEED}: {number + 1} cases, {player.asked} requests, {time.monotonic() - began:.0f} s")
    assert not reports, "\n\n".join(reports.values())


def shortest_of(player: Player, recent: list[Case], kind: str) -> Case:
    """The shortest case that shows it. What one left behind may have come to light in a later one."""

    def shows(case: Case) -> bool:
        return any(kind_of(finding) == kind for finding in judged(player, case))

    together = replace(recent[-1], lines=tuple(line for case in recent for line in case.lines))
    start = next((case for case in (recent[-1], together) if shows(case)), recent[-1])
    return shortest(start, shows, TRIES)
