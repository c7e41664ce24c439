"""The state folder of a project; its files are whole: a program that is killed leaves the old or the new."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def state_folder(project: str, environ: Mapping[str, str]) -> Path:
    """The folder of all that outlives the program: notes of its own, records and logs of processes."""
    home = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(home, "anvil-mux", project)


def write_whole(file: Path, text: str, mode: int = 0o666, *, is_durable: bool = False) -> None:
    """Replaces ``file``, which may not be there yet. One thread at a time writes a file.

    ``mode``: who may read and write it, less what the umask forbids. What lies beside it under its name with
    ``.part``, a link too, is taken away and never written to. ``is_durable``: it also outlives a power cut.
    """
    part = file.with_name(f"{file.name}.part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as written:
        written.write(text)
        if is_durable:
            written.flush()
            os.fsync(written.fileno())
    os.replace(part, file)
    if is_durable:
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
