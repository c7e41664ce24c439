"""Engines of other projects on the GPUs of a host: who started them, who asks, and what was lost between."""

import dataclasses
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.service import Service
from anvil_mux.errors import Cancelled, LoadError
from anvil_mux.host import gpus as host_gpus
from anvil_mux.host.claims import claimed_engines, engine_claims
from anvil_mux.host.local import LeftEngines, LocalHost
from anvil_mux.host.notes import Notes
from anvil_mux.host.occupants import find_occupants
from anvil_mux.host.seam import MACHINE, HostConfig, HostGpu, Inventory, Occupant
from anvil_mux.host.starter import OwnChildren
from anvil_mux.state import state_folder
from tests.cli.demo import engine_of
from tests.host.test_processes import running

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = (str(ROOT / "bin" / "demo-engine"), "--model", "a", "--load-seconds", "0")
A = Backend("a", "a", gpus=("0",), load_timeout=30.0, service=Service(command=COMMAND))
B = Backend("b", "a", gpus=("0",), load_timeout=30.0, service=Service(command=COMMAND))
OTHER_GPU = dataclasses.replace(B, gpus=("1",))


@pytest.fixture(autouse=True)
def containers(monkeypatch):
    """Have no container run on this machine; a test appends one."""
    ids = []
    monkeypatch.setattr(host_gpus, "container_of", lambda pid: ids[0] if ids else None)
    return ids


@pytest.fixture
def open_host(tmp_path):
    """Open hosts for projects, which are closed with the test; ``home`` is where they have their state."""
    hosts = []

    def make(*backends, project="p", home="home", described=None, **environ):
        config = HostConfig.of(Config(backends, project=project, runtime="process"))
        variables = {**os.environ, "XDG_STATE_HOME": str(tmp_path / home), **environ}
        state_folder(project, variables).mkdir(parents=True, exist_ok=True)
        hosts.append((LocalHost(config, environ=variables, described=described), backends))
        return hosts[-1][0]

    yield make
    for host, backends in hosts:
        for backend in backends:
            host.stop(backend)
        host.close()


def lose_nothing(folder):
    pass


def lose_record(folder):
    (folder / "a.json").unlink()


def lose_notes(folder):
    (folder / "services").write_bytes(bytes(range(256)))
    (folder / "a.json").write_text("[]")


HELD = "its GPU is held by an engine that another anvil-mux started"
LOST = [lose_nothing, lose_record, lose_notes, shutil.rmtree]
ASKS = [{"project": "q"}, {"home": "other"}, {"project": "q", "home": "other"}]


@pytest.mark.parametrize("lose", LOST)
@pytest.mark.parametrize("asks", ASKS, ids=["project", "home", "both"])
def test_an_engine_of_another_project_or_home_keeps_its_gpu(open_host, tmp_path, lose, asks):
    first = open_host(A)
    first.load(A, "stop", 1)
    lose(tmp_path / "home" / "anvil-mux" / "p")
    second = open_host(B, OTHER_GPU, **asks)
    assert second.running() == []
    [occupant] = second.occupants()
    assert (occupant.backend, occupant.project, occupant.origin, occupant.gpus) == ("a", "p", "left", ("0",))
    assert occupant.end
    with pytest.raises(LoadError, match=f"^{HELD}$") as refused:
        second.load(B, "stop", 1)
    [line] = refused.value.log
    assert line.startswith(
        "For operators: a of the project p, which no anvil-mux serves, is on GPU 0. To end it: "
    )
    second.load(OTHER_GPU, "stop", 2)
    second.stop(OTHER_GPU)
    first.stop(A)
    assert second.occupants() == []
    second.load(B, "stop", 3)


@pytest.mark.parametrize("lose", LOST)
@pytest.mark.parametrize("asks", [{}, *ASKS], ids=["same", "project", "home", "both"])
def test_an_engine_of_the_same_description_is_adopted(open_host, tmp_path, lose, asks):
    first = open_host(A)
    url = first.load(A, "stop", 1).url
    pids = first.runtime.pids(A)
    first.close()
    lose(tmp_path / "home" / "anvil-mux" / "p")
    second = open_host(A, **asks)
    assert second.running() == ["a"]
    assert second.adopt(A).url == url
    assert second.occupants() == []
    second.evict(A, "stop")
    assert not any(map(running, pids))


@pytest.mark.parametrize("lose", LOST)
def test_an_engine_that_is_configured_no_longer_is_an_orphan(open_host, tmp_path, lose):
    first = open_host(A)
    first.load(A, "stop", 1)
    lose(tmp_path / "home" / "anvil-mux" / "p")
    second = open_host(B)
    assert [backend.name for backend in second.orphans()] == ["a"]


def test_an_engine_that_another_anvil_mux_serves_is_reported_as_such(open_host, tmp_path):
    first = open_host(A)
    first.load(A, "stop", 1)
    folder = tmp_path / "home" / "anvil-mux" / "p"
    (folder / "address").write_text('{"url": "http://127.0.0.1:1", "files": []}')
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        end = "anvil-mux unload --all --url http://127.0.0.1:1"
        second = open_host(A, home="other")
        assert second.running() == []
        assert second.occupants() == [Occupant("a", "p", "served", ("0",), end)]


ONE_GPU = Inventory((HostGpu("0", "GPU-5a6b", "name", 1 << 30),), None, "127.0.0.1")


@pytest.mark.parametrize(("first", "second"), [("GPU-5a6b", "0"), ("0", "GPU-5a6b"), ("GPU-5a", "GPU-5a6b")])
def test_a_gpu_is_one_under_its_index_and_its_uuid(open_host, first, second):
    holder, asker = dataclasses.replace(A, gpus=(first,)), dataclasses.replace(B, gpus=(second,))
    open_host(holder, described=ONE_GPU).load(holder, "stop", 1)
    host = open_host(asker, project="q", described=ONE_GPU)
    host.running()
    with pytest.raises(LoadError, match=f"^{HELD}$"):
        host.load(asker, "stop", 1)


@pytest.fixture
def start_as(monkeypatch, tmp_path):
    """Start a process that holds the claims of an engine of user 12345; it ends with the test."""
    starter, children = OwnChildren(), []

    def start(claims):
        env = {"PATH": os.environ["PATH"]}
        argv = ["sleep", "1000"]
        child = starter.start(argv, cwd="/", env=env, log=tmp_path / "stranger.log", claims=claims)
        children.append(child)
        return child

    yield start
    for child in children:
        if child.code() is None:
            os.kill(child.pid, signal.SIGKILL)
            child.code(30.0)


@pytest.fixture
def claims_of_another(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        return engine_claims(os.environ, ["0", "7"], "f00d", "theirs", "x")


def test_engine_of_another_user_keeps_its_gpu_until_it_ends(open_host, start_as, claims_of_another):
    host = open_host(A)
    host.running()
    child = start_as(claims_of_another)
    end = "sudo -iu '#12345' anvil-mux stop --all"
    assert host.occupants() == [Occupant("x", "theirs", "user", ("0", "7"), end)]
    with pytest.raises(LoadError, match=f"^{HELD}$"):
        host.load(A, "stop", 1)
    os.kill(engine_of(child.pid), signal.SIGKILL)  # its launcher ends after it
    child.code(30.0)
    assert host.occupants() == []
    host.load(A, "stop", 2)


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed, which only root can be")
def test_engine_of_root_is_seen_by_a_user_who_cannot_read_it(open_host):
    open_host(A).load(A, "stop", 1)
    said = subprocess.run(
        [sys.executable, "-c", "from anvil_mux.host.check import *; print(engines_of_other_users())"],
        user=65534,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "a of the project p, of another user, is on GPU 0. To end it: sudo -iu root anvil" in said.stdout


def test_claims_that_no_anvil_mux_made_are_left_out(start_as, claims_of_another):
    [good, _] = claims_of_another
    prefix = good.partition("/0/")[0]
    odd = ["0/1/2/3", "0/-1/f/p/x", "0/1/f/\x1b[2J/x", "0/1/f/p\n/x", "0//f/p/x", "0/1/f/p/x/y", "0/" * 40]
    before = claimed_engines(os.environ)
    start_as([f"{prefix}/{each}"[:107] for each in odd])
    assert claimed_engines(os.environ) == before
    start_as([f"{prefix}/0/{'9' * 40}/f/p/x"])
    [claim] = set(claimed_engines(os.environ)) - set(before)
    assert claim.user == "#" + "9" * 40


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def hold_start(pool):
    """Hold the next start of an engine on a host; returns what says that it has come, and what lets it go."""
    gates = []

    def hold(host):
        start, is_held, may_go = host.runtime.start, Event(), Event()
        gates.append(may_go)

        def held(backend):
            is_held.set()
            may_go.wait()
            return start(backend)

        host.runtime.start = held
        return is_held, may_go

    yield hold
    for gate in gates:
        gate.set()


def test_start_is_refused_while_another_one_begins_on_its_gpu(open_host, pool, hold_start):
    first, second = open_host(A), open_host(B, OTHER_GPU, project="q")
    is_held, may_go = hold_start(first)
    loaded = pool.submit(first.load, A, "stop", 1)
    is_held.wait()
    with pytest.raises(LoadError, match="another anvil-mux is starting an engine on GPU 0"):
        second.load(dataclasses.replace(B, load_timeout=0.01), "stop", 1)
    second.load(OTHER_GPU, "stop", 2)
    waits = pool.submit(second.load, B, "stop", 3)
    may_go.set()
    loaded.result()
    with pytest.raises(LoadError, match=HELD):
        waits.result()
    assert second.running() == ["b"], "the one on GPU 1"


def test_start_that_waits_for_a_gpu_can_be_cancelled(open_host, pool, hold_start):
    first, second = open_host(A), open_host(B, project="q")
    is_held, may_go = hold_start(first)
    loaded = pool.submit(first.load, A, "stop", 1)
    is_held.wait()
    second.cancel(B, 1)
    with pytest.raises(Cancelled):
        second.load(B, "stop", 1)
    may_go.set()
    loaded.result()


def test_starts_of_one_anvil_mux_on_one_gpu_do_not_wait(open_host, pool, hold_start):
    first = open_host(A, B)
    start, is_held, may_go = first.runtime.start, *hold_start(first)
    loaded = pool.submit(first.load, A, "stop", 1)
    is_held.wait()
    first.runtime.start = start
    first.load(B, "stop", 2)
    may_go.set()
    loaded.result()
    assert sorted(first.running()) == ["a", "b"]


def test_failed_wake_does_not_start_beside_another_engine(open_host):
    first, second = open_host(A), open_host(B, project="q")
    second.load(dataclasses.replace(B, gpus=("1",)), "stop", 1)
    first.load(A, "stop", 1)
    with pytest.raises(LoadError, match=HELD):
        second.load(B, "sleep", 2)
    assert second.running() == [], "it was ended"


@pytest.mark.parametrize(
    ("is_in_container", "gpu", "is_refused"),
    [(True, "0", True), (True, "1", False), (False, "0", False)],
    ids=["on the same GPU", "on another GPU", "no container runs"],
)
def test_noted_container_is_unknown_while_docker_does_not_answer(
    open_host, tmp_path, containers, is_in_container, gpu, is_refused
):
    folder = tmp_path / "home" / "anvil-mux" / "q"
    folder.mkdir(parents=True)
    Notes(folder).add([dataclasses.replace(A, gpus=(gpu,))])
    containers += ["c"] if is_in_container else []
    host = open_host(A, DOCKER_HOST=f"unix://{tmp_path}/away.sock")
    if not is_refused:
        host.load(A, "stop", 1)
        return
    neutral = "its GPU may be held by a container: Docker does not answer"
    with pytest.raises(LoadError, match=f"^{neutral}$") as refused:
        host.load(A, "stop", 1)
    told = "a of the project q may run on GPU 0: Docker does not answer. Until it does: delete"
    assert refused.value.log == (f"For operators: {told} {folder} if none of its containers runs",)


def test_engines_of_another_simulated_machine_do_not_count(open_host):
    open_host(A).load(A, "stop", 1)
    second = open_host(A, home="other", **{MACHINE: "another"})
    assert second.running() == []
    assert second.occupants() == []


@pytest.mark.parametrize("lose", [lose_nothing, lose_record, lose_notes])
def test_left_engines_are_ended_by_the_command_whatever_was_lost(open_host, tmp_path, monkeypatch, lose):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    first = open_host(A)
    first.load(A, "stop", 1)
    pids = first.runtime.pids(A)
    first.close()
    folder = tmp_path / "home" / "anvil-mux" / "p"
    lose(folder)
    left = LeftEngines(folder)
    assert left.names == ["a"]
    left.stop()
    assert not any(map(running, pids))


def compose_labels(**labels):
    """The labels of a container of the service a that Compose has made for another project."""
    labels = {"project": "q", "service": "a", "container-number": "1", **labels}
    return {f"com.docker.compose.{name}": text for name, text in labels.items()}


@pytest.mark.parametrize(
    ("made_of", "text", "folder", "is_ours"),
    [
        ("/s/compose.yaml", None, "/s", True),
        ("/s/other.yaml", None, "/s", False),
        ("resolved.yaml", '{"x-files": ["/s/compose.yaml"]}', "/s", True),
        ("resolved.yaml", '{"x-files": ["/s/other.yaml"]}', "/s", False),
        ("resolved.yaml", None, "/s", True),
        ("resolved.yaml", None, "/t", False),
    ],
)
def test_a_container_that_was_made_of_our_file_keeps_its_gpu(
    docker, tmp_path, made_of, text, folder, is_ours
):
    file = os.path.join(tmp_path, made_of)
    if text is not None:
        Path(file).write_text(text)
    files = {"project.config_files": f"{file},/more.yaml", "project.working_dir": folder}
    docker.containers[docker.add("c1")]["Config"]["Labels"] = compose_labels(**files)
    config = HostConfig((A,), project="p", files=("/s/compose.yaml",))
    environ = {"DOCKER_HOST": docker.host, "XDG_STATE_HOME": str(tmp_path)}
    found = find_occupants(config, state_folder("p", environ), environ, lambda pid: None)
    ours = [each for each in found if each.project == "q"]
    assert [(each.backend, each.gpus) for each in ours] == ([("a", ("0",))] if is_ours else [])
