"""One container, as the answer to an inspect describes it: its state, its address, how it ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from anvil_mux.clock import count_in
from anvil_mux.config.config import Service
from anvil_mux.host.seam import LOOPBACK, url_of

ALIVE = frozenset({"running", "paused", "restarting", "stopping"})
HALF_REMOVED = frozenset({"removing", "dead"})
LABEL = "com.docker.compose"
MOMENT = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)")
"""Docker's moments are UTC to the nanosecond; Podman's are of its time zone."""
ANYWHERE = ("", "0.0.0.0", "::")
"""The addresses that stand for all of the host."""


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
