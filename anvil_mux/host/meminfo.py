"""The memory of this host, as the kernel counts it: what GPUs without memory of their own compute in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from anvil_mux.state import text_of


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
