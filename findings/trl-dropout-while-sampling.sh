#!/usr/bin/env bash
# in short (trl): GRPOTrainer samples with dropout: lora_dropout changes every response, and tokens are clipped before
# anything was learned. disable_dropout=True prevents it.
# guessed: GRPOTrainer samples without dropout, as vLLM and a loaded model's generate do, and in the first update on a
# batch the ratio of new to old probability is 1, also with lora_dropout, or with GPT-2, whose config has dropout of 0.1
# seen: it samples in training mode, so dropout changes the model for every response and every token: of 16 samples with
# top_k=1, which should be one text, 15 differ. Each later pass has a dropout of its own: with num_iterations=2, and a
# learning rate of 0, a sixth of the tokens or more are clipped in the first update. Evaluation has none, and
# disable_dropout=True, which is not the default, makes all 16 the same and clips nothing
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
from transformers import (
    GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM)
from trl import GRPOConfig, GRPOTrainer

words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 60)}}
library = Tokenizer(models.WordLevel(words, unk_token="w2"))
library.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>", eos_token="<eos>")
data = Dataset.from_dict({"prompt": ["w3 w4"] * 4})
ENDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}


def gpt2():
    """At its default dropout of 0.1."""
    config = GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, initializer_range=0.1, **ENDS)
    return GPT2LMHeadModel(config), None


def lora():
    """An adapter of random weights, as if trained, with the dropout of many recipes."""
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1, **ENDS))
    return model, LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, init_lora_weights=False,
                             target_modules="all-linear", task_type="CAUSAL_LM")


def run(make, disable):
    """The different greedy completions of a prompt in training and in evaluation; clipped in the first update."""
    torch.manual_seed(0)
    model, adapter = make()
    distinct = []

    def reward(completions, **_):
        distinct.append(len(set(completions)))
        return [float(i) for i in range(len(completions))]

    trainer = GRPOTrainer(
        model=model, peft_config=adapter, reward_funcs=reward, train_dataset=data, eval_dataset=data.select([0]),
        processing_class=tokenizer,
        args=GRPOConfig(output_dir="out", per_device_train_batch_size=16, per_device_eval_batch_size=16,
                        num_generations=16, top_k=1, num_iterations=2, learning_rate=0.0, max_steps=2, logging_steps=1,
                        max_completion_length=12, disable_dropout=disable, report_to="none", use_cpu=True, bf16=False,
                        disable_tqdm=True, save_strategy="no"))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    clipped = trainer.state.log_history[0]["clip_ratio/region_mean"]
    trainer.evaluate()
    return *distinct, clipped


for make in (gpt2, lora):
    seen = {disable: run(make, disable) for disable in (False, True)}
    for disable, (train, evaluation, clipped) in seen.items():
        print(f"{make.__name__}, disable_dropout={disable}: of 16 greedy completions {train} differ in training,",
              f"{evaluation} in evaluation; clipped in the first update: {clipped:.3f}")
    assert seen[False][0] > 8 and seen[False][1] == 1 and seen[False][2] > 0.1
    assert seen[True] == (1, 1, 0)
EOF
