"""Three hosts that are lost and come back: no world breaks an invariant."""

import pytest

from anvil_mux.sim.simulate import check, simulate
from tests.sim.hosts import FLEETS, world_of_hosts
from tests.sim.test_simulate import POLICIES, queues_without_a_bound, waiting_at_the_end


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fleet", FLEETS)
def test_no_world_with_lost_hosts_breaks_an_invariant(fleet, policy):
    for seed in range(30):
        config, trace, engines = world_of_hosts(fleet, policy, seed)
        log = simulate(config, trace, engines)
        assert check(log, config) == [], seed
        assert waiting_at_the_end(log) == set(), seed
        assert queues_without_a_bound(log) == [], seed
