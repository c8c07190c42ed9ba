#!/usr/bin/env bash
# in short (adapters): add_weighted_adapter's linear mean of an adapter and its copy is twice the adapter.
# combination_type="cat" is right.
# guessed: add_weighted_adapter with combination_type linear and weights of 0.5 and 0.5 gives roughly the mean of two
# adapters, such as two seeds' (its page: a very rough approximation); of an adapter and its copy, the adapter
# seen: of an adapter and its copy it gives twice the adapter; so do dare_linear and magnitude_prune, nothing dropped;
# ties gives half. A and B are summed apart, each with the root of the weights, so n equal adapters of weight 1/n give
# n times one. Of two unrelated adapters the products of one's B and the other's A are as large as the mean itself. cat
# is right, and svd with the rank to hold the sum
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
config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
model = get_peft_model(Qwen2ForCausalLM(Qwen2Config(
    vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2)), config, adapter_name="one")
model.save_pretrained("saved")
for copy in ("two", "three"):
    model.load_adapter("saved/one", copy)
model.add_adapter("other", config)


def product(name):
    """What an adapter adds to the query matrix, flat."""
    return model.base_model.model.model.layers[0].self_attn.q_proj.get_delta_weight(name).detach().flatten()


def mean(names, kind, **how):
    """The adapters' weighted sum, with weights that add up to 1."""
    model.add_weighted_adapter(names, [1 / len(names)] * len(names), "mean", combination_type=kind, **how)
    found = product("mean")
    model.delete_adapter("mean")
    return found


one, factors = product("one"), {}
for kind in ("linear", "dare_linear", "magnitude_prune", "ties", "cat", "svd"):
    how = {} if kind in ("linear", "cat", "svd") else {"density": 1.0}
    found = mean(["one", "two"], kind, **how)
    factors[kind] = (found @ one / (one @ one)).item()
    assert (found - factors[kind] * one).norm() < 1e-4 * one.norm()  # a multiple of it, and nothing else
factors["linear, three"] = (mean(["one", "two", "three"], "linear") @ one / (one @ one)).item()
half = (one + product("other")) / 2
strange = (mean(["one", "other"], "linear") - half).norm() / half.norm()
exact = max((mean(["one", "other"], kind, **how) - half).norm() / half.norm()
            for kind, how in (("cat", {}), ("svd", {"svd_rank": 8})))
print("mean of an adapter and its copies, in adapters:", {kind: round(x, 4) for kind, x in factors.items()})
print(f"mean of two unrelated ones, linear: off by {strange:.2f} of its size; cat, and svd of rank 8: by {exact:.0e}")
wanted = {"linear": 2, "dare_linear": 2, "magnitude_prune": 2, "ties": 0.5, "cat": 1, "svd": 1, "linear, three": 3}
assert all(abs(factors[kind] - x) < 1e-3 for kind, x in wanted.items())
assert strange > 0.8 and exact < 1e-4
EOF
