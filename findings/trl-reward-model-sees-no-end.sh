#!/usr/bin/env bash
# in short (trl): A reward model can't teach to end: responses that ended and that were cut off reach it as one text.
# guessed: a reward model that RewardTrainer trained reads responses in GRPOTrainer and RLOOTrainer as it read them in
# training: with the end token, where its score stands, if the response ended, and without if it was cut off
# seen: neither. Of plain text RewardTrainer scores at the end token, which it appends; GRPOTrainer and RLOOTrainer
# decode responses without special tokens, so the score stands at the last word, where the model never learned one. In a
# chat the template closes every response, cut off or not. So in both a response that ended and one that was cut off at
# the same word are one text with one reward: a reward model cannot teach to end
# with: trl 1.16.0, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q trl==1.16.0 transformers==5.23.0 torch==2.13.0
HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - <<'EOF'
import string

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models
from transformers import (
    PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification)
from trl import GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, RLOOConfig, RLOOTrainer

letters = {token: i for i, token in enumerate(["<pad>", "<eos>", *string.ascii_lowercase])}
library = Tokenizer(models.BPE(letters, []))
library.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=library, pad_token="<pad>", eos_token="<eos>",
    chat_template="{% for m in messages %}{{ m.content }}<eos>{% endfor %}")
SIZES = {"vocab_size": len(letters), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
COMMON = {"output_dir": "out", "max_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False,
          "disable_tqdm": True, "save_strategy": "no"}


class Policy(Qwen2ForCausalLM):
    def generate(self, input_ids, **_):
        """Two responses of at most three tokens: "cd", which ended, and "cde", which was cut off."""
        return torch.cat([input_ids, torch.tensor([[4, 5, 1], [4, 5, 6]])], dim=1)


def train(Trainer, **options):
    trainer = Trainer(processing_class=tokenizer, **options)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def texts(chat):
    """What the reward model reads: in its own training, then of an ended and a cut-off response in each trainer."""
    torch.manual_seed(0)
    message = (lambda role, text: [{"role": role, "content": text}]) if chat else (lambda role, text: text)
    seen, judge = [], Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_labels=1))
    judge.register_forward_pre_hook(lambda _, args, given: seen.append(given["input_ids"]), with_kwargs=True)
    pairs = Dataset.from_dict({"prompt": [message("user", "ab")] * 2, "chosen": [message("assistant", "cd")] * 2,
                               "rejected": [message("assistant", "ce")] * 2})
    train(RewardTrainer, model=judge, train_dataset=pairs, args=RewardConfig(**COMMON))
    prompts = Dataset.from_dict({"prompt": [message("user", "ab")] * 2})
    for Trainer, Config in ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)):
        train(Trainer, model=Policy(Qwen2Config(**SIZES)), reward_funcs=judge, reward_processing_classes=tokenizer,
              train_dataset=prompts, args=Config(**COMMON, per_device_train_batch_size=2, num_generations=2,
                                                 max_completion_length=3, beta=0.0))
    return [tokenizer.batch_decode(ids) for ids in seen]


for chat, ended in ((False, ["abcd<pad>", "abcde"]), (True, ["ab<eos>cd<eos><pad>", "ab<eos>cde<eos>"])):
    learned, *later = texts(chat)
    print(f"{'a chat' if chat else 'plain text'}: the reward model learns from {learned}, and later reads",
          *(sorted(read) for read in later))
    assert learned[0] == ("ab<eos>cd<eos>" if chat else "abcd<eos>")
    assert [sorted(read) for read in later] == [sorted(ended)] * 2
EOF
