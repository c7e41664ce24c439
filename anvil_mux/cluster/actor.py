"""The actor of Ray in which the agent of a host lives; it hands calls on."""

from __future__ import annotations

from collections.abc import Mapping

from anvil_mux.cluster.agent import Agent


class HostActor:
    """The agent of a host, in the process that Ray started for it there."""

    def __init__(self, name: str, address: str) -> None:
        self._agent = Agent(name, address)

    def hello(self) -> Mapping[str, str]:
        """Return what the agent tells of itself, its version of anvil-mux among it."""
        return self._agent.hello()

    def call(self, payload: bytes) -> bytes:
        """Hand a message to the agent, and its answer back."""
        return self._agent.call(payload)
