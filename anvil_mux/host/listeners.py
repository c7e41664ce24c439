"""The processes that listen at TCP ports of this machine, as the kernel lists them.

Only root sees whose the sockets of other users are.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTENING = "0A"


class Listener(NamedTuple):
    """A process that listens at a port."""

    pid: int
    program: str


def find_listeners(ports: Collection[int]) -> Mapping[int, Listener]:
    """Return a process for each of these ports at which one listens that this user may inspect."""
    inodes = {inode: port for port, inode in _sockets() if port in ports}
    found: dict[int, Listener] = {}
    if not inodes:
        return found
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError):  # it has ended, or belongs to another user
            for link in os.listdir(folder / "fd"):
                target = os.readlink(folder / "fd" / link)
                port = inodes.get(target.removeprefix("socket:[").removesuffix("]"))
                if port is not None and port not in found:
                    program = (folder / "comm").read_text().strip()
                    found[port] = Listener(int(folder.name), program)
    return found


def _sockets() -> Iterator[tuple[int, str]]:
    """Yield port and inode of each listening socket."""
    for table in TABLES:
        with suppress(OSError, ValueError, IndexError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING:
                    yield int(words[1].rpartition(":")[2], 16), words[9]
