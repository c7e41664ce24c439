"""Why no backend of a model can be loaded: functions over a GPU group's state, which they do not change."""

from __future__ import annotations

from collections.abc import Sequence

from anvil_mux.config.kinds import gib
from anvil_mux.errors import (
    Crashed,
    DoesNotFit,
    GpuMemoryShort,
    HostMemoryShort,
    HostUnavailable,
    LoadError,
    MuxError,
    NothingResident,
    Overloaded,
    Stuck,
    with_log,
)
from anvil_mux.scheduler.events import LOCAL
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.slot import STAYING, HostRecord, Slot
from anvil_mux.scheduler.state import GroupState
from anvil_mux.scheduler.steps import Ticket

MOST_HOSTS = 5
"""How many hosts the text of an error names."""
MOST_CRASHES = 2
"""How often backends end under one request before that is refused."""


def refusal(state: GroupState, model: Model, now: float) -> MuxError | None:
    """Why no backend of ``model`` can be loaded; None if one can, or is loading or being evicted."""
    if model.slots[0].backend.url:
        return None  # nothing of ours is in the way of a server elsewhere
    pause = state.host.pause
    if pause.refuses:
        return pause.error(now)
    first: MuxError | None = None
    away: dict[HostRecord, None] = {}
    for each in state.groups_of(model):
        own = each.own(model)
        able = [slot for slot in own if slot.host.is_awaited]
        away.update({slot.host: None for slot in own if not slot.host.is_awaited})
        if not able:
            continue
        error = all_obstacles(each, able, now)
        if error is None:
            return None
        first = first or error
    return first or (unavailable(model.name, list(away), now) if away else None)


def unavailable(model: str, hosts: Sequence[HostRecord], now: float) -> MuxError:
    """The error of a request for a model none of whose hosts can have it."""
    whys = [_why_away(host, now) for host in hosts[:MOST_HOSTS]]
    more = f", and so on for {len(hosts) - MOST_HOSTS} more hosts" if len(hosts) > MOST_HOSTS else ""
    return HostUnavailable(f"{model} has no host to run on now: {', '.join(whys)}{more}.")


def _why_away(host: HostRecord, now: float) -> str:
    name = host.name or LOCAL
    return f"{name} has been lost for {now - host.since:.0f} s" if host.is_lost else f"{name} is drained"


def all_obstacles(state: GroupState, slots: Sequence[Slot], now: float) -> MuxError | None:
    """The same for some backends of a model in this GPU group, whose hosts take loads."""
    first: MuxError | None = None
    for slot in slots:
        error = _obstacle(state, slot, now)
        if error is None:
            return None
        first = first or error
    return first


def _obstacle(state: GroupState, slot: Slot, now: float) -> MuxError | None:
    if (gpu := state.left_gpu(slot)) and slot.state not in STAYING:
        theirs = f"other programs hold {gib(state.placement.others[gpu])} of GPU {gpu}"
        return GpuMemoryShort(f"{slot.name} is not loaded: {theirs}, which is left to them (`yield`).")
    if slot.state not in ("stopped", "standby", "stuck") or (slot.leaving and slot.state != "stuck"):
        return None
    for other in state.slots.values():
        if other.state == "stuck" and (other is slot or other.holds.keys() & slot.holds.keys()):
            return _stuck(other, slot, now)
    if slot.state == "stopped" and slot.retry_at > now:
        pause = slot.retry_at - now
        what = "ended" if slot.failed_starts == slot.crashes else "failed to load"
        text = f"{slot.name} {what} and is not tried again for {pause:.0f} s: {slot.error}"
        return LoadError(text, log=slot.log, retry_after=pause)
    why = state.placement.never_fits(slot) or state.memory.never_fits(slot)
    if why:
        return DoesNotFit(f"{slot.name} cannot be loaded: {why}.")
    return _no_room_beside(state.placement.irremovable(slot), slot, now)


def _no_room_beside(others: Sequence[Slot], slot: Slot, now: float) -> MuxError | None:
    """The error for a backend beside others that cannot be evicted now, and are not all pinned."""
    asleep = [other for other in others if other.state == "standby"]
    return _stuck(min(asleep, key=lambda other: other.retry_at), slot, now) if asleep else None


def _stuck(other: Slot, slot: Slot, now: float) -> Stuck:
    """The error for a backend that cannot be loaded because another, or itself, could not be stopped."""
    whose = "" if other is slot else f" and holds a GPU of {slot.model}"
    text = f"{other.name} could not be stopped{whose}: {other.error}"
    return Stuck(text, retry_after=other.retry_at - now)


def lack_of_memory(state: GroupState, model: Model, busy: set[str], now: float) -> MuxError | None:
    """Why an overdue queue is not served: the memory is held by others than this GPU group's backends.

    Other GPU groups are asked to free host memory that a backend lacks; None if they will.
    """
    may_go = ("ready", "draining", "evicting")
    others = [slot for slot in state.slots.values() if slot.state in may_go and not slot.pinned]
    first: MuxError | None = None
    for slot in [slot for slot in state.own(model) if slot.host.is_awaited and slot.state != "stuck"]:
        if slot.state not in ("stopped", "standby") or not busy.isdisjoint(slot.holds):
            return None  # its turn comes
        error = _lack_of(state, slot, others, now)
        if error is None:
            return None
        first = first or error
    return first


def _lack_of(state: GroupState, slot: Slot, others: Sequence[Slot], now: float) -> MuxError | None:
    """The same for one backend; ``others``: those of its GPU group that could make room for it."""
    if lack := state.placement.others_before(slot):
        return GpuMemoryShort(f"{slot.name} cannot be loaded: {lack}.")
    short = state.memory.short(slot, others)
    if short > 0 and not state.memory.call(slot, short, state.slots.values(), now):
        who = ", ".join(f"{name} has {gib(each)}" for name, each in state.memory.insisting(slot))
        return HostMemoryShort(f"{slot.name} lacks {gib(short)} of host memory: {who}.")
    return None


def no_room_to_wait(model: Model, waiting: int, most: int) -> Overloaded | None:
    """Why one more request may not wait for ``model``; ``waiting``: how many do for all, of ``most``."""
    if model.is_queue_full:
        text = f"overloaded: the queue of {model.name} is full: {len(model.queue)} waiting (its max_queue)."
    elif waiting >= most and model.queue.tickets:  # one may always wait: its GPU may be free
        text = f"overloaded: the queues of all models together are full: {waiting} waiting (max_queue)."
    else:
        return None
    return Overloaded(f"{text} Try again.")


def not_resident(state: GroupState, model: str, now: float) -> MuxError:
    """The error of a request that may force no swap: its model is not there, or nothing is."""
    pause = state.host.pause
    if pause.refuses:
        return pause.error(now)
    return NothingResident(f"{model} is not loaded, and this request does not allow a swap (swap: never).")


def of_crashes(ticket: Ticket) -> MuxError | None:
    """Why a request is refused under which backends ended: it may be what ends them."""
    if len(ticket.crashes) < MOST_CRASHES:
        return None
    *_, last = ticket.crashes
    often = f"{len(ticket.crashes)} engines ended while they worked on this request, so it is not sent again"
    return Crashed(with_log(f"{often}: {last.backend} {last.why}.", last.log))
