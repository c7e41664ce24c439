"""The logs of engines that load: how far they are, and why they ended.

How far they are a thread of its own reads, since Docker may be slow. The patterns are those of vLLM and
SGLang (progress bars, of which a line may hold many), llama.cpp (a dot for each percent) and Ollama.

Why an engine ended stands in one line among many: llama.cpp prints its cause first and then each function
that passed it on, a Python engine its traceback twice, once for its worker. ``cause`` finds that line, and
knows what helps against the commonest causes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from anvil_mux.clock import Worker
from anvil_mux.config.config import Backend
from anvil_mux.host.seam import LoadSaid

CAUSE_LINES = 200
"""The last lines of a log among which the cause of an end is looked for."""
SHORT_OF_MEMORY = re.compile(
    r"out ?of ?(device ?)?memory|(cuda|hip)malloc failed|(failed|unable) to allocate|free memory on device|"
    r"no available memory|(not enough|insufficient) memory",
    re.IGNORECASE,
)
"""How engines say that a GPU's memory does not suffice, in the reason of a failed load or its last lines."""
PORT_TAKEN = re.compile(r"address already in use|EADDRINUSE|couldn't bind", re.IGNORECASE)
"""How engines say that they cannot have their port."""
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


# Why it ended

_CAUSES = (
    (
        SHORT_OF_MEMORY,
        "it needs more GPU memory than is free: a shorter context or a smaller quantization helps, for vLLM "
        "also another --gpu-memory-utilization",
    ),
    (
        PORT_TAKEN,
        "another program has this port: let anvil-mux choose one ($PORT), or end that program",
    ),
    (
        re.compile(
            r"(?<!object file: )No such file or directory|FileNotFoundError|is not a valid model identifier|"
            r"does not appear to have a file named"
        ),
        "check the path in its command; in a container it is a path inside, below what `volumes` mounts",
    ),
    (
        re.compile(
            r"unknown model architecture|[Mm]odel architectures? .{1,200} not supported|"
            r"does not recognize this architecture"
        ),
        "this version of the engine does not know this kind of model: a newer one may",
    ),
    (
        re.compile(
            r"libcuda\.so|No CUDA GPUs are available|no CUDA-capable device|Failed to infer device type|"
            r"CUDA driver version is insufficient|invalid device: CUDA"
        ),
        "it sees no GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES, and of a container the GPUs that it "
        "reserves",
    ),
)
_FIRST_ERROR = re.compile(r"^[\d.]{10,20} E ")
"""The level of a line of llama.cpp, whose first error is the cause of the others."""
_ERROR = re.compile(r"(?:^|[ .])(?:[A-Z]\w{0,60}(?:Error|Exception)|[Ee]rror|fatal|panic): ")
_RETOLD = re.compile(r"Engine core initialization failed|failed to load model")
"""Lines that pass on what another one has said before."""
_ONLY_INSIDE = re.compile(
    r"(?:listening|running) on (?:https?://)?(?:127\.0\.0\.1|localhost|\[::1\])", re.IGNORECASE
)
_BEFORE_THE_TEXT = re.compile(
    r"^(?:\([^)]{1,80}\) )?(?:[\d.]{10,20} [A-Z] (?:[a-z]{3} {1,20})?|\[[\d :.,TZ-]{10,40}[^\]]{0,40}\] |"
    r"[A-Z]{4,8} [\d-]{5,10} [\d:.,]{8,15} (?:\[[^\]]{1,80}\] )?)?\s*"
)
"""Process, time, level and place, as vLLM, llama.cpp and SGLang print them."""
_MOST_TEXT = 300


def cause(lines: Sequence[str], *, ended: bool, contained: bool) -> str:
    """The line of a log that says why a load failed, and what helps, without a full stop; "" if none does.

    ``ended``: whether the engine has ended; ``contained``: whether it runs in a container.
    """
    if not ended:
        if contained and (line := next(filter(_ONLY_INSIDE.search, reversed(lines)), "")):
            return f"{_text(line)}; nobody outside reaches it there: add --host 0.0.0.0 to its command"
        return ""
    for pattern, advice in _CAUSES:
        if line := next(filter(pattern.search, lines), ""):
            return f"{_text(line)}; {advice}"
    if line := next(filter(_FIRST_ERROR.search, lines), ""):
        return _text(line)
    errors = [line for line in lines if _ERROR.search(line) and not _RETOLD.search(line)]
    return _text(errors[-1]) if errors else ""


def _text(line: str) -> str:
    text = _BEFORE_THE_TEXT.sub("", line.strip())
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}..."
