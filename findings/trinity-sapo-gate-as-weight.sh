#!/usr/bin/env bash
# in short (trainers): SAPO's gate is taken as the weight where its derivative belongs: off-policy tokens count more,
# not less.
# guessed: Trinity-RFT's SAPO weighs a token as the gradient of the paper's gate does (2511.20347): by 1 at ratio 1, by
# less and less beyond twice that, by almost nothing at 8
# seen: it takes the gate itself as the weight of log p, where the gradient has its derivative. So a token counts 2 at
# ratio 1, and more the further off policy it is, up to 4: at ratio 8, where the gradient has 0.03, 3.996. Nothing fades
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
from trinity.algorithm.policy_loss_fn.sapo_policy_loss import SAPOPolicyLossFn

sapo, ONE = SAPOPolicyLossFn(), torch.ones(1, 1)


def weights(ratio):
    """The gradient of the objective with respect to log p, at advantage 1: theirs, and that of 4 sigmoid(ratio - 1)."""
    found = []
    for objective in (lambda logprob: -sapo(logprob, torch.zeros(1, 1), ONE, ONE)[0],
                      lambda logprob: 4 * torch.sigmoid(logprob.exp() - 1).sum()):
        logprob = torch.tensor([[ratio]]).log().requires_grad_()
        found += [torch.autograd.grad(objective(logprob), logprob)[0].item()]
    return found


seen = {ratio: weights(ratio) for ratio in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)}
for ratio, (theirs, paper) in seen.items():
    print(f"ratio {ratio}: weight {theirs:.3f}, the gate's gradient {paper:.3f}")
theirs, paper = zip(*seen.values())
assert abs(theirs[2] - 2) < 1e-6 and abs(paper[2] - 1) < 1e-6
assert list(theirs) == sorted(theirs) and theirs[-1] > 3.99 and paper[-1] < 0.03
EOF
