"""The memory of the host: which backend in standby yields it, and who waits for it."""

import itertools

import pytest

from anvil_mux.config.config import Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import DoesNotFit, HostMemoryShort
from anvil_mux.lab.checker import check
from anvil_mux.lab.simulate import Arrival, _Simulation, simulate
from anvil_mux.scheduler.costs import Costs, Footprints
from anvil_mux.scheduler.memory import HostMemory
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import HOLDING, Demote, Evict, Slot
from tests.lab.test_simulate import HOST_MEMORY, LAYOUTS, world
from tests.scheduler.driver import Driver, backend
from tests.scheduler.test_scheduler import House, names
from tests.scheduler.test_standby import LEVELS, asleep
from tests.seeds import seeds

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


def worthless_host(slots):
    host = HostMemory(10, Footprints(), lambda slot, now: 0.0)
    host.keep(slots)
    return host


def test_a_line_that_other_groups_leave_no_host_memory_is_refused_when_it_is_overdue():
    a, b = backend("a", "0", ram=6), backend("b", "1", ram=6)
    other = Slot(a, {"0": 1}, state="ready", holders={"a request": 0.0})
    driver = short(10, b)
    driver.core.state.memory = worthless_host({"a": other, **driver.core.slots})
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
    slots = {each.name: Slot(each, {each.gpus[0]: 1}, state="ready", loaded=0.0) for each in (a, b)}
    host = worthless_host(slots)
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


@pytest.mark.seeds
@pytest.mark.parametrize("layout", HOST_MEMORY)
def test_what_all_hold_never_exceeds_gpu_or_host(layout):
    most = []
    for seed in seeds(10, of=40):
        config, trace, engines = world(layout, "eager", seed)
        audited = Audited(config, engines, None, Costs())
        audited.most = 0
        for name, way in itertools.product(audited._scheduler.layout.memories[""]._slots, LEVELS[:-1]):
            audited._scheduler.layout.memories[""]._footprints.learn(name, way, {}, {}, host_bytes=4)
        audited.run(trace)
        assert audited.most <= config.host_memory, seed
        most.append(audited.most)
    assert most.count(0) < len(most) / 10 + 1


def test_the_layouts_are_short_of_memory_indeed():
    for layout, budget in HOST_MEMORY.items():
        backends, _ = LAYOUTS[layout]
        assert sum(max(one.ram or 0, 4) for one in backends) > budget


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
