"""Events and access records -> Prometheus.

``observe`` is a fold over the GPU group's events, ``took`` notes what a phase of a swap took and ``served``
counts one finished request. They only add to plain numbers, because they are called for every request; the
numbers become metric families when somebody asks for them. What is true at this moment (states, lines,
leases, memory) is not counted along but read at the scrape (gauges.py). One thread at a time calls
``observe``, ``took`` and ``served`` (journal.py sees to that), any thread ``render``.

The phases of a swap belong to the model that goes through them: a victim's are drain, save (of its prompts),
evict, verify (until its memory is really free) and freeze; cooldown (the policy held the swap back, and the
victims served on), load, ready (until its engine answers), restore (of its prompts) and probe (a first token)
are those of the model that comes. Of one model they follow one another; of several victims they run side by
side. Events tell of cooldown and drain, swap.py of the others, those of attempts that failed too.

Labels are bounded: models are configured ids or "unknown", presets (a label of requests that name one, and of
no other) configured names, routes those of the allow-list or "other", reasons
those listed here.
"""

from __future__ import annotations

import math
import platform
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from anvil_mux import __version__
from anvil_mux.config.config import Config
from anvil_mux.errors import ClientStalled
from anvil_mux.host.seam import Sight
from anvil_mux.protocol import api
from anvil_mux.scheduler.costs import Cost, Footprint
from anvil_mux.scheduler.events import FOUND, Event
from anvil_mux.scheduler.status import Status
from anvil_mux.telemetry import gauges
from anvil_mux.telemetry.accesslog import Served
from anvil_mux.telemetry.gauges import NONE, SEVERAL
from anvil_mux.telemetry.usage import Usage

BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0),
)
"""A token takes milliseconds, a cold start of a large model minutes."""
UNKNOWN = "unknown"
TOKENS = ("prompt", "cached", "completion")
FORECASTS = ("hit", "missing", "unforeseen")
"""The kinds of tokens that a replica was thought to have cached, or had: both, only thought, only had."""
"""Each token is of one kind: what was cached of a prompt is no longer counted as ``prompt``."""
RESULTS = ("ok", "failed", "stuck", "cancelled")
"""The results of loads."""

Labels = tuple[str, ...]
_BOUNDS = [floatToGoString(bound) for bound in (*BUCKETS, math.inf)]  # type: ignore[no-untyped-call]


class Phase(NamedTuple):
    """A part of a swap that is over."""

    model: str
    name: str
    seconds: float


class WeightsReadAhead(NamedTuple):
    """Weights of a backend that were read into the page cache before its load."""

    model: str
    backend: str
    size: int
    """Bytes that were not there before."""
    seconds: float


class Histogram:
    """Counts by bucket. ``prometheus_client.Histogram`` is ten times as dear: it locks, and searches."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound -> how many were at most that."""
        total, found = 0, []
        for bound, count in zip(_BOUNDS, self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Histograms(dict[Labels, Histogram]):
    """Histograms by label values; one that is missing begins empty."""

    def __missing__(self, labels: Labels) -> Histogram:
        made = self[labels] = Histogram()
        return made


@dataclass(eq=False, slots=True)
class _OfModel:
    """The counts of a model's requests that a backend served; of those that name a preset apart."""

    waits: Histogram = field(default_factory=Histogram)
    first_bytes: Histogram = field(default_factory=Histogram)
    tokens: list[int] = field(default_factory=lambda: [0] * len(TOKENS))
    """Tokens of the kinds in ``TOKENS``."""


class _OfRoute:
    """The counts of a model's requests on one route, likewise."""

    __slots__ = ("by_status", "durations", "of_model")

    def __init__(self, of_model: _OfModel) -> None:
        self.of_model = of_model
        self.by_status: Counter[int] = Counter()
        self.durations = Histogram()


@dataclass(eq=False, slots=True)
class _LeavingBackend:
    """A backend on its way out: since when, and when it was told to stop."""

    model: str
    target: str
    """The model that it makes room for; empty when it does for none."""
    cause: str
    since: float
    stopping: float | None = None


@dataclass(eq=False, slots=True)
class _LoadingBackend:
    model: str
    since: float
    way: str
    victims: list[_LeavingBackend] = field(default_factory=list)

    @property
    def begun(self) -> float:
        """When the swap began of which this load is the last part."""
        return min((victim.since for victim in self.victims), default=self.since)


class Metrics:
    """One registry of its own; a Prometheus collector."""

    def __init__(
        self,
        config: Config,
        status: Callable[[], Status],
        costs: Callable[[], Iterable[Cost]] = tuple,
        footprints: Callable[[], Iterable[Footprint]] = tuple,
        sight: Callable[[], Sight] = dict,
        round_trips: Callable[[], Mapping[str, float]] = dict,
        usage: Usage | None = None,
        circuits: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.usage = usage or Usage()
        self._status = status
        self._costs = costs
        self._footprints = footprints
        self._sight = sight
        self._round_trips = round_trips
        self._circuits = circuits
        self._models: dict[str, str] = {}
        self._routes = _route_labels()
        self._by_model: dict[tuple[str, str], _OfModel] = {}
        """The counts by model and preset, of all that are known."""
        self._by_route: dict[tuple[str, str, str], _OfRoute] = {}
        """The counts by model, route and preset: a finished request looks up no more than this one."""
        self._forecasts: dict[Labels, list[int]] = {}  # of models with replicas
        self._loads: Counter[Labels] = Counter()
        self._load_seconds = Histograms()
        self._swaps: Counter[Labels] = Counter()
        self._swap_seconds = Histograms()
        self._gpus: dict[str, tuple[str, ...]] = {}
        """The GPUs of each backend."""
        self._gpu_swap_seconds: defaultdict[Labels, float] = defaultdict(float)
        self._swapped_until: dict[str, float] = {}
        """The end of the last swap that was counted, by GPU: what was under way at once counts once."""
        self._phases = Histograms()
        self._read_ahead_bytes: Counter[Labels] = Counter()
        self._read_ahead_seconds: defaultdict[Labels, float] = defaultdict(float)
        self._severed: Counter[Labels] = Counter()
        self._stalled: Counter[Labels] = Counter()
        self._fallbacks: Counter[Labels] = Counter()
        self._deferrals: Counter[Labels] = Counter()
        self._evictions: Counter[Labels] = Counter()
        self._demotions: Counter[Labels] = Counter()
        self._reloads: Counter[Labels] = Counter({("ok",): 0, ("failed",): 0})
        self._held: dict[str, tuple[int, float]] = {}  # model -> the first of its line, held back since
        self._demoting: set[str] = set()
        self._leaving: dict[str, _LeavingBackend] = {}
        self._loading: dict[str, _LoadingBackend] = {}
        self._swap_seconds |= {(result,): Histogram() for result in RESULTS}
        self.know(config)
        self.registry = CollectorRegistry()
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(self)

    def render(self, accept: str) -> tuple[str, bytes]:
        """The content type and the text that a scraper with this Accept header gets."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self.registry)

    def know(self, config: Config) -> None:
        """Note the models that are served from now on; those of before stay known, since their requests go
        on.

        What a rate is asked of must be there before it first grows, or Prometheus misses that.
        """
        known = set(self._models.values())
        replicas = Counter(backend.model for backend in config.backends)
        for model in replicas:
            if replicas[model] > 1:
                self._forecasts.setdefault((model,), [0] * len(FORECASTS))
        self._models |= config.names
        self._gpus |= {backend.name: backend.gpu_names for backend in config.backends}
        for gpu in {name for names in self._gpus.values() for name in names}:
            self._gpu_swap_seconds[gpu,] += 0.0
        for model in set(self._models.values()) - known:
            self._by_model[model, ""] = _OfModel()
            self._severed[model,] = self._stalled[model,] = self._read_ahead_bytes[model,] = 0
            self._read_ahead_seconds[model,] = 0.0
            for result in RESULTS:
                self._loads[model, result] = 0
        for name, preset in {(b.model, p.name) for b in config.backends for p in b.presets}:
            self._by_model.setdefault((name, preset), _OfModel())

    # Requests

    def served(self, record: Served) -> None:
        """A request ended."""
        model = self._models.get(record.model, UNKNOWN)
        self.usage.served(model, record)
        route = self._routes.get(record.path) or _other_spelling(record.path)
        counts = self._by_route.get((model, route, record.preset)) or self._begun(model, route, record.preset)
        counts.by_status[record.status] += 1
        counts.durations.observe(record.seconds)
        if record.fallback_of:
            of = self._models.get(record.fallback_of, UNKNOWN)
            self._fallbacks[of, model, record.fallback_cause] += 1
        if record.code == ClientStalled.code:
            self._stalled[model,] += 1
        if record.backend:
            of_model = counts.of_model
            of_model.waits.observe(record.waited)
            if record.first_byte:
                of_model.first_bytes.observe(record.first_byte)
            prompt, cached = record.prompt_tokens, record.cached_tokens
            if prompt or record.tokens:
                tokens = of_model.tokens
                tokens[0] += prompt - cached if prompt > cached else 0
                tokens[1] += cached
                tokens[2] += record.tokens
            forecast = self._forecasts.get((model,)) if record.foreseen is not None else None
            if forecast is not None and record.foreseen is not None:
                thought = round(record.foreseen * prompt)
                forecast[0] += min(thought, cached)
                forecast[1] += max(thought - cached, 0)
                forecast[2] += max(cached - thought, 0)

    def _begun(self, model: str, route: str, preset: str) -> _OfRoute:
        """The counts of requests of which this is the first; no backend serves those for unknown models."""
        of_model = _OfModel() if model == UNKNOWN else self._by_model.setdefault((model, preset), _OfModel())
        counts = self._by_route[model, route, preset] = _OfRoute(of_model)
        return counts

    # Events and phases

    def took(self, phase: Phase) -> None:
        """A phase of a swap is over, however it ended."""
        self._phases[phase.model, phase.name].observe(phase.seconds)

    def read_ahead(self, read: WeightsReadAhead) -> None:
        """Weights were read before a load."""
        self._read_ahead_bytes[read.model,] += read.size
        self._read_ahead_seconds[read.model,] += read.seconds

    def observe(self, event: Event) -> None:
        """An event happened; they come in order."""
        fold = self._FOLDS.get(event.kind)
        if event.cause and event.cause.kind in FOUND:
            self._forget(event.backend)
        elif fold:
            fold(self, event)

    def _forget(self, backend: str) -> None:
        """A backend was found in the state that it is in: how its steps under way ended is not known."""
        self._loading.pop(backend, None)
        self._leaving.pop(backend, None)
        self._demoting.discard(backend)

    def _on_starting(self, event: Event) -> None:
        self._end_hold(event.model, event.at)
        victims = self._leaving_for(event.model)
        self._loading[event.backend] = _LoadingBackend(event.model, event.at, event.way, victims)

    def _on_ready(self, event: Event) -> None:
        loading = self._loading.pop(event.backend, None)
        if loading:
            loading.way = event.way
            self._end_load(event.backend, loading, "ok", event.at)
        else:
            self._end_drain(event.backend, "reprieved")

    def _on_cancelling(self, event: Event) -> None:
        loading = self._loading.pop(event.backend, None)
        if loading:
            self._end_load(event.backend, loading, "cancelled", event.at)
            self._leaving[event.backend] = _LeavingBackend(event.model, "", "cancelled", event.at, event.at)

    def _on_draining(self, event: Event) -> None:
        cause = "swap" if event.target else event.cause.kind if event.cause else UNKNOWN
        if event.target:
            self._end_hold(event.target, event.at)
        self._leaving[event.backend] = _LeavingBackend(event.model, event.target, cause, event.at)

    def _on_stopping(self, event: Event) -> None:
        leaving = self._leaving.get(event.backend)
        if leaving:
            leaving.stopping = event.at
            self.took(Phase(event.model, "drain", event.seconds))

    def _on_demoting(self, event: Event) -> None:
        self._demoting.add(event.backend)

    def _on_gone(self, event: Event) -> None:
        if event.backend in self._demoting:  # it had left its GPUs before
            self._demoting.remove(event.backend)
            way = "stop" if event.kind == "stopped" else event.way
            self._demotions[event.model, NONE if event.cause and event.kind == "standby" else way] += 1
            return
        loading = self._loading.pop(event.backend, None)
        leaving = self._leaving.get(event.backend)
        if loading:
            self._end_load(event.backend, loading, "failed", event.at)
        elif leaving is None or leaving.stopping is None:
            self._evictions[event.model, "died"] += event.kind == "stopped"  # else it was in standby
            self._leaving.pop(event.backend, None)
        else:
            self._evictions[event.model, leaving.cause] += 1
            if not leaving.target:
                del self._leaving[event.backend]

    def _on_stuck(self, event: Event) -> None:
        loading = self._loading.pop(event.backend, None)
        if loading:
            self._end_load(event.backend, loading, "stuck", event.at)
        else:
            self._end_drain(event.backend, "stuck")

    def _on_severed(self, event: Event) -> None:
        self._severed[event.model,] += 1

    def _on_deferred(self, event: Event) -> None:
        held = self._held.get(event.model)
        if held and held[0] == event.ticket:
            return  # the moment that was announced first has passed
        self._held[event.model] = event.ticket, event.at
        self._deferrals[event.model, event.cause.kind if event.cause else UNKNOWN] += 1

    def _on_reload(self, event: Event) -> None:
        self._reloads["ok" if event.kind == "reloaded" else "failed",] += 1

    def _on_given_up(self, event: Event) -> None:
        held = self._held.get(event.model)
        if held and held[0] == event.ticket:
            del self._held[event.model]

    _FOLDS: dict[str, Callable[[Metrics, Event], None]] = {
        "loading": _on_starting,
        "cancelling": _on_cancelling,
        "ready": _on_ready,
        "draining": _on_draining,
        "evicting": _on_stopping,
        "demoting": _on_demoting,
        "stopped": _on_gone,
        "standby": _on_gone,
        "stuck": _on_stuck,
        "severed": _on_severed,
        "deferred": _on_deferred,
        "gone": _on_given_up,
        "failed": _on_given_up,
        "reloaded": _on_reload,
        "reload_failed": _on_reload,
    }

    def _end_hold(self, target: str, now: float) -> None:
        """The swap to ``target`` is not held back, or not any more."""
        held = self._held.pop(target, None)
        if held:
            self.took(Phase(target, "cooldown", now - held[1]))

    def _leaving_for(self, target: str) -> list[_LeavingBackend]:
        """Takes out the victims of the swap to ``target``."""
        names = [name for name, each in self._leaving.items() if each.target == target]
        return [self._leaving.pop(name) for name in names]

    def _end_drain(self, victim: str, result: str) -> None:
        """The swap that ``victim`` was to leave for does not come about."""
        leaving = self._leaving.pop(victim, None)
        if leaving and leaving.target:
            others = self._leaving_for(leaving.target)
            self._swaps[_source([leaving, *others]), leaving.target, NONE, result] += 1

    def _end_load(self, backend: str, loading: _LoadingBackend, result: str, now: float) -> None:
        self._loads[loading.model, result] += 1
        self._load_seconds[loading.model, result].observe(now - loading.since)
        self._swaps[_source(loading.victims), loading.model, loading.way or NONE, result] += 1
        self._swap_seconds[result,].observe(now - loading.begun)
        for gpu in self._gpus.get(backend, ()):
            counted = max(loading.begun, self._swapped_until.get(gpu, loading.begun))
            self._gpu_swap_seconds[gpu,] += max(now - counted, 0.0)
            self._swapped_until[gpu] = now

    # The scrape

    def collect(self) -> Iterator[Metric]:
        """Everything counted so far, and the state of this moment."""
        info = {"version": __version__, "python": platform.python_version()}
        yield InfoMetricFamily("anvil_build", "The version of anvil-mux and of its Python.", info)
        by_route, by_model = list(self._by_route.items()), list(self._by_model.items())
        requests = {
            _labels(model, route, str(code), preset): count
            for (model, route, preset), counts in by_route
            for code, count in counts.by_status.items()
        }
        yield _counter("anvil_requests", "Requests that ended.", "model route code preset", requests)
        yield _histogram(
            "anvil_request_duration_seconds",
            "From a request's head to the last byte of its answer.",
            "model route preset",
            {_labels(*by): counts.durations for by, counts in by_route},
        )
        yield _histogram(
            "anvil_time_to_first_byte_seconds",
            "From a request's head to the first byte of the engine's answer.",
            "model preset",
            {_labels(*by): counts.first_bytes for by, counts in by_model},
        )
        yield _histogram(
            "anvil_queue_wait_seconds",
            "Time in the queue, until the model was resident.",
            "model preset",
            {_labels(*by): counts.waits for by, counts in by_model},
        )
        yield _counter(
            "anvil_tokens",
            "Tokens of prompts (cached or not) and of answers.",
            "model kind preset",
            _by_kind(TOKENS, {_labels(*by): counts.tokens for by, counts in by_model}),
        )
        yield _counter(
            "anvil_cache_forecast_tokens",
            "Prompt tokens that were predicted to be cached at a replica, or were, by kind of outcome.",
            "model kind",
            _by_kind(FORECASTS, self._forecasts),
        )
        yield from self.usage.collect()
        yield _counter(
            "anvil_fallbacks",
            "Requests that a fallback answered, by the error code of the model that was asked for.",
            "model to cause",
            self._fallbacks,
        )
        yield from self._of_swaps()
        yield from gauges.of_costs(self._costs(), set(self._models.values()))
        yield from gauges.of_footprints(self._footprints())
        status = self._status()
        yield from gauges.of_models(status)
        yield from gauges.of_gpus(status, self._sight())
        yield from gauges.of_hosts(status, self._round_trips())
        yield from gauges.of_pause(status)
        yield from gauges.of_circuits(self._circuits())

    def describe(self) -> Iterable[Metric]:
        """Describe nothing: registering must not ask a multiplexer that is not there yet for its status."""
        return ()

    def _of_swaps(self) -> Iterator[Metric]:
        yield _counter("anvil_model_loads", "Loads, by result.", "model result", self._loads)
        yield _histogram(
            "anvil_model_load_duration_seconds",
            "Duration of loads, failed ones included.",
            "model result",
            self._load_seconds,
        )
        yield _counter(
            "anvil_swaps",
            "Swaps (drain + evict + load), by standby level and result: ok, failed, stuck, cancelled or "
            "reprieved.",
            "from to way result",
            self._swaps,
        )
        yield _histogram(
            "anvil_swap_duration_seconds",
            "Duration of swaps, from the first drain to the end of the load.",
            "result",
            self._swap_seconds,
        )
        yield _counter(
            "anvil_gpu_swap_seconds",
            "Time that the GPU spent in swaps, from the first drain to the end of the load.",
            "gpu",
            self._gpu_swap_seconds,
        )
        yield _histogram(
            "anvil_swap_phase_seconds",
            "Duration of the phases of a swap: cooldown, drain, save, evict, verify, freeze, load, ready, "
            "restore, probe.",
            "model phase",
            self._phases,
        )
        yield _counter(
            "anvil_read_ahead_bytes",
            "Weights that were read into the page cache while requests waited for the load to begin.",
            "model",
            self._read_ahead_bytes,
        )
        yield _counter("anvil_read_ahead_seconds", "What that took.", "model", self._read_ahead_seconds)
        yield _counter(
            "anvil_stalled_clients",
            "Requests that were ended because their client stopped reading.",
            "model",
            self._stalled,
        )
        yield _counter(
            "anvil_severed_requests",
            "Requests that were severed (aborted) because a drain ended.",
            "model",
            self._severed,
        )
        yield _counter(
            "anvil_deferrals", "Swaps that were held back, by cause.", "model cause", self._deferrals
        )
        yield _counter(
            "anvil_evictions", "Models that were evicted, by cause.", "model cause", self._evictions
        )
        yield _counter("anvil_reloads", "Reloads of the configuration, by result.", "result", self._reloads)
        yield _counter(
            "anvil_demotions",
            "Backends that were demoted, by their standby level afterwards.",
            "model way",
            self._demotions,
        )


def _source(victims: list[_LeavingBackend]) -> str:
    models = {victim.model for victim in victims}
    return NONE if not models else models.pop() if len(models) == 1 else SEVERAL


def _other_spelling(path: str) -> str:
    """The route of a path that has a name or a foreign prefix in it."""
    for begins, route in _WITH_NAMES.items():
        if path.startswith(begins):
            return route
    found = api.match("POST", path)
    return found.path if found else "other"


def _route_labels() -> dict[str, str]:
    """Path of a request -> its route: one for all spellings."""
    labels = {path: next(iter(methods.values())).path for path, methods in api.ROUTES.items()}
    state = "/ /health /healthz /livez /metrics /readyz"
    models = (
        "/api/v0/models /models /models/load /models/pin /models/sse /models/unload /models/unpin /v1/models"
    )
    theirs = "/api/hello /api/ps /api/show /api/tags /api/version"
    seen = "/events /logs /pause /reload /requests /requests/cancel /requests/running /resume /usage /why"
    hosts = "/hosts /hosts/drain /hosts/gone /hosts/undrain"
    labels |= {path: path for path in f"{state} {models} {theirs} {seen} {hosts}".split()}
    return labels | _WITH_NAMES


_WITH_NAMES = {
    "/v1/models/": "/v1/models",
    "/upstream/": "/upstream",
    **dict.fromkeys(("/v1/responses/", "/v/responses/", "/responses/"), "/v1/responses"),
}
"""How paths begin that go on with a client's own word, and their route."""


_L = TypeVar("_L", bound=Labels)


def _by_kind(kinds: Sequence[str], counts: Mapping[Labels, Sequence[int]]) -> dict[Labels, int]:
    """Counts by (model, kind) and what else they are by; another thread may add models meanwhile."""
    each = [(by, zip(kinds, of, strict=True)) for by, of in list(counts.items())]
    return {(by[0], kind, *by[1:]): count for by, of in each for kind, count in of}


def _labels(*labels: str) -> Labels:
    """Labels of which the last is a preset; requests that name none do not have it."""
    return labels if labels[-1] else labels[:-1]


def _counter(name: str, text: str, labels: str, values: Mapping[_L, float]) -> Metric:
    """A counter; a value with fewer labels than there are has none of the last ones."""
    family = CounterMetricFamily(name, text, labels=labels.split())
    for key, value in list(values.items()):
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, labels: str, values: Mapping[Labels, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels.split())
    for key, value in list(values.items()):
        family.add_metric(key, value.buckets(), value.sum)
    return family
