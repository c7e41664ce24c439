"""GPU memory to host memory and back by the CUDA driver, for all processes of one service together.

    checkpoint  lock all, then checkpoint all; the caller sees that the memory is free, and freezes them
    restore     the caller thaws them; restore all, then unlock all

Invariants:

1. None is checkpointed before all are locked, none is unlocked before all are restored: the processes of an
   engine wait for each other on the GPU.
2. Each step asks for the state first, and is skipped where it is done. So both calls may be repeated, and may
   be made about what an earlier anvil-mux left behind.
3. A call that fails counts by the state that it leaves: an unlock may report an error of a running process.
4. If ``checkpoint`` fails, those checkpointed are restored, those locked are unlocked. If ``restore`` fails,
   those restored are unlocked, so that they can end by themselves; nothing is checkpointed again. Either way
   what does not run then is lost, and can only be killed.
5. A frozen process is left alone: its own threads do the driver's work, so that even questions would hang.

The memory goes to the process's own host memory, and counts there against a container's limit. Memory shared
between processes, managed memory, MIG and MPS are beyond the driver; what can be told of that beforehand,
``why_not`` tells.

NVIDIA says nowhere which rights the driver's calls need. Known to work are root with all its capabilities,
and the user whose processes they are. So what ``Rights`` lack is a warning before a checkpoint, and the
likely cause after one that failed. docs/standby.md has the deployments that lack nothing. Nothing is tried:
which calls a filter of system calls refuses is not to be read anywhere, so it is named only after a failure.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import Diagnostic
from anvil_mux.errors import BackendError, CheckpointFailed, MuxError
from anvil_mux.host.cuda_driver import Driver
from anvil_mux.host.docker_api import find_endpoint
from anvil_mux.host.gpus import Gpus, nvidia_gpus
from anvil_mux.host.seam import HostConfig, Runtime
from anvil_mux.state import text_of

DRIVER_BRANCH = 570
"""The first with the calls, and the first to take along what engines read of NVML."""
TRIES, TRY_PAUSE = 3, 0.5
"""Attempts to find the processes, and seconds between two; NVML lists a process a little late."""
STATE_PAUSE, STATE_LIMIT = 0.25, 180.0
"""Seconds between two looks at a process that is between two states, and until it is given up."""


@dataclass(frozen=True, slots=True)
class DriverAction:
    """An action of the driver: the state that it needs, and those in which it is done."""

    needs: str
    done: tuple[str, ...]


DRIVER_ACTIONS = {
    "lock": DriverAction("running", ("locked", "checkpointed")),
    "checkpoint": DriverAction("locked", ("checkpointed",)),
    "restore": DriverAction("checkpointed", ("locked", "running")),
    "unlock": DriverAction("locked", ("running",)),
}
PASSING = ("checkpointing", "restoring")


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """Processes whose GPU memory is in host memory."""

    pids: tuple[int, ...]
    bytes: int = 0
    """GPU memory that they held before, as far as NVML told."""
    whole: bool = True
    """Whether these are all processes of the service that use CUDA, and all are checkpointed."""


class Checkpointer:
    """Checkpoints and restores processes. Any thread; calls for different services run side by side.

    Each call has a conversation of its own with the driver, made by ``connect``.
    """

    def __init__(
        self,
        connect: Callable[[], Driver] = Driver,
        probe: Callable[[], Gpus] = nvidia_gpus,
        *,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._connect = connect
        self._probe = probe
        self._now = now
        self._wait = wait

    def why_not(self, gpus: Sequence[str], *, insist: bool = False) -> str | None:
        """The reason, for people, why a service on these GPUs cannot be checkpointed; None if nothing is
        known.

        ``insist`` allows several GPUs.
        """
        found = self._probe()
        return _why_not_driver(found) or _why_not_gpus(found, gpus, insist) or self._why_not_tool(found, gpus)

    def find(self, pids: Iterable[int]) -> tuple[int, ...]:
        """Find the processes of a service that hold GPU memory; () if none does."""
        wanted = sorted(set(pids))
        for attempt in range(TRIES):
            if attempt:
                self._wait(TRY_PAUSE)
            listed = [each for reading in self._probe().readings for each in reading.processes]
            used_by = [(pid, used) for pid, used in listed if pid in wanted]
            if not listed or any(used is None for _, used in used_by):
                break
            # One without memory has no context that the driver could lock.
            if holders := {pid for pid, used in used_by if used}:
                return tuple(sorted(holders))
        with self._connect() as driver:
            return tuple(pid for pid in wanted if driver.uses_cuda(pid))

    def find_standby(self, pids: Iterable[int]) -> Checkpointed | None:
        """Find what an earlier anvil-mux has checkpointed, wholly or half; the processes are thawed."""
        with self._connect() as driver:
            users = [pid for pid in sorted(set(pids)) if driver.uses_cuda(pid)]
            states = {pid: self._state_if_known(driver, pid) for pid in users}
        held = tuple(pid for pid in users if states[pid] in ("locked", "checkpointed"))
        whole = set(states.values()) == {"checkpointed"}
        return Checkpointed(held, whole=whole) if held else None

    def checkpoint(self, pids: Iterable[int]) -> Checkpointed:
        """Return when the processes have freed their GPUs; CheckpointFailed when they run again instead."""
        group = tuple(sorted(set(pids)))
        held = self._probe().used_by(group).values()
        self._perform(group, ("lock", "checkpoint"), ("restore", "unlock"))
        return Checkpointed(group, sum(each or 0 for each in held))

    def restore(self, standby: Checkpointed) -> None:
        """Return when the processes run with their memory back on the GPUs; else CheckpointFailed."""
        self._perform(standby.pids, ("restore", "unlock"), ("unlock",))

    def _perform(self, pids: Sequence[int], actions: Sequence[str], back: Sequence[str]) -> None:
        if frozen := [pid for pid in pids if is_frozen(pid)]:
            raise CheckpointFailed(f"process {frozen[0]} is frozen, and has to be thawed first")
        with self._connect() as driver:
            try:
                for action in actions:
                    for pid in pids:
                        self._take(driver, action, pid)
            except BackendError as error:
                raise CheckpointFailed(error.message, lost=self._undo(driver, pids, back)) from error

    def _take(self, driver: Driver, action: str, pid: int) -> None:
        wanted, state = DRIVER_ACTIONS[action], self._state(driver, pid)
        if state in wanted.done:
            return
        if state != wanted.needs:
            raise BackendError(f"{action} of process {pid}: it is {state}, not {wanted.needs}")
        try:
            driver.act(action, pid)
        except BackendError as error:
            with suppress(BackendError):
                if self._state(driver, pid) in wanted.done:
                    return
            raise error

    def _undo(self, driver: Driver, pids: Sequence[int], actions: Sequence[str]) -> list[int]:
        """Undo what can be undone; return the processes that do not run, or are not known to."""
        lost = set()  # are not asked again, since each answer may take its whole limit
        for action in actions:
            for pid in pids:
                try:
                    if pid not in lost and self._state(driver, pid) == DRIVER_ACTIONS[action].needs:
                        self._take(driver, action, pid)
                except BackendError:
                    lost.add(pid)
        return [pid for pid in pids if pid in lost or self._state_if_known(driver, pid) != "running"]

    def _state_if_known(self, driver: Driver, pid: int) -> str:
        with suppress(BackendError):  # of a process that has ended, or never used CUDA
            return self._state(driver, pid)
        return ""

    def _state(self, driver: Driver, pid: int) -> str:
        """The state once it is not a passing one any more."""
        deadline = self._now() + STATE_LIMIT
        while (state := driver.state(pid)) in PASSING and self._now() < deadline:
            self._wait(STATE_PAUSE)
        return state

    def _why_not_tool(self, found: Gpus, gpus: Sequence[str]) -> str | None:
        try:
            with self._connect() as driver:
                tool = driver.tool()
        except BackendError as error:
            return error.message
        # With the library, what calls the driver has initialized it, which does as well.
        lazy = [each for each in gpus if (reading := found.find(each)) and reading.persistence is False]
        if tool == "program" and lazy:
            return f"GPU {lazy[0]} is not in persistence mode (turn it on: nvidia-smi -pm 1)"
        return None


def _why_not_driver(found: Gpus) -> str | None:
    if found.why_none is not None:
        return f"needs an NVIDIA GPU ({found.why_none})"
    branch = found.driver.partition(".")[0]
    if not branch.isdecimal() or int(branch) < DRIVER_BRANCH:
        return f"needs NVIDIA driver {DRIVER_BRANCH} or later, and this is {found.driver or 'unknown'}"
    return None


def _why_not_gpus(found: Gpus, gpus: Sequence[str], insist: bool) -> str | None:
    if len(gpus) > 1 and not insist:
        return "holds several GPUs, from which processes that work together often do not come back"
    for name in gpus:
        reading = found.find(name)
        if reading is None:
            return f"NVML finds no GPU {name}"
        if reading.mig:
            return f"GPU {name} is cut into instances (MIG), which the driver cannot checkpoint"
        if reading.mps:
            return f"GPU {name} is shared through MPS, which the driver cannot checkpoint"
    return None


def is_frozen(pid: int, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> bool:
    """Whether the process is stopped by a signal, or by the freezer of its control groups."""
    try:
        stat = (proc / str(pid) / "stat").read_text(errors="replace")
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return False
    if stat[stat.rindex(")") + 2 :][0] in "Tt":
        return True
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group = path.lstrip("/")
        if controllers == "freezer":
            state = text_of(groups / "freezer" / group / "freezer.state")
            if state and "THAWED" not in state:
                return True
        elif not controllers:
            events = [text_of(root / group / "cgroup.events") for root in (groups, groups / "unified")]
            if any("frozen 1" in each for each in events):
                return True
    return False


# The rights that it takes

ProcessOwner = tuple[int, int]
"""The ids of a user and a group: the kernel lets a process at another only if both are its own."""
CAP_SYS_PTRACE = 19
DYNAMIC_USERS = range(61184, 65520)
"""The users that systemd makes for as long as a unit runs (DynamicUser)."""

RIGHTS_PAGE = "standby.md#what-a-checkpoint-needs"
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


def missing_rights(config: HostConfig, runtime: Runtime) -> list[str]:
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
            page=RIGHTS_PAGE,
        )
        for what, names in lacking.items()
    ]


def lacks(backend: Backend, runtime: Runtime, *, contained: bool, rights: Rights | None = None) -> list[str]:
    """List what is missing to checkpoint a backend: for the processes that run, else for what the file says.

    ``contained``: it is a container. ``rights``: None: those of this process.
    """
    rights = rights or Rights.here()
    if contained:
        sees_host = names_our_processes(os.environ)
        rights = rights if sees_host is None else replace(rights, sees_host=sees_host)
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
            status = Path("/proc", str(pid)).stat()
            found.add((status.st_uid, status.st_gid))
    return found


def owner_of(backend: Backend, env: Mapping[str, str]) -> ProcessOwner | None:
    """The ids of the user and group that its processes will have on this host; None: they are not known yet.

    Where neither the compose file nor, most likely, the image says another it is root: of a rootless engine
    that is whoever runs the engine. A user by its id has root's group, unless the image has another for it.
    """
    user, _, group = backend.service.user.partition(":")
    try:
        path = find_endpoint(env).path
        status = os.stat(path) if path else None
    except (OSError, MuxError):
        status = None
    rootless = status is not None and status.st_uid != 0
    if user in ("", "root", "0"):
        return (status.st_uid, status.st_gid) if status and rootless else (0, 0)
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
