"""GPU groups of all kinds, short of memory, on engines that fail for a while: afterwards everybody is
served.
"""

import random
from collections import Counter
from math import inf

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.machines import Gpu
from anvil_mux.errors import BackendError, LoadError
from anvil_mux.lab.checker import check
from anvil_mux.lab.engines import Outcome
from anvil_mux.lab.simulate import Arrival, _Simulation
from anvil_mux.scheduler.costs import Costs
from anvil_mux.scheduler.events import Cause
from anvil_mux.scheduler.slot import HOLDING, Cancel, Demote, Load
from tests.lab.facts import Death, Unloading
from tests.seeds import seeds

LEVELS = (
    ("stop",),
    ("freeze", "stop"),
    ("sleep", "stop"),
    ("checkpoint", "stop"),
    ("sleep", "sleep-2", "stop"),
    ("sleep", "checkpoint", "stop"),
    ("sleep", "sleep-2", "checkpoint", "stop"),
)
LAYOUTS = (["0", "0"], ["0", "0", "0"], ["0", "1", "01"], ["0", "0", "1", "1"], ["0", "0", "1", "01", "1"])
TROUBLE_ENDS = 1000.0
CALM = 1500.0


class World(_Simulation):
    """Adds up what is held of each GPU after everything that happens."""

    def _carry_out(self, effects, now):
        super()._carry_out(effects, now)
        for group in self._scheduler.layout.groups:
            for gpu, capacity in group.placement.capacity.items():
                here = [slot for slot in group.slots.values() if gpu in slot.occupies]
                whole = any(
                    slot.whole and slot.state in HOLDING for slot in here
                )  # it takes what others leave
                assert whole or sum(slot.occupies[gpu] for slot in here) <= capacity, (now, gpu)


def some_backends(draw, shared):
    for name, gpus in zip("abcde", draw.choice(LAYOUTS), strict=False):
        yield Backend(
            name,
            name,
            tuple(gpus),
            evict_to=draw.choice(LEVELS),
            demote_after=draw.choice((None, None, 7.03, 30.03)),
            preload=draw.random() < 0.3,
            vram=draw.choice((None, 6, 9, 14, 18)) if shared else None,
            ram=draw.choice((None, 2, 5)),
            ttl=draw.choice((None, None, 20.05)),
            priority=draw.choice((0, 0, 1)),
            min_residency=draw.choice((0.0, 0.0, 8.0)),
        )


def some_traffic(draw, backends):
    now = 0.0
    while now < 300.0:
        now += draw.expovariate(0.6)
        name, what = draw.choice(backends).name, draw.random()
        if what < 0.03:
            yield Death(now, name)
        elif what < 0.07:
            yield Unloading(now, name)
        else:
            yield Arrival(now, name, draw.expovariate(0.7), draw.choice((inf, inf, 4.0)))
    for n, backend in enumerate(backends):
        yield Arrival(CALM + n * 130.0, backend.model, 1.0)


class Troubled:
    """Engines of which some steps fail, as long as there is trouble."""

    def __init__(self, draw, backends, shared):
        self.trouble = True
        self._draw = draw
        self._vram = {backend.name: (backend.gpus, backend.vram or 1) for backend in backends if shared}
        self._residual = {backend.name: draw.choice((0, 1, 3)) for backend in backends}
        ways = ("sleep", "sleep-2", "checkpoint", "freeze")
        self._host = {(b.name, way): draw.choice((0, 2, 4, 7)) for b in backends for way in ways}

    def __call__(self, step, nth):
        luck = self._draw.random()
        if isinstance(step, Load):
            if self.trouble and luck < 0.07:
                return Outcome(3.0, LoadError("no") if luck < 0.05 else BackendError("no"))
            cold = step.level == "stop" or luck < 0.15
            return Outcome(6.0 if cold else 0.5, how="stop" if cold else step.level)
        if isinstance(step, Cancel):
            return Outcome(luck * 4.0, BackendError("no") if self.trouble and luck < 0.05 else None)
        if self.trouble and luck < 0.12:
            return Outcome(2.0, BackendError("no"))
        to = step.to if isinstance(step, Demote) else step.level
        if to == "stop" or luck < 0.2:
            return Outcome(1.0, how="stop")
        gpus, vram = self._vram.get(step.backend, ((), 0))
        residual = dict.fromkeys(gpus, min(self._residual[step.backend], vram))
        return Outcome(0.5, how=to, residual=residual, host_bytes=self._host[step.backend, to])


@pytest.mark.seeds
@pytest.mark.parametrize("chunk", seeds(2, of=16))
def test_when_the_trouble_is_over_everybody_is_served_and_nothing_is_left_undone(chunk):
    for seed in range(chunk * 20, chunk * 20 + 20):
        draw = random.Random(seed)
        shared = draw.random() < 0.5
        backends = tuple(some_backends(draw, shared))
        config = Config(
            backends=backends,
            gpus=tuple(Gpu(gpu, vram=20) for gpu in "01") if shared else (),
            policy=draw.choice(("eager", "debounce", "cost_aware", "adaptive")),
            host_memory=draw.choice((None, 8, 12, 20)),
            drain_timeout=draw.choice((0.0, 2.0, 30.0)),
            max_wait=draw.choice((5.0, 60.0)),
        )
        engines = Troubled(draw, backends, shared)
        world = World(config, engines, None, Costs(), answers=Counter(), batching={})
        world._at(TROUBLE_ENDS, lambda now, troubled: setattr(troubled, "trouble", False), engines)
        world.run(some_traffic(draw, backends))
        assert check(world.log, config) == [], seed
        ends = [(event.kind, event.model) for event in world.log if event.at >= CALM and event.ticket]
        assert [model for kind, model in ends if kind == "leased"] == [each.model for each in backends], seed
        assert not [
            event for event in world.log if event.cause == Cause("error", detail="waited_too_long")
        ], seed
        for group in world._scheduler.layout.groups:
            assert not group.swaps, seed
