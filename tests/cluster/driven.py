"""A driver of Ray on a host of a test cluster, as anvil-mux would start it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from anvil_mux.cluster import frames
from anvil_mux.cluster.frames import AgentCall, AnswerFrame, CallFrame, Node, Owner, read_frame, write_frame
from tests.cluster.answers import value_of
from tests.cluster.rig import START_TIMEOUT, Host

GUARD = 60.0
SHORT = 2.0
"""The time limit of a call that nobody answers."""
OWNER = Owner(1, "test", "the test")


class Driven:
    """A driver on a host, and the answers that it gave."""

    def __init__(self, host: Host, *flags: str, **environ: str | None) -> None:
        command = [sys.executable, "-m", "anvil_mux.cluster.ray_link", host.cluster.address, *flags]
        env = {name: value for name, value in {**host.environ(), **environ}.items() if value is not None}
        self.log = (host.folder / "driver.log").open("ab")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = host.popen(command, env=env, **pipes)
        self._number = 0
        self._changed = threading.Condition()
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._is_over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while frame := read_frame(self.process.stdout, AnswerFrame):
            number, ok, value = frame
            with self._changed:
                self._answers[number] = ok, value
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def begin(self, host: str, method: str, text: str = "", timeout: float = GUARD) -> int:
        self._number += 1
        write_frame(self.process.stdin, CallFrame(self._number, host, method, text, timeout))
        return self._number

    def answer(self, number: int, within: float = GUARD) -> tuple[bool, Any]:
        """Return an answer, which has to come in time."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self._is_over, within)
            assert number in self._answers, "no answer"
            return self._answers.pop(number)

    def joined(self, within: float = GUARD) -> tuple[bool, Any]:
        """Return the first frame."""
        return self.answer(0, within)

    def ask(self, host: str, method: str, text: str = "", timeout: float = GUARD) -> tuple[bool, Any]:
        """Return an answer, which has to come a second after the call's time at the latest."""
        return self.answer(self.begin(host, method, text, timeout), timeout + 1.0)

    def value(self, *call: Any) -> Any:
        ok, value = self.ask(*call)
        assert ok, value
        return value

    def call(self, host: str, method: str, *args: object) -> Any:
        """Return what the agent of a host answers to its owner."""
        return value_of(method, self.value(host, "call", frames.dump(AgentCall(OWNER, method, args))))

    def hello(self, host: str) -> dict[str, str]:
        """Return the greeting of an agent, asked until it comes: it is on its way back."""
        give_up = time.monotonic() + START_TIMEOUT
        while True:
            ok, value = self.ask(host, "hello", timeout=SHORT)
            if ok:
                said: dict[str, str] = frames.read(dict[str, str], value)
                return said
            assert time.monotonic() < give_up, f"{host} does not come back: {value}"
            threading.Event().wait(0.1)  # a host that is not there is refused at once

    def nodes(self) -> dict[str, Node]:
        return {node.name: node for node in frames.read(list[Node], self.value("", "nodes"))}

    def is_asked_until_it_ends(self, host: str) -> None:
        """Ask a host, as anvil-mux would, until the driver has ended of itself."""
        give_up = time.monotonic() + GUARD
        with suppress(BrokenPipeError):
            while not self._is_over:
                assert time.monotonic() < give_up, "the driver does not end"
                with suppress(AssertionError):  # it ended before it answered
                    self.ask(host, "hello", timeout=SHORT)
        assert self.ends() != 0

    def ends(self) -> int:
        """Return its exit code once it has ended of itself."""
        return int(self.process.wait(GUARD))

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(GUARD)
        self._reader.join(GUARD)
        self.process.stdout.close()
        self.log.close()
