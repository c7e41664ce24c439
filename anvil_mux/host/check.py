"""The needs of a configuration that this machine does not meet; each question imports only what it uses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from anvil_mux.host.seam import HostConfig, HostGpu

DRIVERS = ("/dev/nvidiactl", "/sys/class/drm/card0", "/sys/class/drm/card1")
"""Files that are there if a driver of GPUs is."""


def gpus_here() -> tuple[HostGpu, ...]:
    """The GPUs of this machine; none is looked for where there is no driver of theirs."""
    if not any(map(os.path.exists, DRIVERS)) and "NVIDIA_VISIBLE_DEVICES" not in os.environ:
        return ()
    from anvil_mux.host import gpu

    return gpu.listed(gpu.probe())


class VendorGpus(NamedTuple):
    """The GPUs of one vendor in this machine."""

    vendor: str
    gpus: tuple[HostGpu, ...]
    note: str
    """Why there are none, or what is to be known of those that there are."""


def gpus_by_vendor() -> list[VendorGpus]:
    """Look at the GPUs of this machine, vendor by vendor."""
    from anvil_mux.host import drm, drm_clients, gpu, nvml

    nvidias, others = nvml.probe(), gpu.listed(cards := drm.probe())
    driver = nvidias.driver and f"driver {nvidias.driver}"
    found = [VendorGpus("NVIDIA", gpu.listed(nvidias), nvidias.why_none or driver)]
    for vendor, name in drm.NAMES.items():
        own = tuple(each for each in others if each.id.startswith(vendor))
        unseen = bool(own) and not drm_clients.clients()[1]
        note = (
            "only some of the processes that hold their memory are known: root alone sees all"
            if unseen
            else ""
        )
        found.append(VendorGpus(name, own, note if own else cards.why_none or "no card in /sys/class/drm"))
    return found


def why_not_checkpoint(gpus: Sequence[str], insist: bool) -> str | None:
    """Why no service on these GPUs can be checkpointed; None: it can. ``insist``: several are allowed."""
    from anvil_mux.host.checkpoint import Checkpointer

    return Checkpointer().why_not(gpus, insist=insist)


def missing_images(config: HostConfig) -> list[str]:
    """A warning for each image that Docker does not have; BackendError if it cannot be asked."""
    if config.runtime != "compose":
        return []
    from anvil_mux.host import containers

    return containers.missing_images(config.backends)


def engine_limits(config: HostConfig) -> list[str]:
    """A warning for what the container engine cannot do; BackendError if it cannot be asked."""
    if config.runtime != "compose" or not config.backends:
        return []
    from anvil_mux.host import containers

    return containers.engine_limits(config.backends)


def missing_rights(config: HostConfig) -> list[str]:
    """A warning for each right that a checkpoint needs, and whoever runs this has not."""
    if not any("checkpoint" in backend.evict_to for backend in config.backends):
        return []
    from anvil_mux.host import rights
    from anvil_mux.host.local import build_runtime

    return rights.warnings(config, build_runtime(config))
