#!/usr/bin/env bash
# in short (rollouts): A gap in position_ids begins a new document: later tokens don't see what stands before. A mask
# of ones prevents it.
# guessed: tokens are cut out of a text and the others keep their position_ids: each later token still sees all that
# is left before it
# seen: without a mask and a cache (so in training with gradient checkpointing, too) any step of the positions other
# than 1 begins a new document, and what follows no longer sees what stands before; a mask of ones prevents it; where
# positions do restart, at the default arguments packed documents see each other
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

torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3)).eval()
text = torch.randint(100, (1, 9))
left = torch.tensor([[0, 1, 2, 5, 6, 7, 8]])  # positions 3 and 4 are cut out
cut, ones = text[:, left[0]], torch.ones_like(left)


def apart(a, b):
    return (a - b).abs().max().item()


with torch.no_grad():
    def logits(ids, positions, **arguments):
        return model(ids, position_ids=positions, **arguments).logits[:, -4:]  # those behind the gap

    causal = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    right = logits(cut, left, attention_mask=causal)
    alone = logits(cut[:, 3:], left[:, 3:], attention_mask=ones[:, 3:])  # as if nothing stood before them
    default, masked = logits(cut, left), logits(cut, left, use_cache=False, attention_mask=ones)
    bare = logits(cut, left, use_cache=False)
    model.train().gradient_checkpointing_enable()
    training = logits(cut, left)
    model.eval().gradient_checkpointing_disable()
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    second = logits(cut[:, 3:], packed[:, 3:])  # the second document by itself
    together, isolated = logits(cut, packed), logits(cut, packed, use_cache=False)
print("gap, default arguments           off by", apart(default, right))
print("gap, use_cache=False, mask of 1  off by", apart(masked, right))
print("gap, use_cache=False             off by", apart(bare, right), "from text before hidden:", apart(bare, alone))
print("gap, gradient checkpointing      off by", apart(training, right))
print("two packed documents, default arguments:", apart(together, second), "use_cache=False:", apart(isolated, second))
assert max(apart(default, right), apart(masked, right), apart(bare, alone), apart(isolated, second)) < 1e-4
assert min(apart(bare, right), apart(training, right), apart(together, second)) > 0.1
EOF
