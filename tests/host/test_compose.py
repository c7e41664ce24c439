"""ComposeRuntime against a stand-in for the docker program that keeps containers and notes every command."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from types import SimpleNamespace
from typing import Any

import pytest

from anvil_mux.config.config import Backend, Config, Service
from anvil_mux.errors import BackendError, LoadError
from anvil_mux.host import compose
from anvil_mux.host.compose import (
    ComposeRuntime,
    Container,
    Done,
    base_url,
    complaint,
    how_it_ended,
    parse_inspect,
)
from tests.host.test_process import gone

PATIENCE = 30.0
A = Backend(name="a", model="a", engine="llamacpp", stop_timeout=3.5, service=Service(image="llama:1"))
B = replace(A, name="b", model="b")


def replica(number: int) -> Backend:
    return replace(A, name=f"s-{number}", service=Service(name="s", number=number, scale=3))


REPLICAS = (replica(1), replica(2), replica(3))
CONFIG = Config(backends=(A, B, *REPLICAS), project="p", files=("/s/compose.yaml", "/s/more.yaml"))

NO_DAEMON = (
    "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
)


# The commands


def test_create_neither_pulls_nor_builds():
    assert compose.compose_create(CONFIG, "a") == [
        *["docker", "compose", "--ansi", "never", "-f", "/s/compose.yaml", "-f", "/s/more.yaml"],
        *["-p", "p", "--profile", "*", "create", "--no-build", "--pull", "never", "a"],
    ]


def test_create_anew():
    assert compose.compose_create(CONFIG, "a", "--force-recreate")[-5:] == [
        *["--no-build", "--pull", "never", "--force-recreate", "a"]
    ]


def test_ps_asks_for_the_projects_services_and_not_for_one_off_runs():
    ours = [
        "--filter",
        "label=com.docker.compose.project=p",
        "--filter",
        "label=com.docker.compose.oneoff=False",
    ]
    assert compose.docker_ps("p") == ["docker", "ps", "--quiet", "--no-trunc", *ours]
    assert compose.docker_ps("p", "a", all=True) == [
        *["docker", "ps", "--quiet", "--no-trunc", "--all", *ours],
        *["--filter", "label=com.docker.compose.service=a"],
    ]


def test_the_hot_path_is_plain_docker():
    assert compose.docker_inspect(["c1", "c2"]) == ["docker", "container", "inspect", "c1", "c2"]
    assert compose.docker_start("c1") == ["docker", "start", "c1"]
    assert compose.docker_pause("c1") == ["docker", "pause", "c1"]
    assert compose.docker_unpause("c1") == ["docker", "unpause", "c1"]
    assert compose.docker_top("c1") == ["docker", "top", "c1", "-eo", "pid"]
    assert compose.docker_stop("c1", 3.5) == ["docker", "stop", "-t", "4", "c1"]
    assert compose.docker_kill("c1") == ["docker", "kill", "c1"]
    assert compose.docker_rm("c1") == ["docker", "rm", "--force", "c1"]


def test_logs_and_events():
    logs = ["docker", "logs", "--tail"]
    assert compose.docker_logs("c1", 20, since=1.5) == [*logs, "20", "--since", "1.500", "c1"]
    assert compose.docker_follow("c1", 100) == [*logs, "100", "--follow", "c1"]
    assert compose.docker_events("p", 12.3456) == [
        *["docker", "events", "--since", "12.346", "--filter", "type=container", "--filter", "event=die"],
        *["--filter", "label=com.docker.compose.project=p"],
        *["--format", "{{.Actor.ID}} {{.Actor.Attributes.exitCode}}"],
    ]


# What Docker says

INSPECTED = {
    "Id": "0f95e31e3d91",
    "Name": "/p-a-1",
    "State": {
        "Status": "running",
        "Running": True,
        "OOMKilled": False,
        "ExitCode": 0,
        "Error": "",
        "StartedAt": "2026-11-21T13:38:31.55644524Z",
        "FinishedAt": "0001-01-01T00:00:00Z",
    },
    "HostConfig": {"NetworkMode": "p_default"},
    "Config": {
        "Labels": {
            "com.docker.compose.config-hash": "58a4aa18",
            "com.docker.compose.container-number": "1",
            "com.docker.compose.project": "p",
            "com.docker.compose.service": "a",
        }
    },
    "NetworkSettings": {
        "Ports": {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": "32775"}], "9090/tcp": None},
        "Networks": {"p_default": {"IPAddress": "172.21.0.2"}, "other": {"IPAddress": ""}},
    },
}


def test_inspect_is_read():
    assert parse_inspect(json.dumps([INSPECTED])) == [
        Container(
            id="0f95e31e3d91",
            service="a",
            number=1,
            status="running",
            started_at="2026-11-21T13:38:31.55644524Z",
            network_mode="p_default",
            ports=(("8080/tcp", "127.0.0.1", 32775),),
            ips=("172.21.0.2",),
        )
    ]


RUNNING = Container(id="c1", service="a", number=1, status="running", started_at="T1")


@pytest.mark.parametrize(
    ("special", "url"),
    [
        ({"ports": (("8080/tcp", "127.0.0.1", 32775),)}, "http://127.0.0.1:32775"),
        ({"ports": (("8080/tcp", "0.0.0.0", 81), ("8080/tcp", "::", 81))}, "http://127.0.0.1:81"),
        ({"ports": (("8080/tcp", "::", 81),)}, "http://[::1]:81"),
        ({"ports": (("8080/tcp", "10.1.1.1", 81),)}, "http://10.1.1.1:81"),
        ({"ports": (("8080/udp", "127.0.0.1", 81),), "ips": ("172.21.0.2",)}, "http://172.21.0.2:8080"),
        ({"ips": ("172.21.0.2",)}, "http://172.21.0.2:8080"),
        ({"network_mode": "host"}, "http://127.0.0.1:8080"),
        ({}, None),
    ],
)
def test_where_an_engine_is_reached(special: dict[str, Any], url: str | None):
    assert base_url(replace(RUNNING, **special), 8080) == url


@pytest.mark.parametrize(
    ("special", "how"),
    [
        ({}, None),
        ({"status": "paused"}, None),
        ({"status": "exited", "exit_code": 1}, "exited with code 1"),
        ({"status": "exited", "exit_code": 137}, "was killed (code 137)"),
        ({"status": "exited", "exit_code": 139}, "exited with code 139 (SIGSEGV)"),
        ({"status": "exited", "exit_code": 255}, "exited with code 255"),
        ({"status": "created"}, "has not been started"),
        ({"status": "created", "error": "no device"}, "has not been started (no device)"),
        ({"status": "restarting", "exit_code": 2}, "exited with code 2, and Docker is restarting it"),
    ],
)
def test_how_a_container_ended(special: dict[str, Any], how: str | None):
    assert how_it_ended(replace(RUNNING, **special)) == how


def test_out_of_memory_is_said_plainly():
    how = how_it_ended(replace(RUNNING, status="exited", exit_code=137, oom_killed=True))
    assert how is not None
    assert "out of memory (OOM)" in how


@pytest.mark.parametrize(
    ("stderr", "error", "says"),
    [
        (NO_DAEMON, BackendError, "Start dockerd, or set DOCKER_HOST"),
        (
            "permission denied while trying to connect to the Docker daemon socket",
            BackendError,
            "group docker",
        ),
        ("unknown shorthand flag: 'f' in -f", BackendError, "Docker Compose v2 is needed"),
        (
            "Error response from daemon: no such image: x:1: No such image: x:1",
            LoadError,
            "no such image: x:1",
        ),
        ("Error response from daemon: Conflict", BackendError, r"`docker start c1` failed: Error.*Conflict"),
        (
            'warning: old\nError: could not select device driver "nvidia" with capabilities: [[gpu]]',
            LoadError,
            "NVIDIA Container Toolkit",
        ),
        ("Bind for 0.0.0.0:80 failed: port is already allocated", LoadError, "127.0.0.1::PORT"),
        ("", BackendError, "exit status 1"),
    ],
)
def test_a_failed_command_becomes_an_error_that_says_what_to_do(stderr: str, error: type, says: str):
    with pytest.raises(error, match=says):
        raise complaint(["docker", "start", "c1"], Done(1, "", stderr))


# A Docker to play with


@dataclass
class Docker:
    """Containers by id, and every command that was given."""

    containers: dict[str, dict[str, Any]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    fails: dict[str, list[str]] = field(default_factory=dict)
    """Verb -> the error text of its next calls."""
    ignores: set[str] = field(default_factory=set)
    """Verbs that report success and do nothing."""
    scale: int = 1
    changed: bool = False
    """The description of the services, since their containers were made."""
    logs: str = ""
    since: float = 0.0
    moment: int = 0

    def add(
        self, id: str, service: str = "a", status: str = "running", number: str = "1", **more: Any
    ) -> str:
        self.moment += 1
        self.containers[id] = {
            "Id": id,
            "State": {"Status": status, "StartedAt": self.now(), "ExitCode": 0, **more},
            "HostConfig": {"NetworkMode": "p_default"},
            "Config": {
                "Labels": {
                    "com.docker.compose.service": service,
                    "com.docker.compose.container-number": number,
                }
            },
            "NetworkSettings": {"Ports": {"8080/tcp": [{"HostIp": "127.0.0.1", "HostPort": "40001"}]}},
        }
        return id

    def now(self) -> str:
        return f"2026-11-21T13:00:{self.moment:02}.55644524Z"

    def state(self, id: str) -> dict[str, Any]:
        return self.containers[id]["State"]  # type: ignore[no-any-return]

    def end(self, id: str, code: int = 137) -> None:
        self.state(id).update(Status="exited", ExitCode=code)

    def verbs(self) -> list[str]:
        """The commands since the last call."""
        seen, self.commands = self.commands, []
        return seen

    def __call__(self, argv: Sequence[str], timeout: float, *, merge: bool = False) -> Done:
        assert argv[0] == "docker"
        assert timeout > 0
        verb = next(word for word in argv if word in VERBS)
        self.commands.append(verb)
        if self.fails.get(verb):
            return Done(1, "", self.fails[verb].pop(0))
        if verb in self.ignores:
            return Done(0)
        return getattr(self, f"do_{verb}")(argv)  # type: ignore[no-any-return]

    def do_create(self, argv: Sequence[str]) -> Done:
        """As Compose: up to the service's scale, each with the number after the last."""
        service = argv[-1]
        old = [id for id, each in self.containers.items() if self._service(each) == service]
        if "--force-recreate" in argv or (self.changed and "--no-recreate" not in argv):
            for id in old:
                del self.containers[id]
            old = []
        last = max([self.number(id) for id in old], default=0)
        for number in range(last + 1, last + 1 + self.scale - len(old)):
            self.add(f"new-{service}-{number}-{self.moment}", service, "created", str(number))
        return Done(0, "", " Container created")

    def number(self, id: str) -> int:
        return int(self.containers[id]["Config"]["Labels"]["com.docker.compose.container-number"])

    def do_ps(self, argv: Sequence[str]) -> Done:
        services = [word.rpartition("=")[2] for word in argv if ".service=" in word]
        found = [
            id
            for id, each in self.containers.items()
            if not services or self._service(each) in services
            if "--all" in argv or each["State"]["Status"] in ("running", "paused", "restarting")
        ]
        return Done(0, "\n".join(found))

    def do_inspect(self, argv: Sequence[str]) -> Done:
        known = [self.containers[id] for id in argv[3:] if id in self.containers]
        missing = [f"Error response from daemon: No such container: {id}" for id in argv[3:]]
        missing = [line for line in missing if line.rpartition(" ")[2] not in self.containers]
        return Done(bool(missing), json.dumps(known), "\n".join(missing))

    def do_start(self, argv: Sequence[str]) -> Done:
        if argv[-1] not in self.containers:
            return Done(1, "", f"Error response from daemon: No such container: {argv[-1]}")
        match self.state(argv[-1])["Status"]:
            case "paused":
                return Done(1, "", "cannot start a paused container, try unpause instead")
            case "dead" | "removing":
                return Done(1, "", "container is marked for removal and cannot be started")
            case "created" | "exited":
                self.moment += 1
                self.state(argv[-1]).update(Status="running", StartedAt=self.now())
        return Done(0)

    def do_stop(self, argv: Sequence[str]) -> Done:
        self.end(argv[-1], 0)
        return Done(0)

    def do_kill(self, argv: Sequence[str]) -> Done:
        self.end(argv[-1], 137)
        return Done(0)

    def do_pause(self, argv: Sequence[str]) -> Done:
        self.state(argv[-1]).update(Status="paused")
        return Done(0)

    def do_top(self, argv: Sequence[str]) -> Done:
        if self.state(argv[2])["Status"] not in ("running", "paused"):
            return Done(1, "", f"Error response from daemon: container {argv[2]} is not running")
        return Done(0, "PID\n4711\n4712\n")

    def do_unpause(self, argv: Sequence[str]) -> Done:
        self.state(argv[-1]).update(Status="running")
        return Done(0)

    def do_rm(self, argv: Sequence[str]) -> Done:
        self.containers.pop(argv[-1], None)
        return Done(0)

    def do_logs(self, argv: Sequence[str]) -> Done:
        self.since = float(argv[argv.index("--since") + 1])
        return Done(0, self.logs)

    @staticmethod
    def _service(container: dict[str, Any]) -> str:
        return container["Config"]["Labels"]["com.docker.compose.service"]  # type: ignore[no-any-return]


VERBS = {"create", "ps", "inspect", "start", "stop", "kill", "rm", "pause", "unpause", "top", "logs"}


@pytest.fixture
def docker() -> Docker:
    return Docker()


@pytest.fixture
def runtime(docker: Docker) -> Iterator[ComposeRuntime]:
    runtime = ComposeRuntime(CONFIG, run=docker)
    yield runtime
    runtime.close()


URL = "http://127.0.0.1:40001"


def test_the_first_start_creates_the_container_and_later_ones_do_not_pay_compose(
    docker: Docker, runtime: ComposeRuntime
):
    assert runtime.start(A) == URL
    assert docker.verbs() == ["create", "ps", "inspect", "start", "inspect"]
    runtime.stop(A)
    assert docker.verbs() == ["inspect", "stop", "inspect"]
    assert runtime.start(A) == URL
    assert docker.verbs() == ["start", "inspect"]


def test_a_running_service_is_not_started_again(docker: Docker, runtime: ComposeRuntime):
    runtime.start(A)
    run = runtime._find(A).run
    runtime.start(A)
    assert runtime._find(A).run == run


def test_a_paused_service_is_unpaused(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1", status="paused")
    assert runtime.start(A) == URL
    assert "unpause" in docker.verbs()


def test_an_image_that_is_missing_is_named_with_the_command_that_gets_it(
    docker: Docker, runtime: ComposeRuntime
):
    docker.fails["create"] = ["Error response from daemon: no such image: llama:1: No such image: llama:1"]
    with pytest.raises(LoadError, match=r"^image llama:1 is not present: docker pull llama:1$"):
        runtime.start(A)


def test_an_image_that_is_not_built_is_named_with_the_command_that_builds_it(docker: Docker):
    built = replace(A, service=Service())
    runtime = ComposeRuntime(replace(CONFIG, backends=(built,)), run=docker)
    docker.fails["create"] = ["no such image: p-a: No such image: p-a:latest"]
    with pytest.raises(LoadError, match=r"docker compose -f /s/compose.yaml -f /s/more.yaml -p p build a"):
        runtime.start(built)


def test_the_image_that_is_named_is_the_one_that_docker_misses(docker: Docker, runtime: ComposeRuntime):
    docker.fails["create"] = ["Error response from daemon: No such image: sidecar:2"]
    with pytest.raises(LoadError, match=r"^image sidecar:2 is not present: docker pull sidecar:2$"):
        runtime.start(A)


@pytest.mark.parametrize("status", ["dead", "removing"])
def test_a_container_that_is_half_removed_is_made_anew(docker: Docker, runtime: ComposeRuntime, status: str):
    docker.add("c1", status=status)
    assert runtime.start(A) == URL
    assert list(docker.containers) != ["c1"]


def test_a_container_that_somebody_removed_is_made_anew(docker: Docker, runtime: ComposeRuntime):
    runtime.start(A)
    docker.containers.clear()
    assert runtime.start(A) == URL


def test_a_network_that_somebody_removed_is_made_anew(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1", status="exited")
    docker.fails["start"] = ["Error response from daemon: network 89c547813c82 not found"]
    assert runtime.start(A) == URL
    assert "c1" not in docker.containers


def test_a_service_that_ends_at_once_says_so(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1", status="exited", ExitCode=1)
    docker.containers["c1"]["NetworkSettings"] = {}
    docker.ignores = {"start"}
    with pytest.raises(LoadError, match=r"service a exited with code 1"):
        runtime.start(A)


def test_a_service_without_an_address_says_what_to_publish(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1")
    docker.containers["c1"]["NetworkSettings"] = {}
    with pytest.raises(LoadError, match=r'publish its port, such as ports: \["127.0.0.1::8080"\]'):
        runtime.start(A)


def test_docker_that_does_not_answer_is_a_backend_error(docker: Docker, runtime: ComposeRuntime):
    docker.fails["create"] = [NO_DAEMON]
    with pytest.raises(BackendError, match="Start dockerd"):
        runtime.start(A)


def test_the_first_container_is_used_where_somebody_made_more(docker: Docker, runtime: ComposeRuntime):
    docker.add("c2", number="2")
    docker.add("c1", number="1")
    docker.end("c1", 5)
    assert runtime.ended(A) == "exited with code 5"


# Another configuration


def described(backend: Backend, digest: str) -> Backend:
    return replace(backend, service=replace(backend.service, digest=digest))


def test_a_service_that_is_described_otherwise_is_made_anew_by_its_next_start(
    docker: Docker, runtime: ComposeRuntime
):
    runtime.start(A)
    (first,) = docker.containers
    runtime.reconfigure(replace(CONFIG, backends=(described(A, "other"), B)))
    runtime.stop(A)
    assert docker.state(first)["Status"] == "exited"
    runtime.start(described(A, "other"))
    assert first not in docker.containers
    docker.verbs()
    runtime.stop(described(A, "other"))
    runtime.start(described(A, "other"))
    assert "create" not in docker.verbs()


def test_so_is_one_that_was_found_running(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1")
    assert runtime.running() == {"a": URL}
    runtime.reconfigure(replace(CONFIG, backends=(described(A, "other"), B)))
    runtime.stop(A)
    runtime.start(described(A, "other"))
    assert "c1" not in docker.containers


def test_a_service_that_goes_on_is_not_asked_of_compose_again(docker: Docker, runtime: ComposeRuntime):
    runtime.start(A)
    runtime.reconfigure(replace(CONFIG, backends=(replace(A, ttl=1.0), B)))
    runtime.stop(A)
    docker.verbs()
    runtime.start(replace(A, ttl=1.0))
    assert docker.verbs() == ["start", "inspect"]


def test_a_service_that_is_served_no_longer_is_ours_until_it_was_stopped(
    docker: Docker, runtime: ComposeRuntime
):
    runtime.start(B)
    runtime.reconfigure(replace(CONFIG, backends=(A,)))
    assert runtime.running() == {"b": URL}
    runtime.stop(B)
    docker.add("c9", "b")
    assert runtime.running() == {}


def test_a_replica_that_is_described_otherwise_is_made_anew_beside_those_that_still_run(
    docker: Docker, runtime: ComposeRuntime
):
    docker.scale = 3
    for each in REPLICAS:
        runtime.start(each)
    others = [described(each, "other") for each in REPLICAS]
    runtime.reconfigure(replace(CONFIG, backends=tuple(others)))
    first = {docker.number(id): id for id in docker.containers}
    runtime.stop(REPLICAS[0])
    runtime.start(others[0])
    assert first[1] not in docker.containers
    assert up(docker) == [2, 3, 4]
    runtime.stop(REPLICAS[1])
    runtime.start(others[1])
    assert up(docker) == [3, 4, 5]


# Scaled services


@pytest.fixture
def scaled(docker: Docker, runtime: ComposeRuntime) -> ComposeRuntime:
    docker.scale = 3
    return runtime


def up(docker: Docker) -> list[int]:
    """The numbers of the containers that run."""
    return sorted(docker.number(id) for id in docker.containers if docker.state(id)["Status"] == "running")


def test_each_container_of_a_scaled_service_is_started_and_stopped_alone(
    docker: Docker, scaled: ComposeRuntime
):
    scaled.start(REPLICAS[1])
    assert up(docker) == [2]
    scaled.start(REPLICAS[2])
    scaled.stop(REPLICAS[1])
    assert up(docker) == [3]
    assert scaled.ended(REPLICAS[0]) == "has not been started"


def test_containers_that_run_are_adopted_by_their_numbers(docker: Docker, scaled: ComposeRuntime):
    docker.add("c3", "s", number="3")
    docker.add("c1", "s", number="1")
    assert list(scaled.running()) == ["s-1", "s-3"]
    scaled.stop(REPLICAS[2])
    assert up(docker) == [1]


def test_a_container_that_somebody_removed_is_replaced_beside_those_that_run(
    docker: Docker, scaled: ComposeRuntime
):
    for each in REPLICAS:
        scaled.start(each)
    docker.containers.pop(next(id for id in docker.containers if docker.number(id) == 2))
    scaled.start(REPLICAS[1])
    assert up(docker) == [1, 3, 4]
    scaled.stop(REPLICAS[2])
    scaled.stop(REPLICAS[0])
    assert up(docker) == [4]
    assert scaled.ended(REPLICAS[1]) is None


def test_who_stands_in_for_a_removed_container_does_so_after_a_restart_too(
    docker: Docker, scaled: ComposeRuntime
):
    docker.add("c4", "s", number="4")
    docker.add("c3", "s", number="3")
    docker.add("c1", "s", number="1", status="exited")
    assert list(scaled.running()) == ["s-1", "s-3"]  # the one that runs is needed, not its number
    scaled.start(REPLICAS[1])
    assert up(docker) == [1, 3, 4]


def test_a_changed_description_does_not_end_replicas_that_run(docker: Docker, scaled: ComposeRuntime):
    docker.add("c1", "s", number="1")
    scaled.running()
    docker.changed = True
    scaled.start(REPLICAS[1])
    assert up(docker) == [1, 2]
    scaled.stop(REPLICAS[0])
    scaled.stop(REPLICAS[1])
    scaled.start(REPLICAS[2])
    assert "c1" not in docker.containers


def test_a_replica_that_is_half_removed_is_made_anew_beside_those_that_run(
    docker: Docker, scaled: ComposeRuntime
):
    docker.add("c1", "s", number="1")
    docker.add("c2", "s", number="2", status="dead")
    scaled.running()
    scaled.start(REPLICAS[1])
    assert "c2" not in docker.containers
    assert docker.state("c1")["Status"] == "running"


def test_a_replica_that_is_described_otherwise_is_made_anew_without_the_others(
    docker: Docker, scaled: ComposeRuntime
):
    for each in REPLICAS[:2]:
        scaled.start(each)
    before = {docker.number(id): id for id in docker.containers}
    scaled.stop(REPLICAS[0])
    scaled.stop(REPLICAS[1])
    scaled.start(replace(REPLICAS[1], service=replace(REPLICAS[1].service, digest="other")))
    assert docker.containers.keys() & before.values() == {before[1], before[3]}
    assert up(docker) == [4]


def test_a_replica_that_the_configuration_has_no_longer_can_be_stopped(
    docker: Docker, scaled: ComposeRuntime
):
    docker.add("c3", "s", number="3")
    docker.add("c4", "s", number="4")
    scaled.stop(replica(4))
    assert up(docker) == [3]


def test_stopping_what_does_not_run_or_exist_is_no_error(docker: Docker, runtime: ComposeRuntime):
    runtime.stop(A)
    docker.add("c1", status="exited")
    runtime.stop(A)
    assert not {"stop", "kill", "rm"} & set(docker.verbs())


def test_a_stop_that_does_not_hold_is_followed_by_kill_and_rm(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1")
    docker.ignores = {"stop"}
    docker.fails["kill"] = ["Error: cannot kill"]
    runtime.stop(A)
    assert [verb for verb in docker.verbs() if verb in ("stop", "kill", "rm")] == ["stop", "kill", "rm"]
    assert not docker.containers


def test_a_service_that_nothing_ends_is_an_error(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1")
    docker.ignores = {"stop", "kill"}
    docker.fails["rm"] = ["Error: could not kill: tried to kill container, but did not receive an exit event"]
    with pytest.raises(BackendError, match=r"service a still runs after stop, kill and rm.*exit event"):
        runtime.stop(A)


def test_a_kill_has_no_grace(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1")
    runtime.kill(A)
    assert docker.verbs() == ["ps", "inspect", "kill", "inspect"]


def test_a_service_is_frozen_and_let_go_on(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1")
    runtime.pause(A)
    assert docker.state("c1")["Status"] == "paused"
    assert runtime.ended(A) is None
    runtime.resume(A)
    assert docker.state("c1")["Status"] == "running"
    docker.verbs()
    runtime.resume(A)
    assert "unpause" not in docker.verbs()


@pytest.mark.parametrize("frozen", [True, False])
def test_what_does_not_run_can_neither_be_frozen_nor_let_go_on(
    docker: Docker, runtime: ComposeRuntime, frozen: bool
):
    call = runtime.resume if frozen else runtime.pause
    with pytest.raises(BackendError, match="service a has no container"):
        call(A)
    docker.add("c1", status="exited", ExitCode=3)
    with pytest.raises(BackendError, match="service a exited with code 3"):
        call(A)


def test_the_processes_of_a_container_are_those_of_the_host(docker: Docker, runtime: ComposeRuntime):
    assert runtime.pids(A) == []
    docker.add("c1")
    assert runtime.pids(A) == [4711, 4712]
    docker.end("c1")
    assert runtime.pids(A) == []


def test_a_process_belongs_to_the_service_whose_container_it_runs_in(
    docker: Docker, runtime: ComposeRuntime, monkeypatch: pytest.MonkeyPatch
):
    docker.add("c1")
    containers = {4711: "c1", 4712: "somebody else's"}
    monkeypatch.setattr(compose.gpu, "container", containers.get)
    assert runtime.owner(4711) is None
    runtime.running()
    docker.verbs()
    assert [runtime.owner(pid) for pid in (4711, 4712, 4713)] == ["a", None, None]
    runtime.stop(A)
    assert runtime.owner(4711) == "a"  # it may not be gone yet


def test_nobody_asks_docker_whose_a_process_is(docker: Docker, runtime: ComposeRuntime):
    runtime.start(A)
    docker.verbs()
    runtime.owner(os.getpid())
    assert docker.verbs() == []


def test_a_restarting_service_is_stopped_too(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1", status="restarting")
    runtime.stop(A)
    assert "stop" in docker.verbs()


def test_what_runs_is_found_in_two_commands_and_only_our_services(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1", "a")
    docker.add("c2", "b", status="exited")
    docker.add("c3", "database")
    assert runtime.running() == {"a": URL}
    assert docker.verbs() == ["ps", "inspect"]


def test_a_service_that_runs_without_an_address_is_listed_all_the_same(
    docker: Docker, runtime: ComposeRuntime
):
    docker.add("c1", "a", status="restarting")
    docker.add("c2", "b")
    docker.containers["c2"]["NetworkSettings"] = {}
    assert runtime.running() == {"a": "", "b": ""}


def test_a_paused_service_is_listed_as_it_is(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1", "a", status="paused")
    assert runtime.running() == {"a": URL}
    assert docker.state("c1")["Status"] == "paused"
    assert runtime.is_frozen(A)
    assert not runtime.is_frozen(B)


def test_a_container_that_goes_away_while_it_is_listed_is_no_error(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1", "a")
    docker.add("c2", "b")
    listed = docker.do_ps(["docker", "ps"])
    del docker.containers["c1"]
    docker.do_ps = lambda argv: listed  # type: ignore[method-assign]
    assert runtime.running() == {"b": URL}


def test_the_log_tail_is_of_the_last_run_only(docker: Docker, runtime: ComposeRuntime):
    docker.add("c1")
    docker.logs = "one\r\ntwo\nthree\n"
    assert runtime.log_tail(A, 2) == ["two", "three"]
    begun = datetime(2026, 11, 21, 13, 0, 1, tzinfo=timezone.utc).timestamp()
    assert begun - 5 < docker.since < begun


def test_nothing_of_an_earlier_run_is_shown_when_a_start_fails(docker: Docker, runtime: ComposeRuntime):
    docker.logs = "of the first run\n"
    runtime.start(A)
    runtime.stop(A)
    docker.fails["start"] = ["Bind for 127.0.0.1:8080 failed: port is already allocated"]
    with pytest.raises(LoadError):
        runtime.start(A)
    assert runtime.log_tail(A) == []
    runtime.start(A)
    assert runtime.log_tail(A) == ["of the first run"]


def test_nothing_of_a_run_that_ended_just_before_is_shown(
    docker: Docker, runtime: ComposeRuntime, monkeypatch: pytest.MonkeyPatch
):
    told = datetime(2026, 11, 21, 13, 0, 2, 250_000, tzinfo=timezone.utc).timestamp()
    monkeypatch.setattr(compose, "time", SimpleNamespace(time=lambda: told))
    runtime.start(A)
    runtime.log_tail(A)
    assert docker.since == told


def test_a_log_that_cannot_be_had_is_empty(docker: Docker, runtime: ComposeRuntime):
    assert runtime.log_tail(A) == []
    docker.add("c1")
    docker.fails["logs"] = [NO_DAEMON]
    assert runtime.log_tail(A) == []


# Deaths


class Events:
    """Stands in for `docker events`: children whose output the test writes."""

    def __init__(self) -> None:
        self.started: queue.Queue[int] = queue.Queue()

    def spawn(self, argv: Sequence[str]) -> subprocess.Popen[str]:
        assert argv[:2] == ["docker", "events"]
        out, into = os.pipe()
        child = subprocess.Popen(["cat"], stdin=out, stdout=subprocess.PIPE, text=True)
        os.close(out)
        self.started.put(into)
        return child

    def next(self) -> int:
        """Where to write the events of the next connection, once there is one."""
        return self.started.get(timeout=PATIENCE)


@dataclass
class Watched:
    docker: Docker
    runtime: ComposeRuntime
    events: Events
    deaths: queue.Queue[str]

    def died(self) -> str:
        return self.deaths.get(timeout=PATIENCE)

    def id(self, service: str) -> str:
        """Of its container."""
        found = self.docker.containers.items()
        return next(id for id, each in found if self.docker._service(each) == service)

    def tell(self, into: int, *ids: str) -> None:
        """Docker's events say that these containers ended."""
        os.write(into, "".join(f"{id}\n" for id in ids).encode())


@pytest.fixture
def watched(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(compose, "FIRST_PAUSE", 0.001)
    events = Events()
    runtime = ComposeRuntime(CONFIG, run=docker, spawn=events.spawn)
    watched = Watched(docker, runtime, events, queue.Queue())
    thread = threading.Thread(target=runtime.watch, args=(watched.deaths.put,))
    thread.start()
    try:
        yield watched
    finally:
        runtime.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        while not events.started.empty():
            os.close(events.started.get())


def test_a_death_is_reported_once(watched: Watched):
    into = watched.events.next()
    watched.runtime.start(A)
    watched.runtime.start(B)
    a, b = watched.id("a"), watched.id("b")
    watched.docker.end(a)
    watched.tell(into, a, a)
    assert watched.died() == "a"
    watched.docker.end(b)
    watched.tell(into, b)
    assert watched.died() == "b"
    os.close(into)


def test_our_own_stop_is_no_death(watched: Watched):
    into = watched.events.next()
    watched.runtime.start(A)
    watched.runtime.start(B)
    watched.runtime.stop(A)
    watched.docker.end(watched.id("b"))
    watched.tell(into, watched.id("a"), watched.id("b"))
    assert watched.died() == "b"
    os.close(into)


def test_a_late_event_of_our_own_stop_does_not_hurt_the_next_run(watched: Watched):
    into = watched.events.next()
    watched.runtime.start(A)
    watched.runtime.start(B)
    watched.runtime.stop(A)
    watched.tell(into, watched.id("a"))
    watched.runtime.start(A)
    watched.tell(into, watched.id("a"))
    watched.docker.end(watched.id("b"))
    watched.tell(into, watched.id("b"))
    assert watched.died() == "b"
    assert watched.runtime.ended(A) is None
    os.close(into)


def test_a_service_that_its_restart_policy_revived_is_put_down_and_reported(watched: Watched):
    into = watched.events.next()
    watched.runtime.start(A)
    id = next(iter(watched.docker.containers))
    watched.docker.state(id).update(Status="running", StartedAt="2026-11-21T23:59:59.9Z")
    watched.tell(into, f"{watched.id('a')} 139")
    assert watched.died() == "a"
    assert watched.docker.state(id)["Status"] == "exited"
    how = "exited with code 139 (SIGSEGV), and Docker had started it again"
    assert watched.runtime.ended(A) == how
    watched.runtime.start(A)
    watched.docker.end(id, 1)
    assert watched.runtime.ended(A) == "exited with code 1"
    os.close(into)


def test_deaths_of_other_services_are_not_ours(watched: Watched):
    into = watched.events.next()
    watched.runtime.start(A)
    watched.tell(into, "database", "")
    watched.docker.end(next(iter(watched.docker.containers)))
    watched.tell(into, watched.id("a"))
    assert watched.died() == "a"
    os.close(into)


def test_what_ended_while_docker_was_away_is_reported_when_it_is_back(watched: Watched):
    into = watched.events.next()
    watched.runtime.start(A)
    watched.runtime.start(B)
    watched.docker.fails["ps"] = [NO_DAEMON] * 3
    watched.docker.end(next(iter(watched.docker.containers)))
    os.close(into)
    assert watched.died() == "a"
    os.close(watched.events.next())


def test_an_adopted_service_is_watched_too(watched: Watched):
    into = watched.events.next()
    watched.docker.add("c1")
    watched.runtime.running()
    watched.docker.end("c1")
    watched.tell(into, "c1")
    assert watched.died() == "a"
    os.close(into)


def test_the_death_of_one_replica_is_its_own(docker: Docker, watched: Watched):
    into = watched.events.next()
    docker.scale = 3
    for each in REPLICAS:
        watched.runtime.start(each)
    second = next(id for id in docker.containers if docker.number(id) == 2)
    docker.end(second)
    watched.tell(into, second)
    assert watched.died() == "s-2"
    assert up(docker) == [1, 3]
    os.close(into)


# The program that runs commands


def run(*argv: str, timeout: float = PATIENCE, merge: bool = False) -> Done:
    return compose._run(argv, timeout, env=os.environ, merge=merge)


def test_a_command_gives_status_and_both_streams():
    assert run("sh", "-c", "echo out; echo err >&2; exit 3") == Done(3, "out\n", "err\n")


def test_merged_streams_keep_their_order():
    assert run("sh", "-c", "echo 1; echo 2 >&2; echo 3", merge=True) == Done(0, "1\n2\n3\n")


def test_a_command_holds_the_lock_that_it_is_given(tmp_path: Path):
    with (tmp_path / "lock").open("w") as lock:
        there = ["test", "-e", f"/proc/self/fd/{lock.fileno()}"]
        assert compose._run(there, 30.0, env=os.environ, lock=lock.fileno()).code == 0
        assert compose._run(there, 30.0, env=os.environ).code == 1


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path):
    pids = tmp_path / "pids"
    with pytest.raises(BackendError, match="did not end within 2 s; dockerd may be stuck"):
        run("sh", "-c", f"sleep 1000 & echo $! > {pids}; wait", timeout=2.0)
    gone(int(pids.read_text()))


def test_a_program_that_is_missing_is_named():
    with pytest.raises(BackendError, match=r"no-such-docker cannot be run .*is it installed and on PATH"):
        run("no-such-docker")


def test_a_log_is_followed(docker: Docker):
    docker.add("c1")

    def spawn(argv: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(["printf", r"one\r\ntwo\n"], stdout=subprocess.PIPE, text=True)

    runtime = ComposeRuntime(CONFIG, run=docker, spawn=spawn)
    assert list(runtime.follow_log(A)) == ["one", "two"]
    assert list(runtime.follow_log(B)) == []


# The engine itself, where it is on this machine


@contextmanager
def docker_engine(path: Path, containers: dict[str, Any]) -> Iterator[None]:
    """Answers inspects at a socket."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = containers.get(self.path)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(found or {"message": "No such container"}).encode())

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingUnixStreamServer):
        daemon_threads = True

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(PATIENCE)


def docker_program(folder: Path, *lines: str) -> dict[str, str]:
    """An environment whose docker program lists two containers, and otherwise does as told."""
    program = folder / "docker"
    program.write_text("\n".join(["#!/bin/sh", '[ "$1" = ps ] && echo c1 c2 && exit 0', *lines, ""]))
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "DOCKER_HOST": f"unix://{folder}/docker.sock"}


def test_an_engine_on_this_machine_is_asked_without_the_docker_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    environ = docker_program(tmp_path, "exit 9")
    monkeypatch.setenv("PATH", environ["PATH"])
    runtime = ComposeRuntime(CONFIG, environ=environ)
    with docker_engine(tmp_path / "docker.sock", {"/containers/c1/json": INSPECTED}):
        assert runtime.running() == {"a": "http://127.0.0.1:32775"}


def test_an_engine_that_does_not_answer_is_asked_by_the_docker_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    environ = docker_program(tmp_path, f"echo '{json.dumps([INSPECTED])}'")
    monkeypatch.setenv("PATH", environ["PATH"])
    assert ComposeRuntime(CONFIG, environ=environ).running() == {"a": "http://127.0.0.1:32775"}


@pytest.mark.parametrize(
    ("user", "id"), [("", 0), ("root:x", 0), ("0", 0), ("1000:1000", 1000), ("somebody", None)]
)
def test_the_user_of_a_service_is_foretold(user: str, id: int | None) -> None:
    told = compose.user_of(Backend("a", "a", service=Service(user=user)), {"DOCKER_HOST": "tcp://x:1"})
    assert told == id


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(("user", "id"), [("", 1234), ("0:0", 1234), ("1000", None)])
def test_root_of_a_rootless_engine_is_who_runs_it(tmp_path: Path, user: str, id: int | None) -> None:
    address = tmp_path / "docker.sock"
    address.touch()
    os.chown(address, 1234, 1234)
    told = compose.user_of(
        Backend("a", "a", service=Service(user=user)), {"DOCKER_HOST": f"unix://{address}"}
    )
    assert told == id
