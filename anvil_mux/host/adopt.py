"""An engine that runs already is taken over as it is, or stopped.

    awake       it answers for its model
    in standby  it sleeps, or the CUDA driver has its memory, or it is frozen: then it stays as it is, and
                the next request for its model wakes it
    unfit       anything else; it is stopped, and the next request for its model loads it anew

An engine that sleeps does not say how deep. ``Notes`` remember which standby level each backend was last told
to take; where there is no note, weights that are read anew are right in any case. What NVML says of a
sleeper's memory counts more than what it says itself: who holds more than a context is none.

Nobody can ask the driver about a frozen process, so it is thawed for that; the memory is off the GPU, and its
own threads wait for it. Afterwards it is frozen again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import gib
from anvil_mux.config.service import Service
from anvil_mux.errors import MuxError
from anvil_mux.host import engines
from anvil_mux.host.cuda_checkpoint import Checkpointer
from anvil_mux.host.freed import CONTEXT, FreedCheck, host_bytes
from anvil_mux.host.levels import may_sleep
from anvil_mux.host.reading import Probe
from anvil_mux.host.runtime import Runtime
from anvil_mux.host.seam import Awake, Evicted, Found, Unfit
from anvil_mux.state import text_of, write_whole

log = logging.getLogger(__name__)

ADOPT_SECONDS = 5.0
"""How long an engine that runs already may take to answer."""


class Notes:
    """Files in the state folder that tell a later start about backends; a program that is killed leaves them.

    ``BACKEND.level`` holds the standby level that a backend was last told to take, ``services`` our services.
    Any thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services = folder / "services"
        self._lock = threading.Lock()

    def note_level(self, backend: str, level: str) -> None:
        """Note the standby level that a backend is about to take; "" when it leaves standby."""
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
        """List noted backends that are none of the ``backends``, with as much of each as ``stop`` needs."""
        return [_of_word(word) for word in sorted(self._words() - set(map(_word, backends)))]

    def add(self, backends: Iterable[Backend]) -> None:
        """Note more backends; should the program end before others are stopped, the next start does that."""
        with self._lock:
            self._write(self._words() | set(map(_word, backends)))

    def remove(self, backend: Backend) -> None:
        """Forget a backend that was stopped."""
        with self._lock:
            self._write(self._words() - {_word(backend)})

    def _words(self) -> set[str]:
        return set(text_of(self._services).split())

    def _write(self, words: Iterable[str]) -> None:
        try:
            write_whole(self._services, "\n".join(sorted(words)))
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


class Adopter:
    """Looks at engines; calls for different backends may come from several threads at once."""

    def __init__(
        self,
        runtime: Runtime,
        notes: Notes,
        *,
        probe: Probe | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self._runtime = runtime
        self._notes = notes
        self._memory = FreedCheck(probe)
        self._checkpointer = checkpointer or Checkpointer()

    def look(self, backend: Backend, url: str) -> Found:
        """Judge a backend that runs; ``url`` as ``Runtime.running`` has it."""
        if not url:
            return Unfit("it cannot be reached")
        try:
            if differs := self._runtime.differs(backend):
                return Unfit(differs)
            return self._frozen(backend) or self._asleep(backend, url) or self._awake(backend, url)
        except MuxError as error:
            return Unfit(error.message)

    def _frozen(self, backend: Backend) -> Found | None:
        """Judge a frozen backend; None if it is not frozen, or was thawed and is not checkpointed."""
        frozen = self._runtime.is_frozen(backend)
        if frozen and "freeze" in backend.evict_to and "checkpoint" not in backend.evict_to:
            return self._in_standby(backend, "freeze")
        if frozen:
            self._runtime.resume(backend)
        if "checkpoint" not in backend.evict_to:
            return None
        try:
            standby = self._checkpointer.find_standby(self._runtime.pids(backend))
        except MuxError as error:
            return Unfit(f"nobody knows whether it is checkpointed: {error.message}")
        if standby is None:
            return None
        if not standby.whole:
            return Unfit("only a part of it is checkpointed")
        self._runtime.pause(backend)
        return self._in_standby(backend, "checkpoint")

    def _asleep(self, backend: Backend, url: str) -> Found | None:
        sleeps = engines.find_engine(backend.engine).sleeps
        if sleeps is None:
            return None
        noted, asleep = self._notes.level(backend.name), None
        with suppress(MuxError):  # one that does not answer is waited for afterwards
            asleep = engines.is_asleep(backend, url)
        if asleep is None and sleeps.is_silent and noted in ("sleep", "sleep-2"):
            asleep = True
        if not asleep:
            return None
        # On its way to a checkpoint it may have slept at any level that it may take.
        light = noted == "sleep" or (noted == "checkpoint" and "sleep-2" not in backend.evict_to)
        deepens = engines.UNKNOWN in sleeps.levels
        return self._in_standby(backend, "sleep-2" if deepens and not light else "sleep")

    def _in_standby(self, backend: Backend, level: str) -> Found:
        """Judge one in standby: unfit if it holds its GPUs all the same."""
        pids = self._runtime.pids(backend)
        held = self._memory.held(backend, lambda: pids, resident=False)
        full = [gpu for gpu, amount in held.bytes.items() if amount > CONTEXT]
        if full and level != "freeze":
            amounts = ", ".join(f"{gib(held.bytes[gpu])} of GPU {gpu}" for gpu in full)
            return Unfit(f"it is in standby but still holds {amounts}")
        return Evicted(level, {**dict.fromkeys(backend.gpus, 0), **held.bytes}, host_bytes(pids))

    def _awake(self, backend: Backend, url: str) -> Found:
        try:
            engines.await_ready(
                backend,
                url,
                ended=partial(self._runtime.ended, backend),
                deadline=time.monotonic() + ADOPT_SECONDS,
            )
            if may_sleep(backend):
                engines.probe(backend, url)  # some sleep without saying so
        except MuxError:
            silent = f"it did not answer for {backend.model} within {ADOPT_SECONDS:g} s"
            return Unfit(f"{silent} (perhaps it was still loading)")
        try:
            engines.load_adapters(backend, url, deadline=time.monotonic() + ADOPT_SECONDS)
        except MuxError as error:
            return Unfit(error.message)
        return Awake(url)
