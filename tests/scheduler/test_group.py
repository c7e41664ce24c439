"""Histories: facts in, steps, states and events out. No thread, no time but the moments written here."""

from math import inf

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import DoesNotFit, LoadError, Stuck, WaitedTooLong
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.events import Cause, Severance
from anvil_mux.scheduler.layout import gpu_groups
from anvil_mux.scheduler.policies import POLICIES, Stay, Unload
from anvil_mux.scheduler.slot import Evict, Ticket
from tests.scheduler.driver import TEN, A, B, Driver, backend

# Loading and leasing


def test_the_first_request_loads_and_the_second_reuses():
    driver = Driver(A)
    first = driver.request("a", 1.0)
    assert driver.steps(1.0) == ["load a"]
    assert first.backend is None
    driver.core.loaded("a", 4.0)
    assert first.backend == "a"
    assert driver.core.state.woken == [first]
    second = driver.request("a", 5.0)
    assert second.backend == "a"
    assert driver.steps(5.0) == []
    assert driver.tell() == ["queued a", "loading a", "ready a", "leased a", "leased a"]
    assert [e.seconds for e in driver.log if e.kind in ("ready", "leased")] == [3.0, 3.0, 0.0]
    driver.sound()


def test_a_load_request_waits_like_a_request_but_holds_nothing():
    driver = Driver(A, B).with_resident("a")
    ticket = driver.request("a", 1.0, takes_lease=False)
    assert ticket.settled
    assert not driver.core.slots["a"].holders
    driver.core.release(ticket, 1.0)
    assert driver.tell("released") == []
    assert driver.asked("b", 2.0) == ["evict a"]


# Draining


def test_a_drain_that_takes_too_long_severs_what_is_left():
    driver = Driver(A, B, drain_timeout=30.0).with_resident("a")
    ended, laggard = driver.request("a", 1.0), driver.request("a", 1.0)
    assert (driver.asked("b", 2.0), driver.until) == ([], 32.0)
    driver.core.release(ended, 10.0)
    assert driver.steps(31.9) == []
    step = driver.core.next_step(32.0)
    assert step == Evict("a", "stop", (laggard,))
    assert (ended.severed, laggard.severed) == (None, Severance(Cause("evicted", "b"), 30.0))
    assert [(e.ticket, e.seconds) for e in driver.log if e.kind == "severed"] == [(laggard.id, 30.0)]
    driver.evicted("a", 33.0)
    driver.core.loaded("b", 34.0)
    driver.sound()


class Unloading:
    """A policy that unloads whatever is resident once it is asked after second 2."""

    def decide(self, seen):
        return Unload("a", Cause("policy_text", detail="enough")) if seen.now >= 2.0 else Stay()


@pytest.mark.parametrize(
    ("happens", "severance"),
    [
        (lambda core: core.request(Ticket(99, "b", 2.0), 2.0), Severance(Cause("evicted", "b"), 5.0)),
        (lambda core: core.unload("a", 2.0), Severance(Cause("unloaded"), 5.0)),
        (lambda core: core.retired({"a": "changed"}, {"a", "b"}, 2.0), Severance(Cause("changed"), 5.0)),
        (lambda core: core.retired({"a": "removed"}, {"b"}, 2.0), Severance(Cause("removed"), 5.0)),
        (
            lambda core: core.unanswering("a", 2.0),
            Severance(Cause("silent")),
        ),
        (lambda core: core.set_policy(Unloading()), Severance(Cause("policy"), 5.0)),
        (lambda core: core.sever_all(2.0), Severance(Cause("shutdown"))),
    ],
    ids=lambda value: value.cause.kind if isinstance(value, Severance) else "",
)
def test_who_is_severed_is_told_the_cause(happens, severance):
    driver = Driver(A, B, drain_timeout=5.0).with_resident("a")
    lease = driver.request("a", 1.0)
    happens(driver.core)
    driver.steps(2.0)
    driver.steps(7.0)
    assert lease.severed == severance
    told = [(e.cause, e.target, e.seconds) for e in driver.log if e.kind == "severed"]
    assert told == [(severance.cause, severance.cause.model, severance.seconds)]


def test_a_leaving_backend_that_is_spared_a_swap_is_severed_as_leaving():
    driver = Driver(A, B, drain_timeout=5.0).with_resident("a")
    lease = driver.request("a", 1.0)
    waits = driver.request("b", 2.0)
    assert driver.steps(2.0) == []
    driver.core.retired({"a": "changed"}, {"a", "b"}, 3.0)
    driver.give_up(waits, 4.0)
    assert driver.steps(7.0) == ["evict a"]
    assert lease.severed == Severance(Cause("changed"), 5.0)


def test_a_severed_lease_neither_holds_up_the_next_eviction_nor_is_taken_for_a_later_one():
    driver = Driver(A, B, drain_timeout=10.0).with_resident("a")
    old, moment = driver.request("a", 0.0), 0.0
    for target, victim, drain in (("b", "a", 10.0), ("a", "b", 0.0), ("b", "a", 0.0), ("a", "b", 0.0)):
        driver.request(target, moment, takes_lease=False)
        steps = driver.steps(moment)
        if drain:
            moment += drain
            steps += driver.steps(moment)
        assert steps == [f"evict {victim}"]
        assert driver.evicted(victim, moment) == [f"load {target}"]
        driver.core.loaded(target, moment)
    new = driver.request("a", 11.0)
    driver.core.release(old, 12.0)
    assert list(driver.core.slots["a"].holders) == [new]
    assert "released a" not in driver.tell()
    driver.sound()


def test_releasing_twice_counts_once():
    driver = Driver(A).with_resident("a")
    first, second = driver.request("a", 1.0), driver.request("a", 1.0)
    driver.core.release(first, 2.0)
    driver.core.release(first, 3.0)
    assert list(driver.core.slots["a"].holders) == [second]
    assert driver.tell("released") == ["released a"]


# Batches and order


def test_forty_alternating_requests_cost_two_loads():
    driver = Driver(A, B)
    tickets = [driver.request("ab"[n % 2], 0.0) for n in range(40)]
    assert driver.steps(0.0) == ["load a"]
    driver.core.loaded("a", 3.0)
    for ticket in tickets[::2]:
        assert ticket.backend == "a"
        driver.core.release(ticket, 4.0)
    assert driver.steps(4.0) == ["evict a"]
    driver.swaps("a", 5.0, "b", 6.0)
    assert all(ticket.backend for ticket in tickets)
    assert len(driver.tell("loading")) == 2
    driver.sound()


# Swaps for nobody


def test_a_victim_that_only_drains_is_reprieved_when_nobody_waits_any_more():
    driver = Driver(A, B).with_resident("a")
    lease = driver.request("a", 1.0)
    waiting = driver.request("b", 2.0)
    driver.steps(2.0)
    late = driver.request("a", 3.0)
    assert (driver.give_up(waiting, 4.0, WaitedTooLong("too long")), driver.state("a")) == ([], "ready")
    assert late.backend == "a"
    assert set(driver.core.slots["a"].holders) == {lease, late}
    assert driver.core.state.woken[-1] is late
    driver.sound()


def test_swap_whose_queue_left_while_victim_is_evicted_loads_nothing():
    driver = Driver(A, B).with_resident("a")
    waiting = driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    assert driver.give_up(waiting, 2.0) == []
    assert driver.evicted("a", 3.0) == []
    assert driver.states() == {"a": "stopped", "b": "stopped"}
    driver.sound()


def test_swap_whose_queue_left_reprieves_the_victim_that_drains():
    """A stream of y is not severed for tp, whose only client left after the other victim was evicted."""
    x, y, tp = backend("x"), backend("y", "1"), backend("tp", "0", "1")
    driver = Driver(x, y, tp).with_resident("x").with_resident("y")
    stream, waiting = driver.request("y", 1.0), driver.request("tp", 2.0)
    assert (driver.steps(2.0), driver.states()["y"]) == (["evict x"], "draining")
    assert (driver.give_up(waiting, 3.0), driver.states()["y"]) == ([], "ready")
    later = driver.request("y", 4.0)
    assert driver.evicted("x", 5.0) == []
    assert set(driver.core.slots["y"].holders) == {stream, later}
    driver.sound()


def test_swap_whose_queue_left_keeps_its_target_in_standby():
    asleep = backend("b", evict_to=("sleep", "stop"))
    driver = Driver(A, asleep).with_resident("a")
    driver.core.slots["b"].enter("adopt_standby", 0.0)
    driver.core.slots["b"].keep_in_standby("sleep", {}, 0)
    waiting = driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.core.give_up(waiting, 2.0)
    assert driver.evicted("a", 3.0) == []
    assert (driver.state("b"), driver.core.slots["b"].level) == ("standby", "sleep")


def test_swap_whose_queue_left_serves_the_victim_that_is_asked_again():
    driver = Driver(A, B).with_resident("a")
    waiting = driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.core.give_up(waiting, 2.0)
    assert driver.asked("a", 2.5) == []
    assert driver.evicted("a", 3.0) == ["load a"]
    assert driver.loaded("a", 4.0) == []
    driver.sound()


def test_swap_whose_queue_left_and_came_back_is_begun_again():
    driver = Driver(A, B).with_resident("a")
    waiting = driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.give_up(waiting, 2.0)
    assert driver.asked("b", 2.5) == []
    assert driver.evicted("a", 3.0) == ["load b"]
    assert driver.loaded("b", 4.0) == []
    driver.sound()


# Memory, replicas, several GPUs


def test_models_with_declared_memory_are_resident_together_as_long_as_they_fit():
    driver = Driver(*(backend(name, vram=4) for name in "abc"), gpus=TEN)
    driver.with_resident("a", 0.0).with_resident("b", 1.0)
    assert driver.states() == {"a": "ready", "b": "ready", "c": "stopped"}
    assert driver.asked("c", 2.0) == ["evict a"]  # used longest ago
    driver.swaps("a", 3.0, "c", 4.0)
    driver.sound()


def test_a_model_that_needs_no_gpu_is_loaded_beside_everything():
    cpu = Backend("cpu", "cpu")
    assert [name for name, _ in gpu_groups([A, cpu, B])] == ["no-gpu:cpu", "0"]
    driver = Driver(cpu).with_resident("cpu")
    assert driver.request("cpu", 1.0).backend == "cpu"


def test_the_replica_that_puts_nobody_out_is_loaded():
    driver = Driver(backend("r0", "0", model="m"), backend("r1", "1", model="m"), backend("a", "0"))
    driver.core.adopt("a", 0.0)
    assert driver.asked("m", 1.0) == ["load r1"]
    driver.core.load_failed("r1", 2.0, LoadError("no"))
    assert driver.core.queues["m"]  # the other one can still serve it
    assert driver.steps(2.0) == ["evict a"]


def test_an_overdue_line_is_overtaken_on_no_gpu_that_one_of_its_replicas_could_use():
    replicas = backend("r0", "0", model="m"), backend("r1", "1", "2", model="m")
    singles = backend("a", "1"), backend("b", "1"), backend("c", "2"), backend("d", "2")
    driver = Driver(*replicas, *singles, max_wait=10.0)
    for name in ("a", "c"):
        driver.core.adopt(name, 0.0)
    assert driver.asked("b", 0.5) == ["evict a"]
    assert driver.asked("m", 1.0) == ["load r0"]
    assert driver.load_failed("r0", 2.0, LoadError("no")) == []  # GPU 1 is in a swap
    assert driver.steps(8.0) == ["load r0"]
    driver.core.load_failed("r0", 9.0, LoadError("no"))
    assert driver.asked("d", 12.5) == []  # GPU 2 is kept for r1
    assert driver.evicted("a", 13.0) == ["load b"]


def test_two_gpus_of_a_group_swap_side_by_side():
    pair = backend("t", "0", "1")
    driver = Driver(backend("a", "0"), backend("b", "0"), backend("c", "1"), backend("d", "1"), pair)
    driver.core.adopt("a", 0.0)
    driver.core.adopt("c", 0.0)
    driver.request("b", 1.0)
    assert driver.asked("d", 1.0) == ["evict a", "evict c"]
    assert driver.request("d", 1.5).settled is False
    driver.swaps("c", 2.0, "d", 3.0)
    assert driver.request("d", 3.5).backend == "d"
    assert driver.state("a") == "evicting"


def test_an_overdue_set_over_two_gpus_is_not_overtaken_by_younger_singles():
    singles = [backend("a", "0"), backend("b", "0"), backend("c", "1"), backend("d", "1")]
    driver = Driver(*singles, backend("t", "0", "1"), max_wait=10.0)
    driver.core.adopt("a", 0.0)
    assert driver.asked("b", 1.0) == ["evict a"]
    assert driver.asked("t", 2.0) == []  # GPU 0 is in a swap
    assert driver.asked("c", 13.0) == []  # GPU 1 is kept for t
    assert driver.evicted("a", 14.0) == ["load b"]
    assert (driver.loaded("b", 15.0), driver.state("b")) == ([], "draining")
    assert driver.drains()["b"] == ("t", 45.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_set_and_singles_under_constant_load_share_two_gpus_for_long(policy):
    backends = (backend("a", "0"), backend("b", "1"), backend("t", "0", "1"))
    config = Config(backends=backends, policy=policy, max_wait=60.0, drain_timeout=30.0)
    trace = [Arrival(n / 2, "abt"[n % 3], 1.0 + n % 7) for n in range(2400)]
    log = simulate(config, trace, Engines({"a": 8.0, "b": 5.0, "t": 20.0}))
    assert check(log, config) == []
    waits = [event.seconds for event in log if event.kind == "leased"]
    assert len(waits) == 2400
    # At most: max_wait, what is under way, and a swap each for the lines that are older.
    assert max(waits) <= 60.0 + 3 * (30.0 + 1.0 + 20.0)


# Orders from outside


def test_an_unload_drains_and_leaves_the_gpu_empty():
    driver = Driver(A, B).with_resident("a")
    lease = driver.request("a", 1.0)
    assert driver.core.unload("a", 2.0)
    assert driver.steps(2.0) == []
    assert driver.release(lease, 3.0) == ["evict a"]
    assert driver.evicted("a", 4.0) == []
    assert not driver.core.unload("a", 5.0)
    assert driver.state("a") == "stopped"
    driver.sound()


def test_nothing_is_begun_before_it_is_known_what_runs_already():
    driver = Driver(A, B)
    for name in "ab":
        driver.core.expected(name)
    first, other = driver.request("a", 1.0), driver.request("b", 1.0)
    assert (driver.steps(1.0), driver.until) == ([], inf)
    assert driver.core.adopt("a", 2.0)
    assert driver.core.state.woken == [first]
    assert first.backend == "a"
    assert driver.request("a", 3.0).backend == "a"
    driver.core.release(first, 3.0)
    assert driver.steps(100.0) == []  # b may hold the GPU too: it is still being looked at, or stopped
    assert driver.state("a") == "ready"
    driver.core.looked_at("b")
    assert (driver.steps(101.0), driver.state("a")) == ([], "draining")
    assert other.backend is None


def test_what_does_not_fit_beside_a_pinned_one_that_is_adopted_is_refused():
    driver = Driver(backend("a", pin=True), B)
    driver.core.expected("a")
    waits = driver.request("b", 1.0)
    driver.core.adopt("a", 2.0)
    assert isinstance(waits.error, DoesNotFit)


def test_at_the_end_every_waiting_request_fails_with_the_reason_given():
    driver = Driver(A, B)
    tickets = [driver.request(name, 0.0) for name in "ab"]
    error = Stuck("the end")
    driver.core.fail_all(error, 1.0)
    assert [ticket.error for ticket in tickets] == [error, error]
    assert driver.core.state.woken == tickets
    driver.sound()
