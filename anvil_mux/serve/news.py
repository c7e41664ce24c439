"""The news of a host, fetched in a thread of its own and handed to whom they concern."""

from __future__ import annotations

from collections.abc import Callable

from anvil_mux.clock import Worker
from anvil_mux.config.config import Backend
from anvil_mux.host.seam import GpusSeen, Host, LoadSaid, PhaseTook, ServiceEnded, Sight
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.scheduler.progress import LogProgress

POLL_SECONDS = 30.0
"""How long the host is asked to wait for news."""


class NewsReader:
    """Reads the news of one host. ``took(backend, phase, seconds)`` learns what phases of steps took."""

    def __init__(self, host: Host, mux: Multiplexer, took: Callable[[Backend, str, float], object]) -> None:
        self._host = host
        self._mux = mux
        self._took = took
        self._sight: Sight = {}
        self._last = 0
        """The number of the last that was handed on."""
        self.worker = Worker("news", self._turn)

    def sight(self) -> Sight:
        """The use of GPUs as last seen, which is looked at more often for a while. Any thread."""
        self._host.watch_gpus()
        return self._sight

    def _turn(self) -> float:
        for news in self._host.news(self._last, POLL_SECONDS):
            self._last = news.number
            self._hand_on(news.what)
        return 0.0

    def _hand_on(self, what: ServiceEnded | GpusSeen | LoadSaid | PhaseTook) -> None:
        match what:
            case ServiceEnded(backend, why, lines, load):
                self._mux.facts.died(backend, why, lines, load=load)
            case GpusSeen(sight):
                self._sight = sight
                held = {gpu: sum(each.used or 0 for each in seen.others) for gpu, seen in sight.items()}
                self._mux.facts.memory_seen({gpu: amount for gpu, amount in held.items() if amount})
            case LoadSaid(backend, stage, fraction, seconds_left):
                self._mux.overview.report(backend, LogProgress(stage, fraction, seconds_left))
            case PhaseTook(name, phase, seconds):
                if found := self._mux.overview.backend(name):
                    self._took(found, phase, seconds)
