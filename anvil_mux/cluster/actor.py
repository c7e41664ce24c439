"""The actor of Ray in which the agent of a host lives; it hands calls on."""

from __future__ import annotations

import os
import select
import threading

from anvil_mux.cluster.agent import Agent
from anvil_mux.cluster.frames import dump


class HostActor:
    """The agent of a host, in the process that Ray started for it there."""

    def __init__(self, name: str) -> None:
        # Not told by who made the actor: Ray makes it again where its host has another address.
        from ray.util import get_node_ip_address

        raylet = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
        threading.Thread(target=end_with, args=(raylet,), name="raylet", daemon=True).start()
        self._agent = Agent(name, get_node_ip_address())

    # Bytes alone are returned: whoever asks takes nothing else (ray_link.py).

    def hello(self) -> bytes:
        """Return what the agent tells of itself, its version of anvil-mux among it."""
        return dump(self._agent.hello()).encode()

    def call(self, text: bytes) -> bytes:
        """Hand a message to the agent, and its answer back."""
        return self._agent.call(text).encode()


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
