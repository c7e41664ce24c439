"""The GPUs of this machine and the memory of models, as ``check`` tells of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from anvil_mux.config.config import Config
from anvil_mux.config.diagnostic import Diagnostic
from anvil_mux.config.settings import gib
from anvil_mux.host.check import VendorGpus
from anvil_mux.host.seam import HostGpu
from anvil_mux.scheduler.footprint import to_declare
from anvil_mux.serve.state_files import Known


def as_json(found: Sequence[VendorGpus]) -> list[dict[str, Any]]:
    """The GPUs of this machine, vendor by vendor."""
    return [
        {"vendor": vendor, "gpus": [each._asdict() for each in gpus], "note": note}
        for vendor, gpus, note in found
    ]


def lines(found: Sequence[VendorGpus]) -> Iterator[str]:
    """Yield a line for each vendor of which there are GPUs, or one that says why there are none."""
    if not any(each.gpus for each in found):
        yield "no GPU found here: " + "; ".join(f"{each.vendor}: {each.note}" for each in found)
    for vendor, gpus, note in found:
        if gpus:
            shown = ", ".join(map(_shown, gpus))
            yield f"{vendor}: {shown}" + (f" ({note})" if note else "")


def _shown(gpu: HostGpu) -> str:
    name = f"{gpu.id} {gpu.name}".strip()
    if gpu.total is None:
        return f'{name} of unknown size (declare it: gpus: {{"{gpu.id}": {{vram: ...}}}})'
    shared = f", {gib(gpu.shared)} of it host memory" if gpu.shared else ""
    return f"{name} {gib(gpu.total)}{shared}"


def vram_to_declare(config: Config, known: Known) -> Iterator[str]:
    """Yield a hint for each backend that shares its GPUs, was measured, and has no ``vram`` or too little."""
    held = {each.backend: each for each in known.footprints if each.held}
    users = Counter(gpu for backend in config.backends for gpu in backend.gpu_names)
    for backend in config.backends:
        last = held.get(backend.name)
        if last is None or backend.vram_measured or last.is_outdated(backend.service.digest):
            continue
        if (backend.vram or 0) >= max(last.held.values()):
            continue
        if any(users[gpu] > 1 for gpu in backend.gpu_names):
            size = to_declare(last.held)
            write = f"x-anvil: {{vram: {size}}}"
            fact = f"{backend.name} held {size} of each GPU when it last ran"
            if backend.vram:
                short = f"{fact}, more than its vram"
                sentence = f"{short}: declare {write}"
            else:
                benefit = "others may be loaded beside it"
                short, sentence = f"{fact}; declared, {benefit}", f"{fact}: declare {write}, and {benefit}"
            key = ("services", backend.name, "x-anvil", "vram")
            yield Diagnostic(sentence, said=short, write=write, key=key)
