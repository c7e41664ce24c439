"""The memory, threads and descriptors of a process over hours, and whether they stay what they are.

    meter = Meter(lambda: (life, pid))       # samples from a thread of its own
    meter.begin()
    ...
    meter.end()
    assert meter.flaws() == []

The samples of each life are cut into quarters. The first is its warming up; from the second to the last a
quarter's figures may grow by ``ALLOWED`` at most: the median of its memory, and the fewest threads and
descriptors that it had, since a request in flight has some of these, and a leak keeps some for ever.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

INTERVAL = 1.0
LEAST = 120
"""Samples that a life needs to be judged."""
CURVE = 20
"""Points of the curve of a life's memory."""
MIB = 1 << 20


class Usage(NamedTuple):
    """What a process has at one moment."""

    rss: float
    """MiB."""
    threads: float
    descriptors: float


ALLOWED = {"rss": (16.0, 0.1), "threads": (12.0, 0.15), "descriptors": (16.0, 0.15)}
"""Of each figure the growth that is no leak: so much, and so large a share of the second quarter's."""


class Meter:
    """``process`` tells which life there is now, and its process id."""

    def __init__(self, process: Callable[[], tuple[int, int]], interval: float = INTERVAL) -> None:
        self._process = process
        self._interval = interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="meter", daemon=True)
        self.samples: defaultdict[int, list[Usage]] = defaultdict(list)
        """By life."""

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(self._interval):
            life, pid = self._process()
            with suppress(OSError, ValueError):  # it has ended
                self.samples[life].append(usage_of(pid))

    def flaws(self) -> list[str]:
        """What grew, in lives that were long enough to tell."""
        return [
            f"in life {life} {growth}"
            for life, samples in sorted(self.samples.items())
            if len(samples) >= LEAST
            for growth in growths(quarters(samples))
        ]

    def table(self) -> list[str]:
        """The figures of each quarter of each life, and of long ones the curve of their memory."""
        rows = []
        for life, samples in sorted(self.samples.items()):
            if len(samples) < 4:
                continue
            found = quarters(samples)
            figures = "; ".join(
                f"{name} {' '.join(f'{getattr(each, name):.0f}' for each in found)}" for name in Usage._fields
            )
            rows.append(f"life {life}, {len(samples)} samples, quarters: {figures}")
            if len(samples) >= LEAST:
                curve = " ".join(f"{each.rss:.0f}" for each in parts(samples, CURVE))
                rows.append(f"life {life}, its memory in {CURVE} parts of that time, MiB: {curve}")
        return rows


def usage_of(pid: int) -> Usage:
    """What a process has now; OSError when there is none."""
    text = Path(f"/proc/{pid}/status").read_text()
    said = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if "VmRSS" not in said:
        raise ProcessLookupError(pid)
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return Usage(int(said["VmRSS"].split()[0]) * 1024 / MIB, int(said["Threads"]), descriptors)


def quarters(samples: Sequence[Usage]) -> list[Usage]:
    """The figures of each quarter, of at least four samples."""
    return parts(samples, 4)


def parts(samples: Sequence[Usage], count: int) -> list[Usage]:
    """The figures of ``count`` parts of equal length, of at least as many samples."""
    cuts = [len(samples) * number // count for number in range(count + 1)]
    columns = (zip(*samples[since:until], strict=True) for since, until in pairwise(cuts))
    return [Usage(median(rss), min(threads), min(descriptors)) for rss, threads, descriptors in columns]


def growths(figures: Sequence[Usage]) -> list[str]:
    """Which figures of the last quarter are larger than the second quarter's allow."""
    second, last = figures[1], figures[-1]
    found = []
    for name, (amount, share) in ALLOWED.items():
        before, after = getattr(second, name), getattr(last, name)
        if after > before * (1 + share) + amount:
            found.append(f"{name} grew from {before:.0f} to {after:.0f}")
    return found
