"""The bounds of the screen, and how often they err: simulated, since looks after every seed have no table.

A function has a look after each seed from the third to the last: t = lead / Welch's error, with n - 1 degrees of
freedom after n seeds, or those of a smaller box. It is killed where its lead is not above 0, and a try where the
one-sided p is below a level. At this level one that is no better, and whose deviation is far above the box's, is ever a
try with probability `error`; others are more rarely. How often it then errs is counted on other draws.

Run it:  python -m lab.screen.bounds
"""
from functools import cache
from itertools import product

import numpy as np

from plumbing.report import Table, student

FIRST, LAST, BOX = 3, 8, 20  # seeds at the first look and at the last; those in the box
ERROR = 0.05  # of any try of one function that is no better


def freedom(n: int, runs: int) -> int:
    """Degrees of freedom of t after n seeds, beside a box of so many runs."""
    return min(n, runs) - 1


@cache
def simulate(lead: float, deviation: float, runs: int = BOX, draw: int = 1, paths: int = 40_000) -> np.ndarray:
    """The lead at each look, and its one-sided p, (2, looks, paths); at most 0.5. The box: `runs` of deviation 1."""
    rng, found = np.random.default_rng(draw), []
    box, seeds = rng.normal(0, 1, (paths, runs)), rng.normal(lead, deviation, (paths, LAST))
    for n in range(FIRST, LAST + 1):
        own = seeds[:, :n]
        difference = own.mean(1) - box.mean(1)  # (paths,)
        error = np.sqrt(own.var(1, ddof=1) / n + box.var(1, ddof=1) / runs)
        found.append([difference, np.interp(difference / error, *student(freedom(n, runs))) / 2])
    return np.stack(found, 1)


def smallest(difference: np.ndarray, p: np.ndarray) -> np.ndarray:
    """The smallest p (paths,) of each path before it is killed; 1 where it is killed at the first look."""
    return np.where(np.logical_and.accumulate(difference > 0), p, 1).min(0)


def level(error: float) -> float:
    """The p below which a function is a try, on one axis of one task, so that it errs with this probability."""
    return float(np.quantile(smallest(*simulate(0, 1000, draw=0, paths=500_000)), error))


def shares(lead: float, deviation: float, below: float, runs: int = BOX) -> tuple[float, float, float, float]:
    """How often it ends in kill, undecided and try where a p below this is a try; and the mean number of seeds."""
    difference, p = simulate(lead, deviation, runs)
    tried, ended = smallest(difference, p) < below, (difference <= 0) | (p < below)
    killed = ~tried & (difference <= 0).any(0)
    seeds = np.where(ended.any(0), FIRST + ended.argmax(0), LAST)
    return killed.mean(), (~tried & ~killed).mean(), tried.mean(), seeds.mean()


def table() -> Table:
    """How often the screen ends in which word, and what an unadjusted t at every seed would do."""
    rows = []
    for deviation, lead in product((1, 2, 4), (-2, 0, 1, 2, 2.5)):
        *words, seeds = shares(lead, deviation, level(ERROR / 2))
        later = [shares(lead, deviation, level(ERROR / 2 / F))[2] for F in (2, 6, 12)]
        naive = (simulate(lead, deviation)[1] < ERROR).any(0).mean()
        rows.append([f"{deviation}", f"{lead}", *(f"{100 * x:.1f}" for x in words), f"{seeds:.1f}",
                     *(f"{100 * x:.1f}" for x in (*later, naive))])
    return Table("How often the screen ends in which word", (
        "Lead and deviation in those of the box. In percent of simulated functions, on one of two axes; the mean "
        "number of seeds; a try of the second, sixth and twelfth function; unadjusted: a one-sided t at 5% at every "
        f"seed from {FIRST} to {LAST}. A try is a p below {level(ERROR / 2):.5f}."),
        ["deviation", "lead", "kill", "undecided", "try", "seeds", "2nd", "6th", "12th", "unadjusted"], rows)


if __name__ == "__main__":
    print(table())
