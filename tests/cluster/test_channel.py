"""The way to agents is a child process: its answers, its silence, its end, and the next one."""

from __future__ import annotations

import sys
import textwrap
import threading

import pytest

from anvil_mux.clock import mistakes
from anvil_mux.cluster import channel
from anvil_mux.cluster.channel import AgentSilent, ChildControl
from anvil_mux.cluster.frames import Node
from anvil_mux.errors import BackendError
from tests.running import seen

CHILD = """
import sys, threading
from anvil_mux.cluster.frames import CallFrame, Node, dump, read_frame, write_frame
lock = threading.Lock()
def say(number, ok, text):
    with lock:
        write_frame(sys.stdout.buffer, {"number": number, "ok": ok, "text": text})
"""
ECHO = """
say(0, True, "ready")
while (frame := read_frame(sys.stdin.buffer, CallFrame)) is not None:
    number, host, method, text, timeout = frame
    if method == "end":
        sys.exit(3)
    if method == "nodes":
        a = Node("a", "127.0.0.2", (("zone", "x"),))
        say(number, True, dump([a, a._replace(name="b", is_alive=False)]))
    elif method == "fail":
        say(number, False, "its agent has died")
    elif method != "hang":
        say(number, True, f"{host} {method} {text}")
"""


@pytest.fixture(autouse=True)
def _no_margin(monkeypatch):
    monkeypatch.setattr(channel, "MARGIN_SECONDS", 0.0)


@pytest.fixture
def control(request):
    opened = []

    def make(body, **settings):
        made = ChildControl([sys.executable, "-c", CHILD + textwrap.dedent(body)], **settings)
        opened.append(made)
        return made

    yield make
    for each in opened:
        each.close()


def test_calls_are_answered_by_the_child_or_silent_alone(control, tmp_path, monkeypatch):
    log = tmp_path / "child.log"
    log.write_text("before\n")
    reached = control("print('a warning', file=sys.stderr, flush=True)\n" + ECHO, log=log)
    assert reached.call("a", "hello", "x", 10.0) == "a hello x"
    assert log.read_text() == "before\na warning\n"
    assert reached.nodes() == [Node("a", "127.0.0.2", (("zone", "x"),))]
    with pytest.raises(AgentSilent, match=r"no answer within 0\.01 s"):
        reached.call("a", "hang", "", 0.01)
    with pytest.raises(AgentSilent, match="its agent has died"):
        reached.call("a", "fail", "", 10.0)
    with monkeypatch.context() as patched:
        patched.setattr(channel.frames, "LONGEST", 100)
        with pytest.raises(BackendError, match="a call of 51 characters is too long"):
            reached.call("a", "ask", "x" * 51, 10.0)
    assert reached.call("a", "ask", "1", 10.0) == "a ask 1"
    reached.close()
    assert reached.pid == 0
    with pytest.raises(AgentSilent):
        reached.call("a", "ask", "1", 1.0)


def test_calls_of_several_threads_each_get_their_own_answer(control):
    reached = control(ECHO)
    answers = {}
    threads = [
        threading.Thread(target=lambda n=n: answers.update({n: reached.call("a", "ask", str(n), 10.0)}))
        for n in range(20)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert answers == {n: f"a ask {n}" for n in range(20)}


def test_calls_end_at_once_when_the_child_does_and_the_next_child_is_reached(control):
    moment = [0.0]
    reached = control(ECHO, now=lambda: moment[0])
    reached.open()
    first = reached.pid
    with pytest.raises(AgentSilent, match="has ended"):
        reached.call("a", "end", "", 60.0)
    with pytest.raises(AgentSilent, match="has ended"):
        reached.call("a", "ask", "1", 60.0)  # not at once: it may end again
    moment[0] = 10.0
    assert reached.call("a", "ask", "2", 10.0) == "a ask 2"
    assert reached.pid not in (0, first)


def test_a_child_that_is_of_no_use_says_why_and_is_tried_again_later(control):
    moment = [0.0]
    reached = control('say(0, False, "the token is wrong")', now=lambda: moment[0])
    for _ in range(2):
        with pytest.raises(AgentSilent, match="the token is wrong"):
            reached.open()
    assert reached.problem == "the token is wrong"


@pytest.mark.parametrize("first", ["", 'say(0, True, "ready")\n'], ids=["before", "after"])
def test_child_that_hangs_is_ended_and_another_one_started(control, tmp_path, monkeypatch, first):
    monkeypatch.setattr(channel, "NODES_SECONDS", 0.05)
    moment, began = [0.0], tmp_path / "began"
    hangs = f"import pathlib\nif not (began := pathlib.Path({str(began)!r})).exists():\n"
    hangs += "".join(
        f"    {line}\n" for line in ("began.touch()", *first.splitlines(), "lock.acquire()", "lock.acquire()")
    )
    reached = control(hangs + ECHO, now=lambda: moment[0])
    reached.start()
    assert seen(began.exists, bool)
    child = reached.pid
    with pytest.raises(AgentSilent):
        reached.nodes()
    assert reached.pid == child
    moment[0] = channel.HUNG_SECONDS + 1.0
    with pytest.raises(AgentSilent):
        reached.nodes()
    assert seen(lambda: reached.pid, lambda pid: pid == 0) == 0
    moment[0] += 10.0
    monkeypatch.setattr(channel, "NODES_SECONDS", 10.0)
    assert [each.name for each in reached.nodes()] == ["a"]


def _raise_a_mistake(*_):
    raise RuntimeError("a mistake")


def _ask_on(control):
    """Call again and again: the reader may wait for an answer already, and has it yet."""
    while True:
        control.call("a", "ask", "1", 60.0)


@pytest.mark.parametrize("thread", ["cluster-read", "cluster-write"])
@pytest.mark.parametrize("body", [ECHO, ECHO + "threading.Event().wait()"])
def test_error_in_a_thread_of_the_channel_ends_its_calls(control, monkeypatch, thread, body):
    moment = [0.0]
    monkeypatch.setattr(channel, "END_SECONDS", 0.1)
    reached = control(body, now=lambda: moment[0])
    reached.open()
    first = reached.pid
    fails = "write_frame" if thread == "cluster-write" else "read_frame"
    with monkeypatch.context() as patched:
        patched.setattr(channel, fails, _raise_a_mistake)
        with pytest.raises(AgentSilent, match="has ended"):
            _ask_on(reached)
    assert "a mistake" in mistakes()[thread]
    moment[0] = 10.0
    assert reached.call("a", "ask", "2", 10.0) == "a ask 2"
    assert reached.pid not in (0, first)
    assert reached.call("a", "ask", "3", 10.0) == "a ask 3"  # the threads are done with the one before
    assert thread not in mistakes()
