"""Histories of loads that are cancelled: by hand, and for a queue when nobody waits for them any more."""

from dataclasses import replace

import pytest

from anvil_mux.config.config import Config
from anvil_mux.config.service import PlacedFile
from anvil_mux.errors import LoadError
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.slot import Load
from tests.scheduler.driver import FACTS, TEN, A, B, Driver, Never, backend
from tests.scheduler.fleet import Fleet, on

# Loads that are cancelled


def ends(driver, *tickets):
    """How the waits of tickets ended: a backend, the code of an error, or None."""
    return [ticket.backend or (ticket.error and ticket.error.code) for ticket in tickets]


def loading(name, *backends, **settings):
    """A GPU group on which a request has begun the load of a backend; and that request."""
    driver = Driver(*(backends or (A, B)), **settings)
    ticket = driver.request(driver.core.slots[name].model, 0.0)
    assert driver.steps(0.0) == [f"load {name}"]
    return driver, ticket


def test_a_load_is_cancelled_by_hand_and_who_waits_for_it_is_told_so():
    driver, first = loading("a")
    second = driver.request("a", 1.0)
    assert driver.core.unload("a", 2.0)
    assert ends(driver, first, second) == ["cancelled", "cancelled"]
    assert "a was unloaded by hand" in first.error.message
    assert driver.core.state.woken == [first, second]
    assert driver.steps(2.0) == ["cancel a"]
    assert driver.steps(2.5) == []
    driver.core.load_cancelled("a", 3.0)
    assert (driver.state("a"), driver.steps(3.0)) == ("stopped", [])
    assert not driver.core.unload("a", 4.0)
    told = [(e.kind, e.cause, e.target) for e in driver.log[2:] if not e.ticket]
    assert told == [("cancelling", Cause("unloaded"), ""), ("stopped", None, "")]
    driver.sound()


def test_a_load_that_somebody_else_cancelled_has_failed():
    driver, first = loading("a")
    driver.core.load_cancelled("a", 3.0)
    assert driver.state("a") == "stopped"
    assert ends(driver, first) == ["load_failed"]
    assert "its load was cancelled by somebody else" in first.error.message
    assert driver.core.slots["a"].failed_starts == 1
    driver.sound()


def test_what_was_cancelled_has_no_cool_down_and_counts_as_no_failure():
    driver, _ = loading("a")
    driver.core.load_failed("a", 1.0, LoadError("no"))
    assert driver.asked("a", 6.0) == ["load a"]
    assert driver.unload("a", 7.0) == ["cancel a"]
    driver.core.load_cancelled("a", 8.0)
    again = driver.request("a", 8.0)
    assert (again.error, driver.steps(8.0)) == (None, ["load a"])
    assert driver.core.slots["a"].failed_starts == 1
    driver.core.loaded("a", 9.0)
    driver.sound()


def test_who_comes_while_a_load_is_being_cancelled_waits_for_the_next():
    driver, _ = loading("a")
    assert driver.unload("a", 1.0) == ["cancel a"]
    late = driver.request("a", 2.0)
    assert (driver.steps(2.0), late.settled) == ([], False)
    assert driver.load_cancelled("a", 3.0) == ["load a"]
    driver.core.loaded("a", 4.0)
    assert late.backend == "a"
    driver.sound()


def test_who_comes_before_the_load_is_cancelled_has_it_go_on():
    driver, _ = loading("a")
    driver.core.unload("a", 1.0)
    late = driver.request("a", 1.0)
    assert driver.steps(1.0) == []
    driver.core.loaded("a", 2.0)
    assert late.backend == "a"
    driver.sound()


def test_a_load_that_has_just_succeeded_when_it_is_cancelled_is_unloaded():
    driver, _ = loading("a")
    assert driver.unload("a", 1.0) == ["cancel a"]
    late = driver.request("a", 1.5)
    driver.core.loaded("a", 2.0)
    assert (late.backend, driver.state("a"), driver.steps(2.0)) == ("a", "draining", [])
    assert driver.release(late, 3.0) == ["evict a"]
    assert driver.evicted("a", 4.0) == []
    driver.sound()


@pytest.mark.parametrize("failure", ["load_failed", "evict_failed"])
def test_a_load_that_fails_while_it_is_cancelled_has_no_cool_down_unless_it_cannot_be_stopped(failure):
    driver, _ = loading("a")
    driver.unload("a", 1.0)
    FACTS[failure](driver.core, 2.0)
    assert driver.core.slots["a"].failed_starts == 0
    if failure == "load_failed":
        assert driver.request("a", 2.0).error is None
        assert driver.steps(2.0) == ["load a"]
    else:
        assert (driver.request("a", 2.0).error.code, driver.steps(7.0)) == ("stuck", ["evict a"])


def test_a_load_that_nobody_waits_for_any_more_is_cancelled_for_a_line_that_needs_its_gpu():
    driver, first = loading("a")
    assert driver.give_up(first, 1.0) == []
    waiting = driver.request("b", 2.0)
    assert driver.steps(2.0) == ["cancel a"]
    assert driver.load_cancelled("a", 3.0) == ["load b"]
    driver.core.loaded("b", 4.0)
    assert waiting.backend == "b"
    assert [(e.at, e.target) for e in driver.log if e.kind == "cancelling"] == [(2.0, "b")]
    driver.sound()


def test_it_is_cancelled_too_if_the_line_was_there_before_and_whatever_the_policy_says():
    driver, first = loading("a", policy=None)
    driver.core.set_policy(Never())
    waiting = driver.request("b", 1.0)
    assert driver.steps(1.0) == []
    assert driver.give_up(first, 2.0) == ["cancel a"]
    assert not waiting.settled


def test_load_of_a_pinned_model_is_not_cancelled_for_another():
    driver = Driver(backend("a", pin=True), B)
    asked = driver.request("a", 0.0)
    assert driver.steps(0.0) == ["load a"]
    driver.core.give_up(asked, 1.0)
    assert driver.asked("b", 2.0) == []
    assert driver.core.unload("a", 3.0)  # by hand it is
    assert driver.steps(3.0) == ["cancel a"]


def test_preload_makes_way_for_a_queue():
    driver = Driver(backend("a", preload=True), B)
    assert driver.steps(0.0) == ["load a"]
    waiting = driver.request("b", 2.0)
    assert driver.steps(2.0) == ["cancel a"]
    assert driver.load_cancelled("a", 3.0) == ["load b"]
    driver.core.loaded("b", 4.0)
    assert waiting.backend == "b"
    driver.sound()


def test_preload_that_made_way_is_begun_again_where_there_is_room():
    driver = Driver(backend("a", "0", "1", preload=True), backend("b", "1"))
    assert driver.steps(0.0) == ["load a"]
    asked = driver.request("b", 2.0)
    assert driver.steps(2.0) == ["cancel a"]
    assert driver.give_up(asked, 3.0) == []
    assert driver.load_cancelled("a", 4.0) == ["load a"]


def test_load_of_another_replica_makes_way_once_nobody_waits_for_it():
    replicas = backend("m0", "0", model="m"), backend("m1", "1", model="m")
    driver = Driver(*replicas, backend("b", "1"), max_wait=30.0).with_resident("m0")
    leases = [driver.request("m", 1.0) for _ in range(3)]
    assert driver.steps(1.0) == ["load m1"]
    assert driver.asked("b", 2.0) == []
    assert driver.release(leases[0], 3.0) == []
    assert driver.core.release(leases[1], 4.0), "the next step is asked for"
    assert driver.steps(4.0) == ["cancel m1"]
    assert driver.load_cancelled("m1", 5.0) == ["load b"]
    driver.core.loaded("b", 6.0)
    driver.core.release(leases[2], 7.0)
    driver.sound()


def test_a_load_is_not_cancelled_for_a_line_that_could_not_be_loaded_there_all_the_same():
    stays = backend("a", vram=5, min_residency=500.0)
    driver = Driver(stays, backend("b", vram=5), backend("c", vram=10), gpus=TEN).with_resident("a")
    gone = driver.request("b", 0.0)
    assert driver.steps(0.0) == ["load b"]
    driver.core.give_up(gone, 1.0)
    driver.request("c", 2.0)
    assert (driver.steps(2.0), driver.until) == ([], 62.0)  # then it is overdue, and a need not stay
    assert driver.steps(62.0) == ["cancel b"]
    assert driver.load_cancelled("b", 63.0) == ["evict a"]


def test_all_loads_are_cancelled_that_a_line_of_several_gpus_needs():
    driver = Driver(backend("a", "0"), backend("b", "1"), backend("t", "0", "1"))
    gone = [driver.request("a", 0.0), driver.request("b", 0.0)]
    assert driver.steps(0.0) == ["load a", "load b"]
    waiting = driver.request("t", 1.0)
    assert driver.give_up(gone[0], 2.0) == []  # b is still waited for
    assert driver.give_up(gone[1], 3.0) == ["cancel a", "cancel b"]
    assert driver.load_cancelled("a", 4.0) == []
    assert driver.load_cancelled("b", 5.0) == ["load t"]
    driver.core.loaded("t", 6.0)
    assert waiting.backend == "t"
    driver.sound()


def test_load_for_nobody_is_cancelled_for_a_queue_with_another_place():
    """b waits for the load on GPU 0; its other GPU loads a, whose client left."""
    replicas = [on("", f"b{gpu}", gpu, model="b") for gpu in "01"]
    fleet = Fleet(on("", "x"), on("", "a", "1"), *replicas, queue_timeout=3600.0, policy="adaptive")
    fleet.request("x", 0.0)
    departing = fleet.request("a", 0.0)
    fleet.request("b", 1.0)
    assert fleet.take(fleet.core.abandoned(departing, 2.0)) == ["cancel a"]


def test_load_whose_description_a_reload_changes_is_cancelled():
    """A command with a mistake loads for minutes; the corrected one is loaded for the same queue."""
    wrong = on("", "a")
    right = replace(wrong, service=replace(wrong.service, digest="right"))
    fleet = Fleet(wrong)
    waiting = fleet.request("a", 0.0)
    assert fleet.take(fleet.core.reconfigured(Config(backends=(right,), policy="eager"), 10.0)) == [
        "cancel a"
    ]
    assert fleet.take(fleet.core.load_cancelled(fleet.step(Load, "a"), 12.0)) == ["load a"]
    fleet.loaded("a", 20.0)
    assert waiting.backend == "a"


def test_reload_with_another_secret_leaves_a_backend_running_and_loads_it_with_that_later():
    before = on("", "a")
    placed = (PlacedFile("/run/secrets/s", "two", "TOKEN"),)
    after = replace(before, service=replace(before.service, files=placed))
    fleet = Fleet(before)
    fleet.request("a", 0.0)
    fleet.loaded("a", 1.0)
    assert fleet.take(fleet.core.reconfigured(Config(backends=(after,), policy="eager"), 2.0)) == []
    assert fleet.core.layout.slot("a").backend.service.files == placed


def test_wake_for_nobody_is_not_cancelled():
    """It ends in seconds, and what is cancelled has to be loaded from the beginning the next time."""
    driver = Driver(A, backend("b", evict_to=("sleep",)))
    driver.core.adopt_standby("b", 0.0, "sleep", {}, host_bytes=0)
    departing = driver.request("b", 1.0)
    assert driver.steps(1.0) == ["load b"]
    driver.core.give_up(departing, 2.0)
    assert driver.asked("a", 2.0) == []
    assert driver.loaded("b", 3.0) == ["evict b"]
    assert driver.evicted("b", 4.0, {}, "sleep") == ["load a"]
    driver.core.loaded("a", 5.0)
    driver.sound()


def test_who_waits_while_its_gpu_is_being_freed_is_told_that_the_model_was_unloaded_too():
    driver = Driver(A, B, drain_timeout=30.0).with_resident("a")
    lease, waiting = driver.request("a", 1.0), driver.request("b", 2.0)
    assert (driver.steps(2.0), driver.state("a")) == ([], "draining")
    assert driver.core.unload("b", 3.0)
    assert (ends(driver, waiting), driver.state("a"), driver.steps(3.0)) == (["cancelled"], "ready", [])
    driver.core.release(lease, 4.0)
    assert driver.asked("b", 5.0) == ["evict a"]
    assert driver.core.unload("b", 6.0)
    assert driver.steps(6.0) == []
    driver.core.evicted("a", 7.0)
    assert (driver.steps(7.0), driver.states()) == ([], {"a": "stopped", "b": "stopped"})
    driver.sound()


def test_what_nobody_keeps_is_not_loaded_on_unless_somebody_waits_for_it():
    driver, first = loading("a")
    assert not driver.core.unload_when_idle("a", 1.0)
    assert driver.steps(1.0) == []
    driver.core.give_up(first, 2.0)
    assert driver.core.unload_when_idle("a", 3.0)
    assert driver.steps(3.0) == ["cancel a"]


def test_a_replica_that_is_being_loaded_is_unloaded_with_the_others():
    driver = Driver(backend("r0", "0", model="m"), backend("r1", "1", model="m"), backend("a", "1"))
    first = driver.request("m", 0.0)
    assert driver.steps(0.0) == ["load r0"]
    driver.core.loaded("r0", 1.0)
    behind = [driver.request("m", 1.0) for _ in range(30)]
    assert driver.steps(20.0) == ["load r1"]
    assert driver.core.unload("m", 21.0)
    assert driver.steps(21.0) == ["cancel r1"]
    assert driver.states() == {"r0": "draining", "r1": "cancelling", "a": "stopped"}
    assert ends(driver, first, *behind) == ["r0"] * 31
