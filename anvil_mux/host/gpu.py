"""The GPUs of this machine, of all vendors: which there are, what they hold and who uses them.

NVIDIA's are read by NVML (nvml.py) and go by its index, AMD's and Intel's by the kernel's own files
(amd_intel.py) and go by ``amd0``, ``intel0`` and so on, in the order of their PCI addresses. A machine
without any is no error: ``probe`` then finds nothing and says why.

Process ids are those of the host, so from inside a container they mean nothing unless it shares the host's.
Which container a process belongs to is read from its control groups.

A driver may take long, or hang: nobody waits for it. ``GpuMonitor`` looks in a thread of its own: once a
second while somebody watches and for a while after that, else now and then, to tell what other processes
hold: that is not to be had for a model.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from anvil_mux.clock import Worker
from anvil_mux.host import amd_intel, nvml
from anvil_mux.host.reading import Gpus, Reading
from anvil_mux.host.seam import OtherProcess, Seen, Sight
from anvil_mux.state import text_of


def probe(pids: Collection[int] | None = None, *, sensors: bool = False) -> Gpus:
    """Look at all GPUs once, see ``reading.Probe``; never raises.

    ``sensors``: also what they measure, which takes longer.
    """
    parts = nvml.probe(sensors=sensors), amd_intel.probe(pids=pids, sensors=sensors)
    readings = tuple(reading for part in parts for reading in part.readings)
    why_none = None if readings else "; ".join(part.why_none or "" for part in parts)
    return Gpus(readings, why_none, parts[0].driver)


def look() -> Gpus:
    """Look at all GPUs once, and at what they measure."""
    return probe(sensors=True)


def others(readings: Iterable[Reading], is_ours: Callable[[int], bool]) -> list[OtherProcess]:
    """List the other processes that hold memory of these GPUs, the greatest first.

    Processes that cannot be seen from here are left out: they may be ours, under another id.
    """
    found = [
        OtherProcess(reading.gpu.id, pid, used, name, container(pid) or "")
        for reading in readings
        for pid, used in reading.processes
        if not is_ours(pid) and (name := command(pid))
    ]
    return sorted(found, key=lambda each: -(each.used or 0))


CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?=/|$)")
"""A container's id in a path of control groups.

/docker/ID, /system.slice/docker-ID.scope, /kubepods/burstable/podUID/cri-containerd-ID.scope,
/machine.slice/libpod-ID.scope/container and their like.
"""


def container(pid: int, proc: Path = Path("/proc")) -> str | None:
    """The id of the container that this process of the host runs in, None where it runs in none."""
    lines = text_of(proc / str(pid) / "cgroup").splitlines()
    # Lines are HIERARCHY:CONTROLLERS:PATH. Of nested containers the innermost stands last in its path.
    found = [ids[-1] for line in lines if (ids := CONTAINER.findall(line.split(":", 2)[-1]))]
    return str(found[0]) if found else None


def command(pid: int, proc: Path = Path("/proc")) -> str:
    """The short name of a process, "" once it is gone."""
    return text_of(proc / str(pid) / "comm").strip()


EVERY_SECONDS = 1.0
WATCHED_SECONDS = 60.0
"""Seconds for which it goes on to look as often after somebody watched."""
SELDOM_SECONDS = 10.0


class GpuMonitor:
    """Looks at GPUs again and again; ``tell`` learns what was seen.

    ``owner`` says to which of our services a process of this host belongs; see runtime.Runtime.
    """

    def __init__(
        self,
        gpus: Iterable[str],
        owner: Callable[[int], str | None],
        tell: Callable[[Sight], object],
        probe: Callable[[], Gpus] = look,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tell = tell
        self._gpus = tuple(gpus)
        self._owner = owner
        self._probe = probe
        self._now = now
        self._watched = now()
        self._is_slow = False
        self.worker = Worker("gpu-monitor", self._turn)

    def look_at(self, gpus: Iterable[str]) -> None:
        """Look at these GPUs from now on. Any thread."""
        self._gpus = tuple(gpus)

    def watch(self) -> None:
        """Look more often for a while, since somebody watches. Any thread; never blocks."""
        self._watched = self._now()
        if self._is_slow:
            self.worker.wake()

    def look(self) -> None:
        """Looks once."""
        found = self._probe()
        readings = {gpu: found.find(gpu) for gpu in self._gpus}
        self._tell({gpu: self._seen(reading) for gpu, reading in readings.items() if reading})

    def _turn(self) -> float:
        self.look()
        return SELDOM_SECONDS if self.may_slow_down() else EVERY_SECONDS

    def may_slow_down(self) -> bool:
        """Whether nobody has watched for long."""
        # Whoever watches from here on wakes the thread, so that nobody is passed over.
        self._is_slow = True
        self._is_slow = self._now() - self._watched >= WATCHED_SECONDS
        return self._is_slow

    def _seen(self, reading: Reading) -> Seen:
        owners = {pid: self._owner(pid) for pid, _ in reading.processes}
        pids: defaultdict[str, list[int]] = defaultdict(list)
        for pid, service in owners.items():
            if service:
                pids[service].append(pid)
        users = {service: reading.used_by(own) for service, own in pids.items()}
        strangers = others([reading], lambda pid: owners[pid] is not None)
        return Seen(reading.used, reading.gpu.total, users, tuple(strangers), reading.sensors)
