"""One host, as the scheduler knows it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from anvil_mux.scheduler.pause import Pause

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
    is_gone: bool = False
    """Whether it is lost, and was declared gone by hand: nothing runs there any more."""
    is_away: bool = False
    """Whether it cannot be steered for now: nothing is begun there, and what runs goes on."""
    is_drained: bool = False
    """Whether it was drained by hand: nothing stays or is loaded there."""
    pause: Pause = field(default_factory=Pause)
    """The pause of all hosts."""

    @property
    def is_cleared(self) -> bool:
        """Whether nothing stays or is loaded there: it was drained by hand, or anvil-mux is paused."""
        return self.is_drained or self.pause.is_on

    @property
    def takes_loads(self) -> bool:
        """Whether anything may be loaded there."""
        return not (self.is_lost or self.is_drained or self.pause.is_on)

    @property
    def is_awaited(self) -> bool:
        """Whether requests may wait for a load there: it takes loads, or will when the pause is over."""
        return not (self.is_lost or self.is_drained or self.pause.refuses)

    @property
    def is_cut_off(self) -> bool:
        """Whether it is not known what still runs there."""
        return self.is_lost and not self.is_gone

    @property
    def is_steered(self) -> bool:
        """Whether steps may be begun there; what was declared gone needs none."""
        return not (self.is_away or (self.is_lost and not self.is_gone))
