#!/usr/bin/env bash
# in short (adapters): With beta above 0, PiSSA's and OLoRA's reference is not the model that training starts from.
# guessed: with beta > 0 and a fresh adapter the reference is the start model, whatever init_lora_weights is
# seen: it is the base with its adapter switched off; PiSSA and OLoRA start by moving part of the base's weights into
# the adapter, so the KL is above 0 before the first update, silently
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
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 60)}}
library = Tokenizer(models.WordLevel(words, unk_token="w2"))
library.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>", eos_token="<eos>")
data = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(3, 11)]})
torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=None))
model.save_pretrained("folder")


def first_kl(model, **arguments):
    """The KL between policy and reference that the first step logs, before anything was updated."""
    trainer = GRPOTrainer(
        model=model, reward_funcs=lambda completions, **_: [float(i) for i in range(len(completions))],
        train_dataset=data, processing_class=tokenizer, peft_config=LoraConfig(
            r=8, target_modules="all-linear", task_type="CAUSAL_LM", **arguments),
        args=GRPOConfig(
            output_dir="out", per_device_train_batch_size=8, num_generations=4, max_completion_length=6, max_steps=1,
            beta=0.1, logging_steps=1, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
            save_strategy="no"))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]["kl"]


kl = {name: first_kl("folder", init_lora_weights=name) for name in (True, "gaussian", "pissa", "olora")}
for name, value in kl.items():
    print("init_lora_weights", name, "KL of the first step", value)
assert max(abs(kl[True]), abs(kl["gaussian"])) < 1e-6 and min(kl["pissa"], kl["olora"]) > 0.003
EOF
