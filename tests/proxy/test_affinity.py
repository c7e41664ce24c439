"""Where the threads of connections run, decided from what the kernel would say."""

from __future__ import annotations

import os
import threading

import pytest

from anvil_mux.proxy import affinity
from anvil_mux.proxy.affinity import LOOK_SECONDS, RETRY_SECONDS, Affinity, CPUs, CpuUsage

ALL = CPUs({0, 1, 2, 3})


class Machine:
    """Four CPUs whose clocks the test moves; the program's threads ran last on CPU 2."""

    def __init__(self) -> None:
        self.now = self.own = self.pump = 0.0
        self.cpus = dict.fromkeys(ALL, 0.0)

    def affinity(self, allowed: CPUs = ALL, *, adapts: bool = True) -> Affinity:
        made = Affinity(
            allowed,
            adapts=adapts,
            usage=lambda: CpuUsage(self.own, dict(self.cpus)),
            whereabouts=lambda: 2,
            elsewhere=lambda: self.pump,
        )
        made.look(self.now)
        return made

    def passes(
        self, affinity: Affinity, own: float = 0.0, *others: float, seconds: float = LOOK_SECONDS
    ) -> CPUs:
        """Time passes: the program uses ``own`` of a CPU, wherever it may run, and ``others`` of each CPU."""
        self.now += seconds
        self.own += own * seconds
        for cpu, share in enumerate(others):
            self.cpus[cpu] += share * seconds
        for cpu in affinity.cpus:
            self.cpus[cpu] += own / len(affinity.cpus) * seconds
        affinity.look(self.now)
        return affinity.cpus


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_many_requests_get_a_home_where_most_threads_ran(machine: Machine) -> None:
    threads = machine.affinity()
    assert machine.passes(threads, 0.7) == ALL
    assert machine.passes(threads, 0.9) == {2}
    assert machine.passes(threads, 0.9) == {2}


def test_the_home_is_given_up_when_few_requests_come(machine: Machine) -> None:
    threads = machine.affinity()
    machine.passes(threads, 1.0)
    assert machine.passes(threads, 0.5) == {2}
    assert machine.passes(threads, 0.3) == ALL
    assert machine.passes(threads, 0.9) == {2}


def test_a_home_that_others_use_is_left_for_a_while(machine: Machine) -> None:
    threads = machine.affinity()
    machine.passes(threads, 1.0)
    assert machine.passes(threads, 0.8, 1.0, 1.0, 0.1) == {2}
    assert machine.passes(threads, 0.7, 0.0, 0.0, 0.3) == ALL
    assert machine.passes(threads, 1.0) == ALL
    assert machine.passes(threads, 1.0, seconds=RETRY_SECONDS) == {2}


def test_there_is_no_home_while_others_leave_no_cpu(machine: Machine) -> None:
    threads = machine.affinity()
    assert machine.passes(threads, 1.2, 0.8, 0.8, 0.8, 0.8) == ALL
    assert machine.passes(threads, 1.2, 1.0, 1.0, 1.0, 0.0) == {2}


def test_what_the_pump_uses_is_not_a_reason(machine: Machine) -> None:
    threads = machine.affinity()
    machine.pump = 0.9 * LOOK_SECONDS
    assert machine.passes(threads, 1.0) == ALL


def test_looks_are_rare(machine: Machine) -> None:
    threads = machine.affinity()
    assert machine.passes(threads, 1.0, seconds=LOOK_SECONDS / 2) == ALL
    assert machine.passes(threads, 1.0, seconds=LOOK_SECONDS / 2) == {2}


@pytest.mark.parametrize(("allowed", "adapts"), [({0, 1}, True), ({0}, True), (ALL, False)])
def test_whoever_chose_the_cpus_is_obeyed(machine: Machine, allowed: set[int], adapts: bool) -> None:
    threads = machine.affinity(CPUs(allowed), adapts=adapts)
    for _ in range(3):
        assert machine.passes(threads, 1.5) == allowed


def test_a_thread_moves_itself_and_nobody_else(machine: Machine) -> None:
    before = os.sched_getaffinity(0)
    threads = machine.affinity()
    threads.cpus = CPUs({max(before)})
    moved: list[set[int]] = []

    def settle() -> None:
        assert threads.settle() is threads.cpus
        moved.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=settle)
    thread.start()
    thread.join(30)
    assert moved == [{max(before)}]
    assert os.sched_getaffinity(0) == before


def test_a_cpu_that_is_gone_is_no_error(machine: Machine) -> None:
    threads = machine.affinity()
    threads.cpus = CPUs({1023})
    assert threads.settle() == {1023}


def test_the_kernel_is_understood() -> None:
    seen = affinity.usage()
    assert os.sched_getaffinity(0) <= seen.cpus.keys()
    assert 0 < seen.own < sum(affinity.usage().cpus.values()) + 1
    assert affinity.whereabouts() in seen.cpus
