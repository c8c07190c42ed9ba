#!/usr/bin/env bash
# in short (adapters): A forward with one adapter, set_adapter, a forward with the other, and one backward: the first
# adapter gets no gradient.
# guessed: a forward with adapter one, set_adapter of two, a forward, and one backward of both losses: both adapters
# get gradients
# seen: adapter one gets none, silently: set_adapter cleared its requires_grad, which the backward pass looks at;
# set_requires_grad for both after the switch, or a backward before it, gives the right ones
# with: peft 0.21.2, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q peft==0.21.2 transformers==5.23.0 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
model = get_peft_model(Qwen2ForCausalLM(Qwen2Config(
    vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.1)), config, adapter_name="one")
model.add_adapter("two", config)
text = torch.arange(2, 22)[None]


def norms():
    """The size of each adapter's gradient, which is then forgotten."""
    sizes = [sum(p.grad.square().sum().item() for name, p in model.named_parameters()
                 if f".{adapter}." in name and p.grad is not None) ** 0.5 for adapter in ("one", "two")]
    model.zero_grad()
    return sizes


def loss(adapter, both=False):
    model.set_adapter(adapter)
    if both:
        model.set_requires_grad(["one", "two"])
    return model(text, labels=text).loss


loss("one").backward()
loss("two").backward()
apart = norms()
(loss("one") + loss("two")).backward()
together = norms()
(loss("one", both=True) + loss("two", both=True)).backward()
required = norms()
print("sizes of the gradients of one and two, a backward for each:", apart)
print("one backward of the sum:", together)
print("one backward of the sum, requires_grad set for both:", required)
assert min(apart) > 1 and together[0] == 0 and abs(together[1] - apart[1]) < 1e-4
assert max(abs(x - y) for x, y in zip(required, apart)) < 1e-4
EOF
