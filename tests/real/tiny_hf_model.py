"""Writes a folder that vLLM takes for a Llama model: run with vLLM's own Python.

    python tests/real/tiny_hf_model.py FOLDER [SEED]

A configuration and a byte-level tokenizer: what it says is noise, how it is served is real. Without SEED it
has no weights (`--load-format dummy`). With SEED they are random, and so large that what it says depends on
all that it read.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
SPECIAL = ["<unk>", "<s>", "</s>"]

folder = Path(sys.argv[1])
words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
vocabulary = {word: number for number, word in enumerate(words)}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
)
fast.chat_template = CHAT_TEMPLATE
fast.save_pretrained(folder)
settings = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": len(words),
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
(folder / "config.json").write_text(json.dumps(settings))


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    wide, inner, vocabulary = settings["hidden_size"], settings["intermediate_size"], settings["vocab_size"]
    shapes = {"model.embed_tokens": (vocabulary, wide), "lm_head": (vocabulary, wide)}
    norms = ["model.norm"]
    for number in range(settings["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.self_attn.{each}_proj": (wide, wide) for each in "qkvo"}
        shapes |= {f"{layer}.mlp.{each}_proj": (inner, wide) for each in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (wide, inner)}
        norms += [f"{layer}.{each}_layernorm" for each in ("input", "post_attention")]
    drawn = {f"{name}.weight": torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    weights = {name: each * 1.5 / each.shape[1] ** 0.5 for name, each in drawn.items()}
    return weights | {f"{name}.weight": torch.ones(wide) for name in norms}


if len(sys.argv) > 2:
    save_file(random_weights(int(sys.argv[2])), folder / "model.safetensors")
