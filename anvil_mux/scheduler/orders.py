"""The facts about what people ask for: unload a model, pin it, take another configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from anvil_mux.errors import Cancelled, UnknownModel
from anvil_mux.scheduler.admission import Admission
from anvil_mux.scheduler.causes import UNLOADED, Leaving
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.group_swaps import GroupSwaps
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.slot import LOADING
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.upkeep import may_be_stopped


class Orders:
    """The orders to one GPU group.

    ``siblings(model)``: this and those of the other GPU groups that have backends of a model.
    """

    def __init__(
        self,
        state: GroupState,
        admission: Admission,
        swaps: GroupSwaps,
        siblings: Callable[[str], Iterable[Orders]],
    ) -> None:
        self._state = state
        self._siblings = siblings
        self._admission = admission
        self._swaps = swaps

    def unload(self, model: Model, now: float) -> bool:
        """Evict the backends of ``model`` after their drain; False: there is nothing to be done.

        Those in standby are stopped, and loads under way are cancelled; requests that wait for them fail.
        """
        is_ready = bool(model.ready)
        found = [each._unload_here(model, is_ready, now) for each in self._siblings(model.name)]
        return any(found)

    def _unload_here(self, model: Model, is_ready: bool, now: float) -> bool:
        """Unload what is in this GPU group; ``is_ready``: the model was resident, here or elsewhere."""
        slots = [s for s in self._state.own(model) if not s.host.is_lost and not s.backend.url]
        if not slots:
            return False
        for slot in slots:
            slot.unloaded = True
        ready = [slot for slot in slots if slot.state == "ready"]
        given_up = self._give_up_load(model, is_ready, now)
        for slot in ready:
            self._swaps.evict(slot, now, UNLOADED)
        standby = [] if is_ready else [slot for slot in slots if may_be_stopped(self._state, slot)]
        for slot in standby:
            slot.next_level = "stop"
        hastened = [slot for slot in slots if self._swaps.hasten(slot, now)]
        return bool(ready or standby or given_up or hastened)

    def _give_up_load(self, model: Model, is_ready: bool, now: float) -> bool:
        """End the swaps to ``model`` here, and the wait for them; False if there is neither."""
        swaps = [swap for swap in self._state.swaps if swap.target and swap.target.model == model.name]
        for swap in swaps:
            if swap.target and swap.target.state in LOADING:
                swap.cancel = UNLOADED
            else:
                self._swaps.call_off(swap, now)
        if is_ready:
            return bool(swaps)
        waits = bool(model.queue.tickets)
        text = (
            f"{model.name} was unloaded by hand while this request waited for it. Send it again to load it."
        )
        self._admission.fail_queue(model, Cancelled(text), now)
        return bool(swaps) or waits

    def unload_when_idle(self, model: Model, now: float) -> bool:
        """Evict the backends of ``model`` once nobody uses it, unless it is asked for before; True: now.

        A load under way counts as used if requests wait for it.
        """
        model.unload_when_idle = False
        if not model.ready:
            idle = model.is_loading and not model.queue.tickets
            return idle and self.unload(model, now)
        if model.is_used:
            model.unload_when_idle = True
            return False
        return self.unload(model, now)

    def pin(self, model: Model, now: float, *, pinned: bool) -> None:
        """Keep ``model``, once it is resident, from being evicted for others; or do so no longer."""
        if not any(slot.pinned != pinned and not slot.leaving for slot in model.slots):
            return
        self._state.emit(Event(now, "pinned" if pinned else "unpinned", model.name))
        for each in self._siblings(model.name):
            each._pin_here(model, now, pinned=pinned)

    def _pin_here(self, model: Model, now: float, *, pinned: bool) -> None:
        self._state.changed()
        self._state.memory.changed()
        for slot in [s for s in self._state.own(model) if s.pinned != pinned and not s.leaving]:
            slot.pinned = pinned
            if pinned:
                self._swaps.spare(slot, now)
        self._admission.fail_refused(now)

    def retire(self, leaving: Mapping[str, Leaving], served: Set[str], now: float) -> None:
        """Have backends leave for good, for these reasons; fail the queues of models not ``served``."""
        slots = [slot for name, slot in self._state.slots.items() if name in leaving]
        for slot in slots:
            slot.leaving, slot.pinned = slot.leaving or leaving[slot.name], False
        for swap in tuple(self._state.swaps):
            if swap.target and swap.target.leaving and swap.target.state not in LOADING:
                self._swaps.dissolve(swap, now)
        for slot in [slot for slot in slots if not slot.host.is_lost]:
            if slot.state == "ready":
                self._swaps.begin_leaving(slot, now)
            elif slot.state == "standby":
                slot.next_level = "stop"
        for model in self._state.models.values():
            if model.queue.tickets and model.name not in served:
                self._admission.fail_queue(model, UnknownModel(model.name, served), now)
