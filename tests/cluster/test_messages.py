"""What crosses between anvil-mux and an agent comes out as it went in."""

import pytest

from anvil_mux.cluster import messages
from anvil_mux.cluster.messages import AgentAnswer, AgentCall, Claimed, Fenced, Owner, UnknownStep
from anvil_mux.config.config import Backend
from anvil_mux.errors import BackendError, Cancelled, ConfigError, LoadError
from anvil_mux.host.seam import Evicted


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
        Cancelled("by hand"),
        BackendError("still runs"),
        Fenced("by beta"),
        Claimed("by beta"),
        UnknownStep("4"),
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
