"""HOW a backend takes and leaves its GPUs.

A way to rest is an object with ``load``, ``evict`` and ``estimate``; ``WAYS`` names them. ``Stop`` is the one
that every engine and runtime can do. ``Swapper`` puts the same guarantee around all of them: a load either
ends in a backend that answers for its model, or the backend is gone again, or the caller is told that it may
still hold its GPUs.

The engine's last log lines are read before the clean-up, because the clean-up may take the log with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from anvil_mux.config import Backend
from anvil_mux.engine import await_ready
from anvil_mux.errors import BackendError, LoadError, MuxError

LOG_LINES = 20


class Runtime(Protocol):
    """Where services run: Docker Compose or local processes.

    Every call is bounded in time, may block, is never made under the multiplexer's lock, and maps foreign
    failures to BackendError, or to LoadError where the service's own description is at fault (its image is
    missing, its port is taken). Calls for different backends may come from several threads at once.
    """

    def start(self, backend: Backend) -> str:
        """Starts the service (creating it at the first use) and returns its base URL.

        One that runs already is left running; it need not answer yet.
        """

    def stop(self, backend: Backend) -> None:
        """Returns when it is really gone: grace, then kill. A service that does not run is no error."""

    def kill(self, backend: Backend) -> None:
        """The same at once, without grace."""

    def pause(self, backend: Backend) -> None:
        """Freezes the service: none of its processes runs until ``resume``, ``stop`` or ``kill``."""

    def resume(self, backend: Backend) -> None:
        """Lets a frozen service go on; one that is not frozen is no error."""

    def pids(self, backend: Backend) -> list[int]:
        """The ids that its processes have on this host; [] if it does not run."""

    def ended(self, backend: Backend) -> str | None:
        """None while it runs or is frozen, else how it ended, for people ("exited with code 1")."""

    def running(self) -> dict[str, str]:
        """Service name -> base URL of every service of this project that runs now.

        "" where it runs but cannot be reached: it holds its GPU all the same, so stop it. What is frozen is
        let go on: as it is it would only swallow requests. These services are watched from now on.
        """

    def log_tail(self, backend: Backend, lines: int = LOG_LINES) -> list[str]:
        """The last lines that the current (or last) run of the service printed; [] if none can be had."""

    def follow_log(self, backend: Backend) -> Iterator[str]:
        """Lines as they come, beginning with a tail of 100, until the service ends."""

    def watch(self, died: Callable[[str], None]) -> None:
        """Blocks until close(); calls ``died(service name)`` soon after a service ended without ``stop``.

        Only services that ``start`` returned or ``running`` listed are reported, each run once, when nothing
        of it runs any more. An engine may die while its load is still being awaited, or just after: this
        call may come before ``load`` has returned or raised.
        """

    def problem(self) -> str:
        """Why services cannot be started or stopped now, as far as ``watch`` knows; "" if they can."""

    def close(self) -> None:
        """Ends ``watch`` and frees what this object holds; engines run on."""


@dataclass(frozen=True, slots=True)
class Rested:
    """How a backend really left its GPUs."""

    how: str
    """The way that worked: the one asked for, or a harder one."""
    residual: Mapping[str, int] = field(default_factory=dict)
    """GPU id -> bytes that it still holds there, as far as is known."""
    host_bytes: int = 0
    """Host memory that it keeps while it rests; 0 when stopped or unknown."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """How a backend really came back."""

    url: str
    how: str
    """The way that worked: the one by which it rested, or ``stop`` for a cold start."""


class Way(Protocol):
    """One way to rest; made with the runtime."""

    def load(self, backend: Backend) -> str:
        """Base URL of the backend once it answers for its model; a MuxError if it does not."""

    def evict(self, backend: Backend) -> None:
        """Returns when its GPUs are free; BackendError if they may not be."""

    def estimate(self, backend: Backend) -> float | None:
        """Seconds that the next load will take, None before the first."""


class Stop:
    """The service is stopped, and started from nothing."""

    def __init__(self, runtime: Runtime, now: Callable[[], float] = time.monotonic) -> None:
        self._runtime = runtime
        self._now = now
        self._seconds: dict[str, float] = {}  # one keeper at a time writes a backend's entry

    def load(self, backend: Backend) -> str:
        begun = self._now()
        url = self._runtime.start(backend)
        await_ready(
            backend,
            url,
            ended=lambda: self._runtime.ended(backend),
            deadline=begun + backend.load_timeout,
            now=self._now,
        )
        self._seconds[backend.name] = self._now() - begun
        return url

    def evict(self, backend: Backend) -> None:
        self._runtime.stop(backend)

    def estimate(self, backend: Backend) -> float | None:
        return self._seconds.get(backend.name)


WAYS: dict[str, Callable[[Runtime], Way]] = {
    "stop": Stop,
}


class Swapper:
    """What the multiplexer's keepers call to perform a step, outside the lock.

    load(backend, how) returns once the backend answers for its model; LoadError (with the engine's last
    lines) after it was cleaned up; BackendError if even that failed: it may still hold its GPUs.
    evict(backend, how) returns when the GPUs are free; BackendError if they may not be.
    """

    def __init__(self, runtime: Runtime, ways: Mapping[str, Callable[[Runtime], Way]] = WAYS) -> None:
        self._runtime = runtime
        self._ways = {name: make(runtime) for name, make in ways.items()}

    def load(self, backend: Backend, how: str = "stop") -> Loaded:
        try:
            return Loaded(self._way(how).load(backend), how)
        except Exception as error:
            lines = self._log_tail(backend)
            self._clean_up(backend, error)
            raise LoadError(_reason(error), log=lines) from error

    def evict(self, backend: Backend, how: str = "stop") -> Rested:
        try:
            self._way(how).evict(backend)
            return Rested(how)
        except BackendError:
            raise
        except Exception as error:
            raise BackendError(f"{backend.name} may still hold its GPUs: {_reason(error)}") from error

    def ended(self, backend: Backend) -> str | None:
        """How it ended, for people; None while it runs, and while that cannot be told."""
        try:
            return self._runtime.ended(backend)
        except MuxError:
            return None

    def estimate(self, backend: Backend, how: str = "stop") -> float | None:
        return self._way(how).estimate(backend)

    def _way(self, how: str) -> Way:
        if how not in self._ways:
            raise BackendError(f"unknown way to rest {how!r}; known: {', '.join(self._ways)}")
        return self._ways[how]

    def _clean_up(self, backend: Backend, error: Exception) -> None:
        try:
            self._runtime.stop(backend)
        except Exception as worse:
            raise BackendError(
                f"{_reason(error)}; and then it could not be stopped: {_reason(worse)}"
            ) from worse

    def _log_tail(self, backend: Backend) -> list[str]:
        try:
            return self._runtime.log_tail(backend, LOG_LINES)
        except MuxError:
            return []


def _reason(error: Exception) -> str:
    if isinstance(error, LoadError):
        return error.reason
    return error.message if isinstance(error, MuxError) else f"{type(error).__name__}: {error}"
