"""The messages between anvil-mux and the agent of a host: plain values, whoever carries them.

A call names its owner: the anvil-mux that claimed the host, with the epoch of its claim. An agent carries
out changes only for the owner with the highest epoch that claimed it, so an anvil-mux that was taken over
cannot evict what its successor loads.

Messages cross as bytes, which only the two ends read: both must be of one version of anvil-mux, and
``hello``, which is made of text alone, says so before anything else is read. Bytes that name anything but our
plain records are refused before that is made, so reading them runs nothing.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from anvil_mux.config import config, presets, profile
from anvil_mux.errors import BackendError, Cancelled, ConfigError, LoadError, MuxError
from anvil_mux.host import seam

T = TypeVar("T")


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


class Unreadable(MuxError):
    """The bytes are no message of this version."""


class Fenced(MuxError):
    """Another anvil-mux has claimed the host since; ``message`` says which."""


class Claimed(MuxError):
    """Another anvil-mux has the host, and ``--takeover`` was not given; ``message`` says which."""


class UnknownStep(MuxError):
    """The agent knows no step of that number: it was started anew since."""


class NotConfigured(MuxError):
    """The agent has no configuration: it was started anew since."""


def write(message: AgentCall | AgentAnswer) -> bytes:
    """Return a message as it crosses."""
    return pickle.dumps(message)


def read_call(data: bytes) -> AgentCall:
    """Return the call that crossed."""
    return _read(data, AgentCall)


def read_answer(data: bytes) -> AgentAnswer:
    """Return the answer that crossed."""
    return _read(data, AgentAnswer)


def _read(data: bytes, kind: type[T]) -> T:
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except Unreadable:
        raise
    except Exception as error:  # bytes that are no pickle raise whatever they meet
        raise Unreadable(f"these bytes are no message: {type(error).__name__}: {error}") from None
    if not isinstance(found, kind):
        raise Unreadable(f"this is no {kind.__name__}: {type(found).__name__}")
    return found


class _Unpickler(pickle.Unpickler):
    """Makes our plain records, and nothing else that has a name."""

    def find_class(self, module: str, name: str) -> type:
        if found := _RECORDS.get((module, name)):
            return found
        raise Unreadable(f"a message cannot hold {module}.{name}")


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
_RECORDS = {
    (module.__name__, name): each
    for module in (config, presets, profile, seam, sys.modules[__name__])
    for name, each in vars(module).items()
    if isinstance(each, type)
    and each.__module__ == module.__name__
    and (dataclasses.is_dataclass(each) or issubclass(each, tuple))
}
"""The records that a message may hold, by module and name."""
