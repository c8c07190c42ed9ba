#!/usr/bin/env bash
# in short (rollouts): An evaluation behind step N writes over completions_N.parquet: that step's training completions
# are lost, and no column says so.
# guessed: GRPOTrainer's completions_N.parquet holds the completions that step N was trained on; those of an evaluation
# are in a file of their own, or marked
# seen: an evaluation behind step N writes the same file again, and no column says which rows are its own. With as many
# completions as a batch, nothing of the training is left; with fewer, the file begins with the last of the batch, the
# others are lost, and the evaluation's follow
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
drawn, rows = [], {}


def reward(completions, **_):
    """Pays the length."""
    drawn.extend(completions)
    return [float(len(text)) for text in completions]


for evaluated in (0, 1, 2):  # prompts, of four completions each; a batch has two
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": ["t3 t4", "t5 t6"]}),
        eval_dataset=Dataset.from_dict({"prompt": ["t30 t31", "t32 t33"][:evaluated]}) if evaluated else None,
        args=GRPOConfig(output_dir=f"out-{evaluated}", per_device_train_batch_size=8, per_device_eval_batch_size=4,
                        num_generations=4, max_steps=1, eval_strategy="steps" if evaluated else "no", eval_steps=1,
                        max_completion_length=4, log_completions=True, logging_steps=1, report_to="none", use_cpu=True,
                        bf16=False, disable_tqdm=True, save_strategy="no"))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    table = pyarrow.parquet.read_table(f"out-{evaluated}/completions/completions_00001.parquet")
    assert table.column_names == ["step", "prompt", "completion", "reward", "advantage"]
    assert table["step"].to_pylist() == [1] * 8 and table["completion"].to_pylist() == drawn[-8:]
    rows[evaluated] = [prompt in ("t30 t31", "t32 t33") for prompt in table["prompt"].to_pylist()]
    print(f"{evaluated} prompts evaluated: {sum(rows[evaluated])} of the 8 rows of step 1 are the evaluation's")
assert rows == {0: [False] * 8, 1: [False] * 4 + [True] * 4, 2: [True] * 8}
EOF
