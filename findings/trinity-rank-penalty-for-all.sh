#!/usr/bin/env bash
# in short (trainers): rank_penalty doesn't tell a likely right answer from an unlikely one, and a group's advantages
# no longer sum to 0.
# guessed: with rank_penalty of Trinity-RFT's GRPO a likely right answer gets less advantage than an unlikely one
# (2506.02355)
# seen: only the group's mean and deviation are of the penalized rewards; each response's own reward is not. So all
# right answers get the same, as if none were likely, and the advantages of a group no longer sum to 0
# with: trinity-rft 0.6.0, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torch==2.13.0 ray==2.60.0 msgpack==1.2.4 omegaconf==2.4.0 \
    safetensors==0.8.0 numpy==2.4.6
PIP_NO_DEPS=1 venv/bin/pip install -q trinity-rft==0.6.0 torch==2.13.0
venv/bin/python -W ignore - <<'EOF'
import torch
from trinity.algorithm.advantage_fn.grpo_advantage import GRPOGroupedAdvantage
from trinity.common.experience import EID, Experience

RIGHT, LOGPROB = [1.0, 1.0, 1.0, 0.0], [-0.1, -0.5, -2.0, -1.0]  # the third right answer is the least likely one


def advantages(penalty):
    """Those of the four responses."""
    group = [Experience(eid=EID(task="puzzle", run=i), tokens=torch.zeros(5, dtype=torch.long), prompt_length=2,
                        logprobs=torch.full((3,), logprob), reward=reward, action_mask=torch.ones(3))
             for i, (reward, logprob) in enumerate(zip(RIGHT, LOGPROB))]
    found, _ = GRPOGroupedAdvantage(rank_penalty=penalty).process(group)
    return torch.stack([each.advantages[0] for each in found])


rank = torch.tensor([3.0, 2.0, 0.0, 1.0]) / 4  # by likelihood
penalized = torch.tensor(RIGHT) * (1 - 0.25 * rank)
expected = (penalized - penalized.mean()) / penalized.std()
plain, found = advantages(None), advantages(0.25)
for name, row in (("without", plain), ("rank_penalty=0.25", found), ("of the penalized rewards", expected)):
    print(f"{name}: {', '.join(f'{x:.3f}' for x in row)}; sum {row.sum():.3f}")
assert torch.allclose(found[:3], expected[2].expand(3), atol=1e-4) and found.sum() > 0.5
assert expected[0] < expected[1] < expected[2] and abs(plain.sum()) < 1e-5
EOF
