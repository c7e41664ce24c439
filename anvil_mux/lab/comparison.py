"""The same script in virtual time, beside what was measured, and where the difference comes from.

What is simulated is what could be known beforehand: the configuration, how long each model loads and is
evicted, and how long each answer takes alone and beside others (engines.py), as seen in the warm-up.

The difference is then taken apart by what was measured: first the answers of the simulation last as long as
the real ones did, then its loads and evictions too. What is left is of what a simulation does not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from anvil_mux.config.config import Config, models_by_name
from anvil_mux.errors import ConfigError
from anvil_mux.lab.engines import Batching, EnginePace, SeenEngines, SwapTimes, mean_of_all
from anvil_mux.lab.figures import Figures, figures
from anvil_mux.lab.player import PlayedAnswer
from anvil_mux.lab.prompts import Prompt
from anvil_mux.lab.script import Script
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.lab.watching import ToldLog
from anvil_mux.scheduler.events import Event

RequestKey = tuple[str, int]
"""A model, and the number of a request for it."""


def _mean_expected(expected: Mapping[str, Sequence[float]], seen: Mapping[str, Sequence[float]]) -> float:
    """The mean that was expected of what was seen: each backend as often as it was seen."""
    known = [
        (fmean(expected.get(name) or seconds), len(seconds)) for name, seconds in seen.items() if seconds
    ]
    return sum(mean * count for mean, count in known) / max(sum(count for _, count in known), 1)


@dataclass(frozen=True)
class SimulatedReplay:
    """A script in virtual time."""

    figures: Figures
    log: Sequence[Event]
    answer_seconds: float
    """The mean time of an answer."""


@dataclass(frozen=True)
class Comparison:
    """A measured run beside the simulation of the same script; seconds are mean waits, or other means."""

    measured: Figures
    simulated: SimulatedReplay
    with_answers: Figures
    """The same, with answers that last as long as the real ones did."""
    with_swaps: Figures
    """That, with the loads and evictions that were seen as well."""
    answer_seconds: tuple[float, float]
    """The time of an answer: as expected, and as seen. So are the two below."""
    load_seconds: tuple[float, float]
    evict_seconds: tuple[float, float]

    @property
    def difference(self) -> float:
        """How much longer the mean wait really was, as a part of the simulated one."""
        expected = self.simulated.figures.wait_mean_seconds
        return (self.measured.wait_mean_seconds - expected) / expected if expected else 0.0

    @property
    def waits(self) -> tuple[float, float, float, float]:
        """The mean waits: simulated, with the answers that were seen, with the swaps too, and measured."""
        expected, seen = self.simulated.figures, self.measured
        a, b, c, d = [each.wait_mean_seconds for each in (expected, self.with_answers, self.with_swaps, seen)]
        return a, b, c, d

    def to_json(self) -> dict[str, Any]:
        """The difference as an object of JSON: seconds of the mean wait by where they come from."""
        expected, answers, swaps, seen = self.waits
        pairs = ("answer_seconds", "load_seconds", "evict_seconds")
        return {
            "ratio": self.difference,
            "of_answers_seconds": answers - expected,
            "of_swaps_seconds": swaps - answers,
            "of_others_seconds": seen - swaps,
            **{name: dict(zip(("expected", "seen"), getattr(self, name), strict=True)) for name in pairs},
        }

    def sentences(self) -> Iterator[str]:
        """The difference in words, by where it comes from."""
        waits = self.waits
        yield (
            f"mean wait {waits[3]:.2f} s, simulated {waits[0]:.2f} s ({self.difference:+.0%}). "
            "Of the difference:"
        )
        expected, seen = self.answer_seconds
        yield (
            f"{waits[1] - waits[0]:+.2f} s: an answer took {seen:.3f} s, "
            f"and {expected:.3f} s by its pace in the warm-up"
        )
        loads, evictions = self.load_seconds, self.evict_seconds
        yield (
            f"{waits[2] - waits[1]:+.2f} s: a load took {loads[1]:.2f} s, {loads[0]:.2f} s were expected, "
            f"and an eviction {evictions[1]:.2f} s, expected {evictions[0]:.2f} s"
        )
        yield f"{waits[3] - waits[2]:+.2f} s: what is not simulated, as requests of other clients"


def served_names(config: Config, models: Iterable[str]) -> dict[str, str]:
    """The models of a compose file by the names that a script asks for; ConfigError if it lacks one."""
    known = models_by_name(config.backends)
    models = list(models)
    if missing := [model for model in models if model not in known]:
        raise ConfigError([f"the compose file serves {', '.join(known)}, and not {', '.join(missing)}"])
    return {model: known[model] for model in models}


def compare(
    script: Script,
    config: Config,
    *,
    paces: Mapping[str, EnginePace],
    expected: SwapTimes,
    seen: SwapTimes,
    told: ToldLog,
    answers: Sequence[PlayedAnswer],
) -> Comparison:
    """Hold a measured run against the simulation of its script."""
    whole = sorted([a for a in answers if a.id in told.served and a.status == 200], key=lambda each: each.due)
    numbers: Counter[str] = Counter()
    really: dict[RequestKey, float] = {}
    for answer in whole:
        really[answer.model, numbers[answer.model]] = told.served[answer.id]
        numbers[answer.model] += 1
    # What the feed says first may be a moment old: who loads in it was ready when the run began.
    there = ("ready", "loading")
    resident = [name for name, each in told.begins["backends"].items() if each["state"] in there]
    virtual = _VirtualReplay(script, config, paces, resident, served_names(config, script.models))
    as_expected = SeenEngines(expected.or_else(seen), in_order=False)
    simulated = virtual.run(as_expected)
    return Comparison(
        measured=figures(told.events, begins=told.begins),
        simulated=simulated,
        with_answers=virtual.run(as_expected, really).figures,
        with_swaps=virtual.run(SeenEngines(seen.or_else(expected), in_order=True), really).figures,
        answer_seconds=(simulated.answer_seconds, _mean(really.values())),
        load_seconds=(_mean_expected(expected.loads, seen.loads), mean_of_all(seen.loads)),
        evict_seconds=(_mean_expected(expected.evictions, seen.evictions), mean_of_all(seen.evictions)),
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0


@dataclass(frozen=True)
class _VirtualReplay:
    """A script in virtual time, on engines of a known pace."""

    script: Script
    config: Config
    paces: Mapping[str, EnginePace]
    resident: Sequence[str]
    names: Mapping[str, str]
    """The models of the configuration by the names that the script asks for."""

    def run(self, engines: SeenEngines, answers: Mapping[RequestKey, float] | None = None) -> SimulatedReplay:
        """Simulate; with ``answers``, each of them takes as long as they say, beside whatever others."""
        follow = self.script.follow()
        numbers: Counter[str] = Counter()
        really = answers or {}

        def arrival(request: Prompt) -> Arrival:
            key = request.model, numbers[request.model]
            numbers[request.model] += 1
            seconds = really.get(key, self.paces[request.model].seconds(request.output))
            name = self.names[request.model]
            return Arrival(request.at, name, seconds, request.patience, sender=(key, request))

        def later(ended: Arrival, now: float) -> Iterable[Arrival]:
            assert isinstance(ended.sender, tuple)
            _, request = ended.sender
            return map(arrival, follow(request, now))

        log = simulate(
            self.config,
            list(map(arrival, sorted(self.script.first, key=lambda each: each.at))),
            engines,
            resident=self.resident,
            follow=later,
            costs=engines.means.costs(self.config),
            batching=self._batching() if answers is None else {},
        )
        begun = {event.ticket: event.at for event in log if event.kind == "leased"}
        took = [event.at - begun[event.ticket] for event in log if event.kind == "released"]
        return SimulatedReplay(figures(log), log, _mean(took))

    def _batching(self) -> dict[str, Batching]:
        """Each backend's engine as it was measured to make several answers at a time."""
        of_model = {self.names[model]: pace.batching for model, pace in self.paces.items()}
        return {b.name: of_model[b.model] for b in self.config.backends if b.model in of_model}
