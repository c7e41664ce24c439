"""How long a request's choice among 64 replicas takes, by policy, on one core.

The prompt has 131,072 tokens in blocks of 512 and every replica has seen its beginning: a sixty-fourth of it
the first, all of it the last. Each replica has eight requests. A choice is all that happens under the lock:
the look into the caches, the metrics, the filters, the selector, and the charge. What a client sends is read
before, outside the lock, and timed apart: JSON to blocks, for a body of as many tokens.

The promise is less than 1 ms for a choice. Nothing here passes or fails.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

from anvil_mux.config.config import Backend
from anvil_mux.config.values import Profile
from anvil_mux.routing import pipeline, prefix
from anvil_mux.routing.in_flight import InFlightTracker
from anvil_mux.routing.routing import Work

TOKENS, BLOCK, REPLICAS, BUSY = 131_072, 512, 64, 8
FAST = Profile(((0, 0.0), (8192, 100.0)), ((1, ((0, 5.0), (1e6, 6.0))), (64, ((0, 6.0), (1e6, 9.0)))))
WORK = Work(TOKENS, tuple(range(1, TOKENS // BLOCK + 1)), BLOCK, "session")


def loaded(policy: str) -> tuple[InFlightTracker, list[str]]:
    names = [f"replica-{number}" for number in range(REPLICAS)]
    in_flight = InFlightTracker(
        pipeline.build(policy), [Backend(name, "m", kv_tokens=2 * TOKENS, profile=FAST) for name in names]
    )
    for number, name in enumerate(names):
        known = WORK.blocks[: (number + 1) * len(WORK.blocks) // REPLICAS]
        for nth in range(BUSY):
            in_flight.choose((name, nth), WORK._replace(blocks=known), [name])
            if nth % 2:
                in_flight.first_byte((name, nth))
    return in_flight, names


def choice_seconds(policy: str) -> float:
    in_flight, names = loaded(policy)

    def choose() -> None:
        choice = in_flight.choose("new", WORK, names)
        assert choice is not None
        assert choice.why
        in_flight.ended("new")

    return _seconds(choose)


def read_seconds() -> float:
    messages = [
        {"role": "user", "content": f"{number:06} " + "word and so on " * 270} for number in range(128)
    ]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    return _seconds(lambda: prefix.read("m", body, 4.0))


def _seconds(call: Callable[[], object], times: int = 200) -> float:
    """The median of several rounds of CPU time for one call."""
    rounds = []
    for _ in range(5):
        begun = time.process_time()
        for _ in range(times):
            call()
        rounds.append((time.process_time() - begun) / times)
    return median(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = {policy: choice_seconds(policy) * 1e6 for policy in pipeline.shipped()}
    rows["(reading the request)"] = read_seconds() * 1e6
    if given.json:
        print(json.dumps(rows))
        return
    for name, microseconds in rows.items():
        print(f"{name:28} {microseconds:8.0f} us")


if __name__ == "__main__":
    main()
