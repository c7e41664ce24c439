"""Other programs, run to their end: no shell, a time limit, the process group killed when that has passed."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

API_KEYS = "ANVIL_API_KEYS"
"""The variable with the API keys that clients must have; no other program needs it."""


@dataclass(frozen=True, slots=True)
class Done:
    """The exit code and the output of a command."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def last_line(self) -> str:
        text = (self.err or self.out).strip()
        return text.splitlines()[-1].strip() if text else f"exit status {self.code}"


def without_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for another program: all but our secret."""
    return {name: value for name, value in environ.items() if name != API_KEYS}


def run(argv: Sequence[str], timeout: float, *, env: Mapping[str, str], lock: int | None = None) -> Done:
    """Run a command to its end; ``lock`` is a descriptor that it holds meanwhile.

    OSError if it cannot be run; TimeoutExpired once it was killed.
    """
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=without_keys(env),
        pass_fds=() if lock is None else (lock,),
        start_new_session=True,
    ) as child:
        try:
            out, err = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # Compose is a child of the docker program, so the whole group has to go.
            os.killpg(child.pid, signal.SIGKILL)
            raise
    return Done(child.returncode, out, err)
