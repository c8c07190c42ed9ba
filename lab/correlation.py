"""Rank correlation over methods: its interval, and how far it rests on single methods."""
import itertools

import numpy as np

from plumbing.report import Estimate


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks (n,) of values (n,), from 1; equal values share their mean rank."""
    _, index, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[index]


def spearman(x: np.ndarray, y: np.ndarray) -> Estimate:
    """Rank correlation of independent pairs (n,), (n,) with its 95% interval; NaN where either does not vary.

    The interval is that of Fisher's z with variance (1 + r^2 / 2) / (n - 3) (Bonett and Wright, 2000).
    """
    if min(len(set(x)), len(set(y))) < 2:
        return Estimate(float("nan"))
    r = float(np.corrcoef(ranks(x), ranks(y))[0, 1])
    if len(x) < 4 or abs(r) > 1 - 1e-12:
        return Estimate(r)
    z, half = np.arctanh(r), 1.96 * np.sqrt((1 + r**2 / 2) / (len(x) - 3))
    return Estimate(r, float(np.tanh(z - half)), float(np.tanh(z + half)))


def with_errors(x: list[Estimate], y: list[Estimate], draws: int = 4000) -> Estimate:
    """Rank correlation of estimates (n,), (n,): the median and the 95% interval over redrawn estimates.

    Each draw adds to every estimate a normal error as large as its interval says, and to Fisher's z of the correlation
    one for the choice of the n pairs.
    """
    if len(x) < 4:
        return Estimate(float("nan"))
    rng = np.random.default_rng(0)
    value, error = np.array([[[e.value for e in column], [(e.high - e.low) / 3.92 for e in column]]
                             for column in (x, y)]).transpose(1, 0, 2)  # (2, n) each
    found = []
    for noise in rng.normal(size=(draws, 2, len(x))):
        r = np.clip(np.corrcoef(*map(ranks, value + np.nan_to_num(error) * noise))[0, 1], -0.999, 0.999)
        found.append(np.arctanh(r) + rng.normal() * np.sqrt((1 + r**2 / 2) / (len(x) - 3)))
    return Estimate(*np.tanh(np.quantile(found, (0.5, 0.025, 0.975))))


def without_two(labels: list[str], x: np.ndarray, y: np.ndarray) -> str:
    """The lowest rank correlation of pairs (n,), (n,) after removing any two, and which two; empty for n < 5."""
    if len(x) < 5:
        return ""
    left = {pair: spearman(np.delete(x, pair), np.delete(y, pair)).value
            for pair in itertools.combinations(range(len(x)), 2)}
    pair = min(left, key=left.get)
    return f"{left[pair]:.2f} ({', '.join(labels[i].split()[0] for i in pair)})"
