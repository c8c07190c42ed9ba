"""Section 11 of lab/study/designs.md, first part: is credit from own successes, learned while the policy trains, close
to A*? Two copies of the start model imitate each step's responses: q1 the right ones, q0 all. By Bayes' rule of a
perfect pair, with V the value before a token, V (q1 / q0 - 1) is A*.

Run it:  python -m lab.truth.own_successes        writes lab/truth/own_successes.md; a quarter of an hour on one core
"""
import copy
from pathlib import Path

import torch
from torch import Tensor

from grpo import compare, update
from lab.estimates import cell
from lab.updates import cosine_of, updates_of
from methods import MITIGATIONS
from plumbing.optimizer import Optimizer
from plumbing.progress import follow, one_sentence
from plumbing.report import Table
from plumbing.shared_prompts import shared_logprobs, shared_prompts
from qwen2_model import Qwen2
from rollout import TokenBatch, by_group, draw_puzzles, rollout
from train import Settings, load_policy

AT = (50, 100)  # steps of the policies that are looked at
S = Settings(model="models/countdown-small", advantage="rloo", lr=2.8e-4, seed=6)


class Learner:
    """A copy of the model that imitates some of each step's responses."""

    def __init__(self, model: Qwen2):
        self.model = copy.deepcopy(model)
        self.optimizer = Optimizer(self.model, S.lr)

    def learn(self, batch: TokenBatch, chosen: Tensor) -> None:
        """A step on the responses where chosen (B,) is True."""
        if not chosen.any():
            return
        self.optimizer.zero_grad()
        credit = chosen[:, None] * batch.mask.float()  # (B, T)
        for rows, logprob, _ in shared_prompts(self.model, batch, credit, S):
            (-(logprob * credit[rows, : logprob.shape[1]]).sum() / credit.sum()).backward()
        self.optimizer.step(S.max_grad_norm)


def own_successes(batch: TokenBatch, q1: Learner, q0: Learner) -> Tensor:
    """The credit (B, T): s (exp(clamp(log q1 - log q0, -2, 2)) - 1), s the mean success of the group's others."""
    success = by_group(batch, batch.success)  # (Q, G)
    s = ((success.sum(1, keepdim=True) - success) / (success.shape[1] - 1)).flatten()  # (B,)
    log1, log0 = (batch.ask.read(shared_logprobs, q.model) for q in (q1, q0))  # (B, T) each
    return s[:, None] * torch.expm1((log1 - log0).clamp(-2, 2)) * batch.mask


def scores(batch: TokenBatch, q1: Learner, q0: Learner) -> list[list[str]]:
    """Name and cosine with the update of A* of the updates that both credits cause."""
    batch.advantage = compare(batch, "rloo")
    with torch.no_grad():
        credits = {"A*": MITIGATIONS["oracle"](batch, k=16), "RLOO": MITIGATIONS["none"](batch),
                   "own successes": own_successes(batch, q1, q0)}
    flat = {name: credit[batch.mask].numpy() for name, credit in credits.items()}
    updates = dict(zip(flat, updates_of(list(flat.values()), batch)))
    return [[name, cell(cosine_of(updates[name], updates["A*"]))] for name in list(flat)[1:]]


@one_sentence()
def main() -> None:
    """Train, look at the two policies, and write the table."""
    policy = load_policy(S)
    optimizer, q1, q0 = Optimizer(policy.model, S.lr), Learner(policy.model), Learner(policy.model)
    training, heldout, rows = policy.task.load("train", 4096), policy.task.load("heldout", 32), []
    for step in follow("steps", range(1, AT[-1] + 1)):
        batch = rollout(policy, draw_puzzles(training, S, step), S, step)
        batch.advantage = compare(batch, S.advantage)
        update(policy, optimizer, batch, MITIGATIONS["none"](batch), S)
        q1.learn(batch, batch.success > 0)
        q0.learn(batch, torch.ones_like(batch.success, dtype=torch.bool))
        if step in AT:
            rows += [[f"{step}", *row] for row in scores(rollout(policy, heldout, S, step), q1, q0)]
    table = Table("Credit from own successes, learned in training", (
        "Cosine of the update with that of A* of the reward (K = 16), 256 responses to 32 held-out puzzles, with 95% "
        "intervals over puzzles."), ["step", "credit", "cosine of update"], rows)
    Path(__file__).with_suffix(".md").write_text(str(table), encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
