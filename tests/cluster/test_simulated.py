"""A simulated host: calls as frames, engines that outlive it, and a power cut that they do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anvil_mux.cluster import frames
from anvil_mux.cluster.frames import AgentCall, AnswerFrame, CallFrame, read_frame, write_frame
from anvil_mux.host.seam import Awake, HostGpu
from tests.cluster.answers import returned_by, value_of
from tests.cluster.test_agent import CONFIG, FIRST, M
from tests.cluster.test_agent_engines import pid_of
from tests.host.test_processes import gone, running

GUARD = 30.0


class Process:
    """A simulated host, whose calls are made one after the other unless it is said otherwise."""

    def __init__(self, folder: Path) -> None:
        argv = [sys.executable, "-m", "anvil_mux.cluster.simulated", "b", "127.0.0.2", str(folder)]
        self.process = subprocess.Popen(
            [*argv, "--gpus", "2", "--memory", "7"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._number = 0
        assert self.read() == (0, True, ""), "it says first that it is ready"

    def send(self, method: str, text: str = "") -> int:
        assert self.process.stdin
        self._number += 1
        write_frame(self.process.stdin, CallFrame(self._number, "b", method, text, GUARD))  # type: ignore[arg-type]
        return self._number

    def read(self) -> tuple[Any, ...]:
        assert self.process.stdout
        frame = read_frame(self.process.stdout, AnswerFrame)  # type: ignore[arg-type]
        assert frame is not None
        return tuple(frame)

    def call(self, method: str, *args: object) -> Any:
        number = self.send("call", frames.dump(AgentCall(FIRST, method, args)))
        answered, ok, value = self.read()
        assert (answered, ok) == (number, True)
        return value_of(method, value)

    def step(self, number: int, method: str, *args: object) -> Any:
        self.call("begin", number, method, args)
        state = self.call("result", number, GUARD)
        assert state.done
        return frames.of(returned_by(method), state.value)

    def close(self) -> int:
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()
        code = self.process.wait(GUARD)
        assert self.process.stdout
        self.process.stdout.close()
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Process]]:
    made: list[Process] = []

    def make() -> Process:
        made.append(Process(tmp_path))
        return made[-1]

    yield make
    for process in made:
        if process.process.poll() is None:
            process.process.send_signal(signal.SIGTERM)
        process.close()


def owned(process: Process) -> Process:
    process.call("claim", "", False)
    process.call("reconfigure", CONFIG)
    return process


def test_it_greets_and_has_the_gpus_that_were_declared_and_a_call_that_waits_keeps_no_other_waiting(
    start: Callable[[], Process],
):
    process = start()
    number = process.send("hello")
    assert process.read()[:2] == (number, True)
    fds = Path(f"/proc/{process.process.pid}/fd")
    assert os.readlink(fds / "1") == os.readlink(fds / "2"), "what is printed is not between the frames"
    found = process.call("inventory")
    assert found.address == "127.0.0.2"
    assert found.gpus == tuple(HostGpu(each, f"GPU-b-{each}", "simulated", 7) for each in "01")
    number = process.send("shutdown")
    assert process.read() == (number, False, "a simulated host has no method shutdown")
    owned(process)
    waiting = process.send("call", frames.dump(AgentCall(FIRST, "news", (0, GUARD))))
    number = process.send("hello")
    assert process.read()[0] == number
    process.send("call", frames.dump(AgentCall(FIRST, "begin", (1, "load", (M, "stop", 1)))))
    assert waiting in {process.read()[0] for _ in range(2)}


def test_engines_outlive_it_and_are_adopted_and_a_power_cut_takes_them_along(
    start: Callable[[], Process], tmp_path: Path
):
    first = owned(start())
    loaded = first.step(1, "load", M, "stop", 1)
    assert first.close() == 0
    pid = pid_of(tmp_path)
    assert running(pid)
    second = start()
    second.call("reconfigure", CONFIG)
    assert second.call("running") == ["m.b"]
    assert second.step(1, "adopt", M) == Awake(loaded.url)
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(GUARD) == 128 + signal.SIGTERM
    gone(pid)
    third = start()
    third.call("reconfigure", CONFIG)
    assert third.call("running") == []
