"""How noisy is a step of each arm of section 9 of designs.md, at the same three policies?

    python train.py --mitigation none --advantage rloo --model models/countdown-small --lr 2.8e-4 --seed 5 \\
        --checkpoint_every 50 --out runs/signal
    python -m lab.study.signal runs/signal        writes lab/study/signal.md: an hour on one core

Signal to noise of a step is |E g|^2 / tr Cov(g) of its gradient g, a sum over Q independent puzzles: Q times that of
one puzzle, estimated from the gradients of single puzzles. (A step also divides by its tokens, which hardly vary.)

All arms have the same expected gradient per response. So the noise per response alone, tr Cov(g) / (Q G)^2, says which
arm has how much more signal to noise than another, without the error of |E g|^2.
"""
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from grpo import compare
from lab.estimates import cell
from lab.gradients.noise import signal_to_noise, total_variance
from lab.statistics import jackknife
from lab.updates import credit_gradients
from methods import MITIGATIONS
from plumbing.flags import new_parser
from plumbing.progress import follow, one_sentence
from plumbing.report import Estimate, Table
from plumbing.runs import read_config
from queries import Queries
from rollout import Policy, TokenBatch, draw_puzzles, rollout
from settings import Settings
from start import load_policy

CHECKPOINTS = {0: "", 50: "checkpoints/step-000050", 100: "checkpoint"}  # by step, the weights that sample it
RESPONSES, K = 4096, 4


class Arm(NamedTuple):
    """What a step of an arm samples, and its credit: RLOO's, or (1 - mix) A* + mix (r - V_0)."""

    Q: int
    G: int
    mix: float | None = None


ARMS = {"none advantage=rloo": Arm(12, 8),
        **{f"none answers={G} advantage=rloo": Arm(12, G) for G in (16, 45, 90, 180)},
        "none questions=68 advantage=rloo": Arm(68, 8), "oracle k=4": Arm(12, 8, 0.0),
        **{f"oracle k=4 mix={x}": Arm(12, 8, x) for x in (0.25, 0.5, 1.0)}, "oracle answers=45 k=4": Arm(12, 45, 0.0)}


@torch.no_grad()
def credits_of(batch: TokenBatch, mixes: list[float | None]) -> torch.Tensor:
    """The credit (M, B, T) of each of M arms with the same responses."""
    batch.advantage = compare(batch, "rloo")
    truth = MITIGATIONS["oracle"](batch, k=K) if set(mixes) != {None} else None  # (B, T)
    # The A* of a response sum to its reward - V_0.
    return torch.stack([batch.advantage[:, None] * batch.mask if mix is None
                        else (1 - mix) * truth + mix * truth.sum(1, keepdim=True) * batch.mask for mix in mixes])


def products(policy: Policy, s: Settings, G: int, mixes: list[float | None]) -> np.ndarray:
    """The products (M, n, n) of n puzzles' gradients with each other, for M arms with G responses to a puzzle."""
    n = RESPONSES // G
    puzzles = draw_puzzles(policy.task.load("train"), replace(s, questions=n), step=1)
    batch = rollout(policy, puzzles, replace(s, answers=G), step=0)
    batch.ask = Queries(policy, batch, replace(s, answers=G), 0)
    gradients = torch.stack(list(credit_gradients(batch, credits_of(batch, mixes), G)), 1)  # (M, n, P)
    return (gradients @ gradients.mT).double().numpy()


def signals(gram: np.ndarray, Q: int) -> list[Estimate]:
    """The signal to noise of a step of Q puzzles from the products (n, n) of n: of all, and of either half."""
    n, found = len(gram), []
    for use in (np.arange(n), np.arange(n // 2), np.arange(n // 2, n)):
        part = gram[np.ix_(use, use)]
        e = jackknife(lambda some: signal_to_noise(part, some), len(use))
        found.append(Estimate(*(Q * x for x in e[:3])))
    return found


def noise(gram: np.ndarray, arm: Arm) -> Estimate:
    """tr Cov(g) / (Q G)^2 of a step of an arm, from the products (n, n) of n puzzles' gradients with each other."""
    e = jackknife(lambda some: total_variance(gram, some), len(gram))  # of one puzzle
    return Estimate(*(x / (arm.Q * arm.G**2) for x in e[:3]))


def combined(parts: list[Estimate]) -> Estimate:
    """The geometric mean of positive estimates, with its interval; NaN where noise hides the signal of one of them."""
    if min(e.value for e in parts) <= 0:
        return Estimate(float("nan"))
    mean = np.mean([np.log(e.value) for e in parts])
    half = np.linalg.norm([(e.high - e.low) / 2 / e.value for e in parts]) / len(parts)  # errors of logarithms
    return Estimate(*np.exp([mean, mean - half, mean + half]))


def table_signal(found: dict[str, list[list[Estimate]]]) -> Table:
    """found: by arm, for each policy what `signals` says."""
    rows = []
    for name, steps in found.items():
        halves = [", ".join(f"{half.value:.3g}" for half in others) for _, *others in steps]
        rows.append([name, *(cell(e, 3) for e, *_ in steps), cell(combined([e for e, *_ in steps]), 3), *halves])
    note = (f"Of the gradient g of a step: |E g|^2 / tr Cov(g), at the policies of one run of RLOO, from {RESPONSES:,} "
            "responses each. All: the geometric mean. Brackets: 95% intervals over puzzles, by jackknife. Halves: the "
            "same from the first and the second half of the puzzles.")
    return Table("Signal to noise of a step", note, ["arm", *(f"step {step}" for step in CHECKPOINTS), "all",
                                                     *(f"halves, step {step}" for step in CHECKPOINTS)], rows)


def table_variance(found: dict[str, list[Estimate]]) -> Table:
    """found: by arm, for each policy what `noise` says."""
    unit = [e.value for e in found["none advantage=rloo"]]
    rows = []
    for name, steps in found.items():
        parts = [Estimate(*(x / one for x in e[:3])) for e, one in zip(steps, unit)]
        rows.append([name, *(cell(e, 3) for e in (*parts, combined(parts)))])
    note = ("Trace of the covariance of a step's gradient per response, RLOO's with 8 = 1. All: the geometric mean. "
            "Brackets: 95% intervals over puzzles, by jackknife.")
    return Table("Noise of a step", note, ["arm", *(f"step {step}" for step in CHECKPOINTS), "all"], rows)


def measure(run: Path) -> list[Table]:
    """Both tables, from a run of RLOO."""
    s = Settings(**read_config(run)["settings"])
    signal, spread = {name: [] for name in ARMS}, {name: [] for name in ARMS}
    sizes = sorted({arm.G for arm in ARMS.values()})
    for weights, G in follow("policies and group sizes", [*product(CHECKPOINTS.values(), sizes)]):
        policy = load_policy(replace(s, model=str(run / weights) if weights else s.model))
        names = [name for name, arm in ARMS.items() if arm.G == G]
        mixes = list(dict.fromkeys(ARMS[name].mix for name in names))
        grams = dict(zip(mixes, products(policy, s, G, mixes)))
        for name in names:
            signal[name].append(signals(grams[ARMS[name].mix], ARMS[name].Q))
            spread[name].append(noise(grams[ARMS[name].mix], ARMS[name]))
    return [table_signal(signal), table_variance(spread)]


@one_sentence()
def main() -> None:
    """Measure, and write the tables."""
    parser = new_parser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run of RLOO with the checkpoints above")
    text = "\n".join(map(str, measure(parser.parse_args().run)))
    Path(__file__).with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
