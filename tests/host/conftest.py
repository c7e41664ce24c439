"""A stand-in for the Docker Engine, a runtime that asks it, and files that no page cache holds."""

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anvil_mux.config.config import Config
from anvil_mux.host.containers import ContainerRuntime
from anvil_mux.host.weights import is_on_disk
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


@pytest.fixture
def uncached(tmp_path: Path) -> Callable[[str, int], Path]:
    """Makes a file of that name and size (whole pages) of which nothing is in the page cache.

    It is written past the cache: what was written through it does not always leave it when asked to.
    """

    def made(name: str, size: int) -> Path:
        path = tmp_path.resolve() / name
        if not is_on_disk(path):
            pytest.skip("the folder of the tests is not on a disk")
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        with mmap.mmap(-1, size) as pages:
            assert os.write(file, pages) == size
        os.close(file)
        return path

    return made
