"""A clock for tests: real threads, one of which runs at a time, in virtual time.

Every thread passes the baton whenever it takes or leaves a lock, waits or sleeps; a seeded choice says who
goes on. When all are blocked, time jumps to the next deadline. When there is none, ``run`` raises Deadlock
with everybody's stack.
"""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from math import inf

from anvil_mux.clock import Clock


class Deadlock(AssertionError):
    """Threads that have not finished, none of which can ever go on."""


class _Task:
    def __init__(self, name: str) -> None:
        self.name = name
        self.gate = threading.Semaphore(0)
        self.deadline: float | None = None
        """None: it can run; else it is blocked, at most until then."""
        self.notified = False
        self.ident: int | None = None


class BatonClock(Clock):
    def __init__(self, seed: int = 0) -> None:
        self.time = 0.0
        self._random = random.Random(seed)
        self._tasks: list[_Task] = []
        self._current: _Task | None = None
        self._over = threading.Semaphore(0)
        self.failures: list[BaseException] = []

    def now(self) -> float:
        return self.time

    def wall(self, moment: float) -> float:
        return moment

    def lock(self) -> BatonLock:
        return BatonLock(self)

    def condition(self, lock: BatonLock) -> BatonCondition:
        return BatonCondition(self, lock)

    def spawn(self, run: Callable[[], None], name: str) -> threading.Thread:
        task = _Task(name)
        self._tasks.append(task)
        thread = threading.Thread(target=self._live, args=(task, run), name=name, daemon=True)
        thread.start()
        return thread

    def sleep(self, seconds: float) -> None:
        self.block(self.time + seconds)

    def run(self, main: Callable[[], None]) -> None:
        """Runs ``main`` and all that it spawns to their ends; raises the first failure."""
        self.spawn(main, "main")
        self._pass_on()
        self._over.acquire()
        if self.failures:
            raise self.failures[0]

    def _live(self, task: _Task, run: Callable[[], None]) -> None:
        task.ident = threading.get_ident()
        task.gate.acquire()
        try:
            run()
        except BaseException as error:
            self.failures.append(error)
        self._tasks.remove(task)
        self._pass_on()

    def block(self, deadline: float | None) -> bool:
        """The running thread waits for a ``wake``, at most until ``deadline`` (None: just lets others go)."""
        task = self._current
        assert task is not None
        task.deadline, task.notified = deadline, False
        self._pass_on()
        task.gate.acquire()
        return task.notified

    def wake(self, task: _Task) -> None:
        task.deadline, task.notified = None, True

    def current(self) -> _Task:
        assert self._current is not None
        return self._current

    def _pass_on(self) -> None:
        able = [task for task in self._tasks if task.deadline is None]
        if not able:
            self.time = min((task.deadline for task in self._tasks), default=inf)
            able = [task for task in self._tasks if task.deadline == self.time]
            if self.time == inf:
                if able:
                    self.failures.append(Deadlock(self._stacks()))
                self._over.release()
                return
        task = self._current = self._random.choice(able)
        task.deadline = None
        task.gate.release()

    def _stacks(self) -> str:
        frames = sys._current_frames()
        parts = [
            f"{task.name}:\n" + "".join(traceback.format_stack(frames[task.ident])[-4:])
            for task in self._tasks
            if task.ident in frames
        ]
        return "nobody can go on\n" + "\n".join(parts)


class BatonLock:
    def __init__(self, clock: BatonClock) -> None:
        self._clock = clock
        self._owner: _Task | None = None
        self._queue: deque[_Task] = deque()

    def __enter__(self) -> bool:
        self._clock.block(None)
        while self._owner is not None:
            self._queue.append(self._clock.current())
            self._clock.block(inf)
        self._owner = self._clock.current()
        return True

    def __exit__(self, *exc: object) -> None:
        self.leave()
        self._clock.block(None)

    def leave(self) -> None:
        assert self._owner is self._clock.current(), "released by another thread"
        self._owner = None
        while self._queue:
            self._clock.wake(self._queue.popleft())

    def check_held(self) -> None:
        assert self._owner is self._clock.current(), "a condition was used without its lock"


class BatonCondition:
    def __init__(self, clock: BatonClock, lock: BatonLock) -> None:
        self._clock = clock
        self._lock = lock
        self._waiting: list[_Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        self._lock.check_held()
        task = self._clock.current()
        self._waiting.append(task)
        self._lock.leave()
        notified = self._clock.block(inf if timeout is None else self._clock.now() + timeout)
        if not notified:
            self._waiting.remove(task)
        self._lock.__enter__()
        return notified

    def notify(self, n: int = 1) -> None:
        self._lock.check_held()
        for task in self._waiting[:n]:
            self._clock.wake(task)
        del self._waiting[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))
