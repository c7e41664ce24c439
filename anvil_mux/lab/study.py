"""Workloads under policies, side by side: what `anvil-mux simulate` runs and tells.

A ``Case`` is a workload and the configuration that it meets, a ``StudyRun`` that case under one policy. The
log of every run is checked against the invariants of group.py; what it breaks stands in ``StudyRun.wrong``.

Each engine makes answers as ``batching`` says. What loads and evictions take, policies learn from those that
they see, as in a program that has loaded what is resident in the beginning, and nothing else before; or they
know it all (``Case.known_costs``), as in one that has run for long.

A compose file says which backends a workload meets and how its own policy is set, and ``ModelNames`` which
of its models is asked for in place of each of the workload's. Without one every model has GPU 0 to itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from anvil_mux.config.config import Config, models_by_name
from anvil_mux.errors import ConfigError
from anvil_mux.host.engine import at_once
from anvil_mux.lab import recording, workload
from anvil_mux.lab.batching import Batching
from anvil_mux.lab.figures import Figures, fairness, figures
from anvil_mux.lab.fleet import SimulatedEngine
from anvil_mux.lab.simulate import Arrival, check, simulate
from anvil_mux.lab.workload import PROFILES, SEEDED, BadWorkload, ClientGroups, ModelNames, Workload
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.eviction import EVICTIONS, build_eviction
from anvil_mux.scheduler.policies import POLICIES, build_policy
from anvil_mux.telemetry import eventlog

LOGGED = "(as logged)"
"""The name, in place of a policy's, of what the running program itself did."""
SLACK_SECONDS = 1.0
"""Seconds that the threads of a running program may be late."""
CLIENTS = ClientGroups()
SAME_NAMES = ModelNames()
"""The compose file calls the models as the workload does."""


class AssumedBatching(NamedTuple):
    """How all engines make several answers at a time, as far as nothing is known of each."""

    slower_each: float = SimulatedEngine().slower_each
    """The part by which an answer takes longer for each other one that is made at the same time."""
    at_once: float | None = None
    """How many answers are made at the same time, at most; None: as many as its kind of engine does."""

    def of_backends(self, config: Config) -> dict[str, Batching]:
        """How the engine of each backend makes several answers at a time."""
        return {b.name: Batching(self.slower_each, self.at_once or at_once(b)) for b in config.backends}


USUAL_BATCHING = AssumedBatching()


@dataclass(frozen=True)
class Case:
    """A workload, the configuration that it meets, and the seed that it was made from."""

    workload: Workload
    config: Config
    seed: int = 0
    eviction: str = ""
    """The eviction that stands in ``config``, where several are compared."""
    batching: AssumedBatching = USUAL_BATCHING
    known_costs: bool = False
    """Whether policies know from the beginning what each load and eviction takes."""


@dataclass(frozen=True)
class StudyRun:
    """One case under one policy."""

    profile: str
    policy: str
    seed: int
    config: Config
    log: Sequence[Event]
    figures: Figures
    wrong: Sequence[str] | None
    """The broken invariants; None: not checked."""
    begins: Mapping[str, Any] = field(default_factory=dict)
    """The situation in which the log begins, as JSON."""
    eviction: str = ""
    """The eviction, where several are compared."""
    fairness: float | None = None
    """The answers of the client with the fewest over those of the one with the most; None: no clients."""
    known_costs: bool = False

    @property
    def way(self) -> str:
        """The policy, the eviction where several are compared, and whether it knew what swaps cost."""
        named = self.policy, self.eviction, "known costs" if self.known_costs else ""
        return ", ".join(filter(None, named))

    @property
    def title(self) -> str:
        seed = f", seed {self.seed}" if self.profile in SEEDED else ""
        return f"{self.profile}, {self.way}{seed}"

    def row(self) -> dict[str, Any]:
        violations = None if self.wrong is None else len(self.wrong)
        named = {"profile": self.profile, "policy": self.policy, "seed": self.seed}
        if self.eviction:
            named["eviction"] = self.eviction
        if self.known_costs:
            named["known_costs"] = True
        return {**named, **asdict(self.figures), "fairness": self.fairness, "violations": violations}


# What to run


def choose_profiles(names: str) -> tuple[str, ...]:
    """The profiles of a list with commas; ValueError says which are known."""
    chosen = tuple(PROFILES) if names == "all" else tuple(dict.fromkeys(names.split(",")))
    for name in chosen:
        if name not in PROFILES:
            raise ValueError(f"unknown profile {name!r}; known: {', '.join(PROFILES)}, all")
    return chosen


def choose_policies(names: str) -> tuple[str, ...]:
    """The policies of a list with commas; ``all``: those that need no settings."""
    if names == "all":
        return tuple(filter(_needs_nothing, POLICIES))
    chosen = tuple(dict.fromkeys(names.split(",")))
    for name in chosen:
        _needs_nothing(name)  # or is unknown
    return chosen


def _needs_nothing(policy: str) -> bool:
    try:
        return bool(build_policy(policy))
    except TypeError:
        return False


def choose_evictions(names: str) -> tuple[str, ...]:
    """The evictions of a list with commas, or ``all`` that are shipped; ValueError says which are known."""
    chosen = tuple(EVICTIONS) if names == "all" else tuple(dict.fromkeys(names.split(",")))
    for name in chosen:
        try:
            build_eviction(name)
        except TypeError as error:
            raise ValueError(f"{name}: {error}; a compose file can give it settings") from None
    return chosen


def under_evictions(case: Case, names: Iterable[str]) -> Iterator[Case]:
    """A case under each of these evictions, in place of its own configuration's."""
    for name in names:
        config = replace(case.config, eviction=name, eviction_settings={})
        yield replace(case, config=config, eviction=name)


def profiles(
    names: Iterable[str],
    seeds: int,
    config: Config | None = None,
    called: ModelNames = SAME_NAMES,
    clients: ClientGroups = CLIENTS,
) -> Iterator[Case]:
    """The cases of profiles; those that differ by seed once for each of 0 .. ``seeds`` - 1."""
    known = {**PROFILES, "clients": clients.workload}
    for name in names:
        for seed in range(seeds if name in SEEDED else 1):
            yield _case(known[name](seed), name, config, called, seed)


def trace(name: str, config: Config | None = None, called: ModelNames = SAME_NAMES) -> Case:
    """A workload file, or the shipped workload of this name."""
    return _case(workload.read(workload.find(name)), name, config, called)


def _case(made: Workload, name: str, config: Config | None, called: ModelNames, seed: int = 0) -> Case:
    if config is None:
        return Case(made, made.config(), seed)
    known = models_by_name(config.backends)
    missing = [model for model in made.load_seconds if called.name(model) not in known]
    if missing:
        asked = ", ".join(dict.fromkeys(map(called.name, missing)))
        served = ", ".join(dict.fromkeys(known.values()))
        options = " ".join(f"--model {model}=NAME" for model in missing)
        raise BadWorkload(
            f"{name} asks for {asked}; the backends serve {served} only: say with {options} which to take"
        )
    return Case(made.renamed(ModelNames({m: known[called.name(m)] for m in made.load_seconds})), config, seed)


def read_batching(text: str) -> dict[str, float]:
    """The fields of ``AssumedBatching`` in ``slower_each=0.1,at_once=4``, or a part of it; or ValueError."""
    settings: dict[str, float] = {}
    for setting in text.split(","):
        name, _, value = setting.partition("=")
        least = {"slower_each": 0.0, "at_once": 1.0}.get(name)
        if least is None:
            raise ValueError(f"unknown part {name!r}; known: {', '.join(AssumedBatching._fields)}")
        try:
            settings[name] = float(value)
        except ValueError:
            raise ValueError(f"{name} must be a number, not {value!r}") from None
        if not settings[name] >= least:
            raise ValueError(f"{name} must be at least {least:g}, not {value}")
    return settings


# Running it


def study(cases: Iterable[Case], policies: Sequence[str], keep_logs: bool = False) -> Iterator[StudyRun]:
    """Every case under every policy."""
    for case in cases:
        for policy in policies:
            done = run(case, policy)
            yield done if keep_logs else replace(done, log=())


def run(case: Case, policy: str) -> StudyRun:
    made, config = case.workload, _under(policy, case)
    ends = _Ends(made)
    engines, resident = made.engines(config), made.residents(config)
    costs = engines.costs(config)
    if not case.known_costs:
        first = {("", model, "stop") for model in made.resident}
        costs = [each for each in costs if (each.source, each.target, each.way) in first]
    log = simulate(
        config,
        made.requests,
        engines,
        resident=resident,
        follow=ends,
        costs=costs,
        answers=ends.answers,
        batching=case.batching.of_backends(config),
    )
    return StudyRun(
        profile=made.name,
        policy=policy,
        seed=case.seed,
        config=config,
        log=log,
        figures=figures(log, ends.count),
        wrong=check(log, config),
        eviction=case.eviction,
        fairness=fairness([ends.answers[client] for client in made.clients]),
        known_costs=case.known_costs,
    )


def _under(policy: str, case: Case) -> Config:
    """The case's configuration under ``policy``, without the settings of another one."""
    config = case.config
    if policy != config.policy:
        config = replace(config, policy=policy, policy_settings={})
    _check_settings(policy, config.policy_settings)
    return config


def _check_settings(policy: str, given: Mapping[str, object]) -> None:
    try:
        build_policy(policy, given)
    except TypeError as error:
        raise ConfigError([f"policy {policy}: {error}; a compose file can give it settings"]) from None


class _Ends:
    """A workload's ``follow`` that counts the requests that have ended."""

    def __init__(self, made: Workload) -> None:
        self.count = 0
        self.answers: Counter[Hashable] = Counter()
        """Sender -> its whole answers."""
        self._follow = made.follow and made.follow()

    def __call__(self, request: Arrival, now: float) -> Iterable[Arrival]:
        self.count += 1
        return self._follow(request, now) if self._follow else ()


# What really ran


@dataclass(frozen=True)
class Recording:
    """The event log of a running program."""

    name: str
    runs: Sequence[eventlog.LoggedRun]
    config: Config | None
    """A configuration in place of those in the log."""
    called: ModelNames = SAME_NAMES
    """The names in that configuration of the log's models."""

    def case(self, batching: AssumedBatching = USUAL_BATCHING) -> Case:
        """The clients of the log, with the backends of its last run."""
        logged = batching.of_backends(eventlog.config_of(self.runs[-1].header))
        made = recording.workload_of(self.runs, self.name, logged)
        case = _case(made, self.name, self._config_of(self.runs[-1]), self.called)
        return replace(case, batching=batching)

    def run(self, *, checked: bool) -> StudyRun:
        """The run of the program itself."""
        wrong = [line for one in self.runs for line in self._check(one)] if checked else None
        log, begins = _joined(eventlog.whole(self.runs)), self.runs[0].begins
        come_to = figures(log, begins=begins)
        return StudyRun(
            profile=self.name,
            policy=LOGGED,
            seed=0,
            config=self._config_of(self.runs[-1]),
            log=log,
            figures=come_to,
            wrong=wrong,
            begins=begins,
        )

    def _check(self, one: eventlog.LoggedRun) -> list[str]:
        is_its_own = self.config is None
        return check(one.events, self._config_of(one), SLACK_SECONDS, one.begins, is_its_own=is_its_own)

    def _config_of(self, one: eventlog.LoggedRun) -> Config:
        return self.config or eventlog.config_of(one.header)


def read_log(
    path: str, config: Config | None, warn: Callable[[str], object], called: ModelNames = SAME_NAMES
) -> Recording:
    runs = eventlog.read(path, warn)
    if not runs:
        raise eventlog.BadLog(f"{path}: is empty")
    return Recording(Path(path).name, runs, config, called)


def _joined(runs: Sequence[eventlog.LoggedRun]) -> list[Event]:
    """One log of several runs, each of which counts seconds and tickets from its own beginning."""
    log: list[Event] = []
    tickets = 0
    for one in runs:
        since, before = one.header["began"] - runs[0].header["began"], tickets
        for event in one.events:
            ticket = event.ticket and event.ticket + before
            log.append(event._replace(at=event.at + since, ticket=ticket))
            tickets = max(tickets, ticket)
    return log


# Telling it

HEAD = (
    "PROFILE", "POLICY", "RUNS", "REQUESTS", "SWAPS", "MAKESPAN", "WAIT", "RMS", "P50", "P95",
    "LONGEST", "SWAPPING", "BUSY", "FAILED", "SEVERED", "LEAST/MOST", "VIOLATIONS",
)  # fmt: skip


def table(runs: Iterable[StudyRun]) -> Iterator[tuple[str, ...]]:
    """A row for each profile, policy and eviction: means over the seeds; of ``LONGEST`` the longest."""
    groups: dict[tuple[str, str], list[StudyRun]] = {}
    for one in runs:
        groups.setdefault((one.profile, one.way), []).append(one)
    for names, group in groups.items():
        share = least_to_most([one.fairness for one in group])
        yield (*names, str(len(group)), *means([one.figures for one in group]), share, _violations(group))


def means(every: Sequence[Figures]) -> Iterator[str]:
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


def least_to_most(every: Sequence[float | None]) -> str:
    """The cell of ``LEAST/MOST``: the mean over the runs that have clients."""
    known = [each for each in every if each is not None]
    return f"{fmean(known):.2f}" if known else "-"


def _short(mean: float) -> str:
    return f"{mean:.1f}".removesuffix(".0")


def _violations(group: Sequence[StudyRun]) -> str:
    wrong = [one.wrong for one in group if one.wrong is not None]
    return str(sum(map(len, wrong))) if wrong else ""
