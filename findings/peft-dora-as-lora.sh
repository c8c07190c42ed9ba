#!/usr/bin/env bash
# in short (adapters): convert_to_lora and save_as_lora drop DoRA's magnitudes, so the result is another model at any
# rank. Merging first is exact.
# guessed: convert_to_lora and save_as_lora approximate an adapter as closely as the rank allows, as their page says, so
# a DoRA adapter, for an engine that knows LoRA alone, becomes the nearest LoRA, and a high rank loses little
# seen: what comes out is DoRA's own A and B without its magnitudes, which is no approximation of it: at rank 24 the
# log-probs are as far off as at rank 8, here by as much as the adapter had moved them at all. The only warning is that
# the adapter is a LoRA already and there is no need to convert it. Plain LoRA comes out exactly, and merge_and_unload
# before saving is exact for DoRA
# with: peft 0.21.2, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q peft==0.21.2 transformers==5.23.0 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import torch
from peft import LoraConfig, PeftModel, get_peft_model, save_as_lora
from transformers import Qwen2Config, Qwen2ForCausalLM

text = torch.arange(2, 22)[None]


def base():
    """The start model, always the same."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=60, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2)).eval()


def apart(model, other):
    """The largest difference in log-prob of two models on the text."""
    with torch.no_grad():
        return (model(text).logits.log_softmax(-1) - other(text).logits.log_softmax(-1)).abs().max().item()


errors = {}
for dora in (False, True):
    model = get_peft_model(base(), LoraConfig(
        r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM", use_dora=dora)).eval()
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.requires_grad:  # as training might: magnitudes by some percent
            weight.data += torch.randn_like(weight) * (0.05 * weight.abs().mean() if "magnitude" in name else 0.05)
    moved = apart(model, base())
    for rank in (8, 24):
        save_as_lora(f"saved-{dora}-{rank}", model, rank=rank)
        errors[dora, rank] = apart(PeftModel.from_pretrained(base(), f"saved-{dora}-{rank}"), model)
        print(f"{'DoRA' if dora else 'LoRA'}: moved log-probs by up to {moved:.2f}; converted at rank {rank}, it is off "
              f"by {errors[dora, rank]:.2g}")
converted = dict(PeftModel.from_pretrained(base(), "saved-True-8").named_parameters())
own = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
product = lambda found, a: found[a.replace("lora_A", "lora_B")] @ found[a]
same = max((2 * product(own, a) - product(converted, a)).abs().max().item() for a in own if "lora_A" in a)
with torch.no_grad():
    before = model(text).logits.log_softmax(-1)
    merged = (model.merge_and_unload()(text).logits.log_softmax(-1) - before).abs().max().item()
print(f"the converted products are those of DoRA's A and B: off by {same:.0e}; merged, DoRA is off by {merged:.0e}")
assert max(errors[False, 8], errors[False, 24], same, merged) < 1e-4
assert errors[True, 8] > 0.5 * moved and abs(errors[True, 8] - errors[True, 24]) < 1e-3
EOF
