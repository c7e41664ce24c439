"""Writes a tiny random Llama model that llama-server loads in a moment, and larger ones for benchmarks.

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
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

WIDTH, BLOCKS, HEADS, FEED_FORWARD, CONTEXT = 64, 2, 4, 128, 4096
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@dataclass(frozen=True)
class Size:
    """How large a model is. Its tensors have half precision unless it is tiny."""

    width: int
    blocks: int
    heads: int
    kv_heads: int
    feed_forward: int
    context: int
    experts: int = 0
    """Of which ``EXPERTS_USED`` compute each token; 0: it is dense."""

    @property
    def block_bytes(self) -> int:
        attention = 2 * self.width * self.width * (1 + self.kv_heads / self.heads)
        return 2 * round(attention + 3 * self.width * self.feed_forward * max(self.experts, 1))


TINY = Size(WIDTH, BLOCKS, HEADS, HEADS, FEED_FORWARD, CONTEXT)
EXPERTS_USED = 2


def vocabulary() -> tuple[list[str], list[int]]:
    kind = gguf.TokenType
    letters = [*"abcdefghijklmnopqrstuvwxyz", "\u2581"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    kinds = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256, *[kind.NORMAL] * len(letters)]
    return tokens, [int(each) for each in kinds]


def shapes(vocabulary_size: int, size: Size) -> dict[str, tuple[int, ...]]:
    width, feed_forward = size.width, size.feed_forward
    keys_width = width * size.kv_heads // size.heads
    named: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary_size, width),
        "output_norm.weight": (width,),
        "output.weight": (vocabulary_size, width),
    }
    for block in range(size.blocks):
        rows = {"q": width, "k": keys_width, "v": keys_width, "output": width}
        named |= {f"blk.{block}.attn_{part}.weight": (count, width) for part, count in rows.items()}
        named |= {f"blk.{block}.{part}_norm.weight": (width,) for part in ("attn", "ffn")}
        each, of = ("_exps", (size.experts,)) if size.experts else ("", ())
        named |= {
            f"blk.{block}.ffn_{part}{each}.weight": (*of, feed_forward, width) for part in ("gate", "up")
        }
        named[f"blk.{block}.ffn_down{each}.weight"] = (*of, width, feed_forward)
        if size.experts:
            named[f"blk.{block}.ffn_gate_inp.weight"] = (size.experts, width)
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


def write(seed: int, path: Path, size: Size = TINY) -> None:
    tokens, kinds = vocabulary()
    with written(path, "llama") as writer:
        writer.add_name(f"tiny-{seed}")
        writer.add_context_length(size.context)
        writer.add_embedding_length(size.width)
        writer.add_block_count(size.blocks)
        writer.add_feed_forward_length(size.feed_forward)
        writer.add_head_count(size.heads)
        writer.add_head_count_kv(size.kv_heads)
        writer.add_rope_dimension_count(size.width // size.heads)
        writer.add_layer_norm_rms_eps(1e-5)
        if size.experts:
            writer.add_expert_count(size.experts)
            writer.add_expert_used_count(EXPERTS_USED)
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
        for name, shape in shapes(len(tokens), size).items():
            if name.endswith(("_norm.weight", "_inp.weight")):
                weights = np.ones(shape, np.float32)
            elif size == TINY:
                weights = generator.normal(0, 0.02, shape).astype(np.float32)
            else:  # any halves that are small: to draw them by a distribution would take minutes
                weights = generator.integers(0, 1 << 13, shape, np.uint16).view(np.float16)
            writer.add_tensor(name, weights)


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[1].isdigit():
        sys.exit(__doc__)
    write(int(sys.argv[1]), Path(sys.argv[2]))
