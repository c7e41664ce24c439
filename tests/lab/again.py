"""The clients of an event log, played once more: what the log tells and what was sent has to agree."""

import csv
from collections.abc import Mapping
from pathlib import Path

import pytest

from anvil_mux.lab import recording
from anvil_mux.lab.workload import Workload
from tests.running import Running, seen

Sent = Mapping[str, str]

SESSION = """
{"workload": "day", "models": {"a": {"load_seconds": 1}, "b": {"load_seconds": 1}}}
{"session": 1, "at": 0, "model": "a", "seconds": 0.25}
{"session": 1, "think": 0.1, "model": "b", "seconds": 0.5}
{"session": 1, "think": 0.1, "model": "a", "seconds": 0.1}
{"session": 1, "think": 0.1, "model": "b", "seconds": 0.3}
{"session": 1, "think": 0.1, "model": "b", "seconds": 0.2}
""".lstrip()
"""The day of a client."""
REQUESTS = 5


def recorded(mux: Running, log: Path, requests: int) -> Workload:
    """The clients of the event log, once it has the end of so many requests."""
    seen(log.read_text, lambda text: text.count('"released"') >= requests)
    assert mux.get("/healthz")["leases"] == 0
    return recording.workload_of(recording.read(str(log), None, pytest.fail).runs)


def sent(file: Path) -> list[Sent]:
    """The requests of a replay, from its CSV."""
    return list(csv.DictReader(file.read_text().splitlines()))


def check(first: list[Sent], day: Workload, again: list[Sent], tokens_per_second: float) -> None:
    """``first`` was sent, ``day`` is what the log has of it, and ``again`` what was sent because of that."""
    assert [row["model"] for row in first] == [each.model for each in day.requests]
    assert [row["model"] for row in again] == [each.model for each in day.requests]
    assert [float(row["due"]) for row in again] == pytest.approx([each.at for each in day.requests], abs=1e-4)
    lengths = [max(round(each.seconds * tokens_per_second), 1) for each in day.requests]
    assert [int(row["tokens"]) for row in again] == lengths
    assert {row["status"] for row in (*first, *again)} == {"200"}
