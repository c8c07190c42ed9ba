"""The bounds of the screen, and how often they err: simulated, since a new function's deviation is unknown.

A function has a look after each seed from the third to the last. It is killed where its lead is not above 0, and a try
where Welch's one-sided p is below a level. At this level one that is no better is ever a try with probability `error`,
whatever its deviation. How often it then errs is counted on other draws.

Run it:  python -m lab.screen.bounds
"""
from functools import cache
from itertools import product

import numpy as np

from plumbing.report import Table

FIRST, LAST, BOX = 3, 8, 20  # seeds at the first look and at the last; those in the box
ERROR = 0.05  # of any try of one function that is no better
DEVIATIONS = (0.5, 1, 2, 4)  # a function's over the box's
NODES, WEIGHTS = np.polynomial.legendre.leggauss(40)


def tail(t: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """The probability (...) that Student's t exceeds t (...): with t = sqrt(freedom) tan(a), its density is
    proportional to cos(a)^(freedom - 1), integrated by Gauss's rule."""
    def above(a: np.ndarray) -> np.ndarray:
        half = (np.pi / 2 - a)[..., None] / 2
        return (WEIGHTS * half * np.cos(np.pi / 2 - half * (1 + NODES)) ** (freedom[..., None] - 1)).sum(-1)
    return above(np.arctan(t / np.sqrt(freedom))) / above(np.full(np.shape(t), -np.pi / 2))


def simulate(lead: float, deviation: float, runs: int = BOX, draw: int = 1, paths: int = 40_000) -> tuple:
    """The lead at each look and its one-sided p by Welch, (paths, looks) each. The box: `runs` of deviation 1."""
    rng = np.random.default_rng(draw)
    box, seeds = rng.normal(0, 1, (paths, runs)), rng.normal(lead, deviation, (paths, LAST))
    n = np.arange(FIRST, LAST + 1)
    seen = [seeds[:, :k] for k in n]
    v = np.stack([part.var(1, ddof=1) for part in seen], 1) / n  # (paths, looks) squared errors of the two means
    w = box.var(1, ddof=1)[:, None] / runs
    difference = np.stack([part.mean(1) for part in seen], 1) - box.mean(1)[:, None]
    return difference, tail(difference / np.sqrt(v + w), (v + w) ** 2 / (v**2 / (n - 1) + w**2 / (runs - 1)))


def smallest(difference: np.ndarray, p: np.ndarray) -> np.ndarray:
    """The smallest p (paths,) of each path before it is killed; 1 where it is killed at the first look."""
    return np.where(np.logical_and.accumulate(difference > 0, 1), p, 1).min(1)


@cache
def level(error: float, runs: int = BOX) -> float:
    """The p below which a function is a try, on one axis of one task, so that it errs with this probability."""
    return min(float(np.quantile(smallest(*simulate(0, d, runs, draw=0)), error)) for d in DEVIATIONS)


def shares(lead: float, deviation: float, below: float) -> tuple[float, float, float, float]:
    """How often it ends in kill, undecided and try where a p below this is a try; and the mean number of seeds."""
    difference, p = simulate(lead, deviation)
    tried, ended = smallest(difference, p) < below, (difference <= 0) | (p < below)
    killed = ~tried & (difference <= 0).any(1)
    seeds = np.where(ended.any(1), FIRST + ended.argmax(1), LAST)
    return killed.mean(), (~tried & ~killed).mean(), tried.mean(), seeds.mean()


def table() -> Table:
    """How often the screen ends in which word, and what an unadjusted t at every seed would do."""
    rows = []
    for deviation, lead in product((1, 2, 4), (-2, 0, 1, 2, 3)):
        *words, seeds = shares(lead, deviation, level(ERROR / 2))
        naive = 100 * (simulate(lead, deviation)[1] < ERROR).any(1).mean()
        rows.append([f"{deviation}", f"{lead}", *(f"{100 * x:.1f}" for x in words), f"{seeds:.1f}", f"{naive:.1f}"])
    return Table("How often the screen ends in which word", (
        "Lead and deviation in those of the box. In percent of simulated functions, on one of two axes; the mean "
        f"number of seeds; unadjusted: a one-sided t at 5% at every seed from {FIRST} to {LAST}. A try is a p below "
        f"{level(ERROR / 2):.5f}."), ["deviation", "lead", "kill", "undecided", "try", "seeds", "unadjusted"], rows)


if __name__ == "__main__":
    print(table())
