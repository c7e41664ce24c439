"""Two workloads in which one GPU has far more models to serve than it can keep up with at once.

Models are asked for as 1/rank, each in bursts whose number of requests is Pareto-distributed, as are the
pauses between them; answers and loads are lognormal. By ``TUNED`` the figures of scheduler/admission.py were
chosen (and checked on seeds 3 to 8); by ``HELD_OUT`` nothing was: its figures stand in docs/design.md.
"""

import math
import random
from collections.abc import Iterator

from anvil_mux.lab.simulate import Arrival
from anvil_mux.lab.workload import Workload

TUNED, HELD_OUT = 1, 2
SEEDS = {TUNED: "tuned", HELD_OUT: "held out"}
MODELS = 27
SECONDS = 7200.0
RATE = 0.5
"""Requests per second, over all models."""


def overload(seed: int) -> Workload:
    """Two hours of bursts for 27 models."""
    draw = random.Random(f"overload {seed}")
    names = [f"m{n:02}" for n in range(MODELS)]
    loads = {name: round(draw.lognormvariate(math.log(8.0), 0.5), 3) for name in names}
    shares = [1.0 / rank for rank in range(1, MODELS + 1)]
    requests = [
        each
        for name, share in zip(names, shares, strict=True)
        for each in _bursts(draw, name, RATE * share / sum(shares))
    ]
    requests.sort(key=lambda each: each.at)
    return Workload(f"overload, {SEEDS.get(seed, seed)}", loads, tuple(requests), stop_seconds=1.0)


def _bursts(draw: random.Random, model: str, rate: float) -> Iterator[Arrival]:
    """The bursts of one model: ``rate`` is that of its requests, of which a burst has 3 on average."""
    mean = 3.0 / rate
    at = draw.random() * mean
    while at < SECONDS:
        moment = at
        for _ in range(min(int(draw.paretovariate(1.5)), 60)):
            yield Arrival(moment, model, draw.lognormvariate(math.log(2.0), 0.8))
            moment += draw.expovariate(1.0)
        at += mean * draw.paretovariate(1.5) / 3.0
