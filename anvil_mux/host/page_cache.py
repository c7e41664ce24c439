"""The page cache of this machine: what of a file is in it, and how a file is brought into it.

A part is read by ``sendfile`` to /dev/null, which copies nothing: 0.03 s of CPU for a GiB. ``posix_fadvise``
would read no more than one window of the device at a time, and not say when that is there. Whether a page is
there already a read says that may not wait; ``mincore`` answers that only to the owner of a file.
"""

from __future__ import annotations

import ctypes
import os
import platform
import random
import re
from contextlib import suppress
from pathlib import Path

from anvil_mux.state import open_regular

PIECE = 8 << 20
"""Bytes that are read at a time: it takes some milliseconds before a reader is seen to be stopped."""
PROBED = 1 << 20
"""The distance between the pages of a piece that are looked at."""
ON_DISK = frozenset(
    (
        *("bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "iso9660", "jfs", "ntfs3"),
        *("overlay", "reiserfs", "squashfs", "vfat", "xfs"),
    )
)
"""The file systems whose files are on a disk of this machine, and are read by way of the page cache.

Files of a tmpfs are in memory. What a network may do to others, and for how long a cached page of a network's
file is believed, cannot be judged from here.
"""
ESCAPED = re.compile(r"\\([0-7]{3})")
"""A space in a list of mounts, or something else that would end a word."""
IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
"""Machine -> the number of its system call ioprio_set."""
ONE_THREAD, IDLE_CLASS = 1, 3 << 13
"""IOPRIO_WHO_PROCESS, which means a thread, and the class of those that read when nobody else does."""


def step_back() -> None:
    """Have this thread read from disks when nobody else does, where the machine knows of such a thing.

    For the CPU it stays as it is: others would wait for an interpreter whose holder is not let run.
    """
    if number := IOPRIO_SET.get(platform.machine()):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).syscall(number, ONE_THREAD, 0, IDLE_CLASS)


def is_on_disk(file: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether an absolute path, with links resolved, is of a file on a disk of this machine."""
    places = {file, *file.parents}
    kind, depth = "", -1
    with suppress(OSError, ValueError):
        for line in mounts.read_text().splitlines():
            before, _, after = line.partition(" - ")
            place = Path(ESCAPED.sub(lambda found: chr(int(found[1], 8)), before.split()[4]))
            if place in places and len(place.parts) >= depth:  # of two on one place the later is seen
                kind, depth = after.split()[0], len(place.parts)
    return kind in ON_DISK


class CachedFile:
    """An open file, of which parts are brought into the page cache. OSError where that is not possible."""

    def __init__(self, path: Path) -> None:
        self._file = os.fdopen(open_regular(path), "rb", buffering=0)
        self._looked_at = os.fdopen(open_regular(path), "rb", buffering=0)
        # A look at a page that is not there has it read, and no more than that page of such a file.
        os.posix_fadvise(self._looked_at.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        self.size = os.fstat(self._file.fileno()).st_size
        self._first = random.randrange(PROBED)  # so that another look is at other pages

    def __enter__(self) -> CachedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._looked_at.close()

    def missing(self) -> list[tuple[int, int]]:
        """The pieces (offset, length) that are not wholly there."""
        pieces = [(offset, min(PIECE, self.size - offset)) for offset in range(0, self.size, PIECE)]
        return [piece for piece in pieces if not self.is_there(*piece)]

    def is_there(self, offset: int, length: int) -> bool:
        """Whether a part is in the page cache, judged by some of its pages."""
        looked_at, end, page = self._looked_at.fileno(), offset + length, bytearray(1)
        probed = [*range(offset + self._first, end, PROBED), end - 1]
        try:
            return all(os.preadv(looked_at, [page], each, os.RWF_NOWAIT) for each in probed)
        except BlockingIOError:
            return False

    def bring_in(self, offset: int, length: int) -> None:
        """Return once a part is in the page cache."""
        file, end = self._file.fileno(), offset + length
        with open(os.devnull, "wb", buffering=0) as sink:
            while offset < end and (read := os.sendfile(sink.fileno(), file, offset, end - offset)):
                offset += read
