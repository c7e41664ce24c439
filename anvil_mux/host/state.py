"""Files in the state folder are whole: a program that is killed leaves the old one or the new one."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Replaces ``file``, which may not be there yet. One thread at a time writes a file."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text)
    os.replace(part, file)
