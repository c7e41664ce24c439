"""The tables that say where backends, queues and hosts are, over all GPU groups.

When GPU groups are exchanged for others only what these have is looked up and written anew: of thousands of
groups a reload, or a backend that was replaced, concerns a few.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter

from anvil_mux.config.config import Backend
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.hosts import HostRecord
from anvil_mux.scheduler.model import Model
from anvil_mux.scheduler.state import GroupState

BY_NAME = attrgetter("name")
FEW_GROUPS = 16
"""A model with backends in more GPU groups is wide: not all of them are asked for each change."""


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
        self._places: Mapping[str, int] = {}
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

    def _rank(self, group: GpuGroup) -> int:
        """The place of the group's last backend in the configuration; first those whose all leave."""
        return self._places.get(self._last[group.name], -1)

    def siblings(self, models: Iterable[str], but: Collection[GpuGroup]) -> list[GpuGroup]:
        """The groups that have backends of these models, ``but`` some."""
        but = set(but)
        found = dict.fromkeys(group for name in models for group in self.groups_of.get(name, ()))
        return [group for group in found if group not in but]

    # Changes

    def exchange(
        self,
        old: Sequence[GpuGroup],
        made: Sequence[GpuGroup],
        models: Mapping[str, Model | None],
        wanted: Mapping[str, Backend],
        places: Mapping[str, int],
    ) -> None:
        """Put the groups ``made`` in the place of the ``old`` ones.

        ``models``: those that have, or had, backends there; None: it is gone. ``wanted``: the backends of the
        configuration, and ``places`` where each stands in it.
        """
        for group in old:
            self._take_out(group)
        for group in made:
            self._put_in(group, wanted, places)
        self._places = places
        self._order(old, made)
        self._note_hosts(old, made)
        of_made: dict[str, list[GpuGroup]] = {}
        for group in made:
            for name in group.state.models:
                of_made.setdefault(name, []).append(group)
        gone = set(old)
        for name, model in models.items():
            kept = [group for group in self.groups_of.get(name, ()) if group not in gone]
            self._note_model(name, model, sorted([*kept, *of_made.get(name, ())], key=BY_NAME))

    def _take_out(self, group: GpuGroup) -> None:
        for name in group.slots:
            del self.of_backend[name]
        del self.by_name[group.name], self._last[group.name]

    def _put_in(self, group: GpuGroup, wanted: Mapping[str, Backend], places: Mapping[str, int]) -> None:
        self.by_name[group.name] = group
        self._last[group.name] = max(group.slots, key=lambda name: places.get(name, -1), default="")
        for name, slot in group.slots.items():
            self.of_backend[name] = group
            self._of_gpu.update(dict.fromkeys(slot.backend.gpu_names, group.name))
            coming = wanted.get(name)
            if coming and any(host.name == coming.host for host in group.hosts):
                self._of_gpu.update(dict.fromkeys(coming.gpu_names, group.name))

    def _order(self, old: Sequence[GpuGroup], made: Sequence[GpuGroup]) -> None:
        gone = set(old)
        if gone:
            self.groups[:] = [group for group in self.groups if group not in gone]
        for group in made:
            insort(self.groups, group, key=self._rank)

    def _note_hosts(self, old: Sequence[GpuGroup], made: Sequence[GpuGroup]) -> None:
        gone, of_made = set(old), dict[str, list[GpuGroup]]()
        for group in made:
            for host in group.hosts:
                of_made.setdefault(host.name, []).append(group)
        for host in dict.fromkeys(host for group in (*old, *made) for host in group.hosts):
            kept = [group for group in self.by_host.get(host.name, ()) if group not in gone]
            self.by_host[host.name] = sorted([*kept, *of_made.get(host.name, ())], key=BY_NAME)
            self.records[host.name] = host
            if not self.by_host[host.name]:
                del self.by_host[host.name], self.records[host.name]

    def _note_model(self, name: str, model: Model | None, own: list[GpuGroup]) -> None:
        """Note in which groups a model has its backends now."""
        if model is None or not own:
            for table in (self.models, self.groups_of, self.states, self.of_model, self.spread):
                table.pop(name, None)
            return
        self.models[name] = model
        self.groups_of[name], self.states[name] = own, [group.state for group in own]
        self.of_model[name] = next((group for group in own if group.name == model.home), own[0])
        model.home = self.of_model[name].name if len(own) > 1 else ""
        model.is_wide = len(own) > FEW_GROUPS
        if model.home:
            self.spread[name] = None
        else:
            self.spread.pop(name, None)
