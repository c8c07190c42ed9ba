#!/usr/bin/env bash
# guessed: tie_word_embeddings is true and the file holds another lm_head.weight, too: the config decides, and the
# embedding is the head
# seen: the file decides: the model has two matrices, with a warning, while its config still says that they are one; a
# program that obeys the config reads another model from the same folder
# with: transformers 5.23.0, torch 2.13.0, safetensors 0.8.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q transformers==5.23.0 torch==2.13.0 safetensors==0.8.0
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'EOF'
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

Qwen2ForCausalLM(Qwen2Config(
    vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, tie_word_embeddings=True)).save_pretrained("folder")
tensors = load_file("folder/model.safetensors")
print("a tied model is saved with", [name for name in tensors if "head" in name or "embed" in name])
tied = {}
for name, head in (("the same matrix", tensors["model.embed_tokens.weight"].clone()), ("another", torch.ones(50, 16))):
    save_file({**tensors, "lm_head.weight": head}, "folder/model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained("folder")
    tied[name] = model.lm_head.weight is model.model.embed_tokens.weight
    print("lm_head.weight is", name, "-> tied:", tied[name], "| config says", model.config.tie_word_embeddings)
    assert model.config.tie_word_embeddings and torch.equal(model.lm_head.weight, head)
assert "lm_head.weight" not in tensors and tied == {"the same matrix": True, "another": False}
EOF
