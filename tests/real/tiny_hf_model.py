"""Writes a folder that vLLM takes for a Llama model: run with vLLM's own Python, and `--load-format dummy`.

    python tests/real/tiny_hf_model.py FOLDER

A configuration and a byte-level tokenizer, no weights: what it says is noise, how it is served is real.
"""

import json
import sys
from pathlib import Path

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
