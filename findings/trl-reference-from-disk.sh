#!/usr/bin/env bash
# in short (trl): With beta above 0, a model edited in memory is compared with its folder's old weights: the KL begins
# above 0.
# guessed: GRPOTrainer or RLOOTrainer is given a model object and beta > 0: the reference is that model as it was
# passed, so the KL of the first step is 0
# seen: the reference is read again from the folder that the object came from; a model that was trained or edited in
# memory since then is pulled back to the file, and its KL is above 0 before the first update, without a warning
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
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 60)}}
library = Tokenizer(models.WordLevel(words, unk_token="w2"))
library.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>", eos_token="<eos>")
data = Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(3, 11)]})
torch.manual_seed(0)
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=None))
model.save_pretrained("folder")


def first_kl(model, **arguments):
    """The KL between policy and reference that the first step logs, before anything was updated."""
    trainer = arguments["trainer"](
        model=model, reward_funcs=lambda completions, **_: [float(i) for i in range(len(completions))],
        train_dataset=data, processing_class=tokenizer, args=arguments["config"](
            output_dir="out", per_device_train_batch_size=8, num_generations=4, max_completion_length=6, max_steps=1,
            beta=0.1, logging_steps=1, report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
            save_strategy="no"))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]["kl"]


for trainer, config in ((GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)):
    kl = []
    for amount in (0.0, 0.05):
        model = AutoModelForCausalLM.from_pretrained("folder")
        torch.manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight += amount * torch.randn_like(weight)
        kl.append(first_kl(model, trainer=trainer, config=config))
    print(trainer.__name__, "KL of the first step: as loaded", kl[0], "changed in memory", kl[1])
    assert abs(kl[0]) < 1e-6 and kl[1] > 0.01
EOF
