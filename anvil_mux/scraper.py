"""What engines say of themselves: their /metrics, read by one thread for all replicas (routing mode full).

``load_of`` knows the names that vLLM, SGLang and llama.cpp (with --metrics) give to the same three figures:
the requests that run, those that wait, and how full the cache is. An engine that says nothing has no figures;
how old the last ones are is what the filter ``staleness`` goes by.
"""

from __future__ import annotations

import http.client
import math
import re
import threading
from collections.abc import Callable, Iterable

from anvil_mux.ledger import Load

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

Address = tuple[str, int]


def load_of(text: str) -> Load | None:
    """The figures in a /metrics page, over all engines in it; None if it does not count requests."""
    found: dict[str, list[float]] = {}
    for name, value in LINE.findall(text):
        if what := NAMES.get(name):
            number = float(value)
            if math.isfinite(number):
                found.setdefault(what, []).append(number)
    if "running" not in found or "waiting" not in found:
        return None
    usage = found.get("usage")
    share = sum(usage) / len(usage) if usage else None
    return Load(round(sum(found["running"])), round(sum(found["waiting"])), share)


class Scraper:
    """Asks every replica that ``replicas`` names, again and again, and tells what it says, if anything."""

    def __init__(
        self,
        replicas: Callable[[], Iterable[tuple[str, Address]]],
        observed: Callable[[str, Load], object],
        silent: Callable[[str], object],
        every: float = EVERY_SECONDS,
    ) -> None:
        self._replicas = replicas
        self._observed = observed
        self._silent = silent
        self._every = every
        self._closing = threading.Event()

    def run(self) -> None:
        """The thread's life."""
        while not self._closing.is_set():
            for backend, address in self._replicas():
                if load := fetch(address):
                    self._observed(backend, load)
                else:
                    self._silent(backend)
            self._closing.wait(self._every)

    def close(self) -> None:
        self._closing.set()


def fetch(address: Address) -> Load | None:
    """What an engine says now; None if it does not."""
    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT)
    try:
        connection.request("GET", "/metrics")
        with connection.getresponse() as response:
            if response.status != 200:
                return None
            return load_of(response.read(MOST_BYTES).decode("utf-8", "replace"))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
