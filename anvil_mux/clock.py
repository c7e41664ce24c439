"""Time, locks and threads in one replaceable object.

Everything that waits in the multiplexer gets its locks, conditions, latches and threads from a ``Clock``, so
that tests can run the real threaded program in virtual time, one runnable thread at a time. Moments are
seconds on one monotonic scale; ``wall`` translates a moment for people.

A thread that does one small thing again and again in the background is a ``Worker``, and always in real time.
What goes wrong in a turn ends the turn and never the thread; ``mistakes`` tells of it until a turn succeeds.
A thread that the program needs all the time is ``essential``: an error that ends it ends the program.

Times and counts that come from outside, in requests or in files, are read by ``seconds_in`` and ``count_in``,
which look at a few characters; a time is at most a year.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

log = logging.getLogger(__name__)

AFTER_MISTAKE_SECONDS = 1.0
"""A turn that raised is followed by the next one so much later."""

LONGEST_POLL = 2**31 - 1
"""The milliseconds that ``poll`` takes at most: 24 days."""
YEAR_SECONDS = 365 * 86400.0
"""The longest time that a request or a setting may say."""
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_MOST_CHARACTERS, _MOST_DIGITS = 64, 16
MOST_COUNT = 10**15
"""The greatest whole number that a request, a setting or an engine may say."""
_NUMBER = r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+"
"""Can be read in one way only, so that what does not fit is known after one pass."""
_UNIT = "(ms|us|µs|μs|ns|h|m|s)"
_PLAIN, _PARTS, _SPLIT = re.compile(_NUMBER), re.compile(rf"(?:(?:{_NUMBER}){_UNIT})+"), re.compile(_UNIT)

_T = TypeVar("_T")
_D = TypeVar("_D")
_I = TypeVar("_I")

_mistakes: dict[str, str] = {}


def _go_on(thread: str) -> None:
    """Do nothing; ``watch_threads`` replaces this."""


_end_program: Callable[[str], object] = _go_on


def seconds_in(text: str) -> float | None:
    """The seconds that a text says: a number of them, or a time as Go writes it, such as 1h30m; None for any
    other text.
    """
    if len(text) > _MOST_CHARACTERS:
        return None
    if _PLAIN.fullmatch(text):
        return float(text)
    if not _PARTS.fullmatch(text):
        return None
    parts = _SPLIT.split(text)
    return sum(float(number) * _UNITS[unit] for number, unit in zip(parts[::2], parts[1::2], strict=False))


def count_in(text: str, most: int = MOST_COUNT) -> int | None:
    """The whole number that a text says in plain digits; None for any other text, and beyond ``most``."""
    is_count = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if is_count and int(text) <= most else None


def mistakes() -> dict[str, str]:
    """Thread -> what went wrong in its last turn, or what it ended of. Any thread."""
    return dict(_mistakes)


def watch_threads(end_program: Callable[[str], object]) -> None:
    """Note, for ``mistakes``, every thread that ends by an error.

    ``end_program`` is called with the name of one that is ``essential``, in that thread.
    """
    global _end_program
    _end_program = end_program

    def ended(about: threading.ExceptHookArgs) -> None:
        _note_end(about.thread.name if about.thread else "?", about.exc_value)

    threading.excepthook = ended


def essential(name: str, run: Callable[[], object]) -> Callable[[], None]:
    """Return ``run`` as the life of a thread that the program cannot live without."""

    def life() -> None:
        try:
            run()
        except BaseException as error:
            _note_end(name, error)
            _end_program(name)

    return life


def _note_end(thread: str, error: BaseException | None) -> None:
    log.error("the thread %s has ended", thread, exc_info=error)
    _mistakes[thread] = f"ended: {_in_words(error)}"


def safely(thread: str, do: Callable[[], _T], default: _D) -> _T | _D:
    """Take a turn of ``thread``, and return what it returns; ``default`` after a mistake, which is told."""
    try:
        found = do()
    except (Exception, SystemExit) as error:  # sys.exit() in a plug-in ends no thread of ours
        note_mistake(thread, error)
        return default
    _mistakes.pop(thread, None)
    return found


def note_mistake(thread: str, error: BaseException) -> None:
    """Log what went wrong with a part of a turn of ``thread``, and have ``mistakes`` tell it for a while."""
    log.error("a mistake in the thread %s", thread, exc_info=error)
    _mistakes[thread] = _in_words(error)


def _in_words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"[:300]


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
        return self._lock.acquire(timeout=_clamped(timeout))

    def set(self) -> None:
        self._lock.release()


class _Condition(threading.Condition):
    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(None if timeout is None else _clamped(timeout))


def _clamped(timeout: float) -> float:
    """The longest wait that the system takes, if ``timeout`` is longer, or no number."""
    return max(0.0, min(threading.TIMEOUT_MAX, timeout))


Lock = AbstractContextManager[bool]


class Clock:
    """Real time and real threads."""

    now = staticmethod(time.monotonic)

    def lock(self) -> Lock:
        return threading.Lock()

    def condition(self, lock: Lock) -> Condition:
        return _Condition(lock)  # type: ignore[arg-type]

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


def side_by_side(do: Callable[[_I], _T], items: Sequence[_I]) -> list[_T]:
    """Call a function for each item, each in a thread of its own, since it may take long."""
    with ThreadPoolExecutor(len(items) or 1) as pool:
        return list(pool.map(do, items))


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
            self.was_woken = self._woken.wait(None if pause is None else _clamped(pause))
            if self.was_woken and self._gather:
                self._hurried.wait(self._gather)
            # Whoever wakes it from here on gets another turn; so nothing is left behind.
            self._woken.clear()
            self._hurried.clear()
            if self._closing:
                break
            pause = safely(self._thread.name, self._turn, AFTER_MISTAKE_SECONDS)
        safely(self._thread.name, self._last, None)
        _mistakes.pop(self._thread.name, None)
