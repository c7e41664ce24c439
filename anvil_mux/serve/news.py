"""The news of a host, read and handed to whom they concern."""

from __future__ import annotations

from collections.abc import Callable

from anvil_mux.config.config import Backend, gpu_name
from anvil_mux.host.seam import (
    PHASES,
    AnyNews,
    GpusSeen,
    Host,
    LoadSaid,
    PhaseTook,
    PromptsKept,
    ServiceEnded,
    Sight,
    WeightsRead,
)
from anvil_mux.multiplexer.multiplexer import Multiplexer
from anvil_mux.scheduler.progress import LogProgress
from anvil_mux.scheduler.status import KeptPrompts

POLL_SECONDS = 30.0
"""How long the host is asked to wait for news."""


class NewsReader:
    """Reads the news of one host; one thread.

    ``took(backend, phase, seconds)`` learns what steps took, ``read_ahead(backend, size, seconds)`` what was
    read before loads.
    """

    def __init__(
        self,
        name: str,
        host: Host,
        mux: Multiplexer,
        took: Callable[[Backend, str, float], object],
        read_ahead: Callable[[Backend, int, float], object] = lambda backend, size, seconds: None,
    ) -> None:
        self._name = name
        self._host = host
        self._mux = mux
        self._took = took
        self._read_ahead = read_ahead
        self._sight: Sight = {}
        self._last = 0
        """The number of the last that was handed on."""

    def sight(self) -> Sight:
        """The use of its GPUs, by their names, as last seen; it is looked at more often now. Any thread."""
        self._host.watch_gpus()
        return self._sight

    def begin_anew(self) -> None:
        """Begin with the first news there is: what is told by now begins to count anew."""
        self._last, self._sight = 0, {}

    def read(self, timeout: float = POLL_SECONDS) -> float:
        """Hand on the news that come within ``timeout`` seconds; the seconds until the next call is due."""
        for news in self._host.news(self._last, timeout):
            self._last = news.number
            if isinstance(news.what, GpusSeen) or self._is_its_own(news.what.backend):
                self._hand_on(news.what)
        return 0.0

    def _is_its_own(self, backend: str) -> bool:
        found = self._mux.overview.backend(backend)
        return found is not None and found.host == self._name

    def _hand_on(self, what: AnyNews) -> None:
        match what:
            case ServiceEnded(backend, why, lines, load):
                self._mux.facts.died(backend, why, lines, load=load)
            case GpusSeen(sight):
                self._sight = {gpu_name(self._name, id): seen for id, seen in sight.items()}
                held = {id: sum(each.used or 0 for each in seen.others) for id, seen in sight.items()}
                self._mux.facts.memory_seen({id: n for id, n in held.items() if n > 0}, self._name)
            case LoadSaid(backend, stage, fraction, seconds_left):
                self._mux.overview.report(backend, LogProgress(stage, fraction, seconds_left))
            case PromptsKept(backend, prompts, tokens, size):
                self._mux.overview.note_prompts(backend, KeptPrompts(prompts, tokens, size))
            case PhaseTook(name, phase, seconds) if phase in PHASES:
                if found := self._mux.overview.backend(name):
                    self._took(found, phase, seconds)
            case WeightsRead(name, size, seconds):
                if found := self._mux.overview.backend(name):
                    self._read_ahead(found, size, seconds)
