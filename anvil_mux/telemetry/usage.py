"""The usage of each model by each API key: a fold over the records of requests that a backend served.

It is kept by the hour, one file for each day (UTC) below the state folder, so that it outlives the program
and stays small: as many rows as keys and models were used together in an hour. A file is replaced as a whole;
what a program that is killed loses are the last ``SAVE_SECONDS``.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from operator import add
from pathlib import Path
from typing import Any

from anvil_mux.protocol import foreign
from anvil_mux.state import once, write_whole
from anvil_mux.telemetry.accesslog import Served

NO_KEY = "none"
"""The key of requests that show none, since none is asked for."""
KEPT_DAYS = 400
SAVE_SECONDS = 10.0
"""How long what has changed may be in memory only."""

FIGURES = ("requests", "failed", "prompt_tokens", "cached_tokens", "tokens", "seconds", "gpu_seconds")
"""The figures of a row, in the order in which they are counted; tokens of prompts include those cached."""

UsageFigures = list[float]
UsagePlace = tuple[int, str, str]
"""The hour (of Unix time), key and model that a row is about."""


class Usage:
    """The usage of one anvil-mux; ``folder``: where it is kept (None: nowhere), ``say`` is told what fails.

    One thread at a time calls ``served``, and one ``save``; any may ask.
    """

    def __init__(
        self,
        folder: Path | None = None,
        say: Callable[[str], object] = lambda text: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._complain = once(say)
        self._wall = wall
        # Guards the fields below.
        self._lock = threading.Lock()
        self._rows: defaultdict[UsagePlace, UsageFigures] = defaultdict(_nothing)
        """The rows of the days that are in memory whole: today, and those that are not written down yet."""
        self._days: set[int] = set()
        self._since_start: defaultdict[tuple[str, str], UsageFigures] = defaultdict(_nothing)
        """The counts since the start, by key and model."""
        self._changed: set[int] = set()
        self._saved_at = 0.0

    def served(self, model: str, record: Served) -> None:
        """A request ended; ``model``: as metrics call it."""
        if not record.backend:
            return
        hour, key = int(record.ended // 3600), record.key or NO_KEY
        day = hour // 24
        with self._lock:
            if day not in self._days:
                self._days.add(day)
                self._rows |= self._read(day)
            for row in (self._rows[hour, key, model], self._since_start[key, model]):
                row[0] += 1
                row[1] += record.status >= 400 or record.is_broken
                row[2] += record.prompt_tokens
                row[3] += record.cached_tokens
                row[4] += record.tokens
                row[5] += record.seconds - record.waited
                row[6] += record.gpu_seconds
            self._changed.add(day)

    # Questions

    def since(self, moment: float) -> list[dict[str, Any]]:
        """The usage by key and model since a moment, to the hour; those with most GPU time first."""
        found: defaultdict[tuple[str, str], UsageFigures] = defaultdict(_nothing)
        first = int(moment // 3600)
        here = self._in_memory()
        days = {hour // 24 for hour, _, _ in here}
        earlier = (day for day in range(first // 24, _day(self._wall()) + 1) if day not in days)
        for rows in (here, *map(self._read, earlier)):
            for (hour, key, model), counts in rows.items():
                if hour >= first:
                    found[key, model] = list(map(add, found[key, model], counts))
        ordered = sorted(found.items(), key=lambda each: (-each[1][6], -each[1][5], each[0]))
        return [{"key": key, "model": model, **_as_json(counts)} for (key, model), counts in ordered]

    def _in_memory(self) -> dict[UsagePlace, UsageFigures]:
        with self._lock:
            return {place: [*counts] for place, counts in self._rows.items()}

    def since_start(self) -> dict[tuple[str, str], dict[str, float]]:
        """The usage since the start of the program, by key and model."""
        with self._lock:
            return {of: dict(zip(FIGURES, each, strict=True)) for of, each in self._since_start.items()}

    # The files

    def save(self, *, at_once: bool = False) -> None:
        """Write what has changed, unless that was done a moment ago."""
        now = self._wall()
        if not self._changed or self._folder is None or (now - self._saved_at < SAVE_SECONDS and not at_once):
            return
        self._saved_at = now
        today = _day(now)
        for day in sorted(self._changed):
            self._changed.discard(day)
            rows = {at: counts for at, counts in self._in_memory().items() if at[0] // 24 == day}
            self._write(day, rows)
            with self._lock:
                if day != today and day not in self._changed:
                    self._days.discard(day)
                    for place in rows:
                        del self._rows[place]
        self._forget_oldest()

    def _write(self, day: int, rows: Mapping[UsagePlace, UsageFigures]) -> None:
        assert self._folder
        lines = [[*place, *[round(each, 3) for each in counts]] for place, counts in rows.items()]
        try:
            self._folder.mkdir(exist_ok=True)
            write_whole(self._file(day), json.dumps({"version": 1, "rows": lines}), 0o600)
        except OSError as error:
            self._complain(f"{self._file(day)} cannot be written, so usage is lost: {error.strerror}")

    def _read(self, day: int) -> dict[UsagePlace, UsageFigures]:
        """The rows of a day; none where there are none, or none that can be read."""
        if self._folder is None:
            return {}
        file = self._file(day)
        try:
            return dict(_row(*row) for row in foreign.read(file.read_text())["rows"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._complain(f"{file} cannot be read, so the usage of that day is counted from zero: {error}")
            return {}

    def _forget_oldest(self) -> None:
        """Delete the files of the oldest days but for ``KEPT_DAYS``, however late the clock says it is."""
        assert self._folder
        for file in sorted(self._folder.glob("????-??-??"))[:-KEPT_DAYS]:
            file.unlink(missing_ok=True)

    def _file(self, day: int) -> Path:
        assert self._folder
        return self._folder / _name(day)


def _nothing() -> UsageFigures:
    return [0.0] * len(FIGURES)


def _row(hour: int, key: str, model: str, *counts: float) -> tuple[UsagePlace, UsageFigures]:
    if len(counts) != len(FIGURES) or not isinstance(key, str) or not isinstance(model, str):
        raise ValueError("a row has another length, or no names")
    return (int(hour), key, model), [float(each) for each in counts]


def _as_json(counts: UsageFigures) -> dict[str, Any]:
    """The figures by their names: counts are whole numbers, times are rounded."""
    named = zip(FIGURES, counts, strict=True)
    return {name: round(value, 3) if name.endswith("seconds") else int(value) for name, value in named}


def _day(moment: float) -> int:
    return int(moment // 86400)


def _name(day: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(day * 86400))
