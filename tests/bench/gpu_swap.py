"""How fast a GPU changes hands: cold start, offload, checkpoint. Needs a CUDA GPU and PyTorch, nothing else.

An engine of our own holds weights of N GiB in plain allocations and answers HTTP; an answer reads every byte
of them and comes with their checksum, so that a byte that was lost on the way is seen. For each size and each
repetition new engines

  cold                start: interpreter, PyTorch, CUDA, weights from ordinary host memory (no disk is read)
  checkpoint          are moved by the driver and frozen, thawed and restored, as anvil-mux does it
  offload             copy the weights to pinned host memory, free them and take them back, as engines do in
                      a light sleep; the first time, which has to get that memory, is first_offload
  offload+checkpoint  do both: what an offload leaves on the GPU is moved too

Seconds are medians over the repetitions. "out" is until the GPU's memory is given up, "back" until the first
answer after that. "used" and "left" are the bytes of the whole GPU that are used before and after the way
out, null where NVML or nvidia-ml-py is missing.

JSON goes to standard output, what is being done to standard error. Without a GPU it says so and ends with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from anvil_mux.errors import BackendError, MuxError
from anvil_mux.host.cuda_checkpoint import Checkpointer
from anvil_mux.host.cuda_driver import LIBRARY, Driver
from anvil_mux.host.gpus import nvidia_gpus

GIB = 1 << 30
CHUNK = GIB // 4
SIZES = (1.0, 4.0, 16.0, 40.0)
START_SECONDS = 600.0
CALL_SECONDS = 300.0
ROOM = 0.9
"""The share of the free memory, of the GPU and of the host, that weights may take."""

Result = dict[str, Any]


class BenchError(Exception):
    """The benchmark cannot be run here; the message says what to do."""


# The engine


class Weights:
    """What the engine holds; one request at a time."""

    def __init__(self, torch: Any, device: Any, size: int) -> None:
        self._torch, self._device = torch, device
        self._pinned: list[Any] = []
        source = torch.arange(CHUNK // 8, dtype=torch.int64)
        self._chunks = []
        for number, begin in enumerate(range(0, size, CHUNK)):
            count = min(CHUNK, size - begin) // 8
            chunk = torch.empty(count, dtype=torch.int64, device=device)
            chunk.copy_(source[:count])
            chunk.add_(number)  # no chunk is like another
            self._chunks.append(chunk)
        torch.cuda.synchronize(device)

    def answer(self) -> dict[str, object]:
        # Modulo 2^64, as the GPU adds.
        return {"checksum": sum(int(chunk.sum().item()) for chunk in self._chunks) % (1 << 64)}

    def offload(self) -> dict[str, object]:
        torch = self._torch
        if not self._pinned:
            self._pinned = [
                torch.empty(len(chunk), dtype=torch.int64, pin_memory=True) for chunk in self._chunks
            ]
        for pinned, chunk in zip(self._pinned, self._chunks, strict=True):
            pinned.copy_(chunk, non_blocking=True)
        torch.cuda.synchronize(self._device)
        self._chunks.clear()
        torch.cuda.empty_cache()
        return {}

    def load(self) -> dict[str, object]:
        torch = self._torch
        for pinned in self._pinned:
            chunk = torch.empty(len(pinned), dtype=torch.int64, device=self._device)
            chunk.copy_(pinned, non_blocking=True)
            self._chunks.append(chunk)
        torch.cuda.synchronize(self._device)
        return {}


def run_engine(gpu: int, size: int) -> None:
    """Prints one line: what it runs on and its port, or why it cannot run."""
    try:
        import torch
    except ImportError as error:
        print(json.dumps({"why_not": f"PyTorch is not installed for {sys.executable} ({error})"}))
        return
    if not torch.cuda.is_available() or torch.cuda.device_count() <= gpu:
        print(json.dumps({"why_not": f"PyTorch {torch.__version__} sees no CUDA GPU {gpu}"}))
        return
    device = torch.device("cuda", gpu)
    free, total = torch.cuda.mem_get_info(device)
    # By older PyTorch it is not told; NVML's order is CUDA's then, see main().
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    about = {
        "uuid": str(gpu) if uuid is None else f"GPU-{uuid}",
        "gpu": torch.cuda.get_device_name(device),
        "total_bytes": total,
        "free_bytes": free,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if size == 0:
        print(json.dumps(about))
        return
    weights = Weights(torch, device, size)
    calls = {"/answer": weights.answer, "/offload": weights.offload, "/load": weights.load}
    server = ThreadingHTTPServer(("127.0.0.1", 0), make_handler(calls))
    print(json.dumps({**about, "port": server.server_port}), flush=True)
    server.serve_forever()


def make_handler(calls: dict[str, Callable[[], dict[str, object]]]) -> type[BaseHTTPRequestHandler]:
    one_at_a_time = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                with one_at_a_time:
                    code, said = 200, calls[self.path]()
            except Exception as error:
                code, said = 500, {"error": f"{type(error).__name__}: {error}"}
            body = json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


# The engine, from outside


def engine_command(gpu: int, size: int) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--gpu", str(gpu), "--engine", str(size)]


class Engine:
    """An engine that runs; ended with the ``with`` block."""

    def __init__(self, gpu: int, size: int) -> None:
        self._process = subprocess.Popen(engine_command(gpu, size), stdout=subprocess.PIPE)
        self.pid = self._process.pid
        self.about: dict[str, Any] = {}

    def __enter__(self) -> Engine:
        try:
            self.about = self._greeting()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def ask(self, path: str) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.about['port']}{path}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, method="POST"), timeout=CALL_SECONDS
            ) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            raise BenchError(f"{path}: {json.load(error)['error']}") from None
        except OSError as error:
            raise BenchError(f"{path}: {error}") from None

    def _greeting(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], START_SECONDS)[0]:
            raise BenchError(f"the engine did not start within {START_SECONDS:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise BenchError("the engine broke off at its start (its own words stand above)")
        return dict(json.loads(line))


# Measuring


OUT = ("offload", "find", "park", "freeze")
"""Phases of the way out; the others are of the way back."""


@dataclass
class Measured:
    """One way in one repetition."""

    way: str
    phases: dict[str, float] = field(default_factory=dict)
    used: int | None = None
    left: int | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - begun

    def seconds(self, out: bool) -> float:
        return sum(seconds for name, seconds in self.phases.items() if (name in OUT) is out)


class Bench:
    """One size."""

    def __init__(self, gpu: int, size: int, checkpointer: Checkpointer, why_not: str | None) -> None:
        self._gpu, self._size = gpu, size
        self._checkpointer = checkpointer
        self.why_not = why_not
        """Why nothing is checkpointed, if so."""
        self._checksum: int | None = None

    def repetition(self) -> Iterator[Measured]:
        """With two engines: the host memory of an offload would be in a lone checkpoint's way."""
        with self._started() as (cold, engine):
            yield cold
            yield from self._checkpoint(engine, "checkpoint")
        with self._started() as (cold, engine):
            yield cold
            yield self._offload(engine, "first_offload")
            yield self._offload(engine, "offload")
            yield from self._checkpoint(engine, "offload+checkpoint")

    @contextmanager
    def _started(self) -> Iterator[tuple[Measured, Engine]]:
        cold, engine = Measured("cold"), Engine(self._gpu, self._size)
        with ExitStack() as stack:
            with cold.phase("start"):
                stack.enter_context(engine)
            self._answer(engine, cold)
            yield cold, engine

    def _answer(self, engine: Engine, measured: Measured) -> None:
        with measured.phase("answer"):
            checksum = engine.ask("/answer")["checksum"]
        if self._checksum not in (None, checksum):
            raise BenchError(f"after {measured.way} the weights are not what they were")
        self._checksum = checksum

    def _offload(self, engine: Engine, way: str) -> Measured:
        measured = Measured(way, used=used_bytes(engine))
        with measured.phase("offload"):
            engine.ask("/offload")
        measured.left = used_bytes(engine)
        with measured.phase("load"):
            engine.ask("/load")
        self._answer(engine, measured)
        return measured

    def _checkpoint(self, engine: Engine, way: str) -> Iterator[Measured]:
        """Nothing once a checkpoint has failed; ``why_not`` has the reason then."""
        if self.why_not is not None:
            return
        measured = Measured(way, used=used_bytes(engine))
        if way != "checkpoint":
            with measured.phase("offload"):
                engine.ask("/offload")
        try:
            self._park_and_restore(engine, measured)
        except MuxError as error:
            self.why_not = error.message
            return
        if way != "checkpoint":
            with measured.phase("load"):
                engine.ask("/load")
        self._answer(engine, measured)
        yield measured

    def _park_and_restore(self, engine: Engine, measured: Measured) -> None:
        with measured.phase("find"):
            pids = self._checkpointer.find([engine.pid])
        if not pids:
            raise BackendError("the driver does not know the engine for a process that uses CUDA")
        with measured.phase("park"):
            standby = self._checkpointer.checkpoint(pids)
        measured.left = used_bytes(engine)
        with measured.phase("freeze"):
            os.kill(engine.pid, signal.SIGSTOP)
            os.waitpid(engine.pid, os.WUNTRACED)
        with measured.phase("thaw"):
            os.kill(engine.pid, signal.SIGCONT)
            os.waitpid(engine.pid, os.WCONTINUED)
        with measured.phase("restore"):
            self._checkpointer.restore(standby)


def used_bytes(engine: Engine) -> int | None:
    """Of the whole GPU, since process ids may be those of another namespace."""
    reading = nvidia_gpus().find(engine.about["uuid"])
    return reading.used if reading else None


def summary(size: int, way: str, runs: Sequence[Measured], cold: float) -> Result:
    """Medians of one way."""

    def rate(seconds: float) -> float | None:
        return round(size / GIB / seconds, 3) if seconds else None

    out = statistics.median(run.seconds(out=True) for run in runs)
    back = statistics.median(run.seconds(out=False) for run in runs)
    phases = {name: statistics.median(run.phases[name] for run in runs) for name in runs[0].phases}
    return {
        "gib": size / GIB,
        "way": way,
        "repetitions": len(runs),
        "phases": {name: round(seconds, 4) for name, seconds in phases.items()},
        "out_seconds": round(out, 4),
        "back_seconds": round(back, 4),
        "total_seconds": round(out + back, 4),
        "out_gib_per_second": rate(out),
        "back_gib_per_second": rate(back),
        "cold_over_back": round(cold / back, 2),
        "used_bytes": runs[-1].used,
        "left_bytes": runs[-1].left,
    }


def measure(options: argparse.Namespace, about: Result, size: int) -> list[Result]:
    """The results of one size; a failure is one of them."""
    need, host = size / ROOM, available_bytes()
    if need > about["free_bytes"]:
        return [{"gib": size / GIB, "skipped": f"the GPU has {about['free_bytes'] / GIB:.1f} GiB free"}]
    if need > host:
        return [{"gib": size / GIB, "skipped": f"the host has {host / GIB:.1f} GiB available"}]
    checkpointer = Checkpointer(lambda: Driver(library=options.library))
    # Without NVML little is known beforehand, and it is tried.
    known = nvidia_gpus().why_none is None
    bench = Bench(options.gpu, size, checkpointer, checkpointer.why_not([about["uuid"]]) if known else None)
    ways: dict[str, list[Measured]] = {}
    failed: list[Result] = []
    try:
        for number in range(options.repeat):
            say(f"{size / GIB:g} GiB, {number + 1} of {options.repeat}")
            for run in bench.repetition():
                ways.setdefault(run.way, []).append(run)
    except BenchError as error:
        failed.append({"gib": size / GIB, "failed": str(error)})
    if bench.why_not is not None:
        failed.append({"gib": size / GIB, "way": "checkpoint", "skipped": bench.why_not})
    cold = statistics.median(run.seconds(out=False) for run in ways["cold"]) if "cold" in ways else 0.0
    return [summary(size, way, runs, cold) for way, runs in ways.items()] + failed


def describe(gpu: int) -> Result:
    """What the GPU is; asked in a process of its own, so that this one never uses it."""
    done = subprocess.run(engine_command(gpu, 0), stdout=subprocess.PIPE)
    if done.returncode:
        raise BenchError("PyTorch could not be asked for the GPU (its own words stand above)")
    about = dict(json.loads(done.stdout))
    if "why_not" in about:
        unseen = nvidia_gpus().why_none
        raise BenchError(about["why_not"] + (f"; nor is any GPU seen ({unseen})" if unseen else ""))
    if nvidia_gpus().find(about["uuid"]) is None:
        about["uuid"] = str(gpu)
    return about


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def say(text: str) -> None:
    print(f"bench-gpu: {text}", file=sys.stderr, flush=True)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench-gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = ", ".join(f"{size:g}" for size in SIZES)
    parser.add_argument(
        "--gib", type=positive, nargs="+", default=SIZES, metavar="N", help=f"weights (default: {sizes})"
    )
    parser.add_argument("--repeat", type=count, default=5, metavar="N", help="repetitions (default: 5)")
    parser.add_argument("--gpu", type=int, default=0, metavar="INDEX", help="which (default: 0)")
    parser.add_argument("--library", default=LIBRARY, help="the CUDA driver's library (default: %(default)s)")
    parser.add_argument("--engine", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError("has to be more than 0")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("has to be at least 1")
    return value


def run(options: argparse.Namespace) -> Result:
    about = describe(options.gpu)
    say(f"{about['gpu']}, {about['total_bytes'] / GIB:.0f} GiB, PyTorch {about['torch']}")
    results = []
    for gib in options.gib:
        results += measure(options, about, max(8, int(gib * GIB) // 8 * 8))
    machine = {**about, "driver": nvidia_gpus().driver or None, "python": platform.python_version()}
    return {"ran": True, "machine": machine, "results": results}


def main() -> None:
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # NVML's order
    options = parse_arguments()
    if options.engine is not None:
        run_engine(options.gpu, options.engine)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    try:
        report = run(options)
    except BenchError as error:
        say(str(error))
        report = {"ran": False, "why_not": str(error)}
    except KeyboardInterrupt:
        sys.exit(130)
    print(json.dumps(report, indent=1))
    sys.exit(not report["ran"])


if __name__ == "__main__":
    main()
