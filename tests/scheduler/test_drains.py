"""A drain_timeout of a backend's own, bounded and not: histories in, events out. In virtual time."""

import json
from dataclasses import dataclass, replace
from math import inf

import pytest

from anvil_mux.config.config import Config
from anvil_mux.errors import WouldWaitTooLong
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.admission import RunningAnswer
from anvil_mux.scheduler.costs import Costs, Footprints
from anvil_mux.scheduler.events import Cause, Severance
from anvil_mux.scheduler.policies import Decision, Snapshot, Stay, SwapTo
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import Ticket, Wait
from anvil_mux.telemetry import eventlog
from tests.lab.facts import HostDrained, Reload, Unloading
from tests.scheduler.driver import A, B, C, Driver, backend
from tests.scheduler.test_waits import ask

IMAGE, CHAT = backend("image", drain_timeout=inf), backend("chat")
LONG = 1200.0
ENGINES = Engines({"image": 20.0, "chat": 10.0}, stop_seconds=1.0)


def run(trace, *backends, resident=("image",), perform=ENGINES, **settings):
    config = Config(backends or (IMAGE, CHAT), **{"policy": "eager", "queue_timeout": 3600.0, **settings})
    log = simulate(config, trace, perform, resident=resident)
    assert check(log, config) == []
    return log


def seen(log, *kinds):
    return [(event.at, event.kind, event.model) for event in log if event.kind in kinds]


# Whose time counts


def test_a_job_of_twenty_minutes_survives_and_a_chat_still_makes_room_in_thirty_seconds():
    trace = [Arrival(0.0, "image", LONG), Arrival(10.0, "chat", 100.0), Arrival(1220.0, "image", 60.0)]
    log = run(trace)
    assert seen(log, "draining", "released", "severed", "ready") == [
        (0.0, "ready", "image"),
        (10.0, "draining", "image"),
        (1200.0, "released", "image"),
        (1211.0, "ready", "chat"),
        (1220.0, "draining", "chat"),
        (1250.0, "severed", "chat"),
        (1271.0, "ready", "image"),
        (1331.0, "released", "image"),
    ]


@pytest.mark.parametrize(("own", "end"), [(30.0, 40.0), (0.0, 10.0), (5.0, 15.0), (90.0, 100.0)])
def test_a_bound_of_its_own_counts_instead_of_that_of_all(own, end):
    image = replace(IMAGE, drain_timeout=own)
    log = run([Arrival(0.0, "image", LONG), Arrival(10.0, "chat", 1.0)], image, CHAT)
    assert seen(log, "severed") == [(end, "severed", "image")]


def test_the_shortest_of_two_victims_ends_by_itself():
    slow, quick, both = backend("slow", drain_timeout=50.0), backend("quick", "1"), backend("both", "0", "1")
    trace = [Arrival(0.0, "slow", LONG), Arrival(0.0, "quick", LONG), Arrival(1.0, "both", 1.0)]
    log = run(trace, slow, quick, both, resident=("slow", "quick"))
    assert seen(log, "severed") == [(31.0, "severed", "quick"), (51.0, "severed", "slow")]


@dataclass(frozen=True)
class From:
    """A policy that swaps from some moment on."""

    moment: float

    def decide(self, seen: Snapshot) -> Decision:
        if seen.queues and (seen.now >= self.moment or not seen.residents):
            return SwapTo(seen.queues[0].model, Cause("worth_it"))
        return Stay(self.moment)


def held_back(until=20.0):
    """``a`` answers since 1 s, ``b`` waits since 2 s."""
    driver = Driver(A, B, policy=From(until), drain_timeout=30.0).with_resident("a")
    answer = driver.request("a", 1.0)
    assert driver.asked("b", 2.0) == []
    return driver, answer


def test_to_be_held_back_and_to_wait_for_a_drain_is_one_wait():
    driver, answer = held_back()
    assert driver.steps(20.0) == driver.steps(31.9) == []
    assert driver.steps(32.0) == ["evict a"]
    assert answer.severed == Severance(Cause("evicted", "b"), 12.0)


def test_an_answer_that_had_all_its_time_before_the_drain_has_none_then():
    driver, answer = held_back(40.0)
    assert driver.steps(39.9) == []
    assert driver.steps(40.0) == ["evict a"]
    assert answer.severed


def test_an_answer_that_began_meanwhile_has_all_its_time():
    driver, _ = held_back()
    later = driver.request("a", 15.0)
    assert driver.steps(20.0) == driver.steps(49.9) == []
    assert driver.steps(50.0) == ["evict a"]
    assert later.severed


@pytest.mark.parametrize(("ends", "evicted"), [(25.0, 32.0), (40.0, 40.0)])
def test_once_that_has_ended_the_older_answer_has_its_own_time(ends, evicted):
    driver, _ = held_back()
    later = driver.request("a", 15.0)
    assert driver.steps(20.0) == []
    assert driver.core.release(later, ends)  # so that it is asked what to do now
    assert driver.steps(ends) == (["evict a"] if evicted == ends else [])
    assert driver.steps(evicted) == (["evict a"] if evicted > ends else [])


def test_the_event_says_the_bound_and_null_is_none():
    log = run([Arrival(0.0, "image", 50.0), Arrival(10.0, "chat", 1.0)])
    [event] = [event for event in log if event.kind == "draining"]
    line = eventlog._line(event)
    assert json.loads(line)["seconds"] is None
    assert eventlog._event(json.loads(line), "here") == event


def test_a_log_can_be_read_again_with_its_own_bounds():
    config = Config((IMAGE, replace(CHAT, drain_timeout=3.0), A))
    told = json.dumps(eventlog.header(config, 0.0), allow_nan=False)
    assert [b.drain_timeout for b in eventlog.config_of(json.loads(told)).backends] == [inf, 3.0, 30.0]


# The gate


def test_requests_for_the_victim_wait_behind_the_swap():
    driver = Driver(IMAGE, CHAT, queue_timeout=3600.0).with_resident("image")
    running = driver.request("image", 1.0)
    assert driver.asked("chat", 2.0) == []
    behind = driver.request("image", 3.0)
    assert behind.backend is None
    assert driver.release(running, 900.0) == ["evict image"]
    assert driver.evicted("image", 901.0) == ["load chat"]
    assert driver.loaded("chat", 905.0) == ["evict chat"] or driver.state("chat") == "draining"


def test_nothing_is_asked_again_while_overdue_queues_wait_for_a_drain_without_a_bound():
    driver = Driver(IMAGE, CHAT, C, max_wait=5.0, queue_timeout=3600.0).with_resident("image")
    driver.request("image", 1.0)
    driver.request("chat", 2.0)
    driver.request("c", 3.0)
    for moment in (3.0, 8.0, 8.5, 500.0):
        assert driver.core.next_step(moment) == Wait(8.0 if moment < 8.0 else inf)


BOTH = backend("both", "0", "1")
BESIDE = backend("beside", "1")


def test_a_victim_that_has_a_bound_serves_until_those_without_have_ended():
    trace = [
        Arrival(0.0, "image", LONG),
        Arrival(10.0, "both", 1.0),
        Arrival(20.0, "beside", 5.0),
        Arrival(1195.0, "beside", 100.0),
    ]
    log = run(trace, IMAGE, BESIDE, BOTH, resident=("image", "beside"))
    assert seen(log, "draining", "leased", "severed", "evicting")[:8] == [
        (0.0, "leased", "image"),
        (10.0, "draining", "image"),
        (20.0, "leased", "beside"),
        (1195.0, "leased", "beside"),
        (1200.0, "draining", "beside"),
        (1200.0, "evicting", "image"),
        (1230.0, "severed", "beside"),
        (1230.0, "evicting", "beside"),
    ]


def test_nobody_is_evicted_for_a_swap_that_is_given_up_during_such_a_drain():
    trace = [Arrival(0.0, "image", LONG), Arrival(10.0, "both", 1.0, patience=60.0)]
    log = run(trace, IMAGE, BESIDE, BOTH, resident=("image", "beside"))
    assert seen(log, "draining", "gone", "ready")[2:] == [
        (10.0, "draining", "image"),
        (70.0, "gone", "both"),
        (70.0, "ready", "image"),
    ]


def test_one_whose_turn_has_not_come_may_be_evicted_for_another_reason():
    trace = [
        Arrival(0.0, "image", LONG),
        Arrival(10.0, "both", 1.0, patience=60.0),
        Unloading(20.0, "beside"),
    ]
    log = run(trace, IMAGE, BESIDE, BOTH, resident=("image", "beside"))
    assert seen(log, "draining", "stopped")[:3] == [
        (10.0, "draining", "image"),
        (20.0, "draining", "beside"),
        (21.0, "stopped", "beside"),
    ]
    assert seen(log, "ready")[-1] == (70.0, "ready", "image")


def test_one_whose_turn_has_not_come_may_be_pinned_and_stays():
    driver = Driver(IMAGE, BESIDE, BOTH, queue_timeout=3600.0).with_resident("image").with_resident("beside")
    running = driver.request("image", 1.0)
    assert driver.asked("both", 2.0) == []
    driver.core.pin("beside", 3.0, True)
    driver.release(running, 900.0)
    assert driver.state("beside") == "ready"


def test_an_overdue_queue_keeps_no_gpu_idle_behind_a_drain_without_a_bound():
    """``both`` waits for GPU 0, where image drains for chat; GPU 1 is for those who can use it meanwhile."""
    other = backend("other", "1")
    trace = [
        Arrival(0.0, "image", LONG),
        Arrival(10.0, "chat", 1.0),
        Arrival(11.0, "both", 1.0),
        Arrival(100.0, "other", 1.0),
    ]
    backends = (IMAGE, CHAT, BESIDE, BOTH, other)
    log = run(trace, *backends, resident=("image", "beside"), max_wait=30.0)
    assert (112.0 - 1.0, "ready", "other") in seen(log, "ready")


# Who is refused


def test_who_could_not_be_served_in_time_is_refused_at_once():
    trace = [Arrival(0.0, "image", LONG), Arrival(1300.0, "image", LONG), Arrival(1310.0, "chat", 1.0)]
    log = run(trace, queue_timeout=600.0)
    [failed] = [event for event in log if event.kind == "failed"]
    assert (failed.at, failed.model, failed.cause.detail) == (1310.0, "chat", "would_wait_too_long")
    assert seen(log, "draining") == []  # it did not begin a swap


def test_who_comes_late_enough_waits_for_it():
    trace = [Arrival(0.0, "image", LONG), Arrival(1300.0, "image", LONG), Arrival(1950.0, "chat", 1.0)]
    log = run(trace, queue_timeout=600.0)
    assert seen(log, "failed") == []
    assert (2511.0, "leased", "chat") in seen(log, "leased")


def test_where_nothing_is_known_it_waits_until_queue_timeout():
    log = run([Arrival(0.0, "image", LONG), Arrival(10.0, "chat", 1.0)], queue_timeout=600.0)
    assert seen(log, "failed", "draining", "ready")[1:] == [
        (10.0, "draining", "image"),
        (610.0, "failed", "chat"),
        (610.0, "ready", "image"),
    ]
    assert seen(log, "released") == [(1200.0, "released", "image")]


def test_nothing_is_known_of_one_that_takes_longer_than_usual():
    trace = [Arrival(0.0, "image", 100.0), Arrival(200.0, "image", LONG), Arrival(310.0, "chat", 1.0)]
    log = run(trace, queue_timeout=50.0)
    assert [event.cause.detail for event in log if event.kind == "failed"] == ["waited_too_long"]


def history(**settings):
    """An image model that has given one answer in twenty minutes, and begins another at 1300."""
    driver = Driver(IMAGE, CHAT, C, **{"queue_timeout": 600.0, **settings})
    driver.core.adopt("image", 0.0)
    driver.core.release(driver.request("image", 0.0), LONG)
    ticket = driver.request("image", 1300.0)
    ticket.request = "abc-1"
    return driver, ticket


def test_the_refusal_says_whose_answer_it_is_and_when_to_come_back():
    driver, _ = history()
    error = driver.request("chat", 1420.0).error
    assert isinstance(error, WouldWaitTooLong)
    assert (error.status, error.retry_after) == (503, 60.0)
    assert error.message == (
        "chat would wait longer than queue_timeout (600 s): request abc-1 of image has run for 2 min, and "
        "may finish first (drain_timeout). It can be loaded in about 18 min."
    )
    assert driver.request("chat", 1905.0).error.retry_after == pytest.approx(5.0)


def test_who_is_refused_is_told_so_beforehand():
    driver, _ = history()
    found = ask(driver, "chat", 1420.0)
    assert (found.verdict, found.seconds) == ("refused", None)
    assert "request abc-1 of image has run for 2 min" in found.because
    assert ask(driver, "chat", 2000.0).verdict == "waits"


def test_a_bound_that_ends_in_time_refuses_nobody():
    driver, _ = history()
    driver.core.slots["image"].backend = replace(IMAGE, drain_timeout=60.0)
    assert driver.request("chat", 1420.0).error is None


def test_a_longer_load_than_queue_timeout_is_no_reason_to_refuse():
    driver, _ = history(queue_timeout=5.0)
    assert driver.request("chat", 1420.0).error is None


def test_those_that_join_a_queue_and_those_behind_it_are_judged_alike():
    driver, running = history()
    early = driver.request("chat", 2000.0)
    driver.steps(2000.0)
    assert driver.state("image") == "draining"
    assert early.error is None
    driver.core.slots["image"].holders[running] = 2000.0  # as if it had only begun
    for model in ("chat", "image", "c"):
        assert isinstance(driver.request(model, 2010.0).error, WouldWaitTooLong), model
    assert early.error is None


def test_without_a_time_of_its_own_nobody_is_refused():
    driver = Driver(A, B, drain_timeout=LONG, queue_timeout=600.0).with_resident("a")
    driver.core.release(driver.request("a", 0.0), LONG)
    driver.request("a", 1300.0)
    assert driver.request("b", 1310.0).error is None


# What is said


def test_why_says_whose_answer_is_waited_for():
    driver, _ = history(queue_timeout=3600.0)
    driver.asked("chat", 1310.0)
    found = ask(driver, "chat", 2020.0)
    assert (found.seconds, found.at_most) == (480.0 + 11.0, None)
    assert found.because == (
        "it waits for image to make room; 1 request still runs there, for as long as it takes "
        "(request abc-1 of image has run for 12 min)."
    )
    assert found.waits_for == (RunningAnswer("image", "abc-1", 720.0),)
    assert "then it is its turn" in ask(driver, "image", 2020.0).because


# What people ask for


def test_an_unload_by_hand_has_the_bound_of_all():
    log = run([Arrival(0.0, "image", LONG), Unloading(100.0, "image")])
    assert seen(log, "severed") == [(130.0, "severed", "image")]


def test_an_unload_by_hand_bounds_a_drain_under_way():
    log = run([Arrival(0.0, "image", LONG), Arrival(10.0, "chat", 1.0), Unloading(100.0, "image")])
    assert seen(log, "severed") == [(130.0, "severed", "image")]
    assert (141.0, "leased", "chat") in seen(log, "leased")


def test_a_drain_of_the_host_has_the_bound_of_all():
    image, chat = (replace(each, host="h") for each in (IMAGE, CHAT))
    for trace in ([], [Arrival(10.0, "chat", 1.0)]):
        log = run([Arrival(0.0, "image", LONG), *trace, HostDrained(100.0, "h")], image, chat)
        assert seen(log, "severed") == [(130.0, "severed", "image")]


def test_a_service_that_was_changed_lets_its_answers_end():
    changed = Config((replace(IMAGE, port=1), CHAT), policy="eager", queue_timeout=3600.0)
    log = run([Arrival(0.0, "image", LONG), Reload(100.0, changed)])
    assert seen(log, "draining", "severed", "released", "stopped") == [
        (100.0, "draining", "image"),
        (1200.0, "released", "image"),
        (1201.0, "stopped", "image"),
    ]


def test_another_time_holds_at_once_for_the_next_drain():
    bounded = Config((replace(IMAGE, drain_timeout=5.0), CHAT), policy="eager", queue_timeout=3600.0)
    log = run([Arrival(0.0, "image", LONG), Reload(5.0, bounded), Arrival(10.0, "chat", 1.0)])
    assert seen(log, "severed") == [(15.0, "severed", "image")]


def test_a_pause_has_the_bound_of_all():
    log = []
    scheduler = Scheduler(Config((IMAGE, CHAT)), log.append, Costs(), Footprints())
    scheduler.expected(["image"])
    scheduler.adopted("image", 0.0)
    scheduler.requested(Ticket(1, "image", 1.0), 1.0)
    scheduler.paused(100.0)
    [event] = [event for event in log if event.kind == "draining"]
    assert (event.seconds, event.cause.kind) == (30.0, "paused")
