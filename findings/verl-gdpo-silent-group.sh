#!/usr/bin/env bash
# in short (trainers): gdpo gives a group of equal rewards an advantage other than 0 where right responses are longer
# or shorter than wrong ones.
# guessed: in verl's gdpo (2601.05242) a group whose responses all earn the same has advantage 0, as in its grpo and as
# in TRL's normalize_then_sum
# seen: gdpo whitens over the step's tokens, and their mean is 0 only where all responses are of one length. Where right
# ones are shorter, each token of a group of four equal responses gets +0.43, where they are longer -0.43: credit for
# nothing, which pushes towards whatever such groups say, or away from it
# with: verl 0.9.1, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 ray==2.60.0 tensordict==0.15.3 omegaconf==2.4.0 transformers==5.23.0 \
    hydra-core==1.3.0 codetiming==1.4.0 numpy==2.4.6 pandas==3.1.1 cachetools==8.0.2 orjson==3.13.0
PIP_NO_DEPS=1 venv/bin/pip install -q verl==0.9.1 torch==2.13.0
venv/bin/python -W ignore - <<'EOF'
import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_gdpo_outcome_advantage, compute_grpo_outcome_advantage

index = np.repeat([0, 1], 4)  # two groups of four responses
accuracy, layout = np.array([1, 1, 0, 0, 1, 1, 1, 1.0]), np.array([1, 0, 1, 0, 1, 1, 1, 1.0])  # all equal in the second


def advantages(lengths):
    """Those of gdpo and of grpo on the sum, at the first token of each response."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).float()
    batch = {"prompts": torch.zeros(8, 3), "attention_mask": torch.cat([torch.ones(8, 3), mask], 1).long()}
    config = {"gdpo_reward_keys": ["accuracy", "layout"], "gdpo_reward_weights": [1.0, 0.5]}
    found, _ = compute_gdpo_outcome_advantage(torch.zeros_like(mask), mask, index, config=config, batch=batch,
                                              non_tensor_batch={"accuracy": accuracy, "layout": layout})
    last = torch.zeros_like(mask)
    last[range(8), [n - 1 for n in lengths]] = torch.tensor(accuracy + 0.5 * layout).float()
    return found[:, 0], compute_grpo_outcome_advantage(last, mask, index)[0][:, 0]


silent = {}
for name, lengths in {"of one length": [4] * 8, "short where right": [2, 2, 8, 8, 4, 4, 4, 4],
                      "long where right": [8, 8, 2, 2, 4, 4, 4, 4]}.items():
    gdpo, grpo = advantages(lengths)
    silent[name] = gdpo[4].item()
    print(f"{name:17} gdpo {[round(a, 2) for a in gdpo.tolist()]}, in the silent group by grpo {grpo[4:].tolist()}")
    assert not grpo[4:].any() and len(set(gdpo[4:].tolist())) == 1
assert abs(silent["of one length"]) < 1e-6 and silent["short where right"] > 0.4 > -0.4 > silent["long where right"]
EOF
