"""All GPU groups of one configuration, and how they become those of another while requests run.

A backend that goes on (change.py) keeps its slot with all that hangs on it: state, leases, memory. One that
was changed or removed is leaving (group.py): its slot keeps the description by which it was started until
it holds nothing any more, and is then given to the new description, or taken away. Queues belong to models,
so whoever waits for a backend that changed waits on, and whoever waits for a model that is served no longer
is told so at once.

No GPU group is altered: another one takes its place and goes on from it (``reconfigure``, and ``settle`` each
time a slot was left), so what follows from the configuration is computed in one place only, its constructor.
GPU groups that a new backend ties together become one, and stay one: swaps that are under way may not be cut.

No lock, no clock and no I/O: the multiplexer calls it under its lock, the simulator from its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from anvil_mux.config.change import compare
from anvil_mux.config.config import Backend, Config
from anvil_mux.scheduler.causes import Cause, Leaving
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.eviction import build_eviction
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.placement import gpu_groups
from anvil_mux.scheduler.policies import build_policy
from anvil_mux.scheduler.standby import HostMemory


class Scheduler:
    """The GPU groups of one configuration, and who belongs where."""

    def __init__(
        self,
        config: Config,
        emit: Callable[[Event], object],
        costs: Costs,
        footprints: Footprints,
        *,
        emit_leases: bool = True,
    ) -> None:
        self.costs, self.footprints = costs, footprints
        self.host = HostMemory(config.host_memory, footprints)
        self.of_model: dict[str, GpuGroup] = {}
        """Also of models that are about to go."""
        self.of_backend: dict[str, GpuGroup] = {}
        self._emit = emit
        self._emit_leases = emit_leases
        self._take(config)
        self.groups = [self._make(name, members) for name, members in gpu_groups(config.backends)]

    def _take(self, config: Config) -> None:
        self.config = config
        self._wanted = {backend.name: backend for backend in config.backends}
        self.served = {backend.model for backend in config.backends}
        self._policy = build_policy(config.policy, config.policy_settings)
        self._eviction = build_eviction(config.eviction, config.eviction_settings)

    def _make(self, name: str, members: Iterable[Backend], before: Sequence[GpuGroup] = ()) -> GpuGroup:
        members = list(members)
        coming = {
            each.name: self._wanted[each.name].model
            for each in members
            if each.name in self._wanted and self._wanted[each.name].model != each.model
        }
        made = GpuGroup(
            name,
            self.config,
            members,
            self._policy,
            self._eviction,
            self._emit,
            self.costs,
            self.host,
            self.footprints,
            emit_leases=self._emit_leases,
            before=before,
            coming=coming,
        )
        self.of_model |= dict.fromkeys(made.queues, made)
        self.of_backend |= dict.fromkeys(made.slots, made)
        return made

    def reconfigure(self, config: Config, now: float) -> dict[GpuGroup, GpuGroup]:
        """From now on ``config`` holds. GpuGroup -> the one that took its place."""
        change = compare(self.config, config)
        self._emit(Event(now, "reloaded", "", cause=Cause("reconfigured", detail=str(change))))
        leaving: dict[str, Leaving] = dict.fromkeys(change.changed, "changed")
        leaving |= dict.fromkeys(change.removed, "removed")
        before, of_backend, of_model = self.groups, self.of_backend, self.of_model
        self._take(config)
        for group in before:
            group.retired(leaving, self.served, now)
        self.host.budget = config.host_memory
        self.of_model, self.of_backend, self.groups = {}, {}, []
        staying = {slot.name: slot.backend for each in before for slot in each.leaving}

        def homes(backend: Backend) -> list[GpuGroup]:
            """Where it was, and where others wait for its model."""
            found = of_backend.get(backend.name), of_model.get(backend.model)
            return [group for group in found if group]

        places: dict[GpuGroup, GpuGroup] = {}
        backends = [*staying.values(), *config.backends]
        for name, together in gpu_groups(backends, lambda backend: [each.name for each in homes(backend)]):
            members = {each.name: staying.get(each.name, each) for each in together}
            merged = list(dict.fromkeys(group for each in together for group in homes(each)))
            made = self._make(name, members.values(), merged)
            self.groups.append(made)
            places |= dict.fromkeys(merged, made)
        for group in before:
            if group not in places:  # of those who waited there, somebody has to tell
                places[group] = self.groups[0]
                self.groups[0].settled += group.settled
        for group in self.groups:
            group.resumed(now)
        return places

    def settle(self, group: GpuGroup, now: float) -> GpuGroup:
        """``GpuGroup``, or the one that takes its place because a slot was left."""
        if not group.is_outgrown:
            return group
        staying = {slot.name: slot.backend for slot in group.leaving}
        members = {name: staying.get(name) or self._wanted.get(name) for name in group.slots}
        for name in group.slots:
            del self.of_backend[name]
        for model in group.queues:
            del self.of_model[model]
        made = self._make(group.name, [each for each in members.values() if each], [group])
        self.groups[self.groups.index(group)] = made
        made.resumed(now)
        return made
