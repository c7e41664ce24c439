"""Histories of another replica of a busy model.

Nothing is known of loads here, so one is taken to last 10 s.
"""

from math import inf

from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.events import Cause, Severance
from anvil_mux.scheduler.policies import Stay, SwapTo
from anvil_mux.scheduler.slot import Ticket
from tests.scheduler.driver import Driver, backend
from tests.scheduler.fleet import Fleet, on


def busy(*more, requests=3, **settings):
    """r0 is resident and has some requests, since moment 0; r1 could be loaded on GPU 1."""
    replicas = backend("r0", "0", model="m"), backend("r1", "1", model="m")
    driver = Driver(*replicas, *more, **settings)
    driver.core.adopt("r0", 0.0)
    held = [driver.request("m", 0.0) for _ in range(requests)]
    return driver, held


def test_another_replica_is_loaded_once_the_waiting_have_waited_together_for_a_load():
    driver, _ = busy()
    assert (driver.steps(0.0), driver.until) == ([], 5.0)  # two wait behind the first
    assert driver.steps(5.0) == ["load r1"]
    assert driver.log[-1].cause == Cause("replicas_busy", waiting=2)
    driver.core.loaded("r1", 15.0)
    assert driver.request("m", 15.0).backend == "r1"
    assert driver.steps(15.0) == []
    driver.sound()


def test_a_request_that_waits_behind_nobody_loads_no_other_replica():
    driver, _ = busy(requests=1)
    assert (driver.steps(0.0), driver.until) == ([], inf)
    assert driver.steps(1000.0) == []


def test_requests_that_are_answered_do_not_wait():
    driver, held = busy()
    for ticket in held[:2]:
        driver.core.in_flight("m").first_byte(ticket)
    assert driver.steps(100.0) == []
    assert driver.release(held[0], 100.0) == []


def test_no_backend_with_requests_is_put_out_for_another_replica():
    driver, held = busy(backend("b", "1"))
    driver.core.adopt("b", 0.0)
    other = driver.request("b", 0.0)
    assert driver.steps(1000.0) == []
    assert driver.release(other, 1000.0) == ["evict b"]
    driver.core.evicted("b", 1001.0)
    for ticket in held:
        driver.core.release(ticket, 1001.0)
    assert driver.steps(1001.0) == []  # no request waits behind another any more


def test_another_replica_is_not_loaded_once_nobody_waits_and_only_memory_was_made_for_it():
    sleeper = backend("s", "2", ram=4, evict_to=("sleep",))
    replicas = backend("r0", "0", model="m", ram=4), backend("r1", "1", model="m", ram=4)
    driver = Driver(*replicas, sleeper, host_memory=11)
    driver.core.adopt("r0", 0.0)
    driver.core.adopt_standby("s", 0.0, "sleep", {}, host_bytes=4)
    _, *others = [driver.request("m", 0.0) for _ in range(3)]
    assert driver.steps(5.0) == ["demote s"]
    for ticket in others:
        driver.core.release(ticket, 5.5)
    assert driver.evicted("s", 6.0) == []
    driver.sound()


def test_putting_out_an_idle_model_costs_its_load_too():
    driver, _ = busy(backend("b", "1"))
    driver.core.adopt("b", 0.0)
    assert driver.steps(0.0) == []
    assert driver.until == (1.0 + 10.0 + 10.0) / 2  # evict, load, load b again


def streamed(driver, at, *backends):
    """Streamed requests, in this order at these replicas (the others being out of the choice)."""
    tickets = []
    for name in backends:
        ticket = Ticket(next(driver.ids), "m", at, work=Work(tokens=100, stream=True))
        driver.core.request(ticket, at)
        assert ticket.backend == name
        tickets.append(ticket)
    return tickets


def test_requests_that_wait_behind_others_are_taken_back_when_another_replica_comes():
    driver = Driver(backend("r0", "0", model="m"), backend("r1", "1", model="m"))
    driver.core.adopt("r0", 0.0)
    first, second, third = streamed(driver, 0.0, "r0", "r0", "r0")
    assert driver.steps(5.0) == ["load r1"]
    driver.core.loaded("r1", 15.0)
    assert driver.core.state.cut == [third]
    assert third.severed == Severance(Cause("moved", backend="r1"))
    assert third.taken_back
    assert driver.log[-1].cause == Cause("moved", backend="r1")
    assert not driver.core.release(third, 15.0)
    assert list(driver.core.slots["r0"].holders) == [first, second]
    assert streamed(driver, 15.0, "r1")
    driver.sound()


def test_a_replica_that_becomes_idle_takes_one_that_waits():
    driver = Driver(backend("r0", "0", model="m"), backend("r1", "1", model="m"))
    for name in ("r0", "r1"):
        driver.core.adopt(name, 0.0)
    tickets = streamed(driver, 0.0, "r0", "r1", "r0", "r1", "r0")
    driver.core.release(tickets[1], 1.0)
    assert driver.core.state.cut == []
    driver.core.release(tickets[3], 2.0)
    assert driver.core.state.cut == [tickets[4]]
    driver.sound()


def test_a_pinned_model_is_not_put_out_for_another_replica():
    driver, _ = busy(backend("b", "1", pin=True))
    driver.core.adopt("b", 0.0)
    assert driver.steps(1000.0) == []


def test_a_line_goes_before_another_replica():
    driver, _ = busy(backend("b", "1"))
    assert driver.asked("b", 1000.0) == ["load b"]
    assert driver.loaded("b", 1010.0) == []


def test_a_policy_may_ask_for_another_replica_itself():
    mine = Cause("policy_text", detail="mine")

    class AtOnce:
        def decide(self, seen):
            return SwapTo(seen.spills[0].model, mine) if seen.spills else Stay()

    driver, _ = busy(policy=AtOnce())
    assert driver.steps(0.0) == ["load r1"]
    assert driver.log[-1].cause == mine


def test_first_bytes_end_the_load_of_another_replica_that_a_queue_waits_for():
    fleet = Fleet(on("", "m0", model="m"), on("", "m1", "1", model="m"), on("", "b", "1"), policy="eager")
    fleet.core.adopted("m0", 0.0)
    streams = [fleet.request("m", 0.0, work=Work(stream=True)) for _ in range(3)]
    while not fleet.steps:
        fleet.take(fleet.core.time_passed(fleet.last.ask_at))
    assert [step.backend for step in fleet.steps] == ["m1"]
    fleet.request("b", 100.0)
    for ticket in streams[:2]:
        fleet.take(fleet.core.first_byte(ticket, 101.0))
    assert fleet.last.ask_at == 101.0
    assert fleet.take(fleet.core.time_passed(101.0)) == ["cancel m1"]
