"""The explorer ends where nothing is wrong, and what is planted is found, with its shortest history."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import NOTHING, Effects
from tests.explorer import trial
from tests.explorer.explore import Exploration, main, shortest
from tests.explorer.saved import SavedState
from tests.explorer.trial import Trial, replay
from tests.explorer.worlds import WORLDS

SMALL = replace(WORLDS["one GPU"], may=frozenset(), extra=())
"""Only requests, the ends of leases and of steps, and time."""
SWAP = (
    ("request", "a"),
    ("request", "c"),
    ("release", "a"),
    ("evicted", "a"),
    ("loaded", "c"),
)


@pytest.mark.parametrize("world", WORLDS)
def test_nothing_is_wrong_in_any_world_after_a_fact(world):
    assert Exploration(WORLDS[world], WORLDS[world].policies[-1]).until(1).breaches == []


def test_a_history_is_played_from_its_facts_alone():
    played = Trial(WORLDS["one GPU"], "eager").play(*SWAP)
    assert played.judge() == []
    assert [(event.kind, event.backend) for event in played.log[-2:]] == [("ready", "c"), ("leased", "c")]


def test_states_that_go_on_alike_have_one_form_whenever_they_came_about():
    world = WORLDS["one GPU"]
    now = Trial(world, "eager").play(("request", "a"), ("release", "a"))
    later = Trial(world, "eager").play(("pass", "7"), ("request", "a"), ("release", "a"))
    other = Trial(world, "eager").play(("request", "a"))
    assert now.form() != other.form()
    assert now.form() != later.form()  # it was resident for longer
    again = Trial(world, "eager").play(("request", "a"), ("release", "a"))
    assert now.form() == again.form()


def test_a_state_that_is_put_back_goes_on_as_the_first_time():
    played = Trial(WORLDS["two GPUs"], "adaptive").play(("request", "x"))
    saved, form = SavedState(played), played.form()
    played.play(("request", "a"), ("release", "x")).complete()
    first = played.log[:], played.history[:], played.form()
    saved.put_back()
    assert played.form() == form
    played.play(("request", "a"), ("release", "x")).complete()
    assert (played.log, played.history, played.form()) == first


LEFT_DURING_A_LOAD = (
    *(("unload", "w"), ("evicted", "w"), ("request", "w"), ("others", "0", "5"), ("loaded", "w")),
    *(("release", "w"), ("unload", "w"), ("evicted", "w"), ("request", "w")),
)
"""What other programs hold is not believed while a load may be taken for them, and told again after it."""
STUCK_BEFORE_ONE = (("died", "x"), ("request", "x"), ("evict_failed", "x"), ("time",), ("request", "m"))
"""Of two places that are as good, one has still to be left by what was stuck there."""
BUSY_AND_IDLE = (("request", "x"), ("evicted", "m0"), ("loaded", "x"), ("request", "m"), ("request", "x"))
"""Of two places that cost one victim each, one has two leases."""
IDLE_BESIDE_A_QUEUE = (
    *[("request", "m")] * 2,
    *(("request", "y"), ("time",), ("request", "x"), ("release", "y")),
)
"""A place becomes idle for a second replica while another model's queue waits."""
FOUND = [
    ("a policy with mistakes", "tests.explorer.worlds:Undecided", ()),
    ("an eviction with mistakes", "eager", (("request", "l"),)),
    ("host memory", "adaptive", (("request", "b"), ("time",))),
    ("one GPU", "eager", (("request", "c"), ("evicted", "a"), ("load_cancelled", "c"))),
    ("replicas", "eager", (("request", "x"), ("request", "m"), ("died", "z"))),
    ("paused, they wait", "adaptive", (("pause", "100"), ("request", "b"), ("time",))),
    ("paused, they refuse", "adaptive", (("pause", "100"), ("time",), ("request", "b"))),
    ("one of two", "eager", (("request", "m"), ("request", "x"), ("load_failed", "m1"))),
    ("one of two", "adaptive", (("request", "m"), ("load_failed", "m1"), ("request", "x"))),
    ("one of two", "adaptive", STUCK_BEFORE_ONE),
    ("busy replicas", "time_slice", BUSY_AND_IDLE),
    ("busy replicas", "eager", (*BUSY_AND_IDLE[:2], ("evict_failed", "x"), ("time",), ("request", "m"))),
    ("busy replicas", "adaptive", (("request", "m"), ("request", "m"), ("request", "m"), ("request", "x"))),
    ("busy replicas", "eager", (("request", "x"), ("evict_failed", "m0"), ("time",), ("request", "m"))),
    ("busy replicas", "adaptive", (("request", "x"), ("request", "y"), ("time",), ("request", "m"))),
    ("busy replicas", "adaptive", (*[("request", "x")] * 2, ("request", "y"), ("time",), ("request", "m"))),
    ("busy replicas", "debounce", IDLE_BESIDE_A_QUEUE),
    ("replicas, one in the place of two", "eager", (("request", "m"),)),
    ("two hosts", "debounce", (("request", "x"), ("away", "h2"), ("drained", "h2"), ("time",))),
    ("two hosts", "eager", (("request", "y"), ("lost", "h1"), ("request", "m"), ("away", "h2"))),
    ("two hosts", "adaptive", (("away", "h2"), ("drained", "h2"), ("request", "x"), ("request", "y"))),
    ("GPU left to others", "eager", LEFT_DURING_A_LOAD),
]
"""Histories after which once something was wrong."""


@pytest.mark.parametrize(("world", "policy", "facts"), FOUND, ids=range(len(FOUND)))
def test_what_was_found_once_is_wrong_no_more(world, policy, facts):
    assert replay(WORLDS[world], policy, facts) == []


def test_a_lease_that_time_ends_is_not_released_as_well():
    config = replace(SMALL.config, drain_timeout=trial.LEASE_SECONDS)
    world = replace(SMALL, config=config)
    assert replay(world, "eager", (("request", "a"), ("request", "c"))) == []


class EarlyScheduler(Scheduler):
    """Leases what drains."""

    def requested(self, ticket, now):
        slot = self.layout.models[ticket.model].slots[0]
        if slot.state != "draining":
            return super().requested(ticket, now)
        self.layout.of_model[ticket.model].lease(self.layout.models[ticket.model], slot, ticket, now)
        return NOTHING


class ForgetfulScheduler(Scheduler):
    """Tells nobody of tickets that have ended waiting."""

    def loaded(self, step, now, how):
        return super().loaded(step, now, how)._replace(woken=())


class IdleScheduler(Scheduler):
    """Has nothing loaded after an eviction."""

    def evicted(self, step, now, **left):
        return super().evicted(step, now, **left)._replace(steps=())


class EndlessScheduler(Scheduler):
    """Never answers how an eviction ended."""

    def evicted(self, step, now, **left) -> Effects:
        while True:
            pass


@pytest.mark.parametrize(
    ("make", "depth", "invariant", "history"),
    [
        (EarlyScheduler, 3, "2", (("request", "a"), ("request", "c"), ("request", "a"))),
        (ForgetfulScheduler, 1, "3", (("request", "c"),)),
        (IdleScheduler, 1, "12", (("request", "c"),)),
        (EndlessScheduler, 1, "14", (("request", "c"),)),
    ],
)
def test_what_is_planted_is_found_with_its_shortest_history(make, depth, invariant, history, monkeypatch):
    monkeypatch.setattr(trial, "MOST_CPU_SECONDS", 0.2)
    result = Exploration(SMALL, "eager", make).until(depth)
    found = [each for each in shortest(result.breaches) if each.violation.invariant == invariant]
    assert found, result
    assert found[0].history == history
    wrong = replay(SMALL, "eager", found[0].history, make)
    assert found[0].violation in wrong


def test_a_history_is_told_as_a_test_that_can_be_run():
    [first, *_] = Exploration(SMALL, "eager", EarlyScheduler).until(3).breaches
    names = {"WORLDS": WORLDS, "replay": replay}
    exec(first.as_test(), names)
    names["test_explored_history"]()  # the scheduler that is not planted does no wrong


def test_it_ends_by_itself_and_says_how_far_it_came(capsys):
    assert main(["--minutes", "0", "--world", "one GPU", "--world", "two GPUs"]) == 0
    told = capsys.readouterr().out
    assert [line.split("  ")[0] for line in told.splitlines()[1:4]] == ["one GPU", "two GPUs", "all"]
    assert told.endswith("violations: 0\n")
