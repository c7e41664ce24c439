"""One GPU group without a scheduler, told facts by the names of backends and models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from anvil_mux.config.config import Config
from anvil_mux.errors import LoadError
from anvil_mux.routing.in_flight import InFlightTracker
from anvil_mux.scheduler.costs import Costs, Footprints
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.layout import Draft, build_group, fill, gpu_groups, shared_settings
from anvil_mux.scheduler.memory import HostMemory
from anvil_mux.scheduler.model import Model, ModelQueue
from anvil_mux.scheduler.policies import Policy
from anvil_mux.scheduler.slot import RUNS, FoundBackend, HostRecord
from anvil_mux.scheduler.state import Common
from anvil_mux.scheduler.swaps import NOTHING_HELD


def lone_group(config: Config, emit: Callable[[Event], object], *, policy: Policy | None = None) -> GpuGroup:
    """Build the one GPU group of a configuration; GPUs that nothing ties are in it all the same."""
    footprints, settings = Footprints(), shared_settings(config)
    groups: dict[str, list[GpuGroup]] = {}
    models = {
        name: Model(name, each, settings.routings[each.routing], full=settings.full)
        for name, each in settings.models.items()
    }
    common = Common(
        settings=settings._replace(policy=policy or settings.policy),
        emit=emit,
        emit_leases=True,
        costs=Costs(),
        footprints=footprints,
        hosts={"": HostRecord()},
        memories={"": HostMemory(config.host_memory, footprints)},
        models=models,
        groups_of=groups,
    )
    draft = Draft("+".join(sorted(name for name, _ in gpu_groups(config.backends))), "", config.backends)
    group = build_group(draft, common)
    fill(group, draft)
    for name, model in models.items():
        model.take(group.own_slots[name])
        groups[name] = [group]
    group.remodelled()
    return group


class LoneGroup:
    """The one GPU group of a configuration, and short words for what its scheduler would tell it."""

    def __init__(
        self, config: Config, emit: Callable[[Event], object], *, policy: Policy | None = None
    ) -> None:
        self.group = lone_group(config, emit, policy=policy)
        self.state, self.slots = self.group, self.group.slots
        self.next_step, self.request, self.release = (
            self.group.next_step,
            self.group.request,
            self.group.release,
        )
        self.give_up, self.fail_all = self.group.abandoned, self.group.fail_all
        self.sever_all, self.retired = self.group.sever_all, self.group.retire

    def __repr__(self) -> str:
        return repr(self.group)

    def memory_seen(self, held: Mapping[str, int], now: float = 0.0) -> bool:
        return self.group.memory_seen(held, now)

    @property
    def queues(self) -> dict[str, ModelQueue]:
        return {name: model.queue for name, model in self.state.models.items()}

    def set_policy(self, policy: Policy) -> None:
        common = self.state.common
        common.settings = common.settings._replace(policy=policy)

    def in_flight(self, model: str) -> InFlightTracker:
        replicas = self.state.models[model].replicas
        assert replicas is not None
        return replicas.in_flight

    def expected(self, name: str) -> None:
        self.group.unseen.add(name)

    def looked_at(self, name: str, at: float = 0.0) -> None:
        self.group.looked_at(self.slots[name], at)

    def adopt(self, name: str, at: float) -> bool:
        return self.group.adopt(self.slots[name], at, RUNS)

    def adopt_standby(
        self, name: str, at: float, how: str, residual: Mapping[str, int], host_bytes: int = 0
    ) -> bool:
        return self.group.adopt(self.slots[name], at, FoundBackend(how, residual, host_bytes))

    def loaded(self, name: str, at: float, how: str = "stop") -> None:
        self.group.loaded(self.slots[name], at, how)

    def load_failed(self, name: str, at: float, error: LoadError) -> None:
        self.group.load_failed(self.slots[name], at, error)

    def load_cancelled(self, name: str, at: float) -> None:
        self.group.load_cancelled(self.slots[name], at)

    def evicted(
        self,
        name: str,
        at: float,
        residual: Mapping[str, int] = NOTHING_HELD,
        level: str = "stop",
        host_bytes: int = 0,
        **left: Any,
    ) -> None:
        self.group.evicted(
            self.slots[name], at, residual=residual, level=level, host_bytes=host_bytes, **left
        )

    def evict_failed(self, name: str, at: float, why: str) -> None:
        self.group.evict_failed(self.slots[name], at, why)

    def died(self, name: str, at: float, why: str, log: Iterable[str] = ()) -> None:
        self.group.died(self.slots[name], at, why, log)

    def unanswering(self, name: str, at: float) -> None:
        self.group.unanswering(self.slots[name], at)

    def silent(self, name: str, at: float) -> None:
        self.group.silent(self.slots[name], at)

    def unload(self, model: str, at: float) -> bool:
        return self.group.unload(self.state.models[model], at)

    def unload_when_idle(self, model: str, at: float) -> bool:
        return self.group.unload_when_idle(self.state.models[model], at)

    def hint(self, model: str, at: float) -> None:
        self.group.hint(self.state.models[model], at)

    def pin(self, model: str, at: float, pinned: bool) -> None:
        self.group.pin(self.state.models[model], at, pinned=pinned)
