"""HOW a backend takes and leaves its GPUs.

A standby level is an object with ``load`` and ``evict``, made with the ``Tools`` that all share; ``WAYS``
names them. ``Stop`` is the one that every engine and runtime can do. ``Swapper`` puts the same guarantee
around all of them:

A load ends in a backend that answers for its model, or the backend is gone again, or the caller is told that
it may still hold its GPUs. One that does not come back from its standby level is stopped and started anew
within the same load.

An eviction ends in GPUs that are free, as far as they can be read (freed.py): what an engine says is not
believed. Where a way fails, or frees nothing, the next harder one is taken: stop, then kill. What even that
does not end is a BackendError. What is to be frozen is frozen after that: nothing can be done to its GPU
memory any more.

The engine's last log lines are read before the clean-up, because the clean-up may take the log with it.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Protocol

from anvil_mux.config import service
from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError, Cancelled, LoadError, MuxError
from anvil_mux.host import control
from anvil_mux.host.checkpoint import Checkpointer
from anvil_mux.host.freed import Held, Left, Memory, host_bytes
from anvil_mux.host.gpu import Gpus
from anvil_mux.host.seam import LOG_LINES, Evicted, HostConfig, Loaded
from anvil_mux.host.visit import answers, await_ready

log = logging.getLogger(__name__)

SHORT_OF_MEMORY = re.compile(
    r"out ?of ?(device ?)?memory|(cuda|hip)malloc failed|(failed|unable) to allocate|free memory on device|"
    r"no available memory|(not enough|insufficient) memory",
    re.IGNORECASE,
)
"""How engines say that a GPU's memory does not suffice, in the reason of a failed load or its last lines."""


class Runtime(Protocol):
    """A place where services run: Docker Compose or local processes.

    Every call is bounded in time, may block, is never made under the multiplexer's lock, and maps foreign
    failures to BackendError, or to LoadError where the service's own description is at fault (its image is
    missing, its port is taken). Calls for different backends may come from several threads at once.
    """

    def start(self, backend: Backend) -> str:
        """Start the service (creating it at the first use) and return its base URL.

        One that runs already is left running; it need not answer yet.
        """

    def stop(self, backend: Backend) -> None:
        """Return when it is really gone: grace, then kill. A service that does not run is no error."""

    def kill(self, backend: Backend) -> None:
        """End it at once, without grace."""

    def pause(self, backend: Backend) -> None:
        """Freeze the service: none of its processes runs until ``resume``, ``stop`` or ``kill``."""

    def resume(self, backend: Backend) -> None:
        """Let a frozen service go on; one that is not frozen is no error."""

    def pids(self, backend: Backend) -> list[int]:
        """The ids that its processes have on this host; [] if it does not run."""

    def owner(self, pid: int) -> str | None:
        """The service that a process of this host belongs to, None if to none of ours.

        Told from memory and /proc alone, without Docker.
        """

    def ended(self, backend: Backend) -> str | None:
        """Say for people how it ended ("exited with code 1"); None while it runs or is frozen."""

    def running(self) -> dict[str, str]:
        """Service name -> base URL of every service of this project that runs now.

        "" where it runs but cannot be reached: it holds its GPU all the same, so stop it. What is frozen is
        among them. These services are watched from now on.
        """

    def is_frozen(self, backend: Backend) -> bool:
        """Whether it is there and none of its processes runs."""

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        """The last lines that the current (or last) run of the service printed; [] if none can be had.

        After a start that failed before there was a run, none: whatever there is, an earlier run printed.
        """

    def follow_log(self, backend: Backend) -> Iterator[str]:
        """Lines as they come, beginning with the last FOLLOWED_LINES, until the service ends."""

    def watch(self, died: Callable[[str], None]) -> None:
        """Blocks until close(); calls ``died(service name)`` soon after a service ended without ``stop``.

        Only services that ``start`` returned or ``running`` listed are reported, each run once, when nothing
        of it runs any more. An engine may die while its load is still being awaited, or just after: this
        call may come before ``load`` has returned or raised.
        """

    def reconfigure(self, config: HostConfig) -> None:
        """Take services as they are described there from now on.

        What runs goes on, and what is served no longer is known until it was stopped. A service whose
        description has changed is made anew by its next ``start``.
        """

    def problem(self) -> str:
        """Why services cannot be started or stopped now, as far as ``watch`` knows; "" if they can."""

    def close(self) -> None:
        """Ends ``watch`` and frees what this object holds; engines run on."""


Told = Callable[[Backend, str, float], object]
"""Called with backend, phase (load, ready, probe; evict, verify, freeze) and seconds."""


class Tools:
    """The tools that all ways work with."""

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
        """Cancel the load of this number, and those before it. Any thread, also before it begins."""
        self._cancelled[backend.name] = number

    def tend(self, backend: Backend) -> Callable[[], None] | None:
        """Return a check that raises Cancelled once the load under way was; None if it cannot be."""
        number = self._loads.get(backend.name, 0)

        def tend() -> None:
            if number <= self._cancelled.get(backend.name, 0):
                raise Cancelled(f"the load of {backend.name} was cancelled")

        return tend if number else None

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
    """The service is stopped, and started from nothing."""

    frees: ClassVar[bool] = True
    freezes: ClassVar[bool] = False

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def load(self, backend: Backend) -> str:
        tools = self._tools
        begun = tools.now()
        with tools.phase(backend, "load"):
            url = tools.start(backend)
        with tools.phase(backend, "ready"):
            await_ready(
                backend,
                url,
                ended=lambda: tools.runtime.ended(backend),
                tend=tools.tend(backend),
                deadline=begun + backend.load_timeout,
                now=tools.now,
                sleep=tools.sleep,
            )
            if may_sleep(backend) and control.is_asleep(backend, url):
                # It ran already, asleep; or it is one that loads nothing by itself.
                control.wake(backend, url, control.UNKNOWN, tools.tend(backend))
        return url

    def evict(self, backend: Backend) -> int:
        self._tools.runtime.stop(backend)
        return 0


class Sleep:
    """The engine keeps running without its GPU memory; the weights stay in host memory."""

    frees: ClassVar[bool] = True
    freezes: ClassVar[bool] = False
    level: ClassVar[int] = 1

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def load(self, backend: Backend) -> str:
        tend = self._tools.tend(backend)
        return self._tools.bring_back(backend, lambda url: control.wake(backend, url, self.level, tend))

    def evict(self, backend: Backend) -> int:
        control.sleep(backend, self._tools.url(backend), self.level)
        return 0


class DeepSleep(Sleep):
    """The engine keeps running without its GPU memory and its weights; they are read again from disk."""

    level: ClassVar[int] = 2


class Checkpoint:
    """The CUDA driver moves GPU memory to host memory; then the service is frozen.

    An engine that can sleep does so first: what it drops, such as its cache, need not be moved. Its processes
    are looked for each time, since engines replace them. Where none uses CUDA, it is only frozen.
    """

    frees: ClassVar[bool] = True
    freezes: ClassVar[bool] = True

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def load(self, backend: Backend) -> str:
        return self._tools.bring_back(backend, lambda url: self._restore(backend, url))

    def _restore(self, backend: Backend, url: str) -> None:
        tools = self._tools
        tools.runtime.resume(backend)
        if standby := tools.checkpointer.find_standby(tools.runtime.pids(backend)):
            tools.checkpointer.restore(standby)
        if sleeps_first(backend):
            # It may have come here by way of a deeper sleep.
            level = control.UNKNOWN if "sleep-2" in backend.evict_to else Sleep.level
            control.wake(backend, url, level, tools.tend(backend))

    def evict(self, backend: Backend) -> int:
        if sleeps_first(backend):
            control.sleep(backend, self._tools.url(backend), Sleep.level)
        return self.checkpoint(backend)

    def checkpoint(self, backend: Backend) -> int:
        """Checkpoint a backend that is asleep already."""
        tools = self._tools
        pids = tools.checkpointer.find(tools.runtime.pids(backend))
        return tools.checkpointer.checkpoint(pids).bytes if pids else 0


class Freeze:
    """The service is frozen as it is; for engines that hold no GPU memory."""

    frees: ClassVar[bool] = False
    freezes: ClassVar[bool] = True

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def load(self, backend: Backend) -> str:
        return self._tools.bring_back(backend, lambda url: self._tools.runtime.resume(backend))

    def evict(self, backend: Backend) -> int:
        return 0


SLEEPS: dict[str, type[Sleep]] = {"sleep": Sleep, "sleep-2": DeepSleep}
WAYS: dict[str, Callable[[Tools], Way]] = {
    **SLEEPS,
    "checkpoint": Checkpoint,
    "freeze": Freeze,
    "stop": Stop,
}


def sleeps_first(backend: Backend) -> bool:
    """Whether it sleeps before its memory is moved: its standby levels say so, or its command allows it.

    Only engines that keep their weights then; the others would have to read them again.
    """
    if backend.engine not in service.SLEEPERS:
        return False
    command = backend.service.command
    told = set(service.SLEEP_FLAGS[backend.engine]) <= set(command)
    variables = dict(backend.service.environment)
    can = told and not service.cannot_evict_to({"command": [*command]}, variables, backend.engine, "sleep")
    return can or "sleep" in backend.evict_to


def may_sleep(backend: Backend) -> bool:
    """Whether one that runs may be found asleep."""
    return any(way in SLEEPS or (way == "checkpoint" and sleeps_first(backend)) for way in backend.evict_to)


class Swapper:
    """Performs steps on backends, outside of the multiplexer's lock.

    ``load``, ``evict`` and ``demote`` keep what ``seam.Host`` promises. Of an engine that had ended by itself
    before its eviction, how that was is reported, and not that it went into no standby.
    ``probe`` reads the GPUs (gpu.probe); None: evictions are believed. ``told`` learns what phases took.
    ``note`` is told a backend's name and the standby level that it is about to take, "" before its load.
    """

    def __init__(
        self,
        runtime: Runtime,
        ways: Mapping[str, Callable[[Tools], Way]] = WAYS,
        *,
        probe: Callable[[], Gpus] | None = None,
        told: Told | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        checkpointer: Checkpointer | None = None,
        note: Callable[[str, str], object] = lambda backend, way: None,
    ) -> None:
        self._runtime = runtime
        self._note = note
        self._now = now
        self._tools = Tools(runtime, now, sleep, told, checkpointer)
        self._ways = {name: make(self._tools) for name, make in ways.items()}
        self._memory = Memory(probe, now, sleep, lambda pid: runtime.owner(pid))

    def load(self, backend: Backend, how: str = "stop", number: int = 0) -> Loaded:
        """Load from the standby level ``how``.

        ``number`` is greater than those of its loads before; 0: it cannot be cancelled.
        """
        with self._tools.loading(backend, number):
            try:
                return self._load_somehow(backend, how)
            except Cancelled as error:
                self._clean_up(backend, error)
                raise

    def cancel(self, backend: Backend, number: int) -> None:
        """End the load of this number before its time; any thread, also before it begins."""
        self._tools.cancel(backend, number)

    def _load_somehow(self, backend: Backend, how: str) -> Loaded:
        self._note(backend.name, "")
        if how != "stop":
            try:
                return Loaded(self._way(how).load(backend), how)
            except Cancelled:
                raise
            except Exception as error:
                log.warning(
                    "%s did not come back by %s and is started anew: %s", backend.name, how, _reason(error)
                )
                self._clean_up(backend, error)
        try:
            if tend := self._tools.tend(backend):
                tend()
            return Loaded(self._way("stop").load(backend), "stop")
        except Cancelled:
            raise
        except Exception as error:
            lines = self.log_tail(backend)
            why = _reason(error)
            if any(map(SHORT_OF_MEMORY.search, (why, *lines))):
                why += self._memory.others(backend.gpus)
            self._clean_up(backend, error)
            raise LoadError(why, log=lines) from error

    def evict(self, backend: Backend, how: str = "stop") -> Evicted:
        """Evict in the way ``how``, or a harder one."""
        way = self._way(how)
        held = self._held(backend, resident=True)
        died = self.ended(backend)
        if how != "stop" and not died:
            self._note(backend.name, how)
            try:
                return self._to_standby(backend, how, way, way.evict, held)
            except Exception as error:
                died = self.ended(backend)
                if not died:
                    why = _reason(error)
                    log.warning("%s did not go into standby by %s and is stopped: %s", backend.name, how, why)
        said = tuple(self.log_tail(backend)) if died else ()
        return replace(self._stop_or_kill(backend, held), died=died or "", log=said)

    def demote(self, backend: Backend, how: str, to: str) -> Evicted:
        """Move a backend from the standby level ``how`` to ``to`` without waking; if that fails, stop it.

        A sleeper can be checkpointed as it is; for a deeper sleep it would have to be woken.
        """
        held = self._held(backend, resident=False)
        way = self._way(to)
        if isinstance(way, Checkpoint) and how in SLEEPS:
            self._note(backend.name, to)
            try:
                return self._to_standby(backend, to, way, way.checkpoint, held)
            except Exception as error:
                log.warning("%s could not be checkpointed and is stopped: %s", backend.name, _reason(error))
        elif to != "stop":
            log.warning("%s cannot be demoted from %s to %s: stopped", backend.name, how, to)
        return self._stop_or_kill(backend, held)

    def ended(self, backend: Backend) -> str | None:
        """How it ended, for people; None while it runs, and while that cannot be told."""
        try:
            return self._runtime.ended(backend)
        except MuxError:
            return None

    def answers(self, backend: Backend, limit: float) -> bool | None:
        """Whether its engine says within ``limit`` seconds that it is well; see visit.answers."""
        try:
            return answers(backend, self._tools.url(backend), limit, self._now)
        except MuxError:
            return False

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        """Return the last lines that its engine printed, as far as they can be had."""
        try:
            return self._runtime.log_tail(backend, lines)
        except MuxError:
            return []

    def _to_standby(
        self, backend: Backend, how: str, way: Way, leave: Callable[[Backend], int], held: Held
    ) -> Evicted:
        with self._tools.phase(backend, "evict"):
            moved = leave(backend)
        left = Left(held.bytes, dict.fromkeys(held.bytes, 0)) if held.pids else Left()
        if way.frees:
            with self._tools.phase(backend, "verify"):
                left = self._memory.left(held, runs=True)
        # Docker does not look into what is frozen, and processes may have been replaced by others.
        kept = max(moved, host_bytes(self._pids(backend)))
        if way.freezes:
            with self._tools.phase(backend, "freeze"):
                self._runtime.pause(backend)
        return Evicted(how, {**dict.fromkeys(backend.gpus, 0), **left.bytes}, kept, left.freed)

    def _pids(self, backend: Backend) -> list[int]:
        """List its processes; none where they cannot be asked for."""
        try:
            return self._runtime.pids(backend)
        except MuxError:
            return []

    def _stop_or_kill(self, backend: Backend, held: Held) -> Evicted:
        """Stop or kill it; BackendError if not even that frees its GPUs."""
        try:
            return self._end(backend, self._way("stop").evict, held)
        except Exception as error:
            why = _reason(error)
            log.warning("%s could not be stopped and is killed: %s", backend.name, why)
        try:
            return self._end(backend, self._runtime.kill, held)
        except Exception as error:
            text = f"{backend.name} may still hold its GPUs: {why}; then killed: {_reason(error)}"
            raise BackendError(text) from error

    def _end(self, backend: Backend, end: Callable[[Backend], object], held: Held) -> Evicted:
        with self._tools.phase(backend, "evict"):
            end(backend)
        with self._tools.phase(backend, "verify"):
            left = self._memory.left(held, runs=False)
        return Evicted("stop", freed=left.freed)

    def _held(self, backend: Backend, *, resident: bool) -> Held:
        """Measure what it holds on its GPUs; nothing is known where that cannot be asked."""
        try:
            return self._memory.held(backend, lambda: self._runtime.pids(backend), resident=resident)
        except MuxError:
            return Held()

    def _way(self, how: str) -> Way:
        if how not in self._ways:
            raise BackendError(f"unknown standby level {how!r}; known: {', '.join(self._ways)}")
        return self._ways[how]

    def _clean_up(self, backend: Backend, error: Exception) -> None:
        try:
            self._stop_or_kill(backend, self._held(backend, resident=False))
        except BackendError as worse:
            raise BackendError(
                f"{_reason(error)}; and then it could not be stopped: {worse.message}"
            ) from worse


def _reason(error: Exception) -> str:
    if isinstance(error, LoadError):
        return error.reason
    return error.message if isinstance(error, MuxError) else f"{type(error).__name__}: {error}"
