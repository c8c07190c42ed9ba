#!/usr/bin/env bash
# in short (trainers): Llama 3 gets another RoPE base and no scaling, so it is another model from the second token on.
# guessed: Tunix's Llama 3.1 and 3.2 read published weights as transformers does: a RoPE base of 500,000, as its
# config says, with the scaling of type llama3
# seen: the attention ignores the config's rope_theta and takes 1,000,000, and there is no scaling, so the model is
# another, silently: from the second token on its log-probs are wrong. They are transformers' own with that base and
# no scaling. Meta-Llama-3, which has no scaling, gets the wrong base, too
# with: google-tunix 0.1.7, jax 0.10.2, flax 0.12.8, transformers 5.12.1, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q google-tunix==0.1.7 jax==0.10.2 flax==0.12.8 transformers==5.12.1 torch==2.13.0
JAX_PLATFORMS=cpu venv/bin/python -W ignore - <<'EOF'
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging
from tunix.models.llama3 import params
from tunix.models.llama3.model import ModelConfig

logging.disable_progress_bar()
torch.manual_seed(0)
PLAIN = {"rope_type": "default", "rope_theta": 500_000.0}
ROPES = {  # as in the config.json of Llama-3.2-1B; of Meta-Llama-3; and what Tunix does
    "Llama-3.2": {**PLAIN, "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 8192},
    "Llama-3": PLAIN,
    "base 1,000,000": {**PLAIN, "rope_theta": 1_000_000.0}}
small = dataclasses.replace(  # Tunix's config of Llama-3.2-1B, with fewer and narrower layers
    ModelConfig.llama3p2_1b(), num_layers=2, vocab_size=64, embed_dim=128, hidden_dim=256, num_heads=2, num_kv_heads=1)


def make(rope):
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, rms_norm_eps=1e-5, tie_word_embeddings=True, initializer_range=0.1,
        max_position_embeddings=131072, rope_parameters=rope)).eval()


models = {name: make(rope) for name, rope in ROPES.items()}
for model in models.values():
    model.load_state_dict(models["Llama-3.2"].state_dict())
models["Llama-3.2"].save_pretrained("llama")
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
tunix = params.create_model_from_safe_tensors("llama", small, mesh, dtype=jnp.float32)
assert small.rope_theta == 500_000

for size in (16, 1024):
    ids = torch.randint(64, (1, size))
    causal = jnp.tril(jnp.ones((1, size, size), bool))
    logits, _ = tunix(jnp.array(ids.numpy()), jnp.arange(size)[None], None, causal)
    ours = np.array(jax.nn.log_softmax(logits[0]))
    for name, model in models.items():
        with torch.no_grad():
            apart = abs(model(ids).logits[0].log_softmax(-1).numpy() - ours)
        print(f"{size} tokens, log-probs of Tunix and of transformers with RoPE of {name}: "
              f"mean difference {apart.mean():.6f}, first token {apart[0].max():.6f}")
        assert apart[0].max() < 1e-3 and (apart.max() < 1e-2 if name.startswith("base") else apart.mean() > 0.02)
EOF
