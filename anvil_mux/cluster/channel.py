"""The way to agents: calls through a child process, which is started anew when it ends, and both its ends.

Ray ends its driver when the head of the cluster is lost, so it lives in a child process: control is away
then, and requests flow on. Calls and answers are frames on the child's standard input and output. A thread
writes and a thread reads, so a child that hangs keeps nobody for longer than the call's own time limit.

The child says first, in an answer of the number 0, whether it can be of use; if not, it says why and ends.

In the child a ``Carrier`` has each call answered once and in its time, whatever becomes of the host. Host ""
is the cluster: ``nodes`` lists its hosts. A host has ``hello``, and ``call`` with a text; its answers are
texts, which nobody reads here. Nothing here knows Ray: ``ray_link`` brings the cluster, and tests another.
Calls do not wait in threads there: their results come from the cluster's own threads, their time limits from
one thread for all. Only what opens a host has a thread, since placing an actor may take long.
"""

from __future__ import annotations

import heapq
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, Protocol

from anvil_mux.clock import safely
from anvil_mux.cluster import frames
from anvil_mux.cluster.frames import (
    LONGEST_ANSWER,
    AnswerFrame,
    AnswerPipe,
    CallFrame,
    Node,
    dump,
    read_frame,
    write_frame,
)
from anvil_mux.errors import BackendError, MuxError

ENDED = "the process that talks to the cluster has ended, and is restarted"
START_SECONDS = 20.0
"""How long a child may take until it is of use."""
NODES_SECONDS = 5.0
"""How long a child may take to tell which hosts there are."""
HUNG_SECONDS = 60.0
"""How long a child may fail to tell that, until it is ended and another one started.

Ray may wait for ever for a head that ended in the very moment in which it was reached.
"""
PAUSES = (1.0, 2.0, 5.0)
"""Seconds from the end of a child to the next start; more after one, two, ... that were of no use."""
END_SECONDS = 2.0
"""How long a child may take to end once nobody writes to it."""
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


# Here


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
            self.child = subprocess.Popen(
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
        self.useful_at = now()
        """When it last told which hosts there are, or began. Any thread writes it."""
        self.first = self._waiting[0]
        """The first frame: whether it is of use, and what it says of itself."""
        send, take = (self.child.stdin,), (self.child.stdout,)
        threading.Thread(target=self._write, args=send, name="cluster-write", daemon=True).start()
        self._reader = threading.Thread(target=self._read, args=take, name="cluster-read", daemon=True)
        self._reader.start()

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
            is_ok, reply = answer.result(timeout + MARGIN_SECONDS)
        except TookTooLong:
            raise AgentSilent(f"no answer within {timeout:g} s") from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if not is_ok:
            raise AgentSilent(reply)
        return reply

    def close(self) -> None:
        """End the child: it ends by itself when nobody writes to it any more."""
        self._to_send.put(None)
        self._end_child()
        self._reader.join(END_SECONDS)  # it ends with the child's output

    def _end_child(self) -> None:
        """Wait until the child has ended, and kill it if that takes too long."""
        try:
            self.child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()

    def _write(self, pipe: BinaryIO) -> None:
        """Send calls until the channel is closed; end the child if one cannot be sent."""
        with suppress(OSError), pipe:
            while (frame := self._to_send.get()) is not None:
                if not safely("cluster-write", partial(self._send, pipe, frame), False):
                    self.child.kill()
                    return

    @staticmethod
    def _send(pipe: BinaryIO, frame: CallFrame) -> bool:
        """Send a call; return whether the child could be sent it."""
        with suppress(OSError, ValueError):
            write_frame(pipe, frame)
            return True
        return False

    def _read(self, pipe: BinaryIO) -> None:
        """Take answers until there are no more, then end the child and every call that waits."""
        with suppress(OSError), pipe:
            while safely("cluster-read", partial(self._take, pipe), False):
                pass
        self._to_send.put(None)
        with self._lock:
            self.ended = self._now()
            left, self._waiting = list(self._waiting.values()), {}
        for answer in left:
            answer.set_result((False, ENDED))
        self._end_child()

    def _take(self, pipe: BinaryIO) -> bool:
        """Take one answer to the call that waits for it; return whether there was one."""
        frame = None
        with suppress(OSError, MuxError):
            frame = read_frame(pipe, AnswerFrame)
        if frame is None:
            return False
        with self._lock:
            answer = self._waiting.pop(frame.number, None)
        if answer:
            answer.set_result((frame.ok, frame.text))
        return True


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

    def open(self) -> None:
        """Start the child; AgentSilent says why it is of no use. Later ends of it mend themselves."""
        self._reach(START_SECONDS)

    @property
    def pid(self) -> int:
        """The child's process id; 0: there is none."""
        channel = self._channel
        return channel.child.pid if channel and channel.ended is None else 0

    def nodes(self) -> list[Node]:
        channel = self.start()
        try:
            text = self.call("", "nodes", "", NODES_SECONDS)
        except AgentSilent:
            if self._now() - channel.useful_at > HUNG_SECONDS:
                channel.child.kill()
            raise
        channel.useful_at = self._now()
        return [each for each in frames.read(list[Node], text, is_foreign=True) if each.is_alive]

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
        channel = self.start()
        try:
            is_ok, text = channel.first.result(timeout)
        except TookTooLong:
            raise AgentSilent("the cluster is not reached yet") from None
        self.problem = "" if is_ok else text
        if not is_ok:
            raise AgentSilent(text)
        return channel

    def start(self) -> Channel:
        """Start a child if none runs, and do not wait for it; return its channel."""
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


# In the child

RETRY_SECONDS = 5.0
"""Until an agent that could not be started is tried again."""
PINGS, PING_SECONDS = 5, 1.0
"""How often all hosts are asked in vain, and how far apart, until nothing known of the cluster counts."""
PING = 0
"""The number of a call that nobody waits for."""


class Refused(Exception):
    """Something cannot be done; the text says why, and what to do about it."""


class AgentAway(Refused):
    """The agent did not answer; whether it carried the call out is not known."""


class AgentGone(AgentAway):
    """The agent will not answer again; another one is to be opened."""


class FarAgent(Protocol):
    """The agent of a host, as a cluster reaches it."""

    def ask(self, call: CallFrame, then: Callable[[str | Exception], None]) -> None:
        """Begin a call; ``then`` is called with the text that it returned, or with what went wrong."""


class FarHosts(Protocol):
    """The hosts that can be reached."""

    def nodes(self) -> list[Node]:
        """Return the hosts that are in the cluster, or were."""

    def open(self, name: str) -> FarAgent:
        """Return the agent of a host, started if it did not run. May take long; Refused if it cannot be."""


class Calls(AnswerPipe):
    """The calls under way: each is answered with its result, or told that its time has passed."""

    def __init__(self, output: BinaryIO) -> None:
        super().__init__(output)
        self._changed = threading.Condition()
        self._open: dict[int, str] = {}
        """The number of a call, and what is answered if it takes too long."""
        self._deadlines: list[tuple[float, int]] = []

    def begin(self, number: int, timeout: float, late: str) -> None:
        """Count the time of a call from now on."""
        with self._changed:
            self._open[number] = late
            heapq.heappush(self._deadlines, (time.monotonic() + timeout, number))
            if self._deadlines[0][1] == number:
                self._changed.notify()

    def is_open(self, number: int) -> bool:
        """Whether somebody still waits for the answer."""
        with self._changed:
            return number in self._open

    def end(self, number: int, ok: bool, text: str) -> None:
        """Answer a call, unless it was answered."""
        with self._changed:
            if self._open.pop(number, None) is None:
                return
        if len(text) > LONGEST_ANSWER:
            ok, text = False, "its answer is too long"
        self.write(number, ok, text)

    def expire(self, on_late: Callable[[], None]) -> None:
        """Answer for ever those calls whose time has passed."""
        while True:
            with self._changed:
                while not self._deadlines or (left := self._deadlines[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left if self._deadlines else None)
                number = heapq.heappop(self._deadlines)[1]
                late = self._open.pop(number, None)
            if late is not None:
                self.write(number, False, late)
                on_late()


class SilenceWatch:
    """Sees that all hosts that have answered are silent, and what is known of the cluster therefore stale.

    Ray does not report that: after its head came back without its memory, calls just hang.
    """

    def __init__(self, pings: int = PINGS, ping_seconds: float = PING_SECONDS) -> None:
        self._pings = pings
        self._ping_seconds = ping_seconds
        self._changed = threading.Condition()
        self._known: set[Link] = set()
        self._suspects = False

    def answered(self, link: Link) -> None:
        """Hear that a host answered."""
        with self._changed:
            self._known.add(link)
            if self._suspects:
                self._suspects = False
                self._changed.notify_all()

    def failed(self) -> None:
        """Hear that a call had no answer: now all hosts are asked."""
        with self._changed:
            if self._known and not self._suspects:
                self._suspects = True
                self._changed.notify_all()

    def wait(self) -> None:
        """Return when none of them has answered, although they were asked again and again."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._suspects)
                known = list(self._known)
            if not any(self._ping(known) for _ in range(self._pings)):
                return

    def _ping(self, links: list[Link]) -> bool:
        """Ask hosts; whether one has answered before the next are to be asked."""
        for link in links:
            link.ping()
        with self._changed:
            return self._changed.wait_for(lambda: not self._suspects, self._ping_seconds)


class Link:
    """One host: its agent is opened by the first call and kept until it is gone."""

    def __init__(self, name: str, cluster: FarHosts, calls: Calls, watch: SilenceWatch) -> None:
        self._name = name
        self._cluster = cluster
        self._calls = calls
        self._watch = watch
        self._lock = threading.Lock()
        self._problem = ""
        """Why the agent could not be opened; "" if it could, or has not been tried."""
        self._agent: FarAgent | None = None
        self._waiting: list[CallFrame] = []
        self._is_opening = False
        self._retry_at = 0.0

    def call(self, call: CallFrame) -> None:
        """Begin a call."""
        opens = False
        with self._lock:
            agent = self._agent
            problem = "" if agent else self.problem
            if agent is None and not problem:
                self._waiting.append(call)
                opens, self._is_opening = not self._is_opening, True
        if agent is not None:
            self._ask(agent, call)
        elif problem:
            self._calls.end(call.number, False, problem)
        elif opens:
            threading.Thread(target=self._open, name=f"open-{self._name}", daemon=True).start()

    @property
    def problem(self) -> str:
        """Why the agent could not be opened; "" once it may be tried again: the next call does so."""
        return self._problem if time.monotonic() < self._retry_at else ""

    def ping(self) -> None:
        """Ask an agent that was opened whether it answers; the watch hears of it."""
        with self._lock:
            agent = self._agent
        if agent is not None:
            self._ask(agent, CallFrame(PING, self._name, "hello", "", 0.0))

    def _open(self) -> None:
        agent, problem = None, ""
        try:
            agent = self._cluster.open(self._name)
        except Exception as error:
            problem = str(error) or type(error).__name__
        with self._lock:
            self._agent, self._problem = agent, problem
            self._retry_at = time.monotonic() + RETRY_SECONDS if problem else 0.0
            waiting, self._waiting, self._is_opening = self._waiting, [], False
        for call in waiting:
            if agent is None:
                self._calls.end(call.number, False, problem)
            elif self._calls.is_open(call.number):
                self._ask(agent, call)

    def _ask(self, agent: FarAgent, call: CallFrame) -> None:
        try:
            agent.ask(call, lambda value: self._ended(agent, call, value))
        except Exception as error:
            self._ended(agent, call, error)

    def _ended(self, agent: FarAgent, call: CallFrame, value: str | Exception) -> None:
        """Take a result, in a thread of the cluster's: nothing here waits."""
        if isinstance(value, AgentGone):
            with self._lock:
                if self._agent is agent:
                    self._agent = None
        if not isinstance(value, AgentAway):
            self._watch.answered(self)
        elif call.number != PING:
            self._watch.failed()
        self._calls.end(call.number, isinstance(value, str), str(value))


class Carrier:
    """The calls that come in, and who answers them."""

    def __init__(self, cluster: FarHosts, calls: Calls, watch: SilenceWatch) -> None:
        self._cluster = cluster
        self._calls = calls
        self._watch = watch
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}
        self._waiting_for_nodes: list[int] = []

    def begin(self, call: CallFrame) -> None:
        """Begin a call."""
        who = f"the agent of {call.host}" if call.host else "the head of the cluster"
        self._calls.begin(call.number, call.timeout, f"{who} did not answer in {call.timeout:g} s")
        match call.host, call.method:
            case "", "nodes":
                self._begin_nodes(call.number)
            case "", method:
                self._calls.end(call.number, False, f"the cluster has no method {method}")
            case host, "hello" | "call":
                self._link(host).call(call)
            case _, method:
                self._calls.end(call.number, False, f"a host has no method {method}")

    def _link(self, host: str) -> Link:
        with self._lock:
            return self._links.setdefault(host, Link(host, self._cluster, self._calls, self._watch))

    def _begin_nodes(self, number: int) -> None:
        """Ask the head in a thread; who asks meanwhile waits for the same answer."""
        with self._lock:
            self._waiting_for_nodes.append(number)
            if len(self._waiting_for_nodes) > 1:
                return
        threading.Thread(target=self._tell_nodes, name="nodes", daemon=True).start()

    def _tell_nodes(self) -> None:
        try:
            ok, text = True, dump([self._with_problem(node) for node in self._cluster.nodes()])
        except Exception as error:
            ok, text = False, str(error)
        with self._lock:
            waiting, self._waiting_for_nodes = self._waiting_for_nodes, []
        for number in waiting:
            self._calls.end(number, ok, text)

    def _with_problem(self, node: Node) -> Node:
        with self._lock:
            link = self._links.get(node.name)
        return node._replace(problem=node.problem or (link.problem if link else ""))
