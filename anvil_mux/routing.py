"""WHERE, among the replicas of one model, a request goes.

Pure: literal ``Replica``s in, one of them out. Ties are broken by name, so a choice is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replica:
    """One backend of the model that may be leased now."""

    backend: str
    leases: int


def choose(replicas: Sequence[Replica]) -> Replica:
    """The replica with the fewest leases."""
    return min(replicas, key=lambda replica: (replica.leases, replica.backend))
