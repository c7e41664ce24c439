"""Histories: facts in, steps, states and events out. No thread, no time but the moments written here."""

import itertools
import math
from itertools import pairwise
from math import inf

import pytest

from anvil_mux.config.config import Backend, Config, Gpu
from anvil_mux.config.profile import Profile
from anvil_mux.errors import DoesNotFit, LoadError, Overloaded, Stuck, WaitedTooLong
from anvil_mux.routing.ledger import Load
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.demand import Demand
from anvil_mux.scheduler.events import TRANSITIONS, Cause
from anvil_mux.scheduler.footprint import Footprints
from anvil_mux.scheduler.ladder import Host
from anvil_mux.scheduler.placement import islands
from anvil_mux.scheduler.policy import POLICIES, Stay, SwapTo, Unload, build_policy
from anvil_mux.scheduler.preemption import build_preemption
from anvil_mux.scheduler.residency import SHORTEST_DEFERRAL, SOON_SECONDS, Residency
from anvil_mux.scheduler.steps import Start, Stop, Ticket, Wait
from anvil_mux.sim.simulate import Engines, Request, check, simulate


def backend(name, *gpus, model=None, **fields):
    return Backend(name, model or name, gpus or ("0",), **fields)


A, B, C = backend("a"), backend("b"), backend("c")
TEN = (Gpu("0", vram=10),)
DEBOUNCE = build_policy("debounce", {"quiet": 2.0, "max_hold": 10.0})


class Island:
    """A residency, its log, and short words for what happens to it."""

    def __init__(self, *backends, gpus=(), policy=None, **settings):
        self.config = Config(backends=backends, gpus=gpus, **{"policy": "eager", **settings})
        self.log = []
        ((name, members),) = islands(backends)
        policy = policy or build_policy(self.config.policy, self.config.policy_settings)
        self.costs = Costs()
        lru = build_preemption("lru")
        self.footprints = Footprints()
        self.core = Residency(
            name,
            self.config,
            members,
            policy,
            lru,
            self.log.append,
            self.costs,
            Host(self.config.host_memory, self.footprints),
            self.footprints,
        )
        self.ids = itertools.count(1)
        self.until = inf

    def request(self, model, at, **about):
        ticket = Ticket(next(self.ids), model, at, **about)
        self.core.request(ticket, at)
        return ticket

    def steps(self, at):
        """The steps handed out at a moment: "start a", "stop b"; sets ``until``."""
        taken = []
        while not isinstance(step := self.core.next_step(at), Wait):
            taken.append(f"{type(step).__name__.lower()} {step.backend}")
        self.until = step.until
        return taken

    def with_resident(self, name, at=0.0):
        self.request(self.core.seats[name].model, at, leases=False)
        assert self.steps(at) == [f"start {name}"]
        self.core.loaded(name, at)
        assert self.steps(at) == []
        return self

    def states(self):
        return {name: seat.state for name, seat in self.core.seats.items()}

    def state(self, name):
        return self.core.seats[name].state

    def tell(self, *kinds):
        """The events of these kinds (all without), as "kind backend-or-model"."""
        return [f"{e.kind} {e.backend or e.model}" for e in self.log if not kinds or e.kind in kinds]

    def sound(self):
        assert check(self.log, self.config) == []
        assert [line for line in self.core.lines.values() if line] == []


# Loading and leasing


def test_the_first_request_loads_and_the_second_reuses():
    island = Island(A)
    first = island.request("a", 1.0)
    assert island.steps(1.0) == ["start a"]
    assert first.backend is None
    island.core.loaded("a", 4.0)
    assert first.backend == "a"
    assert island.core.settled == [first]
    second = island.request("a", 5.0)
    assert second.backend == "a"
    assert island.steps(5.0) == []
    assert island.tell() == ["queued a", "loading a", "ready a", "leased a", "leased a"]
    assert [e.seconds for e in island.log if e.kind in ("ready", "leased")] == [3.0, 3.0, 0.0]
    island.sound()


def test_a_swap_stops_the_old_backend_before_it_starts_the_new():
    island = Island(A, B).with_resident("a")
    waiting = island.request("b", 1.0)
    assert island.steps(1.0) == ["stop a"]
    assert island.states() == {"a": "evicting", "b": "stopped"}
    island.core.evicted("a", 2.0)
    assert island.steps(2.0) == ["start b"]
    island.core.loaded("b", 5.0)
    assert waiting.backend == "b"
    assert island.steps(5.0) == []
    island.sound()


def test_any_number_of_requests_for_the_resident_stop_nothing():
    island = Island(A, B).with_resident("a")
    tickets = [island.request("a", 1.0) for _ in range(50)]
    assert island.steps(1.0) == []
    assert len(island.core.seats["a"].holders) == 50
    for ticket in tickets:
        island.core.release(ticket, 2.0)
    assert island.steps(2.0) == []
    assert island.tell("evicting", "loading") == ["loading a"]
    island.sound()


def test_a_load_request_waits_like_a_request_but_holds_nothing():
    island = Island(A, B).with_resident("a")
    ticket = island.request("a", 1.0, leases=False)
    assert ticket.settled
    assert not island.core.seats["a"].holders
    island.core.release(ticket, 1.0)
    assert island.tell("released") == []
    island.request("b", 2.0)
    assert island.steps(2.0) == ["stop a"]


# Loads that are cancelled


def ends(island, *tickets):
    """How the waits of tickets ended: a backend, the code of an error, or None."""
    return [ticket.backend or (ticket.error and ticket.error.code) for ticket in tickets]


def loading(name, *backends, **settings):
    """An island on which a request has begun the load of a backend; and that request."""
    island = Island(*(backends or (A, B)), **settings)
    ticket = island.request(island.core.seats[name].model, 0.0)
    assert island.steps(0.0) == [f"start {name}"]
    return island, ticket


def test_a_load_is_cancelled_by_hand_and_who_waits_for_it_is_told_so():
    island, first = loading("a")
    second = island.request("a", 1.0)
    assert island.core.unload_requested("a", 2.0, "unload requested")
    assert ends(island, first, second) == ["cancelled", "cancelled"]
    assert "a was unloaded by hand" in first.error.message
    assert island.core.settled == [first, second]
    assert island.steps(2.0) == ["cancel a"]
    assert island.steps(2.5) == []
    island.core.load_cancelled("a", 3.0)
    assert (island.state("a"), island.steps(3.0)) == ("stopped", [])
    assert not island.core.unload_requested("a", 4.0, "unload requested")
    told = [(e.kind, e.reason, e.target) for e in island.log[2:] if not e.ticket]
    assert told == [("cancelling", "unload requested", ""), ("stopped", "", "")]
    island.sound()


def test_what_was_cancelled_has_no_cool_down_and_counts_as_no_failure():
    island, _ = loading("a")
    island.core.load_failed("a", 1.0, LoadError("no"))
    island.request("a", 6.0)
    assert island.steps(6.0) == ["start a"]
    island.core.unload_requested("a", 7.0, "unload requested")
    assert island.steps(7.0) == ["cancel a"]
    island.core.load_cancelled("a", 8.0)
    again = island.request("a", 8.0)
    assert (again.error, island.steps(8.0)) == (None, ["start a"])
    assert island.core.seats["a"].failed_starts == 1
    island.core.loaded("a", 9.0)
    island.sound()


def test_who_comes_while_a_load_is_being_cancelled_waits_for_the_next():
    island, _ = loading("a")
    island.core.unload_requested("a", 1.0, "unload requested")
    assert island.steps(1.0) == ["cancel a"]
    late = island.request("a", 2.0)
    assert (island.steps(2.0), late.settled) == ([], False)
    island.core.load_cancelled("a", 3.0)
    assert island.steps(3.0) == ["start a"]
    island.core.loaded("a", 4.0)
    assert late.backend == "a"
    island.sound()


def test_who_comes_before_the_load_is_cancelled_has_it_go_on():
    island, _ = loading("a")
    island.core.unload_requested("a", 1.0, "unload requested")
    late = island.request("a", 1.0)
    assert island.steps(1.0) == []
    island.core.loaded("a", 2.0)
    assert late.backend == "a"
    island.sound()


def test_a_load_that_has_just_succeeded_when_it_is_cancelled_is_unloaded():
    island, _ = loading("a")
    island.core.unload_requested("a", 1.0, "unload requested")
    assert island.steps(1.0) == ["cancel a"]
    late = island.request("a", 1.5)
    island.core.loaded("a", 2.0)
    assert (late.backend, island.state("a"), island.steps(2.0)) == ("a", "draining", [])
    island.core.release(late, 3.0)
    assert island.steps(3.0) == ["stop a"]
    island.core.evicted("a", 4.0)
    assert island.steps(4.0) == []
    island.sound()


@pytest.mark.parametrize("failure", ["load_failed", "evict_failed"])
def test_a_load_that_fails_while_it_is_cancelled_has_no_cool_down_unless_it_cannot_be_stopped(failure):
    island, _ = loading("a")
    island.core.unload_requested("a", 1.0, "unload requested")
    island.steps(1.0)
    FACTS[failure](island.core, 2.0)
    assert island.core.seats["a"].failed_starts == 0
    if failure == "load_failed":
        assert island.request("a", 2.0).error is None
        assert island.steps(2.0) == ["start a"]
    else:
        assert (island.request("a", 2.0).error.code, island.steps(7.0)) == ("stuck", ["stop a"])


def test_a_load_that_nobody_waits_for_any_more_is_cancelled_for_a_line_that_needs_its_gpu():
    island, first = loading("a")
    island.core.give_up(first, 1.0)
    assert island.steps(1.0) == []
    waiting = island.request("b", 2.0)
    assert island.steps(2.0) == ["cancel a"]
    island.core.load_cancelled("a", 3.0)
    assert island.steps(3.0) == ["start b"]
    island.core.loaded("b", 4.0)
    assert waiting.backend == "b"
    assert [(e.at, e.target) for e in island.log if e.kind == "cancelling"] == [(2.0, "b")]
    island.sound()


def test_it_is_cancelled_too_if_the_line_was_there_before_and_whatever_the_policy_says():
    island, first = loading("a", policy=None)
    island.core._policy = Never()
    waiting = island.request("b", 1.0)
    assert island.steps(1.0) == []
    island.core.give_up(first, 2.0)
    assert island.steps(2.0) == ["cancel a"]
    assert not waiting.settled


def test_a_load_that_nobody_waits_for_any_more_is_finished_if_nobody_needs_its_gpu():
    island, first = loading("a", A, backend("b", "1"), backend("t", "0", "1"))
    island.core.give_up(first, 1.0)
    island.request("b", 2.0)
    assert island.steps(2.0) == ["start b"]
    island.core.loaded("a", 3.0)
    assert island.state("a") == "ready"


@pytest.mark.parametrize("about", [{"pin": True}, {"prepare": True}])
def test_neither_what_is_pinned_nor_what_is_prepared_is_cancelled_for_another(about):
    island = Island(backend("a", **about), B)
    if "pin" in about:
        asked = island.request("a", 0.0)
        assert island.steps(0.0) == ["start a"]
        island.core.give_up(asked, 1.0)
    else:
        assert island.steps(0.0) == ["start a"]
    island.request("b", 2.0)
    assert island.steps(2.0) == []
    assert island.core.unload_requested("a", 3.0, "unload requested")  # by hand it is
    assert island.steps(3.0) == ["cancel a"]


def test_a_load_is_not_cancelled_for_a_line_that_could_not_be_loaded_there_all_the_same():
    stays = backend("a", vram=5, min_residency=500.0)
    island = Island(stays, backend("b", vram=5), backend("c", vram=10), gpus=TEN).with_resident("a")
    gone = island.request("b", 0.0)
    assert island.steps(0.0) == ["start b"]
    island.core.give_up(gone, 1.0)
    island.request("c", 2.0)
    assert (island.steps(2.0), island.until) == ([], 62.0)  # then it is overdue, and a need not stay
    assert island.steps(62.0) == ["cancel b"]
    island.core.load_cancelled("b", 63.0)
    assert island.steps(63.0) == ["stop a"]


def test_all_loads_are_cancelled_that_a_line_of_several_gpus_needs():
    island = Island(backend("a", "0"), backend("b", "1"), backend("t", "0", "1"))
    gone = [island.request("a", 0.0), island.request("b", 0.0)]
    assert island.steps(0.0) == ["start a", "start b"]
    waiting = island.request("t", 1.0)
    island.core.give_up(gone[0], 2.0)
    assert island.steps(2.0) == []  # b is still waited for
    island.core.give_up(gone[1], 3.0)
    assert island.steps(3.0) == ["cancel a", "cancel b"]
    island.core.load_cancelled("a", 4.0)
    assert island.steps(4.0) == []
    island.core.load_cancelled("b", 5.0)
    assert island.steps(5.0) == ["start t"]
    island.core.loaded("t", 6.0)
    assert waiting.backend == "t"
    island.sound()


def test_who_waits_while_its_gpu_is_being_freed_is_told_that_the_model_was_unloaded_too():
    island = Island(A, B, drain_timeout=30.0).with_resident("a")
    lease, waiting = island.request("a", 1.0), island.request("b", 2.0)
    assert island.steps(2.0) == []
    assert island.state("a") == "draining"
    assert island.core.unload_requested("b", 3.0, "unload requested")
    assert (ends(island, waiting), island.state("a"), island.steps(3.0)) == (["cancelled"], "ready", [])
    island.core.release(lease, 4.0)
    island.request("b", 5.0)
    assert island.steps(5.0) == ["stop a"]
    assert island.core.unload_requested("b", 6.0, "unload requested")
    assert island.steps(6.0) == []
    island.core.evicted("a", 7.0)
    assert (island.steps(7.0), island.states()) == ([], {"a": "stopped", "b": "stopped"})
    island.sound()


def test_what_nobody_keeps_is_not_loaded_on_unless_somebody_waits_for_it():
    island, first = loading("a")
    assert not island.core.unload_when_idle("a", 1.0)
    assert island.steps(1.0) == []
    island.core.give_up(first, 2.0)
    assert island.core.unload_when_idle("a", 3.0)
    assert island.steps(3.0) == ["cancel a"]


def test_a_replica_that_is_being_loaded_is_unloaded_with_the_others():
    island = Island(backend("r0", "0", model="m"), backend("r1", "1", model="m"), backend("a", "1"))
    first = island.request("m", 0.0)
    assert island.steps(0.0) == ["start r0"]
    island.core.loaded("r0", 1.0)
    behind = [island.request("m", 1.0) for _ in range(30)]
    assert island.steps(20.0) == ["start r1"]
    assert island.core.unload_requested("m", 21.0, "unload requested")
    assert island.steps(21.0) == ["cancel r1"]
    assert island.states() == {"r0": "draining", "r1": "cancelling", "a": "stopped"}
    assert ends(island, first, *behind) == ["r0"] * 31


# Draining


def test_a_swap_waits_for_every_lease():
    island = Island(A, B).with_resident("a")
    held = [island.request("a", 1.0) for _ in range(3)]
    island.request("b", 2.0)
    assert island.steps(2.0) == []
    assert island.state("a") == "draining"
    for ticket in held[:2]:
        island.core.release(ticket, 3.0)
        assert island.steps(3.0) == []
    island.core.release(held[2], 4.0)
    assert island.steps(4.0) == ["stop a"]
    assert not any(ticket.severed for ticket in held)


def test_a_drain_that_takes_too_long_severs_what_is_left():
    island = Island(A, B, drain_timeout=30.0).with_resident("a")
    ended, laggard = island.request("a", 1.0), island.request("a", 1.0)
    island.request("b", 2.0)
    assert island.steps(2.0) == []
    assert island.until == 32.0
    island.core.release(ended, 10.0)
    assert island.steps(31.9) == []
    step = island.core.next_step(32.0)
    assert step == Stop("a", "stop", (laggard,))
    assert (ended.severed, laggard.severed) == (None, Cause("evicted", "b", 30.0))
    assert [(e.ticket, e.seconds) for e in island.log if e.kind == "severed"] == [(laggard.id, 30.0)]
    island.core.evicted("a", 33.0)
    island.steps(33.0)
    island.core.loaded("b", 34.0)
    island.sound()


class Unloading:
    """A policy that unloads whatever is resident once it is asked after second 2."""

    def decide(self, seen):
        return Unload("a", "enough") if seen.now >= 2.0 else Stay()


@pytest.mark.parametrize(
    ("happens", "cause"),
    [
        (lambda core: core.request(Ticket(99, "b", 2.0), 2.0), Cause("evicted", "b", 5.0)),
        (lambda core: core.unload_requested("a", 2.0, "unload requested"), Cause("unloaded", "", 5.0)),
        (lambda core: core.retired({"a": "changed"}, {"a", "b"}, 2.0), Cause("changed", "", 5.0)),
        (lambda core: core.retired({"a": "removed"}, {"b"}, 2.0), Cause("removed", "", 5.0)),
        (
            lambda core: core.unanswering("a", 2.0),
            Cause("silent"),
        ),
        (lambda core: setattr(core, "_policy", Unloading()), Cause("policy", "", 5.0)),
        (lambda core: core.sever_all(2.0), Cause("shutdown")),
    ],
    ids=lambda value: value.why if isinstance(value, Cause) else "",
)
def test_who_is_severed_is_told_the_cause(happens, cause):
    island = Island(A, B, drain_timeout=5.0).with_resident("a")
    lease = island.request("a", 1.0)
    happens(island.core)
    island.steps(2.0)
    island.steps(7.0)
    assert lease.severed == cause
    told = [(e.reason, e.target, e.seconds) for e in island.log if e.kind == "severed"]
    assert told == [cause]


def test_a_leaving_backend_that_is_spared_a_swap_is_severed_as_leaving():
    island = Island(A, B, drain_timeout=5.0).with_resident("a")
    lease = island.request("a", 1.0)
    waits = island.request("b", 2.0)
    assert island.steps(2.0) == []
    island.core.retired({"a": "changed"}, {"a", "b"}, 3.0)
    island.core.give_up(waits, 4.0)
    island.steps(4.0)
    assert island.steps(7.0) == ["stop a"]
    assert lease.severed == Cause("changed", "", 5.0)


def test_a_drain_timeout_of_zero_severs_at_once():
    island = Island(A, B, drain_timeout=0.0).with_resident("a")
    lease = island.request("a", 1.0)
    island.request("b", 2.0)
    assert island.steps(2.0) == ["stop a"]
    assert lease.severed


def test_a_late_request_for_the_victim_neither_extends_the_drain_nor_is_lost():
    island = Island(A, B, drain_timeout=5.0).with_resident("a")
    island.request("a", 1.0)
    island.request("b", 2.0)
    island.steps(2.0)
    late = island.request("a", 3.0)
    assert not late.settled
    assert island.steps(6.9) == []
    assert island.steps(7.0) == ["stop a"]
    island.core.evicted("a", 8.0)
    assert island.steps(8.0) == ["start b"]
    island.core.loaded("b", 9.0)
    assert island.steps(9.0) == []  # b's one request holds its lease; a waits for it
    assert island.steps(14.0) == ["stop b"]
    island.core.evicted("b", 15.0)
    assert island.steps(15.0) == ["start a"]
    island.core.loaded("a", 16.0)
    assert late.backend == "a"
    island.sound()


def test_a_release_after_the_severing_is_harmless_even_when_the_backend_is_back():
    island = Island(A, B, drain_timeout=0.0).with_resident("a")
    old = island.request("a", 1.0)
    for moment, target, victim in ((2.0, "b", "a"), (3.0, "a", "b")):
        island.request(target, moment, leases=False)
        assert island.steps(moment) == [f"stop {victim}"]
        island.core.evicted(victim, moment)
        assert island.steps(moment) == [f"start {target}"]
        island.core.loaded(target, moment)
    new = island.request("a", 4.0)
    island.core.release(old, 5.0)
    assert list(island.core.seats["a"].holders) == [new]
    assert "released a" not in island.tell()
    island.sound()


def test_a_severed_lease_does_not_hold_up_the_next_eviction_of_its_model():
    island = Island(A, B, drain_timeout=10.0).with_resident("a")
    island.request("a", 0.0)  # never ends
    moment = 0.0
    for target, victim, drain in (("b", "a", 10.0), ("a", "b", 0.0), ("b", "a", 0.0)):
        island.request(target, moment, leases=False)
        island.steps(moment)
        moment += drain
        if drain:
            assert island.steps(moment) == [f"stop {victim}"]
        assert island.state(victim) == "evicting"
        island.core.evicted(victim, moment)
        island.steps(moment)
        island.core.loaded(target, moment)
    island.sound()


def test_releasing_twice_counts_once():
    island = Island(A).with_resident("a")
    first, second = island.request("a", 1.0), island.request("a", 1.0)
    island.core.release(first, 2.0)
    island.core.release(first, 3.0)
    assert list(island.core.seats["a"].holders) == [second]
    assert island.tell("released") == ["released a"]


def test_of_two_swaps_wanted_during_one_drain_one_wins_and_the_other_follows():
    island = Island(A, B, C).with_resident("a")
    lease = island.request("a", 1.0)
    island.request("b", 2.0)
    island.steps(2.0)
    island.request("c", 3.0)
    assert island.steps(3.0) == []
    island.core.release(lease, 4.0)
    assert island.steps(4.0) == ["stop a"]
    island.core.evicted("a", 5.0)
    assert island.steps(5.0) == ["start b"]
    island.core.loaded("b", 6.0)
    island.core.release(next(iter(island.core.seats["b"].holders)), 7.0)
    assert island.steps(7.0) == ["stop b"]
    island.core.evicted("b", 8.0)
    assert island.steps(8.0) == ["start c"]
    assert island.tell("loading") == ["loading a", "loading b", "loading c"]


def test_a_victim_of_several_is_stopped_as_soon_as_it_is_idle():
    small = [backend(name, vram=5) for name in "ab"]
    island = Island(*small, backend("c", vram=10), gpus=TEN).with_resident("a").with_resident("b")
    lease = island.request("b", 1.0)
    island.request("c", 2.0)
    assert island.steps(2.0) == ["stop a"]
    assert island.state("b") == "draining"
    island.core.evicted("a", 3.0)
    assert island.steps(3.0) == []
    island.core.release(lease, 4.0)
    assert island.steps(4.0) == ["stop b"]
    island.core.evicted("b", 5.0)
    assert island.steps(5.0) == ["start c"]


# Batches and order


def test_forty_alternating_requests_cost_two_loads():
    island = Island(A, B)
    tickets = [island.request("ab"[n % 2], 0.0) for n in range(40)]
    assert island.steps(0.0) == ["start a"]
    island.core.loaded("a", 3.0)
    for ticket in tickets[::2]:
        assert ticket.backend == "a"
        island.core.release(ticket, 4.0)
    assert island.steps(4.0) == ["stop a"]
    island.core.evicted("a", 5.0)
    assert island.steps(5.0) == ["start b"]
    island.core.loaded("b", 6.0)
    assert all(ticket.backend for ticket in tickets)
    assert len(island.tell("loading")) == 2
    island.sound()


def test_a_fresh_resident_serves_its_whole_line_before_it_may_be_put_out():
    island = Island(A, B).with_resident("a")
    line = [island.request("b", 1.0) for _ in range(5)]
    island.steps(1.0)
    island.request("a", 1.5)
    island.core.evicted("a", 2.0)
    island.steps(2.0)
    island.core.loaded("b", 3.0)
    assert [ticket.backend for ticket in line] == ["b"] * 5
    assert island.steps(3.0) == []
    assert island.state("b") == "draining"


def test_the_resident_serves_on_while_the_policy_holds_the_swap_back():
    island = Island(A, B, policy=DEBOUNCE).with_resident("a")
    island.request("b", 1.0)
    assert island.steps(1.0) == []
    assert island.request("a", 1.5).backend == "a"
    assert island.state("a") == "ready"


# The policy proposes, the residency disposes


class Never:
    """A policy that never swaps."""

    def decide(self, seen):
        return Stay(reason="never")


class Wrong:
    """A policy that always names a model that cannot be loaded now."""

    def decide(self, seen):
        return SwapTo("nonsense")


class Broken:
    """A policy that raises."""

    def decide(self, seen):
        raise ZeroDivisionError("division by zero")


class IdleOut:
    """Puts a model out that was not used for five seconds."""

    def decide(self, seen):
        moments = []
        for resident in seen.residents:
            until = (seen.now if resident.leases else resident.last_used) + 5.0
            if until <= seen.now:
                return Unload(resident.model, "idle")
            moments.append(until)
        return Stay(min(moments, default=inf)) if not seen.lines else SwapTo(seen.lines[0].model)


@pytest.mark.parametrize("policy", [Never(), Wrong(), Broken()])
def test_an_overdue_line_is_served_whatever_the_policy_says(policy):
    island = Island(A, B, policy=policy, max_wait=60.0)
    assert island.core.adopt("a", 0.0)
    for moment in range(1, 61):
        island.core.release(island.request("a", float(moment)), moment + 0.5)
        if moment == 2:
            island.request("b", 2.0)
        assert island.steps(moment + 0.5) == []
    assert island.until == 62.0
    assert island.steps(62.0) == ["stop a"]


def test_a_line_is_overdue_at_the_very_moment_that_was_announced():
    for since in (n / 7 for n in range(1, 200)):  # for a third of these (since + wait) - since < wait
        island = Island(A, B, policy=Never(), max_wait=60.1)
        island.core.adopt("a", 0.0)
        island.request("b", since)
        assert island.steps(since) == []
        assert island.steps(island.until) == ["stop a"]


def asks_without_end(model, clients, until):
    """What follows: each of so many requests for ``model`` is followed by another one at once."""
    return lambda request, now: [Request(now, model, 0.2)] if request.model == model and now < until else []


def test_a_busy_resident_does_not_keep_a_line_waiting_beyond_its_queue_timeout():
    config = Config(backends=(A, B), policy="adaptive", queue_timeout=20.0, max_wait=60.0)
    trace = [*[Request(n / 64, "a", 0.2) for n in range(6)], Request(5.0, "b", 0.1), Request(60.0, "b", 0.1)]
    busy = asks_without_end("a", 6, 100.0)
    log = simulate(config, trace, Engines({"a": 3.0, "b": 3.0}), resident=["a"], follow=busy)
    assert check(log, config) == []
    assert [(e.kind, e.reason) for e in log if e.model == "b" and e.kind in ("leased", "failed")] == [
        ("leased", ""),
        ("leased", ""),
    ]
    [first, second] = [event.bound for event in log if event.kind == "queued" and event.model == "b"]
    assert first == pytest.approx(20.0 - 11.0 - 0.2 * (1 + math.log(6)))
    assert second > first  # its load was learned to be shorter


@pytest.mark.parametrize(("queue_timeout", "bound"), [(600.0, 60.0), (40.0, 22.0), (15.0, 0.0)])
def test_the_bound_of_a_line_leaves_time_for_drain_eviction_and_load(queue_timeout, bound):
    island = Island(A, B, policy=Never(), queue_timeout=queue_timeout)
    island.core.adopt("a", 0.0)
    island.costs.learn("a", "b", "stop", 2.0, 12.0)
    for moment in (1.0, 5.0):  # a has answered within 4 s
        island.core.release(island.request("a", moment), moment + 4.0)
    island.request("b", 10.0)
    island.request("b", 11.0)
    assert [e.bound for e in island.log if e.kind == "queued" and e.model == "b"] == [bound, inf]
    if bound:
        assert (island.steps(11.0), island.until) == ([], 10.0 + bound)
    assert island.steps(10.0 + bound) == ["stop a"]


@pytest.mark.parametrize(("drain_timeout", "drain"), [(30.0, 10.0), (4.0, 4.0)])
def test_what_a_drain_will_take_is_a_guess_until_somebody_was_answered_and_has_a_limit(drain_timeout, drain):
    island = Island(A, B, policy=Never(), queue_timeout=60.0, drain_timeout=drain_timeout)
    island.core.adopt("a", 0.0)
    island.request("a", 1.0)
    island.request("b", 2.0)
    assert island.log[-1].bound == 60.0 - drain - 1.0 - 10.0


def test_the_bound_of_a_line_is_fixed_when_it_begins_and_another_line_has_another():
    island = Island(A, B, policy=Never(), queue_timeout=40.0)
    island.core.adopt("a", 0.0)
    island.core.release(island.request("a", 0.0), 1.0)
    first, _ = island.request("b", 10.0), island.request("b", 12.0)
    bound = island.log[-2].bound
    island.costs.learn("a", "b", "stop", 1.0, 25.0)
    island.core.give_up(first, 13.0)
    assert (island.steps(13.0), island.until) == ([], 12.0 + bound)  # that of the one that is first now
    island.core.give_up(next(iter(island.core.lines["b"])), 14.0)
    island.request("b", 15.0)
    assert island.log[-1].bound == bound - 15.0


def test_the_policy_is_asked_again_at_the_moment_it_named_even_if_nobody_waits():
    island = Island(A, B, policy=IdleOut()).with_resident("a", at=1.0)
    assert island.until == 6.0
    lease = island.request("a", 5.0)
    assert island.steps(6.0) == []
    assert island.until == 11.0
    island.core.release(lease, 7.0)
    assert island.steps(11.0) == []
    assert island.until == 12.0
    assert island.steps(12.0) == ["stop a"]
    island.core.evicted("a", 13.0)
    assert island.steps(13.0) == []
    assert island.until == inf


def test_a_policy_cannot_put_out_a_pinned_model():
    island = Island(backend("a", pin=True), backend("b", "1"), backend("t", "0", "1"), policy=IdleOut())
    island.core.adopt("a", 0.0)
    assert island.steps(100.0) == []
    assert island.state("a") == "ready"


def test_a_pinned_model_is_kept_until_it_is_unpinned():
    island = Island(A, B).with_resident("a")
    island.core.pin_requested("a", 1.0, True)
    refused = island.request("b", 2.0).error
    assert isinstance(refused, DoesNotFit)
    assert "beside the pinned a (see `anvil-mux unpin`)" in refused.message
    assert island.steps(100.0) == []
    island.core.pin_requested("a", 101.0, False)
    waits = island.request("b", 102.0)
    assert island.steps(102.0) == ["stop a"]
    island.core.evicted("a", 103.0)
    assert island.steps(103.0) == ["start b"]
    island.core.loaded("b", 104.0)
    assert waits.backend == "b"
    assert island.tell("pinned", "unpinned") == ["pinned a", "unpinned a"]
    island.sound()


def test_what_the_file_pins_can_be_unpinned_too():
    island = Island(backend("a", pin=True), B).with_resident("a")
    island.core.pin_requested("a", 1.0, False)
    island.request("b", 2.0)
    assert island.steps(2.0) == ["stop a"]


def test_pinning_what_is_pinned_changes_nothing():
    island = Island(A)
    for _ in range(2):
        island.core.pin_requested("a", 1.0, True)
    assert island.tell() == ["pinned a"]


def test_a_model_may_be_pinned_before_it_is_resident():
    island = Island(A, B).with_resident("b")
    island.core.pin_requested("a", 1.0, True)
    shut_out = island.request("a", 2.0)
    assert island.steps(2.0) == ["stop b"]
    island.core.evicted("b", 3.0)
    assert island.steps(3.0) == ["start a"]
    assert isinstance(island.request("b", 3.5).error, DoesNotFit)
    island.core.loaded("a", 4.0)
    assert shut_out.backend == "a"
    island.sound()


def test_who_waits_for_the_gpu_of_a_model_that_is_pinned_is_refused_at_once_and_the_model_stays():
    island = Island(A, B).with_resident("a")
    island.request("a", 1.0)
    waits = island.request("b", 2.0)
    assert island.steps(2.0) == []
    assert island.state("a") == "draining"
    late = island.request("a", 2.5)
    island.core.pin_requested("a", 3.0, True)
    assert isinstance(waits.error, DoesNotFit)
    assert waits in island.core.settled
    assert late.backend == "a"
    assert island.steps(100.0) == []
    assert island.state("a") == "ready"
    island.sound()


def test_where_the_pinned_victim_stays_another_goes():
    island = Island(*(backend(name, vram=4) for name in "abc"), gpus=TEN)
    island.with_resident("a", 0.0).with_resident("b", 1.0)
    island.request("b", 1.5)
    island.request("a", 2.0)
    waits = island.request("c", 3.0)
    assert island.steps(3.0) == []
    assert island.states() == {"a": "ready", "b": "draining", "c": "stopped"}
    island.core.pin_requested("b", 4.0, True)
    assert waits.error is None
    assert island.steps(4.0) == []
    assert island.states() == {"a": "draining", "b": "ready", "c": "stopped"}
    assert check(island.log, island.config) == []


def test_a_pinned_model_that_rests_makes_room_by_its_memory():
    resting = backend("a", vram=8, rest=("sleep", "stop"), pin=True)
    island = Island(resting, backend("b", vram=8), gpus=TEN).with_resident("a")
    island.core.unload_requested("a", 1.0, "unload requested")
    assert island.steps(1.0) == ["stop a"]
    island.core.evicted("a", 2.0, {"0": 3}, "sleep")
    waits = island.request("b", 3.0)
    assert island.steps(3.0) == ["demote a"]
    island.core.evicted("a", 4.0)
    assert island.steps(4.0) == ["start b"]
    island.core.loaded("b", 5.0)
    assert waits.backend == "b"
    island.sound()


def test_a_pinned_model_that_was_told_to_go_is_waited_for():
    island = Island(backend("a", pin=True), B).with_resident("a")
    lease = island.request("a", 1.0)
    island.core.unload_requested("a", 2.0, "unload requested")
    waits = island.request("b", 3.0)
    island.core.pin_requested("a", 3.0, False)
    island.core.pin_requested("a", 3.5, True)  # that it is kept from others spares it nothing here
    assert island.steps(3.5) == []
    island.core.release(lease, 4.0)
    assert island.steps(4.0) == ["stop a"]
    island.core.evicted("a", 5.0)
    assert island.steps(5.0) == ["start b"]
    assert waits.error is None


def test_a_held_swap_is_announced_for_each_line_and_when_the_moment_has_passed_and_begins_when_it_is_due():
    island = Island(A, B, policy=DEBOUNCE).with_resident("a")
    island.request("b", 1.0)
    for moment in (1.0, 1.5, 2.5):
        assert island.steps(moment) == []
    island.request("b", 2.5)
    assert island.steps(2.5) == []
    assert island.until == 3.0
    assert island.steps(3.0) == []
    assert island.until == 4.5
    assert island.steps(4.5) == ["stop a"]
    assert [(e.at, e.seconds) for e in island.log if e.kind == "deferred"] == [(1.0, 2.0), (3.0, 1.5)]


@pytest.mark.parametrize("pause", [0.125, 0.5, 2.0])
@pytest.mark.parametrize("load", [0.5, 3.0, 20.0])
def test_a_lone_request_is_told_anew_whenever_the_moment_of_its_swap_has_passed(load, pause):
    island = Island(A, B, policy=build_policy("adaptive")).with_resident("a")
    for source, target in ("ab", "ba"):
        island.costs.learn(source, target, "stop", 0.25, load)
    now = 0.0
    for _ in range(10):
        now += pause
        lease = island.request("a", now)
        now += 0.25
        island.core.release(lease, now)
    island.request("b", now)
    while island.steps(now) != ["stop a"]:
        assert now < island.until < now + 60.0
        now = island.until
    told = [(event.at, event.at + event.seconds) for event in island.log if event.kind == "deferred"]
    assert told
    for (at, until), (following, _) in pairwise([*told, (now, 0.0)]):
        assert following <= max(until, at + SHORTEST_DEFERRAL)
    assert len(told) <= 3


def test_a_policy_that_puts_off_by_moments_writes_a_line_a_second():
    class Hesitant:
        def decide(self, seen):
            return Stay(seen.now + 0.0625) if seen.lines else Stay()

    island = Island(A, B, policy=Hesitant(), max_wait=8.0)
    island.core.adopt("a", 0.0)
    island.request("b", 1.0)
    now = 1.0
    while island.steps(now) != ["stop a"]:
        now = island.until
    assert now == 9.0
    assert [event.at for event in island.log if event.kind == "deferred"] == [float(n) for n in range(1, 9)]


def held_back():
    """b waits since 1.0, and the policy holds its swap back until 3.0."""
    island = Island(A, B, C, policy=DEBOUNCE).with_resident("a")
    waiting = island.request("b", 1.0)
    assert (island.steps(1.0), island.until) == ([], 3.0)
    return island, waiting


def test_a_held_line_goes_at_once_when_the_resident_has_died():
    island, waiting = held_back()
    island.core.died("a", 1.5, "killed")
    assert island.steps(1.5) == ["start b"]
    island.core.loaded("b", 2.0)
    assert waiting.backend == "b"
    island.sound()


def test_a_held_line_goes_at_once_when_the_resident_was_unloaded():
    island, _ = held_back()
    island.core.unload_requested("a", 1.5, "unload requested")
    assert island.steps(1.5) == ["stop a"]
    assert island.steps(1.75) == []
    island.core.evicted("a", 2.0)
    assert island.steps(2.0) == ["start b"]


def test_a_line_that_begins_while_another_is_held_back_is_decided_with_it():
    island, waiting = held_back()
    island.core.give_up(waiting, 1.25)
    assert (island.steps(1.25), island.until) == ([], inf)
    island.request("c", 1.5)
    assert (island.steps(1.5), island.until) == ([], 3.5)
    island.request("b", 2.0)
    assert (island.steps(2.0), island.until) == ([], 3.5)
    assert island.steps(3.5) == ["stop a"]
    island.core.evicted("a", 4.0)
    assert island.steps(4.0) == ["start c"]


def test_a_held_swap_is_decided_anew_when_its_line_grows():
    island, _ = held_back()
    island.request("b", 2.5)
    assert (island.steps(2.5), island.until) == ([], 3.0)  # what was announced is corrected then
    assert (island.steps(3.0), island.until) == ([], 4.5)
    assert island.steps(4.5) == ["stop a"]


def test_a_request_for_the_old_model_in_mid_swap_does_not_skip_the_policy():
    island = Island(A, B, policy=DEBOUNCE).with_resident("a")
    island.request("b", 1.0)
    island.steps(1.0)
    island.steps(3.0)
    island.request("a", 3.5)
    island.core.evicted("a", 4.0)
    island.steps(4.0)
    island.core.loaded("b", 5.0)
    assert island.steps(5.0) == []
    assert island.state("b") == "ready"
    assert island.until == 5.5
    island.steps(5.5)
    assert island.state("b") == "draining"


def test_the_timer_of_a_held_swap_survives_a_failed_one():
    island = Island(A, B, C, policy=DEBOUNCE).with_resident("a")
    island.request("b", 1.0)
    island.steps(1.0)
    assert island.steps(3.0) == ["stop a"]
    island.core.evicted("a", 4.0)
    assert island.steps(4.0) == ["start b"]
    island.request("a", 4.5)
    island.core.load_failed("b", 5.0, LoadError("no"))
    assert island.steps(5.0) == ["start a"]  # there is room: nothing to hold back
    island.core.loaded("a", 6.0)
    island.request("c", 6.5)
    assert island.steps(6.5) == []
    assert island.until == 8.5


# Swaps for nobody


def test_a_swap_whose_waiters_left_is_not_begun():
    island = Island(A, B, policy=DEBOUNCE).with_resident("a")
    waiting = island.request("b", 1.0)
    island.steps(1.0)
    island.core.give_up(waiting, 2.0)
    assert island.steps(3.0) == []
    assert island.until == inf
    assert island.tell("draining", "gone") == ["gone b"]
    island.sound()


def test_a_victim_that_only_drains_is_reprieved_when_nobody_waits_any_more():
    island = Island(A, B).with_resident("a")
    lease = island.request("a", 1.0)
    waiting = island.request("b", 2.0)
    island.steps(2.0)
    late = island.request("a", 3.0)
    island.core.give_up(waiting, 4.0, WaitedTooLong("too long"))
    assert island.steps(4.0) == []
    assert island.state("a") == "ready"
    assert late.backend == "a"
    assert set(island.core.seats["a"].holders) == {lease, late}
    assert island.core.settled[-1] is late
    island.sound()


def test_a_swap_that_has_begun_is_finished_even_for_nobody():
    island = Island(A, B).with_resident("a")
    waiting = island.request("b", 1.0)
    assert island.steps(1.0) == ["stop a"]
    island.core.give_up(waiting, 2.0)
    island.core.evicted("a", 3.0)
    assert island.steps(3.0) == ["start b"]
    island.core.loaded("b", 4.0)
    assert island.steps(4.0) == []
    island.sound()


def test_a_waiter_that_leaves_leaves_no_trace_in_the_line():
    island = Island(A, B).with_resident("a")
    island.request("a", 1.0)
    waiting = [island.request("b", 2.0) for _ in range(3)]
    island.core.give_up(waiting[1], 3.0)
    island.core.give_up(waiting[1], 3.0)
    assert list(island.core.lines["b"]) == [waiting[0], waiting[2]]
    assert island.tell("gone") == ["gone b"]


# Failures


def test_after_a_failed_start_its_waiters_fail_and_the_others_are_served():
    island = Island(A, B).with_resident("a")
    broken = island.request("b", 1.0)
    assert island.steps(1.0) == ["stop a"]
    other = island.request("a", 1.5)
    island.core.evicted("a", 2.0)
    assert island.steps(2.0) == ["start b"]
    island.core.load_failed("b", 4.0, LoadError("exited with code 1", log=("bad weights",)))
    assert (broken.error.status, broken.error.code) == (503, "load_failed")
    assert "exited with code 1" in broken.error.message
    assert "bad weights" in broken.error.message
    assert island.steps(4.0) == ["start a"]
    island.core.loaded("a", 5.0)
    assert other.backend == "a"
    island.sound()


def test_when_every_start_fails_the_island_is_empty_and_a_later_request_tries_again():
    island = Island(A, B)
    for now, name in enumerate("ab"):
        ticket = island.request(name, now)
        assert island.steps(now) == [f"start {name}"]
        island.core.load_failed(name, now + 1, LoadError("no"))
        assert ticket.error
        assert island.steps(now + 1) == []
    assert set(island.states().values()) == {"stopped"}
    later = island.request("a", 6.0)
    assert not later.settled
    assert island.steps(6.0) == ["start a"]
    island.core.loaded("a", 7.0)
    assert later.backend == "a"
    island.sound()


def test_ten_requests_for_a_broken_model_put_the_resident_out_once():
    island = Island(A, B).with_resident("a")
    for n in range(10):
        ticket = island.request("b", n / 4)
        for step in island.steps(n / 4):
            assert step == "stop a"
            island.core.evicted("a", n / 4)
            assert island.steps(n / 4) == ["start b"]
            island.core.load_failed("b", n / 4, LoadError("no"))
            island.request("a", n / 4, leases=False)
            assert island.steps(n / 4) == ["start a"]
            island.core.loaded("a", n / 4)
        assert ticket.error.code == "load_failed"
        assert 1.0 <= ticket.error.retry_after <= 5.0
    assert island.tell("loading") == ["loading a", "loading b", "loading a"]
    island.sound()


def test_the_cool_down_doubles_up_to_five_minutes_and_a_success_ends_it():
    island = Island(A)
    now, pauses = 0.0, []
    for _ in range(9):
        island.request("a", now)
        assert island.steps(now) == ["start a"]
        island.core.load_failed("a", now, LoadError("no"))
        pauses.append(island.core.seats["a"].retry_at - now)
        now = island.core.seats["a"].retry_at
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0, 300.0]
    island.request("a", now)
    island.steps(now)
    island.core.loaded("a", now)
    assert island.core.seats["a"].failed_starts == 0
    island.sound()


def test_nothing_is_started_on_top_of_a_backend_that_could_not_be_stopped():
    island = Island(A, B).with_resident("a")
    waiting = island.request("b", 1.0)
    assert island.steps(1.0) == ["stop a"]
    island.core.evict_failed("a", 2.0, "docker does not answer")
    assert island.steps(2.0) == []
    assert (waiting.error.status, waiting.error.code) == (503, "stuck")
    assert "docker does not answer" in waiting.error.message
    for model in "ab":
        assert island.request(model, 3.0).error.code == "stuck"
    assert island.state("a") == "stuck"
    assert island.until == 7.0
    island.sound()


def test_a_stuck_backend_is_stopped_again_until_it_works():
    island = Island(A, B).with_resident("a")
    island.request("b", 0.0)
    island.steps(0.0)
    now = 0.0
    for pause in (5.0, 10.0, 20.0, 40.0, 60.0, 60.0):
        island.core.evict_failed("a", now, "no")
        assert island.steps(now) == []
        now += pause
        assert island.until == now
        assert island.steps(now) == ["stop a"]
    late = island.request("b", now)
    assert not late.settled
    island.core.evicted("a", now)
    assert island.steps(now) == ["start b"]
    island.core.loaded("b", now)
    island.sound()


def test_the_retry_of_a_stop_is_not_taken_for_a_drain():
    island = Island(A, B).with_resident("a")
    island.request("b", 1.0)
    island.steps(1.0)
    island.core.evict_failed("a", 2.0, "no")
    island.steps(2.0)
    island.steps(7.0)
    assert [event.seconds for event in island.log if event.kind == "evicting"] == [0.0, 0.0]


def test_a_start_that_could_not_be_cleaned_up_is_stuck():
    island = Island(A, B)
    waiting = island.request("a", 0.0)
    island.steps(0.0)
    island.core.evict_failed("a", 1.0, "half started")
    assert waiting.error.code == "stuck"
    assert island.request("b", 2.0).error.code == "stuck"
    assert island.steps(6.0) == ["stop a"]
    early = island.request("a", 6.5)
    island.core.evicted("a", 7.0)
    assert island.request("b", 8.0).error is None
    assert early.error.code == "load_failed"


def test_broken_models_that_cannot_be_cleaned_up_at_once_cool_down_all_the_same():
    island = Island(A)
    now, pauses = 0.0, []
    for _ in range(4):
        island.request("a", now)
        assert island.steps(now) == ["start a"]
        island.core.evict_failed("a", now, "half started")
        island.steps(now)
        assert island.until == now + 5.0
        now += 5.0
        assert island.steps(now) == ["stop a"]
        island.core.evicted("a", now)
        pauses.append(island.core.seats["a"].retry_at - now)
        now += pauses[-1]
    assert pauses == [5.0, 10.0, 20.0, 40.0]
    assert island.core.seats["a"].error == "half started"
    island.sound()


def test_a_stuck_backend_that_dies_is_gone_and_may_be_loaded_at_once():
    island = Island(A).with_resident("a")
    island.core.unload_requested("a", 1.0, "unload requested")
    island.steps(1.0)
    island.core.evict_failed("a", 2.0, "no")
    island.steps(2.0)
    island.core.died("a", 3.0, "killed")
    island.request("a", 3.5)
    assert island.steps(3.5) == ["start a"]


def test_victims_that_only_drain_are_reprieved_when_another_is_stuck():
    small = [backend(name, vram=5) for name in "ab"]
    island = Island(*small, backend("c", vram=10), gpus=TEN).with_resident("a").with_resident("b")
    island.request("b", 1.0)
    island.request("c", 2.0)
    assert island.steps(2.0) == ["stop a"]
    late = island.request("b", 2.5)
    island.core.evict_failed("a", 3.0, "no")
    assert island.states() == {"a": "stuck", "b": "ready", "c": "stopped"}
    assert late.backend == "b"
    island.sound()


def test_the_resident_that_died_is_loaded_again_for_the_next_request():
    island = Island(A).with_resident("a")
    island.core.release(island.request("a", 0.5), 0.5)
    lease = island.request("a", 1.0)
    island.core.died("a", 2.0, "exited with code 137")
    assert island.steps(2.0) == []
    assert not island.core.seats["a"].holders
    island.core.release(lease, 2.5)
    later = island.request("a", 3.0)
    assert island.steps(3.0) == ["start a"]
    island.core.loaded("a", 4.0)
    assert later.backend == "a"
    island.sound()


def test_the_last_words_of_who_died_are_kept_until_it_is_back():
    island = Island(A).with_resident("a")
    island.core.release(island.request("a", 1.0), 1.0)
    island.core.died("a", 2.0, "exited with code 137", ["no more memory"])
    assert island.core.seats["a"].log == ("no more memory",)
    island.request("a", 3.0)
    assert island.steps(3.0) == ["start a"]
    island.core.died("a", 3.5, "killed", ["of an earlier run"])
    assert island.core.seats["a"].log == ("no more memory",)
    island.core.loaded("a", 4.0)
    assert island.core.seats["a"].log == ()


# Ends soon after a load


def loaded(island, at, name="a"):
    """A request, which has ``name`` loaded."""
    ticket = island.request(name, at)
    assert island.steps(at) == [f"start {name}"]
    island.core.loaded(name, at)
    return ticket


def test_who_ends_soon_after_its_load_and_never_answered_cools_down_as_if_it_had_failed_to_load():
    island, now, pauses = Island(A), 0.0, []
    for _ in range(4):
        held = loaded(island, now)
        island.core.died("a", now + 1.0, "exited with code 139", ["segmentation fault"])
        soon = "1.0 s after it was loaded, before it gave one whole answer"
        assert held.crash.why == f"exited with code 139 {soon}"
        island.core.release(held, now + 1.0, whole=False)
        refused = island.request("a", now + 1.0)
        assert (refused.error.code, refused.error.retry) == ("load_failed", False)
        assert "a ended and is not tried again for" in refused.error.message
        assert "exited with code 139" in refused.error.message
        assert "segmentation fault" in refused.error.message
        pauses.append(island.core.seats["a"].retry_at - now - 1.0)
        now = island.core.seats["a"].retry_at
    assert pauses == [5.0, 10.0, 20.0, 40.0]
    assert island.core.seats["a"].error.startswith("exited with code 139")
    island.sound()


def test_the_line_of_one_that_ends_soon_after_its_load_fails_at_once():
    island = Island(backend("a", concurrency=1))
    loaded(island, 0.0)
    waiting = island.request("a", 1.0)
    island.core.died("a", 2.0, "exited with code 139", ["segmentation fault"])
    assert island.core.settled[-1] is waiting
    assert "exited with code 139" in waiting.error.message
    assert "segmentation fault" in waiting.error.message
    island.sound()


@pytest.mark.parametrize("answered", [True, False])
def test_one_whole_answer_since_the_load_is_enough_to_be_loaded_again_at_once(answered):
    island = Island(A)
    first = loaded(island, 0.0)
    other = island.request("a", 0.5)
    island.core.release(first, 1.0, whole=answered)
    island.core.died("a", 2.0, "killed")
    assert (island.request("a", 2.0).error is None) is answered
    assert island.steps(2.0) == (["start a"] if answered else [])
    island.core.release(other, 3.0, whole=False)
    assert [e.reason for e in island.log if e.kind == "released"] == ["" if answered else "no whole answer"]
    assert check(island.log, island.config) == []


def test_a_whole_answer_between_two_such_ends_begins_the_count_anew():
    island = Island(A)
    loaded(island, 0.0)
    island.core.died("a", 1.0, "killed")
    answered = loaded(island, 6.0)
    island.core.release(answered, 7.0)
    island.core.died("a", 8.0, "killed")
    loaded(island, 8.0)
    island.core.died("a", 9.0, "killed")
    assert island.core.seats["a"].retry_at == 14.0
    island.request("a", 14.0)
    assert island.steps(14.0) == ["start a"]
    assert check(island.log, island.config) == []


def test_who_ends_long_after_its_load_is_loaded_again_at_once_whether_it_answered_or_not():
    island = Island(A)
    loaded(island, 0.0)
    island.core.died("a", SOON_SECONDS + 0.5, "killed")
    island.request("a", SOON_SECONDS + 0.5)
    assert island.steps(SOON_SECONDS + 0.5) == ["start a"]
    assert check(island.log, island.config) == []


def test_an_end_soon_after_a_wake_counts_and_that_of_one_that_rests_does_not():
    island = Island(backend("a", rest=("sleep",)), B).with_resident("a")
    island.core.release(island.request("a", 0.0), 0.0)
    island.request("b", 1.0)
    assert island.steps(1.0) == ["stop a"]
    island.core.evicted("a", 1.0, how="sleep")
    assert island.steps(1.0) == ["start b"]
    island.core.loaded("b", 2.0)
    island.core.died("a", 3.0, "killed")
    assert island.core.seats["a"].retry_at <= 3.0
    island.sound()


def test_how_one_ended_that_was_about_to_be_stopped_is_kept_and_told():
    island = Island(A, B).with_resident("a")
    island.core.release(island.request("a", 0.0), 0.0)
    waiting = island.request("b", 1.0)
    assert island.steps(1.0) == ["stop a"]
    island.core.evicted("a", 2.0, died="exited with code 139", log=["segmentation fault"])
    seat = island.core.seats["a"]
    assert (seat.error, seat.log) == ("exited with code 139", ("segmentation fault",))
    assert island.log[-1].reason == "died: exited with code 139"
    assert island.steps(2.0) == ["start b"]
    island.core.loaded("b", 3.0)
    assert waiting.backend == "b"
    island.sound()


def test_one_that_ended_too_soon_and_was_about_to_be_stopped_cools_down_all_the_same():
    island = Island(A, B).with_resident("a")
    island.request("b", 1.0)
    assert island.steps(1.0) == ["stop a"]
    island.core.evicted("a", 2.0, died="exited with code 139")
    assert "exited with code 139" in island.request("a", 3.0).error.message
    assert check(island.log, island.config) == []


def test_an_end_that_a_stop_brought_about_late_is_no_death():
    island = Island(A).with_resident("a")
    island.core.unload_requested("a", 1.0, "unload requested")
    assert island.steps(1.0) == ["stop a"]
    island.core.evict_failed("a", 2.0, "no")
    assert island.steps(7.0) == ["stop a"]
    island.core.evicted("a", 8.0, died="was killed (code 137)")
    assert (island.core.seats["a"].error, island.log[-1].reason) == ("", "")
    assert not island.request("a", 9.0).settled


def test_the_checker_sees_a_load_before_the_cool_down_of_who_ended_too_soon():
    island = Island(A)
    loaded(island, 0.0)
    island.core.died("a", 1.0, "killed")
    island.core.seats["a"].retry_at = 0.0
    island.request("a", 2.0)
    assert island.steps(2.0) == ["start a"]
    assert check(island.log, island.config) == ["2.000000 loading a: before its cool-down ended"]


def test_a_request_that_was_there_when_two_engines_ended_is_not_leased_a_third_time():
    island = Island(A)
    before = ()
    for now in (0.0, 60.0):
        held = island.request("a", now, crashes=before)
        assert island.steps(now) == ["start a"]
        island.core.loaded("a", now)
        other = island.request("a", now)
        island.core.release(other, now + 1.0)
        island.core.died("a", now + 2.0, "exited with code 139", ["segmentation fault"])
        before = (*held.crashes, held.crash)
        assert other.crash is None
    refused = island.request("a", 70.0, crashes=before)
    assert (refused.error.status, refused.error.code, refused.error.retry) == (502, "engine_crashed", False)
    assert "2 times engines ended under this request" in refused.error.message
    assert "exited with code 139" in refused.error.message
    assert "segmentation fault" in refused.error.message
    assert island.steps(70.0) == []
    assert not island.request("a", 71.0).settled


def test_a_victim_that_dies_in_its_drain_makes_room_at_once():
    island = Island(A, B).with_resident("a")
    island.request("a", 1.0)
    island.request("b", 2.0)
    assert island.steps(2.0) == []
    island.core.died("a", 3.0, "killed")
    assert island.steps(3.0) == ["start b"]
    island.core.loaded("b", 4.0)
    island.sound()


# What can never fit


def test_a_load_that_can_never_fit_is_refused_and_disturbs_nobody():
    island = Island(backend("a", vram=6), backend("b", vram=11), gpus=TEN).with_resident("a")
    lease = island.request("a", 1.0)
    refused = island.request("b", 2.0)
    assert isinstance(refused.error, DoesNotFit)
    assert refused.error.status == 422
    assert island.steps(2.0) == []
    assert island.state("a") == "ready"
    assert list(island.core.seats["a"].holders) == [lease]
    island.sound()


def test_a_swap_is_credited_with_the_memory_of_those_it_puts_out():
    island = Island(backend("a", vram=8), backend("b", vram=9), gpus=TEN).with_resident("a")
    island.request("b", 1.0)
    assert island.steps(1.0) == ["stop a"]


def test_nobody_is_put_out_for_a_model_that_does_not_fit_beside_a_pinned_one():
    pinned, small, large = backend("p", vram=6, pin=True), backend("s", vram=4), backend("l", vram=5)
    island = Island(pinned, small, large, gpus=TEN).with_resident("p").with_resident("s")
    assert "beside the pinned p" in island.request("l", 1.0).error.message
    assert island.steps(1.0) == []


def test_a_line_that_a_pinned_load_shut_out_is_refused_and_blocks_nobody():
    pinned, small, large = backend("p", vram=6, pin=True), backend("s", vram=4), backend("l", vram=5)
    island = Island(pinned, small, large, gpus=TEN)
    island.request("p", 0.0)
    assert island.steps(0.0) == ["start p"]
    # Already in line when the pinned one arrives:
    island = Island(pinned, small, large, gpus=TEN, policy=PinnedFirst())
    shut_out = island.request("l", 0.0)
    island.request("p", 1.0)
    assert island.steps(1.0) == ["start p"]
    island.core.loaded("p", 2.0)
    assert isinstance(shut_out.error, DoesNotFit)
    other = island.request("s", 100.0)
    assert island.steps(100.0) == ["start s"]
    island.core.loaded("s", 101.0)
    assert other.backend == "s"
    island.sound()


@pytest.mark.parametrize("loads", [True, False])
def test_who_joins_a_line_while_a_pinned_load_is_under_way_shares_its_fate(loads):
    pinned, large = backend("p", vram=6, pin=True), backend("l", vram=5)
    island = Island(pinned, large, gpus=TEN, policy=PinnedFirst())
    line = [island.request("l", 0.0)]
    island.request("p", 1.0)
    assert island.steps(1.0) == ["start p"]
    line.append(island.request("l", 1.5))
    assert not any(ticket.settled for ticket in line)
    if loads:
        island.core.loaded("p", 2.0)
        assert [type(ticket.error) for ticket in line] == [DoesNotFit, DoesNotFit]
        return
    island.core.load_failed("p", 2.0, LoadError("no"))
    assert not any(ticket.settled for ticket in line)
    assert island.steps(60.0) == ["start l"]  # overdue: this policy would not
    island.core.loaded("l", 61.0)
    assert [ticket.backend for ticket in line] == ["l", "l"]
    island.sound()


class PinnedFirst:
    def decide(self, seen):
        wanted = [line.model for line in seen.lines if line.model != "l"]
        return SwapTo(wanted[0]) if wanted else Stay()


# Memory, replicas, several GPUs


def test_models_with_declared_memory_are_resident_together_as_long_as_they_fit():
    island = Island(*(backend(name, vram=4) for name in "abc"), gpus=TEN)
    island.with_resident("a", 0.0).with_resident("b", 1.0)
    assert island.states() == {"a": "ready", "b": "ready", "c": "stopped"}
    island.request("c", 2.0)
    assert island.steps(2.0) == ["stop a"]  # used longest ago
    island.core.evicted("a", 3.0)
    assert island.steps(3.0) == ["start c"]
    island.core.loaded("c", 4.0)
    island.sound()


def test_the_idle_one_of_two_residents_is_put_out():
    island = Island(*(backend(name, vram=5) for name in "abc"), gpus=TEN)
    island.with_resident("a", 0.0).with_resident("b", 1.0)
    island.request("a", 2.0)
    island.core.release(island.request("b", 3.0), 4.0)
    island.request("c", 5.0)
    assert island.steps(5.0) == ["stop b"]


def test_a_model_without_declared_memory_needs_the_whole_gpu():
    island = Island(backend("a", vram=1), B, gpus=TEN).with_resident("a")
    island.request("b", 1.0)
    assert island.steps(1.0) == ["stop a"]


def test_a_model_that_needs_no_gpu_is_loaded_beside_everything():
    cpu = Backend("cpu", "cpu")
    assert [name for name, _ in islands([A, cpu, B])] == ["no-gpu:cpu", "0"]
    island = Island(cpu).with_resident("cpu")
    assert island.request("cpu", 1.0).backend == "cpu"


def test_replicas_share_the_load_and_any_of_them_serves_the_line():
    island = Island(backend("r0", "0", model="m"), backend("r1", "1", model="m"))
    for name in ("r0", "r1"):
        island.core.adopt(name, 0.0)
    assert [island.request("m", 1.0).backend for _ in range(4)] == ["r0", "r1", "r0", "r1"]


# Another replica of a busy model. Nothing is known of loads here, so one is taken to last 10 s.


def busy(*more, requests=3, **settings):
    """r0 is resident and has some requests, since moment 0; r1 could be loaded on GPU 1."""
    replicas = backend("r0", "0", model="m"), backend("r1", "1", model="m")
    island = Island(*replicas, *more, **settings)
    island.core.adopt("r0", 0.0)
    held = [island.request("m", 0.0) for _ in range(requests)]
    return island, held


def test_another_replica_is_loaded_once_the_waiting_have_waited_together_for_a_load():
    island, _ = busy()
    assert island.steps(0.0) == []
    assert island.until == 5.0  # two wait behind the first
    assert island.steps(5.0) == ["start r1"]
    assert island.log[-1].reason == "2 wait at busy replicas"
    island.core.loaded("r1", 15.0)
    assert island.request("m", 15.0).backend == "r1"
    assert island.steps(15.0) == []
    island.sound()


def test_a_request_that_waits_behind_nobody_loads_no_other_replica():
    island, _ = busy(requests=1)
    assert island.steps(0.0) == []
    assert island.until == inf
    assert island.steps(1000.0) == []


def test_requests_that_are_answered_do_not_wait():
    island, held = busy()
    for ticket in held[:2]:
        island.core.first_byte(ticket)
    assert island.steps(100.0) == []
    island.core.release(held[0], 100.0)
    assert island.steps(100.0) == []


def test_a_request_that_begins_to_wait_asks_for_the_next_step():
    island, _ = busy(requests=1)
    assert island.core.request(Ticket(8, "m", 1.0), 1.0)
    assert island.steps(1.0) == []
    assert island.until == 11.0


def test_no_backend_with_requests_is_put_out_for_another_replica():
    island, held = busy(backend("b", "1"))
    island.core.adopt("b", 0.0)
    other = island.request("b", 0.0)
    assert island.steps(1000.0) == []
    island.core.release(other, 1000.0)
    assert island.steps(1000.0) == ["stop b"]
    island.core.evicted("b", 1001.0)
    for ticket in held:
        island.core.release(ticket, 1001.0)
    assert island.steps(1001.0) == ["start r1"]  # what is begun is finished


def test_putting_out_an_idle_model_costs_its_load_too():
    island, _ = busy(backend("b", "1"))
    island.core.adopt("b", 0.0)
    assert island.steps(0.0) == []
    assert island.until == (1.0 + 10.0 + 10.0) / 2  # evict, load, load b again


def streamed(island, at, *backends):
    """Streamed requests, in this order at these replicas (the others being out of the choice)."""
    tickets = []
    for name in backends:
        ticket = Ticket(next(island.ids), "m", at, work=Work(tokens=100, stream=True))
        island.core.request(ticket, at)
        assert ticket.backend == name
        tickets.append(ticket)
    return tickets


def test_requests_that_wait_behind_others_are_taken_back_when_another_replica_comes():
    island = Island(backend("r0", "0", model="m"), backend("r1", "1", model="m"))
    island.core.adopt("r0", 0.0)
    first, second, third = streamed(island, 0.0, "r0", "r0", "r0")
    assert island.steps(5.0) == ["start r1"]
    island.core.loaded("r1", 15.0)
    assert island.core.taken_back == [third]
    assert third.severed == Cause("moved")
    assert third.taken_back
    assert island.log[-1].reason == "taken back for r1"
    assert not island.core.release(third, 15.0)
    assert list(island.core.seats["r0"].holders) == [first, second]
    assert streamed(island, 15.0, "r1")
    island.sound()


def test_a_replica_that_becomes_idle_takes_one_that_waits():
    island = Island(backend("r0", "0", model="m"), backend("r1", "1", model="m"))
    for name in ("r0", "r1"):
        island.core.adopt(name, 0.0)
    tickets = streamed(island, 0.0, "r0", "r1", "r0", "r1", "r0")
    island.core.release(tickets[1], 1.0)
    assert island.core.taken_back == []
    island.core.release(tickets[3], 2.0)
    assert island.core.taken_back == [tickets[4]]
    island.sound()


def test_a_first_byte_after_a_request_was_taken_back_comes_too_late():
    island = Island(backend("r0", "0", model="m"), backend("r1", "1", model="m"))
    island.core.adopt("r0", 0.0)
    first, second, third = streamed(island, 0.0, "r0", "r0", "r0")
    assert island.core.first_byte(first)
    island.core.adopt("r1", 1.0)
    island.core.release(streamed(island, 1.0, "r1")[0], 2.0)
    assert island.core.taken_back == [third]
    assert not island.core.first_byte(third)
    assert island.core.first_byte(second)


def test_a_pinned_model_is_not_put_out_for_another_replica():
    island, _ = busy(backend("b", "1", pin=True))
    island.core.adopt("b", 0.0)
    assert island.steps(1000.0) == []


def test_a_line_goes_before_another_replica():
    island, _ = busy(backend("b", "1"))
    island.request("b", 1000.0)
    assert island.steps(1000.0) == ["start b"]
    island.core.loaded("b", 1010.0)
    assert island.steps(1010.0) == []


def test_a_policy_may_ask_for_another_replica_itself():
    class AtOnce:
        def decide(self, seen):
            return SwapTo(seen.spills[0].model, "mine") if seen.spills else Stay()

    island, _ = busy(policy=AtOnce())
    assert island.steps(0.0) == ["start r1"]
    assert island.log[-1].reason == "mine"


def test_the_replica_that_puts_nobody_out_is_loaded():
    island = Island(backend("r0", "0", model="m"), backend("r1", "1", model="m"), backend("a", "0"))
    island.core.adopt("a", 0.0)
    island.request("m", 1.0)
    assert island.steps(1.0) == ["start r1"]
    island.core.load_failed("r1", 2.0, LoadError("no"))
    assert island.core.lines["m"]  # the other one can still serve it
    assert island.steps(2.0) == ["stop a"]


def test_an_overdue_line_is_overtaken_on_no_gpu_that_one_of_its_replicas_could_use():
    replicas = backend("r0", "0", model="m"), backend("r1", "1", "2", model="m")
    singles = backend("a", "1"), backend("b", "1"), backend("c", "2"), backend("d", "2")
    island = Island(*replicas, *singles, max_wait=10.0)
    for name in ("a", "c"):
        island.core.adopt(name, 0.0)
    island.request("b", 0.5)
    assert island.steps(0.5) == ["stop a"]
    island.request("m", 1.0)
    assert island.steps(1.0) == ["start r0"]
    island.core.load_failed("r0", 2.0, LoadError("no"))
    assert island.steps(2.0) == []  # GPU 1 is in a swap
    assert island.steps(8.0) == ["start r0"]
    island.core.load_failed("r0", 9.0, LoadError("no"))
    island.request("d", 12.5)
    assert island.steps(12.5) == []  # GPU 2 is kept for r1
    island.core.evicted("a", 13.0)
    assert island.steps(13.0) == ["start b"]


def test_two_gpus_of_an_island_swap_side_by_side():
    pair = backend("t", "0", "1")
    island = Island(backend("a", "0"), backend("b", "0"), backend("c", "1"), backend("d", "1"), pair)
    island.core.adopt("a", 0.0)
    island.core.adopt("c", 0.0)
    island.request("b", 1.0)
    island.request("d", 1.0)
    assert island.steps(1.0) == ["stop a", "stop c"]
    assert island.request("d", 1.5).settled is False
    island.core.evicted("c", 2.0)
    assert island.steps(2.0) == ["start d"]
    island.core.loaded("d", 3.0)
    assert island.request("d", 3.5).backend == "d"
    assert island.state("a") == "evicting"


def test_a_set_over_two_gpus_puts_both_residents_out_and_back():
    pair = backend("t", "0", "1")
    island = Island(backend("a", "0"), backend("b", "1"), pair)
    island.core.adopt("a", 0.0)
    island.core.adopt("b", 0.0)
    island.request("t", 1.0)
    assert island.steps(1.0) == ["stop a", "stop b"]
    island.core.evicted("a", 2.0)
    assert island.steps(2.0) == []
    island.core.evicted("b", 3.0)
    assert island.steps(3.0) == ["start t"]
    island.request("b", 4.0)
    assert island.steps(4.0) == []
    island.core.loaded("t", 5.0)
    island.core.release(next(iter(island.core.seats["t"].holders)), 6.0)
    assert island.steps(6.0) == ["stop t"]
    island.core.evicted("t", 7.0)
    assert island.steps(7.0) == ["start b"]
    island.core.loaded("b", 8.0)
    island.sound()


def test_an_overdue_set_over_two_gpus_is_not_overtaken_by_younger_singles():
    singles = [backend("a", "0"), backend("b", "0"), backend("c", "1"), backend("d", "1")]
    island = Island(*singles, backend("t", "0", "1"), max_wait=10.0)
    island.core.adopt("a", 0.0)
    island.request("b", 1.0)
    assert island.steps(1.0) == ["stop a"]
    island.request("t", 2.0)
    assert island.steps(2.0) == []  # GPU 0 is in a swap
    island.request("c", 13.0)
    assert island.steps(13.0) == []  # GPU 1 is kept for t
    island.core.evicted("a", 14.0)
    assert island.steps(14.0) == ["start b"]
    island.core.loaded("b", 15.0)
    assert island.steps(15.0) == []
    assert island.state("b") == "draining"
    assert island.core.drains()["b"] == ("t", 45.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_set_and_singles_under_constant_load_share_two_gpus_for_an_hour(policy):
    backends = (backend("a", "0"), backend("b", "1"), backend("t", "0", "1"))
    config = Config(backends=backends, policy=policy, max_wait=60.0, drain_timeout=30.0)
    trace = [Request(n / 2, "abt"[n % 3], 1.0 + n % 7) for n in range(7200)]
    log = simulate(config, trace, Engines({"a": 8.0, "b": 5.0, "t": 20.0}))
    assert check(log, config) == []
    waits = [event.seconds for event in log if event.kind == "leased"]
    assert len(waits) == 7200
    # At most: max_wait, what is under way, and a swap each for the lines that are older.
    assert max(waits) <= 60.0 + 3 * (30.0 + 1.0 + 20.0)


def test_one_request_under_endless_traffic_for_the_resident_is_served_in_time():
    for policy in (Never(), build_policy("eager"), DEBOUNCE):
        island = Island(A, B, policy=policy, max_wait=60.0, drain_timeout=30.0)
        island.core.adopt("a", 0.0)
        lone = island.request("b", 0.25)
        assert served(island, lone, Engines({"b": 10.0})) <= 60.0 + 30.0 + 1.0 + 10.0


def served(island, lone, engines):
    """Until ``lone`` is leased: a request for "a" twice a second that holds its lease for ever."""
    due, now = [], 0.25
    while not lone.settled:
        while not isinstance(step := island.core.next_step(now), Wait):
            due.append((now + engines(step, 0).seconds, step))
        moments = [step.until, (now // 0.5 + 1) * 0.5, *(moment for moment, _ in due)]
        now = min(moments)
        for moment, done in [pair for pair in due if pair[0] == now]:
            due.remove((moment, done))
            (island.core.loaded if isinstance(done, Start) else island.core.evicted)(done.backend, now)
        if now % 0.5 == 0:
            island.request("a", now)
        assert now < 1000.0
    return now - lone.since


class Loads:
    """A policy that loads one model when there is room and does nothing else."""

    def __init__(self, model):
        self._model = model

    def decide(self, seen):
        mine = [line for line in seen.lines if line.model == self._model and not line.evicts]
        return SwapTo(self._model, "room") if mine else Stay(reason="never")


# A replica that says nothing


def silent(*answering):
    """Both replicas were last heard of at 0.0, when four requests came; a has the first and the third."""
    island = Island(
        *(backend(name, gpu, model="m") for name, gpu in (("a", "0"), ("b", "1"))),
        routing="load_balance",
        routing_mode="full",
    )
    for name in "ab":
        assert island.core.adopt(name, 0.0)
    tickets = [island.request("m", 0.0, work=Work(tokens=1000)) for _ in range(4)]
    assert [ticket.backend for ticket in tickets] == ["a", "b", "a", "b"]
    for number in answering:
        island.core.first_byte(tickets[number])
    return island, tickets


def test_who_waits_at_a_replica_leaves_when_it_turns_stale_and_who_is_answered_stays():
    island, (first, _, third, _) = silent(0)
    island.core.observed("b", Load(2, 0, None), 60.0)
    island.core.silent("a", 60.9)
    assert island.core.taken_back == []
    island.core.silent("a", 61.0)
    assert island.core.taken_back == [third]
    assert (first.severed, third.severed) == (None, Cause("moved"))
    assert [e.reason for e in island.log if e.kind == "released"] == ["a is stale"]
    assert island.request("m", 61.0).backend == "b"


def test_who_waits_stays_where_no_replica_says_anything():
    island, _ = silent()
    island.core.silent("a", 100.0)
    island.core.silent("b", 100.0)
    assert island.core.taken_back == []


# The stages of a model: prefill and decode

P, D = (backend(kind, gpu, model="m", infer_type=kind) for kind, gpu in (("prefill", "0"), ("decode", "1")))


def staged(*others):
    """Both stages are resident at 2.0: the first request has brought the second one too."""
    island = Island(P, D, *others)
    island.request("m", 0.0, leases=False)
    assert island.steps(0.0) == ["start prefill"]
    island.core.loaded("prefill", 1.0)
    assert island.steps(1.0) == ["start decode"]
    island.core.loaded("decode", 2.0)
    assert island.steps(2.0) == []
    return island


def test_a_stage_that_died_is_loaded_again_once_its_model_is_asked():
    island = staged()
    answered = Ticket(8, "m", 2.5, prefill=Ticket(7, "m", 2.5))
    island.core.request(answered, 2.5)
    island.core.release(answered.prefill, 2.5)
    island.core.died("prefill", 3.0, "killed")
    assert island.steps(3.0) == []
    assert island.core.request(Ticket(9, "m", 4.0), 4.0)  # the next step is to be asked for
    assert island.steps(4.0) == ["start prefill"]
    assert island.log[-1].reason == "errand: the other stage is there"
    assert not island.core.request(Ticket(10, "m", 5.0), 5.0)
    island.sound()


def test_who_has_had_work_stays_when_a_stage_could_have_its_place():
    island = staged(B)
    island.request("b", 3.0)
    assert island.steps(3.0) == ["stop prefill"]
    island.core.evicted("prefill", 3.0)
    assert island.steps(3.0) == ["start b"]
    island.core.loaded("b", 4.0)
    island.request("m", 5.0)
    assert island.steps(5.0) == []
    assert island.states() == {"prefill": "stopped", "decode": "ready", "b": "ready"}
    island.sound()


def test_a_stage_that_could_not_be_loaded_cools_down():
    island = staged()
    island.core.died("prefill", 3.0, "killed")
    island.request("m", 4.0)
    assert island.steps(4.0) == []
    island.request("m", 8.0)
    assert island.steps(8.0) == ["start prefill"]
    island.core.load_failed("prefill", 9.0, LoadError("no"))
    for at, steps in ((10.0, []), (18.0, []), (19.0, ["start prefill"])):
        island.request("m", at)
        assert island.steps(at) == steps


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
        self.island = Island(*[backend(f"e{number}", f"{number}", **settings) for number in range(count)])
        for name in self.island.core.seats:
            self.island.core.adopt(name, 0.0)

    def ask(self):
        """A request whose prompt is computed before the next one comes; its ticket and who did what."""
        first = Ticket(next(self.island.ids), "m", 1.0, work=Work(tokens=1000, infer_type="prefill"))
        ticket = Ticket(next(self.island.ids), "m", 1.0, work=Work(tokens=1000), prefill=first)
        self.island.core.request(ticket, 1.0)
        if first.backend:
            self.island.core.release(first, 1.0)
        return ticket, (first.backend, ticket.backend)


def test_answers_gather_at_one_backend_until_it_is_full_and_prompts_go_to_the_others():
    engines = Either(3)
    found = [engines.ask() for _ in range(5)]
    assert [roles for _, roles in found] == [
        *[("e1", "e0"), ("e2", "e0"), ("e1", "e0"), ("e2", "e0")],
        ("e2", "e1"),  # a fifth answer would be too much for e0
    ]
    engines.island.core.release(found[4][0], 1.0)
    engines.island.core.release(found[0][0], 1.0)
    assert [engines.ask()[1] for _ in range(2)] == [("e1", "e0"), ("e1", "e2")]
    engines.island.sound()


def test_a_request_is_refused_if_every_backend_would_be_disturbed_in_its_answers():
    engines = Either(2)
    assert [engines.ask()[1] for _ in range(4)] == [("e1", "e0")] * 4
    ticket, roles = engines.ask()
    assert roles == (None, None)
    assert isinstance(ticket.error, Overloaded)
    engines.island.sound()


def test_the_only_backend_that_is_left_does_all_of_a_request():
    engines = Either(2)
    engines.island.core.died("e1", 1.0, "killed")
    ticket, roles = engines.ask()
    assert roles == (None, "e0")
    assert ticket.work.infer_type == "neutral"
    assert ticket.choice.reason.startswith("predicted_ttft ")


def test_the_only_backend_that_has_a_place_does_all_of_a_request():
    engines = Either(2, concurrency=1)
    assert [engines.ask()[1] for _ in range(2)] == [("e1", "e0"), (None, "e1")]
    ticket, roles = engines.ask()
    assert (roles, ticket.error) == ((None, None), None)
    assert list(engines.island.core.lines["m"]) == [ticket]


def told(engines):
    """Stage -> what is told of each backend if a request's stages are explained."""
    found = engines.island.core.explain("m", Work(tokens=1000), 1.0, staged=True)
    return {stage: {row["backend"]: row["removed_by"] for row in rows} for stage, rows in found.items()}


def test_what_is_told_of_the_stages_is_what_a_request_would_get():
    engines = Either(2)
    assert told(engines) == {
        "prefill": {"e0": "decode", "e1": ""},
        "decode": {"e0": "", "e1": "adaptive_decode"},
    }
    assert engines.ask()[1] == ("e1", "e0")
    engines.island.core.died("e1", 1.0, "killed")
    assert told(engines) == {"neutral": {"e0": "", "e1": "stopped"}}


def test_of_two_the_one_with_a_place_is_told_to_do_all_of_a_request():
    engines = Either(2, concurrency=1)
    assert engines.ask()[1] == ("e1", "e0")
    assert told(engines) == {"neutral": {"e0": "full", "e1": ""}}
    assert engines.ask()[1] == (None, "e1")


def test_one_that_died_is_loaded_again_once_its_model_is_asked_so_that_there_are_two():
    engines = Either(3)
    core = engines.island.core
    core.died("e1", 1.0, "killed")
    core.request(Ticket(90, "m", 1.0), 1.0)
    assert engines.island.steps(1.0) == []  # two are left
    core.died("e0", 1.0, "killed")
    assert core.request(Ticket(91, "m", 2.0), 2.0)
    assert engines.island.steps(2.0) == ["start e1"]
    assert engines.island.log[-1].reason == "errand: the other stage is there"
    core.request(Ticket(92, "m", 3.0), 3.0)
    assert engines.island.steps(3.0) == []
    engines.island.sound()


def test_one_that_died_is_loaded_again_also_if_the_other_may_take_no_more():
    engines = Either(2)
    for _ in range(4):
        engines.ask()
    engines.island.core.died("e1", 1.0, "killed")
    ticket = Ticket(90, "m", 2.0, work=Work(tokens=1000))
    assert engines.island.core.request(ticket, 2.0)
    assert isinstance(ticket.error, Overloaded)
    assert engines.island.steps(2.0) == ["start e1"]


# Settings per model: idle time-outs


def test_an_idle_model_is_put_out_when_its_ttl_ends_although_nobody_comes():
    island = Island(backend("a", ttl=10.0), B).with_resident("a")
    assert island.until == 10.0
    assert island.steps(9.9) == []
    assert island.steps(10.0) == ["stop a"]
    assert island.log[-1].reason == "idle for 10 s"
    island.core.evicted("a", 11.0)
    assert (island.steps(11.0), island.until) == ([], inf)
    island.sound()


def test_a_ttl_counts_from_the_last_answer_and_never_ends_during_one():
    island = Island(backend("a", ttl=10.0)).with_resident("a")
    first, second = island.request("a", 1.0), island.request("a", 2.0)
    assert (island.steps(50.0), island.until) == ([], inf)
    assert island.core.release(first, 60.0) is False
    assert island.steps(75.0) == []
    assert island.core.release(second, 80.0), "its timer must be set although nothing else happens"
    assert (island.steps(80.0), island.until) == ([], 90.0)
    late = island.request("a", 89.0)
    assert (island.steps(90.0), island.until) == ([], inf)
    island.core.release(late, 91.0)
    assert island.steps(101.0) == ["stop a"]


def test_a_ttl_of_zero_puts_a_model_out_after_its_last_answer():
    island = Island(backend("a", ttl=0.0))
    first = island.request("a", 1.0)
    assert island.steps(1.0) == ["start a"]
    island.core.loaded("a", 4.0)
    assert (island.steps(4.0), first.backend) == ([], "a")
    island.core.release(first, 5.0)
    assert island.steps(5.0) == ["stop a"]


def test_each_of_two_co_residents_has_its_own_ttl():
    island = Island(backend("a", vram=5, ttl=10.0), backend("b", vram=5, ttl=30.0), gpus=TEN)
    island.with_resident("a").with_resident("b")
    assert island.until == 10.0
    assert (island.steps(10.0), island.until) == (["stop a"], 30.0)
    island.core.evicted("a", 11.0)
    assert island.steps(30.0) == ["stop b"]


def test_when_the_ttl_of_the_resident_ends_the_line_that_the_policy_holds_back_has_room_and_goes():
    patient = build_policy("debounce", {"quiet": 50.0, "max_hold": 50.0})
    island = Island(backend("a", ttl=10.0), B, policy=patient).with_resident("a")
    waiting = island.request("b", 5.0)
    assert (island.steps(5.0), island.until) == ([], 10.0)
    assert island.steps(10.0) == ["stop a"]
    assert island.steps(10.0) == []  # the GPU is not free yet
    island.core.evicted("a", 11.0)
    assert island.steps(11.0) == ["start b"]
    assert island.log[-1].reason == "1 waiting, room is free"
    island.core.loaded("b", 12.0)
    assert waiting.backend == "b"
    island.sound()


def test_a_request_during_the_stop_of_an_idle_model_loads_it_again():
    island = Island(backend("a", ttl=10.0), B).with_resident("a")
    island.steps(10.0)
    again = island.request("a", 10.5)
    assert island.steps(10.5) == []
    island.core.evicted("a", 11.0)
    assert island.steps(11.0) == ["start a"]
    island.core.loaded("a", 12.0)
    assert again.backend == "a"
    island.sound()


def test_the_ttl_of_a_model_that_ran_before_counts_from_its_adoption():
    island = Island(backend("a", ttl=10.0))
    island.core.adopt("a", 3.0)
    assert (island.steps(3.0), island.until) == ([], 13.0)
    assert island.steps(13.0) == ["stop a"]


# Settings per model: the shortest stay


def test_a_model_stays_for_its_min_residency_and_the_line_that_waits_for_it_is_told_why():
    island = Island(backend("a", min_residency=20.0), B)
    island.request("a", 0.0, leases=False)
    island.steps(0.0)
    island.core.loaded("a", 3.0)  # counted from here
    island.request("b", 5.0)
    assert (island.steps(5.0), island.until) == ([], 23.0)
    (deferred,) = (event for event in island.log if event.kind == "deferred")
    assert (deferred.model, deferred.size, deferred.seconds) == ("b", 1, 18.0)
    assert deferred.reason == "a may stay for min_residency"
    assert island.core.deferred[0] == "b"
    assert island.request("a", 6.0, leases=False).backend == "a"
    assert island.steps(22.9) == []
    assert island.steps(23.0) == ["stop a"]
    assert island.tell("deferred") == ["deferred b"]


def test_an_overdue_line_breaks_a_min_residency():
    island = Island(backend("a", min_residency=100.0), B, max_wait=10.0).with_resident("a")
    island.request("b", 5.0)
    assert (island.steps(5.0), island.until) == ([], 15.0)
    assert [event.seconds for event in island.log if event.kind == "deferred"] == [10.0]
    assert island.steps(15.0) == ["stop a"]
    assert island.log[-1].reason == "overdue"


def test_a_min_residency_holds_nobody_up_who_has_room():
    island = Island(backend("a", vram=4, min_residency=100.0), backend("b", vram=4), gpus=TEN)
    island.with_resident("a")
    island.request("b", 1.0)
    assert island.steps(1.0) == ["start b"]


def test_another_goes_in_place_of_one_that_may_stay():
    backends = backend("a", vram=5, min_residency=20.0), backend("b", vram=5), backend("c", vram=5)
    island = Island(*backends, gpus=TEN).with_resident("a").with_resident("b", 1.0)
    island.request("c", 2.0)
    assert island.steps(2.0) == ["stop b"]  # although a was used longer ago


def test_a_min_residency_neither_forbids_an_unload_nor_outlasts_a_ttl():
    island = Island(backend("a", min_residency=100.0, ttl=10.0), B).with_resident("a")
    assert island.steps(10.0) == ["stop a"]
    island = Island(backend("a", min_residency=100.0), B).with_resident("a")
    assert island.core.unload_requested("a", 1.0, "unload requested")
    assert island.steps(1.0) == ["stop a"]


def test_the_stay_that_is_told_is_that_of_who_is_in_the_way():
    pair, far = backend("t", "0", "1"), backend("c", "1", min_residency=10.0)
    island = Island(backend("a", "0", min_residency=30.0), backend("b", "0"), far, pair)
    for name in "ac":
        island.request(name, 0.0, leases=False)
    assert island.steps(0.0) == ["start a", "start c"]
    for name in "ac":
        island.core.loaded(name, 0.0)
    island.request("b", 2.0)
    assert island.steps(2.0) == []
    (deferred,) = (event for event in island.log if event.kind == "deferred")
    assert (deferred.seconds, deferred.reason) == (28.0, "a may stay for min_residency")


def test_a_model_that_ran_before_counts_as_resident_for_long():
    watched = Watched()
    island = Island(backend("a", min_residency=100.0), B, policy=watched)
    island.core.adopt("a", 50.0)
    island.request("b", 51.0)
    assert island.steps(51.0) == ["stop a"]
    assert [(r.model, r.since, r.last_used) for r in watched.seen[0].residents] == [("a", -inf, 50.0)]


@pytest.mark.parametrize("policy", ["cost_aware", "time_slice"])
def test_no_policy_lets_a_model_that_ran_before_have_its_stay_once_more(policy):
    island = Island(A, B, policy=build_policy(policy))
    island.core.adopt("a", 50.0)
    tickets = [island.request("b", 51.0) for _ in range(10)]
    assert island.steps(51.0) == ["stop a"]
    assert not any(ticket.settled for ticket in tickets)


class Watched:
    """Keeps what it saw; swaps to the first line, or never."""

    def __init__(self, *, swaps=True):
        self.swaps = swaps
        self.seen = []

    def decide(self, seen):
        self.seen.append(seen)
        return SwapTo(seen.lines[0].model, "first") if seen.lines and self.swaps else Stay()

    def lines(self):
        """The last that it saw."""
        return next(seen.lines for seen in reversed(self.seen) if seen.lines)


def test_the_policy_is_not_asked_where_there_is_nothing_to_load_and_nothing_to_put_out():
    watched = Watched()
    island = Island(A, B, policy=watched)
    assert island.steps(0.0) == []
    island.core.adopt("a", 0.0)
    island.request("b", 1.0)
    assert island.steps(1.0) == ["stop a"]
    asked = len(watched.seen)
    island.request("a", 2.0)
    island.core.evicted("a", 3.0)
    assert island.steps(3.0) == ["start b"]
    assert len(watched.seen) == asked == 1
    island.core.loaded("b", 4.0)
    assert island.steps(4.0) == []
    assert len(watched.seen) > asked


class Holds:
    """Stays, and says up to how many leases that holds."""

    def __init__(self, leases):
        self.leases = leases

    def decide(self, seen):
        return Stay(99.0, "held", self.leases)


@pytest.mark.parametrize(
    ("leases", "asked"),
    [(0, [False] * 4), (2, [False, False, True, True]), (9, [True] * 4), (inf, [True] * 4)],
)
def test_the_end_of_a_lease_asks_the_policy_unless_its_answer_holds_for_those_left(leases, asked):
    island = Island(A, B, policy=Holds(leases))
    island.core.adopt("a", 0.0)
    held = [island.request("a", 1.0) for _ in range(4)]
    island.request("b", 2.0)
    island.steps(2.0)
    assert [island.core.release(ticket, 3.0) for ticket in held] == asked


def test_the_end_of_a_lease_asks_the_policy_anyway_where_it_may_change_who_would_go():
    island = Island(*(backend(name, vram=4) for name in "abc"), gpus=TEN, policy=Holds(0))
    island.core.adopt("a", 0.0)
    island.core.adopt("b", 0.0)
    held = [island.request("a", 1.0) for _ in range(2)]
    island.request("c", 2.0)
    island.steps(2.0)
    assert [island.core.release(ticket, 3.0) for ticket in held] == [True, True]


# Settings per model: priority and max_wait


def two_lines(policy=None):
    """Lines for low (since 2.0) and high (since 3.0) while c loads, which is ready at 5.0."""
    policy = policy or build_policy("eager")
    island = Island(backend("low", priority=-1), backend("high", priority=7), C, policy=policy)
    held = island.request("c", 1.0)
    assert island.steps(1.0) == ["start c"]
    island.request("low", 2.0)
    island.request("high", 3.0)
    island.core.loaded("c", 5.0)
    return island, held


def test_of_two_lines_that_with_the_higher_priority_goes_first():
    island, held = two_lines()
    island.steps(5.0)
    island.core.release(held, 6.0)
    assert island.steps(6.0) == ["stop c"]
    island.core.evicted("c", 7.0)
    assert island.steps(7.0) == ["start high"]


def test_a_policy_sees_the_lines_in_the_order_of_priority_and_those_alike_in_that_of_age():
    watched = Watched(swaps=False)
    island = Island(A, B, C, backend("d", priority=1), backend("e", priority=1), policy=watched)
    island.core.adopt("a", 0.0)
    for moment, model in enumerate("cebd"):
        island.request(model, float(moment))
    island.steps(4.0)
    assert [line.model for line in watched.lines()] == ["e", "d", "c", "b"]


def test_an_overdue_line_goes_before_one_with_a_higher_priority():
    island, held = two_lines(Loads("c"))
    assert island.steps(61.9) == []
    assert island.steps(62.0) == []
    assert island.core.drains() == {"c": ("low", 92.0)}
    assert held.backend == "c"


def test_who_has_the_lowest_priority_is_put_out_even_if_it_was_used_last_and_is_leased():
    backends = backend("a", vram=5, priority=3), backend("b", vram=5, priority=-3), backend("c", vram=5)
    island = Island(*backends, gpus=TEN).with_resident("a").with_resident("b", 1.0)
    island.request("b", 2.0)
    island.request("c", 3.0)
    island.steps(3.0)
    assert island.states() == {"a": "ready", "b": "draining", "c": "stopped"}


def test_a_model_has_the_highest_priority_and_the_shortest_max_wait_of_its_replicas():
    r0 = backend("r0", "0", model="m", priority=2, max_wait=50.0)
    r1 = backend("r1", "1", model="m", priority=9, max_wait=7.0)
    watched = Watched(swaps=False)
    island = Island(r0, r1, A, backend("b", "1"), backend("c", "0", priority=5), policy=watched)
    for name in ("a", "b"):
        island.core.adopt(name, 0.0)
    island.request("c", 1.0)
    island.request("m", 2.0)
    island.steps(2.0)
    assert [(line.model, line.max_wait) for line in watched.lines()] == [("m", 7.0), ("c", 60.0)]
    assert island.steps(9.0) == ["stop a"]


@pytest.mark.parametrize("own", [5.0, 200.0])
def test_a_line_is_overdue_by_the_max_wait_of_its_own_model(own):
    island = Island(A, backend("b", max_wait=own), policy=Never(), max_wait=60.0)
    island.core.adopt("a", 0.0)
    island.request("b", 1.0)
    assert (island.steps(1.0), island.until) == ([], 1.0 + own)
    assert island.steps(island.until - 0.1) == []
    assert island.steps(1.0 + own) == ["stop a"]


def test_a_younger_line_that_is_overdue_goes_before_an_older_one_that_is_not():
    island = Island(A, backend("b", max_wait=500.0), backend("c", max_wait=5.0), policy=Never())
    island.core.adopt("a", 0.0)
    island.request("b", 1.0)
    island.request("c", 2.0)
    assert island.steps(2.0) == []
    assert island.steps(7.0) == ["stop a"]
    island.core.evicted("a", 8.0)
    assert island.steps(8.0) == ["start c"]


def test_no_line_that_may_still_wait_takes_a_gpu_that_is_kept_for_an_overdue_one():
    singles = backend("a", "0"), backend("b", "0"), backend("c", "1", max_wait=500.0), backend("d", "1")
    patient = build_policy("debounce", {"quiet": 15.0, "max_hold": 15.0})
    island = Island(*singles, backend("t", "0", "1", max_wait=10.0), policy=patient, max_wait=60.0)
    for name in ("a", "d"):
        island.core.adopt(name, 0.0)
    island.request("b", 0.0)
    island.request("c", 1.0)
    island.request("t", 6.0)
    assert island.steps(6.0) == []
    assert island.steps(15.0) == ["stop a"]  # for b
    assert island.steps(16.0) == []  # GPU 1 is kept for t, though c is older and was held for long enough
    island.core.evicted("a", 17.0)
    assert island.steps(17.0) == ["start b"]
    island.core.loaded("b", 18.0)
    assert island.steps(18.0) == ["stop d"]
    assert island.core.drains()["b"] == ("t", 48.0)


# What swaps cost


def learned(island):
    return {(c.source, c.target): (c.evict_seconds, c.load_seconds, c.swaps) for c in island.costs}


def test_what_a_swap_cost_is_its_eviction_and_its_load_without_the_drain_and_what_the_policy_waited_for():
    island = Island(A, B, policy=DEBOUNCE).with_resident("a")
    lease = island.request("a", 0.5)
    island.request("b", 1.0)
    for moment in (1.0, 3.0):  # deferred, then a drains
        assert island.steps(moment) == []
    island.core.release(lease, 9.0)
    assert island.steps(9.0) == ["stop a"]
    island.core.evicted("a", 11.0)
    assert island.steps(11.0) == ["start b"]
    island.core.loaded("b", 17.0)
    assert learned(island) == {("", "a"): (0.0, 0.0, 1), ("a", "b"): (2.0, 6.0, 1)}


def test_the_eviction_of_several_victims_lasts_from_the_end_of_the_last_drain_until_all_have_gone():
    small = [backend(name, vram=5) for name in "ab"]
    island = Island(*small, backend("c", vram=10), gpus=TEN).with_resident("a").with_resident("b")
    lease = island.request("b", 1.0)
    island.request("c", 2.0)
    assert island.steps(2.0) == ["stop a"]
    island.core.evicted("a", 3.0)
    island.core.release(lease, 5.0)
    assert island.steps(5.0) == ["stop b"]
    island.core.evicted("b", 6.5)
    assert island.steps(6.5) == ["start c"]
    island.core.loaded("c", 10.5)
    assert learned(island)["a+b", "c"] == (1.5, 4.0, 1)


def test_a_swap_that_failed_teaches_nothing():
    island = Island(A, B).with_resident("a")
    island.request("b", 1.0)
    island.steps(1.0)
    island.core.evicted("a", 2.0)
    island.steps(2.0)
    island.core.load_failed("b", 3.0, LoadError("no"))
    assert set(learned(island)) == {("", "a")}
    island.core.adopt("a", 4.0)
    assert set(learned(island)) == {("", "a")}


def test_a_line_is_seen_with_what_its_own_swap_would_cost_first_as_an_estimate_and_then_as_it_was():
    watched = Watched()
    island = Island(backend("a", engine="vllm"), B, policy=watched)
    moment, seen = 0.0, []
    for name, load in (("a", 30.0), ("b", 8.0), ("a", 20.0), ("b", 4.0)):
        lease = island.request(name, moment)
        for step in island.steps(moment):
            if step.startswith("stop"):
                moment += 2.0
                island.core.evicted(step.removeprefix("stop "), moment)
                assert island.steps(moment) == [f"start {name}"]
        (line,) = watched.lines()
        seen.append((line.evicts, line.evict_seconds, line.load_seconds, line.learned))
        moment += load
        island.core.loaded(name, moment)
        island.core.release(lease, moment)
    assert seen == [
        ((), 0.0, 60.0, False),
        (("a",), 1.0, 10.0, False),
        (("b",), 1.0, 30.0, False),
        (("a",), 2.0, 8.0, True),
    ]


def test_the_policy_sees_how_often_models_are_asked_for_and_how_long_their_answers_and_pauses_take():
    watched = Watched(swaps=False)
    island = Island(backend("a", "0"), backend("b", "0"), policy=watched)
    island.core.adopt("a", 0.0)
    a, b = Demand(), Demand()
    for begin, end in ((1.0, 3.0), (7.0, 13.0), (14.0, 16.0)):
        pause = begin - max(island.core.seats["a"].last_used, 0.0)
        island.core.release(island.request("a", begin), end)
        a.arrived(begin)
        a.returned(pause, begin)
        a.served(end - begin)
        a.idle(end)
    held = [island.request("a", moment) for moment in (17.0, 18.0)]
    a.arrived(17.0)
    a.returned(1.0)
    a.arrived(18.0)  # while the first still runs: no pause
    for moment in (20.0, 21.0, 23.0):
        island.request("b", moment)
        b.arrived(moment)
    island.steps(24.0)
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
    island = Island(A, B, policy=watched).with_resident("a")
    for moment in (1.0, 1.5, 2.0, 2.5):
        island.request("b", moment)
        island.steps(moment)
    island.core.evicted("a", 3.0)
    island.steps(3.0)
    island.core.loaded("b", 6.0)
    b = Demand()
    for moment in (1.0, 1.5, 2.0, 2.5):
        b.arrived(moment)
    b.admitted(4, 5.0)
    island.steps(7.0)
    assert watched.seen[-1].residents[0].growth == b.growth(7.0)


def test_the_policy_sees_swaps_on_other_gpus_and_how_far_they_are():
    watched = Watched()
    island = Island(A, B, backend("c", "1"), backend("d", "1"), backend("t", "0", "1"), policy=watched)
    island.core.adopt("a", 0.0)
    island.core.adopt("c", 0.0)
    island.request("a", 0.5)
    island.request("b", 1.0)
    for moment, fact in (
        (1.0, lambda: None),
        (2.0, lambda: island.core.release(next(iter(island.core.seats["a"].holders)), 2.0)),
        (3.0, lambda: island.core.evicted("a", 3.0)),
        (4.0, lambda: island.core.loaded("b", 4.0)),
    ):
        fact()
        island.steps(moment)
    seen = [(s.model, s.evicts, s.state, s.since) for each in watched.seen for s in each.swapping]
    assert sorted(set(seen), key=seen.index) == [
        ("b", ("a",), "draining", 1.0),
        ("b", ("a",), "evicting", 2.0),
        ("b", ("a",), "loading", 3.0),
    ]


# Orders from outside


def test_an_unload_drains_and_leaves_the_gpu_empty():
    island = Island(A, B).with_resident("a")
    lease = island.request("a", 1.0)
    assert island.core.unload_requested("a", 2.0, "unload requested")
    assert island.steps(2.0) == []
    island.core.release(lease, 3.0)
    assert island.steps(3.0) == ["stop a"]
    island.core.evicted("a", 4.0)
    assert island.steps(4.0) == []
    assert not island.core.unload_requested("a", 5.0, "unload requested")
    assert island.state("a") == "stopped"
    island.sound()


def test_a_request_during_an_unload_is_served_after_it():
    island = Island(A).with_resident("a")
    island.core.unload_requested("a", 1.0, "unload requested")
    assert island.steps(1.0) == ["stop a"]
    ticket = island.request("a", 2.0)
    assert not ticket.settled
    island.core.evicted("a", 3.0)
    assert island.steps(3.0) == ["start a"]
    island.core.loaded("a", 4.0)
    assert ticket.backend == "a"
    island.sound()


def test_what_runs_already_is_adopted_if_it_fits_beside_the_others():
    island = Island(A, B)
    assert island.core.adopt("a", 0.0)
    assert not island.core.adopt("b", 0.0)
    assert island.request("a", 1.0).backend == "a"
    assert island.steps(1.0) == []
    island.sound()


def test_nothing_is_begun_before_it_is_known_what_runs_already():
    island = Island(A, B)
    for name in "ab":
        island.core.expected(name)
    first, other = island.request("a", 1.0), island.request("b", 1.0)
    assert island.steps(1.0) == []
    assert island.until == inf
    assert island.core.adopt("a", 2.0)
    assert island.core.settled == [first]
    assert first.backend == "a"
    assert island.request("a", 3.0).backend == "a"
    island.core.release(first, 3.0)
    assert island.steps(100.0) == []  # b may hold the GPU too: it is still being looked at, or stopped
    assert island.state("a") == "ready"
    island.core.looked_at("b")
    assert island.steps(101.0) == []
    assert island.state("a") == "draining"
    assert other.backend is None


def test_what_was_looked_at_and_not_adopted_is_loaded():
    island = Island(A, B)
    island.core.expected("a")
    waits = island.request("a", 1.0)
    assert island.steps(1.0) == []
    assert waits.error is None
    island.core.looked_at("a")
    assert island.steps(2.0) == ["start a"]


def test_what_does_not_fit_beside_a_pinned_one_that_is_adopted_is_refused():
    island = Island(backend("a", pin=True), B)
    island.core.expected("a")
    waits = island.request("b", 1.0)
    island.core.adopt("a", 2.0)
    assert isinstance(waits.error, DoesNotFit)


def test_at_the_end_every_waiting_request_fails_with_the_reason_given():
    island = Island(A, B)
    tickets = [island.request(name, 0.0) for name in "ab"]
    error = Stuck("the end")
    island.core.fail_all(error, 1.0)
    assert [ticket.error for ticket in tickets] == [error, error]
    assert island.core.settled == tickets
    island.sound()


# The table


def reached(state):
    """An island whose backend a is in ``state``."""
    one = backend("a", rest=("sleep",), demote_after=1.5)
    if state == "stopped":
        return Island(one, B)
    if state in ("loading", "cancelling"):
        island = Island(one, B)
        island.request("a", 0.0)
        island.steps(0.0)
        if state == "cancelling":
            island.core.unload_requested("a", 0.0, "unload requested")
            island.steps(0.0)
        return island
    island = Island(one, B).with_resident("a")
    if state == "ready":
        return island
    if state == "draining":
        island.request("a", 0.0)
        island.request("b", 0.0)
        island.steps(0.0)
        return island
    island.core.unload_requested("a", 0.0, "unload requested")
    island.steps(0.0)
    if state in ("standby", "demoting"):
        island.core.evicted("a", 0.0, {"0": 0}, "sleep")
        assert state == "standby" or island.steps(1.5) == ["demote a"]
    elif state == "stuck":
        island.core.evict_failed("a", 0.0, "no")
    return island


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
    island = reached(state)
    before, log = repr(island.core), list(island.log)
    known = "cancelled" if (state, fact) == ("cancelling", "load_failed") else fact
    after = TRANSITIONS.get((state, known))
    if after:
        FACTS[fact](island.core, 1.0)
        if state == "cancelling" and after == "ready":  # it was unloaded by hand
            assert [event.kind for event in island.log[len(log) :]] == ["ready", "draining"]
        else:
            assert island.state("a") == after
    elif fact == "died":  # those who load or stop it report that instead
        FACTS[fact](island.core, 1.0)
        assert (repr(island.core), island.log) == (before, log)
    else:
        with pytest.raises(ValueError, match=f"a is {state}"):
            FACTS[fact](island.core, 1.0)
        assert (repr(island.core), island.log) == (before, log)


QUESTIONS = {
    ("stopped", "load"): lambda island: island.request("a", 1.0),
    ("standby", "load"): lambda island: island.request("a", 1.0),
    ("loading", "cancel"): lambda island: island.core.unload_requested("a", 1.0, "unload requested"),
    ("ready", "drain"): lambda island: (island.request("a", 1.0), island.request("b", 1.0)),
    ("draining", "reprieve"): lambda island: island.core.give_up(next(iter(island.core.lines["b"])), 1.0),
    ("draining", "evict"): lambda island: island.core.release(
        next(iter(island.core.seats["a"].holders)), 1.0
    ),
    ("stuck", "evict"): lambda island: None,
    ("standby", "demote"): lambda island: None,
}


@pytest.mark.parametrize("edge", QUESTIONS)
def test_the_question_moves_a_backend_as_the_table_says(edge):
    state, _ = edge
    island = reached(state)
    QUESTIONS[edge](island)
    island.core.next_step(10.0)
    assert island.state("a") == TRANSITIONS[edge]


def test_facts_and_questions_are_the_whole_table():
    facts = {(state, fact) for state in STATES for fact in FACTS}
    assert set(TRANSITIONS) <= facts | set(QUESTIONS)


def test_an_event_of_a_backend_is_named_after_the_state_it_enters():
    island = reached("draining")
    assert {e.kind for e in island.log if e.backend} - {"leased"} == {"loading", "ready", "draining"}


# Ways to rest


def rested(way):
    """``a`` has been put out for ``b``, which then ran; it rests by ``way``."""
    island = Island(backend("a", rest=("sleep",)), B).with_resident("a")
    island.request("b", 1.0)
    assert island.core.next_step(1.0) == Stop("a", "sleep")
    island.core.evicted("a", 2.0, {"0": 0}, way)
    assert island.steps(2.0) == ["start b"]
    island.core.loaded("b", 3.0)
    island.core.release(next(iter(island.core.seats["b"].holders)), 3.0)
    return island


@pytest.mark.parametrize(("way", "state"), [("sleep", "standby"), ("stop", "stopped")])
def test_a_backend_is_brought_back_by_the_way_it_really_went(way, state):
    island = rested(way)
    assert island.state("a") == state
    island.request("a", 4.0)
    assert island.steps(4.0) == ["stop b"]
    island.core.evicted("b", 5.0)
    assert island.core.next_step(5.0) == Start("a", way)


def test_who_rested_before_we_came_is_brought_back_by_the_way_it_rests():
    island = Island(backend("a", rest=("sleep",)), B)
    assert island.core.adopt("b", 0.0)
    assert island.core.adopt_standby("a", 0.0, "sleep-2", {"0": 5})
    island.request("a", 1.0)
    assert island.steps(1.0) == ["stop b"]
    island.core.evicted("b", 2.0)
    assert island.core.next_step(2.0) == Start("a", "sleep-2")


def test_a_sleeper_whose_remains_do_not_fit_beside_those_who_run_is_not_taken_over():
    small = backend("a", vram=6), backend("b", vram=6), backend("c", vram=3)
    island = Island(*small, gpus=TEN)
    assert island.core.adopt("a", 0.0)
    assert not island.core.adopt_standby("b", 0.0, "sleep", {"0": 5})
    assert island.core.adopt_standby("b", 0.0, "sleep", {"0": 3})
    assert not island.core.adopt_standby("c", 0.0, "sleep", {"0": 2})


def test_who_died_while_parked_is_started_from_nothing():
    island = rested("sleep")
    island.core.died("a", 3.5, "killed")
    island.request("a", 4.0)
    island.steps(4.0)
    island.core.evicted("b", 5.0)
    assert island.core.next_step(5.0) == Start("a", "stop")


def test_who_could_not_be_put_out_is_stopped_and_not_asked_to_sleep_again():
    island = Island(backend("a", rest=("sleep",)), B).with_resident("a")
    island.request("b", 1.0)
    island.steps(1.0)
    island.core.evict_failed("a", 2.0, "does not stop")
    assert island.core.next_step(10.0) == Stop("a", "stop")


@pytest.mark.parametrize("how", ["sleep", "stop"])
def test_a_swap_is_learned_under_the_way_that_really_brought_the_model_back(how):
    costs = Costs()
    island = Island(backend("a", rest=("sleep",)), B)
    island.core._costs = costs
    island.request("a", 0.0)
    island.steps(0.0)
    island.core.loaded("a", 7.0, how)
    assert [(cost.target, cost.way, cost.load_seconds) for cost in costs] == [("a", how, 7.0)]


def test_what_a_parked_model_costs_to_bring_back_is_what_its_way_costs():
    island = rested("sleep")
    island.core._costs.learn("b", "a", "sleep", 1.0, 0.5)
    island.core._costs.learn("b", "a", "stop", 1.0, 60.0)
    island.request("a", 4.0)
    (line,) = island.core.snapshot(4.0, {"a": island.core._plan("a", set(), 4.0)}).lines
    assert line.evicts == ("b",)
    assert line.load_seconds == 0.5
