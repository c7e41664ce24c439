"""Where the threads of connections run, decided from what the kernel would say."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from anvil_mux.proxy import affinity
from anvil_mux.proxy.affinity import LOOK_SECONDS, RETRY_SECONDS, Affinity, CPUs, CpuTime, CpuUsage

ALL = CPUs({0, 1, 2, 3})


class Machine:
    """Four CPUs whose clocks the test moves."""

    def __init__(self) -> None:
        self.now = self.own = 0.0
        self.cpus = dict.fromkeys(ALL, CpuTime())

    def affinity(self, allowed: CPUs = ALL, *, pin: bool | None = None, fast: CPUs = ALL) -> Affinity:
        made = Affinity(
            allowed, pin=pin, usage=lambda: CpuUsage(self.own, dict(self.cpus)), fast=fast.intersection
        )
        made.look(self.now)
        return made

    def passes(
        self, affinity: Affinity, own: float = 0.0, *others: float, seconds: float = LOOK_SECONDS
    ) -> CPUs:
        """Time passes: the program uses ``own`` of a CPU, wherever it may run, and ``others`` of each CPU."""
        self.now += seconds
        self.own += own * seconds
        for cpu, other in zip(ALL, [*others, 0.0, 0.0, 0.0, 0.0], strict=False):
            share = other + (own / len(affinity.cpus) if cpu in affinity.cpus else 0.0)
            used, idle = self.cpus[cpu]
            self.cpus[cpu] = CpuTime(used + share * seconds, idle + (1.0 - share) * seconds)
        affinity.look(self.now)
        return affinity.cpus


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_the_home_is_where_least_runs(machine: Machine) -> None:
    threads = machine.affinity()
    assert threads.cpus == ALL
    assert machine.passes(threads, 0.0, 0.5, 0.2, 0.6, 0.4) == {1}
    assert machine.passes(threads, 0.9, 0.6, 0.1, 0.0, 0.0) == {1}
    assert machine.passes(threads) == {1}


def test_a_full_home_that_others_use_is_left_for_a_while(machine: Machine) -> None:
    threads = machine.affinity()
    machine.passes(threads)
    assert machine.passes(threads, 0.8, 1.0, 1.0, 1.0, 0.1) == {3}
    assert machine.passes(threads, 0.6, 0.0, 0.0, 0.0, 0.25) == {3}  # there is time for both
    assert machine.passes(threads, 0.7, 0.0, 0.0, 0.0, 0.3) == ALL
    assert machine.passes(threads, 1.0) == ALL
    assert machine.passes(threads, 1.0, seconds=RETRY_SECONDS) == {3}


def test_there_is_no_home_while_others_leave_no_cpu(machine: Machine) -> None:
    threads = machine.affinity()
    assert machine.passes(threads, 0.4, 0.8, 0.8, 0.8, 0.8) == ALL
    assert machine.passes(threads, 0.4, 0.9, 0.9, 0.9, 0.0) == {3}


def test_looks_are_rare(machine: Machine) -> None:
    threads = machine.affinity()
    assert machine.passes(threads, seconds=LOOK_SECONDS / 2) == ALL
    assert machine.passes(threads, seconds=LOOK_SECONDS / 2) == {3}


@pytest.mark.parametrize(("allowed", "pin"), [({0, 1}, None), ({0}, None), (ALL, False)])
def test_whoever_chose_the_cpus_is_obeyed(machine: Machine, allowed: set[int], pin: bool | None) -> None:
    threads = machine.affinity(CPUs(allowed), pin=pin)
    for _ in range(3):
        assert machine.passes(threads) == allowed


def test_the_home_is_a_fast_cpu(machine: Machine, tmp_path: Path) -> None:
    for cpu, rate in enumerate([5_700_000, 5_500_000, 4_400_000, 4_400_000]):
        (tmp_path / f"cpu{cpu}/cpufreq").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/cpufreq/cpuinfo_max_freq").write_text(f"{rate}\n")
    fast = affinity.fast(ALL, tmp_path)
    assert fast == {0, 1}
    assert affinity.fast(CPUs({0, 9}), tmp_path) == {0, 9}  # of one nothing is known
    assert machine.passes(machine.affinity(fast=fast), 0.0, 0.5, 0.6) == {0}
    assert machine.affinity(pin=True, fast=fast).cpus == {1}


def test_pinned_threads_stay(machine: Machine) -> None:
    threads = machine.affinity(pin=True)
    for _ in range(3):
        assert machine.passes(threads, 0.5, 1.0, 1.0, 1.0, 0.5) == {3}


def test_a_thread_moves_itself_and_nobody_else(machine: Machine) -> None:
    before = os.sched_getaffinity(0)
    threads = machine.affinity()
    moved: list[set[int]] = []

    def follow() -> None:
        for cpus in (CPUs({max(before)}), CPUs(before)):
            threads.cpus = cpus
            threads.follow()
            moved.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=follow)
    thread.start()
    thread.join(30)
    assert moved == [{max(before)}, before]
    assert os.sched_getaffinity(0) == before


def test_a_cpu_that_is_gone_is_no_error(machine: Machine) -> None:
    threads = machine.affinity()
    threads.cpus = CPUs({1023})
    threads.follow()


def test_the_kernel_is_understood() -> None:
    seen = affinity.usage()
    assert os.sched_getaffinity(0) <= seen.cpus.keys()
    assert 0 < seen.own < sum(each.used for each in affinity.usage().cpus.values()) + 1
    assert any(each.idle for each in seen.cpus.values())
