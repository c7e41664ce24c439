"""Models that take only so many requests at once: who has a place, who waits for one, and in which order."""

from math import inf

import pytest

from anvil_mux.config.config import Config
from anvil_mux.errors import LoadError, Overloaded, WaitedTooLong
from anvil_mux.lab.checker import check
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.events import Cause, Event
from anvil_mux.scheduler.policies import Stay, SwapTo
from anvil_mux.scheduler.slot import SOON_SECONDS
from anvil_mux.scheduler.waits import wait_estimate
from tests.multiplexer.stage import Stage
from tests.scheduler.driver import Driver, backend

ONE = backend("a", concurrency=1)
TWO = backend("a", concurrency=2)
B = backend("b")


class OnlyForB:
    """Puts nobody out but for b."""

    def decide(self, seen):
        served = [line.model for line in seen.queues if line.model == "b" or not line.evicts]
        return SwapTo(served[0]) if served else Stay()


def full(*backends, places=2, at=1.0, **settings):
    """A GPU group where model a is resident with all its places taken, and those who took them."""
    driver = Driver(*backends, **settings).with_resident("a")
    return driver, [driver.request("a", at) for _ in range(places)]


def test_no_more_requests_than_its_concurrency_are_leased_and_each_end_brings_the_next():
    driver, (first, second) = full(TWO)
    third, fourth = driver.request("a", 2.0), driver.request("a", 3.0)
    assert (first.backend, second.backend, third.backend, fourth.backend) == ("a", "a", None, None)
    assert not driver.core.state.models["a"].takes()
    driver.core.release(first, 4.0)
    assert third.backend == "a"
    assert driver.core.state.woken[1:] == [third]
    assert fourth.backend is None
    driver.core.release(third, 5.0)
    assert driver.core.state.woken[1:] == [third, fourth]
    driver.core.release(second, 6.0)
    assert driver.core.state.models["a"].takes()
    assert [(e.kind, e.ticket, e.cause) for e in driver.log if e.kind == "queued"][1:] == [
        ("queued", 4, Cause("busy")),
        ("queued", 5, Cause("busy")),
    ]
    assert [e.seconds for e in driver.log if e.kind == "leased"][-2:] == [2.0, 2.0]
    driver.sound()


def test_of_a_line_that_waited_for_the_load_as_many_are_leased_as_there_are_places():
    driver = Driver(TWO)
    waiting = [driver.request("a", at) for at in (1.0, 2.0, 3.0)]
    only_load = driver.request("a", 4.0, takes_lease=False)
    assert driver.steps(4.0) == ["load a"]
    driver.core.loaded("a", 9.0)
    assert [each.backend for each in waiting] == ["a", "a", None]
    assert only_load.backend == "a"
    driver.core.release(waiting[0], 10.0)
    assert waiting[2].backend == "a"
    driver.sound()


def test_who_waits_for_a_place_loads_nothing_and_is_never_overdue():
    driver, _ = full(ONE, B, places=1, max_wait=5.0)
    assert (driver.asked("a", 2.0), driver.until) == ([], inf)
    assert driver.steps(1000.0) == []


def test_a_drain_gives_free_places_to_nobody_and_a_reprieve_does():
    driver, (first, second) = full(TWO, B)
    third = driver.request("a", 2.0)
    other = driver.request("b", 3.0)
    assert (driver.steps(3.0), driver.state("a")) == ([], "draining")
    driver.core.release(first, 4.0)
    assert third.backend is None
    assert (driver.give_up(other, 5.0), driver.state("a")) == ([], "ready")
    assert third.backend == "a"
    assert second.backend == "a"
    driver.sound()


def test_the_line_of_a_model_that_was_put_out_is_overdue_max_wait_after_that_not_before():
    driver, (first,) = full(ONE, B, places=1, max_wait=60.0, policy=OnlyForB())
    waiting = driver.request("a", 2.0)
    assert driver.asked("b", 100.0) == []
    assert driver.release(first, 110.0) == ["evict a"]
    assert driver.evicted("a", 111.0) == ["load b"]
    assert (driver.loaded("b", 120.0), driver.until) == ([], 160.0)
    driver.core.release(driver.core.state.woken[-1], 130.0)
    assert driver.steps(160.0) == ["evict b"]
    assert waiting.backend is None
    assert check(driver.log, driver.config) == []


def test_the_line_of_a_model_that_died_loads_it_again():
    driver, _ = full(ONE, places=1)
    waiting = driver.request("a", 2.0)
    at = driver.core.slots["a"].loaded + SOON_SECONDS + 0.5
    assert driver.died("a", at, "killed") == ["load a"]
    driver.core.loaded("a", 5.0)
    assert waiting.backend == "a"


def test_a_request_goes_to_the_replica_that_has_a_place_and_to_the_first_that_gets_one():
    replicas = [backend(f"r{n}", str(n), model="m", concurrency=1) for n in (0, 1)]
    driver = Driver(*replicas, routing="sticky").with_resident("r0")
    driver.core.adopt("r1", 0.0)
    leased = [driver.request("m", 1.0), driver.request("m", 1.0)]
    assert {each.backend for each in leased} == {"r0", "r1"}
    waiting = driver.request("m", 2.0)
    driver.core.release(leased[1], 3.0)
    assert waiting.backend == leased[1].backend
    driver.sound()


def test_who_waits_for_a_place_may_wait_for_another_replica():
    replicas = [backend(f"r{n}", str(n), model="m", concurrency=1) for n in (0, 1)]
    driver = Driver(*replicas).with_resident("r0")
    driver.request("m", 1.0)
    waiting = [driver.request("m", 1.0) for _ in range(9)]
    assert driver.steps(20.0) == ["load r1"]
    driver.core.loaded("r1", 21.0)
    assert [each.backend for each in waiting[:2]] == ["r1", None]
    assert check(driver.log, driver.config) == []


def test_what_a_request_would_wait_for_is_told():
    driver, _ = full(TWO)
    driver.request("a", 2.0)
    told = wait_estimate(driver.core.state, driver.core.state.models["a"], 3.0).sentence
    assert told == (
        "A request for a waits: it is resident on GPU 0, but runs as many requests as it may (2); "
        "1 wait before this one."
    )


def order(driver, first):
    """The senders in the order in which they get the one place that ``first`` has."""
    served, now = [], 10.0
    driver.core.state.woken.clear()
    driver.core.release(first, now)
    while driver.core.state.woken:
        (ticket,) = driver.core.state.woken
        driver.core.state.woken.clear()
        served.append(ticket.sender)
        now += 1.0
        driver.core.release(ticket, now)
    return "".join(served)


def test_places_go_round_the_senders_and_each_senders_requests_keep_their_order():
    driver, (first,) = full(ONE, places=1)
    for sender in "aaaaabbc":
        driver.request("a", 2.0, sender=sender)
    assert order(driver, first) == "abcabaaa"
    driver.sound()


def test_a_line_that_waited_for_a_load_is_taken_in_turns_too_and_a_failed_one_is_forgotten():
    driver = Driver(TWO)
    for sender in "aab":
        driver.request("a", 1.0, sender=sender)
    assert driver.steps(1.0) == ["load a"]
    driver.core.load_failed("a", 2.0, LoadError("no"))
    driver.core.state.woken.clear()
    for sender in "ccd":
        driver.request("a", 100.0, sender=sender)
    assert driver.steps(100.0) == ["load a"]
    driver.core.loaded("a", 101.0)
    assert [ticket.sender for ticket in driver.core.state.woken] == ["c", "d"]


def test_a_sender_whose_client_left_is_passed_over():
    driver, (first,) = full(ONE, places=1)
    gone = driver.request("a", 2.0, sender="x")
    driver.request("a", 2.0, sender="y")
    driver.core.give_up(gone, 3.0)
    assert order(driver, first) == "y"


LOG = [
    Event(0.0, "queued", "a", "", 1, 1),
    Event(0.0, "loading", "a", "a"),
    Event(1.0, "ready", "a", "a"),
    Event(1.0, "leased", "a", "a", 1, 1, 1.0),
]


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ([Event(2.0, "leased", "a", "a", 2, 2)], "2.000000 leased a: all its places are taken"),
        (
            [
                Event(2.0, "queued", "a", "", 2, 1),
                Event(3.0, "released", "a", "a", 1, 0),
                Event(4.0, "deferred", "a"),
            ],
            "4.000000 deferred a: a still waits",
        ),
    ],
)
def test_the_checker_sees_a_place_given_twice_and_one_that_is_left_free(more, wrong):
    config = Config(backends=(ONE,))
    assert check(LOG, config) == []
    assert check([*LOG, *more], config) == [wrong]


@pytest.mark.parametrize("seed", range(5))
def test_threads_that_wait_for_a_place_are_woken_one_by_one(seed):
    stage = Stage(Config(policy="eager", backends=(ONE,)), seed=seed)

    def main(stage):
        for at in (1.0, 2.0, 3.0):
            stage.request(at, "a", 20.0)
        stage.clock.sleep(200.0)

    stage.play(main)
    leased = [event for event in stage.log if event.kind == "leased"]
    assert [event.at - leased[0].at for event in leased] == [0.0, 20.0, 40.0]


@pytest.mark.parametrize("seed", range(3))
def test_waiting_for_a_place_has_an_end_and_a_full_queue_is_full_for_a_resident_too(seed):
    stage = Stage(Config(policy="eager", backends=(ONE,), queue_timeout=30.0, max_queue=1), seed=seed)
    errors = []

    def main(stage):
        stage.request(1.0, "a", 200.0)
        late = stage.request(20.0, "a")
        refused = stage.request(21.0, "a")
        stage.clock.sleep(300.0)
        errors.extend([late, refused])

    stage.play(main)
    late, refused = errors
    assert isinstance(late.error, WaitedTooLong)
    assert late.error.message == "a ran as many requests as it may, for 30 s."
    assert isinstance(refused.error, Overloaded)


# Requests that only one replica can serve


def two_replicas(**settings):
    """Replicas x and y of model a, resident, each with one place."""
    driver = Driver(*[backend(name, gpu, model="a", concurrency=1) for name, gpu in ("x0", "y1")], **settings)
    for name in ("x", "y"):
        driver.core.adopt(name, 0.0)
    return driver


def bound(driver, owner, at):
    """A request that goes on from an answer that only ``owner`` has."""
    return driver.request("a", at, work=Work(owner=owner))


def test_who_needs_a_replica_that_is_full_waits_for_it_though_another_has_a_place():
    driver = two_replicas()
    first, waiting = bound(driver, "x", 1.0), bound(driver, "x", 2.0)
    assert (first.backend, waiting.backend) == ("x", None)
    other = driver.request("a", 3.0)
    assert other.backend == "y"  # nobody waits for one that is bound elsewhere
    driver.core.release(other, 4.0)
    assert waiting.backend is None
    driver.core.release(first, 5.0)
    assert waiting.backend == "x"
    driver.sound()


def test_who_waits_for_any_replica_is_not_held_up_by_one_who_waits_for_another():
    driver = two_replicas()
    x, y = bound(driver, "x", 1.0), bound(driver, "y", 1.0)
    patient, anybody = bound(driver, "x", 2.0), driver.request("a", 3.0)
    driver.core.release(y, 4.0)
    assert (patient.backend, anybody.backend) == (None, "y")
    driver.core.release(x, 5.0)
    assert patient.backend == "x"
    driver.sound()


def test_who_waits_for_a_replica_that_goes_is_served_by_another():
    driver = two_replicas()
    bound(driver, "x", 1.0)
    waiting = bound(driver, "x", 2.0)
    driver.core.died("x", 3.0, "killed")
    assert waiting.backend == "y"  # whose engine will say that it has no such answer
    assert waiting in driver.core.state.woken


def test_who_needs_a_replica_that_is_gone_takes_any():
    driver = two_replicas()
    driver.core.died("x", 1.0, "killed")
    assert bound(driver, "x", 2.0).backend == "y"


def test_nothing_is_loaded_for_one_who_waits_for_a_replica_that_is_there():
    driver = Driver(*[backend(name, gpu, model="a", concurrency=1) for name, gpu in ("x0", "y1")])
    driver.core.adopt("x", 0.0)
    bound(driver, "x", 1.0)
    bound(driver, "x", 2.0)
    assert driver.steps(500.0) == []
