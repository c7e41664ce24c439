"""The end of the program, by signals and by whoever else has to end it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from anvil_mux.serve.invocation import INTERRUPTED

PROGRAM = """
import os, signal, time
from anvil_mux.serve.invocation import SAME_SECONDS, Signals
signals = Signals()
clock = [0.0]
time.monotonic = lambda: clock[0]
def later():
    clock[0] += SAME_SECONDS + 0.1
def term():
    os.kill(os.getpid(), signal.SIGTERM)
def takeover():
    signals.end(1)
for each in {events}:
    each()
    assert signals.wait() == "end"
print("drained", flush=True)
"""


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ("[term]", 0),
        ("[takeover]", 0),
        ("[term, takeover]", 0),
        ("[takeover, term]", 0),
        ("[takeover, takeover]", 0),
        ("[term, takeover, later, term]", INTERRUPTED),
        ("[term, term]", 0),
        ("[term, term, later, term]", INTERRUPTED),
    ],
)
def test_only_a_second_signal_cuts_what_a_first_or_a_takeover_lets_end(events, code):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(events=events)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (code, "" if code else "drained\n"), done.stderr
