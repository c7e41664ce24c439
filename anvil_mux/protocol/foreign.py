"""Texts that others wrote, read within limits: JSON, the lines of their streams, compressed bodies; and plain
values as the types that are expected.

Pure. Parsers recurse, in C too, where a text that is nested deeply overflows the stack of its thread and ends
the program. So depth is measured before anything recursive reads a text: a piece at a time, for other threads
to get their turns, linear steps in C reduce each to the brackets outside strings, and these are counted.

Few clients compress what they send, but those that do cannot be told otherwise: Codex sends zstd. A body may
unpack to a thousand times its size, so no more is unpacked than is allowed, and it must end where its coding
says. zstd is in Python from 3.14 on, and in the extra ``zstd`` for older ones.
"""

from __future__ import annotations

import collections.abc
import json
import types
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Any

from anvil_mux.errors import BadRequest, TooLarge

MOST_DEPTH = 200
"""Levels of a text. What walks over it makes up to three calls for each, and Python 3.10 allows 1,000."""
MOST_VALUES = 500_000
"""Values of a request, about: all other threads wait while an object is made of each."""
MOST_DIGITS = 400
"""Digits of a number, enough for the largest double: Python reads and writes whole numbers in a
time that grows with the square of their length, and all other threads wait meanwhile."""
SAMPLE_EVERY = 64
"""Bytes from one sample of a text to the next, where numbers that are too long are looked for."""
PIECE = 65536
PART = 100
"""Brackets that are counted together: no more than half of those that are allowed."""
_MARKS = b'"[]{},'
_OTHERS = bytes(sorted(set(range(256)) - set(_MARKS)))
_NO_DIGITS = bytes(sorted(set(_OTHERS) - set(b"0123456789")))
_NOT_OPENING = bytes(sorted(set(range(256)) - set(b"[{")))
_SQUARE = bytes.maketrans(b"{}", b"[]")
_SQUARE_AND_ZEROS = bytes.maketrans(b"{}123456789", b"[]000000000")
_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_SAMPLES = b"0" * (MOST_DIGITS // SAMPLE_EVERY)
_COMMAS = bytes.maketrans(b"[]", b",,")
_STEPS = {ord("["): 1, ord("]"): -1}


def check(text: bytes | bytearray, *, of_request: bool = False) -> None:
    """Raise ValueError if a JSON text (UTF-8) is nested deeper than MOST_DEPTH, or has a number of over
    MOST_DIGITS, or if a request has over MOST_VALUES.

    In what is no JSON it finds the depth up to where a parser stops.
    """
    if (
        len(text) <= PIECE
        and len(text.translate(None, _NOT_OPENING)) <= MOST_DEPTH
        and not _may_hold_long_number(text)
    ):
        return  # nor can it have too many values
    depth = values = 0
    for marks in _outside_strings(text):
        if b"0" in marks:
            if _longest_number(marks) > MOST_DIGITS:
                raise ValueError(f"it holds a number of more than {MOST_DIGITS} digits")
            marks = marks.translate(None, b"0")
        brackets = marks.replace(b",", b"")
        values += len(marks) - len(brackets) + brackets.count(b"[")
        if of_request and values > MOST_VALUES:
            raise ValueError(f"it holds more than {MOST_VALUES:,} values")
        for start in range(0, len(brackets), PART):
            part = brackets[start : start + PART]
            opened = part.count(b"[")
            if depth + opened > MOST_DEPTH and depth + _height(part) > MOST_DEPTH:
                raise ValueError(f"it is nested deeper than {MOST_DEPTH} levels")
            depth += 2 * opened - len(part)


def _height(brackets: bytes) -> int:
    return max(accumulate(map(_STEPS.__getitem__, brackets)))


def _may_hold_long_number(text: bytes | bytearray) -> bool:
    """Return whether samples of a text are digits as those of a long number would be."""
    return _SAMPLES in text[::SAMPLE_EVERY].translate(_ZEROS)


def _longest_number(marks: bytes) -> int:
    """Return the digits of the longest run of zeros between brackets and commas."""
    return max(map(len, marks.translate(_COMMAS).split(b",")))


def _outside_strings(text: bytes | bytearray) -> Iterator[bytes]:
    """Yield the brackets, all of them square, and the commas outside strings, in pieces.

    Pieces in which a long number may stand have their digits too, each as 0.
    """
    start = inside = 0
    while start < len(text):
        end = start + PIECE
        while text[end - 1 : end] == b"\\":  # it escapes what follows
            end += 1
        piece = text[start:end]
        if b"\\" in piece:  # pairs first: what is left before a quote escapes it
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        has_digits = _may_hold_long_number(piece)
        table, others = (_SQUARE_AND_ZEROS, _NO_DIGITS) if has_digits else (_SQUARE, _OTHERS)
        # Two quotes side by side change nothing of what is within a string and what is not.
        parts = bytes(piece.translate(table, others)).replace(b'""', b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) & 1
        start = end


def read(
    text: str | bytes | bytearray,
    *,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    of_request: bool = False,
) -> Any:
    """The value of a JSON text in UTF-8; ValueError if it is none, or goes beyond the limits."""
    if isinstance(text, str):
        check(text.encode("utf-8", "surrogatepass"), of_request=of_request)
    else:
        check(text, of_request=of_request)
        text = text.decode("utf-8-sig")
    return json.loads(text, object_pairs_hook=pairs)


def read_or_none(text: str | bytes | bytearray, *, of_request: bool = False) -> Any:
    """The same; None where the text is none, or goes beyond the limits."""
    try:
        return read(text, of_request=of_request)
    except ValueError:
        return None


def read_object(text: str | bytes | bytearray, *, of_request: bool = False) -> dict[str, Any] | None:
    """The object that a JSON text is; None if it is none, or goes beyond the limits."""
    found = read_or_none(text, of_request=of_request)
    return found if isinstance(found, dict) else None


class Lines:
    """The lines of a stream, in whatever pieces it comes: none is copied for each of its pieces."""

    def __init__(self) -> None:
        self.rest = bytearray()
        """The line that has not ended."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that end in ``data``, without their ends."""
        first, *more = data.split(b"\n")
        self.rest += first
        if not more:
            return []
        lines = [bytes(self.rest), *more[:-1]]
        self.rest[:] = more[-1]
        return lines


# Values as types

GREATEST = 1 << 62
"""The bound of whole numbers, so that whoever reckons with one may make a float of it."""
_LISTS = (list, tuple, collections.abc.Sequence)
_MAPPINGS = (dict, collections.abc.Mapping)


def of(kind: Any, value: object) -> Any:
    """A plain value as one of this type; ValueError if it is none. ``object``: as it is."""
    if kind is object:
        return value
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _one_of(parts, value)
    if origin in _LISTS and isinstance(value, (list, tuple)):
        return _list(kind, origin, parts, value)
    if origin in _MAPPINGS and isinstance(value, dict):
        return {of(parts[0], key): of(parts[1], each) for key, each in value.items()}
    if isinstance(value, dict) and isinstance(kind, type):
        return _record(kind, value)
    return _scalar(kind, value)


def some_of(kind: type, values: Mapping[str, object]) -> dict[str, Any]:
    """The plain values of some fields of a record as their types; ValueError names what is wrong with one."""
    types_of, found = fields_of(kind), {}
    for name, value in values.items():
        if name not in types_of:
            raise ValueError(f"{kind.__name__} has no {name}")
        try:
            found[name] = of(types_of[name], value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def _scalar(kind: Any, value: object) -> object:
    is_number = type(value) in (int, float) and kind is float
    if not (is_number or (type(value) is kind and kind in (str, bool, int, types.NoneType))):
        raise ValueError(f"this is no {getattr(kind, '__name__', kind)}: {value!r:.80}")
    if isinstance(value, int) and abs(value) > GREATEST:
        raise ValueError("this is too great a number")
    return value


def _one_of(kinds: Sequence[Any], value: object) -> Any:
    if value is None and types.NoneType in kinds:  # most often
        return None
    for kind in kinds[:-1]:
        try:
            return of(kind, value)
        except ValueError:
            pass
    return of(kinds[-1], value)


def _list(kind: Any, origin: Any, parts: tuple[Any, ...], value: Sequence[object]) -> Any:
    if origin is not tuple or parts[-1] is ...:
        parts = parts[:1] * len(value)
    elif len(parts) != len(value):
        raise ValueError(f"this is no {kind}: it has {len(value)} parts")
    found = [of(part, each) for part, each in zip(parts, value, strict=True)]
    return found if origin is list else tuple(found)


def _record(kind: type, value: Mapping[str, object]) -> Any:
    types_of = fields_of(kind)
    if not types_of or types_of.keys() != value.keys():
        raise ValueError(f"this is no {kind.__name__}: {', '.join(value)[:80]}")
    return kind(**{name: of(each, value[name]) for name, each in types_of.items()})


@cache
def fields_of(kind: type) -> Mapping[str, Any]:
    """The fields of a record with their types; none: it is no record."""
    if not (is_dataclass(kind) or hasattr(kind, "_fields")):
        return {}
    return typing.get_type_hints(kind)


# Compressed bodies


def _find_zstd() -> Callable[[], Any] | None:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return import_module(name).ZstdDecompressor  # type: ignore[no-any-return]
        except ImportError:
            continue
    return None


CODINGS: dict[str, Callable[[], Any] | None] = {
    "gzip": lambda: zlib.decompressobj(31),
    "x-gzip": lambda: zlib.decompressobj(31),
    "deflate": zlib.decompressobj,
    "zstd": _find_zstd(),
}
"""Coding -> what makes a decompressor, whose interface zlib and zstd have in common; None: it is missing."""


RATIO = 100
"""How many times its size a body may have unpacked; texts have a tenth of that."""
FREE = 1 << 20
"""The size that any body may have unpacked."""


def unpacked_size(packed: int, limit: int) -> int:
    """The size that a body of ``packed`` bytes may have unpacked, where any may have ``limit``."""
    return min(limit, FREE + RATIO * packed)


def unpacked(body: bytes | bytearray, coding: str, limit: int) -> bytes:
    """Unpack ``body``; BadRequest 415 or 400, or TooLarge above ``limit`` bytes."""
    make = CODINGS.get(coding.strip().lower())
    if make is None:
        needs = " (install anvil-mux[zstd])" if coding.lower() == "zstd" else ""
        known = ", ".join(name for name, made in CODINGS.items() if made and name != "x-gzip")
        advice = f"understood: {known}; or send the body as it is, without this header"
        raise BadRequest(f"Content-Encoding {coding} is not understood{needs}: {advice}", status=415)
    unpacker = make()
    try:
        content: bytes = unpacker.decompress(body, limit + 1)
    except Exception as error:  # each library has errors of its own
        raise BadRequest(f"the body is not {coding}: {error}", param="body") from None
    if len(content) > limit:
        raise TooLarge(f"the request's body unpacks to more than {limit} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise BadRequest(f"the body does not end where its {coding} ends", param="body")
    return content
