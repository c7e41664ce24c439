"""Which ends of containers are reported, and what is done about those that Docker revived."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from anvil_mux.host import project
from anvil_mux.host.containers import ContainerRuntime
from tests.host.conftest import runtime_at
from tests.host.docker_stand_in import AWAY, PATIENCE, REPLICAS, A, B, Docker
from tests.host.test_described_containers import up


@dataclass
class Watched:
    docker: Docker
    runtime: ContainerRuntime
    deaths: queue.Queue[str]

    def died(self) -> str:
        return self.deaths.get(timeout=PATIENCE)

    def id(self, service: str) -> str:
        """Of its container."""
        return next(id for id in self.docker.containers if self.docker.service(id) == service)


@pytest.fixture
def watched(docker: Docker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(project, "FIRST_PAUSE", 0.001)
    runtime = runtime_at(docker)
    watched = Watched(docker, runtime, queue.Queue())
    thread = threading.Thread(target=runtime.watch, args=(watched.deaths.put,))
    thread.start()
    try:
        yield watched
    finally:
        runtime.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_death_is_reported_once(watched):
    into = watched.docker.next_events()
    watched.runtime.start(A)
    watched.runtime.start(B)
    a, b = watched.id("a"), watched.id("b")
    watched.docker.end(a)
    into.tell(a, a)
    assert watched.died() == "a"
    watched.docker.end(b)
    into.tell(b)
    assert watched.died() == "b"
    into.close()


def test_our_own_stop_is_no_death(watched):
    into = watched.docker.next_events()
    watched.runtime.start(A)
    watched.runtime.start(B)
    watched.runtime.stop(A)
    watched.docker.end(watched.id("b"))
    into.tell(watched.id("a"), watched.id("b"))
    assert watched.died() == "b"
    into.close()


def test_a_late_event_of_our_own_stop_does_not_hurt_the_next_run(watched):
    into = watched.docker.next_events()
    watched.runtime.start(A)
    watched.runtime.start(B)
    watched.runtime.stop(A)
    into.tell(watched.id("a"))
    watched.runtime.start(A)
    into.tell(watched.id("a"))
    watched.docker.end(watched.id("b"))
    into.tell(watched.id("b"))
    assert watched.died() == "b"
    assert watched.runtime.ended(A) is None
    into.close()


def test_a_service_that_its_restart_policy_revived_is_put_down_and_reported(watched):
    into = watched.docker.next_events()
    watched.runtime.start(A)
    id = next(iter(watched.docker.containers))
    watched.docker.state(id).update(Status="running", StartedAt="2026-11-21T23:59:59.9Z")
    into.tell(watched.id("a"), code=139)
    assert watched.died() == "a"
    assert watched.docker.state(id)["Status"] == "exited"
    how = "exited with code 139 (SIGSEGV), and Docker had started it again"
    assert watched.runtime.ended(A) == how
    watched.runtime.start(A)
    watched.docker.end(id, 1)
    assert watched.runtime.ended(A) == "exited with code 1"
    into.close()


def test_deaths_of_other_services_are_not_ours(watched):
    into = watched.docker.next_events()
    watched.runtime.start(A)
    into.tell("database", "")
    watched.docker.end(next(iter(watched.docker.containers)))
    into.tell(watched.id("a"))
    assert watched.died() == "a"
    into.close()


def test_what_ended_while_docker_was_away_is_reported_when_it_is_back(watched):
    into = watched.docker.next_events()
    watched.runtime.start(A)
    watched.runtime.start(B)
    watched.docker.fails["ps"] = [AWAY] * 3
    watched.docker.end(next(iter(watched.docker.containers)))
    into.close()
    assert watched.died() == "a"
    watched.docker.next_events().close()


def test_an_adopted_service_is_watched_too(watched):
    into = watched.docker.next_events()
    watched.docker.add("c1")
    watched.runtime.running()
    watched.docker.end("c1")
    into.tell("c1")
    assert watched.died() == "a"
    into.close()


def test_the_death_of_one_replica_is_its_own(docker, watched):
    into = watched.docker.next_events()
    docker.scale = 3
    for each in REPLICAS:
        watched.runtime.start(each)
    second = next(id for id in docker.containers if docker.number(id) == 2)
    docker.end(second)
    into.tell(second)
    assert watched.died() == "s-2"
    assert up(docker) == [1, 3]
    into.close()
