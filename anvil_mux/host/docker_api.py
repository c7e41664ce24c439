"""The container engine: its address, what is asked of it over its API, and a container as it describes one.

``ContainerEngine`` is all that this program asks of one. Nothing here pulls or builds an image. An
answer's status says what happened, and its ``message`` is for people only: 304 means that it was so
already, 404 that there is no such thing, 409 that the state of the container is in the way. A request
that could not be made at all is ``Unreachable``. Podman answers the same requests, and where it differs is
known by ``Libpod-Api-Version``.

What a killed anvil-mux has asked for goes on without it. An engine holds the lock of a container while it
starts it, and inspects under that lock, so ``inspect`` shows what came of the start. Of one that is being
stopped only an event tells: ``signalled``.

The address is found as the docker program finds it. ``DOCKER_HOST`` decides, then ``DOCKER_CONTEXT``,
then the context that is in use, then Docker's own socket. Where none of these says anything and Docker's
socket is not there, ``CONTAINER_HOST`` and Podman's sockets are looked at. An engine on another machine is
reached by tcp://, with TLS where ``DOCKER_TLS_VERIFY`` or the context says so, or by ssh://, where
``docker system dial-stdio`` hands our bytes on to the socket there.
"""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import re
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from anvil_mux.clock import count_in
from anvil_mux.command import without_keys
from anvil_mux.errors import BackendError
from anvil_mux.protocol.foreign import Lines, read_object, read_or_none
from anvil_mux.state import text_of

ASK_TIMEOUT = 20.0
START_TIMEOUT = 60.0
STOP_SLACK = 20.0
"""The engine's own time around the grace period."""
OLDEST, NEWEST = (1, 40), (1, 52)
"""The versions of the API that this is written for: Docker 19.03 and 29, Podman's 1.41 between them."""

ALIVE = frozenset({"running", "paused", "restarting", "stopping"})
HALF_REMOVED = frozenset({"removing", "dead"})
LABEL = "com.docker.compose"
MOMENT = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)")
"""Docker's moments are UTC to the nanosecond; Podman's are of its time zone."""
LATELY = 600.0
END_SIGNALS = frozenset({"2", "3", "9", "15"})
SHARED_NETWORKS = ("container:", "ns:", "slirp4netns", "pasta")
"""The beginnings of network modes that have no network of the engine's own."""
LONG_ID = re.compile(r"[0-9a-f]{64}")
TAR = {"Content-Type": "application/x-tar"}
Readable = http.client.HTTPResponse | io.BytesIO


# One container


@dataclass(frozen=True, slots=True)
class Container:
    """One container, as its engine describes it."""

    id: str
    service: str
    number: int
    status: str
    started_at: str
    exit_code: int = 0
    oom_killed: bool = False
    error: str = ""
    health: str = ""
    """The state of its health check: starting, healthy, unhealthy; "" where it has none."""
    network_mode: str = ""
    ports: tuple[tuple[str, str, int], ...] = ()
    """The published ports: (port inside, such as 8080/tcp; address; port outside)."""
    ips: tuple[str, ...] = ()
    is_cut_off: bool = False
    """Whether it has lost the networks that it was made with."""
    tty: bool = False
    wants_ports: tuple[tuple[str, int], ...] = ()
    """The addresses and ports on the host that its description names."""
    wants_devices: bool = False
    """Whether its description asks for GPUs or their like."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Paths inside, and the paths on the host that they are, volumes too."""
    image: str = ""
    image_id: str = ""
    """The id of the image that Compose made it of; "": not known."""
    command: tuple[str, ...] = ()
    """The entrypoint and the command, those of the image where the description has none."""
    environment: frozenset[str] = frozenset()
    """NAME=VALUE, those of the image too."""
    hash: str = ""
    """Compose's hash of the description that it was made by; "": not known, or it has ids in it."""
    compose: str = ""
    """The release of Compose that made it, whose hashes others need not make alike; "": not known."""

    @property
    def run(self) -> tuple[str, str]:
        """The identity of its run: no two runs have the same."""
        return self.id, self.started_at

    @property
    def started(self) -> float:
        """Unix time of its start; 0 if that is not told."""
        found = MOMENT.fullmatch(self.started_at)
        if found is None:
            return 0.0
        zone = "+00:00" if found[3] == "Z" else found[3]
        return datetime.fromisoformat(found[1] + zone).timestamp() + float(f"0{found[2] or ''}")


class ComposeContainer(NamedTuple):
    """A container by what Compose has written on it, of whatever project."""

    id: str
    project: str
    service: str
    number: int
    files: tuple[str, ...]
    """The paths of the compose files that it was made of."""
    folder: str = ""
    """The folder of its project's files."""

    def word(self, noted: Collection[str]) -> str:
        """Return the word by which notes know it, if it is among those that are ``noted``; else ""."""
        words = (f"{self.service}/{self.number}", self.service)
        return next((word for word in words if word in noted), "")


def _compose_container(id: str, labels: Mapping[str, str]) -> ComposeContainer:
    files = labels.get(f"{LABEL}.project.config_files", "")
    number = count_in(labels.get(f"{LABEL}.container-number", "1")) or 1
    project, service = labels.get(f"{LABEL}.project", ""), labels.get(f"{LABEL}.service", "")
    folder = labels.get(f"{LABEL}.project.working_dir", "")
    made_of = tuple(filter(None, files.split(",")))
    return ComposeContainer(id, project, service, number, made_of, folder=folder)


def _name_of(listed: Mapping[str, Any]) -> str:
    """Return the name of a listed container, or its id where it has none."""
    return str(next(iter(listed.get("Names") or ()), listed["Id"])).removeprefix("/")


def _compose_hash(labels: Mapping[str, str], host: Mapping[str, Any]) -> str:
    """Compose's hash, where it can be compared: it has the id of each container whose parts this one uses."""
    uses = (host.get(f"{what}Mode") or "" for what in ("Network", "Ipc", "Pid"))
    if host.get("VolumesFrom") or any(each.startswith("container:") for each in uses):
        return ""
    return labels.get(f"{LABEL}.config-hash", "")


def read_container(found: Mapping[str, Any]) -> Container:
    """Read a container from the answer to an inspect."""
    state, config, host = found["State"], found["Config"], found.get("HostConfig") or {}
    labels, network = config.get("Labels") or {}, found.get("NetworkSettings") or {}
    number = labels.get(f"{LABEL}.container-number", "1")
    bound, wanted = network.get("Ports") or {}, host.get("PortBindings") or {}
    return Container(
        id=found["Id"],
        service=labels.get(f"{LABEL}.service", ""),
        number=count_in(number) or 1,
        status=state["Status"],
        started_at=state.get("StartedAt", ""),
        exit_code=state.get("ExitCode", 0),
        oom_killed=state.get("OOMKilled", False),
        error=state.get("Error", ""),
        health=(state.get("Health") or {}).get("Status", ""),
        network_mode=host.get("NetworkMode", ""),
        ports=tuple(_bindings(bound)),
        ips=tuple(
            each["IPAddress"] for each in (network.get("Networks") or {}).values() if each.get("IPAddress")
        ),
        is_cut_off=_is_cut_off(str(host.get("NetworkMode") or ""), network),
        tty=bool(config.get("Tty")),
        wants_ports=tuple((ip, port) for _, ip, port in _bindings(wanted) if port),
        wants_devices=bool(host.get("DeviceRequests")),
        mounts=tuple(
            (each["Destination"], each["Source"]) for each in found.get("Mounts") or () if each.get("Source")
        ),
        image=config.get("Image") or "",
        image_id=labels.get(f"{LABEL}.image", ""),
        command=(*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ())),
        environment=frozenset(config.get("Env") or ()),
        hash=_compose_hash(labels, host),
        compose=labels.get(f"{LABEL}.version", ""),
    )


def _is_cut_off(mode: str, network: Mapping[str, Any]) -> bool:
    """Return whether a container that was made with a network is in none: somebody disconnected it."""
    has_own = mode not in ("", "host", "none") and not mode.startswith(SHARED_NETWORKS)
    return has_own and "Networks" in network and not network["Networks"]


def _bindings(ports: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    for inside, bindings in ports.items():
        for binding in bindings or ():
            if count_in(binding.get("HostPort", ""), 65535) is not None:
                yield inside, binding.get("HostIp", ""), int(binding["HostPort"])


# The engine


class DockerRefused(BackendError):
    """The engine answers that it did not do what it was asked for."""

    def __init__(self, what: str, answer: int, words: str) -> None:
        super().__init__(f"Docker answers {answer} to {what}: {words}")
        self.words = words


class Missing(DockerRefused):
    """The container, or something that it needs, is not there (404)."""


class Conflict(DockerRefused):
    """The container is in a state that does not allow it (409)."""


REFUSALS: dict[int, type[DockerRefused]] = {404: Missing, 409: Conflict}


@dataclass(frozen=True, slots=True)
class About:
    """An engine, as it describes itself."""

    podman: str = ""
    """Podman's version; "": it is Docker."""
    rootless: bool = False
    """Whether it runs as a user other than root."""
    cgroup: str = ""
    """The version of the cgroups, where it says it."""

    @property
    def release(self) -> tuple[int, ...]:
        """Podman's version, as far as it is numbers."""
        found = re.match(r"\d+(\.\d+)*", self.podman)
        return tuple(map(int, found[0].split("."))) if found else ()


class Stream:
    """An answer without an end, line by line; any thread may end it."""

    def __init__(self, connection: Connection, pieces: Iterator[bytes]) -> None:
        self._connection = connection
        self._pieces = pieces

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.end()

    def interrupt(self) -> None:
        self._connection.interrupt()

    def __iter__(self) -> Iterator[str]:
        lines = Lines()
        with suppress(OSError, http.client.HTTPException):  # as it is when it is interrupted
            for piece in self._pieces:
                for line in lines.feed(piece):
                    yield line.decode(errors="replace").rstrip("\r")
        if lines.rest:
            yield lines.rest.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class _Dialect:
    """The API that an engine speaks."""

    version: str
    is_podman: bool


class ContainerEngine:
    """Asks one container engine; every call is bounded in time, and made on a connection of its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._dialect: _Dialect | None = None
        """The API of the engine: learned before the first request, and again after an answer that says it is
        another. Any thread may replace it, so each request reads it once (``_learn``)."""

    # Containers

    def containers(self, project: str, service: str = "") -> list[tuple[str, str]]:
        """Return id and service of each container of a project, whatever its state, but one-off runs."""
        labels = {"project": project, "oneoff": "False", "service": service}
        words = [f"{LABEL}.{name}={value}" for name, value in labels.items() if value]
        listed = self._json("/containers/json", all=1, filters=_filters(label=words))
        return [(each["Id"], (each.get("Labels") or {}).get(f"{LABEL}.service", "")) for each in listed]

    def running(self) -> list[ComposeContainer]:
        """List the containers of all projects of Compose that run or are frozen, but one-off runs."""
        listed = self._json("/containers/json", filters=_filters(label=[f"{LABEL}.oneoff=False"]))
        return [_compose_container(str(each["Id"]), each.get("Labels") or {}) for each in listed]

    def inspect(self, id: str) -> Container | None:
        """Describe a container; None if it is gone."""
        try:
            return read_container(self._json(f"/containers/{id}/json"))
        except Missing:
            return None

    def start(self, id: str) -> None:
        self._ask("POST", f"/containers/{id}/start", START_TIMEOUT)

    def extract(self, id: str, archive: bytes) -> None:
        """Extract a tar archive at the root of its file system."""
        self._ask("PUT", f"/containers/{id}/archive?path=/", body=archive)

    def stop(self, id: str, grace: float) -> None:
        self._ask("POST", _path(f"/containers/{id}/stop", t=math.ceil(grace)), grace + STOP_SLACK)

    def kill(self, id: str) -> None:
        self._ask("POST", f"/containers/{id}/kill")

    def pause(self, id: str) -> None:
        self._ask("POST", f"/containers/{id}/pause")

    def unpause(self, id: str) -> None:
        self._ask("POST", f"/containers/{id}/unpause")

    def remove(self, id: str) -> None:
        """Remove it by force, though it runs."""
        self._ask("DELETE", _path(f"/containers/{id}", force=1))

    def processes(self, id: str) -> list[int]:
        """List the ids of its processes on its host; [] if it does not run."""
        wanted = "hpid" if self._learn().is_podman else "-eo pid"
        try:
            body = self._ask("GET", _path(f"/containers/{id}/top", ps_args=wanted))
        except (Missing, Conflict):
            return []
        rows = json.loads(body)["Processes"] if body else None
        # Null: Docker within a container may not find the control group, and then lists nothing.
        return [int(word) for row in rows or () for word in row[:1] if word.isdecimal()]

    def published(self) -> dict[int, ComposeContainer]:
        """Return the containers that run by the TCP ports of the host at which they are published."""
        return {
            int(port["PublicPort"]): _compose_container(_name_of(each), each.get("Labels") or {})
            for each in self._json("/containers/json")
            for port in each.get("Ports") or ()
            if port.get("PublicPort") and port.get("Type", "tcp") == "tcp"
        }

    # The engine itself

    def volumes(self) -> set[str]:
        """Return the names of all volumes."""
        return {str(each["Name"]) for each in self._json("/volumes").get("Volumes") or ()}

    def networks(self) -> set[str]:
        """Return the names and the ids of all networks."""
        listed = self._json("/networks")
        return {str(each[key]) for each in listed for key in ("Name", "Id") if each.get(key)}

    def image_id(self, name: str) -> str:
        """The id of the image that has this name; "" if none has."""
        try:
            return str(self._json(f"/images/{quote(name, safe='/:@')}/json")["Id"])
        except Missing:
            return ""

    def runtimes(self) -> list[str]:
        """The low-level runtimes that it knows, such as runc and nvidia."""
        return list(self._json("/info").get("Runtimes") or ())

    def identity(self) -> str:
        """Return the id by which an engine is told from all others; "" if it has none."""
        return str(self._json("/info").get("ID") or "")

    def about(self) -> About:
        """Ask the engine which one it is, and how it runs."""
        info = self._json("/info")
        rootless = bool(info.get("Rootless")) or "name=rootless" in (info.get("SecurityOptions") or ())
        version = str(info.get("ServerVersion") or "") if self._learn().is_podman else ""
        return About(version, rootless, str(info.get("CgroupVersion") or ""))

    def ping(self) -> None:
        """Raise Unreachable if the engine does not answer."""
        self._ask_dialect()

    # Logs and events

    def log(self, container: Container, lines: int, since: float) -> list[str]:
        """The last lines of both streams, in their order."""
        path = f"/containers/{container.id}/logs"
        asked = _path(path, stdout=1, stderr=1, tail=lines, since=f"{since:.6f}")
        body = b"".join(_pieces(container, io.BytesIO(self._ask("GET", asked))))
        return body.decode(errors="replace").splitlines()[-lines:]

    def follow(self, container: Container, lines: int) -> Stream:
        """The lines as they come, beginning with so many of the last ones, until the container ends."""
        path = f"/containers/{container.id}/logs"
        # Without a limit: Podman does not answer before there is a line.
        connection, response = self._request(
            "GET", _path(path, stdout=1, stderr=1, tail=lines, follow=1), timeout=None
        )
        return Stream(connection, _pieces(container, response))

    def events(self, since: float) -> Stream:
        """Return a line for each event of a container of any project, see ``read_event``.

        Events of networks have no label of a project, so all are read.
        """
        # Podman's filters call an end died, and its events call it die.
        wanted = ["start", "die", "died", "pause", "unpause", "disconnect"]
        filters = _filters(type=["container", "network"], event=wanted)
        connection, response = self._request(
            "GET", _path("/events", since=f"{since:.6f}", filters=filters), ASK_TIMEOUT
        )
        connection.wait_for_ever()
        return Stream(connection, _read_pieces(response))

    def signalled(self, project: str) -> dict[str, float]:
        """The containers that were sent a signal to end in the last minutes -> the Unix time of that."""
        now = time.time()
        filters = _filters(type=["container"], event=["kill"], label=[f"{LABEL}.project={project}"])
        answer = self._ask(
            "GET", _path("/events", since=int(now - LATELY), until=f"{now:.6f}", filters=filters)
        )
        events = [json.loads(line) for line in answer.splitlines() if line]
        actors = [(each["Actor"], float(each["timeNano"]) / 1e9) for each in events]
        return {
            actor["ID"]: moment
            for actor, moment in actors
            if actor["Attributes"].get("signal") in END_SIGNALS
        }

    def await_end(self, id: str, timeout: float) -> None:
        """Return when it does not run any more; Unreachable after that time."""
        self._ask("POST", _path(f"/containers/{id}/wait", condition="not-running"), timeout)

    # Requests

    def _json(self, path: str, **query: object) -> Any:
        answer = self._ask("GET", _path(path, **query))
        try:
            return json.loads(answer)
        except ValueError:
            raise BackendError(f"what Docker answers to GET {path} is not JSON") from None

    def _ask(
        self, method: str, path: str, timeout: float = ASK_TIMEOUT, *, body: bytes | None = None
    ) -> bytes:
        connection, response = self._request(method, path, timeout, body)
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(connection, method, path, timeout, error) from None
        finally:
            connection.end()

    def _request(
        self, method: str, path: str, timeout: float | None, body: bytes | None = None
    ) -> tuple[Connection, http.client.HTTPResponse]:
        """Ask; the connection is the caller's to end, unless this raises."""
        connection, response = self._send(method, f"/v{self._learn().version}{path}", timeout, body)
        if response.status < 300 or response.status == 304:
            return connection, response
        if response.status == 400:
            self._dialect = None  # the engine may be another one since
        answer = b""
        with suppress(OSError, http.client.HTTPException):
            answer = response.read()
        connection.end()
        error = REFUSALS.get(response.status, DockerRefused)
        raise error(_what(method, path), response.status, _message(answer))

    def _learn(self) -> _Dialect:
        """Return the dialect that is known, or ask the engine for it."""
        return self._dialect or self._ask_dialect()

    def _ask_dialect(self) -> _Dialect:
        """Find the newest version that both sides know."""
        connection, response = self._send("GET", "/_ping", ASK_TIMEOUT)
        connection.end()
        named = response.getheader("Api-Version", "")
        if not re.fullmatch(r"\d+\.\d+", named):
            raise Unreachable(f"what answers at {self.endpoint.address} is no Docker Engine")
        spoken = tuple(map(int, named.split(".")))
        if spoken < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise Unreachable(
                f"Docker's API is {named}, and {oldest} is needed: update Docker to 19.03 or later"
            )
        dialect = _Dialect(
            version=".".join(map(str, min(spoken, NEWEST))),
            is_podman=response.getheader("Libpod-Api-Version") is not None,
        )
        self._dialect = dialect
        return dialect

    def _send(
        self, method: str, path: str, timeout: float | None, body: bytes | None = None
    ) -> tuple[Connection, http.client.HTTPResponse]:
        connection = Connection(self.endpoint, timeout)
        try:
            connection.request(method, path, body, {} if body is None else TAR)
            return connection, connection.getresponse()
        except Unreachable:
            connection.end()
            raise
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(connection, method, path, timeout, error) from None

    def _lost(
        self, connection: Connection, method: str, path: str, timeout: float | None, error: Exception
    ) -> Unreachable:
        complaint = connection.complaint()
        connection.end()
        what = _what(method, path)
        if isinstance(error, TimeoutError):
            return Unreachable(f"Docker did not answer {what} within {timeout:g} s; dockerd may be stuck")
        why = complaint or "the connection was closed"
        return Unreachable(f"Docker at {self.endpoint.address} did not answer {what}: {why}. {START_IT}")


class ContainerEvent(NamedTuple):
    """An event of a container, as its engine tells it."""

    kind: str
    """``start``, ``die``, ``pause``, ``unpause`` or ``disconnect``; "": the line was none of them."""
    id: str = ""
    project: str = ""
    service: str = ""
    number: int = 1
    code: int | None = None
    """The exit code of one that ended, if the event has it."""
    name: str = ""
    """The name of the container."""


def read_event(line: str) -> ContainerEvent:
    """Read a line of ``ContainerEngine.events``."""
    event = read_object(line) or {}
    actor = event.get("Actor")
    attributes = actor.get("Attributes") if isinstance(actor, dict) else None
    told = {name: str(value) for name, value in attributes.items()} if isinstance(attributes, dict) else {}
    kind = {"died": "die"}.get(str(event.get("Action")), str(event.get("Action")))
    if not isinstance(actor, dict) or kind not in ("start", "die", "pause", "unpause", "disconnect"):
        return ContainerEvent("")
    return ContainerEvent(
        kind,
        told.get("container", "") if kind == "disconnect" else str(actor.get("ID", "")),
        project=told.get(f"{LABEL}.project", ""),
        service=told.get(f"{LABEL}.service", ""),
        number=count_in(told.get(f"{LABEL}.container-number", "1")) or 1,
        code=count_in(told.get("exitCode", "")),
        name=told.get("name", ""),
    )


def _what(method: str, path: str) -> str:
    """The request as an error names it: without its query, and with ids as people know them."""
    return f"{method} {LONG_ID.sub(lambda id: id[0][:12], path.partition('?')[0])}"


def _path(path: str, **query: object) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _filters(**filters: Sequence[str]) -> str:
    return json.dumps(filters)


def _message(body: bytes) -> str:
    """Read why the engine refuses, for people."""
    text = body.decode(errors="replace").strip()
    with suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["message"])
    return " ".join(text.split()).rstrip(".?")


def _pieces(container: Container, answer: Readable) -> Iterator[bytes]:
    """The output of a container: as it is with a terminal, else each piece behind a head with its length."""
    return _read_pieces(answer) if container.tty else _read_frames(answer)


def _read_pieces(answer: Readable) -> Iterator[bytes]:
    while piece := answer.read1(1 << 16):
        yield piece


def _read_frames(answer: Readable) -> Iterator[bytes]:
    while len(head := answer.read(8)) == 8:
        yield answer.read(struct.unpack(">4xI", head)[0])


# Its address, and a connection to it

DOCKER_SOCKET = "/var/run/docker.sock"
PODMAN_SOCKET = "/run/podman/podman.sock"
START_IT = "Start dockerd, or set DOCKER_HOST; `docker info` tells whether it answers"


class Unreachable(BackendError):
    """The engine does not answer where it should, or not in time."""


@dataclass(frozen=True, slots=True)
class Tls:
    """How an engine and we prove who we are."""

    folder: str
    """The folder of ca.pem, cert.pem and key.pem, or some of them."""
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        ca, cert, key = (Path(self.folder, f"{name}.pem") for name in ("ca", "cert", "key"))
        context = ssl.create_default_context(cafile=str(ca) if ca.exists() else None)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if cert.exists() and key.exists():
            context.load_cert_chain(cert, key)
        return context


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of an engine."""

    address: str
    """A URL: unix:///var/run/docker.sock, tcp://host:2376 or ssh://user@host."""
    tls: Tls | None = None
    found_by_us: bool = False
    """Whether the docker program would look elsewhere, and has to be told."""
    problem: str = ""
    """Why there is no address."""

    @property
    def path(self) -> str | None:
        """The path of the socket, if the engine is on this machine."""
        return self.address.removeprefix("unix://") if self.address.startswith("unix://") else None


def find_endpoint(env: Mapping[str, str]) -> Endpoint:
    """Find the engine that the docker program talks to in this environment, or Podman where there is none."""
    if host := env.get("DOCKER_HOST"):
        verify, asked = bool(env.get("DOCKER_TLS_VERIFY")), bool(env.get("DOCKER_TLS"))
        tls = Tls(env.get("DOCKER_CERT_PATH") or str(_config_folder(env)), verify)
        return Endpoint(host, tls if verify or asked else None)
    name = env.get("DOCKER_CONTEXT") or _context_in_use(env)
    if name and name != "default":
        return _of_context(name, _config_folder(env) / "contexts")
    if os.path.exists(DOCKER_SOCKET):
        return Endpoint(f"unix://{DOCKER_SOCKET}")
    if host := env.get("CONTAINER_HOST"):
        return Endpoint(host, found_by_us=True)
    for path in (
        f"{env.get('XDG_RUNTIME_DIR') or f'/run/user/{os.getuid()}'}/podman/podman.sock",
        PODMAN_SOCKET,
    ):
        if os.path.exists(path):
            return Endpoint(f"unix://{path}", found_by_us=True)
    return Endpoint(f"unix://{DOCKER_SOCKET}")


def _config_folder(env: Mapping[str, str]) -> Path:
    home = env.get("HOME") or os.path.expanduser("~")
    return Path(env.get("DOCKER_CONFIG") or os.path.join(home, ".docker"))


def _context_in_use(env: Mapping[str, str]) -> str:
    return str(_read_json(_config_folder(env) / "config.json").get("currentContext") or "")


def _of_context(name: str, contexts: Path) -> Endpoint:
    folder = sha256(name.encode()).hexdigest()
    endpoint = _read_json(contexts / "meta" / folder / "meta.json").get("Endpoints", {}).get("docker", {})
    if not endpoint.get("Host"):
        lacks = f"there is no docker context {name}: `docker context ls` lists those there are"
        return Endpoint("", problem=lacks)
    secrets = contexts / "tls" / folder / "docker"
    tls = Tls(str(secrets), not endpoint.get("SkipTLSVerify")) if secrets.is_dir() else None
    return Endpoint(endpoint["Host"], tls)


def _read_json(path: Path) -> dict[str, Any]:
    found = read_or_none(text_of(path))
    return found if isinstance(found, dict) else {}


class Connection(http.client.HTTPConnection):
    """One connection to an engine; any thread may end it."""

    def __init__(self, endpoint: Endpoint, timeout: float | None) -> None:
        super().__init__("docker", timeout=timeout)
        self._endpoint = endpoint
        self._wire: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def connect(self) -> None:
        if self._endpoint.problem:
            raise Unreachable(self._endpoint.problem)
        try:
            self.sock = self._connected()
        except PermissionError as error:
            raise self._unreachable(error, "Add this user to the group docker, or set DOCKER_HOST") from None
        except ssl.SSLError as error:
            raise self._unreachable(error, "DOCKER_CERT_PATH names the folder of its certificates") from None
        except (OSError, ValueError) as error:
            raise self._unreachable(error, START_IT) from None

    def wait_for_ever(self) -> None:
        """Lift the time limit from what is read from now on."""
        if self._wire:
            self._wire.settimeout(None)

    def interrupt(self) -> None:
        """End what another thread reads."""
        if self._wire:
            with suppress(OSError):
                socket.socket.shutdown(self._wire, socket.SHUT_RDWR)

    def end(self) -> None:
        self.interrupt()
        self.close()
        if self._wire:
            self._wire.close()
        if self._child:
            self._child.kill()
            self._child.communicate()

    def complaint(self) -> str:
        """Return what ssh printed last, once the connection is closed from its side."""
        if not self._child:
            return ""
        self.interrupt()
        with suppress(subprocess.TimeoutExpired):
            _, printed = self._child.communicate(timeout=1.0)
            return printed.decode(errors="replace").strip().rpartition("\n")[2]
        return ""

    def _connected(self) -> socket.socket:
        url = urlsplit(self._endpoint.address)
        match url.scheme:
            case "unix":
                wire = self._wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                wire.settimeout(self.timeout)
                wire.connect(self._endpoint.path or "")
                return wire
            case "tcp":
                tls = self._endpoint.tls
                place = (url.hostname or "127.0.0.1", url.port or (2376 if tls else 2375))
                self._wire = socket.create_connection(place, self.timeout)
                self._wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if tls:
                    self._wire = tls.context().wrap_socket(self._wire, server_hostname=url.hostname)
                return self._wire
            case "ssh":
                return self._by_ssh()
        raise ValueError("an address begins with unix://, tcp:// or ssh://")

    def _by_ssh(self) -> socket.socket:
        self._wire, theirs = socket.socketpair()
        self._wire.settimeout(self.timeout)
        argv, own = ssh_command(self._endpoint.address), theirs.fileno()
        with theirs:
            self._child = subprocess.Popen(
                argv,
                stdin=own,
                stdout=own,
                stderr=subprocess.PIPE,
                env=without_keys(os.environ),
                start_new_session=True,
            )
        return self._wire

    def _unreachable(self, error: Exception, advice: str) -> Unreachable:
        why = (isinstance(error, OSError) and error.strerror) or error
        return Unreachable(
            f"Cannot connect to the Docker daemon at {self._endpoint.address}: {why}. {advice}"
        )


def ssh_command(address: str) -> list[str]:
    """The command whose input and output are a connection to the engine on another machine."""
    url = urlsplit(address)
    argv = ["ssh", "-o", "ConnectTimeout=30", "-T"]
    argv += ["-l", url.username] if url.username else []
    argv += ["-p", str(url.port)] if url.port else []
    there = ["--host", f"unix://{url.path}"] if url.path.strip("/") else []
    return [*argv, "--", url.hostname or "", "docker", *there, "system", "dial-stdio"]
