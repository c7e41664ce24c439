"""The threads of connections run on one CPU, as long as nobody else needs it.

Python runs one thread at a time. A thread that wakes on a second CPU finds the interpreter taken, and the
handing over from CPU to CPU costs more than a small request does: on one CPU the same threads serve twice as
many. But threads that may not leave a CPU are worse off than free ones as soon as somebody else wants it. So
they are kept on one of them, their home, only while there are many requests, and only in a machine with room:

* free -> home: between two looks the program used ``BUSY`` of a CPU, while all others left one CPU of the
  machine to it. The home is the CPU on which most of its threads ran last: the kernel has chosen well.
* home -> free: the program is hardly busy any more (a free thread wakes on whichever CPU is idle), or others
  use ``CROWDED`` of the home. Then there is no home for ``RETRY_SECONDS``.

``look`` is for one thread, which calls it now and then. It moves nobody: a connection's thread compares
``cpus`` with what it saw last and moves itself by ``settle`` before its next request. No other thread
settles, so engines, which inherit the CPUs of the thread that starts them, are always free.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice

LOOK_SECONDS = 0.5
BUSY = 0.8
"""Share of a CPU that the program uses when its threads get into each other's way."""
QUIET = 0.4
CROWDED = 0.2
"""Share of the home that others use when there is no room there."""
ROOM = 0.9
"""Share of a CPU that others must leave over."""
RETRY_SECONDS = 10.0
THREADS = 64
"""How many threads are asked where they are."""

CPUs = frozenset[int]


@dataclass(frozen=True, slots=True)
class CpuUsage:
    """CPU seconds used so far."""

    own: float
    """CPU seconds of the program."""
    cpus: Mapping[int, float]
    """CPU -> its seconds, used by everybody."""


def usage() -> CpuUsage:
    """Read it from the kernel. Interrupts are left out: most of them are the program's own traffic."""
    return CpuUsage(time.process_time(), _by_cpu())


def _by_cpu() -> dict[int, float]:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    cpus = {}
    try:
        with open("/proc/stat") as stat:
            for line in stat:
                if not line.startswith("cpu"):
                    break
                name, user, nice, system, *_ = line.split()
                if name != "cpu":
                    cpus[int(name[3:])] = (int(user) + int(nice) + int(system)) * tick
    except OSError:
        pass  # nothing is known, and so nothing decided
    return cpus


def whereabouts() -> int:
    """The CPU on which most threads of the program ran last."""
    ran_on: Counter[int] = Counter()
    with os.scandir("/proc/self/task") as threads:
        for thread in islice(threads, THREADS):
            try:
                with open(f"{thread.path}/stat") as stat:
                    ran_on[int(stat.read().rpartition(")")[2].split()[36])] += 1
            except OSError:
                pass  # it has ended
    return ran_on.most_common(1)[0][0]


class Affinity:
    """``allowed`` are the CPUs of the program; if they are not all that there are, somebody chose them."""

    def __init__(
        self,
        allowed: CPUs,
        *,
        adapts: bool = True,
        usage: Callable[[], CpuUsage] = usage,
        whereabouts: Callable[[], int] = whereabouts,
        elsewhere: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.everywhere = allowed
        self.cpus = allowed
        """The CPUs for threads of connections. Another object each time that they change."""
        self._usage = usage
        self._whereabouts = whereabouts
        self._elsewhere = elsewhere
        """CPU seconds of busy threads that never settle."""
        self._last, self._looked = self._read(), float("-inf")
        self._adapts = adapts and len(allowed) > 1 and allowed == self._last.cpus.keys()
        self._retry_at = 0.0

    def _read(self) -> CpuUsage:
        usage = self._usage()
        return replace(usage, own=usage.own - self._elsewhere())

    def settle(self) -> CPUs:
        """Moves the calling thread to ``cpus``, and returns them."""
        cpus = self.cpus
        try:
            os.sched_setaffinity(0, cpus)
        except OSError:
            pass  # a CPU was taken away; the thread runs elsewhere
        return cpus

    def look(self, now: float) -> None:
        """Decides where the threads run from now on."""
        seconds = now - self._looked
        if not self._adapts or seconds < LOOK_SECONDS:
            return
        before, last = self._last, self._read()
        self._last, self._looked = last, now
        own = (last.own - before.own) / seconds
        used = {cpu: (last.cpus.get(cpu, 0.0) - before.cpus.get(cpu, 0.0)) / seconds for cpu in self.cpus}
        others = sum(used.values()) - own
        if self.cpus is self.everywhere:
            if own > BUSY and len(used) - others > ROOM and now >= self._retry_at:
                self.cpus = CPUs([self._whereabouts()])
        elif others > CROWDED or own < QUIET:
            self.cpus = self.everywhere
            if others > CROWDED:
                self._retry_at = now + RETRY_SECONDS
