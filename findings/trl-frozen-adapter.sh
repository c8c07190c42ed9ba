#!/usr/bin/env bash
# in short (adapters): GRPOTrainer runs to its end and changes nothing where a PeftModel was loaded without
# is_trainable=True.
# guessed: GRPOTrainer with a PeftModel that was loaded without is_trainable trains the adapter, or raises an error
# because nothing is trainable
# seen: at its defaults it runs to its end and changes no weight, silently; with beta > 0 it
# even logs a grad_norm above 0, because the first reference pass makes the adapter trainable after the optimizer was
# made
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
get_peft_model(Qwen2ForCausalLM.from_pretrained("base"), LoraConfig(
    r=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)).save_pretrained("adapter")


def train(beta, **how):
    """How many tensors three steps change, of how many in the adapter, and the first grad_norm that was logged."""
    model = PeftModel.from_pretrained(Qwen2ForCausalLM.from_pretrained("base"), "adapter", **how)
    before = {name: p.clone() for name, p in model.named_parameters()}
    trainer = GRPOTrainer(
        model=model, reward_funcs=lambda completions, **_: [float(i % 3) for i in range(len(completions))],
        train_dataset=data, processing_class=tokenizer, args=GRPOConfig(
            output_dir="out", per_device_train_batch_size=8, num_generations=4, max_completion_length=6, max_steps=3,
            beta=beta, learning_rate=1e-3, logging_steps=1, report_to="none", use_cpu=True, bf16=False,
            disable_tqdm=True, save_strategy="no"))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    after = dict(trainer.model.named_parameters())
    changed = sum(not torch.equal(p, after[name]) for name, p in before.items())
    norm = trainer.state.log_history[0]["grad_norm"]
    print(f"beta {beta} {how or 'as loaded'}: {changed} of {sum('lora' in name for name in before)} tensors changed, "
          f"logged grad_norm {norm:.2f}")
    return changed, norm


assert train(0.0, is_trainable=True)[0] == 28
assert train(0.0) == (0, 0.0)
changed, norm = train(0.1)
assert changed == 0 and norm > 0.5
EOF
