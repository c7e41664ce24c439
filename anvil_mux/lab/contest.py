"""Routing policies under recorded prompts, side by side: what `anvil-mux simulate --routing` runs and tells.

A ``Scenario`` is a set of requests and the replicas that they meet; it is fixed before any policy runs, so
the policies compare request by request. The router is the program's own: its in-flight tracker, prefixes and
pipelines, in virtual time; only the engines are a model (fleet.py), and so are all latencies that come out.

It knows what serving knows: of a request the bytes, which are read as the relay reads them and taken for as
many tokens as answers teach; of caches what it learns; of an answer that is not streamed only its end; and of
requests that wait behind others, which of them to take back when a replica has nothing left.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from statistics import fmean
from typing import Any, TextIO
from zlib import crc32

from anvil_mux.config.config import DEFAULT_ROUTING
from anvil_mux.config.profile import Profile
from anvil_mux.errors import MuxError
from anvil_mux.lab import objectives, profiled, prompts
from anvil_mux.lab.figures import quantile
from anvil_mux.lab.fleet import PromptOutcome, SimulatedEngine, simulate
from anvil_mux.lab.objectives import Attainment, Objectives
from anvil_mux.lab.prompts import Prompt, Trace
from anvil_mux.routing import pipeline, prefix
from anvil_mux.routing.in_flight import InFlightTracker, Member
from anvil_mux.routing.routing import Work

KNOWN_BLOCK_TOKENS = 512
"""The block size of a router that knows true tokens; engines have blocks as small as those of the trace."""
TOKEN_BYTES = 2.8, 4.4
"""The length of a token: that of each block of a trace is drawn between these."""
WHOLE = "neutral"
"""The infer type of all simulated replicas."""
CLASSES = {"warm": 5_000, "med": 20_000, "heavy": 50_000, "heavy_plus": math.inf}
"""Input-length class -> below so many tokens."""


class BadContest(MuxError):
    """The policies, traces or engines that are to be compared cannot be."""


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

    field: Scenario
    policy: str
    answers: Sequence[PromptOutcome]
    latencies: Latencies
    attainment: Attainment | None = None
    """How many kept the objectives; None: there are none."""

    def row(self) -> dict[str, Any]:
        field = self.field
        named = {"policy": self.policy, "default": self.policy == DEFAULT_ROUTING}
        run = {
            "trace": field.trace,
            "seed": field.seed,
            "sessions": field.sessions,
            "replicas": field.replicas,
            "known": field.known,
        }
        kept = self.attainment._asdict() if self.attainment else {}
        return {**named, **run, **asdict(self.latencies), **kept, "classes": classes(self.answers)}


class InFlightRouter:
    """The router of the program, by the interface of fleet.py."""

    def __init__(self, policy: str, field: Scenario, own: Mapping[str, object] | None = None) -> None:
        names = [f"replica-{number}" for number in range(field.replicas)]
        made = pipeline.build(policy, own)
        needs = made.needs(WHOLE)
        profile = field.profile or (profiled.measured(field.engine) if "profile" in needs else None)
        kv_tokens = field.engine.kv_tokens if field.known or "kv_tokens" in needs else None
        members = [Member(name, kv_tokens=kv_tokens, profile=profile) for name in names]
        self._in_flight = InFlightTracker(made, members)
        self._names = names
        self._numbers = {name: number for number, name in enumerate(names)}
        self._field = field
        self._moved: set[int] = set()
        self._streams: set[int] = set()

    def choose(self, key: int, prompt: Prompt, now: float) -> int | None:
        work = self._field.works[prompt]
        if work.stream:
            self._streams.add(key)
        if not self._field.known:
            work = prefix.sized(work, self._in_flight.bytes_per_token)
        if key in self._moved:  # once is enough
            work = work._replace(stream=False)
        choice = self._in_flight.choose(key, work, self._names, now=now)
        return self._numbers[choice.backend] if choice else None

    def first_byte(self, key: int, now: float) -> None:
        if key in self._streams:
            self._in_flight.first_byte(key, now)

    def ended(self, key: int, now: float, outcome: PromptOutcome) -> None:
        share = self._field.engine.reports_cached
        reports = int((outcome.replica + 1) * share) > int(outcome.replica * share)
        cached = outcome.cached_tokens if reports and not self._field.known else None
        tokens = None if self._field.known else outcome.prompt.tokens
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
    known = {**pipeline.shipped(), **(own or {})}
    if names == "all":
        return tuple([name for name in known if not predicts(name, own)])
    chosen = tuple(dict.fromkeys(names.split(",")))
    for name in chosen:
        predicts(name, own)  # or is unknown
    return chosen


def predicts(policy: str, own: Mapping[str, object] | None = None) -> bool:
    """Whether a policy needs a profile of the engines."""
    return "profile" in pipeline.build(policy, own).needs(WHOLE)


def read_engine(settings: str) -> SimulatedEngine:
    """The default engine, but for ``kv_tokens=100000,step_tokens=2048`` or the like; or ValueError."""
    kinds = {name: type(value) for name, value in asdict(SimulatedEngine()).items()}
    given: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        name, _, value = setting.partition("=")
        if name not in kinds:
            raise ValueError(f"unknown setting {name!r} of an engine; known: {', '.join(kinds)}")
        try:
            given[name] = kinds[name](value)
        except ValueError:
            raise ValueError(f"{name} must be a number, not {value!r}") from None
        if not 0 <= given[name] < math.inf:
            raise ValueError(f"{name} must be 0 or more, not {value}")
    return SimulatedEngine(**given)


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
        trace = prompts.read(prompts.find(name))
        for count in (sessions or (len(trace.sessions),)) if trace.sessions else (0,):
            for seed in seeds if trace.sessions else (0,):
                drawn = _drawn(trace, seed, count)
                yield Scenario(
                    trace=trace.name,
                    seed=seed,
                    sessions=count,
                    prompts=drawn,
                    block_tokens=trace.block_tokens,
                    replicas=replicas,
                    engine=engine,
                    profile=profile,
                    known=known,
                )


def _drawn(trace: Trace, seed: int, sessions: int) -> list[Prompt]:
    drawn = trace.draw(seed, sessions if trace.sessions else None)
    if not drawn:
        raise BadContest(f"{trace.name} has no request within {trace.seconds:g} s with seed {seed}")
    return drawn


# Running it


def run(
    field: Scenario,
    policy: str,
    own: Mapping[str, object] | None = None,
    kept: Objectives | None = None,
) -> Result:
    """Run one scenario under one policy. ``kept``: the objectives by which it is judged."""
    router = InFlightRouter(policy, field, own)
    answers = simulate(field.prompts, router, field.replicas, field.block_tokens, field.engine)
    attainment = objectives.attained(answers, kept) if kept else None
    return Result(field, policy, answers, latencies(answers, field.replicas), attainment)


def latencies(answers: Sequence[PromptOutcome], replicas: int) -> Latencies:
    requests = len(answers)
    answers = [answer for answer in answers if not answer.is_refused]
    if not answers:
        return Latencies(requests, *[0.0] * (len(fields(Latencies)) - 1))
    firsts = sorted([_first_ms(answer) for answer in answers])
    lasts = sorted([(answer.finished - answer.arrived) * 1e3 for answer in answers])
    paces = sorted([_pace_ms(answer) for answer in answers if answer.prompt.output > 1])
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
        grouped[name].append(_first_ms(answer))
    return {name: _class(sorted(firsts)) for name, firsts in grouped.items()}


def _class(firsts: Sequence[float]) -> dict[str, float]:
    told = {"requests": len(firsts), "ttft_mean_ms": fmean(firsts) if firsts else 0.0}
    return told | {f"ttft_p{part}_ms": quantile(firsts, part / 100) for part in (50, 90, 99)}


def _first_ms(answer: PromptOutcome) -> float:
    return (answer.first_byte - answer.arrived) * 1e3


def _pace_ms(answer: PromptOutcome) -> float:
    return (answer.finished - answer.first_byte) / (answer.prompt.output - 1) * 1e3


# Telling it

HEAD = (
    "TRACE", "SESSIONS", "POLICY", "RUNS", "TTFT", "P50", "P90", "P99", "E2E", "E2E-P90", "E2E-P99",
    "TPOT-P90", "HIT", "BALANCE", "TTFT-VS-DEFAULT",
)  # fmt: skip
KEPT = ("SLO-TTFT", "SLO-TPOT", "SLO", "REFUSED")
"""The further columns where there are objectives."""


def table(results: Iterable[Result]) -> Iterator[tuple[str, ...]]:
    """A row for each trace, number of sessions and policy: means over the seeds."""
    groups: dict[tuple[str, int], dict[str, list[Result]]] = {}
    for one in results:
        group = groups.setdefault((one.field.trace, one.field.sessions), {})
        group.setdefault(one.policy, []).append(one)
    for (trace, sessions), policies in groups.items():
        default = policies.get(DEFAULT_ROUTING)
        for policy, runs in policies.items():
            mark = " (default)" if policy == DEFAULT_ROUTING else ""
            yield (
                trace,
                str(sessions or ""),
                policy + mark,
                str(len(runs)),
                *_means([run.latencies for run in runs]),
                _against(runs, default),
                *_kept([run.attainment for run in runs if run.attainment]),
            )


def _means(runs: Sequence[Latencies]) -> Iterator[str]:
    for each in fields(Latencies)[1:]:
        mean = fmean(getattr(run, each.name) for run in runs)
        yield f"{mean:.0f}" if each.name.endswith("_ms") else f"{mean:.3f}"


def _kept(runs: Sequence[Attainment]) -> Iterator[str]:
    for column in zip(*runs, strict=True):
        yield f"{fmean(column):.3f}" if isinstance(column[0], float) else f"{fmean(column):.0f}"


def _against(runs: Sequence[Result], default: Sequence[Result] | None) -> str:
    """How much longer its mean time to the first byte is, and in how many runs it is longer."""
    if default is None or runs is default:
        return ""
    means, others = ([run.latencies.ttft_mean_ms for run in each] for each in (runs, default))
    if not any(means) or not any(others):  # all of it was refused
        return ""
    longer = sum([mean > other for mean, other in zip(means, others, strict=True)])
    ratio = fmean(means) / fmean(others)
    return f"{ratio - 1:+.0%}, longer in {longer} of {len(runs)}"


def panels(results: Iterable[Result]) -> dict[str, dict[str, list[float]]]:
    """The panels of a picture: title -> policy -> mean seconds to the first byte, of each run."""
    shown: dict[str, dict[str, list[float]]] = {}
    for one in results:
        sessions = f", {one.field.sessions} sessions" if one.field.sessions else ""
        lines = shown.setdefault(one.field.trace + sessions, {})
        lines.setdefault(one.policy, []).append(one.latencies.ttft_mean_ms / 1e3)
    return shown


def write_csv(results: Iterable[Result], file: TextIO) -> None:
    """A line for each run; what a class of requests has stands under its name and a dot."""
    writer = None
    for one in results:
        row = one.row()
        for name, told in row.pop("classes").items():
            row |= {f"{name}.{key}": value for key, value in told.items()}
        if writer is None:
            writer = csv.DictWriter(file, row, lineterminator="\n")
            writer.writeheader()
        writer.writerow(row)
