"""HOW a backend takes and leaves its GPUs: the standby levels, and one guarantee around all: ``Swapper``.

A load ends in a backend that answers for its model, or the backend is gone again, or the caller is told that
it may still hold its GPUs. One that does not come back from its standby level is stopped and started anew
within the same load.

An eviction ends in GPUs that are free, as far as they can be read: what an engine says is not believed. Where
a level fails, or frees nothing, the next deeper one is taken: stop, then kill. What even that does not end is
a BackendError. What is to be frozen is frozen after that: nothing can be done to its GPU memory any more.

The engine's last log lines are read before the clean-up, because the clean-up may take the log with it.

A standby level is an object with ``load`` and ``evict``, made with the ``Swapper``; ``LEVELS`` names them.
``Stop`` is the one that every engine and runtime can do.

What a backend holds (``FreedCheck``) is what NVML says of its processes or, where it cannot say that, what is
declared for it. Where neither is known, or no GPU can be asked, the eviction is believed. An engine that runs
on keeps a CUDA context, and is believed to sleep when it has given up most of the rest. Of an engine that was
stopped nothing may be left; that the GPU's free memory rises is waited for, because it lags behind the end of
a process, but not insisted on, because another process may take it at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from anvil_mux.config.abilities import SLEEP_FLAGS, SLEEPERS, cannot_evict_to
from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import gib
from anvil_mux.errors import BackendError, Cancelled, LoadError, MuxError
from anvil_mux.host import engines
from anvil_mux.host.cuda_checkpoint import Checkpointer
from anvil_mux.host.engines import CAUSE_LINES, SHORT_OF_MEMORY, cause
from anvil_mux.host.gpus import Gpus, Probe, Reading, others
from anvil_mux.host.prompts import PromptCache
from anvil_mux.host.seam import LOG_LINES, Evicted, Loaded, NotBegun, Runtime
from anvil_mux.state import text_of

log = logging.getLogger(__name__)

WAKES = "wakes"
"""The note of a backend that is on its way back from standby: what it says of its sleep holds no longer."""
CANCEL_SECONDS = 30.0
"""How long a load that was cancelled may take to end before its engine is stopped all the same."""

ReportPhase = Callable[[Backend, str, float], object]
"""Called with backend, phase (load, ready, restore, probe; save, evict, verify, freeze) and seconds."""
Guard = Callable[[Backend, Callable[[], float]], AbstractContextManager[None]]
"""Keeps other programs from starting engines on the GPUs of a backend while the backend is started.

Called with the backend and a function that returns the seconds for which it may wait, or raises Cancelled.
It raises NotBegun if another engine is on the GPUs.
"""


class Swapper:
    """Performs steps on backends, outside of the multiplexer's lock.

    ``load``, ``evict`` and ``demote`` keep what ``seam.Host`` promises. Of an engine that had ended by itself
    before its eviction, how that was is reported, and not that it went into no standby.
    ``probe`` reads the GPUs (gpus.probe); None: evictions are believed. ``report`` learns what phases took.
    ``note`` is told a backend's name and the standby level that it is about to take, ``WAKES`` before it is
    woken, and "" before it is loaded from nothing and once it is awake.
    ``prompts`` keeps those of engines that are stopped. ``lacks`` lists the rights that a checkpoint misses.
    ``guard`` surrounds each start of a service.
    """

    def __init__(
        self,
        runtime: Runtime,
        levels: Mapping[str, Callable[[Swapper], Level]] | None = None,
        *,
        probe: Probe | None = None,
        report: ReportPhase | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        checkpointer: Checkpointer | None = None,
        note: Callable[[str, str], object] = lambda backend, level: None,
        prompts: PromptCache | None = None,
        lacks: Callable[[Backend], list[str]] = lambda backend: [],
        guard: Guard = lambda backend, remaining: nullcontext(),
    ) -> None:
        self.runtime = runtime
        self.now = now
        self.sleep = sleep
        self.checkpointer = checkpointer or Checkpointer(now=now, wait=sleep)
        self._report = report
        self._note = note
        self._lacks = lacks
        self._guard = guard
        self._levels = {name: make(self) for name, make in (levels or LEVELS).items()}
        self._prompts = prompts or PromptCache()
        self.memory = FreedCheck(probe, now, sleep, lambda pid: runtime.owner(pid))
        self._urls: dict[str, str] = {}  # one worker at a time writes a backend's entry
        self._loads: dict[str, int] = {}  # the numbers of those under way; the same
        self._cancelled: dict[str, int] = {}  # backend -> the last of its loads that was cancelled

    def load(self, backend: Backend, level: str = "stop", number: int = 0) -> Loaded:
        """Load from the standby level ``level``.

        ``number`` is that of no other load; 0: it cannot be cancelled.
        """
        self._loads[backend.name] = number
        try:
            return self._load_somehow(backend, level)
        except Cancelled as error:
            self._clean_up(backend, error)
            raise
        finally:
            del self._loads[backend.name]

    def cancel(self, backend: Backend, number: int) -> None:
        """End the load of this number before its time; any thread, also before it begins."""
        self._cancelled[backend.name] = number

    def _load_somehow(self, backend: Backend, level: str) -> Loaded:
        if level != "stop":
            self._note(backend.name, WAKES)
            try:
                url = self._levels[level].load(backend)
                self._note(backend.name, "")
                return Loaded(url, level)
            except Cancelled:
                raise
            except Exception as error:
                log.warning(
                    "%s could not be woken from standby (%s) and is restarted: %s",
                    backend.name,
                    level,
                    _reason(error),
                )
                self._clean_up(backend, error)
        self._note(backend.name, "")
        try:
            self.check_cancelled(backend)
            return Loaded(self._load_cold(backend), "stop")
        except Cancelled:
            raise
        except NotBegun as error:
            raise LoadError(error.message, log=error.log) from error
        except Exception as error:
            lines = self.log_tail(backend, CAUSE_LINES)
            why = _reason(error)
            ended, contained = self.ended(backend) is not None, backend.service.image is not None
            first = cause(lines, ended=ended, contained=contained)
            is_short = any(map(SHORT_OF_MEMORY.search, (why, *lines)))
            others = self.memory.others(backend.gpus) if is_short else ""
            why = f"{first}{others} ({why})" if first else why + others
            self._clean_up(backend, error)
            raise LoadError(why, log=lines[-LOG_LINES:]) from error

    def _load_cold(self, backend: Backend) -> str:
        """Load it from nothing, and restore its prompts; without them if its engine ended over that."""
        if backend.prompt_cache is None:
            return self._levels["stop"].load(backend)
        for _ in range(2):
            began = self._prompts.prepare(backend)
            url = self._levels["stop"].load(backend)
            with self.phase(backend, "restore"):
                self._prompts.restore(backend, url, began, partial(self.check_cancelled, backend))
            if not (ended := self.ended(backend)):
                return url
        raise LoadError(f"{backend.name} {ended} when it was ready")

    def evict(self, backend: Backend, level: str = "stop") -> Evicted:
        """Evict to the standby level ``level``, or to a deeper one; NotBegun if nothing can be stopped."""
        self._check_control()
        held = self._held(backend, resident=True)
        died = self.ended(backend)
        if not died and self._dozes(backend):
            # What it holds now is not what it needs, and to save its prompts would wake it.
            return replace(self._stop_or_kill(backend, held), freed={})
        if level != "stop" and not died:
            if evicted := self._in_standby(backend, level, self._levels[level].evict, held):
                return evicted
            died = self.ended(backend)
        if not died:
            self._save_prompts(backend)
            with suppress(MuxError):
                engines.await_notice(backend, self.url(backend))
        lines = tuple(self.log_tail(backend)) if died else ()
        return replace(self._stop_or_kill(backend, held), died=died or "", log=lines)

    def _check_control(self) -> None:
        """Raise NotBegun if what stops services does not answer: nothing is begun that cannot be ended."""
        if why := self.runtime.ping():
            raise NotBegun(why)

    def _dozes(self, backend: Backend) -> bool:
        """Return whether its engine has given up its memory by itself."""
        with suppress(MuxError):
            return engines.dozes(backend, self.url(backend))
        return False

    def stop(self, backend: Backend) -> None:
        """Stop a backend however it is, without a look at its GPUs; first a load of it ends."""
        self._end_load(backend)
        if not self.runtime.is_frozen(backend):
            self._await_notice(backend)
        self.runtime.stop(backend)

    def _end_load(self, backend: Backend) -> None:
        """Cancel a load under way and wait for its end: it would start anew what is stopped beside it."""
        if number := self._loads.get(backend.name):
            self.cancel(backend, number)
            until = self.now() + CANCEL_SECONDS
            while self._loads.get(backend.name) == number and self.now() < until:
                self.sleep(PAUSE)

    def _await_notice(self, backend: Backend) -> None:
        """Let its engine notice that those who were cut have left: until then a signal may not end it."""
        with suppress(MuxError):
            if not self._dozes(backend):  # the question would wake it
                engines.await_notice(backend, self.url(backend))

    def demote(self, backend: Backend, before: str, level: str) -> Evicted:
        """Move a backend from level ``before`` to ``level`` without waking; if that fails, stop it.

        A sleeper can be checkpointed as it is; for a deeper sleep it would have to be woken.
        """
        self._check_control()
        held = self._held(backend, resident=False)
        standby = self._levels[level]
        if isinstance(standby, Checkpoint) and before in SLEEPS:
            if evicted := self._in_standby(backend, level, standby.checkpoint, held):
                return evicted
        elif level != "stop":
            log.warning("%s cannot be demoted from %s to %s: stopped", backend.name, before, level)
        if before == "freeze":
            self._save_prompts(backend, thaw=True)
        return self._stop_or_kill(backend, held)

    def _in_standby(
        self, backend: Backend, level: str, leave: Callable[[Backend], int], held: Before
    ) -> Evicted | None:
        """Put it into standby; None where that fails, which is logged if it has not ended meanwhile."""
        self._note(backend.name, level)
        try:
            return self._to_standby(backend, level, leave, held)
        except Exception as error:
            if not self.ended(backend):
                lacking = self._lacks(backend) if level == "checkpoint" else []
                log.warning(
                    "%s could not be put into standby (%s) and is stopped instead: %s",
                    backend.name,
                    level,
                    "; ".join([_reason(error), *lacking]),
                )
        return None

    def ended(self, backend: Backend) -> str | None:
        """How it ended, for people; None while it runs, and while that cannot be told."""
        try:
            return self.runtime.ended(backend)
        except MuxError:
            return None

    def answers(self, backend: Backend, limit: float) -> bool | None:
        """Whether its engine says within ``limit`` seconds that it is well; see engines.answers."""
        try:
            url = self.url(backend)
        except MuxError:
            return False
        return engines.answers(backend, url, limit, self.now)

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        """Return the last lines that its engine printed, as far as they can be had."""
        try:
            return self.runtime.log_tail(backend, lines)
        except MuxError:
            return []

    def _to_standby(
        self, backend: Backend, level: str, leave: Callable[[Backend], int], held: Before
    ) -> Evicted:
        standby = self._levels[level]
        with self.phase(backend, "evict"):
            moved = leave(backend)
        left = After(held.bytes, dict.fromkeys(held.bytes, 0)) if held.pids else After()
        if standby.frees:
            with self.phase(backend, "verify"):
                left = self.memory.left(held, runs=True)
        # Docker does not look into what is frozen, and processes may have been replaced by others.
        kept = max(moved, host_bytes(self._pids(backend)))
        if standby.freezes:
            with self.phase(backend, "freeze"):
                self.runtime.pause(backend)
        return Evicted(level, {**dict.fromkeys(backend.gpus, 0), **left.bytes}, kept, left.freed)

    def _save_prompts(self, backend: Backend, *, thaw: bool = False) -> None:
        """Save the prompts of an engine that is to be stopped; what fails is logged."""
        if backend.prompt_cache is None:
            return
        try:
            with self.phase(backend, "save"):
                if thaw:
                    self.runtime.resume(backend)
                self._prompts.save(backend, self.url(backend))
        except MuxError as error:
            log.warning("%s: its prompts were not saved: %s", backend.name, error.message)

    def _pids(self, backend: Backend) -> list[int]:
        """List its processes; none where they cannot be asked for."""
        try:
            return self.runtime.pids(backend)
        except MuxError:
            return []

    def _stop_or_kill(self, backend: Backend, held: Before) -> Evicted:
        """Stop or kill it; BackendError if not even that frees its GPUs."""
        try:
            return self._end(backend, self._levels["stop"].evict, held)
        except Exception as error:
            why = _reason(error)
            log.warning("%s could not be stopped and is killed: %s", backend.name, why)
        try:
            return self._end(backend, self.runtime.kill, held)
        except Exception as error:
            text = f"{backend.name} may still hold its GPUs: {why}; then killed: {_reason(error)}"
            raise BackendError(text) from error

    def _end(self, backend: Backend, end: Callable[[Backend], object], held: Before) -> Evicted:
        with self.phase(backend, "evict"):
            end(backend)
        with self.phase(backend, "verify"):
            left = self.memory.left(held, runs=False)
        return Evicted("stop", freed=left.freed)

    def _held(self, backend: Backend, *, resident: bool) -> Before:
        """Measure what it holds on its GPUs; nothing is known where that cannot be asked."""
        try:
            return self.memory.held(backend, lambda: self.runtime.pids(backend), resident=resident)
        except MuxError:
            return Before()

    def _clean_up(self, backend: Backend, error: Exception) -> None:
        try:
            self._stop_or_kill(backend, self._held(backend, resident=False))
        except BackendError as worse:
            raise BackendError(
                f"{_reason(error)}; and then it could not be stopped: {worse.message}"
            ) from worse

    # What standby levels work with

    def check_cancelled(self, backend: Backend) -> None:
        """Raise Cancelled once the load under way was cancelled."""
        if self._loads[backend.name] == self._cancelled.get(backend.name):
            raise Cancelled(f"the load of {backend.name} was cancelled")

    @contextmanager
    def phase(self, backend: Backend, name: str) -> Iterator[None]:
        """Report how long what is done within takes, however it ends."""
        begun = self.now()
        try:
            yield
        finally:
            if self._report:
                self._report(backend, name, self.now() - begun)

    def start(self, backend: Backend, remaining: Callable[[], float]) -> str:
        """Start the service, or find it running; return its URL.

        ``remaining``: the seconds for which it may wait for other programs.
        """
        with self.guarded(backend, remaining):
            url = self._urls[backend.name] = self.runtime.start(backend)
        return url

    def guarded(self, backend: Backend, remaining: Callable[[], float]) -> AbstractContextManager[None]:
        """Keep other programs from starting engines on the GPUs of a backend; see ``Guard``."""
        return self._guard(backend, remaining)

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
            engines.probe(backend, url)
        return url


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, MuxError) else f"{type(error).__name__}: {error}"


# Standby levels


class Level:
    """One standby level, which works with what the swapper has for it."""

    frees: ClassVar[bool] = True
    """Whether it gives GPU memory back. False: for engines that hold none."""
    freezes: ClassVar[bool] = False
    """Whether the service is frozen once its memory is free."""

    def __init__(self, swapper: Swapper) -> None:
        self._swapper = swapper

    def load(self, backend: Backend) -> str:
        """Base URL of the backend once it answers for its model; an error if it does not."""
        raise NotImplementedError

    def evict(self, backend: Backend) -> int:
        """Returns when its GPUs are free, as far as the engine says; an error if they are not.

        The bytes that were taken from the GPUs to host memory, 0 where only the engine knows.
        """
        raise NotImplementedError


class Stop(Level):
    """The service is stopped; its next load is a cold start."""

    def load(self, backend: Backend) -> str:
        begun = self._swapper.now()
        try:
            return self._load(backend, begun)
        except LoadError:
            if not self._swapper.runtime.lost_its_port(backend):
                raise
        log.warning("%s lost its port to another program, and is started with another one", backend.name)
        return self._load(backend, begun)

    def _load(self, backend: Backend, begun: float) -> str:
        swapper, deadline = self._swapper, begun + backend.load_timeout
        check_cancelled = partial(swapper.check_cancelled, backend)
        remaining = partial(self._remaining, backend, deadline)
        with ExitStack() as guard:
            if backend.service.needs:  # none is started for an engine that is refused its GPUs
                guard.enter_context(swapper.guarded(backend, remaining))
                with swapper.phase(backend, "depends_on"):
                    swapper.runtime.prepare(backend, remaining)
            with swapper.phase(backend, "load"):
                url = swapper.start(backend, remaining)
        with swapper.phase(backend, "ready"):
            engines.await_ready(
                backend,
                url,
                ended=lambda: swapper.runtime.ended(backend),
                check_cancelled=check_cancelled,
                deadline=deadline,
                now=swapper.now,
                sleep=swapper.sleep,
            )
            if may_sleep(backend) and engines.is_asleep(backend, url):
                # It ran already, asleep; or it is one that loads nothing by itself.
                engines.wake(backend, url, engines.UNKNOWN, check_cancelled)
            engines.load_adapters(
                backend, url, deadline=deadline, check_cancelled=check_cancelled, now=swapper.now
            )
        return url

    def _remaining(self, backend: Backend, deadline: float) -> float:
        self._swapper.check_cancelled(backend)
        return deadline - self._swapper.now()

    def evict(self, backend: Backend) -> int:
        self._swapper.runtime.stop(backend)
        return 0


class Sleep(Level):
    """The engine sleeps: it frees its GPU memory and keeps the weights in host memory."""

    level: ClassVar[int] = 1

    def load(self, backend: Backend) -> str:
        check_cancelled = partial(self._swapper.check_cancelled, backend)
        return self._swapper.bring_back(
            backend, lambda url: engines.wake(backend, url, self.level, check_cancelled)
        )

    def evict(self, backend: Backend) -> int:
        engines.sleep(backend, self._swapper.url(backend), self.level)
        return 0


class DeepSleep(Sleep):
    """The engine sleeps and drops its weights, which are read from disk again when it wakes."""

    level: ClassVar[int] = 2


class Checkpoint(Level):
    """The CUDA driver moves the GPU memory to host memory; then the service is frozen.

    An engine that can sleep does so first: what it drops, such as its cache, need not be moved. Its processes
    are looked for each time, since engines replace them. Where none uses CUDA, it is only frozen.
    """

    freezes: ClassVar[bool] = True

    def load(self, backend: Backend) -> str:
        return self._swapper.bring_back(backend, lambda url: self._restore(backend, url))

    def _restore(self, backend: Backend, url: str) -> None:
        swapper = self._swapper
        swapper.runtime.resume(backend)
        if standby := swapper.checkpointer.find_standby(swapper.runtime.pids(backend)):
            swapper.checkpointer.restore(standby)
        if sleeps_first(backend):
            # It may have come here by way of a deeper sleep.
            level = engines.UNKNOWN if "sleep-2" in backend.evict_to else Sleep.level
            engines.wake(backend, url, level, partial(swapper.check_cancelled, backend))

    def evict(self, backend: Backend) -> int:
        if sleeps_first(backend):
            engines.sleep(backend, self._swapper.url(backend), Sleep.level)
        return self.checkpoint(backend)

    def checkpoint(self, backend: Backend) -> int:
        """Checkpoint a backend that is asleep already."""
        swapper = self._swapper
        pids = swapper.checkpointer.find(swapper.runtime.pids(backend))
        return swapper.checkpointer.checkpoint(pids).bytes if pids else 0


class Freeze(Level):
    """The service is frozen as it is; only for engines that hold no GPU memory."""

    frees: ClassVar[bool] = False
    freezes: ClassVar[bool] = True

    def load(self, backend: Backend) -> str:
        return self._swapper.bring_back(backend, lambda url: self._swapper.runtime.resume(backend))

    def evict(self, backend: Backend) -> int:
        return 0


SLEEPS: dict[str, type[Sleep]] = {"sleep": Sleep, "sleep-2": DeepSleep}
LEVELS: dict[str, Callable[[Swapper], Level]] = {
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
    allowed = set(SLEEP_FLAGS[backend.engine]) <= set(command)
    variables = dict(backend.service.environment)
    can = allowed and not cannot_evict_to({"command": [*command]}, variables, backend.engine, "sleep")
    return can or "sleep" in backend.evict_to


def may_sleep(backend: Backend) -> bool:
    """Whether one that runs may be found asleep."""
    if "checkpoint" in backend.evict_to and sleeps_first(backend):
        return True
    return any(level in SLEEPS for level in backend.evict_to)


# What is really free

PATIENCE = 5.0
PAUSE = 0.25
CONTEXT = 3 << 29
"""Bytes (1.5 GiB) that a sleeping engine may keep on a GPU, if it has given up something at all."""
MOST_KEPT = 0.25
"""Share of its memory that it may keep in any case, as with tensor parallelism."""


@dataclass(frozen=True, slots=True)
class Before:
    """The memory that a backend held before it was told to leave; only GPUs of which that is known."""

    bytes: Mapping[str, int] = field(default_factory=dict)
    free: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> bytes that were free there."""
    pids: frozenset[int] = frozenset()
    """The processes that hold ``bytes``; empty where it is only declared."""

    def left(self, gpu: str, reading: Reading) -> int:
        """The bytes that it still holds, or declared ones that are not free yet."""
        if self.pids:
            return reading.used_by(self.pids) or 0
        return max(self.bytes[gpu] - self.risen(gpu, reading), 0)

    def freed(self, gpu: str, reading: Reading) -> int:
        """The bytes given back."""
        freed = self.bytes[gpu] - self.left(gpu, reading) if self.pids else self.risen(gpu, reading)
        return max(freed, 0)

    def risen(self, gpu: str, reading: Reading) -> int:
        """The bytes by which the GPU's free memory rose."""
        return (reading.free or 0) - self.free[gpu]

    def is_standby(self, gpu: str, left: int) -> bool:
        """Whether so little is left that an engine which runs on has given up its memory."""
        before = self.bytes[gpu]
        return left <= MOST_KEPT * before or (left <= CONTEXT and left <= (1 - MOST_KEPT) * before)

    def is_free(self, gpu: str, reading: Reading) -> bool:
        """Whether the GPU's free memory rose by most of it."""
        return self.risen(gpu, reading) >= (1 - MOST_KEPT) * self.bytes[gpu]


@dataclass(frozen=True, slots=True)
class After:
    """The fate of that memory; only GPUs that could be read."""

    bytes: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> bytes that it still holds."""
    freed: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> bytes given back: by its processes' account, or else as the GPU's free memory rose."""


class FreedCheck:
    """Reads GPUs by ``probe`` (None: there are none to be read). ``owner``: see seam.Runtime."""

    def __init__(
        self,
        probe: Probe | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        owner: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self._owner = owner
        self._probe = probe
        self._now = now
        self._sleep = sleep

    def held(self, backend: Backend, pids: Callable[[], Iterable[int]], *, resident: bool) -> Before:
        """Measure what the backend holds now; ``pids`` are asked for only if there are GPUs to be read.

        What is declared counts only for one that is ``resident``.
        """
        if self._probe is None or not backend.gpus:
            return Before()
        own = frozenset(pids())
        readings = self._read(backend.gpus, own)
        amounts = {gpu: reading.used_by(own) for gpu, reading in readings.items()}
        if not any(amounts.values()):
            own, amounts = frozenset(), dict.fromkeys(readings, backend.vram if resident else None)
        known = {gpu: amount for gpu, amount in amounts.items() if amount}
        return Before(known, {gpu: readings[gpu].free or 0 for gpu in known}, own)

    def left(self, held: Before, *, runs: bool) -> After:
        """Wait until little enough is held, and return what is; BackendError if that does not come.

        ``runs``: the backend runs on, asleep or the like.
        """
        until = self._now() + PATIENCE
        while True:
            readings = self._read(held.bytes, held.pids)
            left = {gpu: held.left(gpu, reading) for gpu, reading in readings.items()}
            if runs:
                full = [gpu for gpu in left if not held.is_standby(gpu, left[gpu])]
                late = full
            else:
                full = [gpu for gpu in left if held.pids and left[gpu]]
                late = full or [gpu for gpu in left if not held.is_free(gpu, readings[gpu])]
            if late and self._now() >= until:
                self._judge(held, left, full)
                late = []
            if not late:
                freed = {gpu: held.freed(gpu, reading) for gpu, reading in readings.items()}
                return After(left if runs else {}, freed)
            self._sleep(PAUSE)

    def _judge(self, held: Before, left: Mapping[str, int], full: list[str]) -> None:
        """Raise BackendError if it still holds memory; else log that its memory is not free."""
        if full:
            what = ", ".join(f"{gib(left[gpu])} of {gib(held.bytes[gpu])} on GPU {gpu}" for gpu in full)
            raise BackendError(f"after {PATIENCE:g} s it still holds {what}{self.others(left)}")
        gpus = ", ".join(left)
        log.warning("GPU %s: memory of an engine that has ended is not free%s", gpus, self.others(left))

    def others(self, gpus: Iterable[str]) -> str:
        """The end of a sentence: which processes that are none of ours hold memory there, if any do."""
        found = others(self._read(gpus).values(), lambda pid: self._owner(pid) is not None)
        return "".join(f"; {other_process}" for other_process in found)

    def _read(self, gpus: Iterable[str], pids: Collection[int] | None = None) -> dict[str, Reading]:
        found = self._probe(pids) if self._probe and gpus else Gpus()
        readings = {gpu: found.find(gpu) for gpu in gpus}
        return {gpu: reading for gpu, reading in readings.items() if reading and reading.free is not None}


def host_bytes(pids: Iterable[int]) -> int:
    """Host memory of processes, without the files that they have mapped; 0 for those that are gone.

    What several share counts for each: telling that apart takes the kernel 12 ms per GiB, and it is little.
    """
    total = 0
    for pid in pids:
        lines = text_of(Path(f"/proc/{pid}/status")).splitlines()
        words = [line.split() for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
        total += sum(int(kib) << 10 for _, kib, *_ in words)
    return total
