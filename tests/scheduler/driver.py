"""A GPU group without a scheduler, its log, short words for what happens to it, and policies for it."""

import itertools
from math import inf

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import LoadError
from anvil_mux.lab.checker import check
from anvil_mux.scheduler.policies import Stay, SwapTo, build_policy
from anvil_mux.scheduler.slot import Ticket, Wait
from anvil_mux.scheduler.state import drain_of
from tests.scheduler.lone import LoneGroup


def backend(name, *gpus, model=None, **fields):
    return Backend(name, model or name, gpus or ("0",), **fields)


A, B, C = backend("a"), backend("b"), backend("c")


TEN = (Gpu("0", vram=10),)


DEBOUNCE = build_policy("debounce", {"quiet": 2.0, "max_hold": 10.0})


class Driver:
    """A GPU group, its log, and short words for what happens to it."""

    def __init__(self, *backends, gpus=(), policy=None, **settings):
        settings = {"policy": "eager", "eviction": "lru", **settings}
        self.config = Config(backends=backends, gpus=gpus, **settings)
        self.log = []
        self.core = LoneGroup(self.config, self.log.append, policy=policy)
        self.costs, self.footprints = self.core.state.costs, self.core.state.footprints
        self.ids = itertools.count(1)
        self.until = self.announced_at = inf

    def request(self, model, at, **about):
        ticket = Ticket(next(self.ids), model, at, **about)
        self.core.request(ticket, at)
        return ticket

    def steps(self, at):
        """The steps handed out at a moment: "load a", "evict b"; sets ``until`` and ``announced_at``."""
        taken = []
        while not isinstance(step := self.core.next_step(at), Wait):
            taken.append(f"{type(step).__name__.lower()} {step.backend}")
        self.until, self.announced_at = step
        return taken

    def with_resident(self, name, at=0.0):
        self.request(self.core.slots[name].model, at, takes_lease=False)
        assert self.steps(at) == [f"load {name}"]
        self.core.loaded(name, at)
        assert self.steps(at) == []
        return self

    def states(self):
        return {name: slot.state for name, slot in self.core.slots.items()}

    def state(self, name):
        return self.core.slots[name].state

    def drains(self):
        """Draining backend -> the model that it makes room for, and when its drain ends."""
        found = {name: drain_of(slot, self.core.state.swaps, 0.0) for name, slot in self.core.slots.items()}
        return {name: drain for name, drain in found.items() if drain}

    def tell(self, *kinds):
        """The events of these kinds (all without), as "kind backend-or-model"."""
        return [f"{e.kind} {e.backend or e.model}" for e in self.log if not kinds or e.kind in kinds]

    def sound(self):
        assert check(self.log, self.config) == []
        assert [line for line in self.core.queues.values() if line] == []


class Watched:
    """Keeps what it saw; swaps to the first line, or never."""

    def __init__(self, *, swaps=True):
        self.swaps = swaps
        self.seen = []

    def decide(self, seen):
        self.seen.append(seen)
        return SwapTo(seen.queues[0].model) if seen.queues and self.swaps else Stay()

    def lines(self):
        """The last that it saw."""
        return next(seen.queues for seen in reversed(self.seen) if seen.queues)


FACTS = {
    "loaded": lambda core, at: core.loaded("a", at),
    "load_failed": lambda core, at: core.load_failed("a", at, LoadError("no")),
    "cancelled": lambda core, at: core.load_cancelled("a", at),
    "stopped": lambda core, at: core.evicted("a", at),
    "standby": lambda core, at: core.evicted("a", at, {"0": 0}, "sleep"),
    "evict_failed": lambda core, at: core.evict_failed("a", at, "no"),
    "died": lambda core, at: core.died("a", at, "killed"),
    "adopt": lambda core, at: core.adopt("a", at),
    "adopt_standby": lambda core, at: core.adopt_standby("a", at, "sleep", {"0": 0}),
}


class Never:
    """A policy that never swaps."""

    def decide(self, seen):
        return Stay()


class Loads:
    """A policy that loads one model when there is room and does nothing else."""

    def __init__(self, model):
        self._model = model

    def decide(self, seen):
        mine = [line for line in seen.queues if line.model == self._model and not line.evicts]
        return SwapTo(self._model) if mine else Stay()


def held_back():
    """b waits since 1.0, and the policy holds its swap back until 3.0."""
    driver = Driver(A, B, C, policy=DEBOUNCE).with_resident("a")
    waiting = driver.request("b", 1.0)
    assert (driver.steps(1.0), driver.until) == ([], 3.0)
    return driver, waiting
