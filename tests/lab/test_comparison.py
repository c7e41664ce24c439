"""A measured run beside its simulation, and where the difference comes from."""

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import ConfigError
from anvil_mux.lab.engines import EnginePace, SeenEngines, SwapTimes
from anvil_mux.lab.player import PlayedAnswer, of_workload
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.lab.watching import Comparison, ToldLog, compare, served_names
from anvil_mux.lab.workload import ModelNames, Workload
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.slot import Load

CONFIG = Config(
    (Backend("a-1", "a", ("0",), aliases=("first",)), Backend("b-1", "b", ("0",))), policy="eager"
)
WORKLOAD = Workload(
    "w", {"a": 1.0, "b": 1.0}, (Arrival(0.0, "b", 1.0), Arrival(0.5, "a", 2.0)), resident=("a",)
)
SCRIPT = of_workload(WORKLOAD.renamed(ModelNames({"a": "first"})), {"first": 10.0, "b": 10.0})
PACES = {"first": EnginePace(0.1, 10.0), "b": EnginePace(0.1, 10.0)}
BEGINS = {
    "backends": {"a-1": {"model": "a", "state": "ready"}},
    "at": 0.0,
    "queues": {},
    "begun": [],
    "pins": {},
}
EXPECTED = SwapTimes({"a-1": [0.5, 1.5], "b-1": [3.0]}, {"a-1": [0.5], "b-1": [0.25]})


def really(loads: SwapTimes, slower: float) -> list[Event]:
    """The log of a server that loads so, and answers so many times as slowly."""
    requests = [Arrival(0.0, "b", 1.0 * slower), Arrival(0.5, "a", 2.0 * slower)]
    engines = SeenEngines(loads, in_order=slower != 1.0)
    return simulate(CONFIG, requests, engines, resident=["a-1"], costs=engines.means.costs(CONFIG))


def answer(number: int, model: str, tokens: int) -> PlayedAnswer:
    return PlayedAnswer(
        number, model, "", 0.0, 0.0, 1.0, 2.0, status=200, code="", id=str(number), tokens=tokens
    )


def comparison(seen: SwapTimes, slower: float) -> Comparison:
    told = ToldLog(
        events=really(seen, slower),
        begins=BEGINS,
        waits={},
        served={"0": 1.0 * slower, "1": 2.0 * slower},
        missed=0,
    )
    answers = [answer(0, "b", 10), answer(1, "first", 20)]
    return compare(SCRIPT, CONFIG, paces=PACES, expected=EXPECTED, seen=seen, told=told, answers=answers)


def test_the_simulation_of_what_really_happened_is_what_really_happened():
    found = comparison(SwapTimes({"a-1": [1.0], "b-1": [3.0]}, EXPECTED.evictions), 1.0)
    waits = [0.5 + 3.0, 0.5 + 3.0 + 1.0 + 0.25 + 1.0 - 0.5]
    assert found.simulated.figures.wait_mean_seconds == pytest.approx(sum(waits) / 2)
    assert found.difference == pytest.approx(0.0)
    assert found.measured.wait_mean_seconds == pytest.approx(found.with_swaps.wait_mean_seconds)


def test_slow_answers_and_slow_loads_are_told_apart():
    seen = SwapTimes({"a-1": [1.0], "b-1": [5.0]}, {"a-1": [0.5], "b-1": [0.75]})
    found = comparison(seen, 2.0)
    before, answers, swaps, measured = found.waits
    assert answers - before == pytest.approx(1.0 / 2)  # the second waits for an answer of 2 s, not 1 s
    assert swaps - answers == pytest.approx((2.0 + 2.5) / 2)  # both for the load, one for the eviction
    assert measured == pytest.approx(swaps)
    assert found.answer_seconds == (pytest.approx(1.5), pytest.approx(3.0))
    assert found.load_seconds == (pytest.approx(2.0), 3.0)  # one of each
    assert found.to_json() == {
        "ratio": pytest.approx(measured / before - 1),
        "of_answers_seconds": pytest.approx(0.5),
        "of_swaps_seconds": pytest.approx(2.25),
        "of_others_seconds": pytest.approx(0.0),
        "answer_seconds": {"expected": pytest.approx(1.5), "seen": pytest.approx(3.0)},
        "load_seconds": {"expected": pytest.approx(2.0), "seen": 3.0},
        "evict_seconds": {"expected": pytest.approx(0.375), "seen": pytest.approx(0.625)},
    }
    text = " ".join(found.sentences())
    assert "an answer took 3.000 s, and 1.500 s by its pace in the warm-up" in text
    assert "+0.50 s" in text
    assert "+2.25 s" in text


def test_each_load_takes_what_it_took():
    engines = SeenEngines(SwapTimes({"b-1": [5.0, 1.0]}, {"a-1": [0.5]}), in_order=True)
    load = Load("b-1", "stop")
    assert [engines(load, nth).seconds for nth in range(3)] == [5.0, 1.0, 3.0]


def test_a_compose_file_without_the_models_is_refused():
    with pytest.raises(ConfigError, match="serves first, a, b, and not c"):
        served_names(CONFIG, ["a", "c"])
