"""Routing policies under recorded prompts, side by side: what `anvil-mux simulate --routing` runs and tells.

A ``Scenario`` is a set of requests and the replicas that they meet; it is fixed before any policy runs, so
the policies compare request by request. The router is the program's own: its in-flight tracker, prefixes and
pipelines, in virtual time; only the engines are a model (fleet.py), and so are all latencies that come out.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any, TextIO

from anvil_mux.config.config import DEFAULT_ROUTING
from anvil_mux.config.profile import Profile
from anvil_mux.errors import MuxError
from anvil_mux.routing import pipeline
from anvil_mux.routing.in_flight import InFlightTracker, Member
from anvil_mux.routing.routing import Work
from anvil_mux.sim import objectives, profiled, prompts
from anvil_mux.sim.figures import quantile
from anvil_mux.sim.fleet import PromptOutcome, SimulatedEngine, simulate
from anvil_mux.sim.objectives import Attainment, Objectives
from anvil_mux.sim.prompts import Prompt, Trace

ROUTER_BLOCK_TOKENS = 512
"""The block size of the router; an engine's blocks are as small as the trace has them."""
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
        }
        kept = self.attainment._asdict() if self.attainment else {}
        return {**named, **run, **asdict(self.latencies), **kept, "classes": classes(self.answers)}


class InFlightRouter:
    """The router of the program, by the interface of fleet.py."""

    def __init__(self, policy: str, field: Scenario, own: Mapping[str, object] | None = None) -> None:
        names = [f"replica-{number}" for number in range(field.replicas)]
        made = pipeline.build(policy, own)
        profile = field.profile or (
            profiled.measured(field.engine) if "profile" in made.needs(WHOLE) else None
        )
        members = [Member(name, kv_tokens=field.engine.kv_tokens, profile=profile) for name in names]
        self._in_flight = InFlightTracker(made, members)
        self._names = names
        self._numbers = {name: number for number, name in enumerate(names)}
        self._every = max(ROUTER_BLOCK_TOKENS // field.block_tokens, 1)
        self._block_tokens = field.block_tokens * self._every

    def choose(self, key: int, prompt: Prompt, now: float) -> int | None:
        blocks = prompt.blocks[self._every - 1 :: self._every]
        work = Work(prompt.tokens, blocks, self._block_tokens, prompt.session, stream=True)
        choice = self._in_flight.choose(key, work, self._names, now=now)
        return self._numbers[choice.backend] if choice else None

    def first_byte(self, key: int, now: float) -> None:
        self._in_flight.first_byte(key, now)

    def ended(self, key: int, now: float, cached_tokens: int) -> None:
        self._in_flight.ended(key, now=now)


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
