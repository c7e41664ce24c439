"""Who goes: literal candidates and missing bytes in, victims out."""

import itertools
import random

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.memory import (
    Candidate,
    LeastDemand,
    LeastLoss,
    LeastRecentlyUsed,
    build_eviction,
    victims,
)

LRU = LeastRecentlyUsed()


def on(name, holds, *, leases=0, last_used=0.0, priority=0, loss=0.0, waiting=0.0):
    return Candidate(name, holds, leases, last_used, priority, loss, waiting)


OLD = on("old", {"0": 4}, last_used=1.0)
NEW = on("new", {"0": 4}, last_used=9.0)
BUSY = on("busy", {"0": 4}, leases=2, last_used=0.0)
LARGE = on("large", {"0": 9}, last_used=20.0)
PAIR = on("pair", {"0": 4, "1": 4}, last_used=5.0)
LOW = on("low", {"0": 4}, leases=9, last_used=30.0, priority=-1)
HIGH = on("high", {"0": 4}, last_used=-50.0, priority=1)


@pytest.mark.parametrize(
    ("candidates", "missing", "expected"),
    [
        ([], {}, ()),
        ([OLD], {"0": 0}, ()),
        ([OLD], {"0": -3}, ()),
        ([], {"0": 1}, None),
        ([NEW, OLD], {"0": 4}, ("old",)),
        ([NEW, OLD], {"0": 5}, ("old", "new")),
        ([NEW, OLD], {"0": 9}, None),
        ([BUSY, NEW], {"0": 4}, ("new",)),
        ([BUSY, NEW], {"0": 8}, ("new", "busy")),
        ([OLD, LARGE], {"0": 9}, ("large",)),  # the old one's going would not help
        ([OLD], {"1": 1}, None),
        ([OLD, PAIR], {"0": 4, "1": 4}, ("pair",)),
        ([OLD, PAIR], {"0": 4, "1": -1}, ("old",)),
        ([OLD, PAIR], {"0": 8, "1": 2}, ("old", "pair")),
        ([OLD, LOW, HIGH], {"0": 4}, ("low",)),
        ([OLD, BUSY, HIGH], {"0": 8}, ("old", "busy")),
        ([OLD, LOW, HIGH], {"0": 12}, ("low", "old", "high")),
        (
            [LOW, LARGE],
            {"0": 9},
            ("large",),
        ),  # a low priority does not make a victim of whom it would not help
    ],
)
def test_the_least_recently_used_go_and_nobody_in_vain(candidates, missing, expected):
    assert victims(LRU, candidates, missing) == expected


CHEAP = on("cheap", {"0": 4}, last_used=9.0, loss=0.5)
DEAR = on("dear", {"0": 4}, last_used=1.0, loss=7.0)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([DEAR, CHEAP], ["cheap", "dear"]),
        ([DEAR, BUSY], ["dear", "busy"]),
        ([NEW, OLD], ["old", "new"]),
        ([DEAR, LOW, HIGH], ["low", "dear", "high"]),
    ],
)
def test_those_go_first_whose_going_costs_least(candidates, expected):
    assert [one.backend for one in sorted(candidates, key=LeastLoss().order)] == expected


FEW = on("few", {"0": 4}, leases=1, last_used=50.0)
FULL = on("full", {"0": 4}, leases=1, last_used=-9.0, waiting=5.0)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([BUSY, FEW], ["few", "busy"]),
        ([FEW, NEW, OLD], ["old", "new", "few"]),
        ([FULL, BUSY, FEW], ["few", "busy", "full"]),
        ([OLD, LOW, HIGH], ["low", "old", "high"]),
    ],
)
def test_those_go_first_with_the_fewest_requests_as_the_paper_has_it(candidates, expected):
    assert [one.backend for one in sorted(candidates, key=LeastDemand().order)] == expected


@pytest.mark.parametrize(("eviction", "gone"), [("cost", "seldom"), ("lru", "often")])
def test_a_model_that_is_often_asked_for_stays_though_another_was_used_later(eviction, gone):
    backends = tuple(Backend(name, name, ("0",), vram=4) for name in ("often", "seldom", "other"))
    config = Config(backends, gpus=(Gpu("0", vram=10),), policy="eager", eviction=eviction)
    asked = [Arrival(float(n), "often", 0.5) for n in range(20, 40)]
    trace = [*asked, Arrival(41.0, "seldom", 0.5), Arrival(45.0, "other", 0.5)]
    log = simulate(config, trace, Engines(other_load_seconds=2.0), resident=["often", "seldom"])
    assert [event.model for event in log if event.kind == "draining"] == [gone]


@pytest.mark.parametrize(("eviction", "gone"), [("demand_lru", "idle"), ("lru", "full")])
def test_requests_that_wait_for_a_place_count_as_those_of_their_model(eviction, gone):
    full = Backend("full", "full", ("0",), vram=4, concurrency=1, drain_timeout=99.0)
    idle = Backend("idle", "idle", ("0",), vram=4, concurrency=2, drain_timeout=99.0)
    config = Config(
        (full, idle, Backend("other", "other", ("0",), vram=4)),
        gpus=(Gpu("0", vram=10),),
        policy="eager",
        eviction=eviction,
    )
    # Either has one request at work, and before full, which was asked first, two more wait for a place.
    trace = [Arrival(10.0, "full", 50.0), Arrival(11.0, "full", 5.0), Arrival(12.0, "full", 5.0)]
    trace += [Arrival(20.0, "idle", 50.0), Arrival(30.0, "other", 0.5)]
    log = simulate(config, trace, Engines(other_load_seconds=2.0), resident=["full", "idle"])
    assert [event.model for event in log if event.kind == "draining"][:1] == [gone]


def test_the_order_in_which_candidates_are_listed_does_not_matter():
    for listed in itertools.permutations([OLD, NEW, BUSY, PAIR, HIGH]):
        assert victims(LRU, listed, {"0": 6}) == ("old", "pair")


def test_it_finds_victims_whenever_there_are_any_and_none_is_superfluous():
    for seed in range(300):
        draw = random.Random(seed)
        candidates = [
            on(
                str(n),
                {gpu: draw.randint(1, 6) for gpu in draw.sample("012", draw.randint(1, 3))},
                last_used=n,
                priority=draw.choice((0, 0, 1)),
            )
            for n in range(draw.randint(0, 5))
        ]
        missing = {gpu: draw.randint(-2, 9) for gpu in "012"}

        def enough(names, missing=missing, candidates=candidates):
            gone = [candidate for candidate in candidates if candidate.backend in names]
            return all(
                sum(c.holds.get(gpu, 0) for c in gone) >= need for gpu, need in missing.items() if need > 0
            )

        chosen = victims(LRU, candidates, missing)
        if chosen is None:
            assert not enough([candidate.backend for candidate in candidates])
        else:
            assert enough(chosen)
            assert not any(enough([name for name in chosen if name != spared]) for spared in chosen)


def test_a_eviction_is_built_by_name():
    assert build_eviction("lru") == LRU
    assert build_eviction("cost") == LeastLoss()
    with pytest.raises(ValueError, match="unknown eviction 'dice'; known: cost, lru, demand_lru"):
        build_eviction("dice")
