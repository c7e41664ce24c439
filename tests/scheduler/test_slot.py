"""A backend's slot: what it may enter, how long it may stay, and how its failures are counted."""

from math import inf

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.slot import SOON_SECONDS, TRANSITIONS, Slot, cool_down
from tests.scheduler.fleet import Fleet, on

STATES = {state for state, _ in TRANSITIONS} | set(TRANSITIONS.values())
HAPPENINGS = {what for _, what in TRANSITIONS}


def slot(state="stopped", **fields):
    return Slot(Backend("a", "m", ("0",), **fields), {"0": 1}, state)


@pytest.mark.parametrize("state", sorted(STATES))
def test_a_slot_enters_what_the_table_says_and_nothing_else(state):
    for what in HAPPENINGS:
        one = slot(state)
        if (state, what) in TRANSITIONS:
            one.enter(what, 5.0)
            assert (one.state, one.since) == (TRANSITIONS[state, what], 5.0)
        else:
            with pytest.raises(ValueError, match=f"a is {state}: `{what}` cannot happen to it"):
                one.enter(what, 5.0)
            assert (one.state, one.since) == (state, -inf)


def test_what_a_stopped_backend_had_pinned_of_host_memory_is_gone():
    one = slot("evicting", ram=3)
    one.ram = 8
    one.enter("stopped", 1.0)
    assert one.ram == 3


def test_a_backend_with_a_ttl_is_idle_from_its_last_use_or_its_load():
    one = slot("ready", ttl=10.0)
    one.loaded, one.last_used = 5.0, 1.0
    assert one.idle_until == 15.0
    one.last_used = 7.0
    assert one.idle_until == 17.0
    one.holders["a request"] = 8.0
    assert one.idle_until == inf
    assert slot("ready").idle_until == inf


@pytest.mark.parametrize(
    ("state", "retry_at", "leaving", "loadable"),
    [
        ("stopped", 0.0, "", True),
        ("stopped", 2.0, "", False),
        ("standby", 2.0, "", True),
        ("ready", 0.0, "", False),
        ("stuck", 0.0, "", False),
        ("stopped", 0.0, "changed", False),
        ("standby", 0.0, "removed", False),
    ],
)
def test_a_load_may_begin_from_standby_or_after_the_cool_down(state, retry_at, leaving, loadable):
    one = slot(state)
    one.retry_at, one.leaving = retry_at, leaving
    assert one.is_loadable(1.0) is loadable


def test_loads_that_fail_in_a_row_cool_down_for_longer_until_one_succeeds():
    one = slot()
    one.note_load_failed(0.0, "no", ("last words",))
    assert (one.retry_at, one.error, one.log) == (5.0, "no", ("last words",))
    one.note_load_failed(5.0, "no", ())
    assert one.retry_at == 15.0
    one.note_loaded(20.0, 3.0, "stop")
    assert (one.failed_starts, one.error, cool_down(one.failed_starts)) == (0, "", 0.0)
    assert [cool_down(failures) for failures in (1, 2, 3, 99)] == [5.0, 10.0, 20.0, 300.0]


def test_one_on_standby_that_could_not_be_stopped_is_to_be_stopped_and_one_that_is_stuck_is_retried():
    asleep, stuck = slot("standby"), slot("stuck")
    for one in (asleep, stuck):
        one.next_level = "sleep-2"
        one.note_stop_failed(1.0, "no")
    assert (asleep.next_level, stuck.next_level) == ("stop", "")
    assert asleep.retry_at == stuck.retry_at == 6.0


def ended(at, *, answered=-inf, state="ready"):
    """How a backend is judged that was loaded at 10.0 and ended."""
    one = slot(state)
    one.loaded, one.answered = 10.0, answered
    return one.judge_end(at, "killed"), one.failed_starts


@pytest.mark.parametrize(
    ("at", "about"),
    [
        (10.0 + SOON_SECONDS + 1.0, {}),
        (12.0, {"answered": 11.0}),
        (12.0, {"state": "standby"}),
    ],
)
def test_an_end_after_an_answer_or_long_after_the_load_is_no_failed_load(at, about):
    assert ended(at, **about) == (Cause("died", detail="killed"), 0)


def test_an_end_soon_after_the_load_and_before_a_whole_answer_counts_as_a_failed_load():
    assert ended(12.0, answered=9.0) == (Cause("died_early", seconds=2.0, detail="killed"), 1)


def test_requests_that_run_together_share_the_time_of_their_backend():
    fleet = Fleet(on("", "a"))
    fleet.take(fleet.core.adopted("a", 0.0))
    one, two = fleet.request("a", 1.0), fleet.request("a", 3.0)
    fleet.take(fleet.core.released(one, 7.0))
    fleet.take(fleet.core.released(two, 10.0))
    three = fleet.request("a", 20.0)
    fleet.take(fleet.core.released(three, 21.0))
    assert [ticket.share for ticket in (one, two, three)] == [2.0 + 4.0 / 2, 4.0 / 2 + 3.0, 1.0]


def test_one_that_is_severed_and_one_whose_backend_dies_had_their_share_until_then():
    fleet = Fleet(on("", "a"))
    fleet.take(fleet.core.adopted("a", 0.0))
    one = fleet.request("a", 1.0)
    fleet.take(fleet.core.unload_asked("a", 2.0))
    fleet.take(fleet.core.time_passed(7.0))
    assert one.severed
    assert one.share == 6.0
    fleet = Fleet(on("", "a"))
    fleet.take(fleet.core.adopted("a", 0.0))
    one, two = fleet.request("a", 1.0), fleet.request("a", 1.0)
    fleet.take(fleet.core.died("a", 4.0, "killed"))
    assert [one.share, two.share] == [1.5, 1.5]
    fleet.take(fleet.core.released(one, 9.0))
    assert one.share == 1.5
