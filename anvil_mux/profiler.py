"""Measures a real engine and writes its profile: ``anvil-mux profile MODEL``.

Prompts are random words, so that nothing of them is cached. The time to a first token is measured with one
request at a time; the time for each further one with several requests that stream at once, between the moment
at which the last of them has begun and the end of the first. What a prompt really has in tokens, the engine's
``usage`` says.

The engine is asked through an anvil-mux or directly: both speak the same API. Several replicas behind one
name would share the requests, so all but one of them have to be out.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from anvil_mux.errors import BackendError

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

    @property
    def first(self) -> float:
        return self.moments[0] - self.begun


class Profiler:
    """One engine being measured."""

    def __init__(self, url: str, model: str, key: str = "", seed: int = 0) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "127.0.0.1", parts.port or 80
        self._model = model
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._random = random.Random(seed)

    def prompt(self, tokens: int) -> str:
        """About so many tokens that nobody has seen."""
        return " ".join(str(self._random.randrange(100, 1000)) for _ in range(max(tokens // 2, 1)))

    def ask(self, prompt: str, output: int) -> Streamed:
        """One completion, streamed."""
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT)
        asked = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            found = Streamed(time.monotonic())
            connection.request("POST", "/v1/completions", json.dumps(asked), self._headers)
            with connection.getresponse() as response:
                if response.status != 200:
                    text = response.read(2000).decode("utf-8", "replace")
                    raise BackendError(f"{self._model} answered {response.status}: {text}")
                for event in _events(response):
                    if event.get("choices"):
                        found.moments.append(time.monotonic())
                    if usage := event.get("usage"):
                        found.prompt_tokens = int(usage["prompt_tokens"])
        except (OSError, http.client.HTTPException) as error:
            raise BackendError(f"{self._model} cannot be measured: {error}") from None
        finally:
            connection.close()
        if not found.moments:
            raise BackendError(f"{self._model} streamed no token")
        return found

    def at_once(self, prompts: Sequence[str], output: int) -> list[Streamed]:
        """Several completions at the same time."""
        found: list[Streamed] = []
        failed: list[BackendError] = []

        def ask(prompt: str) -> None:
            try:
                found.append(self.ask(prompt, output))
            except BackendError as error:
                failed.append(error)

        threads = [threading.Thread(target=ask, args=(prompt,), name="profile") for prompt in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return found


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
    profiler.ask(profiler.prompt(64), 2)  # what is slow only once
    ttft = []
    for tokens in prompts:
        answers = [profiler.ask(profiler.prompt(tokens), 1) for _ in range(repeat)]
        count = round(median([answer.prompt_tokens or tokens for answer in answers]))
        ttft.append({"tokens_num": count, **_figures([answer.first * 1e3 for answer in answers])})
        say(f"first token of {count} tokens: {ttft[-1]['p50']:.1f} ms")
    tpot = []
    for batch in batches:
        for length in lengths:
            row = _batch(profiler, batch, length, repeat)
            tpot.append(row)
            say(f"{batch} at once with {row['tokens_per_request']} tokens each: {row['p50']:.2f} ms a token")
    return {"ttft": {"results": ttft}, "tpot": {"results": tpot}}


def _batch(profiler: Profiler, batch: int, length: int, repeat: int) -> dict[str, Any]:
    gaps, tokens = [], length
    for _ in range(repeat):
        answers = profiler.at_once([profiler.prompt(length) for _ in range(batch)], OUTPUT)
        tokens = round(median([answer.prompt_tokens or length for answer in answers]))
        begun, ended = max(a.moments[0] for a in answers), min(a.moments[-1] for a in answers)
        for answer in answers:
            together = [moment for moment in answer.moments if begun <= moment <= ended]
            moments = together if len(together) > 1 else answer.moments
            if len(moments) > 1:
                gaps.append((moments[-1] - moments[0]) / (len(moments) - 1) * 1e3)
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
            event = json.loads(line[6:])
            if isinstance(event, dict):
                yield event
