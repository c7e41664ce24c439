"""Histories of loads and stops that fail, of engines that end, and of loads that can never fit."""

import pytest

from anvil_mux.errors import DoesNotFit, LoadError
from anvil_mux.lab.checker import check
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.policies import Stay, SwapTo
from anvil_mux.scheduler.slot import SOON_SECONDS
from tests.scheduler.driver import TEN, A, B, Driver, backend

# Failures


def test_after_a_failed_start_its_waiters_fail_and_the_others_are_served():
    driver = Driver(A, B).with_resident("a")
    broken = driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    other = driver.request("a", 1.5)
    assert driver.evicted("a", 2.0) == ["load b"]
    driver.core.load_failed("b", 4.0, LoadError("exited with code 1", log=("bad weights",)))
    assert (broken.error.status, broken.error.code) == (503, "load_failed")
    assert "exited with code 1" in broken.error.message
    assert "bad weights" in broken.error.log
    assert driver.steps(4.0) == ["load a"]
    driver.core.loaded("a", 5.0)
    assert other.backend == "a"
    driver.sound()


def test_the_cool_down_doubles_up_to_five_minutes_and_a_success_ends_it():
    driver = Driver(A)
    now, pauses = 0.0, []
    for _ in range(9):
        failed = driver.request("a", now)
        assert driver.steps(now) == ["load a"]
        driver.core.load_failed("a", now, LoadError("no"))
        assert (failed.error.code, driver.state("a"), driver.steps(now)) == ("load_failed", "stopped", [])
        pauses.append(driver.core.slots["a"].retry_at - now)
        now = driver.core.slots["a"].retry_at
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
    later = driver.request("a", now)
    assert driver.steps(now) == ["load a"]
    driver.core.loaded("a", now)
    assert (later.backend, driver.core.slots["a"].failed_starts) == ("a", 0)
    driver.sound()


def test_nothing_is_started_on_top_of_a_backend_that_could_not_be_stopped():
    driver = Driver(A, B).with_resident("a")
    waiting = driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    assert driver.evict_failed("a", 2.0, "docker does not answer") == []
    assert (waiting.error.status, waiting.error.code) == (503, "stuck")
    assert "docker does not answer" in waiting.error.message
    for model in "ab":
        assert driver.request(model, 3.0).error.code == "stuck"
    assert driver.state("a") == "stuck"
    assert driver.until == 7.0
    driver.sound()


def test_a_stuck_backend_is_stopped_again_until_it_works():
    driver = Driver(A, B).with_resident("a")
    driver.asked("b", 0.0)
    now = 0.0
    for pause in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
        assert driver.evict_failed("a", now, "no") == []
        now += pause
        assert driver.until == now
        assert driver.steps(now) == ["evict a"]
    late = driver.request("b", now)
    assert not late.settled
    assert driver.evicted("a", now) == ["load b"]
    driver.core.loaded("b", now)
    assert {event.seconds for event in driver.log if event.kind == "evicting"} == {0.0}  # none was drained
    driver.sound()


def test_a_start_that_could_not_be_cleaned_up_is_stuck():
    driver = Driver(A, B)
    waiting = driver.request("a", 0.0)
    driver.steps(0.0)
    driver.core.evict_failed("a", 1.0, "half started")
    assert waiting.error.code == "stuck"
    assert driver.request("b", 2.0).error.code == "stuck"
    assert driver.steps(6.0) == ["evict a"]
    early = driver.request("a", 6.5)
    driver.core.evicted("a", 7.0)
    assert driver.request("b", 8.0).error is None
    assert early.error.code == "load_failed"


def test_broken_models_that_cannot_be_cleaned_up_at_once_cool_down_all_the_same():
    driver = Driver(A)
    now, pauses = 0.0, []
    for _ in range(4):
        assert driver.asked("a", now) == ["load a"]
        driver.evict_failed("a", now, "half started")
        assert driver.until == now + 5.0
        now += 5.0
        assert driver.steps(now) == ["evict a"]
        driver.core.evicted("a", now)
        pauses.append(driver.core.slots["a"].retry_at - now)
        now += pauses[-1]
    assert pauses == [5.0, 10.0, 20.0, 40.0]
    assert driver.core.slots["a"].error == "half started"
    driver.sound()


def test_victims_that_only_drain_are_reprieved_when_another_is_stuck():
    small = [backend(name, vram=5) for name in "ab"]
    driver = Driver(*small, backend("c", vram=10), gpus=TEN).with_resident("a").with_resident("b")
    driver.request("b", 1.0)
    assert driver.asked("c", 2.0) == ["evict a"]
    late = driver.request("b", 2.5)
    driver.core.evict_failed("a", 3.0, "no")
    assert driver.states() == {"a": "stuck", "b": "ready", "c": "stopped"}
    assert late.backend == "b"
    driver.sound()


def test_the_resident_that_died_is_loaded_again_for_the_next_request_and_its_last_words_are_kept_until_then():
    driver = Driver(A).with_resident("a")
    driver.core.release(driver.request("a", 0.5), 0.5)
    lease, slot = driver.request("a", 1.0), driver.core.slots["a"]
    assert driver.died("a", 2.0, "exited with code 137", ["no more memory"]) == []
    assert (slot.holders, slot.log) == ({}, ("no more memory",))
    driver.core.release(lease, 2.5)
    later = driver.request("a", 3.0)
    assert driver.steps(3.0) == ["load a"]
    driver.core.died("a", 3.5, "killed", ["of an earlier run"])
    assert slot.log == ("no more memory",)
    driver.core.loaded("a", 4.0)
    assert (later.backend, slot.log) == ("a", ())
    driver.sound()


# Ends soon after a load


def loaded(driver, at, name="a"):
    """A request, which has ``name`` loaded."""
    ticket = driver.request(name, at)
    assert driver.steps(at) == [f"load {name}"]
    driver.core.loaded(name, at)
    return ticket


def test_who_ends_soon_after_its_load_and_never_answered_cools_down_as_if_it_had_failed_to_load():
    driver, now, pauses = Driver(A), 0.0, []
    for _ in range(4):
        held = loaded(driver, now)
        driver.core.died("a", now + 1.0, "exited with code 139", ["segmentation fault"])
        soon = "1.0 s after it was loaded, before it had completed an answer"
        assert held.crash.why == f"exited with code 139 {soon}"
        driver.core.release(held, now + 1.0, whole=False)
        refused = driver.request("a", now + 1.0)
        assert (refused.error.code, refused.error.retry) == ("load_failed", False)
        assert "a ended and is not tried again for" in refused.error.message
        assert "exited with code 139" in refused.error.message
        assert "segmentation fault" in refused.error.log
        pauses.append(driver.core.slots["a"].retry_at - now - 1.0)
        now = driver.core.slots["a"].retry_at
    assert pauses == [5.0, 10.0, 20.0, 40.0]
    assert driver.core.slots["a"].error.startswith("exited with code 139")
    driver.sound()


def test_the_line_of_one_that_ends_soon_after_its_load_fails_at_once():
    driver = Driver(backend("a", concurrency=1))
    loaded(driver, 0.0)
    waiting = driver.request("a", 1.0)
    driver.core.died("a", 2.0, "exited with code 139", ["segmentation fault"])
    assert driver.core.state.woken[-1] is waiting
    assert "exited with code 139" in waiting.error.message
    assert "segmentation fault" in waiting.error.log
    driver.sound()


@pytest.mark.parametrize("answered", [True, False])
def test_one_whole_answer_since_the_load_is_enough_to_be_loaded_again_at_once(answered):
    driver = Driver(A)
    first = loaded(driver, 0.0)
    other = driver.request("a", 0.5)
    driver.core.release(first, 1.0, whole=answered)
    driver.core.died("a", 2.0, "killed")
    assert (driver.request("a", 2.0).error is None) is answered
    assert driver.steps(2.0) == (["load a"] if answered else [])
    driver.core.release(other, 3.0, whole=False)
    assert [e.cause for e in driver.log if e.kind == "released"] == [
        None if answered else Cause("incomplete")
    ]
    assert check(driver.log, driver.config) == []


def test_a_whole_answer_between_two_such_ends_begins_the_count_anew():
    driver = Driver(A)
    loaded(driver, 0.0)
    driver.core.died("a", 1.0, "killed")
    answered = loaded(driver, 6.0)
    driver.core.release(answered, 7.0)
    driver.core.died("a", 8.0, "killed")
    loaded(driver, 8.0)
    driver.core.died("a", 9.0, "killed")
    assert driver.core.slots["a"].retry_at == 14.0
    assert driver.asked("a", 14.0) == ["load a"]
    assert check(driver.log, driver.config) == []


def test_who_ends_long_after_its_load_is_loaded_again_at_once_whether_it_answered_or_not():
    driver = Driver(A)
    loaded(driver, 0.0)
    driver.core.died("a", SOON_SECONDS + 0.5, "killed")
    assert driver.asked("a", SOON_SECONDS + 0.5) == ["load a"]
    assert check(driver.log, driver.config) == []


def test_an_end_soon_after_a_wake_counts_and_that_of_one_that_rests_does_not():
    driver = Driver(backend("a", evict_to=("sleep",)), B).with_resident("a")
    driver.core.release(driver.request("a", 0.0), 0.0)
    assert driver.asked("b", 1.0) == ["evict a"]
    assert driver.evicted("a", 1.0, level="sleep") == ["load b"]
    driver.core.loaded("b", 2.0)
    driver.core.died("a", 3.0, "killed")
    assert driver.core.slots["a"].retry_at <= 3.0
    driver.sound()


def test_how_one_ended_that_was_about_to_be_stopped_is_kept_and_told():
    driver = Driver(A, B).with_resident("a")
    driver.core.release(driver.request("a", 0.0), 0.0)
    waiting = driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.core.evicted("a", 2.0, died="exited with code 139", log=["segmentation fault"])
    slot = driver.core.slots["a"]
    assert (slot.error, slot.log) == ("exited with code 139", ("segmentation fault",))
    assert driver.log[-1].cause == Cause("died", detail="exited with code 139")
    assert driver.steps(2.0) == ["load b"]
    driver.core.loaded("b", 3.0)
    assert waiting.backend == "b"
    driver.sound()


def test_one_that_ended_too_soon_and_was_about_to_be_stopped_cools_down_all_the_same():
    driver = Driver(A, B).with_resident("a")
    assert driver.asked("b", 1.0) == ["evict a"]
    driver.core.evicted("a", 2.0, died="exited with code 139")
    assert "exited with code 139" in driver.request("a", 3.0).error.message
    assert check(driver.log, driver.config) == []


def test_an_end_that_a_stop_brought_about_late_is_no_death():
    driver = Driver(A).with_resident("a")
    assert driver.unload("a", 1.0) == ["evict a"]
    driver.core.evict_failed("a", 2.0, "no")
    assert driver.steps(7.0) == ["evict a"]
    driver.core.evicted("a", 8.0, died="was killed (code 137)")
    assert (driver.core.slots["a"].error, driver.log[-1].cause) == ("", None)
    assert not driver.request("a", 9.0).settled


def test_the_checker_sees_a_load_before_the_cool_down_of_who_ended_too_soon():
    driver = Driver(A)
    loaded(driver, 0.0)
    driver.core.died("a", 1.0, "killed")
    driver.core.slots["a"].retry_at = 0.0
    assert driver.asked("a", 2.0) == ["load a"]
    assert check(driver.log, driver.config) == ["2.000000 loading a: before its cool-down ended"]


def test_a_request_that_was_there_when_two_engines_ended_is_not_leased_a_third_time():
    driver = Driver(A)
    before = ()
    for now in (0.0, 60.0):
        held = driver.request("a", now, crashes=before)
        assert driver.steps(now) == ["load a"]
        driver.core.loaded("a", now)
        other = driver.request("a", now)
        driver.core.release(other, now + 1.0)
        driver.core.died("a", now + 2.0, "exited with code 139", ["segmentation fault"])
        before = (*held.crashes, held.crash)
        assert other.crash is None
    refused = driver.request("a", 70.0, crashes=before)
    assert (refused.error.status, refused.error.code, refused.error.retry) == (502, "engine_crashed", False)
    assert "2 engines ended while they worked on this request" in refused.error.message
    assert "exited with code 139" in refused.error.message
    assert "segmentation fault" in refused.error.log
    assert driver.steps(70.0) == []
    assert not driver.request("a", 71.0).settled


# What can never fit


def test_a_load_that_can_never_fit_is_refused_and_disturbs_nobody():
    driver = Driver(backend("a", vram=6), backend("b", vram=11), gpus=TEN).with_resident("a")
    lease = driver.request("a", 1.0)
    refused = driver.request("b", 2.0)
    assert isinstance(refused.error, DoesNotFit)
    assert refused.error.status == 422
    assert (driver.steps(2.0), driver.state("a")) == ([], "ready")
    assert list(driver.core.slots["a"].holders) == [lease]
    driver.sound()


def test_a_line_that_a_pinned_load_shut_out_is_refused_and_blocks_nobody():
    pinned, small, large = backend("p", vram=6, pin=True), backend("s", vram=4), backend("l", vram=5)
    driver = Driver(pinned, small, large, gpus=TEN, policy=PinnedFirst())
    shut_out = driver.request("l", 0.0)
    assert driver.asked("p", 1.0) == ["load p"]
    driver.core.loaded("p", 2.0)
    assert isinstance(shut_out.error, DoesNotFit)
    other = driver.request("s", 100.0)
    assert driver.steps(100.0) == ["load s"]
    driver.core.loaded("s", 101.0)
    assert other.backend == "s"
    driver.sound()


@pytest.mark.parametrize("loads", [True, False])
def test_who_joins_a_line_while_a_pinned_load_is_under_way_shares_its_fate(loads):
    pinned, large = backend("p", vram=6, pin=True), backend("l", vram=5)
    driver = Driver(pinned, large, gpus=TEN, policy=PinnedFirst())
    line = [driver.request("l", 0.0)]
    assert driver.asked("p", 1.0) == ["load p"]
    line.append(driver.request("l", 1.5))
    assert not any(ticket.settled for ticket in line)
    if loads:
        driver.core.loaded("p", 2.0)
        assert [type(ticket.error) for ticket in line] == [DoesNotFit, DoesNotFit]
        return
    driver.core.load_failed("p", 2.0, LoadError("no"))
    assert not any(ticket.settled for ticket in line)
    assert driver.steps(60.0) == ["load l"]  # overdue: this policy would not
    driver.core.loaded("l", 61.0)
    assert [ticket.backend for ticket in line] == ["l", "l"]
    driver.sound()


class PinnedFirst:
    def decide(self, seen):
        wanted = [line.model for line in seen.queues if line.model != "l"]
        return SwapTo(wanted[0]) if wanted else Stay()
