"""The load that a queue waits for: the weights that it will read may be read before it begins."""

from __future__ import annotations

from typing import NamedTuple

from anvil_mux.config.config import Backend
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.slot import LOADING, Slot
from anvil_mux.scheduler.state import GroupState

UNLOADING = ("ollama", "llamacpp")
"""The engines that forget their weights when they sleep, and read them again."""


class ComingLoad(NamedTuple):
    """A load that requests wait for and that has not begun; of two the lesser one probably begins first."""

    rank: tuple[bool, int, float, str]
    """Whether its swap has not begun, its priority (less first), the beginning of its queue, and its name."""
    backend: Backend


def coming_load(state: GroupState, model: Model, now: float) -> ComingLoad | None:
    """The load that the queue of ``model`` waits for; ``state``: of the GPU group in which it stands.

    None where it waits for no load, or for one that has begun or reads nothing from disk.
    """
    if model.ready or model.is_loading:
        return None
    targets = [
        swap.target for swap in state.swaps_of(model) if swap.target and swap.target.model == model.name
    ]
    slot = next(iter(targets or state.loadable(model, now)), None)
    if slot is None or not _reads_weights(slot):
        return None
    first = next(iter(model.queue.tickets))
    return ComingLoad((not targets, -model.priority, first.since, slot.name), slot.backend)


def _reads_weights(slot: Slot) -> bool:
    """Whether its load reads its weights from disk."""
    if slot.state in LOADING or not slot.backend.read_ahead:
        return False
    asleep = slot.level == "sleep" and slot.backend.engine in UNLOADING
    return asleep or slot.level in ("stop", "sleep-2")
