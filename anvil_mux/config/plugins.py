"""The code that a compose file may name: policies of swapping, eviction and routing.

The registries stand in the packages that use them, below this one, so the loader is handed them. It only asks
whether what is named can be built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from anvil_mux.config.settings import Problem

Settings = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Plugins:
    """Builds what is named, by its name and settings; ValueError or TypeError says why it cannot be."""

    policy: Callable[[str, Settings], object]
    eviction: Callable[[str, Settings], object]
    shipped_routing: Callable[[], Mapping[str, Set[str]]]
    """Name of a routing policy that is shipped -> the settings that it needs every service to have."""
    read_routing: Callable[[str, object], tuple[Set[str], Sequence[Problem]]]
    """Says which settings a routing policy of the file's own needs, and all that is wrong with it."""
