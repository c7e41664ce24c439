"""The GPUs of this machine, of all vendors: which there are, what they hold and who uses them.

A machine without any is no error: ``probe`` then finds nothing and says why. Process ids are those of the
host, so from inside a container they mean nothing unless it shares the host's. Which container a process
belongs to is read from its control groups.

A driver may take long, or hang: nobody waits for it. ``GpuMonitor`` looks in a thread of its own: once a
second while somebody watches and for a while after that, else now and then, to tell what other processes
hold: that is not to be had for a model.

NVIDIA's are read by NVML and go by its index. Single questions that a GPU cannot answer are answered by None
or nothing. NVML tells what is, and tells it late: memory is reported free up to some seconds after its holder
ended. A GPU that has no memory of its own (GB10, Jetson) says that this is not supported: its memory is that
of the host.

AMD's and Intel's are read by the kernel's own files and go by ``amd0``, ``intel0`` and so on, in the order of
their PCI addresses. ``/sys/class/drm`` has a folder for each card, and no library is needed: the driver
amdgpu tells memory, load and sensors there (the kernel's Documentation/gpu/amdgpu), xe the size of its
memory. i915 tells no size, and neither of Intel's tells what is used: that is the sum of its clients, where
all of them can be seen.

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
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, NamedTuple

from anvil_mux.clock import Worker
from anvil_mux.host.seam import GpuUse, GpuUses, HostGpu, OtherProcess, Sensors
from anvil_mux.state import text_of

try:
    import pynvml
except ImportError:
    pynvml = None

UNKNOWN = Sensors()


@dataclass(frozen=True, slots=True)
class Reading:
    """One GPU, and what its driver says of it now; memory in bytes, None where the GPU cannot tell."""

    gpu: HostGpu
    used: int | None = None
    processes: tuple[tuple[int, int | None], ...] = ()
    """Process id and the bytes that it holds; a process stands here once."""
    mig: bool | None = None
    """Whether it is cut into instances."""
    mps: bool | None = None
    """Whether processes share it through NVIDIA's multi-process service now."""
    persistence: bool | None = None
    """Whether the driver keeps it initialized while nobody uses it."""
    sensors: Sensors = UNKNOWN
    bus: float | None = None
    """The bytes per second that its link to the host can carry one way, at its best."""

    @property
    def free(self) -> int | None:
        return None if self.gpu.total is None or self.used is None else self.gpu.total - self.used

    def used_by(self, pids: Collection[int]) -> int | None:
        """Bytes that these processes hold here; None where one of them holds an untold amount."""
        held = [used for pid, used in self.processes if pid in pids]
        return None if None in held else sum(used or 0 for used in held)


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs of this machine, or of one vendor, or none and the reason."""

    readings: tuple[Reading, ...] = ()
    why_none: str | None = None
    problems: tuple[str, ...] = ()
    """A line for each GPU that is there and cannot be read, such as one that has left the bus."""
    driver: str = ""
    """The version of NVIDIA's driver ("570.86.15"), "" where it is not known."""

    @property
    def listed(self) -> tuple[HostGpu, ...]:
        """The GPUs as others know them."""
        return tuple(reading.gpu for reading in self.readings)

    def used_by(self, pids: Collection[int]) -> dict[str, int | None]:
        """GPU id -> the bytes that these processes hold there, for those GPUs that list one of them."""
        return {
            reading.gpu.id: reading.used_by(pids)
            for reading in self.readings
            if any(pid in pids for pid, _ in reading.processes)
        }

    def find(self, gpu: str) -> Reading | None:
        """The GPU with this id, UUID (or the beginning of one, as Docker accepts it) or device file."""
        for reading in self.readings:
            if gpu in (reading.gpu.id, reading.gpu.uuid, *reading.gpu.files):
                return reading
        if not gpu.startswith(("GPU-", "MIG-")):
            return None
        close = [reading for reading in self.readings if reading.gpu.uuid.startswith(gpu)]
        return close[0] if len(close) == 1 else None


Probe = Callable[[Collection[int] | None], Gpus]
"""Reads the GPUs. Given some processes, it need not look for what others hold: that takes long."""


def probe(pids: Collection[int] | None = None, *, sensors: bool = False) -> Gpus:
    """Look at all GPUs once, see ``Probe``; never raises.

    ``sensors``: also what they measure, which takes longer.
    """
    parts = nvidia_gpus(sensors=sensors), amd_intel_gpus(pids=pids, sensors=sensors)
    readings = tuple(reading for part in parts for reading in part.readings)
    why_none = None if readings else "; ".join(part.why_none or "" for part in parts)
    return Gpus(readings, why_none, parts[0].problems, parts[0].driver)


def identities(names: Iterable[str], look: Callable[[], Gpus] | None = None) -> dict[str, str]:
    """Return for each name of a GPU the id by which its driver knows it now.

    A name is its own identity where no driver knows it. A file may name a GPU by its UUID or its device file
    while the driver is not loaded yet; only such names make the drivers be asked.
    """
    names = set(names)
    if not any(name.startswith(("GPU-", "MIG-", "/")) for name in names):
        return {name: name for name in names}
    found = look() if look else probe(())
    readings = {name: found.find(name) for name in names}
    return {name: reading.gpu.id if reading else name for name, reading in readings.items()}


def look() -> Gpus:
    """Look at all GPUs once, and at what they measure."""
    return probe(sensors=True)


def others(readings: Iterable[Reading], is_ours: Callable[[int], bool]) -> list[OtherProcess]:
    """List the other processes that hold memory of these GPUs, the greatest first.

    Processes that cannot be seen from here are left out: they may be ours, under another id.
    """
    found = [
        OtherProcess(reading.gpu.id, pid, used, name, container_of(pid) or "")
        for reading in readings
        for pid, used in reading.processes
        if not is_ours(pid) and (name := command_of(pid))
    ]
    return sorted(found, key=lambda each: -(each.used or 0))


CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?=/|$)")
"""A container's id in a path of control groups.

/docker/ID, /system.slice/docker-ID.scope, /kubepods/burstable/podUID/cri-containerd-ID.scope,
/machine.slice/libpod-ID.scope/container and their like.
"""


def container_of(pid: int, proc: Path = Path("/proc")) -> str | None:
    """The id of the container that this process of the host runs in, None where it runs in none."""
    lines = text_of(proc / str(pid) / "cgroup").splitlines()
    # Lines are HIERARCHY:CONTROLLERS:PATH. Of nested containers the innermost stands last in its path.
    found = [ids[-1] for line in lines if (ids := CONTAINER.findall(line.split(":", 2)[-1]))]
    return str(found[0]) if found else None


def command_of(pid: int, proc: Path = Path("/proc")) -> str:
    """The short name of a process, "" once it is gone."""
    return text_of(proc / str(pid) / "comm").strip()


EVERY_SECONDS = 1.0
WATCHED_SECONDS = 60.0
"""Seconds for which it goes on to look as often after somebody watched."""
SELDOM_SECONDS = 10.0


class GpuMonitor:
    """Looks at GPUs again and again; ``tell`` learns their use, and ``list_gpus`` which there are.

    ``owner`` says to which of our services a process of this host belongs; see seam.Runtime.
    """

    def __init__(
        self,
        gpus: Iterable[str],
        owner: Callable[[int], str | None],
        tell: Callable[[GpuUses], object],
        probe: Callable[[], Gpus] = look,
        now: Callable[[], float] = time.monotonic,
        list_gpus: Callable[[tuple[HostGpu, ...]], object] = lambda gpus: None,
    ) -> None:
        self._tell = tell
        self._list_gpus = list_gpus
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
        self._list_gpus(found.listed)
        readings = {gpu: found.find(gpu) for gpu in self._gpus}
        self._tell({gpu: self._use(reading) for gpu, reading in readings.items() if reading})

    def _turn(self) -> float:
        self.look()
        return SELDOM_SECONDS if self.may_slow_down() else EVERY_SECONDS

    def may_slow_down(self) -> bool:
        """Whether nobody has watched for long."""
        # Whoever watches from here on wakes the thread, so that nobody is passed over.
        self._is_slow = True
        self._is_slow = self._now() - self._watched >= WATCHED_SECONDS
        return self._is_slow

    def _use(self, reading: Reading) -> GpuUse:
        owners = {pid: self._owner(pid) for pid, _ in reading.processes}
        pids: defaultdict[str, list[int]] = defaultdict(list)
        for pid, service in owners.items():
            if service:
                pids[service].append(pid)
        users = {service: reading.used_by(own) for service, own in pids.items()}
        strangers = others([reading], lambda pid: owners[pid] is not None)
        return GpuUse(reading.used, reading.gpu.total, users, tuple(strangers), reading.sensors)


# NVIDIA's, by NVML

NOT_SUPPORTED = 3
"""The value of NVML's error for what the device does not have."""


def nvidia_gpus(nvml: ModuleType | Any | None = pynvml, *, sensors: bool = False) -> Gpus:
    """Ask NVML once; never raises. ``sensors``: also what they measure, which takes longer."""
    if nvml is None:
        return Gpus(why_none="the Python package nvidia-ml-py is not installed")
    try:
        with _session(nvml):
            readings, problems = [], []
            for index in range(nvml.nvmlDeviceGetCount()):
                try:
                    readings.append(_nvml_reading(nvml, index, sensors=sensors))
                except nvml.NVMLError as error:
                    problems.append(f"GPU {index} cannot be read: {error}")
            driver = _decoded(_answer(nvml, nvml.nvmlSystemGetDriverVersion) or "")
    except Exception as error:
        # Not only NVMLError: with a driver half removed the library itself breaks.
        return Gpus(why_none=f"NVML: {error}")
    why_none = None if readings else "; ".join(problems) or "NVML reports no GPU"
    return Gpus(tuple(readings), why_none, tuple(problems), driver)


LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""PCIe generation -> bytes per second of a lane, one way."""


@contextmanager
def _session(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _nvml_reading(nvml: Any, index: int, *, sensors: bool) -> Reading:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    total, used, shared = _nvml_memory(nvml, handle)
    name = _answer(nvml, lambda: nvml.nvmlDeviceGetName(handle))
    draw = _answer(nvml, lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)) or ()
    compute = _answer(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
    mps = _answer(nvml, lambda: nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle))
    # Current mode and the one after a reset.
    mig = _answer(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle))
    persistence = _answer(nvml, lambda: nvml.nvmlDeviceGetPersistenceMode(handle))
    return Reading(
        HostGpu(str(index), _decoded(nvml.nvmlDeviceGetUUID(handle)), _decoded(name or ""), total, shared),
        used,
        processes=tuple({each.pid: each.usedGpuMemory for each in (*(mps or ()), *draw, *compute)}.items()),
        mig=None if mig is None else bool(mig[0]),
        mps=None if mps is None else bool(mps),
        persistence=None if persistence is None else bool(persistence),
        sensors=_nvml_sensors(nvml, handle) if sensors else UNKNOWN,
        bus=_nvml_bus(nvml, handle) if sensors else None,
    )


def _nvml_memory(nvml: Any, handle: Any) -> tuple[int | None, int | None, int]:
    """The bytes that a GPU has, those that are used, and those that are the host's as well.

    Without what the driver keeps for itself, which nobody can have (driver 510 and later tell it).
    """
    newer = _answer(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    if newer is not None:
        return int(newer.total - newer.reserved), int(newer.used), 0
    try:
        found = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        if getattr(error, "value", None) != NOT_SUPPORTED:
            return None, None, 0
        total, used = host_memory()
        return total, used, total or 0
    return int(found.total), int(found.used), 0


def _nvml_sensors(nvml: Any, handle: Any) -> Sensors:
    busy = _answer(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    degrees = _answer(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    milliwatts = _answer(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    return Sensors(
        utilization=None if busy is None else busy.gpu / 100,
        celsius=None if degrees is None else float(degrees),
        watts=None if milliwatts is None else milliwatts / 1000,
    )


def _nvml_bus(nvml: Any, handle: Any) -> float | None:
    """The speed of its PCIe link; not that of the moment, since an idle GPU turns it down."""
    generation = _answer(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    lanes = _answer(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    return lanes * LANE[generation] if lanes and generation in LANE else None


def _answer(nvml: Any, question: Callable[[], Any]) -> Any:
    """Return the answer, or None where this GPU, or this version of the library, has none."""
    try:
        return question()
    except (nvml.NVMLError, AttributeError):
        return None


def _decoded(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# AMD's and Intel's, by the kernel's files

SYS, PROC = Path("/sys"), Path("/proc")
VENDORS = {"amdgpu": "amd", "i915": "intel", "xe": "intel"}
"""Driver -> the vendor whose GPUs it drives, as their ids begin."""
VENDOR_NAMES = {"amd": "AMD", "intel": "Intel"}
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


def amd_intel_gpus(
    sys: Path = SYS, proc: Path = PROC, *, pids: Collection[int] | None = None, sensors: bool = False
) -> Gpus:
    """Look at all cards once; never raises. ``sensors``: also what they measure.

    ``pids``: the processes that are looked at; all where there is a card whose users alone tell what is used.
    """
    try:
        found = cards(sys)
        if not found:
            return Gpus(why_none="no card of AMD or Intel in /sys/class/drm")
        memories = [_drm_memory(card, proc) for card in found]
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
        name = _stripped(card.folder / "product_name") or f"{VENDOR_NAMES[vendor]} {card.device}"
        readings.append(
            Reading(
                HostGpu(
                    f"{vendor}{numbers[vendor]}", card.address, name, total, shared=shared, files=card.files
                ),
                used=sum(held.values()) if used is None and complete else used,
                processes=tuple((pid, amount) for pid, amount in held.items() if amount),
                sensors=_drm_sensors(card) if sensors else UNKNOWN,
            )
        )
        numbers[vendor] += 1
    return Gpus(tuple(readings))


def cards(sys: Path = SYS) -> list[Card]:
    """Find the cards whose drivers are known, in the order of their addresses."""
    folders = [each / "device" for each in (sys / "class" / "drm").glob("card*") if each.name[4:].isdigit()]
    return sorted(filter(None, map(_card, folders)), key=lambda card: card.address)


def _card(folder: Path) -> Card | None:
    event = dict(line.partition("=")[::2] for line in _stripped(folder / "uevent").splitlines())
    driver, address = event.get("DRIVER", ""), event.get("PCI_SLOT_NAME", "")
    nodes = sorted(filter(NODE.fullmatch, (each.name for each in (folder / "drm").glob("*"))), reverse=True)
    if driver not in VENDORS or not nodes:
        return None
    by_path = [f"{GPU_FILES}by-path/pci-{address}-{kind}" for kind in ("render", "card")]
    files = (*(f"{GPU_FILES}{node}" for node in nodes), *by_path)
    return Card(address, driver, event.get("PCI_ID", ""), folder, files)


def _drm_memory(card: Card, proc: Path) -> tuple[int | None, int | None, int]:
    """The bytes that a card has, those that are used, and those that are the host's as well."""
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


def _drm_sensors(card: Card) -> Sensors:
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
    return _stripped(card.folder / "power" / "runtime_status") == "suspended"


def _first(card: Card, *names: str) -> int | None:
    """The first of these figures that the card's sensors have."""
    found: Iterator[int | None] = (
        _number(folder / name) for name in names for folder in (card.folder / "hwmon").glob("hwmon*")
    )
    return next((each for each in found if each is not None), None)


def _number(file: Path) -> int | None:
    text = _stripped(file)
    return int(text) if text.isdigit() else None


def _stripped(file: Path) -> str:
    return text_of(file).strip()


GPU_FILES = "/dev/dri/"
UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
AMOUNT = re.compile(r"drm-(resident|memory|total)-([^:\s]+):\s*(\d+)\s*(\w*)")
"""A line on a region: ``memory`` is an older word for ``resident``; ``total`` also has what is elsewhere."""
ORDER = ("resident", "memory", "total")
"""The accounts of a region, in the order in which they are believed."""


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
    account = {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    if "drm-client-id" not in account or "drm-pdev" not in account:
        return None
    amounts: dict[str, dict[str, int]] = {}
    for kind, region, number, unit in AMOUNT.findall(text):
        amounts.setdefault(region, {})[kind] = int(number) * UNITS.get(unit, 1)
    regions = {
        region: next(known[kind] for kind in ORDER if kind in known) for region, known in amounts.items()
    }
    return GpuClient(pid, account["drm-pdev"], account["drm-client-id"], regions)


def rocm_processes(sys: Path = Path("/sys")) -> dict[str, dict[int, int]]:
    """Device file of a GPU -> process id -> the bytes that ROCm has allocated for it there."""
    kfd = sys / "class" / "kfd" / "kfd"
    found: dict[str, dict[int, int]] = {}
    for node in (kfd / "topology" / "nodes").glob("*"):
        gpu, minor = _stripped(node / "gpu_id"), _property(node, "drm_render_minor")
        if gpu in ("", "0") or not minor:
            continue  # a CPU
        held = {int(each.parent.name): _stripped(each) for each in (kfd / "proc").glob(f"*/vram_{gpu}")}
        found[f"{GPU_FILES}renderD{minor}"] = {pid: int(n) for pid, n in held.items() if n.isdigit()}
    return found


def _property(node: Path, name: str) -> str:
    found = re.search(rf"^{name} (\d+)$", _stripped(node / "properties"), re.M)
    return found[1] if found else ""


# Host memory


class _GroupFiles(NamedTuple):
    """The files of a control group, of one version, that tell of its memory."""

    limits: tuple[str, ...]
    used: str
    unused: str
    """The line of memory.stat with the bytes of files that were not used for a while."""


VERSION_1 = _GroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = _GroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file")


def host_memory(proc: Path = Path("/proc")) -> tuple[int | None, int | None]:
    """The bytes of this host's memory, and those that nobody could have now; None where it does not tell."""
    kib = _amounts(proc / "meminfo")
    if "MemTotal" not in kib or "MemAvailable" not in kib:
        return None, None
    total, free = kib["MemTotal"] << 10, kib["MemAvailable"] << 10
    return total, total - free


def own_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The bytes that this process could ever have, of the host or by its control groups; 0: unknown."""
    limits = [limit for _, _, limit in _groups(proc, groups)]
    return min([_amounts(proc / "meminfo").get("MemTotal", 0) << 10, *limits])


def cache_room(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of files that may be brought into the page cache without taking memory from anybody; 0: none.

    Pages of files that nobody maps make room for others, and no others do: those that an engine maps are its
    weights. A tenth of the memory is left alone in any case. What we read counts as memory of our own control
    group, so its limits hold too.
    """
    amounts = _amounts(proc / "meminfo")
    if not amounts.keys() >= {"MemTotal", "MemAvailable", "Mapped"}:
        return 0
    total, available, mapped = (amounts[name] << 10 for name in ("MemTotal", "MemAvailable", "Mapped"))
    return max(min([available - mapped - total // 10, *_left_in_groups(proc, groups)]), 0)


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Bytes that each control group around this process may still have, or could do without."""
    for folder, names, limit in _groups(proc, groups):
        used = [int(text) for text in text_of(folder / names.used).split() if text.isdigit()]
        if used:
            yield limit - used[0] + _amounts(folder / "memory.stat").get(names.unused, 0)


def _groups(proc: Path, groups: Path) -> Iterator[tuple[Path, _GroupFiles, int]]:
    """The control groups around this process that have a limit, in bytes."""
    for line in text_of(proc / "self" / "cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root, names = (groups / "memory", VERSION_1) if kinds else (groups, VERSION_2)
        place = PurePosixPath(path)
        for folder in (root / each.relative_to("/") for each in (place, *place.parents)):
            words = [word for name in names.limits for word in text_of(folder / name).split()]
            limits = [int(word) for word in words if word.isdigit()]
            if limits:
                yield folder, names, min(limits)


def _amounts(file: Path) -> dict[str, int]:
    """Each name in a file of lines such as ``MemFree:  12 kB`` or ``file 12`` -> its number."""
    words = [line.split() for line in text_of(file).splitlines()]
    return {each[0].rstrip(":"): int(each[1]) for each in words if len(each) > 1 and each[1].isdigit()}
