"""The news of a host, kept until they are fetched.

Of the use of GPUs, of how far a load is and of prompts on disk only the last is kept. Beyond ``MOST`` the
oldest are forgotten: then nobody fetches any, as where a host serves a single command.
"""

from __future__ import annotations

import threading

from anvil_mux.host.seam import AnyNews, GpusSeen, HostNews, LoadSaid, PromptsKept

MOST = 1000


class NewsBoard:
    """The news that any thread puts up, and one fetches."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Guarded by it:
        self._kept: dict[object, HostNews] = {}  # in the order of their numbers
        self._number = 0
        self._closed = False

    def put(self, what: AnyNews) -> None:
        """Add news. Never blocks."""
        with self._changed:
            self._number += 1
            subject = _subject(what) or self._number
            self._kept.pop(subject, None)
            self._kept[subject] = HostNews(self._number, what)
            if len(self._kept) > MOST:
                del self._kept[next(iter(self._kept))]
            self._changed.notify_all()

    def read(self, after: int, timeout: float) -> list[HostNews]:
        """See ``Host.news``; returns at once when it is closed."""
        with self._changed:
            self._kept = {key: each for key, each in self._kept.items() if each.number > after}
            self._changed.wait_for(lambda: self._kept or self._closed, timeout)
            return list(self._kept.values())

    def close(self) -> None:
        """End every wait for news."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _subject(what: object) -> object:
    """Return the subject of which only the last news counts; None where each counts."""
    match what:
        case GpusSeen():
            return "gpus"
        case LoadSaid(backend):
            return "load", backend
        case PromptsKept(backend):
            return "prompts", backend
    return None
