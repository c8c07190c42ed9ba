#!/usr/bin/env bash
# in short (adapters): With beta above 0, the reference misses trainable_token_indices, and takes the first adapter
# where a second is active.
# guessed: with beta > 0 and a PeftModel the reference is a copy of the active adapter as it was passed, so the KL of
# the first step is 0
# seen: only what has ".default." in its name is copied: rows trained by trainable_token_indices are left out, and
# where a second adapter is active, the reference is the first; the KL is above 0 before the first update, silently
# with: trl 1.16.0, peft 0.21.2, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q trl==1.16.0 peft==0.21.2 transformers==5.23.0 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 60)}}
library = Tokenizer(models.WordLevel(words, unk_token="w2"))
library.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>", eos_token="<eos>")
data = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(3, 11)]})
torch.manual_seed(0)
Qwen2ForCausalLM(Qwen2Config(
    vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=None)
).save_pretrained("base")
for folder, arguments in {"plain": {}, "other": {}, "head": {"modules_to_save": ["lm_head"]},
                          "tokens": {"trainable_token_indices": [3, 5, 7, 9, 11]}}.items():
    model = get_peft_model(Qwen2ForCausalLM.from_pretrained("base"), LoraConfig(
        r=8, target_modules="all-linear", task_type="CAUSAL_LM", **arguments))
    for p in model.parameters():
        if p.requires_grad:
            p.data += 0.05 * torch.randn(p.shape)
    model.save_pretrained(folder)


def first_kl(folder, second=None):
    """The KL between policy and reference that the first step logs, before anything was updated."""
    model = PeftModel.from_pretrained(Qwen2ForCausalLM.from_pretrained("base"), folder, is_trainable=True)
    if second:
        model.load_adapter(second, "second", is_trainable=True)
        model.set_adapter("second")
    trainer = GRPOTrainer(
        model=model, reward_funcs=lambda completions, **_: [float(i) for i in range(len(completions))],
        train_dataset=data, processing_class=tokenizer, args=GRPOConfig(
            output_dir="out", per_device_train_batch_size=8, num_generations=4, max_completion_length=6, max_steps=1,
            beta=0.1, logging_steps=1, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
            save_strategy="no"))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    kl = trainer.state.log_history[0]["kl"]
    print(f"{folder}{f', with {second} beside it, active' if second else ''}: KL of the first step {kl:.4f}")
    return kl


assert max(abs(first_kl("plain")), abs(first_kl("head"))) < 1e-6
assert min(first_kl("tokens"), first_kl("plain", "other")) > 0.003
EOF
