"""The table of states, what swaps are seen to cost, and how backends leave for standby and come back."""

import pytest

from anvil_mux.config.machines import Gpu
from anvil_mux.errors import LoadError
from anvil_mux.scheduler.admission import place_wait
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.group import snapshot
from anvil_mux.scheduler.model import Demand
from anvil_mux.scheduler.slot import TRANSITIONS, Crash, Evict, Load, Ticket
from anvil_mux.scheduler.state import plan
from tests.scheduler.driver import DEBOUNCE, FACTS, TEN, A, B, Driver, Watched, backend

# What swaps cost


def learned(driver):
    return {(c.source, c.target): (c.evict_seconds, c.load_seconds, c.swaps) for c in driver.costs}


def test_what_a_swap_cost_is_its_eviction_and_its_load_without_the_drain_and_what_the_policy_waited_for():
    driver = Driver(A, B, policy=DEBOUNCE).with_resident("a")
    lease = driver.request("a", 0.5)
    driver.request("b", 1.0)
    for moment in (1.0, 3.0):  # deferred, then a drains
        assert driver.steps(moment) == []
    assert driver.release(lease, 9.0) == ["evict a"]
    driver.swaps("a", 11.0, "b", 17.0)
    assert learned(driver) == {("", "a"): (0.0, 0.0, 1), ("a", "b"): (2.0, 6.0, 1)}


def test_each_of_several_victims_goes_once_it_is_idle_and_their_eviction_counts_from_the_last_drain():
    small = [backend(name, vram=5) for name in "ab"]
    driver = Driver(*small, backend("c", vram=10), gpus=TEN).with_resident("a").with_resident("b")
    lease = driver.request("b", 1.0)
    assert driver.asked("c", 2.0) == ["evict a"]
    assert driver.state("b") == "draining"
    assert driver.evicted("a", 3.0) == []
    assert driver.release(lease, 5.0) == ["evict b"]
    driver.swaps("b", 6.5, "c", 10.5)
    assert learned(driver)["a+b", "c"] == (1.5, 4.0, 1)


def test_a_swap_that_failed_teaches_nothing():
    driver = Driver(A, B).with_resident("a")
    driver.asked("b", 1.0)
    driver.evicted("a", 2.0)
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
                assert driver.evicted(step.removeprefix("evict "), moment) == [f"load {name}"]
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
    assert (resident.rate, resident.growth) == a.rates(24.0)
    assert (resident.pause_seconds, resident.service_seconds) == (a.pause_seconds, a.service_seconds)
    assert (line.waiting, line.oldest, line.newest) == (3, 20.0, 23.0)
    assert (line.growth, line.service_seconds) == (b.rates(24.0, 3, 4.0)[1], 0.0)
    assert resident.pause_seconds > 0
    assert resident.service_seconds > 2.0


def test_a_line_that_was_admitted_says_how_fast_the_next_one_will_grow():
    watched = Watched()
    driver = Driver(A, B, policy=watched).with_resident("a")
    for moment in (1.0, 1.5, 2.0, 2.5):
        driver.asked("b", moment)
    driver.evicted("a", 3.0)
    driver.core.loaded("b", 6.0)
    b = Demand()
    for moment in (1.0, 1.5, 2.0, 2.5):
        b.arrived(moment)
    b.admitted(4, 5.0)
    driver.steps(7.0)
    assert watched.seen[-1].residents[0].growth == b.rates(7.0)[1]


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


# The table


def reached(state):
    """A GPU group whose backend a is in ``state``."""
    one = backend("a", evict_to=("sleep",), demote_after=1.5)
    if state == "stopped":
        return Driver(one, B)
    if state in ("loading", "cancelling"):
        driver = Driver(one, B)
        driver.asked("a", 0.0)
        if state == "cancelling":
            driver.unload("a", 0.0)
        return driver
    driver = Driver(one, B).with_resident("a")
    if state == "ready":
        return driver
    if state == "draining":
        driver.request("a", 0.0)
        driver.asked("b", 0.0)
        return driver
    driver.unload("a", 0.0)
    if state in ("standby", "demoting"):
        driver.core.evicted("a", 0.0, {"0": 0}, "sleep")
        assert state == "standby" or driver.steps(1.5) == ["demote a"]
    elif state == "stuck":
        driver.core.evict_failed("a", 0.0, "no")
    return driver


STATES = ("stopped", "loading", "cancelling", "ready", "draining", "evicting", "standby", "demoting", "stuck")


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
    of_hosts |= {("evicting", "not_begun"), ("demoting", "not_begun")}
    assert set(TRANSITIONS) <= facts | set(QUESTIONS) | of_hosts


# Standby levels


def evicted(way):
    """``a`` has been evicted for ``b``, which then ran; it rests by ``way``."""
    driver = Driver(backend("a", evict_to=("sleep",)), B).with_resident("a")
    driver.request("b", 1.0)
    assert driver.core.next_step(1.0) == Evict("a", "sleep")
    assert driver.evicted("a", 2.0, {"0": 0}, way) == ["load b"]
    driver.core.loaded("b", 3.0)
    driver.core.release(next(iter(driver.core.slots["b"].holders)), 3.0)
    return driver


@pytest.mark.parametrize(("way", "state"), [("sleep", "standby"), ("stop", "stopped")])
def test_a_backend_is_brought_back_by_the_way_it_really_went(way, state):
    driver = evicted(way)
    assert driver.state("a") == state
    assert driver.asked("a", 4.0) == ["evict b"]
    driver.core.evicted("b", 5.0)
    assert driver.core.next_step(5.0) == Load("a", way)


def test_who_rested_before_we_came_is_brought_back_by_the_way_it_rests():
    driver = Driver(backend("a", evict_to=("sleep",)), B)
    assert driver.core.adopt("b", 0.0)
    assert driver.core.adopt_standby("a", 0.0, "sleep-2", {"0": 5})
    assert driver.asked("a", 1.0) == ["evict b"]
    driver.core.evicted("b", 2.0)
    assert driver.core.next_step(2.0) == Load("a", "sleep-2")


def test_a_sleeper_whose_remains_do_not_fit_beside_those_who_run_is_not_taken_over():
    small = backend("a", vram=6), backend("b", vram=6), backend("c", vram=3)
    driver = Driver(*small, gpus=TEN)
    assert driver.core.adopt("a", 0.0)
    assert not driver.core.adopt_standby("b", 0.0, "sleep", {"0": 5})
    assert driver.core.adopt_standby("b", 0.0, "sleep", {"0": 3})
    assert not driver.core.adopt_standby("c", 0.0, "sleep", {"0": 2})


def test_who_could_not_be_put_out_is_stopped_and_not_asked_to_sleep_again():
    driver = Driver(backend("a", evict_to=("sleep",)), B).with_resident("a")
    driver.asked("b", 1.0)
    driver.core.evict_failed("a", 2.0, "does not stop")
    assert driver.core.next_step(10.0) == Evict("a", "stop")


@pytest.mark.parametrize("how", ["sleep", "stop"])
def test_a_swap_is_learned_under_the_way_that_really_brought_the_model_back(how):
    costs = Costs()
    driver = Driver(backend("a", evict_to=("sleep",)), B)
    driver.core.state.costs = costs
    driver.asked("a", 0.0)
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
    waits = {name: place_wait(state, state.models[name], 1.0) for name in "ba"}
    assert waits["b"] == (0.0, (False, 10.0, 0, ("0",), "b"))
    assert plan(state, state.models["a"], set(), 1.0) is None
