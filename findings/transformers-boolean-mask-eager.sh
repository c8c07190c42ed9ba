#!/usr/bin/env bash
# in short (engines): Eager attention adds a boolean 4-D mask as 1 and 0: nothing is hidden, not even the future. sdpa
# is right.
# guessed: a boolean 4-D attention_mask, True where a query may look, hides the same keys under attn_implementation
# sdpa and eager
# seen: eager adds it to the scores as 1 and 0: nothing is hidden, not even the future, and no error is raised; eager
# is the one that output_attentions needs
# with: transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q transformers==5.23.0 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

T = 6
mask = torch.ones(T, T, dtype=torch.bool).tril()
mask[4:, 1:3] = False  # tokens 1 and 2 are hidden from the last two
ids, result = torch.arange(T)[None], {}
for name in ("sdpa", "eager"):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, attn_implementation=name)).eval()
    for kind, given in (("boolean", mask), ("0 and -inf", torch.zeros(T, T).masked_fill(~mask, float("-inf")))):
        with torch.no_grad():
            out = model(ids, attention_mask=given[None, None], output_attentions=name == "eager")
        result[name, kind] = out.logits
        if name == "eager":
            weights = out.attentions[0][0].mean(0)  # (T, T)
            hidden = weights.masked_fill(mask, 0).sum(-1)
            print(f"eager, {kind}: attention that each token pays to what is hidden from it", hidden)
            assert (hidden[:-1].min() > 0.01) == (kind == "boolean")
right = result["sdpa", "0 and -inf"]
off = {key: (value - right).abs().max().item() for key, value in result.items()}
for key, value in off.items():
    print(*key, "off by", value)
assert max(off["sdpa", "boolean"], off["eager", "0 and -inf"]) < 1e-4 < 0.1 < off["eager", "boolean"]
EOF
