#!/usr/bin/env bash
# in short (trainers): PPO's advantages are scaled but not centered: what the critic undervalues is pushed up whole,
# better or worse.
# guessed: estimate_advantages of torchtune, which its PPO recipe calls, whitens advantages over the batch's tokens: mean
# 0 and variance 1, as TRL's PPO does, so that some tokens are always pushed down, and the reward's unit does not matter
# seen: the variance is 1, but the mean is put back behind the division; shift_mean=True, the default, means this. What
# is 5 better than the critic thought, on average, has advantages around 5, spread by 1: with rewards of 4 and 6 every
# token is pushed up, by 4.04 and 5.96. With rewards of 40 and 60 these are 49.04 and 50.96, so that which response was
# better hardly counts. With shift_mean=False whiten gives mean 0
# with: torchtune 0.6.1, torchao 0.10.0, torch 2.7.1
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torchtune==0.6.1 torchao==0.10.0 torch==2.7.1
venv/bin/python -W ignore - 2>errors.txt <<'EOF' || { cat errors.txt; exit 1; }
import torch
from torchtune import rlhf
from torchtune.rlhf.rewards import whiten

mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]).bool()  # four responses
rewards = torch.zeros(4, 4)
rewards[range(4), mask.sum(1) - 1] = torch.tensor([6.0, 6.0, 4.0, 4.0])  # at the last token of each
values = torch.zeros(4, 4)  # a critic that has learned nothing yet

for unit in (1, 10):
    found, returns = rlhf.estimate_advantages(values, unit * rewards, 1.0, 1.0, mask)
    own = found[mask]
    print(f"rewards 6, 6, 4, 4, each times {unit}: mean {own.mean():.2f}, variance {own.var():.2f}, "
          f"advantages of the tokens {sorted({round(float(x), 2) for x in own})}")
    assert torch.equal(returns[:, 0], unit * torch.tensor([6.0, 6.0, 4.0, 4.0]))  # up to here all is GAE
    assert abs(own.var() - 1) < 1e-4 and abs(own.mean() - unit * 5) < 1e-4  # half of the tokens have 6, half 4
    assert (own > 0).all()  # none is pushed down
    other = whiten(returns, mask, shift_mean=False)[mask]
    assert abs(other.mean()) < 1e-6 and abs(other.var() - 1) < 1e-4
EOF
