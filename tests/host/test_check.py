"""What a machine lacks for a configuration: programs, models, mounted folders, and a fit container engine."""

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from anvil_mux.errors import MuxError
from anvil_mux.host import check
from anvil_mux.host.seam import HostConfig
from anvil_mux.plugins import load
from tests.host.docker_stand_in import A


def lacking(folder: Path, text: str) -> list[str]:
    file = folder / "compose.yaml"
    file.write_text(text)
    config = HostConfig.of(load([file], compose=None, environ={}))
    return [each.replace(f"{folder}/", "") for each in check.missing_files(config)]


@pytest.fixture(autouse=True)
def engine_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")


def process(service: str) -> str:
    return f"x-anvil: {{runtime: process}}\nservices: {{a: {{x-anvil: {{gpus: []}}, {service}}}}}"


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        ("command: no-such-program", "service a: its program no-such-program is not on PATH"),
        (
            "command: [./no-such], working_dir: there",
            "service a: its program there/no-such is not there, or may not be run",
        ),
        (
            "command: [./file], working_dir: there",
            "service a: its program there/file is not there, or may not be run",
        ),
        ("command: sh, working_dir: nowhere", "service a: its working_dir nowhere is not there"),
        ("command: sh -m there/b.gguf", "service a: its model there/b.gguf is not there"),
        ("command: sh --model=./there/b", "service a: its model there/b is not there"),
        ("command: sh serve ../b, working_dir: there", "service a: its model b is not there"),
        ("command: sh -m there/a.gguf", ""),
        ("command: sh -m there/b.gguf --model-url https://x/b.gguf", ""),
        ("command: sh serve org/name", ""),
        ("command: own, environment: {PATH: there/bin}", ""),
    ],
)
def test_what_a_process_lacks(tmp_path, service, expected, monkeypatch):
    (tmp_path / "there" / "bin").mkdir(parents=True)
    (tmp_path / "there" / "a.gguf").touch()
    (tmp_path / "there" / "file").touch()
    (tmp_path / "there" / "bin" / "own").touch(0o755)
    monkeypatch.chdir(tmp_path)
    assert lacking(tmp_path, process(service)) == [expected] * bool(expected)


VOLUMES = "services: {a: {image: x, volumes: ['%s:/models:ro', named:/n, /n], command: [%s], x-anvil: {}}}"


@pytest.mark.parametrize(
    ("mount", "words", "expected"),
    [
        (
            "./absent",
            "-m, /models/a.gguf",
            "service a: it mounts absent, which is not there: Docker makes an empty folder of it",
        ),
        ("./there", "-m, /models/b.gguf", "service a: its model there/b.gguf is not there"),
        ("./there", "serve, /models/c", "service a: its model there/c is not there"),
        ("./there", "-m, /models/a.gguf", ""),
        ("./there", "-m, /in/the/image.gguf", ""),
        ("./there", "-m, /n/b.gguf", ""),
    ],
)
def test_what_a_container_lacks(tmp_path, mount, words, expected):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.gguf").touch()
    assert lacking(tmp_path, VOLUMES % (mount, words)) == [expected] * bool(expected)


def test_the_files_of_an_engine_on_another_machine_are_not_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "ssh://user@host")
    assert lacking(tmp_path, VOLUMES % ("./absent", "x")) == []


def test_in_a_container_only_what_lies_beside_the_file_is_looked_for(tmp_path, monkeypatch):
    for marks, expected in (((), ["/no/such"]), ((str(tmp_path),), [])):
        monkeypatch.setattr(check, "IN_CONTAINER", marks)
        found = lacking(tmp_path, VOLUMES % ("/no/such", "x"))
        assert [each.split()[4].rstrip(",") for each in found] == expected


# What the container engine cannot do


FROZEN = replace(A, evict_to=("freeze", "stop"))
RESERVING = replace(A, gpus=("0", "1"), service=replace(A.service, gpus_by="reservation"))
BY_CDI = replace(A, gpus=("0",), service=replace(A.service, gpus_by="cdi"))
PODMAN = {"Rootless": True, "CgroupVersion": "1", "ServerVersion": "4.3.1"}


@pytest.mark.parametrize(
    ("podman", "said", "backend", "limits"),
    [
        (True, PODMAN, FROZEN, ["a: freeze cannot work"]),
        (True, {**PODMAN, "CgroupVersion": "2"}, FROZEN, []),
        (True, {**PODMAN, "Rootless": False}, FROZEN, []),
        (
            False,
            {"SecurityOptions": ["name=rootless"], "CgroupVersion": "1"},
            FROZEN,
            ["a: freeze cannot work"],
        ),
        (False, {"SecurityOptions": ["name=seccomp"], "CgroupVersion": "1"}, FROZEN, []),
        (True, PODMAN, A, []),
        (True, PODMAN, RESERVING, ["write devices: [nvidia.com/gpu=0, nvidia.com/gpu=1] (CDI) instead"]),
        (False, {"ServerVersion": "28.0"}, RESERVING, []),
        (True, PODMAN, BY_CDI, ["a: Podman 4.3.1 takes no GPU of CDI from Compose; 5.4 does"]),
        (True, {"ServerVersion": "5.4.0-dev"}, BY_CDI, []),
        (True, {"ServerVersion": "5.10.2"}, BY_CDI, []),
    ],
)
def test_what_an_engine_cannot_do_is_listed(docker, podman, said, backend, limits, monkeypatch):
    docker.podman, docker.said = podman, said
    monkeypatch.setenv("DOCKER_HOST", docker.host)
    found = check.engine_limits(HostConfig((backend,)))
    assert len(found) == len(limits)
    assert all(limit in each for limit, each in zip(limits, found, strict=True)), found


# Volumes, networks and ports


USING = """
services:
  a:
    image: x
    volumes: [models:/m, {type: volume, source: cache, target: /c}]
    networks: [own, front]
    x-anvil: {}
  b: {image: x, x-anvil: {}, volumes: ['models:/m'], depends_on: [c]}
  c: {image: x, volumes: ['more:/m']}
volumes: {models: {external: true}, cache: {external: true, name: its-cache}, more: {external: {name: m}}}
networks: {own: {}, front: {external: true}}
"""


def read(folder, text):
    file = folder / "compose.yaml"
    file.write_text(f"name: p\n{text}")
    return HostConfig.of(load([file], compose=None, environ={}))


def test_an_external_volume_or_network_that_does_not_exist_is_named_once(docker, tmp_path, monkeypatch):
    docker.volumes = ["its-cache"]
    monkeypatch.setenv("DOCKER_HOST", docker.host)
    assert check.missing_externals(read(tmp_path, USING)) == [
        "services a, b: the external volume models does not exist; "
        "make it with `docker volume create models`",
        "service a: the external network front does not exist; make it with `docker network create front`",
        "service b: the external volume m does not exist; make it with `docker volume create m`",
    ]
    assert sorted(docker.verbs()) == ["networks", "volumes"]


def test_nothing_is_asked_where_nothing_is_external(docker, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", docker.host)
    assert check.missing_externals(read(tmp_path, "services: {a: {image: x, x-anvil: {}}}")) == []
    assert docker.verbs() == []


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def publishing(port):
    service = f"{{image: x, x-anvil: {{gpus: ['0'], port: 80}}, ports: ['127.0.0.1:{port}:80']}}"
    return f"services: {{a: {service}, b: {service}}}"


def test_a_busy_host_port_is_named_with_its_holder(docker, tmp_path, monkeypatch, listener):
    monkeypatch.setattr(check, "IN_CONTAINER", ())
    monkeypatch.setenv("DOCKER_HOST", docker.host)
    [found] = check.busy_ports(read(tmp_path, publishing(listener)))
    assert found.startswith(f"services a, b: port {listener} of its host is in use by ")
    assert f"(process {os.getpid()})" in found


@pytest.mark.parametrize(
    ("service", "project", "found"),
    [
        ("a", "p", []),
        ("b", "p", []),
        ("web", "p", ["services a, b: port 1 of its host is in use by the container c1"]),
        ("a", "q", ["services a, b: port 1 of its host is in use by the container c1"]),
    ],
    ids=["its own", "another model of ours", "another service of ours", "another project"],
)
def test_a_port_of_a_container_is_busy_unless_it_is_an_engine_of_ours(
    docker, tmp_path, monkeypatch, service, project, found
):
    monkeypatch.setattr(check, "IN_CONTAINER", ())
    monkeypatch.setenv("DOCKER_HOST", docker.host)
    docker.add("c1", service)
    docker.containers["c1"]["Published"] = [1]
    docker.containers["c1"]["Config"]["Labels"]["com.docker.compose.project"] = project
    assert [each.partition(";")[0] for each in check.busy_ports(read(tmp_path, publishing(1)))] == found


def test_a_port_is_not_probed_in_a_container_whose_host_has_others(docker, tmp_path, monkeypatch, listener):
    monkeypatch.setattr(check, "IN_CONTAINER", (str(tmp_path),))
    monkeypatch.setenv("DOCKER_HOST", docker.host)
    assert check.busy_ports(read(tmp_path, publishing(listener))) == []


def test_no_port_is_claimed_to_be_busy_while_docker_does_not_answer(tmp_path, monkeypatch, listener):
    monkeypatch.setattr(check, "IN_CONTAINER", ())
    with pytest.raises(MuxError):
        check.busy_ports(read(tmp_path, publishing(listener)))


def test_a_busy_port_of_a_process_is_named(tmp_path, monkeypatch, listener):
    monkeypatch.setattr(check, "IN_CONTAINER", ())
    text = process(f"command: [sh, --port, '{listener}']").replace("gpus: []", f"gpus: [], port: {listener}")
    [found] = check.busy_ports(read(tmp_path, text))
    assert found.startswith(f"service a: port {listener} of its host is in use by ")
    assert found.endswith("end that, or leave out `port`")
