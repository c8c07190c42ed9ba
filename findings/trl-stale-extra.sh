#!/usr/bin/env bash
# in short (rollouts): A log_extra column that a batch doesn't set shows an earlier batch's values, beside completions
# that they say nothing about.
# guessed: where a reward function calls GRPOTrainer's log_extra in some batches only, the completions of the other
# batches have None in that column, or no such column
# seen: they have the values of the last batch that had any, silently, each beside a completion that it says nothing
# about: in completions_*.parquet only new values push out the old. With log_extra in every batch, and None where there
# is nothing to note, the column is right
# with: trl 1.16.0, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q trl==1.16.0 transformers==5.23.0 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import pyarrow.parquet
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

names = {"<pad>": 0, "<eos>": 1, **{f"t{i}": i for i in range(2, 40)}}
library = Tokenizer(models.WordLevel(names, unk_token="t2"))
library.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>", eos_token="<eos>")
torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None))
for always in (False, True):
    batches = []

    def reward(completions, log_extra, **_):
        """Pays the length, and notes the text of each completion of the first batch beside it."""
        batches.append(list(completions))
        if len(batches) == 1 or always:
            log_extra("note", completions if len(batches) == 1 else [None] * len(completions))
        return [float(len(text)) for text in completions]

    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": ["t3 t4", "t5 t6"]}),
        args=GRPOConfig(output_dir=f"out-{always}", per_device_train_batch_size=4, num_generations=4, max_steps=2,
                        max_completion_length=6, log_completions=True, logging_steps=1, report_to="none", use_cpu=True,
                        bf16=False, disable_tqdm=True, save_strategy="no"))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    first, second = (pyarrow.parquet.read_table(f"out-{always}/completions/completions_{step:05d}.parquet").to_pydict()
                     for step in (1, 2))
    assert [first["completion"], second["completion"]] == batches and not set(batches[0]) & set(batches[1])
    assert first["note"] == batches[0]
    print(f"log_extra in every batch: {always}. Completions and notes of step 2:")
    print(*zip(second["completion"], second["note"]), sep="\n")
    assert second["note"] == ([None] * 4 if always else batches[0])
EOF
