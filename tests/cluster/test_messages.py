"""What crosses between anvil-mux and an agent comes out as it went in."""

import os
import pickle
from dataclasses import replace

import pytest

from anvil_mux.cluster import messages
from anvil_mux.cluster.messages import (
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
from anvil_mux.config.config import Backend, Gpu, Service
from anvil_mux.config.diagnostic import Diagnostic
from anvil_mux.config.profile import Profile
from anvil_mux.errors import BackendError, Cancelled, ConfigError, LoadError
from anvil_mux.host.seam import (
    Awake,
    Evicted,
    GpusSeen,
    HostConfig,
    HostGpu,
    HostNews,
    Inventory,
    Loaded,
    LoadSaid,
    OtherProcess,
    PhaseTook,
    Seen,
    ServiceEnded,
    Unfit,
)


def test_a_call_and_its_answer_cross():
    call = AgentCall(Owner(3, "a", "lab on alpha"), "evict", (Backend("m", "m"), "stop"))
    assert messages.read_call(messages.write(call)) == call
    answer = AgentAnswer("run", Evicted("stop", {"0": 0}))
    assert messages.read_answer(messages.write(answer)) == answer


@pytest.mark.parametrize(
    "error",
    [
        LoadError("no image", log=["a", "b"], retry_after=7.0),
        ConfigError(["x: is wrong", "y: too"]),
        ConfigError([Diagnostic("x: is wrong", write="x: 1", page="cluster.md")]),
        Cancelled("by hand"),
        BackendError("still runs"),
        Fenced("by beta"),
        Claimed("by beta"),
        UnknownStep("4"),
        NotConfigured("anew"),
        Unreadable("no"),
    ],
)
def test_an_error_crosses_with_all_that_it_says(error):
    answer = messages.read_answer(messages.write(AgentAnswer("run", error=messages.plain_error(error))))
    came = messages.error_of(answer.error)
    assert type(came) is type(error)
    assert came.message == error.message
    for field in ("log", "problems", "retry_after"):
        assert getattr(came, field, None) == getattr(error, field, None)


def test_a_mistake_crosses_as_the_failure_of_a_backend():
    error = messages.error_of(messages.plain_error(ValueError("oops")))
    assert isinstance(error, BackendError)
    assert "oops" in error.message


def test_of_two_owners_the_one_of_the_higher_epoch_has_the_host():
    assert Owner(2, "a") > Owner(1, "b")
    assert Owner(2, "b") > Owner(2, "a")


BACKEND = replace(
    Backend("m.0", "m", ("0",), host="b", profile=Profile(((1.0, 2.0),), ((1, ((1.0, 2.0),)),))),
    service=Service(command=("serve",), environment=(("A", "b"),), digest="d"),
)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [BACKEND],
        HostConfig((BACKEND,), (Gpu("0", 1, host="b"),), composed="{}"),
        Inventory((HostGpu("0", "GPU-1", "H100", 80),), 7, "10.0.0.2", ("stop",)),
        Loaded("http://a", "stop"),
        Evicted("stop", {"0": 1}, 2, {"0": 3}, "died", ("log",)),
        Awake("http://a"),
        Unfit("no"),
        StepState(True, "x"),
        [
            HostNews(1, ServiceEnded("a", "why", ("l",), 3)),
            HostNews(2, GpusSeen({"0": Seen(1, 2, {"a": None}, (OtherProcess("0", 7, 8),))})),
            HostNews(3, LoadSaid("a", "reading", 0.5)),
            HostNews(4, PhaseTook("a", "load", 0.25)),
        ],
    ],
)
def test_whatever_passes_the_seam_crosses(value):
    answer = AgentAnswer("run", value)
    came = messages.read_answer(messages.write(answer))
    assert came == answer
    if isinstance(value, HostConfig):
        assert came.value.backends[0].service.digest == "d"


class Evil:
    def __init__(self, *what):
        self.what = what

    def __reduce__(self):
        return self.what


@pytest.mark.parametrize(
    "what",
    [
        (os.system, ("touch /tmp/never",)),
        (eval, ("1",)),
        (getattr, (Backend, "__subclasses__")),
        (exec, ("raise SystemExit",)),
        (pickle.loads, (b"",)),
    ],
)
def test_a_message_that_names_anything_else_runs_nothing(what):
    evil = pickle.dumps(AgentCall(Owner(1, "a"), "load", (Evil(*what),)))
    with pytest.raises(Unreadable, match="a message cannot hold"):
        messages.read_call(evil)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"GET / HTTP/1.1\r\n\r\n", pickle.dumps(1), pickle.dumps(AgentAnswer("run"))],
)
def test_bytes_that_are_no_call_are_refused(data):
    with pytest.raises(Unreadable):
        messages.read_call(data)


def test_errors_and_enclosing_modules_are_no_records():
    for name in (b"canvil_mux.errors\nMuxError\n.", b"canvil_mux.host.seam\nMapping\n."):
        with pytest.raises(Unreadable, match="a message cannot hold"):
            messages.read_call(name)
