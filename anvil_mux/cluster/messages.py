"""The messages between anvil-mux and the agent of a host: plain values, whoever carries them.

A call names its owner: the anvil-mux that claimed the host, with the epoch of its claim. An agent carries
out changes only for the owner with the highest epoch that claimed it, so an anvil-mux that was taken over
cannot evict what its successor loads.

Messages cross as JSON, which only the two ends read, field by field (frames.py): both must be of one version
of anvil-mux, and ``hello``, which is made of text alone, says so before anything else is read. The arguments
of a call stay plain until it is known which method they are for, as does the value of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from anvil_mux.cluster import frames
from anvil_mux.cluster.frames import Unreadable
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


class StepState(NamedTuple):
    """A step that was begun: whether it is over, and what came of it."""

    done: bool
    value: object = None
    was_awaited: bool = True
    """Whether the agent waited for its end; else it is to be asked again after a pause."""


class Fenced(MuxError):
    """Another anvil-mux has claimed the host since; ``message`` says which."""


class Claimed(MuxError):
    """Another anvil-mux has the host, and ``--takeover`` was not given; ``message`` says which."""


class UnknownStep(MuxError):
    """The agent knows no step of that number: it was started anew since."""


class NotConfigured(MuxError):
    """The agent has no configuration: it was started anew since."""


def write(message: AgentCall | AgentAnswer) -> str:
    """Return a message as it crosses."""
    return frames.dump(message)


def read_call(text: str | bytes) -> AgentCall:
    """Return the call that crossed."""
    call: AgentCall = frames.read(AgentCall, text)
    return call


def read_answer(text: str) -> AgentAnswer:
    """Return the answer that crossed, from a host that may say anything."""
    answer: AgentAnswer = frames.of(AgentAnswer, frames.parse(text, is_foreign=True))
    return answer


def plain_error(error: Exception) -> PlainError:
    """Return an error as it crosses; foreign ones become errors of a backend."""
    if not isinstance(error, MuxError):
        return PlainError("BackendError", f"{type(error).__name__}: {error}")
    return PlainError(
        type(error).__name__,
        str(getattr(error, "reason", error.message)),
        tuple(getattr(error, "log", ())),
        tuple([str(each) for each in getattr(error, "problems", ())]),
        error.retry_after,
    )


def error_of(error: PlainError) -> MuxError:
    """Return the error that crossed."""
    match error.kind:
        case "LoadError":
            return LoadError(error.message, log=error.log, retry_after=error.retry_after)
        case "ConfigError":
            return ConfigError(error.problems)
    return _PLAIN_ERRORS.get(error.kind, BackendError)(error.message)


_PLAIN_ERRORS: Mapping[str, type[MuxError]] = {
    each.__name__: each for each in (Cancelled, Fenced, Claimed, UnknownStep, NotConfigured, Unreadable)
}
