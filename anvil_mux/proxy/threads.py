"""Threads that serve requests, and the CPU that they run on.

To begin a thread costs more than a small request does. So one that has nothing to do stays for a while, and
the one that was busy last is taken first: its stack is still in the CPU's cache, and the others can end.

Python runs one thread at a time. A thread that wakes on a second CPU finds the interpreter taken, and the
handing over from CPU to CPU costs a third more CPU for each request; when a thousand streams begin together
their first bytes come several times later (docs/performance.md). So the threads that accept, serve, move
streams and count run on one CPU, as ``taskset`` would have it. No other thread does, so engines, which
inherit the CPUs of the thread that starts them, may always use all.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from _thread import allocate_lock
from collections.abc import Callable
from pathlib import Path

SPARE_SECONDS = 10.0
"""How long a thread stays that has nothing to do."""

log = logging.getLogger(__name__)

Task = Callable[[], object]


class Threads:
    """Runs tasks, each in a thread of its own while it lasts. ``run`` is for one thread."""

    def __init__(self) -> None:
        self._idle: list[_Spare] = []
        """The threads without a task. Each adds itself, and whoever takes one out has it."""
        self._numbers = itertools.count(1)

    def run(self, task: Task) -> None:
        """Have a thread do ``task``; RuntimeError if none can be begun."""
        try:
            spare = self._idle.pop()
        except IndexError:
            spare = _Spare(task)
            threading.Thread(
                target=self._work, args=(spare,), name=f"request-{next(self._numbers)}", daemon=True
            ).start()
        else:
            spare.task = task
            spare.comes.release()

    def _work(self, spare: _Spare) -> None:
        while task := spare.task:
            spare.task = None
            try:
                task()
            except Exception:
                log.exception("a connection failed")
            del task  # it holds its connection
            self._idle.append(spare)
            if not spare.comes.acquire(timeout=SPARE_SECONDS):
                try:
                    self._idle.remove(spare)
                except ValueError:
                    spare.comes.acquire()  # it was taken at this very moment


class _Spare:
    """A thread for one task after another: its next one, and the latch that says that there is one."""

    __slots__ = ("comes", "task")

    def __init__(self, task: Task) -> None:
        self.task: Task | None = task
        self.comes = allocate_lock()
        self.comes.acquire()


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
