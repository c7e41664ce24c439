"""Measures a real engine and writes its profile: ``anvil-mux profile MODEL``.

Prompts are random words, so that nothing of them is cached. The time to a first token is measured with one
request at a time; the time for each further one with several requests that stream at once, between the moment
at which the last of them has begun and the end of the first. What a prompt really has in tokens, the engine's
``usage`` says, from the first question on; and also how many tokens came in each piece of an answer: several,
where an engine guesses ahead or was told to send fewer pieces.

Nothing is promised beyond what was measured. So where an engine refuses a length, which is more than its
context, the longest that it takes is measured in its place. What it does not do (llama.cpp answers no more at
once than it has slots) is left out.

The engine is asked through an anvil-mux or directly: both speak the same API. Several replicas behind one
name would share the requests, so that is an error.
"""

from __future__ import annotations

import http.client
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from urllib.parse import quote

from anvil_mux.config.values import CHUNK
from anvil_mux.errors import BackendError
from anvil_mux.lab.player import PlayedServer, completion
from anvil_mux.protocol import foreign
from anvil_mux.serve.remote import NotRunning

PROMPTS = (128, 512, 2048, 8192)
BATCHES = (1, 2, 4, 8, 16)
LENGTHS = (128, 2048, 8192)
OUTPUT = 48
TIMEOUT = 600.0


@dataclass
class Streamed:
    """One streamed answer: when its pieces came."""

    begun: float
    moments: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    """Tokens of the answer; 0: not reported."""

    @property
    def first(self) -> float:
        return self.moments[0] - self.begun

    def between_tokens(self, begun: float, ended: float) -> float | None:
        """Seconds for a further token, from ``begun`` to ``ended`` if most of it came then."""
        together = [moment for moment in self.moments if begun <= moment <= ended]
        moments = together if 2 * len(together) > len(self.moments) else self.moments
        if len(moments) < 2:
            return None
        in_each = (self.tokens or len(self.moments)) / len(self.moments)
        return (moments[-1] - moments[0]) / (len(moments) - 1) / in_each


class PromptRefused(BackendError):
    """The engine does not take this request, and might take another."""


class Profiler:
    """One engine being measured."""

    def __init__(self, server: PlayedServer, model: str) -> None:
        self._server = server
        self.model = model
        self._random = random.Random()
        self._tokens_per_word = 2.0
        self._backend = ""

    def prompt(self, tokens: int) -> str:
        """A prompt of about so many tokens that nobody has seen."""
        words = max(round(tokens / self._tokens_per_word), 1)
        return " ".join(str(self._random.randrange(100, 1000)) for _ in range(words))

    def warm_up(self) -> None:
        """Do what is slow only once, and learn how many tokens a word has."""
        words = 64
        prompt = self.prompt(round(words * self._tokens_per_word))
        if tokens := self.ask(prompt, 2).prompt_tokens:
            self._tokens_per_word = tokens / words

    def slots(self) -> int | None:
        """How many requests it answers at once, if it says so, as llama.cpp does."""
        try:
            status, found = self._server.get(f"/props?model={quote(self.model)}")
        except NotRunning:
            return None
        slots = found.get("total_slots") if status == 200 and isinstance(found, dict) else None
        return slots if isinstance(slots, int) and slots > 0 else None

    def ask(self, prompt: str, output: int) -> Streamed:
        """One completion, streamed."""
        connection = self._server.open(TIMEOUT)
        try:
            found = Streamed(time.monotonic())
            self._server.post(connection, completion(self.model, prompt, output))
            with connection.getresponse() as response:
                if response.status != 200:
                    text = response.read(2000).decode("utf-8", "replace")
                    kind = PromptRefused if response.status in (400, 413, 422) else BackendError
                    raise kind(f"{self.model} answered {response.status}: {text}")
                self._check_backend(response.headers.get("X-Anvil-Backend", ""))
                for event in _events(response):
                    if event.get("choices"):
                        found.moments.append(time.monotonic())
                    if usage := event.get("usage"):
                        found.prompt_tokens = int(usage["prompt_tokens"])
                        found.tokens = int(usage.get("completion_tokens") or 0)
        except (OSError, http.client.HTTPException) as error:
            raise BackendError(f"{self.model} cannot be measured: {error}") from None
        finally:
            connection.close()
        if not found.moments:
            raise BackendError(f"{self.model} streamed no token")
        return found

    def _check_backend(self, told: str) -> None:
        """Check that one backend answers; ``told``: which one, and why, where several could have."""
        backend, _, why = told.partition(";")
        _, in_stages, prefill = why.rpartition("; prefill by ")
        if in_stages:
            raise BackendError(
                f"{prefill} and {backend} share the answers of {self.model}: "
                "stop one of them, or give the address of one engine with --url"
            )
        before = self._backend = self._backend or backend
        if backend and backend != before:
            raise BackendError(
                f"{before} and {backend} both answer for {self.model}: "
                "stop all but one, or give the address of one engine with --url"
            )

    def at_once(self, prompts: Sequence[str], output: int) -> list[Streamed]:
        """Several completions at the same time."""
        with ThreadPoolExecutor(len(prompts), "profile") as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, output), prompts))


def measure(
    profiler: Profiler,
    say: Callable[[str], None],
    *,
    prompts: Sequence[int] = PROMPTS,
    batches: Sequence[int] = BATCHES,
    lengths: Sequence[int] = LENGTHS,
    repeat: int = 3,
) -> dict[str, Any]:
    """A profile, as it is written to a file."""
    profiler.warm_up()
    ttft: list[dict[str, Any]] = []
    for tokens in _taken(profiler, say, prompts, 1):
        answers = [profiler.ask(profiler.prompt(tokens), 1) for _ in range(repeat)]
        count = round(median([answer.prompt_tokens or tokens for answer in answers]))
        ttft.append({"tokens_num": count, **_figures([answer.first * 1e3 for answer in answers])})
        say(f"first token of {count} tokens: {ttft[-1]['p50']:.1f} ms")
    tpot = _each_batch(profiler, say, batches, lengths, repeat)
    chunk = min(CHUNK, max(row["tokens_num"] for row in ttft))
    return {
        "metadata": {"model": profiler.model, "max_num_batched_tokens": chunk},
        "ttft": {"results": ttft},
        "tpot": {"results": tpot},
    }


def _taken(profiler: Profiler, say: Callable[[str], None], lengths: Sequence[int], output: int) -> list[int]:
    """The ``lengths`` of prompts that the engine takes, and the longest that it takes for the others."""
    taken = sorted(lengths)
    refused, why = 0, ""
    while True:
        try:
            profiler.ask(profiler.prompt(taken[-1]), output)
            break
        except PromptRefused as refusal:
            if len(taken) == 1:
                raise
            refused, why = taken.pop(), refusal.message
    if refused:
        longest = _longest(profiler, taken[-1], refused, output)
        taken += [longest] if longest > taken[-1] else []
        say(f"prompts of {refused} tokens and more are left out, {taken[-1]} is the most: {why}")
    return taken


def _longest(profiler: Profiler, taken: int, refused: int, output: int) -> int:
    """Nearly the most tokens that a prompt may have: another of the same length may have a few more."""
    least = taken
    while refused - taken > taken // 32:
        middle = (taken + refused) // 2
        try:
            profiler.ask(profiler.prompt(middle), output)
            taken = middle
        except PromptRefused:
            refused = middle
    return max(least, taken - taken // 64)


def _each_batch(
    profiler: Profiler,
    say: Callable[[str], None],
    batches: Sequence[int],
    lengths: Sequence[int],
    repeat: int,
) -> list[dict[str, Any]]:
    tpot: list[dict[str, Any]] = []
    slots = profiler.slots()
    lengths = _taken(profiler, say, lengths, OUTPUT)
    for batch in batches:
        if slots and batch > slots:
            say(f"{batch} at once and more are left out: the engine has {slots} slots")
            break
        for length in lengths:
            try:
                row = _batch(profiler, batch, length, repeat)
            except PromptRefused as refusal:
                say(f"{batch} at once with {length} tokens each are left out: {refusal.message}")
                break
            tpot.append(row)
            say(f"{batch} at once with {row['tokens_per_request']} tokens each: {row['p50']:.2f} ms a token")
    if not tpot:
        raise BackendError(
            f"{profiler.model} could not take that many concurrent requests, or requests of that length"
        )
    return tpot


def _batch(profiler: Profiler, batch: int, length: int, repeat: int) -> dict[str, Any]:
    gaps, tokens = [], length
    for _ in range(repeat):
        answers = profiler.at_once([profiler.prompt(length) for _ in range(batch)], OUTPUT)
        tokens = round(median([answer.prompt_tokens or length for answer in answers]))
        begun, ended = max(a.moments[0] for a in answers), min(a.moments[-1] for a in answers)
        between = [answer.between_tokens(begun, ended) for answer in answers]
        gaps += [seconds * 1e3 for seconds in between if seconds is not None]
    if not gaps:
        raise BackendError(
            "the engine streams its answers in one piece: no time between tokens can be measured"
        )
    return {"batch_size": batch, "tokens_per_request": tokens + OUTPUT // 2, **_figures(gaps)}


def _figures(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "mean": sum(ordered) / len(ordered),
    }


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: {"):
            event = foreign.read(line[6:])
            if isinstance(event, dict):
                yield event
