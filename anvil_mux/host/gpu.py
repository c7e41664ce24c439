"""The GPUs of this machine, of all vendors: which there are, what they hold and who uses them.

NVIDIA's are read by NVML (nvml.py) and go by its index, AMD's and Intel's by the kernel's own files (drm.py)
and go by ``amd0``, ``intel0`` and so on, in the order of their PCI addresses. A machine without any is no
error: ``probe`` then finds nothing and says why.

Process ids are those of the host, so from inside a container they mean nothing unless it shares the host's.
Which container a process belongs to is read from its control groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from anvil_mux.host import drm, nvml
from anvil_mux.host.reading import Gpus, Reading
from anvil_mux.host.seam import HostGpu, OtherProcess


def probe(pids: Collection[int] | None = None, *, sensors: bool = False) -> Gpus:
    """Look at all GPUs once, see ``reading.Probe``; never raises.

    ``sensors``: also what they measure, which takes longer.
    """
    parts = nvml.probe(sensors=sensors), drm.probe(pids=pids, sensors=sensors)
    readings = tuple(reading for part in parts for reading in part.readings)
    why_none = None if readings else "; ".join(part.why_none or "" for part in parts)
    return Gpus(readings, why_none, parts[0].driver)


def look() -> Gpus:
    """Look at all GPUs once, and at what they measure."""
    return probe(sensors=True)


def listed(found: Gpus) -> tuple[HostGpu, ...]:
    """The GPUs as others know them."""
    return tuple(
        HostGpu(each.id, each.uuid, each.name, each.total, shared=each.shared, files=each.files)
        for each in found.readings
    )


def others(readings: Iterable[Reading], is_ours: Callable[[int], bool]) -> list[OtherProcess]:
    """List the other processes that hold memory of these GPUs, the greatest first.

    Processes that cannot be seen from here are left out: they may be ours, under another id.
    """
    found = [
        OtherProcess(reading.id, pid, used, name, container(pid) or "")
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
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    # Lines are HIERARCHY:CONTROLLERS:PATH. Of nested containers the innermost stands last in its path.
    found = [ids[-1] for line in lines if (ids := CONTAINER.findall(line.split(":", 2)[-1]))]
    return str(found[0]) if found else None


def command(pid: int, proc: Path = Path("/proc")) -> str:
    """The short name of a process, "" once it is gone."""
    try:
        return (proc / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""
