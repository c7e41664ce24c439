"""A clock for tests: real threads, one of which runs at a time, in virtual time.

A thread passes the baton whenever it takes or leaves a lock, waits or sleeps; a seeded choice says who goes
on. When all are blocked, time jumps to the next deadline. When there is none, ``run`` raises Deadlock.
"""

import random
import sys
import threading
import traceback
from math import inf

from anvil_mux.clock import Clock


class Deadlock(AssertionError):
    """Threads that have not finished, none of which can ever go on; with the stack of each."""


class _Task:
    def __init__(self):
        self.gate = threading.Semaphore(0)
        self.until = 0.0  # it can go on from this moment
        self.woken = False
        self.thread = None


class BatonClock(Clock):
    def __init__(self, seed=0):
        self.time = 0.0
        self._random = random.Random(seed)
        self._tasks = []
        self.running = None
        self._over = threading.Semaphore(0)
        self._failures = []

    def now(self):
        return self.time

    def lock(self):
        return _Lock(self)

    def condition(self, lock):
        return _Condition(self, lock)

    def latch(self):
        return _Latch(self)

    def sleep(self, seconds):
        self.block(self.time + seconds)

    def spawn(self, run, name):
        task = _Task()
        task.thread = threading.Thread(target=self._live, args=(task, run), name=name, daemon=True)
        self._tasks.append(task)
        task.thread.start()
        return task.thread

    def run(self, main):
        """Runs ``main`` and all that it spawns to their ends; raises the first failure."""
        self.spawn(main, "main")
        self._pass_on()
        self._over.acquire()
        if self._failures:
            raise self._failures[0]

    def _live(self, task, run):
        task.gate.acquire()
        try:
            run()
        except BaseException as error:
            self._failures.append(error)
        self._tasks.remove(task)
        self._pass_on()

    def block(self, until=0.0):
        """The running thread waits for ``wake`` or ``until``, or just lets others go first."""
        task = self.running
        task.until, task.woken = until, False
        self._pass_on()
        task.gate.acquire()
        return task.woken

    def wake(self, task):
        task.until, task.woken = 0.0, True

    def _pass_on(self):
        moment = min((task.until for task in self._tasks), default=inf)
        if moment == inf:
            if self._tasks:
                self._failures.append(Deadlock("\n".join(self._stacks())))
            self._over.release()
            return
        self.time = max(self.time, moment)
        self.running = self._random.choice([task for task in self._tasks if task.until <= self.time])
        self.running.gate.release()

    def _stacks(self):
        frames = sys._current_frames()
        for task in self._tasks:
            stack = traceback.format_stack(frames[task.thread.ident])
            yield f"{task.thread.name} cannot go on:\n" + "".join(stack[-5:-2])


class _Lock:
    def __init__(self, clock):
        self._clock = clock
        self.owner = None
        self._queue = []

    def __enter__(self):
        self._clock.block()
        while self.owner:
            self._queue.append(self._clock.running)
            self._clock.block(inf)
        self.owner = self._clock.running
        return True

    def __exit__(self, *exc):
        self.leave()
        self._clock.block()

    def leave(self):
        assert self.owner is self._clock.running, "the lock is not held"
        self.owner = None
        while self._queue:
            self._clock.wake(self._queue.pop())


class _Latch:
    def __init__(self, clock):
        self._clock = clock
        self._task = None
        self._is_set = False

    def wait(self, timeout):
        self._task = self._clock.running
        woken = self._is_set or self._clock.block(self._clock.time + max(timeout, 0.0))
        self._task = None
        return woken or self._is_set

    def set(self):
        assert not self._is_set, "a latch is set once"
        self._is_set = True
        if self._task:
            self._clock.wake(self._task)


class _Condition:
    def __init__(self, clock, lock):
        self._clock = clock
        self._lock = lock
        self._waiting = []

    def wait(self, timeout=None):
        task = self._clock.running
        self._waiting.append(task)
        self._lock.leave()
        woken = self._clock.block(inf if timeout is None else self._clock.time + timeout)
        if not woken:
            self._waiting.remove(task)
        self._lock.__enter__()
        return woken

    def notify(self, n=1):
        assert self._lock.owner is self._clock.running, "the lock is not held"
        for task in self._waiting[:n]:
            self._clock.wake(task)
        del self._waiting[:n]

    def notify_all(self):
        self.notify(len(self._waiting))
