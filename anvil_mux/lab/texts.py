"""Prompts of given lengths: texts that nobody has seen, but for the parts that a trace says are shared.

A text is made of random words of four bytes, a space among them. How many tokens of the model's tokenizer a
word is, the engine's ``usage`` says in the warm-up; until then a token is four bytes. A block of a trace is
always the same words, by its id, so requests of which the trace says that they begin alike do so here.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache

from anvil_mux.lab.script import PlayedRequest

BLOCKS_KEPT = 1 << 15


class PromptWriter:
    """Writes the prompts of one run; ``tokens_per_word``: by model, 1 where it is not known."""

    def __init__(self, seed: str, block_tokens: int, tokens_per_word: Mapping[str, float]) -> None:
        self._seed = seed
        self._block_tokens = block_tokens
        self._tokens_per_word = tokens_per_word
        self._block = lru_cache(BLOCKS_KEPT)(self._written)

    def write(self, request: PlayedRequest, number: int) -> str:
        """The prompt of the request of this number."""
        each = self._tokens_per_word.get(request.model, 1.0)
        ends = [round(n * self._block_tokens / each) for n in range(len(request.blocks) + 1)]
        parts = [
            self._block(str(block), end - begin)
            for block, begin, end in zip(request.blocks, ends, ends[1:], strict=False)
        ]
        words = max(round(request.tokens / each) - ends[-1], 0 if any(parts) else 1)
        return "".join([*parts, self._written(f"alone {number}", words)])

    def _written(self, name: str, words: int) -> str:
        draw = random.Random(f"{self._seed} {name}")
        return "".join([f"{word} " for word in draw.choices(range(100, 1000), k=words)])
