#!/usr/bin/env bash
# in short (trl): Reward functions of one name, such as two lambdas, share one column of GRPOTrainer's logs, which shows
# the mean of both. Give each a __name__.
# guessed: two reward functions of the same name are refused, or their columns get numbers, since each has a weight of its
# own in reward_weights
# seen: nothing is said. Both are paid, each with its weight, but rewards/<name>/mean and /std hold both functions'
# values, and what is logged is their average: for one that returns 1 and another that returns 0 it is 0.5, which neither
# ever was. The reward itself, with weights 1 and 10, is right. A __name__ of its own tells them apart
# with: trl 1.16.0, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q trl==1.16.0 transformers==5.23.0 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 40)}}
library = Tokenizer(models.WordLevel(words, unk_token="w2"))
library.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>", eos_token="<eos>")


def always(value):
    """A reward function that pays the same for everything."""
    return lambda completions, **_: [value] * len(completions)


def logged(first, second):
    """What a step logs of two reward functions with the weights 1 and 10."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None))
    trainer = GRPOTrainer(
        model=model, reward_funcs=[first, second], train_dataset=Dataset.from_dict({"prompt": ["w3 w4"] * 4}),
        processing_class=tokenizer,
        args=GRPOConfig(output_dir="out", per_device_train_batch_size=4, num_generations=4, max_steps=1, logging_steps=1,
                        max_completion_length=4, reward_weights=[1.0, 10.0], report_to="none", use_cpu=True, bf16=False,
                        disable_tqdm=True, save_strategy="no"))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    row = trainer.state.log_history[0]
    return {name: row[name] for name in row if name.startswith("rewards/") and name.endswith("mean")} | {
        "reward": row["reward"]}


alike = logged(always(1.0), always(0.0))
one, other = always(1.0), always(0.0)
one.__name__, other.__name__ = "one", "other"
apart = logged(one, other)
print("two lambdas:", alike)
print("with names:", apart)
assert alike == {"rewards/<lambda>/mean": 0.5, "reward": 1.0}
assert apart == {"rewards/one/mean": 1.0, "rewards/other/mean": 0.0, "reward": 1.0}
EOF
