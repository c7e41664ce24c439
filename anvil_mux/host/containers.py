"""The services of a compose project as containers: made by Compose, run by the engine's API.

Compose makes a container, the engine starts and stops it (docker_api.py), ``Project`` knows whose it is
and reports its end (project.py). Here is the order of all that, and what follows a failure. Why something
failed is looked up, not read from the words of an error (but for ``EXISTS``): whether the image, the port and
the runtime for GPUs are there.

Where the description of a scaled service has changed, ``create`` would make all its containers anew, and so
end those that run or soon will: while one runs, the others stay as they are, and one that has to be made anew
is removed first.

An upgrade of Compose alone replaces no container that runs. Its releases need not make the same hash of the
same description, so a container's hash counts against it only where the release that made it is the one here.
"""

from __future__ import annotations

import io
import logging
import math
import os
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from anvil_mux.command import Done
from anvil_mux.config.config import Backend
from anvil_mux.config.service import COMPLETED, HEALTHY, STARTED, Mounts, PlacedFile, Service
from anvil_mux.errors import BackendError, LoadError, MuxError
from anvil_mux.host import gpus, project
from anvil_mux.host.compose_files import COMPOSE, ComposeFiles
from anvil_mux.host.docker_api import (
    ALIVE,
    HALF_REMOVED,
    Container,
    ContainerEngine,
    DockerRefused,
    Missing,
    find_endpoint,
)
from anvil_mux.host.engines import listen_port
from anvil_mux.host.processes import free_port, is_taken, port_taken
from anvil_mux.host.project import Project, how_it_ended
from anvil_mux.host.seam import FOLLOWED_LINES, LOG_LINES, LOOPBACK, HostConfig, NotBegun, url_of
from anvil_mux.state import state_folder

log = logging.getLogger(__name__)

LATE_LOG_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Seconds between looks at the log of what ended: Docker 28 says so before its last lines are there."""
LOG_MARGIN = 2.0
"""Docker notes the start of a container a moment after it may have printed its first lines."""
EXISTS = "exists"
"""The word beside a container's id in a refusal to start it: what is left of its last start is in the way.

Docker says so in several sentences and in no other way, after it was killed or the machine lost power while
the container was being started (moby#36145, #50040). Only a container of another id can be started then.
"""
CLEANED_UP = "netavark: remove"
"""The words of Podman's refusal to start a container whose last run it is still cleaning up behind.

Both take down its network, and who comes second finds it gone: the next start succeeds.
"""
BY_HAND_TIMEOUT = 60.0
"""Seconds that a command of Docker's may take that a person types."""
NEED_PAUSE = 0.2
"""Seconds between two looks at a service on which another one depends."""
STOPS_TIMEOUT = 60.0
"""How long a start waits for stops that an anvil-mux before it has asked for."""


SHARED_NETWORK = "container:"
"""The network mode of a container that has another one's network; the other's id follows."""
ANYWHERE = ("", "0.0.0.0", "::")
"""The addresses that stand for all of the host."""


class Gone(BackendError):
    """The container, or something that it needs, was removed by somebody else."""


class ContainerRuntime:
    """The services of one compose project, see ``seam.Runtime``."""

    def __init__(
        self,
        config: HostConfig,
        *,
        environ: Mapping[str, str] | None = None,
        lock: int | None = None,
        run: project.Run | None = None,
        address: str = LOOPBACK,
    ) -> None:
        env = dict(os.environ if environ is None else environ)
        self._files = ComposeFiles(config, state_folder(config.project, env))
        endpoint = find_endpoint(env)
        self._address = address
        # Commands speak to the same engine as we do.
        of_commands = env | ({"DOCKER_HOST": endpoint.address} if endpoint.found_by_us else {})
        self._run = run or (
            lambda argv, timeout: project.run_command(
                argv, timeout, env=of_commands | self._files.variables, lock=lock
            )
        )
        self._engine = ContainerEngine(endpoint)
        self._project = Project(config, self._engine)
        self._looked = False  # whether ``running`` was called
        self._unreached = ""
        """Why the engine did not answer the last ping; "": it did."""
        self._brought_up: set[str] = set()
        """The services on which others depend that were started here; any thread adds one."""
        # Two `compose create` at once would both make the project's network.
        self._creating = threading.Lock()

    def reconfigure(self, config: HostConfig) -> None:
        self._files.reconfigure(config)
        self._project.reconfigure(config)

    def watch(self, tell: Callable[[str, str], object]) -> None:
        self._project.watch(tell)

    def problem(self) -> str:
        return self._project.problem or self._unreached

    def container_name(self, service: str) -> str:
        return self._project.known(service).name or service

    def ping(self) -> str:
        why = ""
        try:
            self._engine.ping()
        except MuxError as error:
            why = error.message
        self._unreached = why
        return why

    def close(self) -> None:
        self._project.close()

    # Starting

    def prepare(self, backend: Backend, remaining: Callable[[], float]) -> None:
        self._check_engine()
        for name, condition in backend.service.needs:
            if not self._meets(name, condition):
                self._bring_up(backend, name)
                self._await_need(backend, name, condition, remaining)

    def _meets(self, name: str, condition: str) -> bool:
        """Return whether a service meets the condition under which another may be started."""
        found = self._project.of_service(name)
        if condition == COMPLETED:
            ended = [each.status == "exited" and each.exit_code == 0 for each in found]
            return bool(ended) and all(ended) and self._is_current(name, found[0])
        alive = [each for each in found if each.status in ALIVE]
        return bool(alive) and (condition == STARTED or all(each.health == "healthy" for each in alive))

    def _is_current(self, name: str, container: Container) -> bool:
        """Return whether a container that has completed was made as its service is described now."""
        return name in self._brought_up or self._described(name) in ("", container.hash)

    def _bring_up(self, backend: Backend, name: str) -> None:
        """Have Compose start a service that another one depends on."""
        with self._creating:
            alive = any(each.status in ALIVE for each in self._project.of_service(name))
            kept = ["--no-recreate"] if alive else []
            words = ["up", "--detach", "--no-deps", "--no-build", "--pull", "never", *kept, name]
            argv = self._files.command(*words)
            done = self._run(argv, project.CREATE_TIMEOUT)
        if done.code:
            raise self._why_not_created(backend, f"`{project.short(argv)}` failed: {done.last_line}")
        self._brought_up.add(name)

    def _await_need(
        self, backend: Backend, name: str, condition: str, remaining: Callable[[], float]
    ) -> None:
        """Wait until a service that was started for another meets its condition, or raise LoadError."""
        service = f"service {name}, on which {backend.name} depends,"
        while condition != STARTED and not self._meets(name, condition):
            for container in self._project.of_service(name):
                if why := cannot_meet(container, condition):
                    lines = self._log_of(container, 1, 0.0)
                    raise LoadError(f"{service} {why}{f': {lines[-1]}' if lines else ''}")
            if remaining() <= 0:
                raise LoadError(f"{service} was not {condition} within load_timeout")
            time.sleep(NEED_PAUSE)

    def _check_engine(self) -> None:
        """Raise NotBegun if the container engine does not answer."""
        try:
            self._engine.ping()
        except MuxError as error:
            raise NotBegun(error.message) from None

    def start(self, backend: Backend) -> str:
        self._check_engine()
        known = self._project.known(backend.name)
        known.is_moving, known.is_frozen = True, False
        try:
            return self._start(backend)
        except MuxError:
            self._note_unstarted(backend)
            raise
        finally:
            known.is_moving = False

    def _note_unstarted(self, backend: Backend) -> None:
        """Note that its log is an earlier run's, unless it runs all the same."""
        with suppress(MuxError):
            container = self._project.find(backend)
            if container is None or container.status in ALIVE:
                return
            known = self._project.known(backend.name)
            if known.run != container.run:
                known.unstarted = container.run

    def _start(self, backend: Backend) -> str:
        known = self._project.known(backend.name)
        changed = known.digest not in (None, backend.service.digest)
        known.start_time = time.time()
        self._check_host_port(backend)
        try:
            id = self._create(backend, anew=changed) if changed or not known.id else known.id
            container = self._started(backend, id)
        except Gone:
            # `docker compose down` took the container or its network, or it can never be started again.
            container = self._started(backend, self._create(backend, anew=True))
        if container.is_cut_off:  # it is made with its networks again
            self._project.end(container, None)
            container = self._started(backend, self._create(backend, anew=True))
        url = self._url(container, backend)
        self._project.started(backend, container)
        if url is None:
            ports = f'ports: ["{self._address}::{listen_port(backend)}"]'
            where = ""
            if container.network_mode.startswith(SHARED_NETWORK):
                where = " on the service whose network it has"
            no_address = f"has no address: publish its port{where}, such as {ports}"
            raise LoadError(f"service {backend.name} {how_it_ended(container) or no_address}")
        return url

    def _check_host_port(self, backend: Backend) -> None:
        """Raise LoadError if another program has the port of a container on the host's network.

        Docker does not notice, and that program would be assumed to be the engine.
        """
        if not backend.service.on_host_network or self._engine.endpoint.path is None:
            return
        container = self._project.find(backend)
        if container is not None and container.status in ALIVE:
            return
        try:
            free_port(self._address, listen_port(backend))
        except OSError as error:
            raise LoadError(port_taken(backend, listen_port(backend), error)) from None

    def _url(self, container: Container, backend: Backend) -> str | None:
        """Return the URL of the engine in a container; None if it cannot be reached.

        A container on the network of another one is reached at the other's address and ports.
        """
        if container.network_mode.startswith(SHARED_NETWORK):
            other = self._engine.inspect(container.network_mode.removeprefix(SHARED_NETWORK))
            if other is None or other.status not in ALIVE:
                return None
            container = other
        return base_url(container, listen_port(backend), self._address)

    def _place_files(self, backend: Backend, id: str) -> None:
        """Write its secrets and configs into a container that does not run, or raise LoadError.

        Compose mounts those that are files of the host. The others it writes itself: 2.26 when it makes a
        container, 2.40 when it starts one, which is done here without it.
        """
        files = backend.service.files
        container = self._engine.inspect(id) if files else None
        if container is None or container.status in ALIVE:
            return
        if unset := [each for each in files if each.content is None]:
            names = ", ".join(dict.fromkeys(each.variable for each in unset))
            raise LoadError(
                f"service {backend.service_name}: the secret or config {unset[0].path} is taken from a "
                f"variable that is not set: {names}. Set it where anvil-mux is started, or in .env"
            )
        try:
            self._engine.extract(id, archive_of(files, time.time()))
        except Missing as error:
            raise Gone(error.message) from error
        except DockerRefused as error:
            raise LoadError(
                f"service {backend.service_name} cannot be given {files[0].path}: {error.message}. With "
                "`read_only: true` secrets and configs must be files (`file: ...`)"
            ) from error

    def _started(self, backend: Backend, id: str) -> Container:
        self._place_files(backend, id)
        try:
            self._engine.start(id)
        except DockerRefused as error:
            self._start_otherwise(id, error)
        container = self._engine.inspect(id)
        if container is None:
            raise Gone(f"container {id[:12]} is gone")
        return container

    def _start_otherwise(self, id: str, refused: DockerRefused) -> None:
        """Thaw a container that is only frozen, or start it once more where that helps; else raise an error
        that says what can be done.
        """
        container = self._engine.inspect(id)
        if container is None or container.status in HALF_REMOVED or isinstance(refused, Missing):
            raise Gone(refused.message) from refused
        if container.status not in ALIVE and id in refused.words and EXISTS in refused.words:
            raise Gone(refused.message) from refused
        if container.status == "paused":
            self._engine.unpause(id)
            return
        if CLEANED_UP in refused.words:
            self._engine.start(id)
            return
        local = self._engine.endpoint.path is not None
        if local and any(is_taken(ip, port) for ip, port in container.wants_ports):
            raise LoadError(
                f"{refused.message}. Another program has this port; "
                'a free one is taken with ports: ["127.0.0.1::PORT"]'
            ) from refused
        if container.wants_devices and "nvidia" not in self._engine.runtimes():
            raise LoadError(
                f"{refused.message}. Install the NVIDIA Container Toolkit and configure Docker for it"
            ) from refused
        raise refused

    def _create(self, backend: Backend, *, anew: bool = False) -> str:
        service = backend.service_name
        with self._creating:
            recreate = ["--force-recreate"] if anew else []
            if backend.service.scale > 1 and (
                anew or any(each.status in ALIVE for each in self._project.of_service(service))
            ):
                recreate = ["--no-recreate"]
                left = self._project.find(backend)
                if left and (anew or (left.status not in ALIVE and self._differing_parts(backend, left))):
                    self._engine.remove(left.id)
            words = ["create", "--no-build", "--pull", "never", *recreate, service]
            argv = self._files.command(*words)
            try:
                done = self._run(argv, project.CREATE_TIMEOUT)
            except MuxError:
                self._remove_unfinished(service)
                raise
            if done.code:
                self._remove_unfinished(service)
        if done.code:
            raise self._why_not_created(backend, f"`{project.short(argv)}` failed: {done.last_line}")
        container = self._project.look_up(backend)
        if container is None:
            raise BackendError(f"`{project.short(argv)}` made no container for {backend.name}")
        return container.id

    def _remove_unfinished(self, service: str) -> None:
        """Remove what a failed command has made and nobody has started: it may lack its secrets and configs.

        Compose puts these into a container once it is made, and never again.
        """
        with suppress(MuxError):
            for each in self._project.of_service(service):
                if each.status == "created":
                    self._engine.remove(each.id)

    def _why_not_created(self, backend: Backend, failed: str) -> MuxError:
        self._engine.ping()
        if self._compose_version().code:
            return BackendError(
                f"{failed}. Docker Compose v2 is needed: `docker compose version` must answer"
            )
        # Those of what it depends on are among them.
        listed = self._compose("config", "--images", backend.service_name)
        for image in [self._image(backend)] if listed.code else listed.out.split():
            if not self._engine.image_id(image):
                return LoadError(self._how_to_get(image, backend))
        if any(each.status in HALF_REMOVED for each in self._project.of_service(backend.service_name)):
            return Gone(failed)
        return BackendError(failed)

    def _image(self, backend: Backend) -> str:
        return backend.service.image or f"{self._project.config.project}-{backend.service_name}"

    def _how_to_get(self, image: str, backend: Backend) -> str:
        config, service = self._project.config, backend.service_name
        if image == f"{config.project}-{service}":
            files = "".join(f" -f {file}" for file in config.files)
            return (
                f"the image of service {service} is not built: "
                f"docker compose{files} -p {config.project} build {service}"
            )
        return f"image {image} is not present: docker pull {image}"

    # Stopping and freezing

    def stop(self, backend: Backend) -> None:
        self._end(backend, backend.stop_timeout)

    def kill(self, backend: Backend) -> None:
        self._end(backend, None)

    def _end(self, backend: Backend, grace: float | None) -> None:
        known = self._project.known(backend.name)
        known.is_moving = True
        try:
            self._project.release(backend)
            container = self._project.find(backend)
            if container is not None:
                self._project.end(container, grace)
        finally:
            known.is_moving = known.is_frozen = False
        self._project.forget(backend)

    def pause(self, backend: Backend) -> None:
        self._project.known(backend.name).is_frozen = True
        self._engine.pause(self._running(backend).id)

    def resume(self, backend: Backend) -> None:
        container = self._running(backend)
        self._project.known(backend.name).is_frozen = False
        if container.status == "paused":
            self._engine.unpause(container.id)

    def _running(self, backend: Backend) -> Container:
        container = self._project.find(backend)
        how = "has no container" if container is None else how_it_ended(container)
        if container is None or how:
            raise BackendError(f"service {backend.name} {how}")
        return container

    # What is there

    def running(self) -> dict[str, str]:
        alive = self._project.alive()
        if not self._looked and self._project.await_stops(alive.values(), STOPS_TIMEOUT):
            alive = self._project.alive()
        self._looked = True
        urls = {}
        for name, container in alive.items():
            backend = self._project.backend(name)
            if backend is None:
                continue
            restarting = container.status == "restarting"
            urls[name] = "" if restarting else self._url(container, backend) or ""
            self._project.found(backend, container)
        self._project.has_looked = True
        return urls

    def ended(self, backend: Backend) -> str | None:
        container = self._project.find(backend)
        if container is None:
            return "has no container"
        how = how_it_ended(container)
        return how and (self._project.known(backend.name).revived or how)

    def lost_its_port(self, backend: Backend) -> bool:
        return False  # Docker holds the port that it chose

    def differs(self, backend: Backend) -> str:
        container = self._project.find(backend)
        parts = self._differing_parts(backend, container) if container else []
        if not parts:
            return ""
        self._project.known(backend.name).digest = ""
        return f"its {' and '.join(parts)} changed since its container was made"

    def _differing_parts(self, backend: Backend, container: Container) -> list[str]:
        """The parts of its description for which Compose would make its container anew.

        Compose's own hash says whether there are any. Where it cannot be compared, since it has ids in it or
        another release of Compose made the container, the most telling parts of what that was made by are.
        """
        image = self._engine.image_id(self._image(backend)) if container.image_id else ""
        if image not in ("", container.image_id):
            return ["image"]
        described = self._described(backend.service_name) if container.hash else ""
        if described == container.hash != "":
            return []
        parts = differing_parts(container, backend.service)
        if parts or not described:
            return parts
        ours = ""
        with suppress(MuxError):
            ours = self._compose_version().out.strip()
        made_by, here = project.compose_release(container.compose), project.compose_release(ours)
        if not here or made_by in ((), here):
            return ["description"]
        log.warning(
            "%s is taken as unchanged: Compose %s made its container, whose hash Compose %s may make "
            "otherwise, and its image, command, environment and mounts are the same",
            backend.name,
            container.compose,
            ours,
        )
        return []

    def _described(self, service: str) -> str:
        """Compose's hash of a service as it is described; "" if it cannot be had."""
        try:
            done = self._compose("config", "--hash", service)
        except MuxError:
            return ""
        words = done.out.split()
        return words[1] if not done.code and len(words) == 2 and words[0] == service else ""

    def _compose(self, *words: str) -> Done:
        """Ask Compose something of the project."""
        return self._run(self._files.command(*words), project.ASK_TIMEOUT)

    def _compose_version(self) -> Done:
        return self._run([*COMPOSE, "version", "--short"], project.ASK_TIMEOUT)

    def is_frozen(self, backend: Backend) -> bool:
        container = self._project.find(backend)
        return container is not None and container.status == "paused"

    def pids(self, backend: Backend) -> list[int]:
        id = self._project.known(backend.name).id
        if not id and (container := self._project.look_up(backend)):
            id = container.id
        return self._engine.processes(id) if id else []

    def mounts(self, backend: Backend) -> Mounts:
        container = self._project.find(backend)
        return container.mounts if container else ()

    def owner(self, pid: int) -> str | None:
        id = gpus.container_of(pid)
        return self._project.owner(id) if id else None

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        try:
            container = self._project.find(backend)
            if container is None or container.status == "created":
                return []
            known = self._project.known(backend.name)
            if container.run == known.unstarted:
                return []
            return self._log_of(container, lines, _log_begins(container, known.start_time))
        except MuxError:
            return []

    def _log_of(self, container: Container, lines: int, since: float) -> list[str]:
        """The last lines of a run, also of one that has just ended."""
        found = self._engine.log(container, lines, since)
        if how_it_ended(container) is None:
            return found
        for pause in LATE_LOG_PAUSES:
            time.sleep(pause)
            before, found = found, self._engine.log(container, lines, since)
            if found and found == before:
                break
        return found

    def follow_log(self, backend: Backend) -> Iterator[str]:
        container = self._project.find(backend)
        if container is not None:
            with self._engine.follow(container, FOLLOWED_LINES) as lines:
                yield from lines


def _log_begins(container: Container, start_time: float) -> float:
    """The Unix time of the first line that its last run may have printed.

    ``start_time``: when we had it started. An engine that crashes again and again is started right after the
    end of the run before, whose lines must not be shown; but Docker's clock may be another machine's.
    """
    earliest = container.started - LOG_MARGIN
    return start_time if earliest <= start_time < earliest + LOG_MARGIN + 1.0 else earliest


def archive_of(files: Sequence[PlacedFile], now: float) -> bytes:
    """Return a tar archive of files; ``now``: the Unix time of their last change."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for each in files:
            content = (each.content or "").encode(errors="surrogateescape")
            about = tarfile.TarInfo(each.path.lstrip("/"))
            about.size, about.mtime = len(content), int(now)
            about.mode, about.uid, about.gid = each.mode, each.uid, each.gid
            archive.addfile(about, io.BytesIO(content))
    return whole.getvalue()


def cannot_meet(container: Container, condition: str) -> str:
    """Return why a container that was started will not meet a condition; "" while it may."""
    ended = how_it_ended(container)
    if ended and container.status not in ALIVE:
        return "" if condition == COMPLETED and container.exit_code == 0 else ended
    if condition == HEALTHY and container.health == "unhealthy":
        return "is unhealthy"
    if condition == HEALTHY and not container.health:
        return "has no health check, which `condition: service_healthy` needs"
    return ""


# What an inspect tells


def base_url(container: Container, port: int, address: str = LOOPBACK) -> str | None:
    """Return the URL of the engine that listens on ``port`` inside; None if it cannot be reached.

    ``address``: of the host. A container's own address is of use on its host alone.
    """
    if container.network_mode == "host":
        return url_of(address, port)
    published = [(ip, outside) for inside, ip, outside in container.ports if inside == f"{port}/tcp"]
    published.sort(key=lambda each: ":" in each[0])
    for ip, outside in published:
        if ip in ANYWHERE:
            ip = "::1" if (ip, address) == ("::", LOOPBACK) else address
        return url_of(ip, outside)
    return url_of(container.ips[0], port) if container.ips and address == LOOPBACK else None


def differing_parts(container: Container, service: Service) -> list[str]:
    """The parts of a service's description that say another thing than the container was made by.

    What the description leaves to the image is in none of them.
    """
    wanted = service.command
    environment = {f"{name}={value}" for name, value in service.environment}
    mounted = dict(container.mounts)
    parts = {
        "image": service.image and not f"/{container.image}".endswith(f"/{service.image}"),
        "command": wanted and container.command[-len(wanted) :] != wanted,
        "environment": environment - container.environment,
        "mounts": [
            inside
            for inside, outside in service.mounts
            if outside and not mounted.get(inside, "").endswith(outside)  # Docker Desktop has its own root
        ],
    }
    return [part for part, differs in parts.items() if differs]


# By hand


class DockerByHand:
    """Docker's own commands, as a person types them who knows the container; for comparison.

    Its address is looked up while it loads, so that costs nothing.
    """

    def __init__(self, config: HostConfig) -> None:
        self._engine = ContainerEngine(find_endpoint(os.environ))
        self._project = Project(config, self._engine)
        self._ids: dict[str, str] = {}

    def stop(self, backend: Backend) -> None:
        grace = math.ceil(backend.stop_timeout)
        self._run(["docker", "stop", "-t", str(grace), self._id(backend)], grace)

    def start(self, backend: Backend) -> str:
        id = self._id(backend)
        self._run(["docker", "start", id])
        container = self._engine.inspect(id)
        url = base_url(container, listen_port(backend)) if container else None
        if url is None:
            raise BackendError(f"service {backend.name} has no address")
        return url

    def _id(self, backend: Backend) -> str:
        if backend.name not in self._ids:
            found = self._project.look_up(backend)
            if found is None:
                raise BackendError(f"service {backend.name} has no container")
            self._ids[backend.name] = found.id
        return self._ids[backend.name]

    def _run(self, argv: Sequence[str], grace: float = 0.0) -> None:
        done = project.run_command(argv, grace + BY_HAND_TIMEOUT, env=os.environ)
        if done.code:
            raise BackendError(f"`{project.short(argv)}` failed: {done.last_line}")
