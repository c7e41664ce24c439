"""Routing policies as users write them -> ``routing.Routing``; all problems at once.

A policy is a mapping: ``filters`` (a list of steps), ``selector`` (one step), and ``metrics``: names of its
own for metrics with settings, or a list of metrics to be shown when a choice is explained. A step is its
name, or ``{name: {setting: value}}``. Under the keys neutral, prefill and decode a policy may hold a pipeline
for each infer type instead. What may stand where is read off the arguments of the steps in routing.py: there
is no second table.

Switches stand beside the pipelines of a policy, and hold for all of them. ``mode`` says for which mode it is
written, and ``predict_prefill`` whether the input that replicas have to compute falls with time
(in_flight.py). ``like`` takes the pipelines of a policy that is shipped, and two more switches change them,
as Llumnix's flags do: ``cache_aware`` puts what is cached where in front of the metrics by which prompts are
placed, and ``top_k`` takes any of the best few.

The policies that are shipped (routing.yaml) are read by the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from inspect import Parameter, signature
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from anvil_mux.clock import MOST_COUNT
from anvil_mux.config.config import INFER_TYPES
from anvil_mux.config.kinds import COUNT, FLAG, TEXT, Problem, nearest, one_of, show
from anvil_mux.config.values import ROUTING_NAME
from anvil_mux.routing import routing
from anvil_mux.routing.routing import Filter, Metric, Pipeline, Routing, Selector

Path = tuple[str, ...]

PARTS = ("metrics", "filters", "selector")

CACHE_LOCALITY = {"cache_aware_all_prefills_tokens_num": {"min_tokens": 1024}}
"""The metric of ``cache_aware``, as a step: Llumnix looks for shorter prompts in no cache."""
SWITCHES = {"mode": one_of("lite", "full"), "cache_aware": FLAG, "predict_prefill": FLAG}
KEYS = ("like", "top_k", *SWITCHES)
HARMLESS = {"selector": "round_robin"}
"""A policy with which to look for further problems, where what it is like cannot be read."""


def text() -> str:
    """The policies that come with the program, as they are written."""
    return files("anvil_mux.routing").joinpath("routing.yaml").read_text(encoding="utf-8")


@cache
def shipped() -> dict[str, Any]:
    """The same policies, read."""
    found = yaml.safe_load(text())
    assert isinstance(found, dict)
    return found


def build(name: str, own: Mapping[str, object] | None = None) -> Routing:
    """The policy called ``name``, one of ``own`` or one that is shipped; ValueError if there is a problem."""
    known = {**shipped(), **(own or {})}
    if name not in known:
        raise ValueError(f"unknown routing policy {name}; {nearest(name, known)}")
    made, problems = compile(name, known[name])
    if problems:
        raise ValueError("; ".join(f"{'.'.join((name, *path))}: {text}" for path, text in problems))
    return made


def compile(name: str, written: object) -> tuple[Routing, list[Problem]]:
    """The policy as far as it could be read, and all that is wrong with it."""
    steps, switches, problems = _switches(written)
    mode, predict = switches.get("mode", ""), switches.get("predict_prefill", False)
    reading = _PolicyReader(mode, problems)
    pipelines: dict[str, Pipeline] = {}
    if not isinstance(steps, Mapping) or not steps:
        reading.problem((), f"must hold metrics, filters and a selector, not {show(written)}")
    elif set(steps) & set(INFER_TYPES):
        for key, value in steps.items():
            if key in INFER_TYPES:
                pipelines[key] = reading.pipeline(value, (key,))
            else:
                reading.problem((str(key),), f"stands beside infer types; {nearest(str(key), INFER_TYPES)}")
    else:
        pipelines = dict.fromkeys(INFER_TYPES, reading.pipeline(steps, ()))
    return Routing(name, pipelines, mode, predict), reading.problems


@dataclass
class _PolicyReader:
    """One policy being read."""

    mode: str
    """The mode that the policy is written for; "": either."""
    problems: list[Problem]
    needs: set[str] = field(default_factory=set)
    """Settings of a service without which the pipeline cannot work."""
    named: dict[str, Metric | None] = field(default_factory=dict)
    """Metrics by the pipeline's own names; None: there was a problem with it."""
    used: dict[Metric, None] = field(default_factory=dict)

    def problem(self, path: Path, text: str) -> None:
        self.problems.append((path, text))

    def pipeline(self, written: object, path: Path) -> Pipeline:
        self.named, self.used, self.needs = {}, {}, set()
        selector = Selector("none", partial(routing.round_robin))
        if not isinstance(written, Mapping):
            self.problem(path, f"must hold metrics, filters and a selector, not {show(written)}")
            return Pipeline(selector)
        for key in written:
            if key not in PARTS:
                self.problem((*path, str(key)), f"unknown key; {nearest(str(key), PARTS)}")
        self._metrics(written.get("metrics"), (*path, "metrics"))
        filters, failover = self._filters(written.get("filters"), (*path, "filters"))
        if "selector" in written:
            selector = self._selector(written["selector"], (*path, "selector")) or selector
        else:
            self.problem(path, f"has no selector; known: {', '.join(routing.SELECTORS)}")
        return Pipeline(selector, filters, failover, tuple(self.used), frozenset(self.needs))

    # The parts

    def _metrics(self, written: object, path: Path) -> None:
        match written:
            case None:
                pass
            case list():
                for index, each in enumerate(written):
                    self._metric(each, (*path, str(index)))
            case dict():
                for name, each in written.items():
                    if not ROUTING_NAME.fullmatch(str(name)):
                        self.problem((*path, str(name)), "a name may hold letters, digits, . _ + and - only")
                    elif name in routing.METRICS:
                        self.problem((*path, str(name)), "is the name of a metric already; call it otherwise")
                    else:
                        self.named[str(name)] = self._named(str(name), each, (*path, str(name)))
            case _:
                self.problem(path, f"must be a list, or names for metrics, not {show(written)}")

    def _named(self, name: str, written: object, path: Path) -> Metric | None:
        metric = self._metric(written, path)
        if metric is None:
            return None
        self.used.pop(metric, None)
        metric = Metric(name, metric.of, metric.higher)
        self.used[metric] = None
        return metric

    def _metric(self, written: object, path: Path) -> Metric | None:
        if isinstance(written, str) and written in self.named:
            return self.named[written]
        step = self._step(written, path, "metric", routing.METRICS, tuple(self.named))
        if step is None:
            return None
        name, function, given = step
        if self.mode == "lite" and name not in routing.LITE | routing.MADE_OF_OTHERS:
            lite = " or ".join(sorted(routing.LITE))
            self.problem(path, f"is {name}, which the mode lite of this policy does not know: use {lite}")
        if need := routing.NEEDS.get(name):
            self.needs.add(need)
        metric = Metric(name, _bound(function, given), name in routing.HIGHER)
        for known in self.used:
            if known.name == name and _same(known.of, metric.of):
                return known
        self.used[metric] = None
        return metric

    def _filters(
        self, written: object, path: Path
    ) -> tuple[tuple[Filter, ...], tuple[Callable[..., Any], ...]]:
        filters, failover = [], []
        if not isinstance(written, (list, type(None))):
            self.problem(path, f"must be a list of filters, not {show(written)}")
            written = None
        for index, each in enumerate(written or ()):
            step = self._step(each, (*path, str(index)), "filter", routing.FILTERS)
            if step is None:
                continue
            name, function, given = step
            if function is routing.failover:
                failover.append(_bound(function, given))
            else:
                skipped = name in routing.SKIPPED and not given.pop("in_fallback", False)
                shown = f"{name} {given['metric'].name}" if isinstance(given.get("metric"), Metric) else name
                filters.append(Filter(shown, _bound(function, given), name in routing.MARKING, skipped))
        return tuple(filters), tuple(failover)

    def _selector(self, written: object, path: Path) -> Selector | None:
        step = self._step(written, path, "selector", routing.SELECTORS)
        if step is None:
            return None
        name, function, given = step
        return Selector(name, _bound(function, given))

    # A step and its settings

    def _step(
        self, written: object, path: Path, what: str, known: Mapping[str, Any], own: tuple[str, ...] = ()
    ) -> tuple[str, Callable[..., Any], dict[str, Any]] | None:
        """Name, function and settings of a step; None if it cannot be read."""
        match written:
            case str() as name:
                given: object = {}
            case dict() if len(written) == 1:
                name, given = next(iter(written.items()))
            case _:
                self.problem(path, f"must be a {what}, or {{{what}: its settings}}, not {show(written)}")
                return None
        if name not in known:
            self.problem(path, f"unknown {what} {name}; {nearest(str(name), (*own, *known))}")
            return None
        if not isinstance(given, (dict, type(None))):
            self.problem((*path, name), f"must hold settings, not {show(given)}")
            return None
        before = len(self.problems)
        settings = self._settings(name, known[name], given or {}, path if given == {} else (*path, name))
        return None if len(self.problems) > before else (name, known[name], settings)

    def _settings(
        self, name: str, function: Callable[..., Any], given: Mapping[str, object], path: Path
    ) -> dict[str, Any]:
        wanted = _parameters(function)
        for key in given:
            if key not in wanted:
                known = nearest(str(key), wanted) if wanted else "it has none"
                self.problem((*path, str(key)), f"unknown setting of {name}; {known}")
        taken = {}
        for key, (kind, required) in wanted.items():
            if key in given:
                taken[key] = self._value(given[key], kind, (*path, key))
            elif required:
                self.problem(path, f"{name} needs the setting {key}")
        return taken

    def _value(self, value: Any, kind: Any, path: Path) -> Any:
        if kind is Metric:
            return self._metric(value, path)
        if kind is Selector:
            return self._selector(value, path)
        if kind == tuple[Metric, ...]:
            return self._ranking(value, path)
        if kind == Mapping[Metric, float]:
            return self._weights(value, path)
        return self._plain(value, kind, path)

    def _plain(self, value: object, kind: Any, path: Path) -> Any:
        try:
            return _reader(kind)(value)
        except ValueError as error:
            self.problem(path, str(error))
            return None

    def _ranking(self, value: object, path: Path) -> tuple[Metric | None, ...]:
        if not isinstance(value, list) or not value:
            self.problem(path, f"must be a list of metrics, not {show(value)}")
            return ()
        return tuple([self._metric(each, (*path, str(index))) for index, each in enumerate(value)])

    def _weights(self, value: object, path: Path) -> dict[Metric, float]:
        if not isinstance(value, dict) or not value:
            self.problem(path, f"must hold {{metric: weight}}, not {show(value)}")
            return {}
        weights = {}
        for name, weight in value.items():
            metric = self._metric(name, (*path, str(name)))
            number = self._plain(weight, float, (*path, str(name)))
            if metric and number is not None:
                weights[metric] = number
        return weights


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """Setting -> (its type, whether it must be given)."""
    hints = get_type_hints(function)
    return {
        name: (hints[name], parameter.default is Parameter.empty)
        for name, parameter in signature(function).parameters.items()
        if parameter.kind is Parameter.KEYWORD_ONLY
    }


def _reader(kind: Any) -> Callable[[Any], Any]:
    """The reader of values of this type, which may also be written as text: variables give that."""
    if get_origin(kind) is Literal:
        return one_of(*get_args(kind)).read
    return {bool: FLAG.read, int: COUNT.read, str: TEXT.read, float: _read_number}[kind]


def _read_number(value: Any) -> float:
    try:
        number = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not 0 <= number <= MOST_COUNT:
        raise ValueError(f"must be a number of at least 0, not {show(value)}")
    return number


def _bound(function: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    return partial(function, **given) if given else function


def _same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    if isinstance(one, partial) and isinstance(other, partial):
        return one.func is other.func and one.keywords == other.keywords
    return one is other


# Switches


def _switches(written: object) -> tuple[object, dict[str, Any], list[Problem]]:
    """The pipelines of a policy without its switches, as it is written or as they make them; the switches
    that can be read; and what is wrong with the others.
    """
    if not isinstance(written, Mapping):
        return written, {}, []
    pipelines = {key: value for key, value in written.items() if key not in KEYS}
    problems = _problems_of_likeness(written, pipelines)
    said = {}
    for key in [key for key in SWITCHES if key in written]:
        try:
            said[key] = SWITCHES[key].read(written[key])
        except ValueError as error:
            problems.append(((key,), str(error)))
    if problems:
        return HARMLESS if "like" in written else pipelines, {}, problems
    if "like" in written:
        pipelines = dict(shipped()[written["like"]])
        said = {"mode": pipelines.pop("mode", ""), **said}
    try:
        if said.get("cache_aware"):
            pipelines = _cache_aware(pipelines, said.get("mode", ""))
        if "top_k" in written:
            pipelines = _top_k(pipelines, written["top_k"])
    except ValueError as error:
        problems.append(((), str(error)))
    return pipelines, said, problems


def _problems_of_likeness(written: Mapping[str, Any], pipelines: Mapping[str, Any]) -> list[Problem]:
    if "like" not in written:
        return []
    if (like := str(written["like"])) not in shipped():
        return [(("like",), f"no policy {like} is shipped; {nearest(like, shipped())}")]
    if pipelines:
        key = str(next(iter(pipelines)))
        return [((key,), f"stands beside like: {written['like']}, which has all of that")]
    return []


def _by_infer_type(pipelines: Mapping[str, Any]) -> dict[str, Any]:
    """A policy with a pipeline for each infer type, also where one is written for all of them."""
    return dict(pipelines) if set(pipelines) & set(INFER_TYPES) else dict.fromkeys(INFER_TYPES, pipelines)


def _cache_aware(pipelines: Mapping[str, Any], mode: str) -> dict[str, Any]:
    if mode == "lite":
        raise ValueError("cache_aware goes with the mode full, and this policy is written for lite")
    made = _by_infer_type(pipelines)
    for kind in [kind for kind in made if kind != "decode"]:
        by = _metric_selector(made[kind], "cache_aware")["by"]
        made[kind] = _with(made[kind], by=[CACHE_LOCALITY, *by])
    return made


def _top_k(pipelines: Mapping[str, Any], value: object) -> dict[str, Any]:
    made = _by_infer_type(pipelines)
    for kind, pipeline in made.items():
        _metric_selector(pipeline, "top_k")
        made[kind] = _with(pipeline, top_k=value)
    return made


def _metric_selector(pipeline: Any, switch: str) -> dict[str, Any]:
    """The settings of the selector ``metric`` of a pipeline; ValueError if it has none."""
    selector = pipeline.get("selector") if isinstance(pipeline, dict) else None
    settings = selector.get("metric") if isinstance(selector, dict) else None
    if not isinstance(settings, dict) or not isinstance(settings.get("by"), list):
        raise ValueError(f"{switch} changes the selector `metric`, and this policy has another one")
    return settings


def _with(pipeline: Any, **settings: object) -> dict[str, Any]:
    return {**pipeline, "selector": {"metric": {**pipeline["selector"]["metric"], **settings}}}
