"""Orders hosts to read weights ahead: those for the loads that queues wait for.

A queue that begins wakes the worker; as long as any queue is there it looks every ``LOOK_SECONDS`` which load
each waits for, and tells a host when that is another one than before. A host stops by itself while it loads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from anvil_mux.clock import Worker
from anvil_mux.config.config import Backend
from anvil_mux.host.hosts import Hosts
from anvil_mux.scheduler.events import Event

LOOK_SECONDS = 0.25
GATHER_SECONDS = 0.01
"""How long a queue is there before anything is read: a load that need not wait has begun by then."""
MOST = 8
"""The most backends of one host that are read ahead."""

ComingLoads = Callable[[Iterable[str]], tuple[list[str], list[Backend]]]
"""The models among some that have a queue, and the backends whose loads they wait for, the next first."""


class ReadingAhead:
    """Tells hosts what to read ahead. ``observe`` is called under the multiplexer's lock."""

    def __init__(self) -> None:
        self._begun: deque[str] = deque()
        """The models whose queues began since the last look."""
        self._queued: list[str] = []
        self._ordered: dict[str, list[Backend]] = {}
        """Host -> the backends that it was told, as they were described."""
        self.worker = Worker("read-ahead", self.look, first=None, gather=GATHER_SECONDS)

    def begin(self, coming_loads: ComingLoads, hosts: Hosts) -> None:
        """Have what is needed to start the worker."""
        self._coming_loads, self._hosts = coming_loads, hosts

    def observe(self, event: Event) -> None:
        """Take an event of the multiplexer."""
        if event.kind == "queued" and event.bound < math.inf:
            self._begun.append(event.model)
            self.worker.wake()

    def look(self) -> float | None:
        """Tell hosts what is to be read now; the seconds until the next look, None if there is no queue."""
        models = dict.fromkeys(self._queued)
        while self._begun:
            models[self._begun.popleft()] = None
        self._queued, backends = self._coming_loads(models)
        wanted: dict[str, list[Backend]] = {host: [] for host in self._ordered}
        for backend in backends:
            if len(on_host := wanted.setdefault(backend.host, [])) < MOST:
                on_host.append(backend)
        for host, each in wanted.items():
            if self._ordered.get(host, []) != each:
                self._hosts[host].read_ahead([backend.name for backend in each])
        self._ordered = {host: each for host, each in wanted.items() if each}
        return LOOK_SECONDS if self._queued else None
