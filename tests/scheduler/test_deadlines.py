"""Asking early changes nothing: between two facts the next step is the same until the moment it named.

What depends on the time asks ``GroupState.reached``, which remembers the moment; here groups are asked
at random moments, in the worlds of tests/test_hardship.py, with hints and home backends.
"""

import copy
import itertools
import random
from collections import Counter
from dataclasses import dataclass, replace
from types import MappingProxyType

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.slot import Wait
from tests.scheduler.driver import A, B, C, Driver
from tests.seeds import seeds
from tests.test_hardship import Troubled, World, some_backends, some_traffic

POLICIES = ("eager", "debounce", "cost_aware", "adaptive", "time_slice")


@dataclass(frozen=True)
class Hint:
    """A client says that it will ask for a model."""

    at: float
    model: str

    def tell(self, scheduler):
        return scheduler.hinted(self.model, self.at)


class AskedEarly(World):
    """A world whose GPU groups are also asked between two facts; ``early`` has what that changed."""

    def __init__(self, draw, *about, **more):
        super().__init__(*about, **more)
        self.draw, self.early, self.asked = draw, [], 0

    def _carry_out(self, effects, now):
        super()._carry_out(effects, now)
        next_fact = self._heap[0][0] if self._heap else now
        until = min(self._ask_at, next_fact, now + 120.0)
        if until > now and self.draw.random() < 0.15:
            self.ask(now + (until - now) * self.draw.random())

    def ask(self, moment):
        before = len(self.log)
        for group in copied(self._scheduler).layout.groups:
            self.asked += 1
            step = group.next_step(moment)
            told = [event.kind for event in self.log[before:] if event.kind != "deferred"]
            if told or not isinstance(step, Wait):
                self.early.append((moment, group.name, step, told))
            del self.log[before:]


def copied(scheduler):
    """Return a copy of a scheduler that shares with it what never changes, and the numbers of steps."""
    settings = scheduler.layout.settings
    counts = [each for each in vars(scheduler).values() if isinstance(each, itertools.count)]
    fixed = [settings.config, *settings.config.backends, *_mappings(settings), *counts]
    return copy.deepcopy(scheduler, {id(each): each for each in fixed})


def _mappings(settings):
    return [each for each in settings if isinstance(each, MappingProxyType)]


@pytest.mark.seeds
@pytest.mark.parametrize("seed", seeds(12, of=200))
def test_groups_that_are_asked_early_do_nothing(seed):
    draw = random.Random(seed)
    shared = draw.random() < 0.5
    first, *others = some_backends(draw, shared)
    if draw.random() < 0.5:
        first = replace(first, home=True, ttl=None, home_after=20.0)
    backends: tuple[Backend, ...] = (first, *others)
    config = Config(
        backends=backends,
        gpus=tuple(Gpu(gpu, vram=20) for gpu in "01") if shared else (),
        policy=draw.choice(POLICIES),
        host_memory=draw.choice((None, 8, 12, 20)),
        drain_timeout=draw.choice((0.0, 2.0, 30.0)),
        max_wait=draw.choice((5.0, 60.0)),
    )
    engines = Troubled(draw, backends, shared)
    world = AskedEarly(random.Random(-seed), config, engines, None, Costs(), answers=Counter(), batching={})
    hints = [Hint(draw.uniform(0.0, 600.0), draw.choice(backends).model) for _ in range(25)]
    world.run(sorted([*some_traffic(draw, backends), *hints], key=lambda each: each.at))
    assert world.asked
    assert world.early == []


def test_hint_waits_for_the_end_of_an_earlier_one():
    """What was loaded for a hint stays for a minute; then the next hint has its turn, and not before."""
    driver = Driver(A, B, C)
    assert driver.hint("a", 0.0) == ["load a"]
    driver.core.loaded("a", 1.0)
    assert (driver.hint("b", 2.0), driver.until) == ([], 61.0)
    assert driver.steps(60.9) == []
    assert driver.steps(61.0) == ["evict a"]
