"""How swaps begin, go on and end.

After each eviction of a swap the room is looked at again: no backend is evicted that need not be. A swap that
only drains is dissolved as soon as no request waits for its target, or another replica is loaded for them on
GPUs that nobody holds, and its victims are reprieved; one begun is finished, unless its load is cancelled. A
queue of higher priority takes over a swap that only drains (``planner.takeover``). After a failed load there
is no rollback: the backend is stopped, and the next question serves the queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anvil_mux.scheduler.causes import BY_HAND, CLEARING, Cause
from anvil_mux.scheduler.costs import source_of
from anvil_mux.scheduler.moves import Moves
from anvil_mux.scheduler.planner import Takeover, free_place, victims
from anvil_mux.scheduler.policies import FOREVER
from anvil_mux.scheduler.slot import LOADING, Slot
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.steps import Step
from anvil_mux.scheduler.swap import SwapInProgress, swap_to


class GroupSwaps:
    """The swaps of one GPU group.

    ``siblings(model)``: these and those of the other GPU groups that have backends of a model.
    """

    def __init__(
        self, state: GroupState, moves: Moves, siblings: Callable[[str], Sequence[GroupSwaps]]
    ) -> None:
        self._state = state
        self._moves = moves
        self._siblings = siblings

    # Begin

    def begin(
        self,
        target: Slot | None,
        leaving: list[Slot],
        now: float,
        cause: Cause,
        *,
        preload: bool = False,
        severs: Cause | None = None,
    ) -> SwapInProgress:
        """Begin a swap; ``severs``: why requests are severed, if neither for the target nor for ``cause``."""
        if severs is None:
            severs = Cause("evicted", target.model) if target else cause
        self._state.changed()
        for other in self._state.swaps:  # in which its turn to drain has not come
            other.victims = [each for each in other.victims if each.state != "ready" or each not in leaving]
        swap = SwapInProgress(target, [*leaving], cause, severs, preload=preload)
        self._state.swaps.append(swap)
        if target:
            self._note_target(target, coming=True)
        self._drain(swap, now)
        return swap

    def _note_target(self, target: Slot, *, coming: bool) -> None:
        """Note that a backend is the target of a swap from now on, or is so no longer."""
        target.coming = coming
        self._state.models[target.model].note(target)
        self._state.memory.changed()

    def evict(self, slot: Slot, now: float, cause: Cause, *, severs: Cause | None = None) -> None:
        """Begin to evict a resident without loading another backend."""
        self.begin(None, [slot], now, cause, severs=severs)

    def begin_leaving(self, slot: Slot, now: float) -> None:
        """Begin to evict a backend for good, once its leases have ended."""
        assert slot.leaving
        self.begin(None, [slot], now, Cause(slot.leaving))

    def _drain(self, swap: SwapInProgress, now: float) -> None:
        """Close the gates of the victims that are resident.

        While some have leases and no bound the others go on serving: their turn comes when those have ended.
        """
        if any(victim.is_endless for victim in swap.victims):
            return
        target = swap.target.model if swap.target else ""
        bounds = {each: self._bound(each, swap, now) for each in swap.victims if each.state == "ready"}
        endless = [each for each, seconds in bounds.items() if each.holders and seconds == FOREVER]
        for victim in endless or bounds:
            self._moves.drain(victim, now, swap.cause, seconds=bounds[victim], target=target)

    def _bound(self, victim: Slot, swap: SwapInProgress, now: float) -> float:
        """How long a victim may drain from now on.

        Answers that ran already when the first request for the target came have had their time since then: to
        be held back for them and to wait for their drain is one wait.
        """
        if swap.cause.kind == "silent":
            return 0.0
        if swap.cause.kind in BY_HAND:
            return self._state.timeouts.drain_timeout
        seconds = self._state.drain_timeout(victim)
        queue = self._state.models[swap.target.model].queue if swap.target else None
        if not (queue and victim.holders):
            return seconds
        since, last = queue.since, next(reversed(victim.holders.values()))
        return max(since + seconds - now, 0.0) if last <= since else seconds

    def bound_anew(self, victim: Slot, now: float) -> bool:
        """Bound a drain anew, now that an answer has ended; whether it ends earlier for that."""
        swap = next((each for each in self._state.swaps if victim in each.victims), None)
        return swap is not None and self._end_by(victim, now + self._bound(victim, swap, now))

    def hasten(self, slot: Slot, now: float) -> bool:
        """Bound a drain as one that people ask for; whether that ends it earlier."""
        until = now + self._state.timeouts.drain_timeout
        return slot.state == "draining" and self._end_by(slot, until)

    def _end_by(self, slot: Slot, until: float) -> bool:
        if slot.drain_until <= until:
            return False
        slot.drain_until = until
        self._state.changed()
        return True

    # Go on

    def advance(self, now: float) -> Step | None:
        """The next step of the swaps under way."""
        for swap in tuple(self._state.swaps):
            # Nothing is evicted on a host that is away, but a load may begin elsewhere.
            is_steered = self._state.host.is_steered
            step = self._go_on(swap, now) if is_steered else self._go_elsewhere(swap, now)
            if step:
                return step
        return None

    def _go_on(self, swap: SwapInProgress, now: float) -> Step | None:
        """The next step of one swap."""
        target = swap.target
        if target and not (swap.begun or swap.preload or self._is_wanted(target)):
            self.dissolve(swap, now)
            return None
        if step := self._cancel(swap, now) or self._evict_next(swap, now):
            return step
        if swap.victims:
            return self._go_elsewhere(swap, now)
        if target is None:
            self._end(swap)
        elif target.state not in LOADING:
            if not self._has_room(swap, target, now):
                return self._evict_next(swap, now)
            if self._state.memory.has_room(target):  # else a sleeper yields first
                return self._load(swap, target, now)
        return None

    def _is_wanted(self, target: Slot) -> bool:
        return bool(self._state.models[target.model].queue.tickets)

    def _go_elsewhere(self, swap: SwapInProgress, now: float) -> Step | None:
        """Load another backend for the queue of a swap that only drains, if that serves it no later.

        The drain is called off in the same moment in which that load begins, never for the hope of one: so no
        drain is called off and begun again without end.
        """
        target = swap.target
        if target is None or swap.begun or swap.preload:
            return None
        model = self._state.models[target.model]
        slot = free_place(model, swap, self._state, now) if model.replicas else None
        if slot is None:
            return None
        self.dissolve(swap, now)
        siblings = self._siblings(model.name)
        there = next(each for each in siblings if each._state.slots.get(slot.name) is slot)
        return there._load(there.begin(slot, [], now, swap.cause), slot, now)

    def take_over(self, found: Takeover, now: float) -> None:
        """Have a swap that only drains go on for a queue of higher priority.

        The drains of those that go for it, too, end when they would have ended. This comes to an end: a drain
        goes on for none but a queue of higher priority, and a swap that has begun is finished.
        """
        swap, target, more = found
        self._state.changed()
        if swap.target:
            swap.target.next_level = ""
            self._note_target(swap.target, coming=False)
        spared = [each for each in swap.victims if each.holds.keys().isdisjoint(target.holds)]
        swap.target, swap.cause = target, Cause("outranked", target.model)
        swap.severs = Cause("evicted", target.model)
        swap.victims = [each for each in swap.victims if each not in spared]
        self._note_target(target, coming=True)
        for victim in [each for each in swap.victims if each.state == "draining"]:
            self._moves.drain_on(victim, now, swap.cause, target=target.model)
        swap.victims += more
        self._drain(swap, now)
        for victim in [each for each in spared if each.state == "draining"]:
            self.reprieve(victim, now)

    def _load(self, swap: SwapInProgress, target: Slot, now: float) -> Step:
        swap.begun = True
        swap.evict_seconds = max(now - swap.emptied, 0.0)
        swap.way = target.level
        return self._moves.load(target, now, swap.cause)

    def _cancel(self, swap: SwapInProgress, now: float) -> Step | None:
        """End a load that is to be cancelled, unless it was asked for again meanwhile."""
        slot = swap.target
        if not (swap.cancel and slot and slot.state == "loading"):
            return None
        if self._is_wanted(slot) and not self._state.must_go(slot):
            swap.cancel = None
            return None
        return self._moves.cancel(slot, now, swap.cancel)

    def _evict_next(self, swap: SwapInProgress, now: float) -> Step | None:
        """Evict the next victim without leases, or whose drain is over; victims in standby come last."""
        resident = [victim for victim in swap.victims if victim.state in ("ready", "draining")]
        if resident and swap.target and self._may_spare(swap.target) and self._state.fits(swap.target):
            for victim in resident:  # the victims before them freed more than was known
                swap.victims.remove(victim)
                self.reprieve(victim, now)
            return None
        if any(victim.is_endless for victim in resident):
            return None  # as long as nobody was evicted all of them may be reprieved
        if any(victim.state == "ready" for victim in resident):
            self._drain(swap, now)
        draining = [victim for victim in resident if victim.state == "draining"]
        for victim in draining:
            if now >= victim.drain_until or not (victim.holders or self._state.memory.makes_way(victim, now)):
                swap.begun = True
                swap.emptied = now
                return self._moves.evict(victim, now, swap.cause, swap)
        if draining or swap.target is None:
            return None
        return self._demote_next(swap, swap.target, now)

    def _demote_next(self, swap: SwapInProgress, target: Slot, now: float) -> Step | None:
        """Demote the next victim in standby, if the target still lacks the memory that it keeps."""
        for victim in [victim for victim in swap.victims if victim.state == "standby"]:
            if not self._state.fits(target):
                swap.begun = True
                return self._moves.demote(victim, now, Cause("memory_needed"), target=target.model)
            swap.victims.remove(victim)
        return None

    def _may_spare(self, target: Slot) -> bool:
        """Whether a victim may be spared after all: a target that takes its GPUs whole needs all of them."""
        return not target.whole or self._state.memory.budget is not None

    def _has_room(self, swap: SwapInProgress, target: Slot, now: float) -> bool:
        """Whether the target fits now that its victims are gone; if not, others go as well for its queue."""
        state = self._state
        if state.fits(target):
            return True
        busy = state.busy_gpus(but=[swap])
        wanted = not swap.preload and self._is_wanted(target)
        more = victims(state, target, busy, frozenset(), now) if wanted else None
        if more is None:
            self.dissolve(swap, now)
        else:
            swap.victims += more
            self._drain(swap, now)
        return False

    # End

    def dissolve(self, swap: SwapInProgress, now: float) -> None:
        """End a swap before its target was loaded; victims that only drained stay resident."""
        self._end(swap)
        if swap.target:
            swap.target.next_level = ""
        for victim in swap.victims:
            if victim.state == "draining":
                self.reprieve(victim, now)

    def end_lost(self) -> None:
        """End all swaps without a further step: the host is lost."""
        for swap in tuple(self._state.swaps):
            self._end(swap)

    def call_off(self, swap: SwapInProgress, now: float) -> None:
        """End a swap whose target is not wanted any more. Victims that are being evicted are waited for."""
        going = [victim for victim in swap.victims if victim.state == "evicting"]
        self.dissolve(swap, now)
        self._wait_for(swap, going, now)

    def _wait_for(self, ended: SwapInProgress, going: list[Slot], now: float) -> None:
        """Wait for the victims of a swap that was ended while they are being evicted."""
        if going:
            rest = SwapInProgress(None, going, ended.cause, ended.severs, begun=True)
            self._state.swaps.append(rest)

    def give_up(self, slot: Slot, now: float, cause: Cause) -> None:
        """Have a backend go that is resident, or on its way to be."""
        swap = swap_to(self._state.swaps, slot)
        if swap is None:
            self.evict(slot, now, cause)
        elif slot.state in LOADING:
            swap.cancel = cause
        else:
            self.call_off(swap, now)

    def reprieve(self, victim: Slot, now: float) -> None:
        """Make a victim that only drained ready again; one that is leaving drains on."""
        if victim.state == "ready":
            return
        if victim.leaving:
            self.begin_leaving(victim, now)
        else:
            self._moves.reprieve(victim, now)

    def reprieve_all(self, now: float) -> None:
        """End the swaps that only drain, and were begun for a reason that is over (``CLEARING``)."""
        for swap in [swap for swap in self._state.swaps if swap.cause.kind in CLEARING]:
            if not (swap.begun or any(map(self._state.must_go, swap.victims))):
                for victim in swap.victims:
                    victim.next_level = ""
                self.dissolve(swap, now)

    def spare(self, slot: Slot, now: float) -> None:
        """Take a backend that was pinned out of the swaps that drain it for another model."""
        for swap in self._state.swaps:
            if swap.target and slot in swap.victims and slot.state in ("ready", "draining"):
                swap.victims.remove(slot)
                self.reprieve(slot, now)

    def left(self, victim: Slot) -> None:
        """A victim has left its GPUs."""
        for swap in self._state.swaps:
            if victim in swap.victims:
                swap.victims.remove(victim)
                swap.gone.append(victim.model)

    def learn(self, target: Slot, way: str, seconds: float) -> None:
        """Learn the cost of the swap to ``target``, which was loaded from the standby level ``way``."""
        for swap in self._state.swaps:
            if swap.target is target:
                source = source_of(swap.gone)
                where = {"host": target.host.name, "engine": target.backend.engine}
                self._state.costs.learn(source, target.model, way, swap.evict_seconds, seconds, **where)

    def end_to(self, slot: Slot) -> None:
        """The load of ``slot`` has ended, one way or another."""
        for swap in [swap for swap in self._state.swaps if swap.target is slot]:
            self._end(swap)

    def _end(self, swap: SwapInProgress) -> None:
        self._state.changed()
        self._state.swaps.remove(swap)
        if swap.target:
            self._note_target(swap.target, coming=False)
