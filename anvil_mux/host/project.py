"""The containers of one compose project, and which backend each of them is.

Each container of a scaled service is a backend of its own. Compose numbers them, and gives a new one the
number after the last, so one whose number is beyond the scale stands in for one that somebody removed.

What the engine reports is believed rather than what a request's answer says: ``end`` returns when
``inspect`` no longer shows the container running.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError, MuxError
from anvil_mux.host.container import ALIVE, Container
from anvil_mux.host.docker import ContainerEngine
from anvil_mux.host.endpoint import Unreachable
from anvil_mux.host.seam import HostConfig


class Project:
    """The containers of a project. Any thread; calls for different backends run side by side."""

    def __init__(self, config: HostConfig, engine: ContainerEngine) -> None:
        self.config = config
        self._engine = engine
        self._served = {backend.name: backend for backend in config.backends}
        self._backends = self._served  # and those that are about to go; replaced as a whole
        # Guards the fields below; held for single reads and writes only.
        self._lock = threading.Lock()
        self._ids: dict[str, str] = {}  # backend -> the container that was created, or found fit, for it
        self._owners: dict[str, str] = {}  # container that ran -> its backend

    def reconfigure(self, config: HostConfig) -> None:
        with self._lock:
            self.config = config
            self._served = {backend.name: backend for backend in config.backends}
            self._backends = {**self._backends, **self._served}

    def backend(self, name: str) -> Backend | None:
        return self._backends.get(name)

    def forget(self, backend: Backend) -> None:
        """Forget a backend that was stopped, unless it is configured."""
        with self._lock:
            if backend.name not in self._served:
                self._backends = {n: each for n, each in self._backends.items() if n != backend.name}

    def id(self, backend: Backend) -> str | None:
        """The container that it is known to have had, without asking the engine."""
        with self._lock:
            return self._ids.get(backend.name)

    def runs(self, name: str, container: Container, *, fit: bool) -> None:
        """Note that the container runs as this backend; ``fit``: it is as the backend is described."""
        with self._lock:
            self._owners[container.id] = name
            if fit:
                self._ids[name] = container.id

    def owner(self, id: str) -> str | None:
        with self._lock:
            return self._owners.get(id)

    def find(self, backend: Backend) -> Container | None:
        known = self.id(backend)
        return (self._engine.inspect(known) if known else None) or self.look_up(backend)

    def look_up(self, backend: Backend) -> Container | None:
        return self._places(self.of_service(backend.service_name), backend).get(backend.name)

    def of_service(self, service: str) -> list[Container]:
        return self._inspected(id for id, _ in self._engine.containers(self.config.project, service))

    def alive(self) -> dict[str, Container]:
        """Return our backends whose containers run, with these."""
        ours = {backend.service_name for backend in self._backends.values()}
        listed = self._engine.containers(self.config.project)
        # What is being started is listed as it was before, so each is inspected.
        found = self._inspected(id for id, service in listed if service in ours)
        places = self._places([container for container in found if container.status in ALIVE])
        return {name: places[name] for name in self._backends if name in places}

    def await_stops(self, containers: Iterable[Container], timeout: float) -> bool:
        """Wait for containers that somebody is stopping now; return whether there were any."""
        told = self._engine.told_to_end(self.config.project)
        deadline = time.monotonic() + timeout
        # Podman says itself that it is stopping one.
        ending = [
            each.id
            for each in containers
            if each.status == "stopping"
            or (told.get(each.id, 0.0) > each.started and each.status != "restarting")
        ]
        for id in ending:
            with suppress(Unreachable):
                self._engine.await_end(id, max(deadline - time.monotonic(), 0.1))
        return bool(ending)

    def end(self, container: Container, grace: float | None) -> None:
        """Stop (unless there is no grace), kill, remove: up to the first after which it does not run."""
        if container.status not in ALIVE:
            return
        engine, why = self._engine, ""
        ways: list[Callable[[str], None]] = [engine.kill, engine.remove]
        if grace is not None:
            ways.insert(0, lambda id: engine.stop(id, grace))
        for way in ways:
            try:
                way(container.id)
            except MuxError as error:
                why = f": {error.message}"
            now = engine.inspect(container.id)
            if now is None or now.status not in ALIVE:
                return
        raise BackendError(f"service {container.service} still runs after stop, kill and rm{why}")

    def _inspected(self, ids: Iterable[str]) -> list[Container]:
        """Inspect containers, without those that went away since they were listed."""
        return [found for id in ids if (found := self._engine.inspect(id))]

    def _places(self, found: Sequence[Container], also: Backend | None = None) -> dict[str, Container]:
        """Assign containers to our backends and ``also``: what ran as it, has its number, or is left."""
        backends = {**self._backends, **({also.name: also} if also else {})}
        numbered = {(each.service_name, each.service.number): name for name, each in backends.items()}
        with self._lock:
            owners = {id: name for id, name in self._owners.items() if name in backends}
        places: dict[str, Container] = {}
        spare = []
        for each in sorted(found, key=lambda each: (each.id not in owners, each.number)):
            name = owners.get(each.id) or numbered.get((each.service, each.number))
            if name and name not in places:
                places[name] = each
            else:
                spare.append(each)
        for each in spare:
            free = (n for n, b in backends.items() if b.service_name == each.service and n not in places)
            if name := next(free, None):
                places[name] = each
        return places
