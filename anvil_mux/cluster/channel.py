"""The way to agents: calls through a child process, which is started anew when it ends.

Ray ends its driver when the head of the cluster is lost, so it lives in a child process: control is away
then, and requests flow on. Calls and answers are frames on the child's standard input and output. A thread
writes and a thread reads, so a child that hangs keeps nobody for longer than the call's own time limit.

The child says first, in an answer of the number 0, whether it can be of use; if not, it says why and ends.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from contextlib import nullcontext, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, Protocol

from anvil_mux.cluster import frames
from anvil_mux.cluster.frames import AnswerFrame, CallFrame, Node, read_frame, write_frame
from anvil_mux.errors import BackendError, MuxError

ENDED = "the process that talks to the cluster has ended, and is restarted"
START_SECONDS = 20.0
"""How long a child may take until it is of use."""
PAUSES = (1.0, 2.0, 5.0)
"""Seconds from the end of a child to the next start; more after one, two, ... that were of no use."""
MARGIN_SECONDS = 1.0
"""How much longer than its own limit a call is waited for."""


class AgentSilent(MuxError):
    """An agent, or the way to it, does not answer in time."""


class ClusterControl(Protocol):
    """The way to the agents of all hosts. Any thread may call."""

    def nodes(self) -> list[Node]:
        """The machines that are in the cluster now; AgentSilent if that cannot be told."""

    def call(self, host: str, method: str, text: str, timeout: float) -> str:
        """Return what the agent of a host answers; AgentSilent if it does not within ``timeout`` seconds."""

    def close(self) -> None:
        """End what was started for it; agents and engines run on."""


class Nowhere:
    """The way of an anvil-mux that was started without a cluster: it leads to no host."""

    def nodes(self) -> list[Node]:
        return []

    def call(self, host: str, method: str, text: str, timeout: float) -> str:
        raise AgentSilent("serve was started without --cluster")

    def close(self) -> None:
        pass


class Channel:
    """One child process, from its start to its end."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None,
        now: Callable[[], float],
        log: Path | None = None,
    ) -> None:
        self._now = now
        with log.open("ab") if log else nullcontext() as printed:
            # In a session of its own: an interrupt at the terminal is for the program, which ends its child.
            self._child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                env=env,
                start_new_session=True,
            )
        self._to_send: SimpleQueue[CallFrame | None] = SimpleQueue()
        self._lock = threading.Lock()
        # The lock guards what follows.
        self._waiting: dict[int, Future[tuple[bool, str]]] = {0: Future()}
        self._number = 0
        self.ended: float | None = None
        """When it ended; None: it runs. Read without the lock."""
        self.first = self._waiting[0]
        """The first frame: whether it is of use, and what it says of itself."""
        send, take = (self._child.stdin,), (self._child.stdout,)
        threading.Thread(target=self._write, args=send, name="cluster-write", daemon=True).start()
        self._reader = threading.Thread(target=self._read, args=take, name="cluster-read", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def call(self, host: str, method: str, text: str, timeout: float) -> str:
        if len(text) > frames.LONGEST // 2:  # in a frame each quote in it takes two
            raise BackendError(f"a call of {len(text)} characters is too long for host {host}")
        answer: Future[tuple[bool, str]] = Future()
        with self._lock:
            if self.ended is not None:
                raise AgentSilent(ENDED)
            self._number += 1
            number = self._number
            self._waiting[number] = answer
        self._to_send.put(CallFrame(number, host, method, text, timeout))
        try:
            is_ok, said = answer.result(timeout + MARGIN_SECONDS)
        except TookTooLong:
            raise AgentSilent(f"no answer within {timeout:g} s") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if not is_ok:
            raise AgentSilent(said)
        return said

    def close(self, grace: float = 2.0) -> None:
        """End the child: it ends by itself when nobody writes to it any more."""
        self._to_send.put(None)
        try:
            self._child.wait(grace)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._reader.join(grace)  # it ends with the child's output

    def _write(self, pipe: BinaryIO) -> None:
        with suppress(OSError, ValueError), pipe:
            while (frame := self._to_send.get()) is not None:
                write_frame(pipe, frame)

    def _read(self, pipe: BinaryIO) -> None:
        with suppress(OSError, MuxError), pipe:
            while (frame := read_frame(pipe, AnswerFrame)) is not None:
                number, is_ok, said = frame
                with self._lock:
                    answer = self._waiting.pop(number, None)
                if answer:
                    answer.set_result((is_ok, said))
        self._to_send.put(None)
        with self._lock:
            self.ended = self._now()
            left, self._waiting = list(self._waiting.values()), {}
        for answer in left:
            answer.set_result((False, ENDED))
        self._child.wait()


class ChildControl:
    """The way through a child process, see ``ClusterControl``.

    ``argv`` starts it; what it prints on standard error goes to the file ``log``, None: to our own.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        pauses: Sequence[float] = PAUSES,
        now: Callable[[], float] = time.monotonic,
        log: Path | None = None,
    ) -> None:
        self._argv = argv
        self._log = log
        self._env = env
        self._pauses = pauses
        self._now = now
        self._lock = threading.Lock()
        # The lock guards what follows.
        self._channel: Channel | None = None
        self._failures = 0
        """How many children in turn were of no use."""
        self._closed = False
        self.problem = ""
        """Why the last child is of no use; "": it is of use, or it is not known yet. Any thread writes it."""

    def start(self) -> None:
        """Start the child, and do not wait for it."""
        self._current()

    def open(self) -> None:
        """Start the child; AgentSilent says why it is of no use. Later ends of it mend themselves."""
        self._reach(START_SECONDS)

    @property
    def pid(self) -> int:
        """The child's process id; 0: there is none."""
        channel = self._channel
        return channel.pid if channel and channel.ended is None else 0

    def nodes(self) -> list[Node]:
        found = frames.read(list[Node], self.call("", "nodes", "", 5.0), is_foreign=True)
        return [each for each in found if each.is_alive]

    def call(self, host: str, method: str, text: str, timeout: float) -> str:
        return self._reach(timeout).call(host, method, text, timeout)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channel = self._channel
        if channel:
            channel.close()

    def _reach(self, timeout: float) -> Channel:
        """Return the child's channel, of a child that is of use; AgentSilent."""
        channel = self._current()
        try:
            is_ok, said = channel.first.result(timeout)
        except TookTooLong:
            raise AgentSilent("the cluster is not reached yet") from None
        self.problem = "" if is_ok else said
        if not is_ok:
            raise AgentSilent(said)
        return channel

    def _current(self) -> Channel:
        """Return the child's channel, of a new child if it has ended."""
        with self._lock:
            if self._closed:
                raise AgentSilent("anvil-mux ends")
            if self._channel and self._channel.ended is not None:
                pause = self._pauses[min(self._failures, len(self._pauses) - 1)]
                if self._now() < self._channel.ended + pause:
                    raise AgentSilent(self.problem or ENDED)
                self._failures = self._failures + 1 if self.problem else 0
                self._channel = None
            self._channel = self._channel or Channel(self._argv, self._env, self._now, self._log)
            return self._channel
