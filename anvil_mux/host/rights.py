"""The rights that a checkpoint needs and this process has not, as far as /proc, Docker and the file tell.

NVIDIA says nowhere which rights the driver's calls need. Known to work are root with all its capabilities,
and the user whose processes they are. So what is told here is a warning before a checkpoint, and the likely
cause after one that failed. docs/standby.md has the deployments that lack nothing. Nothing is tried: which
calls a filter of system calls refuses is not to be read anywhere, so it is named only after a failure.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import Diagnostic
from anvil_mux.errors import MuxError
from anvil_mux.host.docker_endpoint import find_endpoint
from anvil_mux.host.runtime import Runtime
from anvil_mux.host.seam import HostConfig
from anvil_mux.state import text_of

ProcessOwner = tuple[int, int]
"""The ids of a user and a group: the kernel lets a process at another only if both are its own."""
CAP_SYS_PTRACE = 19
DYNAMIC_USERS = range(61184, 65520)
"""The users that systemd makes for as long as a unit runs (DynamicUser)."""

PAGE = "standby.md#what-a-checkpoint-needs"
"""The page of docs/ about these rights."""

SOCKET_SECONDS = 5.0
"""Seconds that a busy engine may take to accept a connection of which nothing is asked."""

MAY_BE_FILTERED = (
    "a filter of system calls is on, which may keep ptrace from anvil-mux: `SystemCallFilter=` in its "
    "systemd unit, with nothing behind it, lifts that (docs/standby.md)"
)


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of this process over others, as far as /proc tells."""

    user: int
    group: int
    traces: bool
    """Whether it has the capability CAP_SYS_PTRACE."""
    scope: int
    """Yama's ptrace_scope: from 2 on the capability is needed, from 3 on it does not help. 0: no Yama."""
    sees_host: bool
    """Whether process ids mean the host's processes, or those of the machine that runs the containers."""
    filtered: bool = False
    """Whether a filter of system calls is on, whatever it refuses."""

    @classmethod
    def here(cls, proc: Path = Path("/proc")) -> Rights:
        status = dict(line.split(":", 1) for line in (proc / "self/status").read_text().splitlines())
        scope = proc / "sys/kernel/yama/ptrace_scope"
        return cls(
            user=int(status["Uid"].split()[1]),
            group=int(status["Gid"].split()[1]),
            traces=bool(int(status["CapEff"], 16) >> CAP_SYS_PTRACE & 1),
            scope=int(scope.read_text()) if scope.exists() else 0,
            # It is there with every kernel, and in no other namespace.
            sees_host=text_of(proc / "2/comm").strip() == "kthreadd",
            filtered=status.get("Seccomp", "0").strip() != "0",
        )

    def lacks(self, owners: Collection[ProcessOwner], *, contained: bool) -> list[str]:
        """List what is missing to checkpoint processes of these owners, and how to get it, for people.

        ``contained``: they are in containers of their own.
        """
        others = sorted(owner for owner in owners if owner != (self.user, self.group))
        missing = []
        if contained and not self.sees_host:
            missing.append("anvil-mux does not see the host's processes: its container needs `pid: host`")
        if self.user == 0 and not self.traces:
            missing.append(
                "anvil-mux is root without the capability CAP_SYS_PTRACE: its container needs "
                "`privileged: true` (or `cap_add: [SYS_PTRACE]`), its systemd unit a CapabilityBoundingSet "
                "that has it"
            )
        elif others and not self.traces:
            us, them = f"{self.user}:{self.group}", ":".join(map(str, others[0]))
            user = f'`user: "{us}"`' if self.user not in DYNAMIC_USERS else "and the systemd unit one user"
            missing.append(
                f"the engine's processes are of user and group {them}, and anvil-mux runs as {us}: run "
                "it as root with its capabilities (docs/standby.md has the systemd unit and the container), "
                f"or give the service {user}"
            )
        if self.scope >= 3 or (self.scope == 2 and not self.traces):
            who = "nobody" if self.scope >= 3 else "nobody without CAP_SYS_PTRACE (root has it)"
            missing.append(
                f"kernel.yama.ptrace_scope is {self.scope}, with which {who} may look into other processes: "
                "set it to 1 (sysctl kernel.yama.ptrace_scope=1; 3 lasts until the next boot)"
            )
        return missing


def warnings(config: HostConfig, runtime: Runtime) -> list[str]:
    """A warning for each right that a checkpoint of these backends needs, and this process has not."""
    lacking: dict[str, list[str]] = {}
    for backend in config.backends:
        if "checkpoint" in backend.evict_to:
            for what in lacks(backend, runtime, contained=config.runtime == "compose"):
                lacking.setdefault(what, []).append(backend.name)
    return [
        Diagnostic(
            f"{', '.join(names)}: checkpoint may fail: {what}",
            key=("services", names[0], "x-anvil", "evict_to"),
            page=PAGE,
        )
        for what, names in lacking.items()
    ]


def lacks(backend: Backend, runtime: Runtime, *, contained: bool, rights: Rights | None = None) -> list[str]:
    """List what is missing to checkpoint a backend: for the processes that run, else for what the file says.

    ``contained``: it is a container. ``rights``: None: those of this process.
    """
    rights = rights or Rights.here()
    if contained:
        seen = names_our_processes(os.environ)
        rights = rights if seen is None else replace(rights, sees_host=seen)
    users: set[ProcessOwner] = set()
    if rights.sees_host or not contained:  # else the ids mean other processes here, or none
        with suppress(MuxError):  # Docker is away, which others report
            users = owners(runtime.pids(backend))
    if not users and contained:
        owner = owner_of(backend, os.environ)
        users = set() if owner is None else {owner}
    return rights.lacks(users, contained=contained)


def likely_causes(backend: Backend, runtime: Runtime, *, contained: bool) -> list[str]:
    """List what may have made a checkpoint fail: what is missing for it, else a filter of system calls."""
    here = Rights.here()
    missing = lacks(backend, runtime, contained=contained, rights=here)
    return missing or [MAY_BE_FILTERED] * here.filtered


def owners(pids: Iterable[int]) -> set[ProcessOwner]:
    """The owners of processes, without those that have ended."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            seen = Path("/proc", str(pid)).stat()
            found.add((seen.st_uid, seen.st_gid))
    return found


def owner_of(backend: Backend, env: Mapping[str, str]) -> ProcessOwner | None:
    """The ids of the user and group that its processes will have on this host; None: they are not known yet.

    Where neither the compose file nor, most likely, the image says another it is root: of a rootless engine
    that is whoever runs the engine. A user by its id has root's group, unless the image has another for it.
    """
    user, _, group = backend.service.user.partition(":")
    try:
        path = find_endpoint(env).path
        seen = os.stat(path) if path else None
    except (OSError, MuxError):
        seen = None
    rootless = seen is not None and seen.st_uid != 0
    if user in ("", "root", "0"):
        return (seen.st_uid, seen.st_gid) if seen and rootless else (0, 0)
    if rootless or not user.isdecimal() or not (group or "0").isdecimal():
        return None
    return int(user), int(group or "0")


def names_our_processes(env: Mapping[str, str]) -> bool | None:
    """Whether the engine's process ids mean the same here; None: that is not known.

    The kernel tells the process behind a socket by the id that it has here, and by 0 where it has none.
    """
    try:
        path = find_endpoint(env).path
        if not path:
            return None
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(SOCKET_SECONDS)
            asked.connect(path)
            pid, _, _ = struct.unpack("3i", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except (OSError, MuxError):
        return None
    return bool(pid)
