"""Which standby level a backend takes, and which one is demoted for the memory of the host."""

import itertools

import pytest

from anvil_mux.config.config import Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import DoesNotFit, GpuMemoryShort, HostMemoryShort, Stuck
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines, Outcome
from anvil_mux.lab.simulate import Arrival, _Simulation, simulate
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import HOLDING, Slot
from anvil_mux.scheduler.standby import HostMemory, below, levels
from anvil_mux.scheduler.steps import Demote, Evict, Load
from tests.lab.test_simulate import HOST_MEMORY, LAYOUTS, world
from tests.scheduler.driver import TEN, Driver, Never, backend
from tests.scheduler.test_scheduler import House, names

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
    assert below(slot, may_wake=may_wake) == expected


def test_every_standby_ends_with_a_stop():
    assert levels(backend("a", evict_to=("sleep",))) == ("sleep", "stop")
    assert levels(backend("a")) == ("stop",)


# Resting for long


def sleeper(*levels, after=10.0, others=()):
    """``a`` sleeps since 1.0 on a free GPU."""
    driver = Driver(backend("a", evict_to=levels, demote_after=after), *others).with_resident("a")
    return asleep(driver, "a", 1.0)


def test_a_sleeper_is_demoted_when_its_time_on_the_rung_is_over():
    driver = sleeper("sleep")
    assert driver.steps(1.0) == []
    assert driver.until == 11.0
    assert driver.core.next_step(11.0) == Demote("a", "sleep", "stop")
    assert driver.state("a") == "demoting"
    driver.core.evicted("a", 12.0)
    assert driver.state("a") == "stopped"
    driver.sound()


def test_a_sleeper_without_demote_after_sleeps_on():
    driver = sleeper("sleep", after=None)
    assert driver.steps(1e6) == []


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
    driver.request("b", 2.0)
    assert driver.steps(2.0) == ["load b"]
    driver.core.loaded("b", 3.0)
    assert driver.core.next_step(11.0) == Demote("a", "sleep", "stop")


def test_who_is_asked_for_on_the_way_down_stays_up():
    driver = sleeper("sleep", "sleep-2")
    assert driver.steps(11.0) == ["load a"]
    ticket = driver.request("a", 11.5)
    driver.core.loaded("a", 12.0, "sleep")
    assert ticket.backend == "a"
    driver.core.release(ticket, 13.0)
    assert driver.steps(13.0) == []
    assert asleep(driver, "a", 20.0).core.slots["a"].level == "sleep"


def test_who_is_waited_for_is_not_demoted():
    driver = sleeper("sleep", others=(backend("b"),))
    driver.request("b", 2.0)
    driver.steps(2.0)
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
    driver.request("c", 2.0)
    assert driver.steps(2.0) == ["demote a"]
    driver.core.evict_failed("a", 3.0, "no answer")
    assert isinstance(driver.request("c", 4.0).error, Stuck)
    assert driver.steps(4.0) == []
    assert driver.until == 8.0
    assert driver.steps(8.0) == ["demote a"]
    driver.core.evicted("a", 9.0)
    driver.request("c", 9.0)
    assert driver.steps(9.0) == ["load c"]


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
    driver.core.evicted("a", 7.75)
    assert driver.steps(7.75) == ["load c"]
    driver.core.loaded("c", 9.0)
    driver.sound()


def test_nobody_waits_behind_a_queue_for_which_several_that_could_not_be_stopped_leave_no_room():
    """They are not stopped while requests wait for them: if ``c`` kept the GPU from these, nobody got it."""
    driver, _ = unstoppable(max_wait=0.5)
    driver.request("c", 4.0)
    for name in "ab":
        driver.request(name, 5.0, takes_lease=False)
    assert driver.steps(6.0) == ["load a"]
    driver.core.loaded("a", 7.0)
    assert driver.steps(7.0) == ["load b"]
    driver.core.loaded("b", 8.0)
    assert driver.steps(8.0) == []
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
    driver.request("c", 3.0)
    assert driver.steps(3.0) == ["evict p"]


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
    driver.core.unanswering("a", 1.0)
    driver.steps(1.0)
    driver.core.evicted("a", 2.0, level="sleep")
    for expected in ("evict b", "demote a"):
        driver.core.unload("m", 3.0)
        assert driver.steps(3.0) == [expected]
        if expected == "evict b":
            driver.core.evicted("b", 3.0)


# Memory of a shared GPU


def sharing():
    """``a`` sleeps and keeps 2 of the 10 bytes of GPU 0."""
    a, b, c = backend("a", vram=6, evict_to=("sleep",)), backend("b", vram=8), backend("c", vram=9)
    driver = Driver(a, b, c, gpus=(Gpu("0", vram=10),)).with_resident("a")
    return asleep(driver, "a", 1.0, residual={"0": 2})


def test_a_sleeper_is_left_alone_while_there_is_room_beside_its_residual():
    driver = sharing()
    driver.request("b", 2.0)
    assert driver.steps(2.0) == ["load b"]


def test_a_sleeper_whose_residual_is_in_the_way_is_put_down_first():
    driver = sharing()
    driver.request("c", 2.0)
    assert driver.steps(2.0) == ["demote a"]
    driver.core.evicted("a", 3.0)
    assert driver.steps(3.0) == ["load c"]
    driver.core.loaded("c", 4.0)
    driver.sound()


def test_a_victim_that_keeps_more_than_the_target_leaves_room_for_is_put_down_as_well():
    a, b = backend("a", vram=6, evict_to=("sleep",)), backend("b", vram=9)
    driver = Driver(a, b, gpus=(Gpu("0", vram=10),)).with_resident("a")
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.core.evicted("a", 2.0, {"0": 3}, "sleep")
    assert driver.steps(2.0) == ["demote a"]
    driver.core.evicted("a", 3.0)
    assert driver.steps(3.0) == ["load b"]


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
    driver.request("c", 3.0)
    driver.steps(3.0)
    draining = [name for name, state in driver.states().items() if state == "draining"]
    assert len(draining) == 1, "the idle one is stopped at once"
    stopping = next(name for name, state in driver.states().items() if state == "evicting")
    driver.core.evicted(stopping, 4.0)
    other = next(name for name in "abd" if name not in (*draining, stopping))
    driver.core.died(other, 5.0, "killed")
    assert driver.steps(5.0) == ["load c"]
    assert driver.state(draining[0]) == "ready"
    for ticket in held.values():
        driver.core.release(ticket, 6.0)


def test_who_is_to_be_measured_has_its_gpu_to_itself_until_it_has_left_it_once():
    a, b = backend("a", vram_measured=True), backend("b", vram=4)
    driver = Driver(a, b, gpus=(Gpu("0", vram=10),)).with_resident("a")
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.core.evicted("a", 2.0, freed={"0": 6})
    assert driver.steps(2.0) == ["load b"]
    driver.core.loaded("b", 3.0)
    driver.request("a", 4.0)
    assert driver.steps(4.0) == ["load a"], "6 and 4 fit on 10"


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
    driver.core.unload("a", at)
    assert driver.steps(at) == ["evict a"]
    driver.core.evict_failed("a", at, "no")


def test_who_waits_until_its_load_is_cancelled_is_refused_then_if_another_is_stuck():
    driver = Driver(*(backend(name, vram=4) for name in "ab"), gpus=TEN).with_resident("a")
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["load b"]
    beside_a_stuck_one(driver, 2.0)
    driver.core.unload("b", 3.0)
    assert driver.steps(3.0) == ["cancel b"]
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
    driver.core.unload("a", 0.0)
    assert driver.steps(0.0) == ["demote a"]
    driver.core.evict_failed("a", 1.0, "no")
    driver.with_resident("b", 1.0)
    driver.request("c", 2.0)
    assert driver.steps(2.0) == ["evict b"]
    waiting = driver.request("b", 2.5)
    driver.core.evicted("b", 3.0, freed={"0": 8})
    assert isinstance(waiting.error, Stuck)


# The host's memory


def short(budget, *backends):
    return Driver(*backends, host_memory=budget)


def test_the_least_valuable_sleeper_yields_when_host_memory_is_short():
    a, b = (backend(name, str(n), "9", evict_to=("sleep",)) for n, name in enumerate("ab"))
    driver = short(10, a, b).with_resident("a")
    for name in "ab":
        driver.costs.learn("", name, "stop", 0.0, 10.0)
    for at in range(1, 40):
        driver.core.release(driver.request("a", at / 10), at / 10)
    asleep(driver, "a", 4.0, host_bytes=6)
    driver.with_resident("b", 5.0)
    driver.core.unload("b", 6.0)
    assert driver.core.next_step(6.0) == Evict("b", "sleep")
    driver.core.evicted("b", 7.0, level="sleep", host_bytes=6)
    assert driver.core.next_step(7.0) == Demote("b", "sleep", "stop")
    assert driver.state("a") == "standby"


def test_who_will_not_fit_asleep_takes_the_first_rung_on_which_there_is_room():
    a = backend("a", evict_to=("sleep", "sleep-2", "stop"), ram=2)
    driver = short(5, a).with_resident("a")
    driver.footprints.learn("a", "sleep", {}, {}, host_bytes=8)
    driver.footprints.learn("a", "sleep-2", {}, {}, host_bytes=3)
    driver.core.unload("a", 1.0)
    assert driver.core.next_step(1.0) == Evict("a", "sleep-2")


def test_a_model_without_vram_moves_as_much_as_it_held_last_and_not_the_whole_gpu():
    a = backend("a", evict_to=("checkpoint", "stop"))
    driver = Driver(a, gpus=(Gpu("0", vram=140),), host_memory=100).with_resident("a")
    driver.core.unload("a", 1.0)
    assert driver.core.next_step(1.0) == Evict("a", "stop")  # nobody knows: it may hold all of the 140
    driver.core.evicted("a", 2.0, freed={"0": 24})
    driver.with_resident("a", 3.0)
    driver.core.unload("a", 4.0)
    assert driver.core.next_step(4.0) == Evict("a", "checkpoint")


def test_what_needs_more_host_memory_than_there_is_fails_at_once():
    ticket = short(5, backend("a", ram=6)).request("a", 1.0)
    assert isinstance(ticket.error, DoesNotFit)
    assert "host memory" in ticket.error.message


def test_a_resident_on_another_gpu_goes_when_the_host_has_no_room_for_both():
    driver = short(10, backend("a", "0", ram=6), backend("b", "1", ram=6), backend("t", "0", "1"))
    driver.with_resident("a")
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.core.evicted("a", 2.0)
    assert driver.steps(2.0) == ["load b"]


def test_a_line_that_other_groups_leave_no_host_memory_is_refused_when_it_is_overdue():
    a, b = backend("a", "0", ram=6), backend("b", "1", ram=6)
    host = HostMemory(10)
    other = Slot(a, {"0": 1}, state="ready", holders={"a request": 0.0})
    host.join(other, lambda slot, now: 0.0)
    driver = short(10, b)
    host.join(driver.core.slots["b"], lambda slot, now: 0.0)
    driver.core.state.memory = host
    ticket = driver.request("b", 1.0)
    assert driver.steps(1.0) == []
    assert ticket.error is None
    assert driver.steps(61.0) == []
    assert isinstance(ticket.error, HostMemoryShort)
    assert "a has" in ticket.error.message


def two_drivers(*trace, **fields):
    """Each of a and b, on GPUs of their own, needs more than half of the host's memory."""
    backends = backend("a", "0", ram=6, **fields), backend("b", "1", ram=6)
    config = Config(backends=backends, policy="eager", host_memory=10, max_wait=20.0)
    log = simulate(config, trace)
    assert check(log, config) == []
    return [(e.at, e.kind, e.backend or e.model) for e in log if e.kind in ("evicting", "ready", "failed")]


def test_an_idle_resident_of_another_group_goes_for_a_line_that_is_overdue():
    assert two_drivers(Arrival(0.0, "a", 1.0), Arrival(50.0, "b", 1.0)) == [
        (10.0, "ready", "a"),
        (70.0, "evicting", "a"),
        (81.0, "ready", "b"),
    ]


@pytest.mark.parametrize("fields", [{"pin": True}, {"min_residency": 1000.0}])
def test_but_not_who_may_stay(fields):
    told = two_drivers(Arrival(0.0, "a", 1.0), Arrival(50.0, "b", 1.0), **fields)
    assert told == [(10.0, "ready", "a"), (70.0, "failed", "b")]


def test_nor_who_is_in_use():
    told = two_drivers(Arrival(0.0, "a", 100.0), Arrival(50.0, "b", 1.0))
    assert told == [(10.0, "ready", "a"), (70.0, "failed", "b")]


def test_who_was_asked_to_go_and_is_used_again_stays_and_the_line_is_asked_again():
    a, b = backend("a", "0", ram=6), backend("b", "1", ram=6)
    host = HostMemory(10)
    slots = {each.name: Slot(each, {each.gpus[0]: 1}, state="ready", loaded=0.0) for each in (a, b)}
    for slot in slots.values():
        host.join(slot, lambda slot, now: 0.0)
    assert host.call(slots["b"], 2, [slots["b"]], 1.0)
    slots["a"].holders["a request"] = 1.0
    host.asked()
    assert host.answer(slots["a"], 1.0) == ""
    assert host.is_changed
    assert not host.call(slots["b"], 2, [slots["b"]], 1.0)


def a_short_host(monkeypatch):
    """``a`` is idle, ``b`` lacks the host memory that it has, and it is not known whether ``other`` runs."""
    rounds = itertools.count()
    affected = Scheduler._affected

    def counted(scheduler, now):
        assert next(rounds) < 100, "the groups are asked again and again"
        return affected(scheduler, now)

    monkeypatch.setattr(Scheduler, "_affected", counted)
    house = House(
        backend("a", "0", ram=6),
        backend("other", "0"),
        backend("b", "1", ram=6),
        host_memory=10,
        max_wait=20.0,
    )
    house.core.expected(["a", "other"])
    house.core.adopted("a", 0.0)
    ticket = house.ticket("b", 1.0)
    house.core.requested(ticket, 1.0)
    assert names(house.core.time_passed(21.0).steps) == []
    return house, ticket


def test_who_is_to_go_and_cannot_before_its_gpus_are_known_is_called_once(monkeypatch):
    house, _ = a_short_host(monkeypatch)
    assert names(house.core.looked_at("other", 30.0).steps) == ["evict a"]


def test_who_was_to_go_for_a_queue_that_is_gone_stays(monkeypatch):
    house, ticket = a_short_host(monkeypatch)
    house.core.abandoned(ticket, 25.0)
    assert names(house.core.looked_at("other", 30.0).steps) == []
    assert house.core.layout.slot("a").state == "ready"


def test_of_two_replicas_on_a_host_with_too_little_memory_for_one_the_other_is_loaded():
    """``big`` could not run beside ``c``, which is in use; ``small`` can once ``a`` has gone."""
    house = House(
        backend("small", "0", model="m", ram=4),
        backend("big", "1", model="m", ram=9),
        backend("tie", "0", "1"),
        backend("a", "2", ram=4),
        backend("c", "3", ram=4),
        host_memory=10,
        max_wait=20.0,
    )
    house.resident("a"), house.resident("c")
    house.core.requested(house.ticket("c", 1.0), 1.0)
    ticket = house.ticket("m", 2.0)
    house.core.requested(ticket, 2.0)
    assert names(house.core.time_passed(22.0).steps) == ["evict a"]
    assert ticket.error is None


def test_of_two_who_are_to_be_loaded_neither_waits_for_the_other():
    """``b`` gives back 40 when it is restored, and its GPU is not free yet; ``a`` needs 10."""
    b = backend("b", "1", evict_to=("checkpoint", "stop"))
    driver = short(45, backend("a", "0", ram=10), b, backend("c", "1"), backend("pair", "0", "1"))
    asleep(driver.with_resident("b"), "b", 1.0, how="checkpoint", host_bytes=40)
    held = driver.with_resident("c", 2.0).request("c", 2.0)
    driver.request("b", 3.0)
    driver.request("a", 4.0)
    assert driver.steps(4.0) == [], "both are to come, and together they do not fit"
    driver.core.release(held, 5.0)
    assert driver.steps(5.0) == ["evict c"]
    driver.core.evicted("c", 6.0)
    assert driver.steps(6.0) == ["load b", "load a"]


def test_a_wake_waits_for_no_host_memory_that_it_does_not_take():
    """More is kept than there may be, since ``c`` could not be stopped; ``a`` takes what it has already."""
    rests = [
        backend(name, gpu, evict_to=("checkpoint", "stop")) for name, gpu in zip("ac", "01", strict=True)
    ]
    driver = short(10, *rests, backend("pair", "0", "1"))
    for name in "ac":
        assert driver.core.adopt_standby(name, 0.0, "checkpoint", {}, 6)
    assert driver.steps(0.0) == ["demote a"]
    driver.core.evict_failed("a", 1.0, "no")
    assert driver.steps(1.0) == ["demote c"]
    driver.core.evict_failed("c", 2.0, "no")
    driver.request("a", 3.0)
    assert driver.steps(3.0) == ["load a"]


def test_nobody_is_put_out_for_a_deeper_sleep():
    """``a`` runs in 10 and sleeps in 3, ``b`` runs in 8."""
    a = backend("a", "0", evict_to=("sleep", "sleep-2"), demote_after=10.0, ram=10)
    driver = short(15, a, backend("b", "1", ram=8), backend("pair", "0", "1")).with_resident("a")
    asleep(driver, "a", 1.0, host_bytes=3)
    driver.with_resident("b", 2.0)
    assert driver.core.next_step(11.0) == Demote("a", "sleep", "stop")
    assert driver.state("b") == "ready"


def test_who_sleeps_in_more_memory_than_there_is_is_stopped_and_started_anew():
    driver = short(35, backend("a", evict_to=("sleep",))).with_resident("a")
    asleep(driver, "a", 1.0, host_bytes=40)
    ticket = driver.request("a", 1.0)
    assert driver.steps(1.0) == ["demote a"]
    driver.core.evicted("a", 2.0)
    assert driver.steps(2.0) == ["load a"]
    driver.core.loaded("a", 3.0)
    assert ticket.backend == "a"


def test_what_a_sleeper_that_was_found_has_pinned_counts_when_it_is_awake_again():
    driver = short(
        10, backend("a", "0", evict_to=("sleep",)), backend("b", "1", ram=6), backend("pair", "0", "1")
    )
    assert driver.core.adopt_standby("a", 0.0, "sleep", {}, 6)
    assert driver.steps(0.0) == []
    driver.request("a", 1.0)
    assert driver.steps(1.0) == ["load a"]
    driver.core.loaded("a", 2.0, "sleep")
    for ticket in list(driver.core.slots["a"].holders):
        driver.core.release(ticket, 2.0)
    driver.request("b", 3.0)
    assert driver.steps(3.0) == ["evict a"], "awake, it keeps what it had asleep"


def test_of_sleepers_that_are_found_those_go_that_the_host_has_no_room_for():
    sleepers = [backend(name, str(gpu), evict_to=("sleep",)) for gpu, name in enumerate("abc")]
    driver = short(12, *sleepers, backend("all", "0", "1", "2"))
    for name in "abc":
        assert driver.core.adopt_standby(name, 0.0, "sleep", {}, 5)
    assert driver.steps(0.0) == ["demote a"]
    driver.core.evicted("a", 1.0)
    assert driver.steps(1.0) == []
    assert driver.states() == {"a": "stopped", "b": "standby", "c": "standby", "all": "stopped"}


def test_a_sleeper_that_cannot_be_stopped_spares_no_other():
    sleepers = [backend(name, str(gpu), evict_to=("sleep",)) for gpu, name in enumerate("ab")]
    driver = short(12, *sleepers, backend("c", "2", ram=6), backend("all", "0", "1", "2"))
    for name in "ab":
        assert driver.core.adopt_standby(name, 0.0, "sleep", {}, 5)
    driver.request("c", 1.0)
    assert driver.steps(1.0) == ["demote a"]
    driver.core.evict_failed("a", 2.0, "no")
    assert driver.steps(2.0) == ["demote b"]
    driver.core.evicted("b", 3.0)
    assert driver.steps(3.0) == ["load c"]


def test_a_rung_that_keeps_as_much_of_the_host_is_passed_over_when_that_is_short():
    a = backend("a", evict_to=("sleep", "checkpoint", "stop"))
    driver = short(10, a, backend("b", "1", "0", ram=8)).with_resident("a")
    asleep(driver, "a", 1.0, host_bytes=6)
    driver.footprints.learn("a", "checkpoint", {}, {}, host_bytes=6)
    driver.request("b", 2.0)
    assert driver.core.next_step(2.0) == Demote("a", "sleep", "stop")


def often_called():
    """``a`` sleeps in 8 of 13, ``b`` was called fifty times and sleeps in 6, ``c`` wants the GPU."""
    driver = short(13, *(backend(name, evict_to=("sleep",)) for name in "abc"))
    for name in "abc":
        driver.footprints.learn(name, "sleep", {}, {}, host_bytes=6)
        driver.costs.learn("", name, "stop", 0.0, 10.0)
    assert driver.core.adopt_standby("a", 0.0, "sleep", {}, 8)
    driver.with_resident("b")
    for at in range(1, 51):
        driver.core.release(driver.request("b", at / 10), at / 10)
    driver.request("c", 9.0)
    return driver


def test_who_is_often_called_stays_high_and_who_is_not_makes_way_for_it():
    driver = often_called()
    assert driver.steps(9.0) == ["demote a"]
    driver.core.evicted("a", 10.0)
    assert driver.core.next_step(10.0) == Evict("b", "sleep")
    driver.core.evicted("b", 11.0, level="sleep", host_bytes=6)
    assert driver.steps(11.0) == ["load c"]


def test_a_swap_waits_for_that_no_longer_than_for_a_drain():
    driver = often_called()
    assert driver.steps(9.0) == ["demote a"]
    assert driver.until == 39.0
    assert driver.core.next_step(39.0) == Evict("b", "stop")


def test_nobody_makes_way_for_one_that_is_worth_less():
    driver = often_called()
    for at in range(90, 200):
        driver.core.state.models["a"].demand.arrived(at / 10)
    assert driver.core.next_step(20.0) == Evict("b", "stop")


def test_who_cannot_make_way_is_not_waited_for():
    driver = often_called()
    assert driver.steps(9.0) == ["demote a"]
    driver.core.evict_failed("a", 10.0, "no")
    assert driver.core.next_step(10.0) == Evict("b", "stop")


class Audited(_Simulation):
    """Adds up what is held after everything that happens."""

    def _carry_out(self, effects, now):
        super()._carry_out(effects, now)
        slots = list(self._scheduler.layout.slots)
        for group in self._scheduler.layout.groups:
            for gpu, capacity in group.placement.capacity.items():
                used = sum(slot.occupies.get(gpu, 0) for slot in group.slots.values())
                assert used <= capacity or capacity == 1, (now, gpu)
        kept = sum(slot.ram if slot.state in HOLDING else slot.host_bytes for slot in slots)
        self.most = max(self.most, kept)


@pytest.mark.parametrize("layout", HOST_MEMORY)
def test_what_all_hold_never_exceeds_gpu_or_host(layout):
    most = []
    for seed in range(40):
        config, trace, engines = world(layout, "eager", seed)
        audited = Audited(config, engines, None, Costs())
        audited.most = 0
        for name, way in itertools.product(audited._scheduler.layout.memories[""]._slots, LEVELS[:-1]):
            audited._scheduler.layout.memories[""]._footprints.learn(name, way, {}, {}, host_bytes=4)
        audited.run(trace)
        assert audited.most <= config.host_memory, seed
        most.append(audited.most)
    assert most.count(0) < 4


def test_the_layouts_are_short_of_memory_indeed():
    for layout, budget in HOST_MEMORY.items():
        backends, _ = LAYOUTS[layout]
        assert sum(max(one.ram or 0, 4) for one in backends) > budget


# Preparing


def test_every_backend_is_loaded_once_before_anybody_asks():
    a, b = backend("a", evict_to=("sleep",), preload=True), backend("b", preload=True)
    driver = Driver(a, b)
    assert driver.steps(0.0) == ["load a"]
    driver.core.loaded("a", 3.0)
    assert driver.steps(3.0) == ["evict a"]
    driver.core.evicted("a", 4.0, level="sleep")
    assert driver.steps(4.0) == ["load b"]
    driver.core.loaded("b", 9.0)
    assert driver.steps(9.0) == []
    assert driver.states() == {"a": "standby", "b": "ready"}
    driver.sound()


def test_who_was_prepared_and_rests_is_not_stopped_to_prepare_another():
    a, b = backend("a", vram=6, evict_to=("sleep",), preload=True), backend("b", vram=9, preload=True)
    driver = Driver(a, b, backend("c", vram=5, preload=True), gpus=TEN)
    assert driver.steps(0.0) == ["load a"]
    driver.core.loaded("a", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.core.evicted("a", 2.0, {"0": 2}, "sleep")
    assert driver.steps(2.0) == ["load c"]


def test_nor_to_spare_the_host():
    a, b = backend("a", "0", evict_to=("sleep",), preload=True), backend("b", "0", preload=True, ram=6)
    driver = short(10, a, b)
    assert driver.core.adopt_standby("a", 0.0, "sleep", {}, 6)
    assert driver.steps(0.0) == []
    assert driver.state("a") == "standby"


def test_a_pair_is_prepared_after_those_that_share_its_gpus():
    singles = [
        backend(name, gpu, evict_to=("sleep",), preload=True) for name, gpu in zip("ab", "01", strict=True)
    ]
    driver = Driver(*singles, backend("pair", "0", "1", preload=True))
    for name in "ab":
        assert driver.steps(0.0) == [f"load {name}"]
        driver.core.loaded(name, 0.0)
    assert driver.steps(0.0) == ["evict a", "evict b"]
    for name in "ab":
        driver.core.evicted(name, 1.0, level="sleep")
    assert driver.steps(1.0) == ["load pair"]
    driver.sound()


def test_requests_go_before_preparing():
    driver = Driver(backend("a", preload=True), backend("b"))
    driver.request("b", 0.0)
    assert driver.steps(0.0) == ["load b"]
    driver.core.loaded("b", 1.0)
    driver.core.release(next(iter(driver.core.slots["b"].holders)), 2.0)
    assert driver.steps(2.0) == [], "who has had work is not evicted for it"


def test_every_replica_is_prepared_for_the_same_reason():
    a, b = (backend(name, gpu, model="m", preload=True) for name, gpu in zip("ab", "01", strict=True))
    driver = Driver(a, b)
    assert driver.steps(0.0) == ["load a"]
    driver.core.loaded("a", 3.0)
    assert driver.steps(3.0) == ["load b"]
    assert {event.cause for event in driver.log if event.kind == "loading"} == {Cause("preload")}


def test_what_fails_to_load_is_not_prepared_again():
    from anvil_mux.errors import LoadError

    driver = Driver(backend("a", preload=True))
    driver.steps(0.0)
    driver.core.load_failed("a", 1.0, LoadError("broken"))
    assert driver.steps(1e6) == []


def test_a_request_joins_the_load_that_prepares_its_model():
    driver = Driver(backend("a", preload=True))
    assert driver.steps(0.0) == ["load a"]
    ticket = driver.request("a", 1.0)
    driver.core.loaded("a", 3.0)
    assert ticket.backend == "a"


def test_the_first_user_of_a_prepared_model_waits_for_a_wake_only():
    """In virtual time: waking takes 0.5 s, a cold start 30 s."""

    def perform(step, nth):
        if isinstance(step, Load):
            return Outcome(0.5 if step.level == "sleep" else 30.0)
        return Outcome(0.25)

    sleepers = tuple(backend(name, evict_to=("sleep",), preload=True) for name in "abc")
    config = Config(backends=sleepers, policy="eager")
    log = simulate(config, [Arrival(200.0, "a", 1.0), Arrival(210.0, "b", 1.0)], perform)
    assert [e.seconds for e in log if e.kind == "leased"] == [0.75, 0.75]
    assert Engines().stop_seconds == 1.0


# Other processes


def test_memory_that_memory_seen_is_not_given_away():
    a, b = backend("a", vram=5), backend("b", vram=5)
    driver = Driver(a, b, gpus=(Gpu("0", vram=10),)).with_resident("a")
    assert driver.core.memory_seen({"0": 3})
    assert not driver.core.memory_seen({"0": 3})
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]


def test_an_engine_that_starts_is_not_taken_for_a_other_process():
    driver = Driver(backend("a", vram=5), backend("b", vram=5), gpus=(Gpu("0", vram=10),))
    driver.request("a", 1.0)
    driver.steps(1.0)
    assert not driver.core.memory_seen({"0": 5})


def test_a_line_that_other_processes_leave_no_room_is_refused_when_it_is_overdue():
    driver = Driver(backend("a", vram=8), gpus=(Gpu("0", vram=10),))
    driver.core.memory_seen({"0": 3})
    ticket = driver.request("a", 1.0)
    assert driver.steps(1.0) == []
    assert driver.steps(61.0) == []
    assert isinstance(ticket.error, GpuMemoryShort)
    other = driver.request("a", 62.0)
    driver.core.memory_seen({})
    assert driver.steps(63.0) == ["load a"]
    assert other.error is None


def test_who_takes_a_gpu_whole_takes_what_other_processes_leave():
    driver = Driver(backend("a"), gpus=(Gpu("0", vram=10),))
    driver.core.memory_seen({"0": 3})
    driver.request("a", 1.0)
    assert driver.steps(1.0) == ["load a"]


def a_model_that_held(amount, *, reserve=0, **fields):
    """``a``, without declared memory, held so much of 24 when it last ran, and ``b`` is resident."""
    gpus = (Gpu("0", vram=24, reserve=reserve),)
    driver = Driver(backend("a", **fields), backend("b"), gpus=gpus).with_resident("a")
    driver.core.unload("a", 1.0)
    assert driver.steps(1.0) == ["evict a"]
    driver.core.evicted("a", 2.0, freed={"0": amount})
    return driver.with_resident("b", 3.0)


def test_nobody_is_evicted_for_a_model_that_would_not_fit_beside_other_processes():
    driver = a_model_that_held(20)
    driver.core.memory_seen({"0": 5})
    ticket = driver.request("a", 4.0)
    assert driver.steps(4.0) == []
    assert driver.steps(64.0) == []
    assert isinstance(ticket.error, GpuMemoryShort)
    assert "it held" in str(ticket.error)
    assert "vram" in str(ticket.error)
    assert driver.state("b") == "ready"
    assert driver.tell("draining") == ["draining a"]
    driver.sound()


def test_it_is_loaded_once_other_processes_leave_it_what_it_held():
    driver = a_model_that_held(20)
    driver.core.memory_seen({"0": 5})
    driver.request("a", 4.0)
    assert driver.steps(4.0) == []
    driver.core.memory_seen({"0": 4})
    assert driver.steps(5.0) == ["evict b"]


def test_what_it_held_is_compared_with_the_whole_card_and_the_reserve_is_for_other_processes():
    driver = a_model_that_held(20, reserve=3)
    driver.core.memory_seen({"0": 4})
    driver.request("a", 4.0)
    assert driver.steps(4.0) == ["evict b"]


@pytest.mark.parametrize("gpu", [Gpu("0", vram=24), Gpu("0")])
def test_of_a_model_that_was_never_measured_or_a_card_of_unknown_size_nothing_is_foreseen(gpu):
    driver = Driver(backend("a"), backend("b"), gpus=(gpu,)).with_resident("b")
    driver.core.memory_seen({"0": 20})
    driver.request("a", 4.0)
    assert driver.steps(4.0) == ["evict b"]


def test_what_is_declared_counts_for_more_than_what_was_measured():
    driver = a_model_that_held(20, vram=10)
    driver.core.memory_seen({"0": 13})
    driver.request("a", 4.0)
    assert driver.steps(4.0) == ["evict b"]


@pytest.mark.parametrize("fields", [{}, {"vram": 20}])
def test_an_engine_that_runs_beside_other_processes_is_adopted(fields):
    driver = Driver(backend("a", **fields), gpus=(Gpu("0", vram=24),)).with_resident("a")
    driver.core.died("a", 1.0, "lost sight of it")
    driver.core.slots["a"].held_last = {"0": 20}
    driver.core.memory_seen({"0": 5})
    assert driver.core.adopt("a", 2.0)


# Unified memory


def unified(*backends, own=0, budget=108):
    """A host with 120 of memory, in which its GPU computes, beside what the GPU has of its ``own``."""
    gpu = Gpu("0", vram=120 + own, shared=120)
    return Driver(*backends, gpus=(gpu,), host_memory=budget)


def test_memory_that_is_the_gpus_and_the_hosts_counts_once():
    a, b = backend("a", vram=60, ram=10), backend("b", vram=45)
    driver = unified(a, b).with_resident("a")
    assert driver.core.slots["a"].ram == 70
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["evict a"]  # 70 and 45 are more than 108
    driver.core.evicted("a", 2.0)
    assert driver.steps(2.0) == ["load b"]
    driver.core.loaded("b", 3.0)
    driver.sound()


def test_models_whose_memory_fits_stay_side_by_side_on_unified_memory():
    driver = unified(backend("a", vram=60, ram=3), backend("b", vram=45)).with_resident("a")
    driver.request("b", 1.0)
    assert driver.steps(1.0) == ["load b"]


def test_what_a_gpu_has_of_its_own_is_no_host_memory():
    driver = unified(backend("a", vram=150), own=96)
    assert driver.core.slots["a"].ram == 150 - 96
    driver.request("a", 1.0)
    assert driver.steps(1.0) == ["load a"]


def test_what_is_too_large_for_the_host_is_refused_at_once_on_unified_memory():
    driver = unified(backend("a", vram=110))
    assert isinstance(driver.request("a", 1.0).error, DoesNotFit)


def test_of_a_model_that_takes_the_gpu_whole_what_it_held_is_host_memory():
    driver = unified(backend("a"), backend("b")).with_resident("a")
    assert driver.core.slots["a"].ram == 0
    driver.core.unload("a", 1.0)
    driver.steps(1.0)
    driver.core.evicted("a", 2.0, freed={"0": 70})
    assert driver.core.slots["a"].ram == 70
    assert driver.with_resident("a", 3.0)
    driver.sound()


def test_weights_that_sleep_on_unified_memory_count_once():
    driver = unified(backend("a", vram=60, ram=10, evict_to=("sleep", "stop"))).with_resident("a")
    assert driver.core.state.memory._kept_on(driver.core.slots["a"], "sleep") == 70
