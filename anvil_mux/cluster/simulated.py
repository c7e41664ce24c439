"""A host that is only said to be another machine: one agent as a process here, with GPUs that are declared.

    python -m anvil_mux.cluster.simulated NAME ADDRESS STATE_FOLDER [--gpus N] [--memory BYTES]

It takes calls as frames on its standard input, of the methods ``hello`` and ``call``, and answers on its
standard output; the first frame has the number 0 and says that it is ready. It ends with its input, and
engines run on, as where an agent dies. SIGTERM is a power cut: its engines are killed at once, and it ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import BinaryIO

from anvil_mux.cluster.agent import Agent, local_host
from anvil_mux.cluster.frames import AnswerFrame, CallFrame, dump, read_frame, write_frame
from anvil_mux.host.local import LocalHost, inventory
from anvil_mux.host.seam import HostConfig, HostGpu, Inventory

MOST_AT_ONCE = 64
AFTER_POWER_CUT = 128 + signal.SIGTERM
"""The exit code of a host whose power was cut."""


class SimulatedHost:
    """An agent, and the engines that end with the power."""

    def __init__(self, name: str, address: str, state: str, described: Inventory) -> None:
        self._environ = {**os.environ, "XDG_STATE_HOME": state}
        self._described = described
        self._hosts: list[LocalHost] = []
        self.agent = Agent(name, address, environ=self._environ, described=described, make=self._make)

    def cut_power(self) -> None:
        """Kill all engines at once."""
        for host in self._hosts:
            host.kill_all()

    def _make(self, config: HostConfig, lock: int) -> LocalHost:
        host = local_host(
            config,
            lock,
            environ=self._environ,
            address=self._described.address,
            described=self._described,
        )
        self._hosts.append(host)
        return host


class Answers:
    """Answers calls, each in a thread of a pool."""

    def __init__(self, agent: Agent, file: BinaryIO) -> None:
        self._agent = agent
        self._file = file
        self._writing = threading.Lock()
        self._pool = ThreadPoolExecutor(MOST_AT_ONCE, "call")

    def take(self, call: CallFrame) -> None:
        """Have a call answered."""
        self._pool.submit(self._answer, call)

    def _answer(self, call: CallFrame) -> None:
        ok = True
        if call.method == "hello":
            said = dump(self._agent.hello())
        elif call.method == "call":
            said = self._agent.call(call.text)
        else:
            ok, said = False, f"a simulated host has no method {call.method}"
        with self._writing:
            write_frame(self._file, AnswerFrame(call.number, ok, said))


def main(argv: Sequence[str] | None = None) -> None:
    given = _arguments(argv)
    # What is printed, by whomever, goes to standard error, so that only frames are on the pipe.
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    gpus = tuple(
        HostGpu(str(each), f"GPU-{given.name}-{each}", "simulated", given.memory)
        for each in range(given.gpus)
    )
    described = replace(inventory(given.address), gpus=gpus)
    host = SimulatedHost(given.name, given.address, given.state, described)

    def lose_power(number: int, frame: object) -> None:
        host.cut_power()
        os._exit(AFTER_POWER_CUT)

    signal.signal(signal.SIGTERM, lose_power)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_frame(answers, AnswerFrame(0, True, ""))
    pool = Answers(host.agent, answers)
    while (call := read_frame(calls, CallFrame)) is not None:
        pool.take(call)
    os._exit(0)  # calls that still wait for something are nobody's any more


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("address", help="at which its engines listen, such as 127.0.0.2")
    parser.add_argument("state", help="the folder of its state")
    parser.add_argument("--gpus", type=int, default=1, help="how many GPUs it says it has")
    parser.add_argument("--memory", type=int, default=24 << 30, help="bytes of each of them")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
