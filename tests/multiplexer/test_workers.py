"""The threads that perform steps, in virtual time."""

import threading
from math import inf

import pytest

from anvil_mux.clock import Clock, mistakes
from anvil_mux.multiplexer.workers import Workers
from tests.baton import BatonClock

GUARD = 20.0


class Crew:
    """Workers whose jobs take 5 s each, and what they did: (moment, what)."""

    def __init__(self, clock):
        self.clock, self.did = clock, []
        self.lock = clock.lock()
        self.workers = Workers(
            clock=clock,
            lock=self.lock,
            perform=self.perform,
            failed=lambda job, why: self.did.append((clock.now(), f"{job} failed: {why}")),
            time_passed=self.time_passed,
            name=str,
        )

    def perform(self, job):
        self.did.append((self.clock.now(), job))
        self.clock.sleep(5.0)
        self.did.append((self.clock.now(), f"{job} done"))

    def time_passed(self):
        self.did.append((self.clock.now(), "time passed"))
        self.ask_at(inf)

    def ask_at(self, moment):
        with self.lock:
            self.workers.ask_at(moment)

    def close(self):
        with self.lock:
            self.workers.close()


def play(main, seed=0):
    clock = BatonClock(seed)
    crew = Crew(clock)

    def whole():
        crew.workers.start()
        main(crew)
        crew.close()

    clock.run(whole)
    return crew.did


@pytest.mark.parametrize("seed", range(5))
def test_jobs_are_performed_at_once_each_in_a_thread_of_its_own(seed):
    def main(crew):
        crew.clock.sleep(1.0)
        crew.workers.submit(["a", "b"])
        crew.clock.sleep(10.0)

    did = play(main, seed)
    assert sorted(did) == [(0.0, "time passed"), (1.0, "a"), (1.0, "b"), (6.0, "a done"), (6.0, "b done")]


@pytest.mark.parametrize("seed", range(5))
def test_time_passes_at_the_moment_that_was_set_last(seed):
    def main(crew):
        crew.clock.sleep(1.0)
        crew.ask_at(50.0)
        crew.clock.sleep(1.0)
        crew.ask_at(4.0)
        crew.clock.sleep(100.0)

    assert play(main, seed) == [(0.0, "time passed"), (4.0, "time passed")]


def test_a_moment_that_was_put_off_is_not_kept():
    def main(crew):
        crew.clock.sleep(1.0)
        crew.ask_at(4.0)
        crew.clock.sleep(1.0)
        crew.ask_at(8.0)
        crew.clock.sleep(100.0)

    assert play(main) == [(0.0, "time passed"), (8.0, "time passed")]


def test_a_mistake_ends_nothing_and_time_passes_again_a_second_later(caplog):
    def main(crew):
        crew.clock.sleep(1.0)
        right, crew.workers._time_passed = crew.workers._time_passed, lambda: 1 / 0
        crew.ask_at(2.0)
        crew.clock.sleep(1.5)
        crew.workers._time_passed = right
        crew.clock.sleep(10.0)

    assert play(main) == [(0.0, "time passed"), (3.0, "time passed")]
    assert "a mistake in the thread scheduler" in caplog.text


def test_a_mistake_is_told_until_time_has_passed_without_one():
    told = []

    def main(crew):
        crew.clock.sleep(1.0)
        right, crew.workers._time_passed = crew.workers._time_passed, lambda: 1 / 0
        crew.ask_at(2.0)
        crew.clock.sleep(1.5)
        told.append(mistakes())
        crew.workers._time_passed = right
        crew.clock.sleep(10.0)
        told.append(mistakes())

    play(main)
    assert told == [{"scheduler": "ZeroDivisionError: division by zero"}, {}]


def test_a_moment_that_is_none_ends_nothing(caplog):
    def main(crew):
        crew.clock.sleep(1.0)
        with crew.lock:
            crew.workers._ask_at = None
            crew.workers._changed.notify()
        crew.clock.sleep(10.0)

    assert play(main) == [(0.0, "time passed"), (2.0, "time passed")]
    assert "a mistake in the thread scheduler" in caplog.text


@pytest.mark.parametrize("seconds", [1e12, 1e300, inf])
def test_real_time_is_waited_for_however_far_away_it_is(seconds):
    clock = Clock()
    lock = clock.lock()
    passed = threading.Semaphore(0)
    workers = Workers(
        clock=clock,
        lock=lock,
        perform=lambda job: None,
        failed=lambda job, why: None,
        time_passed=lambda: (ask_at(clock.now() + seconds), passed.release()),
        name=str,
    )

    def ask_at(moment):
        with lock:
            workers.ask_at(moment)

    waits, wait = threading.Semaphore(0), workers._changed.wait
    workers._changed.wait = lambda timeout: (waits.release(), wait(timeout))
    workers.start()
    assert passed.acquire(timeout=GUARD)
    assert waits.acquire(timeout=GUARD)
    ask_at(clock.now())
    assert passed.acquire(timeout=GUARD), "it died of its wait"
    with lock:
        workers.close()


def test_a_job_that_no_thread_can_be_started_for_has_failed():
    def main(crew):
        def spawn(run, name):
            raise RuntimeError("can't start new thread")

        crew.clock.sleep(1.0)
        crew.clock.spawn = spawn
        crew.workers.submit(["a"])
        crew.clock.sleep(1.0)

    assert play(main) == [
        (0.0, "time passed"),
        (1.0, "a failed: no thread can be started: can't start new thread"),
    ]


def test_after_the_end_nothing_is_begun():
    def main(crew):
        crew.clock.sleep(1.0)
        crew.close()
        crew.workers.submit(["a"])
        crew.ask_at(2.0)
        crew.clock.sleep(10.0)

    assert play(main) == [(0.0, "time passed")]
