"""The end of the program, by signals and by whoever else has to end it."""

import subprocess
import sys

from anvil_mux.serve.invocation import INTERRUPTED

PROGRAM = """
import os, signal, time
from anvil_mux.serve.invocation import SAME_SECONDS, Signals
def run(events):
    signals = Signals()
    clock = [0.0]
    time.monotonic = lambda: clock[0]
    for each in events.split():
        if each == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif each == "takeover":
            signals.end(1)
        else:
            clock[0] += SAME_SECONDS + 0.1
        assert signals.wait() == "end"
for events in {histories}:
    if not (child := os.fork()):
        run(events)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
HISTORIES = {
    **dict.fromkeys(("term", "takeover", "term takeover", "takeover term", "takeover takeover"), 0),
    "term term": 0,
    "term takeover later term": INTERRUPTED,
    "term term later term": INTERRUPTED,
}
"""What comes, one after the other -> the exit code."""


def test_only_a_second_signal_cuts_what_a_first_or_a_takeover_lets_end():
    program = PROGRAM.format(histories=list(HISTORIES))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert dict(zip(HISTORIES, map(int, done.stdout.split()), strict=True)) == HISTORIES, done.stderr
