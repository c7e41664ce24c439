"""One anvil-mux per project: two would evict each other's engines."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from anvil_mux.config.config import Config
from anvil_mux.serve.options import CannotServe
from anvil_mux.state import state_folder

COMMANDS_SECONDS = 60.0
"""How long a start waits for what one that was killed has Docker do."""


@contextmanager
def locked(config: Config) -> Iterator[int]:
    """Hold the lock of the project, whose descriptor it is.

    The kernel lets go of it however the program ends, once the commands that it ran have ended too.
    """
    folder = state_folder(config.project, os.environ)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(folder / "lock", "a+")  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        advice = "set XDG_STATE_HOME to a folder that can"
        raise CannotServe(f"{folder} cannot be written ({error.strerror}): {advice}") from None
    with lock as file:
        deadline = time.monotonic() + COMMANDS_SECONDS
        while not _lock(file):
            file.seek(0)
            holder = file.read()
            if _is_there(holder):
                raise CannotServe(
                    f"another anvil-mux (process {holder}) serves the project {config.project} already, and "
                    "two would evict each other's engines. Stop it, or give this one another `project`."
                )
            if time.monotonic() >= deadline:
                raise CannotServe(
                    f"commands of an anvil-mux that was killed (process {holder or '?'}) still run after "
                    f"{COMMANDS_SECONDS:g} s; is dockerd stuck? `docker ps` tells."
                )
            time.sleep(0.05)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def _lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_there(holder: str) -> bool:
    """Whether the process that wrote its id still runs."""
    try:
        os.kill(int(holder), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        pass
    return True
