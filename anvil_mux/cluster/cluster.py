"""The cluster as one anvil-mux has it: which hosts there are, and that they are its own.

``Cluster`` reaches the control, finds the hosts and claims them, each with an epoch that is higher than any
that its agent has seen. An anvil-mux that finds a higher one on a host of its own was taken over: it ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anvil_mux.clock import Clock
from anvil_mux.cluster.channel import ClusterControl
from anvil_mux.cluster.links import Node
from anvil_mux.cluster.messages import Claimed, Fenced, Owner
from anvil_mux.cluster.remote import LIMIT_SECONDS, RemoteHost
from anvil_mux.config.machines import Gpu, Machine
from anvil_mux.errors import BackendError, MuxError
from anvil_mux.host.seam import HostConfig, Inventory
from anvil_mux.state import write_whole

T = TypeVar("T")


class Cluster:
    """The hosts of a cluster, by name. Used by one thread at a time, but for ``host``, and to read."""

    def __init__(self, control: ClusterControl, clock: Clock | None = None) -> None:
        self.control = control
        self._clock = clock or Clock()
        self._owner = Owner(0, "")
        self._takeover = False
        self._lock = threading.Lock()
        # These are replaced as a whole and never altered; the lock guards that of ``hosts``.
        self.hosts: Mapping[str, RemoteHost] = {}
        """All hosts that were ever seen or named; also those that are not there."""
        self.nodes: Mapping[str, Node] = {}
        """The hosts that were in the cluster when it was last looked at, and may be used."""
        self.problems: Mapping[str, str] = {}
        """Host -> why it cannot be used."""

    def host(self, name: str) -> RemoteHost:
        """Return a host, also of a name that nobody has yet."""
        with self._lock:
            if name not in self.hosts:
                made = RemoteHost(name, self.control, self._clock)
                made.owner, made.takeover = self._owner, self._takeover
                self.hosts = {**self.hosts, name: made}
            return self.hosts[name]

    def look(self, limit: float = LIMIT_SECONDS) -> bool:
        """Look which hosts there are, and what new ones have; whether that has changed. AgentSilent.

        ``limit``: how long the agents of new ones may take to start.
        """
        before = self.machines()
        nodes = {node.name: node for node in sorted(self.control.nodes())}
        problems = {name: node.problem for name, node in nodes.items() if node.problem}
        usable = {name: node for name, node in nodes.items() if name not in problems}
        new = [self.host(name) for name, node in usable.items() if node != self.nodes.get(name)]
        for host in new:
            host.node = usable[host.name]
        problems |= {name: why for name, why in side_by_side(partial(_look_at, limit), new).items() if why}
        self.nodes = {name: node for name, node in usable.items() if name not in problems}
        self.problems = problems
        return self.machines() != before

    def machines(self) -> dict[str, Machine]:
        """Return what the configuration needs to know of all hosts that were ever seen."""
        return {
            name: machine(host.inventory(), host.node.labels)
            for name, host in self.hosts.items()
            if host.inventory().address
        }

    def check(self, part: Callable[[str], HostConfig]) -> list[dict[str, Any]]:
        """Report each host, with what is ``missing`` there; ``part``: of the configuration, by host."""

        def missing(host: RemoteHost) -> list[str]:
            try:
                host.hello()  # the first one may have had to wait for the agent to start
                return host.lacks(part(host.name))
            except MuxError as error:
                return [error.message]

        here = [self.hosts[name] for name in self.nodes]
        found = side_by_side(missing, here)
        told: list[dict[str, Any]] = [
            {"host": each.name, "state": "here", **each.report(), "missing": found[each.name]}
            for each in here
        ]
        for name, problem in self.problems.items():
            told.append({"host": name, "state": "unusable", "missing": [problem]})
        return told

    def claim(self, folder: Path, name: str, *, takeover: bool) -> None:
        """Claim all hosts that are there; Claimed if another anvil-mux has one, and none is kept then."""
        self._owner = Owner(0, owner_id(folder), f"{name} on {socket.gethostname()}")
        self._takeover = takeover
        for host in self.hosts.values():
            host.owner, host.takeover = self._owner, takeover
        for host in [self.hosts[each] for each in self.nodes]:
            try:
                host.claim()
            except (Claimed, Fenced):
                self.release()
                raise
            except MuxError:
                continue  # it is claimed when it answers

    def recall(self) -> dict[str, str]:
        """Return the texts that the hosts keep for their owner, by name."""

        def recall(host: RemoteHost) -> str:
            try:
                return host.recall()
            except MuxError:
                return ""

        return side_by_side(recall, [self.hosts[each] for each in self.nodes])

    def release(self) -> None:
        """Let another anvil-mux have the hosts, as far as they can be told."""
        side_by_side(_release, [self.hosts[each] for each in self.nodes])

    def close(self) -> None:
        """End all calls, and what was started to make them; agents and engines run on."""
        for host in self.hosts.values():
            host.close()
        self.control.close()


def machine(found: Inventory, labels: tuple[tuple[str, str], ...]) -> Machine:
    """Return what the configuration needs to know of a host."""
    gpus = tuple(
        [Gpu(gpu.id, gpu.total, shared=gpu.shared, file=next(iter(gpu.files), "")) for gpu in found.gpus]
    )
    return Machine(gpus, found.memory, found.address, labels)


def owner_id(folder: Path) -> str:
    """Return what tells the anvil-mux of one state folder from others, in every run; BackendError."""
    file = folder / "owner"
    try:
        with suppress(FileNotFoundError):
            if found := file.read_text().strip():
                return found
        made = secrets.token_hex(8)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        write_whole(file, made, is_durable=True)
        return made
    except (OSError, ValueError) as error:
        raise BackendError(
            f"{file} cannot be read or written ({error}), and says which hosts are its own"
        ) from None


def side_by_side(do: Callable[[RemoteHost], T], hosts: Iterable[RemoteHost]) -> dict[str, T]:
    """Do something on each host, side by side; return what it says, by the host's name."""
    hosts = list(hosts)
    with ThreadPoolExecutor(len(hosts) or 1) as pool:
        return dict(zip([host.name for host in hosts], pool.map(do, hosts), strict=True))


def _look_at(limit: float, host: RemoteHost) -> str:
    """Learn what a host has; why it cannot be used, or ""."""
    try:
        host.hello(limit)
        host.look()
    except MuxError as error:
        return error.message
    return ""


def _release(host: RemoteHost) -> str:
    try:
        host.release()
    except MuxError as error:
        return error.message
    return ""
