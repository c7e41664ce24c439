"""Which ends of containers are reported, and what is done about those that Docker revived."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from anvil_mux.host import project
from anvil_mux.host.containers import ContainerRuntime
from tests.host.conftest import runtime_at
from tests.host.docker_stand_in import AWAY, PATIENCE, REPLICAS, URL, A, B, Docker
from tests.host.test_described_containers import up
from tests.running import seen


@dataclass
class Watched:
    docker: Docker
    runtime: ContainerRuntime
    deaths: queue.Queue[str]
    others: queue.Queue[tuple[str, str]] = field(default_factory=queue.Queue)
    """Events other than deaths, and their backends."""

    def hear(self, event: str, name: str) -> None:
        if event == "ended":
            self.deaths.put(name)
        else:
            self.others.put((event, name))

    def other(self) -> tuple[str, str]:
        return self.others.get(timeout=PATIENCE)

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
    thread = threading.Thread(target=runtime.watch, args=(watched.hear,))
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


# What somebody else does to a container of ours


def test_a_container_that_is_started_by_hand_is_reported(watched):
    into = watched.docker.next_events()
    watched.runtime.running()
    id = watched.docker.add("c1")
    into.tell(id, event="start", service="a")
    assert watched.other() == ("started", "a")
    assert watched.runtime.running() == {"a": URL}
    watched.docker.end(id)
    into.tell(id)
    assert watched.died() == "a", "once it is known it is watched"
    into.close()


def test_our_own_start_and_those_of_others_are_no_starts_by_hand(watched):
    into = watched.docker.next_events()
    watched.runtime.running()
    watched.runtime.start(A)
    into.tell(watched.id("a"), event="start", service="a")
    into.tell("x", event="start", service="database")
    watched.runtime.stop(A)
    into.tell(watched.id("a"), event="start", service="a")
    watched.docker.add("c2", "b")
    into.tell("c2", event="start", service="b")
    assert watched.other() == ("started", "b")
    into.close()


def test_what_ran_before_the_program_is_not_reported_as_started(watched):
    into = watched.docker.next_events()
    watched.docker.add("c1")
    into.tell("c1", event="start", service="a")
    watched.runtime.running()
    watched.docker.add("c2", "b")
    into.tell("c2", event="start", service="b")
    assert watched.other() == ("started", "b")
    into.close()


def test_a_start_by_hand_while_docker_was_away_is_reported(watched):
    into = watched.docker.next_events()
    watched.runtime.running()
    watched.docker.add("c1")
    into.close()
    assert watched.other() == ("started", "a")
    watched.docker.next_events().close()


def test_a_container_that_is_restarted_by_hand_has_died_and_its_start_is_reported(watched):
    into = watched.docker.next_events()
    watched.runtime.running()
    watched.runtime.start(A)
    id = watched.id("a")
    watched.docker.end(id, 0)
    into.tell(id)
    assert watched.died() == "a"
    watched.docker.moment += 1
    watched.docker.state(id).update(Status="running", StartedAt=watched.docker.now())
    into.tell(id, event="start", service="a")
    assert watched.other() == ("started", "a")
    into.close()


def test_a_pause_by_hand_is_reported_and_our_own_is_not(watched):
    into = watched.docker.next_events()
    watched.runtime.start(A)
    watched.runtime.start(B)
    a, b = watched.id("a"), watched.id("b")
    watched.runtime.pause(A)
    into.tell(a, event="pause")
    into.tell(b, event="pause")
    assert watched.other() == ("paused", "b")
    into.tell(b, event="unpause")
    assert watched.other() == ("resumed", "b")
    into.close()


def test_a_container_in_standby_that_is_unpaused_by_hand_is_paused_again(watched):
    into = watched.docker.next_events()
    watched.runtime.start(A)
    id = watched.id("a")
    watched.runtime.pause(A)
    watched.docker.state(id).update(Status="running")
    into.tell(id, event="unpause")
    seen(lambda: watched.docker.state(id)["Status"], lambda status: status == "paused")
    watched.runtime.resume(A)
    into.tell(id, event="unpause")
    assert watched.other() == ("resumed", "a")
    assert watched.docker.state(id)["Status"] == "running"
    into.close()


def test_a_container_that_loses_its_network_has_died_and_is_made_again(watched):
    into = watched.docker.next_events()
    watched.runtime.start(A)
    id = watched.id("a")
    watched.docker.containers[id]["NetworkSettings"] = {"Networks": {}, "Ports": {}}
    into.tell(id, event="disconnect")
    assert watched.died() == "a"
    assert watched.docker.state(id)["Status"] == "exited"
    assert watched.runtime.ended(A) == "lost its network: somebody disconnected its container"
    assert watched.runtime.start(A) == URL
    assert id not in watched.docker.containers
    into.close()


def test_a_container_that_lost_its_network_while_it_was_stopped_is_made_again(watched):
    watched.runtime.start(A)
    id = watched.id("a")
    watched.runtime.stop(A)
    watched.docker.containers[id]["NetworkSettings"] = {"Networks": {}, "Ports": {}}
    assert watched.runtime.start(A) == URL
    assert id not in watched.docker.containers
