"""What is loaded before anybody asks, and what other programs leave of a GPU."""

import pytest

from anvil_mux.config.config import Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import GpuMemoryShort
from anvil_mux.lab.engines import Engines, Outcome
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.slot import Load
from tests.scheduler.driver import TEN, Driver, backend
from tests.scheduler.test_host_memory import short

# Preparing


def test_every_backend_is_loaded_once_before_anybody_asks():
    a, b = backend("a", evict_to=("sleep",), preload=True), backend("b", preload=True)
    driver = Driver(a, b)
    assert driver.steps(0.0) == ["load a"]
    assert driver.loaded("a", 3.0) == ["evict a"]
    assert driver.evicted("a", 4.0, level="sleep") == ["load b"]
    assert driver.loaded("b", 9.0) == []
    assert driver.states() == {"a": "standby", "b": "ready"}
    driver.sound()


def test_who_was_prepared_and_rests_is_not_stopped_to_prepare_another():
    a, b = backend("a", vram=6, evict_to=("sleep",), preload=True), backend("b", vram=9, preload=True)
    driver = Driver(a, b, backend("c", vram=5, preload=True), gpus=TEN)
    assert driver.steps(0.0) == ["load a"]
    assert driver.loaded("a", 1.0) == ["evict a"]
    assert driver.evicted("a", 2.0, {"0": 2}, "sleep") == ["load c"]


def test_nor_to_spare_the_host():
    a, b = backend("a", "0", evict_to=("sleep",), preload=True), backend("b", "0", preload=True, ram=6)
    driver = short(10, a, b)
    assert driver.core.adopt_standby("a", 0.0, "sleep", {}, 6)
    assert (driver.steps(0.0), driver.state("a")) == ([], "standby")


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
    assert driver.asked("b", 0.0) == ["load b"]
    driver.core.loaded("b", 1.0)
    driver.core.release(next(iter(driver.core.slots["b"].holders)), 2.0)
    assert driver.steps(2.0) == [], "who has had work is not evicted for it"


def test_every_replica_is_prepared_for_the_same_reason():
    a, b = (backend(name, gpu, model="m", preload=True) for name, gpu in zip("ab", "01", strict=True))
    driver = Driver(a, b)
    assert driver.steps(0.0) == ["load a"]
    assert driver.loaded("a", 3.0) == ["load b"]
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
    assert driver.asked("b", 1.0) == ["evict a"]


def test_an_engine_that_starts_is_not_taken_for_a_other_process():
    driver = Driver(backend("a", vram=5), backend("b", vram=5), gpus=(Gpu("0", vram=10),))
    driver.asked("a", 1.0)
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
    assert driver.asked("a", 1.0) == ["load a"]


def a_model_that_held(amount, *, reserve=0, **fields):
    """``a``, without declared memory, held so much of 24 when it last ran, and ``b`` is resident."""
    gpus = (Gpu("0", vram=24, reserve=reserve),)
    driver = Driver(backend("a", **fields), backend("b"), gpus=gpus).with_resident("a")
    assert driver.unload("a", 1.0) == ["evict a"]
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
    assert driver.asked("a", 4.0) == []
    driver.core.memory_seen({"0": 4})
    assert driver.steps(5.0) == ["evict b"]


def test_what_it_held_is_compared_with_the_whole_card_and_the_reserve_is_for_other_processes():
    driver = a_model_that_held(20, reserve=3)
    driver.core.memory_seen({"0": 4})
    assert driver.asked("a", 4.0) == ["evict b"]


@pytest.mark.parametrize("gpu", [Gpu("0", vram=24), Gpu("0")])
def test_of_a_model_that_was_never_measured_or_a_card_of_unknown_size_nothing_is_foreseen(gpu):
    driver = Driver(backend("a"), backend("b"), gpus=(gpu,)).with_resident("b")
    driver.core.memory_seen({"0": 20})
    assert driver.asked("a", 4.0) == ["evict b"]


def test_what_is_declared_counts_for_more_than_what_was_measured():
    driver = a_model_that_held(20, vram=10)
    driver.core.memory_seen({"0": 13})
    assert driver.asked("a", 4.0) == ["evict b"]


@pytest.mark.parametrize("fields", [{}, {"vram": 20}])
def test_an_engine_that_runs_beside_other_processes_is_adopted(fields):
    driver = Driver(backend("a", **fields), gpus=(Gpu("0", vram=24),)).with_resident("a")
    driver.core.died("a", 1.0, "lost sight of it")
    driver.core.slots["a"].held_last = {"0": 20}
    driver.core.memory_seen({"0": 5})
    assert driver.core.adopt("a", 2.0)
