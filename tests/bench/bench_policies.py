"""How long each policy thinks about 1,000 lines; with --ratios how far its waits are from the best possible.

    held      every line is held back: it has just begun, and the resident is busy
    due       no line can be held back any longer
    mixed     lines of all ages and lengths, some of them for directions never seen
    spread    16 residents, any two of which make room for a line

Figures are milliseconds of wall-clock time for one decision; what else the machine does can only slow it
down, so that the median and the least are both shown. The promise is less than 1 ms.

--ratios [N]: the total wait of each policy over that of the best schedule that knows the future
(clairvoyant.py), on N small random workloads; MEAN-AHEAD: over the best that evicts before anybody waits.
That schedule can be found only where all answers take as long as alone, and it knows what swaps cost; so do
the policies here.

--clients: the waits of clients that ask again when they have their answers and have thought, on one GPU, and
what they get (docs/policies.md says why RMS decides); two seeds.

--overload: the waits of each policy where one GPU has 27 models to serve (overload.py), on the trace by which
the bound of queues was chosen, and on the one that was held out. A request that timed out waited for all of
queue_timeout.

In both engines make answers as in `anvil-mux simulate`, and policies learn what swaps cost; with
--known-costs they know it from the beginning.

Nothing here passes or fails: a missed target is a finding, not an error.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from anvil_mux.lab import report, study
from anvil_mux.lab.workload import ClientGroups
from anvil_mux.scheduler.policies import POLICIES, Policy, Queue, Resident, Snapshot, build_policy
from tests.bench import clairvoyant, overload

COUNT = 1000
NOW = 1000.0


def held() -> Snapshot:
    return Snapshot(NOW, "0", (_resident("a", NOW - 1.0),), tuple(_line(n, 0.5) for n in range(COUNT)))


def due() -> Snapshot:
    return Snapshot(NOW, "0", (_resident("a", 0.0),), tuple(_line(n, 500.0) for n in range(COUNT)))


def mixed() -> Snapshot:
    draw = random.Random("mixed")
    lines = [
        _line(n, draw.uniform(0.0, 10.0), waiting=1 + n % 9, learned=n % 3 > 0, growth=draw.random())
        for n in range(COUNT)
    ]
    return Snapshot(NOW, "0", (_resident("a", NOW - 30.0),), tuple(lines))


def spread() -> Snapshot:
    draw = random.Random("spread")
    names = [f"r{n}" for n in range(16)]
    lines = [_line(n, 0.5, evicts=tuple(sorted(draw.sample(names, 2)))) for n in range(COUNT)]
    residents = [_resident(name, NOW - draw.uniform(0.0, 5.0)) for name in names]
    return Snapshot(NOW, "0", tuple(residents), tuple(lines))


def _resident(name: str, since: float) -> Resident:
    return Resident(name, name, since, 30, NOW, 2.0, 1.0, 0.5, 4.0, 8.0)


def _line(
    n: int,
    age: float,
    *,
    waiting: int = 1,
    evicts: tuple[str, ...] = ("a",),
    learned: bool = True,
    growth: float = 0.001,
) -> Queue:
    since = NOW - age
    return Queue(
        f"m{n}",
        waiting,
        since,
        since + age / 2,
        evicts,
        evict_seconds=1.0,
        load_seconds=30.0,
        learned=learned,
        growth=growth,
        service_seconds=4.0,
        max_wait=600.0,
    )


SCENARIOS: dict[str, Callable[[], Snapshot]] = {"held": held, "due": due, "mixed": mixed, "spread": spread}


def measure(policy: Policy, snapshot: Snapshot, repetitions: int) -> list[float]:
    """Milliseconds of each decision."""
    taken = []
    for _ in range(repetitions):
        began = time.perf_counter()
        policy.decide(snapshot)
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def print_ratios(policies: list[str], count: int, *, as_json: bool) -> None:
    rows = clairvoyant.ratios(policies, count)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print(f"{'POLICY':14}{'WORKLOADS':>10}{'MEAN':>8}{'WORST':>8}{'ITS-SEED':>10}{'MEAN-AHEAD':>12}")
    for row in rows:
        figures = f"{row.mean:>8.3f}{row.worst:>8.2f}{row.worst_seed:>10}{row.mean_ahead:>12.3f}"
        print(f"{row.policy:14}{row.instances:>10}{figures}")


def print_overload(policies: Sequence[str], *, known_costs: bool) -> None:
    made = [overload.overload(seed) for seed in overload.SEEDS]
    cases = [study.Case(each, each.config(), known_costs=known_costs) for each in made]
    runs = list(study.study(cases, policies))
    print(f"{'TRACE':20}{'POLICY':14}{'SWAPS':>6}{'WAIT':>8}{'P95':>8}{'LONGEST':>9}{'FAILED':>8}")
    for one in runs:
        told = one.figures
        waits = f"{told.wait_mean_seconds:>8.1f}{told.wait_p95_seconds:>8.1f}{told.wait_max_seconds:>9.1f}"
        print(f"{one.profile:20}{one.policy:14}{told.swaps:>6}{waits}{told.failed:>8}")


CLIENTS = [
    ClientGroups((4, 4)),
    ClientGroups((4, 4), think_seconds=1.0),
    ClientGroups((8, 1)),
    ClientGroups((3, 3, 3)),
    ClientGroups((4, 4), load_seconds=10.0, stop_seconds=1.0, seconds=1200.0),
    ClientGroups((4, 4), 30.0, 1.0, answer_seconds=8.0, think_seconds=2.0, seconds=2400.0),
    ClientGroups((2, 2), 5.0, 1.0, answer_seconds=5.0, think_seconds=1.0, seconds=1200.0),
    ClientGroups((1, 1), 5.0, 1.0, answer_seconds=5.0, think_seconds=0.5, seconds=1200.0),
]


def print_clients(policies: Sequence[str], *, known_costs: bool) -> None:
    print(f"{'CLIENTS':9}{'LOAD+EVICT':>11}{'ANSWER':>8}{'THINK':>7}  {'POLICY':12}{'ANSWERS':>8}", end="")
    print(f"{'WAIT':>7}{'RMS':>7}{'LONGEST':>9}{'LEAST/MOST':>12}")
    for made in CLIENTS:
        counts = "+".join(map(str, made.counts))
        swap = f"{made.load_seconds:g}+{made.stop_seconds:g}"
        setting = f"{counts:9}{swap:>11}{made.answer_seconds:>8g}{made.think_seconds:>7g}"
        for policy in policies:
            workloads = [made.workload(seed) for seed in range(2)]
            cases = [study.Case(each, each.config(), known_costs=known_costs) for each in workloads]
            runs = list(study.study(cases, [policy]))
            answers, mean, rms = [
                statistics.fmean([getattr(run.figures, name) for run in runs])
                for name in ("requests", "wait_mean_seconds", "wait_rms_seconds")
            ]
            longest = max([run.figures.wait_max_seconds for run in runs])
            share = report.least_to_most([run.fairness for run in runs])
            print(f"{setting}  {policy:12}{answers:>8.0f}{mean:>7.1f}{rms:>7.1f}{longest:>9.1f}{share:>12}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench-policies", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", "--repetitions", type=int, default=300, help="of each decision (default 300)")
    parser.add_argument("--ratios", nargs="?", type=int, const=1000, metavar="N", help="(default 1000)")
    parser.add_argument("--overload", action="store_true", help="27 models on one GPU")
    parser.add_argument("--clients", action="store_true", help="clients that ask again and again")
    parser.add_argument("--known-costs", action="store_true", help="policies know what swaps cost")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    if given.ratios:
        print_ratios(list(POLICIES), given.ratios, as_json=given.json)
        return
    if given.clients:
        print_clients(list(POLICIES), known_costs=given.known_costs)
        return
    if given.overload:
        print_overload(list(POLICIES), known_costs=given.known_costs)
        return
    rows = []
    for name in POLICIES:
        for scenario, make in SCENARIOS.items():
            taken = measure(build_policy(name), make(), max(given.repetitions, 1))
            median, least = round(statistics.median(taken), 3), round(min(taken), 3)
            rows.append({"policy": name, "scenario": scenario, "median_ms": median, "least_ms": least})
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'POLICY':14}{'SCENARIO':10}{'MEDIAN/ms':>10}{'LEAST/ms':>10}")
    for row in rows:
        print(f"{row['policy']:14}{row['scenario']:10}{row['median_ms']:>10.3f}{row['least_ms']:>10.3f}")


if __name__ == "__main__":
    main()
