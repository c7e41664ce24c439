"""Scripts: the requests of a workload, of an event log or of a trace of prompts, for a real server.

A ``Script`` is fixed before it is played, so that every server that it is played against is sent the same.
Moments are seconds from the beginning of the run; ``speed`` divides those of the workload, and the pauses of
its sessions, but not what loads and answers take.

A workload says how long a request is served, and a server can only be told how long an answer is. So the
seconds become tokens, at the pace of the model's engine (pace.py). A trace of prompts says both lengths.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import NamedTuple

from anvil_mux.errors import MuxError
from anvil_mux.lab import prompts, workload
from anvil_mux.lab.prompts import Prompt, Trace
from anvil_mux.lab.simulate import Arrival
from anvil_mux.lab.workload import BadWorkload, ModelNames, Workload
from anvil_mux.telemetry.eventlog import UNREADABLE, lines

PROMPT_TOKENS = 32
"""The input of a request whose workload does not tell its length."""


class BadScript(MuxError):
    """The traffic cannot be played against this server; says what to do."""


class PlayedRequest(NamedTuple):
    """One request, with what its input and its answer are to be."""

    at: float
    """When it is due."""
    model: str
    """The name by which the server is asked."""
    tokens: int
    """The length of its input."""
    output: int
    """The length of its answer."""
    blocks: tuple[int, ...] = ()
    """Ids of the whole blocks of its input; equal ids begin alike."""
    session: str = ""
    patience: float = inf
    """Seconds after which its client leaves, if no byte of the answer has come."""
    arrival: Arrival | None = None
    """The request of the workload that it stands for."""


FollowPlayed = Callable[[PlayedRequest, float], Iterable[PlayedRequest]]
"""The requests that the end of one leads to, and when they are due."""


@dataclass(frozen=True)
class Script:
    """The requests of one run."""

    name: str
    models: tuple[str, ...]
    """The models that it asks for, by the server's names."""
    resident: tuple[str, ...]
    """The models that are to be loaded when it begins."""
    first: tuple[PlayedRequest, ...]
    """The requests whose moments are known."""
    follow: Callable[[], FollowPlayed]
    """Makes a fresh ``follow`` for one run: the requests that depend on answers."""
    block_tokens: int = 1
    clients: tuple[str, ...] = ()
    """The sessions that ask again and again until the end, so that it can be compared how much each gets."""
    has_seconds: bool = False
    """Whether it says how long each request is served, so that swaps and waits can be simulated."""

    def begin(self) -> tuple[Sequence[PlayedRequest], FollowPlayed]:
        """The requests whose moments are known, and what follows upon their ends."""
        return self.first, self.follow()

    def limited(self, limit: int) -> Script:
        """The same with so many requests at most."""
        first = self.first[:limit]

        def follow() -> FollowPlayed:
            following, left = self.follow(), limit - len(first)

            def few(request: PlayedRequest, now: float) -> Iterator[PlayedRequest]:
                nonlocal left
                for later in following(request, now):
                    if left > 0:
                        left -= 1
                        yield later

            return few

        return replace(self, first=first, follow=follow)


def find(name: str) -> Workload | Trace:
    """The workload or the trace of prompts of this path, or the shipped one of this name; BadWorkload."""
    path = Path(name)
    if not path.exists():
        shipped = {file.name.partition(".")[0]: file for file in _shipped()}
        if name not in shipped:
            raise BadWorkload(f"{name}: no such file; shipped: {', '.join(shipped)}")
        path = shipped[name]
    return prompts.read(path) if _is_trace(path) else workload.read(path)


def _shipped() -> Iterator[Path]:
    for folder in (workload.SHIPPED, prompts.SHIPPED):
        yield from sorted(folder.glob(workload.SHIPPED_AS))


def _is_trace(path: Path) -> bool:
    """Whether the header is that of a trace of prompts; readers say what is wrong with a file."""
    try:
        header = json.loads(next(iter(lines(path)), ""))
    except (ValueError, *UNREADABLE):
        return False
    return isinstance(header, dict) and "trace" in header


def models_of(made: Workload, names: ModelNames) -> tuple[str, ...]:
    """The server's names of a workload's models, each once."""
    return tuple(dict.fromkeys(names.name(model) for model in made.load_seconds))


def of_workload(
    made: Workload,
    names: ModelNames,
    tokens_per_second: Mapping[str, float],
    *,
    speed: float = 1.0,
    tokens: int = PROMPT_TOKENS,
) -> Script:
    """The script of a workload; ``tokens_per_second``: the pace of each model, by the server's name."""

    def played(arrival: Arrival) -> PlayedRequest:
        model = names.name(arrival.model)
        return PlayedRequest(
            at=arrival.at / speed,
            model=model,
            tokens=tokens,
            output=max(round(arrival.seconds * tokens_per_second[model]), 1),
            session="" if arrival.sender is None else str(arrival.sender),
            patience=arrival.patience,
            arrival=arrival,
        )

    def follow() -> FollowPlayed:
        following = made.follow() if made.follow else None

        def later(request: PlayedRequest, now: float) -> Iterator[PlayedRequest]:
            if following and request.arrival:
                yield from map(played, following(request.arrival, now * speed))

        return later

    return Script(
        name=made.name,
        models=models_of(made, names),
        resident=tuple(dict.fromkeys(names.name(model) for model in made.resident)),
        first=tuple([played(each) for each in made.requests if each.leases]),
        follow=follow,
        clients=tuple(map(str, made.clients)),
        has_seconds=True,
    )


def of_trace(
    trace: Trace,
    model: str,
    *,
    seed: int = 0,
    sessions: int | None = None,
    speed: float = 1.0,
    scale: float = 1.0,
) -> Script:
    """The script of a trace of prompts for one model.

    ``scale`` multiplies all lengths, those of the blocks too, so that the same parts of prompts are shared.
    """
    block_tokens = max(round(trace.block_tokens * scale), 1)
    drawn = trace.draw(seed, sessions if trace.sessions else None)
    requests = [_scaled(prompt, model, trace.block_tokens, block_tokens, speed) for prompt in drawn]
    if not requests:
        raise BadScript(f"{trace.name} has no request within {trace.seconds:g} s with seed {seed}")
    begun: set[str] = set()
    first: list[PlayedRequest] = []
    rest: list[PlayedRequest] = []
    for request in requests:
        (rest if request.session in begun else first).append(request)
        begun |= {request.session} - {""}
    return Script(
        name=trace.name,
        models=(model,),
        resident=(model,),
        first=tuple(first),
        follow=lambda: _sessions(rest),
        block_tokens=block_tokens,
    )


def _scaled(prompt: Prompt, model: str, before: int, after: int, speed: float) -> PlayedRequest:
    ratio = after / before
    return PlayedRequest(
        at=prompt.at / speed,
        model=model,
        tokens=max(round(prompt.tokens * ratio), len(prompt.blocks) * after, 1),
        output=max(round(prompt.output * ratio), 1),
        blocks=prompt.blocks,
        session=prompt.session,
    )


def _sessions(requests: Iterable[PlayedRequest]) -> FollowPlayed:
    """Clients that each send their next request at its moment, but not before the answer to the last one."""
    queues: dict[str, deque[PlayedRequest]] = {}
    for request in requests:
        queues.setdefault(request.session, deque()).append(request)

    def follow(request: PlayedRequest, now: float) -> Iterator[PlayedRequest]:
        queue = queues.get(request.session)
        if queue:
            following = queue.popleft()
            yield following._replace(at=max(following.at, now))

    return follow
