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
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import gib
from anvil_mux.errors import MuxError
from anvil_mux.host import control
from anvil_mux.host.adapters import load_adapters
from anvil_mux.host.checkpoint import Checkpointer
from anvil_mux.host.engine_client import await_ready
from anvil_mux.host.freed import CONTEXT, FreedCheck, host_bytes
from anvil_mux.host.reading import Probe
from anvil_mux.host.runtime import Runtime
from anvil_mux.host.seam import Awake, Evicted, Found, Unfit
from anvil_mux.host.ways import may_sleep
from anvil_mux.state import write_whole

log = logging.getLogger(__name__)

ADOPT_SECONDS = 5.0
"""How long an engine that runs already may take to answer."""


class Notes:
    """Files that tell a later start about each backend; a program that is killed leaves them.

    They hold the standby level that it was last told to take.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def note(self, backend: str, way: str) -> None:
        """Note the standby level that a backend is about to take; "" when it leaves standby."""
        file = self._file(backend)
        try:
            if way:
                write_whole(file, way)
            else:
                file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s: its standby level cannot be noted: %s", backend, error)

    def read(self, backend: str) -> str:
        try:
            return self._file(backend).read_text()
        except OSError:
            return ""

    def _file(self, backend: str) -> Path:
        return self._folder / f"{backend}.level"


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
        noted = self._notes.read(backend.name)
        asleep = None
        with suppress(MuxError):  # one that does not answer is waited for afterwards
            asleep = control.is_asleep(backend, url)
        if asleep is None and noted in ("sleep", "sleep-2") and backend.engine in control.SILENT:
            asleep = True
        if not asleep:
            return None
        # On its way to a checkpoint it may have slept at any level that it may take.
        light = noted == "sleep" or (noted == "checkpoint" and "sleep-2" not in backend.evict_to)
        deepens = control.UNKNOWN in control.CONTROLS[backend.engine].levels
        return self._in_standby(backend, "sleep-2" if deepens and not light else "sleep")

    def _in_standby(self, backend: Backend, how: str) -> Found:
        """Return how it is in standby, or that it is unfit since it holds its GPUs all the same."""
        pids = self._runtime.pids(backend)
        held = self._memory.held(backend, lambda: pids, resident=False)
        full = [gpu for gpu, amount in held.bytes.items() if amount > CONTEXT]
        if full and how != "freeze":
            amounts = ", ".join(f"{gib(held.bytes[gpu])} of GPU {gpu}" for gpu in full)
            return Unfit(f"it is in standby but still holds {amounts}")
        return Evicted(how, {**dict.fromkeys(backend.gpus, 0), **held.bytes}, host_bytes(pids))

    def _awake(self, backend: Backend, url: str) -> Found:
        try:
            await_ready(
                backend,
                url,
                ended=partial(self._runtime.ended, backend),
                deadline=time.monotonic() + ADOPT_SECONDS,
            )
            if may_sleep(backend):
                control.probe(backend, url)  # some sleep without saying so
        except MuxError:
            silent = f"it did not answer for {backend.model} within {ADOPT_SECONDS:g} s"
            return Unfit(f"{silent} (perhaps it was still loading)")
        try:
            load_adapters(backend, url, deadline=time.monotonic() + ADOPT_SECONDS)
        except MuxError as error:
            return Unfit(error.message)
        return Awake(url)
