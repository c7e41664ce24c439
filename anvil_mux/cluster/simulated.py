"""Three simulated hosts on this machine, for whoever has no cluster: ``serve --cluster local``.

Each is a process with an agent of its own, whose GPUs are declared and whose engines listen on a loopback
address of its own:

    python -m anvil_mux.cluster.simulated NAME ADDRESS STATE_FOLDER [--gpus N] [--memory BYTES]

It takes calls as frames on its standard input, of the methods ``hello`` and ``call``, and answers on its
standard output; the first frame has the number 0 and says that it is ready. It ends with its input, and
engines run on, as where an agent dies. SIGTERM is a power cut: its engines are killed at once, and it ends.
It returns ``RETURN_SECONDS`` later.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from anvil_mux.cluster.agent import Agent, local_host
from anvil_mux.cluster.channel import ChildControl
from anvil_mux.cluster.frames import AnswerPipe, CallFrame, Node, dump, read_frame
from anvil_mux.host.local import LocalHost, inventory
from anvil_mux.host.seam import MACHINE, HostConfig, HostGpu

HOSTS = {"alpha": "127.0.0.2", "beta": "127.0.0.3", "gamma": "127.0.0.4"}
"""Host -> the loopback address of its engines."""
RETURN_SECONDS = 15.0
MOST_AT_ONCE = 64
AFTER_POWER_CUT = 128 + signal.SIGTERM
"""The exit code of a host whose power was cut."""


class SimulatedHosts:
    """The way to simulated hosts, see ``ClusterControl``; they end with it, and their engines run on."""

    def __init__(self, folder: Path) -> None:
        self._hosts = {
            name: ChildControl(
                [sys.executable, "-m", "anvil_mux.cluster.simulated", name, address, str(folder / name)],
                pauses=(RETURN_SECONDS,),
            )
            for name, address in HOSTS.items()
        }

    def open(self) -> None:
        """Start the hosts; AgentSilent if one cannot be."""
        for host in self._hosts.values():
            host.start()
        for host in self._hosts.values():
            host.open()

    def pids(self) -> dict[str, int]:
        """Return the processes of the hosts that run, by name."""
        return {name: pid for name, host in self._hosts.items() if (pid := host.pid)}

    def nodes(self) -> list[Node]:
        return [Node(name, address) for name, address in HOSTS.items()]

    def call(self, host: str, method: str, text: str, timeout: float) -> str:
        return self._hosts[host].call(host, method, text, timeout)

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()


# One of them, as a process


def main(argv: Sequence[str] | None = None) -> None:
    options = _arguments(argv)
    # What is printed, by whomever, goes to standard error, so that only frames are on the pipe.
    calls, answers = os.fdopen(os.dup(0), "rb"), AnswerPipe(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    gpus = tuple(
        HostGpu(str(each), f"GPU-{options.name}-{each}", "simulated", options.memory)
        for each in range(options.gpus)
    )
    described = replace(inventory(options.address), gpus=gpus)
    environ, address = {**os.environ, "XDG_STATE_HOME": options.state}, options.address
    environ[MACHINE] = f"{environ.get(MACHINE, '')}/{options.name}"
    hosts: list[LocalHost] = []

    def make(config: HostConfig, lock: int) -> LocalHost:
        hosts.append(local_host(config, lock, environ=environ, address=address, described=described))
        return hosts[-1]

    def lose_power(number: int, frame: object) -> None:
        for host in hosts:
            host.kill_all()
        os._exit(AFTER_POWER_CUT)

    agent = Agent(options.name, address, environ=environ, described=described, make=make)

    signal.signal(signal.SIGTERM, lose_power)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers.write(0, True, "")
    pool = ThreadPoolExecutor(MOST_AT_ONCE, "call")
    while (call := read_frame(calls, CallFrame)) is not None:
        pool.submit(_answer, agent, call, answers)
    os._exit(0)  # calls that still wait for something are nobody's any more


def _answer(agent: Agent, call: CallFrame, answers: AnswerPipe) -> None:
    match call.method:
        case "hello":
            answers.write(call.number, True, dump(agent.hello()))
        case "call":
            answers.write(call.number, True, agent.call(call.text))
        case method:
            answers.write(call.number, False, f"a simulated host has no method {method}")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One simulated host, as a process.")
    parser.add_argument("name")
    parser.add_argument("address", help="at which its engines listen, such as 127.0.0.2")
    parser.add_argument("state", help="the folder of its state")
    parser.add_argument("--gpus", type=int, default=1, help="how many GPUs it says it has")
    parser.add_argument("--memory", type=int, default=24 << 30, help="bytes of each of them")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
