"""Runs worlds (JSON lines on standard input) in the simulator of a checkout; prints a log for each.

Started once with this checkout as PYTHONPATH and once with that of the frozen commit, whose names it knows:
what was only moved or renamed since is taken from where it is, and is no difference in a log.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import worlds

from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import BackendError, LoadError
from anvil_mux.scheduler.events import Cause, Event
from anvil_mux.scheduler.policies import FOREVER

try:
    from anvil_mux.config.machines import Gpu
    from anvil_mux.lab import engines, simulate, study, workload
    from tests.lab import facts
except ImportError:  # the frozen commit
    from anvil_mux.config.config import Gpu  # type: ignore[no-redef, attr-defined]
    from anvil_mux.sim import simulate, study, workload  # type: ignore[no-redef, import-not-found]

    engines = facts = simulate

WHAT = {"Load": "load", "Cancel": "cancel", "Evict": "evict", "Demote": "demote"}


def config_of(about: dict[str, Any]) -> Config:
    known = [{k: v for k, v in each.items() if v is not None} for each in about["backends"]]
    backends = tuple([Backend(**{k: _value(v) for k, v in each.items()}) for each in known])
    gpus = tuple([Gpu(id, vram=vram) for id, vram in about.get("gpus", {}).items()])
    rest = {key: value for key, value in about.items() if key not in ("backends", "gpus")}
    return Config(backends=backends, gpus=gpus, **rest)


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def entry_of(entry: list[Any]) -> Any:
    at, what, *rest = entry
    if what == "request":
        return request_of(at, *rest)
    if what == "reload":
        return facts.Reload(at, config_of(rest[0]))
    return {"death": facts.Death, "unload": facts.Unloading}[what](at, *rest)


def request_of(at: float, model: str, seconds: float, patience: float, leases: bool, sender: str) -> Any:
    long = FOREVER if patience >= worlds.FOREVER else patience
    return simulate.Arrival(at, model, seconds, long, leases, sender or None)


def perform_of(world: dict[str, Any], config: Config) -> Any:
    gpus = {backend.name: backend.gpus for backend in config.backends if backend.vram}

    def perform(step: Any, nth: int) -> Any:
        what = WHAT[type(step).__name__]
        level = getattr(step, "level", "") or getattr(step, "how", "")
        ending = worlds.outcome(world["engines"], what, step.backend, nth, level, getattr(step, "to", ""))
        error = {"": None, "load": LoadError("no"), "engine": BackendError("no")}[ending.error]
        residual = dict.fromkeys(gpus.get(step.backend, ()), ending.residual) if ending.residual else {}
        return engines.Outcome(ending.seconds, error, ending.how or None, residual, ending.host_bytes)

    return perform


def follow_of(world: dict[str, Any]) -> Any:
    sessions = world.get("sessions")
    if not sessions:
        return None
    rest = {
        sender: [simulate.Arrival(think, model, seconds, sender=sender) for think, model, seconds in requests]
        for sender, requests in sessions.items()
    }
    return workload.Sessions(rest)


def log_of(world: dict[str, Any]) -> Any:
    if "workload" in world:
        return _workload_log(world)
    config = config_of(world["config"])
    trace = [entry_of(entry) for entry in world["trace"]]
    return simulate.simulate(
        config, trace, perform_of(world, config), resident=world["resident"], follow=follow_of(world)
    )


def _workload_log(world: dict[str, Any]) -> Any:
    name = world["workload"]
    made = workload.PROFILES[name](world["seed"]) if name in workload.PROFILES else None
    traffic = made or workload.read(workload.find(name))
    config = study.replace(traffic.config(), policy=world["policy"])
    perform = traffic.engines(config)
    return simulate.simulate(
        config,
        traffic.requests,
        perform,
        resident=traffic.residents(config),
        follow=traffic.follow() if traffic.follow else None,
        costs=perform.costs(config),
    )


def detail(cause: Cause) -> str:
    return cause.detail.replace("weighted_prefill ", "delay ")  # a metric


def written(event: Event) -> list[Any]:
    """An event as JSON has it."""
    cause = event.cause and {**event.cause._asdict(), "detail": detail(event.cause)}
    return list(event._replace(cause=cause))  # type: ignore[arg-type]


def main() -> None:
    for line in sys.stdin:
        world = json.loads(line)
        try:
            log = [written(event) for event in log_of(world)]
        except Exception as error:  # a world that cannot be run any more is a difference too
            log = [[0.0, "error", f"{type(error).__name__}: {error}"]]
        print(json.dumps([world["name"], log]), flush=True)


if __name__ == "__main__":
    main()
