#!/usr/bin/env bash
# in short (engines): Ignores RoPE's base and scaling as transformers 5 saves them: Llama 3 and others are another
# model from the second token on.
# guessed: mlx-lm, which needs transformers 5, reads a model that transformers 5 saved as transformers reads it
# seen: transformers 5 writes RoPE's base and scaling into rope_parameters of config.json, and no rope_theta or
# rope_scaling. mlx-lm looks for those two in Llama, Mistral, OLMo 2, SmolLM3 and Qwen2, and takes its own default,
# silently: a base of 10,000 (1,000,000 for Qwen2) and no scaling. So Llama 3.x, once trained and saved, is another
# model, wrong from the second token on. With the two keys in config.json, as transformers 4 wrote them, all are
# right; Qwen3 is anyway
# with: mlx-lm 0.32.2, mlx 0.32.4, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q mlx-lm==0.32.2 mlx==0.32.4 transformers==5.23.0 torch==2.13.0
venv/bin/pip install -q 'mlx[cpu]==0.32.4'
venv/bin/python -W ignore - <<'EOF'
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Olmo2Config, Qwen2Config, Qwen3Config, \
    SmolLM3Config
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
mx.set_default_device(mx.cpu)
SIZE = dict(vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, initializer_range=0.1, max_position_embeddings=131072,
            pad_token_id=0, bos_token_id=1, eos_token_id=2)
LLAMA = dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
             original_max_position_embeddings=8192)  # as Llama 3.2's


def plain(base):
    return dict(rope_type="default", rope_theta=base)


CASES = {  # what to save, and whether mlx-lm's default is what it needs
    "Llama, as 3.2": (LlamaConfig(**SIZE, rope_parameters={**LLAMA, "rope_theta": 500_000.0}), False),
    "Llama, as 3": (LlamaConfig(**SIZE, rope_parameters=plain(500_000.0)), False),
    "Llama, base 10,000": (LlamaConfig(**SIZE, rope_parameters=plain(10_000.0)), True),
    "Mistral": (MistralConfig(**SIZE, rope_parameters=plain(1_000_000.0)), False),
    "OLMo 2": (Olmo2Config(**SIZE, rope_parameters=plain(500_000.0)), False),
    "SmolLM3": (SmolLM3Config(**SIZE, rope_parameters=plain(5_000_000.0)), False),
    "Qwen2, as Qwen2.5-Math": (Qwen2Config(**SIZE, rope_parameters=plain(10_000.0)), False),
    "Qwen2, as Qwen2.5": (Qwen2Config(**SIZE, rope_parameters=plain(1_000_000.0)), True),
    "Qwen3": (Qwen3Config(**SIZE, rope_parameters=plain(1_000_000.0)), True)}


def apart(model, folder, ids):
    """How far mlx-lm's log-probs (T, V) of the saved model are from transformers', per token."""
    with torch.no_grad():
        right = model(ids).logits[0].log_softmax(-1).numpy()
    logits = load_model(folder)[0](mx.array(ids.numpy()))[0]
    return abs(np.array(logits - mx.logsumexp(logits, -1, keepdims=True)) - right).mean(-1)


for name, (config, fits) in CASES.items():
    torch.manual_seed(0)
    model, folder, ids = AutoModelForCausalLM.from_config(config).eval(), Path(name), torch.randint(3, 64, (1, 256))
    model.save_pretrained(folder)
    found = apart(model, folder, ids)
    saved = json.loads((folder / "config.json").read_text())
    assert "rope_theta" not in saved and "rope_scaling" not in saved
    rope = saved["rope_parameters"]
    saved.update(rope_theta=rope["rope_theta"], rope_scaling=rope if rope["rope_type"] == "llama3" else None)
    (folder / "config.json").write_text(json.dumps(saved))
    mended = apart(model, folder, ids)
    print(f"{name}: log-probs differ by {found.mean():.6f} on average, {found[0]:.6f} at the first token, "
          f"{mended.mean():.6f} with the keys of transformers 4")
    assert mended.max() < 1e-4 and found[0] < 1e-4 and (found.max() < 1e-4 if fits else found.mean() > 0.1)
EOF
