"""The warm-up before a run: each model is asked alone, so that it is known how fast its engine is.

Every model is asked in turn, those last that are to be loaded when the run begins. So each was loaded, the
server knows what swaps cost (as simulations assume), and what is resident is what the script says. Once it is
loaded the model is asked again, for an answer about as long as those of the script: an engine is slower
far in an answer, and a short one tells little. That gives its pace, and how many tokens a word of a prompt
is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from anvil_mux.replay.script import PlayedRequest
from anvil_mux.replay.sending import PlayedAnswer, failure

TOKENS = 24
"""The answer that is asked for where nothing says how long they are."""
MOST_SECONDS = 3.0
"""The longest answers that are asked for."""
NEAR = 1.25
"""An answer is long enough if those of the script last at most so many times as long."""
MOST_LONGER = 8
"""How many times as long as the last answer the next one is, at most."""
WORDS = 32
TOKENS_PER_SECOND = 40.0
"""The pace that is taken for a model that was not asked."""

AskAlone = Callable[[PlayedRequest], PlayedAnswer]


class EnginePace(NamedTuple):
    """How fast the engine of a model is when it has nothing else to do."""

    first_seconds: float = 0.0
    """Seconds to the first token."""
    tokens_per_second: float = TOKENS_PER_SECOND
    """Tokens per second after that."""
    tokens_per_word: float = 1.0

    def seconds(self, tokens: int) -> float:
        """Seconds that an answer of so many tokens takes."""
        return self.first_seconds + max(tokens - 1, 0) / self.tokens_per_second


class UsualAnswer(NamedTuple):
    """How long the answers of a model usually are."""

    seconds: float
    tokens_per_second: float | None = None
    """How many tokens a second of them is to be; None: as many as the engine makes."""


def warm_up(
    ask: AskAlone, models: Iterable[str], resident: Iterable[str], usual: Mapping[str, UsualAnswer]
) -> dict[str, EnginePace]:
    """The pace of each model; MuxError if one of them does not answer."""
    resident = list(resident)
    paces: dict[str, EnginePace] = {}
    for model in [*resident, *[m for m in models if m not in resident], *resident]:
        _asked(ask, model, 1)
        if model not in paces:
            paces[model] = _measured(ask, model, usual.get(model))
    return paces


def _measured(ask: AskAlone, model: str, usual: UsualAnswer | None) -> EnginePace:
    if usual and usual.tokens_per_second:
        return _pace(_asked(ask, model, max(round(usual.seconds * usual.tokens_per_second), 1)))
    tokens, enough = TOKENS, min(usual.seconds, MOST_SECONDS) / NEAR if usual else 0.0
    while True:
        answer = _asked(ask, model, tokens)
        lasted = answer.ended - answer.sent
        if lasted >= enough or answer.tokens < tokens:
            return _pace(answer)
        # Short answers make an engine look faster than it is, so the next one is not longer by much.
        tokens = min(math.ceil(tokens * enough * NEAR / lasted), tokens * MOST_LONGER)


def _asked(ask: AskAlone, model: str, output: int) -> PlayedAnswer:
    answer = ask(PlayedRequest(0.0, model, WORDS, output))
    if error := failure(answer):
        raise error
    return answer


def _pace(answer: PlayedAnswer) -> EnginePace:
    first = answer.first if not math.isnan(answer.first) else answer.ended
    lasts = answer.ended - first
    fast = (answer.tokens - 1) / lasts if answer.tokens > 1 and lasts > 0 else TOKENS_PER_SECOND
    words = answer.prompt_tokens / WORDS if answer.prompt_tokens else 1.0
    return EnginePace(first - answer.sent, fast, words)
