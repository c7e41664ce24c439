"""The files in which one backend's prompts are kept between its eviction and its next load.

A list of them has what they are bound to: a prompt that was computed by another model file, with other
arguments or by another version of the engine is wrong, and llama-server takes it all the same where its shape
fits. What the list does not have, or has with another size or time of change, was cut short or comes from
elsewhere: it is removed, and never read.

The folder is the engine's, which may put links into it, or in its place. So the list is in our state folder,
and the folder is opened step by step, without following one.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from anvil_mux.state import write_whole

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
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
    """The files of one backend in a folder, which other backends may share. One thread at a time.

    ``mounted``: a folder of this machine that the engine has; ``below``: the way from there, in which it may
    have put links. ``state``: the folder of our own that has the list.
    """

    def __init__(self, mounted: str, below: str, backend: str, state: Path) -> None:
        self._mounted = mounted
        self._below = below
        self._backend = backend
        self._list = state / "prompts" / f"{backend}.json"

    def make_folder(self) -> None:
        """Make the folder, for us and the engine alone: the files hold what people asked."""
        os.makedirs(self._mounted, mode=0o700, exist_ok=True)
        with self._folder(make=True):
            pass

    @contextmanager
    def _folder(self, *, make: bool = False) -> Iterator[int]:
        """The folder, as a descriptor. OSError if it is not there, or if the engine made a link of it."""
        folder = os.open(self._mounted, FOLDER)
        try:
            for part in Path(self._below).parts:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=folder)
                inner = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    def name(self, slot: int) -> str:
        """The name of the file for a slot's prompt."""
        return f"{self._backend}.{slot}.prompt"

    def place(self, slot: int) -> Path:
        """The path of that file, for people."""
        return Path(self._mounted, self._below, self.name(slot))

    def found(self, slot: int, tokens: int) -> KeptPrompt | None:
        """The prompt that the engine has just written; None: there is no such file."""
        try:
            with self._folder() as folder:
                seen = os.stat(self.name(slot), dir_fd=folder, follow_symlinks=False)
        except OSError:
            return None
        return (
            KeptPrompt(slot, tokens, seen.st_size, seen.st_mtime_ns) if stat.S_ISREG(seen.st_mode) else None
        )

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
        self._list.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(self._list, json.dumps(said, indent=1), 0o600)
        self._remove_others(kept)

    def clear(self) -> None:
        """Remove the list, and then all files: without it they are nothing."""
        self._list.unlink(missing_ok=True)
        self._remove_others(())

    def remove(self, slot: int) -> None:
        """Remove the file of a slot's prompt."""
        with suppress(FileNotFoundError), self._folder() as folder:
            os.unlink(self.name(slot), dir_fd=folder)

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
        with suppress(FileNotFoundError), self._folder() as folder:
            for name in os.listdir(folder):
                if ours.fullmatch(name) and name not in names:
                    with suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)
