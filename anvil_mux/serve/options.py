"""The options that only the command line has, and what is said if it cannot be served with them."""

from __future__ import annotations

from dataclasses import dataclass

from anvil_mux.errors import MuxError
from anvil_mux.telemetry import eventlog, journal


@dataclass(frozen=True, slots=True)
class Options:
    """The options that only the command line has."""

    access_log: str = "-"
    """A file, - for standard error, or off."""
    event_log: str | None = None
    event_log_size: int = eventlog.SIZE
    """Bytes after which a new file is begun; 0: never."""
    log_format: str = "human"
    pin: bool = True
    """Whether the threads that serve requests run on one CPU (threads.py)."""
    insecure: bool = False
    watch: bool = False
    """Whether files are watched, and a change of them is a reload."""
    verbosity: int = journal.NORMAL
    takeover: bool = False
    """Whether hosts are claimed that another anvil-mux has."""


class CannotServe(MuxError):
    """Something outside the configuration stands in the way."""
