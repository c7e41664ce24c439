"""Literal snapshots in, decisions out; and what any registered policy must honour."""

import dataclasses

import pytest

from anvil_mux.policy import (
    FOREVER,
    POLICIES,
    Debounce,
    Eager,
    Line,
    Resident,
    Snapshot,
    Stay,
    SwapTo,
    Unload,
    build_policy,
)


def seen(*lines, now=10.0, residents=(), swapping=()):
    return Snapshot(now, "0", residents, lines, swapping)


A_IS_UP = (Resident("a", "a", since=1.0, leases=0, last_used=8.0),)
OLD = Line("b", count=2, oldest=3.0, newest=9.5, evicts=("a",), load_seconds=12.0)
YOUNG = Line("c", count=1, oldest=9.0, newest=9.0, evicts=("a",))


@pytest.mark.parametrize(
    ("snapshot", "decision"),
    [
        (seen(), Stay()),
        (seen(OLD), SwapTo("b", "2 waiting, oldest first")),
        (seen(OLD, YOUNG, residents=A_IS_UP), SwapTo("b", "2 waiting, oldest first")),
        (seen(YOUNG, swapping=("b",)), SwapTo("c", "1 waiting, oldest first")),
    ],
)
def test_eager_swaps_at_once_to_the_line_that_waits_longest(snapshot, decision):
    assert Eager().decide(snapshot) == decision


NOT_QUIET = "no line has been quiet for 2 s yet"


@pytest.mark.parametrize(
    ("snapshot", "decision"),
    [
        (seen(), Stay()),
        (seen(OLD), Stay(11.5, NOT_QUIET)),
        (seen(OLD, now=11.5), SwapTo("b", "2 waiting, line quiet")),
        (seen(OLD, YOUNG), Stay(11.0, NOT_QUIET)),
        (seen(OLD, YOUNG, now=11.0), SwapTo("c", "1 waiting, line quiet")),
        (seen(OLD, YOUNG, now=12.0), SwapTo("b", "2 waiting, line quiet")),
        (
            seen(dataclasses.replace(OLD, newest=22.5), now=23.0),
            SwapTo("b", "2 waiting, held for the longest time allowed"),
        ),
        (seen(dataclasses.replace(OLD, newest=22.5), now=22.5), Stay(23.0, NOT_QUIET)),
        (seen(dataclasses.replace(YOUNG, newest=10.0, evicts=())), SwapTo("c", "1 waiting, room is free")),
        (seen(OLD, dataclasses.replace(YOUNG, evicts=())), SwapTo("c", "1 waiting, room is free")),
    ],
)
def test_debounce_holds_a_swap_until_its_line_is_quiet_or_held_long_enough(snapshot, decision):
    assert Debounce(quiet=2.0, max_hold=20.0).decide(snapshot) == decision


# The contract of every policy in the registry

MANY = tuple(Line(f"m{n}", 1 + n % 5, n / 10, n / 10 + n % 7, ("a",) if n % 3 else ()) for n in range(1000))
SNAPSHOTS = [
    seen(),
    seen(residents=A_IS_UP),
    seen(OLD),
    seen(OLD, YOUNG, residents=A_IS_UP, swapping=("d",)),
    seen(dataclasses.replace(OLD, learned=True), residents=A_IS_UP),
    seen(YOUNG, now=9.0),
    seen(OLD, YOUNG, now=1e9),
    seen(*MANY, now=200.0, residents=A_IS_UP),
]


@pytest.mark.parametrize("snapshot", SNAPSHOTS)
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_answers_every_snapshot_purely_and_with_what_can_be_done(name, snapshot):
    policy = build_policy(name)
    decision = policy.decide(snapshot)
    assert decision == policy.decide(snapshot) == build_policy(name).decide(snapshot)
    match decision:
        case Stay(until):
            assert until > snapshot.now
        case SwapTo(model):
            assert model in [line.model for line in snapshot.lines]
        case Unload(model):
            assert model in [resident.model for resident in snapshot.residents]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_does_what_it_stayed_for_at_the_moment_that_it_named(name):
    policy, snapshot = build_policy(name), seen(OLD, YOUNG, residents=A_IS_UP)
    for _ in range(5):
        decision = policy.decide(snapshot)
        if not isinstance(decision, Stay):
            return
        assert decision.until < FOREVER, "somebody waits"
        snapshot = dataclasses.replace(snapshot, now=decision.until)
    pytest.fail("it stays for ever")


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_frozen(name):
    assert POLICIES[name].__dataclass_params__.frozen


# The registry


@dataclasses.dataclass(frozen=True)
class Mine:
    patience: float = 3.0

    def decide(self, snapshot):
        return Stay(snapshot.now + self.patience)


def test_a_policy_is_built_by_name_with_its_settings():
    assert build_policy("eager") == Eager()
    assert build_policy("debounce", {"quiet": 3}) == Debounce(quiet=3)


def test_a_policy_of_ones_own_is_named_by_module_and_class():
    assert build_policy(f"{__name__}:Mine", {"patience": 1.5}).decide(seen()) == Stay(11.5)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("quick", {}, "unknown policy 'quick'; known: eager, debounce"),
        ("nowhere.at.all:Mine", {}, "cannot be imported"),
        (f"{__name__}:Nothing", {}, "cannot be imported"),
        ("debounce", {"quite": 1.0}, "unknown setting 'quite'; known: quiet, max_hold"),
        ("debounce", {"quiet": -1.0}, "quiet must be a number of at least 0"),
        ("debounce", {"quiet": "2s"}, "quiet must be a number of at least 0"),
        ("debounce", {"quiet": True}, "quiet must be a number of at least 0"),
        ("debounce", {"quiet": FOREVER}, "quiet must be a number of at least 0"),
        ("anvil_mux.policy:Stay", {}, "has no method `decide`"),
        ("anvil_mux.policy:Policy", {}, "is not a dataclass"),
    ],
)
def test_a_bad_policy_is_an_error_that_says_what_is_known(name, settings, message):
    with pytest.raises(ValueError, match=message):
        build_policy(name, settings)
