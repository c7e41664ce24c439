"""What was learned, kept across restarts: what swaps cost.

One file in the state folder, replaced as a whole, so that a program that is killed leaves the old one. If it
cannot be read, that is said and forgotten: everything in it can be learned again. It holds JSON, but lacks
the suffix, which is that of the records of processes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from anvil_mux.config import Config
from anvil_mux.costs import Cost

VERSION = 1


class Learned:
    """The file ``learned`` in ``folder``. Used by one thread at a time; ``complain`` is told once."""

    def __init__(self, folder: Path, complain: Callable[[str], object]) -> None:
        self._file = folder / "learned"
        self._complain: Callable[[str], object] | None = complain
        self._saved: Sequence[Cost] = ()

    def read(self, config: Config) -> Sequence[Cost]:
        """What is known of the models that are still served."""
        models = {backend.model for backend in config.backends}
        try:
            content = json.loads(self._file.read_text())
            if content["version"] != VERSION:
                return ()
            costs = [Cost(**about) for about in content["costs"]]
            self._saved = [cost for cost in costs if cost.target in models and cost.seconds >= 0.0]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._say(f"{self._file} cannot be read, so what swaps cost is learned anew: {error}")
        return self._saved

    def save(self, costs: Sequence[Cost]) -> None:
        """Writes what has changed since it was read or saved."""
        if costs == self._saved:
            return
        self._saved = costs
        content = {"version": VERSION, "costs": [asdict(cost) for cost in costs]}
        fresh = self._file.with_name("learned.new")
        try:
            fresh.write_text(json.dumps(content, indent=1))
            os.replace(fresh, self._file)
        except OSError as error:
            self._say(f"{self._file} cannot be written, so what swaps cost will be forgotten: {error}")

    def _say(self, text: str) -> None:
        if self._complain:
            self._complain(text)
            self._complain = None
