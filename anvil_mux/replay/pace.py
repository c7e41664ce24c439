"""The warm-up before a run: each model is asked alone, so that it is known how fast its engine is.

Every model is asked in turn, those last that are to be loaded when the run begins. So each was loaded, the
server knows what swaps cost (as simulations assume), and what is resident is what the script says. Once it is
loaded the model is asked again, for ``TOKENS`` tokens: that answer gives its pace, and how many tokens of its
tokenizer a word of a prompt is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from anvil_mux.replay.script import PlayedRequest
from anvil_mux.replay.sending import PlayedAnswer, failure

TOKENS = 24
WORDS = 64
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


def warm_up(ask: AskAlone, models: Iterable[str], resident: Iterable[str]) -> dict[str, EnginePace]:
    """The pace of each model; MuxError if one of them does not answer."""
    resident = list(resident)
    paces: dict[str, EnginePace] = {}
    for model in [*resident, *[m for m in models if m not in resident], *resident]:
        _asked(ask, model, 1)
        if model not in paces:
            paces[model] = _pace(_asked(ask, model, TOKENS))
    return paces


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
