#!/usr/bin/env bash
# in short (engines): In Qwen3-Next and gpt-oss, packed documents see each other where positions alone separate them.
# guessed: documents packed behind each other, with positions that restart and no mask, are each read alone by every
# causal model of transformers, as by Qwen2
# seen: on a CPU Qwen3-Next's attention layers keep them apart and its recurrent layers do not, silently; told of the
# documents by cu_seq_lens_q and seq_idx, too, it refuses without causal_conv1d. Nor does gpt-oss keep them apart, in
# the eager attention that it picks, in which Qwen2 does: it makes its mask without the positions. Given the mask that
# transformers makes with them, it is right
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
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

SIZE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, initializer_range=0.3)
NEXT = dict(**SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)
GPT_OSS = dict(**SIZE, num_local_experts=4, num_experts_per_tok=2)
one, two = torch.arange(3, 10)[None], torch.arange(20, 25)[None]
both, positions = torch.cat([one, two], 1), torch.cat([torch.arange(7), torch.arange(5)])[None]


def off(config, own_mask=False, **told):
    """How far the log-probs of two packed documents are from those of each alone, in nats, and the attention."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    if own_mask:
        known = dict(config=model.config, inputs_embeds=model.get_input_embeddings()(both), attention_mask=None,
                     past_key_values=None, position_ids=positions)
        told["attention_mask"] = {"full_attention": create_causal_mask(**known),
                                  "sliding_attention": create_sliding_window_causal_mask(**known)}
    with torch.no_grad():
        packed = model(both, position_ids=positions, use_cache=False, **told).logits.log_softmax(-1).split([7, 5], 1)
        alone = [model(ids, use_cache=False).logits.log_softmax(-1) for ids in (one, two)]
    return [(a - b).abs().max().item() for a, b in zip(packed, alone)], model.config._attn_implementation


for name, leaks, result in (
        ("Qwen2", False, off(Qwen2Config(**SIZE))),
        ("Qwen2, eager", False, off(Qwen2Config(**SIZE, attn_implementation="eager"))),
        ("Qwen3-Next", True, off(Qwen3NextConfig(**NEXT))),
        ("Qwen3-Next, attention only", False, off(Qwen3NextConfig(**NEXT, layer_types=["full_attention"] * 4))),
        ("Qwen3-Next, recurrent only", True, off(Qwen3NextConfig(**NEXT, layer_types=["linear_attention"] * 4))),
        ("gpt-oss", True, off(GptOssConfig(**GPT_OSS))),
        ("gpt-oss, a mask of the positions", False, off(GptOssConfig(**GPT_OSS), own_mask=True))):
    (first, second), attention = result
    print(f"{name} ({attention}): the first document is off by {first:.5f} nats, the second by {second:.5f}")
    assert first < 1e-3 and (second > 0.5 if leaks else second < 1e-3)
    assert attention == ("eager" if "gpt-oss" in name or "eager" in name else "sdpa")
ends = torch.tensor([0, 7, 12], dtype=torch.int32)
try:
    off(Qwen3NextConfig(**NEXT), cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=7, max_length_k=7,
        seq_idx=torch.tensor([[0] * 7 + [1] * 5], dtype=torch.int32))
except ValueError as error:
    print("Qwen3-Next with cu_seq_lens_q and seq_idx:", error)
    assert "causal_conv1d" in str(error)
else:
    raise SystemExit("Qwen3-Next takes cu_seq_lens_q and seq_idx without causal_conv1d")
EOF
