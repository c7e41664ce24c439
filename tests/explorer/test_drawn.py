"""Nothing is wrong on many walks through drawn worlds, and what is planted is found on them."""

import pytest

from anvil_mux.scheduler import state
from tests.explorer.drawn import draw, main, replayed, shrunk, walk
from tests.explorer.trial import BY_GROUP

WALKS = 50
KNOWN = (
    *(455725396860, 455725397522, 455725398620, 455725400316, 455725401011),
    *(777000113, 777000554, 777001692, 777002265, 885203417216, 231761785204, 231761783918),
    *(422198017192, 422198019546, 422198017387, 101367459706),
    *(231761786468, 78573739948, 78573740947, 101367460512, 5158, 600240, 700003251, 700007032),
    *(700007044, 700010425, 800001528, 800002303, 800002850, 800004542),
    *(800008723, 900002715, 900003586, 900004068, 900007208, 900008568, 1000015081),
    *(1100022742, 1100022890, 1200004902, 1100012622),
)
"""Seeds of walks on which something was wrong once."""


BY_GROUP_ONLY = (1000003435, 1000004517)
"""Seeds of walks that differ in what belongs to the GPU group in which a queue stands."""


@pytest.mark.parametrize("first", range(0, 8 * WALKS, WALKS))
def test_nothing_is_wrong_on_a_walk(first):
    assert {seed: wrong for seed in range(first, first + WALKS) if (wrong := walk(seed)[1])} == {}


@pytest.mark.parametrize("seed", KNOWN)
def test_nothing_is_wrong_on_a_known_walk(seed):
    assert walk(seed)[1] == []


@pytest.mark.parametrize("seed", BY_GROUP_ONLY)
def test_difference_by_group_is_told_from_others(seed):
    assert [each.invariant for each in walk(seed)[1]] == [BY_GROUP]


def test_a_seed_is_always_the_same_world_and_the_same_walk():
    (one, policy), (other, same) = draw(7), draw(7)
    assert (one.config, one.begins, one.may, policy) == (other.config, other.begins, other.may, same)
    assert walk(7) == walk(7)


def test_what_is_planted_is_found_and_shrunk_and_printed(monkeypatch, capsys):
    """Queues go where somebody must make room, although GPUs are free."""
    rank = state.place_rank
    monkeypatch.setattr(
        state, "place_rank", lambda *place: rank(*place)._replace(evicts=not rank(*place).evicts)
    )
    seed, facts, wrong = next((seed, *walk(seed)) for seed in range(200) if walk(seed)[1])
    fewer = shrunk(seed, facts, wrong[0].invariant)
    assert len(fewer) < len(facts)
    assert replayed(seed, fewer)[0].invariant == wrong[0].invariant
    assert main(["--minutes", "0.01", "--seed", str(seed)]) == 1
    assert f"seed {seed}" in capsys.readouterr().out


def test_forgotten_moment_is_found_by_asking_early(monkeypatch):
    monkeypatch.setattr(state.GroupState, "reached", lambda _, moment, now: moment <= now)
    found = (wrong for seed in range(100) for wrong in walk(seed)[1])
    assert "15" in (each.invariant for each in found)


def test_facts_that_cannot_come_are_no_history():
    assert replayed(0, [("evicted", "nobody")]) == []
