"""The GPUs of this machine and the memory of models, as ``check`` tells of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from anvil_mux.config.config import Config
from anvil_mux.scheduler.footprint import to_declare
from anvil_mux.serve.learned import Known


def vram_to_declare(config: Config, known: Known) -> Iterator[str]:
    """Yield a hint for each backend without ``vram`` that shares its GPUs, and was measured."""
    held = {each.backend: each for each in known.footprints if each.held}
    users = Counter(gpu for backend in config.backends for gpu in backend.gpu_names)
    for backend in config.backends:
        last = held.get(backend.name)
        if last is None or backend.vram or backend.vram_measured or last.is_outdated(backend.service.digest):
            continue
        if any(users[gpu] > 1 for gpu in backend.gpu_names):
            size = to_declare(last.held)
            yield (
                f"{backend.name} held {size} of each GPU when it last ran: declare x-anvil: "
                f"{{vram: {size}}}, and others may be loaded beside it"
            )
