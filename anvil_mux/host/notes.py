"""Notes in the state folder of a project, which tell a later start of its backends.

A power cut may damage them, so each value is checked when it is read. The runs of processes have records of
their own (runs.py).
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from anvil_mux.config.config import SERVICE_NAME, Backend
from anvil_mux.config.service import Service
from anvil_mux.errors import BackendError
from anvil_mux.protocol import foreign
from anvil_mux.state import text_of, write_whole

log = logging.getLogger(__name__)

WORD = re.compile(rf"{SERVICE_NAME.pattern}(/[0-9]{{1,9}})?")
"""A word of the notes by which a backend is known."""
GPUS = dict[str, tuple[str, ...]]


class Notes:
    """Files in the state folder that tell a later start about backends; a program that is killed leaves them.

    ``BACKEND.level`` holds the standby level that a backend was last told to take, ``services`` our services,
    ``gpus`` the GPUs of each. Any thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services = folder / "services"
        self._gpus = folder / "gpus"
        self._lock = threading.Lock()

    def note_level(self, backend: str, level: str) -> None:
        """Note the standby level that a backend is about to take, or that it ``WAKES``; "": neither."""
        file = self._level_file(backend)
        try:
            if level:
                write_whole(file, level)
            else:
                file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s: its standby level cannot be noted: %s", backend, error)

    def level(self, backend: str) -> str:
        return text_of(self._level_file(backend))

    def _level_file(self, backend: str) -> Path:
        return self._folder / f"{backend}.level"

    def orphans(self, backends: Iterable[Backend]) -> list[Backend]:
        """List noted backends that are none of the ``backends``, with as much of each as ``stop`` needs.

        BackendError if the notes cannot be read.
        """
        return [_of_word(word) for word in sorted(self._words() - set(map(word_of, backends)))]

    def gpus(self, word: str) -> tuple[str, ...] | None:
        """Return the ids of the GPUs that a noted backend was started on; None: they are not known."""
        with suppress(ValueError):
            return self._all_gpus().get(word)
        return None

    def add(self, backends: Iterable[Backend]) -> None:
        """Note more backends; should the program end before others are stopped, the next start does that."""
        added = {word_of(each): each.gpus for each in backends}
        with self._lock:
            try:
                words = self._words() | added.keys()
            except BackendError as error:  # what is there must not be lost
                log.warning("%s", error.message)
                return
            gpus: dict[str, tuple[str, ...]] = {}
            with suppress(ValueError):
                gpus = self._all_gpus()
            self._write(self._services, "\n".join(sorted(words)))
            self._write(self._gpus, json.dumps(dict(sorted((gpus | added).items()))))

    def remove(self, backend: Backend) -> None:
        """Forget a backend that was stopped."""
        with self._lock, suppress(BackendError):
            self._write(self._services, "\n".join(sorted(self._words() - {word_of(backend)})))

    def _words(self) -> set[str]:
        """Return the words of the file; BackendError if it cannot be read.

        Those that are none are left out: a power cut may have damaged it.
        """
        try:
            words = set(self._services.read_text(errors="replace").split())
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise BackendError(f"{self._services} cannot be read: {error.strerror}") from None
        sound = set(filter(WORD.fullmatch, words))
        if sound < words:
            log.warning(
                "%s is damaged: engines that the configuration has no longer may run on", self._services
            )
        return sound

    def _all_gpus(self) -> dict[str, tuple[str, ...]]:
        """Return the GPUs of each noted backend, by its word; ValueError if the file is damaged."""
        text = text_of(self._gpus)
        gpus: dict[str, tuple[str, ...]] = foreign.of(GPUS, foreign.read(text)) if text else {}
        return gpus

    def _write(self, file: Path, text: str) -> None:
        try:
            if text != text_of(file):
                write_whole(file, text)
        except OSError as error:
            log.warning("which services are ours cannot be noted: %s", error)


def word_of(backend: Backend) -> str:
    """A word by which a later start knows the backend when the configuration has it no longer."""
    service = backend.service
    return f"{service.name}/{service.number}" if service.name else backend.name


def _of_word(word: str) -> Backend:
    service, scaled, number = word.partition("/")
    if not scaled:
        return Backend(word, word)
    return Backend(f"{service}-{number}", service, service=Service(name=service, number=int(number)))
