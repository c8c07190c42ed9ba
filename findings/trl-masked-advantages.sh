#!/usr/bin/env bash
# in short (rollouts): The log shows advantages for truncated completions that mask_truncated_completions left out of
# the loss.
# guessed: with mask_truncated_completions a completion that was cut off has an advantage of 0 in the completions that
# GRPOTrainer logs, since the loss leaves it out
# seen: its advantage is logged as if it counted, in the parquet as in log_completions' table: a step whose completions
# were all cut off has grad_norm 0 and moves no weight, but the file shows which of them were paid
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
norms = {}
for masked in (False, True):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None))
    before = [p.clone() for p in model.parameters()]
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, train_dataset=Dataset.from_dict({"prompt": ["t3 t4", "t5 t6"]}),
        reward_funcs=lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids],
        args=GRPOConfig(output_dir=f"out-{masked}", per_device_train_batch_size=8, num_generations=8, max_steps=1,
                        max_completion_length=1, mask_truncated_completions=masked, log_completions=True,
                        logging_steps=1, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
                        save_strategy="no", learning_rate=0.01))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
    [norm] = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    logged = pyarrow.parquet.read_table(f"out-{masked}/completions/completions_00001.parquet")["advantage"].to_pylist()
    print(f"masked {masked}: grad_norm {norm:.4f}, weights moved {moved}, logged advantages from {min(logged):.2f} to "
          f"{max(logged):.2f}")
    assert max(logged) > 0.5 and moved != masked and (norm == 0) == masked
EOF
