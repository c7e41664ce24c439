"""The engines' own figures: their /metrics, read by one thread for all replicas (routing mode full).

``load_of`` knows the names that vLLM, SGLang and llama.cpp give to the same three figures (SGLang if it was
started with --enable-metrics, llama.cpp with --metrics): the requests that run, those that wait, and how full
the cache is. A llama.cpp without --metrics is asked for its /slots. An engine that answers and has no such
figures is alive, and our own counts hold for it. How long ago one last answered is what the filter
``staleness`` goes by.
"""

from __future__ import annotations

import http.client
import math
import re
from collections.abc import Callable, Iterable

from anvil_mux.clock import Worker
from anvil_mux.config.config import Backend
from anvil_mux.protocol import foreign
from anvil_mux.proxy.connections import Address
from anvil_mux.routing.in_flight import EngineLoad

EVERY_SECONDS = 1.0
TIMEOUT = 2.0
MOST_BYTES = 4 << 20

NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "usage",
    "vllm:gpu_cache_usage_perc": "usage",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "usage",
    "llamacpp:requests_processing": "running",
    "llamacpp:requests_deferred": "waiting",
    "llamacpp:kv_cache_usage_ratio": "usage",
}
LINE = re.compile(r"^([A-Za-z_:]+)(?:\{.*\})? ([0-9.eE+-]+)", re.M)


def load_of(text: str) -> EngineLoad | None:
    """The figures in a /metrics page, over all engines in it; None if it does not count requests."""
    found: dict[str, list[float]] = {}
    for name, value in LINE.findall(text):
        if what := NAMES.get(name):
            number = _number(value)
            if math.isfinite(number):
                found.setdefault(what, []).append(number)
    if "running" not in found or "waiting" not in found:
        return None
    usage = found.get("usage")
    share = sum(usage) / len(usage) if usage else None
    return EngineLoad(round(sum(found["running"])), round(sum(found["waiting"])), share)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def load_of_slots(text: str) -> EngineLoad | None:
    """The figures in the /slots of a llama.cpp, which do not say who waits; None if it is none."""
    try:
        return EngineLoad(sum([slot["is_processing"] is True for slot in foreign.read(text)]))
    except (ValueError, TypeError, KeyError):
        return None


FiguresPage = tuple[str, Callable[[str], EngineLoad | None]]
"""A page of an engine's figures, and how it is read."""
METRICS: FiguresPage = ("/metrics", load_of)
PAGES: dict[str, tuple[FiguresPage, ...]] = {"llamacpp": (METRICS, ("/slots", load_of_slots))}
"""Engine -> what it is asked for until it says something; others have METRICS alone."""


class Scraper:
    """Asks every replica that ``replicas`` names, again and again, and tells what it says, if it answers."""

    def __init__(
        self,
        replicas: Callable[[], Iterable[tuple[Backend, Address]]],
        observed: Callable[[str, EngineLoad | None], object],
        silent: Callable[[str], object],
        every: float = EVERY_SECONDS,
    ) -> None:
        self._replicas = replicas
        self._observed = observed
        self._silent = silent
        self._every = every
        self.worker = Worker("scraper", self.scrape)

    def scrape(self) -> float:
        """Asks each once; the seconds until they are to be asked again."""
        for backend, address in self._replicas():
            try:
                self._observed(backend.name, ask(backend, address))
            except NoAnswer:
                self._silent(backend.name)
        return self._every


class NoAnswer(Exception):
    """An engine does not answer."""


def ask(backend: Backend, address: Address) -> EngineLoad | None:
    """Ask an engine for its figures; None if it answers and has none."""
    for path, read in PAGES.get(backend.engine, (METRICS,)):
        if load := read(_get(address, path, backend.service.api_key)):
            return load
    return None


def _get(address: Address, path: str, key: str | None) -> str:
    """A page of an engine, empty if it has none."""
    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        with connection.getresponse() as response:
            if response.status != 200:
                return ""
            return response.read(MOST_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException, ValueError):
        raise NoAnswer from None
    finally:
        connection.close()
