"""The plug-ins that come with the program, and the loader that has been handed them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from anvil_mux.config import loading
from anvil_mux.config.config import EITHER, INFER_TYPES
from anvil_mux.config.plugins import Plugins, RoutingNeeds
from anvil_mux.config.settings import Problem
from anvil_mux.routing import pipeline
from anvil_mux.routing.routing import Routing
from anvil_mux.scheduler.eviction import build_eviction
from anvil_mux.scheduler.policies import build_policy


def _shipped_routing() -> Mapping[str, RoutingNeeds]:
    return {name: _needs(pipeline.build(name)) for name in pipeline.shipped()}


def _read_routing(name: str, written: object) -> tuple[RoutingNeeds, Sequence[Problem]]:
    made, problems = pipeline.compile(name, written)
    return _needs(made), problems


def _needs(made: Routing) -> RoutingNeeds:
    return RoutingNeeds({kind: made.needs(kind) for kind in (*INFER_TYPES, EITHER)}, made.mode)


PLUGINS = Plugins(build_policy, build_eviction, _shipped_routing, _read_routing)
load = partial(loading.load, plugins=PLUGINS)
"""The configuration in compose files: see config.loading.load."""
