"""Routing policies under recorded prompts, side by side: what `anvil-mux simulate --routing` runs.

A ``Scenario`` is a set of requests and the replicas that they meet; it is fixed before any policy runs, so
the policies compare request by request. The router is the program's own: its in-flight tracker, prefixes and
pipelines, in virtual time; only the engines are a model (fleet.py), and so are all latencies that come out.

It knows what serving knows: of a request the bytes, which are read as the relay reads them and taken for as
many tokens as answers teach; of caches what it learns; of an answer that is not streamed only its end; and of
requests that wait behind others, which of them to take back when a replica has nothing left.

``Objectives`` are service-level objectives: the time to a first token, and for each further one, that
requests should keep. Which requests kept them is read off what became of each, so any policy can be judged by
them, also one that knows nothing of them. A request that was refused kept none.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from statistics import fmean
from typing import Any, NamedTuple
from zlib import crc32

from anvil_mux.config.config import Backend
from anvil_mux.config.values import DEFAULT_ROUTING, Profile
from anvil_mux.lab.engines import SimulatedEngine, measured, read_settings
from anvil_mux.lab.figures import mean, quantile
from anvil_mux.lab.fleet import PromptOutcome, simulate
from anvil_mux.lab.study import listed
from anvil_mux.lab.workload import Prompt, find_trace, read_trace
from anvil_mux.routing import pipeline, prefix
from anvil_mux.routing.in_flight import InFlightTracker
from anvil_mux.routing.routing import Work

KNOWN_BLOCK_TOKENS = 512
"""The block size of a router that knows true tokens; engines have blocks as small as those of the trace."""
TOKEN_BYTES = 2.8, 4.4
"""The length of a token: that of each block of a trace is drawn between these."""
WHOLE = "neutral"
"""The infer type of all simulated replicas."""
CLASSES = {"warm": 5_000, "med": 20_000, "heavy": 50_000, "heavy_plus": math.inf}
"""Input-length class -> below so many tokens."""


class Objectives(NamedTuple):
    """The most that requests should take; the defaults are those of the policy ``slo``."""

    ttft: float = 6.0
    """Seconds to the first token."""
    tpot: float = 0.05
    """Seconds for each further token, in the mean of an answer."""


class Attainment(NamedTuple):
    """The parts of all requests that kept the objectives."""

    slo_ttft: float
    slo_tpot: float
    """Answers of one token keep it."""
    slo: float
    """Both."""
    refused: int
    """Requests that no replica was allowed to take."""


@dataclass(frozen=True)
class Scenario:
    """The requests of one run, and the replicas that they meet."""

    trace: str
    seed: int
    sessions: int
    """How many there are; 0: the trace has none."""
    prompts: Sequence[Prompt]
    block_tokens: int
    replicas: int
    engine: SimulatedEngine
    profile: Profile | None = None
    """The profile of its engines that every policy may use; None: those that need one get what fits."""
    known: bool = False
    """Whether the router knows true tokens and the sizes of caches, and every answer is streamed."""

    @cached_property
    def works(self) -> Mapping[Prompt, Work]:
        """The requests as the router reads them, before it knows how long a token is."""
        if self.known:
            return {prompt: self._known(prompt) for prompt in self.prompts}
        draw = random.Random(f"{self.trace} {self.seed} streams")
        works = {}
        for prompt in self.prompts:
            message = {"role": "user", "content": _text(prompt, self.block_tokens)}
            body = json.dumps({"model": self.trace, "messages": [message]}).encode()
            work = prefix.read(self.trace, body, prefix.BYTES_PER_TOKEN, prompt.session)
            works[prompt] = work._replace(stream=draw.random() < self.engine.streamed)
        return works

    def _known(self, prompt: Prompt) -> Work:
        every = max(KNOWN_BLOCK_TOKENS // self.block_tokens, 1)
        blocks = prompt.blocks[every - 1 :: every]
        return Work(prompt.tokens, blocks, self.block_tokens * every, prompt.session, stream=True)


def _text(prompt: Prompt, block_tokens: int) -> str:
    """A text of a prompt's length that begins like those of all prompts with the same first blocks."""
    rest = prompt.tokens - len(prompt.blocks) * block_tokens
    passages = [_passage(str(block), block_tokens) for block in prompt.blocks]
    return "".join([*passages, _passage(f"{prompt.session} {prompt.at}", rest)])


@lru_cache(1 << 16)
def _passage(name: str, tokens: int) -> str:
    """A text of so many tokens that no other name has."""
    least, most = TOKEN_BYTES
    size = round(tokens * (least + (most - least) * crc32(name.encode()) / 2**32))
    return (f"{name} " * (size // len(name) + 1))[:size]


@dataclass(frozen=True)
class Latencies:
    """Latencies of one run in ms: to the first byte (ttft), to the last (e2e), from token to token (tpot).

    What was refused has none.
    """

    requests: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    e2e_mean_ms: float
    e2e_p90_ms: float
    e2e_p99_ms: float
    tpot_p90_ms: float
    cache_hit_ratio: float
    """The part of all input tokens that engines found in their caches."""
    request_balance: float
    """The most requests of a replica over the least (at least 1)."""


@dataclass(frozen=True)
class Result:
    """One scenario under one policy."""

    scenario: Scenario
    policy: str
    answers: Sequence[PromptOutcome]
    latencies: Latencies
    attainment: Attainment | None = None
    """How many kept the objectives; None: there are none."""

    def row(self) -> dict[str, Any]:
        named = {"policy": self.policy, "default": self.policy == DEFAULT_ROUTING}
        shown = ("trace", "seed", "sessions", "replicas", "known")
        run = {name: getattr(self.scenario, name) for name in shown}
        kept = self.attainment._asdict() if self.attainment else {}
        return {**named, **run, **asdict(self.latencies), **kept, "classes": classes(self.answers)}


class InFlightRouter:
    """The router of the program, by the interface of fleet.py."""

    def __init__(self, policy: str, scenario: Scenario, own: Mapping[str, object] | None = None) -> None:
        names = [f"replica-{number}" for number in range(scenario.replicas)]
        made = pipeline.build(policy, own)
        needs = made.needs(WHOLE)
        profile = scenario.profile or (measured(scenario.engine) if "profile" in needs else None)
        kv_tokens = scenario.engine.kv_tokens if scenario.known or "kv_tokens" in needs else None
        backends = [Backend(name, name, kv_tokens=kv_tokens, profile=profile) for name in names]
        self._in_flight = InFlightTracker(made, backends)
        self._names = names
        self._numbers = {name: number for number, name in enumerate(names)}
        self._scenario = scenario
        self._moved: set[int] = set()
        self._streams: set[int] = set()

    def choose(self, key: int, prompt: Prompt, now: float) -> int | None:
        work = self._scenario.works[prompt]
        if work.stream:
            self._streams.add(key)
        if not self._scenario.known:
            work = prefix.sized(work, self._in_flight.bytes_per_token)
        if key in self._moved:  # once is enough
            work = work._replace(stream=False)
        choice = self._in_flight.choose(key, work, self._names, now=now)
        return self._numbers[choice.backend] if choice else None

    def first_byte(self, key: int, now: float) -> None:
        if key in self._streams:
            self._in_flight.first_byte(key, now)

    def ended(self, key: int, now: float, outcome: PromptOutcome) -> None:
        share = self._scenario.engine.reports_cached
        reports = int((outcome.replica + 1) * share) > int(outcome.replica * share)
        cached = outcome.cached_tokens if reports and not self._scenario.known else None
        tokens = None if self._scenario.known else outcome.prompt.tokens
        self._in_flight.ended(key, cached_tokens=cached, prompt_tokens=tokens, now=now)

    def take_back(self, idle: int, now: float) -> Sequence[int]:
        found = self._in_flight.better_off(self._names[idle], self._names, now)
        keys = [key for key in found if isinstance(key, int)]
        for key in keys:
            self._in_flight.ended(key, now=now)
        self._moved.update(keys)
        return keys


# What to run


def choose_policies(names: str, own: Mapping[str, object] | None = None) -> tuple[str, ...]:
    """The policies of a list with commas; ``all``: those that refuse nobody for a prediction."""
    chosen = listed(names, {**pipeline.shipped(), **(own or {})})
    predict_nothing = tuple([name for name in chosen if not predicts(name, own)])  # or is unknown
    return predict_nothing if names == "all" else chosen


def predicts(policy: str, own: Mapping[str, object] | None = None) -> bool:
    """Whether a policy needs a profile of the engines."""
    return "profile" in pipeline.build(policy, own).needs(WHOLE)


def read_objectives(text: str) -> Objectives:
    """The objectives in ``ttft=6,tpot=0.05``, in seconds; by default those of Objectives; or ValueError."""

    def limit(_: str, value: float) -> str:
        return "" if value > 0 else "more than 0 seconds"

    kinds = dict.fromkeys(Objectives._fields, float)
    return Objectives(**read_settings(text.split(","), kinds, "objective {!r}", "seconds", limit))


def draw(
    traces: Iterable[str],
    sessions: Sequence[int],
    seeds: Iterable[int],
    replicas: int,
    engine: SimulatedEngine,
    profile: Profile | None = None,
    *,
    known: bool = False,
) -> Iterator[Scenario]:
    """A scenario for each trace, number of sessions and seed; without sessions nothing is drawn: one."""
    for name in traces:
        trace = read_trace(find_trace(name))
        for count in (sessions or (len(trace.sessions),)) if trace.sessions else (0,):
            for seed in seeds if trace.sessions else (0,):
                yield Scenario(
                    trace=trace.name,
                    seed=seed,
                    sessions=count,
                    prompts=trace.draw(seed, count),
                    block_tokens=trace.block_tokens,
                    replicas=replicas,
                    engine=engine,
                    profile=profile,
                    known=known,
                )


# Running it


def run(
    scenario: Scenario,
    policy: str,
    own: Mapping[str, object] | None = None,
    kept: Objectives | None = None,
) -> Result:
    """Run one scenario under one policy. ``kept``: the objectives by which it is judged."""
    router = InFlightRouter(policy, scenario, own)
    answers = simulate(scenario.prompts, router, scenario.replicas, scenario.block_tokens, scenario.engine)
    attainment = attained(answers, kept) if kept else None
    return Result(scenario, policy, answers, latencies(answers, scenario.replicas), attainment)


def latencies(answers: Sequence[PromptOutcome], replicas: int) -> Latencies:
    requests = len(answers)
    answers = [answer for answer in answers if not answer.is_refused]
    if not answers:
        return Latencies(requests, *[0.0] * (len(fields(Latencies)) - 1))
    firsts = sorted([answer.ttft * 1e3 for answer in answers])
    lasts = sorted([(answer.finished - answer.arrived) * 1e3 for answer in answers])
    paces = sorted([answer.tpot * 1e3 for answer in answers if answer.prompt.output > 1])
    tokens = sum([answer.prompt.tokens for answer in answers])
    shares = Counter([answer.replica for answer in answers])
    least = min([shares[replica] for replica in range(replicas)])
    return Latencies(
        requests=requests,
        ttft_mean_ms=fmean(firsts),
        ttft_p50_ms=quantile(firsts, 0.50),
        ttft_p90_ms=quantile(firsts, 0.90),
        ttft_p99_ms=quantile(firsts, 0.99),
        e2e_mean_ms=fmean(lasts),
        e2e_p90_ms=quantile(lasts, 0.90),
        e2e_p99_ms=quantile(lasts, 0.99),
        tpot_p90_ms=quantile(paces, 0.90),
        cache_hit_ratio=sum([answer.cached_tokens for answer in answers]) / tokens,
        request_balance=max(shares.values()) / max(least, 1),
    )


def classes(answers: Iterable[PromptOutcome]) -> dict[str, dict[str, float]]:
    """Input-length class -> how many requests it has, and their time to the first byte."""
    grouped: dict[str, list[float]] = {name: [] for name in CLASSES}
    for answer in [answer for answer in answers if not answer.is_refused]:
        name = next(name for name, below in CLASSES.items() if answer.prompt.tokens < below)
        grouped[name].append(answer.ttft * 1e3)
    return {name: _class(sorted(firsts)) for name, firsts in grouped.items()}


def _class(firsts: Sequence[float]) -> dict[str, float]:
    figures = {"requests": len(firsts), "ttft_mean_ms": mean(firsts)}
    return figures | {f"ttft_p{part}_ms": quantile(firsts, part / 100) for part in (50, 90, 99)}


def attained(answers: Sequence[PromptOutcome], objectives: Objectives) -> Attainment:
    """How many of ``answers`` kept the objectives."""
    first = [answer.ttft <= objectives.ttft for answer in answers]
    further = [not answer.is_refused and answer.tpot <= objectives.tpot for answer in answers]
    both = [one and other for one, other in zip(first, further, strict=True)]
    return Attainment(
        slo_ttft=sum(first) / len(answers),
        slo_tpot=sum(further) / len(answers),
        slo=sum(both) / len(answers),
        refused=sum([answer.is_refused for answer in answers]),
    )
