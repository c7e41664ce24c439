"""Three hosts that are lost, come back, are drained or paused: no world breaks an invariant."""

import pytest

from tests.lab.hosts import FLEETS, world_of_hosts, world_of_pauses
from tests.lab.test_simulate import POLICIES, assert_is_sound
from tests.seeds import seeds


@pytest.mark.seeds
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fleet", FLEETS)
def test_no_world_with_lost_hosts_breaks_an_invariant(fleet, policy):
    for seed in seeds(3, of=60):
        assert_is_sound(world_of_hosts(fleet, policy, seed), seed)


@pytest.mark.seeds
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fleet", FLEETS)
def test_nor_does_one_that_is_paused_now_and_then(fleet, policy):
    for seed in seeds(3, of=60):
        assert_is_sound(world_of_pauses(fleet, policy, seed), seed)
