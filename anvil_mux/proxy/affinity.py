"""The threads that serve requests run on one CPU, as long as nobody else needs it.

Python runs one thread at a time. A thread that wakes on a second CPU finds the interpreter taken, and the
handing over from CPU to CPU costs more than a small request does: on one CPU the same threads serve twice as
many, and when a thousand streams begin together their first bytes come fifty times sooner
(docs/performance.md). But threads that may not leave a CPU are worse off than free ones as soon as somebody
else fills it. So they have one of them as their home:

* free -> home: others leave ``ROOM`` of a CPU in the whole machine. The home is the fast CPU that is used
  least.
* home -> free: the home is full, and others use ``CROWDED`` of it. Then there is none for ``RETRY_SECONDS``.

``look`` is for one thread, which calls it now and then. It moves nobody: the threads that accept, serve, move
streams and count move themselves by ``follow`` before they go on. No other thread does, so engines, which
inherit the CPUs of the thread that starts them, may always use all.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

LOOK_SECONDS = 0.5
FULL = 0.1
"""Share of a CPU that is idle when it is full."""
CROWDED = 0.2
"""Share of a full home that others use when it is given up."""
ROOM = 0.9
"""Share of a CPU that others must leave over."""
RETRY_SECONDS = 10.0
SLOW = 0.9
"""The part of the highest clock rate below which a CPU is slow, as the efficient cores of some machines."""

CPUs = frozenset[int]


class CpuTime(NamedTuple):
    """Seconds of one CPU."""

    used: float = 0.0
    idle: float = 0.0


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU seconds so far."""

    own: float
    """The program's."""
    cpus: Mapping[int, CpuTime]
    """CPU -> everybody's."""


def usage() -> CpuUsage:
    """Read it from the kernel. Interrupts are left out: most of them are the program's own traffic."""
    return CpuUsage(time.process_time(), _by_cpu())


def _by_cpu() -> dict[int, CpuTime]:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    cpus = {}
    try:
        with open("/proc/stat") as stat:
            for line in stat:
                if not line.startswith("cpu"):
                    break
                name, user, nice, system, idle, io_wait, *_ = line.split()
                if name != "cpu":
                    used = int(user) + int(nice) + int(system)
                    cpus[int(name[3:])] = CpuTime(used * tick, (int(idle) + int(io_wait)) * tick)
    except OSError:
        pass  # nothing is known, and so nothing decided
    return cpus


def fast(cpus: CPUs, root: Path = Path("/sys/devices/system/cpu")) -> CPUs:
    """The CPUs that are not slow; all of them where nothing is known, as in virtual machines."""
    try:
        rates = {cpu: int((root / f"cpu{cpu}/cpufreq/cpuinfo_max_freq").read_text()) for cpu in cpus}
    except (OSError, ValueError):
        return cpus
    return CPUs(cpu for cpu, rate in rates.items() if rate >= SLOW * max(rates.values()))


class _CPUsOfThread(threading.local):
    """The CPUs on which the calling thread runs, if it ever moved.

    (A local without this default would make an AttributeError, and its text, for each request.)
    """

    cpus: CPUs | None = None


class Affinity:
    """``allowed`` are the CPUs of the program; if they are not all that there are, somebody chose them.

    ``pin``: whether the threads always run on one of them, or never; None: as the theory above has it.
    """

    def __init__(
        self,
        allowed: CPUs,
        *,
        pin: bool | None = None,
        usage: Callable[[], CpuUsage] = usage,
        fast: Callable[[CPUs], CPUs] = fast,
    ) -> None:
        self.everywhere = allowed
        self._fast = fast(allowed)
        self.cpus = CPUs([max(self._fast)]) if pin else allowed
        """The CPUs for these threads. Another object each time that they change."""
        self._usage = usage
        self._last, self._looked = usage(), float("-inf")
        self._adapts = pin is None and len(allowed) > 1 and allowed == self._last.cpus.keys()
        self._retry_at = 0.0
        self._thread = _CPUsOfThread()

    def follow(self) -> None:
        """Move the calling thread to ``cpus``, if it is not there."""
        cpus = self.cpus
        if cpus is (self._thread.cpus or self.everywhere):
            return
        self._thread.cpus = cpus
        try:
            os.sched_setaffinity(0, cpus)
        except OSError:
            pass  # a CPU was taken away; the thread runs elsewhere

    def look(self, now: float) -> None:
        """Decide where the threads run from now on."""
        seconds = now - self._looked
        if not self._adapts or seconds < LOOK_SECONDS:
            return
        before, last = self._last, self._usage()
        self._last, self._looked = last, now
        own = (last.own - before.own) / seconds
        used, idle = _shares(before, last, seconds)
        if self.cpus is not self.everywhere:
            [home] = self.cpus
            if idle.get(home, 0.0) < FULL and used.get(home, 0.0) - own > CROWDED:
                self.cpus = self.everywhere
                self._retry_at = now + RETRY_SECONDS
        elif sum(idle.values()) + own > ROOM and now >= self._retry_at:
            self.cpus = CPUs([max(self._fast, key=lambda cpu: (-used.get(cpu, 1.0), cpu))])


def _shares(before: CpuUsage, last: CpuUsage, seconds: float) -> tuple[dict[int, float], dict[int, float]]:
    """The share of each CPU that was used in these seconds, and the one that was idle."""
    used, idle = {}, {}
    for cpu, now in last.cpus.items():
        then = before.cpus.get(cpu, now)
        used[cpu], idle[cpu] = (now.used - then.used) / seconds, (now.idle - then.idle) / seconds
    return used, idle
