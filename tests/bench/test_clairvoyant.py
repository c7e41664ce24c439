"""The yardstick is exact: its plans come true in the real GPU group, and nothing does better."""

import random
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import inf

import pytest

from anvil_mux.lab.checker import check
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.lab.workload import Workload
from anvil_mux.scheduler.policies import POLICIES, Stay, SwapTo, Unload
from tests.bench.clairvoyant import (
    MOST_REQUESTS,
    Move,
    best,
    following,
    instance,
    ratios,
    total_wait,
)
from tests.seeds import seeds


def run(made, config):
    return simulate(config, made.requests, made.engines(config), resident=made.residents(config))


def under(made, policy, **settings):
    """The total wait under a policy."""
    config = replace(made.config(), policy=policy, policy_settings=settings, queue_timeout=inf)
    return total_wait(run(made, config))


def small(*requests, resident=("a",), **loads):
    return Workload("small", loads, requests, resident=resident, stop_seconds=1.0)


# What a plan is


def test_a_plan_waits_for_a_request_that_the_resident_can_still_serve():
    made = small(Arrival(0.25, "b", 1.0), Arrival(0.75, "a", 1.0), a=8.0, b=2.0)
    plan = best(made)
    assert plan.total_wait == (1.75 - 0.25) + 1.0 + 2.0
    (swap,) = plan.moves
    assert swap.model == "b"
    assert 0.75 < swap.at < 1.75


def test_a_plan_ahead_of_time_puts_out_what_is_not_needed_any_more_before_anybody_waits():
    made = small(Arrival(1.0, "a", 2.0), Arrival(10.0, "b", 1.0), a=8.0, b=4.0)
    assert best(made, ahead=True).total_wait == 4.0
    assert [(move.model, move.unload) for move in best(made, ahead=True).moves] == [("a", True), ("b", False)]
    assert best(made).total_wait == 1.0 + 4.0
    assert best(made).moves == (Move(10.0, "b"),)


def test_a_plan_begins_on_an_empty_gpu_where_nothing_is_resident():
    made = small(Arrival(1.0, "a", 2.0), Arrival(1.5, "b", 1.0), a=8.0, b=4.0, resident=())
    assert best(made).total_wait == 4.0 + (5.5 + 1.0 + 1.0 + 8.0 - 1.0)
    assert under(made, "eager") == 8.0 + (9.0 + 2.0 + 1.0 + 4.0 - 1.5)
    assert total_wait(run(made, following(made.config(), best(made)))) == best(made).total_wait


def test_nobody_waits_when_all_ask_for_the_resident():
    made = small(Arrival(1.0, "a", 2.0), Arrival(1.0, "a", 2.0), a=8.0, b=4.0)
    assert best(made).total_wait == 0.0
    assert best(made).moves == ()


# It is performed


@pytest.mark.seeds
@pytest.mark.parametrize("ahead", [True, False])
def test_every_plan_comes_true_exactly(ahead):
    for seed in seeds(100, of=300):
        made = instance(seed)
        plan = best(made, ahead=ahead)
        config = following(made.config(), plan)
        log = run(made, config)
        assert total_wait(log) == plan.total_wait, seed
        assert check(log, config) == [], seed
        assert ahead or not any(event.kind == "draining" and not event.target for event in log), seed


@pytest.mark.seeds
def test_plans_of_all_kinds_are_among_them():
    plans = [best(instance(seed), ahead=True) for seed in seeds(100, of=300)]
    assert {len(plan.moves) for plan in plans} >= {1, 2, 3, 4, 5, 6}
    assert any(move.unload for plan in plans for move in plan.moves)
    assert any(best(instance(seed)) != plan for seed, plan in enumerate(plans))


# Nothing does better


@pytest.mark.seeds
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_does_better(policy):
    worlds = map(instance, seeds(60, of=200))
    totals = [(under(made, policy), best(made).total_wait) for made in worlds]
    assert all(total >= least for total, least in totals)
    assert any(total > least for total, least in totals)


@dataclass(frozen=True)
class Whim:
    """Decides by lot, the same for the same moment and seed."""

    seed: str = ""

    def decide(self, seen):
        draw = random.Random(f"{self.seed} {seen.now}")
        waiting = [SwapTo(line.model) for line in seen.queues]
        resident = [Unload(resident.model) for resident in seen.residents]
        later = Stay(seen.now + draw.choice((0.25, 1.0, 4.0, 16.0)))
        return draw.choice([later, *waiting, *waiting, *resident[: draw.random() < 0.2]])


@pytest.mark.seeds
def test_no_whim_does_better():
    found = []
    for seed in seeds(40, of=100):
        made = instance(seed)
        least = best(made, ahead=True).total_wait
        found += [under(made, f"{__name__}:Whim", seed=f"{seed} {nth}") / least for nth in range(5)]
    assert min(found) == 1.0


def perturbed(draw, plan, models):
    """A plan with one to three changes: moved, turned to another model, dropped or put in."""
    moves = list(plan.moves)
    for _ in range(draw.randint(1, 3)):
        change, nth = draw.choice(("move", "nudge", "turn", "drop", "add")), draw.randrange(len(moves))
        at = draw.choice(moves).at
        if change == "move":
            moves[nth] = moves[nth]._replace(at=max(0.0, at + draw.uniform(-10.0, 10.0)), waiting=0)
        elif change == "nudge":
            moves[nth] = moves[nth]._replace(at=max(0.0, at + draw.choice((-1, 1)) * 2.0**-11))
        elif change == "turn":
            moves[nth] = moves[nth]._replace(model=draw.choice(models), unload=draw.random() < 0.3)
        elif change == "drop" and len(moves) > 1:
            del moves[nth]
        else:
            moves.append(
                Move(max(0.0, at + draw.uniform(-10.0, 10.0)), draw.choice(models), draw.random() < 0.3)
            )
    return tuple(sorted(moves))


@pytest.mark.seeds
def test_no_perturbed_plan_does_better():
    """What a perturbed plan leaves in line, ``max_wait`` serves."""
    same = worse = 0
    for seed in seeds(50, of=200):
        made, draw = instance(seed), random.Random(seed)
        plan = best(made, ahead=True)
        config = replace(following(made.config(), plan), max_wait=60.0)
        for _ in range(10):
            moves = perturbed(draw, plan, [*made.load_seconds])
            total = total_wait(run(made, replace(config, policy_settings={"plan": moves})))
            assert total >= plan.total_wait, (seed, moves)
            same += total == plan.total_wait
            worse += total > plan.total_wait
    assert same > (same + worse) / 40
    assert worse > (same + worse) / 4


# All there is


@dataclass(frozen=True)
class Script:
    """Takes the n-th of its options when it is asked for the n-th time, and notes how many there were."""

    choices: tuple = ()
    asked: list = field(default_factory=list)
    moments: tuple = ()
    unloads: bool = True

    def decide(self, seen):
        options = [Stay(min((moment for moment in self.moments if moment > seen.now), default=inf))]
        options += [SwapTo(line.model) for line in seen.queues]
        options += [Unload(resident.model) for resident in seen.residents if self.unloads]
        nth = len(self.asked)
        self.asked.append(len(options))
        return options[self.choices[nth] if nth < len(self.choices) else 0]


def least_of_all(made, ahead):
    """The least total wait over every sequence of decisions, asked anew just after each arrival."""
    moments = tuple(sorted({request.at + 2.0**-20 for request in made.requests}))
    config = replace(made.config(), policy=f"{__name__}:Script", max_wait=inf, queue_timeout=10000.0)
    choices, least = (), inf
    while choices is not None:
        asked = []
        settings = {"choices": choices, "asked": asked, "moments": moments, "unloads": ahead}
        log = run(made, replace(config, policy_settings=settings))
        if sum(event.kind == "leased" for event in log) == len(made.requests):
            least = min(least, total_wait(log))
        choices = following_choices(choices, asked)
    return least


def following_choices(choices, asked):
    """The next sequence in the order of a dictionary; None after the last."""
    taken = [*choices, *[0] * (len(asked) - len(choices))]
    for nth in reversed(range(len(asked))):
        if taken[nth] + 1 < asked[nth]:
            return (*taken[:nth], taken[nth] + 1)
    return None


def coarse(made):
    """All in steps of 2 s, so that much of it falls on the same moment."""

    def steps(seconds):
        return 2.0 * round(seconds / 2.0 + 0.5)

    requests = [Arrival(4.0 * (r.at // 8.0), r.model, steps(r.seconds)) for r in made.requests]
    loads = {model: steps(seconds) for model, seconds in made.load_seconds.items()}
    return replace(made, requests=tuple(requests), load_seconds=loads, stop_seconds=2.0)


def shuffled(made):
    """The requests of each moment in another order."""
    mixed = random.Random(made.name).sample(made.requests, len(made.requests))
    return replace(made, requests=tuple(sorted(mixed, key=lambda request: request.at)))


def cut(made, requests):
    """The first few, and now and then an empty GPU at the start."""
    resident = () if made.name.endswith("0") else made.resident
    return replace(made, requests=made.requests[:requests], resident=resident)


@pytest.mark.seeds
@pytest.mark.parametrize("kind", [lambda made: made, coarse, lambda made: shuffled(coarse(made))])
@pytest.mark.parametrize(
    ("ahead", "requests", "worlds"), [(False, 5, seeds(5, of=12)), (True, 3, seeds(2, of=5))]
)
def test_a_best_plan_is_as_good_as_the_best_of_all_sequences_of_decisions(kind, ahead, requests, worlds):
    for seed in worlds:
        made = cut(kind(instance(seed)), requests)
        plan = best(made, ahead=ahead)
        assert plan.total_wait == least_of_all(made, ahead), seed
        assert plan.total_wait == total_wait(run(made, following(made.config(), plan))), seed


@pytest.mark.parametrize(("ahead", "before"), [(True, ()), (False, ()), (False, (Arrival(0.75, "b", 0.5),))])
def test_requests_of_one_moment_are_told_apart_where_the_policy_is_asked_between_them(ahead, before):
    """The second request for a runs for so long that it is better not served at first."""
    requests = Arrival(1.0, "a", 0.5), Arrival(1.0, "a", 20.0), Arrival(1.0, "b", 0.5)
    totals = set()
    for order in permutations(requests):
        made = small(*before, *order, a=2.0, b=4.0)
        plan = best(made, ahead=ahead)
        assert plan.total_wait == least_of_all(made, ahead), order
        assert plan.total_wait == total_wait(run(made, following(made.config(), plan))), order
        totals.add(plan.total_wait)
    assert len(totals) > 1


def test_the_gate_may_close_before_a_request_that_comes_when_the_model_is_ready():
    early, later, late = Arrival(0.0, "b", 0.5), Arrival(1.0, "a", 0.5), Arrival(5.0, "b", 20.0)
    made = small(early, early, early, later, later, late, resident=("c",), a=8.0, b=4.0, c=1.0)
    plan = best(made, ahead=False)
    assert plan.moves[:2] == (Move(0.0, "b", waiting=3), Move(5.0, "a", waiting=2))
    assert plan.total_wait == least_of_all(made, False)


# What it is asked for


def test_instances_are_as_they_are_described():
    made = [instance(seed) for seed in range(1000)]
    assert made[7] == instance(7)
    assert {len(m.requests) for m in made} == set(range(4, MOST_REQUESTS + 1))
    assert {len(m.load_seconds) for m in made} == {2, 3}
    for m in made:
        asked = [seconds for request in m.requests for seconds in (request.at, request.seconds)]
        seconds = [*m.load_seconds.values(), m.stop_seconds, *asked]
        assert all((value * 1024).is_integer() for value in seconds)
        assert all(1.0 <= load <= 30.001 for load in m.load_seconds.values())
        assert all(0.5 <= request.seconds <= 20.001 for request in m.requests)
        assert [*m.requests] == sorted(m.requests)
        assert best(m).total_wait > 0.0


# Ratios


def test_ratios_are_those_of_the_single_instances():
    (eager,) = ratios(["eager"], 20)
    single = [under(instance(seed), "eager") / best(instance(seed)).total_wait for seed in range(20)]
    assert (eager.policy, eager.instances) == ("eager", 20)
    assert eager.mean == pytest.approx(sum(single) / 20)
    assert (eager.worst, eager.worst_seed) == (max(single), single.index(max(single)))


def test_a_policy_that_cannot_see_ahead_is_closer_to_the_best_that_swaps_for_somebody_only():
    (eager,) = ratios(["eager"], 50)
    assert 1.0 < eager.mean < eager.mean_ahead
