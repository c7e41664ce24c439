"""Threads that serve requests: an idle one is used again before another is begun.

To begin a thread costs more than a small request does. So one that has nothing to do stays for a while, and
the one that was busy last is taken first: its stack is still in the CPU's cache, and the others can end.
"""

from __future__ import annotations

import itertools
import logging
import threading
from _thread import allocate_lock
from collections.abc import Callable

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
