"""A stand-in for the Docker Engine, and a runtime that asks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from anvil_mux.config.config import Config
from anvil_mux.host.containers import ContainerRuntime
from tests.host.docker_stand_in import CONFIG, Docker, listening


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[Docker]:
    docker = Docker(tmp_path / "docker.sock")
    with listening(docker):
        yield docker


def runtime_at(docker: Docker, config: Config = CONFIG) -> ContainerRuntime:
    return ContainerRuntime(config, environ={"DOCKER_HOST": docker.host}, run=docker.run)


@pytest.fixture
def runtime(docker: Docker) -> Iterator[ContainerRuntime]:
    runtime = runtime_at(docker)
    yield runtime
    runtime.close()
