#!/usr/bin/env bash
# guessed: documents packed behind each other, with positions that restart and no mask, are each read alone by every
# causal model of transformers, as by Qwen2
# seen: Qwen3-Next reads the later document behind the state that the earlier one left: its attention layers keep them
# apart, its recurrent layers do not, silently. gpt-oss, which has only attention, does not keep them apart either. So a
# document's log-probs depend on what it was packed behind
# with: transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q transformers==5.23.0 torch==2.13.0
TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen2Config, Qwen3NextConfig

SIZE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, initializer_range=0.3)
CONFIGS = {
    "Qwen2": Qwen2Config(**SIZE),
    "Qwen3-Next": Qwen3NextConfig(
        **SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8),
    "gpt-oss": GptOssConfig(**SIZE, num_local_experts=4, num_experts_per_tok=2),
}
one, two = torch.arange(3, 10)[None], torch.arange(20, 25)[None]
positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
off = {}
for name, config in CONFIGS.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        packed = model(torch.cat([one, two], 1), position_ids=positions, use_cache=False).logits.log_softmax(-1)
        alone = [model(ids, use_cache=False).logits.log_softmax(-1) for ids in (one, two)]
    off[name] = [(a - b).abs().max().item() for a, b in zip(packed.split([7, 5], 1), alone)]
    print(f"{name}: the first document is off by {off[name][0]:.5f} nats, the second by {off[name][1]:.5f}")
assert max(off["Qwen2"]) < 1e-3
assert all(off[name][0] < 1e-3 and off[name][1] > 0.5 for name in ("Qwen3-Next", "gpt-oss"))
EOF
