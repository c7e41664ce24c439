"""JSON that others wrote, read within limits of depth and of values, and the lines of their streams.

Pure. Parsers recurse, in C too, where a text that is nested deeply overflows the stack of its thread and ends
the program. So depth is measured before anything recursive reads a text: a piece at a time, for other threads
to get their turns, linear steps in C reduce each to the brackets outside strings, and these are counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

MOST_DEPTH = 200
"""Levels of a text. What walks over it makes up to three calls for each, and Python 3.10 allows 1,000."""
MOST_VALUES = 500_000
"""Values of a request, about: all other threads wait while an object is made of each."""
PIECE = 65536
PART = 100
"""Brackets that are counted together: no more than half of those that are allowed."""
_MARKS = b'"[]{},'
_OTHERS = bytes(sorted(set(range(256)) - set(_MARKS)))
_SQUARE = bytes.maketrans(b"{}", b"[]")
_STEPS = {ord("["): 1, ord("]"): -1}


def check(text: bytes | bytearray, *, of_request: bool = False) -> None:
    """ValueError if a JSON text (UTF-8) is nested deeper than MOST_DEPTH, or a request has over MOST_VALUES.

    In what is no JSON it finds the depth up to where a parser stops.
    """
    if len(text) <= PIECE and text.count(b"[") + text.count(b"{") <= MOST_DEPTH:
        return  # nor can it have too many values
    depth = values = 0
    for marks in _outside_strings(text):
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


def _outside_strings(text: bytes | bytearray) -> Iterator[bytes]:
    """The brackets, all of them square, and the commas outside strings, in pieces."""
    start = inside = 0
    while start < len(text):
        end = start + PIECE
        while text[end - 1 : end] == b"\\":  # it escapes what follows
            end += 1
        piece = text[start:end]
        if b"\\" in piece:  # pairs first: what is left before a quote escapes it
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        # Two quotes side by side change nothing of what is within a string and what is not.
        parts = bytes(piece.translate(_SQUARE, _OTHERS)).replace(b'""', b"").split(b'"')
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
