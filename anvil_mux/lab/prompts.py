"""Recorded prompts: how long they are, when they came, and which of them begin alike.

A trace holds JSON lines and may be compressed with gzip or xz. The first line is a header, every other one
a request:

    {"trace": "name", "about": "...", "source": "...", "licence": "...", "block_tokens": 64, "seconds": 600}
    {"at": 12.5, "in": 1000, "out": 80, "blocks": "1-12,40-42"}
    {"session": 7, "at": 0, "in": 900, "out": 60, "blocks": "1-12,50-51"}

``in`` and ``out`` are tokens. ``blocks`` are ranges of ids, one for each whole block of ``block_tokens`` of
the input; equal ids mean that all input up to there is equal.

A request without a session comes at its moment. Those of a session come one after the other, each at its
moment, but not before the answer to the one before; their moments count from the beginning of the session,
which is not in the trace: ``Trace.draw`` draws it, evenly over ``seconds``, and takes what comes within them.
So which requests there are depends on the seed alone, and every policy gets the same.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from anvil_mux.lab.simulate import Arrival
from anvil_mux.lab.workload import BadWorkload, find_among, objects

SHIPPED = Path(__file__).parent / "traces"
"""Traces that come with the program."""


class Prompt(NamedTuple):
    """One request: a prompt and the length of its answer.

    In a session it comes no sooner than the answer to the one before.
    """

    at: float
    """When it is due."""
    tokens: int
    output: int
    blocks: tuple[int, ...] = ()
    """Ids of the whole blocks of its input, from the first on; equal ids begin alike."""
    session: str = ""
    model: str = ""
    """The name by which a server is asked; empty: there is only one model."""
    patience: float = inf
    """Seconds after which its client leaves, if no byte of the answer has come."""
    arrival: Arrival | None = None
    """The request of a workload that it stands for."""


class SessionQueues:
    """The prompts of sessions, of which each but the first waits for the answer to the one before."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self.first: list[Prompt] = []
        """The prompts that wait for no other."""
        self._rest: dict[str, deque[Prompt]] = {}
        for prompt in prompts:
            if prompt.session in self._rest:
                self._rest[prompt.session].append(prompt)
                continue
            if prompt.session:
                self._rest[prompt.session] = deque()
            self.first.append(prompt)

    def next_of(self, session: str) -> Prompt | None:
        """The prompt that follows upon an answer, if there is one."""
        rest = self._rest.get(session)
        return rest.popleft() if rest else None


@dataclass(frozen=True)
class Trace:
    """The requests of one file."""

    name: str
    block_tokens: int
    seconds: float
    sessions: tuple[tuple[Prompt, ...], ...]
    """The requests of each session in their order, with moments from its beginning on."""
    alone: tuple[Prompt, ...]
    """Requests without a session."""

    def draw(self, seed: int, sessions: int | None = None) -> list[Prompt]:
        """The requests of one run: those of all sessions, or of so many, that come within ``seconds``.

        BadWorkload if there is none.
        """
        draw = random.Random(f"{self.name} {seed}")
        chosen: Sequence[tuple[Prompt, ...]] = self.sessions
        if sessions is not None and chosen:
            if sessions > len(chosen):
                raise BadWorkload(f"{self.name} has {len(chosen)} sessions, not {sessions}")
            chosen = draw.sample(chosen, sessions)
        drawn = [prompt for prompt in self.alone if prompt.at < self.seconds]
        for session in chosen:
            begin = draw.uniform(0.0, self.seconds)
            moved = [prompt._replace(at=begin + prompt.at) for prompt in session]
            drawn += [prompt for prompt in moved if prompt.at < self.seconds]
        if not drawn:
            raise BadWorkload(f"{self.name} has no request within {self.seconds:g} s with seed {seed}")
        return sorted(drawn, key=lambda prompt: prompt.at)


def find(name: str) -> Path:
    """The trace of this path, or the shipped one of this name."""
    return find_among(name, " traces", SHIPPED)


def read(path: Path) -> Trace:
    """The trace of a file; BadWorkload names the line that cannot be used."""
    header: dict[str, Any] = {}
    prompts: list[Prompt] = []
    with objects(path) as file:
        for each in file:
            if header:
                prompts.append(_prompt(each, header["block_tokens"]))
            else:
                header = _header(each)
    if not prompts:
        raise BadWorkload(f"{path}: holds no request")
    sessions: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        sessions.setdefault(prompt.session, []).append(prompt)
    alone = sessions.pop("", [])
    together = tuple([tuple(sorted(each, key=lambda p: p.at)) for each in sessions.values()])
    return Trace(header["trace"], header["block_tokens"], header["seconds"], together, tuple(alone))


def _header(said: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(said.get("trace"), str):
        raise ValueError('must be the header: {"trace": "a name", "block_tokens": 64, "seconds": 600, ...}')
    return {**said, "block_tokens": _whole(said, "block_tokens", 1), "seconds": _seconds(said, "seconds")}


def _prompt(said: dict[str, Any], block_tokens: int) -> Prompt:
    tokens, blocks = _whole(said, "in", 1), tuple(_ids(said.get("blocks", "")))
    if len(blocks) * block_tokens > tokens:
        raise ValueError(f"{len(blocks)} blocks of {block_tokens} tokens are more than {tokens} tokens")
    session = "" if said.get("session") is None else str(said["session"])
    return Prompt(_seconds(said, "at"), tokens, _whole(said, "out", 1), blocks, session)


def _whole(said: dict[str, Any], key: str, least: int) -> int:
    value = said[key]
    if type(value) is not int or value < least:
        raise ValueError(f"{key}: must be a whole number of at least {least}, not {json.dumps(value)}")
    return value


def _seconds(said: dict[str, Any], key: str) -> float:
    value = said[key]
    if type(value) not in (int, float) or not 0 <= value < inf:
        raise ValueError(f"{key}: must be seconds, 0 or more, not {json.dumps(value)}")
    return float(value)


def _ids(ranges: object) -> list[int]:
    """``1-3,7``: 1, 2, 3, 7."""
    ids: list[int] = []
    for part in ranges.split(",") if isinstance(ranges, str) and ranges else ():
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ValueError(f'blocks: must be ranges like "1-12,40", not {json.dumps(part)}')
        ids += range(int(first), int(last or first) + 1)
    return ids
