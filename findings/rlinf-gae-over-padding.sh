#!/usr/bin/env bash
# in short (trainers): GAE below lambda 1 decays over the padding behind a response: short right answers have the
# advantage of wrong ones.
# guessed: RLinf's GAE for texts runs over the tokens of the response, so the padding behind it changes nothing
# seen: the reward stands at the end of the padded row, whose width is the longest response that the config allows,
# and decays by lambda over all the padding. With lambda 0.95 and a critic that says 0.5, a right answer 100 tokens
# shorter than allowed has an advantage of -0.49 at its last token, as a wrong one has; one that fills the row has
# 0.5. At lambda 1, the default, the padding changes nothing
# with: rlinf 0.3.0, ray 2.60.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 ray==2.60.0 omegaconf==2.4.0 nvidia-ml-py==13.615.71 psutil==7.2.2 \
    regex==2026.11.19 sympy==1.14.0 pydantic==2.14.4 setuptools==84.2.1 tqdm==4.70.1 numpy==2.4.6
PIP_NO_DEPS=1 venv/bin/pip install -q rlinf==0.3.0 ray==2.60.0 torch==2.13.0
venv/bin/python -W ignore - <<'EOF'
import torch
from rlinf.algorithms.registry import calculate_adv_and_returns

TOKENS, VALUE = 20, 0.5  # of the response, and what the critic says at each of them


def last(width, reward, lambd):
    """The advantage of the response's last token in a row of that width, called as the trainer of texts calls it."""
    mask = (torch.arange(width) < TOKENS)[None]
    found, _ = calculate_adv_and_returns(
        task_type="reasoning", adv_type="gae", rewards=torch.tensor([reward]), loss_mask=mask, values=VALUE * mask,
        gamma=1.0, gae_lambda=lambd, normalize_advantages=False)
    return found[0, TOKENS - 1].item()


for lambd in (1.0, 0.95):
    for width in (TOKENS, TOKENS + 10, TOKENS + 100):
        right, wrong = last(width, 1.0, lambd), last(width, 0.0, lambd)
        print(f"lambda {lambd}, {TOKENS} tokens in a row of {width}: last token's advantage {right:.3f} of a right "
              f"answer, {wrong:.3f} of a wrong one")
        assert abs(right - (lambd ** (width - TOKENS) - VALUE)) < 1e-5 and abs(wrong + VALUE) < 1e-5
EOF
