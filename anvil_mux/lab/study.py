"""Workloads under policies, side by side: what `anvil-mux simulate` runs.

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
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from anvil_mux.config.config import Config, models_by_name
from anvil_mux.errors import ConfigError
from anvil_mux.lab import workload
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import USUAL_BATCHING, AssumedBatching
from anvil_mux.lab.figures import Figures, fairness, figures
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.lab.workload import PROFILES, SEEDED, BadWorkload, ClientGroups, ModelNames, Workload
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.memory import EVICTIONS, build_eviction
from anvil_mux.scheduler.policies import POLICIES, build_policy

CLIENTS = ClientGroups()
SAME_NAMES = ModelNames()
"""The compose file calls the models as the workload does."""


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
    for name in (chosen := listed(names, PROFILES)):
        if name not in PROFILES:
            raise ValueError(f"unknown profile {name!r}; known: {', '.join(PROFILES)}, all")
    return chosen


def choose_policies(names: str) -> tuple[str, ...]:
    """The policies of a list with commas; ``all``: those that need no settings."""
    chosen = listed(names, POLICIES)
    needs_nothing = tuple([name for name in chosen if _needs_nothing(name)])  # or is unknown
    return needs_nothing if names == "all" else chosen


def _needs_nothing(policy: str) -> bool:
    try:
        return bool(build_policy(policy))
    except TypeError:
        return False


def choose_evictions(names: str) -> tuple[str, ...]:
    """The evictions of a list with commas, or ``all`` that are shipped; ValueError says which are known."""
    for name in (chosen := listed(names, EVICTIONS)):
        try:
            build_eviction(name)
        except TypeError as error:
            raise ValueError(f"{name}: {error}; a compose file can give it settings") from None
    return chosen


def listed(names: str, every: Iterable[str]) -> tuple[str, ...]:
    """The names of a list with commas, each once; ``all``: every one."""
    return tuple(dict.fromkeys(every if names == "all" else names.split(",")))


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
            yield case_of(known[name](seed), name, config, called, seed)


def trace(name: str, config: Config | None = None, called: ModelNames = SAME_NAMES) -> Case:
    """A workload file, or the shipped workload of this name."""
    return case_of(workload.read(workload.find(name)), name, config, called)


def case_of(made: Workload, name: str, config: Config | None, called: ModelNames, seed: int = 0) -> Case:
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
    try:
        build_policy(policy, config.policy_settings)
    except TypeError as error:
        raise ConfigError([f"policy {policy}: {error}; a compose file can give it settings"]) from None
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    try:
        build_eviction(config.eviction, config.eviction_settings)
    except (TypeError, ValueError) as error:  # of a log from elsewhere
        raise ConfigError([f"{error}; --eviction or a compose file can name another"]) from None
    return config


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
