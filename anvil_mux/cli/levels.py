"""The standby levels that a benchmark of swaps does not measure, each with the reason.

An engine or a machine may not be able to take one (no NVIDIA driver, no checkpoint), and a service may not
name one that it could take. Either is a row of its own, so that a missing figure is no riddle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from anvil_mux.config import service
from anvil_mux.config.config import WAYS, Backend, Judge
from anvil_mux.host import check

NOT_NAMED = "not named in evict_to"


@dataclass(frozen=True)
class Unmeasured:
    """A standby level that backends of one engine could not take, or do not name."""

    engine: str
    backends: tuple[str, ...]
    way: str
    why: str
    """Why it is not possible here; "": it is, and the services do not name it."""
    named: bool = False
    """Whether the services name it all the same."""

    def to_json(self) -> dict[str, object]:
        named = {"engine": self.engine, "backends": list(self.backends), "way": self.way}
        return {**named, "not_possible": self.why}


def unmeasured(backends: Iterable[Backend], judge: Judge | None = None) -> list[Unmeasured]:
    """The levels that are not measured of these backends, in one row where engine and reason are the same."""
    found: dict[tuple[str, str, str, bool], list[str]] = {}
    for backend in backends:
        for way in _levels_of(backend):
            why, named = why_not(backend, way, judge), way in backend.evict_to
            if why or not named:
                found.setdefault((backend.engine, way, why, named), []).append(backend.name)
    return [
        Unmeasured(engine, tuple(names), way, why, named)
        for (engine, way, why, named), names in found.items()
    ]


def why_not(backend: Backend, way: str, judge: Judge | None = None) -> str:
    """Why a backend cannot take a standby level, as far as it can be known beforehand; "" if it can.

    What its file says of a level that it names was checked when that was read.
    """
    judge = judge or check.why_not_checkpoint
    on_gpu = (judge(backend.gpus, backend.checkpoint_anyway) or "") if way == "checkpoint" else ""
    if way in backend.evict_to or on_gpu:
        return on_gpu
    described: dict[str, object] = {"command": [*backend.service.command]}
    if backend.service.gpus_by:
        described["gpus"] = "all"
    return service.cannot_evict_to(described, dict(backend.service.environment), backend.engine, way)


def _levels_of(backend: Backend) -> list[str]:
    """The standby levels of which something is to be said: the deep sleep is vLLM's own."""
    return [
        way
        for way in WAYS
        if way != "stop" and (way != "sleep-2" or backend.engine == "vllm" or way in backend.evict_to)
    ]


def table(rows: Sequence[Unmeasured]) -> list[tuple[str, ...]]:
    """A table for people."""
    lines: list[tuple[str, ...]] = [("ENGINE", "BACKENDS", "WAY", "NOT MEASURED")]
    for row in rows:
        why = f"not possible here: {row.why}" if row.why else NOT_NAMED
        lines.append((row.engine, ",".join(row.backends), row.way, why))
    return lines
