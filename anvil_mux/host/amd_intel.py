"""AMD's and Intel's GPUs by the kernel's own files: which there are, what they hold and who uses them.

``/sys/class/drm`` has a folder for each card, and no library is needed: the driver amdgpu tells memory, load
and sensors there (the kernel's Documentation/gpu/amdgpu), xe the size of its memory. i915 tells no size, and
neither of Intel's tells what is used: that is the sum of its clients, where all of them can be seen.

A GPU that is a part of the processor computes in host memory. AMD's have a part that the firmware set aside,
which the system does not count as its own, and beside it what they may map of the rest (GTT). Intel's have
all of the host's memory.

The clients of a GPU are the files of it that processes have open. Each has a few lines in
``/proc/PID/fdinfo`` (the kernel's Documentation/gpu/drm-usage-stats): which GPU, which client, and what that
holds in each region of memory. A file that several processes share, or that one has twice, is one client and
counts once, for the first of them. What ROCm computes goes by another file, ``/dev/kfd``, and is accounted
for in ``/sys/class/kfd`` as well. Only root (CAP_SYS_PTRACE) reads the files of other users' processes.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from anvil_mux.host.meminfo import host_memory
from anvil_mux.host.reading import UNKNOWN, Gpus, Reading
from anvil_mux.host.seam import HostGpu, Sensors
from anvil_mux.state import text_of

SYS, PROC = Path("/sys"), Path("/proc")
VENDORS = {"amdgpu": "amd", "i915": "intel", "xe": "intel"}
"""Driver -> the vendor whose GPUs it drives, as their ids begin."""
NAMES = {"amd": "AMD", "intel": "Intel"}
INTEGRATED = "0000:00:02.0"
"""The address at which Intel's processors have their own GPU."""
ON_CARD, IN_HOST = r"(vram|local)\d*", r"(system|gtt)\d*"
"""The regions of memory that a card has for itself, and those that are host memory."""
NODE = re.compile(r"renderD\d+|card\d+")
"""The names of device files; that for computing is the greater one."""
APU_METRICS = (2, 3)
"""The revisions of amdgpu's table of metrics that GPUs within a processor have; the others have 1."""


@dataclass(frozen=True, slots=True)
class Card:
    """One card of a driver that is known."""

    address: str
    """The PCI address."""
    driver: str
    device: str
    """The ids of its vendor and its device."""
    folder: Path
    files: tuple[str, ...]
    """The paths of its device files, that for computing first."""


def probe(
    sys: Path = SYS, proc: Path = PROC, *, pids: Collection[int] | None = None, sensors: bool = False
) -> Gpus:
    """Look at all cards once; never raises. ``sensors``: also what they measure.

    ``pids``: the processes that are looked at; all where there is a card whose users alone tell what is used.
    """
    try:
        found = cards(sys)
        if not found:
            return Gpus(why_none="no card of AMD or Intel in /sys/class/drm")
        memories = [_memory(card, proc) for card in found]
        users, complete = clients(proc, None if any(used is None for _, used, _ in memories) else pids)
        rocm = rocm_processes(sys)
    except Exception as error:
        # Files of the kernel change under whoever reads them, and no machine is to suffer from that.
        return Gpus(why_none=f"/sys/class/drm: {error}")
    numbers: defaultdict[str, int] = defaultdict(int)
    readings = []
    for card, (total, used, shared) in zip(found, memories, strict=True):
        vendor = VENDORS[card.driver]
        held = _held(card, [each for each in users if each.address == card.address], shared, rocm)
        name = _read(card.folder / "product_name") or f"{NAMES[vendor]} {card.device}"
        readings.append(
            Reading(
                HostGpu(
                    f"{vendor}{numbers[vendor]}", card.address, name, total, shared=shared, files=card.files
                ),
                used=sum(held.values()) if used is None and complete else used,
                processes=tuple((pid, amount) for pid, amount in held.items() if amount),
                sensors=_sensors(card) if sensors else UNKNOWN,
            )
        )
        numbers[vendor] += 1
    return Gpus(tuple(readings))


def cards(sys: Path = SYS) -> list[Card]:
    """Find the cards whose drivers are known, in the order of their addresses."""
    folders = [each / "device" for each in (sys / "class" / "drm").glob("card*") if each.name[4:].isdigit()]
    return sorted(filter(None, map(_card, folders)), key=lambda card: card.address)


def _card(folder: Path) -> Card | None:
    said = dict(line.partition("=")[::2] for line in _read(folder / "uevent").splitlines())
    driver, address = said.get("DRIVER", ""), said.get("PCI_SLOT_NAME", "")
    nodes = sorted(filter(NODE.fullmatch, (each.name for each in (folder / "drm").glob("*"))), reverse=True)
    if driver not in VENDORS or not nodes:
        return None
    by_path = [f"{GPU_FILES}by-path/pci-{address}-{kind}" for kind in ("render", "card")]
    files = (*(f"{GPU_FILES}{node}" for node in nodes), *by_path)
    return Card(address, driver, said.get("PCI_ID", ""), folder, files)


def _memory(card: Card, proc: Path) -> tuple[int | None, int | None, int]:
    """The bytes that a card has, those that are used, and those that are the host's as well; as nvml.py."""
    if card.driver == "amdgpu":
        own, used = (_number(card.folder / f"mem_info_vram_{what}") for what in ("total", "used"))
        mapped, mapped_used = (_number(card.folder / f"mem_info_gtt_{what}") for what in ("total", "used"))
        if own is None or mapped is None or not _is_in_processor(card):
            return own, used, 0
        return own + mapped, (used or 0) + (mapped_used or 0), mapped
    if card.address == INTEGRATED:
        total, used = host_memory(proc)
        return total, used, total or 0
    tiles = [_number(each) for each in card.folder.glob("tile*/physical_vram_size_bytes")]
    return sum(each or 0 for each in tiles) or None, None, 0


def _held(
    card: Card, users: list[GpuClient], shared: int, rocm: Mapping[str, Mapping[int, int]]
) -> dict[int, int]:
    """Process id -> the bytes that it holds of the card."""
    counted = ON_CARD if not shared else IN_HOST
    if card.driver == "amdgpu" and shared:
        counted = f"{ON_CARD}|{IN_HOST}"
    held: defaultdict[int, int] = defaultdict(int)
    for each in users:
        held[each.pid] += sum(n for name, n in each.regions.items() if re.fullmatch(counted, name))
    for pid, amount in rocm.get(card.files[0], {}).items():
        held[pid] = max(held[pid], amount)  # older kernels leave it out of the client's account
    return dict(held)


def _is_in_processor(card: Card) -> bool:
    """Whether AMD's GPU is a part of the processor."""
    return not _is_suspended(card) and _metrics_revision(card.folder / "gpu_metrics") in APU_METRICS


@lru_cache
def _metrics_revision(file: Path) -> int:
    """The third byte of the table of metrics, which says of which kind it is; 0 if there is none."""
    try:
        return file.read_bytes()[2]
    except (OSError, IndexError):
        return 0


def _sensors(card: Card) -> Sensors:
    if _is_suspended(card):
        return UNKNOWN  # the question would wake it
    percent = _number(card.folder / "gpu_busy_percent")
    millidegrees = _first(card, "temp1_input", "temp2_input")
    microwatts = _first(card, "power1_average", "power1_input")
    return Sensors(
        utilization=None if percent is None else percent / 100,
        celsius=None if millidegrees is None else millidegrees / 1e3,
        watts=None if microwatts is None else microwatts / 1e6,
    )


def _is_suspended(card: Card) -> bool:
    return _read(card.folder / "power" / "runtime_status") == "suspended"


def _first(card: Card, *names: str) -> int | None:
    """The first of these figures that the card's sensors have."""
    found: Iterator[int | None] = (
        _number(folder / name) for name in names for folder in (card.folder / "hwmon").glob("hwmon*")
    )
    return next((each for each in found if each is not None), None)


def _number(file: Path) -> int | None:
    text = _read(file)
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    return text_of(file).strip()


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
