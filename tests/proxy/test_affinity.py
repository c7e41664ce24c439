"""The CPU of the threads that serve requests."""

import os
import threading

from anvil_mux.proxy.server import CPUs, one_cpu, run_on


def test_programs_spread_over_the_cpus_that_they_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 7})
    assert [one_cpu(process) for process in (30, 31, 32, 33)] == [{2}, {5}, {7}, {2}]


def test_it_is_a_fast_cpu(tmp_path, monkeypatch):
    for cpu, rate in enumerate([5_700_000, 5_500_000, 4_400_000, 4_400_000]):
        (tmp_path / f"cpu{cpu}/cpufreq").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/cpufreq/cpuinfo_max_freq").write_text(f"{rate}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert {one_cpu(process, tmp_path) for process in range(8)} == {CPUs({0}), CPUs({1})}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 9})  # of one nothing is known
    assert {one_cpu(process, tmp_path) for process in range(8)} == {CPUs({0}), CPUs({9})}


def test_a_thread_moves_itself_and_nobody_else():
    before, one = os.sched_getaffinity(0), CPUs({max(os.sched_getaffinity(0))})
    moved: list[set[int]] = []

    def move() -> None:
        run_on(one)
        moved.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=move)
    thread.start()
    thread.join(30)
    assert moved == [one]
    assert os.sched_getaffinity(0) == before


def test_a_cpu_that_is_gone_is_no_error():
    before = os.sched_getaffinity(0)
    run_on(CPUs({1023}))
    assert os.sched_getaffinity(0) == before
