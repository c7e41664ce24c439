"""``python -m tests.oracle``: does this checkout write the logs that an earlier commit wrote?"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.oracle.worlds import World, worlds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BASE = "c79680a1fc50933d379f5c1d6c68f6466bee5ed7"
"""The last commit before the program was redesigned in fewer concepts."""
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
        before, now = start(Path(folder), made), start(ROOT, made)
        different = compare(made, logs(before), logs(now))
    print(f"{len(made)} worlds, {different} of them with another log than at {asked.base}")
    return 1 if different else 0


def check_out(commit: str, folder: str) -> None:
    archive = subprocess.run(
        ["git", "archive", commit, "anvil_mux"], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)


def start(checkout: Path, made: Iterable[World]) -> subprocess.Popen[str]:
    # A file, not a pipe: both run at once, and nobody feeds the one while the other is read.
    asked = tempfile.TemporaryFile("w+")  # noqa: SIM115 (the process has it until it ends)
    asked.writelines(json.dumps(world) + "\n" for world in made)
    asked.seek(0)
    env = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.Popen(
        [sys.executable, str(HERE / "run.py")], stdin=asked, stdout=subprocess.PIPE, env=env, text=True
    )


def logs(process: subprocess.Popen[str]) -> Iterator[Log]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)[1]
    process.wait()


def compare(made: Iterable[World], before: Iterable[Log], now: Iterable[Log]) -> int:
    """How many worlds have different logs; each is shown."""
    different = 0
    for world, frozen, current in zip(made, before, now, strict=True):
        position = first_difference(frozen, current)
        if position is not None:
            different += 1
            show(world["name"], frozen, current, position)
    return different


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
