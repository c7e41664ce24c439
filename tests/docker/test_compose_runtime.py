"""The compose runtime on a real Docker Engine, with real llama-servers and small busybox services."""

import json
import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anvil_mux.config.config import Backend, Config
from anvil_mux.config.service import Service
from anvil_mux.errors import BackendError, LoadError
from anvil_mux.host.containers import ContainerRuntime
from anvil_mux.host.docker_api import ContainerEngine as Docker
from anvil_mux.host.docker_api import Endpoint
from anvil_mux.host.engines import await_ready
from anvil_mux.host.levels import Swapper
from tests.docker.conftest import Stack
from tests.running import seen

PATIENCE = 60.0
MakeStack = Callable[..., Stack]

SLEEPER = {"image": "anvil-mux-test/busybox", "command": ["sleep", "1000"], "ports": ["127.0.0.1::8080"]}


def backend(name: str, **special: Any) -> Backend:
    service = Service(image="anvil-mux-test/llamacpp", command=("llama-server", "--alias", name))
    settings = {
        "model": name,
        "engine": "llamacpp",
        "load_timeout": PATIENCE,
        "service": service,
        "stop_timeout": 1.0,
    }
    return Backend(name=name, **{**settings, **special})


def config(stack: Stack, *backends: Backend) -> Config:
    served = backends or tuple(backend(model) for model in stack.models)
    return Config(backends=served, project=stack.project, files=(str(stack.file),))


@contextmanager
def runtime_of(stack: Stack, *backends: Backend) -> Iterator[ContainerRuntime]:
    runtime = ContainerRuntime(config(stack, *backends), environ=stack.engine.env)
    try:
        yield runtime
    finally:
        runtime.close()


@contextmanager
def watching(runtime: ContainerRuntime) -> Iterator[queue.Queue[str]]:
    deaths: queue.Queue[str] = queue.Queue()
    thread = threading.Thread(target=runtime.watch, args=(lambda _, name: deaths.put(name),))
    thread.start()
    try:
        yield deaths
    finally:
        runtime.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def docker(stack: Stack, *args: str) -> str:
    done = subprocess.run(
        ["docker", *args], env=stack.engine.env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kills(stack: Stack) -> dict[str, float]:
    return Docker(Endpoint(stack.engine.host)).signalled(stack.project)


def inspect(stack: Stack, model: str) -> dict[str, Any]:
    return json.loads(docker(stack, "inspect", stack.container(model)))[0]


@pytest.fixture
def stack(llamacpp_compose: MakeStack, tmp_path: Path) -> Stack:
    return llamacpp_compose(tmp_path, models=2)


@pytest.fixture
def sleeper(llamacpp_compose: MakeStack, tmp_path: Path) -> Callable[..., tuple[Stack, Backend]]:
    """A stack of one service that runs and never answers, with what makes it special."""

    def make(**special: Any) -> tuple[Stack, Backend]:
        service = {**SLEEPER, **special}
        stack = llamacpp_compose(tmp_path, models=0, services={"s": service})
        command = tuple(service["command"])
        return stack, backend("s", service=Service(image=service["image"], command=command))

    return make


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_real_engine_is_loaded_evicted_and_loaded_again(stack):
    first = backend("model-1")
    with runtime_of(stack) as runtime:
        swapper = Swapper(runtime)
        url = swapper.load(first, "stop").url
        assert runtime.running() == {"model-1": url}
        assert runtime.ended(first) is None
        assert seen(lambda: [line for line in runtime.log_tail(first) if "model" in line], bool)
        swapper.evict(first, "stop")
        assert (runtime.running(), stack.up()) == ({}, set())
        assert swapper.load(first, "stop").url.startswith("http://127.0.0.1:")
        assert stack.up() == {"model-1"}


def test_another_engine_on_the_port_is_a_other_process(stack):
    with runtime_of(stack) as runtime:
        url = runtime.start(backend("model-1"))
        ticks = iter(range(0, 10_000, 30))
        with pytest.raises(LoadError, match="answers for model model-1, not model-2"):
            await_ready(
                backend("model-2"),
                url,
                ended=lambda: runtime.ended(backend("model-1")),
                deadline=9_000.0,
                now=lambda: float(next(ticks)),
            )


def test_services_created_side_by_side_share_the_projects_network(stack):
    with runtime_of(stack) as runtime, ThreadPoolExecutor(2) as threads:
        urls = list(threads.map(runtime.start, [backend("model-1"), backend("model-2")]))
    assert len(set(urls)) == 2
    assert stack.up() == {"model-1", "model-2"}
    assert (
        len(stack.engine.request("GET", "/networks", filters=f'{{"name": ["{stack.project}_default"]}}')) == 1
    )


def test_a_new_runtime_adopts_what_runs_and_watches_it(stack):
    with runtime_of(stack) as runtime:
        url = runtime.start(backend("model-1"))
    with runtime_of(stack) as runtime, watching(runtime) as deaths:
        assert runtime.running() == {"model-1": url}
        assert runtime.start(backend("model-1")) == url
        docker(stack, "kill", stack.container("model-1"))
        assert deaths.get(timeout=PATIENCE) == "model-1"
        assert runtime.ended(backend("model-1")) == "was killed (code 137)"


def ask_and_leave(stack: Stack, path: str) -> None:
    """As an anvil-mux does that is killed while it waits for the answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(stack.engine.host.removeprefix("unix://"))
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: docker\r\nContent-Length: 0\r\n\r\n".encode())


def test_a_start_that_is_under_way_is_found_by_the_next_anvil_mux(stack):
    """Docker 20.10 goes on with a start whose client has left, and 28 gives it up."""
    stack.compose("create")
    ask_and_leave(stack, f"/containers/{stack.container('model-1')}/start")
    with runtime_of(stack) as runtime:
        found = list(runtime.running())
        begun = inspect(stack, "model-1")["State"]["Running"]  # asked when the start has come to its end
        assert found == (["model-1"] if begun else [])
        assert runtime.start(backend("model-1"))
        assert list(runtime.running()) == ["model-1"]


def test_a_stop_that_is_under_way_is_waited_for_by_the_next_anvil_mux(sleeper):
    stack, service = sleeper()  # As PID 1, `sleep` ignores SIGTERM.
    with runtime_of(stack, service) as runtime:
        runtime.start(service)
    ask_and_leave(stack, f"/containers/{stack.container('s')}/stop?t=2")
    assert seen(lambda: kills(stack), bool)
    assert stack.up() == {"s"}
    with runtime_of(stack, service) as runtime:
        assert runtime.running() == {}


def test_our_own_stop_is_no_death_and_a_kill_from_outside_is_one(stack):
    with runtime_of(stack) as runtime, watching(runtime) as deaths:
        runtime.start(backend("model-1"))
        runtime.start(backend("model-2"))
        runtime.stop(backend("model-1"))
        docker(stack, "kill", stack.container("model-2"))
        assert deaths.get(timeout=PATIENCE) == "model-2"
        assert deaths.empty()


def test_a_container_that_exits_at_once_is_told_with_its_last_lines(sleeper):
    stack, service = sleeper(command=["sh", "-c", "echo out of memory on GPU 0 >&2; exit 3"])
    with runtime_of(stack, service) as runtime, pytest.raises(LoadError) as caught:
        Swapper(runtime).load(service, "stop")
    assert "exited with code 3" in caught.value.message
    assert caught.value.log == ("out of memory on GPU 0",)


def test_an_engine_that_never_answers_is_given_up_and_stopped(sleeper):
    stack, service = sleeper(command=["sh", "-c", "echo started; exec sleep 1000"])
    service = replace(service, load_timeout=2.0)
    with runtime_of(stack, service) as runtime, pytest.raises(LoadError) as caught:
        Swapper(runtime).load(service, "stop")
    assert "s was not ready within its load_timeout of 2 s" in caught.value.message
    assert "connections are closed without an answer" in caught.value.message
    assert caught.value.log == ("started",)
    assert stack.up() == set()


def test_an_image_that_is_missing_is_named(sleeper):
    stack, service = sleeper(image="registry.invalid/none:1")
    with runtime_of(stack, service) as runtime, pytest.raises(LoadError) as caught:
        Swapper(runtime).load(service, "stop")
    assert (
        caught.value.message
        == "image registry.invalid/none:1 is not present: docker pull registry.invalid/none:1"
    )


def test_a_port_that_is_taken_is_said_plainly(stack, sleeper):
    with runtime_of(stack) as runtime:
        port = runtime.start(backend("model-1")).rpartition(":")[2]
    other, service = sleeper(ports=[f"127.0.0.1:{port}:8080"])
    with (
        runtime_of(other, service) as runtime,
        pytest.raises(LoadError, match="Another program has this port"),
    ):
        Swapper(runtime).load(service, "stop")


def test_a_port_that_is_taken_since_shows_no_line_of_an_earlier_run(sleeper, free_port):
    ports = [f"127.0.0.1:{free_port}:8080"]
    stack, service = sleeper(command=["sh", "-c", "echo of the first run; exec sleep 1000"], ports=ports)
    with runtime_of(stack, service) as runtime:
        runtime.start(service)
        assert seen(lambda: runtime.log_tail(service), bool) == ["of the first run"]
        runtime.kill(service)
        with socket.create_server(("127.0.0.1", free_port)), pytest.raises(LoadError) as caught:
            Swapper(runtime).load(service, "stop")
        assert caught.value.log == ()
        runtime.start(service)
        assert seen(lambda: runtime.log_tail(service), bool) == ["of the first run"]


def test_a_run_that_follows_a_crash_at_once_shows_only_its_own_lines(sleeper):
    stack, service = sleeper(command=["sh", "-c", "echo $$(cat /proc/uptime); exec sleep 1000"])
    with runtime_of(stack, service) as runtime:
        first, second = [], []
        for lines in (first, second):
            runtime.start(service)
            lines += seen(lambda: [line for line in runtime.log_tail(service) if line not in first], bool)
            every = runtime.log_tail(service)
            runtime.kill(service)
        assert every == second


def test_a_container_that_ignores_sigterm_is_gone_after_its_grace(sleeper):
    stack, service = sleeper()  # As PID 1, `sleep` ignores SIGTERM.
    with runtime_of(stack, service) as runtime:
        runtime.start(service)
        runtime.stop(service)
        assert stack.up() == set()
        assert runtime.ended(service) == "was killed (code 137)"


def test_a_container_that_its_restart_policy_revives_is_put_down(sleeper):
    stack, service = sleeper(restart="always")
    with runtime_of(stack, service) as runtime, watching(runtime) as deaths:
        runtime.start(service)
        os.kill(inspect(stack, "s")["State"]["Pid"], signal.SIGKILL)
        assert deaths.get(timeout=PATIENCE) == "s"
        assert stack.up() == set()
        assert runtime.start(service)


def test_a_crash_loop_under_a_restart_policy_fails_the_load(sleeper):
    stack, service = sleeper(restart="always", command=["sh", "-c", "echo boom; exit 1"])
    with runtime_of(stack, service) as runtime, pytest.raises(LoadError, match="exited with code 1"):
        Swapper(runtime).load(service, "stop")
    assert stack.up() == set()


def test_a_paused_container_is_listed_as_it_is_and_thawed_when_it_is_started(stack):
    with runtime_of(stack) as runtime:
        url = runtime.start(backend("model-1"))
        docker(stack, "pause", stack.container("model-1"))
        assert runtime.running() == {"model-1": url}
        assert runtime.is_frozen(backend("model-1"))
        assert runtime.start(backend("model-1")) == url
        assert not runtime.is_frozen(backend("model-1"))
        assert inspect(stack, "model-1")["State"]["Status"] == "running"
        docker(stack, "pause", stack.container("model-1"))
        runtime.stop(backend("model-1"))
        assert stack.up() == set()


def test_a_container_is_frozen_let_go_on_and_killed(stack):
    with runtime_of(stack) as runtime:
        runtime.start(backend("model-1"))
        pids = runtime.pids(backend("model-1"))
        assert inspect(stack, "model-1")["State"]["Pid"] in pids
        runtime.pause(backend("model-1"))
        assert inspect(stack, "model-1")["State"]["Status"] == "paused"
        assert runtime.pids(backend("model-1")) == pids
        runtime.resume(backend("model-1"))
        assert inspect(stack, "model-1")["State"]["Status"] == "running"
        runtime.pause(backend("model-1"))
        runtime.kill(backend("model-1"))
        assert stack.up() == set()


def test_a_service_whose_description_changed_is_made_anew_at_first_use(sleeper):
    stack, service = sleeper()
    with runtime_of(stack, service) as runtime:
        runtime.start(service)
        runtime.stop(service)
    before = inspect(stack, "s")["Id"]
    stack.file.write_text(stack.file.read_text().replace("'1000'", "'1001'"))
    with runtime_of(stack, service) as runtime:
        runtime.start(service)
    after = inspect(stack, "s")
    assert after["Id"] != before
    assert after["Config"]["Cmd"] == ["sleep", "1001"]


@pytest.mark.parametrize("by", ["us", "compose up"])
def test_what_runs_is_compared_with_its_description_whoever_started_it(sleeper, by):
    stack, service = sleeper(environment={"A": "1"}, deploy={"replicas": 1})
    with runtime_of(stack, service) as runtime:
        if by == "us":
            runtime.start(service)
        else:
            stack.compose("up", "-d", "s")
    with runtime_of(stack, service) as runtime:
        assert runtime.running().keys() == {"s"}
        assert runtime.differs(service) == ""
        stack.file.write_text(stack.file.read_text().replace("'1000'", "'1001'"))
        assert runtime.differs(service) == "its description changed since its container was made"
        command = tuple(["1001" if word == "1000" else word for word in service.service.command])
        changed = replace(service, service=replace(service.service, command=command))
        assert runtime.differs(changed) == "its command changed since its container was made"


def test_a_container_of_an_image_that_was_built_anew_since_differs(sleeper):
    stack, service = sleeper()
    tag = f"{stack.project}:latest"
    image = str(service.service.image)
    docker(stack, "tag", image, tag)
    stack.file.write_text(stack.file.read_text().replace(image, tag))
    service = replace(service, service=replace(service.service, image=tag))
    try:
        with runtime_of(stack, service) as runtime:
            runtime.start(service)
            assert runtime.differs(service) == ""
            docker(stack, "commit", "--change", "LABEL built=anew", stack.container("s"), tag)
            assert runtime.differs(service) == "its image changed since its container was made"
    finally:
        docker(stack, "rmi", "--force", tag)


def test_a_project_that_somebody_took_down_is_made_anew(stack):
    with runtime_of(stack) as runtime:
        runtime.start(backend("model-1"))
        stack.compose("down", "--timeout", "1")
        assert runtime.ended(backend("model-1")) == "has no container"
        assert runtime.start(backend("model-1"))
        assert stack.up() == {"model-1"}


def test_a_network_that_somebody_removed_is_made_anew(stack):
    with runtime_of(stack) as runtime:
        runtime.start(backend("model-1"))
        runtime.stop(backend("model-1"))
        docker(stack, "network", "rm", f"{stack.project}_default")
        assert Swapper(runtime).load(backend("model-1"), "stop")


@pytest.mark.parametrize(("network", "host"), [({}, "0.0.0.0"), ({"network_mode": "host"}, "127.0.0.1")])
def test_an_engine_without_a_published_port_is_reached(llamacpp_compose, tmp_path, network, host, free_port):
    command = ["llama-server", "-m", "/m/tiny.gguf", "--host", host, "--port", str(free_port)]
    stack = llamacpp_compose(
        tmp_path, models=1, services={"model-1": {**network, "ports": None, "command": command}}
    )
    service = backend("model-1", port=free_port, service=Service(command=tuple(command)))
    with runtime_of(stack, service) as runtime:
        assert Swapper(runtime).load(service, "stop").url.endswith(f":{free_port}")


def test_of_a_scaled_service_one_container_is_started(sleeper):
    stack, service = sleeper(deploy={"replicas": 2})
    with runtime_of(stack, service) as runtime:
        runtime.start(service)
        assert list(runtime.running()) == ["s"]
    assert [each["Names"][0] for each in stack.engine.containers(stack.project)] == [
        f"/{stack.container('s')}"
    ]


def test_a_log_is_followed_until_the_container_ends(sleeper):
    stack, service = sleeper(command=["sh", "-c", "echo one; echo two >&2; exec sleep 1000"])
    with runtime_of(stack, service) as runtime:
        runtime.start(service)
        lines = runtime.follow_log(service)
        assert {next(lines), next(lines)} == {"one", "two"}
        runtime.stop(service)
        assert list(lines) == []


def test_dockerd_that_stops_and_starts_again(llamacpp_compose, tmp_path, own_engine):
    stack = llamacpp_compose(tmp_path, models=2, engine=own_engine)
    first = backend("model-1")
    with runtime_of(stack) as runtime, watching(runtime) as deaths:
        swapper = Swapper(runtime)
        swapper.load(first, "stop")
        own_engine.stop()
        for question in (runtime.ended, runtime.stop, runtime.start):
            with pytest.raises(BackendError, match="Start dockerd, or set DOCKER_HOST"):
                question(first)
        with pytest.raises(BackendError, match="Start dockerd"):
            runtime.running()
        assert runtime.log_tail(first) == []
        own_engine.start()
        assert swapper.load(first, "stop")
        docker(stack, "kill", stack.container("model-1"))
        assert deaths.get(timeout=PATIENCE) == "model-1"


def test_what_a_stopped_dockerd_took_along_is_reported_when_it_is_back(
    llamacpp_compose, tmp_path, own_engine
):
    services = {"model-1": {"restart": "always"}}
    stack = llamacpp_compose(tmp_path, models=2, services=services, engine=own_engine)
    with runtime_of(stack) as runtime, watching(runtime) as deaths:
        runtime.start(backend("model-1"))
        runtime.start(backend("model-2"))
        own_engine.stop()
        own_engine.start()
        # dockerd itself revives the first: it has lost its requests and is put down.
        assert {deaths.get(timeout=PATIENCE) for _ in range(2)} == {"model-1", "model-2"}
        assert stack.up() == set()
