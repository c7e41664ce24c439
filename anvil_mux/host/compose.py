"""docker compose argv (pure) and the one place that runs it.

Compose itself is needed once per service: ``compose create`` makes the container, or makes it anew when the
service's description has changed. From then on the container is started and stopped by its id, which skips
Compose's 0.3 s of reading the project. Nothing here pulls or builds an image: a request must not wait for
20 GB; the error says which command the user has to run.

What Docker reports is believed rather than what a command's exit status says: ``stop`` returns when
``inspect`` no longer shows the container running. A run of a container is known by its id and start moment,
so that a container which a restart policy or a new dockerd has revived is told from the one we started: it
has lost its requests and its place, and is put down.

Each container of a scaled service is a backend of its own. Compose numbers them, and gives a new one the
number after the last, so one whose number is beyond the scale stands in for one that somebody removed. Where
the description has changed, ``create`` would make all of them anew, and so end those that run or soon will:
while one runs, the others stay as they are, and one that has to be made anew is removed first.

Every command goes through ``_run``: no shell, a time limit, its process group killed when that has passed. A
killed anvil-mux leaves its commands at work, so each holds the project's lock too, and the next start waits
for them: what a late ``docker start`` brings up would be known to nobody. Only ``docker events`` and ``docker
logs --follow`` live longer; ``close`` ends the one, the reader the other.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import IO, Any, Protocol

from anvil_mux.config.config import Backend, Config
from anvil_mux.errors import BackendError, LoadError, MuxError
from anvil_mux.host import gpu
from anvil_mux.host.engine import listen_port

CREATE_TIMEOUT = 120.0
START_TIMEOUT = 60.0
ASK_TIMEOUT = 20.0
IMAGE_TIMEOUT = 5.0
STOP_SLACK = 20.0
"""Docker's own time around the grace period."""
LOG_MARGIN = 2.0
"""Docker notes the start of a container a moment after it may have printed its first lines."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Between two attempts to follow Docker's events."""

ALIVE = frozenset({"running", "paused", "restarting"})
LABEL = "com.docker.compose"


@dataclass(frozen=True, slots=True)
class Container:
    """What ``docker inspect`` says of one container."""

    id: str
    service: str
    number: int
    status: str
    started_at: str
    exit_code: int = 0
    oom_killed: bool = False
    error: str = ""
    network_mode: str = ""
    ports: tuple[tuple[str, str, int], ...] = ()
    """(port inside, such as 8080/tcp; address; port outside)"""
    ips: tuple[str, ...] = ()

    @property
    def run(self) -> tuple[str, str]:
        """Differs between any two runs."""
        return self.id, self.started_at


def compose_create(config: Config, service: str, recreate: str = "") -> list[str]:
    """``recreate``: --force-recreate, --no-recreate, or what has changed."""
    files = [word for file in config.files for word in ("-f", file)]
    options = ["--no-build", "--pull", "never", *([recreate] if recreate else [])]
    project = ["-p", config.project, "--profile", "*"]
    return ["docker", "compose", "--ansi", "never", *files, *project, "create", *options, service]


def docker_ps(
    project: str, service: str | None = None, *, number: int | None = None, all: bool = False
) -> list[str]:
    labels = [f"{LABEL}.project={project}", f"{LABEL}.oneoff=False"]
    if service is not None:
        labels.append(f"{LABEL}.service={service}")
    if number is not None:
        labels.append(f"{LABEL}.container-number={number}")
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    return ["docker", "ps", "--quiet", "--no-trunc", *(["--all"] if all else []), *filters]


def docker_inspect(ids: Sequence[str]) -> list[str]:
    return ["docker", "container", "inspect", *ids]


def docker_start(id: str) -> list[str]:
    return ["docker", "start", id]


def docker_pause(id: str) -> list[str]:
    return ["docker", "pause", id]


def docker_unpause(id: str) -> list[str]:
    return ["docker", "unpause", id]


def docker_stop(id: str, grace: float) -> list[str]:
    return ["docker", "stop", "-t", str(math.ceil(grace)), id]


def docker_kill(id: str) -> list[str]:
    return ["docker", "kill", id]


def docker_top(id: str) -> list[str]:
    return ["docker", "top", id, "-eo", "pid"]


def docker_rm(id: str) -> list[str]:
    return ["docker", "rm", "--force", id]


def docker_logs(id: str, lines: int, *, since: float) -> list[str]:
    return ["docker", "logs", "--tail", str(lines), "--since", f"{since:.3f}", id]


def docker_follow(id: str, lines: int) -> list[str]:
    return ["docker", "logs", "--tail", str(lines), "--follow", id]


def docker_events(project: str, since: float) -> list[str]:
    filters = ["type=container", "event=die", f"label={LABEL}.project={project}"]
    words = [word for each in filters for word in ("--filter", each)]
    told = "{{.Actor.ID}} {{.Actor.Attributes.exitCode}}"
    return ["docker", "events", "--since", f"{since:.3f}", *words, "--format", told]


def base_url(container: Container, port: int) -> str | None:
    """Where the engine that listens on ``port`` inside is reached from this host."""
    if container.network_mode == "host":
        return f"http://127.0.0.1:{port}"
    published = [(ip, outside) for inside, ip, outside in container.ports if inside == f"{port}/tcp"]
    published.sort(key=lambda each: ":" in each[0])
    for ip, outside in published:
        host = ANYWHERE.get(ip, ip)
        return f"http://[{host}]:{outside}" if ":" in host else f"http://{host}:{outside}"
    return f"http://{container.ips[0]}:{port}" if container.ips else None


def parse_inspect(text: str) -> list[Container]:
    """The containers in the output of ``docker container inspect``."""
    return [_container(each) for each in json.loads(text or "[]")]


@dataclass(frozen=True, slots=True)
class Done:
    """What a command left behind."""

    code: int
    out: str = ""
    err: str = ""


class Run(Protocol):
    """Runs a command to its end; ``merge`` puts both of its streams into ``out``, in their order."""

    def __call__(self, argv: Sequence[str], timeout: float, *, merge: bool = False) -> Done: ...


Spawn = Callable[[Sequence[str]], "subprocess.Popen[str]"]


def missing_images(backends: Iterable[Backend]) -> list[str]:
    """A line for each image that Docker does not have; BackendError if it does not answer."""
    images = {backend.service.image: backend.service_name for backend in backends if backend.service.image}
    found = []
    for image, name in images.items():
        argv = ["docker", "image", "inspect", "--format", "{{.Id}}", image]
        done = _run(argv, IMAGE_TIMEOUT, env=os.environ)
        if done.code and "no such image" not in done.err.lower():
            raise complaint(argv, done)
        if done.code:
            found.append(f"service {name}: image {image} is not present: docker pull {image}")
    return found


def user_of(backend: Backend, env: Mapping[str, str]) -> int | None:
    """The user id that its processes will have on this host; None: it is not known before it runs.

    Where neither the compose file nor, most likely, the image says another it is root: of a rootless engine
    that is whoever runs the engine.
    """
    user = backend.service.user.partition(":")[0]
    path = _engine_socket(env)
    try:
        root = os.stat(path).st_uid if path else 0
    except OSError:
        root = 0
    if user in ("", "root", "0"):
        return root
    return int(user) if user.isdecimal() and not root else None


class UnixConnection(http.client.HTTPConnection):
    """To the Docker Engine itself: an inspect takes it 2 ms, and the docker program 30."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class ComposeRuntime:
    """The services of one compose project, see ``swap.Runtime``."""

    def __init__(
        self,
        config: Config,
        *,
        environ: Mapping[str, str] | None = None,
        lock: int | None = None,
        run: Run | None = None,
        spawn: Spawn | None = None,
    ) -> None:
        env = dict(os.environ if environ is None else environ)
        self._config = config
        self._served = {backend.name: backend for backend in config.backends}
        self._backends = self._served  # and those that are about to go; replaced as a whole
        self._run: Run = run or partial(_run, env=env, lock=lock)
        self._spawn: Spawn = spawn or partial(_spawn, env=env)
        self._socket = _engine_socket(env) if run is None else None
        # Two `compose create` at once would both make the project's network.
        self._creating = threading.Lock()
        self._closed = threading.Event()
        # Guards the fields below; held for single reads and writes only.
        self._lock = threading.Lock()
        self._ids: dict[str, str] = {}  # of the containers that were created, or found fit, by this object
        self._digests: dict[str, str] = {}  # of the descriptions of those that were started or found running
        self._owners: dict[str, str] = {}  # container that ran -> its backend
        self._up: dict[str, tuple[str, str]] = {}  # the runs that `watch` answers for
        self._revived: dict[str, str] = {}  # how those ended that a restart policy revived, and we put down
        self._told: dict[str, float] = {}  # the Unix time at which each was last told to start
        self._unstarted: dict[str, tuple[str, str]] = {}  # the run before a start that came to nothing
        self._events: subprocess.Popen[str] | None = None
        self._problem = ""  # written by `watch` alone

    def start(self, backend: Backend) -> str:
        try:
            return self._start(backend)
        except MuxError:
            self._note_unstarted(backend)
            raise

    def _note_unstarted(self, backend: Backend) -> None:
        """What its log holds is an earlier run's, unless it runs all the same."""
        with suppress(MuxError):
            container = self._find(backend)
            with self._lock:
                answered_for = self._up.get(backend.name)
                if container and container.run != answered_for and container.status not in ALIVE:
                    self._unstarted[backend.name] = container.run

    def _start(self, backend: Backend) -> str:
        with self._lock:
            known = self._ids.get(backend.name)
            changed = self._digests.get(backend.name, backend.service.digest) != backend.service.digest
            self._told[backend.name] = time.time()
        try:
            if changed or not known:
                known = self._create(backend, anew=changed)
            container = self._started(known)
        except _Gone:
            # `docker compose down` took the container or its network.
            container = self._started(self._create(backend, anew=True))
        url = base_url(container, listen_port(backend))
        with self._lock:
            self._ids[backend.name] = container.id
            self._digests[backend.name] = backend.service.digest
            self._owners[container.id] = backend.name
            self._up[backend.name] = container.run
            self._revived.pop(backend.name, None)
        if url is None:
            how = how_it_ended(container) or (
                f'has no address: publish its port, such as ports: ["127.0.0.1::{listen_port(backend)}"]'
            )
            raise LoadError(f"service {backend.name} {how}")
        return url

    def stop(self, backend: Backend) -> None:
        self._end(backend, backend.stop_timeout)

    def kill(self, backend: Backend) -> None:
        self._end(backend, None)

    def _end(self, backend: Backend, grace: float | None) -> None:
        with self._lock:
            self._up.pop(backend.name, None)
        container = self._find(backend)
        if container is not None:
            self._put_down(container, grace)
        with self._lock:
            if backend.name not in self._served:
                self._backends = {n: each for n, each in self._backends.items() if n != backend.name}

    def reconfigure(self, config: Config) -> None:
        with self._lock:
            self._config = config
            self._served = {backend.name: backend for backend in config.backends}
            self._backends = {**self._backends, **self._served}

    def pause(self, backend: Backend) -> None:
        self._call(docker_pause(self._running(backend).id), ASK_TIMEOUT)

    def resume(self, backend: Backend) -> None:
        container = self._running(backend)
        if container.status == "paused":
            self._call(docker_unpause(container.id), ASK_TIMEOUT)

    def pids(self, backend: Backend) -> list[int]:
        with self._lock:
            known = self._ids.get(backend.name)
        container = None if known else self._look_up(backend)
        id = known or (container.id if container else None)
        # Of one that does not run, Docker says that it is not running.
        done = self._run(docker_top(id), ASK_TIMEOUT) if id else Done(0)
        return [int(word) for word in done.out.split() if word.isdecimal()]

    def owner(self, pid: int) -> str | None:
        id = gpu.container(pid)
        with self._lock:
            return self._owners.get(id) if id else None

    def ended(self, backend: Backend) -> str | None:
        container = self._find(backend)
        if container is None:
            return "has no container"
        with self._lock:
            revived = self._revived.get(backend.name)
        how = how_it_ended(container)
        return how and (revived or how)

    def running(self) -> dict[str, str]:
        urls = {}
        for name, container in self._alive().items():
            restarting = container.status == "restarting"
            port = listen_port(self._backends[name])
            urls[name] = "" if restarting else base_url(container, port) or ""
            with self._lock:
                self._digests.setdefault(name, self._backends[name].service.digest)
                self._owners[container.id] = name
                self._up[name] = container.run
        return urls

    def is_frozen(self, backend: Backend) -> bool:
        container = self._find(backend)
        return container is not None and container.status == "paused"

    def log_tail(self, backend: Backend, lines: int = 20) -> list[str]:
        try:
            container = self._find(backend)
            if container is None or container.status == "created":
                return []
            with self._lock:
                if container.run == self._unstarted.get(backend.name):
                    return []
                told = self._told.get(backend.name, 0.0)
            argv = docker_logs(container.id, lines, since=_log_begins(container, told))
            return self._call(argv, ASK_TIMEOUT, merge=True).splitlines()[-lines:]
        except MuxError:
            return []

    def follow_log(self, backend: Backend) -> Iterator[str]:
        container = self._find(backend)
        if container is None:
            return
        with self._spawn(docker_follow(container.id, 100)) as child:
            try:
                for line in _lines(child):
                    yield line.rstrip("\r\n")
            finally:
                child.kill()

    def watch(self, died: Callable[[str], None]) -> None:
        pause = FIRST_PAUSE
        while not self._closed.is_set():
            try:
                since = time.time()
                self._compare(died)
                pause, self._problem = FIRST_PAUSE, ""
                self._follow_events(since, died)
            except MuxError as error:
                # dockerd is away; what it took along is found by comparing when it is back.
                self._problem = error.message
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def problem(self) -> str:
        return self._problem

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._events is not None:
                self._events.kill()

    # Containers

    def _create(self, backend: Backend, *, anew: bool = False) -> str:
        service = backend.service_name
        try:
            with self._creating:
                recreate = "--force-recreate" if anew else ""
                if backend.service.scale > 1 and (
                    anew or any(each.status in ALIVE for each in self._containers(service))
                ):
                    recreate = "--no-recreate"
                    if anew and (left := self._find(backend)):
                        self._call(docker_rm(left.id), ASK_TIMEOUT)
                argv = compose_create(self._config, service, recreate)
                self._call(argv, CREATE_TIMEOUT)
        except _NoImage as error:
            raise LoadError(self._how_to_get_image(backend, error.reason)) from None
        container = self._look_up(backend)
        if container is None:
            raise BackendError(f"`{_show(argv)}` made no container for {backend.name}")
        return container.id

    def _how_to_get_image(self, backend: Backend, said: str) -> str:
        named = re.search(r"no such image: (\S+?):?(?:\s|$)", said, re.IGNORECASE)
        image = named[1] if named else backend.service.image
        service = backend.service_name
        if image in (None, f"{self._config.project}-{service}"):
            files = "".join(f" -f {file}" for file in self._config.files)
            return (
                f"the image of service {service} is not built: "
                f"docker compose{files} -p {self._config.project} build {service}"
            )
        return f"image {image} is not present: docker pull {image}"

    def _started(self, id: str) -> Container:
        try:
            self._call(docker_start(id), START_TIMEOUT)
        except _Paused:
            self._call(docker_unpause(id), ASK_TIMEOUT)
        container = self._inspect(id)
        if container is None:
            raise _Gone(f"container {id[:12]} is gone")
        return container

    def _put_down(self, container: Container, grace: float | None) -> None:
        """Stop (unless there is no grace), kill, remove: up to the first after which it does not run."""
        if container.status not in ALIVE:
            return
        why = ""
        ways = [(docker_kill(container.id), ASK_TIMEOUT), (docker_rm(container.id), ASK_TIMEOUT)]
        if grace is not None:
            ways.insert(0, (docker_stop(container.id, grace), grace + STOP_SLACK))
        for argv, timeout in ways:
            try:
                self._call(argv, timeout)
            except MuxError as error:
                why = f": {error.message}"
            now = self._inspect(container.id)
            if now is None or now.status not in ALIVE:
                return
        raise BackendError(f"service {container.service} still runs after stop, kill and rm{why}")

    def _running(self, backend: Backend) -> Container:
        container = self._find(backend)
        how = "has no container" if container is None else how_it_ended(container)
        if container is None or how:
            raise BackendError(f"service {backend.name} {how}")
        return container

    def _find(self, backend: Backend) -> Container | None:
        with self._lock:
            known = self._ids.get(backend.name)
        return (self._inspect(known) if known else None) or self._look_up(backend)

    def _look_up(self, backend: Backend) -> Container | None:
        return self._places(self._containers(backend.service_name), backend).get(backend.name)

    def _containers(self, service: str) -> list[Container]:
        return self._inspect_all(self._call(docker_ps(self._config.project, service, all=True), ASK_TIMEOUT))

    def _alive(self) -> dict[str, Container]:
        """Those of our backends whose containers run."""
        found = self._inspect_all(self._call(docker_ps(self._config.project), ASK_TIMEOUT))
        places = self._places([container for container in found if container.status in ALIVE])
        return {name: places[name] for name in self._backends if name in places}

    def _places(self, found: Sequence[Container], also: Backend | None = None) -> dict[str, Container]:
        """Backend (ours, or ``also``) -> its container: what ran as it, has its number, or is left over."""
        backends = {**self._backends, **({also.name: also} if also else {})}
        numbered = {(each.service_name, each.service.number): name for name, each in backends.items()}
        with self._lock:
            owners = {id: name for id, name in self._owners.items() if name in backends}
        places: dict[str, Container] = {}
        spare = []
        for each in sorted(found, key=lambda each: (each.id not in owners, each.number)):
            name = owners.get(each.id) or numbered.get((each.service, each.number))
            if name and name not in places:
                places[name] = each
            else:
                spare.append(each)
        for each in spare:
            free = (n for n, b in backends.items() if b.service_name == each.service and n not in places)
            if name := next(free, None):
                places[name] = each
        return places

    def _inspect(self, id: str) -> Container | None:
        return next(iter(self._inspect_all(id)), None)

    def _inspect_all(self, ids: str) -> list[Container]:
        argv = docker_inspect(ids.split())
        if not ids.split():
            return []
        found = self._ask_engine(ids.split())
        if found is not None:
            return found
        done = self._run(argv, ASK_TIMEOUT)
        # A container that went away since it was listed is no failure; the others are reported all the same.
        if done.code and "no such container" not in done.err.lower():
            raise complaint(argv, done)
        return parse_inspect(done.out)

    def _ask_engine(self, ids: Sequence[str]) -> list[Container] | None:
        """The same without the docker program; None: that has to be asked."""
        if self._socket is None:
            return None
        connection = UnixConnection(self._socket, timeout=ASK_TIMEOUT)
        found = []
        try:
            for id in ids:
                connection.request("GET", f"/containers/{id}/json")
                response = connection.getresponse()
                body = response.read()
                if response.status == 200:
                    found.append(_container(json.loads(body)))
                elif response.status != 404:
                    return None
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return None
        finally:
            connection.close()
        return found

    def _call(self, argv: Sequence[str], timeout: float, *, merge: bool = False) -> str:
        done = self._run(argv, timeout, merge=merge)
        if done.code:
            raise complaint(argv, done)
        return done.out

    # Deaths

    def _compare(self, died: Callable[[str], None]) -> None:
        """Reports whatever ended while nobody followed the events."""
        with self._lock:
            before = dict(self._up)
        runs = {name: container.run for name, container in self._alive().items()}
        for name, run in before.items():
            if runs.get(name) != run:
                self._judge(name, died)

    def _follow_events(self, since: float, died: Callable[[str], None]) -> None:
        with self._spawn(docker_events(self._config.project, since)) as child:
            try:
                with self._lock:
                    self._events = child
                if not self._closed.is_set():
                    for line in _lines(child):
                        id, _, code = line.strip().partition(" ")
                        with self._lock:
                            owner = self._owners.get(id)
                        if owner:
                            self._judge(owner, died, code)
            finally:
                with self._lock:
                    self._events = None
                child.kill()

    def _judge(self, name: str, died: Callable[[str], None], code: str = "") -> None:
        """Reports the backend unless the run that we answer for goes on; a revived one is put down first.

        ``code``: with which it ended, as Docker's event has it.
        """
        with self._lock:
            run = self._up.get(name)
        if run is None or self._closed.is_set():
            return
        backend = self._backends.get(name)
        if backend is None:
            return
        container = self._find(backend)
        if container is not None and container.status in ALIVE:
            if container.run == run and container.status != "restarting":
                return
            self._put_down(container, backend.stop_timeout)
            if code.isdecimal():
                ended = how_it_ended(replace(container, status="exited", exit_code=int(code)))
                with self._lock:
                    self._revived[name] = f"{ended}, and Docker had started it again"
        with self._lock:
            if self._up.get(name) != run:
                return
            del self._up[name]
        died(name)


def how_it_ended(container: Container) -> str | None:
    """None while it runs, else for people."""
    if container.status in ("running", "paused"):
        return None
    if container.status == "created":
        return f"has not been started{f' ({container.error})' if container.error else ''}"
    how = f"exited with code {container.exit_code}"
    if container.oom_killed:
        how = "was killed because the machine or its memory limit ran out of memory (OOM)"
    elif container.exit_code == 137:
        how = "was killed (code 137)"
    elif container.exit_code > 128:
        with suppress(ValueError):
            how += f" ({signal.Signals(container.exit_code - 128).name})"
    return f"{how}, and Docker is restarting it" if container.status == "restarting" else how


def complaint(argv: Sequence[str], done: Done) -> MuxError:
    """The error for a command that failed: its last line, and what to do about it."""
    text = (done.err or done.out).strip()
    last = text.splitlines()[-1] if text else f"exit status {done.code}"
    for pattern, error, advice in COMPLAINTS:
        if re.search(pattern, text, re.IGNORECASE):
            return error(f"{last.rstrip('.?')}. {advice}" if advice else last)
    return BackendError(f"`{_show(argv)}` failed: {last}")


class _Gone(BackendError):
    """The container, or something that it needs, was removed by somebody else."""


class _Paused(BackendError):
    pass


class _NoImage(LoadError):
    pass


ANYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}

COMPLAINTS: tuple[tuple[str, type[BackendError] | type[LoadError], str], ...] = (
    (
        "cannot connect to the docker daemon|is the docker daemon running|error during connect",
        BackendError,
        "Start dockerd, or set DOCKER_HOST; `docker info` tells whether it answers",
    ),
    (
        "permission denied while trying to connect",
        BackendError,
        "Add this user to the group docker, or set DOCKER_HOST",
    ),
    (
        "is not a docker command|unknown shorthand flag|unknown flag|unknown command",
        BackendError,
        "Docker Compose v2 is needed: `docker compose version` must answer",
    ),
    ("no such image|pull access denied|manifest unknown", _NoImage, ""),
    ("no such container|marked for removal|network .* not found", _Gone, ""),
    ("cannot start a paused container", _Paused, ""),
    (
        "could not select device driver",
        LoadError,
        "Install the NVIDIA Container Toolkit and configure Docker for it",
    ),
    (
        "port is already allocated|address already in use",
        LoadError,
        'Another program has this port; a free one is taken with ports: ["127.0.0.1::PORT"]',
    ),
)


def _log_begins(container: Container, told: float) -> float:
    """The Unix time of the first line that its last run may have printed.

    ``told``: when we told it to start. An engine that crashes again and again is told so right after the end
    of the run before, whose lines must not be shown; but Docker's clock may be that of another machine.
    """
    earliest = _moment(container.started_at) - LOG_MARGIN
    return told if earliest <= told < earliest + LOG_MARGIN + 1.0 else earliest


def _moment(text: str) -> float:
    """Unix time of Docker's UTC moments, to the second."""
    return datetime.fromisoformat(f"{text[:19]}+00:00").timestamp()


def _container(found: dict[str, Any]) -> Container:
    state, labels = found["State"], found["Config"].get("Labels") or {}
    network = found.get("NetworkSettings") or {}
    number = labels.get(f"{LABEL}.container-number", "1")
    return Container(
        id=found["Id"],
        service=labels.get(f"{LABEL}.service", ""),
        number=int(number) if number.isdigit() else 1,
        status=state["Status"],
        started_at=state.get("StartedAt", ""),
        exit_code=state.get("ExitCode", 0),
        oom_killed=state.get("OOMKilled", False),
        error=state.get("Error", ""),
        network_mode=found.get("HostConfig", {}).get("NetworkMode", ""),
        ports=tuple(
            (inside, binding.get("HostIp", ""), int(binding["HostPort"]))
            for inside, bindings in (network.get("Ports") or {}).items()
            for binding in bindings or ()
            if binding.get("HostPort")
        ),
        ips=tuple(
            each["IPAddress"] for each in (network.get("Networks") or {}).values() if each.get("IPAddress")
        ),
    )


def _engine_socket(env: Mapping[str, str]) -> str | None:
    """Of the engine that the docker program talks to, if that is on this machine."""
    host = env.get("DOCKER_HOST", "")
    if not host:
        try:
            argv = ["docker", "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"]
            host = _run(argv, ASK_TIMEOUT, env=env).out.strip()
        except MuxError:
            pass
    return host.removeprefix("unix://") if host.startswith("unix://") else None


def _run(
    argv: Sequence[str],
    timeout: float,
    *,
    env: Mapping[str, str],
    merge: bool = False,
    lock: int | None = None,
) -> Done:
    with _spawn(argv, env=env, stderr=subprocess.STDOUT if merge else subprocess.PIPE, lock=lock) as child:
        try:
            out, err = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # Compose is a child of the docker program, so the whole group has to go.
            os.killpg(child.pid, signal.SIGKILL)
            raise BackendError(
                f"`{_show(argv)}` did not end within {timeout:g} s; dockerd may be stuck"
            ) from None
    return Done(child.returncode, out, err or "")


def _spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stderr: int = subprocess.STDOUT,
    lock: int | None = None,
) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            errors="replace",
            env=env,
            pass_fds=() if lock is None else (lock,),
            start_new_session=True,
        )
    except OSError as error:
        raise BackendError(
            f"{argv[0]} cannot be run ({error.strerror}): is it installed and on PATH?"
        ) from None


def _lines(child: subprocess.Popen[str]) -> IO[str]:
    assert child.stdout is not None
    return child.stdout


def _show(argv: Sequence[str]) -> str:
    """The command as an error names it: without the long lists of files and filters."""
    words = [word for word in argv if not word.startswith("-")]
    return " ".join(words[:2]) + (f" {argv[-1]}" if len(argv) > 2 else "")
