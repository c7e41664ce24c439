"""The threaded multiplexer writes the log that was simulated."""

import pytest

from anvil_mux.config.config import Config
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.costs import Cost
from tests.lab.hosts import FLEETS, world_of_hosts, world_of_pauses
from tests.lab.test_simulate import LAYOUTS, POLICIES, world
from tests.multiplexer.stage import A, B, Player, differences
from tests.seeds import part, seeds


@pytest.mark.seeds
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_threads_write_the_log_that_was_simulated(layout, policy):
    for seed in seeds(1, of=30):
        config, trace, perform = world(layout, policy, seed, requests=50)
        assert differences(config, trace, perform, seed=seed) is None, seed
        assert check(simulate(config, trace, perform), config) == [], seed


@pytest.mark.seeds
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fleet", FLEETS)
def test_they_do_so_too_on_three_hosts_that_are_lost_and_come_back(fleet, policy):
    for seed in seeds(1, of=30):
        config, trace, perform = world_of_hosts(fleet, policy, seed, requests=50)
        assert differences(config, trace, perform, seed=seed) is None, seed


@pytest.mark.seeds
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fleet", FLEETS)
def test_they_do_so_too_while_it_is_paused_now_and_then(fleet, policy):
    for seed in seeds(1, of=30):
        config, trace, perform = world_of_pauses(fleet, policy, seed, requests=50)
        assert differences(config, trace, perform, seed=seed) is None, seed


@pytest.mark.seeds
@pytest.mark.parametrize("policy", POLICIES)
def test_they_do_so_too_with_a_model_that_ran_before_and_with_what_was_learned(policy):
    for seed, layout in enumerate(part(LAYOUTS, every=3)):
        config, trace, perform = world(layout, policy, seed, requests=40)
        first, *others = config.backends
        costs = [Cost(other.model, first.model, "stop", 1.5, 3.25, 4) for other in others]
        before = {"resident": [first.name], "costs": costs}
        assert differences(config, trace, perform, seed=seed, **before) is None, layout


@pytest.mark.parametrize("policy", ["eager", "adaptive"])
@pytest.mark.parametrize("service", [2.0**-5, 0.5])
def test_they_do_so_too_for_clients_that_ask_again_once_they_are_answered(policy, service):
    def follow(request, now):
        return [request._replace(at=now + 2.0**-8 * (1 + (request.model == "b")))] if now < 20.0 else []

    config = Config(policy=policy, backends=(A, B))
    # No request of a comes a second after b's, when it is told that the swap is held back.
    trace = [Arrival(0.25, "a", service), Arrival(0.375 + 2.0**-9, "b", service)]
    before = {"resident": ["a"], "costs": Engines({"a": 1.0, "b": 3.0}, 0.25).costs(config), "follow": follow}
    engines = Engines({"a": 1.0, "b": 3.0}, 0.25)
    assert differences(config, trace, engines, seed=3, **before) is None
    log = simulate(config, trace, engines, **before)
    answers = [sum(event.kind == "released" and event.model == model for event in log) for model in "ab"]
    assert min(answers) * 3 >= max(answers)


@pytest.mark.seeds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_interleaving_of_the_threads_changes_the_log(layout):
    config, trace, perform = world(layout, "eager", 7, requests=30)
    for seed in seeds(4, of=8):
        assert differences(config, trace, perform, seed=seed) is None


@pytest.mark.seeds
def test_requests_of_one_moment_may_come_in_any_order_and_all_is_kept():
    trace = [Arrival(float(n // 12), "abc"[n % 3], 0.5) for n in range(48)]
    config = Config(policy="eager", backends=LAYOUTS["three on one GPU"][0], drain_timeout=2.0)
    for seed in seeds(8, of=20):
        player = Player(config, Engines({}, 3.0), seed)
        player.play(trace, 500.0)
        assert check(player.log, config) == []
        assert sorted(event.ticket for event in player.log if event.kind == "released") == list(range(1, 49))
