"""Writes a folder that vLLM takes for a model that listens, Qwen3-ASR: run with vLLM's own Python.

    python tests/real/tiny_asr_model.py FOLDER

It has no weights (`--load-format dummy`), so what it hears is noise. How it is served is real: this kind of
model is asked over the websocket /v1/realtime.
"""

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_asr import Qwen3ASRFeatureExtractor, Qwen3ASRProcessor

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"]

folder = Path(sys.argv[1])
words = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    eos_token="<|im_end|>",
    pad_token="<|endoftext|>",
    extra_special_tokens={
        "audio_token": "<|audio_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    },
)
Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(), fast).save_pretrained(folder)
number = dict(zip(SPECIAL, range(len(words), len(words) + len(SPECIAL)), strict=True))
settings = {
    "architectures": ["Qwen3ASRRealtimeGeneration"],
    "model_type": "qwen3_asr",
    "torch_dtype": "float32",
    "eos_token_id": number["<|im_end|>"],
    "thinker_config": {
        "audio_token_id": number["<|audio_pad|>"],
        "audio_start_token_id": number["<|audio_start|>"],
        "audio_config": {
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 64,
            "downsample_hidden_size": 16,
            "output_dim": 64,
            "n_window": 50,
            "n_window_infer": 800,
        },
        "text_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": len(words) + len(SPECIAL),
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
        },
    },
}
(folder / "config.json").write_text(json.dumps(settings))
