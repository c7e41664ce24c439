"""One GPU group without a scheduler, told facts by the names of backends and models."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from anvil_mux.config.config import Config
from anvil_mux.routing.in_flight import InFlightTracker
from anvil_mux.scheduler.costs import Costs, Footprints
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.layout import Draft, Layout
from anvil_mux.scheduler.model import ModelQueue
from anvil_mux.scheduler.policies import Policy
from anvil_mux.scheduler.slot import RUNS, FoundBackend
from anvil_mux.scheduler.swaps import NOTHING_HELD

OF_MODELS = ("hint", "unload", "unload_when_idle")
"""The facts that are about a model."""


def lone_group(config: Config, emit: Callable[[Event], object], *, policy: Policy | None = None) -> GpuGroup:
    """Build the one GPU group of a configuration; GPUs that nothing ties are in it all the same."""
    layout = Layout(config, emit, Costs(), Footprints(), emit_leases=True)
    name = "+".join(sorted(layout.by_name))
    group = layout._filled(Draft(name, "", config.backends, layout.groups))
    layout._note([group])
    layout.settings = layout.settings._replace(policy=policy or layout.settings.policy)
    return group


class LoneGroup:
    """The one GPU group of a configuration; what it does not have is a fact, told by a name."""

    def __init__(
        self, config: Config, emit: Callable[[Event], object], *, policy: Policy | None = None
    ) -> None:
        self.group = self.state = lone_group(config, emit, policy=policy)
        self.slots, self.next_step = self.group.slots, self.group.next_step
        self.request, self.release = self.group.request, self.group.release
        self.give_up, self.fail_all = self.group.abandoned, self.group.fail_all
        self.sever_all, self.retired = self.group.sever_all, self.group.retire

    def __repr__(self) -> str:
        return repr(self.group)

    def __getattr__(self, fact: str) -> Callable[..., Any]:
        named: Mapping[str, Any] = self.state.models if fact in OF_MODELS else self.slots
        return lambda name, *about, **more: getattr(self.group, fact)(named[name], *about, **more)

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

    def evicted(
        self,
        name: str,
        at: float,
        residual: Mapping[str, int] = NOTHING_HELD,
        level: str = "stop",
        host_bytes: int = 0,
        **left: Any,
    ) -> None:
        left |= {"residual": residual, "level": level, "host_bytes": host_bytes}
        self.group.evicted(self.slots[name], at, **left)

    def died(self, name: str, at: float, why: str, log: Iterable[str] = ()) -> None:
        self.group.died(self.slots[name], at, why, log)

    def pin(self, model: str, at: float, pinned: bool) -> None:
        self.group.pin(self.state.models[model], at, pinned=pinned)
