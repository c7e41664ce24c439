"""Figures of measured swaps: the phases of each, medians over all of them, tables, and bars of a picture.

A swap begins when the last lease of the victim ends, while a request for the other already waits,
and ends with the first byte of that request's answer. Its phases follow each other without a gap:

    drain        until the eviction begins
    evict        until its GPUs are free
    load         until the next one is ready
    first_token  until the first byte of the answer

What the mechanism reports of its own parts (``verify``, ``ready``, ``probe``, ...) is taken out of the phase
in which it happened.

Every swap is compared with the same one done by hand in the same round, and a way back with a cold start.
Where it is known how much GPU memory comes back, so is how fast, beside what the bus could carry.

An engine or a machine may not be able to take a standby level (no NVIDIA driver, no checkpoint), and a
service may not name one that it could take. Either is a row of its own, with the reason.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import median, quantiles
from typing import NamedTuple, TextIO

from anvil_mux.config.abilities import cannot_evict_to
from anvil_mux.config.config import WAYS, Backend
from anvil_mux.errors import BackendError
from anvil_mux.host import check
from anvil_mux.lab.plot import PhaseBar
from anvil_mux.scheduler.events import Event

PHASES = ("drain", "save", "evict", "verify", "freeze", "load", "ready", "restore", "probe", "first_token")
"""The phases in the order in which they are shown; others that a mechanism reports follow."""
ENDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("drain", ("evicting",)),
    ("evict", ("stopped", "standby")),
    ("load", ("ready",)),
    ("first_token", ()),
)
"""Phases that follow each other, and the events with which they end."""
OUT = frozenset(("drain", "save", "evict", "verify", "freeze"))
"""The phases of the victim."""
MOVING = ("load", "ready")
"""The phases in which memory is filled."""
NOT_NAMED = "not named in evict_to"
GIB = 1 << 30


class TimedPhase(NamedTuple):
    """A part of a step, as the mechanism reported it when it was over."""

    at: float
    phase: str
    seconds: float


@dataclass(frozen=True)
class TimedSwap:
    """One swap, and the same by hand."""

    backend: str
    replaces: str
    way: str
    round: int
    phases: Mapping[str, float]
    by_hand_seconds: float
    bytes: int | None = None
    """GPU memory that the backend took back; None: not known."""
    bus: float | None = None
    """Bytes per second that its GPUs could be sent."""
    engine: str = ""

    @property
    def total_seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def overhead_seconds(self) -> float:
        return self.total_seconds - self.by_hand_seconds

    @property
    def out_seconds(self) -> float:
        """Seconds from the victim's last lease until its GPUs are free."""
        return sum(seconds for phase, seconds in self.phases.items() if phase in OUT)

    @property
    def in_seconds(self) -> float:
        """Seconds from free GPUs to the first byte."""
        return sum(seconds for phase, seconds in self.phases.items() if phase not in OUT)

    @property
    def bytes_per_second(self) -> float | None:
        seconds = sum(self.phases.get(phase, 0.0) for phase in MOVING)
        return self.bytes / seconds if self.bytes and seconds else None


@dataclass(frozen=True)
class Burst:
    """Many requests that waited for a swap, from its end until all are answered, and as many by hand."""

    backend: str
    replaces: str
    requests: int
    round: int
    seconds: float
    direct_seconds: float
    """Sent directly at once to the engine, just started, each on a connection that it closes."""


@dataclass(frozen=True)
class BurstFigures:
    """The medians over all bursts to one backend."""

    backend: str
    replaces: str
    requests: int
    bursts: int
    seconds: float
    direct_seconds: float
    ratio: float
    """The ratio of the two medians."""


@dataclass(frozen=True)
class SwapFigures:
    """The medians over all swaps to one backend by one standby level."""

    backend: str
    replaces: str
    way: str
    swaps: int
    phases: dict[str, float]
    total_seconds: float
    by_hand_seconds: float
    overhead_seconds: float
    """The median of the differences, not the difference of the medians."""
    overhead_quartiles: tuple[float, float]
    """Half of the differences lie between: how much the machine's noise is in them."""
    cold_start_ratio: float | None
    """A cold start over this way back, each until the first byte."""
    bytes: int | None
    bytes_per_second: float | None
    bus_bytes_per_second: float | None
    engine: str = ""


def phases(
    log: Iterable[Event], answered: float, told: Iterable[TimedPhase] = (), way: str = "stop"
) -> dict[str, float]:
    """The seconds of one swap by phase: its events from the last lease's end on, and the first byte.

    BackendError if the victim did not take the standby level that was wanted.
    """
    events = iter(log)
    since = _next(events, "released", "severed").at
    found: defaultdict[str, float] = defaultdict(float)
    for phase, kinds in ENDS:
        end = _next(events, *kinds) if kinds else None
        if end and end.kind == "stopped" and way != "stop":
            raise BackendError(f"{end.backend} had to be stopped: it did not go into standby by {way}")
        until = end.at if end else answered
        found[phase] += until - since
        for part in told:
            if since < part.at <= until and part.phase != phase:
                found[part.phase] += part.seconds
                found[phase] -= part.seconds
        since = until
    return dict(found)


def _next(events: Iterator[Event], *kinds: str) -> Event:
    for event in events:
        if event.kind in kinds:
            return event
    raise BackendError(f"the log of a swap has no event {' or '.join(kinds)}")


def figures(swaps: Iterable[TimedSwap]) -> list[SwapFigures]:
    """One row for each backend and standby level."""
    groups: defaultdict[tuple[str, str], list[TimedSwap]] = defaultdict(list)
    for swap in swaps:
        groups[swap.backend, swap.way].append(swap)
    back = {key: median([swap.in_seconds for swap in group]) for key, group in groups.items()}
    return [_figures(group, back.get((group[0].backend, "stop"))) for group in groups.values()]


def _figures(group: Sequence[TimedSwap], cold_seconds: float | None) -> SwapFigures:
    first = group[0]
    own = [swap.overhead_seconds for swap in group]
    quarters = quantiles(own, n=4, method="inclusive") if len(own) > 1 else own * 3
    taken = _known(swap.bytes for swap in group)
    return SwapFigures(
        backend=first.backend,
        replaces=first.replaces,
        way=first.way,
        swaps=len(group),
        phases={phase: median([s.phases.get(phase, 0.0) for s in group]) for phase in names(group)},
        total_seconds=median([swap.total_seconds for swap in group]),
        by_hand_seconds=median([swap.by_hand_seconds for swap in group]),
        overhead_seconds=median(own),
        overhead_quartiles=(quarters[0], quarters[-1]),
        cold_start_ratio=cold_seconds and cold_seconds / median([swap.in_seconds for swap in group]),
        bytes=None if taken is None else int(taken),
        bytes_per_second=_known(swap.bytes_per_second for swap in group),
        bus_bytes_per_second=first.bus,
        engine=first.engine,
    )


def burst_figures(bursts: Iterable[Burst]) -> list[BurstFigures]:
    """One row for each backend."""
    groups: defaultdict[str, list[Burst]] = defaultdict(list)
    for burst in bursts:
        groups[burst.backend].append(burst)
    return [_burst_figures(group) for group in groups.values()]


def _burst_figures(group: Sequence[Burst]) -> BurstFigures:
    first = group[0]
    seconds, direct = median([b.seconds for b in group]), median([b.direct_seconds for b in group])
    return BurstFigures(
        backend=first.backend,
        replaces=first.replaces,
        requests=first.requests,
        bursts=len(group),
        seconds=seconds,
        direct_seconds=direct,
        ratio=seconds / direct,
    )


BURSTS: Mapping[str, Callable[[BurstFigures], str]] = {
    "BURST": lambda row: row.backend,
    "REPLACES": lambda row: row.replaces,
    "REQUESTS": lambda row: str(row.requests),
    "SECONDS": lambda row: f"{row.seconds:.3f}",
    "DIRECT": lambda row: f"{row.direct_seconds:.3f}",
    "RATIO": lambda row: f"{row.ratio:.2f}",
}
"""The columns of a table for people."""


def _known(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def names(measured: Iterable[TimedSwap | SwapFigures]) -> list[str]:
    """The phases that occur, in order."""
    found = set(chain.from_iterable(each.phases for each in measured))
    return [*(phase for phase in PHASES if phase in found), *sorted(found - set(PHASES))]


def columns(rows: Sequence[SwapFigures]) -> dict[str, Callable[[SwapFigures], str]]:
    """The columns of a table for people: seconds, the overhead in milliseconds.

    Columns for memory where that is known, and one for the engine where there are several.
    """
    found: dict[str, Callable[[SwapFigures], str]] = {}
    if len({row.engine for row in rows}) > 1:
        found["ENGINE"] = lambda row: row.engine
    found |= {"BACKEND": lambda row: row.backend, "REPLACES": lambda row: row.replaces}
    found |= {"WAY": lambda row: row.way}
    found |= {phase.upper().replace("_", "-"): partial(_phase_cell, phase) for phase in names(rows)}
    found |= FIGURES
    return {**found, **MEMORY} if any(row.bytes_per_second for row in rows) else found


def _phase_cell(phase: str, row: SwapFigures) -> str:
    seconds = row.phases.get(phase)
    return "" if seconds is None else f"{seconds:.3f}"


def _within(row: SwapFigures) -> str:
    low, high = row.overhead_quartiles
    return f"{1000 * low:.0f}..{1000 * high:.0f} ms"


def _gib(amount: float | None) -> str:
    return "" if amount is None else f"{amount / GIB:.2f}"


FIGURES: Mapping[str, Callable[[SwapFigures], str]] = {
    "TOTAL": lambda row: f"{row.total_seconds:.3f}",
    "BY-HAND": lambda row: f"{row.by_hand_seconds:.3f}",
    "OVERHEAD": lambda row: f"{1000 * row.overhead_seconds:.0f} ms",
    "HALF-WITHIN": _within,
    "COLD/BACK": lambda row: "" if row.cold_start_ratio is None else f"{row.cold_start_ratio:.1f}",
}
MEMORY: Mapping[str, Callable[[SwapFigures], str]] = {
    "GIB": lambda row: _gib(row.bytes),
    "GIB/S": lambda row: _gib(row.bytes_per_second),
    "BUS": lambda row: _gib(row.bus_bytes_per_second),
}


def write_csv(swaps: Sequence[TimedSwap], file: TextIO) -> None:
    """A line for each swap, with a column for each phase."""
    columns = names(swaps)
    write = csv.writer(file).writerow
    ends = ("total_seconds", "by_hand_seconds", "overhead_seconds", "bytes")
    more = ("engine", "out_seconds", "back_seconds")
    write(("backend", "replaces", "way", "round", *(f"{phase}_seconds" for phase in columns), *ends, *more))
    for swap in swaps:
        seconds = [swap.phases.get(phase, 0.0) for phase in columns]
        seconds += [swap.total_seconds, swap.by_hand_seconds, swap.overhead_seconds]
        cells = [f"{each:.6f}" for each in seconds]
        parts = (f"{swap.out_seconds:.6f}", f"{swap.in_seconds:.6f}")
        names_it = (swap.backend, swap.replaces, swap.way, swap.round)
        write((*names_it, *cells, swap.bytes, swap.engine, *parts))


def bars(rows: Iterable[SwapFigures], unmeasured: Iterable[Unmeasured]) -> dict[str, list[PhaseBar]]:
    """Engine -> the bars of a picture: of each backend the cold start first, and its standby levels below."""
    found: defaultdict[str, list[PhaseBar]] = defaultdict(list)
    measured = list(rows)
    order = {name: nth for nth, name in enumerate(dict.fromkeys(row.backend for row in measured))}
    for row in sorted(measured, key=lambda row: (order[row.backend], row.way != "stop")):
        found[row.engine].append(
            PhaseBar(f"{row.backend}, {row.way}", row.phases, row.by_hand_seconds, _bar_note(row))
        )
    for each in unmeasured:
        if each.why and each.engine in found:
            found[each.engine].append(PhaseBar(each.way, {}, None, f"not possible here: {each.why}"))
    return dict(found)


def _bar_note(row: SwapFigures) -> str:
    ratio = row.cold_start_ratio
    beside = f"; back in 1/{ratio:.0f} of a cold start" if ratio and row.way != "stop" else ""
    return f"{row.total_seconds:.3g} s{beside}"


# What is not measured


@dataclass(frozen=True)
class Unmeasured:
    """A standby level that backends of one engine could not take, or do not name."""

    engine: str
    backends: tuple[str, ...]
    way: str
    why: str
    """Why it is not possible here; "": it is, and the services do not name it."""
    named: bool = False
    """Whether the services name it all the same."""

    def to_json(self) -> dict[str, object]:
        named = {"engine": self.engine, "backends": list(self.backends), "way": self.way}
        return {**named, "not_possible": self.why}


def unmeasured(backends: Iterable[Backend]) -> list[Unmeasured]:
    """The levels that are not measured of these backends, in one row where engine and reason are the same."""
    found: dict[tuple[str, str, str, bool], list[str]] = {}
    for backend in backends:
        for way in _levels_of(backend):
            why, named = why_not(backend, way), way in backend.evict_to
            if why or not named:
                found.setdefault((backend.engine, way, why, named), []).append(backend.name)
    return [
        Unmeasured(engine, tuple(names), way, why, named)
        for (engine, way, why, named), names in found.items()
    ]


def why_not(backend: Backend, way: str) -> str:
    """Why a backend cannot take a standby level, as far as it can be known beforehand; "" if it can.

    What its file says of a level that it names was checked when that was read.
    """
    if way == "checkpoint" and (why := check.why_not_checkpoint(backend.gpus, backend.checkpoint_anyway)):
        return why
    if way in backend.evict_to:
        return ""
    described: dict[str, object] = {"command": [*backend.service.command]}
    if backend.service.gpus_by:
        described["gpus"] = "all"
    return cannot_evict_to(described, dict(backend.service.environment), backend.engine, way)


def _levels_of(backend: Backend) -> list[str]:
    """The standby levels of which something is to be said: the deep sleep is vLLM's own."""
    return [
        way
        for way in WAYS
        if way != "stop" and (way != "sleep-2" or backend.engine == "vllm" or way in backend.evict_to)
    ]


UNMEASURED: Mapping[str, Callable[[Unmeasured], str]] = {
    "ENGINE": lambda row: row.engine,
    "BACKENDS": lambda row: ",".join(row.backends),
    "WAY": lambda row: row.way,
    "NOT MEASURED": lambda row: f"not possible here: {row.why}" if row.why else NOT_NAMED,
}
"""The columns of a table for people."""
