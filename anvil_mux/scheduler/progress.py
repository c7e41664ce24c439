"""How far a load is: from what loads took before, and from what the engine says in its log.

A log speaks of one stage of the load, so it can only make the whole longer than what was learned.
"""

from __future__ import annotations

from typing import NamedTuple

NEARLY = 0.99
"""The fraction that is shown of a load that takes longer than it ever did."""


class LogProgress(NamedTuple):
    """The stage of a load, and how far it is, as an engine's log says."""

    stage: str
    fraction: float | None = None
    seconds_left: float | None = None


class Progress(NamedTuple):
    """How far a load is, as far as is known."""

    fraction: float | None
    seconds_left: float | None
    stage: str

    @property
    def words(self) -> str:
        """A text for people: ``42%, 35 s left, reading weights``."""
        done = "" if self.fraction is None else f"{self.fraction:.0%}"
        left = "" if self.seconds_left is None else f"{self.seconds_left:.0f} s left"
        return ", ".join(filter(None, (done, left, self.stage)))


def progress(elapsed: float, expected: float | None, told: LogProgress | None) -> Progress:
    """How far a load is that has taken ``elapsed`` and was ``expected`` to take so long."""
    stage = told.stage if told else ""
    if expected is None:
        return Progress(told.fraction if told else None, told.seconds_left if told else None, stage)
    left = max(expected - elapsed, (told.seconds_left or 0.0) if told else 0.0)
    if left <= 0.0:
        return Progress(NEARLY, None, stage)
    return Progress(min(elapsed / (elapsed + left), NEARLY), left, stage)


def span(seconds: float) -> str:
    """A length of time for people."""
    if seconds >= 7200:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
