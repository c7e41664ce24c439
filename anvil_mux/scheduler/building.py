"""The making of GPU groups' states: from the configuration, and from the groups whose place they take.

A GPU group that goes on keeps its state, and is filled anew (``fill``). So is one into which others are
merged, once it has taken over what was under way there (``build_state``). Backends that go on keep their
slots, with all that hangs on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from anvil_mux.config.config import Backend, Gpu
from anvil_mux.scheduler.placement import Placement
from anvil_mux.scheduler.planner import worth
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.state import LISTED, Common, GroupState


class Draft(NamedTuple):
    """A GPU group as it is to be."""

    name: str
    host: str
    backends: Sequence[Backend]
    before: Sequence[GroupState] = ()
    """The states of the groups that it goes on from."""


def build_state(draft: Draft, common: Common) -> GroupState:
    """The state of a GPU group that is new, with what was under way in those that it goes on from."""
    state = GroupState(
        name=draft.name,
        common=common,
        placement=Placement((), (), lambda: common.settings.eviction, common.hosts),
        host=common.hosts[draft.host],
        memory=common.memories[draft.host],
    )
    for each in draft.before:
        state.settled += each.settled
        state.taken_back += each.taken_back
        state.swaps += each.swaps
        state.preloads += each.preloads
        state.unseen |= each.unseen
        state.placement.others = {**state.placement.others, **each.placement.others}
    return state


def fill(state: GroupState, draft: Draft) -> None:
    """Give a GPU group its backends. They keep the slots that they have, unless they left them for good."""
    settings, placement = state.common.settings, state.placement
    kept = {name: slot for each in draft.before for name, slot in each.slots.items() if not slot.is_left}
    names = dict.fromkeys(gpu for backend in draft.backends for gpu in backend.gpu_names)
    gpus = [settings.gpus.get(name) or Gpu(name) for name in names]
    for slot in placement.fill(draft.backends, gpus, kept):
        state.memory.join(slot, partial(worth, state))
        placement.measure(slot, state.footprints.held(slot.name, slot.backend.service.digest))
    new = [slot for slot in state.slots.values() if slot.backend.preload and slot.name not in kept]
    state.filled(_by_model(state.slots.values(), settings.wanted))
    state.preloads = [*new, *state.preloads]


def describe(state: GroupState, slot: Slot, backend: Backend) -> None:
    """Have a backend that goes on described otherwise."""
    before = slot.backend
    state.placement.describe(backend, slot)
    state.placement.measure(slot, state.footprints.held(slot.name, slot.backend.service.digest))
    state.models[slot.model].described(slot)
    if LISTED(before) != LISTED(backend):
        state.described()


def _by_model(slots: Iterable[Slot], wanted: Mapping[str, Backend]) -> dict[str, list[Slot]]:
    """Model -> its slots, also those that are of another until they are left."""
    found: dict[str, list[Slot]] = {}
    for slot in slots:
        found.setdefault(slot.model, []).append(slot)
        coming = wanted.get(slot.name)
        if coming and coming.model != slot.model:
            found.setdefault(coming.model, []).append(slot)
    return found
