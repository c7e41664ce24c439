"""How fast an engine is, measured: the time to a first token by the length of a prompt, the time for each
further token by how many requests are answered at once and how long they are.

``anvil-mux profile`` measures and writes such a file, in the form of Llumnix's profiles; routing predicts
with it. Between what was measured lines are drawn; what is less than all of it takes as long as the least. Of
what is more nothing is said (infinity): an engine never seen with so many requests may do anything.

Less never takes longer than more. Where it was measured so, something disturbed one of the two, and nobody
knows which: both take what lies halfway between the most that less took and the least that more did. Whoever
looks for the fullest engine would find an empty one otherwise.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from anvil_mux.clock import MOST_COUNT
from anvil_mux.protocol import foreign

CHUNK = 8192
"""Tokens that an engine takes at once, where the file does not say."""

Line = tuple[tuple[float, float], ...]
"""Points of a line, from left to right."""


class Profile(NamedTuple):
    """The times of an engine in milliseconds, as measured."""

    ttft: Line
    """Tokens of a prompt -> until its first token."""
    tpot: tuple[tuple[int, Line], ...]
    """Requests answered at once -> tokens in each of them -> for each further token."""
    chunk: int = CHUNK

    def first_token(self, tokens: float, batch: float, batch_tokens: float) -> float:
        """Predict the first token for ``tokens`` that are to be computed, in chunks, beside the answers under
        way.
        """
        whole, rest = divmod(tokens, self.chunk)
        beside = self.next_token(batch, batch_tokens / batch) if batch else 0.0
        steps = whole * (_on(self.ttft, self.chunk) + beside) if whole else 0.0
        return steps + (_on(self.ttft, rest) + beside if rest else 0.0)

    def prefill(self, cached: float, tokens: float, beside: float = 0.0) -> float:
        """Predict how long a prompt is computed of which ``cached`` tokens are there.

        ``beside``: what answers under way take of each chunk. A prompt longer than was measured is endless.
        """
        if tokens > self.ttft[-1][0]:
            return math.inf
        return _on(self.ttft, tokens) - _on(self.ttft, cached) + (tokens - cached) * beside / self.chunk

    def computed(self, cached: float, milliseconds: float, beside: float = 0.0) -> float:
        """Predict how many tokens of such a prompt are computed after so long: the inverse of ``prefill``."""
        if math.isinf(beside) or cached > self.ttft[-1][0]:
            return 0.0
        line = [(x, y + x * beside / self.chunk) for x, y in self.ttft] if beside else self.ttft
        return _reach(line, _on(line, cached) + max(milliseconds, 0.0)) - cached

    def next_token(self, batch: float, tokens_each: float) -> float:
        """Predict each further token while ``batch`` requests of so many tokens each are answered."""
        sizes = [size for size, _ in self.tpot]
        right = bisect_left(sizes, batch)
        if right == len(sizes):
            return math.inf
        _, line = self.tpot[right]
        if sizes[right] == batch or right == 0:
            return _on(line, tokens_each)
        left = self.tpot[right - 1]
        return _on(((left[0], _on(left[1], tokens_each)), (sizes[right], _on(line, tokens_each))), batch)


def _on(line: Sequence[tuple[float, float]], x: float) -> float:
    """The height of ``line`` at ``x``; infinity beyond its end."""
    right = bisect_left(line, (x,))
    if right == len(line):
        return math.inf
    x1, y1 = line[right]
    if x1 == x or right == 0:
        return y1
    x0, y0 = line[right - 1]
    if math.isinf(y0):
        return y0
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _reach(line: Sequence[tuple[float, float]], y: float) -> float:
    """How far to the right ``line`` is at most ``y`` high."""
    right = bisect_right(line, y, key=lambda point: point[1])
    if right == 0:
        return 0.0
    x0, y0 = line[right - 1]
    if right == len(line):
        return x0
    x1, y1 = line[right]
    return x0 + (x1 - x0) * (y - y0) / (y1 - y0)


def read(text: str) -> Profile:
    """The profile in the text of a file; ValueError says what is wrong with it."""
    try:
        found = foreign.read(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    ttft = [(_number(row, "tokens_num"), _number(row, "p50")) for row in _rows(found, "ttft")]
    tpot: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for row in _rows(found, "tpot"):
        tpot[_number(row, "batch_size")].append((_number(row, "tokens_per_request"), _number(row, "p50")))
    about = found.get("metadata")
    chunk = about.get("max_num_batched_tokens", CHUNK) if isinstance(about, dict) else CHUNK
    if type(chunk) is not int or not 1 <= chunk <= MOST_COUNT:
        raise ValueError(f"metadata.max_num_batched_tokens must be a whole number from 1 to {MOST_COUNT}")
    sizes = sorted(tpot)
    lines = _rising([_line(tpot[size], "tpot") for size in sizes])
    (prompts,) = _rising([_line([(0.0, 0.0), *ttft], "ttft")])
    return Profile(prompts, tuple(zip(map(int, sizes), lines, strict=True)), chunk)


def _rows(found: Any, part: str) -> list[dict[str, Any]]:
    about = found.get(part) if isinstance(found, dict) else None
    rows = about.get("results") if isinstance(about, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"must hold {part}.results, a list of measurements")
    return rows


def _number(row: dict[str, Any], key: str) -> float:
    value = row.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= MOST_COUNT:
        raise ValueError(f"{key} must be a number from 0 to {MOST_COUNT} in every measurement")
    return float(value)


def _line(points: Sequence[tuple[float, float]], part: str) -> Line:
    line = tuple(sorted(points))
    if len({x for x, _ in line}) < len(line):
        raise ValueError(f"{part}.results holds two measurements of the same point")
    return line


def _rising(lines: Sequence[Line]) -> list[Line]:
    """``lines``, nowhere higher than further right, nor than a later line, each as far as it went."""
    grid = sorted({x for line in lines for x, _ in line})
    heights = [[_on(line, x) for x in grid if x <= line[-1][0]] for line in lines]
    found = []
    for row, own in enumerate(heights):
        points = []
        for column, x in enumerate(grid[: len(own)]):
            less = max(y for line in heights[: row + 1] for y in line[: column + 1])
            more = min(y for line in heights[row:] for y in line[column:])
            points.append((x, (less + more) / 2))
        found.append(tuple(points))
    return found
