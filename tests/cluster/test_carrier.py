"""Calls to agents: answered once, in their time, whatever the cluster does, which here is the test's."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from anvil_mux.cluster import channel
from anvil_mux.cluster.channel import (
    AgentAway,
    AgentGone,
    Calls,
    Carrier,
    Link,
    Refused,
    SilenceWatch,
)
from anvil_mux.cluster.frames import LONGEST, LONGEST_ANSWER, AnswerFrame, CallFrame, Node, dump, read_frame

LONG = 1000.0
GUARD = 20.0


class FakeAgent:
    """Answers ``answer``, an exception too; None: keeps what is to be told the answer."""

    def __init__(self, answer: object = None) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str]] = []
        self.waiting: list[Callable[[object], None]] = []

    def ask(self, call: CallFrame, then: Callable[[object], None]) -> None:
        self.asked.append((call.method, call.text))
        if self.answer is None:
            self.waiting.append(then)
        else:
            then(self.answer)


class FakeCluster:
    """What is opened is next of ``agents``; an exception is raised, an event waited for first."""

    def __init__(self, agents: Mapping[str, list[Any]] | None = None) -> None:
        self.agents = dict(agents or {})
        self.gate = threading.Event()
        self.gate.set()
        self.asked = 0

    def nodes(self) -> list[Node]:
        self.asked += 1
        assert self.gate.wait(GUARD)
        return [Node(name) for name in self.agents]

    def open(self, name: str) -> FakeAgent:
        found = self.agents[name].pop(0)
        if isinstance(found, threading.Event):
            assert found.wait(GUARD)
            return self.open(name)
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, FakeAgent)
        return found


class Parent:
    """The other end of the pipe: begins calls, and reads the next answer."""

    def __init__(self, cluster: FakeCluster) -> None:
        reads, writes = os.pipe()
        self._source, self._output = os.fdopen(reads, "rb"), os.fdopen(writes, "wb")
        self.calls, self.watch = Calls(self._output), SilenceWatch()
        self.carrier = Carrier(cluster, self.calls, self.watch)
        self._number = 0
        threading.Thread(target=self.calls.expire, args=(self.watch.failed,), daemon=True).start()

    def begin(self, host: str, method: str = "call", timeout: float = LONG) -> int:
        self._number += 1
        self.carrier.begin(CallFrame(self._number, host, method, "message", timeout))
        return self._number

    def answer(self) -> tuple[object, ...]:
        frame = read_frame(self._source, AnswerFrame)
        assert frame
        return tuple(frame)

    def ask(self, host: str, method: str = "call", timeout: float = LONG) -> tuple[object, ...]:
        number = self.begin(host, method, timeout)
        found, *rest = self.answer()
        assert found == number
        return tuple(rest)

    def close(self) -> None:
        self._output.close()
        self._source.close()


@pytest.fixture
def parent_of() -> Iterator[Callable[[FakeCluster], Parent]]:
    parents: list[Parent] = []

    def make(cluster: FakeCluster) -> Parent:
        parents.append(Parent(cluster))
        return parents[-1]

    yield make
    for parent in parents:
        parent.close()


MakeParent = Callable[[FakeCluster], Parent]


def test_a_call_reaches_the_agent_and_its_answer_comes_back(parent_of: MakeParent) -> None:
    agent = FakeAgent("answer")
    parent = parent_of(FakeCluster({"a": [agent]}))

    assert parent.ask("a") == (True, "answer")
    assert parent.ask("a", "hello") == (True, "answer")
    assert agent.asked == [("call", "message"), ("hello", "message")]


@pytest.mark.parametrize(("host", "text"), [("", "the cluster has no method"), ("a", "a host has no method")])
def test_other_methods_are_refused(host: str, text: str, parent_of: MakeParent) -> None:
    ok, said = parent_of(FakeCluster({"a": [FakeAgent("")]})).ask(host, "run")
    assert (ok, text in str(said)) == (False, True)


def test_a_call_is_answered_when_its_time_has_passed_and_only_once(parent_of: MakeParent) -> None:
    agent = FakeAgent()
    parent = parent_of(FakeCluster({"a": [agent]}))

    first = parent.begin("a")
    assert parent.ask("a", timeout=0.0) == (False, "the agent of a did not answer in 0 s")
    until(lambda: len(agent.waiting) == 2)
    agent.waiting[1]("too late")
    agent.waiting[0]("in time")

    assert parent.answer() == (first, True, "in time")


@pytest.mark.parametrize("character", ["x", "\x00", "\U0001f600"])
def test_an_answer_that_is_too_long_is_none_and_one_that_is_not_fits_its_frame(
    parent_of: MakeParent, character: str
) -> None:
    agent = FakeAgent(character * (LONGEST_ANSWER + 1))
    parent = parent_of(FakeCluster({"a": [agent]}))
    assert parent.ask("a") == (False, "its answer is too long")
    assert len(dump(AnswerFrame(1, True, character * (LONGEST_ANSWER // len(character.encode()))))) <= LONGEST


def until(holds: Callable[[], bool]) -> None:
    """Return once it holds: a thread of the program's is on its way there."""
    while not holds():
        threading.Event().wait(0)


def test_calls_wait_while_their_host_is_opened_and_hold_up_no_other(parent_of: MakeParent) -> None:
    opened = threading.Event()
    parent = parent_of(FakeCluster({"a": [opened, FakeAgent("a")], "b": [FakeAgent("b")]}))

    waiting = [parent.begin("a"), parent.begin("a")]
    assert parent.ask("b") == (True, "b")
    assert parent.ask("a", timeout=0.0) == (False, "the agent of a did not answer in 0 s")
    opened.set()

    assert sorted([parent.answer(), parent.answer()]) == [(number, True, "a") for number in waiting]


def test_a_host_that_cannot_be_opened_says_why_and_is_tried_again_later(
    parent_of: MakeParent, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster({"a": [Refused("no anvil-mux there"), FakeAgent("now")]})
    parent = parent_of(cluster)

    monkeypatch.setattr(channel, "RETRY_SECONDS", LONG)
    assert parent.ask("a") == (False, "no anvil-mux there")
    assert parent.ask("a") == (False, "no anvil-mux there")
    assert parent.ask("", "nodes") == (True, dump([Node("a", problem="no anvil-mux there")]))

    cluster = FakeCluster({"a": [Refused("no anvil-mux there"), FakeAgent("now")]})
    parent = parent_of(cluster)
    monkeypatch.setattr(channel, "RETRY_SECONDS", 0.0)
    assert parent.ask("a") == (False, "no anvil-mux there")
    assert parent.ask("", "nodes") == (True, dump([Node("a")])), "it is to be tried again"
    assert parent.ask("a") == (True, "now")
    assert parent.ask("", "nodes") == (True, dump([Node("a")]))


def test_an_agent_that_is_gone_is_opened_anew_and_one_that_is_away_is_not(parent_of: MakeParent) -> None:
    first, second = FakeAgent(AgentAway("away")), FakeAgent("second")
    parent = parent_of(FakeCluster({"a": [first, second]}))

    assert parent.ask("a") == (False, "away")
    assert parent.ask("a") == (False, "away")
    first.answer = AgentGone("gone")
    assert parent.ask("a") == (False, "gone")
    assert parent.ask("a") == (True, "second")


def test_all_who_ask_for_nodes_share_one_question(parent_of: MakeParent) -> None:
    cluster = FakeCluster({"a": []})
    cluster.gate.clear()
    parent = parent_of(cluster)

    numbers = [parent.begin("", "nodes"), parent.begin("", "nodes")]
    assert parent.ask("", "nodes", timeout=0.0) == (False, "the head of the cluster did not answer in 0 s")
    cluster.gate.set()

    assert sorted(number for number, *_ in (parent.answer(), parent.answer())) == numbers
    assert cluster.asked == 1
    assert parent.ask("", "nodes")[0]
    assert cluster.asked == 2


# Silence


class Silence:
    """A watch over hosts, each with an agent of the test's."""

    def __init__(self, *agents: FakeAgent) -> None:
        self.watch = SilenceWatch(pings=3, ping_seconds=0.0)
        self._agents = agents
        self._calls = Calls(io.BytesIO())
        cluster = FakeCluster({str(at): [agent] for at, agent in enumerate(agents)})
        self._links = [Link(str(at), cluster, self._calls, self.watch) for at in range(len(agents))]
        self.ended = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        self.watch.wait()
        self.ended.set()

    def call(self, at: int, answer: object) -> None:
        """Call an agent, which answers so from now on; return when it was asked."""
        agent = self._agents[at]
        agent.answer, before = answer, len(agent.asked)
        self._calls.begin(1, LONG, "")
        self._links[at].call(CallFrame(1, str(at), "call", "", LONG))
        until(lambda: len(agent.asked) > before)


def test_silence_of_all_hosts_that_answered_ends_the_driver() -> None:
    silence = Silence(FakeAgent(), FakeAgent())
    silence.call(0, "answer")
    silence.call(1, AgentAway("away"))
    assert not silence.ended.is_set()

    silence.call(0, AgentAway("away"))
    assert silence.ended.wait(GUARD)


def test_hosts_are_asked_before_they_count_as_silent() -> None:
    other = FakeAgent()
    silence = Silence(FakeAgent(), other)
    silence.call(0, "answer")
    silence.call(1, "answer")

    silence.call(0, AgentAway("away"))
    until(lambda: ("hello", "") in other.asked)
    assert not silence.ended.is_set()

    silence.call(1, AgentAway("away"))
    assert silence.ended.wait(GUARD)
