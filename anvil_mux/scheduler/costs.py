"""The lessons of swaps: what they cost, and the memory that backends held and keep in standby.

A cost belongs to a host, a direction and a way: evicting these models, loading that one by that standby
level. It is evict + load, without the drain and without the time that the policy waited, because those depend
on the requests of the moment and would make a busy model look expensive. Each is an exponential moving
average (``ALPHA``, as llmux has it); the first swap counts in full.

Before the first swap in a direction the same model's loads from elsewhere serve, and the same victims'
evictions; before those, its last load on another host; before that, the median of what other models with the
same engine took by the same way; and before any, what the engine and the way of loading suggest.

A footprint belongs to a backend and a standby level, and is measured when it is evicted. It is that of the
last time, no average: what an engine takes is settled by its settings, and a mean of before and after a
change of them was never true. What could not be read is not in it.

Not thread-safe: the lock of the scheduler guards both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from anvil_mux.scheduler.slot import Slot

ALPHA = 0.3
"""Weight of the newest swap."""

FIRST_LOAD_SECONDS = {
    ("vllm", "stop"): 60.0,
    ("sglang", "stop"): 60.0,
    ("llamacpp", "stop"): 10.0,
    ("ollama", "stop"): 10.0,
    ("sglang", "sleep"): 4.0,
    ("llamacpp", "sleep"): 5.0,
    ("ollama", "sleep"): 5.0,
}
"""The seconds of a first load by (engine, standby level), where the engine matters more than the level.

Cold starts of vLLM take 25 to 130 s (llmux, reports 1 and 2). SGLang's weights come back from host memory at
about 5 GB/s: 3 s for 16 GB; 4.9 s were seen in a training job on 8 H100 (torch_memory_saver). Those of
Ollama and llama.cpp are read again: 2 to 6 s out of the page cache, 13 to 42 s from disk for 7 to 14B.
"""
FIRST_RETURN_SECONDS = {"sleep": 2.0, "sleep-2": 10.0, "checkpoint": 5.0, "freeze": 0.5}
"""The seconds of a first load by standby level, with any other engine.

sleep: vLLM wakes in 0.1 to 0.8 s with up to 4B parameters, with 64 GiB in 3 s, on several GPUs in 3 to 6 s.
sleep-2: the weights come from disk: 0.3 to 2.6 s for such small models out of its cache, 38 s on an L40.
checkpoint: 0.5 to 1 s up to 3B, 1.5 to 4 s with 7 to 14B, 5.5 to 7.5 s with 73 GB; elsewhere 15 s with 80 GB.
freeze: the container goes on in 0.1 to 0.2 s; then the engine answers a probe.
"""
OTHER_FIRST_LOAD_SECONDS = 10.0
FIRST_EVICT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """One direction. ``source`` names the models that are evicted, sorted and joined by "+"; "" is none."""

    source: str
    target: str
    way: str
    evict_seconds: float
    load_seconds: float
    swaps: int = 0
    """How many swaps it was learned from; 0: an estimate."""
    host: str = ""
    """The host: costs are learned for each by itself."""
    engine: str = ""
    """The engine of the target; "": not known."""

    @property
    def seconds(self) -> float:
        return self.evict_seconds + self.load_seconds


NO_COST = Cost("", "", "stop", 0.0, 0.0)


class Costs:
    """All directions that were seen."""

    def __init__(self, known: Iterable[Cost] = ()) -> None:
        self._known: dict[tuple[str, str, str, str], Cost] = {}
        self._loads: dict[tuple[str, str, str], float] = {}  # (host, target, way) -> seconds, from anywhere
        self._elsewhere: dict[tuple[str, str], float] = {}  # (target, way) -> seconds, the last on any
        self._of_engine: dict[tuple[str, str], dict[str, float]] = {}  # (engine, way) -> target -> the same
        self._evictions: dict[tuple[str, str], float] = {}  # (host, source) -> seconds, for anyone
        self._estimates: dict[tuple[str, str, str, str, str], Cost] = {}  # those made since the last swap
        for cost in known:
            self._remember(cost)

    def __iter__(self) -> Iterator[Cost]:
        return iter(self._known.values())

    def estimate(self, source: str, target: str, way: str, engine: str, host: str = "") -> Cost:
        """Estimate what a swap in this direction will cost on a host, from what is known."""
        key = source, target, way, engine, host
        cost = self._estimates.get(key)
        if cost is None:
            cost = self._estimates[key] = self._estimate(*key)
        return cost

    def load_seconds(self, slot: Slot, level: str) -> float:
        """How long a load from a standby level is expected to take."""
        return self.estimate("", slot.model, level, slot.backend.engine, slot.host.name).load_seconds

    def _estimate(self, source: str, target: str, way: str, engine: str, host: str) -> Cost:
        cost = self._known.get((host, source, target, way))
        if cost:
            return cost
        evict_seconds = self._evictions.get((host, source), FIRST_EVICT_SECONDS) if source else 0.0
        return Cost(source, target, way, evict_seconds, self._load(target, way, engine, host), host=host)

    def _load(self, target: str, way: str, engine: str, host: str) -> float:
        """Seconds of a load in no known direction."""
        seconds = self._loads.get((host, target, way))
        if seconds is None:
            seconds = self._elsewhere.get((target, way))
        if seconds is None:
            loads = self._of_engine.get((engine, way), {}).values()
            first = FIRST_RETURN_SECONDS.get(way, OTHER_FIRST_LOAD_SECONDS)
            seconds = median(loads) if loads else FIRST_LOAD_SECONDS.get((engine, way), first)
        return seconds

    def knows(self, target: str, way: str, host: str = "") -> bool:
        """Whether a model was ever loaded from that standby level on that host."""
        return (host, target, way) in self._loads

    def learn(
        self,
        source: str,
        target: str,
        way: str,
        evict_seconds: float,
        load_seconds: float,
        host: str = "",
        engine: str = "",
    ) -> None:
        """A swap in this direction was made."""
        old = self._known.get((host, source, target, way))
        if old:
            evict_seconds = old.evict_seconds + ALPHA * (evict_seconds - old.evict_seconds)
            load_seconds = old.load_seconds + ALPHA * (load_seconds - old.load_seconds)
        swaps = old.swaps if old else 0
        cost = Cost(
            source, target, way, evict_seconds, load_seconds, swaps=swaps + 1, host=host, engine=engine
        )
        self._remember(cost)

    def keep(self, is_model: Callable[[str], bool]) -> None:
        """Forget what was learned of what is no model any more."""

        def kept(*names: str) -> bool:
            return all(is_model(name) or all(map(is_model, filter(None, name.split("+")))) for name in names)

        self._known = {key: cost for key, cost in self._known.items() if kept(key[1], key[2])}
        self._loads = {key: seconds for key, seconds in self._loads.items() if kept(key[1])}
        self._elsewhere = {key: seconds for key, seconds in self._elsewhere.items() if kept(key[0])}
        self._evictions = {key: seconds for key, seconds in self._evictions.items() if kept(key[1])}
        self._of_engine = {
            key: {target: seconds for target, seconds in loads.items() if kept(target)}
            for key, loads in self._of_engine.items()
        }
        self._estimates.clear()

    def _remember(self, cost: Cost) -> None:
        self._estimates.clear()
        self._known[cost.host, cost.source, cost.target, cost.way] = cost
        self._loads[cost.host, cost.target, cost.way] = cost.load_seconds
        self._elsewhere[cost.target, cost.way] = cost.load_seconds
        if cost.engine:
            self._of_engine.setdefault((cost.engine, cost.way), {})[cost.target] = cost.load_seconds
        if cost.source:
            self._evictions[cost.host, cost.source] = cost.evict_seconds


def source_of(models: Iterable[str]) -> str:
    """The name of a set of victims."""
    return "+".join(sorted(models))


# Footprints


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes, by GPU and in host memory."""

    backend: str
    way: str
    held: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> the bytes that it held while it was resident."""
    residual: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> the bytes that it still held in standby; for the same GPUs."""
    host_bytes: int = 0
    """Host memory that it kept in standby; 0 where that is not known."""
    times: int = 0
    """How often it was measured."""
    described: str = ""
    """The digest of its service's description at that time; "": not known."""

    def is_outdated(self, described: str) -> bool:
        """Whether its service is known to be described otherwise now."""
        return bool(self.described and described) and self.described != described


class Footprints:
    """All footprints that were measured."""

    def __init__(self, known: Iterable[Footprint] = ()) -> None:
        self._known: dict[tuple[str, str], Footprint] = {}  # the newest last
        self._held: dict[str, Footprint] = {}
        for footprint in known:
            self._remember(footprint)

    def __iter__(self) -> Iterator[Footprint]:
        return iter(self._known.values())

    def learn(
        self,
        backend: str,
        way: str,
        freed: Mapping[str, int],
        residual: Mapping[str, int],
        host_bytes: int = 0,
        described: str = "",
    ) -> None:
        """Learn what a backend held that left its GPUs; the most that it ever held is what counts.

        ``freed``: what it gave back, where that was read. ``described``: the digest of its service's
        description.
        """
        if not freed and not host_bytes:
            return
        left = {gpu: residual.get(gpu, 0) for gpu in freed}
        most = self.held(backend, described)
        held = {gpu: max(amount + left[gpu], most.get(gpu, 0)) for gpu, amount in freed.items()}
        old = self._known.pop((backend, way), None)
        times = old.times + 1 if old else 1
        self._remember(
            Footprint(backend, way, held, left, host_bytes=host_bytes, times=times, described=described)
        )

    def held(self, backend: str, described: str = "") -> Mapping[str, int]:
        """GPU id -> the most bytes that a backend was seen to hold; empty where that was never read.

        What was measured before its service was ``described`` as it is now counts no more.
        """
        last = self._held.get(backend)
        return last.held if last and not last.is_outdated(described) else {}

    def in_standby(self, backend: str, way: str, described: str = "") -> Footprint | None:
        """The last footprint of a backend at this standby level, of its service as it is ``described``."""
        last = self._known.get((backend, way))
        return None if last is None or last.is_outdated(described) else last

    def _remember(self, footprint: Footprint) -> None:
        self._known[footprint.backend, footprint.way] = footprint
        if footprint.held:
            self._held[footprint.backend] = footprint


def to_declare(held: Mapping[str, int]) -> str:
    """The size to write down as ``vram`` for a backend that held so much of each of its GPUs."""
    return f"{math.ceil(max(held.values()) * 10 / (1 << 30)) / 10:g}GiB"
