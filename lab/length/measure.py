"""How noisy is a step's gradient by the length of responses? Rows of rows.csv, one for each pair of puzzles.

    python -m lab.length.measure 120                 measured and exact credit, and RLOO: resumes behind the last row
    python -m lab.length.measure 120 --methods       methods that sample nothing, or little: rows of methods.csv

The policies of 120 and 240 tokens come from lab/length/warm.py. Half of a squared difference between two puzzles is
an unbiased estimate of tr Cov, so pairs are independent rows. P: parameters.
"""
import csv
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from grpo import compare
from lab import heads
from lab.length.warm import LENGTHS, describe, settings
from methods import MITIGATIONS
from plumbing.flags import new_parser
from plumbing.policy import Policy
from plumbing.progress import follow, one_sentence
from queries import Queries
from rollout import TokenBatch, rollout
from settings import Settings
from start import load_policy

ROOM = Path(__file__).parent
GROUPS, G, K = 6, 8, 4
CONTINUED = {60: 8, 120: 4, 240: 4}  # responses of a puzzle whose credit is measured
PAIRS = {60: 64, 120: 48, 240: 32}
METHODS = ("none", "entropy_ratio", "prefix_tree", "ppo", "vineppo")


def product(a: Tensor, b: Tensor) -> float:
    """The mean of the inner products of vectors (..., P)."""
    return (a * b).sum(-1, dtype=torch.float64).mean().item()


def across(u: Tensor) -> float:
    """The mean product of two different ones of n independent vectors (n, P)."""
    n = len(u)
    return (n * product(u.mean(0), u.mean(0)) - product(u, u)) / (n - 1)


def gradients(batch: TokenBatch, credits: list[Tensor], size: int) -> Tensor:
    """(n, M, P): of every `size` responses, the gradient with each of M credits (B, T)."""
    return torch.stack(list(heads.credit_gradients(batch, torch.stack(credits).float(), size)))


def rloo(scores: Tensor, reward: Tensor, size: int) -> Tensor:
    """(n, P): RLOO's gradient of every `size` of a puzzle's responses, from their scores (48, P)."""
    s, r = scores.split(size), reward.split(size)
    return torch.stack([((y - y.mean()).float() @ x) / (size - 1) for x, y in zip(s, r) if len(y) == size])


def sample(policy: Policy, puzzles: list, s: Settings, step: int) -> TokenBatch:
    """Responses and their RLOO advantages."""
    batch = rollout(policy, puzzles, s, step)
    batch.ask, batch.advantage = Queries(policy, batch, s, step), compare(batch, "rloo")
    return batch


def uniform(many: TokenBatch) -> tuple[dict[str, float], Tensor, list[Tensor]]:
    """What 48 responses to each of two puzzles say of RLOO; their rewards (2, 48), and gradients (6, P) of each."""
    scores, r = gradients(many, [many.mask], 1)[:, 0].unflatten(0, (2, -1)), many.reward.view(2, -1)
    centred, norm = r - r.mean(1, keepdim=True), (many.logit_grad**2).sum(1).view(2, -1)  # (2, 48) each
    by_size = {size: [rloo(x, y, size) for x, y in zip(scores, r)] for size in (G, 2 * G, 45)}
    apart = {size: a - b for size, (a, b) in by_size.items()}
    scale = r.shape[1] / (r.shape[1] - 1)
    row = {"V(1-V)": (centred**2).mean().item() * scale, "uniform at logits": (centred**2 * norm).mean().item() * scale}
    row |= {f"rloo {size}": product(d, d) / 2 for size, d in apart.items()}
    return row | {"puzzles": across(apart[G]) / 2, "mean": sum(map(across, by_size[G])) / 2}, r, by_size[G]


def measured(few: TokenBatch, policy: Policy, s: Settings, pair: int, baseline: Tensor) -> dict[str, float]:
    """Credit of two halves of continuations: exact credit is their product. baseline (2,): V of each puzzle."""
    halves = []
    for half in (0, 1):
        few.ask = Queries(policy, few, s, 2 * pair + half)
        halves.append(MITIGATIONS["oracle"](few, k=K) * few.mask)
    plain = (few.reward - baseline.repeat_interleave(len(few.reward) // 2))[:, None] * few.mask  # (B, T)
    row, norm = {}, few.logit_grad**2
    a, b, u = gradients(few, [*halves, plain], 1).unbind(1)  # (B, P) each
    for name, (x, y, z) in {"logits": (*halves, plain), "gradients": (a, b, u)}.items():
        weight = norm if name == "logits" else torch.ones(())
        row |= {f"exact, {name}": product(weight * x, y), f"K=4, {name}": product(weight * x, x) / 2 + product(
            weight * y, y) / 2, f"uniform with measured, {name}": product(weight * z, (x + y) / 2)}
    return row | {"A* squared": product(*halves)}


def of_methods(few: TokenBatch, means: list[Tensor]) -> dict[str, float]:
    """Noise of each method on two groups of both puzzles, and its product with RLOO's mean gradient of other ones."""
    found = gradients(few, [MITIGATIONS[name](few) / G for name in METHODS], G).unflatten(0, (2, 2))  # (2, 2, M, P)
    apart, known = found[0] - found[1], torch.stack([u.mean(0) for u in means])[:, None]  # (2, M, P), (2, 1, P)
    row = {f"{name}, noise": product(apart[:, m], apart[:, m]) / 2 for m, name in enumerate(METHODS)}
    return row | {f"{name}, along": product(found[:, :, m], known) for m, name in enumerate(METHODS)}


@one_sentence()
def main() -> None:
    """Append the missing rows."""
    parser = new_parser(description=__doc__)
    parser.add_argument("length", type=int, choices=LENGTHS)
    parser.add_argument("--pairs", type=int, default=0, help="how many (default: as designed)")
    parser.add_argument("--methods", action="store_true", help="methods.csv instead")
    args = parser.parse_args()
    s, file = settings(args.length), ROOM / ("methods.csv" if args.methods else "rows.csv")
    policy = load_policy(s)
    puzzles = policy.task.load("train")
    if args.methods:
        heads.LIMIT, fitted = s.max_new_tokens, Path(f"runs/length/heads-{args.length}")
        fitted.mkdir(parents=True, exist_ok=True)
        policy = policy._replace(heads=heads.find_heads(fitted, policy, 40))
    done = {row["pair"] for row in csv.DictReader(file.open())
            if row["length"] == str(args.length)} if file.exists() else ()
    for pair in follow("pairs", [i for i in range(args.pairs or PAIRS[args.length]) if str(i) not in done]):
        x, y = puzzles[2 * pair : 2 * pair + 2]
        many = sample(policy, [x] * GROUPS + [y] * GROUPS, s, pair)
        row, r, means = uniform(many)
        if args.methods:
            few = sample(policy, [x, x, y, y], replace(s, seed=1), pair)
            row = {name: row[name] for name in ("rloo 8", "mean")} | of_methods(few, means)
        else:
            few = sample(policy, [x, y], replace(s, answers=CONTINUED[args.length], seed=1), pair)
            row = describe(many) | row | measured(few, policy, s, pair, r.mean(1))
        new = not file.exists()
        with file.open("a", newline="") as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerows([["length", "pair", *row]] * new)
            writer.writerow([args.length, pair, *(f"{x:.6g}" for x in row.values())])


if __name__ == "__main__":
    main()
