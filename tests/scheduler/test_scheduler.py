"""The scheduler as its drivers see it: a fact in, its effects out."""

import itertools
from math import inf

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import Draining, LoadError, WaitedTooLong
from anvil_mux.routing.routing import Work
from anvil_mux.scheduler.costs import Costs, Footprints
from anvil_mux.scheduler.group import GpuGroup
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.slot import NOTHING, Ticket
from tests.scheduler.driver import backend


class House:
    """A scheduler, its log, and short words for its effects."""

    def __init__(self, *backends, scheduler=Scheduler, **settings):
        """``scheduler``: its class, also of a copy of the package with a planted bug."""
        self.log = []
        self.config = Config(backends=backends, **{"policy": "eager", **settings})
        self.core = scheduler(self.config, self.log.append, Costs(), Footprints())
        self._ids = itertools.count(1)

    def ticket(self, model, at, **about):
        return Ticket(next(self._ids), model, at, **about)

    def resident(self, name, at=0.0):
        """Loads the only backend of a model at a moment, without a lease."""
        (load,) = self.core.requested(Ticket(next(self._ids), name, at, takes_lease=False), at).steps
        self.core.loaded(load, at, "stop")

    def kinds(self):
        return [f"{event.kind} {event.backend or event.model}" for event in self.log]


def names(steps):
    return [f"{type(step).__name__.lower()} {step.backend}" for step in steps]


def test_a_lease_of_what_is_ready_and_its_release_have_no_effects():
    house = House(backend("a"))
    house.resident("a")
    ticket = house.ticket("a", 1.0)
    assert house.core.requested(ticket, 1.0) is NOTHING
    assert ticket.backend == "a"
    assert house.core.released(ticket, 2.0) is NOTHING


def test_a_request_that_waits_has_its_backend_loaded_and_is_woken_then():
    house = House(backend("a"))
    ticket = house.ticket("a", 1.0)
    effects = house.core.requested(ticket, 1.0)
    assert names(effects.steps) == ["load a"]
    assert not ticket.settled
    done = house.core.loaded(effects.steps[0], 4.0, "stop")
    assert (done.woken, done.cut, done.steps) == ([ticket], [], [])
    assert ticket.backend == "a"


def test_a_request_that_is_refused_at_once_is_not_among_those_that_are_woken():
    house = House(backend("a"))
    first = house.ticket("a", 1.0)
    (load,) = house.core.requested(first, 1.0).steps
    assert house.core.load_failed(load, 2.0, LoadError("no")).woken == [first]
    later = house.ticket("a", 3.0)
    assert later not in house.core.requested(later, 3.0).woken
    assert isinstance(later.error, LoadError)


def test_the_end_of_a_drain_is_the_next_moment_and_cuts_what_still_runs_before_the_eviction():
    house = House(backend("a"), backend("b"), drain_timeout=5.0)
    house.resident("a")
    running, waiting = house.ticket("a", 1.0), house.ticket("b", 2.0)
    house.core.requested(running, 1.0)
    effects = house.core.requested(waiting, 2.0)
    assert (effects.steps, effects.ask_at) == ([], 7.0)
    effects = house.core.time_passed(7.0)
    assert effects.cut == [running]
    assert names(effects.steps) == ["evict a"]
    assert house.core.released(running, 8.0) is NOTHING, "late, and harmless"
    assert names(house.core.evicted(effects.steps[0], 9.0).steps) == ["load b"]


def reports_of_old_steps_are_ignored(scheduler=Scheduler):
    house = House(backend("a"), scheduler=scheduler)
    (load,) = house.core.requested(house.ticket("a", 0.0), 0.0).steps
    house.core.loaded(load, 1.0, "stop")
    house.core.died("a", 100.0, "killed")
    (again,) = house.core.requested(house.ticket("a", 100.0), 100.0).steps
    assert again.number != load.number
    before = house.kinds()
    assert not any(house.core.loaded(load, 101.0, "stop"))
    assert not any(house.core.load_failed(load, 101.0, LoadError("no")))
    assert house.kinds() == before
    house.core.loaded(again, 102.0, "stop")
    assert house.kinds()[-2:] == ["ready a", "leased a"]


def test_each_step_has_a_number_and_a_report_of_one_that_is_over_is_ignored():
    reports_of_old_steps_are_ignored()


def test_a_cancel_has_the_number_of_the_load_that_it_ends():
    house = House(backend("a"))
    (load,) = house.core.requested(house.ticket("a", 0.0), 0.0).steps
    effects = house.core.unload_asked("a", 1.0)
    assert names(effects.steps) == ["cancel a"]
    assert effects.steps[0].number == load.number
    assert len(effects.woken) == 1
    house.core.load_cancelled(load, 2.0)
    assert house.kinds()[-1] == "stopped a"


def test_an_unload_with_nothing_to_unload_has_no_effects():
    house = House(backend("a"))
    assert house.core.unload_asked("a", 0.0) is NOTHING


def test_a_request_that_gives_up_is_no_more_and_its_swap_is_not_begun():
    house = House(backend("a"), backend("b"))
    house.resident("a")
    running, waiting = house.ticket("a", 1.0), house.ticket("b", 2.0)
    house.core.requested(running, 1.0)
    house.core.requested(waiting, 2.0)
    effects = house.core.abandoned(waiting, 3.0, WaitedTooLong("too long"))
    assert (effects.woken, effects.steps, effects.ask_at) == ([], [], inf)
    assert isinstance(waiting.error, WaitedTooLong)
    assert house.core.abandoned(waiting, 3.0) is NOTHING
    assert house.kinds()[-2:] == ["failed b", "ready a"]


def test_what_runs_already_is_adopted_if_it_fits_beside_the_others_and_has_no_effects_if_not():
    house = House(backend("a"), backend("b"))
    house.core.expected(["a", "b"])
    assert house.core.adopted("a", 1.0) is not NOTHING
    assert house.core.adopted("b", 1.0) is NOTHING
    assert house.core.looked_at("b", 1.0).steps == []
    ticket = house.ticket("a", 2.0)
    assert (house.core.requested(ticket, 2.0), ticket.backend) == (NOTHING, "a")


def test_a_first_byte_after_a_request_was_taken_back_comes_too_late():
    house = House(backend("r0", "0", model="m"), backend("r1", "1", model="m"))
    house.core.adopted("r0", 0.0)
    first, second, third = (house.ticket("m", 0.0, work=Work(stream=True)) for _ in range(3))
    for ticket in (first, second, third):
        house.core.requested(ticket, 0.0)
    assert house.core.first_byte(first, 0.0) is NOTHING
    house.core.adopted("r1", 1.0)
    other = house.ticket("m", 1.0, work=Work(stream=True))
    house.core.requested(other, 1.0)
    assert house.core.released(other, 2.0).cut == [third]
    assert third.severed
    assert not second.severed


def test_at_the_end_all_that_wait_are_refused_all_that_run_are_cut_and_nothing_is_begun():
    house = House(backend("a"), backend("b"))
    house.resident("a")
    running, waiting = house.ticket("a", 1.0), house.ticket("b", 2.0)
    house.core.requested(running, 1.0)
    house.core.requested(waiting, 2.0)
    assert house.core.refused(Draining("bye"), 3.0).woken == [waiting]
    assert house.core.severed(4.0).cut == [running]
    house.core.closed()
    late = house.ticket("b", 5.0)
    assert house.core.requested(late, 5.0).steps == []


def test_a_reload_moves_who_waits_and_tells_whose_model_is_gone():
    house = House(backend("a"), backend("b"))
    house.resident("a")
    staying, gone = house.ticket("a", 1.0), house.ticket("b", 2.0)
    house.core.requested(house.ticket("a", 0.5), 0.5)
    house.core.requested(gone, 2.0)
    effects = house.core.reconfigured(Config(backends=(backend("a"),), policy="eager"), 3.0)
    assert effects.woken == [gone]
    assert gone.error.code == "model_not_found"
    assert house.core.requested(staying, 4.0) is NOTHING
    assert staying.backend == "a"


def test_a_load_that_ends_in_another_model_after_a_reload_is_not_what_that_models_queue_waits_for():
    """``a`` is being loaded for a model that is gone: it is cancelled for ``m``, which it is to serve."""
    house = House(backend("a"), backend("b", model="m"))
    house.core.requested(house.ticket("a", 0.0), 0.0)
    house.core.requested(house.ticket("m", 1.0), 1.0)
    replicas = (backend("a", model="m"), backend("b", model="m"))
    effects = house.core.reconfigured(Config(backends=replicas, policy="eager"), 2.0)
    assert names(effects.steps) == ["cancel a"]


def test_a_group_knows_its_own_gpus_and_models_only():
    """Else a thousand hosts take a thousand times a thousand entries."""
    backends = [Backend(f"{host}-{gpu}", f"m{gpu}", (gpu,), host=host) for host in "xyz" for gpu in "01"]
    gpus = tuple(Gpu(gpu, vram=20, host=host) for host in "xyz" for gpu in "01")
    scheduler = Scheduler(Config(backends=tuple(backends), gpus=gpus), [].append, Costs(), Footprints())
    for group in scheduler.layout.groups:
        (name,) = group.slots
        host, _, gpu = name.partition("-")
        assert list(group.placement.capacity) == [f"{host}/{gpu}"]
        assert list(group.models) == [f"m{gpu}"]


def test_a_mistake_in_one_gpu_group_takes_nothing_from_the_others(monkeypatch):
    """Both lack host memory that ``c`` frees, and are asked about it in one go."""
    house = House(
        backend("a", "0", ram=4),
        backend("b", "1", ram=4),
        backend("c", "2", ram=8),
        host_memory=10,
        max_wait=5.0,
    )
    house.resident("c")
    tickets = [house.ticket("a", 1.0), house.ticket("b", 1.0)]
    for ticket in tickets:
        house.core.requested(ticket, 1.0)
    (evict,) = house.core.time_passed(6.0).steps
    broken, answer = house.core.layout.by_name["0"], GpuGroup.next_step

    def next_step(group, now):
        if group is broken and now < 8.0:
            raise ZeroDivisionError
        return answer(group, now)

    monkeypatch.setattr(GpuGroup, "next_step", next_step)
    effects = house.core.evicted(evict, 7.0)
    assert names(effects.steps) == ["load b"]
    assert {type(mistake) for mistake in effects.mistakes} == {ZeroDivisionError}
    assert effects.ask_at == 8.0
    again = house.core.time_passed(8.0)
    assert names(again.steps) == ["load a"]
    assert not again.mistakes
