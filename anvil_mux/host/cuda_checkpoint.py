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
``why_not`` tells; which rights the running user lacks, rights.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from anvil_mux.errors import BackendError, CheckpointFailed
from anvil_mux.host import nvml
from anvil_mux.host.cuda_driver import Driver
from anvil_mux.host.reading import Gpus
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
        probe: Callable[[], Gpus] = nvml.probe,
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
        seen = self._probe()
        return _why_not_driver(seen) or _why_not_gpus(seen, gpus, insist) or self._why_not_tool(seen, gpus)

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
        return [pid for pid in pids if pid in lost or not self._runs(driver, pid)]

    def _runs(self, driver: Driver, pid: int) -> bool:
        return self._state_if_known(driver, pid) == "running"

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

    def _why_not_tool(self, seen: Gpus, gpus: Sequence[str]) -> str | None:
        try:
            with self._connect() as driver:
                tool = driver.tool()
        except BackendError as error:
            return error.message
        # With the library, what calls the driver has initialized it, which does as well.
        lazy = [each for each in gpus if (reading := seen.find(each)) and reading.persistence is False]
        if tool == "program" and lazy:
            return f"GPU {lazy[0]} is not in persistence mode (turn it on: nvidia-smi -pm 1)"
        return None


def _why_not_driver(seen: Gpus) -> str | None:
    if seen.why_none is not None:
        return f"needs an NVIDIA GPU ({seen.why_none})"
    if seen.driver_branch is None or seen.driver_branch < DRIVER_BRANCH:
        return f"needs NVIDIA driver {DRIVER_BRANCH} or later, and this is {seen.driver or 'unknown'}"
    return None


def _why_not_gpus(seen: Gpus, gpus: Sequence[str], insist: bool) -> str | None:
    if len(gpus) > 1 and not insist:
        return "holds several GPUs, from which processes that work together often do not come back"
    for name in gpus:
        reading = seen.find(name)
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
