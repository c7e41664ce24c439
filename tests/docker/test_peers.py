"""`bin/bench peers` for some seconds, on real llama-servers."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = ("--rounds", "1", "--mib", "40", "--seconds", "3", "--answer", "1", "--long", "3")
TIMEOUT = 600.0


def test_the_same_clients_are_served_by_anvil_mux_and_by_llama_cpp_s_router(engine):
    """``engine`` brings the root file system of which llama-server is started."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for chroot")
    chosen = ("--only", "swap,stream,1+1", "--through", "adaptive,router")
    command = [str(ROOT / "bin" / "bench"), "peers", *SHORT, *chosen, "--json"]
    done = subprocess.run(command, env=engine.env, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    rows = {(row["scenario"], row["through"]): row for row in said["medians"]}
    assert [*rows] == [
        (scenario, name) for scenario in ("swap", "stream", "1+1") for name in ("adaptive", "router")
    ]
    assert not any(row["broken"] for row in rows.values())
    assert all(rows["stream", name]["finished"] == "1 of 1" for name in ("adaptive", "router"))
    assert all(rows["1+1", name]["swaps"] >= 1 for name in ("adaptive", "router")), "both sides were served"
    assert "llama.cpp" in said["about"]
