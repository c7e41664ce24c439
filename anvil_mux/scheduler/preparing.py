"""The part of a reload that follows from the configurations alone, done before another one takes effect.

Most of a reload is to compare thousands of backends, and to make tables of them. That needs nothing of what
runs, so whoever drives the scheduler may have it done beforehand, without the multiplexer's lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from anvil_mux.config.change import Change, compare
from anvil_mux.config.config import Backend, Config
from anvil_mux.routing import pipeline
from anvil_mux.routing.routing import Routing
from anvil_mux.scheduler.eviction import build_eviction
from anvil_mux.scheduler.model import model_settings
from anvil_mux.scheduler.policies import build_policy
from anvil_mux.scheduler.state import SharedSettings, Timeouts

ROUTING = ("routing", "routing_policies", "routing_mode")
SHARED = (
    *ROUTING,
    "policy",
    "policy_settings",
    "eviction",
    "eviction_settings",
    "drain_timeout",
    "home_after",
    "queue_timeout",
    "max_wait",
)
"""The fields of ``Config`` that concern every GPU group or every model."""


class Prepared(NamedTuple):
    """A configuration that is to take effect, with what follows from it and from the one before."""

    before: Config
    """The configuration that it is to replace; if another one holds by then, this is prepared anew."""
    config: Config
    change: Change
    different: tuple[str, ...]
    """The backends that come, go, or are described otherwise, be it only by settings of ours."""
    replaced: tuple[str, ...]
    """The backends among them that come, go, or are replaced."""
    go_on: tuple[str, ...]
    """The backends among them that go on, with what runs."""
    different_gpus: frozenset[str]
    different_models: tuple[str, ...]
    """The models of which the settings are other ones."""
    loses_models: bool
    """Whether some model is served no longer."""
    concerns_all: bool
    """Whether a setting has changed that concerns every GPU group."""
    rerouted: bool
    """Whether routing policies are other ones."""
    settings: SharedSettings
    places: Mapping[str, int]
    """Backend -> its place in the configuration."""
    budgets: Mapping[str, int | None]
    """Host -> its memory for engines, of the hosts of which that is new."""


def prepare(before: Config, config: Config) -> Prepared:
    """Prepare ``config``, which is to replace ``before``. Any thread may do so."""
    change = compare(before, config)
    old, wanted = _by_name(before.backends), _by_name(config.backends)
    otherwise = [name for name, each in wanted.items() if old.get(name) != each]
    old_gpus = {gpu.name: gpu for gpu in before.gpus}
    gpus = {gpu.name: gpu for gpu in config.gpus}
    resized = [name for name in (*old_gpus, *gpus) if old_gpus.get(name) != gpus.get(name)]
    different = dict.fromkeys((*change.removed, *change.changed, *otherwise))
    kept = frozenset(change.kept)
    settings, models = model_settings(before), model_settings(config)
    rerouted = _differ(before, config, ROUTING)
    return Prepared(
        before=before,
        config=config,
        change=change,
        different=tuple(different),
        replaced=tuple(name for name in different if name not in kept),
        go_on=tuple(name for name in different if name in kept),
        different_gpus=frozenset(resized),
        different_models=tuple(
            name for name, each in models.items() if rerouted or settings.get(name) != each
        ),
        loses_models=not settings.keys() <= models.keys(),
        concerns_all=_differ(before, config, SHARED),
        rerouted=rerouted,
        settings=SharedSettings(
            timeouts=Timeouts(config.drain_timeout, config.queue_timeout, config.home_after),
            policy=build_policy(config.policy, config.policy_settings),
            eviction=build_eviction(config.eviction, config.eviction_settings),
            gpus=gpus,
            wanted=wanted,
            models=models,
            routings=_routings(config),
            full=config.routing_mode == "full",
        ),
        places={name: place for place, name in enumerate(wanted)},
        budgets=_budgets(before, config),
    )


def _differ(before: Config, config: Config, fields: Iterable[str]) -> bool:
    return any(getattr(before, name) != getattr(config, name) for name in fields)


def _routings(config: Config) -> dict[str, Routing]:
    names = dict.fromkeys((config.routing, *filter(None, [each.routing for each in config.backends])))
    return {name: pipeline.build(name, config.routing_policies) for name in names}


def _by_name(backends: Iterable[Backend]) -> dict[str, Backend]:
    return {each.name: each for each in backends}


def _budgets(before: Config, config: Config) -> dict[str, int | None]:
    known = {each.host for each in before.backends}
    hosts = dict.fromkeys(("", *(each.host for each in config.backends)))
    budgets = {host: config.memory_of(host) for host in hosts}
    return {
        host: budget
        for host, budget in budgets.items()
        if host not in known or before.memory_of(host) != budget
    }
