"""A note of our services: those that a later configuration lacks are stopped by the next start.

The names are noted because Docker cannot tell a model from any other service of the project.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from anvil_mux.config.config import Backend, Service
from anvil_mux.state import write_whole

log = logging.getLogger(__name__)


class ServiceNote:
    """The file ``services`` in the state folder. Any thread."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "services"
        self._lock = threading.Lock()

    def orphans(self, backends: Iterable[Backend]) -> list[Backend]:
        """List noted backends that are none of the ``backends``, with as much of each as ``stop`` needs."""
        return [_of_word(word) for word in sorted(self._read() - set(map(_word, backends)))]

    def add(self, backends: Iterable[Backend]) -> None:
        """Note more backends; should the program end before others are stopped, the next start does that."""
        with self._lock:
            self._write(self._read() | set(map(_word, backends)))

    def remove(self, backend: Backend) -> None:
        """Forget a backend that was stopped."""
        with self._lock:
            self._write(self._read() - {_word(backend)})

    def _read(self) -> set[str]:
        with suppress(OSError):
            return set(self._file.read_text().split())
        return set()

    def _write(self, words: Iterable[str]) -> None:
        try:
            write_whole(self._file, "\n".join(sorted(words)))
        except OSError as error:
            log.warning("which services are ours cannot be noted: %s", error)


def _word(backend: Backend) -> str:
    """A word by which a later start knows the backend when the configuration has it no longer."""
    service = backend.service
    return f"{service.name}/{service.number}" if service.name else backend.name


def _of_word(word: str) -> Backend:
    service, scaled, number = word.partition("/")
    if not scaled:
        return Backend(word, word)
    return Backend(f"{service}-{number}", service, service=Service(name=service, number=int(number)))
