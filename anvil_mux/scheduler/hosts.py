"""The hosts, as the scheduler knows them, and the pause of all of them.

While anvil-mux is paused nothing is loaded on any host, and the GPUs are free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from anvil_mux.config.kinds import span
from anvil_mux.errors import Paused

LOCAL = "local"
"""The name, for people, of the host that anvil-mux runs on."""


PAUSED = "anvil-mux is paused: its GPUs are lent to something else"


@dataclass(eq=False, slots=True)
class Pause:
    """Whether anvil-mux is paused. The records of all hosts refer to the same one."""

    is_on: bool = False
    since: float = -math.inf
    """When it was paused last."""
    until: float = math.inf
    """When it ends by itself; infinite: never."""
    waits: bool = False
    """Whether requests that come meanwhile wait for its end; else they are refused (`when_paused`)."""

    def begin(self, now: float, until: float) -> None:
        """Pause from now on, or until another moment than before."""
        if not self.is_on:
            self.is_on, self.since = True, now
        self.until = until

    def end(self) -> None:
        """Pause no longer."""
        self.is_on, self.until = False, math.inf

    @property
    def refuses(self) -> bool:
        """Whether requests are refused now."""
        return self.is_on and not self.waits

    def error(self, now: float) -> Paused:
        """The error of a request that is refused."""
        if self.until == math.inf:
            return Paused(f"{PAUSED} until it is resumed by hand. Try again later.")
        left = max(self.until - now, 0.0)
        return Paused(f"{PAUSED} for {span(left)} more. Try again then.", retry_after=left)


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
        return not (self.is_away or self.is_cut_off)
