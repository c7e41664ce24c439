"""Prompts of llama-server across swaps: its slots are saved before it is stopped, and restored afterwards.

A prompt that was computed by another model file, with other arguments or by another version of the engine
is wrong, and llama-server takes it all the same where its shape fits. So the name of its file,
``BACKEND.SLOT.TOKENS.DIGEST.prompt``, has a digest of all that the prompt depends on, and of the file's size
and time of change as it was written. A file without a digest was never finished; one with another digest than
it should have was cut short, comes from elsewhere or was computed by something else. These are removed, and
never read.

While a load restores prompts, their names end with ``.trying``; what a load finds under such a name, the
engine before it ended over. Where the disk space does not suffice, what was used longest ago is removed.

The folder is the engine's, which may put links into it, or in its place: it is opened step by step, without
following one. In our own state folder is one digest, of what the engine that runs was loaded from: a model
file that was exchanged since then is not what its prompts were computed by.

A slot that was not used since its prompt was restored has its file still, and is not written again. What
fails here fails neither a load nor an eviction, and neither waits for long for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from anvil_mux.config.abilities import prompts_folder
from anvil_mux.config.config import Backend
from anvil_mux.config.service import HERE
from anvil_mux.errors import Cancelled
from anvil_mux.host.engine_client import EngineClient
from anvil_mux.host.engines import client_of
from anvil_mux.host.weights import shards
from anvil_mux.protocol import foreign
from anvil_mux.protocol.completions import count
from anvil_mux.state import text_of, write_whole

log = logging.getLogger(__name__)

SAVE_SECONDS = 30.0
"""How long an eviction waits for prompts to be saved."""
RESTORE_SECONDS = 30.0
"""How long a load waits for prompts to be restored."""
MOST_SLOTS = 10_000
"""More than any engine has: each is asked for."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Unkept(Exception):
    """Prompts are not kept; the text says why."""


class KeptPrompt(NamedTuple):
    """The prompt of one slot, in a file."""

    name: str
    slot: int
    tokens: int
    size: int
    changed: int
    """When its file was last changed, in nanoseconds."""

    def named(self, backend: str, loaded_from: str) -> KeptPrompt:
        """The same under the name that it has if it depends on ``loaded_from``, a digest."""
        digest = _digest([loaded_from, self.slot, self.tokens, self.size, self.changed])
        return self._replace(name=f"{backend}.{self.slot}.{self.tokens}.{digest}.prompt")

    @property
    def tried_as(self) -> str:
        """The name of its file while it is restored."""
        return self.name.removesuffix(".prompt") + ".trying"


class PromptCache:
    """Saves and restores the prompts of backends; any thread, one at a time for each backend.

    ``kept`` is told a backend's name and its prompts on disk whenever these may have changed. ``state``: our
    own folder; None: no prompts are kept.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        kept: Callable[[str, Sequence[KeptPrompt]], object] = lambda backend, prompts: None,
        state: Path | None = None,
    ) -> None:
        self._wall = wall
        self._kept = kept
        self._state = state

    def tell(self, backend: Backend) -> None:
        """Tell which prompts of a backend are on disk, if it keeps some."""
        if files := self._files_of(backend):
            self._kept(backend.name, files.prompts())

    def prepare(self, backend: Backend) -> float:
        """Make the folder before the engine is started, since Docker's own would belong to root.

        Returns the Unix time, which ``restore`` wants to know.
        """
        if files := self._files_of(backend):
            try:
                files.make_folder()
            except OSError as error:
                log.warning("%s: there is no folder for its prompts: %s", backend.name, error)
        return self._wall()

    def save(self, backend: Backend, url: str) -> None:
        """Save the prompts of an engine that is about to be stopped; a failure is logged."""
        if files := self._files_of(backend):
            with client_of(backend, url, SAVE_SECONDS) as client:
                self._attempt(backend, files, "saved", lambda: _save(client, files))

    def restore(
        self, backend: Backend, url: str, began: float, check_cancelled: Callable[[], object] | None = None
    ) -> None:
        """Restore the prompts of an engine that is ready, and was started after ``began``.

        What ``check_cancelled`` raises ends the load; any other failure is logged.
        """
        if files := self._files_of(backend):
            with client_of(backend, url, RESTORE_SECONDS, check_cancelled) as client:
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

    def _files_of(self, backend: Backend) -> PromptFiles | None:
        """The files for a backend's prompts; None if it is to keep none."""
        if backend.prompt_cache is None or self._state is None:
            return None
        service = backend.service
        folder = service.on_host(prompts_folder(service))
        if not folder:
            return None
        # Of the folders that hold it the engine has the outermost. A process may write wherever we may.
        mounts = {} if HERE in dict(service.mounts) else dict(service.mounts)
        around = {each for each in mounts.values() if each and Path(folder).is_relative_to(each)}
        mounted = min(around, key=len, default=folder)
        return PromptFiles(mounted, os.path.relpath(folder, mounted), backend.name, self._state)


# Saving


def _save(client: EngineClient, files: PromptFiles) -> list[KeptPrompt]:
    props = _props(client)
    loaded_from = files.loaded_from()
    if not loaded_from or loaded_from != _depends_on(client, props):
        files.clear()
        raise Unkept("what it was loaded from is not known, or has changed since")
    used, prompts = _used(client, props), files.prompts(loaded_from)
    stale = [each for each in prompts if each.slot in used]
    files.remove(stale)
    new, most = list[KeptPrompt](), client.backend.prompt_cache or 0
    old = sorted([each for each in prompts if each not in stale], key=lambda each: -each.changed)
    per_token = max([each.size / max(each.tokens, 1) for each in prompts], default=0.0)

    def fits(size: float) -> bool:
        """Remove what was used longest ago until so much fits; False if it never does."""
        room = most - size - sum(each.size for each in new)
        while old and 0 <= room < sum(each.size for each in old):
            files.remove([old.pop()])
        return room >= 0

    try:
        for slot in sorted(used, key=lambda each: -used[each]):
            if not fits(used[slot] * per_token):
                continue
            if saved := _save_slot(client, files, slot, loaded_from):
                per_token = saved.size / max(saved.tokens, 1)
                if fits(saved.size):
                    new.append(saved)
    finally:
        files.keep([*new, *old])
    return [*new, *old]


def _save_slot(client: EngineClient, files: PromptFiles, slot: int, loaded_from: str) -> KeptPrompt | None:
    """Have a slot written; None if it is empty."""
    match _act(client, slot, "save", files.unfinished(slot)):
        case {"n_saved": 0}:
            return None
        case {"n_saved": int(tokens), "n_written": int(size)} if count(tokens) is not None:
            if saved := files.finish(slot, tokens, size, loaded_from):
                return saved
            raise Unkept(
                f"{files.place(slot)} has not the {size} bytes that llama-server says it wrote: "
                "is that another folder than the engine's?"
            )
    raise Unkept("llama-server does not say what it saved")


def _used(client: EngineClient, props: dict[str, Any]) -> dict[int, int]:
    """Slot that was used since the engine began -> the length of its prompt, 0 where that is not known.

    All slots, where the engine does not say which were.
    """
    status, answer = client.ask("GET", "/slots")
    found = foreign.read_or_none(answer) if status < 300 else None
    if not isinstance(found, list):
        return dict.fromkeys(range(props["total_slots"]), 0)
    used = [each for each in found if isinstance(each, dict) and count(each.get("id_task")) is not None]
    slots = {count(each.get("id")): count(each.get("n_prompt_tokens")) or 0 for each in used}
    return {number: tokens for number, tokens in slots.items() if number is not None}


# Restoring


def _restore(client: EngineClient, files: PromptFiles, began: float) -> list[KeptPrompt]:
    try:
        loaded_from = _depends_on(client, _props(client), began)
    except Exception:
        files.clear()  # a later save must not take an earlier run's note for that of this one
        raise
    prompts = files.prompts(loaded_from)
    if removed := files.keep(prompts):
        tried = any(name.endswith(".trying") for name in removed)
        other = "they were computed by something else, or are not as they were written"
        why = "its engine ended over them" if tried else other
        log.warning("%s: its saved prompts are removed: %s", client.backend.name, why)
    files.note(loaded_from)
    files.rename((each.name, each.tried_as) for each in prompts)
    try:
        restored = [each for each in prompts if _restore_slot(client, each)]
    except Cancelled:
        files.rename((each.tried_as, each.name) for each in prompts)
        raise
    files.rename((each.tried_as, each.name) for each in restored)
    files.keep(restored)
    return restored


def _restore_slot(client: EngineClient, prompt: KeptPrompt) -> bool:
    """Whether the engine has taken the whole prompt; if not, its slot is empty."""
    try:
        match _act(client, prompt.slot, "restore", prompt.tried_as):
            case {"n_restored": prompt.tokens}:
                return True
        _act(client, prompt.slot, "erase", "")
    except Unkept as error:
        log.warning("%s: a saved prompt is removed: %s", client.backend.name, error)
    return False


# What is asked of the engine


def _act(client: EngineClient, slot: int, action: str, file: str) -> Any:
    """Have a slot saved, restored or erased; Unkept if the engine does not."""
    path = f"/slots/{slot}?action={action}"
    status, answer = client.ask("POST", path, {"filename": file}, client.deadline - client.now())
    if status >= 300:
        words = answer[:300].decode("utf-8", "replace")
        raise Unkept(f"{client.place}: POST {path} answers {status}: {words}")
    return foreign.read_or_none(answer)


def _props(client: EngineClient) -> dict[str, Any]:
    """The description that the engine gives of itself."""
    status, answer = client.ask("GET", "/props")
    props: Any = foreign.read_or_none(answer) if status < 300 else None
    match props:
        case {"build_info": str(), "model_path": str(), "total_slots": int(slots)} if (
            0 <= slots <= MOST_SLOTS
        ):
            return dict(props)
    raise Unkept(f"{client.place}: GET /props answers {status}, and not which model file and version it is")


def _depends_on(client: EngineClient, props: dict[str, Any], began: float | None = None) -> str:
    """A digest of all that the engine's prompts depend on.

    Unkept if a model file cannot be seen, or changed after ``began``.
    """
    service = client.backend.service
    files: dict[str, list[int]] = {}
    for inside in _model_files(service.command, props["model_path"]):
        path = service.on_host(inside)
        if not path:
            raise Unkept(f"{inside} is in no folder of this machine, so a changed model would not be noticed")
        for file in shards(Path(path)):
            try:
                status = file.stat()
            except OSError as error:
                raise Unkept(f"{file} cannot be looked at: {error.strerror}") from None
            if began is not None and status.st_ctime >= began:
                raise Unkept(f"{file} changed while it was loaded")
            files[str(file)] = [status.st_size, status.st_mtime_ns]
    described = [service.command, service.environment, service.image]
    return _digest([props["build_info"], props["total_slots"], described, files])


def _model_files(command: Sequence[str], model: str) -> Iterator[str]:
    """The model file that the engine names, and others that its command does."""
    yield model
    for word in command:
        for part in word.rpartition("=")[2].split(","):
            if part.endswith(".gguf") and part != model:
                yield part


def _digest(values: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]


# The files


class PromptFiles:
    """The files of one backend in a folder, which other backends may share. One thread at a time.

    ``mounted``: a folder of this machine that the engine has; ``below``: the way from there, in which it may
    have put links. ``state``: the folder of our own.
    """

    def __init__(self, mounted: str, below: str, backend: str, state: Path) -> None:
        self._mounted = mounted
        self._below = below
        self._backend = backend
        self._loaded_from = state / f"{backend}.prompts"
        finished = r"\.(?P<tokens>\d{1,20})\.[0-9a-f]{32}"
        own = rf"{re.escape(backend)}\.(?P<slot>\d{{1,20}})({finished})?\.(prompt|trying)"
        self._own_name = re.compile(own, re.ASCII)

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

    def unfinished(self, slot: int) -> str:
        """The name of the file into which the engine writes a slot's prompt."""
        return f"{self._backend}.{slot}.prompt"

    def place(self, slot: int) -> Path:
        """The path of that file, for people."""
        return Path(self._mounted, self._below, self.unfinished(slot))

    def finish(self, slot: int, tokens: int, size: int, loaded_from: str) -> KeptPrompt | None:
        """Name a file that the engine has just written; None: there is none of that size."""
        with self._folder() as folder:
            written = _stat(folder, self.unfinished(slot))
            if written is None or written.st_size != size:
                return None
            prompt = KeptPrompt("", slot, tokens, size, written.st_mtime_ns).named(self._backend, loaded_from)
            os.rename(self.unfinished(slot), prompt.name, src_dir_fd=folder, dst_dir_fd=folder)
        return prompt

    def prompts(self, loaded_from: str | None = None) -> list[KeptPrompt]:
        """The prompts that were finished; ``loaded_from``: only those whose names say that, and are true."""
        found = []
        with suppress(OSError), self._folder() as folder:
            for name in sorted(os.listdir(folder)):
                parts = self._own_name.fullmatch(name)
                if not parts or not parts["tokens"] or not name.endswith(".prompt"):
                    continue
                if status := _stat(folder, name):
                    slot, tokens = int(parts["slot"]), int(parts["tokens"])
                    found.append(KeptPrompt(name, slot, tokens, status.st_size, status.st_mtime_ns))
        if loaded_from is None:
            return found
        return [each for each in found if each == each.named(self._backend, loaded_from)]

    def rename(self, names: Iterable[tuple[str, str]]) -> None:
        """Give files, by their names, other names; those that are gone are left out."""
        with suppress(FileNotFoundError), self._folder() as folder:
            for old, new in names:
                with suppress(FileNotFoundError):
                    os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)

    def keep(self, prompts: Collection[KeptPrompt]) -> set[str]:
        """Remove every other file of the backend; return their names."""
        names = {each.name for each in prompts}
        with suppress(FileNotFoundError), self._folder() as folder:
            others = {name for name in os.listdir(folder) if self._own_name.fullmatch(name)} - names
            for name in others:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
            return others
        return set()

    def remove(self, prompts: Iterable[KeptPrompt]) -> None:
        """Remove the files of these."""
        with suppress(FileNotFoundError), self._folder() as folder:
            for each in prompts:
                with suppress(FileNotFoundError):
                    os.unlink(each.name, dir_fd=folder)

    def loaded_from(self) -> str:
        """The digest of what the engine that runs was loaded from; "" where it is not known."""
        return text_of(self._loaded_from)

    def note(self, loaded_from: str) -> None:
        write_whole(self._loaded_from, loaded_from, 0o600)

    def clear(self) -> None:
        """Remove the note, and all files."""
        self._loaded_from.unlink(missing_ok=True)
        self.keep(())


def _stat(folder: int, name: str) -> os.stat_result | None:
    """The kernel's account of a regular file; None: it is not there, or is none."""
    with suppress(OSError):
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            return status
    return None
