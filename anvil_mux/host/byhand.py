"""A swap by hand, without anvil-mux, for the benchmark that compares: Docker's commands, and what GPUs tell.

For processes the runtime's own stop and start take the place of Docker's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Protocol

from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError
from anvil_mux.host import gpu, nvml, project
from anvil_mux.host.docker_api import ContainerEngine, base_url
from anvil_mux.host.docker_endpoint import find_endpoint
from anvil_mux.host.engines import listen_port
from anvil_mux.host.freed import FreedCheck
from anvil_mux.host.local import LocalHost
from anvil_mux.host.project import Project
from anvil_mux.host.seam import HostConfig

DOCKER_SECONDS = 60.0


class Hand(Protocol):
    """A hand that stops and starts a service; every runtime.Runtime is one."""

    def stop(self, backend: Backend) -> None: ...
    def start(self, backend: Backend) -> str: ...


def hand(host: LocalHost, config: HostConfig) -> Hand:
    """Return a hand that stops and starts the services of the configuration."""
    return DockerByHand(config) if config.runtime == "compose" else host.runtime


def held(host: LocalHost, backend: Backend) -> int:
    """The GPU memory that it has, as NVML tells or as declared; 0 where nobody knows."""
    memory = FreedCheck(gpu.probe if host.inventory().gpus else None)
    found = memory.held(backend, lambda: host.runtime.pids(backend), resident=True)
    return sum(found.bytes.values()) or (backend.vram or 0) * len(backend.gpus)


def bus(backend: Backend) -> float | None:
    """Bytes per second that the buses of its GPUs carry together; None where one of them is unknown."""
    known, found = nvml.buses(), gpu.probe()
    links = [known.get(reading.gpu.id) for each in backend.gpus if (reading := found.find(each))]
    return sum(link or 0.0 for link in links) if links and all(links) else None


class DockerByHand:
    """Docker's own commands, as a person types them who knows the container.

    Its address is looked up while it loads, so that costs nothing.
    """

    def __init__(self, config: HostConfig) -> None:
        self._engine = ContainerEngine(find_endpoint(os.environ))
        self._project = Project(config, self._engine)
        self._ids: dict[str, str] = {}

    def stop(self, backend: Backend) -> None:
        grace = math.ceil(backend.stop_timeout)
        self._run(["docker", "stop", "-t", str(grace), self._id(backend)], grace)

    def start(self, backend: Backend) -> str:
        id = self._id(backend)
        self._run(["docker", "start", id])
        container = self._engine.inspect(id)
        url = base_url(container, listen_port(backend)) if container else None
        if url is None:
            raise BackendError(f"service {backend.name} has no address")
        return url

    def _id(self, backend: Backend) -> str:
        if backend.name not in self._ids:
            found = self._project.look_up(backend)
            if found is None:
                raise BackendError(f"service {backend.name} has no container")
            self._ids[backend.name] = found.id
        return self._ids[backend.name]

    def _run(self, argv: Sequence[str], grace: float = 0.0) -> None:
        done = project.run_command(argv, grace + DOCKER_SECONDS, env=os.environ)
        if done.code:
            raise BackendError(f"`{project.short(argv)}` failed: {done.last_line}")
