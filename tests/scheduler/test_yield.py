"""GPUs that are left to other programs once these hold much of them: models make way, and come back."""

import pytest

from anvil_mux.config.config import Config
from anvil_mux.config.machines import Gpu
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.slot import FoundBackend
from tests.scheduler.fleet import Fleet, on

A = on("", "a", vram=8)
B = on("", "b", vram=8)
TWO = (Gpu("0", vram=24), Gpu("1", vram=24))


def lent(*backends, **settings):
    """A fleet whose backends are resident from 0 on, and leave a GPU once others hold 4 bytes of it."""
    fleet = Fleet(*backends, **{"gpus": TWO, "yield_above": 4, "home_after": 60.0} | settings)
    for each in backends:
        fleet.take(fleet.core.adopted(each.name, 0.0))
    return fleet


def test_an_idle_model_is_evicted_at_once_although_both_would_fit():
    fleet = lent(A)
    assert fleet.take(fleet.core.memory_seen({"0": 3}, 1.0)) == []
    assert fleet.take(fleet.core.memory_seen({"0": 4}, 2.0)) == ["evict a"]


def test_a_running_answer_has_its_drain_and_is_told_why_it_is_severed():
    fleet = lent(A)
    running = fleet.request("a", 1.0)
    assert fleet.take(fleet.core.memory_seen({"0": 4}, 2.0)) == []
    assert fleet.state("a") == "draining"
    assert fleet.take(fleet.core.time_passed(7.0)) == ["evict a"]
    assert running.severed.sentence("a") == (
        "a made way for other programs on its GPU before this request ended, after a drain of 5.0 s"
    )


def test_models_on_other_gpus_stay():
    fleet = lent(A, on("", "c", "1", vram=8))
    assert fleet.take(fleet.core.memory_seen({"0": 4}, 1.0)) == ["evict a"]
    assert fleet.state("c") == "ready"


def test_a_pinned_model_stays_and_serves():
    fleet = lent(on("", "a", vram=8, pin=True))
    assert fleet.take(fleet.core.memory_seen({"0": 4}, 1.0)) == []
    assert fleet.request("a", 2.0).backend == "a"


def test_what_is_in_standby_gives_up_the_memory_that_it_keeps_there():
    sleeper = on("", "s", vram=8, evict_to=("sleep",))
    fleet = Fleet(sleeper, gpus=TWO, yield_above=4)
    fleet.take(fleet.core.adopted("s", 0.0, FoundBackend("sleep", {"0": 1})))
    assert fleet.take(fleet.core.memory_seen({"0": 4}, 1.0)) == ["demote s"]
    frozen = Fleet(sleeper, gpus=TWO, yield_above=4)
    frozen.take(frozen.core.adopted("s", 0.0, FoundBackend("sleep", {"0": 0})))
    assert frozen.take(frozen.core.memory_seen({"0": 4}, 1.0)) == []


def test_requests_are_refused_meanwhile_also_while_it_still_drains():
    fleet = lent(A)
    fleet.request("a", 1.0)
    fleet.take(fleet.core.memory_seen({"0": 6 << 30}, 2.0))
    error = fleet.request("a", 3.0).error
    assert (error.status, error.code) == (503, "gpu_memory_short")
    assert str(error).startswith(
        "a is not loaded: other programs hold 6.0 GiB of GPU 0, which is left to them (`yield`)."
    )


def test_a_queue_is_refused_when_its_gpu_is_left_before_its_load_began():
    fleet = Fleet(A, on("", "b"), gpus=TWO, yield_above=4)
    fleet.take(fleet.core.adopted("a", 0.0))
    fleet.request("a", 1.0)
    waiting = fleet.request("b", 2.0)
    fleet.take(fleet.core.time_passed(5.0))
    assert waiting.error is None
    fleet.take(fleet.core.memory_seen({"0": 4}, 6.0))
    assert waiting.error.code == "gpu_memory_short"


def test_a_replica_elsewhere_serves_meanwhile():
    fleet = Fleet(on("", "m0", model="m"), on("", "m1", "1", model="m"), gpus=TWO, yield_above=4)
    fleet.take(fleet.core.adopted("m0", 0.0))
    assert fleet.take(fleet.core.memory_seen({"0": 4}, 1.0)) == ["evict m0"]
    fleet.evicted("m0", 1.5)
    asked = fleet.request("m", 2.0)
    assert [step.backend for step in fleet.steps] == ["m1"]
    fleet.loaded("m1", 3.0)
    assert asked.backend == "m1"


def test_what_only_drains_stays_when_the_others_leave_again():
    fleet = lent(A)
    running = fleet.request("a", 1.0)
    fleet.take(fleet.core.memory_seen({"0": 4}, 2.0))
    assert fleet.take(fleet.core.memory_seen({}, 3.0)) == []
    assert fleet.state("a") == "ready"
    fleet.take(fleet.core.time_passed(60.0))
    assert running.severed is None


def test_it_comes_back_once_the_others_have_been_away_for_home_after():
    fleet = lent(A)
    fleet.take(fleet.core.memory_seen({"0": 20}, 1.0))
    fleet.evicted("a", 2.0)
    assert fleet.take(fleet.core.time_passed(900.0)) == []
    assert fleet.take(fleet.core.memory_seen({"0": 1}, 1000.0)) == []
    assert fleet.last.ask_at == 1060.0
    assert fleet.take(fleet.core.memory_seen({"0": 4}, 1030.0)) == []  # a scene is loaded
    assert fleet.take(fleet.core.memory_seen({}, 1040.0)) == []
    assert fleet.take(fleet.core.time_passed(1060.0)) == []
    assert fleet.take(fleet.core.time_passed(1100.0)) == ["load a"]
    assert fleet.log[-1].cause == Cause("gpu_given_back", seconds=60.0)


def test_whoever_asks_before_does_not_wait_for_that():
    fleet = lent(A)
    fleet.take(fleet.core.memory_seen({"0": 20}, 1.0))
    fleet.evicted("a", 2.0)
    fleet.take(fleet.core.memory_seen({}, 10.0))
    fleet.request("a", 11.0)
    assert [step.backend for step in fleet.steps] == ["a"]


@pytest.mark.parametrize("room", [True, False])
def test_it_comes_back_beside_another_that_was_loaded_meanwhile_but_not_in_its_place(room):
    other = on("", "b", vram=8 if room else 20)
    fleet = Fleet(A, other, gpus=TWO, yield_above=4, home_after=60.0)
    fleet.take(fleet.core.adopted("a", 0.0))
    fleet.take(fleet.core.memory_seen({"0": 20}, 1.0))
    fleet.evicted("a", 2.0)
    fleet.take(fleet.core.memory_seen({}, 10.0))
    fleet.with_resident("b", 11.0, 12.0)
    assert fleet.take(fleet.core.time_passed(900.0)) == (["load a"] if room else [])


def test_what_was_unloaded_by_hand_does_not_come_back():
    fleet = lent(A)
    fleet.take(fleet.core.memory_seen({"0": 20}, 1.0))
    fleet.evicted("a", 2.0)
    fleet.take(fleet.core.memory_seen({}, 10.0))
    assert fleet.last.ask_at == 70.0
    fleet.take(fleet.core.unload_asked("a", 11.0))
    assert fleet.take(fleet.core.time_passed(70.0)) == []


def test_a_reload_that_says_so_leaves_the_gpu_at_once():
    fleet = Fleet(A, gpus=TWO)
    fleet.take(fleet.core.adopted("a", 0.0))
    assert fleet.take(fleet.core.memory_seen({"0": 4}, 1.0)) == []
    asked = Config((A,), gpus=TWO, yield_above=4)
    assert fleet.take(fleet.core.reconfigured(asked, 2.0)) == ["evict a"]
