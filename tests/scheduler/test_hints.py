"""Hints: a client says which model it will ask for, and it is loaded where nobody is in the way."""

import pytest

from anvil_mux.errors import LoadError, Overloaded, UnknownModel
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.facts import HINT_SECONDS, MOST_HINTS
from anvil_mux.scheduler.policies import Stay, SwapTo
from tests.scheduler.driver import TEN, A, B, C, Driver, Never, backend
from tests.scheduler.fleet import Fleet, on


def hinted(driver, model, at):
    """The steps that follow from a hint."""
    driver.core.hint(model, at)
    return driver.steps(at)


def used(*backends, **settings):
    """A GPU group whose backend `a` is resident, and has had work until 1.0."""
    driver = Driver(*(backends or (A, B, C)), **settings)
    ticket = driver.request("a", 0.0)
    driver.steps(0.0)
    driver.core.loaded("a", 0.5)
    driver.core.release(ticket, 1.0)
    return driver


def test_a_hint_loads_where_the_gpu_is_free_and_a_request_finds_it_ready():
    driver = Driver(A, B)
    assert hinted(driver, "b", 0.0) == ["load b"]
    assert driver.loaded("b", 3.0) == []
    assert driver.request("b", 4.0).backend == "b"
    assert [event.cause for event in driver.log if event.kind == "loading"] == [Cause("hinted")]
    driver.sound()


def test_a_request_joins_the_load_that_was_hinted_at():
    driver = Driver(A, B)
    assert hinted(driver, "b", 0.0) == ["load b"]
    waiting = driver.request("b", 1.0)
    assert driver.asked("a", 1.0) == []
    driver.core.loaded("b", 3.0)
    assert waiting.backend == "b"


def test_an_idle_model_is_evicted_for_it():
    driver = used()
    assert hinted(driver, "b", 2.0) == ["evict a"]
    assert driver.evicted("a", 3.0) == ["load b"]
    assert driver.loaded("b", 4.0) == []
    driver.sound()


def test_one_that_answers_is_not_and_goes_once_it_has():
    driver = Driver(A, B).with_resident("a")
    ticket = driver.request("a", 1.0)
    assert hinted(driver, "b", 2.0) == []
    assert driver.core.release(ticket, 5.0)
    assert driver.steps(5.0) == ["evict a"]


def test_nor_one_that_stays_for_its_min_residency_or_is_pinned():
    driver = used(backend("a", min_residency=30.0), B)
    assert (hinted(driver, "b", 2.0), driver.until) == ([], 30.5)
    assert driver.steps(30.5) == ["evict a"]
    driver = used(backend("a", pin=True), B)
    assert hinted(driver, "b", 2.0) == []


def test_nor_one_in_standby():
    sleeper = backend("a", vram=6, evict_to=("sleep",))
    driver = Driver(sleeper, backend("b", vram=9), gpus=TEN)
    assert driver.core.adopt_standby("a", 0.0, "sleep", {"0": 2})
    assert hinted(driver, "b", 1.0) == []


def test_nor_one_that_the_policy_would_keep():
    driver = used()
    driver.core.set_policy(Never())
    assert hinted(driver, "b", 2.0) == []


class Once:
    """A policy that waits when it is first asked about a queue, and swaps when it is asked again."""

    def __init__(self):
        self.stays = [Stay(again=7.0, leases=1)]

    def decide(self, seen):
        if not seen.queues:
            return Stay()
        return self.stays.pop() if self.stays else SwapTo("b")


def test_policy_that_keeps_a_victim_is_not_asked_again_early():
    driver = used()
    driver.core.set_policy(Once())
    assert (hinted(driver, "b", 2.0), driver.until) == ([], 7.0)
    assert (driver.steps(6.0), driver.until) == ([], 7.0)
    assert driver.steps(7.0) == ["evict a"]


def test_policy_that_keeps_a_victim_is_asked_at_the_end_of_a_lease():
    small = [backend(name, vram=size) for name, size in (("a", 6), ("b", 6), ("c", 4))]
    driver = used(*small, gpus=TEN).with_resident("c", 1.0)
    ticket = driver.request("c", 1.5)
    driver.core.set_policy(Once())
    assert (hinted(driver, "b", 2.0), driver.until) == ([], 7.0)
    assert driver.core.release(ticket, 3.0)
    assert driver.steps(3.0) == ["evict a"]


def test_what_was_loaded_for_a_hint_and_not_used_yet_stays_for_others():
    driver = Driver(A, B, C)
    assert hinted(driver, "a", 0.0) == ["load a"]
    driver.core.loaded("a", 1.0)
    assert hinted(driver, "b", 2.0) == []
    assert hinted(driver, "b", 2.0 + HINT_SECONDS) == ["evict a"]


def test_a_queue_goes_before_it_and_takes_the_gpu_from_its_load():
    driver = used()
    waiting = driver.request("b", 2.0)
    assert hinted(driver, "c", 2.0) == ["evict a"]
    driver.swaps("a", 3.0, "b", 4.0)
    assert driver.release(waiting, 5.0) == ["evict b"]
    assert driver.evicted("b", 6.0) == ["load c"]
    asked = driver.request("a", 7.0)
    assert driver.steps(7.0) == ["cancel c"]
    assert driver.load_cancelled("c", 8.0) == ["load a"]
    driver.core.loaded("a", 9.0)
    assert asked.backend == "a"
    driver.sound()


def test_a_queue_that_comes_while_room_is_made_for_it_has_the_room():
    driver = used()
    assert hinted(driver, "b", 2.0) == ["evict a"]
    assert driver.asked("c", 2.5) == []
    assert driver.evicted("a", 3.0) == ["load c"]


def test_it_is_forgotten_after_a_while_and_where_its_load_has_failed():
    driver = Driver(A, B).with_resident("a")
    ticket = driver.request("a", 1.0)
    assert hinted(driver, "b", 2.0) == []
    assert driver.release(ticket, 2.0 + HINT_SECONDS) == []
    driver = Driver(A)
    assert hinted(driver, "a", 0.0) == ["load a"]
    driver.core.load_failed("a", 1.0, LoadError("broken"))
    assert driver.steps(1000.0) == []


def test_what_is_unloaded_by_hand_is_not_loaded_for_an_older_hint():
    driver = Driver(A, B).with_resident("a")
    ticket = driver.request("a", 1.0)
    assert hinted(driver, "b", 2.0) == []
    driver.core.unload("b", 3.0)
    assert driver.release(ticket, 4.0) == []


def test_hints_for_so_many_models_are_kept_and_no_more():
    names = [f"m{number}" for number in range(MOST_HINTS + 1)]
    driver = Driver(A, *(backend(name) for name in names)).with_resident("a")
    driver.request("a", 1.0)
    for name in [*names[:-1], *names[:-1]]:
        assert hinted(driver, name, 2.0) == []
    with pytest.raises(Overloaded, match="32 models"):
        driver.core.hint(names[-1], 2.0)
    driver.core.hint(names[-1], 2.0 + HINT_SECONDS)


def test_a_model_with_replicas_is_loaded_where_nobody_goes_for_it():
    fleet = Fleet(on("", "x", "0"), on("", "m0", "0", model="m"), on("", "m1", "1", model="m"))
    fleet.with_resident("x", 0.0, 1.0)
    assert fleet.take(fleet.core.hinted("m", 2.0)) == ["load m1"]
    fleet.loaded("m1", 3.0)
    assert fleet.take(fleet.core.hinted("m", 4.0)) == []


def test_a_model_that_there_is_not_cannot_be_hinted_at():
    with pytest.raises(UnknownModel, match="`m`"):
        Fleet(on("", "x", "0")).core.hinted("m", 2.0)
