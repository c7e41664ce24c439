"""The logs of engines are read while they load, and at no other time."""

from __future__ import annotations

import threading

import pytest

from anvil_mux.scheduler.events import Event
from anvil_mux.scheduler.progress import LogProgress
from anvil_mux.serve import load_logs
from anvil_mux.serve.load_logs import LoadLogs

GUARD = 20.0
SHARDS = "Loading safetensors checkpoint shards:  56% Completed | 5/9 [00:13<00:11,  2.87s/it]"


def test_logs_are_read_only_while_something_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_logs, "LOOK_SECONDS", 0.0)
    asked, told, told_again = threading.Event(), threading.Event(), threading.Event()
    loading: list[str] = []
    reports: list[tuple[str, LogProgress]] = []

    def report(backend: str, what: LogProgress) -> None:
        reports.append((backend, what))
        (told_again if told.is_set() else told).set()
        loading.clear()

    def names() -> tuple[str, ...]:
        found = tuple(loading)
        asked.set()
        return found

    logs = LoadLogs(names, lambda name, lines: [SHARDS], report)
    logs.worker.start()
    assert asked.wait(GUARD)
    logs.observe(Event(0.0, "ready", "a", "a"))
    assert reports == []
    loading.append("a")
    logs.observe(Event(1.0, "loading", "a", "a"))
    assert told.wait(GUARD)
    loading.append("b")
    logs.observe(Event(2.0, "loading", "b", "b"))
    assert told_again.wait(GUARD)
    logs.worker.close()
    assert logs.worker.join(GUARD)
    assert [backend for backend, _ in reports] == ["a", "b"]
