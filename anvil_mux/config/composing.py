"""Compose services described anew, each for one host and the GPUs that it has there.

Docker gives a container the GPUs that its service reserves, and Compose gives all containers of a service the
same ones. So a candidate whose GPUs are not what its service reserves, or that is on another host, becomes a
service of its own, named like its backend, in one more compose file. Pure: mappings in, text out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anvil_mux.config import devices, service
from anvil_mux.config.compose import Content
from anvil_mux.config.config import LABEL
from anvil_mux.config.diagnostic import with_texts
from anvil_mux.config.service import RawService

HERE = "127.0.0.1"
"""The address of engines on the machine that anvil-mux runs on."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
UNPRINTABLE = re.compile(r"[\x7f-\x9f\ud800-\udfff\ufeff\ufffe\uffff]")
"""The characters for which JSON is no YAML: that has them in an escaped form only."""
LEFT_OUT = ("container_name", "scale", "env_file")
"""Keys that cannot be those of several services, or whose content stands elsewhere in the description."""
LEFT_HERE = ("build", "depends_on", "links", "external_links", "volumes_from")
"""Keys that mean something on the machine of the compose file alone."""
SHARES = ("network_mode", "ipc", "pid")
"""Keys by which a service may share another one's namespace."""


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a candidate that decides how its service is described."""

    gpus: tuple[str, ...]
    port: int | None
    """The port of its engine; None: not known."""
    alone: bool
    """Whether no other candidate of the service is on the host, so that it may have fixed ports there."""
    elsewhere: bool
    """Whether the host is another than that of the compose file."""
    files: tuple[str, ...] = ()
    """The device file of each of the GPUs; "" where it has none, or that is not known."""


def described_anew(
    described: RawService, place: Place, *, variables: Mapping[str, str], image: str
) -> dict[str, Any]:
    """The service for one place; the address at which its port is published is left open: ``at``.

    ``variables``: its environment, resolved. ``image``: the image of a service that is built.
    """
    left_out = (*LEFT_OUT, *(LEFT_HERE if place.elsewhere else ()))
    made = {n: value for n, value in described.items() if n not in left_out and not str(n).startswith("x-")}
    made.setdefault("image", image)
    made["environment"] = dict(variables)
    if "labels" in made:
        theirs = service.labels(described, "")
        made["labels"] = {name: text for name, text in theirs.items() if not name.startswith(LABEL)}
    if isinstance(deploy := made.get("deploy"), Mapping):
        made["deploy"] = {name: value for name, value in deploy.items() if name != "replicas"}
    if place.gpus:
        _give(made, described, place.gpus, place.files)
    if str(described.get("network_mode", "")) != "host":
        made["ports"] = [*_ports(described, place)]
    return made


def at(address: str, made: RawService) -> dict[str, Any]:
    """The description with the address of its host, at which its engine is reached."""
    ports = [
        {**port, "host_ip": address} if isinstance(port, dict) and port.get("host_ip") is None else port
        for port in made.get("ports", ())
    ]
    return {**made, **({"ports": ports} if ports else {})}


def cannot_leave(described: RawService, port: int | None) -> Iterator[tuple[str, str]]:
    """Why a service cannot run on another host: (key, reason)."""
    for key in SHARES:
        if str(described.get(key) or "").startswith(("service:", "container:")):
            yield key, "shares what only the host of the compose file has, and x-anvil.hosts names others"
    if port is None and str(described.get("network_mode", "")) != "host":
        yield "x-anvil", "port is needed, since its engine is reached by it on other hosts: {port: ...}"


def caveats(described: RawService, image: str) -> Iterator[str]:
    """Warnings of what a service leaves behind that runs on another host."""
    if needed := [*_names(described.get("depends_on")), *_names(described.get("links"))]:
        yield f"depends on {', '.join(dict.fromkeys(needed))}, which other hosts are not given"
    if "build" in described:
        yield f"is built, and other hosts need its image {image}: push it, and name it with `image:`"


# GPUs


def _give(made: dict[str, Any], described: RawService, gpus: Sequence[str], files: Sequence[str]) -> None:
    """Have the description reserve these GPUs, in the way that it reserves some; "none" stays none.

    ``files``: the device files of GPUs of AMD and Intel; "" where that is not known.
    """
    environment = made["environment"]
    requests = [*devices.gpu_requests(described)]
    if devices.others_gpus(described, {}):
        if devices.reserves_others(described):
            made.pop("gpus", None)
            _reserve(made, described, requests, gpus)
        elif all(files):
            made |= devices.narrowed(made, files)
        return
    if not devices.reserves_gpu(described):
        environment |= {name: ",".join(gpus) for name in VISIBLE if name in environment}
        return
    for name in VISIBLE:
        environment.pop(name, None)  # they would count from 0 among those that the container has
    made.pop("gpus", None)
    if made.get("runtime") == "nvidia":
        made.pop("runtime")
    listed = made.get("devices") or ()
    if any(map(devices.cdi_gpu, listed)):
        named = [f"{devices.NVIDIA_CDI}={id}" for id in gpus]
        made["devices"] = [*(each for each in listed if not devices.cdi_gpu(each)), *named]
    if requests or not any(map(devices.cdi_gpu, listed)):
        _reserve(made, described, requests, gpus)


def _reserve(
    made: dict[str, Any], described: RawService, requests: Sequence[Mapping[str, Any]], gpus: Sequence[str]
) -> None:
    first = requests[0] if requests else {"driver": "nvidia"}
    request = {key: first[key] for key in ("driver", "options") if first.get(key)}
    wanted = dict.fromkeys(each for request in requests for each in request.get("capabilities") or ())
    request |= {"device_ids": devices.device_ids(first, gpus), "capabilities": [*(wanted or ("gpu",))]}
    others = [device for device in devices.reserved_devices(described) if not devices.is_gpu_request(device)]
    deploy = made.get("deploy") or {}
    resources = deploy.get("resources") or {}
    reservations = {**(resources.get("reservations") or {}), "devices": [*others, request]}
    made["deploy"] = {**deploy, "resources": {**resources, "reservations": reservations}}


# Ports


def _ports(described: RawService, place: Place) -> Iterator[Any]:
    """The published ports; ``host_ip`` None: the host's address, as the engine's port has it."""
    inside = set()
    for written in described.get("ports") or ():
        found = service.published({"ports": [written]})
        if not found and place.alone:
            yield written
        for port in found:
            inside.add(port.inside)
            address = None if port.inside == place.port else port.address
            made = {"target": port.inside, "protocol": "tcp", "host_ip": address}
            yield {**made, **({"published": str(port.outside)} if port.outside and place.alone else {})}
    if place.elsewhere and place.port and place.port not in inside:
        yield {"target": place.port, "protocol": "tcp", "host_ip": None}


# The file


class ComposedFiles:
    """The compose files of services that are described anew, by host.

    ``content``: what the files say; ``folder``: where paths begin that Compose has not made absolute.
    """

    def __init__(self, content: Content, folder: Path) -> None:
        self._content = content
        self._folder = folder
        self._services: dict[str, dict[str, RawService]] = {}

    def add(self, host: str, name: str, made: RawService) -> None:
        self._services.setdefault(host, {})[name] = self._rooted(made)

    def texts(self) -> dict[str, str]:
        """Host -> the text of its file."""
        return {host: self._text(services) for host, services in self._services.items()}

    def _text(self, services: Mapping[str, RawService]) -> str:
        shared = {
            kind: found
            for kind, known in self._content.shared.items()
            if (found := {name: self._own(name, known[name]) for name in _used(kind, services, known)})
        }
        text = json.dumps(with_texts({"services": services, **shared}, _escaped), ensure_ascii=False)
        return UNPRINTABLE.sub(lambda each: f"\\u{ord(each[0]):04x}", text)

    def _own(self, name: str, about: Any) -> Any:
        """A volume, network, ...: without the name that Compose has made of the project's, and rooted."""
        if not isinstance(about, dict):
            return about
        kept = {k: v for k, v in about.items() if (k, v) != ("name", f"{self._content.project}_{name}")}
        return {**kept, "file": self._path(kept["file"])} if isinstance(kept.get("file"), str) else kept

    def _rooted(self, made: RawService) -> RawService:
        """The service with absolute paths, as the Compose program gives it."""
        volumes = made.get("volumes")
        if not self._content.plain or not isinstance(volumes, list):
            return made
        return {**made, "volumes": [self._volume(each) for each in volumes]}

    def _volume(self, written: Any) -> Any:
        if isinstance(written, dict):
            bound = written.get("type") == "bind" and isinstance(written.get("source"), str)
            return {**written, "source": self._path(written["source"])} if bound else written
        source, colon, rest = str(written).partition(":")
        return f"{self._path(source)}:{rest}" if colon and source.startswith((".", "~")) else written

    def _path(self, written: str) -> str:
        return os.path.abspath(self._folder / os.path.expanduser(written))


def _used(kind: str, services: Mapping[str, RawService], known: Mapping[str, Any]) -> list[str]:
    """The volumes, networks, secrets or configs that the services use, of those that are described."""
    names = {name for made in services.values() for name in _sources(kind, made)}
    return [name for name in known if name in names]


def _sources(kind: str, made: RawService) -> Iterable[str]:
    if kind == "networks":
        return [*_names(made.get("networks"))] or ["default"]
    return [*_names(made.get(kind))]


def _names(written: Any) -> Iterator[str]:
    """The names in one of Compose's lists of things that stand elsewhere: short, long, or a mapping."""
    for each in written or ():
        yield str(each.get("source", "")) if isinstance(each, dict) else str(each).partition(":")[0]


def _escaped(text: str) -> str:
    """The text as a compose file has it, where a single $ begins a variable."""
    return text.replace("$", "$$")
