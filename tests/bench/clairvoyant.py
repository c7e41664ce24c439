"""The yardstick: the best that any policy could have done, had it known the future.

``best`` searches all schedules of a small instance (one GPU that holds one model at a time, unlimited
concurrency, loads and services of known length) for one with the least total wait, and ``Clairvoyant``
follows its plan through the real GPU group, in ``simulate``, to exactly that total. ``ratios`` compares
policies with it over many random instances.

What a schedule can be follows from the GPU group. A *stay* of a model begins when it becomes ready, with
the admission of its whole line; it serves later arrivals at once until its gate closes; when its last lease
has ended it is evicted, and the next model is loaded. A stay is therefore said by which arrivals it still
serves and which model comes next. Everything else is best done as early as it can be:

* A model ready earlier, with the same requests served before, can do all that it could have done later:
  whoever would have been in line is admitted earlier or on arrival, and every lease ends no later.
* So a gate that closes earlier without turning away another request is never worse, and the moments that
  matter are the beginning of the stay and just after each arrival that it serves. There are as many
  schedules as ways to cut the arrivals of each model into stays.
* A swap begins as soon as it is worth while and somebody waits for the model (invariant 6 of group.py).
  With ``ahead`` a gate may also close before anybody waits: that is ``Unload``, which a policy may decide at
  any time, but which only those can dare who know that the next request is for another model.
* Loading the model that was just evict cannot help: its gate might as well have stayed open.

The search is exhaustive, best first: it goes on from the stay that has made everybody wait least so far, and
the first after which no other model is wanted ends a best schedule. Requests of one model that arrive at one
moment are admitted together, unless a request for another model stands between them in the trace: only then
is the policy asked between them.

Some bounds of the GPU group are no choice of a policy, and are kept out: ``following`` lifts ``max_wait``
and its like, and the drains of instances have no end. Moments of random instances are multiples
of 2**-10 s, so that sums of them are exact.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count, islice
from statistics import fmean
from typing import NamedTuple

from anvil_mux.config.config import Config
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.lab.workload import Workload
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.policies import FOREVER, Decision, Snapshot, Stay, SwapTo, Unload

MOST_REQUESTS = 12


class Move(NamedTuple):
    """From this moment on: load ``model``, or with ``unload`` evict it."""

    at: float
    model: str
    unload: bool = False
    waiting: int = 0
    """Not before so many requests wait: tells requests of one moment apart."""


@dataclass(frozen=True)
class Plan:
    """A best schedule."""

    total_wait: float
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Clairvoyant:
    """Follow a plan made with the future known (small simulated workloads only)."""

    plan: tuple[Move, ...] = ()

    def decide(self, seen: Snapshot) -> Decision:
        due = sum(move.at <= seen.now for move in self.plan)
        move = self.plan[due - 1] if due else None
        if move and sum(line.waiting for line in seen.queues) >= move.waiting:
            if move.unload and any(resident.model == move.model for resident in seen.residents):
                return Unload(move.model)
            if not move.unload and any(line.model == move.model for line in seen.queues):
                return SwapTo(move.model)
        return Stay(self.plan[due].at if due < len(self.plan) else FOREVER)


POLICY = f"{Clairvoyant.__module__}:{Clairvoyant.__qualname__}"


# Instances


def instance(seed: int) -> Workload:
    """A random workload, in which at least one request is not for the resident.

    2 or 3 models and 4 to 12 requests, all equally likely. Loads are log-uniform in 1 to 30 s, a stop in 0.1
    to 3 s, services in 0.5 to 20 s. Popularity falls with a model's rank to a power that is uniform in 0 to
    2. Arrivals are, in equal parts,

    * Poisson; the mean gap is 0.1 to 3 (log-uniform) times the mean load,
    * bursts of 1 to 6 requests for one model, 0.1 s apart on average; the mean gap between bursts is 0.3 to
      5 (log-uniform) times the mean load,
    * sessions of 1 to 3 clients: each asks again when its last answer would have ended if it had not had to
      wait, plus a pause, whose mean is 0.1 to 3 (log-uniform) times the mean load, and with a chance that
      is uniform in 0 to 1 for a model drawn anew.

    Gaps and pauses are exponential.
    """
    draw = random.Random(seed)
    models = ["a", "b", "c"][: draw.randint(2, 3)]
    loads = {model: _tick(_log_uniform(draw, 1.0, 30.0)) for model in models}
    skew = draw.uniform(0.0, 2.0)
    shares = [rank**-skew for rank in range(1, len(models) + 1)]
    arrivals = draw.choice((_poisson, _bursts, _sessions))(draw, models, shares, fmean(loads.values()))
    requests = sorted(islice(arrivals, draw.randint(4, MOST_REQUESTS)))
    asked = {request.model for request in requests}
    resident = draw.choice([model for model in models if asked != {model}])
    stop_seconds = _tick(_log_uniform(draw, 0.1, 3.0))
    return Workload(f"random {seed}", loads, tuple(requests), resident=(resident,), stop_seconds=stop_seconds)


def _poisson(
    draw: random.Random, models: Sequence[str], shares: Sequence[float], load: float
) -> Iterator[Arrival]:
    gap, now = load * _log_uniform(draw, 0.1, 3.0), 0.0
    while True:
        now += draw.expovariate(1 / gap)
        yield Arrival(_tick(now), draw.choices(models, shares)[0], _service(draw))


def _bursts(
    draw: random.Random, models: Sequence[str], shares: Sequence[float], load: float
) -> Iterator[Arrival]:
    gap, begin = load * _log_uniform(draw, 0.3, 5.0), 0.0
    while True:
        begin += draw.expovariate(1 / gap)
        now, model = begin, draw.choices(models, shares)[0]
        for _ in range(draw.randint(1, 6)):
            yield Arrival(_tick(now), model, _service(draw))
            now += draw.expovariate(1 / 0.1)


def _sessions(
    draw: random.Random, models: Sequence[str], shares: Sequence[float], load: float
) -> Iterator[Arrival]:
    pause, change = load * _log_uniform(draw, 0.1, 3.0), draw.random()
    clients = draw.randint(1, 3)
    turns = [(draw.expovariate(1 / pause), model) for model in draw.choices(models, shares, k=clients)]
    while True:
        turn = now, model = min(turns)
        turns.remove(turn)
        seconds = _service(draw)
        yield Arrival(_tick(now), model, seconds)
        if draw.random() < change:
            model = draw.choices(models, shares)[0]
        turns.append((now + seconds + draw.expovariate(1 / pause), model))


def _service(draw: random.Random) -> float:
    return _tick(_log_uniform(draw, 0.5, 20.0))


def _log_uniform(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def _tick(seconds: float) -> float:
    return math.ceil(seconds * 1024) / 1024


def best(made: Workload, *, ahead: bool = False) -> Plan:
    """A schedule with the least total wait; with ``ahead`` a model may go before anybody wants another."""
    return _Search(made, ahead).run()


def following(config: Config, plan: Plan) -> Config:
    """A configuration under which a plan is carried out, without the bounds that might come before it."""
    settings = {"plan": plan.moves}
    return replace(config, policy=POLICY, policy_settings=settings, max_wait=FOREVER, queue_timeout=FOREVER)


# Ratios


@dataclass(frozen=True)
class Ratio:
    """A policy's total wait over the best one, on random instances."""

    policy: str
    instances: int
    mean: float
    worst: float
    worst_seed: int
    mean_ahead: float
    """Over the best one that puts models out ahead of time."""


def ratios(policies: Iterable[str], count: int) -> list[Ratio]:
    """One row for each policy, over the instances of ``count`` seeds, whose best total is never 0."""
    rows: dict[str, list[tuple[float, float]]] = {policy: [] for policy in policies}
    for seed in range(count):
        made = instance(seed)
        least, ahead = (best(made, ahead=early).total_wait for early in (False, True))
        for policy, row in rows.items():
            wait = total_wait(_run(made, policy))
            row.append((wait / least, wait / ahead))
    return [_ratio(policy, row) for policy, row in rows.items()]


def _ratio(policy: str, row: Sequence[tuple[float, float]]) -> Ratio:
    ratios = [ratio for ratio, _ in row]
    worst = max(ratios)
    return Ratio(policy, len(row), fmean(ratios), worst, ratios.index(worst), fmean(far for _, far in row))


def _run(made: Workload, policy: str) -> list[Event]:
    config = replace(made.config(), policy=policy)
    engines, resident = made.engines(config), made.residents(config)
    return simulate(config, made.requests, engines, resident=resident, costs=engines.costs(config))


def total_wait(log: Iterable[Event]) -> float:
    return sum([event.seconds for event in log if event.kind == "leased"])


# The search


class _Line:
    """The arrivals of one model, in their order."""

    def __init__(self, made: Workload, model: str) -> None:
        entries = [(i, request) for i, request in enumerate(made.requests) if request.model == model]
        self.model = model
        self.load_seconds = made.load_seconds[model]
        self.places = [place for place, _ in entries]
        """In the trace."""
        self.at = [request.at for _, request in entries]
        self.seconds = [request.seconds for _, request in entries]

    def wait(self, served: int, ready: float) -> float:
        """Of all but the first ``served`` who came before the model is ready."""
        return sum([ready - at for at in self.at[served:] if at < ready])

    def place(self, cut: int) -> float:
        """Where in the trace the first stands who is not of the first ``cut``."""
        return self.places[cut] if cut < len(self.places) else FOREVER

    def come(self, moment: float, place: float) -> int:
        """How many have come up to a moment, and before a place in the trace."""
        return min(bisect_right(self.at, moment), bisect_left(self.places, place))

    def cuts(self, ready: float) -> Iterator[int]:
        """How many may have been served when the gate closes, if the model is ready from a moment on."""
        for cut in range(bisect_left(self.at, ready), len(self.at) + 1):
            if not self._at_once(cut) or self.places[cut - 1] + 1 < self.places[cut]:
                yield cut

    def closes(self, ready: float, cut: int) -> float:
        """The earliest moment at which the gate can close when the first ``cut`` have been served."""
        if not cut or self.at[cut - 1] < ready:
            return ready
        return self.at[cut - 1] if self._at_once(cut) else math.nextafter(self.at[cut - 1], FOREVER)

    def end(self, ready: float, served: int, cut: int) -> float:
        """When the last lease ends of those after the first ``served`` up to the first ``cut``."""
        return max([max(ready, self.at[i]) + self.seconds[i] for i in range(served, cut)], default=ready)

    def _at_once(self, cut: int) -> bool:
        """Whether the last of the first ``cut`` and the next come at one moment."""
        return 0 < cut < len(self.at) and self.at[cut - 1] == self.at[cut]


class _Stay(NamedTuple):
    """A model from the moment at which it is ready until it is evicted."""

    total: float
    """The wait of all who have been admitted when it begins."""
    order: int
    ready: float
    model: int
    served: tuple[int, ...]
    """How many of each model were served before it."""
    moves: tuple[Move, ...]
    """How it came about."""


class _Search:
    """``_open`` is a heap of stays that may lead to a best schedule."""

    def __init__(self, made: Workload, ahead: bool) -> None:
        asked = {request.model for request in made.requests}.union(made.resident)
        self._lines = [_Line(made, model) for model in made.load_seconds if model in asked]
        self._stop_seconds = made.stop_seconds
        self._ahead = ahead
        self._open: list[_Stay] = []
        self._order = count()
        nobody = (0,) * len(self._lines)
        for model, line in enumerate(self._lines):
            if line.model in made.resident:
                self._add(0.0, 0.0, model, nobody)
            elif not made.resident:
                first = line.at[0]
                self._add(0.0, first + line.load_seconds, model, nobody, Move(first, line.model))

    def run(self) -> Plan:
        while True:
            stay = heappop(self._open)
            wanted = self._wanted(stay)
            if not wanted:
                return Plan(stay.total, stay.moves)
            for cut in self._lines[stay.model].cuts(stay.ready):
                self._end(stay, cut, wanted)

    def _wanted(self, stay: _Stay) -> list[int]:
        """The models that have to be loaded after a stay."""
        lines = enumerate(self._lines)
        return [model for model, line in lines if model != stay.model and stay.served[model] < len(line.at)]

    def _end(self, stay: _Stay, cut: int, wanted: Sequence[int]) -> None:
        """Opens what may follow when the gate closes after the first ``cut`` have been served."""
        line = self._lines[stay.model]
        served = (*stay.served[: stay.model], cut, *stay.served[stay.model + 1 :])
        close = self._close(stay, cut)
        end = line.end(stay.ready, stay.served[stay.model], cut)
        for model in wanted:
            target = self._lines[model]
            asked, place = target.at[served[model]], target.places[served[model]]
            in_time = place < line.place(cut)
            if in_time:
                swap = Move(max(close.at, asked), target.model, waiting=close.waiting)
                ready = max(end, asked) + self._stop_seconds + target.load_seconds
                self._add(stay.total, ready, model, served, *stay.moves, swap)
            if self._ahead and not (in_time and asked <= end):
                load = Move(max(end + self._stop_seconds, asked), target.model)
                self._add(stay.total, load.at + target.load_seconds, model, served, *stay.moves, close, load)

    def _close(self, stay: _Stay, cut: int) -> Move:
        """Puts the model of a stay out as early as can be."""
        line = self._lines[stay.model]
        closes, place = line.closes(stay.ready, cut), line.place(cut)
        others = [(o, stay.served[i]) for i, o in enumerate(self._lines) if o is not line]
        waiting = sum(other.come(closes, place) - served for other, served in others)
        return Move(closes, line.model, True, waiting)

    def _add(self, total: float, ready: float, model: int, served: tuple[int, ...], *moves: Move) -> None:
        total += self._lines[model].wait(served[model], ready)
        heappush(self._open, _Stay(total, next(self._order), ready, model, served, moves))
