"""A real `anvil-mux serve` for tests: a process of its own on a loopback port of its own."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_TIMEOUT = 60.0
STOP_TIMEOUT = 90.0


class Running:
    """One anvil-mux; ``output`` holds what it printed so far, on both streams."""

    def __init__(self, process: subprocess.Popen[str], command: list[str]) -> None:
        self.process = process
        self.command = command
        self.output: list[str] = []
        self.port = 0
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, name="serve-output", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            for line in lines:
                self.output.append(line.rstrip("\n"))
                found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
                if found and not self.port:
                    self.port = int(found[1])
                    self._listening.set()
        self._listening.set()

    def wait_until_listening(self) -> None:
        self._listening.wait(START_TIMEOUT)
        assert self.port, "it did not start:\n" + "\n".join(self.output)

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

    def answered(self) -> int:
        """Requests answered with 200 on routes of models, as /metrics counts them."""
        text = self.request("GET", "/metrics")[2]
        found = re.findall(r'^anvil_requests_total\{.*code="200".*route="/v1/.*"\} (\S+)$', text, re.M)
        return int(sum(map(float, found)))

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Signals it, and returns its exit code once it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(STOP_TIMEOUT)
        self._reader.join(STOP_TIMEOUT)
        return code


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
    """Starts anvil-mux and returns when it listens; the caller stops it."""
    command = [sys.executable, "-m", "anvil_mux", "serve", str(file), "--port", "0", *flags]
    env = {**os.environ, "XDG_STATE_HOME": str(state), "PYTHONUNBUFFERED": "1", **(environ or {})}
    process = subprocess.Popen(
        command,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    running = Running(process, command)
    try:
        running.wait_until_listening()
    except BaseException:
        running.stop()
        raise
    return running
