"""Engines print while they load how far they are. A thread of its own reads that, since Docker may be slow.

The patterns are those of vLLM and SGLang (progress bars, of which a line may hold many), llama.cpp (a dot for
each percent) and Ollama.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from anvil_mux.clock import Worker
from anvil_mux.config.config import Backend
from anvil_mux.host.seam import LoadSaid

LOOK_SECONDS = 1.0
LINES = 40

READING, COMPILING, CAPTURING, WARMING = "reading weights", "compiling", "capturing CUDA graphs", "warming up"


class LoadLogs:
    """Reads the logs of engines while they load, and of no others."""

    def __init__(
        self, tail: Callable[[Backend, int], Sequence[str]], tell: Callable[[LoadSaid], object]
    ) -> None:
        self._tail = tail
        self._tell = tell
        self._loading: dict[str, Backend] = {}
        self.worker = Worker("load-logs", self._turn, first=None)

    @contextmanager
    def reading(self, backend: Backend) -> Iterator[None]:
        """Have the log of the backend read meanwhile. Any thread."""
        self._loading[backend.name] = backend
        self.worker.wake()
        try:
            yield
        finally:
            del self._loading[backend.name]

    def _turn(self) -> float | None:
        backends = list(self._loading.values())
        for backend in backends:
            found = stage_of(backend.name, self._tail(backend, LINES))
            if found and backend.name in self._loading:
                self._tell(found)
        return LOOK_SECONDS if backends else None


_PERCENT = r":\s{1,9}(\d{1,3})%(?:[^\r\[]{0,99}\[[\d:]{1,20}<([\d:]{1,20}))?"
_BARS = (
    (re.compile(rf"checkpoint shards{_PERCENT}"), READING),
    (re.compile(rf"Captur(?:e|ing) (?:CUDA graph|cudagraph|batches)[^\r%]{{0,99}}?{_PERCENT}"), CAPTURING),
    (re.compile(rf"Compiling num tokens[^\r%]{{0,99}}?{_PERCENT}"), COMPILING),
    (re.compile(rf"(?:\.safetensors|\.gguf|\.bin|Fetching \d{{1,9}} files){_PERCENT}"), "downloading"),
)
"""Everything in them has a bound: whatever an engine prints is read in one pass."""
_WORDS = (
    (re.compile(r"model load progress (0\.\d+|1\.0)"), READING),
    (
        re.compile(r"Starting to load model|loading model tensors|llama_model_loader: loaded meta data"),
        READING,
    ),
    (re.compile(r"torch\.compile|Dynamo bytecode transform|Compiling a graph"), COMPILING),
    (
        re.compile(r"Loading weights took|Model loading took|KV cache|llama_context: construct|warming up"),
        WARMING,
    ),
    (re.compile(r"Graph capturing finished|Capture cuda graph end"), WARMING),
)
_DOTS = re.compile(r"\.{2,}")


def stage_of(backend: str, lines: Sequence[str]) -> LoadSaid | None:
    """Read the last line of a backend's log that says something of its load."""
    return next(filter(None, (_of_line(backend, line) for line in reversed(lines))), None)


def _of_line(backend: str, line: str) -> LoadSaid | None:
    if _DOTS.fullmatch(line.strip()):
        return LoadSaid(backend, READING, min(len(line.strip()) / 100, 1.0))
    for pattern, stage in _BARS:
        if bars := pattern.findall(line):
            percent, left = bars[-1]
            return LoadSaid(backend, stage, int(percent) / 100, _seconds(left))
    for pattern, stage in _WORDS:
        if found := pattern.search(line):
            return LoadSaid(backend, stage, float(found[1]) if pattern.groups else None)
    return None


def _seconds(clock: str) -> float | None:
    """Turn ``1:02:03`` into seconds."""
    total = 0.0
    for part in clock.split(":"):
        if not part.isdigit():
            return None
        total = 60 * total + int(part)
    return total
