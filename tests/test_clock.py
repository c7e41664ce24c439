"""Waits of any length, times as people write them, and mistakes in threads.

A worker takes its turns when they are due or asked for, survives mistakes, and ends when it is closed.
"""

import math
import threading

import pytest

from anvil_mux import clock
from anvil_mux.clock import (
    Clock,
    Worker,
    count_in,
    essential,
    mistakes,
    safely,
    seconds_in,
    watch_threads,
)

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


def test_a_turn_follows_another_after_the_seconds_that_it_said():
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
def test_waking_brings_a_turn_forward_and_what_came_during_a_turn_is_not_lost(pause):
    turns = Turns(pause)
    turns.worker.start()
    assert turns.begun.acquire(timeout=GUARD)
    for _ in range(2):
        turns.worker.wake()
    turns.go_on.release()
    turns.let_one_pass()
    assert turns.woken == [False, True]
    assert turns.close() == 2


def test_a_worker_without_a_first_turn_waits_until_it_is_woken():
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


def test_hurry_ends_the_time_in_which_more_is_gathered():
    began = threading.Event()
    worker = Worker("gathers", lambda: began.set(), first=None, gather=LONG)
    worker.start()
    worker.wake()
    worker.hurry()
    assert began.wait(GUARD)
    worker.wake()
    worker.close()
    assert worker.join(GUARD)


def test_a_mistake_is_logged_and_the_next_turn_comes_all_the_same(monkeypatch, caplog):
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


def test_one_that_was_never_started_can_be_closed_and_one_under_way_is_not_waited_for():
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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1.5", 1.5),
        (".5s", 0.5),
        ("5.m", 300.0),
        ("1h30m", 5400.0),
        ("2ms3us", 0.002003),
        ("1µs1ns", 1.001e-6),
        ("", None),
        (".", None),
        ("1 s", None),
        ("1d", None),
        ("-1s", None),
        ("1e9", None),
        ("٣s", None),
        ("1" * 65, None),
        ("1h" * 33, None),
    ],
)
def test_times_are_read_as_go_writes_them(text, seconds):
    assert seconds_in(text) == pytest.approx(seconds)


@pytest.mark.parametrize("seconds", [1e12, 1e300, math.inf, math.nan])
def test_no_wait_is_too_long_for_a_latch_or_a_condition(seconds):
    real, lock = Clock(), threading.Lock()
    latch = real.latch()
    latch.set()
    assert latch.wait(seconds)
    condition = real.condition(lock)

    def wake() -> None:
        with lock:
            condition.notify()

    with lock:
        threading.Thread(target=wake).start()
        assert condition.wait(seconds)


def test_a_thread_that_ends_of_a_mistake_is_told(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(clock, "_end_program", clock._end_program)
    ended = []
    watch_threads(ended.append)
    Clock().spawn(lambda: [][0], "fated").join(GUARD)
    assert mistakes() == {"fated": "ended: IndexError: list index out of range"}
    assert ended == []


@pytest.mark.parametrize("error", [IndexError, SystemExit, GeneratorExit])
def test_an_essential_thread_that_ends_by_an_error_ends_the_program(monkeypatch, error):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(clock, "_end_program", clock._end_program)
    ended = []
    watch_threads(ended.append)

    def run() -> None:
        raise error

    Clock().spawn(essential("vital", run), "vital").join(GUARD)
    Clock().spawn(essential("done", lambda: None), "done").join(GUARD)
    assert ended == ["vital"]


def test_a_plug_in_that_calls_exit_ends_no_worker():
    def turn() -> float:
        raise SystemExit

    assert safely("patient", turn, None) is None
    assert mistakes() == {"patient": "SystemExit: "}


@pytest.mark.parametrize(
    ("text", "most", "count"),
    [
        *(("0", 9, 0), ("9", 9, 9), ("10", 9, None), ("007", 9, 7), ("", 9, None), ("-1", 9, None)),
        *(("²", 9, None), ("٣", 9, None), ("1" * 5000, 10**15, None), ("1_0", 99, None), ("1.0", 9, None)),
    ],
)
def test_counts_are_plain_digits_up_to_a_bound(text, most, count):
    assert count_in(text, most) == count
