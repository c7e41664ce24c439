"""``python -m tests.oracle``: does this checkout write the logs that an earlier commit wrote?"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.oracle.worlds import World, worlds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BASE = "e0f6152"
"""The last commit before the scheduler was taken apart."""
ON_PURPOSE = (
    "Replicas of one model tie GPU groups together no longer: each group decides by itself, what is resident "
    "in several shares the model's demand, its queue stands where its wait is shortest, and an overdue one "
    "reserves the GPUs of one replica. At the frozen commit all were one group."
)
"""Why the logs of worlds in which a model has backends on several GPUs may be others than there."""
CONTEXT = 6
"""Events of both that are shown before the first that differs."""

Log = list[list[Any]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("--base", default=BASE, help="the commit to compare with (default: %(default)s)")
    parser.add_argument(
        "--seeds", type=int, default=100, help="worlds of each random kind (default: %(default)s)"
    )
    asked = parser.parse_args()
    made = list(worlds(asked.seeds))
    with tempfile.TemporaryDirectory() as folder:
        check_out(asked.base, folder)
        before, now = start("frozen.py", Path(folder), made), start("current.py", ROOT, made)
        different = compare(made, logs(before), logs(now))
    print(f"{len(made)} worlds, {different} of them with another log than at {asked.base}")
    print(f"Not counted: {sum(map(spreads, made))} worlds with replicas on several GPUs. {ON_PURPOSE}")
    return 1 if different else 0


def check_out(commit: str, folder: str) -> None:
    archive = subprocess.run(
        ["git", "archive", commit, "anvil_mux"], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)


def start(script: str, checkout: Path, made: Iterable[World]) -> subprocess.Popen[str]:
    # A file, not a pipe: both run at once, and nobody feeds the one while the other is read.
    asked = tempfile.TemporaryFile("w+")  # noqa: SIM115 (the process has it until it ends)
    asked.writelines(json.dumps(world) + "\n" for world in made)
    asked.seek(0)
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.Popen(
        [sys.executable, str(HERE / script)], stdin=asked, stdout=subprocess.PIPE, env=env, text=True
    )


def logs(process: subprocess.Popen[str]) -> Iterator[Log]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)[1]
    process.wait()


def compare(made: Iterable[World], before: Iterable[Log], now: Iterable[Log]) -> int:
    """How many worlds have different logs; each is shown."""
    different = 0
    for world, *both in zip(made, before, now, strict=True):
        frozen, current = both
        if frozen != current and "config" in world:
            frozen, current = (in_order(log, world) for log in both)
        position = first_difference(frozen, current)
        on_purpose = spreads(world) and not is_error(current)
        if position is not None and not on_purpose:
            different += 1
            show(world["name"], frozen, current, position)
    return different


def spreads(world: World) -> bool:
    """Whether some model has backends on several GPUs, at one time or after a reload."""
    configs = [world["config"]] if "config" in world else []
    configs += [entry[2] for entry in world.get("trace", ()) if entry[1] == "reload"]
    gpus: dict[str, set[tuple[str, ...]]] = {}
    for backend in [each for config in configs for each in config["backends"]]:
        gpus.setdefault(backend["model"], set()).add(tuple(backend["gpus"]))
    return any(len(each) > 1 for each in gpus.values())


def is_error(log: Log) -> bool:
    """Whether the world could not be run."""
    return bool(log) and log[-1][1] == "error"


def in_order(log: Log, world: World) -> Log:
    """The log with what several GPU groups do at one moment in the order of the groups.

    The frozen commit asked them in the order in which they had been made, and we do by their names.
    """
    configs = [(0.0, world["config"])]
    configs += [(entry[0], entry[2]) for entry in world["trace"] if entry[1] == "reload"]
    until = [moment for moment, _ in configs[1:]] + [math.inf]
    groups = [groups_of([config for _, config in configs[: n + 1]]) for n in range(len(configs))]
    return sorted(log, key=lambda event: (event[0], groups[bisect_right(until, event[0])].get(event[2], -1)))


def groups_of(configs: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Model -> a number that it has in common with all models which shared a GPU with it up to now."""
    ties = [{each["model"], *map("gpu {}".format, each["gpus"])} for c in configs for each in c["backends"]]
    groups: list[set[str]] = []
    for tie in ties:
        together = [group for group in groups if group & tie]
        groups = [group for group in groups if group not in together] + [tie.union(*together)]
    return {name: number for number, group in enumerate(groups) for name in group}


def first_difference(one: Log, other: Log) -> int | None:
    pairs = enumerate(zip_longest(one, other))
    return next((position for position, (left, right) in pairs if left != right), None)


def show(name: str, frozen: Log, current: Log, position: int) -> None:
    print(f"{name}: event {position} differs")
    for event in frozen[max(position - CONTEXT, 0) : position]:
        print(f"      {event}")
    for sign, log in (("-", frozen), ("+", current)):
        for event in log[position : position + 2] or ["(the log has ended)"]:
            print(f"    {sign} {event}")


if __name__ == "__main__":
    sys.exit(main())
