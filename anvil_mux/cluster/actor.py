"""The actor of Ray in which the agent of a host lives; it hands calls on."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping

from anvil_mux.cluster.agent import Agent


class HostActor:
    """The agent of a host, in the process that Ray started for it there."""

    def __init__(self, name: str, address: str) -> None:
        raylet = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
        threading.Thread(target=end_with, args=(raylet,), name="raylet", daemon=True).start()
        self._agent = Agent(name, address)

    def hello(self) -> Mapping[str, str]:
        """Return what the agent tells of itself, its version of anvil-mux among it."""
        return self._agent.hello()

    def call(self, payload: bytes) -> bytes:
        """Hand a message to the agent, and its answer back."""
        return self._agent.call(payload)


def end_with(pid: int) -> None:
    """End this process with another one.

    Ray notices only after a while that its raylet is gone. Until then this agent would keep the host's lock
    from the one that the next raylet starts.
    """
    try:
        raylet = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        return  # a kernel before 5.3
    poll = select.poll()
    poll.register(raylet, select.POLLIN)
    poll.poll()
    os._exit(1)
