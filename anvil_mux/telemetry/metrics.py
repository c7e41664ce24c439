"""Events and access records -> Prometheus.

``observe`` is a fold over the GPU group's events, ``took`` notes what a phase of a swap took and ``served``
counts one finished request. They only add to plain numbers, because they are called for every request; the
numbers become metric families when somebody asks for them. What is true at this moment (states, lines,
leases, memory) is not counted along but read at the scrape (gauges.py). One thread at a time calls
``observe``, ``took`` and ``served`` (journal.py sees to that), any thread ``render``.

A metric is a row: its name, its text, the names of its labels, and its values by those of the labels.
A ``CountedRow`` is one that is counted in.

The phases of a swap belong to the model that goes through them: a victim's are drain, save (of its prompts),
evict, verify (until its memory is really free) and freeze; cooldown (the policy held the swap back, and the
victims served on), depends_on (services that its engine needs), load,
ready (until its engine answers), restore (of its prompts) and probe (a first token)
are those of the model that comes. Of one model they follow one another; of several victims they run side by
side. Events tell of cooldown and drain, host/levels.py of the others, those of attempts that failed too.

Labels are bounded: models are configured ids or "unknown", presets (a label of requests that name one, and of
no other) configured names, routes those of the allow-list or "other", reasons
those listed here.
"""

from __future__ import annotations

import math
import platform
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

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
from anvil_mux.host.seam import GpuUses
from anvil_mux.scheduler.costs import Cost, Footprint
from anvil_mux.scheduler.events import FOUND, Event
from anvil_mux.scheduler.status import Status
from anvil_mux.telemetry import gauges
from anvil_mux.telemetry.accesslog import Served
from anvil_mux.telemetry.gauges import NONE, SEVERAL, Labels
from anvil_mux.telemetry.usage import Usage

BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0),
)
"""A token takes milliseconds, a cold start of a large model minutes."""
UNKNOWN = "unknown"
TOKENS = ("prompt", "cached", "completion")
"""The kinds of tokens; each is of one: what was cached of a prompt is no longer counted as ``prompt``."""
BROKEN = "broken"
"""The code of a request whose answer began with a good status and was not whole."""
FORECASTS = ("hit", "missing", "unforeseen")
"""The kinds of tokens that a replica was thought to have cached, or had: both, only thought, only had."""
RESULTS = ("ok", "failed", "stuck", "cancelled")
"""The results of loads."""
ENDS_OF_LOADS = {
    "ready": "ok",
    "stopped": "failed",
    "standby": "failed",
    "stuck": "stuck",
    "cancelling": "cancelled",
}
"""Kind of an event -> the result of the load that it ends."""

_BOUNDS = [floatToGoString(bound) for bound in (*BUCKETS, math.inf)]  # type: ignore[no-untyped-call]


class Histogram:
    """Counts by bucket. ``prometheus_client.Histogram`` is ten times as dear: it locks, and searches."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.sum += value

    def sums(self) -> tuple[list[tuple[str, float]], float]:
        """Each upper bound and how many were at most that, and the sum of all."""
        buckets = zip(_BOUNDS, map(float, accumulate(self.counts)), strict=True)
        return list(buckets), self.sum


_Value = TypeVar("_Value")


class CountedRow(defaultdict[Labels, _Value]):
    """A metric that is counted in: its values by those of its labels; one with fewer lacks the last of these.

    ``kind``: float for counters, or Histogram.
    """

    def __init__(self, kind: Callable[[], _Value], name: str, text: str, labels: str) -> None:
        super().__init__(kind)
        self._row = name, text, labels.split()

    def collect(self) -> Metric:
        name, text, labels = self._row
        kind: Any = HistogramMetricFamily if self.default_factory is Histogram else CounterMetricFamily
        family = kind(name, text, labels=labels)
        for of, value in list(self.items()):
            family.add_metric(of, *(value.sums() if isinstance(value, Histogram) else (value,)))
        return family  # type: ignore[no-any-return]


class _OfRequests(NamedTuple):
    """The places where requests are counted for one model on one route; those that name a preset apart."""

    by_code: Counter[str]
    durations: Histogram
    waits: Histogram
    first_bytes: Histogram
    tokens: list[int]
    """Tokens of the kinds in ``TOKENS``."""


@dataclass(eq=False, slots=True)
class _LeavingBackend:
    """A backend on its way out: since when, and whether it was told to stop."""

    model: str
    target: str
    """The model that it makes room for; empty when it does for none."""
    cause: str
    since: float
    is_stopping: bool = False


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
        gpu_uses: Callable[[], GpuUses] = dict,
        round_trips: Callable[[], Mapping[str, float]] = dict,
        usage: Usage | None = None,
        circuits: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.usage = usage or Usage()
        self._status = status
        self._costs = costs
        self._footprints = footprints
        self._gpu_uses = gpu_uses
        self._round_trips = round_trips
        self._circuits = circuits
        self._models: dict[str, str] = {}
        self._rows: list[CountedRow[Any]] = []
        """The metrics that are counted, in the order in which they are told."""
        self._of_requests()
        self._of_swaps()
        self.know(config)
        self.registry = CollectorRegistry()
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(self)

    def _row(self, kind: Callable[[], _Value], name: str, text: str, labels: str) -> CountedRow[_Value]:
        made = CountedRow(kind, name, text, labels)
        self._rows.append(made)
        return made

    def _of_requests(self) -> None:
        """Make what requests are counted in."""
        self._by_route: dict[tuple[str, str, str], _OfRequests] = {}
        """The counts by model, route and preset: a finished request looks up no more than this one."""
        self._token_counts: dict[tuple[str, str], list[int]] = {}
        """Tokens of the kinds in ``TOKENS``, by model and preset of all that are known."""
        self._forecast_counts: dict[str, list[int]] = {}
        """Tokens of the kinds in ``FORECASTS``, by model of those with replicas."""
        self._requests = self._row(float, "anvil_requests", "Requests that ended.", "model route code preset")
        text = "From a request's head to the last byte of its answer."
        self._durations = self._row(Histogram, "anvil_request_duration_seconds", text, "model route preset")
        text = "From a request's head to the first byte of the engine's answer."
        self._first_bytes = self._row(Histogram, "anvil_time_to_first_byte_seconds", text, "model preset")
        text = "Time in the queue, until the model was resident."
        self._waits = self._row(Histogram, "anvil_queue_wait_seconds", text, "model preset")
        text = "Tokens of prompts (cached or not) and of answers."
        self._tokens = self._row(float, "anvil_tokens", text, "model kind preset")
        text = "Prompt tokens that were predicted to be cached at a replica, or were, by kind of outcome."
        self._forecasts = self._row(float, "anvil_cache_forecast_tokens", text, "model kind")
        text = "Requests of an API key that a backend served."
        self._key_requests = self._row(float, "anvil_key_requests", text, "key model")
        text = "Tokens of prompts (cached or not) and of answers, by API key."
        self._key_tokens = self._row(float, "anvil_key_tokens", text, "key model kind")
        text = "GPU time of an API key; requests that a backend serves at the same time share it."
        self._key_gpu = self._row(float, "anvil_key_gpu_seconds", text, "key model")
        text = "Requests that a fallback answered, by the error code of the model that was asked for."
        self._fallbacks = self._row(float, "anvil_fallbacks", text, "model to cause")

    def _of_swaps(self) -> None:
        """Make what loads and swaps are counted in, and what is known of those under way."""
        self._loads = self._row(float, "anvil_model_loads", "Loads, by result.", "model result")
        text = "Duration of loads, failed ones included."
        self._load_seconds = self._row(Histogram, "anvil_model_load_duration_seconds", text, "model result")
        text = (
            "Swaps (drain + evict + load), by standby level and result: ok, failed, stuck, cancelled or "
            "reprieved."
        )
        self._swaps = self._row(float, "anvil_swaps", text, "from to way result")
        text = "Duration of swaps, from the first drain to the end of the load."
        self._swap_seconds = self._row(Histogram, "anvil_swap_duration_seconds", text, "result")
        self._swap_seconds |= {(result,): Histogram() for result in RESULTS}
        text = "Time that the GPU spent in swaps, from the first drain to the end of the load."
        self._gpu_swap_seconds = self._row(float, "anvil_gpu_swap_seconds", text, "gpu")
        text = (
            "Duration of the phases of a swap: cooldown, drain, save, evict, verify, freeze, depends_on, "
            "load, ready, restore, probe."
        )
        self._phases = self._row(Histogram, "anvil_swap_phase_seconds", text, "model phase")
        text = "Weights that were read into the page cache while requests waited for the load to begin."
        self._read_ahead_bytes = self._row(float, "anvil_read_ahead_bytes", text, "model")
        self._read_ahead_seconds = self._row(float, "anvil_read_ahead_seconds", "What that took.", "model")
        text = "Requests that were ended because their client stopped reading."
        self._stalled = self._row(float, "anvil_stalled_clients", text, "model")
        text = "Requests that were severed (aborted) because a drain ended."
        self._severed = self._row(float, "anvil_severed_requests", text, "model")
        self._deferrals = self._row(
            float, "anvil_deferrals", "Swaps that were held back, by cause.", "model cause"
        )
        self._evictions = self._row(
            float, "anvil_evictions", "Models that were evicted, by cause.", "model cause"
        )
        self._reloads = self._row(
            float, "anvil_reloads", "Reloads of the configuration, by result.", "result"
        )
        self._reloads |= {("ok",): 0, ("failed",): 0}
        text = "Backends that were demoted, by their standby level afterwards."
        self._demotions = self._row(float, "anvil_demotions", text, "model way")
        self._gpus: dict[str, tuple[str, ...]] = {}
        """The GPUs of each backend."""
        self._swapped_until: dict[str, float] = {}
        """The end of the last swap that was counted, by GPU: what was under way at once counts once."""
        self._held: dict[str, tuple[int, float]] = {}
        """Model -> the first of its queue, and since when its swap is held back."""
        self._demoting: set[str] = set()
        self._leaving: dict[str, _LeavingBackend] = {}
        self._loading: dict[str, _LoadingBackend] = {}

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
                self._forecast_counts.setdefault(model, [0] * len(FORECASTS))
        self._models |= config.names
        self._gpus |= {backend.name: backend.gpu_names for backend in config.backends}
        for gpu in {name for names in self._gpus.values() for name in names}:
            self._gpu_swap_seconds[gpu,] += 0.0
        for model in set(self._models.values()) - known:
            self._know_preset(model, "")
            for counts in (self._severed, self._stalled, self._read_ahead_bytes, self._read_ahead_seconds):
                counts[model,] = 0
            for result in RESULTS:
                self._loads[model, result] = 0
        for model, preset in {(b.model, p.name) for b in config.backends for p in b.presets}:
            self._know_preset(model, preset)

    def _know_preset(self, model: str, preset: str) -> tuple[Histogram, Histogram, list[int]]:
        """The counts of a model and preset: of waits, of first bytes and of tokens."""
        labels = _labels(model, preset)
        tokens = self._token_counts.setdefault((model, preset), [0] * len(TOKENS))
        return self._waits[labels], self._first_bytes[labels], tokens

    # Requests

    def served(self, record: Served) -> None:
        """A request ended."""
        model = self._models.get(record.model, UNKNOWN)
        self.usage.served(model, record)
        route = record.route
        counts = self._by_route.get((model, route, record.preset)) or self._begun(model, route, record.preset)
        counts.by_code[BROKEN if record.is_broken else str(record.status)] += 1
        counts.durations.observe(record.seconds)
        if record.fallback_of:
            of = self._models.get(record.fallback_of, UNKNOWN)
            self._fallbacks[of, model, record.fallback_cause] += 1
        if record.code == ClientStalled.code:
            self._stalled[model,] += 1
        if record.backend:
            counts.waits.observe(record.waited)
            if record.first_byte:
                counts.first_bytes.observe(record.first_byte)
            prompt, cached = record.prompt_tokens, record.cached_tokens
            if prompt or record.tokens:
                tokens = counts.tokens
                tokens[0] += prompt - cached if prompt > cached else 0
                tokens[1] += cached
                tokens[2] += record.tokens
            if record.foreseen is not None and (forecast := self._forecast_counts.get(model)):
                thought = round(record.foreseen * prompt)
                forecast[0] += min(thought, cached)
                forecast[1] += max(thought - cached, 0)
                forecast[2] += max(cached - thought, 0)

    def _begun(self, model: str, route: str, preset: str) -> _OfRequests:
        """The counts of requests of which this is the first; no backend serves those for unknown models."""
        durations = self._durations[_labels(model, route, preset)]
        nobody = Histogram(), Histogram(), [0] * len(TOKENS)
        served = nobody if model == UNKNOWN else self._know_preset(model, preset)
        counts = self._by_route[model, route, preset] = _OfRequests(Counter(), durations, *served)
        return counts

    # Events and phases

    def took(self, model: str, phase: str, seconds: float) -> None:
        """A phase of a swap is over, however it ended."""
        self._phases[model, phase].observe(seconds)

    def read_ahead(self, model: str, size: int, seconds: float) -> None:
        """Weights were read before a load; ``size``: the bytes that were not in the page cache."""
        self._read_ahead_bytes[model,] += size
        self._read_ahead_seconds[model,] += seconds

    def observe(self, event: Event) -> None:
        """An event happened; they come in order."""
        if event.cause and event.cause.kind in FOUND:
            self._forget(event.backend)
        elif event.kind in ENDS_OF_LOADS and (loading := self._loading.pop(event.backend, None)):
            self._end_load(loading, event)
        elif fold := self._FOLDS.get(event.kind):
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

    def _on_draining(self, event: Event) -> None:
        cause = "swap" if event.target else event.cause.kind if event.cause else UNKNOWN
        if event.target:
            self._end_hold(event.target, event.at)
        self._leaving[event.backend] = _LeavingBackend(event.model, event.target, cause, event.at)

    def _on_stopping(self, event: Event) -> None:
        leaving = self._leaving.get(event.backend)
        if leaving:
            leaving.is_stopping = True
            self.took(event.model, "drain", event.seconds)

    def _on_demoting(self, event: Event) -> None:
        self._demoting.add(event.backend)

    def _on_gone(self, event: Event) -> None:
        if event.backend in self._demoting:  # it had left its GPUs before
            self._demoting.remove(event.backend)
            way = "stop" if event.kind == "stopped" else event.way
            self._demotions[event.model, NONE if event.cause and event.kind == "standby" else way] += 1
            return
        leaving = self._leaving.get(event.backend)
        if leaving is None or not leaving.is_stopping:
            self._evictions[event.model, "died"] += event.kind == "stopped"  # else it was in standby
            self._leaving.pop(event.backend, None)
        else:
            self._evictions[event.model, leaving.cause] += 1
            if not leaving.target:
                del self._leaving[event.backend]

    def _on_staying(self, event: Event) -> None:
        """The swap that a victim was to leave for does not come about."""
        leaving = self._leaving.pop(event.backend, None)
        if leaving and leaving.target:
            others = self._leaving_for(leaving.target)
            result = "reprieved" if event.kind == "ready" else "stuck"
            self._swaps[_source([leaving, *others]), leaving.target, NONE, result] += 1

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
        "ready": _on_staying,
        "draining": _on_draining,
        "evicting": _on_stopping,
        "demoting": _on_demoting,
        "stopped": _on_gone,
        "standby": _on_gone,
        "stuck": _on_staying,
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
            self.took(target, "cooldown", now - held[1])

    def _leaving_for(self, target: str) -> list[_LeavingBackend]:
        """Takes out the victims of the swap to ``target``."""
        names = [name for name, each in self._leaving.items() if each.target == target]
        return [self._leaving.pop(name) for name in names]

    def _end_load(self, loading: _LoadingBackend, event: Event) -> None:
        result, now = ENDS_OF_LOADS[event.kind], event.at
        way = event.way if result == "ok" else loading.way
        if result == "cancelled":
            self._leaving[event.backend] = _LeavingBackend(event.model, "", result, now, is_stopping=True)
        self._loads[loading.model, result] += 1
        self._load_seconds[loading.model, result].observe(now - loading.since)
        self._swaps[_source(loading.victims), loading.model, way or NONE, result] += 1
        self._swap_seconds[result,].observe(now - loading.begun)
        for gpu in self._gpus.get(event.backend, ()):
            counted = max(loading.begun, self._swapped_until.get(gpu, loading.begun))
            self._gpu_swap_seconds[gpu,] += max(now - counted, 0.0)
            self._swapped_until[gpu] = now

    # The scrape

    def collect(self) -> Iterator[Metric]:
        """Everything counted so far, and the state of this moment."""
        info = {"version": __version__, "python": platform.python_version()}
        yield InfoMetricFamily("anvil_build", "The version of anvil-mux and of its Python.", info)
        self._sum_up()
        yield from [row.collect() for row in self._rows]
        status = self._status()
        for rows in (
            gauges.of_costs(self._costs(), set(self._models.values())),
            gauges.of_footprints(self._footprints()),
            gauges.of_models(status),
            gauges.of_gpus(status, self._gpu_uses()),
            gauges.of_hosts(status, self._round_trips()),
            gauges.of_pause(status),
            gauges.of_circuits(self._circuits()),
        ):
            yield from rows

    def describe(self) -> Iterable[Metric]:
        """Describe nothing: registering must not ask a multiplexer that is not there yet for its status."""
        return ()

    def _sum_up(self) -> None:
        """Bring those rows up to date that finished requests are not counted in one by one."""
        for (model, route, preset), counts in list(self._by_route.items()):
            for code, count in list(counts.by_code.items()):
                self._requests[_labels(model, route, code, preset)] = count
        for (model, preset), tokens in list(self._token_counts.items()):
            for kind, count in zip(TOKENS, tokens, strict=True):
                self._tokens[_labels(model, kind, preset)] = count
        for model, tokens in list(self._forecast_counts.items()):
            for kind, count in zip(FORECASTS, tokens, strict=True):
                self._forecasts[model, kind] = count
        for (key, model), used in self.usage.since_start().items():
            self._key_requests[key, model] = used["requests"]
            self._key_gpu[key, model] = used["gpu_seconds"]
            prompt, cached = used["prompt_tokens"], used["cached_tokens"]
            of_kinds = max(prompt - cached, 0), cached, used["tokens"]
            self._key_tokens |= {(key, model, kind): n for kind, n in zip(TOKENS, of_kinds, strict=True)}


def _source(victims: list[_LeavingBackend]) -> str:
    models = {victim.model for victim in victims}
    return NONE if not models else models.pop() if len(models) == 1 else SEVERAL


def _labels(*labels: str) -> Labels:
    """Labels of which the last is a preset; requests that name none do not have it."""
    return labels if labels[-1] else labels[:-1]
