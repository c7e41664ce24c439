"""Hosts that sleep: requests wait for one that can be woken, and fail once it does not wake."""

from anvil_mux.config.machines import Wake
from anvil_mux.scheduler.scheduler import UNWOKEN_SECONDS
from anvil_mux.scheduler.slot import Ticket
from tests.scheduler.fleet import Fleet, on

WAKES = {"h": Wake(mac="aa:bb:cc:dd:ee:ff", timeout=30.0)}


def asleep(*backends, **settings):
    """Hosts of which ``h`` is lost since 0.0, and can be woken."""
    fleet = Fleet(*(backends or (on("h", "a"),)), **{"wakes": WAKES, **settings})
    fleet.take(fleet.core.host_lost("h", 0.0))
    return fleet


def test_a_request_waits_for_a_host_that_can_be_woken_and_is_served_once_it_is_back():
    fleet = asleep()
    waiting = fleet.request("a", 1.0)
    assert not waiting.settled
    assert fleet.core.layout.is_wanted("h")
    assert fleet.take(fleet.core.host_back("h", 20.0, {})) == ["load a"]
    fleet.loaded("a", 25.0)
    assert waiting.backend == "a"


def test_without_a_way_to_wake_it_it_fails_at_once():
    assert asleep(wakes={}).request("a", 1.0).error.code == "host_unavailable"


def test_one_that_may_force_no_swap_wakes_nobody():
    fleet = asleep()
    ticket = Ticket(9, "a", 1.0)
    ticket.never_swaps = True
    fleet.take(fleet.core.requested(ticket, 1.0))
    assert ticket.error.code == "nothing_resident"
    assert not fleet.core.layout.is_wanted("h")


def test_what_does_not_wake_fails_those_who_wait_and_is_left_alone_for_a_while():
    fleet = asleep()
    waiting = fleet.request("a", 1.0)
    fleet.take(fleet.core.host_unwoken("h", 31.0, "it is not there 30 s after it was woken"))
    assert waiting.error.code == "host_unavailable"
    why = "h has been lost for 31 s, and did not wake: it is not there 30 s after it was woken"
    assert waiting.error.message == f"a has no host to run on now: {why}."
    assert fleet.request("a", 32.0).error.code == "host_unavailable"
    assert not fleet.request("a", 31.0 + UNWOKEN_SECONDS).settled


def test_a_host_that_is_back_may_be_woken_again_when_it_is_lost():
    fleet = asleep()
    fleet.take(fleet.core.host_unwoken("h", 1.0, "no"))
    fleet.take(fleet.core.host_back("h", 2.0, {}))
    fleet.take(fleet.core.host_lost("h", 3.0))
    assert not fleet.request("a", 4.0).settled


def test_a_queue_goes_to_a_host_that_is_awake():
    fleet = asleep(on("h", "m0", model="m"), on("", "m1", model="m"))
    fleet.request("m", 1.0)
    assert [step.backend for step in fleet.steps] == ["m1"]
    assert not fleet.core.layout.is_wanted("h")


def test_a_host_that_was_drained_is_not_woken():
    fleet = asleep()
    fleet.take(fleet.core.host_drained("h", 0.0, drained=True))
    assert fleet.request("a", 1.0).error.code == "host_unavailable"
