"""The agent of a host: who may change it, and steps that outlive who began them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import anvil_mux
from anvil_mux import state
from anvil_mux.cluster import agent as agent_module
from anvil_mux.cluster import frames
from anvil_mux.cluster.agent import Agent, _lacks
from anvil_mux.cluster.frames import (
    AgentAnswer,
    AgentCall,
    Claimed,
    Fenced,
    NotConfigured,
    Owner,
    StepState,
    UnknownStep,
    Unreadable,
)
from anvil_mux.config.config import Backend
from anvil_mux.config.kinds import Diagnostic
from anvil_mux.config.service import Service
from anvil_mux.errors import BackendError, Cancelled, ConfigError, LoadError, MuxError
from anvil_mux.host.processes import TAIL_BYTES
from anvil_mux.host.seam import (
    Evicted,
    Host,
    HostConfig,
    HostGpu,
    HostNews,
    Inventory,
    Loaded,
    PhaseTook,
    ServiceEnded,
)
from tests.cluster.answers import returned_by, value_of

GUARD = 30.0
ROOT = Path(__file__).resolve().parent.parent.parent
ENGINE = (str(ROOT / "bin" / "demo-engine"), "--model", "m", "--load-seconds", "0.1", "--host", "$HOST")
M = Backend("m.b", "m", host="b", load_timeout=GUARD, service=Service(command=ENGINE))
CONFIG = HostConfig((M,), project="p-b", runtime="process")

FIRST = Owner(1, "first", "the lab on alpha")
AGAIN = Owner(2, "first", "the lab on alpha")
SECOND = Owner(2, "second", "the office on beta")


@dataclass
class FakeHost:
    """A host whose loads end when a test says so."""

    config: HostConfig
    calls: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    cancelled: set[int] = field(default_factory=set)
    happened: list[HostNews] = field(default_factory=list)
    lacks_images: bool = False
    is_closed: bool = False
    name = "fake"

    def happens(self, backend: str) -> None:
        number = self.happened[-1].number + 1 if self.happened else 1
        self.happened.append(HostNews(number, PhaseTook(backend, "load", 0.5)))

    def reconfigure(self, config: HostConfig) -> None:
        if self.lacks_images:
            raise ConfigError(["image x is not present"])
        self.config = config

    def load(self, backend: Backend, how: str, number: int) -> Loaded:
        self.calls.append(f"load {number}")
        assert self.gate.wait(GUARD)
        if number in self.cancelled:
            raise Cancelled(f"the load of {backend.name} was cancelled")
        if how != "stop":
            raise LoadError("no such level", log=["a", "b"])
        return Loaded("http://10.0.0.2:1", how)

    def cancel(self, backend: Backend, number: int) -> None:
        self.cancelled.add(number)
        self.gate.set()

    def evict(self, backend: Backend, how: str) -> Evicted:
        self.calls.append("evict")
        return Evicted(how)

    def stop(self, backend: Backend) -> None:
        self.calls.append("stop")

    def running(self) -> list[str]:
        return [backend.name for backend in self.config.backends]

    def read_ahead(self, backends: Sequence[str]) -> None:
        self.calls.append(f"read {' '.join(backends)}")

    def problem(self) -> str:
        return ""

    def log_tail(self, backend: Backend, lines: int = 20) -> list[str]:
        return ["said"]

    def news(self, after: int, timeout: float) -> list[HostNews]:
        self.happened = [each for each in self.happened if each.number > after]
        return list(self.happened)

    def close(self) -> None:
        self.is_closed = True


class Caller:
    """An anvil-mux as the agent sees it."""

    def __init__(self, agent: Agent, owner: Owner) -> None:
        self.agent = agent
        self.owner = owner
        self.begun: dict[object, Any] = {}

    def __call__(self, method: str, *args: object) -> Any:
        if method == "begin":
            number, step, _ = args
            self.begun[number] = step
        answer = self.agent.call(frames.dump(AgentCall(self.owner, method, args)))
        assert frames.read(AgentAnswer, answer, is_foreign=True).instance == self.agent.hello()["instance"]
        return value_of(method, answer)

    def result(self, number: int) -> Any:
        state = self("result", number, GUARD)
        assert state.done
        return frames.of(returned_by(self.begun[number]), state.value)

    def step(self, number: int, method: str, *args: object) -> Any:
        self("begin", number, method, args)
        return self.result(number)


class Rig:
    """Agents of host b, whose hosts are stand-ins, one after the other on one state folder."""

    def __init__(self, folder: Path) -> None:
        self.environ = {**os.environ, "XDG_STATE_HOME": str(folder)}
        self.hosts: list[FakeHost] = []
        self._agents: list[Agent] = []

    def agent(self, make: Callable[[HostConfig, int], Host] | None = None, **special: Any) -> Agent:
        agent = Agent("b", "127.0.0.2", environ=self.environ, make=make or self._make, **special)
        self._agents.append(agent)
        return agent

    def owned(self, agent: Agent | None = None, owner: Owner = FIRST) -> Caller:
        """An owner that has configured the host."""
        mux = Caller(agent or self.agent(), owner)
        mux("claim", owner.name, False)
        mux("reconfigure", CONFIG)
        return mux

    @property
    def host(self) -> FakeHost:
        return self.hosts[-1]

    def _make(self, config: HostConfig, lock: int) -> Host:
        assert os.fstat(lock)
        self.hosts.append(FakeHost(config))
        return self.hosts[-1]  # type: ignore[return-value]

    def close(self) -> None:
        for host in self.hosts:
            host.gate.set()
        for agent in self._agents:
            agent.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


# Claims


def test_the_greeting_is_text_and_names_the_owner(rig: Rig):
    agent = rig.agent()
    before = agent.hello()
    assert (before["name"], before["address"]) == ("b", "127.0.0.2")
    assert (before["epoch"], before["owner"]) == ("0", "")
    assert before["version"] == anvil_mux.__version__
    Caller(agent, FIRST)("claim", "the lab", False)
    after = agent.hello()
    assert (after["epoch"], after["owner"], after["owner_id"]) == ("1", "the lab", "first")
    assert {type(each) for pair in after.items() for each in pair} == {str}


def test_another_one_is_refused_unless_it_takes_over_or_the_host_was_given_up(rig: Rig):
    first = rig.owned()
    second = Caller(first.agent, SECOND)
    with pytest.raises(Claimed, match="belongs to the lab on alpha; --takeover"):
        second("claim", SECOND.name, False)
    first("release")
    assert first.agent.hello()["owner"] == ""
    second("claim", SECOND.name, False)
    third = Caller(first.agent, Owner(3, "third"))
    third("claim", "", True)
    with pytest.raises(Fenced, match="belongs to the anvil-mux third, in epoch 3"):
        second("running")


def test_the_same_one_may_claim_again_and_its_run_before_is_fenced_and_forgotten(rig: Rig):
    first = rig.owned()
    first.step(1, "evict", M, "stop")
    again = rig.owned(first.agent, AGAIN)
    with pytest.raises(UnknownStep):
        again("result", 1, 0.0)
    with pytest.raises(Fenced, match="the lab on alpha, in epoch 2"):
        first("begin", 1, "evict", (M, "stop"))
    with pytest.raises(Fenced, match="epoch 2"):
        first("claim", FIRST.name, True)
    again("claim", AGAIN.name, False)
    assert rig.host.calls == ["evict"]


@pytest.mark.parametrize("owner", [Owner(0, "z"), Owner(1, "alpha")])
def test_a_takeover_needs_a_greater_claim(rig: Rig, owner: Owner):
    first = rig.owned()
    with pytest.raises(Fenced, match="in epoch 1"):
        Caller(first.agent, owner)("claim", "", True)
    first("release")
    with pytest.raises(Fenced, match="in epoch 1"):
        Caller(first.agent, owner)("claim", "", False)


CHANGES = [
    ("reconfigure", CONFIG),
    ("begin", 1, "evict", (M, "stop")),
    ("result", 1, 0.0),
    ("settle", 0.0),
    ("news", 0, 0.0),
    ("running",),
    ("orphans",),
    ("cancel", M, 1),
    ("read_ahead", ("m.b",)),
    ("watch_gpus",),
    ("remember", "x"),
    ("release",),
]


@pytest.mark.parametrize("call", CHANGES, ids=lambda call: call[0])
def test_who_was_taken_over_changes_nothing(rig: Rig, call: tuple[Any, ...]):
    first = rig.owned()
    Caller(first.agent, SECOND)("claim", SECOND.name, True)
    with pytest.raises(Fenced, match="the office on beta"):
        first(*call)
    assert rig.host.calls == []
    assert not rig.host.cancelled


def test_a_host_that_nobody_has_claimed_is_changed_by_nobody(rig: Rig):
    with pytest.raises(Fenced, match="host b belongs to nobody"):
        Caller(rig.agent(), FIRST)("reconfigure", CONFIG)
    assert rig.hosts == []


def test_anybody_may_look(rig: Rig):
    first = rig.owned()
    first("remember", "what loads cost")
    other = Caller(first.agent, Owner(0, "nobody"))
    assert other("recall") == "what loads cost"
    assert other("log_tail", M, 5) == ["said"]
    assert isinstance(other("inventory"), Inventory)
    assert other("inventory").address == "127.0.0.2"


def test_a_driver_that_is_loaded_later_is_seen_and_one_that_hangs_holds_up_one_call(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rig.owned()
    gpu = HostGpu("0", "GPU-0", "fake", 8)
    found: list[HostGpu] = []
    hangs, is_held_up, gate = threading.Event(), threading.Event(), threading.Event()

    def read(address: str) -> Inventory:
        if hangs.is_set():
            is_held_up.set()
            assert gate.wait(GUARD)
        return Inventory(tuple(found), None, address)

    monkeypatch.setattr(agent_module, "inventory", read)
    monkeypatch.setattr(agent_module, "READ_SECONDS", 0.01)
    assert first("inventory").gpus == ()
    found.append(gpu)
    assert first("inventory").gpus == (gpu,)
    hangs.set()
    held_up = threading.Thread(target=first, args=("inventory",))
    held_up.start()
    assert is_held_up.wait(GUARD)
    assert first("inventory").gpus == (gpu,)
    gate.set()
    held_up.join()


def test_a_host_whose_disk_has_become_full_may_be_claimed_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.owned().agent.close()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(state, "write_whole", full)
    rig.owned(owner=FIRST).agent.close()
    later = rig.owned(owner=FIRST._replace(epoch=7))
    later.agent.close()
    agent = rig.agent()
    assert (agent.hello()["epoch"], agent.hello()["owner_id"]) == ("7", FIRST.id)
    with pytest.raises(Fenced):
        Caller(agent, FIRST)("claim", FIRST.name, True)


def test_a_host_that_nobody_has_claimed_before_its_disk_is_full_says_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(state, "write_whole", full)
    with pytest.raises(BackendError, match="owner cannot be written: No space left on device"):
        rig.owned()


def test_the_owner_outlives_the_agent(rig: Rig):
    first = rig.owned()
    first("remember", "what loads cost")
    Caller(first.agent, SECOND)("claim", SECOND.name, True)
    first.agent.close()
    later = rig.agent()
    assert later.hello()["epoch"] == "2"
    with pytest.raises(Fenced, match="the office on beta"):
        Caller(later, FIRST)("reconfigure", CONFIG)
    second = Caller(later, SECOND)
    assert second("recall") == "what loads cost"
    second("reconfigure", CONFIG)


def test_of_two_agents_of_one_name_one_changes_nothing_until_the_other_has_ended(rig: Rig):
    first = rig.owned()
    later = Caller(rig.agent(), SECOND)
    with pytest.raises(BackendError, match="another agent of host b, or a command that it began, still runs"):
        later("claim", SECOND.name, True)
    first.agent.close()
    later("claim", SECOND.name, True)


@pytest.mark.parametrize("content", ['{"epoch": "x"}', "", '{"epoch": 9}', "[" * 100_000, None])
def test_a_note_of_the_owner_that_cannot_be_read_is_no_invitation(
    rig: Rig, tmp_path: Path, content: str | None
):
    note = tmp_path / "anvil-mux" / "agent-b" / "owner"
    note.parent.mkdir(parents=True)
    if content is None:
        note.mkdir()
    else:
        note.write_text(content)
    mux = Caller(rig.agent(), FIRST)
    for _ in range(2):
        with pytest.raises(BackendError, match=r"owner cannot be read .* remove that file there if no other"):
            mux("claim", "", True)
        with pytest.raises(BackendError, match="owner cannot be read"):
            mux("reconfigure", CONFIG)
    if content is None:
        note.rmdir()
    else:
        note.unlink()
    mux("claim", "", False)


# Steps


def test_a_step_that_is_begun_twice_is_performed_once_and_its_result_is_kept_for_its_owner(rig: Rig):
    mux = rig.owned()
    for _ in range(2):
        mux("begin", 7, "load", (M, "stop", 3))
    assert mux("result", 7, 0.0) == StepState(False)
    rig.host.gate.set()
    assert mux.result(7) == Loaded("http://10.0.0.2:1", "stop")
    mux("begin", 7, "load", (M, "stop", 3))
    mux("claim", FIRST.name, False)
    assert mux.result(7) == Loaded("http://10.0.0.2:1", "stop")
    assert rig.host.calls == ["load 3"]


def test_the_error_of_a_step_is_told_as_it_was(rig: Rig):
    mux = rig.owned()
    rig.host.gate.set()
    with pytest.raises(LoadError, match="no such level") as caught:
        mux.step(1, "load", M, "sleep", 1)
    assert caught.value.log == ("a", "b")
    with pytest.raises(Unreadable, match="evict takes 2 values, not 4"):
        mux.step(2, "evict", M, "stop", "too", "many")
    with pytest.raises(Unreadable, match="this is no str"):
        mux.step(3, "evict", M, 7)


def test_a_step_of_an_agent_that_was_started_anew_is_not_known(rig: Rig):
    mux = rig.owned()
    rig.host.gate.set()
    mux.step(1, "load", M, "stop", 1)
    mux.agent.close()
    anew = Caller(rig.agent(), FIRST)
    with pytest.raises(UnknownStep):
        anew("result", 1, 0.0)
    with pytest.raises(NotConfigured, match="no configuration yet"):
        anew("begin", 2, "evict", (M, "stop"))
    anew("reconfigure", CONFIG)
    assert anew.step(2, "evict", M, "stop") == Evicted("stop")


def test_a_takeover_in_the_middle_of_a_load(rig: Rig):
    first = rig.owned()
    first("begin", 1, "load", (M, "stop", 9))
    second = Caller(first.agent, SECOND)
    second("claim", SECOND.name, True)
    with pytest.raises(Fenced):
        first("begin", 2, "evict", (M, "stop"))
    with pytest.raises(Fenced):
        first("result", 1, 0.0)
    second("reconfigure", CONFIG)
    with pytest.raises(BackendError, match=r"m\.b: a step of the owner before is still under way"):
        second("begin", 1, "load", (M, "stop", 1))
    assert second("settle", GUARD) is True
    assert rig.host.cancelled == {9}
    assert second.step(2, "evict", M, "stop") == Evicted("stop")
    assert rig.host.calls == ["load 9", "evict"]


def test_settling_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    mux = rig.owned()
    monkeypatch.setattr(rig.host, "cancel", lambda backend, number: None)
    mux("begin", 1, "load", (M, "stop", 1))
    assert mux("settle", 0.0) is False
    rig.host.gate.set()
    assert mux("settle", GUARD) is True


def test_calls_that_wait_for_steps_leave_room_for_all_others(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent_module, "MOST_WAITING", 1)
    mux = rig.owned()
    mux("begin", 1, "load", (M, "stop", 1))
    waiting = threading.Thread(target=mux, args=("result", 1, GUARD))
    waiting.start()
    while not mux.agent._steps.waiting:
        pass
    assert mux("result", 1, GUARD) == StepState(False, was_awaited=False)
    rig.host.gate.set()
    waiting.join(GUARD)
    assert mux.result(1) == Loaded("http://10.0.0.2:1", "stop")
    assert mux("result", 1, GUARD).was_awaited


def test_the_last_results_are_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent_module, "MOST_KEPT", 3)
    mux = rig.owned()
    for number in range(5):
        mux.step(number, "evict", M, "stop")
    with pytest.raises(UnknownStep):
        mux("result", 0, 0.0)
    assert mux.result(1) == Evicted("stop")


def test_a_load_can_be_cancelled_and_weights_are_read_ahead_by_the_names_of_backends(rig: Rig):
    mux = rig.owned()
    mux("read_ahead", ("m.b", "other"))
    assert rig.host.calls == ["read m.b other"]
    mux("begin", 1, "load", (M, "stop", 4))
    mux("cancel", M, 4)
    with pytest.raises(Cancelled):
        mux.result(1)


# What is refused


@pytest.mark.parametrize(
    "call",
    [
        ("close",),
        ("_make", CONFIG, 0),
        ("reconfigure_all",),
        ("load", M, "stop", 1),
        ("begin", 1, "close", (M,)),
        ("begin", 1, "reconfigure", (CONFIG,)),
        ("begin", 1, "load", ("m.b", "stop", 1)),
        ("begin", 1, "load", (replace(M, name="other"), "stop", 1)),
        ("running", "too", "many"),
    ],
    ids=str,
)
def test_nothing_but_its_methods_is_called(rig: Rig, call: tuple[Any, ...]):
    mux = rig.owned()
    with pytest.raises((BackendError, Unreadable)):
        mux(*call)
    assert rig.host.calls == []
    assert not rig.host.is_closed


@pytest.mark.parametrize("name", ["../../etc/x", "..", "/etc/passwd", "--project-directory", "a b", ""])
def test_no_name_leads_out_of_the_state_folder_or_is_an_option(rig: Rig, name: str):
    mux = rig.owned()
    bad = replace(M, name=name)
    optional = replace(M, service=Service(name=name or "-"))
    for call in (
        ("log_tail", bad, 5),
        ("begin", 1, "stop", (bad,)),
        ("begin", 1, "stop", (optional,)),
        ("reconfigure", replace(CONFIG, backends=(bad,))),
        ("reconfigure", replace(CONFIG, project=name)),
        ("lacks", replace(CONFIG, backends=(optional,))),
        ("lacks", replace(CONFIG, project=name)),
    ):
        with pytest.raises(BackendError, match="is no name that can be used here"):
            mux(*call)
    with pytest.raises(MuxError, match="is no name"):
        Agent(name, "127.0.0.2")


def test_a_crafted_call_changes_nothing_and_is_answered(rig: Rig):
    agent = rig.agent()
    call = AgentCall(FIRST, "claim", ({"name": "x"}, False))
    for data in (frames.dump(call), b"", b"GET / HTTP/1.1", b"\x80\x04.", b"[" * 10_000):
        answer = frames.read(AgentAnswer, agent.call(data), is_foreign=True)
        assert answer.error
        assert answer.error.kind == "Unreadable"
    assert agent.hello()["epoch"] == "0"


# Configurations


def test_a_host_is_made_once_and_configured_anew_unless_its_project_or_runtime_is_another(rig: Rig):
    mux = rig.owned()
    assert mux("running") == ["m.b"]
    mux("reconfigure", replace(CONFIG, backends=()))
    assert mux("running") == []
    assert len(rig.hosts) == 1
    mux("reconfigure", replace(CONFIG, project="other-b"))
    mux("reconfigure", replace(CONFIG, project="other-b", runtime="compose"))
    assert [host.is_closed for host in rig.hosts] == [True, True, False]


def test_what_would_refuse_a_reload_does_not_refuse_a_new_owner(rig: Rig):
    mux = rig.owned()
    rig.host.lacks_images = True
    with pytest.raises(ConfigError, match="image x is not present"):
        mux("reconfigure", CONFIG)
    again = rig.owned(mux.agent, AGAIN)
    assert [host.is_closed for host in rig.hosts] == [True, False]
    rig.host.lacks_images = True
    with pytest.raises(ConfigError):
        again("reconfigure", CONFIG)


def test_a_host_that_cannot_be_made_leaves_the_one_before(rig: Rig):
    def fail(config: HostConfig, lock: int) -> Host:
        raise BackendError("no disk")

    mux = rig.owned()
    mux.agent._make = fail
    with pytest.raises(BackendError, match="no disk"):
        mux("reconfigure", replace(CONFIG, project="other-b"))
    assert mux("running") == ["m.b"]
    assert not rig.host.is_closed


# News


def test_the_numbers_of_news_go_on_over_hosts(rig: Rig):
    mux = rig.owned()
    rig.host.happens("one")
    rig.host.happens("two")
    assert [each.number for each in mux("news", 0, 0.0)] == [1, 2]
    assert [each.number for each in mux("news", 1, 0.0)] == [2]
    mux("reconfigure", replace(CONFIG, project="other-b"))
    rig.host.happens("three")
    assert [(each.number, each.what.backend) for each in mux("news", 2, 0.0)] == [(3, "three")]


def test_news_with_the_last_lines_of_many_engines_come_in_answers_that_can_be_read(rig: Rig):
    mux = rig.owned()
    last_words = ("\ufffd" * TAIL_BYTES,)
    ended = [HostNews(number, ServiceEnded(f"m{number}.b", "died", last_words)) for number in range(1, 13)]
    rig.host.happened = ended
    found = list[HostNews]()
    while more := mux("news", found[-1].number if found else 0, 0.0):
        found += more
    assert found == ended


def test_a_new_owner_hears_nothing_of_what_was_before(rig: Rig):
    mux = rig.owned()
    rig.host.happens("one")
    again = rig.owned(mux.agent, AGAIN)
    assert again("news", 0, 0.0) == []
    rig.host.happens("two")
    assert [each.what.backend for each in again("news", 0, 0.0)] == ["two"]


def test_what_a_host_lacks_crosses_as_plain_text(monkeypatch: pytest.MonkeyPatch):
    lacking = Diagnostic("service a: image x is not present", write="docker pull x", page="running.md")
    monkeypatch.setattr("anvil_mux.host.project.missing_images", lambda config: [lacking])
    found = _lacks(CONFIG)
    assert (found, type(found[0])) == ([str(lacking)], str)
