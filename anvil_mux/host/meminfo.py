"""The memory of this host, as the kernel counts it: what GPUs without memory of their own compute in."""

from __future__ import annotations

from pathlib import Path


def host_memory(proc: Path = Path("/proc")) -> tuple[int | None, int | None]:
    """The bytes of this host's memory, and those that nobody could have now; None where it does not tell."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None, None
    kib = {line.partition(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}
    if "MemTotal" not in kib or "MemAvailable" not in kib:
        return None, None
    total, free = int(kib["MemTotal"]) << 10, int(kib["MemAvailable"]) << 10
    return total, total - free
