#!/usr/bin/env bash
# guessed: a prefix is read once, and generate(past_key_values=cache) continues it twice: the second call with the same
# cache raises an error
# seen: it silently returns other tokens, because the cache keeps what the first call appended; a copy of the cache per
# call gives the right ones
# with: transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q transformers==5.23.0 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import copy

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3)).eval()
prefix = torch.randint(100, (1, 8))


def greedy(cache=None):
    out = model.generate(prefix, attention_mask=torch.ones_like(prefix), past_key_values=cache, do_sample=False,
                         max_new_tokens=5, pad_token_id=0, eos_token_id=None)
    return out[0, 8:].tolist()


def read():
    with torch.no_grad():
        return model(prefix[:, :-1], use_cache=True).past_key_values


right, cache, clean = greedy(), read(), read()
first, second = greedy(cache), greedy(cache)
copies = [greedy(copy.deepcopy(clean)) for _ in range(3)]
print("without a cache        ", right)
print("first call with it     ", first)
print("second call            ", second, "cache length", cache.get_seq_length())
print("calls with copies of it", *copies)
assert first == right and all(c == right for c in copies)
assert second != right
EOF
