"""How many backends of a model are resident at once: its ``most``, over all hosts."""

import pytest

from anvil_mux.errors import LoadError
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.slot import FoundBackend, Load
from tests.scheduler.fleet import Fleet, on


def anywhere(model="m", hosts=("a", "b", "c"), **fields):
    """A model that may run on GPU 0 of each of these hosts."""
    return [on(host, f"{model}.{host}", model=model, **{"most": 1, **fields}) for host in hosts]


def counted(fleet, model="m"):
    return sorted(slot.name for slot in fleet.core.layout.models[model].ready)


def preloaded(*backends, **settings):
    fleet = Fleet(*backends, **settings)
    fleet.take(fleet.core.time_passed(0.0))
    return fleet


def busy(fleet, count=20, since=1.0):
    """So many requests run at a model, of which the first answers and the others wait behind it."""
    for number in range(count):
        fleet.request("m", since + number)


def test_another_replica_of_a_busy_model_is_loaded_as_long_as_there_may_be_more():
    for most, hosts in (1, []), (2, ["b"]), (None, ["b", "c"]):
        fleet = Fleet(*anywhere(most=most), policy="adaptive")
        fleet.request("m", 0.0)
        fleet.loaded("m.a", 1.0)
        busy(fleet)
        fleet.take(fleet.core.time_passed(60.0))
        for host in hosts:
            assert [step.backend for step in fleet.steps] == [f"m.{host}"]
            fleet.loaded(f"m.{host}", 61.0)
            busy(fleet, count=60, since=62.0)
            fleet.take(fleet.core.time_passed(200.0))
        assert fleet.steps == []


def test_no_replica_is_loaded_where_nothing_can_be_begun():
    for away in (lambda core: core.host_away("b", 0.5, True), lambda core: core.host_drained("b", 0.5, True)):
        fleet = Fleet(*anywhere(most=2), policy="adaptive")
        fleet.request("m", 0.0)
        away(fleet.core)
        fleet.loaded("m.a", 1.0)
        busy(fleet)
        fleet.take(fleet.core.time_passed(60.0))
        assert [step.backend for step in fleet.steps] == ["m.c"]


def test_a_model_has_its_next_replica_where_room_is_and_waits_for_it_to_be_there():
    fleet = Fleet(*anywhere(most=2), on("b", "x"), policy="adaptive")
    fleet.take(fleet.core.adopted("x", 0.0))
    fleet.request("x", 0.0)
    fleet.request("m", 0.0)
    fleet.loaded("m.a", 1.0)
    busy(fleet)
    fleet.take(fleet.core.time_passed(60.0))
    assert [step.backend for step in fleet.steps] == ["m.c"]


def test_a_backend_in_standby_does_not_count_and_loading_prefers_it():
    fleet = Fleet(*anywhere(evict_to=("sleep",)), on("b", "x"))
    fleet.take(fleet.core.host_lost("a", 0.0))
    fleet.request("m", 1.0)
    fleet.loaded("m.b", 31.0)
    fleet.take(fleet.core.unload_asked("m", 32.0))
    assert fleet.state("m.b") == "draining"
    fleet.take(fleet.core.released(next(iter(fleet.core.layout.slot("m.b").holders)), 33.0))
    fleet.evicted("m.b", 34.0, level="sleep", residual={"0": 0})
    fleet.take(fleet.core.host_back("a", 35.0, {}))
    fleet.request("m", 36.0)
    assert fleet.step(Load, "m.b").level == "sleep"


def test_one_that_drains_for_another_model_does_not_count():
    fleet = Fleet(*anywhere(), on("a", "x"))
    running = fleet.request("m", 0.0)
    fleet.loaded("m.a", 1.0)
    fleet.request("x", 2.0)
    assert fleet.state("m.a") == "draining"
    fleet.request("m", 3.0)
    assert [step.backend for step in fleet.steps] == ["m.b"]
    fleet.take(fleet.core.released(running, 4.0))


def test_a_reprieve_that_makes_too_many_ends_with_as_many_as_may_be():
    fleet = Fleet(*anywhere(), on("a", "x"), drain_timeout=60.0)
    running = fleet.request("m", 0.0)
    fleet.loaded("m.a", 1.0)
    waiting = fleet.request("x", 2.0)
    fleet.request("m", 3.0)
    assert fleet.take(fleet.core.abandoned(waiting, 4.0)) == ["cancel m.b"]
    assert [event.cause for event in fleet.log if event.kind == "cancelling"] == [Cause("surplus")]
    assert counted(fleet) == ["m.a"]
    assert len(fleet.core.layout.slot("m.a").holders) == 2
    assert running.severed is None


def test_while_its_host_is_lost_a_resident_does_not_count_and_afterwards_the_busier_one_stays():
    for more, stays, goes in (0, "m.a", "m.b"), (2, "m.b", "m.a"):
        fleet = Fleet(*anywhere(), drain_timeout=60.0)
        fleet.request("m", 0.0)
        fleet.loaded("m.a", 1.0)
        fleet.take(fleet.core.host_lost("a", 2.0))
        fleet.request("m", 3.0)
        fleet.loaded("m.b", 4.0)
        for number in range(more):
            fleet.request("m", 5.0 + number)
        if not more:
            fleet.take(fleet.core.released(next(iter(fleet.core.layout.slot("m.b").holders)), 8.0))
        back = fleet.core.host_back("a", 9.0, {"m.a": FoundBackend()})
        assert fleet.take(back) == [f"evict {goes}"]
        assert counted(fleet) == [stays]
        assert [e.cause for e in fleet.log if e.kind == "draining"] == [Cause("surplus")]


def test_a_load_elsewhere_that_is_not_waited_for_is_cancelled_when_the_host_is_back():
    fleet = Fleet(*anywhere())
    fleet.request("m", 0.0)
    fleet.loaded("m.a", 1.0)
    fleet.take(fleet.core.host_lost("a", 2.0))
    waiting = fleet.request("m", 3.0)
    assert fleet.step(Load, "m.b")
    back = fleet.core.host_back("a", 4.0, {"m.a": FoundBackend()})
    assert fleet.take(back) == ["cancel m.b"]
    assert waiting.backend == "m.a"


def test_of_two_that_were_adopted_one_stays():
    fleet = Fleet(*anywhere())
    fleet.take(fleet.core.adopted("m.a", 0.0))
    assert fleet.take(fleet.core.adopted("m.b", 0.0)) == ["evict m.b"]
    assert counted(fleet) == ["m.a"]


@pytest.mark.parametrize("most", [1, 2])
def test_so_many_are_preloaded_and_on_other_gpus_than_other_models(most):
    fleet = preloaded(
        *anywhere("m", most=most, preload=True), *anywhere("n", preload=True), *anywhere("x", ("a",))
    )
    assert [step.backend for step in fleet.steps] == [["m.a", "n.b"], ["m.a", "m.b", "n.c"]][most - 1]
    for step in tuple(fleet.steps):
        assert fleet.loaded(step.backend, 5.0) == []
    fleet.request("x", 6.0)
    assert fleet.take(fleet.core.time_passed(1000.0)) == []


def test_a_preload_that_fails_is_made_on_the_next_host():
    fleet = preloaded(*anywhere(preload=True))
    failed = fleet.core.load_failed(fleet.step(Load, "m.a"), 2.0, LoadError("no"))
    assert fleet.take(failed) == ["load m.b"]


def test_each_stage_has_as_many_as_may_be():
    prefill = anywhere(infer_type="prefill")
    decode = [on(host, f"d.{host}", "1", model="m", infer_type="decode", most=1) for host in "abc"]
    fleet = Fleet(*prefill, *decode)
    fleet.request("m", 0.0)
    fleet.loaded(fleet.steps[0].backend, 1.0)
    fleet.take(fleet.core.time_passed(2.0))
    fleet.loaded(fleet.steps[0].backend, 3.0)
    kinds = {slot.backend.infer_type for slot in fleet.core.layout.models["m"].ready}
    assert kinds == {"prefill", "decode"}
    assert fleet.steps == []
