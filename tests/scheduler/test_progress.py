"""How far a load is: lines as engines print them in, words out."""

from __future__ import annotations

import pytest

from anvil_mux.scheduler.progress import LogProgress, Progress, progress, said

SHARDS = "Loading safetensors checkpoint shards:  56% Completed | 5/9 [00:13<00:11,  2.87s/it]"
GRAPHS = (
    "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  40%|████      | 20/51 [00:02<00:03, 21.2it/s]"
)
BATCHES = "Capturing batches (bs=128 avail_mem=74.76 GB):   5%|▌         | 1/20 [00:00<00:09,  2.1it/s]"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (SHARDS, LogProgress("reading weights", 0.56, 11.0)),
        (f"(Worker_TP0 pid=576689) \r{SHARDS}", LogProgress("reading weights", 0.56, 11.0)),
        (SHARDS.replace("56%", "11%") + "\r" + SHARDS, LogProgress("reading weights", 0.56, 11.0)),
        (SHARDS.replace("00:11", "1:02:03"), LogProgress("reading weights", 0.56, 3723.0)),
        (SHARDS.replace("00:13<00:11", "00:00<?"), LogProgress("reading weights", 0.56, None)),
        (SHARDS.replace("safetensors", "pt"), LogProgress("reading weights", 0.56, 11.0)),
        (GRAPHS, LogProgress("capturing CUDA graphs", 0.4, 3.0)),
        (BATCHES, LogProgress("capturing CUDA graphs", 0.05, 9.0)),
        ("m.safetensors:  13%|█▎  | 650M/5G [00:10<01:06, 65MB/s]", LogProgress("downloading", 0.13, 66.0)),
        ("INFO [backends.py:1128] Dynamo bytecode transform time: 3.54 s", LogProgress("compiling")),
        ("INFO 05-06 20:59:57 Loading weights took 24.8 seconds", LogProgress("warming up")),
        ("0.00.024.273 I load_tensors: loading model tensors, (mmap = true)", LogProgress("reading weights")),
        ("...............................................", LogProgress("reading weights", 0.47)),
        ("." * 107, LogProgress("reading weights", 1.0)),
        ("0.00.039.373 I llama_context: constructing llama_context", LogProgress("warming up")),
        ('source=server.go:625 msg="model load progress 0.43"', LogProgress("reading weights", 0.43)),
        ("GET /health 503", None),
        ("100% sure that this is nothing [00:01<00:02]", None),
        (".", None),
    ],
)  # fmt: skip
def test_what_a_line_says(line: str, found: LogProgress | None) -> None:
    assert said([line]) == found


def test_the_last_line_that_says_something_counts() -> None:
    lines = [SHARDS, "INFO GPU KV cache size: 165,792 tokens", GRAPHS, "INFO nothing of interest"]
    assert said(lines) == LogProgress("capturing CUDA graphs", 0.4, 3.0)
    assert said([]) is None


def test_a_load_takes_as_long_as_loads_took() -> None:
    far = progress(8.0, 20.0, None)
    assert far == Progress(0.4, 12.0, "")
    assert far.words == "40%, 12 s left"


def test_what_the_log_says_makes_it_longer_but_not_shorter() -> None:
    assert progress(8.0, 20.0, LogProgress("reading weights", 0.1, 72.0)) == Progress(
        0.1, 72.0, "reading weights"
    )
    assert progress(8.0, 20.0, LogProgress("reading weights", 0.9, 1.0)).seconds_left == 12.0


def test_of_a_first_load_only_the_log_is_known() -> None:
    far = progress(8.0, None, LogProgress("reading weights", 0.56, 11.0))
    assert far.words == "56%, 11 s left, reading weights"
    assert progress(8.0, None, None).words == ""


def test_a_load_that_takes_longer_than_ever_is_nearly_done_for_all_anybody_knows() -> None:
    assert progress(30.0, 20.0, LogProgress("warming up")).words == "99%, warming up"
    assert progress(1e9, 20.0, LogProgress("warming up", None, 1.0)).fraction == 0.99
