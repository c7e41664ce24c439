"""Backends whose containers are paused by hand: `docker pause`."""

from dataclasses import replace

from anvil_mux.scheduler.slot import Load
from tests.scheduler.fleet import Fleet, on

SENTENCE = "a was paused by hand: `docker unpause p-a-1` lets it answer."
M = on("", "m0", "0", model="m"), on("", "m1", "1", model="m")


def pause(fleet, backend, at, container="p-a-1"):
    return fleet.take(fleet.core.service_paused(backend, container, at))


def resume(fleet, backend, at):
    return pause(fleet, backend, at, "")


def test_request_for_a_paused_backend_is_refused_at_once_with_the_remedy():
    fleet = Fleet(on("", "a"))
    fleet.core.adopted("a", 0.0)
    running = fleet.request("a", 1.0)
    pause(fleet, "a", 2.0)
    error = fleet.request("a", 3.0).error
    assert (error.status, error.code, error.message) == (503, "backend_paused", SENTENCE)
    assert running.severed is None
    resume(fleet, "a", 4.0)
    assert fleet.request("a", 5.0).backend == "a"


def test_queue_for_places_of_a_backend_fails_when_that_is_paused():
    fleet = Fleet(on("", "a", concurrency=1))
    fleet.core.adopted("a", 0.0)
    fleet.request("a", 1.0)
    waiting = fleet.request("a", 1.5)
    pause(fleet, "a", 2.0)
    assert waiting.error.code == "backend_paused"


def test_another_replica_that_is_ready_serves_for_a_paused_one():
    fleet = Fleet(*M)
    for name in ("m0", "m1"):
        fleet.core.adopted(name, 0.0)
    pause(fleet, "m0", 1.0)
    assert {fleet.request("m", 2.0).backend for _ in range(4)} == {"m1"}
    resume(fleet, "m0", 3.0)
    assert {fleet.request("m", 4.0).backend for _ in range(8)} == {"m0", "m1"}


def test_another_replica_is_loaded_for_a_paused_one_and_not_once_that_goes_on():
    fleet = Fleet(*[replace(each, most=1) for each in M])
    fleet.core.adopted("m0", 0.0)
    pause(fleet, "m0", 1.0)
    waiting = fleet.request("m", 2.0)
    assert [step.backend for step in fleet.steps] == ["m1"]
    resume(fleet, "m0", 3.0)
    assert waiting.backend == "m0"


def test_paused_backend_makes_way_for_another_model_and_is_started_again_later():
    fleet = Fleet(on("", "a"), on("", "b"))
    fleet.core.adopted("a", 0.0)
    fleet.request("a", 0.5)
    pause(fleet, "a", 1.0)
    fleet.request("b", 2.0)
    assert fleet.state("a") == "draining"
    fleet.take(fleet.core.time_passed(7.0))
    fleet.evicted("a", 8.0)
    fleet.loaded("b", 9.0)
    assert not fleet.request("a", 10.0).error
    assert not fleet.core.layout.slot("a").paused_as


def test_queue_of_a_paused_victim_fails_when_its_drain_is_called_off():
    fleet = Fleet(on("", "a"), on("", "b"), drain_timeout=60.0)
    fleet.core.adopted("a", 0.0)
    fleet.request("a", 0.5)
    for_b = fleet.request("b", 1.0)
    behind = fleet.request("a", 1.5)
    pause(fleet, "a", 2.0)
    assert not behind.error, "it is started again after b"
    fleet.take(fleet.core.abandoned(for_b, 3.0))
    assert (fleet.state("a"), behind.error.code) == ("ready", "backend_paused")


def test_backend_that_is_paused_as_its_load_ends_serves_nobody():
    fleet = Fleet(on("", "a"))
    waiting = fleet.request("a", 0.0)
    pause(fleet, "a", 1.0)
    fleet.loaded("a", 1.5)
    assert waiting.error.code == "backend_paused"


def test_pause_that_is_reported_after_its_backend_was_stopped_changes_nothing():
    fleet = Fleet(on("", "a"))
    pause(fleet, "a", 1.0)
    fleet.request("a", 2.0)
    assert fleet.step(Load, "a")
    assert not fleet.core.layout.slot("a").paused_as


def test_paused_backend_that_does_not_answer_is_not_stopped_for_that():
    fleet = Fleet(on("", "a"))
    fleet.core.adopted("a", 0.0)
    pause(fleet, "a", 1.0)
    fleet.take(fleet.core.unanswering("a", 2.0))
    assert fleet.state("a") == "ready"
