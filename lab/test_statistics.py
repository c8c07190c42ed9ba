"""Correlations and their intervals against the textbook, loops and simulations, Holm's correction, cells read back."""
import math

import numpy as np
import pytest

from lab.statistics import RESAMPLES, bootstrap, cell, correlate, holm, jackknife, read_cell, resampled, share, sums
from plumbing.report import Estimate


def test_the_bootstrap_draws_whole_puzzles():
    """Guards against intervals over tokens: a loop puts together the tokens of the puzzles that were drawn."""
    rng, Q = np.random.default_rng(0), 7
    puzzle = np.repeat(np.arange(Q), rng.integers(3, 9, Q))
    x = rng.normal(size=len(puzzle)) + puzzle
    y = rng.normal(size=len(puzzle)) + 0.5 * x
    drawn, found = resampled(Q), []
    assert drawn.shape == (RESAMPLES, Q) and (drawn.sum(1) == Q).all()
    assert drawn.var(0) == pytest.approx(1 - 1 / Q, abs=0.15)
    for row in drawn:
        tokens = np.concatenate([np.flatnonzero(puzzle == q) for q in np.repeat(np.arange(Q), row)])
        found.append((np.corrcoef(x[tokens], y[tokens])[0, 1], x[tokens].sum() / y[tokens].sum()))
    (low_r, low), (high_r, high) = np.percentile(found, (2.5, 97.5), axis=0)
    assert list(correlate(x, y, puzzle)[:3]) == pytest.approx([np.corrcoef(x, y)[0, 1], low_r, high_r])
    assert list(bootstrap(share, sums(puzzle, x, y))[:3]) == pytest.approx([x.sum() / y.sum(), low, high])
    for one in bootstrap(share, sums(0 * puzzle, x, y)), bootstrap(share, sums(puzzle, 2 * y, y)):  # a puzzle; a share
        assert math.isfinite(one.value) and all(map(math.isnan, one[1:]))  # no interval from no spread
    assert math.isnan(jackknife(lambda use: 0.1, 5).high)
    for flat in (0 * x + 0.1, x), (x, 0 * x + 0.1):
        assert math.isnan(correlate(*flat, puzzle).value)


def test_holm_by_hand():
    """Of four the smallest must be below 0.05 / 4, the next below 0.05 / 3, and after the first miss none counts."""
    assert holm({"a": 0.016, "b": 0.012, "c": 0.03, "d": 0.04, "e": float("nan")}) == {"a", "b"}
    assert holm({"a": 0.013, "b": 0.014, "c": 0.001, "d": 0.9}) == {"a", "b", "c"}
    assert holm({"a": 0.03, "b": 0.03}) == holm({}) == set() and holm({"a": 0.2, "b": 0.3, "c": 0.001}) == {"c"}


def test_cells_are_read_back():
    """Guards against the text nan in a table."""
    estimates = [Estimate(1, 0.5, 1.5), Estimate(1), Estimate(float("nan"))]
    assert [cell(e) for e in estimates] == ["1.00 (0.50 to 1.50)", "1.00", ""]
    assert [read_cell(cell(e)) for e in estimates] == [pytest.approx(e, nan_ok=True) for e in estimates]
