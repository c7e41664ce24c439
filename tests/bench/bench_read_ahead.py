"""How long a load takes whose weights were read ahead, beside one whose were not, with real llama-servers.

    bin/bench read-ahead --gib 2 --rounds 6

A small model streams, and a large one is asked for, whose file was just taken out of the page cache: the
stream drains for 5 s and is severed, then the large one is loaded. Each round has one swap without
``read_ahead``, one with it, and one whose file was in the page cache from the beginning, in an order that
changes. It needs a Docker Engine, like the tests in tests/docker.
"""

import argparse
import ctypes
import http.client
import json
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.docker.conftest import MODELS, Engine, Stack, _engine_host, _service, _write, tiny_model_of
from tests.docker.served import served
from tests.real import tiny_model
from tests.running import Running

DRAIN_SECONDS = 5.0
SIZE = tiny_model.Size(width=2048, blocks=1, heads=16, kv_heads=16, feed_forward=16384, context=4096)
WAYS = ("without", "read ahead", "cached before")


class Swap(NamedTuple):
    """One swap from the small model to the large one."""

    load: float
    """Seconds from the beginning of the load until the model was ready."""
    whole: float
    """Seconds from the request until its answer."""
    tokens: float
    """The tokens that the small model streamed, per second of the drain."""
    kept: float
    """These, beside those of as long a time before the request."""
    there: float
    """The share of the file that was in the page cache when the drain was over."""


def large_model(gib: float) -> Path:
    """A model of random weights in half precision that is so large, made at its first use."""
    path = MODELS / f"large-{gib:g}.gguf"
    if path.exists():
        return path
    MODELS.mkdir(parents=True, exist_ok=True)
    blocks = max(round(gib * (1 << 30) / SIZE.block_bytes), 1)
    tiny_model.write(1, path, replace(SIZE, blocks=blocks))
    return path


def share_there(path: Path) -> float:
    """The share of a file's pages that are in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        address = ctypes.c_char.from_buffer(mapped)
        pages = (len(mapped) + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        found = (ctypes.c_ubyte * pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        failed = libc.mincore(ctypes.addressof(address), len(mapped), found)
        del address
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(each & 1 for each in found) / pages


def drop(path: Path) -> None:
    """Take a file out of the page cache, as far as nobody maps it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill(path: Path) -> None:
    """Read a file into the page cache."""
    with path.open("rb") as file:
        while file.read(1 << 20):
            pass


class Stream:
    """A stream without an end; ``moments``: when its tokens came."""

    def __init__(self, mux: Running, model: str) -> None:
        self.moments: list[float] = []
        self.has_begun = threading.Event()
        self._connection = http.client.HTTPConnection("127.0.0.1", mux.port, timeout=60)
        body = {"model": model, "prompt": "hello", "stream": True, "max_tokens": -1, "ignore_eos": True}
        self._connection.request("POST", "/v1/completions", json.dumps(body))
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for line in self._connection.getresponse():
                if line.startswith(b"data: {"):
                    self.moments.append(time.monotonic())
                    if len(self.moments) == 10:
                        self.has_begun.set()
        except (OSError, http.client.HTTPException):
            pass  # it is severed

    def rate(self, since: float, until: float) -> float:
        return sum(since <= each < until for each in self.moments) / (until - since)


@contextmanager
def stack_of(gib: float) -> Iterator[tuple[Stack, Path]]:
    host = _engine_host()
    if not host:
        sys.exit("no Docker Engine is in reach")
    path = large_model(gib)
    small, large = _service("small", tiny_model_of(1), 1), _service("large", path, 1)
    small["environment"] = {"LLAMA_ARG_CONTEXT_SHIFT": "1"}
    large["command"] = [*large["command"], "--no-warmup"]
    with tempfile.TemporaryDirectory(dir=MODELS.parent) as folder:
        top = {"x-anvil": {"drain_timeout": DRAIN_SECONDS, "policy": "eager", "read_ahead": False}}
        stack = _write(Path(folder), {"small": small, "large": large}, top, Engine(host))
        try:
            yield stack, path
        finally:
            stack.engine.remove(stack.project)


def set_read_ahead(mux: Running, stack: Stack, wanted: bool) -> None:
    said = yaml.safe_load(stack.file.read_text())
    said["x-anvil"]["read_ahead"] = wanted
    stack.file.write_text(yaml.safe_dump(said, sort_keys=False))
    status, _, text = mux.request("POST", "/reload")
    if status != 200:
        sys.exit(text)


def complete(mux: Running, model: str) -> None:
    said = {"model": model, "prompt": "hello", "max_tokens": 1}
    status, _, text = mux.request("POST", "/v1/completions", said)
    if status != 200:
        sys.exit(text)


def swap(mux: Running, log: Path, path: Path) -> Swap:
    """One swap to the large model, as the event log tells it."""
    stream = Stream(mux, "small")
    if not stream.has_begun.wait(60):
        sys.exit("the small model does not answer")
    time.sleep(DRAIN_SECONDS)
    there: list[float] = []
    asked, before = time.monotonic(), len(log.read_text().splitlines())

    def look() -> None:
        """See what is in the page cache when the drain is over: the eviction follows, and then the load."""
        stream.thread.join(60)
        there.append(share_there(path))

    looker = threading.Thread(target=look)
    looker.start()
    complete(mux, "large")
    whole = time.monotonic() - asked
    looker.join()
    tokens, usual = stream.rate(asked, asked + DRAIN_SECONDS), stream.rate(asked - DRAIN_SECONDS, asked)
    return Swap(load_seconds(log, before), whole, tokens, tokens / usual, there[0])


def load_seconds(log: Path, before: int) -> float:
    while True:
        events: list[dict[str, Any]] = [json.loads(each) for each in log.read_text().splitlines()[before:]]
        found = [each for each in events if each.get("kind") == "ready" and each.get("model") == "large"]
        if found:
            return float(found[0]["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    found: dict[str, list[Swap]] = {way: [] for way in WAYS}
    with stack_of(given.gib) as (stack, path):
        log = stack.file.with_suffix(".events")
        with served(stack, "--event-log", str(log)) as mux:
            for turn in range(given.rounds):
                for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
                    set_read_ahead(mux, stack, way == "read ahead")
                    complete(mux, "small")
                    drop(path)
                    if way == "cached before":
                        fill(path)
                    found[way].append(swap(mux, log, path))
                    print(f"{way:14}", *(f"{each:8.2f}" for each in found[way][-1]), flush=True)
    for way, swaps in found.items():
        medians = [statistics.median(each) for each in zip(*swaps, strict=True)]
        print(
            f"median {way:14}",
            *(f"{name} {each:.2f}" for name, each in zip(Swap._fields, medians, strict=True)),
        )


if __name__ == "__main__":
    main()
