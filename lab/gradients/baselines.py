"""How good is the best baseline, if it is known, and a critic that is new? Sections 5 and 6 of
lab/archive/headline-designs.md.

Run it:  python -m lab.gradients.baselines        writes baselines.md, in minutes
"""
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch

import countdown_task
from lab.estimates import cell
from lab.gradients.measure import BATCHES, cross, total_variance
from lab.heads import PUZZLES, SIZE, sample
from lab.statistics import bootstrap, jackknife, share
from lab.updates import credit_gradients
from grpo import compare
from methods import MITIGATIONS
from methods.heads import HEADS
from plumbing.progress import follow
from plumbing.report import Table
from queries import Queries
from rollout import Policy
from settings import Settings
from start import load_policy

Q, R = 32, 64  # puzzles, and responses to each
SEEN = (0, 1, 2, 5, 10, 20, 40)  # batches that a critic has learned from


def noise_of(g: np.ndarray, r: np.ndarray) -> dict[str, float]:
    """The noise of one puzzle's gradient by baseline, from gradients (R, P) and rewards (R,) of its responses."""
    square, halves = (g**2).sum(1), np.split(np.arange(len(r)), 2)  # (R,)
    known = np.dot(*(((r[own] - r.mean())[:, None] * g[own]).mean(0) for own in halves))  # |E g (r - b)|^2
    best = (square * r).sum() / square.sum()
    found = {"no baseline": 0.0, "mean": 0.0, "optimum": 0.0, "optimum, in sample": 0.0}
    for own, other in (halves, halves[::-1]):
        baselines = 0.0, r[other].mean(), (square[other] * r[other]).sum() / square[other].sum(), best
        for name, b in zip(found, baselines):
            found[name] += ((r[own] - b) ** 2 * square[own]).mean() / 2 - known / 2
    return found


def table_baselines(policy: Policy) -> Table:
    """Section 5."""
    parts = {"success": [], "reward": []}
    for i, puzzle in enumerate(follow("gradients", countdown_task.generate_puzzles(Q, "train", seed=2))):
        batch = sample(policy, [puzzle], R, (0, 2000 + i))
        g = torch.cat([*credit_gradients(batch, batch.mask.float()[None], 1)]).double().numpy()  # (R, P)
        for name, found in parts.items():
            found.append([*noise_of(g, getattr(batch, name).double().numpy()).values()])
    rows = []
    for name, found in parts.items():
        noise = np.array(found)  # (Q, 4)
        rows.append([name, *(cell(bootstrap(share, noise[:, [k, 1]])) for k in (0, 2, 3))])
    return Table("Noise over that with the mean as baseline", (
        f"{Q} puzzles, {R} responses each; the baselines are of one half of them, the noise of the other, but for the "
        "last column. Optimum: E[g^2 r] / E[g^2]. 95% bootstrap intervals over puzzles."),
        ["r", "no baseline", "optimum", "optimum, in sample"], rows)


def critics(policy: Policy) -> dict[int, torch.nn.Module]:
    """The critic after so many batches."""
    head, found = HEADS["critic"](policy.model.config.hidden_size), {}
    puzzles = policy.task.load("train", SIZE * PUZZLES)
    for i in follow("fitting the critic", range(SEEN[-1] + 1)):
        if i in SEEN:
            found[i] = deepcopy(head)
        head.learn(sample(policy, puzzles[i % PUZZLES :: PUZZLES], 1, (0, i + 1)))
    return found


def table_critics(policy: Policy) -> Table:
    """Section 6."""
    heads, gradients, puzzles = critics(policy), [], countdown_task.generate_puzzles(6 * BATCHES, "train", seed=1)
    for i in follow("gradients of the critics", range(BATCHES)):
        batch, credits = sample(policy, puzzles[6 * i : 6 * i + 6], 8, (0, 1000 + i)), []
        with torch.no_grad():
            for head in heads.values():
                batch.ask = Queries(policy._replace(heads={"critic": head}), batch, Settings(answers=8), 0)
                credits.append(MITIGATIONS["ppo"](batch) / batch.mask.sum())
            credits.append(MITIGATIONS["none"](batch) / batch.mask.sum())
            credits.append(compare(batch, "rloo").float()[:, None] * batch.mask / len(batch.text))
        gradients.append(sum(credit_gradients(batch, torch.stack(credits), 8)))  # (M, P)
    grams = [(g.double() @ g.double().T).numpy() for g in torch.stack(gradients, 1)]  # M of (n, n)
    signal = lambda gram: lambda use: cross(gram, use) / total_variance(gram, use)
    minus = lambda gram: jackknife(lambda use: signal(gram)(use) - signal(grams[-2])(use), BATCHES)
    names = [*(f"ppo, {n} batches" for n in SEEN), "GRPO", "r - others' mean"]
    rows = [[name, cell(jackknife(signal(gram), BATCHES), 3), cell(minus(gram), 3) if name != "GRPO" else ""]
            for name, gram in zip(names, grams)]
    return Table("Noise of a critic that is new", (
        f"{BATCHES} batches of 6 puzzles x 8 responses. Signal to noise: |E g|^2 / tr Cov(g). Jackknife 95% intervals; "
        "primary are the differences of 0 and 40 batches from GRPO."), ["credit", "signal to noise", "minus GRPO"], rows)


def main() -> None:
    """Measure and write both tables."""
    policy = load_policy(Settings())
    text = f"{table_baselines(policy)}\n{table_critics(policy)}"
    Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
