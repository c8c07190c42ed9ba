#!/usr/bin/env bash
# in short (trainers): The local backend trains on the padding behind a response's end: at its default top_p one such
# step makes all adapter weights NaN.
# guessed: with backend = "local" retrain trains on each response up to its end token, where its reward was earned
# seen: each response is as long as the longest of its group. What stands behind its end token is padding, and is
# trained on with its advantage, as its own tokens. At the defaults, temperature 0.7 and top_p 0.95, the log-prob that
# such a token was drawn with is minus infinity, so its ratio is infinite, and on a CPU one step makes every weight of
# the adapter NaN (by its source, a GPU's GradScaler leaves such steps out). Where top_p is 1 the weights stay finite,
# and with transform_mode = "gtpo" the padding, which surprises the model, has more credit than the response. 0.3.2,
# which needs Python 3.12, has the same lines
# with: retrain 0.3.0, transformers 5.23.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q retrain==0.3.0 transformers==5.23.0 torch==2.13.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error venv/bin/python -W ignore - 2>log <<'EOF' || { cat log; exit 1; }
import torch
from retrain.advantages import compute_composable_advantages
from retrain.config import TrainConfig
from retrain.local_train_helper import LocalTrainHelper
from transformers import Qwen2Config, Qwen2ForCausalLM

PAD, EOS, V = 0, 1, 10
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=V, hidden_size=V, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, tie_word_embeddings=False))
following = torch.full((V, V), 0.12)  # (token, its next): an end in 15 of 100, hardly ever padding
following[:, PAD], following[:, EOS] = 1e-4, 0.15
following[[PAD, EOS]] = torch.tensor([1e-4] * (V - 1) + [1.0])  # but behind an end one token, and not padding
with torch.no_grad():
    model.model.embed_tokens.weight.copy_(torch.eye(V))
    model.lm_head.weight.copy_(following.log().T / V ** 0.5)
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.layers[0].mlp.down_proj.weight.zero_()
model.save_pretrained("model")
prompt, rewards = [3, 4, 5], [1.0, 0.0, 1.0, 0.0]
defaults = TrainConfig()
for temperature, top_p in (defaults.temperature, defaults.top_p), (1.0, 1.0):
    helper = LocalTrainHelper("model", "adapter", "cpu", lora_rank=4)
    torch.manual_seed(1)
    group = helper.sample([prompt], len(rewards), 24, temperature, top_p)[0]
    for ids, logprobs in group:
        print(f"temperature {temperature}, top_p {top_p}:", *(f"{i} {p:.1f}" for i, p in zip(ids, logprobs)), sep="  ")
    ends = [ids.index(EOS) + 1 for ids, _ in group]  # all of them end
    assert min(ends) < max(ends) == len(group[0][0])
    assert all(len(ids) == max(ends) and ids[end:] == [PAD] * (max(ends) - end) for (ids, _), end in zip(group, ends))
    credit = compute_composable_advantages(
        rewards, [logprobs for _, logprobs in group], [[0] * max(ends)] * len(group),
        transform_mode="gtpo").token_advs if top_p == 1 else [[r - 0.5] * max(ends) for r in rewards]
    helper.train_step([prompt + ids for ids, _ in group], [[0.0] * len(prompt) + logprobs for _, logprobs in group],
                      [[0.0] * len(prompt) + row for row in credit], 1e-5, 0.0)
    adapter = [p for p in helper.train_model.parameters() if p.requires_grad]
    broken = sum(bool(p.isnan().any()) for p in adapter)
    print(f"{broken} of the adapter's {len(adapter)} matrices are NaN after a step")
    assert broken == (len(adapter) if top_p < 1 else 0)
first, end = credit[0], ends[0]
print("credit of the first response:", *(f"{c:.2f}" for c in first), f"of which {end} are its own")
assert min(first[end:]) > max(first[:end]) > 0
EOF
