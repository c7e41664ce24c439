"""Reads the logs of engines while they load, in a thread of its own: Docker takes a while to tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from anvil_mux.clock import Worker
from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.progress import LogProgress, said

LOOK_SECONDS = 1.0
LINES = 40


class LoadLogs:
    """Reads the logs of engines while they load, and of no others."""

    def __init__(
        self,
        loading: Callable[[], Iterable[str]],
        tail: Callable[[str, int], Sequence[str]],
        report: Callable[[str, LogProgress], object],
    ) -> None:
        self._loading = loading
        """The backends that are being loaded, from nothing: others say nothing."""
        self._tail = tail
        self._report = report
        self.worker = Worker("load-logs", self._turn)

    def observe(self, event: Event) -> None:
        """Takes an event of the multiplexer, under its lock."""
        if event.kind == "loading":
            self.worker.wake()

    def _turn(self) -> float | None:
        names = list(self._loading())
        for name in names:
            found = said(self._tail(name, LINES))
            if found:
                self._report(name, found)
        return LOOK_SECONDS if names else None
