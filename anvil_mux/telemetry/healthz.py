"""The JSON objects of /healthz for models, GPUs and hosts; the commands read the same.

Of hosts nothing is said where there are none beside the one that anvil-mux runs on. Where a model may run in
many places, ``candidates`` counts them, and those who look on are told of the few backends that matter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from anvil_mux.config.config import Backend
from anvil_mux.config.values import site
from anvil_mux.host.seam import GpuUse, OtherProcess, Sensors
from anvil_mux.multiplexer.circuits import Circuits
from anvil_mux.routing import in_flight
from anvil_mux.scheduler.admission import RunningAnswer
from anvil_mux.scheduler.events import LOCAL, sentence, to_json
from anvil_mux.scheduler.slot import Pause
from anvil_mux.scheduler.state import Drain
from anvil_mux.scheduler.status import (
    BackendState,
    Deferral,
    GpuState,
    HostState,
    ModelState,
)
from anvil_mux.scheduler.waits import Progress

MANY = 8
"""More backends than that are summed up, also where there is but one host."""


def model_state(model: ModelState, *, brief: bool = False, logs: bool = False) -> dict[str, object]:
    """Return the object of a model.

    ``brief``: without the backends that are stopped, where there may be many. ``logs``: with the last lines
    of engines that failed.
    """
    candidates = _candidates(model)
    backends = [each for each in model.backends if not (brief and candidates) or _matters(model, each)]
    return {
        "state": model.state,
        "backend": model.backend,
        "pinned": model.pinned,
        **({"presets": list(model.presets)} if model.presets else {}),
        "home_seconds": _rounded(model.home_seconds),
        "gpus": list(model.gpus),
        "waiting": model.waiting,
        **({"max_queue": model.max_queue} if model.max_queue else {}),
        "oldest_wait_seconds": _rounded(model.oldest_wait),
        "leases": model.leases,
        "draining": _draining(model.drain, model.leases, model.drained_for),
        "deferred": _deferral(model.deferred) if model.deferred else None,
        "last_error": model.last_error or None,
        "load_seconds": model.load_seconds,
        "progress": _progress(model.progress),
        "backends": {each.backend: _backend_state(each, logs=logs) for each in backends},
        **candidates,
        **({"host_lost": model.is_lost} if any(backend.host for backend in model.backends) else {}),
    }


def external_state(backend: Backend, circuits: Circuits) -> dict[str, object]:
    """The part of a model that the scheduler does not know: its server elsewhere, and its fallbacks."""
    found: dict[str, object] = {}
    if backend.fallback:
        found["fallback"] = {"models": list(backend.fallback), "after": backend.fallback_after}
    if backend.url:
        circuit, left = circuits.of(backend.name), circuits.pause_left(backend.name)
        found["elsewhere"] = {
            "server": site(backend.url).name,
            "circuit": circuits.state(backend.name),
            "retry_seconds": round(left, 1),
            "why": circuit.why or None,
        }
    return found


def fallback_words(fallback: Mapping[str, Any]) -> str:
    """The sentence for people that says who answers instead."""
    after = fallback["after"]
    when = "If it cannot be served" if after is None else f"If it is not served within {after:g} s"
    return f"{when}, {' or '.join(fallback['models'])} answers instead."


def _candidates(model: ModelState) -> dict[str, object]:
    """How many backends a model has, and on how many hosts, where these are too many to list."""
    hosts = {each.host.host if each.host else "" for each in model.backends}
    if not any(hosts) and len(model.backends) <= MANY:
        return {}
    return {"candidates": {"backends": len(model.backends), "hosts": len(hosts)}}


def hosts_of(model: ModelState, own_problem: str = "") -> list[dict[str, object]]:
    """The hosts where a model may run, how many backends it has there in which state, and which are left out.

    Empty where there is but the one that anvil-mux runs on. ``own_problem``: why nothing is begun there.
    """
    found: dict[HostState | None, Counter[str]] = {}
    for each in model.backends:
        found.setdefault(each.host, Counter())[each.state] += 1
    if not any(found):
        return []
    return [
        {
            "host": host.host if host else LOCAL,
            "states": dict(states),
            "left_out": _left_out(host or HostState("", is_away=bool(own_problem), why=own_problem)),
        }
        for host, states in found.items()
    ]


def _left_out(host: HostState) -> str | None:
    """Why nothing is loaded on a host now; None: it takes loads."""
    found = []
    if host.lost_seconds is not None:
        found.append(f"lost for {host.lost_seconds:.0f} s{host.why and f': {host.why}'}")
    if host.is_drained:
        found.append("drained by hand")
    if host.is_away:
        why = host.why or "it cannot be controlled"
        found.append(f"away: {why}; its engines go on serving")
    return "; ".join(found) or None


def _matters(model: ModelState, backend: BackendState) -> bool:
    """Whether there is more to say of a backend than that it might be loaded."""
    return backend.state != "stopped" or bool(backend.error) or backend.backend == model.backend


def _progress(progress: Progress | None) -> dict[str, object] | None:
    if progress is None:
        return None
    stage, fraction, left = progress
    return {
        "fraction": None if fraction is None else round(fraction, 2),
        "seconds_left": None if left is None else round(left, 1),
        "stage": stage,
        "words": progress.words,
    }


def _draining(
    drain: Drain | None, leases: int, answers: Iterable[RunningAnswer] | None = None
) -> dict[str, object] | None:
    """A drain that is under way, with the answers that it waits for."""
    if drain is None:
        return None
    left = _rounded(drain.seconds_left)
    state: dict[str, object] = {"target": drain.target or None, "leases": leases, "seconds_left": left}
    return state if answers is None else {**state, "answers": [answer(each) for each in answers]}


def answer(each: RunningAnswer) -> dict[str, object]:
    """An answer that is waited for."""
    return {"model": each.model, "request": each.request, "run_seconds": _rounded(each.run_seconds)}


def _deferral(deferral: Deferral) -> dict[str, object]:
    left, cause = _rounded(deferral.seconds_left), deferral.cause
    return {"seconds_left": left, "cause": to_json(cause), "reason": sentence(cause)}


def _backend_state(backend: BackendState, *, logs: bool) -> dict[str, object]:
    return {
        "state": backend.state,
        "state_seconds": _rounded(backend.state_seconds),
        "gpus": list(backend.gpus),
        "leases": backend.leases,
        "standby_level": backend.standby_level or None,
        "size": backend.size,
        "vram_to_declare": backend.vram_to_declare or None,
        "idle_seconds": _rounded(backend.idle_seconds),
        "unload_seconds": _rounded(backend.unload_seconds),
        "load_seconds": backend.load_seconds,
        "retry_seconds": _rounded(backend.retry_seconds),
        "error": backend.error or None,
        **({"log": list(backend.log)} if logs else {}),
        "engine": in_flight.as_json(backend.engine),
        **({"kept_prompts": backend.kept_prompts._asdict()} if backend.kept_prompts else {}),
        **_place(backend.host),
    }


def _place(host: HostState | None) -> dict[str, object]:
    return {"host": host.host, "host_lost": host.is_lost} if host else {}


def pause_state(pause: Pause | None, wall: Callable[[float], float]) -> dict[str, object] | None:
    """The pause that is on; ``wall``: the Unix time of a moment."""
    if pause is None:
        return None
    until = None if math.isinf(pause.until) else round(wall(pause.until))
    return {
        "since": round(wall(pause.since)),
        "until": until,
        "requests": "wait" if pause.waits else "refused",
    }


def host_state(host: HostState) -> dict[str, object]:
    lost_seconds = _rounded(host.lost_seconds)
    return {
        "lost": host.is_lost,
        "lost_seconds": lost_seconds,
        "away": host.is_away,
        "drained": host.is_drained,
    }


def _rounded(seconds: float | None) -> float | None:
    """JSON knows no infinity: without an end is null, like unknown."""
    return None if seconds is None or math.isinf(seconds) else round(seconds, 1)


def gpu_state(gpu: GpuState, use: GpuUse) -> dict[str, object]:
    return {
        "resident": gpu.residents[0] if gpu.residents else None,
        "residents": list(gpu.residents),
        "state": gpu.state,
        "draining": _draining(gpu.drain, gpu.draining_leases),
        "used": use.used,
        "total": gpu.total if use.total is None else use.total,
        "reserve": gpu.reserve,
        "sensors": _sensors(use.sensors),
        "users": dict(use.users),
        "others": [_other_process(each) for each in use.others],
        "residuals": dict(gpu.residuals),
        "reserved_for": list(gpu.reserved_for),
        **_place(gpu.host),
        **({"missing": gpu.missing} if gpu.missing else {}),
    }


def _sensors(sensors: Sensors) -> dict[str, float | None]:
    """The figures as far as people read them, so that they are not other ones all the time."""
    places = {"utilization": 2, "celsius": 0, "watts": 0}
    found = {name: getattr(sensors, name) for name in places}
    return {name: None if n is None else round(n, places[name]) for name, n in found.items()}


def _other_process(other_process: OtherProcess) -> dict[str, object]:
    return {
        "pid": other_process.pid,
        "name": other_process.command,
        "bytes": other_process.used,
        "container": other_process.container or None,
    }
