"""A real `anvil-mux serve` for tests: a process of its own on a loopback port of its own.

Much happens behind an answer: its lease ends, it is counted and logged, and what the program prints comes
through a pipe. A test that wants to see such a thing waits for it, with ``tells``, ``answered`` or ``seen``.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

START_TIMEOUT = 60.0
STOP_TIMEOUT = 90.0
SEEN_TIMEOUT = 60.0
LOOK_INTERVAL = 0.01
"""Who looks without a pause takes the CPU from what is waited for."""

T = TypeVar("T")


def seen(look: Callable[[], T], holds: Callable[[T], object]) -> T:
    """What ``look`` says once it ``holds``, looked at again and again; in the end what it said last."""
    give_up = time.monotonic() + SEEN_TIMEOUT
    pause = threading.Event()
    while not holds(found := look()) and time.monotonic() < give_up:
        pause.wait(LOOK_INTERVAL)
    return found


class Running:
    """One anvil-mux; ``output`` holds what it printed so far, on both streams."""

    def __init__(self, process: subprocess.Popen[str], command: list[str]) -> None:
        self.process = process
        self.command = command
        self.output: list[str] = []
        self.port = 0
        self._changed = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read, name="serve-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.output.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def tells(self, pattern: str) -> re.Match[str]:
        """Waits until it has printed a line in which ``pattern`` is found."""

        def found() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self.output)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self._over, START_TIMEOUT)
            told = found()
        assert told, f"it does not tell {pattern}:\n" + "\n".join(self.output)
        return told

    def wait_until_listening(self) -> None:
        self.port = int(self.tells(r"http://127\.0\.0\.1:(\d+)")[1])

    def wait_until_adopted(self) -> None:
        """Until it is known what ran before."""

        assert not seen(lambda: self.get("/healthz").get("adopting"), lambda names: not names)

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        timeout: float = 120.0,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers (lower case) and text of one answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            text = response.read().decode()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, text
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        return json.loads(self.request("GET", path)[2])

    def chat(self, model: str, **more: object) -> tuple[int, dict[str, str], str]:
        messages = [{"role": "user", "content": "Say hello."}]
        return self.request("POST", "/v1/chat/completions", {"model": model, "messages": messages, **more})

    def answered(self, at_least: int = 0) -> int:
        """Requests answered with 200 on routes of models, once /metrics counts ``at_least`` so many."""

        def counted() -> int:
            text = self.request("GET", "/metrics")[2]
            found = re.findall(r'^anvil_requests_total\{.*code="200".*route="/v1/.*"\} (\S+)$', text, re.M)
            return int(sum(map(float, found)))

        return seen(counted, lambda count: count >= at_least)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Signals it, and returns its exit code once it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(STOP_TIMEOUT)
        self._reader.join(STOP_TIMEOUT)
        return code

    def cut_short(self, how: signal.Signals = signal.SIGTERM) -> int | None:
        """Signals it until it ends, as signals close to the first count as one with it; its exit code."""

        def signalled() -> int | None:
            self.process.send_signal(how)
            return self.process.poll()

        return seen(signalled, lambda code: code is not None)


@contextmanager
def serving(
    file: Path, *flags: str, state: Path, environ: Mapping[str, str] | None = None, on_exit: str = "stop"
) -> Iterator[Running]:
    """anvil-mux serving ``file``; at the end it is told to stop, with its engines."""
    running = serve(file, *flags, "--on-exit", on_exit, state=state, environ=environ)
    try:
        yield running
    finally:
        running.stop()


def serve(file: Path, *flags: str, state: Path, environ: Mapping[str, str] | None = None) -> Running:
    """Starts anvil-mux and returns when it listens and has taken over what ran; the caller stops it."""
    running = begin(file, *flags, state=state, environ=environ)
    try:
        running.wait_until_listening()
        running.wait_until_adopted()
    except BaseException:
        running.stop()
        raise
    return running


def begin(file: Path, *flags: str, state: Path, environ: Mapping[str, str] | None = None) -> Running:
    """Starts anvil-mux and does not wait for it; the caller stops it."""
    command = [sys.executable, "-m", "anvil_mux", "serve", str(file), "--port", "0", *flags]
    env = {**os.environ, "XDG_STATE_HOME": str(state), **(environ or {})}
    process = subprocess.Popen(
        command,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Running(process, command)
