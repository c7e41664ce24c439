"""A backend's slot: when it may be loaded, what it keeps, and whose time of it is whose."""

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.scheduler.slot import Slot
from tests.scheduler.fleet import Fleet, on


def slot(state="stopped", **fields):
    return Slot(Backend("a", "m", ("0",), **fields), {"0": 1}, state)


def test_what_a_stopped_backend_had_pinned_of_host_memory_is_gone():
    one = slot("evicting", ram=3)
    one.ram = 8
    one.enter("stopped", 1.0)
    assert one.ram == 3


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
