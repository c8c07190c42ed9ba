#!/usr/bin/env bash
# in short (rollouts): With transformers 5, LLMAttribution's default cache is read twice: attributions are wrong from
# the second target token on. use_cached_outputs=False is right.
# guessed: captum's LLMAttribution gives the same attributions with use_cached_outputs, its default, and without
# seen: with transformers 5 only the first token of the target is right. From the second on the whole text so far is
# read again behind its own cache, so token_attr and seq_attr are of a text with repeats, without a word: here wrong by
# as much as the effects themselves. use_cached_outputs=False and forward_in_tokens=False are right
# with: captum 0.9.0, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q captum==0.9.0 transformers==5.23.0 torch==2.13.0
venv/bin/python -W ignore - <<'EOF'
import torch
from captum.attr import FeatureAblation, LLMAttribution, TextTokenInput
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
words = Tokenizer(models.WordLevel({"<pad>": 0, **{f"t{i}": i for i in range(1, 32)}}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<pad>")
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.5)).eval()
PROMPT, TARGET = [5, 6, 7, 8], [9, 10, 11]


@torch.no_grad()
def logprobs(prompt):
    """Log-probs (3,) of the target behind a prompt."""
    rows = model(torch.tensor([prompt + TARGET])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)  # (3, 32)
    return rows.gather(1, torch.tensor(TARGET)[:, None])[:, 0]


# By hand: what each log-prob loses where a token of the prompt becomes the padding token, (3, 4).
ablated = [[0 if j == i else token for j, token in enumerate(PROMPT)] for i in range(4)]
truth = torch.stack([logprobs(PROMPT) - logprobs(text) for text in ablated], 1)
method = LLMAttribution(FeatureAblation(model), tokenizer)
text = TextTokenInput(" ".join(f"t{i}" for i in PROMPT), tokenizer)
target = " ".join(f"t{i}" for i in TARGET)
for name, flags in (("default", {}), ("use_cached_outputs=False", {"use_cached_outputs": False}),
                    ("forward_in_tokens=False", {"forward_in_tokens": False})):
    wrong = (method.attribute(text, target=target, **flags).token_attr - truth).abs().amax(1)
    print(f"{name}: wrong by up to {', '.join(f'{x:.3f}' for x in wrong)} nats for the three tokens of the target")
    assert wrong[0] < 1e-4
    assert (wrong[1:] > 1).all() if name == "default" else (wrong < 1e-4).all()
print(f"the effects by hand are up to {', '.join(f'{x:.3f}' for x in truth.abs().amax(1))} nats")
EOF
