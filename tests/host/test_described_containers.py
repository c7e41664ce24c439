"""What becomes of containers whose service is described otherwise, is scaled, or is generated."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from anvil_mux.command import Done
from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError
from anvil_mux.host.containers import ContainerRuntime
from anvil_mux.host.seam import HostConfig
from tests.host.docker_stand_in import CONFIG, REPLICAS, URL, A, B, Docker, replica

MADE = {"com.docker.compose.config-hash": "h1", "com.docker.compose.image": "sha256:llama:1"}


def labelled(docker: Docker, id: str, service: str = "a", number: str = "1", **more: str) -> None:
    docker.add(id, service, number=number)
    docker.containers[id]["Config"].update(Image="llama:1", Cmd=["-m", "old.gguf"])
    docker.containers[id]["Config"]["Labels"].update({**MADE, **more})


def test_what_runs_is_compared_by_the_hash_that_compose_has_of_it(docker, runtime):
    labelled(docker, "c1")
    docker.hash = "h1"
    assert runtime.differs(A) == ""
    docker.hash = "h2"
    assert runtime.differs(A) == "its description changed since its container was made"
    changed = replace(A, service=replace(A.service, command=("-m", "new.gguf")))
    assert runtime.differs(changed) == "its command changed since its container was made"


def test_an_image_of_the_same_name_that_was_built_anew_is_another(docker, runtime):
    labelled(docker, "c1", **{"com.docker.compose.image": "sha256:before"})
    docker.hash = "h1"
    assert runtime.differs(A) == "its image changed since its container was made"
    docker.images = set()
    assert runtime.differs(A) == ""


@pytest.mark.parametrize("hash", ["", "h1"])
def test_without_a_hash_to_compare_the_container_itself_is_looked_at(docker, runtime, hash):
    labelled(docker, "c1", **({"com.docker.compose.config-hash": ""} if hash else {}))
    docker.hash = hash  # "": Compose cannot be run
    assert runtime.differs(A) == ""
    changed = replace(A, service=replace(A.service, command=("-m", "new.gguf")))
    assert runtime.differs(changed) == "its command changed since its container was made"


@pytest.mark.parametrize("ours", ["2.40.3", "v2.40.3", "2.40.3-desktop.1"])
def test_after_an_upgrade_of_compose_its_hash_is_not_compared(docker, runtime, caplog, ours):
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
    docker, runtime, made_by, ours
):
    labelled(docker, "c1", **{"com.docker.compose.version": made_by})
    docker.hash, docker.compose = "another", ours
    assert runtime.differs(A) == "its description changed since its container was made"


def test_one_that_differs_is_made_anew_by_its_next_start_though_others_of_its_service_run(docker, runtime):
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


def test_one_that_differs_is_made_anew_though_we_have_started_it_by_what_we_have_of_it(docker, runtime):
    backend = replace(A, service=replace(A.service, digest="d1"))
    labelled(docker, "c1")
    docker.hash = "h1"
    runtime.start(backend)
    docker.hash = "h2"  # such as by another env_file
    assert runtime.differs(backend)
    runtime.stop(backend)
    runtime.start(backend)
    assert "c1" not in docker.containers


def test_a_replica_that_stopped_before_its_description_changed_is_made_anew(docker, runtime):
    docker.scale = 2
    labelled(docker, "c1", "s", "1", **{"com.docker.compose.config-hash": "h2"})
    labelled(docker, "c2", "s", "2")
    docker.end("c2", 0)
    docker.hash = "h2"
    runtime.start(REPLICAS[1])
    assert "c2" not in docker.containers
    assert docker.state("c1")["Status"] == "running"


# Another configuration


def described(backend: Backend, digest: str) -> Backend:
    return replace(backend, service=replace(backend.service, digest=digest))


@pytest.mark.parametrize("found", [False, True])
def test_a_service_that_is_described_otherwise_is_made_anew_by_its_next_start(docker, runtime, found):
    if found:
        docker.add("c1")
        assert runtime.running() == {"a": URL}
    else:
        runtime.start(A)
    (first,) = docker.containers
    other = described(A, "other")
    runtime.reconfigure(replace(CONFIG, backends=(other, B)))
    runtime.stop(A)
    assert docker.state(first)["Status"] == "exited"
    runtime.start(other)
    assert first not in docker.containers
    runtime.reconfigure(replace(CONFIG, backends=(replace(other, ttl=1.0), B)))
    runtime.stop(other)
    docker.verbs()
    runtime.start(replace(other, ttl=1.0))
    assert docker.verbs() == ["start", "inspect"]


def test_a_service_that_is_served_no_longer_is_ours_until_it_was_stopped(docker, runtime):
    runtime.start(B)
    runtime.reconfigure(replace(CONFIG, backends=(A,)))
    assert runtime.running() == {"b": URL}
    runtime.stop(B)
    docker.add("c9", "b")
    assert runtime.running() == {}


def test_a_replica_that_is_described_otherwise_is_made_anew_beside_those_that_still_run(docker, runtime):
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


def test_each_container_of_a_scaled_service_is_started_and_stopped_alone(docker, scaled):
    scaled.start(REPLICAS[1])
    assert up(docker) == [2]
    scaled.start(REPLICAS[2])
    scaled.stop(REPLICAS[1])
    assert up(docker) == [3]
    assert scaled.ended(REPLICAS[0]) == "has not been started"


def test_containers_that_run_are_adopted_by_their_numbers(docker, scaled):
    docker.add("c3", "s", number="3")
    docker.add("c1", "s", number="1")
    assert list(scaled.running()) == ["s-1", "s-3"]
    scaled.stop(REPLICAS[2])
    assert up(docker) == [1]


def test_a_container_that_somebody_removed_is_replaced_beside_those_that_run(docker, scaled):
    for each in REPLICAS:
        scaled.start(each)
    docker.containers.pop(next(id for id in docker.containers if docker.number(id) == 2))
    scaled.start(REPLICAS[1])
    assert up(docker) == [1, 3, 4]
    scaled.stop(REPLICAS[2])
    scaled.stop(REPLICAS[0])
    assert up(docker) == [4]
    assert scaled.ended(REPLICAS[1]) is None


def test_who_stands_in_for_a_removed_container_does_so_after_a_restart_too(docker, scaled):
    docker.add("c4", "s", number="4")
    docker.add("c3", "s", number="3")
    docker.add("c1", "s", number="1", status="exited")
    assert list(scaled.running()) == ["s-1", "s-3"]  # the one that runs is needed, not its number
    scaled.start(REPLICAS[1])
    assert up(docker) == [1, 3, 4]


def test_a_changed_description_does_not_end_replicas_that_run(docker, scaled):
    docker.add("c1", "s", number="1")
    scaled.running()
    docker.changed = True
    scaled.start(REPLICAS[1])
    assert up(docker) == [1, 2]
    scaled.stop(REPLICAS[0])
    scaled.stop(REPLICAS[1])
    scaled.start(REPLICAS[2])
    assert "c1" not in docker.containers


def test_a_replica_that_is_half_removed_is_made_anew_beside_those_that_run(docker, scaled):
    docker.add("c1", "s", number="1")
    docker.add("c2", "s", number="2", status="dead")
    scaled.running()
    scaled.start(REPLICAS[1])
    assert "c2" not in docker.containers
    assert docker.state("c1")["Status"] == "running"


def test_a_replica_that_is_described_otherwise_is_made_anew_without_the_others(docker, scaled):
    for each in REPLICAS[:2]:
        scaled.start(each)
    before = {docker.number(id): id for id in docker.containers}
    scaled.stop(REPLICAS[0])
    scaled.stop(REPLICAS[1])
    scaled.start(replace(REPLICAS[1], service=replace(REPLICAS[1].service, digest="other")))
    assert docker.containers.keys() & before.values() == {before[1], before[3]}
    assert up(docker) == [4]


def test_a_replica_that_the_configuration_has_no_longer_can_be_stopped(docker, scaled):
    docker.add("c3", "s", number="3")
    docker.add("c4", "s", number="4")
    scaled.stop(replica(4))
    assert up(docker) == [3]


# Services that are generated for this host or its GPUs


class Composer:
    """The runtime of generated services, and what each ``compose create`` finds."""

    def __init__(self, docker: Docker, folder: Path, *files: str) -> None:
        self.docker = docker
        self.files = files
        self.created: list[tuple[list[str], str, int]] = []
        """The files as they were named, and the text and the mode of the last one."""
        environ = {"DOCKER_HOST": docker.host, "XDG_STATE_HOME": str(folder)}
        config = self.config("one", "m.0")
        self.runtime = ContainerRuntime(config, environ=environ, run=self.run, address="10.0.0.2")

    def config(self, generated: str, *names: str) -> HostConfig:
        backends = tuple(replace(A, name=name, model="m") for name in names)
        return HostConfig(backends, project="p-b", files=self.files, generated_compose=generated)

    def run(self, argv: Sequence[str], timeout: float) -> Done:
        if "create" in argv:
            files = [word for before, word in pairwise(argv) if before == "-f"]
            last = Path(files[-1])
            self.created.append((files, last.read_text(), last.stat().st_mode & 0o777))
        return self.docker.run(argv, timeout)


def test_generated_services_are_a_file_more_that_nobody_else_may_read(docker, tmp_path):
    composer = Composer(docker, tmp_path, "/s/compose.yaml")
    file = tmp_path / "anvil-mux" / "p-b" / "compose.yaml"
    assert not file.exists()
    [backend] = composer.config("one", "m.0").backends
    composer.runtime.start(backend)
    assert composer.created == [(["/s/compose.yaml", str(file)], "one", 0o600)]
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_on_another_host_they_are_the_only_file_and_a_reload_writes_it_anew(docker, tmp_path):
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


def test_generated_services_that_run_are_adopted_and_orphans_stopped(docker, tmp_path):
    docker.add("c0", "m.0")
    docker.add("c9", "m.9")
    composer = Composer(docker, tmp_path)
    assert list(composer.runtime.running()) == ["m.0"]
    composer.runtime.stop(Backend("m.9", "m.9"))
    assert docker.state("c9")["Status"] == "exited"
    assert composer.created == []


def test_generated_services_that_cannot_be_written_are_said(docker, tmp_path):
    composer = Composer(docker, tmp_path)
    (tmp_path / "anvil-mux").write_text("in the way")
    with pytest.raises(BackendError, match=r"compose.yaml cannot be written: Not a directory"):
        composer.runtime.start(composer.config("one", "m.0").backends[0])
