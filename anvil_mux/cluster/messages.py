"""The messages between anvil-mux and the agent of a host: plain values, whoever carries them.

A call names its owner: the anvil-mux that claimed the host, with the epoch of its claim. An agent carries
out changes only for the owner with the highest epoch that claimed it, so an anvil-mux that was taken over
cannot evict what its successor loads.

Messages cross as bytes, which only the two ends read: both must be of one version of anvil-mux, and
``hello``, which is made of text alone, says so before anything else is read.
"""

from __future__ import annotations

import pickle
from typing import NamedTuple

from anvil_mux.errors import BackendError, Cancelled, ConfigError, LoadError, MuxError


class Owner(NamedTuple):
    """The anvil-mux that a host belongs to. Of two owners the greater one has the host."""

    epoch: int
    id: str
    """The same in every run on one state folder."""
    name: str = ""
    """The owner as people know it: its project, machine and process."""


class AgentCall(NamedTuple):
    """One method of an agent, called by an owner."""

    owner: Owner
    method: str
    args: tuple[object, ...] = ()


class PlainError(NamedTuple):
    """An error of ours, in plain values."""

    kind: str
    message: str
    log: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    retry_after: float | None = None


class AgentAnswer(NamedTuple):
    """The answer to a call."""

    instance: str
    """The run of the agent: another one knows nothing of steps that were begun."""
    value: object = None
    error: PlainError | None = None


class Fenced(MuxError):
    """Another anvil-mux has claimed the host since; ``message`` says which."""


class Claimed(MuxError):
    """Another anvil-mux has the host, and ``--takeover`` was not given; ``message`` says which."""


class UnknownStep(MuxError):
    """The agent knows no step of that number: it was started anew since."""


def write(message: AgentCall | AgentAnswer) -> bytes:
    """Return a message as it crosses."""
    return pickle.dumps(message)


def read_call(data: bytes) -> AgentCall:
    """Return the call that crossed."""
    found = pickle.loads(data)
    assert isinstance(found, AgentCall)
    return found


def read_answer(data: bytes) -> AgentAnswer:
    """Return the answer that crossed."""
    found = pickle.loads(data)
    assert isinstance(found, AgentAnswer)
    return found


def plain_error(error: Exception) -> PlainError:
    """Return an error as it crosses; foreign ones become errors of a backend."""
    if not isinstance(error, MuxError):
        return PlainError("BackendError", f"{type(error).__name__}: {error}")
    return PlainError(
        type(error).__name__,
        getattr(error, "reason", error.message),
        tuple(getattr(error, "log", ())),
        tuple(getattr(error, "problems", ())),
        error.retry_after,
    )


def error_of(error: PlainError) -> MuxError:
    """Return the error that crossed."""
    match error.kind:
        case "LoadError":
            return LoadError(error.message, log=error.log, retry_after=error.retry_after)
        case "ConfigError":
            return ConfigError(error.problems)
        case "Cancelled":
            return Cancelled(error.message)
        case "Fenced":
            return Fenced(error.message)
        case "Claimed":
            return Claimed(error.message)
        case "UnknownStep":
            return UnknownStep(error.message)
    return BackendError(error.message)
