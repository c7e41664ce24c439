"""Measured profiles and simulated engines: the one that fits a profile, and the profile of the one.

A profile (config/profile.py) holds times of a real engine; ``fitted`` finds the simulated engine that has
nearly the same: its parameters are those with the least sum of squared relative errors, none below 0. What a
profile does not hold (the size of the cache, how many requests run at once) stays as it was.

``measured`` goes the other way, for policies that predict: what ``anvil-mux profile`` would find on a
simulated engine, asked for prompts and batches as large as traces have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from anvil_mux.config.profile import CHUNK, Profile
from anvil_mux.lab.fleet import SimulatedEngine

PROMPTS = (128, 512, 2048, 8192, 32_768, 65_536, 131_072)
BATCHES = (1, 2, 4, 8, 16, 64, 256)
LENGTHS = (128, 2048, 8192, 32_768, 131_072, 262_144)

Measurement = tuple[tuple[float, ...], float]
"""One measurement: how often each parameter counts, and the seconds."""


def measured(engine: SimulatedEngine) -> Profile:
    """The profile of a simulated engine."""
    chunk = min(CHUNK, engine.step_tokens)
    prompts = sorted({*PROMPTS, chunk})
    ttft = [(float(tokens), _first_token(engine, tokens) * 1e3) for tokens in (0, *prompts)]
    tpot = [
        (
            batch,
            tuple((float(each), engine.decode_step_seconds(batch, batch * each) * 1e3) for each in LENGTHS),
        )
        for batch in BATCHES
    ]
    return Profile(tuple(ttft), tuple(tpot), chunk)


def _first_token(engine: SimulatedEngine, tokens: int) -> float:
    if not tokens:
        return 0.0
    ingress = engine.ingress_seconds + tokens * engine.ingress_token_seconds
    steps = -(-tokens // engine.step_tokens)
    return ingress + steps * engine.step_seconds + engine.prefill_seconds(0, tokens)


def fitted(profile: Profile, engine: SimulatedEngine | None = None) -> SimulatedEngine:
    """The simulated engine that is as fast as a profile says, and else as ``engine``."""
    further = [
        ((1.0, float(batch), batch * each), ms / 1e3) for batch, line in profile.tpot for each, ms in line
    ]
    step, decode, context = _least_squares(further)
    # Longer prompts than a chunk are computed in several steps, with other prompts and answers beside them.
    first = [
        ((1.0, tokens, tokens * tokens), ms / 1e3)
        for tokens, ms in profile.ttft
        if 0 < tokens <= profile.chunk
    ]
    start, token, attention = _least_squares(first)
    return replace(
        engine or SimulatedEngine(),
        ingress_seconds=max(start - step, 0.0),
        ingress_token_seconds=0.0,
        step_seconds=step,
        token_seconds=token,
        attention_seconds=attention,
        decode_seconds=decode,
        context_token_seconds=context,
        step_tokens=profile.chunk,
    )


def _least_squares(rows: Sequence[Measurement]) -> list[float]:
    """The parameters, none below 0, that come nearest to what was measured, relative to that."""
    scaled = [([value / seconds for value in counts], 1.0) for counts, seconds in rows if seconds > 0]
    best, least = [0.0, 0.0, 0.0], float(len(scaled))
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            found = _solve([([counts[i] for i in chosen], one) for counts, one in scaled], size)
            if found is None or min(found) < 0:
                continue
            values = [0.0, 0.0, 0.0]
            for i, value in zip(chosen, found, strict=True):
                values[i] = value
            error = sum([(sum(map(float.__mul__, values, counts)) - one) ** 2 for counts, one in scaled])
            if error < least * (1 - 1e-9):
                best, least = values, error
    return best


def _solve(rows: Sequence[tuple[list[float], float]], size: int) -> list[float] | None:
    """The solution of the normal equations of ``rows``, by elimination; None if they have no single one."""
    scale = [max([abs(counts[i]) for counts, _ in rows], default=0.0) or 1.0 for i in range(size)]
    table = [
        [
            *[sum([counts[i] * counts[j] / scale[i] / scale[j] for counts, _ in rows]) for j in range(size)],
            sum([counts[i] / scale[i] * one for counts, one in rows]),
        ]
        for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda row: abs(table[row][i]))
        table[i], table[pivot] = table[pivot], table[i]
        if abs(table[i][i]) < 1e-12:
            return None
        table[i] = [value / table[i][i] for value in table[i]]
        for row in range(size):
            if row != i:
                factor = table[row][i]
                table[row] = [a - factor * b for a, b in zip(table[row], table[i], strict=True)]
    return [table[i][size] / scale[i] for i in range(size)]
