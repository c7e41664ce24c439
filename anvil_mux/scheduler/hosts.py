"""One host, as the scheduler knows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class HostRecord:
    """One host. All slots of its backends refer to the same record."""

    name: str = ""
    """"": the host that anvil-mux runs on."""
    is_lost: bool = False
    """Nobody hears of it. What ran there may run still, so its GPUs go to nobody else."""
