"""The GPUs of AMD and Intel, as services are given them: mostly by device files, not by a reservation.

ROCm needs ``/dev/kfd`` and the files of its GPUs below ``/dev/dri`` (``devices: [/dev/kfd, /dev/dri]``);
Vulkan, SYCL and OpenVINO need the latter alone. AMD's own container runtime and CDI name GPUs by number. Here
AMD's go by ``amd0``, ``amd1`` and so on, Intel's by ``intel0``, in the order of their PCI addresses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anvil_mux.config.diagnostic import Diagnostic

AMD, INTEL = "amd", "intel"
KFD, DRI, CDI = "/dev/kfd", "/dev/dri", "amd.com/gpu"
NODE = re.compile(r"/dev/dri/((card|renderD)\d+|by-path/.+)")
NUMBERED = re.compile(rf"({AMD}|{INTEL})(\d+)")
NARROWING = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""The variables by which ROCm leaves out GPUs of those that it sees; the first one that is there counts."""
RUNTIME_VARIABLE = "AMD_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class GivenGpus:
    """The GPUs of AMD or Intel that a service is given."""

    vendors: tuple[str, ...]
    ids: tuple[str, ...] = ()
    """Their ids or device files; empty: all that there are of these vendors."""


def vendor_of(id: str) -> str:
    """The vendor of a GPU by its id; "" for NVIDIA's, and those that only the file names."""
    found = NUMBERED.fullmatch(id)
    return found[1] if found else ""


def of_vendors(ids: Iterable[str], vendors: Sequence[str]) -> list[str]:
    """The GPUs of these vendors; without ``vendors`` NVIDIA's, or all where there is none of those."""
    known = [*ids]
    if vendors:
        return [id for id in known if vendor_of(id) in vendors]
    return [id for id in known if not vendor_of(id)] or known


def given(service: Mapping[str, Any], variables: Mapping[str, str]) -> GivenGpus | None:
    """The GPUs that a service is given by device files, AMD's runtime or CDI; None: it is given none so.

    ``variables`` is its environment.
    """
    paths = [*_sources(service)]
    numbers = [path.partition("=")[2] for path in paths if path.startswith(f"{CDI}=")]
    if service.get("runtime") == AMD:
        numbers += variables.get(RUNTIME_VARIABLE, "all").split(",")
    if numbers:
        return GivenGpus((AMD,), numbered(AMD, numbers))
    nodes = tuple(dict.fromkeys(path for path in paths if NODE.fullmatch(path)))
    if KFD not in paths and DRI not in paths and not nodes:
        return None
    vendors = (AMD,) if KFD in paths else (AMD, INTEL)
    if nodes and DRI not in paths:
        return GivenGpus(vendors, nodes)
    narrowed = next((variables[name] for name in NARROWING if name in variables), "") if KFD in paths else ""
    return GivenGpus(vendors, numbered(AMD, narrowed.split(",")))


def numbered(vendor: str, numbers: Sequence[str]) -> tuple[str, ...]:
    """The ids of a vendor's GPUs of these numbers; () for all, and where some are no numbers."""
    found = [each.strip() for each in numbers]
    return tuple(f"{vendor}{each}" for each in found) if found and all(map(str.isdigit, found)) else ()


def narrowed(service: Mapping[str, Any], files: Sequence[str]) -> dict[str, Any]:
    """The service's devices and variables if it is given these files of GPUs in place of all."""
    devices = [each for each in service.get("devices") or () if not _is_gpu(each)]
    kept = {n: value for n, value in (service.get("environment") or {}).items() if n not in NARROWING}
    return {"devices": [*devices, *files], "environment": kept}


def sees_only(gpus: Sequence[str]) -> dict[str, str]:
    """The variable that shows a process these GPUs of AMD alone; {} for others."""
    numbers = [found[2] for gpu in gpus if (found := NUMBERED.fullmatch(gpu)) and found[1] == AMD]
    return {NARROWING[0]: ",".join(numbers)} if numbers else {}


def caveats(service: Mapping[str, Any], found: GivenGpus, gpus: Sequence[str]) -> Iterator[str]:
    """Warnings of what a service lacks that is given GPUs of AMD or Intel, with remedies."""
    paths = [*_sources(service)]
    if KFD in paths and not any(path == DRI or NODE.fullmatch(path) for path in paths):
        said = f"has {KFD} without {DRI}, and ROCm needs both"
        text = f"{said}; add {DRI}, or one file of it for each GPU"
        yield Diagnostic(text, said=said, write=f"devices: [{KFD}, {DRI}]", key=("devices",))
    user = str(service.get("user") or "root").partition(":")[0]
    if user not in ("root", "0") and not service.get("group_add"):
        said, write = f"runs as {user}, who may not open {DRI}", "group_add: [video, render]"
        text = f"{said}; add {write}, by the host's numbers"
        yield Diagnostic(
            text, said=f"{said}; add the host's groups, by their numbers", write=write, key=("group_add",)
        )
    if not gpus:
        is_intel = found.vendors[-1] == INTEL and re.search("intel|ipex", str(service.get("image")).lower())
        write = f'x-anvil: {{gpus: ["{INTEL if is_intel else found.vendors[0]}0"]}}'
        said = "is given GPUs, and none of them is known here; say which"
        yield Diagnostic(f"{said}: {write}", said=said, write=write, key=("devices",))


def _is_gpu(device: Any) -> bool:
    path = _source(device)
    return path == DRI or NODE.fullmatch(path) is not None


def _sources(service: Mapping[str, Any]) -> Iterator[str]:
    """The paths on the host of a service's devices."""
    devices = service.get("devices")
    yield from map(_source, devices if isinstance(devices, list) else ())


def _source(device: Any) -> str:
    if isinstance(device, Mapping):
        return str(device.get("source", ""))
    text = str(device)
    by_path = re.match(r"/dev/dri/by-path/pci-[0-9a-f:.]+-(render|card)", text)  # has colons of its own
    return by_path[0] if by_path else text.rstrip("/") if "=" in text else text.partition(":")[0].rstrip("/")
