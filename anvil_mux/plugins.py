"""The configuration in compose files, and whether the policies that they name can be built.

``config`` reads the files. The policies of swapping, eviction and routing stand in packages that need it, so
they are asked here, and all that is wrong is reported at once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from anvil_mux.config.compose import Compose, run_compose
from anvil_mux.config.config import Config, Judge
from anvil_mux.config.kinds import Diagnostic, as_diagnostic, no_such
from anvil_mux.config.loading import ConfigReader
from anvil_mux.config.machines import Gpu, Machine
from anvil_mux.config.reading import Problems
from anvil_mux.config.values import ROUTING_NAME
from anvil_mux.routing import pipeline
from anvil_mux.routing.routing import Routing
from anvil_mux.scheduler.memory import build_eviction
from anvil_mux.scheduler.policies import build_policy

NO_HOSTS: Mapping[str, Machine] = MappingProxyType({})


def load(
    paths: Sequence[Path | str],
    *,
    environ: Mapping[str, str] = os.environ,
    compose: Compose | None = run_compose,
    present: Mapping[str, Gpu] | None = None,
    overrides: Mapping[str, object] | None = None,
    judge: Judge | None = None,
    hosts: Mapping[str, Machine] = NO_HOSTS,
) -> Config:
    """The configuration in these files, or ConfigError with everything that is wrong with it.

    ``present``: the GPUs that this machine has, by index and by UUID, where they can be asked.
    ``overrides``: keys of ``SETTINGS`` as the command line gave them; None means not given.
    ``judge``: asked about services that are to be checkpointed; None: the file is not for this machine.
    ``hosts``: those of the cluster, by name, as they describe themselves.
    """
    reader = ConfigReader(
        paths,
        environ=environ,
        compose=compose,
        present=present or {},
        overrides=overrides or {},
        judge=judge,
        hosts=hosts,
    )
    config = reader.config
    chosen = {
        "policy": (build_policy, config.policy, config.policy_settings),
        "eviction": (build_eviction, config.eviction, config.eviction_settings),
    }
    for key, (build, name, settings) in chosen.items():
        try:
            build(name, settings)
        except (ValueError, TypeError) as error:
            reader.problems.of_setting(key, as_diagnostic(error))
    _check_routing(config, reader.services, reader.problems)
    return reader.checked()


def _check_routing(config: Config, services: Mapping[str, str], problems: Problems) -> None:
    shipped, written = pipeline.shipped(), config.routing_policies
    used = dict.fromkeys(backend.routing for backend in config.backends)
    policies = {name: pipeline.build(name) for name in used if name in shipped}
    policies |= {name: _own(problems, name, each, shipped) for name, each in written.items()}
    known = {**shipped, **written}
    if config.routing not in known:
        problems.of_setting("routing", _no_policy(config.routing, known))
    for name in [name for name in used if name in policies and policies[name].mode == "full"]:
        if config.routing_mode != "full":
            problems.of_setting("routing", _asks_for_full(name, shipped))
    models: dict[str, tuple[str, str]] = {}
    for backend in config.backends:
        service, name = ("services", services[backend.name]), backend.routing
        if backend.has_own("routing") and name not in policies:
            problems.add((*service, "x-anvil", "routing"), _no_policy(name, known))
        first, other = models.setdefault(backend.model, (backend.name, name))
        if other != name:
            text = f"is {name}, but {first}, a replica of the same model, has {other}"
            problems.add((*service, "x-anvil", "routing"), text, f"routing: {other}")
        for need in sorted(policies[name].needs(backend.infer_type) if name in policies else ()):
            if not getattr(backend, need):
                problems.add(service, f"needs {need}, because routing is {name}", f"{need}: ...")


def _own(problems: Problems, name: str, written: object, shipped: Container[str]) -> Routing:
    """A policy of the file's own, as far as it can be read; its problems are noted."""
    key = ("x-anvil", "routing", "policies", name)
    if name in shipped:
        problems.add(key, "is the name of a policy that is shipped; call it otherwise")
    if not ROUTING_NAME.fullmatch(str(name)):
        problems.add(key, "a name may hold letters, digits, . _ + and - only")
    routing, wrong = pipeline.compile(name, written)
    for path, text in wrong:
        problems.add((*key, *path), text)
    return routing


def _no_policy(name: str, policies: Collection[str]) -> Diagnostic:
    return no_such(f"no policy {name}", name, policies)


def _asks_for_full(policy: str, shipped: Container[str]) -> str:
    lite = f"{policy}_lite"
    other = f", or take {lite}" if lite in shipped else ""
    write = f"routing: {{default: {policy}, mode: full}}"
    why = "in the mode lite only what is sent is known"
    text = f"{policy} goes by what engines report: write {write}{other}; {why}"
    said = f"{policy} goes by what engines report, for which the mode is to be full{other}"
    return Diagnostic(text, said=said, write=write)
