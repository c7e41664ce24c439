"""HOW a backend takes and leaves its GPUs: ``Swapper`` puts one guarantee around all standby levels.

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError, Cancelled, LoadError, MuxError
from anvil_mux.host import engines
from anvil_mux.host.cuda_checkpoint import Checkpointer
from anvil_mux.host.freed import After, Before, FreedCheck, host_bytes
from anvil_mux.host.levels import LEVELS, SLEEPS, Checkpoint, Level, ReportPhase, SwapContext
from anvil_mux.host.prompts import PromptCache
from anvil_mux.host.reading import Probe
from anvil_mux.host.runtime import NotBegun, Runtime
from anvil_mux.host.seam import LOG_LINES, Evicted, Loaded

log = logging.getLogger(__name__)

SHORT_OF_MEMORY = re.compile(
    r"out ?of ?(device ?)?memory|(cuda|hip)malloc failed|(failed|unable) to allocate|free memory on device|"
    r"no available memory|(not enough|insufficient) memory",
    re.IGNORECASE,
)
"""How engines say that a GPU's memory does not suffice, in the reason of a failed load or its last lines."""


class Swapper:
    """Performs steps on backends, outside of the multiplexer's lock.

    ``load``, ``evict`` and ``demote`` keep what ``seam.Host`` promises. Of an engine that had ended by itself
    before its eviction, how that was is reported, and not that it went into no standby.
    ``probe`` reads the GPUs (gpu.probe); None: evictions are believed. ``report`` learns what phases took.
    ``note`` is told a backend's name and the standby level that it is about to take, "" before its load.
    ``prompts`` keeps those of engines that are stopped. ``lacks`` lists the rights that a checkpoint misses.
    """

    def __init__(
        self,
        runtime: Runtime,
        levels: Mapping[str, Callable[[SwapContext], Level]] = LEVELS,
        *,
        probe: Probe | None = None,
        report: ReportPhase | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        checkpointer: Checkpointer | None = None,
        note: Callable[[str, str], object] = lambda backend, level: None,
        prompts: PromptCache | None = None,
        lacks: Callable[[Backend], list[str]] = lambda backend: [],
    ) -> None:
        self._runtime = runtime
        self._lacks = lacks
        self._note = note
        self._now = now
        self._context = SwapContext(runtime, now, sleep, report, checkpointer)
        self._levels = {name: make(self._context) for name, make in levels.items()}
        self._prompts = prompts or PromptCache(now)
        self._memory = FreedCheck(probe, now, sleep, lambda pid: runtime.owner(pid))

    def load(self, backend: Backend, how: str = "stop", number: int = 0) -> Loaded:
        """Load from the standby level ``how``.

        ``number`` is that of no other load; 0: it cannot be cancelled.
        """
        with self._context.loading(backend, number):
            try:
                return self._load_somehow(backend, how)
            except Cancelled as error:
                self._clean_up(backend, error)
                raise

    def cancel(self, backend: Backend, number: int) -> None:
        """End the load of this number before its time; any thread, also before it begins."""
        self._context.cancel(backend, number)

    def _load_somehow(self, backend: Backend, how: str) -> Loaded:
        self._note(backend.name, "")
        if how != "stop":
            try:
                return Loaded(self._level(how).load(backend), how)
            except Cancelled:
                raise
            except Exception as error:
                log.warning(
                    "%s could not be woken from standby (%s) and is restarted: %s",
                    backend.name,
                    how,
                    _reason(error),
                )
                self._clean_up(backend, error)
        try:
            if check_cancelled := self._context.check_cancelled(backend):
                check_cancelled()
            return Loaded(self._load_cold(backend), "stop")
        except Cancelled:
            raise
        except NotBegun as error:
            raise LoadError(error.message) from error
        except Exception as error:
            lines = self.log_tail(backend)
            why = _reason(error)
            if any(map(SHORT_OF_MEMORY.search, (why, *lines))):
                why += self._memory.others(backend.gpus)
            self._clean_up(backend, error)
            raise LoadError(why, log=lines) from error

    def _load_cold(self, backend: Backend) -> str:
        """Load it from nothing, and restore its prompts; without them if its engine ended over that."""
        if backend.prompt_cache is None:
            return self._level("stop").load(backend)
        for _ in range(2):
            began = self._prompts.prepare(backend)
            url = self._level("stop").load(backend)
            with self._context.phase(backend, "restore"):
                self._prompts.restore(backend, url, began, self._context.check_cancelled(backend))
            if not (how := self.ended(backend)):
                return url
        raise LoadError(f"{backend.name} {how} when it was ready")

    def evict(self, backend: Backend, how: str = "stop") -> Evicted:
        """Evict in the way ``how``, or a harder one."""
        level = self._level(how)
        held = self._held(backend, resident=True)
        died = self.ended(backend)
        if how != "stop" and not died:
            self._note(backend.name, how)
            try:
                return self._to_standby(backend, how, level, level.evict, held)
            except Exception as error:
                died = self.ended(backend)
                if not died:
                    why = self._why_not_standby(backend, level, error)
                    log.warning(
                        "%s could not be put into standby (%s) and is stopped instead: %s",
                        backend.name,
                        how,
                        why,
                    )
        if not died:
            self._save_prompts(backend)
            self._await_notice(backend)
        said = tuple(self.log_tail(backend)) if died else ()
        return replace(self._stop_or_kill(backend, held), died=died or "", log=said)

    def stop(self, backend: Backend) -> None:
        """Stop a backend however it is, without a look at its GPUs."""
        if not self._runtime.is_frozen(backend):
            self._await_notice(backend)
        self._runtime.stop(backend)

    def _await_notice(self, backend: Backend) -> None:
        """Let its engine notice that those who were cut have left: until then a signal may not end it."""
        with suppress(MuxError):
            engines.await_notice(backend, self._context.url(backend))

    def demote(self, backend: Backend, how: str, to: str) -> Evicted:
        """Move a backend from the standby level ``how`` to ``to`` without waking; if that fails, stop it.

        A sleeper can be checkpointed as it is; for a deeper sleep it would have to be woken.
        """
        held = self._held(backend, resident=False)
        level = self._level(to)
        if isinstance(level, Checkpoint) and how in SLEEPS:
            self._note(backend.name, to)
            try:
                return self._to_standby(backend, to, level, level.checkpoint, held)
            except Exception as error:
                why = self._why_not_standby(backend, level, error)
                log.warning("%s could not be checkpointed and is stopped: %s", backend.name, why)
        elif to != "stop":
            log.warning("%s cannot be demoted from %s to %s: stopped", backend.name, how, to)
        if how == "freeze":
            self._save_prompts(backend, thaw=True)
        return self._stop_or_kill(backend, held)

    def _why_not_standby(self, backend: Backend, level: Level, error: Exception) -> str:
        """The reason why it is not in standby; of a checkpoint also which rights are missing."""
        lacking = self._lacks(backend) if isinstance(level, Checkpoint) else []
        return "; ".join([_reason(error), *lacking])

    def ended(self, backend: Backend) -> str | None:
        """How it ended, for people; None while it runs, and while that cannot be told."""
        try:
            return self._runtime.ended(backend)
        except MuxError:
            return None

    def answers(self, backend: Backend, limit: float) -> bool | None:
        """Whether its engine says within ``limit`` seconds that it is well; see engines.answers."""
        try:
            url = self._context.url(backend)
        except MuxError:
            return False
        return engines.answers(backend, url, limit, self._now)

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        """Return the last lines that its engine printed, as far as they can be had."""
        try:
            return self._runtime.log_tail(backend, lines)
        except MuxError:
            return []

    def _to_standby(
        self, backend: Backend, how: str, level: Level, leave: Callable[[Backend], int], held: Before
    ) -> Evicted:
        with self._context.phase(backend, "evict"):
            moved = leave(backend)
        left = After(held.bytes, dict.fromkeys(held.bytes, 0)) if held.pids else After()
        if level.frees:
            with self._context.phase(backend, "verify"):
                left = self._memory.left(held, runs=True)
        # Docker does not look into what is frozen, and processes may have been replaced by others.
        kept = max(moved, host_bytes(self._pids(backend)))
        if level.freezes:
            with self._context.phase(backend, "freeze"):
                self._runtime.pause(backend)
        return Evicted(how, {**dict.fromkeys(backend.gpus, 0), **left.bytes}, kept, left.freed)

    def _save_prompts(self, backend: Backend, *, thaw: bool = False) -> None:
        """Save the prompts of an engine that is to be stopped; what fails is logged."""
        if backend.prompt_cache is None:
            return
        try:
            with self._context.phase(backend, "save"):
                if thaw:
                    self._runtime.resume(backend)
                self._prompts.save(backend, self._context.url(backend))
        except MuxError as error:
            log.warning("%s: its prompts were not saved: %s", backend.name, error.message)

    def _pids(self, backend: Backend) -> list[int]:
        """List its processes; none where they cannot be asked for."""
        try:
            return self._runtime.pids(backend)
        except MuxError:
            return []

    def _stop_or_kill(self, backend: Backend, held: Before) -> Evicted:
        """Stop or kill it; BackendError if not even that frees its GPUs."""
        try:
            return self._end(backend, self._level("stop").evict, held)
        except Exception as error:
            why = _reason(error)
            log.warning("%s could not be stopped and is killed: %s", backend.name, why)
        try:
            return self._end(backend, self._runtime.kill, held)
        except Exception as error:
            text = f"{backend.name} may still hold its GPUs: {why}; then killed: {_reason(error)}"
            raise BackendError(text) from error

    def _end(self, backend: Backend, end: Callable[[Backend], object], held: Before) -> Evicted:
        with self._context.phase(backend, "evict"):
            end(backend)
        with self._context.phase(backend, "verify"):
            left = self._memory.left(held, runs=False)
        return Evicted("stop", freed=left.freed)

    def _held(self, backend: Backend, *, resident: bool) -> Before:
        """Measure what it holds on its GPUs; nothing is known where that cannot be asked."""
        try:
            return self._memory.held(backend, lambda: self._runtime.pids(backend), resident=resident)
        except MuxError:
            return Before()

    def _level(self, how: str) -> Level:
        if how not in self._levels:
            raise BackendError(f"unknown standby level {how!r}; known: {', '.join(self._levels)}")
        return self._levels[how]

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
