"""Scripts: the requests of a workload, of an event log or of a trace of prompts, for a real server.

A ``Script`` is fixed before it is played, so that every server that it is played against is sent the same.
Moments are seconds from the beginning of the run; ``speed`` divides those of the workload, and the pauses of
its sessions, but not what loads and answers take.

A workload says how long a request is served, and a server can only be told how long an answer is. So the
seconds become tokens, at the pace of the model's engine. A trace of prompts says both lengths.

The text of a prompt is made of random words of four bytes, a space among them, that nobody has seen, but for
the parts that a trace says are shared: a block of a trace is always the same words, by its id. How many
tokens of the model's tokenizer a word is, the engine's ``usage`` says in the warm-up; until then a token is
four bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from anvil_mux.errors import MuxError
from anvil_mux.lab import prompts, workload
from anvil_mux.lab.prompts import Prompt, SessionQueues, Trace
from anvil_mux.lab.simulate import Arrival
from anvil_mux.lab.workload import BadWorkload, Workload

PROMPT_TOKENS = 32
"""The input of a request whose workload does not tell its length."""
BLOCKS_KEPT = 1 << 15


class BadScript(MuxError):
    """The traffic cannot be played against this server; says what to do."""


FollowPlayed = Callable[[Prompt, float], Iterable[Prompt]]
"""The requests that the end of one leads to, and when they are due."""


@dataclass(frozen=True)
class Script:
    """The requests of one run."""

    name: str
    models: tuple[str, ...]
    """The models that it asks for, by the server's names."""
    first: tuple[Prompt, ...]
    """The requests whose moments are known."""
    follow: Callable[[], FollowPlayed]
    """Makes a fresh ``follow`` for one run: the requests that depend on answers."""
    block_tokens: int = 1
    clients: tuple[str, ...] = ()
    """The sessions that ask again and again until the end, so that it can be compared how much each gets."""
    has_seconds: bool = False
    """Whether it says how long each request is served, so that swaps and waits can be simulated."""

    def limited(self, limit: int) -> Script:
        """The same with so many requests at most."""
        first = self.first[:limit]

        def follow() -> FollowPlayed:
            following, places = self.follow(), iter(range(limit - len(first)))

            def few(request: Prompt, now: float) -> Iterator[Prompt]:
                for later, _ in zip(following(request, now), places, strict=False):
                    yield later

            return few

        return replace(self, first=first, follow=follow)


def find(name: str) -> Workload | Trace:
    """The workload or the trace of prompts of this path, or the shipped one of this name; BadWorkload."""
    path = workload.find_among(name, "", workload.SHIPPED, prompts.SHIPPED)
    return prompts.read(path) if _is_trace(path) else workload.read(path)


def _is_trace(path: Path) -> bool:
    """Whether the header is that of a trace of prompts; readers say what is wrong with a file."""
    try:
        with workload.objects(path) as file:
            return "trace" in next(file, {})
    except BadWorkload:
        return False


def of_workload(
    made: Workload,
    tokens_per_second: Mapping[str, float],
    *,
    speed: float = 1.0,
    tokens: int = PROMPT_TOKENS,
) -> Script:
    """The script of a workload that has the server's names; ``tokens_per_second``: the pace of each model."""

    def prompt(arrival: Arrival) -> Prompt:
        return Prompt(
            at=arrival.at / speed,
            tokens=tokens,
            output=max(round(arrival.seconds * tokens_per_second[arrival.model]), 1),
            session="" if arrival.sender is None else str(arrival.sender),
            model=arrival.model,
            patience=arrival.patience,
            arrival=arrival,
        )

    def follow() -> FollowPlayed:
        following = made.follow() if made.follow else None

        def later(request: Prompt, now: float) -> Iterator[Prompt]:
            if following and request.arrival:
                yield from map(prompt, following(request.arrival, now * speed))

        return later

    return Script(
        name=made.name,
        models=tuple(made.load_seconds),
        first=tuple([prompt(each) for each in made.requests if each.leases]),
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
    ratio = block_tokens / trace.block_tokens
    requests = [
        prompt._replace(
            at=prompt.at / speed,
            tokens=max(round(prompt.tokens * ratio), len(prompt.blocks) * block_tokens, 1),
            output=max(round(prompt.output * ratio), 1),
            model=model,
        )
        for prompt in trace.draw(seed, sessions)
    ]

    def follow() -> FollowPlayed:
        queues = SessionQueues(requests)

        def later(request: Prompt, now: float) -> Iterator[Prompt]:
            if following := queues.next_of(request.session):
                yield following._replace(at=max(following.at, now))

        return later

    return Script(
        name=trace.name,
        models=(model,),
        first=tuple(SessionQueues(requests).first),
        follow=follow,
        block_tokens=block_tokens,
    )


class PromptWriter:
    """Writes the prompts of one run; ``tokens_per_word``: by model, 1 where it is not known."""

    def __init__(self, seed: str, block_tokens: int, tokens_per_word: Mapping[str, float]) -> None:
        self._seed = seed
        self._block_tokens = block_tokens
        self._tokens_per_word = tokens_per_word
        self._block = lru_cache(BLOCKS_KEPT)(self._written)

    def write(self, request: Prompt, number: int) -> str:
        """The prompt of the request of this number."""
        each = self._tokens_per_word.get(request.model, 1.0)
        ends = [round(n * self._block_tokens / each) for n in range(len(request.blocks) + 1)]
        parts = [
            self._block(str(block), end - begin)
            for block, begin, end in zip(request.blocks, ends, ends[1:], strict=False)
        ]
        words = max(round(request.tokens / each) - ends[-1], 0 if any(parts) else 1)
        return "".join([*parts, self._written(f"alone {number}", words)])

    def _written(self, name: str, words: int) -> str:
        draw = random.Random(f"{self._seed} {name}")
        return "".join([f"{word} " for word in draw.choices(range(100, 1000), k=words)])
