"""Who goes: literal candidates and missing bytes in, victims out."""

import itertools
import random

import pytest

from anvil_mux.preemption import Candidate, LeastRecentlyUsed, build_preemption, victims

LRU = LeastRecentlyUsed()


def on(name, holds, *, leases=0, last_used=0.0, priority=0):
    return Candidate(name, holds, leases, last_used, priority)


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


def test_a_preemption_is_built_by_name():
    assert build_preemption("lru") == LRU
    with pytest.raises(ValueError, match="unknown preemption 'dice'; known: lru"):
        build_preemption("dice")
