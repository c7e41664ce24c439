"""The soak: an hour of every fault at once, on processes and real containers, each answer accounted for.

`bin/test soak` runs it for ANVIL_SOAK_SECONDS, with ANVIL_SOAK_REQUESTS requests drawn from ANVIL_SOAK_SEED.
Two anvil-mux serve side by side, one local processes, one llama-server containers on a Docker Engine of the
soak's own, which is restarted and killed. Every half minute a line says how far it is; the report goes to
ANVIL_SOAK_FOLDER, and what it is made from stays there when something is wrong, or with ANVIL_SOAK_KEEP.
"""

import os
import random
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.docker.conftest import engine_of_its_own, plain_stack
from tests.docker.load_containers import MODELS, ContainersOfTheirOwn, container_load
from tests.load import Load
from tests.load_processes import process_load

SECONDS = float(os.environ.get("ANVIL_SOAK_SECONDS", "0"))
REQUESTS = int(os.environ.get("ANVIL_SOAK_REQUESTS", "0")) or int(SECONDS * 100_000 / 3600)
SEED = int(os.environ.get("ANVIL_SOAK_SEED", "1"))
FOLDER = Path(os.environ.get("ANVIL_SOAK_FOLDER", ".cache/soak")).absolute()
KEEP = bool(os.environ.get("ANVIL_SOAK_KEEP"))
SHARE = 0.25
"""The containers' share of the requests: their swaps cost a small machine more."""
TOKENS = (1, 3, 8, 12, 12, 20, 20, 40, 60, 150) * 10 + (700, 1500)
"""How long answers are: mostly short, so that clients that ask at a pace do not fill the machine."""
SAID_EVERY = 30.0
FAULTS_EVERY = 12
"""Seconds from one fault to the next, about."""


@pytest.mark.soak
@pytest.mark.skipif(not SECONDS, reason="bin/test soak sets ANVIL_SOAK_SECONDS")
def test_every_answer_is_accounted_for_while_everything_fails():
    parts = {name: FOLDER / name for name in ("processes", "containers")}
    for part in parts.values():
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    draw = random.Random(SEED)
    began = time.monotonic()
    with ExitStack() as stack:
        own = stack.enter_context(engine_of_its_own())
        made = plain_stack(parts["containers"], len(MODELS), own)
        count = int(REQUESTS * SHARE)
        loads = {
            "processes": stack.enter_context(
                process_load(parts["processes"], REQUESTS - count, draw, TOKENS, **pace(REQUESTS - count))
            ),
            "containers": container_load(
                made,
                ContainersOfTheirOwn(made, own),
                parts["containers"],
                count,
                random.Random(draw.random()),
                tuple(each for each in TOKENS if each < 1000),
                max_wait=6,
                outages=max(2, round(SECONDS / 300)),
                **pace(count),
            ),
        }
        failed = run(loads, began)
        report = told(loads, failed, time.monotonic() - began)
        (FOLDER / "report.txt").write_text(report)
        print(report)
    flawed = failed or any(any(load.flaws.values()) for load in loads.values())
    if not flawed and not KEEP:
        for part in parts.values():
            shutil.rmtree(part)
    assert not flawed, f"what it is made from is in {FOLDER}"
    for name, load in loads.items():
        assert load.count_whole() > len(load.fates) / 2, f"{name}: most requests failed, see {FOLDER}"


def pace(requests: int) -> dict[str, object]:
    """How a load is spread over the seconds."""
    often = max(1, int(requests * FAULTS_EVERY / SECONDS))
    return {
        "every": SECONDS / requests,
        "between": (often // 2, often * 3 // 2),
        "crashes": max(2, round(SECONDS / 600)),
    }


def run(loads: Mapping[str, Load], began: float) -> dict[str, BaseException]:
    """What ended a load before its time."""
    with ThreadPoolExecutor(len(loads)) as pool:
        futures: dict[str, Future[None]] = {name: pool.submit(load.run) for name, load in loads.items()}
        while wait(futures.values(), SAID_EVERY).not_done:
            now = " | ".join(f"{name}: {load.progress()}" for name, load in loads.items())
            print(f"[{time.monotonic() - began:5.0f} s] {now}", flush=True)
    errors = {name: future.exception() for name, future in futures.items()}
    return {name: error for name, error in errors.items() if error}


def told(loads: Mapping[str, Load], failed: Mapping[str, BaseException], took: float) -> str:
    lines = [f"soak of {SECONDS:.0f} s, {REQUESTS} requests, ANVIL_SOAK_SEED={SEED}; it took {took:.0f} s"]
    for name, load in loads.items():
        lines += ["", f"== {name}"]
        if name in failed:
            lines.append(f"it broke off: {failed[name]!r}; {load.progress()}")
            continue
        lines += [load.table(), "", load.by_client()]
    for name, load in loads.items():
        if any(load.flaws.values()):
            lines += ["", f"== flaws of the {name}", load.report()]
    return "\n".join(lines) + "\n"
