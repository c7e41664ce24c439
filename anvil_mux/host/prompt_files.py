"""The files in which one backend's prompts are kept between its eviction and its next load.

Beside them is a list of them, with what they are bound to: a prompt that was computed by another model file,
with other arguments or by another version of the engine is wrong, and llama-server takes it all the same
where its shape fits. What the list does not have, or has with another size or time of change, was cut short
or comes from elsewhere: it is removed, and never read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from anvil_mux.state import write_whole

Binding = Mapping[str, Any]
"""All that a saved prompt depends on, in plain values."""


class KeptPrompt(NamedTuple):
    """The prompt of one slot, in a file."""

    slot: int
    tokens: int
    size: int
    changed: int
    """When its file was last changed, in nanoseconds."""


class PromptFiles:
    """The files of one backend in a folder, which other backends may share. One thread at a time."""

    def __init__(self, folder: str, backend: str) -> None:
        self._folder = Path(folder)
        self._backend = backend
        self._list = self._folder / f"{backend}.prompts.json"

    def make_folder(self) -> None:
        """Make the folder, for us and the engine alone: the files hold what people asked."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def name(self, slot: int) -> str:
        """The name of the file for a slot's prompt."""
        return f"{self._backend}.{slot}.prompt"

    def place(self, slot: int) -> Path:
        """The path of that file."""
        return self._folder / self.name(slot)

    def found(self, slot: int, tokens: int) -> KeptPrompt | None:
        """The prompt that the engine has just written; None: there is no such file."""
        try:
            seen = self.place(slot).stat()
        except OSError:
            return None
        return KeptPrompt(slot, tokens, seen.st_size, seen.st_mtime_ns)

    def binding(self) -> Binding:
        """The things that the prompts are bound to; {} if there is no list, or none that can be read."""
        binding: Binding = self._read().get("bound_to", {})
        return binding

    @property
    def is_tried(self) -> bool:
        """Whether a load began to restore the prompts and never came to the end of it."""
        return bool(self._read().get("tried"))

    def prompts(self) -> list[KeptPrompt]:
        """The prompts of the list whose files are as they were written."""
        listed = self._read().get("prompts", [])
        return [each for each in listed if self.found(each.slot, each.tokens) == each]

    def write(self, binding: Binding, prompts: Iterable[KeptPrompt], *, tried: bool = False) -> None:
        """Write the list, and remove every other file of the backend.

        ``tried``: that a load begins to restore them.
        """
        kept = list(prompts)
        said = {"bound_to": binding, "tried": tried, "prompts": [each._asdict() for each in kept]}
        write_whole(self._list, json.dumps(said, indent=1), 0o600)
        self._remove_others(kept)

    def clear(self) -> None:
        """Remove the list, and then all files: without it they are nothing."""
        self._list.unlink(missing_ok=True)
        self._remove_others(())

    def remove(self, slot: int) -> None:
        """Remove the file of a slot's prompt."""
        self.place(slot).unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        """The list; {} if there is none, or none that can be read."""
        try:
            found = json.loads(self._list.read_text())
            prompts = [KeptPrompt(**each) for each in found["prompts"]]
            return {"bound_to": found["bound_to"], "tried": found["tried"], "prompts": prompts}
        except (OSError, ValueError, TypeError, KeyError):
            return {}

    def _remove_others(self, kept: Iterable[KeptPrompt]) -> None:
        names = {self.name(each.slot) for each in kept}
        ours = re.compile(re.escape(self._backend) + r"\.[0-9]+\.prompt")
        with suppress(FileNotFoundError):
            for name in os.listdir(self._folder):
                if ours.fullmatch(name) and name not in names:
                    (self._folder / name).unlink(missing_ok=True)
