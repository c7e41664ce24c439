"""Writes a LoRA adapter for the tiny models of tiny_model.py, with which they say something else.

    python tests/real/tiny_lora.py SEED OUT.gguf

The weights come from a generator seeded with SEED, and are large: at temperature 0 a model answers otherwise
with an adapter of any seed, and with each differently.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
from tiny_model import BLOCKS, FEED_FORWARD, WIDTH, written

RANK, ALPHA = 4, 8.0


def write(seed: int, path: Path) -> None:
    generator = np.random.default_rng(seed)
    with written(path, "llama") as writer:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, ALPHA)
        for block in range(BLOCKS):
            for name, inner in (("attn_output", WIDTH), ("ffn_down", FEED_FORWARD)):
                for part, shape in (("a", (RANK, inner)), ("b", (WIDTH, RANK))):
                    weights = generator.normal(0, 0.2, shape).astype(np.float32)
                    writer.add_tensor(f"blk.{block}.{name}.weight.lora_{part}", weights)


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[1].isdigit():
        sys.exit(__doc__)
    write(int(sys.argv[1]), Path(sys.argv[2]))
