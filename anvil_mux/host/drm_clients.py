"""The processes that hold memory of AMD's and Intel's GPUs, as the kernel accounts for them.

Each open file of a GPU has a few lines in ``/proc/PID/fdinfo`` (Documentation/gpu/drm-usage-stats of the
kernel describes them): which GPU, which client, and what that holds in each region of memory. A file that
several processes share, or that one has twice, is one client and counts once, for the first of them. What
ROCm computes goes by another file, ``/dev/kfd``, and is accounted for in ``/sys/class/kfd`` as well.

The files of other users' processes are read by root (CAP_SYS_PTRACE) alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

GPU_FILES = "/dev/dri/"
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
AMOUNT = re.compile(r"drm-(resident|memory|total)-([^:\s]+):\s*(\d+)\s*(\w*)")
"""A line on a region: ``memory`` is an older word for ``resident``; ``total`` also has what is elsewhere."""
ORDER = ("resident", "memory", "total")
"""The accounts in the order in which they are believed."""


@dataclass(frozen=True, slots=True)
class GpuClient:
    """One user of a GPU."""

    pid: int
    address: str
    """The PCI address of the GPU."""
    id: str
    regions: Mapping[str, int] = field(default_factory=dict)
    """Region of memory (``vram``, ``gtt``, ``local0``, ...) -> bytes."""


def clients(proc: Path = Path("/proc"), pids: Collection[int] | None = None) -> tuple[list[GpuClient], bool]:
    """Find the clients of all GPUs, and whether every process could be looked at; ``pids``: only these."""
    found: dict[tuple[str, str], GpuClient] = {}
    complete = True
    if pids is None:
        pids = [int(each) for each in os.listdir(proc) if each.isdigit()]
    for pid in sorted(pids):
        try:
            for text in _of_process(proc / str(pid)):
                if client := _client(pid, text):
                    found.setdefault((client.address, client.id), client)
        except PermissionError:
            complete = False
        except OSError:
            continue  # it has ended
    return list(found.values()), complete


def _of_process(folder: Path) -> Iterator[str]:
    """The accounts of the files of GPUs that a process has open."""
    for number in os.listdir(folder / "fd"):
        with suppress(FileNotFoundError):  # it is closed by now
            if os.readlink(folder / "fd" / number).startswith(GPU_FILES):
                yield (folder / "fdinfo" / number).read_text()


def _client(pid: int, text: str) -> GpuClient | None:
    """The client that a file's account is about; None if it has none."""
    said = {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    if "drm-client-id" not in said or "drm-pdev" not in said:
        return None
    amounts: dict[str, dict[str, int]] = {}
    for account, region, number, unit in AMOUNT.findall(text):
        amounts.setdefault(region, {})[account] = int(number) * UNITS.get(unit, 1)
    regions = {
        region: next(known[account] for account in ORDER if account in known)
        for region, known in amounts.items()
    }
    return GpuClient(pid, said["drm-pdev"], said["drm-client-id"], regions)


def rocm_processes(sys: Path = Path("/sys")) -> dict[str, dict[int, int]]:
    """Device file of a GPU -> process id -> the bytes that ROCm has allocated for it there."""
    kfd = sys / "class" / "kfd" / "kfd"
    found: dict[str, dict[int, int]] = {}
    for node in (kfd / "topology" / "nodes").glob("*"):
        gpu, minor = _read(node / "gpu_id"), _property(node, "drm_render_minor")
        if gpu in ("", "0") or not minor:
            continue  # a CPU
        held = {int(each.parent.name): _read(each) for each in (kfd / "proc").glob(f"*/vram_{gpu}")}
        found[f"{GPU_FILES}renderD{minor}"] = {pid: int(n) for pid, n in held.items() if n.isdigit()}
    return found


def _property(node: Path, name: str) -> str:
    found = re.search(rf"^{name} (\d+)$", _read(node / "properties"), re.M)
    return found[1] if found else ""


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
