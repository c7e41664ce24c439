"""Files: the state folder of a project, in which each is whole however we end, and what others wrote."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

MOST = 16 << 20
"""The most bytes of a file that is read as a whole."""
ROOM_BYTES = 1024
"""The room that a file has which is also written when the disk is full; less than a block of any disk."""


def state_folder(project: str, environ: Mapping[str, str]) -> Path:
    """The folder of all that outlives the program: notes of its own, records and logs of processes."""
    home = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(home, "anvil-mux", project)


SIMULATED = "simulated-hosts"
"""The folder beside those of projects with the state of hosts that are simulated on this machine."""


def is_served(folder: Path) -> bool:
    """Whether an anvil-mux of this machine serves the project whose state ``folder`` this is."""
    try:
        with open(folder / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def open_lock(folder: Path, mode: int = 0o666) -> int:
    """Return a descriptor of the lock in a state folder, which is made if need be; OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)


def try_lock(lock: int) -> bool:
    """Take a lock that ``open_lock`` has opened; return whether nobody else holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def note_holder(lock: int) -> None:
    """Write our process id where the next one reads whom it waits for: in place, which takes no new room."""
    holder = str(os.getpid()).encode()
    with suppress(OSError):  # on a disk that is full at the first start
        os.pwrite(lock, holder, 0)
        os.ftruncate(lock, len(holder))


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


def replace_text(file: Path, text: str) -> None:
    """Replace a small file durably; where the disk is full, its content in place, which takes no new room.

    The text is padded with spaces, so that a later one fits into the room of this one.
    """
    padded = text.ljust(ROOM_BYTES)
    try:
        write_whole(file, padded, is_durable=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with suppress(OSError):
            file.with_name(f"{file.name}.part").unlink()
        _overwrite(file, padded, error)


def _overwrite(file: Path, text: str, full: OSError) -> None:
    """Write a text over that of a file which has the room for it; else raise ``full``."""
    try:
        opened = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise full from None
    try:
        content = text.encode()
        size = os.fstat(opened).st_size
        if len(content) > max(size, ROOM_BYTES):
            raise full
        os.pwrite(opened, content.ljust(size), 0)
        os.fsync(opened)
    finally:
        os.close(opened)


def once(say: Callable[[str], object]) -> Callable[[str], None]:
    """Hand on to ``say`` only the first of all texts: that a file still cannot be written is no news."""
    is_said = False

    def say_first(text: str) -> None:
        nonlocal is_said
        if not is_said:
            is_said = True
            say(text)

    return say_first


def open_regular(file: str | os.PathLike[str], how: int = os.O_RDONLY) -> int:
    """Open a file that others may have put there; OSError where it is a pipe, or a device."""
    opened = os.open(file, how | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(opened).st_mode
    if stat.S_ISREG(mode):
        return opened
    os.close(opened)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    raise OSError(errno.EINVAL, "it is no regular file", str(file))


def read_bytes(file: str | os.PathLike[str], most: int = MOST) -> bytes:
    """The content of a regular file; OSError where there is none, or too much."""
    with os.fdopen(open_regular(file), "rb") as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(file))
    return content


def text_of(file: Path) -> str:
    """The text of a file of ours or of the kernel; "" where it is not there, or cannot be read."""
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""


def read_text(file: str | os.PathLike[str], encoding: str = "utf-8", errors: str = "strict") -> str:
    """The text in such a file, with the ends of its lines as \\n."""
    text = read_bytes(file).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")
