"""The parent of one engine that is a process: it keeps the engine's processes together, and its log bounded.

This module is run as a file, with Python's own modules alone, as the leader of the engine's session. It
outlives anvil-mux, and ends with the exit code or the signal of the engine. Until then:

* It is a subreaper (see ``prctl(2)``): a process of the engine whose parent has ended becomes its child.
  So all of them are its descendants, whatever session, environment or output they have. Whatever is left
  when the engine has ended is killed.
* It copies the engine's output to the log. Writing to a full disk would end most engines; here the bytes
  are dropped, and the log says how many. A log that has become too long is cut to its end.

It reads one JSON value from its input: the command, its environment, and a descriptor to which the number
of an error is written if the command cannot be run. Its output is the log.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2)."""
HANDLED = ("SIGHUP", "SIGINT", "SIGTERM", "SIGPIPE", "SIGXFSZ")
"""The signals that end the engine, but not this process."""
STOP_SECONDS, KILL_SECONDS = 60.0, 10.0
"""How long other processes of an engine may run on after SIGTERM, and how long the kernel has for SIGKILL."""
PAUSE = 0.01
DRAIN_SECONDS = 1.0
"""How long the last output may take to be copied, should a process outside hold the pipe open."""
LOG_BYTES, KEPT_BYTES = 64 << 20, 4 << 20
"""The size at which a log is cut, and how much of its end is kept then."""
READ_BYTES = 1 << 16


class BoundedLog:
    """An open log that never fails: bytes that cannot be written are dropped and counted."""

    def __init__(self, descriptor: int, size: int = LOG_BYTES, kept: int = KEPT_BYTES) -> None:
        self._descriptor = descriptor
        self._size = size
        self._kept = kept
        self._lost = 0

    def write(self, data: bytes) -> None:
        """Append bytes, after a line that tells how many before them were dropped."""
        if self._lost:
            note = f"\n[anvil-mux: {self._lost} bytes of this log were dropped, the disk was full]\n"
            if self._append(note.encode()):
                return self._drop(len(data))
            self._lost = 0
        self._drop(self._append(data))
        with suppress(OSError):
            if os.fstat(self._descriptor).st_size > self._size:
                self._cut()
        return None

    def _drop(self, count: int) -> None:
        self._lost += count

    def _append(self, data: bytes) -> int:
        """Append bytes; return how many could not be written."""
        rest = memoryview(data)
        with suppress(OSError):
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        return len(rest)

    def _cut(self) -> None:
        """Keep the end of the log, from the beginning of a line."""
        size = os.fstat(self._descriptor).st_size
        end = os.pread(self._descriptor, self._kept, max(0, size - self._kept))
        os.ftruncate(self._descriptor, 0)
        self._append(end[end.find(b"\n") + 1 :])


def main() -> None:
    argv, env, errors = json.load(sys.stdin)
    stopped = threading.Event()
    for name in HANDLED:
        _handle(getattr(signal, name), stopped)
    prctl = _prctl()
    prctl(SET_CHILD_SUBREAPER, 1)
    log = os.dup(1)
    source, sink = os.pipe()
    os.dup2(source, 0)
    engine = os.fork()
    if not engine:
        _execute(argv, env, sink, errors, lambda: prctl(SET_PDEATHSIG, signal.SIGKILL))
    for each in (source, sink, errors):
        os.close(each)
    copying = threading.Thread(target=_copy, args=(0, BoundedLog(log)), daemon=True)
    copying.start()
    status = _wait_for(engine)
    _end_others(STOP_SECONDS if stopped.is_set() else 0.0)
    copying.join(DRAIN_SECONDS)
    _end_like(os.waitstatus_to_exitcode(status))


def _handle(number: signal.Signals, stopped: threading.Event) -> None:
    """Outlive a signal, unless it is ignored; its engine has its own answer to it.

    Python itself ignores the last two of HANDLED, which an engine must not inherit.
    """
    is_pythons = number in (signal.SIGPIPE, signal.SIGXFSZ)
    if is_pythons or signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda *_: None if is_pythons else stopped.set())


def _prctl() -> Callable[[int, int], object]:
    """Return a function that sets an option of this process, or does nothing where there is no prctl(2)."""
    try:
        function = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return lambda option, value: None
    return lambda option, value: function(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


def _execute(
    argv: Sequence[str], env: Mapping[str, str], sink: int, errors: int, prepare: Callable[[], object]
) -> None:
    """Become the engine, which prints to ``sink``; write the number of an error to ``errors``."""
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        os.set_inheritable(errors, False)
        prepare()
        os.execvpe(argv[0], list(argv), env)
    except OSError as error:
        os.write(errors, str(error.errno).encode())
    finally:
        os._exit(127)


def _copy(source: int, log: BoundedLog) -> None:
    """Copy the output of an engine to its log until all of its processes have ended."""
    with suppress(OSError):
        while data := os.read(source, READ_BYTES):
            log.write(data)


def _wait_for(engine: int) -> int:
    """Return how the engine ended; other children that end meanwhile are reaped."""
    while True:
        pid, status = os.wait()
        if pid == engine:
            return status


def _end_others(grace: float) -> None:
    """Return once no child is left: ``grace`` seconds, then SIGKILL."""
    begun = time.monotonic()
    with suppress(ChildProcessError):
        while (passed := time.monotonic() - begun) < grace + KILL_SECONDS:
            if passed >= grace:
                for child in _children():
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(child, signal.SIGKILL)
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(PAUSE)


def _children() -> list[int]:
    """List the children of this process; their ids are theirs until they are waited for."""
    children = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{entry}/stat", errors="replace") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(entry))
    return children


def _end_like(code: int) -> None:
    """End with the exit code of another process, or by the signal that ended it."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the engine has left its own
        with suppress(OSError, ValueError):  # SIGKILL cannot be handled
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
