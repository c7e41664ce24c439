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
from anvil_mux.host.hosts import Hosts
from anvil_mux.host.seam import Awake, Evicted, Unfit
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.scheduler.causes import Cause, sentence

T = TypeVar("T")
U = TypeVar("U")
Adopt = Callable[[Mapping[str, str], Mapping[str, Evicted]], list[str]]
"""Takes over what runs (name -> URL) and what is in standby; returns the names of those that cannot stay."""

TOO_MANY = "it cannot stay beside the others"


class Adoption:
    """Takes over engines, and stops them; ``say`` tells whoever started the program why."""

    def __init__(self, hosts: Hosts, mux: Multiplexer, say: Callable[[str], object]) -> None:
        self._hosts = hosts
        self._mux = mux
        self._say = say
        self.is_over = threading.Event()
        """Set once it is known what ran on our own host before we did."""

    def begin(self, host: str, backends: Iterable[Backend]) -> None:
        """Take over what answers or is in standby on a host, and stop what is left; requests come already."""
        self.stop_orphans(host)
        named = {backend.name: backend for backend in backends if backend.host == host}
        running = self._running(named)
        self._mux.facts.looked_at(named.keys() - {backend.name for backend in running})
        side_by_side(self._adopt, running)
        if not host:
            self.is_over.set()

    def take_over(self, backends: Iterable[Backend], adopt: Adopt) -> None:
        """Take over the ``backends`` that run already; ``adopt`` is called whether any does or not."""
        running = self._running({backend.name: backend for backend in backends})
        found = list(zip(running, side_by_side(self._hosts.adopt, running), strict=True))
        self.stop_all([(each, _anew(each, what)) for each, what in found if isinstance(what, Unfit)])
        awake = {each.name: what.url for each, what in found if isinstance(what, Awake)}
        standby = {each.name: what for each, what in found if isinstance(what, Evicted)}
        refused = adopt(awake, standby)
        self.stop_all([(each, TOO_MANY) for each in running if each.name in refused])

    def stop_orphans(self, host: str) -> None:
        """Stop what an earlier start served on a host and the configuration has no longer."""
        for orphan in self._hosts[host].orphans():
            self.stop(orphan, sentence(Cause("removed")))

    def stop_all(self, pairs: Sequence[tuple[Backend, str]]) -> None:
        """Stop engines side by side, each for a reason."""
        side_by_side(lambda pair: self.stop(*pair), pairs)

    def stop(self, backend: Backend, why: str) -> None:
        """Stop an engine, and tell why."""
        self._say(f"stopping {backend.name}: {why}")
        try:
            self._hosts.stop(backend)
        except MuxError as error:
            self._say(f"{backend.name} could not be stopped: {error.message}")

    def _running(self, backends: Mapping[str, Backend]) -> list[Backend]:
        """List the ``backends`` that run; those elsewhere always do, as far as we have to care."""
        running: set[str] = set()
        for host in dict.fromkeys(backend.host for backend in backends.values() if not backend.url):
            try:
                running.update(self._hosts[host].running())
            except MuxError as error:
                where = f" on {host}" if host else ""
                self._say(f"cannot see what runs already{where}: {error.message}")
        return [backend for name, backend in backends.items() if backend.url or name in running]

    def _adopt(self, backend: Backend) -> None:
        match self._hosts.adopt(backend):
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
