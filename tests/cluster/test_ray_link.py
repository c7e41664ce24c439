"""What is known of a cluster before it is joined."""

from __future__ import annotations

import subprocess
import sys

import pytest

from anvil_mux.cluster import ray_link
from anvil_mux.cluster.channel import Refused
from anvil_mux.cluster.ray_link import OPEN, REFUSED, refuse_unless_closed


def probe(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)


def test_a_cluster_that_refuses_who_shows_no_token_is_closed():
    refuse_unless_closed("h:1", probe(f"raise SystemExit({REFUSED})"))


def test_a_cluster_that_answers_without_a_token_is_open():
    with pytest.raises(Refused, match="the cluster at h:1 is open"):
        refuse_unless_closed("h:1", probe(f"raise SystemExit({OPEN})"))


@pytest.mark.parametrize(
    "program",
    [
        "raise ImportError",
        "raise SystemExit(0)",
        "import os; os.abort()",
        "import os; os.kill(os.getpid(), 9)",
    ],
)
def test_a_probe_that_crashes_however_is_no_answer(program):
    with pytest.raises(Refused, match="cannot be told whether the cluster at h:1 wants a token"):
        refuse_unless_closed("h:1", probe(program))


def test_a_probe_that_hangs_is_ended_and_no_answer(monkeypatch):
    monkeypatch.setattr(ray_link, "PROBE_SECONDS", 0.0)
    hangs = probe("import threading; threading.Event().wait()")
    with pytest.raises(Refused, match="cannot be told"):
        refuse_unless_closed("h:1", hangs)
    assert hangs.returncode is not None
