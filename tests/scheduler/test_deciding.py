"""Histories in which the policy proposes and the GPU group disposes; bounds, pins, priorities."""

import math
from itertools import pairwise
from math import inf

import pytest

from anvil_mux.config.config import Config
from anvil_mux.errors import DoesNotFit
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.group import SHORTEST_DEFERRAL
from anvil_mux.scheduler.policies import Stay, SwapTo, Unload, build_policy
from tests.scheduler.driver import DEBOUNCE, TEN, A, B, C, Driver, Loads, Never, Watched, backend, held_back

# The policy proposes, the GPU group disposes


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


def test_unload_of_an_external_server_by_a_policy_does_nothing():
    driver = Driver(backend("cloud", url="https://api.example.com"), policy=IdleOut())
    driver.core.adopt("cloud", 0.0)
    assert (driver.steps(20.0), driver.state("cloud")) == ([], "ready")


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
    driver.swaps("a", 62.0, "b", 63.0)
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
    driver.swaps("b", 5.0, "c", 6.0)
    assert driver.asked("d", 7.0) == ["evict a"]
    (report,) = [event for event in driver.log if event.kind == "plugin_failed"]
    assert report.cause.kind == "eviction_failed"


def test_a_line_is_overdue_at_the_very_moment_that_was_announced():
    for since in (n / 7 for n in range(1, 200, 4)):  # for a third of these (since + wait) - since < wait
        driver = Driver(A, B, policy=Never(), max_wait=60.1)
        driver.core.adopt("a", 0.0)
        assert driver.asked("b", since) == []
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
    assert (driver.steps(6.0), driver.until) == ([], 11.0)
    driver.core.release(lease, 7.0)
    assert (driver.steps(11.0), driver.until) == ([], 12.0)
    assert driver.steps(12.0) == ["evict a"]
    assert (driver.evicted("a", 13.0), driver.until) == ([], inf)


def test_a_policy_cannot_put_out_a_pinned_model():
    driver = Driver(backend("a", pin=True), backend("b", "1"), backend("t", "0", "1"), policy=IdleOut())
    driver.core.adopt("a", 0.0)
    assert (driver.steps(100.0), driver.state("a")) == ([], "ready")


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
    driver.swaps("a", 103.0, "b", 104.0)
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
    served = driver.request("a", 2.0)
    assert driver.steps(2.0) == ["evict b"]
    assert driver.evicted("b", 3.0) == ["load a"]
    waits = driver.request("b", 3.5)
    assert not waits.settled  # the load may fail
    driver.core.loaded("a", 4.0)
    assert served.backend == "a"
    assert isinstance(waits.error, DoesNotFit)
    driver.sound()


def test_who_waits_for_the_gpu_of_a_model_that_is_pinned_is_refused_at_once_and_the_model_stays():
    driver = Driver(A, B).with_resident("a")
    driver.request("a", 1.0)
    waits = driver.request("b", 2.0)
    assert (driver.steps(2.0), driver.state("a")) == ([], "draining")
    late = driver.request("a", 2.5)
    driver.core.pin("a", 3.0, True)
    assert isinstance(waits.error, DoesNotFit)
    assert waits in driver.core.state.woken
    assert late.backend == "a"
    assert (driver.steps(100.0), driver.state("a")) == ([], "ready")
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
    assert driver.unload("a", 1.0) == ["evict a"]
    driver.core.evicted("a", 2.0, {"0": 3}, "sleep")
    waits = driver.request("b", 3.0)
    assert driver.steps(3.0) == ["demote a"]
    driver.swaps("a", 4.0, "b", 5.0)
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
    assert driver.release(lease, 4.0) == ["evict a"]
    assert driver.evicted("a", 5.0) == ["load b"]
    assert waits.error is None


def test_a_swap_that_begins_within_a_second_was_not_said_to_be_held_back():
    driver = Driver(A, B, policy=build_policy("adaptive")).with_resident("a")
    lease = driver.request("a", 1.0)
    assert driver.asked("b", 1.0) == []
    assert driver.announced_at == 2.0
    assert driver.release(lease, 1.5) == ["evict a"]
    assert driver.tell("deferred") == []


def test_a_held_swap_is_announced_for_each_line_and_when_the_moment_has_passed_and_begins_when_it_is_due():
    driver = Driver(A, B, policy=DEBOUNCE).with_resident("a")
    driver.request("b", 1.0)
    for moment in (1.0, 1.5, 2.0):
        assert driver.steps(moment) == []
    assert driver.asked("b", 2.5) == []
    assert driver.announced_at == 3.0  # what was announced is corrected then
    assert (driver.steps(3.0), driver.until) == ([], 4.5)
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


def test_a_line_that_begins_while_another_is_held_back_is_decided_with_it():
    driver, waiting = held_back()
    driver.core.give_up(waiting, 1.25)
    assert (driver.steps(1.25), driver.until) == ([], inf)
    driver.request("c", 1.5)
    assert (driver.steps(1.5), driver.until) == ([], 3.5)
    driver.request("b", 2.0)
    assert (driver.steps(2.0), driver.until) == ([], 3.5)
    assert driver.steps(3.5) == ["evict a"]
    assert driver.evicted("a", 4.0) == ["load c"]


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
    assert driver.drains() == {"c": ("low", 92.0)}
    assert held.backend == "c"


def test_who_has_the_lowest_priority_is_put_out_even_if_it_was_used_last_and_is_leased():
    backends = backend("a", vram=5, priority=3), backend("b", vram=5, priority=-3), backend("c", vram=5)
    driver = Driver(*backends, gpus=TEN).with_resident("a").with_resident("b", 1.0)
    driver.request("b", 2.0)
    driver.asked("c", 3.0)
    assert driver.states() == {"a": "ready", "b": "draining", "c": "stopped"}


def test_a_model_has_the_highest_priority_and_the_shortest_max_wait_of_its_replicas():
    r0 = backend("r0", "0", model="m", priority=2, max_wait=50.0)
    r1 = backend("r1", "1", model="m", priority=9, max_wait=7.0)
    watched = Watched(swaps=False)
    driver = Driver(r0, r1, A, backend("b", "1"), backend("c", "0", priority=5), policy=watched)
    for name in ("a", "b"):
        driver.core.adopt(name, 0.0)
    driver.request("c", 1.0)
    driver.asked("m", 2.0)
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
    assert driver.asked("c", 2.0) == []
    assert driver.steps(7.0) == ["evict a"]
    assert driver.evicted("a", 8.0) == ["load c"]


def test_no_line_that_may_still_wait_takes_a_gpu_that_is_kept_for_an_overdue_one():
    singles = backend("a", "0"), backend("b", "0"), backend("c", "1", max_wait=500.0), backend("d", "1")
    patient = build_policy("debounce", {"quiet": 15.0, "max_hold": 15.0})
    driver = Driver(*singles, backend("t", "0", "1", max_wait=10.0), policy=patient, max_wait=60.0)
    for name in ("a", "d"):
        driver.core.adopt(name, 0.0)
    driver.request("b", 0.0)
    driver.request("c", 1.0)
    assert driver.asked("t", 6.0) == []
    assert driver.steps(15.0) == ["evict a"]  # for b
    assert driver.steps(16.0) == []  # GPU 1 is kept for t, though c is older and was held for long enough
    assert driver.evicted("a", 17.0) == ["load b"]
    assert driver.loaded("b", 18.0) == ["evict d"]
    assert driver.drains()["b"] == ("t", 48.0)
