"""A swap in progress: a target, and the victims that make room for it.

Its GPUs are in no other swap until it ends. A swap without a target only evicts. What is done with swaps is
in group_swaps.py; here are the record and what can be read off those that are under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from anvil_mux.scheduler.causes import Cause
from anvil_mux.scheduler.policies import FOREVER, Swapping
from anvil_mux.scheduler.slot import HOLDING, LOADING, Slot


@dataclass(eq=False, slots=True)
class SwapInProgress:
    """One swap, from its decision until its target answers, or until its last victim has left."""

    target: Slot | None
    victims: list[Slot]
    """The victims that have not left yet; those that are ready still drain later than others."""
    cause: Cause
    severs: Cause
    """Why a request is severed that outlasts the drain."""
    begun: bool = False
    """Whether a victim is evicted already: there is no reprieve any more."""
    preload: bool = False
    """Whether it is a preload: no request waits for the target."""
    emptied: float = FOREVER
    """When the last drain ended."""
    evict_seconds: float = 0.0
    """Seconds that evicting the victims took after that."""
    gone: list[str] = field(default_factory=list)
    """The models of the victims that have left."""
    way: str = ""
    """The standby level from which the target is loaded, once that has begun."""
    cancel: Cause | None = None
    """Why the load of the target is to end before its time: unloaded, or unwanted."""

    def gpus(self) -> set[str]:
        held = set(self.target.holds) if self.target else set()
        for victim in self.victims:
            if victim.state in HOLDING:
                held.update(victim.holds)
        return held

    @property
    def evicts(self) -> tuple[str, ...]:
        """The models of all its victims."""
        return (*self.gone, *(victim.model for victim in self.victims))

    def seen(self, target: Slot) -> Swapping:
        """The swap to ``target`` as a policy is shown it."""
        moving = ("draining", "evicting", *LOADING)
        slots = [slot for slot in (*self.victims, target) if slot.state in moving]
        state, since = (slots[0].state, slots[0].since) if slots else ("evicting", self.emptied)
        return Swapping(target.model, self.evicts, state, since)


def coming(swaps: Iterable[SwapInProgress]) -> tuple[str, ...]:
    """Models that a swap under way will make resident."""
    return tuple([swap.target.model for swap in swaps if swap.target])


def swap_to(swaps: Iterable[SwapInProgress], slot: Slot) -> SwapInProgress | None:
    """The swap under way whose target is ``slot``."""
    return next((swap for swap in swaps if swap.target is slot), None)


def promises(swaps: Iterable[SwapInProgress]) -> dict[str, tuple[str, ...]]:
    """GPU -> the models that a swap under way keeps it for, until it is theirs."""
    kept: dict[str, tuple[str, ...]] = {}
    for swap in swaps:
        if swap.target and swap.target.state not in HOLDING:
            kept |= {gpu: (*kept.get(gpu, ()), swap.target.model) for gpu in swap.target.holds}
    return kept


def drains(swaps: Iterable[SwapInProgress]) -> dict[str, tuple[str, float]]:
    """Draining backend -> (the model that it makes room for, or "", and when the drain ends)."""
    return {
        victim.name: (swap.target.model if swap.target else "", victim.drain_until)
        for swap in swaps
        for victim in swap.victims
        if victim.state == "draining"
    }
