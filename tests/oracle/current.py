"""The same as frozen.py in this checkout, and in the words of the frozen commit.

What was renamed since is renamed back here: worlds on their way in, and events on their way out.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import worlds

from anvil_mux.config.config import Backend, Config, Gpu
from anvil_mux.errors import BackendError, LoadError
from anvil_mux.scheduler import policies
from anvil_mux.scheduler.causes import Cause
from anvil_mux.scheduler.events import Event
from anvil_mux.sim import simulate, study, workload

WHAT = {"Load": "load", "Cancel": "cancel", "Evict": "evict", "Demote": "demote"}


KINDS = {"stopped": "empty", "standby": "parked", "loading": "starting", "evicting": "stopping"}
"""A kind of event -> what the frozen commit called it."""

REASONS = {
    "overdue": "overdue",
    "idle": "idle for {seconds:g} s",
    "unloaded": "unload requested",
    "changed": "its configuration changed",
    "removed": "the configuration has it no longer",
    "silent": "it does not answer",
    "make_room": "room to prepare {model}",
    "host_memory_needed": "idle, and {model} lacks host memory",
    "host_memory_short": "host memory is short",
    "memory_needed": "its memory is needed",
    "demote_timer": "it rested by {way} for {seconds:.0f} s",
    "retry_stuck": "trying again to stop it",
    "standby_full": "no room to rest by {way}",
    "preload": "errand: prepared before anybody asks",
    "missing_stage": "errand: the other stage is there",
    "wake_to_demote": "woken on its way to {way}",
    "unwanted": "nobody waits for it, and {model} does",
    "room_free": "{waiting} waiting, room is free",
    "oldest_first": "{waiting} waiting, oldest first",
    "waited_enough": "{waiting} waiting, waited long enough",
    "quiet": "{waiting} waiting, line quiet",
    "not_quiet": "no line has been quiet for {seconds:g} s yet",
    "held_longest": "{waiting} waiting, held for the longest time allowed",
    "enough_wait": "{waiting} waiting, {required:g} are worth a swap of {seconds:.1f} s",
    "none_awaited": "{waiting} waiting, no more are awaited",
    "more_awaited": "more may come",
    "swap_cost": "who would go may serve for as long as a swap costs",
    "slice_over": "{waiting} waiting, the slice of {residents} is over",
    "slice": "the slice of {residents} is not over",
    "worth_it": "{waiting} waiting, {expected:.1f} expected by its load; worth it from {required:.1f}",
    "too_few": "{waiting} waiting, {expected:.1f} expected by its load; worth it from {required:.1f}",
    "in_use": "{waiting} waiting, {expected:.1f} expected by its load; worth it from {required:.1f}; "
    "{residents} was just in use",
    "replicas_busy": "{waiting} wait at busy replicas",
    "min_residency": "{residents} may stay for min_residency",
    "policy": "",
    "policy_text": "{detail}",
    "policy_failed": "the policy failed: {detail}",
    "adopted": "adopted",
    "reprieved": "reprieved",
    "load_failed": "load failed: {detail}",
    "died": "died: {detail}",
    "died_early": "died: {detail} {seconds:.1f} s after it was loaded, before it gave one whole answer",
    "evict_failed": "{detail}",
    "busy": "busy",
    "routed": "{detail}",
    "incomplete": "no whole answer",
    "moved": "taken back for {backend}",
    "stale": "{backend} is stale",
    "error": "{detail}",
    "reconfigured": "{detail}",
    "bad_configuration": "{detail}",
}
"""A kind of cause -> the reason that the frozen commit gave."""
OTHERWISE = {
    ("loading", "wake_to_demote"): "errand: on its way to {way}",
    ("standby", "evict_failed"): "it stays as it is: {detail}",
}
"""The same where it depends on the kind of the event."""


KEYS = {
    "rest": "evict_to",
    "prepare": "preload",
    "unit": "failure_domain",
    "preemption": "eviction",
    "preemption_settings": "eviction_settings",
}
"""What the frozen commit called a setting -> what it is called today."""


_OLD = {new: old for old, new in KEYS.items()}
LEVELS = {"freeze": "pause"}
TODAY = {old: new for new, old in LEVELS.items()}
"""A standby level -> what the frozen commit called it, and back."""


MAX_WAIT = 60.0
"""The default of ``max_wait`` at the frozen commit."""


def config_of(about: dict[str, Any]) -> Config:
    about = {"max_wait": MAX_WAIT} | {KEYS.get(key, key): value for key, value in about.items()}
    backends = tuple(
        [Backend(**{KEYS.get(k, k): _value(v) for k, v in each.items()}) for each in about["backends"]]
    )
    gpus = tuple([Gpu(id, vram=vram) for id, vram in about.get("gpus", {}).items()])
    rest = {key: value for key, value in about.items() if key not in ("backends", "gpus")}
    return Config(backends=backends, gpus=gpus, **rest)


def _value(value: Any) -> Any:
    return tuple([TODAY.get(each, each) for each in value]) if isinstance(value, list) else value


def entry_of(entry: list[Any]) -> Any:
    at, what, *rest = entry
    if what == "request":
        return request_of(at, *rest)
    if what == "reload":
        return simulate.Reload(at, config_of(rest[0]))
    return {"death": simulate.Death, "unload": simulate.Unloading}[what](at, *rest)


def request_of(at: float, model: str, seconds: float, patience: float, leases: bool, sender: str) -> Any:
    long = policies.FOREVER if patience >= worlds.FOREVER else patience
    return simulate.Arrival(at, model, seconds, long, leases, sender or None)


def perform_of(world: dict[str, Any], config: Config) -> Any:
    gpus = {backend.name: backend.gpus for backend in config.backends if backend.vram}

    def perform(step: Any, nth: int) -> simulate.Outcome:
        what = WHAT[type(step).__name__]
        asked = getattr(step, "how", ""), getattr(step, "to", "")
        how, to = (LEVELS.get(level, level) for level in asked)
        ending = worlds.outcome(world["engines"], what, step.backend, nth, how, to)
        error = {"": None, "load": LoadError("no"), "engine": BackendError("no")}[ending.error]
        residual = dict.fromkeys(gpus.get(step.backend, ()), ending.residual) if ending.residual else {}
        taken = TODAY.get(ending.how, ending.how) or None
        return simulate.Outcome(ending.seconds, error, taken, residual, ending.host_bytes)

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
    config = study.replace(traffic.config(), policy=world["policy"], max_wait=MAX_WAIT)
    engines = traffic.engines(config)
    return simulate.simulate(
        config,
        traffic.requests,
        engines,
        resident=traffic.residents(config),
        follow=traffic.follow() if traffic.follow else None,
        costs=engines.costs(config),
    )


def told(event: Event) -> list[Any]:
    """An event in the words of the frozen commit."""
    level = LEVELS.get(event.way, event.way)
    way = "" if event.kind == "standby" else level
    kind, words = KINDS.get(event.kind, event.kind), reason(event.kind, event.cause)
    if event.kind == "standby" and not event.cause:
        words = level
    seconds = 0.0 if kind == "queued" else event.seconds
    old = event._replace(kind=kind, seconds=seconds, cause=words, way=way)  # type: ignore[arg-type]
    return list(old)[: Event._fields.index("load")]


def reason(kind: str, cause: Cause | None) -> str:
    if cause is None:
        return ""
    if kind == "severed":
        return cause.kind
    words = OTHERWISE.get((kind, cause.kind), REASONS[cause.kind])
    way, detail = LEVELS.get(cause.way, cause.way), cause.detail
    if cause.kind == "reconfigured":
        detail = re.sub(rf"\b({'|'.join(_OLD)})\b", lambda found: _OLD[found[0]], detail)
    figures = {**cause._asdict(), "residents": " and ".join(cause.residents), "way": way, "detail": detail}
    return words.format(**figures)


def main() -> None:
    for line in sys.stdin:
        world = json.loads(line)
        try:
            log = [told(event) for event in log_of(world)]
        except Exception as error:  # a world that one version cannot run is a difference too
            log = [[0.0, "error", f"{type(error).__name__}: {error}"]]
        print(json.dumps([world["name"], log]), flush=True)


if __name__ == "__main__":
    main()
