"""What is asked of a Docker Engine, and what is made of its answers."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from anvil_mux.errors import BackendError
from anvil_mux.host.docker_api import (
    Conflict,
    ContainerEngine,
    ContainerEvent,
    DockerRefused,
    Endpoint,
    Missing,
    Stream,
    Unreachable,
    read_event,
)
from tests.host.docker_stand_in import AWAY, Docker
from tests.protocol.test_completions import Copied

LABELS = {"com.docker.compose.project": "p", "com.docker.compose.service": "a"}


@pytest.mark.parametrize(
    ("action", "actor", "event"),
    [
        ("die", {"ID": "c1", "Attributes": {"exitCode": "139"}}, ContainerEvent("die", "c1", code=139)),
        ("died", {"ID": "c1", "Attributes": {"containerExitCode": "1"}}, ContainerEvent("die", "c1")),
        ("die", {"ID": "c1", "Attributes": None}, ContainerEvent("die", "c1")),
        ("start", {"ID": "c1", "Attributes": LABELS}, ContainerEvent("start", "c1", "p", "a")),
        ("disconnect", {"ID": "n", "Attributes": {"container": "c1"}}, ContainerEvent("disconnect", "c1")),
        ("exec_die", {"ID": "c1", "Attributes": {}}, ContainerEvent("")),
        ("die", [], ContainerEvent("")),
        ([], {"ID": 1}, ContainerEvent("")),
    ],
)
def test_an_event_is_read(action, actor, event):
    assert read_event(json.dumps({"Action": action, "Actor": actor})) == event


@pytest.mark.parametrize("line", ["{}", "not JSON", "[]", ""])
def test_a_line_that_is_not_an_event_is_none(line):
    assert read_event(line) == ContainerEvent("")


# Questions and answers


@pytest.fixture
def engine(docker: Docker) -> ContainerEngine:
    return ContainerEngine(Endpoint(docker.host))


def test_the_containers_of_a_project_are_listed_without_one_off_runs(docker, engine):
    docker.add("c1", "a")
    docker.add("c2", "b", status="exited")
    assert engine.containers("p") == [("c1", "a"), ("c2", "b")]
    ours = ["com.docker.compose.project=p", "com.docker.compose.oneoff=False"]
    assert docker.asked == {"all": "1", "filters": json.dumps({"label": ours})}
    assert engine.containers("p", "b") == [("c2", "b")]
    assert json.loads(docker.asked["filters"]) == {"label": [*ours, "com.docker.compose.service=b"]}


def test_a_grace_is_rounded_up(docker, engine):
    docker.add("c1")
    engine.stop("c1", 3.5)
    assert docker.asked == {"t": "4"}


def test_what_was_so_already_is_no_error(docker, engine):
    docker.add("c1")
    engine.start("c1")
    docker.fails["stop"] = [(304, "")]
    engine.stop("c1", 1.0)


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, DockerRefused), (404, Missing), (409, Conflict), (500, DockerRefused), (503, DockerRefused)],
)
def test_an_error_is_told_by_its_status_and_said_in_its_message(docker, engine, status, error):
    docker.add("c1")
    docker.fails["kill"] = [(status, "it is\nso.")]
    with pytest.raises(DockerRefused) as caught:
        engine.kill("c1")
    assert type(caught.value) is error
    assert caught.value.message == f"Docker answers {status} to POST /containers/c1/kill: it is so"


def test_a_long_id_is_cut_in_errors(engine):
    with pytest.raises(Missing, match="POST /containers/000000000000/start: No such container"):
        engine.start("0" * 64)


def test_what_is_gone_has_nothing_to_inspect_and_no_processes(engine):
    assert engine.inspect("c1") is None
    assert engine.processes("c1") == []


@pytest.mark.parametrize("podman", [False, True])
def test_processes_are_asked_for_by_their_ids_on_the_host(docker, engine, podman):
    docker.podman = podman
    docker.add("c1")
    assert engine.processes("c1") == [4711, 4712]


def test_a_list_of_processes_that_is_null_has_none(engine, monkeypatch):
    engine.ping()
    answer = b'{"Titles": ["PID"], "Processes": null}'
    monkeypatch.setattr(engine, "_ask", lambda method, path: answer)
    assert engine.processes("c1") == []


@pytest.mark.parametrize("name", ["llama:1", "registry:5000/team/llama@sha256:0a"])
def test_an_image_is_there_or_not(docker, engine, name):
    assert bool(engine.image_id(name)) is (name == "llama:1")
    docker.images = {name}
    assert engine.image_id(name)


# Logs


@pytest.mark.parametrize("tty", [False, True])
def test_a_log_has_the_lines_of_both_streams_in_their_order(docker, engine, tty):
    docker.add("c1")
    docker.containers["c1"]["Config"]["Tty"] = tty
    docker.logs = [(1, "one\r\nt"), (1, "wo\n"), (2, ""), (2, "three\n"), (1, "fo\u00fcr")]
    container = engine.inspect("c1")
    assert container is not None
    assert engine.log(container, 20, since=1.5) == ["one", "two", "three", "fo\u00fcr"]
    assert docker.asked == {"stdout": "1", "stderr": "1", "tail": "20", "since": "1.500000"}
    assert engine.log(container, 2, since=1.5) == ["three", "fo\u00fcr"]
    with engine.follow(container, 100) as lines:
        assert list(lines) == ["one", "two", "three", "fo\u00fcr"]
    assert docker.asked == {"stdout": "1", "stderr": "1", "tail": "100", "follow": "1"}


def test_what_a_log_says_about_itself_may_be_cut_short(docker, engine):
    docker.add("c1")
    container = engine.inspect("c1")
    assert container is not None
    docker.fails["logs"] = [(200, b"\1\0\0\0\0\0\0\x09one\ntwo"), (200, b"\1\0\0")]
    assert engine.log(container, 20, since=0.0) == ["one", "two"]
    assert engine.log(container, 20, since=0.0) == []


def test_a_line_that_a_container_prints_in_many_pieces_is_not_copied_for_each_of_them():
    before = Copied.count
    connection: Any = None
    assert list(Stream(connection, iter([Copied(b"x" * 10)] * 1000))) == ["x" * 10_000]
    assert Copied.count - before <= 10_000


# Events


def test_ends_are_asked_for_by_the_words_of_docker_and_podman(docker, engine):
    with engine.events(12.3456) as events:
        filters = json.loads(docker.asked["filters"])
        into = docker.next_events()
        into.tell("c1", "c2", code=3)
        lines = iter(events)
        assert [read_event(next(lines))[::5] for _ in range(2)] == [("die", 3), ("die", 3)]
        events.interrupt()
        assert list(lines) == []
    into.close()
    assert docker.asked["since"] == "12.345600"
    assert filters == {
        "type": ["container", "network"],
        "event": ["start", "die", "died", "pause", "unpause", "disconnect"],
    }


# Versions, and an engine that does not answer


@pytest.mark.parametrize(("theirs", "spoken"), [("1.40", "1.40"), ("1.41", "1.41"), ("1.99", "1.52")])
def test_the_newest_version_that_both_know_is_spoken(docker, engine, theirs, spoken):
    docker.version = theirs
    engine.ping()
    docker.version = spoken
    docker.add("c1")
    assert engine.inspect("c1")  # the stand-in refuses paths of another version


def test_an_engine_that_is_too_old_is_refused(docker, engine):
    docker.version = "1.39"
    with pytest.raises(Unreachable, match=r"API is 1\.39, and 1\.40 is needed: update Docker to 19\.03"):
        engine.ping()


def test_an_engine_of_another_version_since_is_understood_from_the_next_question_on(docker, engine):
    docker.add("c1")
    assert engine.inspect("c1")
    docker.version = "1.44"
    with pytest.raises(DockerRefused, match="too new"):
        engine.inspect("c1")
    assert engine.inspect("c1")


def test_inspect_during_a_ping_of_another_thread_finds_the_container(docker, engine):
    docker.add("c1")
    engine.ping()
    asked, answered, pings = threading.Event(), threading.Event(), []
    docker.on_ping = lambda: (pings.append(1), asked.set(), answered.wait(10))
    with ThreadPoolExecutor(1) as pool:
        ping = pool.submit(engine.ping)
        assert asked.wait(10)
        container = engine.inspect("c1")
        pings_meanwhile = len(pings)
        answered.set()
        ping.result()
    assert container
    assert pings_meanwhile == 1  # what is known of the engine's API holds until there is another answer


def test_an_engine_that_closes_the_connection_has_not_answered(docker, engine):
    docker.fails["ps"] = [AWAY]
    with pytest.raises(
        Unreachable, match=r"did not answer GET /v1.41/containers/json: .*Start dockerd, or set"
    ):
        engine.containers("p")


def test_an_engine_that_takes_too_long_may_be_stuck(docker, engine, monkeypatch):
    engine.ping()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{docker.path}.silent")
        silent.listen()
        engine.endpoint = Endpoint(f"{docker.host}.silent")
        monkeypatch.setattr("anvil_mux.host.docker_api.STOP_SLACK", 0.01)
        with pytest.raises(Unreachable, match=r"within 0.01 s; dockerd may be stuck"):
            engine.stop("c1", 0.0)


def test_what_is_no_docker_engine_is_told_so(docker, engine):
    docker.version = ""
    with pytest.raises(BackendError, match=r"what answers at unix://.*docker.sock is no Docker Engine"):
        engine.ping()
