"""The part of a reload that follows from the configurations alone, done before another one takes effect.

Most of a reload is to compare thousands of backends, and to make tables of them. That needs nothing of what
runs, so whoever drives the scheduler may have it done beforehand, without the multiplexer's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from anvil_mux.config.change import Change, compare
from anvil_mux.config.config import Backend, Config, Gpu
from anvil_mux.routing import pipeline
from anvil_mux.routing.routing import Routing
from anvil_mux.scheduler.eviction import Eviction, build_eviction
from anvil_mux.scheduler.policies import Policy, build_policy

SHARED_SETTINGS = (
    "policy",
    "policy_settings",
    "eviction",
    "eviction_settings",
    "routing",
    "routing_policies",
    "routing_mode",
    "drain_timeout",
    "home_after",
    "queue_timeout",
    "max_wait",
)
"""The fields of ``Config`` by which every GPU group and every model are built."""


class Prepared(NamedTuple):
    """A configuration that is to take effect, with what follows from it and from the one before."""

    before: Config
    """The configuration that it is to replace; if another one holds by then, this is prepared anew."""
    config: Config
    change: Change
    different: tuple[str, ...]
    """The backends that come, go, or are described otherwise, be it only by settings of ours."""
    different_gpus: frozenset[str]
    concerns_all: bool
    """Whether a setting has changed by which every GPU group is built."""
    wanted: Mapping[str, Backend]
    places: Mapping[str, int]
    """Backend -> its place in the configuration."""
    gpus: Mapping[str, Gpu]
    """All GPUs of all hosts, by the names that they have among them."""
    served: frozenset[str]
    """The models that backends serve."""
    budgets: Mapping[str, int | None]
    """Host -> its memory for engines, of the hosts of which that is new."""
    policy: Policy
    eviction: Eviction
    routings: Mapping[str, Routing]
    """The routing policies that backends name, and that of the whole."""


def prepare(before: Config, config: Config) -> Prepared:
    """Prepare ``config``, which is to replace ``before``. Any thread may do so."""
    change = compare(before, config)
    old, wanted = _by_name(before.backends), _by_name(config.backends)
    otherwise = [name for name, each in wanted.items() if old.get(name) != each]
    old_gpus = {gpu.name: gpu for gpu in before.gpus}
    gpus = {gpu.name: gpu for gpu in config.gpus}
    resized = [name for name in (*old_gpus, *gpus) if old_gpus.get(name) != gpus.get(name)]
    return Prepared(
        before=before,
        config=config,
        change=change,
        different=tuple(dict.fromkeys((*change.removed, *change.changed, *otherwise))),
        different_gpus=frozenset(resized),
        concerns_all=any(getattr(before, name) != getattr(config, name) for name in SHARED_SETTINGS),
        wanted=wanted,
        places={name: place for place, name in enumerate(wanted)},
        gpus=gpus,
        served=frozenset(each.model for each in config.backends),
        budgets=_budgets(before, config),
        policy=build_policy(config.policy, config.policy_settings),
        eviction=build_eviction(config.eviction, config.eviction_settings),
        routings=_routings(config),
    )


def _routings(config: Config) -> dict[str, Routing]:
    names = dict.fromkeys((config.routing, *filter(None, [each.routing for each in config.backends])))
    return {name: pipeline.build(name, config.routing_policies) for name in names}


def _by_name(backends: Iterable[Backend]) -> dict[str, Backend]:
    return {each.name: each for each in backends}


def _budgets(before: Config, config: Config) -> dict[str, int | None]:
    known = {host for each in before.backends for host in each.hosts}
    hosts = dict.fromkeys(("", *(host for each in config.backends for host in each.hosts)))
    budgets = {host: config.memory_of(host) for host in hosts}
    return {
        host: budget
        for host, budget in budgets.items()
        if host not in known or before.memory_of(host) != budget
    }
