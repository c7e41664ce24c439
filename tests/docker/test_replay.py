"""Traffic is played against real engines, and its swaps and waits are those of the events."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.docker.conftest import Stack
from tests.docker.served import ENDLESS, PATIENCE, served
from tests.running import Running

SESSIONS = """
{"workload": "turns", "models": {"x": {"load_seconds": 1}, "y": {"load_seconds": 1}}, "resident": ["x"]}
{"session": 1, "at": 0, "model": "x", "seconds": 0.5}
{"session": 1, "think": 0.1, "model": "y", "seconds": 0.5}
{"session": 1, "think": 0.1, "model": "x", "seconds": 1}
{"session": 1, "think": 0, "model": "x", "seconds": 1}
""".lstrip()
NAMES = ["--model", "x=model-1", "--model", "y=model-2"]


def replay(stack: Stack, mux: Running, *words: str) -> list[dict[str, Any]]:
    """The rows of a replay against a server."""
    command = [sys.executable, "-m", "anvil_mux", "replay", "--url", f"http://127.0.0.1:{mux.port}", *words]
    env = {**stack.engine.env, "XDG_STATE_HOME": str(stack.file.parent)}
    done = subprocess.run([*command, "--json"], env=env, timeout=PATIENCE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_sessions_are_played_against_llama_servers_and_beside_their_simulation(
    llamacpp_compose: Callable[..., Stack], tmp_path: Path
) -> None:
    stack = llamacpp_compose(tmp_path, models=2, services={"model-1": ENDLESS, "model-2": ENDLESS})
    workload, requests = tmp_path / "w.jsonl", tmp_path / "requests.csv"
    workload.write_text(SESSIONS)
    lengths = ["--tokens-per-second", "40", "--prompt-tokens", "60", "--csv", str(requests)]
    with served(stack) as mux:
        # The compose file is found, since the server runs here.
        measured, simulated = replay(stack, mux, "--trace", str(workload), *NAMES, *lengths)
    assert (measured["requests"], measured["swaps"], measured["failed"]) == (4, 2, 0)
    assert (simulated["at"], simulated["requests"], simulated["swaps"]) == ("simulated", 4, 2)
    assert measured["clients"]["cache_hit_ratio"] is not None
    rows = list(csv.DictReader(requests.read_text().splitlines()))
    assert [row["tokens"] for row in rows] == ["20", "20", "40", "40"]
    # The words of a prompt are as many as the tokenizer, which the warm-up learned of, makes that length of.
    assert all(abs(int(row["prompt_tokens"]) - 60) <= 4 for row in rows)
    assert [float(row["waited"]) > 0 for row in rows] == [False, True, True, False]


def test_a_trace_of_prompts_shares_its_prefixes_in_a_real_cache(
    llamacpp_compose: Callable[..., Stack], tmp_path: Path
) -> None:
    stack = llamacpp_compose(tmp_path, models=1, slots=1, services={"model-1": ENDLESS})
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"trace": "grows", "block_tokens": 64, "seconds": 100}\n'
        '{"session": 1, "at": 0, "in": 130, "out": 4, "blocks": "1-2"}\n'
        '{"session": 1, "at": 0, "in": 258, "out": 4, "blocks": "1-4"}\n'
        '{"session": 1, "at": 0, "in": 386, "out": 4, "blocks": "1-6"}\n'
    )
    words = ["--trace", str(trace), "--model", "model-1", "--speed", "1000", "--seed", "1"]
    with served(stack) as mux:
        [measured] = replay(stack, mux, *words)
    assert (measured["requests"], measured["failed"]) == (3, 0)
    # 128 tokens of the second and 256 of the third were there: of 774 together, but for where words end.
    assert 0.4 < measured["clients"]["cache_hit_ratio"] < 0.55
