"""The standby levels: how an engine leaves its GPUs, and how it comes back.

A standby level is an object with ``load`` and ``evict``, made with the ``SwapContext`` that all share;
``WAYS`` names them. ``Stop`` is the one that every engine and runtime can do. What follows when one fails is
swap.py's to say.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Protocol

from anvil_mux.config.abilities import SLEEP_FLAGS, cannot_evict_to
from anvil_mux.config.caveats import SLEEPERS
from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError, Cancelled, LoadError
from anvil_mux.host import control
from anvil_mux.host.adapters import load_adapters
from anvil_mux.host.checkpoint import Checkpointer
from anvil_mux.host.engine_client import await_ready
from anvil_mux.host.runtime import Runtime

log = logging.getLogger(__name__)

Told = Callable[[Backend, str, float], object]
"""Called with backend, phase (load, ready, restore, probe; save, evict, verify, freeze) and seconds."""


class SwapContext:
    """The things that every standby level works with: runtime, clock, checkpointer, and cancelled loads."""

    def __init__(
        self,
        runtime: Runtime,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        told: Told | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.runtime = runtime
        self.now = now
        self.sleep = sleep
        self.checkpointer = checkpointer or Checkpointer(now=now, wait=sleep)
        self._told = told
        self._urls: dict[str, str] = {}  # one worker at a time writes a backend's entry
        self._loads: dict[str, int] = {}  # the numbers of those under way; the same
        self._cancelled: dict[str, int] = {}  # backend -> the last of its loads that was cancelled

    @contextmanager
    def loading(self, backend: Backend, number: int) -> Iterator[None]:
        """Make what is done within the load of this number; 0: it cannot be cancelled."""
        self._loads[backend.name] = number
        try:
            yield
        finally:
            del self._loads[backend.name]

    def cancel(self, backend: Backend, number: int) -> None:
        """Cancel the load of this number. Any thread, also before it begins."""
        self._cancelled[backend.name] = number

    def check_cancelled(self, backend: Backend) -> Callable[[], None] | None:
        """Return a check that raises Cancelled once the load under way was; None if it cannot be."""
        number = self._loads.get(backend.name, 0)

        def check_cancelled() -> None:
            if number == self._cancelled.get(backend.name):
                raise Cancelled(f"the load of {backend.name} was cancelled")

        return check_cancelled if number else None

    @contextmanager
    def phase(self, backend: Backend, name: str) -> Iterator[None]:
        """Report how long what is done within takes, however it ends."""
        begun = self.now()
        try:
            yield
        finally:
            if self._told:
                self._told(backend, name, self.now() - begun)

    def start(self, backend: Backend) -> str:
        """Start the service, or find it running; return its URL."""
        url = self._urls[backend.name] = self.runtime.start(backend)
        return url

    def url(self, backend: Backend) -> str:
        """Return the URL of the running service; BackendError if it cannot be reached."""
        url = self._urls.get(backend.name) or self.runtime.running().get(backend.name)
        if not url:
            raise BackendError(f"{backend.name} cannot be reached")
        self._urls[backend.name] = url
        return url

    def bring_back(self, backend: Backend, wake: Callable[[str], object]) -> str:
        """Wake the service at its URL, and return that once its model has answered a token."""
        url = self.url(backend)
        with self.phase(backend, "load"):
            wake(url)
        with self.phase(backend, "probe"):
            control.probe(backend, url)
        return url


class Way(Protocol):
    """One standby level."""

    frees: ClassVar[bool]
    """Whether it gives GPU memory back. False: for engines that hold none."""
    freezes: ClassVar[bool]
    """Whether the service is frozen once its memory is free."""

    def load(self, backend: Backend) -> str:
        """Base URL of the backend once it answers for its model; an error if it does not."""

    def evict(self, backend: Backend) -> int:
        """Returns when its GPUs are free, as far as the engine says; an error if they are not.

        The bytes that were taken from the GPUs to host memory, 0 where only the engine knows.
        """


class Stop:
    """The service is stopped; its next load is a cold start."""

    frees: ClassVar[bool] = True
    freezes: ClassVar[bool] = False

    def __init__(self, context: SwapContext) -> None:
        self._context = context

    def load(self, backend: Backend) -> str:
        begun = self._context.now()
        try:
            return self._load(backend, begun)
        except LoadError:
            if not self._context.runtime.lost_its_port(backend):
                raise
        log.warning("%s lost its port to another program, and is started with another one", backend.name)
        return self._load(backend, begun)

    def _load(self, backend: Backend, begun: float) -> str:
        context = self._context
        with context.phase(backend, "load"):
            url = context.start(backend)
        with context.phase(backend, "ready"):
            await_ready(
                backend,
                url,
                ended=lambda: context.runtime.ended(backend),
                check_cancelled=context.check_cancelled(backend),
                deadline=begun + backend.load_timeout,
                now=context.now,
                sleep=context.sleep,
            )
            if may_sleep(backend) and control.is_asleep(backend, url):
                # It ran already, asleep; or it is one that loads nothing by itself.
                control.wake(backend, url, control.UNKNOWN, context.check_cancelled(backend))
            deadline = begun + backend.load_timeout
            load_adapters(
                backend,
                url,
                deadline=deadline,
                check_cancelled=context.check_cancelled(backend),
                now=context.now,
            )
        return url

    def evict(self, backend: Backend) -> int:
        self._context.runtime.stop(backend)
        return 0


class Sleep:
    """The engine sleeps: it frees its GPU memory and keeps the weights in host memory."""

    frees: ClassVar[bool] = True
    freezes: ClassVar[bool] = False
    level: ClassVar[int] = 1

    def __init__(self, context: SwapContext) -> None:
        self._context = context

    def load(self, backend: Backend) -> str:
        check_cancelled = self._context.check_cancelled(backend)
        return self._context.bring_back(
            backend, lambda url: control.wake(backend, url, self.level, check_cancelled)
        )

    def evict(self, backend: Backend) -> int:
        control.sleep(backend, self._context.url(backend), self.level)
        return 0


class DeepSleep(Sleep):
    """The engine sleeps and drops its weights, which are read from disk again when it wakes."""

    level: ClassVar[int] = 2


class Checkpoint:
    """The CUDA driver moves the GPU memory to host memory; then the service is frozen.

    An engine that can sleep does so first: what it drops, such as its cache, need not be moved. Its processes
    are looked for each time, since engines replace them. Where none uses CUDA, it is only frozen.
    """

    frees: ClassVar[bool] = True
    freezes: ClassVar[bool] = True

    def __init__(self, context: SwapContext) -> None:
        self._context = context

    def load(self, backend: Backend) -> str:
        return self._context.bring_back(backend, lambda url: self._restore(backend, url))

    def _restore(self, backend: Backend, url: str) -> None:
        context = self._context
        context.runtime.resume(backend)
        if standby := context.checkpointer.find_standby(context.runtime.pids(backend)):
            context.checkpointer.restore(standby)
        if sleeps_first(backend):
            # It may have come here by way of a deeper sleep.
            level = control.UNKNOWN if "sleep-2" in backend.evict_to else Sleep.level
            control.wake(backend, url, level, context.check_cancelled(backend))

    def evict(self, backend: Backend) -> int:
        if sleeps_first(backend):
            control.sleep(backend, self._context.url(backend), Sleep.level)
        return self.checkpoint(backend)

    def checkpoint(self, backend: Backend) -> int:
        """Checkpoint a backend that is asleep already."""
        context = self._context
        pids = context.checkpointer.find(context.runtime.pids(backend))
        return context.checkpointer.checkpoint(pids).bytes if pids else 0


class Freeze:
    """The service is frozen as it is; only for engines that hold no GPU memory."""

    frees: ClassVar[bool] = False
    freezes: ClassVar[bool] = True

    def __init__(self, context: SwapContext) -> None:
        self._context = context

    def load(self, backend: Backend) -> str:
        return self._context.bring_back(backend, lambda url: self._context.runtime.resume(backend))

    def evict(self, backend: Backend) -> int:
        return 0


SLEEPS: dict[str, type[Sleep]] = {"sleep": Sleep, "sleep-2": DeepSleep}
WAYS: dict[str, Callable[[SwapContext], Way]] = {
    **SLEEPS,
    "checkpoint": Checkpoint,
    "freeze": Freeze,
    "stop": Stop,
}


def sleeps_first(backend: Backend) -> bool:
    """Whether it sleeps before its memory is moved: its standby levels say so, or its command allows it.

    Only engines that keep their weights then; the others would have to read them again.
    """
    if backend.engine not in SLEEPERS:
        return False
    command = backend.service.command
    told = set(SLEEP_FLAGS[backend.engine]) <= set(command)
    variables = dict(backend.service.environment)
    can = told and not cannot_evict_to({"command": [*command]}, variables, backend.engine, "sleep")
    return can or "sleep" in backend.evict_to


def may_sleep(backend: Backend) -> bool:
    """Whether one that runs may be found asleep."""
    return any(way in SLEEPS or (way == "checkpoint" and sleeps_first(backend)) for way in backend.evict_to)
