"""The GPUs that a service is given: NVIDIA's by a reservation, AMD's and Intel's mostly by device files.

ROCm needs ``/dev/kfd`` and the files of its GPUs below ``/dev/dri`` (``devices: [/dev/kfd, /dev/dri]``);
Vulkan, SYCL and OpenVINO need the latter alone. AMD's own container runtime and CDI name GPUs by number. Here
AMD's go by ``amd0``, ``amd1`` and so on, Intel's by ``intel0``, in the order of their PCI addresses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anvil_mux.config.diagnostic import Diagnostic, KeyPath, advice, as_yaml, unfit
from anvil_mux.config.machines import ALL
from anvil_mux.config.service import RawService, listed

AMD, INTEL = "amd", "intel"
KFD, DRI, AMD_CDI = "/dev/kfd", "/dev/dri", "amd.com/gpu"
NODE = re.compile(r"/dev/dri/((card|renderD)\d+|by-path/.+)")
NUMBERED = re.compile(rf"({AMD}|{INTEL})(\d+)")
NARROWING = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""The variables by which ROCm leaves out GPUs of those that it sees; the first one that is there counts."""
RUNTIME_VARIABLE = "AMD_VISIBLE_DEVICES"
NVIDIA_CDI = "nvidia.com/gpu"
"""The kind of device by which CDI knows GPUs."""
CDI_KINDS = {NVIDIA_CDI: "", AMD_CDI: AMD, "intel.com/gpu": INTEL}
"""Kind of device of CDI -> the vendor; "" for NVIDIA."""
ALL_THERE_ARE = "all there are"
"""The need of a process that says nothing of GPUs: it may use every one that its machine has, if any."""
RESERVED = ("deploy", "resources", "reservations", "devices")
RESERVATION = "devices: [{driver: nvidia, count: all, capabilities: [gpu]}]"
"""The line that reserves all GPUs, below deploy.resources.reservations."""


# What a service asks for


def gpus(service: RawService, variables: Mapping[str, str]) -> str | tuple[str, ...] | None:
    """``ALL``, or ids of the GPUs that the service asks for; None where it asks for none.

    ``variables`` is its environment. CUDA_VISIBLE_DEVICES counts where it cannot mean "the second of those
    that I was given".
    """
    given = reserved(service)
    if given is None and service.get("runtime") == "nvidia":
        given = _visible(variables.get("NVIDIA_VISIBLE_DEVICES", ALL))  # images of CUDA set it to all
    chosen = variables.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not (given in (None, ALL) or _counted(given)):
        return given
    narrowed = _visible(chosen)
    if given in (None, ALL) or narrowed is None or set(narrowed) <= set(given or ()):
        return narrowed
    return given


def hides_gpus(variables: Mapping[str, str]) -> bool:
    """Whether a process with this environment sees no GPU."""
    return any(variables.get(name, "0").strip() in ("", "-1") for name in NARROWING)


def reserves_gpu(service: RawService) -> bool:
    """Whether Docker would give the container any GPU."""
    return is_nvidia(service) or _other_gpus(service, {}) is not None


def is_nvidia(service: RawService) -> bool:
    """Whether the service asks Docker for GPUs of NVIDIA."""
    return reserved(service) is not None or service.get("runtime") == "nvidia"


def others_gpus(service: RawService, variables: Mapping[str, str]) -> GivenGpus | None:
    """The GPUs of AMD or Intel that the service is given; None: none, or it asks for NVIDIA's."""
    found = None if is_nvidia(service) else _other_gpus(service, variables)
    is_rocm = found is not None and found.vendors == (AMD,)
    return found if is_rocm or gpus(service, variables) is None else None


def gpus_by(service: RawService) -> str:
    """The way by which it reserves GPUs: ``cdi``, ``reservation``, or "" where it has none or another way."""
    if any(_cdi(service)):
        return "cdi"
    return "reservation" if any(True for _ in gpu_requests(service)) else ""


def reserved(service: RawService) -> str | tuple[str, ...] | None:
    """``ALL``, or ids of the GPUs that the service reserves; None where it reserves none."""
    requests = [*_requested(service), *_cdi(service)]
    if not requests:
        return None
    if ALL in requests:
        return ALL
    return tuple(dict.fromkeys(id for request in requests for id in request))


def counted_gpus(service: RawService, variables: Mapping[str, str]) -> int | None:
    """How many GPUs the service reserves without a word on which; None where that is not so."""
    requests = [*gpu_requests(service)]
    if (
        len(requests) != 1
        or _vendor(requests[0])
        or any(_cdi(service))
        or "CUDA_VISIBLE_DEVICES" in variables
    ):
        return None
    found = None if listed(requests[0], "device_ids") else _request(requests[0], ("gpus",))
    return len(found) or None if isinstance(found, tuple) else None


def gpu_requests(service: RawService) -> Iterator[Mapping[str, Any]]:
    """The reservations of GPUs, each as {driver, count, device_ids, capabilities}."""
    for device in reserved_devices(service):
        if is_gpu_request(device):
            yield device
    written = service.get("gpus")
    if written == ALL:
        yield {"count": ALL}
        return
    requests = [] if written is None else written
    if not isinstance(requests, list) or not all(isinstance(each, Mapping) for each in requests):
        text = "gpus must be `all` or a list of {driver, count, device_ids}"
        raise unfit(text, write=gpus_meant(written), key=("gpus",))
    yield from (each for each in requests if _vendor(each) in CDI_KINDS.values())


def gpus_meant(value: Any) -> str:
    """The line for a value of ``gpus`` in which ids of GPUs stand, or how many; none is ``count: 0``."""
    ids = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    if not all(id.isdigit() for id in ids):
        return "gpus: all"
    return f"gpus: [{{driver: nvidia, device_ids: {as_yaml(ids)}}}]"


def reserved_devices(service: RawService) -> list[Mapping[str, Any]]:
    """The devices that are reserved under deploy."""
    inner: Any = service
    for depth, key in enumerate(RESERVED[:-1], 1):
        inner = inner.get(key) or {}
        if not isinstance(inner, Mapping):
            raise unfit(f"{key} must be a mapping", write=RESERVATION, key=RESERVED[:depth])
    written = inner.get("devices")
    found = [] if written is None else written
    name = ".".join(RESERVED)
    if not isinstance(found, list):
        raise unfit(f"{name} must be a list", write=f"devices: {as_yaml([written])}", key=RESERVED)
    if not all(isinstance(device, Mapping) for device in found):
        raise unfit(f"{name} must list mappings", write=RESERVATION, key=RESERVED)
    return found


def is_gpu_request(device: Mapping[str, Any]) -> bool:
    capable = any(str(each).startswith(("gpu", "nvidia", "amd")) for each in listed(device, "capabilities"))
    return (capable or _is_cdi(device)) and _vendor(device) in CDI_KINDS.values()


def _requested(service: RawService) -> Iterator[str | tuple[str, ...]]:
    """The GPUs of NVIDIA in each reservation."""
    key = RESERVED if reserved_devices(service) else ("gpus",)
    for request in gpu_requests(service):
        if not _vendor(request):
            yield _request(request, key)


def reserves_others(service: RawService) -> GivenGpus | None:
    """The GPUs of AMD or Intel that the service reserves by their driver, or by CDI; None: none."""
    found = [
        (vendor, _request(each, RESERVED)) for each in gpu_requests(service) if (vendor := _vendor(each))
    ]
    ids = [() if numbers == ALL else numbered(vendor, numbers) for vendor, numbers in found]
    vendors = tuple(dict.fromkeys(vendor for vendor, _ in found))
    return GivenGpus(vendors, sum(ids, ()) if all(ids) else ()) if found else None


def _other_gpus(service: RawService, variables: Mapping[str, str]) -> GivenGpus | None:
    return reserves_others(service) or by_files(service, variables)


def device_ids(request: Mapping[str, Any], gpus: Sequence[str]) -> list[str]:
    """The ids by which a reservation names these GPUs, written as it writes its own."""
    numbers = [id.removeprefix(_vendor(request)) for id in gpus]
    kind = next((kind for kind, vendor in CDI_KINDS.items() if vendor == _vendor(request)), NVIDIA_CDI)
    return [f"{kind}={number}" for number in numbers] if _is_cdi(request) else numbers


def _is_cdi(request: Mapping[str, Any]) -> bool:
    return request.get("driver") == "cdi" or any("=" in str(id) for id in listed(request, "device_ids"))


def _vendor(request: Mapping[str, Any]) -> str:
    """The vendor whose GPUs a reservation means, by its driver or its CDI names; "" for NVIDIA."""
    for id in listed(request, "device_ids"):
        kind, is_named, _ = str(id).partition("=")
        if is_named:
            return CDI_KINDS.get(kind, kind)
    driver = str(request.get("driver") or "")
    return driver if driver in (AMD, INTEL) else ""


def _request(request: Mapping[str, Any], key: KeyPath) -> str | tuple[str, ...]:
    if ids := listed(request, "device_ids"):
        numbers = tuple(
            str(each).rpartition("=")[2].partition(":")[0] if _is_cdi(request) else str(each) for each in ids
        )
        return ALL if ALL in numbers else numbers
    count = request.get("count", ALL)
    if count in (ALL, -1, "-1", None):
        return ALL
    if isinstance(count, bool) or not re.fullmatch(r"[0-9]+", str(count)):
        raise unfit(f"count must be `all` or a number of GPUs, not {count!r}", write="count: all", key=key)
    return tuple(str(index) for index in range(int(count)))


def _cdi(service: RawService) -> Iterator[str | tuple[str, ...]]:
    for device in listed(service, "devices"):
        if id := cdi_gpu(device):
            yield ALL if id == ALL else (id,)


def cdi_gpu(device: Any) -> str:
    """The id of a GPU that CDI is asked for; "" if the device is none."""
    source = device.get("source") if isinstance(device, Mapping) else device
    vendor, _, id = str(source).partition("=")
    return id.partition(":")[0] if vendor == NVIDIA_CDI else ""


def _visible(value: str) -> str | tuple[str, ...] | None:
    if value == ALL:
        return ALL
    ids = tuple(part.strip() for part in value.split(",") if part.strip())
    return None if not ids or ids[0] in ("none", "void", "-1") else ids


def _counted(ids: str | tuple[str, ...] | None) -> bool:
    return isinstance(ids, tuple) and ids == tuple(str(index) for index in range(len(ids)))


# Device files


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


def by_files(service: Mapping[str, Any], variables: Mapping[str, str]) -> GivenGpus | None:
    """The GPUs that a service is given by device files, AMD's runtime or CDI; None: it is given none so.

    ``variables`` is its environment.
    """
    paths = [*_sources(service)]
    numbers = [path.partition("=")[2] for path in paths if path.startswith(f"{AMD_CDI}=")]
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
    """The variables that show a process these GPUs alone, counted as the monitoring counts them."""
    if any(map(vendor_of, gpus)):
        numbers = [found[2] for gpu in gpus if (found := NUMBERED.fullmatch(gpu)) and found[1] == AMD]
        return {NARROWING[0]: ",".join(numbers)} if numbers else {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def caveats(service: Mapping[str, Any], found: GivenGpus, gpus: Sequence[str]) -> Iterator[str]:
    """Warnings of what a service lacks that is given GPUs of AMD or Intel, with remedies."""
    paths = [*_sources(service)]
    if KFD in paths and not any(path == DRI or NODE.fullmatch(path) for path in paths):
        said, more = f"has {KFD} without {DRI}, and ROCm needs both", "or one file of it for each GPU"
        yield advice(said, f"devices: [{KFD}, {DRI}]", f"add {DRI}, {more}", key=("devices",))
    user = str(service.get("user") or "root").partition(":")[0]
    if user not in ("root", "0") and not service.get("group_add"):
        said, write = f"runs as {user}, who may not open {DRI}; add", "group_add: [video, render]"
        text, short = f"{said} {write}, by the host's numbers", f"{said} the host's groups, by their numbers"
        yield Diagnostic(text, said=short, write=write, key=("group_add",))
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
