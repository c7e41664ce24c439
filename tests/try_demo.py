"""Asks a `serve --demo` for a model and ends it, to see that what was built works.

Only the standard library is needed:

python3 tests/try_demo.py COMMAND...     # one that serves the demo, as: anvil-mux serve --demo --port 0
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.request import Request, urlopen

READY = re.compile(r"serves (http://\S+)")
MODEL = "large"
TIMEOUT = 60.0


def try_demo(command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Return what the model answered, once the command has ended by SIGTERM with exit code 0."""
    with subprocess.Popen(command, env=env, cwd=cwd, stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        try:
            found = next(filter(None, map(READY.search, serving.stdout)), None)
            assert found, "it ended before it served"
            answer = ask(found[1])
        finally:
            serving.send_signal(signal.SIGTERM)
            serving.communicate(timeout=TIMEOUT)
    assert serving.returncode == 0, f"exit code {serving.returncode}"
    return answer


def ask(url: str) -> str:
    question = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]}
    head = {"Content-Type": "application/json"}
    with urlopen(
        Request(f"{url}/v1/chat/completions", json.dumps(question).encode(), head), timeout=TIMEOUT
    ) as told:
        answer = json.load(told)
    assert answer["model"] == MODEL
    said: str = answer["choices"][0]["message"]["content"]
    assert said
    return said


if __name__ == "__main__":
    print(f"{MODEL} answered: {try_demo(sys.argv[1:])}")
