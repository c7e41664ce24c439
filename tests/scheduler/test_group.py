"""Histories: facts in, steps, states and events out. No thread, no time but the moments written here."""

import itertools
import math
from itertools import pairwise
from math import inf

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.config.profile import Profile
from anvil_mux.errors import DoesNotFit, LoadError, Overloaded, Stuck, WaitedTooLong
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.routing.in_flight import EngineLoad
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler import queueing
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.demand import Demand
from anvil_mux.scheduler.events import Cause, Severance
from anvil_mux.scheduler.group import SHORTEST_DEFERRAL, snapshot
from anvil_mux.scheduler.placement import gpu_groups
from anvil_mux.scheduler.planner import plan
from anvil_mux.scheduler.policies import POLICIES, Stay, SwapTo, Unload, build_policy
from anvil_mux.scheduler.slot import SOON_SECONDS, TRANSITIONS
from anvil_mux.scheduler.state import drains
from anvil_mux.scheduler.steps import Crash, Evict, Load, Ticket, Wait
from tests.scheduler.lone import LoneGroup


def backend(name, *gpus, model=None, **fields):
    return Backend(name, model or name, gpus or ("0",), **fields)


A, B, C = backend("a"), backend("b"), backend("c")
TEN = (Gpu("0", vram=10),)
DEBOUNCE = build_policy("debounce", {"quiet": 2.0, "max_hold": 10.0})


class Driver:
    """A GPU group, its log, and short words for what happens to it."""

    def __init__(self, *backends, gpus=(), policy=None, **settings):
        settings = {"policy": "eager", "eviction": "lru", **settings}
        self.config = Config(backends=backends, gpus=gpus, **settings)
        self.log = []
        self.core = LoneGroup(self.config, self.log.append, policy=policy)
        self.costs, self.footprints = self.core.state.costs, self.core.state.footprints
        self.ids = itertools.count(1)
        self.until = self.announced_at = inf

    def request(self, model, at, **about):
        ticket = Ticket(next(self.ids), model, at, **about)
        self.core.request(ticket, at)
        return ticket

    def steps(self, at):
        """The steps handed out at a moment: "load a", "evict b"; sets ``until`` and ``announced_at``."""
        taken = []
        while not isinstance(step := self.core.next_step(at), Wait):
            taken.append(f"{type(step).__name__.lower()} {step.backend}")
        self.until, self.announced_at = step
        return taken

    def with_resident(self, name, at=0.0):
        self.request(self.core.slots[name].model, at, takes_lease=False)
        assert self.steps(at) == [f"load {name}"]
        self.core.loaded(name, at)
        assert self.steps(at) == []
        return self

    def states(self):
        return {name: slot.state for name, slot in self.core.slots.items()}

    def state(self, name):
        return self.core.slots[name].state

    def tell(self, *kinds):
        """The events of these kinds (all without), as "kind backend-or-model"."""
        return [f"{e.kind} {e.backend or e.model}" for e in self.log if not kinds or e.kind in kinds]

    def sound(self):
        assert check(self.log, self.config) == []
        assert [line for line in self.core.queues.values() if line] == []


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


def test_a_swap_stops_the_old_backend_before_it_starts_the_new():
    driver = Driver(A, B).with_resident("a")
    waiting = driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    assert driver.states() == {"a": "evicting", "b": "stopped"}
    driver.core.evicted("a", 2.0)
    assert driver.steps(2.0) == ["load b"]
    driver.core.loaded("b", 5.0)
    assert waiting.backend == "b"
    assert driver.steps(5.0) == []
    driver.sound()


def test_any_number_of_requests_for_the_resident_stop_nothing():
    driver = Driver(A, B).with_resident("a")
    tickets = [driver.request("a", 1.0) for _ in range(50)]
    assert driver.steps(1.0) == []
    assert len(driver.core.slots["a"].holders) == 50
    for ticket in tickets:
        driver.core.release(ticket, 2.0)
    assert driver.steps(2.0) == []
    assert driver.tell("evicting", "loading") == ["loading a"]
    driver.sound()


def test_a_load_request_waits_like_a_request_but_holds_nothing():
    driver = Driver(A, B).with_resident("a")
    ticket = driver.request("a", 1.0, takes_lease=False)
    assert ticket.settled
    assert not driver.core.slots["a"].holders
    driver.core.release(ticket, 1.0)
    assert driver.tell("released") == []
    driver.request("b", 2.0)
    assert driver.steps(2.0) == ["evict a"]


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
    driver.request("a", 6.0)
    assert driver.steps(6.0) == ["load a"]
    driver.core.unload("a", 7.0)
    assert driver.steps(7.0) == ["cancel a"]
    driver.core.load_cancelled("a", 8.0)
    again = driver.request("a", 8.0)
    assert (again.error, driver.steps(8.0)) == (None, ["load a"])
    assert driver.core.slots["a"].failed_starts == 1
    driver.core.loaded("a", 9.0)
    driver.sound()


def test_who_comes_while_a_load_is_being_cancelled_waits_for_the_next():
    driver, _ = loading("a")
    driver.core.unload("a", 1.0)
    assert driver.steps(1.0) == ["cancel a"]
    late = driver.request("a", 2.0)
    assert (driver.steps(2.0), late.settled) == ([], False)
    driver.core.load_cancelled("a", 3.0)
    assert driver.steps(3.0) == ["load a"]
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
    driver.core.unload("a", 1.0)
    assert driver.steps(1.0) == ["cancel a"]
    late = driver.request("a", 1.5)
    driver.core.loaded("a", 2.0)
    assert (late.backend, driver.state("a"), driver.steps(2.0)) == ("a", "draining", [])
    driver.core.release(late, 3.0)
    assert driver.steps(3.0) == ["evict a"]
    driver.core.evicted("a", 4.0)
    assert driver.steps(4.0) == []
    driver.sound()


@pytest.mark.parametrize("failure", ["load_failed", "evict_failed"])
def test_a_load_that_fails_while_it_is_cancelled_has_no_cool_down_unless_it_cannot_be_stopped(failure):
    driver, _ = loading("a")
    driver.core.unload("a", 1.0)
    driver.steps(1.0)
    FACTS[failure](driver.core, 2.0)
    assert driver.core.slots["a"].failed_starts == 0
    if failure == "load_failed":
        assert driver.request("a", 2.0).error is None
        assert driver.steps(2.0) == ["load a"]
    else:
        assert (driver.request("a", 2.0).error.code, driver.steps(7.0)) == ("stuck", ["evict a"])


def test_a_load_that_nobody_waits_for_any_more_is_cancelled_for_a_line_that_needs_its_gpu():
    driver, first = loading("a")
    driver.core.give_up(first, 1.0)
    assert driver.steps(1.0) == []
    waiting = driver.request("b", 2.0)
    assert driver.steps(2.0) == ["cancel a"]
    driver.core.load_cancelled("a", 3.0)
    assert driver.steps(3.0) == ["load b"]
    driver.core.loaded("b", 4.0)
    assert waiting.backend == "b"
    assert [(e.at, e.target) for e in driver.log if e.kind == "cancelling"] == [(2.0, "b")]
    driver.sound()


def test_it_is_cancelled_too_if_the_line_was_there_before_and_whatever_the_policy_says():
    driver, first = loading("a", policy=None)
    driver.core.set_policy(Never())
    waiting = driver.request("b", 1.0)
    assert driver.steps(1.0) == []
    driver.core.give_up(first, 2.0)
    assert driver.steps(2.0) == ["cancel a"]
    assert not waiting.settled


def test_a_load_that_nobody_waits_for_any_more_is_finished_if_nobody_needs_its_gpu():
    driver, first = loading("a", A, backend("b", "1"), backend("t", "0", "1"))
    driver.core.give_up(first, 1.0)
    driver.request("b", 2.0)
    assert driver.steps(2.0) == ["load b"]
    driver.core.loaded("a", 3.0)
    assert driver.state("a") == "ready"


@pytest.mark.parametrize("about", [{"pin": True}, {"preload": True}])
def test_neither_what_is_pinned_nor_what_is_prepared_is_cancelled_for_another(about):
    driver = Driver(backend("a", **about), B)
    if "pin" in about:
        asked = driver.request("a", 0.0)
        assert driver.steps(0.0) == ["load a"]
        driver.core.give_up(asked, 1.0)
    else:
        assert driver.steps(0.0) == ["load a"]
    driver.request("b", 2.0)
    assert driver.steps(2.0) == []
    assert driver.core.unload("a", 3.0)  # by hand it is
    assert driver.steps(3.0) == ["cancel a"]


def test_a_load_is_not_cancelled_for_a_line_that_could_not_be_loaded_there_all_the_same():
    stays = backend("a", vram=5, min_residency=500.0)
    driver = Driver(stays, backend("b", vram=5), backend("c", vram=10), gpus=TEN).with_resident("a")
    gone = driver.request("b", 0.0)
    assert driver.steps(0.0) == ["load b"]
    driver.core.give_up(gone, 1.0)
    driver.request("c", 2.0)
    assert (driver.steps(2.0), driver.until) == ([], 62.0)  # then it is overdue, and a need not stay
    assert driver.steps(62.0) == ["cancel b"]
    driver.core.load_cancelled("b", 63.0)
    assert driver.steps(63.0) == ["evict a"]


def test_all_loads_are_cancelled_that_a_line_of_several_gpus_needs():
    driver = Driver(backend("a", "0"), backend("b", "1"), backend("t", "0", "1"))
    gone = [driver.request("a", 0.0), driver.request("b", 0.0)]
    assert driver.steps(0.0) == ["load a", "load b"]
    waiting = driver.request("t", 1.0)
    driver.core.give_up(gone[0], 2.0)
    assert driver.steps(2.0) == []  # b is still waited for
    driver.core.give_up(gone[1], 3.0)
    assert driver.steps(3.0) == ["cancel a", "cancel b"]
    driver.core.load_cancelled("a", 4.0)
    assert driver.steps(4.0) == []
    driver.core.load_cancelled("b", 5.0)
    assert driver.steps(5.0) == ["load t"]
    driver.core.loaded("t", 6.0)
    assert waiting.backend == "t"
    driver.sound()


def test_who_waits_while_its_gpu_is_being_freed_is_told_that_the_model_was_unloaded_too():
    driver = Driver(A, B, drain_timeout=30.0).with_resident("a")
    lease, waiting = driver.request("a", 1.0), driver.request("b", 2.0)
    assert driver.steps(2.0) == []
    assert driver.state("a") == "draining"
    assert driver.core.unload("b", 3.0)
    assert (ends(driver, waiting), driver.state("a"), driver.steps(3.0)) == (["cancelled"], "ready", [])
    driver.core.release(lease, 4.0)
    driver.request("b", 5.0)
    assert driver.steps(5.0) == ["evict a"]
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


# Draining


def test_a_swap_waits_for_every_lease():
    driver = Driver(A, B).with_resident("a")
    held = [driver.request("a", 1.0) for _ in range(3)]
    driver.request("b", 2.0)
    assert driver.steps(2.0) == []
    assert driver.state("a") == "draining"
    for ticket in held[:2]:
        driver.core.release(ticket, 3.0)
        assert driver.steps(3.0) == []
    driver.core.release(held[2], 4.0)
    assert driver.steps(4.0) == ["evict a"]
    assert not any(ticket.severed for ticket in held)


def test_a_drain_that_takes_too_long_severs_what_is_left():
    driver = Driver(A, B, drain_timeout=30.0).with_resident("a")
    ended, laggard = driver.request("a", 1.0), driver.request("a", 1.0)
    driver.request("b", 2.0)
    assert driver.steps(2.0) == []
    assert driver.until == 32.0
    driver.core.release(ended, 10.0)
    assert driver.steps(31.9) == []
    step = driver.core.next_step(32.0)
    assert step == Evict("a", "stop", (laggard,))
    assert (ended.severed, laggard.severed) == (None, Severance(Cause("evicted", "b"), 30.0))
    assert [(e.ticket, e.seconds) for e in driver.log if e.kind == "severed"] == [(laggard.id, 30.0)]
    driver.core.evicted("a", 33.0)
    driver.steps(33.0)
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
    driver.core.give_up(waits, 4.0)
    driver.steps(4.0)
    assert driver.steps(7.0) == ["evict a"]
    assert lease.severed == Severance(Cause("changed"), 5.0)


def test_a_drain_timeout_of_zero_severs_at_once():
    driver = Driver(A, B, drain_timeout=0.0).with_resident("a")
    lease = driver.request("a", 1.0)
    driver.request("b", 2.0)
    assert driver.steps(2.0) == ["evict a"]
    assert lease.severed


def test_a_late_request_for_the_victim_neither_extends_the_drain_nor_is_lost():
    driver = Driver(A, B, drain_timeout=5.0).with_resident("a")
    driver.request("a", 1.0)
    driver.request("b", 2.0)
    driver.steps(2.0)
    late = driver.request("a", 3.0)
    assert not late.settled
    assert driver.steps(6.9) == []
    assert driver.steps(7.0) == ["evict a"]
    driver.core.evicted("a", 8.0)
    assert driver.steps(8.0) == ["load b"]
    driver.core.loaded("b", 9.0)
    assert driver.steps(9.0) == []  # b's one request holds its lease; a waits for it
    assert driver.steps(14.0) == ["evict b"]
    driver.core.evicted("b", 15.0)
    assert driver.steps(15.0) == ["load a"]
    driver.core.loaded("a", 16.0)
    assert late.backend == "a"
    driver.sound()


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
        driver.core.evicted(victim, moment)
        assert driver.steps(moment) == [f"load {target}"]
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


def test_of_two_swaps_wanted_during_one_drain_one_wins_and_the_other_follows():
    driver = Driver(A, B, C).with_resident("a")
    lease = driver.request("a", 1.0)
    driver.request("b", 2.0)
    driver.steps(2.0)
    driver.request("c", 3.0)
    assert driver.steps(3.0) == []
    driver.core.release(lease, 4.0)
    assert driver.steps(4.0) == ["evict a"]
    driver.core.evicted("a", 5.0)
    assert driver.steps(5.0) == ["load b"]
    driver.core.loaded("b", 6.0)
    driver.core.release(next(iter(driver.core.slots["b"].holders)), 7.0)
    assert driver.steps(7.0) == ["evict b"]
    driver.core.evicted("b", 8.0)
    assert driver.steps(8.0) == ["load c"]
    assert driver.tell("loading") == ["loading a", "loading b", "loading c"]


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
    driver.core.evicted("a", 5.0)
    assert driver.steps(5.0) == ["load b"]
    driver.core.loaded("b", 6.0)
    assert all(ticket.backend for ticket in tickets)
    assert len(driver.tell("loading")) == 2
    driver.sound()


def test_a_fresh_resident_serves_its_whole_line_before_it_may_be_put_out():
    driver = Driver(A, B).with_resident("a")
    line = [driver.request("b", 1.0) for _ in range(5)]
    driver.steps(1.0)
    driver.request("a", 1.5)
    driver.core.evicted("a", 2.0)
    driver.steps(2.0)
    driver.core.loaded("b", 3.0)
    assert [ticket.backend for ticket in line] == ["b"] * 5
    assert driver.steps(3.0) == []
    assert driver.state("b") == "draining"


# The policy proposes, the GPU group disposes


class Never:
    """A policy that never swaps."""

    def decide(self, seen):
        return Stay()


class Wrong:
    """A policy that always names a model that cannot be loaded now."""

    def decide(self, seen):
        return SwapTo("nonsense")


class Broken:
    """A policy that raises."""

    def decide(self, seen):
        raise ZeroDivisionError("division by zero")


class Wordy:
    """A policy that gives a text as its cause."""

    def decide(self, seen):
        return SwapTo("b", "because")


class IdleOut:
    """Puts a model out that was not used for five seconds."""

    def decide(self, seen):
        moments = []
        for resident in seen.residents:
            until = (seen.now if resident.leases else resident.last_used) + 5.0
            if until <= seen.now:
                return Unload(resident.model)
            moments.append(until)
        return Stay(min(moments, default=inf)) if not seen.queues else SwapTo(seen.queues[0].model)


@pytest.mark.parametrize("policy", [Never(), Wrong(), Broken(), Wordy()])
def test_an_overdue_line_is_served_whatever_the_policy_says(policy):
    driver = Driver(A, B, policy=policy, max_wait=60.0)
    assert driver.core.adopt("a", 0.0)
    for moment in range(1, 61):
        driver.core.release(driver.request("a", float(moment)), moment + 0.5)
        if moment == 2:
            driver.request("b", 2.0)
        assert driver.steps(moment + 0.5) == []
    assert driver.until == 62.0
    assert driver.steps(62.0) == ["evict a"]


class Answers:
    """A policy that always gives the same answer, and no answer where no queue waits."""

    def __init__(self, answer):
        self.answer = answer

    def __repr__(self):
        return "the answer"

    def decide(self, seen):
        return self.answer if seen.queues else Stay()


class Unspeakable(Exception):
    def __repr__(self):
        raise RuntimeError("no words")


class Mute:
    """A policy that raises what has no words."""

    def decide(self, seen):
        raise Unspeakable


MISTAKES = {
    "raises": (Broken(), "ZeroDivisionError('division by zero')"),
    "raises what has no words": (Mute(), "Unspeakable"),
    "a cause that is a text": (Wordy(), "its cause is 'because'"),
    "no moment": (Answers(Stay(until=None)), "None is no number"),
    "no number": (Answers(Stay(until=math.nan)), "nan is no number"),
    "a moment beyond all floats": (Answers(Stay(until=10**400)), "OverflowError"),
    "no leases": (Answers(Stay(leases="many")), "'many' is no number"),
    "no moment to ask again": (Answers(Stay(again=None)), "None is no number"),
    "nothing": (Answers(None), "none of Stay, SwapTo and Unload"),
    "a tuple": (Answers((inf, Cause("policy"))), "none of Stay, SwapTo and Unload"),
    "a model that has no queue": (Answers(SwapTo("a")), "none of b"),
    "a model that is not resident": (Answers(Unload("b")), "none of a"),
    "no name": (Answers(SwapTo(["b"])), "none of b"),
    "a cause of ours": (Answers(SwapTo("b", Cause("silent"))), "no Cause of a decision"),
    "a figure of another type": (
        Answers(SwapTo("b", Cause("policy_text", seconds="1"))),
        "no Cause of a decision",
    ),
    "residents of another type": (
        Answers(SwapTo("b", Cause("slice", residents=(1,)))),
        "no Cause of a decision",
    ),
}


@pytest.mark.parametrize(("policy", "problem"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_of_a_policy_holds_the_swap_back_is_reported_once_and_harms_no_request(policy, problem):
    driver = Driver(A, B, policy=policy, max_wait=60.0)
    assert driver.core.adopt("a", 0.0)
    waiting = driver.request("b", 1.0)
    assert driver.steps(1.0) == driver.steps(2.0) == driver.steps(40.0) == []
    assert [deferred.stay.cause.kind for deferred in driver.core.state.deferred.values()] == ["policy_failed"]
    (report,) = [event for event in driver.log if event.kind == "plugin_failed"]
    assert report.cause.kind == "policy_failed"
    assert problem in report.cause.detail
    assert driver.steps(61.0) == ["evict a"]
    driver.core.evicted("a", 62.0)
    assert driver.steps(62.0) == ["load b"]
    driver.core.loaded("b", 63.0)
    assert waiting.backend == "b"


class Careless:
    """An eviction whose order cannot be compared, or is none at all."""

    def __init__(self, order):
        self.order = order


@pytest.mark.parametrize(
    "eviction",
    [
        Careless(lambda one: 1 / 0),
        Careless(lambda one: object()),
        Careless(None),
        Careless(lambda: 1),
        object(),
    ],
    ids=["raises", "no order", "no function", "too few arguments", "none at all"],
)
def test_a_mistake_of_an_eviction_is_reported_once_and_the_usual_one_chooses(eviction):
    driver = Driver(*[backend(name, vram=5) for name in "abcd"], gpus=TEN)
    common = driver.core.state.common
    common.settings = common.settings._replace(eviction=eviction)
    driver.with_resident("a").with_resident("b", 1.0)
    driver.core.release(driver.request("a", 2.0), 3.0)
    driver.request("c", 4.0)
    (step,) = driver.steps(4.0)
    assert step == "evict b", "it was never asked for"
    driver.core.evicted("b", 5.0)
    assert driver.steps(5.0) == ["load c"]
    driver.core.loaded("c", 6.0)
    driver.request("d", 7.0)
    assert driver.steps(7.0) == ["evict a"]
    (report,) = [event for event in driver.log if event.kind == "plugin_failed"]
    assert report.cause.kind == "eviction_failed"


def test_a_line_is_overdue_at_the_very_moment_that_was_announced():
    for since in (n / 7 for n in range(1, 200)):  # for a third of these (since + wait) - since < wait
        driver = Driver(A, B, policy=Never(), max_wait=60.1)
        driver.core.adopt("a", 0.0)
        driver.request("b", since)
        assert driver.steps(since) == []
        assert driver.steps(driver.until) == ["evict a"]


def asks_without_end(model, clients, until):
    """What follows: each of so many requests for ``model`` is followed by another one at once."""
    return lambda request, now: [Arrival(now, model, 0.2)] if request.model == model and now < until else []


def test_a_busy_resident_does_not_keep_a_line_waiting_beyond_its_queue_timeout():
    config = Config(backends=(A, B), policy="adaptive", queue_timeout=20.0, max_wait=60.0)
    trace = [*[Arrival(n / 64, "a", 0.2) for n in range(6)], Arrival(5.0, "b", 0.1), Arrival(60.0, "b", 0.1)]
    busy = asks_without_end("a", 6, 100.0)
    log = simulate(config, trace, Engines({"a": 3.0, "b": 3.0}), resident=["a"], follow=busy)
    assert check(log, config) == []
    assert [e.kind for e in log if e.model == "b" and e.kind in ("leased", "failed")] == ["leased", "leased"]
    [first, second] = [event.bound for event in log if event.kind == "queued" and event.model == "b"]
    assert first == pytest.approx(20.0 - 11.0 - 0.2 * (1 + math.log(6)))
    assert second > first  # its load was learned to be shorter


@pytest.mark.parametrize(("queue_timeout", "bound"), [(600.0, 60.0), (40.0, 22.0), (15.0, 0.0)])
def test_the_bound_of_a_line_leaves_time_for_drain_eviction_and_load(queue_timeout, bound):
    driver = Driver(A, B, policy=Never(), queue_timeout=queue_timeout)
    driver.core.adopt("a", 0.0)
    driver.costs.learn("a", "b", "stop", 2.0, 12.0)
    for moment in (1.0, 5.0):  # a has answered within 4 s
        driver.core.release(driver.request("a", moment), moment + 4.0)
    driver.request("b", 10.0)
    driver.request("b", 11.0)
    assert [e.bound for e in driver.log if e.kind == "queued" and e.model == "b"] == [bound, inf]
    if bound:
        assert (driver.steps(11.0), driver.until) == ([], 10.0 + bound)
    assert driver.steps(10.0 + bound) == ["evict a"]


@pytest.mark.parametrize(("drain_timeout", "drain"), [(30.0, 10.0), (4.0, 4.0)])
def test_what_a_drain_will_take_is_a_guess_until_somebody_was_answered_and_has_a_limit(drain_timeout, drain):
    driver = Driver(A, B, policy=Never(), queue_timeout=60.0, drain_timeout=drain_timeout)
    driver.core.adopt("a", 0.0)
    driver.request("a", 1.0)
    driver.request("b", 2.0)
    assert driver.log[-1].bound == 60.0 - drain - 1.0 - 10.0


def test_the_bound_of_a_line_is_fixed_when_it_begins_and_another_line_has_another():
    driver = Driver(A, B, policy=Never(), queue_timeout=40.0)
    driver.core.adopt("a", 0.0)
    driver.core.release(driver.request("a", 0.0), 1.0)
    first, _ = driver.request("b", 10.0), driver.request("b", 12.0)
    bound = driver.log[-2].bound
    driver.costs.learn("a", "b", "stop", 1.0, 25.0)
    driver.core.give_up(first, 13.0)
    assert (driver.steps(13.0), driver.until) == ([], 12.0 + bound)  # that of the one that is first now
    driver.core.give_up(next(iter(driver.core.queues["b"])), 14.0)
    driver.request("b", 15.0)
    assert driver.log[-1].bound == bound - 15.0


def test_the_policy_is_asked_again_at_the_moment_it_named_even_if_nobody_waits():
    driver = Driver(A, B, policy=IdleOut()).with_resident("a", at=1.0)
    assert driver.until == 6.0
    lease = driver.request("a", 5.0)
    assert driver.steps(6.0) == []
    assert driver.until == 11.0
    driver.core.release(lease, 7.0)
    assert driver.steps(11.0) == []
    assert driver.until == 12.0
    assert driver.steps(12.0) == ["evict a"]
    driver.core.evicted("a", 13.0)
    assert driver.steps(13.0) == []
    assert driver.until == inf


def test_a_policy_cannot_put_out_a_pinned_model():
    driver = Driver(backend("a", pin=True), backend("b", "1"), backend("t", "0", "1"), policy=IdleOut())
    driver.core.adopt("a", 0.0)
    assert driver.steps(100.0) == []
    assert driver.state("a") == "ready"


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "in the file"])
def test_a_pinned_model_is_kept_until_it_is_unpinned(by_hand):
    driver = Driver(backend("a", pin=not by_hand), B).with_resident("a")
    driver.core.pin("a", 1.0, True)
    refused = driver.request("b", 2.0).error
    assert isinstance(refused, DoesNotFit)
    assert "beside the pinned a (see `anvil-mux unpin`)" in refused.message
    assert driver.steps(100.0) == []
    driver.core.pin("a", 101.0, False)
    waits = driver.request("b", 102.0)
    assert driver.steps(102.0) == ["evict a"]
    driver.core.evicted("a", 103.0)
    assert driver.steps(103.0) == ["load b"]
    driver.core.loaded("b", 104.0)
    assert waits.backend == "b"
    assert driver.tell("pinned", "unpinned") == [*(["pinned a"] if by_hand else []), "unpinned a"]
    driver.sound()


def test_pinning_what_is_pinned_changes_nothing():
    driver = Driver(A)
    for _ in range(2):
        driver.core.pin("a", 1.0, True)
    assert driver.tell() == ["pinned a"]


def test_a_model_may_be_pinned_before_it_is_resident():
    driver = Driver(A, B).with_resident("b")
    driver.core.pin("a", 1.0, True)
    shut_out = driver.request("a", 2.0)
    assert driver.steps(2.0) == ["evict b"]
    driver.core.evicted("b", 3.0)
    assert driver.steps(3.0) == ["load a"]
    assert isinstance(driver.request("b", 3.5).error, DoesNotFit)
    driver.core.loaded("a", 4.0)
    assert shut_out.backend == "a"
    driver.sound()


def test_who_waits_for_the_gpu_of_a_model_that_is_pinned_is_refused_at_once_and_the_model_stays():
    driver = Driver(A, B).with_resident("a")
    driver.request("a", 1.0)
    waits = driver.request("b", 2.0)
    assert driver.steps(2.0) == []
    assert driver.state("a") == "draining"
    late = driver.request("a", 2.5)
    driver.core.pin("a", 3.0, True)
    assert isinstance(waits.error, DoesNotFit)
    assert waits in driver.core.state.woken
    assert late.backend == "a"
    assert driver.steps(100.0) == []
    assert driver.state("a") == "ready"
    driver.sound()


def test_where_the_pinned_victim_stays_another_goes():
    driver = Driver(*(backend(name, vram=4) for name in "abc"), gpus=TEN)
    driver.with_resident("a", 0.0).with_resident("b", 1.0)
    driver.request("b", 1.5)
    driver.request("a", 2.0)
    waits = driver.request("c", 3.0)
    assert driver.steps(3.0) == []
    assert driver.states() == {"a": "ready", "b": "draining", "c": "stopped"}
    driver.core.pin("b", 4.0, True)
    assert waits.error is None
    assert driver.steps(4.0) == []
    assert driver.states() == {"a": "draining", "b": "ready", "c": "stopped"}
    assert check(driver.log, driver.config) == []


def test_a_pinned_model_that_rests_makes_room_by_its_memory():
    resting = backend("a", vram=8, evict_to=("sleep", "stop"), pin=True)
    driver = Driver(resting, backend("b", vram=8), gpus=TEN).with_resident("a")
    driver.core.unload("a", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.core.evicted("a", 2.0, {"0": 3}, "sleep")
    waits = driver.request("b", 3.0)
    assert driver.steps(3.0) == ["demote a"]
    driver.core.evicted("a", 4.0)
    assert driver.steps(4.0) == ["load b"]
    driver.core.loaded("b", 5.0)
    assert waits.backend == "b"
    driver.sound()


def test_a_pinned_model_that_was_told_to_go_is_waited_for():
    driver = Driver(backend("a", pin=True), B).with_resident("a")
    lease = driver.request("a", 1.0)
    driver.core.unload("a", 2.0)
    waits = driver.request("b", 3.0)
    driver.core.pin("a", 3.0, False)
    driver.core.pin("a", 3.5, True)  # that it is kept from others spares it nothing here
    assert driver.steps(3.5) == []
    driver.core.release(lease, 4.0)
    assert driver.steps(4.0) == ["evict a"]
    driver.core.evicted("a", 5.0)
    assert driver.steps(5.0) == ["load b"]
    assert waits.error is None


def test_a_swap_that_begins_within_a_second_was_not_said_to_be_held_back():
    driver = Driver(A, B, policy=build_policy("adaptive")).with_resident("a")
    lease = driver.request("a", 1.0)
    driver.request("b", 1.0)
    assert driver.steps(1.0) == []
    assert driver.announced_at == 2.0
    driver.core.release(lease, 1.5)
    assert driver.steps(1.5) == ["evict a"]
    assert driver.tell("deferred") == []


def test_a_held_swap_is_announced_for_each_line_and_when_the_moment_has_passed_and_begins_when_it_is_due():
    driver = Driver(A, B, policy=DEBOUNCE).with_resident("a")
    driver.request("b", 1.0)
    for moment in (1.0, 1.5, 2.0):
        assert driver.steps(moment) == []
    driver.request("b", 2.5)
    assert driver.steps(2.5) == []
    assert driver.announced_at == 3.0  # what was announced is corrected then
    assert driver.steps(3.0) == []
    assert driver.until == 4.5
    assert driver.steps(4.5) == ["evict a"]
    assert [(e.at, e.seconds) for e in driver.log if e.kind == "deferred"] == [(2.0, 1.0), (3.0, 1.5)]


@pytest.mark.parametrize("pause", [0.125, 0.5, 2.0])
@pytest.mark.parametrize("load", [0.5, 3.0, 20.0])
def test_a_lone_request_is_told_anew_whenever_the_moment_of_its_swap_has_passed(load, pause):
    driver = Driver(A, B, policy=build_policy("adaptive")).with_resident("a")
    for source, target in ("ab", "ba"):
        driver.costs.learn(source, target, "stop", 0.25, load)
    now = 0.0
    for _ in range(10):
        now += pause
        lease = driver.request("a", now)
        now += 0.25
        driver.core.release(lease, now)
    driver.request("b", now)
    since = now
    while driver.steps(now) != ["evict a"]:
        assert now < driver.until < now + 60.0
        now = min(driver.until, driver.announced_at)
    told = [(event.at, event.at + event.seconds) for event in driver.log if event.kind == "deferred"]
    assert bool(told) is (now > since + SHORTEST_DEFERRAL)
    for (at, until), (following, _) in pairwise([*told, (now, 0.0)]):
        assert following <= max(until, at + SHORTEST_DEFERRAL)
    assert len(told) <= 3


def test_a_policy_that_puts_off_by_moments_writes_a_line_a_second():
    class Hesitant:
        def decide(self, seen):
            return Stay(seen.now + 0.0625) if seen.queues else Stay()

    driver = Driver(A, B, policy=Hesitant(), max_wait=8.0)
    driver.core.adopt("a", 0.0)
    driver.request("b", 1.0)
    now = 1.0
    while driver.steps(now) != ["evict a"]:
        now = driver.until
    assert now == 9.0
    assert [event.at for event in driver.log if event.kind == "deferred"] == [float(n) for n in range(2, 9)]


def held_back():
    """b waits since 1.0, and the policy holds its swap back until 3.0."""
    driver = Driver(A, B, C, policy=DEBOUNCE).with_resident("a")
    waiting = driver.request("b", 1.0)
    assert (driver.steps(1.0), driver.until) == ([], 3.0)
    return driver, waiting


def test_a_held_line_goes_at_once_when_the_resident_has_died():
    driver, waiting = held_back()
    driver.core.died("a", 1.5, "killed")
    assert driver.steps(1.5) == ["load b"]
    driver.core.loaded("b", 2.0)
    assert waiting.backend == "b"
    driver.sound()


def test_a_held_line_goes_at_once_when_the_resident_was_unloaded():
    driver, _ = held_back()
    driver.core.unload("a", 1.5)
    assert driver.steps(1.5) == ["evict a"]
    assert driver.steps(1.75) == []
    driver.core.evicted("a", 2.0)
    assert driver.steps(2.0) == ["load b"]


def test_a_line_that_begins_while_another_is_held_back_is_decided_with_it():
    driver, waiting = held_back()
    driver.core.give_up(waiting, 1.25)
    assert (driver.steps(1.25), driver.until) == ([], inf)
    driver.request("c", 1.5)
    assert (driver.steps(1.5), driver.until) == ([], 3.5)
    driver.request("b", 2.0)
    assert (driver.steps(2.0), driver.until) == ([], 3.5)
    assert driver.steps(3.5) == ["evict a"]
    driver.core.evicted("a", 4.0)
    assert driver.steps(4.0) == ["load c"]


def test_a_request_for_the_old_model_in_mid_swap_does_not_skip_the_policy():
    driver = Driver(A, B, policy=DEBOUNCE).with_resident("a")
    driver.request("b", 1.0)
    driver.steps(1.0)
    driver.steps(3.0)
    driver.request("a", 3.5)
    driver.core.evicted("a", 4.0)
    driver.steps(4.0)
    driver.core.loaded("b", 5.0)
    assert driver.steps(5.0) == []
    assert driver.state("b") == "ready"
    assert driver.until == 5.5
    driver.steps(5.5)
    assert driver.state("b") == "draining"


def test_the_timer_of_a_held_swap_survives_a_failed_one():
    driver = Driver(A, B, C, policy=DEBOUNCE).with_resident("a")
    driver.request("b", 1.0)
    driver.steps(1.0)
    assert driver.steps(3.0) == ["evict a"]
    driver.core.evicted("a", 4.0)
    assert driver.steps(4.0) == ["load b"]
    driver.request("a", 4.5)
    driver.core.load_failed("b", 5.0, LoadError("no"))
    assert driver.steps(5.0) == ["load a"]  # there is room: nothing to hold back
    driver.core.loaded("a", 6.0)
    driver.request("c", 6.5)
    assert driver.steps(6.5) == []
    assert driver.until == 8.5


# Swaps for nobody


def test_a_held_swap_whose_waiters_left_is_not_begun_and_the_resident_serves_on_meanwhile():
    driver, waiting = held_back()
    assert driver.request("a", 1.5).backend == "a"
    driver.core.give_up(waiting, 2.0)
    assert driver.steps(3.0) == []
    assert driver.until == inf
    assert driver.tell("draining", "gone") == ["gone b"]
    driver.sound()


def test_a_victim_that_only_drains_is_reprieved_when_nobody_waits_any_more():
    driver = Driver(A, B).with_resident("a")
    lease = driver.request("a", 1.0)
    waiting = driver.request("b", 2.0)
    driver.steps(2.0)
    late = driver.request("a", 3.0)
    driver.core.give_up(waiting, 4.0, WaitedTooLong("too long"))
    assert driver.steps(4.0) == []
    assert driver.state("a") == "ready"
    assert late.backend == "a"
    assert set(driver.core.slots["a"].holders) == {lease, late}
    assert driver.core.state.woken[-1] is late
    driver.sound()


def test_a_swap_that_has_begun_is_finished_even_for_nobody():
    driver = Driver(A, B).with_resident("a")
    waiting = driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.core.give_up(waiting, 2.0)
    driver.core.evicted("a", 3.0)
    assert driver.steps(3.0) == ["load b"]
    driver.core.loaded("b", 4.0)
    assert driver.steps(4.0) == []
    driver.sound()


def test_a_waiter_that_leaves_leaves_no_trace_in_the_line():
    driver = Driver(A, B).with_resident("a")
    driver.request("a", 1.0)
    waiting = [driver.request("b", 2.0) for _ in range(3)]
    driver.core.give_up(waiting[1], 3.0)
    driver.core.give_up(waiting[1], 3.0)
    assert list(driver.core.queues["b"]) == [waiting[0], waiting[2]]
    assert driver.tell("gone") == ["gone b"]


# Failures


def test_after_a_failed_start_its_waiters_fail_and_the_others_are_served():
    driver = Driver(A, B).with_resident("a")
    broken = driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    other = driver.request("a", 1.5)
    driver.core.evicted("a", 2.0)
    assert driver.steps(2.0) == ["load b"]
    driver.core.load_failed("b", 4.0, LoadError("exited with code 1", log=("bad weights",)))
    assert (broken.error.status, broken.error.code) == (503, "load_failed")
    assert "exited with code 1" in broken.error.message
    assert "bad weights" in broken.error.message
    assert driver.steps(4.0) == ["load a"]
    driver.core.loaded("a", 5.0)
    assert other.backend == "a"
    driver.sound()


def test_ten_requests_for_a_broken_model_put_the_resident_out_once():
    driver = Driver(A, B).with_resident("a")
    for n in range(10):
        ticket = driver.request("b", n / 4)
        for step in driver.steps(n / 4):
            assert step == "evict a"
            driver.core.evicted("a", n / 4)
            assert driver.steps(n / 4) == ["load b"]
            driver.core.load_failed("b", n / 4, LoadError("no"))
            driver.request("a", n / 4, takes_lease=False)
            assert driver.steps(n / 4) == ["load a"]
            driver.core.loaded("a", n / 4)
        assert ticket.error.code == "load_failed"
        assert 1.0 <= ticket.error.retry_after <= 5.0
    assert driver.tell("loading") == ["loading a", "loading b", "loading a"]
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
    driver.core.evict_failed("a", 2.0, "docker does not answer")
    assert driver.steps(2.0) == []
    assert (waiting.error.status, waiting.error.code) == (503, "stuck")
    assert "docker does not answer" in waiting.error.message
    for model in "ab":
        assert driver.request(model, 3.0).error.code == "stuck"
    assert driver.state("a") == "stuck"
    assert driver.until == 7.0
    driver.sound()


def test_a_stuck_backend_is_stopped_again_until_it_works():
    driver = Driver(A, B).with_resident("a")
    driver.request("b", 0.0)
    driver.steps(0.0)
    now = 0.0
    for pause in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
        driver.core.evict_failed("a", now, "no")
        assert driver.steps(now) == []
        now += pause
        assert driver.until == now
        assert driver.steps(now) == ["evict a"]
    late = driver.request("b", now)
    assert not late.settled
    driver.core.evicted("a", now)
    assert driver.steps(now) == ["load b"]
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
        driver.request("a", now)
        assert driver.steps(now) == ["load a"]
        driver.core.evict_failed("a", now, "half started")
        driver.steps(now)
        assert driver.until == now + 5.0
        now += 5.0
        assert driver.steps(now) == ["evict a"]
        driver.core.evicted("a", now)
        pauses.append(driver.core.slots["a"].retry_at - now)
        now += pauses[-1]
    assert pauses == [5.0, 10.0, 20.0, 40.0]
    assert driver.core.slots["a"].error == "half started"
    driver.sound()


def test_a_stuck_backend_that_dies_is_gone_and_may_be_loaded_at_once():
    driver = Driver(A).with_resident("a")
    driver.core.unload("a", 1.0)
    driver.steps(1.0)
    driver.core.evict_failed("a", 2.0, "no")
    driver.steps(2.0)
    driver.core.died("a", 3.0, "killed")
    driver.request("a", 3.5)
    assert driver.steps(3.5) == ["load a"]


def test_victims_that_only_drain_are_reprieved_when_another_is_stuck():
    small = [backend(name, vram=5) for name in "ab"]
    driver = Driver(*small, backend("c", vram=10), gpus=TEN).with_resident("a").with_resident("b")
    driver.request("b", 1.0)
    driver.request("c", 2.0)
    assert driver.steps(2.0) == ["evict a"]
    late = driver.request("b", 2.5)
    driver.core.evict_failed("a", 3.0, "no")
    assert driver.states() == {"a": "stuck", "b": "ready", "c": "stopped"}
    assert late.backend == "b"
    driver.sound()


def test_the_resident_that_died_is_loaded_again_for_the_next_request_and_its_last_words_are_kept_until_then():
    driver = Driver(A).with_resident("a")
    driver.core.release(driver.request("a", 0.5), 0.5)
    lease, slot = driver.request("a", 1.0), driver.core.slots["a"]
    driver.core.died("a", 2.0, "exited with code 137", ["no more memory"])
    assert driver.steps(2.0) == []
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
        assert "segmentation fault" in refused.error.message
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
    assert "segmentation fault" in waiting.error.message
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
    driver.request("a", 14.0)
    assert driver.steps(14.0) == ["load a"]
    assert check(driver.log, driver.config) == []


def test_who_ends_long_after_its_load_is_loaded_again_at_once_whether_it_answered_or_not():
    driver = Driver(A)
    loaded(driver, 0.0)
    driver.core.died("a", SOON_SECONDS + 0.5, "killed")
    driver.request("a", SOON_SECONDS + 0.5)
    assert driver.steps(SOON_SECONDS + 0.5) == ["load a"]
    assert check(driver.log, driver.config) == []


def test_an_end_soon_after_a_wake_counts_and_that_of_one_that_rests_does_not():
    driver = Driver(backend("a", evict_to=("sleep",)), B).with_resident("a")
    driver.core.release(driver.request("a", 0.0), 0.0)
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.core.evicted("a", 1.0, level="sleep")
    assert driver.steps(1.0) == ["load b"]
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
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.core.evicted("a", 2.0, died="exited with code 139")
    assert "exited with code 139" in driver.request("a", 3.0).error.message
    assert check(driver.log, driver.config) == []


def test_an_end_that_a_stop_brought_about_late_is_no_death():
    driver = Driver(A).with_resident("a")
    driver.core.unload("a", 1.0)
    assert driver.steps(1.0) == ["evict a"]
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
    driver.request("a", 2.0)
    assert driver.steps(2.0) == ["load a"]
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
    assert "segmentation fault" in refused.error.message
    assert driver.steps(70.0) == []
    assert not driver.request("a", 71.0).settled


def test_a_victim_that_dies_in_its_drain_makes_room_at_once():
    driver = Driver(A, B).with_resident("a")
    driver.request("a", 1.0)
    driver.request("b", 2.0)
    assert driver.steps(2.0) == []
    driver.core.died("a", 3.0, "killed")
    assert driver.steps(3.0) == ["load b"]
    driver.core.loaded("b", 4.0)
    driver.sound()


# What can never fit


def test_a_load_that_can_never_fit_is_refused_and_disturbs_nobody():
    driver = Driver(backend("a", vram=6), backend("b", vram=11), gpus=TEN).with_resident("a")
    lease = driver.request("a", 1.0)
    refused = driver.request("b", 2.0)
    assert isinstance(refused.error, DoesNotFit)
    assert refused.error.status == 422
    assert driver.steps(2.0) == []
    assert driver.state("a") == "ready"
    assert list(driver.core.slots["a"].holders) == [lease]
    driver.sound()


def test_a_swap_is_credited_with_the_memory_of_those_it_puts_out():
    driver = Driver(backend("a", vram=8), backend("b", vram=9), gpus=TEN).with_resident("a")
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]


def test_nobody_is_put_out_for_a_model_that_does_not_fit_beside_a_pinned_one():
    pinned, small, large = backend("p", vram=6, pin=True), backend("s", vram=4), backend("l", vram=5)
    driver = Driver(pinned, small, large, gpus=TEN).with_resident("p").with_resident("s")
    assert "beside the pinned p" in driver.request("l", 1.0).error.message
    assert driver.steps(1.0) == []


def test_a_line_that_a_pinned_load_shut_out_is_refused_and_blocks_nobody():
    pinned, small, large = backend("p", vram=6, pin=True), backend("s", vram=4), backend("l", vram=5)
    driver = Driver(pinned, small, large, gpus=TEN, policy=PinnedFirst())
    shut_out = driver.request("l", 0.0)
    driver.request("p", 1.0)
    assert driver.steps(1.0) == ["load p"]
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
    driver.request("p", 1.0)
    assert driver.steps(1.0) == ["load p"]
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


# Memory, replicas, several GPUs


def test_models_with_declared_memory_are_resident_together_as_long_as_they_fit():
    driver = Driver(*(backend(name, vram=4) for name in "abc"), gpus=TEN)
    driver.with_resident("a", 0.0).with_resident("b", 1.0)
    assert driver.states() == {"a": "ready", "b": "ready", "c": "stopped"}
    driver.request("c", 2.0)
    assert driver.steps(2.0) == ["evict a"]  # used longest ago
    driver.core.evicted("a", 3.0)
    assert driver.steps(3.0) == ["load c"]
    driver.core.loaded("c", 4.0)
    driver.sound()


def test_the_idle_one_of_two_residents_is_put_out():
    driver = Driver(*(backend(name, vram=5) for name in "abc"), gpus=TEN)
    driver.with_resident("a", 0.0).with_resident("b", 1.0)
    driver.request("a", 2.0)
    driver.core.release(driver.request("b", 3.0), 4.0)
    driver.request("c", 5.0)
    assert driver.steps(5.0) == ["evict b"]


def test_a_model_without_declared_memory_needs_the_whole_gpu():
    driver = Driver(backend("a", vram=1), B, gpus=TEN).with_resident("a")
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]


def test_a_model_that_needs_no_gpu_is_loaded_beside_everything():
    cpu = Backend("cpu", "cpu")
    assert [name for name, _ in gpu_groups([A, cpu, B])] == ["no-gpu:cpu", "0"]
    driver = Driver(cpu).with_resident("cpu")
    assert driver.request("cpu", 1.0).backend == "cpu"


def test_replicas_share_the_load_and_any_of_them_serves_the_line():
    driver = Driver(backend("r0", "0", model="m"), backend("r1", "1", model="m"))
    for name in ("r0", "r1"):
        driver.core.adopt(name, 0.0)
    assert [driver.request("m", 1.0).backend for _ in range(4)] == ["r0", "r1", "r0", "r1"]


# Another replica of a busy model. Nothing is known of loads here, so one is taken to last 10 s.


def busy(*more, requests=3, **settings):
    """r0 is resident and has some requests, since moment 0; r1 could be loaded on GPU 1."""
    replicas = backend("r0", "0", model="m"), backend("r1", "1", model="m")
    driver = Driver(*replicas, *more, **settings)
    driver.core.adopt("r0", 0.0)
    held = [driver.request("m", 0.0) for _ in range(requests)]
    return driver, held


def test_another_replica_is_loaded_once_the_waiting_have_waited_together_for_a_load():
    driver, _ = busy()
    assert driver.steps(0.0) == []
    assert driver.until == 5.0  # two wait behind the first
    assert driver.steps(5.0) == ["load r1"]
    assert driver.log[-1].cause == Cause("replicas_busy", waiting=2)
    driver.core.loaded("r1", 15.0)
    assert driver.request("m", 15.0).backend == "r1"
    assert driver.steps(15.0) == []
    driver.sound()


def test_a_request_that_waits_behind_nobody_loads_no_other_replica():
    driver, _ = busy(requests=1)
    assert driver.steps(0.0) == []
    assert driver.until == inf
    assert driver.steps(1000.0) == []


def test_requests_that_are_answered_do_not_wait():
    driver, held = busy()
    for ticket in held[:2]:
        driver.core.in_flight("m").first_byte(ticket)
    assert driver.steps(100.0) == []
    driver.core.release(held[0], 100.0)
    assert driver.steps(100.0) == []


def test_a_request_that_begins_to_wait_asks_for_the_next_step():
    driver, _ = busy(requests=1)
    assert driver.core.request(Ticket(8, "m", 1.0), 1.0)
    assert driver.steps(1.0) == []
    assert driver.until == 11.0


def test_no_backend_with_requests_is_put_out_for_another_replica():
    driver, held = busy(backend("b", "1"))
    driver.core.adopt("b", 0.0)
    other = driver.request("b", 0.0)
    assert driver.steps(1000.0) == []
    driver.core.release(other, 1000.0)
    assert driver.steps(1000.0) == ["evict b"]
    driver.core.evicted("b", 1001.0)
    for ticket in held:
        driver.core.release(ticket, 1001.0)
    assert driver.steps(1001.0) == ["load r1"]  # what is begun is finished


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
    driver.core.evicted("s", 6.0)
    assert driver.steps(6.0) == []
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
    driver.request("b", 1000.0)
    assert driver.steps(1000.0) == ["load b"]
    driver.core.loaded("b", 1010.0)
    assert driver.steps(1010.0) == []


def test_a_policy_may_ask_for_another_replica_itself():
    mine = Cause("policy_text", detail="mine")

    class AtOnce:
        def decide(self, seen):
            return SwapTo(seen.spills[0].model, mine) if seen.spills else Stay()

    driver, _ = busy(policy=AtOnce())
    assert driver.steps(0.0) == ["load r1"]
    assert driver.log[-1].cause == mine


def test_the_replica_that_puts_nobody_out_is_loaded():
    driver = Driver(backend("r0", "0", model="m"), backend("r1", "1", model="m"), backend("a", "0"))
    driver.core.adopt("a", 0.0)
    driver.request("m", 1.0)
    assert driver.steps(1.0) == ["load r1"]
    driver.core.load_failed("r1", 2.0, LoadError("no"))
    assert driver.core.queues["m"]  # the other one can still serve it
    assert driver.steps(2.0) == ["evict a"]


def test_an_overdue_line_is_overtaken_on_no_gpu_that_one_of_its_replicas_could_use():
    replicas = backend("r0", "0", model="m"), backend("r1", "1", "2", model="m")
    singles = backend("a", "1"), backend("b", "1"), backend("c", "2"), backend("d", "2")
    driver = Driver(*replicas, *singles, max_wait=10.0)
    for name in ("a", "c"):
        driver.core.adopt(name, 0.0)
    driver.request("b", 0.5)
    assert driver.steps(0.5) == ["evict a"]
    driver.request("m", 1.0)
    assert driver.steps(1.0) == ["load r0"]
    driver.core.load_failed("r0", 2.0, LoadError("no"))
    assert driver.steps(2.0) == []  # GPU 1 is in a swap
    assert driver.steps(8.0) == ["load r0"]
    driver.core.load_failed("r0", 9.0, LoadError("no"))
    driver.request("d", 12.5)
    assert driver.steps(12.5) == []  # GPU 2 is kept for r1
    driver.core.evicted("a", 13.0)
    assert driver.steps(13.0) == ["load b"]


def test_two_gpus_of_a_group_swap_side_by_side():
    pair = backend("t", "0", "1")
    driver = Driver(backend("a", "0"), backend("b", "0"), backend("c", "1"), backend("d", "1"), pair)
    driver.core.adopt("a", 0.0)
    driver.core.adopt("c", 0.0)
    driver.request("b", 1.0)
    driver.request("d", 1.0)
    assert driver.steps(1.0) == ["evict a", "evict c"]
    assert driver.request("d", 1.5).settled is False
    driver.core.evicted("c", 2.0)
    assert driver.steps(2.0) == ["load d"]
    driver.core.loaded("d", 3.0)
    assert driver.request("d", 3.5).backend == "d"
    assert driver.state("a") == "evicting"


def test_a_set_over_two_gpus_puts_both_residents_out_and_back():
    pair = backend("t", "0", "1")
    driver = Driver(backend("a", "0"), backend("b", "1"), pair)
    driver.core.adopt("a", 0.0)
    driver.core.adopt("b", 0.0)
    driver.request("t", 1.0)
    assert driver.steps(1.0) == ["evict a", "evict b"]
    driver.core.evicted("a", 2.0)
    assert driver.steps(2.0) == []
    driver.core.evicted("b", 3.0)
    assert driver.steps(3.0) == ["load t"]
    driver.request("b", 4.0)
    assert driver.steps(4.0) == []
    driver.core.loaded("t", 5.0)
    driver.core.release(next(iter(driver.core.slots["t"].holders)), 6.0)
    assert driver.steps(6.0) == ["evict t"]
    driver.core.evicted("t", 7.0)
    assert driver.steps(7.0) == ["load b"]
    driver.core.loaded("b", 8.0)
    driver.sound()


def test_an_overdue_set_over_two_gpus_is_not_overtaken_by_younger_singles():
    singles = [backend("a", "0"), backend("b", "0"), backend("c", "1"), backend("d", "1")]
    driver = Driver(*singles, backend("t", "0", "1"), max_wait=10.0)
    driver.core.adopt("a", 0.0)
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.request("t", 2.0)
    assert driver.steps(2.0) == []  # GPU 0 is in a swap
    driver.request("c", 13.0)
    assert driver.steps(13.0) == []  # GPU 1 is kept for t
    driver.core.evicted("a", 14.0)
    assert driver.steps(14.0) == ["load b"]
    driver.core.loaded("b", 15.0)
    assert driver.steps(15.0) == []
    assert driver.state("b") == "draining"
    assert drains(driver.core.state.swaps)["b"] == ("t", 45.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_set_and_singles_under_constant_load_share_two_gpus_for_an_hour(policy):
    backends = (backend("a", "0"), backend("b", "1"), backend("t", "0", "1"))
    config = Config(backends=backends, policy=policy, max_wait=60.0, drain_timeout=30.0)
    trace = [Arrival(n / 2, "abt"[n % 3], 1.0 + n % 7) for n in range(7200)]
    log = simulate(config, trace, Engines({"a": 8.0, "b": 5.0, "t": 20.0}))
    assert check(log, config) == []
    waits = [event.seconds for event in log if event.kind == "leased"]
    assert len(waits) == 7200
    # At most: max_wait, what is under way, and a swap each for the lines that are older.
    assert max(waits) <= 60.0 + 3 * (30.0 + 1.0 + 20.0)


def test_one_request_under_endless_traffic_for_the_resident_is_served_in_time():
    for policy in (Never(), build_policy("eager"), DEBOUNCE):
        driver = Driver(A, B, policy=policy, max_wait=60.0, drain_timeout=30.0)
        driver.core.adopt("a", 0.0)
        lone = driver.request("b", 0.25)
        assert served(driver, lone, Engines({"b": 10.0})) <= 60.0 + 30.0 + 1.0 + 10.0


def served(driver, lone, engines):
    """Until ``lone`` is leased: a request for "a" twice a second that holds its lease for ever."""
    due, now = [], 0.25
    while not lone.settled:
        while not isinstance(step := driver.core.next_step(now), Wait):
            due.append((now + engines(step, 0).seconds, step))
        moments = [step.until, (now // 0.5 + 1) * 0.5, *(moment for moment, _ in due)]
        now = min(moments)
        for moment, done in [pair for pair in due if pair[0] == now]:
            due.remove((moment, done))
            (driver.core.loaded if isinstance(done, Load) else driver.core.evicted)(done.backend, now)
        if now % 0.5 == 0:
            driver.request("a", now)
        assert now < 1000.0
    return now - lone.since


class Loads:
    """A policy that loads one model when there is room and does nothing else."""

    def __init__(self, model):
        self._model = model

    def decide(self, seen):
        mine = [line for line in seen.queues if line.model == self._model and not line.evicts]
        return SwapTo(self._model) if mine else Stay()


# A replica that says nothing


def silent(*answering):
    """Both replicas were last heard of at 0.0, when four requests came; a has the first and the third."""
    driver = Driver(
        *(backend(name, gpu, model="m") for name, gpu in (("a", "0"), ("b", "1"))),
        routing="load_balance",
        routing_mode="full",
    )
    for name in "ab":
        assert driver.core.adopt(name, 0.0)
    tickets = [driver.request("m", 0.0, work=Work(tokens=1000)) for _ in range(4)]
    assert [ticket.backend for ticket in tickets] == ["a", "b", "a", "b"]
    for number in answering:
        driver.core.in_flight("m").first_byte(tickets[number])
    return driver, tickets


def test_who_waits_at_a_replica_leaves_when_it_turns_stale_and_who_is_answered_stays():
    driver, (first, _, third, _) = silent(0)
    driver.core.in_flight("m").observe("b", EngineLoad(2, 0, None), 60.0)
    driver.core.silent("a", 60.9)
    assert driver.core.state.cut == []
    driver.core.silent("a", 61.0)
    assert driver.core.state.cut == [third]
    assert (first.severed, third.severed) == (None, Severance(Cause("stale", backend="a")))
    assert [e.cause for e in driver.log if e.kind == "released"] == [Cause("stale", backend="a")]
    assert driver.request("m", 61.0).backend == "b"


def test_who_waits_stays_where_no_replica_says_anything():
    driver, _ = silent()
    driver.core.silent("a", 100.0)
    driver.core.silent("b", 100.0)
    assert driver.core.state.cut == []


# The stages of a model: prefill and decode

P, D = (backend(kind, gpu, model="m", infer_type=kind) for kind, gpu in (("prefill", "0"), ("decode", "1")))


def staged(*others):
    """Both stages are resident at 2.0: the first request has brought the second one too."""
    driver = Driver(P, D, *others)
    driver.request("m", 0.0, takes_lease=False)
    assert driver.steps(0.0) == ["load prefill"]
    driver.core.loaded("prefill", 1.0)
    assert driver.steps(1.0) == ["load decode"]
    driver.core.loaded("decode", 2.0)
    assert driver.steps(2.0) == []
    return driver


def test_a_stage_that_died_is_loaded_again_once_its_model_is_asked():
    driver = staged()
    answered = Ticket(8, "m", 2.5, prefill=Ticket(7, "m", 2.5))
    driver.core.request(answered, 2.5)
    driver.core.release(answered.prefill, 2.5)
    driver.core.died("prefill", 3.0, "killed")
    assert driver.steps(3.0) == []
    assert driver.core.request(Ticket(9, "m", 4.0), 4.0)  # the next step is to be asked for
    assert driver.steps(4.0) == ["load prefill"]
    assert driver.log[-1].cause == Cause("missing_stage")
    assert not driver.core.request(Ticket(10, "m", 5.0), 5.0)
    driver.sound()


def test_who_has_had_work_stays_when_a_stage_could_have_its_place():
    driver = staged(B)
    driver.request("b", 3.0)
    assert driver.steps(3.0) == ["evict prefill"]
    driver.core.evicted("prefill", 3.0)
    assert driver.steps(3.0) == ["load b"]
    driver.core.loaded("b", 4.0)
    driver.request("m", 5.0)
    assert driver.steps(5.0) == []
    assert driver.states() == {"prefill": "stopped", "decode": "ready", "b": "ready"}
    driver.sound()


def test_a_stage_that_could_not_be_loaded_cools_down():
    driver = staged()
    driver.core.died("prefill", 3.0, "killed")
    driver.request("m", 4.0)
    assert driver.steps(4.0) == []
    driver.request("m", 8.0)
    assert driver.steps(8.0) == ["load prefill"]
    driver.core.load_failed("prefill", 9.0, LoadError("no"))
    for at, steps in ((10.0, []), (18.0, []), (19.0, ["load prefill"])):
        driver.request("m", at)
        assert driver.steps(at) == steps


# Backends that take either stage

SPEED = Profile(
    ttft=((0.0, 0.0), (8192.0, 4000.0)),
    tpot=(
        (1, ((0.0, 10.0), (8192.0, 10.0))),
        (4, ((0.0, 40.0), (8192.0, 40.0))),
        (8, ((0.0, 80.0), (8192.0, 80.0))),
    ),
)
"""Four answers at once keep slo_adaptive's 42.5 ms, a fifth does not."""


class Either:
    """Backends of one model that take either stage, all resident, and the requests that they have."""

    def __init__(self, count, **settings):
        settings = {
            "model": "m",
            "infer_type": "either",
            "profile": SPEED,
            "routing": "slo_adaptive",
            **settings,
        }
        self.driver = Driver(*[backend(f"e{number}", f"{number}", **settings) for number in range(count)])
        for name in self.driver.core.slots:
            self.driver.core.adopt(name, 0.0)

    def ask(self):
        """A request whose prompt is computed before the next one comes; its ticket and who did what."""
        first = Ticket(next(self.driver.ids), "m", 1.0, work=Work(tokens=1000, infer_type="prefill"))
        ticket = Ticket(next(self.driver.ids), "m", 1.0, work=Work(tokens=1000), prefill=first)
        self.driver.core.request(ticket, 1.0)
        if first.backend:
            self.driver.core.release(first, 1.0)
        return ticket, (first.backend, ticket.backend)


def test_answers_gather_at_one_backend_until_it_is_full_and_prompts_go_to_the_others():
    engines = Either(3)
    found = [engines.ask() for _ in range(5)]
    assert [roles for _, roles in found] == [
        *[("e1", "e0"), ("e2", "e0"), ("e1", "e0"), ("e2", "e0")],
        ("e2", "e1"),  # a fifth answer would be too much for e0
    ]
    engines.driver.core.release(found[4][0], 1.0)
    engines.driver.core.release(found[0][0], 1.0)
    assert [engines.ask()[1] for _ in range(2)] == [("e1", "e0"), ("e1", "e2")]
    engines.driver.sound()


def test_a_request_is_refused_if_every_backend_would_be_disturbed_in_its_answers():
    engines = Either(2)
    assert [engines.ask()[1] for _ in range(4)] == [("e1", "e0")] * 4
    ticket, roles = engines.ask()
    assert roles == (None, None)
    assert isinstance(ticket.error, Overloaded)
    engines.driver.sound()


def test_the_only_backend_that_is_left_does_all_of_a_request():
    engines = Either(2)
    engines.driver.core.died("e1", 1.0, "killed")
    ticket, roles = engines.ask()
    assert roles == (None, "e0")
    assert ticket.work.infer_type == "neutral"
    assert ticket.choice.reason.startswith("predicted_ttft ")


def test_the_only_backend_that_has_a_place_does_all_of_a_request():
    engines = Either(2, concurrency=1)
    assert [engines.ask()[1] for _ in range(2)] == [("e1", "e0"), (None, "e1")]
    ticket, roles = engines.ask()
    assert (roles, ticket.error) == ((None, None), None)
    assert list(engines.driver.core.queues["m"]) == [ticket]


def told(engines):
    """Stage -> what is told of each backend if a request's stages are explained."""
    model = engines.driver.core.state.models["m"]
    found = model.replicas.explain(model.ready, Work(tokens=1000), 1.0, staged=True)
    return {stage: {row["backend"]: row["removed_by"] for row in rows} for stage, rows in found.items()}


def test_what_is_told_of_the_stages_is_what_a_request_would_get():
    engines = Either(2)
    assert told(engines) == {
        "prefill": {"e0": "decode", "e1": ""},
        "decode": {"e0": "", "e1": "adaptive_decode"},
    }
    assert engines.ask()[1] == ("e1", "e0")
    engines.driver.core.died("e1", 1.0, "killed")
    assert told(engines) == {"neutral": {"e0": "", "e1": "stopped"}}


def test_of_two_the_one_with_a_place_is_told_to_do_all_of_a_request():
    engines = Either(2, concurrency=1)
    assert engines.ask()[1] == ("e1", "e0")
    assert told(engines) == {"neutral": {"e0": "full", "e1": ""}}
    assert engines.ask()[1] == (None, "e1")


def test_one_that_died_is_loaded_again_once_its_model_is_asked_so_that_there_are_two():
    engines = Either(3)
    core = engines.driver.core
    core.died("e1", 1.0, "killed")
    core.request(Ticket(90, "m", 1.0), 1.0)
    assert engines.driver.steps(1.0) == []  # two are left
    core.died("e0", 1.0, "killed")
    assert core.request(Ticket(91, "m", 2.0), 2.0)
    assert engines.driver.steps(2.0) == ["load e1"]
    assert engines.driver.log[-1].cause == Cause("missing_stage")
    core.request(Ticket(92, "m", 3.0), 3.0)
    assert engines.driver.steps(3.0) == []
    engines.driver.sound()


def test_one_that_died_is_loaded_again_also_if_the_other_may_take_no_more():
    engines = Either(2)
    for _ in range(4):
        engines.ask()
    engines.driver.core.died("e1", 1.0, "killed")
    ticket = Ticket(90, "m", 2.0, work=Work(tokens=1000))
    assert engines.driver.core.request(ticket, 2.0)
    assert isinstance(ticket.error, Overloaded)
    assert engines.driver.steps(2.0) == ["load e1"]


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
    driver.core.release(first, 5.0)
    assert driver.steps(5.0) == ["evict a"]


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
    driver.request("a", 30.0)
    assert driver.steps(30.0) == ["load a"]
    driver.core.loaded("a", 31.0)
    assert (slot.ttl, slot in driver.core.state.idlers) == (ttl, ttl is not None)
    driver.sound()


def test_a_model_that_is_kept_for_ever_goes_for_another():
    driver = Driver(backend("a", ttl=10.0), B).with_resident("a")
    lease = driver.request("a", 1.0)
    driver.core.state.keep_alive(driver.core.slots["a"], inf)
    driver.core.release(lease, 2.0)
    assert (driver.steps(1000.0), driver.until) == ([], inf)
    driver.request("b", 1000.0)
    assert driver.steps(1000.0) == ["evict a"]


def test_a_swap_that_is_held_back_does_not_hide_that_a_model_is_kept_for_a_time_only():
    driver = Driver(A, B, policy=Never(), max_wait=60.0)
    assert driver.core.adopt("a", 0.0)
    lease = driver.request("a", 1.0)
    driver.request("b", 1.0)
    assert driver.steps(1.0) == []
    driver.core.state.keep_alive(driver.core.slots["a"], 5.0)
    assert driver.core.release(lease, 3.0)
    assert (driver.steps(3.0), driver.until) == ([], 8.0)
    assert driver.steps(8.0) == ["evict a"]


def test_each_of_two_co_residents_has_its_own_ttl():
    driver = Driver(backend("a", vram=5, ttl=10.0), backend("b", vram=5, ttl=30.0), gpus=TEN)
    driver.with_resident("a").with_resident("b")
    assert driver.until == 10.0
    assert (driver.steps(10.0), driver.until) == (["evict a"], 30.0)
    driver.core.evicted("a", 11.0)
    assert driver.steps(30.0) == ["evict b"]


def test_when_the_ttl_of_the_resident_ends_the_line_that_the_policy_holds_back_has_room_and_goes():
    patient = build_policy("debounce", {"quiet": 50.0, "max_hold": 50.0})
    driver = Driver(backend("a", ttl=10.0), B, policy=patient).with_resident("a")
    waiting = driver.request("b", 5.0)
    assert (driver.steps(5.0), driver.until) == ([], 10.0)
    assert driver.steps(10.0) == ["evict a"]
    assert driver.steps(10.0) == []  # the GPU is not free yet
    driver.core.evicted("a", 11.0)
    assert driver.steps(11.0) == ["load b"]
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
    driver.core.evicted("a", at + 1.0)
    assert driver.steps(at + 1.0) == ["load a"]
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
    driver.request("a", 0.0, takes_lease=False)
    driver.steps(0.0)
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


def test_a_min_residency_holds_nobody_up_who_has_room():
    driver = Driver(backend("a", vram=4, min_residency=100.0), backend("b", vram=4), gpus=TEN)
    driver.with_resident("a")
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["load b"]


def test_another_goes_in_place_of_one_that_may_stay():
    backends = backend("a", vram=5, min_residency=20.0), backend("b", vram=5), backend("c", vram=5)
    driver = Driver(*backends, gpus=TEN).with_resident("a").with_resident("b", 1.0)
    driver.request("c", 2.0)
    assert driver.steps(2.0) == ["evict b"]  # although a was used longer ago


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
    driver.request("b", 2.0)
    assert driver.steps(2.0) == driver.steps(3.0) == []
    (deferred,) = (event for event in driver.log if event.kind == "deferred")
    assert (deferred.seconds, deferred.cause) == (27.0, Cause("min_residency", residents=("a",)))


def test_a_model_that_ran_before_counts_as_resident_for_long():
    watched = Watched()
    driver = Driver(backend("a", min_residency=100.0), B, policy=watched)
    driver.core.adopt("a", 50.0)
    driver.request("b", 51.0)
    assert driver.steps(51.0) == ["evict a"]
    assert [(r.model, r.since, r.last_used) for r in watched.seen[0].residents] == [("a", -inf, 50.0)]


@pytest.mark.parametrize("policy", ["cost_aware", "time_slice"])
def test_no_policy_lets_a_model_that_ran_before_have_its_stay_once_more(policy):
    driver = Driver(A, B, policy=build_policy(policy))
    driver.core.adopt("a", 50.0)
    tickets = [driver.request("b", 51.0) for _ in range(10)]
    assert driver.steps(51.0) == ["evict a"]
    assert not any(ticket.settled for ticket in tickets)


class Watched:
    """Keeps what it saw; swaps to the first line, or never."""

    def __init__(self, *, swaps=True):
        self.swaps = swaps
        self.seen = []

    def decide(self, seen):
        self.seen.append(seen)
        return SwapTo(seen.queues[0].model) if seen.queues and self.swaps else Stay()

    def lines(self):
        """The last that it saw."""
        return next(seen.queues for seen in reversed(self.seen) if seen.queues)


def test_the_policy_is_not_asked_where_there_is_nothing_to_load_and_nothing_to_put_out():
    watched = Watched()
    driver = Driver(A, B, policy=watched)
    assert driver.steps(0.0) == []
    driver.core.adopt("a", 0.0)
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    asked = len(watched.seen)
    driver.request("a", 2.0)
    driver.core.evicted("a", 3.0)
    assert driver.steps(3.0) == ["load b"]
    assert len(watched.seen) == asked == 1
    driver.core.loaded("b", 4.0)
    assert driver.steps(4.0) == []
    assert len(watched.seen) > asked


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
    driver.request("b", 2.0)
    driver.steps(2.0)
    assert [driver.core.release(ticket, 3.0) for ticket in held] == asked


def test_the_end_of_a_lease_asks_the_policy_anyway_where_it_may_change_who_would_go():
    driver = Driver(*(backend(name, vram=4) for name in "abc"), gpus=TEN, policy=Holds(0))
    driver.core.adopt("a", 0.0)
    driver.core.adopt("b", 0.0)
    held = [driver.request("a", 1.0) for _ in range(2)]
    driver.request("c", 2.0)
    driver.steps(2.0)
    assert [driver.core.release(ticket, 3.0) for ticket in held] == [True, True]


# Settings per model: priority and max_wait


def two_lines(policy=None):
    """Lines for low (since 2.0) and high (since 3.0) while c loads, which is ready at 5.0."""
    policy = policy or build_policy("eager")
    driver = Driver(backend("low", priority=-1), backend("high", priority=7), C, policy=policy)
    held = driver.request("c", 1.0)
    assert driver.steps(1.0) == ["load c"]
    driver.request("low", 2.0)
    driver.request("high", 3.0)
    driver.core.loaded("c", 5.0)
    return driver, held


def test_of_two_lines_that_with_the_higher_priority_goes_first():
    driver, held = two_lines()
    driver.steps(5.0)
    driver.core.release(held, 6.0)
    assert driver.steps(6.0) == ["evict c"]
    driver.core.evicted("c", 7.0)
    assert driver.steps(7.0) == ["load high"]


def test_a_policy_sees_the_lines_in_the_order_of_priority_and_those_alike_in_that_of_age():
    watched = Watched(swaps=False)
    driver = Driver(A, B, C, backend("d", priority=1), backend("e", priority=1), policy=watched)
    driver.core.adopt("a", 0.0)
    for moment, model in enumerate("cebd"):
        driver.request(model, float(moment))
    driver.steps(4.0)
    assert [line.model for line in watched.lines()] == ["e", "d", "c", "b"]


def test_an_overdue_line_goes_before_one_with_a_higher_priority():
    driver, held = two_lines(Loads("c"))
    assert driver.steps(61.9) == []
    assert driver.steps(62.0) == []
    assert drains(driver.core.state.swaps) == {"c": ("low", 92.0)}
    assert held.backend == "c"


def test_who_has_the_lowest_priority_is_put_out_even_if_it_was_used_last_and_is_leased():
    backends = backend("a", vram=5, priority=3), backend("b", vram=5, priority=-3), backend("c", vram=5)
    driver = Driver(*backends, gpus=TEN).with_resident("a").with_resident("b", 1.0)
    driver.request("b", 2.0)
    driver.request("c", 3.0)
    driver.steps(3.0)
    assert driver.states() == {"a": "ready", "b": "draining", "c": "stopped"}


def test_a_model_has_the_highest_priority_and_the_shortest_max_wait_of_its_replicas():
    r0 = backend("r0", "0", model="m", priority=2, max_wait=50.0)
    r1 = backend("r1", "1", model="m", priority=9, max_wait=7.0)
    watched = Watched(swaps=False)
    driver = Driver(r0, r1, A, backend("b", "1"), backend("c", "0", priority=5), policy=watched)
    for name in ("a", "b"):
        driver.core.adopt(name, 0.0)
    driver.request("c", 1.0)
    driver.request("m", 2.0)
    driver.steps(2.0)
    assert [(line.model, line.max_wait) for line in watched.lines()] == [("m", 7.0), ("c", 60.0)]
    assert driver.steps(9.0) == ["evict a"]


@pytest.mark.parametrize("own", [5.0, 200.0])
def test_a_line_is_overdue_by_the_max_wait_of_its_own_model(own):
    driver = Driver(A, backend("b", max_wait=own), policy=Never(), max_wait=60.0)
    driver.core.adopt("a", 0.0)
    driver.request("b", 1.0)
    assert (driver.steps(1.0), driver.until) == ([], 1.0 + own)
    assert driver.steps(driver.until - 0.1) == []
    assert driver.steps(1.0 + own) == ["evict a"]


def test_a_younger_line_that_is_overdue_goes_before_an_older_one_that_is_not():
    driver = Driver(A, backend("b", max_wait=500.0), backend("c", max_wait=5.0), policy=Never())
    driver.core.adopt("a", 0.0)
    driver.request("b", 1.0)
    driver.request("c", 2.0)
    assert driver.steps(2.0) == []
    assert driver.steps(7.0) == ["evict a"]
    driver.core.evicted("a", 8.0)
    assert driver.steps(8.0) == ["load c"]


def test_no_line_that_may_still_wait_takes_a_gpu_that_is_kept_for_an_overdue_one():
    singles = backend("a", "0"), backend("b", "0"), backend("c", "1", max_wait=500.0), backend("d", "1")
    patient = build_policy("debounce", {"quiet": 15.0, "max_hold": 15.0})
    driver = Driver(*singles, backend("t", "0", "1", max_wait=10.0), policy=patient, max_wait=60.0)
    for name in ("a", "d"):
        driver.core.adopt(name, 0.0)
    driver.request("b", 0.0)
    driver.request("c", 1.0)
    driver.request("t", 6.0)
    assert driver.steps(6.0) == []
    assert driver.steps(15.0) == ["evict a"]  # for b
    assert driver.steps(16.0) == []  # GPU 1 is kept for t, though c is older and was held for long enough
    driver.core.evicted("a", 17.0)
    assert driver.steps(17.0) == ["load b"]
    driver.core.loaded("b", 18.0)
    assert driver.steps(18.0) == ["evict d"]
    assert drains(driver.core.state.swaps)["b"] == ("t", 48.0)


# What swaps cost


def learned(driver):
    return {(c.source, c.target): (c.evict_seconds, c.load_seconds, c.swaps) for c in driver.costs}


def test_what_a_swap_cost_is_its_eviction_and_its_load_without_the_drain_and_what_the_policy_waited_for():
    driver = Driver(A, B, policy=DEBOUNCE).with_resident("a")
    lease = driver.request("a", 0.5)
    driver.request("b", 1.0)
    for moment in (1.0, 3.0):  # deferred, then a drains
        assert driver.steps(moment) == []
    driver.core.release(lease, 9.0)
    assert driver.steps(9.0) == ["evict a"]
    driver.core.evicted("a", 11.0)
    assert driver.steps(11.0) == ["load b"]
    driver.core.loaded("b", 17.0)
    assert learned(driver) == {("", "a"): (0.0, 0.0, 1), ("a", "b"): (2.0, 6.0, 1)}


def test_each_of_several_victims_goes_once_it_is_idle_and_their_eviction_counts_from_the_last_drain():
    small = [backend(name, vram=5) for name in "ab"]
    driver = Driver(*small, backend("c", vram=10), gpus=TEN).with_resident("a").with_resident("b")
    lease = driver.request("b", 1.0)
    driver.request("c", 2.0)
    assert driver.steps(2.0) == ["evict a"]
    assert driver.state("b") == "draining"
    driver.core.evicted("a", 3.0)
    assert driver.steps(3.0) == []
    driver.core.release(lease, 5.0)
    assert driver.steps(5.0) == ["evict b"]
    driver.core.evicted("b", 6.5)
    assert driver.steps(6.5) == ["load c"]
    driver.core.loaded("c", 10.5)
    assert learned(driver)["a+b", "c"] == (1.5, 4.0, 1)


def test_a_swap_that_failed_teaches_nothing():
    driver = Driver(A, B).with_resident("a")
    driver.request("b", 1.0)
    driver.steps(1.0)
    driver.core.evicted("a", 2.0)
    driver.steps(2.0)
    driver.core.load_failed("b", 3.0, LoadError("no"))
    assert set(learned(driver)) == {("", "a")}
    driver.core.adopt("a", 4.0)
    assert set(learned(driver)) == {("", "a")}


def test_a_line_is_seen_with_what_its_own_swap_would_cost_first_as_an_estimate_and_then_as_it_was():
    watched = Watched()
    driver = Driver(backend("a", engine="vllm"), B, policy=watched)
    moment, seen = 0.0, []
    for name, load in (("a", 30.0), ("b", 8.0), ("a", 20.0), ("b", 4.0)):
        lease = driver.request(name, moment)
        for step in driver.steps(moment):
            if step.startswith("evict"):
                moment += 2.0
                driver.core.evicted(step.removeprefix("evict "), moment)
                assert driver.steps(moment) == [f"load {name}"]
        (line,) = watched.lines()
        seen.append((line.evicts, line.evict_seconds, line.load_seconds, line.learned))
        moment += load
        driver.core.loaded(name, moment)
        driver.core.release(lease, moment)
    assert seen == [
        ((), 0.0, 60.0, False),
        (("a",), 1.0, 10.0, False),
        (("b",), 1.0, 30.0, False),
        (("a",), 2.0, 8.0, True),
    ]


def test_the_policy_sees_how_often_models_are_asked_for_and_how_long_their_answers_and_pauses_take():
    watched = Watched(swaps=False)
    driver = Driver(backend("a", "0"), backend("b", "0"), policy=watched)
    driver.core.adopt("a", 0.0)
    a, b = Demand(), Demand()
    for begin, end in ((1.0, 3.0), (7.0, 13.0), (14.0, 16.0)):
        pause = begin - max(driver.core.slots["a"].last_used, 0.0)
        driver.core.release(driver.request("a", begin), end)
        a.arrived(begin)
        a.returned(pause, begin)
        a.served(end - begin)
        a.idle(end)
    held = [driver.request("a", moment) for moment in (17.0, 18.0)]
    a.arrived(17.0)
    a.returned(1.0)
    a.arrived(18.0)  # while the first still runs: no pause
    for moment in (20.0, 21.0, 23.0):
        driver.request("b", moment)
        b.arrived(moment)
    driver.steps(24.0)
    (resident,), (line,) = watched.seen[-1].residents, watched.lines()
    assert (resident.leases, resident.last_used) == (len(held), 18.0)
    assert (resident.rate, resident.growth) == (a.rate(24.0), a.growth(24.0))
    assert (resident.pause_seconds, resident.service_seconds) == (a.pause_seconds, a.service_seconds)
    assert (line.waiting, line.oldest, line.newest) == (3, 20.0, 23.0)
    assert (line.growth, line.service_seconds) == (b.growth(24.0, 3, 4.0), 0.0)
    assert resident.pause_seconds > 0
    assert resident.service_seconds > 2.0


def test_a_line_that_was_admitted_says_how_fast_the_next_one_will_grow():
    watched = Watched()
    driver = Driver(A, B, policy=watched).with_resident("a")
    for moment in (1.0, 1.5, 2.0, 2.5):
        driver.request("b", moment)
        driver.steps(moment)
    driver.core.evicted("a", 3.0)
    driver.steps(3.0)
    driver.core.loaded("b", 6.0)
    b = Demand()
    for moment in (1.0, 1.5, 2.0, 2.5):
        b.arrived(moment)
    b.admitted(4, 5.0)
    driver.steps(7.0)
    assert watched.seen[-1].residents[0].growth == b.growth(7.0)


def test_the_policy_sees_swaps_on_other_gpus_and_how_far_they_are():
    watched = Watched()
    driver = Driver(A, B, backend("c", "1"), backend("d", "1"), backend("t", "0", "1"), policy=watched)
    driver.core.adopt("a", 0.0)
    driver.core.adopt("c", 0.0)
    driver.request("a", 0.5)
    driver.request("b", 1.0)
    for moment, fact in (
        (1.0, lambda: None),
        (2.0, lambda: driver.core.release(next(iter(driver.core.slots["a"].holders)), 2.0)),
        (3.0, lambda: driver.core.evicted("a", 3.0)),
        (4.0, lambda: driver.core.loaded("b", 4.0)),
    ):
        fact()
        driver.steps(moment)
    seen = [(s.model, s.evicts, s.state, s.since) for each in watched.seen for s in each.swapping]
    assert sorted(set(seen), key=seen.index) == [
        ("b", ("a",), "draining", 1.0),
        ("b", ("a",), "evicting", 2.0),
        ("b", ("a",), "loading", 3.0),
    ]


# Orders from outside


def test_an_unload_drains_and_leaves_the_gpu_empty():
    driver = Driver(A, B).with_resident("a")
    lease = driver.request("a", 1.0)
    assert driver.core.unload("a", 2.0)
    assert driver.steps(2.0) == []
    driver.core.release(lease, 3.0)
    assert driver.steps(3.0) == ["evict a"]
    driver.core.evicted("a", 4.0)
    assert driver.steps(4.0) == []
    assert not driver.core.unload("a", 5.0)
    assert driver.state("a") == "stopped"
    driver.sound()


def test_nothing_is_begun_before_it_is_known_what_runs_already():
    driver = Driver(A, B)
    for name in "ab":
        driver.core.expected(name)
    first, other = driver.request("a", 1.0), driver.request("b", 1.0)
    assert driver.steps(1.0) == []
    assert driver.until == inf
    assert driver.core.adopt("a", 2.0)
    assert driver.core.state.woken == [first]
    assert first.backend == "a"
    assert driver.request("a", 3.0).backend == "a"
    driver.core.release(first, 3.0)
    assert driver.steps(100.0) == []  # b may hold the GPU too: it is still being looked at, or stopped
    assert driver.state("a") == "ready"
    driver.core.looked_at("b")
    assert driver.steps(101.0) == []
    assert driver.state("a") == "draining"
    assert other.backend is None


def test_what_was_looked_at_and_not_adopted_is_loaded():
    driver = Driver(A, B)
    driver.core.expected("a")
    waits = driver.request("a", 1.0)
    assert driver.steps(1.0) == []
    assert waits.error is None
    driver.core.looked_at("a")
    assert driver.steps(2.0) == ["load a"]


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


# The table


def reached(state):
    """A GPU group whose backend a is in ``state``."""
    one = backend("a", evict_to=("sleep",), demote_after=1.5)
    if state == "stopped":
        return Driver(one, B)
    if state in ("loading", "cancelling"):
        driver = Driver(one, B)
        driver.request("a", 0.0)
        driver.steps(0.0)
        if state == "cancelling":
            driver.core.unload("a", 0.0)
            driver.steps(0.0)
        return driver
    driver = Driver(one, B).with_resident("a")
    if state == "ready":
        return driver
    if state == "draining":
        driver.request("a", 0.0)
        driver.request("b", 0.0)
        driver.steps(0.0)
        return driver
    driver.core.unload("a", 0.0)
    driver.steps(0.0)
    if state in ("standby", "demoting"):
        driver.core.evicted("a", 0.0, {"0": 0}, "sleep")
        assert state == "standby" or driver.steps(1.5) == ["demote a"]
    elif state == "stuck":
        driver.core.evict_failed("a", 0.0, "no")
    return driver


FACTS = {
    "loaded": lambda core, at: core.loaded("a", at),
    "load_failed": lambda core, at: core.load_failed("a", at, LoadError("no")),
    "cancelled": lambda core, at: core.load_cancelled("a", at),
    "stopped": lambda core, at: core.evicted("a", at),
    "standby": lambda core, at: core.evicted("a", at, {"0": 0}, "sleep"),
    "evict_failed": lambda core, at: core.evict_failed("a", at, "no"),
    "died": lambda core, at: core.died("a", at, "killed"),
    "adopt": lambda core, at: core.adopt("a", at),
    "adopt_standby": lambda core, at: core.adopt_standby("a", at, "sleep", {"0": 0}),
}
STATES = ("stopped", "loading", "cancelling", "ready", "draining", "evicting", "standby", "demoting", "stuck")


@pytest.mark.parametrize("state", STATES)
def test_every_state_can_be_reached(state):
    assert reached(state).state("a") == state


@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.parametrize("state", STATES)
def test_a_fact_moves_a_backend_as_the_table_says_or_changes_nothing(state, fact):
    driver = reached(state)
    before, log = repr(driver.core), list(driver.log)
    same = {("cancelling", "load_failed"): "cancelled", ("loading", "cancelled"): "load_failed"}
    known = same.get((state, fact), fact)
    after = TRANSITIONS.get((state, known))
    if after:
        FACTS[fact](driver.core, 1.0)
        if state == "cancelling" and after == "ready":  # it was unloaded by hand
            assert [event.kind for event in driver.log[len(log) :]] == ["ready", "draining"]
        else:
            assert driver.state("a") == after
    elif fact == "died":  # those who load or stop it report that instead
        FACTS[fact](driver.core, 1.0)
        assert (repr(driver.core), driver.log) == (before, log)
    else:
        with pytest.raises(ValueError, match=f"a is {state}"):
            FACTS[fact](driver.core, 1.0)
        assert (repr(driver.core), driver.log) == (before, log)


QUESTIONS = {
    ("stopped", "load"): lambda driver: driver.request("a", 1.0),
    ("standby", "load"): lambda driver: driver.request("a", 1.0),
    ("loading", "cancel"): lambda driver: driver.core.unload("a", 1.0),
    ("ready", "drain"): lambda driver: (driver.request("a", 1.0), driver.request("b", 1.0)),
    ("draining", "reprieve"): lambda driver: driver.core.give_up(next(iter(driver.core.queues["b"])), 1.0),
    ("draining", "evict"): lambda driver: driver.core.release(
        next(iter(driver.core.slots["a"].holders)), 1.0
    ),
    ("stuck", "evict"): lambda driver: None,
    ("standby", "demote"): lambda driver: None,
}


@pytest.mark.parametrize("edge", QUESTIONS)
def test_the_question_moves_a_backend_as_the_table_says(edge):
    state, _ = edge
    driver = reached(state)
    QUESTIONS[edge](driver)
    driver.core.next_step(10.0)
    assert driver.state("a") == TRANSITIONS[edge]


def test_facts_and_questions_are_the_whole_table():
    facts = {(state, fact) for state in STATES for fact in FACTS}
    of_hosts = {(state, "gone") for state in STATES} | {("stopped", "unfit")}  # test_hosts.py
    assert set(TRANSITIONS) <= facts | set(QUESTIONS) | of_hosts


def test_an_event_of_a_backend_is_named_after_the_state_it_enters():
    driver = reached("draining")
    assert {e.kind for e in driver.log if e.backend} - {"leased"} == {"loading", "ready", "draining"}


# Standby levels


def evicted(way):
    """``a`` has been evicted for ``b``, which then ran; it rests by ``way``."""
    driver = Driver(backend("a", evict_to=("sleep",)), B).with_resident("a")
    driver.request("b", 1.0)
    assert driver.core.next_step(1.0) == Evict("a", "sleep")
    driver.core.evicted("a", 2.0, {"0": 0}, way)
    assert driver.steps(2.0) == ["load b"]
    driver.core.loaded("b", 3.0)
    driver.core.release(next(iter(driver.core.slots["b"].holders)), 3.0)
    return driver


@pytest.mark.parametrize(("way", "state"), [("sleep", "standby"), ("stop", "stopped")])
def test_a_backend_is_brought_back_by_the_way_it_really_went(way, state):
    driver = evicted(way)
    assert driver.state("a") == state
    driver.request("a", 4.0)
    assert driver.steps(4.0) == ["evict b"]
    driver.core.evicted("b", 5.0)
    assert driver.core.next_step(5.0) == Load("a", way)


def test_who_rested_before_we_came_is_brought_back_by_the_way_it_rests():
    driver = Driver(backend("a", evict_to=("sleep",)), B)
    assert driver.core.adopt("b", 0.0)
    assert driver.core.adopt_standby("a", 0.0, "sleep-2", {"0": 5})
    driver.request("a", 1.0)
    assert driver.steps(1.0) == ["evict b"]
    driver.core.evicted("b", 2.0)
    assert driver.core.next_step(2.0) == Load("a", "sleep-2")


def test_a_sleeper_whose_remains_do_not_fit_beside_those_who_run_is_not_taken_over():
    small = backend("a", vram=6), backend("b", vram=6), backend("c", vram=3)
    driver = Driver(*small, gpus=TEN)
    assert driver.core.adopt("a", 0.0)
    assert not driver.core.adopt_standby("b", 0.0, "sleep", {"0": 5})
    assert driver.core.adopt_standby("b", 0.0, "sleep", {"0": 3})
    assert not driver.core.adopt_standby("c", 0.0, "sleep", {"0": 2})


def test_who_died_while_standby_is_started_from_nothing():
    driver = evicted("sleep")
    driver.core.died("a", 3.5, "killed")
    driver.request("a", 4.0)
    driver.steps(4.0)
    driver.core.evicted("b", 5.0)
    assert driver.core.next_step(5.0) == Load("a", "stop")


def test_who_could_not_be_put_out_is_stopped_and_not_asked_to_sleep_again():
    driver = Driver(backend("a", evict_to=("sleep",)), B).with_resident("a")
    driver.request("b", 1.0)
    driver.steps(1.0)
    driver.core.evict_failed("a", 2.0, "does not stop")
    assert driver.core.next_step(10.0) == Evict("a", "stop")


@pytest.mark.parametrize("how", ["sleep", "stop"])
def test_a_swap_is_learned_under_the_way_that_really_brought_the_model_back(how):
    costs = Costs()
    driver = Driver(backend("a", evict_to=("sleep",)), B)
    driver.core.state.costs = costs
    driver.request("a", 0.0)
    driver.steps(0.0)
    driver.core.loaded("a", 7.0, how)
    assert [(cost.target, cost.way, cost.load_seconds) for cost in costs] == [("a", how, 7.0)]


def test_what_a_standby_model_costs_to_bring_back_is_what_its_way_costs():
    driver = evicted("sleep")
    driver.core.state.costs.learn("b", "a", "sleep", 1.0, 0.5)
    driver.core.state.costs.learn("b", "a", "stop", 1.0, 60.0)
    driver.request("a", 4.0)
    state = driver.core.state
    (line,) = snapshot(state, 4.0, {"a": plan(state, state.models["a"], set(), 4.0)}).queues
    assert line.evicts == ("b",)
    assert line.load_seconds == 0.5


def arrivals(driver, model):
    """How often a model was asked for, as far as its demand knows at the moment of the last arrival."""
    return round(driver.core.state.models[model].demand._weight)


def test_a_request_that_is_sent_again_or_refused_is_no_further_demand():
    driver = Driver(A, B).with_resident("a")
    before = arrivals(driver, "a")
    driver.request("a", 1.0)
    assert arrivals(driver, "a") == before + 1
    for at, about in ((1.5, {"resent": True}), (2.0, {"crashes": (Crash("a", "died"), Crash("a", "died"))})):
        resent = about.pop("resent", False)
        ticket = Ticket(next(driver.ids), "a", at, **about)
        ticket.resent = resent
        driver.core.request(ticket, at)
        assert arrivals(driver, "a") == before + 1
    riding = Ticket(next(driver.ids), "b", 3.0)
    riding.never_swaps = True
    driver.core.request(riding, 3.0)
    assert riding.error
    assert arrivals(driver, "b") == 0
    driver.request("b", 4.0)
    waiting = Ticket(next(driver.ids), "b", 4.5)
    waiting.resent = True
    driver.core.request(waiting, 4.5)
    assert arrivals(driver, "b") == 1


def test_what_a_backend_held_last_is_its_own_when_it_is_chosen_where_a_queue_waits():
    """Both need the GPU whole; of it other programs hold 5 of 24, and ``a`` held 20 of it, ``b`` 10."""
    driver = Driver(backend("a"), backend("b"), gpus=(Gpu("0", vram=24),))
    state = driver.core.state
    driver.core.memory_seen({"0": 5})
    for name, amount in (("a", 20), ("b", 10)):
        state.placement.measure(driver.core.slots[name], {"0": amount})
    state.changed()
    waits = {name: queueing.wait_seconds(state, state.models[name], 1.0) for name in "ba"}
    assert waits["b"] == 10.0
    assert plan(state, state.models["a"], set(), 1.0) is None
