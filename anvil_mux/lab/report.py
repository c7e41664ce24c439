"""The tables, rows and lines of replays: what `anvil-mux replay` tells."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any, TextIO

from anvil_mux.lab import study
from anvil_mux.lab.compared import Comparison
from anvil_mux.lab.figures import Figures, fairness
from anvil_mux.lab.measured import Perceived, Spread, errors, perceived
from anvil_mux.lab.sending import PlayedAnswer
from anvil_mux.lab.watching import ToldLog


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
    def perceived(self) -> Perceived:
        return perceived(self.answers)

    @property
    def fairness(self) -> float | None:
        """The whole answers of the client that got the fewest, over those of the one with the most."""
        answers = Counter([answer.session for answer in self.answers if answer.status == 200])
        return fairness([answers[client] for client in self.clients])

    def row(self) -> dict[str, Any]:
        """The run as an object of JSON; what is not known is null."""
        told = asdict(self.figures) if self.figures else {each.name: None for each in fields(Figures)}
        seen = asdict(self.perceived) if self.answers else {}
        named = {"script": self.script, "at": self.at, "repeat": self.repeat}
        more: dict[str, Any] = {
            "serving_ratio": self.serving,
            "fairness": self.fairness,
            "errors": errors(self.answers),
        }
        if self.comparison:
            more["difference"] = self.comparison.to_json()
        row: dict[str, Any] = _finite({**named, **told, **more, "clients": seen})
        return row


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


# What the server tells: the columns of `simulate`

HEAD = ("PROFILE", "AT", *study.HEAD[2:-1], "SERVING")


def table(runs: Iterable[LiveRun]) -> Iterator[tuple[str, ...]]:
    """A row for each script and server: means over the repeats, as in `simulate`."""
    for (script, at), group in _groups(runs):
        told = [run.figures for run in group if run.figures]
        cells = tuple(study.means(told)) if len(told) == len(group) else _known(group)
        share = study.least_to_most([run.fairness for run in group])
        yield script, at, str(len(group)), *cells, share, _share([run.serving for run in group])


def _groups(runs: Iterable[LiveRun]) -> Iterable[tuple[tuple[str, str], list[LiveRun]]]:
    groups: dict[tuple[str, str], list[LiveRun]] = {}
    for one in runs:
        groups.setdefault((one.script, one.at), []).append(one)
    return groups.items()


def _known(group: Sequence[LiveRun]) -> tuple[str, ...]:
    """The cells of a server that tells nothing: what clients know."""
    seen = [run.perceived for run in group]
    cells = dict.fromkeys(HEAD[3:-2], "")
    cells["REQUESTS"] = _number(fmean(one.requests for one in seen), 0)
    cells["MAKESPAN"] = _number(fmean(one.makespan_seconds for one in seen), 1)
    cells["FAILED"] = _number(fmean(one.failed for one in seen), 0)
    return tuple(cells.values())


def _share(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.1%}" if known else ""


# What clients see

CLIENTS_HEAD = (
    "PROFILE", "AT", "TTFT", "P50", "P95", "P99", "TPOT-MS", "P95", "E2E", "P50", "P95", "TOKENS/S", "HIT",
    "BALANCE", "LATE", "ERRORS",
)  # fmt: skip


def clients_table(runs: Iterable[LiveRun]) -> Iterator[tuple[str, ...]]:
    """A row for each script and server, of means over the repeats, and the ratio of two servers."""
    of_script: dict[str, list[list[float]]] = {}
    for (script, at), group in _groups(run for run in runs if run.answers):
        values = _values([run.perceived for run in group])
        of_script.setdefault(script, []).append(values)
        yield script, at, *map(_number, values, PLACES), _errors(group)
        if len(of_script[script]) == 2:
            first, second = of_script[script]
            yield script, "RATIO", *map(_ratio, first, second), ""


PLACES = (3, 3, 3, 3, 1, 1, 3, 3, 3, 1, 3, 2, 3)
"""The decimal places of each number."""


def _values(seen: Sequence[Perceived]) -> list[float]:
    ttft, tpot, e2e = (mean_spread([getattr(one, name) for one in seen]) for name in ("ttft", "tpot", "e2e"))
    return [
        *(ttft.mean, ttft.p50, ttft.p95, ttft.p99),
        *(1e3 * tpot.mean, 1e3 * tpot.p95),
        *(e2e.mean, e2e.p50, e2e.p95),
        fmean(one.tokens_per_second for one in seen),
        _mean([one.cache_hit_ratio for one in seen]),
        _mean([one.request_balance for one in seen]),
        max(one.late_seconds for one in seen),
    ]


def mean_spread(spreads: Sequence[Spread]) -> Spread:
    return Spread(*[fmean(getattr(one, each.name) for one in spreads) for each in fields(Spread)])


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return fmean(known) if known else math.nan


def _ratio(first: float, second: float) -> str:
    return _number(second / first if first else math.nan, 2)


def _number(value: float, places: int) -> str:
    return f"{value:.{places}f}" if math.isfinite(value) else ""


def _errors(group: Sequence[LiveRun]) -> str:
    found = errors([answer for run in group for answer in run.answers])
    return ", ".join(f"{count} x {code}" for code, count in found.items()) or "0"


# Every request


def write_csv(runs: Iterable[LiveRun], file: TextIO) -> None:
    """A line for each request; moments are seconds from the beginning of its run."""
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


def dots(runs: Iterable[LiveRun]) -> dict[str, dict[str, list[float]]]:
    """The panels of a picture: script -> server -> seconds to the first token, of each answer."""
    shown: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        seconds = [a.first - a.due for a in run.answers if a.status == 200 and not math.isnan(a.first)]
        if seconds:
            shown.setdefault(run.script, {}).setdefault(run.at, []).extend(seconds)
    return shown
