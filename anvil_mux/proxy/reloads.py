"""Another configuration while the program runs: asked for, refused or in effect, one after the other.

A reload reads the files anew and checks them whole. If anything is wrong nothing changes, and every problem
is told to whoever asked; else ``take`` makes it so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

from anvil_mux.config.change import Change
from anvil_mux.config.config import Config
from anvil_mux.errors import ConfigError, Draining


class Reloads:
    """Reloads, one after the other. Any thread.

    ``take`` puts a configuration into effect, or raises ConfigError; ``failed`` is told why.
    """

    def __init__(
        self,
        read: Callable[[], Config],
        take: Callable[[Config], Change],
        failed: Callable[[str], object],
        wall: Callable[[], float],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``around`` is entered for as long as a reload takes."""
        self._read = read
        self._take = take
        self._failed = failed
        self._wall = wall
        self._around = around
        # Held through a whole reload. Whoever only looks reads ``_told``, which is replaced as a whole.
        self._lock = threading.Lock()
        self._told: dict[str, Any] = _told(0, None, "")
        self._closed = False

    def reload(self) -> Change:
        """Return what is different now. ConfigError: nothing is."""
        with self._lock:
            if self._closed:
                raise Draining("anvil-mux is shutting down.")
            with self._around():
                return self._try()

    def _try(self) -> Change:
        told = self._told
        try:
            change = self._take(self._read())
        except ConfigError as error:
            self._told = {**told, "failed_at": self._wall(), "problems": [*error.problems]}
            more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
            self._failed(error.problems[0] + more)
            raise
        self._told = _told(told["count"] + 1, self._wall(), str(change))
        return change

    def told(self) -> dict[str, Any]:
        """Return how often, the last reload, and what was wrong with a later try; for /healthz."""
        return self._told

    def close(self) -> None:
        """Refuse every reload from now on; return when none is under way."""
        with self._lock:
            self._closed = True


def _told(count: int, at: float | None, changed: str) -> dict[str, Any]:
    return {"count": count, "at": at, "changed": changed, "failed_at": None, "problems": []}


def as_json(change: Change) -> dict[str, Any]:
    return {**asdict(change), "text": str(change)}
