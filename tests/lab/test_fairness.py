"""The theorem of docs/design.md, on drawn worlds: how long a queue waits at most, whatever the policy says.

After a queue is overdue only these load before it on its GPU: what was under way then, and each model once
whose queue was there already when it began.
"""

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Engines
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.scheduler.admission import CHOICE_SECONDS, LEAST_SECONDS
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.policies import POLICIES
from tests.seeds import seeds

STOP_SECONDS = 1.0
DRAIN_SECONDS = 3.0


class Waited(NamedTuple):
    """A queue from its first request to its first lease."""

    model: str
    since: float
    bound: float
    older: frozenset[str]
    """The models that waited for a load when it began."""
    until: float
    loads: tuple[str, ...]
    """The loads that began after it was overdue, up to its own."""


def queues(log: list[Event]) -> Iterator[Waited]:
    """The queues that waited for a load."""
    open_: dict[str, Event] = {}
    older: dict[str, frozenset[str]] = {}
    loads: list[Event] = []
    for event in log:
        if event.kind == "queued" and event.model not in open_:
            older[event.model], open_[event.model] = frozenset(open_), event
        elif event.kind == "loading":
            loads.append(event)
        elif event.kind == "leased" and event.model in open_:
            first = open_.pop(event.model)
            overdue = first.at + first.bound
            since = tuple(each.model for each in loads if overdue <= each.at)
            yield Waited(event.model, first.at, first.bound, older[event.model], event.at, since)


def world(seed: int) -> tuple[Config, list[Arrival], Engines]:
    """One GPU, more models than it can serve, and answers that a swap severs soon."""
    draw = random.Random(f"fairness {seed}")
    names = [f"m{n}" for n in range(draw.randint(3, 14))]
    engines = Engines({name: draw.lognormvariate(2.0, 0.8) for name in names}, stop_seconds=STOP_SECONDS)
    rate, now, trace = draw.choice((0.2, 0.5, 1.0)), 0.0, []
    shares = [1.0 / (n + 1) for n in range(len(names))]
    while now < 1500.0:
        now += draw.expovariate(rate)
        model = draw.choices(names, shares)[0]
        trace += [Arrival(now, model, draw.lognormvariate(0.5, 1.0)) for _ in range(draw.choice((1, 1, 4)))]
    config = Config(
        tuple([Backend(name, name, ("0",)) for name in names]),
        policy=draw.choice(list(POLICIES)),
        max_wait=draw.choice(("auto", "auto", 20.0, 200.0)),
        drain_timeout=DRAIN_SECONDS,
        queue_timeout=100_000.0,
        max_queue=100_000,
    )
    return config, trace, engines


def assert_is_fair(seed: int) -> int:
    """The theorem holds for each queue; how many of them were overdue."""
    config, trace, engines = world(seed)
    costs = engines.costs(config)
    log = simulate(config, trace, engines, costs=costs)
    assert check(log, config) == [], seed
    turns = {name: DRAIN_SECONDS + STOP_SECONDS + each for name, each in engines.load_seconds.items()}
    late = 0
    for each in queues(log):
        before = [model for model in each.loads[:-1] if model != each.model]
        if before and before[0] not in each.older:
            before = before[1:]  # it was under way
        assert set(before) <= each.older, (seed, each)
        assert len(before) == len(set(before)), (seed, each)
        one = turns[each.model] + sum(turns[model] for model in each.older)
        assert each.until - each.since <= each.bound + max(turns.values()) + one, (seed, each)
        if config.max_wait == "auto":
            assert LEAST_SECONDS <= each.bound <= max(LEAST_SECONDS, one + min(one, CHOICE_SECONDS)), seed
        late += bool(each.loads)
    return late


@pytest.mark.seeds
@pytest.mark.parametrize("seed", seeds(12, of=400))
def test_a_queue_waits_for_its_bound_the_swap_under_way_and_one_round(seed):
    assert_is_fair(seed)


def test_in_these_worlds_there_are_overdue_queues():
    assert sum(assert_is_fair(seed) for seed in range(4)) > 20
