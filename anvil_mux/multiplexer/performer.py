"""How steps are performed on a host, and how their ends are reported."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from anvil_mux.config.config import Backend
from anvil_mux.errors import Cancelled, LoadError, MuxError
from anvil_mux.host.hosts import AnyHost
from anvil_mux.host.seam import Evicted
from anvil_mux.scheduler.scheduler import Scheduler
from anvil_mux.scheduler.steps import Demote, Effects, Evict, Load, Step

log = logging.getLogger(__name__)

Apply = Callable[[Callable[[float], Effects]], object]
"""Tells the scheduler a fact, under the lock, and carries out what follows from it."""


class Job(NamedTuple):
    """A step, and what it is performed on."""

    step: Step
    backend: Backend


class Performer:
    """Performs steps, each in the thread of a worker, and reports each exactly once.

    ``loaded(step, address, how, now)`` is the fact that a backend answers, told like the others by ``apply``.
    """

    def __init__(
        self,
        host: AnyHost,
        scheduler: Scheduler,
        apply: Apply,
        loaded: Callable[[Load, tuple[str, int], str, float], Effects],
    ) -> None:
        self._host = host
        self._scheduler = scheduler
        self._apply = apply
        self._loaded = loaded

    def perform(self, job: Job) -> None:
        """Performs a step and reports how it ended; the life of a worker's thread."""
        try:
            self._perform(job)
        except Exception as error:  # in the scheduler, or in what it was told; without an end it is wedged
            log.exception("the end of a step on %s could not be reported", job.step.backend)
            why = _text(error)
            self._apply(lambda now: self._scheduler.report_failed(job.step, now, why))

    def _perform(self, job: Job) -> None:
        step, backend = job
        match step:
            case Load():
                self._load(step, backend)
            case Evict(_, how):
                self._evict(step, partial(self._host.evict, backend, how))
            case Demote(_, how, to):
                self._evict(step, partial(self._host.demote, backend, how, to))

    def _load(self, step: Load, backend: Backend) -> None:
        try:
            loaded = self._host.load(backend, step.how, step.number)
            address = address_of(loaded.url)
        except Cancelled:
            self._apply(lambda now: self._scheduler.load_cancelled(step, now))
        except LoadError as error:
            failed = error
            self._apply(lambda now: self._scheduler.load_failed(step, now, failed))
        except Exception as error:
            why = _text(error)
            self._apply(lambda now: self._scheduler.evict_failed(step, now, why))
        else:
            self._apply(partial(self._loaded, step, address, loaded.how))

    def _evict(self, step: Evict | Demote, perform: Callable[[], Evicted]) -> None:
        try:
            evicted = perform()
        except Exception as error:
            why = _text(error)
            self._apply(lambda now: self._scheduler.evict_failed(step, now, why))
            return
        left = {
            "residual": evicted.residual,
            "how": evicted.how,
            "host_bytes": evicted.host_bytes,
            "freed": evicted.freed,
            "died": evicted.died,
            "log": evicted.log,
        }
        self._apply(lambda now: self._scheduler.evicted(step, now, **left))

    def not_begun(self, job: Job, why: str) -> None:
        """Reports a step that nobody could begin."""
        step = job.step
        if isinstance(step, Load):
            self._apply(lambda now: self._scheduler.load_failed(step, now, LoadError(why)))
        else:
            self._apply(lambda now: self._scheduler.evict_failed(step, now, why))


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)


def _text(error: Exception) -> str:
    return error.message if isinstance(error, MuxError) else f"{type(error).__name__}: {error}"
