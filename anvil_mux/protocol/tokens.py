"""The token counts that engines report: in whole answers, and merged over the events of a stream.

Pure. ``usage`` counts at the top of an answer, or in the ``message`` or ``response`` that an event holds;
llama.cpp's ``timings`` count where there is no usage. OpenAI and most engines count what was cached as part
of the input, Anthropic and ``timings`` apart from it. What a client had echoed further in counts for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from anvil_mux.protocol import foreign

Tokens = tuple[int | None, int | None, int | None]
"""The tokens of an answer, of all its input, and of its input that was cached; None: not reported."""
NO_TOKENS: Tokens = (None, None, None)
MOST_TOKENS = 999_999_999

_MEMBER = (
    rb'\s*,\s*"[^"\\]*"\s*:\s*'
    rb'(?:[^\s{}\[\]",]+|"[^"\\]*"|\{[^{}]*\}|\[[^{}\[\]"]*\])'
)
"""One more member of an object: a plain value, or an object or a list with plain ones."""
_LAST_MEMBERS = re.compile(rb'"(?:usage|timings)"\s*:\s*\{(?:[^{}]|\{[^{}]*\})*\}(?:%b)*\s*\}\s*\Z' % _MEMBER)
"""The usage and what follows it to the end of an answer: so its depth is known without reading the rest."""
_ANYWHERE = re.compile(rb'"(?:usage|timings)"\s*:\s*(\{(?:[^{}]|\{[^{}]*\})*\})')
_TAIL = 65536
"""Bytes of a long answer that are kept: usage stands at its end, or before lists of tokens."""


def tokens_in(body: bytes) -> Tokens:
    """Read what a whole answer of JSON reports."""
    usage, timings = body.rfind(b'"usage"'), body.rfind(b'"timings"')
    if usage < 0 and timings < 0:  # an answer to count_tokens has an "input_tokens" of its own
        return NO_TOKENS
    first = max(usage, timings) if usage < 0 or timings < 0 else min(usage, timings)
    last = _LAST_MEMBERS.match(body, first)
    answer = foreign.read_object(b"{" + last[0] if last else body)
    if answer is None:
        return NO_TOKENS
    counts = TokenCounts()
    counts.add(answer)
    return counts.tokens


class TokenCounts:
    """The counts that the events of one answer report: of each kind the last."""

    __slots__ = ("_timings", "_usage")

    def __init__(self) -> None:
        self._usage: dict[str, int] = {}
        self._timings: dict[str, int] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in what an event, or a whole answer, reports."""
        for holder in (event.get("message"), event.get("response"), event):
            if isinstance(holder, dict) and isinstance(usage := holder.get("usage"), dict):
                self._add_usage(usage)
        if isinstance(timings := event.get("timings"), dict):
            self._timings |= _counts(timings)

    def _add_usage(self, usage: dict[str, Any]) -> None:
        self._usage |= _counts(usage)
        for name in ("prompt_tokens_details", "input_tokens_details"):
            if isinstance(details := usage.get(name), dict):
                self._usage |= {key: n for key, n in _counts(details).items() if key == "cached_tokens"}

    @property
    def tokens(self) -> Tokens:
        """The counts so far."""
        usage, timings = self._usage, self._timings
        if not usage:
            computed, kept = timings.get("prompt_n"), timings.get("cache_n", 0)
            answer = timings.get("predicted_n")
            return answer, None if computed is None else computed + kept, None if computed is None else kept
        answer = usage.get("completion_tokens", usage.get("output_tokens"))
        cached = usage.get("cached_tokens", timings.get("cache_n"))
        prompt = usage.get("prompt_tokens")
        if prompt is None:
            prompt, apart = usage.get("input_tokens"), usage.get("cache_read_input_tokens")
            if prompt is not None and apart is not None:
                return answer, prompt + apart + usage.get("cache_creation_input_tokens", 0), apart
        return answer, prompt, cached


_NAMES = frozenset(
    (
        *("prompt_tokens", "input_tokens", "completion_tokens", "output_tokens", "cached_tokens"),
        *("cache_read_input_tokens", "cache_creation_input_tokens", "cache_n", "prompt_n", "predicted_n"),
    )
)


def _counts(said: dict[str, Any]) -> dict[str, int]:
    return {
        name: value
        for name, value in said.items()
        if name in _NAMES and type(value) is int and 0 <= value <= MOST_TOKENS
    }


class TailReader:
    """Reads the counts of an answer that is no stream of events, as its bytes pass."""

    __slots__ = ("_found", "_is_cut", "_tail")

    def __init__(self) -> None:
        self._tail = bytearray()
        self._is_cut = False
        """Whether the beginning was let go of."""
        self._found: Tokens = NO_TOKENS

    def feed(self, data: bytes) -> None:
        self._tail += data
        if len(self._tail) > 2 * _TAIL:
            self._look(bytes(self._tail))
            self._is_cut = True
            del self._tail[:-_TAIL]

    @property
    def tokens(self) -> Tokens:
        """The counts, once all has passed. Of a long answer the greatest: an echo can only add to them."""
        tail = bytes(self._tail)
        if not self._is_cut:
            return tokens_in(tail)
        self._look(tail)
        return self._found

    def _look(self, text: bytes) -> None:
        for usage in _ANYWHERE.findall(text):
            counts = TokenCounts()
            counts.add({"usage": foreign.read_object(usage)})
            self._found = max(self._found, counts.tokens, key=lambda each: sum(n or 0 for n in each))
