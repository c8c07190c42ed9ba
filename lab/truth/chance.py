"""Three questions to the measured truths: the tenth of the tokens by chance, the sign of the outcome, and what filler
gets of the gradient beside what it decides.

Run it:  python -m lab.truth.chance        writes chance.md
"""
from pathlib import Path

import numpy as np

from lab.statistics import bootstrap, cell, share, sums
from lab.truth.score import read_truth
from lab.truth.scoring import squares
from plumbing.report import Estimate, Table
from plumbing.terminal import one_sentence
from tasks.text import FILLER, REASONING

HERE, DRAWS = Path(__file__).parent, 50
TRUTHS = {"countdown-tiny": HERE / "data/ground_truth.npz", "countdown-small": HERE / "data-small/ground_truth.npz",
          "Qwen, at the start": HERE.parent / "real/data/truth-start.npz"}
SHAPES = {  # of A* over its bound 1 - p; the last two leave the bound now and then
    "± the bound": lambda rng, n: rng.choice([-1, 1], n), "uniform within it": lambda rng, n: rng.uniform(-1, 1, n),
    "normal": lambda rng, n: rng.normal(size=n), "t, 3 degrees": lambda rng, n: rng.standard_t(3, n)}


def tenth_by_chance(truth: dict) -> list[str]:
    """The share of A* squared on its largest tenth, were A* random of each shape, on tokens with rollouts."""
    bound = np.where(truth["packets"] > 0, -np.expm1(truth["logprob"].astype(float)), 0)  # (N,)
    rng, cells, n = np.random.default_rng(0), [], len(bound)
    for shape in SHAPES.values():
        drawn = np.sort((bound * [shape(rng, n) for _ in range(DRAWS)]) ** 2)  # (DRAWS, N)
        cells.append(f"{np.mean(drawn[:, -round(n / 10):].sum(1) / drawn.sum(1)):.2f}")
    return cells


def outcome_sign(truth: dict) -> Estimate:
    """The share of A* squared on tokens where A* has the sign of the outcome, plus in a right response."""
    agrees = np.sign(truth["a_star"]) == np.where(truth["success"] > 0.5, 1, -1)
    size = squares(truth)
    return bootstrap(share, sums(truth["group"].astype(int), size * agrees, size))


def wasted(truth: dict, tags: bool) -> list[Estimate]:
    """Filler's share of the tokens, of GRPO's gradient, by its size at the logits, and of A* squared; and the last
    minus the one before, of the same resamples. tags: they count as filler, as in the original work."""
    filler = truth["role"] != REASONING if tags else truth["role"] == FILLER
    gradient, one = np.abs(truth["advantage"] * truth["logit_grad"]).astype(float), np.ones(len(filler))
    columns = [x for size in (one, gradient, squares(truth)) for x in (filler * size, size)]  # 6 of (N,)
    by_puzzle = sums(truth["group"].astype(int), *columns)  # (Q, 6)
    shares = [bootstrap(lambda s, i=i: share(s[..., i : i + 2]), by_puzzle) for i in (0, 2, 4)]
    return [*shares, bootstrap(lambda s: share(s[..., 4:]) - share(s[..., 2:]), by_puzzle)]


@one_sentence()
def main() -> None:
    """Write the tables."""
    truths = {name: read_truth(file) for name, file in TRUTHS.items()}
    tables = [Table("A tenth by chance", (
        "The share of A* squared on the tenth of the tokens with the largest A*, if A* were random within its bound "
        "1 - p, or beyond it. By `python -m lab.truth.chance`."), ["truth", *SHAPES],
        [[name, *tenth_by_chance(truth)] for name, truth in truths.items()])]
    tables.append(Table("The sign of the outcome", (
        "The share of A* squared where A* has the sign of the outcome. 95% intervals over puzzles."),
        ["truth", "share"], [[name, cell(outcome_sign(truths[name]))] for name in list(TRUTHS)[:2]]))
    tables.append(Table("What filler gets, and what it decides", (
        "Filler's share of the tokens, of GRPO's gradient (mean size at the logits), and of A* squared, by products of "
        "halves of the rollouts. 95% intervals over puzzles, of the same resamples."),
        ["truth", "filler", "tokens", "gradient", "A* squared", "A* squared - gradient"],
        [[name, "with tags" if tags else "without", *map(cell, wasted(truth, tags))]
         for name, truth in truths.items() for tags in (False, True)]))
    (HERE / "chance.md").write_text("\n".join(map(str, tables)), encoding="utf-8")
    print(*tables, sep="\n")


if __name__ == "__main__":
    main()
