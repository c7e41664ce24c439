"""What swaps are seen to cost: estimates before the first, averages after it; and what backends held."""

from dataclasses import replace

import pytest

from anvil_mux.config import config
from anvil_mux.scheduler.costs import (
    ALPHA,
    FIRST_EVICT_SECONDS,
    FIRST_LOAD_SECONDS,
    FIRST_RETURN_SECONDS,
    OTHER_FIRST_LOAD_SECONDS,
    Costs,
    Footprint,
    Footprints,
    source_of,
)


def estimated(costs, source, target, way="stop", engine="openai"):
    """(eviction, load, how many swaps it was learned from)."""
    cost = costs.estimate(source, target, way, engine)
    assert (cost.source, cost.target, cost.way) == (source, target, way)
    return cost.evict_seconds, cost.load_seconds, cost.swaps


@pytest.mark.parametrize(
    ("engine", "way", "load_seconds"),
    [
        ("vllm", "stop", 60.0),
        ("sglang", "stop", 60.0),
        ("llamacpp", "stop", 10.0),
        ("openai", "stop", OTHER_FIRST_LOAD_SECONDS),
        ("vllm", "sleep", 2.0),
        ("sglang", "sleep", 4.0),
        ("llamacpp", "sleep", 5.0),
        ("ollama", "sleep", 5.0),
        ("vllm", "sleep-2", 10.0),
        ("sglang", "sleep-2", 10.0),
        ("vllm", "checkpoint", 5.0),
        ("llamacpp", "checkpoint", 5.0),
        ("openai", "freeze", 0.5),
        ("vllm", "no such way", OTHER_FIRST_LOAD_SECONDS),
    ],
)
def test_the_first_estimate_comes_from_the_engine_and_the_way_of_loading(engine, way, load_seconds):
    costs = Costs()
    assert estimated(costs, "a", "b", way, engine) == (FIRST_EVICT_SECONDS, load_seconds, 0)
    assert estimated(costs, "", "b", way, engine) == (0.0, load_seconds, 0)


def test_first_loads_are_those_of_known_engines_and_ways():
    assert {engine for engine, _ in FIRST_LOAD_SECONDS} <= set(config.ENGINES)
    assert {way for _, way in FIRST_LOAD_SECONDS} <= set(config.WAYS)
    assert {*FIRST_RETURN_SECONDS, "stop"} == set(config.WAYS)


@pytest.mark.parametrize("engine", config.ENGINES)
def test_no_way_to_rest_is_believed_to_take_longer_to_return_from_than_a_cold_start(engine):
    (_, cold, _) = estimated(Costs(), "", "a", "stop", engine)
    for way in config.WAYS:
        assert estimated(Costs(), "", "a", way, engine)[1] <= cold


def test_what_a_return_took_by_one_way_says_nothing_of_a_first_one_by_another():
    costs = Costs()
    costs.learn("b", "a", "stop", 1.0, 90.0)
    assert estimated(costs, "b", "a", "checkpoint", "vllm") == (1.0, FIRST_RETURN_SECONDS["checkpoint"], 0)
    costs.learn("b", "a", "checkpoint", 3.0, 7.0)
    assert estimated(costs, "b", "a", "checkpoint", "vllm") == (3.0, 7.0, 1)


def test_the_first_swap_counts_in_full_and_later_ones_by_their_weight():
    costs = Costs()
    costs.learn("a", "b", "stop", 2.0, 40.0)
    assert estimated(costs, "a", "b", engine="vllm") == (2.0, 40.0, 1)
    costs.learn("a", "b", "stop", 4.0, 20.0)
    assert estimated(costs, "a", "b") == pytest.approx((2.0 + ALPHA * 2.0, 40.0 - ALPHA * 20.0, 2))
    for _ in range(30):
        costs.learn("a", "b", "stop", 4.0, 20.0)
    assert estimated(costs, "a", "b") == pytest.approx((4.0, 20.0, 32), abs=0.01)


def test_each_direction_and_each_way_is_learned_by_itself():
    costs = Costs()
    costs.learn("a", "b", "stop", 1.0, 9.0)
    costs.learn("b", "a", "stop", 2.0, 3.0)
    costs.learn("a", "b", "sleep", 0.25, 0.5)
    assert estimated(costs, "a", "b") == (1.0, 9.0, 1)
    assert estimated(costs, "b", "a") == (2.0, 3.0, 1)
    assert estimated(costs, "a", "b", "sleep") == (0.25, 0.5, 1)


def test_a_new_direction_is_estimated_from_the_models_other_loads_and_the_victims_other_evictions():
    costs = Costs()
    costs.learn("a", "b", "stop", 3.0, 50.0)
    assert estimated(costs, "c", "b", engine="vllm") == (FIRST_EVICT_SECONDS, 50.0, 0)
    assert estimated(costs, "", "b", engine="vllm") == (0.0, 50.0, 0)
    assert estimated(costs, "a", "c", engine="vllm") == (3.0, 60.0, 0)
    assert estimated(costs, "a", "b", "sleep", "vllm") == (3.0, FIRST_RETURN_SECONDS["sleep"], 0)


def test_a_model_never_loaded_is_believed_to_load_like_others_with_its_engine():
    costs = Costs()
    for target, seconds in (("a", 20.0), ("b", 90.0), ("c", 30.0)):
        costs.learn("", target, "stop", 0.0, seconds, engine="vllm")
    costs.learn("", "a", "sleep", 0.0, 3.0, "h", engine="vllm")
    assert estimated(costs, "a", "new", engine="vllm") == (FIRST_EVICT_SECONDS, 30.0, 0)
    assert costs.estimate("", "new", "stop", "vllm", "elsewhere").seconds == 30.0
    assert estimated(costs, "", "new", "sleep", "vllm") == (0.0, 3.0, 0)
    assert estimated(costs, "", "new", engine="sglang") == (0.0, 60.0, 0)
    assert estimated(costs, "", "new", "sleep-2", "vllm") == (0.0, FIRST_RETURN_SECONDS["sleep-2"], 0)
    assert not costs.knows("new", "stop")
    costs.learn("", "a", "stop", 0.0, 40.0, "h", engine="vllm")
    assert estimated(Costs(costs), "", "new", engine="vllm") == (0.0, 40.0, 0)  # the last of each model
    costs.keep({"b"}.__contains__)
    assert estimated(costs, "", "new", engine="vllm") == (0.0, 90.0, 0)
    costs.keep({"d"}.__contains__)
    assert estimated(costs, "", "new", engine="vllm") == (0.0, 60.0, 0)


def test_a_load_into_free_room_teaches_nothing_of_evictions():
    costs = Costs()
    costs.learn("", "b", "stop", 0.0, 8.0)
    assert estimated(costs, "", "b") == (0.0, 8.0, 1)
    assert estimated(costs, "a", "b") == (FIRST_EVICT_SECONDS, 8.0, 0)


def test_what_is_known_is_known_again_after_a_restart():
    costs = Costs()
    costs.learn("a+b", "c", "stop", 3.0, 50.0)
    costs.learn("c", "a", "stop", 1.0, 4.0)
    again = Costs(costs)
    assert list(again) == list(costs)
    assert estimated(again, "a+b", "c") == (3.0, 50.0, 1)
    assert estimated(again, "", "a") == (0.0, 4.0, 0)
    again.learn("c", "a", "stop", 1.0, 4.0)
    assert estimated(again, "c", "a")[2] == 2
    assert estimated(costs, "c", "a")[2] == 1


@pytest.mark.parametrize(("models", "name"), [([], ""), (["a"], "a"), (["c", "a", "b"], "a+b+c")])
def test_a_set_of_victims_has_one_name_in_whatever_order(models, name):
    assert source_of(models) == source_of(reversed(models)) == name


def test_what_was_learned_of_models_that_are_gone_is_forgotten_and_nothing_else():
    costs = Costs()
    kept, gone = [("", "a"), ("b", "a"), ("a+b", "c")], [("gone", "a"), ("a+gone", "c"), ("a", "gone")]
    for source, target in kept + gone:
        costs.learn(source, target, "stop", 2.0, 3.0)
    costs.keep({"a", "b", "c"}.__contains__)
    assert [(each.source, each.target) for each in costs] == kept
    assert costs.estimate("gone", "a", "stop", "vllm") == replace(
        Costs().estimate("gone", "a", "stop", "vllm"), load_seconds=3.0
    )
    assert not costs.knows("gone", "stop", "")


def test_what_a_backend_held_is_what_it_gave_back_and_what_it_kept():
    prints = Footprints()
    prints.learn("a", "sleep", {"0": 18, "1": 17}, {"0": 1, "1": 2}, host_bytes=16)
    assert prints.held("a") == {"0": 19, "1": 19}
    assert prints.in_standby("a", "sleep") == Footprint(
        "a", "sleep", {"0": 19, "1": 19}, {"0": 1, "1": 2}, 16, 1
    )


def test_the_last_time_counts_whichever_way_it_was():
    prints = Footprints()
    prints.learn("a", "sleep", {"0": 18}, {"0": 1})
    prints.learn("a", "stop", {"0": 21}, {})
    assert prints.held("a") == {"0": 21}
    prints.learn("a", "sleep", {"0": 22}, {"0": 1})
    assert (prints.held("a"), prints.in_standby("a", "sleep").times) == ({"0": 23}, 2)
    assert [each.way for each in prints] == ["stop", "sleep"]
    assert Footprints(prints).held("a") == {"0": 23}


def test_what_was_not_read_changes_nothing_that_is_known():
    prints = Footprints()
    prints.learn("a", "stop", {"0": 21}, {})
    prints.learn("a", "stop", {}, {"0": 0})
    assert prints.in_standby("a", "stop").times == 1
    prints.learn("a", "sleep", {}, {"0": 0}, host_bytes=16)
    assert prints.in_standby("a", "sleep") == Footprint("a", "sleep", {}, {}, 16, 1)
    assert prints.held("a") == {"0": 21}


def test_what_was_measured_before_the_service_was_described_anew_counts_no_more():
    prints = Footprints()
    prints.learn("a", "stop", {"0": 21}, {}, described="as it was")
    assert prints.held("a", "as it was") == {"0": 21}
    assert prints.held("a", "as it is") == {}
    assert prints.held("a") == {"0": 21}


def test_what_an_earlier_version_wrote_down_without_a_description_counts():
    assert Footprints([Footprint("a", "stop", {"0": 21}, {"0": 0})]).held("a", "as it is") == {"0": 21}


def test_what_was_kept_under_another_description_counts_no_more():
    prints = Footprints()
    prints.learn("a", "sleep", {}, {}, host_bytes=16, described="one")
    assert prints.in_standby("a", "sleep", "one").host_bytes == 16
    assert prints.in_standby("a", "sleep", "another") is None


def test_the_most_that_a_backend_held_is_what_counts():
    footprints = Footprints()
    footprints.learn("a", "stop", {"0": 9}, {}, described="d")
    footprints.learn("a", "stop", {"0": 4}, {}, described="d")
    footprints.learn("a", "sleep", {"0": 5}, {"0": 1}, described="d")
    assert footprints.held("a", "d") == {"0": 9}
    assert footprints.in_standby("a", "sleep", "d").residual == {"0": 1}
    footprints.learn("a", "stop", {"0": 4}, {}, described="changed")
    assert footprints.held("a", "changed") == {"0": 4}
