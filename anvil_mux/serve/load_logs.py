"""Reads the logs of engines while they load, in a thread of its own: Docker takes a while to tell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.progress import Said, said

LOOK_SECONDS = 1.0
LINES = 40


class LoadLogs:
    """Reads the logs of engines while they load, and of no others."""

    def __init__(
        self,
        loading: Callable[[], Iterable[str]],
        tail: Callable[[str, int], Sequence[str]],
        report: Callable[[str, Said], object],
    ) -> None:
        self._loading = loading
        """The backends that are being loaded, from nothing: others say nothing."""
        self._tail = tail
        self._report = report
        self._some = threading.Event()
        self._closed = threading.Event()

    def observe(self, event: Event) -> None:
        """Takes an event of the multiplexer, under its lock."""
        if event.kind == "loading":
            self._some.set()

    def run(self) -> None:
        """The life of its thread, until ``close``."""
        while True:
            self._some.wait()
            self._some.clear()
            while not self._closed.is_set() and (names := list(self._loading())):
                for name in names:
                    found = said(self._tail(name, LINES))
                    if found:
                        self._report(name, found)
                self._closed.wait(LOOK_SECONDS)
            if self._closed.is_set():
                return

    def close(self) -> None:
        self._closed.set()
        self._some.set()
