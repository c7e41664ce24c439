"""Histories as plain data: configurations, what is asked for when, and how the engines behave.

A world is a dictionary that JSON can hold, in the words of the frozen commit:

    name        text
    workload    the name of a profile or of a shipped workload, with its seed; or else:
    config      what Config and Backend take, without what has its default
    trace       [at, what, ...]: request model seconds patience leases sender | unload model | death backend |
                reload config
    sessions    sender -> [think, model, seconds] in the order in which they follow each other
    engines     how steps end; see ``outcome``
    resident    backends that run at moment 0

Imports nothing of anvil-mux, because two versions of it read the same worlds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

World = dict[str, Any]
FOREVER = 1e18
"""JSON has no infinity."""

POLICIES = ("adaptive", "eager", "debounce", "cost_aware", "time_slice")
PROFILES = ("single", "balanced", "bursty", "dominant", "interleave", "mixed")
WORKLOADS = ("servegen-day", "servegen-evening", "claude-code-agents")
LADDERS = (
    ["stop"],
    ["freeze", "stop"],
    ["sleep", "stop"],
    ["checkpoint", "stop"],
    ["sleep", "sleep-2", "stop"],
    ["sleep", "checkpoint", "stop"],
    ["sleep", "sleep-2", "checkpoint", "stop"],
)
LAYOUTS = (["0", "0"], ["0", "0", "0"], ["0", "1", "01"], ["0", "0", "1", "1"], ["0", "0", "1", "01", "1"])


class Ending(NamedTuple):
    """How a step ends."""

    seconds: float
    error: str = ""
    """load (the engine did not become ready), engine (anything else), or empty."""
    how: str = ""
    """The way that was really taken; empty: the one asked for."""
    residual: int = 0
    """Bytes kept of each GPU."""
    host_bytes: int = 0


def outcome(engines: dict[str, Any], what: str, backend: str, nth: int, how: str, to: str = "") -> Ending:
    """How the n-th step (from 0) on a backend ends, in both versions.

    ``what``: load, cancel, evict or demote; ``how``: the standby level that it comes from or goes to.
    """
    if "trouble" not in engines:
        seconds = engines.get("load_seconds", {}).get(backend, engines.get("other_load_seconds", 10.0))
        return Ending(seconds if what == "load" else engines.get("stop_seconds", 1.0))
    draw = random.Random(f"{engines['seed']} {backend} {nth}")
    luck, troubled = draw.random(), nth < engines["trouble"]
    if what == "cancel":
        return Ending(0.7, "engine" if troubled and luck < 0.1 else "")
    if what == "load":
        if troubled and luck < 0.15:
            return Ending(3.0, "load" if luck < 0.1 else "engine")
        cold = how == "stop" or luck < 0.25
        return Ending(6.0 if cold else 0.5, how="stop" if cold else how)
    if troubled and luck < 0.12:
        return Ending(2.0, "engine")
    to = to or how
    if to == "stop" or luck < 0.2:
        return Ending(1.0, how="stop")
    kept = random.Random(f"{engines['seed']} {backend} {to}")
    return Ending(0.5, how=to, residual=kept.choice((0, 1, 3)), host_bytes=kept.choice((0, 2, 4, 7)))


def worlds(seeds: int) -> Iterator[World]:
    """Every profile and workload under every policy, then ``seeds`` worlds of each random kind."""
    for policy in POLICIES:
        for name in PROFILES:
            yield {"name": f"profile {name} {policy}", "workload": name, "policy": policy, "seed": 0}
    for number, name in enumerate(WORKLOADS):
        policy = POLICIES[number % len(POLICIES)]
        yield {"name": f"workload {name} {policy}", "workload": name, "policy": policy, "seed": 0}
    for seed in range(seeds):
        yield _shared_gpus(seed)
        yield _reloads(seed)
        yield _replicas(seed)
        yield _clients(seed)


def _backend(draw: random.Random, name: str, gpus: str, *, shared: bool) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "gpus": list(gpus),
        "evict_to": draw.choice(LADDERS),
        "demote_after": draw.choice((None, None, 7.03, 30.03)),
        "preload": draw.random() < 0.3,
        "vram": draw.choice((None, 6, 9, 14, 18)) if shared else None,
        "ram": draw.choice((None, 2, 5)),
        "ttl": draw.choice((None, None, 20.05)),
        "priority": draw.choice((0, 0, 1)),
        "pin": draw.random() < 0.05,
        "min_residency": draw.choice((0.0, 0.0, 8.0)),
        "concurrency": draw.choice((None, None, None, 1, 2)),
        "max_wait": draw.choice((None, None, 3.0)),
    }


def _config(draw: random.Random, backends: list[dict[str, Any]], *, shared: bool) -> dict[str, Any]:
    return {
        "backends": backends,
        "gpus": dict.fromkeys("01", 20) if shared else {},
        "policy": draw.choice(POLICIES),
        "eviction": draw.choice(("cost", "lru", "demand_lru")),
        "host_memory": draw.choice((None, None, 8, 12, 20)),
        "drain_timeout": draw.choice((0.0, 2.0, 30.0)),
        "max_wait": draw.choice((5.0, 60.0)),
        "queue_timeout": draw.choice((20.0, 600.0)),
        "max_queue": draw.choice((3, 1000)),
    }


def _requests(
    draw: random.Random, backends: list[dict[str, Any]], until: float, rate: float
) -> Iterator[list[Any]]:
    models = sorted({each["model"] for each in backends})
    now = 0.0
    while now < until:
        now += draw.expovariate(rate)
        model, what = draw.choice(models), draw.random()
        if what < 0.03:
            yield [now, "death", draw.choice(backends)["name"]]
        elif what < 0.07:
            yield [now, "unload", model]
        else:
            patience = draw.choice((FOREVER, FOREVER, 4.0))
            sender = draw.choice(("", "x", "y"))
            yield [now, "request", model, draw.expovariate(0.7), patience, draw.random() < 0.95, sender]


def _shared_gpus(seed: int) -> World:
    """Models that share GPUs and the host's memory, on engines of which some steps fail."""
    draw = random.Random(f"shared {seed}")
    shared = draw.random() < 0.5
    layout = draw.choice(LAYOUTS)
    backends = [
        _backend(draw, name, gpus, shared=shared) for name, gpus in zip("abcde", layout, strict=False)
    ]
    return {
        "name": f"shared {seed}",
        "config": _config(draw, backends, shared=shared),
        "trace": list(_requests(draw, backends, 300.0, 0.6)),
        "engines": {"seed": seed, "trouble": draw.choice((0, 10, 1000))},
        "resident": [],
    }


def _reloads(seed: int) -> World:
    """Configurations that follow each other while requests run."""
    draw = random.Random(f"reloads {seed}")
    names = [f"s{number}" for number in range(draw.randint(2, 5))]

    def configured(before: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        now = {}
        for name in names:
            if draw.random() < 0.15:
                continue
            if name in before and draw.random() < 0.6:
                now[name] = before[name]
            else:
                now[name] = _backend(draw, name, draw.choice(("0", "1", "01")), shared=False)
                now[name] |= {"port": draw.randint(1, 9), "pin": False}
                now[name] |= {"model": draw.choice((name, name, "m"))}
        return now or before or {names[0]: {"name": names[0], "model": names[0], "gpus": ["0"]}}

    backends = configured({})
    about = _config(draw, list(backends.values()), shared=False)
    asked_for = [{"name": name, "model": name} for name in names] + [{"name": names[0], "model": "m"}]
    trace = list(_requests(draw, asked_for, 200.0, 0.5))
    for moment in sorted(draw.uniform(0, 200.0) for _ in range(draw.randint(1, 5))):
        backends = configured(backends)
        changed = {**about, "backends": list(backends.values())}
        changed["drain_timeout"] = draw.choice((0.0, 2.0, 30.0))
        trace.append([moment, "reload", changed])
    return {
        "name": f"reloads {seed}",
        "config": about,
        "trace": sorted(trace, key=lambda entry: entry[0]),
        "engines": {"seed": seed, "trouble": draw.choice((0, 10))},
        "resident": [],
    }


def _replicas(seed: int) -> World:
    """Models with several backends, with and without a limit of requests at once."""
    draw = random.Random(f"replicas {seed}")
    backends = []
    for number in range(draw.randint(3, 6)):
        about = _backend(draw, f"r{number}", draw.choice(("0", "1", "2", "12")), shared=False)
        backends.append(about | {"model": draw.choice(("big", "small", "other")), "pin": False})
    limits = {each["model"]: each["concurrency"] for each in backends}
    for each in backends:
        each["concurrency"] = limits[each["model"]]
    return {
        "name": f"replicas {seed}",
        "config": _config(draw, backends, shared=False),
        "trace": list(_requests(draw, backends, 200.0, 0.8)),
        "engines": {"seed": seed, "trouble": draw.choice((0, 5))},
        "resident": [backends[0]["name"]],
    }


def _clients(seed: int) -> World:
    """Clients that wait for their answers before they ask again."""
    draw = random.Random(f"clients {seed}")
    names = list("abc"[: draw.randint(2, 3)])
    backends = [{"name": name, "model": name, "gpus": ["0"]} for name in names]
    sessions, trace = {}, []
    for number in range(draw.randint(2, 6)):
        sender, model = f"client-{number}", draw.choice(names)
        think = draw.choice((0.0, 0.0, 0.5, 5.0))
        trace.append([draw.uniform(0, 5), "request", model, draw.expovariate(1.0), FOREVER, True, sender])
        sessions[sender] = [
            [
                think * draw.random(),
                model if draw.random() < 0.9 else draw.choice(names),
                draw.expovariate(2.0),
            ]
            for _ in range(draw.randint(5, 60))
        ]
    return {
        "name": f"clients {seed}",
        "config": {**_config(draw, backends, shared=False), "max_queue": 1000},
        "trace": sorted(trace, key=lambda entry: entry[0]),
        "sessions": sessions,
        "engines": {"load_seconds": {"a": 3.0, "b": 9.0}, "other_load_seconds": 5.0, "stop_seconds": 0.5},
        "resident": ["a"],
    }
