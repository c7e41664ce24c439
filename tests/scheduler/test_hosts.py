"""What the scheduler does about hosts that are lost, come back, or are declared gone."""

from dataclasses import replace

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.scheduler.admission import reserved
from anvil_mux.scheduler.costs import Cost, Costs
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.group import snapshot
from anvil_mux.scheduler.layout import gpu_groups
from anvil_mux.scheduler.slot import NOTHING, TRANSITIONS, Demote, Evict, FoundBackend, Load
from anvil_mux.scheduler.state import weigh
from anvil_mux.scheduler.waits import wait_estimate
from tests.scheduler.fleet import Fleet, on


def test_gpus_of_two_hosts_are_never_in_one_group_and_have_the_name_of_their_host():
    backends = on("", "r0", model="m"), on("h", "r1", model="m"), on("h", "pair", "0", "1"), on("h", "cpu")
    cpu = Backend("cpu", "cpu", host="h")
    groups = gpu_groups([*backends[:3], cpu])
    assert [(name, [b.name for b in own]) for name, own in groups] == [
        ("0", ["r0"]),
        ("h/0+h/1", ["r1", "pair"]),
        ("h/no-gpu:cpu", ["cpu"]),
    ]


def test_the_size_of_a_gpu_is_that_of_its_host():
    fleet = Fleet(
        on("", "a", vram=6),
        on("h", "b", vram=6),
        on("h", "c", vram=6),
        gpus=(Gpu("0", vram=10), Gpu("0", vram=20, host="h")),
    )
    fleet.with_resident("b", 0.0, 1.0)
    fleet.request("c", 2.0)
    assert [step.backend for step in fleet.steps] == ["c"]


def test_each_host_has_a_memory_of_its_own():
    backends = on("", "a", ram=6), on("h", "b", ram=6), on("h", "c", "1", ram=6)
    fleet = Fleet(*backends, host_memory=6, memory_of_hosts={"h": 10}, max_wait=20.0)
    for name in "abc":
        fleet.request(name, 0.0)
    assert [step.backend for step in fleet.steps] == ["a", "b"]


def test_what_a_swap_costs_is_learned_for_each_host():
    costs = Costs([Cost("", "m", "stop", 0.0, 90.0), Cost("", "m", "stop", 0.0, 3.0, 1, "h")])
    estimates = [costs.estimate("", "m", "stop", "vllm", host) for host in ("", "h", "k")]
    assert [each.load_seconds for each in estimates] == [90.0, 3.0, 3.0]
    assert costs.estimate("", "n", "stop", "vllm", "k").load_seconds == 60.0
    assert [costs.knows("m", "stop", host) for host in ("", "h", "k")] == [True, True, False]
    costs.learn("", "m", "stop", 0.0, 13.0, "h")
    assert [cost.load_seconds for cost in costs] == [90.0, 6.0]


# A GPU that is not there


def missing(host, id):
    return Gpu(id, host=host, missing=f"the host {host} has no GPU {id}; it has none")


def without(fleet, *gpus, at):
    """What follows when the machines report their GPUs without these."""
    config = fleet.core.layout.settings.config
    fleet.take(fleet.core.reconfigured(replace(config, gpus=gpus), at))


def test_nothing_is_loaded_on_a_missing_gpu_and_its_requests_fail_at_once():
    fleet = Fleet(on("h", "a", vram=6), on("h", "b", "1"), gpus=(missing("h", "0"), Gpu("1", host="h")))
    error = fleet.request("a", 0.0).error
    assert (error.status, error.code) == (503, "gpu_missing")
    assert error.message == "a cannot be loaded: the host h has no GPU 0; it has none."
    fleet.request("b", 0.0)
    assert [step.backend for step in fleet.steps] == ["b"]


def test_a_replica_whose_gpu_is_there_is_loaded_in_place_of_another():
    fleet = Fleet(
        on("h", "m0", model="m"), on("k", "m1", model="m"), gpus=(missing("h", "0"), Gpu("0", host="k"))
    )
    fleet.request("m", 0.0)
    assert [step.backend for step in fleet.steps] == ["m1"]


def test_what_serves_on_a_gpu_that_vanishes_goes_on_and_is_loaded_again_when_it_is_back():
    there = Gpu("0", 10, host="h")
    fleet = Fleet(on("h", "a", vram=6), on("h", "b", vram=6), gpus=(there,))
    fleet.with_resident("a", 0.0, 1.0)
    waiting = fleet.request("b", 1.5)
    without(fleet, missing("h", "0"), at=2.0)
    assert fleet.state("a") == "ready", "it drains for nobody"
    assert waiting.error.code == "gpu_missing"
    assert fleet.request("b", 3.0).error.code == "gpu_missing"
    assert not fleet.request("a", 3.0).error
    without(fleet, there, at=4.0)
    assert fleet.state("a") == "ready"
    assert not fleet.request("b", 5.0).error


def test_what_runs_on_a_missing_gpu_is_adopted():
    fleet = Fleet(on("h", "a", vram=6), on("h", "b", vram=6), gpus=(missing("h", "0"),))
    for name in "ab":
        assert fleet.core.adopted(name, 0.0) is not NOTHING
    assert [fleet.state(name) for name in "ab"] == ["ready", "ready"]


# Where a queue stands


M = on("", "m0", model="m"), on("h", "m1", model="m")


def test_a_queue_stands_in_one_group_at_a_time_and_of_equal_ones_in_the_first():
    fleet = Fleet(*M)
    fleet.request("m", 0.0)
    fleet.request("m", 1.0)
    assert [step.backend for step in fleet.steps] == ["m0"]
    assert fleet.core.layout.models["m"].queue_group == "0"


def test_a_queue_goes_elsewhere_when_its_host_is_lost():
    fleet = Fleet(*M)
    waiting = fleet.request("m", 0.0)
    assert fleet.take(fleet.core.host_lost("", 1.0)) == ["load m1"]
    assert not waiting.settled
    assert fleet.loaded("m1", 3.0) == []
    assert waiting.backend == "m1"


HERE = ("a", "b", "c", "d")
SLOW = [Cost("", "m", "stop", 0.0, 30.0, 1, host) for host in HERE]


def four_hosts(costs=SLOW, **settings):
    """``m`` is in standby on ``d``, ``c`` is free, ``a`` and ``b`` have residents."""
    backends = [on(host, f"m{host}", model="m", evict_to=("sleep",)) for host in HERE]
    others = [on(host, f"x{host}") for host in "ab"]
    fleet = Fleet(*backends, *others, costs=costs, **settings)
    for name in ("xa", "xb"):
        fleet.take(fleet.core.adopted(name, 0.0))
    fleet.take(fleet.core.adopted("md", 0.0, FoundBackend("sleep")))
    return fleet


def test_a_queue_goes_to_a_warm_standby_then_to_a_free_gpu_then_to_the_cheapest_swap():
    fleet = four_hosts(
        [*SLOW, Cost("xb", "m", "stop", 3.0, 30.0, 1, "b"), Cost("xa", "m", "stop", 9.0, 30.0, 1, "a")]
    )
    fleet.request("m", 1.0)
    assert fleet.step(Load, "md").level == "sleep"
    for host, step in (("d", "load mc"), ("c", "evict xb"), ("b", "evict xa")):
        assert fleet.take(fleet.core.host_lost(host, 2.0)) == [step]


def test_the_cheapest_swap_is_the_one_that_the_host_makes_quickest():
    costs = [
        Cost("", "m", "stop", 0.0, seconds, 1, host) for host, seconds in zip("ab", (40.0, 20.0), strict=True)
    ]
    fleet = four_hosts(costs)
    for host in "cd":
        fleet.take(fleet.core.host_lost(host, 1.0))
    fleet.request("m", 2.0)
    assert [step.backend for step in fleet.steps] == ["xb"]


def test_of_hosts_that_are_equally_near_the_first_by_name_is_taken_and_of_its_gpus_too():
    fleet = Fleet(on("b", "m0", model="m"), on("a", "m1", "1", model="m"), on("a", "m2", "0", model="m"))
    fleet.request("m", 0.0)
    assert [step.backend for step in fleet.steps] == ["m2"]


def test_queues_that_begin_together_go_to_different_gpus():
    models = [on(host, f"{model}{host}", model=model) for host in "ab" for model in "mn"]
    fleet = Fleet(*models, on("a", "xa"), on("b", "xb"), drain_timeout=60.0)
    for host in "ab":
        fleet.take(fleet.core.adopted(f"x{host}", 0.0))
        fleet.request(f"x{host}", 1.0)
    for model in "mn":
        fleet.request(model, 2.0)
    assert [fleet.state(f"x{host}") for host in "ab"] == ["draining", "draining"]


def test_what_is_ready_on_any_host_serves_and_nothing_is_loaded_beside_it():
    fleet = Fleet(*M)
    fleet.with_resident("m0", 0.0, 2.0)
    assert fleet.request("m", 3.0).backend == "m0"
    assert fleet.steps == []


def test_a_load_that_another_host_made_needless_is_given_up_while_it_only_drains():
    fleet = Fleet(*M, on("", "a"), drain_timeout=60.0)
    fleet.with_resident("a", 0.0, 1.0)
    fleet.take(fleet.core.host_lost("h", 2.0))
    waiting = fleet.request("m", 3.0)
    assert fleet.state("a") == "draining"
    fleet.take(fleet.core.host_back("h", 4.0, {"m1": FoundBackend()}))
    assert waiting.backend == "m1"
    assert fleet.state("a") == "ready"
    assert fleet.steps == []


# Lost


def test_the_leases_of_a_lost_host_are_severed_and_its_queues_fail_if_nobody_else_serves_them():
    fleet = Fleet(on("", "a"), on("h", "b"), on("h", "c"))
    running, beside = fleet.request("b", 0.0), fleet.request("a", 0.0)
    fleet.loaded("b", 1.0)
    fleet.loaded("a", 1.0)
    waiting = fleet.request("c", 2.0)
    fleet.take(fleet.core.host_lost("h", 3.0))
    assert fleet.last.cut == [running]
    assert running.severed.cause == Cause("host_lost", host="h")
    assert (waiting.error.status, waiting.error.code) == (503, "host_unavailable")
    assert waiting.error.retry_after
    assert fleet.last.woken == [waiting]
    assert beside.severed is None
    assert fleet.kinds(3.0) == ["host_lost", "severed b", "failed c"]
    assert fleet.request("b", 4.0).error.code == "host_unavailable"
    assert fleet.core.host_lost("h", 5.0) is NOTHING


def test_that_a_host_is_lost_is_no_state_of_its_backends_and_its_gpus_go_to_nobody():
    fleet = Fleet(on("h", "a"), on("h", "b"), max_wait=1.0)
    fleet.with_resident("a", 0.0, 1.0)
    fleet.take(fleet.core.host_lost("h", 2.0))
    fleet.request("b", 3.0)
    assert fleet.take(fleet.core.time_passed(100.0)) == []
    assert fleet.state("a") == "ready"
    assert fleet.core.adopted("b", 101.0) is NOTHING
    assert fleet.core.died("a", 102.0, "killed") is NOTHING
    assert fleet.core.unload_asked("a", 103.0) is NOTHING


def test_a_report_of_a_step_that_was_under_way_is_ignored_also_after_the_host_is_back():
    fleet = Fleet(on("h", "a"))
    fleet.request("a", 0.0)
    late = fleet.step(Load, "a")
    fleet.take(fleet.core.host_lost("h", 1.0))
    assert fleet.core.loaded(late, 2.0, "stop") is NOTHING
    assert fleet.state("a") == "loading"
    fleet.take(fleet.core.host_back("h", 3.0, {}))
    assert fleet.state("a") == "stopped"
    fleet.request("a", 4.0)
    assert fleet.core.loaded(late, 5.0, "stop") is NOTHING
    assert fleet.state("a") == "loading"


# Back


def in_state(state):
    """A host is lost on which ``a`` was in that state; it shares a GPU with ``b``."""
    fleet = Fleet(on("h", "a", evict_to=("sleep",)), on("h", "b"), drain_timeout=60.0)
    if state == "stopped":
        fleet.take(fleet.core.time_passed(0.0))
    else:
        first = fleet.request("a", 0.0)
        if state == "cancelling":
            fleet.take(fleet.core.unload_asked("a", 0.5))
        elif state != "loading":
            fleet.loaded("a", 1.0)
            if state in ("ready", "draining"):
                if state == "draining":
                    fleet.request("b", 2.0)
            else:
                fleet.take(fleet.core.released(first, 1.5))
                waiting = fleet.request("b", 2.0)
                if state == "stuck":
                    stop = fleet.step(Evict, "a")
                    fleet.take(fleet.core.evict_failed(stop, 3.0, "no"))
                elif state != "evicting":
                    fleet.evicted("a", 3.0, level="sleep", residual={"0": 0})
                    if state == "demoting":
                        fleet.loaded("b", 4.0)
                        fleet.take(fleet.core.released(waiting, 4.5))
                        fleet.take(fleet.core.unload_asked("a", 5.0))
    assert fleet.state("a") == state
    fleet.take(fleet.core.host_lost("h", 10.0))
    assert fleet.state("a") == state
    return fleet


STATES = sorted({state for state, _ in TRANSITIONS})


@pytest.mark.parametrize("state", STATES)
def test_whatever_it_was_it_is_what_it_was_found_to_be(state):
    fleet = in_state(state)
    fleet.take(fleet.core.host_back("h", 11.0, {"a": FoundBackend()}))
    assert fleet.state("a") == "ready"
    assert fleet.request("a", 12.0).backend == "a"

    fleet = in_state(state)
    fleet.take(fleet.core.host_back("h", 11.0, {"a": FoundBackend("sleep", {"0": 0})}))
    assert fleet.state("a") == "standby"
    fleet.request("a", 12.0)
    assert fleet.step(Load, "a").level == "sleep"

    fleet = in_state(state)
    fleet.take(fleet.core.host_back("h", 11.0, {}))
    assert fleet.state("a") == "stopped"
    fleet.request("b", 12.0)
    assert fleet.step(Load, "b")


def test_of_a_host_that_is_back_only_what_was_found_is_leased_whatever_was_resident_there():
    fleet = Fleet(on("h", "m0", model="m"), on("h", "m1", "1", model="m"), on("k", "m2", model="m"))
    for name in ("m0", "m1"):
        fleet.take(fleet.core.adopted(name, 0.0))
    fleet.take(fleet.core.host_lost("h", 2.0))
    waiting = [fleet.request("m", 3.0) for _ in range(3)]
    fleet.take(fleet.core.host_back("h", 4.0, {"m0": FoundBackend()}))
    assert [ticket.backend for ticket in waiting] == ["m0"] * 3
    assert fleet.state("m1") == "stopped"


def test_what_was_found_beside_another_and_cannot_stay_is_stopped_before_anything_is_loaded_there():
    fleet = Fleet(on("h", "a"), on("h", "b"), on("h", "c"))
    fleet.take(fleet.core.host_lost("h", 0.0))
    back = fleet.core.host_back("h", 1.0, {"a": FoundBackend(), "b": FoundBackend()})
    assert fleet.take(back) == ["evict b"]
    assert fleet.kinds(1.0) == ["host_back", "ready a", "stuck b", "evicting b"]
    fleet.request("c", 2.0)
    assert [step.backend for step in fleet.steps] == ["b"]
    assert fleet.evicted("b", 3.0) == ["evict a"]


def test_what_runs_and_may_not_stay_holds_its_gpus_until_it_is_stopped():
    fleet = Fleet(on("", "a"), on("", "b"))
    fleet.core.expected(["a", "b"])
    asked = fleet.request("b", 0.0)
    fleet.core.looked_at("b", 1.0)
    assert fleet.take(fleet.core.adopted("a", 1.0, FoundBackend(may_stay=False))) == ["evict a"]
    assert fleet.state("a") == "evicting"
    assert fleet.evicted("a", 2.0) == ["load b"]
    assert not asked.error


def test_a_host_that_is_declared_gone_holds_nothing_and_is_still_lost():
    fleet = Fleet(on("h", "a"))
    fleet.with_resident("a", 0.0, 1.0)
    assert fleet.core.host_gone("h", 1.5) is NOTHING
    fleet.take(fleet.core.host_lost("h", 2.0))
    fleet.take(fleet.core.host_gone("h", 3.0))
    assert fleet.state("a") == "stopped"
    assert fleet.request("a", 4.0).error.code == "host_unavailable"
    fleet.take(fleet.core.host_back("h", 5.0, {}))
    fleet.request("a", 6.0)
    assert fleet.step(Load, "a")


def test_a_lost_host_keeps_what_the_configuration_has_no_longer_until_it_is_back():
    a, b = on("h", "a"), on("", "b")
    fleet = Fleet(a, b)
    fleet.with_resident("a", 0.0, 1.0)
    fleet.take(fleet.core.host_lost("h", 2.0))
    fleet.take(fleet.core.reconfigured(Config(backends=(b,), policy="eager"), 3.0))
    assert [slot.name for slot in fleet.core.layout.leaving] == ["a"]
    assert fleet.take(fleet.core.host_back("h", 4.0, {"a": FoundBackend()})) == ["evict a"]
    fleet.evicted("a", 5.0)
    assert fleet.core.layout.slot("a") is None


def test_one_that_goes_to_another_host_holds_its_gpus_where_it_was_until_it_has_left_and_then_there():
    a = on("", "a", ttl=5.0)
    fleet = Fleet(a, on("h", "b"))
    running = fleet.request("a", 0.0)
    fleet.loaded("a", 1.0)
    moved = Config(backends=(on("h", "a"), on("h", "b")), policy="eager")
    fleet.take(fleet.core.reconfigured(moved, 2.0))
    waiting = fleet.request("a", 3.0)
    homes = {name: group.name for name, group in fleet.core.layout.of_backend.items()}
    assert homes == {"a": "0", "b": "h/0"}
    assert fleet.take(fleet.core.released(running, 4.0)) == ["evict a"]
    assert fleet.step(Evict, "a") == Evict("a", "stop", (), 2)
    left = fleet.core.evicted(Evict("a", "stop", (), 2), 5.0)
    assert fleet.take(left) == ["load a"]
    assert [(group.name, group.host.name) for group in fleet.core.layout.groups] == [("h/0", "h")]
    assert fleet.core.layout.slot("a").backend.host == "h"
    fleet.loaded("a", 6.0)
    assert waiting.backend == "a"
    assert fleet.core.layout.slot("a").occupies == {"h/0": 1}


def test_one_that_goes_to_another_host_ties_groups_there_only_once_it_is_there():
    apart = on("h", "b", "0"), on("h", "c", "1")
    fleet = Fleet(on("", "a"), *apart)
    fleet.with_resident("a", 0.0, 1.0)
    fleet.take(
        fleet.core.reconfigured(Config(backends=(on("h", "a", "0", "1"), *apart), policy="eager"), 2.0)
    )
    assert sorted(group.name for group in fleet.core.layout.groups) == ["0", "h/0", "h/1"]
    fleet.take(fleet.core.died("a", 3.0, "killed"))
    assert [group.name for group in fleet.core.layout.groups] == ["h/0+h/1"]


# Drained by hand


def test_what_is_on_a_host_that_is_drained_is_drained_and_stopped_and_its_queues_go_elsewhere():
    fleet = Fleet(*M, on("h", "s", "1", evict_to=("sleep",)), on("h", "x", "2", evict_to=("sleep",)))
    for name in ("m1", "x"):
        fleet.take(fleet.core.adopted(name, 0.0))
    fleet.take(fleet.core.adopted("s", 0.0, FoundBackend("sleep")))
    running = fleet.request("m", 1.0)
    assert fleet.take(fleet.core.host_drained("h", 2.0, True)) == ["demote s", "evict x"]
    assert [(step.backend, getattr(step, "to", step.level)) for step in fleet.steps] == [
        ("s", "stop"),
        ("x", "stop"),
    ]
    assert fleet.state("m1") == "draining"
    waiting = fleet.request("m", 3.0)
    assert [step.backend for step in fleet.steps][2:] == ["m0"]
    fleet.loaded("m0", 4.0)
    assert waiting.backend == "m0"
    assert running.severed is None
    assert fleet.take(fleet.core.time_passed(7.0)) == ["evict m1"]
    assert running.severed.cause == Cause("host_drained", host="h")
    assert fleet.core.host_drained("h", 8.0, True) is NOTHING
    fleet.evicted("m1", 8.0)
    assert fleet.request("s", 9.0).error.code == "host_unavailable"
    fleet.take(fleet.core.host_drained("h", 10.0, False))
    fleet.request("x", 11.0)
    assert fleet.kinds(10.0) == ["host_undrained"]


def test_a_load_on_a_host_that_is_drained_is_cancelled_and_its_queue_need_not_wait_for_that():
    fleet = Fleet(on("a", "m0", model="m"), on("b", "m1", model="m"))
    waiting = fleet.request("m", 0.0)
    assert fleet.take(fleet.core.host_drained("a", 1.0, True)) == ["cancel m0", "load m1"]
    late = fleet.core.loaded(fleet.step(Load, "m0"), 2.0, "stop")  # too late to be cancelled
    assert fleet.take(late) == ["evict m0"]
    assert not waiting.settled
    fleet.loaded("m1", 3.0)
    assert waiting.backend == "m1"


def test_queue_that_begins_beside_a_cancelled_load_goes_elsewhere():
    fleet = Fleet(on("a", "m0", model="m"), on("b", "m1", model="m"))
    fleet.take(fleet.core.abandoned(fleet.request("m", 0.0), 1.0))
    assert fleet.take(fleet.core.host_drained("a", 2.0, True)) == ["cancel m0"]
    fleet.request("m", 3.0)
    assert fleet.step(Load, "m1")


def test_victims_that_only_drained_for_a_load_there_go_as_well():
    fleet = Fleet(on("h", "a"), on("h", "b"), drain_timeout=60.0)
    running = fleet.request("a", 0.0)
    fleet.loaded("a", 1.0)
    waiting = fleet.request("b", 2.0)
    fleet.take(fleet.core.host_drained("h", 3.0, True))
    assert waiting.error.code == "host_unavailable"
    assert fleet.state("a") == "draining"
    assert fleet.take(fleet.core.released(running, 4.0)) == ["evict a"]


def test_what_has_only_been_drained_so_far_stays_when_the_host_is_to_be_used_again():
    fleet = Fleet(on("h", "a", evict_to=("sleep",)), on("h", "b"))
    running = fleet.request("a", 0.0)
    fleet.loaded("a", 1.0)
    fleet.take(fleet.core.host_drained("h", 2.0, True))
    assert fleet.request("a", 3.0).error.code == "host_unavailable"
    assert fleet.take(fleet.core.host_drained("h", 4.0, False)) == []
    assert fleet.state("a") == "ready"
    assert fleet.request("a", 5.0).backend == "a"
    fleet.take(fleet.core.time_passed(60.0))
    assert running.severed is None
    fleet.request("b", 61.0)
    fleet.take(fleet.core.time_passed(70.0))
    assert fleet.step(Evict, "a").level == "sleep"


def test_what_is_found_on_a_drained_host_that_is_back_goes_at_once_and_gets_no_lease():
    fleet = Fleet(*M)
    fleet.take(fleet.core.host_lost("h", 0.0))
    fleet.take(fleet.core.host_drained("h", 1.0, True))
    waiting = fleet.request("m", 2.0)
    assert fleet.step(Load, "m0")
    assert fleet.take(fleet.core.host_back("h", 3.0, {"m1": FoundBackend()})) == ["evict m1"]
    assert not waiting.settled


def test_requests_are_told_which_hosts_their_model_has_and_what_is_so():
    fleet = Fleet(on("gpu-b", "m0", model="m"), on("gpu-c", "m1", model="m"), on("", "x"))
    fleet.take(fleet.core.host_lost("gpu-b", 1.0))
    waiting = fleet.request("m", 2.0)
    assert not waiting.settled
    fleet.take(fleet.core.host_drained("gpu-c", 13.0, True))
    for ticket in (waiting, fleet.request("m", 13.0)):
        assert (ticket.error.status, ticket.error.code, ticket.error.retry_after) == (
            503,
            "host_unavailable",
            30.0,
        )
        what = "m has no host to run on now: gpu-b has been lost for 12 s, gpu-c is drained."
        assert ticket.error.message == what
    fleet.take(fleet.core.host_lost("", 14.0, "its agent did not answer in 5 s"))
    assert (
        "local has been lost for 2 s (its agent did not answer in 5 s)"
        in fleet.request("x", 16.0).error.message
    )
    assert fleet.take(fleet.core.host_lost("", 17.0, "its disk is full")) == []
    assert "local has been lost for 4 s (its disk is full)" in fleet.request("x", 18.0).error.message


# Lost from the very start


def test_a_host_may_be_lost_before_anything_is_known_of_it():
    fleet = Fleet(*M, on("h", "a", "1"))
    fleet.core.host_lost("h", 0.0)
    fleet.core.expected(["m0", "m1", "a"])
    assert fleet.core.layout.unseen == ["m0"]
    assert fleet.core.adopted("m1", 0.0) is NOTHING
    fleet.take(fleet.core.looked_at("m0", 0.0))
    fleet.take(fleet.core.time_passed(0.0))
    waiting = fleet.request("m", 1.0)
    assert [step.backend for step in fleet.steps] == ["m0"]
    assert fleet.request("a", 1.0).error.code == "host_unavailable"
    fleet.take(fleet.core.host_back("h", 2.0, {"m1": FoundBackend(), "a": FoundBackend("sleep")}))
    assert waiting.backend == "m1"
    assert fleet.state("a") == "standby"


def test_what_was_expected_there_is_waited_for_no_longer_once_its_host_is_lost():
    fleet = Fleet(*M)
    fleet.core.expected(["m1"])
    waiting = fleet.request("m", 0.0)
    assert [step.backend for step in fleet.steps] == ["m0"]
    fleet.take(fleet.core.host_lost("h", 1.0))
    assert fleet.core.layout.unseen == []
    assert fleet.core.looked_at("m1", 2.0) is NOTHING
    fleet.loaded("m0", 3.0)
    assert waiting.backend == "m0"


def test_a_late_report_of_an_eviction_says_nothing_of_what_was_loaded_since():
    fleet = Fleet(on("h", "a"), on("h", "b"))
    first = fleet.request("a", 0.0)
    fleet.loaded("a", 1.0)
    fleet.take(fleet.core.released(first, 2.0))
    fleet.request("b", 3.0)
    late = fleet.step(Evict, "a")
    fleet.take(fleet.core.host_lost("h", 4.0))
    fleet.take(fleet.core.host_back("h", 5.0, {"a": FoundBackend()}))
    running = fleet.request("a", 6.0)
    assert fleet.core.evicted(late, 7.0) is NOTHING
    assert fleet.core.evict_failed(late, 7.0, "no") is NOTHING
    assert (fleet.state("a"), running.severed) == ("ready", None)


# Residents and reservations of a model on several hosts


def test_residents_on_several_hosts_share_the_demand_and_so_the_loss_of_evicting_one():
    fleet = Fleet(*M)
    for name in ("m0", "m1"):
        fleet.core.adopted(name, 0.0)
    for at in range(1, 20):
        fleet.core.released(fleet.request("m", float(at)), at + 0.5)
    state, slot = fleet.core.layout.of_backend["m0"], fleet.core.layout.slot("m0")
    half, [resident] = weigh(state, 20.0, slot)[0], snapshot(state, 20.0, {}).residents
    fleet.core.host_lost("h", 20.0)
    assert weigh(state, 20.0, slot)[0] == pytest.approx(2 * half)
    [alone] = snapshot(state, 20.0, {}).residents
    assert resident.rate > 0.0
    assert alone.rate == pytest.approx(2 * resident.rate)


def overdue_beside_idle_host(**late):
    """A fleet where GPU 1 of h1 is reserved for c, and the only GPU of h2 is idle."""
    a1, a2 = on("h1", "a1", "1", model="a", **late), on("h2", "a2", model="a", **late)
    fleet = Fleet(on("h1", "b"), on("h1", "c", "0", "1", max_wait=20.0), a1, a2, queue_timeout=3600.0)
    fleet.request("b", 0.0)
    fleet.request("c", 1.0)
    assert fleet.take(fleet.core.time_passed(21.0)) == []
    return fleet


def test_queue_that_begins_beside_reserved_gpus_takes_the_idle_host():
    fleet = overdue_beside_idle_host()
    fleet.request("a", 30.0)
    assert fleet.state("a2") == "loading"


def test_overdue_queue_beside_reserved_gpus_takes_the_idle_host():
    fleet = overdue_beside_idle_host(max_wait=0.0)
    fleet.request("a", 30.0)
    assert fleet.state("a2") == "loading"


def test_queue_beside_reserved_gpus_takes_an_idle_host_that_is_heard_again():
    fleet = overdue_beside_idle_host()
    fleet.take(fleet.core.host_away("h2", 25.0, True))
    fleet.request("a", 30.0)
    assert fleet.take(fleet.core.time_passed(90.0)) == []
    assert fleet.take(fleet.core.host_away("h2", 95.0, False)) == ["load a2"]


def test_an_overdue_queue_reserves_one_candidate_not_all():
    pair = on("h", "t", "0", "1")
    fleet = Fleet(*M, on("h", "m2", "1", model="m"), pair)
    state, model = fleet.core.layout.of_backend["m1"], fleet.core.layout.models["m"]
    assert [slot.name for slot in state.loadable(model, 0.0)] == ["m1", "m2"]
    assert [slot.name for slot in reserved(state, model, set(), 0.0)] == ["m1"]


def test_a_backend_that_could_not_be_stopped_in_standby_takes_requests_once_it_is_loaded():
    fleet = Fleet(*M[:1], on("", "m2", "1", model="m", evict_to=("sleep",)))
    fleet.take(fleet.core.adopted("m2", 0.0, FoundBackend("sleep")))
    fleet.take(fleet.core.unload_asked("m", 1.0))
    [stop] = fleet.steps
    fleet.take(fleet.core.evict_failed(stop, 2.0, "no"))
    waiting = fleet.request("m", 3.0)
    fleet.loaded("m2", 4.0)
    assert waiting.error is None
    assert waiting.backend == "m2"


# A host that cannot be steered for a while


def test_on_a_host_that_is_away_requests_go_on_and_nothing_is_begun():
    fleet = Fleet(on("h", "a", "0"), on("h", "b", "0"))
    fleet.core.adopted("a", 0.0)
    running = fleet.request("a", 1.0)
    fleet.take(fleet.core.host_away("h", 2.0, True, "its disk is full"))
    assert fleet.kinds(2.0) == ["host_away"]
    assert running.severed is None
    assert fleet.request("a", 3.0).backend == "a"
    group = fleet.core.layout.of_backend["b"]
    assert wait_estimate(group, group.models["b"], 4.0).sentence == (
        "A request for b waits: its host h cannot be controlled (its disk is full), and nothing is loaded or"
        " evicted there until it can."
    )
    waiting = fleet.request("b", 4.0)
    fleet.core.released(running, 5.0)
    assert fleet.take(fleet.core.time_passed(500.0)) == []
    assert waiting.error is None
    fleet.take(fleet.core.host_away("h", 501.0, False))
    assert fleet.kinds(501.0) == ["host_heard", "draining a", "severed a", "evicting a"]


def draining_for_b(*more, host="h"):
    """A host on which a drains its stream for the queue of b; and that stream."""
    fleet = Fleet(on(host, "a"), on(host, "b"), *more, drain_timeout=600.0, queue_timeout=3600.0)
    for name in ("a", "c") if more else ("a",):
        fleet.core.adopted(name, 0.0)
    stream = fleet.request("a", 1.0)
    if more:
        fleet.core.host_away("i", 1.5, True)
    fleet.request("b", 2.0)
    assert fleet.state("a") == "draining"
    return fleet, stream


def test_drain_on_a_host_that_goes_away_is_called_off():
    fleet, stream = draining_for_b()
    fleet.take(fleet.core.host_away("h", 3.0, True))
    assert fleet.kinds(3.0) == ["host_away", "ready a"]
    assert fleet.request("a", 4.0).backend == "a"
    assert fleet.take(fleet.core.time_passed(700.0)) == []
    assert stream.severed is None
    fleet.take(fleet.core.host_away("h", 800.0, False))
    assert fleet.kinds(800.0)[:2] == ["host_heard", "draining a"]


def test_own_host_that_goes_away_serves_on_and_refuses_what_needs_a_swap():
    fleet, stream = draining_for_b(host="")
    [waiting] = fleet.core.layout.models["b"].queue
    fleet.take(fleet.core.host_away("", 3.0, True, "Docker does not answer"))
    assert fleet.state("a") == "ready"
    assert fleet.request("a", 4.0).backend == "a"
    for ticket in (waiting, fleet.request("b", 4.0)):
        assert ticket.error.code == "host_unavailable"
        assert ticket.error.message == "b cannot be loaded now: Docker does not answer"
    assert stream.severed is None
    fleet.take(fleet.core.host_away("", 5.0, False))
    fleet.request("b", 6.0)
    assert fleet.state("a") == "draining"


def not_begun(fleet, backend, at, kind=Evict):
    """The step on a backend was not begun, since Docker did not answer."""
    step = fleet.step(kind, backend)
    return fleet.take(fleet.core.evict_not_begun(step, at, "Docker does not answer"))


def evicting_for_b(*backends, **settings):
    """A own host on which a is being evicted for the queue of b; the request that waits for b."""
    fleet = Fleet(*(backends or (on("", "a"), on("", "b"))), **settings)
    fleet.core.adopted("a", 0.0)
    waiting = fleet.request("b", 1.0)
    assert fleet.state("a") == "evicting"
    return fleet, waiting


def test_resident_whose_eviction_was_not_begun_serves_on_with_its_queue():
    fleet, waiting = evicting_for_b()
    behind = fleet.request("a", 1.5)
    assert not_begun(fleet, "a", 2.0) == []
    assert fleet.kinds(2.0) == ["ready a", "leased a", "host_away", "failed b"]
    assert (behind.backend, fleet.request("a", 3.0).backend) == ("a", "a")
    assert waiting.error.message == "b cannot be loaded now: Docker does not answer"
    for ticket in (behind, *fleet.core.layout.slot("a").holders):
        fleet.core.released(ticket, 4.0)
    fleet.take(fleet.core.host_away("", 5.0, False))
    fleet.request("b", 6.0)
    assert fleet.state("a") == "evicting"
    fleet.evicted("a", 7.0)
    assert fleet.state("b") == "loading"


def test_other_victims_of_a_swap_that_was_not_begun_are_reprieved():
    backends = on("", "a"), on("", "c", "1"), on("", "b", "0", "1")
    fleet = Fleet(*backends, drain_timeout=60.0)
    for name in "ac":
        fleet.core.adopted(name, 0.0)
    running = fleet.request("c", 0.5)
    fleet.request("b", 1.0)
    assert [fleet.state(name) for name in "ac"] == ["evicting", "draining"]
    not_begun(fleet, "a", 2.0)
    assert [fleet.state(name) for name in "ac"] == ["ready", "ready"]
    assert running.severed is None


@pytest.mark.parametrize("end", ["unloaded", "removed"])
def test_backend_that_goes_anyway_is_evicted_once_the_host_is_heard(end):
    fleet = Fleet(on("", "a"), on("", "b"))
    fleet.core.adopted("a", 0.0)
    config = fleet.core.layout.settings.config
    if end == "unloaded":
        fleet.take(fleet.core.unload_asked("a", 1.0))
    else:
        fleet.take(fleet.core.reconfigured(replace(config, backends=config.backends[1:]), 1.0))
    assert not_begun(fleet, "a", 2.0) == []
    assert fleet.state("a") == "draining"
    assert fleet.take(fleet.core.host_away("", 3.0, False)) == ["evict a"]


def test_host_that_is_drained_evicts_again_once_it_is_heard():
    fleet = Fleet(on("", "a"))
    fleet.core.adopted("a", 0.0)
    assert fleet.take(fleet.core.paused(1.0)) == ["evict a"]
    assert not_begun(fleet, "a", 2.0) == []
    assert fleet.take(fleet.core.host_away("", 3.0, False)) == ["evict a"]


def test_step_in_standby_that_was_not_begun_leaves_it_there():
    fleet = Fleet(on("", "a", evict_to=("freeze", "stop")), on("", "b"))
    fleet.core.adopted("a", 0.0, FoundBackend("freeze"))
    fleet.take(fleet.core.unload_asked("a", 1.0))
    assert fleet.state("a") == "demoting"
    assert not_begun(fleet, "a", 2.0, Demote) == []
    assert fleet.state("a") == "standby"
    assert fleet.take(fleet.core.host_away("", 3.0, False)) == ["demote a"]


def test_stop_that_failed_before_leaves_it_stuck_though_the_next_was_not_begun():
    fleet, _ = evicting_for_b()
    fleet.take(fleet.core.evict_failed(fleet.step(Evict, "a"), 2.0, "it hangs"))
    assert fleet.take(fleet.core.time_passed(fleet.last.ask_at)) == ["evict a"]
    not_begun(fleet, "a", 20.0)
    assert fleet.state("a") == "stuck"


def test_step_that_was_not_begun_and_is_over_changes_nothing():
    fleet, _ = evicting_for_b()
    step = fleet.steps[-1]
    fleet.evicted("a", 2.0)
    assert fleet.core.evict_not_begun(step, 3.0, "late") is NOTHING


def test_queue_of_a_drain_on_a_host_that_goes_away_is_served_elsewhere():
    fleet, _ = draining_for_b(on("i", "c"), on("i", "b2", model="b"))
    assert fleet.take(fleet.core.host_away("i", 2.5, False)) == []
    assert fleet.take(fleet.core.host_away("h", 3.0, True)) == ["evict c"]
    assert fleet.evicted("c", 4.0) == ["load b2"]


def test_queue_of_a_swap_that_evicts_on_a_host_that_goes_away_is_served_elsewhere():
    fleet = Fleet(on("h", "a"), on("h", "b"), on("i", "c"), on("i", "b2", model="b"))
    for name in ("a", "c"):
        fleet.core.adopted(name, 0.0)
    fleet.core.host_away("i", 1.0, True)
    fleet.request("b", 2.0)
    assert fleet.state("a") == "evicting"
    fleet.take(fleet.core.host_away("i", 3.0, False))
    assert fleet.take(fleet.core.host_away("h", 4.0, True)) == ["evict c"]
    assert fleet.evicted("a", 5.0) == []
    assert fleet.evicted("c", 6.0) == ["load b2"]


def test_drain_by_hand_on_a_host_that_goes_away_goes_on():
    fleet = Fleet(on("h", "a"))
    fleet.core.adopted("a", 0.0)
    fleet.request("a", 1.0)
    fleet.take(fleet.core.unload_asked("a", 2.0))
    fleet.take(fleet.core.host_away("h", 3.0, True))
    assert fleet.state("a") == "draining"
    assert fleet.take(fleet.core.host_away("h", 9.0, False)) == ["evict a"]


def test_a_queue_goes_to_a_host_that_can_be_steered():
    fleet = Fleet(on("g", "m0", "0", model="m"), on("h", "m1", "0", model="m"))
    fleet.take(fleet.core.host_away("g", 0.0, True))
    fleet.request("m", 1.0)
    assert fleet.state("m1") == "loading"


def test_a_host_that_is_away_may_be_lost_and_is_not_away_when_it_is_back():
    fleet = Fleet(on("h", "a", "0"))
    fleet.core.adopted("a", 0.0)
    fleet.take(fleet.core.host_away("h", 1.0, True))
    fleet.take(fleet.core.host_lost("h", 2.0))
    fleet.take(fleet.core.host_back("h", 3.0, {}))
    fleet.request("a", 4.0)
    assert fleet.state("a") == "loading"
