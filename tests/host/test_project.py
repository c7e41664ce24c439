"""The commands that are given to Compose, the one place that runs commands, and images that are missing."""

import os
from dataclasses import replace

import pytest

from anvil_mux.command import Done
from anvil_mux.config.service import Service
from anvil_mux.errors import BackendError
from anvil_mux.host import docker_api, project
from anvil_mux.host.containers import ContainerRuntime
from anvil_mux.host.seam import HostConfig
from tests.host.docker_stand_in import CONFIG, PATIENCE, A, B, replica
from tests.host.test_processes import gone


def test_commands_speak_to_the_engine_that_we_have_found(docker, tmp_path, monkeypatch):
    monkeypatch.setattr(docker_api, "DOCKER_SOCKET", str(tmp_path / "none.sock"))
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\necho engine $DOCKER_HOST; exit 1\n")
    program.chmod(0o700)
    path = f"{tmp_path}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    environ = {"PATH": path, "HOME": str(tmp_path), "CONTAINER_HOST": docker.host}
    runtime = ContainerRuntime(CONFIG, environ=environ)
    with pytest.raises(BackendError, match=f"failed: engine {docker.host}"):
        runtime.start(A)


@pytest.mark.parametrize(
    ("done", "line"),
    [
        (Done(1, "out", " one\n two \n"), "two"),
        (Done(1, "out\n"), "out"),
        (Done(3), "exit status 3"),
    ],
)
def test_what_a_failed_command_said_last(done, line):
    assert done.last_line == line


# The program that runs commands


def test_a_command_does_not_get_the_keys_of_clients(monkeypatch):
    monkeypatch.setenv("ANVIL_API_KEYS", "secret")
    monkeypatch.setenv("ANVIL_OTHER", "1")
    names = {line.partition("=")[0] for line in run("env").out.splitlines()}
    assert "ANVIL_OTHER" in names
    assert "ANVIL_API_KEYS" not in names


def run(*argv: str, timeout: float = PATIENCE) -> Done:
    return project.run_command(argv, timeout, env=os.environ)


def test_a_command_gives_status_and_both_streams():
    assert run("sh", "-c", "echo out; echo err >&2; exit 3") == Done(3, "out\n", "err\n")


def test_a_command_holds_the_lock_that_it_is_given(tmp_path):
    with (tmp_path / "lock").open("w") as lock:
        there = ["test", "-e", f"/proc/self/fd/{lock.fileno()}"]
        assert project.run_command(there, 30.0, env=os.environ, lock=lock.fileno()).code == 0
        assert project.run_command(there, 30.0, env=os.environ).code == 1


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    with pytest.raises(BackendError, match="did not end within 2 s; dockerd may be stuck"):
        run("sh", "-c", f"sleep 1000 & echo $! > {pids}; wait", timeout=2.0)
    gone(int(pids.read_text()))


def test_a_program_that_is_missing_is_named():
    with pytest.raises(BackendError, match=r"no-such-docker cannot be run .*is it installed and on PATH"):
        run("no-such-docker")


# Images


def test_images_that_are_missing_are_listed(docker, monkeypatch):
    other = replace(B, service=Service(name="other", image="gone:1"))
    monkeypatch.setenv("DOCKER_HOST", docker.host)
    assert project.missing_images(HostConfig((A, other, replica(1)))) == [
        "service other: image gone:1 is not present: docker pull gone:1"
    ]
    docker.fails["image"] = [(500, "broken")]
    with pytest.raises(BackendError, match="500"):
        project.missing_images(HostConfig((A, other)), ["a"])
