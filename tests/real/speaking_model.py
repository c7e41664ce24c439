"""Writes a tiny Llama model that says what it was made to say, and one that shows it pictures.

    python tests/real/speaking_model.py OUT.gguf EYES.gguf

Nothing is trained: each token stands for a direction of its own, and the last layer names the token that
comes next, so what is said is a chain of tokens that begins at how the prompt ends. The answers are fixed;
that the engine samples them, and what its template, its grammar and its parsers make of them, is real.

``ENDINGS`` says which chain follows which end of a prompt: thoughts, a call of a tool, two of them, text. The
eyes turn each patch of a picture into how red and how blue it is; the one block of the model spreads that
over all that follows, where it decides between two words.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
from tiny_model import written

CONTEXT, WIDTH, HEADS, FEED_FORWARD = 32768, 512, 8, 32
"""The context is so long that an answer without an end lasts for minutes."""
ALWAYS, SEEN = 500, 501
"""Dimensions: what all tokens have, and red, green and blue."""
END = 2
CERTAIN = 10.0
"""How much likelier the next token of a chain is than all others."""
IMAGE, PATCH, EYES = 56, 14, 32
TURN = "<|im_end|>\n<|im_start|>assistant\n"
MUTE = "<think>\n\n</think>\n\n"
"""What the template has said already where no thoughts are wanted."""

CALL = [
    *("<tool_call>\n", '{"name": "get_weather",', ' "arguments": {"city":', ' "Paris"', "}}"),
    "\n</tool_call>",
]
TWO_CALLS = [
    *("<tool_call>\n{", '"name": "get_weather", "arguments": {', '"city": "Rome"}', "}\n</tool_call>"),
    *("\n<tool_call>\n", '{"name": "get_time", ', '"arguments": {"zone": "CET", ', '"summer": true', "}}\n"),
    "</tool_call>",
]
HELLO = ["Hello", " there,", " how", " are", " you?"]
SUNNY = ["It is", " sunny", " in Paris."]
ENDINGS: dict[str, list[str]] = {
    TURN: ["<think>\n", "They", " greet", " me.", "\n</think>\n\n", *HELLO],
    MUTE: HELLO,
    f"weather?{TURN}": ["<think>", "\nI", " must", " look.\n", "</think>\n\n", *CALL],
    f"weather?{TURN}{MUTE}": CALL,
    f"the time?{TURN}{MUTE}": TWO_CALLS,
    f"</tool_response>{TURN}": ["<think>\nSo", " it is", " there.\n</think>\n", "\n", *SUNNY],
    f"</tool_response>{TURN}{MUTE}": SUNNY,
    f"go on?{TURN}": ["On", " and on", " and on"],
    f"picture?{TURN}": ["The picture", " is"],
    f"picture?{TURN}{MUTE}": ["The picture", " is"],
}
COLOURS = {" red.": 0, " blue.": 2}
"""What ``is`` is followed by, and the channel of the picture that decides."""
OR_ELSE = {" you?": CALL[0]}
"""What follows where a grammar does not let an answer end: a call that is required."""

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
For each call return a JSON object with name and arguments within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content if message.content else "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def vocabulary() -> list[tuple[str, gguf.TokenType]]:
    kind = gguf.TokenType
    tokens = [("<unk>", kind.UNKNOWN), ("<s>", kind.CONTROL), ("<|im_end|>", kind.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", kind.BYTE) for byte in range(256)]
    tokens += [(letter, kind.NORMAL) for letter in "abcdefghijklmnopqrstuvwxyz\u2581"]
    said = dict.fromkeys(piece for chain in ENDINGS.values() for piece in chain)
    tokens += [(piece.replace(" ", "\u2581"), kind.NORMAL) for piece in (*said, *COLOURS)]
    return tokens + [(ending, kind.USER_DEFINED) for ending in ENDINGS]


def successors(tokens: list[tuple[str, gguf.TokenType]]) -> dict[int, int]:
    """Token -> the one that follows it: in its chain, or the end."""
    number = {token.replace("\u2581", " "): at for at, (token, _) in enumerate(tokens)}
    after = {number[" is"]: -1}
    for ending, chain in ENDINGS.items():
        for before, next in zip((ending, *chain), chain, strict=False):
            known = after.setdefault(number[before], number[next])
            assert known == number[next], f"two tokens follow {before!r}"
    return {at: after.get(at, END) for at in range(len(tokens)) if after.get(at) != -1}


def mouth(tokens: list[tuple[str, gguf.TokenType]]) -> dict[str, np.ndarray]:
    """Each token has a dimension of its own; those after the last are for what all share, and for colours."""
    size = len(tokens)
    embedded, named = np.eye(size, WIDTH), np.zeros((size, WIDTH))
    embedded[:, ALWAYS] = 0.1
    for before, next in successors(tokens).items():
        named[next, before] = 1.0
    number = {token.replace("\u2581", " "): at for at, (token, _) in enumerate(tokens)}
    for word, channel in COLOURS.items():
        named[number[word], [number[" is"], SEEN + channel]] = 1.0, 0.5
    for before, next in OR_ELSE.items():
        named[number[next], number[before]] = 0.5
    for closing in '"]}':
        named[number[f"<0x{ord(closing):02X}>"], ALWAYS] = 0.1
    zero, spread = np.zeros((WIDTH, WIDTH)), np.zeros((WIDTH, WIDTH))
    spread[range(SEEN, SEEN + 3), range(SEEN, SEEN + 3)] = 1.0
    weights = {"token_embd": embedded, "output_norm": np.ones(WIDTH), "output": named * CERTAIN}
    weights |= {"blk.0.attn_q": zero, "blk.0.attn_k": zero, "blk.0.attn_v": spread * 0.2}
    weights |= {"blk.0.attn_output": spread, "blk.0.attn_norm": np.ones(WIDTH)}
    weights |= {f"blk.0.ffn_{each}": np.zeros((FEED_FORWARD, WIDTH)) for each in ("gate", "up")}
    return weights | {"blk.0.ffn_down": np.zeros((WIDTH, FEED_FORWARD)), "blk.0.ffn_norm": np.ones(WIDTH)}


def write_mouth(path: Path) -> None:
    tokens = vocabulary()
    assert len(tokens) <= ALWAYS
    with written(path, "llama") as writer:
        writer.add_name("speaking")
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(1)
        writer.add_feed_forward_length(FEED_FORWARD)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(HEADS)
        writer.add_rope_dimension_count(WIDTH // HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(len(tokens))
        writer.add_tokenizer_model("llama")
        writer.add_token_list([token for token, _ in tokens])
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types([int(kind) for _, kind in tokens])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(END)
        writer.add_add_space_prefix(False)
        writer.add_chat_template(CHAT_TEMPLATE)
        for name, weights in mouth(tokens).items():
            writer.add_tensor(f"{name}.weight", weights.astype(np.float32))


def eyes() -> dict[str, np.ndarray]:
    """A LLaVA of one block, which is the one that is left out: patches, and the projector."""
    patches, seen = np.zeros((EYES, 3, PATCH, PATCH)), np.zeros((EYES, EYES))
    shown = np.zeros((WIDTH, EYES))
    for channel in range(3):
        patches[channel, channel] = 1 / PATCH**2
        seen[channel, channel] = 10.0
        shown[SEEN + channel, channel] = 1.0
    weights = {
        "v.patch_embd.weight": patches,
        "v.position_embd.weight": np.zeros(((IMAGE // PATCH) ** 2, EYES)),
    }
    weights |= {"mm.0.weight": seen, "mm.0.bias": np.zeros(EYES)}
    weights |= {"mm.2.weight": shown, "mm.2.bias": np.zeros(WIDTH)}
    for part in ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down"):
        weights[f"v.blk.0.{part}.weight"] = np.zeros((EYES, EYES))
        weights[f"v.blk.0.{part}.bias"] = np.zeros(EYES)
    for norm in ("ln1", "ln2"):
        weights |= {f"v.blk.0.{norm}.weight": np.ones(EYES), f"v.blk.0.{norm}.bias": np.zeros(EYES)}
    return weights


def write_eyes(path: Path) -> None:
    with written(path, "clip") as writer:
        writer.add_bool("clip.has_vision_encoder", True)
        writer.add_string("clip.projector_type", "mlp")
        writer.add_bool("clip.use_gelu", True)
        numbers = {"image_size": IMAGE, "patch_size": PATCH, "embedding_length": EYES, "block_count": 1}
        numbers |= {"feed_forward_length": EYES, "projection_dim": WIDTH, "attention.head_count": 2}
        for key, value in numbers.items():
            writer.add_uint32(f"clip.vision.{key}", value)
        writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
        writer.add_array("clip.vision.image_mean", [0.0] * 3)
        writer.add_array("clip.vision.image_std", [1.0] * 3)
        for name, weights in eyes().items():
            writer.add_tensor(name, weights.astype(np.float32))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    write_mouth(Path(sys.argv[1]))
    write_eyes(Path(sys.argv[2]))
