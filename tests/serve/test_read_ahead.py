"""Hosts are told what to read ahead when that changes, and as long as anybody waits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.scheduler.events import Event
from anvil_mux.serve.hosts import MOST_READ_AHEAD, READ_AHEAD_SECONDS, ReadingAhead


class Rig:
    """Queues, and hosts that note what they are told."""

    def __init__(self) -> None:
        self.queues: dict[str, list[Backend]] = {}
        """Model -> the backend that it waits for, if any; the next one first."""
        self.told: list[tuple[str, list[str]]] = []
        self.asked: list[list[str]] = []
        self.reading = ReadingAhead(self._coming_loads, cast(Any, self))

    def _coming_loads(self, models: Iterable[str]) -> tuple[list[str], list[Backend]]:
        self.asked.append(list(models))
        queued = [model for model in self.queues if model in self.asked[-1]]
        return queued, [each for model in queued for each in self.queues[model]]

    def __getitem__(self, host: str) -> Rig:
        self._host = host
        return self

    def read_ahead(self, backends: list[str]) -> None:
        self.told.append((self._host, backends))

    def queue(self, model: str, host: str = "") -> None:
        self.queues[model] = [Backend(f"{model}-1", model, host=host)]
        self.reading.observe(Event(1.0, "queued", model, bound=60.0))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_host_is_told_once_what_queues_wait_for_and_when_nobody_does_any_more(rig):
    assert rig.reading.look() is None
    rig.queue("a")
    rig.queue("b", "far")
    assert rig.reading.look() == READ_AHEAD_SECONDS
    assert rig.told == [("", ["a-1"]), ("far", ["b-1"])]
    assert rig.reading.look() == READ_AHEAD_SECONDS
    del rig.queues["a"]
    assert rig.reading.look() == READ_AHEAD_SECONDS
    del rig.queues["b"]
    assert rig.reading.look() is None
    assert rig.told[2:] == [("", []), ("far", [])]
    assert rig.reading.look() is None
    assert len(rig.told) == 4
    assert rig.asked[-1] == []


def test_the_order_of_the_loads_is_that_of_the_readings(rig):
    for model in "abc":
        rig.queue(model)
    rig.reading.look()
    rig.queues = {"c": rig.queues["c"], "a": rig.queues["a"]}
    rig.reading.look()
    assert rig.told == [("", ["a-1", "b-1", "c-1"]), ("", ["c-1", "a-1"])]


def test_a_queue_whose_load_has_begun_is_looked_at_again(rig):
    rig.queue("a")
    rig.queues["a"] = []
    assert rig.reading.look() == READ_AHEAD_SECONDS
    assert rig.told == []
    rig.queues["a"] = [Backend("a-2", "a")]  # the load has failed, and there is another replica
    rig.reading.look()
    assert rig.told == [("", ["a-2"])]


def test_only_queues_that_begin_are_looked_at(rig):
    rig.queues["a"] = [Backend("a-1", "a")]
    rig.reading.observe(Event(1.0, "queued", "a", bound=math.inf))
    rig.reading.observe(Event(1.0, "leased", "a", bound=60.0))
    assert rig.reading.look() is None
    assert rig.told == []


def test_a_host_is_told_again_of_one_that_is_described_otherwise(rig):
    rig.queue("a")
    rig.reading.look()
    rig.queues["a"] = [Backend("a-1", "a", port=1)]
    rig.reading.look()
    assert rig.told == [("", ["a-1"])] * 2


def test_a_host_is_told_of_so_many_at_most(rig):
    for number in range(MOST_READ_AHEAD + 3):
        rig.queue(f"m{number}")
    rig.reading.look()
    assert rig.told == [("", [f"m{number}-1" for number in range(MOST_READ_AHEAD)])]
    rig.reading.look()
    assert len(rig.told) == 1
