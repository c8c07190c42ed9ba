#!/usr/bin/env bash
# in short (trainers): GRPOLoss averages its KL penalty over prompt and padding too, so longer prompts weaken it.
# guessed: GRPOLoss averages its KL penalty over the response tokens, as it does its policy term, so a prompt or padding
# leaves it as it is
# seen: it averages over all positions, and prompt and padding count as 0. In a text that is one tenth response,
# kl_to_ref_coeff is worth a tenth of itself; longer prompts in a batch weaken it further. The logged clip_fraction has
# the same divisor; the policy term and the effective sample size have not
# with: torchrl 0.14.1, tensordict 0.14.3, torch 2.13.0
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q torchrl==0.14.1 tensordict==0.14.3 torch==2.13.0
venv/bin/python -W ignore - <<'EOF'
import torch
from tensordict import TensorDict
from torchrl.modules.distributions.discrete import LLMMaskedCategorical
from torchrl.objectives.llm import GRPOLoss

ANSWER = torch.tensor([0, 1, 2, 1])


class Actor(torch.nn.Module):
    """A model without context: three tokens, one row of logits."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))

    def get_dist(self, data, logits_key=None):
        tokens = data["tokens", "full"]
        return LLMMaskedCategorical(logits=self.logits.expand(*tokens.shape, 3), mask=data["response"])


def losses(before):
    """KL, its gradient's size, policy loss, clipped share and effective sample size, with `before` tokens of prompt."""
    tokens = torch.cat([torch.zeros(before, dtype=torch.long), ANSWER]).expand(2, -1)
    logprob = torch.tensor([0.0, 1.0, 2.0]).log_softmax(0)[tokens]
    old = logprob - 0.5 * (torch.arange(before + 4) >= before + 2)  # two of four tokens have a ratio of e ** 0.5
    data = TensorDict({
        "tokens": {"full": tokens}, "log_probs": {"full": old},
        "response": torch.arange(before + 4).expand(2, -1) >= before,
        "advantage": torch.tensor([2.0, -1.0])[:, None, None].expand(2, before + 4, 1),
        "next": {"ref_log_probs": {"full": logprob - 1}}}, [2])
    actor = Actor()
    loss = GRPOLoss(actor, kl_to_ref_coeff=1.0, masking_strategy="generic", entropy_bonus=False)
    out = loss(data)
    (gradient,) = torch.autograd.grad(out.loss_kl_to_ref, actor.logits)
    found = [out.kl_to_ref, gradient.norm(), out.loss_objective, out.clip_fraction, out.ESS]
    return [x.item() for x in found]


alone, tenth = losses(0), losses(36)
for name, a, b in zip(("KL", "its gradient", "policy term", "clip_fraction", "sample size"), alone, tenth):
    print(f"{name}: {a:.4f} without a prompt, {b:.4f} where the prompt is nine tenths")
assert abs(alone[0] - torch.e ** -1) < 1e-5  # exp(-1) + 1 - 1, of every response token
assert all(abs(tenth[i] - alone[i] / 10) < 1e-5 for i in (0, 1, 3))
assert alone[1] > 0.1 and abs(alone[3] - 0.5) < 1e-5
assert all(abs(tenth[i] - alone[i]) < 1e-5 for i in (2, 4))
EOF
