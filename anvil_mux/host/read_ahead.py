"""The weights of backends that are waited for are read into the page cache before their load begins.

While a policy holds a swap back, leases drain and victims leave their GPUs, the disk is idle; what is read
then the load finds in memory. One thread reads, when nobody else uses the disk. It begins when there is
something to read, and ends when there is not. It reads nothing while any load is under way on this host, no
more than the page cache has room for (meminfo.py), and no file that is not on a disk of this machine.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from anvil_mux.clock import Clock
from anvil_mux.config.config import Backend
from anvil_mux.host.meminfo import cache_room
from anvil_mux.host.page_cache import CachedFile, is_on_disk, step_back

log = logging.getLogger(__name__)

ROOM_SECONDS = 0.25
"""How long it holds how much room there is: to find out takes a millisecond."""

ReadTold = Callable[[str, int, float], object]
"""Takes a backend's name, the bytes that were read ahead for it, and the seconds that took."""


class ReadAhead:
    """Reads weights ahead, as ordered. Any thread; only ``weights`` and ``told`` are called in its own.

    ``weights`` finds a backend's files. ``room``: bytes that the page cache has room for.
    """

    def __init__(
        self,
        weights: Callable[[Backend], Sequence[Path]],
        told: ReadTold,
        *,
        room: Callable[[], int] = cache_room,
        on_disk: Callable[[Path], bool] = is_on_disk,
        clock: Clock | None = None,
    ) -> None:
        self._weights = weights
        self._told = told
        self._room = room
        self._on_disk = on_disk
        self._clock = clock or Clock()
        self._seen_room, self._seen_at = 0, -math.inf  # of its thread alone
        self._lock = threading.Lock()
        # The lock guards what follows.
        self._wanted: dict[str, Backend] = {}
        """The backends that are waited for, in the order in which they are read."""
        self._held: dict[str, int] = {}
        """The backends among them that were dealt with, and how large their files are."""
        self._loads = 0
        """The loads under way."""
        self._is_reading = False
        """Whether there is a thread."""

    def order(self, backends: Sequence[Backend]) -> None:
        """Read the weights of these ahead, in this order, and those of no others. Never blocks."""
        with self._lock:
            self._wanted = {each.name: each for each in backends}
            self._held = {name: size for name, size in self._held.items() if name in self._wanted}
        self._begin()

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """A context in which nothing is read, since an engine reads its own weights."""
        with self._lock:
            self._loads += 1
        try:
            yield
        finally:
            with self._lock:
                self._loads -= 1
            self._begin()

    def _begin(self) -> None:
        """Start the thread if there is something to read and it is not there."""
        with self._lock:
            if self._is_reading or self._next() is None:
                return
            self._is_reading = True
        try:
            self._clock.spawn(self._run, "read-weights")
        except RuntimeError:  # no thread can be started
            with self._lock:
                self._is_reading = False

    def _next(self) -> Backend | None:
        """The backend to be read next. Under the lock."""
        left = (backend for name, backend in self._wanted.items() if name not in self._held)
        return None if self._loads else next(left, None)

    def _run(self) -> None:
        step_back()
        while True:
            with self._lock:
                backend = self._next()
                if backend is None:
                    self._is_reading = False
                    return
            size = 0
            try:
                size = self._read(backend)
            except Exception:
                log.exception("%s: a mistake while its weights were read ahead", backend.name)
            with self._lock:
                if self._goes_on(backend):
                    self._held[backend.name] = size

    def _goes_on(self, backend: Backend) -> bool:
        """Whether a backend is still to be read. Under the lock."""
        return not self._loads and self._wanted.get(backend.name) is backend

    def _read(self, backend: Backend) -> int:
        """Read what is not in the page cache of a backend's files; return how large the files are."""
        begun, read, size = time.monotonic(), 0, 0
        for path in filter(self._on_disk, self._weights(backend)):
            if not self._may_read(backend, size):
                break
            try:
                with CachedFile(path) as file:
                    for offset, length in file.missing():
                        if not self._may_read(backend, size + offset + length):
                            break
                        file.bring_in(offset, length)
                        read += length
                    size += file.size
            except OSError as error:
                log.info("%s: %s is not read ahead: %s", backend.name, path, error)
        if read:
            self._told(backend.name, read, time.monotonic() - begun)
        return size

    def _may_read(self, backend: Backend, size: int) -> bool:
        """Whether to go on; ``size``: of what of its files will be in the page cache then."""
        with self._lock:
            held = sum(self._held.values())
            goes_on = self._goes_on(backend)
        if goes_on and time.monotonic() >= self._seen_at + ROOM_SECONDS:
            self._seen_room, self._seen_at = self._room(), time.monotonic()
        return goes_on and held + size <= self._seen_room
