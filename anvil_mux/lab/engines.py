"""Models of engines: how long loads and evictions take, and answers, alone and beside others.

``Engines`` perform the steps of a simulation in fixed times, ``SeenEngines`` in those that were seen. How an
engine makes several answers at a time is its ``Batching``: up to ``at_once`` of them, and the requests above
that wait in it, in the order in which they came, as in the slots of llama-server. Each answer takes as long
as alone, and longer by ``slower_each`` for each other one that is made meanwhile. Simulations make answers
by that (simulate.py), and the answers of a log are told by it how long they would have taken alone
(recording.py).

A ``SimulatedEngine`` is a replica in the simulation of routing (fleet.py), token by token. A profile
(config/values.py) holds times of a real engine; ``fitted`` finds the simulated engine that has nearly the
same: its parameters are those with the least sum of squared relative errors, none below 0. What a profile
does not hold (the size of the cache, how many requests run at once) stays as it was. ``measured`` goes the
other way, for policies that predict: what ``anvil-mux profile`` would find on a simulated engine, asked for
prompts and batches as large as traces have them. An ``EnginePace`` is what the warm-up of a replay finds of
a real one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from heapq import heapify, heappop, heappush
from itertools import chain, combinations
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from anvil_mux.config.config import Config
from anvil_mux.config.values import CHUNK, Profile
from anvil_mux.errors import MuxError
from anvil_mux.host.engines import at_once
from anvil_mux.lab.figures import mean
from anvil_mux.scheduler.costs import Cost
from anvil_mux.scheduler.slot import Cancel, Load, Step

# Steps


class Outcome(NamedTuple):
    """How long a step takes, and the error that it ends with: any but LoadError leaves the backend stuck."""

    seconds: float
    error: MuxError | None = None
    how: str | None = None
    """The way that was really taken; None: the one asked for."""
    residual: Mapping[str, int] = MappingProxyType({})
    """GPU id -> bytes that it still holds, if it went into standby."""
    host_bytes: int = 0
    """Host memory that it keeps, if it went into standby."""


Perform = Callable[[Step, int], Outcome]
"""The outcome of the n-th step (from 0) on its backend.

That of a ``Cancel`` is how long its load still takes then. One that ends before that ends as it would have.
"""


@dataclass(frozen=True)
class Engines:
    """Steps that always succeed, in fixed times."""

    load_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a load, by backend."""
    other_load_seconds: float = 10.0
    stop_seconds: float = 1.0

    def __call__(self, step: Step, nth: int) -> Outcome:
        if isinstance(step, Load):
            return Outcome(self._load_seconds(step.backend))
        return Outcome(self.stop_seconds)

    def _load_seconds(self, backend: str) -> float:
        return self.load_seconds.get(backend, self.other_load_seconds)

    def costs(self, config: Config) -> list[Cost]:
        """List what a program that has run for long knows: each model after nothing, and after each other."""
        known = []
        for target in config.backends:
            sources = {"": 0.0} | {other.model: self.stop_seconds for other in config.backends}
            del sources[target.model]
            load_seconds = self._load_seconds(target.name)
            for way in dict.fromkeys((target.evict_to[0], "stop")):
                like = Cost(
                    "", target.model, way, 0.0, load_seconds, swaps=1, host=target.host, engine=target.engine
                )
                known += [
                    replace(like, source=source, evict_seconds=evict) for source, evict in sources.items()
                ]
        return known


@dataclass(frozen=True)
class SwapTimes:
    """The seconds of loads and of evictions, by backend, in the order in which they ended."""

    loads: Mapping[str, Sequence[float]]
    evictions: Mapping[str, Sequence[float]]

    def or_else(self, other: SwapTimes) -> SwapTimes:
        """The same, with what only the other knows."""
        return SwapTimes({**other.loads, **self.loads}, {**other.evictions, **self.evictions})


def mean_of_all(times: Mapping[str, Sequence[float]]) -> float:
    """The mean of the loads, or of the evictions, of all backends; 0 without any."""
    return mean(chain.from_iterable(times.values()))


class SeenEngines:
    """Steps that take what they were seen to take, each backend its own.

    ``in_order``: its first load takes what its first one took, and so on; else each takes their mean.
    """

    def __init__(self, times: SwapTimes, *, in_order: bool) -> None:
        self.times = times
        self.in_order = in_order
        self._count: Counter[tuple[str, bool]] = Counter()
        self.means = Engines(
            load_seconds={name: fmean(seconds) for name, seconds in times.loads.items()},
            other_load_seconds=mean_of_all(times.loads),
            stop_seconds=mean_of_all(times.evictions),
        )

    def __call__(self, step: Step, nth: int) -> Outcome:
        if isinstance(step, Cancel):
            return self.means(step, nth)
        loads = isinstance(step, Load)
        known = (self.times.loads if loads else self.times.evictions).get(step.backend)
        if not known:
            return self.means(step, nth)
        number = self._count[step.backend, loads]
        self._count[step.backend, loads] += 1
        return Outcome(known[number] if self.in_order and number < len(known) else fmean(known))


# Several answers at a time


class Batching(NamedTuple):
    """How many answers an engine makes at a time, and how much they cost each other."""

    slower_each: float = 0.0
    """The part by which an answer takes longer for each other one that is made at the same time."""
    at_once: float = math.inf
    """How many are made at the same time, at most."""


ALONE = Batching()
"""An engine whose answers all take as long as alone."""


class NextEnd(NamedTuple):
    """The answer that ends next, if nothing comes before."""

    at: float
    order: int
    request: Hashable


_BatchedAnswer = tuple[float, int, Hashable]
"""Seconds or, once it is made, the progress at which it ends; its order among those of one moment; whose."""


class Batch:
    """The answers that one engine makes, and the requests that wait in it.

    Answers that are made together advance alike: ``pace`` seconds' worth in each second. So one ends where
    the progress, which is the moment times ``pace`` and ``offset``, is greater by the seconds that it takes
    alone.
    """

    __slots__ = ("_at_once", "_made", "_offset", "_pace", "_slower_each", "_waiting", "next")

    def __init__(self, batching: Batching) -> None:
        self._slower_each, self._at_once = batching
        self._made: list[_BatchedAnswer] = []  # a heap
        self._waiting: deque[_BatchedAnswer] = deque()
        self._pace, self._offset = 1.0, 0.0
        self.next: NextEnd | None = None

    def add(self, request: Hashable, seconds: float, order: int, now: float) -> None:
        """A request comes, whose answer takes so long alone."""
        self._waiting.append((seconds, order, request))
        self._go_on(now)

    def remove(self, request: Hashable, now: float) -> float:
        """An answer ends, whole or not: how many of its seconds alone were still to come."""
        made = self._made
        mine = next((each for each in made if each[2] == request), None)
        if mine is None:
            mine = next(each for each in self._waiting if each[2] == request)
            self._waiting.remove(mine)
            left = mine[0]
        else:
            left = mine[0] - (now * self._pace + self._offset)
            if mine is made[0]:
                heappop(made)
            else:
                made.remove(mine)
                heapify(made)
        self._go_on(now)
        return left

    def _go_on(self, now: float) -> None:
        """Begin what there is room for, and find what ends next."""
        made, waiting = self._made, self._waiting
        if not made:
            self._pace, self._offset = 1.0, 0.0
        progress = now * self._pace + self._offset
        while waiting and len(made) < self._at_once:
            seconds, order, request = waiting.popleft()
            heappush(made, (progress + seconds, order, request))
        if not made:
            self.next = None
            return
        pace = 1.0 / (1.0 + self._slower_each * (len(made) - 1))
        if pace != self._pace:
            self._pace, self._offset = pace, progress - now * pace
        ends, order, request = made[0]
        self.next = NextEnd(max((ends - self._offset) / self._pace, now), order, request)


# Token by token

USUAL_CONTEXT = 2048
"""Tokens of a request and its answer, where nothing says how many they are."""


@dataclass(frozen=True)
class SimulatedEngine:
    """The speed and the cache of a replica; the defaults are Qwen3-Coder-30B-A3B in bf16 on an H20 with 96
    GB.
    """

    ingress_seconds: float = 0.030
    """Seconds from the router to the engine's queue, for each request; and for each token of its input."""
    ingress_token_seconds: float = 1.1e-6
    step_seconds: float = 6e-3
    """Seconds of any step."""
    token_seconds: float = 47e-6
    """Seconds for each token of a prompt that a step computes."""
    attention_seconds: float = 2.86e-9
    """Seconds for a prompt that grows from p to q computed tokens, times q**2 - p**2."""
    decode_seconds: float = 0.3e-3
    """Seconds for each request that decodes."""
    context_token_seconds: float = 2.46e-8
    """Seconds for each token in the context of requests that decode."""
    step_tokens: int = 8192
    """The most tokens that a step computes."""
    max_running: int = 256
    kv_tokens: int = 281_600
    streamed: float = 0.8
    """The share of answers that are streamed."""
    reports_cached: float = 0.5
    """The share of replicas whose answers say how much of the input was cached."""

    def prefill_seconds(self, computed: int, tokens: int) -> float:
        """Seconds for the next ``tokens`` of a prompt of which ``computed`` are there, without the step
        itself.
        """
        after = computed + tokens
        return tokens * self.token_seconds + (after * after - computed * computed) * self.attention_seconds

    def decode_step_seconds(self, requests: int, context_tokens: int) -> float:
        """Seconds of a step without its prompts."""
        shares = requests * self.decode_seconds + context_tokens * self.context_token_seconds
        return self.step_seconds + shares

    @property
    def slower_each(self) -> float:
        """The part by which an answer takes longer for each other one beside it, with ``USUAL_CONTEXT``."""
        return self.decode_step_seconds(2, 2 * USUAL_CONTEXT) / self.decode_step_seconds(1, USUAL_CONTEXT) - 1


class AssumedBatching(NamedTuple):
    """How all engines make several answers at a time, as far as nothing is known of each."""

    slower_each: float = SimulatedEngine().slower_each
    """The part by which an answer takes longer for each other one that is made at the same time."""
    at_once: float | None = None
    """How many answers are made at the same time, at most; None: as many as its kind of engine does."""

    def of_backends(self, config: Config) -> dict[str, Batching]:
        """How the engine of each backend makes several answers at a time."""
        return {b.name: Batching(self.slower_each, self.at_once or at_once(b)) for b in config.backends}


USUAL_BATCHING = AssumedBatching()


# Settings


def read_settings(
    settings: Iterable[str],
    kinds: Mapping[str, Callable[[str], float]],
    unknown: str,
    kind: str,
    limit: Callable[[str, float], str],
) -> dict[str, float]:
    """The numbers of settings like ``at_once=4``; or ValueError.

    ``unknown``: what one of an unknown name is called; ``kind``: what a value must be; ``limit``: what one of
    this name must be more than that, if this number is not.
    """
    found: dict[str, float] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in kinds:
            raise ValueError(f"unknown {unknown.format(name)}; known: {', '.join(kinds)}")
        try:
            found[name] = kinds[name](value)
        except ValueError:
            raise ValueError(f"{name} must be {kind}, not {value!r}") from None
        if wanted := limit(name, found[name]):
            raise ValueError(f"{name} must be {wanted}, not {value}")
    return found


def read_batching(text: str) -> dict[str, float]:
    """The fields of ``AssumedBatching`` in ``slower_each=0.1,at_once=4``, or a part of it; or ValueError."""
    least = {"slower_each": 0.0, "at_once": 1.0}

    def limit(name: str, value: float) -> str:
        return "" if value >= least[name] else f"at least {least[name]:g}"

    return read_settings(text.split(","), dict.fromkeys(least, float), "part {!r}", "a number", limit)


def read_engine(text: str) -> SimulatedEngine:
    """The default engine, but for ``kv_tokens=100000,step_tokens=2048`` or the like; or ValueError."""
    usual = SimulatedEngine()

    def limit(_: str, value: float) -> str:
        return "" if 0 <= value < math.inf else "0 or more"

    kinds = {each.name: type(getattr(usual, each.name)) for each in fields(usual)}
    given = filter(None, text.split(","))
    found: dict[str, Any] = read_settings(given, kinds, "setting {!r} of an engine", "a number", limit)
    return replace(usual, **found)


# Measured

TOKENS_PER_SECOND = 40.0
"""The pace that is taken for a model that was not asked."""


class EnginePace(NamedTuple):
    """How fast the engine of a model is when it has nothing else to do."""

    first_seconds: float = 0.0
    """Seconds to the first token."""
    tokens_per_second: float = TOKENS_PER_SECOND
    """Tokens per second after that."""
    tokens_per_word: float = 1.0
    slower_each: float = 0.0
    at_once: float = math.inf
    """``slower_each`` and ``at_once`` are its ``batching``."""

    @property
    def batching(self) -> Batching:
        return Batching(self.slower_each, self.at_once)

    def seconds(self, tokens: int) -> float:
        """Seconds that an answer of so many tokens takes."""
        return self.first_seconds + max(tokens - 1, 0) / self.tokens_per_second


PROMPTS = (128, 512, 2048, 8192, 32_768, 65_536, 131_072)
BATCHES = (1, 2, 4, 8, 16, 64, 256)
LENGTHS = (128, 2048, 8192, 32_768, 131_072, 262_144)

Measurement = tuple[tuple[float, ...], float]
"""One measurement: how often each parameter counts, and the seconds."""


def measured(engine: SimulatedEngine) -> Profile:
    """The profile of a simulated engine."""
    chunk = min(CHUNK, engine.step_tokens)
    prompts = sorted({*PROMPTS, chunk})
    ttft = [(float(tokens), _first_token(engine, tokens) * 1e3) for tokens in (0, *prompts)]
    tpot = [
        (
            batch,
            tuple((float(each), engine.decode_step_seconds(batch, batch * each) * 1e3) for each in LENGTHS),
        )
        for batch in BATCHES
    ]
    return Profile(tuple(ttft), tuple(tpot), chunk)


def _first_token(engine: SimulatedEngine, tokens: int) -> float:
    if not tokens:
        return 0.0
    ingress = engine.ingress_seconds + tokens * engine.ingress_token_seconds
    steps = -(-tokens // engine.step_tokens)
    return ingress + steps * engine.step_seconds + engine.prefill_seconds(0, tokens)


def fitted(profile: Profile, engine: SimulatedEngine | None = None) -> SimulatedEngine:
    """The simulated engine that is as fast as a profile says, and else as ``engine``."""
    further = [
        ((1.0, float(batch), batch * each), ms / 1e3) for batch, line in profile.tpot for each, ms in line
    ]
    step, decode, context = _least_squares(further)
    # Longer prompts than a chunk are computed in several steps, with other prompts and answers beside them.
    first = [
        ((1.0, tokens, tokens * tokens), ms / 1e3)
        for tokens, ms in profile.ttft
        if 0 < tokens <= profile.chunk
    ]
    start, token, attention = _least_squares(first)
    return replace(
        engine or SimulatedEngine(),
        ingress_seconds=max(start - step, 0.0),
        ingress_token_seconds=0.0,
        step_seconds=step,
        token_seconds=token,
        attention_seconds=attention,
        decode_seconds=decode,
        context_token_seconds=context,
        step_tokens=profile.chunk,
    )


def _least_squares(rows: Sequence[Measurement]) -> list[float]:
    """The parameters, none below 0, that come nearest to what was measured, relative to that."""
    scaled = [([value / seconds for value in counts], 1.0) for counts, seconds in rows if seconds > 0]
    best, least = [0.0, 0.0, 0.0], float(len(scaled))
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            found = _solve([([counts[i] for i in chosen], one) for counts, one in scaled], size)
            if found is None or min(found) < 0:
                continue
            values = [0.0, 0.0, 0.0]
            for i, value in zip(chosen, found, strict=True):
                values[i] = value
            error = sum([(sum(map(float.__mul__, values, counts)) - one) ** 2 for counts, one in scaled])
            if error < least * (1 - 1e-9):
                best, least = values, error
    return best


def _solve(rows: Sequence[tuple[list[float], float]], size: int) -> list[float] | None:
    """The solution of the normal equations of ``rows``, by elimination; None if they have no single one."""
    scale = [max([abs(counts[i]) for counts, _ in rows], default=0.0) or 1.0 for i in range(size)]
    table = [
        [
            *[sum([counts[i] * counts[j] / scale[i] / scale[j] for counts, _ in rows]) for j in range(size)],
            sum([counts[i] / scale[i] * one for counts, one in rows]),
        ]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(table[row][i]))
        table[i], table[pivot] = table[pivot], table[i]
        if abs(table[i][i]) < 1e-12:
            return None
        table[i] = [value / table[i][i] for value in table[i]]
        for row in range(size):
            if row != i:
                factor = table[row][i]
                table[row] = [a - factor * b for a, b in zip(table[row], table[i], strict=True)]
    return [table[i][size] / scale[i] for i in range(size)]
