"""The warm-up before a run: each model is asked alone, so that it is known how fast its engine is.

Every model is asked in turn, those last that are to be loaded when the run begins. So each was loaded, the
server knows what swaps cost (as simulations assume), and what is resident is what the script says. Once it is
loaded, and it is known how many tokens a word of a prompt is, the model is asked again, with a prompt and for
an answer about as long as those of the script: an engine is slower far in an answer, and a short one tells
little. The median of ``ASKED`` answers gives its pace. Then it is asked ``AT_ONCE`` times at once, which
tells how many answers it makes at the same time (the others come much later), and how much slower each is for
the company of others. With several rounds each of these figures is the median of what the rounds gave: a
machine that does other work as well is slow at some moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from anvil_mux.lab.batching import Batching
from anvil_mux.lab.script import PlayedRequest
from anvil_mux.lab.sending import PlayedAnswer, failure

TOKENS = 24
"""The answer that is asked for where nothing says how long they are."""
MOST_SECONDS = 3.0
"""The longest answers that are asked for."""
NEAR = 1.25
"""An answer is long enough if those of the script last at most so many times as long."""
MOST_LONGER = 8
"""How many times as long as the last answer the next one is, at most."""
ASKED, AT_ONCE = 3, 8
TOGETHER = 1.5
"""Answers that take at most so many times as long as the first of them are made at the same time."""
AT_ONCE_PART = 0.05
"""The part of an answer's time within which all of its text came, if it came in one piece."""
WORDS = 32
TOKENS_PER_SECOND = 40.0
"""The pace that is taken for a model that was not asked."""

AskAtOnce = Callable[[Sequence[PlayedRequest]], Sequence[PlayedAnswer]]
"""Sends requests at one moment, and waits for all answers."""


class EnginePace(NamedTuple):
    """How fast the engine of a model is when it has nothing else to do."""

    first_seconds: float = 0.0
    """Seconds to the first token."""
    tokens_per_second: float = TOKENS_PER_SECOND
    """Tokens per second after that."""
    tokens_per_word: float = 1.0
    slower_each: float = 0.0
    at_once: float = math.inf
    """``slower_each`` and ``at_once`` are its ``batching``."""

    @property
    def batching(self) -> Batching:
        return Batching(self.slower_each, self.at_once)

    def seconds(self, tokens: int) -> float:
        """Seconds that an answer of so many tokens takes."""
        return self.first_seconds + max(tokens - 1, 0) / self.tokens_per_second


class UsualAnswer(NamedTuple):
    """How long the answers of a model usually are, and its prompts."""

    seconds: float
    tokens_per_second: float | None = None
    """How many tokens a second of them is to be; None: as many as the engine makes."""
    prompt_tokens: int = WORDS


def warm_up(
    ask: AskAtOnce,
    models: Iterable[str],
    resident: Iterable[str],
    usual: Mapping[str, UsualAnswer],
    *,
    rounds: int = 1,
) -> dict[str, EnginePace]:
    """The pace of each model; MuxError if one does not answer. ``rounds``: how often each is loaded."""
    resident = list(resident)
    paces: dict[str, list[EnginePace]] = {}
    lengths: dict[str, int] = {}
    for model in [*resident, *[m for m in models if m not in resident]] * rounds:
        [answer] = _asked(ask, model, WORDS, 1)
        each = answer.prompt_tokens / WORDS if answer.prompt_tokens else 1.0
        expected = usual.get(model)
        words = max(round(expected.prompt_tokens / each), 1) if expected else WORDS
        if model not in lengths:
            lengths[model] = _length(ask, model, words, expected)
        paces.setdefault(model, []).append(_measured(ask, model, words, lengths[model], each))
    for model in resident:
        _asked(ask, model, WORDS, 1)
    return {model: EnginePace(*map(median, zip(*found, strict=True))) for model, found in paces.items()}


def _measured(ask: AskAtOnce, model: str, words: int, tokens: int, tokens_per_word: float) -> EnginePace:
    answers = [answer for _ in range(ASKED) for answer in _asked(ask, model, words, tokens)]
    answer = sorted(answers, key=lambda each: each.ended - each.sent)[ASKED // 2]
    together = _asked(ask, model, words, tokens, AT_ONCE)
    batching = _batching(answer.ended - answer.sent, [each.ended - each.sent for each in together])
    return _pace(answer, tokens_per_word)._replace(**batching._asdict())


def _batching(alone: float, together: Sequence[float]) -> Batching:
    """How an engine makes several answers: seconds of one alone, and of some asked for at one moment."""
    made = [seconds for seconds in together if seconds <= TOGETHER * min(together)]
    slower = max(median(made) / alone - 1, 0.0) if alone > 0 else 0.0
    at_once = len(made) if len(made) < len(together) else math.inf
    return Batching(slower / (len(made) - 1) if len(made) > 1 else 0.0, at_once)


def _length(ask: AskAtOnce, model: str, words: int, usual: UsualAnswer | None) -> int:
    """The tokens of an answer that lasts about as long as those of the script."""
    if usual and usual.tokens_per_second:
        return max(round(usual.seconds * usual.tokens_per_second), 1)
    tokens, enough = TOKENS, min(usual.seconds, MOST_SECONDS) / NEAR if usual else 0.0
    while True:
        [answer] = _asked(ask, model, words, tokens)
        lasted = answer.ended - answer.sent
        if lasted >= enough or answer.tokens < tokens:
            return tokens
        # Short answers make an engine look faster than it is, so the next one is not longer by much.
        tokens = min(math.ceil(tokens * enough * NEAR / lasted), tokens * MOST_LONGER)


def _asked(ask: AskAtOnce, model: str, words: int, output: int, count: int = 1) -> Sequence[PlayedAnswer]:
    answers = ask([PlayedRequest(0.0, model, words, output)] * count)
    for answer in answers:
        if error := failure(answer):
            raise error
    return answers


def _pace(answer: PlayedAnswer, tokens_per_word: float) -> EnginePace:
    came_at_once = answer.ended - answer.first < AT_ONCE_PART * (answer.ended - answer.sent)
    first = answer.sent if came_at_once or math.isnan(answer.first) else answer.first
    lasts = answer.ended - first
    fast = (answer.tokens - 1) / lasts if answer.tokens > 1 and lasts > 0 else TOKENS_PER_SECOND
    return EnginePace(first - answer.sent, fast, tokens_per_word)
