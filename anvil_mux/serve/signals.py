"""The signals that the program is sent: reload, end, end at once."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType

from anvil_mux.telemetry.accesslog import write_some
from anvil_mux.telemetry.journal import STDERR

INTERRUPTED = 130
RELOAD, END = "reload", "end"
SAME_SECONDS = 0.5
"""Signals so close to the first are one: whoever sends it to a process and its group sends it twice."""


class Signals:
    """SIGHUP is a reload, the first SIGTERM or SIGINT an end; the second ends the program at once.

    A handler may run in the middle of anything, even of itself, so it takes no lock and writes no buffer. A
    SIGHUP that comes because the terminal was closed is an end too.
    """

    def __init__(self) -> None:
        self._told: float | None = None  # the moment of the first SIGTERM or SIGINT
        self._reloads = 0
        self._reloaded = 0
        self._is_over = False
        # The kernel may give a signal to any thread, but its handler waits for the main thread to run Python
        # again: this wakes that.
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)
        ends = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        self._terminal = ends and _has_terminal()
        self._printed_on = [output for output in (1, 2) if os.isatty(output)]
        signal.signal(signal.SIGHUP, self._hang_up)

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        if self._terminal and not _has_terminal():
            for output in self._printed_on:  # else the farewell fails
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            self._tell(number, frame)
        else:
            self._reloads += 1

    def _tell(self, _number: int, _frame: FrameType | None) -> None:
        if self._told is None:
            self._told = time.monotonic()
        elif time.monotonic() - self._told > SAME_SECONDS:
            with suppress(OSError):
                write_some(STDERR, b"anvil-mux: ended at once; engines run on\n", 0.0)
            os._exit(INTERRUPTED)

    def end(self) -> None:
        """End the program as the first SIGTERM does, which may still come, or have come. Any thread."""
        self._is_over = True
        with suppress(BlockingIOError):  # it is awake
            os.write(self._waker, b"\0")

    def wait(self) -> str:
        """Signals that come while a reload is under way lead to one more."""
        while self._told is None and not self._is_over:
            if self._reloads > self._reloaded:
                self._reloaded = self._reloads
                return RELOAD
            os.read(self._woken, 1)
        return END


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
