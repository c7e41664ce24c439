"""The files that the access log and the event log are written to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from anvil_mux.serve.options import CannotServe, Options
from anvil_mux.telemetry import journal
from anvil_mux.telemetry.eventlog import Rotation


@contextmanager
def access_log(options: Options) -> Iterator[int | None]:
    """Open what the access log is written to; None: there is none."""
    if options.access_log in ("-", "off"):
        silent = options.access_log == "off" or options.verbosity <= journal.QUIET
        yield None if silent else journal.STDERR
        return
    with _appending(options.access_log, "access log") as descriptor:
        yield descriptor


@contextmanager
def event_log(options: Options) -> Iterator[int | None]:
    """Open what the event log is written to; None: there is none."""
    if options.event_log is None:
        yield None
        return
    with _appending(options.event_log, "event log") as descriptor:
        yield descriptor


def rotation(options: Options) -> Rotation | None:
    """The rotation of the event log; None where there is nothing to set aside: a pipe or a device."""
    path, size = options.event_log, options.event_log_size
    return Rotation(path, size) if path and size and os.path.isfile(path) else None


@contextmanager
def _appending(path: str, what: str) -> Iterator[int]:
    try:
        file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        raise CannotServe(f"cannot write the {what} {path}: {error.strerror}") from None
    with file:
        yield file.fileno()
