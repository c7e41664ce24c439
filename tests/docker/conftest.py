"""What the Docker tier stands on: a real engine, real llama-server containers, a witness of what ran when.

    def test_one_at_a_time(llamacpp_compose, tmp_path):
        stack = llamacpp_compose(tmp_path, models=3)        # stack.file, stack.project, stack.models
        with stack.watched() as seen:
            ...                                             # drive anvil-mux on stack.file
        assert seen.most == 1, seen.crowded

`llamacpp_compose` writes the file and, when the test is over, removes every container, network and volume of
its project, whatever state they are in. Each stack is a Compose project of its own, so tests and leftovers do
not meet. `own_engine` is a second Docker Engine that a test may stop and start (root only); make stacks for
it with `llamacpp_compose(tmp_path, engine=own_engine)` and give `own_engine.env` to what should use it.

Every test in this directory is marked `docker` and runs after all others.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import yaml

from anvil_mux.host.docker_api import Connection, Endpoint

HERE = Path(__file__).resolve().parent
REAL = HERE.parent / "real"
MODELS = HERE.parent.parent / ".cache" / "models"
PROFILE = "llm"
COMMAND_TIMEOUT = 120.0
TRIES = 4
"""How often a dockerd that did not come up is started again."""
SETTLED = 3.0
"""Seconds within which a container that is being started runs."""
IMAGE_TIMEOUT = 900.0
"""The first time a root file system is made of packages."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_here(item):
            item.add_marker("docker")
    items.sort(key=_is_here)


class Engine:
    """A Docker Engine, spoken to over its API: a `docker ps` there takes 1 ms, with the CLI 30."""

    def __init__(self, host: str) -> None:
        self.host = host

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "DOCKER_HOST": self.host}

    def request(self, method: str, path: str, **query: str) -> Any:
        parts = "&".join(f"{key}={quote(value)}" for key, value in query.items())
        connection = Connection(Endpoint(self.host), timeout=30)
        try:
            connection.request(method, f"{path}?{parts}")
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.end()
        if response.status >= 400:
            raise RuntimeError(f"{method} {path}: {response.status} {body.decode()}")
        return json.loads(body) if body.startswith((b"{", b"[")) else None

    def containers(self, project: str, *, all: bool = False) -> list[dict[str, Any]]:
        """The project's containers as `docker ps` lists them (running and paused), or `docker ps -a`."""
        found: list[dict[str, Any]] = self.request(
            "GET", "/containers/json", filters=_of(project), all=str(int(all))
        )
        return found

    def remove(self, project: str) -> None:
        """Removes all that the project has left on this engine, by force."""
        for container in self.containers(project, all=True):
            try:
                self.request("DELETE", f"/containers/{container['Id']}", force="1", v="1")
            except RuntimeError as error:
                # 404, 409: whoever is removing it already will finish.
                if not any(f": {status} " in str(error) for status in (404, 409)):
                    raise
        for network in self.request("GET", "/networks", filters=_of(project)):
            self.request("DELETE", f"/networks/{network['Id']}")
        for volume in self.request("GET", "/volumes", filters=_of(project))["Volumes"] or []:
            self.request("DELETE", f"/volumes/{volume['Name']}", force="1")


class OwnEngine(Engine):
    """A Docker Engine that belongs to one test, which may stop and start it. Its containers end with it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"unix://{directory}/docker.sock")
        self._directory = directory

    def start(self, flags: str = "") -> None:
        """``flags`` are those of dockerd, beside the script's own.

        On a busy machine its containerd may take longer than dockerd waits: a service manager tries again.
        """
        for _ in range(TRIES):
            with suppress(RuntimeError):
                return self._script("docker-engine", "start", flags=flags)
        return self._script("docker-engine", "start", flags=flags)

    def stop(self) -> None:
        self._script("docker-engine", "stop")

    def kill(self) -> None:
        """With SIGKILL: its containers run on, until it is started without --live-restore."""
        self._script("docker-engine", "kill")

    def forget_starts(self) -> None:
        """Ends what is left of containers that were just being started when it was killed.

        A process waits to become such a container, and keeps its address (another one that gets that cannot
        be reached) and its task (it cannot be started again); Docker 20.10 looks for neither. With the shim
        gone too, containerd forgets them.
        """
        idle = self._shims().keys() - {each["Id"] for each in self.request("GET", "/containers/json")}
        threading.Event().wait(SETTLED)  # those that are being started now are not meant
        idle &= self._shims().keys() - {each["Id"] for each in self.request("GET", "/containers/json")}
        for id, shim in self._shims().items():
            if id in idle:
                for process in (*_children(shim), shim):
                    with suppress(OSError):
                        os.kill(process, signal.SIGKILL)

    def _shims(self) -> dict[str, int]:
        """The processes that containerd has beside each container, by its id."""
        found = {}
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().decode().split("\0")
                if "-id" in words and f"{self._directory}/exec/containerd/containerd.sock" in words:
                    found[words[words.index("-id") + 1]] = int(entry)
        return found

    def load_images(self) -> None:
        self._script("llamacpp-image", timeout=IMAGE_TIMEOUT)

    def close(self) -> None:
        """Ends the engine and all it has; its networks need it alive, or their bridges stay on the host."""
        self.start()
        for container in self.request("GET", "/containers/json", all="1"):
            self.request("DELETE", f"/containers/{container['Id']}", force="1", v="1")
        self.request("POST", "/networks/prune")
        self.stop()
        mounts = [line.split(" ")[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in reversed([each for each in mounts if self._directory in Path(each).parents]):
            _run(["umount", mount])  # what a dockerd that was killed has left
        shutil.rmtree(self._directory)

    def _script(self, name: str, *args: str, timeout: float = COMMAND_TIMEOUT, flags: str = "") -> None:
        environ = {**self.env, "ANVIL_DOCKER_DIR": str(self._directory), "ANVIL_DOCKER_FLAGS": flags}
        _run([str(REAL / name), *args], environ, timeout)


@dataclass
class Witness:
    """What a sampler of `docker ps` saw of one project."""

    samples: int = 0
    missed: int = 0  # the engine did not answer
    crowded: list[str] = field(default_factory=list)  # the names seen when most of them were up
    names: set[str] = field(default_factory=set)

    @property
    def most(self) -> int:
        """The largest number of containers up in one sample; an error when nothing was sampled."""
        assert self.samples, "docker ps was never sampled"
        return len(self.crowded)

    def note(self, up: list[str]) -> None:
        self.samples += 1
        self.names.update(up)
        if len(up) > len(self.crowded):
            self.crowded = sorted(up)


@dataclass(frozen=True)
class Stack:
    """A compose file of llama-server services, the project it makes, and the engine it is for."""

    file: Path
    project: str
    models: tuple[str, ...]  # services and model names alike
    engine: Engine

    def compose(self, *args: str) -> str:
        """Runs `docker compose --profile llm -f FILE ARGS...` and returns its standard output."""
        command = ["docker", "compose", "--profile", PROFILE, "-f", str(self.file), *args]
        return _run(command, self.engine.env)

    def container(self, model: str) -> str:
        """The name of the model's container, as `docker kill` takes it."""
        return f"{self.project}-{model}-1"

    def up(self) -> set[str]:
        """The models whose containers are up now."""
        found = self.engine.containers(self.project)
        return {container["Labels"]["com.docker.compose.service"] for container in found}

    @contextmanager
    def watched(self, interval: float = 0.02) -> Iterator[Witness]:
        """Samples who of this project is up and awake, from a thread of its own, until the block ends."""
        seen, over = Witness(), threading.Event()

        def sample() -> None:
            while not over.is_set():
                try:
                    up = self.engine.containers(self.project)
                    seen.note([each["Names"][0][1:] for each in up if each["State"] != "paused"])
                except (OSError, http.client.HTTPException, RuntimeError):
                    seen.missed += 1
                over.wait(interval)

        thread = threading.Thread(target=sample, name="docker-ps", daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            over.set()
            thread.join(60)


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The Docker Engine in reach, with the test images; without one: skip, or fail if one is required."""
    if host := _engine_host():
        _run([str(REAL / "llamacpp-image")], {**os.environ, "DOCKER_HOST": host}, IMAGE_TIMEOUT)
        return Engine(host)
    message = "no Docker Engine with Compose in reach: run bin/test, which says more"
    if os.environ.get("ANVIL_REQUIRE_DOCKER") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[int], Path]:
    """The tiny model of a seed, made at its first use."""

    return tiny_model_of


def tiny_model_of(seed: int) -> Path:
    path = MODELS / f"tiny-{seed}.gguf"
    if not path.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        _run([sys.executable, str(REAL / "tiny_model.py"), str(seed), str(path)])
    return path


@pytest.fixture
def llamacpp_compose(engine: Engine, tiny_model: Callable[[int], Path]) -> Iterator[Callable[..., Stack]]:
    """`make(directory, models=3, slots=8, top=None, services=None, engine=..., one="")`: a compose file.

    `one` names the one model of which all services are replicas, on no GPU. `services` are merged into the
    services of the same name (a value of None takes a key out), `top` into the whole file: that is how a test
    says what is special about its stack.
    """
    shared, made = engine, []

    def make(
        directory: Path,
        models: int = 3,
        slots: int = 8,
        top: Mapping[str, Any] | None = None,
        services: Mapping[str, Mapping[str, Any]] | None = None,
        engine: Engine | None = None,
        one: str = "",
    ) -> Stack:
        names = tuple(f"model-{number}" for number in range(1, models + 1))
        if one:
            described = {name: _service(one, tiny_model(1), slots) for name in names}
            for each in described.values():
                each["x-anvil"] = {"model": one, "gpus": [], "preload": True}
        else:
            described = {name: _service(name, tiny_model(seed), slots) for seed, name in enumerate(names, 1)}
        for name, special in (services or {}).items():
            merged = {**described.get(name, {}), **special}
            described[name] = {key: value for key, value in merged.items() if value is not None}
        made.append(_write(directory, described, top or {}, engine or shared))
        return made[-1]

    yield make
    for stack in made:
        if stack.engine is shared:  # an engine of its own ends with all it has
            shared.remove(stack.project)


@pytest.fixture
def own_engine(engine: Engine) -> Iterator[OwnEngine]:
    """A second Docker Engine, running, with the test images, for this test alone."""
    if os.geteuid() != 0 or not shutil.which("dockerd"):
        pytest.skip("a Docker Engine of one's own needs root and dockerd")
    with engine_of_its_own() as own:
        yield own


@contextmanager
def engine_of_its_own() -> Iterator[OwnEngine]:
    """A Docker Engine that runs while the block does, with the test images; it needs root and dockerd."""
    own = OwnEngine(Path(tempfile.mkdtemp(prefix="anvil-docker-")))
    try:
        own.start()
        own.load_images()
        yield own
    finally:
        own.close()


def plain_stack(directory: Path, models: int, engine: Engine) -> Stack:
    """A stack as `llamacpp_compose` makes it; its caller removes what it leaves on the engine."""
    names = [f"model-{number}" for number in range(1, models + 1)]
    services = {name: _service(name, tiny_model_of(seed), slots=8) for seed, name in enumerate(names, 1)}
    return _write(directory, services, {}, engine)


def _write(directory: Path, services: Mapping[str, Any], top: Mapping[str, Any], engine: Engine) -> Stack:
    project = f"anvil-test-{secrets.token_hex(4)}"
    file = directory / f"{project}.yaml"
    file.write_text(yaml.safe_dump({"name": project, **top, "services": dict(services)}, sort_keys=False))
    return Stack(file, project, tuple(services), engine)


def _is_here(item: pytest.Item) -> bool:
    return HERE in item.path.parents


def _service(name: str, model: Path, slots: int) -> dict[str, Any]:
    server = ["llama-server", "-m", "/m/tiny.gguf", "--alias", name, "--host", "0.0.0.0", "--port", "8080"]
    return {
        "image": "anvil-mux-test/llamacpp",
        "command": [*server, "-c", str(1024 * slots), "-np", str(slots), "-t", "1", "--metrics"],
        "volumes": [f"{model}:/m/tiny.gguf:ro"],
        "ports": ["127.0.0.1::8080"],
        "profiles": [PROFILE],
        "x-anvil": {"gpus": ["0"]},
    }


def _engine_host() -> str | None:
    """The address the docker CLI would use, once an engine has answered there."""
    try:
        _run(["docker", "info", "--format", "{{.ServerVersion}}"], timeout=20)
        _run(["docker", "compose", "version"], timeout=20)
        return _run(["docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"]).strip()
    except (OSError, RuntimeError, subprocess.TimeoutExpired):
        return None


def _of(project: str) -> str:
    return json.dumps({"label": [f"com.docker.compose.project={project}"]})


def _children(process: int) -> list[int]:
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(each) for each in text.split()]


def _run(command: list[str], env: dict[str, str] | None = None, timeout: float = COMMAND_TIMEOUT) -> str:
    done = subprocess.run(
        command, env=env, timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout
