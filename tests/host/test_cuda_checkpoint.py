"""Parking and restoring the CUDA processes of a service: order, roll-back, what is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from anvil_mux.errors import BackendError, CheckpointFailed
from anvil_mux.host.cuda_checkpoint import Checkpointed, Checkpointer, is_frozen
from anvil_mux.host.cuda_driver import Driver, Limits
from tests.fake_cuda import FakeCuda
from tests.fake_gpu import FakeGpus

A, B, C = 5_000_001, 5_000_002, 5_000_003  # more than Linux gives to any process
TARGETS = {"lock": "locked", "checkpoint": "checkpointed", "restore": "locked", "unlock": "running"}
NEEDS = {"lock": "running", "checkpoint": "locked", "restore": "checkpointed", "unlock": "locked"}
GIB = 1 << 30


class Driven:
    """A driver in memory; ``faults`` holds (action, pid) -> the state that a failing call leaves, or None."""

    def __init__(self) -> None:
        self.states = {A: "running", B: "running"}
        self.faults: dict[tuple[str, int], str | None] = {}
        self.passing: dict[int, list[str]] = {}
        self.silent: set[int] = set()
        self.asked: list[int] = []
        self.log: list[tuple[str, int]] = []
        self.open = 0
        self.kind: str | None = "library"

    def __enter__(self) -> Driven:
        self.open += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.open -= 1

    def tool(self) -> str:
        if self.kind is None:
            raise BackendError("the CUDA driver cannot be used: libcuda.so.1: cannot open")
        return self.kind

    def state(self, pid: int) -> str:
        self.asked.append(pid)
        if pid in self.silent or pid not in self.states:
            raise BackendError(f"state of process {pid}: no answer")
        if self.passing.get(pid):
            return self.passing[pid].pop(0)
        return self.states[pid]

    def uses_cuda(self, pid: int) -> bool:
        return pid in self.states

    def act(self, action: str, pid: int) -> None:
        assert self.states[pid] == NEEDS[action]
        self.log.append((action, pid))
        if (action, pid) in self.faults:
            self.states[pid] = self.faults[action, pid] or self.states[pid]
            raise BackendError(f"{action} of process {pid}: refused")
        self.states[pid] = TARGETS[action]


class Time:
    """Virtual: waiting is what makes it pass."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def driver() -> Driven:
    return Driven()


@pytest.fixture
def gpus() -> FakeGpus:
    return FakeGpus(24 * GIB, 24 * GIB)


@pytest.fixture
def checkpointer(driver: Driven, gpus: FakeGpus) -> Checkpointer:
    time = Time()
    return Checkpointer(cast(Any, lambda: driver), gpus, now=time.now, wait=time.wait)


# Order


def test_all_are_locked_before_any_is_checkpointed_and_restored_before_any_is_unlocked(checkpointer, driver):
    standby = checkpointer.checkpoint([B, A])
    assert standby == Checkpointed((A, B))
    assert driver.log == [("lock", A), ("lock", B), ("checkpoint", A), ("checkpoint", B)]
    assert driver.states == {A: "checkpointed", B: "checkpointed"}
    driver.log.clear()
    checkpointer.restore(standby)
    assert driver.log == [("restore", A), ("restore", B), ("unlock", A), ("unlock", B)]
    assert driver.states == {A: "running", B: "running"}


def test_a_conversation_ends_with_each_call(checkpointer, driver):
    checkpointer.restore(checkpointer.checkpoint([A, B]))
    driver.faults["lock", A] = None
    with pytest.raises(CheckpointFailed):
        checkpointer.checkpoint([A])
    assert driver.open == 0


# Again and again


def test_what_is_done_may_be_asked_for_again(checkpointer, driver):
    checkpointer.restore(Checkpointed((A, B)))
    assert driver.log == []
    standby = checkpointer.checkpoint([A, B])
    driver.log.clear()
    assert checkpointer.checkpoint([A, B]) == standby
    assert driver.log == []


def test_half_a_checkpoint_and_half_a_restore_are_finished(checkpointer, driver):
    driver.states = {A: "checkpointed", B: "locked"}
    checkpointer.checkpoint([A, B])
    assert driver.log == [("checkpoint", B)]
    driver.states[A] = "running"
    checkpointer.restore(Checkpointed((A, B)))
    assert driver.log[1:] == [("restore", B), ("unlock", B)]


def test_what_an_earlier_anvil_mux_left_is_found(checkpointer, driver):
    driver.states = {A: "checkpointed", B: "locked", C: "running"}
    standby = checkpointer.find_standby([C, B, A, C + 1])
    assert standby == Checkpointed((A, B), whole=False)
    checkpointer.restore(standby)
    assert set(driver.states.values()) == {"running"}
    assert checkpointer.find_standby([A, B, C, C + 1]) is None


@pytest.mark.parametrize(
    ("second", "whole"), [("checkpointed", True), ("locked", False), ("running", False), ("failed", False)]
)
def test_only_what_is_checkpointed_in_all_its_processes_is_standby_wholly(
    checkpointer, driver, second, whole
):
    driver.states = {A: "checkpointed", B: second}
    standby = checkpointer.find_standby([A, B, C])
    assert standby is not None
    assert standby.whole is whole


# When parking fails


LOCKED = [("lock", A), ("lock", B)]


@pytest.mark.parametrize(
    ("before", "faults", "why", "lost", "log", "after"),
    [
        (
            "running",
            {("lock", B): None},
            f"lock of process {B}: refused",
            (),
            [("lock", A), ("lock", B), ("unlock", A)],
            "running",
        ),
        (
            "running",
            {("checkpoint", B): None},
            f"checkpoint of process {B}",
            (),
            [*LOCKED, ("checkpoint", A), ("checkpoint", B), ("restore", A), ("unlock", A), ("unlock", B)],
            "running",
        ),
        ("running", {("checkpoint", B): "failed"}, f"lost: {B}", (B,), None, "failed"),
        (
            "failed",
            {},
            f"lock of process {B}: it is failed, not running",
            (B,),
            [("lock", A), ("unlock", A)],
            "failed",
        ),
        ("state 9", {}, "it is state 9", (B,), [("lock", A), ("unlock", A)], "state 9"),
        ("running", {("checkpoint", A): None, ("unlock", B): None}, f"process {A}", (B,), None, "locked"),
    ],
)
def test_a_checkpoint_that_fails_puts_back_what_it_can_and_tells_what_is_lost(
    checkpointer, driver, before, faults, why, lost, log, after
):
    driver.states[B] = before
    driver.faults |= faults
    with pytest.raises(CheckpointFailed, match=why) as caught:
        checkpointer.checkpoint([A, B])
    assert caught.value.lost == lost
    assert log is None or driver.log == log
    assert driver.states == {A: "running", B: after}


def test_a_process_that_cannot_be_put_back_is_lost(checkpointer, driver):
    driver.faults |= {("checkpoint", B): None, ("restore", A): None}
    with pytest.raises(CheckpointFailed) as caught:
        checkpointer.checkpoint([A, B])
    assert caught.value.lost == (A,)
    assert driver.states == {A: "checkpointed", B: "running"}


def test_a_process_that_gives_no_answer_is_lost_and_asked_once(checkpointer, driver):
    driver.silent.add(B)
    with pytest.raises(CheckpointFailed) as caught:
        checkpointer.checkpoint([A, B])
    assert caught.value.lost == (B,)
    assert driver.states[A] == "running"
    assert driver.asked.count(B) == 2  # by the lock, and once by the way back


# When restoring fails


def test_a_restore_that_fails_loses_what_stays_standby(checkpointer, driver):
    standby = checkpointer.checkpoint([A, B])
    driver.log.clear()
    driver.faults["restore", B] = None
    with pytest.raises(CheckpointFailed) as caught:
        checkpointer.restore(standby)
    assert caught.value.lost == (B,)
    # A is unlocked so that it can end; B is not tried again.
    assert driver.log == [("restore", A), ("restore", B), ("unlock", A)]


def test_an_unlock_that_reports_an_error_of_a_running_process_has_worked(checkpointer, driver):
    standby = checkpointer.checkpoint([A, B])
    driver.faults["unlock", A] = "running"
    checkpointer.restore(standby)
    assert driver.states == {A: "running", B: "running"}


def test_a_process_that_ended_while_standby_is_lost(checkpointer, driver):
    standby = checkpointer.checkpoint([A, B])
    del driver.states[A]
    with pytest.raises(CheckpointFailed) as caught:
        checkpointer.restore(standby)
    assert A in caught.value.lost


# Between states


def test_a_process_between_two_states_is_waited_for(checkpointer, driver):
    driver.states = {A: "checkpointed"}
    driver.passing[A] = ["checkpointing"] * 5
    checkpointer.restore(Checkpointed((A,)))
    assert driver.log == [("restore", A), ("unlock", A)]


def test_a_process_that_stays_between_two_states_is_lost(checkpointer, driver):
    driver.states[A] = "restoring"
    with pytest.raises(CheckpointFailed, match="it is restoring, not checkpointed") as caught:
        checkpointer.restore(Checkpointed((A,)))
    assert caught.value.lost == (A,)
    assert driver.log == []


# Frozen processes


@pytest.fixture
def stopped() -> Any:
    child = subprocess.Popen(["tail", "-f", "/dev/null"])
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    yield child.pid
    child.kill()
    child.wait()


def test_a_frozen_process_is_left_alone(checkpointer, driver, stopped):
    driver.states[stopped] = "running"
    for call in (
        lambda: checkpointer.checkpoint([A, stopped]),
        lambda: checkpointer.restore(Checkpointed((stopped,))),
    ):
        with pytest.raises(CheckpointFailed, match=f"process {stopped} is frozen") as caught:
            call()
        assert caught.value.lost == ()
    assert driver.asked == []
    os.kill(stopped, signal.SIGCONT)
    os.waitpid(stopped, os.WCONTINUED)
    checkpointer.checkpoint([stopped])
    assert driver.states[stopped] == "checkpointed"


@pytest.mark.parametrize(
    ("lines", "file", "text", "expected"),
    [
        ("5:freezer:/docker/x", "freezer/docker/x/freezer.state", "FROZEN\n", True),
        ("5:freezer:/docker/x", "freezer/docker/x/freezer.state", "FREEZING\n", True),
        ("5:freezer:/docker/x", "freezer/docker/x/freezer.state", "THAWED\n", False),
        ("0::/a.slice/b.scope", "a.slice/b.scope/cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/a.slice/b.scope", "a.slice/b.scope/cgroup.events", "populated 1\nfrozen 0\n", False),
        ("4:memory:/x\n0::/x", "unified/x/cgroup.events", "populated 1\nfrozen 1\n", True),
        ("0::/", "elsewhere", "", False),
    ],
)
def test_a_frozen_container_is_seen_by_its_control_group(tmp_path, lines, file, text, expected):
    process, groups = tmp_path / "41", tmp_path / "groups"
    process.mkdir()
    (process / "stat").write_text("41 (a (b) c) S 1 41 41" + " 0" * 20)
    (process / "cgroup").write_text(lines + "\n")
    (groups / file).parent.mkdir(parents=True)
    (groups / file).write_text(text)
    assert is_frozen(41, tmp_path, groups) is expected


def test_a_process_that_is_gone_is_not_frozen(tmp_path):
    assert not is_frozen(41, tmp_path)


# Which processes


def test_the_processes_with_gpu_memory_are_found(checkpointer, gpus):
    gpus.hold(A, 0, GIB)
    gpus.hold(A, 1, 0)  # it may hold memory of one of its GPUs only
    gpus.hold(B, 1, GIB)
    gpus.hold(C, 0, GIB)
    assert checkpointer.find([B, 7, A]) == (A, B)
    assert gpus.asked == 1
    gpus.hold(B, 1, 0)
    assert checkpointer.find([A, B]) == (A,)


def test_the_processes_are_looked_for_again(driver, gpus):
    gpus.hold(C, 0, GIB)  # another process, so that NVML lists something
    late = Checkpointer(cast(Any, lambda: driver), gpus, wait=lambda _: gpus.hold(A, 0, GIB))
    assert late.find([A]) == (A,)
    assert gpus.asked == 2


@pytest.mark.parametrize("known", ["nothing", "an untold amount", "only other processes"])
def test_where_nvml_does_not_tell_the_driver_is_asked(checkpointer, gpus, driver, known):
    if known == "an untold amount":
        gpus.hold(A, 0, None)
    elif known == "only other processes":
        gpus.hold(C, 0, GIB)
    else:
        gpus.why_none = "NVML: not found"
    assert checkpointer.find([A, B, 7]) == (A, B)
    assert driver.open == 0


# Why not


def set_up(gpus: FakeGpus, **facts: Any) -> None:
    for name, value in facts.items():
        if name in gpus.facts:
            gpus.facts[name] = value
        else:
            setattr(gpus, name, value)


@pytest.mark.parametrize(
    ("facts", "wanted", "reason"),
    [
        ({}, ["0"], None),
        ({}, ["GPU-00000001"], None),
        ({"why_none": "NVML: Driver Not Loaded"}, ["0"], r"needs an NVIDIA GPU \(NVML: Driver Not Loaded\)"),
        ({"driver": "565.57.01"}, ["0"], r"needs NVIDIA driver 570 or later, and this is 565\.57\.01"),
        ({"driver": "570.86.15"}, ["0"], None),
        ({"driver": ""}, ["0"], "and this is unknown"),
        ({"mig": True}, ["0"], r"GPU 0 is cut into instances \(MIG\)"),
        ({"mps": True}, ["1"], "GPU 1 is shared through MPS"),
        ({"persistence": False}, ["0"], None),  # the library is initialized by whoever calls it
        ({}, ["0", "1"], "holds several GPUs"),
        ({}, ["2"], "NVML finds no GPU 2"),
    ],
)
def test_why_a_service_cannot_be_standby(checkpointer, gpus, facts, wanted, reason):
    set_up(gpus, **facts)
    found = checkpointer.why_not(wanted)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(reason, found)


def test_what_the_driver_lacks_is_a_reason(checkpointer, driver, gpus):
    assert checkpointer.why_not(["0", "1"], insist=True) is None
    driver.kind = None
    assert checkpointer.why_not(["0"]) == "the CUDA driver cannot be used: libcuda.so.1: cannot open"
    driver.kind = "program"
    assert checkpointer.why_not(["0"]) is None
    gpus.facts["persistence"] = False
    assert checkpointer.why_not(["0"]) == "GPU 0 is not in persistence mode (turn it on: nvidia-smi -pm 1)"


def test_this_machine_is_judged_without_an_error():
    found = Checkpointer().why_not(["0"])
    assert found is None or found


# With the library's stand-in, through a real conversation


@pytest.fixture
def connect(libcuda: Path, cuda: FakeCuda) -> Callable[..., Checkpointer]:
    cuda.process(A)
    cuda.process(B)

    def make(**limits: float) -> Checkpointer:
        return Checkpointer(lambda: Driver(Limits(**limits), library=str(libcuda)), FakeGpus(24 * GIB))

    return make


def test_two_processes_go_and_come_back(connect, cuda):
    checkpointer = connect()
    assert checkpointer.why_not(["0"]) is None
    pids = checkpointer.find([A, B, C])
    standby = checkpointer.checkpoint(pids)
    assert [cuda.state(A), cuda.state(B)] == ["checkpointed", "checkpointed"]
    checkpointer.restore(standby)
    assert [cuda.state(A), cuda.state(B)] == ["running", "running"]
    assert cuda.calls() == [
        f"lock {A} 10000",
        f"lock {B} 10000",
        f"checkpoint {A}",
        f"checkpoint {B}",
        f"restore {A}",
        f"restore {B}",
        f"unlock {A}",
        f"unlock {B}",
    ]


def test_a_lock_that_times_out_in_the_driver_leaves_both_running(connect, cuda):
    cuda.fault(B, "lock", "600")
    with pytest.raises(CheckpointFailed, match="CUDA_ERROR_NOT_READY") as caught:
        connect().checkpoint([A, B])
    assert caught.value.lost == ()
    assert [cuda.state(A), cuda.state(B)] == ["running", "running"]


def test_a_restore_that_hangs_is_given_up_and_that_process_is_lost(connect, cuda):
    checkpointer = connect(move=1.0)
    standby = checkpointer.checkpoint([A, B])
    cuda.fault(B, "restore", "hang")
    with pytest.raises(CheckpointFailed, match=r"did not answer within 1 s") as caught:
        checkpointer.restore(standby)
    assert caught.value.lost == (B,)
    assert [cuda.state(A), cuda.state(B)] == ["running", "checkpointed"]
