"""The pause of a whole anvil-mux: for a while nothing is loaded on any host, and the GPUs are free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anvil_mux.errors import Paused
from anvil_mux.scheduler.progress import span

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
