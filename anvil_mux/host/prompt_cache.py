"""Prompts of llama-server across swaps: its slots are saved before it is stopped, and restored afterwards.

What is saved is bound to the model file, the arguments and the version of the engine (prompt_files.py).
llama-server checks of these only the shape: it was seen to go on from another model's prompt.

A slot that was not used since its prompt was restored has its file still, and is not written again. What
fails here fails neither a load nor an eviction, and neither waits for long for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from anvil_mux.config.abilities import prompts_folder
from anvil_mux.config.config import Backend
from anvil_mux.config.service import HERE
from anvil_mux.errors import Cancelled
from anvil_mux.host.engine_client import EngineClient
from anvil_mux.host.prompt_files import Binding, KeptPrompt, PromptFiles
from anvil_mux.host.weights import shards
from anvil_mux.protocol import foreign
from anvil_mux.protocol.completions import count

log = logging.getLogger(__name__)

SAVE_SECONDS = 30.0
"""How long an eviction waits for prompts to be saved."""
RESTORE_SECONDS = 30.0
"""How long a load waits for prompts to be restored."""

MOST_SLOTS = 10_000
"""More than any engine has: each is asked for."""


class Unkept(Exception):
    """Prompts are not kept; the text says why."""


class UsedSlot(NamedTuple):
    """A slot that was used since its engine began."""

    id: int
    tokens: int
    """The length of its prompt; 0 where that is not known."""


class PromptCache:
    """Saves and restores the prompts of backends; any thread, one at a time for each backend.

    ``kept`` is told a backend's name and its prompts on disk whenever these may have changed. ``state``: the
    folder for the lists of them; None: none are kept.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        kept: Callable[[str, Sequence[KeptPrompt]], object] = lambda backend, prompts: None,
        state: Path | None = None,
    ) -> None:
        self._now = now
        self._wall = wall
        self._kept = kept
        self._state = state

    def prepare(self, backend: Backend) -> float:
        """Make the folder before the engine is started, since Docker's own would belong to root.

        Returns the Unix time, which ``restore`` wants to know.
        """
        if files := files_of(backend, self._state):
            try:
                files.make_folder()
            except OSError as error:
                log.warning("%s: there is no folder for its prompts: %s", backend.name, error)
        return self._wall()

    def save(self, backend: Backend, url: str) -> None:
        """Save the prompts of an engine that is about to be stopped; a failure is logged."""
        if files := files_of(backend, self._state):
            with EngineClient(backend, url, self._now, self._now() + SAVE_SECONDS) as client:
                self._attempt(backend, files, "saved", lambda: _save(client, files))

    def restore(
        self, backend: Backend, url: str, began: float, check_cancelled: Callable[[], object] | None = None
    ) -> None:
        """Restore the prompts of an engine that is ready, and was started after ``began``.

        What ``check_cancelled`` raises ends the load; any other failure is logged.
        """
        if files := files_of(backend, self._state):
            with EngineClient(
                backend, url, self._now, self._now() + RESTORE_SECONDS, check_cancelled
            ) as client:
                self._attempt(backend, files, "restored", lambda: _restore(client, files, began))

    def _attempt(
        self, backend: Backend, files: PromptFiles, what: str, attempt: Callable[[], list[KeptPrompt]]
    ) -> None:
        try:
            prompts = attempt()
            log.info("%s: %d prompts were %s", backend.name, len(prompts), what)
        except Cancelled:
            raise
        except Exception as error:
            log.warning("%s: its prompts were not %s: %s", backend.name, what, error)
            prompts = files.prompts()
        self._kept(backend.name, prompts)


def files_of(backend: Backend, state: Path | None) -> PromptFiles | None:
    """The files for a backend's prompts, with their list in ``state``; None if it is to keep none."""
    if backend.prompt_cache is None or state is None:
        return None
    service = backend.service
    folder = service.on_host(prompts_folder(service))
    if not folder:
        return None
    # Of the folders that hold it the engine has the outermost. A process may write wherever we may.
    mounts = {} if HERE in dict(service.mounts) else dict(service.mounts)
    around = {each for each in mounts.values() if each and Path(folder).is_relative_to(each)}
    mounted = min(around, key=len, default=folder)
    return PromptFiles(mounted, os.path.relpath(folder, mounted), backend.name, state)


# Saving


class Room:
    """The disk space of one backend's prompts."""

    def __init__(self, files: PromptFiles, most: int, prompts: Sequence[KeptPrompt], old: set[int]) -> None:
        self._files = files
        self._most = most
        self._old = sorted([each for each in prompts if each.slot in old], key=lambda each: -each.changed)
        self._per_token = max([each.size / max(each.tokens, 1) for each in prompts], default=0.0)
        self._new: list[KeptPrompt] = []

    @property
    def kept(self) -> list[KeptPrompt]:
        return [*self._new, *self._old]

    def make(self, tokens: int) -> bool:
        """Remove what was used longest ago until so many tokens fit; False if they never do."""
        return self._fits(int(tokens * self._per_token))

    def add(self, prompt: KeptPrompt) -> None:
        """Keep a prompt that was written, or remove it if it is too large all the same."""
        self._per_token = prompt.size / max(prompt.tokens, 1)
        if self._fits(prompt.size):
            self._new.append(prompt)
        else:
            self._files.remove(prompt.slot)

    def _fits(self, size: int) -> bool:
        new = sum(each.size for each in self._new)
        if new + size > self._most:
            return False
        while new + size + sum(each.size for each in self._old) > self._most:
            self._files.remove(self._old.pop().slot)
        return True


def _save(client: EngineClient, files: PromptFiles) -> list[KeptPrompt]:
    props = _props(client)
    bound, prompts = files.binding(), files.prompts()
    if not bound or bound != _binding(client, props):
        files.clear()
        raise Unkept("what it was loaded from is not known, or has changed since")
    used = _used(client, props)
    unused = {each.slot for each in prompts} - {each.id for each in used}
    room = Room(files, client.backend.prompt_cache or 0, prompts, unused)
    try:
        for slot in sorted(used, key=lambda each: -each.tokens):
            files.remove(slot.id)
            if room.make(slot.tokens) and (saved := _save_slot(client, files, slot.id)):
                room.add(saved)
    finally:
        files.write(bound, room.kept)
    return room.kept


def _save_slot(client: EngineClient, files: PromptFiles, slot: int) -> KeptPrompt | None:
    """Have a slot written; None if it is empty."""
    match _act(client, slot, "save", files.name(slot)):
        case {"n_saved": 0}:
            return None
        case {"n_saved": int(tokens), "n_written": int(size)}:
            found = files.found(slot, tokens)
            if found is None or found.size != size:
                raise Unkept(
                    f"{files.place(slot)} has not the {size} bytes that llama-server says it wrote: "
                    "is that another folder than the engine's?"
                )
            return found
    raise Unkept("llama-server does not say what it saved")


def _used(client: EngineClient, props: dict[str, Any]) -> list[UsedSlot]:
    """The slots that were used since the engine began; all, where it does not say which."""
    status, answer = client.ask("GET", "/slots")
    try:
        found = foreign.read(answer) if status < 300 else None
    except ValueError:
        found = None
    if not isinstance(found, list):
        return [UsedSlot(number, 0) for number in range(props["total_slots"])]
    return [*filter(None, map(_used_slot, found))]


def _used_slot(said: Any) -> UsedSlot | None:
    """Read what an engine says of one slot; None if it was not used, or that is no slot."""
    if not isinstance(said, dict) or count(said.get("id_task")) is None:
        return None
    number = count(said.get("id"))
    return None if number is None else UsedSlot(number, count(said.get("n_prompt_tokens")) or 0)


# Restoring


def _restore(client: EngineClient, files: PromptFiles, began: float) -> list[KeptPrompt]:
    try:
        bound = _binding(client, _props(client), began)
    except Exception:
        files.clear()  # a later save must not take the old list for that of this run
        raise
    before = files.binding()
    if before and (before != bound or files.is_tried):
        why = "its engine ended over them" if before == bound else _difference(before, bound)
        log.warning("%s: its saved prompts are removed: %s", client.backend.name, why)
        files.clear()
    prompts = files.prompts()
    files.write(bound, prompts, tried=bool(prompts))
    try:
        restored = [each for each in prompts if _restore_slot(client, files, each)]
    except Cancelled:
        files.write(bound, prompts)
        raise
    files.write(bound, restored)
    return restored


def _restore_slot(client: EngineClient, files: PromptFiles, prompt: KeptPrompt) -> bool:
    """Whether the engine has taken the whole prompt; if not, its slot is empty."""
    try:
        match _act(client, prompt.slot, "restore", files.name(prompt.slot)):
            case {"n_restored": prompt.tokens}:
                return True
        _act(client, prompt.slot, "erase", "")
    except Unkept as error:
        log.warning("%s: a saved prompt is removed: %s", client.backend.name, error)
    return False


def _difference(before: Binding, now: Binding) -> str:
    differs = [key for key in now if before.get(key) != now[key]]
    return f"they are of another {' and '.join(differs) or 'anvil-mux'}"


# What is asked of the engine


def _act(client: EngineClient, slot: int, action: str, file: str) -> Any:
    """Have a slot saved, restored or erased; Unkept if the engine does not."""
    path = f"/slots/{slot}?action={action}"
    status, answer = client.ask("POST", path, {"filename": file}, client.deadline - client.now())
    if status >= 300:
        said = answer[:300].decode("utf-8", "replace")
        raise Unkept(f"{client.place}: POST {path} answers {status}: {said}")
    try:
        return foreign.read(answer)
    except ValueError:
        return None


def _props(client: EngineClient) -> dict[str, Any]:
    """The description that the engine gives of itself."""
    status, answer = client.ask("GET", "/props")
    try:
        props: dict[str, Any] = foreign.read(answer) if status < 300 else {}
        match props:
            case {"build_info": str(), "model_path": str(), "total_slots": int(slots)} if (
                0 <= slots <= MOST_SLOTS
            ):
                return props
    except ValueError:
        pass
    raise Unkept(f"{client.place}: GET /props answers {status}, and not which model file and version it is")


def _binding(client: EngineClient, props: dict[str, Any], began: float | None = None) -> Binding:
    """All that the engine's prompts depend on.

    Unkept if a model file cannot be seen, or changed after ``began``.
    """
    service = client.backend.service
    described = [service.command, service.environment, service.image, props["total_slots"]]
    files: dict[str, list[int]] = {}
    for inside in _model_files(service.command, props["model_path"]):
        path = service.on_host(inside)
        if not path:
            raise Unkept(f"{inside} is in no folder of this machine, so a changed model would not be noticed")
        for file in shards(Path(path)):
            try:
                seen = file.stat()
            except OSError as error:
                raise Unkept(f"{file} cannot be looked at: {error.strerror}") from None
            if began is not None and seen.st_ctime >= began:
                raise Unkept(f"{file} changed while it was loaded")
            files[str(file)] = [seen.st_size, seen.st_mtime_ns]
    return {
        "version of the engine": props["build_info"],
        "command or environment": hashlib.sha256(json.dumps(described).encode()).hexdigest(),
        "model file": files,
    }


def _model_files(command: Sequence[str], model: str) -> Iterator[str]:
    """The model file that the engine names, and others that its command does."""
    yield model
    for word in command:
        for part in word.rpartition("=")[2].split(","):
            if part.endswith(".gguf") and part != model:
                yield part
