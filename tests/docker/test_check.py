"""What `check` asks a real Engine: volumes, networks and published ports."""

import secrets

import pytest

from anvil_mux.config.compose import run_compose
from anvil_mux.host import check, processes
from anvil_mux.host.seam import HostConfig
from anvil_mux.plugins import load
from tests.docker.conftest import Stack
from tests.docker.served import docker

IMAGE = "anvil-mux-test/busybox"
TEXT = """
services:
  a: &a
    image: {image}
    command: [sleep, "1000"]
    ports: ["127.0.0.1:{port}:80"]
    volumes: ["models:/m"]
    x-anvil: {{gpus: ["0"]}}
  b: *a
  web: {{image: {image}, command: [sleep, "1000"], ports: ["127.0.0.1:{port}:80"]}}
volumes: {{models: {{external: true, name: {project}-models}}}}
"""


@pytest.fixture
def stack(engine, tmp_path, monkeypatch, free_port):
    project = f"anvil-test-{secrets.token_hex(4)}"
    file = tmp_path / "compose.yaml"
    file.write_text(f"name: {project}{TEXT.format(image=IMAGE, port=free_port, project=project)}")
    monkeypatch.setenv("DOCKER_HOST", engine.host)
    stack = Stack(file, project, (), engine)
    yield stack
    engine.remove(project)
    docker(stack, "volume", "rm", "--force", f"{project}-models")


@pytest.fixture
def free_port():
    return processes.free_port("127.0.0.1", 0)


def test_check_names_what_the_engine_lacks_and_who_has_a_port(stack, free_port):
    config = HostConfig.of(load([stack.file], environ=stack.engine.env, compose=run_compose))
    volume = f"{stack.project}-models"
    [missing] = check.missing_externals(config)
    assert missing.write == f"docker volume create {volume}"
    docker(stack, "volume", "create", volume)
    assert check.missing_externals(config) == check.busy_ports(config) == []
    stack.compose("up", "--detach", "web")
    [busy] = check.busy_ports(config)
    assert busy.startswith(f"services a, b: port {free_port} of its host is in use by the container ")
    stack.compose("stop", "--timeout", "0", "web")
    stack.compose("up", "--detach", "a")
    assert check.busy_ports(config) == []
