"""How noisy is the gradient of a step, by arm, at the same three policies? It says which arms are equally noisy.

    python train.py --task guess --mitigation none --advantage rloo --max_new_tokens 24 --seed 100 \\
        --checkpoint_every 50 --eval_every 50 --pass_at 0 --out runs/turns-noise
    python -m lab.turns.noise runs/turns-noise        writes lab/turns/noise.md: ten minutes on one core

The noise is tr Cov(g) of a step's gradient per response, tr Cov(g) / (Q G)^2 for a sum g over Q independent games of G
episodes: Q times that of one game, estimated from the gradients of single games. All arms have the same expected
gradient (but for the format's share of the reward, which RLOO sees), so it says which has how much more signal to
noise than another, without the error of |E g|^2.
"""
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch

from grpo import compare
from lab.estimates import cell
from lab.gradients.measure import total_variance
from lab.statistics import jackknife
from lab.turns.credit import credits_of
from lab.turns.values import grow
from lab.updates import credit_gradients
from plumbing.flags import new_parser
from plumbing.progress import follow, one_sentence
from plumbing.report import Estimate, Table
from plumbing.runs import read_config
from queries import Queries
from rollout import Policy, draw_puzzles, rollout
from settings import Settings
from start import load_policy

RLOO = "none advantage=rloo"
CHECKPOINTS = {0: "", 50: "checkpoints/step-000050", 100: "checkpoint"}  # by step, the weights that sample it
GAMES, ANSWERS, MIXES = 120, (8, 64), (0.0, 0.5, 0.74, 1.0)
EXACT = {"exact_turns": 0, "exact_turns luck=false": 1}  # by arm, its row of `credits_of`


@torch.no_grad()
def credits(policy: Policy, s: Settings):
    """A step of GAMES groups, and its credits (M, B, T): RLOO's; with 8 answers also A1, A2, success - V(prompt, s)."""
    batch = rollout(policy, draw_puzzles(policy.task.load("train"), replace(s, questions=GAMES), step=1), s, step=0)
    batch.ask = Queries(policy, batch, s, 0)
    found = [compare(batch, "rloo")[:, None] * batch.mask]
    if s.answers == ANSWERS[0]:
        A1, A2, _ = credits_of(batch, grow(policy)).to(batch.logprob)  # (B, T) each
        found += [A1, A2, A1.sum(1, keepdim=True) * batch.mask]
    return batch, torch.stack(found)


def grams(policy: Policy, s: Settings) -> dict[str, np.ndarray]:
    """By arm, the products (GAMES, GAMES) of the gradients of single games with each other."""
    g = torch.cat(list(credit_gradients(*credits(policy, s), s.answers)))  # (GAMES M, P)
    M = len(g) // GAMES
    dot = (g @ g.mT).double().view(GAMES, M, GAMES, M).numpy()
    found = {RLOO if s.answers == ANSWERS[0] else f"none answers={s.answers} advantage=rloo": dot[:, 0, :, 0]}
    for (name, row), mix in product(EXACT.items(), MIXES if M > 1 else ()):
        weight = np.zeros(M)
        weight[[1 + row, 3]] += 1 - mix, mix
        found[f"{name} mix={mix}" if mix else name] = np.einsum("a,b,gahb->gh", weight, weight, dot)
    return found


def noise(gram: np.ndarray, Q: int, G: int) -> Estimate:
    """tr Cov(g) / (Q G)^2 of a step, from the products (n, n) of n games' gradients with each other."""
    e = jackknife(lambda some: total_variance(gram, some), len(gram))  # of one game
    return Estimate(*(x / (Q * G**2) for x in e[:3]))


def combined(parts: list[Estimate]) -> Estimate:
    """The geometric mean of positive estimates, with its interval."""
    mean = np.mean([np.log(e.value) for e in parts])
    half = np.linalg.norm([(e.high - e.low) / 2 / e.value for e in parts]) / len(parts)  # errors of logarithms
    return Estimate(*np.exp([mean, mean - half, mean + half]))


def table_variance(found: dict[str, list[Estimate]]) -> Table:
    """found: by arm, for each policy what `noise` says."""
    unit, rows = [e.value for e in found[RLOO]], []
    for name, steps in found.items():
        parts = [Estimate(*(x / one for x in e[:3])) for e, one in zip(steps, unit)]
        rows.append([name, *(cell(e, 3) for e in (*parts, combined(parts)))])
    note = ("Trace of the covariance of a step's gradient per response, RLOO's with 8 = 1. All: the geometric mean. "
            "Brackets: 95% intervals over puzzles, by jackknife.")
    return Table("Noise of a step", note, ["arm", *(f"step {step}" for step in CHECKPOINTS), "all"], rows)


@one_sentence()
def main() -> None:
    """Measure, and write the table."""
    parser = new_parser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run of RLOO with the checkpoints above")
    run = parser.parse_args().run
    s, found = Settings(**read_config(run)["settings"]), {}  # by arm, an Estimate for each policy
    for weights, G in follow("policies and group sizes", [*product(CHECKPOINTS.values(), ANSWERS)]):
        policy = load_policy(replace(s, model=str(run / weights) if weights else s.model))
        for name, gram in grams(policy, replace(s, answers=G)).items():
            found.setdefault(name, []).append(noise(gram, s.questions, G))
    text = str(table_variance(found))
    Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
