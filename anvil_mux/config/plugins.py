"""The code that a compose file may name: policies of swapping, eviction and routing.

The registries stand in the packages that use them, below this one, so the loader is handed them. It only asks
whether what is named can be built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from anvil_mux.config.settings import Problem

Settings = Mapping[str, object]


class RoutingNeeds(NamedTuple):
    """The needs of a routing policy."""

    settings: Mapping[str, Set[str]]
    """Infer type of a service -> the settings that it must have."""
    mode: str = ""
    """The mode that the policy is written for; "": either."""


@dataclass(frozen=True, slots=True)
class Plugins:
    """Builds what is named, by its name and settings; ValueError or TypeError says why it cannot be."""

    policy: Callable[[str, Settings], object]
    eviction: Callable[[str, Settings], object]
    shipped_routing: Callable[[], Mapping[str, RoutingNeeds]]
    """Name of a routing policy that is shipped -> its needs."""
    read_routing: Callable[[str, object], tuple[RoutingNeeds, Sequence[Problem]]]
    """Says what a routing policy of the file's own needs, and all that is wrong with it."""
