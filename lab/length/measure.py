"""How noisy is a step's gradient by the length of responses? A row of rows.csv, or methods.csv, a pair of puzzles.

    python -m lab.length.measure rows 120 48        RLOO, measured and exact credit, of 48 pairs; resumes
    python -m lab.length.measure methods 120 48     methods that sample nothing, or little

Half of a squared difference between two puzzles is an unbiased estimate of tr Cov, so pairs are independent rows.
"""
import csv
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from grpo import compare
from lab import heads
from lab.length.warm import describe, settings
from methods import MITIGATIONS
from methods.queries import Queries
from plumbing.progress import follow
from rollout import Policy, TokenBatch, rollout
from settings import Settings
from start import load_policy

G, GROUPS = 8, 6
METHODS = ("none", "entropy_ratio", "prefix_tree", "ppo", "vineppo")


def product(a: Tensor, b: Tensor) -> float:
    """The mean of the inner products of vectors (..., P)."""
    return (a * b).sum(-1, dtype=torch.float64).mean().item()


def across(u: Tensor) -> float:
    """The mean product of two different ones of n independent vectors (n, P)."""
    return (len(u) * product(u.mean(0), u.mean(0)) - product(u, u)) / (len(u) - 1)


def gradients(batch: TokenBatch, credits: list[Tensor], size: int) -> Tensor:
    """(n, M, P): of every `size` responses, the gradient in P parameters with each of M credits (B, T)."""
    return torch.stack(list(heads.credit_gradients(batch, torch.stack(credits).float(), size)))


def rloo(scores: Tensor, reward: Tensor, size: int) -> Tensor:
    """(n, P): RLOO's gradient of every `size` of a puzzle's responses, from their scores (48, P)."""
    return torch.stack([(r - r.mean()).float() @ s / (size - 1)
                        for s, r in zip(scores.split(size), reward.split(size)) if len(r) == size])


def sample(policy: Policy, puzzles: list, s: Settings, step: int) -> TokenBatch:
    """Responses, with RLOO's advantage."""
    batch = rollout(policy, puzzles, s, step)
    batch.ask, batch.advantage = Queries(policy, batch, s, step), compare(batch, "rloo")
    return batch


def uniform(many: TokenBatch) -> tuple[dict[str, float], Tensor, list[Tensor]]:
    """Of 48 responses to each of two puzzles: columns about RLOO, the rewards (2, 48), and gradients (6, P) of each."""
    scores, r = gradients(many, [many.mask], 1)[:, 0].unflatten(0, (2, -1)), many.reward.view(2, -1)
    square, norm = (r - r.mean(1, keepdim=True)) ** 2 * 48 / 47, (many.logit_grad**2).sum(1).view(2, -1)  # (2, 48) each
    by_size = {size: [rloo(x, y, size) for x, y in zip(scores, r)] for size in (G, 2 * G, 45)}
    apart = {size: a - b for size, (a, b) in by_size.items()}
    row = {"V(1-V)": square.mean().item(), "uniform, logits": (square * norm).mean().item()}
    row |= {f"rloo {size}": product(d, d) / 2 for size, d in apart.items()}
    return row | {"puzzles": across(apart[G]) / 2, "mean": sum(map(across, by_size[G])) / 2}, r, by_size[G]


def measured(few: TokenBatch, policy: Policy, s: Settings, pair: int, baseline: Tensor) -> dict[str, float]:
    """Credit from two halves of continuations: their product is exact credit's. baseline (2,): V of each puzzle."""
    credits = [(few.reward - baseline.repeat_interleave(s.responses))[:, None] * few.mask]  # (B, T) each
    for half in (0, 1):
        few.ask = Queries(policy, few, s, 2 * pair + half)
        credits.append(MITIGATIONS["oracle"](few, k=4) * few.mask)
    row = {"A* squared": product(*credits[1:])}
    for where, (u, a, b) in {"logits": [few.logit_grad * c for c in credits],
                             "gradients": gradients(few, credits, 1).unbind(1)}.items():
        row |= {f"exact, {where}": product(a, b), f"K = 4, {where}": (product(a, a) + product(b, b)) / 2,
                f"uniform with measured, {where}": product(u, (a + b) / 2)}
    return row


def of_methods(few: TokenBatch, means: list[Tensor]) -> dict[str, float]:
    """Noise of each method on two groups of both puzzles, and its product with RLOO's mean gradient of other ones."""
    found = gradients(few, [MITIGATIONS[name](few) / G for name in METHODS], G).unflatten(0, (2, 2))  # (2, 2, M, P)
    known = torch.stack([u.mean(0) for u in means])[:, None]  # (2, 1, P)
    return {f"{name}, {what}": value for m, name in enumerate(METHODS) for what, value in (
        ("noise", product(*[found[0, :, m] - found[1, :, m]] * 2) / 2), ("along", product(found[:, :, m], known)))}


if __name__ == "__main__":
    kind, length, pairs = sys.argv[1], *map(int, sys.argv[2:])
    s, file, fitted = settings(length), Path(__file__).with_name(f"{kind}.csv"), Path(f"runs/length/heads-{length}")
    policy = load_policy(s)
    puzzles = policy.task.load("train")
    if kind == "methods":
        heads.LIMIT = s.max_new_tokens
        fitted.mkdir(parents=True, exist_ok=True)
        policy = policy._replace(heads=heads.find_heads(fitted, policy, 40))
    old = list(csv.reader(file.open())) if file.exists() else []
    for pair in follow("pairs", range(sum(row[0] == str(length) for row in old), pairs)):
        x, y = puzzles[2 * pair : 2 * pair + 2]
        many, own = sample(policy, [x] * GROUPS + [y] * GROUPS, s, pair), replace(s, seed=1)
        row, r, means = uniform(many)
        if kind == "methods":
            row = {name: row[name] for name in ("rloo 8", "mean")} | of_methods(
                sample(policy, [x, x, y, y], own, pair), means)
        else:
            own = replace(own, responses=8 if length == 60 else 4)
            row = describe(many) | row | measured(sample(policy, [x, y], own, pair), policy, own, pair, r.mean(1))
        with file.open("a", newline="") as out:
            header = [] if file.stat().st_size else [["length", "pair", *row]]
            csv.writer(out, lineterminator="\n").writerows(
                [*header, [length, pair, *(f"{value:.6g}" for value in row.values())]])
