"""The logs of engines are read while they load, and at no other time; lines as engines print them in."""

from __future__ import annotations

import threading

import pytest

from anvil_mux.config.config import Backend
from anvil_mux.host import load_logs
from anvil_mux.host.load_logs import LoadLogs, stage_of
from anvil_mux.host.seam import LoadSaid

GUARD = 20.0
A, B = Backend("a", "a"), Backend("b", "b")
SHARDS = "Loading safetensors checkpoint shards:  56% Completed | 5/9 [00:13<00:11,  2.87s/it]"
GRAPHS = (
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  40%|████      | 20/51 [00:02<00:03, 21.2it/s]"
)
BATCHES = "Capturing batches (bs=128 avail_mem=74.76 GB):   5%|▌         | 1/20 [00:00<00:09,  2.1it/s]"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (SHARDS, LoadSaid("a", "reading weights", 0.56, 11.0)),
        (f"(Worker_TP0 pid=576689) \r{SHARDS}", LoadSaid("a", "reading weights", 0.56, 11.0)),
        (SHARDS.replace("56%", "11%") + "\r" + SHARDS, LoadSaid("a", "reading weights", 0.56, 11.0)),
        (SHARDS.replace("00:11", "1:02:03"), LoadSaid("a", "reading weights", 0.56, 3723.0)),
        (SHARDS.replace("00:13<00:11", "00:00<?"), LoadSaid("a", "reading weights", 0.56, None)),
        (SHARDS.replace("safetensors", "pt"), LoadSaid("a", "reading weights", 0.56, 11.0)),
        (GRAPHS, LoadSaid("a", "capturing CUDA graphs", 0.4, 3.0)),
        (BATCHES, LoadSaid("a", "capturing CUDA graphs", 0.05, 9.0)),
        ("m.safetensors:  13%|█▎  | 650M/5G [00:10<01:06, 65MB/s]", LoadSaid("a", "downloading", 0.13, 66.0)),
        ("INFO [backends.py:1128] Dynamo bytecode transform time: 3.54 s", LoadSaid("a", "compiling")),
        ("INFO 05-06 20:59:57 Loading weights took 24.8 seconds", LoadSaid("a", "warming up")),
        ("0.00.024.273 I load_tensors: loading model tensors", LoadSaid("a", "reading weights")),
        ("...............................................", LoadSaid("a", "reading weights", 0.47)),
        ("." * 107, LoadSaid("a", "reading weights", 1.0)),
        ("0.00.039.373 I llama_context: constructing llama_context", LoadSaid("a", "warming up")),
        ('source=server.go:625 msg="model load progress 0.43"', LoadSaid("a", "reading weights", 0.43)),
        ("GET /health 503", None),
        ("100% sure that this is nothing [00:01<00:02]", None),
        (".", None),
    ],
)  # fmt: skip
def test_what_a_line_says(line: str, found: LoadSaid | None) -> None:
    assert stage_of("a", [line]) == found


def test_the_last_line_that_says_something_counts() -> None:
    lines = [SHARDS, "INFO GPU KV cache size: 165,792 tokens", GRAPHS, "INFO nothing of interest"]
    assert stage_of("a", lines) == LoadSaid("a", "capturing CUDA graphs", 0.4, 3.0)
    assert stage_of("a", []) is None


def test_logs_are_read_only_while_something_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_logs, "LOOK_SECONDS", 0.0)
    told = {"a": threading.Event(), "b": threading.Event()}
    read: list[str] = []

    def tail(backend: Backend, lines: int) -> list[str]:
        read.append(backend.name)
        return [SHARDS]

    logs = LoadLogs(tail, lambda what: told[what.backend].set())
    logs.worker.start()
    for backend in (A, B):
        with logs.reading(backend):
            assert told[backend.name].wait(GUARD)
    logs.worker.close()
    assert logs.worker.join(GUARD)
    assert [*dict.fromkeys(read)] == ["a", "b"]


def test_a_log_that_was_read_too_late_says_nothing() -> None:
    def tail(backend: Backend, lines: int) -> list[str]:
        loading.__exit__(None, None, None)
        return [SHARDS]

    logs = LoadLogs(tail, pytest.fail)
    loading = logs.reading(A)
    loading.__enter__()
    assert logs._turn() == load_logs.LOOK_SECONDS
    assert logs._turn() is None
