"""How many backends of a model are resident at once, over all GPU groups and hosts: its ``most``.

A backend with a ``most`` is loaded only while fewer backends of its model than that are resident or coming;
of a model that is served in two stages, fewer of the same stage. Counted are the backends that are ready, and
the targets of swaps. Not counted are those

- that drain or are being evicted, or whose load is being cancelled: they leave, and a queue that they were
  evicted for need not wait for them;
- in standby, or stuck;
- that the configuration has no longer, or not as it is;
- on a host that is lost or drained: what is there serves nobody, or is about to stop.

So there may be too many at times: a drain is reprieved, a host is back, two were adopted, ``most`` became
less. Then backends are given up until there are as many as there may be: first a swap whose load has not
begun, then a load that no request waits for, then the backend with the fewest requests in flight, which is
drained and evicted as for any other reason.
"""

from __future__ import annotations

from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.slot import Slot


def may_come(model: Model, slot: Slot) -> bool:
    """Whether one more backend like ``slot`` may be resident."""
    most = slot.backend.most
    return most is None or len(_counted(model, slot)) < most


def surplus(model: Model) -> Slot | None:
    """The next backend to give up because more are resident or coming than may be; None: there are not."""
    found = [slot for slot in reversed(model.active) if _is_too_many(model, slot)]
    able = [slot for slot in found if slot.state != "loading" or not model.queue.tickets]
    return min(able, key=_value, default=None)


def _value(slot: Slot) -> tuple[int, int, float]:
    """How much is lost with a backend, the least first."""
    stage = 2 if slot.state == "ready" else int(slot.state == "loading")
    return stage, len(slot.holders), slot.used


def _is_too_many(model: Model, slot: Slot) -> bool:
    most = slot.backend.most
    return most is not None and _counts(slot) and len(_counted(model, slot)) > most


def _counted(model: Model, like: Slot) -> list[Slot]:
    """The backends of a model that are resident or coming, for the same stage."""
    stage = like.backend.infer_type
    return [
        slot
        for slot in model.active
        if slot.model == like.model and slot.backend.infer_type == stage and _counts(slot)
    ]


def _counts(slot: Slot) -> bool:
    if slot.leaving or not slot.host.takes_loads:
        return False
    return slot.state in ("ready", "loading") or (slot.coming and slot.state != "cancelling")
