"""The picture of the multiplexer at one moment, for /healthz, the page, the metrics and the commands.

It is made under the multiplexer's lock from the GPU groups, and never changed after that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from anvil_mux.config.machines import Gpu
from anvil_mux.routing.in_flight import EngineFigures
from anvil_mux.scheduler.admission import RunningAnswer, answers
from anvil_mux.scheduler.costs import to_declare
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.slot import HOLDING, HostRecord, Pause, Slot
from anvil_mux.scheduler.state import Drain, drain_of
from anvil_mux.scheduler.waits import Progress


@dataclass(frozen=True, slots=True)
class HostState:
    """One host beside the one that anvil-mux runs on."""

    host: str
    lost_seconds: float | None = None
    """Seconds since it was lost; None: it is not lost."""
    is_drained: bool = False
    """Whether it was drained by hand."""
    is_away: bool = False
    """Whether it cannot be steered for now."""
    why: str = ""
    """Why it is lost or away; "" if it is neither, or that is not known."""

    @property
    def is_lost(self) -> bool:
        return self.lost_seconds is not None


class KeptPrompts(NamedTuple):
    """The prompts of a backend that are on disk, for its next load."""

    prompts: int
    tokens: int
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class BackendState:
    """One backend as /healthz shows it."""

    backend: str
    state: str
    state_seconds: float | None
    """How long it has been in its state; None: since the start."""
    gpus: tuple[str, ...]
    leases: int
    standby_level: str
    """The standby level while it is in standby, else ""."""
    size: int | None
    """Bytes of GPU memory that it takes, declared or as it was measured; None: not known."""
    idle_seconds: float | None
    """Seconds since its last request ended, if none runs."""
    unload_seconds: float | None
    """Seconds until it is evicted because nobody uses it; None: it is not, or not now."""
    load_seconds: float | None
    retry_seconds: float
    """Seconds until it may be loaded, or is stopped, again after a failure."""
    error: str
    log: tuple[str, ...]
    """The engine's last lines, if its load failed or it died."""
    engine: EngineFigures | None = None
    """The last figures of its engine, where engines are read."""
    vram_to_declare: str = ""
    """The size to write down as its ``vram``, as it was measured, so that others may be loaded beside it."""
    host: HostState | None = None
    """The host that it runs on; None: the one that anvil-mux runs on."""
    ttl: float | None = None
    """Idle seconds after which it is evicted although nobody needs its GPUs; None: it never is."""
    kept_prompts: KeptPrompts | None = None
    """The prompts of it that are on disk; None: it has no ``prompt_cache``."""

    @property
    def is_lost(self) -> bool:
        """Whether its host is lost: what it was may still be so, but it serves nobody."""
        return self.host is not None and self.host.is_lost


@dataclass(frozen=True, slots=True)
class Deferral:
    """Why a queue waits although its swap could begin."""

    seconds_left: float
    """May be infinite: until something changes."""
    cause: Cause


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model as /healthz and /v1/models show it."""

    model: str
    state: str
    """The furthest state of its backends, of those whose hosts are not lost if there are any."""
    backend: str
    gpus: tuple[str, ...]
    aliases: tuple[str, ...]
    waiting: int
    leases: int
    last_error: str
    load_seconds: float | None
    home_seconds: float | None = None
    """Seconds until it comes back although nobody asks for it, as things are; None: it does not."""
    pinned: bool = False
    """Once it is resident it is not evicted for other models."""
    progress: Progress | None = None
    """How far its load is, if it is being loaded."""
    oldest_wait: float | None = None
    """Seconds that the first in queue has waited."""
    drain: Drain | None = None
    drained_for: tuple[RunningAnswer, ...] = ()
    """The answers that its drain waits for, the longest first."""
    deferred: Deferral | None = None
    presets: tuple[str, ...] = ()
    """The names of its presets, LoRA adapters among them."""
    max_queue: int | None = None
    """The most requests that may wait for it; None: it has no bound of its own."""
    backends: tuple[BackendState, ...] = ()

    @property
    def is_lost(self) -> bool:
        """Whether the hosts of all of its backends are lost."""
        return bool(self.backends) and all(backend.is_lost for backend in self.backends)

    @property
    def offered_state(self) -> str:
        """The state for clients, to whom what is on lost hosts is as good as stopped."""
        return "stopped" if self.is_lost else self.state


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU as /healthz shows it."""

    gpu: str
    residents: tuple[str, ...]
    state: str
    drain: Drain | None = None
    """The drain of one that holds it."""
    draining_leases: int = 0
    """The leases that it waits for."""
    total: int | None = None
    """Bytes, where they are known."""
    reserve: int = 0
    """Bytes that no backend gets."""
    residuals: tuple[tuple[str, int], ...] = ()
    """Backends in standby, and the bytes that they hold here still."""
    reserved_for: tuple[str, ...] = ()
    """The models that a swap under way keeps it for."""
    host: HostState | None = None
    """The host that it is in; None: the one that anvil-mux runs on."""
    missing: str = ""
    """Why nothing can be loaded on it, where its machine does not report it."""


@dataclass(frozen=True, slots=True)
class Status:
    """The whole multiplexer at one moment."""

    now: float
    models: tuple[ModelState, ...]
    gpus: tuple[GpuState, ...]
    waiting: int
    leases: int
    hosts: tuple[HostState, ...] = ()
    """The hosts beside the one that anvil-mux runs on."""
    pause: Pause | None = None
    """The pause that is on, as it was then."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """One request in a queue."""

    ticket: int
    model: str
    since: float


@dataclass(frozen=True, slots=True)
class UnderWay:
    """One request that waits or runs."""

    request: str
    """The id that its client was told; "": a load by hand."""
    ticket: int
    key: str
    """The name of its API key; "": none."""
    model: str
    backend: str
    """The backend at which it runs; "": it waits."""
    since: float
    """When it came, or began to run."""


def model_state(group: GpuGroup, model: Model, now: float, progress: Progress | None) -> ModelState:
    """One model, whose queue stands in this GPU group."""
    slots = model.slots
    slot = min(slots, key=lambda slot: (slot.host.is_lost, _SHOWN.index(slot.state)))
    first = next(iter(model.queue), None)
    drain = drain_of(slot, group.swaps_of(model), now)
    return ModelState(
        model=model.name,
        state=slot.state,
        backend=slot.name,
        gpus=slot.backend.gpu_names,
        aliases=slot.backend.aliases,
        presets=tuple(dict.fromkeys([p.name for each in slots for p in each.backend.presets])),
        waiting=len(model.queue),
        max_queue=int(most) if (most := model.settings.max_queue) < FOREVER else None,
        leases=sum(len(slot.holders) for slot in slots),
        last_error=slot.error,
        load_seconds=slot.load_seconds,
        home_seconds=_home_seconds(group, model, now),
        pinned=any(each.pinned for each in slots),
        progress=progress,
        oldest_wait=now - first.since if first else None,
        drain=drain,
        drained_for=answers([slot], now) if drain else (),
        deferred=_deferral(group, model, now),
        backends=tuple(_backend_state(group, model, each, now) for each in slots),
    )


def _home_seconds(group: GpuGroup, model: Model, now: float) -> float | None:
    """Seconds until a home backend of a model comes back, in whichever GPU group."""
    homes = [
        (each, slot) for each in group.groups_of(model) for slot in each.homes if slot.model == model.name
    ]
    if not homes or model.ready or model.is_coming:
        return None
    soonest = min([each.comes_back_at(slot, now) for each, slot in homes])
    return max(soonest - now, 0.0) if soonest < FOREVER else None


def _deferral(group: GpuGroup, model: Model, now: float) -> Deferral | None:
    """Until when and why the policy holds the swap to a model back, in whichever GPU group."""
    found = [each.deferred[model.name] for each in group.groups_of(model) if model.name in each.deferred]
    if not found or not model.queue:
        return None
    stay = found[0].stay
    return Deferral(max(stay.until - now, 0.0), stay.cause)


def _vram_to_declare(group: GpuGroup, slot: Slot) -> str:
    """The size to declare for a backend that takes its GPUs whole, if another one needs them too."""
    if not slot.held_last or not slot.whole or slot.backend.vram_measured:
        return ""
    others = [other for other in group.slots.values() if other is not slot]
    shared = any(other.holds.keys() & slot.holds.keys() for other in others)
    return to_declare(slot.held_last) if shared else ""


def _backend_state(group: GpuGroup, model: Model, slot: Slot, now: float) -> BackendState:
    idle = slot.state == "ready" and not slot.holders
    unload_at = slot.idle_until
    takes = group.footprints.held(slot.name) or ({} if slot.whole else slot.holds)
    figures = model.replicas.in_flight.figures(slot.name, now) if model.replicas else None
    return BackendState(
        backend=slot.name,
        state=slot.state,
        state_seconds=now - slot.since if slot.since > -FOREVER else None,
        gpus=slot.backend.gpu_names,
        leases=len(slot.holders),
        standby_level=slot.level if slot.state == "standby" else "",
        size=sum(takes.values()) if takes else None,
        idle_seconds=now - slot.used if idle else None,
        unload_seconds=max(unload_at - now, 0.0) if unload_at < FOREVER else None,
        ttl=slot.ttl if slot.ttl != FOREVER else None,
        load_seconds=slot.load_seconds,
        retry_seconds=max(slot.retry_at - now, 0.0),
        error=slot.error,
        log=slot.log,
        engine=figures if slot.serves else None,
        vram_to_declare=_vram_to_declare(group, slot),
        host=host_state(slot.host, now),
    )


def host_state(host: HostRecord, now: float) -> HostState | None:
    """One host; None: the one that anvil-mux runs on."""
    if not host.name:
        return None
    lost_seconds = now - host.since if host.is_lost else None
    why = host.why if host.is_lost or host.is_away else ""
    return HostState(host.name, lost_seconds, host.is_drained, host.is_away, why)


_SHOWN = ("ready", "draining", "loading", "cancelling", "evicting", "stuck", "demoting", "standby", "stopped")
"""The states of a backend in the order in which one is shown for several backends."""


def gpu_states(group: GpuGroup, known: Mapping[str, Gpu], now: float) -> list[GpuState]:
    """The GPUs of a GPU group; ``known``: those that the configuration describes, by name."""
    names = sorted({gpu for slot in group.slots.values() for gpu in slot.holds})
    return [_gpu_state(group, known.get(name) or Gpu(name), now) for name in names]


def _gpu_state(group: GpuGroup, gpu: Gpu, now: float) -> GpuState:
    slots = group.slots.values()
    here = [slot for slot in slots if gpu.name in slot.holds and slot.state in HOLDING]
    leaving = next((slot for slot in here if slot.state == "draining"), None)
    return GpuState(
        gpu=gpu.name,
        residents=tuple(slot.model for slot in here),
        state="draining" if leaving else min((s.state for s in here), key=_SHOWN.index, default="free"),
        drain=drain_of(leaving, group.swaps, now) if leaving else None,
        draining_leases=len(leaving.holders) if leaving else 0,
        total=gpu.vram,
        reserve=gpu.reserve,
        residuals=tuple((s.name, s.residual[gpu.name]) for s in slots if s.residual.get(gpu.name)),
        reserved_for=tuple(_reserved_for(group, gpu.name)),
        host=host_state(group.host, now),
        missing=gpu.missing,
    )


def _reserved_for(group: GpuGroup, gpu: str) -> list[str]:
    """The models that a swap under way keeps a GPU for, until it is theirs."""
    targets = [swap.target for swap in group.swaps if swap.target]
    return [slot.model for slot in targets if slot.state not in HOLDING and gpu in slot.holds]
