"""How many requests a second go through the simulator, on one core, under each policy.

    mixed     the profile of that name with 10 seeds, one after the other
    busy      two models on one GPU, 25 requests/s, most of them for the one that is loaded
    thrash    two models on one GPU, 2 requests/s, half for each: swaps all the time
    four      eight models on four GPUs, popularity as 1/rank, 20 requests/s
    day       the shipped workload servegen-day

Figures are requests per CPU second of this process, the median of the repetitions. Each of those goes
through all rows, so that no row has a busy minute of the machine to itself. Apart from the simulation: the
check of the log against every invariant, and the figures that are made of it. `anvil-mux simulate` does all
three. The promise is 10,000 requests/s in `mixed` and `day`.

A policy is slow where it holds swaps back: then it is asked about every request that waits and about every
answer, unless it says that answers make no difference to it.

Nothing here passes or fails: a missed target is a finding, not an error.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from anvil_mux.config.config import Backend, Config
from anvil_mux.lab import study
from anvil_mux.lab.checker import check
from anvil_mux.lab.figures import figures
from anvil_mux.lab.simulate import Arrival, simulate
from anvil_mux.lab.study import Case
from anvil_mux.lab.workload import Workload
from anvil_mux.scheduler.policies import POLICIES

COUNT = 50_000


def mixed() -> Iterator[Case]:
    return study.profiles(["mixed"], 10)


def busy() -> Iterator[Case]:
    yield _poisson("busy", COUNT, 25.0, {"a": 20, "b": 1}, {"a": ("0",), "b": ("0",)})


def thrash() -> Iterator[Case]:
    yield _poisson("thrash", COUNT, 2.0, {"a": 1, "b": 1}, {"a": ("0",), "b": ("0",)})


def four() -> Iterator[Case]:
    names = "abcdefgh"
    shares = {name: 1 / rank for rank, name in enumerate(names, 1)}
    yield _poisson("four", COUNT, 20.0, shares, {name: (str(n % 4),) for n, name in enumerate(names)})


def day() -> Iterator[Case]:
    yield study.trace("servegen-day")


SCENARIOS: dict[str, Callable[[], Iterator[Case]]] = {
    "mixed": mixed,
    "busy": busy,
    "thrash": thrash,
    "four": four,
    "day": day,
}


def _poisson(
    name: str, count: int, rate: float, shares: dict[str, float], gpus: dict[str, tuple[str, ...]]
) -> Case:
    draw, now, requests = random.Random(name), 0.0, []
    models = draw.choices(list(shares), list(shares.values()), k=count)
    for model in models:
        now += draw.expovariate(rate)
        requests.append(Arrival(now, model, draw.lognormvariate(0.0, 0.8)))
    made = Workload(name, dict.fromkeys(shares, 5.0), tuple(requests), stop_seconds=1.0)
    return Case(made, Config(tuple(Backend(model, model, where) for model, where in gpus.items())))


Row = dict[str, str | int]
PARTS = ("simulate_per_second", "check_per_second", "figures_per_second")


def measure(chosen: Sequence[tuple[str, str]], repetitions: int, quick: bool) -> list[Row]:
    """A row for each scenario and policy."""
    cases = {name: [_shortened(case) if quick else case for case in SCENARIOS[name]()] for name, _ in chosen}
    taken: dict[tuple[str, str], list[tuple[float, ...]]] = {row: [] for row in chosen}
    for _ in range(repetitions):
        for name, policy in chosen:
            taken[name, policy].append(_work(cases[name], policy))
    return [
        {"scenario": name, "policy": policy, **_speeds(_count(cases[name]), taken[name, policy])}
        for name, policy in chosen
    ]


def _shortened(case: Case) -> Case:
    kept = case.workload.requests[: len(case.workload.requests) // 10]
    return replace(case, workload=replace(case.workload, requests=kept))


def _count(cases: Sequence[Case]) -> int:
    return sum(len(case.workload.requests) for case in cases)


def _speeds(requests: int, taken: Sequence[tuple[float, ...]]) -> Row:
    medians = [round(requests / median(seconds)) for seconds in zip(*taken, strict=True)]
    whole = round(requests / median(map(sum, taken)))
    return {"requests": requests, **dict(zip(PARTS, medians, strict=True)), "all_per_second": whole}


def _work(cases: Sequence[Case], policy: str) -> tuple[float, ...]:
    """The CPU seconds that each part took."""
    taken = [0.0] * len(PARTS)
    for case in cases:
        made, config = case.workload, replace(case.config, policy=policy)
        engines, resident = made.engines(config), made.residents(config)
        batching = case.batching.of_backends(config)
        gc.collect()  # or this run is charged with what a larger one before it has left
        began = time.process_time()
        log = simulate(config, made.requests, engines, resident=resident, batching=batching)
        simulated = time.process_time()
        broken = check(log, config)
        checked = time.process_time()
        figures(log)
        ended = time.process_time()
        if broken:
            sys.exit(f"bench-simulate: {made.name}, {policy}: broken invariant: {broken[0]}")
        for part, seconds in enumerate((simulated - began, checked - simulated, ended - checked)):
            taken[part] += seconds
    return tuple(taken)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench-simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="by default all of them")
    parser.add_argument("--policy", default="all", help=f"of {', '.join(POLICIES)}, or all (default)")
    parser.add_argument("-n", "--repetitions", type=int, default=5, help="of each row (default 5)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests, once")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    if unknown := [name for name in given.scenarios if name not in SCENARIOS]:
        parser.error(f"unknown scenario {unknown[0]}; known: {', '.join(SCENARIOS)}")
    policies = study.choose_policies(given.policy)
    chosen = [(name, policy) for name in given.scenarios or SCENARIOS for policy in policies]
    rows = measure(chosen, 1 if given.quick else max(given.repetitions, 1), given.quick)
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print(
        f"{'SCENARIO':10}{'POLICY':14}{'REQUESTS':>10}{'SIMULATE/s':>12}{'CHECK/s':>10}{'FIGURES/s':>11}{'ALL/s':>9}"
    )
    for row in rows:
        scenario, policy, *numbers = row.values()
        widths = (10, 12, 10, 11, 9)
        cells = "".join(f"{number:>{width},}" for number, width in zip(numbers, widths, strict=True))
        print(f"{scenario:10}{policy:14}{cells}")


if __name__ == "__main__":
    main()
