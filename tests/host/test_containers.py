"""ContainerRuntime against a stand-in for Docker that keeps containers and notes every question."""

import socket
from dataclasses import replace
from datetime import datetime, timezone
from itertools import pairwise
from types import SimpleNamespace

import pytest

from anvil_mux.config.service import PlacedFile, Service
from anvil_mux.errors import BackendError, LoadError
from anvil_mux.host import containers
from anvil_mux.host.seam import NotBegun
from tests.host.conftest import runtime_at
from tests.host.docker_stand_in import AWAY, CONFIG, URL, A, B


def test_the_first_start_creates_the_container_and_later_ones_do_not_pay_compose(docker, runtime):
    assert runtime.start(A) == URL
    assert docker.verbs() == ["create", "ps", "inspect", "start", "inspect"]
    runtime.stop(A)
    assert docker.verbs() == ["inspect", "stop", "inspect"]
    assert runtime.start(A) == URL
    assert docker.verbs() == ["start", "inspect"]


def test_what_has_no_container_is_nothing_that_could_differ_or_be_stopped(docker, runtime):
    assert runtime.differs(A) == ""
    assert runtime.log_tail(A) == [*runtime.follow_log(A)] == runtime.pids(A) == []
    runtime.stop(A)
    for call in (runtime.pause, runtime.resume):
        with pytest.raises(BackendError, match="service a has no container"):
            call(A)
    docker.add("c1", status="exited", ExitCode=3)
    runtime.stop(A)
    for call in (runtime.pause, runtime.resume):
        with pytest.raises(BackendError, match="service a exited with code 3"):
            call(A)
    assert not {"stop", "kill", "rm"} & set(docker.verbs())


def test_a_container_that_compose_has_not_finished_is_not_started(docker, runtime):
    docker.add("old", status="exited", number="2")
    docker.refuses_create, docker.fails_late, docker.scale = ["HF_TOKEN required by file is not set"], True, 2
    with pytest.raises(BackendError, match="HF_TOKEN required by file is not set"):
        runtime.start(A)
    assert docker.containers.keys() == {"old"}


def test_a_running_service_is_not_started_again_and_a_paused_one_goes_on(docker, runtime):
    runtime.start(A)
    run = runtime._project.find(A).run
    runtime.start(A)
    assert runtime._project.find(A).run == run
    runtime.pause(A)
    assert runtime.start(A) == URL
    assert "unpause" in docker.verbs()


def test_what_a_container_has_mounted_is_known_once_it_is_there(docker, runtime):
    assert runtime.mounts(A) == ()
    id = docker.add("c1", status="exited")
    docker.containers[id]["Mounts"] = [{"Type": "volume", "Source": "/v/_data", "Destination": "/models"}]
    assert runtime.mounts(A) == (("/models", "/v/_data"),)


@pytest.mark.parametrize(
    ("said", "docker_has", "kind", "why"),
    [
        ("x", {"images": set()}, LoadError, r"^image llama:1 is not present: docker pull llama:1$"),
        (
            "x",
            {"listed_images": ["llama:1", "sidecar:2"]},
            LoadError,
            r"^image sidecar:2 is not present: docker pull sidecar:2$",
        ),
        (
            "unknown shorthand flag",
            {"has_compose": False},
            BackendError,
            r"failed: unknown shorthand flag\. Docker Compose v2 is needed: `docker compose",
        ),
        (
            "warning: old\nsome such thing",
            {},
            BackendError,
            r"^`docker compose create a` failed: some such thing$",
        ),
    ],
)
def test_why_a_container_could_not_be_made_is_looked_up(docker, runtime, said, docker_has, kind, why):
    docker.refuses_create = [said]
    for name, value in docker_has.items():
        setattr(docker, name, value)
    with pytest.raises(kind, match=why):
        runtime.start(A)


def test_an_image_that_is_not_built_is_named_with_the_command_that_builds_it(docker):
    built = replace(A, service=Service())
    runtime = runtime_at(docker, replace(CONFIG, backends=(built,)))
    docker.refuses_create = ["whatever it says"]
    with pytest.raises(LoadError, match=r"docker compose -f /s/compose.yaml -f /s/more.yaml -p p build a"):
        runtime.start(built)


def test_all_that_compose_is_asked_goes_by_the_files_in_force(docker, tmp_path):
    asked = []

    def run(argv, timeout):
        asked.append([*argv])
        return docker.run(argv, timeout)

    environ = {"DOCKER_HOST": docker.host, "XDG_STATE_HOME": str(tmp_path)}
    needing = replace(A, service=Service(needs=(("b", "service_started"),)))
    config = replace(CONFIG, backends=(needing, B), resolved_compose="{}")
    runtime = containers.ContainerRuntime(config, environ=environ, run=run)
    docker.refuses_create, docker.on_up, docker.hash = ["x"], lambda name: docker.add("c1", name), "h"
    runtime.prepare(needing, lambda: 30.0)
    with pytest.raises(LoadError, match=r"docker compose -f /s/compose.yaml -f /s/more.yaml -p p build a"):
        runtime.start(needing)
    docker.containers[docker.add("c2")]["Config"]["Labels"]["com.docker.compose.config-hash"] = "h"
    assert runtime.differs(needing) == ""
    asked = [argv for argv in asked if "version" not in argv]
    assert [argv[argv.index("*") + 1] for argv in asked] == ["up", "create", "config", "config"]
    files = [[word for before, word in pairwise(argv) if before == "-f"] for argv in asked]
    assert files == [[str(tmp_path / "anvil-mux" / "p" / "resolved.yaml")]] * 4


TOKEN = PlacedFile("/run/secrets/token", "x", "TOKEN", mode=0o400, uid=5)
GIVEN = replace(A, service=replace(A.service, files=(TOKEN, PlacedFile("/text", "a text"))))


def test_placed_files_are_written_before_each_start_of_a_container(docker, runtime):
    runtime.start(GIVEN)
    written = [("run/secrets/token", b"x", 0o400, 5, 0), ("text", b"a text", 0o444, 0, 0)]
    assert [each[1:] for each in docker.extracted] == written
    assert docker.verbs() == ["create", "ps", "inspect", "inspect", "archive", "start", "inspect"]
    runtime.start(GIVEN)
    assert "archive" not in docker.verbs(), "it runs"
    runtime.stop(GIVEN)
    runtime.start(GIVEN)
    assert docker.verbs().count("archive") == 1


@pytest.mark.parametrize(
    ("file", "refuses", "why"),
    [
        (TOKEN._replace(content=None), [], "the secret or config /run/secrets/token is .* not set: TOKEN"),
        (TOKEN, [(400, "rootfs is marked read-only")], "cannot be given /run/secrets/token: .*read-only"),
    ],
)
def test_a_container_that_lacks_a_placed_file_is_not_started(docker, runtime, file, refuses, why):
    docker.fails["archive"] = refuses
    with pytest.raises(LoadError, match=why):
        runtime.start(replace(A, service=replace(A.service, files=(file,))))
    assert "start" not in docker.verbs()


REMAINS = (
    "failed to create shim task: OCI runtime create failed: container with id exists: %s: unknown",
    "failed to create task for container: failed to start shim: mkdir /run/moby/%s: file exists",
    'container "%s": already exists',
    "task %s: already exists: unknown",
)
"""What releases of Docker say of a container whose last start they did not live to end."""


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("dead", ""),
        ("removing", ""),
        ("exited", (404, "network 89c547813c82 not found")),
        *(("exited", (500, each % "c1")) for each in REMAINS),
    ],
)
def test_a_container_that_can_never_be_started_again_is_made_anew(docker, runtime, status, said):
    docker.add("c1", status=status)
    docker.fails["start"] = [said] if said else []
    assert runtime.start(A) == URL
    assert "c1" not in docker.containers


def test_a_container_that_somebody_removed_is_made_anew(docker, runtime):
    runtime.start(A)
    docker.containers.clear()
    assert runtime.start(A) == URL


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ("exited", r"service a exited with code 1"),
        ("running", r'publish its port, such as ports: \["127.0.0.1::8080"\]'),
    ],
)
def test_a_service_that_ends_at_once_or_has_no_address_says_so(docker, runtime, status, why):
    docker.add("c1", status=status, ExitCode=1)
    docker.containers["c1"]["NetworkSettings"] = {}
    docker.ignores = {"start"}
    with pytest.raises(LoadError, match=why):
        runtime.start(A)


def test_docker_that_is_away_says_how_to_reach_it(docker, runtime):
    docker.refuses_create = ["whatever it says"]
    docker.path.unlink()
    with pytest.raises(
        NotBegun,
        match=r"Cannot connect to the Docker daemon at unix://.*: No such file .*\. Start dockerd, or set",
    ):
        runtime.start(A)


def test_runtime_whose_socket_is_away_has_a_problem_until_it_is_back(docker, runtime):
    assert (runtime.ping(), runtime.problem()) == ("", "")
    elsewhere = docker.path.rename(docker.path.with_name("elsewhere"))
    assert runtime.ping().startswith("Cannot connect to the Docker daemon")
    assert runtime.problem() == runtime.ping()
    elsewhere.rename(docker.path)
    assert (runtime.ping(), runtime.problem()) == ("", "")


def test_a_port_that_another_program_has_is_said_plainly(docker, runtime):
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


def test_a_container_is_not_made_anew_for_what_else_exists(docker, runtime):
    docker.add("c1", status="exited")
    docker.fails["start"] = [(500, "endpoint with name a already exists in network x")]
    with pytest.raises(BackendError, match="already exists in network"):
        runtime.start(A)
    assert [*docker.containers] == ["c1"]


def test_a_container_is_started_once_more_where_podman_still_cleans_up(docker, runtime):
    docker.add("c1", status="exited")
    said = "netavark: remove aardvark entries: IO error: No such file or directory (os error 2)"
    docker.fails["start"] = [(500, said)]
    assert runtime.start(A)
    docker.add("c1", status="exited")
    docker.fails["start"] = [(500, said)] * 2
    with pytest.raises(BackendError, match="netavark"):
        runtime.start(A)


def test_gpus_that_docker_cannot_give_are_said_plainly(docker, runtime):
    docker.add("c1", status="exited")
    docker.containers["c1"]["HostConfig"]["DeviceRequests"] = [{"Driver": "nvidia"}]
    docker.fails["start"] = [(500, "could not select a driver")] * 2
    with pytest.raises(LoadError, match=r"could not select a driver. Install the NVIDIA Container Toolkit"):
        runtime.start(A)
    docker.runtimes = ("runc", "nvidia")
    with pytest.raises(BackendError, match=r"could not select a driver$"):
        runtime.start(A)


def test_the_first_container_is_used_where_somebody_made_more(docker, runtime):
    docker.add("c2", number="2")
    docker.add("c1", number="1")
    docker.end("c1", 5)
    assert runtime.ended(A) == "exited with code 5"


def test_a_stop_that_does_not_hold_is_followed_by_kill_and_rm(docker, runtime):
    docker.add("c1")
    docker.ignores = {"stop"}
    docker.fails["kill"] = [(500, "cannot kill")]
    runtime.stop(A)
    assert [verb for verb in docker.verbs() if verb in ("stop", "kill", "rm")] == ["stop", "kill", "rm"]
    assert not docker.containers


def test_a_service_that_nothing_ends_is_an_error(docker, runtime):
    docker.add("c1")
    docker.ignores = {"stop", "kill"}
    docker.fails["rm"] = [(500, "could not kill: did not receive an exit event")]
    with pytest.raises(BackendError, match=r"service a still runs after stop, kill and rm.*exit event"):
        runtime.stop(A)


def test_a_kill_has_no_grace(docker, runtime):
    docker.add("c1")
    runtime.kill(A)
    assert docker.verbs() == ["ps", "inspect", "kill", "inspect"]


def test_a_service_is_frozen_listed_as_it_is_and_let_go_on(docker, runtime):
    docker.add("c1")
    runtime.pause(A)
    assert docker.state("c1")["Status"] == "paused"
    assert runtime.running() == {"a": URL}
    assert (runtime.is_frozen(A), runtime.is_frozen(B), runtime.ended(A)) == (True, False, None)
    runtime.resume(A)
    assert docker.state("c1")["Status"] == "running"
    docker.verbs()
    runtime.resume(A)
    assert "unpause" not in docker.verbs()


def test_the_processes_of_a_container_are_those_of_the_host(docker, runtime):
    docker.add("c1")
    assert runtime.pids(A) == [4711, 4712]
    docker.end("c1")
    assert runtime.pids(A) == []


def test_a_process_belongs_to_the_service_whose_container_it_runs_in_which_docker_is_not_asked(
    docker, runtime, monkeypatch
):
    docker.add("c1")
    inside = {4711: "c1", 4712: "somebody else's"}
    monkeypatch.setattr(containers.gpus, "container_of", inside.get)
    assert runtime.owner(4711) is None
    runtime.running()
    docker.verbs()
    assert [runtime.owner(pid) for pid in (4711, 4712, 4713)] == ["a", None, None]
    assert docker.verbs() == []
    runtime.stop(A)
    assert runtime.owner(4711) == "a"  # it may not be gone yet


def test_a_service_that_runs_without_an_address_is_listed_all_the_same_and_can_be_stopped(docker, runtime):
    docker.add("c1", "a", status="restarting")
    docker.add("c2", "b")
    docker.containers["c2"]["NetworkSettings"] = {}
    assert runtime.running() == {"a": "", "b": ""}
    runtime.stop(A)
    assert "stop" in docker.verbs()


def test_what_runs_is_looked_for_among_our_services_only(docker, runtime):
    docker.add("c1", "a")
    docker.add("c2", "b", status="exited")
    docker.add("c3", "database")
    assert runtime.running() == {"a": URL}
    assert docker.verbs() == ["ps", "inspect", "inspect"]


def test_what_a_killed_anvil_mux_is_starting_is_found(docker, runtime):
    docker.add("c1", status="created")

    def inspect(id: str) -> tuple[int, object]:  # as Docker: not before the start is over
        docker.state(id).update(Status="running")
        return 200, docker.containers[id]

    docker.do_inspect = inspect
    assert runtime.running() == {"a": URL}


def test_what_a_killed_anvil_mux_is_stopping_is_waited_for_once(docker, runtime):
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


def test_a_stop_that_podman_is_at_is_waited_for(docker, runtime):
    docker.add("c1", "a", status="stopping")
    assert runtime.ended(A) is None
    assert runtime.running() == {}


def test_a_container_that_goes_away_while_it_is_listed_is_no_error(docker, runtime):
    docker.add("c1", "a")
    docker.add("c2", "b")
    docker.fails["inspect"] = [(404, "No such container: c1")]
    assert runtime.running() == {"b": URL}


def test_the_log_tail_is_of_the_last_run_only(docker, runtime):
    docker.add("c1")
    docker.logs = [(1, "one\r\ntwo\n"), (2, "three\n")]
    assert runtime.log_tail(A, 2) == ["two", "three"]
    begun = datetime(2026, 11, 21, 13, 0, 1, tzinfo=timezone.utc).timestamp()
    assert begun - 5 < docker.since < begun


def test_the_last_lines_of_what_has_ended_may_come_late(docker, runtime, monkeypatch):
    docker.add("c1", status="exited", exit_code=3)
    docker.logs = []
    late = iter([[], [(1, "loading\n")], [(1, "loading\n"), (2, "out of memory\n")]])
    monkeypatch.setattr(containers.time, "sleep", lambda _: setattr(docker, "logs", next(late, docker.logs)))
    assert runtime.log_tail(A) == ["loading", "out of memory"]


def test_nothing_of_an_earlier_run_is_shown_when_a_start_fails(docker, runtime):
    docker.logs = [(1, "of the first run\n")]
    runtime.start(A)
    runtime.stop(A)
    docker.fails["start"] = [(500, "port is already allocated")]
    with pytest.raises(BackendError):
        runtime.start(A)
    assert runtime.log_tail(A) == []
    runtime.start(A)
    assert runtime.log_tail(A) == ["of the first run"]


def test_nothing_of_a_run_that_ended_just_before_is_shown(docker, runtime, monkeypatch):
    told = datetime(2026, 11, 21, 13, 0, 2, 250_000, tzinfo=timezone.utc).timestamp()
    monkeypatch.setattr(containers, "time", SimpleNamespace(time=lambda: told))
    runtime.start(A)
    runtime.log_tail(A)
    assert docker.since == told


def test_a_log_is_followed_and_one_that_cannot_be_had_is_empty(docker, runtime):
    docker.add("c1")
    docker.logs = [(1, "one\r\ntwo\n")]
    assert list(runtime.follow_log(A)) == ["one", "two"]
    docker.fails["logs"] = [AWAY]
    assert runtime.log_tail(A) == []


def on_host(docker, port):
    """A backend on the host's network, and its container."""
    a = replace(A, port=port, service=replace(A.service, on_host_network=True))
    docker.add("c1", status="exited")
    docker.containers["c1"]["HostConfig"]["NetworkMode"] = "host"
    return a


def test_a_container_on_the_host_network_is_not_started_where_another_has_its_port(docker):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        a = on_host(docker, port)
        runtime = runtime_at(docker, replace(CONFIG, backends=(a,)))
        with pytest.raises(LoadError, match=f"cannot have port {port} .*: another program has it"):
            runtime.start(a)
        assert docker.state("c1")["Status"] == "exited"
        docker.state("c1")["Status"] = "running"
        assert runtime.start(a) == f"http://127.0.0.1:{port}"
    docker.end("c1")
    assert runtime.start(a) == f"http://127.0.0.1:{port}"


def test_a_container_on_the_network_of_another_is_reached_there(docker, runtime):
    docker.add("vpn-id", "vpn")
    docker.add("c1", status="exited")
    docker.containers["c1"]["HostConfig"]["NetworkMode"] = "container:vpn-id"
    docker.containers["c1"]["NetworkSettings"] = {}
    assert runtime.start(A) == URL
    assert runtime.running() == {"a": URL}
    del docker.containers["vpn-id"]["NetworkSettings"]["Ports"]
    with pytest.raises(LoadError, match="publish its port on the service whose network it has, such as"):
        runtime.start(A)
    docker.end("vpn-id")
    assert runtime.running() == {"a": ""}
