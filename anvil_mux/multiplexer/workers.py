"""The threads that perform steps: one for each that is under way, all begun by one that waits for them.

That one was started before anything was served: what it starts, and the engines that those start, inherit its
CPUs and its scheduling class, and never those of a connection's thread. It also says when time has passed. A
step for which no thread can be started has failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, TypeVar

from anvil_mux.clock import AFTER_MISTAKE_SECONDS, Clock, Lock, safely
from anvil_mux.scheduler.policies import FOREVER

_Job = TypeVar("_Job")


class Workers(Generic[_Job]):
    """Performs jobs, each in a thread of its own, and calls ``time_passed`` at the moment that was set.

    ``perform(job)`` and ``time_passed()`` are called without the lock. ``failed(job, why)``: no thread could
    be started for it. ``name(job)``: whom it is done to.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        lock: Lock,
        perform: Callable[[_Job], None],
        failed: Callable[[_Job, str], None],
        time_passed: Callable[[], None],
        name: Callable[[_Job], str],
    ) -> None:
        self._clock = clock
        self._lock = lock
        self._perform = perform
        self._failed = failed
        self._time_passed = time_passed
        self._name = name
        # The lock guards what follows.
        self._changed = clock.condition(lock)
        self._jobs: deque[_Job] = deque()
        self._ask_at = -FOREVER
        self._started = self._closed = False

    def start(self) -> None:
        """Begins; the threads run on the CPUs of the thread that calls this."""
        with self._lock:
            if self._started:
                return
            self._started = True
        self._clock.spawn(self._run, "scheduler")

    def ask_at(self, moment: float) -> None:
        """Set the moment at which ``time_passed`` is due. Under the lock."""
        if moment < self._ask_at:
            self._changed.notify()
        self._ask_at = moment

    def submit(self, jobs: Iterable[_Job]) -> None:
        """Has jobs performed, begun in this order. Not under the lock."""
        with self._lock:
            self._jobs.extend(jobs)
            self._changed.notify()

    def close(self) -> None:
        """Begins nothing any more. Under the lock."""
        self._closed = True
        self._changed.notify()

    def _run(self) -> None:
        goes_on: bool | None = True
        while goes_on or goes_on is None:
            goes_on = safely("scheduler", self._turn, None)
            if goes_on is None:  # after a mistake, without this thread nothing is ever swapped again
                with self._lock:
                    self._ask_at = self._clock.now() + AFTER_MISTAKE_SECONDS

    def _turn(self) -> bool:
        """Begin a job or say that time has passed, when that is due; False once it is closed."""
        with self._lock:
            while not (self._jobs or self._closed or self._ask_at <= self._clock.now()):
                self._changed.wait(None if self._ask_at == FOREVER else self._ask_at - self._clock.now())
            if self._closed:
                return False
            job = self._jobs.popleft() if self._jobs else None
        if job is None:
            self._time_passed()
        else:
            self._begin(job)
        return True

    def _begin(self, job: _Job) -> None:
        try:
            self._clock.spawn(partial(self._perform, job), f"step-{self._name(job)}")
        except (RuntimeError, MemoryError) as error:
            self._failed(job, f"no thread can be started: {error}")
