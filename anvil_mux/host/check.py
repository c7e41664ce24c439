"""The questions of commands about this machine: which GPUs it has, and what it lacks for a configuration.

Each imports only what it uses.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import Diagnostic, advice
from anvil_mux.config.reading import services
from anvil_mux.host.seam import LOOPBACK, HostConfig, HostGpu

if TYPE_CHECKING:
    from anvil_mux.host.docker_api import About

DRIVERS = ("/dev/nvidiactl", "/sys/class/drm/card0", "/sys/class/drm/card1")
"""Files that are there if a driver of GPUs is."""
PODMAN_CDI = (5, 4)
"""The release of Podman from which on it has GPUs for what Compose makes, if they are asked for by CDI."""
LIMITS_PAGE = "running.md#docker-or-podman"
"""The page of docs/ about what Docker and Podman cannot do."""
IN_CONTAINER = ("/.dockerenv", "/run/.containerenv")
"""Files of which one is there if this program itself is in a container."""


def gpus_here() -> tuple[HostGpu, ...]:
    """The GPUs of this machine; none is looked for where there is no driver of theirs."""
    if not any(map(os.path.exists, DRIVERS)) and "NVIDIA_VISIBLE_DEVICES" not in os.environ:
        return ()
    from anvil_mux.host import gpus

    return gpus.probe().listed


class VendorGpus(NamedTuple):
    """The GPUs of one vendor in this machine."""

    vendor: str
    gpus: tuple[HostGpu, ...]
    note: str
    """Why there are none, or what is to be known of those that there are."""


def gpus_by_vendor() -> list[VendorGpus]:
    """Look at the GPUs of this machine, vendor by vendor."""
    from anvil_mux.host import gpus

    nvidias, cards = gpus.nvidia_gpus(), gpus.amd_intel_gpus()
    driver = nvidias.driver and f"driver {nvidias.driver}"
    told = "; ".join(filter(None, (driver, *nvidias.problems)))
    found = [VendorGpus("NVIDIA", nvidias.listed, nvidias.why_none or told)]
    for vendor, name in gpus.VENDOR_NAMES.items():
        own = tuple(each for each in cards.listed if each.id.startswith(vendor))
        unseen = bool(own) and not gpus.clients()[1]
        note = (
            "only some of the processes that hold their memory are known: root alone sees all"
            if unseen
            else ""
        )
        found.append(VendorGpus(name, own, note if own else cards.why_none or "no card in /sys/class/drm"))
    return found


def bus(backend: Backend) -> float | None:
    """Bytes per second that the buses of its GPUs carry together; None where one of them is unknown."""
    from anvil_mux.host import gpus

    found = gpus.look()
    links = [reading.bus for each in backend.gpus if (reading := found.find(each))]
    return sum(link or 0.0 for link in links) if links and all(links) else None


def why_not_checkpoint(gpus: Sequence[str], insist: bool) -> str | None:
    """Why no service on these GPUs can be checkpointed; None: it can. ``insist``: several are allowed."""
    from anvil_mux.host.cuda_checkpoint import Checkpointer

    return Checkpointer().why_not(gpus, insist=insist)


def engine_limits(config: HostConfig) -> list[str]:
    """A warning for what the container engine cannot do; BackendError if it cannot be asked."""
    if config.runtime != "compose" or not config.backends:
        return []
    from anvil_mux.host.docker_api import ContainerEngine, find_endpoint

    about = ContainerEngine(find_endpoint(os.environ)).about()
    lacking: dict[str, dict[str, None]] = {}
    for backend in config.backends:
        for what in _lacks(backend, about):
            lacking.setdefault(what, {})[backend.service_name] = None
    return [
        Diagnostic(
            f"{', '.join(names)}: {what}",
            key=("services", next(iter(names)), "runtime"),
            page=LIMITS_PAGE,
        )
        for what, names in lacking.items()
    ]


def _lacks(backend: Backend, about: About) -> Iterator[str]:
    frozen = [level for level in backend.evict_to if level in ("freeze", "checkpoint")]
    if frozen and about.rootless and about.cgroup == "1":
        yield (
            f"{' and '.join(frozen)} cannot work: an engine without root freezes nothing on cgroup v1, so it "
            "is stopped; boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1)"
        )
    if not about.podman:
        return
    if backend.service.gpus_by == "reservation":
        ids = ", ".join(f"nvidia.com/gpu={id}" for id in backend.gpus) or "nvidia.com/gpu=all"
        yield f"Podman silently ignores GPU reservations: write devices: [{ids}] (CDI) instead"
    if backend.service.gpus_by == "cdi" and about.release < PODMAN_CDI:
        newer = ".".join(map(str, PODMAN_CDI))
        yield f"Podman {about.podman} takes no GPU of CDI from Compose; {newer} does, with Compose 2.30"


def missing_externals(config: HostConfig) -> list[str]:
    """A warning for each volume or network that Compose does not make and the engine does not have.

    BackendError if it cannot be asked.
    """
    users: dict[tuple[str, str], list[str]] = {}
    for name, backend in _by_service(config).items():
        for external in backend.service.externals if config.runtime == "compose" else ():
            users.setdefault(external, []).append(name)
    if not users:
        return []
    from anvil_mux.host.docker_api import ContainerEngine, find_endpoint

    engine = ContainerEngine(find_endpoint(os.environ))
    lists: dict[str, Callable[[], set[str]]] = {"volumes": engine.volumes, "networks": engine.networks}
    present = {kind: lists[kind]() for kind in {kind for kind, _ in users}}
    return [
        advice(
            f"{services(names)}: the external {kind.removesuffix('s')} {external} does not exist",
            f"docker {kind.removesuffix('s')} create {external}",
            f"make it with `docker {kind.removesuffix('s')} create {external}`",
            key=("services", names[0], kind),
        )
        for (kind, external), names in users.items()
        if external not in present[kind]
    ]


def busy_ports(config: HostConfig) -> list[str]:
    """A warning for each port of this machine that a service needs and somebody else has; BackendError.

    A port that an engine of this project has is not among them.
    """
    wanted: dict[int, dict[str, str]] = {}
    for name, backend in _by_service(config).items():
        for address, port in _ports_taken(config, backend):
            wanted.setdefault(port, {}).setdefault(name, address)
    if not wanted:
        return []
    holders, is_here = _holders(config)
    from anvil_mux.host.listeners import find_listeners
    from anvil_mux.host.processes import is_taken

    taken = [
        port
        for port, users in wanted.items()
        if is_here and port not in holders and any(is_taken(each, port) for each in users.values())
    ]
    listeners = find_listeners(taken)
    for port in taken:
        found = listeners.get(port)
        holders[port] = f"{found.program} (process {found.pid})" if found else "another program"
    remedy = "leave out `port`" if config.runtime == "process" else "publish a free one: 127.0.0.1::PORT"
    return [
        Diagnostic(
            f"{services([*users])}: port {port} of its host is in use by {who}; end that, or {remedy}",
            key=("services", next(iter(users)), "ports"),
        )
        for port, users in wanted.items()
        if (who := holders.get(port))
    ]


def _by_service(config: HostConfig) -> dict[str, Backend]:
    return {backend.service_name: backend for backend in config.backends}


def _ports_taken(config: HostConfig, backend: Backend) -> Iterator[tuple[str, int]]:
    """Yield the addresses and ports of this machine that a backend takes while it runs."""
    from anvil_mux.host.engines import listen_port

    yield from backend.service.ports
    if config.runtime == "process" and backend.port:
        yield LOOPBACK, backend.port
    elif backend.service.on_host_network:
        yield "", listen_port(backend)


def _holders(config: HostConfig) -> tuple[dict[int, str], bool]:
    """Return who is known to have ports, for people, and whether the ports of services are those seen here.

    An engine of this project is "". From within a container the ports of its host are not seen.
    """
    if config.runtime == "process":
        from anvil_mux.host.runs import marked_runs

        return {
            port: "" if run.project == config.project else f"{run.backend} of the project {run.project}"
            for run in marked_runs()
            if (port := urlsplit(run.url).port)
        }, True
    from anvil_mux.host.docker_api import ContainerEngine, find_endpoint

    endpoint = find_endpoint(os.environ)
    engine, ours = ContainerEngine(endpoint), _by_service(config)
    holders = {
        port: ""
        if (each.project, each.service in ours) == (config.project, True)
        else f"the container {each.id}"
        for port, each in engine.published().items()
    }
    on_host = [each for each in ours.values() if each.service.on_host_network]
    if on_host:  # no port is published then
        running = {(each.project, each.service) for each in engine.running()}
        for backend in on_host:
            if (config.project, backend.service_name) in running:
                holders |= {port: "" for _, port in _ports_taken(config, backend)}
    return holders, endpoint.path is not None and not _is_in_container()


def _is_in_container() -> bool:
    """Return whether this runs in a container, where the files and ports of its host are not seen."""
    return any(map(os.path.exists, IN_CONTAINER))


def missing_rights(config: HostConfig) -> list[str]:
    """A warning for each right that a checkpoint needs, and whoever runs this has not."""
    if not any("checkpoint" in backend.evict_to for backend in config.backends):
        return []
    from anvil_mux.host import cuda_checkpoint
    from anvil_mux.host.local import build_runtime

    return cuda_checkpoint.missing_rights(config, build_runtime(config))


def missing_files(config: HostConfig) -> list[str]:
    """A warning for each program, file of weights and mounted folder that backends need and is not there."""
    from anvil_mux.host.docker_api import find_endpoint

    folders = [Path(file).absolute().parent for file in config.files]
    is_process = config.runtime == "process"
    if not is_process and find_endpoint(os.environ).path is None:
        return []
    sees_all = is_process or not _is_in_container()
    lacking: dict[tuple[str, str], list[str]] = {}
    for name, backend in _by_service(config).items():
        for key, place, text in (_programs if is_process else _mounts)(backend, folders):
            if sees_all or any(folder in Path(place).parents for folder in folders):
                lacking.setdefault((key, text), []).append(name)
    return [
        Diagnostic(f"{services(names)}: {text}", key=("services", names[0], key))
        for (key, text), names in lacking.items()
    ]


def _programs(backend: Backend, folders: Sequence[Path]) -> Iterator[tuple[str, str, str]]:
    """Key, path and text of each file that a local process lacks."""
    known = dict(backend.service.environment)
    folder = backend.service.working_dir or str(folders[0] if folders else Path.cwd())
    if not os.path.isdir(folder):
        yield "working_dir", folder, f"its working_dir {folder} is not there"
        return
    program = backend.service.command[0]
    path = os.path.normpath(os.path.join(folder, program)) if "/" in program else program
    if shutil.which(path, path=known.get("PATH", os.environ.get("PATH"))) is None:
        text = f"its program {path} is not there, or may not be run"
        yield "command", path, text if "/" in program else f"its program {program} is not on PATH"
    yield from _weights(backend)


def _mounts(backend: Backend, folders: Sequence[Path]) -> Iterator[tuple[str, str, str]]:
    """Key, path and text of each file that a container lacks."""
    absent = [place for _, place in backend.service.mounts if place and not os.path.exists(place)]
    for place in absent:
        yield "volumes", place, f"it mounts {place}, which is not there: Docker makes an empty folder of it"
    for key, place, text in _weights(backend):
        if not any(Path(each) in (Path(place), *Path(place).parents) for each in absent):
            yield key, place, text


def _weights(backend: Backend) -> Iterator[tuple[str, str, str]]:
    from anvil_mux.host.weights import missing

    for place in missing(backend):
        yield "command", place, f"its model {place} is not there"


def shared_gpus() -> list[str]:
    """Say which GPUs of this machine several anvil-mux use."""
    from anvil_mux.host import claims

    return claims.shared_gpus(os.environ)


def gpus_of_others(config: HostConfig) -> list[str]:
    """Say which GPUs of a configuration an anvil-mux of another project uses."""
    from anvil_mux.host import claims
    from anvil_mux.host.gpus import identities

    named = {gpu for backend in config.backends for gpu in backend.gpus}
    gpus = set(identities(named).values())
    return [
        f"GPU {each.gpu} is used by another anvil-mux: {each.who}"
        for each in claims.claimed_gpus(os.environ)
        if each.gpu in gpus and each.project != config.project
    ]


def occupants(config: HostConfig) -> list[str]:
    """Say which engines of others run here, with the commands that end them; BackendError.

    Those that ``anvil-mux stop --all`` ends are left out: they are told by project.
    """
    from anvil_mux.host.occupants import STOP, find_occupants
    from anvil_mux.state import state_folder

    found = find_occupants(config, state_folder(config.project, os.environ), os.environ, lambda pid: None)
    told = [each for each in found if each.end != STOP]
    return [each.advice for each in told]


def engines_of_other_users() -> list[str]:
    """Say which engines of other users run here, with the commands that end them."""
    from anvil_mux.host.occupants import of_other_users

    return [each.advice for each in of_other_users(os.environ)]


def questions() -> Sequence[Callable[[HostConfig], list[str]]]:
    """All questions about what a host may lack for a configuration."""
    from anvil_mux.host.project import missing_images

    return missing_files, missing_images, missing_externals, busy_ports, engine_limits, missing_rights
