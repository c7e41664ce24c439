"""Time, locks and threads in one replaceable object.

Everything that waits in the multiplexer gets its locks, conditions, latches and threads from a ``Clock``, so
that tests can run the real threaded program in virtual time, one runnable thread at a time. Moments are
seconds on one monotonic scale; ``wall`` translates a moment for people.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Condition(Protocol):
    """What the multiplexer uses of ``threading.Condition``; its lock is held around every call."""

    def wait(self, timeout: float | None = None) -> bool: ...
    def notify(self, n: int = 1) -> None: ...
    def notify_all(self) -> None: ...


class Latch(Protocol):
    """What one thread waits for and another sets, once."""

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
