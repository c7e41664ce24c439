"""Values as JSON between processes: written whole, and read field by field into the types that are expected.

Nothing is made but what the reader names: text, numbers, lists, mappings and its own records. A record is an
object that has exactly its fields; where one of several may stand, it is the one that has these. On a pipe a
value is a frame: the length of its JSON in four bytes, and that.

The messages between anvil-mux and the agent of a host are such values, whoever carries them. A call names its
owner: the anvil-mux that claimed the host, with the epoch of its claim. An agent carries out changes only for
the owner with the highest epoch that claimed it, so an anvil-mux that was taken over cannot evict what its
successor loads. Both ends must be of one version of anvil-mux, and ``hello``, which is made of text alone,
says so before anything else is read. The arguments of a call stay plain until it is known which method they
are for, as does the value of an answer.
"""

from __future__ import annotations

import collections.abc
import json
import math
import struct
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypeVar, cast

from anvil_mux.errors import BackendError, Cancelled, ConfigError, LoadError, MuxError
from anvil_mux.protocol import foreign

LENGTH = struct.Struct(">I")
LONGEST = 64 << 20
"""Bytes of one value."""
LONGEST_ANSWER = 8 << 20
"""Characters of what a host answers; in a frame each may take six, which LONGEST allows."""

T = TypeVar("T")


class Unreadable(MuxError):
    """The bytes are no message of this version."""


# Values


def dump(value: object) -> str:
    """Return a value as JSON."""
    return json.dumps(_plain(value))


def _plain(value: object) -> object:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case tuple() if hasattr(value, "_fields"):
            return {name: _plain(each) for name, each in zip(value._fields, value, strict=True)}
        case tuple() | list():
            return [_plain(each) for each in value]
        case collections.abc.Mapping():
            return {str(key): _plain(each) for key, each in value.items()}
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    raise TypeError(f"{type(value).__name__} does not cross")


def parse(text: str | bytes, *, is_foreign: bool = False) -> object:
    """Return the plain value of a JSON text; Unreadable.

    ``is_foreign``: of a host, from which nothing is taken that others stumble over: numbers that are none,
    and halves of characters.
    """
    try:
        data = text.encode() if isinstance(text, str) else text
        if len(data) > (LONGEST_ANSWER if is_foreign else LONGEST):
            raise ValueError("it is too long")
        foreign.check(data, of_request=is_foreign)
        text = data.decode()
        if not is_foreign:
            return json.loads(text)
        if "\\ud" in text.lower():
            whole = json.dumps(json.loads(text), ensure_ascii=False)
            text = whole.encode(errors="replace").decode()
        return json.loads(text, parse_float=_finite, parse_constant=_no_number)
    except ValueError as error:
        raise Unreadable(f"these bytes are no message: {error}") from None


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def read(kind: type[T], text: str | bytes, *, is_foreign: bool = False) -> T:
    """Return the value of this type that a JSON text is; Unreadable. ``is_foreign``: see ``parse``."""
    return of(kind, parse(text, is_foreign=is_foreign))


def of(kind: type[T], value: object) -> T:
    """Return a plain value as one of this type; Unreadable if it is none. ``object``: as it is."""
    try:
        return cast(T, foreign.of(kind, value))
    except ValueError as error:
        raise Unreadable(str(error)) from None


def arguments(method: Callable[..., object], values: Sequence[object]) -> list[Any]:
    """Return plain values as the arguments that a method declares, but for an ``owner``; Unreadable."""
    kinds = [kind for name, kind in typing.get_type_hints(method).items() if name not in ("return", "owner")]
    if len(values) > len(kinds):
        raise Unreadable(f"{method.__name__} takes {len(kinds)} values, not {len(values)}")
    return [of(kind, value) for kind, value in zip(kinds, values, strict=False)]


# Frames on a pipe


class CallFrame(NamedTuple):
    """A call on its way to the child process that reaches a host, or is one."""

    number: int
    host: str
    method: str
    text: str
    timeout: float


class AnswerFrame(NamedTuple):
    """The answer of such a process: a text as it came, or why there is none."""

    number: int
    ok: bool
    text: str


class Node(NamedTuple):
    """A machine of the cluster that wants to be a host."""

    name: str
    address: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    problem: str = ""
    """Why it cannot be used, and what to do; ends a sentence."""
    is_alive: bool = True


def read_frame(file: BinaryIO, kind: type[T]) -> T | None:
    """Return the next value, of this type; None at the end of the pipe, also in the middle of a frame."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = file.read(length) if length <= LONGEST else b""
    return read(kind, data) if len(data) == length else None


def write_frame(file: BinaryIO, value: object) -> None:
    """Write a value whole; OSError where nobody reads any more."""
    data = dump(value).encode()
    file.write(LENGTH.pack(len(data)) + data)
    file.flush()


class AnswerPipe:
    """The pipe on which a child process answers calls. Any thread."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._writing = threading.Lock()

    def write(self, number: int, ok: bool, text: str) -> None:
        """Write an answer; where nobody reads it, whoever reads our input sees that."""
        with self._writing, suppress(OSError):
            write_frame(self._file, AnswerFrame(number, ok, text))


# Messages between anvil-mux and an agent


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


def plain_error(error: Exception) -> PlainError:
    """Return an error as it crosses; foreign ones become errors of a backend."""
    if not isinstance(error, MuxError):
        return PlainError("BackendError", f"{type(error).__name__}: {error}")
    return PlainError(
        type(error).__name__,
        error.message,
        error.log,
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
