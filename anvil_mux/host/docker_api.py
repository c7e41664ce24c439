"""The Docker Engine API: what is asked of an engine, its answers, and a container as an inspect describes it.

``ContainerEngine`` is all that this program asks of one. Nothing here pulls or builds an image. An
answer's status says what happened, and its ``message`` is for people only: 304 means that it was so
already, 404 that there is no such thing, 409 that the state of the container is in the way. A request
that could not be made at all is ``Unreachable``. Podman answers the same requests, and where it differs is
known by ``Libpod-Api-Version``.

What a killed anvil-mux has asked for goes on without it. An engine holds the lock of a container while it
starts it, and inspects under that lock, so ``inspect`` shows what came of the start. Of one that is being
stopped only an event tells: ``signalled``.
"""

from __future__ import annotations

import http.client
import io
import json
import math
import re
import signal
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

from anvil_mux.clock import count_in
from anvil_mux.config.service import Service
from anvil_mux.errors import BackendError
from anvil_mux.host.docker_endpoint import START_IT, Connection, Endpoint, Unreachable
from anvil_mux.host.seam import LOOPBACK, url_of
from anvil_mux.protocol.foreign import Lines

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
ANYWHERE = ("", "0.0.0.0", "::")
"""The addresses that stand for all of the host."""
LATELY = 600.0
END_SIGNALS = frozenset({"2", "3", "9", "15"})
LONG_ID = re.compile(r"[0-9a-f]{64}")
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
    network_mode: str = ""
    ports: tuple[tuple[str, str, int], ...] = ()
    """The published ports: (port inside, such as 8080/tcp; address; port outside)."""
    ips: tuple[str, ...] = ()
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


def how_it_ended(container: Container) -> str | None:
    """Say for people how it ended; None while it runs."""
    if container.status in ("running", "paused", "stopping"):
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
        network_mode=host.get("NetworkMode", ""),
        ports=tuple(_bindings(bound)),
        ips=tuple(
            each["IPAddress"] for each in (network.get("Networks") or {}).values() if each.get("IPAddress")
        ),
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
        self.answer = answer
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


class ContainerEngine:
    """Asks one container engine; every call is bounded in time, and made on a connection of its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        # Learned before the first question, and again after an answer that says it is wrong.
        self._version = ""
        self._is_podman = False

    # Containers

    def containers(self, project: str, service: str = "") -> list[tuple[str, str]]:
        """Return id and service of each container of a project, whatever its state, but one-off runs."""
        labels = {"project": project, "oneoff": "False", "service": service}
        words = [f"{LABEL}.{name}={value}" for name, value in labels.items() if value]
        listed = self._json("/containers/json", all=1, filters=_filters(label=words))
        return [(each["Id"], (each.get("Labels") or {}).get(f"{LABEL}.service", "")) for each in listed]

    def inspect(self, id: str) -> Container | None:
        """Describe a container; None if it is gone."""
        try:
            return read_container(self._json(f"/containers/{id}/json"))
        except Missing:
            return None

    def start(self, id: str) -> None:
        self._ask("POST", f"/containers/{id}/start", START_TIMEOUT)

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
        self._learn()
        wanted = "hpid" if self._is_podman else "-eo pid"
        try:
            body = self._ask("GET", _path(f"/containers/{id}/top", ps_args=wanted))
        except (Missing, Conflict):
            return []
        rows = json.loads(body)["Processes"] if body else None
        # Null: Docker within a container may not find the control group, and then lists nothing.
        return [int(word) for row in rows or () for word in row[:1] if word.isdecimal()]

    # The engine itself

    def has_image(self, name: str) -> bool:
        return bool(self.image_id(name))

    def image_id(self, name: str) -> str:
        """The id of the image that has this name; "" if none has."""
        try:
            return str(self._json(f"/images/{quote(name, safe='/:@')}/json")["Id"])
        except Missing:
            return ""

    def runtimes(self) -> list[str]:
        """The low-level runtimes that it knows, such as runc and nvidia."""
        return list(self._json("/info").get("Runtimes") or ())

    def about(self) -> About:
        """Ask the engine which one it is, and how it runs."""
        info = self._json("/info")
        rootless = bool(info.get("Rootless")) or "name=rootless" in (info.get("SecurityOptions") or ())
        version = str(info.get("ServerVersion") or "") if self._is_podman else ""
        return About(version, rootless, str(info.get("CgroupVersion") or ""))

    def ping(self) -> None:
        """Raise Unreachable if the engine does not answer."""
        self._version = ""
        self._learn()

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

    def deaths(self, project: str, since: float) -> Stream:
        """A line for each end of a container of the project; see ``read_death``."""
        # Podman's filters call an end died, and its events call it die.
        filters = _filters(type=["container"], event=["die", "died"], label=[f"{LABEL}.project={project}"])
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

    def _ask(self, method: str, path: str, timeout: float = ASK_TIMEOUT) -> bytes:
        connection, response = self._request(method, path, timeout)
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(connection, method, path, timeout, error) from None
        finally:
            connection.end()

    def _request(
        self, method: str, path: str, timeout: float | None
    ) -> tuple[Connection, http.client.HTTPResponse]:
        """Ask; the connection is the caller's to end, unless this raises."""
        self._learn()
        connection, response = self._send(method, f"/v{self._version}{path}", timeout)
        if response.status < 300 or response.status == 304:
            return connection, response
        if response.status == 400:
            self._version = ""  # the engine may be another one since
        answer = b""
        with suppress(OSError, http.client.HTTPException):
            answer = response.read()
        connection.end()
        error = REFUSALS.get(response.status, DockerRefused)
        raise error(_what(method, path), response.status, _message(answer))

    def _learn(self) -> None:
        """Find the newest version that both sides know."""
        if self._version:
            return
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
        self._is_podman = response.getheader("Libpod-Api-Version") is not None
        self._version = ".".join(map(str, min(spoken, NEWEST)))

    def _send(
        self, method: str, path: str, timeout: float | None
    ) -> tuple[Connection, http.client.HTTPResponse]:
        connection = Connection(self.endpoint, timeout)
        try:
            connection.request(method, path)
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


def read_death(line: str) -> tuple[str, int | None]:
    """The id of the container that ended, and its exit code if the event has it."""
    try:
        event = json.loads(line)
        actor = event["Actor"]
        code = str((actor.get("Attributes") or {}).get("exitCode", ""))
        return str(actor["ID"]), int(code) if code.isdecimal() else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", None


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
