"""Reports of `simulate` and `replay`: tables, rows, lines of CSV files and panels of pictures.

A row of a table is the mean over runs that differ in their seed, or are repeated. ``simulate`` has one table,
of what policies come to (study.py) or of what routing policies do (contest.py). ``replay`` has that of what
the server tells of itself, with the columns of ``simulate``, and another one of what its clients saw:
``Perceived``, a fold over the answers of a run.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from anvil_mux.config.values import DEFAULT_ROUTING
from anvil_mux.lab.figures import Figures, fairness, mean, quantile
from anvil_mux.protocol.completions import finite

if TYPE_CHECKING:  # each command loads what it needs itself
    from anvil_mux.lab.contest import Attainment, Latencies, Result
    from anvil_mux.lab.player import PlayedAnswer
    from anvil_mux.lab.study import StudyRun
    from anvil_mux.lab.watching import Comparison, ToldLog

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def _grouped(runs: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The runs of each row."""
    groups: dict[K, list[T]] = {}
    for one in runs:
        groups.setdefault(key(one), []).append(one)
    return groups


def _cell(value: float, form: str, unknown: str = "") -> str:
    return f"{value:{form}}" if math.isfinite(value) else unknown


def _panels(values: Iterable[tuple[str, str, Sequence[float]]]) -> dict[str, dict[str, list[float]]]:
    """The panels of a picture: title -> line -> all of its values."""
    shown: dict[str, dict[str, list[float]]] = {}
    for title, line, each in values:
        if each:
            shown.setdefault(title, {}).setdefault(line, []).extend(each)
    return shown


# Policies


STUDY_HEAD = (
    "PROFILE", "POLICY", "RUNS", "REQUESTS", "SWAPS", "MAKESPAN", "WAIT", "RMS", "P50", "P95",
    "LONGEST", "SWAPPING", "BUSY", "FAILED", "SEVERED", "LEAST/MOST", "VIOLATIONS",
)  # fmt: skip


def study_table(runs: Iterable[StudyRun]) -> Iterator[tuple[str, ...]]:
    """A row for each profile, policy and eviction: means over the seeds; of ``LONGEST`` the longest."""
    for names, group in _grouped(runs, lambda one: (one.profile, one.way)).items():
        share = least_to_most([one.fairness for one in group])
        yield (*names, str(len(group)), *_means([one.figures for one in group]), share, _violations(group))


def _means(every: Sequence[Figures]) -> Iterator[str]:
    """The cells of runs from ``REQUESTS`` to ``SEVERED``."""

    def mean(field: str) -> float:
        return fmean(getattr(one, field) for one in every)

    yield from (_short(mean(field)) for field in ("requests", "swaps"))
    yield f"{mean('makespan_seconds'):.1f}"
    yield from (f"{mean(f'wait_{which}_seconds'):.2f}" for which in ("mean", "rms", "p50", "p95"))
    yield f"{max(one.wait_max_seconds for one in every):.2f}"
    yield f"{mean('swap_seconds'):.1f}"
    yield f"{mean('busy_fraction'):.1%}"
    yield from (_short(mean(field)) for field in ("failed", "severed"))


def least_to_most(every: Iterable[float | None]) -> str:
    """The cell of ``LEAST/MOST``: the mean over the runs that have clients."""
    return _cell(mean(every, math.nan), ".2f", "-")


def _short(mean: float) -> str:
    return f"{mean:.1f}".removesuffix(".0")


def _violations(group: Sequence[StudyRun]) -> str:
    wrong = [one.wrong for one in group if one.wrong is not None]
    return str(sum(map(len, wrong))) if wrong else ""


# Routing policies

ROUTING_HEAD = (
    "TRACE", "SESSIONS", "POLICY", "RUNS", "TTFT", "P50", "P90", "P99", "E2E", "E2E-P90", "E2E-P99",
    "TPOT-P90", "HIT", "BALANCE", "TTFT-VS-DEFAULT",
)  # fmt: skip
KEPT_HEAD = ("SLO-TTFT", "SLO-TPOT", "SLO", "REFUSED")
"""The further columns where there are objectives."""


def routing_table(results: Iterable[Result]) -> Iterator[tuple[str, ...]]:
    """A row for each trace, number of sessions and policy: means over the seeds."""
    groups = _grouped(results, lambda one: (one.scenario.trace, one.scenario.sessions, one.policy))
    for (trace, sessions, policy), runs in groups.items():
        mark = " (default)" if policy == DEFAULT_ROUTING else ""
        yield (
            trace,
            str(sessions or ""),
            policy + mark,
            str(len(runs)),
            *_latencies([run.latencies for run in runs]),
            _against(runs, groups.get((trace, sessions, DEFAULT_ROUTING))),
            *_kept([run.attainment for run in runs if run.attainment]),
        )


def _latencies(runs: Sequence[Latencies]) -> Iterator[str]:
    for each in fields(runs[0])[1:]:
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


def routing_panels(results: Iterable[Result]) -> dict[str, dict[str, list[float]]]:
    """A panel for each trace and number of sessions, with the mean seconds to the first byte of each run."""

    def title(one: Result) -> str:
        return one.scenario.trace + (f", {one.scenario.sessions} sessions" if one.scenario.sessions else "")

    return _panels((title(one), one.policy, [one.latencies.ttft_mean_ms / 1e3]) for one in results)


def write_routing_csv(results: Iterable[Result], file: TextIO) -> None:
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


# Runs at a server


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
        return cls(mean(values), quantile(values, 0.5), quantile(values, 0.95), quantile(values, 0.99))


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
        cache_hit_ratio=_hit_ratio(told),
        request_balance=max(shares.values()) / min(shares.values()) if len(shares) > 1 else None,
    )


def _hit_ratio(told: Sequence[PlayedAnswer]) -> float | None:
    tokens = sum([answer.prompt_tokens or 0 for answer in told])
    return sum([answer.cached_tokens or 0 for answer in told]) / tokens if tokens else None


def errors(answers: Iterable[PlayedAnswer]) -> dict[str, int]:
    """How many answers came to each error, by status and code."""
    codes = [f"{a.status or ''} {a.code}".strip() for a in answers if a.status != 200]
    return dict(Counter(codes).most_common())


@dataclass(frozen=True)
class LiveRun:
    """One script, once, at one server; or in virtual time, then without answers."""

    script: str
    at: str
    """The server's name."""
    repeat: int
    answers: Sequence[PlayedAnswer]
    figures: Figures | None = None
    """The figures that the server tells; None: it tells nothing."""
    serving: float | None = None
    """The part of the time in which GPUs were not being swapped."""
    told: ToldLog | None = None
    clients: Sequence[str] = ()
    """The sessions whose answers can be compared."""
    comparison: Comparison | None = None
    """The difference from the measured run beside it; None: it is one, or there is none."""

    @property
    def fairness(self) -> float | None:
        """The whole answers of the client that got the fewest, over those of the one with the most."""
        answers = Counter([answer.session for answer in self.answers if answer.status == 200])
        return fairness([answers[client] for client in self.clients])

    def row(self) -> dict[str, Any]:
        """The run as an object of JSON; what is not known is null."""
        told = asdict(self.figures) if self.figures else {each.name: None for each in fields(Figures)}
        seen = asdict(perceived(self.answers)) if self.answers else {}
        named = {"script": self.script, "at": self.at, "repeat": self.repeat}
        more: dict[str, Any] = {
            "serving_ratio": self.serving,
            "fairness": self.fairness,
            "errors": errors(self.answers),
        }
        if self.comparison:
            more["difference"] = self.comparison.to_json()
        row: dict[str, Any] = finite({**named, **told, **more, "clients": seen})
        return row


# What the server tells: the columns of `simulate`

REPLAY_HEAD = ("PROFILE", "AT", *STUDY_HEAD[2:-1], "SERVING")


def replay_table(runs: Iterable[LiveRun]) -> Iterator[tuple[str, ...]]:
    """A row for each script and server: means over the repeats, as in `simulate`."""
    for (script, at), group in _grouped(runs, _place).items():
        told = [run.figures for run in group if run.figures]
        cells = tuple(_means(told)) if len(told) == len(group) else _known(group)
        serving = _cell(mean([run.serving for run in group], math.nan), ".1%")
        share = least_to_most([run.fairness for run in group])
        yield script, at, str(len(group)), *cells, share, serving


def _place(run: LiveRun) -> tuple[str, str]:
    return run.script, run.at


def _known(group: Sequence[LiveRun]) -> tuple[str, ...]:
    """The cells of a server that tells nothing: what clients know."""
    seen = [perceived(run.answers) for run in group]
    cells = dict.fromkeys(REPLAY_HEAD[3:-2], "")
    cells["REQUESTS"] = f"{fmean(one.requests for one in seen):.0f}"
    cells["MAKESPAN"] = f"{fmean(one.makespan_seconds for one in seen):.1f}"
    cells["FAILED"] = f"{fmean(one.failed for one in seen):.0f}"
    return tuple(cells.values())


# What clients see

CLIENTS_HEAD = (
    "PROFILE", "AT", "TTFT", "P50", "P95", "P99", "TPOT-MS", "P95", "E2E", "P50", "P95", "TOKENS/S", "HIT",
    "BALANCE", "LATE", "ERRORS",
)  # fmt: skip


def clients_table(runs: Iterable[LiveRun]) -> Iterator[tuple[str, ...]]:
    """A row for each script and server, of means over the repeats, and the ratio of two servers."""
    of_script: dict[str, list[list[float]]] = {}
    for (script, at), group in _grouped([run for run in runs if run.answers], _place).items():
        values = _values([perceived(run.answers) for run in group])
        of_script.setdefault(script, []).append(values)
        yield script, at, *map(_cell, values, FORMS), _errors(group)
        if len(of_script[script]) == 2:
            first, second = of_script[script]
            ratios = [two / one if one else math.nan for one, two in zip(first, second, strict=True)]
            yield script, "RATIO", *[_cell(ratio, ".2f") for ratio in ratios], ""


FORMS = (*[".3f"] * 4, ".1f", ".1f", *[".3f"] * 3, ".1f", ".3f", ".2f", ".3f")
"""The form of each number."""


def _values(seen: Sequence[Perceived]) -> list[float]:
    ttft, tpot, e2e = (_mean_spread([getattr(one, name) for one in seen]) for name in ("ttft", "tpot", "e2e"))
    return [
        *(ttft.mean, ttft.p50, ttft.p95, ttft.p99),
        *(1e3 * tpot.mean, 1e3 * tpot.p95),
        *(e2e.mean, e2e.p50, e2e.p95),
        fmean(one.tokens_per_second for one in seen),
        mean([one.cache_hit_ratio for one in seen], math.nan),
        mean([one.request_balance for one in seen], math.nan),
        max(one.late_seconds for one in seen),
    ]


def _mean_spread(spreads: Sequence[Spread]) -> Spread:
    return Spread(*[fmean(getattr(one, each.name) for one in spreads) for each in fields(Spread)])


def _errors(group: Sequence[LiveRun]) -> str:
    found = errors([answer for run in group for answer in run.answers])
    return ", ".join(f"{count} x {code}" for code, count in found.items()) or "0"


# Every request


def write_answers_csv(runs: Iterable[LiveRun], file: TextIO) -> None:
    """A line for each request; moments are seconds from the beginning of its run."""
    from anvil_mux.lab.player import PlayedAnswer

    names = [each.name for each in fields(PlayedAnswer)]
    writer = csv.DictWriter(file, ["script", "at", "repeat", *names, "waited"], lineterminator="\n")
    writer.writeheader()
    for run in runs:
        for answer in sorted(run.answers, key=lambda each: each.number):
            waited = run.told.waits.get(answer.id) if run.told else None
            first = None if math.isnan(answer.first) else answer.first
            said = {**asdict(answer), "first": first, "waited": waited}
            moments = {name: round(value, 4) for name, value in said.items() if isinstance(value, float)}
            writer.writerow({"script": run.script, "at": run.at, "repeat": run.repeat, **said, **moments})


def replay_panels(runs: Iterable[LiveRun]) -> dict[str, dict[str, list[float]]]:
    """A panel for each script, with the seconds to the first token of each answer of a server."""

    def seconds(run: LiveRun) -> list[float]:
        return [a.first - a.due for a in run.answers if a.status == 200 and not math.isnan(a.first)]

    return _panels((run.script, run.at, seconds(run)) for run in runs)
