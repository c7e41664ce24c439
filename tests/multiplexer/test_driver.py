"""The threads that perform steps, in virtual time."""

import threading
from math import inf

import pytest

from anvil_mux.clock import Clock, mistakes
from anvil_mux.config.config import Backend, Config
from anvil_mux.multiplexer.driver import Job, SchedulerDriver
from anvil_mux.scheduler.slot import Effects, Load
from tests.baton import BatonClock
from tests.multiplexer.stage import SEEDS

GUARD = 20.0


class Crew(SchedulerDriver):
    """A driver whose steps take 5 s each and tell the scheduler nothing, and what it did: (moment, what)."""

    def __init__(self, clock):
        made = {"emit_leases": False, "costs": (), "footprints": (), "cards": (), "close_idle": print}
        super().__init__(Config((Backend("a", "a"),)), None, clock, print, **made)
        self.did = []

    def perform(self, *backends):
        self.carry_out(Effects(), [Job(Load(name, "stop"), None) for name in backends])

    def _perform(self, job):
        self.did.append((self.clock.now(), job.step.backend))
        self.clock.sleep(5.0)
        self.did.append((self.clock.now(), f"{job.step.backend} done"))

    def tell(self, fact, *about, **more):
        if fact == self.scheduler.time_passed:
            self.time_passed()
        else:
            self.did.append(
                (self.clock.now(), f"{fact.__name__} {about[0].backend}: {more['error'].message}")
            )

    def time_passed(self):
        self.did.append((self.clock.now(), "time passed"))
        self.set(inf)

    def set(self, moment):
        with self.lock:
            self.ask_at(moment)

    def end(self):
        with self.lock:
            self.close()


def play(main, seed=0):
    clock = BatonClock(seed)
    crew = Crew(clock)

    def whole():
        crew.start()
        main(crew)
        crew.end()

    clock.run(whole)
    return crew.did


@SEEDS
def test_jobs_are_performed_at_once_each_in_a_thread_of_its_own(seed):
    def main(crew):
        crew.clock.sleep(1.0)
        crew.perform("a", "b")
        crew.clock.sleep(10.0)

    did = play(main, seed)
    assert sorted(did) == [(0.0, "time passed"), (1.0, "a"), (1.0, "b"), (6.0, "a done"), (6.0, "b done")]


@pytest.mark.parametrize(("first", "last"), [(50.0, 4.0), (4.0, 8.0)])
@SEEDS
def test_time_passes_at_the_moment_that_was_set_last(seed, first, last):
    def main(crew):
        crew.clock.sleep(1.0)
        crew.set(first)
        crew.clock.sleep(1.0)
        crew.set(last)
        crew.clock.sleep(100.0)

    assert play(main, seed) == [(0.0, "time passed"), (last, "time passed")]


def test_a_mistake_ends_nothing_and_is_told_until_time_passes_without_one_a_second_later(caplog):
    told = []

    def main(crew):
        crew.clock.sleep(1.0)
        right, crew.time_passed = crew.time_passed, lambda: 1 / 0
        crew.set(2.0)
        crew.clock.sleep(1.5)
        told.append(mistakes())
        crew.time_passed = right
        crew.clock.sleep(10.0)
        told.append(mistakes())

    assert play(main) == [(0.0, "time passed"), (3.0, "time passed")]
    assert "a mistake in the thread scheduler" in caplog.text
    assert told == [{"scheduler": "ZeroDivisionError: division by zero"}, {}]


def test_a_thread_that_comes_by_says_so_to_who_asks_now_and_then_and_one_that_hangs_does_not():
    turned = []

    def main(crew):
        for _ in range(3):
            crew.clock.sleep(10.0)
            turned.append(crew.has_turned())
        crew.time_passed = lambda: crew.clock.sleep(100.0)
        crew.set(0.0)
        for _ in range(3):
            crew.clock.sleep(10.0)
            turned.append(crew.has_turned())

    play(main)
    assert turned == [True, True, True, True, False, False]


def test_a_moment_that_is_none_ends_nothing(caplog):
    def main(crew):
        crew.clock.sleep(1.0)
        with crew.lock:
            crew._ask_at = None
            crew._changed.notify()
        crew.clock.sleep(10.0)

    assert play(main) == [(0.0, "time passed"), (2.0, "time passed")]
    assert "a mistake in the thread scheduler" in caplog.text


@pytest.mark.parametrize("seconds", [1e12, 1e300, inf])
def test_real_time_is_waited_for_however_far_away_it_is(seconds):
    passed = threading.Semaphore(0)

    class Timer(Crew):
        def time_passed(self):
            self.set(self.clock.now() + seconds)
            passed.release()

    timer = Timer(Clock())
    waits, wait = threading.Semaphore(0), timer._changed.wait
    timer._changed.wait = lambda timeout: (waits.release(), wait(timeout))
    timer.start()
    assert passed.acquire(timeout=GUARD)
    assert waits.acquire(timeout=GUARD)
    timer.set(timer.clock.now())
    assert passed.acquire(timeout=GUARD), "it died of its wait"
    timer.end()


def test_a_job_that_no_thread_can_be_started_for_has_failed():
    def main(crew):
        def spawn(run, name):
            raise RuntimeError("can't start new thread")

        crew.clock.sleep(1.0)
        crew.clock.spawn = spawn
        crew.perform("a")
        crew.clock.sleep(1.0)

    assert play(main) == [
        (0.0, "time passed"),
        (1.0, "load_failed a: no thread can be started: can't start new thread"),
    ]


def test_after_the_end_nothing_is_begun():
    def main(crew):
        crew.clock.sleep(1.0)
        crew.end()
        crew.perform("a")
        crew.set(2.0)
        crew.clock.sleep(10.0)

    assert play(main) == [(0.0, "time passed")]
