"""Learned figures, kept across restarts: the costs of swaps, and the memory of backends.

One file in the state folder, replaced as a whole, so that a program that is killed leaves the old one. If it
cannot be read, that is said and forgotten: everything in it can be learned again. It holds JSON, but lacks
the suffix, which is that of the records of processes. What was learned of a host of the cluster is kept on
that host as well, for an anvil-mux that takes it over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from anvil_mux.cluster import frames
from anvil_mux.cluster.frames import Unreadable
from anvil_mux.config.config import Config
from anvil_mux.scheduler.costs import Cost
from anvil_mux.scheduler.footprint import Footprint
from anvil_mux.state import write_whole

VERSION = 2


@dataclass(frozen=True, slots=True)
class Known:
    """The content of the file."""

    costs: Sequence[Cost] = ()
    footprints: Sequence[Footprint] = ()

    def of_host(self, host: str, config: Config) -> Known:
        """Return what is known of one host."""
        there = {backend.name for backend in config.backends if backend.host == host}
        return Known(
            [cost for cost in self.costs if cost.host == host],
            [each for each in self.footprints if each.backend in there],
        )

    def with_more(self, other: Known) -> Known:
        """Return this, and what only the other knows."""
        costs = {(each.host, each.source, each.target, each.way) for each in self.costs}
        footprints = {(each.backend, each.way) for each in self.footprints}
        return Known(
            [*self.costs, *(c for c in other.costs if (c.host, c.source, c.target, c.way) not in costs)],
            [*self.footprints, *(f for f in other.footprints if (f.backend, f.way) not in footprints)],
        )


def as_text(known: Known) -> str:
    """Write what is known as JSON."""
    return json.dumps({"version": VERSION, **asdict(known)}, indent=1)


def from_text(text: str, config: Config) -> Known:
    """Read what is known of backends that are still served, on the GPUs that they still have.

    Unreadable if it is not as it was written.
    """
    content = frames.parse(text, is_foreign=True)
    if isinstance(content, dict):
        if content.pop("version", None) != VERSION:
            return Known()
        content.setdefault("footprints", [])  # a file may lack them
    known: Known = frames.of(Known, content)
    return Known(_costs(known, config), _footprints(known, config))


def recalled(texts: Mapping[str, str], config: Config) -> Known:
    """Read what hosts of the cluster have kept, by the host's name; what cannot be read is left out."""
    found = Known()
    for host, text in texts.items():
        with suppress(Unreadable):
            found = found.with_more(from_text(text, config).of_host(host, config))
    return found


class Keeper(Protocol):
    """A host's watch, which has its host keep a text."""

    learned: str


class LearnedByHost:
    """The texts that hosts of a cluster are to keep of what was learned there. For one thread at a time."""

    def __init__(self) -> None:
        self._told: tuple[Known, int, Config | None] = Known(), 0, None

    def tell(self, known: Known, keepers: Mapping[str, Keeper], config: Config) -> None:
        """Tell all ``keepers``, by host, of which there are only ever more.

        It is asked ten times a second while requests come, and the texts of many models take long to write.
        """
        told = known, len(keepers), config
        if told == self._told:
            return
        self._told = told
        for host, keeper in keepers.items():
            keeper.learned = as_text(known.of_host(host, config))


class LearnedFile:
    """The file ``learned`` in ``folder``. Used by one thread at a time; ``complain`` is told once."""

    def __init__(self, folder: Path, complain: Callable[[str], object]) -> None:
        self._file = folder / "learned"
        self._complain: Callable[[str], object] | None = complain
        self._saved = Known()

    def read(self, config: Config) -> Known:
        """Read what is known of backends that are still served, on the GPUs that they still have."""
        try:
            self._saved = from_text(self._file.read_text(), config)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, Unreadable) as error:
            self._say(f"{self._file} cannot be read, so the costs of swaps are learned from scratch: {error}")
        return self._saved

    def save(self, known: Known) -> None:
        """Writes what has changed since it was read or saved."""
        if known == self._saved:
            return
        self._saved = known
        try:
            write_whole(self._file, as_text(known))
        except OSError as error:
            self._say(f"{self._file} cannot be written, so the learned costs of swaps will be lost: {error}")

    def _say(self, text: str) -> None:
        if self._complain:
            self._complain(text)
            self._complain = None


def _costs(known: Known, config: Config) -> list[Cost]:
    models = {backend.model for backend in config.backends}
    return [cost for cost in known.costs if cost.target in models and cost.seconds >= 0.0]


def _footprints(known: Known, config: Config) -> list[Footprint]:
    gpus = {backend.name: set(backend.gpus) for backend in config.backends}
    return [each for each in known.footprints if each.backend in gpus and _is_sound(each, gpus[each.backend])]


def _is_sound(footprint: Footprint, gpus: set[str]) -> bool:
    held, residual = footprint.held, footprint.residual
    amounts = [*held.values(), *residual.values(), footprint.host_bytes]
    return held.keys() == residual.keys() <= gpus and all(amount >= 0 for amount in amounts)
