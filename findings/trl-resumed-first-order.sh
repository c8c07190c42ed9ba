#!/usr/bin/env bash
# in short (trl): A GRPO run resumed behind its first epoch goes through the first epoch's order again: prompts come
# twice, others not at all.
# guessed: a GRPOTrainer resumed from checkpoint N sees the prompts that the undisturbed run sees from step N + 1 on:
# its sampler has a seed, and Trainer skips what the epoch has seen
# seen: in the first epoch it does. Its sampler draws the order of each epoch from one generator, which a resumed run
# seeds anew without drawing those of the epochs that are over, so it goes on in the order of the first. Resumed in the
# middle of epoch 2, 4 of the 6 prompts left had been in it already, and 4 of 12 never come; resumed at the end of epoch
# 2, epoch 3 is the first again
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

N, EPOCHS = 12, 3  # prompts, one a step
words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 60)}}
library = Tokenizer(models.WordLevel(words, unk_token="w2"))
library.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>", eos_token="<eos>")
data = Dataset.from_dict({"prompt": [f"w{10 + i}" for i in range(N)]})


def run(resume=None):
    """The prompt of each step."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None))
    seen = []

    def reward(prompts, completions, **_):
        seen.append(prompts[0])
        return [float(len(text)) for text in completions]

    trainer = GRPOTrainer(
        model, reward, train_dataset=data, processing_class=tokenizer,
        args=GRPOConfig("out", num_train_epochs=EPOCHS, per_device_train_batch_size=2, num_generations=2, save_steps=1,
                        max_completion_length=4, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True))
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return seen


whole = run()
first, second, third = (whole[i : i + N] for i in range(0, EPOCHS * N, N))
assert sorted(first) == sorted(second) == sorted(third) and len({*map(tuple, (first, second, third))}) == 3
early, middle, late = (run(f"out/checkpoint-{step}") for step in (N // 2, N + N // 2, 2 * N))
assert early == whole[N // 2 :]
assert middle == first[N // 2 :] + second
assert late == first
again = set(middle[: N // 2]) & set(second[: N // 2])
print(f"resumed after step {N + N // 2}: {len(again)} of the {N // 2} prompts that end epoch 2 were in it already;",
      "then comes the undisturbed run's epoch 2")
print(f"resumed after step {2 * N}: epoch 3 is epoch 1 again")
assert len(again) == 4
EOF
