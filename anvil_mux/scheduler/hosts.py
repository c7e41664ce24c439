"""One host, as the scheduler knows it."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOCAL = "local"
"""The name, for people, of the host that anvil-mux runs on."""


@dataclass(eq=False, slots=True)
class HostRecord:
    """One host. All slots of its backends refer to the same record."""

    name: str = ""
    """"": the host that anvil-mux runs on."""
    is_lost: bool = False
    """Whether the host does not answer. What ran there may still run, so its GPUs go to no other backend."""
    since: float = -math.inf
    """When it was lost last."""
    is_away: bool = False
    """Whether it cannot be steered for now: nothing is begun there, and what runs goes on."""
    is_drained: bool = False
    """Whether it was drained by hand: nothing stays or is loaded there."""

    @property
    def takes_loads(self) -> bool:
        """Whether anything may be loaded there."""
        return not (self.is_lost or self.is_drained)
