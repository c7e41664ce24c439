"""Which standby level a backend takes, and which one is demoted for the memory of the host."""

import pytest

from anvil_mux.config.machines import Gpu
from anvil_mux.errors import GpuMemoryShort, Stuck
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.slot import Demote, Evict, Load, Slot
from tests.scheduler.driver import TEN, Driver, Never, backend

LEVELS = ("sleep", "sleep-2", "checkpoint", "stop")


def asleep(driver, name, at, how="sleep", **holds):
    """Puts an idle resident to rest."""
    driver.core.unload(name, at)
    step = driver.core.next_step(at)
    assert isinstance(step, Evict)
    driver.core.evicted(name, at, level=how, **holds)
    return driver


# Standby levels


@pytest.mark.parametrize(
    ("rests", "may_wake", "expected"),
    [
        ("sleep", True, "sleep-2"),
        ("sleep", False, "checkpoint"),
        ("sleep-2", False, "checkpoint"),
        ("checkpoint", True, "stop"),
        ("freeze", True, "stop"),
    ],
)
def test_the_rung_below_is_the_next_that_can_be_reached(rests, may_wake, expected):
    slot = Slot(backend("a", evict_to=LEVELS), {"0": 1}, level=rests)
    assert slot.below(may_wake=may_wake) == expected


def test_every_standby_ends_with_a_stop():
    assert Slot(backend("a", evict_to=("sleep",)), {}).levels == ("sleep", "stop")
    assert Slot(backend("a"), {}).levels == ("stop",)


# Resting for long


def sleeper(*levels, after=10.0, others=()):
    """``a`` sleeps since 1.0 on a free GPU."""
    driver = Driver(backend("a", evict_to=levels, demote_after=after), *others).with_resident("a")
    return asleep(driver, "a", 1.0)


def test_a_sleeper_is_demoted_when_its_time_on_the_rung_is_over():
    driver = sleeper("sleep")
    assert (driver.steps(1.0), driver.until) == ([], 11.0)
    assert driver.core.next_step(11.0) == Demote("a", "sleep", "stop")
    assert driver.state("a") == "demoting"
    driver.core.evicted("a", 12.0)
    assert driver.state("a") == "stopped"
    driver.sound()


def test_each_rung_has_its_own_time():
    driver = sleeper("sleep", "checkpoint")
    assert driver.core.next_step(11.0) == Demote("a", "sleep", "checkpoint")
    driver.core.evicted("a", 12.0, level="checkpoint")
    assert driver.steps(21.0) == []
    assert driver.core.next_step(22.0) == Demote("a", "checkpoint", "stop")


def test_a_sleeper_is_woken_for_a_deeper_sleep_while_its_gpu_is_free():
    driver = sleeper("sleep", "sleep-2")
    assert driver.core.next_step(11.0) == Load("a", "sleep")
    driver.core.loaded("a", 12.0, "sleep")
    assert driver.core.next_step(12.0) == Evict("a", "sleep-2")
    driver.core.evicted("a", 13.0, level="sleep-2")
    assert driver.core.slots["a"].level == "sleep-2"
    driver.sound()


def test_it_is_stopped_instead_while_another_has_its_gpu():
    driver = sleeper("sleep", "sleep-2", others=(backend("b"),))
    assert driver.asked("b", 2.0) == ["load b"]
    driver.core.loaded("b", 3.0)
    assert driver.core.next_step(11.0) == Demote("a", "sleep", "stop")


def test_who_is_asked_for_on_the_way_down_stays_up():
    driver = sleeper("sleep", "sleep-2")
    assert driver.steps(11.0) == ["load a"]
    ticket = driver.request("a", 11.5)
    driver.core.loaded("a", 12.0, "sleep")
    assert ticket.backend == "a"
    assert driver.release(ticket, 13.0) == []
    assert asleep(driver, "a", 20.0).core.slots["a"].level == "sleep"


def test_who_is_waited_for_is_not_demoted():
    driver = sleeper("sleep", others=(backend("b"),))
    driver.asked("b", 2.0)
    driver.request("a", 10.5)
    assert driver.steps(11.0) == []


def test_who_cannot_be_demoted_stays_standby_and_is_stopped_later():
    driver = sleeper("sleep", "checkpoint")
    driver.steps(11.0)
    driver.core.evict_failed("a", 12.0, "no")
    assert (driver.state("a"), driver.core.slots["a"].level) == ("standby", "sleep")
    assert driver.steps(16.0) == []
    assert driver.core.next_step(22.0) == Demote("a", "sleep", "stop")


def test_who_cannot_be_stopped_is_tried_again_as_long_as_it_takes():
    driver = sharing()
    assert driver.asked("c", 2.0) == ["demote a"]
    driver.core.evict_failed("a", 3.0, "no answer")
    assert isinstance(driver.request("c", 4.0).error, Stuck)
    assert (driver.steps(4.0), driver.until) == ([], 8.0)
    assert driver.steps(8.0) == ["demote a"]
    driver.core.evicted("a", 9.0)
    assert driver.asked("c", 9.0) == ["load c"]


def unstoppable(*others, **settings):
    """``a`` and ``b`` sleep, and keep 2 of 11 bytes each; neither could be stopped for ``c``, of 8 bytes."""
    pair = [backend(name, vram=5, evict_to=("sleep",)) for name in "ab"]
    driver = Driver(*pair, backend("c", vram=8), *others, gpus=(Gpu("0", vram=11),), **settings)
    for name in "ab":
        asleep(driver.with_resident(name), name, 0.0, residual={"0": 2})
    waiting = driver.request("c", 1.0)
    assert driver.steps(1.0) == ["demote a"]
    driver.core.evict_failed("a", 2.0, "no answer")
    assert (driver.steps(2.0), waiting.error) == (["demote b"], None), "8 and 2 fit on 11"
    driver.core.evict_failed("b", 3.0, "no")
    return driver, waiting


def test_a_load_for_which_several_that_could_not_be_stopped_leave_no_room_fails_at_once():
    driver, waiting = unstoppable()
    assert (waiting.error.code, waiting.error.retry_after) == ("stuck", 4.0)
    assert waiting.error.message == "a could not be stopped and holds a GPU of c: no answer"
    assert isinstance(driver.request("c", 4.0).error, Stuck)
    assert driver.steps(7.0) == ["demote a"]
    again = driver.request("c", 7.5)
    assert not again.settled, "there will be room once it has been stopped"
    driver.swaps("a", 7.75, "c", 9.0)
    driver.sound()


def test_nobody_waits_behind_a_queue_for_which_several_that_could_not_be_stopped_leave_no_room():
    """They are not stopped while requests wait for them: if ``c`` kept the GPU from these, nobody got it."""
    driver, _ = unstoppable(max_wait=0.5)
    driver.request("c", 4.0)
    for name in "ab":
        driver.request(name, 5.0, takes_lease=False)
    assert driver.steps(6.0) == ["load a"]
    assert driver.loaded("a", 7.0) == ["load b"]
    assert driver.loaded("b", 8.0) == []
    driver.request("c", 9.0)
    assert driver.steps(10.0) == ["evict a", "evict b"], "what runs again can be evicted again"


def test_a_load_for_which_the_pinned_and_one_that_could_not_be_stopped_leave_no_room_fails_at_once():
    a, p = backend("a", vram=5, evict_to=("sleep",)), backend("p", vram=2, pin=True)
    driver = Driver(a, p, backend("c", vram=8), gpus=(Gpu("0", vram=11),)).with_resident("p")
    asleep(driver.with_resident("a"), "a", 0.0, residual={"0": 2})
    waiting = driver.request("c", 1.0)
    assert driver.steps(1.0) == ["demote a"]
    driver.core.evict_failed("a", 2.0, "no")
    assert isinstance(waiting.error, Stuck)
    driver.core.pin("p", 3.0, False)
    assert driver.asked("c", 3.0) == ["evict p"]


def test_a_load_for_which_others_and_one_that_could_not_be_stopped_leave_no_room_fails_once_it_is_overdue():
    a, c = backend("a", vram=5, evict_to=("sleep",)), backend("c", vram=8)
    driver = Driver(a, c, gpus=(Gpu("0", vram=11),), policy=Never())
    assert driver.core.adopt_standby("a", 0.0, "sleep", {"0": 2}, 0)
    driver.core.memory_seen({"0": 2})
    waiting = driver.request("c", 1.0)
    assert driver.steps(61.0) == ["demote a"]
    driver.core.evict_failed("a", 62.0, "no")
    driver.request("a", 63.0)  # so it is not stopped again as long as ``c`` keeps the GPU from it
    assert driver.steps(63.0) == []
    assert isinstance(waiting.error, GpuMemoryShort)
    assert driver.steps(123.0) == ["load a"]


# By hand


def test_a_model_that_is_put_out_twice_is_stopped():
    driver = sleeper("sleep", "checkpoint", after=None)
    assert driver.core.unload("a", 2.0)
    assert driver.core.next_step(2.0) == Demote("a", "sleep", "stop")
    driver.core.evicted("a", 3.0)
    assert not driver.core.unload("a", 4.0)


def test_a_sleeper_that_somebody_waits_for_is_stopped_by_hand_and_who_waits_is_told():
    driver = sleeper("sleep", after=None, others=(backend("b"),)).with_resident("b", 2.0)
    driver.request("b", 3.0)
    waiting = driver.request("a", 4.0)
    assert (driver.steps(4.0), driver.state("b")) == ([], "draining")
    assert driver.core.unload("a", 5.0)
    assert (waiting.error.code, driver.state("b")) == ("cancelled", "ready")
    assert driver.steps(5.0) == ["demote a"]
    assert driver.log[-1].way == "stop"


def test_a_sleeper_is_put_out_by_hand_only_when_none_of_its_replicas_serves():
    one, other = (
        backend(name, gpu, model="m", evict_to=("sleep",)) for name, gpu in zip("ab", "01", strict=True)
    )
    driver = Driver(one, other)
    for name in "ab":
        assert driver.core.adopt(name, 0.0)
    driver.unanswering("a", 1.0)
    driver.core.evicted("a", 2.0, level="sleep")
    for expected in ("evict b", "demote a"):
        assert driver.unload("m", 3.0) == [expected]
        if expected == "evict b":
            driver.core.evicted("b", 3.0)


# Memory of a shared GPU


def sharing():
    """``a`` sleeps and keeps 2 of the 10 bytes of GPU 0."""
    a, b, c = backend("a", vram=6, evict_to=("sleep",)), backend("b", vram=8), backend("c", vram=9)
    driver = Driver(a, b, c, gpus=(Gpu("0", vram=10),)).with_resident("a")
    return asleep(driver, "a", 1.0, residual={"0": 2})


def test_a_victim_that_keeps_more_than_the_target_leaves_room_for_is_put_down_as_well():
    a, b = backend("a", vram=6, evict_to=("sleep",)), backend("b", vram=9)
    driver = Driver(a, b, gpus=(Gpu("0", vram=10),)).with_resident("a")
    assert driver.asked("b", 1.0) == ["evict a"]
    assert driver.evicted("a", 2.0, {"0": 3}, "sleep") == ["demote a"]
    assert driver.evicted("a", 3.0) == ["load b"]


def test_nobody_else_goes_for_a_target_that_nobody_waits_for_any_more():
    """``a`` keeps 2 of the 4 bytes that ``b`` was to have."""
    a = backend("a", vram=4, evict_to=("sleep",))
    driver = Driver(a, backend("b", vram=5), backend("c", vram=6), gpus=(Gpu("0", vram=11),))
    driver.with_resident("a").with_resident("c", 1.0)
    waiting = driver.request("b", 2.0)
    assert driver.steps(2.0) == ["evict a"]
    driver.core.give_up(waiting, 3.0)
    driver.core.evicted("a", 4.0, {"0": 2}, "sleep")
    assert (driver.steps(4.0), driver.states()) == ([], {"a": "standby", "b": "stopped", "c": "ready"})
    driver.sound()


@pytest.mark.parametrize(
    ("residual", "expected"),
    [({"sleep": 2}, "sleep"), ({"sleep": 3}, "checkpoint"), ({"checkpoint": 9}, "sleep")],
)
def test_who_is_known_to_keep_too_much_beside_the_target_goes_to_a_lower_rung_at_once(residual, expected):
    a, b = backend("a", vram=6, evict_to=("sleep", "checkpoint")), backend("b", vram=8)
    driver = Driver(a, b, gpus=TEN).with_resident("a")
    for way, amount in residual.items():
        driver.footprints.learn("a", way, {"0": 4}, {"0": amount})
    driver.request("b", 1.0)
    assert driver.core.next_step(1.0) == Evict("a", expected)
    told = driver.log[-1].cause
    assert told == (
        Cause("oldest_first", waiting=1) if expected == "sleep" else Cause("standby_full", way="sleep")
    )


def test_who_is_put_out_for_nobody_keeps_what_it_keeps():
    driver = Driver(backend("a", vram=6, evict_to=("sleep",)), backend("b", vram=9), gpus=TEN).with_resident(
        "a"
    )
    driver.footprints.learn("a", "sleep", {"0": 4}, {"0": 2})
    driver.core.unload("a", 1.0)
    assert driver.core.next_step(1.0) == Evict("a", "sleep")


def test_a_victim_that_is_not_needed_any_more_stays():
    """Both must go for ``c``; while they drain, ``d`` dies and leaves room enough."""
    a, b, d = (backend(name, vram=3) for name in "abd")
    driver = Driver(a, b, backend("c", vram=6), d, gpus=(Gpu("0", vram=9),))
    for name in "abd":
        driver.with_resident(name)
    held = {name: driver.request(name, 1.0) for name in "ab"}
    driver.core.slots["d"].last_used = 2.0
    driver.asked("c", 3.0)
    draining = [name for name, state in driver.states().items() if state == "draining"]
    assert len(draining) == 1, "the idle one is stopped at once"
    stopping = next(name for name, state in driver.states().items() if state == "evicting")
    driver.core.evicted(stopping, 4.0)
    other = next(name for name in "abd" if name not in (*draining, stopping))
    assert driver.died(other, 5.0, "killed") == ["load c"]
    assert driver.state(draining[0]) == "ready"
    for ticket in held.values():
        driver.core.release(ticket, 6.0)


def test_who_is_to_be_measured_has_its_gpu_to_itself_until_it_has_left_it_once():
    a, b = backend("a", vram_measured=True), backend("b", vram=4)
    driver = Driver(a, b, gpus=(Gpu("0", vram=10),)).with_resident("a")
    assert driver.asked("b", 1.0) == ["evict a"]
    assert driver.evicted("a", 2.0, freed={"0": 6}) == ["load b"]
    driver.core.loaded("b", 3.0)
    assert driver.asked("a", 4.0) == ["load a"], "6 and 4 fit on 10"


def test_who_waits_until_it_is_stopped_is_refused_then_if_one_that_could_not_be_stopped_is_in_the_way():
    a, b = (backend(name, vram=vram, evict_to=("sleep",)) for name, vram in (("a", 4), ("b", 8)))
    driver = Driver(a, b, gpus=TEN)
    for name, residual in (("a", 3), ("b", 1)):
        assert driver.core.adopt_standby(name, 0.0, "sleep", {"0": residual}, 0)
        driver.core.unload(name, 0.0)
    assert driver.steps(0.0) == ["demote a", "demote b"]
    driver.core.evict_failed("a", 1.0, "no")
    waiting = driver.request("b", 1.0)
    assert not waiting.settled
    driver.core.evicted("b", 2.0)
    assert isinstance(waiting.error, Stuck)


def beside_a_stuck_one(driver, at):
    """``a``, which shares the GPU with ``b``, could not be stopped."""
    assert driver.unload("a", at) == ["evict a"]
    driver.core.evict_failed("a", at, "no")


def test_who_waits_until_its_load_is_cancelled_is_refused_then_if_another_is_stuck():
    driver = Driver(*(backend(name, vram=4) for name in "ab"), gpus=TEN).with_resident("a")
    assert driver.asked("b", 1.0) == ["load b"]
    beside_a_stuck_one(driver, 2.0)
    assert driver.unload("b", 3.0) == ["cancel b"]
    waiting = driver.request("b", 4.0)
    assert not waiting.settled
    driver.core.load_cancelled("b", 5.0)
    assert isinstance(waiting.error, Stuck)


def test_who_waits_until_its_drain_has_ended_is_refused_if_it_dies_and_another_is_stuck():
    driver = Driver(*(backend(name, vram=4) for name in "ab"), gpus=TEN).with_resident("a").with_resident("b")
    beside_a_stuck_one(driver, 2.0)
    driver.core.release(driver.request("b", 3.0), 3.5)
    driver.request("b", 4.0)
    driver.core.unload("b", 4.0)
    assert (driver.steps(4.0), driver.state("b")) == ([], "draining")
    waiting = driver.request("b", 5.0)
    assert not waiting.settled
    driver.core.died("b", 6.0, "killed")
    assert isinstance(waiting.error, Stuck)


def test_who_is_found_to_need_more_than_one_that_could_not_be_stopped_leaves_is_refused_at_once():
    """Beside ``b``, which takes the GPU whole until it is measured, nothing in standby counts."""
    a, b = backend("a", vram=4, evict_to=("sleep",)), backend("b", vram_measured=True)
    driver = Driver(a, b, backend("c", vram=4), gpus=TEN)
    assert driver.core.adopt_standby("a", 0.0, "sleep", {"0": 3}, 0)
    assert driver.unload("a", 0.0) == ["demote a"]
    driver.core.evict_failed("a", 1.0, "no")
    driver.with_resident("b", 1.0)
    assert driver.asked("c", 2.0) == ["evict b"]
    waiting = driver.request("b", 2.5)
    driver.core.evicted("b", 3.0, freed={"0": 8})
    assert isinstance(waiting.error, Stuck)
