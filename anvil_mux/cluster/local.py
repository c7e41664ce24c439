"""Three simulated hosts on this machine, for whoever has no cluster: ``serve --cluster local``.

Each is a process with an agent of its own, whose engines listen on a loopback address of its own. SIGTERM is
its power cut: its engines die with it. It returns ``RETURN_SECONDS`` later.
"""

from __future__ import annotations

import sys
from pathlib import Path

from anvil_mux.cluster.channel import ChildControl
from anvil_mux.cluster.links import Node

HOSTS = {"alpha": "127.0.0.2", "beta": "127.0.0.3", "gamma": "127.0.0.4"}
"""Host -> the loopback address of its engines."""
GPUS, GPU_MEMORY = 1, 24 << 30
RETURN_SECONDS = 15.0


class SimulatedHosts:
    """The way to simulated hosts, see ``ClusterControl``; they end with it, and their engines run on."""

    def __init__(self, folder: Path) -> None:
        self._hosts = {
            name: ChildControl(
                [
                    *(sys.executable, "-m", "anvil_mux.cluster.simulated", name, address),
                    *(str(folder / name), "--gpus", str(GPUS), "--memory", str(GPU_MEMORY)),
                ],
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
