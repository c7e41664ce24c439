"""Writes a LoRA adapter for the models of tiny_hf_model.py: run with vLLM's own Python.

    python tests/real/tiny_hf_lora.py FOLDER SEED

The weights come from a generator seeded with SEED, and are large: at temperature 0 a model answers otherwise
with an adapter of any seed, and with each differently.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

WIDTH, LAYERS, RANK = 64, 2, 8
PROJECTIONS = [f"{each}_proj" for each in "qkvo"]

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir(parents=True)
settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": PROJECTIONS, "bias": "none"}
(folder / "adapter_config.json").write_text(json.dumps(settings))
generator = torch.Generator().manual_seed(seed)
weights = {}
for layer in range(LAYERS):
    for name in PROJECTIONS:
        at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{at}.lora_A.weight"] = torch.randn(RANK, WIDTH, generator=generator) * 0.3
        weights[f"{at}.lora_B.weight"] = torch.randn(WIDTH, RANK, generator=generator) * 0.3
save_file(weights, folder / "adapter_model.safetensors")
