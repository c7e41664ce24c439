"""The tables that say where backends, queues and hosts are, over all GPU groups.

When GPU groups are exchanged for others only what these have is looked up and written anew: of thousands of
groups a reload, or a backend that was replaced, concerns a few.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.hosts import HostRecord
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.slot import Slot
from anvil_mux.scheduler.state import GroupState

BY_NAME = attrgetter("name")

SlotsByModel = Mapping[str, Sequence[Slot]]


@dataclass(slots=True)
class ModelChange:
    """The backends of a model, before and after, in the GPU groups that an exchange has changed."""

    gone: dict[Slot, None] = field(default_factory=dict)
    come: list[Slot] = field(default_factory=list)
    groups: bool = False
    """Whether it has backends in other groups than before."""


class Index:
    """The lists and tables of one layout. Each is changed in place, so others may keep them."""

    def __init__(self) -> None:
        self.groups: list[GpuGroup] = []
        """All groups, in the order of their last backends in the configuration."""
        self.by_name: dict[str, GpuGroup] = {}
        self.by_host: dict[str, list[GpuGroup]] = {}
        """Host -> its groups, by name."""
        self.records: dict[str, HostRecord] = {}
        """The hosts that have groups."""
        self.models: dict[str, Model] = {}
        """All models, also those that are about to go."""
        self.of_model: dict[str, GpuGroup] = {}
        """Model -> the group in which its queue stands."""
        self.of_backend: dict[str, GpuGroup] = {}
        self.groups_of: dict[str, list[GpuGroup]] = {}
        """Model -> the groups that have backends of it, by name."""
        self.states: dict[str, list[GroupState]] = {}
        """Model -> the states of these groups."""
        self.spread: dict[str, None] = {}
        """The models with backends in several groups."""
        self._of_gpu: dict[str, str] = {}
        """GPU -> the name of the group that had it last."""
        self.places: Mapping[str, int] = {}
        """Backend -> its place in the configuration."""
        self._last: dict[str, str] = {}
        """Group -> the last of its backends in the configuration."""

    # Questions

    def of_gpu(self, gpu: str) -> GpuGroup | None:
        """The group that has a GPU, also if only the new description of one of its backends needs it."""
        return self.by_name.get(self._of_gpu.get(gpu, ""))

    def in_order(self, some: Collection[GpuGroup]) -> list[GpuGroup]:
        """Some of the groups, in the order of all."""
        return sorted(some, key=self._rank)

    def _rank(self, group: GpuGroup) -> tuple[int, str]:
        """The place of the group's last backend in the configuration; first those whose all leave."""
        return self.places.get(self._last[group.name], -1), group.name

    def rank_of(self, slot: Slot) -> tuple[int, str]:
        """The place of a slot's group among all."""
        return self._rank(self.of_backend[slot.name])

    # Changes

    def exchange(
        self, before: Mapping[GpuGroup, SlotsByModel], now: Sequence[GpuGroup]
    ) -> dict[str, ModelChange]:
        """Note that the groups ``now`` take the place of those ``before``, of which some go on.

        ``before``: each with the slots that it had. Returns what this changes for each model.
        """
        go_on = before.keys() & set(now)
        gone = dict.fromkeys(group for group in before if group not in go_on)
        for group, own in before.items():
            for name in (slot.name for slots in own.values() for slot in slots):
                if group in gone or name not in group.slots:
                    self.of_backend.pop(name, None)
        for group in gone:
            del self.by_name[group.name], self._last[group.name]
        moved = dict.fromkeys(group for group in now if self._put_in(group))
        self._order(gone, moved)
        self._note_hosts(gone, [group for group in now if group not in go_on])
        found: dict[str, ModelChange] = {}
        for group in dict.fromkeys((*before, *now)):
            was, own = before.get(group, {}), {} if group in gone else group.state.own_slots
            for name in dict.fromkeys((*was, *own)):
                if group in moved or was.get(name) != own.get(name):
                    change = found.setdefault(name, ModelChange())
                    change.gone.update(dict.fromkeys(was.get(name, ())))
                    change.come += own.get(name, ())
                    change.groups |= group not in go_on or (name in was) != (name in own)
        self._note_groups([name for name, change in found.items() if change.groups], gone, now)
        return found

    def _put_in(self, group: GpuGroup) -> bool:
        """Note what a group has; whether its place among all may be another than before."""
        self.by_name[group.name] = group
        for name, slot in group.slots.items():
            if self.of_backend.get(name) is not group or slot.leaving:
                self.of_backend[name] = group
                self._of_gpu.update(dict.fromkeys(slot.backend.gpu_names, group.name))
                coming = group.state.common.settings.wanted.get(name)
                if coming and coming is not slot.backend and coming.host == slot.host.name:
                    self._of_gpu.update(dict.fromkeys(coming.gpu_names, group.name))
        before, wanted = self._last.get(group.name), group.slots.keys() & self.places.keys()
        self._last[group.name] = max(wanted, key=self.places.__getitem__, default="")
        return self._last[group.name] != before

    def _order(self, gone: Collection[GpuGroup], moved: Collection[GpuGroup]) -> None:
        if gone or moved:
            self.groups[:] = [group for group in self.groups if group not in gone and group not in moved]
        for group in moved:
            insort(self.groups, group, key=self._rank)

    def _note_hosts(self, gone: Collection[GpuGroup], new: Sequence[GpuGroup]) -> None:
        of_new: dict[str, list[GpuGroup]] = {}
        for group in new:
            of_new.setdefault(group.host.name, []).append(group)
        for host in dict.fromkeys(group.host for group in (*gone, *new)):
            kept = [group for group in self.by_host.get(host.name, ()) if group not in gone]
            self.by_host[host.name] = sorted([*kept, *of_new.get(host.name, ())], key=BY_NAME)
            self.records[host.name] = host
            if not self.by_host[host.name]:
                del self.by_host[host.name], self.records[host.name]

    def _note_groups(
        self, models: Sequence[str], gone: Collection[GpuGroup], now: Sequence[GpuGroup]
    ) -> None:
        """Note in which groups these models have their backends now."""
        of_now: dict[str, list[GpuGroup]] = {name: [] for name in models}
        for group in now:
            for name in of_now.keys() & group.state.own_slots.keys():
                of_now[name].append(group)
        again = set(now)
        for name, own in of_now.items():
            others = [g for g in self.groups_of.get(name, ()) if g not in gone and g not in again]
            self._note_model(name, sorted([*others, *own], key=BY_NAME))

    def _note_model(self, name: str, own: list[GpuGroup]) -> None:
        if not own:
            for table in (self.models, self.groups_of, self.states, self.of_model, self.spread):
                table.pop(name, None)
            return
        model = self.models[name]
        self.groups_of[name], self.states[name] = own, [group.state for group in own]
        self.of_model[name] = next((group for group in own if group.name == model.home), own[0])
        model.home = self.of_model[name].name if len(own) > 1 else ""
        if model.home:
            self.spread[name] = None
        else:
            self.spread.pop(name, None)
