"""Engines that run already are taken over, if they can stay; those that cannot are stopped.

Each serves as soon as it is adopted, and its GPUs go to no other before it serves, is in standby, or was
stopped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from anvil_mux.config.config import Backend
from anvil_mux.errors import MuxError
from anvil_mux.host.seam import Awake, Evicted, Host, Unfit
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.scheduler.causes import Cause, sentence

T = TypeVar("T")
U = TypeVar("U")
Adopt = Callable[[Mapping[str, str], Mapping[str, Evicted]], list[str]]
"""Takes over what runs (name -> URL) and what is in standby; returns the names of those that cannot stay."""

TOO_MANY = "it cannot stay beside the others"


class Adoption:
    """Takes over engines of one host, and stops them; ``say`` tells whoever started the program why."""

    def __init__(self, host: Host, mux: Multiplexer, say: Callable[[str], object]) -> None:
        self._host = host
        self._mux = mux
        self._say = say
        self.is_over = threading.Event()
        """Set once it is known what ran before we did."""

    def begin(self, backends: Iterable[Backend]) -> None:
        """Take over what answers or is in standby, and stop what is left; while requests come already."""
        for orphan in self._host.orphans():
            self.stop(orphan, sentence(Cause("removed")))
        named = {backend.name: backend for backend in backends}
        running = self._running(named)
        self._mux.facts.looked_at(named.keys() - {backend.name for backend in running})
        side_by_side(self._adopt, running)
        self.is_over.set()

    def take_over(self, backends: Iterable[Backend], adopt: Adopt) -> None:
        """Take over the ``backends`` that run already; ``adopt`` is called whether any does or not."""
        running = self._running({backend.name: backend for backend in backends})
        found = list(zip(running, side_by_side(self._host.adopt, running), strict=True))
        self.stop_all([(each, _anew(each, what)) for each, what in found if isinstance(what, Unfit)])
        awake = {each.name: what.url for each, what in found if isinstance(what, Awake)}
        standby = {each.name: what for each, what in found if isinstance(what, Evicted)}
        refused = adopt(awake, standby)
        self.stop_all([(each, TOO_MANY) for each in running if each.name in refused])

    def stop_all(self, pairs: Sequence[tuple[Backend, str]]) -> None:
        """Stop engines side by side, each for a reason."""
        side_by_side(lambda pair: self.stop(*pair), pairs)

    def stop(self, backend: Backend, why: str) -> None:
        """Stop an engine, and tell why."""
        self._say(f"stopping {backend.name}: {why}")
        try:
            self._host.stop(backend)
        except MuxError as error:
            self._say(f"{backend.name} could not be stopped: {error.message}")

    def _running(self, backends: Mapping[str, Backend]) -> list[Backend]:
        """List the ``backends`` that run."""
        try:
            running = self._host.running() if backends else []
        except MuxError as error:
            self._say(f"cannot see what runs already: {error.message}")
            return []
        return [backend for name, backend in backends.items() if name in running]

    def _adopt(self, backend: Backend) -> None:
        match self._host.adopt(backend):
            case Awake(url):
                refused = self._mux.facts.adopt({backend.name: url})
            case Evicted() as evicted:
                refused = self._mux.facts.adopt({}, {backend.name: evicted})
            case Unfit() as unfit:
                refused = []
                self.stop(backend, _anew(backend, unfit))
        if refused:
            self.stop(backend, TOO_MANY)
        self._mux.facts.looked_at([backend.name])


def _anew(backend: Backend, unfit: Unfit) -> str:
    return f"{unfit.why}; the next request for {backend.model} loads it anew"


def side_by_side(do: Callable[[T], U], items: Sequence[T]) -> list[U]:
    """Call a function for each item, side by side; each may take long."""
    with ThreadPoolExecutor(len(items) or 1) as pool:
        return list(pool.map(do, items))
