"""Histories of how long a model stays: its ttl, keep_alive and min_residency."""

from math import inf

import pytest

from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.policies import Stay, build_policy
from tests.scheduler.driver import TEN, A, B, Driver, Never, Watched, backend

# Settings per model: idle time-outs


def test_an_idle_model_is_put_out_when_its_ttl_ends_although_nobody_comes():
    driver = Driver(backend("a", ttl=10.0), B).with_resident("a")
    assert driver.until == 10.0
    assert driver.steps(9.9) == []
    assert driver.steps(10.0) == ["evict a"]
    assert driver.log[-1].cause == Cause("idle", seconds=10.0)
    driver.core.evicted("a", 11.0)
    assert (driver.steps(11.0), driver.until) == ([], inf)
    driver.sound()


def test_a_ttl_counts_from_the_last_answer_and_never_ends_during_one():
    driver = Driver(backend("a", ttl=10.0)).with_resident("a")
    first, second = driver.request("a", 1.0), driver.request("a", 2.0)
    assert (driver.steps(50.0), driver.until) == ([], inf)
    assert driver.core.release(first, 60.0) is False
    assert driver.steps(75.0) == []
    assert driver.core.release(second, 80.0), "its timer must be set although nothing else happens"
    assert (driver.steps(80.0), driver.until) == ([], 90.0)
    late = driver.request("a", 89.0)
    assert (driver.steps(90.0), driver.until) == ([], inf)
    driver.core.release(late, 91.0)
    assert driver.steps(101.0) == ["evict a"]


def test_a_ttl_of_zero_puts_a_model_out_after_its_last_answer():
    driver = Driver(backend("a", ttl=0.0))
    first = driver.request("a", 1.0)
    assert driver.steps(1.0) == ["load a"]
    driver.core.loaded("a", 4.0)
    assert (driver.steps(4.0), first.backend) == ([], "a")
    assert driver.release(first, 5.0) == ["evict a"]


@pytest.mark.parametrize(("ttl", "keep_alive"), [(None, 5.0), (10.0, 5.0), (10.0, 20.0)])
def test_keep_alive_takes_the_place_of_the_ttl_until_the_next_load(ttl, keep_alive):
    driver = Driver(backend("a", ttl=ttl), B).with_resident("a")
    slot, lease = driver.core.slots["a"], driver.request("a", 1.0)
    driver.core.state.keep_alive(slot, keep_alive)
    assert driver.core.release(lease, 2.0), "its timer must be set"
    assert (driver.steps(2.0), driver.until) == ([], 2.0 + keep_alive)
    assert driver.steps(2.0 + keep_alive) == ["evict a"]
    assert driver.log[-1].cause == Cause("idle", seconds=keep_alive)
    driver.core.evicted("a", 30.0)
    assert driver.asked("a", 30.0) == ["load a"]
    driver.core.loaded("a", 31.0)
    assert (slot.ttl, slot in driver.core.state.idlers) == (ttl, ttl is not None)
    driver.sound()


def test_a_model_that_is_kept_for_ever_goes_for_another():
    driver = Driver(backend("a", ttl=10.0), B).with_resident("a")
    lease = driver.request("a", 1.0)
    driver.core.state.keep_alive(driver.core.slots["a"], inf)
    driver.core.release(lease, 2.0)
    assert (driver.steps(1000.0), driver.until) == ([], inf)
    assert driver.asked("b", 1000.0) == ["evict a"]


def test_a_swap_that_is_held_back_does_not_hide_that_a_model_is_kept_for_a_time_only():
    driver = Driver(A, B, policy=Never(), max_wait=60.0)
    assert driver.core.adopt("a", 0.0)
    lease = driver.request("a", 1.0)
    assert driver.asked("b", 1.0) == []
    driver.core.state.keep_alive(driver.core.slots["a"], 5.0)
    assert driver.core.release(lease, 3.0)
    assert (driver.steps(3.0), driver.until) == ([], 8.0)
    assert driver.steps(8.0) == ["evict a"]


def test_when_the_ttl_of_the_resident_ends_the_line_that_the_policy_holds_back_has_room_and_goes():
    patient = build_policy("debounce", {"quiet": 50.0, "max_hold": 50.0})
    driver = Driver(backend("a", ttl=10.0), B, policy=patient).with_resident("a")
    waiting = driver.request("b", 5.0)
    assert (driver.steps(5.0), driver.until) == ([], 10.0)
    assert driver.steps(10.0) == ["evict a"]
    assert driver.steps(10.0) == []  # the GPU is not free yet
    assert driver.evicted("a", 11.0) == ["load b"]
    assert driver.log[-1].cause == Cause("room_free", waiting=1)
    driver.core.loaded("b", 12.0)
    assert waiting.backend == "b"
    driver.sound()


@pytest.mark.parametrize(("by_hand", "at"), [(True, 1.0), (False, 10.0)], ids=["unloaded", "idle"])
def test_a_request_during_the_stop_of_a_model_loads_it_again(by_hand, at):
    driver = Driver(backend("a", ttl=10.0), B).with_resident("a")
    if by_hand:
        driver.core.unload("a", at)
    assert driver.steps(at) == ["evict a"]
    again = driver.request("a", at + 0.5)
    assert (driver.steps(at + 0.5), again.settled) == ([], False)
    assert driver.evicted("a", at + 1.0) == ["load a"]
    driver.core.loaded("a", at + 2.0)
    assert again.backend == "a"
    driver.sound()


def test_the_ttl_of_a_model_that_ran_before_counts_from_its_adoption():
    driver = Driver(backend("a", ttl=10.0))
    driver.core.adopt("a", 3.0)
    assert (driver.steps(3.0), driver.until) == ([], 13.0)
    assert driver.steps(13.0) == ["evict a"]


# Settings per model: the shortest stay


def test_a_model_stays_for_its_min_residency_and_the_line_that_waits_for_it_is_told_why():
    driver = Driver(backend("a", min_residency=20.0), B)
    driver.asked("a", 0.0, takes_lease=False)
    driver.core.loaded("a", 3.0)  # counted from here
    driver.request("b", 5.0)
    assert (driver.steps(5.0), driver.until) == ([], 23.0)
    assert [*driver.core.state.deferred] == ["b"]
    assert driver.steps(6.0) == []
    (deferred,) = (event for event in driver.log if event.kind == "deferred")
    assert (deferred.model, deferred.size, deferred.seconds) == ("b", 1, 17.0)
    assert deferred.cause == Cause("min_residency", residents=("a",))
    assert driver.request("a", 6.0, takes_lease=False).backend == "a"
    assert driver.steps(22.9) == []
    assert driver.steps(23.0) == ["evict a"]
    assert driver.tell("deferred") == ["deferred b"]


def test_an_overdue_line_breaks_a_min_residency():
    driver = Driver(backend("a", min_residency=100.0), B, max_wait=10.0).with_resident("a")
    driver.request("b", 5.0)
    assert (driver.steps(5.0), driver.until) == ([], 15.0)
    assert driver.steps(6.0) == []
    assert [event.seconds for event in driver.log if event.kind == "deferred"] == [9.0]
    assert driver.steps(15.0) == ["evict a"]
    assert driver.log[-1].cause == Cause("overdue")


def test_another_goes_in_place_of_one_that_may_stay():
    backends = backend("a", vram=5, min_residency=20.0), backend("b", vram=5), backend("c", vram=5)
    driver = Driver(*backends, gpus=TEN).with_resident("a").with_resident("b", 1.0)
    assert driver.asked("c", 2.0) == ["evict b"]  # although a was used longer ago


def test_a_min_residency_neither_forbids_an_unload_nor_outlasts_a_ttl():
    driver = Driver(backend("a", min_residency=100.0, ttl=10.0), B).with_resident("a")
    assert driver.steps(10.0) == ["evict a"]
    driver = Driver(backend("a", min_residency=100.0), B).with_resident("a")
    assert driver.core.unload("a", 1.0)
    assert driver.steps(1.0) == ["evict a"]


def test_the_stay_that_is_told_is_that_of_who_is_in_the_way():
    pair, far = backend("t", "0", "1"), backend("c", "1", min_residency=10.0)
    driver = Driver(backend("a", "0", min_residency=30.0), backend("b", "0"), far, pair)
    for name in "ac":
        driver.request(name, 0.0, takes_lease=False)
    assert driver.steps(0.0) == ["load a", "load c"]
    for name in "ac":
        driver.core.loaded(name, 0.0)
    assert driver.asked("b", 2.0) == driver.steps(3.0) == []
    (deferred,) = (event for event in driver.log if event.kind == "deferred")
    assert (deferred.seconds, deferred.cause) == (27.0, Cause("min_residency", residents=("a",)))


def test_a_model_that_ran_before_counts_as_resident_for_long():
    watched = Watched()
    driver = Driver(backend("a", min_residency=100.0), B, policy=watched)
    driver.core.adopt("a", 50.0)
    assert driver.asked("b", 51.0) == ["evict a"]
    assert [(r.model, r.since, r.last_used) for r in watched.seen[0].residents] == [("a", -inf, 50.0)]


@pytest.mark.parametrize("policy", ["cost_aware", "time_slice"])
def test_no_policy_lets_a_model_that_ran_before_have_its_stay_once_more(policy):
    driver = Driver(A, B, policy=build_policy(policy))
    driver.core.adopt("a", 50.0)
    tickets = [driver.request("b", 51.0) for _ in range(10)]
    assert driver.steps(51.0) == ["evict a"]
    assert not any(ticket.settled for ticket in tickets)


class Holds:
    """Stays, and says up to how many leases that holds."""

    def __init__(self, leases):
        self.leases = leases

    def decide(self, seen):
        return Stay(99.0, leases=self.leases)


@pytest.mark.parametrize(
    ("leases", "asked"),
    [(0, [False] * 4), (2, [False, False, True, True]), (9, [True] * 4), (inf, [True] * 4)],
)
def test_the_end_of_a_lease_asks_the_policy_unless_its_answer_holds_for_those_left(leases, asked):
    driver = Driver(A, B, policy=Holds(leases))
    driver.core.adopt("a", 0.0)
    held = [driver.request("a", 1.0) for _ in range(4)]
    driver.asked("b", 2.0)
    assert [driver.core.release(ticket, 3.0) for ticket in held] == asked


def test_the_end_of_a_lease_asks_the_policy_anyway_where_it_may_change_who_would_go():
    driver = Driver(*(backend(name, vram=4) for name in "abc"), gpus=TEN, policy=Holds(0))
    driver.core.adopt("a", 0.0)
    driver.core.adopt("b", 0.0)
    held = [driver.request("a", 1.0) for _ in range(2)]
    driver.asked("c", 2.0)
    assert [driver.core.release(ticket, 3.0) for ticket in held] == [True, True]
