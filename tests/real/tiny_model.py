"""Writes a tiny random Llama model that llama-server loads in a moment.

    python tests/real/tiny_model.py SEED OUT.gguf

The text it makes is noise; everything around it is real: chat template, tokens, streams, usage, timings,
slots. The weights come from a generator seeded with SEED, so models of different seeds answer differently and
one seed always gives the same file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np

WIDTH, BLOCKS, HEADS, FEED_FORWARD, CONTEXT = 64, 2, 4, 128, 4096
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def vocabulary() -> tuple[list[str], list[int]]:
    kind = gguf.TokenType
    letters = [*"abcdefghijklmnopqrstuvwxyz", "\u2581"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    kinds = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256, *[kind.NORMAL] * len(letters)]
    return tokens, [int(each) for each in kinds]


def shapes(
    vocabulary_size: int, *, width: int = WIDTH, feed_forward: int = FEED_FORWARD, blocks: int = BLOCKS
) -> dict[str, tuple[int, ...]]:
    named: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary_size, width),
        "output_norm.weight": (width,),
        "output.weight": (vocabulary_size, width),
    }
    for block in range(blocks):
        named |= {f"blk.{block}.attn_{part}.weight": (width, width) for part in ("q", "k", "v", "output")}
        named |= {f"blk.{block}.{part}_norm.weight": (width,) for part in ("attn", "ffn")}
        named |= {f"blk.{block}.ffn_{part}.weight": (feed_forward, width) for part in ("gate", "up")}
        named[f"blk.{block}.ffn_down.weight"] = (width, feed_forward)
    return named


@contextmanager
def written(path: Path, architecture: str) -> Iterator[gguf.GGUFWriter]:
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, architecture)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(part, path)  # whoever finds the file finds all of it


def write(seed: int, path: Path) -> None:
    tokens, kinds = vocabulary()
    with written(path, "llama") as writer:
        writer.add_name(f"tiny-{seed}")
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(BLOCKS)
        writer.add_feed_forward_length(FEED_FORWARD)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(HEADS)
        writer.add_rope_dimension_count(WIDTH // HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(len(tokens))
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types(kinds)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(CHAT_TEMPLATE)
        generator = np.random.default_rng(seed)
        for name, shape in shapes(len(tokens)).items():
            weights = np.ones(shape) if name.endswith("_norm.weight") else generator.normal(0, 0.02, shape)
            writer.add_tensor(name, weights.astype(np.float32))


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[1].isdigit():
        sys.exit(__doc__)
    write(int(sys.argv[1]), Path(sys.argv[2]))
