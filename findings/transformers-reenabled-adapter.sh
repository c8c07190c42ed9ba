#!/usr/bin/env bash
# in short (adapters): disable_adapters and then enable_adapters leaves trained modules_to_save switched off. PEFT's
# disable_adapter brings them back.
# guessed: disable_adapters() and then enable_adapters() brings back the model as it was
# seen: not with modules_to_save: disable_adapters() switches off their trained copies, and enable_adapters() and
# set_adapter() leave them off, so they stay the base's, silently; PEFT's own disable_adapter() brings all back
# with: transformers 5.23.0, peft 0.21.2, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q transformers==5.23.0 peft==0.21.2 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
Qwen2ForCausalLM(Qwen2Config(
    vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.1)).save_pretrained("base")
for folder, modules in (("plain", None), ("head", ["lm_head"])):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained("base"), LoraConfig(
        r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False,
        modules_to_save=modules))
    for name, p in model.named_parameters():
        if "modules_to_save" in name:
            p.data += 0.1 * torch.randn(p.shape)
    model.save_pretrained(folder)


@torch.no_grad()
def logits(model):
    return model(torch.arange(2, 22)[None]).logits


def far(a, b):
    return (a - b).abs().max().item()


base, off = logits(AutoModelForCausalLM.from_pretrained("base")), {}
for folder in ("plain", "head"):
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = logits(model)
    model.disable_adapters()
    assert torch.equal(logits(model), base)
    model.set_adapter("default")
    off[folder, "set_adapter"] = far(logits(model), before)
    assert torch.equal(logits(model), base)
    model.enable_adapters()
    off[folder, "enable_adapters"] = far(logits(model), before)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), folder)
    with model.disable_adapter():
        assert torch.equal(logits(model), base)
    off[folder, "PEFT's disable_adapter"] = far(logits(model), before)
for (folder, way), value in off.items():
    print(f"{folder:5} switched off, then {way}: logits differ by up to {value:.2g} from those before")
assert off["plain", "enable_adapters"] == 0 and off["head", "enable_adapters"] > 0.5
assert max(value for (_, way), value in off.items() if "PEFT" in way) < 1e-5
EOF
