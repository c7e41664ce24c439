"""The contract of every policy in the registry, and the registry."""

import copy
import dataclasses
import random

import pytest

from anvil_mux.scheduler.events import POLICY
from anvil_mux.scheduler.policies import (
    FOREVER,
    POLICIES,
    CostAware,
    Debounce,
    Eager,
    Queue,
    Resident,
    Snapshot,
    Stay,
    SwapTo,
    Unload,
    build_policy,
    is_decided,
)
from tests.scheduler.test_policies import A_IS_UP, B_COMES, CLOSED, LOVED, OLD, THERE, YOUNG, replace, seen
from tests.seeds import seeds

# The contract of every policy in the registry


MANY = tuple(Queue(f"m{n}", 1 + n % 5, n / 10, n / 10 + n % 7, ("a",) if n % 3 else ()) for n in range(1000))
BUSY = replace(LOVED, leases=10**6, last_used=10.0)
ODD = {
    "nobody": seen(),
    "nobody waits": seen(residents=A_IS_UP),
    "nobody is up": seen(OLD),
    "several lines": seen(OLD, YOUNG, residents=A_IS_UP, swapping=B_COMES),
    "a known direction": seen(replace(OLD, learned=True), residents=A_IS_UP),
    "just arrived": seen(YOUNG, now=9.0),
    "far ahead": seen(OLD, YOUNG, now=1e9),
    "long ago": seen(replace(OLD, oldest=-1e9, newest=-1e9), residents=A_IS_UP),
    "a thousand": seen(*MANY, now=200.0, residents=A_IS_UP),
    "swaps cost nothing": seen(replace(OLD, load_seconds=0.0, learned=True), residents=A_IS_UP),
    "swaps cost a day": seen(replace(OLD, load_seconds=86400.0, learned=True), residents=A_IS_UP),
    "an endless line": seen(replace(OLD, waiting=10**9, growth=1e6), residents=A_IS_UP),
    "a million leases": seen(THERE, residents=(BUSY,)),
    "nothing known": seen(THERE, residents=(Resident("a", "a", -FOREVER, 0, -FOREVER),)),
    "no time at all": seen(replace(OLD, max_wait=0.0), residents=A_IS_UP),
    "who goes is not up": seen(replace(OLD, evicts=("x", "y")), residents=A_IS_UP),
    "several go": seen(
        replace(OLD, evicts=("a", "c")), residents=(LOVED, replace(CLOSED, model="c", backend="c"))
    ),
    "a replica goes": seen(OLD, residents=(LOVED, replace(CLOSED, backend="a2"))),
    "asked for in the future": seen(OLD, residents=(replace(CLOSED, since=99.0, last_used=99.0),)),
}


def drawn(seed):
    """A snapshot as no GPU group may ever show it."""
    draw = random.Random(seed)
    now = draw.choice((0.0, 10.0, 1234.5, 1e7))
    rates = (0.0, 0.0, 1e-9, 0.05, 1.0, 300.0)
    times = (0.0, 0.001, 0.5, 4.0, 90.0, 5000.0)

    def moment():
        return now - draw.choice((0.0, 1e-6, 0.125, 1.0, 7.0, 300.0, 1e6))

    names = [f"r{n}" for n in range(draw.randint(0, 4))]
    residents = tuple(
        Resident(
            draw.choice(names),
            f"backend {n}",
            draw.choice((moment(), moment(), -FOREVER)),
            draw.choice((0, 0, 1, 3, 200)),
            moment(),
            draw.choice(rates),
            draw.choice(rates),
            draw.choice(times),
            draw.choice(times),
            draw.choice(times),
        )
        for n in range(len(names))
    )
    lines = []
    for n in range(draw.randint(0, 5)):
        oldest, newest = sorted((moment(), moment()))
        lines.append(
            Queue(
                f"m{n}",
                draw.choice((1, 1, 2, 10, 5000)),
                oldest,
                newest,
                tuple(draw.sample(names, min(len(names), draw.randint(0, 3)))),
                draw.choice(times),
                draw.choice(times),
                draw.random() < 0.5,
                growth=draw.choice(rates),
                service_seconds=draw.choice(times),
                max_wait=draw.choice((FOREVER, 60.0, 15.0, 0.5, 0.0)),
            )
        )
    return Snapshot(now, "0", residents, tuple(lines), draw.choice(((), B_COMES)))


def honoured(name, snapshot):
    """The policy's decision, after a look at everything that is asked of it."""
    policy, kept = build_policy(name), copy.deepcopy(snapshot)
    decision = policy.decide(snapshot)
    assert snapshot == kept
    assert decision == policy.decide(snapshot) == build_policy(name).decide(kept)
    match decision:
        case Stay(until):
            assert until > snapshot.now
            assert until <= min((line.oldest + line.max_wait for line in snapshot.queues), default=FOREVER)
        case SwapTo(model):
            assert model in [line.model for line in snapshot.queues]
        case Unload(model):
            assert model in [resident.model for resident in snapshot.residents]
    assert is_decided(decision.cause)
    assert decision.cause != POLICY or decision == Stay()
    return decision


@pytest.mark.parametrize("snapshot", ODD.values(), ids=ODD)
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_answers_every_snapshot_purely_in_time_and_with_what_can_be_done(name, snapshot):
    honoured(name, snapshot)


@pytest.mark.seeds
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_honours_its_contract_whatever_it_is_shown(name):
    for seed in seeds(800, of=3000):
        try:
            honoured(name, drawn(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {drawn(seed)}") from error


@pytest.mark.seeds
@pytest.mark.parametrize("name", POLICIES)
def test_a_line_has_its_swap_in_the_end_if_the_policy_is_asked_whenever_it_wants_to_be(name):
    policy = build_policy(name)
    for seed in seeds(100, of=300):
        snapshot = drawn(seed)
        lines = tuple(replace(line, max_wait=min(line.max_wait, 60.0)) for line in snapshot.queues)
        snapshot = replace(snapshot, queues=lines)
        for _ in range(1000):
            decision = policy.decide(snapshot)
            if not isinstance(decision, Stay) or not lines:
                break
            snapshot = replace(snapshot, now=decision.until)
        else:
            pytest.fail(f"seed {seed}: it stays for ever")


def moved_on(seed, snapshot, decision):
    """What a policy may be shown before its answer runs out, with the leases that it named."""
    draw = random.Random(seed)
    now = snapshot.now + 0.99 * draw.random() * min(decision.until - snapshot.now, 1e4)
    residents = tuple(
        replace(
            resident,
            leases=decision.leases + draw.choice((0, 0, 1, 50)),
            last_used=now,
            rate=draw.choice((0.0, 300.0)),
            growth=draw.choice((0.0, 300.0)),
            pause_seconds=draw.choice((0.0, 90.0)),
            service_seconds=draw.choice((0.001, 90.0)),
        )
        for resident in snapshot.residents
    )
    return replace(snapshot, now=now, residents=residents)


@pytest.mark.seeds
@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"adaptive"}))
def test_an_answer_holds_for_the_leases_that_it_says_it_holds_for(name):
    policy = build_policy(name)
    for seed in seeds(800, of=3000):
        snapshot = drawn(seed)
        decision = policy.decide(snapshot)
        if isinstance(decision, Stay) and decision.leases < FOREVER:
            later = policy.decide(moved_on(seed, snapshot, decision))
            assert isinstance(later, Stay), f"seed {seed}"
            assert later.until >= decision.until, f"seed {seed}"


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_frozen_and_has_a_default_for_every_setting(name):
    assert POLICIES[name].__dataclass_params__.frozen
    with pytest.raises(dataclasses.FrozenInstanceError):
        build_policy(name).extra = 1


# The registry


@dataclasses.dataclass(frozen=True)
class Mine:
    patience: float = 3.0

    def decide(self, snapshot):
        return Stay(snapshot.now + self.patience)


def test_a_policy_is_built_by_name_with_its_settings():
    assert build_policy("eager") == Eager()
    assert build_policy("debounce", {"quiet": 3}) == Debounce(quiet=3)
    assert build_policy("cost_aware", {"serving_window": False}) == CostAware(serving_window=False)


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
        ("cost_aware", {"serving_window": "off"}, "serving_window must be true or false, not 'off'"),
        ("cost_aware", {"serving_window": 0}, "serving_window must be true or false, not 0"),
        ("debounce", {"quiet": 10**400}, "quiet must be a number of at least 0 and at most 31536000, a year"),
        ("debounce", {"quiet": 1e15}, "quiet must be a number of at least 0 and at most 31536000, a year"),
        ("cost_aware", {"cap": True}, "cap must be a number of at least 0"),
        ("anvil_mux.lab.engines:Engines", {}, "has no method `decide`"),
        ("anvil_mux.scheduler.policies:Policy", {}, "is not a dataclass"),
    ],
)
def test_a_bad_policy_is_an_error_that_says_what_is_known(name, settings, message):
    with pytest.raises(ValueError, match=message):
        build_policy(name, settings)
