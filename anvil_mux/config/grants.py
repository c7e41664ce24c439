"""The GPUs that an engine is given, written into its service.

``placement`` decides which GPUs a backend has. Here that decision becomes what the engine is started
with, for both runtimes and all vendors: device ids or device files for a container, variables for a
process. Whatever the service says itself is replaced, unless it already means exactly these GPUs.

CUDA counts the fastest GPU first by default, and NVML counts in the order of the PCI bus. So the order
is always written with the numbers; a service that asks for another order is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from anvil_mux.config import service
from anvil_mux.config.machines import ALL
from anvil_mux.config.service import AMD, INTEL, NUMBERED, RawService

ORDER, PCI_ORDER = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
CUDA_ID = re.compile(r"\d+|(GPU|MIG)-.+")
"""The ids of GPUs by which CUDA knows them too; others are names of the file's own."""
INTEL_ORDER = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
VISIBLE = (service.CUDA_VISIBLE, service.NVIDIA_VISIBLE)


def to_process(variables: Mapping[str, str], gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of a process that sees these GPUs alone of their vendors; (): none."""
    if not gpus:
        return {**variables, service.CUDA_VISIBLE: ""}
    found = dict(variables)
    numbers: dict[str, list[str]] = {}
    for gpu in gpus:
        numbered = NUMBERED.fullmatch(gpu)
        vendor, number = (numbered[1], numbered[2]) if numbered else ("", gpu)
        numbers.setdefault(vendor, []).append(number)
    if AMD in numbers:
        for name in service.NARROWING:
            found.pop(name, None)
        found[service.NARROWING[0]] = ",".join(numbers[AMD])
    if INTEL in numbers:
        found.pop(service.ONEAPI_SELECTOR, None)
        found |= {INTEL_ORDER: "1", service.INTEL_MASK: ",".join(numbers[INTEL])}
    if all(map(CUDA_ID.fullmatch, numbers.get("", [""]))):
        found |= {ORDER: PCI_ORDER, service.CUDA_VISIBLE: ",".join(numbers[""])}
    return found


def are_ids(gpus: Sequence[str]) -> bool:
    """Whether drivers know these GPUs by their ids.

    Else some are names of the file's own, which say who takes turns: nothing is to be written of them.
    """
    return all(CUDA_ID.fullmatch(gpu) or NUMBERED.fullmatch(gpu) for gpu in gpus)


def wrong_order(variables: Mapping[str, str]) -> str:
    """Return the order in which the service has CUDA count GPUs; "" for that of the PCI bus."""
    order = variables.get(ORDER, PCI_ORDER).strip()
    return "" if order == PCI_ORDER else order


def of_container(described: RawService, variables: Mapping[str, str]) -> str | tuple[str, ...] | None:
    """Return the GPUs of NVIDIA that Docker gives the container as described; None: none."""
    given = service.reserved(described)
    if given is None and described.get("runtime") == "nvidia":
        return service.visible(variables.get(service.NVIDIA_VISIBLE, ALL))
    return given


def to_container(
    made: dict[str, Any], described: RawService, gpus: Sequence[str], files: Sequence[str]
) -> None:
    """Make the description reserve these GPUs, by the means that it uses itself; "none" stays none.
    ``made``: the description, whose environment is resolved. ``files``: the device files of GPUs of
    AMD and Intel; "" where that is not known.
    """
    environment = made["environment"]
    requests = [*service.gpu_requests(described)]
    if service.others_gpus(described, {}):
        if service.reserves_others(described):
            made.pop("gpus", None)
            _reserve(made, described, requests, gpus)
        elif all(files):
            made |= service.narrowed(made, files)
        else:
            made["environment"] = to_process(environment, gpus)
        return
    if not service.reserves_gpu(described):
        environment |= {name: ",".join(gpus) for name in VISIBLE if name in environment}
        return
    for name in VISIBLE:
        environment.pop(name, None)  # they would count from 0 among those that the container has
    made.pop("gpus", None)
    by_cdi = service.cdi_gpus(made)
    if made.get("runtime") == "nvidia" and not requests and not by_cdi:
        environment[service.NVIDIA_VISIBLE] = ",".join(gpus)  # Podman ignores reservations
        return
    if made.get("runtime") == "nvidia":
        made.pop("runtime")
    if by_cdi:
        named = [f"{service.NVIDIA_CDI}={id}" for id in gpus]
        made["devices"] = [*(each for each in made["devices"] if not service.cdi_gpu(each)), *named]
    if requests or not by_cdi:
        _reserve(made, described, requests, gpus)


def _reserve(
    made: dict[str, Any], described: RawService, requests: Sequence[Mapping[str, Any]], gpus: Sequence[str]
) -> None:
    first = requests[0] if requests else {"driver": "nvidia"}
    request = {key: first[key] for key in ("driver", "options") if first.get(key)}
    wanted = dict.fromkeys(each for request in requests for each in request.get("capabilities") or ())
    request |= {"device_ids": service.device_ids(first, gpus), "capabilities": [*(wanted or ("gpu",))]}
    others = [device for device in service.reserved_devices(described) if not service.is_gpu_request(device)]
    deploy = made.get("deploy") or {}
    resources = deploy.get("resources") or {}
    reservations = {**(resources.get("reservations") or {}), "devices": [*others, request]}
    made["deploy"] = {**deploy, "resources": {**resources, "reservations": reservations}}
