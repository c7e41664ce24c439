"""Home backends come back by themselves: histories in, events out. In virtual time."""

import random
from dataclasses import replace
from math import inf

import pytest

from anvil_mux.config.config import Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import LoadError
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines, Outcome
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.slot import Cancel, Load
from anvil_mux.scheduler.status import model_state
from tests.lab.facts import Unloading
from tests.scheduler.driver import Driver, backend
from tests.scheduler.fleet import Fleet, on
from tests.seeds import seeds

HOME, GUEST = backend("home", home=True), backend("guest")
ENGINES = Engines({"home": 10.0, "guest": 10.0}, stop_seconds=1.0)
AFTER = 300.0


def run(trace, *backends, resident=("home",), perform=ENGINES, until=5000.0, **settings):
    """The moves of a history, until a moment at which a request for something else, elsewhere, ends."""
    clock = backend("clock", "clock")
    config = Config((*(backends or (HOME, GUEST)), clock), **{"policy": "eager", **settings})
    trace = [Arrival(0.0, "clock", until), *trace]
    log = simulate(config, trace, perform, resident=(*resident, "clock"))
    assert check(log, config) == []
    kinds = ("loading", "ready", "draining", "evicting", "stopped", "cancelling", "severed", "released")
    return [(each.at, each.kind, each.model) for each in log if each.kind in kinds and each.model != "clock"]


def test_it_comes_back_when_nothing_else_was_wanted_for_a_while():
    trace = [Arrival(100.0, "guest", 5.0), Arrival(200.0, "guest", 7.0)]
    assert run(trace)[-5:] == [
        (507.0, "draining", "guest"),
        (507.0, "evicting", "guest"),
        (508.0, "stopped", "guest"),
        (508.0, "loading", "home"),
        (518.0, "ready", "home"),
    ]


def test_its_own_time_counts():
    moves = run([Arrival(100.0, "guest", 5.0)], replace(HOME, home_after=20.0), GUEST)
    assert (137.0, "loading", "home") in moves  # guest was loaded at 111, and served until 116
    assert (1017.0, "loading", "home") in run([Arrival(100.0, "guest", 5.0)], home_after=900.0)


def test_it_takes_nothing_from_an_answer_that_runs():
    moves = run([Arrival(100.0, "guest", 2000.0)])
    assert (2111.0, "released", "guest") in moves
    assert [at for at, kind, model in moves if (kind, model) == ("loading", "home")] == [2111.0 + AFTER + 1.0]


def test_it_does_not_come_back_while_others_are_wanted_again_and_again():
    trace = [Arrival(100.0 + 200.0 * n, "guest", 1.0) for n in range(20)]
    assert [at for at, kind, model in run(trace) if (kind, model) == ("loading", "home")] == [4202.0]


def test_it_waits_behind_a_queue():
    """A queue that the policy holds back goes before it."""
    third = backend("third")
    settings = {
        "policy": "debounce",
        "policy_settings": {"quiet": 900.0, "max_hold": 900.0},
        "max_wait": 900.0,
    }
    trace = [Arrival(10.0, "guest", 1.0), Arrival(1000.0, "third", 1.0)]
    moves = run(trace, HOME, GUEST, third, resident=("guest",), queue_timeout=2000.0, **settings)
    loads = [(at, model) for at, kind, model in moves if kind == "loading"]
    assert loads == [(312.0, "home"), (1901.0, "third"), (1912.0 + AFTER + 1.0, "home")]


def test_its_load_makes_way_for_a_request_that_comes_meanwhile():
    trace = [Arrival(100.0, "guest", 5.0), Arrival(420.0, "guest", 5.0)]
    slow = Engines({"home": 60.0, "guest": 10.0}, stop_seconds=1.0)
    moves = run(trace, perform=slow)
    assert (420.0, "cancelling", "home") in moves
    served = [at for at, kind, model in moves if (kind, model) == ("released", "guest")]
    assert served[1] < 440.0
    assert moves[-1][1:] == ("ready", "home")


def test_it_is_there_from_the_start_if_nothing_else_is():
    assert run([], resident=())[:2] == [(0.0, "loading", "home"), (10.0, "ready", "home")]


def test_an_unload_by_hand_holds_until_somebody_asks_for_it():
    trace = [Unloading(50.0, "home"), Arrival(100.0, "guest", 1.0), Arrival(2000.0, "home", 1.0)]
    loads = [
        (at, model) for at, kind, model in run([*trace, Arrival(2100.0, "guest", 1.0)]) if kind == "loading"
    ]
    assert [model for _, model in loads] == ["guest", "home", "guest", "home"]
    assert loads[1][0] > 2000.0


def test_a_load_that_failed_is_not_tried_again_by_itself():
    def perform(step, nth):
        broken = isinstance(step, Load) and step.backend == "home"
        return Outcome(1.0, LoadError("broken") if broken else None)

    moves = run([Arrival(100.0, "guest", 1.0)], perform=perform)
    assert [model for _, kind, model in moves if kind == "loading"] == ["guest", "home"]


def test_one_that_ended_by_itself_comes_back_too():
    driver = Driver(HOME, GUEST).with_resident("home")
    driver.core.release(driver.request("home", 1.0), 2.0)
    assert (driver.died("home", 500.0, "killed"), driver.until) == ([], 800.0)
    assert driver.steps(800.0) == ["load home"]


def test_it_comes_back_from_standby_and_stops_nobody_there():
    home = replace(HOME, evict_to=("sleep", "stop"))
    driver = Driver(home, GUEST).with_resident("home")
    assert driver.release(driver.request("guest", 1.0), 1.0) == ["evict home"]
    assert driver.evicted("home", 2.0, level="sleep") == ["load guest"]
    driver.core.loaded("guest", 5.0)
    [ticket] = driver.core.slots["guest"].holders
    assert (driver.release(ticket, 6.0), driver.until) == ([], 306.0)
    assert driver.steps(306.0) == ["evict guest"]
    assert driver.evicted("guest", 307.0) == ["load home"]


def test_two_that_fit_beside_each_other_do_not_hinder_each_other():
    tens = (Gpu("0", vram=10), Gpu("clock"))
    home, guest, big = backend("home", home=True, vram=4), backend("guest", vram=4), backend("big", vram=8)
    trace = [Arrival(10.0, "big", 5.0), *(Arrival(100.0 * n, "guest", 50.0) for n in range(1, 20))]
    moves = run(trace, home, guest, big, gpus=tens)
    [loaded] = [at for at, kind, model in moves if (kind, model) == ("loading", "home")]
    assert loaded < 700.0  # big was used last at 26, guest all the time


def test_a_pinned_guest_stays():
    moves = run([Arrival(100.0, "guest", 1.0)], HOME, replace(GUEST, pin=True))
    assert [kind for _, kind, model in moves if model == "home"][-1] == "stopped"


def test_what_is_shown_says_when_it_comes_back():
    driver = Driver(HOME, GUEST).with_resident("guest")
    state = driver.core.state
    driver.core.release(driver.request("guest", 100.0), 110.0)
    assert model_state(state, state.models["home"], 200.0, None).home_seconds == 210.0
    driver.request("guest", 250.0)
    assert model_state(state, state.models["home"], 260.0, None).home_seconds is None
    assert model_state(state, state.models["guest"], 260.0, None).home_seconds is None


def test_the_end_of_a_lease_sets_the_clock():
    driver = Driver(HOME, GUEST).with_resident("guest")
    ticket = driver.request("guest", 100.0)
    assert driver.core.release(ticket, 110.0) is True
    assert (driver.steps(110.0), driver.until) == ([], 410.0)
    assert Driver(GUEST).with_resident("guest").core.release(ticket, 110.0) is False


def test_the_checker_finds_an_answer_that_it_ends():
    driver = Driver(HOME, GUEST).with_resident("guest")
    driver.request("guest", 1.0)
    driver.log.append(driver.log[-1]._replace(kind="draining", size=1, cause=Cause("make_room", "home")))
    assert any("nobody waits for them" in line for line in check(driver.log, driver.config))


def drawn_world(seed):
    draw = random.Random(f"home {seed}")
    gpus = (Gpu("0", vram=20), Gpu("1", vram=20))
    backends = tuple(
        backend(
            name,
            *draw.choice((("0",), ("1",), ("0", "1"))),
            vram=draw.choice((None, 6, 12)),
            home=name in "ab",
            home_after=draw.choice((300.0, 0.0, 3.0, 40.0)),
            drain_timeout=draw.choice((30.0, 5.0, inf)),
            min_residency=draw.choice((0.0, 20.0)),
            concurrency=draw.choice((None, 1)),
            evict_to=draw.choice((("stop",), ("sleep", "stop"))),
        )
        for name in "abcd"
    )
    config = Config(
        backends, gpus=gpus, policy=draw.choice(("eager", "adaptive")), home_after=10.0, max_wait=30.0
    )
    now, trace = 0.0, []
    for _ in range(60):
        now += draw.expovariate(0.1)
        model = draw.choice("abcd")
        trace.append(
            Unloading(now, model)
            if draw.random() < 0.05
            else Arrival(now, model, draw.expovariate(0.1), 200.0)
        )
    return config, simulate(config, trace, Engines(other_load_seconds=4.0))


@pytest.mark.seeds
def test_drawn_worlds_with_homes_break_no_invariant():
    came_back, drawn = 0, seeds(12, of=40)
    for seed in drawn:
        config, log = drawn_world(seed)
        assert check(log, config) == [], seed
        homes = [each for each in log if each.kind == "loading" and each.cause and each.cause.kind == "home"]
        assert all(each.model in "ab" for each in homes), seed
        came_back += len(homes)
    assert came_back > len(drawn)


# Pauses, keep_alive, and memory of other processes


def test_during_a_pause_it_stays_away_and_when_that_is_over_it_comes_back():
    fleet = Fleet(on("", "home", home=True), on("", "guest"), home_after=20.0)
    fleet.take(fleet.core.adopted("home", 0.0))
    assert fleet.take(fleet.core.paused(1.0, 1000.0)) == ["evict home"]
    assert fleet.evicted("home", 2.0) == []
    assert fleet.last.ask_at == 1000.0
    assert fleet.take(fleet.core.time_passed(500.0)) == []
    assert fleet.take(fleet.core.time_passed(1000.0)) == ["load home"]


@pytest.mark.parametrize("victim_is_there", [True, False])
def test_a_pause_ends_its_return(victim_is_there):
    """Neither what makes room for it, nor its own load, goes on."""
    fleet = Fleet(on("", "home", home=True), on("", "guest"), home_after=20.0)
    if victim_is_there:
        fleet.take(fleet.core.adopted("guest", 0.0))
        assert fleet.take(fleet.core.time_passed(20.0)) == ["evict guest"]
        fleet.take(fleet.core.paused(20.5))
        assert fleet.evicted("guest", 21.0) == []
    else:
        assert fleet.take(fleet.core.time_passed(0.0)) == ["load home"]
        assert fleet.take(fleet.core.paused(20.5)) == ["cancel home"]
        assert fleet.take(fleet.core.load_cancelled(fleet.step(Cancel, "home"), 21.0)) == []
    assert fleet.take(fleet.core.time_passed(900.0)) == []
    assert fleet.take(fleet.core.resumed(1000.0)) == ["load home"]


def test_those_who_wait_for_the_end_of_a_pause_go_before_it():
    fleet = Fleet(on("", "home", home=True), on("", "guest"), home_after=20.0, when_paused="wait")
    fleet.take(fleet.core.adopted("home", 0.0))
    fleet.take(fleet.core.paused(1.0))
    fleet.evicted("home", 2.0)
    fleet.request("guest", 3.0)
    fleet.take(fleet.core.time_passed(500.0))
    assert fleet.take(fleet.core.resumed(900.0)) == ["load guest"]


def test_no_keep_alive_evicts_it():
    driver = Driver(HOME, GUEST).with_resident("home")
    driver.core.state.keep_alive(driver.core.slots["home"], 5.0)
    assert (driver.steps(100.0), driver.state("home")) == ([], "ready")


def test_the_keep_alive_of_another_does_not_keep_it_away():
    driver = Driver(HOME, GUEST, home_after=20.0).with_resident("guest")
    driver.core.state.keep_alive(driver.core.slots["guest"], inf)
    assert (driver.steps(1.0), driver.until) == ([], 20.0)
    assert driver.steps(20.0) == ["evict guest"]


def test_nobody_is_evicted_for_it_where_other_programs_leave_less_than_it_held():
    driver = Driver(HOME, GUEST, gpus=(Gpu("0", vram=24),), home_after=20.0).with_resident("guest")
    driver.core.slots["home"].held_last = {"0": 20}
    driver.core.memory_seen({"0": 6})
    assert driver.steps(100.0) == []
    driver.core.memory_seen({"0": 3})
    assert driver.steps(101.0) == ["evict guest"]
