"""What the multiplexer looks like at one moment: /healthz, the page, the metrics and the commands read this.

Made under the multiplexer's lock from what the residencies hold, and never changed after that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from anvil_mux.config.config import Gpu
from anvil_mux.routing.ledger import Said
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.placement import HOLDING, Seat
from anvil_mux.scheduler.policy import FOREVER
from anvil_mux.scheduler.progress import Progress
from anvil_mux.scheduler.residency import Residency, idle_until


@dataclass(frozen=True, slots=True)
class BackendState:
    """One backend as /healthz shows it."""

    backend: str
    state: str
    state_seconds: float | None
    """How long it has been in its state; None: since the start."""
    gpus: tuple[str, ...]
    leases: int
    rests: str
    """The way by which it rests while it is parked, else ""."""
    size: int | None
    """Bytes of GPU memory that it takes, declared or as it was measured; None: not known."""
    idle_seconds: float | None
    """Since its last request ended, if none runs."""
    unload_seconds: float | None
    """Until it is put out because nobody uses it; None: it is not, or not now."""
    load_seconds: float | None
    retry_seconds: float
    """Until it may be loaded, or is stopped, again after a failure."""
    error: str
    log: tuple[str, ...]
    """The engine's last lines, if its load failed or it died."""
    engine: Said | None = None
    """What its engine said of itself last, where engines are read."""


@dataclass(frozen=True, slots=True)
class Deferral:
    """Why a line waits although its swap could begin."""

    seconds_left: float
    """May be infinite: until something changes."""
    reason: str


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model as /healthz and /v1/models show it."""

    model: str
    state: str
    """The furthest state of its backends: ready, draining, starting, ..., empty."""
    backend: str
    gpus: tuple[str, ...]
    aliases: tuple[str, ...]
    waiting: int
    leases: int
    last_error: str
    load_seconds: float | None
    pinned: bool = False
    """Once it is resident it is not put out for other models."""
    progress: Progress | None = None
    """Of its load, if it is being loaded."""
    oldest_wait: float | None = None
    """Seconds that the first in line has waited."""
    draining_target: str | None = None
    """What it makes room for while it drains; "" for nobody."""
    drain_seconds_left: float = 0.0
    deferred: Deferral | None = None
    backends: tuple[BackendState, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU as /healthz shows it."""

    gpu: str
    residents: tuple[str, ...]
    state: str
    draining_target: str
    draining_leases: int
    drain_seconds_left: float
    total: int | None = None
    """Bytes, where they are known."""
    reserve: int = 0
    """Bytes that no backend gets."""
    residuals: tuple[tuple[str, int], ...] = ()
    """Backends that rest, and the bytes that they hold here still."""
    reserved_for: tuple[str, ...] = ()
    """The models that a swap under way keeps it for."""


@dataclass(frozen=True, slots=True)
class Status:
    """The whole multiplexer at one moment."""

    now: float
    models: tuple[ModelState, ...]
    gpus: tuple[GpuState, ...]
    waiting: int
    leases: int


@dataclass(frozen=True, slots=True)
class Waiter:
    """One request in a line."""

    ticket: int
    model: str
    since: float


def model_state(
    residency: Residency, model: str, now: float, progress: Progress | None, footprints: Footprints
) -> ModelState:
    seats = residency.seats_of(model)
    seat = min(seats, key=lambda seat: _SHOWN.index(seat.state))
    first = next(iter(residency.lines[model]), None)
    target, until = residency.drains().get(seat.name, (None, now))
    return ModelState(
        model=model,
        state=seat.state,
        backend=seat.name,
        gpus=seat.backend.gpus,
        aliases=seat.backend.aliases,
        waiting=len(residency.lines[model]),
        leases=sum(len(seat.holders) for seat in seats),
        last_error=seat.error,
        load_seconds=seat.load_seconds,
        pinned=any(each.pinned for each in seats),
        progress=progress,
        oldest_wait=now - first.since if first else None,
        draining_target=target,
        drain_seconds_left=max(until - now, 0.0),
        deferred=_deferral(residency, model, now),
        backends=tuple(
            _backend_state(each, now, footprints.held(each.name), residency.said(each.name, now))
            for each in seats
        ),
    )


def _deferral(residency: Residency, model: str, now: float) -> Deferral | None:
    if residency.deferred is None or residency.deferred[0] != model or not residency.lines[model]:
        return None
    stay = residency.deferred[1]
    return Deferral(max(stay.until - now, 0.0), stay.reason)


def _backend_state(seat: Seat, now: float, measured: Mapping[str, int], said: Said | None) -> BackendState:
    idle = seat.state == "ready" and not seat.holders
    unload_at = idle_until(seat)
    takes = measured or ({} if seat.whole else seat.holds)
    return BackendState(
        backend=seat.name,
        state=seat.state,
        state_seconds=now - seat.since if seat.since > -FOREVER else None,
        gpus=seat.backend.gpus,
        leases=len(seat.holders),
        rests=seat.rests if seat.state == "standby" else "",
        size=sum(takes.values()) if takes else None,
        idle_seconds=now - seat.used if idle else None,
        unload_seconds=max(unload_at - now, 0.0) if unload_at < FOREVER else None,
        load_seconds=seat.load_seconds,
        retry_seconds=max(seat.retry_at - now, 0.0),
        error=seat.error,
        log=seat.log,
        engine=said if seat.state == "ready" else None,
    )


_SHOWN = ("ready", "draining", "loading", "cancelling", "evicting", "stuck", "demoting", "standby", "stopped")
"""Of several backends of one model, the state shown is the first of these."""


def _gpu_now(residency: Residency, gpu: str, now: float) -> GpuState:
    here = [seat for seat in residency.seats.values() if gpu in seat.holds and seat.state in HOLDING]
    state = min((seat.state for seat in here), key=_SHOWN.index, default="free")
    drains = residency.drains()
    for seat in here:
        if seat.name in drains:
            target, until = drains[seat.name]
            left = max(until - now, 0.0)
            return GpuState(gpu, tuple(s.model for s in here), "draining", target, len(seat.holders), left)
    return GpuState(gpu, tuple(seat.model for seat in here), state, "", 0, 0.0)


def gpu_state(residency: Residency, gpu: Gpu, now: float) -> GpuState:
    """One GPU of an island."""
    seats = residency.seats.values()
    return replace(
        _gpu_now(residency, gpu.id, now),
        total=gpu.vram,
        reserve=gpu.reserve,
        residuals=tuple((seat.name, seat.residual[gpu.id]) for seat in seats if seat.residual.get(gpu.id)),
        reserved_for=residency.promises().get(gpu.id, ()),
    )
