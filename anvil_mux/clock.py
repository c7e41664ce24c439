"""Time, locks and threads in one replaceable object.

Everything that waits in the multiplexer gets its locks, conditions, latches and threads from a ``Clock``, so
that tests can run the real threaded program in virtual time, one runnable thread at a time. Moments are
seconds on one monotonic scale; ``wall`` translates a moment for people.

A thread that does one small thing again and again in the background is a ``Worker``, and always in real time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

log = logging.getLogger(__name__)

AFTER_MISTAKE_SECONDS = 1.0
"""A turn that raised is followed by the next one so much later."""

_T = TypeVar("_T")


class Condition(Protocol):
    """The part of ``threading.Condition`` that the multiplexer uses; its lock is held around every call."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def notify(self, n: int = 1) -> None: ...
    def notify_all(self) -> None: ...


class Latch(Protocol):
    """A gate at which one thread waits until another opens it, once."""

    def wait(self, timeout: float) -> bool: ...
    def set(self) -> None: ...


class _Latch:
    """A lock that is taken until it is set: a tenth of the price of ``threading.Event``."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, timeout: float) -> bool:
        return self._lock.acquire(timeout=max(timeout, 0.0))

    def set(self) -> None:
        self._lock.release()


Lock = AbstractContextManager[bool]


class Clock:
    """Real time and real threads."""

    now = staticmethod(time.monotonic)

    def lock(self) -> Lock:
        return threading.Lock()

    def condition(self, lock: Lock) -> Condition:
        return threading.Condition(lock)  # type: ignore[arg-type]

    def latch(self) -> Latch:
        return _Latch()

    def spawn(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Starts ``run`` in a daemon thread."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def wall(self, moment: float) -> float:
        """The Unix time of a moment of this clock."""
        return time.time() - (self.now() - moment)


class Worker:
    """A daemon thread that takes turns, until it is closed.

    ``turn`` returns the seconds until the next turn, or None: not before ``wake`` asks for it. The first one
    is taken ``first`` seconds after ``start``. A turn that raises is logged, and the next one follows.
    ``last`` is called in the thread after the last turn. A thread that was woken waits ``gather`` seconds for
    more to come before it takes its turn, unless it is hurried.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], float | None],
        *,
        first: float | None = 0.0,
        last: Callable[[], object] = lambda: None,
        gather: float = 0.0,
    ) -> None:
        self.was_woken = False
        """Whether the turn under way was asked for, and is not taken because its time has come."""
        self._turn = turn
        self._first = first
        self._last = last
        self._gather = gather
        self._closing = False
        self._woken = threading.Event()
        self._hurried = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins; the thread runs on the CPUs of the thread that calls this."""
        self._thread.start()

    def wake(self) -> None:
        """Asks for a turn that begins after this call. Any thread; never blocks."""
        if not self._woken.is_set():
            self._woken.set()

    def hurry(self) -> None:
        """Asks for a turn at once."""
        self._hurried.set()
        self._woken.set()

    def close(self) -> None:
        """Begins no further turn; does not wait for the one under way."""
        self._closing = True
        self.hurry()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the thread has ended after ``close``; False if it has not."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = self._first
        while True:
            self.was_woken = self._woken.wait(pause)
            if self.was_woken and self._gather:
                self._hurried.wait(self._gather)
            # Whoever wakes it from here on gets another turn; so nothing is left behind.
            self._woken.clear()
            self._hurried.clear()
            if self._closing:
                break
            pause = self._safely(self._turn)
        self._safely(self._last)

    def _safely(self, do: Callable[[], _T]) -> _T | float:
        try:
            return do()
        except Exception:
            log.exception("a mistake in the thread %s", self._thread.name)
            return AFTER_MISTAKE_SECONDS
