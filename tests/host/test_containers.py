"""ContainerRuntime against a stand-in for Docker that keeps containers and notes every question."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from anvil_mux.command import Done
from anvil_mux.config.config import Backend, Service
from anvil_mux.errors import BackendError, LoadError
from anvil_mux.host import containers
from anvil_mux.host.containers import ContainerRuntime
from anvil_mux.host.runtime import NotBegun
from anvil_mux.host.seam import HostConfig
from tests.host.conftest import runtime_at
from tests.host.docker_stand_in import AWAY, CONFIG, REPLICAS, URL, A, B, Docker, replica


def test_the_first_start_creates_the_container_and_later_ones_do_not_pay_compose(
    docker: Docker, runtime: ContainerRuntime
):
    assert runtime.start(A) == URL
    assert docker.verbs() == ["create", "ps", "inspect", "start", "inspect"]
    runtime.stop(A)
    assert docker.verbs() == ["inspect", "stop", "inspect"]
    assert runtime.start(A) == URL
    assert docker.verbs() == ["start", "inspect"]


MADE = {"com.docker.compose.config-hash": "h1", "com.docker.compose.image": "sha256:llama:1"}


def labelled(docker: Docker, id: str, service: str = "a", number: str = "1", **more: str) -> None:
    docker.add(id, service, number=number)
    docker.containers[id]["Config"].update(Image="llama:1", Cmd=["-m", "old.gguf"])
    docker.containers[id]["Config"]["Labels"].update({**MADE, **more})


def test_what_runs_is_compared_by_the_hash_that_compose_has_of_it(docker: Docker, runtime: ContainerRuntime):
    labelled(docker, "c1")
    docker.hash = "h1"
    assert runtime.differs(A) == ""
    docker.hash = "h2"
    assert runtime.differs(A) == "its description changed since its container was made"
    changed = replace(A, service=replace(A.service, command=("-m", "new.gguf")))
    assert runtime.differs(changed) == "its command changed since its container was made"


def test_an_image_of_the_same_name_that_was_built_anew_is_another(docker: Docker, runtime: ContainerRuntime):
    labelled(docker, "c1", **{"com.docker.compose.image": "sha256:before"})
    docker.hash = "h1"
    assert runtime.differs(A) == "its image changed since its container was made"
    docker.images = set()
    assert runtime.differs(A) == ""


@pytest.mark.parametrize("hash", ["", "h1"])
def test_without_a_hash_to_compare_the_container_itself_is_looked_at(
    docker: Docker, runtime: ContainerRuntime, hash: str
):
    labelled(docker, "c1", **({"com.docker.compose.config-hash": ""} if hash else {}))
    docker.hash = hash  # "": Compose cannot be run
    assert runtime.differs(A) == ""
    changed = replace(A, service=replace(A.service, command=("-m", "new.gguf")))
    assert runtime.differs(changed) == "its command changed since its container was made"


@pytest.mark.parametrize("ours", ["2.40.3", "v2.40.3", "2.40.3-desktop.1"])
def test_after_an_upgrade_of_compose_its_hash_is_not_compared(
    docker: Docker, runtime: ContainerRuntime, caplog: pytest.LogCaptureFixture, ours: str
):
    labelled(docker, "c1", **{"com.docker.compose.version": "2.26.1"})
    docker.hash, docker.compose = "another", ours
    assert runtime.differs(A) == ""
    assert "a is taken as unchanged: Compose 2.26.1 made its container" in caplog.text
    changed = replace(A, service=replace(A.service, command=("-m", "new.gguf")))
    assert runtime.differs(changed) == "its command changed since its container was made"
    moved = replace(A, service=replace(A.service, mounts=(("/models", "/other"),)))
    assert runtime.differs(moved) == "its mounts changed since its container was made"


@pytest.mark.parametrize(
    ("made_by", "ours"), [("2.40.3", "2.40.3-4"), ("", "2.40.3"), ("2.40.3", "dev"), ("2.40.3", "")]
)
def test_the_hash_of_the_same_release_of_compose_counts_and_so_it_does_where_that_is_not_known(
    docker: Docker, runtime: ContainerRuntime, made_by: str, ours: str
):
    labelled(docker, "c1", **{"com.docker.compose.version": made_by})
    docker.hash, docker.compose = "another", ours
    assert runtime.differs(A) == "its description changed since its container was made"


def test_what_has_no_container_does_not_differ(docker: Docker, runtime: ContainerRuntime):
    assert runtime.differs(A) == ""


def test_one_that_differs_is_made_anew_by_its_next_start_though_others_of_its_service_run(
    docker: Docker, runtime: ContainerRuntime
):
    docker.scale = 3
    for number in "123":
        labelled(docker, f"c{number}", "s", number)
    docker.hash = "h2"
    assert runtime.running().keys() == {"s-1", "s-2", "s-3"}
    assert runtime.differs(REPLICAS[0])
    runtime.stop(REPLICAS[0])
    runtime.start(REPLICAS[0])
    assert "c1" not in docker.containers
    assert docker.state("c2")["Status"] == "running"


def test_a_replica_that_stopped_before_its_description_changed_is_made_anew(
    docker: Docker, runtime: ContainerRuntime
):
    docker.scale = 2
    labelled(docker, "c1", "s", "1", **{"com.docker.compose.config-hash": "h2"})
    labelled(docker, "c2", "s", "2")
    docker.end("c2", 0)
    docker.hash = "h2"
    runtime.start(REPLICAS[1])
    assert "c2" not in docker.containers
    assert docker.state("c1")["Status"] == "running"


def test_a_container_that_compose_has_not_finished_is_not_started(docker: Docker, runtime: ContainerRuntime):
    docker.add("old", status="exited", number="2")
    docker.refuses_create, docker.fails_late, docker.scale = ["HF_TOKEN required by file is not set"], True, 2
    with pytest.raises(BackendError, match="HF_TOKEN required by file is not set"):
        runtime.start(A)
    assert docker.containers.keys() == {"old"}


def test_a_running_service_is_not_started_again(docker: Docker, runtime: ContainerRuntime):
    runtime.start(A)
    run = runtime._project.find(A).run
    runtime.start(A)
    assert runtime._project.find(A).run == run


def test_a_paused_service_is_unpaused(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1", status="paused")
    assert runtime.start(A) == URL
    assert "unpause" in docker.verbs()


def test_what_a_container_has_mounted_is_known_once_it_is_there(docker: Docker, runtime: ContainerRuntime):
    assert runtime.mounts(A) == ()
    id = docker.add("c1", status="exited")
    docker.containers[id]["Mounts"] = [{"Type": "volume", "Source": "/v/_data", "Destination": "/models"}]
    assert runtime.mounts(A) == (("/models", "/v/_data"),)


def test_an_image_that_is_missing_is_named_with_the_command_that_gets_it(
    docker: Docker, runtime: ContainerRuntime
):
    docker.refuses_create, docker.images = ["whatever it says"], set()
    with pytest.raises(LoadError, match=r"^image llama:1 is not present: docker pull llama:1$"):
        runtime.start(A)


def test_an_image_that_is_not_built_is_named_with_the_command_that_builds_it(docker: Docker):
    built = replace(A, service=Service())
    runtime = runtime_at(docker, replace(CONFIG, backends=(built,)))
    docker.refuses_create = ["whatever it says"]
    with pytest.raises(LoadError, match=r"docker compose -f /s/compose.yaml -f /s/more.yaml -p p build a"):
        runtime.start(built)


def test_the_image_that_is_named_is_the_one_that_docker_misses(docker: Docker, runtime: ContainerRuntime):
    docker.refuses_create, docker.listed_images = ["whatever it says"], ["llama:1", "sidecar:2"]
    with pytest.raises(LoadError, match=r"^image sidecar:2 is not present: docker pull sidecar:2$"):
        runtime.start(A)


@pytest.mark.parametrize("status", ["dead", "removing"])
def test_a_container_that_is_half_removed_is_made_anew(
    docker: Docker, runtime: ContainerRuntime, status: str
):
    docker.add("c1", status=status)
    assert runtime.start(A) == URL
    assert list(docker.containers) != ["c1"]


def test_a_container_that_somebody_removed_is_made_anew(docker: Docker, runtime: ContainerRuntime):
    runtime.start(A)
    docker.containers.clear()
    assert runtime.start(A) == URL


def test_a_network_that_somebody_removed_is_made_anew(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1", status="exited")
    docker.fails["start"] = [(404, "network 89c547813c82 not found")]
    assert runtime.start(A) == URL
    assert "c1" not in docker.containers


def test_a_service_that_ends_at_once_says_so(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1", status="exited", ExitCode=1)
    docker.containers["c1"]["NetworkSettings"] = {}
    docker.ignores = {"start"}
    with pytest.raises(LoadError, match=r"service a exited with code 1"):
        runtime.start(A)


def test_a_service_without_an_address_says_what_to_publish(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1")
    docker.containers["c1"]["NetworkSettings"] = {}
    with pytest.raises(LoadError, match=r'publish its port, such as ports: \["127.0.0.1::8080"\]'):
        runtime.start(A)


def test_docker_that_is_away_says_how_to_reach_it(docker: Docker, runtime: ContainerRuntime):
    docker.refuses_create = ["whatever it says"]
    docker.path.unlink()
    with pytest.raises(
        NotBegun,
        match=r"Cannot connect to the Docker daemon at unix://.*: No such file .*\. Start dockerd, or set",
    ):
        runtime.start(A)


def test_a_compose_that_is_missing_is_asked_for(docker: Docker, runtime: ContainerRuntime):
    docker.refuses_create, docker.has_compose = ["unknown shorthand flag"], False
    with pytest.raises(
        BackendError,
        match=r"failed: unknown shorthand flag\. Docker Compose v2 is needed: `docker compose",
    ):
        runtime.start(A)


def test_what_compose_says_last_is_told_where_nothing_explains_it(docker: Docker, runtime: ContainerRuntime):
    docker.refuses_create = ["warning: old\nsome such thing"]
    with pytest.raises(BackendError, match=r"^`docker compose a` failed: some such thing$"):
        runtime.start(A)


def test_a_port_that_another_program_has_is_said_plainly(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1", status="exited")
    with socket.create_server(("127.0.0.1", 0)) as theirs:
        bound = [{"HostIp": "127.0.0.1", "HostPort": str(theirs.getsockname()[1])}]
        docker.containers["c1"]["HostConfig"]["PortBindings"] = {"8080/tcp": bound}
        docker.fails["start"] = [(500, "driver failed")]
        with pytest.raises(
            LoadError, match=r"driver failed. Another program has this port; .*127.0.0.1::PORT"
        ):
            runtime.start(A)
    docker.fails["start"] = [(500, "driver failed")]
    with pytest.raises(BackendError, match=r"driver failed$"):
        runtime.start(A)


REMAINS = (
    "failed to create shim task: OCI runtime create failed: container with id exists: %s: unknown",
    "failed to create task for container: failed to start shim: mkdir /run/moby/%s: file exists",
    'container "%s": already exists',
    "task %s: already exists: unknown",
)
"""What releases of Docker say of a container whose last start they did not live to end."""


@pytest.mark.parametrize("said", REMAINS)
def test_a_container_that_can_never_be_started_again_is_made_anew(
    docker: Docker, runtime: ContainerRuntime, said: str
):
    docker.add("c1", status="exited")
    docker.fails["start"] = [(500, said % "c1")]
    assert runtime.start(A) == URL
    assert "c1" not in docker.containers


def test_a_container_is_not_made_anew_for_what_else_exists(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1", status="exited")
    docker.fails["start"] = [(500, "endpoint with name a already exists in network x")]
    with pytest.raises(BackendError, match="already exists in network"):
        runtime.start(A)
    assert [*docker.containers] == ["c1"]


def test_gpus_that_docker_cannot_give_are_said_plainly(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1", status="exited")
    docker.containers["c1"]["HostConfig"]["DeviceRequests"] = [{"Driver": "nvidia"}]
    docker.fails["start"] = [(500, "could not select a driver")] * 2
    with pytest.raises(LoadError, match=r"could not select a driver. Install the NVIDIA Container Toolkit"):
        runtime.start(A)
    docker.runtimes = ("runc", "nvidia")
    with pytest.raises(BackendError, match=r"could not select a driver$"):
        runtime.start(A)


def test_the_first_container_is_used_where_somebody_made_more(docker: Docker, runtime: ContainerRuntime):
    docker.add("c2", number="2")
    docker.add("c1", number="1")
    docker.end("c1", 5)
    assert runtime.ended(A) == "exited with code 5"


# Another configuration


def described(backend: Backend, digest: str) -> Backend:
    return replace(backend, service=replace(backend.service, digest=digest))


def test_a_service_that_is_described_otherwise_is_made_anew_by_its_next_start(
    docker: Docker, runtime: ContainerRuntime
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


def test_so_is_one_that_was_found_running(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1")
    assert runtime.running() == {"a": URL}
    runtime.reconfigure(replace(CONFIG, backends=(described(A, "other"), B)))
    runtime.stop(A)
    runtime.start(described(A, "other"))
    assert "c1" not in docker.containers


def test_a_service_that_goes_on_is_not_asked_of_compose_again(docker: Docker, runtime: ContainerRuntime):
    runtime.start(A)
    runtime.reconfigure(replace(CONFIG, backends=(replace(A, ttl=1.0), B)))
    runtime.stop(A)
    docker.verbs()
    runtime.start(replace(A, ttl=1.0))
    assert docker.verbs() == ["start", "inspect"]


def test_a_service_that_is_served_no_longer_is_ours_until_it_was_stopped(
    docker: Docker, runtime: ContainerRuntime
):
    runtime.start(B)
    runtime.reconfigure(replace(CONFIG, backends=(A,)))
    assert runtime.running() == {"b": URL}
    runtime.stop(B)
    docker.add("c9", "b")
    assert runtime.running() == {}


def test_a_replica_that_is_described_otherwise_is_made_anew_beside_those_that_still_run(
    docker: Docker, runtime: ContainerRuntime
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
def scaled(docker: Docker, runtime: ContainerRuntime) -> ContainerRuntime:
    docker.scale = 3
    return runtime


def up(docker: Docker) -> list[int]:
    """The numbers of the containers that run."""
    return sorted(docker.number(id) for id in docker.containers if docker.state(id)["Status"] == "running")


def test_each_container_of_a_scaled_service_is_started_and_stopped_alone(
    docker: Docker, scaled: ContainerRuntime
):
    scaled.start(REPLICAS[1])
    assert up(docker) == [2]
    scaled.start(REPLICAS[2])
    scaled.stop(REPLICAS[1])
    assert up(docker) == [3]
    assert scaled.ended(REPLICAS[0]) == "has not been started"


def test_containers_that_run_are_adopted_by_their_numbers(docker: Docker, scaled: ContainerRuntime):
    docker.add("c3", "s", number="3")
    docker.add("c1", "s", number="1")
    assert list(scaled.running()) == ["s-1", "s-3"]
    scaled.stop(REPLICAS[2])
    assert up(docker) == [1]


def test_a_container_that_somebody_removed_is_replaced_beside_those_that_run(
    docker: Docker, scaled: ContainerRuntime
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
    docker: Docker, scaled: ContainerRuntime
):
    docker.add("c4", "s", number="4")
    docker.add("c3", "s", number="3")
    docker.add("c1", "s", number="1", status="exited")
    assert list(scaled.running()) == ["s-1", "s-3"]  # the one that runs is needed, not its number
    scaled.start(REPLICAS[1])
    assert up(docker) == [1, 3, 4]


def test_a_changed_description_does_not_end_replicas_that_run(docker: Docker, scaled: ContainerRuntime):
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
    docker: Docker, scaled: ContainerRuntime
):
    docker.add("c1", "s", number="1")
    docker.add("c2", "s", number="2", status="dead")
    scaled.running()
    scaled.start(REPLICAS[1])
    assert "c2" not in docker.containers
    assert docker.state("c1")["Status"] == "running"


def test_a_replica_that_is_described_otherwise_is_made_anew_without_the_others(
    docker: Docker, scaled: ContainerRuntime
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
    docker: Docker, scaled: ContainerRuntime
):
    docker.add("c3", "s", number="3")
    docker.add("c4", "s", number="4")
    scaled.stop(replica(4))
    assert up(docker) == [3]


def test_stopping_what_does_not_run_or_exist_is_no_error(docker: Docker, runtime: ContainerRuntime):
    runtime.stop(A)
    docker.add("c1", status="exited")
    runtime.stop(A)
    assert not {"stop", "kill", "rm"} & set(docker.verbs())


def test_a_stop_that_does_not_hold_is_followed_by_kill_and_rm(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1")
    docker.ignores = {"stop"}
    docker.fails["kill"] = [(500, "cannot kill")]
    runtime.stop(A)
    assert [verb for verb in docker.verbs() if verb in ("stop", "kill", "rm")] == ["stop", "kill", "rm"]
    assert not docker.containers


def test_a_service_that_nothing_ends_is_an_error(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1")
    docker.ignores = {"stop", "kill"}
    docker.fails["rm"] = [(500, "could not kill: did not receive an exit event")]
    with pytest.raises(BackendError, match=r"service a still runs after stop, kill and rm.*exit event"):
        runtime.stop(A)


def test_a_kill_has_no_grace(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1")
    runtime.kill(A)
    assert docker.verbs() == ["ps", "inspect", "kill", "inspect"]


def test_a_service_is_frozen_and_let_go_on(docker: Docker, runtime: ContainerRuntime):
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
    docker: Docker, runtime: ContainerRuntime, frozen: bool
):
    call = runtime.resume if frozen else runtime.pause
    with pytest.raises(BackendError, match="service a has no container"):
        call(A)
    docker.add("c1", status="exited", ExitCode=3)
    with pytest.raises(BackendError, match="service a exited with code 3"):
        call(A)


def test_the_processes_of_a_container_are_those_of_the_host(docker: Docker, runtime: ContainerRuntime):
    assert runtime.pids(A) == []
    docker.add("c1")
    assert runtime.pids(A) == [4711, 4712]
    docker.end("c1")
    assert runtime.pids(A) == []


def test_a_process_belongs_to_the_service_whose_container_it_runs_in(
    docker: Docker, runtime: ContainerRuntime, monkeypatch: pytest.MonkeyPatch
):
    docker.add("c1")
    inside = {4711: "c1", 4712: "somebody else's"}
    monkeypatch.setattr(containers.gpu, "container", inside.get)
    assert runtime.owner(4711) is None
    runtime.running()
    docker.verbs()
    assert [runtime.owner(pid) for pid in (4711, 4712, 4713)] == ["a", None, None]
    runtime.stop(A)
    assert runtime.owner(4711) == "a"  # it may not be gone yet


def test_nobody_asks_docker_whose_a_process_is(docker: Docker, runtime: ContainerRuntime):
    runtime.start(A)
    docker.verbs()
    runtime.owner(os.getpid())
    assert docker.verbs() == []


def test_a_restarting_service_is_stopped_too(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1", status="restarting")
    runtime.stop(A)
    assert "stop" in docker.verbs()


def test_what_runs_is_looked_for_among_our_services_only(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1", "a")
    docker.add("c2", "b", status="exited")
    docker.add("c3", "database")
    assert runtime.running() == {"a": URL}
    assert docker.verbs() == ["ps", "inspect", "inspect"]


def test_what_a_killed_anvil_mux_is_starting_is_found(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1", status="created")

    def inspect(id: str) -> tuple[int, object]:  # as Docker: not before the start is over
        docker.state(id).update(Status="running")
        return 200, docker.containers[id]

    docker.do_inspect = inspect  # type: ignore[method-assign]
    assert runtime.running() == {"a": URL}


def test_what_a_killed_anvil_mux_is_stopping_is_waited_for_once(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1", "a")
    docker.add("c2", "b")
    started = datetime(2026, 11, 21, 13, 0, 2, 556_000, tzinfo=timezone.utc).timestamp()
    docker.kills = [
        ("c1", "15", started),
        ("c2", "15", started - 0.1),
        ("c2", "1", started),
        ("c9", "9", started),
    ]
    assert runtime.running() == {"b": URL}
    assert docker.verbs() == ["ps", "inspect", "inspect", "wait", "ps", "inspect", "inspect"]
    docker.kills = [("c2", "15", started)]
    assert runtime.running() == {"b": URL}


def test_a_stop_that_podman_is_at_is_waited_for(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1", "a", status="stopping")
    assert runtime.ended(A) is None
    assert runtime.running() == {}


def test_a_service_that_runs_without_an_address_is_listed_all_the_same(
    docker: Docker, runtime: ContainerRuntime
):
    docker.add("c1", "a", status="restarting")
    docker.add("c2", "b")
    docker.containers["c2"]["NetworkSettings"] = {}
    assert runtime.running() == {"a": "", "b": ""}


def test_a_paused_service_is_listed_as_it_is(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1", "a", status="paused")
    assert runtime.running() == {"a": URL}
    assert docker.state("c1")["Status"] == "paused"
    assert runtime.is_frozen(A)
    assert not runtime.is_frozen(B)


def test_a_container_that_goes_away_while_it_is_listed_is_no_error(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1", "a")
    docker.add("c2", "b")
    docker.fails["inspect"] = [(404, "No such container: c1")]
    assert runtime.running() == {"b": URL}


def test_the_log_tail_is_of_the_last_run_only(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1")
    docker.logs = [(1, "one\r\ntwo\n"), (2, "three\n")]
    assert runtime.log_tail(A, 2) == ["two", "three"]
    begun = datetime(2026, 11, 21, 13, 0, 1, tzinfo=timezone.utc).timestamp()
    assert begun - 5 < docker.since < begun


def test_the_last_lines_of_what_has_ended_may_come_late(
    docker: Docker, runtime: ContainerRuntime, monkeypatch: pytest.MonkeyPatch
):
    docker.add("c1", status="exited", exit_code=3)
    docker.logs = []
    late = iter([[], [(1, "loading\n")], [(1, "loading\n"), (2, "out of memory\n")]])
    monkeypatch.setattr(containers.time, "sleep", lambda _: setattr(docker, "logs", next(late, docker.logs)))
    assert runtime.log_tail(A) == ["loading", "out of memory"]


def test_nothing_of_an_earlier_run_is_shown_when_a_start_fails(docker: Docker, runtime: ContainerRuntime):
    docker.logs = [(1, "of the first run\n")]
    runtime.start(A)
    runtime.stop(A)
    docker.fails["start"] = [(500, "port is already allocated")]
    with pytest.raises(BackendError):
        runtime.start(A)
    assert runtime.log_tail(A) == []
    runtime.start(A)
    assert runtime.log_tail(A) == ["of the first run"]


def test_nothing_of_a_run_that_ended_just_before_is_shown(
    docker: Docker, runtime: ContainerRuntime, monkeypatch: pytest.MonkeyPatch
):
    told = datetime(2026, 11, 21, 13, 0, 2, 250_000, tzinfo=timezone.utc).timestamp()
    monkeypatch.setattr(containers, "time", SimpleNamespace(time=lambda: told))
    runtime.start(A)
    runtime.log_tail(A)
    assert docker.since == told


def test_a_log_that_cannot_be_had_is_empty(docker: Docker, runtime: ContainerRuntime):
    assert runtime.log_tail(A) == []
    docker.add("c1")
    docker.fails["logs"] = [AWAY]
    assert runtime.log_tail(A) == []


def test_a_log_is_followed(docker: Docker, runtime: ContainerRuntime):
    docker.add("c1")
    docker.logs = [(1, "one\r\ntwo\n")]
    assert list(runtime.follow_log(A)) == ["one", "two"]
    assert list(runtime.follow_log(B)) == []


# Services that are described anew for this host or its GPUs


class Composer:
    """The runtime of composed services, and what each ``compose create`` finds."""

    def __init__(self, docker: Docker, folder: Path, *files: str) -> None:
        self.docker = docker
        self.files = files
        self.created: list[tuple[list[str], str, int]] = []
        """The files as they were named, and the text and the mode of the last one."""
        environ = {"DOCKER_HOST": docker.host, "XDG_STATE_HOME": str(folder)}
        config = self.config("one", "m.0")
        self.runtime = ContainerRuntime(config, environ=environ, run=self.run, address="10.0.0.2")

    def config(self, composed: str, *names: str) -> HostConfig:
        backends = tuple(replace(A, name=name, model="m") for name in names)
        return HostConfig(backends, project="p-b", files=self.files, generated_compose=composed)

    def run(self, argv: Sequence[str], timeout: float) -> Done:
        if "create" in argv:
            files = [word for before, word in pairwise(argv) if before == "-f"]
            last = Path(files[-1])
            self.created.append((files, last.read_text(), last.stat().st_mode & 0o777))
        return self.docker.run(argv, timeout)


def test_composed_services_are_a_file_more_that_nobody_else_may_read(docker: Docker, tmp_path: Path):
    composer = Composer(docker, tmp_path, "/s/compose.yaml")
    file = tmp_path / "anvil-mux" / "p-b" / "compose.yaml"
    assert not file.exists()
    [backend] = composer.config("one", "m.0").backends
    composer.runtime.start(backend)
    assert composer.created == [(["/s/compose.yaml", str(file)], "one", 0o600)]
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_on_another_host_they_are_the_only_file_and_a_reload_writes_it_anew(docker: Docker, tmp_path: Path):
    composer = Composer(docker, tmp_path)
    config = composer.config("two", "m.0", "m.1")
    first, second = config.backends
    composer.runtime.start(first)
    composer.runtime.reconfigure(config)
    composer.runtime.start(second)
    assert [(len(files), text) for files, text, _ in composer.created] == [(1, "one"), (1, "two")]
    assert list(composer.runtime.running()) == ["m.0", "m.1"]
    composer.runtime.reconfigure(composer.config("three", "m.1"))
    composer.runtime.stop(first)
    assert list(composer.runtime.running()) == ["m.1"]


def test_composed_services_that_run_are_adopted_and_orphans_stopped(docker: Docker, tmp_path: Path):
    docker.add("c0", "m.0")
    docker.add("c9", "m.9")
    composer = Composer(docker, tmp_path)
    assert list(composer.runtime.running()) == ["m.0"]
    composer.runtime.stop(Backend("m.9", "m.9"))
    assert docker.state("c9")["Status"] == "exited"
    assert composer.created == []


def test_composed_services_that_cannot_be_written_are_said(docker: Docker, tmp_path: Path):
    composer = Composer(docker, tmp_path)
    (tmp_path / "anvil-mux").write_text("in the way")
    with pytest.raises(BackendError, match=r"compose.yaml cannot be written: Not a directory"):
        composer.runtime.start(composer.config("one", "m.0").backends[0])
