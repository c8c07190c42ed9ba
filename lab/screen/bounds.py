"""The screen's third rule: which lead over RLOO's stored runs, the box, is a try, and which is killed.

After n seeds the lead is a difference of means. Few seeds know little of their own deviation, so each side's variance
starts from eight degrees of freedom at a deviation of one point, about that of all runs ever screened. Then

    try     p < 0.0133 n / 8 / F, one-sided: F functions have been screened
    kill    lead < max(0, 1.2 points - error): 1.2 points and more would seldom look so small
    kill    within the first run, where its lead so far is below -3 errors, at equal steps and at equal cost

How often it errs, on stored curves: simulation.py, which also has the rule before it.
"""
from typing import NamedTuple

import numpy as np

from plumbing.report import Estimate, student

EVERY = 20  # steps between two looks at the first run
FIRST, LAST = 2, 8  # seeds at the first look that can end in a try, and at the last one
LEVEL, AIM, BEHIND = 0.0133, 0.012, 3.0
PRIOR, DEVIATION = 8, 0.01  # degrees of freedom, and the deviation that they stand for


class Leads(NamedTuple):
    """Leads over a box, of one function or of many that are simulated: arrays (...)."""

    value: np.ndarray
    error: np.ndarray
    freedom: int
    seeds: int

    @property
    def p(self) -> np.ndarray:
        """The one-sided p (...) of a true lead of 0; at most 0.5."""
        return np.interp(self.value / self.error, *student(self.freedom)) / 2

    def within(self, share: float) -> np.ndarray:
        """So far (...) above and below lies this two-sided share of what the true lead may be."""
        t, further = student(self.freedom)
        return self.error * np.interp(share - 1, -further, t)

    @property
    def estimate(self) -> Estimate:
        """The lead of one function, with its 95% interval."""
        value, half = float(self.value), float(self.within(0.95))
        return Estimate(value, value - half, value + half, 2 * float(self.p))


def variance(x: np.ndarray) -> np.ndarray:
    """The variance (...) of values (..., n), as if PRIOR further ones had varied by DEVIATION."""
    squares = ((x - x.mean(-1, keepdims=True)) ** 2).sum(-1)
    return (PRIOR * DEVIATION**2 + squares) / (PRIOR + x.shape[-1] - 1)


def leads(own: np.ndarray, box: np.ndarray) -> Leads:
    """Of areas (..., n) over those of the box (..., runs)."""
    n, runs = own.shape[-1], box.shape[-1]
    error = np.sqrt(variance(own) / n + variance(box) / runs)
    return Leads(own.mean(-1) - box.mean(-1), error, PRIOR + min(n, runs) - 1, n)


def is_try(e: Leads, share: float = 1.0) -> np.ndarray:
    """Whether leads (...) are beyond the bound; share: of the error that is allowed."""
    return e.p < LEVEL * e.seeds / LAST * share


def is_futile(e: Leads) -> np.ndarray:
    """Whether leads (...) are too small to go on."""
    return e.value < np.maximum(0, AIM - e.error)


def is_behind(e: Leads) -> np.ndarray:
    """Whether leads (...) so far in a run are so low that its rest is not worth its time."""
    return e.value < -BEHIND * e.error
