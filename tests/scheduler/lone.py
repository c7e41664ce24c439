"""One GPU group without a scheduler."""

from __future__ import annotations

from collections.abc import Callable

from anvil_mux.config.config import Config
from anvil_mux.scheduler.building import Common, Draft, build_models, build_state, place
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.eviction import build_eviction
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.hosts import HostRecord
from anvil_mux.scheduler.placement import gpu_groups
from anvil_mux.scheduler.policies import Policy, build_policy
from anvil_mux.scheduler.standby import HostMemory


def lone_group(config: Config, emit: Callable[[Event], object], *, policy: Policy | None = None) -> GpuGroup:
    """Build the one GPU group of a configuration; GPUs that nothing ties are in it all the same."""
    footprints = Footprints()
    common = Common(
        config=config,
        policy=policy or build_policy(config.policy, config.policy_settings),
        eviction=build_eviction(config.eviction, config.eviction_settings),
        emit=emit,
        emit_leases=True,
        costs=Costs(),
        footprints=footprints,
        hosts={"": HostRecord()},
        memories={"": HostMemory(config.host_memory, footprints)},
        states={},
    )
    name = "+".join(sorted(name for name, _ in gpu_groups(config.backends)))
    draft = Draft(name, "", config.backends)
    placement = place(draft, common)
    models = build_models(placement.slots.values(), config)
    state = build_state(draft, placement, models, common)
    group = GpuGroup(state, dict.fromkeys(models, groups := []))
    groups.append(group)
    common.states.update({model: [state] for model in models})
    return group
