"""One CPU for the threads that serve requests, as ``taskset`` would give it to a program.

Python runs one thread at a time. A thread that wakes on a second CPU finds the interpreter taken, and the
handing over from CPU to CPU costs a third more CPU for each request; when a thousand streams begin together
their first bytes come several times later (docs/performance.md). So the threads that accept, serve, move
streams and count run on one CPU. No other thread does, so engines, which inherit the CPUs of the thread that
starts them, may always use all.
"""

from __future__ import annotations

import os
from pathlib import Path

SLOW = 0.9
"""The part of the highest clock rate below which a CPU is slow, as the efficient cores of some machines."""

CPUs = frozenset[int]


def one_cpu(process: int, root: Path = Path("/sys/devices/system/cpu")) -> CPUs:
    """A CPU that is not slow, of those that the program may use; its process id chooses among them.

    So several programs on one machine have several CPUs.
    """
    found = sorted(_fast(CPUs(os.sched_getaffinity(0)), root))
    return CPUs([found[process % len(found)]])


def _fast(cpus: CPUs, root: Path) -> CPUs:
    """The CPUs that are not slow; all of them where nothing is known, as in virtual machines."""
    try:
        rates = {cpu: int((root / f"cpu{cpu}/cpufreq/cpuinfo_max_freq").read_text()) for cpu in cpus}
    except (OSError, ValueError):
        return cpus
    return CPUs(cpu for cpu, rate in rates.items() if rate >= SLOW * max(rates.values()))


def run_on(cpus: CPUs) -> None:
    """Have the calling thread, and those that it begins, run on these CPUs alone."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        pass  # the CPU was taken away; the thread runs elsewhere
