#!/usr/bin/env bash
# in short (trl): At importance_sampling_level="sequence", credit per token is averaged over each response: the
# gradient is plain GRPO's.
# guessed: GRPOTrainer takes advantages of shape (B, T) in every loss, as its source says for subclasses; with
# importance_sampling_level="sequence", too, each token is then pushed by its own advantage, as GSPO-token of the GSPO
# paper (2507.18071) does, whose ratio is the response's
# seen: there every token of a response gets the mean of its advantages, silently: with dapo and grpo the gradient is
# that of plain GRPO, cosine 1.000000, whatever the (B, T) are. TRL warns that dapo counts tokens there, but not of
# this. cispo multiplies log p, so it does tell tokens apart; at the level "token" all do
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
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

names = {"<pad>": 0, "<eos>": 1, **{f"t{i}": i for i in range(2, 40)}}
library = Tokenizer(models.WordLevel(names, unk_token="t2"))
library.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>", eos_token="<eos>")


def gradient(level, loss, spread):
    """The gradient from advantages (B, T) whose mean over a response is the response's own."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None)).double()
    cap = {"epsilon_high": 5.0} if loss == "cispo" else {}
    config = GRPOConfig("out", per_device_train_batch_size=4, num_generations=4, max_completion_length=8, use_cpu=True,
                        bf16=False, report_to=[], importance_sampling_level=level, loss_type=loss, **cap)
    trainer = GRPOTrainer(model, lambda completions, **_: [0.0, 1.0, 2.0, 4.0], config,
                          Dataset.from_list([{"prompt": "t3 t4 t5"}] * 4), processing_class=tokenizer)
    model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions([{"prompt": "t3 t4 t5"}] * 4)
    mask = inputs["completion_mask"].double()
    weight = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1)).double() ** spread * mask
    weight = weight * mask.sum(1, keepdim=True) / weight.sum(1, keepdim=True)
    inputs["advantages"] = inputs["advantages"].double()[:, None] * weight
    trainer._compute_loss(model, inputs).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


found = {}
for level in ("token", "sequence"):
    for loss in ("dapo", "grpo", "cispo"):
        a, b = gradient(level, loss, 4.0), gradient(level, loss, 0.0)
        found[level, loss] = (a @ b / a.norm() / b.norm()).item()
        print(f"{level:8s} {loss:5s} cosine of a random (B, T) and of its means: {found[level, loss]:.6f}")
same = {case for case, cosine in found.items() if cosine > 0.999999}
assert same == {("sequence", "dapo"), ("sequence", "grpo")}, same
EOF
