"""How far a load is: from what loads took before, and from what the engine says in its log.

``said`` reads the last lines of a log. The patterns are those of vLLM and SGLang (progress bars, of which a
line may hold many), llama.cpp (a dot for each percent) and Ollama; what they say is of a stage of the load,
so it makes the whole only longer, never shorter, than what was learned. serve/load_logs.py reads the logs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

NEARLY = 0.99
"""Of a load that takes longer than it ever did."""

READING, COMPILING, CAPTURING, WARMING = "reading weights", "compiling", "capturing CUDA graphs", "warming up"


class LogProgress(NamedTuple):
    """What an engine's log says of the stage that it is in."""

    stage: str
    fraction: float | None = None
    seconds_left: float | None = None


class Progress(NamedTuple):
    """How far a load is, as far as is known."""

    fraction: float | None
    seconds_left: float | None
    stage: str

    @property
    def words(self) -> str:
        """For people: ``42%, 35 s left, reading weights``."""
        done = "" if self.fraction is None else f"{self.fraction:.0%}"
        left = "" if self.seconds_left is None else f"{self.seconds_left:.0f} s left"
        return ", ".join(filter(None, (done, left, self.stage)))


_BARS = (
    (r"checkpoint shards:\s+(\d+)%(?:[^\r\[]*\[[\d:]+<([\d:]+))?", READING),
    (
        r"Captur\w+ (?:CUDA graph|cudagraph|batches)[^\r%]*?:\s+(\d+)%(?:[^\r\[]*\[[\d:]+<([\d:]+))?",
        CAPTURING,
    ),
    (r"Compiling num tokens[^\r%]*:\s+(\d+)%(?:[^\r\[]*\[[\d:]+<([\d:]+))?", COMPILING),
    (
        r"(?:\.safetensors|\.gguf|\.bin|Fetching \d+ files):\s+(\d+)%(?:[^\r\[]*\[[\d:]+<([\d:]+))?",
        "downloading",
    ),
)
_WORDS = (
    (r"model load progress (0\.\d+|1\.0)", READING),
    (r"Starting to load model|loading model tensors|llama_model_loader: loaded meta data", READING),
    (r"torch\.compile|Dynamo bytecode transform|Compiling a graph", COMPILING),
    (r"Loading weights took|Model loading took|KV cache|llama_context: construct|warming up", WARMING),
    (r"Graph capturing finished|Capture cuda graph end", WARMING),
)
_FOUND = [(re.compile(pattern), stage) for pattern, stage in _BARS]
_TOLD = [(re.compile(pattern), stage) for pattern, stage in _WORDS]
_DOTS = re.compile(r"\.{2,}")


def said(lines: Sequence[str]) -> LogProgress | None:
    """What the last line of a log says that says something."""
    for line in reversed(lines):
        found = _of_line(line)
        if found:
            return found
    return None


def _of_line(line: str) -> LogProgress | None:
    if _DOTS.fullmatch(line.strip()):
        return LogProgress(READING, min(len(line.strip()) / 100, 1.0))
    for pattern, stage in _FOUND:
        bars = pattern.findall(line)
        if bars:
            percent, left = bars[-1]
            return LogProgress(stage, int(percent) / 100, _seconds(left))
    for pattern, stage in _TOLD:
        told = pattern.search(line)
        if told:
            return LogProgress(stage, float(told[1]) if pattern.groups else None)
    return None


def _seconds(clock: str) -> float | None:
    """``1:02:03`` in seconds."""
    total = 0.0
    for part in clock.split(":"):
        if not part.isdigit():
            return None
        total = 60 * total + int(part)
    return total


def progress(elapsed: float, expected: float | None, told: LogProgress | None) -> Progress:
    """How far a load is that has taken ``elapsed`` and was ``expected`` to take so long."""
    stage = told.stage if told else ""
    if expected is None:
        return Progress(told.fraction if told else None, told.seconds_left if told else None, stage)
    left = max(expected - elapsed, (told.seconds_left or 0.0) if told else 0.0)
    if left <= 0.0:
        return Progress(NEARLY, None, stage)
    return Progress(min(elapsed / (elapsed + left), NEARLY), left, stage)
