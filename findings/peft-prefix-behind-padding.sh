#!/usr/bin/env bash
# in short (adapters): Prompt and prefix tuning count left padding as distance: log-probs depend on the batch's
# longest prompt, and differ from those sampled from.
# guessed: a model with PEFT's prompt tuning or prefix tuning reads a text behind padding on the left, with its mask, as
# it reads it alone, as LoRA does, and its forward pass gives the log-probs that its generate drew from
# seen: neither. The virtual tokens stand at the row's front, and PEFT drops position_ids, so the padding counts as
# distance between them and the text: log-probs depend on the longest prompt of the batch, silently. With prefix tuning
# generate is right and the forward pass wrong, so a trainer that samples in a padded batch and then computes log p
# trains another distribution than it sampled from. LoRA, and rows without padding, are right
# with: peft 0.21.2, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q peft==0.21.2 transformers==5.23.0 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

ADAPTERS = {"lora": LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False),
            "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            "prefix tuning": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)}
TEXT = torch.tensor([[5, 9, 3, 7, 11, 13]])
PADDED = torch.cat([torch.zeros(1, 20, dtype=torch.long), TEXT], dim=1)


@torch.no_grad()
def next_token(model, ids):
    """Log p of the token behind a text, by the forward pass and by generate."""
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    drawn = model.generate(**batch, do_sample=False, max_new_tokens=1, output_logits=True, return_dict_in_generate=True)
    return model(**batch).logits[0, -1].log_softmax(-1), drawn.logits[0][0].log_softmax(-1)


for name, adapter in ADAPTERS.items():
    torch.manual_seed(0)
    model = get_peft_model(Qwen2ForCausalLM(Qwen2Config(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=None)), adapter)
    for parameter in model.parameters():
        if parameter.requires_grad and name != "lora":
            torch.nn.init.normal_(parameter, std=0.5)
    (alone, drawn), (forward, generated) = (next_token(model.eval(), ids) for ids in (TEXT, PADDED))
    off = [(log_p - alone).abs().max().item() for log_p in (drawn, forward, generated)]
    print(f"{name}: the largest error of log p is {off[0]:.6f} in generate alone,",
          f"{off[1]:.6f} in a forward pass behind padding, {off[2]:.6f} in generate behind padding")
    wrong = [error > 0.05 for error in off]
    assert wrong == [False, name != "lora", name == "prompt tuning"]
    assert all(error < 1e-5 for error, far in zip(off, wrong) if not far)
EOF
