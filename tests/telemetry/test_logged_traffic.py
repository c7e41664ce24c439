"""What the log of a program says of the clients whose log it is: their requests, made again."""

from dataclasses import asdict, replace

import pytest

from anvil_mux.lab.engines import Batching
from anvil_mux.lab.figures import figures
from anvil_mux.lab.plot import Bar, History
from anvil_mux.lab.recording import BEYOND_SECONDS, workload_of
from anvil_mux.lab.simulate import Arrival
from anvil_mux.lab.workload import PROFILES, Workload
from anvil_mux.scheduler.events import Cause, Event
from anvil_mux.telemetry.eventlog import (
    BadLog,
    LoggedRun,
    config_of,
    header,
    read,
    whole,
)
from tests.lab.test_simulate import world
from tests.telemetry.test_eventlog import AB, BUSY, file, led_to, simulated, written

__all__ = ["file"]


@pytest.mark.parametrize("policy", ["eager", "debounce"])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_log_replayed_under_the_same_policy_gives_the_same_figures(file, profile, policy):
    workload = PROFILES[profile](1)
    config = replace(workload.config(), policy=policy)
    before = simulated(workload, config)
    runs = read(written(file, before, config))
    after = simulated(workload_of(runs), config_of(runs[0].header))
    # Moments are sums of what was drawn, and the last of their digits depends on the order.
    assert asdict(figures(after)) == pytest.approx(asdict(figures(before)), rel=1e-9)


def test_busy_logs_with_impatient_clients_are_made_again_event_by_event():
    """All moments are multiples of a power of two, so that their sums are exact."""
    seen: set[str] = set()
    for seed in range(20):
        config, trace, _ = world("two on one GPU", "eager", seed)
        config = replace(config, max_queue=1000, queue_timeout=1e6)
        requests = tuple(entry for entry in trace if isinstance(entry, Arrival))
        workload = Workload("w", {"a": 2.5, "b": 4.25}, requests, stop_seconds=0.5)
        before = simulated(workload, config)
        learned = workload_of([LoggedRun(header(config, 0.0), before)])
        after = simulated(learned, config)
        assert [event._replace(at=event.at + before[0].at) for event in after] == before, seed
        assert (learned.load_seconds, learned.stop_seconds) == ({"a": 2.5, "b": 4.25}, 0.5)
        seen.update(event.kind for event in before)
    assert seen >= {"gone", "severed", "queued", "evicting"}


def leased(at: float, model: str, ticket: int, waited: float = 0.0, size: int = 1) -> Event:
    return Event(at, "leased", model, model, ticket, size, waited)


def replayed(*events: Event, began: float = 0.0) -> Workload:
    return workload_of([LoggedRun(header(AB, began), list(events))])


def test_loads_and_stops_take_their_median_and_adopted_models_are_loaded_at_the_start():
    learned = replayed(
        Event(1.0, "ready", "a", "a", cause=Cause("adopted")),
        *[Event(2.0, "ready", "b", "b", seconds=seconds) for seconds in (3.0, 50.0, 4.0)],
        Event(3.0, "ready", "b", "b", cause=Cause("reprieved")),
        *[Event(at, kind, "b", "b") for at, kind in ((4.0, "evicting"), (6.0, "stopped"))],
        leased(7.0, "a", 1),
        Event(9.0, "released", "a", "a", 1),
    )
    assert learned.resident == ("a",)
    assert learned.load_seconds == {"a": 4.0, "b": 4.0}
    assert learned.stop_seconds == 2.0
    assert learned.requests == (Arrival(6.0, "a", 2.0),)


def test_a_request_arrived_when_its_wait_began():
    learned = replayed(
        Event(10.0, "queued", "a", ticket=1, size=1),
        leased(14.0, "a", 1, 4.0),
        Event(15.0, "released", "a", "a", 1),
    )
    assert learned.requests == (Arrival(0.0, "a", 1.0),)


def test_what_was_cut_off_takes_as_long_as_it_lasted():
    learned = replayed(
        leased(0.0, "a", 1),
        leased(0.0, "a", 2, size=2),
        leased(0.0, "b", 3),
        Event(3.0, "severed", "a", "a", 1, 1, 3.0),
        Event(4.0, "stopped", "b", "b", size=1, cause=Cause("died", detail="exited with code 1")),
        Event(5.0, "queued", "b", ticket=4, size=1),
    )
    assert [request.seconds for request in learned.requests] == [3.0 + BEYOND_SECONDS, 5.0, 4.0, 4.0]


def test_what_was_never_served_takes_what_its_model_usually_takes():
    learned = replayed(
        *[leased(0.0, "a", n, size=n) for n in (1, 2, 3)],
        *[Event(seconds, "released", "a", "a", n) for n, seconds in ((1, 1.0), (2, 2.0), (3, 9.0))],
        Event(10.0, "queued", "a", ticket=4, size=1),
        Event(12.0, "gone", "a", ticket=4, seconds=2.0),
        Event(20.0, "queued", "a", ticket=5, size=1),
        Event(22.0, "failed", "a", ticket=5, seconds=2.0, cause=Cause("error", detail="load_failed")),
        Event(23.0, "failed", "b", ticket=6, cause=Cause("error", detail="load_failed")),
    )
    assert learned.requests[3:] == (
        Arrival(10.0, "a", 2.0, patience=2.0),
        Arrival(20.0, "a", 2.0),
        Arrival(23.0, "b", 2.0),
    )


def test_who_only_asked_for_a_load_holds_no_lease():
    learned = replayed(
        Event(1.0, "queued", "a", ticket=1, size=1),
        Event(1.0, "queued", "a", ticket=2, size=2),
        leased(3.0, "a", 1, 2.0, size=1),
        leased(3.0, "a", 2, 2.0, size=1),
        Event(4.0, "released", "a", "a", 1, 0),
    )
    assert learned.requests == (Arrival(0.0, "a", 1.0), Arrival(0.0, "a", 0.0, leases=False))


def test_runs_follow_each_other_as_on_the_clock_on_the_wall():
    runs = [
        LoggedRun(header(AB, 1000.0), [leased(50.0, "a", 1), Event(60.0, "released", "a", "a", 1)]),
        LoggedRun(header(AB, 1095.0), [leased(5.0, "b", 1), Event(6.0, "released", "b", "b", 1)]),
        LoggedRun(header(AB, 400.0), [leased(1.0, "a", 1), Event(2.0, "released", "a", "a", 1)]),
    ]
    assert [(request.at, request.model) for request in workload_of(runs).requests] == [
        (0.0, "a"),
        (50.0, "b"),
        (51.0, "a"),
    ]


def test_an_answer_of_a_log_takes_what_it_would_have_taken_alone():
    log = [leased(0.0, "a", 1), leased(2.0, "a", 2, size=2)]
    log += [Event(4.0, "released", "a", "a", 2, 1), Event(5.0, "released", "a", "a", 1, 0)]
    run = LoggedRun(header(AB, 0.0), log)
    assert [each.seconds for each in workload_of([run]).requests] == [5.0, 2.0]
    slower = workload_of([run], batching={"a": Batching(1.0)}).requests
    assert [each.seconds for each in slower] == pytest.approx([2.0 + 1.0 + 1.0, 1.0])
    one_at_a_time = workload_of([run], batching={"a": Batching(0.0, 1)}).requests
    assert [each.seconds for each in one_at_a_time] == [5.0, 0.0]


def test_a_log_without_a_request_cannot_be_replayed():
    with pytest.raises(BadLog, match="no request"):
        replayed(Event(1.0, "ready", "a", "a", cause=Cause("adopted")))


def test_a_log_that_begins_amid_requests_is_a_trace_of_them_from_there_on():
    rest = [
        Event(9.0, "released", "a", "a", 2, 0),
        Event(9.0, "evicting", "a", "a", seconds=1.0),
        Event(10.0, "stopped", "a", "a"),
        Event(10.0, "loading", "b", "b"),
        Event(13.0, "ready", "b", "b", seconds=3.0),
        Event(13.0, "leased", "b", "b", 3, 1, 8.0),
        Event(13.0, "leased", "b", "b", 4, 2, 7.0),
        Event(14.0, "released", "b", "b", 3, 1),
        Event(15.0, "released", "b", "b", 4, 0),
    ]
    begins = led_to(BUSY)
    learned = workload_of([LoggedRun({**header(AB, 0.0), "state": begins}, rest)])
    assert learned.resident == ("a",)
    assert learned.requests == (
        Arrival(0.0, "a", 1.0),
        Arrival(0.0, "b", 1.0),
        Arrival(0.0, "b", 2.0),
    )
    come_to = figures(rest, begins=begins)
    assert (come_to.requests, come_to.makespan_seconds, come_to.wait_max_seconds) == (3, 7.0, 8.0)
    assert come_to.busy_fraction == 3 / 7  # 8 to 9, and 13 to 15
    assert come_to.swap_seconds == 4.0
    drawn = History(rest, begins)
    assert drawn.bars[0] == Bar("a", "draining", 0.0, 1.0)
    assert drawn.lengths["b"] == [(0.0, 2), (5.0, 1), (5.0, 0)]


def test_what_one_program_wrote_under_two_configurations_is_one_trace():
    reloaded = Event(2.0, "reloaded", "")
    first = LoggedRun(header(AB, 5.0), [leased(1.0, "a", 1), reloaded, leased(3.0, "a", 2, size=2)])
    second = LoggedRun(
        {**header(AB, 5.0), "state": led_to(first.events)},
        [Event(4.0, "released", "a", "a", 1, 1), Event(6.0, "released", "a", "a", 2, 0)],
    )
    other = LoggedRun(header(AB, 50.0), [leased(1.0, "b", 1), Event(2.0, "released", "b", "b", 1)])
    assert [len(run.events) for run in whole([first, second, other])] == [5, 2]
    assert workload_of([first, second, other]).requests == (
        Arrival(0.0, "a", 3.0),
        Arrival(2.0, "a", 3.0),
        Arrival(45.0, "b", 1.0),
    )
