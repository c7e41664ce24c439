"""The cluster as one anvil-mux has it: how it is reached, which hosts there are, and that they are its own.

``Cluster`` finds the hosts by way of a control and claims them, each with an epoch that is higher than any
that its agent has seen. An anvil-mux that finds a higher one on a host of its own was taken over: it ends.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from anvil_mux.clock import Clock, side_by_side
from anvil_mux.cluster.channel import AgentSilent, ChildControl, ClusterControl
from anvil_mux.cluster.frames import Claimed, Fenced, Node, Owner
from anvil_mux.cluster.remote import LIMIT_SECONDS, RemoteHost
from anvil_mux.cluster.simulated import RETURN_SECONDS, SimulatedHosts
from anvil_mux.config.machines import Gpu, Machine
from anvil_mux.errors import BackendError, MuxError
from anvil_mux.host.local import inventory, machine_id
from anvil_mux.host.seam import HostConfig, Inventory
from anvil_mux.state import SIMULATED, state_folder, write_whole

AGENT_SECONDS = 15.0
"""How long the agents of hosts may take to start when the cluster is reached."""
START_SECONDS = 5.0
"""The same where hosts that are later join: a host that hangs does not hold up the others for long."""
LOG_SIZE = 1 << 20
"""Bytes of the log of Ray after which another one is begun; the one before is kept."""
LOCAL = "local"
"""The cluster of simulated hosts."""

T = TypeVar("T")


class CannotReach(MuxError):
    """The cluster cannot be reached, or may not be used as it is; the message says what to do."""


def reach(
    address: str,
    say: Callable[[str], object],
    *,
    insecure: bool = False,
    patience: float = AGENT_SECONDS,
) -> Cluster:
    """Reach a cluster, and look which hosts it has; CannotReach.

    ``address``: HEAD:PORT, or ``local``, of which ``say`` is told what can be tried. ``insecure``: whether it
    may do without a token. ``patience``: how long the agents of hosts may take to start.
    """
    control: ChildControl | SimulatedHosts
    if address == LOCAL:
        control = SimulatedHosts(state_folder(SIMULATED, os.environ))
    elif importlib.util.find_spec("ray") is None:
        raise CannotReach("--cluster needs Ray: pip install 'anvil-mux[ray]' (bin/anvil-mux brings it)")
    else:
        words = [sys.executable, "-m", "anvil_mux.cluster.ray_link", address]
        control = ChildControl([*words, *(["--insecure"] if insecure else [])], log=_log_of_ray())
    cluster = Cluster(control, own=identity(machine_id(os.environ), inventory()))
    try:
        control.open()
        cluster.refresh(patience)
    except AgentSilent as error:
        cluster.close()
        raise CannotReach(f"the cluster at {address} cannot be used: {error.message}") from None
    if isinstance(control, SimulatedHosts):
        for name, pid in control.pids().items():
            later = f"{RETURN_SECONDS:g} s later"
            say(f"host {name} is process {pid}: `kill {pid}` is a power failure, and it returns {later}")
    return cluster


def _log_of_ray() -> Path | None:
    """Return the file for what Ray itself prints; None where there can be none."""
    file = state_folder("cluster", os.environ) / "ray.log"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file.open("ab") as log:
            is_full = log.tell() > LOG_SIZE
        if is_full:
            os.replace(file, file.with_suffix(".log.1"))
    except OSError:
        return None
    return file


class Identity(NamedTuple):
    """The id of a machine and those of its GPUs, by which it is told from others."""

    machine: str = ""
    """"": not known."""
    gpus: frozenset[str] = frozenset()

    def is_same(self, other: Identity) -> bool:
        """Whether both are one machine; containers that were given different GPUs of one are not."""
        are_apart = self.gpus and other.gpus and self.gpus.isdisjoint(other.gpus)
        return self.machine != "" and self.machine == other.machine and not are_apart


def identity(machine: str, found: Inventory) -> Identity:
    return Identity(machine, frozenset(gpu.uuid for gpu in found.gpus if gpu.uuid))


class Cluster:
    """The hosts of a cluster, by name. Used by one thread at a time, but for ``host``, and to read.

    ``own``: the machine that anvil-mux runs on.
    """

    def __init__(
        self, control: ClusterControl, clock: Clock | None = None, own: Identity | None = None
    ) -> None:
        self.control = control
        self._own = own or Identity()
        self._clock = clock or Clock()
        self._owner = Owner(0, "")
        self._takeover = False
        self._lock = threading.Lock()
        # These are replaced as a whole and never altered; the lock guards that of ``hosts``.
        self.hosts: Mapping[str, RemoteHost] = {}
        """All hosts that were ever seen or named; also those that are not there."""
        self.nodes: Mapping[str, Node] = {}
        """The hosts that are ``here``, as the cluster knows them."""
        self.problems: Mapping[str, str] = {}
        """Host -> why it cannot be used."""
        self._last_machines: Mapping[str, Machine] = {}
        """The machines as of the last refresh; a host's own thread may learn of others in between."""

    def host(self, name: str) -> RemoteHost:
        """Return a host, also of a name that nobody has yet."""
        with self._lock:
            if name not in self.hosts:
                host = RemoteHost(name, self.control, self._clock)
                host.owner, host.takeover = self._owner, self._takeover
                self.hosts = {**self.hosts, name: host}
            return self.hosts[name]

    def here(self) -> list[RemoteHost]:
        """The hosts that were in the cluster when it was last looked at, and may be used."""
        return [self.hosts[name] for name in self.nodes]

    def refresh(self, limit: float = LIMIT_SECONDS) -> bool:
        """Look which hosts there are, and what new ones have; whether that has changed since the last look.

        AgentSilent if that cannot be told.

        ``limit``: how long the agents of new ones may take to start.
        """

        def learn(host: RemoteHost) -> str:
            host.hello(limit)
            host.fetch_inventory()
            return ""

        nodes = {node.name: node for node in sorted(self.control.nodes())}
        problems = {name: node.problem for name, node in nodes.items() if node.problem}
        usable = {name: node for name, node in nodes.items() if name not in problems}
        new = [self.host(name) for name, node in usable.items() if node != self.nodes.get(name)]
        for host in new:
            host.node = usable[host.name]
        learned = on_each(learn, new, lambda error: error.message)
        problems |= {name: why for name, why in learned.items() if why}
        problems |= self._named_twice([name for name in usable if name not in problems])
        self.nodes = {name: node for name, node in usable.items() if name not in problems}
        self.problems = problems
        before, self._last_machines = self._last_machines, self.machines()
        return self._last_machines != before

    def _named_twice(self, names: Sequence[str]) -> dict[str, str]:
        """Return why hosts cannot be used that are the same machine as one before them."""
        problems: dict[str, str] = {}
        for place, name in enumerate(names):
            for other in names[:place]:
                if other not in problems and self._identity(name).is_same(self._identity(other)):
                    problems[name] = f"it is the same machine as {other}: let one of them leave the cluster"
        return problems

    def _identity(self, name: str) -> Identity:
        host = self.hosts[name]
        return identity(host.machine, host.inventory())

    def machines(self) -> dict[str, Machine]:
        """Return what the configuration needs to know of all hosts that were ever seen."""
        return {
            name: replace(
                machine(host.inventory(), host.node.labels),
                is_own=self._identity(name).is_same(self._own),
            )
            for name, host in self.hosts.items()
            if host.inventory().address
        }

    def known_machines(self) -> dict[str, Machine]:
        """Return the same, and of each host that could never be used why."""
        unusable = {name: Machine(problem=why) for name, why in self.problems.items()}
        return unusable | self.machines()

    def check(self, part: Callable[[str], HostConfig]) -> list[dict[str, Any]]:
        """Report each host, with what is ``missing`` there; ``part``: of the configuration, by host."""

        def missing(host: RemoteHost) -> list[str]:
            host.hello()  # the first one may have had to wait for the agent to start
            return host.lacks(part(host.name))

        found = on_each(missing, self.here(), lambda error: [error.message])
        here: list[dict[str, Any]] = [
            {"host": each.name, "state": "here", **each.report(), "missing": found[each.name]}
            for each in self.here()
        ]
        unusable = [
            {"host": name, "state": "unusable", "missing": [problem]}
            for name, problem in self.problems.items()
        ]
        return here + unusable

    def claim(self, folder: Path, name: str, *, takeover: bool) -> None:
        """Claim all hosts that are there; Claimed if another anvil-mux has one, and none is kept then."""
        self._owner = Owner(0, owner_id(folder), f"{name} on {socket.gethostname()}")
        self._takeover = takeover
        for host in self.hosts.values():
            host.owner, host.takeover = self._owner, takeover
        for host in self.here():
            try:
                host.claim()
            except (Claimed, Fenced):
                self.release()
                raise
            except MuxError:
                continue  # it is claimed when it answers

    def recall(self) -> dict[str, str]:
        """Return the texts that the hosts keep for their owner, by name."""
        return on_each(RemoteHost.recall, self.here(), lambda error: "")

    def release(self) -> None:
        """Let another anvil-mux have the hosts, as far as they can be told."""
        on_each(RemoteHost.release, self.here(), lambda error: None)

    def close(self) -> None:
        """End all calls, and what was started to make them; agents and engines run on."""
        for host in self.hosts.values():
            host.close()
        self.control.close()


def machine(found: Inventory, labels: tuple[tuple[str, str], ...]) -> Machine:
    """Return what the configuration needs to know of a host."""
    gpus = tuple([Gpu(gpu.id, gpu.total, shared=gpu.shared, file=gpu.file) for gpu in found.gpus])
    return Machine(gpus, found.memory, found.address, labels)


def owner_id(folder: Path) -> str:
    """Return what tells the anvil-mux of one state folder from others, in every run; BackendError."""
    file = folder / "owner"
    try:
        with suppress(FileNotFoundError):
            if found := file.read_text().strip():
                return found
        id = secrets.token_hex(8)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        write_whole(file, id, is_durable=True)
        return id
    except (OSError, ValueError) as error:
        raise BackendError(
            f"{file} cannot be read or written ({error}), and says which hosts are its own"
        ) from None


def on_each(
    do: Callable[[RemoteHost], T], hosts: Sequence[RemoteHost], failed: Callable[[MuxError], T]
) -> dict[str, T]:
    """Do something on each host, side by side; return what it says, or ``failed``, by the host's name."""

    def attempt(host: RemoteHost) -> T:
        try:
            return do(host)
        except MuxError as error:
            return failed(error)

    return dict(zip([host.name for host in hosts], side_by_side(attempt, hosts), strict=True))
