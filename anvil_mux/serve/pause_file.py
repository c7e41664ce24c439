"""The file ``pause`` in the state folder: a pause outlives the anvil-mux that was paused.

It is there while anvil-mux is paused, and replaced as a whole. One that cannot be read counts as a pause
without an end: whoever has been lent the GPUs keeps them until somebody says otherwise.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

from anvil_mux.proxy.operations import KeptPause
from anvil_mux.state import write_whole


class PauseFile:
    """Used by one thread at a time; ``say`` is told what goes wrong."""

    def __init__(self, folder: Path, say: Callable[[str], object]) -> None:
        self._file = folder / "pause"
        self._say = say

    def keep(self, pause: KeptPause | None) -> bool:
        """Write down a pause, or that there is none; False if that fails."""
        try:
            if pause is None:
                self._file.unlink(missing_ok=True)
            else:
                write_whole(self._file, json.dumps({"until": pause.until}))
        except OSError as error:
            self._say(f"{self._file} cannot be written, so a restart forgets this: {error.strerror}")
            return False
        return True

    def seconds_left(self) -> float | None:
        """How long the pause of an earlier start lasts still; infinite: until it is resumed; None: none."""
        try:
            until = json.loads(self._file.read_text())["until"]
            left = math.inf if until is None else float(until) - time.time()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._say(f"{self._file} cannot be read, so anvil-mux stays paused until it is resumed: {error}")
            return math.inf
        if left > 0:
            return left
        self.keep(None)
        return None
