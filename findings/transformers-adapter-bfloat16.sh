#!/usr/bin/env bash
# in short (adapters): add_adapter and load_adapter make the adapter in the model's bfloat16, where small steps of
# AdamW are lost. PEFT's own use float32.
# guessed: a model in bfloat16 gets its adapter in float32 from transformers' add_adapter and load_adapter, as from
# PEFT's get_peft_model and PeftModel
# seen: transformers makes and loads it in bfloat16, also for training: a saved float32 adapter is rounded, and at a
# learning rate of 1e-5 100 steps of AdamW leave most numbers of A where they are; with PEFT, all of them move
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
    num_key_value_heads=2, initializer_range=0.1)).bfloat16().save_pretrained("base")
config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")


def base():
    return AutoModelForCausalLM.from_pretrained("base")


def by_transformers(folder=None):
    model = base()
    if folder is None:
        model.add_adapter(config)
    else:
        model.load_adapter(folder, is_trainable=True)
    return model


def by_peft(folder=None):
    return PeftModel.from_pretrained(base(), folder, is_trainable=True) if folder else get_peft_model(base(), config)


def weights(model):
    return {name.removeprefix("base_model.model."): p for name, p in model.named_parameters() if p.requires_grad}


model = by_peft()
for p in weights(model).values():
    p.data += 1e-3 * torch.randn(p.shape)
model.save_pretrained("adapter")
saved = weights(by_peft("adapter"))
text, moved, rounded = torch.arange(2, 22)[None], {}, {}
for way in (by_transformers, by_peft):
    for folder in (None, "adapter"):
        model = way(folder)
        trained = weights(model)
        A = {name: p for name, p in trained.items() if "lora_A" in name}
        start = {name: p.detach().clone() for name, p in A.items()}
        if folder:
            rounded[way] = sum((start[name].float() != saved[name]).sum().item() for name in A)
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-5, weight_decay=0)
        for _ in range(100):
            model(text, labels=text).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        count = sum(p.numel() for p in A.values())
        moved[way, folder] = sum((p != start[name]).sum().item() for name, p in A.items()) / count
        kind = {p.dtype for p in trained.values()}
        print(f"{way.__name__}, {'loaded' if folder else 'new'}: {kind}, {moved[way, folder]:.1%} of A moved", end="")
        print(f", {rounded[way]} of {count} differ from the file" if folder else "")
        assert kind == {torch.bfloat16 if way is by_transformers else torch.float32}
assert rounded[by_peft] == 0 and rounded[by_transformers] > 0.9 * count
for folder in (None, "adapter"):
    assert moved[by_peft, folder] > 0.99 and moved[by_transformers, folder] < 0.5
EOF
