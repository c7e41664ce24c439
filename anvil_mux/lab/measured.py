"""The numbers of a run as its clients saw it: a fold over its answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anvil_mux.lab.figures import quantile
from anvil_mux.lab.sending import PlayedAnswer


@dataclass(frozen=True)
class Spread:
    """How long something took, over many answers, in seconds; nan: no answer tells."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread:
        values = sorted(seconds)
        if not values:
            return cls(math.nan, math.nan, math.nan, math.nan)
        mean = math.fsum(values) / len(values)
        return cls(mean, quantile(values, 0.5), quantile(values, 0.95), quantile(values, 0.99))


@dataclass(frozen=True)
class Perceived:
    """The numbers of one run as its clients saw it. Times count from when a request was due."""

    requests: int
    failed: int
    makespan_seconds: float
    """Seconds from the first request to the last answer."""
    ttft: Spread
    """Seconds to the first token."""
    tpot: Spread
    """Seconds for each further token of an answer."""
    e2e: Spread
    """Seconds to the end of the answer."""
    tokens_per_second: float
    """Tokens of all whole answers over the makespan."""
    late_seconds: float
    """The most by which a request was sent later than it was due: this machine is too slow, if it is much."""
    cache_hit_ratio: float | None
    """The part of the input that engines had in their caches; None: they do not say."""
    request_balance: float | None
    """The most requests of a replica over the least; None: it is not told which one answered."""


def perceived(answers: Sequence[PlayedAnswer]) -> Perceived:
    whole = [answer for answer in answers if answer.status == 200]
    begins = min([answer.due for answer in answers], default=0.0)
    makespan = max([answer.ended for answer in answers], default=0.0) - begins
    begun = [answer for answer in whole if not math.isnan(answer.first)]
    told = [answer for answer in whole if answer.prompt_tokens and answer.cached_tokens is not None]
    shares = Counter([answer.backend for answer in whole if answer.backend])
    return Perceived(
        requests=len(answers),
        failed=len(answers) - len(whole),
        makespan_seconds=makespan,
        ttft=Spread.of([answer.first - answer.due for answer in begun]),
        tpot=Spread.of([(a.ended - a.first) / (a.tokens - 1) for a in begun if a.tokens > 1]),
        e2e=Spread.of([answer.ended - answer.due for answer in whole]),
        tokens_per_second=sum([answer.tokens for answer in whole]) / makespan if makespan else 0.0,
        late_seconds=max([answer.sent - answer.due for answer in answers], default=0.0),
        cache_hit_ratio=_ratio(told),
        request_balance=max(shares.values()) / min(shares.values()) if len(shares) > 1 else None,
    )


def _ratio(told: Sequence[PlayedAnswer]) -> float | None:
    tokens = sum([answer.prompt_tokens or 0 for answer in told])
    return sum([answer.cached_tokens or 0 for answer in told]) / tokens if tokens else None


def errors(answers: Iterable[PlayedAnswer]) -> dict[str, int]:
    """How many answers came to each error, by status and code."""
    codes = [f"{a.status or ''} {a.code}".strip() for a in answers if a.status != 200]
    return dict(Counter(codes).most_common())
