"""Time, locks and threads in one replaceable object.

Everything that waits in the multiplexer gets its lock, its conditions and its threads from a ``Clock``, so
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


Lock = AbstractContextManager[bool]


class Clock:
    """Real time and real threads."""

    def now(self) -> float:
        return time.monotonic()

    def lock(self) -> Lock:
        return threading.Lock()

    def condition(self, lock: Lock) -> Condition:
        return threading.Condition(lock)  # type: ignore[arg-type]

    def spawn(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Starts ``run`` in a daemon thread."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def wall(self, moment: float) -> float:
        """The Unix time of a moment of this clock."""
        return time.time() - (self.now() - moment)
