"""How large a model's weights are, guessed from its name: a hint for people, never a setting."""

from __future__ import annotations

import re

GIB = 1 << 30
MIXED = re.compile(r"(?<!\d)(\d+)x(\d+(?:\.\d+)?)b(?![a-z0-9])", re.I)
BILLIONS = re.compile(r"(?<![a-z0-9.])(?:[eE])?(\d+(?:\.\d+)?)b(?![a-z0-9])", re.I)
MILLIONS = re.compile(r"(?<![a-z0-9.])(\d+)m(?![a-z0-9])", re.I)
BITS: tuple[tuple[str, float], ...] = (
    (r"(?<![a-z0-9])i?q([2-6])_", 0.0),
    (r"(?<![a-z0-9])q8(_0)?(?![a-z0-9])", 8.5),
    (r"awq|gptq|int4|w4a16|4bit|nf4|mxfp4|nvfp4|bnb|(?<![a-z0-9])q4(?![a-z0-9])", 4.5),
    (r"fp8|int8|w8a8|8bit", 8.5),
    (r"f32|fp32", 32.0),
    (r"(?<![a-z])(b?f16|fp16)", 16.0),
    (r"gpt-oss", 4.5),
    (r"(?<![a-z0-9])gguf", 4.8),
)
"""Pattern in a model's name -> bits for each weight; 0: the number in it, and 0.8 for scales."""
USUAL = {"ollama": 4.8, "llamacpp": 4.8}
"""Engine -> bits for each weight where the name does not say; others keep 16."""


def weights_of(model: str, engine: str, more: str = "") -> float | None:
    """Return the size of the weights in GiB; None where the name does not say how many there are.

    ``more``: what else says how they are stored, such as ``--quantization awq``.
    """
    if mixed := MIXED.search(model):
        billions = int(mixed[1]) * float(mixed[2])
    elif found := BILLIONS.search(model):
        billions = float(found[1])
    elif small := MILLIONS.search(model):
        billions = int(small[1]) / 1000
    else:
        return None
    return billions * 1e9 * _bits(f"{model} {more}", engine) / 8 / GIB


def _bits(text: str, engine: str) -> float:
    for pattern, bits in BITS:
        if found := re.search(pattern, text, re.I):
            return bits or int(found[1]) + 0.8
    return USUAL.get(engine, 16.0)
