"""What the scheduler does while it is paused, and when the pause is over."""

from math import inf

import pytest

from anvil_mux.config.config import Config
from anvil_mux.config.machines import Gpu
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.slot import NOTHING, Evict, FoundBackend
from anvil_mux.scheduler.waits import wait_estimate
from tests.scheduler.fleet import Fleet, on

A = on("", "a", pin=True)
S = on("", "s", "1", evict_to=("sleep",))
THERE = on("h", "t", "2", evict_to=("sleep",))


def test_all_that_is_loaded_on_any_host_is_stopped_pinned_models_and_what_is_in_standby_too():
    fleet = Fleet(A, S, THERE)
    for name in ("a", "t"):
        fleet.take(fleet.core.adopted(name, 0.0))
    fleet.take(fleet.core.adopted("s", 0.0, FoundBackend("sleep", {"1": 1})))
    running = fleet.request("t", 1.0)
    assert fleet.take(fleet.core.paused(2.0)) == ["evict a", "demote s"]
    assert [(step.backend, getattr(step, "to", step.level)) for step in fleet.steps] == [
        ("a", "stop"),
        ("s", "stop"),
    ]
    assert fleet.state("t") == "draining"
    assert fleet.take(fleet.core.time_passed(7.0)) == ["evict t"]
    assert fleet.step(Evict, "t").level == "stop"
    assert running.severed.sentence("t") == (
        "anvil-mux was paused before this request ended, after a drain of 5.0 s"
    )


def test_a_request_is_refused_and_told_when_it_is_worth_another_try():
    fleet = Fleet(A)
    fleet.take(fleet.core.paused(0.0, 30.0))
    refused = fleet.request("a", 1.0).error
    assert (refused.status, refused.code, refused.retry_after) == (503, "paused", 29.0)
    fleet.take(fleet.core.paused(2.0))
    assert fleet.request("a", 3.0).error.retry_after == 60.0


def test_those_who_wait_when_it_begins_are_refused_as_well_and_their_load_is_cancelled():
    fleet = Fleet(A, on("", "b"))
    waiting = fleet.request("a", 0.0)
    assert fleet.take(fleet.core.paused(1.0)) == ["cancel a"]
    assert waiting.error.code == "paused"


def test_it_ends_by_itself_at_its_time():
    fleet = Fleet(A)
    fleet.take(fleet.core.paused(0.0, 30.0))
    assert fleet.last.ask_at == 30.0
    fleet.take(fleet.core.time_passed(30.0))
    ended = fleet.log[-1]
    assert (ended.kind, ended.cause) == ("resumed", Cause("pause_over", seconds=30.0))
    fleet.request("a", 31.0)
    assert [step.backend for step in fleet.steps] == ["a"]


def test_its_end_can_be_set_anew_and_is_not_said_twice():
    fleet = Fleet(A)
    fleet.take(fleet.core.paused(0.0, 30.0))
    fleet.take(fleet.core.paused(1.0, 90.0))
    assert fleet.last.ask_at == 90.0
    assert fleet.core.paused(2.0, 90.0) is NOTHING
    assert [(event.at, event.seconds) for event in fleet.log if event.kind == "paused"] == [
        (0.0, 30.0),
        (1.0, 89.0),
    ]
    fleet.take(fleet.core.time_passed(30.0))
    assert fleet.request("a", 31.0).error.code == "paused"


def test_what_has_only_been_drained_so_far_stays_when_it_is_resumed_at_once():
    fleet = Fleet(S)
    fleet.take(fleet.core.adopted("s", 0.0))
    running = fleet.request("s", 1.0)
    fleet.take(fleet.core.paused(2.0))
    assert fleet.take(fleet.core.resumed(3.0)) == []
    assert fleet.state("s") == "ready"
    assert fleet.core.resumed(4.0) is NOTHING
    fleet.take(fleet.core.time_passed(60.0))
    assert running.severed is None


def test_a_host_that_was_drained_before_stays_so():
    fleet = Fleet(THERE)
    fleet.take(fleet.core.host_drained("h", 0.0, True))
    fleet.take(fleet.core.paused(1.0))
    fleet.take(fleet.core.resumed(2.0))
    assert fleet.request("t", 3.0).error.code == "host_unavailable"
    fleet.take(fleet.core.host_drained("h", 4.0, False))
    assert not fleet.request("t", 5.0).settled


def test_a_host_that_is_undrained_meanwhile_is_paused_all_the_same():
    fleet = Fleet(THERE)
    fleet.take(fleet.core.adopted("t", 0.0))
    fleet.request("t", 0.0)
    fleet.take(fleet.core.host_drained("h", 1.0, True))
    fleet.take(fleet.core.paused(2.0))
    fleet.take(fleet.core.host_drained("h", 3.0, False))
    assert fleet.state("t") == "draining"
    assert fleet.take(fleet.core.time_passed(6.0)) == ["evict t"]


def test_where_requests_wait_their_queue_is_loaded_for_when_it_is_resumed():
    sized = on("", "a", vram=6), on("", "b", vram=6)
    fleet = Fleet(*sized, gpus=(Gpu("0", vram=10),), when_paused="wait", max_wait=10.0)
    fleet.take(fleet.core.paused(0.0))
    fleet.take(fleet.core.memory_seen({"0": 8}, 0.5))  # whoever has been lent the GPU
    waiting = fleet.request("a", 1.0)
    fleet.take(fleet.core.time_passed(100.0))
    assert not waiting.settled
    assert fleet.steps == []
    fleet.take(fleet.core.memory_seen({}, 100.5))
    assert fleet.take(fleet.core.resumed(101.0)) == ["load a"]
    fleet.loaded("a", 105.0)
    assert waiting.backend == "a"


def test_when_a_reload_says_that_requests_are_refused_those_that_wait_are():
    fleet = Fleet(A, when_paused="wait")
    fleet.take(fleet.core.paused(0.0))
    waiting = fleet.request("a", 1.0)
    fleet.take(fleet.core.reconfigured(Config((A,), policy="eager"), 2.0))
    assert waiting.error.code == "paused"


def test_a_host_that_comes_with_a_reload_is_paused_too():
    fleet = Fleet(A)
    fleet.take(fleet.core.paused(0.0))
    fleet.take(fleet.core.reconfigured(Config((A, THERE), policy="eager"), 1.0))
    assert fleet.request("t", 2.0).error.code == "paused"


@pytest.mark.parametrize(
    ("until", "fate", "sentence"),
    [
        (
            inf,
            "refuse",
            "A request for a is refused: anvil-mux is paused: its GPUs are lent to something else until it "
            "is resumed by hand. Try again later.",
        ),
        (
            3600.0,
            "refuse",
            "A request for a is refused: anvil-mux is paused: its GPUs are lent to something else for 60 min "
            "more. Try again then.",
        ),
        (
            60.0,
            "wait",
            "A request for a waits about 60 s: anvil-mux is paused: its GPUs are lent to something else for "
            "60 s more; then it may be loaded.",
        ),
    ],
)
def test_why_says_so(until, fate, sentence):
    fleet = Fleet(A, when_paused=fate)
    fleet.take(fleet.core.paused(0.0, until))
    state = fleet.core.layout.of_model["a"]
    assert wait_estimate(state, state.models["a"], 0.0).sentence == sentence
