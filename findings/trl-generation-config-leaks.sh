#!/usr/bin/env bash
# in short (trl): generation_config.json shapes the samples where GRPOConfig has no field, such as suppress_tokens.
# The loss ignores it.
# guessed: GRPOTrainer samples as GRPOConfig says, whatever the generation_config.json of the model folder says
# seen: fields that GRPOConfig does not have (here suppress_tokens and no_repeat_ngram_size) come from the folder and
# shape the samples; the log-probs in the loss ignore them, so tokens that are never drawn keep their probability,
# here half of it
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
from transformers import GenerationConfig, PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
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
model.generation_config = GenerationConfig(
    do_sample=True, temperature=0.01, top_k=1, suppress_tokens=list(range(30, 60)), no_repeat_ngram_size=1)
model.save_pretrained("folder")
sampled = []


def reward(completion_ids, **_):
    sampled.extend(completion_ids)
    return [float(i) for i in range(len(completion_ids))]


trainer = GRPOTrainer(
    model="folder", reward_funcs=reward, train_dataset=data, processing_class=tokenizer,
    args=GRPOConfig(output_dir="out", per_device_train_batch_size=16, num_generations=16, max_completion_length=12,
                    max_steps=4, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, save_strategy="no"))
trainer.remove_callback(PrinterCallback)
trainer.train()
with torch.no_grad():
    policy = model(torch.tensor(sampled[0])[None]).logits.softmax(-1)
on_suppressed = policy[..., 30:].sum(-1).mean().item()
drawn = sum(token >= 30 for ids in sampled for token in ids)
repeats = sum(len(ids) - len(set(ids)) for ids in sampled)
print(len(sampled), "completions,", len(set(map(tuple, sampled))), "distinct: top_k 1 of the folder is overridden")
print("suppressed tokens drawn:", drawn, "of", sum(map(len, sampled)), "tokens")
print("the policy's probability of them:", on_suppressed)
print("tokens that stand twice in a completion", repeats)
assert len(set(map(tuple, sampled))) > 40 and on_suppressed > 0.3
assert drawn == 0 and repeats == 0
EOF
