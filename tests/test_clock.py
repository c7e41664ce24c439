"""A worker takes its turns when they are due or asked for, survives mistakes, and ends when it is closed."""

from __future__ import annotations

import threading

import pytest

from anvil_mux.clock import Worker

GUARD = 20.0
LONG = 3600.0


class Turns:
    """A worker's turns, each of which waits to be let go on."""

    def __init__(self, pause: float | None) -> None:
        self.pause = pause
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.woken: list[bool] = []
        self.worker = Worker("turns", self, last=lambda: self.woken.append(False))

    def __call__(self) -> float | None:
        self.woken.append(self.worker.was_woken)
        self.begun.release()
        assert self.go_on.acquire(timeout=GUARD)
        return self.pause

    def let_one_pass(self) -> None:
        assert self.begun.acquire(timeout=GUARD)
        self.go_on.release()

    def close(self) -> int:
        """How many turns there were."""
        self.worker.close()
        assert self.worker.join(GUARD)
        return len(self.woken) - 1


def test_a_turn_follows_another_after_the_seconds_that_it_said() -> None:
    turns = Turns(0.0)
    turns.worker.start()
    for _ in range(3):
        turns.let_one_pass()
    assert turns.begun.acquire(timeout=GUARD)
    assert turns.woken == [False] * 4
    turns.worker.close()
    turns.go_on.release()
    assert turns.close() == 4


@pytest.mark.parametrize("pause", [None, LONG])
def test_waking_brings_a_turn_forward_and_what_came_during_a_turn_is_not_lost(
    pause: float | None,
) -> None:
    turns = Turns(pause)
    turns.worker.start()
    assert turns.begun.acquire(timeout=GUARD)
    for _ in range(2):
        turns.worker.wake()
    turns.go_on.release()
    turns.let_one_pass()
    assert turns.woken == [False, True]
    assert turns.close() == 2


def test_a_worker_without_a_first_turn_waits_until_it_is_woken() -> None:
    asked: list[int] = []
    began = threading.Event()

    def turn() -> None:
        asked.append(len(asked))
        began.set()

    worker = Worker("waits", turn, first=None)
    worker.start()
    worker.wake()
    assert began.wait(GUARD)
    worker.close()
    assert worker.join(GUARD)
    assert asked == [0]


def test_hurry_ends_the_time_in_which_more_is_gathered() -> None:
    began = threading.Event()
    worker = Worker("gathers", lambda: began.set(), first=None, gather=LONG)
    worker.start()
    worker.wake()
    worker.hurry()
    assert began.wait(GUARD)
    worker.wake()
    worker.close()
    assert worker.join(GUARD)


def test_a_mistake_is_logged_and_the_next_turn_comes_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    again = threading.Event()
    turns: list[int] = []

    def turn() -> None:
        turns.append(len(turns))
        if len(turns) == 1:
            raise ZeroDivisionError
        again.set()

    worker = Worker("errs", turn)
    worker.start()
    worker.wake()
    assert again.wait(GUARD)
    worker.close()
    assert worker.join(GUARD)
    [record] = caplog.records
    assert (record.getMessage(), record.exc_info is not None) == ("a mistake in the thread errs", True)


def test_one_that_was_never_started_can_be_closed_and_one_under_way_is_not_waited_for() -> None:
    idle = Turns(None)
    idle.worker.close()
    assert idle.worker.join(GUARD)
    busy = Turns(None)
    busy.worker.start()
    assert busy.begun.acquire(timeout=GUARD)
    busy.worker.close()
    assert not busy.worker.join(0.0)
    busy.go_on.release()
    assert busy.close() == 1
