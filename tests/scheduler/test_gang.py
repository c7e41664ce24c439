"""A gang, one backend over GPUs of several hosts: loaded, evicted, lost with any of its hosts, and back."""

import pytest

from anvil_mux.config.config import Gpu
from anvil_mux.scheduler.costs import Cost
from anvil_mux.scheduler.host_facts import FoundBackend
from anvil_mux.scheduler.placement import gpu_groups
from anvil_mux.scheduler.status import gpu_states, model_state
from anvil_mux.scheduler.steps import NOTHING, Evict, Load
from tests.scheduler.test_hosts import Fleet, on

GANG = on("h1", "g", "0", more=(("h2", ("0",)),))
BESIDE = on("h1", "a"), on("h2", "b"), on("h2", "c", "1")
"""Two backends on the GPUs of the gang, and one on another GPU."""
FOUND = {"g": FoundBackend()}


def tied(*others, **settings):
    """The gang, one backend on each of its GPUs, and what ties another GPU of the second host to them."""
    return Fleet(GANG, *BESIDE, on("h2", "pair", "0", "1"), *others, **settings)


def resident(fleet):
    """The gang is loaded at 1."""
    fleet.request("g", 0.0)
    fleet.loaded("g", 1.0)
    return fleet


def lose(fleet, host, at):
    return fleet.take(fleet.core.host_lost(host, at))


def back(fleet, host, at, found=()):
    return fleet.take(fleet.core.host_back(host, at, dict(found)))


def test_a_gang_ties_the_gpus_of_its_hosts_to_one_group():
    pairs = gpu_groups([GANG, *BESIDE, on("h3", "d")])
    assert [(name, sorted(each.name for each in own)) for name, own in pairs] == [
        ("h1/0+h2/0", ["a", "b", "g"]),
        ("h2/1", ["c"]),
        ("h3/0", ["d"]),
    ]
    layout = tied().core.layout
    assert [group.name for group in layout.on_host("h1")] == ["h1/0+h2/0+h2/1"]
    assert layout.on_host("h1") == layout.on_host("h2")
    assert sorted(host.name for host in layout.records) == ["h1", "h2"]


def test_the_size_of_each_of_its_gpus_is_that_of_its_host():
    gpus = Gpu("0", vram=10, host="h1"), Gpu("0", vram=20, host="h2")
    gang = on("h1", "g", "0", more=(("h2", ("0",)),), vram=8)
    fleet = Fleet(gang, on("h1", "a", vram=4), on("h2", "b", vram=12), gpus=gpus)
    resident(fleet)
    fleet.request("b", 2.0)
    assert fleet.loaded("b", 3.0) == []
    fleet.request("a", 4.0)
    assert fleet.state("g") == "draining"
    assert fleet.state("b") == "ready"


# Loaded and evicted


def test_it_is_loaded_once_what_is_on_its_gpus_has_left_on_every_host():
    fleet = tied()
    for name in "abc":
        fleet.take(fleet.core.adopted(name, 0.0))
    waiting = fleet.request("g", 1.0)
    assert sorted(step.backend for step in fleet.steps) == ["a", "b"]
    assert fleet.evicted("a", 2.0) == []
    assert fleet.evicted("b", 3.0) == ["load g"]
    fleet.loaded("g", 4.0)
    assert waiting.backend == "g"
    assert fleet.state("c") == "ready"


def test_one_on_any_of_its_gpus_evicts_it_and_the_other_gpus_are_free_then():
    fleet = resident(tied())
    fleet.request("b", 2.0)
    assert fleet.core.layout.slot("g").holders
    fleet.take(fleet.core.time_passed(7.0))
    assert fleet.evicted("g", 8.0) == ["load b"]
    fleet.request("a", 9.0)
    assert fleet.step(Load, "a")


def test_what_its_swap_costs_is_learned_for_its_first_host():
    fleet = resident(tied())
    assert list(fleet.core.costs) == [Cost("", "g", "stop", 0.0, 1.0, 1, "h1", "openai")]


def test_it_needs_host_memory_on_each_of_its_hosts():
    gang = on("h1", "g", "0", more=(("h2", ("0",)),), ram=6)
    fleet = Fleet(gang, on("h2", "b", "1", ram=5), memory_of_hosts={"h1": 50, "h2": 10}, max_wait=5.0)
    fleet.take(fleet.core.adopted("b", 0.0))
    fleet.request("g", 3.0)
    assert fleet.steps == []
    fleet.take(fleet.core.time_passed(8.0))
    assert fleet.evicted("b", 9.0) == ["load g"]


def test_one_that_needs_more_host_memory_than_one_of_its_hosts_has_is_refused():
    gang = on("h1", "g", "0", more=(("h2", ("0",)),), ram=6)
    fleet = Fleet(gang, memory_of_hosts={"h1": 50, "h2": 5})
    assert fleet.request("g", 0.0).error.code == "does_not_fit"


# Lost


@pytest.mark.parametrize("host", ["h1", "h2"])
def test_one_that_is_ready_is_lost_with_any_of_its_hosts_and_holds_its_gpus_on_all(host):
    fleet = tied(max_wait=1.0)
    running = fleet.request("g", 0.0)
    fleet.loaded("g", 1.0)
    lose(fleet, host, 2.0)
    assert fleet.last.cut == [running]
    assert running.severed.cause.host == host
    assert fleet.request("g", 3.0).error.code == "host_unavailable"
    for name in "ab":
        assert fleet.request(name, 4.0).error.code == "host_unavailable"
    fleet.take(fleet.core.time_passed(60.0))
    assert fleet.steps == []
    assert fleet.state("g") == "ready"


def test_who_stands_behind_a_lost_gang_is_told_which_host_does_not_answer():
    fleet = resident(tied())
    lose(fleet, "h1", 2.0)
    error = fleet.request("b", 5.0).error
    assert error.message == "g holds a GPU of b, and h1 has been lost for 3 s."


def test_a_load_for_which_the_pinned_and_a_lost_gang_leave_no_room_fails_at_once():
    gpus = Gpu("0", vram=10, host="h1"), Gpu("0", vram=10, host="h2")
    gang = on("h1", "g", "0", more=(("h2", ("0",)),), vram=3)
    fleet = resident(Fleet(gang, on("h2", "p", vram=3, pin=True), on("h2", "b", vram=6), gpus=gpus))
    fleet.take(fleet.core.adopted("p", 1.0))
    lose(fleet, "h1", 2.0)
    error = fleet.request("b", 5.0).error
    assert error.message == "g holds a GPU of b, and h1 has been lost for 3 s."


def test_others_on_its_healthy_host_are_served_and_loaded_on_gpus_that_it_does_not_hold():
    fleet = tied(on("h2", "d", "1"))
    fleet.take(fleet.core.adopted("c", 0.0))
    resident(fleet)
    serving = fleet.request("c", 1.5)
    lose(fleet, "h1", 2.0)
    assert serving.severed is None
    fleet.take(fleet.core.released(serving, 2.5))
    serving = fleet.request("c", 3.0)
    assert serving.backend == "c"
    fleet.take(fleet.core.released(serving, 3.5))
    fleet.request("d", 4.0)
    assert fleet.evicted("c", 5.0) == ["load d"]
    fleet.loaded("d", 6.0)
    assert fleet.state("d") == "ready"


def test_one_that_is_lost_in_its_load_holds_its_gpus_and_its_late_report_is_ignored():
    fleet = tied()
    waiting = fleet.request("g", 0.0)
    load = fleet.step(Load, "g")
    lose(fleet, "h2", 1.0)
    assert waiting.error.code == "host_unavailable"
    assert fleet.core.loaded(load, 2.0, "stop") is NOTHING
    assert fleet.state("g") == "loading"
    assert fleet.request("a", 3.0).error.code == "host_unavailable"


def test_victims_on_a_healthy_host_are_reprieved_when_the_gang_cannot_come_any_more():
    fleet = tied()
    fleet.take(fleet.core.adopted("a", 0.0))
    running = fleet.request("a", 0.5)
    fleet.request("g", 1.0)
    assert fleet.state("a") == "draining"
    lose(fleet, "h2", 2.0)
    assert fleet.state("a") == "ready"
    assert running.severed is None


def test_a_victim_that_is_being_evicted_on_a_healthy_host_leaves_all_the_same():
    fleet = tied()
    fleet.take(fleet.core.adopted("a", 0.0))
    fleet.request("g", 1.0)
    lose(fleet, "h2", 2.0)
    fleet.request("a", 2.5)
    assert fleet.evicted("a", 3.0) == ["load a"]


def test_a_gang_that_drained_for_another_is_stopped_once_its_host_is_back():
    fleet = resident(tied())
    waiting = fleet.request("b", 2.0)
    lose(fleet, "h1", 3.0)
    assert fleet.state("g") == "draining"
    assert waiting.error.code == "host_unavailable"
    assert back(fleet, "h1", 4.0, FOUND) == []
    assert fleet.state("g") == "ready"


# Back, gone


def test_it_goes_on_if_it_was_found_on_the_host_that_is_back():
    fleet = resident(tied())
    lose(fleet, "h2", 2.0)
    back(fleet, "h2", 3.0, FOUND)
    assert fleet.request("g", 4.0).backend == "g"


def test_one_of_which_a_part_was_not_found_is_stopped_on_all_hosts_and_holds_them_until_then():
    fleet = resident(tied())
    lose(fleet, "h2", 2.0)
    assert back(fleet, "h2", 3.0) == ["evict g"]
    waiting = fleet.request("a", 4.0)
    assert not waiting.error
    assert fleet.evicted("g", 5.0) == ["load a"]


@pytest.mark.parametrize("first", ["h1", "h2"])
def test_one_whose_hosts_are_all_lost_waits_for_all_of_them(first):
    fleet = resident(tied())
    other = {"h1": "h2", "h2": "h1"}[first]
    lose(fleet, "h1", 2.0)
    lose(fleet, "h2", 3.0)
    assert back(fleet, first, 4.0, FOUND) == []
    assert fleet.state("g") == "ready"
    assert fleet.request("g", 5.0).error.code == "host_unavailable"
    back(fleet, other, 6.0, FOUND)
    assert fleet.request("g", 7.0).backend == "g"


def test_a_part_that_was_missing_on_the_first_host_to_be_back_is_not_forgotten():
    fleet = resident(tied())
    lose(fleet, "h1", 2.0)
    lose(fleet, "h2", 3.0)
    assert back(fleet, "h1", 4.0) == []
    assert back(fleet, "h2", 5.0, FOUND) == ["evict g"]
    fleet.evicted("g", 6.0)
    resident_again = fleet.request("g", 7.0)
    fleet.loaded("g", 8.0)
    assert resident_again.backend == "g"
    lose(fleet, "h1", 9.0)
    assert back(fleet, "h1", 10.0, FOUND) == []
    assert fleet.state("g") == "ready"


def test_what_is_left_of_it_is_stopped_when_its_lost_host_is_declared_gone():
    fleet = resident(tied())
    lose(fleet, "h2", 2.0)
    fleet.take(fleet.core.host_gone("h2", 3.0))
    assert fleet.step(Evict, "g") == Evict("g", "stop", (), fleet.last.steps[0].number)
    assert fleet.state("g") == "evicting"
    fleet.take(fleet.core.evicted(fleet.last.steps[0], 4.0))
    assert fleet.state("g") == "stopped"
    fleet.request("a", 5.0)
    assert fleet.step(Load, "a")
    assert fleet.request("b", 6.0).error.code == "host_unavailable"
    assert fleet.request("g", 6.0).error.code == "host_unavailable"
    assert fleet.core.host_gone("h2", 7.0) is NOTHING


def test_it_holds_nothing_any_more_when_all_its_hosts_are_declared_gone():
    fleet = resident(tied())
    for host in ("h1", "h2"):
        lose(fleet, host, 2.0)
    fleet.take(fleet.core.host_gone("h1", 3.0))
    assert fleet.state("g") == "ready"
    fleet.take(fleet.core.host_gone("h2", 4.0))
    assert fleet.state("g") == "stopped"
    assert fleet.steps == []
    for host in ("h1", "h2"):
        back(fleet, host, 5.0)
    fleet.request("g", 6.0)
    assert fleet.step(Load, "g")


# Drained, away


def test_a_drained_host_sends_it_away_and_those_on_the_other_host_stay():
    fleet = tied()
    fleet.take(fleet.core.adopted("c", 0.0))
    resident(fleet)
    fleet.take(fleet.core.host_drained("h1", 2.0, True))
    assert fleet.state("g") == "draining"
    fleet.take(fleet.core.time_passed(7.0))
    fleet.evicted("g", 8.0)
    assert fleet.state("c") == "ready"
    assert fleet.request("g", 9.0).error.code == "host_unavailable"
    fleet.request("b", 9.0)
    fleet.loaded("b", 11.0)
    fleet.take(fleet.core.host_drained("h1", 12.0, False))
    assert not fleet.request("g", 13.0).error


def test_it_goes_on_draining_while_another_of_its_hosts_is_drained():
    fleet = resident(tied())
    for host in ("h1", "h2"):
        fleet.take(fleet.core.host_drained(host, 2.0, True))
    fleet.take(fleet.core.host_drained("h1", 3.0, False))
    assert fleet.state("g") == "draining"
    fleet.take(fleet.core.host_drained("h2", 4.0, False))
    assert fleet.state("g") == "ready"


def test_while_one_of_its_hosts_cannot_be_steered_it_serves_and_nothing_is_begun_on_it():
    fleet = resident(tied(max_wait=1.0))
    fleet.take(fleet.core.host_away("h1", 2.0, True))
    assert fleet.request("g", 3.0).backend == "g"
    waiting = fleet.request("b", 4.0)
    fleet.request("c", 4.0)
    assert [step.backend for step in fleet.steps] == ["c"]
    fleet.loaded("c", 5.0)
    fleet.take(fleet.core.time_passed(20.0))
    assert fleet.state("g") == "ready"
    assert not waiting.settled
    fleet.take(fleet.core.host_away("h1", 21.0, False))
    assert fleet.state("g") == "evicting"


# Beside


def test_what_other_processes_hold_on_one_of_its_hosts_says_nothing_of_the_other():
    gpus = Gpu("0", vram=10, host="h1"), Gpu("0", vram=10, host="h2")
    gang = on("h1", "g", "0", more=(("h2", ("0",)),), vram=6)
    fleet = Fleet(gang, gpus=gpus)
    fleet.take(fleet.core.memory_seen({"0": 8}, 0.0, "h1"))
    fleet.take(fleet.core.memory_seen({}, 1.0, "h2"))
    waiting = fleet.request("g", 2.0)
    assert fleet.steps == []
    fleet.take(fleet.core.memory_seen({}, 3.0, "h1"))
    assert fleet.step(Load, "g")
    assert not waiting.error


def test_it_is_shown_with_its_first_host_and_all_its_gpus_and_each_gpu_with_its_own():
    fleet = resident(tied())
    lose(fleet, "h2", 2.0)
    [group] = fleet.core.layout.groups
    [seen] = model_state(group.state, fleet.core.layout.models["g"], 3.0, None).backends
    assert (seen.gpus, seen.host.host, seen.host.lost_seconds) == (("h1/0", "h2/0"), "h1", 1.0)
    gpus = {gpu.gpu: gpu.host for gpu in gpu_states(group.state, {}, 3.0)}
    assert [(name, host.host, host.is_lost) for name, host in gpus.items()] == [
        ("h1/0", "h1", False),
        ("h2/0", "h2", True),
        ("h2/1", "h2", True),
    ]


def test_groups_that_a_gang_tied_stay_one_when_it_is_removed():
    fleet = resident(tied())
    config = fleet.core.layout.config
    left = tuple(each for each in config.backends if each.name != "g")
    fleet.take(fleet.core.reconfigured(type(config)(backends=left, policy="eager", drain_timeout=5.0), 2.0))
    fleet.take(fleet.core.time_passed(7.0))
    fleet.evicted("g", 8.0)
    fleet.request("a", 9.0)
    fleet.request("b", 9.0)
    assert sorted(step.backend for step in fleet.steps) == ["a", "b"]
    assert len(fleet.core.layout.groups) == 1
