#!/usr/bin/env bash
# in short (trainers): Advantages are divided by the token count first: clip_cov then leaves out nothing, and kl_cov's
# penalty is that many times too strong.
# guessed: SkyRL's clip_cov leaves out tokens whose covariance of advantage and log p lies between its bounds, 1 and 5,
# and kl_cov's penalty weighs as much as the policy term's mean (2505.22617)
# seen: the trainer divides advantages by the number of tokens before, so that losses can be sums. In a mini-batch of
# 4,096 tokens no covariance reaches 1, and clip_cov leaves out nothing, silently. kl_cov adds its penalty undivided: as a
# sum over tokens, 4,096 times as strong as at the paper's scale
# with: skyrl 0.3.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 ray==2.60.0 pydantic==2.14.4 jaxtyping==0.3.11 loguru==0.7.3 \
    omegaconf==2.4.0 skyrl-gym==0.4.0
PIP_NO_DEPS=1 venv/bin/pip install -q skyrl==0.3.0 torch==2.13.0
venv/bin/python -W ignore - <<'EOF'
import typing

import torch
import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # skyrl 0.3.0 is not imported by Python 3.11 without this
from skyrl.backends.skyrl_train.utils import ppo_utils  # noqa: E402
from skyrl.train.config import AlgorithmConfig  # noqa: E402

B, T, config = 32, 128, AlgorithmConfig()
torch.manual_seed(0)
mask = torch.ones(B, T)
old = -torch.distributions.Exponential(1.0).sample((B, T))  # (B, T) log-probs
new = (old + 0.1 * torch.randn(B, T)).requires_grad_()
advantage = torch.randn(B, 1).expand(B, T)  # as GRPO's, one for all tokens of a response
scaled = ppo_utils.apply_loss_reduction_to_advantages_minibatch(advantage, mask, "token_mean", 8, T)  # by the trainer
assert torch.allclose(scaled, advantage / (B * T))

print(config.clip_cov)
for name, x in (("as GRPO makes them", advantage), ("as the trainer passes them", scaled)):
    covariance = (x - x.mean()) * (new - new.mean()).detach()
    inside = ((covariance > config.clip_cov.clip_cov_lb) & (covariance < config.clip_cov.clip_cov_ub)).sum().item()
    _, found = ppo_utils.compute_policy_loss_clip_cov(new, old, x, config, mask)
    left_out = round(found["clip_ratio"] * B * T)
    print(f"clip_cov, advantages {name}: {inside} of {B * T} tokens between the bounds, {left_out} left out")
    assert (inside > 100 and left_out == 1) if x is advantage else inside == left_out == 0


def penalty(x, divisor):
    """What kl_cov adds to the policy term."""
    whole, _ = ppo_utils.compute_policy_loss_kl_cov(new, old, x, config, mask)
    return (whole + (x * (new - old).exp()).sum()).item() / divisor


mean, passed = penalty(advantage, B * T), penalty(scaled, 1)
print(f"kl_cov: penalty {mean:.5f} as a mean over tokens, {passed:.2f} with the trainer's advantages")
assert abs(passed / mean / (B * T) - 1) < 1e-3
EOF
